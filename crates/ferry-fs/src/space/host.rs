//! What the host gives: segments taken from it, and given back. The log takes the last segments of
//! the volume when it grows.

use crate::space::free_blocks::Want;
use crate::space::pool::{CLEANER_RESERVE, HOST_SLACK_BYTES, Pool, SLACK_MIN, Space};
use ferry_journal::Geometry;
use std::io;

/// The host is asked for so many bytes at once.
const GROW_BYTES: u64 = 64 << 20;

/// So many segments go back to the host in one call, at most: a thread that wants a segment waits
/// for it.
const DISCARDED_AT_ONCE: u32 = 32;

impl Space {
    /// Takes up to `count` bare segments from the host. Returns how many it gave.
    pub(crate) fn back(&self, pool: &mut Pool, count: u32) -> u32 {
        let mut got = 0;
        while got < count {
            let Some(&first) = pool.bare.first() else { break };
            if !self.host_has_room(self.geometry.segment_len) {
                break;
            }
            if let Err(error) =
                self.dev.allocate(self.segment_offset(first), self.geometry.segment_len)
            {
                tracing::warn!(segment = first, %error, "the host gives no more space");
                break;
            }
            pool.bare.remove(&first);
            pool.stale.remove(&first);
            pool.backed.insert(first);
            pool.given.insert(first);
            pool.backed_total += 1;
            got += 1;
        }
        self.rebase(pool);
        got
    }

    pub(crate) fn host_has_room(&self, bytes: u64) -> bool {
        self.dev.host_free().is_none_or(|free| free >= bytes + HOST_SLACK_BYTES)
    }

    /// Asks the host until so much could be reserved; `false` when it does not come to that.
    pub fn grow_for(&self, want: Want) -> bool {
        while !self.has(want) {
            if !self.grow() {
                return false;
            }
        }
        true
    }

    /// Counts a segment of an earlier mount that is filled on as wholly the host's gift; `false`:
    /// it may have holes.
    pub fn back_again(&self, segment: u32) -> bool {
        let ok = self.dev.allocate(self.segment_offset(segment), self.geometry.segment_len).is_ok();
        if ok {
            self.pool.lock().given.insert(segment);
        }
        ok
    }

    /// Takes more from the host; `false` when nothing came.
    pub(crate) fn grow(&self) -> bool {
        let mut pool = self.pool.lock();
        let step = (GROW_BYTES / self.geometry.segment_len).max(1) as u32;
        self.back(&mut pool, step) > 0
    }

    /// Gives free segments back to the host, the last ones first, as far as nothing reserved needs
    /// them.
    pub(crate) fn trim(&self, pool: &mut Pool) {
        while self.trim_one(pool) {}
    }

    /// Gives one back; `false`: none is to spare.
    ///
    /// The lock of the pool is held over it, so nobody takes the segment meanwhile. Its being free
    /// is durable: nothing else is in the pool.
    pub(crate) fn trim_one(&self, pool: &mut Pool) -> bool {
        let spare = (pool.keep_bytes / self.geometry.segment_len).max(if pool.keep_bytes > 0 {
            2
        } else {
            0
        });
        let keep = spare as u32 + CLEANER_RESERVE + SLACK_MIN;
        if pool.backed.len() as u32 <= keep + self.home_reserve(pool, pool.backed_total) {
            return false;
        }
        let loss = pool.capacity - self.capacity(pool.backed_total - 1, pool);
        let taken = self.free.take(Want { blocks: loss, leave: 0 });
        let Some(segment) = taken.then(|| pool.backed.pop_last()).flatten() else { return false };
        pool.capacity -= loss;
        pool.backed_total -= 1;
        pool.given.remove(&segment);
        pool.bare.insert(segment);
        if self.dev.keeps_what_is_dead() {
            return true;
        }
        if let Err(error) = self.discard_segment(segment) {
            tracing::warn!(segment, %error, "the space of a free segment stays with the host file");
            pool.stale.insert(segment);
        }
        true
    }

    /// A device that keeps what is dead is told at once that a segment is free, durably. That costs
    /// it nothing, and nobody waits for it.
    pub(crate) fn discard_freed(&self, segment: u32) {
        if self.dev.keeps_what_is_dead()
            && let Err(error) = self.discard_segment(segment)
        {
            tracing::warn!(segment, %error, "what a free segment held is not discarded");
        }
    }

