//! The changes of a session that have no answer, in their order: a ring in the words of [`Notes`].
//! Positions are counted on for ever, so none means two places; a place is the rest of its position
//! by the ring's size.
//!
//! ```text
//! words of a record    1 + its position (the key), words to the next record, number of its base,
//!                      whether the server has ended because of it, bytes of the change,
//!                      bytes of data behind it
//! ```
//!
//! Behind the last record is a key that is 0: what lies there may be data of a program.

use std::sync::Arc;

use ferry_fs::Ino;
use ferry_fs::known::{SharedWords, Words};

use super::memory::{Base, Notes, RING_AT, RING_FULL_AT, RING_WORDS, bytes_of};
use crate::client::change::{Pending, Role};
use crate::codec::{Input, Malformed, Wire};
use crate::message::{Acknowledged, Caller, Op, Outcome};

const HEAD_WORDS: u64 = 6;
const FATAL_AT: u64 = 3;

/// A change that a process has left.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::client) struct NotedChange {
    pub(in crate::client) seq: u64,
    pub(in crate::client) epoch: u32,
    /// The kernel's request that waits for it; 0: none.
    pub(in crate::client) request: u64,
    pub(in crate::client) role: Role,
    pub(in crate::client) caller: Caller,
    pub(in crate::client) decided: Option<Acknowledged>,
    pub(in crate::client) files: Vec<(u64, Ino)>,
    pub(in crate::client) touched: Vec<Ino>,
    /// What its program was told, or is to be told.
    pub(in crate::client) outcome: Option<Outcome>,
    pub(in crate::client) op: Op,
    /// The server has ended because of it.
    pub(in crate::client) is_fatal: bool,
}

fn role_as_number(role: Role) -> u8 {
    match role {
        // Whether a program still waits, the kernel says.
        Role::Awaited | Role::Abandoned => 0,
        Role::Acknowledged => 1,
        Role::Restores => 2,
        Role::Replayed { tolerant: false } => 3,
        Role::Replayed { tolerant: true } => 4,
    }
}

fn role_of(number: u8) -> Result<Role, Malformed> {
    match number {
        0 => Ok(Role::Awaited),
        1 => Ok(Role::Acknowledged),
        2 => Ok(Role::Restores),
        3 => Ok(Role::Replayed { tolerant: false }),
        4 => Ok(Role::Replayed { tolerant: true }),
        _ => Err(Malformed),
    }
}

/// Appends a change, without its data.
fn encode(out: &mut Vec<u8>, (seq, epoch): (u64, u32), pending: &Pending) {
    seq.put(out);
    epoch.put(out);
    pending.request.put(out);
    role_as_number(pending.role).put(out);
    pending.caller.put(out);
    pending.decided.put(out);
    (pending.files.len() as u32).put(out);
    for (fh, ino) in &pending.files {
        fh.put(out);
        ino.put(out);
    }
    (pending.touched.len() as u32).put(out);
    pending.touched.iter().for_each(|ino| ino.put(out));
    pending.outcome.is_some().put(out);
    if let Some(outcome) = &pending.outcome {
        outcome.put(out);
    }
    pending.op.put(out);
}

fn decode_change(bytes: &[u8]) -> Result<NotedChange, Malformed> {
    let mut input = Input::new(bytes);
    let input = &mut input;
    let (seq, epoch, request) = (u64::get(input)?, u32::get(input)?, u64::get(input)?);
    let (role, caller, decided) = (role_of(u8::get(input)?)?, Wire::get(input)?, Wire::get(input)?);
    let count = u32::get(input)?;
    let files = (0..count).map(|_| Ok((u64::get(input)?, u64::get(input)?)));
    let files = files.collect::<Result<_, Malformed>>()?;
    let count = u32::get(input)?;
    let touched = (0..count).map(|_| u64::get(input)).collect::<Result<_, Malformed>>()?;
    let (outcome, op) = (Wire::get(input)?, Wire::get(input)?);
    let is_fatal = false;
    Ok(NotedChange {
        seq,
        epoch,
        request,
        role,
        caller,
        decided,
        files,
        touched,
        outcome,
        op,
        is_fatal,
    })
}

/// Writes the ring. The lock of the link is held.
#[derive(Debug)]
pub(in crate::client) struct Ring<W = SharedWords> {
    notes: Arc<Notes<W>>,
    base: Base,
    /// Which of the two places it has.
    which: usize,
    /// The number of the base that new records have: that one, or the next one.
    number: u64,
    /// Where those records begin.
    begun: u64,
    next: u64,
    is_full: bool,
    bytes: Vec<u8>,
}

fn offset(position: u64) -> usize {
    RING_AT + position as usize % RING_WORDS
}

impl<W: Words> Ring<W> {
    /// In new memory.
    pub(in crate::client) fn new(notes: Arc<Notes<W>>) -> Self {
        Self::beginning_at(notes, 0)
    }

    pub(super) fn beginning_at(notes: Arc<Notes<W>>, first: u64) -> Self {
        let base = Base { first, ..Base::default() };
        let (which, number, is_full, bytes) = (0, 0, false, Vec::new());
        Self { notes, base, which, number, begun: first, next: first, is_full, bytes }
    }

    pub(in crate::client) fn notes(&self) -> &Arc<Notes<W>> {
        &self.notes
    }

    fn set(&self, position: u64, value: u64) {
        self.notes.memory.set(offset(position), value);
    }

