//! Memory for frames that outlives the process.
//!
//! What programs have written waits for write-back here, and its bytes are in no context yet. If
//! the process is killed, the next one finds them: each frame has a note of the file's blocks in it
//! that the volume may not have.
//!
//! * HELD-1. A note says which blocks are dirty, or were taken by write-back and in which context
//!   they are mapped. It changes when the bytes have come ([`Frame::end`]), and goes before the
//!   frame does.
//! * HELD-2. Bytes and notes go only behind the commit of what the log has instead of them.
//! * HELD-3. A block that a note names is whole in the frame, and newer than that of any context
//!   before the one that is named. What lies outside of a frame's bytes is zeros.
//!
//! ```text
//! word 0         chunks in use at most
//! word 1         whether something had no room
//! CHUNKS_AT      of each chunk: 1 + its class, or 0
//! DATA_AT        chunks of 4 MiB, each of slots of one class: a note of 8 words (blocks, inode,
//!                folio, first byte and length, context, blocks that are to be), and the bytes
//! ```
//!
//! [`Frame::end`]: crate::cache::frame::Frame::end

use crate::api::Ino;
use ferry_device::SharedWords;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const FULL_AT: usize = 1;
const CHUNKS_AT: usize = 8;
/// 64 GiB. Tests never unmap that of a process that they kill.
const CHUNKS_MAX: usize = if cfg!(test) { 1 << 9 } else { 1 << 14 };
const DATA_AT: usize = (CHUNKS_AT + CHUNKS_MAX).next_multiple_of(512);
const CHUNK_WORDS: usize = 1 << 19;
/// So much memory of a chunk is brought in at once.
const STEP_WORDS: usize = 1 << 15;
/// Words of such memory.
pub(crate) const FRAMES_WORDS: usize = DATA_AT + CHUNKS_MAX * CHUNK_WORDS;

/// Words of the bytes of a slot, by class.
const CLASSES: [usize; 14] =
    [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192];

/// Slots of so many words are large.
const LARGE_WORDS: usize = 1024;

const NOTE_WORDS: usize = 8;
/// Words of a note.
const BLOCKS: usize = 0;
const INODE: usize = 1;
const FOLIO: usize = 2;
const SPAN: usize = 3;
const CONTEXT: usize = 4;
const NEXT: usize = 5;

/// The memory, and which of it is free.
#[derive(Debug)]
pub(crate) struct FrameMemory {
    words: Arc<SharedWords>,
    /// The first word.
    base: usize,
    classes: [Mutex<Class>; CLASSES.len()],
    chunks: Mutex<Numbers>,
    /// Words of large slots that are free and have their memory, and how many may.
    spare: AtomicUsize,
    spare_max: usize,
}

/// Numbers that are given out and come back.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    used: usize,
    free: Vec<usize>,
}

impl Numbers {
    /// A number below `most`, if there is one. `more` hears how many there are, if there is one
    /// more than ever.
    pub(crate) fn take(&mut self, most: usize, more: impl FnOnce(u64)) -> Option<usize> {
        self.free.pop().or_else(|| {
            let number = self.used;
            (number < most).then(|| {
                self.used += 1;
                more(self.used as u64);
                number
            })
        })
    }

    /// Nobody uses the number any more.
    pub(crate) fn give_back(&mut self, number: usize) {
        self.free.push(number);
    }
}

/// Chunks of one class.
#[derive(Debug, Default)]
struct Class {
    /// Those with room.
    free: BTreeMap<usize, FreeSlots>,
    /// How many slots of each are in use.
    used: HashMap<usize, usize>,
}

#[derive(Debug, Default)]
struct FreeSlots {
    /// Slots that were used before, and have their memory.
    again: Vec<usize>,
    /// Slots whose memory was given back.
    empty: Vec<usize>,
    /// Those from this one on never were: their words are zeros.
    fresh: usize,
}

/// The words of a frame.
#[derive(Debug)]
pub(crate) enum FrameWords {
    /// They end with the process.
    Heap(Box<[AtomicU64]>),
    /// They outlive it.
    Held(Slot),
}

/// A slot in the memory.
#[derive(Debug)]
pub(crate) struct Slot {
    memory: Arc<FrameMemory>,
    class: usize,
    chunk: usize,
    number: usize,
    /// Words of the frame.
    len: usize,
}

/// Words of a slot, with its note.
fn slot_words(class: usize) -> usize {
    NOTE_WORDS + CLASSES[class]
}

