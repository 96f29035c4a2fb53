//! What the kernel knows, what is open and what is locked, in the words of [`Notes`]: three tables
//! of records of eight words. The tables of the client have all of it, too, so a record needs no
//! index that outlives the process.
//!
//! | table | words of a record |
//! |---|---|
//! | inodes | number (the key), flags and lookups, stamp, capability |
//! | open files | handle (the key), flags and kind, inode, names of a listing |
//! | locks | a number (the key), inode, handle, first and last byte, kind, process, owner |

use std::sync::Arc;

use ferry_fs::known::{SharedWords, Words};
use ferry_fs::{FileLock, Ino};

use super::memory::{
    FILES_AT, FILES_MAX, FILES_USED_AT, FULL_AT, LOCKS_AT, LOCKS_MAX, LOCKS_USED_AT, NODES_AT,
    NODES_MAX, NODES_USED_AT, Notes, RECORD_WORDS, flag,
};
use crate::rt::collections::HashMap;

type Record = [u64; RECORD_WORDS];

/// Where the records of a table are.
#[derive(Clone, Copy, Debug)]
struct Region {
    at: usize,
    records_max: usize,
    used_at: usize,
}

impl Region {
    fn left_in(self, memory: &impl Words) -> impl Iterator<Item = Record> {
        let used = (memory.get(self.used_at) as usize).min(self.records_max);
        let record = move |number: usize| {
            let at = self.at + number * RECORD_WORDS;
            std::array::from_fn(|word| memory.get(at + word))
        };
        (0..used).map(record).filter(|record: &Record| record[0] != 0)
    }
}

const NODES: Region = Region { at: NODES_AT, records_max: NODES_MAX, used_at: NODES_USED_AT };
const FILES: Region = Region { at: FILES_AT, records_max: FILES_MAX, used_at: FILES_USED_AT };
const LOCKS: Region = Region { at: LOCKS_AT, records_max: LOCKS_MAX, used_at: LOCKS_USED_AT };

/// Flags of an inode.
const HAS_CAPABILITY: u64 = 1;
const IS_MAPPED: u64 = 2;
/// A walk has brought it: its one lookup is not the kernel's.
const IS_AHEAD: u64 = 4;
/// It has lost changes of which not everybody was told.
const HAS_LOST: u64 = 8;

/// Kinds of open files.
const FILE: u64 = 0;
const LOST_FILE: u64 = 1;
/// A directory whose names are listed as one list.
const DIR: u64 = 2;

/// An inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) struct NotedNode {
    pub(in crate::client) ino: Ino,
    /// 0: the kernel has forgotten it, and the server may not know that.
    pub(in crate::client) lookups: u64,
    pub(in crate::client) stamp: u64,
    pub(in crate::client) capability: Option<u128>,
    pub(in crate::client) is_mapped: bool,
    pub(in crate::client) is_ahead: bool,
    pub(in crate::client) has_lost: bool,
}

/// An open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) struct NotedFile {
    pub(in crate::client) fh: u64,
    pub(in crate::client) ino: Ino,
    pub(in crate::client) flags: i32,
    pub(in crate::client) lost: bool,
}

/// An open directory whose names are given out of one list, of so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) struct NotedDir {
    pub(in crate::client) fh: u64,
    pub(in crate::client) ino: Ino,
    pub(in crate::client) names: u64,
}

/// A lock, and the open file through which it was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) struct NotedLock {
    pub(in crate::client) ino: Ino,
    pub(in crate::client) fh: u64,
    pub(in crate::client) lock: FileLock,
}

impl NotedNode {
    fn record(&self) -> Record {
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let flags = flag(self.capability.is_some(), HAS_CAPABILITY)
            | flag(self.is_mapped, IS_MAPPED)
            | flag(self.is_ahead, IS_AHEAD)
            | flag(self.has_lost, HAS_LOST);
        let capability = self.capability.unwrap_or_default();
        let lookups = self.lookups.min(u64::from(u32::MAX));
        let halves = [capability as u64, (capability >> 64) as u64];
        [self.ino, flags << 32 | lookups, self.stamp, halves[0], halves[1], 0, 0, 0]
    }

