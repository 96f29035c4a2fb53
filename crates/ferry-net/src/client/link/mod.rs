//! The way to the server: operations that wait for their answers, and the connection, which is made
//! again when it is lost.
//!
//! * LINK-1: a change keeps its number until it is answered or its session ends. After a
//!   reconnect to the same session everything unanswered is sent again, in order.
//! * LINK-2: if a program has stopped waiting for an operation, it is not applied, unless it was
//!   applied before: `Nothing` is sent in its place. Two kinds of operations are applied in any
//!   case: those that give something back (a lock, an open file), and those that restore a session.
//! * LINK-3: if the session has ended, changes that were never sent go to the new one, behind what
//!   restores its state. A change that was sent goes there, too, if it was not applied, if a second
//!   time makes no difference (`replay_log::Unanswered`), or after a goodbye. Else it fails with
//!   `EIO`: it may have been applied. Early-acknowledged changes are replayed, with the answered
//!   ones that are not durable (`replay_log`); or they are lost, and programs are told (`losses`).
//! * LINK-4: `answer`, `fail` and `moved` are called without the lock held, and nothing that has a
//!   [`Touch`] is dropped under it.
//!
//! Layers; each uses those below it:
//!
//! ```text
//!  connection          greeting, reading, pings, reconnecting
//!  early_ack           answers to changes, leases that are returned
//!  mod (Link)          what the file system calls
//!  epoch    anew       the end of an epoch; a new session
//!  state               all that the lock protects
//!  restore             what the file system is asked and told
//!  ordered  phase  window  unclaimed  flow
//! ```
//!
//! [`Touch`]: super::cache::Touch

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Clock;
use ferry_fs::{Errno, Ino, ToForget};
use serde_json::Value;
use tokio::sync::Notify;

use self::restore::Restore;
pub(super) use self::state::LeftChange;
use self::state::State;
use super::cache::Cache;
use super::carried::Session;
use super::change::{Key, Pending, Role, Waiter};
use super::kernel::Kernel;
use super::notes::{Noted, Notes, flag};
use super::replay_log;
use crate::message::{Claim, Numbers, Op, ToServer};
use crate::transport::Connector;

mod anew;
pub(super) mod connection;
mod early_ack;
mod epoch;
mod flow;
mod ordered;
mod phase;
pub(super) mod restore;
mod state;
mod unclaimed;
mod window;

/// The way to one server.
pub(super) struct Link {
    connector: Arc<dyn Connector>,
    clock: Arc<dyn Clock>,
    path: Vec<u8>,
    name: Vec<u8>,
    /// How long operations wait for a server that cannot be reached.
    timeout: Duration,
    cache: Arc<Cache>,
    kernel: Arc<Kernel>,
    this: Weak<Link>,
    state: Mutex<State>,
    /// What the kernel was told by the process before.
    inherited: Mutex<ToForget>,
    owner: Mutex<Option<Arc<dyn Restore>>>,
    /// The state's. It rises under the state's lock.
    locks_lost: Arc<AtomicU64>,
    /// The mount may acknowledge changes early.
    has_early_acks: AtomicBool,
    closed: Notify,
    ended: Notify,
    /// Notified when no early-acknowledged change is unanswered, and when the phase changes.
    drained: Notify,
}

impl Link {
    pub(super) fn new(
        connector: Arc<dyn Connector>,
        clock: Arc<dyn Clock>,
        (path, name): (Vec<u8>, Vec<u8>),
        timeout: Duration,
        (cache, kernel): (Arc<Cache>, Arc<Kernel>),
        notes: Option<Arc<Notes>>,
    ) -> Arc<Self> {
        let state = State::new(Arc::clone(&clock), notes);
        let locks_lost = Arc::clone(&state.locks_lost);
        Arc::new_cyclic(|this| Self {
            connector,
            clock,
            path,
            name,
            timeout,
            cache,
            kernel,
            this: this.clone(),
            state: Mutex::new(state),
            inherited: Mutex::default(),
            owner: Mutex::default(),
            locks_lost,
            has_early_acks: AtomicBool::new(false),
            closed: Notify::new(),
            ended: Notify::new(),
            drained: Notify::new(),
        })
    }

