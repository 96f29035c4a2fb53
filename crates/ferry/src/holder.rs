//! The process that has a volume open: finds it, and waits until it has closed the volume.

use std::path::PathBuf;
use std::time::Duration;

use ferry_device::{DeviceError, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_object::{lock_files, owner_here};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::CliError;
use crate::location::Location;
use crate::waiting::pause;

/// The interval between two checks of which process has the volume.
pub const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A process that has a volume open.
pub struct Holder {
    /// The process number in its own pid namespace.
    pub pid: u32,
    volume: Location,
    env: Env,
    /// It only reads: other processes may read, too, and the lock does not name this one.
    reading: bool,
    /// `None`: the number is not valid here, because of another namespace or because the process
    /// has ended.
    process: Option<OwnedFd>,
}

impl Holder {
    /// The process that may write to the volume, if there is one.
    pub fn of(volume: &Location) -> Option<Self> {
        let env = Env::real();
        let pid = holder_pid(volume, &env)?;
        Some(Self { pid, volume: volume.clone(), env, reading: false, process: process(pid) })
    }

    /// The process `pid`, which reads the volume.
    pub fn reader(volume: &Location, pid: u32) -> Self {
        Self { pid, volume: volume.clone(), env: Env::real(), reading: true, process: process(pid) }
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
        let Some(open) = self.open_files() else { return false };
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid));
        files.is_ok_and(|files| {
            files
                .flatten()
                .any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to.starts_with(&open)))
        })
    }

    /// A file that every process that uses the volume has open, or the directory of some of which
    /// it has one open.
    fn open_files(&self) -> Option<PathBuf> {
        match &self.volume {
            Location::Path(path) => Some(path.clone()),
            Location::Store(url) => lock_files(url),
            // Who reads a snapshot has nothing locked.
            Location::Snapshot(..) | Location::Server(_) => None,
        }
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
            pause_for(left.min(LOOK_AGAIN), self.process.as_ref())
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
            self.pid, self.volume
        ))
    }
}

fn process(pid: u32) -> Option<OwnedFd> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    raw.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
}

/// Waits for less than a second, or until the process ends.
fn pause_for(time: Duration, process: Option<&OwnedFd>) -> std::io::Result<()> {
    let Some(process) = process else {
        pause(time);
        return Ok(());
    };
    let time = Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&time))?;
    Ok(())
}

/// The process that has the volume open for writing, if there is one.
fn holder_pid(volume: &Location, env: &Env) -> Option<u32> {
    match volume {
        Location::Path(path) => match FileDevice::open(path, OpenMode::ReadOnly, env) {
            Err(DeviceError::InUse { pid, .. }) => Some(pid),
            _ => None,
        },
        Location::Store(url) => owner_here(url),
        Location::Snapshot(..) | Location::Server(_) => None,
    }
}
