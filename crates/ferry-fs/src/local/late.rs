//! Fsyncs whose data must wait before it can be sent, because enough is on its way to the device
//! already (or it is much), because the log is full, or because somebody else is at the file: they
//! have threads of their own, so that no transport's thread waits with them. What gathers meanwhile
//! is written back together.

use crate::inode::incore::Inode;
use crate::local::local_fs::LocalFs;
use crate::local::pool::Work;
use crate::store::data_store::Busy;
use std::sync::Arc;

/// Files to be written back, and what is to be done then.
pub(crate) struct Late {
    pub files: Vec<Arc<Inode>>,
    /// Writes back itself whatever of the files is still dirty, and hears why if that fails.
    pub then: Box<dyn FnOnce(&LocalFs) + Send>,
}

impl Work for Late {
    const NAME: &'static str = "ferry-fsync";
    /// More than one, so that small files need not wait for all of a large one.
    const THREADS_MAX: usize = 4;
    const TOGETHER: bool = true;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        let files = these.iter().flat_map(|late| late.files.iter().cloned()).collect();
        if let Err(error) = fs.data.write_back_many(files, Busy::Wait) {
            tracing::debug!(%error, "writing back for many fsyncs; each hears of its own");
        }
        these.into_iter().for_each(|late| (late.then)(fs));
    }
}
