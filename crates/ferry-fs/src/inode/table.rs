//! The inodes in memory, by number: those that somebody knows, and a bounded number of cold ones.

use crate::api::{Errno, Ino, ROOT};
use crate::error::FsError;
use crate::inode::dir_cache::DirName;
use crate::inode::incore::Inode;
use crate::keys::{self, Dentry, InodeRecord, Key};
use crate::store::data_store::InodeSource;
use ferry_journal::Journal;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const SHARDS: usize = 64;
/// So many inodes stay in memory that neither the kernel nor a handle knows.
const COLD_MAX: usize = 8192;
/// So many directory entries are cached, in all directories together (about 100 bytes each).
const DIR_ENTRIES_MAX: usize = 1 << 19;
/// The queue of cached directories is tidied at this length at first.
const CACHED_DIRS_TIDY: usize = 1024;
/// A name for a message is looked for in so many keys.
const HINT_KEYS_MAX: usize = 1 << 20;

/// Inode numbers are dense: spreading their low bits is enough.
#[derive(Default)]
struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*b);
        }
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = v.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Shard = Mutex<HashMap<Ino, Arc<Inode>, BuildHasherDefault<InoHasher>>>;

/// Directories whose entries are cached, oldest first; and some whose entries no longer are.
struct CachedDirs {
    queue: VecDeque<Ino>,
    /// At this length, those that are cached no longer leave the queue.
    tidy_at: usize,
}

/// All inodes in memory.
pub(crate) struct InodeTable {
    journal: Arc<Journal>,
    shards: Box<[Shard]>,
    /// Inodes that nobody knew when they were put here, oldest first.
    cold: Mutex<VecDeque<Ino>>,
    cached_dirs: Mutex<CachedDirs>,
    dir_entries: AtomicUsize,
}

impl InodeTable {
    pub(crate) fn new(journal: Arc<Journal>) -> Self {
        Self {
            journal,
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            cold: Mutex::default(),
            cached_dirs: Mutex::new(CachedDirs {
                queue: VecDeque::new(),
                tidy_at: CACHED_DIRS_TIDY,
            }),
            dir_entries: AtomicUsize::new(0),
        }
    }

    fn shard(&self, ino: Ino) -> &Shard {
        &self.shards[ino as usize % SHARDS]
    }

    /// The inode, loaded if it is not in memory; `None`: it does not exist.
    ///
    /// Loading holds the shard's lock, so that an inode that is deleted from the journal first and
    /// from the table after it cannot come back in between.
    pub(crate) fn get(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError> {
        let mut shard = self.shard(ino).lock();
        if let Some(inode) = shard.get(&ino) {
            return Ok(Some(inode.clone()));
        }
        let Some(value) = self.journal.get(&keys::inode(ino))? else { return Ok(None) };
        let inode = Arc::new(Inode::new(ino, InodeRecord::decode(&value)?));
        shard.insert(ino, inode.clone());
        Ok(Some(inode))
    }

    /// The inode that a request names.
    pub(crate) fn need(&self, ino: Ino) -> Result<Arc<Inode>, FsError> {
        self.get(ino)?.ok_or(FsError::Errno(Errno(libc::ESTALE)))
    }

    /// The inode, if it is in memory.
    pub(crate) fn peek(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.shard(ino).lock().get(&ino).cloned()
    }

    /// Adds an inode that was just made.
    pub(crate) fn insert(&self, inode: &Arc<Inode>) {
        let before = self.shard(inode.ino).lock().insert(inode.ino, inode.clone());
        assert!(before.is_none(), "inode {} was handed out twice", inode.ino);
    }

    /// Forgets an inode whose record was deleted.
    pub(crate) fn remove(&self, inode: &Inode) {
        self.shard(inode.ino).lock().remove(&inode.ino);
        self.uncache_dir(inode);
    }

    /// Every inode in memory.
    pub(crate) fn all(&self) -> Vec<Arc<Inode>> {
        self.shards.iter().flat_map(|s| s.lock().values().cloned().collect::<Vec<_>>()).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().len()).sum()
    }

