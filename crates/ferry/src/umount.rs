//! `ferry umount`: ends the mount; when the command returns, the daemon behind it has closed the
//! volume.
//!
//! An ended mount reports no errors. So the command asks before whether everything in memory can be
//! written.

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::LocalFs;
use ferry_fuse::Unmount;
use ferry_journal::inspect::log_start;
use rustix::process::{Uid, geteuid};
use serde_json::Value;

use crate::asked::{self, End, Fate};
use crate::cli::UmountArgs;
use crate::control::{explain, open as open_on, read_stats};
use crate::error::CliError;
use crate::holder::{Holder, LOOK_AGAIN};
use crate::location::Location;
use crate::mounts::{self, Mount};
use crate::open::{self, How, open_when_free};
use crate::remote;
use crate::size::format_bytes;
use crate::socket;
use crate::waiting::pause;

/// If the wait takes longer than this, the command says what it waits for.
const SILENT_TIME_MAX: Duration = Duration::from_secs(1);
/// The time between two messages of how far the upload of a local log is.
const TELL_EVERY: Duration = Duration::from_secs(2);

/// What a daemon says when everything in memory shall be on disk.
enum Synced {
    /// Whether everything is, and which process the daemon is, if it says so.
    Asked(Result<(), CliError>, Option<u32>),
    /// The daemon died before it answered.
    Died,
}

/// Runs the command.
pub fn run(args: &UmountArgs) -> Result<(), CliError> {
    let mount = mounts::find_only(&args.mountpoint)?;
    mounts::must_be_reached(&mount)?;
    must_be_allowed(&mount, geteuid())?;
    let waits = !(args.force || args.lazy);
    // Asked before who has the volume: the kernel closes the files of a killed daemon some time
    // after its end.
    match asked::fate(&mount) {
        Fate::Lives => {}
        Fate::Awaited if waits => return Err(asked::awaited(&mount)),
        Fate::Awaited => return detach(&mount, args),
        Fate::Died => {
            detach(&mount, args)?;
            return say_died(&mount, waits);
        }
    }
    let writer = holder_of(&mount);
    if waits {
        asked::must_answer(&mount.target)?;
    }
    let mut synced = if waits { sync(&mount, args)? } else { Synced::Asked(Ok(()), None) };
    // The first sync behind a kill of the daemon says that changes were lost then.
    let mut has_lost = false;
    if !mount.is_remote() && matches!(synced, Synced::Asked(Err(_), _)) {
        synced = sync(&mount, args)?;
        has_lost = matches!(synced, Synced::Asked(Ok(()), _));
    }
    let Synced::Asked(synced, daemon) = synced else {
        detach(&mount, args)?;
        return say_died(&mount, waits);
    };
    if waits && !mount.is_remote() {
        upload(&mount, args.timeout.unwrap_or(UmountArgs::TIMEOUT))?;
    }
    let figures = remote::figures(&mount).ok().flatten();
    let refused = figures.as_ref().and_then(refusal);
    let unsent = if args.force {
        remote::figures(&mount).ok().flatten().filter(remote::is_away)
    } else {
        None
    };
    if args.force {
        remote::abandon(&mount);
    }
    let timeout = args.timeout.unwrap_or(UmountArgs::TIMEOUT);
    let end = (waits && !mount.is_remote()).then(|| End::of(&mount, timeout)).flatten();
    let holder = writer.or_else(|| daemon.map(|pid| Holder::reader(&mount.volume(), pid)));
    detach(&mount, args)?;
    match holder {
        Some(holder) if args.force => end_hung(&holder, &mount, args),
        Some(holder) if !args.lazy => wait(&holder, &mount, args),
        _ => Ok(()),
    }?;
    match end.map(End::told) {
        Some(Err(why)) => return Err(not_closed(&mount, &why)),
        // No daemon answers, so the volume is checked. A process that only read it has closed
        // nothing.
        None if waits && mount.is_local() && !mount.read_only => must_be_closed(&mount)?,
        _ => {}
    }
    unsent.as_ref().map_or(Ok(()), |figures| may_be_lost(&mount, figures))?;
    if has_lost {
        eprintln!(
            "ferry: {}: all that is there is durable; changes that were not synced were lost when the daemon was killed, the mount's log says when",
            mount.target.display()
        );
    }
    let has_all = figures.as_ref().is_some_and(has_lost_nothing);
    synced.map_err(|why| {
        let target = mount.target.display();
        let lost = match (has_all, &refused) {
            (true, None) => "it had all changes that were answered; ",
            (true, Some(_)) => "",
            (false, _) => "the mount's log names what is lost; ",
        };
        let why = refused.unwrap_or_else(|| why.to_string());
        let but = if mount.is_remote() {
            "its server did not say that everything is durable"
        } else {
            "not everything could be written"
        };
        CliError::Failed(format!(
            "{target}: unmounted, but {but} ({why}): {lost}what was synced before is safe"
        ))
    })
}