    /// The bytes may go on at the ring's first word.
    fn set_bytes(&self, position: u64, bytes: &[u8]) {
        let at = offset(position);
        let (before, behind) = bytes.split_at(bytes.len().min((RING_AT + RING_WORDS - at) * 8));
        self.notes.memory.set_bytes(at, before);
        self.notes.memory.set_bytes(RING_AT, behind);
    }

    /// Notes a change. It counts at once, or with the base that has begun.
    pub(in crate::client) fn put(&mut self, numbers: (u64, u32), pending: &mut Pending) -> u64 {
        let position = self.next;
        if self.is_full {
            return position;
        }
        let data = match &mut pending.op {
            Op::Write { data, .. } => std::mem::take(data),
            _ => Vec::new(),
        };
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        encode(&mut bytes, numbers, pending);
        let words = HEAD_WORDS + (bytes.len().div_ceil(8) + data.len().div_ceil(8)) as u64;
        if self.next + words + 1 - self.base.first > RING_WORDS as u64 {
            self.is_full = true;
            self.notes.memory.set(RING_FULL_AT, 1);
        } else {
            self.set(self.next + words, 0);
            let head = [words, self.number, 0, bytes.len() as u64, data.len() as u64];
            (self.next + 1..).zip(head).for_each(|(at, value)| self.set(at, value));
            self.set_bytes(self.next + HEAD_WORDS, &bytes);
            let data_at = self.next + HEAD_WORDS + bytes.len().div_ceil(8) as u64;
            self.set_bytes(data_at, &data);
            self.set(self.next, self.next + 1);
            self.next += words;
        }
        self.bytes = bytes;
        if let Op::Write { data: of, .. } = &mut pending.op {
            *of = data;
        }
        position
    }

    /// The server has ended because of this change.
    pub(in crate::client) fn set_fatal(&self, position: u64) {
        if !self.is_full {
            self.set(position + FATAL_AT, 1);
        }
    }

    /// Changes up to this one are answered. `first`: where the oldest of the others is.
    pub(in crate::client) fn answered(&mut self, seq: u64, first: Option<u64>) {
        let [answered_at, first_at, _] = Notes::<W>::progress_at(self.which);
        self.notes.memory.set(answered_at, seq);
        self.base.answered = seq;
        self.base.first = first.unwrap_or(self.next);
        self.notes.memory.set(first_at, self.base.first);
        if first.is_some() {
            return;
        }
        // Nothing is noted. It goes on at the first place: so few pages are in use.
        self.next = self.next.next_multiple_of(RING_WORDS as u64);
        self.set(self.next, 0);
        self.base.first = self.next;
        self.notes.memory.set(first_at, self.next);
        if self.is_full {
            self.is_full = false;
            self.notes.memory.set(RING_FULL_AT, 0);
        }
    }

    /// Of the answered changes, those up to this one are durable, or change nothing. The next base
    /// is told when it counts.
    pub(in crate::client) fn durable(&mut self, seq: u64) {
        if self.number == self.base.number && seq != self.base.durable {
            let [_, _, durable_at] = Notes::<W>::progress_at(self.which);
            self.notes.memory.set(durable_at, seq);
            self.base.durable = seq;
        }
    }

    /// From now on changes are noted for the next base.
    pub(in crate::client) fn begin(&mut self) {
        self.number = self.base.number + 1;
        self.begun = self.next;
    }

    /// That base counts from now on, and no older change.
    pub(in crate::client) fn commit(
        &mut self,
        (session, boot): (u128, u128),
        (epoch, answered, durable): (u32, u64, u64),
    ) {
        let number = self.number;
        // Else they are the same changes, of a session whose number is known only now.
        let is_next = number != self.base.number;
        let first = if is_next { self.begun } else { self.base.first };
        let base = Base { number, session, boot, epoch, answered, first, durable };
        if base != self.base {
            (self.base, self.which) = (base, 1 - self.which);
            self.notes.set_base(self.which, &self.base);
        }
    }
}

/// The changes of this base that have no answer.
pub(super) fn left_in(memory: &impl Words, base: &Base) -> Option<Vec<NotedChange>> {
    let (mut changes, mut position): (Vec<NotedChange>, _) = (Vec::new(), base.first);
    let get = |position: u64| memory.get(offset(position));
    while get(position) == position + 1 {
        let [words, number, fatal, len, data_len] =
            [1, 2, 3, 4, 5].map(|word| get(position + word));
        if words < HEAD_WORDS || words > RING_WORDS as u64 || len + data_len > 8 * words {
            return None;
        }
        if number == base.number {
            let from = position + HEAD_WORDS;
            let bytes = bytes_of(len as usize, |word| get(from + word as u64));
            let mut change = decode_change(&bytes).ok()?;
            change.is_fatal = fatal != 0;
            if let Op::Write { data, .. } = &mut change.op {
                let from = from + len.div_ceil(8);
                *data = bytes_of(data_len as usize, |word| get(from + word as u64));
            }
            if change.seq > base.answered {
                changes.push(change);
            }
        }
        position += words;
    }
    let first = changes.first().map_or(base.answered + 1, |first| first.seq);
    let is_whole = first == base.answered + 1
        && changes.iter().zip(first..).all(|(change, seq)| change.seq == seq);
    is_whole.then_some(changes)
}

#[cfg(test)]
impl<W> Ring<W> {
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }
}
