//! Which blocks of the device extents claim, and what is in them.

use crate::fsck::report::Code;
use crate::reader::Reader;
use ferry_fs::api::Ino;
use ferry_fs::keys::{self, BLOCK, Extent, InodeRecord, Key};
use ferry_journal::{Geometry, Journal, JournalError};
use std::collections::{BTreeSet, HashMap, HashSet};

/// What a repair does about files' contents.
#[derive(Clone, Copy)]
pub(super) struct Reading {
    /// Every block is read, and one that is not what it should be becomes lost.
    pub(super) verify: bool,
    /// So does one that the device cannot read.
    pub(super) give_up: bool,
}

/// A set of device blocks: a bit for each block of the segments in which there are any.
#[derive(Default)]
struct Set(HashMap<u64, Box<[u64]>>);

impl Set {
    /// Adds a block; `false` when it was in already.
    fn add(&mut self, (segment, at): (u64, u64), words: usize) -> bool {
        let bits = self.0.entry(segment).or_insert_with(|| vec![0; words].into_boxed_slice());
        let (word, bit) = ((at / 64) as usize, 1_u64 << (at % 64));
        let new = bits[word] & bit == 0;
        bits[word] |= bit;
        new
    }

    fn has(&self, (segment, at): (u64, u64)) -> bool {
        self.0.get(&segment).is_some_and(|bits| bits[(at / 64) as usize] & 1 << (at % 64) != 0)
    }
}

/// The blocks in use.
pub(super) struct Blocks {
    first: u64,
    per_segment: u64,
    segments: u32,
    home: HashSet<u32>,
    claimed: Set,
    /// Claimed more than once.
    contested: Set,
    /// Claimed by an extent before the end of its file.
    inside: Set,
    /// Contested, and given to one extent.
    given: Set,
    /// The file whose claims come, and its size.
    file: (Ino, u64),
}

impl Blocks {
    /// Nothing is claimed yet.
    pub(super) fn none(geometry: &Geometry) -> Self {
        Self {
            first: geometry.segments_offset / BLOCK,
            per_segment: geometry.segment_len / BLOCK,
            segments: geometry.segment_count,
            home: HashSet::new(),
            claimed: Set::default(),
            contested: Set::default(),
            inside: Set::default(),
            given: Set::default(),
            file: (0, 0),
        }
    }

    /// Reads all claims.
    pub(super) fn load(
        journal: &Journal,
        geometry: &Geometry,
        home: &[u32],
    ) -> Result<Self, JournalError> {
        let mut blocks = Self { home: home.iter().copied().collect(), ..Self::none(geometry) };
        journal.scan(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| {
            blocks.note(key, value);
            true
        })?;
        Ok(blocks)
    }

    /// Notes what a key claims; keys come in order.
    pub(super) fn note(&mut self, key: &[u8], value: &[u8]) {
        match keys::parse(key) {
            Some(Key::Inode(ino)) => {
                self.file = (ino, InodeRecord::decode(value).map_or(0, |record| record.size));
            }
            Some(Key::Extent(ino, offset)) => {
                let Ok(Extent::Data { block, crcs }) = Extent::decode(value) else { return };
                let size = if self.file.0 == ino { self.file.1 } else { 0 };
                for i in 0..crcs.len() as u64 {
                    self.claim(block.saturating_add(i), offset.saturating_add(i * BLOCK) < size);
                }
            }
            _ => {}
        }
    }

    fn locate(&self, dev: u64) -> Option<(u64, u64)> {
        let at = dev.checked_sub(self.first)?;
        let segment = at / self.per_segment;
        (segment < u64::from(self.segments)).then_some((segment, at % self.per_segment))
    }

    fn words(&self) -> usize {
        self.per_segment.div_ceil(64) as usize
    }

    fn claim(&mut self, dev: u64, inside: bool) {
        let words = self.words();
        let Some(at) = self.locate(dev) else { return };
        if !self.claimed.add(at, words) {
            self.contested.add(at, words);
        }
        if inside {
            self.inside.add(at, words);
        }
    }

    /// Segments that no extent claims.
    pub(super) fn unclaimed(&self) -> BTreeSet<u32> {
        (0..self.segments)
            .filter(|segment| !self.claimed.0.contains_key(&u64::from(*segment)))
            .collect()
    }

    /// Data can be there.
    pub(super) fn holds_data(&self, dev: u64) -> bool {
        self.locate(dev).is_some_and(|(segment, _)| !self.home.contains(&(segment as u32)))
    }

    /// These blocks stand in one segment.
    pub(super) fn in_one_segment(&self, dev: u64, blocks: u64) -> bool {
        let last = dev.saturating_add(blocks - 1);
        match (self.locate(dev), self.locate(last)) {
            (Some((a, _)), Some((b, _))) => a == b,
            _ => false,
        }
    }

    /// Whether an extent may keep this block; if not, why. `inside`: it is before the end of its
    /// file. A block that several claim goes to the first that is.
    ///
    /// What cannot be read may be read the next time: the extent keeps it, unless that is to be
    /// given up, or another claims it or its blocks.
    pub(super) fn judge(
        &mut self,
        reader: &mut Reader,
        (dev, crc, inside): (u64, u32, bool),
        suspect: Option<Code>,
        Reading { verify, give_up }: Reading,
    ) -> Result<(), Code> {
        let Some(at) = self.locate(dev).filter(|_| self.holds_data(dev)) else {
            return Err(Code::ExtentLocation);
        };
        let contested = self.contested.has(at);
        if (contested || suspect.is_some() || verify) && !reader.matches(dev, crc) {
            let doubt = if contested { Some(Code::BlockShared) } else { suspect };
            match doubt {
                Some(code) => return Err(code),
                None if !reader.failed(dev) => return Err(Code::Checksum),
                None if give_up => return Err(Code::ReadError),
                None => {}
            }
        }
        let words = self.words();
        if contested && (!inside && self.inside.has(at) || !self.given.add(at, words)) {
            return Err(Code::BlockShared);
        }
        Ok(())
    }
}
