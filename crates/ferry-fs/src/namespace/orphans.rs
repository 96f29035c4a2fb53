//! Inodes without a name: their space comes back once nobody knows them any more.
//!
//! An orphan's key is in the same transaction that took its last name. When the kernel has
//! forgotten the inode and the last handle is closed, its extents, attributes and record go; after
//! a crash the orphans that are left over go in the background. Large files go in the background
//! too: the kernel's forgetting must not wait for them. Where programs on other machines outlive
//! the mount (`keeps_removed`) its end reclaims nothing, and the next one waits with what is left
//! over until it is told to go on.

use crate::api::Ino;
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{self, INODE_HAS_XATTRS, Key};
use crate::local::local_fs::LocalFs;
use crate::posix::is_regular;
use crate::store::data_store::Busy;
use crate::volume::VolumeError;
use ferry_journal::{Credits, Transaction};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

/// A file with more blocks than this is reclaimed in the background.
const BLOCKS_AT_ONCE: u64 = 4096;
/// So many inodes wait for the background; beyond that the caller does the work.
const QUEUE_MAX: usize = 4096;
/// So many attributes go in one transaction.
const XATTRS_AT_ONCE: usize = 16;
/// The record, the orphan's key and the counters.
const LAST_STEP: Credits = Credits { keys: 3, bytes: 128, urgent: true };
/// Bytes of an inode's record and of its name, with their keys, at least.
const RECORD_AND_NAME_BYTES: u64 = 150;
/// Bytes of an extent with its key, and of the checksum of each of its blocks; and the blocks that
/// one has at most.
const EXTENT_BYTES: u64 = 27;
const CHECKSUM_BYTES: u64 = 4;
const EXTENT_BLOCKS_MAX: u64 = 256;
/// Progress is logged after so many leftovers.
const PROGRESS_EVERY: u64 = 10_000;

#[derive(Default)]
struct Queue {
    /// Left over from before the mount, or removed while somebody may still know what is.
    leftovers: BTreeSet<Ino>,
    /// Somebody may still know them.
    held: bool,
    /// Removed since.
    removed: VecDeque<Arc<Inode>>,
    stop: bool,
}

impl Queue {
    /// What is to be reclaimed next, if there is anything.
    fn take(&mut self) -> Option<Job> {
        if let Some(inode) = self.removed.pop_front() {
            return Some(Job::Removed(inode));
        }
        let ino = if self.held { None } else { self.leftovers.pop_first() };
        ino.map(|ino| Job::Leftover(ino, self.leftovers.len()))
    }
}

/// The background's queue and thread.
#[derive(Default)]
pub(crate) struct Reclaimer {
    queue: Mutex<Queue>,
    wake: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Job {
    Leftover(Ino, usize),
    Removed(Arc<Inode>),
}

impl Reclaimer {
    /// The next inode to reclaim; waits for one. `None`: the volume is being closed.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(job) = queue.take() {
                return Some(job);
            }
            self.wake.wait(&mut queue);
        }
    }

    /// Hands an inode over; `false`: the caller must reclaim it.
    fn hand_over(&self, inode: &Arc<Inode>) -> bool {
        let mut queue = self.queue.lock();
        if queue.stop || queue.removed.len() >= QUEUE_MAX {
            return false;
        }
        queue.removed.push_back(inode.clone());
        self.wake.notify_one();
        true
    }

    /// Stops the thread; what is queued stays for the next mount.
    pub(crate) fn stop(&self) {
        self.queue.lock().stop = true;
        self.wake.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let ended = thread.join();
            if ended.is_err() {
                tracing::error!("the reclaiming thread panicked");
            }
        }
    }

    /// Whether somebody who is not back yet may know what has no name any more.
    pub(crate) fn holds(&self) -> bool {
        self.queue.lock().held
    }

    /// An inode has lost its last name, and nobody knows it; `true`: somebody who is not back yet
    /// may, so it is left over, too.
    fn takes_in(&self, ino: Ino) -> bool {
        let mut queue = self.queue.lock();
        if queue.held {
            queue.leftovers.insert(ino);
        }
        queue.held
    }

    pub(crate) fn waiting(&self) -> usize {
        let queue = self.queue.lock();
        queue.leftovers.len() + queue.removed.len()
    }
}

