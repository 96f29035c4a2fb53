//! `ferry snapshot`: makes, shows and deletes snapshots. The process that has a volume in a
//! store open does it; if there is none, this one opens the volume. Those of a volume in a file are
//! files beside it (`snapfile.rs`).

use std::io;
use std::path::Path;

use ferry_device::FileLock;
use ferry_env::{Env, Utc};
use ferry_object::{
    CloneName, ObjectDevice, ObjectError, SNAPSHOTS_MAX, Snapshot, SnapshotSizes,
    check_snapshot_name,
};
use serde_json::Value;

use crate::cli::{SnapshotArgs, SnapshotCommand, SnapshotCreateArgs};
use crate::control::{Control, print};
use crate::error::CliError;
use crate::location::Location;
use crate::mounts;
use crate::object;
use crate::open::{
    How, OpenError, explain, mounted, open_when_free, sizes_in_store, snapshots_in_store,
};
use crate::schedule::{PREFIX, Schedule};
use crate::served;
use crate::size::format_bytes;
use crate::snapfile;
use crate::socket::printable;

/// Runs the command.
pub fn run(command: &SnapshotCommand) -> Result<(), CliError> {
    match command {
        SnapshotCommand::Create(args) => create(args),
        SnapshotCommand::List { target, sizes: true, json } => list_sizes(target, *json),
        SnapshotCommand::List { target, sizes: false, json } => list(target, *json),
        SnapshotCommand::Delete(args) => delete(args),
    }
}

fn create(args: &SnapshotCreateArgs) -> Result<(), CliError> {
    let SnapshotCreateArgs { target, name, schedule } = args;
    let volume = volume_of(target)?;
    if let Some(schedule) = schedule {
        return follow(schedule, target, &volume);
    }
    let name = name.as_deref().unwrap_or_default();
    check_snapshot_name(name).map_err(|error| CliError::Usage(error.to_string()))?;
    make_and_say(target, &volume, name)
}

/// Makes the snapshot that is due, and deletes those that the schedule does not need any more.
fn follow(schedule: &Schedule, target: &Location, volume: &Location) -> Result<(), CliError> {
    let mut made = Schedule::made(snapshots_of(target, volume)?);
    let now = Env::real().clock.wall().as_secs();
    if schedule.is_due(&made, now) {
        let name = dated(PREFIX, now);
        make_and_say(target, volume, &name)?;
        made.push(Snapshot { name, made_secs: now });
    }
    for ahead in Schedule::ahead(&made, now) {
        tracing::warn!(
            "{volume}@{}: its time is still to come, so a clock was wrong: delete it by hand, or it stays until then",
            ahead.name
        );
    }
    for spare in schedule.spare(&made, now) {
        match user_of(volume, &spare.name)? {
            Some(user) => tracing::warn!("{volume}@{}: it stays: {user}", spare.name),
            None => delete_and_say(target, volume, &spare.name)?,
        }
    }
    Ok(())
}

fn make_and_say(target: &Location, volume: &Location, name: &str) -> Result<(), CliError> {
    make(target, volume, name)?;
    print(&format!("{volume}: made the snapshot {name}\n"))
}

/// A name for a snapshot that is made at this time, in seconds since 1970.
pub fn dated(prefix: &str, secs: u64) -> String {
    let Utc { year, month, day, hour, minute, second } = Utc::from_secs(secs);
    format!("{prefix}{year:04}-{month:02}-{day:02}-{hour:02}{minute:02}{second:02}")
}

/// Makes a snapshot of a volume, which `target` names as the user does.
pub fn make(target: &Location, volume: &Location, name: &str) -> Result<(), CliError> {
    let control = sync(target)?;
    if let Location::Path(path) = volume {
        return snapfile::create(path, name);
    }
    add(control, volume, name)
}

/// Makes everything durable that was changed on a volume. Returns the process that has it open.
pub fn sync(target: &Location) -> Result<Option<Control>, CliError> {
    let control = Control::find(target)?;
    match (&control, target) {
        (Some(control), _) => control.sync_volume()?,
        (None, Location::Path(path)) if path.is_file() => must_be_closed(path)?,
        (None, _) => {}
    }
    Ok(control)
}

