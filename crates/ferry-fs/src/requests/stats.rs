//! How the volume fares: statfs, and counters of everything.

use crate::api::Statfs;
use crate::error::FsError;
use crate::local::local_fs::{LocalFs, errno};
use crate::requests::devices::{Device, shorten_names};
use crate::requests::memory::Memory;
use crate::scrub::live::ScrubState;
use crate::store::data_store::{DataStats, SpaceTotals};
use ferry_journal::{JournalStats, TimesStats};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Unit of statfs, in bytes.
const STATFS_BLOCK: u64 = 4096;
/// Space that a new inode takes in the log and the home store, roughly, in bytes: what statfs makes
/// free inodes from.
const INODE_SPACE: u64 = 512;

#[derive(Serialize)]
struct Stats {
    volume: Volume,
    mount: Mount,
    memory: Memory,
    space: Space,
    inodes: Inodes,
    log: Log,
    flush: Flush,
    data: DataStats,
    scrub: Scrub,
    /// A composite's components, by their paths.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    devices: BTreeMap<String, Device>,
    /// What the volume's object store was asked for, if it is in one.
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<Store>,
    /// The transport's own; null while nothing is mounted.
    fuse: Option<serde_json::Value>,
}

/// What an object store was asked for.
#[derive(Serialize)]
struct Store {
    #[serde(flatten)]
    figures: BTreeMap<&'static str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<Held>,
}

/// Requests that the store does not carry out now.
#[derive(Serialize)]
struct Held {
    requests: u64,
    time_ns: u64,
    reason: String,
}

#[derive(Serialize)]
struct Volume {
    id: String,
    label: String,
    size: u64,
    read_only: bool,
    /// Why nothing can be changed any more, until it is mounted again; null while that is not so.
    failed: Option<String>,
}

/// How it is mounted; the flush policy is in [`Flush`].
#[derive(Serialize)]
struct Mount {
    cache: &'static str,
    commit_interval_ns: u64,
    flush_interval_min_ns: u64,
}

/// In bytes.
#[derive(Serialize)]
struct Space {
    total: u64,
    pub(crate) free: u64,
    available: u64,
    used: u64,
    live: u64,
}

#[derive(Serialize)]
struct Inodes {
    used: u64,
    in_memory: usize,
    /// The kernel knows them, and they are not in memory.
    remembered: usize,
    open_files: usize,
    cached_names: usize,
    to_reclaim: usize,
}

/// The newest scrub since the volume was mounted.
#[derive(Serialize)]
struct Scrub {
    state: ScrubState,
    started: String,
    time_ns: u64,
    verified_bytes: u64,
    damaged_blocks: u64,
}

/// [`JournalStats`], by the same names; times in nanoseconds.
#[derive(Serialize)]
struct Log {
    current: u64,
    durable: u64,
    bytes: u64,
    free_bytes: u64,
    used_bytes: u64,
    reserved_bytes: u64,
    reservations: u64,
    waiters: u64,
    waits: u64,
    wakes: u64,
    grants: u64,
    wakes_per_grant: Option<f64>,
    barges: u64,
    passes: u64,
    passes_spared: u64,
    contexts: u64,
    transactions: u64,
    written_bytes: u64,
    writes: u64,
    bytes_per_commit: Option<f64>,
    transactions_per_commit: Option<f64>,
    fsyncs_per_commit: Option<f64>,
    in_flight_average: Option<f64>,
    in_flight_max: u64,
    forces: u64,
    forces_grouped: u64,
    data_bytes: u64,
    checkpoint_pushes: u64,
    tail_moves: u64,
    checkpoints: u64,
    checkpoint_time_ns: u64,
    checkpoint_keys: u64,
    flushes: u64,
    layers: u64,
    active_keys: u64,
    committing_keys: u64,
    overlay_keys: u64,
    home_bytes: u64,
    home_blocks_healed: u64,
    times: LogTimes,
}

/// How long it took, many times over.
#[derive(Serialize)]
struct LogTimes {
    /// Waits for log space.
    waits: Times,
    /// A context, from its first change to its seal; then until its record was handed to the
    /// device, written, and flushed.
    collect: Times,
    queue: Times,
    write: Times,
    flush: Times,
}

#[derive(Serialize)]
struct Times {
    count: u64,
    total_ns: u64,
    average_ns: u64,
    p50_ns: u64,
    p99_ns: u64,
    max_ns: u64,
    /// Times in nanoseconds, and how many took at most so long.
    buckets: Vec<(u64, u64)>,
}

