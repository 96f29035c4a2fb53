//! `ferry umount`: the mount goes, and the daemon behind it has closed the volume when the command returns.

use std::path::Path;
use std::time::Duration;

use ferry_device::{DeviceError, Env, FileDevice, OpenMode};
use ferry_fuse::Unmount;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::cli::UmountArgs;
use crate::error::CliError;
use crate::mounts::{self, Mount};

/// How long to wait between two looks at a daemon that cannot be waited for itself (another pid namespace).
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(args: &UmountArgs) -> Result<(), CliError> {
    let place = &args.mountpoint;
    let mount = mounts::find(place).map_err(CliError::path(place, "cannot read the table of mounts"))?;
    let mount = mount.filter(Mount::is_ferry).ok_or_else(|| CliError::NotMounted(place.clone()))?;
    let holder = Holder::of(&mount.source);
    detach(&mount, args)?;
    match holder {
        Some(holder) if !args.lazy => holder.wait(&mount, args.timeout),
        _ => Ok(()),
    }
}

/// Takes a mount away whose daemon has died. Says whether there was one.
pub fn clear_dead(target: &Path) -> Result<bool, CliError> {
    let Some(mount) =
        mounts::at(target).map_err(CliError::path(target, "cannot read the table of mounts"))?
    else {
        return Ok(false);
    };
    if !mount.is_ferry() || Holder::of(&mount.source).is_some() {
        return Ok(false);
    }
    // Attributes would come from the kernel's cache, as if the daemon were alive; totals are always asked for.
    let dead = rustix::fs::statvfs(target).is_err_and(|e| matches!(e, Errno::NOTCONN | Errno::CONNABORTED));
    if dead {
        ferry_fuse::unmount(target, Unmount::Lazy).map_err(|e| CliError::Failed(e.to_string()))?;
    }
    Ok(dead)
}

fn detach(mount: &Mount, args: &UmountArgs) -> Result<(), CliError> {
    let how = match args {
        UmountArgs { force: true, .. } => Unmount::Force,
        UmountArgs { lazy: true, .. } => Unmount::Lazy,
        _ => Unmount::Normal,
    };
    ferry_fuse::unmount(&mount.target, how).map_err(|error| match error {
        ferry_fuse::Error::Unmount { error, .. } if error.raw_os_error() == Some(libc::EBUSY) => {
            CliError::Busy(mount.target.clone())
        }
        ferry_fuse::Error::Helper(said) if said.contains("busy") => CliError::Busy(mount.target.clone()),
        other => CliError::Failed(other.to_string()),
    })
}

/// The process that has the volume open.
struct Holder {
    pid: u32,
}

impl Holder {
    fn of(volume: &Path) -> Option<Self> {
        holder_pid(volume, &Env::real()).map(|pid| Self { pid })
    }

    /// Waits until it has given the volume up: that is when everything is on disk.
    fn wait(&self, mount: &Mount, timeout: Duration) -> Result<(), CliError> {
        let env = Env::real();
        let end = env.clock.monotonic() + timeout;
        let process = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        while holder_pid(&mount.source, &env) == Some(self.pid) {
            let left = end.saturating_sub(env.clock.monotonic());
            if left.is_zero() {
                return Err(CliError::Failed(format!(
                    "{}: unmounted, but its daemon (process {}) still writes to {} after {} s; wait for it, or end it with \
                     `kill -9 {}`: what was synced is safe",
                    mount.target.display(),
                    self.pid,
                    mount.source.display(),
                    timeout.as_secs(),
                    self.pid
                )));
            }
            // A process of another namespace may carry the same number, so its end is a hint and the lock decides.
            let slice = left.min(LOOK_AGAIN);
            let slice = Timespec { tv_sec: 0, tv_nsec: i64::from(slice.subsec_nanos()) };
            let waited = match &process {
                Some(process) => poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&slice)),
                None => poll(&mut [], Some(&slice)),
            };
            waited.map_err(|e| CliError::Failed(format!("cannot wait for process {}: {e}", self.pid)))?;
        }
        Ok(())
    }
}

/// Who has the volume open for writing, if anybody.
fn holder_pid(volume: &Path, env: &Env) -> Option<u32> {
    match FileDevice::open(volume, OpenMode::ReadOnly, env) {
        Err(DeviceError::InUse { pid, .. }) => Some(pid),
        _ => None,
    }
}
