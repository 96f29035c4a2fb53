//! Where the blocks of a file are: windows of 4 MiB as flat tables, and the keys that an edit of
//! one changes.
//!
//! A window is a cache of the journal's view and nothing more: it may be dropped at any time at
//! which nobody edits the file's extents, and is read again when wanted. No extent crosses the
//! border of a window.

use crate::api::Ino;
use crate::error::FsError;
use crate::keys::{self, BLOCK, Extent, Key};
use ferry_journal::Journal;

/// Blocks in a window.
pub const WINDOW_BLOCKS: u64 = 1024;
/// Longest extent that is written, in blocks: what an overwrite of one block in the middle logs
/// again is bounded by it.
const EXTENT_BLOCKS: usize = 256;
/// Neighbours on the device are joined into one extent up to this many blocks.
const MERGE_BLOCKS: usize = 64;

/// Device block number of what is not mapped (block 0 is the superblock's).
const HOLE: u64 = 0;
/// Device block number of what is promised but not written.
const RESERVED: u64 = u64::MAX;
/// Device block number of what was lost to damage.
const LOST: u64 = u64::MAX - 1;

/// No volume has data behind this block. A place behind the end of this one is found out by the
/// device.
const PLACE_MAX: u64 = i64::MAX as u64 / BLOCK;

/// Where one block of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it reads as zeros.
    Hole,
    /// Space is promised; it reads as zeros.
    Reserved,
    /// Its contents were lost to damage: it cannot be read, and takes no space.
    Lost,
    /// On the device: block number and CRC32C.
    Data(u64, u32),
}

#[derive(Clone, Copy)]
struct Slot {
    dev: u64,
    crc: u32,
    /// An extent starts here.
    start: bool,
}

const EMPTY: Slot = Slot { dev: HOLE, crc: 0, start: false };

/// The extents of [`WINDOW_BLOCKS`] blocks of a file. Blocks are counted from the window's start.
#[derive(Clone, Default)]
pub struct Window {
    /// Shorter than the window where the rest is a hole.
    slots: Vec<Slot>,
}

/// What an edit took away and added, in blocks.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    /// Change of live blocks: so many from this device block on became live, or (negative) are so
    /// no more.
    pub live: Vec<(u64, i64)>,
    /// Change of promised blocks.
    pub reserved: i64,
    /// Change of lost blocks.
    pub lost: i64,
}

impl Delta {
    /// Block `dev` is dead.
    fn dead(&mut self, dev: u64) {
        match self.live.last_mut() {
            Some((from, by)) if *by < 0 && *from + by.unsigned_abs() == dev => *by -= 1,
            _ => self.live.push((dev, -1)),
        }
    }
    /// Change of the blocks that the file's record counts.
    pub fn counted(&self) -> i64 {
        self.mapped() + self.lost
    }
    /// Change of blocks that take space.
    pub fn mapped(&self) -> i64 {
        self.reserved + self.live.iter().map(|(_, by)| by).sum::<i64>()
    }
    /// Adds another edit's.
    pub fn add(&mut self, other: &Delta) {
        self.live.extend_from_slice(&other.live);
        self.reserved += other.reserved;
        self.lost += other.lost;
    }
}

/// Keys to put (or delete, where the value is `None`).
pub type Changes = Vec<(Vec<u8>, Option<Vec<u8>>)>;

impl Window {
    /// Reads window `index` of `ino` from the journal.
    pub fn load(journal: &Journal, ino: Ino, index: u64) -> Result<Self, FsError> {
        let (from, to) = (index * WINDOW_BLOCKS * BLOCK, (index + 1) * WINDOW_BLOCKS * BLOCK);
        let mut window = Self::default();
        let mut bad = None;
        journal.scan(&keys::extent(ino, from), &keys::extent(ino, to), &mut |key, value| {
            match window.load_extent(from, key, value) {
                Ok(()) => true,
                Err(detail) => {
                    bad = Some(detail);
                    false
                }
            }
        })?;
        match bad {
            None => Ok(window),
            Some(detail) => Err(FsError::Data { ino, offset: from, detail }),
        }
    }