/// Refuses a volume in a file whose owner cannot be found by its name: a hard link to the file
/// leads to none, nor does another mount namespace.
fn must_be_closed(volume: &Path) -> Result<(), CliError> {
    let holder = FileLock::holder(volume).map_err(CliError::path(volume, "cannot look at"))?;
    match holder.filter(|holder| holder.writing) {
        None => Ok(()),
        Some(holder) => Err(CliError::Failed(format!(
            "{}: process {} has it open under another name, or is closing it: what that has not written back yet would be missing: name its mount point, or try again",
            volume.display(),
            holder.pid
        ))),
    }
}

/// Has the owner of a volume make the pin of a clone. If there is none, this process opens the
/// volume.
pub fn pin(volume: &Location, name: &str) -> Result<(), CliError> {
    add(Control::find(volume)?, volume, name)
}

fn add(control: Option<Control>, volume: &Location, name: &str) -> Result<(), CliError> {
    let Some(control) = control else {
        return alone(volume, |device| device.create_snapshot(name));
    };
    let made = ferry_fuse::control::snapshot_create(&control, name);
    made.map_err(|error| refused(&control, volume, "cannot make a snapshot", name, error))
}

fn delete(args: &SnapshotArgs) -> Result<(), CliError> {
    let SnapshotArgs { target, name } = args;
    let volume = volume_of(target)?;
    if let Some(user) = user_of(&volume, name)? {
        return Err(CliError::Failed(format!("{volume}@{name}: {user}")));
    }
    delete_and_say(target, &volume, name)
}

fn delete_and_say(target: &Location, volume: &Location, name: &str) -> Result<(), CliError> {
    match (volume, Control::find(target)?) {
        (Location::Path(path), _) => snapfile::delete(path, name),
        (_, Some(control)) => {
            let deleted = ferry_fuse::control::snapshot_delete(&control, name);
            deleted.map_err(|e| refused(&control, volume, "cannot delete a snapshot", name, e))
        }
        (_, None) => alone(volume, |device| device.delete_snapshot(name)),
    }?;
    print(&format!("{volume}: deleted the snapshot {name}\n"))
}

/// What to do about a snapshot that is in use on this machine, if it is: if it were deleted, its
/// objects would be missing there after the grace.
fn user_of(volume: &Location, name: &str) -> Result<Option<String>, CliError> {
    let Ok(snapshot) = volume.with_snapshot(name) else { return Ok(None) };
    Ok(if mounted(&snapshot) {
        Some(format!("mounted on this machine: unmount it first (`ferry umount {snapshot}`)"))
    } else {
        let served = served::at(&snapshot)?;
        served.map(|_| "served by this machine: stop its `ferry serve` first".into())
    })
}

fn list(target: &Location, json: bool) -> Result<(), CliError> {
    let snapshots = snapshots_of(target, &volume_of(target)?)?;
    if json {
        let json =
            |one: &Snapshot| object!({ "name": one.name.clone(), "made_secs": one.made_secs });
        let all: Vec<Value> = snapshots.iter().map(json).collect();
        return print(&format!("{:#}\n", Value::from(all)));
    }
    let line =
        |one: &Snapshot| format!("{}  {}\n", Utc::from_secs(one.made_secs), printable(&one.name));
    print(&snapshots.iter().map(line).collect::<String>())
}

/// What the snapshots hold, as the store says: its owner does not know the sizes of objects.
fn sizes_of(target: &Location) -> Result<SnapshotSizes, CliError> {
    let volume = volume_of(target)?;
    let Location::Store(url) = &volume else { return Err(volume.no_snapshots()) };
    sizes_in_store(&volume, url, &Env::real()).map_err(|error| explain(&volume, &error))
}

/// The same for `ferry stats`: as JSON with each snapshot, else with a hint at the list of them.
pub fn figures(target: &Location, json: bool) -> Result<Value, CliError> {
    let SnapshotSizes { held_bytes, alone_bytes } = sizes_of(target)?;
    let mut figures = object!({ "count": alone_bytes.len(), "held_bytes": held_bytes });
    if json {
        figures["snapshots"] = sizes_json(&alone_bytes);
    } else {
        figures["of_each"] = format!("ferry snapshot list --sizes '{target}'").into();
    }
    Ok(figures)
}

fn sizes_json(alone_bytes: &[(Snapshot, u64)]) -> Value {
    let json = |(one, bytes): &(Snapshot, u64)| object!({ "name": one.name.clone(), "made_secs": one.made_secs, "alone_bytes": *bytes });
    alone_bytes.iter().map(json).collect()
}

