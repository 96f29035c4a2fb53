//! One device, one number of callers, one policy.

use crate::error::BenchError;
use crate::model::{DeviceModel, ModelDevice, Timer, VirtualTime};
use crate::workload::bare::{Owner, geometry};
use crate::workload::numbers::Numbers;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_journal::{
    Caller, Credits, DataExtent, FlushPolicy, Geometry, Journal, JournalError, JournalOptions,
    LogOptions,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Length of the log: no run fills as much of it that it would be checkpointed.
const LOG_LEN: u64 = 64 << 20;
const SEGMENT_LEN: u64 = 256 << 10;
const SEGMENTS: u32 = 64;
/// Segments before this one are the home store's, those behind it hold the callers' blocks.
const FIRST_DATA_SEGMENT: u32 = 32;
/// Most callers that their blocks have room for.
const CALLERS_MAX: u32 = 128;
/// Calls of each caller that are counted, and those before them that are not, at least.
const ROUNDS: u64 = 40;
const WARM_UP: u64 = 12;
/// Calls that are counted, at least: so that few callers make many rounds.
const CALLS_MIN: u64 = 400;
const SEED: u64 = 2010;

/// The load: the callers and their pauses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// The number of callers.
    pub callers: u32,
    /// How long each takes between an answer and the next call.
    pub think_time: Duration,
    /// So much more, at random.
    pub jitter: Duration,
}

impl Load {
    /// Callers who do nothing else.
    pub fn eager(callers: u32) -> Self {
        Self { callers, think_time: Duration::ZERO, jitter: Duration::ZERO }
    }
}

/// What was counted, warm-up left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Calls of fsync that were answered.
    pub fsyncs: u64,
    /// In so much virtual time.
    pub time: Duration,
    /// Flushes of the device.
    pub flushes: u64,
    /// How often a commit was held back.
    pub holds: u64,
    /// Those held in vain.
    pub holds_in_vain: u64,
}

impl Outcome {
    /// Calls answered in a second.
    pub fn rate(&self) -> f64 {
        self.fsyncs as f64 / self.time.as_secs_f64()
    }

    /// Calls answered by one flush.
    pub fn callers_per_flush(&self) -> f64 {
        self.fsyncs as f64 / self.flushes as f64
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            fsyncs: self.fsyncs - earlier.fsyncs,
            time: self.time - earlier.time,
            flushes: self.flushes - earlier.flushes,
            holds: self.holds - earlier.holds,
            holds_in_vain: self.holds_in_vain - earlier.holds_in_vain,
        }
    }
}

/// Runs the load and counts.
pub fn run(
    device: &DeviceModel,
    load: &Load,
    policy: FlushPolicy,
    fast_flush: Duration,
) -> Result<Outcome, BenchError> {
    if load.callers > CALLERS_MAX {
        return Err(BenchError::Option(format!(
            "{} callers are too many: at most {CALLERS_MAX}",
            load.callers
        )));
    }
    let geometry = geometry(*b"fsync-happy     ", LOG_LEN, (SEGMENTS, SEGMENT_LEN));
    let pauses = Pauses::default();
    let time = pauses.time.clone();
    let env = Env { clock: time.clone(), entropy: Arc::new(Numbers::new(SEED)) };
    let capacity = geometry.segments_offset + u64::from(SEGMENTS) * SEGMENT_LEN;
    let model = Device::in_time(time, device.clone(), capacity);
    let as_device: Arc<dyn BlockDevice> = model.clone();
    Journal::format(&as_device, &geometry, &[0, 1, 2, 3], &env)?;
    let options = JournalOptions {
        commit_interval: Duration::from_secs(3600),
        home_cache_bytes: 1 << 20,
        reads_all: false,
        flush: policy,
        fast_flush,
        flush_interval_min: Duration::ZERO,
        log: LogOptions::default(),
        read_only: false,
        accept_damage: false,
        tail: None,
        left: None,
        background: false,
    };
    let owner = Arc::new(Owner::of(4..FIRST_DATA_SEGMENT));
    let (journal, _) = Journal::open(as_device, geometry, options, env, owner)?;
    model.begin();
    let callers = Callers::new(pauses, model, journal, load, &geometry);
    let numbers = Numbers::new(SEED);
    for caller in 0..load.callers {
        callers.pauses.add(numbers.below(device.flush_time), caller);
    }
    let warm = callers.count_until(WARM_UP * u64::from(load.callers))?;
    let calls = (ROUNDS * u64::from(load.callers)).max(CALLS_MIN);
    Ok(callers.count_until(warm.fsyncs + calls)?.since(&warm))
}

/// The device of a run, in virtual time.
type Device = ModelDevice<Arc<VirtualTime>>;

