//! `ferry bench fsync-happy`: callers that overwrite and fsync.

use std::fmt::Write;
use std::time::Duration;

use ferry_bench::DeviceModel;
use ferry_bench::workload::fsync_happy::{Cell, real};
use ferry_journal::{FAST_FLUSH, FlushPolicy};
use serde_json::Value;

use crate::args::FsyncHappyArgs;
use crate::{failed, json_on_stdout, paths, show_with, write_json};
use ferry::command::shared::{CliError, format_nanos, print};

/// Runs in real time or in virtual time.
pub fn run(args: &FsyncHappyArgs) -> Result<(), CliError> {
    if args.r#virtual {
        return in_virtual_time(args);
    }
    let targets = paths(&args.run)?;
    if targets.is_empty() {
        return show_with(
            real::in_process(&args.options, &devices(args)),
            &args.run,
            real::verdict,
        );
    }
    let bench = real::on_targets(&args.options, &targets).map_err(failed)?;
    show_with(bench, &args.run, real::verdict)
}

fn devices(args: &FsyncHappyArgs) -> Vec<DeviceModel> {
    args.flush_time.iter().map(|flush_time| args.queue.device(*flush_time)).collect()
}

/// Runs the requested cells, one after the other; prints a table, or JSON.
fn in_virtual_time(args: &FsyncHappyArgs) -> Result<(), CliError> {
    let policies = &args.options.policy;
    let mut cells = Vec::new();
    let table = !json_on_stdout(&args.run);
    if table {
        print(&heading(policies))?;
    }
    for device in devices(args) {
        for callers in &args.options.callers {
            let load = args.options.load(*callers);
            let cell = Cell::run(device.clone(), load, policies, FAST_FLUSH).map_err(failed)?;
            if table {
                print(&row(&cell))?;
            }
            cells.push(cell.to_json());
        }
    }
    write_json(&Value::from(cells), &args.run)
}

fn heading(policies: &[FlushPolicy]) -> String {
    let mut out = String::from(
        "fsyncs a second (calls answered by one flush), in virtual time\n   flush  callers",
    );
    for policy in policies {
        let _ = write!(out, "  {:>19}", policy.name());
    }
    out + "\n"
}

fn row(cell: &Cell) -> String {
    let mut out =
        format!("{:>8}  {:>7}", format_nanos(nanos(cell.device.flush_time)), cell.load.callers);
    for (_, outcome) in &cell.outcomes {
        let _ = write!(out, "  {:>11.1} ({:>5.2})", outcome.rate(), outcome.callers_per_flush());
    }
    out + "\n"
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
