//! Crash simulation for as long as one wants, on all cores. A failure is shrunk, printed with its
//! number, and ends the program with status 1.
//!
//! `random` runs the sequences of the seeds S, S + 1, …; `fifty` those of fifty operations; `overlap`
//! those in which many fsyncs are under way together, with each flush policy in turn; `wrapping`
//! the same on a log of 4 MiB with long records; `enumerate` every sequence of N operations, from
//! number N on. `--one` runs one number only, `--all` goes on after a failure. `--lie` shows that
//! it can fail: the device says that it has flushed, and has not.

use ferry_env::Env;
use ferry_fs::FlushPolicy;
use ferry_sim::campaign::{Limits, run};
use ferry_sim::crash::Plan;
use ferry_sim::enumerate::Enumeration;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

const USAGE: &str = "usage: crash [random|fifty|overlapping|wrapping] [--from SEED] [LIMITS]
       crash enumerate [--length N] [--from NUMBER] [LIMITS]
LIMITS: [--seconds N] [--count N] [--one] [--all] [--lie]";

/// Progress is told so often.
const PROGRESS: Duration = Duration::from_secs(10);

#[derive(Clone, Copy)]
enum Mode {
    Random,
    Fifty,
    Overlap,
    Wrapping,
    Enumerate,
}

struct Args {
    mode: Mode,
    limits: Limits,
    from: Option<u64>,
    length: u32,
    flush_lies: bool,
}

fn parse(words: impl Iterator<Item = String>) -> Option<Args> {
    let limits = Limits { progress: Some(PROGRESS), ..Limits::default() };
    let mut args = Args { mode: Mode::Random, limits, from: None, length: 2, flush_lies: false };
    let mut words = words.peekable();
    if let Some(mode) = words.next_if(|word| !word.starts_with('-')) {
        args.mode = match &*mode {
            "random" => Mode::Random,
            "fifty" => Mode::Fifty,
            "overlapping" => Mode::Overlap,
            "wrapping" => Mode::Wrapping,
            "enumerate" => Mode::Enumerate,
            _ => return None,
        };
    }
    while let Some(word) = words.next() {
        let mut number = || words.next()?.parse::<u64>().ok();
        match &*word {
            "--seconds" => args.limits.time = Some(Duration::from_secs(number()?)),
            "--count" => args.limits.runs = Some(number()?),
            "--from" => args.from = Some(number()?),
            "--length" => {
                args.length = u32::try_from(number()?).ok().filter(|n| (1..=5).contains(n))?
            }
            "--one" => args.limits.runs = Some(1),
            "--all" => args.limits.all = true,
            "--lie" => args.flush_lies = true,
            _ => return None,
        }
    }
    let endless = args.limits.time.is_none() && args.limits.runs.is_none();
    if endless && !matches!(args.mode, Mode::Enumerate) {
        args.limits.time = Some(Duration::from_secs(60));
    }
    Some(args)
}

fn simulate(args: &Args, env: &Env) -> Result<String, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut limits = args.limits;
    let on_device = |plan| Plan { flush_lies: args.flush_lies, ..plan };
    let done = match args.mode {
        Mode::Random | Mode::Fifty | Mode::Overlap | Mode::Wrapping => {
            let seed = args.from.unwrap_or_else(|| env.entropy.next_u64() >> 16);
            println!("random sequences from seed {seed}");
            let draw = match args.mode {
                Mode::Fifty => Plan::fifty,
                Mode::Overlap => {
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
    let Some(args) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match simulate(&args, &Env::real()) {
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
