//! Crash simulation for as long as one wants, on all cores. A failure is shrunk, printed with its
//! number, and ends the program with status 1.
//!
//! `random` runs the sequences of the seeds S, S + 1, …; `fifty` those of fifty operations;
//! `overlapping` those in which many fsyncs are under way together, with each flush policy in turn;
//! `wrapping` the same on a log of 4 MiB with long records; `churning` those in which the cleaner
//! works all the time; `enumerate` every sequence of so many operations, from number N on. `--one`
//! runs one number only, `--all` goes on after a failure.
//! `--lie` shows that it can fail: the device says that it has flushed, and has not.

use clap::{Parser, ValueEnum};
use ferry_env::Env;
use ferry_fs::FlushPolicy;
use ferry_sim::campaign::{Limits, run};
use ferry_sim::crash::Plan;
use ferry_sim::enumerate::Enumeration;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Progress is told so often.
const PROGRESS: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Mode {
    Random,
    Fifty,
    Overlapping,
    Wrapping,
    Churning,
    Enumerate,
}

#[derive(Parser)]
struct Args {
    #[arg(value_enum, default_value = "random")]
    mode: Mode,
    /// The first seed or number
    #[arg(long)]
    from: Option<u64>,
    /// Operations of an enumerated sequence
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=5))]
    length: u32,
    #[arg(long)]
    seconds: Option<u64>,
    #[arg(long)]
    count: Option<u64>,
    #[arg(long, conflicts_with = "count")]
    one: bool,
    #[arg(long)]
    all: bool,
    #[arg(long)]
    lie: bool,
}

impl Args {
    fn limits(&self) -> Limits {
        let runs = if self.one { Some(1) } else { self.count };
        let endless = runs.is_none() && self.mode != Mode::Enumerate;
        let seconds = self.seconds.or(endless.then_some(60));
        let time = seconds.map(Duration::from_secs);
        Limits { time, runs, all: self.all, progress: Some(PROGRESS) }
    }
}

fn simulate(args: &Args, env: &Env) -> Result<String, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut limits = args.limits();
    let on_device = |plan| Plan { flush_lies: args.lie, ..plan };
    let done = match args.mode {
        Mode::Random | Mode::Fifty | Mode::Overlapping | Mode::Wrapping | Mode::Churning => {
            let seed = args.from.unwrap_or_else(|| env.entropy.next_u64() >> 16);
            println!("random sequences from seed {seed}");
            let draw = match args.mode {
                Mode::Fifty => Plan::fifty,
                Mode::Churning => Plan::churning,
                Mode::Overlapping => {
                    |seed| Plan::under_way(seed, FlushPolicy::ALL[(seed % 4) as usize])
                }
                Mode::Wrapping => {
                    |seed| Plan::wrapping(seed, FlushPolicy::ALL[(seed % 4) as usize])
                }
                _ => Plan::draw,
            };
            run(&|seed| Some(on_device(draw(seed))), seed, limits, threads, env)
        }
        Mode::Enumerate => {
            let all = Enumeration::new(args.length).map_err(|failure| failure.to_string())?;
            let from = args.from.unwrap_or(0);
            let left = all.count().saturating_sub(from);
            println!("sequences of {} operations: {} in all", args.length, all.count());
            limits.runs = Some(limits.runs.map_or(left, |runs| runs.min(left)));
            run(&|number| all.plan(number).map(on_device), from, limits, threads, env)
        }
    };
    done.map(|done| format!("{done}\n{:?}", done.tally))
}

/// Each run takes and frees many large buffers. Where the allocator returns each to the kernel,
/// three quarters of the time go to page faults; it reads its settings when the program starts.
const ALLOCATOR: [(&str, &str); 2] =
    [("MALLOC_MMAP_THRESHOLD_", "1073741824"), ("MALLOC_TRIM_THRESHOLD_", "2147483648")];

/// Starts this program again with the allocator's settings, unless it has some.
fn keep_memory() {
    let set = ALLOCATOR.iter().any(|(name, _)| std::env::var_os(name).is_some());
    if let Some(program) = std::env::current_exe().ok().filter(|_| !set) {
        let error = Command::new(program).args(std::env::args_os().skip(1)).envs(ALLOCATOR).exec();
        eprintln!("slower than need be: {error}");
    }
}

fn main() -> ExitCode {
    keep_memory();
    match simulate(&Args::parse(), &Env::real()) {
        Ok(told) => {
            println!("{told}");
            ExitCode::SUCCESS
        }
        Err(report) => {
            eprintln!("{report}\n\nto repeat: the same mode with --from and the number, and --one");
            ExitCode::FAILURE
        }
    }
}
