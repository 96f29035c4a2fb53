//! A change of this client, and the stages that it goes through.
//!
//! ```text
//!  Decided ──► Queued ──► Sent ──► Applied ──► Durable
//!                ▲ │        │ ▲       │
//!                │ │        │ │       └──► Lost        the server has crashed
//!                │ │        ▼ │
//!                │ │    Unconfirmed                    the connection is closed
//!                │ │        │
//!                │ │        ├──► Fatal                 the server has crashed because of it
//!                │ ▼        ▼      │
//!                ├── any of them ◄─┘
//!                │      │
//!   another number      └──► Failed, Lost, Withdrawn   without an answer that it is applied
//! ```
//!
//! * CHANGE-1: a stage changes in [`Change::advance`] only, which refuses what the picture does not
//!   show.
//! * CHANGE-2: a change in `Queued`, `Sent`, `Unconfirmed` or `Fatal` has no answer. Such changes
//!   are in the ordered stream ([`super::link`]), under their sequence numbers.
//! * CHANGE-3: a change in `Applied` is in the replay log ([`super::replay_log`]) until it is
//!   durable. Its sequence number is below those of all changes without an answer.
//! * CHANGE-4: the code that takes a change out of the stream or the log decides its last stage.
//!   The stage and the [`Role`] say what its program is told.
//! * CHANGE-5: a change returns to `Queued` only under another sequence number: in the next epoch,
//!   or in the next session.

use std::sync::Arc;
use std::time::Duration;

use ferry_fs::{Errno, Ino};

use super::cache::PendingEffect;
use crate::message::{Acknowledged, Caller, Claim, Op, Outcome};

/// Receives the end of an operation.
pub(super) trait Waiter: Send + Sync {
    /// The answer, and which of it may be cached; also when [`Waiter::fail`] was called before.
    fn answer(&self, outcome: Outcome, leased: u8);
    /// There will hardly be an answer.
    fn fail(&self, errno: Errno);
    /// The same, and it was never sent.
    fn refuse(&self, errno: Errno) {
        self.fail(errno);
    }
    /// The operation has this number from now on.
    fn moved(&self, _key: Key) {}
    /// The program has stopped waiting.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// The waiter of operations whose answer nothing depends on.
pub(super) struct Nobody;

impl Waiter for Nobody {
    fn answer(&self, _outcome: Outcome, _leased: u8) {}
    fn fail(&self, _errno: Errno) {}
}

/// An answer that is given when there is room in the window.
pub(super) type HeldAnswer = (Arc<dyn Waiter>, Outcome);

/// The number of an operation in its stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    Change(u64),
    Request(u64),
}

/// Why a change is in the stream, and what its program knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// A program waits for the answer, or nothing depends on it.
    Awaited,
    /// The program has stopped waiting. `Nothing` is sent in its place.
    Abandoned,
    /// The program was answered before the server has applied it.
    Acknowledged,
    /// It gives a new session what the one before had.
    Restores,
    /// The server before may have lost it, and it is applied again. `tolerant`: if the inodes that
    /// it touches do not exist any more, nothing is lost.
    Replayed { tolerant: bool },
}

impl Role {
    /// Programs were told that it is done.
    pub(super) fn is_acknowledged(self) -> bool {
        matches!(self, Self::Acknowledged | Self::Replayed { .. })
    }

    /// A new session is not complete without it.
    pub(super) fn restores(self) -> bool {
        matches!(self, Self::Restores | Self::Replayed { .. })
    }

    /// The same change as a part of what restores a session.
    pub(super) fn restoring(self) -> Self {
        match self {
            Self::Awaited | Self::Abandoned | Self::Restores => Self::Restores,
            Self::Acknowledged => Self::Replayed { tolerant: false },
            Self::Replayed { tolerant } => Self::Replayed { tolerant },
        }
    }
}

/// An operation that has no answer yet.
pub(super) struct Pending {
    pub(super) caller: Caller,
    pub(super) op: Op,
    pub(super) waiter: Arc<dyn Waiter>,
    pub(super) role: Role,
    /// The open files that it names.
    pub(super) files: Vec<(u64, Ino)>,
    /// What a change does to the cache until it is answered.
    pub(super) effect: Option<PendingEffect>,
    /// The time and the inode number with which the change is applied, if these are known: the
    /// client or the server has decided them.
    pub(super) decided: Option<Acknowledged>,
    /// Requests about these inodes are answered behind the change.
    pub(super) touched: Vec<Ino>,
    /// Write leases that were acquired for the change alone.
    pub(super) borrowed: Vec<Ino>,
    /// How often the server has found no space for it.
    pub(super) refusals: u32,
    /// How often this client had lost locks when a program asked for it; `u64::MAX`: none did.
    pub(super) locks_lost: u64,
    /// The transport's number of the request that waits for it, or that it was acknowledged to; 0:
    /// none.
    pub(super) request: u64,
    /// What the program was told, if it was acknowledged.
    pub(super) outcome: Option<Box<Outcome>>,
}

