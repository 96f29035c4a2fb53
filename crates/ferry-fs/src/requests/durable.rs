//! Making things durable, and closing.

use crate::api::{Answer, Cx, Errno, Ino, Parked, Reply, Stop};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::local::handles::Handle;
use crate::local::late::Late;
use crate::local::local_fs::LocalFs;
use crate::store::data_store::Busy;
use ferry_journal::{Caller, JournalError, Seq};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl LocalFs {
    /// fsync(2): all that this file is, and its names, are in contexts that are then forced.
    pub(crate) fn do_fsync(&self, cx: &Cx, ino: Ino, fh: u64) -> Answer<()> {
        let handle = self.handles.get(ino, fh).ok_or(Errno(libc::EBADF))?;
        if !self.is_long(cx, [&handle.inode]) {
            match self.data.write_back_one(&handle.inode, self.patience(cx)) {
                Err(FsError::WouldWait) => {}
                written => {
                    if let Some(seq) = self.logged(&handle, written)? {
                        self.force_for(Caller(cx.pid), handle, seq, cx.park::<()>(None));
                        return Err(Stop::Parked);
                    }
                    return Ok(());
                }
            }
        }
        let (file, parked, caller) =
            (Arc::clone(&handle.inode), cx.park::<()>(None), Caller(cx.pid));
        self.late.push(Late {
            files: vec![file],
            then: Box::new(move |fs| fs.fsync_late(caller, handle, parked)),
        });
        Err(Stop::Parked)
    }

    /// What to do where putting things into contexts would have to wait: a transport's thread must
    /// not, nor need it.
    pub(crate) fn patience(&self, cx: &Cx) -> Busy {
        if self.options.background && !cx.park.may_wait() { Busy::Refuse } else { Busy::Wait }
    }

    /// Writing the files back would wait for the device: a job for a thread that may.
    pub(crate) fn is_long<'a>(
        &self,
        cx: &Cx,
        files: impl IntoIterator<Item = &'a Arc<Inode>>,
    ) -> bool {
        self.patience(cx) == Busy::Refuse && self.data.would_wait(files)
    }

    /// The rest of an fsync whose data a late thread has written back.
    fn fsync_late(&self, caller: Caller, handle: Arc<Handle>, parked: Parked<()>) {
        match self.logged(&handle, self.data.write_back(&handle.inode)) {
            Ok(None) => parked.complete(Ok(())),
            Ok(Some(seq)) => self.force_for(caller, handle, seq, parked),
            Err(error) => parked.complete(Err(error)),
        }
    }

    /// What came of writing the file back: the context to be forced, if any.
    fn logged(&self, handle: &Handle, written: Result<Seq, FsError>) -> Result<Option<Seq>, Errno> {
        match written {
            Err(error) => {
                // The handle hears of this failure now, not once more at the next fsync.
                let told = self.pending_error(handle);
                Err(told.unwrap_or_else(|| self.not_durable("fsync", handle.inode.ino, error)))
            }
            Ok(seq) => match seq.max(self.newest_of(&handle.inode)) {
                seq if seq > self.journal.durable() => Ok(Some(seq)),
                _ => self.pending_error(handle).map_or(Ok(None), Err),
            },
        }
    }

    /// Answers once `seq` is durable, or with the handle's own error.
    fn force_for(&self, caller: Caller, handle: Arc<Handle>, seq: Seq, parked: Parked<()>) {
        let done = move |forced: Result<(), JournalError>| {
            let pending = handle.inode.file.errors.tell(&handle.error_cursor);
            parked.complete(match (forced, pending) {
                (_, Some(error)) => Err(error),
                (Err(_), None) => Err(Errno(libc::EIO)),
                (Ok(()), None) => Ok(()),
            });
        };
        self.journal.force_for(caller, seq, Box::new(done));
    }

    /// What who asked for durability is told. That the volume has become read-only is an I/O error
    /// to them: what they wrote is lost.
    pub(crate) fn not_durable(&self, what: &'static str, ino: Ino, error: FsError) -> Errno {
        match self.report(what, ino, error) {
            Errno(libc::EROFS) => Errno(libc::EIO),
            told => told,
        }
    }

    fn pending_error(&self, handle: &Handle) -> Option<Errno> {
        handle.inode.file.errors.tell(&handle.error_cursor)
    }

    /// fsync(2) of a directory: its entries survive.
    pub(crate) fn do_fsyncdir(&self, cx: &Cx, ino: Ino) -> Answer<()> {
        let inode = self.table.need(ino)?;
        let times_dirty = inode.state.read().times_dirty;
        if times_dirty && self.log_times(std::slice::from_ref(&inode), self.patience(cx)) < 1 {
            let (parked, caller) = (cx.park::<()>(None), Caller(cx.pid));
            let then = move |fs: &LocalFs| {
                fs.log_times(std::slice::from_ref(&inode), Busy::Wait);
                fs.answer_when(caller, fs.newest_of(&inode), parked);
            };
            self.late.push(Late { files: Vec::new(), then: Box::new(then) });
            return Err(Stop::Parked);
        }
        self.park_until(cx, self.newest_of(&inode))
    }

    /// The context that must be durable for an inode's own changes, its names and every directory
    /// above it. Which ones those are need not be known: whatever directory was renamed since is
    /// made durable too.
    pub(crate) fn newest_of(&self, inode: &Inode) -> Seq {
        let own = inode.last_seq.load(Ordering::Acquire);
        Seq(own.max(self.newest_dir_move.load(Ordering::Acquire)))
    }

    /// Answers once `seq` is durable.
    fn park_until<T>(&self, cx: &Cx, seq: Seq) -> Answer<T>
    where
        T: Default + Into<Reply> + 'static,
    {
        if seq <= self.journal.durable() {
            return Ok(T::default());
        }
        self.answer_when(Caller(cx.pid), seq, cx.park::<T>(None));
        Err(Stop::Parked)
    }

    fn answer_when<T>(&self, caller: Caller, seq: Seq, parked: Parked<T>)
    where
        T: Default + Into<Reply> + 'static,
    {
        // That the journal failed is logged where it happened.
        let done = move |forced: Result<(), JournalError>| {
            parked.complete(forced.map(|()| T::default()).map_err(|_| Errno(libc::EIO)));
        };
        self.journal.force_for(caller, seq, Box::new(done));
    }

    /// Everything on the volume, for a request that may park.
    pub(crate) fn do_sync(&self, cx: &Cx) -> Answer<Vec<u8>> {
        let patience = self.patience(cx);
        if patience == Busy::Wait || !self.data.would_wait_for_all() {
            match self.commit_everything(patience) {
                Err(FsError::WouldWait) => {}
                Err(error) => return Err(self.not_durable("sync", 0, error).into()),
                Ok(seq) => return self.park_until(cx, seq),
            }
        }
        let (parked, caller) = (cx.park::<Vec<u8>>(None), Caller(cx.pid));
        let then = move |fs: &LocalFs| match fs.commit_everything(Busy::Wait) {
            Ok(seq) => fs.answer_when(caller, seq, parked),
            Err(error) => parked.complete(Err(fs.not_durable("sync", 0, error))),
        };
        self.late.push(Late { files: Vec::new(), then: Box::new(then) });
        Err(Stop::Parked)
    }

    /// Puts all that is only in memory into contexts; all of it is durable when the returned one
    /// is.
    pub(crate) fn commit_everything(&self, busy: Busy) -> Result<Seq, FsError> {
        self.log_lazy_times(busy)?;
        let seq = self.data.write_back_everything(busy)?;
        Ok(seq.max(Seq(self.newest.load(Ordering::Acquire))))
    }

    /// Makes everything on the volume durable, and waits for it.
    pub fn sync(&self) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        self.force(self.commit_everything(Busy::Wait)?)
    }

    /// Waits until `seq` is durable.
    pub(crate) fn force(&self, seq: Seq) -> Result<(), FsError> {
        if seq <= self.journal.durable() {
            return Ok(());
        }
        let outcome = Arc::new((Mutex::new(None), Condvar::new()));
        let theirs = outcome.clone();
        self.journal.force(
            seq,
            Box::new(move |forced| {
                *theirs.0.lock() = Some(forced);
                theirs.1.notify_one();
            }),
        );
        let mut forced = outcome.0.lock();
        loop {
            if let Some(forced) = forced.take() {
                return forced.map_err(FsError::from);
            }
            outcome.1.wait(&mut forced);
        }
    }

    /// Does what the threads would do now: only for [`crate::local::local_fs::FsOptions::background`] `false`.
    pub fn tick(&self) -> Result<(), FsError> {
        self.data.tick()?;
        Ok(self.journal.tick()?)
    }

    /// Writes everything back and closes the volume. Idempotent.
    pub fn close(&self) -> Result<(), FsError> {
        let mut closed = self.closed.lock();
        if std::mem::replace(&mut *closed, true) {
            return Ok(());
        }
        self.scrubs.close();
        self.data.removed().stop();
        self.reclaimer.stop();
        self.readers.stop();
        self.late.stop();
        self.long.stop();
        self.changes.stop();
        if !self.options.read_only {
            // Waiting as long as it takes: it cannot be refused.
            self.log_lazy_times(Busy::Wait)?;
        }
        // The journal is closed even if data could not be written: what is committed shall be
        // durable.
        let data = self.data.close();
        let journal = self.journal.close().map_err(FsError::from);
        data.and(journal)
    }

    /// Every handle and every lookup goes.
    pub(crate) fn do_detach(&self) {
        for handle in self.handles.drain() {
            self.let_go(&handle);
        }
        for inode in self.table.all() {
            if inode.lookups.swap(0, Ordering::AcqRel) > 0 {
                self.maybe_unknown(&inode);
            }
        }
        *self.host.write() = None;
    }
}

impl Drop for LocalFs {
    fn drop(&mut self) {
        // Whoever cares for the outcome closes the volume; threads must end in any case.
        self.scrubs.close();
        self.data.removed().stop();
        self.reclaimer.stop();
        self.readers.stop();
        self.late.stop();
        self.long.stop();
        self.changes.stop();
    }
}
