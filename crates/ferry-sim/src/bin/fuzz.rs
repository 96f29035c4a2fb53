//! Damaged volumes for as long as one wants: `fuzz [--seconds N] [--seed S] [--count N] [--one
//! SEED] [--all] [--home]`.
//!
//! Seeds S, S + 1, … on all cores, each core a process, so that an abort, an endless loop or too
//! much memory is seen for what it is. A failure is printed with its seed and ends the program with
//! status 1; with `--all` it goes on. `--one` runs one seed. `--home` damages the home store, too,
//! and mounts with threads, now and then.

use clap::Parser;
use ferry_env::Env;
use ferry_sim::fuzz::{self, bases::Bases};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Processor time of one step; one that takes longer hangs: the longest takes a few seconds.
const STEP_TIME_MAX: Duration = Duration::from_secs(60);
/// A step that waits takes no processor time. On a busy machine it may take long none the less.
const STEP_WALL_MAX: Duration = Duration::from_secs(1200);
/// How often a step is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Address space of a process that runs seeds, in bytes.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Memory that a seed may take, in KiB: the volumes themselves, and what a mount of 16 MiB may
/// need.
const MEMORY_KIB_MAX: u64 = 512 << 10;
/// Seeds that one process runs.
const SEEDS_EACH: u64 = 200;
/// How often progress is told.
const PROGRESS: Duration = Duration::from_secs(10);

#[derive(Parser)]
struct Options {
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
    count: u64,
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seed", "count"])]
    one: Option<u64>,
    #[arg(long)]
    all: bool,
    #[arg(long)]
    home: bool,
    /// For the program's own use: so many seeds from the first, in this process
    #[arg(long, hide = true, requires = "seed")]
    child: Option<u64>,
}

/// A panic of redb ends where it was called, as an error; any other is a bug.
fn abort_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        if !ferry_journal::panic_is_caught() {
            eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
            std::process::abort();
        }
    }));
}

/// Runs seeds here. Each step is told on stdout before it begins.
fn child(first: u64, count: u64, home: bool) -> ExitCode {
    let limit =
        rustix::process::Rlimit { current: Some(ADDRESS_SPACE), maximum: Some(ADDRESS_SPACE) };
    if let Err(error) = rustix::process::setrlimit(rustix::process::Resource::As, limit) {
        eprintln!("memory cannot be limited: {error}");
        return ExitCode::FAILURE;
    }
    abort_on_panic();
    let bases = match Bases::make(home) {
        Ok(bases) => bases,
        Err(what) => {
            eprintln!("no volumes to damage: {what}");
            return ExitCode::FAILURE;
        }
    };
    let tell = |line: &str| {
        let mut out = std::io::stdout().lock();
        // The parent process has ended: nobody wants to know.
        drop(writeln!(out, "{line}").and_then(|()| out.flush()));
    };
    for seed in first..first.saturating_add(count) {
        // A panic of redb that nobody made an error of ends the process, as any other does.
        let result = fuzz::run(&bases, seed, &mut |step| tell(&format!("{seed} {step}")));
        let peak = peak_memory_kib();
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(what) => {
                eprintln!("{what}");
                return ExitCode::FAILURE;
            }
        };
        if peak > MEMORY_KIB_MAX {
            eprintln!("{peak} KiB of memory");
            return ExitCode::FAILURE;
        }
        tell(&format!("{seed} done {peak} {outcome:?}"));
    }
    ExitCode::SUCCESS
}

/// The most memory that this process ever had.
fn peak_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

/// What was done.
#[derive(Default)]
struct Tally {
    volumes: u64,
    peak_kib: u64,
    /// What became of the volumes when they were repaired, and of how many.
    outcomes: BTreeMap<String, u64>,
    failed: Vec<u64>,
}

/// Seeds under way, on all cores.
struct Campaign {
    env: Env,
    options: Options,
    end: Option<Duration>,
    next: AtomicU64,
    last: u64,
    stop: AtomicBool,
    tally: Mutex<Tally>,
}

