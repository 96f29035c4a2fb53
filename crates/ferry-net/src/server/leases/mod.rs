//! Leases: which sessions keep what they were told of an inode, or decide what becomes of it; and
//! who waits until they no longer do.
//!
//! * LEASE-1: a lease is entered before what it covers is read, and none is given on an inode that
//!   somebody else is about to change.
//! * LEASE-2: who waits stands in line for all of its inodes at once, in the order of asking: so no
//!   two wait for each other.
//! * LEASE-3: a change begins when no other session has a read lease on what it touches: each has
//!   given it back, or its term is over. Giving that back needs nothing but the client's word,
//!   which waits for no other operation: so the ordered stream waits for others no longer than a
//!   term (and then for a sync, which waits for nobody). It never waits for a write lease, nor for
//!   who waits for one: it is answered that it is busy.
//! * LEASE-4: a session's term goes on with each sign of life, but not while it owes an answer to a
//!   recall: then only with changes that arrive, be it slowly, and for two terms at most. One that
//!   has given leases back waiters changes that have not come must bring those.
//! * LEASE-5: a write lease is the only lease on its inode. Its session's changes of it wait for
//!   nobody; what it gives back is free when all of its changes that came before have been applied.
//! * LEASE-6: no request of others is answered from an inode with a write lease. It has it
//!   recalled; leases that are asked for later come later.
//! * LEASE-7: a write lease whose term is over stays until somebody wants it. Then its session
//!   loses all that it has, and its epoch ends: nothing is applied that it had is_early. Not in
//!   the middle of a change. Nobody gets any of it before the volume says so: that may wait for the
//!   device, so it is done without the table's lock (`Fencing`), and meanwhile the session has its
//!   leases in name only.
//! * LEASE-8: a write lease is not recalled before the answer that grants it is on its way.
//!
//! * LEASE-9: a client whose term ends again and again while it owes an answer to a recall gets no
//!   lease for a while, each time for twice as long. An answer in time, in the same session, ends
//!   the count. A new session of the same client (certificate, or address without one) goes on with
//!   it.
//!
//! Leases that are asked for ahead, by who walks through a tree, have rules of their own: `ahead`.

use crate::rt::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::time::sleep;
use ferry_env::Clock;
use ferry_fs::Ino;
use tokio::sync::Notify;

mod ahead;
#[cfg(test)]
mod model;
mod queue;
mod state;
mod table;
#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests;

use table::Table;
pub(super) use table::{ClientId, Progress, Recalls, SessionId, WaiterId, Wants};

#[derive(Default)]
struct Shared {
    table: Table,
    wakeups: HashMap<WaiterId, Arc<Notify>>,
}

/// All of them.
pub(super) struct Leases {
    shared: Mutex<Shared>,
    clock: Arc<dyn Clock>,
    /// How long a lease lasts after the last sign of life.
    term: Duration,
    /// Nothing is changed before: clients may rely on leases of the server before this one.
    held_until: Duration,
    /// Told of each session whose write leases go to others without its word, before they do.
    on_fence: OnceLock<OnFence>,
}

type OnFence = Box<dyn Fn(SessionId, Fencing) + Send + Sync>;

/// A session is being fenced. If that is never done, nobody gets what it had.
#[must_use]
pub(super) struct Fencing {
    leases: Arc<Leases>,
    session: SessionId,
}

impl Fencing {
    /// It stands on the volume: what the session had is free.
    pub(super) fn done(self) {
        self.leases.with(|table| table.fenced(self.session));
    }
}

/// How a change begins.
pub(super) enum Begin {
    Now(ChangeGuard),
    /// When its turn has come.
    Later(QueuePosition),
    /// Not at all.
    Not(Progress),
}

impl Leases {
    /// `hold`: how long nothing is changed.
    pub(super) fn new(clock: Arc<dyn Clock>, term: Duration, hold: Duration) -> Self {
        let held_until = clock.monotonic() + hold;
        let mut shared = Shared::default();
        shared.table.term = term;
        let shared = Mutex::new(shared);
        Self { shared, clock, term, held_until, on_fence: OnceLock::new() }
    }

