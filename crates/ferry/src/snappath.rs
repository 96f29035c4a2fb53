//! Where the snapshots of a volume in one file are, `VOLUME.snapshots/NAME` beside the file, and
//! how they are opened.
//!
//! The directory may be a user's, and root may run the command. So what is in it is opened by its
//! name in the directory that is open already. No symbolic link is followed, neither from the
//! directory's name nor in it, and only a regular file is a snapshot. The path of the volume is
//! trusted, as each path that a user names: who may write to the volume's own directory may replace
//! the volume. The bytes of a snapshot are trusted no more than those of any volume.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::{Path, PathBuf};

use ferry_object::check_snapshot_name;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

/// What the directory's name ends with.
const SUFFIX: &str = ".snapshots";
/// What the name ends with of a file that is to replace the volume, beside it.
const UNFINISHED: &str = ".rollback";

/// The directory for the snapshots of a volume.
fn directory(volume: &Path) -> PathBuf {
    let mut name = volume.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

/// Where the snapshot of this name of a volume is, or would be.
pub fn path_of(volume: &Path, name: &str) -> PathBuf {
    directory(&real(volume)).join(name)
}

/// The volume without symbolic links: its snapshots are beside the file itself.
pub fn real(volume: &Path) -> PathBuf {
    volume.canonicalize().unwrap_or_else(|_| volume.into())
}

/// What `VOLUME@NAME` names, if there is no file of that name and the volume has had snapshots.
pub fn named(text: &Path) -> Option<PathBuf> {
    let (volume, name) = spelled(text)?;
    let path = path_of(&volume, &name);
    let is_one = by_name(&path).is_some();
    // Last: the text may be a mount point whose daemon does not answer.
    (is_one && text.symlink_metadata().is_err()).then_some(path)
}

/// The volume and the name in `VOLUME@NAME`.
pub fn spelled(text: &Path) -> Option<(PathBuf, String)> {
    let (volume, name) = text.to_str()?.rsplit_once('@')?;
    check_snapshot_name(name).is_ok().then(|| (volume.into(), name.to_owned()))
}

/// The volume, and the name of its snapshot whose file this is, whichever way leads there. Where
/// the volume is missing, it is a volume.
pub fn split(path: &Path) -> Option<(PathBuf, String)> {
    by_name(path).or_else(|| by_name(&real(path)))
}

/// The same; also of `VOLUME@NAME` if the volume never had a snapshot.
pub fn wanted(path: &Path) -> Option<(PathBuf, String)> {
    let is_none = |(volume, _): &(PathBuf, String)| volume.is_file() && !path.exists();
    split(path).or_else(|| spelled(path).filter(is_none))
}

/// As [`split`], of a path whose last component is no symbolic link to a snapshot. That one may be
/// a mount whose daemon does not answer, and is not looked at.
pub fn by_name(path: &Path) -> Option<(PathBuf, String)> {
    let absolute = std::path::absolute(path).ok()?;
    let name = absolute.file_name()?.to_str()?;
    let parent = absolute.parent()?.canonicalize().ok()?;
    let volume = parent.as_os_str().as_bytes().strip_suffix(SUFFIX.as_bytes())?;
    let volume = PathBuf::from(OsStr::from_bytes(volume));
    let is_file = volume.symlink_metadata().is_ok_and(|meta| meta.is_file());
    (parent.is_dir() && is_file).then(|| (volume, name.to_owned()))
}

/// Opens a snapshot to read it.
pub fn open(volume: &Path, name: &str) -> io::Result<File> {
    Directory::open(volume)?.file(name, false)
}

/// The directory of a volume's snapshots. Others may change what is in it at any time.
pub struct Directory {
    /// The directory itself.
    pub file: File,
    /// Where it was opened.
    pub path: PathBuf,
    /// The user whose volume it is.
    owner: u32,
}

impl Directory {
    /// Opens the directory of a volume that has or had snapshots.
    pub fn open(volume: &Path) -> io::Result<Self> {
        let path = directory(&real(volume));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(CWD, &path, flags, Mode::empty())?);
        let this = Self { owner: volume.metadata()?.uid(), file, path };
        this.check_owner(this.file.metadata()?.uid())?;
        Ok(this)
    }

    /// The same. If it is absent it is made, and the owner of the volume owns it.
    pub fn make(volume: &Path, owner: &Metadata) -> io::Result<Self> {
        let (volume, mut new) = (real(volume), DirBuilder::new());
        match new.mode(0o700).create(directory(&volume)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::open(&volume),
            Err(error) => Err(error),
            Ok(()) => {
                let made = Self::open(&volume)?;
                // If somebody has put another directory there meanwhile, its owner stays.
                if made.names()?.is_empty() {
                    give(&made.file, owner)?;
                }
                File::open(volume.parent().unwrap_or(&volume))?.sync_all()?;
                Ok(made)
            }
        }
    }

    /// What another user has put there is nothing of the volume's.
    fn check_owner(&self, uid: u32) -> io::Result<()> {
        if uid == self.owner || uid == 0 {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "user {uid} owns it, and the volume is of user {}: chown it if it is the volume's",
                self.owner
            ),
        ))
    }

    /// Opens a snapshot; `write`: also to own it alone.
    pub fn file(&self, name: &str, write: bool) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = rustix::fs::openat(&self.file, name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&found)?;
        self.check_owner(stat.st_uid)?;
        // A FIFO would wait for its other end, if it were opened.
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                File::options().read(true).write(write).open(descriptor(&found))
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "no regular file, which a snapshot is: somebody has put it there",
            )),
        }
    }

    /// Whether anything has this name.
    pub fn has(&self, name: &str) -> bool {
        rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Whether the name is that of this file.
    pub fn leads_to(&self, name: &str, file: &Metadata) -> bool {
        let found = rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| (found.st_dev, found.st_ino) == (file.dev(), file.ino()))
    }

    /// The names of all that is there.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut all = Vec::new();
        for entry in Dir::read_from(&self.file)? {
            match entry?.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => all.push(name.to_owned()),
            }
        }
        Ok(all)
    }

    /// When the snapshot of this name was made, in seconds since 1970, if it is one.
    pub fn made_secs(&self, name: &str) -> Option<u64> {
        check_snapshot_name(name).ok()?;
        let found = rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let is_one = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        is_one.then(|| u64::try_from(found.st_mtime).unwrap_or(0))
    }

    /// Removes a name, durably.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        rustix::fs::unlinkat(&self.file, name, AtFlags::empty())?;
        self.file.sync_all()
    }
}

