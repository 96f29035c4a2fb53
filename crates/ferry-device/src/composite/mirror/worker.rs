//! The mirror's thread: marks regions before they are written, puts failed sides out, repairs,
//! rebuilds, and marks regions clean when they have come to rest.

use super::super::component::{flush_and_wait, unflushed};
use super::super::gather::wait_for;
use super::super::header::{ComponentHeader, HEADER_OFFSETS, MAP_OFFSETS};
use super::map;
use super::shared::{Job, NewSide, Observer, Shared, bits};
use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::device::check_range;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often to look for regions that have come to rest: one is marked clean when nothing was
/// written to it from one look to the next.
const TIDY_INTERVAL: Duration = Duration::from_secs(5);
/// The worker may never be idle for so long: it also looks after so many rounds of work.
const TIDY_BATCHES: u64 = 64;

/// What only the worker knows. Before it runs, recovery uses it.
pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub observer: Arc<dyn Observer>,
    /// A header for each side, by its number.
    pub headers: Vec<ComponentHeader>,
    pub generation: u64,
    /// The observer could not write the generation down.
    pub unnoted: bool,
    /// Of the map that was written last.
    pub map_sequence: u64,
    /// That one is durable on each side that it was written to.
    pub map_is_durable: bool,
    /// For each region its last write when it was looked at last.
    pub seen: Vec<u64>,
    pub rebuild: Option<Rebuild>,
    /// The rebuild waits until a failure that is known has been judged.
    pub stalled: bool,
    /// Rounds of work so far.
    pub batches: u64,
}

/// A side that is being built.
pub(super) struct Rebuild {
    pub target: usize,
    pub new: NewSide,
    /// Everything before this is copied.
    pub at: u64,
    /// Sides that something was copied from.
    pub sources: u64,
    /// Blocks (bytes from the start) that no side could read.
    pub unreadable: Vec<u64>,
}

