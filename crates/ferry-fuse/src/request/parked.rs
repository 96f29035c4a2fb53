//! Requests that wait. Whichever arrives first, the answer or an interrupt, completes the request.
//!
//! A parked request is an entry in a table, keyed by the kernel's number for it (`unique`); the
//! thread that removes the entry sends the answer. So a request is answered once, an answer after
//! an interrupt is dropped, and ten thousand parked requests are ten thousand small entries.
//!
//! The kernel sends INTERRUPT once. Any thread may read it before the request that it names has
//! parked, even before the thread that read that request has looked at it. The table remembers such
//! early interrupts, and parking looks for them under the same lock, so none is lost. (Answering
//! EAGAIN makes the kernel send the INTERRUPT again, but that would be a busy loop, and the EAGAIN
//! would have to be written to the descriptor that read the request.) An interrupt of a request
//! that was answered in the meantime is remembered in vain until newer ones displace it: numbers
//! are never used twice.
//!
//! Over io_uring an INTERRUPT may not arrive at all: the kernel sends none if the signal was
//! pending before the request was taken from its queue. There a sweep looks periodically at the
//! requests that have waited for long.
//!
//! A signal that the program handles does not end its fsync, but it uses up the one INTERRUPT of
//! that request. If the program is killed later in the same fsync, the kernel says nothing. So a
//! thread watches such requests; it lives as long as there are any.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferry_device::ReadRing;
use ferry_env::activity::Waiting;
use ferry_fs::{Complete, Errno, Interrupt, Park, Reply, RequestId};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::abi::op;
use crate::encode::{self, AnswerBody, AnswerBytes, AnswerForm, SMALL_MAX};
use crate::init::IO_MAX;
use crate::request::counters::ThreadCounters;
use crate::request::trace::{Answered, Tracer};

/// Shards of the table, so that threads seldom contend for a lock.
const SHARDS: usize = 16;
/// Early interrupts that each shard remembers at most.
const EARLY_MAX: usize = 256;
/// How often the watch looks at requests that a signal did not end.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// How often the sweep runs; it skips requests that have waited for less than one interval.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Requests that one sweep looks at, about.
const SWEEP_MAX: usize = 512;

/// Takes answers: the transport that brought the request.
pub(crate) trait AnswerPort: Send + Sync {
    /// Sends an answer: `error` is 0, or a negated errno without a body. `slot` is the transport's
    /// own number, which came with the request.
    fn answer(&self, unique: u64, slot: u32, error: i32, body: AnswerBytes<'_>);
}

/// A parked request.
struct ParkedRequest {
    form: AnswerForm,
    slot: u32,
    port: Arc<dyn AnswerPort>,
    interrupt: Option<Interrupt>,
    /// The process that waits; 0: unknown.
    pid: u32,
    begun: Instant,
    /// An interrupt arrived before the request parked; it takes effect when the operation returns.
    interrupted: bool,
    /// It was waiting at the previous sweep already.
    swept: bool,
    _waiting: Waiting,
}

impl ParkedRequest {
    /// Whether a signal ends the wait. A signal that the program handles ends only the wait for a
    /// lock: programs expect no EINTR from fsync, and databases stop at it.
    fn gives_up(&self) -> bool {
        self.form.opcode == op::SETLKW || self.pid == 0 || is_being_killed(self.pid)
    }

    /// Whether an INTERRUPT should have arrived that would have ended the wait.
    fn missed_a_signal(&self) -> bool {
        match self.form.opcode {
            _ if self.pid == 0 => false,
            op::SETLKW => has_signal(self.pid),
            _ => is_being_killed(self.pid),
        }
    }
}

/// Whether a signal is pending that ends the process: SIGKILL (which every deadly signal becomes
/// that dumps no core), or a core-dumping signal that is neither handled nor ignored nor blocked.
/// Also true if the process has ended: it no longer waits.
fn is_being_killed(pid: u32) -> bool {
    has_signal_but(pid, &["SigCgt:", "SigIgn:", "SigBlk:"])
}

/// Signals that do nothing unless they are handled. The kernel has them pending all the same, for
/// all threads, while one thread has them blocked: as it starts a program, for example.
const IGNORED: [i32; 4] = [libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH];

/// Whether a signal is pending that the process handles, or that ends it.
fn has_signal(pid: u32) -> bool {
    has_signal_but(pid, &["SigIgn:", "SigBlk:"])
}

fn has_signal_but(pid: u32, masks: &[&str]) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    status.map_or(true, |status| says_signal_but(&status, masks))
}

