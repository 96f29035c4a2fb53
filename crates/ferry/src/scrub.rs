//! `ferry scrub`: reads and verifies everything on a volume, in the daemon or server that has it
//! open, or in this process.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::scrub::{ScrubOptions, ScrubProgress, Watch, scrub};
use ferry_fuse::control;
use indicatif::ProgressBar;
use serde_json::Value;

use crate::cli::ScrubArgs;
use crate::control::{Control, print};
use crate::error::CliError;
use crate::fsck::error_as_json;
use crate::location::Location;
use crate::object;
use crate::open::{How, explain as explain_open, open_when_free};
use crate::size::{format_bytes, format_nanos};
use crate::waiting::{PAUSE_MAX, pause, progress_bar, stop_on_signals, wait};

/// The exit code if damage was found.
const EXIT_DAMAGE: u8 = 4;
/// The exit code if the scrub was stopped, and had found no damage until then.
const EXIT_STOPPED: u8 = 1;
/// The form of the progress bar.
const BAR: &str = "{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left  {msg}";
/// The interval between two questions about the progress, after the scrub was told to stop.
const STOPPING: Duration = Duration::from_millis(10);

/// Runs the command.
pub fn run(args: &ScrubArgs) -> Result<ExitCode, CliError> {
    look(args).inspect_err(|error| error_as_json(args.json, error))
}

fn look(args: &ScrubArgs) -> Result<ExitCode, CliError> {
    let control = Control::find(&args.target);
    if args.stop {
        let control =
            control?.ok_or_else(|| CliError::NotMounted(args.target.to_string().into()))?;
        control::scrub_stop(&control).map_err(|e| refused(&control, e))?;
        return Ok(ExitCode::SUCCESS);
    }
    let control = control.map_err(|error| match error {
        CliError::Path { .. } => CliError::CouldNotCheck(error.to_string()),
        other => other,
    })?;
    let stop = stop_on_signals()?;
    let bar = match args.json {
        true => ProgressBar::hidden(),
        false => progress_bar(BAR),
    };
    let report = match &control {
        Some(control) => {
            on_mount(control, args.rate.unwrap_or(ScrubArgs::RATE_MOUNTED), &bar, &stop)
        }
        None => on_volume(&args.target, args.rate.filter(|rate| *rate > 0), &bar, &stop),
    };
    bar.finish_and_clear();
    let report = report?;
    let name = args.target.to_string();
    if args.json {
        print(&format!("{report:#}\n"))?
    } else {
        print(&text(&name, &report))?
    }
    Ok(match (report["clean"] == true, report["complete"] == true) {
        (false, _) => ExitCode::from(EXIT_DAMAGE),
        (true, false) => ExitCode::from(EXIT_STOPPED),
        (true, true) => ExitCode::SUCCESS,
    })
}

/// Has the daemon or server scrub, and shows its progress.
fn on_mount(
    control: &Control,
    rate: u64,
    bar: &ProgressBar,
    stop: &AtomicBool,
) -> Result<Value, CliError> {
    let number = control::scrub_start(control, rate).map_err(|e| refused(control, e))?;
    let mut told = false;
    loop {
        let status = parse(control, control::scrub_status(control))?;
        if status["number"] != number {
            return Err(CliError::Failed(format!(
                "{control}: another scrub has taken this one's place"
            )));
        }
        if status["state"] != "running" {
            return mounted_report(control, status);
        }
        show(bar, &status);
        if stop.load(Ordering::Relaxed) && !told {
            control::scrub_stop(control).map_err(|e| refused(control, e))?;
            told = true;
        }
        pause(if told { STOPPING } else { PAUSE_MAX });
    }
}

fn parse(control: &Control, answer: std::io::Result<Vec<u8>>) -> Result<Value, CliError> {
    let json = answer.map_err(|e| refused(control, e))?;
    serde_json::from_slice(&json)
        .map_err(|e| CliError::Failed(format!("{control}: the daemon's answer is not JSON: {e}")))
}

/// Converts the answer to the form of a report that was made in this process.
fn mounted_report(control: &Control, mut status: Value) -> Result<Value, CliError> {
    let mut damage = Vec::new();
    loop {
        match parse(control, control::scrub_damage(control, damage.len() as u64))? {
            Value::Array(page) if !page.is_empty() => damage.extend(page),
            _ => break,
        }
    }
    Ok(object!({
        "complete": status["state"] == "complete",
        "clean": status["damaged_blocks"] == 0,
        "time_ns": status["time_ns"].take(),
        "verified": status["verified"].take(),
        "passed_blocks": status["passed_blocks"].take(),
        "damaged_blocks": status["damaged_blocks"].take(),
        "damage": damage,
        "damage_not_listed": status["damage_not_listed"].take(),
    }))
}

