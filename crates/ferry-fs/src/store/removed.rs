//! Files without a name whose space is on its way back. Whoever finds no space waits for theirs,
//! and statfs counts it as free.
//!
//! A file that loses its last name keeps its space until nobody knows it. A program that has
//! removed a file it does not hold open expects the space at once, but the kernel closes and
//! forgets behind its back, and large files are reclaimed in the background.

use crate::api::Ino;
use crate::inode::incore::Inode;
use ferry_env::Clock;
use ferry_journal::Seq;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The kernel has closed and forgotten a file this long after its last name or its last handle
/// went, or somebody holds it on purpose.
const FORGETTING_TIME_MAX: Duration = Duration::from_secs(1);

/// The home store is asked what it has when the removals of so many contexts are remembered.
const CONTEXTS_MAX: usize = 1024;

struct File {
    inode: Arc<Inode>,
    /// Somebody has begun to reclaim it.
    going: bool,
}

#[derive(Default)]
struct State {
    files: BTreeMap<Ino, File>,
    /// How many of them are being reclaimed.
    going: usize,
    /// When the kernel has forgotten those that it will forget by itself.
    forgotten_at: Duration,
    /// Files that were removed before the mount, and are to be reclaimed now.
    leftovers: usize,
    /// Nothing is reclaimed any more.
    stopped: bool,
}

impl State {
    /// Something becomes free, if nothing fails.
    fn is_sure(&self) -> bool {
        !self.stopped && (self.going > 0 || self.leftovers > 0)
    }
}

/// All such files.
#[derive(Default)]
pub struct Removed {
    state: Mutex<State>,
    /// Bytes of metadata that contexts have removed, oldest first: the home store has them until it
    /// has the context.
    metadata: Mutex<VecDeque<(Seq, u64)>>,
    less: Condvar,
}

impl Removed {
    /// The file has no name: the kernel is about to forget it, unless a program holds it.
    pub fn expect(&self, inode: &Arc<Inode>, clock: &dyn Clock) {
        let mut state = self.state.lock();
        // Looked at under this lock: what was reclaimed or linked meanwhile has left, and must not
        // come back.
        if inode.has_flag(Inode::GONE) || !inode.has_flag(Inode::NAMELESS) {
            return;
        }
        state.forgotten_at = clock.monotonic() + FORGETTING_TIME_MAX;
        state
            .files
            .entry(inode.ino)
            .or_insert_with(|| File { inode: Arc::clone(inode), going: false });
    }

    /// Nobody knows the file any more: it is being reclaimed from now on.
    pub fn going(&self, inode: &Arc<Inode>) {
        let mut state = self.state.lock();
        let file = File { inode: Arc::clone(inode), going: true };
        let before = state.files.insert(inode.ino, file);
        state.going += usize::from(before.is_none_or(|file| !file.going));
    }

    /// The file is gone, has a name again, or stays for now.
    pub fn leave(&self, ino: Ino) {
        let mut state = self.state.lock();
        let left = state.files.remove(&ino);
        state.going -= usize::from(left.is_some_and(|file| file.going));
        drop(state);
        self.less.notify_all();
    }

    /// So many files from before the mount are still to be reclaimed.
    pub fn left_over(&self, count: usize) {
        self.state.lock().leftovers = count;
        self.less.notify_all();
    }

    /// The volume is being closed: nobody waits any more.
    pub fn stop(&self) {
        self.state.lock().stopped = true;
        self.less.notify_all();
    }

    /// Waits while space is `lacking` and some is on its way back. Called by nobody for whom a
    /// reclaim, a close or a forget waits. `lacking` takes no lock.
    pub fn wait_while(&self, clock: &dyn Clock, lacking: impl Fn() -> bool) {
        let mut state = self.state.lock();
        while lacking() {
            if state.is_sure() {
                self.less.wait(&mut state);
                continue;
            }
            let left = state.forgotten_at.saturating_sub(clock.monotonic());
            if state.stopped || state.files.is_empty() || left.is_zero() {
                return;
            }
            self.less.wait_for(&mut state, left);
        }
    }

    /// A context has removed so many bytes of metadata. `home`: what the home store has.
    pub fn dropped(&self, seq: Seq, bytes: u64, home: impl FnOnce() -> Seq) {
        let mut metadata = self.metadata.lock();
        match metadata.back_mut() {
            Some((newest, sum)) if *newest >= seq => *sum += bytes,
            _ => metadata.push_back((seq, bytes)),
        }
        if metadata.len() > CONTEXTS_MAX {
            let home = home();
            metadata.retain(|(seq, _)| *seq > home);
        }
    }

    /// Bytes of metadata that the home store has, as of context `home`, and that are removed.
    pub fn metadata_since(&self, home: Seq) -> u64 {
        let mut metadata = self.metadata.lock();
        metadata.retain(|(seq, _)| *seq > home);
        metadata.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Blocks that come back without any program's doing.
    pub fn blocks(&self) -> u64 {
        let closed = |file: &File| file.going || file.inode.opens.load(Ordering::Acquire) == 0;
        let files = self.state.lock();
        let inodes: Vec<_> = files
            .files
            .values()
            .filter(|file| closed(file))
            .map(|file| Arc::clone(&file.inode))
            .collect();
        drop(files);
        inodes.iter().map(|inode| inode.state.share().rec.blocks).sum()
    }
}