impl Pending {
    pub(super) fn new(caller: Caller, op: Op, waiter: Arc<dyn Waiter>) -> Self {
        Self {
            caller,
            op,
            waiter,
            role: Role::Awaited,
            files: Vec::new(),
            effect: None,
            decided: None,
            touched: Vec::new(),
            borrowed: Vec::new(),
            refusals: 0,
            locks_lost: u64::MAX,
            request: 0,
            outcome: None,
        }
    }

    /// An operation whose answer nothing depends on.
    pub(super) fn unattended(op: Op) -> Self {
        Self::new(Caller::default(), op, Arc::new(Nobody))
    }

    /// A change that this client has decided, and of which programs may know.
    pub(super) fn acknowledged(
        caller: Caller,
        op: Op,
        waiter: Arc<dyn Waiter>,
        decided: Acknowledged,
    ) -> Self {
        let role = Role::Acknowledged;
        Self { role, decided: Some(decided), ..Self::new(caller, op, waiter) }
    }

    /// The inode of an open file.
    pub(super) fn file(&self, fh: u64) -> Option<Ino> {
        self.files.iter().find(|(file, _)| *file == fh).map(|(_, ino)| *ino)
    }

    /// The inode of the open file that it writes to or names first.
    pub(super) fn first_file(&self) -> Option<Ino> {
        self.files.first().map(|(_, ino)| *ino)
    }

    /// Bytes of memory that its data occupies.
    pub(super) fn bytes(&self) -> usize {
        self.op.info().data_bytes
    }
}

/// Where a change is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has no sequence number yet.
    Decided,
    /// It was never sent in this session.
    Queued,
    /// It was sent on this connection, and takes `units` of the window.
    Sent { units: usize },
    /// It was sent on an earlier connection of this session, and is sent again.
    Unconfirmed,
    /// The server has ended because of it: it is not applied again.
    Fatal,
    /// The server has answered that it is applied.
    Applied,
    /// It survives a crash.
    Durable,
    /// It is not applied, or nobody knows whether it is; its program is told so.
    Failed(Errno),
    /// Programs were told that it is done, and it is not. They hear of it as a deferred error.
    Lost,
    /// It is not applied, and nobody has to hear of it.
    Withdrawn,
}

impl Stage {
    /// It has a sequence number and no answer.
    pub(super) fn is_unanswered(self) -> bool {
        matches!(self, Self::Queued | Self::Sent { .. } | Self::Unconfirmed | Self::Fatal)
    }

    /// What follows.
    fn may_become(self, next: Self) -> bool {
        match next {
            Self::Decided => false,
            Self::Queued => self == Self::Decided || self.is_unanswered(),
            Self::Sent { .. } => matches!(self, Self::Queued | Self::Unconfirmed | Self::Fatal),
            Self::Unconfirmed => matches!(self, Self::Sent { .. }),
            Self::Fatal => matches!(self, Self::Sent { .. } | Self::Unconfirmed),
            Self::Applied => self.is_unanswered(),
            Self::Durable => self == Self::Applied,
            Self::Failed(_) | Self::Withdrawn => self == Self::Decided || self.is_unanswered(),
            Self::Lost => self == Self::Applied || self.is_unanswered(),
        }
    }
}

/// A change with its sequence number.
pub(super) struct Change {
    pub(super) seq: u64,
    pub(super) pending: Pending,
    stage: Stage,
    /// It ends with the early-acknowledged change of the same epoch that fails.
    pub(super) epoch: u32,
    /// When it came into its stage, as the monotonic clock says: `Queued` or `Applied`.
    pub(super) since: Duration,
    /// The inode that the answer has named, if a program waited for that answer.
    pub(super) named: Option<Claim>,
    /// Where it is noted for the next process (`notes`).
    pub(super) noted_at: u64,
}

impl Change {
    pub(super) fn new(pending: Pending) -> Self {
        let (seq, stage, since) = (0, Stage::Decided, Duration::ZERO);
        Self { seq, pending, stage, epoch: 0, since, named: None, noted_at: 0 }
    }

    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    /// The only place where a stage changes.
    pub(super) fn advance(&mut self, next: Stage) {
        assert!(
            self.stage.may_become(next),
            "change {} ({}) is {:?} and cannot become {next:?}",
            self.seq,
            self.pending.op.info().what,
            self.stage
        );
        self.stage = next;
    }

