//! Files without a name whose space is on its way back. A writer that finds no space waits for
//! theirs, and statfs counts it as free.
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
    reclaiming: bool,
}

#[derive(Default)]
struct State {
    files: BTreeMap<Ino, File>,
    /// How many of them are being reclaimed.
    reclaiming: usize,
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
        !self.stopped && (self.reclaiming > 0 || self.leftovers > 0)
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
        if inode.has_flag(Inode::RECLAIMING) || !inode.has_flag(Inode::NAMELESS) {
            return;
        }
        state.forgotten_at = clock.monotonic() + FORGETTING_TIME_MAX;
        state
            .files
            .entry(inode.ino)
            .or_insert_with(|| File { inode: Arc::clone(inode), reclaiming: false });
    }

    /// Nobody knows the file any more: it is being reclaimed from now on.
    pub fn reclaiming(&self, inode: &Arc<Inode>) {
        let mut state = self.state.lock();
        let file = File { inode: Arc::clone(inode), reclaiming: true };
        let before = state.files.insert(inode.ino, file);
        state.reclaiming += usize::from(before.is_none_or(|file| !file.reclaiming));
    }

    /// The file is gone, has a name again, or stays for now. If it was being reclaimed, the
    /// kernel's forgetting has waited for that, and goes on now.
    pub fn leave(&self, ino: Ino, clock: &dyn Clock) {
        let mut state = self.state.lock();
        if state.files.remove(&ino).is_some_and(|file| file.reclaiming) {
            state.reclaiming -= 1;
            state.forgotten_at = clock.monotonic() + FORGETTING_TIME_MAX;
        }
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
        let closed = |file: &File| file.reclaiming || file.inode.opens.load(Ordering::Acquire) == 0;
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

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use crate::keys::InodeRecord;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    #[derive(Default)]
    struct Stopped(AtomicU64);

    impl Clock for Stopped {
        fn monotonic(&self) -> Duration {
            Duration::from_secs(self.0.load(Ordering::SeqCst))
        }
        fn wall(&self) -> Duration {
            self.monotonic()
        }
    }

    #[test]
    fn files_whose_forgetting_waits_for_a_slow_reclaim_are_waited_for() {
        let (removed, clock) = (Removed::default(), Stopped::default());
        let files = [10, 11].map(|ino| {
            let inode = Arc::new(Inode::new(ino, InodeRecord::default()));
            inode.set_flag(Inode::NAMELESS);
            removed.expect(&inode, &clock);
            inode
        });
        removed.reclaiming(&files[0]);
        clock.0.store(2 * FORGETTING_TIME_MAX.as_secs(), Ordering::SeqCst);
        let (asked, lacking) = (AtomicU64::new(0), AtomicBool::new(true));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut last = true;
                let seen = parking_lot::Mutex::new(&mut last);
                removed.wait_while(&clock, || {
                    asked.fetch_add(1, Ordering::SeqCst);
                    **seen.lock() = lacking.load(Ordering::SeqCst);
                    **seen.lock()
                });
                last
            });
            let has_asked = |times| {
                while asked.load(Ordering::SeqCst) < times {
                    std::thread::yield_now();
                }
            };
            has_asked(1);
            removed.leave(10, &clock);
            has_asked(2);
            removed.reclaiming(&files[1]);
            lacking.store(false, Ordering::SeqCst);
            removed.leave(11, &clock);
            assert!(!waiting.join().unwrap(), "it gave up while space was coming");
        });
    }
}
