//! The benchmarks' command, which `ferry bench` runs: reads its options, runs a workload of this
//! crate's library with a progress bar, and shows its report.
//!
//! A workload has its arguments in `args`, with [`RunArgs`] among them, and a function here that
//! ends in [`show`].

mod args;
mod happy;
#[path = "../../../ferry/src/memory.rs"]
mod memory;
mod mounts;
mod null;
mod torn;
mod workloads;

use std::collections::HashSet;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use ferry::command::shared::{self, CliError, Holder, Mount, mount_list, print};
use ferry_bench::{Bench, BenchError, Report, Target};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};

use args::{Benchmark, Cli, RunArgs};

fn main() -> ExitCode {
    let cli = Cli::parse();
    shared::exit(run(&cli.benchmark, cli.log_level.as_deref()).map(|()| ExitCode::SUCCESS))
}

fn run(benchmark: &Benchmark, level: Option<&str>) -> Result<(), CliError> {
    // A mount starts its own log.
    if !matches!(benchmark, Benchmark::Null(_)) {
        shared::start_log(level, "warn", false).map_err(CliError::Usage)?;
    }
    match benchmark {
        Benchmark::Null(args) => null::run(args, level),
        Benchmark::FsyncHappy(args) => happy::run(args),
        Benchmark::Fsmark(args) => workloads::fsmark(args),
        Benchmark::Create(args) => workloads::create(args),
        Benchmark::Randrw(args) => workloads::randrw(args),
        Benchmark::Torn(args) => torn::run(args),
        Benchmark::Overwrite(args) => workloads::overwrite(args),
        Benchmark::Fserver(args) => workloads::fserver(args),
        Benchmark::Untar(args) => workloads::untar(args),
        Benchmark::Program(args) => workloads::program(args),
        Benchmark::LogSpace(args) => workloads::log_space(args),
        Benchmark::Transactions(args) => workloads::transactions(args),
    }
}

/// The given paths, if there are any.
fn paths(run: &RunArgs) -> Result<Vec<Target>, CliError> {
    shared::raise_open_files();
    let target =
        |path: &PathBuf, name| Ok(Target::on(path, daemon(path)).map_err(failed)?.called(name));
    run.on.iter().zip(short_names(&run.on)).map(|(path, name)| target(path, name)).collect()
}

/// Short names of paths for plots: as many of their last components as distinguish them.
fn short_names(paths: &[PathBuf]) -> Vec<String> {
    let depth = paths.iter().map(|path| path.components().count()).max().unwrap_or(1);
    let ends = |count: usize| -> Vec<String> {
        let end = |path: &PathBuf| {
            let skipped = path.components().count().saturating_sub(count);
            path.components().skip(skipped).collect::<PathBuf>().display().to_string()
        };
        paths.iter().map(end).collect()
    };
    let differ = |names: &Vec<String>| names.iter().collect::<HashSet<_>>().len() == names.len();
    (1..depth).map(ends).find(differ).unwrap_or_else(|| ends(depth))
}

/// The mount that a path is on.
fn mount_of(path: &Path) -> Option<Mount> {
    let path = path.canonicalize().ok()?;
    let below = mount_list().ok()?.into_iter().filter(|mount| path.starts_with(&mount.target));
    // Of several mounts at one mount point the last one is visible.
    below.max_by_key(|mount| mount.target.as_os_str().len())
}

/// The process behind a FerryFS mount.
fn daemon(path: &Path) -> Option<u32> {
    let mount = mount_of(path)?;
    if mount.is_ferry() { Holder::of(&mount.volume()).map(|holder| holder.pid) } else { None }
}

/// Runs the bench and shows its report.
fn show(bench: Bench<'_>, run: &RunArgs) -> Result<(), CliError> {
    show_with(bench, run, |_| Vec::new())
}

/// The same; `notes` adds notes to the report.
fn show_with(
    bench: Bench<'_>,
    run: &RunArgs,
    notes: impl Fn(&Report) -> Vec<String>,
) -> Result<(), CliError> {
    // Before the run, which may take an hour.
    for path in run.json.iter().filter(|_| !json_on_stdout(run)).chain(&run.html) {
        fs::File::create(path).map_err(CliError::path(path, "cannot write the report"))?;
    }
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} turns  {msg}  {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let interrupted =
        on_interrupt().map_err(|e| CliError::Failed(format!("cannot wait for signals: {e}")))?;
    let report = bench.run(run.rounds, |at| {
        at.stop.set(interrupted.load(Ordering::Relaxed));
        bar.set_length(at.all);
        bar.set_position(at.done);
        bar.set_message(at.now.clone());
    });
    bar.finish_and_clear();
    let mut report = report.map_err(failed)?;
    report.notes.extend(notes(&report));
    if let Some(path) = &run.html {
        fs::write(path, report.to_html())
            .map_err(CliError::path(path, "cannot write the report"))?;
    }
    write_json(&report.to_json(), run)?;
    // Only one of them can go to stdout.
    if json_on_stdout(run) { Ok(()) } else { print(&report.to_table()) }
}

/// A flag that the first SIGINT or SIGTERM sets: the run ends after its turn, and removes its
/// files. A second signal ends it at once.
fn on_interrupt() -> std::io::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 1, interrupted.clone())?;
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    Ok(interrupted)
}

fn json_on_stdout(run: &RunArgs) -> bool {
    run.json.as_ref().is_some_and(|path| path.as_os_str() == "-")
}

fn write_json(json: &serde_json::Value, run: &RunArgs) -> Result<(), CliError> {
    let text = format!("{json:#}\n");
    match &run.json {
        Some(_) if json_on_stdout(run) => print(&text),
        Some(path) => {
            fs::write(path, text).map_err(CliError::path(path, "cannot write the report"))
        }
        None => Ok(()),
    }
}

fn failed(error: BenchError) -> CliError {
    match error {
        BenchError::Interrupted => CliError::Failed(error.to_string()),
        BenchError::Option(text) => CliError::Usage(text),
        other => CliError::Failed(format!("cannot run the bench: {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_distinguish_paths() {
        let names =
            |paths: &[&str]| short_names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(names(&["/mnt/a", "/mnt/b"]), ["a", "b"]);
        assert_eq!(names(&["/a/mnt", "/b/mnt"]), ["a/mnt", "b/mnt"]);
        assert_eq!(names(&["/long/way/mnt"]), ["mnt"]);
        assert_eq!(names(&["/a/mnt", "/a/mnt"]), ["/a/mnt", "/a/mnt"]);
    }
}