    /// It stands in the stream, under this number.
    pub(super) fn queue(&mut self, seq: u64, epoch: u32, now: Duration) {
        self.advance(Stage::Queued);
        (self.seq, self.epoch, self.since) = (seq, epoch, now);
    }

    /// The server has applied it. Nobody waits for it any more.
    pub(super) fn apply(&mut self, now: Duration) {
        self.advance(Stage::Applied);
        self.since = now;
        debug_assert!(self.pending.effect.is_none(), "its effect on the cache has ended");
        self.pending.waiter = Arc::new(Nobody);
        self.pending.outcome = None;
        self.pending.borrowed = Vec::new();
    }

    /// What stands under its number from now on, for the change leaves that: `Nothing`, in the same
    /// stage.
    pub(super) fn placeholder(&self) -> Self {
        let pending = Pending::unattended(Op::Nothing {});
        let Self { seq, stage, epoch, since, .. } = *self;
        Self { seq, pending, stage, epoch, since, named: None, noted_at: 0 }
    }

    /// The connection is closed: what was sent on it has to be sent again.
    pub(super) fn disconnect(&mut self) {
        if matches!(self.stage, Stage::Sent { .. }) {
            self.advance(Stage::Unconfirmed);
        }
    }

    /// It was left by a process that may have sent it.
    pub(super) fn was_left(&mut self, is_fatal: bool) {
        self.advance(Stage::Sent { units: 0 });
        self.disconnect();
        if is_fatal {
            self.advance(Stage::Fatal);
        }
    }

    /// Units of the window that it takes on this connection.
    pub(super) fn units(&self) -> usize {
        if let Stage::Sent { units } = self.stage { units } else { 0 }
    }

    /// The server may have applied it.
    pub(super) fn may_be_applied(&self) -> bool {
        self.stage.is_unanswered() && self.stage != Stage::Queued
    }

    /// Nobody waits for it.
    pub(super) fn is_patient(&self) -> bool {
        self.pending.role.is_acknowledged() || !self.pending.op.info().is_awaited
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.pending.role == Role::Abandoned
    }

    /// Its program has stopped waiting. The change is not applied if it was not applied yet, unless
    /// it gives something back or the session needs it. Whether that is so.
    pub(super) fn abandon(&mut self) -> bool {
        let is_always_made = self.pending.op.info().is_always_made;
        if self.pending.role == Role::Awaited && !is_always_made {
            self.pending.role = Role::Abandoned;
        }
        self.is_abandoned()
    }

    /// A program waited for the server's answer.
    pub(super) fn was_awaited(&self) -> bool {
        matches!(self.pending.role, Role::Awaited | Role::Abandoned)
    }

    /// The inode number of what it makes; 0: nothing.
    pub(super) fn number(&self) -> Ino {
        self.pending.decided.map_or(0, |decided| decided.ino)
    }

    /// The directories in which it changes names, and the other inodes that it touches.
    pub(super) fn split(&self) -> (Vec<Ino>, Vec<Ino>) {
        let dirs: Vec<Ino> = self.pending.op.info().directories().collect();
        let touched = self.pending.touched.iter().copied();
        let others = touched.filter(|ino| !dirs.contains(ino)).collect();
        (dirs, others)
    }

    /// Whether the other inodes must be as they were. If a change only gives an inode another name,
    /// the inode's contents do not matter; if it replaces another inode, they do.
    pub(super) fn needs(&self, others: &[Ino]) -> bool {
        self.pending.op.info().names().next().is_none() || others.len() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change() -> Change {
        Change::new(Pending::unattended(Op::Unlink { parent: 1, name: b"n".to_vec() }))
    }

    #[test]
    fn a_change_that_was_sent_may_be_applied_until_it_gets_another_number() {
        let mut change = change();
        change.queue(1, 0, Duration::ZERO);
        assert!(!change.may_be_applied());
        change.advance(Stage::Sent { units: 3 });
        assert!(change.may_be_applied() && change.units() == 3);
        change.disconnect();
        assert!(change.may_be_applied() && change.units() == 0);
        change.queue(2, 1, Duration::ZERO);
        assert!(!change.may_be_applied());
    }

    #[test]
    #[should_panic(expected = "cannot become")]
    fn an_applied_change_is_never_sent_again() {
        let mut change = change();
        change.queue(1, 0, Duration::ZERO);
        change.advance(Stage::Sent { units: 1 });
        change.advance(Stage::Applied);
        change.advance(Stage::Sent { units: 1 });
    }
}
