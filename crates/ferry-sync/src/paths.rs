//! Opens the files to sync: named paths, or whole trees.
//!
//! Symbolic links are not followed. Links, devices, FIFOs and sockets have no contents to sync:
//! their directory is synced, which makes their names durable. Directories come last, so that on
//! FerryFS and on journalling file systems the commits of their files have made them durable
//! already. Only one directory is open at a time.

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An iterator of opened files and directories with their paths, for [`crate::sync_each`].
pub struct Paths<I> {
    given: I,
    recursive: bool,
    /// Directories to be listed.
    unlisted: Vec<PathBuf>,
    listing: Option<OpenListing>,
    /// Directories to be synced, each with the path under which it is answered.
    directories: Vec<(PathBuf, PathBuf)>,
}

struct OpenListing {
    path: PathBuf,
    dir: Dir,
    fd: Arc<OwnedFd>,
}

/// Opens the `given` paths; with `recursive` also everything below given directories, on other file
/// systems as well. Files that are removed during the walk are skipped.
pub fn paths<I: IntoIterator<Item = PathBuf>>(given: I, recursive: bool) -> Paths<I::IntoIter> {
    let given = given.into_iter();
    Paths { given, recursive, unlisted: Vec::new(), listing: None, directories: Vec::new() }
}

/// Opens for reading, else for writing: fsync needs an open file, in whichever mode. The flags
/// ensure that the open never waits, and that it has no effect on a device that has replaced the
/// file.
fn open(at: BorrowedFd<'_>, name: &Path, also: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | also;
    match rustix::fs::openat(at, name, flags | OFlags::RDONLY, Mode::empty()) {
        Err(Errno::ACCESS) if !also.contains(OFlags::DIRECTORY) => {
            rustix::fs::openat(at, name, flags | OFlags::WRONLY, Mode::empty())
        }
        opened => opened,
    }
}

fn open_dir(path: &Path) -> Result<OwnedFd, Errno> {
    open(CWD, path, OFlags::DIRECTORY)
}

/// The type alone, which statx(2) returns without asking the file system.
fn kind(at: BorrowedFd<'_>, name: &Path) -> Result<FileType, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(at, name, flags, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(stat.stx_mode.into()))
}

fn list(path: &Path) -> Result<OpenListing, Errno> {
    let fd = open_dir(path)?;
    Ok(OpenListing { path: path.into(), dir: Dir::read_from(&fd)?, fd: Arc::new(fd) })
}

/// The directory that a name is in.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        _ => ".".into(),
    }
}

type OpenedPath = (PathBuf, io::Result<OwnedFd>);

impl<I: Iterator<Item = PathBuf>> Paths<I> {
    /// A named file, opened; others are kept for later.
    fn named(&mut self, path: PathBuf) -> Option<OpenedPath> {
        match kind(CWD, &path) {
            Ok(FileType::RegularFile) => {
                let opened = open(CWD, &path, OFlags::empty());
                return Some((path, opened.map_err(io::Error::from)));
            }
            Ok(FileType::Directory) if self.recursive => self.unlisted.push(path),
            Ok(FileType::Directory) => self.directories.push((path.clone(), path)),
            Ok(_) => {
                let directory = parent(&path);
                self.directories.push((path, directory));
            }
            Err(error) => return Some((path, Err(error.into()))),
        }
        None
    }

    /// Begins to list a directory, which is synced itself at the end.
    fn descend(&mut self, path: PathBuf) -> Option<OpenedPath> {
        match list(&path) {
            Ok(listing) => self.listing = Some(listing),
            Err(Errno::NOENT) => return None,
            Err(error) => return Some((path, Err(error.into()))),
        }
        self.directories.push((path.clone(), path));
        None
    }

    /// The next file of the directory that is being listed.
    fn listed(&mut self) -> Option<OpenedPath> {
        let listing = self.listing.as_mut()?;
        let (entry, fd) = (listing.dir.read(), Arc::clone(&listing.fd));
        let entry = match entry {
            None => {
                self.listing = None;
                return None;
            }
            Some(Ok(entry)) => entry,
            Some(Err(error)) => {
                let path = std::mem::take(&mut listing.path);
                self.listing = None;
                return Some((path, Err(error.into())));
            }
        };
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            return None;
        }
        let path = listing.path.join(name);
        let kind = match entry.file_type() {
            FileType::Unknown => kind(fd.as_fd(), Path::new(name)),
            known => Ok(known),
        };
        let opened = match kind {
            Ok(FileType::RegularFile) => open(fd.as_fd(), Path::new(name), OFlags::empty()),
            Ok(FileType::Directory) => {
                self.unlisted.push(path);
                return None;
            }
            Ok(_) => return None,
            Err(error) => Err(error),
        };
        match opened {
            Err(Errno::NOENT) => None,
            opened => Some((path, opened.map_err(io::Error::from))),
        }
    }
}

impl<I: Iterator<Item = PathBuf>> Iterator for Paths<I> {
    type Item = OpenedPath;

    fn next(&mut self) -> Option<OpenedPath> {
        loop {
            let item = if self.listing.is_some() {
                self.listed()
            } else if let Some(directory) = self.unlisted.pop() {
                self.descend(directory)
            } else if let Some(path) = self.given.next() {
                self.named(path)
            } else {
                let (path, directory) = self.directories.pop()?;
                let opened = open_dir(&directory).map_err(io::Error::from);
                Some((path, opened))
            };
            if item.is_some() {
                return item;
            }
        }
    }
}