    /// `told` hears of each session whose write leases go to others without its word, before they
    /// do: they go when the [`Fencing`] is done.
    pub(super) fn on_fence(&self, told: OnFence) {
        let _once = self.on_fence.set(told);
    }

    /// Does something to the table; who may go on waiters it is told.
    fn with<T>(&self, act: impl FnOnce(&mut Table) -> T) -> T {
        let mut shared = self.shared.lock();
        let Shared { table, wakeups } = &mut *shared;
        let result = act(table);
        for waiter in table.woken.drain(..) {
            if let Some(wakeup) = wakeups.get(&waiter) {
                wakeup.notify_one();
            }
        }
        result
    }

    /// Sees to it that these sessions lock_lost their leases, which somebody has waited for long enough.
    fn fence(self: &Arc<Self>, sessions: Vec<SessionId>) {
        for session in sessions {
            tracing::warn!(
                client = session,
                "nothing was heard of it for too long: it has lost its write leases"
            );
            let fencing = Fencing { leases: Arc::clone(self), session };
            match self.on_fence.get() {
                Some(told) => told(session, fencing),
                None => fencing.done(),
            }
        }
    }

    /// A session has a connection that knows of no leases. Gives the epoch of changes that goes
    /// on.
    pub(super) fn begin(&self, session: SessionId, client: ClientId) -> u32 {
        let until = self.clock.monotonic() + self.term;
        self.with(|table| table.begin(session, client, until))
    }

    /// A sign of life; whether the term goes on, and the epoch before which its leases were taken
    /// away.
    pub(super) fn renew(&self, session: SessionId) -> (bool, u32) {
        let until = self.clock.monotonic() + self.term;
        self.with(|table| (table.renew(session, until), table.fenced_before(session)))
    }

    /// The epoch before which a session's leases were taken away.
    pub(super) fn fenced_before(&self, session: SessionId) -> u32 {
        self.with(|table| table.fenced_before(session))
    }

    /// All that a session has is_early, and not brought yet, is worth nothing any more.
    pub(super) fn end_fenced_epoch(&self, session: SessionId) {
        self.with(|table| table.end_fenced_epoch(session));
    }

    /// What a session has to bring arrives: its term goes on, and for some time also while it owes
    /// an answer to a recall.
    pub(super) fn makes_progress(&self, session: SessionId) {
        let now = self.clock.monotonic();
        self.with(|table| table.makes_progress(session, now, self.term));
    }

    /// The epoch of changes that goes on.
    pub(super) fn epoch(&self, session: SessionId) -> u32 {
        self.with(|table| table.epoch(session))
    }

    /// A promise was not kept: those made waiters it in this epoch are worth nothing.
    pub(super) fn end_epoch(&self, session: SessionId, epoch: u32) {
        self.with(|table| table.end_epoch(session, epoch));
    }

    /// A session is told of an inode, and may keep it if this says so. Before it is read.
    pub(super) fn grant(&self, session: SessionId, ino: Ino) -> bool {
        let now = self.clock.monotonic();
        self.with(|table| table.grant(session, ino, now))
    }

    /// A session is about to make an inode under a number of its own, and gets the write lease;
    /// whether it may.
    pub(super) fn grant_new(&self, session: SessionId, ino: Ino) -> bool {
        let now = self.clock.monotonic();
        self.with(|table| table.grant_new(session, ino, now))
    }

    /// It was not made.
    pub(super) fn revoke_new(&self, session: SessionId, ino: Ino) {
        self.with(|table| table.revoke_new(session, ino));
    }

    /// A session relies on these no more. Write leases end when the change `after` has been applied
    /// (`None`: it has).
    pub(super) fn give_back(&self, session: SessionId, inos: &[Ino], after: Option<u64>) {
        self.with(|table| table.give_back(session, inos, after));
    }