    fn load_extent(&mut self, from: u64, key: &[u8], value: &[u8]) -> Result<(), String> {
        let Some(Key::Extent(_, offset)) = keys::parse(key) else {
            return Err("a key among the extents is none".into());
        };
        let extent = Extent::decode(value).map_err(|e| e.to_string())?;
        let start = (offset - from) / BLOCK;
        if offset % BLOCK != 0
            || start < self.slots.len() as u64
            || extent.blocks() > WINDOW_BLOCKS - start
        {
            return Err(format!(
                "the extent at byte {offset} overlaps another, or its window's end"
            ));
        }
        self.slots.resize(start as usize, EMPTY);
        match extent {
            Extent::Data { block, crcs } => {
                if block == HOLE || block > PLACE_MAX {
                    return Err(format!(
                        "the extent at byte {offset} lies where no volume has data"
                    ));
                }
                let slots =
                    (block..).zip(&crcs).map(|(dev, &crc)| Slot { dev, crc, start: dev == block });
                self.slots.extend(slots);
            }
            Extent::Reserved { blocks } => self.extend_without_data(RESERVED, blocks),
            Extent::Lost { blocks } => self.extend_without_data(LOST, blocks),
        }
        Ok(())
    }

    fn extend_without_data(&mut self, dev: u64, blocks: u64) {
        self.slots.extend((0..blocks).map(|i| Slot { dev, crc: 0, start: i == 0 }));
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>() + 64
    }

    /// Where block `at` is.
    pub fn place(&self, at: u64) -> Place {
        match self.slots.get(at as usize) {
            None | Some(Slot { dev: HOLE, .. }) => Place::Hole,
            Some(Slot { dev: RESERVED, .. }) => Place::Reserved,
            Some(Slot { dev: LOST, .. }) => Place::Lost,
            Some(slot) => Place::Data(slot.dev, slot.crc),
        }
    }

    /// The first mapped block at or behind `at`.
    pub fn next_mapped(&self, at: u64) -> Option<u64> {
        (at..self.slots.len() as u64).find(|&i| self.slots[i as usize].dev != HOLE)
    }

    /// End of the extent that starts at `start`.
    fn extent_end(&self, start: usize) -> usize {
        let rest = &self.slots[start + 1..];
        start + 1 + rest.iter().position(|s| s.start || s.dev == HOLE).unwrap_or(rest.len())
    }

    /// Start of the extent that holds mapped block `at`.
    fn extent_start(&self, at: usize) -> usize {
        self.slots[..=at].iter().rposition(|s| s.start).unwrap_or(at)
    }

    fn extent(&self, start: usize) -> Extent {
        let slots = &self.slots[start..self.extent_end(start)];
        match slots[0].dev {
            RESERVED => Extent::Reserved { blocks: slots.len() as u64 },
            LOST => Extent::Lost { blocks: slots.len() as u64 },
            block => Extent::Data { block, crcs: slots.iter().map(|s| s.crc).collect() },
        }
    }
}

/// A change of one window: the new window, and what it does to keys and counts.
pub struct Edit {
    /// Number of the window.
    pub index: u64,
    /// As it will be.
    pub window: Window,
    /// Positions whose extents may have changed, with whether one started there before.
    touched: Vec<(usize, bool)>,
    /// What it did to the counts.
    pub delta: Delta,
}

impl Edit {
    /// Starts to change `window`.
    pub fn new(index: u64, window: Window) -> Self {
        Self { index, window, touched: Vec::new(), delta: Delta::default() }
    }

    fn touch(&mut self, at: usize) {
        self.touched.push((at, self.window.slots[at].start));
    }

