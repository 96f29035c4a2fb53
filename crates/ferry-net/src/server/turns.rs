//! The ordered stream of a session: one change after the other, each when its turn on what it
//! touches has come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ferry_fs::{EarlyAck, Errno, Ino, SessionSeq};

use super::apply::Applying;
use super::core::Core;
use super::leases::{Begin, Place, Progress, Recalls, Turn};
use super::panics::answered;
use super::session::{Applied, Change, Session, wall};
use crate::message::{Info, Op, Outcome, Promised};

/// So many changes of a session are made after a crash before another session has its turn on the
/// thread.
const SHARE: u32 = 16;
/// No inode has this number.
const TREE: Ino = 0;

/// What is told to the file system of a promised change.
fn promise(session: &Session, seq: u64, promised: &Promised) -> EarlyAck {
    EarlyAck {
        at: promised.at,
        ino: (promised.ino != 0).then_some(promised.ino),
        seq: Some(SessionSeq { session: session.id, seq }),
        reservation: session.provisions.aside(),
    }
}

/// What is answered of a change that panics.
#[derive(Clone, Copy)]
struct Fallen {
    seq: u64,
    series: u32,
    promised: bool,
}

impl Fallen {
    fn of(change: &Change) -> Self {
        Self { seq: change.seq, series: change.series, promised: change.promised.is_some() }
    }
}

/// What a change touches that others may have changed. Of renames from one directory to another
/// this is also what is above which: they are allowed or not by what others have moved before.
fn changes(change: &Change, turn: &Turn) -> Vec<Ino> {
    let moves = matches!(&change.op, Op::Rename { parent, new_parent, .. } if parent != new_parent);
    let tree = (moves && change.promised.is_none()).then_some(TREE);
    turn.inos().iter().copied().chain(tree).collect()
}

/// The inode that a change has made, as the volume numbers it.
fn after_made(session: &Session, outcome: &Outcome) -> Option<Ino> {
    match outcome {
        Outcome::Entry { known: Some(known) } => session.inward(known.attr.ino),
        _ => None,
    }
}

/// What a change waits for.
enum Waits {
    /// Its turn.
    Turn(Change, Place),
    /// Its turn has come, and what others have changed of the same must be durable first.
    Sync(Change, Turn),
}

