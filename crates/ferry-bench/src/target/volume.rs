//! A volume in memory, in this process: the whole file system below the kernel's interface, on a
//! device that takes real time.

use super::File;
use crate::error::BenchError;
use crate::model::{DeviceModel, ModelDevice};
use crate::stats::Histogram;
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::{
    Answer, At, Cx, Errno, Filesystem, FlushPolicy, FsOptions, InProcess, Ino, LocalFs,
    MkfsOptions, Opened, ROOT, RenameFlags, SetAttr, inprocess::FromReply, ioctl, mkfs,
};
use serde_json::Value;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The volume and its device.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// The device that the model describes.
    pub device: DeviceModel,
    /// Its size in bytes; only what is written takes memory.
    pub capacity: u64,
    /// Size of the log in bytes; by default as `ferry mkfs` chooses.
    pub log_size: Option<u64>,
    /// As a mount's options.
    pub fs: FsOptions,
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self {
            device: DeviceModel::default(),
            capacity: 16 << 30,
            log_size: None,
            fs: FsOptions::default(),
        }
    }
}

/// A volume in memory.
pub struct Volume {
    device: Arc<ModelDevice>,
    fs: Arc<LocalFs>,
}

/// A caller's number: each thread has one, from 1.
fn caller() -> InProcess {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local!(static MINE: Cell<u32> = Cell::new(NEXT.fetch_add(1, Ordering::Relaxed)));
    InProcess { caller: MINE.get(), ..InProcess::default() }
}

impl Volume {
    /// Makes and opens it; from then on the device takes time.
    pub fn new(options: &VolumeOptions) -> Result<Arc<Self>, BenchError> {
        let device = ModelDevice::new(options.device.clone(), options.capacity)?;
        let as_device: Arc<dyn BlockDevice> = device.clone();
        let env = Env::real();
        mkfs(
            &as_device,
            &MkfsOptions { log_size: options.log_size, ..MkfsOptions::default() },
            &env,
        )?;
        let fs = LocalFs::open(as_device, options.fs.clone(), env)?;
        device.begin();
        Ok(Arc::new(Self { device, fs }))
    }

    pub fn stats(&self) -> Value {
        self.fs.stats()
    }

    pub fn tune(&self, policy: FlushPolicy) -> io::Result<()> {
        let number = FlushPolicy::ALL.iter().position(|p| *p == policy).unwrap_or_default() as u32;
        let what = ioctl::TUNE_FLUSH | ioctl::TUNE_RESET_FLUSH_TIME;
        let message = [what.to_ne_bytes(), number.to_ne_bytes(), [0; 4], [0; 4]].concat();
        self.call(|cx, fs| fs.ioctl(cx, ROOT, ioctl::TUNE, &message, 0)).map(drop)
    }

    pub fn size(&self) -> io::Result<u64> {
        let stat = self.call(|cx, fs| fs.statfs(cx))?;
        Ok(stat.blocks * u64::from(stat.block_size))
    }

    pub fn sync(&self) -> io::Result<()> {
        self.call(|cx, fs| fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).map(drop)
    }

    pub fn take_lateness(&self) -> Histogram {
        self.device.take_lateness()
    }

    /// One request for as many files as one takes. The first error, if any file failed.
    pub fn sync_files(&self, mut files: impl Iterator<Item = io::Result<File>>) -> io::Result<()> {
        loop {
            let some: Vec<File> =
                files.by_ref().take(ioctl::SYNC_FILES_MAX).collect::<io::Result<_>>()?;
            if some.is_empty() {
                return Ok(());
            }
            let inos = some.iter().map(|file| match file {
                File::Volume(file) => Ok(file.ino.ino),
                File::Mounted(_) => Err(io::Error::from(io::ErrorKind::CrossesDevices)),
            });
            self.sync_inodes(&inos.collect::<io::Result<Vec<_>>>()?)?;
        }
    }

    fn sync_inodes(&self, inos: &[Ino]) -> io::Result<()> {
        let mut message = [(inos.len() as u32).to_ne_bytes(), [0; 4]].concat();
        message.extend(inos.iter().flat_map(|ino| ino.to_ne_bytes()));
        let room = ioctl::SYNC_FILES_LEN as usize;
        let answer = self.call(|cx, fs| fs.ioctl(cx, ROOT, ioctl::SYNC_FILES, &message, room))?;
        let words = answer.chunks_exact(8).skip(1).filter_map(|word| word.first_chunk());
        match words.map(|word| i32::from_ne_bytes(*word)).find(|errno| *errno != 0) {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }

    fn call<T: FromReply>(
        &self,
        request: impl FnOnce(&Cx, &LocalFs) -> Answer<T>,
    ) -> io::Result<T> {
        caller()
            .call(|cx| request(cx, &self.fs))
            .map_err(|Errno(code)| io::Error::from_raw_os_error(code))
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.device.end();
        self.fs.detach();
        if let Err(error) = self.fs.close() {
            tracing::warn!(%error, "the volume in memory was not closed cleanly");
        }
    }
}

/// An inode that is known to the file system until this is dropped.
pub struct Owned {
    volume: Arc<Volume>,
    ino: Ino,
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.ino != ROOT {
            self.volume.fs.forget(self.ino, 1);
        }
    }
}

impl Owned {
    pub fn root(volume: &Arc<Volume>) -> Arc<Self> {
        Arc::new(Self { volume: volume.clone(), ino: ROOT })
    }

