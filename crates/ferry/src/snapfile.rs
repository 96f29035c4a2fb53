//! Snapshots of a volume in one file: copies in the directory `VOLUME.snapshots` beside it, which
//! share their blocks with it (FICLONE).
//!
//! XFS and Btrfs wait for the writes to the source that are under way, and hold new ones until the
//! whole copy is made. So the copy has each write that was done before, and each other one wholly
//! or not at all. A crash could have left the same, so opening the copy recovers it. Other file
//! systems do not guarantee this, and are refused.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;
use std::sync::Arc;

use ferry_device::{BlockDevice, CompositeError, CompositeVolume, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_fs::{FsOptions, LocalFs};
use ferry_object::{ObjectError, Snapshot, check_snapshot_name};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, fstatfs, ioctl_ficlone, renameat_with};
use rustix::io::Errno;

use crate::error::CliError;
use crate::location::Location;
use crate::open::explain;
use crate::snappath::{directory, path_of, real};

/// The copy until it is whole. No snapshot can have this name.
const UNFINISHED: &str = "@";
/// `f_type` of XFS and Btrfs.
const SHARES_AS_ONE_CHANGE: [i64; 2] = [0x5846_5342, 0x9123_683e];

/// Makes a snapshot of a volume whose changes have been synced.
pub fn create(volume: &Path, name: &str) -> Result<(), CliError> {
    let at = Location::from(volume);
    let volume = real(volume);
    let source = File::open(&volume).map_err(CliError::path(&volume, "cannot open"))?;
    check_can_share(&at, &volume, &source)?;
    let snapshots = directory(&volume);
    let owner = source.metadata().map_err(CliError::path(&volume, "cannot look at"))?;
    let made = DirBuilder::new().mode(0o700).create(&snapshots);
    match made {
        Ok(()) => {
            let opened = open_directory(&snapshots)?;
            give(&opened, &owner).map_err(CliError::path(&snapshots, "cannot set the owner of"))?;
            sync_directory(volume.parent().unwrap_or(&volume))?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(CliError::path(&snapshots, "cannot make the directory")(error)),
    }
    // One process at a time has a copy that is not whole: what is there now, a killed one left.
    let locked = open_directory(&snapshots)?;
    flock(&locked, FlockOperation::LockExclusive)
        .map_err(|e| CliError::path(&snapshots, "cannot lock")(e.into()))?;
    let exists = || explain(&at, &ObjectError::SnapshotExists(name.into()).into());
    let (copy, path) = (snapshots.join(UNFINISHED), snapshots.join(name));
    if path.symlink_metadata().is_ok() {
        return Err(exists());
    }
    match fs::remove_file(&copy) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(CliError::path(&copy, "cannot remove")(e));
        }
        _ => {}
    }
    let whole = share(&at, &source, &owner, &copy).and_then(|()| {
        renameat_with(CWD, &copy, CWD, &path, RenameFlags::NOREPLACE).map_err(|error| match error {
            Errno::EXIST => exists(),
            error => CliError::path(&path, "cannot give the snapshot its name")(error.into()),
        })
    });
    if whole.is_err() {
        // The first error is the one to tell. The next command removes what stays.
        drop(fs::remove_file(&copy));
    }
    whole?;
    locked.sync_all().map_err(CliError::path(&snapshots, "cannot sync"))
}

fn check_can_share(at: &Location, volume: &Path, source: &File) -> Result<(), CliError> {
    let is_file = source.metadata().is_ok_and(|meta| meta.is_file());
    if !is_file || CompositeVolume::is_at(volume) {
        return Err(CliError::Failed(format!(
            "{at}: only a volume in one file, or in a store (s3://, dir://), has snapshots: unmount it and copy it with `ferry copy`"
        )));
    }
    let host = fstatfs(source).map_err(|e| CliError::path(volume, "cannot look at")(e.into()))?;
    if SHARES_AS_ONE_CHANGE.contains(&host.f_type) { Ok(()) } else { Err(cannot_share(at)) }
}

