//! What the kernel knows, in memory that outlives the process: the inodes of which it has lookups,
//! and the files that programs have open. If the process is killed, the next one goes on with the
//! mount from here ([`LeftWords`]); the volume has the rest.
//!
//! The process may be killed between any two stores, so:
//!
//! * KNOWN-1. A record counts if its key is not 0. The key is the last word of it that is stored,
//!   and the first one that is cleared.
//! * KNOWN-2. What the kernel knows, the record says. A lookup is counted before its answer is
//!   given, and an open file noted before; they go when the kernel has given them back. So a kill
//!   leaves too much at most: what a request that was not answered has counted, stays known until
//!   the mount ends.
//! * KNOWN-3. An inode with contents that no context has is marked before the write is answered,
//!   and the mark goes when a context has all of it, whose number is stored before.
//! * KNOWN-4. A change of a request that may be replayed is noted, with its context, before that
//!   context can be durable. So what the volume has after a kill is not made twice.
//! * KNOWN-5. The record of an inode that the kernel has forgotten is *retained* while something of
//!   the inode may be lost, or is lost and nobody was told. A retained record has no lookups.
//!
//! ```text
//! words 0..8     magic, newest context that the next process found, first tree, count of trees,
//!                pages in use at most, whether something had no room, handles in use at most,
//!                slots of requests in use at most
//! words 8..12    the volume's number, the newest context in which a directory was moved, and the
//!                newest one when the volume was opened
//! words 12..17   of a replica: the version that it shows
//! TREES_AT       the numbers of snapshots, by tree
//! FILES_AT       open files, by the lower halves of handles: handle (the key), inode, user and
//!                flags
//! CHANGES_AT     changes, by the slots of their requests: request (the key), context
//! BLOCKS_AT      of each page: 1 + number of its block of 256 inode numbers (the key), or 0
//! PAGES_AT       pages: of each inode of the block: flags and lookups (the key), newest context;
//!                with the flag UNSAVED also its size, and when its contents were changed
//! TAIL_AT        what the log does not have yet (`ferry-journal/src/log/tail.rs`)
//! FRAMES_AT      contents (`cache/memory.rs`)
//! WORDS          data that is being written (`SharedBuffers`)
//! ```
//!
//! The file is sparse: what is not in use takes no memory. The locks are taken inside all others:
//! that of a block's shard, then that of the free pages.

use crate::api::{Ino, Timestamp};
use crate::cache::memory::{
    FRAMES_WORDS, FrameMemory, LeftFrame, Numbers, give_back_saved, left_frames,
};
use ferry_device::{LeftBuffers, SHARED_BUFFERS_BYTES, SharedBuffers};
pub use ferry_device::{SharedWords, Words};
use ferry_journal::{LeftLog, Recovered, RequestId, Seq, TAIL_WORDS, Tail};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The number is that of the form.
const MAGIC: u64 = u64::from_le_bytes(*b"ferrykn4");
const FOUND_AT: usize = 1;
const FIRST_TREE_AT: usize = 2;
const TREE_COUNT_AT: usize = 3;
const PAGES_USED_AT: usize = 4;
const FULL_AT: usize = 5;
const FILES_USED_AT: usize = 6;
const CHANGES_USED_AT: usize = 7;
const VOLUME_AT: usize = 8;
const MOVED_AT: usize = 10;
const OPENED_AT: usize = 11;
const VERSION_AT: usize = 12;

const TREES_AT: usize = 512;
const TREES_MAX: usize = 1 << 20;
const FILES_AT: usize = TREES_AT + TREES_MAX;
/// Handles whose number's lower half is below this have room.
const FILES_MAX: usize = 1 << 22;
const FILE_WORDS: usize = 4;
const CHANGES_AT: usize = FILES_AT + FILES_MAX * FILE_WORDS;
/// Requests whose slot is below this have room.
const CHANGES_MAX: usize = 1 << 23;
const CHANGE_WORDS: usize = 2;
const BLOCKS_AT: usize = CHANGES_AT + CHANGES_MAX * CHANGE_WORDS;
/// Blocks of inode numbers of which the kernel may know some.
const PAGES_MAX: usize = 1 << 20;
const PAGES_AT: usize = BLOCKS_AT + PAGES_MAX;
/// Inode numbers of a block.
const BLOCK_INODES: u64 = 256;
const INODE_WORDS: usize = 4;
const PAGE_WORDS: usize = BLOCK_INODES as usize * INODE_WORDS;
const TAIL_AT: usize = PAGES_AT + PAGES_MAX * PAGE_WORDS;
const FRAMES_AT: usize = (TAIL_AT + TAIL_WORDS).next_multiple_of(512);
const WORDS: usize = FRAMES_AT + FRAMES_WORDS;
/// With the buffers behind them.
const ALL_WORDS: usize = WORDS + SHARED_BUFFERS_BYTES / size_of::<u64>();

