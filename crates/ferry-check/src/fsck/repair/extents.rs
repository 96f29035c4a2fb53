//! Extents: every block has one owner, lies where data can lie, and is mapped once. What cannot be
//! told for certain becomes a lost range, which reads as an error; nothing is ever shown as zeros,
//! or as another file's contents, instead.
//!
//! The unit of work is a window (`docs/format.md`: no extent crosses its border): its blocks are
//! laid out in a table, each extent is entered, doubts are settled by reading, and if anything had
//! to be changed the window's keys are written anew.

use super::blocks::{Blocks, Reading};
use super::edits::{Change, Writer, each_key};
use crate::fsck::inode::{SIZE_MAX, WINDOW};
use crate::fsck::report::{Code, Repair};
use crate::reader::Reader;
use ferry_fs::api::Ino;
use ferry_fs::extents::WINDOW_BLOCKS;
use ferry_fs::keys::{self, BLOCK, Extent, INODE_INLINE, InodeRecord, Key};
use ferry_journal::JournalError;
use std::collections::{BTreeMap, HashSet};

/// Extents are written with so many blocks at most.
const EXTENT_BLOCKS: u64 = 256;

/// Holes of a file that has more blocks than these are not marked as lost: 1 TiB.
const MARKED_MAX: u64 = (1 << 40) / BLOCK;

/// What is known of a block of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    Hole,
    Reserved,
    Data {
        dev: u64,
        crc: u32,
        /// Why it must be read before it is believed.
        suspect: Option<Code>,
    },
    /// Lost, now and for this reason, or (`None`) since earlier.
    Lost(Option<Code>),
}

/// A window of a file.
struct Window {
    slots: Vec<Slot>,
    dirty: bool,
    /// An extent that cannot be decoded starts here; it may reach up to the next.
    unknown_from: Option<usize>,
}

impl Window {
    fn new() -> Self {
        Self { slots: vec![Slot::Hole; WINDOW_BLOCKS as usize], dirty: false, unknown_from: None }
    }

    /// What nothing claims in `[from, to)` is lost; how many blocks that are.
    fn lose(&mut self, from: usize, to: usize, code: Code) -> u64 {
        let mut count = 0;
        for slot in self.slots[from..to.max(from)].iter_mut().filter(|slot| **slot == Slot::Hole) {
            *slot = Slot::Lost(Some(code));
            count += 1;
        }
        count
    }

    /// Enters an extent that is known to be sound.
    fn put(&mut self, at: usize, extent: &Extent) {
        for (i, slot) in self.slots.iter_mut().skip(at).take(extent.blocks() as usize).enumerate() {
            *slot = match extent {
                Extent::Unwritten { .. } => Slot::Reserved,
                Extent::Lost { .. } => Slot::Lost(None),
                Extent::Data { block, crcs } => {
                    Slot::Data { dev: block + i as u64, crc: crcs[i], suspect: None }
                }
            };
        }
    }
}

/// The file whose extents are being read.
struct File {
    ino: Ino,
    record: InodeRecord,
    /// Windows that are not finished: the current one, and those into which its extents reach.
    windows: BTreeMap<u64, Window>,
    /// Blocks of its extents as they are stored, and as they are now.
    seen: u64,
    blocks: u64,
    /// Those of them that are not behind its end.
    inside: u64,
    data_end: u64,
    /// Extents were dropped because the contents are in the record.
    dropped: bool,
}

/// The state of the pass over all extents.
struct Extents<'p, 'j> {
    writer: &'p mut Writer<'j>,
    blocks: &'p mut Blocks,
    reader: &'p mut Reader,
    intents: HashSet<Ino>,
    file: Option<File>,
    reading: Reading,
}

