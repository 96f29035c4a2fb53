//! Direct writes (past the kernel's page cache) to files that programs have mapped into memory.
//!
//! Before such a WRITE the kernel writes back the dirty pages of the range and drops them. A load
//! or store may bring a page back before the file system has made the write. That page is stale,
//! and once it is dirty the kernel writes all of it back, over the new bytes. So, if the kernel may
//! have pages of the file:
//!
//! 1. The bytes of the write become an *overlay* of the file: if a page that the kernel writes back
//!    overlaps them, they replace its bytes.
//! 2. The kernel drops the pages. It waits for pages that are being read, which were read before
//!    step 1 without the overlay.
//! 3. The file system makes the write. A page that is read from here on is fresh, and the overlay
//!    no longer applies to it.
//! 4. The kernel drops the pages once more, so that none is older than the write. Then the write is
//!    answered.
//!
//! If nothing is mapped, this costs two calls of [`Filesystem::keeps_pages`]: one before the write,
//! and one after it, because a page may be read for the first time in between. In that case the
//! write is made once more, as above, before it is answered.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use ferry_fs::{
    Answer, Complete, Cx, Errno, Filesystem, Ino, Interrupt, Park, Reply, RequestId, Stop,
};
use parking_lot::Mutex;

use crate::init::BACKGROUND_MAX;

/// If this many writes wait for pages, further ones are answered as soon as they are made, and the
/// kernel drops its pages afterwards. The kernel sends a limited number of asynchronous requests at
/// a time: if all of them were writes that wait for pages, it could not write these pages back.
const WAITING_MAX: usize = BACKGROUND_MAX as usize / 4 * 3;

/// Makes the kernel drop pages.
pub(crate) trait DropPages: Send + Sync {
    /// Another thread calls `done` when the kernel has written back and dropped its pages of the
    /// range.
    fn drop_pages(&self, ino: Ino, offset: u64, len: u64, done: Box<dyn FnOnce() + Send>);
}

/// What the writes go to.
pub(crate) trait WriteTarget: Send + Sync {
    /// As [`Filesystem::keeps_pages`].
    fn keeps_pages(&self, ino: Ino, fh: u64) -> bool;
    /// As [`Filesystem::write`].
    fn write(&self, cx: &Cx<'_>, write: DirectWriteArgs, data: &[u8]) -> Answer<u64>;
}

/// Writes to a file system.
pub(crate) struct FilesystemTarget(pub(crate) Arc<dyn Filesystem>);

impl WriteTarget for FilesystemTarget {
    fn keeps_pages(&self, ino: Ino, fh: u64) -> bool {
        self.0.keeps_pages(ino, fh)
    }

    fn write(&self, cx: &Cx<'_>, write: DirectWriteArgs, data: &[u8]) -> Answer<u64> {
        let DirectWriteArgs { ino, fh, offset, append, kill_suidgid } = write;
        self.0.write(cx, ino, fh, offset, data, append, kill_suidgid)
    }
}

/// The arguments of a WRITE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectWriteArgs {
    pub(crate) ino: Ino,
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) append: bool,
    pub(crate) kill_suidgid: bool,
}

/// The bytes of a write, in place of what the kernel writes back.
struct Overlay {
    id: usize,
    ino: Ino,
    offset: u64,
    data: Arc<[u8]>,
    /// The file system has made the write.
    is_made: bool,
    /// Ranges that the kernel has read since: the overlay does not apply there.
    fresh: Vec<Range<u64>>,
}

impl Overlay {
    fn common(&self, other: &Range<u64>) -> Range<u64> {
        let end = self.offset.saturating_add(self.data.len() as u64);
        self.offset.max(other.start)..end.min(other.end)
    }
}

#[derive(Default)]
struct Overlays {
    all: Vec<Overlay>,
    next_id: usize,
}

/// The direct writes to mapped files that are under way.
pub(crate) struct DirectWrites {
    kernel: Arc<dyn DropPages>,
    fs: Arc<dyn WriteTarget>,
    /// How many there are: most mounts never have any.
    count: AtomicUsize,
    overlays: Mutex<Overlays>,
}

