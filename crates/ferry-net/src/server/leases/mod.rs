//! Leases: which sessions cache an inode or decide changes of it alone, and which sessions wait
//! until they no longer do.
//!
//! * LEASE-1: the server enters a lease before it reads what the lease covers. It grants none on an
//!   inode that another session is about to change.
//! * LEASE-2: a waiter stands in the queues of all its inodes at once, in the order of asking. So
//!   no two waiters wait for each other.
//! * LEASE-3: a change begins when no other session has a read lease on what it touches: each has
//!   returned it, or its term is over. A client returns a read lease without waiting for any other
//!   operation. So a change waits for a session's read lease a term after its recall at most, or
//!   less than three terms if changes of that session arrive meanwhile (LEASE-4). Then it waits for
//!   a sync, which waits for no client. Before that it waits for the changes in front of it in its
//!   queues, each with the same bound. A change never waits for a write lease, nor for a session
//!   that waits for one: the answer is `Busy`.
//! * LEASE-4: each sign of life renews a session's term. If the session owes an answer to a recall,
//!   the term counts from the oldest such recall, and a sign of life more than a ninth of a term
//!   after it renews nothing, unless it answers an older one. Changes that arrive, however slowly,
//!   renew the whole term until two terms after that recall. So others wait for the answer a term
//!   at most, or less than three if changes arrive. A new connection renews the term in the same
//!   way as changes: until two terms after the oldest recall without an answer, over whatever
//!   connections. A session that has returned leases behind changes that have not arrived must send
//!   those changes; while they arrive, its term goes on.
//! * LEASE-5: a write lease is the only lease on its inode. Its session's changes of the inode wait
//!   for no session. A write lease that the client returns is free when the server has applied all
//!   changes that came before.
//! * LEASE-6: no request of another session is answered from an inode with a write lease: the
//!   server recalls the lease first. Leases that are asked for later come later.
//! * LEASE-7: a write lease whose term is over stays until another session wants it. Then the
//!   server fences its session: the session loses all leases, its epoch ends, and no
//!   early-acknowledged change of that epoch is applied any more. The server never does this while
//!   a change of the session is being applied. No session gets any of these leases before the
//!   fence is durable on the volume (DURABLE-4). Recording waits for the device, so it happens
//!   without the table's lock (`Fencing`), and meanwhile the leases count for nobody.
//! * LEASE-8: the server recalls a write lease only after it has sent the answer that grants it.
//! * LEASE-9: if a client's term ends again and again while it owes an answer to a recall, the
//!   client gets no lease for a while, each time for twice as long. An answer in time, in the same
//!   session, ends the count. A new session of the same client (certificate, or address without
//!   one) continues the count.
//! * LEASE-10: a request for write leases waits for everything that makes a change of the same
//!   inodes `Busy`, whether its session may get the leases or not. So a client that sends a change
//!   again after such a request does so after an event, and never in a circle.
//!
//! Leases that a client asks for ahead, while it walks through a tree, have rules of their own:
//! `ahead`.

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

/// All leases of a server.
pub(super) struct Leases {
    shared: Mutex<Shared>,
    clock: Arc<dyn Clock>,
    /// No change begins before this time: clients may rely on leases of the previous server.
    held_until: Duration,
    /// Called for each session that loses its write leases without having returned them, before
    /// others get them.
    on_fence: OnceLock<OnFence>,
}

type OnFence = Box<dyn Fn(SessionId, Fencing) + Send + Sync>;

/// A fence that is being recorded. Until it is done, no session gets what the fenced one had.
#[must_use]
pub(super) struct Fencing {
    leases: Arc<Leases>,
    session: SessionId,
}

impl Fencing {
    /// The volume has recorded the fence: what the session had is free.
    pub(super) fn done(self) {
        self.leases.with(|table| table.fenced(self.session));
    }
}

/// How a change begins.
pub(super) enum Begin {
    Now(ChangeGuard),
    /// The change begins when the waiter's turn has come.
    Later(QueuePosition),
    /// The change is refused.
    Not(Progress),
}

impl Leases {
    /// `hold`: for how long no change begins. `in_use`: a walk takes no lease away that its holder
    /// used so recently.
    pub(super) fn new(
        clock: Arc<dyn Clock>,
        term: Duration,
        hold: Duration,
        in_use: Duration,
    ) -> Self {
        let held_until = clock.monotonic() + hold;
        let mut shared = Shared::default();
        shared.table.term = term;
        shared.table.in_use_time = in_use;
        let shared = Mutex::new(shared);
        Self { shared, clock, held_until, on_fence: OnceLock::new() }
    }

