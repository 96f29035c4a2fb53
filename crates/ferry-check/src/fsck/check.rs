//! The check proper: takes every key of the view in order, judges what can be judged on the spot,
//! and keeps what needs the whole (names, blocks in use) in compact tables.

use super::report::{Code, Finding, Findings, Holdings, Losses};
use super::space::Space;
use super::tree::Tree;
use super::verify::Verifier;
use ferry_fs::api::Ino;
use ferry_fs::keys::{
    self, BLOCK, BadRecord, Counters, INO_END, InodeRecord, Key, Number, Segment,
};
use ferry_journal::Geometry;
use std::collections::HashSet;

/// The names of one hash in the directory being read, and their disambiguators.
#[derive(Default)]
pub(super) struct SameHash {
    pub(super) hash: u64,
    pub(super) names: Vec<(u8, Box<[u8]>)>,
}

/// The inode whose keys are being read.
#[derive(Default)]
pub(super) struct Current {
    pub(super) ino: Ino,
    /// `None`: keys without a record.
    pub(super) record: Option<InodeRecord>,
    pub(super) has_xattrs: bool,
    pub(super) names: u64,
    pub(super) blocks: u64,
    /// Where the next extent may start, in bytes.
    pub(super) extent_end: u64,
    pub(super) same_hash: SameHash,
    /// Keys that cannot belong to this inode were reported.
    pub(super) misfit_reported: bool,
}

/// How a volume turns a name into the 54 bits at the top of its cookie.
pub(super) type NameHash<'c> = &'c dyn Fn(&[u8]) -> u64;

/// A check in progress.
pub(super) struct Checker<'c> {
    pub(super) findings: Findings,
    pub(super) holdings: Holdings,
    pub(super) tree: Tree,
    pub(super) space: Space,
    pub(super) name_hash: NameHash<'c>,
    pub(super) verifier: Option<Verifier>,
    home_segments: HashSet<u32>,
    counters: Option<Counters>,
    /// Unwritten blocks, as the stored counter says.
    reserved: u64,
    pub(super) current: Option<Current>,
    /// Extents behind a file's end: allowed while an intent says that they are being removed.
    pub(super) beyond_end: Findings,
    /// Ranges that an earlier repair had to give up.
    pub(super) losses: Losses,
    intents: HashSet<Ino>,
}

impl<'c> Checker<'c> {
    pub(super) fn new(
        geometry: &Geometry,
        name_hash: NameHash<'c>,
        home_segments: &[u32],
        verifier: Option<Verifier>,
    ) -> Self {
        Self {
            findings: Findings::default(),
            holdings: Holdings { home_segments: home_segments.len() as u64, ..Holdings::default() },
            tree: Tree::default(),
            space: Space::new(geometry),
            name_hash,
            verifier,
            home_segments: home_segments.iter().copied().collect(),
            counters: None,
            reserved: 0,
            current: None,
            beyond_end: Findings::default(),
            losses: Losses::default(),
            intents: HashSet::new(),
        }
    }

    /// What the volume counts, once it is known.
    pub(super) fn counters(&self) -> Option<Counters> {
        self.counters
    }

    /// Takes the next key, in ascending order.
    pub(super) fn key(&mut self, key: &[u8], value: &[u8]) {
        let Some(parsed) = keys::parse(key) else {
            self.findings.add(Finding::new(Code::UnknownKey, format!("unknown key {}", hex(key))));
            return;
        };
        let outcome = match parsed {
            Key::Counters => Counters::decode(value).map(|counters| self.counters = Some(counters)),
            Key::Unwritten => Number::decode(value).map(|blocks| self.reserved = blocks.0),
            Key::Intent(ino) => {
                self.intents.insert(ino);
                Number::decode(value).map(drop)
            }
            Key::Inode(ino) => self.inode(ino, value),
            Key::Xattr(ino, name) => {
                self.xattr(ino, name, value);
                Ok(())
            }
            Key::Dentry(dir, cookie, name) => self.dentry(dir, cookie, name, value),
            Key::Extent(ino, offset) => self.extent(ino, offset, value),
            Key::Segment(index) => self.segment(index, value),
            Key::Mark(_) | Key::Synced(_) | Key::Locker(_) | Key::Evicted(_) => {
                Number::decode(value).map(drop)
            }
            Key::Orphan(ino) => {
                self.holdings.orphans += 1;
                self.tree.orphan(ino, &mut self.findings);
                Ok(())
            }
        };
        if let Err(BadRecord { what }) = outcome {
            let finding = Finding::new(
                Code::BadRecord,
                format!("the {what} record {} cannot be decoded", hex(key)),
            );
            self.findings.add(match parsed {
                Key::Inode(ino) | Key::Dentry(ino, ..) => finding.of(ino),
                Key::Extent(ino, offset) => finding.of(ino).at(offset),
                _ => finding,
            });
        }
    }