/// Locks of blocks, by their numbers.
const SHARDS: usize = 64;

/// Flags of an inode, in the upper half of its key.
pub mod inode_flag {
    /// It was made without a name, and may be given one if it has none.
    pub const LINKABLE: u32 = 1;
    /// Contents that no context has.
    pub const UNSAVED: u32 = 2;
    /// A process before has lost changes, and nobody was told.
    pub const LOST: u32 = 4;
    /// It may be shorter, or longer, than the kernel takes it for.
    pub const RESIZED: u32 = 8;
    /// The kernel does not know it.
    pub(super) const RETAINED: u32 = 16;
    /// With one of these its record is retained.
    pub(super) const KEEPS: u32 = UNSAVED | LOST;
}

/// An open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownFile {
    /// Its handle; never 0.
    pub fh: u64,
    /// Its inode.
    pub ino: Ino,
    /// The user that has opened it.
    pub uid: u32,
    /// Its flags, in the caller's form.
    pub flags: u32,
}

/// An inode of which the kernel has lookups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownInode {
    /// Its number.
    pub ino: Ino,
    /// Lookups that the kernel has not given back.
    pub lookups: u32,
    /// Some of [`inode_flag`].
    pub flags: u32,
    /// With the flag UNSAVED: its size, and when its contents were changed.
    pub size: u64,
    /// In nanoseconds.
    pub changed: u64,
}

/// The version that a replica shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaVersion {
    /// The timeline that programs know it by, counted from that of the mount's first version.
    pub timeline: u64,
    /// What the volume itself says of its timeline.
    pub says: [u64; 2],
    /// The number of its root.
    pub root: u64,
    /// The first number in the log that it lacks.
    pub log: u64,
}

/// What a process has left that was killed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// The number of its volume.
    pub volume: [u64; 2],
    /// Its newest context when the process had opened it.
    pub opened: u64,
    /// Of a replica: what it showed, or was about to show.
    pub version: ReplicaVersion,
    /// A move of a directory is lost, and so may the path of anything be.
    pub has_lost_move: bool,
    /// The inodes that the kernel knows, and those that have lost changes: these have the flag
    /// LOST.
    pub inodes: Vec<KnownInode>,
    /// The open files.
    pub files: Vec<KnownFile>,
    /// Where trees of snapshots begin, and the numbers of the snapshots.
    pub trees: (u64, Vec<u64>),
    /// Requests whose changes the volume has.
    pub made: Vec<RequestId>,
    /// Contents that the volume does not have, of the inodes with the flag UNSAVED that have not
    /// lost any.
    pub(crate) contents: HashMap<Ino, Vec<LeftFrame>>,
}

/// A block of inode numbers of which the kernel knows some.
#[derive(Clone, Copy, Debug)]
struct Page {
    number: usize,
    /// Inodes in it with lookups.
    live: usize,
}

/// Records that are retained, and at how many they are looked through.
#[derive(Debug, Default)]
struct Retained {
    inodes: Vec<Ino>,
    look_at: usize,
}

/// So many records are retained without a look.
const RETAINED_MIN: usize = 256;

/// The memory, and where in it things are.
#[derive(Debug)]
pub struct Known<W = SharedWords> {
    memory: Arc<W>,
    shards: Box<[Mutex<HashMap<u64, Page>>]>,
    pages: Mutex<Numbers>,
    retained: Mutex<Retained>,
    buffers: Option<Arc<SharedBuffers>>,
}

/// The key of an inode.
fn key(lookups: u32, flags: u32) -> u64 {
    u64::from(flags) << 32 | u64::from(lookups)
}

impl Known {
    /// For a process that begins.
    pub fn new() -> io::Result<Self> {
        let memory = SharedWords::new(WORDS)?;
        let buffers = Some(SharedBuffers::behind(memory.file()?)?);
        Ok(Self { buffers, ..Self::on(memory) })
    }

