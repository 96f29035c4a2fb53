//! Changes that were answered before the server has made them, and what becomes of them.
//!
//! * EARLY-ACK-1: a change is promised only under write leases on all that it touches, while there
//!   is a connection; decided, numbered and put into the stream in one piece (the cache's lock,
//!   then this one).
//! * EARLY-ACK-2: requests about an inode with unanswered changes are made behind the newest of
//!   them; leases are given back behind it too.
//! * EARLY-ACK-3: a promised change that fails ends its series. It is lost, and with it the
//!   unanswered promised changes that depend on it: those that touch an inode that a lost change
//!   touches. Their programs are told (`lost`). All other unanswered changes are sent again in the
//!   next series, under the same leases, which go back behind them. Where the session was fenced
//!   the leases are gone, and all unanswered promised changes are lost.
//! * EARLY-ACK-4: no more is unanswered than the window holds, and no more kept than is allowed:
//!   beyond it who asks has the answer when there is room again.
//! * EARLY-ACK-5: what is left of the space that was given is said in the stream (`Spare`),
//!   numbered in one piece with finding out; space is asked for behind that. Each connection begins
//!   with it, for the answer to such a question may be lost with the one before.

use crate::rt::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::rt::MutexGuard;
use crate::rt::time::sleep;
use ferry_fs::{Attr, Errno, Ino, ToForget};

use super::stream::{pump, pump_requests};
use super::{Change, Key, Link, Pending, Request, Restore, State, Waiter, Waiting, kept};
use crate::client::cache::{self, Touch};
use crate::client::waiting::Nobody;
use crate::codec::List;
use crate::frame;
use crate::message::{BATCH_MAX, Behind, Made, Op, Outcome, Stream, ToServer, Who};

/// Changes that nobody waits for are sent after this time, together.
const COMPANY_TIME: Duration = Duration::from_millis(3);
/// Unanswered changes, and bytes of them, beyond which nobody is answered before there is room.
const UNANSWERED_MAX: usize = 896;
const UNANSWERED_BYTES_MAX: usize = 24 << 20;
/// And the age of the oldest of them.
const UNANSWERED_AGE_MAX: Duration = Duration::from_secs(3);

impl State {
    /// Puts a change at the end of the stream.
    pub(super) fn push(&mut self, pending: Pending) -> u64 {
        let change = Change::new(pending, self.series);
        let Key::Change(seq) = self.push_again(change) else { unreachable!("it is a change") };
        seq
    }

    /// The same with one that was there before.
    pub(super) fn push_again(&mut self, change: Change) -> Key {
        self.claim_for(&change.pending.op);
        let seq = self.next_change;
        self.next_change += 1;
        let pending = &change.pending;
        for ino in &pending.touched {
            self.touching.insert(*ino, seq);
        }
        if pending.promised.is_some() {
            self.promised += 1;
            self.newest_promised = seq;
            self.kept.promised(seq, pending);
        }
        self.queued_bytes += pending.bytes();
        let since = self.clock.monotonic();
        let change = Change { sent: false, units: 0, series: self.series, since, ..change };
        self.changes.insert(seq, Box::new(change));
        Key::Change(seq)
    }

    /// All unanswered changes are taken out.
    pub(super) fn forget_changes(&mut self) {
        self.touching.clear();
        (self.promised, self.newest_promised, self.queued_bytes) = (0, 0, 0);
    }

    fn say_what_is_left(&mut self, spare: Op) {
        self.spare = self.push(Pending::new(Who::default(), spare, Arc::new(Nobody)));
        for request in
            self.requests.values_mut().filter(|r| matches!(r.pending.op, Op::Credit { .. }))
        {
            request.after = self.spare;
        }
    }

    /// A change is answered.
    fn answered(&mut self, seq: u64, change: &Change) {
        let pending = &change.pending;
        for ino in &pending.touched {
            if self.touching.get(ino) == Some(&seq) {
                self.touching.remove(ino);
            }
        }
        self.promised -= usize::from(pending.promised.is_some());
        self.queued_bytes -= pending.bytes();
        self.window.give(change.units);
    }