    /// `told` is called for each session that loses its write leases without having returned them.
    /// Others get the leases when the [`Fencing`] is done.
    pub(super) fn on_fence(&self, told: OnFence) {
        let _once = self.on_fence.set(told);
    }

    /// Acts on the table, and wakes those waiters that may go on.
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

    /// Fences these sessions: another session has waited long enough for their leases.
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

    /// A session has a new connection, which knows of no leases. Returns the current epoch.
    pub(super) fn begin(&self, session: SessionId, client: ClientId) -> u32 {
        let now = self.clock.monotonic();
        self.with(|table| table.begin(session, client, now))
    }

    /// A sign of life. Returns whether it renews the term, and the epoch that began with the
    /// session's last fence.
    pub(super) fn renew(&self, session: SessionId) -> (bool, u32) {
        let now = self.clock.monotonic();
        self.with(|table| (table.renew(session, now), table.fenced_before(session)))
    }

    /// The epoch that began with the session's last fence.
    pub(super) fn fenced_before(&self, session: SessionId) -> u32 {
        self.with(|table| table.fenced_before(session))
    }

    /// Ends the epoch as a fence does: early-acknowledged changes of the session that have not
    /// arrived are dropped.
    pub(super) fn end_fenced_epoch(&self, session: SessionId) {
        self.with(|table| table.end_fenced_epoch(session));
    }

    /// Changes of the session arrive: its term is renewed, for some time even while it owes an
    /// answer to a recall.
    pub(super) fn makes_progress(&self, session: SessionId) {
        let now = self.clock.monotonic();
        self.with(|table| table.makes_progress(session, now));
    }

    /// The current epoch of a session's changes.
    pub(super) fn epoch(&self, session: SessionId) -> u32 {
        self.with(|table| table.epoch(session))
    }

    /// An early-acknowledged change has failed: the changes behind it in this epoch are dropped.
    pub(super) fn end_epoch(&self, session: SessionId, epoch: u32) {
        self.with(|table| table.end_epoch(session, epoch));
    }

    /// Grants a read lease, if this returns true. The caller reads the inode after this.
    pub(super) fn grant(&self, session: SessionId, ino: Ino) -> bool {
        let now = self.clock.monotonic();
        self.with(|table| table.grant(session, ino, now))
    }

    /// Grants the write lease of an inode that the session is about to make under a number of its
    /// own, if this returns true.
    pub(super) fn grant_new(&self, session: SessionId, ino: Ino) -> bool {
        let now = self.clock.monotonic();
        self.with(|table| table.grant_new(session, ino, now))
    }

    /// The inode was not made.
    pub(super) fn revoke_new(&self, session: SessionId, ino: Ino) {
        self.with(|table| table.revoke_new(session, ino));
    }

    /// A session has returned these leases. Write leases end when the change `after` has been
    /// applied (`None`: at once).
    pub(super) fn give_back(&self, session: SessionId, inos: &[Ino], after: Option<u64>) {
        let now = self.clock.monotonic();
        self.with(|table| table.give_back(session, inos, after, now));
    }

    /// A session has ended and relies on no lease.
    pub(super) fn end(&self, session: SessionId) {
        self.with(|table| table.end(session));
    }

    /// Removes what is over, and sessions that are not `alive`.
    pub(super) fn expire(&self, alive: &HashSet<SessionId>) {
        let now = self.clock.monotonic();
        self.with(|table| table.expire(alive, now));
    }

    /// Whether a session gets no lease now, because its client has ignored recalls.
    pub(super) fn is_barred(&self, session: SessionId) -> bool {
        let now = self.clock.monotonic();
        self.with(|table| table.is_barred(session, now))
    }

    /// How many leases a session has, and how many of them are write leases.
    pub(super) fn held_by(&self, session: SessionId) -> (usize, usize) {
        self.with(|table| table.held_by(session))
    }

    /// The server is about to stop: no session gets a lease any more. Returns what to recall.
    pub(super) fn close(&self) -> Recalls {
        let now = self.clock.monotonic();
        self.with(|table| table.close(now))
    }

