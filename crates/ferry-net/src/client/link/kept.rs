//! Promised changes that the server has made and that are not durable: if it crashes, they are made again.
//!
//! * R1: what was promised is kept, in order, until the server says that it is durable; no more is promised than fits.
//! * R2: a write lease on an inode with such changes goes back when they are durable: the server is asked for that if somebody wants the
//!   lease, else the client waits for it. So nothing is ever made again that others have seen, or written over.
//! * R3: where that cannot be, behind a change that the server decides, the changes are *moved*: writes and changes of attributes among them
//!   are not made again, but told as lost. Of what came before the end of a series nothing is made again.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ferry_fs::Ino;

use super::Pending;
use crate::message::{Claim, Numbers, Op, Outcome, Promised, Who};

/// Changes that are kept, answered or not, and bytes of them.
const KEPT_MAX: usize = 65_536;
const KEPT_BYTES_MAX: usize = 64 << 20;
/// Ranges of numbers that are remembered: more than the changes that are kept can have used.
const RANGES_MAX: usize = 256;
/// Inodes are looked through when there are more of them than this, and than twice the changes.
const STALE_MAX: usize = 1024;

/// A promised change.
pub(in crate::client) struct KeptChange {
    pub(in crate::client) seq: u64,
    pub(in crate::client) who: Who,
    pub(in crate::client) op: Op,
    pub(in crate::client) promised: Promised,
    pub(in crate::client) touched: Vec<Ino>,
    /// The inode of the open file that it names.
    pub(in crate::client) file: Option<Ino>,
    /// Nobody has to hear of it if it cannot be made.
    pub(in crate::client) quiet: bool,
    /// Its answer is yet to come.
    pub(in crate::client) unanswered: bool,
    /// Others may have seen what it touches, and changed it.
    pub(in crate::client) moved: bool,
    /// Its series has ended: others may have changed anything since.
    pub(in crate::client) lost: bool,
    since: Duration,
}

impl KeptChange {
    pub(super) fn new(seq: u64, pending: Pending, promised: Promised, since: Duration) -> Self {
        let file = pending.files.first().map(|(_, ino)| *ino);
        let Pending { who, op, touched, quiet, .. } = pending;
        Self {
            seq,
            who,
            op,
            promised,
            touched,
            file,
            quiet,
            unanswered: false,
            moved: false,
            lost: false,
            since,
        }
    }

    fn bytes(&self) -> usize {
        if let Op::Write { data, .. } = &self.op { data.len() } else { 0 }
    }
}

/// What a client makes again at a server that has taken the place of one that crashed.
pub(in crate::client) struct Redo {
    /// In their order.
    pub(in crate::client) changes: Vec<KeptChange>,
    /// Names and inodes are there as the changes up to this one have left them.
    pub(in crate::client) mark: u64,
    /// Inodes that they touch and the kernel does not know any more.
    pub(in crate::client) claims: Vec<Claim>,
    /// Under which they make inodes.
    pub(in crate::client) numbers: Vec<Numbers>,
}

/// What is kept.
#[derive(Default)]
pub(super) struct Kept {
    changes: VecDeque<KeptChange>,
    bytes: usize,
    /// Changes up to this one are durable.
    durable: u64,
    /// The newest promised change of each inode, answered or not. Those that are durable may be among them.
    touching: HashMap<Ino, u64>,
    /// Changes of an inode up to this one are moved.
    moved: HashMap<Ino, u64>,
    /// Changes up to this one are of a series that has ended.
    ended: u64,
    /// Inodes that the kernel has forgotten, each with the newest change of that time.
    claims: VecDeque<(u64, Claim)>,
    numbers: VecDeque<Numbers>,
    /// Leases that go back when the change is durable.
    later: Vec<(u64, Vec<Ino>)>,
}

/// Whether there is anything to make again.
fn matters(op: &Op) -> bool {
    !matches!(op, Op::Open { flags, .. } if *flags & libc::O_TRUNC == 0)
}

impl Kept {
    /// A change is promised.
    pub(super) fn promised(&mut self, seq: u64, pending: &Pending) {
        if matters(&pending.op) {
            for ino in &pending.touched {
                self.touching.insert(*ino, seq);
            }
        }
    }

    /// The server has made a promised change.
    pub(super) fn keep(&mut self, seq: u64, pending: Pending, promised: Promised, now: Duration) {
        if matters(&pending.op) && seq > self.durable {
            let change = KeptChange::new(seq, pending, promised, now);
            self.bytes += change.bytes();
            self.changes.push_back(change);
        }
    }

