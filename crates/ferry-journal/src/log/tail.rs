//! What the log does not have yet, in memory that outlives the process.
//!
//! A transaction is answered long before its context is in the log. If the process is killed, the
//! next one finds the transactions here, writes their contexts to the log, and goes on as if the
//! log had had them. A power loss takes the memory away, and what was not durable is lost as
//! before.
//!
//! The process may be killed between any two stores, so:
//!
//! * TAIL-1. A transaction is here once the end of the ring is stored behind it: with all its
//!   changes and the request that it was for, or not at all. It is here before anybody sees it.
//! * TAIL-2. Contexts are taken in order and without gaps. The first one that had no room here, or
//!   whose data is neither on the device nor in memory, ends them. Behind one that had no room
//!   nothing is noted until it is durable, and until another context is open than then.
//! * TAIL-3. The ids of records are stored before the records are written. So are those of the next
//!   process, until the one behind it would go on from another memory. A log that ends with another
//!   record was written by somebody else meanwhile: nothing here belongs to it.
//! * TAIL-4. How far the contexts were taken is stored before the next process writes a record of
//!   its own. None is taken twice.
//!
//! ```text
//! words 0..6     where the ring begins, and ends; newest context that had no room; 1 + newest
//!                context that the log had at the first look; 1 + newest context that was taken;
//!                records whose ids were noted
//! IDS_AT         ids of the newest records
//! RING_AT        transactions: number of words (0: go on where the ring's memory begins),
//!                context, slot and number of the request (0: none), keys and extents; of each
//!                extent its offset, its length and checksum; of each key its length and that of
//!                the value, the key, the value
//! ```

use super::record::ExtentEntry;
use crate::types::{Change, Changes, Key, Point, RequestId};
use crate::{Seq, Value};
use ferry_device::{LeftBuffers, SharedWords, Words};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

const BEGIN_AT: usize = 0;
const END_AT: usize = 1;
const FULL_AT: usize = 2;
const LOGGED_AT: usize = 3;
const TAKEN_AT: usize = 4;
const RECORDS_AT: usize = 5;
const IDS_AT: usize = 64;
/// Many more than can be between the newest durable record and the newest one.
const IDS: usize = 256;
const RING_AT: usize = 512;
/// 64 MiB: a second of changes, on a fast machine.
const RING_WORDS: u64 = 1 << 23;
/// Words of the head of a transaction, of an extent, and of the head of a key.
const HEAD_WORDS: usize = 5;
const EXTENT_WORDS: usize = 2;
const KEY_WORDS: usize = 1;
/// In the head of a key: it was removed.
const REMOVED: u64 = 1 << 16;

/// Words of such memory.
pub const TAIL_WORDS: usize = RING_AT + RING_WORDS as usize;

/// Memory for what the log does not have yet.
#[derive(Debug)]
pub struct Tail<W = SharedWords> {
    memory: Arc<W>,
    /// The first word.
    base: usize,
    /// Words of the ring.
    ring: u64,
    state: Mutex<State>,
}

/// Where the ring begins and ends, in words since the process began, and where the contexts in it
/// begin.
#[derive(Debug, Default)]
struct State {
    begin: u64,
    end: u64,
    contexts: VecDeque<(Seq, u64)>,
    room: Room,
}

/// Whether there is room for what joins.
#[derive(Clone, Copy, Debug, Default)]
enum Room {
    #[default]
    Enough,
    /// Not for all of the first context, and nothing was noted up to the last one.
    Lacked { first: Seq, last: Seq },
    /// The first context is durable since; nothing was noted up to this one.
    Again { last: Seq },
}

/// What a process that was killed has left of the log.
#[derive(Debug)]
pub struct LeftLog {
    /// Transactions.
    pub tail: Tail,
    /// Data that was being written.
    pub data: LeftBuffers,
}

/// A context that the log does not have.
#[derive(Debug, Default, PartialEq)]
pub struct UnloggedContext {
    pub seq: Seq,
    pub changes: Changes,
    pub extents: Vec<ExtentEntry>,
}

/// What a process that was killed has left.
#[derive(Debug, PartialEq)]
pub struct Left {
    /// Contexts that follow the log's end, in order.
    pub contexts: Vec<UnloggedContext>,
    /// The newest context that the log had when it was looked at first.
    pub logged: Seq,
    /// The log ends with a record of the process, or of one that has taken over from it.
    pub is_ours: bool,
    /// The requests of transactions that may be there behind it, each with its context.
    pub requests: Vec<(RequestId, Seq)>,
}

