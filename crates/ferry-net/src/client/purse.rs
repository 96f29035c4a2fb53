//! What promised changes need, given by the server beforehand: inode numbers, and space that is set aside.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use ferry_fs::{Aside, Ino};

use super::cache::Moment;
use crate::message::Op;

/// More numbers are asked for when there are fewer than these.
const NUMBERS_LOW: u64 = 2048;
/// So much space is asked for, in bytes and inodes: with what may be left no more than the server gives.
const BYTES_ASKED: u64 = 64 << 20;
const INODES_ASKED: u64 = 4096;
/// A server that has not so much is asked for half of it, and so on, so many times.
const HALVES_MAX: u32 = 6;
/// Then it is not asked again for so long.
const REFUSED_TIME: Duration = Duration::from_secs(1);
/// What space is counted in.
const BLOCK: u64 = 4096;

/// What a change takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Price {
    pub(super) bytes: u64,
    pub(super) inodes: u64,
    /// It makes an inode.
    pub(super) number: bool,
}

impl Price {
    /// Of a change, if it is made.
    pub(super) fn of(op: &Op) -> Self {
        let made = |bytes| Self { bytes, inodes: 1, number: true };
        match op {
            Op::Mknod { .. } | Op::Mkdir { .. } | Op::Create { .. } => made(0),
            Op::Symlink { target, .. } => made(Aside::of_target(target.len())),
            Op::Link { .. } | Op::Rename { .. } => Self { inodes: 1, ..Self::default() },
            Op::Write { data, .. } => Self { bytes: Aside::of_write(data.len()), ..Self::default() },
            Op::Setattr { set, .. } if set.size.is_some() => {
                Self { bytes: Aside::of_write(0), ..Self::default() }
            }
            Op::Open { flags, .. } if flags & libc::O_TRUNC != 0 => {
                Self { bytes: Aside::of_write(0), ..Self::default() }
            }
            _ => Self::default(),
        }
    }
}

/// What is left.
#[derive(Debug, Default)]
pub(super) struct Purse {
    numbers: VecDeque<Range<Ino>>,
    left: u64,
    bytes: u64,
    inodes: u64,
    asked_numbers: bool,
    asked_space: bool,
    /// Something was given: the server knows, durably, that something may be promised.
    open: bool,
    /// How often what is asked for was halved.
    halves: u32,
    /// The server had nothing to give, or less than was asked for.
    refused: Option<Moment>,
}

impl Purse {
    /// Whether it suffices.
    pub(super) fn has(&self, price: Price) -> bool {
        self.open
            && self.bytes >= price.bytes
            && self.inodes >= price.inodes
            && (!price.number || self.left > 0)
    }

    /// The number of the next inode that is made.
    pub(super) fn number(&self) -> Option<Ino> {
        self.numbers.front().map(|range| range.start)
    }

    /// Pays; there is enough. `fresh`: the number is taken.
    pub(super) fn pay(&mut self, price: Price, fresh: bool) {
        self.bytes -= price.bytes;
        self.inodes -= price.inodes;
        if fresh && let Some(range) = self.numbers.front_mut() {
            range.start += 1;
            self.left -= 1;
            if range.is_empty() {
                self.numbers.pop_front();
            }
        }
    }

    fn was_refused(&self, now: Moment) -> bool {
        self.refused.is_some_and(|at| now.since(at) < REFUSED_TIME)
    }

    /// Asking makes no sense.
    fn is_refused(&self, now: Moment) -> bool {
        self.halves == HALVES_MAX && self.was_refused(now)
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
        let low = self.bytes < self.bytes_asked() * 3 / 4 || self.inodes < self.inodes_asked();
        if low && !std::mem::replace(&mut self.asked_space, true) {
            ops.push(self.space(Price::default()));
        }
        ops
    }

    /// What to ask for a change; `None`: there is none to be had.
    pub(super) fn lacks(&self, price: Price, now: Moment) -> Option<Op> {
        let op = if price.number && self.left == 0 { Op::Numbers {} } else { self.space(price) };
        (!self.is_refused(now)).then_some(op)
    }

    fn bytes_asked(&self) -> u64 {
        BYTES_ASKED >> self.halves
    }

    fn inodes_asked(&self) -> u64 {
        INODES_ASKED >> self.halves
    }

    /// Never no bytes: that is the answer of a server that has none.
    fn space(&self, price: Price) -> Op {
        let low = self.bytes < self.bytes_asked() * 3 / 4;
        let bytes = if low { self.bytes_asked() } else { BLOCK };
        let inodes = if self.inodes < self.inodes_asked() { self.inodes_asked() } else { 0 };
        Op::Credit { bytes: bytes.max(price.bytes.saturating_sub(self.bytes)), inodes }
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

    /// The server has set space aside.
    pub(super) fn take_space(&mut self, bytes: u64, inodes: u64, now: Moment) {
        (self.asked_space, self.open) = (false, true);
        self.bytes += bytes;
        self.inodes += inodes;
        if !self.was_refused(now) {
            self.halves = self.halves.saturating_sub(1);
        }
    }

    /// There is none, or not so much, or no answer.
    pub(super) fn refused(&mut self, op: &Op, now: Moment) {
        self.refused = Some(now);
        match op {
            Op::Numbers {} => {
                self.asked_numbers = false;
                self.halves = HALVES_MAX;
            }
            _ => {
                self.asked_space = false;
                self.halves = HALVES_MAX.min(self.halves + 1);
            }
        }
    }

    /// The session is gone, and everything that was given to it.
    pub(super) fn empty(&mut self) {
        let (asked_numbers, asked_space) = (self.asked_numbers, self.asked_space);
        *self = Self { asked_numbers, asked_space, ..Self::default() };
    }
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
    fn a_server_that_has_less_is_asked_for_less() {
        let mut purse = Purse::default();
        let mut last = BYTES_ASKED * 2;
        for _ in 0..HALVES_MAX {
            let (bytes, inodes) = asked(&mut purse, at(0)).expect("it may have as much");
            assert_eq!((bytes, inodes), (last / 2, last / 2 / (BYTES_ASKED / INODES_ASKED)));
            assert_eq!(asked(&mut purse, at(0)), None, "once");
            purse.refused(&Op::Credit { bytes, inodes }, at(0));
            last = bytes;
        }
        assert_eq!(asked(&mut purse, at(500)), None, "it has none");
        let write = Price { bytes: 16 << 10, ..Price::default() };
        assert!(!purse.has(write) && purse.lacks(write, at(500)).is_none());
        let (bytes, inodes) = asked(&mut purse, at(1000)).expect("it may have some now");
        purse.take_space(bytes, inodes, at(1000));
        assert!(purse.has(write));
        purse.pay(write, false);
        assert!(asked(&mut purse, at(1000)).is_some_and(|(more, _)| more > bytes));
    }

    #[test]
    fn numbers_are_used_one_after_the_other() {
        let mut purse = Purse::default();
        purse.take_numbers(10, 2);
        purse.take_numbers(50, 1);
        let make = Price { number: true, ..Price::default() };
        for ino in [10, 11, 50] {
            assert!(purse.has(make));
            assert_eq!(purse.number(), Some(ino));
            purse.pay(make, true);
        }
        assert!(!purse.has(make) && matches!(purse.lacks(make, at(0)), Some(Op::Numbers {})));
    }
}
