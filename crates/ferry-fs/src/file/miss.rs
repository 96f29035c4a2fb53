//! A small read that waits for nothing but the device.
//!
//! It goes through the ring of the thread that serves the request, and no other thread takes part:
//!
//! 1. [`DataStore::miss`] lists the runs of blocks that are missing.
//! 2. The ring reads them. The thread serves other requests meanwhile.
//! 3. The bytes are copied out of memory and of what was read, under the locks of every read, and
//!    only if they are still what the file has there ([`Fetched::get`]). Then the request is
//!    answered, and what was read enters the cache, if the read says so ([`Misses`]).
//!
//! Whatever else happens is for a thread that may wait: a part of the extent map is not in memory,
//! a checksum does not match, the device fails, somebody changes the file meanwhile. That thread
//! reads again from the start.

use crate::file::read::{Misses, copy_out, steady};
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::store::data_store::{DataStore, count};
use crate::store::fetch::{Fetched, Run, missing};
use crate::store::read_shares::ReadShare;
use ferry_device::{AlignedBuf, ReadRing};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// Reads of so many blocks, or more, are for the read pool: their checksums and copies would hold
/// up other requests of the processor, while another processor may have nothing to do.
const LARGE_BLOCKS: u64 = 16;
/// Runs of one read at most; each is a request to the device.
const RUNS_MAX: usize = 8;

/// Gets the bytes, or `None`: a thread that may wait must read.
pub(crate) type Ended = Box<dyn FnOnce(Option<Vec<u8>>) + Send>;

/// What a read lacks.
pub(crate) struct Miss {
    runs: Vec<Run>,
    misses: Misses,
    share: ReadShare,
}

/// A read whose runs are in flight.
struct Started {
    store: Arc<DataStore>,
    inode: Arc<Inode>,
    offset: u64,
    len: usize,
    misses: Misses,
    parts: Mutex<Parts>,
    _share: ReadShare,
}

struct Parts {
    /// Runs that have not ended.
    left: usize,
    fetched: Vec<Fetched>,
    /// All that ended are what they should be.
    sound: bool,
    /// Taken when the last run has ended.
    ended: Option<Ended>,
}

impl Started {
    /// One run has ended.
    fn run_ended(&self, run: Run, result: io::Result<Arc<AlignedBuf>>) {
        if let Ok(buf) = &result {
            count(&self.store.counters.read_bytes, buf.len() as u64);
        }
        let fetched = result.ok().map(|buf| Fetched { run, buf, bad: Vec::new() });
        let fetched = fetched.filter(Fetched::is_sound);
        let mut parts = self.parts.lock();
        parts.left -= 1;
        parts.sound &= fetched.is_some();
        parts.fetched.extend(fetched);
        if parts.left > 0 {
            return;
        }
        let ended = parts.ended.take().expect("only one run is the last");
        let (fetched, sound) = (std::mem::take(&mut parts.fetched), parts.sound);
        drop(parts);
        let bytes = if sound { self.copy(&fetched) } else { None };
        let size = bytes.as_ref().map(Vec::len);
        ended(bytes);
        if let Some(len) = size {
            // A frame that somebody copies into is left out: nothing waits here.
            if self.misses == Misses::Cached {
                let _busy = self.store.fill_idle(&self.inode, &fetched);
            }
            let size = self.inode.file.readable.load(Ordering::Relaxed);
            self.store.read_on(&self.inode, self.offset, len, size, true);
            self.store.cache.shrink();
        }
    }

    /// The bytes, unless anything but what was fetched is missing.
    fn copy(&self, fetched: &[Fetched]) -> Option<Vec<u8>> {
        let (state, pages) = steady(&self.inode, 0);
        let left = state.rec.size.saturating_sub(self.offset);
        let len = self.len.min(usize::try_from(left).unwrap_or(usize::MAX));
        let mut out = vec![0; len];
        let lack = copy_out(&self.inode, &state, &pages, self.offset, &mut out, fetched);
        lack.is_none().then_some(out)
    }
}

impl DataStore {
    /// What a small read lacks, if it waits for nothing but the device.
    pub(crate) fn miss(
        &self,
        inode: &Inode,
        offset: u64,
        len: usize,
        misses: Misses,
    ) -> Option<Miss> {
        let size = inode.state.share().rec.size;
        let end = offset.saturating_add(len as u64).min(size);
        let wanted = offset / BLOCK..end.div_ceil(BLOCK);
        let small = wanted.start < wanted.end && wanted.end - wanted.start < LARGE_BLOCKS;
        if !small || inode.file.fetching.is_reading(wanted.start) {
            return None;
        }
        let runs = missing(inode, &wanted).ok()?;
        if !(1..=RUNS_MAX).contains(&runs.len()) {
            return None;
        }
        let blocks: usize = runs.iter().map(|run| run.crcs.len()).sum();
        let share = self.read_shares.take(blocks * BLOCK_BYTES)?;
        Some(Miss { runs, misses, share })
    }

    /// Reads what `miss` says through `ring`. `ended` is called once, on this thread.
    pub(crate) fn start_miss(
        self: &Arc<Self>,
        ring: &dyn ReadRing,
        (inode, offset, len): (&Arc<Inode>, u64, usize),
        miss: Miss,
        ended: Ended,
    ) {
        let parts = Parts {
            left: miss.runs.len(),
            fetched: Vec::with_capacity(miss.runs.len()),
            sound: true,
            ended: Some(ended),
        };
        let started = Arc::new(Started {
            store: Arc::clone(self),
            inode: Arc::clone(inode),
            offset,
            len,
            misses: miss.misses,
            parts: Mutex::new(parts),
            _share: miss.share,
        });
        for run in miss.runs {
            let (started, dev) = (Arc::clone(&started), run.dev * BLOCK);
            let buf = Arc::new(AlignedBuf::zeroed(run.crcs.len() * BLOCK_BYTES));
            let done = move |result| started.run_ended(run, result);
            self.dev.start_read(ring, dev, buf, Box::new(done));
        }
    }
}
