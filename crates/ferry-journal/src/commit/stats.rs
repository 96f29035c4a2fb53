//! Statistics of the journal, and the counters behind them.

use super::context::Context;
use super::policy::FlushPolicy;
use crate::histogram::{Times, TimesStats};
use crate::log::space::SpaceStats;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// What the journal has done since it was opened, and how full it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct JournalStats {
    /// Length of the log, in bytes.
    pub log_bytes: u64,
    /// Bytes of it that are free.
    pub log_free_bytes: u64,
    /// Bytes between the log's tail and its end: records that a checkpoint has not released.
    pub log_used_bytes: u64,
    /// Bytes reserved by running transactions and by the open context.
    pub log_reserved_bytes: u64,
    /// Reservations of log space.
    pub begins: u64,
    /// Waits for log space, wake-ups, grants to waiters, passes over the queues.
    pub space: SpaceStats,
    /// How long transactions waited for log space.
    pub space_waits: TimesStats,
    /// Contexts that were sealed.
    pub contexts: u64,
    /// Transactions in durable contexts.
    pub transactions: u64,
    /// Bytes of records written.
    pub log_written_bytes: u64,
    /// Writes of records.
    pub log_writes: u64,
    /// Records that were handed to the device.
    pub log_records: u64,
    /// Records in flight at the same time, summed over the records.
    pub log_in_flight_sum: u64,
    /// Most records in flight at the same time.
    pub log_in_flight_max: u64,
    /// Forces that had to wait for a commit.
    pub forces: u64,
    /// Those of them that waiters a context as it was sealed; the rest joined one under way.
    pub forces_grouped: u64,
    /// Bytes of data that contexts mapped.
    pub data_bytes: u64,
    /// Time that contexts spent in each stage.
    pub stages: StageTimes,
    /// How often the log's tail moved. Only that gives the space of records back, however many
    /// writes they took.
    pub tail_moves: u64,
    /// Checkpoints begun because log space ran short.
    pub checkpoint_pushes: u64,
    /// Checkpoints that succeeded.
    pub checkpoints: u64,
    /// Total time of checkpoints.
    pub checkpoint_time: Duration,
    /// Keys that checkpoints wrote to the home store.
    pub checkpoint_keys: u64,
    /// Flushes that the journal asked for.
    pub flushes: u64,
    /// The flush policy and its statistics.
    pub flush: FlushStats,
    /// Average time of a flush of the device.
    pub flush_time: Duration,
    /// Flushes of which `flush_time` is the average, up to 256.
    pub flush_samples: u32,
    /// Layers between the open context and the home store.
    pub layers: u64,
    /// Keys that the open context changes.
    pub active_keys: u64,
    /// Keys in sealed contexts that are not durable.
    pub committing_keys: u64,
    /// Keys in durable layers above the home store.
    pub overlay_keys: u64,
    /// Bytes of the home store's database.
    pub home_bytes: u64,
    /// Blocks of the home store of which one copy was damaged. They were read from the other copy,
    /// and repaired if possible.
    pub home_blocks_healed: u64,
}

/// How long durable contexts spent in each stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTimes {
    /// From the first change to the seal.
    pub collect: TimesStats,
    /// From the seal until the record was handed to the device.
    pub queue: TimesStats,
    /// From then until the record and the data were written.
    pub write: TimesStats,
    /// From then until a flush made them durable.
    pub flush: TimesStats,
}

/// The flush policy and its statistics.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlushStats {
    /// When a context that callers wait for is sealed.
    pub policy: FlushPolicy,
    /// [`FlushPolicy::Delay`] does not wait if flushes take less than this on average.
    pub fast_flush: Duration,
    /// Average time from a context's seal until it is durable.
    pub commit_time: Duration,
    /// Commits that were delayed for expected callers.
    pub commit_delays: u64,
    /// Delays that ended before all expected callers had arrived (`adaptive` only).
    pub commit_delays_in_vain: u64,
    /// Callers that delayed commits served.
    pub delayed_callers: u64,
    /// Total time of these delays.
    pub commit_delay_time: Duration,
    /// Commits that were sealed during the flush of the one before.
    pub overlapped: u64,
}

/// The counters behind [`JournalStats`].
#[derive(Default)]
pub struct Counters {
    pub begins: AtomicU64,
    pub contexts: AtomicU64,
    pub transactions: AtomicU64,
    pub log_bytes: AtomicU64,
    pub log_writes: AtomicU64,
    pub records: AtomicU64,
    pub in_flight_sum: AtomicU64,
    pub in_flight_max: AtomicU64,
    pub forces: AtomicU64,
    pub forces_grouped: AtomicU64,
    pub data_bytes: AtomicU64,
    pub space_waits: Times,
    pub stages: [Times; 4],
    pub tail_moves: AtomicU64,
    pub checkpoint_pushes: AtomicU64,
    pub checkpoints: AtomicU64,
    pub checkpoint_nanos: AtomicU64,
    pub checkpoint_keys: AtomicU64,
}

impl Counters {
    /// Notes a record that is the `n`th in flight.
    pub fn note_in_flight(&self, n: u64) {
        self.records.fetch_add(1, Relaxed);
        self.in_flight_sum.fetch_add(n, Relaxed);
        self.in_flight_max.fetch_max(n, Relaxed);
    }

    /// Notes the seal of a context that `waiters` callers wait for.
    pub fn note_context(&self, context: &Context, waiters: u64) {
        self.contexts.fetch_add(1, Relaxed);
        self.forces_grouped.fetch_add(waiters, Relaxed);
        self.data_bytes.fetch_add(context.data_bytes, Relaxed);
    }

    /// Notes a durable context; `at` is when it was begun, sealed, sent, written, and flushed.
    pub fn note_stages(&self, at: [Duration; 5]) {
        for (stage, from_to) in self.stages.iter().zip(at.windows(2)) {
            stage.note(from_to[1].saturating_sub(from_to[0]));
        }
    }

    /// Notes a checkpoint.
    pub fn note_checkpoint(&self, took: Duration, keys: u64) {
        self.checkpoints.fetch_add(1, Relaxed);
        self.checkpoint_nanos.fetch_add(took.as_nanos() as u64, Relaxed);
        self.checkpoint_keys.fetch_add(keys, Relaxed);
    }

    /// The counters' part of the statistics.
    pub fn read(&self) -> JournalStats {
        let [collect, queue, write, flush] = self.stages.each_ref().map(Times::read);
        JournalStats {
            begins: self.begins.load(Relaxed),
            contexts: self.contexts.load(Relaxed),
            transactions: self.transactions.load(Relaxed),
            log_written_bytes: self.log_bytes.load(Relaxed),
            log_writes: self.log_writes.load(Relaxed),
            log_records: self.records.load(Relaxed),
            log_in_flight_sum: self.in_flight_sum.load(Relaxed),
            log_in_flight_max: self.in_flight_max.load(Relaxed),
            forces: self.forces.load(Relaxed),
            forces_grouped: self.forces_grouped.load(Relaxed),
            data_bytes: self.data_bytes.load(Relaxed),
            space_waits: self.space_waits.read(),
            stages: StageTimes { collect, queue, write, flush },
            tail_moves: self.tail_moves.load(Relaxed),
            checkpoint_pushes: self.checkpoint_pushes.load(Relaxed),
            checkpoints: self.checkpoints.load(Relaxed),
            checkpoint_time: Duration::from_nanos(self.checkpoint_nanos.load(Relaxed)),
            checkpoint_keys: self.checkpoint_keys.load(Relaxed),
            ..JournalStats::default()
        }
    }
}
