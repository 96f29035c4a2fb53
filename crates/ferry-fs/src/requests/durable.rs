//! Making things durable, and closing.

use crate::api::{Answer, Cx, Errno, Ino, Parked, Reply, Stop};
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::known::inode_flag;
use crate::local::handles::Handle;
use crate::local::jobs::BlockingFsync;
use crate::local::local_fs::{CacheMode, LocalFs};
use crate::local::lost_names;
use crate::local::pool::Work;
use crate::local::transaction::await_context;
use crate::store::data_store::{Busy, Dirty};
use ferry_env::activity::{self, Layer, Operation};
use ferry_journal::{Caller, JournalError, Seq};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How a request waits for a context to be durable.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// It is made durable for this caller.
    Forced(Caller),
    /// The timer, or somebody else, makes it durable.
    Durable,
}

impl Work<LocalFs> for BlockingFsync<LocalFs> {
    const NAME: &'static str = "ferry-fsync";
    /// More than one, so that small files need not wait for all of a large one.
    const THREADS_MAX: usize = 4;
    const TOGETHER: bool = true;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        let _doing = activity::begin(Operation::WriteBack);
        let files = these.iter().flat_map(|fsync| fsync.files.iter().cloned()).collect();
        if let Err(error) = fs.data.write_back(Dirty::Files(files), Busy::Wait) {
            tracing::debug!(%error, "write-back for many fsyncs failed; each is told its own error");
        }
        these.into_iter().for_each(|fsync| (fsync.then)(fs));
    }
}

impl LocalFs {
    /// fsync(2): all that this file is, and its names, are in contexts that are then forced.
    pub(crate) fn do_fsync(&self, cx: &Cx, ino: Ino, fh: u64) -> Answer<()> {
        let handle = self.open_file(ino, fh)?;
        if !self.is_long(cx, [&handle.inode]) {
            match self.data.write_back(Dirty::File(&handle.inode), self.patience(cx)) {
                Err(FsError::WouldWait) => {}
                written => {
                    if let Some(seq) = self.logged(&handle, written)? {
                        self.force_for(
                            Caller(cx.pid),
                            handle,
                            seq,
                            cx.park_in::<()>(Layer::Commit, None),
                        );
                        return Err(Stop::Parked);
                    }
                    return Ok(());
                }
            }
        }
        let (file, parked, caller) =
            (Arc::clone(&handle.inode), cx.park_in::<()>(Layer::Commit, None), Caller(cx.pid));
        self.blocking_fsyncs.push(BlockingFsync {
            files: vec![file],
            then: Box::new(move |fs: &LocalFs| fs.finish_fsync(caller, handle, parked)),
        });
        Err(Stop::Parked)
    }