    /// No more may be answered before the server has made it.
    fn is_full(&self) -> bool {
        let (changes, bytes) = (self.changes.len(), self.queued_bytes);
        let carried = self.flow.as_ref().map_or(u64::MAX, |flow| flow.unanswered_max());
        let bytes_max = UNANSWERED_BYTES_MAX.min(usize::try_from(carried).unwrap_or(usize::MAX));
        let full =
            changes >= UNANSWERED_MAX || bytes >= bytes_max || self.kept.is_full(changes, bytes);
        full || self.age() >= UNANSWERED_AGE_MAX
    }

    /// How long the oldest change has been waiting for its answer.
    pub(super) fn age(&self) -> Duration {
        let oldest = self.changes.first_key_value().map(|(_, oldest)| oldest.since);
        oldest.map_or(Duration::ZERO, |since| self.clock.monotonic().saturating_sub(since))
    }

    /// A request is to be sent; gives its number.
    pub(super) fn ask(&mut self, pending: Pending) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.claim_for(&pending.op);
        let after = self.after_of(&pending).max(self.after);
        let covers = self.next_change - 1;
        self.requests.insert(id, Request { pending, after, covers, units: 0, cancelled: false });
        self.delayed.push(id);
        // With what is claimed for it.
        if self.unclaimed.is_empty() {
            pump_requests(self)
        } else {
            pump(self)
        }
        id
    }

    /// Those whose answers were held back, if there is room now.
    pub(super) fn take_held(&mut self) -> Vec<(Arc<Waiting>, Outcome)> {
        if self.is_full() { Vec::new() } else { std::mem::take(&mut self.held) }
    }

    fn newest(&self, ino: Ino) -> u64 {
        self.touching.get(&ino).copied().unwrap_or(0)
    }

    /// The change behind which a request is made.
    pub(super) fn after_of(&self, pending: &Pending) -> u64 {
        let info = pending.op.info();
        let inodes = info.inodes().chain(info.from.and_then(|fh| pending.file(fh)));
        let newest = || inodes.map(|ino| self.newest(ino)).max().unwrap_or(0);
        match info.stream {
            Stream::Requests(Behind::Inodes) => newest(),
            Stream::Requests(Behind::Early) => newest().max(self.newest_promised),
            Stream::Requests(Behind::All) => self.next_change - 1,
            Stream::Requests(Behind::Spare) => self.spare,
            Stream::Changes => 0,
        }
    }

    /// Says that leases are given back behind `after`, which need not have been sent. The next
    /// connection begins without that word: it is asked for again.
    pub(super) fn give_back(&mut self, inos: &[Ino], after: u64) {
        let Some(line) = &self.line else { return };
        self.returned = self.returned.max(after);
        for batch in inos.chunks(BATCH_MAX) {
            let returned = ToServer::Returned { inodes: List(batch.to_vec()), after };
            line.send_first(frame::encode(&returned), ());
        }
    }
}

/// Changes that are taken out of the stream.
pub(super) struct Gone {
    /// Somebody waits for them.
    pub(super) failed: Vec<Change>,
    /// Somebody waits for them, and they were made.
    pub(super) made: Vec<Change>,
    pub(super) promised: Vec<Change>,
    /// Nobody has to hear of them.
    pub(super) dropped: Vec<Change>,
    pub(super) moved: Vec<(Arc<dyn Waiter>, Key)>,
    /// There is room for them now.
    pub(super) held: Vec<(Arc<Waiting>, Outcome)>,
    pub(super) errno: Errno,
}

impl Gone {
    /// Those who wait hear this.
    pub(super) fn new(errno: Errno) -> Self {
        let (failed, made, promised, dropped) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { failed, made, promised, dropped, moved: Vec::new(), held: Vec::new(), errno }
    }