fn run(reclaimer: &Reclaimer, fs: &Weak<LocalFs>) {
    let mut done = 0;
    while let Some(job) = reclaimer.next() {
        let Some(fs) = fs.upgrade() else { return };
        match job {
            Job::Removed(inode) => fs.reclaim(&inode),
            Job::Leftover(ino, left) => {
                fs.reclaim_leftover(ino);
                fs.data.removed().left_over(left);
                done += 1;
                if left == 0 || done % PROGRESS_EVERY == 0 {
                    tracing::info!(
                        volume = fs.name,
                        done,
                        left,
                        "reclaiming files that were removed before the mount"
                    );
                }
            }
        }
    }
}

/// What the home store has of an inode and a name of it, at least: record, contents, extents with
/// their checksums.
fn metadata_bytes(state: &InodeState) -> u64 {
    let inline = state.logged.inline.as_ref().map_or(0, |inline| inline.len() as u64);
    let extents = state.logged.blocks.div_ceil(EXTENT_BLOCKS_MAX);
    RECORD_AND_NAME_BYTES + inline + state.logged.blocks * CHECKSUM_BYTES + extents * EXTENT_BYTES
}

impl LocalFs {
    /// Reclaims what was removed before the mount, and starts the thread that does so from now on.
    pub(crate) fn start_reclaimer(self: &Arc<Self>) -> Result<(), VolumeError> {
        if self.options.read_only {
            return Ok(());
        }
        let mut leftovers = BTreeSet::new();
        let scanned = self.journal.scan(&keys::orphan(0), &keys::orphan_end(), &mut |key, _| {
            if let Some(Key::Orphan(ino)) = keys::parse(key) {
                leftovers.insert(ino);
            }
            true
        });
        scanned.map_err(FsError::from)?;
        let held = self.options.keeps_removed;
        self.data.removed().left_over(if held || !self.options.background {
            0
        } else {
            leftovers.len()
        });
        *self.reclaimer.queue.lock() = Queue { leftovers, held, ..Queue::default() };
        if !self.options.background {
            if !held {
                self.reclaim_leftovers();
            }
            return Ok(());
        }
        let (reclaimer, fs) = (self.reclaimer.clone(), Arc::downgrade(self));
        let thread = std::thread::Builder::new()
            .name("ferry-reclaim".into())
            .spawn(move || run(&reclaimer, &fs));
        let thread = thread.map_err(|source| VolumeError::Io { what: "start a thread", source })?;
        *self.reclaimer.thread.lock() = Some(thread);
        Ok(())
    }

    /// What is left over from before the mount goes, but for what is known again.
    pub(crate) fn reclaim_leftovers(&self) {
        let mut queue = self.reclaimer.queue.lock();
        queue.held = false;
        if self.options.background {
            self.data.removed().left_over(queue.leftovers.len());
        }
        drop(queue);
        self.reclaimer.wake.notify_one();
        if !self.options.background {
            // Without a background nothing else is in the queue.
            let leftovers = std::mem::take(&mut self.reclaimer.queue.lock().leftovers);
            leftovers.into_iter().for_each(|ino| self.reclaim_leftover(ino));
        }
    }

    fn reclaim_leftover(&self, ino: Ino) {
        match self.table.get(ino) {
            Ok(Some(inode)) if inode.state.read().rec.nlink == 0 => self.reclaim_if_unknown(&inode),
            // Who had it open has closed it meanwhile.
            Ok(_) if matches!(self.journal.get(&keys::orphan(ino)), Ok(None)) => {}
            Ok(_) => tracing::error!(
                volume = self.name,
                inode = ino,
                "an orphan has names or no inode: run `ferry fsck`"
            ),
            Err(error) => {
                self.report("reclaiming", ino, error);
            }
        }
    }

    /// Takes lookups back.
    pub(crate) fn forget_inode(&self, inode: &Arc<Inode>, count: u64) {
        let less = |lookups: u64| Some(lookups.saturating_sub(count));
        let before = inode.lookups.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if before.is_ok_and(|before| before <= count) {
            self.maybe_unknown(inode);
        }
    }