/// Runs the pass over the whole view.
pub(super) fn run(
    writer: &mut Writer<'_>,
    blocks: &mut Blocks,
    reader: &mut Reader,
    reading: Reading,
) -> Result<(), JournalError> {
    let journal = writer.journal();
    let mut intents = HashSet::new();
    journal.scan(&keys::intent(0), &keys::intent_end(), &mut |key, _| {
        if let Some(Key::Intent(ino)) = keys::parse(key) {
            intents.insert(ino);
        }
        true
    })?;
    let mut pass = Extents { writer, blocks, reader, intents, file: None, reading };
    each_key(
        journal,
        &keys::inode(0),
        &keys::inode_end(u64::MAX),
        |key, value| match keys::parse(key) {
            Some(Key::Inode(ino)) => pass.begin(ino, value),
            Some(Key::Extent(ino, offset)) => pass.extent(ino, offset, value),
            _ => Ok(()),
        },
    )?;
    pass.end()?;
    pass.writer.flush()
}

impl Extents<'_, '_> {
    fn begin(&mut self, ino: Ino, value: &[u8]) -> Result<(), JournalError> {
        self.end()?;
        if let Ok(record) = InodeRecord::decode(value) {
            let (seen, blocks, inside, data_end) = (0, 0, 0, 0);
            let windows = BTreeMap::new();
            self.file =
                Some(File { ino, record, windows, seen, blocks, inside, data_end, dropped: false });
        }
        Ok(())
    }

    fn extent(&mut self, ino: Ino, offset: u64, value: &[u8]) -> Result<(), JournalError> {
        let Some(file) = self.file.as_mut().filter(|file| file.ino == ino) else { return Ok(()) };
        let extent = Extent::decode(value);
        if file.record.flags & INODE_INLINE != 0 && !matches!(extent, Ok(Extent::Unwritten { .. }))
        {
            if !std::mem::replace(&mut file.dropped, true) {
                let what = "removed extents of a file whose contents are in its record";
                self.writer.say(
                    Repair::new(Code::ExtentOwner, what)
                        .of(ino)
                        .losing("what they held, if anything"),
                );
            }
            return self.writer.delete(&keys::extent(ino, offset));
        }
        if offset > SIZE_MAX {
            let what = format!("removed an extent at byte {offset}, where no file can have one");
            self.writer.say(
                Repair::new(Code::ExtentOverlap, what).of(ino).losing("what it held, if anything"),
            );
            return self.writer.delete(&keys::extent(ino, offset));
        }
        let index = offset / WINDOW;
        self.finish_before(index)?;
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        let at = (offset % WINDOW / BLOCK) as usize;
        let window = file.windows.entry(index).or_insert_with(Window::new);
        if let Some(from) = window.unknown_from.take() {
            file.seen += window.lose(from, at.max(from + 1), Code::BadRecord);
        }
        let Ok(extent) = extent else {
            window.dirty = true;
            window.unknown_from = Some(at);
            return Ok(());
        };
        file.seen = file.seen.saturating_add(extent.blocks());
        if !offset.is_multiple_of(BLOCK) {
            // Which bytes of the file they would be is unknown: all that it touches is lost, where
            // nothing else claims it.
            window.dirty = true;
            let len = usize::try_from(extent.blocks()).unwrap_or(usize::MAX).saturating_add(1);
            if !matches!(extent, Extent::Unwritten { .. }) {
                window.lose(
                    at,
                    at.saturating_add(len).min(WINDOW_BLOCKS as usize),
                    Code::ExtentOverlap,
                );
            }
            return Ok(());
        }
        let crosses = extent.blocks() > WINDOW_BLOCKS - at as u64;
        match extent {
            Extent::Unwritten { blocks } => {
                let to = at + blocks.min(WINDOW_BLOCKS - at as u64) as usize;
                window.dirty |= crosses;
                for slot in &mut window.slots[at..to] {
                    match slot {
                        Slot::Hole => *slot = Slot::Reserved,
                        _ => window.dirty = true,
                    }
                }
            }
            Extent::Lost { .. } if crosses => {
                window.dirty = true;
                window.unknown_from = Some(at);
            }
            Extent::Lost { blocks } => {
                for slot in &mut window.slots[at..at + blocks as usize] {
                    window.dirty |= *slot != Slot::Hole;
                    match slot {
                        Slot::Data { suspect, .. } => *suspect = Some(Code::ExtentOverlap),
                        _ => *slot = Slot::Lost(None),
                    }
                }
            }
            Extent::Data { block, crcs } => self.enter_data(index, at, block, &crcs),
        }
        Ok(())
    }