/// A transaction in the ring.
struct Unlogged {
    seq: Seq,
    request: Option<RequestId>,
    extents: Vec<ExtentEntry>,
    changes: Vec<(Key, Change)>,
}

fn words_of_bytes(bytes: usize) -> usize {
    bytes.div_ceil(8)
}

fn words_of(changes: &Changes, extents: &[ExtentEntry]) -> usize {
    let of_change = |(key, change): (&Key, &Change)| {
        let value = change.as_ref().map_or(0, |value| value.len());
        KEY_WORDS + words_of_bytes(key.len()) + words_of_bytes(value)
    };
    HEAD_WORDS + extents.len() * EXTENT_WORDS + changes.iter().map(of_change).sum::<usize>()
}

impl<W: Words> Tail<W> {
    /// In `TAIL_WORDS` words from `base` on: for a process that begins, all of them 0, or as a
    /// process has left them that was killed.
    pub fn new(memory: Arc<W>, base: usize) -> Self {
        Self { memory, base, ring: RING_WORDS, state: Mutex::default() }
    }

    fn get(&self, at: usize) -> u64 {
        self.memory.get(self.base + at)
    }

    fn set(&self, at: usize, value: u64) {
        self.memory.set(self.base + at, value);
    }

    fn ring_at(&self, position: u64) -> usize {
        RING_AT + (position % self.ring) as usize
    }

    /// A record with this id is about to be written.
    pub fn record(&self, id: u64) {
        let _one_at_a_time = self.state.lock();
        let records = self.get(RECORDS_AT);
        self.set(IDS_AT + records as usize % IDS, id);
        self.set(RECORDS_AT, records + 1);
    }

    /// A transaction joins the context `seq`. Nobody has seen it, and the context is open.
    pub fn join(
        &self,
        seq: Seq,
        request: Option<RequestId>,
        changes: &Changes,
        extents: &[ExtentEntry],
    ) {
        let mut state = self.state.lock();
        match state.room {
            Room::Enough => {}
            Room::Again { last } if last < seq => state.room = Room::Enough,
            Room::Again { .. } => return,
            Room::Lacked { first, .. } => {
                return state.room = Room::Lacked { first, last: seq };
            }
        }
        let words = words_of(changes, extents) as u64;
        let Some(at) = self.room(&mut state, words) else {
            state.room = Room::Lacked { first: seq, last: seq };
            return self.set(FULL_AT, seq.0);
        };
        if state.contexts.back().is_none_or(|(newest, _)| *newest != seq) {
            let begin = state.end;
            state.contexts.push_back((seq, begin));
        }
        self.put(self.ring_at(at), [words, seq.0], request, changes, extents);
        state.end = at + words;
        self.set(END_AT, state.end);
    }

    /// Where so many words have room, one behind the other.
    fn room(&self, state: &mut State, words: u64) -> Option<u64> {
        let next = state.end.next_multiple_of(self.ring);
        if state.begin == state.end && state.end != next {
            // It is empty: memory that was used before is used again.
            state.begin = next;
            state.end = next;
            self.set(BEGIN_AT, next);
            self.set(END_AT, next);
        }
        let next = state.end.next_multiple_of(self.ring);
        let at = if state.end + words > next && state.end != next { next } else { state.end };
        if at + words - state.begin > self.ring {
            return None;
        }
        if at != state.end {
            self.set(self.ring_at(state.end), 0);
        }
        Some(at)
    }

    fn put(
        &self,
        mut at: usize,
        head: [u64; 2],
        request: Option<RequestId>,
        changes: &Changes,
        extents: &[ExtentEntry],
    ) {
        let (slot, unique) = request.map_or((0, 0), |request| (request.slot, request.unique));
        let counts = changes.len() as u64 | (extents.len() as u64) << 32;
        for word in [head[0], head[1], slot.into(), unique, counts] {
            self.set(at, word);
            at += 1;
        }
        for extent in extents {
            self.set(at, extent.offset);
            self.set(at + 1, u64::from(extent.len) | u64::from(extent.crc) << 32);
            at += EXTENT_WORDS;
        }
        for (key, change) in changes {
            let value = change.as_deref().unwrap_or_default();
            let removed = if change.is_none() { REMOVED } else { 0 };
            self.set(at, key.len() as u64 | removed | (value.len() as u64) << 32);
            at += KEY_WORDS;
            for bytes in [&key[..], value] {
                self.memory.set_bytes(self.base + at, bytes);
                at += words_of_bytes(bytes.len());
            }
        }
    }

