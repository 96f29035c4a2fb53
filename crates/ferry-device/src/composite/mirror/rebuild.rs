//! Building a new side while the others are in use.
//!
//! From the start every write goes to the new side too. Then the worker copies from the front to
//! the back, a chunk at a time, with writers kept out of that chunk's region (MIRROR-5). The new
//! side's id is in nobody's list before it is complete and durable: a rebuild that was interrupted
//! leaves a side that counts for nothing.
//!
//! What a side that is put out meanwhile has given may be what it had lost, so the copy begins
//! again (MIRROR-6). A block that no side can read becomes zeros, and is counted: the file system
//! above has a checksum of it and finds it damaged.

use super::super::header::SIDES_MAX;
use super::super::length::lengthen;
use super::shared::{NewSide, ReadAny, bits};
use super::worker::{Rebuild, Worker};
use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

/// Bytes that are copied while writers wait.
const COPY_LEN: u64 = 1 << 20;

impl Rebuild {
    /// Name of the new side.
    pub fn name(&self) -> &str {
        &self.new.component.name
    }
}

impl Worker {
    /// Answers `started` when the new side is one that writes go to.
    pub fn start_rebuild(&mut self, new: NewSide, started: &mpsc::SyncSender<io::Result<()>>) {
        let result = self.try_start(new);
        if let Ok(rebuild) = result {
            tracing::info!(side = rebuild.name(), "a new side of the mirror is being built");
            self.shared.rebuilt.store(0, Ordering::Relaxed);
            self.rebuild = Some(rebuild);
            // The caller may have been told by the channel's end that the mirror is closing.
            drop(started.send(Ok(())));
        } else if let Err(error) = result {
            drop(started.send(Err(error)));
        }
    }