    /// All keys were seen: judges the whole.
    pub(super) fn finish(&mut self) {
        self.end_inode();
        let beyond = std::mem::take(&mut self.beyond_end);
        for finding in beyond.list {
            if finding.location.ino.is_none_or(|ino| !self.intents.contains(&ino)) {
                self.findings.add(finding);
            }
        }
        self.tree.judge(&mut self.findings);
        self.judge_counters();
        let unwritten = self.holdings.reserved_bytes / BLOCK;
        if self.reserved != unwritten {
            let what =
                format!("{} blocks count as unwritten, there are {unwritten}", self.reserved);
            self.findings.add(Finding::new(Code::ReservedCount, what));
        }
        for (index, used) in self.space.rest() {
            let what =
                format!("{} blocks of segment {index} are in use, but it has no record", used.live);
            let offset = self.space.segment_offset(index);
            self.findings.add(Finding::new(Code::SegmentFree, what).on_device(offset));
        }
    }

    fn judge_counters(&mut self) {
        self.holdings.inodes = self.tree.inodes();
        let Some(counters) = self.counters else {
            self.findings.add(Finding::new(Code::NoCounters, "there is no counters record"));
            return;
        };
        let (last, inodes) = (self.tree.last_ino(), self.tree.inodes());
        if counters.next_ino >= INO_END {
            let what =
                format!("the next new inode would be {}, which is impossible", counters.next_ino);
            self.findings.add(Finding::new(Code::NextIno, what));
        } else if counters.next_ino <= last {
            let what = format!(
                "the next new inode would be {}, but inode {last} exists",
                counters.next_ino
            );
            self.findings.add(Finding::new(Code::NextIno, what));
        }
        if counters.inodes != inodes {
            let what = format!("{} inodes are said to exist, there are {inodes}", counters.inodes);
            self.findings.add(Finding::new(Code::InodeCount, what));
        }
    }

    fn segment(&mut self, index: u32, value: &[u8]) -> Result<(), BadRecord> {
        let used = self.space.take(index);
        let segment = Segment::decode(value)?;
        let offset = self.space.segment_offset(index);
        let mut add = |code, what| self.findings.add(Finding::new(code, what).on_device(offset));
        if index >= self.space.segment_count() {
            add(Code::SegmentRecord, format!("segment {index} has a record but does not exist"));
            return Ok(());
        }
        if self.home_segments.contains(&index) {
            add(
                Code::HomeClaim,
                format!("segment {index} holds data and belongs to the home store too"),
            );
        }
        let (live, end) = used.as_ref().map_or((0, 0), |used| (used.live, used.end));
        if u64::from(segment.filled) > self.space.segment_blocks() || segment.live > segment.filled
        {
            let what = format!(
                "segment {index} is said to have {} blocks filled and {} in use, of {}",
                segment.filled,
                segment.live,
                self.space.segment_blocks()
            );
            add(Code::SegmentRecord, what);
        } else if segment.filled < end {
            let what = format!(
                "segment {index}: block {} is in use, only {} are filled",
                end - 1,
                segment.filled
            );
            add(Code::SegmentFilled, what);
        }
        if segment.live != live {
            let what = format!(
                "segment {index}: {live} blocks are in use, the record says {}",
                segment.live
            );
            add(Code::SegmentLive, what);
        }
        self.holdings.data_segments += 1;
        Ok(())
    }
}

/// Bytes as hexadecimal digits, a long row of them cut short.
pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut out = String::new();
    for b in bytes.iter().take(48) {
        write!(out, "{b:02x}").expect("a string takes any write");
    }
    if bytes.len() > 48 {
        out.push('…');
    }
    out
}
