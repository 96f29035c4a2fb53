//! Every short sequence of operations, as CrashMonkey's ACE makes them (Mohan and others, OSDI
//! 2018): all of up to three operations with all arguments out of a small set, on a small tree that
//! is durable already. A number is a sequence.
//!
//! An operation that fails where it stands changes nothing: that sequence is as good as the shorter
//! one, and is left out. 57 operations make 57 sequences of one (41 of them are run), 3,249 of two
//! and 185,193 of three.

use crate::begin::{Begin, Prepared};
use crate::model::Outcome;
use crate::ops::{Alloc, Move, Op, Path, Which};
use crate::plan::{Failure, Plan};
use ferry_fs::volume::LOG_MIN;
use std::sync::Arc;

/// All sequences of one length.
pub struct Enumeration {
    alphabet: Vec<Op>,
    length: u32,
    prepared: Arc<Prepared>,
}

fn at(names: &[u8]) -> Path {
    Path(names.to_vec())
}

fn file(names: &[u8]) -> Which {
    Which::At(at(names))
}

/// Directories A, B, and one in A.
const A: &[u8] = &[0];
const B: &[u8] = &[1];
const SUB: &[u8] = &[0, 1];
/// Files that are there: one of three blocks, and a small one.
const LARGE: &[u8] = &[0, 2];
const SMALL: &[u8] = &[1, 2];
/// Names that are free, one in each directory.
const FREE_A: &[u8] = &[0, 3];
const FREE_B: &[u8] = &[1, 3];

/// What makes the tree.
fn tree() -> Vec<Op> {
    vec![
        Op::Mkdir(at(A)),
        Op::Mkdir(at(B)),
        Op::Mkdir(at(SUB)),
        Op::Create(at(LARGE)),
        Op::Write(file(LARGE), 0, 10_000),
        Op::Create(at(SMALL)),
        Op::Write(file(SMALL), 0, 300),
        Op::SetXattr(at(SMALL), 0, 100),
        Op::Sync,
    ]
}

/// Every operation with every argument.
fn alphabet() -> Vec<Op> {
    let rename = |from: &[u8], to: &[u8], how| Op::Rename(at(from), at(to), how);
    vec![
        Op::Create(at(FREE_A)),
        Op::Create(at(FREE_B)),
        // Behind the end, with a hole, into what is new.
        Op::Write(file(LARGE), 9_000, 6_000),
        Op::Write(file(SMALL), 8_192, 100),
        Op::Write(file(FREE_A), 0, 5_000),
        Op::Write(file(FREE_B), 0, 200),
        // Over what is there.
        Op::Write(file(LARGE), 100, 5_000),
        Op::Write(file(SMALL), 10, 50),
        Op::Append(file(LARGE), 5_000),
        Op::Append(file(SMALL), 3_000),
        Op::Append(file(FREE_A), 100),
        Op::Truncate(file(LARGE), 4_000),
        Op::Truncate(file(LARGE), 20_000),
        Op::Truncate(file(SMALL), 0),
        Op::Truncate(file(FREE_A), 6_000),
        Op::Fallocate(file(LARGE), Alloc::Punch, 4_096, 4_096),
        Op::Fallocate(file(LARGE), Alloc::Zero, 1_000, 12_000),
        Op::Fallocate(file(LARGE), Alloc::Keep, 8_192, 16_384),
        Op::Fallocate(file(SMALL), Alloc::Extend, 0, 10_000),
        Op::Fallocate(file(FREE_A), Alloc::Extend, 0, 8_192),
        Op::Mkdir(at(FREE_A)),
        Op::Mkdir(at(FREE_B)),
        Op::Link(at(LARGE), at(FREE_A)),
        Op::Link(at(LARGE), at(FREE_B)),
        Op::Link(at(SMALL), at(FREE_A)),
        Op::Symlink(at(FREE_A), 20),
        Op::Symlink(at(FREE_B), 100),
        Op::Unlink(at(LARGE)),
        Op::Unlink(at(SMALL)),
        Op::Unlink(at(FREE_A)),
        Op::Unlink(at(FREE_B)),
        Op::Rmdir(at(SUB)),
        Op::Rmdir(at(FREE_A)),
        Op::Rmdir(at(FREE_B)),
        rename(LARGE, SMALL, Move::Replace),
        rename(SMALL, LARGE, Move::Replace),
        rename(LARGE, FREE_A, Move::Replace),
        rename(LARGE, FREE_B, Move::Replace),
        rename(FREE_A, LARGE, Move::Replace),
        rename(FREE_A, SMALL, Move::Replace),
        rename(FREE_B, SUB, Move::Replace),
        rename(SUB, FREE_B, Move::Replace),
        rename(A, &[1, 0], Move::Replace),
        rename(LARGE, SMALL, Move::Exchange),
        rename(LARGE, SUB, Move::Exchange),
        rename(A, B, Move::Exchange),
        Op::SetXattr(at(LARGE), 0, 50),
        Op::SetXattr(at(SMALL), 0, 9_000),
        Op::SetXattr(at(FREE_A), 1, 50),
        Op::Fsync(file(LARGE), false),
        Op::Fsync(file(SMALL), false),
        Op::Fsync(file(FREE_A), false),
        Op::Fsync(file(FREE_B), false),
        Op::Fsync(file(LARGE), true),
        Op::Fsync(file(FREE_A), true),
        Op::FsyncDir(at(A)),
        Op::FsyncDir(at(B)),
    ]
}