    fn own(&self, ino: Ino) -> Arc<Self> {
        Arc::new(Self { volume: self.volume.clone(), ino })
    }

    fn entry(&self, entry: &ferry_fs::Entry) -> io::Result<Arc<Self>> {
        entry.attr.map(|attr| self.own(attr.ino)).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn lookup(&self, name: &str) -> io::Result<Arc<Self>> {
        self.entry(&self.volume.call(|cx, fs| fs.lookup(cx, self.ino, name.as_bytes()))?)
    }

    pub fn mkdir(&self, name: &str) -> io::Result<Arc<Self>> {
        self.entry(&self.volume.call(|cx, fs| fs.mkdir(cx, self.ino, name.as_bytes(), 0o755))?)
    }

    pub fn open_dir(&self, name: &str) -> io::Result<Arc<Self>> {
        self.lookup(name)
    }

    pub fn create(&self, name: &str) -> io::Result<OpenFile> {
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let mode = libc::S_IFREG | 0o644;
        let (entry, opened) =
            self.volume.call(|cx, fs| fs.create(cx, self.ino, name.as_bytes(), mode, flags))?;
        OpenFile::new(self.entry(&entry)?, opened)
    }

    pub fn open(&self, name: &str) -> io::Result<OpenFile> {
        let ino = self.lookup(name)?;
        let opened = self.volume.call(|cx, fs| fs.open(cx, ino.ino, libc::O_RDWR, false))?;
        OpenFile::new(ino, opened)
    }

    pub fn stat(&self, name: &str) -> io::Result<u64> {
        let found = self.volume.call(|cx, fs| fs.lookup(cx, self.ino, name.as_bytes()))?;
        self.entry(&found)?;
        Ok(found.attr.map_or(0, |attr| attr.size))
    }

    pub fn unlink(&self, name: &str) -> io::Result<()> {
        self.volume.call(|cx, fs| fs.unlink(cx, self.ino, name.as_bytes()))
    }

    pub fn rename(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        let (name, new, flags) = (name.as_bytes(), new.as_bytes(), RenameFlags::default());
        self.volume.call(|cx, fs| fs.rename(cx, self.ino, name, to.ino, new, flags))
    }

    pub fn link(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        let file = self.lookup(name)?;
        let linked = self.volume.call(|cx, fs| fs.link(cx, file.ino, to.ino, new.as_bytes()))?;
        self.entry(&linked).map(drop)
    }

    pub fn remove_tree(&self, name: &str) -> io::Result<()> {
        let dir = self.lookup(name)?;
        for (name, is_dir) in dir.list()? {
            if is_dir { dir.remove_tree(&name)? } else { dir.unlink(&name)? }
        }
        self.volume.call(|cx, fs| fs.rmdir(cx, self.ino, name.as_bytes()))
    }

    /// The names, and whether each is a directory.
    fn list(&self) -> io::Result<Vec<(String, bool)>> {
        let mut names = Vec::new();
        let opened = self.volume.call(|cx, fs| fs.opendir(cx, self.ino))?;
        let listed = self.volume.call(|cx, fs| {
            fs.readdir(cx, self.ino, opened.fh, 0, false, &mut |entry| {
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                if name != "." && name != ".." {
                    names.push((name, entry.kind == libc::S_IFDIR));
                }
                true
            })
        });
        self.volume.call(|cx, fs| {
            fs.releasedir(cx, self.ino, opened.fh);
            Ok(())
        })?;
        listed.map(|()| names)
    }
}

/// An open file.
pub struct OpenFile {
    ino: Arc<Owned>,
    fh: u64,
    open: ferry_fs::OpenFile,
}

impl OpenFile {
    fn new(ino: Arc<Owned>, opened: Opened) -> io::Result<Self> {
        let open = ino.volume.fs.file(ino.ino, opened.fh).ok_or(Errno(libc::EBADF))?;
        Ok(Self { ino, fh: opened.fh, open })
    }

    pub fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.ino.volume.fs.write_at(&self.open, At::Offset(offset), data)?;
        Ok(())
    }

    /// Returns where it ends.
    pub fn append(&self, data: &[u8]) -> io::Result<u64> {
        Ok(self.ino.volume.fs.write_at(&self.open, At::End, data)?)
    }

    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.ino.volume.fs.read_at(&self.open, offset, out)?)
    }

    pub fn set_len(&self, len: u64) -> io::Result<()> {
        let (ino, volume) = (self.ino.ino, &self.ino.volume);
        let set = SetAttr { size: Some(len), ..SetAttr::default() };
        volume.call(|cx, fs| fs.setattr(cx, ino, Some(self.fh), &set)).map(drop)
    }

    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let (ino, volume) = (self.ino.ino, &self.ino.volume);
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        volume.call(|cx, fs| fs.fallocate(cx, ino, self.fh, hole, offset, len))
    }

    pub fn sync(&self) -> io::Result<()> {
        let (ino, volume) = (self.ino.ino, &self.ino.volume);
        volume.call(|cx, fs| fs.fsync(cx, ino, self.fh, false))
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let (ino, fh) = (self.ino.ino, self.fh);
        let closed = self.ino.volume.call(|cx, fs| {
            fs.release(cx, ino, fh);
            Ok(())
        });
        debug_assert!(closed.is_ok(), "closing never fails");
    }
}
