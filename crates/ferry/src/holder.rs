//! The process that has a volume open: finds it, and waits until it has closed the volume.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferry_device::{
    BlockDevice, ComponentHeader, CompositeError, CompositeVolume, DeviceError, FileDevice,
    OpenMode,
};
use ferry_env::Env;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::CliError;
use crate::{clients, mounts, socket};

/// The interval between two checks of which process has the volume.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How often a volume that a process reads is checked again.
const READER_LOOKS: u32 = 20;
/// How long a daemon whose mount is gone may take to close its volume before the volume counts as
/// in use.
const CLOSING: Duration = Duration::from_secs(30);

/// The same for a server, which usually keeps running.
const STOPPING: Duration = Duration::from_secs(3);

/// A process that has a volume open.
pub struct Holder {
    /// The process number in its own pid namespace.
    pub pid: u32,
    volume: PathBuf,
    env: Env,
    /// It only reads: other processes may read, too, and the lock does not name this one.
    reading: bool,
    /// `None`: the number is not valid here, because of another namespace or because the process
    /// has ended.
    process: Option<OwnedFd>,
}

impl Holder {
    /// The process that may write to the volume, if there is one.
    pub fn of(volume: &Path) -> Option<Self> {
        let env = Env::real();
        let pid = holder_pid(volume, &env)?;
        Some(Self { pid, volume: volume.into(), env, reading: false, process: process(pid) })
    }

    /// The process `pid`, which reads the volume.
    pub fn reader(volume: &Path, pid: u32) -> Self {
        Self { pid, volume: volume.into(), env: Env::real(), reading: true, process: process(pid) }
    }

    fn holds(&self) -> bool {
        if self.reading {
            self.process.is_some() && self.has_it_open()
        } else {
            holder_pid(&self.volume, &self.env) == Some(self.pid)
        }
    }

    /// Whether the process has the volume open. If its open files cannot be listed, it counts as
    /// not open.
    fn has_it_open(&self) -> bool {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid));
        files.is_ok_and(|files| {
            files
                .flatten()
                .any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == self.volume))
        })
    }

    /// Waits until the process has closed the volume, when everything is on disk; `false`: the time
    /// ran out.
    pub fn wait(&self, timeout: Duration) -> Result<bool, CliError> {
        let end = self.env.clock.monotonic() + timeout;
        while self.holds() {
            let left = end.saturating_sub(self.env.clock.monotonic());
            if left.is_zero() {
                return Ok(false);
            }
            // A process of another namespace may have the same number: the end of a process is a
            // hint, and the lock decides.
            pause(left.min(LOOK_AGAIN), self.process.as_ref())
                .map_err(|e| self.failed("cannot wait for", e))?;
        }
        Ok(true)
    }

    /// Kills the process. Only a process that has this very volume open is ever killed.
    pub fn kill(&self) -> Result<(), CliError> {
        match &self.process {
            Some(process) if self.has_it_open() => pidfd_send_signal(process, Signal::KILL)
                .map_err(|e| self.failed("cannot kill", e.into())),
            _ => Err(self.failed("not found here:", std::io::ErrorKind::NotFound.into())),
        }
    }

    fn failed(&self, what: &str, error: std::io::Error) -> CliError {
        CliError::Failed(format!(
            "{what} process {}, which holds {}: {error}",
            self.pid,
            self.volume.display()
        ))
    }
}

/// Opens a volume, in a single file or of several components. One whose mount is gone but whose
/// daemon still writes back (umount(8) does not wait for that) is waited for; one that is mounted
/// is refused at once.
pub fn open_when_free(
    volume: &Path,
    mode: OpenMode,
    env: &Env,
) -> Result<Arc<dyn BlockDevice>, CompositeError> {
    when_free(volume, || open(volume, mode, env))
}

/// The same for a volume that must be of several components.
pub fn open_composite_when_free(
    volume: &Path,
    env: &Env,
) -> Result<CompositeVolume, CompositeError> {
    when_free(volume, || CompositeVolume::open(volume, OpenMode::ReadWrite, env))
}

