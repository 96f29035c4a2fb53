//! What promised changes need, given by the server beforehand: inode numbers, and space that is set
//! aside.

use crate::rt::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use ferry_fs::Ino;

use super::cache::Moment;
use crate::message::{Cost, Op};

/// More numbers are asked for when there are fewer than these.
const NUMBERS_LOW: u64 = 2048;
/// So much space is asked for first, in bytes and inodes; twice as much each time that it did not
/// last, so many times.
const BYTES_FIRST: u64 = 1 << 20;
const INODES_FIRST: u64 = 64;
const LEVEL_MAX: u32 = 6;
/// What is used up after this time did not last.
const LASTS: Duration = Duration::from_secs(1);
/// A server that gives less than this has none,
const BYTES_LEAST: u64 = 64 << 10;
const INODES_LEAST: u64 = 4;
/// and is not asked again for so long.
const REFUSED_TIME: Duration = Duration::from_secs(1);

/// What is left.
#[derive(Debug, Default)]
pub(super) struct Purse {
    numbers: VecDeque<Range<Ino>>,
    left: u64,
    bytes: u64,
    inodes: u64,
    asked_numbers: bool,
    /// More space is asked for, before it is lacking.
    asked_space: bool,
    /// So many questions for space are not answered.
    asking: u32,
    /// Something was given: the server knows, durably, that something may be promised.
    open: bool,
    /// How often what is asked for was doubled.
    level: u32,
    /// When space was given last.
    given: Option<Moment>,
    /// The server had nothing to give.
    refused: Option<Moment>,
    /// Since [`Purse::spare`] was asked last: something was paid; something was given; the server
    /// had less than was asked for.
    paid: bool,
    filled: bool,
    short: bool,
}

impl Purse {
    /// Whether it suffices.
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

    /// Asking makes no sense.
    pub(super) fn is_refused(&self, now: Moment) -> bool {
        self.refused.is_some_and(|at| now.since(at) < REFUSED_TIME)
    }

