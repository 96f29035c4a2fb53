//! Requests to the process that has a volume open. `ferry stats` asks over a socket if it can
//! (`asked`). Otherwise it sends a [`Control`] request, as `ferry tune`, `ferry trim`, `ferry
//! sync`, `ferry scrub`, `ferry replace` and `ferry snapshot` do.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::Value;

use ferry_fuse::control::{Ask, TuneRequest};

use crate::cli::{TrimArgs, TuneArgs};
use crate::error::CliError;
use crate::location::Location;
use crate::options::{fast_flush_word, flush_word};
use crate::size::format_bytes;
use crate::{asked, mounts, remote, served, utab};

/// The question that asks for the statistics.
pub const STATS: &str = "stats";

/// The process that has a volume open; [`ferry_fuse::control`] sends requests to it.
pub struct Control {
    /// The path that the user gave.
    target: Location,
    way: Way,
}

enum Way {
    /// An ioctl on a file of a mount.
    Mount(File),
    /// A server's socket.
    Server(String),
}

impl Control {
    /// Finds the process; `target`: a volume, or any directory of a mount.
    pub fn of(target: &Location) -> Result<Self, CliError> {
        Self::find(target)?.ok_or_else(|| CliError::NotMounted(target.to_string().into()))
    }

    /// As [`Control::of`]; `None`: no process serves the volume, and it is not mounted.
    pub fn find(target: &Location) -> Result<Option<Self>, CliError> {
        let control = |way| Some(Self { target: target.clone(), way });
        if let Some(socket) = served::at(target)? {
            return Ok(control(Way::Server(socket)));
        }
        if let Some(mount) = mounts::of(target)? {
            mounts::must_be_reached(&mount)?;
            return Ok(control(Way::Mount(open(&mount.target)?)));
        }
        // A snapshot is no file.
        if let Some(path) = target.path().filter(|_| target.snapshot().is_none()) {
            open(path)?;
            if path.is_dir() {
                return Err(CliError::NotMounted(path.into()));
            }
        }
        Ok(None)
    }

    /// Makes everything durable that programs have written, also what only the kernel has of it.
    fn sync(&self) -> io::Result<()> {
        // The kernel begins to write back; the request waits for the end of it.
        self.write_back()?;
        ferry_fuse::control::sync(self)?;
        // Reports what was refused meanwhile.
        self.write_back()
    }

    /// Makes the kernel begin to write back its dirty pages of the volume: stores to mapped memory
    /// and, with cache=writeback, any write. Fails if pages could not be written back before.
    fn write_back(&self) -> io::Result<()> {
        match &self.way {
            Way::Mount(file) => Ok(rustix::fs::syncfs(file)?),
            Way::Server(_) => Ok(()),
        }
    }

    /// As [`Control::sync`], with its message.
    pub fn sync_volume(&self) -> Result<(), CliError> {
        self.sync().map_err(|e| self.explain("cannot sync", e))
    }

    /// The message for the error of a request. `what` says what could not be done.
    pub fn explain(&self, what: &'static str, error: io::Error) -> CliError {
        match (&self.way, error.raw_os_error()) {
            (_, Some(libc::EPERM)) => CliError::Failed(format!(
                "{self}: {what}: only root and the user who mounted it may"
            )),
            (Way::Mount(_), _) => explain(Path::new(&self.to_string()), what, error),
            (Way::Server(_), Some(_)) => CliError::path(self.to_string(), what)(error),
            (Way::Server(_), None) => CliError::Failed(format!(
                "{self}: {what}: its server has ended, or does not answer: {error}"
            )),
        }
    }
}

/// Shows the path that the user gave.
impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target.fmt(f)
    }
}

impl Ask for Control {
    fn ask(&self, request: u32, message: &[u8]) -> io::Result<Vec<u8>> {
        match &self.way {
            Way::Mount(file) => file.ask(request, message),
            Way::Server(socket) => served::ask(socket, request, message),
        }
    }
}

/// Makes everything durable on the volume that `path` is, or is on. On a served volume that covers
/// the changes of clients that have arrived here.
pub fn sync_volume(volume: &Location) -> Result<(), CliError> {
    Control::of(volume)?.sync_volume()
}

/// Waits until everything that the volume has now is durable, and makes nothing durable for it.
pub fn wait_for_volume(volume: &Location) -> Result<(), CliError> {
    let control = Control::of(volume)?;
    let waited = ferry_fuse::control::wait_durable(&control);
    waited.map_err(|e| cannot_wait(volume, &e).unwrap_or_else(|| control.explain(CANNOT_WAIT, e)))
}

/// As [`wait_for_volume`], for one file.
pub fn wait_for_file(path: &Path) -> Result<(), CliError> {
    let file = open(path)?;
    let waited = ferry_fuse::control::wait_file_durable(&file);
    let why = |e: &io::Error| cannot_wait(&Location::from(path), e);
    waited.map_err(|e| why(&e).unwrap_or_else(|| explain(path, CANNOT_WAIT, e)))
}

const CANNOT_WAIT: &str = "cannot wait until it is durable";

/// Why nobody there can say when something is durable, if that is it.
fn cannot_wait(target: &Location, error: &io::Error) -> Option<CliError> {
    let why = match error.raw_os_error()? {
        libc::EOPNOTSUPP => {
            "with cache=writeback the kernel holds changes back, and only fsync makes it hand them over"
        }
        libc::ENOTTY
            if target.path().and_then(mounts::above).is_some_and(|mount| mount.is_remote()) =>
        {
            "a server does not say when something becomes durable; `ferry sync` without --wait-only makes it so"
        }
        libc::ENOTTY => "it is not on FerryFS; `ferry sync` without --wait-only makes it durable",
        _ => return None,
    };
    Some(CliError::Failed(format!("{target}: {CANNOT_WAIT}: {why}")))
}