    /// The contexts up to `seq` are durable.
    pub fn durable(&self, seq: Seq) {
        let mut state = self.state.lock();
        while state.contexts.front().is_some_and(|(oldest, _)| *oldest <= seq) {
            state.contexts.pop_front();
        }
        if let Room::Lacked { first, last } = state.room
            && first <= seq
        {
            state.room = Room::Again { last };
        }
        let begin = state.contexts.front().map_or(state.end, |(_, begin)| *begin);
        if state.begin != begin {
            state.begin = begin;
            self.set(BEGIN_AT, begin);
        }
    }

    /// What is to be written behind the log's end, where a process has left this.
    pub fn left(&self, end: Point) -> Left {
        if self.get(LOGGED_AT) == 0 {
            self.set(LOGGED_AT, end.seq.0 + 1);
        }
        let logged = Seq(self.get(LOGGED_AT) - 1);
        let taken = self.newest_taken();
        let is_ours = (0..IDS).any(|at| self.get(IDS_AT + at) == end.id);
        let mut left = Left { contexts: Vec::new(), logged, is_ours, requests: Vec::new() };
        if !is_ours {
            return left;
        }
        let full = Seq(self.get(FULL_AT));
        let is_whole = |seq: Seq| full <= logged || seq < full;
        let last = |seq: Seq| taken.is_none_or(|taken| seq <= taken);
        for joined in self.transactions() {
            if joined.seq <= logged || !is_whole(joined.seq) || !last(joined.seq) {
                continue;
            }
            left.requests.extend(joined.request.map(|request| (request, joined.seq)));
            if joined.seq <= end.seq || taken.is_some() {
                continue;
            }
            if left.contexts.last().is_none_or(|context| context.seq != joined.seq) {
                left.contexts.push(UnloggedContext { seq: joined.seq, ..Default::default() });
            }
            let context = left.contexts.last_mut().expect("one was added");
            context.changes.extend(joined.changes);
            context.extents.extend(joined.extents);
        }
        let follows = (end.seq.0 + 1..).zip(&left.contexts);
        let whole = follows.take_while(|(seq, context)| context.seq.0 == *seq).count();
        left.contexts.truncate(whole);
        left
    }

    /// The newest context that was taken, if a process before has done that.
    pub fn newest_taken(&self) -> Option<Seq> {
        self.get(TAKEN_AT).checked_sub(1).map(Seq)
    }

    /// The log has all that could be taken: the contexts up to `seq`.
    pub fn taken(&self, seq: Seq) {
        if self.get(TAKEN_AT) == 0 {
            self.set(TAKEN_AT, seq.0 + 1);
        }
    }

    /// All transactions in the ring, the oldest first.
    fn transactions(&self) -> impl Iterator<Item = Unlogged> {
        let (mut position, end) = (self.get(BEGIN_AT), self.get(END_AT));
        std::iter::from_fn(move || {
            if position < end && self.get(self.ring_at(position)) == 0 {
                position = (position + 1).next_multiple_of(self.ring);
            }
            (position < end).then(|| {
                let at = self.ring_at(position);
                position += self.get(at);
                self.transaction(at)
            })
        })
    }

    fn transaction(&self, mut at: usize) -> Unlogged {
        let [seq, slot, unique, counts] = [1, 2, 3, 4].map(|word| self.get(at + word));
        at += HEAD_WORDS;
        let mut extents = Vec::new();
        for _ in 0..counts >> 32 {
            let (offset, more) = (self.get(at), self.get(at + 1));
            extents.push(ExtentEntry { offset, len: more as u32, crc: (more >> 32) as u32 });
            at += EXTENT_WORDS;
        }
        let mut changes = Vec::new();
        for _ in 0..counts as u32 {
            let head = self.get(at);
            at += KEY_WORDS;
            let mut bytes = |len: u64| {
                let words = at..at + words_of_bytes(len as usize);
                at = words.end;
                let mut bytes: Vec<u8> = words.flat_map(|at| self.get(at).to_le_bytes()).collect();
                bytes.truncate(len as usize);
                bytes
            };
            let (key, value) = (bytes(u64::from(head as u16)), bytes(head >> 32));
            let change = (head & REMOVED == 0).then(|| Value::from(value));
            changes.push((Key::from(key), change));
        }
        let request = (unique != 0).then_some(RequestId { slot: slot as u32, unique });
        Unlogged { seq: Seq(seq), request, extents, changes }
    }
}

#[cfg(test)]
mod tests;
