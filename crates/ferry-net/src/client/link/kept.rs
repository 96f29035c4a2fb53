//! Changes that the server has made and that are not durable: if it crashes, they are made again,
//! or told as lost.
//!
//! * REPLAY-LOG-1: what was changed is kept, in order, until the server says that it is durable; no
//!   more is promised than fits. Of what the server has decided and what does not fit only the
//!   inodes are remembered.
//! * REPLAY-LOG-2: nothing is ever made again that others have seen, or written over: before that
//!   the server makes it durable, and leaves a word of it on the volume, which a client that comes
//!   back after a crash is told.
//! * REPLAY-LOG-3: of what came before the end of a series nothing is made again.
//! * REPLAY-LOG-4: nothing is told as lost that is there. What came before a sync, `Durable` says
//!   of itself; what touches an inode, its fsync too: a change is one transaction, of all that it
//!   touches. What is newer is not covered, whatever it touches.
//! * REPLAY-LOG-5: what the server has decided is made again as it was: with the time, the number
//!   and the place in the file that the answer has named.

use crate::rt::collections::{HashMap, VecDeque};
use std::time::Duration;

use ferry_fs::Ino;

use super::{Pending, decided};
use crate::message::{Claim, Effect, Made, Numbers, Op, Outcome, Promised, Replay, Who};

/// Changes that are kept, answered or not, and bytes of them.
const KEPT_MAX: usize = 65_536;
const KEPT_BYTES_MAX: usize = 64 << 20;
/// Changes beyond which the oldest that the server has decided are not kept one by one.
const WAITED_MAX: usize = 16_384;
/// Inodes that are remembered of those; more than these are "all that are open".
const OLDER_MAX: usize = 1 << 16;
/// Ranges of numbers that are remembered: more than the changes that are kept can have used.
const RANGES_MAX: usize = 256;
/// Inodes whose fsync is remembered.
const SYNCED_MAX: usize = 1 << 16;
/// Inodes are looked through when there are more of them than this, and than twice the changes.
const STALE_MAX: usize = 1024;

/// A change.
pub(in crate::client) struct KeptChange {
    pub(in crate::client) seq: u64,
    pub(in crate::client) who: Who,
    pub(in crate::client) op: Op,
    /// How it was made; `None`: that is not known, and it cannot be made again.
    pub(in crate::client) promised: Option<Promised>,
    /// Somebody waited for the server, which has decided it, and has named this inode.
    waited: bool,
    named: Option<Claim>,
    pub(in crate::client) touched: Vec<Ino>,
    /// The inode of the open file that it names.
    pub(in crate::client) file: Option<Ino>,
    /// Nobody has to hear of it if it cannot be made.
    pub(in crate::client) quiet: bool,
    /// Its answer is yet to come.
    pub(in crate::client) unanswered: bool,
    /// It is not made again: its series has ended, or how it was made is not known.
    pub(in crate::client) lost: bool,
    since: Duration,
}

impl KeptChange {
    pub(super) fn new(
        seq: u64,
        pending: Pending,
        promised: Option<Promised>,
        since: Duration,
    ) -> Self {
        let file = pending.files.first().map(|(_, ino)| *ino);
        let Pending { who, op, touched, quiet, .. } = pending;
        Self {
            seq,
            who,
            op,
            promised,
            waited: false,
            named: None,
            touched,
            file,
            quiet,
            unanswered: false,
            lost: false,
            since,
        }
    }

    /// The number of what it makes.
    pub(in crate::client) fn number(&self) -> Ino {
        self.promised.map_or(0, |promised| promised.ino)
    }

    /// The directories in which it changes names, and what else it touches.
    pub(in crate::client) fn split(&self) -> (Vec<Ino>, Vec<Ino>) {
        let dirs: Vec<Ino> = self.op.info().directories().collect();
        let others = self.touched.iter().copied().filter(|ino| !dirs.contains(ino)).collect();
        (dirs, others)
    }

    /// Whether the others must be as they were: what has a name may get another one, whatever is in
    /// it, but replaces nothing then.
    pub(in crate::client) fn needs(&self, others: &[Ino]) -> bool {
        self.op.info().names().next().is_none() || others.len() > 1
    }

    fn bytes(&self) -> usize {
        self.op.info().data_bytes
    }
}

