//! Reading and changing attributes.

use crate::api::{Attr, Ino, SetAttr, Timestamp};
use crate::credits::FULL_RECORD_BYTES;
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::keys::{self, INODE_HAS_XATTRS};
use crate::local::jobs::BlockingChange;
use crate::local::local_fs::{AccessTimes, LocalFs, errno, put_inode};
use crate::local::transaction::How;
use crate::namespace::acl;
use crate::posix::{self, is_dir, is_regular};
use crate::store::data_store::Busy;
use ferry_journal::Credits;
use std::sync::Arc;

/// So many inodes may wait for their access time to be logged.
const LAZY_MAX: usize = 4096;
/// A largest file.
const SIZE_MAX: u64 = i64::MAX as u64;

impl LocalFs {
    pub(crate) fn do_getattr(&self, ino: Ino) -> Result<Attr, FsError> {
        let inode = self.table.need(ino)?;
        let attr = inode.state.read_now()?.attr(ino);
        Ok(attr)
    }

    /// When the inode was made.
    pub(crate) fn do_birth_time(&self, ino: Ino) -> Result<Timestamp, FsError> {
        Ok(self.table.need(ino)?.state.read_now()?.rec.btime)
    }

    pub(crate) fn do_setattr(&self, how: How, ino: Ino, set: &SetAttr) -> Result<Attr, FsError> {
        self.writable()?;
        let inode = self.table.need(ino)?;
        if set.kill_suidgid {
            self.drop_capability(how, &inode)?;
        }
        let mut rest = *set;
        if let Some(size) = set.size {
            // A mode comes with a size only from open(2) with O_TRUNC; then it takes a transaction
            // of its own.
            rest = SetAttr { mode: set.mode, ..SetAttr::default() };
            self.resize(how, &inode, size, &SetAttr { mode: None, ..*set })?;
        }
        if set.size.is_none() || rest.mode.is_some() {
            self.change_attributes(how, &inode, &rest)?;
        }
        let attr = inode.state.read().attr(ino);
        Ok(attr)
    }

    /// Truncates or extends a file, with other changes in the same transaction.
    pub(crate) fn resize(
        &self,
        how: How,
        inode: &Arc<Inode>,
        size: u64,
        set: &SetAttr,
    ) -> Result<(), FsError> {
        let mode = inode.state.read().rec.mode;
        if is_dir(mode) {
            return Err(errno(libc::EISDIR));
        }
        if !is_regular(mode) {
            return Err(errno(libc::EINVAL));
        }
        if size > SIZE_MAX {
            return Err(errno(libc::EFBIG));
        }
        let now = self.time(how);
        let set = SetAttr { size: Some(size), ..*set };
        let seq = self.data.set_size_from(how.reservation(), inode, size, &mut |rec| {
            posix::set_attributes(rec, &set, now)
        })?;
        self.committed(seq, &[inode]);
        Ok(())
    }

    /// A write by an unprivileged caller takes set-id bits and capabilities away, if the change
    /// itself does not.
    pub(crate) fn take_privileges(&self, how: How, inode: &Inode) -> Result<(), FsError> {
        self.drop_capability(how, inode)?;
        if !posix::has_set_ids(inode.state.share().rec.mode) {
            return Ok(());
        }
        let set = SetAttr { kill_suidgid: true, ..SetAttr::default() };
        self.change_attributes(how.without_seq(), inode, &set)
    }