fn list_sizes(target: &Location, json: bool) -> Result<(), CliError> {
    let SnapshotSizes { held_bytes, alone_bytes } = sizes_of(target)?;
    if json {
        let sizes = object!({ "held_bytes": held_bytes, "snapshots": sizes_json(&alone_bytes) });
        return print(&format!("{sizes:#}\n"));
    }
    let line = |(one, bytes): &(Snapshot, u64)| {
        let (made, alone) = (Utc::from_secs(one.made_secs), format_bytes(*bytes));
        format!("{made}  {alone:>9}  {}\n", printable(&one.name))
    };
    let lines: String = alone_bytes.iter().map(line).collect();
    print(&format!("{lines}all snapshots together hold {}\n", format_bytes(held_bytes)))
}

/// All snapshots of a volume, the oldest one first.
fn snapshots_of(target: &Location, volume: &Location) -> Result<Vec<Snapshot>, CliError> {
    if let Location::Path(path) = volume {
        return snapfile::list(path);
    }
    match (Control::find(target)?, volume) {
        (Some(control), _) => list_of(&control)
            .map_err(|error| refused(&control, volume, "cannot list the snapshots", "", error)),
        (None, Location::Store(url)) => {
            snapshots_in_store(volume, url, &Env::real()).map_err(|error| explain(volume, &error))
        }
        (None, _) => Err(volume.no_snapshots()),
    }
}

/// The volume that is mounted at `target`, or that `target` is.
pub fn volume_of(target: &Location) -> Result<Location, CliError> {
    let volume = mounts::of(target)?.map_or_else(|| target.clone(), |mount| mount.volume());
    match volume {
        Location::Snapshot(..) | Location::Server(_) => Err(volume.not_the_volume()),
        Location::Path(_) if volume.snapshot().is_some() => Err(volume.not_the_volume()),
        Location::Path(_) | Location::Store(_) => Ok(volume),
    }
}

/// Opens a volume that nobody has open, and changes its snapshots.
fn alone(
    volume: &Location,
    change: impl FnOnce(&ObjectDevice) -> Result<(), ObjectError>,
) -> Result<(), CliError> {
    let Location::Store(_) = volume else { return Err(volume.no_snapshots()) };
    let opened = open_when_free(volume, How::Write, &Env::real()).map_err(|error| match error {
        OpenError::Store(ObjectError::InUse { owner, since, pid: None }) => {
            CliError::Failed(format!(
                "{volume}: in use by {owner}, since {since}: run this command there; only the process that has the volume open changes \
                 its snapshots"
            ))
        }
        error => explain(volume, &error),
    })?;
    let failed = |error: ObjectError| explain(volume, &error.into());
    opened.store().map_or(Ok(()), change).map_err(failed)?;
    opened.close().map_err(failed)
}

/// The snapshots of a volume that a process has open.
fn list_of(control: &Control) -> io::Result<Vec<Snapshot>> {
    let mut all = Vec::new();
    loop {
        let page = ferry_fuse::control::snapshot_list(control, all.len() as u64)?;
        let page: Vec<(String, u64)> = serde_json::from_slice(&page)?;
        if page.is_empty() {
            return Ok(all);
        }
        all.extend(page.into_iter().map(|(name, made_secs)| Snapshot { name, made_secs }));
    }
}

/// The message for what the daemon or the server answered.
fn refused(
    control: &Control,
    volume: &Location,
    what: &'static str,
    name: &str,
    error: io::Error,
) -> CliError {
    let why = match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => return volume.no_snapshots(),
        Some(libc::EEXIST) => ObjectError::SnapshotExists(name.into()),
        Some(libc::EMLINK) => ObjectError::TooManySnapshots(SNAPSHOTS_MAX),
        Some(libc::EBUSY) if let Some(name) = CloneName::parse(name) => {
            ObjectError::NeededByClone(name.clone.into())
        }
        Some(libc::ENOENT) => {
            let names = list_of(control).unwrap_or_default();
            let names = names.into_iter().map(|one| one.name).collect();
            ObjectError::NoSnapshot { name: name.into(), names }
        }
        Some(libc::EROFS) => {
            return CliError::Failed(format!(
                "{control}: {what}: it is mounted read only: mount the volume without ro"
            ));
        }
        _ => return control.explain(what, error),
    };
    explain(volume, &why.into())
}