impl DirectWrites {
    pub(crate) fn new(kernel: Arc<dyn DropPages>, fs: Arc<dyn WriteTarget>) -> Arc<Self> {
        Arc::new(Self { kernel, fs, count: AtomicUsize::new(0), overlays: Mutex::default() })
    }

    /// The kernel is about to read pages, which will contain every write that was made before.
    pub(crate) fn reads(&self, ino: Ino, offset: u64, len: u64) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let range = offset..offset.saturating_add(len);
        let mut overlays = self.overlays.lock();
        for overlay in overlays.all.iter_mut().filter(|o| o.ino == ino && o.is_made) {
            if !overlay.common(&range).is_empty() {
                overlay.fresh.push(range.clone());
            }
        }
    }

    /// The bytes to store in place of `data`, which the kernel writes back.
    pub(crate) fn written_back<'d>(&self, ino: Ino, offset: u64, data: &'d [u8]) -> Cow<'d, [u8]> {
        let mut data = Cow::Borrowed(data);
        if self.count.load(Ordering::SeqCst) == 0 {
            return data;
        }
        let range = offset..offset.saturating_add(data.len() as u64);
        for overlay in self.overlays.lock().all.iter().filter(|o| o.ino == ino) {
            for part in without(overlay.common(&range), &overlay.fresh) {
                let from = (part.start - overlay.offset) as usize;
                let to = (part.start - offset) as usize;
                let len = (part.end - part.start) as usize;
                data.to_mut()[to..to + len].copy_from_slice(&overlay.data[from..from + len]);
            }
        }
        data
    }

    /// Makes a direct write.
    pub(crate) fn write(
        self: &Arc<Self>,
        cx: &Cx<'_>,
        write: DirectWriteArgs,
        data: &[u8],
    ) -> Answer<u64> {
        let mut made = None;
        if !self.fs.keeps_pages(write.ino, write.fh) {
            let park = UnmappedWrite { cx, direct_writes: self, write, data };
            let count = self.fs.write(&Cx { park: &park, ..*cx }, write, data)?;
            fence(Ordering::SeqCst);
            if !self.fs.keeps_pages(write.ino, write.fh) {
                return Ok(count);
            }
            made = Some(count);
        }
        self.begin(cx, write, data.into(), made, cx.park.park(None));
        Err(Stop::Parked)
    }

    /// Begins the steps. `made`: the write was made before the file was found to be mapped.
    fn begin(
        self: &Arc<Self>,
        cx: &Cx<'_>,
        write: DirectWriteArgs,
        data: Arc<[u8]>,
        made: Option<u64>,
        complete: Complete,
    ) {
        let waiting = self.count.fetch_add(1, Ordering::SeqCst) < WAITING_MAX;
        let id = {
            let mut overlays = self.overlays.lock();
            overlays.next_id += 1;
            let id = overlays.next_id;
            // If other clients change the file, the file system chooses the offset of an append:
            // the kernel has no pages there.
            let bytes = if write.append { [].into() } else { Arc::clone(&data) };
            let overlay = Overlay {
                id,
                ino: write.ino,
                offset: write.offset,
                data: bytes,
                is_made: false,
                fresh: Vec::new(),
            };
            overlays.all.push(overlay);
            id
        };
        let this = Arc::new(DirectWrite {
            direct_writes: Arc::clone(self),
            caller: (cx.uid, cx.gid, cx.pid),
            request: cx.request(),
            write,
            data,
            id,
            waiting,
            complete: Mutex::new(Some(complete)),
        });
        match made {
            // An append made twice would appear twice. The kernel's pages need no overlay either:
            // the append lies behind the end of the file that they know.
            Some(count) if write.append => this.made(Ok(Reply::Count(count))),
            _ if waiting => this.drop_pages(DirectWrite::make),
            _ => this.make(),
        }
    }

    fn end(&self, id: usize) {
        self.overlays.lock().all.retain(|overlay| overlay.id != id);
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The parts of `range` that lie in none of `excluded`.
fn without(range: Range<u64>, excluded: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = vec![range];
    for one in excluded {
        left = left
            .into_iter()
            .flat_map(|part| {
                [part.start..part.end.min(one.start), part.start.max(one.end)..part.end]
            })
            .collect();
    }
    left.retain(|part| !part.is_empty());
    left
}

/// A direct write to a mapped file, on its way through the steps above.
struct DirectWrite {
    direct_writes: Arc<DirectWrites>,
    caller: (u32, u32, u32),
    request: Option<RequestId>,
    write: DirectWriteArgs,
    data: Arc<[u8]>,
    id: usize,
    /// It is answered when no stale page is left; else as soon as it is made.
    waiting: bool,
    complete: Mutex<Option<Complete>>,
}

impl DirectWrite {
    fn drop_pages(self: &Arc<Self>, then: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let this = Arc::clone(self);
        let DirectWriteArgs { ino, offset, .. } = self.write;
        let done = Box::new(move || then(&this));
        self.direct_writes.kernel.drop_pages(ino, offset, (self.data.len() as u64).max(1), done);
    }

    fn make(self: &Arc<Self>) {
        let (uid, gid, pid) = self.caller;
        let cx = Cx { uid, gid, pid, umask: 0, park: &MakingWrite(self) };
        match self.direct_writes.fs.write(&cx, self.write, &self.data) {
            Ok(count) => self.made(Ok(Reply::Count(count))),
            Err(Stop::Errno(errno)) => self.made(Err(errno)),
            Err(Stop::Parked) => {}
        }
    }

    fn made(self: &Arc<Self>, result: Result<Reply, Errno>) {
        if result.is_err() {
            return self.end(result);
        }
        if let Some(overlay) =
            self.direct_writes.overlays.lock().all.iter_mut().find(|o| o.id == self.id)
        {
            overlay.is_made = true;
        }
        let result = if self.waiting { Some(result) } else { self.answer(result) };
        self.drop_pages(move |this| this.end(result.unwrap_or(Ok(Reply::Empty))));
    }

    fn answer(&self, result: Result<Reply, Errno>) -> Option<Result<Reply, Errno>> {
        let complete = self.complete.lock().take();
        match complete {
            Some(complete) => {
                complete(result);
                None
            }
            None => Some(result),
        }
    }

    fn end(&self, result: Result<Reply, Errno>) {
        self.direct_writes.end(self.id);
        let _answered_before = self.answer(result);
    }
}

/// Parks step 3 of a write.
struct MakingWrite<'j>(&'j Arc<DirectWrite>);

