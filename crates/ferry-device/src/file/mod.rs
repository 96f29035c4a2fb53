//! A volume in a regular file or on a block device.
//!
//! Synchronous calls run on the caller's thread; [`BlockDevice::submit`] hands its batch to the one
//! I/O thread of the device ([`engine`]). Transfers bypass the host's page cache where the host can
//! (`O_DIRECT`): the volume has a cache of its own, and a flush is then one of the disk's cache
//! only. Where it cannot (some network file systems), the page cache is between, and `fdatasync`
//! writes it out as part of the flush.

mod cached;
mod engine;
mod host;
mod inbox;
mod lock;
mod ring;
mod sys;

use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::device::{BlockDevice, Io, Longest, check_range};
use crate::error::DeviceError;
use crate::started::{FileRead, ReadDone, ReadRing};
use crate::timing::{FlushTimer, FlushTiming};
use cached::CachedFlushes;
use engine::Engine;
pub(crate) use engine::on_io_thread;
use ferry_env::Env;
use ferry_env::activity::{self, Layer};
use host::{HostFile, write_all};
pub use lock::{FileLock, LockHolder};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fstatvfs};
use rustix::io::{Errno, retry_on_intr};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Largest size of a volume in bytes: what `off_t` and the offset of the ownership lock allow.
const SIZE_MAX: u64 = (1 << 62) - BLOCK_SIZE as u64;

/// Threads that read what is asked for at once.
const READERS_MAX: usize = 8;

/// What the opener will do with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Only read, beside other readers; a writer excludes it. Writes fail with `EROFS`.
    ReadOnly,
    /// Read and write, alone.
    ReadWrite,
}

/// A volume in a regular file or on a block device, owned by this handle until it is dropped.
///
/// Open it in the process that will use it: its I/O thread does not survive `fork`.
pub struct FileDevice {
    /// First, so that it has ended all I/O before the files are closed. `None` when opened to read
    /// only.
    engine: Option<Engine>,
    host: Arc<HostFile>,
    capacity: AtomicU64,
    path: PathBuf,
    warned_no_allocate: AtomicBool,
}

impl FileDevice {
    /// Opens a file or block device that is there already.
    pub fn open(path: &Path, mode: OpenMode, env: &Env) -> Result<Self, DeviceError> {
        Self::finish(open_owned(path, mode)?, path, mode, env)
    }

    /// The same for a file that the caller has opened. Errors call it `path`, which need not lead
    /// there.
    pub fn of_file(
        file: File,
        path: &Path,
        mode: OpenMode,
        env: &Env,
    ) -> Result<Self, DeviceError> {
        own(&file, path, mode)?;
        Self::finish(file, path, mode, env)
    }