    /// Goes on with the session of the process before.
    pub(super) fn resume(&self, session: &Session, to_forget: ToForget) {
        self.must_be_recorded();
        self.state.lock().resume(session);
        *self.inherited.lock() = to_forget;
        self.set_early_acks(session.early_acks);
    }

    /// Goes on with the session of a process that was killed.
    pub(super) fn resume_left(&self, of: &Noted, left: Vec<LeftChange>, claims: Vec<Claim>) {
        self.must_be_recorded();
        {
            let mut cache = self.cache.lock();
            let mut left = left;
            for LeftChange { pending, .. } in &mut left {
                // Those that were acknowledged say what they touch.
                if pending.role == Role::Awaited {
                    pending.effect =
                        self.cache.begin(&mut cache, &pending.op, |fh| pending.file(fh));
                }
            }
            self.state.lock().resume_left(of, left, claims);
        }
        self.set_early_acks(of.flags & flag::EARLY_ACKS != 0);
    }

    /// The process before may have heard of a fence, and this one has not: so nothing is
    /// acknowledged early before the server has recorded the session.
    fn must_be_recorded(&self) {
        self.cache.lock().reservation.fenced();
    }

    /// This request waits for a change that was left.
    pub(super) fn wait_for(&self, seq: u64, waiter: Arc<dyn Waiter>) {
        if let Some(change) = self.state.lock().changes.get_mut(seq) {
            change.pending.waiter = waiter;
        }
    }

    /// The session, for the process that comes next.
    pub(super) fn session(&self) -> Session {
        let has_reserved = self.cache.lock().reservation.remaining().is_some();
        self.state.lock().session(self.has_early_acks(), has_reserved)
    }

    /// Sends a change behind all before it, or keeps it until it can be sent. Write leases on what
    /// it touches are returned behind it.
    pub(super) fn change(&self, mut pending: Pending) -> Option<Key> {
        debug_assert!(pending.op.is_ordered(), "{:?}", pending.op);
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if let Some(errno) = self.errno(&state) {
            let waiter = Arc::clone(&pending.waiter);
            // What gives something back reaches the server when it is there again, though nobody
            // waits for it.
            if !state.phase.is_closed() && pending.op.info().is_always_made {
                state.push(pending);
            }
            drop((state, cache));
            waiter.fail(errno);
            return None;
        }
        let is_damaged = || state.is_damaged(&pending, self.owner.lock().as_deref());
        if self.relies_on_lost_lock(&pending) || state.lossy && is_damaged() {
            drop((state, cache));
            pending.waiter.fail(Errno(libc::EIO));
            return None;
        }
        let mut returned = std::mem::take(&mut pending.borrowed);
        if let Op::Open { ino, .. } = &pending.op {
            pending.touched = vec![*ino];
        }
        pending.effect = self.cache.begin(&mut cache, &pending.op, |fh| pending.file(fh));
        if let Some(effect) = &mut pending.effect {
            pending.touched.clone_from(&effect.inos().to_vec());
            returned.extend(effect.take_held());
        }
        let seq = state.push(pending);
        if !returned.is_empty() {
            returned.sort_unstable();
            returned.dedup();
            cache.recall(&returned, false, self.cache.now());
            let to_forget = cache.take_to_forget();
            if to_forget == ToForget::default() {
                state.give_back(&returned, seq);
                cache.given_back();
                state.pump();
            } else {
                cache.withdraw(&returned);
                state.pump();
                drop((state, cache));
                self.return_withdrawn(returned, to_forget, seq);
            }
            return Some(Key::Change(seq));
        }
        state.pump();
        Some(Key::Change(seq))
    }

    /// How often this client has lost locks.
    pub(super) fn locks_lost(&self) -> u64 {
        self.locks_lost.load(Ordering::Relaxed)
    }

    /// Whether this client has lost a lock since a program asked for this change: the change may
    /// rely on that lock, whatever file it is of.
    pub(super) fn relies_on_lost_lock(&self, pending: &Pending) -> bool {
        pending.locks_lost < self.locks_lost() && replay_log::matters(&pending.op)
    }

    /// Sends a request, or keeps it until it can be sent.
    pub(super) fn request(&self, pending: Pending) -> Option<Key> {
        debug_assert!(!pending.op.is_ordered(), "{:?}", pending.op);
        let mut state = self.state.lock();
        if let Some(errno) = self.errno(&state) {
            drop(state);
            pending.waiter.refuse(errno);
            return None;
        }
        Some(Key::Request(state.ask(pending)))
    }

