//! `ferry sync` and `ferry stats`: questions to the daemon behind a mount, asked through ioctl(2) on any file of it.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::Value;

use crate::cli::{MountpointArgs, StatsArgs};
use crate::error::CliError;
use crate::table;

/// `ferry sync`.
pub fn sync(args: &MountpointArgs) -> Result<(), CliError> {
    let file = open(&args.mountpoint)?;
    ferry_fuse::control::sync(&file).map_err(|e| explain(&args.mountpoint, "cannot sync", e))
}

/// `ferry stats`.
pub fn stats(args: &StatsArgs) -> Result<(), CliError> {
    let file = open(&args.mountpoint)?;
    let json = ferry_fuse::control::stats(&file)
        .map_err(|e| explain(&args.mountpoint, "cannot read the statistics", e))?;
    let value: Value = serde_json::from_slice(&json).map_err(|e| {
        CliError::Failed(format!("{}: the daemon's statistics are not JSON: {e}", args.mountpoint.display()))
    })?;
    let text = if args.json { format!("{value:#}\n") } else { table::render(&value) };
    print(&text)
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

fn open(path: &Path) -> Result<File, CliError> {
    File::open(path).map_err(|e| explain(path, "cannot open", e))
}

fn explain(path: &Path, what: &'static str, error: io::Error) -> CliError {
    match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => CliError::NotMounted(path.into()),
        Some(libc::ENOTCONN | libc::ECONNABORTED) => CliError::Failed(format!(
            "{}: the daemon behind this mount has died; `ferry umount {0}` clears it, then mount again",
            path.display()
        )),
        _ => CliError::path(path, what)(error),
    }
}
