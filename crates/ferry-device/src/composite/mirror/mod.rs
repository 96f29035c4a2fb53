//! `mirror`: the same bytes on two or more sides.
//!
//! * MIRROR-1. A write goes to every side, a read to one. A flush goes to every side that was
//!   written since its last flush.
//! * MIRROR-2. Before a write is issued, its region is durably marked dirty on every side. After an
//!   unclean stop the mirror makes the dirty regions equal before it serves any read.
//! * MIRROR-3. If a write or a flush fails on some sides, it is acknowledged only after the headers
//!   of the other sides say durably that these sides are out: they hold a higher generation and the
//!   list of active sides. A side that is out is stale for ever. If the request fails on all sides,
//!   the mirror returns the error and puts no side out.
//! * MIRROR-4. If a read fails on one side, another side answers it, and the blocks that failed are
//!   rewritten from there. The same if a side answers with bytes that the reader knows to be wrong.
//! * MIRROR-5. A copy between sides keeps writers out of its region, and waits for those inside.
//! * MIRROR-6. A side on which a request failed is suspect until MIRROR-3 is done: nothing is
//!   copied from it, and it serves reads only if all sides are suspect. It becomes suspect before
//!   the request leaves its regions.
//! * MIRROR-7. If another request fails on a side during a flush, the flush counts as failed there:
//!   a device may report lost data once, and it has reported it to the other request.
//! * MIRROR-8. At every moment the newest whole map on each live side covers all that may differ. A
//!   map says which length its regions have; what lies behind its end may differ. So it counts
//!   whatever length the header says, and the two need not change at once.
//!
//! A write takes no lock. It needs one word for each region ([`regions`]) and a mask of sides. One
//! thread, the [`worker`], does what must wait for the device or happens rarely: it marks regions,
//! puts sides out, repairs and rebuilds.

mod map;
mod rebuild;
mod recover;
mod regions;
mod resize;
mod shared;
mod worker;

pub(super) use regions::region_len;
pub use shared::Observer;

use super::component::{Component, flush_and_wait, host_free, slowest};
use super::error::CompositeError;
use super::gather::wait_for;
use super::header::Side;
use super::length::least;
use crate::buffer::AlignedBuf;
use crate::device::{BlockDevice, ComponentState, ComponentStats, Io, Longest, check_range};
use crate::file::on_io_thread;
use crate::started::{ReadDone, ReadRing};
use crate::timing::FlushTiming;
use shared::{Before, Busy, Job, NewSide, Shared};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};

/// The same bytes on two or more sides. Dropping it marks everything clean that is.
pub struct MirrorDevice {
    shared: Arc<Shared>,
    /// `None` when opened to read only.
    worker: Option<JoinHandle<()>>,
    /// A rebuild that was asked for has not ended.
    rebuilding: Arc<AtomicBool>,
}

/// A map in which no region is dirty, for a new side of `len` bytes.
pub(super) fn clean_map(set: &[u8; 16], len: u64, region_len: u64) -> AlignedBuf {
    map::encode(set, 1, region_len, &vec![false; len.div_ceil(region_len) as usize])
}

impl MirrorDevice {
    /// Opens a mirror from those of its sides that are there. `generation` is the newest that
    /// anybody knows of. Those sides that have everything are made equal where they may differ; the
    /// others are left alone and said so in the log.
    pub fn open(
        sides: Vec<Side>,
        read_only: bool,
        generation: u64,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, CompositeError> {
        let (shared, worker) = recover::open(sides, read_only, generation, observer)?;
        let rebuilding = Arc::default();
        let Some(worker) = worker else { return Ok(Self { shared, worker: None, rebuilding }) };
        let thread = thread::Builder::new().name("ferry-mirror".into()).spawn(move || worker.run());
        let thread =
            thread.map_err(super::header::io_error("start the thread of", "the mirror"))?;
        Ok(Self { shared, worker: Some(thread), rebuilding })
    }

    /// Number of sides that have everything.
    pub fn live_sides(&self) -> usize {
        self.shared.live.load(Ordering::SeqCst).count_ones() as usize
    }

    /// Starts to build a side on `dev`, which then takes the place of `old` (the name of a side,
    /// live or not). It counts when it is complete; [`Observer::rebuilt`] is told. `id` is random.
    /// With `zeroed` the device holds zeros everywhere: what the other sides never wrote is not
    /// written. One at a time: `EBUSY`; a device that is too small: `ENOSPC`.
    pub fn rebuild(
        &self,
        old: &str,
        name: String,
        dev: Arc<dyn BlockDevice>,
        id: u64,
        zeroed: bool,
    ) -> io::Result<()> {
        if self.worker.is_none() {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if self.rebuilding.swap(true, Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let new = NewSide {
            old: old.into(),
            component: Component::new(name, dev),
            id,
            zeroed,
            _busy: Busy(Arc::clone(&self.rebuilding)),
        };
        let (started, hears) = mpsc::sync_channel(1);
        self.shared.ask(Job::Rebuild { new, started });
        hears.recv().unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::ECANCELED)))
    }

