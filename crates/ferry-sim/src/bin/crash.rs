//! Crash simulation for as long as one wants: `crash [--seconds N] [--seed S] [--runs N] [--one] [--all]`.
//!
//! Runs follow from the seeds S, S + 1, …, on all cores; a failure is shrunk, printed with its seed, and ends the program with
//! status 1. `--one` runs the one seed only, `--all` goes on after a failure.

use ferry_device::Env;
use ferry_sim::campaign::{Limits, run};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "usage: crash [--seconds N] [--runs N] [--seed S] [--one] [--all]";

/// The limits, and the first seed.
fn parse(mut words: impl Iterator<Item = String>, default_seed: u64) -> Option<(Limits, u64)> {
    let mut limits = Limits { time: Some(Duration::from_secs(60)), runs: u64::MAX, first_failure: true };
    let mut seed = default_seed;
    while let Some(word) = words.next() {
        match &*word {
            "--seconds" => limits.time = Some(Duration::from_secs(words.next()?.parse().ok()?)),
            "--runs" => limits = Limits { time: None, runs: words.next()?.parse().ok()?, ..limits },
            "--seed" => seed = words.next()?.parse().ok()?,
            "--one" => limits = Limits { time: None, runs: 1, ..limits },
            "--all" => limits.first_failure = false,
            _ => return None,
        }
    }
    Some((limits, seed))
}

fn main() -> ExitCode {
    let env = Env::real();
    let Some((limits, seed)) = parse(std::env::args().skip(1), env.entropy.next_u64() >> 16) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    println!("crash simulation from seed {seed}");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    match run(seed, limits, threads, &env) {
        Ok(tally) => {
            println!("{tally:?}");
            ExitCode::SUCCESS
        }
        Err(report) => {
            eprintln!("{report}\n\nto repeat: crash --one --seed and its number");
            ExitCode::FAILURE
        }
    }
}