    fn of([ino, first, stamp, low, high, ..]: Record) -> Self {
        let is_set = |flag: u64| first >> 32 & flag != 0;
        let capability = u128::from(high) << 64 | u128::from(low);
        Self {
            ino,
            lookups: u64::from(first as u32),
            stamp,
            capability: is_set(HAS_CAPABILITY).then_some(capability),
            is_mapped: is_set(IS_MAPPED),
            is_ahead: is_set(IS_AHEAD),
            has_lost: is_set(HAS_LOST),
        }
    }
}

impl NotedLock {
    fn record(&self, key: u64) -> Record {
        let Self { ino, fh, lock: FileLock { start, end, kind, pid, owner, flock } } = *self;
        let kind = u64::from(flock) << 63 | u64::from(pid) << 31 | u64::from(kind as u32);
        [key, ino, fh, start, end, kind, owner, 0]
    }

    fn of([_, ino, fh, start, end, kind, owner, _]: Record) -> Self {
        let (flock, pid) = (kind >> 63 != 0, (kind >> 31) as u32);
        let kind = (kind & 0x7fff_ffff) as i32;
        Self { ino, fh, lock: FileLock { start, end, kind, pid, owner, flock } }
    }
}

/// One table.
#[derive(Debug)]
struct Table {
    region: Region,
    /// Records that are free, and the first that was never used.
    free: Vec<usize>,
    used: usize,
    at: HashMap<u64, usize>,
}

impl Table {
    fn new(region: Region) -> Self {
        Self { region, free: Vec::new(), used: 0, at: HashMap::default() }
    }

    /// Puts a record there, or in the place of the one with its key. Its second word is the last
    /// that is stored, before the key.
    fn put(&mut self, memory: &impl Words, record: &Record) {
        let key = record[0];
        let is_new = !self.at.contains_key(&key);
        let number = match self.at.get(&key) {
            Some(number) => *number,
            None => match self.take(memory) {
                Some(number) => number,
                None => {
                    if memory.get(FULL_AT) == 0 {
                        tracing::warn!(
                            region = self.region.at,
                            "more is noted than has room: the mount ends if its process is killed"
                        );
                    }
                    return memory.set(FULL_AT, 1);
                }
            },
        };
        let at = self.region.at + number * RECORD_WORDS;
        for word in (1..RECORD_WORDS).rev() {
            if is_new || memory.get(at + word) != record[word] {
                memory.set(at + word, record[word]);
            }
        }
        if is_new {
            memory.set(at, key);
            self.at.insert(key, number);
        }
    }

    fn take(&mut self, memory: &impl Words) -> Option<usize> {
        let number = self.free.pop().or_else(|| {
            (self.used < self.region.records_max).then(|| {
                self.used += 1;
                self.used - 1
            })
        })?;
        if number + 1 == self.used {
            memory.set(self.region.used_at, self.used as u64);
        }
        Some(number)
    }

    fn remove(&mut self, memory: &impl Words, key: u64) {
        if let Some(number) = self.at.remove(&key) {
            memory.set(self.region.at + number * RECORD_WORDS, 0);
            self.free.push(number);
        }
    }
}

/// Writes the tables. The lock of the client's tables is held.
#[derive(Debug)]
pub(in crate::client) struct TableNotes<W = SharedWords> {
    notes: Arc<Notes<W>>,
    nodes: Table,
    files: Table,
    locks: Table,
    /// The locks of each file, with their keys.
    locks_of: HashMap<Ino, Vec<(u64, NotedLock)>>,
    next_lock: u64,
}

impl<W: Words> TableNotes<W> {
    pub(in crate::client) fn new(notes: Arc<Notes<W>>) -> Self {
        Self {
            notes,
            nodes: Table::new(NODES),
            files: Table::new(FILES),
            locks: Table::new(LOCKS),
            locks_of: HashMap::default(),
            next_lock: 0,
        }
    }

