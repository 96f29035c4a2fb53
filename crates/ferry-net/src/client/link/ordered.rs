//! The ordered stream of a session: changes that have a sequence number and no answer.
//!
//! The numbers up to `answered` have answers. Those up to `sent` were sent on this connection. The
//! rest waits for room in the window.

use crate::rt::collections::{BTreeMap, HashMap};
use std::time::Duration;

use ferry_fs::Ino;

use crate::client::change::{Change, Role, Stage};
use crate::client::notes::Ring;
use crate::frame;
use crate::message::{Op, Outcome, WINDOW_OPS};

pub(super) struct Ordered {
    changes: BTreeMap<u64, Box<Change>>,
    /// The number of the next change.
    next: u64,
    answered: u64,
    sent: u64,
    epoch: u32,
    /// The newest change of each inode that has any here.
    newest: HashMap<Ino, u64>,
    /// Early-acknowledged changes among them, and the newest of these.
    early: usize,
    newest_early: u64,
    /// Bytes of memory that the data of all changes occupies.
    bytes: usize,
    /// Where they are noted for the next process, if one may go on.
    notes: Option<Ring>,
}

impl Ordered {
    /// Behind the change `last`, which is answered, in this epoch.
    pub(super) fn behind(last: u64, epoch: u32) -> Self {
        Self {
            changes: BTreeMap::new(),
            next: last + 1,
            answered: last,
            sent: last,
            epoch,
            newest: HashMap::default(),
            early: 0,
            newest_early: 0,
            bytes: 0,
            notes: None,
        }
    }

    /// The same; from now on the changes are noted there.
    pub(super) fn note_in(&mut self, notes: Ring) {
        self.notes = Some(notes);
    }

    /// The session is noted, and all changes with their numbers in it. `durable`: as in
    /// [`Self::note_durable`].
    pub(super) fn commit_notes(&mut self, (session, boot): (u128, u128), durable: u64) {
        if let Some(notes) = &mut self.notes {
            notes.commit((session, boot), (self.epoch, self.answered, durable));
        }
    }

    /// Of the answered changes up to this one, none is lost if the server crashes.
    pub(super) fn note_durable(&mut self, durable: u64) {
        if let Some(notes) = &mut self.notes {
            notes.durable(durable);
        }
    }

