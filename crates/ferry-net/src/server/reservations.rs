//! What is reserved for a session's early-acknowledged changes: inode numbers and space.

use crate::rt::collections::{HashSet, VecDeque};
use std::ops::Range;

use crate::rt::Mutex;
use ferry_fs::{Errno, Ino, Reservation, ReservationId, SessionStore};

use crate::message::Cost;

/// Unused inode numbers of a session, in so many ranges; the oldest are dropped.
const NUMBERS_MAX: u64 = 1 << 16;
const RANGES_MAX: usize = 64;
/// Inode numbers that it gets at a time.
pub(super) const NUMBERS: u32 = 4096;
/// Of the numbers that it had before the server crashed, so many ranges count.
const FORMER_RANGES_MAX: usize = 1024;
/// And so many of the inodes that are missing.
const MISSING_MAX: usize = 1 << 16;
/// The most that a session may have: more than the changes can take that fit into its window.
const GRANTED_BYTES_MAX: u64 = 128 << 20;
const GRANTED_INODES_MAX: u64 = 8192;
/// And never more than one part in this number of the free space,
const FREE_SHARE: u64 = 8;
/// of which one in this number is for inodes.
const INODES_SHARE: u64 = 4;
/// The unit of space.
const BLOCK: u64 = 4096;

/// The reservations of one session.
#[derive(Default)]
pub(super) struct Reservations {
    /// Oldest first.
    numbers: Mutex<VecDeque<Range<Ino>>>,
    /// Numbers that a previous server gave to the session: for what it replays.
    former: Mutex<Vec<Range<Ino>>>,
    /// Inodes that it knew then and that are missing: the previous server may have chosen their
    /// numbers.
    missing: Mutex<HashSet<Ino>>,
    space: Mutex<Space>,
}

#[derive(Default)]
struct Space {
    reserved: Option<Box<dyn Reservation>>,
    /// What the client may still take, of bytes and inodes. The client counts the most that each
    /// change can take, so at least this is reserved.
    granted: (u64, u64),
    /// The session has ended.
    ended: bool,
}

impl Reservations {
    /// More inode numbers for what the client makes.
    pub(super) fn add_numbers(&self, fs: &dyn SessionStore) -> Result<Range<Ino>, Errno> {
        let more = fs.reserve_numbers(NUMBERS)?;
        self.keep(more.clone());
        Ok(more)
    }

    /// Numbers that the session had before the server crashed. Returns whether there are not too
    /// many.
    pub(super) fn add_former(&self, more: Range<Ino>) -> bool {
        let mut former = self.former.lock();
        let room = former.len() < FORMER_RANGES_MAX;
        if room {
            former.push(more);
        }
        room
    }

    /// The session knew an inode that is missing.
    pub(super) fn add_missing(&self, ino: Ino) {
        let mut missing = self.missing.lock();
        if missing.len() < MISSING_MAX {
            missing.insert(ino);
        }
    }

    /// Whether the session had this number before the server crashed. The file system knows whether
    /// it was used.
    pub(super) fn is_former(&self, ino: Ino) -> bool {
        self.former.lock().iter().any(|range| range.contains(&ino))
            || self.missing.lock().contains(&ino)
    }

    /// The replay has ended.
    pub(super) fn forget_former(&self) {
        self.former.lock().clear();
        self.missing.lock().clear();
    }

    fn keep(&self, more: Range<Ino>) {
        let mut numbers = self.numbers.lock();
        numbers.push_back(more);
        while numbers.len() > RANGES_MAX
            || numbers.iter().map(|range| range.end - range.start).sum::<u64>() > NUMBERS_MAX
        {
            numbers.pop_front();
        }
    }

    /// Uses a number. Returns whether it was the client's.
    pub(super) fn use_number(&self, ino: Ino) -> bool {
        let mut numbers = self.numbers.lock();
        let Some(at) = numbers.iter().position(|range| range.contains(&ino)) else { return false };
        let Some(range) = numbers.remove(at) else { return false };
        for rest in [ino + 1..range.end, range.start..ino] {
            if !rest.is_empty() {
                numbers.insert(at, rest);
            }
        }
        while numbers.len() > RANGES_MAX {
            numbers.pop_front();
        }
        true
    }

