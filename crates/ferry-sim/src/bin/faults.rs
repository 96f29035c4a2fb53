//! Errors of the device at each request of a workload in turn: `faults [--seed S] [--workloads N]
//! [--most N]`.
//!
//! Workloads follow from the seeds S, S + 1, …. `--most` limits the requests of each kind that are
//! made to fail, evenly spread; without it, all are. Everything that fails is printed, and the
//! status is 1.

use ferry_sim::faults::campaign;
use std::process::ExitCode;

const USAGE: &str = "usage: faults [--seed S] [--workloads N] [--most N]";

/// Seed, number of workloads, and limit of requests.
fn parse(words: &[String]) -> Option<(u64, u64, u64)> {
    let (mut seed, mut workloads, mut most) = (0, 16, u64::MAX);
    for pair in words.chunks(2) {
        let [name, value] = pair else { return None };
        let value = value.parse().ok()?;
        match &**name {
            "--seed" => seed = value,
            "--workloads" => workloads = value,
            "--most" => most = value,
            _ => return None,
        }
    }
    Some((seed, workloads, most))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some((seed, workloads, most)) = parse(&words) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for seed in seed..seed + workloads {
        match campaign(seed, 1, most, threads) {
            Ok(tally) => println!("seed {seed}: {tally:?}"),
            Err(what) => {
                eprintln!("{what}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