    /// For the holder of the mount.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.memory.file()
    }

    /// Where contents are that no context has. Frames that are given up may leave so many bytes for
    /// the next ones.
    pub(crate) fn frames(&self, spare_bytes: usize) -> Arc<FrameMemory> {
        FrameMemory::new(Arc::clone(&self.memory), FRAMES_AT, spare_bytes)
    }

    /// Where what the log does not have yet is noted.
    pub(crate) fn tail(&self) -> Arc<Tail> {
        Arc::new(Tail::new(Arc::clone(&self.memory), TAIL_AT))
    }

    /// Where data is that is being written.
    pub(crate) fn buffers(&self) -> Option<Arc<SharedBuffers>> {
        self.buffers.clone()
    }
}

/// What a process has left that was killed.
#[derive(Clone, Debug)]
pub struct LeftBehind {
    /// Its memory.
    pub words: LeftWords,
    /// Somebody else had the volume since, in a store.
    pub had_others: bool,
}

/// The memory of a process that was killed.
#[derive(Clone, Debug)]
pub struct LeftWords {
    memory: Arc<SharedWords>,
    log: Arc<LeftLog>,
}

impl LeftWords {
    /// In this file. `None`: another form.
    pub fn of(file: OwnedFd) -> Option<Self> {
        let memory = SharedWords::of(file).ok()?;
        let is_it = memory.words().len() == ALL_WORDS && memory.get(0) == MAGIC;
        if !is_it {
            return None;
        }
        let data = LeftBuffers::of(memory.file().ok()?).ok()?;
        let memory = Arc::new(memory);
        let tail = Tail::new(Arc::clone(&memory), TAIL_AT);
        Some(Self { memory, log: Arc::new(LeftLog { tail, data }) })
    }

    /// What the log did not have.
    pub(crate) fn log(&self) -> Arc<LeftLog> {
        Arc::clone(&self.log)
    }

    /// The contents that the volume does not have, whose newest context is `recovered`. `None`: not
    /// all of them are here.
    pub(crate) fn frames(&self, recovered: Seq) -> Option<HashMap<Ino, Vec<LeftFrame>>> {
        left_frames(&self.memory, FRAMES_AT, recovered.0)
    }

    /// Gives back the memory of contents that the volume has. Their number is that of the whole
    /// cache, and perhaps there was too little memory already.
    pub fn give_back_saved(&self) {
        give_back_saved(&self.memory, FRAMES_AT);
    }

    /// Copies from a frame, as [`LeftFrame::copy_out`].
    pub(crate) fn copy_out(&self, frame: &LeftFrame, at: usize, out: &mut [u8]) {
        frame.copy_out(&self.memory, at, out);
    }

    /// As if only what is durable was there.
    #[cfg(test)]
    pub(crate) fn durable_only(self) -> Self {
        (0..8).for_each(|at| self.memory.set(TAIL_AT + at, 0));
        self.memory.set(FRAMES_AT + 1, 1);
        self
    }

    /// The rest. What the volume does not have now is lost. `None`: not all of it had room.
    /// `had_others`: somebody else had the volume since, and contents are not written over theirs.
    pub(crate) fn known(&self, recovered: &Recovered, had_others: bool) -> Option<Left> {
        let (last, logged) = (recovered.last.0, recovered.logged.0);
        // A process before this one may have used the numbers of contexts that were lost.
        let last = self.log.tail.newest_taken().map_or(last, |taken| taken.0.min(last));
        let contents = self.frames(Seq(found_first(&*self.memory, last)));
        let contents = contents.filter(|_| !had_others);
        let mut left = left_in(&*self.memory, last, logged, contents.is_some())?;
        left.made.extend(&recovered.requests);
        Some(Left { contents: contents.unwrap_or_default(), ..left })
    }
}

impl<W: Words> Known<W> {
    fn on(memory: W) -> Self {
        memory.set(0, MAGIC);
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self {
            memory: Arc::new(memory),
            shards,
            pages: Mutex::default(),
            retained: Mutex::default(),
            buffers: None,
        }
    }

    /// It is of the volume with this number, whose newest context is `opened`.
    pub fn set_volume(&self, volume: [u64; 2], opened: u64) {
        self.memory.set(OPENED_AT, opened);
        (0..).zip(volume).for_each(|(at, word)| self.memory.set(VOLUME_AT + at, word));
    }

    /// A directory was moved in this context.
    pub fn moved(&self, seq: u64) {
        self.memory.raise(MOVED_AT, seq);
    }

