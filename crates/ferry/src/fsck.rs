//! `ferry fsck`: checks a volume that is not mounted, reports what is wrong, and repairs it on
//! request.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use ferry_check::fsck::{FsckOptions, Progress, Repair, Report, fsck, repair};
use ferry_device::{BlockDevice, ComponentState, CompositeVolume};
use ferry_env::Env;
use ferry_fs::volume::{VolumeError, read_superblock};
use indicatif::ProgressBar;

use crate::cli::FsckArgs;
use crate::control::print;
use crate::error::CliError;
use crate::location::Location;
use crate::object;
use crate::open::{How, explain, open_when_free};
use crate::size::format_bytes;
use crate::waiting::{go_on, progress_bar, stop_on_signals_or_end};

/// As fsck(8): errors were found, and all of them were repaired (or their cost is reported).
const EXIT_REPAIRED: u8 = 1;
/// As fsck(8): errors were found and left as they are.
const EXIT_DAMAGE: u8 = 4;

/// Runs the command.
pub fn run(args: &FsckArgs) -> Result<ExitCode, CliError> {
    check(args).inspect_err(|error| error_as_json(args.json, error))
}

/// A program that asks for JSON gets it in every case; the message on stderr and the exit code stay
/// the same.
pub fn error_as_json(wanted: bool, error: &CliError) {
    if wanted && let Err(error) = print(&format!("{:#}\n", object!({ "error": error.to_string() })))
    {
        tracing::warn!(%error, "the report is lost");
    }
}

fn check(args: &FsckArgs) -> Result<ExitCode, CliError> {
    let env = Env::real();
    let how = if args.repair { How::Write } else { How::Read };
    let open = || {
        open_when_free(&args.volume, how, &env)
            .map_err(|e| CliError::CouldNotCheck(explain(&args.volume, &e).to_string()))
    };
    let mut opened = open()?;
    let grown = match args.volume.path().filter(|_| args.repair) {
        Some(path) => give_length(path, &opened.device)?,
        None => None,
    };
    if grown.is_some() {
        drop(opened);
        opened = open()?;
    }
    let device = opened.device.clone();
    let bar = match args.json {
        true => ProgressBar::hidden(),
        false => progress_bar("{bar:40} {pos}/{len} inodes  {eta} left"),
    };
    let stop = stop_on_signals_or_end()?;
    let mut progress = |at: Progress| {
        bar.set_length(at.total.max(at.done));
        bar.set_position(at.done);
        go_on(&stop)
    };
    let options = FsckOptions {
        verify_data: !args.metadata_only,
        give_up_unreadable: args.give_up_unreadable,
        progress: Some(&mut progress),
    };
    let report =
        if args.repair { repair(&device, options, &env) } else { fsck(&device, options, &env) };
    bar.finish_and_clear();
    let mut report =
        report.map_err(|error| CliError::CouldNotCheck(could_not(&args.volume, &error)))?;
    if let Some(grown) = grown {
        report.repairs.insert(0, grown);
        report.repaired += 1;
    }
    let missing = missing_sides(&device);
    drop(device);
    let closed = opened.close();
    closed.map_err(|error| CliError::CouldNotCheck(format!("{}: {error}", args.volume)))?;
    if args.json {
        let unwritable = |e| CliError::CouldNotCheck(format!("cannot write the report: {e}"));
        let mut json = serde_json::to_value(&report).map_err(unwritable)?;
        json["missing_sides"] = missing.into();
        print(&format!("{json:#}\n"))?;
    } else {
        print(&text(&args.volume.to_string(), &report, &missing))?;
    }
    Ok(match (report.clean, report.repaired) {
        (true, 0) => ExitCode::SUCCESS,
        (true, _) => ExitCode::from(EXIT_REPAIRED),
        (false, _) => ExitCode::from(EXIT_DAMAGE),
    })
}

/// Reports sides of a mirror that are missing or stale. The volume is complete without them, so the
/// check does not fail: a failure would keep a machine from booting.
fn missing_sides(device: &Arc<dyn BlockDevice>) -> Vec<String> {
    let is_missing = |state| matches!(state, ComponentState::Absent | ComponentState::Failed);
    let sides = device.components().into_iter().filter(|side| is_missing(side.state));
    sides.map(|side| side.name).collect()
}