/// The same of what `/proc/PID/status` says.
fn says_signal_but(status: &str, masks: &[&str]) -> bool {
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    let bits = |all: &[i32]| all.iter().fold(0, |all, signal| all | 1_u64 << (signal - 1));
    let stops = bits(&[libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU]);
    let harmless = stops | bits(&IGNORED) & !mask("SigCgt:");
    let pending = mask("SigPnd:") | mask("ShdPnd:");
    pending & !masks.iter().fold(harmless, |all, name| all | mask(name)) != 0
}

/// Requests that a signal has reached but not ended.
#[derive(Default)]
struct WatchedRequests {
    requests: Vec<u64>,
    /// The watching thread runs.
    watching: bool,
    /// The mount is gone.
    over: bool,
}

#[derive(Default)]
struct ParkShard {
    waiting: HashMap<u64, ParkedRequest>,
    early: HashSet<u64>,
    early_order: VecDeque<u64>,
}

/// All parked requests of a mount.
pub(crate) struct ParkTable {
    shards: [Mutex<ParkShard>; SHARDS],
    watched: Mutex<WatchedRequests>,
    /// `watched.over` was set.
    ended: Condvar,
    counters: Arc<ThreadCounters>,
    tracer: Arc<Tracer>,
}

impl fmt::Debug for ParkTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParkTable").field("waiting", &self.len()).finish_non_exhaustive()
    }
}

impl ParkTable {
    pub(crate) fn new(counters: Arc<ThreadCounters>, tracer: Arc<Tracer>) -> Self {
        Self {
            shards: Default::default(),
            watched: Mutex::default(),
            ended: Condvar::new(),
            counters,
            tracer,
        }
    }

    /// A request is being answered: no other thread answers it.
    fn note_end(&self, unique: u64, waiting: &ParkedRequest, how: Answered<'_>) {
        let took = waiting.begun.elapsed();
        if matches!(how, Answered::Errno(_)) {
            self.counters.error(waiting.form.opcode);
        }
        self.counters.answered(waiting.form.opcode, took);
        self.tracer.ends(unique, took, how);
    }

    fn shard(&self, unique: u64) -> &Mutex<ParkShard> {
        // The kernel counts in steps of two: the lowest bit marks interrupts.
        &self.shards[(unique >> 1) as usize % SHARDS]
    }