/// Refuses what the kernel allows only the user who has mounted it, and root.
fn must_be_allowed(mount: &Mount, user: Uid) -> Result<(), CliError> {
    match mount.owner.filter(|owner| *owner != user.as_raw() && !user.is_root()) {
        None => Ok(()),
        Some(owner) => Err(CliError::Failed(format!(
            "{}: {} has mounted it: only {} may unmount it",
            mount.target.display(),
            mounts::user(owner),
            if owner == 0 { "root" } else { "that user, or root," }
        ))),
    }
}

/// The daemon of a mount, if it may write to the volume or did so: when another process of this
/// machine has taken the volume over, that one has it, and is not waited for nor killed.
fn holder_of(mount: &Mount) -> Option<Holder> {
    let volume = mount.volume();
    let writer = Holder::of(&volume)?;
    match asked::daemon(mount) {
        Some(pid) if matches!(volume, Location::Store(_)) && pid != writer.pid => {
            Some(Holder::reader(&volume, pid))
        }
        _ => Some(writer),
    }
}

fn not_closed(mount: &Mount, why: &str) -> CliError {
    CliError::Failed(format!(
        "{}: unmounted, but the volume was not closed cleanly: {why}; what was synced before is safe if the disk has it: `ferry fsck {}` looks",
        mount.target.display(),
        mount.source.display()
    ))
}

/// Whether the volume was closed cleanly: it is marked so until the next write.
fn must_be_closed(mount: &Mount) -> Result<(), CliError> {
    let volume = mount.volume();
    let said = open_when_free(&volume, How::Read, &Env::real())
        .map_err(|error| open::explain(&volume, &error).to_string())
        .and_then(|opened| {
            let sb = LocalFs::read_superblock(&opened.device).map_err(|error| error.to_string())?;
            log_start(&opened.device, &sb.geometry()).map_err(|error| error.to_string())
        });
    let why = match said {
        Ok(start) if start.clean => return Ok(()),
        Ok(_) => "it is as after a crash".to_owned(),
        Err(why) => why,
    };
    Err(CliError::Failed(format!(
        "{}: unmounted, but its daemon could not be asked how it closed the volume, and the volume does not say that it was closed cleanly: \
         {why}; what was synced before is safe if the disk has it: `ferry fsck {}` looks",
        mount.target.display(),
        mount.source.display()
    )))
}

/// Reports that the result of the daemon's last writes is unknown: an ordinary unmount must not
/// hide that.
fn say_died(mount: &Mount, fails: bool) -> Result<(), CliError> {
    let safe = if mount.is_remote() {
        "what was synced is safe on its server".to_owned()
    } else {
        format!(
            "what was synced is safe in {}, which recovers when it is mounted again",
            mount.source.display()
        )
    };
    let said = format!(
        "{}: unmounted; its daemon has died before, so what was not synced may be lost; {safe}",
        mount.target.display()
    );
    if fails {
        return Err(CliError::Failed(said));
    }
    eprintln!("ferry: {said}");
    Ok(())
}

/// Whether the server of a mount, which does not answer it, has all changes that were answered, as
/// far as the mount knows.
fn has_lost_nothing(figures: &Value) -> bool {
    let none = |at: &str| figures.pointer(at).and_then(Value::as_u64) == Some(0);
    remote::is_away(figures)
        && ["replay_log_changes", "early_acknowledged", "lost_changes"]
            .iter()
            .all(|key| none(&format!("/connection/{key}")))
        && figures.pointer("/fuse/operations/write/errors").is_none_or(|errors| *errors == 0)
}

/// Why the server does not serve this mount, or no longer: it has evicted it, for example.
fn refusal(figures: &Value) -> Option<String> {
    figures["connection"]["refused"].as_str().map(socket::printable)
}

/// Warns of changes that the mount can no longer send to its server.
fn may_be_lost(mount: &Mount, figures: &Value) -> Result<(), CliError> {
    let of = |key: &str| figures["connection"][key].as_u64().unwrap_or_default();
    // A request that only returns something is no loss, and a caller that waits gets an error.
    let (unconfirmed, unanswered) = (of("replay_log_changes"), of("early_acknowledged"));
    if unconfirmed + unanswered == 0 {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{}: unmounted without its server: of {} changes that it had not said to be durable those are lost that it does not have \
         ({unanswered} were not answered yet); what was synced is safe",
        mount.target.display(),
        unconfirmed + unanswered,
    )))
}

