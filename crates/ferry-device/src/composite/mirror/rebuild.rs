//! Building a new side while the others are in use.
//!
//! From the start every write goes to the new side too. Then the worker copies from the front to the back, a piece at a time, with
//! writers kept out of that piece's region (M5). The new side's id is in nobody's list before it is complete and durable:
//! a rebuild that was interrupted leaves a side that counts for nothing.

use super::super::SIDES_MAX;
use super::super::component::Component;
use super::worker::Worker;
use crate::AlignedBuf;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// Bytes that are copied while writers wait.
const COPY_LEN: u64 = 1 << 20;

/// The device may be asked for another rebuild when this is dropped.
pub(super) struct Busy(pub Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// A side to be built.
pub(super) struct NewSide {
    /// Name of the side whose place it takes.
    pub old: String,
    pub component: Arc<Component>,
    pub id: u64,
    /// It holds zeros everywhere.
    pub zeroed: bool,
    /// Dropped with it, however it ends.
    pub _busy: Busy,
}

/// A side that is being built.
pub(super) struct Rebuild {
    target: usize,
    new: NewSide,
    /// Everything before this is copied.
    at: u64,
}

impl Rebuild {
    /// The new side's.
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
        let room = self.shared.sides.get(target).ok_or(io::Error::from_raw_os_error(libc::EMFILE))?;
        if new.component.device().capacity() < super::super::HEAD_LEN + self.shared.capacity {
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
        let is_free = |slot: &u32| self.shared.those(stays).all(|(i, _)| self.headers[i].slot != *slot);
        header.slot = (0..header.slots).find(is_free).unwrap_or_default();
        header.write(&**new.component.device())?;
        let fresh = room.set(Arc::clone(&new.component)).is_ok();
        debug_assert!(fresh, "sides are added by the worker alone");
        self.headers.push(header);
        // Before any region is frozen: whoever enters after the copy of a piece writes to the new side too.
        self.shared.written.fetch_or(1 << target, Ordering::SeqCst);
        Ok(Rebuild { target, new, at: 0 })
    }

    /// Copies the next piece, or completes the rebuild.
    pub fn copy_some(&mut self) {
        let Some(rebuild) = &self.rebuild else { return };
        let mut at = rebuild.at;
        if rebuild.new.zeroed {
            at = self.next_data(at);
        }
        self.shared.rebuilt.store(at.min(self.shared.capacity), Ordering::Relaxed);
        if at >= self.shared.capacity {
            return self.complete();
        }
        let (target, component) = (rebuild.target, Arc::clone(&rebuild.new.component));
        let len = COPY_LEN.min(self.shared.capacity - at);
        let range = self.shared.regions.range(at, len);
        self.keep_out(range.clone());
        let mut buf = AlignedBuf::zeroed(len as usize);
        let mut read = Err(io::Error::from_raw_os_error(libc::EIO));
        for (_, side) in self.shared.those(self.shared.live.load(Ordering::SeqCst)) {
            read = side.read(at, &mut buf);
            if read.is_ok() {
                break;
            }
        }
        let copied = read.and_then(|()| component.write(at, &buf));
        self.shared.regions.unfreeze(range);
        match copied {
            Ok(()) => self.rebuild.iter_mut().for_each(|rebuild| rebuild.at = at + len),
            Err(error) => self.abort_rebuild_of(1 << target, &error),
        }
    }

    /// The next piece in which some side may hold anything but zeros.
    fn next_data(&self, at: u64) -> u64 {
        let live = self.shared.live.load(Ordering::SeqCst);
        let next = self.shared.those(live).map(|(_, side)| side.next_data(at)).min().unwrap_or(at);
        next.max(at) / COPY_LEN * COPY_LEN
    }

    /// The new side has everything: it takes its place, durably.
    fn complete(&mut self) {
        let dirty: Vec<bool> = (0..self.seen.len()).map(|i| self.shared.regions.is_dirty(i)).collect();
        // Flushes what was copied, too. If the new side fails here, the rebuild is given up by then.
        let mapped = self.write_map(&dirty, true);
        let Some(rebuild) = self.rebuild.take() else { return };
        let target = 1 << rebuild.target;
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
                tracing::error!("no side of the mirror takes the new list of sides");
                return;
            }
        }
        self.observer.raised(self.generation);
        self.shared.live.store(next, Ordering::SeqCst);
        self.shared.written.store(next, Ordering::SeqCst);
        if next & target == 0 {
            return tracing::error!(side = rebuild.name(), "the new side failed when it was complete");
        }
        self.shared.replaced.fetch_or(old, Ordering::SeqCst);
        self.observer.rebuilt(&rebuild.new.old, rebuild.name());
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