/// The statistics of the volume that `target` is, or is on.
pub fn read_stats(target: &Location) -> Result<Value, CliError> {
    let mount = mounts::of(target)?.filter(|mount| !mount.is_remote());
    if let Some(stats) = mount.map(|mount| asked::ask(&mount, STATS)).transpose()?.flatten() {
        return Ok(stats);
    }
    stats_of(&Control::of(target)?)
}

/// The statistics, by a [`Control`] request.
pub fn stats_of(control: &Control) -> Result<Value, CliError> {
    let json = ferry_fuse::control::stats(control)
        .map_err(|e| control.explain("cannot read the statistics", e))?;
    serde_json::from_slice(&json)
        .map_err(|e| CliError::Failed(format!("{control}: the statistics are not JSON: {e}")))
}

/// Runs `ferry trim`.
pub fn trim(args: &TrimArgs) -> Result<(), CliError> {
    let control = Control::of(&args.target)?;
    let given =
        ferry_fuse::control::trim(&control).map_err(|e| control.explain("cannot trim", e))?;
    let (target, given) = (&args.target, format_bytes(given));
    print(&format!("{target}: {given} of free space went back to the disk below\n"))
}

/// Runs `ferry tune`.
pub fn tune(args: &TuneArgs) -> Result<(), CliError> {
    if let Some(on) = args.asynchronous {
        let Location::Path(path) = &args.target else {
            return Err(CliError::Usage("--async takes a mount point".into()));
        };
        return remote::switch(path, on);
    }
    let asked = TuneRequest {
        flush: args.flush,
        fast_flush: args.fast_flush,
        reset_flush_time: args.reset_flush_time,
    };
    if asked == TuneRequest::default() && args.log_size.is_none() {
        return Err(CliError::Usage(
            "nothing to change: say --flush, --fast-flush, --reset-flush-time, --log-size or --async".into(),
        ));
    }
    let control = Control::of(&args.target)?;
    if asked != TuneRequest::default() {
        ferry_fuse::control::tune(&control, &asked)
            .map_err(|e| control.explain("cannot tune", e))?;
        show_policy(args);
    }
    args.log_size.map_or(Ok(()), |bytes| grow_log(&control, bytes))
}

/// Updates the options that `mount` lists.
fn show_policy(args: &TuneArgs) {
    let words: Vec<_> = args
        .flush
        .map(flush_word)
        .into_iter()
        .chain(args.fast_flush.map(fast_flush_word))
        .collect();
    if let Ok(Some(mount)) = mounts::find(&args.target) {
        utab::change(&mount.target, &words);
    }
}

/// Runs `ferry tune --log-size`; prints the log's new size, which is in whole segments.
fn grow_log(control: &Control, bytes: u64) -> Result<(), CliError> {
    let log = |stats: &Value| stats["log"]["bytes"].as_u64().unwrap_or_default();
    let before = stats_of(control)?;
    let most = before["volume"]["size"].as_u64().unwrap_or_default() / 4;
    let refused = |why: String| Err(CliError::Failed(format!("{control}: {why}")));
    let shrinks = |has: u64| {
        refused(format!("the log has {} already, and it does not shrink", format_bytes(has)))
    };
    if bytes <= log(&before) {
        return shrinks(log(&before));
    }
    if bytes > most {
        return refused(format!("a log of this volume has at most {}", format_bytes(most)));
    }
    match ferry_fuse::control::grow_log(control, bytes) {
        Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => refused(
            "there is no room for the longer log: the end of the volume, where it would be, is in use or needed, or what the \
             volume lies on is full. Choose a smaller log, or make room"
                .into(),
        ),
        Err(e) => match log(&stats_of(control)?) {
            // Another process has grown it meanwhile.
            now if bytes <= now => shrinks(now),
            _ => Err(control.explain("cannot grow the log", e)),
        },
        Ok(()) => print(&format!("{control}: log {}\n", format_bytes(log(&stats_of(control)?)))),
    }
}

/// Prints to stdout. It is no error if the reader has stopped reading (`| head`).
pub fn print(text: &str) -> Result<(), CliError> {
    is_read(text).map(drop)
}

/// As [`print`]; `false`: the reader has stopped reading.
pub fn is_read(text: &str) -> Result<bool, CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(CliError::Failed(format!("cannot write to stdout: {e}"))),
    }
}

/// Opens a file or directory of a mount whose daemon answers.
pub fn open(path: &Path) -> Result<File, CliError> {
    asked::must_answer(path)?;
    File::open(path).map_err(|e| explain(path, "cannot open", e))
}

/// The message for an error of such a request.
pub fn explain(path: &Path, what: &'static str, error: io::Error) -> CliError {
    match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP) => match mounts::above(path) {
            Some(mount) if mount.is_remote() => CliError::Failed(format!(
                "{}: mounted from {}: that is for the machine that has the volume",
                path.display(),
                mount.source.display()
            )),
            Some(_) if error.raw_os_error() == Some(libc::ENOTTY) => CliError::Failed(format!(
                "{}: {what}: that is for the mount that owns the volume, not for a replica or a snapshot. If this one owns it, its daemon is \
                 older than this program: `ferry upgrade-mount` replaces it",
                path.display()
            )),
            _ => CliError::NotMounted(path.into()),
        },
        _ if mounts::says_dead(&error) => mounts::died(path),
        _ => CliError::path(path, what)(error),
    }
}
