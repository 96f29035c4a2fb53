//! The ordered stream of a session: changes come in, answers go out (SESSION-1, SESSION-2).

use ferry_env::planted::{Bug, is_planted};
use ferry_fs::{Ino, ROOT};

use super::change::{Applied, Change, Room, Violation};
use super::link::send;
use super::state::{Delayed, Session, UnderWay, Worker};
use crate::codec::List;
use crate::frame;
use crate::message::{Outcome, ToClient, WINDOW_OPS};
use crate::server::leases::Leases;

/// An answer waits for others until there are so many,
const OUTBOX_ANSWERS_MAX: usize = 64;
/// or until they have so many bytes.
const OUTBOX_BYTES_MAX: usize = 32 << 10;
/// A client returns leases behind changes that are at most so many ahead of what has arrived.
const AHEAD_MAX: u64 = 1 << 17;

impl Session {
    /// Takes a change in; `true`: the caller has to call [`Session::next`] until it returns
    /// nothing.
    pub(in crate::server) fn push(
        &self,
        connection: u64,
        change: Change,
        leases: &Leases,
    ) -> Result<bool, Violation> {
        let mut state = self.state.lock();
        if self.is_over() {
            return Err(Violation("the session has ended"));
        }
        if state.connection != connection || self.phase().is_draining() {
            return Ok(false); // SESSION-3; and after a goodbye it goes to the next server
        }
        let answered = change.answered;
        if answered > state.applied || change.seq.saturating_sub(answered) > WINDOW_OPS as u64 {
            return Err(Violation(
                "answers that were not given, or more changes than the window holds",
            ));
        }
        while state.answers.front().is_some_and(|(seq, ..)| *seq <= answered) {
            state.answers.pop_front();
        }
        let seq = change.seq;
        if seq <= state.applied && is_planted(Bug::AppliedTwice) {
            return Ok(state.enqueue(change));
        }
        if seq <= state.applied {
            // The connection began with that answer.
            let has_answer = state.answers.front().is_some_and(|(first, ..)| *first <= seq);
            return if has_answer {
                Ok(false)
            } else {
                Err(Violation("a change again whose answer had arrived"))
            };
        }
        if seq <= state.received {
            return Ok(false); // in the queue: it is answered on the newest connection
        }
        if seq != state.received + 1 {
            return Err(Violation("a gap in the changes"));
        }
        if change.epoch > leases.epoch(self.number) {
            return Err(Violation("an epoch of changes that has not begun"));
        }
        if state.progress.changes_left > 0 {
            state.progress.changes_left -= 1;
            if change.early.is_some() || change.op.info().restores {
                (state.progress.at, state.progress.newest) = (change.arrived, seq);
            }
        }
        (state.received, state.unheard_welcome) = (seq, None);
        Ok(state.enqueue(change))
    }

    /// The next change to apply; `None`: there is none, and the applying thread ends.
    pub(in crate::server) fn next(&self) -> Option<Change> {
        let mut state = self.state.lock();
        let change = if self.is_over() { None } else { state.queue.pop_front() };
        state.worker = change.as_ref().map_or(Worker::Idle, |change| {
            Worker::Applying(UnderWay { arrived: change.arrived, bytes: change.bytes })
        });
        state.queued -= change.as_ref().map_or(0, |change| change.bytes);
        change
    }

    /// The change that is being applied has to wait for the grace-period barrier.
    pub(in crate::server) fn wait_at_barrier(&self) {
        let mut state = self.state.lock();
        let Worker::Applying(change) = state.worker else {
            panic!("no change is being applied: {:?}", state.worker);
        };
        state.worker = Worker::AtBarrier(change);
    }

    /// That barrier is open.
    pub(in crate::server) fn pass_barrier(&self) {
        let mut state = self.state.lock();
        let Worker::AtBarrier(change) = state.worker else {
            panic!("no change waits at the barrier: {:?}", state.worker);
        };
        state.worker = Worker::Applying(change);
    }

