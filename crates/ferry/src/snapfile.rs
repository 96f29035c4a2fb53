//! Snapshots and clones of a volume in one file. Each is a file that shares its blocks with the
//! volume: a snapshot in the directory `VOLUME.snapshots` beside it, a clone anywhere on the same
//! file system.

use std::fs::File;
use std::io;
use std::path::Path;

use ferry_device::{CompositeError, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_fs::Given;
use ferry_object::{
    ObjectError, Replaced, RolledBack, Snapshot, check_snapshot_name, name_before_rollback,
};
use rustix::io::Errno;

use crate::error::CliError;
use crate::location::Location;
use crate::open::explain;
use crate::sharing::{Shared, open_source};
use crate::snappath::{Directory, link, path_of, real, replace};

/// Makes a snapshot of a volume whose changes have been synced.
pub fn create(volume: &Path, name: &str) -> Result<(), CliError> {
    let at = Location::from(volume);
    let (source, path) = (open_source(volume)?, path_of(volume, name));
    let owner = source.metadata().map_err(CliError::path(volume, "cannot look at"))?;
    let snapshots = Directory::make(volume, &owner)
        .map_err(CliError::path(&path, "cannot make the directory of"))?;
    let exists = || explain(&at, &ObjectError::SnapshotExists(name.into()).into());
    if snapshots.has(name) {
        return Err(exists());
    }
    let copy = Shared::new(&at, (&source, &source), (&snapshots.file, &path))?;
    link(&copy.file, &snapshots.file, name.as_ref()).map_err(|error| match error {
        Errno::EXIST => exists(),
        error => CliError::path(&path, "cannot give the snapshot its name")(error.into()),
    })?;
    snapshots.file.sync_all().map_err(CliError::path(&snapshots.path, "cannot sync"))
}

/// All snapshots of a volume, the oldest one first.
pub fn list(volume: &Path) -> Result<Vec<Snapshot>, CliError> {
    let failed = || CliError::path(volume, "cannot list the snapshots of");
    let snapshots = match Directory::open(volume) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened.map_err(failed())?,
    };
    let names = snapshots.names().map_err(failed())?;
    let snapshot = |name: String| Some(Snapshot { made_secs: snapshots.made_secs(&name)?, name });
    let mut all: Vec<_> = names.into_iter().filter_map(snapshot).collect();
    all.sort_by(|a, b| (a.made_secs, &a.name).cmp(&(b.made_secs, &b.name)));
    Ok(all)
}

/// Deletes a snapshot that no process has open.
pub fn delete(volume: &Path, name: &str) -> Result<(), CliError> {
    check_snapshot_name(name).map_err(|error| CliError::Usage(error.to_string()))?;
    let (snapshots, file) = open(volume, name, true)?;
    let path = path_of(volume, name);
    let found = file.metadata().map_err(CliError::path(&path, "cannot look at"))?;
    let alone = FileDevice::of_file(file, &path, OpenMode::ReadWrite, &Env::real());
    let _alone = alone
        .map_err(|error| explain(&Location::from(&path), &CompositeError::from(error).into()))?;
    if !snapshots.leads_to(name, &found) {
        return Err(CliError::Failed(format!(
            "{}: another process has replaced it meanwhile: nothing is deleted",
            path.display()
        )));
    }
    snapshots.remove(name).map_err(CliError::path(&path, "cannot remove"))
}

/// Makes a volume, which can be written, of a snapshot, or of the volume as it is.
pub fn clone(volume: &Path, name: Option<&str>, new: &Path) -> Result<(), CliError> {
    let at = Location::from(volume);
    let like = open_source(volume)?;
    let snapshot = name.map(|name| open(volume, name, false)).transpose()?;
    let source = snapshot.as_ref().map_or(&like, |(_, file)| file);
    let exists = || {
        CliError::Failed(format!(
            "{}: it exists already, and is left alone: choose another name",
            new.display()
        ))
    };
    let Some(file_name) = new.file_name() else { return Err(exists()) };
    if new.symlink_metadata().is_ok() {
        return Err(exists());
    }
    let parent = new.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let directory = File::open(parent).map_err(CliError::path(parent, "cannot open"))?;
    let copy = Shared::new(&at, (source, &like), (&directory, new))?;
    copy.begin_timeline(Given::Also(0), new)?;
    link(&copy.file, &directory, file_name).map_err(|error| match error {
        Errno::EXIST => exists(),
        error => CliError::path(new, "cannot give the clone its name")(error.into()),
    })?;
    directory.sync_all().map_err(CliError::path(parent, "cannot sync"))
}

/// Makes a volume, which this process owns, what it was when a snapshot was made. What it is until
/// then becomes a snapshot first, unless it is discarded. `id`: the volume's, unless it cannot be
/// read. `given`: its inode numbers.
pub fn roll_back(
    volume: &Path,
    (id, given): (Option<[u8; 16]>, Given),
    name: &str,
    replaced: Replaced,
) -> Result<RolledBack, CliError> {
    let (at, volume) = (Location::from(volume), real(volume));
    let (like, failed) = (open_source(&volume)?, |what| CliError::path(&volume, what));
    let (snapshots, snapshot) = open(&volume, name, false)?;
    let made_secs = snapshots.made_secs(name).unwrap_or(0);
    // What can fail comes before the snapshot of what the volume is now: each try would leave one.
    let parent = volume.parent().unwrap_or(Path::new("/"));
    let parent = File::open(parent).map_err(failed("cannot open the directory of"))?;
    let copy = Shared::new(&at, (&snapshot, &like), (&parent, &volume))?;
    if id.is_some_and(|id| id != copy.volume_id) {
        return Err(CliError::Failed(format!(
            "{}: it is a snapshot of another volume, which was at {at} before: `ferry clone {at}@{name} NEW` makes a volume of it",
            path_of(&volume, name).display()
        )));
    }
    copy.begin_timeline(given, &volume)?;
    let is_saved = replaced == Replaced::Snapshot;
    let before = is_saved.then(|| name_before_rollback(|name| snapshots.has(name)));
    if let Some(before) = &before {
        create(&volume, before).map_err(|error| {
            CliError::Failed(format!(
                "{error}: the volume is as it was; --discard makes no snapshot of what it is now"
            ))
        })?;
    }
    let name = volume.file_name().unwrap_or_default();
    if let Err(error) = replace(&parent, name, &copy.file) {
        if let Some(before) = &before {
            // The first error is the one to tell: this snapshot is of what the volume still is.
            drop(snapshots.remove(before));
        }
        return Err(failed("cannot replace")(error));
    }
    parent.sync_all().map_err(failed("cannot sync the directory of"))?;
    Ok(RolledBack { made_secs, before, is_copied: false })
}

/// Opens a snapshot, and the directory that it is in. `write`: also to own it alone.
fn open(volume: &Path, name: &str, write: bool) -> Result<(Directory, File), CliError> {
    let opened = Directory::open(volume).and_then(|snapshots| {
        let file = snapshots.file(name, write)?;
        Ok((snapshots, file))
    });
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let names = list(volume).unwrap_or_default().into_iter().map(|one| one.name).collect();
            let none = ObjectError::NoSnapshot { name: name.into(), names };
            explain(&Location::from(volume), &none.into())
        }
        _ => CliError::path(path_of(volume, name), "cannot open")(error),
    })
}