    /// The server has reserved inode numbers for this client.
    pub(super) fn numbered(&self, numbers: Numbers) {
        self.state.lock().log.add_numbers(numbers);
    }

    /// The kernel has forgotten an inode: a replay may need it. Whether the session knows it,
    /// or will.
    pub(super) fn remember(&self, claim: Claim) -> bool {
        let mut state = self.state.lock();
        let newest = state.changes.last();
        state.log.remember(claim, newest);
        state.unclaimed.take(claim.ino).is_none()
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&self, key: Key) {
        let mut state = self.state.lock();
        match key {
            Key::Change(seq) => {
                if let Some(change) = state.changes.get_mut(seq) {
                    change.abandon();
                }
            }
            Key::Request(id) => {
                if let Some(request) = state.requests.by_id.get_mut(&id) {
                    request.cancelled = true;
                    state.send(&ToServer::Cancel { id });
                }
            }
        }
    }

    /// A file is lost: changes of it that are not sent yet fail. Opening it anew is none.
    pub(super) fn fail_unsent(&self, ino: Ino) {
        let abandoned = self.state.lock().abandon_unsent(ino);
        abandoned.iter().for_each(|waiter| waiter.fail(Errno(libc::EIO)));
    }

    /// The error with which operations fail now, if they do.
    pub(super) fn unreachable(&self) -> Option<Errno> {
        self.errno(&self.state.lock())
    }

    /// The same.
    fn errno(&self, state: &State) -> Option<Errno> {
        state.phase.errno(self.clock.monotonic(), self.timeout)
    }

    /// What the server's first welcome says.
    pub(super) fn set_read_only(&self, read_only: bool) {
        self.state.lock().read_only = read_only;
    }

    /// Whether this mount may acknowledge changes early, as long as it lives.
    pub(super) fn set_early_acks(&self, may: bool) {
        self.has_early_acks.store(may, Ordering::Relaxed);
        self.state.lock().note_flag(flag::EARLY_ACKS, may);
    }

    /// Whether the server lets this client acknowledge changes early.
    pub(super) fn has_early_acks(&self) -> bool {
        self.has_early_acks.load(Ordering::Relaxed)
    }

    /// Whether the server lets this client change anything.
    pub(super) fn is_read_only(&self) -> bool {
        self.state.lock().read_only
    }

    /// The early-acknowledged changes that are not answered; an error if operations fail now.
    pub(super) fn early(&self) -> Result<usize, Errno> {
        let state = self.state.lock();
        match (state.changes.early(), self.errno(&state)) {
            (0, _) => Ok(0),
            (_, Some(errno)) => Err(errno),
            (early, None) => Ok(early),
        }
    }

    /// For `ferry stats`.
    pub(super) fn json(&self) -> Value {
        let state = self.state.lock();
        let (changes, bytes, oldest) = state.log.figures(self.clock.monotonic());
        let protocol = state.phase.line().map(|line| line.protocol().version());
        Value::from_iter([
            ("replay_log_changes", Value::from(changes)),
            ("replay_log_bytes", bytes.into()),
            ("replay_log_oldest_ms", oldest.map(|age| age.as_millis() as u64).into()),
            ("connected", Value::from(state.phase.is_connected())),
            ("protocol", protocol.into()),
            ("refused", state.phase.refusal().cloned().into()),
            ("reconnects", state.reconnects.into()),
            ("changes", state.changes.last().into()),
            ("unanswered_changes", state.changes.len().into()),
            ("unanswered_ms", (state.age().as_millis() as u64).into()),
            ("unanswered_requests", state.requests.by_id.len().into()),
            ("early_acknowledged", state.changes.early().into()),
            ("epoch", state.changes.epoch().into()),
            ("lost_locks", self.locks_lost().into()),
            ("unclaimed", state.unclaimed.len().into()),
            ("bytes_in_flight", state.flow.as_ref().map(|flow| flow.figures().0).into()),
            ("bytes_in_flight_max", state.flow.as_ref().map(|flow| flow.figures().1).into()),
        ])
    }
}

#[cfg(test)]
mod tests;