impl Park for MakingWrite<'_> {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let this = Arc::clone(self.0);
        Box::new(move |result| this.made(result))
    }

    fn request(&self) -> Option<RequestId> {
        self.0.request
    }
}

/// Parks a write to a file that was not mapped when the write began.
struct UnmappedWrite<'w> {
    cx: &'w Cx<'w>,
    direct_writes: &'w Arc<DirectWrites>,
    write: DirectWriteArgs,
    data: &'w [u8],
}

impl Park for UnmappedWrite<'_> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        let complete = self.cx.park.park(interrupt);
        let (direct_writes, write) = (Arc::clone(self.direct_writes), self.write);
        let data: Arc<[u8]> = self.data.into();
        let (uid, gid, pid) = (self.cx.uid, self.cx.gid, self.cx.pid);
        let parked = AlreadyParked(self.request());
        Box::new(move |result| {
            fence(Ordering::SeqCst);
            let made = match result {
                Ok(Reply::Count(count)) if direct_writes.fs.keeps_pages(write.ino, write.fh) => {
                    count
                }
                _ => return complete(result),
            };
            let cx = Cx { uid, gid, pid, umask: 0, park: &parked };
            direct_writes.begin(&cx, write, data, Some(made), complete);
        })
    }

    fn may_wait(&self) -> bool {
        self.cx.park.may_wait()
    }

    fn request(&self) -> Option<RequestId> {
        self.cx.request()
    }
}

/// For a request that has parked already.
struct AlreadyParked(Option<RequestId>);

impl Park for AlreadyParked {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        unreachable!("the request has parked before")
    }

    fn request(&self) -> Option<RequestId> {
        self.0
    }
}

#[cfg(test)]
mod tests;
