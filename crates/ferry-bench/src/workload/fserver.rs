//! A file server: many workers, each with files of its own and some in a shared directory, on a
//! small log.
//!
//! The mix follows AIM7's file-server load: a job is 100 operations ([`MIX`]) in random order. As
//! many names are made as removed, so that the number of files stays about the same.

use crate::counters::Counters;
use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample, Variant};
use crate::stats::Histogram;
use crate::target::{Dir, Target, VolumeOptions};
use crate::threads::{now, threads};
use crate::workload::numbers::Numbers;
use ferry::command::shared::parse_time;
use ferry_env::Entropy;
use ferry_fs::LogOptions;
use ferry_journal::Wake;
use std::io;
use std::time::Duration;

/// An operation of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Makes a file of 1 to 8 KiB.
    Create,
    /// Opens a file and writes 4 KiB of its first 32.
    Write,
    /// Opens a file and reads 4 KiB.
    Read,
    /// Asks for a file's size.
    Stat,
    /// Moves a file to the shared directory, or back.
    Rename,
    /// Gives a file a second name.
    Link,
    /// Removes a name.
    Unlink,
    /// Opens a file and makes it durable.
    Fsync,
}

/// The operations of a job, and how often each occurs.
pub const MIX: [(Op, u32); 8] = [
    (Op::Create, 12),
    (Op::Write, 16),
    (Op::Read, 22),
    (Op::Stat, 24),
    (Op::Rename, 5),
    (Op::Link, 4),
    (Op::Unlink, 16),
    (Op::Fsync, 1),
];
/// The number of operations of a job.
const JOB: u32 = 100;
/// The number of names of each worker at the beginning; below half of it unlinks are skipped.
const NAMES: usize = 30;
/// The length of a write and of a read, in bytes.
const BLOCK: usize = 4096;
/// The number of chunks of a file that are written.
const BLOCKS: u64 = 8;

const METRICS: [Metric; 13] = [
    Metric { name: "jobs_per_min", label: "jobs/min", more_is_better: true },
    Metric { name: "op_p99_ms", label: "op p99 ms", more_is_better: false },
    Metric { name: "op_max_ms", label: "op max ms", more_is_better: false },
    Metric { name: "longest_wait_ms", label: "longest wait ms", more_is_better: false },
    Metric { name: "log_round_ms", label: "once round the log ms", more_is_better: false },
    Metric { name: "waits_per_job", label: "waits/job", more_is_better: false },
    Metric { name: "wakes_per_grant", label: "wakes/grant", more_is_better: false },
    Metric { name: "commits_per_s", label: "commits/s", more_is_better: true },
    Metric { name: "writes_per_transaction", label: "log writes/txn", more_is_better: false },
    Metric { name: "in_flight", label: "in flight", more_is_better: true },
    Metric { name: "checkpoints_per_s", label: "checkpoints/s", more_is_better: false },
    Metric {
        name: "log_writes_per_tail_move",
        label: "log writes/tail move",
        more_is_better: true,
    },
    Metric { name: "cpu_us_per_op", label: "CPU µs/op", more_is_better: false },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Workers
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: u32,
    /// Fsync every file that was made or written
    #[arg(long)]
    pub fsync_each: bool,
    /// How long a turn is
    #[arg(long, value_parser = parse_time, value_name = "TIME", default_value = "3s")]
    pub time: Duration,
}

impl Options {
    fn bench<'a>(&self, case: Case<'a>) -> Bench<'a> {
        let mix: Vec<String> =
            MIX.iter().map(|(op, n)| format!("{n} {op:?}").to_lowercase()).collect();
        Bench {
            workload: "fserver",
            about: format!("Workers do jobs of {JOB} operations each: {}.", mix.join(", ")),
            metrics: METRICS.into(),
            options: vec![
                ("workers", self.workers.to_string()),
                ("turn", format!("{:?}", self.time)),
                ("fsync each file", self.fsync_each.to_string()),
            ],
            cases: vec![case],
        }
    }
}

