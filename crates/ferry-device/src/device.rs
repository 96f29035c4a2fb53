//! [`BlockDevice`]: what a volume asks of the device that it is on.

use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::started::{ReadDone, ReadRing};
use crate::timing::FlushTiming;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Called once, when an I/O has ended, on whatever thread found that out. It must not block.
pub type IoDone = Box<dyn FnOnce(io::Result<()>) + Send>;

/// One asynchronous request. The buffer stays alive until `done` has been called.
pub enum Io {
    /// Writes the whole of `buf` at `offset` (bytes).
    Write {
        /// First byte on the device, a multiple of [`BLOCK_SIZE`].
        offset: u64,
        /// The bytes to write.
        buf: Arc<AlignedBuf>,
        /// Told when the write completed (not: is durable).
        done: IoDone,
    },
    /// Makes every write completed before this call durable.
    Flush {
        /// Told when those writes are durable.
        done: IoDone,
    },
}

impl Io {
    /// Called when it has ended.
    pub(crate) fn into_done(self) -> IoDone {
        match self {
            Self::Write { done, .. } | Self::Flush { done } => done,
        }
    }
}

/// A started read of a device that never waits: it has ended when this returns.
pub(crate) fn read_at_once(
    dev: &dyn BlockDevice,
    offset: u64,
    mut buf: Arc<AlignedBuf>,
    done: ReadDone,
) {
    let bytes = Arc::get_mut(&mut buf).expect("nobody else has a share");
    let result = dev.read(offset, bytes);
    done(result.map(|()| buf));
}

/// How long a device may become, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Longest {
    /// As long as the block devices below it are now.
    Given(u64),
    /// As long as somebody asks for, up to this.
    Asked(u64),
}

impl Longest {
    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        let (Self::Given(bytes) | Self::Asked(bytes)) = self;
        bytes
    }

    /// The same of a device whose length follows from this one's.
    pub(crate) fn map(self, f: impl FnOnce(u64) -> u64) -> Self {
        match self {
            Self::Given(bytes) => Self::Given(f(bytes)),
            Self::Asked(bytes) => Self::Asked(f(bytes)),
        }
    }
}

