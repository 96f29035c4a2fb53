//! `ferry bench fsync-happy`.

use std::fmt::Write;

use ferry_bench::fsync_happy::{CALLERS, Cell, DeviceModel, FLUSH_TIMES, Load};
use ferry_journal::{FAST_FLUSH, FlushPolicy};
use serde_json::Value;

use crate::cli::FsyncHappyArgs;
use crate::control::print;
use crate::error::CliError;
use crate::size::format_nanos;

/// Runs the cells that were asked for, one after the other; a table, or JSON.
pub fn fsync_happy(args: &FsyncHappyArgs) -> Result<(), CliError> {
    let flush_times = if args.flush_time.is_empty() { &FLUSH_TIMES[..] } else { &args.flush_time[..] };
    let callers = if args.callers.is_empty() { &CALLERS[..] } else { &args.callers[..] };
    let policies = if args.policy.is_empty() { &FlushPolicy::ALL[..] } else { &args.policy[..] };
    let mut cells = Vec::new();
    if !args.json {
        print(&heading(policies))?;
    }
    for flush_time in flush_times {
        for callers in callers {
            let device = DeviceModel {
                flush_time: *flush_time,
                write_time: args.write_time,
                queue_depth: args.queue_depth,
                serial_flushes: !args.parallel_flushes,
            };
            let load = Load { callers: *callers, think_time: args.think_time, jitter: args.jitter };
            let cell = Cell::run(device, load, policies, FAST_FLUSH)
                .map_err(|e| CliError::Failed(format!("cannot run the bench: {e}")))?;
            if args.json {
                cells.push(cell.to_json());
            } else {
                print(&row(&cell))?;
            }
        }
    }
    if args.json { print(&format!("{:#}\n", Value::from(cells))) } else { Ok(()) }
}

fn heading(policies: &[FlushPolicy]) -> String {
    let mut out =
        String::from("fsyncs a second (calls answered by one flush), in virtual time\n   flush  callers");
    for policy in policies {
        let _ = write!(out, "  {:>19}", policy.name());
    }
    out + "\n"
}

fn row(cell: &Cell) -> String {
    let mut out = format!("{:>8}  {:>7}", format_nanos(nanos(cell.device.flush_time)), cell.load.callers);
    for (_, outcome) in &cell.outcomes {
        let _ = write!(out, "  {:>11.1} ({:>5.2})", outcome.rate(), outcome.callers_per_flush());
    }
    out + "\n"
}

fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
