//! Runs a workload where its options say: on the given paths, on mounts that the command makes
//! itself, or in process.

use std::fs::File;
use std::io;

use ferry_bench::workload::{
    create, fserver, fsmark, log_space, overwrite, programs, randrw, transactions,
};
use ferry_bench::{Target, TurnTarget, VolumeOptions};
use ferry_fs::{FsOptions, LogOptions};

use crate::args::{
    CreateArgs, FserverArgs, FsmarkArgs, LogSpaceArgs, MountsArgs, OverwriteArgs, ProgramArgs,
    RandrwArgs, RunArgs, TransactionsArgs, UntarArgs,
};
use crate::mounts::Mounts;
use crate::{failed, paths, show};
use ferry::command::shared::{CliError, format_bytes};

/// The size of the volume of `fserver` in process, in bytes.
const FSERVER_CAPACITY: u64 = 1 << 30;
/// The size of its cache, in bytes.
const FSERVER_CACHE: usize = 64 << 20;

/// Threads make files without a pause.
pub fn create(args: &CreateArgs) -> Result<(), CliError> {
    if args.shell {
        // The mounts live until the run has ended.
        let mounts = on_mounts(&args.mounts, &args.run)?;
        let targets = mounts.targets(&args.run)?;
        return show(programs::by_shell(args.options.files, &targets), &args.run);
    }
    let volume = VolumeOptions {
        device: args.model.device(),
        log_size: Some(args.log_size),
        ..VolumeOptions::default()
    };
    let mounts = Mounts::new(&args.mounts)?;
    let targets = mounts.targets(&args.run)?;
    let in_process = targets.is_empty();
    let turn_targets = turn_targets(targets, volume);
    let mut bench = create::bench(&args.options, &turn_targets);
    if in_process {
        bench.options.push(("device", args.model.to_string()));
        bench.options.push(("log", format_bytes(args.log_size)));
    }
    show(bench, &args.run)
}

/// Workers on a small log; in process with each way to drive the log.
pub fn fserver(args: &FserverArgs) -> Result<(), CliError> {
    let targets = paths(&args.run)?;
    if !targets.is_empty() {
        return show(fserver::on_targets(&args.options, &targets), &args.run);
    }
    let fs = FsOptions { flush: args.policy, cache_bytes: FSERVER_CACHE, ..FsOptions::default() };
    let volume = VolumeOptions {
        device: args.model.device(),
        capacity: FSERVER_CAPACITY,
        log_size: Some(args.log_size),
        fs,
    };
    let with_buffers = |wake| {
        let buffers = args.log_buffers.iter();
        buffers.map(move |buffers| LogOptions { wake, buffers: usize::from(*buffers) })
    };
    let logs: Vec<_> = args.wake.iter().copied().flat_map(with_buffers).collect();
    let mut bench = fserver::in_process(&args.options, &volume, &logs);
    bench.options.push(("device", args.model.to_string()));
    bench.options.push(("log", format_bytes(args.log_size)));
    bench.options.push(("flush policy", args.policy.to_string()));
    show(bench, &args.run)
}

/// Many small files, made durable in several ways.
pub fn fsmark(args: &FsmarkArgs) -> Result<(), CliError> {
    let mut targets = paths(&args.run)?;
    let in_process = targets.is_empty();
    if in_process {
        // So that dirty files stay dirty until the pass.
        let commit_interval = std::time::Duration::from_secs(3600);
        let fs = FsOptions { commit_interval, ..FsOptions::default() };
        let volume = VolumeOptions { device: args.model.device(), fs, ..VolumeOptions::default() };
        targets.push(Target::in_process(&volume).map_err(failed)?);
    }
    let mut bench = fsmark::bench(&args.options, &targets);
    if in_process {
        bench.options.push(("device", args.model.to_string()));
    }
    show(bench, &args.run)
}

/// Random readers and writers on one file.
pub fn randrw(args: &RandrwArgs) -> Result<(), CliError> {
    let size = args.options.size;
    if args.options.block.iter().any(|block| *block == 0 || *block > size) {
        return Err(CliError::Usage(
            "--block must be at least 1 byte and no more than --size".into(),
        ));
    }
    let mut targets = paths(&args.run)?;
    let in_process = targets.is_empty();
    if in_process {
        // This measures locks, not the cleaner. So the whole file stays in memory, and what is
        // overwritten finds room on the device.
        let cache_bytes = usize::try_from(size).unwrap_or(usize::MAX).saturating_mul(2);
        for (name, fs) in rules(args, FsOptions { cache_bytes, ..FsOptions::default() }) {
            let capacity = size.saturating_mul(4).max(1 << 30);
            let device = args.model.device();
            let volume = VolumeOptions { device, capacity, fs, ..VolumeOptions::default() };
            targets.push(Target::in_process(&volume).map_err(failed)?.called(name));
        }
    }
    let mut bench = randrw::bench(&args.options, &targets);
    if in_process {
        bench.options.push(("device", args.model.to_string()));
    }
    show(bench, &args.run)
}