    /// Nobody knows `inode` for now: it may be evicted, later. Returns one that should leave memory
    /// but whose times the journal does not have; the caller logs them and calls again.
    pub(crate) fn cool(&self, inode: &Inode) -> Option<Arc<Inode>> {
        if inode.set_flag(Inode::COLD) {
            return None;
        }
        self.cold.lock().push_back(inode.ino);
        // Two for one: those that had to stay for a while are made up for.
        for _ in 0..2 {
            let oldest = {
                let mut cold = self.cold.lock();
                (cold.len() > COLD_MAX).then(|| cold.pop_front()).flatten()
            };
            if let Some(stale) = self.evict(oldest?) {
                return Some(stale);
            }
        }
        None
    }

    fn evict(&self, ino: Ino) -> Option<Arc<Inode>> {
        let mut shard = self.shard(ino).lock();
        let inode = shard.get(&ino)?;
        inode.clear_flag(Inode::COLD);
        if ino == ROOT || inode.is_known() {
            return None;
        }
        // Nobody can take a new reference while the shard is locked, so a count of one stays one.
        // What write-back or a batch holds, and what a later fsync must still force, has another
        // turn: nobody else would bring it here again.
        let forced = inode.last_seq.load(Ordering::Acquire) <= self.journal.durable().0;
        if Arc::strong_count(inode) > 1 || !forced {
            if !inode.set_flag(Inode::COLD) {
                self.cold.lock().push_back(ino);
            }
            return None;
        }
        if inode.state.read().times_dirty {
            return Some(inode.clone());
        }
        let inode = shard.remove(&ino)?;
        drop(shard);
        self.uncache_dir(&inode);
        None
    }

    /// Takes `entries` as all of the directory's; its inode lock is held, so that they are.
    pub(crate) fn cache_dir(&self, inode: &Inode, entries: BTreeMap<u64, DirName>) {
        let added = inode.dir.fill(entries);
        if !inode.set_flag(Inode::DIR_CACHED) {
            let mut dirs = self.cached_dirs.lock();
            dirs.queue.push_back(inode.ino);
            if dirs.queue.len() > dirs.tidy_at {
                self.tidy(&mut dirs, inode);
            }
        }
        self.dir_entries_grew(added);
    }

    /// Drops what is twice or for nothing in the queue. `newest` may not be in the table yet.
    fn tidy(&self, dirs: &mut CachedDirs, newest: &Inode) {
        let mut seen = HashSet::new();
        let cached = |ino| self.peek(ino).is_some_and(|inode| inode.has_flag(Inode::DIR_CACHED));
        dirs.queue.retain(|ino| seen.insert(*ino) && (*ino == newest.ino || cached(*ino)));
        dirs.tidy_at = CACHED_DIRS_TIDY.max(2 * dirs.queue.len());
    }

    /// `added` entries more are cached; drops caches that nobody used for a while if they are too
    /// many.
    pub(crate) fn dir_entries_grew(&self, added: usize) {
        let mut entries = self.dir_entries.fetch_add(added, Ordering::Relaxed) + added;
        let mut tries = 0;
        while entries > DIR_ENTRIES_MAX {
            let queue = &mut self.cached_dirs.lock().queue;
            tries += 1;
            let Some(ino) = queue.pop_front() else { return };
            let Some(inode) = self.peek(ino) else { continue };
            if inode.dir.take_used() && tries <= queue.len() {
                queue.push_back(ino);
                continue;
            }
            self.uncache_dir(&inode);
            entries = self.dir_entries.load(Ordering::Relaxed);
        }
    }

    /// `gone` entries fewer are cached.
    pub(crate) fn dir_entries_shrank(&self, gone: usize) {
        self.dir_entries.fetch_sub(gone, Ordering::Relaxed);
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

    /// The directory in which `ino` has a name, and the name: from caches, else from the journal,
    /// not beyond a limit.
    fn parent_and_name(&self, ino: Ino) -> Option<(Ino, Box<[u8]>)> {
        for inode in self.all() {
            if let Some(name) = inode.dir.name_of(ino) {
                return Some((inode.ino, name));
            }
        }
        let (mut found, mut seen) = (None, 0);
        let scanned =
            self.journal.scan(&keys::inode(0), &keys::inode_end(Ino::MAX), &mut |key, value| {
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
    /// One that nobody knows leaves memory like others of that kind.
    fn inode(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError> {
        let found = self.get(ino)?;
        if let Some(inode) = found.as_ref().filter(|i| !i.is_known())
            && let Some(stale) = self.cool(inode)
            && !stale.set_flag(Inode::COLD)
        {
            self.cold.lock().push_back(stale.ino); // its times are logged when somebody comes by who may
        }
        Ok(found)
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