    /// Enters an extent with data, which may reach into the next windows.
    fn enter_data(&mut self, index: u64, at: usize, block: u64, crcs: &[u32]) {
        let Some(file) = self.file.as_mut() else { return };
        let crosses = at + crcs.len() > WINDOW_BLOCKS as usize;
        let torn = !self.blocks.in_one_segment(block, crcs.len() as u64);
        for (i, &crc) in crcs.iter().enumerate() {
            let dev = block.saturating_add(i as u64);
            let position = at + i;
            let window = index + (position as u64 / WINDOW_BLOCKS);
            let window = file.windows.entry(window).or_insert_with(Window::new);
            window.dirty |= crosses || torn;
            let slot = &mut window.slots[position % WINDOW_BLOCKS as usize];
            let suspect = torn.then_some(Code::ExtentLocation);
            let new = Slot::Data { dev, crc, suspect };
            *slot = match *slot {
                Slot::Hole => new,
                Slot::Reserved => {
                    window.dirty = true;
                    new
                }
                Slot::Lost(_) => {
                    window.dirty = true;
                    Slot::Data { dev, crc, suspect: Some(Code::ExtentOverlap) }
                }
                Slot::Data { dev: there, crc: theirs, .. } if (there, theirs) == (dev, crc) => {
                    window.dirty = true;
                    new
                }
                Slot::Data { dev: there, crc: theirs, .. } => {
                    window.dirty = true;
                    let (a, b) = (self.blocks.holds_data(there), self.blocks.holds_data(dev));
                    let a = a && self.reader.matches(there, theirs);
                    let b = b && self.reader.matches(dev, crc);
                    match (a, b) {
                        (true, true) if crc != theirs => Slot::Lost(Some(Code::ExtentOverlap)),
                        (true, _) => Slot::Data {
                            dev: there,
                            crc: theirs,
                            suspect: Some(Code::ExtentOverlap),
                        },
                        (false, true) => {
                            Slot::Data { dev, crc, suspect: Some(Code::ExtentOverlap) }
                        }
                        (false, false) => Slot::Lost(Some(Code::ExtentOverlap)),
                    }
                }
            };
        }
    }

    /// All extents that start before window `index` were seen.
    fn finish_before(&mut self, index: u64) -> Result<(), JournalError> {
        loop {
            let Some(file) = self.file.as_mut() else { return Ok(()) };
            let Some(entry) = file.windows.first_entry().filter(|entry| *entry.key() < index)
            else {
                return Ok(());
            };
            let (number, window) = entry.remove_entry();
            self.finish_window(number, window)?;
        }
    }