/// Puts a file that has no name yet in the place of a volume, which this process owns. At each
/// crash the name of the volume leads to the one or to the other. Nobody but who may replace the
/// volume can change what is in its directory.
pub fn replace(parent: &File, volume: &OsStr, new: &File) -> io::Result<()> {
    let mut unfinished = OsString::from(".");
    unfinished.push(volume);
    unfinished.push(UNFINISHED);
    // A killed rollback has left it: one process at a time owns the volume.
    match rustix::fs::unlinkat(parent, &unfinished, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    link(new, parent, &unfinished)?;
    let replaced = rustix::fs::renameat(parent, &unfinished, parent, volume);
    if replaced.is_err()
        && let Err(error) = rustix::fs::unlinkat(parent, &unfinished, AtFlags::empty())
    {
        tracing::warn!(%error, "{} stays until the next rollback", unfinished.display());
    }
    Ok(replaced?)
}

/// Gives a file that has no name its name in a directory, where nothing may have it.
pub fn link(file: &File, directory: &File, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::linkat(CWD, descriptor(file), directory, name, AtFlags::SYMLINK_FOLLOW)
}

/// Gives a file or directory the owner of the volume.
pub fn give(file: &File, owner: &Metadata) -> io::Result<()> {
    let has = file.metadata()?;
    if (has.uid(), has.gid()) == (owner.uid(), owner.gid()) {
        return Ok(());
    }
    fchown(file, Some(owner.uid()), Some(owner.gid()))
}

/// The path that leads to an open file, whatever its name is.
fn descriptor(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}
