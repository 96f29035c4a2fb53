//! The replay log: changes that the server has applied and that are not durable. If the server
//! crashes, they are replayed, or programs hear of them as deferred errors.
//!
//! * REPLAY-LOG-1: an applied change stays in the log, in order, until the server says that it is
//!   durable. The client acknowledges no more changes early than fit. Of changes that the server
//!   has decided and that do not fit, the log remembers only the inodes.
//! * REPLAY-LOG-2: no change is replayed that another client has seen or overwritten. Before the
//!   server lets another client do so, it makes the change durable and updates the durable
//!   watermark on the volume. After a crash it tells that watermark to the client.
//! * REPLAY-LOG-3: no change of an epoch that has ended is replayed.
//! * REPLAY-LOG-4: no change is reported as lost that survives. An answered `Sync` covers all
//!   changes before it. An answered fsync covers the changes that touch its inode, with all else
//!   that they touch: each change is one transaction. Newer changes are not covered.
//! * REPLAY-LOG-5: a change that the server has decided is replayed as it was applied: with the
//!   time, the inode number and the offset that its answer has named.

use crate::rt::collections::{HashMap, VecDeque};
use std::time::Duration;

use ferry_fs::Ino;

use super::change::{Change, Pending, Stage};
use crate::message::{Claim, Effect, Made, Numbers, Op, Outcome, Replay};

mod as_made;

/// Changes in the stream and the log, and bytes of them.
const CHANGES_MAX: usize = 65_536;
const BYTES_MAX: usize = 64 << 20;
/// Beyond so many server-decided changes, the log remembers only the inodes of the oldest.
const AWAITED_MAX: usize = 16_384;
/// Inodes that are remembered of those; more than these are "all that are open".
const OLDER_MAX: usize = 1 << 16;
/// Ranges of inode numbers that are remembered: more than the changes in the log can have used.
const RANGES_MAX: usize = 256;
/// Inodes whose fsync is remembered.
const SYNCED_MAX: usize = 1 << 16;
/// Inodes are looked through when there are more of them than this, and than twice the changes.
const STALE_MAX: usize = 1024;

/// What is not known to be durable when a new server has replaced one that crashed: each change is
/// replayed or lost.
#[derive(Default)]
pub(super) struct Replayable {
    /// In their order.
    pub(super) changes: Vec<Change>,
    /// Names and inodes are there as the changes up to this one have left them. `None`: nothing can
    /// be replayed, and nothing is known.
    pub(super) last_applied: Option<u64>,
    /// All that was changed up to this one is there, contents too.
    pub(super) durable: u64,
    /// Inodes with older changes, which are not among these.
    pub(super) older: Vec<Ino>,
    /// There may be others.
    pub(super) overflow: bool,
    /// Inodes that they touch and the kernel does not know any more.
    pub(super) claims: Vec<Claim>,
    /// Under which they make inodes.
    pub(super) numbers: Vec<Numbers>,
    /// Inodes that were made without an answer, as a session said that came to its end before it
    /// knew them.
    pub(super) made: Vec<Ino>,
}

/// The log, and what is needed to decide which of its changes survive.
#[derive(Default)]
pub(super) struct ReplayLog {
    changes: VecDeque<Change>,
    bytes: usize,
    /// Those of them whose answer a program waited for.
    awaited: usize,
    /// Changes up to this one are durable.
    durable: u64,
    /// Answered changes up to this one are here, unless they are durable or change nothing.
    logged: u64,
    /// The newest early-acknowledged change of each inode, answered or not. Those that are durable
    /// may be among them.
    touching: HashMap<Ino, u64>,
    /// Changes that touch the inode, up to this one, are durable.
    synced: HashMap<Ino, u64>,
    /// The newest change of each inode of those that are not in the log one by one.
    older: HashMap<Ino, u64>,
    /// The newest change of which not even that is known.
    overflow: Option<u64>,
    /// Changes up to this one are of an epoch that has ended.
    ended: u64,
    /// Inodes that the kernel has forgotten, each with the newest change of that time.
    claims: VecDeque<(u64, Claim)>,
    numbers: VecDeque<Numbers>,
    /// The first early-acknowledged change of the epoch: from it on the server records its
    /// last-applied sequence number.
    sequenced_from: Option<u64>,
}

