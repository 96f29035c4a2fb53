//! The inodes by number. Those that are in use are in memory whole, within a bound; of the others
//! that the kernel knows twelve bytes each are remembered (`residency.rs`).

use crate::api::{CachedName, Errno, Ino, ROOT};
use crate::error::FsError;
use crate::inode::dir_cache::{DirName, LOAD_MAX};
use crate::inode::incore::Inode;
use crate::inode::residency::{Counts, Moved, Parting, Remembered, Shard, Store};
use crate::inode::state::InodeState;
use crate::keys::{self, Dentry, InodeRecord, Key};
use crate::patience;
use ferry_journal::Journal;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A shard is locked while its tables grow: the more shards, the shorter.
const SHARDS: usize = 256;
/// A thread that trims looks at so many inodes of a shard at a time.
const TRIM_STEPS: usize = 256;
/// So many inodes with successive numbers are loaded together.
const NEAR: u64 = 64;
/// So many threads do that at a time.
const AROUND_MAX: usize = 8;
/// Inodes may take this part of the memory, and cached names as much.
const SHARE: usize = 8;
/// Bytes that a cached name takes, about.
const NAME_MEMORY: usize = 100;
/// So many names are cached in the smallest memory.
const NAMES_LEAST: usize = 1024;
/// A directory with more names than this part of all that may be cached is not read into a cache.
const DIR_SHARE: usize = 4;
/// So many directories are looked at when too many names are cached.
const NAME_STEPS: usize = 16;
/// The queue of cached directories is tidied at this length at first.
const CACHED_DIRS_TIDY: usize = 1024;
/// A name for a message is looked for in so many keys.
const HINT_KEYS_MAX: usize = 1 << 20;

/// How the store finds inodes that it knows only by number.
pub trait InodeSource: Send + Sync {
    /// The inode, loaded if nobody has it; `None`: it does not exist.
    fn inode(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError>;
    /// The memory has `most` bytes: if inodes and names take more than their parts of it, some that
    /// are not in use leave. Returns what they take then. For a thread that has nothing else to do;
    /// it does not take long, and comes again.
    fn trim(&self, most: usize) -> usize;
    /// A path or a name, for log messages.
    fn name_hint(&self, ino: Ino) -> String;
}

/// Directories whose entries are cached, oldest first; and some whose entries no longer are.
struct CachedDirs {
    queue: VecDeque<Ino>,
    /// At this length, those that are cached no longer leave the queue.
    tidy_at: usize,
}

/// The journal as the place where inodes come from.
struct Stored(Arc<Journal>);

impl Store for Stored {
    type Inode = Inode;
    type Error = FsError;

    fn may_wait(&self) -> Result<(), FsError> {
        patience::may_wait()
    }

    fn load(&self, ino: Ino) -> Result<Option<Inode>, FsError> {
        patience::may_wait()?;
        let Some(value) = self.0.get(&keys::inode(ino))? else { return Ok(None) };
        Ok(Some(Inode::new(ino, InodeRecord::decode(&value)?)))
    }

    fn part(&self, inode: &Inode) -> Parting {
        if inode.ino == ROOT || inode.is_open() || !inode.file.is_at_rest() {
            return Parting::Stays;
        }
        let Some(state) = inode.state.try_write() else { return Parting::Stays };
        // An orphan is reclaimed when nobody knows it any more.
        if state.rec.nlink == 0 || state.rec.size != state.logged.size {
            return Parting::Stays;
        }
        if state.times_dirty {
            return Parting::Behind;
        }
        checked!(self.has_all_of(inode.ino, &state), "the journal is behind on {}", inode.ino);
        let lookups = inode.lookups.load(Ordering::Acquire);
        Remembered::new(lookups, inode.has_flag(Inode::MAPPED))
            .map_or(Parting::Stays, Parting::Leaves)
    }

    fn newest_change(&self, inode: &Inode) -> u64 {
        inode.last_seq.load(Ordering::Acquire)
    }

    fn restore(&self, inode: &Inode, known: Remembered, newest_change: u64) {
        inode.lookups.store(known.lookups(), Ordering::Release);
        inode.last_seq.store(newest_change, Ordering::Release);
        if known.is_mapped() {
            inode.set_flag(Inode::MAPPED);
        }
    }