    fn try_start(&mut self, new: NewSide) -> io::Result<Rebuild> {
        let target = self.headers.len();
        let room =
            self.shared.sides.get(target).ok_or(io::Error::from_raw_os_error(libc::EMFILE))?;
        // It was made when the mirror may have been shorter.
        let len = self.shared.capacity();
        if lengthen(std::iter::once((&new.component, len))).is_err() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let mut header = self.headers[0].clone();
        header.id = new.id;
        header.generation = 0;
        header.active.clear();
        let stays = self.shared.live.load(Ordering::SeqCst) & !self.sides_called(&new.old);
        if stays.count_ones() as usize == SIDES_MAX {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let is_free =
            |slot: &u32| self.shared.those(stays).all(|(i, _)| self.headers[i].slot != *slot);
        header.slot = (0..header.slots).find(is_free).unwrap_or_default();
        header.write(&**new.component.device())?;
        let fresh = room.set(Arc::clone(&new.component)).is_ok();
        debug_assert!(fresh, "sides are added by the worker alone");
        self.headers.push(header);
        // Writers that enter from now on write to the new side too. Those who entered before must
        // have ended, also where the others have a hole so far, which the copy skips.
        self.shared.written.fetch_or(1 << target, Ordering::SeqCst);
        let all = 0..self.shared.regions.count();
        self.keep_out(all.clone());
        self.shared.regions.unfreeze(all);
        Ok(Rebuild { target, new, at: 0, sources: 0, unreadable: Vec::new() })
    }

    /// Copies the next chunk, or completes the rebuild.
    pub fn copy_some(&mut self) {
        let Some(rebuild) = &self.rebuild else { return };
        let mut at = rebuild.at;
        if rebuild.new.zeroed {
            at = self.next_data(at);
        }
        self.rebuild.iter_mut().for_each(|rebuild| rebuild.at = at);
        self.shared.rebuilt.store(at.min(self.shared.capacity()), Ordering::Relaxed);
        if at >= self.shared.capacity() {
            let all = 0..self.shared.regions.count();
            self.keep_out(all.clone());
            self.complete();
            return self.shared.regions.unfreeze(all);
        }
        let len = COPY_LEN.min(self.shared.capacity() - at);
        let range = self.shared.regions.range(at, len);
        self.keep_out(range.clone());
        let copied = self.copy_range(at, len as usize);
        self.shared.regions.unfreeze(range);
        if let (Err(error), Some(rebuild)) = (copied, &self.rebuild) {
            self.abort_rebuild_of(1 << rebuild.target, &error);
        }
    }

    /// MIRROR-6. With nobody to copy from it waits: a failure has not been judged.
    fn copy_range(&mut self, at: u64, len: usize) -> io::Result<()> {
        let sources = self.sources();
        let Some(rebuild) = &mut self.rebuild else { return Ok(()) };
        if sources.is_empty() {
            self.stalled = true;
            return Ok(());
        }
        let component = Arc::clone(&rebuild.new.component);
        let mut buf = AlignedBuf::zeroed(len);
        let ReadAny { used, unreadable } = self.shared.read_any(&sources, at, &mut buf);
        if !unreadable.is_empty() && !sources.iter().any(|i| self.shared.side(*i).answers()) {
            // Not bad blocks: the devices are gone, and may come back with all that they have.
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        component.write(at, &buf)?;
        rebuild.sources |= used;
        rebuild.at = at + len as u64;
        rebuild.unreadable.extend(unreadable.into_iter().map(|i| at + (i * BLOCK_SIZE) as u64));
        component.unreadable.store(rebuild.unreadable.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Whom to copy from: at the end the side that is to be replaced, which may be about to fail.
    fn sources(&self) -> Vec<usize> {
        let trusted = self.shared.trusted(self.shared.live.load(Ordering::SeqCst));
        let old = self.rebuild.as_ref().map_or(0, |rebuild| self.sides_called(&rebuild.new.old));
        bits(trusted & !old).chain(bits(trusted & old)).collect()
    }

    /// Sides were put out: what was copied from them is copied again, from the others.
    pub fn forget_copies_from(&mut self, out: u64) {
        let Some(rebuild) = self.rebuild.as_mut().filter(|rebuild| rebuild.sources & out != 0)
        else {
            return;
        };
        tracing::warn!(
            side = rebuild.name(),
            "a side that was copied from is out: the copy begins again"
        );
        (rebuild.at, rebuild.sources) = (0, 0);
        rebuild.unreadable.clear();
        rebuild.new.component.unreadable.store(0, Ordering::Relaxed);
        // It holds what was copied so far.
        rebuild.new.zeroed = false;
    }

    /// A device that did not answer for a moment may have them now. Tried once more before the new
    /// side counts.
    fn retry_unreadable(&mut self) -> io::Result<()> {
        let sources = self.sources();
        let Some(rebuild) = &mut self.rebuild else { return Ok(()) };
        let component = Arc::clone(&rebuild.new.component);
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut left = Vec::new();
        for at in std::mem::take(&mut rebuild.unreadable) {
            let read = self.shared.read_any(&sources, at, &mut buf);
            if read.unreadable.is_empty() {
                rebuild.sources |= read.used;
                component.write(at, &buf)?;
            } else {
                left.push(at);
            }
        }
        component.unreadable.store(left.len() as u64, Ordering::Relaxed);
        rebuild.unreadable = left;
        Ok(())
    }

    /// The next chunk in which some side may hold anything but zeros.
    fn next_data(&self, at: u64) -> u64 {
        let live = self.shared.live.load(Ordering::SeqCst);
        let next = self.shared.those(live).map(|(_, side)| side.next_data(at)).min().unwrap_or(at);
        // Never back: the last chunk may be a short one.
        (next / COPY_LEN * COPY_LEN).max(at)
    }

    /// The new side has everything: it takes its place, durably. No writer is inside any region.
    fn complete(&mut self) {
        let Some(target) = self.rebuild.as_ref().map(|rebuild| 1 << rebuild.target) else { return };
        if let Err(error) = self.retry_unreadable() {
            return self.abort_rebuild_of(target, &error);
        }
        let dirty: Vec<bool> =
            (0..self.seen.len()).map(|i| self.shared.regions.is_dirty(i)).collect();
        // Flushes what was copied and those it was copied from, too. A side that fails here is put
        // out: if it is the new one, the rebuild is given up by then, if it was copied from, the
        // copy has begun again.
        let mapped = self.write_map(&dirty, true);
        let Some(rebuild) = &self.rebuild else { return };
        if rebuild.at < self.shared.capacity() {
            return;
        }
        // What failed on the new side is not judged yet.
        if rebuild.new.component.is_suspect() {
            self.stalled = true;
            return;
        }
        let Some(rebuild) = self.rebuild.take() else { return };
        if let Err(error) = mapped {
            self.shared.written.fetch_and(!target, Ordering::SeqCst);
            return tracing::error!(side = rebuild.name(), %error, "the rebuild is given up");
        }
        let live = self.shared.live.load(Ordering::SeqCst);
        let old = self.sides_called(&rebuild.new.old) & !target;
        let mut next = (live & !old) | target;
        loop {
            let failed = self.raise(next);
            if failed == 0 {
                break;
            }
            // Without the new side the old one is needed.
            next = if failed & target != 0 { live & !failed } else { next & !failed };
            if next == 0 {
                self.shared.written.fetch_and(!target, Ordering::SeqCst);
                return tracing::error!(
                    side = rebuild.name(),
                    "no side of the mirror takes the new list of sides"
                );
            }
        }
        self.announce((live | target) & !next);
        self.shared.live.store(next, Ordering::SeqCst);
        self.shared.written.store(next, Ordering::SeqCst);
        if next & target == 0 {
            return tracing::error!(
                side = rebuild.name(),
                "the new side failed when it was complete"
            );
        }
        self.shared.replaced.fetch_or(old, Ordering::SeqCst);
        self.observer.rebuilt(&rebuild.new.old, rebuild.name());
        if !rebuild.unreadable.is_empty() {
            let (blocks, first) = (rebuild.unreadable.len(), rebuild.unreadable[0]);
            tracing::error!(
                side = rebuild.name(),
                blocks,
                first,
                "no side could read some blocks: the new one has zeros there; `ferry scrub` says whose they are"
            );
        }
        tracing::info!(
            side = rebuild.name(),
            generation = self.generation,
            "the new side of the mirror is complete"
        );
    }

    /// All sides of that name, live or not.
    fn sides_called(&self, name: &str) -> u64 {
        let called = (0..self.headers.len()).filter(|i| self.shared.side(*i).name == name);
        called.fold(0, |mask, i| mask | 1 << i)
    }

    /// If the new side is among `failed`, it is given up.
    pub fn abort_rebuild_of(&mut self, failed: u64, error: &io::Error) {
        if let Some(rebuild) = self.rebuild.take_if(|rebuild| failed & (1 << rebuild.target) != 0) {
            self.shared.written.fetch_and(!(1 << rebuild.target), Ordering::SeqCst);
            tracing::error!(side = rebuild.name(), %error, "the rebuild is given up");
        }
    }
}
