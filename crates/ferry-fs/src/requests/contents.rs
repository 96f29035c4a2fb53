//! Opening, reading and writing files.

use crate::api::{Answer, Cx, EarlyAck, Errno, Ino, Opened, Reply, SetAttr, Stop};
use crate::error::FsError;
use crate::errseq::ErrorCursor;
use crate::file::miss::Miss;
use crate::file::read::Misses;
use crate::file::stream::Stream;
use crate::inode::incore::Inode;
use crate::keys::InodeRecord;
use crate::local::carried::carried_file;
use crate::local::handles::Handle;
use crate::local::jobs::PooledRead;
use crate::local::local_fs::{CacheMode, LocalFs, errno};
use crate::local::pool::Work;
use crate::local::transaction::How;
use crate::patience::{self, Hurried};
use crate::posix::{is_dir, without_set_ids};
use crate::store::data_store::{At, Busy, Touch};
use ferry_device::ReadRing;
use ferry_env::activity::{self, Layer, Operation};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// `copy_file_range` copies so much at a time.
const COPY_CHUNK: usize = 1 << 20;
/// It returns after so many bytes: the caller goes on, or is killed.
pub(crate) const COPY_MAX: u64 = 64 << 20;

/// An open file of a process that has the volume itself. It does not keep the handle open.
pub struct OpenFile(Arc<Handle>);

impl Work<LocalFs> for PooledRead {
    const NAME: &'static str = "ferry-read";
    /// The device is asked for so many at the same time, beside read-ahead.
    const THREADS_MAX: usize = 8;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        for PooledRead { handle, offset, len, parked } in these {
            let _resumed = activity::resume(Operation::Read);
            parked.complete(fs.read_waiting(&handle, offset, len));
        }
    }
}

impl LocalFs {
    /// A handle that keeps the inode alive: its maker's, or another's.
    pub(crate) fn open_handle(
        &self,
        cx: &Cx,
        inode: &Arc<Inode>,
        flags: i32,
        maker: bool,
    ) -> Opened {
        inode.opens.fetch_add(1, Ordering::SeqCst);
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let bypass =
            self.bypass_alone(inode, flags, maker) || self.bypass_with_others(inode, writes);
        self.recall_loss(inode);
        let error_cursor = inode.file.errors.sample();
        let bypassing = bypass && writes;
        let asks = flags & libc::O_DIRECT != 0;
        let direct = match self.options.cache {
            CacheMode::Strict => true,
            // A reader past the cache harms nobody.
            CacheMode::Kernel => bypass || asks && !writes,
            CacheMode::Writeback => false,
        };
        let noatime = flags & libc::O_NOATIME != 0;
        let misses = if asks { Misses::Uncached } else { Misses::Cached };
        let kernel_write_errors = inode.kernel_write_errors.end();
        let handle = Handle {
            inode: inode.clone(),
            uid: cx.uid,
            error_cursor,
            error_closed: ErrorCursor::default(),
            noatime,
            misses,
            stream: Stream::default(),
            direct,
            bypassing,
            writes,
            kernel_write_errors,
        };
        let fh = self.handles.add(handle);
        if let Some(known) = &self.options.known
            && let Some(handle) = self.handles.get(inode.ino, fh)
        {
            known.opened(&carried_file(fh, &handle).known());
        }
        self.opened(fh, direct)
    }

    fn handle(&self, ino: Ino, fh: u64) -> Result<Arc<Handle>, FsError> {
        self.open_file(ino, fh).map_err(FsError::from)
    }

    /// An open file. `ESTALE`: it was lost when a process was killed.
    pub(crate) fn open_file(&self, ino: Ino, fh: u64) -> Result<Arc<Handle>, Errno> {
        self.handles.get(ino, fh).ok_or_else(|| match self.table.get(ino) {
            Ok(None) => Errno(libc::ESTALE),
            _ => Errno(libc::EBADF),
        })
    }

    pub(crate) fn do_open(
        &self,
        cx: &Cx,
        inode: &Arc<Inode>,
        flags: i32,
        kill: bool,
    ) -> Result<Opened, FsError> {
        let (mode, blocks) = {
            let state = inode.state.read_now()?;
            (state.rec.mode, state.logged.blocks)
        };
        if is_dir(mode) {
            return Err(errno(libc::EISDIR));
        }
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if writes || flags & libc::O_TRUNC != 0 {
            self.writable()?;
        }
        if flags & libc::O_TRUNC != 0 {
            if blocks > 0 {
                patience::may_wait()?;
            }
            if kill {
                self.drop_capability(How::waiting(cx.early_ack()), inode)?;
            }
            self.resize(
                How::waiting(cx.early_ack()),
                inode,
                0,
                &SetAttr { kill_suidgid: kill, ..SetAttr::default() },
            )?;
        }
        Ok(self.open_handle(cx, inode, flags, false))
    }