fn process(pid: u32) -> Option<OwnedFd> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    raw.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
}

/// Waits for less than a second, or until the process ends.
fn pause(time: Duration, process: Option<&OwnedFd>) -> std::io::Result<()> {
    let time = Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
    match process {
        Some(process) => poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&time)),
        None => poll(&mut [], Some(&time)),
    }?;
    Ok(())
}

fn when_free<T>(
    volume: &Path,
    open: impl Fn() -> Result<T, CompositeError>,
) -> Result<T, CompositeError> {
    // A writer or a reader has it open.
    let in_use = |opened: &Result<T, CompositeError>| match opened {
        Err(CompositeError::Device(DeviceError::InUse { writing, .. })) => Some(*writing),
        _ => None,
    };
    let mut opened = open();
    if in_use(&opened).is_none() || mounted(volume) {
        return opened;
    }
    // The lock does not name readers. The reader may be about to end: the daemon of a read-only
    // mount that umount(8) has ended.
    for _ in 0..READER_LOOKS {
        if in_use(&opened) != Some(false) {
            break;
        }
        if let Err(error) = pause(LOOK_AGAIN, None) {
            tracing::debug!(%error, "a pause ended early");
        }
        opened = open();
    }
    if in_use(&opened) != Some(true) {
        return opened;
    }
    let holder = Holder::of(volume);
    if let Some(holder) = &holder {
        eprintln!(
            "ferry: {}: waits for process {}, which still has it open; Ctrl-C gives up",
            volume.display(),
            holder.pid
        );
    }
    if let Some(holder) = holder
        && let Err(error) = holder.wait(if is_served(holder.pid) { STOPPING } else { CLOSING })
    {
        tracing::debug!(%error, "waiting for the last user of a volume");
    }
    open()
}

fn open(volume: &Path, mode: OpenMode, env: &Env) -> Result<Arc<dyn BlockDevice>, CompositeError> {
    if CompositeVolume::is_at(volume) {
        return Ok(Arc::new(CompositeVolume::open(volume, mode, env)?));
    }
    let device = FileDevice::open(volume, mode, env)?;
    // Opening the volume reports any other read error better.
    if matches!(ComponentHeader::read(&device), Ok(Some(_))) {
        return Err(CompositeError::OneComponent(volume.into()));
    }
    Ok(Arc::new(device))
}

/// The message for a volume that could not be opened: which process has it, and where it is
/// mounted.
pub fn explain(volume: &Path, error: &CompositeError) -> CliError {
    CliError::Failed(match error {
        CompositeError::Device(DeviceError::InUse { writing: true, pid, .. }) => {
            match mounts::find(volume) {
                Ok(Some(mount)) if mount.is_ferry() => {
                    format!("{error}, mounted on {}: unmount it first", mount.target.display())
                }
                _ if is_served(*pid) => format!("{error}, `ferry serve`: stop that first"),
                _ => format!("{error}: wait until that has ended"),
            }
        }
        other => other.to_string(),
    })
}

/// Whether that process is a server.
fn is_served(pid: u32) -> bool {
    socket::names(clients::PREFIX)
        .is_ok_and(|names| names.contains(&format!("{}{pid}", clients::PREFIX)))
}

/// Whether this process sees a mount of it. If the table of mounts cannot be read, the answer is
/// yes.
pub fn mounted(volume: &Path) -> bool {
    let volume = volume.canonicalize().unwrap_or_else(|_| volume.into());
    mounts::list().map_or(true, |all| all.iter().any(|m| m.is_ferry() && m.source == volume))
}

/// The process that has the volume open for writing, if there is one.
fn holder_pid(volume: &Path, env: &Env) -> Option<u32> {
    match FileDevice::open(volume, OpenMode::ReadOnly, env) {
        Err(DeviceError::InUse { pid, .. }) => Some(pid),
        _ => None,
    }
}
