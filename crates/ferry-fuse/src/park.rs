//! Requests that wait: who completes one first, its answer or an interrupt, has it.
//!
//! A parked request is an entry in a table, keyed by the kernel's number for it; whoever removes the entry answers.
//! So a request is answered once, an answer after an interrupt is dropped, and ten thousand parked requests are ten
//! thousand small entries.
//!
//! The kernel sends INTERRUPT once, and any thread may read it before the request that it means has parked (even
//! before the thread that took that request has looked at it). Such early interrupts are remembered, and parking
//! looks for them under the same lock, so none is lost. (Answering EAGAIN, which makes the kernel send it again, would be
//! a busy loop, and would have to be written to the descriptor that took the request.) Interrupts of requests that were
//! answered meanwhile are remembered too, in vain, until newer ones displace them: numbers are never used twice.
//!
//! Through io_uring an INTERRUPT may not come at all: the kernel sends none where the signal was there before the request was taken from its
//! queue. So there those that wait for long are looked at now and then.
//!
//! A signal that the program handles does not end its fsync, and has used up the one INTERRUPT of that request. Should the
//! program be killed in the same fsync, nobody tells: such requests are watched, by a thread that lives while there are any.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_fs::{Complete, Errno, Interrupt, Park, Reply};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::abi::op;
use crate::counters::Counters;
use crate::encode::{self, Body, Bytes, SMALL_MAX, Want};

/// Shards of the table, so that threads seldom meet.
const SHARDS: usize = 16;
/// Early interrupts remembered in each shard.
const EARLY_MAX: usize = 256;
/// How often a request that a signal did not end is looked at again.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// How often requests that wait are looked at where the kernel may keep an INTERRUPT to itself: each when it has waited for so long at least,
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// and so many at a time.
const SWEEP_MAX: usize = 512;

/// Where an answer goes: the transport that brought the request.
pub(crate) trait Port: Send + Sync {
    /// Sends an answer: `error` 0, or a negated errno with no body. `slot` is the transport's own, from the request.
    fn answer(&self, unique: u64, slot: u32, error: i32, body: Bytes<'_>);
}

/// A parked request.
struct Waiting {
    want: Want,
    slot: u32,
    port: Arc<dyn Port>,
    interrupt: Option<Interrupt>,
    /// Who waits; 0 where unknown.
    pid: u32,
    /// An interrupt was there before; it takes effect when the operation has returned.
    interrupted: bool,
    /// It waited at the sweep before.
    swept: bool,
}

impl Waiting {
    /// Whether a signal ends the wait. One that the program handles ends only the wait for a lock: programs expect no EINTR of
    /// fsync, and databases stop at it.
    fn gives_up(&self) -> bool {
        self.want.opcode == op::SETLKW || self.pid == 0 || is_being_killed(self.pid)
    }

    /// Whether it would end if an INTERRUPT had come, and one should have.
    fn missed_a_signal(&self) -> bool {
        match self.want.opcode {
            _ if self.pid == 0 => false,
            op::SETLKW => has_signal(self.pid),
            _ => is_being_killed(self.pid),
        }
    }
}

/// Whether a signal is pending that ends the process: SIGKILL, as what every deadly signal but those that dump core becomes, or one
/// of those, neither handled nor ignored nor blocked. A process that is gone does not wait any more either.
fn is_being_killed(pid: u32) -> bool {
    has_signal_but(pid, &["SigCgt:", "SigIgn:", "SigBlk:"])
}

/// Whether a signal is pending that the process handles, or that ends it.
fn has_signal(pid: u32) -> bool {
    has_signal_but(pid, &["SigIgn:", "SigBlk:"])
}

fn has_signal_but(pid: u32, masks: &[&str]) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    let harmless = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    let harmless = harmless.iter().fold(0, |all, signal| all | 1_u64 << (signal - 1));
    let pending = mask("SigPnd:") | mask("ShdPnd:");
    pending & !masks.iter().fold(harmless, |all, name| all | mask(name)) != 0
}