/// What becomes of a change that the server had not answered when it crashed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// It was not made, or comes to the same once more, and nobody has seen it: it is sent again.
    Again,
    /// It was, and the answer says nothing else.
    Made,
    /// It may have been made, or not.
    Unknown,
}

/// Whether it changes anything that may be lost.
pub(super) fn matters(op: &Op) -> bool {
    op.info().effect != Effect::Nothing
}

impl ReplayLog {
    /// A change is acknowledged early.
    pub(super) fn acknowledged(&mut self, seq: u64, pending: &Pending) {
        self.sequenced_from.get_or_insert(seq);
        if matters(&pending.op) {
            for ino in &pending.touched {
                self.touching.insert(*ino, seq);
            }
        }
    }

    /// A process was killed that had the answers up to `answered`. Behind `durable` nobody knows
    /// which of its changes are not durable.
    pub(super) fn was_left(&mut self, answered: u64, durable: u64) {
        self.overflow = (answered > durable).then_some(answered);
        self.logged = answered;
    }

    /// The changes of a session begin behind this one: the log has what there is before it.
    pub(super) fn begin_behind(&mut self, seq: u64) {
        self.logged = seq;
    }

    /// The log has this change, or does not need it. Each answered change is named once, in order:
    /// one that was left out would stay unknown.
    pub(super) fn logged(&mut self, seq: u64) {
        self.logged += u64::from(seq == self.logged + 1);
    }

    /// If all is durable that was changed: the newest change of which that is known.
    pub(super) fn all_durable(&self) -> Option<u64> {
        self.is_durable().then_some(self.logged)
    }

    /// The server has applied an early-acknowledged change.
    pub(super) fn keep(&mut self, mut change: Change, now: Duration) {
        if matters(&change.pending.op) && change.seq > self.durable {
            change.apply(now);
            self.bytes += change.pending.bytes();
            self.changes.push_back(change);
        }
    }

    /// The server has applied a change that a program waits for: the answer, and how the change was
    /// applied. `None`: not all of that is known, and the change cannot be replayed.
    pub(super) fn keep_awaited(
        &mut self,
        mut change: Change,
        (outcome, made): (&Outcome, Option<Made>),
        now: Duration,
    ) {
        let seq = change.seq;
        if !matters(&change.pending.op) || seq <= self.durable {
            return;
        }
        let copied = change.pending.touched.first();
        if let (Op::Copy { .. }, Some(ino)) = (&change.pending.op, copied) {
            // The server has synced it.
            return self.synced(*ino, seq);
        }
        change.apply(now);
        let known = if let Outcome::Entry { known } = outcome { known.as_ref() } else { None };
        if let Some(known) = known {
            change.named = Some(Claim { ino: known.attr.ino, capability: known.capability });
            if !change.pending.touched.contains(&known.attr.ino) {
                change.pending.touched.push(known.attr.ino);
            }
        }
        // With a file without a name nothing else is lost.
        let pending = &mut change.pending;
        if let Some(made) = made.filter(|_| !matches!(pending.op, Op::Tmpfile { .. })) {
            let unknown = made.touched.0.iter().filter(|ino| !pending.touched.contains(ino));
            let unknown: Vec<Ino> = unknown.copied().collect();
            pending.touched.extend(unknown);
            if !self.is_full(0, pending.bytes()) {
                pending.decided = as_made::as_made(&mut pending.op, outcome, &made);
            }
        }
        if let (Op::Write { data, .. }, None) = (&mut pending.op, pending.decided) {
            *data = Vec::new();
        }
        for ino in &pending.touched {
            self.touching.insert(*ino, seq);
        }
        // Where that gives a file its only name, the server has synced it.
        let published = known.map(|known| known.attr).filter(|attr| attr.nlink == 1);
        let published = published.filter(|_| matches!(pending.op, Op::Link { .. }));
        self.bytes += pending.bytes();
        self.changes.push_back(change);
        self.awaited += 1;
        if self.awaited > AWAITED_MAX {
            self.thin_out();
        }
        if let Some(attr) = published {
            self.synced(attr.ino, seq);
        }
    }