/// The volume of every sequence: the smallest there is.
fn on(begin: Begin, seed: u64, ops: Vec<Op>) -> Plan {
    Plan {
        seed,
        volume_bytes: 16 << 20,
        log_bytes: LOG_MIN,
        cache_bytes: 1 << 20,
        lives: vec![ops],
        points_max: usize::MAX,
        images: 2,
        flush_lies: false,
        fault: None,
        begin,
        under_way: None,
    }
}

impl Enumeration {
    /// All sequences of `length` operations.
    pub fn new(length: u32) -> Result<Self, Failure> {
        let prepared = Arc::new(on(Begin::Blank, 0, tree()).prepare()?);
        Ok(Self { alphabet: alphabet(), length, prepared })
    }

    /// So many sequences there are, those that are left out among them.
    pub fn count(&self) -> u64 {
        (self.alphabet.len() as u64).pow(self.length)
    }

    /// Sequence number `number`; `None` if a shorter one says as much.
    pub fn plan(&self, number: u64) -> Option<Plan> {
        let n = self.alphabet.len() as u64;
        let digits = (0..self.length).map(|position| number / n.pow(position) % n);
        let ops: Vec<_> = digits.map(|digit| self.alphabet[digit as usize].clone()).collect();
        let mut model = self.prepared.model().clone();
        for (i, op) in ops.iter().enumerate() {
            if model.outcome(op) != Outcome::Done {
                return None;
            }
            model.apply(op, i, u64::MAX - i as u64);
        }
        Some(on(Begin::Prepared(self.prepared.clone()), number, ops))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_sequences_and_failing_ones_are_left_out() {
        let counted = |length| {
            let all = Enumeration::new(length).expect("the prepared volume can be made");
            (all.count(), (0..all.count()).filter_map(|n| all.plan(n)).collect::<Vec<_>>())
        };
        let (count, ones) = counted(1);
        assert_eq!((count, ones.len()), (57, 41));
        let (count, twos) = counted(2);
        assert_eq!(count, 57 * 57);
        assert!(twos.iter().all(|plan| plan.ops() == 2));
        for (i, two) in twos.iter().enumerate() {
            assert!(
                twos[..i].iter().all(|other| other.lives != two.lives),
                "each sequence comes once"
            );
        }
        let needs_the_first = [Op::Create(at(FREE_A)), Op::Fsync(file(FREE_A), false)];
        assert!(twos.iter().any(|plan| plan.lives[0] == needs_the_first));
    }
}