    /// Makes a sparse file of `size` bytes, all zeros; its name is durable. With `overwrite` what
    /// was there is lost, unless it is in use; only then may `path` be a block device, which keeps
    /// its own size and contents (at least `size` bytes are asked of it). Without `overwrite`
    /// anything that is there is refused.
    pub fn create(path: &Path, size: u64, overwrite: bool, env: &Env) -> Result<Self, DeviceError> {
        let possible = size > 0 && size.is_multiple_of(BLOCK_SIZE as u64) && size <= SIZE_MAX;
        if !possible {
            return Err(DeviceError::Size { path: path.into(), size, limit: SIZE_MAX });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        let made = options.create_new(true).open(path);
        let (file, new) = match made {
            Ok(file) => {
                own(&file, path, OpenMode::ReadWrite)?;
                (file, true)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && overwrite => {
                (open_owned(path, OpenMode::ReadWrite)?, false)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(DeviceError::Exists(path.into()));
            }
            Err(e) => return Err(failed("create", path, e)),
        };
        let result = size_file(&file, path, size);
        if new && result.is_err() {
            // What is left over would be taken for a volume of somebody else; the first error is
            // the one to tell.
            drop(fs::remove_file(path));
        }
        result?;
        Self::finish(file, path, OpenMode::ReadWrite, env)
    }

    /// Opens a file or block device that is there already to write it. A file of 0 bytes, which a
    /// process leaves that dies while it makes one, gets `size` bytes.
    pub fn open_to_fill(path: &Path, size: u64, env: &Env) -> Result<Self, DeviceError> {
        let file = open_owned(path, OpenMode::ReadWrite)?;
        let found = file.metadata().map_err(|e| failed("examine", path, e))?;
        if found.is_file() && found.len() == 0 {
            size_file(&file, path, size)?;
        }
        Self::finish(file, path, OpenMode::ReadWrite, env)
    }

    /// Where the device was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a block device and not a regular file.
    pub fn is_block_device(&self) -> bool {
        self.host.block_device
    }

    /// Everything after the file is open and owned.
    fn finish(mut file: File, path: &Path, mode: OpenMode, env: &Env) -> Result<Self, DeviceError> {
        let block_device = is_block_device(&file, path)?;
        let claim = match (block_device, mode) {
            (true, OpenMode::ReadWrite) => Some(claim(path)?),
            _ => None,
        };
        let capacity = whole_blocks(&mut file).map_err(|e| failed("find the size of", path, e))?;
        let direct = bypass_page_cache(&file).map_err(|e| failed("read", path, e))?;
        if !direct {
            tracing::warn!(path = %path.display(), "no O_DIRECT here: transfers go through the host's page cache");
        }
        let for_rings = match sys::open_again(&file, direct) {
            Ok(again) => again,
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "rings read where the volume is owned");
                file.try_clone().map_err(|e| failed("open", path, e))?
            }
        };
        let host = Arc::new(HostFile {
            file,
            for_rings: Arc::new(for_rings),
            _claim: claim,
            block_device,
            timer: FlushTimer::default(),
            cached: (!direct).then(CachedFlushes::default),
            env: env.clone(),
        });
        let engine = match mode {
            OpenMode::ReadOnly => None,
            OpenMode::ReadWrite => {
                let engine = Engine::start(Arc::clone(&host));
                Some(engine.map_err(|e| failed("start the I/O thread of", path, e))?)
            }
        };
        Ok(Self {
            engine,
            host,
            capacity: AtomicU64::new(capacity),
            path: path.into(),
            warned_no_allocate: AtomicBool::new(false),
        })
    }

    fn check_writable(&self) -> io::Result<&Engine> {
        self.engine.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::EROFS))
    }

    /// What is wrong with a request, found before it is queued.
    fn check_request(&self, io: &Io) -> io::Result<()> {
        match io {
            Io::Write { offset, buf, .. } => {
                check_range(self.capacity(), *offset, buf.len() as u64)
            }
            Io::Flush { .. } => Ok(()),
        }
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        let file = &self.host.file;
        Ok(retry_on_intr(|| rustix::fs::fallocate(file, mode, offset, len))?)
    }
}

