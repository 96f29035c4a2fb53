//! Changes that take many transactions, as cutting off a million extents does: they have threads of
//! their own, so that no transport's thread, which serves every program of a core, is taken up by
//! one.

use crate::api::{Answer, Cx, Ino, Reply, Stop};
use crate::error::FsError;
use crate::inprocess::FromReply;
use crate::local::local_fs::LocalFs;
use crate::local::pool::Work;
use crate::store::data_store::Busy;

/// A file with so many blocks may have as many extents; what drops extents of a smaller one is soon
/// done.
const LONG_BLOCKS: u64 = 1 << 14;
/// Bytes of the log that dropping an extent takes, about.
const DROP_BYTES: u64 = 128;

/// Such a change, and its answer.
pub(crate) struct Long(Box<dyn FnOnce(&LocalFs) + Send>);

impl Work for Long {
    const NAME: &'static str = "ferry-long";
    const THREADS_MAX: usize = 2;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        these.into_iter().for_each(|long| (long.0)(fs));
    }
}

impl LocalFs {
    /// So many blocks, or, where the log is small, as many as can be dropped with a quarter of it:
    /// more wait for a checkpoint.
    pub(crate) fn fits_log(&self, blocks: u64) -> u64 {
        blocks.min(2 * self.journal.max_transaction_bytes() / DROP_BYTES)
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
        let (blocks, size) = self.table.peek(ino).map_or((0, 0), |inode| {
            let state = inode.state.read();
            (state.logged.blocks, state.rec.size)
        });
        let long = blocks >= self.fits_log(LONG_BLOCKS) && drops(size);
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
        self.long.push(Long(Box::new(move |fs| {
            parked.complete(change(fs).map_err(|error| fs.report(what, ino, error)));
        })));
        Err(Stop::Parked)
    }
}