    /// How many requests are parked.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().waiting.len()).sum()
    }

    fn insert(&self, unique: u64, mut waiting: ParkedRequest) {
        let mut shard = self.shard(unique).lock();
        if !shard.early.is_empty() && shard.early.remove(&unique) {
            shard.early_order.retain(|&u| u != unique);
            waiting.interrupted = true;
        }
        shard.waiting.insert(unique, waiting);
    }

    /// Sends the answer, unless an interrupt was first.
    fn complete(&self, unique: u64, result: Result<Reply, Errno>) {
        let Some(w) = self.shard(unique).lock().waiting.remove(&unique) else {
            return; // an interrupt was first
        };
        let mut out = [0_u8; SMALL_MAX];
        match result.and_then(|r| encode::reply(w.form, &mut out, r)) {
            Ok(AnswerBody::Out(len)) => {
                self.note_end(unique, &w, Answered::Body(&out[..len]));
                w.port.answer(unique, w.slot, 0, AnswerBytes::Borrowed(&out[..len]))
            }
            Ok(AnswerBody::Bytes(bytes)) => {
                self.note_end(unique, &w, Answered::Body(&[]));
                w.port.answer(unique, w.slot, 0, bytes)
            }
            Err(e) => {
                self.note_end(unique, &w, Answered::Errno(e.0));
                w.port.answer(unique, w.slot, -e.0, AnswerBytes::Borrowed(&[]));
            }
        }
    }

    /// The requester no longer waits: answers EINTR now, or when the request parks.
    pub(crate) fn interrupt(self: &Arc<Self>, unique: u64) {
        let mut shard = self.shard(unique).lock();
        match shard.waiting.get(&unique).map(ParkedRequest::gives_up) {
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

    /// The operation that parked `unique` has returned: an early interrupt takes effect.
    pub(crate) fn settled(self: &Arc<Self>, unique: u64) {
        if self.shard(unique).lock().waiting.get(&unique).is_some_and(|w| w.interrupted)
            && !self.look_again(unique)
        {
            self.watch(unique);
        }
    }

    /// Ends the wait of `unique` if its process is being killed; `false` if it waits on.
    fn look_again(&self, unique: u64) -> bool {
        self.end_if(unique, ParkedRequest::gives_up)
    }

    fn end_if(&self, unique: u64, ends: impl Fn(&ParkedRequest) -> bool) -> bool {
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
        // If no thread can be started, the next such signal tries again; until then only the answer
        // ends the wait.
        let thread = std::thread::Builder::new().name("ferry-watch".into());
        watched.watching = thread.spawn(move || table.watch_all()).is_ok();
    }

    fn watch_all(&self) {
        let mut watched = self.watched.lock();
        while !watched.over {
            self.ended.wait_for(&mut watched, WATCH_INTERVAL);
            let mut requests = std::mem::take(&mut watched.requests);
            MutexGuard::unlocked(&mut watched, || {
                requests.retain(|&unique| !self.look_again(unique))
            });
            watched.requests.append(&mut requests);
            if watched.requests.is_empty() {
                break;
            }
        }
        watched.watching = false;
    }

    /// Starts the sweep, which runs until the mount is gone. Each turn of it also calls `also`.
    pub(crate) fn start_sweep(
        self: &Arc<Self>,
        also: impl Fn() + Send + 'static,
    ) -> io::Result<()> {
        let table = Arc::clone(self);
        let sweep = move || {
            let mut watched = table.watched.lock();
            for turn in 0.. {
                table.ended.wait_for(&mut watched, SWEEP_INTERVAL);
                if watched.over {
                    break;
                }
                MutexGuard::unlocked(&mut watched, || {
                    table.sweep(turn);
                    also();
                });
            }
        };
        std::thread::Builder::new().name("ferry-sweep".into()).spawn(sweep).map(drop)
    }

    /// Ends requests for which an INTERRUPT should have arrived. If very many wait, each `turn`
    /// looks at some of them.
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
                self.end_if(unique, ParkedRequest::missed_a_signal);
            });
        }
    }

    /// Answers EINTR. `waiting` is the table's entry of `unique`; `None`: it is answered already.
    fn answer_eintr(&self, unique: u64, waiting: Option<ParkedRequest>) {
        let Some(waiting) = waiting else { return };
        self.note_end(unique, &waiting, Answered::Errno(libc::EINTR));
        // Before the answer: the program may send the same request again as soon as it has the
        // answer.
        if let Some(interrupt) = waiting.interrupt {
            interrupt();
        }
        waiting.port.answer(unique, waiting.slot, -libc::EINTR, AnswerBytes::Borrowed(&[]));
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

/// Parks the request that is being served.
pub(crate) struct RequestParker<'a> {
    pub(crate) table: &'a Arc<ParkTable>,
    pub(crate) port: &'a Arc<dyn AnswerPort>,
    pub(crate) unique: u64,
    pub(crate) slot: u32,
    pub(crate) replayed: Option<RequestId>,
    pub(crate) form: AnswerForm,
    /// The process that asks; 0: unknown.
    pub(crate) pid: u32,
    /// When the request was taken.
    pub(crate) begun: Instant,
    pub(crate) reads: Option<&'a dyn ReadRing>,
    /// The request has parked.
    pub(crate) parked: AtomicBool,
}

impl Park for RequestParker<'_> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        assert!(!self.parked.swap(true, Ordering::Relaxed), "a request is parked at most once");
        let waiting = ParkedRequest {
            form: self.form,
            slot: self.slot,
            port: Arc::clone(self.port),
            interrupt,
            pid: self.pid,
            begun: self.begun,
            interrupted: false,
            swept: false,
            _waiting: Waiting::here(),
        };
        self.table.insert(self.unique, waiting);
        let (table, unique) = (Arc::clone(self.table), self.unique);
        Box::new(move |result| table.complete(unique, result))
    }

    fn listing_bytes(&self) -> usize {
        (self.form.size as usize).min(IO_MAX)
    }

    fn read_ring(&self) -> Option<&dyn ReadRing> {
        self.reads
    }

    fn request(&self) -> Option<RequestId> {
        self.replayed
    }
}

#[cfg(test)]
mod tests;
