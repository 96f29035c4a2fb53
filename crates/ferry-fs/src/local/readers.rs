//! Reads that must wait for the device.

use crate::api::{Parked, Reply};
use crate::local::handles::Handle;
use crate::local::local_fs::LocalFs;
use crate::local::pool::Work;
use std::sync::Arc;

/// A read that somebody waits for.
pub(crate) struct Wanted {
    pub handle: Arc<Handle>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    pub parked: Parked<Reply>,
}

impl Work for Wanted {
    const NAME: &'static str = "ferry-read";
    /// The device is asked for so many at the same time, beside read-ahead.
    const THREADS_MAX: usize = 8;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        for Wanted { handle, offset, len, parked } in these {
            parked.complete(fs.read_waiting(&handle, offset, len));
        }
    }
}