impl Core {
    /// Applies a session's changes until there are none, or one has to wait for its turn: then it
    /// goes on when that has come.
    pub(super) fn apply_all(self: &Arc<Self>, session: &Arc<Session>) {
        let mut share = SHARE;
        while let Some(change) = session.next() {
            if self.panics.has_fallen() || !self.apply_next(session, change) {
                return;
            }
            share -= 1;
            // Who comes back with less is not to wait for one that comes back with much.
            if share == 0 && self.gate.is_shut() {
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

    /// Applies a change; `false`: it has to wait, and goes on with those behind it when it has been
    /// applied.
    fn apply_next(self: &Arc<Self>, session: &Arc<Session>, change: Change) -> bool {
        let mut change = change;
        if self.gate.is_shut() {
            match self.surely(session, Fallen::of(&change), || self.redo(session, change)) {
                None => return true,
                Some(not_promised) => change = not_promised,
            }
            if !self.touched(session, &change).is_empty() {
                session.send_answers();
                self.apply_behind_gate(session, change);
                return false;
            }
        }
        let fallen = Fallen::of(&change);
        let Some(waits) = self.surely(session, fallen, || self.try_apply(session, change)) else {
            return true;
        };
        session.send_answers();
        match waits {
            Waits::Turn(change, place) => {
                let (core, session) = (Arc::clone(self), Arc::clone(session));
                self.runtime.spawn(async move { core.apply_later(session, change, place).await });
            }
            Waits::Sync(change, turn) => self.apply_when_durable(session, change, turn),
        }
        false
    }

    /// Waits for a sync without a thread. Meanwhile nobody else changes what the turn is on.
    fn apply_when_durable(self: &Arc<Self>, session: &Arc<Session>, change: Change, turn: Turn) {
        let (core, session) = (Arc::clone(self), Arc::clone(session));
        let run = move |result: Result<(), Errno>| {
            let fallen = Fallen::of(&change);
            core.surely(&session, fallen, || {
                match result {
                    Ok(()) => core.apply(&session, change, turn),
                    Err(errno) => core.give_up(&session, change, errno),
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

    /// Waits for clients that make again what they had promised, without a thread.
    fn apply_behind_gate(self: &Arc<Self>, session: &Arc<Session>, change: Change) {
        session.wait_at_barrier();
        let (core, session) = (Arc::clone(self), Arc::clone(session));
        let run = move || {
            session.pass_barrier();
            if core.apply_next(&session, change) {
                core.apply_all(&session);
            }
        };
        let runtime = self.runtime.clone();
        self.gate.wait(Box::new(move || drop(runtime.spawn_blocking(run))));
    }

    /// Makes a promised change again, for the server to which it was promised has crashed. It needs
    /// no lease: nobody has any. Gives back what is no such change.
    fn redo(self: &Arc<Self>, session: &Session, change: Change) -> Option<Change> {
        // These three end or prepare the replay: they are no part of it, whatever the client says.
        let is_of_session =
            matches!(change.op, Op::Redone {} | Op::Claim { .. } | Op::Numbered { .. });
        if change.promised.is_none() || is_of_session || session.is_over() {
            return Some(change);
        }
        let Some(right) = session.replay_right() else { return Some(change) };
        let Change { seq, promised, who, op, room, .. } = change;
        let promise = promised.map(|promised| promise(session, seq, &promised));
        let bytes = op.info().data_bytes;
        let applied = self.applying(session, who, promise).redo(op);
        drop(right);
        // What comes behind one that cannot be made says nothing of that until its client has
        // heard.
        if matches!(applied.outcome, Outcome::Failed { .. }) {
            session.replay_failed();
        } else if !session.has_failed_replay() {
            self.was_kept((session, true), seq, bytes);
        }
        self.fresh.enter_unknown();
        session.applied(seq, applied, room, true);
        self.leases.refused(session.number, seq);
        None
    }

    /// A change was made that its client keeps. `soon`: it is made durable without being asked for.
    fn was_kept(&self, (session, soon): (&Session, bool), seq: u64, bytes: usize) {
        let much = session.promised(seq, bytes, self.env.clock.monotonic());
        if soon {
            self.durability.promised(much);
        }
    }

    /// Applies a change, refuses it, or gives it back with what it waits for.
    fn try_apply(self: &Arc<Self>, session: &Session, change: Change) -> Option<Waits> {
        loop {
            let inos = self.touched(session, &change);
            let kind = (change.series, change.promised.is_some());
            let recall = |recalls: &Recalls| self.recall(recalls);
            match self.leases.begin_change(session.number, kind, inos, recall) {
                Begin::Now(turn) if self.is_still(session, &change, &turn) => {
                    return self.apply_or_wait(session, change, turn);
                }
                Begin::Now(_another_meaning) => {}
                Begin::Later(place) => return Some(Waits::Turn(change, place)),
                Begin::Not(why) => {
                    self.refuse(session, change, &why);
                    return None;
                }
            }
        }
    }

    /// Waits without a thread.
    async fn apply_later(self: Arc<Self>, session: Arc<Session>, change: Change, place: Place) {
        let (mut change, mut place) = (change, place);
        loop {
            let progress = place.wait(|recalls| self.recall(recalls)).await;
            let (core, session) = (Arc::clone(&self), Arc::clone(&session));
            let applied = crate::rt::task::spawn_blocking(move || {
                let fallen = Fallen::of(&change);
                let act = || core.apply_in_turn(&session, change, place, &progress);
                let again = core.surely(&session, fallen, act);
                if again.is_none() {
                    core.apply_all(&session);
                }
                (session, again)
            });
            match applied.await {
                Ok((_, Some(Waits::Turn(again, in_line)))) => (change, place) = (again, in_line),
                Ok((session, Some(Waits::Sync(change, turn)))) => {
                    return self.apply_when_durable(&session, change, turn);
                }
                _ => return,
            }
        }
    }

    /// The wait is over, one way or the other; or it begins again, if a name has come to mean
    /// something else.
    fn apply_in_turn(
        self: &Arc<Self>,
        session: &Session,
        change: Change,
        place: Place,
        progress: &Progress,
    ) -> Option<Waits> {
        if !matches!(progress, Progress::Begun(_)) {
            drop(place);
            self.refuse(session, change, progress);
            return None;
        }
        let turn = place.into_turn();
        if self.is_still(session, &change, &turn) {
            return self.apply_or_wait(session, change, turn);
        }
        drop(turn);
        self.try_apply(session, change)
    }

    /// Its turn has come. What is promised is so under write leases that its client has heard of:
    /// then nothing is left of others (UNSTABLE-1).
    fn apply_or_wait(
        self: &Arc<Self>,
        session: &Session,
        change: Change,
        turn: Turn,
    ) -> Option<Waits> {
        if change.promised.is_none()
            && self.fresh.is_others(session.number, &changes(&change, &turn))
        {
            return Some(Waits::Sync(change, turn));
        }
        self.apply(session, change, turn);
        None
    }

    /// Does something with a change. If that panics, the client hears of an error, and the changes
    /// behind it go on: else it would wait for ever, and so would whoever waits for what it gives
    /// back behind them.
    fn surely<T>(
        self: &Arc<Self>,
        session: &Session,
        fallen: Fallen,
        act: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        if let Ok(done) = catch_unwind(AssertUnwindSafe(|| answered(act))) {
            return done;
        }
        tracing::error!(
            client = session.name,
            seq = fallen.seq,
            "a change has panicked: it may be made or not"
        );
        if self.panics.falls(&self.runtime, |room| session.say_fatal(fallen.seq, room)) {
            return None;
        }
        let outcome = Outcome::Failed { errno: libc::EIO };
        if fallen.promised {
            self.broken(session, fallen.series, &outcome);
        }
        session.fallen(fallen.seq, outcome);
        self.leases.refused(session.number, fallen.seq);
        None
    }

    /// A name may have come to mean another inode before the turn began, unless the session has the
    /// directory's write lease.
    fn is_still(self: &Arc<Self>, session: &Session, change: &Change, turn: &Turn) -> bool {
        turn.is_own() || turn.inos() == self.touched(session, change)
    }

    fn apply(self: &Arc<Self>, session: &Session, change: Change, turn: Turn) {
        // It may have waited, and its client may be evicted.
        if session.is_over() {
            return;
        }
        let inos = changes(&change, &turn);
        let Change { seq, series, promised, who, op, room, .. } = change;
        let mut making = self.fresh.begin(session.number, inos);
        let Info { cost, data_bytes: bytes, .. } = op.info();
        let promise = promised.map(|promised| promise(session, seq, &promised));
        let keeps = promise.is_some() || !turn.inos().is_empty();
        // A change that was not promised is made without a mark, too: after a crash it is told as
        // lost, at worst.
        let enlisted = if keeps { session.enlist(&*self.fs, true) } else { Ok(()) };
        let enlisted =
            enlisted.or_else(|errno| if promise.is_some() { Err(errno) } else { Ok(()) });
        let soon = keeps && session.is_enlisted();
        let told = promise.is_none().then(|| EarlyAck {
            at: wall(&*self.env.clock),
            ino: None,
            seq: Some(SessionSeq { session: session.id, seq }),
            reservation: None,
        });
        let told = told.filter(|_| soon);
        let applied = match enlisted {
            Ok(()) => {
                Applying { told, ..self.applying(session, who, promise) }.change(op, turn.inos())
            }
            Err(errno) => Applied::failed(errno),
        };
        // It was fenced just before, and the mark that went then is there again.
        if soon && !session.is_enlisted() {
            self.fs.remove_session(session.id);
        }
        making.made = after_made(session, &applied.outcome);
        if promise.is_some() {
            session.provisions.spend(cost);
        }
        let failed = matches!(applied.outcome, Outcome::Failed { .. });
        if promise.is_some() && failed {
            self.broken(session, series, &applied.outcome);
        }
        // Its client tries again as long as others have space that they do not need.
        if applied.outcome == (Outcome::Failed { errno: libc::ENOSPC }) {
            self.others(session).for_each(|other| other.lacks());
        }
        // Before a lease goes back behind it.
        if keeps && !failed {
            self.was_kept((session, soon), seq, bytes);
        }
        session.applied(seq, applied, room, promise.is_some());
        drop(making);
        turn.done(seq);
    }

    /// Answers a change that is not made.
    fn refuse(&self, session: &Session, change: Change, why: &Progress) {
        // What is dropped is sent again, perhaps, and costs something then.
        if change.promised.is_some() && *why != Progress::Dropped {
            session.provisions.spend(change.op.info().cost);
        }
        let outcome = match why {
            Progress::Busy => Outcome::Busy {},
            Progress::Dropped => Outcome::Dropped {},
            _ => Outcome::Failed { errno: libc::ESTALE },
        };
        if *why == Progress::Broken {
            self.broken(session, change.series, &outcome);
        }
        if !session.is_over() {
            session.applied(
                change.seq,
                Applied::alone(outcome),
                change.room,
                change.promised.is_some(),
            );
        }
        self.leases.refused(session.number, change.seq);
    }

    /// Answers a change that is not made, for what others have done before cannot be made durable.
    fn give_up(&self, session: &Session, change: Change, errno: Errno) {
        session.applied(change.seq, Applied::failed(errno), change.room, change.promised.is_some());
        self.leases.refused(session.number, change.seq);
    }

    /// What a client has promised cannot be done: nothing of this series is made behind it. The
    /// client sends again what does not depend on it.
    fn broken(&self, session: &Session, series: u32, outcome: &Outcome) {
        tracing::error!(
            client = session.name,
            ?outcome,
            "what it has shown as done cannot be done"
        );
        self.leases.end_series(session.number, series);
    }

    fn touched(self: &Arc<Self>, session: &Session, change: &Change) -> Vec<Ino> {
        // It is promised that the name means nothing; if it does the change fails.
        if let (Some(_), Op::Create { parent, .. }) = (&change.promised, &change.op) {
            return session.inward(*parent).into_iter().collect();
        }
        self.applying(session, change.who, None).touched(&change.op)
    }
}
