//! What early-acknowledged changes use up, reserved at the server beforehand: inode numbers and
//! space.

use crate::rt::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use ferry_fs::Ino;

use super::clock_reading::ClockReading;
use crate::message::{Cost, Op};

/// Below this count the client requests more inode numbers.
const NUMBERS_LOW: u64 = 2048;
/// The first request for space, in bytes and inodes. If it does not last, the next one asks for
/// twice as much, `LEVEL_MAX` times at most.
const BYTES_FIRST: u64 = 1 << 20;
const INODES_FIRST: u64 = 64;
const LEVEL_MAX: u32 = 6;
/// A reservation that is used up within this time did not last.
const LASTS: Duration = Duration::from_secs(1);
/// A server that grants less than this has no space,
const BYTES_LEAST: u64 = 64 << 10;
const INODES_LEAST: u64 = 4;
/// and is not asked again for this time.
const REFUSED_TIME: Duration = Duration::from_secs(1);

/// What is left of the reservation, and the requests for more.
#[derive(Debug, Default)]
pub(super) struct Reservation {
    numbers: VecDeque<Range<Ino>>,
    left: u64,
    bytes: u64,
    inodes: u64,
    asked_numbers: bool,
    /// More space is asked for, before it is lacking.
    asked_space: bool,
    /// So many questions for space are not answered.
    asking: u32,
    /// The server has granted something: it has recorded that this client may acknowledge early.
    open: bool,
    /// The server has taken the record back that this client may acknowledge early. It makes
    /// another one with the first change that it hears of then.
    fenced: bool,
    /// How often what is asked for was doubled.
    level: u32,
    /// When space was given last.
    given: Option<ClockReading>,
    /// The server had nothing to give.
    refused: Option<ClockReading>,
    /// Since [`Reservation::unneeded`] was asked last: something was paid; something was given; the
    /// server had less than was asked for.
    paid: bool,
    filled: bool,
    short: bool,
}

impl Reservation {
    /// The server has taken the session's leases away.
    pub(super) fn fenced(&mut self) {
        self.fenced = true;
    }

    /// The server has made a change since.
    pub(super) fn recorded(&mut self) {
        self.fenced = false;
    }

    /// Whether the next server would wait for what is acknowledged early.
    pub(super) fn is_recorded(&self) -> bool {
        !self.fenced
    }

    /// Whether it covers the cost of a change.
    pub(super) fn has(&self, cost: Cost) -> bool {
        self.open && self.has_space(cost) && (!cost.number || self.left > 0)
    }

    fn has_space(&self, cost: Cost) -> bool {
        self.bytes >= cost.bytes && self.inodes >= cost.inodes
    }

    /// The number of the next inode that is made.
    pub(super) fn number(&self) -> Option<Ino> {
        self.numbers.front().map(|range| range.start)
    }

    /// Pays; there is enough. `fresh`: the number is taken.
    pub(super) fn pay(&mut self, cost: Cost, fresh: bool) {
        self.bytes -= cost.bytes;
        self.inodes -= cost.inodes;
        self.paid |= cost.bytes > 0 || cost.inodes > 0;
        if fresh && let Some(range) = self.numbers.front_mut() {
            range.start += 1;
            self.left -= 1;
            if range.is_empty() {
                self.numbers.pop_front();
            }
        }
    }

    /// The server has refused a request so recently that asking makes no sense.
    pub(super) fn is_refused(&self, now: ClockReading) -> bool {
        self.refused.is_some_and(|at| now.since(at) < REFUSED_TIME)
    }

    /// What to ask for now, each once until it is answered.
    pub(super) fn wants(&mut self, now: ClockReading) -> Vec<Op> {
        let mut ops = Vec::new();
        if self.is_refused(now) {
            return ops;
        }
        if self.left < NUMBERS_LOW && !std::mem::replace(&mut self.asked_numbers, true) {
            ops.push(Op::Numbers {});
        }
        let (bytes, inodes) = amount(self.level);
        let low = self.bytes < enough(bytes) || self.inodes < enough(inodes);
        if low && !std::mem::replace(&mut self.asked_space, true) {
            ops.push(self.space(Cost::NOTHING, now));
        }
        ops
    }

    /// What to ask for a change; `None`: there is none to be had.
    pub(super) fn lacks(&mut self, cost: Cost, now: ClockReading) -> Option<Op> {
        if self.is_refused(now) {
            return None;
        }
        let number = cost.number && self.left == 0;
        Some(if number { Op::Numbers {} } else { self.space(cost, now) })
    }