    /// Writing the files back would wait for the device: a job for a thread that may.
    pub(crate) fn is_long<'a>(
        &self,
        cx: &Cx,
        files: impl IntoIterator<Item = &'a Arc<Inode>> + Clone,
    ) -> bool {
        self.patience(cx) == Busy::Refuse && self.data.would_wait(files)
    }

    /// The rest of an fsync whose data a thread of the blocking pool has written back.
    fn finish_fsync(&self, caller: Caller, handle: Arc<Handle>, parked: Parked<()>) {
        match self.logged(&handle, self.data.write_back(Dirty::File(&handle.inode), Busy::Wait)) {
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
        let me = self.me.clone();
        let done = move |forced: Result<(), JournalError>| {
            let pending = match me.upgrade() {
                Some(fs) => fs.pending_error(&handle),
                None => handle.inode.file.errors.tell(&handle.error_cursor),
            };
            parked.complete(match (forced, pending) {
                (_, Some(error)) => Err(error),
                (Err(_), None) => Err(Errno(libc::EIO)),
                (Ok(()), None) => Ok(()),
            });
        };
        self.journal.force_for(caller, seq, Box::new(done));
    }

    /// What a caller that asked for durability is told. That the volume has become read-only is an
    /// I/O error to them: what they wrote is lost.
    pub(crate) fn not_durable(&self, what: &'static str, ino: Ino, error: FsError) -> Errno {
        match self.report(what, ino, error) {
            Errno(libc::EROFS) => Errno(libc::EIO),
            told => told,
        }
    }

    /// The error that this handle was not told yet.
    fn pending_error(&self, handle: &Handle) -> Option<Errno> {
        let told = handle.inode.file.errors.tell(&handle.error_cursor);
        if told.is_none() {
            // Only now. If this process is killed before an answer that says it, the request comes
            // again, and the next process must say it.
            self.note_told(&handle.inode);
        }
        told
    }

    /// fsync(2) of a directory: its entries survive.
    pub(crate) fn do_fsyncdir(&self, cx: &Cx, ino: Ino) -> Answer<()> {
        if self.lost_names.tells(ino, cx.pid) {
            return Err(Errno(libc::EIO).into());
        }
        let look = || {
            let inode = self.table.need(ino)?;
            let times_dirty = inode.state.read_now()?.times_dirty;
            Ok((inode, times_dirty))
        };
        let (inode, times_dirty) = match self.at_once(cx, look) {
            Err(FsError::WouldWait) => {
                return self.later(cx, move |fs, cx| fs.do_fsyncdir(cx, ino));
            }
            looked => looked?,
        };
        if times_dirty && self.log_times(std::slice::from_ref(&inode), self.patience(cx)) < 1 {
            let (parked, caller) = (cx.park_in::<()>(Layer::Commit, None), Caller(cx.pid));
            let then = move |fs: &LocalFs| {
                fs.log_times(std::slice::from_ref(&inode), Busy::Wait);
                fs.answer_when(Until::Forced(caller), fs.newest_of(&inode), parked);
            };
            self.blocking_fsyncs.push(BlockingFsync { files: Vec::new(), then: Box::new(then) });
            return Err(Stop::Parked);
        }
        self.park_until(cx, Until::Forced(Caller(cx.pid)), self.newest_of(&inode))
    }

    /// Everything that the volume has now, without forcing it. Data goes to the device and into
    /// contexts at once, because else the next commit would not have it; no flush comes of that.
    pub(crate) fn do_wait(&self, cx: &Cx) -> Answer<Vec<u8>> {
        self.must_see_all()?;
        if self.options.read_only {
            return Ok(Vec::new());
        }
        self.do_sync(cx, Until::Durable)
    }

    /// As [`LocalFs::do_wait`], for one file or directory.
    pub(crate) fn do_wait_file(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        self.must_see_all()?;
        let inode = self.table.need(ino)?;
        if self.options.read_only {
            return Ok(Vec::new());
        }
        self.recall_loss(&inode);
        let errors = &inode.file.errors;
        let tells = self.has_lost(ino, inode_flag::LOST) && errors.tell(&errors.sample()).is_some();
        if tells || self.lost_names.tells(ino, cx.pid) {
            return Err(Errno(libc::EIO).into());
        }
        // Only now, as in `pending_error`: a request that was not answered comes again.
        self.note_told(&inode);
        if !self.is_long(cx, [&inode]) {
            match self.commit_file(&inode, self.patience(cx)) {
                Err(FsError::WouldWait) => {}
                Err(error) => return Err(self.not_durable("wait", ino, error).into()),
                Ok(seq) => return self.park_until(cx, Until::Durable, seq),
            }
        }
        let (file, parked) = (Arc::clone(&inode), cx.park_in::<Vec<u8>>(Layer::Commit, None));
        let then = move |fs: &LocalFs| match fs.commit_file(&inode, Busy::Wait) {
            Ok(seq) => fs.answer_when(Until::Durable, seq, parked),
            Err(error) => parked.complete(Err(fs.not_durable("wait", ino, error))),
        };
        self.blocking_fsyncs.push(BlockingFsync { files: vec![file], then: Box::new(then) });
        Err(Stop::Parked)
    }

    /// With `cache=writeback` the kernel keeps data and times back, and only fsync makes it hand
    /// over both.
    pub(crate) fn must_see_all(&self) -> Result<(), Errno> {
        let hides = self.options.cache == CacheMode::Writeback;
        if hides { Err(Errno(libc::EOPNOTSUPP)) } else { Ok(()) }
    }

    /// Puts what is only in memory of a file or directory into contexts; all of it is durable when
    /// the returned one is.
    fn commit_file(&self, inode: &Arc<Inode>, busy: Busy) -> Result<Seq, FsError> {
        let times_dirty = inode.state.read().times_dirty;
        if times_dirty
            && self.log_times(std::slice::from_ref(inode), busy) < 1
            && busy != Busy::Wait
        {
            return Err(FsError::WouldWait);
        }
        let seq = self.data.write_back(Dirty::File(inode), busy)?;
        Ok(seq.max(self.newest_of(inode)))
    }

    /// The context that must be durable for an inode's own changes, its names and every directory
    /// above it. Which ones those are need not be known: whatever directory was renamed since is
    /// made durable too.
    pub(crate) fn newest_of(&self, inode: &Inode) -> Seq {
        let own = inode.last_seq.load(Ordering::Acquire);
        Seq(own.max(self.newest_dir_move.load(Ordering::Acquire)))
    }

    /// Answers once `seq` is durable.
    fn park_until<T>(&self, cx: &Cx, until: Until, seq: Seq) -> Answer<T>
    where
        T: Default + Into<Reply> + 'static,
    {
        if seq <= self.journal.durable() {
            return Ok(T::default());
        }
        self.answer_when(until, seq, cx.park_in::<T>(Layer::Commit, None));
        Err(Stop::Parked)
    }

    fn answer_when<T>(&self, until: Until, seq: Seq, parked: Parked<T>)
    where
        T: Default + Into<Reply> + 'static,
    {
        // That the journal failed is logged where it happened.
        let done = move |forced: Result<(), JournalError>| {
            parked.complete(forced.map(|()| T::default()).map_err(|_| Errno(libc::EIO)));
        };
        match until {
            Until::Forced(caller) => self.journal.force_for(caller, seq, Box::new(done)),
            Until::Durable => self.journal.when_durable(seq, Box::new(done)),
        }
    }

    /// Everything on the volume, for a request that may park.
    pub(crate) fn do_sync(&self, cx: &Cx, until: Until) -> Answer<Vec<u8>> {
        if self.lost_names.tells(lost_names::VOLUME, cx.pid) {
            return Err(Errno(libc::EIO).into());
        }
        let patience = self.patience(cx);
        if patience == Busy::Wait || !self.data.would_wait_for_all() {
            match self.commit_everything(patience) {
                Err(FsError::WouldWait) => {}
                Err(error) => return Err(self.not_durable("sync", 0, error).into()),
                Ok(seq) => return self.park_until(cx, until, seq),
            }
        }
        let parked = cx.park_in::<Vec<u8>>(Layer::Commit, None);
        let then = move |fs: &LocalFs| match fs.commit_everything(Busy::Wait) {
            Ok(seq) => fs.answer_when(until, seq, parked),
            Err(error) => parked.complete(Err(fs.not_durable("sync", 0, error))),
        };
        self.blocking_fsyncs.push(BlockingFsync { files: Vec::new(), then: Box::new(then) });
        Err(Stop::Parked)
    }

    /// Puts all that is only in memory into contexts; all of it is durable when the returned one
    /// is.
    pub(crate) fn commit_everything(&self, busy: Busy) -> Result<Seq, FsError> {
        self.log_lazy_times(busy)?;
        let seq = self.data.write_back(Dirty::All, busy)?;
        Ok(seq.max(Seq(self.newest.load(Ordering::Acquire))))
    }

    /// Makes everything on the volume durable, and waits for it.
    pub fn sync(&self) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        self.force(self.commit_everything(Busy::Wait)?)
    }

    /// Returns once everything that the volume has now is durable, and makes nothing durable
    /// itself: the timer does, at the latest
    /// [`crate::local::local_fs::FsOptions::commit_interval`] later, or somebody's fsync. At once
    /// if nothing is left to be made durable. Only for a volume with threads.
    pub fn wait_durable(&self) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        let seq = self.commit_everything(Busy::Wait)?;
        await_context(|done| self.journal.when_durable(seq, done))
    }

    /// Does what the threads would do now: only for
    /// [`crate::local::local_fs::FsOptions::background`] `false`.
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
        self.read_pool.stop();
        self.blocking_fsyncs.stop();
        self.blocking_drops.stop();
        self.blocking_changes.stop();
        self.metadata_reads.stop();
        self.reads_ahead.stop();
        if !self.options.read_only {
            // Waiting as long as it takes: it cannot be refused.
            self.log_lazy_times(Busy::Wait)?;
        }
        // The journal is closed even if data could not be written: what is committed shall be
        // durable.
        let data = self.data.close();
        let journal = self.journal.close().map_err(FsError::from);
        // Last: a change of snapshots may wait for a store that is away.
        self.snapshot_changes.stop();
        data.and(journal)
    }

    /// Every handle and every lookup goes.
    pub(crate) fn do_detach(&self) {
        for handle in self.handles.drain() {
            self.let_go(&handle);
        }
        for inode in self.table.forget_all() {
            if inode.lookups.swap(0, Ordering::AcqRel) > 0 {
                self.maybe_unknown(&inode);
            }
        }
        *self.host.write() = None;
    }
}

impl Drop for LocalFs {
    fn drop(&mut self) {
        // A caller that needs the outcome closes the volume; threads must end in any case.
        self.scrubs.close();
        self.data.removed().stop();
        self.reclaimer.stop();
        self.read_pool.stop();
        self.blocking_fsyncs.stop();
        self.blocking_drops.stop();
        self.blocking_changes.stop();
        self.metadata_reads.stop();
        self.reads_ahead.stop();
        self.snapshot_changes.stop();
    }
}
