//! A frame: the bytes of a folio, which readers copy without a lock.
//!
//! It is a sequence lock. A writer makes the number odd, copies, and makes it even again;
//! a reader samples the number, copies, and looks whether it is still the same (H. Boehm, "Can
//! seqlocks get along with programming language memory models?", 2012). Bytes are relaxed atomics,
//! eight at a time, so that a copy that must be thrown away is no data race. A change that covers
//! several frames makes all numbers odd before its first byte and even behind its last; a reader
//! samples all before its first byte and checks all behind its last. So it sees all of the change
//! or nothing of it.
//!
//! Only one thread changes a frame at a time; `docs/locking.md` says why. A frame that no folio has
//! any more stays odd.

use crate::cache::node::Node;
use crate::sync::{
    AtomicU32, AtomicU64, FrameWords, Mutex, MutexGuard, Ordering, Unsaved, fence, lock, try_lock,
    zeros,
};
use std::sync::Arc;

/// Bytes in a full folio.
pub const FOLIO_BYTES: usize = 64 << 10;

const WORD: usize = size_of::<u64>();

/// The bytes of one folio, or of a part of it.
pub struct Frame {
    /// The folio's number.
    pub index: u64,
    /// Where the bytes begin within the folio: at a block.
    pub first: usize,
    /// Even: steady. Odd: being changed, or given up.
    seq: AtomicU64,
    /// Blocks of the folio that may be read.
    valid: AtomicU32,
    /// What eviction knows of the folio.
    node: Arc<Node>,
    /// Held by a writer that shares the inode lock, while it copies. Others take it to wait for
    /// that, and hold nothing then.
    busy: Mutex<()>,
    words: FrameWords,
}

impl Frame {
    /// `len` zeros from byte `first` of folio `index` on. `len` is a multiple of 8. `node` is the
    /// folio's.
    pub fn new(index: u64, first: usize, len: usize, node: Arc<Node>) -> Self {
        checked!(len.is_multiple_of(WORD), "frames are made of words");
        Self::of(index, first, zeros(len / WORD), node)
    }

    /// The same with these words, which are zeros.
    pub fn of(index: u64, first: usize, words: FrameWords, node: Arc<Node>) -> Self {
        Self {
            index,
            first,
            seq: AtomicU64::new(0),
            valid: AtomicU32::new(0),
            node,
            busy: Mutex::new(()),
            words,
        }
    }

    /// Bytes that it holds.
    pub fn len(&self) -> usize {
        self.words.len() * WORD
    }

    /// Bytes of memory.
    pub fn memory(&self) -> usize {
        self.words.memory() + size_of::<Self>() + 16
    }

    /// The number to check against after copying; `None`: it is being changed, or given up.
    pub fn sample(&self) -> Option<u64> {
        let seq = self.seq.load(Ordering::Acquire);
        seq.is_multiple_of(2).then_some(seq)
    }

    /// Nothing has changed since `seq` was sampled. [`copied`] comes between the copies and this.
    pub fn is_still(&self, seq: u64) -> bool {
        self.seq.load(Ordering::Relaxed) == seq
    }

    /// Somebody copies into it now, or it was given up.
    pub fn is_changing(&self) -> bool {
        self.seq.load(Ordering::Acquire) % 2 == 1
    }

