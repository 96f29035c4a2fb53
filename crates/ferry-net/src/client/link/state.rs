//! What the lock of a [`super::Link`] protects: the session, its phase, and all that is queued or
//! in flight.

use crate::rt::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_env::Clock;
use ferry_fs::Ino;

use super::flow::Flow;
use super::ordered::Ordered;
use super::phase::Phase;
use super::restore::{Ended, Restore};
use super::unclaimed::Unclaimed;
use super::window::{FOR_REQUESTS, Outbox, Window};
use crate::client::carried::Session;
use crate::client::change::{Change, HeldAnswer, Pending, Waiter};
use crate::client::notes::{Noted, Notes, Ring, flag};
use crate::client::replay_log::{self, ReplayLog};
use crate::codec::List;
use crate::frame;
use crate::message::{BATCH_MAX, Behind, Claim, Op, Stream, ToServer};

/// Unanswered changes, and bytes of them, beyond which no program is answered before there is room.
const UNANSWERED_MAX: usize = 896;
const UNANSWERED_BYTES_MAX: usize = 24 << 20;
/// The same, as the age of the oldest of them.
const UNANSWERED_AGE_MAX: Duration = Duration::from_secs(3);
/// Inodes of a claim that no operation waits for. What programs ask for meanwhile stands behind
/// one of these at most. The server may have to read each of them, from a store that is far.
const CLAIM_BATCH: usize = 32;

pub(super) struct Request {
    pub(super) pending: Pending,
    /// It is answered behind this change.
    pub(super) after: u64,
    /// And behind all changes of the inode that it names, up to this one.
    pub(super) covers: u64,
    pub(super) units: usize,
    pub(super) cancelled: bool,
}

/// A change that a process has left that was killed.
pub(in crate::client) struct LeftChange {
    pub(in crate::client) pending: Pending,
    pub(in crate::client) epoch: u32,
    /// The server has ended because of it.
    pub(in crate::client) is_fatal: bool,
}

/// Requests without answers.
pub(super) struct Requests {
    next: u64,
    pub(super) by_id: BTreeMap<u64, Request>,
    /// Those that are not sent yet: behind changes that are not sent, or without room.
    delayed: Vec<u64>,
    /// All requests are answered behind this change.
    pub(super) after: u64,
    /// Requests for space are answered behind this change, which says how much of the reservation
    /// is left. What they add is not counted there.
    pub(super) remaining: u64,
}

pub(super) struct State {
    pub(super) session: u128,
    pub(super) boot: u128,
    pub(super) read_only: bool,
    pub(super) phase: Phase,
    pub(super) changes: Ordered,
    /// Changes that are answered and not durable.
    pub(super) log: ReplayLog,
    /// Inodes that the kernel knows and the session does not yet.
    pub(super) unclaimed: Unclaimed,
    /// Answers to early-acknowledged changes that wait for room in the window.
    pub(super) held: Vec<HeldAnswer>,
    /// The newest change behind which leases were returned: the server waits for it.
    pub(super) returned: u64,
    pub(super) requests: Requests,
    pub(super) window: Window,
    /// How much the newest connection carries.
    pub(super) flow: Option<Arc<Flow>>,
    pub(super) outbox: Outbox,
    pub(super) reconnects: u64,
    /// Early-acknowledged changes were lost, once at least.
    pub(super) lossy: bool,
    /// How often locks were lost, which may have been to protect any file.
    pub(super) locks_lost: Arc<AtomicU64>,
    clock: Arc<dyn Clock>,
    /// Where all this is noted for the next process, if one may go on.
    notes: Option<Arc<Notes>>,
}

/// Abandons those of these that change something.
fn abandon<'c>(changes: impl Iterator<Item = &'c mut Change>) -> Vec<Arc<dyn Waiter>> {
    let mut waiters = Vec::new();
    for change in changes.filter(|change| replay_log::matters(&change.pending.op)) {
        if !change.is_abandoned() && change.abandon() {
            waiters.push(Arc::clone(&change.pending.waiter));
        }
    }
    waiters
}

impl State {
    pub(super) fn new(clock: Arc<dyn Clock>, notes: Option<Arc<Notes>>) -> Self {
        let (by_id, delayed) = (BTreeMap::new(), Vec::new());
        let mut this = Self {
            session: 0,
            boot: 0,
            read_only: false,
            phase: Phase::new(clock.monotonic()),
            changes: Ordered::behind(0, 0),
            log: ReplayLog::default(),
            unclaimed: Unclaimed::default(),
            held: Vec::new(),
            returned: 0,
            requests: Requests { next: 1, by_id, delayed, after: 0, remaining: 0 },
            window: Window::default(),
            flow: None,
            outbox: Outbox::default(),
            reconnects: 0,
            lossy: false,
            locks_lost: Arc::default(),
            clock,
            notes,
        };
        this.note_changes();
        this
    }

