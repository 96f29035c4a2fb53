//! The ordered stream of a session: one change after the other, each when no other session is in
//! its way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use ferry_fs::{EarlyAck, Errno, Ino, SessionSeq};

use super::apply::Applying;
use super::core::{Core, Stage};
use super::leases::{Begin, ChangeGuard, Progress, QueuePosition, Recalls};
use super::panics::answered;
use super::session::{Applied, Change, Session, wall};
use crate::message::{Acknowledged, Info, Op, Outcome};

/// After a crash, so many changes of a session are applied before another session gets the thread.
const SHARE: u32 = 16;
/// The time between two syncs for which a replay waits.
const REPLAY_SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Stands for the shape of the tree. No inode has this number.
const TREE: Ino = 0;

/// What the file system has to know of an early-acknowledged change.
fn ack(session: &Session, seq: u64, early: &Acknowledged) -> EarlyAck {
    EarlyAck {
        at: early.at,
        ino: (early.ino != 0).then_some(early.ino),
        seq: Some(SessionSeq { session: session.id, seq }),
        reservation: session.reservations.reservation_id(),
    }
}

/// What the server answers if applying a change panics.
#[derive(Clone, Copy)]
struct PanicAnswer {
    seq: u64,
    epoch: u32,
    is_early: bool,
}

impl PanicAnswer {
    fn of(change: &Change) -> Self {
        Self { seq: change.seq, epoch: change.epoch, is_early: change.early.is_some() }
    }
}

/// What a change touches that others may have changed. For renames from one directory to another
/// this includes the shape of the tree: whether they are allowed depends on what others have moved
/// before.
fn builds_on(change: &Change, guard: &ChangeGuard) -> Vec<Ino> {
    let moves = matches!(&change.op, Op::Rename { parent, new_parent, .. } if parent != new_parent);
    let tree = (moves && change.early.is_none()).then_some(TREE);
    guard.inos().iter().copied().chain(tree).collect()
}

/// The inode that a change has made, as the volume numbers it.
fn made_inode(session: &Session, outcome: &Outcome) -> Option<Ino> {
    match outcome {
        Outcome::Entry { known: Some(known) } => session.volume_ino(known.attr.ino),
        _ => None,
    }
}

/// What a change waits for.
enum Waits {
    /// Leases of other sessions.
    Leases(Change, QueuePosition),
    /// Its turn has come, and what others have changed of the same must be durable first.
    Sync(Change, ChangeGuard),
}

impl Core {
    /// Applies a session's changes until there are none, or one has to wait. Then the stream goes
    /// on when that one has been applied.
    pub(super) fn apply_all(self: &Arc<Self>, session: &Arc<Session>) {
        let mut share = SHARE;
        while let Some(change) = session.next() {
            self.read_ahead(|| session.needed_soon(&self.key));
            let brings_inodes = matches!(change.op, Op::Claim { .. } | Op::Numbered { .. });
            if self.panics.is_ending() || !self.apply_next(session, change) {
                return;
            }
            if brings_inodes {
                self.read_ahead(|| session.needed_with_new_inodes(&self.key));
            }
            share -= 1;
            // A session with few changes must not wait for one with many.
            if share == 0 && self.barrier.is_closed() {
                let (core, session) = (Arc::clone(self), Arc::clone(session));
                return drop(self.runtime.spawn_blocking(move || core.apply_all(&session)));
            }
            share = share.max(1);
        }
        if session.is_over() {
            self.free_locks(session);
            session.clear(&*self.fs);
        }
    }

    /// Applies a change; `false`: it has to wait, and the changes behind it go on when it has been
    /// applied.
    fn apply_next(self: &Arc<Self>, session: &Arc<Session>, change: Change) -> bool {
        let mut change = change;
        if self.barrier.is_closed() {
            match self.guarded(session, PanicAnswer::of(&change), || self.replay(session, change)) {
                None => return true,
                Some(not_replayed) => change = not_replayed,
            }
            if !self.touched(session, &change).is_empty() {
                session.send_answers();
                self.apply_behind_barrier(session, change);
                return false;
            }
        }
        let answer = PanicAnswer::of(&change);
        let Some(waits) = self.guarded(session, answer, || self.try_apply(session, change)) else {
            return true;
        };
        session.send_answers();
        match waits {
            Waits::Leases(change, position) => {
                let (core, session) = (Arc::clone(self), Arc::clone(session));
                self.runtime
                    .spawn(async move { core.apply_later(session, change, position).await });
            }
            Waits::Sync(change, guard) => self.apply_when_durable(session, change, guard),
        }
        false
    }

