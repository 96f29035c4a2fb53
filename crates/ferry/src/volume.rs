//! An open volume and its files, for programs that use FerryFS in process.

mod path;

use ferry_device::{BlockDevice, CompositeVolume, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_fs::{
    At, Attr, Errno, Filesystem, InProcess, Ino, LocalFs, OpenFile, RenameFlags, SetAttr,
};
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::{Metadata, Options};

/// An open volume. Clones are the same volume.
#[derive(Clone)]
pub struct Volume {
    fs: Arc<LocalFs>,
    read_only: bool,
}

/// A file that is open for reading and writing. All threads may use it at once. Dropping it closes
/// it.
pub struct File {
    volume: Volume,
    ino: Ino,
    fh: u64,
    open: OpenFile,
}

impl Volume {
    /// Makes a volume in a new sparse file of `size` bytes, and opens it. A file of that name must
    /// not exist.
    pub fn make(path: impl AsRef<Path>, size: u64, options: &Options) -> io::Result<Self> {
        let env = Env::real();
        let device =
            FileDevice::create(path.as_ref(), size, false, &env).map_err(io::Error::other)?;
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        if let Err(error) = ferry_fs::mkfs(&device, &ferry_fs::MkfsOptions::default(), &env) {
            // Half a volume under that name would only be in the way.
            std::fs::remove_file(path)?;
            return Err(io::Error::other(error));
        }
        Self::on(device, options)
    }

    /// Opens the volume at `path`: a file, a block device, or the description of several. Recovers
    /// it if it was not closed.
    pub fn open(path: impl AsRef<Path>, options: &Options) -> io::Result<Self> {
        let (path, env) = (path.as_ref(), Env::real());
        let mode = if options.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
        let device: Arc<dyn BlockDevice> = if CompositeVolume::is_at(path) {
            Arc::new(CompositeVolume::open(path, mode, &env).map_err(io::Error::other)?)
        } else {
            Arc::new(FileDevice::open(path, mode, &env).map_err(io::Error::other)?)
        };
        Self::on(device, options)
    }

    /// Opens the volume on a device.
    pub fn on(device: Arc<dyn BlockDevice>, options: &Options) -> io::Result<Self> {
        let fs = LocalFs::open(device, options.clone(), Env::real()).map_err(io::Error::other)?;
        Ok(Self { fs, read_only: options.read_only })
    }

    /// Makes a directory.
    pub fn mkdir(&self, path: impl AsRef<Path>, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        let made = self.call(|cx| self.fs.mkdir(cx, parent.ino(), &name, mode))?;
        self.counted(made);
        Ok(())
    }

    /// Makes a file and opens it. One of that name must not exist.
    pub fn create(&self, path: impl AsRef<Path>, mode: u32) -> io::Result<File> {
        let (parent, name) = self.parent(path.as_ref())?;
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let (entry, opened) = self.call(|cx| {
            self.fs.create(cx, parent.ino(), &name, mode & 0o7777 | libc::S_IFREG, flags)
        })?;
        let found = self.counted(entry).ok_or(Errno(libc::EIO))?;
        self.file(found.ino(), opened.fh)
    }

    /// Opens a file.
    pub fn open_file(&self, path: impl AsRef<Path>) -> io::Result<File> {
        let found = self.find(path.as_ref())?;
        let flags = if self.read_only { libc::O_RDONLY } else { libc::O_RDWR };
        let opened = self.call(|cx| self.fs.open(cx, found.ino(), flags, false))?;
        self.file(found.ino(), opened.fh)
    }

    /// Removes a name that is not a directory's. The file is removed with its last name, when it is
    /// not open.
    pub fn unlink(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.call(|cx| self.fs.unlink(cx, parent.ino(), &name))
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let (parent, name) = self.parent(path.as_ref())?;
        self.call(|cx| self.fs.rmdir(cx, parent.ino(), &name))
    }

    /// Renames; replaces what has the new name, as rename(2).
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let ((parent, name), (new_parent, new_name)) =
            (self.parent(from.as_ref())?, self.parent(to.as_ref())?);
        let flags = RenameFlags::default();
        self.call(|cx| self.fs.rename(cx, parent.ino(), &name, new_parent.ino(), &new_name, flags))
    }

    /// Attributes of a file or directory; a symbolic link's own.
    pub fn metadata(&self, path: impl AsRef<Path>) -> io::Result<Metadata> {
        let found = self.find(path.as_ref())?;
        self.attr(found.ino())
    }

    /// The names in a directory, without `.` and `..`, in no particular order.
    pub fn list(&self, path: impl AsRef<Path>) -> io::Result<Vec<Vec<u8>>> {
        let found = self.find(path.as_ref())?;
        let opened = self.call(|cx| self.fs.opendir(cx, found.ino()))?;
        let mut names = Vec::new();
        let mut sink = |entry: &ferry_fs::DirEntry| {
            if !matches!(&*entry.name, b"." | b"..") {
                names.push(entry.name.to_vec());
            }
            true
        };
        let listed =
            self.call(|cx| self.fs.readdir(cx, found.ino(), opened.fh, 0, false, &mut sink));
        let closed = self.call(|cx| {
            self.fs.releasedir(cx, found.ino(), opened.fh);
            Ok(())
        });
        listed.and(closed)?;
        Ok(names)
    }

    /// Makes everything on the volume durable.
    pub fn sync(&self) -> io::Result<()> {
        let sync = |cx: &ferry_fs::Cx<'_>| {
            self.fs.ioctl(cx, ferry_fs::ROOT, ferry_fs::ioctl::SYNC, &[], 0)
        };
        self.call(sync).map(drop)
    }

    /// Makes everything durable and closes the volume, for all clones and files: their later
    /// operations fail. Without it the next open recovers the volume, which then has everything
    /// that was synced.
    pub fn close(&self) -> io::Result<()> {
        Ok(self.fs.close().map_err(|error| error.errno())?)
    }

    /// The file system of the volume.
    pub fn filesystem(&self) -> &Arc<LocalFs> {
        &self.fs
    }

    fn attr(&self, ino: Ino) -> io::Result<Attr> {
        self.call(|cx| self.fs.getattr(cx, ino, None)).map(|(attr, _)| attr)
    }

    fn file(&self, ino: Ino, fh: u64) -> io::Result<File> {
        let open = self.fs.file(ino, fh).ok_or(Errno(libc::EBADF))?;
        Ok(File { volume: self.clone(), ino, fh, open })
    }

    fn call<T: ferry_fs::inprocess::FromReply>(
        &self,
        request: impl FnOnce(&ferry_fs::Cx<'_>) -> ferry_fs::Answer<T>,
    ) -> io::Result<T> {
        Ok(InProcess::default().call(request)?)
    }
}