    /// A replica is about to show this version. The timeline comes first: if the rest is that of
    /// the version before, the next process begins another one for nothing.
    pub fn shows(&self, version: &ReplicaVersion) {
        let ReplicaVersion { timeline, says: [low, high], root, log } = *version;
        let words = (VERSION_AT..).zip([timeline, low, high, root, log]);
        words.for_each(|(at, word)| self.memory.set(at, word));
    }

    /// Something has no room: no process can go on from here.
    fn is_full(&self) {
        if self.memory.get(FULL_AT) == 0 {
            tracing::warn!("more is noted than has room: the mount ends if its process is killed");
        }
        self.memory.set(FULL_AT, 1);
    }

    /// Where the two words of an inode are.
    fn record(page: usize, ino: Ino) -> (usize, usize) {
        let at = PAGES_AT + page * PAGE_WORDS + (ino % BLOCK_INODES) as usize * INODE_WORDS;
        (at, at + 1)
    }

    fn shard(&self, ino: Ino) -> (u64, &Mutex<HashMap<u64, Page>>) {
        let block = ino / BLOCK_INODES;
        (block, &self.shards[block as usize % SHARDS])
    }

    /// A page for a block. `None`: there is none left.
    fn take_page(&self, block: u64) -> Option<Page> {
        let mut pages = self.pages.lock();
        let number = pages.take(PAGES_MAX, |used| self.memory.set(PAGES_USED_AT, used))?;
        self.memory.set(BLOCKS_AT + number, block + 1);
        Some(Page { number, live: 0 })
    }

    /// The kernel gets so many lookups of an inode.
    pub fn count(&self, ino: Ino, lookups: u32) {
        let (block, shard) = self.shard(ino);
        let mut shard = shard.lock();
        let page = match shard.entry(block) {
            Entry::Occupied(page) => page.into_mut(),
            Entry::Vacant(entry) => match self.take_page(block) {
                Some(page) => entry.insert(page),
                None => return self.is_full(),
            },
        };
        let (known, context) = Self::record(page.number, ino);
        let before = self.memory.get(known);
        if before == 0 {
            page.live += 1;
            self.memory.set(context, 0);
        }
        let flags = (before >> 32) as u32 & !inode_flag::RETAINED;
        self.memory.set(known, key((before as u32).saturating_add(lookups), flags));
    }

    /// The inode gets these flags, and its record is retained if the kernel does not know it.
    pub fn lose(&self, ino: Ino, flags: u32) {
        self.count(ino, 1);
        self.change_flags(ino, 0, flags);
        self.uncount(ino, 1, 0);
    }

    /// The flags of an inode.
    pub fn flags(&self, ino: Ino) -> u32 {
        let (block, shard) = self.shard(ino);
        let shard = shard.lock();
        shard.get(&block).map_or(0, |page| {
            (self.memory.get(Self::record(page.number, ino).0) >> 32) as u32 & !inode_flag::RETAINED
        })
    }

    /// The inodes that have lost something, with their flags.
    pub fn lost(&self) -> Vec<(Ino, u32)> {
        let all =
            self.shards.iter().flat_map(|shard| shard.lock().keys().copied().collect::<Vec<_>>());
        let all = all.flat_map(|block| block * BLOCK_INODES..(block + 1) * BLOCK_INODES);
        let flagged = all.map(|ino| (ino, self.flags(ino)));
        flagged.filter(|(_, flags)| flags & (inode_flag::LOST | inode_flag::RESIZED) != 0).collect()
    }

    /// The kernel gives lookups back. Contexts up to `durable` are durable.
    pub fn uncount(&self, ino: Ino, lookups: u64, durable: u64) {
        let (block, shard) = self.shard(ino);
        let mut shard = shard.lock();
        let Some(page) = shard.get_mut(&block) else { return };
        let (known, context) = Self::record(page.number, ino);
        let before = self.memory.get(known);
        let left = u64::from(before as u32).saturating_sub(lookups);
        if left > 0 {
            return self.memory.set(known, before & !u64::from(u32::MAX) | left);
        }
        let flags = (before >> 32) as u32;
        if flags & inode_flag::KEEPS != 0 || self.memory.get(context) > durable {
            self.memory.set(known, key(0, flags | inode_flag::RETAINED));
            drop(shard);
            return self.keep(ino, durable);
        }
        self.free(&mut shard, block, ino);
    }

