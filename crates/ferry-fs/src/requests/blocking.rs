//! Requests that may have to wait, for log space, write-back or a store that is far away: a thread
//! of a pool makes them.

use crate::api::{
    Answer, Cx, DirEntry, Entry, Filesystem, Ino, Interrupt, Listing, Parked, Reply, Stop,
};
use crate::error::FsError;
use crate::inprocess::{FromReply, InProcess};
use crate::keys::INODE_HAS_XATTRS;
use crate::local::jobs::{BlockingChange, BlockingDrop, Job, MetadataRead};
use crate::local::local_fs::LocalFs;
use crate::local::pool::{Pool, Work};
use crate::patience::Hurried;
use crate::store::data_store::Busy;
use ferry_env::activity::{self, Layer};
use parking_lot::Mutex;
use std::sync::Arc;

/// A file with so many blocks may have as many extents; what drops extents of a smaller one is soon
/// done.
const MANY_BLOCKS: u64 = 1 << 14;

/// How far a request has come whose program may be killed meanwhile.
enum Progress {
    Waiting,
    /// Nobody waits for it any more.
    GivenUp,
    /// It was answered with this.
    Answered(Granted),
}

/// What an answer gave the program: lookups of inodes, an open handle. If nobody hears it, they are
/// taken back.
#[derive(Default)]
struct Granted {
    inodes: Vec<Ino>,
    fh: Option<u64>,
}

impl Granted {
    fn by(reply: &Reply) -> Self {
        let known = |entry: &Entry| entry.attr.map(|attr| attr.ino);
        let inodes = match reply {
            Reply::Entry(entry) | Reply::Created(entry, _) => known(entry).into_iter().collect(),
            Reply::Dir(entries) => {
                entries.iter().filter_map(|one| one.entry.as_ref().and_then(known)).collect()
            }
            _ => Vec::new(),
        };
        let fh = match reply {
            Reply::Created(_, opened) | Reply::Opened(opened) => Some(opened.fh),
            _ => None,
        };
        Self { inodes, fh }
    }

    fn take_back(self, fs: &LocalFs) {
        if let Some(fh) = self.fh {
            fs.do_release(fh);
        }
        self.inodes.into_iter().for_each(|ino| fs.forget(ino, 1));
    }
}

impl LocalFs {
    /// Makes a request on this thread, which does not wait for a store that is far away:
    /// [`FsError::WouldWait`] if it had to.
    pub(crate) fn at_once<T>(
        &self,
        cx: &Cx,
        request: impl FnOnce() -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        let _hurried = Hurried::if_so(self.data.is_far() && self.patience(cx) == Busy::Refuse);
        request()
    }

    /// Has a change made by a thread that may wait.
    pub(crate) fn later<T: Into<Reply> + FromReply>(
        &self,
        cx: &Cx,
        change: impl FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        self.later_in(&self.blocking_changes, BlockingChange, cx, change)
    }

    /// Has a request that changes nothing made by a thread that may wait for the store.
    pub(crate) fn read_later<T: Into<Reply> + FromReply>(
        &self,
        cx: &Cx,
        read: impl FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        self.later_in(&self.metadata_reads, MetadataRead, cx, read)
    }

    /// Who looks up a file looks up those beside it: their records come into memory, too, so that
    /// those look-ups are answered at once.
    pub(crate) fn load_around(&self, found: &Entry) {
        if let Some(ino) = found.attr.map(|attr| attr.ino) {
            let load = move |fs: &Self| fs.table.load_around(ino);
            self.metadata_reads.push(MetadataRead(Box::new(load)));
        }
    }

    /// The listing of a directory, by a thread that may wait for the store.
    pub(crate) fn list_later(&self, cx: &Cx, ino: Ino, cookie: u64, plus: bool) -> Answer<()> {
        let mut listing = Listing::new(plus, cx.park.listing_bytes());
        let listed = self.read_later(cx, move |fs, cx| {
            fs.readdir(cx, ino, 0, cookie, plus, &mut |entry| listing.push(entry))?;
            Ok(listing.entries)
        });
        listed.map(|_: Vec<DirEntry>| ())
    }

    fn later_in<T: Into<Reply> + FromReply, W: Work<Self>>(
        &self,
        pool: &Arc<Pool<Self, W>>,
        work: fn(Job<Self>) -> W,
        cx: &Cx,
        request: impl FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let Cx { uid, gid, umask, pid: caller, .. } = *cx;
        let caller =
            InProcess { uid, gid, umask, caller, ack: cx.early_ack(), request: cx.request() };
        let progress = Arc::new(Mutex::new(Progress::Waiting));
        let given_up = self.when_given_up(&progress);
        let parked: Parked<Reply> = cx.park_in(Layer::Pool, Some(given_up));
        let operation = activity::operation();
        pool.push(work(Box::new(move |fs: &LocalFs| {
            let _resumed = activity::resume(operation);
            if matches!(*progress.lock(), Progress::GivenUp) {
                return;
            }
            let result = caller.call(|cx| request(fs, cx)).map(Into::into);
            let granted = result.as_ref().map_or(Granted::default(), Granted::by);
            let mut progress = progress.lock();
            if matches!(*progress, Progress::GivenUp) {
                drop(progress);
                return granted.take_back(fs);
            }
            *progress = Progress::Answered(granted);
            drop(progress);
            parked.complete(result);
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
        let look = || {
            let inode = self.table.need(ino)?;
            let state = inode.state.read_now()?;
            Ok((state.logged.blocks, state.rec.size, state.rec.flags & INODE_HAS_XATTRS != 0))
        };
        let (is_unknown, (blocks, size, has_xattrs)) = match self.at_once(cx, look) {
            Err(FsError::WouldWait) => (true, Default::default()),
            looked => (false, looked.unwrap_or_default()),
        };
        let long = blocks >= self.fits_log(MANY_BLOCKS) && drops(size);
        let short = self.journal.is_short(false) || self.data.is_short_of(takes);
        // Its extents or attributes may have to be read.
        let far = is_unknown || (blocks > 0 || has_xattrs) && self.data.is_far();
        if !(long || short || far) || self.patience(cx) == Busy::Wait {
            return change(self).map_err(|error| Stop::Errno(self.report(what, ino, error)));
        }
        if !long {
            return self.later(cx, move |fs, _| {
                change(fs).map_err(|error| Stop::Errno(fs.report(what, ino, error)))
            });
        }
        let (parked, operation) = (cx.park_in::<T>(Layer::Pool, None), activity::operation());
        self.blocking_drops.push(BlockingDrop(Box::new(move |fs: &LocalFs| {
            let _resumed = activity::resume(operation);
            parked.complete(change(fs).map_err(|error| fs.report(what, ino, error)));
        })));
        Err(Stop::Parked)
    }
}