    pub(in crate::client) fn node(&mut self, node: &NotedNode) {
        self.nodes.put(&self.notes.memory, &node.record());
    }

    /// The kernel has forgotten an inode: it stays until the server was told.
    pub(in crate::client) fn forgotten(&mut self, node: &NotedNode) {
        if self.nodes.at.contains_key(&node.ino) {
            self.node(&NotedNode { lookups: 0, ..*node });
        }
    }

    /// And the server was told.
    pub(in crate::client) fn remove_node(&mut self, ino: Ino) {
        self.nodes.remove(&self.notes.memory, ino);
    }

    pub(in crate::client) fn file(&mut self, file: &NotedFile) {
        let NotedFile { fh, ino, flags, lost } = *file;
        let kind = if lost { LOST_FILE } else { FILE };
        let record = [fh, kind << 32 | u64::from(flags as u32), ino, 0, 0, 0, 0, 0];
        self.files.put(&self.notes.memory, &record);
    }

    pub(in crate::client) fn dir(&mut self, dir: &NotedDir) {
        let NotedDir { fh, ino, names } = *dir;
        self.files.put(&self.notes.memory, &[fh, DIR << 32, ino, names, 0, 0, 0, 0]);
    }

    /// A file or directory is closed, and the server was told.
    pub(in crate::client) fn remove_file(&mut self, fh: u64) {
        self.files.remove(&self.notes.memory, fh);
    }

    /// A file has these locks: the new ones are noted before those go that are there no more.
    pub(in crate::client) fn locks(
        &mut self,
        ino: Ino,
        locks: impl Iterator<Item = (u64, FileLock)>,
    ) {
        let mut before = self.locks_of.remove(&ino).unwrap_or_default();
        let mut now = Vec::new();
        for (fh, lock) in locks {
            let noted = NotedLock { ino, fh, lock };
            match before.iter().position(|(_, known)| *known == noted) {
                Some(at) => now.push(before.swap_remove(at)),
                None => {
                    self.next_lock += 1;
                    self.locks.put(&self.notes.memory, &noted.record(self.next_lock));
                    now.push((self.next_lock, noted));
                }
            }
        }
        before.into_iter().for_each(|(key, _)| self.locks.remove(&self.notes.memory, key));
        if !now.is_empty() {
            self.locks_of.insert(ino, now);
        }
    }

    /// Somebody is to be told of a loss, of whatever.
    pub(in crate::client) fn any_loss(&self, is_untold: bool) {
        self.notes.set_flag(flag::ANY_LOSS, is_untold);
    }
}

/// What a process has left in the tables.
#[derive(Debug, Default)]
pub(in crate::client) struct NotedTables {
    pub(in crate::client) nodes: Vec<NotedNode>,
    pub(in crate::client) files: Vec<NotedFile>,
    pub(in crate::client) dirs: Vec<NotedDir>,
    pub(in crate::client) locks: Vec<NotedLock>,
}

impl NotedTables {
    pub(super) fn of(memory: &impl Words) -> Self {
        let nodes = NODES.left_in(memory).map(NotedNode::of).collect();
        let (mut files, mut dirs) = (Vec::new(), Vec::new());
        for [fh, first, ino, names, ..] in FILES.left_in(memory) {
            let flags = first as u32 as i32;
            match first >> 32 {
                DIR => dirs.push(NotedDir { fh, ino, names }),
                kind => files.push(NotedFile { fh, ino, flags, lost: kind == LOST_FILE }),
            }
        }
        // Of two that overlap the newer one holds.
        let mut locks: Vec<Record> = LOCKS.left_in(memory).collect();
        locks.sort_unstable_by_key(|record| record[0]);
        Self { nodes, files, dirs, locks: locks.into_iter().map(NotedLock::of).collect() }
    }
}