/// Words that count as spare while such a slot is free: the memory of a small one has pages with
/// others.
fn spare_words(class: usize) -> usize {
    if CLASSES[class] < LARGE_WORDS { 0 } else { slot_words(class) }
}

/// Where a chunk begins.
fn chunk_at(chunk: usize) -> usize {
    DATA_AT + chunk * CHUNK_WORDS
}

/// Where the note of a slot is.
fn slot_at(class: usize, chunk: usize, number: usize) -> usize {
    chunk_at(chunk) + number * slot_words(class)
}

/// Slots of a chunk.
fn slots(class: usize) -> usize {
    CHUNK_WORDS / slot_words(class)
}

impl FrameMemory {
    /// In `FRAMES_WORDS` words from `base` on, all of them 0. Large slots that are free may have so
    /// many bytes.
    pub(crate) fn new(words: Arc<SharedWords>, base: usize, spare_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            words,
            base,
            classes: Default::default(),
            chunks: Mutex::default(),
            spare: AtomicUsize::new(0),
            spare_max: spare_bytes / size_of::<u64>(),
        })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.words()[self.base + at]
    }

    /// So many words of zeros, if there is room.
    pub(crate) fn zeros(self: &Arc<Self>, len: usize) -> Option<FrameWords> {
        let class = CLASSES.iter().position(|words| *words >= len).filter(|_| len > 0)?;
        let (chunk, number, is_fresh) = self.take(class)?;
        if is_fresh {
            self.bring_in(class, chunk, number);
        }
        let slot = Slot { memory: Arc::clone(self), class, chunk, number, len };
        if !is_fresh {
            slot.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        Some(FrameWords::Held(slot))
    }

    /// A slot, and whether its words are zeros.
    fn take(&self, class: usize) -> Option<(usize, usize, bool)> {
        let mut of_class = self.classes[class].lock();
        if of_class.free.is_empty() {
            let chunk = self.take_chunk(class)?;
            of_class.free.insert(chunk, FreeSlots::default());
        }
        let mut first = of_class.free.first_entry()?;
        let (chunk, slots) = (*first.key(), first.get_mut());
        let (number, is_fresh) = if let Some(number) = slots.again.pop() {
            self.spare.fetch_sub(spare_words(class), Ordering::Relaxed);
            (number, false)
        } else if let Some(number) = slots.empty.pop() {
            (number, false)
        } else {
            slots.fresh += 1;
            (slots.fresh - 1, true)
        };
        if slots.again.is_empty() && slots.empty.is_empty() && slots.fresh == self::slots(class) {
            first.remove();
        }
        *of_class.used.entry(chunk).or_default() += 1;
        Some((chunk, number, is_fresh))
    }

    /// Brings in the next step of memory, if this is the first slot that uses it.
    fn bring_in(&self, class: usize, chunk: usize, number: usize) {
        let steps = |slots: usize| (slots * slot_words(class)).div_ceil(STEP_WORDS);
        let new = steps(number)..steps(number + 1);
        if !new.is_empty() {
            let first = self.base + chunk_at(chunk);
            self.words.bring_in(first + new.start * STEP_WORDS..first + new.end * STEP_WORDS);
        }
    }

    fn take_chunk(&self, class: usize) -> Option<usize> {
        let mut chunks = self.chunks.lock();
        let more = |used| self.word(0).store(used, Ordering::Release);
        let chunk = chunks.take(CHUNKS_MAX, more)?;
        self.word(CHUNKS_AT + chunk).store(class as u64 + 1, Ordering::Release);
        Some(chunk)
    }

    /// Something is dirty that has no room here: what is here is not all.
    pub(crate) fn is_full(&self) {
        if self.word(FULL_AT).swap(1, Ordering::AcqRel) == 0 {
            tracing::warn!(
                "memory of the cache is full: contents are lost if the process is killed"
            );
        }
    }

    /// Gives the memory of a slot back, if there is enough of it for the next ones. Nobody has the
    /// slot.
    fn make_empty(&self, class: usize, chunk: usize, number: usize) -> bool {
        let words = spare_words(class);
        if words == 0 || self.spare.fetch_add(words, Ordering::Relaxed) + words <= self.spare_max {
            return false;
        }
        let first = self.base + slot_at(class, chunk, number);
        let is_empty = self.words.make_zero(first + NOTE_WORDS..first + slot_words(class)).is_ok();
        if is_empty {
            self.spare.fetch_sub(words, Ordering::Relaxed);
        }
        is_empty
    }

    fn give_back(&self, class: usize, chunk: usize, number: usize) {
        let is_empty = self.make_empty(class, chunk, number);
        let mut of_class = self.classes[class].lock();
        let fresh = self::slots(class);
        let free = of_class
            .free
            .entry(chunk)
            .or_insert_with(|| FreeSlots { fresh, ..FreeSlots::default() });
        if is_empty { &mut free.empty } else { &mut free.again }.push(number);
        let Some(used) = of_class.used.get_mut(&chunk) else { return };
        *used -= 1;
        // One that is empty stays, for the next frame of this class.
        if *used > 0 || of_class.free.len() == 1 {
            return;
        }
        of_class.used.remove(&chunk);
        let free = of_class.free.remove(&chunk);
        drop(of_class);
        let spare = free.map_or(0, |free| free.again.len()) * spare_words(class);
        self.spare.fetch_sub(spare, Ordering::Relaxed);
        self.word(CHUNKS_AT + chunk).store(0, Ordering::Release);
        let first = self.base + chunk_at(chunk);
        match self.words.make_zero(first..first + CHUNK_WORDS) {
            Ok(()) => self.chunks.lock().give_back(chunk),
            Err(error) => tracing::warn!(%error, "memory of the cache is not given back"),
        }
    }
}

