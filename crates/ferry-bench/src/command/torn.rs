//! `ferry bench torn`: looks for torn reads, and prints what it has seen.

use std::path::Path;

use ferry_bench::workload::torn;
use ferry_bench::{Target, VolumeOptions};
use ferry_fs::FsOptions;

use crate::args::TornArgs;
use crate::failed;
use ferry::command::shared::{CliError, print};

/// Runs on the given path, or in process.
pub fn run(args: &TornArgs) -> Result<(), CliError> {
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
    let plan = torn::Plan { most, ..args.plan };
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