    /// Waits for a sync without a thread. Meanwhile the guard keeps other sessions from these
    /// inodes. A replay waits for a sync that succeeds: without its end the client would lose what
    /// it has replayed, and without the rest its open files.
    fn apply_when_durable(
        self: &Arc<Self>,
        session: &Arc<Session>,
        change: Change,
        guard: ChangeGuard,
    ) {
        let (core, session) = (Arc::clone(self), Arc::clone(session));
        let run = move |result: Result<(), Errno>| {
            // At a server that stops the client hears of it, and replays at the next one.
            let goes_on = *core.stopping.borrow() < Stage::Draining && !session.is_over();
            if result.is_err() && goes_on && session.waits_for_another_sync() {
                let runtime = core.runtime.clone();
                return drop(runtime.spawn(async move {
                    crate::rt::time::sleep(REPLAY_SYNC_INTERVAL).await;
                    core.apply_when_durable(&session, change, guard);
                }));
            }
            let answer = PanicAnswer::of(&change);
            core.guarded(&session, answer, || {
                match result {
                    Ok(()) => core.apply(&session, change, guard),
                    Err(errno) => {
                        // Neither this server nor the next one waits for the client any longer.
                        if goes_on && matches!(change.op, Op::Replayed {}) {
                            session.replayed();
                            core.fence(&session);
                        }
                        core.give_up(&session, change, errno);
                    }
                }
                None::<()>
            });
            core.apply_all(&session);
        };
        let runtime = self.runtime.clone();
        self.make_durable(Box::new(move |result| {
            drop(runtime.spawn_blocking(move || run(result)))
        }));
    }

    /// Waits for the replay of other clients, without a thread.
    fn apply_behind_barrier(self: &Arc<Self>, session: &Arc<Session>, change: Change) {
        session.wait_at_barrier();
        let (core, session) = (Arc::clone(self), Arc::clone(session));
        let run = move || {
            session.pass_barrier();
            if core.apply_next(&session, change) {
                core.apply_all(&session);
            }
        };
        let runtime = self.runtime.clone();
        self.barrier.wait(Box::new(move || drop(runtime.spawn_blocking(run))));
    }

    /// Replays a change that the crashed server may have applied. It needs no lease, because no
    /// session has any yet. Returns the change if it is no replayed one.
    fn replay(self: &Arc<Self>, session: &Session, change: Change) -> Option<Change> {
        // These three prepare or end the replay. They are no part of it, whatever the client says,
        // and `Replayed` would wait for itself.
        let is_of_session =
            matches!(change.op, Op::Replayed {} | Op::Claim { .. } | Op::Numbered { .. });
        if change.early.is_none() || is_of_session || session.is_over() {
            return Some(change);
        }
        let Some(right) = session.replay_right() else { return Some(change) };
        let Change { seq, early, caller, op, room, .. } = change;
        let ack = early.map(|early| ack(session, seq, &early));
        let bytes = op.info().data_bytes;
        let applied = self.applying(session, caller, ack).replay(op);
        // Behind a failed change, later ones do not count as durable soon: their client must hear
        // of the failure first.
        if matches!(applied.outcome, Outcome::Failed { .. }) {
            session.replay_failed();
        } else if !session.has_failed_replay() {
            self.note_unstable((session, true), seq, bytes);
        }
        drop(right);
        self.unstable.enter_unknown();
        session.applied(seq, applied, room, true);
        self.leases.refused(session.number, seq);
        None
    }

    /// A change was applied that its client has in its replay log. `soon`: the server makes it
    /// durable without being asked.
    fn note_unstable(&self, (session, soon): (&Session, bool), seq: u64, bytes: usize) {
        let much = session.note_unstable(seq, bytes, self.env.clock.monotonic());
        if soon {
            self.sync_queue.unstable(much);
        }
    }