    /// From now on changes are noted, if a process may go on.
    fn note_changes(&mut self) {
        if let Some(notes) = &self.notes {
            self.changes.note_in(Ring::new(Arc::clone(notes)));
        }
    }

    /// One of the facts of [`flag`] is so, or not.
    pub(super) fn note_flag(&self, flag: u64, on: bool) {
        if let Some(notes) = &self.notes {
            notes.set_flag(flag, on);
        }
    }

    /// The same of whether all was claimed.
    pub(super) fn note_unclaimed(&self) {
        let is_unclaimed = !self.unclaimed.is_empty() || self.unclaimed.in_flight() > 0;
        self.note_flag(flag::UNCLAIMED, is_unclaimed);
    }

    /// The session is noted, with the numbers that its changes have now.
    pub(super) fn commit_notes(&mut self) {
        let durable = self.log.all_durable().unwrap_or(0);
        self.changes.commit_notes((self.session, self.boot), durable);
    }

    /// The answer to this change says what the log has to have: the log has that now.
    pub(super) fn logged(&mut self, seq: u64) {
        self.log.logged(seq);
        self.note_durable();
    }

    /// Changes that touch the inode, up to this one, are durable.
    pub(super) fn synced(&mut self, ino: Ino, seq: u64) {
        self.log.synced(ino, seq);
        self.note_durable();
    }

    /// If all that was answered is durable, that is noted.
    pub(super) fn note_durable(&mut self) {
        if let Some(durable) = self.log.all_durable() {
            self.changes.note_durable(durable);
        }
    }

    /// The session that the process before had at rest.
    pub(super) fn resume(&mut self, of: &Session) {
        (self.session, self.boot) = (of.id, of.boot);
        (self.read_only, self.lossy) = (of.read_only, of.lossy);
        self.changes = Ordered::behind(of.newest, of.epoch);
        self.note_changes();
        self.log.advance(of.newest);
        self.log.begin_behind(of.newest);
        self.requests.next = of.next_request;
        self.note_flag(flag::READ_ONLY, of.read_only);
        self.note_flag(flag::LOSSY, of.lossy);
        self.note_flag(flag::RESERVED, of.has_reserved);
        if of.has_reserved {
            self.say_what_is_left(Op::Remaining { bytes: 0, inodes: 0 });
        }
        self.commit_notes();
    }

    /// The session of a process that was killed, with what it had not heard of.
    pub(super) fn resume_left(&mut self, of: &Noted, left: Vec<LeftChange>, claims: Vec<Claim>) {
        let is_set = |flag: u64| of.flags & flag != 0;
        (self.session, self.boot) = (of.base.session, of.base.boot);
        (self.read_only, self.lossy) = (is_set(flag::READ_ONLY), is_set(flag::LOSSY));
        self.changes = Ordered::behind(of.base.answered, of.base.epoch);
        self.note_changes();
        self.requests.next = of.next_number();
        let mut claims_in_flight = 0;
        for LeftChange { pending, epoch, is_fatal } in left {
            claims_in_flight += usize::from(matches!(pending.op, Op::Claim { .. }));
            let (restores, is_acknowledged) =
                (pending.role.restores(), pending.role.is_acknowledged());
            if is_acknowledged {
                self.log.acknowledged(self.changes.last() + 1, &pending);
            }
            self.changes.push_left(Change::new(pending), epoch, is_fatal, self.clock.monotonic());
            if restores {
                self.requests.after = self.changes.last();
            }
        }
        self.log.was_left(of.base.answered, of.base.durable);
        if is_set(flag::CLEAN) {
            self.phase.set_clean();
        }
        self.unclaimed = Unclaimed::new(claims, claims_in_flight);
        for flag in [flag::READ_ONLY, flag::LOSSY, flag::RESERVED, flag::CLEAN] {
            self.note_flag(flag, is_set(flag));
        }
        self.note_unclaimed();
        if is_set(flag::RESERVED) {
            self.say_what_is_left(Op::Remaining { bytes: 0, inodes: 0 });
        }
        self.commit_notes();
    }

    /// The same for the process that comes next.
    pub(super) fn session(&self, early_acks: bool, has_reserved: bool) -> Session {
        Session {
            id: self.session,
            boot: self.boot,
            read_only: self.read_only,
            early_acks,
            lossy: self.lossy,
            has_reserved,
            newest: self.changes.last(),
            epoch: self.changes.epoch(),
            next_request: self.requests.next,
        }
    }

    /// Whether nothing is unanswered, and all that was answered is durable.
    pub(super) fn is_at_rest(&self) -> bool {
        matches!(self.phase, Phase::Active(_))
            && self.changes.len() == 0
            && self.requests.by_id.is_empty()
            && self.held.is_empty()
            && self.unclaimed.is_empty()
            && self.log.is_durable()
    }