/// Runs on mounted file systems, in turn.
pub fn on_targets<'a>(options: &Options, targets: &'a [Target]) -> Bench<'a> {
    let variants = targets.iter().map(|target| {
        let options = options.clone();
        Variant::new(target.name(), move |round| turn(target, &options, round))
    });
    options.bench(Case::new("fserver", variants.collect()))
}

/// Runs in process, with a volume for each way to drive the log. The other ways to wake are
/// compared with `all`.
pub fn in_process(
    options: &Options,
    volume: &VolumeOptions,
    logs: &[LogOptions],
) -> Bench<'static> {
    let one = |field: fn(&LogOptions) -> String| {
        logs.windows(2).all(|two| field(&two[0]) == field(&two[1]))
    };
    let (one_wake, one_buffers) =
        (one(|log| log.wake.to_string()), one(|log| log.buffers.to_string()));
    let name = |log: &LogOptions| match (one_wake, one_buffers) {
        (_, true) => log.wake.to_string(),
        (true, false) => format!("{} buffers", log.buffers),
        (false, false) => format!("{}, {} buffers", log.wake, log.buffers),
    };
    let names: Vec<_> = logs.iter().map(name).collect();
    let (logs, volume, turns) = (logs.to_vec(), volume.clone(), options.clone());
    let reference = logs.iter().position(|log| log.wake == Wake::All).unwrap_or_default();
    options.bench(Case {
        name: "fserver".into(),
        group: String::new(),
        x: None,
        x_label: "",
        reference,
        variants: logs.len(),
        open: Box::new(move || {
            let variants = logs.iter().zip(names).map(|(log, name)| {
                let mut volume = volume.clone();
                volume.fs.log = *log;
                let (target, options) = (Target::in_process(&volume)?, turns.clone());
                Ok(Variant::new(name, move |round| turn(&target, &options, round)))
            });
            variants.collect()
        }),
    })
}

fn turn(target: &Target, options: &Options, round: u32) -> Result<Sample, BenchError> {
    let top = target.root().mkdir("turn")?;
    let shared = top.mkdir("shared")?;
    let own: Vec<Dir> = (0..options.workers)
        .map(|worker| top.mkdir(&worker.to_string()))
        .collect::<io::Result<_>>()?;
    let begin = |number: u32| {
        let seed = u64::from(round) << 32 | u64::from(number);
        let mut worker = Worker::new(number, [own[number as usize].clone(), shared.clone()], seed);
        (0..NAMES).try_for_each(|_| worker.step(Op::Create, false)).map(|()| worker)
    };
    let workers = threads(options.workers, begin)?;
    target.sync()?;

    let workers: Vec<_> =
        workers.into_iter().map(|worker| parking_lot::Mutex::new(Some(worker))).collect();
    let before = Counters::of(target)?;
    let from = now();
    let until = from + options.time;
    let run = |number: u32| {
        let worker = workers[number as usize].lock().take();
        worker.map_or_else(
            || Ok(Histogram::default()),
            |worker| worker.run(until, options.fsync_each),
        )
    };
    let times = threads(options.workers, run)?;
    let took = (now() - from).as_secs_f64();
    let after = Counters::of(target)?;
    let mut all = Histogram::default();
    times.iter().for_each(|times| all.merge(times));
    drop((own, shared, top));
    target.root().remove_tree("turn")?;
    target.sync()?;
    Ok(sample(&all, took, &before, &after))
}

fn sample(times: &Histogram, took: f64, before: &Counters, after: &Counters) -> Sample {
    let ops = times.count() as f64;
    let jobs = ops / f64::from(JOB);
    let mut sample = Sample::from([
        ("jobs_per_min", jobs / took * 60.0),
        ("op_p99_ms", times.quantile_ms(0.99)),
        ("op_max_ms", times.quantile_ms(1.0)),
        ("cpu_us_per_op", after.since(before).cpu_s * 1e6 / ops),
    ]);
    let grown = |counter: &str| after.grown(before, &format!("/log/{counter}"));
    let quotient_of = |of: Option<f64>, by: Option<f64>| Some(of? / by.filter(|by| *by > 0.0)?);
    let quotient = |of: &str, by: &str| quotient_of(grown(of), grown(by));
    let counted = [
        ("waits_per_job", grown("waits").map(|waits| waits / jobs)),
        ("wakes_per_grant", quotient("wakes", "grants")),
        ("commits_per_s", grown("contexts").map(|commits| commits / took)),
        ("writes_per_transaction", quotient("writes", "transactions")),
        ("in_flight", after.get("/log/in_flight_average")),
        ("longest_wait_ms", after.get("/log/times/waits/max_ns").map(|ns| ns / 1e6)),
        (
            "log_round_ms",
            quotient_of(after.get("/log/bytes"), grown("written_bytes"))
                .map(|log| log * took * 1e3),
        ),
        ("checkpoints_per_s", grown("checkpoints").map(|checkpoints| checkpoints / took)),
        ("log_writes_per_tail_move", quotient("writes", "tail_moves")),
    ];
    sample.extend(counted.into_iter().filter_map(|(name, value)| Some((name, value?))));
    sample
}

