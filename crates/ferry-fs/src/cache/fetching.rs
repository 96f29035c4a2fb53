//! Blocks of a file that are being read from the device.

use ferry_env::activity::{self, Layer};
use parking_lot::{Condvar, Mutex};
use std::ops::Range;

/// Blocks of a file that somebody is reading from the device: others wait for them instead of
/// reading them too.
#[derive(Default)]
pub(crate) struct Fetching {
    ranges: Mutex<Vec<Range<u64>>>,
    done: Condvar,
}

impl Fetching {
    pub fn begin(&self, blocks: Range<u64>) {
        self.ranges.lock().push(blocks);
    }

    pub fn end(&self, blocks: &Range<u64>) {
        let mut ranges = self.ranges.lock();
        if let Some(at) = ranges.iter().position(|r| r == blocks) {
            ranges.swap_remove(at);
        }
        self.done.notify_all();
    }

    /// Whether `block` is being read.
    pub fn is_reading(&self, block: u64) -> bool {
        self.ranges.lock().iter().any(|r| r.contains(&block))
    }

    /// Waits if `block` is being read; tells whether it was.
    pub fn wait(&self, block: u64) -> bool {
        let mut ranges = self.ranges.lock();
        let mut waited = false;
        while ranges.iter().any(|r| r.contains(&block)) {
            waited = true;
            let _waiting = activity::enter(Layer::DeviceRead);
            self.done.wait(&mut ranges);
        }
        waited
    }
}