    /// The server has ended because of this change.
    pub(super) fn note_fatal(&mut self, seq: u64) {
        if let (Some(notes), Some(change)) = (&self.notes, self.changes.get(&seq)) {
            notes.set_fatal(change.noted_at);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.changes.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The newest change with an answer.
    pub(super) fn answered(&self) -> u64 {
        self.answered
    }

    /// The newest change that was sent on this connection.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// The newest change that has a number; 0: none.
    pub(super) fn last(&self) -> u64 {
        self.next - 1
    }

    /// The newest change of an inode; 0: none is without an answer.
    pub(super) fn newest(&self, ino: Ino) -> u64 {
        self.newest.get(&ino).copied().unwrap_or(0)
    }

    /// The number of early-acknowledged changes.
    pub(super) fn early(&self) -> usize {
        self.early
    }

    pub(super) fn newest_early(&self) -> u64 {
        self.newest_early
    }

    pub(super) fn get_mut(&mut self, seq: u64) -> Option<&mut Change> {
        self.changes.get_mut(&seq).map(|change| &mut **change)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Change> {
        self.changes.values_mut().map(|change| &mut **change)
    }

    /// Changes that were not sent on this connection.
    pub(super) fn unsent_mut(&mut self) -> impl Iterator<Item = &mut Change> {
        self.changes.range_mut(self.sent + 1..).map(|(_, change)| &mut **change)
    }

    /// All that have no answer.
    pub(super) fn unanswered_mut(&mut self) -> impl Iterator<Item = &mut Change> {
        self.changes.values_mut().map(|change| &mut **change)
    }

    /// When the oldest change got its number.
    pub(super) fn oldest(&self) -> Option<Duration> {
        self.changes.first_key_value().map(|(_, oldest)| oldest.since)
    }

    /// Puts a change at the end; gives it with its number.
    pub(super) fn push(&mut self, mut change: Change, now: Duration) -> &Change {
        let seq = self.next;
        self.next += 1;
        change.queue(seq, self.epoch, now);
        if let Some(notes) = &mut self.notes {
            change.noted_at = notes.put((seq, self.epoch), &mut change.pending);
        }
        for ino in &change.pending.touched {
            self.newest.insert(*ino, seq);
        }
        if change.pending.role.is_acknowledged() {
            self.early += 1;
            self.newest_early = seq;
        }
        self.bytes += change.pending.bytes();
        self.changes.entry(seq).or_insert_with(|| Box::new(change))
    }

    /// The frame of the next change that is due, if `room` has units of the window for it (given
    /// the operation and the frame's length), and whether a program waits for the answer.
    pub(super) fn send_next(
        &mut self,
        room: impl FnOnce(&Op, usize) -> Option<usize>,
    ) -> Option<(Vec<u8>, bool)> {
        if self.sent + 1 - self.answered > WINDOW_OPS as u64 {
            return None;
        }
        let seq = self.sent + 1;
        let change = self.changes.get_mut(&seq)?;
        if change.is_abandoned() && change.stage() == Stage::Queued {
            // The server has never seen it, so nothing but `Nothing` can be applied.
            self.bytes -= change.pending.bytes();
            change.pending.op = Op::Nothing {};
        }
        let nothing = Op::Nothing {};
        let is_skipped = change.is_abandoned() || change.stage() == Stage::Fatal;
        let op = if is_skipped { &nothing } else { &change.pending.op };
        let position = (seq, self.answered, change.epoch);
        let frame =
            frame::encode_change(position, change.pending.decided, change.pending.caller, op);
        let units = room(op, frame.len())?;
        change.advance(Stage::Sent { units });
        self.sent = seq;
        Some((frame, !change.is_patient()))
    }

    /// A change that a process has left, in its epoch.
    pub(super) fn push_left(&mut self, change: Change, epoch: u32, is_fatal: bool, now: Duration) {
        let of_session = std::mem::replace(&mut self.epoch, epoch);
        let seq = self.push(change, now).seq;
        self.epoch = of_session;
        if let Some(change) = self.changes.get_mut(&seq) {
            change.was_left(is_fatal);
        }
        if is_fatal {
            self.note_fatal(seq);
        }
    }

    /// Takes out the change that is answered: the oldest.
    pub(super) fn answer(&mut self, seq: u64, outcome: &Outcome) -> Option<Change> {
        debug_assert_eq!(seq, self.answered + 1);
        let change = *self.changes.remove(&seq)?;
        if let Some(notes) = &mut self.notes {
            note_answer(notes, &change, outcome);
            let first = self.changes.first_key_value().map(|(_, first)| first.noted_at);
            notes.answered(seq, first);
        }
        self.answered = seq;
        self.sent = self.sent.max(seq);
        for ino in &change.pending.touched {
            if self.newest.get(ino) == Some(&seq) {
                self.newest.remove(ino);
            }
        }
        self.early -= usize::from(change.pending.role.is_acknowledged());
        self.bytes -= change.pending.bytes();
        Some(change)
    }

    /// The connection is closed: all changes have to be sent again.
    pub(super) fn disconnect(&mut self) {
        self.iter_mut().for_each(Change::disconnect);
        self.sent = self.answered;
    }

    /// An epoch has ended. Takes out all changes; the numbers up to `last` stay taken: the server
    /// has those changes, or gets `Nothing` in their place.
    pub(super) fn begin_epoch(&mut self, epoch: u32, last: u64) -> Vec<Change> {
        let changes = self.take_all();
        if let Some(notes) = &mut self.notes {
            notes.begin();
        }
        for change in changes.iter().filter(|change| change.seq <= last) {
            let mut nothing = change.placeholder();
            if let Some(notes) = &mut self.notes {
                nothing.noted_at = notes.put((nothing.seq, nothing.epoch), &mut nothing.pending);
            }
            self.changes.insert(nothing.seq, Box::new(nothing));
        }
        (self.epoch, self.next) = (epoch, last + 1);
        changes
    }

    /// A session begins behind the change `applied`.
    pub(super) fn begin_session(&mut self, epoch: u32, applied: u64) {
        debug_assert!(self.changes.is_empty(), "they belong to the session before");
        if let Some(notes) = &mut self.notes {
            notes.begin();
        }
        (self.epoch, self.answered, self.sent, self.next) = (epoch, applied, applied, applied + 1);
    }

    /// Takes out all changes.
    pub(super) fn take_all(&mut self) -> Vec<Change> {
        self.newest.clear();
        (self.early, self.newest_early, self.bytes) = (0, 0, 0);
        std::mem::take(&mut self.changes).into_values().map(|change| *change).collect()
    }
}

/// Notes what the program of a change is told, unless that is not decided yet.
fn note_answer(notes: &Ring, change: &Change, outcome: &Outcome) {
    let pending = &change.pending;
    let is_tried_again = match outcome {
        Outcome::Busy {} | Outcome::Dropped {} => true,
        Outcome::Failed { errno } => *errno == libc::ENOSPC && pending.role == Role::Awaited,
        _ => false,
    };
    let told = match &pending.outcome {
        Some(told) => told,
        None if is_tried_again => return,
        None => outcome,
    };
    if pending.request != 0 {
        notes.notes().answered(pending.request, pending.op.info().opens, told);
    }
}