impl Slot {
    /// Where its note is.
    fn at(&self) -> usize {
        slot_at(self.class, self.chunk, self.number)
    }

    fn words(&self) -> &[AtomicU64] {
        let first = self.memory.base + self.at() + NOTE_WORDS;
        &self.memory.words.words()[first..first + self.len]
    }

    fn note(&self, word: usize) -> &AtomicU64 {
        self.memory.word(self.at() + word)
    }

    fn set_span(&self, first: usize) {
        let span = first as u64 | ((self.len * size_of::<u64>()) as u64) << 32;
        self.note(SPAN).store(span, Ordering::Relaxed);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.note(BLOCKS).store(0, Ordering::Release);
        self.note(NEXT).store(0, Ordering::Relaxed);
        self.memory.give_back(self.class, self.chunk, self.number);
    }
}

impl Deref for FrameWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Heap(words) => words,
            Self::Held(slot) => slot.words(),
        }
    }
}

/// What of a frame the volume may not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unsaved {
    /// Blocks of the folio that no context has.
    pub dirty: u16,
    /// Blocks that write-back has taken.
    pub taken: u16,
    /// The context that maps these; 0: none does yet.
    pub context: u64,
}

impl FrameWords {
    /// Whether they outlive the process.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self, Self::Held(_))
    }

    /// Bytes of memory that they take.
    pub(crate) fn memory(&self) -> usize {
        let words = match self {
            Self::Heap(words) => words.len(),
            Self::Held(slot) => slot_words(slot.class),
        };
        words * size_of::<u64>()
    }

    /// What [`FrameWords::publish`] is going to say.
    pub(crate) fn note(&self, ino: Ino, index: u64, first: usize, unsaved: Unsaved) {
        let Self::Held(slot) = self else { return };
        let blocks = u64::from(unsaved.dirty) | u64::from(unsaved.taken) << 16;
        slot.note(NEXT).store(blocks, Ordering::Relaxed);
        if blocks == 0 {
            return;
        }
        slot.note(INODE).store(ino, Ordering::Relaxed);
        slot.note(FOLIO).store(index, Ordering::Relaxed);
        slot.set_span(first);
        // Before what it maps counts as taken only.
        slot.note(CONTEXT).store(unsaved.context, Ordering::Release);
    }

    /// The bytes are there.
    pub(crate) fn publish(&self) {
        let Self::Held(slot) = self else { return };
        let blocks = slot.note(NEXT).load(Ordering::Relaxed);
        if slot.note(BLOCKS).load(Ordering::Relaxed) != blocks {
            slot.note(BLOCKS).store(blocks, Ordering::Release);
        }
    }

    /// Another frame has all of it.
    pub(crate) fn withdraw(&self) {
        let Self::Held(slot) = self else { return };
        slot.note(BLOCKS).store(0, Ordering::Release);
    }

    /// Says what `old` says.
    pub(crate) fn take_note(&self, old: &Self, first: usize) {
        let (Self::Held(slot), Self::Held(old)) = (self, old) else { return };
        for word in [INODE, FOLIO, CONTEXT, NEXT] {
            slot.note(word).store(old.note(word).load(Ordering::Relaxed), Ordering::Relaxed);
        }
        slot.set_span(first);
        self.publish();
    }
}