    fn finish_window(&mut self, index: u64, mut window: Window) -> Result<(), JournalError> {
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        let (ino, first) = (file.ino, index * WINDOW_BLOCKS);
        if let Some(from) = window.unknown_from.take() {
            file.seen += window.lose(from, WINDOW_BLOCKS as usize, Code::BadRecord);
        }
        let end = file.record.size.div_ceil(BLOCK);
        let mut others = false;
        for (at, slot) in window.slots.iter_mut().enumerate() {
            let before = *slot;
            *slot = match before {
                _ if first * BLOCK > SIZE_MAX => Slot::Hole,
                Slot::Lost(Some(_)) if first + at as u64 >= end => Slot::Hole,
                Slot::Data { dev, crc, suspect } => {
                    let inside = first + (at as u64) < end;
                    match self.blocks.judge(self.reader, (dev, crc, inside), suspect, self.reading)
                    {
                        Ok(()) => Slot::Data { dev, crc, suspect: None },
                        // It is another's, and no part of this file.
                        Err(Code::BlockShared) if !inside => {
                            others = true;
                            Slot::Hole
                        }
                        Err(code) => Slot::Lost(Some(code)),
                    }
                }
                other => other,
            };
            window.dirty |= matches!(
                (before, *slot),
                (_, Slot::Lost(Some(_))) | (Slot::Data { .. }, Slot::Hole)
            );
            match slot {
                Slot::Hole => continue,
                Slot::Data { .. } => file.data_end = (first + at as u64 + 1) * BLOCK,
                _ => {}
            }
            file.blocks += 1;
            file.inside += u64::from(first + (at as u64) < end);
        }
        if !window.dirty {
            return Ok(());
        }
        let said = say_losses(self.writer, ino, first, &window.slots);
        if !said {
            let byte = first * BLOCK;
            let (code, what) = if others {
                (
                    Code::BlockShared,
                    format!(
                        "removed extents behind the file's end, around byte {byte}: the blocks are another's"
                    ),
                )
            } else {
                (
                    Code::ExtentOverlap,
                    format!(
                        "sorted out extents that overlapped or were misplaced around byte {byte}"
                    ),
                )
            };
            self.writer.say(Repair::new(code, what).of(ino));
        }
        self.rewrite(ino, first, &window.slots)
    }

    /// Puts a window's extents anew: what differs from what is stored.
    fn rewrite(&mut self, ino: Ino, first: u64, slots: &[Slot]) -> Result<(), JournalError> {
        let mut wanted: BTreeMap<Vec<u8>, Vec<u8>> = self
            .runs(slots)
            .into_iter()
            .map(|(at, extent)| (keys::extent(ino, (first + at as u64) * BLOCK), extent.encode()))
            .collect();
        let (from, to) =
            (keys::extent(ino, first * BLOCK), keys::extent(ino, (first + WINDOW_BLOCKS) * BLOCK));
        let mut changes: Vec<Change> = Vec::new();
        self.writer.flush()?;
        self.writer.journal().scan(&from, &to, &mut |key, value| {
            match wanted.remove(key) {
                Some(new) if new[..] == value[..] => {}
                new => changes.push((key.to_vec(), new)),
            }
            true
        })?;
        changes.extend(wanted.into_iter().map(|(key, value)| (key, Some(value))));
        // What is added stands before what goes: a repair that is killed between two transactions
        // forgets nothing.
        changes.sort_by_key(|(_, value)| value.is_none());
        self.writer.change(changes)
    }

    /// The extents that a table of blocks makes.
    fn runs(&self, slots: &[Slot]) -> Vec<(usize, Extent)> {
        let mut out: Vec<(usize, Extent)> = Vec::new();
        for (at, slot) in slots.iter().enumerate() {
            let last =
                out.last_mut().filter(|(from, extent)| *from as u64 + extent.blocks() == at as u64);
            match (slot, last) {
                (Slot::Hole, _) => {}
                (Slot::Reserved, Some((_, Extent::Unwritten { blocks }))) => *blocks += 1,
                (Slot::Lost(_), Some((_, Extent::Lost { blocks }))) => *blocks += 1,
                (Slot::Data { dev, crc, .. }, Some((_, Extent::Data { block, crcs })))
                    if *block + crcs.len() as u64 == *dev
                        && (crcs.len() as u64) < EXTENT_BLOCKS
                        && self.blocks.in_one_segment(*block, crcs.len() as u64 + 1) =>
                {
                    crcs.push(*crc);
                }
                (Slot::Reserved, _) => out.push((at, Extent::Unwritten { blocks: 1 })),
                (Slot::Lost(_), _) => out.push((at, Extent::Lost { blocks: 1 })),
                (Slot::Data { dev, crc, .. }, _) => {
                    out.push((at, Extent::Data { block: *dev, crcs: vec![*crc] }));
                }
            }
        }
        out
    }