    /// A new connection of the session: nothing was sent on it yet.
    pub(super) fn connect(&mut self, line: super::window::Line) {
        self.changes.disconnect();
        self.phase.connect(line);
        // Before anything is sent.
        self.note_flag(flag::CLEAN, false);
        self.window = Window::default();
        self.outbox.clear();
        self.requests.by_id.values_mut().for_each(|request| request.units = 0);
        self.requests.delayed = self.requests.by_id.keys().copied().collect();
        self.see_restored();
    }

    /// The session is restored when the changes that all requests stand behind are answered.
    pub(super) fn see_restored(&mut self) {
        self.phase.set_restored(self.is_restored());
    }

    fn is_restored(&self) -> bool {
        self.changes.answered() >= self.requests.after
    }

    /// Early-acknowledged changes are lost.
    pub(super) fn lose(&mut self, ended: &Ended, restore: &dyn Restore) {
        let lost: Vec<&Pending> = ended.lost().map(|change| &change.pending).collect();
        if !lost.is_empty() {
            self.lossy = true;
            self.note_flag(flag::LOSSY, true);
            restore.damaged(&lost);
        }
    }

    /// Whether a change would be applied on top of what was lost, and its program does not know.
    pub(super) fn is_damaged(&self, pending: &Pending, restore: Option<&dyn Restore>) -> bool {
        self.lossy && restore.is_some_and(|owner| owner.refuses(&pending.op, &pending.files))
    }

    /// Puts a change at the end of the stream; gives its number.
    pub(super) fn push(&mut self, pending: Pending) -> u64 {
        self.push_change(Change::new(pending))
    }

    /// The same with one that had a number before.
    pub(super) fn push_change(&mut self, change: Change) -> u64 {
        self.claim_for(&change.pending.op);
        let change = self.changes.push(change, self.clock.monotonic());
        if change.pending.role.is_acknowledged() {
            self.log.acknowledged(change.seq, &change.pending);
        }
        change.seq
    }

    /// A part of what restores a session.
    pub(super) fn push_restoring(&mut self, pending: Pending) {
        let role = pending.role.restoring();
        self.push(Pending { role, ..pending });
    }

    /// Says in the stream how much of the reservation is left.
    pub(super) fn say_what_is_left(&mut self, remaining: Op) {
        let seq = self.push(Pending::unattended(remaining));
        self.requests.remaining = seq;
        let requests = self.requests.by_id.values_mut();
        for request in requests.filter(|r| matches!(r.pending.op, Op::Reserve { .. })) {
            request.after = seq;
        }
    }

    /// No more programs may be answered before the server has applied their changes.
    pub(super) fn is_full(&self) -> bool {
        let (changes, bytes) = (self.changes.len(), self.changes.bytes());
        let carried = self.flow.as_ref().map_or(u64::MAX, |flow| flow.unanswered_max());
        let bytes_max = UNANSWERED_BYTES_MAX.min(usize::try_from(carried).unwrap_or(usize::MAX));
        let full =
            changes >= UNANSWERED_MAX || bytes >= bytes_max || self.log.is_full(changes, bytes);
        full || self.age() >= UNANSWERED_AGE_MAX
    }

    /// How long the oldest change has been waiting for its answer.
    pub(super) fn age(&self) -> Duration {
        let oldest = self.changes.oldest();
        oldest.map_or(Duration::ZERO, |since| self.clock.monotonic().saturating_sub(since))
    }

    /// A request is to be sent; gives its number.
    pub(super) fn ask(&mut self, pending: Pending) -> u64 {
        let id = self.requests.next;
        self.requests.next += 1;
        if matches!(pending.op, Op::Reserve { .. } | Op::Numbers {}) {
            self.note_flag(flag::RESERVED, true);
        }
        self.claim_for(&pending.op);
        let after = self.after_of(&pending).max(self.requests.after);
        let covers = self.changes.last();
        let request = Request { pending, after, covers, units: 0, cancelled: false };
        self.requests.by_id.insert(id, request);
        self.requests.delayed.push(id);
        // With what is claimed for it.
        if self.unclaimed.is_empty() {
            self.pump_requests();
        } else {
            self.pump();
        }
        id
    }

    /// The change behind which a request is answered.
    fn after_of(&self, pending: &Pending) -> u64 {
        let info = pending.op.info();
        let inodes = info.inodes().chain(info.from.and_then(|fh| pending.file(fh)));
        let newest = || inodes.map(|ino| self.changes.newest(ino)).max().unwrap_or(0);
        match info.stream {
            Stream::Requests(Behind::Inodes) => newest(),
            Stream::Requests(Behind::Early) => newest().max(self.changes.newest_early()),
            Stream::Requests(Behind::All) => self.changes.last(),
            Stream::Requests(Behind::Remaining) => self.requests.remaining,
            Stream::Changes => 0,
        }
    }