    /// Keeps fewer changes one by one.
    fn thin_out(&mut self) {
        let mut all = std::mem::take(&mut self.changes);
        all.retain(|change| !self.is_covered(change));
        let awaited = all.iter().filter(|change| change.was_awaited()).count();
        let mut surplus = awaited.saturating_sub(AWAITED_MAX / 2);
        self.awaited = awaited - surplus;
        for change in all {
            if !change.was_awaited() || surplus == 0 {
                self.changes.push_back(change);
                continue;
            }
            surplus -= 1;
            for ino in change.pending.touched {
                if self.older.len() < OLDER_MAX || self.older.contains_key(&ino) {
                    self.older.insert(ino, change.seq);
                } else {
                    self.overflow = Some(change.seq);
                }
            }
        }
        self.bytes = self.changes.iter().map(|change| change.pending.bytes()).sum();
    }

    /// Whether the fsync of something that it touches has made it durable.
    fn is_covered(&self, change: &Change) -> bool {
        let by = |ino: &Ino| self.synced.get(ino).is_some_and(|seq| *seq >= change.seq);
        match &change.pending.op {
            // It may have cut off a file that was there.
            Op::Create { .. } if change.was_awaited() => {
                change.named.is_some_and(|named| by(&named.ino))
            }
            _ => change.pending.touched.iter().any(by),
        }
    }

    /// An inode was synced behind the change `seq`, or another that does not touch it.
    pub(super) fn synced(&mut self, ino: Ino, seq: u64) {
        if seq <= self.durable {
            return;
        }
        let newest = self.synced.entry(ino).or_default();
        *newest = seq.max(*newest);
        if self.older.get(&ino).is_some_and(|older| *older <= seq) {
            self.older.remove(&ino);
        }
        while self.changes.front().is_some_and(|change| self.is_covered(change))
            && let Some(mut change) = self.changes.pop_front()
        {
            change.advance(Stage::Durable);
            self.bytes -= change.pending.bytes();
            self.awaited -= usize::from(change.was_awaited());
        }
        if self.synced.len() > SYNCED_MAX {
            self.thin_out();
            self.synced.clear();
        }
    }

    /// Changes up to this one are durable.
    pub(super) fn advance(&mut self, durable: u64) {
        // A new session has nothing to say yet of what the one before has left.
        if durable == 0 {
            return;
        }
        self.older.retain(|_, seq| *seq > durable);
        self.overflow = self.overflow.filter(|seq| *seq > durable);
        if durable <= self.durable {
            return;
        }
        self.durable = durable;
        let done = self.changes.partition_point(|change| change.seq <= durable);
        for mut change in self.changes.drain(..done) {
            change.advance(Stage::Durable);
            self.bytes -= change.pending.bytes();
            self.awaited -= usize::from(change.was_awaited());
        }
        let done = self.claims.partition_point(|(seq, _)| *seq <= durable);
        self.claims.drain(..done);
        let most = STALE_MAX.max(2 * self.changes.len());
        for stale in [&mut self.touching, &mut self.synced] {
            if stale.len() > most {
                stale.retain(|_, seq| *seq > durable);
            }
        }
    }

    /// Whether all is durable that was changed.
    pub(super) fn is_durable(&self) -> bool {
        self.changes.is_empty() && self.older.is_empty() && self.overflow.is_none()
    }

    /// Whether the log, with `more` unanswered changes, has no room for another one.
    pub(super) fn is_full(&self, more: usize, more_bytes: usize) -> bool {
        self.changes.len() + more >= CHANGES_MAX || self.bytes + more_bytes >= BYTES_MAX
    }

    /// An epoch has ended: the leases on all inodes may have gone to others. What comes now has the
    /// numbers behind `newest`.
    pub(super) fn end_epoch(&mut self, newest: u64) {
        self.ended = newest;
        self.sequenced_from = None;
        // What was not sent is never made, and others have its numbers.
        for of_inodes in [&mut self.synced, &mut self.touching] {
            of_inodes.values_mut().for_each(|seq| *seq = newest.min(*seq));
        }
        // They are in the order of these numbers, and go when the numbers are durable.
        self.claims.iter_mut().for_each(|(seq, _)| *seq = newest.min(*seq));
    }

    /// The kernel forgets an inode.
    pub(super) fn remember(&mut self, claim: Claim, newest: u64) {
        if self.touching.get(&claim.ino).is_some_and(|seq| *seq > self.durable) {
            self.claims.push_back((newest, claim));
        }
    }

    /// The server has reserved inode numbers for this client.
    pub(super) fn add_numbers(&mut self, numbers: Numbers) {
        self.numbers.push_back(numbers);
        if self.numbers.len() > RANGES_MAX {
            self.numbers.pop_front();
        }
    }