    fn note_use(&self, inode: &Inode) {
        // Nobody writes to what all threads read, but once in a while.
        if !inode.has_flag(Inode::USED) {
            inode.set_flag(Inode::USED);
        }
    }

    fn take_used(&self, inode: &Inode) -> bool {
        inode.clear_flag(Inode::USED)
    }
}

impl Stored {
    /// Whether the inode would come back as it is. (What cannot be read now can be read later.)
    fn has_all_of(&self, ino: Ino, state: &InodeState) -> bool {
        let Ok(Some(value)) = self.0.get(&keys::inode(ino)) else { return true };
        let stored = InodeRecord::decode(&value).map(InodeState::from_record);
        stored.is_ok_and(|stored| stored.rec == state.rec && stored.logged == state.logged)
    }
}

/// So many inodes of a shard may be in memory whole, if no more are in use.
fn shard_most(memory: usize) -> usize {
    memory / SHARE / Inode::MEMORY / SHARDS
}

/// So many names may be cached.
fn names_most(memory: usize) -> usize {
    (memory / SHARE / NAME_MEMORY).max(NAMES_LEAST)
}

/// What the table takes, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) inodes: usize,
    pub(crate) remembered: usize,
    pub(crate) names: usize,
}

impl Memory {
    pub(crate) fn total(self) -> usize {
        self.inodes + self.remembered + self.names
    }
}

/// All inodes that somebody knows.
pub(crate) struct InodeTable {
    stored: Stored,
    shards: Box<[Shard<Inode>]>,
    /// More residents than this in a shard leave, if they may.
    shard_most: AtomicUsize,
    /// So many names are cached, in all directories together.
    names_most: AtomicUsize,
    /// Inodes whose times the journal does not have, and nobody but a sync would log.
    lazy_times: Mutex<Vec<Arc<Inode>>>,
    /// The first of those that a thread loads together.
    around: Mutex<HashSet<Ino>>,
    cached_dirs: Mutex<CachedDirs>,
    dir_entries: AtomicUsize,
}

impl InodeTable {
    /// A table whose inodes and names may take a part of `most` bytes each.
    pub(crate) fn new(journal: Arc<Journal>, most: usize) -> Self {
        Self {
            stored: Stored(journal),
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            shard_most: AtomicUsize::new(shard_most(most)),
            names_most: AtomicUsize::new(names_most(most)),
            lazy_times: Mutex::default(),
            around: Mutex::default(),
            cached_dirs: Mutex::new(CachedDirs {
                queue: VecDeque::new(),
                tidy_at: CACHED_DIRS_TIDY,
            }),
            dir_entries: AtomicUsize::new(0),
        }
    }

    fn shard(&self, ino: Ino) -> &Shard<Inode> {
        &self.shards[ino as usize % SHARDS]
    }

    fn shard_most(&self) -> usize {
        self.shard_most.load(Ordering::Relaxed)
    }