/// What is not known to be durable when a server has taken the place of one that crashed: it is
/// made again, or lost.
#[derive(Default)]
pub(in crate::client) struct Redo {
    /// In their order.
    pub(in crate::client) changes: Vec<KeptChange>,
    /// Names and inodes are there as the changes up to this one have left them. `None`: nothing can
    /// be made again, and nothing is known.
    pub(in crate::client) mark: Option<u64>,
    /// All that was changed up to this one is there, contents too.
    pub(in crate::client) durable: u64,
    /// Inodes with older changes, which are not among these.
    pub(in crate::client) older: Vec<Ino>,
    /// There may be others.
    pub(in crate::client) overflow: bool,
    /// Inodes that they touch and the kernel does not know any more.
    pub(in crate::client) claims: Vec<Claim>,
    /// Under which they make inodes.
    pub(in crate::client) numbers: Vec<Numbers>,
    /// Inodes that were made without an answer, as a session said that came to its end before it
    /// knew them.
    pub(in crate::client) made: Vec<Ino>,
}

/// What is kept.
#[derive(Default)]
pub(super) struct Kept {
    changes: VecDeque<KeptChange>,
    bytes: usize,
    /// Those of them that were not promised.
    waited: usize,
    /// Changes up to this one are durable.
    durable: u64,
    /// The newest promised change of each inode, answered or not. Those that are durable may be
    /// among them.
    touching: HashMap<Ino, u64>,
    /// Changes that touch the inode, up to this one, are durable.
    synced: HashMap<Ino, u64>,
    /// The newest change of each inode of those that are not kept one by one.
    older: HashMap<Ino, u64>,
    /// The newest change of which not even that is known.
    overflow: Option<u64>,
    /// Changes up to this one are of a series that has ended.
    ended: u64,
    /// Inodes that the kernel has forgotten, each with the newest change of that time.
    claims: VecDeque<(u64, Claim)>,
    numbers: VecDeque<Numbers>,
    /// Changes from this one on leave marks at the server: the first that was promised in the
    /// series.
    marked_from: Option<u64>,
}

/// What becomes of a change that a server has not answered before it crashed.
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
fn matters(op: &Op) -> bool {
    op.info().effect != Effect::Nothing
}

impl Kept {
    /// A change is promised.
    pub(super) fn promised(&mut self, seq: u64, pending: &Pending) {
        self.marked_from.get_or_insert(seq);
        if matters(&pending.op) {
            for ino in &pending.touched {
                self.touching.insert(*ino, seq);
            }
        }
    }

    /// The server has made a promised change.
    pub(super) fn keep(&mut self, seq: u64, pending: Pending, promised: Promised, now: Duration) {
        if matters(&pending.op) && seq > self.durable {
            let change = KeptChange::new(seq, pending, Some(promised), now);
            self.bytes += change.bytes();
            self.changes.push_back(change);
        }
    }

