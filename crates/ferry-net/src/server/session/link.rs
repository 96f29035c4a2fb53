//! A session's connections. It outlives them, and only the newest one counts (SESSION-3).

use crate::rt::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::time::Duration;

use crate::rt::RwLockReadGuard;
use ferry_env::Clock;
use ferry_fs::{Ino, Timestamp};

use super::change::{Line, Room};
use super::phase::{CloseReason, Event};
use super::state::{Greeting, Link, Session, State, Worker};
use crate::codec::{List, Wire};
use crate::frame;
use crate::message::{Answered, BATCH_MAX, DirName, Former, IO_MAX, Outcome, ToClient};
use crate::server::leases::Leases;
use crate::server::locks::Locks;

/// Answers of so many bytes do not delay shorter ones.
const BULK_MIN: usize = 8 << 10;

impl Session {
    /// A new connection takes over: the `Welcome` is the first message on it. The client asks again
    /// for locks that it waited for. Returns the connection's number; `None`: the session has
    /// ended.
    pub(in crate::server) fn connect(
        &self,
        (line, from): (&Line, Option<SocketAddr>),
        greeting: &Greeting,
        (resumed, newest, former): (bool, u64, Option<Former>),
        (locks, leases): (&Locks, &Leases),
    ) -> Option<u64> {
        let _taking_over = self.locking.write();
        let mut state = self.state.lock();
        if self.is_over() {
            return None;
        }
        // If the session is taken up, its changes go on counting from the newest that the client
        // had numbered.
        let mark = state.unheard_welcome;
        if mark.is_some() {
            (state.received, state.applied) = (newest, newest);
        }
        let resumed = resumed && mark.is_none();
        // A new connection begins without leases.
        let epoch = leases.begin(self.number, self.client_id(from));
        let (session, read_only, applied) = (self.id, self.read_only, state.applied);
        let Greeting { boot, term_ms, clock } = greeting;
        let (boot, term_ms) = (*boot, *term_ms);
        let now = wall(&**clock);
        let early_acks = self.peer.limits.is_none();
        let welcome = ToClient::Welcome {
            session,
            boot,
            resumed,
            applied,
            durable: state.durable,
            read_only,
            early_acks,
            term_ms,
            epoch,
            now,
            mark,
            former,
        };
        line.send_first(frame::encode(&welcome), Vec::new());
        // Answers that the last connection may have lost: in order, and before newer ones.
        for (seq, outcome, made) in &state.answers {
            let (after, empty) = (List::default(), false);
            let (outcome, made) = (outcome.clone(), made.clone());
            let answer = ToClient::Changed { seq: *seq, after, empty, made, outcome };
            line.send_first(frame::encode(&answer), Vec::new());
        }
        state.connection += 1;
        state.outbox = (Vec::new(), Vec::new());
        state.link = Link::Connected(line.clone());
        (state.from, state.protocol) = (from, line.protocol());
        let connection = state.connection;
        self.transition(&mut state, Event::Welcomed);
        drop(state);
        locks.cancel(self.id, None);
        Some(connection)
    }

    /// The client across its sessions: its certificate or, if it has none, its address.
    fn client_id(&self, from: Option<SocketAddr>) -> u64 {
        let mut hasher = DefaultHasher::new();
        match from.map(|from| from.ip().to_canonical()) {
            _ if !self.peer.certificate.is_empty() => self.peer.certificate.hash(&mut hasher),
            Some(address) => address.hash(&mut hasher),
            None => self.number.hash(&mut hasher),
        }
        hasher.finish()
    }

    /// The connection with this number is closed, unless a newer one has taken over. Requests no
    /// longer wait for locks.
    pub(in crate::server) fn disconnect(&self, connection: u64, now: Duration, locks: &Locks) {
        let _leaving = self.locking.write();
        {
            let mut state = self.state.lock();
            if state.connection != connection {
                return;
            }
            state.link = Link::Away { since: now };
            state.outbox = (Vec::new(), Vec::new());
        }
        locks.cancel(self.id, None);
    }

    /// Ends the session. A change that is being applied is the last one, and its locks are held
    /// until then.
    pub(in crate::server) fn close(&self, reason: CloseReason, locks: &Locks) {
        self.close_if((reason, locks), |_| true, drop);
    }

    /// Ends the session if its client has been away since `deadline`. How far it had come is
    /// remembered before the client can find that it has ended.
    pub(in crate::server) fn close_if_away(
        &self,
        deadline: Duration,
        locks: &Locks,
        remember: impl FnOnce(Former),
    ) -> bool {
        let away = |state: &State| match state.link {
            Link::Away { since } => since <= deadline,
            Link::Silent | Link::Connected(_) => false,
        };
        let ended = |former: Option<Former>| {
            if let Some(former) = former {
                remember(former);
            }
        };
        self.close_if((CloseReason::Away, locks), away, ended)
    }