/// Ends the process if the worker panics: its callers would wait for ever.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Worker {
    /// Until the mirror is closed.
    pub fn run(mut self) {
        let _guard = AbortOnPanic;
        loop {
            let (jobs, closing) = self.next_jobs();
            self.serve(jobs);
            if self.unnoted {
                self.note_generation();
            }
            self.batches += 1;
            if self.batches.is_multiple_of(TIDY_BATCHES) {
                self.tidy();
            }
            if closing {
                return self.close();
            }
            self.copy_some();
        }
    }

    /// What was asked since; waits if there is nothing to do.
    fn next_jobs(&mut self) -> (VecDeque<Job>, bool) {
        let shared = Arc::clone(&self.shared);
        let mut queue = shared.queue.lock();
        let rests = self.rebuild.is_none() || std::mem::take(&mut self.stalled);
        while queue.jobs.is_empty() && !shared.closing.load(Ordering::SeqCst) && rests {
            if shared.bell.wait_for(&mut queue, TIDY_INTERVAL).timed_out() {
                drop(queue);
                self.tidy();
                queue = shared.queue.lock();
            }
        }
        queue.repairs = 0;
        (std::mem::take(&mut queue.jobs), shared.closing.load(Ordering::SeqCst))
    }

    fn serve(&mut self, jobs: VecDeque<Job>) {
        self.mark_for(&jobs);
        for job in jobs {
            match job {
                Job::Write { offset, buf, done } => match self.mark(offset, buf.len() as u64) {
                    Ok(()) => self.shared.write(offset, buf, done),
                    Err(error) => done(Err(error)),
                },
                Job::Enter { offset, len, inside } => inside(self.let_in(offset, len)),
                Job::Failed { failed, error, done } => {
                    let survived = self.put_out(failed, &error);
                    self.shared.those(failed).for_each(|(_, side)| side.judged());
                    done(if survived { Ok(()) } else { Err(error) });
                }
                Job::Repair { side, offset, len } => self.repair(side, offset, len),
                Job::Rebuild { new, started } => self.start_rebuild(new, &started),
                Job::Resize { bytes, resized } => {
                    // The caller waits for that, as long as the mirror is open.
                    drop(resized.send(self.resize(bytes)));
                }
            }
        }
    }

    /// One change of the map for all that wait.
    fn mark_for(&mut self, jobs: &VecDeque<Job>) {
        let mut wanted = vec![false; self.shared.regions.count()];
        for job in jobs {
            let (offset, len) = match job {
                Job::Write { offset, buf, .. } => (*offset, buf.len() as u64),
                Job::Enter { offset, len, .. } => (*offset, *len),
                Job::Repair { offset, len, .. } => (*offset, *len as u64),
                Job::Failed { .. } | Job::Rebuild { .. } | Job::Resize { .. } => continue,
            };
            if let Ok(range) = self.regions_of(offset, len) {
                wanted[range].fill(true);
            }
        }
        // The request that needs it gets the error in its turn.
        if let Err(error) = self.mark_all(&wanted) {
            tracing::error!(%error, "no side of the mirror can be marked");
        }
    }

    /// The regions of a request that was queued. The mirror may have become shorter since.
    fn regions_of(&self, offset: u64, len: u64) -> io::Result<Range<usize>> {
        check_range(self.shared.capacity(), offset, len)?;
        Ok(self.shared.regions.range(offset, len))
    }

    /// MIRROR-2: returns when the regions are dirty, durably.
    fn mark(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let range = self.regions_of(offset, len)?;
        let mut wanted = vec![false; self.shared.regions.count()];
        wanted[range].fill(true);
        self.mark_all(&wanted)
    }

    fn mark_all(&mut self, wanted: &[bool]) -> io::Result<()> {
        let is_new = |(i, wanted): (usize, &bool)| *wanted && !self.shared.regions.is_dirty(i);
        if !wanted.iter().enumerate().any(is_new) {
            return Ok(());
        }
        let dirty: Vec<bool> =
            wanted.iter().enumerate().map(|(i, w)| *w || self.shared.regions.is_dirty(i)).collect();
        self.write_map(&dirty, true)?;
        (0..dirty.len()).filter(|i| wanted[*i]).for_each(|i| self.shared.regions.set_dirty(i));
        Ok(())
    }

    fn let_in(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.mark(offset, len)?;
        let entered = self.shared.regions.enter(offset, len);
        debug_assert!(entered.is_ok(), "only the worker keeps writers out or makes regions clean");
        Ok(())
    }

    /// Writes the map to every side, and makes it durable if asked. Sides that fail are put out; an
    /// error: none is left.
    pub fn write_map(&mut self, dirty: &[bool], durable: bool) -> io::Result<()> {
        self.write_map_of(self.shared.regions.region_len(), dirty, durable)
    }

    /// The same with regions of this length.
    pub fn write_map_of(
        &mut self,
        region_len: u64,
        dirty: &[bool],
        durable: bool,
    ) -> io::Result<()> {
        loop {
            let mask = self.shared.written.load(Ordering::SeqCst);
            // A crash may tear the slot that is written. The other one must be there then: what it
            // replaced does not know of the regions that were marked since.
            let mut failed = if self.map_is_durable { 0 } else { self.flush_sides(mask) };
            self.map_is_durable = false;
            self.map_sequence += 1;
            let set = self.headers[0].set;
            let block = map::encode(&set, self.map_sequence, region_len, dirty);
            let offset = MAP_OFFSETS[(self.map_sequence % 2) as usize];
            failed |= self.write_heads(mask & !failed, offset, |_| None, &Arc::new(block));
            if durable && failed != mask {
                failed |= self.flush_sides(mask & !failed);
            }
            if failed == 0 {
                self.map_is_durable = durable;
                return Ok(());
            }
            let error = io::Error::from_raw_os_error(libc::EIO);
            if !self.put_out(failed, &error) {
                return Err(error);
            }
        }
    }

    /// Writes a block to the heads of these sides at the same time: the one that `own` makes, or
    /// else `block`. Returns the sides that failed.
    fn write_heads(
        &self,
        mask: u64,
        offset: u64,
        own: impl Fn(usize) -> Option<AlignedBuf>,
        block: &Arc<AlignedBuf>,
    ) -> u64 {
        if mask == 0 {
            return 0;
        }
        let outcome = wait_for(mask.count_ones() as usize, |gather| {
            for (i, side) in self.shared.those(mask) {
                let block = own(i).map_or_else(|| Arc::clone(block), Arc::new);
                side.device().submit(vec![side.raw_write_request(offset, block, gather.part(i))]);
            }
        });
        outcome.failed
    }

    /// Makes all that these sides have been told durable, at the same time. Returns the sides that
    /// failed; the caller puts these out.
    pub fn flush_sides(&self, mask: u64) -> u64 {
        let failed = flush_and_wait(&unflushed(self.shared.those(mask))).failed;
        self.shared.those(failed).for_each(|(_, side)| side.judged());
        failed
    }

    /// MIRROR-3. Raises the generation with only `sides` in the list. Returns the sides that
    /// failed; then it must be raised again.
    pub fn raise(&mut self, sides: u64) -> u64 {
        self.generation += 1;
        let active: Vec<u64> = bits(sides).map(|i| self.headers[i].id).collect();
        for i in bits(sides) {
            self.headers[i].generation = self.generation;
            self.headers[i].active.clone_from(&active);
        }
        self.write_headers(sides)
    }

    /// Makes the new generation known to the observer. Where it cannot write it down, the sides
    /// that are `out` are told themselves, as far as they can be written: or else the next opener,
    /// who may find them alone, would take them for the newest.
    pub fn announce(&mut self, out: u64) {
        if self.note_generation() {
            return;
        }
        let Some(newest) = self.headers.iter().find(|header| header.generation == self.generation)
        else {
            return;
        };
        let active = newest.active.clone();
        for i in bits(out) {
            self.headers[i].generation = self.generation;
            self.headers[i].active.clone_from(&active);
        }
        let untold = self.write_headers(out);
        for (_, side) in self.shared.those(untold) {
            tracing::error!(
                side = side.name,
                "neither this side nor the volume's file can be told that the side is stale: do not mount it alone"
            );
        }
    }

    /// Whether the observer has it. It is tried again whenever the worker has something to do.
    fn note_generation(&mut self) -> bool {
        self.unnoted = self.observer.raised(self.generation).is_err();
        !self.unnoted
    }

    /// Both copies, one after the other. Returns the sides that failed.
    pub fn write_headers(&self, sides: u64) -> u64 {
        let mut failed = 0;
        for offset in HEADER_OFFSETS {
            let left = sides & !failed;
            let none = Arc::new(AlignedBuf::zeroed(BLOCK_SIZE));
            failed |= self.write_heads(left, offset, |i| Some(self.headers[i].encode()), &none);
            failed |= self.flush_sides(left & !failed);
        }
        failed
    }

    /// Puts `failed` out, durably. `false`: no side would be left, and nothing changes.
    pub fn put_out(&mut self, failed: u64, error: &io::Error) -> bool {
        self.abort_rebuild_of(failed, error);
        let live = self.shared.live.load(Ordering::SeqCst);
        let mut out = live & failed;
        if live & !out == 0 {
            return false;
        }
        if out == 0 {
            return true;
        }
        // Nobody reads from them any more; those that are out stay suspect for ever.
        self.shared.those(out).for_each(|(_, side)| side.suspect());
        loop {
            let more = self.raise(live & !out) & !out;
            if more == 0 {
                break;
            }
            self.shared.those(more).for_each(|(_, side)| side.suspect());
            out |= more;
            if live & !out == 0 {
                self.shared.those(out).for_each(|(_, side)| side.judged());
                return false;
            }
        }
        self.announce(out);
        self.shared.live.fetch_and(!out, Ordering::SeqCst);
        self.shared.written.fetch_and(!out, Ordering::SeqCst);
        self.forget_copies_from(out);
        for (_, side) in self.shared.those(out) {
            let left = (live & !out).count_ones();
            tracing::error!(
                side = side.name,
                %error,
                generation = self.generation,
                "a side of the mirror failed and is left alone from now on; sides left: {left}; `ferry replace` builds a new one"
            );
        }
        true
    }

    /// MIRROR-4, MIRROR-5 and MIRROR-6. What no trusted side can read is left as it is.
    fn repair(&mut self, side: usize, offset: u64, len: usize) {
        if self.mark(offset, len as u64).is_err() {
            return;
        }
        let range = self.shared.regions.range(offset, len as u64);
        self.keep_out(range.clone());
        let mend = self.copy_to_side(side, offset, len);
        self.shared.regions.unfreeze(range);
        if let Err(error) = mend {
            self.put_out(1 << side, &error);
        }
    }

    /// Writes to a live side what the others have. An error: of that side.
    fn copy_to_side(&mut self, side: usize, offset: u64, len: usize) -> io::Result<()> {
        let others =
            |shared: &Shared| shared.trusted(shared.live.load(Ordering::SeqCst)) & !(1 << side);
        // What another side has not made durable it may still lose, and then this one must not have
        // copied the loss.
        let failed = self.flush_sides(others(&self.shared));
        if failed != 0 {
            self.put_out(failed, &io::Error::from_raw_os_error(libc::EIO));
        }
        let (from, to) = (others(&self.shared), Arc::clone(self.shared.side(side)));
        if from == 0
            || to.is_suspect()
            || self.shared.live.load(Ordering::SeqCst) & (1 << side) == 0
        {
            return Ok(());
        }
        let mut buf = AlignedBuf::zeroed(len);
        let unreadable =
            self.shared.read_any(&bits(from).collect::<Vec<_>>(), offset, &mut buf).unreadable;
        if unreadable.is_empty() {
            to.write(offset, &buf)?;
        } else {
            let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
            for (i, bytes) in buf.chunks_exact(BLOCK_SIZE).enumerate() {
                if !unreadable.contains(&i) {
                    block.copy_from_slice(bytes);
                    to.write(offset + (i * BLOCK_SIZE) as u64, &block)?;
                }
            }
        }
        if unreadable.len() * BLOCK_SIZE < len {
            to.repairs.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(side = to.name, offset, len, "what could not be read was written anew");
        }
        Ok(())
    }

    /// MIRROR-5: returns when no writer is inside.
    pub fn keep_out(&self, range: Range<usize>) {
        self.shared.regions.freeze(range.clone());
        let mut queue = self.shared.queue.lock();
        while !self.shared.regions.is_idle(range.clone()) {
            self.shared.bell.wait(&mut queue);
        }
    }

    /// Marks regions clean where nothing was written since the last look and all is flushed. A
    /// region that is clean and marked dirty costs a little work after a crash, so nothing waits
    /// for this to be durable.
    fn tidy(&mut self) {
        if self.unnoted {
            self.note_generation();
        }
        let flushed = self.shared.flushed.load(Ordering::SeqCst);
        let mut cleared = false;
        for i in 0..self.seen.len() {
            let last = self.shared.regions.last_write(i);
            let rests = std::mem::replace(&mut self.seen[i], last) == last;
            cleared |= rests && self.shared.regions.clear_if_settled(i, flushed);
        }
        if cleared {
            self.write_present_map(false);
        }
    }

    fn write_present_map(&mut self, durable: bool) {
        let dirty: Vec<bool> =
            (0..self.seen.len()).map(|i| self.shared.regions.is_dirty(i)).collect();
        if let Err(error) = self.write_map(&dirty, durable) {
            tracing::error!(%error, "no side of the mirror takes the map of what was written");
        }
    }

    /// Everything has come to rest, for the next start has nothing to compare then.
    fn close(&mut self) {
        if self.unnoted {
            self.note_generation();
        }
        if let Some(rebuild) = self.rebuild.take() {
            tracing::warn!(
                side = rebuild.name(),
                "the volume is closed before the rebuild is complete: start it again"
            );
        }
        let all = 0..self.shared.regions.count();
        let shared = Arc::clone(&self.shared);
        // What is served may fail, and must be judged then.
        loop {
            self.keep_out(all.clone());
            let mut queue = shared.queue.lock();
            while shared.flushes_in_flight.load(Ordering::SeqCst) > 0 {
                shared.bell.wait(&mut queue);
            }
            let jobs = std::mem::take(&mut queue.jobs);
            drop(queue);
            shared.regions.unfreeze(all.clone());
            if jobs.is_empty() {
                break;
            }
            self.serve(jobs);
        }
        let writes = shared.writes.load(Ordering::SeqCst);
        if self.flush_sides(shared.live.load(Ordering::SeqCst)) == 0 {
            let cleared = all.filter(|i| shared.regions.clear_if_settled(*i, writes)).count();
            if cleared > 0 {
                self.write_present_map(true);
            }
        }
    }
}