    fn discard_segment(&self, segment: u32) -> io::Result<()> {
        self.dev.discard(self.segment_offset(segment), self.geometry.segment_len)
    }

    /// The same for all that is free at the mount: a crash may have lost what the device was told.
    pub(crate) fn discard_left(&self, pool: &Pool) {
        let segments = pool.geometry.segment_count;
        let mut at = self.dev.next_data(self.segment_offset(0));
        while at < self.segment_offset(segments) {
            let segment = ((at - self.geometry.segments_offset) / self.geometry.segment_len) as u32;
            if pool.bare.contains(&segment) {
                self.discard_freed(segment);
            }
            at = self.dev.next_data(self.segment_offset(segment + 1));
        }
    }

    /// Whether dead blocks cost what they take until their segment is free.
    pub fn keeps_what_is_dead(&self) -> bool {
        self.dev.keeps_what_is_dead()
    }

    /// Nothing is kept beside the reserves until the next segment is taken.
    pub fn keep_no_spare(&self) {
        self.pool.lock().keep_bytes = 0;
    }

    /// Gives one segment back to the host that is to spare, or some that the host may hold although
    /// they are free. Returns how many segments; `None`: there are none left. An error leaves the
    /// rest for another time.
    pub fn trim_some(&self) -> io::Result<Option<u32>> {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        if self.trim_one(&mut pool) {
            return Ok(Some(1));
        }
        let Some(first) = pool.stale.pop_first() else { return Ok(None) };
        let mut count = 1;
        while count < DISCARDED_AT_ONCE && pool.stale.remove(&(first + count)) {
            count += 1;
        }
        let len = u64::from(count) * self.geometry.segment_len;
        match self.dev.discard(self.segment_offset(first), len) {
            Ok(()) => Ok(Some(count)),
            Err(error) => {
                pool.stale.extend(first..first + count);
                Err(error)
            }
        }
    }

    /// The host tells how much it has: the volume is a file (or several), and not a device of its
    /// own.
    pub fn is_hosted(&self) -> bool {
        self.dev.host_free().is_some()
    }

    /// What the host would have to give if the volume became full, and what it has; both in bytes.
    /// `None`: it need not be asked.
    pub fn host_needs(&self) -> Option<(u64, u64)> {
        let bare = self.pool.lock().bare.len() as u64;
        Some((bare * self.geometry.segment_len, self.dev.host_free()?))
    }

    /// Takes the last `count` segments for a longer log, which is then where `new` says. `false`,
    /// and nothing is taken: one of them is in use, the host has no space, or what is reserved
    /// needs them.
    pub fn take_last(&self, count: u32, new: &Geometry) -> bool {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        let before = pool.geometry;
        let Some(first) = before.segment_count.checked_sub(count) else { return false };
        let wanted = first..before.segment_count;
        if !wanted.clone().all(|s| pool.backed.contains(&s) || pool.bare.contains(&s)) {
            return false;
        }
        if !self.host_has_room(new.log_len)
            || self.dev.allocate(new.log_offset, new.log_len).is_err()
        {
            return false;
        }
        wanted.for_each(|segment| self.forget(&mut pool, segment));
        pool.geometry = *new;
        self.rebase(&mut pool);
        if self.free.get() >= 0 || self.back_enough(&mut pool) {
            return true;
        }
        self.restore(&mut pool, &before);
        false
    }

    /// A free segment is none any more.
    fn forget(&self, pool: &mut Pool, segment: u32) {
        if pool.backed.remove(&segment) {
            pool.backed_total -= 1;
        }
        pool.bare.remove(&segment);
        pool.stale.remove(&segment);
        pool.given.remove(&segment);
    }

    /// The log did not move after all.
    pub fn give_last_back(&self, before: &Geometry) {
        self.restore(&mut self.pool.lock(), before);
    }

    fn restore(&self, pool: &mut Pool, before: &Geometry) {
        pool.bare.extend(pool.geometry.segment_count..before.segment_count);
        pool.geometry = *before;
        self.rebase(pool);
    }

    /// Takes segments from the host until what is reserved is covered.
    pub(crate) fn back_enough(&self, pool: &mut Pool) -> bool {
        while self.free.get() < 0 {
            if self.back(pool, 1) == 0 {
                return false;
            }
        }
        true
    }
}