    /// All extents of the file were seen: its record says what they say.
    fn end(&mut self) -> Result<(), JournalError> {
        self.finish_before(u64::MAX)?;
        let Some(file) = self.file.take() else { return Ok(()) };
        let mut record = file.record;
        let inline = record.flags & INODE_INLINE != 0;
        let regular = record.mode & libc::S_IFMT == libc::S_IFREG;
        let beyond = file.data_end > record.size.saturating_add(BLOCK - 1) / BLOCK * BLOCK;
        let mut changed = false;
        if regular && !inline && beyond && !self.intents.contains(&file.ino) {
            let what = format!(
                "the file ended at byte {} before the last of its data; it ends at {} now",
                record.size, file.data_end
            );
            let repair = Repair::new(Code::ExtentBeyondEnd, what).of(file.ino);
            self.writer
                .say(repair.then("look whether what stands behind its old end belongs to it"));
            record.size = file.data_end.min(SIZE_MAX);
            changed = true;
        }
        let end = record.size.div_ceil(BLOCK);
        let missing = record.blocks > file.seen && regular && !inline && record.nlink > 0;
        let mut holes = if missing { end.saturating_sub(file.inside) } else { 0 };
        if holes > 0 && end > MARKED_MAX {
            let what = "the file lacks blocks that its record counts, and is too large to mark all its holes as lost";
            let repair = Repair::new(Code::BlockCount, what)
                .of(file.ino)
                .losing("some of what reads as zeros now");
            self.writer.say(repair.then("restore the file from a backup"));
            holes = 0;
        }
        if record.blocks != file.blocks {
            if holes == 0 && record.blocks != u64::MAX {
                let what = format!("its block count was {}, it is {}", record.blocks, file.blocks);
                self.writer.say(Repair::new(Code::BlockCount, what).of(file.ino));
            }
            record.blocks = file.blocks.saturating_add(holes);
            changed = true;
        }
        if changed {
            self.writer.put(keys::inode(file.ino), record.encode())?;
        }
        if holes > 0 { self.lose_holes(file.ino, end) } else { Ok(()) }
    }

    /// The record counts more blocks than there are: some of what looks like holes had contents,
    /// and which is unknown. The count is raised before, so that a repair that is killed in between
    /// goes on here.
    fn lose_holes(&mut self, ino: Ino, end: u64) -> Result<(), JournalError> {
        for first in (0..end).step_by(WINDOW_BLOCKS as usize) {
            self.writer.flush()?;
            let mut window = Window::new();
            let (from, to) = (
                keys::extent(ino, first * BLOCK),
                keys::extent(ino, (first + WINDOW_BLOCKS) * BLOCK),
            );
            self.writer.journal().scan(&from, &to, &mut |key, value| {
                if let (Some(Key::Extent(_, offset)), Ok(extent)) =
                    (keys::parse(key), Extent::decode(value))
                {
                    window.put((offset / BLOCK - first) as usize, &extent);
                }
                true
            })?;
            window.lose(0, (end - first).min(WINDOW_BLOCKS) as usize, Code::BlockCount);
            if say_losses(self.writer, ino, first, &window.slots) {
                self.rewrite(ino, first, &window.slots)?;
            }
        }
        Ok(())
    }
}

/// Says which ranges of a window are lost now; `false` when none is.
fn say_losses(writer: &mut Writer<'_>, ino: Ino, first: u64, slots: &[Slot]) -> bool {
    let (mut at, mut said) = (0, false);
    while at < slots.len() {
        let Slot::Lost(Some(code)) = slots[at] else {
            at += 1;
            continue;
        };
        let len = slots[at..].iter().take_while(|slot| **slot == Slot::Lost(Some(code))).count();
        let (from, to) = ((first + at as u64) * BLOCK, (first + (at + len) as u64) * BLOCK);
        let what = "marked a range of a file as lost: reading it fails with EIO from now on";
        let repair = Repair::new(code, what).of(ino).losing(format!("bytes {from} to {to}"));
        writer.say(repair.then("restore the file from a backup, or write the range anew"));
        at += len;
        said = true;
    }
    said
}
