//! Finds inodes by their paths.

use super::Volume;
use ferry_fs::{Entry, Errno, Filesystem, Ino, ROOT};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

/// An inode that was looked up; dropping it undoes the lookup.
pub(crate) struct Found<'v> {
    volume: &'v Volume,
    ino: Ino,
}

impl Found<'_> {
    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }
}

impl Drop for Found<'_> {
    fn drop(&mut self) {
        if self.ino != ROOT {
            self.volume.fs.forget(self.ino, 1);
        }
    }
}

impl Volume {
    /// An entry that counts as one lookup; `None`: there is no such name.
    pub(crate) fn counted(&self, entry: Entry) -> Option<Found<'_>> {
        entry.attr.map(|attr| Found { volume: self, ino: attr.ino })
    }

    /// Finds the inode that a path names.
    pub(crate) fn find(&self, path: &Path) -> io::Result<Found<'_>> {
        let mut found = Found { volume: self, ino: ROOT };
        for component in path.components() {
            let name = match component {
                Component::RootDir | Component::CurDir => continue,
                Component::Normal(name) => name.as_bytes(),
                Component::ParentDir => b"..".as_slice(),
                Component::Prefix(_) => return Err(Errno(libc::EINVAL).into()),
            };
            let entry = self.call(|cx| self.fs.lookup(cx, found.ino, name))?;
            found = self.counted(entry).ok_or(Errno(libc::ENOENT))?;
        }
        Ok(found)
    }

    /// Finds the directory of a path's last name; returns it and that name.
    pub(crate) fn parent(&self, path: &Path) -> io::Result<(Found<'_>, Vec<u8>)> {
        let name = path.file_name().ok_or(Errno(libc::EINVAL))?.as_bytes().to_vec();
        Ok((self.find(path.parent().unwrap_or(Path::new("/")))?, name))
    }
}
