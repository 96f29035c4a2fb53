//! Counters of the journal.

use crate::FlushPolicy;
use crate::context::Context;
use crate::space::SpaceStats;
use crate::times::{Times, TimesStats};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What the journal did since it was opened, and how full it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct JournalStats {
    /// Length of the log, in bytes.
    pub log_bytes: u64,
    /// Bytes of it that nobody holds.
    pub log_free_bytes: u64,
    /// Bytes between the log's tail and its end: records that a checkpoint has not released.
    pub log_used_bytes: u64,
    /// Bytes held by transactions under way and by the context being collected.
    pub log_reserved_bytes: u64,
    /// Reservations of log space.
    pub begins: u64,
    /// Waits for it, wake-ups, grants to waiters, passes over the queues.
    pub space: SpaceStats,
    /// How long the waits took.
    pub space_waits: TimesStats,
    /// Contexts sealed.
    pub contexts: u64,
    /// Transactions in durable contexts.
    pub transactions: u64,
    /// Bytes of records written.
    pub log_written_bytes: u64,
    /// Writes of records.
    pub log_writes: u64,
    /// Records that were handed to the device.
    pub log_records: u64,
    /// Records under way at the same time, summed over the records, and at most.
    pub log_in_flight_sum: u64,
    /// See `log_in_flight_sum`.
    pub log_in_flight_max: u64,
    /// Forces that had to wait for a commit.
    pub forces: u64,
    /// Those of them that boarded a context as it was sealed; the rest joined one under way.
    pub forces_boarded: u64,
    /// Bytes of data that contexts mapped.
    pub data_bytes: u64,
    /// Time that contexts spent in each stage.
    pub stages: StageTimes,
    /// Times that the log's tail moved: all that ever gives the space of records back, however many writes they took.
    pub tail_moves: u64,
    /// Checkpoints begun because log space ran short.
    pub checkpoint_pushes: u64,
    /// Checkpoints done.
    pub checkpoints: u64,
    /// Time they took.
    pub checkpoint_time: Duration,
    /// Keys that they wrote home.
    pub checkpoint_keys: u64,
    /// Flushes that the journal asked for.
    pub flushes: u64,
    /// The flush policy and what it did.
    pub flush: FlushStats,
    /// Average time of a flush of the device, and the flushes that it was made from, up to 256.
    pub flush_time: Duration,
    /// See `flush_time`.
    pub flush_samples: u32,
    /// Layers between the changes being collected and the home store.
    pub layers: u64,
    /// Keys in the changes being collected.
    pub active_keys: u64,
    /// Keys in sealed contexts that are not durable.
    pub committing_keys: u64,
    /// Keys in durable layers above the home store.
    pub overlay_keys: u64,
    /// Bytes of the home store's database.
    pub home_bytes: u64,
    /// Blocks of the home store of which one copy was damaged; they were read from the other, and mended if possible.
    pub home_blocks_healed: u64,
}

/// How long durable contexts were in each stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTimes {
    /// From the first change to the seal.
    pub collect: TimesStats,
    /// From the seal until the record was handed to the device.
    pub queue: TimesStats,
    /// Until the record and the data were written.
    pub write: TimesStats,
    /// Until a flush made them durable.
    pub flush: TimesStats,
}

/// The flush policy and what it did.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlushStats {
    /// When a context that somebody waits for is sealed.
    pub policy: FlushPolicy,
    /// [`FlushPolicy::Delay`] does not wait where flushes take less than this on average.
    pub fast_flush: Duration,
    /// Average time from a context's seal until it is durable.
    pub crossing: Duration,
    /// Commits held for callers that were expected.
    pub holds: u64,
    /// Those for which not all of them came in time (`adaptive` only).
    pub holds_in_vain: u64,
    /// Callers on board of a commit that was held.
    pub held_callers: u64,
    /// How long commits were held, together.
    pub hold_time: Duration,
    /// Commits that were sealed beside the flush of the one before.
    pub beside: u64,
}

/// The counters as they run.
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
    pub forces_boarded: AtomicU64,
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
    /// A record is the `n`th under way.
    pub fn note_in_flight(&self, n: u64) {
        self.records.fetch_add(1, Relaxed);
        self.in_flight_sum.fetch_add(n, Relaxed);
        self.in_flight_max.fetch_max(n, Relaxed);
    }

    /// A context was sealed that `boarded` callers wait for.
    pub fn note_context(&self, context: &Context, boarded: u64) {
        self.contexts.fetch_add(1, Relaxed);
        self.forces_boarded.fetch_add(boarded, Relaxed);
        self.data_bytes.fetch_add(context.data_bytes, Relaxed);
    }

    /// A context became durable; `at` is when it was begun, sealed, sent, written, and flushed.
    pub fn note_stages(&self, at: [Duration; 5]) {
        for (stage, from_to) in self.stages.iter().zip(at.windows(2)) {
            stage.note(from_to[1].saturating_sub(from_to[0]));
        }
    }

    /// A checkpoint is done.
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
            forces_boarded: self.forces_boarded.load(Relaxed),
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