/// A frame that a process has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeftFrame {
    /// The number of its folio.
    pub index: u64,
    /// Blocks of the folio that the volume does not have.
    pub blocks: u16,
    first: usize,
    len: usize,
    at: usize,
}

/// The slots of chunks that a process has used: of each chunk its class, and where its slots begin.
fn left_chunks(words: &SharedWords, base: usize) -> impl Iterator<Item = (usize, usize)> {
    let get = move |at: usize| words.words()[base + at].load(Ordering::Acquire) as usize;
    let used = 0..get(0).min(CHUNKS_MAX);
    let of_class = move |chunk| {
        let class = get(CHUNKS_AT + chunk).checked_sub(1)?;
        (class < CLASSES.len()).then_some((class, base + chunk_at(chunk)))
    };
    used.filter_map(of_class)
}

/// What a process has left in this memory that the volume does not have, whose newest context is
/// `recovered`. `None`: it is not all.
pub(crate) fn left_frames(
    words: &SharedWords,
    base: usize,
    recovered: u64,
) -> Option<HashMap<Ino, Vec<LeftFrame>>> {
    let get = |at: usize| words.words()[at].load(Ordering::Acquire);
    if get(base + FULL_AT) != 0 {
        return None;
    }
    let mut left: HashMap<Ino, Vec<LeftFrame>> = HashMap::new();
    for (class, first) in left_chunks(words, base) {
        for at in (0..slots(class)).map(|number| first + number * slot_words(class)) {
            let (blocks, context) = (get(at + BLOCKS), get(at + CONTEXT));
            let (dirty, taken) = (blocks as u16, (blocks >> 16) as u16);
            let is_there = context != 0 && context <= recovered;
            let blocks = dirty | if is_there { 0 } else { taken };
            if blocks == 0 {
                continue;
            }
            let (span, bytes) = (get(at + SPAN), at + NOTE_WORDS);
            let (first, len) = (span as u32 as usize, (span >> 32) as usize);
            let frame = LeftFrame { index: get(at + FOLIO), blocks, first, len, at: bytes };
            left.entry(get(at + INODE)).or_default().push(frame);
        }
    }
    Some(left)
}

/// Gives back the memory of what a process has left that the volume has. Nobody else uses it.
pub(crate) fn give_back_saved(words: &SharedWords, base: usize) {
    for (class, first) in left_chunks(words, base) {
        let is_saved = |at: &usize| words.words()[at + BLOCKS].load(Ordering::Acquire) == 0;
        let slots: Vec<usize> =
            (0..slots(class)).map(|number| first + number * slot_words(class)).collect();
        for run in slots.chunk_by(|a, b| is_saved(a) == is_saved(b)).filter(|run| is_saved(&run[0]))
        {
            let run = run[0]..run[run.len() - 1] + slot_words(class);
            if let Err(error) = words.make_zero(run) {
                return tracing::warn!(%error, "memory of a process before is not given back");
            }
        }
    }
}

