//! `ferry fsck`: checks a volume that nobody has mounted, and says what is wrong.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use ferry_device::{BlockDevice, Env, OpenMode};
use ferry_fs::fsck::{FsckOptions, Progress, Report, fsck};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::FsckArgs;
use crate::control::print;
use crate::error::CliError;
use crate::holder::open_when_free;
use crate::size::format_bytes;

/// As fsck(8): errors were found and left as they are.
const EXIT_DAMAGE: u8 = 4;

/// Runs the command.
pub fn run(args: &FsckArgs) -> Result<ExitCode, CliError> {
    let env = Env::real();
    let device = open_when_free(&args.volume, OpenMode::ReadOnly, &env)
        .map_err(|e| CliError::CouldNotCheck(format!("{e}; unmount it first if it is mounted")))?;
    let device: Arc<dyn BlockDevice> = Arc::new(device);
    let bar = progress_bar(args.json);
    let mut progress = |at: Progress| {
        bar.set_length(at.total.max(at.done));
        bar.set_position(at.done);
    };
    let options = FsckOptions { progress: Some(&mut progress), ..FsckOptions::default() };
    let report = fsck(&device, options, &env);
    bar.finish_and_clear();
    let report = report.map_err(|e| CliError::CouldNotCheck(format!("{}: {e}", args.volume.display())))?;
    if args.json {
        let json = serde_json::to_string_pretty(&report)
            .map_err(|e| CliError::CouldNotCheck(format!("cannot write the report: {e}")))?;
        print(&format!("{json}\n"))?;
    } else {
        print(&text(&args.volume.display().to_string(), &report))?;
    }
    Ok(if report.clean { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DAMAGE) })
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
    for finding in &report.findings {
        out.push_str(&format!("{finding}\n"));
    }
    if report.findings_not_listed > 0 {
        out.push_str(&format!("and {} more\n", report.findings_not_listed));
    }
    let held = &report.holdings;
    let state =
        if held.unclean { "not unmounted cleanly, which the log makes good" } else { "unmounted cleanly" };
    out.push_str(&format!(
        "{volume}: {}; {} inodes ({} directories, {} files), {} names, {} of data in {} extents; {state}\n",
        if report.clean { "clean".to_owned() } else { format!("{} findings", report.findings.len()) },
        held.inodes,
        held.directories,
        held.files,
        held.names,
        format_bytes(held.data_bytes),
        held.extents,
    ));
    out
}
