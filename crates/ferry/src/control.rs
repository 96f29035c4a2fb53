//! Questions to the daemon behind a mount, asked through ioctl(2) on any file of it: `ferry stats`, `ferry tune`, a volume's sync, and
//! what `ferry scrub` shares with them.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::Value;

use ferry_fuse::control::Tune;

use crate::cli::{StatsArgs, TuneArgs};
use crate::error::CliError;
use crate::table;

/// Makes everything on the volume durable that a file or directory is on.
pub fn sync_volume(path: &Path) -> Result<(), CliError> {
    let file = open(path)?;
    // The kernel hands over what it holds: stores to mapped memory and, with cache=writeback, any write.
    rustix::fs::syncfs(&file).map_err(|e| explain(path, "cannot sync", e.into()))?;
    ferry_fuse::control::sync(&file).map_err(|e| explain(path, "cannot sync", e))
}

/// `ferry stats`.
pub fn stats(args: &StatsArgs) -> Result<(), CliError> {
    let value = read_stats(&args.mountpoint)?;
    let text = if args.json { format!("{value:#}\n") } else { table::render(&value) };
    print(&text)
}

/// The statistics of the mount that a file or directory is on.
pub fn read_stats(path: &Path) -> Result<Value, CliError> {
    let json = ferry_fuse::control::stats(&open(path)?)
        .map_err(|e| explain(path, "cannot read the statistics", e))?;
    serde_json::from_slice(&json).map_err(|e| {
        CliError::Failed(format!("{}: the daemon's statistics are not JSON: {e}", path.display()))
    })
}

/// `ferry tune`.
pub fn tune(args: &TuneArgs) -> Result<(), CliError> {
    let asked =
        Tune { flush: args.flush, fast_flush: args.fast_flush, reset_flush_time: args.reset_flush_time };
    if asked == Tune::default() {
        return Err(CliError::Usage(
            "nothing to change: say --flush, --fast-flush or --reset-flush-time".into(),
        ));
    }
    let file = open(&args.mountpoint)?;
    ferry_fuse::control::tune(&file, &asked).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => CliError::Failed(format!(
            "{}: only root and who has mounted it may tune it",
            args.mountpoint.display()
        )),
        _ => explain(&args.mountpoint, "cannot tune", error),
    })
}

/// To stdout; a reader that has seen enough (`| head`) is no error.
pub fn print(text: &str) -> Result<(), CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("cannot write to stdout: {e}")))
        }
        _ => Ok(()),
    }
}

/// Any file or directory of a mount.
pub fn open(path: &Path) -> Result<File, CliError> {
    File::open(path).map_err(|e| explain(path, "cannot open", e))
}

/// What an error of such a question means.
pub fn explain(path: &Path, what: &'static str, error: io::Error) -> CliError {
    match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => CliError::NotMounted(path.into()),
        Some(libc::ENOTCONN | libc::ECONNABORTED) => CliError::Failed(format!(
            "{}: the daemon behind this mount has died; `ferry umount {0}` clears it, then mount again",
            path.display()
        )),
        _ => CliError::path(path, what)(error),
    }
}
