//! The state of a running journal, and how transactions reserve log space and commit.

use super::options::JournalOptions;
use super::signals::{Growth, HoldTimer, Signal};
use crate::commit::context::{Head, Joining};
use crate::commit::pipeline::Pipe;
use crate::commit::policy::Dispatcher;
use crate::commit::stats::{Counters, JournalStats};
use crate::disk::Disk;
use crate::home::Home;
use crate::log::format::{
    BLOCK_PAYLOAD, CONTEXT_MAX, EXTENT_ENTRY, KEY_ENTRY, LOG_BLOCK, LOG_MIN, RECORD_HEADER,
};
use crate::log::recovery::Replay;
use crate::log::ring::LogArea;
use crate::log::space::{NoGrant, Space};
use crate::log::tail::LeftLog;
use crate::types::Point;
use crate::view::layers::{Layer, View};
use crate::{Credits, JournalClient, JournalError, Seq, Value};
use ferry_env::{Env, activity};
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

/// The state that the threads of a journal share.
///
/// Order of the locks: `checkpointing`, `pipe`, then `head` or `left`. None of them is held over
/// I/O but `checkpointing`.
pub struct Core {
    pub disk: Arc<Disk>,
    /// Where the log is; changed by `Core::relocate` alone, while nothing is in it.
    pub area: RwLock<LogArea>,
    /// Most bytes of a record's body: [`payload_max`] of the log.
    pub payload_max: AtomicU64,
    pub growth: Growth,
    pub options: JournalOptions,
    pub env: Env,
    pub client: Arc<dyn JournalClient>,
    pub home: Home,
    pub space: Space,
    /// Bytes of the next release that are kept: the block that was missing for the next recovery's
    /// durable point.
    pub owed: AtomicU64,
    pub head: RwLock<Head>,
    pub pipe: Mutex<Pipe>,
    /// Held over a checkpoint. After one that found no segment: once the log's end reaches this
    /// position, the next one is tried even if there still is none.
    pub checkpointing: Mutex<Option<u64>>,
    pub merging: Mutex<()>,
    /// Where ids of records are noted, too, while the next process would go on from there.
    pub left: Mutex<Option<Arc<LeftLog>>>,
    pub hold_timer: HoldTimer,
    pub durable: AtomicU64,
    pub durable_point: AtomicU64,
    /// When the newest context was sealed, in nanoseconds of the clock.
    pub sealed_at: AtomicU64,
    pub failed: OnceLock<JournalError>,
    pub closed: AtomicBool,
    pub signal: Signal,
    pub stats: Counters,
}

/// Most bytes of a record's body, for a log of this many blocks: a context takes at most an eighth
/// of the log.
pub fn payload_max(blocks: u64) -> u64 {
    (blocks / 8).min(CONTEXT_MAX / LOG_BLOCK as u64) * BLOCK_PAYLOAD as u64 - RECORD_HEADER as u64
}

/// So many running transactions can keep all processors busy. The kernel is asked once: it answers
/// from several files.
fn crowd() -> u64 {
    static PROCESSORS: LazyLock<u64> = LazyLock::new(|| {
        std::thread::available_parallelism().map_or(1, |processors| processors.get() as u64)
    });
    *PROCESSORS
}

/// Bytes of a record that a transaction may take.
const fn payload_of(credits: &Credits) -> u64 {
    credits.bytes as u64 + credits.keys as u64 * (KEY_ENTRY + EXTENT_ENTRY) as u64
}

/// Bytes of the smallest log on which a transaction of this size can begin.
pub const fn smallest_log(credits: &Credits) -> u64 {
    let blocks = (payload_of(credits) + RECORD_HEADER as u64).div_ceil(BLOCK_PAYLOAD as u64);
    let len = 8 * blocks * LOG_BLOCK as u64;
    if len < LOG_MIN { LOG_MIN } else { len }
}

