//! Changes that were acknowledged before the server has applied them, and what becomes of them.
//!
//! * EARLY-ACK-1: a change is acknowledged early only under write leases on all that it touches,
//!   while there is a connection. The client decides it, numbers it and puts it into the stream
//!   without a gap: under the cache's lock, then under the link's.
//! * EARLY-ACK-2: requests about an inode with unanswered changes are answered behind the newest of
//!   these. Its leases are returned behind it, too.
//! * EARLY-ACK-3: an early-acknowledged change that fails ends its epoch. It is lost, and with it
//!   the unanswered early-acknowledged changes that depend on it: those that touch an inode that a
//!   lost change touches. Their programs are told (`lost`). All other unanswered changes are sent
//!   again in the next epoch, under the same leases, which go back behind them. If the session was
//!   fenced, the leases are lost, and all unanswered early-acknowledged changes are lost.
//! * EARLY-ACK-4: no more changes are unanswered than the window holds, and no more are in the
//!   replay log than fit. Beyond that, a program gets its answer when there is room again.
//! * EARLY-ACK-5: the client says in the stream how much of its reservation is left (`Remaining`),
//!   numbered under the same lock under which it finds out. It asks for space behind that. Each
//!   connection begins with it: the answer to such a question may be lost with the connection
//!   before.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::rt::time::sleep;
use crate::rt::{Mutex, MutexGuard};
use ferry_fs::{Attr, Errno, Ino, ToForget};
use tokio::sync::oneshot;

use super::Link;
use super::epoch::{End, begin_epoch};
use super::phase::Phase;
use super::restore::{Ended, Restore, restores_locks};
use super::state::State;
use crate::client::cache::{self, PendingEffect};
use crate::client::change::{Change, Pending, Role, Stage, Waiter};
use crate::client::notes::flag;
use crate::client::replay_log;
use crate::frame;
use crate::message::{Caller, Made, Op, Outcome};

/// Changes that no program waits for are sent after this time, together.
const COMPANY_TIME: Duration = Duration::from_millis(3);

/// The pause between two looks whether a session is at rest.
const REST: Duration = Duration::from_millis(10);

/// Hears whether a sync has succeeded.
struct Told(Mutex<Option<oneshot::Sender<Result<(), Errno>>>>);

impl Told {
    fn tell(&self, result: Result<(), Errno>) {
        if let Some(tell) = self.0.lock().take() {
            let _nobody = tell.send(result);
        }
    }
}

impl Waiter for Told {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        self.tell(match outcome {
            Outcome::Failed { errno } => Err(Errno(errno)),
            _ => Ok(()),
        });
    }

    fn fail(&self, errno: Errno) {
        self.tell(Err(errno));
    }
}

/// The right to acknowledge changes early, while it lives.
pub(in crate::client) struct EarlyAcks<'l>(MutexGuard<'l, State>);

impl EarlyAcks<'_> {
    /// Early-acknowledged changes were lost, at least once.
    pub(in crate::client) fn is_lossy(&self) -> bool {
        self.0.lossy
    }

    /// Puts an early-acknowledged change into the stream; `true`: its program has to wait for room.
    pub(in crate::client) fn acknowledge(&mut self, pending: Pending) -> bool {
        debug_assert!(pending.role == Role::Acknowledged);
        self.0.push(pending);
        self.0.pump();
        self.0.is_full()
    }
}