    /// Whether a session relies on a lease, and whether a session has write leases, under which it
    /// may have acknowledged what the server has not applied.
    pub(super) fn relied_on(&self) -> (bool, bool) {
        let now = self.clock.monotonic();
        self.with(|table| table.relied_on(now))
    }

    /// Whether a client may rely on a lease that the server before has granted.
    pub(super) fn former_relied_on(&self) -> bool {
        self.clock.monotonic() < self.held_until
    }

    /// Whether a request of this session sees everything that clients have acknowledged of these
    /// inodes.
    pub(super) fn is_readable(&self, session: SessionId, inos: &[Ino]) -> bool {
        self.with(|table| table.is_readable(session, inos))
    }

    /// The server has sent the answer that grants these write leases.
    pub(super) fn grant_sent(&self, session: SessionId, inos: &[Ino]) {
        self.with(|table| table.grant_sent(session, inos));
    }

    /// The server will not send that answer. Returns what to recall.
    pub(super) fn grant_not_sent(&self, session: SessionId, inos: &[Ino]) -> Recalls {
        let now = self.clock.monotonic();
        let asked = self.with(|table| table.grant_not_sent(session, inos, now));
        Recalls::from_iter([(session, asked)])
    }

    /// Begins a change, at once if possible. `recall` sends recalls of what is in its way.
    pub(super) fn begin_change(
        self: &Arc<Self>,
        session: SessionId,
        (epoch, is_early): (Option<u32>, bool),
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

    /// Turns read leases of a session into write leases, where no other session has a lease or
    /// waits for one. Returns those. The caller must call [`Leases::grant_sent`] or
    /// [`Leases::grant_not_sent`] for them.
    pub(super) fn upgrade(&self, session: SessionId, inos: &[Ino]) -> Vec<Ino> {
        let now = self.clock.monotonic();
        if now < self.held_until {
            Vec::new()
        } else {
            self.with(|table| table.upgrade(session, inos, now))
        }
    }

    /// A change was refused. What the client has returned behind it is free.
    pub(super) fn refused(&self, session: SessionId, seq: u64) {
        self.with(|table| table.end_change(session, Some(seq)));
    }

    /// Enters a queue.
    pub(super) fn ask(
        self: &Arc<Self>,
        session: SessionId,
        wants: Wants,
        inos: Vec<Ino>,
    ) -> QueuePosition {
        self.enter_queue(session, wants, inos.clone(), |table| table.ask(session, wants, inos))
    }

    /// Enters the queue for write leases. What may make a change of the session `Busy` is what
    /// this waits for (LEASE-10). The session gets no lease on `without`.
    pub(super) fn ask_for_leases(
        self: &Arc<Self>,
        session: SessionId,
        inos: Vec<Ino>,
        without: Vec<Ino>,
    ) -> QueuePosition {
        self.enter_queue(session, Wants::Lease, inos.clone(), |table| {
            table.ask_for_leases(session, inos, without)
        })
    }

    fn enter_queue(
        self: &Arc<Self>,
        session: SessionId,
        wants: Wants,
        inos: Vec<Ino>,
        enter: impl FnOnce(&mut Table) -> WaiterId,
    ) -> QueuePosition {
        let wakeup = Arc::new(Notify::new());
        let waiter = {
            let mut shared = self.shared.lock();
            let waiter = enter(&mut shared.table);
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

/// A waiter in the queues of its inodes. Dropping it leaves the queues; until then, waiters behind
/// it stay behind.
pub(super) struct QueuePosition {
    leases: Arc<Leases>,
    session: SessionId,
    waiter: WaiterId,
    wants: Wants,
    inos: Vec<Ino>,
    wakeup: Arc<Notify>,
}

impl QueuePosition {
    /// Waits until the waiter's turn has come or never will. `recall` sends recalls of what is in
    /// its way.
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

    /// The waiter's turn has come.
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

/// A change is being applied: as long as this lives, no other session relies on these inodes or
/// changes them.
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

    /// Whether the session has the write leases of all inodes: then no name can have got another
    /// meaning.
    pub(super) fn is_own(&self) -> bool {
        self.position.is_none()
    }

    /// The change with this number was applied, or refused.
    pub(super) fn done(mut self, seq: u64) {
        self.applied = Some(seq);
    }
}

impl Drop for ChangeGuard {
    fn drop(&mut self) {
        self.leases.with(|table| table.end_change(self.session, self.applied));
    }
}