/// A block device. All methods may be called from any thread.
///
/// Writes are durable only after a later flush that started after they completed. Errors are not
/// sticky here: the owner of the volume decides what an error means.
pub trait BlockDevice: Send + Sync {
    /// Size in bytes, a multiple of [`BLOCK_SIZE`].
    fn capacity(&self) -> u64;
    /// How long it may become. `EOPNOTSUPP`: its length stays as it is.
    fn capacity_max(&self) -> io::Result<Longest> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Makes it at least `bytes` long, and a file exactly so long, durably. What lay behind that is
    /// lost. What is new reads as zeros in a file, and in a store, but for its last block. Nobody
    /// uses what lies behind the shorter of both lengths meanwhile. Errors as
    /// [`BlockDevice::capacity_max`]; `ENOSPC`: it is not so long.
    fn resize(&self, _bytes: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Reads `buf.len()` bytes at `offset`; both are multiples of [`BLOCK_SIZE`]. Waits.
    /// A never written range of a sparse device reads as zeros.
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()>;
    /// Reads into each buffer from its offset, in any order or beside each other. Waits for all;
    /// one result for each.
    fn read_many(&self, reads: &mut [(u64, AlignedBuf)]) -> Vec<io::Result<()>> {
        reads.iter_mut().map(|(offset, buf)| self.read(*offset, buf)).collect()
    }
    /// Starts a read of the whole of `buf`, of which nobody else has a share. It may fail where
    /// [`BlockDevice::read`] would not: that asks each copy which the device has. A device that can
    /// only wait for what it reads refuses with `EOPNOTSUPP`, at once: the caller serves others on
    /// this thread.
    fn start_read(
        &self,
        _ring: &dyn ReadRing,
        _offset: u64,
        _buf: Arc<AlignedBuf>,
        done: ReadDone,
    ) {
        done(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
    }
    /// Writes and waits until the write completed (not: is durable).
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()>;
    /// Waits until all writes that completed before the call are durable. It fails if one of them
    /// is lost, also where another flush has been told so before.
    fn flush(&self) -> io::Result<()>;
    /// Starts a batch; each request's `done` is called once. May complete before it returns.
    fn submit(&self, batch: Vec<Io>);
    /// Gives the range's space back to the host; it reads as zeros afterwards or as before.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Takes the range's space from the host now, so that later writes to it cannot fail for want
    /// of space.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Bytes the host could still give, `None` where the question has no meaning (a real block
    /// device).
    fn host_free(&self) -> Option<u64>;
    /// Whether dead data costs what it takes until its range is discarded: the device never writes
    /// a place anew. Then it is worth while to move live data together early, and to discard what
    /// is free at once.
    fn keeps_what_is_dead(&self) -> bool {
        false
    }
    /// Whether this process surely has the device still, so that what it knows of it is true. A
    /// shared store may have given it to another machine since that was looked for.
    fn is_surely_ours(&self) -> bool {
        true
    }
    /// Finds out whether this process has the device still, and waits for as long as that takes. An
    /// error: it has not.
    fn ascertain_ours(&self) -> io::Result<()> {
        Ok(())
    }
    /// The range is a ring, which is written over in turn: what is in it is not worth moving.
    fn note_ring(&self, _range: Range<u64>) {}
    /// How long flushes took that reached hardware. A composite answers with the slowest of those
    /// components that a flush was sent to; a device without hardware below has no samples.
    fn flush_timing(&self) -> FlushTiming {
        FlushTiming::default()
    }
    /// Forgets all flush samples, of every component.
    fn reset_flush_timing(&self) {}
    /// The first byte at or behind `offset` that may hold anything but zeros; the capacity if there
    /// is none.
    fn next_data(&self, offset: u64) -> u64 {
        offset
    }
    /// Reads from each copy that the device has, for a caller that knows what was written and did
    /// not get it. Returns whether one copy is `wanted`, and leaves that in `buf`; the device then
    /// writes the others anew. `false` where there is one copy.
    fn read_matching(
        &self,
        _offset: u64,
        _buf: &mut AlignedBuf,
        _wanted: &dyn Fn(&[u8]) -> bool,
    ) -> bool {
        false
    }
    /// After a crash, a write that had ended before another one was submitted is there if the other
    /// one is: no flush has to be between them.
    fn is_ordered(&self) -> bool {
        false
    }
    /// So many bytes of writes under way keep the device busy. More would only wait in it, and
    /// whatever comes after would wait for them.
    fn busy_bytes(&self) -> usize {
        64 << 20
    }
    /// The device wants to know what a sequential reader will read next, so many bytes ahead at
    /// most; 0: it does not, since a read of it waits for hardly anything.
    fn read_ahead_bytes(&self) -> u64 {
        0
    }
    /// A range will be read soon. Waits for no request, and may do nothing.
    fn read_ahead(&self, _offset: u64, _len: u64) {}
    /// Brings what lies in ranges of the device into its cache on a local disk, where it stays
    /// until the next call with `begins`, and waits for nothing. `EOPNOTSUPP`: nothing is far away.
    /// `ENOMEDIUM`: there is no such cache. `ENOSPC`: its disk is full or has failed.
    fn warm(&self, _begins: bool, _ranges: &[Range<u64>], done: WarmDone) {
        done(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
    }
    /// The components of a composite; empty for a single device.
    fn components(&self) -> Vec<ComponentStats> {
        Vec::new()
    }
    /// What the device counts, by name, for the statistics; the names have their units. Empty where
    /// there is nothing to count.
    fn figures(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// Why it carries out no change any more, whatever is done, if so.
    fn failure(&self) -> Option<String> {
        None
    }
    /// Requests to what is below that cannot be carried out now, and are tried again.
    fn held(&self) -> Option<HeldRequests> {
        None
    }
    /// Begins to build a mirror's new side on `new` (a path) in place of `old`;
    /// [`BlockDevice::components`] shows how far it is. `EOPNOTSUPP` where there is no mirror.
    fn replace(&self, _old: &Path, _new: &Path) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Makes a snapshot of what was written before the call, and waits until it is durable.
    /// `EOPNOTSUPP`: the device has no snapshots. `EEXIST`: there is one of this name. `EMLINK`:
    /// there are as many as there may be. `EINVAL`: a snapshot cannot have this name.
    fn create_snapshot(&self, _name: &str) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Deletes a snapshot. Waits. `EOPNOTSUPP`: the device has none. `ENOENT`: there is none of
    /// this name.
    fn delete_snapshot(&self, _name: &str) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// The snapshots, in the order in which they were made. `EOPNOTSUPP`: the device has none.
    fn snapshots(&self) -> io::Result<Vec<Snapshot>> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Number and name of each snapshot, in ascending order. No other snapshot of the volume ever
    /// has the number. `EOPNOTSUPP`: the device has none.
    fn snapshot_numbers(&self) -> io::Result<Vec<(u64, String)>> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    /// Opens the snapshot of this number, for reading only, beside this device. Waits, but not
    /// without end. `ENOENT`: there is none of this number.
    fn open_snapshot(&self, _number: u64) -> io::Result<Arc<dyn BlockDevice>> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}

/// A snapshot of a device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// When it was made, in seconds since the Unix epoch.
    pub made_secs: u64,
}

/// What [`BlockDevice::warm`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Warmed {
    /// Bytes that were fetched.
    pub fetched_bytes: u64,
    /// Bytes that the cache had.
    pub cached_bytes: u64,
    /// The cache is full of what was warmed: the rest was left out.
    pub full: bool,
}

/// Is called once, from any thread.
pub type WarmDone = Box<dyn FnOnce(io::Result<Warmed>) + Send>;

/// Requests that wait until what is in their way has been mended, for people.
#[derive(Clone, Debug)]
pub struct HeldRequests {
    /// How many.
    pub requests: u64,
    /// For how long there was one at any time.
    pub time: Duration,
    /// What is in the way.
    pub reason: String,
}

/// What a component is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComponentState {
    /// It is in use.
    Active,
    /// A mirror's side that failed and is left alone since.
    Failed,
    /// A mirror's side that gets a copy of the others.
    Rebuilding,
    /// A mirror's side that another one has taken the place of.
    Replaced,
    /// Listed, but not there, stale, or not completely rebuilt when the volume was opened.
    Absent,
}

/// One component, for people.
#[derive(Clone, Debug)]
pub struct ComponentStats {
    /// Its path, or what it was called when the composite was made.
    pub name: String,
    /// What it is good for.
    pub state: ComponentState,
    /// Reads of it that failed.
    pub read_errors: u64,
    /// Writes and flushes that failed.
    pub write_errors: u64,
    /// Reads whose data was written anew from another side.
    pub repairs: u64,
    /// How long flushes of it took.
    pub flush: FlushTiming,
    /// Bytes that a rebuild has copied, and of how many; only while it is being rebuilt.
    pub rebuilt: Option<(u64, u64)>,
    /// Blocks that no side could read when this one was built: it holds zeros there.
    pub unreadable: u64,
}

impl ComponentStats {
    /// Of a component that could not be opened.
    pub(crate) fn absent(name: String) -> Self {
        Self {
            name,
            state: ComponentState::Absent,
            read_errors: 0,
            write_errors: 0,
            repairs: 0,
            flush: FlushTiming::default(),
            rebuilt: None,
            unreadable: 0,
        }
    }
}

/// Refuses a transfer that is not whole blocks inside the device: a caller's mistake, not a failure
/// of the device.
pub(crate) fn check_range(capacity: u64, offset: u64, len: u64) -> io::Result<()> {
    let whole = offset.is_multiple_of(BLOCK_SIZE as u64) && len.is_multiple_of(BLOCK_SIZE as u64);
    let inside = offset.checked_add(len).is_some_and(|end| end <= capacity);
    if whole && inside { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
}