    /// Applies a change, refuses it, or returns it with what it waits for.
    fn try_apply(self: &Arc<Self>, session: &Session, change: Change) -> Option<Waits> {
        // A claim builds on no other change. The client has sent requests behind it that name these
        // inodes, and does not know that its epoch has ended.
        let epoch = (!matches!(change.op, Op::Claim { .. })).then_some(change.epoch);
        loop {
            let inos = self.touched(session, &change);
            let kind = (epoch, change.early.is_some());
            let recall = |recalls: &Recalls| self.recall(recalls);
            match self.leases.begin_change(session.number, kind, inos, recall) {
                Begin::Now(guard) if self.is_still(session, &change, &guard) => {
                    return self.apply_or_wait(session, change, guard);
                }
                Begin::Now(_another_meaning) => {}
                Begin::Later(position) => return Some(Waits::Leases(change, position)),
                Begin::Not(why) => {
                    self.refuse(session, change, &why);
                    return None;
                }
            }
        }
    }

    /// Waits for leases of others, without a thread.
    async fn apply_later(
        self: Arc<Self>,
        session: Arc<Session>,
        change: Change,
        position: QueuePosition,
    ) {
        let (mut change, mut position) = (change, position);
        loop {
            let progress = position.wait(|recalls| self.recall(recalls)).await;
            let (core, session) = (Arc::clone(&self), Arc::clone(&session));
            let applied = crate::rt::task::spawn_blocking(move || {
                let answer = PanicAnswer::of(&change);
                let act = || core.apply_in_turn(&session, change, position, &progress);
                let again = core.guarded(&session, answer, act);
                if again.is_none() {
                    core.apply_all(&session);
                }
                (session, again)
            });
            match applied.await {
                Ok((_, Some(Waits::Leases(again, in_line)))) => {
                    (change, position) = (again, in_line)
                }
                Ok((session, Some(Waits::Sync(change, guard)))) => {
                    return self.apply_when_durable(&session, change, guard);
                }
                _ => return,
            }
        }
    }

    /// The wait is over. It begins again if a name has come to mean another inode.
    fn apply_in_turn(
        self: &Arc<Self>,
        session: &Session,
        change: Change,
        position: QueuePosition,
        progress: &Progress,
    ) -> Option<Waits> {
        if !matches!(progress, Progress::Begun(_)) {
            drop(position);
            self.refuse(session, change, progress);
            return None;
        }
        let guard = position.into_guard();
        if self.is_still(session, &change, &guard) {
            return self.apply_or_wait(session, change, guard);
        }
        drop(guard);
        self.try_apply(session, change)
    }

    /// No other session is in the way. An early-acknowledged change was decided under write leases
    /// that the client knew of, so nothing of others can be unstable (UNSTABLE-1). A replay ends
    /// when it is durable.
    fn apply_or_wait(
        self: &Arc<Self>,
        session: &Session,
        change: Change,
        guard: ChangeGuard,
    ) -> Option<Waits> {
        let builds_on_others = || {
            change.early.is_none()
                && self.unstable.is_others(session.number, &builds_on(&change, &guard))
        };
        if matches!(change.op, Op::Replayed {}) || builds_on_others() {
            return Some(Waits::Sync(change, guard));
        }
        self.apply(session, change, guard);
        None
    }

    /// Acts on a change. If that panics, the client gets an error, and the changes behind it go on.
    /// Otherwise the client would wait for ever, and so would those that wait for leases that it
    /// returned behind them.
    fn guarded<T>(
        self: &Arc<Self>,
        session: &Session,
        answer: PanicAnswer,
        act: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        if let Ok(done) = catch_unwind(AssertUnwindSafe(|| answered(act))) {
            return done;
        }
        tracing::error!(
            client = session.name,
            seq = answer.seq,
            "a change has panicked: it may be made or not"
        );
        if self.panics.end_server(&self.runtime, |room| session.send_fatal(answer.seq, room)) {
            return None;
        }
        let outcome = Outcome::Failed { errno: libc::EIO };
        if answer.is_early {
            self.early_failed(session, answer.epoch, &outcome);
        }
        session.answer_panicked(answer.seq, outcome);
        self.leases.refused(session.number, answer.seq);
        None
    }

    /// A name may have come to mean another inode before the guard was taken, unless the session
    /// has the directory's write lease.
    fn is_still(self: &Arc<Self>, session: &Session, change: &Change, guard: &ChangeGuard) -> bool {
        guard.is_own() || guard.inos() == self.touched(session, change)
    }

