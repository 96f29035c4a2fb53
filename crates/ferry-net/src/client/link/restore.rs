//! What a link asks of the file system that it belongs to, and what it tells it.

use std::sync::Arc;

use ferry_fs::{Errno, Ino};

use crate::client::change::{Change, HeldAnswer, Key, Pending, Stage, Waiter};
use crate::client::replay_log::Replayable;
use crate::message::{Claim, Op, Outcome};

/// What a new session needs to know of the old one.
pub(in crate::client) trait Restore: Send + Sync {
    /// The operations that give the new session what the old one had.
    fn restore(&self, before: Before) -> Restored;
    /// The server has ended because of a change that restores the session: it is not sent again.
    fn fatal(&self, op: &Op);
    /// The session knows these inodes, if they exist: named by an answer with this stamp.
    fn claimed(&self, inos: &[Claim], stamp: u64);
    /// Whether locks are held of this file, or of any. Called with the link's lock held.
    fn has_locks(&self, _of: Option<Ino>) -> bool {
        false
    }
    /// This early-acknowledged change is about to be lost, or an epoch with it. Called with the
    /// link's lock held.
    fn is_losing(&self, _change: &Pending) {}
    /// These early-acknowledged changes are lost: nothing is changed on top of them before programs
    /// are told. Called with the link's lock held.
    fn damaged(&self, _changes: &[&Pending]) {}
    /// Whether a change would be applied on top of what is lost. Called with the link's lock held.
    fn refuses(&self, _op: &Op, _files: &[(u64, Ino)]) -> bool {
        false
    }
    /// Early-acknowledged changes are lost, and [`Restore::damaged`] was called.
    fn lost(&self, changes: Vec<Pending>);
    /// The new session has begun. No lock is held.
    fn entered(&self) {}
    /// The cache holds nothing of these inodes any more (`None`: of any inode).
    fn given_up(&self, inos: Option<&[Ino]>);
    /// A change was not applied: another session has write leases on what it touches.
    fn busy(&self, change: Pending);
    /// A change was not applied: there is no space.
    fn lacks_space(&self, change: Pending) {
        change.waiter.answer(Outcome::Failed { errno: libc::ENOSPC }, 0);
    }
    /// Another client finds no space: what this client's removed files occupy is to be free soon.
    fn hurry(&self) {}
    /// Attributes are not what the client had decided.
    fn differs(&self, ino: Ino);
    /// Some time has passed.
    fn tick(&self);
}

/// What a new session is told.
#[derive(Default)]
pub(in crate::client) struct Restored {
    /// Before anything else, in this order.
    pub(in crate::client) first: Vec<Pending>,
    /// The other inodes that the kernel knows: they are claimed when an operation names them, or
    /// when there is time.
    pub(in crate::client) rest: Vec<Claim>,
}

/// What became of the server before.
pub(in crate::client) enum Before {
    /// All that it had answered is durable.
    Clean,
    /// It goes on, and has ended the session.
    Ended,
    /// It has crashed, and this may be lost.
    Crashed(Replayable),
}

/// Changes that left the stream, each in its last stage, and answers that wait no longer. Their
/// waiters are told when no lock is held.
#[derive(Default)]
pub(super) struct Ended {
    changes: Vec<Change>,
    /// Operations that have another number now.
    pub(super) moved: Vec<(Arc<dyn Waiter>, Key)>,
    /// Answers for which there is room now.
    pub(super) held: Vec<HeldAnswer>,
}

impl Ended {
    /// A change leaves the stream.
    pub(super) fn add(&mut self, mut change: Change, stage: Stage) {
        change.advance(stage);
        self.changes.push(change);
    }

    /// A change is not applied, or nobody knows.
    pub(super) fn fail(&mut self, change: Change, errno: Errno) {
        let acknowledged = change.pending.role.is_acknowledged();
        self.add(change, if acknowledged { Stage::Lost } else { Stage::Failed(errno) });
    }

    pub(super) fn lost(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| change.stage() == Stage::Lost)
    }

    /// Tells the waiters. No lock may be held. `restore` is absent as long as no server was
    /// reached: nothing can be lost then.
    pub(super) fn tell(self, restore: Option<&dyn Restore>) {
        self.moved.into_iter().for_each(|(waiter, key)| waiter.moved(key));
        let mut lost = Vec::new();
        for change in self.changes {
            match change.stage() {
                Stage::Failed(errno) => change.pending.waiter.fail(errno),
                Stage::Applied => change.pending.waiter.answer(Outcome::Done {}, 0),
                Stage::Lost => lost.push(change.pending),
                _ => {}
            }
        }
        if let Some(restore) = restore.filter(|_| !lost.is_empty()) {
            restore.lost(lost);
        }
        self.held.into_iter().for_each(|(waiter, outcome)| waiter.answer(outcome, 0));
    }
}

/// Whether locks of before are lost if this change is not made. Called with the link's lock held.
pub(super) fn restores_locks(change: &Pending, restore: &dyn Restore) -> bool {
    match change.op {
        Op::Reclaim { .. } => true,
        // If the file is not open, nobody asks for its locks.
        Op::Open { ino, .. } => change.role.restores() && restore.has_locks(Some(ino)),
        _ => false,
    }
}
