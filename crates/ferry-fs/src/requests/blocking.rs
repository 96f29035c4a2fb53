//! Requests whose change may have to wait: a thread of the blocking pool makes the change.

use crate::api::{Answer, Cx, Filesystem, Ino, Interrupt, Parked, Reply, Stop};
use crate::error::FsError;
use crate::inprocess::{FromReply, InProcess};
use crate::local::jobs::{BlockingChange, BlockingDrop};
use crate::local::local_fs::LocalFs;
use crate::store::data_store::Busy;
use parking_lot::Mutex;
use std::sync::Arc;

/// A file with so many blocks may have as many extents; what drops extents of a smaller one is soon
/// done.
const MANY_BLOCKS: u64 = 1 << 14;

/// How far a change has come whose program may be killed meanwhile.
enum Progress {
    Waiting,
    /// Nobody waits for it any more.
    GivenUp,
    /// It was answered with this.
    Answered(Granted),
}

/// What an answer gave the program: a lookup of an inode, an open handle. If nobody hears it, they
/// are taken back.
#[derive(Clone, Copy, Default)]
struct Granted {
    ino: Option<u64>,
    fh: Option<u64>,
}

impl Granted {
    fn by(reply: &Reply) -> Self {
        match reply {
            Reply::Entry(entry) => Self { ino: entry.attr.map(|attr| attr.ino), fh: None },
            Reply::Created(entry, opened) => {
                Self { ino: entry.attr.map(|attr| attr.ino), fh: Some(opened.fh) }
            }
            _ => Self::default(),
        }
    }

    fn take_back(self, fs: &LocalFs) {
        if let Some(fh) = self.fh {
            fs.do_release(fh);
        }
        if let Some(ino) = self.ino {
            fs.forget(ino, 1);
        }
    }
}

impl LocalFs {
    /// Has a change made by a thread that may wait.
    pub(crate) fn later<T: Into<Reply> + FromReply>(
        &self,
        cx: &Cx,
        change: impl FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let Cx { uid, gid, umask, pid: caller, .. } = *cx;
        let caller = InProcess { uid, gid, umask, caller, ack: cx.early_ack() };
        let progress = Arc::new(Mutex::new(Progress::Waiting));
        let parked: Parked<Reply> = cx.park(Some(self.when_given_up(&progress)));
        self.blocking_changes.push(BlockingChange(Box::new(move |fs: &LocalFs| {
            if matches!(*progress.lock(), Progress::GivenUp) {
                return;
            }
            let result = caller.call(|cx| change(fs, cx)).map(Into::into);
            let granted = result.as_ref().map_or(Granted::default(), Granted::by);
            let before = std::mem::replace(&mut *progress.lock(), Progress::Answered(granted));
            match before {
                Progress::GivenUp => granted.take_back(fs),
                _ => parked.complete(result),
            }
        })));
        Err(Stop::Parked)
    }

    /// The program is being killed. What has not begun is not made; what was given to it is taken
    /// back, by the thread that comes last.
    fn when_given_up(&self, progress: &Arc<Mutex<Progress>>) -> Interrupt {
        let (progress, changes) = (Arc::clone(progress), Arc::clone(&self.blocking_changes));
        Box::new(move || {
            if let Progress::Answered(granted) =
                std::mem::replace(&mut *progress.lock(), Progress::GivenUp)
            {
                changes.push(BlockingChange(Box::new(move |fs: &LocalFs| granted.take_back(fs))));
            }
        })
    }

    /// The answer to a request that drops extents of a file: now, unless it may be long, or wait
    /// for log space, and the thread is a transport's. `drops` says whether it drops any, of a file
    /// of that size. If less than `takes` bytes of space are free, it may wait for some.
    pub(crate) fn answer_dropping<T: Into<Reply> + FromReply + 'static>(
        &self,
        cx: &Cx,
        what: &'static str,
        ino: Ino,
        takes: u64,
        drops: impl FnOnce(u64) -> bool,
        change: impl FnOnce(&Self) -> Result<T, FsError> + Send + 'static,
    ) -> Answer<T> {
        let (blocks, size) = self.table.need(ino).map_or((0, 0), |inode| {
            let state = inode.state.read();
            (state.logged.blocks, state.rec.size)
        });
        let long = blocks >= self.fits_log(MANY_BLOCKS) && drops(size);
        let short = self.journal.is_short(false) || self.data.is_short_of(takes);
        if !(long || short) || self.patience(cx) == Busy::Wait {
            return change(self).map_err(|error| Stop::Errno(self.report(what, ino, error)));
        }
        if !long {
            return self.later(cx, move |fs, _| {
                change(fs).map_err(|error| Stop::Errno(fs.report(what, ino, error)))
            });
        }
        let parked = cx.park::<T>(None);
        self.blocking_drops.push(BlockingDrop(Box::new(move |fs: &LocalFs| {
            parked.complete(change(fs).map_err(|error| fs.report(what, ino, error)));
        })));
        Err(Stop::Parked)
    }
}