    fn space(&mut self, cost: Cost, now: ClockReading) -> Op {
        if !self.short && self.given.is_some_and(|at| now.since(at) < LASTS) {
            self.level = LEVEL_MAX.min(self.level + 1);
        }
        self.asking += 1;
        let (bytes, inodes) = amount(self.level);
        // Of what there is enough of, the server may have no more to give: that says nothing of the
        // rest.
        let lacking = |has: u64, most: u64, needed: u64| {
            let more = if has < enough(most) { most } else { 0 };
            more.max(needed.saturating_sub(has))
        };
        Op::Reserve {
            bytes: lacking(self.bytes, bytes, cost.bytes),
            inodes: lacking(self.inodes, inodes, cost.inodes),
        }
    }

    /// The server has given numbers.
    pub(super) fn take_numbers(&mut self, first: Ino, count: u32) {
        self.asked_numbers = false;
        self.open |= count > 0;
        if count > 0 {
            self.numbers.push_back(first..first + Ino::from(count));
            self.left += u64::from(count);
        }
    }

    /// The server has reserved this much: what was requested, or less.
    pub(super) fn take_space(
        &mut self,
        asked: (u64, u64),
        (bytes, inodes): (u64, u64),
        now: ClockReading,
    ) {
        self.answered();
        (self.open, self.filled, self.given) = (true, true, Some(now));
        self.bytes += bytes;
        self.inodes += inodes;
        if bytes < asked.0 || inodes < asked.1 {
            self.short = true;
            while self.level > 0
                && (amount(self.level).0 > self.bytes || amount(self.level).1 > self.inodes)
            {
                self.level -= 1;
            }
        }
        if bytes < asked.0.min(BYTES_LEAST) || inodes < asked.1.min(INODES_LEAST) {
            self.refused = Some(now);
        }
    }

    /// What [`Reservation::lacks`] has said is not asked for after all.
    pub(super) fn not_asked(&mut self, op: &Op) {
        if matches!(op, Op::Reserve { .. }) {
            self.answered();
        }
    }

    fn answered(&mut self) {
        self.asked_space = false;
        self.asking -= 1;
    }

    /// There is none, or no answer.
    pub(super) fn refused(&mut self, op: &Op, now: ClockReading) {
        self.refused = Some(now);
        match op {
            Op::Numbers {} => self.asked_numbers = false,
            _ => self.answered(),
        }
    }

    /// Called at intervals: gives back what was not needed since the last call, and says what is
    /// left. `None` while a request is unanswered: the server could not tell whether that answer is
    /// counted.
    pub(super) fn unneeded(&mut self) -> Option<Op> {
        let (paid, filled) = (self.paid, self.filled);
        (self.paid, self.filled, self.short) = (false, false, false);
        if self.asking > 0 || filled || (self.bytes, self.inodes) == (0, 0) {
            return None;
        }
        self.level = if paid { self.level.saturating_sub(1) } else { 0 };
        let most = if paid { amount(self.level) } else { (0, 0) };
        if self.bytes <= 2 * most.0 && self.inodes <= 2 * most.1 {
            return None;
        }
        (self.bytes, self.inodes) = (self.bytes.min(most.0), self.inodes.min(most.1));
        self.remaining()
    }

    /// Another client needs the space: gives everything back, and requests nothing for a while.
    /// `None` while a request is unanswered, as above.
    pub(super) fn spare_all(&mut self, now: ClockReading) -> Option<Op> {
        self.refused = Some(now);
        if self.asking > 0 || (self.bytes, self.inodes) == (0, 0) {
            return None;
        }
        (self.level, self.bytes, self.inodes) = (0, 0, 0);
        self.remaining()
    }

    /// What is left; `None`: the server has not been asked for anything.
    pub(super) fn remaining(&self) -> Option<Op> {
        let asked = self.open || self.asking > 0;
        asked.then_some(Op::Remaining { bytes: self.bytes, inodes: self.inodes })
    }

    /// The session has ended, and its reservation with it.
    pub(super) fn empty(&mut self) {
        let Self { asked_numbers, asked_space, asking, .. } = *self;
        *self = Self { asked_numbers, asked_space, asking, ..Self::default() };
    }
}

/// Of so much as is asked for, what is left when more is.
fn enough(most: u64) -> u64 {
    most / 4 * 3
}