    /// Nothing of the session before can be replayed or reported any more.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The session has ended, and the server goes on: what it has applied exists, and is not
    /// replayed.
    pub(super) fn give_up(&mut self) {
        let Replayable { changes, older, overflow, .. } = self.take(None, 0, Vec::new());
        let inos = changes.into_iter().flat_map(|change| change.pending.touched).chain(older);
        // Whatever becomes durable of the new session is newer.
        let older = inos.map(|ino| (ino, 0)).collect();
        *self = Self { older, overflow: overflow.then_some(0), ..Self::default() };
    }

    /// The server has crashed: gives what may be lost, with the early-acknowledged changes that it
    /// has not answered. Each enters the log again when it is replayed.
    pub(super) fn take(
        &mut self,
        last_applied: Option<u64>,
        durable: u64,
        unanswered: Vec<Change>,
    ) -> Replayable {
        self.advance(durable);
        let all = std::mem::take(&mut self.changes);
        let mut changes: Vec<Change> =
            all.into_iter().filter(|change| !self.is_covered(change)).collect();
        changes.extend(unanswered);
        let ended = self.ended;
        for change in changes.iter_mut().filter(|change| change.stage() == Stage::Applied) {
            if change.seq <= ended || change.pending.decided.is_none() {
                change.advance(Stage::Lost);
            }
        }
        changes.retain(|change| matters(&change.pending.op));
        let older = std::mem::take(&mut self.older).into_keys().collect();
        let overflow = self.overflow.take().is_some();
        (self.bytes, self.awaited, self.ended) = (0, 0, 0);
        for of_inodes in [&mut self.touching, &mut self.synced] {
            of_inodes.clear();
        }
        // Numbers go on behind the newest. What was not marked may have been durable beyond it.
        self.durable = last_applied.unwrap_or(0);
        let named =
            changes.iter().filter(|change| change.number() > 0).filter_map(|change| change.named);
        let claims = self.claims.drain(..).map(|(_, claim)| claim).chain(named).collect();
        let numbers = self.numbers.iter().copied().collect();
        Replayable {
            changes,
            last_applied,
            durable,
            older,
            overflow,
            claims,
            numbers,
            made: Vec::new(),
        }
    }

    /// What becomes of a change that was sent to a server which crashed and has not answered: the
    /// next one has found this mark, and this word of what is durable.
    pub(super) fn unanswered(
        &self,
        seq: u64,
        op: &Op,
        (last_applied, durable): (u64, u64),
    ) -> Unanswered {
        let info = op.info();
        if info.replay == Replay::Never {
            return Unanswered::Unknown;
        }
        let advances = info.effect == Effect::Metadata;
        let sequenced = self.sequenced_from.is_some_and(|from| seq >= from);
        if sequenced && seq > durable && (seq > last_applied || !advances) {
            Unanswered::Again
        } else if sequenced && seq == last_applied && info.replay == Replay::AgainOrDone {
            Unanswered::Made
        } else {
            Unanswered::Unknown
        }
    }

    /// What was claimed is claimed again if that server crashes, too, before the change `newest` is
    /// durable.
    pub(super) fn keep_claims(&mut self, claims: Vec<Claim>, newest: u64) {
        self.claims = claims.into_iter().map(|claim| (newest, claim)).collect();
    }

    /// For `ferry stats`: changes, bytes, and the age of the oldest.
    pub(super) fn figures(&self, now: Duration) -> (usize, usize, Option<Duration>) {
        let oldest = self.changes.front().map(|change| now.saturating_sub(change.since));
        (self.changes.len(), self.bytes, oldest)
    }
}