    /// A lookup or a handle went: if it was the last one, the inode is reclaimed, or may leave
    /// memory.
    pub(crate) fn maybe_unknown(&self, inode: &Arc<Inode>) {
        if inode.is_known() {
            self.expect_space_of(inode);
            return;
        }
        if inode.state.read().rec.nlink == 0 {
            self.reclaim_if_unknown(inode);
        } else if let Some(stale) = self.table.cool(inode) {
            // The oldest cold inode cannot go before its times are logged; it is cold again
            // afterwards, or where the log has no room now.
            let busy = if self.options.background { Busy::Refuse } else { Busy::Wait };
            self.log_times(std::slice::from_ref(&stale), busy);
            drop(self.table.cool(&stale));
        }
    }

    /// Whoever needs space waits for that of a file that has just lost its last name, or its last
    /// handle.
    fn expect_space_of(&self, inode: &Arc<Inode>) {
        let comes_back = inode.has_flag(Inode::NAMELESS)
            && !self.keeping_removed.load(Ordering::Acquire)
            && !self.reclaimer.holds()
            && inode.state.share().rec.blocks > 0;
        if comes_back {
            self.data.removed().expect(inode, &*self.env.clock);
        }
    }

    /// Reclaims an inode without names, unless somebody still knows it or has begun to.
    pub(crate) fn reclaim_if_unknown(&self, inode: &Arc<Inode>) {
        let gone = {
            // Exclusive, so that a link or an unlink is either before or after.
            let state = inode.state.write();
            state.rec.nlink == 0
                && !inode.is_known()
                && !self.options.read_only
                && !self.keeping_removed.load(Ordering::Acquire)
                && !self.reclaimer.takes_in(inode.ino)
                && !inode.set_flag(Inode::GONE)
        };
        if !gone {
            self.expect_space_of(inode);
            return;
        }
        self.data.removed().going(inode);
        // Closing or removing a file is not to wait for log space.
        let long = self.journal.is_short(true)
            || inode.state.read().rec.blocks > self.fits_log(BLOCKS_AT_ONCE);
        if !(long && self.options.background && self.reclaimer.hand_over(inode)) {
            self.reclaim(inode);
        }
    }

    fn reclaim(&self, inode: &Arc<Inode>) {
        match self.try_reclaim(inode) {
            Ok(()) => self.table.remove(inode),
            // It stays an orphan; the next mount tries again.
            Err(error) => {
                self.report("reclaiming", inode.ino, error);
            }
        }
        self.data.removed().leave(inode.ino);
    }

    fn try_reclaim(&self, inode: &Arc<Inode>) -> Result<(), FsError> {
        let (mode, flags) = {
            let state = inode.state.read();
            (state.rec.mode, state.rec.flags)
        };
        if flags & INODE_HAS_XATTRS != 0 {
            self.drop_xattrs(inode.ino)?;
        }
        let metadata = metadata_bytes(&inode.state.read());
        let ino = inode.ino;
        let mut counters = None;
        let mut finish = |txn: &mut Transaction<'_>| {
            txn.delete(&keys::inode(ino));
            txn.delete(&keys::orphan(ino));
            counters = Some(self.counters.put_gone(txn));
        };
        let seq = if is_regular(mode) {
            self.data.reclaim(inode, LAST_STEP, &mut finish)?
        } else {
            let mut txn = self.journal.begin(LAST_STEP)?;
            finish(&mut txn);
            txn.commit()
        };
        drop(counters);
        self.data.removed().dropped(seq, metadata, || self.journal.home_seq());
        self.committed(seq, &[inode]);
        Ok(())
    }

    /// Deletes all attributes of an orphan, some at a time: an orphan with fewer of them is still
    /// one.
    fn drop_xattrs(&self, ino: Ino) -> Result<(), FsError> {
        loop {
            let mut found = Vec::new();
            self.journal.scan(&keys::xattr(ino, b""), &keys::xattr_end(ino), &mut |key, _| {
                found.push(key.to_vec());
                found.len() < XATTRS_AT_ONCE
            })?;
            if found.is_empty() {
                return Ok(());
            }
            let bytes = found.iter().map(Vec::len).sum::<usize>() as u32;
            let mut txn =
                self.journal.begin(Credits { keys: XATTRS_AT_ONCE as u32, bytes, urgent: true })?;
            found.iter().for_each(|key| txn.delete(key));
            txn.commit();
        }
    }
}
