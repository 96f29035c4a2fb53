//! What a device's requests take, and a device in memory that takes as long.

mod device;
mod timer;

pub use device::ModelDevice;
pub use timer::{RealTime, Timer, VirtualTime};

use std::time::Duration;

/// What a device's requests take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceModel {
    /// The time of a flush.
    pub flush_time: Duration,
    /// The time of a write.
    pub write_time: Duration,
    /// Writes that it works on at the same time.
    pub queue_depth: u32,
    /// One flush after the other; otherwise each takes its time beside the others.
    pub serial_flushes: bool,
}

impl Default for DeviceModel {
    /// A good disk: 2 ms for a flush, 20 µs for a write.
    fn default() -> Self {
        Self {
            flush_time: Duration::from_millis(2),
            write_time: Duration::from_micros(20),
            queue_depth: 128,
            serial_flushes: true,
        }
    }
}