    pub(crate) fn do_release(&self, fh: u64) {
        if let Some(known) = &self.options.known {
            known.closed(fh);
        }
        if let Some(handle) = self.handles.remove(fh) {
            handle.inode.file.errors.released(&handle.error_closed);
            if handle.inode.file.errors.is_told() {
                self.note_told(&handle.inode);
            }
            self.let_go(&handle);
        }
    }

    /// A handle is closed, or is another process's from now on: whatever was not told through it
    /// stays noted.
    pub(crate) fn let_go(&self, handle: &Handle) {
        handle.inode.bypassing.fetch_sub(u32::from(handle.bypassing), Ordering::SeqCst);
        handle.inode.opens.fetch_sub(1, Ordering::AcqRel);
        self.maybe_unknown(&handle.inode);
    }

    /// What is in memory is answered at once. What must come from the device is read by the
    /// transport's ring, or by one of the readers, so that no other request waits behind it.
    pub(crate) fn do_read(
        &self,
        cx: &Cx,
        (ino, fh): (Ino, u64),
        offset: u64,
        out: &mut [u8],
        pages: bool,
    ) -> Answer<usize> {
        let handle = self.open_file(ino, fh)?;
        if pages && handle.direct {
            Self::has_mapped(&handle.inode);
        }
        self.data.note_read(&handle.stream, &handle.inode, offset, out.len());
        if let Some(read) = self.data.read_cached(&handle.inode, offset, out) {
            self.was_read(&handle);
            return Ok(read);
        }
        if cx.park.may_wait() || !self.options.background {
            return Ok(self.read_now(&handle, offset, out)?);
        }
        let len = out.len();
        let ring = cx.park.read_ring();
        let miss = ring.and_then(|ring| {
            Some((ring, self.data.miss(&handle.inode, offset, len, handle.misses)?))
        });
        let waits_for = if miss.is_some() { Layer::DeviceRead } else { Layer::Pool };
        let parked = cx.park_in(waits_for, None);
        let read = PooledRead { handle, offset, len, parked };
        match miss {
            Some((ring, miss)) => self.start_read(ring, miss, read),
            None => self.read_pool.push(read),
        }
        Err(Stop::Parked)
    }

    /// Reads through the transport's ring; one of the readers takes what cannot be read so.
    fn start_read(&self, ring: &dyn ReadRing, miss: Miss, read: PooledRead) {
        let inode = Arc::clone(&read.handle.inode);
        let range = (&inode, read.offset, read.len);
        let (me, pool) = (Weak::clone(&self.me), Arc::clone(&self.read_pool));
        let ended = move |bytes| match (bytes, me.upgrade()) {
            (Some(bytes), Some(fs)) => {
                fs.was_read(&read.handle);
                read.parked.complete(Ok(Reply::Data(bytes)));
            }
            _ => pool.push(read),
        };
        self.data.start_miss(ring, range, miss, Box::new(ended));
    }

    /// For one of the readers.
    pub(crate) fn read_waiting(
        &self,
        handle: &Handle,
        offset: u64,
        len: usize,
    ) -> Result<Reply, Errno> {
        let inode = &handle.inode;
        let shared = self.data.read_shared(inode, offset, len);
        if let Some(bytes) = shared.map_err(|error| self.report("read", inode.ino, error))? {
            self.was_read(handle);
            return Ok(Reply::Shared(bytes));
        }
        let mut bytes = vec![0; len];
        let read = self.read_now(handle, offset, &mut bytes)?;
        bytes.truncate(read);
        Ok(Reply::Data(bytes))
    }

    fn read_now(&self, handle: &Handle, offset: u64, out: &mut [u8]) -> Result<usize, Errno> {
        let inode = &handle.inode;
        let read = self
            .data
            .read_as(inode, offset, out, handle.misses)
            .map_err(|error| self.report("read", inode.ino, error))?;
        self.was_read(handle);
        Ok(read)
    }

    /// Something was read through a handle.
    fn was_read(&self, handle: &Handle) {
        if !handle.noatime {
            self.touch_atime(&handle.inode);
        }
    }

    pub(crate) fn do_write(
        &self,
        how: How,
        ino: Ino,
        fh: u64,
        at: At,
        data: &[u8],
        kill: bool,
    ) -> Result<u64, FsError> {
        let handle = self.handle(ino, fh)?;
        self.write_handle(how, &handle, at, data, kill)?;
        Ok(data.len() as u64)
    }