    /// A change of bytes begins.
    pub fn begin(&self) {
        let seq = self.seq.load(Ordering::Relaxed);
        checked!(seq.is_multiple_of(2), "two change a frame at a time");
        self.seq.store(seq + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// The change is over.
    pub fn end(&self) {
        let seq = self.seq.load(Ordering::Relaxed);
        checked!(seq % 2 == 1, "a change ends that did not begin");
        self.words.publish();
        self.seq.store(seq + 1, Ordering::Release);
    }

    /// The folio has it no more: a thread that still reads it must look again.
    pub fn give_up(&self) {
        let seq = self.seq.load(Ordering::Relaxed);
        self.seq.store(seq | 1, Ordering::Release);
        self.words.withdraw();
    }

    /// Whether its bytes outlive the process.
    pub fn is_held(&self) -> bool {
        self.words.is_held()
    }

    /// Notes for the next process what of these bytes the volume may not have: once a change of
    /// them that is under way has ended.
    pub fn note(&self, ino: u64, unsaved: Unsaved) {
        self.words.note(ino, self.index, self.first, unsaved);
        if !self.is_changing() {
            self.words.publish();
        }
    }

    /// Reserves it for a writer that shares the inode lock.
    pub fn reserve(&self) -> Option<MutexGuard<'_, ()>> {
        try_lock(&self.busy)
    }

    /// Waits for the writer that copies into it. The caller holds no lock that a writer may want.
    pub fn wait(&self) {
        drop(lock(&self.busy));
    }

    /// Blocks that may be read.
    pub fn valid(&self) -> u16 {
        self.valid.load(Ordering::Acquire) as u16
    }

    /// Says which blocks may be read.
    pub fn set_valid(&self, blocks: u16) {
        self.valid.store(blocks.into(), Ordering::Release);
    }

    /// What eviction knows of the folio.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Copies from byte `at` of the folio on; zeros outside of what is held.
    pub fn copy_out(&self, at: usize, out: &mut [u8]) {
        let before = self.first.saturating_sub(at).min(out.len());
        let (zeros, out) = out.split_at_mut(before);
        zeros.fill(0);
        let from = (at + before).saturating_sub(self.first).min(self.len());
        let (held, behind) = out.split_at_mut((self.len() - from).min(out.len()));
        self.load(from, held);
        behind.fill(0);
    }

    /// Copies `data` to byte `at` of the folio, which must be held.
    pub fn copy_in(&self, at: usize, data: &[u8]) {
        self.store(at - self.first, data);
    }

    /// Zeroes bytes `[from, to)` of the folio, as far as they are held.
    pub fn zero(&self, from: usize, to: usize) {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut from = from.saturating_sub(self.first);
        let to = to.saturating_sub(self.first).min(self.len());
        while from < to {
            let len = (to - from).min(ZEROS.len());
            self.store(from, &ZEROS[..len]);
            from += len;
        }
    }

    /// Takes over what `old`, whose bytes lie inside, holds.
    pub fn take_over(&self, old: &Frame) {
        let from = (old.first - self.first) / WORD;
        for (to, from) in self.words[from..].iter().zip(old.words.iter()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.set_valid(old.valid());
        self.words.take_note(&old.words, self.first);
    }

    fn load(&self, from: usize, out: &mut [u8]) {
        let (word, inside) = (from / WORD, from % WORD);
        let (head, out) =
            out.split_at_mut(if inside == 0 { 0 } else { (WORD - inside).min(out.len()) });
        if !head.is_empty() {
            let bytes = self.words[word].load(Ordering::Relaxed).to_ne_bytes();
            head.copy_from_slice(&bytes[inside..inside + head.len()]);
        }
        let (body, tail) = out.as_chunks_mut::<WORD>();
        let words = &self.words[from.div_ceil(WORD)..];
        // Eight at a time: the compiler does not unroll loops over atomics.
        let (out8, out1) = body.as_chunks_mut::<8>();
        let (words8, words1) = words[..out8.len() * 8 + out1.len()].as_chunks::<8>();
        for (to, from) in out8.iter_mut().zip(words8) {
            for i in 0..8 {
                to[i] = from[i].load(Ordering::Relaxed).to_ne_bytes();
            }
        }
        for (to, from) in out1.iter_mut().zip(words1) {
            *to = from.load(Ordering::Relaxed).to_ne_bytes();
        }
        if !tail.is_empty() {
            let bytes = words[body.len()].load(Ordering::Relaxed).to_ne_bytes();
            tail.copy_from_slice(&bytes[..tail.len()]);
        }
    }

    fn store(&self, from: usize, data: &[u8]) {
        let (word, inside) = (from / WORD, from % WORD);
        let (head, data) =
            data.split_at(if inside == 0 { 0 } else { (WORD - inside).min(data.len()) });
        if !head.is_empty() {
            self.store_part(word, inside, head);
        }
        let (body, tail) = data.as_chunks::<WORD>();
        let words = &self.words[from.div_ceil(WORD)..];
        let (data8, data1) = body.as_chunks::<8>();
        let (words8, words1) = words[..body.len()].as_chunks::<8>();
        for (to, from) in words8.iter().zip(data8) {
            for i in 0..8 {
                to[i].store(u64::from_ne_bytes(from[i]), Ordering::Relaxed);
            }
        }
        for (to, from) in words1.iter().zip(data1) {
            to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
        }
        if !tail.is_empty() {
            self.store_part(from.div_ceil(WORD) + body.len(), 0, tail);
        }
    }

    /// A part of a word: nobody else changes the rest of it meanwhile.
    fn store_part(&self, word: usize, inside: usize, data: &[u8]) {
        let mut bytes = self.words[word].load(Ordering::Relaxed).to_ne_bytes();
        bytes[inside..inside + data.len()].copy_from_slice(data);
        self.words[word].store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
    }
}

/// Comes behind a reader's copies and before its checks.
pub fn copied() {
    fence(Ordering::Acquire);
}