    fn apply(self: &Arc<Self>, session: &Session, change: Change, guard: ChangeGuard) {
        // The change may have waited, and its client may be evicted.
        if session.is_over() {
            return;
        }
        let inos = builds_on(&change, &guard);
        // What was acknowledged early, the client has decided under a lease of this session.
        let is_stale = change.early.is_none() && session.relies_on_lost_lock(&change);
        let Change { seq, epoch, early, caller, op, room, .. } = change;
        let mut changing = self.unstable.begin(session.number, inos);
        let Info { cost, data_bytes: bytes, .. } = op.info();
        let ack = early.map(|early| ack(session, seq, &early));
        let keeps = ack.is_some() || !guard.inos().is_empty();
        // A change that was not acknowledged early is applied without a record, too: at worst it is
        // reported as lost after a crash.
        let registered = if keeps { session.register(&*self.fs, true) } else { Ok(()) };
        let registered =
            registered.or_else(|errno| if ack.is_some() { Err(errno) } else { Ok(()) });
        let soon = keeps && session.is_registered();
        let decided = ack.is_none().then(|| EarlyAck {
            at: wall(&*self.env.clock),
            ino: None,
            seq: Some(SessionSeq { session: session.id, seq }),
            reservation: None,
        });
        let decided = decided.filter(|_| soon);
        let applied = match registered {
            Ok(()) if is_stale => Applied::failed(Errno(libc::EIO)),
            Ok(()) => {
                Applying { decided, ..self.applying(session, caller, ack) }.change(op, guard.inos())
            }
            Err(errno) => Applied::failed(errno),
        };
        // The session was fenced or has ended in between, and the change has brought its record
        // back.
        if soon && !session.is_registered() {
            self.fs.revoke_sessions(&[session.id]);
        }
        changing.made = made_inode(session, &applied.outcome);
        if ack.is_some() {
            session.reservations.spend(cost);
        }
        let failed = matches!(applied.outcome, Outcome::Failed { .. });
        if ack.is_some() && failed {
            self.early_failed(session, epoch, &applied.outcome);
        }
        // The client tries again as long as other clients have space that they do not need.
        if applied.outcome == (Outcome::Failed { errno: libc::ENOSPC }) {
            self.others(session).for_each(|other| other.ask_for_space());
        }
        // Before a lease that the client has returned behind it is free.
        if keeps && !failed {
            self.note_unstable((session, soon), seq, bytes);
        }
        session.applied(seq, applied, room, ack.is_some());
        drop(changing);
        guard.done(seq);
    }

    /// Answers a change that is not applied.
    fn refuse(&self, session: &Session, change: Change, why: &Progress) {
        // The client may send a dropped change again, and it costs something then.
        if change.early.is_some() && *why != Progress::Dropped {
            session.reservations.spend(change.op.info().cost);
        }
        let outcome = match why {
            Progress::Busy => Outcome::Busy {},
            Progress::Dropped => Outcome::Dropped {},
            _ => Outcome::Failed { errno: libc::ESTALE },
        };
        if *why == Progress::Broken {
            self.early_failed(session, change.epoch, &outcome);
        }
        if !session.is_over() {
            session.applied(
                change.seq,
                Applied::alone(outcome),
                change.room,
                change.early.is_some(),
            );
        }
        self.leases.refused(session.number, change.seq);
    }

    /// Answers a change that is not applied, because what was changed before cannot be made
    /// durable.
    fn give_up(&self, session: &Session, change: Change, errno: Errno) {
        session.applied(change.seq, Applied::failed(errno), change.room, change.early.is_some());
        self.leases.refused(session.number, change.seq);
    }

    /// A change that the client has acknowledged early cannot be applied: the server drops what is
    /// behind it in this epoch. The client sends again what does not depend on it.
    fn early_failed(&self, session: &Session, epoch: u32, outcome: &Outcome) {
        tracing::error!(
            client = session.name,
            ?outcome,
            "a change that it has acknowledged to programs cannot be applied"
        );
        self.leases.end_epoch(session.number, epoch);
    }

    fn touched(self: &Arc<Self>, session: &Session, change: &Change) -> Vec<Ino> {
        // The client knew that the name is free; if it is not, the change fails.
        if let (Some(_), Op::Create { parent, .. }) = (&change.early, &change.op) {
            return session.volume_ino(*parent).into_iter().collect();
        }
        self.applying(session, change.caller, None).touched(&change.op)
    }
}