fn cannot_share(at: &Location) -> CliError {
    CliError::Failed(format!(
        "{at}: the file system on which it lies cannot share blocks between files, which a snapshot needs (XFS with reflink=1 and Btrfs can): \
         unmount it and copy it with `ferry copy`"
    ))
}

/// Makes `copy`, which shares the blocks of the volume and is as after a clean close.
fn share(at: &Location, source: &File, owner: &fs::Metadata, copy: &Path) -> Result<(), CliError> {
    let failed = |what| CliError::path(copy, what);
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(owner.mode() & 0o777);
    let file = file.open(copy).map_err(failed("cannot make the snapshot"))?;
    give(&file, owner).map_err(failed("cannot set the owner of"))?;
    ioctl_ficlone(&file, source).map_err(|error| match error {
        Errno::OPNOTSUPP | Errno::INVAL | Errno::XDEV | Errno::NOTTY => cannot_share(at),
        error => failed("cannot make the snapshot")(error.into()),
    })?;
    let env = Env::real();
    let device = FileDevice::open(copy, OpenMode::ReadWrite, &env);
    let device: Arc<dyn BlockDevice> =
        Arc::new(device.map_err(|error| CliError::Failed(error.to_string()))?);
    let not_whole = |error: &dyn std::fmt::Display| {
        CliError::Failed(format!("{at}: cannot make the snapshot: {error}"))
    };
    let options = FsOptions { background: false, ..FsOptions::default() };
    let fs = LocalFs::open(device, options, env).map_err(|error| not_whole(&error))?;
    fs.close().map_err(|error| not_whole(&error))?;
    file.sync_all().map_err(failed("cannot sync"))
}

/// Gives a file the owner of the volume.
fn give(file: &File, owner: &fs::Metadata) -> io::Result<()> {
    let has = file.metadata()?;
    if (has.uid(), has.gid()) == (owner.uid(), owner.gid()) {
        return Ok(());
    }
    fchown(file, Some(owner.uid()), Some(owner.gid()))
}

fn open_directory(path: &Path) -> Result<File, CliError> {
    File::open(path).map_err(CliError::path(path, "cannot open"))
}

fn sync_directory(path: &Path) -> Result<(), CliError> {
    open_directory(path)?.sync_all().map_err(CliError::path(path, "cannot sync"))
}

/// All snapshots of a volume, the oldest one first.
pub fn list(volume: &Path) -> Result<Vec<Snapshot>, CliError> {
    let snapshots = directory(&real(volume));
    let failed = || CliError::path(&snapshots, "cannot list the snapshots");
    let entries = match fs::read_dir(&snapshots) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed())?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed())?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let meta = entry.metadata().map_err(failed())?;
        if meta.is_file() && check_snapshot_name(&name).is_ok() {
            all.push(Snapshot { name, made_secs: u64::try_from(meta.mtime()).unwrap_or(0) });
        }
    }
    all.sort_by(|a, b| (a.made_secs, &a.name).cmp(&(b.made_secs, &b.name)));
    Ok(all)
}

/// Deletes a snapshot that no process has open.
pub fn delete(volume: &Path, name: &str) -> Result<(), CliError> {
    check_snapshot_name(name).map_err(|error| CliError::Usage(error.to_string()))?;
    let path = path_of(volume, name);
    if path.symlink_metadata().is_err() {
        let names = list(volume)?.into_iter().map(|one| one.name).collect();
        let none = ObjectError::NoSnapshot { name: name.into(), names };
        return Err(explain(&Location::from(volume), &none.into()));
    }
    let alone = FileDevice::open(&path, OpenMode::ReadWrite, &Env::real());
    let _alone = alone
        .map_err(|error| explain(&Location::from(&path), &CompositeError::from(error).into()))?;
    fs::remove_file(&path).map_err(CliError::path(&path, "cannot remove"))?;
    sync_directory(&directory(&real(volume)))
}