/// Callers that call when their pauses end.
#[derive(Clone, Default)]
struct Pauses {
    time: Arc<VirtualTime>,
    ended: Arc<Mutex<Option<u32>>>,
}

impl Pauses {
    fn add(&self, pause: Duration, caller: u32) {
        let ended = self.ended.clone();
        self.time.at(self.time.now() + pause, Box::new(move || *ended.lock() = Some(caller)));
    }
}

struct Callers {
    pauses: Pauses,
    device: Arc<Device>,
    journal: Journal,
    load: Load,
    think: Arc<Numbers>,
    /// Where the callers' blocks are on the device.
    blocks: u64,
    buf: Arc<AlignedBuf>,
    crc: u32,
    calls: Mutex<Vec<u64>>,
    answered: Arc<AtomicU64>,
    failed: Arc<Mutex<Option<JournalError>>>,
}

impl Drop for Callers {
    /// The journal's home store is closed after this, and waits for what it writes.
    fn drop(&mut self) {
        self.device.end();
    }
}

impl Callers {
    fn new(
        pauses: Pauses,
        device: Arc<Device>,
        journal: Journal,
        load: &Load,
        geometry: &Geometry,
    ) -> Self {
        let buf = AlignedBuf::zeroed(BLOCK_SIZE);
        Self {
            pauses,
            device,
            journal,
            load: load.clone(),
            think: Arc::new(Numbers::new(SEED + 1)),
            blocks: geometry.segments_offset + u64::from(FIRST_DATA_SEGMENT) * SEGMENT_LEN,
            crc: crc32c::crc32c(&crc32c::crc32c(&buf).to_le_bytes()),
            buf: Arc::new(buf),
            calls: Mutex::new(vec![0; load.callers as usize]),
            answered: Arc::default(),
            failed: Arc::default(),
        }
    }

    /// Lets things happen until so many calls are answered, and all else that happens at that time.
    fn count_until(&self, answers: u64) -> Result<Outcome, BenchError> {
        loop {
            let (now, event) = (self.pauses.time.now(), self.pauses.time.next_at());
            if self.answered.load(Ordering::Relaxed) >= answers && event != Some(now) {
                return Ok(self.counted());
            }
            let due = self.journal.next_due().map(|left| now + left);
            match (event, due) {
                (Some(event), Some(due)) if due < event => self.end_hold(due)?,
                (Some(_), _) => {
                    self.pauses.time.step();
                    let caller = self.pauses.ended.lock().take();
                    caller.map_or(Ok(()), |caller| self.call(caller))?;
                }
                (None, Some(due)) if due > now => self.end_hold(due)?,
                _ => {
                    return Err(BenchError::Stuck {
                        answered: self.answered.load(Ordering::Relaxed),
                        at: now,
                    });
                }
            }
            if let Some(error) = self.failed.lock().take() {
                return Err(error.into());
            }
        }
    }

    fn end_hold(&self, due: Duration) -> Result<(), BenchError> {
        self.pauses.time.advance_to(due);
        Ok(self.journal.tick()?)
    }

    fn counted(&self) -> Outcome {
        let flush = self.journal.stats().flush;
        Outcome {
            fsyncs: self.answered.load(Ordering::Relaxed),
            time: self.pauses.time.now(),
            flushes: self.device.done().flushes,
            holds: flush.commit_delays,
            holds_in_vain: flush.commit_delays_in_vain,
        }
    }

    /// Overwrites the caller's block and asks for it to be durable.
    fn call(&self, caller: u32) -> Result<(), BenchError> {
        let call = {
            let calls = &mut self.calls.lock()[caller as usize];
            *calls += 1;
            *calls
        };
        // In turn at two offsets: what is durable is never overwritten.
        let block = u64::from(caller) * 2 + call % 2;
        let offset = self.blocks + block * BLOCK_SIZE as u64;
        let mut txn = self.journal.begin(Credits { keys: 1, bytes: 64, urgent: false })?;
        txn.put(&caller.to_be_bytes(), &call.to_le_bytes());
        let extent = DataExtent { offset, buf: self.buf.clone(), crc: self.crc };
        txn.write_data(extent, Box::new(|_| ()));
        let seq = txn.commit();
        let (pauses, answered, failed) =
            (self.pauses.clone(), self.answered.clone(), self.failed.clone());
        let pause = self.load.think_time + self.think.below(self.load.jitter);
        let done = move |result: Result<(), JournalError>| match result {
            Ok(()) => {
                answered.fetch_add(1, Ordering::Relaxed);
                pauses.add(pause, caller);
            }
            Err(error) => *failed.lock() = Some(error),
        };
        self.journal.force_for(Caller(caller + 1), seq, Box::new(done));
        Ok(())
    }
}