impl Core {
    /// Builds a journal that continues where `replayed` ends; the home store is as of `start`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts that a journal is put together from, once"
    )]
    pub fn new(
        disk: Arc<Disk>,
        area: LogArea,
        home: Home,
        start: Point,
        replayed: Replay,
        mut options: JournalOptions,
        env: Env,
        client: Arc<dyn JournalClient>,
    ) -> Result<Arc<Self>, JournalError> {
        let end = replayed.end;
        let layer = Layer { changes: replayed.changes, first: Seq(start.seq.0 + 1), last: end.seq };
        let layers = if layer.changes.is_empty() { Vec::new() } else { vec![Arc::new(layer)] };
        let view = Arc::new(View { layers, home: home.view()? });
        home.file().set_owner(client.clone());
        if let Some(tail) = &options.tail {
            tail.record(end.id);
        }
        let total = area.blocks * LOG_BLOCK as u64;
        let used = (end.position - start.position) * LOG_BLOCK as u64;
        let free = (total - used).saturating_sub(LOG_BLOCK as u64);
        let space = Space::new(free, total / 8, crowd());
        #[cfg(feature = "compare")]
        let space = space.with(options.log.wake);
        Ok(Arc::new(Self {
            disk,
            payload_max: AtomicU64::new(payload_max(area.blocks)),
            area: RwLock::new(area),
            growth: Growth::default(),
            home,
            // One block is kept for the durable point of the next recovery. If this recovery's took
            // it, the next checkpoint gives it back.
            space,
            owed: AtomicU64::new((LOG_BLOCK as u64).saturating_sub(total - used)),
            head: RwLock::new(Head::new(Seq(end.seq.0 + 1), view)),
            pipe: Mutex::new(Pipe::new(
                end,
                start,
                Dispatcher::new(options.flush, options.fast_flush)
                    .with_interval_min(options.flush_interval_min),
            )),
            checkpointing: Mutex::new(None),
            merging: Mutex::new(()),
            left: Mutex::new(options.left.take()),
            hold_timer: HoldTimer::default(),
            durable: AtomicU64::new(end.seq.0),
            durable_point: AtomicU64::new(end.seq.0),
            sealed_at: AtomicU64::new(0),
            failed: OnceLock::new(),
            closed: AtomicBool::new(false),
            signal: Signal::default(),
            stats: Counters::default(),
            options,
            env,
            client,
        }))
    }

    /// Why nothing can be written any more, if so.
    pub fn failure(&self) -> Option<JournalError> {
        self.failed.get().cloned()
    }

    /// Why no transaction may begin, if so.
    fn refusal(&self) -> Option<JournalError> {
        if let Some(error) = self.failed.get() {
            return Some(JournalError::ReadOnly(error.to_string().into()));
        }
        if self.closed.load(Ordering::Acquire) {
            return Some(JournalError::Closed);
        }
        self.options.read_only.then(|| JournalError::ReadOnly("opened read-only".into()))
    }

    /// Where the log is.
    pub fn area(&self) -> LogArea {
        *self.area.read()
    }

    /// Bytes of the log.
    pub fn log_bytes(&self) -> u64 {
        self.area.read().blocks * LOG_BLOCK as u64
    }

    /// Most bytes of a record's body.
    pub fn payload_max(&self) -> u64 {
        self.payload_max.load(Ordering::Acquire)
    }

    /// Bytes of log that a transaction reserves.
    fn bytes_for(&self, credits: &Credits) -> Result<u64, JournalError> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let (asked, limit) = (payload_of(credits), self.payload_max());
        if asked > limit {
            return Err(JournalError::TooLarge { asked, limit });
        }
        self.stats.begins.fetch_add(1, Ordering::Relaxed);
        // One block more than the bytes fill: for the record's header and the part of its last
        // block that stays unused.
        Ok((asked.div_ceil(BLOCK_PAYLOAD as u64) + 1) * LOG_BLOCK as u64)
    }

    /// Reserves log space for a transaction if that needs no wait. Returns the bytes reserved.
    pub fn try_reserve(self: &Arc<Self>, credits: &Credits) -> Result<Option<u64>, JournalError> {
        let bytes = self.bytes_for(credits)?;
        Ok(self.space.try_take(bytes, credits.urgent).then_some(bytes))
    }

    /// Reserves log space for a transaction, waiting in turn. Returns the bytes reserved.
    pub fn reserve(self: &Arc<Self>, credits: &Credits) -> Result<u64, JournalError> {
        let bytes = self.bytes_for(credits)?;
        if self.options.background {
            let mut waits_since = None;
            let taken = self.space.take(bytes, credits.urgent, || {
                waits_since = Some(self.env.clock.monotonic());
                self.signal.kick();
            });
            if let Some(since) = waits_since {
                self.stats.space_waits.note(self.env.clock.monotonic().saturating_sub(since));
            }
            return taken.map(|()| bytes).map_err(|e| self.no_grant(e));
        }
        if !self.space.try_take(bytes, credits.urgent) {
            self.make_room()?;
            if !self.space.try_take(bytes, credits.urgent) {
                return Err(JournalError::NoSpace);
            }
        }
        Ok(bytes)
    }

    fn no_grant(&self, why: NoGrant) -> JournalError {
        match why {
            NoGrant::Full => JournalError::NoSpace,
            NoGrant::Stopped => self.refusal().unwrap_or(JournalError::Closed),
        }
    }

    /// Merges a transaction, which has reserved `reserved` bytes of log space, into the open
    /// context.
    pub fn commit(self: &Arc<Self>, joining: Joining, reserved: u64) -> Seq {
        if joining.changes.is_empty() && joining.extents.is_empty() {
            self.end(reserved);
            return self.head.read().seq;
        }
        let _inside = activity::enter(activity::Layer::Journal);
        let adds = joining.payload();
        loop {
            let mut head = self.head.write();
            let seq = head.seq;
            if !head.is_empty() && head.payload + adds > self.payload_max() {
                drop(head);
                self.growth.wait_over();
                self.seal_if(seq);
                continue;
            }
            let first = head.is_empty();
            if first {
                head.since = self.env.clock.monotonic();
            }
            if let Some(request) = joining.request {
                self.client.joins(request, seq);
            }
            if let Some(tail) = &self.options.tail {
                tail.join(seq, joining.request, &joining.changes, &joining.extents);
            }
            let held = head.held + reserved;
            let needed = head.join(joining);
            head.held = needed;
            drop(head);
            self.settle(held, needed);
            if first {
                self.signal.active();
            }
            return seq;
        }
    }

    /// The id of a record to come. It is noted before the record is written (TAIL-3).
    pub fn new_record_id(&self) -> u64 {
        let id = self.env.entropy.next_u64();
        if let Some(tail) = &self.options.tail {
            tail.record(id);
        }
        if let Some(left) = &*self.left.lock() {
            left.tail.record(id);
        }
        id
    }

    /// A planted bug: half of a transaction's changes become a context of their own, if the log has
    /// room for it.
    pub fn commit_first_half(self: &Arc<Self>, changes: &mut crate::types::Changes) {
        let Some(middle) = changes.keys().nth(changes.len() / 2).cloned() else { return };
        let second = changes.split_off(&middle);
        let first = Joining {
            changes: std::mem::replace(changes, second),
            extents: Vec::new(),
            writes: None,
            request: None,
        };
        let room = (first.payload().div_ceil(BLOCK_PAYLOAD as u64) + 1) * LOG_BLOCK as u64;
        if first.changes.is_empty() || !self.space.try_take(room, true) {
            changes.extend(first.changes);
            return;
        }
        let seq = self.commit(first, room);
        self.seal_if(seq);
    }

    /// The context needs `needed` bytes of log; it had `held`.
    fn settle(&self, held: u64, needed: u64) {
        if needed <= held {
            return self.end(held - needed);
        }
        debug_assert!(
            needed <= held,
            "a transaction took {} bytes more than it reserved",
            needed - held
        );
        tracing::error!(missing = needed - held, "a transaction took more log than it reserved");
        assert!(self.space.try_take_for_log(needed - held), "the log would be overrun");
        self.end(0);
    }

    /// A transaction ends, and gives log space back.
    pub fn end(&self, bytes: u64) {
        self.space.end(bytes);
        if self.space.is_short() {
            self.signal.kick();
        }
    }

    /// The newest committed value of `key`.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        loop {
            let view = {
                let head = self.head.read();
                if let Some(change) = head.change(key) {
                    return Ok(change.clone());
                }
                head.view.clone()
            };
            match view.get(key) {
                Err(error) if self.renewed(&view.home).is_none() => return Err(error),
                Err(_) => (),
                found => return found,
            }
        }
    }
    pub fn stats(&self) -> JournalStats {
        let (used, durable, flush) = {
            let pipe = self.pipe.lock();
            (pipe.used_blocks() * LOG_BLOCK as u64, pipe.end.seq, pipe.flush_stats())
        };
        let timing = self.disk.flush_timing();
        let (active_keys, view) = {
            let head = self.head.read();
            (head.changes.len() as u64, head.view.clone())
        };
        let keys = |durable_ones: bool| {
            let layers = view.layers.iter().filter(|l| (l.last <= durable) == durable_ones);
            layers.map(|l| l.changes.len() as u64).sum()
        };
        let log_bytes = self.log_bytes();
        let log_free_bytes = self.space.free();
        JournalStats {
            log_bytes,
            log_free_bytes,
            log_used_bytes: used,
            log_reserved_bytes: log_bytes.saturating_sub(used + log_free_bytes),
            space: self.space.stats(),
            flushes: self.disk.flushes(),
            flush,
            flush_time: timing.avg,
            flush_samples: timing.samples,
            layers: view.layers.len() as u64,
            active_keys,
            committing_keys: keys(false),
            overlay_keys: keys(true),
            home_bytes: self.home.file().attached_bytes(),
            home_blocks_healed: self.home.file().healed(),
            ..self.stats.read()
        }
    }
}
