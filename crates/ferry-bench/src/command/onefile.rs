//! `ferry bench randrw`, `ferry bench torn` and `ferry bench overwrite`: one file.

use std::path::Path;

use ferry_bench::{Target, VolumeOptions, overwrite, randrw, torn};
use ferry_fs::FsOptions;

use crate::args::{OverwriteArgs, RandrwArgs, TornArgs};
use crate::{failed, show, targets};
use ferry::command::shared::{CliError, print};

/// Random readers and writers.
pub fn randrw(args: &RandrwArgs) -> Result<(), CliError> {
    let options = randrw::Options {
        readers: args.readers,
        writers: args.writers,
        blocks: args
            .block
            .iter()
            .map(|block| usize::try_from(*block).unwrap_or(usize::MAX))
            .collect(),
        size: args.size,
        time: args.time,
        rounds: args.run.rounds,
    };
    if args.block.iter().any(|block| *block == 0 || *block > args.size) {
        return Err(CliError::Usage(
            "--block must be at least 1 byte and no more than --size".into(),
        ));
    }
    let mut at = Vec::new();
    if args.run.on.is_empty() {
        // This measures locks, not the cleaner. So the whole file stays in memory, and what is
        // overwritten finds room on the device.
        let cache_bytes = usize::try_from(args.size).unwrap_or(usize::MAX).saturating_mul(2);
        for (name, fs) in rules(args, FsOptions { cache_bytes, ..FsOptions::default() }) {
            let capacity = args.size.saturating_mul(4).max(1 << 30);
            let volume = VolumeOptions {
                device: args.model.device(),
                capacity,
                fs,
                ..VolumeOptions::default()
            };
            at.push((name, Target::in_process(&volume).map_err(failed)?));
        }
    } else {
        let targets = targets(&args.run, &VolumeOptions::default())?;
        at.extend(targets.into_iter().map(|target| (target.name().to_owned(), target)));
    }
    let mut bench = randrw::bench(&options, &at);
    if args.run.on.is_empty() {
        bench.options.push(("device", args.model.to_string()));
    }
    show(bench, &args.run, |_| Vec::new())
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
    let options = overwrite::Options {
        full: args.full.clone(),
        file: args.file,
        times: args.times,
        threads: args.threads,
        rounds: args.run.rounds,
    };
    let cache_bytes = usize::try_from(args.cache_size).unwrap_or(usize::MAX);
    let fs = FsOptions { cache_bytes, ..FsOptions::default() };
    let volume = VolumeOptions {
        device: args.model.device(),
        capacity: args.capacity,
        fs,
        ..VolumeOptions::default()
    };
    if args.run.on.is_empty() {
        let mut bench = overwrite::in_process(&options, &volume);
        bench.options.push(("device", args.model.to_string()));
        bench.options.push(("volume", args.capacity.to_string()));
        bench.options.push(("cache", args.cache_size.to_string()));
        return show(bench, &args.run, |_| Vec::new());
    }
    let targets = targets(&args.run, &volume)?;
    show(overwrite::on_targets(&options, &targets), &args.run, |_| Vec::new())
}

/// Looks for torn reads.
pub fn torn(args: &TornArgs) -> Result<(), CliError> {
    let target = match &args.on {
        Some(path) => Target::on(path, None),
        None => {
            let cache_bytes = usize::try_from(args.cache_size).unwrap_or(usize::MAX);
            let fs = FsOptions { cache_bytes, ..FsOptions::default() };
            Target::in_process(&VolumeOptions { fs, capacity: 1 << 30, ..VolumeOptions::default() })
        }
    };
    let target = target.map_err(failed)?;
    let most = if args.on.is_some() { torn::MOST_ON_PATH } else { torn::MOST };
    let plan = torn::Plan {
        threads: args.threads,
        reads: args.reads,
        time: args.time,
        most,
        seed: args.seed,
    };
    let io = |error| failed(ferry_bench::BenchError::Io(error));
    let seen = torn::run(&target.root().create("torn").map_err(io)?, plan).map_err(io)?;
    target.root().unlink("torn").map_err(io)?;
    print(&format!(
        "{}: {} blocks read and {} written, {} holes and cuts: {} torn, {} stale\n",
        target.name(),
        seen.reads,
        seen.writes,
        seen.cuts,
        seen.torn,
        seen.stale
    ))?;
    match seen.first {
        Some(first) => {
            let why = args.on.as_deref().and_then(hint_for_torn_reads).unwrap_or_default();
            Err(CliError::Failed(format!("the first of them: {first}{why}")))
        }
        None => Ok(()),
    }
}

/// Why torn reads are allowed at this path; `None` if FerryFS guarantees that there are none.
fn hint_for_torn_reads(path: &Path) -> Option<String> {
    let mount = crate::mount_of(path)?;
    if !mount.is_ferry() {
        return Some(
            "\n(this is not a FerryFS mount: its file system may allow torn reads)".into(),
        );
    }
    let words = ferry::command::shared::listed_options(&mount.target);
    let mode =
        words.split(',').find(|word| word.starts_with("cache=") && *word != "cache=strict")?;
    Some(format!("\n(this mount has {mode}, which allows torn reads: mount with cache=strict)"))
}
