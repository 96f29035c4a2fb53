//! Log space alone: many threads take space of a log that is too small for them, and give it back.
//!
//! Nothing else of the journal runs, so the ways to serve those who wait show what they cost. Each
//! operation takes [`TAKES`] blocks, computes the checksum of one, and gives back all but
//! [`USES`], as a transaction that reserved for the worst case. What it used lies in the log until
//! the tail moves: a thread of its own gives back all that has gathered as soon as that is a
//! quarter of the log.

mod simulated;

use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample, Variant};
use crate::target::own_cpu_time;
use crate::threads::{now, threads};
use ferry::command::shared::{parse_bytes, parse_time};
use ferry_device::BLOCK_SIZE;
use ferry_journal::{Space, Wake};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Blocks that an operation takes.
pub const TAKES: u64 = 3;
/// Blocks of these that stay in the log until the tail moves.
pub const USES: u64 = 1;

const METRICS: [Metric; 8] = [
    Metric { name: "ops_per_s", label: "operations/s", more_is_better: true },
    Metric { name: "cpu_us_per_op", label: "CPU µs/op", more_is_better: false },
    Metric { name: "switches_per_op", label: "context switches/op", more_is_better: false },
    Metric { name: "longest_wait_ms", label: "longest wait ms", more_is_better: false },
    Metric { name: "waits_per_op", label: "waits/op", more_is_better: false },
    Metric { name: "wakes_per_grant", label: "wakes/grant", more_is_better: false },
    Metric { name: "barges_per_op", label: "barges/op", more_is_better: false },
    Metric { name: "lock_percent", label: "CPU at the lock %", more_is_better: false },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Threads that take space; several: 48,400
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "48,400,4000", value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub waiters: Vec<u32>,
    /// Ways to serve those who wait; several: barging,all
    #[arg(long, value_delimiter = ',', value_name = "WAY", default_values_t = Wake::WAYS)]
    pub wake: Vec<Wake>,
    /// Size of the log
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "256K")]
    pub log_size: u64,
    /// How long a turn is
    #[arg(long, value_parser = parse_time, value_name = "TIME", default_value = "1s")]
    pub time: Duration,
}

impl Options {
    fn log_blocks(&self) -> u64 {
        self.log_size / BLOCK_SIZE as u64
    }
}

/// Runs each number of waiters with each way, the ways in turn, on this machine and in virtual
/// time. They are compared with `all`.
pub fn bench(options: &Options) -> Result<Bench<'static>, BenchError> {
    if options.log_blocks() < 4 * TAKES {
        return Err(BenchError::Option(format!("a log has at least {} blocks here", 4 * TAKES)));
    }
    let cases = options.waiters.iter().map(|waiters| {
        let variants = options.wake.iter().map(|wake| {
            let (wake, waiters) = (*wake, *waiters);
            let options = options.clone();
            Variant::new(wake.name(), move |_| turn(&options, wake, waiters))
        });
        let mut case = Case::new(format!("{waiters} waiters"), variants.collect());
        case.group = "log space".into();
        (case.x, case.x_label) = (Some(f64::from(*waiters)), "waiters");
        case.reference = reference(&options.wake);
        case
    });
    let simulated = options.waiters.iter().flat_map(|n| simulated::cases(options, *n));
    Ok(Bench {
        workload: "log-space",
        about: format!(
            "Operations take {TAKES} blocks of log, compute, and give all but {USES} back; a \
             thread moves the tail."
        ),
        metrics: METRICS.into(),
        options: vec![
            ("log blocks", options.log_blocks().to_string()),
            ("turn", format!("{:?}", options.time)),
        ],
        cases: cases.chain(simulated).collect(),
    })
}

fn reference(wakes: &[Wake]) -> usize {
    wakes.iter().position(|wake| *wake == Wake::All).unwrap_or_default()
}

/// What lies in the log, and the thread that moves the tail.
struct Tail {
    quarter: u64,
    used: AtomicU64,
    state: Mutex<TailState>,
    wake: Condvar,
}