/// Asks the daemon to write everything. An error: no daemon answers, and nothing was done.
fn sync(mount: &Mount, args: &UmountArgs) -> Result<Synced, CliError> {
    let (tell, told) = mpsc::channel();
    let (asked, timeout) = (mount.clone(), args.timeout.unwrap_or(UmountArgs::TIMEOUT));
    let asking = move || {
        let written = write_everything(&asked);
        if asked::is_dead(&asked.target) {
            return drop(tell.send(Synced::Died));
        }
        let daemon = own_stats(&asked).ok().and_then(|stats| stats["fuse"]["daemon"].as_u64());
        drop(tell.send(Synced::Asked(written, daemon.and_then(|pid| u32::try_from(pid).ok()))));
    };
    std::thread::Builder::new()
        .name("ferry-sync".into())
        .spawn(asking)
        .map_err(|e| CliError::Failed(format!("cannot start a thread: {e}")))?;
    // The user is told what the command waits for: at once if it is known to take time.
    let figures = remote::figures(mount).ok().flatten();
    let away = figures.as_ref().is_some_and(remote::is_away);
    let refused = figures.as_ref().and_then(refusal);
    // A server that refuses the mount answers at once: nothing is waited for.
    let silent =
        if away && refused.is_none() { Duration::ZERO } else { SILENT_TIME_MAX.min(timeout) };
    let answer = told.recv_timeout(silent).or_else(|_| {
        say_sync(mount, away, refused.as_deref(), timeout);
        told.recv_timeout(timeout.saturating_sub(silent))
    });
    match answer {
        // Even root may not look into another user's mount; the daemon or the volume says how
        // closing ended.
        Ok(Synced::Asked(Err(CliError::Path { source, .. }), daemon))
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            Ok(Synced::Asked(Ok(()), daemon))
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

/// Waits until the store has what only a local log has (`durability=local`). An error: it has not,
/// and nothing was done.
fn upload(mount: &Mount, timeout: Duration) -> Result<(), CliError> {
    let clock = Env::real().clock;
    let begun = clock.monotonic();
    let mut told = SILENT_TIME_MAX;
    loop {
        let Ok(stats) = read_stats(&Location::from(&mount.target)) else { return Ok(()) };
        let of = |key: &str| stats["store"][key].as_u64().unwrap_or_default();
        let (objects, bytes) = (of("waiting_objects"), of("waiting_bytes"));
        let waited = clock.monotonic() - begun;
        // What has come since is not waited for: a busy mount would never end.
        if objects == 0 || Duration::from_nanos(of("waiting_oldest_ns")) < waited {
            return Ok(());
        }
        let target = mount.target.display();
        let left = format!("{objects} objects, {}, are not in its store yet", format_bytes(bytes));
        let held = stats["store"]["held"]["reason"].as_str();
        let why = held.map_or(String::new(), |why| format!(" ({})", socket::printable(why)));
        if waited >= timeout {
            return Err(CliError::Failed(format!(
                "{target}: still mounted: after {} s {left}{why}. A longer --timeout waits; --force unmounts it, and the local log \
                 has them until the volume is mounted on this machine again",
                timeout.as_secs()
            )));
        }
        if waited >= told {
            eprintln!(
                "ferry: {target}: uploads before it is unmounted: {left}{why}; Ctrl-C leaves it mounted"
            );
            told = waited + TELL_EVERY;
        }
        pause(LOOK_AGAIN);
    }
}

/// As `ferry sync`, except for earlier write-back errors, which each descriptor of the file has
/// reported. The kernel would report them once more. So the daemon is asked whether it accepted
/// everything that the kernel has written back now.
fn write_everything(mount: &Mount) -> Result<(), CliError> {
    let target = &mount.target;
    let file = open_on(target)?;
    let refused = || {
        let stats = own_stats(mount)?;
        Ok::<_, CliError>(
            stats["fuse"]["operations"]["write"]["errors"].as_u64().unwrap_or_default(),
        )
    };
    let before = refused()?;
    let handed_over = rustix::fs::syncfs(&file);
    ferry_fuse::control::sync(&file).map_err(|e| explain(target, "cannot sync", e))?;
    if refused()? > before {
        // What the request made the kernel write back is reported here.
        handed_over
            .and_then(|()| rustix::fs::syncfs(&file))
            .map_err(|e| explain(target, "cannot sync", e.into()))?;
    }
    Ok(())
}

/// The statistics of a mount; of a remote one what it knows without its server.
fn own_stats(mount: &Mount) -> Result<Value, CliError> {
    let own = remote::figures(mount)?;
    own.map_or_else(|| read_stats(&Location::from(&mount.target)), Ok)
}

fn say_sync(mount: &Mount, away: bool, refused: Option<&str>, timeout: Duration) {
    let what = match (mount.is_remote(), away, refused) {
        (true, _, Some(why)) => format!("its server refuses this mount ({why}): waits for it"),
        (true, true, None) => {
            "its server is away, and may not have everything: waits for it".into()
        }
        (true, false, None) => "waits until its server has everything".into(),
        (false, ..) => "waits until everything is written".into(),
    };
    eprintln!(
        "ferry: {}: {what}, up to {} s; Ctrl-C gives up and leaves it mounted, --force ends it without waiting",
        mount.target.display(),
        timeout.as_secs()
    );
}

fn wait(holder: &Holder, mount: &Mount, args: &UmountArgs) -> Result<(), CliError> {
    let timeout = args.timeout.unwrap_or(UmountArgs::TIMEOUT);
    let silent = SILENT_TIME_MAX.min(timeout);
    if holder.wait(silent)? {
        return Ok(());
    }
    eprintln!(
        "ferry: {}: unmounted; waits until its daemon (process {}) has closed {}",
        mount.target.display(),
        holder.pid,
        mount.source.display()
    );
    if holder.wait(timeout.saturating_sub(silent))? {
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

/// Waits for the daemon of an ended mount. A healthy daemon writes back what it holds and ends. A
/// daemon that hangs is killed: as long as it lives, the requests that it has not answered block
/// their callers.
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

/// Removes a mount whose daemon has died. Returns whether there was one.
pub fn clear_dead(target: &Path) -> Result<bool, CliError> {
    let Some(mount) =
        mounts::at(target).map_err(CliError::path(target, "cannot read the table of mounts"))?
    else {
        return Ok(false);
    };
    let dead = mount.is_ferry() && asked::has_died(&mount);
    if dead {
        detach_dead(target)?;
    }
    Ok(dead)
}

/// Removes a mount whose daemon is known to have died.
pub fn detach_dead(target: &Path) -> Result<(), CliError> {
    ferry_fuse::unmount(target, Unmount::Lazy).map_err(|e| CliError::Failed(e.to_string()))
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
        ferry_fuse::Error::Helper(said) if said.contains("busy") => {
            CliError::Busy(mount.target.clone())
        }
        other => CliError::Failed(other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_only_if_the_server_has_all_and_no_write_has_failed() {
        let of = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let text = r#"{"connection": {"connected": false, "replay_log_changes": 0,
            "early_acknowledged": 0, "lost_changes": 0}, "fuse": {"operations": {"write": {"errors": 0}}}}"#;
        assert!(has_lost_nothing(&of(text)));
        for key in ["replay_log_changes", "early_acknowledged", "lost_changes", "errors"] {
            let more = text.replace(&format!("\"{key}\": 0"), &format!("\"{key}\": 1"));
            assert!(!has_lost_nothing(&of(&more)), "{more}");
        }
        assert!(!has_lost_nothing(&of(&text.replace("false", "true"))), "another error");
        assert!(!has_lost_nothing(&Value::Null));
    }

    #[test]
    fn only_root_and_the_user_who_has_mounted_unmount() {
        let mount = |owner: Option<u32>| Mount {
            id: 1,
            parent: 0,
            target: "/mnt".into(),
            source: "/a.ferry".into(),
            fs_type: mounts::FS_TYPE.into(),
            device: "0:1".into(),
            owner,
            read_only: false,
        };
        let may = |owner: Option<u32>, user: u32| {
            must_be_allowed(&mount(owner), Uid::from_raw(user)).map_err(|error| error.to_string())
        };
        for (owner, user) in [(Some(0), 0), (Some(1000), 0), (Some(1000), 1000), (None, 1000)] {
            assert_eq!(may(owner, user), Ok(()), "{owner:?} {user}");
        }
        assert_eq!(
            may(Some(0), 1000),
            Err("/mnt: root has mounted it: only root may unmount it".into())
        );
        let said = may(Some(1001), 1000).expect_err("it is another user's");
        assert_eq!(said, "/mnt: user 1001 has mounted it: only that user, or root, may unmount it");
    }
}