impl File {
    /// Reads at byte `offset`; fewer bytes than asked only at the end of the file.
    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.volume.fs.read_at(&self.open, offset, out)?)
    }

    /// Writes all of `data` at byte `offset`.
    pub fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.volume.fs.write_at(&self.open, At::Offset(offset), data)?;
        Ok(())
    }

    /// Writes all of `data` at the end of the file, also if other threads append; returns its
    /// offset.
    pub fn append(&self, data: &[u8]) -> io::Result<u64> {
        let end = self.volume.fs.write_at(&self.open, At::End, data)?;
        Ok(end - data.len() as u64)
    }

    /// Truncates, or extends with zeros.
    pub fn set_len(&self, size: u64) -> io::Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.volume.call(|cx| self.volume.fs.setattr(cx, self.ino, Some(self.fh), &set)).map(drop)
    }

    /// Makes a hole: the range reads as zeros, and whole blocks of 4 KiB in it take no space.
    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
    }

    /// Allocates space for a range, so that writes to it do not run out of space, and extends the
    /// file over it.
    pub fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.fallocate(0, offset, len)
    }

    fn fallocate(&self, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        self.volume.call(|cx| self.volume.fs.fallocate(cx, self.ino, self.fh, mode, offset, len))
    }

    /// Makes the file durable, with its name and every directory above it. Concurrent callers share
    /// the device's flushes.
    pub fn sync(&self) -> io::Result<()> {
        self.volume.call(|cx| self.volume.fs.fsync(cx, self.ino, self.fh, false))
    }

    /// The file's attributes.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.volume.attr(self.ino)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let released = self.volume.call(|cx| {
            self.volume.fs.release(cx, self.ino, self.fh);
            Ok(())
        });
        debug_assert!(released.is_ok(), "a release cannot fail");
    }
}