    pub(super) fn add(&mut self, change: Change) {
        if change.pending.promised.is_some() { &mut self.promised } else { &mut self.failed }
            .push(change);
    }

    /// Without the lock held.
    pub(super) fn tell(self, restore: &dyn Restore) {
        self.moved.into_iter().for_each(|(waiter, key)| waiter.moved(key));
        self.failed.iter().for_each(|change| change.pending.waiter.fail(self.errno));
        self.made.iter().for_each(|change| change.pending.waiter.answer(Outcome::Done {}, 0));
        if !self.promised.is_empty() {
            restore.lost(self.promised.into_iter().map(|change| change.pending).collect());
        }
        self.held.into_iter().for_each(|(waiting, outcome)| waiting.answer(outcome, 0));
    }
}

/// Why a series has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The server could not make a promised change. The session has its leases still.
    Refused,
    /// The server has taken the session's leases away.
    Fenced,
}

/// Leave to promise changes, while it lives.
pub(in crate::client) struct Promising<'l>(MutexGuard<'l, State>);

impl Promising<'_> {
    /// Promised changes were lost, once at least.
    pub(in crate::client) fn is_lossy(&self) -> bool {
        self.0.lossy
    }

    /// Puts a promised change into the stream; `true`: whoever asked for it has to wait for room.
    pub(in crate::client) fn promise(&mut self, pending: Pending) -> bool {
        debug_assert!(pending.promised.is_some());
        self.0.push(pending);
        pump(&mut self.0);
        self.0.is_full()
    }
}