    /// The reservation from which early-acknowledged changes take space.
    pub(super) fn reservation_id(&self) -> Option<ReservationId> {
        self.space.lock().reserved.as_ref().map(|reserved| reserved.id())
    }

    /// An early-acknowledged change takes its cost, whether it succeeded or not. The caller applies
    /// the change first: so what it used leaves the reservation before it leaves what was granted,
    /// never the other way round.
    pub(super) fn spend(&self, Cost { bytes, inodes, .. }: Cost) {
        let mut space = self.space.lock();
        space.granted =
            (space.granted.0.saturating_sub(bytes), space.granted.1.saturating_sub(inodes));
    }

    /// Grants the client so much more, or what is possible, and reserves what is missing for it.
    /// `free` bytes are free. `asks`: the connection that asks is still the newest.
    pub(super) fn grant(
        &self,
        fs: &dyn SessionStore,
        (bytes, inodes): (u64, u64),
        free: u64,
        asks: impl FnOnce() -> bool,
    ) -> (u64, u64) {
        let mut space = self.space.lock();
        if space.ended || !asks() {
            return (0, 0);
        }
        let left = space.reserved.as_ref().map_or((0, 0), |reserved| reserved.left());
        let most = (free + left.0 + left.1 * BLOCK) / FREE_SHARE;
        let most_inodes = GRANTED_INODES_MAX.min(most / INODES_SHARE / BLOCK);
        let most_bytes = GRANTED_BYTES_MAX.min((most - most / INODES_SHARE) / BLOCK * BLOCK);
        let more = (
            bytes.min(most_bytes.saturating_sub(space.granted.0)),
            inodes.min(most_inodes.saturating_sub(space.granted.1)),
        );
        let granted = (space.granted.0 + more.0, space.granted.1 + more.1);
        let missing = (granted.0.saturating_sub(left.0), granted.1.saturating_sub(left.1));
        let added = match &space.reserved {
            _ if more == (0, 0) => return more,
            Some(reserved) => reserved.add(missing.0, missing.1),
            None => fs.reserve_space(missing.0, missing.1).map(|new| space.reserved = Some(new)),
        };
        if added.is_err() {
            return (0, 0);
        }
        space.granted = granted;
        more
    }

    /// The client has no more left than this, at this position of its stream: the rest is free.
    pub(super) fn keep_only(&self, bytes: u64, inodes: u64) {
        let mut space = self.space.lock();
        space.granted = (space.granted.0.min(bytes), space.granted.1.min(inodes));
        if let Some(reserved) = &space.reserved {
            reserved.keep_only(space.granted.0, space.granted.1);
        }
    }

    /// What was granted, and what is reserved for it.
    pub(super) fn figures(&self) -> [(u64, u64); 2] {
        let space = self.space.lock();
        [space.granted, space.reserved.as_ref().map_or((0, 0), |reserved| reserved.left())]
    }

    /// Bytes that are reserved and not used.
    pub(super) fn bytes_reserved(&self) -> u64 {
        let [_, (bytes, inodes)] = self.figures();
        bytes + inodes * BLOCK
    }

    /// The session has ended: what is left is free.
    pub(super) fn end(&self) {
        *self.space.lock() = Space { reserved: None, granted: (0, 0), ended: true };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_number_is_used_once_and_only_by_its_session() {
        let reservations = Reservations::default();
        reservations.keep(10..13);
        reservations.keep(20..21);
        assert!(!reservations.use_number(9) && !reservations.use_number(13));
        for ino in [11, 20, 10, 12] {
            assert!(reservations.use_number(ino) && !reservations.use_number(ino), "{ino}");
        }
        assert!(reservations.numbers.lock().is_empty());
    }

    #[test]
    fn of_too_many_inode_numbers_the_oldest_are_dropped() {
        let reservations = Reservations::default();
        reservations.keep(0..NUMBERS_MAX);
        (1..200).step_by(2).for_each(|ino| assert!(reservations.use_number(ino), "{ino}"));
        assert_eq!(reservations.numbers.lock().len(), RANGES_MAX);
        reservations.keep(1 << 20..(1 << 20) + NUMBERS_MAX);
        assert!(!reservations.use_number(500) && reservations.use_number(1 << 20));
    }
}
