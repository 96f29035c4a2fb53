//! Options with which an owner opens a journal.

use crate::commit::policy::FlushPolicy;
#[cfg(feature = "compare")]
use crate::log::space::Wake;
use crate::log::tail::{LeftLog, Tail};
use std::sync::Arc;

/// Most records whose writes are in flight at the same time.
pub const IN_FLIGHT_MAX: usize = 8;

/// Options of a journal.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// A context is sealed at the latest this long after its first change.
    pub commit_interval: std::time::Duration,
    /// When a context that callers wait for is sealed.
    pub flush: FlushPolicy,
    /// [`FlushPolicy::Delay`] does not wait if flushes take less than this on average.
    pub fast_flush: std::time::Duration,
    /// Callers wait until the flush before theirs is so long ago, and share the next one; zero:
    /// they do not. A longer interval than [`JournalOptions::commit_interval`] makes no sense.
    pub flush_interval_min: std::time::Duration,
    /// How the log is driven.
    pub log: LogOptions,
    /// Most bytes of redb's cache.
    pub home_cache_bytes: usize,
    /// The owner is going to read all keys in order, perhaps several times: pages of the home store
    /// are read ahead.
    pub reads_all: bool,
    /// No changes are accepted, nothing is written: recovery happens in memory only.
    pub read_only: bool,
    /// `false`: no threads; every step runs on the caller's thread, inside `force`, `begin`, `tick`
    /// and `checkpoint`, so that a simulation is a function of its seed. A hold ends at a `tick`
    /// (see [`Journal::next_due`]).
    pub background: bool,
    /// A log that is damaged before its durable end counts as ending there
    /// ([`Recovered::log_damage`] says what is lost). Without `read_only` the cut is permanent.
    pub accept_damage: bool,
    /// Where what the log does not have yet outlives the process.
    pub tail: Option<Arc<Tail>>,
    /// The same of a process that was killed: its contexts are written to the log.
    pub left: Option<Arc<LeftLog>>,
}

impl JournalOptions {
    /// Options to read all of an unmounted volume: nothing is written, there are no threads, damage
    /// is an error.
    pub fn offline(home_cache_bytes: usize) -> Self {
        Self {
            commit_interval: std::time::Duration::from_secs(1),
            flush: FlushPolicy::default(),
            log: LogOptions::default(),
            fast_flush: FAST_FLUSH,
            flush_interval_min: std::time::Duration::ZERO,
            home_cache_bytes,
            reads_all: true,
            read_only: true,
            background: false,
            accept_damage: false,
            tail: None,
            left: None,
        }
    }
}

/// How the log is driven. Only comparisons need other values than the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// How transactions that wait for log space are served.
    #[cfg(feature = "compare")]
    pub wake: Wake,
    /// Most records whose writes are in flight at the same time, 1 to [`IN_FLIGHT_MAX`].
    pub buffers: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            #[cfg(feature = "compare")]
            wake: Wake::default(),
            buffers: IN_FLIGHT_MAX,
        }
    }
}

/// Default of [`JournalOptions::fast_flush`].
pub const FAST_FLUSH: std::time::Duration = std::time::Duration::from_millis(2);