    /// A change has been applied. If it was acknowledged early, the answer may wait for those of
    /// the changes behind it.
    pub(in crate::server) fn applied(
        &self,
        seq: u64,
        applied: Applied,
        room: Room,
        is_early: bool,
    ) {
        self.answer(seq, applied, Some(room), is_early);
    }

    /// The next change has to wait: the answers so far are sent now.
    pub(in crate::server) fn send_answers(&self) {
        send(&mut self.state.lock(), Vec::new(), None);
    }

    /// The server ends because of a change: the client must not send that again.
    pub(in crate::server) fn send_fatal(&self, seq: u64, room: Option<Room>) {
        send(&mut self.state.lock(), frame::encode(&ToClient::Fatal { seq }), room);
    }

    /// Applying a change has panicked, before or after its answer.
    pub(in crate::server) fn answer_panicked(&self, seq: u64, outcome: Outcome) {
        self.answer(seq, Applied::alone(outcome), None, false);
    }

    fn answer(&self, seq: u64, applied: Applied, room: Option<Room>, patient: bool) {
        let Applied { outcome, after, empty, made } = applied;
        let ready: Vec<Delayed> = {
            let mut state = self.state.lock();
            if self.is_over() || state.applied >= seq {
                return;
            }
            state.applied = seq;
            let (after, copy) = (List(after), (seq, outcome.clone(), made.clone()));
            let frame = frame::encode(&ToClient::Changed { seq, after, empty, made, outcome });
            state.answers.push_back(copy);
            let (answers, rooms) = &mut state.outbox;
            answers.extend_from_slice(&frame);
            rooms.extend(room);
            let full = answers.len() >= OUTBOX_BYTES_MAX || rooms.len() >= OUTBOX_ANSWERS_MAX;
            if full || !patient || state.queue.is_empty() {
                send(&mut state, Vec::new(), None);
            }
            state.delayed.extract_if(.., |d| d.after <= seq).collect()
        };
        ready.into_iter().for_each(|d| (d.run)());
    }

    /// Runs `run` when the change `after` has been applied.
    pub(in crate::server) fn when_applied(&self, after: u64, run: Box<dyn FnOnce() + Send>) {
        {
            let mut state = self.state.lock();
            if after > state.applied && !self.is_over() {
                state.delayed.push(Delayed { after, run });
                return;
            }
        }
        run();
    }

    /// The client has returned leases behind the change `after`. If an older connection brings
    /// this, it is about leases that have ended or are recalled again.
    pub(in crate::server) fn returned(
        &self,
        connection: u64,
        (inodes, after): (&[Ino], u64),
        leases: &Leases,
    ) -> Result<(), Violation> {
        let mut state = self.state.lock();
        if state.connection != connection || !self.phase().takes_messages() {
            return Ok(());
        }
        if after > state.received.saturating_add(AHEAD_MAX) {
            return Err(Violation("leases that are given back behind a change that is far ahead"));
        }
        state.owed = state.owed.max(after);
        let volume_ino = |ino: &Ino| if *ino == ROOT { self.root } else { *ino };
        let inodes: Vec<Ino> = inodes.iter().map(volume_ino).collect();
        // Whatever the client says: the leases count until all changes that have arrived are
        // applied.
        let after = after.max(state.received);
        leases.give_back(self.number, &inodes, (after > state.applied).then_some(after));
        Ok(())
    }

    /// Whether the client has returned leases behind a change that has not arrived.
    pub(in crate::server) fn owes_changes(&self) -> bool {
        let state = self.state.lock();
        state.owed > state.received
    }

    /// Whether a change is being applied, or waits to be.
    pub(in crate::server) fn is_applying(&self) -> bool {
        self.state.lock().worker != Worker::Idle
    }

    /// The same, but not if the change waits for the replay of other clients.
    pub(in crate::server) fn is_busy(&self) -> bool {
        matches!(self.state.lock().worker, Worker::Starting | Worker::Applying(_))
    }
}
