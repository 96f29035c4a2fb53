//! The memory of [`Notes`]: what is where, and what is stored besides changes and tables.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferry_fs::known::{SharedWords, Words};
use parking_lot::Mutex;

use crate::codec::Wire;
use crate::message::Outcome;

/// The number is that of the form.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"ferrynt2");
pub(super) const GENERATION_AT: usize = 1;
pub(super) const FLAGS_AT: usize = 2;
/// A table had no room.
pub(super) const FULL_AT: usize = 3;
pub(super) const BASE_AT: usize = 4;
pub(super) const NODES_USED_AT: usize = 5;
pub(super) const FILES_USED_AT: usize = 6;
pub(super) const LOCKS_USED_AT: usize = 7;
/// The ring has no room: not all changes are noted.
pub(super) const RING_FULL_AT: usize = 8;

pub(super) const BASES_AT: usize = 16;
pub(super) const BASE_WORDS: usize = 16;
pub(super) const ANSWERS_AT: usize = 512;
/// So many answers are noted: they are given to the kernel within microseconds.
pub(super) const ANSWERS_MAX: usize = 1 << 14;
pub(super) const ANSWER_WORDS: usize = 32;
/// Bytes of an answer that have room behind its key, its length, and the number of the file that
/// it opens.
pub(super) const ANSWER_BYTES_MAX: usize = (ANSWER_WORDS - 3) * 8;
pub(super) const RING_AT: usize = ANSWERS_AT + ANSWERS_MAX * ANSWER_WORDS;
/// 64 MiB: twice what a session may have unanswered and acknowledged, for epochs that end.
pub(super) const RING_WORDS: usize = 1 << 23;
/// Words of a record of a table, and so many records of each.
pub(super) const RECORD_WORDS: usize = 8;
pub(super) const NODES_MAX: usize = 1 << 24;
pub(super) const FILES_MAX: usize = 1 << 22;
pub(super) const LOCKS_MAX: usize = 1 << 21;
pub(super) const NODES_AT: usize = RING_AT + RING_WORDS;
pub(super) const FILES_AT: usize = NODES_AT + NODES_MAX * RECORD_WORDS;
pub(super) const LOCKS_AT: usize = FILES_AT + FILES_MAX * RECORD_WORDS;
pub(super) const WORDS: usize = LOCKS_AT + LOCKS_MAX * RECORD_WORDS;

/// Numbers of open files and requests begin behind the generation, shifted by this.
pub(super) const GENERATION_SHIFT: u32 = 40;

/// Facts of the mount that are one bit each.
pub(in crate::client) mod flag {
    /// The server lets this client change nothing.
    pub(in crate::client) const READ_ONLY: u64 = 1;
    /// Changes may be acknowledged early.
    pub(in crate::client) const EARLY_ACKS: u64 = 2;
    /// Early-acknowledged changes were lost, once at least.
    pub(in crate::client) const LOSSY: u64 = 4;
    /// The server may have reserved space for the session.
    pub(in crate::client) const RESERVED: u64 = 8;
    /// The session has not claimed all that the kernel knows.
    pub(in crate::client) const UNCLAIMED: u64 = 16;
    /// A program that syncs the mount was not told of a loss.
    pub(in crate::client) const ANY_LOSS: u64 = 32;
    /// The server has said goodbye: it has applied nothing that it has not answered.
    pub(in crate::client) const CLEAN: u64 = 64;
}

/// The memory.
#[derive(Debug)]
pub struct Notes<W = SharedWords> {
    pub(super) memory: W,
    /// Flags, as they are in the memory.
    flags: Mutex<u64>,
    /// Where the next answer goes.
    next_answer: AtomicU64,
}

/// A session, and what its numbers begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) struct Base {
    /// The number that records of its changes have.
    pub(in crate::client) number: u64,
    /// 0: there is no session yet.
    pub(in crate::client) session: u128,
    pub(in crate::client) boot: u128,
    pub(in crate::client) epoch: u32,
    /// Changes up to this one are answered.
    pub(in crate::client) answered: u64,
    /// Where the first of those is that are not.
    pub(super) first: u64,
    /// Of the answered ones, a crash of the server takes none up to this one.
    pub(in crate::client) durable: u64,
}

impl Notes {
    /// For a process that begins.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::on(SharedWords::new(WORDS)?)))
    }

    /// For the holder of the mount.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.memory.file()
    }
}

impl<W: Words> Notes<W> {
    pub(super) fn on(memory: W) -> Self {
        memory.set(0, MAGIC);
        Self { memory, flags: Mutex::default(), next_answer: AtomicU64::default() }
    }

    /// Numbers of this process begin with this one.
    pub(in crate::client) fn begin_numbers(&self, next: u64) {
        self.memory.set(GENERATION_AT, next >> GENERATION_SHIFT);
    }

    pub(in crate::client) fn set_flag(&self, flag: u64, on: bool) {
        let mut flags = self.flags.lock();
        let new = if on { *flags | flag } else { *flags & !flag };
        if new != *flags {
            *flags = new;
            self.memory.set(FLAGS_AT, new);
        }
    }

    /// The answer to a request of the kernel, which may have opened a file.
    pub(in crate::client) fn answered(&self, request: u64, opens: Option<u64>, outcome: &Outcome) {
        let mut bytes = Vec::with_capacity(ANSWER_BYTES_MAX);
        outcome.put(&mut bytes);
        if bytes.len() > ANSWER_BYTES_MAX {
            return;
        }
        let number = self.next_answer.fetch_add(1, Ordering::Relaxed) as usize % ANSWERS_MAX;
        let at = ANSWERS_AT + number * ANSWER_WORDS;
        self.memory.set(at, 0);
        self.memory.set(at + 1, bytes.len() as u64);
        self.memory.set(at + 2, opens.unwrap_or_default());
        self.memory.set_bytes(at + 3, &bytes);
        self.memory.set(at, request);
    }

    /// Makes this base count, in one of the two places.
    pub(super) fn set_base(&self, which: usize, base: &Base) {
        let at = BASES_AT + which * BASE_WORDS;
        let halves = |word: u128| [word as u64, (word >> 64) as u64];
        let [session, boot] = [halves(base.session), halves(base.boot)];
        let epoch = u64::from(base.epoch);
        let words = [
            base.number,
            session[0],
            session[1],
            boot[0],
            boot[1],
            epoch,
            base.answered,
            base.first,
            base.durable,
        ];
        words.into_iter().enumerate().for_each(|(word, value)| self.memory.set(at + word, value));
        self.memory.set(BASE_AT, which as u64);
    }

    /// Where a base has the newest answered change, the first change, and how far all is durable.
    pub(super) fn progress_at(which: usize) -> [usize; 3] {
        let at = BASES_AT + which * BASE_WORDS;
        [at + 6, at + 7, at + 8]
    }
}

/// So many bytes of the words that `word` gives.
pub(super) fn bytes_of(len: usize, word: impl Fn(usize) -> u64) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|at| word(at).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

/// The base that counts.
pub(super) fn base_in(memory: &impl Words) -> Option<Base> {
    let at = BASES_AT + (memory.get(BASE_AT) % 2) as usize * BASE_WORDS;
    let word = |word: usize| memory.get(at + word);
    let double = |low: usize| u128::from(word(low + 1)) << 64 | u128::from(word(low));
    Some(Base {
        number: word(0),
        session: double(1),
        boot: double(3),
        epoch: u32::try_from(word(5)).ok()?,
        answered: word(6),
        first: word(7),
        durable: word(8),
    })
}
