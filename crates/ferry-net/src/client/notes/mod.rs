//! What outlives the process of a mount that is killed: its session, the changes that have no
//! answer, what the kernel knows, and what programs have open and locked. The next process goes on
//! from here ([`Notes::left`]); the server has the rest.
//!
//! The process may be killed between any two stores, so:
//!
//! * NOTES-1. A record counts if its key is not 0. The key is the last word of it that is stored,
//!   and the first one that is cleared.
//! * NOTES-2. What the kernel knows, what is open and what is locked is noted before the answer
//!   that says so. It goes when the change is noted with which the server is told. So a kill leaves
//!   too much at most, and the server is told twice.
//! * NOTES-3. A change is noted before it is sent, and before its program is answered. Its record
//!   goes when the answer is noted beside it, by the number of the kernel's request. So a request
//!   that the next process finds without an answer gets that answer, or waits for that change.
//! * NOTES-4. The server is never told that an answer has arrived whose change is noted still.
//! * NOTES-5. Changes get other numbers together, in a new epoch or session. The new records
//!   have the number of the next *base*, and count when that base does: one word says which one.
//! * NOTES-6. A base says up to which change nothing is lost with the server: each one that is
//!   answered is durable, or changes nothing. It says so when that is known, and never before. So
//!   what is answered and not durable is behind it; nothing else says that such a change exists.
//!
//! ```text
//! words 0..16    magic, generation, flags, whether something had no room, which base counts,
//!                records in use at most of the three tables
//! BASES_AT       two bases: number, session, server, epoch, newest answered change, where the
//!                first change is, how far all is durable
//! ANSWERS_AT     the newest answers, by the kernel's request (the key)
//! RING_AT        the changes (`ring`)
//! TABLES         inodes, open files, locks (`tables`)
//! ```
//!
//! The file is sparse: what is not in use takes no memory.

use std::os::fd::OwnedFd;

use ferry_fs::known::{SharedWords, Words};

pub use self::memory::Notes;
pub(in crate::client) use self::memory::flag;
use self::memory::{
    ANSWER_BYTES_MAX, ANSWER_WORDS, ANSWERS_AT, ANSWERS_MAX, Base, FLAGS_AT, FULL_AT,
    GENERATION_AT, GENERATION_SHIFT, MAGIC, RING_FULL_AT, WORDS, base_in, bytes_of,
};
pub(in crate::client) use self::ring::{NotedChange, Ring};
use self::tables::NotedTables;
pub(in crate::client) use self::tables::{NotedDir, NotedFile, NotedNode, TableNotes};
use crate::codec::decode;
use crate::message::Outcome;
use crate::rt::collections::BTreeMap;

mod memory;
mod ring;
mod tables;

/// An answer to a request of the kernel.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::client) struct NotedAnswer {
    /// The number of the file that the request has opened; 0: none.
    pub(in crate::client) opens: u64,
    pub(in crate::client) outcome: Outcome,
}

/// What a process has left that was killed.
#[derive(Debug, Default)]
pub struct Noted {
    pub(in crate::client) generation: u64,
    pub(in crate::client) flags: u64,
    pub(in crate::client) base: Base,
    /// Those without answers, in their order.
    pub(in crate::client) changes: Vec<NotedChange>,
    /// By the numbers of the kernel's requests.
    pub(in crate::client) answers: BTreeMap<u64, NotedAnswer>,
    pub(in crate::client) tables: NotedTables,
}

impl Noted {
    /// How many open files and known inodes it has.
    pub fn counts(&self) -> (usize, usize) {
        (self.tables.files.len(), self.tables.nodes.len())
    }

    /// The session has not claimed all that the kernel knows.
    pub(in crate::client) fn is_unclaimed(&self) -> bool {
        self.flags & flag::UNCLAIMED != 0
    }

    /// The first number of open files, and of requests, that no process before has used.
    pub(in crate::client) fn next_number(&self) -> u64 {
        (self.generation + 1) << GENERATION_SHIFT
    }
}

impl Notes {
    /// What a process has left in this file. `None`: another form, or not all of it.
    pub fn left(file: OwnedFd) -> Option<Noted> {
        let memory = SharedWords::of(file).ok()?;
        (memory.words().len() == WORDS).then(|| left_in(&memory)).flatten()
    }
}

/// What a process has left in this memory, as [`Notes::left`].
fn left_in(memory: &impl Words) -> Option<Noted> {
    let is_full = memory.get(FULL_AT) != 0 || memory.get(RING_FULL_AT) != 0;
    if memory.get(0) != MAGIC || is_full {
        return None;
    }
    let base = base_in(memory)?;
    let mut noted = Noted {
        generation: memory.get(GENERATION_AT),
        flags: memory.get(FLAGS_AT),
        changes: ring::left_in(memory, &base)?,
        base,
        tables: NotedTables::of(memory),
        ..Noted::default()
    };
    for number in 0..ANSWERS_MAX {
        let at = ANSWERS_AT + number * ANSWER_WORDS;
        let (request, len) = (memory.get(at), memory.get(at + 1) as usize);
        if request != 0 && len <= ANSWER_BYTES_MAX {
            let bytes = bytes_of(len, |word| memory.get(at + 3 + word));
            let (opens, outcome) = (memory.get(at + 2), decode(&bytes).ok()?);
            noted.answers.insert(request, NotedAnswer { opens, outcome });
        }
    }
    Some(noted)
}

#[cfg(test)]
mod tests;