    /// Nothing is known of the inode any more.
    fn free(&self, shard: &mut HashMap<u64, Page>, block: u64, ino: Ino) {
        let Some(page) = shard.get_mut(&block) else { return };
        let (known, context) = Self::record(page.number, ino);
        if self.memory.get(known) == 0 {
            return;
        }
        self.memory.set(known, 0);
        self.memory.set(context, 0);
        page.live -= 1;
        if page.live == 0 {
            let number = page.number;
            shard.remove(&block);
            self.memory.set(BLOCKS_AT + number, 0);
            self.pages.lock().give_back(number);
        }
    }

    /// The record of an inode is retained. Now and then those are freed that need not be any more.
    fn keep(&self, ino: Ino, durable: u64) {
        let looked_at = {
            let mut retained = self.retained.lock();
            retained.inodes.push(ino);
            if retained.inodes.len() <= retained.look_at.max(RETAINED_MIN) {
                return;
            }
            std::mem::take(&mut retained.inodes)
        };
        let stay = looked_at.into_iter().filter(|ino| self.stays_retained(*ino, durable));
        let stay: Vec<Ino> = stay.collect();
        let mut retained = self.retained.lock();
        retained.inodes.extend(stay);
        retained.look_at = 2 * retained.inodes.len();
    }

    /// Whether the record is retained, and must be; it is freed if it need not be.
    fn stays_retained(&self, ino: Ino, durable: u64) -> bool {
        let (block, shard) = self.shard(ino);
        let mut shard = shard.lock();
        let Some(page) = shard.get(&block) else { return false };
        let (known, context) = Self::record(page.number, ino);
        let before = self.memory.get(known);
        let flags = (before >> 32) as u32;
        if flags & inode_flag::RETAINED == 0 {
            return false;
        }
        let stays = flags & inode_flag::KEEPS != 0 || self.memory.get(context) > durable;
        if !stays {
            self.free(&mut shard, block, ino);
        }
        stays
    }

    /// Changes flags of an inode that has a record.
    pub fn change_flags(&self, ino: Ino, clear: u32, add: u32) {
        let (block, shard) = self.shard(ino);
        let shard = shard.lock();
        let Some(page) = shard.get(&block) else { return };
        let (known, _) = Self::record(page.number, ino);
        let before = self.memory.get(known);
        if before != 0 {
            self.memory.set(known, key(before as u32, (before >> 32) as u32 & !clear | add));
        }
    }

    /// The size of a file whose contents no context has, and when they were changed.
    pub fn note_contents(&self, ino: Ino, size: u64, changed: Timestamp) {
        let (block, shard) = self.shard(ino);
        let shard = shard.lock();
        let Some(page) = shard.get(&block) else { return };
        let (known, context) = Self::record(page.number, ino);
        if self.memory.get(known) != 0 {
            self.memory.set(context + 1, size);
            self.memory.set(context + 2, changed.0 as u64);
        }
    }

    /// A context has changes of an inode, or of a name of it.
    pub fn logged(&self, ino: Ino, seq: u64) {
        let (block, shard) = self.shard(ino);
        let shard = shard.lock();
        let Some(page) = shard.get(&block) else { return };
        let (known, context) = Self::record(page.number, ino);
        if self.memory.get(known) != 0 && self.memory.get(context) < seq {
            self.memory.set(context, seq);
        }
    }

    /// The change of a request joins a context, which is not durable yet.
    pub fn joins(&self, request: RequestId, seq: u64) {
        let slot = request.slot as usize;
        if slot >= CHANGES_MAX {
            return self.is_full();
        }
        let at = CHANGES_AT + slot * CHANGE_WORDS;
        self.memory.set(at, 0);
        self.memory.set(at + 1, seq);
        if self.memory.get(CHANGES_USED_AT) <= slot as u64 {
            self.memory.raise(CHANGES_USED_AT, slot as u64 + 1);
        }
        self.memory.set(at, request.unique);
    }

    /// A file is open.
    pub fn opened(&self, file: &KnownFile) {
        let Some(at) = Self::file_at(file.fh) else { return self.is_full() };
        self.memory.set(at + 1, file.ino);
        self.memory.set(at + 2, key(file.uid, file.flags));
        self.memory.raise(FILES_USED_AT, u64::from(file.fh as u32) + 1);
        self.memory.set(at, file.fh);
    }