    /// What to ask for now, each once until it is answered.
    pub(super) fn wants(&mut self, now: Moment) -> Vec<Op> {
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
    pub(super) fn lacks(&mut self, cost: Cost, now: Moment) -> Option<Op> {
        if self.is_refused(now) {
            return None;
        }
        let number = cost.number && self.left == 0;
        Some(if number { Op::Numbers {} } else { self.space(cost, now) })
    }

    fn space(&mut self, cost: Cost, now: Moment) -> Op {
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
        Op::Credit {
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

    /// The server has set so much aside: what was asked for, or less.
    pub(super) fn take_space(
        &mut self,
        asked: (u64, u64),
        (bytes, inodes): (u64, u64),
        now: Moment,
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

    /// What [`Purse::lacks`] has said is not asked for after all.
    pub(super) fn not_asked(&mut self, op: &Op) {
        if matches!(op, Op::Credit { .. }) {
            self.answered();
        }
    }

    fn answered(&mut self) {
        self.asked_space = false;
        self.asking -= 1;
    }

    /// There is none, or no answer.
    pub(super) fn refused(&mut self, op: &Op, now: Moment) {
        self.refused = Some(now);
        match op {
            Op::Numbers {} => self.asked_numbers = false,
            _ => self.answered(),
        }
    }

    /// Asked now and then: what is kept from now on, where some was not needed since the last time.
    /// Nothing while more is asked for: what the answer brings would be behind that word, or before
    /// it.
    pub(super) fn spare(&mut self) -> Option<Op> {
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
        self.kept()
    }

    /// Somebody else needs it: nothing is kept, and nothing asked for, for a while. Nothing while
    /// more is asked for, as above.
    pub(super) fn spare_all(&mut self, now: Moment) -> Option<Op> {
        self.refused = Some(now);
        if self.asking > 0 || (self.bytes, self.inodes) == (0, 0) {
            return None;
        }
        (self.level, self.bytes, self.inodes) = (0, 0, 0);
        self.kept()
    }

    /// What is left; `None`: the server has not been asked for anything.
    pub(super) fn kept(&self) -> Option<Op> {
        let asked = self.open || self.asking > 0;
        asked.then_some(Op::Spare { bytes: self.bytes, inodes: self.inodes })
    }

    /// The session is gone, and everything that was given to it.
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

    fn asked(purse: &mut Purse, now: Moment) -> Option<(u64, u64)> {
        purse.wants(now).into_iter().find_map(|op| match op {
            Op::Credit { bytes, inodes } => Some((bytes, inodes)),
            _ => None,
        })
    }

    fn at(ms: u64) -> Moment {
        Moment::at(Duration::from_millis(ms))
    }

    #[test]
    fn what_does_not_last_is_doubled_and_what_is_not_needed_goes_back() {
        let mut purse = Purse::default();
        let mut now = 0;
        for level in 0..LEVEL_MAX + 2 {
            let (bytes, inodes) = amount(level.min(LEVEL_MAX));
            assert_eq!(asked(&mut purse, at(now)), Some((bytes, inodes)));
            assert_eq!(asked(&mut purse, at(now)), None, "once");
            assert_eq!(purse.spare(), None, "something is asked for");
            purse.take_space((bytes, inodes), (bytes, inodes), at(now));
            let all = Cost { bytes: purse.bytes, inodes: purse.inodes, number: false };
            purse.pay(all, false);
            now += 100;
        }
        let (bytes, inodes) = asked(&mut purse, at(now)).expect("all of it is paid");
        purse.take_space((bytes, inodes), (bytes, inodes), at(now));
        assert_eq!(purse.spare(), None, "it was given just now");
        let mut last = (bytes, inodes);
        for _ in 0..LEVEL_MAX + 3 {
            purse.pay(Cost { bytes: 4096, ..Cost::NOTHING }, false);
            if let Some(Op::Spare { bytes, inodes }) = purse.spare() {
                assert!(bytes < last.0 && inodes < last.1 && bytes > 0);
                last = (bytes, inodes);
            }
        }
        assert!(last.0 <= 2 * BYTES_FIRST && last.1 <= 2 * INODES_FIRST, "{last:?}");
        assert_eq!(purse.spare(), Some(Op::Spare { bytes: 0, inodes: 0 }), "nothing was needed");
        assert_eq!(purse.spare(), None);
        assert_eq!(asked(&mut purse, at(now + 2000)), Some(amount(0)));
    }

    #[test]
    fn a_server_that_has_less_is_asked_for_less() {
        let mut purse = Purse::default();
        let write = Cost { bytes: 16 << 10, ..Cost::NOTHING };
        let first = asked(&mut purse, at(0)).expect("it may have as much");
        purse.take_space(first, (200 << 10, 16), at(0));
        assert!(purse.has(write));
        assert_eq!(asked(&mut purse, at(1)), Some(amount(0)), "no more than before");
        purse.take_space(first, (8 << 10, 0), at(1));
        assert_eq!(asked(&mut purse, at(500)), None, "it has none");
        purse.pay(Cost { bytes: purse.bytes, ..Cost::NOTHING }, false);
        assert!(!purse.has(write) && purse.lacks(write, at(500)).is_none());
        assert!(purse.lacks(write, at(1001)).is_some(), "it may have some now");
    }

    #[test]
    fn numbers_are_used_one_after_the_other() {
        let mut purse = Purse::default();
        purse.take_numbers(10, 2);
        purse.take_numbers(50, 1);
        let make = Cost { number: true, ..Cost::NOTHING };
        for ino in [10, 11, 50] {
            assert!(purse.has(make));
            assert_eq!(purse.number(), Some(ino));
            purse.pay(make, true);
        }
        assert!(!purse.has(make) && matches!(purse.lacks(make, at(0)), Some(Op::Numbers {})));
    }

    /// Changes that take inodes and no bytes: the server gives what it may, and has no more bytes
    /// to give.
    #[test]
    fn what_there_is_enough_of_is_not_asked_for() {
        const MOST: (u64, u64) = (128 << 20, 8192);
        let mut purse = Purse::default();
        let inode = Cost { inodes: 1, ..Cost::NOTHING };
        for now in 0..100_000 {
            let ask =
                purse.wants(at(now / 10)).into_iter().find(|op| matches!(op, Op::Credit { .. }));
            if let Some(Op::Credit { bytes, inodes }) = ask {
                let given = (bytes.min(MOST.0 - purse.bytes), inodes.min(MOST.1 - purse.inodes));
                purse.take_space((bytes, inodes), given, at(now / 10));
            }
            assert!(purse.has(inode) && !purse.is_refused(at(now / 10)), "after {now}");
            purse.pay(inode, false);
        }
    }

    #[test]
    fn what_is_not_asked_for_after_all_keeps_nothing_from_going_back() {
        let mut purse = Purse::default();
        purse.take_numbers(10, 1);
        let cost = Cost { bytes: 1, inodes: 1, number: false };
        let asks = |purse: &mut Purse| purse.lacks(cost, at(0)).expect("there may be some");
        let given = (BYTES_FIRST, INODES_FIRST);
        asks(&mut purse);
        purse.take_space(given, given, at(0));
        let dropped = asks(&mut purse);
        assert_eq!((purse.spare(), purse.spare()), (None, None), "an answer is awaited");
        purse.not_asked(&dropped);
        assert!(purse.spare().is_some());
    }
}