    /// Returns the offset behind the last byte.
    fn write_handle(
        &self,
        how: How,
        handle: &Handle,
        at: At,
        data: &[u8],
        kill: bool,
    ) -> Result<u64, FsError> {
        self.writable()?;
        if let At::Offset(offset) = at
            && offset.checked_add(data.len() as u64).is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(errno(libc::EFBIG));
        }
        if kill {
            // It is the first step, so another thread can begin anew.
            let _hurried = Hurried::if_so(self.data.is_refused(how.busy));
            self.drop_capability(How { busy: Busy::Wait, ..how }, &handle.inode)?;
        }
        let now = self.time(how);
        let mut edit = |rec: &mut InodeRecord| {
            (rec.mtime, rec.ctime) = (now, now);
            if kill {
                rec.mode = without_set_ids(rec.mode);
            }
        };
        let touch = match how.ack {
            None if !kill => Touch::Times(now),
            Some(_) if !kill && (1..=i128::from(i64::MAX)).contains(&now.0) => Touch::Exactly(now),
            _ => Touch::Edit(&mut edit),
        };
        self.data.write_from(how.busy, how.reservation(), &handle.inode, at, data, touch)
    }

    /// An open handle, to read and write in process.
    pub fn file(&self, ino: Ino, fh: u64) -> Option<OpenFile> {
        self.handles.get(ino, fh).map(OpenFile)
    }

    /// Reads into `out`; fewer bytes only at the end of the file. Waits for the device if need be.
    pub fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> Result<usize, Errno> {
        self.read_now(&file.0, offset, out)
    }

    /// Writes all of `data`; returns the offset behind its last byte.
    pub fn write_at(&self, file: &OpenFile, at: At, data: &[u8]) -> Result<u64, Errno> {
        self.write_handle(How::waiting(None), &file.0, at, data, false)
            .map_err(|error| self.report("write", file.0.inode.ino, error))
    }

    /// A write error that this handle was not told yet.
    pub(crate) fn do_flush(&self, ino: Ino, fh: u64) -> Result<(), FsError> {
        let handle = self.handle(ino, fh)?;
        let errors = &handle.inode.file.errors;
        match errors.tell_at_close(&handle.error_cursor, &handle.error_closed) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    pub(crate) fn do_fallocate(
        &self,
        ack: Option<EarlyAck>,
        (ino, fh): (Ino, u64),
        mode: i32,
        (offset, len): (u64, u64),
        kill: bool,
    ) -> Result<(), FsError> {
        self.writable()?;
        let handle = self.handle(ino, fh)?;
        if len == 0 {
            return Err(errno(libc::EINVAL));
        }
        if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(errno(libc::EFBIG));
        }
        let how = How::waiting(ack);
        if kill {
            self.take_privileges(how, &handle.inode)?;
        }
        let now = self.time(how);
        self.data.fallocate(&handle.inode, mode, offset, len, &mut |rec| {
            rec.mtime = now;
            rec.ctime = now;
        })
    }

    pub(crate) fn do_lseek(
        &self,
        ino: Ino,
        fh: u64,
        offset: u64,
        whence: i32,
    ) -> Result<u64, FsError> {
        let handle = self.handle(ino, fh)?;
        match whence {
            libc::SEEK_DATA | libc::SEEK_HOLE => self.data.seek(&handle.inode, offset, whence),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    /// Copies through memory: data is immutable where it is, but not yet shared between files.
    pub(crate) fn do_copy(
        &self,
        ack: Option<EarlyAck>,
        (ino_in, fh_in, off_in): (Ino, u64, u64),
        (ino_out, fh_out, off_out): (Ino, u64, u64),
        len: u64,
        kill: bool,
    ) -> Result<u64, FsError> {
        self.writable()?;
        let source = self.handle(ino_in, fh_in)?;
        self.handle(ino_out, fh_out)?;
        if ino_in == ino_out && off_in.abs_diff(off_out) < len {
            return Err(errno(libc::EINVAL));
        }
        let len = len.min(COPY_MAX);
        let mut buf = vec![0; COPY_CHUNK.min(len as usize)];
        let mut copied = 0;
        while copied < len {
            let want = buf.len().min((len - copied) as usize);
            let step = (|| {
                let got = self.data.read(&source.inode, off_in + copied, &mut buf[..want])?;
                if got > 0 {
                    let at = At::Offset(off_out + copied);
                    self.do_write(How::waiting(ack), ino_out, fh_out, at, &buf[..got], kill)?;
                }
                Ok(got)
            })();
            match step {
                Ok(0) => break,
                Ok(got) => copied += got as u64,
                Err(_) if copied > 0 => break,
                Err(error) => return Err(error),
            }
        }
        if copied > 0 {
            self.was_read(&source);
        }
        Ok(copied)
    }

    /// A symbolic link's target.
    pub(crate) fn do_readlink(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        let inode = self.table.need(ino)?;
        let target = {
            let state = inode.state.read_now()?;
            if state.rec.mode & libc::S_IFMT != libc::S_IFLNK {
                return Err(errno(libc::EINVAL));
            }
            state.logged.inline.as_ref().ok_or(errno(libc::EIO))?.to_vec()
        };
        self.touch_atime(&inode);
        Ok(target)
    }
}