fn refused(control: &Control, error: std::io::Error) -> CliError {
    match error.raw_os_error() {
        Some(libc::EBUSY) => CliError::Failed(format!(
            "{control}: a scrub is on its way already: `ferry stats` shows how far it is, `ferry scrub --stop` ends it"
        )),
        _ => control.explain("cannot scrub", error),
    }
}

/// Scrubs in this process: the volume is not mounted.
fn on_volume(
    volume: &Location,
    rate: Option<u64>,
    bar: &ProgressBar,
    stop: &AtomicBool,
) -> Result<Value, CliError> {
    let env = Env::real();
    let opened = open_when_free(volume, How::Read, &env)
        .map_err(|e| CliError::CouldNotCheck(explain_open(volume, &e).to_string()))?;
    let begun = env.clock.monotonic();
    let mut watch = Onlooker { bar, stop };
    let report = scrub(&opened.device, ScrubOptions { rate }, &env, &mut watch)
        .map_err(|e| CliError::CouldNotCheck(format!("{volume}: {e}")))?;
    let mut report = serde_json::to_value(&report)
        .map_err(|e| CliError::CouldNotCheck(format!("cannot write the report: {e}")))?;
    let time = env.clock.monotonic().saturating_sub(begun);
    report["time_ns"] = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).into();
    Ok(report)
}

/// Shows the progress of a scrub in this process; signals stop the scrub.
struct Onlooker<'o> {
    bar: &'o ProgressBar,
    stop: &'o AtomicBool,
}

impl Watch for Onlooker<'_> {
    fn progress(&mut self, at: &ScrubProgress) -> bool {
        self.bar.set_length(at.total_bytes);
        self.bar.set_position(at.done_bytes);
        show_damage(self.bar, at.damaged_blocks);
        !self.stop.load(Ordering::Relaxed)
    }
    fn wait(&mut self, time: Duration) -> bool {
        wait(time, self.stop)
    }
}

fn show(bar: &ProgressBar, status: &Value) {
    let number = |key: &str| status[key].as_u64().unwrap_or(0);
    bar.set_length(number("total_bytes"));
    bar.set_position(number("done_bytes"));
    show_damage(bar, number("damaged_blocks"));
}

fn show_damage(bar: &ProgressBar, blocks: u64) {
    if blocks > 0 {
        bar.set_message(format!("{blocks} damaged blocks"));
    }
}

fn text(name: &str, report: &Value) -> String {
    let mut out = String::new();
    for damage in report["damage"].as_array().into_iter().flatten() {
        out.push_str(&format!("damaged: {}\n", damage_line(damage)));
    }
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let not_listed = number(&report["damage_not_listed"]);
    if not_listed > 0 {
        out.push_str(&format!("and {not_listed} more places\n"));
    }
    let verified = &report["verified"];
    let state = match (number(&report["damaged_blocks"]), report["complete"] == true) {
        (0, true) => "clean".to_owned(),
        (0, false) => "stopped before the end; no damage so far".to_owned(),
        (n, true) => format!("{n} damaged blocks"),
        (n, false) => format!("not read to the end; {n} damaged blocks so far"),
    };
    out.push_str(&format!(
        "{name}: {state}; verified {} of data in {} extents, {} keys, {} of the home store, {} of the log, {} superblocks in {}\n",
        format_bytes(number(&verified["data_bytes"])),
        number(&verified["extents"]),
        number(&verified["keys"]),
        format_bytes(number(&verified["home_bytes"])),
        format_bytes(number(&verified["log_bytes"])),
        number(&verified["superblocks"]),
        format_nanos(number(&report["time_ns"])).trim(),
    ));
    out
}

/// One item of damage: its file, its location, its kind.
fn damage_line(damage: &Value) -> String {
    let mut line = match (damage["path"].as_str(), damage["ino"].as_u64()) {
        (Some(path), _) => path.to_owned(),
        (None, Some(ino)) => format!("inode {ino}, which has no name"),
        (None, None) => damage["part"].as_str().unwrap_or_default().to_owned(),
    };
    for (key, before, behind) in [
        ("file_offset", " at byte ", ""),
        ("length", ", ", " bytes"),
        ("device_offset", " (byte ", " of the volume)"),
    ] {
        if let Some(n) = damage[key].as_u64() {
            line.push_str(&format!("{before}{n}{behind}"));
        }
    }
    format!("{line}: {}", damage["what"].as_str().unwrap_or_default())
}
