//! `ferry fsck`: checks a volume that nobody has mounted, says what is wrong, and repairs it if it is asked to.

use std::io::IsTerminal;
use std::process::ExitCode;

use ferry_device::{Env, OpenMode};
use ferry_fs::fsck::{FsckOptions, Progress, Report, fsck, repair};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::FsckArgs;
use crate::control::print;
use crate::error::CliError;
use crate::holder::{explain, open_when_free};
use crate::object;
use crate::size::format_bytes;

/// As fsck(8): errors were found, and all of them were repaired (or what they cost is said).
const EXIT_REPAIRED: u8 = 1;
/// As fsck(8): errors were found and left as they are.
const EXIT_DAMAGE: u8 = 4;

/// Runs the command.
pub fn run(args: &FsckArgs) -> Result<ExitCode, CliError> {
    check(args).inspect_err(|error| error_as_json(args.json, error))
}

/// Programs that asked for JSON get it in every case; the message on stderr and the exit code stay the same.
pub fn error_as_json(wanted: bool, error: &CliError) {
    if wanted && let Err(error) = print(&format!("{:#}\n", object!({ "error": error.to_string() }))) {
        tracing::warn!(%error, "the report is lost");
    }
}

fn check(args: &FsckArgs) -> Result<ExitCode, CliError> {
    let env = Env::real();
    let mode = if args.repair { OpenMode::ReadWrite } else { OpenMode::ReadOnly };
    let device = open_when_free(&args.volume, mode, &env)
        .map_err(|e| CliError::CouldNotCheck(explain(&args.volume, &e).to_string()))?;
    let bar = progress_bar(args.json);
    let mut progress = |at: Progress| {
        bar.set_length(at.total.max(at.done));
        bar.set_position(at.done);
    };
    let options = FsckOptions { verify_data: !args.metadata_only, progress: Some(&mut progress) };
    let report = if args.repair { repair(&device, options, &env) } else { fsck(&device, options, &env) };
    bar.finish_and_clear();
    let report = report.map_err(|e| CliError::CouldNotCheck(format!("{}: {e}", args.volume.display())))?;
    if args.json {
        let json = serde_json::to_string_pretty(&report)
            .map_err(|e| CliError::CouldNotCheck(format!("cannot write the report: {e}")))?;
        print(&format!("{json}\n"))?;
    } else {
        print(&text(&args.volume.display().to_string(), &report))?;
    }
    Ok(match (report.clean, report.repaired) {
        (true, 0) => ExitCode::SUCCESS,
        (true, _) => ExitCode::from(EXIT_REPAIRED),
        (false, _) => ExitCode::from(EXIT_DAMAGE),
    })
}

/// Only people look at bars.
fn progress_bar(json: bool) -> ProgressBar {
    if json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} inodes  {eta} left");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn text(volume: &str, report: &Report) -> String {
    let mut out = String::new();
    for repair in &report.repairs {
        out.push_str(&format!("{repair}\n"));
    }
    if report.repaired > report.repairs.len() as u64 {
        out.push_str(&format!("and {} more repairs\n", report.repaired - report.repairs.len() as u64));
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
    if report.findings_not_listed > 0 {
        out.push_str(&format!("and {} more\n", report.findings_not_listed));
    }
    let held = &report.holdings;
    let findings = report.findings.len() as u64 + report.findings_not_listed;
    let verdict = match (report.clean, report.repaired) {
        (true, 0) => "clean".to_owned(),
        (true, repairs) => format!("clean after {repairs} repairs"),
        (false, 0) => format!("{findings} findings"),
        (false, repairs) => format!("{findings} findings left after {repairs} repairs"),
    };
    let state =
        if held.unclean { "not unmounted cleanly, which the log makes good" } else { "unmounted cleanly" };
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