    /// It is not any more. Its number is not given to another file before.
    pub fn closed(&self, fh: u64) {
        if let Some(at) = Self::file_at(fh)
            && self.memory.get(at) == fh
        {
            self.memory.set(at, 0);
        }
    }

    fn file_at(fh: u64) -> Option<usize> {
        let slot = fh as u32 as usize;
        (slot < FILES_MAX).then_some(FILES_AT + slot * FILE_WORDS)
    }

    /// Where trees of snapshots begin.
    pub fn trees_begin(&self, first: u64) {
        self.memory.set(FIRST_TREE_AT, first);
    }

    /// The next tree is that of the snapshot of this number.
    pub fn add_tree(&self, snapshot: u64) {
        let count = self.memory.get(TREE_COUNT_AT) as usize;
        if count >= TREES_MAX {
            return self.is_full();
        }
        self.memory.set(TREES_AT + count, snapshot);
        self.memory.set(TREE_COUNT_AT, count as u64 + 1);
    }
}

/// The newest context that the first process found which looked at this memory; `recovered` is what
/// this one finds. One that was killed before it had a memory of its own may have used numbers of
/// contexts that were lost.
fn found_first(memory: &impl Words, recovered: u64) -> u64 {
    let found = memory.get(FOUND_AT);
    let recovered = if found == 0 { recovered } else { recovered.min(found - 1) };
    memory.set(FOUND_AT, recovered + 1);
    recovered
}

/// What a process has left in this memory, as [`LeftWords::known`]. Contexts up to `recovered` are
/// there, and the log itself had those up to `logged`. `has_contents`: contents that no context has
/// are there, too.
fn left_in(memory: &impl Words, recovered: u64, logged: u64, has_contents: bool) -> Option<Left> {
    if memory.get(0) != MAGIC || memory.get(FULL_AT) != 0 {
        return None;
    }
    let recovered = found_first(memory, recovered);
    let up_to = |at, most: usize| (memory.get(at) as usize).min(most);
    let volume = [memory.get(VOLUME_AT), memory.get(VOLUME_AT + 1)];
    let has_lost_move = memory.get(MOVED_AT) > recovered;
    let opened = memory.get(OPENED_AT);
    let [timeline, low, high, root, log] =
        std::array::from_fn(|word| memory.get(VERSION_AT + word));
    let version = ReplicaVersion { timeline, says: [low, high], root, log };
    let mut left = Left { volume, opened, version, has_lost_move, ..Left::default() };
    for page in 0..up_to(PAGES_USED_AT, PAGES_MAX) {
        let Some(block) = memory.get(BLOCKS_AT + page).checked_sub(1) else { continue };
        for ino in block * BLOCK_INODES..(block + 1) * BLOCK_INODES {
            let (known, context) = Known::<SharedWords>::record(page, ino);
            let (size, changed) = (memory.get(context + 1), memory.get(context + 2));
            let (known, context) = (memory.get(known), memory.get(context));
            let (lookups, mut flags) = (known as u32, (known >> 32) as u32 & !inode_flag::RETAINED);
            let is_unsaved = flags & inode_flag::UNSAVED != 0;
            if context > recovered || is_unsaved && !has_contents {
                flags |= inode_flag::LOST;
            }
            if known != 0 && (lookups != 0 || flags & inode_flag::KEEPS != 0) {
                left.inodes.push(KnownInode { ino, lookups, flags, size, changed });
            }
        }
    }
    for slot in 0..up_to(FILES_USED_AT, FILES_MAX) {
        let at = FILES_AT + slot * FILE_WORDS;
        let (fh, more) = (memory.get(at), memory.get(at + 2));
        if fh != 0 {
            let (uid, flags) = (more as u32, (more >> 32) as u32);
            left.files.push(KnownFile { fh, ino: memory.get(at + 1), uid, flags });
        }
    }
    for slot in 0..up_to(CHANGES_USED_AT, CHANGES_MAX) {
        let at = CHANGES_AT + slot * CHANGE_WORDS;
        let (unique, context) = (memory.get(at), memory.get(at + 1));
        if unique != 0 && context <= logged.min(recovered) {
            left.made.push(RequestId { slot: slot as u32, unique });
        }
    }
    let trees = TREES_AT..TREES_AT + up_to(TREE_COUNT_AT, TREES_MAX);
    left.trees = (memory.get(FIRST_TREE_AT), trees.map(|at| memory.get(at)).collect());
    Some(left)
}

#[cfg(test)]
mod tests;
