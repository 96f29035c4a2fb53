//! The callers of a workload, and their clock.

use crate::error::BenchError;
use ferry_env::{Clock, Env};
use std::sync::{Arc, Barrier, LazyLock};
use std::time::Duration;

/// The time since an arbitrary start.
pub fn now() -> Duration {
    static CLOCK: LazyLock<Arc<dyn Clock>> = LazyLock::new(|| Env::real().clock);
    CLOCK.monotonic()
}

/// Runs `work` in this many threads at the same time; each gets its number, from 0, and they begin
/// together. Returns their results, or the first error.
pub fn threads<T: Send, E: Into<BenchError> + Send>(
    count: u32,
    work: impl Fn(u32) -> Result<T, E> + Sync,
) -> Result<Vec<T>, BenchError> {
    let start = Barrier::new(count as usize);
    let begin = |number| {
        start.wait();
        work(number)
    };
    let results: Vec<Result<T, E>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..count).map(|number| scope.spawn(move || begin(number))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect()
    });
    results.into_iter().map(|result| result.map_err(Into::into)).collect()
}