impl Link {
    /// Leave to promise changes. The cache's lock is held.
    pub(in crate::client) fn promising(&self) -> Option<Promising<'_>> {
        let state = self.state.lock();
        let may = state.line.is_some() && state.over.is_none() && !state.read_only;
        may.then_some(Promising(state))
    }

    /// Gives back space that was not needed.
    pub(super) fn spare(&self) {
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if state.line.is_some()
            && state.over.is_none()
            && let Some(op) = cache.purse.spare()
        {
            state.say_what_is_left(op);
            pump(&mut state);
        }
    }

    /// Gives back all space: somebody lacks it. Not what is asked for just now.
    pub(in crate::client) fn spare_all(&self) {
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if state.line.is_some()
            && state.over.is_none()
            && let Some(op) = cache.purse.spare_all(self.cache.now())
        {
            state.say_what_is_left(op);
            pump(&mut state);
        }
    }

    /// A session goes on, on a new connection.
    pub(super) fn say_what_is_left(&self) {
        let cache = self.cache.lock();
        let mut state = self.state.lock();
        if let Some(op) = cache.purse.kept() {
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
        let State { line, outbox, .. } = &mut *state;
        if let Some(line) = line {
            outbox.send(line);
        }
    }

    /// Answers when there is room in the window.
    pub(in crate::client) fn hold(&self, waiting: Arc<Waiting>, outcome: Outcome) {
        let mut state = self.state.lock();
        if state.is_full() {
            return state.held.push((waiting, outcome));
        }
        drop(state);
        waiting.answer(outcome, 0);
    }

    /// Nothing of these is kept any more, and the server is told.
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
        let after = inos.iter().map(|ino| state.newest(*ino)).max().unwrap_or(0).max(after);
        state.give_back(inos, after);
        pump(&mut state);
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
            self.state.lock().kept.synced(ino, covers);
        }
    }

    /// Changes up to this one are durable.
    pub(in crate::client) fn durable(&self, seq: u64) {
        let held = {
            let mut state = self.state.lock();
            state.kept.advance(seq);
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
        let (mut change, differing, held, lazy) = {
            let mut cache = self.cache.lock();
            let mut state = self.state.lock();
            if seq <= state.answered {
                return Ok(true); // had come on the connection before
            }
            if seq != state.answered + 1 {
                return Err(frame::malformed());
            }
            state.answered = seq;
            state.sent = state.sent.max(seq);
            let change = *state.changes.remove(&seq).ok_or_else(frame::malformed)?;
            state.answered(seq, &change);
            let claims = matches!(change.pending.op, Op::Claim { .. });
            if claims {
                state.claimed();
            }
            let lazy = claims || !state.unclaimed.is_empty();
            // Where no newer change of ours is under way, this is how the inode is.
            let settled: Vec<Attr> =
                after.iter().filter(|attr| state.newest(attr.ino) == 0).copied().collect();
            pump(&mut state);
            let held = state.take_held();
            if state.promised == 0 {
                self.drained.notify_waiters();
            }
            drop(state);
            (change, cache.settle(&settled), held, lazy)
        };
        if let (Op::Claim { inodes }, Outcome::Count { count: stamp }) =
            (&change.pending.op, &outcome)
        {
            restore.claimed(&inodes.0, *stamp);
        }
        let blind = change.pending.touch.as_ref().is_some_and(Touch::is_blind);
        if blind {
            self.give_back(&differing);
        } else {
            differing.into_iter().for_each(|ino| restore.differs(ino));
        }
        let promised = change.pending.promised.is_some();
        if let Outcome::Failed { errno } = &outcome
            && promised
        {
            tracing::error!(
                errno,
                op = change.pending.op.info().what,
                "the server cannot make what was promised"
            );
        }
        // What cannot be made again ends no series: the rest does not depend on it, mostly.
        let broken = promised && !change.restores && matches!(outcome, Outcome::Failed { .. });
        if matches!(outcome, Outcome::Dropped {}) || broken {
            let why = if broken { End::Refused } else { End::Fenced };
            self.end_series(change.series + 1, Some(change), why, restore).tell(restore);
        } else {
            if let Some(touch) = change.pending.touch.take() {
                let surplus = self.cache.end(touch, &outcome, after, empty);
                self.give_back(&surplus);
            }
            let is_made = kept::is_made(&outcome);
            match outcome {
                Outcome::Busy {} => restore.busy(change.pending),
                Outcome::Failed { errno: libc::ENOSPC }
                    if !promised && !change.restores && !change.abandoned =>
                {
                    restore.lacks_space(change.pending);
                }
                outcome => {
                    let (now, waiter) =
                        (self.clock.monotonic(), Arc::clone(&change.pending.waiter));
                    match change.pending.promised {
                        Some(promised) => {
                            waiter.answer(outcome, 0);
                            if is_made {
                                self.state.lock().kept.keep(seq, change.pending, promised, now);
                            }
                        }
                        None => {
                            // Whoever hears of it may sync it at once.
                            if is_made && !change.restores {
                                let answer = (&outcome, made);
                                self.state.lock().kept.keep_waited(
                                    seq,
                                    change.pending,
                                    answer,
                                    now,
                                );
                            }
                            waiter.answer(outcome, 0);
                        }
                    }
                }
            }
        }
        held.into_iter().for_each(|(waiting, outcome)| waiting.answer(outcome, 0));
        // Behind what is said of a session that is restored: others wait for that.
        if lazy {
            self.claim_more();
        }
        Ok(true)
    }

    /// The server has taken the leases of all series before this one away.
    pub(super) fn series_over(&self, series: u32, restore: &dyn Restore) {
        self.end_series(series, None, End::Fenced, restore).tell(restore);
    }

    /// A series has ended before the unanswered changes, and before `first`, which the server has
    /// not made.
    fn end_series(
        &self,
        series: u32,
        first: Option<Change>,
        why: End,
        restore: &dyn Restore,
    ) -> Gone {
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        let mut gone = Gone::new(Errno(libc::EIO));
        if series <= state.series {
            gone.dropped.extend(first);
            return gone;
        }
        state.series = series;
        // The server waits for those that it was told of, sent or not.
        let sent = state.sent.max(state.returned);
        state.kept.end_series(sent);
        let changes = std::mem::take(&mut state.changes);
        state.next_change = sent + 1;
        state.forget_changes();
        // What was decided since is as wrong as what is lost.
        let held = cache.drop_held(self.cache.now());
        let to_forget = cache.take_to_forget();
        let mut again = Vec::new();
        let mut lost_inodes: HashSet<Ino> = HashSet::default();
        // The oldest place of a change that gets another one.
        let mut moved_from = None;
        let unanswered = changes.into_iter().map(|(seq, change)| (Some(seq), *change));
        for (seq, change) in first.map(|change| (None, change)).into_iter().chain(unanswered) {
            if let Some(seq) = seq.filter(|seq| *seq <= sent) {
                // Its place is taken: the server has it, or gets it again, and does not make it.
                let nothing = Pending::new(Who::default(), Op::Nothing {}, Arc::new(Nobody));
                let Change { sent, units, series, .. } = change;
                let change = Change { sent, units, ..Change::new(nothing, series) };
                state.changes.insert(seq, Box::new(change));
            }
            let promised = change.pending.promised.is_some();
            let touched = &change.pending.touched;
            let depends = why == End::Fenced
                || seq.is_none()
                || touched.iter().any(|i| lost_inodes.contains(i));
            match change.pending.op {
                _ if promised && depends => {
                    lost_inodes.extend(touched.iter().copied());
                    gone.promised.push(change);
                }
                // It was true in its place only.
                Op::Spare { .. } => gone.dropped.push(change),
                _ => {
                    moved_from.get_or_insert(seq.unwrap_or(0));
                    again.push(change);
                }
            }
        }
        state.lose(&mut gone, restore);
        for change in again {
            if change.pending.promised.is_none() && state.is_damaged(&change.pending, Some(restore))
            {
                gone.failed.push(change);
                continue;
            }
            let waiter = Arc::clone(&change.pending.waiter);
            let key = state.push_again(change);
            gone.moved.push((waiter, key));
        }
        // Places behind the newest are nobody's. What was behind a change that has another place
        // now is behind that.
        let newest = state.next_change - 1;
        let behind = |after: u64| match moved_from {
            Some(from) if after >= from => newest,
            _ => after.min(newest),
        };
        for request in state.requests.values_mut() {
            (request.after, request.covers) = (behind(request.after), request.covers.min(sent));
        }
        (state.after, state.spare) = (behind(state.after), state.spare.min(newest));
        let at_once = to_forget == ToForget::default();
        // What is sent again is made under them.
        let last = if why == End::Refused { newest } else { sent };
        if at_once {
            state.give_back(&held, last);
        } else {
            cache.withdraw(&held);
        }
        pump(&mut state);
        // Whether there is room or not: they are lost, or are sent.
        gone.held = std::mem::take(&mut state.held);
        drop(state);
        drop(cache);
        if !at_once {
            self.return_withdrawn(held, to_forget, last);
        }
        self.drained.notify_waiters();
        gone
    }

    /// Waits until the server has made all that was promised. If the connection is gone just now,
    /// who is `patient` waits for it as operations do.
    pub(in crate::client) async fn drained(&self, patient: bool) {
        self.until(|state| state.promised == 0 || !patient && state.line.is_none()).await;
    }

    /// Waits until there is a connection, in the same way.
    pub(in crate::client) async fn reached(&self) {
        self.until(|state| state.line.is_some()).await;
    }

    async fn until(&self, is_so: impl Fn(&super::State) -> bool) {
        loop {
            let mut drained = std::pin::pin!(self.drained.notified());
            drained.as_mut().enable();
            {
                let state = self.state.lock();
                if is_so(&state) || self.hopeless(&state).is_some() {
                    return;
                }
            }
            crate::rt::select! {
                () = drained => {}
                () = self.late() => {}
            }
        }
    }
}
