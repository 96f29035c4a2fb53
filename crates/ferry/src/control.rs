//! Questions to the daemon behind a mount, asked through ioctl(2) on any file of it: `ferry stats`, `ferry tune`, a volume's sync, and
//! what `ferry scrub` shares with them.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::Value;

use ferry_fuse::control::Tune;

use crate::cli::{StatsArgs, TuneArgs};
use crate::error::CliError;
use crate::options::{fast_flush_word, flush_word};
use crate::size::format_bytes;
use crate::{mounts, remote, shown, table};

/// Makes everything on the volume durable that a file or directory is on.
pub fn sync_volume(path: &Path) -> Result<(), CliError> {
    let file = open(path)?;
    // The kernel hands over what it holds: stores to mapped memory and, with cache=writeback, any write.
    rustix::fs::syncfs(&file).map_err(|e| explain(path, "cannot sync", e.into()))?;
    ferry_fuse::control::sync(&file).map_err(|e| explain(path, "cannot sync", e))
}

/// `ferry stats`.
pub fn stats(args: &StatsArgs) -> Result<(), CliError> {
    let value = match own_figures(&args.mountpoint) {
        Some(figures) => {
            eprintln!(
                "ferry: {}: its server is away: these are this machine's own figures",
                args.mountpoint.display()
            );
            figures
        }
        None => read_stats(&args.mountpoint)?,
    };
    let text = if args.json { format!("{value:#}\n") } else { table::render(&value) };
    print(&text)
}

/// What a remote mount says whose server is away: nobody waits for that to be told so.
fn own_figures(path: &Path) -> Option<Value> {
    let mount = mounts::above(path)?;
    remote::figures(&mount.target).filter(|figures| figures["connection"]["connected"] == false)
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
    if asked == Tune::default() && args.log_size.is_none() {
        return Err(CliError::Usage(
            "nothing to change: say --flush, --fast-flush, --reset-flush-time or --log-size".into(),
        ));
    }
    let file = open(&args.mountpoint)?;
    if asked != Tune::default() {
        ferry_fuse::control::tune(&file, &asked)
            .map_err(|e| refused_tune(&args.mountpoint, "cannot tune", e))?;
        show_policy(args);
    }
    args.log_size.map_or(Ok(()), |bytes| grow_log(&args.mountpoint, &file, bytes))
}

/// In the list that `mount` gives.
fn show_policy(args: &TuneArgs) {
    let words: Vec<_> =
        args.flush.map(flush_word).into_iter().chain(args.fast_flush.map(fast_flush_word)).collect();
    if let Ok(Some(mount)) = mounts::find(&args.mountpoint) {
        shown::change(&mount.target, &words);
    }
}

fn refused_tune(path: &Path, what: &'static str, error: io::Error) -> CliError {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            CliError::Failed(format!("{}: only root and who has mounted it may tune it", path.display()))
        }
        _ => explain(path, what, error),
    }
}

/// `ferry tune --log-size`; says what the log has then, as it is in whole segments.
fn grow_log(path: &Path, file: &File, bytes: u64) -> Result<(), CliError> {
    let log = |stats: &Value| stats["log"]["bytes"].as_u64().unwrap_or_default();
    let before = read_stats(path)?;
    let most = before["volume"]["size"].as_u64().unwrap_or_default() / 4;
    let refused = |why: String| Err(CliError::Failed(format!("{}: {why}", path.display())));
    let shrinks =
        |has: u64| refused(format!("the log has {} already, and it does not shrink", format_bytes(has)));
    if bytes <= log(&before) {
        return shrinks(log(&before));
    }
    if bytes > most {
        return refused(format!("a log of this volume has at most {}", format_bytes(most)));
    }
    match ferry_fuse::control::grow_log(file, bytes) {
        Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => refused(
            "there is no room for the longer log: the end of the volume, where it would be, is in use or needed, or what the \
             volume lies on is full. Choose a smaller log, or make room"
                .into(),
        ),
        Err(e) => match log(&read_stats(path)?) {
            // Somebody else was quicker.
            now if bytes <= now => shrinks(now),
            _ => Err(refused_tune(path, "cannot grow the log", e)),
        },
        Ok(()) => print(&format!("{}: log {}\n", path.display(), format_bytes(log(&read_stats(path)?)))),
    }
}

/// To stdout; a reader that has seen enough (`| head`) is no error.
pub fn print(text: &str) -> Result<(), CliError> {
    is_read(text).map(drop)
}

/// As [`print`]; `false` when nobody reads any more.
pub fn is_read(text: &str) -> Result<bool, CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(CliError::Failed(format!("cannot write to stdout: {e}"))),
    }
}

/// Any file or directory of a mount.
pub fn open(path: &Path) -> Result<File, CliError> {
    File::open(path).map_err(|e| explain(path, "cannot open", e))
}

/// What an error of such a question means.
pub fn explain(path: &Path, what: &'static str, error: io::Error) -> CliError {
    match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => match mounts::above(path) {
            Some(mount) if mount.is_remote() => CliError::Failed(format!(
                "{}: mounted from {}: that is for the machine that has the volume",
                path.display(),
                mount.source.display()
            )),
            _ => CliError::NotMounted(path.into()),
        },
        _ if mounts::says_dead(&error) => CliError::Failed(format!(
            "{}: the daemon behind this mount has died; `ferry umount {0}` clears it, then mount again",
            path.display()
        )),
        _ => CliError::path(path, what)(error),
    }
}
