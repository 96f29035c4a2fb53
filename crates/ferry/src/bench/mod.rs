//! `ferry bench`: reads what is asked for, runs a workload of `ferry-bench` with a progress bar, shows its report.
//!
//! A workload has its arguments in `args`, with [`RunArgs`] among them, and a function here that ends in [`show`].

mod args;
mod create;
mod fserver;
mod happy;
mod mounts;
mod onefile;
mod program;
mod transactions;
mod untar;

pub use args::{BenchCommand, NullArgs};

use std::fs;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_bench::fsmark;
use ferry_bench::{Bench, BenchError, Place, Report, VolumeOptions};
use ferry_fs::FsOptions;
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::control::print;
use crate::error::CliError;
use crate::holder::Holder;
use crate::mounts::list as mount_list;
use args::{FsmarkArgs, RunArgs};

/// Runs every benchmark but the null file system, which is a mount.
pub fn run(command: &BenchCommand) -> Result<(), CliError> {
    match command {
        BenchCommand::Null(_) => Ok(()),
        BenchCommand::FsyncHappy(args) => happy::run(args),
        BenchCommand::Fsmark(args) => fsmark(args),
        BenchCommand::Create(args) => create::run(args),
        BenchCommand::Randrw(args) => onefile::randrw(args),
        BenchCommand::Torn(args) => onefile::torn(args),
        BenchCommand::Overwrite(args) => onefile::overwrite(args),
        BenchCommand::Fserver(args) => fserver::run(args),
        BenchCommand::Untar(args) => untar::run(args),
        BenchCommand::Program(args) => program::run(args),
        BenchCommand::Transactions(args) => transactions::run(args),
    }
}

fn fsmark(args: &FsmarkArgs) -> Result<(), CliError> {
    let modes = if args.sync.is_empty() { fsmark::SyncMode::ALL.into() } else { args.sync.clone() };
    let options = fsmark::Options {
        files: args.files,
        size: usize::try_from(args.size).unwrap_or(usize::MAX),
        threads: args.threads,
        modes,
        rounds: args.run.rounds,
    };
    // So that what is dirty stays so until the pass.
    let fs = FsOptions { commit_interval: std::time::Duration::from_secs(3600), ..FsOptions::default() };
    let volume = VolumeOptions { device: args.model.device(), fs, ..VolumeOptions::default() };
    let places = places(&args.run, &volume)?;
    let mut bench = fsmark::bench(&options, &places);
    if args.run.on.is_empty() {
        bench.options.push(("device", args.model.to_string()));
    }
    show(bench, &args.run, |_| Vec::new())
}

/// The paths that were named; without any, a volume in memory.
fn places(run: &RunArgs, volume: &VolumeOptions) -> Result<Vec<Place>, CliError> {
    crate::sync::raise_open_files();
    if run.on.is_empty() {
        return Ok(vec![Place::in_process(volume).map_err(failed)?]);
    }
    named(run)
}

/// The paths that were named.
fn named(run: &RunArgs) -> Result<Vec<Place>, CliError> {
    run.on.iter().map(|path| Place::on(path, daemon(path)).map_err(failed)).collect()
}

/// The process behind a FerryFS mount.
fn daemon(path: &Path) -> Option<u32> {
    let path = path.canonicalize().ok()?;
    let below = mount_list().ok()?.into_iter().filter(|mount| path.starts_with(&mount.target));
    // Of mounts at one place the last one counts.
    let mount = below.max_by_key(|mount| mount.target.as_os_str().len())?;
    if mount.is_ferry() { Holder::of(&mount.source).map(|holder| holder.pid) } else { None }
}

/// Runs the bench and shows what it came to; `notes` has the last word.
fn show(bench: Bench<'_>, run: &RunArgs, notes: impl Fn(&Report) -> Vec<String>) -> Result<(), CliError> {
    // Not after an hour.
    for path in run.json.iter().filter(|_| !json_on_stdout(run)).chain(&run.html) {
        fs::File::create(path).map_err(CliError::path(path, "cannot write the report"))?;
    }
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} turns  {msg}  {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let interrupted =
        on_interrupt().map_err(|e| CliError::Failed(format!("cannot wait for signals: {e}")))?;
    let report = bench.run(|at| {
        at.stop.set(interrupted.load(Ordering::Relaxed));
        bar.set_length(at.all);
        bar.set_position(at.done);
        bar.set_message(at.now.clone());
    });
    bar.finish_and_clear();
    let mut report = report.map_err(failed)?;
    report.notes.extend(notes(&report));
    if let Some(path) = &run.html {
        fs::write(path, report.to_html()).map_err(CliError::path(path, "cannot write the report"))?;
    }
    write_json(&report.to_json(), run)?;
    // Only one of them can have stdout.
    if json_on_stdout(run) { Ok(()) } else { print(&report.to_table()) }
}

/// What a first SIGINT or SIGTERM sets: the run ends after its turn, and what it has made is removed. A second one ends it at once.
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
        Some(path) => fs::write(path, text).map_err(CliError::path(path, "cannot write the report")),
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