impl Link {
    /// The right to acknowledge changes early, if there is a connection. The cache's lock is held.
    pub(in crate::client) fn early_acks(&self) -> Option<EarlyAcks<'_>> {
        let state = self.state.lock();
        let may = state.phase.is_connected() && !state.read_only;
        may.then_some(EarlyAcks(state))
    }

    /// Gives back space that was not needed.
    pub(super) fn return_unneeded(&self) {
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if state.phase.is_connected()
            && let Some(op) = cache.reservation.unneeded()
        {
            state.say_what_is_left(op);
            state.pump();
        }
    }

    /// Gives back all space: somebody lacks it. Not what is asked for just now.
    pub(in crate::client) fn spare_all(&self) {
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if state.phase.is_connected()
            && let Some(op) = cache.reservation.spare_all(self.cache.now())
        {
            state.say_what_is_left(op);
            state.pump();
        }
    }

    /// A session goes on, on a new connection.
    pub(super) fn say_what_is_left(&self) {
        let cache = self.cache.lock();
        let mut state = self.state.lock();
        if let Some(op) = cache.reservation.remaining() {
            state.say_what_is_left(op);
        }
    }

    /// Sends what waits for company.
    pub(super) async fn send_waiting(&self) {
        let waiting = self.state.lock().outbox.waiting();
        loop {
            waiting.notified().await;
            sleep(COMPANY_TIME).await;
            self.send_now();
        }
    }

    pub(super) fn send_now(&self) {
        let mut state = self.state.lock();
        let State { phase, outbox, .. } = &mut *state;
        if let Some(line) = phase.line() {
            outbox.send(line);
        }
    }

    /// Answers when there is room in the window.
    pub(in crate::client) fn hold(&self, waiter: Arc<dyn Waiter>, outcome: Outcome) {
        let mut state = self.state.lock();
        if state.is_full() {
            return state.held.push((waiter, outcome));
        }
        drop(state);
        waiter.answer(outcome, 0);
    }

    /// Nothing of these is cached any more, and the server is told.
    pub(in crate::client) fn give_back(&self, inos: &[Ino]) {
        self.return_leases(inos, false);
    }

    /// The same; `wanted`: for the server has asked for it.
    pub(super) fn return_leases(&self, inos: &[Ino], wanted: bool) {
        if inos.is_empty() {
            return;
        }
        let mut cache = self.cache.lock();
        cache.recall(inos, wanted, self.cache.now());
        let to_forget = cache.take_to_forget();
        if to_forget == ToForget::default() {
            return self.tell_returned(&mut cache, inos, 0);
        }
        cache.withdraw(inos);
        drop(cache);
        self.return_withdrawn(inos.to_vec(), to_forget, 0);
    }

    /// The server is told that these are dropped, behind the change `after` and the newest that
    /// touches them.
    fn tell_returned(&self, cache: &mut cache::State, inos: &[Ino], after: u64) {
        let mut state = self.state.lock();
        let after = inos.iter().map(|ino| state.changes.newest(*ino)).max().unwrap_or(0).max(after);
        state.give_back(inos, after);
        state.pump();
        cache.given_back();
    }

    /// A request of the kernel that makes something durable has been answered: no change that it
    /// covers is lost any more.
    pub(super) fn synced(&self, pending: &Pending, outcome: &Outcome, covers: u64) {
        if matches!(outcome, Outcome::Failed { .. }) {
            return;
        }
        let ino = match &pending.op {
            Op::Sync {} => return self.durable(covers),
            Op::Fsync { fh, .. } => pending.file(*fh),
            Op::Fsyncdir { ino, .. } => Some(*ino),
            _ => None,
        };
        if let Some(ino) = ino {
            self.state.lock().synced(ino, covers);
        }
    }

    /// Changes up to this one are durable.
    pub(in crate::client) fn durable(&self, seq: u64) {
        let held = {
            let mut state = self.state.lock();
            state.log.advance(seq);
            state.note_durable();
            state.take_held()
        };
        held.into_iter().for_each(|(waiting, outcome)| waiting.answer(outcome, 0));
    }

    /// Gives back what is withdrawn, when the kernel has forgotten it. No lock may be held.
    pub(super) fn return_withdrawn(&self, inos: Vec<Ino>, to_forget: ToForget, after: u64) {
        let this = self.this.clone();
        self.kernel.forget(to_forget, move || {
            let Some(link) = this.upgrade() else { return };
            let mut cache = link.cache.lock();
            cache.recall(&inos, false, link.cache.now());
            cache.withdrawn(&inos);
            link.tell_returned(&mut cache, &inos, after);
        });
    }

    /// A change is answered.
    pub(super) fn changed(
        &self,
        seq: u64,
        (after, empty, made): (&[Attr], bool, Option<Made>),
        outcome: Outcome,
        restore: &dyn Restore,
    ) -> io::Result<bool> {
        let (mut change, differing, held, lazy, abandoned) = {
            let mut cache = self.cache.lock();
            let mut state = self.state.lock();
            if seq <= state.changes.answered() {
                return Ok(true); // the connection before has brought it
            }
            if seq != state.changes.answered() + 1 {
                return Err(frame::malformed());
            }
            let not_made = matches!(outcome, Outcome::Failed { .. } | Outcome::Dropped {});
            if not_made
                && let Some(change) = state.changes.get_mut(seq)
                && change.pending.role.is_acknowledged()
            {
                restore.is_losing(&change.pending);
                state.note_flag(flag::LOSSY, true);
            }
            if let Some(change) = state.changes.get_mut(seq)
                && !(replay_log::is_made(&outcome) && replay_log::matters(&change.pending.op))
            {
                // The log does not get it. That is noted before the answer is.
                state.logged(seq);
            }
            let change = state.changes.answer(seq, &outcome).ok_or_else(frame::malformed)?;
            state.window.give(change.units());
            if !cache.reservation.is_recorded()
                && change.epoch == state.changes.epoch()
                && replay_log::is_made(&outcome)
                && replay_log::matters(&change.pending.op)
            {
                cache.reservation.recorded();
            }
            // A lock is lost, which may have been to protect any file. The server refuses what was
            // sent before this, and would apply what is sent from now on, perhaps once more.
            let is_refused = matches!(outcome, Outcome::Failed { .. })
                && restores_locks(&change.pending, restore);
            let abandoned = if is_refused { state.abandon_unanswered() } else { Vec::new() };
            let claims = matches!(change.pending.op, Op::Claim { .. });
            if claims {
                state.unclaimed.answered();
                state.note_unclaimed();
            }
            state.see_restored();
            let lazy = claims || !state.unclaimed.is_empty();
            // If no newer change of this client is in flight, this is how the inode is.
            let is_settled = |attr: &&Attr| state.changes.newest(attr.ino) == 0;
            let settled: Vec<Attr> = after.iter().filter(is_settled).copied().collect();
            state.pump();
            let held = state.take_held();
            if state.changes.early() == 0 {
                self.drained.notify_waiters();
            }
            drop(state);
            (change, cache.settle(&settled), held, lazy, abandoned)
        };
        abandoned.iter().for_each(|waiter| waiter.fail(Errno(libc::EIO)));
        if let (Op::Claim { inodes }, Outcome::Count { count: stamp }) =
            (&change.pending.op, &outcome)
        {
            restore.claimed(&inodes.0, *stamp);
        }
        let blind = change.pending.effect.as_ref().is_some_and(PendingEffect::is_blind);
        if blind {
            self.give_back(&differing);
        } else {
            differing.into_iter().for_each(|ino| restore.differs(ino));
        }
        let role = change.pending.role;
        let failed = matches!(outcome, Outcome::Failed { .. });
        if let Outcome::Failed { errno } = &outcome
            && role.is_acknowledged()
        {
            tracing::error!(
                errno,
                op = change.pending.op.info().what,
                "the server cannot apply an early-acknowledged change"
            );
        }
        // A change that cannot be replayed ends no epoch: the rest mostly does not depend on it.
        let broken = role == Role::Acknowledged && failed;
        if matches!(outcome, Outcome::Dropped {}) || broken {
            let why = if broken { End::Refused } else { End::Fenced };
            self.end_epoch(change.epoch + 1, Some(change), why, restore).tell(Some(restore));
        } else {
            if let Some(effect) = change.pending.effect.take() {
                let surplus = self.cache.end(effect, &outcome, after, empty);
                self.give_back(&surplus);
            }
            self.finish(change, (outcome, made), restore);
        }
        held.into_iter().for_each(|(waiter, outcome)| waiter.answer(outcome, 0));
        // Behind what is said of a session that is restored: others wait for that.
        if lazy {
            self.claim_more();
        }
        Ok(true)
    }

    /// A change has its answer, and its epoch goes on.
    fn finish(
        &self,
        mut change: Change,
        (outcome, made): (Outcome, Option<Made>),
        restore: &dyn Restore,
    ) {
        let (role, seq) = (change.pending.role, change.seq);
        let waiter = Arc::clone(&change.pending.waiter);
        let now = self.clock.monotonic();
        match outcome {
            Outcome::Busy {} => restore.busy(change.pending),
            Outcome::Failed { errno: libc::ENOSPC } if role == Role::Awaited => {
                restore.lacks_space(change.pending);
            }
            Outcome::Failed { errno } => {
                change.advance(Stage::Failed(Errno(errno)));
                waiter.answer(outcome, 0);
            }
            outcome if role.is_acknowledged() => {
                waiter.answer(outcome, 0);
                let mut state = self.state.lock();
                state.log.keep(change, now);
                state.logged(seq);
            }
            outcome => {
                // A program that hears of it may sync it at once.
                {
                    let mut state = self.state.lock();
                    if replay_log::is_made(&outcome) && role != Role::Restores {
                        state.log.keep_awaited(change, (&outcome, made), now);
                    }
                    state.logged(seq);
                }
                waiter.answer(outcome, 0);
            }
        }
    }

    /// Claims more of the inodes that the session has not claimed.
    fn claim_more(&self) {
        let mut state = self.state.lock();
        state.claim_more();
        state.pump();
    }

    /// The server has taken the leases of all epochs before this one away.
    pub(super) fn epoch_over(&self, epoch: u32, restore: &dyn Restore) {
        self.end_epoch(epoch, None, End::Fenced, restore).tell(Some(restore));
    }

    /// An epoch has ended before the unanswered changes, and before `first`, which the server has
    /// not applied.
    fn end_epoch(
        &self,
        epoch: u32,
        first: Option<Change>,
        why: End,
        restore: &dyn Restore,
    ) -> Ended {
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if epoch <= state.changes.epoch() {
            let mut ended = Ended::default();
            if let Some(change) = first {
                ended.add(change, Stage::Withdrawn);
            }
            return ended;
        }
        if why == End::Fenced {
            cache.reservation.fenced();
        }
        // What was decided since is as wrong as what is lost.
        let held = cache.drop_held(self.cache.now());
        let to_forget = cache.take_to_forget();
        let (mut ended, last) = begin_epoch(&mut state, epoch, first, why, restore);
        let at_once = to_forget == ToForget::default();
        if at_once {
            state.give_back(&held, last);
        } else {
            cache.withdraw(&held);
        }
        state.pump();
        // Whether there is room or not: they are lost, or are sent.
        ended.held = std::mem::take(&mut state.held);
        drop(state);
        drop(cache);
        if !at_once {
            self.return_withdrawn(held, to_forget, last);
        }
        self.drained.notify_waiters();
        ended
    }

    /// Waits until the server has applied all early-acknowledged changes. If there is no
    /// connection, a `patient` caller waits for one as operations do.
    pub(in crate::client) async fn drained(&self, patient: bool) {
        self.until(|state| state.changes.early() == 0 || !patient && !state.phase.is_connected())
            .await;
    }

    /// Waits until there is a connection, in the same way.
    pub(in crate::client) async fn reached(&self) {
        self.until(|state| state.phase.is_connected()).await;
    }

    /// Makes all durable that was answered. An error: it may not be.
    pub(in crate::client) async fn synced_all(&self) -> Result<(), Errno> {
        let (tell, told) = oneshot::channel();
        let waiter = Arc::new(Told(Mutex::new(Some(tell))));
        self.request(Pending::new(Caller::default(), Op::Sync {}, waiter));
        told.await.unwrap_or(Err(Errno(libc::EIO)))
    }

    /// Waits until nothing is unanswered, and all is durable: also for a server that is away. No
    /// program asks for anything. An error: the session is over.
    pub(in crate::client) async fn at_rest(&self) -> Result<(), Errno> {
        loop {
            let synced = self.synced_all().await;
            {
                let state = self.state.lock();
                if let Phase::Closed { errno, .. } = &state.phase {
                    return Err(*errno);
                }
                if synced.is_ok() && state.is_at_rest() {
                    return Ok(());
                }
            }
            sleep(REST).await;
        }
    }

    async fn until(&self, is_so: impl Fn(&State) -> bool) {
        loop {
            let mut drained = std::pin::pin!(self.drained.notified());
            drained.as_mut().enable();
            {
                let state = self.state.lock();
                if is_so(&state) || self.errno(&state).is_some() {
                    return;
                }
            }
            crate::rt::select! {
                () = drained => {}
                () = self.overdue() => {}
            }
        }
    }
}
