//! Inodes without a name: their space comes back once nobody knows them any more.
//!
//! An orphan's key is in the same transaction that took its last name. When the kernel has
//! forgotten the inode and the last handle is closed, its extents, attributes and record go; after
//! a crash the orphans that are left over go in the background. Large files go in the background
//! too: the kernel's forgetting must not wait for them. Where programs on other machines outlive
//! the mount (`keeps_removed`) its end reclaims nothing, and the next one waits with inodes that
//! are older than itself until it is told to go on. A program that has such an inode open may not
//! be back yet. Nobody from before the mount knows a younger one.

use crate::api::Ino;
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{self, INODE_HAS_XATTRS, Key};
use crate::known::inode_flag;
use crate::local::local_fs::LocalFs;
use crate::local::reclaimer::{Job, Queue, Reclaimer};
use crate::posix::is_regular;
use crate::volume::VolumeError;
use ferry_env::activity::{self, Operation};
use ferry_journal::{Credits, Transaction};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A file with more blocks than this is reclaimed in the background.
const BLOCKS_AT_ONCE: u64 = 4096;
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

fn run(reclaimer: &Reclaimer, fs: &Weak<LocalFs>) {
    let mut done = 0;
    while let Some(job) = reclaimer.next() {
        let Some(fs) = fs.upgrade() else { return };
        let _doing = activity::begin(Operation::Reclaim);
        match job {
            Job::Removed(inode) => fs.reclaim(&inode),
            Job::Forgotten(inode) => fs.reclaim_if_unknown(&inode),
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
        let held = self.options.keeps_removed || self.options.goes_on;
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
            // The client that had it open has closed it meanwhile.
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
        self.note_forgotten(inode.ino, count);
        let less = |lookups: u64| Some(lookups.saturating_sub(count));
        let before = inode.lookups.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if before.is_ok_and(|before| before <= count) {
            self.maybe_unknown(inode);
        }
    }

    /// What outlives the process says so, too. At a kill in between it may count too much.
    pub(crate) fn note_forgotten(&self, ino: Ino, count: u64) {
        if let Some(known) = &self.options.known {
            known.uncount(ino, count, self.journal.durable().0);
        }
    }

    /// Whether an inode may be given a name if it has none. One that gets its name may lose it in a
    /// crash, and may be given it again.
    pub(crate) fn note_linkable(&self, ino: Ino, is_linkable: bool) {
        if let Some(known) = &self.options.known {
            let add = if is_linkable { inode_flag::LINKABLE } else { 0 };
            known.change_flags(ino, inode_flag::LINKABLE, add);
        }
    }

    /// A lookup or a handle went: if it was the last one of an inode without a name, the inode is
    /// reclaimed.
    pub(crate) fn maybe_unknown(&self, inode: &Arc<Inode>) {
        if inode.is_known() {
            self.expect_space_of(inode);
            return;
        }
        if self.data.is_far() && self.options.background {
            // This thread serves other programs. To reclaim reads extents, and a request that waits
            // for the store may have the inode lock.
            if inode.state.try_share().is_none_or(|state| state.rec.nlink == 0) {
                self.reclaimer.look_at(inode);
            }
        } else if inode.state.read().rec.nlink == 0 {
            self.reclaim_if_unknown(inode);
        }
    }

    /// A change that needs space waits for that of a file that has just lost its last name, or its
    /// last handle.
    fn expect_space_of(&self, inode: &Arc<Inode>) {
        let comes_back = inode.has_flag(Inode::NAMELESS)
            && !self.keeping_removed.load(Ordering::Acquire)
            && !(self.is_older_than_mount(inode.ino) && self.reclaimer.holds())
            && inode.state.try_share().is_none_or(|state| state.rec.blocks > 0);
        if comes_back {
            self.data.removed().expect(inode, &*self.env.clock);
        }
    }

    fn is_older_than_mount(&self, ino: Ino) -> bool {
        ino < self.counters.first()
    }

    /// Whether it waits for the end of the grace period. From now on the reclaimer has it then.
    fn is_left_over(&self, ino: Ino) -> bool {
        self.is_older_than_mount(ino) && self.reclaimer.takes_in(ino)
    }

    /// Reclaims an inode without names, unless somebody still knows it or has begun to.
    pub(crate) fn reclaim_if_unknown(&self, inode: &Arc<Inode>) {
        let reclaim = {
            // Exclusive, so that a link or an unlink is either before or after.
            let state = inode.state.write();
            state.rec.nlink == 0
                && !inode.is_known()
                && !self.options.read_only
                && !self.keeping_removed.load(Ordering::Acquire)
                && !self.is_left_over(inode.ino)
                && !inode.set_flag(Inode::RECLAIMING)
        };
        if !reclaim {
            self.expect_space_of(inode);
            return;
        }
        self.data.removed().reclaiming(inode);
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
        self.data.removed().leave(inode.ino, &*self.env.clock);
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
            counters = Some(self.counters.put_removed(txn));
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