    /// The answers that were held back, if there is room now.
    pub(super) fn take_held(&mut self) -> Vec<HeldAnswer> {
        if self.is_full() { Vec::new() } else { std::mem::take(&mut self.held) }
    }

    /// Says that leases are returned behind `after`, which need not have been sent. If there is
    /// no connection, nothing is said: with the next greeting the server takes them back.
    pub(super) fn give_back(&mut self, inos: &[Ino], after: u64) {
        let Some(line) = self.phase.line() else { return };
        self.returned = self.returned.max(after);
        for batch in inos.chunks(BATCH_MAX) {
            let returned = ToServer::Returned { inodes: List(batch.to_vec()), after };
            line.send_first(frame::encode(&returned), ());
        }
    }

    /// Sends a message behind all before it.
    pub(super) fn send(&mut self, message: &ToServer) {
        if let Some(line) = self.phase.line() {
            self.outbox.put(line, frame::encode(message), true);
        }
    }

    /// Changes of a file that are not sent yet are to fail: what waits for them.
    pub(super) fn abandon_unsent(&mut self, ino: Ino) -> Vec<Arc<dyn Waiter>> {
        let of_file = |change: &&mut Change| {
            let Pending { touched, files, .. } = &change.pending;
            touched.contains(&ino) || files.iter().any(|(_, file)| *file == ino)
        };
        abandon(self.changes.unsent_mut().filter(of_file))
    }

    /// Changes that wait here for something that they lack are to fail.
    pub(super) fn lose_locks(&self) {
        self.locks_lost.fetch_add(1, Ordering::Relaxed);
    }

    /// A lock is lost. All changes without an answer are to fail: the server applies none of them.
    /// So are those that wait here for something that they lack.
    pub(super) fn abandon_unanswered(&mut self) -> Vec<Arc<dyn Waiter>> {
        self.lose_locks();
        abandon(self.changes.unanswered_mut())
    }

    /// Sends the changes that are due and that the window has room for, and the requests.
    pub(super) fn pump(&mut self) {
        let Some(line) = self.phase.line() else { return };
        let window = &mut self.window;
        while let Some((frame, is_urgent)) =
            self.changes.send_next(|op, len| window.take(op, len, FOR_REQUESTS))
        {
            self.outbox.put(line, frame, is_urgent);
        }
        self.pump_requests();
    }

    /// Sends the requests whose changes were sent. So the server, which takes a limited number of
    /// messages, never has a request that waits for a change that cannot arrive.
    pub(super) fn pump_requests(&mut self) {
        let Some(line) = self.phase.line() else { return };
        let (window, outbox, sent) = (&mut self.window, &mut self.outbox, self.changes.sent());
        let Requests { by_id, delayed, .. } = &mut self.requests;
        delayed.retain(|id| {
            let Some(Request { pending, after, units, cancelled, .. }) = by_id.get_mut(id) else {
                return false;
            };
            if *after > sent {
                return true;
            }
            let frame = frame::encode_request(*id, *after, pending.caller, &pending.op);
            // A request for a lock may wait for long, so it takes no room.
            if !matches!(pending.op, Op::Lock { .. }) {
                let Some(taken) = window.take(&pending.op, frame.len(), (0, 0)) else {
                    return true;
                };
                *units = taken;
            }
            if matches!(pending.op, Op::Settled {}) {
                // Other clients wait for it.
                line.send_first(frame, ());
            } else {
                outbox.put(line, frame, true);
            }
            if *cancelled {
                outbox.put(line, frame::encode(&ToServer::Cancel { id: *id }), true);
            }
            false
        });
    }

    /// Claims what an operation names, in front of it.
    pub(super) fn claim_for(&mut self, op: &Op) {
        if !self.unclaimed.is_empty() {
            let claims: Vec<Claim> =
                op.info().inodes().filter_map(|ino| self.unclaimed.take(ino)).collect();
            claims.chunks(BATCH_MAX).for_each(|claims| self.claim(claims.to_vec()));
        }
    }

    /// Requests that name these inodes are answered behind it.
    fn claim(&mut self, claims: Vec<Claim>) {
        let touched = claims.iter().map(|claim| claim.ino).collect();
        let op = Op::Claim { inodes: List(claims) };
        self.unclaimed.begin();
        self.push_restoring(Pending { touched, ..Pending::unattended(op) });
    }

    /// Claims more, when the session is restored and all claims are answered.
    pub(super) fn claim_more(&mut self) {
        if !self.is_restored() || self.unclaimed.in_flight() > 0 {
            return;
        }
        let claims = self.unclaimed.next(CLAIM_BATCH);
        if !claims.is_empty() {
            self.claim(claims);
        }
    }
}