/// Bytes and inodes that are asked for.
fn amount(level: u32) -> (u64, u64) {
    (BYTES_FIRST << level, INODES_FIRST << level)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(reservation: &mut Reservation, now: ClockReading) -> Option<(u64, u64)> {
        reservation.wants(now).into_iter().find_map(|op| match op {
            Op::Reserve { bytes, inodes } => Some((bytes, inodes)),
            _ => None,
        })
    }

    fn at(ms: u64) -> ClockReading {
        ClockReading::at(Duration::from_millis(ms))
    }

    #[test]
    fn a_reservation_doubles_when_used_up_and_shrinks_when_unused() {
        let mut reservation = Reservation::default();
        let mut now = 0;
        for level in 0..LEVEL_MAX + 2 {
            let (bytes, inodes) = amount(level.min(LEVEL_MAX));
            assert_eq!(asked(&mut reservation, at(now)), Some((bytes, inodes)));
            assert_eq!(asked(&mut reservation, at(now)), None, "once");
            assert_eq!(reservation.unneeded(), None, "something is asked for");
            reservation.take_space((bytes, inodes), (bytes, inodes), at(now));
            let all = Cost { bytes: reservation.bytes, inodes: reservation.inodes, number: false };
            reservation.pay(all, false);
            now += 100;
        }
        let (bytes, inodes) = asked(&mut reservation, at(now)).expect("all of it is paid");
        reservation.take_space((bytes, inodes), (bytes, inodes), at(now));
        assert_eq!(reservation.unneeded(), None, "it was given just now");
        let mut last = (bytes, inodes);
        for _ in 0..LEVEL_MAX + 3 {
            reservation.pay(Cost { bytes: 4096, ..Cost::NOTHING }, false);
            if let Some(Op::Remaining { bytes, inodes }) = reservation.unneeded() {
                assert!(bytes < last.0 && inodes < last.1 && bytes > 0);
                last = (bytes, inodes);
            }
        }
        assert!(last.0 <= 2 * BYTES_FIRST && last.1 <= 2 * INODES_FIRST, "{last:?}");
        assert_eq!(
            reservation.unneeded(),
            Some(Op::Remaining { bytes: 0, inodes: 0 }),
            "nothing was needed"
        );
        assert_eq!(reservation.unneeded(), None);
        assert_eq!(asked(&mut reservation, at(now + 2000)), Some(amount(0)));
    }

    #[test]
    fn a_server_that_has_less_is_asked_for_less() {
        let mut reservation = Reservation::default();
        let write = Cost { bytes: 16 << 10, ..Cost::NOTHING };
        let first = asked(&mut reservation, at(0)).expect("it may have as much");
        reservation.take_space(first, (200 << 10, 16), at(0));
        assert!(reservation.has(write));
        assert_eq!(asked(&mut reservation, at(1)), Some(amount(0)), "no more than before");
        reservation.take_space(first, (8 << 10, 0), at(1));
        assert_eq!(asked(&mut reservation, at(500)), None, "it has none");
        reservation.pay(Cost { bytes: reservation.bytes, ..Cost::NOTHING }, false);
        assert!(!reservation.has(write) && reservation.lacks(write, at(500)).is_none());
        assert!(reservation.lacks(write, at(1001)).is_some(), "it may have some now");
    }

    #[test]
    fn inode_numbers_are_used_in_order() {
        let mut reservation = Reservation::default();
        reservation.take_numbers(10, 2);
        reservation.take_numbers(50, 1);
        let make = Cost { number: true, ..Cost::NOTHING };
        for ino in [10, 11, 50] {
            assert!(reservation.has(make));
            assert_eq!(reservation.number(), Some(ino));
            reservation.pay(make, true);
        }
        assert!(
            !reservation.has(make)
                && matches!(reservation.lacks(make, at(0)), Some(Op::Numbers {}))
        );
    }

    /// Changes that take inodes and no bytes: the server gives what it may, and has no more bytes
    /// to give.
    #[test]
    fn a_sufficient_reservation_is_not_extended() {
        const MOST: (u64, u64) = (128 << 20, 8192);
        let mut reservation = Reservation::default();
        let inode = Cost { inodes: 1, ..Cost::NOTHING };
        for now in 0..100_000 {
            let ask = reservation
                .wants(at(now / 10))
                .into_iter()
                .find(|op| matches!(op, Op::Reserve { .. }));
            if let Some(Op::Reserve { bytes, inodes }) = ask {
                let given = (
                    bytes.min(MOST.0 - reservation.bytes),
                    inodes.min(MOST.1 - reservation.inodes),
                );
                reservation.take_space((bytes, inodes), given, at(now / 10));
            }
            assert!(reservation.has(inode) && !reservation.is_refused(at(now / 10)), "after {now}");
            reservation.pay(inode, false);
        }
    }

    #[test]
    fn a_dropped_request_for_space_does_not_block_returning() {
        let mut reservation = Reservation::default();
        reservation.take_numbers(10, 1);
        let cost = Cost { bytes: 1, inodes: 1, number: false };
        let asks = |reservation: &mut Reservation| {
            reservation.lacks(cost, at(0)).expect("there may be some")
        };
        let given = (BYTES_FIRST, INODES_FIRST);
        asks(&mut reservation);
        reservation.take_space(given, given, at(0));
        let dropped = asks(&mut reservation);
        assert_eq!(
            (reservation.unneeded(), reservation.unneeded()),
            (None, None),
            "an answer is awaited"
        );
        reservation.not_asked(&dropped);
        assert!(reservation.unneeded().is_some());
    }
}