    /// The inode, loaded if it is not in memory; `None`: it does not exist.
    pub(crate) fn get(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError> {
        let mut moved = Moved::default();
        let found = self.shard(ino).get(&self.stored, ino, self.shard_most(), &mut moved);
        self.settle(moved);
        found
    }

    /// Loads the inodes whose numbers are near: they were made together, and their records lie
    /// together. What cannot be read is told to who asks for it.
    pub(crate) fn load_around(&self, ino: Ino) {
        let first = ino - ino % NEAR;
        {
            let mut around = self.around.lock();
            if around.len() >= AROUND_MAX || !around.insert(first) {
                return;
            }
        }
        for near in (first..first + NEAR).filter(|near| self.peek(*near).is_none()) {
            if self.get(near).is_err() {
                break;
            }
        }
        self.around.lock().remove(&first);
    }

    /// The inode that a request names.
    pub(crate) fn need(&self, ino: Ino) -> Result<Arc<Inode>, FsError> {
        self.get(ino)?.ok_or(FsError::Errno(Errno(libc::ESTALE)))
    }

    /// The inode, if it is in memory whole.
    pub(crate) fn peek(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.shard(ino).peek(ino)
    }

    /// Adds an inode that was just made.
    pub(crate) fn insert(&self, inode: &Arc<Inode>) {
        let mut moved = Moved::default();
        let shard = self.shard(inode.ino);
        shard.insert(&self.stored, inode.ino, inode, self.shard_most(), &mut moved);
        self.settle(moved);
    }

    /// Forgets an inode whose record was deleted.
    pub(crate) fn remove(&self, inode: &Inode) {
        let removed = self.shard(inode.ino).remove(inode.ino);
        self.uncache_dir(inode);
        drop(removed);
    }

    /// The kernel takes lookups back. The inode, if it is in memory whole: the caller counts them.
    pub(crate) fn forget(&self, ino: Ino, count: u64) -> Option<Arc<Inode>> {
        self.shard(ino).forget(ino, count)
    }

    /// What is remembered of inodes that are not in memory whole.
    pub(crate) fn remembered(&self) -> Vec<(Ino, Remembered)> {
        self.shards.iter().flat_map(Shard::remembered).collect()
    }

    /// The kernel knows an inode since before this process. No request was served yet.
    pub(crate) fn adopt(&self, ino: Ino, known: Remembered) {
        self.shard(ino).adopt(&self.stored, ino, known);
    }

    /// The kernel has forgotten every inode. Those in memory whole: the caller counts their
    /// lookups.
    pub(crate) fn forget_all(&self) -> Vec<Arc<Inode>> {
        self.shards.iter().flat_map(Shard::forget_all).collect()
    }

    /// What follows when inodes have left, or cannot leave before their times are logged.
    fn settle(&self, moved: Moved<Inode>) {
        moved.left.iter().for_each(|inode| self.uncache_dir(inode));
        for inode in moved.behind {
            if inode.state.list() {
                self.lazy_times.lock().push(inode);
            }
        }
    }

    /// The inode's times are to be logged some day. How many wait for it.
    pub(crate) fn log_later(&self, inode: &Arc<Inode>) -> usize {
        let mut lazy = self.lazy_times.lock();
        lazy.push(Arc::clone(inode));
        lazy.len()
    }

    /// Inodes whose times wait to be logged: the caller logs them.
    pub(crate) fn take_lazy_times(&self) -> Vec<Arc<Inode>> {
        std::mem::take(&mut *self.lazy_times.lock())
    }

    /// They wait on.
    pub(crate) fn put_lazy_times(&self, inodes: &[Arc<Inode>]) {
        self.lazy_times.lock().extend_from_slice(inodes);
    }

    /// Every inode in memory.
    pub(crate) fn all(&self) -> Vec<Arc<Inode>> {
        self.shards.iter().flat_map(Shard::residents).collect()
    }

    /// How many inodes are in memory whole, and how many are remembered.
    pub(crate) fn counts(&self) -> Counts {
        self.shards.iter().map(Shard::counts).fold(Counts::default(), |sum, shard| Counts {
            resident: sum.resident + shard.resident,
            remembered: sum.remembered + shard.remembered,
            queued: sum.queued + shard.queued,
            remembered_bytes: sum.remembered_bytes + shard.remembered_bytes,
        })
    }

    /// Takes `entries` as all of the directory's; its inode lock is held, so that they are.
    pub(crate) fn cache_dir(&self, inode: &Inode, entries: BTreeMap<u64, DirName>) {
        let added = inode.dir.fill(entries);
        if !inode.set_flag(Inode::DIR_CACHED) {
            let mut dirs = self.cached_dirs.lock();
            dirs.queue.push_back(inode.ino);
            if dirs.queue.len() > dirs.tidy_at {
                self.tidy(&mut dirs);
            }
        }
        self.dir_entries_grew(added);
    }

    /// Drops what is twice or for nothing in the queue.
    fn tidy(&self, dirs: &mut CachedDirs) {
        let mut seen = HashSet::new();
        let cached = |ino| self.peek(ino).is_some_and(|inode| inode.has_flag(Inode::DIR_CACHED));
        dirs.queue.retain(|ino| seen.insert(*ino) && cached(*ino));
        dirs.tidy_at = CACHED_DIRS_TIDY.max(2 * dirs.queue.len());
    }

    /// `added` entries more are cached; drops caches that nobody used for a while if they are too
    /// many.
    pub(crate) fn dir_entries_grew(&self, added: usize) {
        self.dir_entries.fetch_add(added, Ordering::Relaxed);
        self.shrink_names(NAME_STEPS + added / NAME_STEPS);
    }

    /// Looks at up to `steps` directories if too many names are cached: those that were not used
    /// since the last look lose their caches.
    fn shrink_names(&self, steps: usize) {
        for _ in 0..steps {
            if self.dir_entries() <= self.names_most.load(Ordering::Relaxed) {
                return;
            }
            // The queue is not locked while a shard is.
            let first = self.cached_dirs.lock().queue.pop_front();
            let Some(ino) = first else { return };
            let Some(inode) = self.peek(ino) else { continue };
            if inode.dir.take_used() {
                self.cached_dirs.lock().queue.push_back(ino);
            } else {
                self.uncache_dir(&inode);
            }
        }
    }

    /// A directory with more entries than this is read from the journal, entry by entry.
    pub(crate) fn load_most(&self) -> u64 {
        LOAD_MAX.min((self.names_most.load(Ordering::Relaxed) / DIR_SHARE) as u64)
    }

    /// What it takes.
    pub(crate) fn memory(&self) -> Memory {
        let counts = self.counts();
        Memory {
            inodes: counts.resident * Inode::MEMORY,
            remembered: counts.remembered_bytes,
            names: self.dir_entries() * NAME_MEMORY,
        }
    }

    /// `removed` entries fewer are cached.
    pub(crate) fn dir_entries_shrank(&self, removed: usize) {
        self.dir_entries.fetch_sub(removed, Ordering::Relaxed);
    }

    fn uncache_dir(&self, inode: &Inode) {
        inode.clear_flag(Inode::DIR_CACHED);
        self.dir_entries_shrank(inode.dir.clear());
    }

    #[cfg(test)]
    pub(crate) fn cached_dirs(&self) -> usize {
        self.cached_dirs.lock().queue.len()
    }

    pub(crate) fn dir_entries(&self) -> usize {
        self.dir_entries.load(Ordering::Relaxed)
    }

    /// Of each of these that has a name in a cached directory: it, the directory and the name.
    pub(crate) fn cached_names(&self, inodes: &BTreeSet<Ino>) -> impl Iterator<Item = CachedName> {
        self.all().into_iter().flat_map(|dir| {
            let names = dir.dir.names_of(inodes).into_iter();
            names.map(move |(ino, name)| (ino, dir.ino, name))
        })
    }

    /// The directory in which `ino` has a name, and the name: from caches, else from the journal,
    /// not beyond a limit.
    fn parent_and_name(&self, ino: Ino) -> Option<(Ino, Box<[u8]>)> {
        if let Some((_, dir, name)) = self.cached_names(&BTreeSet::from([ino])).next() {
            return Some((dir, name));
        }
        let (mut found, mut seen) = (None, 0);
        let scanned =
            self.stored.0.scan(&keys::inode(0), &keys::inode_end(Ino::MAX), &mut |key, value| {
                seen += 1;
                if let (Some(Key::Dentry(dir, _, name)), Ok(to)) =
                    (keys::parse(key), Dentry::decode(value))
                {
                    found = (to.ino == ino).then(|| (dir, name.into()));
                }
                found.is_none() && seen < HINT_KEYS_MAX
            });
        scanned.ok().and(found)
    }
}

impl InodeSource for InodeTable {
    fn inode(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError> {
        self.get(ino)
    }

    fn trim(&self, most: usize) -> usize {
        self.shard_most.store(shard_most(most), Ordering::Relaxed);
        self.names_most.store(names_most(most), Ordering::Relaxed);
        for shard in &self.shards {
            let mut moved = Moved::default();
            shard.trim(&self.stored, self.shard_most(), TRIM_STEPS, &mut moved);
            self.settle(moved);
        }
        self.shrink_names(TRIM_STEPS);
        self.memory().total()
    }

    /// Takes no inode lock: the caller may hold some.
    fn name_hint(&self, ino: Ino) -> String {
        let mut path = Vec::new();
        let mut at = ino;
        while at != ROOT && path.len() < 64 {
            let Some((parent, name)) = self.parent_and_name(at) else { break };
            path.push(String::from_utf8_lossy(&name).into_owned());
            at = parent;
        }
        path.reverse();
        match (path.is_empty(), at) {
            (true, ROOT) => "/".into(),
            (true, _) => format!("inode {ino}"),
            (false, ROOT) => format!("/{}", path.join("/")),
            (false, _) => format!("…/{}", path.join("/")),
        }
    }
}