impl BlockDevice for FileDevice {
    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        self.check_writable()?;
        Ok(match self.host.block_device {
            true => Longest::Given(whole_blocks(&mut &self.host.file)?),
            false => Longest::Asked(SIZE_MAX),
        })
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        let most = self.capacity_max()?.bytes();
        if bytes > most {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if self.host.block_device {
            self.capacity.store(most, Ordering::Release);
            return Ok(());
        }
        if bytes < self.capacity() {
            self.capacity.store(bytes, Ordering::Release);
        }
        self.host.file.set_len(bytes)?;
        self.host.file.sync_all()?;
        self.capacity.store(bytes, Ordering::Release);
        Ok(())
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        check_range(self.capacity(), offset, buf.len() as u64)?;
        let _inside = activity::enter(Layer::DeviceRead);
        let mut at = 0;
        while at < buf.len() {
            match self.host.file.read_at(&mut buf[at..], offset + at as u64) {
                // The file ends before the volume does: somebody cut it, and holes read as zeros.
                Ok(0) => {
                    buf[at..].fill(0);
                    break;
                }
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn start_read(&self, ring: &dyn ReadRing, offset: u64, buf: Arc<AlignedBuf>, done: ReadDone) {
        match check_range(self.capacity(), offset, buf.len() as u64) {
            Ok(()) => {
                ring.start(FileRead::new(Arc::clone(&self.host.for_rings) as _, offset, buf, done))
            }
            Err(error) => done(Err(error)),
        }
    }

    fn read_many(&self, reads: &mut [(u64, AlignedBuf)]) -> Vec<io::Result<()>> {
        let readers = reads.len().min(READERS_MAX);
        let mut results: Vec<io::Result<()>> = reads.iter().map(|_| Ok(())).collect();
        let left = Mutex::new(reads.iter_mut().zip(&mut results));
        let reader = || {
            loop {
                let Some(((offset, buf), result)) = left.lock().next() else { return };
                *result = self.read(*offset, buf);
            }
        };
        thread::scope(|scope| {
            for _ in 1..readers {
                // Where there is no thread to be had, the others read what it would have.
                drop(thread::Builder::new().name("ferry-read".into()).spawn_scoped(scope, reader));
            }
            reader();
        });
        results
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.check_writable()?;
        check_range(self.capacity(), offset, buf.len() as u64)?;
        let _inside = activity::enter(Layer::DeviceWrite);
        write_all(&self.host.file, offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        // A reader has written nothing that could be lost.
        if self.engine.is_some() { self.host.flush() } else { Ok(()) }
    }

    fn submit(&self, mut batch: Vec<Io>) {
        let engine = match self.check_writable() {
            Ok(engine) => engine,
            Err(_) => return batch.into_iter().for_each(refuse_read_only),
        };
        for at in (0..batch.len()).rev() {
            if let Err(error) = self.check_request(&batch[at]) {
                Io::into_done(batch.remove(at))(Err(error));
            }
        }
        engine.submit(batch);
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_writable()?;
        check_range(self.capacity(), offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let mut result = self.fallocate(punch, offset, len);
        if is_unsupported(&result) && self.host.block_device {
            result = sys::block_discard(&self.host.file, offset, len);
        }
        if is_unsupported(&result) { Ok(()) } else { result }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_writable()?;
        check_range(self.capacity(), offset, len)?;
        if self.host.block_device || len == 0 {
            return Ok(());
        }
        let result = self.fallocate(FallocateFlags::KEEP_SIZE, offset, len);
        if !is_unsupported(&result) {
            return result;
        }
        // Hosts that copy on write cannot reserve space. To go on is what a user wants who puts a
        // volume there.
        if !self.warned_no_allocate.swap(true, Ordering::Relaxed) {
            tracing::warn!(path = %self.path.display(), "the host cannot reserve space: a full host shows at the write");
        }
        Ok(())
    }

    fn host_free(&self) -> Option<u64> {
        if self.host.block_device {
            return None;
        }
        match fstatvfs(&self.host.file) {
            Ok(host) => Some(host.f_bavail.saturating_mul(host.f_frsize)),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot ask the host for its free space");
                None
            }
        }
    }

    fn flush_timing(&self) -> FlushTiming {
        self.host.timer.get()
    }

    fn next_data(&self, offset: u64) -> u64 {
        // This moves the file's position, which nobody uses.
        match rustix::fs::seek(&self.host.file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(data) => data,
            Err(Errno::NXIO) => self.capacity(),
            // A host that cannot tell says that all is data.
            Err(_) => offset,
        }
    }

    fn reset_flush_timing(&self) {
        self.host.timer.reset();
    }
}

/// Bytes of a file or block device, in whole blocks. This moves the file's position, which nobody
/// uses.
fn whole_blocks(file: &mut impl Seek) -> io::Result<u64> {
    let end = file.seek(SeekFrom::End(0))?;
    Ok(end - end % BLOCK_SIZE as u64)
}

/// A flush of a reader is done at once; a write is refused.
fn refuse_read_only(io: Io) {
    match io {
        Io::Write { done, .. } => done(Err(io::Error::from_raw_os_error(libc::EROFS))),
        Io::Flush { done } => done(Ok(())),
    }
}

fn is_unsupported(result: &io::Result<()>) -> bool {
    let errno = result.as_ref().err().and_then(io::Error::raw_os_error);
    matches!(errno, Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY))
}

fn failed(what: &'static str, path: &Path, source: io::Error) -> DeviceError {
    DeviceError::Io { what, path: path.into(), source }
}

/// Refuses what is neither file nor block device before it is opened (opening a FIFO would wait).
fn check_kind(path: &Path) -> Result<(), DeviceError> {
    let kind = fs::metadata(path).map_err(|e| failed("open", path, e))?.file_type();
    if kind.is_file() || kind.is_block_device() {
        Ok(())
    } else {
        Err(DeviceError::WrongKind(path.into()))
    }
}

fn is_block_device(file: &File, path: &Path) -> Result<bool, DeviceError> {
    Ok(file.metadata().map_err(|e| failed("examine", path, e))?.file_type().is_block_device())
}

/// Opens what is there, and owns it. If its name was removed or leads to another file by then, that
/// one is opened: what is written to the first would be lost.
fn open_owned(path: &Path, mode: OpenMode) -> Result<File, DeviceError> {
    let mut options = OpenOptions::new();
    options.read(true).write(mode == OpenMode::ReadWrite);
    loop {
        check_kind(path)?;
        let file = options.open(path).map_err(|e| failed("open", path, e))?;
        own(&file, path, mode)?;
        let found = file.metadata().map_err(|e| failed("examine", path, e))?;
        let named = fs::metadata(path).map_err(|e| failed("open", path, e))?;
        if (found.dev(), found.ino()) != (named.dev(), named.ino()) {
            continue;
        }
        // A bind mount leads to a file that has no other name any more.
        if found.is_file() && found.nlink() == 0 {
            return Err(failed("open", path, io::ErrorKind::NotFound.into()));
        }
        return Ok(file);
    }
}

/// Takes ownership or names the owner.
fn own(file: &File, path: &Path, mode: OpenMode) -> Result<(), DeviceError> {
    match lock::acquire(file, mode == OpenMode::ReadWrite).map_err(|e| failed("lock", path, e))? {
        Ok(()) => Ok(()),
        Err(holder) => {
            Err(DeviceError::InUse { path: path.into(), pid: holder.pid, writing: holder.writing })
        }
    }
}

/// Keeps the kernel from mounting a block device, and us from using one that it has mounted.
fn claim(path: &Path) -> Result<File, DeviceError> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
    opened.map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => DeviceError::Busy(path.into()),
        _ => failed("claim", path, e),
    })
}