    /// Changes up to this one are durable.
    pub(super) fn advance(&mut self, durable: u64) {
        if durable <= self.durable {
            return;
        }
        self.durable = durable;
        let done = self.changes.partition_point(|change| change.seq <= durable);
        self.bytes -= self.changes.drain(..done).map(|change| change.bytes()).sum::<usize>();
        let done = self.claims.partition_point(|(seq, _)| *seq <= durable);
        self.claims.drain(..done);
        let most = STALE_MAX.max(2 * self.changes.len());
        for stale in [&mut self.touching, &mut self.moved] {
            if stale.len() > most {
                stale.retain(|_, seq| *seq > durable);
            }
        }
    }

    /// Leases that may go back now.
    pub(super) fn due(&mut self) -> Vec<Vec<Ino>> {
        let durable = self.durable;
        self.later.extract_if(.., |(seq, _)| *seq <= durable).map(|(_, inos)| inos).collect()
    }

    /// These go back when `seq` is durable.
    pub(super) fn return_later(&mut self, seq: u64, inos: &[Ino]) {
        self.later.push((seq, inos.to_vec()));
    }

    /// A connection without leases begins.
    pub(super) fn forget_returns(&mut self) {
        self.later.clear();
    }

    /// With `more` that are not answered, no more may be promised.
    pub(super) fn is_full(&self, more: usize, more_bytes: usize) -> bool {
        self.changes.len() + more >= KEPT_MAX || self.bytes + more_bytes >= KEPT_BYTES_MAX
    }

    /// The newest change of these inodes that others must not see before it is durable.
    pub(super) fn newest_of(&self, inos: &[Ino]) -> Option<u64> {
        let newest = |ino| {
            let moved = self.moved.get(ino).copied().unwrap_or(0).max(self.ended);
            self.touching.get(ino).copied().filter(|seq| *seq > self.durable.max(moved))
        };
        inos.iter().filter_map(newest).max()
    }

    /// Leases on these go back behind the change `seq`, durable or not.
    pub(super) fn give_away(&mut self, inos: &[Ino], seq: u64) {
        for ino in inos {
            if self.touching.get(ino).is_some_and(|newest| *newest > self.durable) {
                self.moved.insert(*ino, seq);
            }
        }
    }

    /// A series has ended: the leases on all inodes may have gone to others.
    pub(super) fn end_series(&mut self, newest: u64) {
        self.ended = newest;
    }

    /// The kernel forgets an inode.
    pub(super) fn remember(&mut self, claim: Claim, newest: u64) {
        if self.touching.get(&claim.ino).is_some_and(|seq| *seq > self.durable) {
            self.claims.push_back((newest, claim));
        }
    }

    /// Numbers have been given.
    pub(super) fn add_numbers(&mut self, numbers: Numbers) {
        self.numbers.push_back(numbers);
        if self.numbers.len() > RANGES_MAX {
            self.numbers.pop_front();
        }
    }

    /// The server, or the session, is gone, and with it what was kept.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The server has crashed: gives what is to be made again, with the promised changes that it has not answered. All of that is kept
    /// anew as it is made.
    pub(super) fn take(&mut self, mark: u64, unanswered: Vec<KeptChange>) -> Redo {
        let mut changes: Vec<KeptChange> = std::mem::take(&mut self.changes).into();
        changes.extend(unanswered.into_iter().map(|change| KeptChange { unanswered: true, ..change }));
        for change in &mut changes {
            let moved = |ino| self.moved.get(ino).is_some_and(|seq| *seq >= change.seq);
            change.moved = change.touched.iter().any(moved);
            change.lost = change.seq <= self.ended;
        }
        changes.retain(|change| matters(&change.op));
        (self.bytes, self.ended) = (0, 0);
        self.touching.clear();
        self.moved.clear();
        self.later.clear();
        let claims = std::mem::take(&mut self.claims).into_iter().map(|(_, claim)| claim).collect();
        Redo { changes, mark, claims, numbers: self.numbers.iter().copied().collect() }
    }

    /// What was claimed is claimed again if that server crashes, too, before the change `newest` is durable.
    pub(super) fn keep_claims(&mut self, claims: Vec<Claim>, newest: u64) {
        self.claims = claims.into_iter().map(|claim| (newest, claim)).collect();
    }

    /// For `ferry stats`: changes, bytes, and the age of the oldest.
    pub(super) fn figures(&self, now: Duration) -> (usize, usize, Option<Duration>) {
        let oldest = self.changes.front().map(|change| now.saturating_sub(change.since));
        (self.changes.len(), self.bytes, oldest)
    }
}

/// Whether the server has made a promised change.
pub(super) fn is_made(outcome: &Outcome) -> bool {
    !matches!(outcome, Outcome::Failed { .. } | Outcome::Dropped {} | Outcome::Busy {})
}
