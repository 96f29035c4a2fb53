//! `ferry bench fserver`: many workers on a small log.

use ferry_bench::{VolumeOptions, fserver};
use ferry_fs::{FsOptions, LogOptions, Wake};

use crate::args::FserverArgs;
use crate::{show, targets};
use ferry::command::shared::{CliError, format_bytes};

/// The size of the volume of a turn in process, in bytes.
const CAPACITY: u64 = 1 << 30;
/// The size of its cache, in bytes.
const CACHE: usize = 64 << 20;

/// Runs on given paths, or in process with each way to drive the log.
pub fn run(args: &FserverArgs) -> Result<(), CliError> {
    let options = fserver::Options {
        workers: args.workers,
        fsync_each: args.fsync_each,
        time: args.time,
        rounds: args.run.rounds,
    };
    let fs = FsOptions { flush: args.policy, cache_bytes: CACHE, ..FsOptions::default() };
    let volume = VolumeOptions {
        device: args.model.device(),
        capacity: CAPACITY,
        log_size: Some(args.log_size),
        fs,
    };
    if !args.run.on.is_empty() {
        let targets = targets(&args.run, &volume)?;
        return show(fserver::on_targets(&options, &targets), &args.run, |_| Vec::new());
    }
    let wakes = if args.wake.is_empty() { &Wake::WAYS[..] } else { &args.wake };
    let logs: Vec<_> = wakes
        .iter()
        .flat_map(|wake| {
            args.log_buffers
                .iter()
                .map(|buffers| LogOptions { wake: *wake, buffers: usize::from(*buffers) })
        })
        .collect();
    let mut bench = fserver::in_process(&options, &volume, &logs);
    bench.options.push(("device", args.model.to_string()));
    bench.options.push(("log", format_bytes(args.log_size)));
    bench.options.push(("flush policy", args.policy.to_string()));
    show(bench, &args.run, |_| Vec::new())
}
