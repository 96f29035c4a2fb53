//! Errors of the device at each request of a workload in turn: `faults [--seed S] [--workloads N]
//! [--most N]`.
//!
//! Workloads follow from the seeds S, S + 1, …. `--most` limits the requests of each kind that are
//! made to fail, evenly spread; without it, all are. Everything that fails is printed, and the
//! status is 1.

use clap::Parser;
use ferry_sim::faults::campaign;
use std::process::ExitCode;

#[derive(Parser)]
struct Options {
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value_t = 16)]
    workloads: u64,
    #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
    most: u64,
}

fn main() -> ExitCode {
    let Options { seed, workloads, most } = Options::parse();
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