/// Empties the file and gives it its size; checks that of a block device. The file is owned
/// already.
fn size_file(file: &File, path: &Path, size: u64) -> Result<(), DeviceError> {
    if is_block_device(file, path)? {
        let limit =
            (&*file).seek(SeekFrom::End(0)).map_err(|e| failed("find the size of", path, e))?;
        return if size <= limit {
            Ok(())
        } else {
            Err(DeviceError::Size { path: path.into(), size, limit })
        };
    }
    // A size that the host refuses leaves what was there.
    let possible = file.set_len(size).and_then(|()| file.set_len(0));
    let resized = possible.and_then(|()| file.set_len(size)).and_then(|()| file.sync_all());
    resized.map_err(|e| failed("resize", path, e))?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| failed("sync the directory of", path, e))
}

/// Turns `O_DIRECT` on if the host has it and takes transfers of our alignment. Tells whether it is
/// on.
fn bypass_page_cache(file: &File) -> io::Result<bool> {
    if let Err(error) = sys::set_direct(file, true) {
        return if error.raw_os_error() == Some(libc::EINVAL) { Ok(false) } else { Err(error) };
    }
    // Some hosts accept the flag and then refuse each transfer.
    match file.read_at(&mut AlignedBuf::zeroed(BLOCK_SIZE), 0) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            sys::set_direct(file, false).map(|()| false)
        }
        // Any other failure is one of the block: the reader of that block will see it.
        _ => Ok(true),
    }
}
