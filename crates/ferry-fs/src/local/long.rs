//! Changes that take many transactions, as cutting off a million extents does: they have threads of their own, so that no transport's
//! thread, which serves every program of a core, is taken up by one.

use super::LocalFs;
use super::pool::Work;
use crate::api::{Answer, Cx, Ino, Reply, Stop};
use crate::data::Busy;
use crate::error::FsError;

/// A file with so many blocks may have as many extents; what drops extents of a smaller one is soon done.
const LONG_BLOCKS: u64 = 1 << 14;

/// Such a change, and its answer.
pub(super) struct Long(Box<dyn FnOnce(&LocalFs) + Send>);

impl Work for Long {
    const NAME: &'static str = "ferry-long";
    const THREADS_MAX: usize = 2;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        these.into_iter().for_each(|long| (long.0)(fs));
    }
}

impl LocalFs {
    /// The answer to a request that drops extents of a file: now, unless it may be long and the thread is a transport's.
    pub(super) fn answer_dropping<T: Into<Reply> + 'static>(
        &self,
        cx: &Cx,
        what: &'static str,
        ino: Ino,
        change: impl FnOnce(&Self) -> Result<T, FsError> + Send + 'static,
    ) -> Answer<T> {
        let blocks = self.table.peek(ino).map_or(0, |inode| inode.state.read().logged.blocks);
        if blocks < LONG_BLOCKS || self.patience(cx) == Busy::Wait {
            return change(self).map_err(|error| Stop::Errno(self.report(what, ino, error)));
        }
        let parked = cx.park::<T>(None);
        self.long.push(Long(Box::new(move |fs| {
            parked.complete(change(fs).map_err(|error| fs.report(what, ino, error)));
        })));
        Err(Stop::Parked)
    }
}