/// Restores the length of a truncated volume file. The hole reads as zeros, and the check reports
/// what was lost.
fn give_length(volume: &Path, device: &Arc<dyn BlockDevice>) -> Result<Option<Repair>, CliError> {
    let Err(VolumeError::Truncated { expected, found }) = read_superblock(device) else {
        return Ok(None);
    };
    if !volume.is_file() || CompositeVolume::is_at(volume) {
        return Ok(None);
    }
    let longer = OpenOptions::new().write(true).open(volume).and_then(|file| {
        file.set_len(expected)?;
        file.sync_all()
    });
    longer.map_err(|error| {
        let volume = volume.display();
        CliError::CouldNotCheck(format!(
            "{volume}: cannot give it its {expected} bytes again: {error}"
        ))
    })?;
    Ok(Some(Repair::of_length(found, expected)))
}

/// The message of a check never suggests to make a volume: one may have existed.
fn could_not(volume: &Location, error: &VolumeError) -> String {
    let name = volume;
    let file = volume.path().filter(|path| path.is_file() && !CompositeVolume::is_at(path));
    match error {
        VolumeError::Empty => format!(
            "{name}: there is no FerryFS volume here: it is empty, as far as was looked (in front, at the end, and between); if there was a volume, bring back a backup of it"
        ),
        VolumeError::TooShort => format!(
            "{name}: this is not a FerryFS volume: it is too short to be one; if its file was cut off, bring back the rest, or a backup"
        ),
        VolumeError::Truncated { expected, found } if file.is_some() => {
            format!(
                "{name}: the volume is {expected} bytes long, but only {found} are there: it was cut off. Bring back the rest, or a backup; else `truncate -s {expected} {name}` gives it its length again (`ferry fsck --repair` does that, too), and what lay behind byte {found} is lost"
            )
        }
        VolumeError::Stopped => format!("{name}: stopped before its end: run it again"),
        _ => format!("{name}: {error}"),
    }
}

fn text(volume: &str, report: &Report, missing: &[String]) -> String {
    let mut out = String::new();
    for repair in &report.repairs {
        out.push_str(&format!("{repair}\n"));
    }
    if report.repaired > report.repairs.len() as u64 {
        out.push_str(&format!(
            "and {} more repairs\n",
            report.repaired - report.repairs.len() as u64
        ));
    }
    for range in &report.lost {
        out.push_str(&format!("{range}\n"));
    }
    if report.lost_not_listed > 0 {
        out.push_str(&format!("and {} more ranges\n", report.lost_not_listed));
    }
    for finding in &report.findings {
        out.push_str(&format!("{finding}\n"));
    }
    // Prints each kind once, however many there are.
    let kinds: BTreeMap<_, _> =
        report.findings.iter().map(|finding| (finding.code, finding)).collect();
    for (code, finding) in kinds {
        out.push_str(&format!("{code} means: {}; do: {}\n", finding.means, finding.advice));
    }
    if report.findings_not_listed > 0 {
        out.push_str(&format!("and {} more\n", report.findings_not_listed));
    }
    for side in missing {
        out.push_str(&format!(
            "{side}: this side of the mirror is missing or stale; nothing is lost, but another failure may cost the volume: `ferry replace` builds \
             a new one\n"
        ));
    }
    let held = &report.holdings;
    let findings = report.findings.len() as u64 + report.findings_not_listed;
    let verdict = match (report.clean, report.repaired) {
        (true, 0) => "clean".to_owned(),
        (true, repairs) => format!("clean after {repairs} repairs"),
        (false, 0) => format!("{findings} findings"),
        (false, repairs) => format!("{findings} findings left after {repairs} repairs"),
    };
    let state = if held.unclean {
        "not unmounted cleanly, which the log makes good"
    } else {
        "unmounted cleanly"
    };
    let verdict =
        if missing.is_empty() { verdict } else { format!("{verdict}, the mirror is degraded") };
    let contents = if report.data_read { "which were read" } else { "which were not read" };
    out.push_str(&format!(
        "{volume}: {verdict}; {} inodes ({} directories, {} files), {} names, {} of data in {} extents, {contents}; {state}\n",
        held.inodes,
        held.directories,
        held.files,
        held.names,
        format_bytes(held.data_bytes),
        held.extents,
    ));
    out
}