impl Campaign {
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().expect("nobody panics")
    }

    fn over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
            || self.end.is_some_and(|end| self.env.clock.monotonic() >= end)
    }

    /// One core's share.
    fn work(&self) {
        while !self.over() {
            let first = self.next.fetch_add(SEEDS_EACH, Ordering::Relaxed);
            let mut from = first;
            let to = (first + SEEDS_EACH).min(self.last);
            while from < to && !self.over() {
                let Some(failed) = self.process(from, to - from) else { break };
                self.tally().failed.push(failed);
                self.stop.fetch_or(!self.options.all, Ordering::Relaxed);
                from = failed + 1;
            }
            if to == self.last {
                return;
            }
        }
    }

    /// Runs seeds in a process of their own; the seed that failed, if one did.
    fn process(&self, first: u64, count: u64) -> Option<u64> {
        let myself = std::env::current_exe().expect("the program has a path");
        let mut command = Command::new(myself);
        command
            .args(["--seed", &first.to_string(), "--child", &count.to_string()])
            .stdout(Stdio::piped());
        command.args(self.options.home.then_some("--home"));
        let mut child = command.spawn().expect("a process can be started");
        let (tell, told) = mpsc::channel();
        let lines = BufReader::new(child.stdout.take().expect("it was asked for")).lines();
        let reader = std::thread::spawn(move || {
            lines.map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        let mut at = format!("{first} start");
        let mut begun = (self.env.clock.monotonic(), Duration::ZERO);
        let outcome = loop {
            match told.recv_timeout(LOOK) {
                Ok(line) => {
                    begun = (self.env.clock.monotonic(), processor_time(child.id()));
                    if let Some((peak, outcome)) =
                        line.split_once(" done ").and_then(|(_, told)| told.split_once(' '))
                    {
                        let mut tally = self.tally();
                        tally.volumes += 1;
                        tally.peak_kib = tally.peak_kib.max(peak.parse().unwrap_or(0));
                        *tally.outcomes.entry(outcome.into()).or_default() += 1;
                        drop(tally);
                        if self.over() {
                            break end(&mut child, None);
                        }
                    }
                    at = line;
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let wall = self.env.clock.monotonic().saturating_sub(begun.0);
                    let busy = processor_time(child.id()).saturating_sub(begun.1);
                    if wall > STEP_WALL_MAX || busy > STEP_TIME_MAX {
                        let why = format!(
                            "still not done after {wall:?}, {busy:?} of them on a processor"
                        );
                        break end(&mut child, Some(why));
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let status = child.wait().expect("it was started here");
                    break (!status.success()).then(|| status.to_string());
                }
            }
        };
        drop(told);
        drop(reader.join());
        let what = outcome?;
        let (seed, step) = at.split_once(' ').unwrap_or((&at, "start"));
        eprintln!("seed {seed} fails, step \"{step}\": {what}");
        seed.parse().ok()
    }
}

/// What a process and its threads have had of the processors.
fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything; behind it, user and system time are the 12th and
    // the 13th.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Ends a process before its time.
fn end(child: &mut Child, why: Option<String>) -> Option<String> {
    drop(child.kill());
    drop(child.wait());
    why
}

fn main() -> ExitCode {
    let (env, options) = (Env::real(), Options::parse());
    let seed = options.one.or(options.seed);
    let first = seed.unwrap_or_else(|| env.entropy.next_u64() >> 16);
    if let Some(count) = options.child {
        return child(first, count, options.home);
    }
    println!("damaged volumes from seed {first}");
    let count = if options.one.is_some() { 1 } else { options.count };
    let threads =
        if count == 1 { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
    let time = options.one.is_none().then(|| Duration::from_secs(options.seconds));
    let campaign = Campaign {
        end: time.map(|time| env.clock.monotonic() + time),
        next: AtomicU64::new(first),
        last: first.saturating_add(count),
        stop: AtomicBool::new(false),
        tally: Mutex::default(),
        options,
        env,
    };
    let progress = || {
        let Tally { volumes, peak_kib, outcomes, failed } = &*campaign.tally();
        println!(
            "{volumes} volumes, {} failures, at most {} MiB of memory; repair: {outcomes:?}",
            failed.len(),
            peak_kib >> 10,
        );
    };
    std::thread::scope(|scope| {
        let (ended, waiting) = mpsc::channel::<()>();
        for _ in 0..threads {
            let (campaign, ended) = (&campaign, ended.clone());
            scope.spawn(move || {
                campaign.work();
                drop(ended);
            });
        }
        drop(ended);
        while waiting.recv_timeout(PROGRESS) == Err(mpsc::RecvTimeoutError::Timeout) {
            progress();
        }
    });
    progress();
    let failed = &campaign.tally().failed;
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("seeds that failed: {failed:?}; to repeat: fuzz --one SEED");
    ExitCode::FAILURE
}
