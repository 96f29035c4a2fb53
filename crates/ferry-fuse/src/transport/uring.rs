//! io_uring queues.
use super::dev::Device;
use crate::core::Core;
use crate::counters::AllCounters;
use std::sync::Arc;
use std::thread::JoinHandle;
pub(crate) fn start(
    _d: &Arc<Device>,
    _c: &Arc<Core>,
    _a: &AllCounters,
) -> std::io::Result<Vec<JoinHandle<()>>> {
    Ok(vec![])
}