/// Requests that a signal has not ended.
#[derive(Default)]
struct Watched {
    requests: Vec<u64>,
    /// A thread looks at them.
    watching: bool,
    /// The mount is gone.
    over: bool,
}

#[derive(Default)]
struct Shard {
    waiting: HashMap<u64, Waiting>,
    early: HashSet<u64>,
    early_order: VecDeque<u64>,
}

/// The table.
pub(crate) struct ParkTable {
    shards: [Mutex<Shard>; SHARDS],
    watched: Mutex<Watched>,
    /// `watched.over` was set.
    ended: Condvar,
    counters: Arc<Counters>,
}

impl fmt::Debug for ParkTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParkTable").field("waiting", &self.len()).finish_non_exhaustive()
    }
}

impl ParkTable {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        Self { shards: Default::default(), watched: Mutex::default(), ended: Condvar::new(), counters }
    }

    fn shard(&self, unique: u64) -> &Mutex<Shard> {
        // The kernel counts in twos (the lowest bit marks interrupts).
        &self.shards[(unique >> 1) as usize % SHARDS]
    }

    /// Requests waiting now.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().waiting.len()).sum()
    }

    fn insert(&self, unique: u64, mut waiting: Waiting) {
        let mut shard = self.shard(unique).lock();
        if !shard.early.is_empty() && shard.early.remove(&unique) {
            shard.early_order.retain(|&u| u != unique);
            waiting.interrupted = true;
        }
        shard.waiting.insert(unique, waiting);
    }

    /// The answer has come.
    fn complete(&self, unique: u64, result: Result<Reply, Errno>) {
        let Some(w) = self.shard(unique).lock().waiting.remove(&unique) else {
            return; // interrupted before
        };
        let mut out = [0_u8; SMALL_MAX];
        match result.and_then(|r| encode::reply(w.want, &mut out, r)) {
            Ok(Body::Out(len)) => w.port.answer(unique, w.slot, 0, Bytes::Borrowed(&out[..len])),
            Ok(Body::Bytes(bytes)) => w.port.answer(unique, w.slot, 0, bytes),
            Err(e) => {
                self.counters.error(w.want.opcode);
                w.port.answer(unique, w.slot, -e.0, Bytes::Borrowed(&[]));
            }
        }
    }

    /// The requester no longer waits: answers EINTR now, or when the request parks.
    pub(crate) fn interrupt(self: &Arc<Self>, unique: u64) {
        let mut shard = self.shard(unique).lock();
        match shard.waiting.get(&unique).map(Waiting::gives_up) {
            Some(true) => {
                let waiting = shard.waiting.remove(&unique);
                drop(shard);
                self.answer_eintr(unique, waiting);
            }
            Some(false) => {
                drop(shard);
                self.watch(unique);
            }
            None => {
                if shard.early.insert(unique) {
                    shard.early_order.push_back(unique);
                }
                if shard.early_order.len() > EARLY_MAX
                    && let Some(oldest) = shard.early_order.pop_front()
                {
                    shard.early.remove(&oldest);
                }
            }
        }
    }

    /// The operation that parked `unique` has returned: an interrupt that came before takes effect.
    pub(crate) fn settled(self: &Arc<Self>, unique: u64) {
        if self.shard(unique).lock().waiting.get(&unique).is_some_and(|w| w.interrupted)
            && !self.look_again(unique)
        {
            self.watch(unique);
        }
    }

    /// Ends the wait of `unique` if its process is being killed; `false` if it waits on.
    fn look_again(&self, unique: u64) -> bool {
        self.end_if(unique, Waiting::gives_up)
    }

    fn end_if(&self, unique: u64, ends: impl Fn(&Waiting) -> bool) -> bool {
        let mut shard = self.shard(unique).lock();
        if shard.waiting.get(&unique).is_some_and(|w| !ends(w)) {
            return false;
        }
        let waiting = shard.waiting.remove(&unique);
        drop(shard);
        self.answer_eintr(unique, waiting);
        true
    }

    /// Looks at `unique` again until it is answered.
    fn watch(self: &Arc<Self>, unique: u64) {
        let mut watched = self.watched.lock();
        watched.requests.push(unique);
        if watched.watching || watched.over {
            return;
        }
        let table = Arc::clone(self);
        // Where there is no thread to be had, the next such signal tries again; until then the wait ends with its answer.
        let thread = std::thread::Builder::new().name("ferry-watch".into());
        watched.watching = thread.spawn(move || table.watch_all()).is_ok();
    }

    fn watch_all(&self) {
        let mut watched = self.watched.lock();
        while !watched.over {
            self.ended.wait_for(&mut watched, WATCH_INTERVAL);
            let mut requests = std::mem::take(&mut watched.requests);
            MutexGuard::unlocked(&mut watched, || requests.retain(|&unique| !self.look_again(unique)));
            watched.requests.append(&mut requests);
            if watched.requests.is_empty() {
                break;
            }
        }
        watched.watching = false;
    }

    /// From now on, until the mount is gone, those that wait are looked at.
    pub(crate) fn sweep_always(self: &Arc<Self>) -> io::Result<()> {
        let table = Arc::clone(self);
        let sweep = move || {
            let mut watched = table.watched.lock();
            for turn in 0.. {
                table.ended.wait_for(&mut watched, SWEEP_INTERVAL);
                if watched.over {
                    break;
                }
                MutexGuard::unlocked(&mut watched, || table.sweep(turn));
            }
        };
        std::thread::Builder::new().name("ferry-sweep".into()).spawn(sweep).map(drop)
    }

    /// Ends those whose process has a signal that it should have been told of. Where very many wait, some at each `turn`.
    fn sweep(&self, turn: usize) {
        let parts = self.len() / SWEEP_MAX + 1;
        for shard in &self.shards {
            let mut due = Vec::new();
            for (unique, waiting) in &mut shard.lock().waiting {
                let its_turn = (*unique >> 1) as usize / SHARDS % parts == turn % parts;
                if std::mem::replace(&mut waiting.swept, true) && its_turn {
                    due.push(*unique);
                }
            }
            due.into_iter().for_each(|unique| {
                self.end_if(unique, Waiting::missed_a_signal);
            });
        }
    }

    /// `waiting` is what the table held of `unique`; nothing if it is answered already.
    fn answer_eintr(&self, unique: u64, waiting: Option<Waiting>) {
        let Some(waiting) = waiting else { return };
        self.counters.error(waiting.want.opcode);
        // First: the program may ask again as soon as it is told.
        if let Some(interrupt) = waiting.interrupt {
            interrupt();
        }
        waiting.port.answer(unique, waiting.slot, -libc::EINTR, Bytes::Borrowed(&[]));
    }

    /// The mount is gone: every parked request is interrupted.
    pub(crate) fn interrupt_all(&self) {
        for shard in &self.shards {
            let waiting = std::mem::take(&mut shard.lock().waiting);
            for (unique, waiting) in waiting {
                self.answer_eintr(unique, Some(waiting));
            }
        }
        self.watched.lock().over = true;
        self.ended.notify_all();
    }
}

/// The request being served, as the file system may park it.
pub(crate) struct Ticket<'a> {
    pub(crate) table: &'a Arc<ParkTable>,
    pub(crate) port: &'a Arc<dyn Port>,
    pub(crate) unique: u64,
    pub(crate) slot: u32,
    pub(crate) want: Want,
    /// Who asks; 0 where unknown.
    pub(crate) pid: u32,
    /// Set by parking.
    pub(crate) parked: AtomicBool,
}

impl Park for Ticket<'_> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        assert!(!self.parked.swap(true, Ordering::Relaxed), "a request is parked at most once");
        let waiting = Waiting {
            want: self.want,
            slot: self.slot,
            port: Arc::clone(self.port),
            interrupt,
            pid: self.pid,
            interrupted: false,
            swept: false,
        };
        self.table.insert(self.unique, waiting);
        let (table, unique) = (Arc::clone(self.table), self.unique);
        Box::new(move |result| table.complete(unique, result))
    }
}

#[cfg(test)]
mod tests;