impl Times {
    fn new(t: &TimesStats) -> Self {
        Self {
            count: t.count,
            total_ns: nanos(t.sum),
            average_ns: nanos(t.sum).checked_div(t.count).unwrap_or(0),
            p50_ns: nanos(t.p50),
            p99_ns: nanos(t.p99),
            max_ns: nanos(t.max),
            buckets: TimesStats::BOUNDS_NS.into_iter().zip(t.within).collect(),
        }
    }
}

/// To two places; null while there is nothing to divide by.
fn ratio(sum: u64, count: u64) -> Option<f64> {
    (count > 0).then(|| (sum as f64 / count as f64 * 100.0).round() / 100.0)
}

/// [`ferry_journal::FlushStats`] and the device's flush timing; times in nanoseconds.
#[derive(Serialize)]
struct Flush {
    policy: &'static str,
    fast_flush_ns: u64,
    avg_flush_ns: u64,
    flush_samples: u32,
    commit_time_ns: u64,
    commit_delays: u64,
    commit_delays_in_vain: u64,
    delayed_callers: u64,
    commit_delay_ns: u64,
    overlapped: u64,
}

impl Flush {
    fn new(s: &JournalStats) -> Self {
        Self {
            policy: s.flush.policy.name(),
            fast_flush_ns: nanos(s.flush.fast_flush),
            avg_flush_ns: nanos(s.flush_time),
            flush_samples: s.flush_samples,
            commit_time_ns: nanos(s.flush.commit_time),
            commit_delays: s.flush.commit_delays,
            commit_delays_in_vain: s.flush.commit_delays_in_vain,
            delayed_callers: s.flush.delayed_callers,
            commit_delay_ns: nanos(s.flush.commit_delay_time),
            overlapped: s.flush.overlapped,
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Log {
    fn new(current: u64, durable: u64, s: &JournalStats) -> Self {
        Self {
            current,
            durable,
            bytes: s.log_bytes,
            free_bytes: s.log_free_bytes,
            used_bytes: s.log_used_bytes,
            reserved_bytes: s.log_reserved_bytes,
            reservations: s.begins,
            waiters: s.space.waiting,
            waits: s.space.waits,
            wakes: s.space.wakes,
            grants: s.space.grants,
            wakes_per_grant: ratio(s.space.wakes, s.space.grants),
            barges: s.space.barges,
            passes: s.space.passes,
            passes_spared: s.space.passes_spared,
            contexts: s.contexts,
            transactions: s.transactions,
            written_bytes: s.log_written_bytes,
            writes: s.log_writes,
            bytes_per_commit: ratio(s.log_written_bytes, s.contexts),
            transactions_per_commit: ratio(s.transactions, s.contexts),
            fsyncs_per_commit: ratio(s.forces, s.contexts),
            in_flight_average: ratio(s.log_in_flight_sum, s.log_records),
            in_flight_max: s.log_in_flight_max,
            forces: s.forces,
            forces_grouped: s.forces_grouped,
            data_bytes: s.data_bytes,
            checkpoint_pushes: s.checkpoint_pushes,
            tail_moves: s.tail_moves,
            checkpoints: s.checkpoints,
            checkpoint_time_ns: nanos(s.checkpoint_time),
            checkpoint_keys: s.checkpoint_keys,
            flushes: s.flushes,
            layers: s.layers,
            active_keys: s.active_keys,
            committing_keys: s.committing_keys,
            overlay_keys: s.overlay_keys,
            home_bytes: s.home_bytes,
            home_blocks_healed: s.home_blocks_healed,
            times: LogTimes {
                waits: Times::new(&s.space_waits),
                collect: Times::new(&s.stages.collect),
                queue: Times::new(&s.stages.queue),
                write: Times::new(&s.stages.write),
                flush: Times::new(&s.stages.flush),
            },
        }
    }
}

impl LocalFs {
    pub(crate) fn do_statfs(&self) -> Statfs {
        let space = self.data.totals();
        let inodes = self.counters.inodes();
        let files_free = space.available / INODE_SPACE;
        Statfs {
            block_size: STATFS_BLOCK as u32,
            blocks: space.total / STATFS_BLOCK,
            blocks_free: space.free / STATFS_BLOCK,
            blocks_available: space.available / STATFS_BLOCK,
            files: inodes.saturating_add(files_free),
            files_free,
        }
    }

    /// Counters of the journal.
    pub fn journal_stats(&self) -> JournalStats {
        self.journal.stats()
    }

    /// Counters of the contents of files.
    pub fn data_stats(&self) -> DataStats {
        self.data.stats()
    }

    /// How much space there is.
    pub fn space_totals(&self) -> SpaceTotals {
        self.data.totals()
    }

    /// Counters of everything, as JSON.
    pub fn stats(&self) -> serde_json::Value {
        let (space, journal) = (self.data.totals(), self.journal.stats());
        let scrub = self.scrub_status();
        let inodes = self.table.counts();
        let stats = Stats {
            volume: Volume {
                id: self.sb.id(),
                label: self.sb.label.clone(),
                size: self.size.load(Ordering::Relaxed),
                read_only: self.options.read_only,
                failed: self.failure(),
            },
            mount: Mount {
                cache: self.options.cache.name(),
                commit_interval_ns: nanos(self.options.commit_interval),
                flush_interval_min_ns: nanos(self.options.flush_interval_min),
            },
            memory: self.memory(),
            space: Space {
                total: space.total,
                free: space.free,
                available: space.available,
                used: space.used,
                live: space.live,
            },
            inodes: Inodes {
                used: self.counters.inodes(),
                in_memory: inodes.resident,
                remembered: inodes.remembered,
                open_files: self.handles.len(),
                cached_names: self.table.dir_entries(),
                to_reclaim: self.reclaimer.waiting(),
            },
            log: Log::new(self.journal.current().0, self.journal.durable().0, &journal),
            flush: Flush::new(&journal),
            data: self.data.stats(),
            scrub: Scrub {
                state: scrub.state,
                started: scrub.started,
                time_ns: scrub.time_ns,
                verified_bytes: scrub.done_bytes,
                damaged_blocks: scrub.damaged_blocks,
            },
            devices: self.devices(),
            store: self.store(),
            fuse: self.host.read().as_ref().map(|host| host.stats()),
        };
        serde_json::to_value(stats).expect("plain numbers and strings are JSON")
    }

    /// Why nothing can be changed any more: the journal has failed, or what is below will fail it.
    fn failure(&self) -> Option<String> {
        self.dev.failure().or_else(|| self.journal.failure().map(|error| error.to_string()))
    }

    fn store(&self) -> Option<Store> {
        let figures: BTreeMap<_, _> = self.dev.figures().into_iter().collect();
        let held = self.dev.held().map(|held| Held {
            requests: held.requests,
            time_ns: nanos(held.time),
            reason: held.reason,
        });
        (!figures.is_empty()).then_some(Store { figures, held })
    }

    /// The answer to [`crate::ioctl::STATS`]: the counters, ended by NUL.
    pub(crate) fn stats_bytes(&self, out_max: usize) -> Result<Vec<u8>, FsError> {
        let mut stats = self.stats();
        // An ioctl has little room, and a composite has up to 32 devices: without the histograms.
        for times in stats["log"]["times"].as_object_mut().into_iter().flatten() {
            times.1.as_object_mut().and_then(|times| times.remove("buckets"));
        }
        for operation in stats["fuse"]["operations"].as_object_mut().into_iter().flatten() {
            operation.1.as_object_mut().and_then(|facts| facts.remove("times"));
        }
        let text = stats.to_string();
        if text.len() < out_max {
            return ended(text, out_max);
        }
        shorten_names(&mut stats["devices"]);
        ended(stats.to_string(), out_max)
    }
}

/// The number that an ioctl brings.
pub(crate) fn number(input: &[u8]) -> Result<u64, FsError> {
    let bytes = input.first_chunk::<8>().ok_or(errno(libc::EINVAL))?;
    Ok(u64::from_ne_bytes(*bytes))
}

/// The same as an index: where a list is to begin.
pub(crate) fn index(input: &[u8]) -> Result<usize, FsError> {
    usize::try_from(number(input)?).map_err(|_| errno(libc::EINVAL))
}

pub(crate) fn json(value: &(impl serde::Serialize + ?Sized)) -> String {
    serde_json::to_string(value).expect("plain numbers and strings are JSON")
}

/// Text as an ioctl hands it out: ended by NUL.
pub(crate) fn ended(text: String, out_max: usize) -> Result<Vec<u8>, FsError> {
    let mut bytes = text.into_bytes();
    bytes.push(0);
    if bytes.len() > out_max { Err(errno(libc::ERANGE)) } else { Ok(bytes) }
}