/// Whether the answer says that the server has applied the change.
pub(super) fn is_made(outcome: &Outcome) -> bool {
    !matches!(outcome, Outcome::Failed { .. } | Outcome::Dropped {} | Outcome::Busy {})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(log: &mut ReplayLog, seq: u64, touched: &[Ino]) {
        let op = Op::Unlink { parent: touched[0], name: b"n".to_vec() };
        let pending = Pending { touched: touched.to_vec(), ..Pending::unattended(op) };
        let mut change = Change::new(pending);
        change.queue(seq, 0, Duration::ZERO);
        log.keep_awaited(change, (&Outcome::Done {}, None), Duration::ZERO);
    }

    fn lost(log: &mut ReplayLog) -> (Vec<u64>, Vec<Ino>) {
        let replayable = log.take(None, 0, Vec::new());
        let mut older = replayable.older;
        older.sort_unstable();
        (replayable.changes.iter().map(|change| change.seq).collect(), older)
    }

    #[test]
    fn a_sync_covers_earlier_changes_of_its_inode() {
        let mut log = ReplayLog::default();
        change(&mut log, 1, &[5, 6]);
        change(&mut log, 2, &[5]);
        change(&mut log, 3, &[6, 7]);
        log.synced(6, 2);
        assert_eq!(lost(&mut log), (vec![2, 3], vec![]));
        change(&mut log, 4, &[5]);
        change(&mut log, 5, &[5]);
        log.advance(4);
        assert_eq!(lost(&mut log), (vec![5], vec![]));
    }

    #[test]
    fn claims_expire_with_the_changes_of_their_epoch() {
        let mut log = ReplayLog::default();
        let remember = |log: &mut ReplayLog, ino, newest| {
            log.touching.insert(ino, newest);
            log.remember(Claim { ino, capability: 0 }, newest);
        };
        remember(&mut log, 5, 900);
        log.end_epoch(10);
        remember(&mut log, 6, 12);
        log.advance(11);
        assert_eq!(log.claims, [(12, Claim { ino: 6, capability: 0 })]);
    }

    #[test]
    fn changes_renumbered_after_a_crash_enter_the_replay_log() {
        let mut log = ReplayLog::default();
        log.advance(10);
        assert_eq!(log.take(Some(8), 0, Vec::new()).changes.len(), 0);
        change(&mut log, 9, &[5]);
        assert_eq!(lost(&mut log).0, [9]);
    }

    #[test]
    fn a_full_replay_log_remembers_the_inodes_of_dropped_changes() {
        let mut log = ReplayLog::default();
        let many = AWAITED_MAX as u64;
        (1..=many + 1).for_each(|seq| change(&mut log, seq, &[10 + seq]));
        log.synced(11, many + 1);
        log.advance(2);
        let (changes, older) = lost(&mut log);
        assert_eq!(changes.len() + older.len(), AWAITED_MAX - 1);
        assert_eq!((older.first(), changes.last()), (Some(&13), Some(&(many + 1))));
    }

    #[test]
    fn a_session_ended_by_a_running_server_leaves_its_inodes_in_the_log() {
        let mut log = ReplayLog::default();
        change(&mut log, 7, &[5]);
        log.give_up();
        log.advance(0);
        change(&mut log, 1, &[6]);
        assert_eq!(lost(&mut log), (vec![1], vec![5]));
        change(&mut log, 7, &[5]);
        log.give_up();
        log.advance(1);
        assert_eq!(lost(&mut log), (vec![], vec![]));
    }

    #[test]
    fn an_unanswered_change_is_resent_only_if_that_is_safe() {
        let mut log = ReplayLog::default();
        let unlink = Op::Unlink { parent: 1, name: b"n".to_vec() };
        let mkdir = Op::Mkdir { parent: 1, name: b"n".to_vec(), mode: 0o755 };
        let write =
            |append| Op::Write { fh: 1, offset: 0, data: vec![1], append, kill_suidgid: false };
        let found = (7, 6);
        assert_eq!(
            log.unanswered(9, &unlink, found),
            Unanswered::Unknown,
            "it may have left no sequence number"
        );
        let decided = Pending { touched: vec![1], ..Pending::unattended(mkdir) };
        log.acknowledged(5, &decided);
        assert_eq!(log.unanswered(4, &unlink, (3, 0)), Unanswered::Unknown, "so may this");
        assert_eq!(log.unanswered(8, &unlink, found), Unanswered::Again);
        assert_eq!(log.unanswered(7, &unlink, found), Unanswered::Made);
        assert_eq!(log.unanswered(6, &unlink, found), Unanswered::Unknown, "it may have failed");
        assert_eq!(
            log.unanswered(7, &decided.op, found),
            Unanswered::Unknown,
            "its answer says more"
        );
        assert_eq!(log.unanswered(7, &write(false), found), Unanswered::Again);
        assert_eq!(
            log.unanswered(6, &write(false), found),
            Unanswered::Unknown,
            "others may have written since"
        );
        assert_eq!(log.unanswered(8, &write(true), found), Unanswered::Unknown);
        log.end_epoch(8);
        assert_eq!(log.unanswered(9, &unlink, found), Unanswered::Unknown);
    }
}