    /// Cuts `[at, to)` out: afterwards it is a hole, and no extent crosses its borders.
    fn clear(&mut self, at: usize, to: usize) {
        let to = to.min(self.window.slots.len());
        if at >= to {
            return;
        }
        let first = self.window.slots[at];
        if first.dev != HOLE && !first.start {
            self.touch(self.window.extent_start(at));
        }
        if let Some(&next) = self.window.slots.get(to)
            && next.dev != HOLE
            && !next.start
        {
            self.touch(to);
            self.window.slots[to].start = true;
        }
        for i in at..to {
            let slot = self.window.slots[i];
            match slot.dev {
                HOLE => {}
                RESERVED => self.delta.reserved -= 1,
                LOST => self.delta.lost -= 1,
                dev => self.delta.dead(dev),
            }
            if slot.start {
                self.touch(i);
            }
            self.window.slots[i] = EMPTY;
        }
    }

    /// Drops what `[at, to)` maps.
    pub fn drop_range(&mut self, at: u64, to: u64) {
        self.clear(at as usize, to as usize);
        while self.window.slots.last().is_some_and(|s| s.dev == HOLE) {
            self.window.slots.pop();
        }
    }

    /// Maps blocks from `at` on to the device from block `dev` on.
    pub fn map(&mut self, at: u64, dev: u64, crcs: &[u32]) {
        let (from, to) = (at as usize, at as usize + crcs.len());
        self.clear(from, to);
        self.room(to);
        let joined = self.joins(from, dev, crcs.len());
        for (i, (&crc, dev)) in crcs.iter().zip(dev..).enumerate() {
            let start = i % EXTENT_BLOCKS == 0 && !(i == 0 && joined);
            if start {
                self.touch(from + i);
            }
            self.window.slots[from + i] = Slot { dev, crc, start };
        }
        self.delta.live.push((dev, crcs.len() as i64));
        if joined {
            self.touch(self.window.extent_start(from));
        }
    }

    /// Promises the holes in `[at, to)` that `skip` does not name.
    pub fn promise(&mut self, at: u64, to: u64, skip: &dyn Fn(u64) -> bool) {
        self.room(to as usize);
        let mut in_run = false;
        for i in at as usize..to as usize {
            if self.window.slots[i].dev != HOLE || skip(i as u64) {
                in_run = false;
                continue;
            }
            let start = i == 0 || self.window.slots[i - 1].dev != RESERVED;
            if start {
                self.touch(i);
            } else if !in_run {
                self.touch(self.window.extent_start(i - 1));
            }
            self.window.slots[i] = Slot { dev: RESERVED, crc: 0, start };
            self.delta.reserved += 1;
            in_run = true;
        }
    }

    fn room(&mut self, to: usize) {
        if self.window.slots.len() < to {
            self.window.slots.resize(to, EMPTY);
        }
    }

    /// The extent before `from` goes on at device block `dev`, and both together are short.
    fn joins(&self, from: usize, dev: u64, len: usize) -> bool {
        let before = from.checked_sub(1).map(|i| self.window.slots[i].dev);
        before.is_some_and(|b| ![HOLE, RESERVED, LOST].contains(&b) && b + 1 == dev)
            && from - self.window.extent_start(from - 1) + len <= MERGE_BLOCKS
    }

    /// The keys that have to change.
    pub fn changes(&mut self, ino: Ino, out: &mut Changes) {
        // The earliest note of a position tells what was there before the edit.
        self.touched.sort_by_key(|&(at, _)| at);
        self.touched.dedup_by_key(|&mut (at, _)| at);
        for &(at, was_start) in &self.touched {
            let key = || keys::extent(ino, (self.index * WINDOW_BLOCKS + at as u64) * BLOCK);
            if self.window.slots.get(at).is_some_and(|s| s.start) {
                out.push((key(), Some(self.window.extent(at).encode())));
            } else if was_start {
                out.push((key(), None));
            }
        }
    }
}
