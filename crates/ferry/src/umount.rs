//! `ferry umount`: the mount goes, and the daemon behind it has closed the volume when the command returns.
//!
//! Nobody hears what becomes of a mount that is gone, so whether all that is in memory can be written is asked before.

use std::io;
use std::path::Path;
use std::sync::mpsc;

use ferry_fuse::Unmount;
use serde_json::Value;

use crate::cli::UmountArgs;
use crate::control::{explain, open, read_stats};
use crate::error::CliError;
use crate::holder::Holder;
use crate::mounts::{self, Mount};
use crate::remote;

/// Runs the command.
pub fn run(args: &UmountArgs) -> Result<(), CliError> {
    let place = &args.mountpoint;
    let mount = mounts::find(place).map_err(CliError::path(place, "cannot read the table of mounts"))?;
    let mount = mount.filter(Mount::is_ferry).ok_or_else(|| CliError::NotMounted(place.clone()))?;
    mounts::must_be_reached(&mount)?;
    let writer = Holder::of(&mount.source);
    let (synced, daemon) = if args.force || args.lazy { (Ok(()), None) } else { sync(&mount, args)? };
    let unsent = if args.force { remote::figures(&mount.target).filter(is_away) } else { None };
    let holder = writer.or_else(|| daemon.map(|pid| Holder::reader(&mount.source, pid)));
    detach(&mount, args)?;
    match holder {
        Some(holder) if args.force => end_hung(&holder, &mount, args),
        Some(holder) if !args.lazy => wait(&holder, &mount, args),
        _ => Ok(()),
    }?;
    unsent.as_ref().map_or(Ok(()), |figures| may_be_lost(&mount, figures))?;
    synced.map_err(|why| {
        let target = mount.target.display();
        let but = if mount.is_remote() {
            "its server did not say that everything is durable"
        } else {
            "not everything could be written"
        };
        CliError::Failed(format!("{target}: unmounted, but {but} ({why}): the mount's log names what is lost; what was synced before is safe"))
    })
}

fn is_away(figures: &Value) -> bool {
    figures["connection"]["connected"] == false
}

/// Nobody brings to a server any more what the mount still had.
fn may_be_lost(mount: &Mount, figures: &Value) -> Result<(), CliError> {
    let of = |key: &str| figures["connection"][key].as_u64().unwrap_or_default();
    let (kept, unanswered) = (of("kept_changes"), of("unanswered_changes"));
    if kept + unanswered == 0 {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{}: unmounted without its server: of {} changes that it had not said to be durable those are lost that it does not have \
         ({unanswered} were not answered yet); what was synced is safe",
        mount.target.display(),
        kept + unanswered,
    )))
}

/// Whether all that is in memory is on disk now, and which process is the daemon, where it says so. The outer error: nobody answers, and
/// nothing was done.
fn sync(mount: &Mount, args: &UmountArgs) -> Result<(Result<(), CliError>, Option<u32>), CliError> {
    let (tell, told) = mpsc::channel();
    let (target, timeout) = (mount.target.clone(), args.timeout.unwrap_or(UmountArgs::TIMEOUT));
    let asking = move || {
        let written = write_everything(&target);
        let daemon = read_stats(&target).ok().and_then(|stats| stats["fuse"]["daemon"].as_u64());
        drop(tell.send((written, daemon.and_then(|pid| u32::try_from(pid).ok()))));
    };
    std::thread::Builder::new()
        .name("ferry-sync".into())
        .spawn(asking)
        .map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    match told.recv_timeout(timeout) {
        // Root itself may not look into another user's mount.
        Ok((Err(CliError::Path { source, .. }), daemon))
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            Ok((Ok(()), daemon))
        }
        Ok(synced) => Ok(synced),
        Err(_) => Err(CliError::Failed(format!(
            "{}: {} after {} s; a longer --timeout waits, --force ends it at once",
            mount.target.display(),
            if mount.is_remote() {
                "its server has not answered"
            } else {
                "its daemon has not written everything"
            },
            timeout.as_secs()
        ))),
    }
}

/// As `ferry sync`; but write-back that failed before, of which each descriptor of the file has been told, does not count. The kernel would
/// report it once more, so the daemon is asked whether it took all that the kernel has handed over now.
fn write_everything(target: &Path) -> Result<(), CliError> {
    if is_dead(target) {
        return Ok(());
    }
    let file = open(target)?;
    let refused = || {
        let stats = read_stats(target)?;
        Ok::<_, CliError>(stats["fuse"]["operations"]["write"]["errors"].as_u64().unwrap_or_default())
    };
    let before = refused()?;
    let handed_over = rustix::fs::syncfs(&file);
    if refused()? > before {
        handed_over.map_err(|e| explain(target, "cannot sync", e.into()))?;
    }
    ferry_fuse::control::sync(&file).map_err(|e| explain(target, "cannot sync", e))
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
    let dead = is_dead(target);
    if dead {
        ferry_fuse::unmount(target, Unmount::Lazy).map_err(|e| CliError::Failed(e.to_string()))?;
    }
    Ok(dead)
}

/// Whether the daemon behind a mount is gone. Attributes would come from the kernel's cache, as if it were alive; totals are always asked for.
fn is_dead(target: &Path) -> bool {
    rustix::fs::statvfs(target).is_err_and(|e| mounts::says_dead(&e.into()))
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
