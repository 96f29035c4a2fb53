//! `ferry bench fsync-happy`: callers that overwrite and fsync.

use std::fmt::Write;
use std::time::Duration;

use ferry_bench::DeviceModel;
use ferry_bench::fsync_happy::{CALLERS, Cell, FLUSH_TIMES, Load, real};
use ferry_journal::{FAST_FLUSH, FlushPolicy};
use serde_json::Value;

use crate::args::FsyncHappyArgs;
use crate::{failed, json_on_stdout, show, targets, write_json};
use ferry::command::shared::{CliError, format_nanos, print};

/// Runs in real time or in virtual time.
pub fn run(args: &FsyncHappyArgs) -> Result<(), CliError> {
    if args.r#virtual {
        return in_virtual_time(args);
    }
    let options = real::Options {
        policies: policies(args).into(),
        callers: callers(args).into(),
        time: args.time,
        think_time: args.think_time,
        jitter: args.jitter,
        rounds: args.run.rounds,
    };
    if args.run.on.is_empty() {
        return show(real::in_process(&options, &devices(args)), &args.run, real::verdict);
    }
    let targets = targets(&args.run, &ferry_bench::VolumeOptions::default())?;
    show(real::on_targets(&options, &targets).map_err(failed)?, &args.run, real::verdict)
}

fn callers(args: &FsyncHappyArgs) -> &[u32] {
    if args.callers.is_empty() { &CALLERS } else { &args.callers }
}

fn policies(args: &FsyncHappyArgs) -> &[FlushPolicy] {
    if args.policy.is_empty() { &FlushPolicy::ALL } else { &args.policy }
}

fn devices(args: &FsyncHappyArgs) -> Vec<DeviceModel> {
    let times = if args.flush_time.is_empty() { &FLUSH_TIMES[..] } else { &args.flush_time[..] };
    times.iter().map(|flush_time| args.queue.device(*flush_time)).collect()
}

/// Runs the requested cells, one after the other; prints a table, or JSON.
fn in_virtual_time(args: &FsyncHappyArgs) -> Result<(), CliError> {
    let policies = policies(args);
    let mut cells = Vec::new();
    let table = !json_on_stdout(&args.run);
    if table {
        print(&heading(policies))?;
    }
    for device in devices(args) {
        for callers in callers(args) {
            let load = Load { callers: *callers, think_time: args.think_time, jitter: args.jitter };
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