#[derive(Default)]
struct TailState {
    due: bool,
    stop: bool,
}

impl Tail {
    fn lock(&self) -> std::sync::MutexGuard<'_, TailState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block is used; the operation that makes up the quarter wakes the thread.
    fn uses(&self) {
        if self.used.fetch_add(USES, Ordering::SeqCst) + USES == self.quarter {
            self.lock().due = true;
            self.wake.notify_one();
        }
    }

    fn stop(&self) {
        self.lock().stop = true;
        self.wake.notify_one();
    }

    fn run(&self, space: &Space) {
        loop {
            let mut state = self.lock();
            while !state.due && !state.stop {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.stop {
                return;
            }
            state.due = false;
            drop(state);
            space.release(self.used.swap(0, Ordering::SeqCst));
        }
    }
}

/// What a thread counted.
#[derive(Clone, Copy, Default)]
struct Counted {
    operations: u64,
    longest_wait: Duration,
    switches: u64,
    ended: Duration,
}

fn turn(options: &Options, wake: Wake, waiters: u32) -> Result<Sample, BenchError> {
    let crowd = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let space = Space::new(options.log_blocks(), 0, crowd).with(wake);
    let tail = Tail {
        quarter: options.log_blocks() / 4,
        used: AtomicU64::new(0),
        state: Mutex::default(),
        wake: Condvar::new(),
    };
    let (cpu, from) = (own_cpu_time(), now());
    let running = AtomicU64::new(waiters.into());
    let counted = threads(waiters + 1, |number| -> Result<Counted, BenchError> {
        if number == 0 {
            tail.run(&space);
            return Ok(Counted::default());
        }
        let counted = operate(&space, &tail, options.time);
        if running.fetch_sub(1, Ordering::SeqCst) == 1 {
            tail.stop();
        }
        counted
    })?;
    let cpu = own_cpu_time().saturating_sub(cpu);
    let sum = |of: fn(&Counted) -> u64| counted.iter().map(of).sum::<u64>() as f64;
    let operations = sum(|thread| thread.operations);
    let most = |of: fn(&Counted) -> Duration| counted.iter().map(of).max().unwrap_or_default();
    let stats = space.stats();
    let mut sample = Sample::from([
        ("ops_per_s", operations / (most(|thread| thread.ended) - from).as_secs_f64()),
        ("cpu_us_per_op", cpu.as_secs_f64() * 1e6 / operations),
        ("switches_per_op", sum(|thread| thread.switches) / operations),
        ("longest_wait_ms", most(|thread| thread.longest_wait).as_secs_f64() * 1e3),
        ("waits_per_op", stats.waits as f64 / operations),
        ("barges_per_op", stats.barges as f64 / operations),
    ]);
    if stats.grants > 0 {
        sample.insert("wakes_per_grant", stats.wakes as f64 / stats.grants as f64);
    }
    Ok(sample)
}

fn operate(space: &Space, tail: &Tail, time: Duration) -> Result<Counted, BenchError> {
    let block = [0x5a_u8; BLOCK_SIZE];
    let (begin, switches) = (now(), switches()?);
    let mut counted = Counted { ended: begin, ..Counted::default() };
    while counted.ended - begin < time {
        let mut waits_since = None;
        let granted = space.take(TAKES, false, || waits_since = Some(now()));
        granted.expect("nobody stops this log, or says that it is full");
        if let Some(since) = waits_since {
            counted.longest_wait = counted.longest_wait.max(now() - since);
        }
        std::hint::black_box(crc32c::crc32c(std::hint::black_box(&block)));
        space.end(TAKES - USES);
        tail.uses();
        counted.operations += 1;
        counted.ended = now();
    }
    counted.switches = self::switches()? - switches;
    Ok(counted)
}

/// How often this thread was switched away from.
fn switches() -> Result<u64, BenchError> {
    let status = fs::read_to_string("/proc/thread-self/status")?;
    let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
    Ok(counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum())
}