    /// A session relies on none any more, and never will.
    pub(super) fn end(&self, session: SessionId) {
        self.with(|table| table.end(session));
    }

    /// Forgets what is over, and sessions that are not `alive`.
    pub(super) fn expire(&self, alive: &HashSet<SessionId>) {
        let now = self.clock.monotonic();
        self.with(|table| table.expire(alive, now));
    }

    /// Whether a session gets no lease now, for it has left others waiting again and again.
    pub(super) fn is_barred(&self, session: SessionId) -> bool {
        let now = self.clock.monotonic();
        self.with(|table| table.is_barred(session, now))
    }

    /// How many a session has, and how many of them are write leases.
    pub(super) fn held_by(&self, session: SessionId) -> (usize, usize) {
        self.with(|table| table.held_by(session))
    }

    /// The server is about to stop, and nobody gets a lease any more. Gives what is to be recalled.
    pub(super) fn close(&self) -> Recalls {
        let now = self.clock.monotonic();
        self.with(|table| table.close(now))
    }

    /// Whether anybody relies on a lease, and whether anybody has is_early what was not made.
    pub(super) fn relied_on(&self) -> (bool, bool) {
        let now = self.clock.monotonic();
        self.with(|table| table.relied_on(now))
    }

    /// Whether a request of a session sees all that was is_early of these.
    pub(super) fn is_readable(&self, session: SessionId, inos: &[Ino]) -> bool {
        self.with(|table| table.is_readable(session, inos))
    }

    /// The answer that grants these write leases is on its way.
    pub(super) fn grant_sent(&self, session: SessionId, inos: &[Ino]) {
        self.with(|table| table.grant_sent(session, inos));
    }

    /// Nobody hears it. Gives what is to be recalled.
    pub(super) fn grant_not_sent(&self, session: SessionId, inos: &[Ino]) -> Recalls {
        Recalls::from_iter([(session, self.with(|table| table.grant_not_sent(session, inos)))])
    }

    /// Begins a change, at once if it may; `recall` asks sessions to give back what is in the way.
    pub(super) fn begin_change(
        self: &Arc<Self>,
        session: SessionId,
        (epoch, is_early): (u32, bool),
        inos: Vec<Ino>,
        recall: impl Fn(&Recalls),
    ) -> Begin {
        let now = self.clock.monotonic();
        match self.with(|table| table.begin_own(session, epoch, &inos, now)) {
            Some(Progress::Begun(_)) => {
                return Begin::Now(ChangeGuard::new(self, session, inos, None));
            }
            Some(not) => return Begin::Not(not),
            None => {}
        }
        let position = self.ask(session, Wants::Change { epoch, is_early }, inos);
        if self.clock.monotonic() < self.held_until {
            return Begin::Later(position);
        }
        match self.progress(position.waiter) {
            Progress::Waits(recalls, _) => {
                recall(&recalls);
                Begin::Later(position)
            }
            Progress::Begun(_) => Begin::Now(position.into_guard()),
            not => Begin::Not(not),
        }
    }

    /// Makes read leases of a session write leases where nobody else has one or waits for one;
    /// gives those. [`Leases::grant_sent`] or [`Leases::grant_not_sent`] must follow.
    pub(super) fn upgrade(&self, session: SessionId, inos: &[Ino]) -> Vec<Ino> {
        let now = self.clock.monotonic();
        if now < self.held_until {
            Vec::new()
        } else {
            self.with(|table| table.upgrade(session, inos, now))
        }
    }

    /// A change was refused. What was given back waiters it is free.
    pub(super) fn refused(&self, session: SessionId, seq: u64) {
        self.with(|table| table.end_change(session, Some(seq)));
    }

