//! `ferry umount`: the mount goes, and the daemon behind it has closed the volume when the command returns.

use std::path::Path;

use ferry_fuse::Unmount;

use crate::cli::UmountArgs;
use crate::error::CliError;
use crate::holder::Holder;
use crate::mounts::{self, Mount};

/// Runs the command.
pub fn run(args: &UmountArgs) -> Result<(), CliError> {
    let place = &args.mountpoint;
    let mount = mounts::find(place).map_err(CliError::path(place, "cannot read the table of mounts"))?;
    let mount = mount.filter(Mount::is_ferry).ok_or_else(|| CliError::NotMounted(place.clone()))?;
    mounts::must_be_reached(&mount)?;
    let holder = Holder::of(&mount.source);
    detach(&mount, args)?;
    match holder {
        Some(holder) if args.force => end_hung(&holder, &mount, args),
        Some(holder) if !args.lazy => wait(&holder, &mount, args),
        _ => Ok(()),
    }
}

fn wait(holder: &Holder, mount: &Mount, args: &UmountArgs) -> Result<(), CliError> {
    let timeout = args.timeout.unwrap_or(UmountArgs::TIMEOUT);
    if holder.wait(timeout)? {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{}: unmounted, but its daemon (process {}) still writes to {} after {} s: wait for it, or end it with `kill -9 {}`; \
         what was synced is safe",
        mount.target.display(),
        holder.pid,
        mount.source.display(),
        timeout.as_secs(),
        holder.pid,
    )))
}

/// The mount is gone; a daemon that works now writes back what it holds and ends. One that does not is killed: as long as it
/// lives, requests that it has taken and not answered keep their callers.
fn end_hung(holder: &Holder, mount: &Mount, args: &UmountArgs) -> Result<(), CliError> {
    if holder.wait(args.timeout.unwrap_or(UmountArgs::TIMEOUT_FORCED))? {
        return Ok(());
    }
    eprintln!(
        "ferry: {}: its daemon (process {}) does not end and is killed; what was synced is safe",
        mount.target.display(),
        holder.pid
    );
    holder.kill()?;
    wait(holder, mount, args)
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
    let dead = rustix::fs::statvfs(target).is_err_and(|e| mounts::says_dead(&e.into()));
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