impl LeftFrame {
    /// Copies from byte `at` of the folio on, with which a word begins; zeros outside of what is
    /// held.
    pub(crate) fn copy_out(&self, words: &SharedWords, at: usize, out: &mut [u8]) {
        let end = at + out.len();
        out.fill(0);
        let held = at.max(self.first)..end.min(self.first + self.len);
        if held.is_empty() {
            return;
        }
        let first = self.at + (held.start - self.first) / size_of::<u64>();
        let out = out[held.start - at..held.end - at].chunks_mut(size_of::<u64>());
        for (bytes, word) in out.zip(&words.words()[first..]) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..bytes.len()]);
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn memory() -> (Arc<SharedWords>, Arc<FrameMemory>) {
        let words = Arc::new(SharedWords::new(FRAMES_WORDS).unwrap());
        (Arc::clone(&words), FrameMemory::new(words, 0, 1 << 20))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]

        #[test]
        fn slots_are_zeros_and_nobody_elses_and_what_is_noted_is_found(
            calls in vec((0..40_usize, 1..8193_usize, 1..u16::MAX), 1..400),
        ) {
            let (words, memory) = memory();
            let mut frames: HashMap<usize, (FrameWords, u64, u16)> = HashMap::new();
            for (number, (name, len, blocks)) in (1..).zip(calls) {
                if let Some((frame, fill, _)) = frames.remove(&name) {
                    prop_assert!(frame.iter().all(|word| word.load(Ordering::Relaxed) == fill));
                    continue;
                }
                let frame = memory.zeros(len).unwrap();
                prop_assert_eq!(frame.len(), len);
                prop_assert!(frame.iter().all(|word| word.load(Ordering::Relaxed) == 0));
                frame.iter().for_each(|word| word.store(number, Ordering::Relaxed));
                let unsaved = Unsaved { dirty: blocks, ..Unsaved::default() };
                frame.note(name as u64, number, 512, unsaved);
                frame.publish();
                frames.insert(name, (frame, number, blocks));
            }
            let left = left_frames(&words, 0, 9).unwrap();
            prop_assert_eq!(left.len(), frames.len());
            for (name, (frame, number, blocks)) in &frames {
                let [found] = &left[&(*name as u64)][..] else { panic!("{left:?}") };
                prop_assert_eq!((found.index, found.blocks), (*number, *blocks));
                let mut bytes = vec![1; frame.len() * 8 + 512 + 8];
                found.copy_out(&words, 0, &mut bytes);
                prop_assert!(bytes[..512].iter().all(|byte| *byte == 0));
                prop_assert_eq!(&bytes[512..520], &number.to_ne_bytes());
                prop_assert!(bytes[bytes.len() - 8..].iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn memory_is_given_back_of_what_the_volume_has_only() {
        let (words, memory) = memory();
        let mut frames = Vec::new();
        for number in 0..300 {
            let frame = memory.zeros([64, 8192, 1000][number % 3]).unwrap();
            frame.iter().for_each(|word| word.store(number as u64 + 1, Ordering::Relaxed));
            let dirty = u16::from(number % 7 == 0);
            frame.note(7, number as u64, 0, Unsaved { dirty, ..Unsaved::default() });
            frame.publish();
            frames.push(frame);
        }
        give_back_saved(&words, 0);
        assert_eq!(left_frames(&words, 0, 9).unwrap()[&7].len(), 300_usize.div_ceil(7));
        for (number, frame) in frames.iter().enumerate() {
            let fill = if number % 7 == 0 { number as u64 + 1 } else { 0 };
            assert!(frame.iter().all(|word| word.load(Ordering::Relaxed) == fill), "{number}");
        }
    }

    #[test]
    fn free_slots_of_other_sizes_have_no_more_memory_than_they_may() {
        let (words, memory) = memory();
        let bytes = || {
            let file = std::fs::File::from(words.file().unwrap());
            std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) as usize * 512
        };
        let mut stay = Vec::new();
        for len in [1024, 2048, 4096, 8192] {
            let fill = |frame: &FrameWords| {
                frame.iter().for_each(|word| word.store(1, Ordering::Relaxed));
            };
            let frames: Vec<_> = (0..1000).map(|_| memory.zeros(len).unwrap()).collect();
            frames.iter().for_each(fill);
            // One in each chunk stays, so no chunk comes back.
            stay.extend(frames.into_iter().step_by(40));
        }
        let of_stay: usize = stay.iter().map(FrameWords::memory).sum();
        // What is free, and steps of memory that were begun; notes have pages of their own.
        let most = of_stay + (1 << 20) + CLASSES.len() * STEP_WORDS * 8 + 4 * 1000 * 4096;
        assert!(bytes() < most, "{} {most}", bytes());
        // They are zeros again.
        for len in [1024, 2048, 4096, 8192] {
            let frames: Vec<_> = (0..1000).map(|_| memory.zeros(len).unwrap()).collect();
            assert!(frames.iter().all(|frame| frame[len - 1].load(Ordering::Relaxed) == 0));
        }
        assert_eq!(left_frames(&words, 0, 9), Some(HashMap::new()));
    }

    #[test]
    fn what_was_taken_counts_until_the_context_that_maps_it_is_there() {
        let (words, memory) = memory();
        let frame = memory.zeros(64).unwrap();
        let found = |recovered| {
            let left = left_frames(&words, 0, recovered).unwrap();
            left.get(&7).map_or(0, |frames| frames[0].blocks)
        };
        let note = |dirty, taken, context| {
            frame.note(7, 0, 0, Unsaved { dirty, taken, context });
            frame.publish();
        };
        note(3, 0, 0);
        assert_eq!(found(9), 3);
        note(1, 2, 0);
        assert_eq!(found(9), 3);
        note(1, 2, 5);
        assert_eq!((found(4), found(5)), (3, 1));
        note(0, 2, 5);
        assert_eq!((found(4), found(5)), (2, 0));
        frame.withdraw();
        assert_eq!(found(4), 0);
        memory.is_full();
        assert_eq!(left_frames(&words, 0, 9), None);
    }
}