    fn change_attributes(&self, how: How, inode: &Inode, set: &SetAttr) -> Result<(), FsError> {
        let mut with_acl = false;
        loop {
            if with_acl && self.data.is_far() {
                // Nobody waits for the inode lock while the store is asked: with it, the list is
                // in memory.
                self.stored_acl(inode.ino, acl::ACCESS)?;
            }
            let acl_bytes = if with_acl { acl::ENCODED_MAX as u32 + 64 } else { 0 };
            let bytes = FULL_RECORD_BYTES + acl_bytes;
            let mut txn = self.begin(how, Credits { keys: 2, bytes, urgent: false })?;
            let mut state = inode.state.write_now()?;
            if set.mode.is_some() && state.rec.flags & INODE_HAS_XATTRS != 0 {
                if !with_acl {
                    with_acl = true;
                    continue;
                }
                // The list and the mode say the same of owner, group (or mask) and others.
                if let (Some(mode), Some(mut list)) =
                    (set.mode, self.stored_acl(inode.ino, acl::ACCESS)?)
                {
                    list.set_mode(mode);
                    txn.put(&keys::xattr(inode.ino, acl::ACCESS), &list.encode());
                }
            }
            posix::set_attributes(&mut state.rec, set, self.time(how));
            self.data.note_ahead(inode, &state);
            put_inode(&mut txn, inode.ino, &mut state);
            self.committed(txn.commit(), &[inode]);
            return Ok(());
        }
    }

    /// A read happened: the access time moves if it is not newer than the last change, or is a day
    /// old. Only in memory; it is logged with the next other change, or by a sync.
    pub(crate) fn touch_atime(&self, inode: &Arc<Inode>) {
        if self.options.read_only || self.options.access_times == AccessTimes::Never {
            return;
        }
        if !inode.state.note_read(self.now(), self.options.access_times == AccessTimes::Always) {
            return;
        }
        if !self.table.log_later(inode).is_multiple_of(LAZY_MAX) {
            return;
        }
        // The thread that logs them takes them out of the table: closing the volume drops work that
        // has not begun, and logs what the table has.
        let log = |fs: &LocalFs| {
            let logged = fs.log_lazy_times(Busy::Wait);
            debug_assert!(logged.is_ok(), "it waits as long as it takes");
        };
        // A program that only reads waits for no log space.
        if self.options.background {
            self.blocking_changes.push(BlockingChange(Box::new(log)));
        } else {
            log(self);
        }
    }

    /// Logs all access times that wait for it. The only error is [`FsError::WouldWait`]; then the
    /// rest waits on.
    pub(crate) fn log_lazy_times(&self, busy: Busy) -> Result<(), FsError> {
        let waiting = self.table.take_lazy_times();
        let logged = self.log_times(&waiting, busy);
        if logged < waiting.len() {
            self.table.put_lazy_times(&waiting[logged..]);
            return Err(FsError::WouldWait);
        }
        Ok(())
    }

    /// Logs the times of these inodes, each for itself: its lock is held until its record is
    /// committed. How many are dealt with: fewer than there are only where it would have to wait
    /// for log space, and must not.
    pub(crate) fn log_times(&self, inodes: &[Arc<Inode>], busy: Busy) -> usize {
        for (number, inode) in inodes.iter().enumerate() {
            let credits = Credits { keys: 1, bytes: FULL_RECORD_BYTES, urgent: false };
            let mut txn = match self.begin(How::unacknowledged(busy), credits) {
                Ok(txn) => txn,
                Err(FsError::WouldWait) => return number,
                // Access times are no reason to fail; that the journal did is logged where it
                // happened.
                Err(error) => {
                    tracing::debug!(volume = self.name, %error, "access times are not logged");
                    // The next read, or the next look of the inode table, lists them again.
                    inodes[number..].iter().for_each(|inode| inode.state.unlist());
                    break;
                }
            };
            inode.state.unlist();
            let state = match busy {
                // The thread that has it may be waiting for the store.
                Busy::Refuse => inode.state.try_write(),
                Busy::Wait | Busy::Skip => Some(inode.state.write()),
            };
            let Some(mut state) = state else { return number };
            if state.times_dirty && state.rec.nlink > 0 {
                put_inode(&mut txn, inode.ino, &mut state);
                self.committed(txn.commit(), &[inode]);
            }
        }
        inodes.len()
    }
}