/// A name, and the worker's directory that has it.
struct Name {
    dir: usize,
    name: String,
}

struct Worker {
    number: u32,
    /// The worker's own directory, and the shared one.
    dirs: [Dir; 2],
    names: Vec<Name>,
    made: u64,
    numbers: Numbers,
    buffer: Vec<u8>,
}

impl Worker {
    fn new(number: u32, dirs: [Dir; 2], seed: u64) -> Self {
        let buffer = vec![number as u8; 2 * BLOCK];
        Self { number, dirs, names: Vec::new(), made: 0, numbers: Numbers::new(seed), buffer }
    }

    fn below(&self, n: usize) -> usize {
        (self.numbers.next_u64() % n.max(1) as u64) as usize
    }

    /// Runs jobs until the time is over; returns how long each operation took.
    fn run(mut self, until: Duration, fsync_each: bool) -> io::Result<Histogram> {
        let mut times = Histogram::default();
        let mut begun = now();
        loop {
            let mut job: Vec<Op> =
                MIX.iter().flat_map(|(op, n)| std::iter::repeat_n(*op, *n as usize)).collect();
            while !job.is_empty() {
                if begun >= until {
                    return Ok(times);
                }
                let op = job.swap_remove(self.below(job.len()));
                self.step(op, fsync_each)?;
                let ended = now();
                times.add(ended - begun);
                begun = ended;
            }
        }
    }

    fn step(&mut self, op: Op, fsync_each: bool) -> io::Result<()> {
        let any = self.below(self.names.len());
        let new = format!("{}.{}", self.number, self.made);
        match (op, self.names.get(any).map(|at| (&self.dirs[at.dir], &*at.name))) {
            (Op::Create, _) | (_, None) => {
                let file = self.dirs[0].create(&new)?;
                file.write_at(&self.buffer[..1024 * (1 + self.below(8))], 0)?;
                if fsync_each {
                    file.sync()?;
                }
                self.add(0, new);
            }
            (Op::Write, Some((dir, name))) => {
                let file = dir.open(name)?;
                let offset = self.numbers.next_u64() % BLOCKS * BLOCK as u64;
                file.write_at(&self.buffer[..BLOCK], offset)?;
                if fsync_each {
                    file.sync()?;
                }
            }
            (Op::Read, Some((dir, name))) => {
                let file = dir.open(name)?;
                file.read_at(&mut self.buffer[..BLOCK], 0)?;
            }
            (Op::Stat, Some((dir, name))) => drop(dir.stat(name)?),
            (Op::Rename, Some((dir, name))) => {
                let to = 1 - self.names[any].dir;
                dir.rename(name, &self.dirs[to], &new)?;
                self.names.swap_remove(any);
                self.add(to, new);
            }
            (Op::Link, Some((dir, name))) => {
                dir.link(name, &self.dirs[0], &new)?;
                self.add(0, new);
            }
            (Op::Unlink, Some((dir, name))) => {
                if self.names.len() > NAMES / 2 {
                    dir.unlink(name)?;
                    self.names.swap_remove(any);
                }
            }
            (Op::Fsync, Some((dir, name))) => dir.open(name)?.sync()?,
        }
        Ok(())
    }

    fn add(&mut self, dir: usize, name: String) {
        self.names.push(Name { dir, name });
        self.made += 1;
    }
}