    /// The server has made a change that somebody waits for: the answer, and how it was made;
    /// `None`: not all of that is known, and it is not made again.
    pub(super) fn keep_waited(
        &mut self,
        seq: u64,
        pending: Pending,
        (outcome, made): (&Outcome, Option<Made>),
        now: Duration,
    ) {
        if !matters(&pending.op) || seq <= self.durable {
            return;
        }
        if let (Op::Copy { .. }, Some(ino)) = (&pending.op, pending.touched.first()) {
            // The server has synced it.
            return self.synced(*ino, seq);
        }
        let mut change = KeptChange { waited: true, ..KeptChange::new(seq, pending, None, now) };
        let known = if let Outcome::Entry { known } = outcome { known.as_ref() } else { None };
        if let Some(known) = known {
            change.named = Some(Claim { ino: known.attr.ino, ticket: known.ticket });
            if !change.touched.contains(&known.attr.ino) {
                change.touched.push(known.attr.ino);
            }
        }
        // With a file without a name nothing else is lost.
        if let Some(made) = made.filter(|_| !matches!(change.op, Op::Tmpfile { .. })) {
            let unknown = made.touched.0.iter().filter(|ino| !change.touched.contains(ino));
            let unknown: Vec<Ino> = unknown.copied().collect();
            change.touched.extend(unknown);
            if !self.is_full(0, change.bytes()) {
                change.promised = decided::as_made(&mut change, outcome, &made);
            }
        }
        if let (Op::Write { data, .. }, None) = (&mut change.op, change.promised) {
            *data = Vec::new();
        }
        for ino in &change.touched {
            self.touching.insert(*ino, seq);
        }
        // Where that gives a file its only name, the server has synced it.
        let published = known.map(|known| known.attr).filter(|attr| attr.nlink == 1);
        let published = published.filter(|_| matches!(change.op, Op::Link { .. }));
        self.bytes += change.bytes();
        self.changes.push_back(change);
        self.waited += 1;
        if self.waited > WAITED_MAX {
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
        let waited = all.iter().filter(|change| change.waited).count();
        let mut surplus = waited.saturating_sub(WAITED_MAX / 2);
        self.waited = waited - surplus;
        for change in all {
            if !change.waited || surplus == 0 {
                self.changes.push_back(change);
                continue;
            }
            surplus -= 1;
            for ino in change.touched {
                if self.older.len() < OLDER_MAX || self.older.contains_key(&ino) {
                    self.older.insert(ino, change.seq);
                } else {
                    self.overflow = Some(change.seq);
                }
            }
        }
        self.bytes = self.changes.iter().map(KeptChange::bytes).sum();
    }

    /// Whether the fsync of something that it touches has made it durable.
    fn is_covered(&self, change: &KeptChange) -> bool {
        let by = |ino: &Ino| self.synced.get(ino).is_some_and(|seq| *seq >= change.seq);
        match &change.op {
            // It may have cut off a file that was there.
            Op::Create { .. } if change.waited => change.named.is_some_and(|named| by(&named.ino)),
            _ => change.touched.iter().any(by),
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
        for change in self.changes.drain(..done) {
            self.bytes -= change.bytes();
            self.waited -= usize::from(change.waited);
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

    /// With `more` that are not answered, no more may be promised.
    pub(super) fn is_full(&self, more: usize, more_bytes: usize) -> bool {
        self.changes.len() + more >= KEPT_MAX || self.bytes + more_bytes >= KEPT_BYTES_MAX
    }

    /// A series has ended: the leases on all inodes may have gone to others. What comes now has the
    /// numbers behind `newest`.
    pub(super) fn end_series(&mut self, newest: u64) {
        self.ended = newest;
        self.marked_from = None;
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

    /// The session is gone, the server is not: what it has made is there, and made again by nobody.
    pub(super) fn give_up(&mut self) {
        let Redo { changes, older, overflow, .. } = self.take(None, 0, Vec::new());
        let inos = changes.into_iter().flat_map(|change| change.touched).chain(older);
        // Whatever becomes durable of the new session is newer.
        let older = inos.map(|ino| (ino, 0)).collect();
        *self = Self { older, overflow: overflow.then_some(0), ..Self::default() };
    }

    /// The server has crashed: gives what may be lost, with the promised changes that it has not
    /// answered. All of that is kept anew as it is made again.
    pub(super) fn take(
        &mut self,
        mark: Option<u64>,
        durable: u64,
        unanswered: Vec<KeptChange>,
    ) -> Redo {
        self.advance(durable);
        let all = std::mem::take(&mut self.changes);
        let mut changes: Vec<KeptChange> =
            all.into_iter().filter(|change| !self.is_covered(change)).collect();
        changes
            .extend(unanswered.into_iter().map(|change| KeptChange { unanswered: true, ..change }));
        for change in &mut changes {
            change.lost = change.seq <= self.ended || change.promised.is_none();
        }
        changes.retain(|change| matters(&change.op));
        let older = std::mem::take(&mut self.older).into_keys().collect();
        let overflow = self.overflow.take().is_some();
        (self.bytes, self.waited, self.ended) = (0, 0, 0);
        for of_inodes in [&mut self.touching, &mut self.synced] {
            of_inodes.clear();
        }
        // Numbers go on behind the newest. What was not marked may have been durable beyond it.
        self.durable = mark.unwrap_or(0);
        let named =
            changes.iter().filter(|change| change.number() > 0).filter_map(|change| change.named);
        let claims = self.claims.drain(..).map(|(_, claim)| claim).chain(named).collect();
        let numbers = self.numbers.iter().copied().collect();
        Redo { changes, mark, durable, older, overflow, claims, numbers, made: Vec::new() }
    }

    /// What becomes of a change that was sent to a server which crashed and has not answered: the
    /// next one has found this mark, and this word of what is durable.
    pub(super) fn unanswered(&self, seq: u64, op: &Op, (mark, durable): (u64, u64)) -> Unanswered {
        let info = op.info();
        match (info.effect, info.replay) {
            (Effect::Nothing, _) => return Unanswered::Again,
            (_, Replay::Never) => return Unanswered::Unknown,
            _ => {}
        }
        let leaves_mark = info.effect == Effect::Metadata;
        let marked = self.marked_from.is_some_and(|from| seq >= from);
        if marked && seq > durable && (seq > mark || !leaves_mark) {
            Unanswered::Again
        } else if marked && seq == mark && info.replay == Replay::AgainOrDone {
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

/// Whether the server has made a promised change.
pub(super) fn is_made(outcome: &Outcome) -> bool {
    !matches!(outcome, Outcome::Failed { .. } | Outcome::Dropped {} | Outcome::Busy {})
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::client::waiting::Nobody;

    fn change(kept: &mut Kept, seq: u64, touched: &[Ino]) {
        let op = Op::Unlink { parent: touched[0], name: b"n".to_vec() };
        let pending = Pending {
            touched: touched.to_vec(),
            ..Pending::new(Who::default(), op, Arc::new(Nobody))
        };
        kept.keep_waited(seq, pending, (&Outcome::Done {}, None), Duration::ZERO);
    }

    fn lost(kept: &mut Kept) -> (Vec<u64>, Vec<Ino>) {
        let redo = kept.take(None, 0, Vec::new());
        let mut older = redo.older;
        older.sort_unstable();
        (redo.changes.iter().map(|change| change.seq).collect(), older)
    }

    #[test]
    fn a_sync_covers_what_touches_the_inode_up_to_there() {
        let mut kept = Kept::default();
        change(&mut kept, 1, &[5, 6]);
        change(&mut kept, 2, &[5]);
        change(&mut kept, 3, &[6, 7]);
        kept.synced(6, 2);
        assert_eq!(lost(&mut kept), (vec![2, 3], vec![]));
        change(&mut kept, 4, &[5]);
        change(&mut kept, 5, &[5]);
        kept.advance(4);
        assert_eq!(lost(&mut kept), (vec![5], vec![]));
    }

    #[test]
    fn what_is_to_be_claimed_again_goes_with_the_changes_of_its_epoch() {
        let mut kept = Kept::default();
        let remember = |kept: &mut Kept, ino, newest| {
            kept.touching.insert(ino, newest);
            kept.remember(Claim { ino, ticket: 0 }, newest);
        };
        remember(&mut kept, 5, 900);
        kept.end_series(10);
        remember(&mut kept, 6, 12);
        kept.advance(11);
        assert_eq!(kept.claims, [(12, Claim { ino: 6, ticket: 0 })]);
    }

    #[test]
    fn what_is_numbered_anew_behind_a_mark_is_kept_though_more_was_durable() {
        let mut kept = Kept::default();
        kept.advance(10);
        assert_eq!(kept.take(Some(8), 0, Vec::new()).changes.len(), 0);
        change(&mut kept, 9, &[5]);
        assert_eq!(lost(&mut kept).0, [9]);
    }

    #[test]
    fn of_more_changes_than_fit_the_inodes_are_remembered_until_they_are_durable() {
        let mut kept = Kept::default();
        let many = WAITED_MAX as u64;
        (1..=many + 1).for_each(|seq| change(&mut kept, seq, &[10 + seq]));
        kept.synced(11, many + 1);
        kept.advance(2);
        let (changes, older) = lost(&mut kept);
        assert_eq!(changes.len() + older.len(), WAITED_MAX - 1);
        assert_eq!((older.first(), changes.last()), (Some(&13), Some(&(many + 1))));
    }

    #[test]
    fn a_session_that_ends_at_a_server_that_lives_leaves_its_inodes() {
        let mut kept = Kept::default();
        change(&mut kept, 7, &[5]);
        kept.give_up();
        kept.advance(0);
        change(&mut kept, 1, &[6]);
        assert_eq!(lost(&mut kept), (vec![1], vec![5]));
        change(&mut kept, 7, &[5]);
        kept.give_up();
        kept.advance(1);
        assert_eq!(lost(&mut kept), (vec![], vec![]));
    }

    #[test]
    fn what_is_not_answered_is_sent_again_where_it_was_not_made_or_comes_to_the_same() {
        let mut kept = Kept::default();
        let unlink = Op::Unlink { parent: 1, name: b"n".to_vec() };
        let mkdir = Op::Mkdir { parent: 1, name: b"n".to_vec(), mode: 0o755 };
        let write =
            |append| Op::Write { fh: 1, offset: 0, data: vec![1], append, kill_suidgid: false };
        let found = (7, 6);
        assert_eq!(
            kept.unanswered(9, &unlink, found),
            Unanswered::Unknown,
            "it may have left no mark"
        );
        let promised =
            Pending { touched: vec![1], ..Pending::new(Who::default(), mkdir, Arc::new(Nobody)) };
        kept.promised(5, &promised);
        assert_eq!(kept.unanswered(4, &unlink, (3, 0)), Unanswered::Unknown, "so may this");
        assert_eq!(kept.unanswered(8, &unlink, found), Unanswered::Again);
        assert_eq!(kept.unanswered(7, &unlink, found), Unanswered::Made);
        assert_eq!(kept.unanswered(6, &unlink, found), Unanswered::Unknown, "it may have failed");
        assert_eq!(
            kept.unanswered(7, &promised.op, found),
            Unanswered::Unknown,
            "its answer says more"
        );
        assert_eq!(kept.unanswered(7, &write(false), found), Unanswered::Again);
        assert_eq!(
            kept.unanswered(6, &write(false), found),
            Unanswered::Unknown,
            "others may have written since"
        );
        assert_eq!(kept.unanswered(8, &write(true), found), Unanswered::Unknown);
        kept.end_series(8);
        assert_eq!(kept.unanswered(9, &unlink, found), Unanswered::Unknown);
    }
}