/// The rules of exclusion to compare, each with its name.
#[cfg(feature = "compare")]
fn rules(args: &RandrwArgs, fs: FsOptions) -> Vec<(String, FsOptions)> {
    let by = |lock| FsOptions { locking: lock, ..fs.clone() };
    args.lock.iter().map(|lock| (lock.to_string(), by(*lock))).collect()
}

/// The one rule that there is.
#[cfg(not(feature = "compare"))]
fn rules(_args: &RandrwArgs, fs: FsOptions) -> Vec<(String, FsOptions)> {
    vec![("range".into(), fs)]
}

/// A file overwritten at random on a volume that it fills for the most part.
pub fn overwrite(args: &OverwriteArgs) -> Result<(), CliError> {
    let cache_bytes = usize::try_from(args.cache_size).unwrap_or(usize::MAX);
    let fs = FsOptions { cache_bytes, ..FsOptions::default() };
    let (device, capacity) = (args.model.device(), args.capacity);
    let volume = VolumeOptions { device, capacity, fs, ..VolumeOptions::default() };
    let targets = paths(&args.run)?;
    let in_process = targets.is_empty();
    let turn_targets = turn_targets(targets, volume);
    let mut bench = overwrite::bench(&args.options, &turn_targets);
    if in_process {
        bench.options.push(("device", args.model.to_string()));
        bench.options.push(("volume", args.capacity.to_string()));
        bench.options.push(("cache", args.cache_size.to_string()));
    }
    show(bench, &args.run)
}

/// Those who wait for log space alone, in process, each turn on a new log.
pub fn log_space(args: &LogSpaceArgs) -> Result<(), CliError> {
    if !args.run.on.is_empty() {
        return Err(CliError::Usage(
            "log space is the journal's alone: there is nothing to run --on a path".into(),
        ));
    }
    show(log_space::bench(&args.options).map_err(failed)?, &args.run)
}

/// The journal alone, in process, each turn on a new one.
pub fn transactions(args: &TransactionsArgs) -> Result<(), CliError> {
    if !args.run.on.is_empty() {
        return Err(CliError::Usage(
            "transactions are the journal's alone: there is nothing to run --on a path".into(),
        ));
    }
    let mut bench = transactions::bench(&args.options, &args.model.device());
    bench.options.push(("device", args.model.to_string()));
    bench.options.push(("log", format_bytes(args.options.log_size)));
    show(bench, &args.run)
}

/// Times tar and rm.
pub fn untar(args: &UntarArgs) -> Result<(), CliError> {
    let mounts = on_mounts(&args.mounts, &args.run)?;
    let unreadable = || CliError::path(&args.tar, "cannot read");
    let tar = args.tar.canonicalize().map_err(unreadable())?;
    let mut file = File::open(&tar).map_err(unreadable())?;
    io::copy(&mut file, &mut io::sink()).map_err(unreadable())?;
    let targets = mounts.targets(&args.run)?;
    show(programs::untar(&tar, &targets), &args.run)
}

/// Times any command.
pub fn program(args: &ProgramArgs) -> Result<(), CliError> {
    let mounts = on_mounts(&args.mounts, &args.run)?;
    let targets = mounts.targets(&args.run)?;
    show(programs::by_command(&args.command, &targets), &args.run)
}

/// Makes the mounts. A program knows nothing else than mounts, so there must be one.
fn on_mounts(mounts: &MountsArgs, run: &RunArgs) -> Result<Mounts, CliError> {
    if run.on.is_empty() && mounts.rtt.is_empty() {
        return Err(CliError::Usage("say where to run it: --on PATH, or --rtt TIME".into()));
    }
    Mounts::new(mounts)
}

/// These targets; without any, a new volume in each turn.
fn turn_targets(targets: Vec<Target>, volume: VolumeOptions) -> Vec<TurnTarget> {
    if targets.is_empty() {
        return vec![TurnTarget::NewVolume(volume)];
    }
    targets.into_iter().map(TurnTarget::On).collect()
}