    fn close_if(
        &self,
        (reason, locks): (CloseReason, &Locks),
        condition: impl FnOnce(&State) -> bool,
        ended: impl FnOnce(Option<Former>),
    ) -> bool {
        let _ending = self.locking.write();
        {
            let mut state = self.state.lock();
            if !condition(&state) {
                return false;
            }
            self.transition(&mut state, Event::Close(reason));
            ended(state.take_former());
            state.link.hang_up();
            state.outbox = (Vec::new(), Vec::new());
            state.queue.clear();
            state.queued = 0;
            state.delayed.clear();
            state.removed_names = (VecDeque::new(), 0);
        }
        self.reservations.end();
        locks.cancel(self.id, None);
        true
    }

    /// The server stops: the session takes no more changes; those that it has are applied.
    pub(in crate::server) fn drain(&self) {
        self.transition(&mut self.state.lock(), Event::Drain);
    }

    /// The right of a connection to take a file lock, as long as the guard lives (`None`: the right
    /// of a change, on whatever connection it came).
    pub(in crate::server) fn locking_right(
        &self,
        connection: Option<u64>,
    ) -> Option<RwLockReadGuard<'_, ()>> {
        let locking = self.locking.read();
        let may = connection.map_or(!self.is_over(), |connection| self.is_at(connection));
        may.then_some(locking)
    }

    /// Answers a request of the connection with number `connection`. If a newer one has taken over,
    /// the client asks again there.
    pub(in crate::server) fn reply(
        &self,
        (connection, id): (u64, u64),
        leased: u8,
        outcome: Outcome,
        room: Option<Room>,
    ) {
        let mut state = self.state.lock();
        if state.connection != connection {
            return;
        }
        let is_bulk = matches!(
            outcome,
            Outcome::Data { .. } | Outcome::Listing { .. } | Outcome::Walked { .. }
        );
        let frame = frame::encode(&ToClient::Reply { id, leased, outcome });
        if is_bulk && frame.len() >= BULK_MIN {
            // A long answer must not delay other messages, such as a recall or the answer to a
            // ping.
            send(&mut state, Vec::new(), None);
            if let Link::Connected(line) = &state.link {
                line.send(frame, room.into_iter().collect());
            }
        } else {
            send(&mut state, frame, room);
        }
    }

    /// Asks the client to return leases. If there is no connection, the next one begins without
    /// leases.
    pub(in crate::server) fn recall(&self, inodes: impl Iterator<Item = Ino>) {
        let inodes = List(inodes.map(|ino| self.client_ino(ino)).collect());
        send(&mut self.state.lock(), frame::encode(&ToClient::Recall { inodes }), None);
    }

    /// Sends the last message to a client.
    pub(in crate::server) fn send_last(&self, message: &ToClient) {
        let mut state = self.state.lock();
        send(&mut state, frame::encode(message), None);
        state.link.hang_up();
    }
}

impl State {
    /// The session ends: how far it has come. `None`: its client has other numbers, or a change is
    /// under way, whose answer nobody gets; or that is too much for one message.
    fn take_former(&mut self) -> Option<Former> {
        let answers = std::mem::take(&mut self.answers).into_iter();
        if self.worker != Worker::Idle || self.unheard_welcome.is_some() {
            return None;
        }
        let answers = answers.map(|(seq, outcome, made)| Answered { seq, made, outcome }).collect();
        let former = Former { durable: self.durable, answers: List(answers) };
        let mut bytes = Vec::new();
        former.put(&mut bytes);
        (bytes.len() < IO_MAX).then_some(former)
    }
}

/// The messages that tell which names were removed.
pub(in crate::server) fn removed_names(names: &[DirName]) -> Vec<u8> {
    let messages =
        names.chunks(BATCH_MAX).map(|batch| ToClient::Removed { names: List(batch.to_vec()) });
    messages.flat_map(|message| frame::encode(&message)).collect()
}

/// The time of day.
pub(in crate::server) fn wall(clock: &dyn Clock) -> Timestamp {
    Timestamp(i128::try_from(clock.wall().as_nanos()).unwrap_or(i128::MAX))
}

/// Sends to the newest connection, if there is one, behind the answers that wait. A client that
/// comes back asks again.
pub(in crate::server) fn send(state: &mut State, frame: Vec<u8>, room: Option<Room>) {
    let (answers, mut rooms) = std::mem::take(&mut state.outbox);
    let Link::Connected(line) = &state.link else { return };
    rooms.extend(room);
    let frames = if answers.is_empty() { frame } else { [answers, frame].concat() };
    if !frames.is_empty() {
        line.send_first(frames, rooms);
    }
}