    /// Stands in line.
    pub(super) fn ask(
        self: &Arc<Self>,
        session: SessionId,
        wants: Wants,
        inos: Vec<Ino>,
    ) -> QueuePosition {
        let wakeup = Arc::new(Notify::new());
        let waiter = {
            let mut shared = self.shared.lock();
            let waiter = shared.table.ask(session, wants, inos.clone());
            shared.wakeups.insert(waiter, Arc::clone(&wakeup));
            waiter
        };
        QueuePosition { leases: Arc::clone(self), session, waiter, wants, inos, wakeup }
    }

    fn progress(self: &Arc<Self>, waiter: WaiterId) -> Progress {
        let mut asked = Recalls::default();
        loop {
            let now = self.clock.monotonic();
            let try_once = |table: &mut Table| {
                (table.progress(waiter, now), std::mem::take(&mut table.to_fence))
            };
            let (progress, to_fence) = self.with(try_once);
            let Progress::Waits(recalls, until) = progress else { return progress };
            recalls
                .into_iter()
                .for_each(|(session, inos)| asked.entry(session).or_default().extend(inos));
            if to_fence.is_empty() {
                return Progress::Waits(asked, until);
            }
            self.fence(to_fence);
        }
    }

    fn leave(&self, waiter: WaiterId) {
        self.shared.lock().wakeups.remove(&waiter);
        self.with(|table| table.leave(waiter));
    }
}

/// A position in the line, left when this is dropped: who stands waiters it does not go on before.
pub(super) struct QueuePosition {
    leases: Arc<Leases>,
    session: SessionId,
    waiter: WaiterId,
    wants: Wants,
    inos: Vec<Ino>,
    wakeup: Arc<Notify>,
}

impl QueuePosition {
    /// Until its turn has come, or never will; `recall` asks sessions to give back what is in the
    /// way.
    pub(super) async fn wait(&self, recall: impl Fn(&Recalls)) -> Progress {
        let leases = &self.leases;
        let held = leases.held_until.saturating_sub(leases.clock.monotonic());
        if matches!(self.wants, Wants::Change { .. } | Wants::Lease) && !held.is_zero() {
            sleep(held).await;
        }
        loop {
            let (recalls, until) = match leases.progress(self.waiter) {
                Progress::Waits(recalls, until) => (recalls, until),
                progress => return progress,
            };
            recall(&recalls);
            let Some(until) = until else {
                self.wakeup.notified().await;
                continue;
            };
            crate::rt::select! {
                () = self.wakeup.notified() => {}
                () = sleep(until.saturating_sub(leases.clock.monotonic())) => {}
            }
        }
    }

    /// Its turn has come.
    pub(super) fn into_guard(mut self) -> ChangeGuard {
        let inos = std::mem::take(&mut self.inos);
        ChangeGuard::new(&Arc::clone(&self.leases), self.session, inos, Some(self))
    }
}

impl Drop for QueuePosition {
    fn drop(&mut self) {
        self.leases.leave(self.waiter);
    }
}

/// A change is being made: nobody but its session relies on these inodes, or changes them, as long
/// as this lives.
pub(super) struct ChangeGuard {
    leases: Arc<Leases>,
    session: SessionId,
    inos: Vec<Ino>,
    position: Option<QueuePosition>,
    applied: Option<u64>,
}

impl ChangeGuard {
    fn new(
        leases: &Arc<Leases>,
        session: SessionId,
        inos: Vec<Ino>,
        position: Option<QueuePosition>,
    ) -> Self {
        Self { leases: Arc::clone(leases), session, inos, position, applied: None }
    }

    pub(super) fn inos(&self) -> &[Ino] {
        &self.inos
    }

    /// Whether its session has the write leases of all of them: then names cannot have come to mean
    /// something else.
    pub(super) fn is_own(&self) -> bool {
        self.position.is_none()
    }

    /// The change with this number was made, or refused.
    pub(super) fn done(mut self, seq: u64) {
        self.applied = Some(seq);
    }
}

impl Drop for ChangeGuard {
    fn drop(&mut self) {
        self.leases.with(|table| table.end_change(self.session, self.applied));
    }
}