    /// A rebuild is under way.
    pub fn is_rebuilding(&self) -> bool {
        self.rebuilding.load(Ordering::SeqCst)
    }
}

impl BlockDevice for MirrorDevice {
    fn capacity(&self) -> u64 {
        self.shared.capacity()
    }

    /// `EBUSY`: a side is being rebuilt.
    fn capacity_max(&self) -> io::Result<Longest> {
        if self.is_rebuilding() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        least(self.shared.those(self.shared.live.load(Ordering::SeqCst)).map(|(_, side)| side))
    }

    /// `EBUSY`: a side is being rebuilt.
    fn resize(&self, bytes: u64) -> io::Result<()> {
        if self.shared.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let (resized, hears) = mpsc::sync_channel(1);
        self.shared.ask(Job::Resize { bytes, resized });
        hears.recv().unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::ECANCELED)))
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        check_range(self.shared.capacity(), offset, buf.len() as u64)?;
        self.shared.read(offset, buf)
    }

    fn start_read(&self, ring: &dyn ReadRing, offset: u64, buf: Arc<AlignedBuf>, done: ReadDone) {
        match check_range(self.shared.capacity(), offset, buf.len() as u64) {
            Ok(()) => self.shared.start_read(ring, offset, buf, done),
            Err(error) => done(Err(error)),
        }
    }

    fn read_matching(
        &self,
        offset: u64,
        buf: &mut AlignedBuf,
        wanted: &dyn Fn(&[u8]) -> bool,
    ) -> bool {
        check_range(self.shared.capacity(), offset, buf.len() as u64).is_ok()
            && self.shared.read_matching(offset, buf, wanted)
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        check_range(self.shared.capacity(), offset, buf.len() as u64)?;
        // A copy costs less than to write to one side after the other.
        let mut copy = AlignedBuf::zeroed(buf.len());
        copy.copy_from_slice(buf);
        wait_for(1, |gather| {
            self.submit(vec![Io::Write { offset, buf: Arc::new(copy), done: gather.part(0) }])
        })
        .result()
    }

    fn flush(&self) -> io::Result<()> {
        if self.shared.read_only {
            return Ok(());
        }
        let (start, these) = self.shared.begin_flush();
        let before = Before::of(&these);
        let outcome = before.doubt(flush_and_wait(&these));
        let well = outcome.failed == 0;
        let result = if well {
            Ok(())
        } else {
            wait_for(1, |gather| self.shared.judge(outcome, gather.part(0))).result()
        };
        self.shared.end_flush(start, well);
        result
    }

    fn submit(&self, batch: Vec<Io>) {
        for io in batch {
            match io {
                Io::Write { done, .. } if self.shared.read_only => {
                    done(Err(io::Error::from_raw_os_error(libc::EROFS)))
                }
                Io::Flush { done } if self.shared.read_only => done(Ok(())),
                Io::Flush { done } => self.shared.flush(done),
                Io::Write { offset, buf, done } => {
                    match check_range(self.shared.capacity(), offset, buf.len() as u64) {
                        Ok(()) => self.shared.write(offset, buf, done),
                        Err(error) => done(Err(error)),
                    }
                }
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.on_each(offset, len, |side| side.discard(offset, len))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.on_each(offset, len, |side| side.allocate(offset, len))
    }

    fn host_free(&self) -> Option<u64> {
        host_free(
            self.shared.those(self.shared.written.load(Ordering::SeqCst)).map(|(_, side)| side),
        )
    }

    fn flush_timing(&self) -> FlushTiming {
        slowest(self.shared.those(self.shared.written.load(Ordering::SeqCst)).map(|(_, side)| side))
    }

    fn reset_flush_timing(&self) {
        self.shared
            .sides
            .iter()
            .flat_map(OnceLock::get)
            .for_each(|side| side.device().reset_flush_timing());
    }

    fn components(&self) -> Vec<ComponentStats> {
        let (live, written, replaced) =
            (&self.shared.live, &self.shared.written, &self.shared.replaced);
        let [live, written, replaced] =
            [live, written, replaced].map(|mask| mask.load(Ordering::SeqCst));
        let sides = self.shared.sides.iter().map_while(OnceLock::get).enumerate();
        let stats = sides.map(|(i, side)| {
            let bit = 1 << i;
            let state = match () {
                () if live & bit != 0 => ComponentState::Active,
                () if written & bit != 0 => ComponentState::Rebuilding,
                () if replaced & bit != 0 => ComponentState::Replaced,
                () => ComponentState::Failed,
            };
            let copied = (self.shared.rebuilt.load(Ordering::Relaxed), self.shared.capacity());
            let rebuilt = (state == ComponentState::Rebuilding).then_some(copied);
            ComponentStats { rebuilt, ..side.stats(state) }
        });
        stats.collect()
    }
}

impl Drop for MirrorDevice {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.wake();
        let Some(worker) = self.worker.take() else { return };
        // A completion may hold the last handle. Neither the worker nor a thread that completes
        // what the worker waits for can wait for it; it ends on its own then.
        if worker.thread().id() != thread::current().id() && !on_io_thread() {
            worker.join().expect("the worker aborts the process rather than panic");
        }
    }
}
