//! A new file that shares its blocks with the file of a volume (FICLONE): a snapshot, a clone, or
//! what a rollback brings back.
//!
//! XFS and Btrfs wait for the writes to the source that are under way, and hold new ones until the
//! whole copy is made. So the copy has each write that was done before, and each other one wholly
//! or not at all. A crash could have left the same, so opening the copy recovers it. Other file
//! systems do not guarantee this, and are refused.
//!
//! The copy gets a name when it is whole and durable, and not before (`O_TMPFILE`). So a crash
//! leaves nothing of one that was not finished.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use ferry_device::{BlockDevice, CompositeVolume, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_fs::{FsOptions, Given, LocalFs};
use rustix::fs::{Mode, OFlags, XattrFlags, fgetxattr, fsetxattr, fstatfs, ioctl_ficlone, openat};
use rustix::io::Errno;

use crate::error::CliError;
use crate::location::Location;
use crate::snappath::give;

/// `f_type` of XFS and Btrfs.
const SHARES_AS_ONE_CHANGE: [i64; 2] = [0x5846_5342, 0x9123_683e];

/// The attribute that holds the access control list of a file.
const ACL: &str = "system.posix_acl_access";
/// Linux has no larger attribute.
const ACL_BYTES_MAX: usize = 64 << 10;

/// A file without a name that has what the volume had, as after a clean close. It is owned, so that
/// nobody opens it before its name is durable.
pub struct Shared {
    /// The file.
    pub file: File,
    /// The id of the volume that is in it.
    pub volume_id: [u8; 16],
    device: Arc<dyn BlockDevice>,
}

impl Shared {
    /// Makes the file in an open directory. `path`: where it is to be. It gets the owner, the mode
    /// and the access control list of `like`.
    pub fn new(
        at: &Location,
        (source, like): (&File, &File),
        (directory, path): (&File, &Path),
    ) -> Result<Self, CliError> {
        let failed = |what| CliError::path(path, what);
        let owner = like.metadata().map_err(failed("cannot look at what is like"))?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = openat(directory, ".", flags, Mode::RUSR | Mode::WUSR);
        let file: File = file
            .map_err(|error| match error {
                Errno::OPNOTSUPP => cannot_share_there(at, path),
                error => failed("cannot make it")(error.into()),
            })?
            .into();
        give(&file, &owner).map_err(failed("cannot set the owner of"))?;
        file.set_permissions(Permissions::from_mode(owner.mode() & 0o777))
            .map_err(failed("cannot set the mode of"))?;
        copy_acl(like, &file).map_err(failed("cannot set the access control list of"))?;
        ioctl_ficlone(&file, source).map_err(|error| match error {
            Errno::XDEV => cannot_share_there(at, path),
            Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY => cannot_share(at),
            error => failed("cannot make it")(error.into()),
        })?;
        let not_whole = |error: &dyn std::fmt::Display| {
            CliError::Failed(format!("{}: cannot make it: {error}", path.display()))
        };
        let env = Env::real();
        let device = file.try_clone().map_err(failed("cannot make it"))?;
        let device = FileDevice::of_file(device, path, OpenMode::ReadWrite, &env);
        let device: Arc<dyn BlockDevice> = Arc::new(device.map_err(|error| not_whole(&error))?);
        let options = FsOptions { background: false, ..FsOptions::default() };
        let fs = LocalFs::open(device.clone(), options, env).map_err(|error| not_whole(&error))?;
        let volume_id = fs.superblock().volume_id;
        fs.close().map_err(|error| not_whole(&error))?;
        file.sync_all().map_err(failed("cannot sync"))?;
        Ok(Self { file, volume_id, device })
    }

    /// It is to be written from now on, beside its source or in its place. `given`: the source's
    /// inode numbers. `path`: where it is to be.
    pub fn begin_timeline(&self, given: Given, path: &Path) -> Result<(), CliError> {
        LocalFs::begin_timeline(&self.device, given, &Env::real()).map_err(|error| {
            CliError::Failed(format!("{}: cannot make it: {error}", path.display()))
        })
    }
}

/// Without the list, the mode of a file that has one would give its group what the list gives to
/// others at most.
fn copy_acl(from: &File, to: &File) -> io::Result<()> {
    let mut acl = vec![0; ACL_BYTES_MAX];
    match fgetxattr(from, ACL, &mut acl[..]) {
        Ok(len) => Ok(fsetxattr(to, ACL, &acl[..len], XattrFlags::empty())?),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Opens the file of a volume to share its blocks.
pub fn open_source(volume: &Path) -> Result<File, CliError> {
    let at = Location::from(volume);
    let is_file = volume.metadata().map_err(CliError::path(volume, "cannot open"))?.is_file();
    if !is_file || CompositeVolume::is_at(volume) {
        return Err(CliError::Failed(format!(
            "{at}: only a volume in one file, or in a store (s3://, dir://), has snapshots and clones: unmount it and copy it with `ferry copy`"
        )));
    }
    let source = File::open(volume).map_err(CliError::path(volume, "cannot open"))?;
    let host = fstatfs(&source).map_err(|e| CliError::path(volume, "cannot look at")(e.into()))?;
    if SHARES_AS_ONE_CHANGE.contains(&host.f_type) { Ok(source) } else { Err(cannot_share(&at)) }
}

fn cannot_share(at: &Location) -> CliError {
    CliError::Failed(format!(
        "{at}: the file system on which it lies cannot share blocks between files, which snapshots and clones need (XFS with reflink=1 and \
         Btrfs can): unmount it and copy it with `ferry copy`"
    ))
}

fn cannot_share_there(at: &Location, path: &Path) -> CliError {
    CliError::Failed(format!(
        "{}: it is on another file system than {at}, so they cannot share blocks: choose a place beside that, or copy it with `ferry copy`",
        path.display()
    ))
}
