//! FUSE over io_uring (kernel 6.14 and later): one queue for each core, served by a thread on that
//! core, so that a request and its answer need not wake another core ([`Placement`]).
//!
//! A ring entry (here: a *slot*) is a header buffer and a payload buffer, registered with the
//! kernel. The kernel fills a slot with a request and completes the slot's command. The answer goes
//! into the same buffers and is committed, which returns the slot to the kernel. A parked request
//! keeps its slot; its answer arrives through the queue's mailbox, because only the queue's own
//! thread touches its ring and its slots.
//!
//! If no slot is free, the kernel queues requests. It takes the next request from that queue when a
//! slot is committed, but not when a slot is registered. So slots are added before the last one is
//! taken ([`SPARE_SLOTS`]). If a burst is faster, the queue sends a *probe*: it makes the kernel
//! send a request without a meaning, which arrives in one of the new slots, and whose commit
//! fetches what was queued ([`QueueRing::make_room`]). Beyond [`SLOTS_MAX`], requests wait until a
//! parked one is answered. Every parked request is answered in time except those that wait for
//! locks: a file system that keeps locks itself must let fewer requests wait than that.
//!
//! A read that misses the file system's cache goes through the same ring ([`DeviceReads`]), so that
//! no other thread takes part in it.
//!
//! FORGET, INTERRUPT and notifications still go through /dev/fuse.
//!
//! Before another process goes on with the mount, a queue *drains*: it serves no more of what
//! arrives, and commits nothing more, so that the kernel has no slot left that it could fill. What
//! it has not filled by itself, probes fill. The requests and answers stay in the slots, whose
//! memory the next process has, too ([`QueueMemory`]); that process serves and commits them. A slot
//! that the kernel has when a ring ends is lost without harm, but a request that it is just putting
//! there would fail. While a request is parked that may need the kernel's pages, reads and
//! writes are served on: the kernel may wait for them before it gives those pages up.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use ferry_device::ReadRing;
use ferry_env::activity;
use ferry_fs::{Ino, RequestId};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::{FromBytes, IntoBytes};

use super::memory::{QueueMemory, QueuePage, RequestSlot, SLOTS_MAX, SlotHolds, slot_number};
use super::placement::{Loads, Placement};
use super::reads::DeviceReads;
use crate::abi::{
    self, InHeader, OutHeader, URING_OP_IN, URING_RING_ENT, UringCmdReq, UringEntInOut, op,
};
use crate::decode::RequestArgs;
use crate::device::FuseDevice;
use crate::encode::{AnswerBody, AnswerBytes, SMALL_MAX};
use crate::notify::ask_for_request;
use crate::request::counters::{MountCounters, ThreadCounters};
use crate::request::dispatch::{Dispatcher, Origin, ServeResult};
use crate::request::parked::AnswerPort;
use crate::request::realtime::Boost;

/// Slots that a queue starts with.
const SLOTS_START: usize = 1024;
/// If fewer slots than this are free, this many are added.
const SPARE_SLOTS: usize = 512;
/// So many slots of a queue have their first page there from the start, for names.
const SMALL_THERE: usize = 128;
/// Some of them have so many bytes there for large writes: as many as all queues together have
/// memory for.
const LARGE: usize = 128 << 10;
const LARGE_THERE: usize = 8 << 20;
/// Entries of the submission ring; more are submitted in several system calls.
const SUBMIT_MAX: u32 = 128;
/// Set in the numbers of probes: the kernel counts its own requests from 2 up.
const PROBE: u64 = 1 << 62;
/// The completion of the doorbell: the mailbox has answers.
const DOORBELL: u64 = u64::MAX;
/// The completion of what [`Keeper`] waits for, which never comes.
const KEEPER: u64 = DOORBELL - 1;
/// Added to the number of a read of a device.
const READ: u64 = 1 << 32;

/// The answer of a parked request.
struct ParkedAnswer {
    slot: u32,
    unique: u64,
    error: i32,
    body: AnswerBytes<'static>,
}

/// What a queue's thread has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Serve,
    /// Another process is to go on. The number tells one such order from the next. The kernel knows
    /// this regular file meanwhile; 0: perhaps none.
    Drain {
        number: u64,
        file: Ino,
    },
    End,
}

#[derive(Default)]
struct Mailbox {
    answers: Vec<ParkedAnswer>,
    order: Order,
}

/// A queue, as other threads see it.
struct UringQueue {
    number: u16,
    mailbox: Mutex<Mailbox>,
    doorbell: File,
    /// Its thread looks into the mailbox before it waits, and needs no doorbell for its own
    /// answers.
    thread: OnceLock<ThreadId>,
}

impl UringQueue {
    fn order(&self, order: Order) {
        self.mailbox.lock().order = order;
        self.ring_doorbell();
    }

    fn ring_doorbell(&self) {
        if let Err(error) = (&self.doorbell).write(&1_u64.to_ne_bytes()) {
            tracing::error!(%error, queue = self.number, "cannot ring the doorbell of a FUSE queue");
        }
    }
}

impl AnswerPort for UringQueue {
    fn answer(&self, unique: u64, slot: u32, error: i32, body: AnswerBytes<'_>) {
        let mut mailbox = self.mailbox.lock();
        let first = mailbox.answers.is_empty();
        mailbox.answers.push(ParkedAnswer { slot, unique, error, body: body.keep() });
        drop(mailbox);
        if first && self.thread.get() != Some(&thread::current().id()) {
            self.ring_doorbell();
        }
    }
}

/// The queues of a mount.
pub(crate) struct UringQueues {
    all: Vec<RunningQueue>,
    /// Orders to drain so far.
    drains: AtomicU64,
}

impl std::fmt::Debug for UringQueues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringQueues").field("queues", &self.all.len()).finish_non_exhaustive()
    }
}

struct RunningQueue {
    queue: Arc<UringQueue>,
    thread: JoinHandle<()>,
    /// The thread says here which order to drain it has carried out.
    drained: Receiver<u64>,
}

impl UringQueues {
    /// How many a mount has; 0: this process may create no rings, or cannot tell how many, because
    /// a container may have no `/sys`. Ask before INIT offers queues: the kernel then waits for
    /// them.
    pub(crate) fn possible() -> u16 {
        let cores = builder().build(1).and_then(|_ring| possible_cores());
        cores.unwrap_or_else(|error| {
            tracing::debug!(%error, "no io_uring here");
            0
        })
    }

    /// Starts a queue for each core that the machine may have. The kernel holds requests back until
    /// all queues are registered.
    pub(crate) fn start(
        device: &Arc<FuseDevice>,
        dispatcher: &Arc<Dispatcher>,
        counters: &MountCounters,
        memory: &Arc<QueueMemory>,
    ) -> io::Result<Self> {
        let mut queues = Self { all: Vec::new(), drains: AtomicU64::new(0) };
        let count = memory.queues();
        let loads = Loads::new(count);
        for number in 0..count {
            let (device, dispatcher) = (Arc::clone(device), Arc::clone(dispatcher));
            let (counters, loads) = (counters.block(), loads.clone());
            let memory = Arc::clone(memory);
            if let Err(e) = queues.add(number, |queue, drained| QueueThread {
                queue,
                device,
                dispatcher,
                counters,
                loads,
                memory,
                drained,
            }) {
                queues.stop();
                return Err(e);
            }
        }
        Ok(queues)
    }

    fn add(
        &mut self,
        number: u16,
        thread: impl FnOnce(Arc<UringQueue>, Sender<u64>) -> QueueThread,
    ) -> io::Result<()> {
        let queue = Arc::new(UringQueue {
            number,
            mailbox: Mutex::default(),
            doorbell: File::from(eventfd(0, EventfdFlags::CLOEXEC)?),
            thread: OnceLock::new(),
        });
        let (ready, is_ready) = sync_channel(1);
        let (has_drained, drained) = channel();
        let serving = thread(Arc::clone(&queue), has_drained);
        let name = format!("fuse-ring-{number}");
        let thread = thread::Builder::new().name(name).spawn(move || serving.run(&ready))?;
        self.all.push(RunningQueue { queue, thread, drained });
        is_ready.recv().map_err(io::Error::other)?
    }

    /// Drains all queues; `false`: one did not in this time, and all serve on. `file`: a regular
    /// file that the kernel knows until then.
    pub(crate) fn drain(&self, patience: Duration, file: Option<Ino>) -> bool {
        let number = self.drains.fetch_add(1, Ordering::Relaxed) + 1;
        let order = Order::Drain { number, file: file.unwrap_or_default() };
        self.all.iter().for_each(|running| running.queue.order(order));
        let has_drained = |running: &RunningQueue| loop {
            match running.drained.recv_timeout(patience) {
                Ok(of) if of == number => return true,
                // It carried out an order of which nobody expected that any more.
                Ok(_) => {}
                Err(_) => return false,
            }
        };
        let drained = self.all.iter().all(has_drained);
        if !drained {
            self.resume();
        }
        drained
    }

    /// They serve again.
    pub(crate) fn resume(&self) {
        self.all.iter().for_each(|running| running.queue.order(Order::Serve));
    }

    /// The mount is gone, or the queues have drained: ends the threads.
    pub(crate) fn stop(self) {
        self.all.iter().for_each(|running| running.queue.order(Order::End));
        for running in self.all {
            running.thread.join().expect("a queue's thread does not panic");
        }
    }
}

/// A ring to which only its own thread submits. The kernel's part of a command runs when that
/// thread asks for completions, and does not interrupt it.
fn builder() -> io_uring::Builder<squeue::Entry128, cqueue::Entry> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_clamp();
    builder
}

/// The kernel has a queue for each core that might ever be present.
fn possible_cores() -> io::Result<u16> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = list.trim().rsplit(['-', ',']).next().and_then(|n| n.parse::<u16>().ok());
    last.and_then(|n| n.checked_add(1)).ok_or_else(|| io::Error::other("unreadable list of cores"))
}

/// The kinds of requests whose answers are written into the slot at once. They have no payload of
/// their own, and may be replayed.
fn is_bulk(opcode: u32) -> bool {
    matches!(opcode, op::READ | op::READDIR | op::READDIRPLUS)
}

/// What a ring waits for, so that a process that is killed leaves its queues in order.
///
/// A thread that ends leaves its rings to the kernel's own threads. These end with ECANCELED what
/// the kernel is just handing over, and under load the work of a ring with `DEFER_TASKRUN` goes on
/// for seconds. But a thread that has begun to wait for another *ring* takes everything back by
/// itself before it ends: it takes over the requests that are being handed to it, into their slots,
/// and gives up the slots that have none, until that wait has ended, too.
struct Keeper(IoUring);

impl Keeper {
    fn new() -> io::Result<Self> {
        Ok(Self(IoUring::new(1)?))
    }

    /// What the queue's ring begins with.
    fn wait(&self) -> squeue::Entry128 {
        let readable = libc::POLLIN as u32;
        let poll = opcode::PollAdd::new(types::Fd(self.0.as_raw_fd()), readable);
        poll.build().user_data(KEEPER).into()
    }
}

impl RequestSlot {
    fn set_answer(&mut self, unique: u64, error: i32, payload: usize) {
        let len = (size_of::<OutHeader>() + payload) as u32;
        let head = OutHeader { len, error, unique };
        let (headers, _) = self.buffers();
        headers[..size_of::<OutHeader>()].copy_from_slice(head.as_bytes());
        let entry = UringEntInOut {
            commit_id: unique,
            payload_sz: payload as u32,
            ..UringEntInOut::default()
        };
        headers[URING_RING_ENT..].copy_from_slice(entry.as_bytes());
        self.set_answered(unique);
    }

    /// Makes the request again of which the answer has overwritten this kind.
    fn restore_opcode(&mut self, opcode: u32) {
        let (headers, _) = self.buffers();
        let (mut head, _) =
            InHeader::read_from_prefix(&headers[..]).expect("the header buffer begins with it");
        head.opcode = opcode;
        headers[..size_of::<InHeader>()].copy_from_slice(head.as_bytes());
    }

    /// The request or answer that it holds, by the kernel's number.
    fn unique(&mut self) -> u64 {
        let (headers, _) = self.buffers();
        let entry = UringEntInOut::read_from_bytes(&headers[URING_RING_ENT..]);
        entry.expect("the header buffer ends with it").commit_id
    }

    fn opcode(&mut self) -> u32 {
        let (headers, _) = self.buffers();
        InHeader::read_from_prefix(&headers[..]).expect("the header buffer begins with it").0.opcode
    }

    fn set_body(&mut self, body: &[u8]) -> Result<usize, i32> {
        let (_, payload) = self.buffers();
        payload.get_mut(..body.len()).ok_or(libc::EIO)?.copy_from_slice(body);
        Ok(body.len())
    }
}

/// How far a queue has drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drain {
    /// It serves.
    No,
    /// Parked requests may need reads and writes, which are served. All else is held.
    Parked,
    /// Whatever arrives is held, until the kernel has no slot to fill.
    Slots,
    Done,
}

/// What the thread of a queue starts with.
struct QueueThread {
    queue: Arc<UringQueue>,
    device: Arc<FuseDevice>,
    dispatcher: Arc<Dispatcher>,
    counters: Arc<ThreadCounters>,
    loads: Loads,
    memory: Arc<QueueMemory>,
    drained: Sender<u64>,
}

impl QueueThread {
    fn run(self, ready: &SyncSender<io::Result<()>>) {
        let number = self.queue.number;
        self.queue.thread.get_or_init(|| thread::current().id());
        let placement = Placement::enter(usize::from(number), self.loads.clone())
            .inspect_err(|error| {
                tracing::debug!(%error, number, "cannot pin a FUSE queue to its core");
            })
            .ok();
        let mut ring = match QueueRing::new(self, placement) {
            Ok(ring) => ring,
            Err(e) => {
                // It fails only if the mount was given up.
                let _given_up = ready.send(Err(e));
                return;
            }
        };
        let _given_up = ready.send(Ok(()));
        if let Err(error) = ring.serve() {
            tracing::error!(%error, number, "a FUSE queue failed");
        }
    }
}

/// The ring and the slots of a queue, owned by its thread.
struct QueueRing {
    /// Dropped before the slots: the kernel then no longer uses them.
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    slots: Vec<RequestSlot>,
    /// Slots that hold a parked request.
    parked: usize,
    /// Those of them that hold no READ. A READ needs nothing of the kernel.
    parked_others: usize,
    drain: Drain,
    /// The number of the newest order to drain.
    order: u64,
    /// Slots that hold a request or an answer for the next process.
    held: Vec<usize>,
    /// It has drained when so many are held.
    fillable: usize,
    /// The kernel may have queued requests because no slot was free: send a probe.
    probe_due: bool,
    /// A regular file that the kernel knows, which probes name: the file of a parked request.
    file: u64,
    /// The slot of the last probe: its commit fetches what the kernel has queued, with the next
    /// completions or not at all.
    fetching: Option<usize>,
    reads: DeviceReads,
    /// Slots whose answers the ring has, and the numbers of their requests.
    committing: Vec<(usize, u64)>,
    page: QueuePage,
    _keeper: Keeper,
    doorbell_value: Box<[u8; 8]>,
    completed: Vec<(u64, i32)>,
    answers: Vec<ParkedAnswer>,
    port: Arc<dyn AnswerPort>,
    boost: Boost,
    /// `None`: the thread runs where it may.
    placement: Option<Placement>,
    from: QueueThread,
}

impl QueueRing {
    fn new(from: QueueThread, placement: Option<Placement>) -> io::Result<Self> {
        let ring = builder().setup_cqsize(2 * SLOTS_MAX as u32).build(SUBMIT_MAX)?;
        let keeper = Keeper::new()?;
        let waits = keeper.wait();
        let port = Arc::clone(&from.queue) as Arc<dyn AnswerPort>;
        let mut this = Self {
            ring,
            slots: Vec::new(),
            parked: 0,
            parked_others: 0,
            drain: Drain::No,
            order: 0,
            held: Vec::new(),
            fillable: 0,
            probe_due: false,
            file: 0,
            fetching: None,
            reads: DeviceReads::default(),
            committing: Vec::new(),
            page: from.memory.page(from.queue.number),
            _keeper: keeper,
            doorbell_value: Box::new([0; 8]),
            completed: Vec::new(),
            answers: Vec::new(),
            port,
            boost: from.dispatcher.realtime.enter(),
            placement,
            from,
        };
        this.push(&waits)?;
        this.listen()?;
        match this.from.memory.slots(this.from.queue.number) {
            0 => this.grow(SLOTS_START)?,
            slots => this.go_on(slots)?,
        }
        this.ring.submit()?;
        Ok(this)
    }

    /// Takes over the slots of the process before, which has left the mount or was killed.
    fn go_on(&mut self, slots: usize) -> io::Result<()> {
        let (mut left, mut free) = (Vec::new(), Vec::new());
        for number in 0..slots {
            self.slots.push(self.from.memory.slot(self.from.queue.number, number));
            let unique = self.slots[number].unique();
            match self.slots[number].holds(unique) {
                SlotHolds::Nothing => {
                    self.from.memory.empty_payload(self.from.queue.number, number);
                    free.push(number);
                }
                _ => left.push(number),
            }
        }
        let large = LARGE_THERE / LARGE / usize::from(self.from.memory.queues());
        for slot in free.iter().take(large) {
            self.slots[*slot].bring_in(LARGE);
        }
        // Those are committed first, so the kernel fills them again soon, perhaps with a name.
        for slot in &left {
            self.slots[*slot].bring_in(1);
        }
        self.register_all(free)?;
        self.submit()?;
        // What the kernel has queued since, registering does not fetch.
        self.probe_due = true;
        self.take_back(left)
    }

    /// Registers these slots, the first one last: the kernel fills the one first that it has got
    /// last. So requests that come one by one use the same few slots, whose pages are there.
    fn register_all(&mut self, slots: Vec<usize>) -> io::Result<()> {
        for slot in slots.iter().take(SMALL_THERE) {
            self.slots[*slot].bring_in(1);
        }
        slots.into_iter().rev().try_for_each(|slot| self.register(slot))
    }

    fn register(&mut self, slot: usize) -> io::Result<()> {
        self.push(&self.command(abi::URING_REGISTER, 0, slot))
    }

    /// Serves and commits what was held.
    fn take_back(&mut self, held: Vec<usize>) -> io::Result<()> {
        for number in answered_first(&self.page, &mut self.slots, held) {
            let unique = self.slots[number].unique();
            match self.slots[number].holds(unique) {
                SlotHolds::Nothing => {}
                SlotHolds::Answer => self.commit(number, unique)?,
                SlotHolds::Request | SlotHolds::RequestOf(_)
                    if let Some((error, len)) = self.page.answer(unique) =>
                {
                    self.write_answer(number, unique, error, len)?;
                }
                SlotHolds::RequestOf(opcode) if is_bulk(opcode) => {
                    self.slots[number].restore_opcode(opcode);
                    self.request(number)?;
                }
                // A long answer has overwritten the request, not all of it.
                SlotHolds::RequestOf(_) => {
                    self.slots[number].set_answer(unique, -libc::EIO, 0);
                    self.commit(number, unique)?;
                }
                SlotHolds::Request => self.request(number)?,
            }
        }
        Ok(())
    }

    /// Commits the answer whose body is in the queue's page.
    fn write_answer(
        &mut self,
        number: usize,
        unique: u64,
        error: i32,
        len: usize,
    ) -> io::Result<()> {
        let (_, payload) = self.slots[number].buffers();
        payload[..len].copy_from_slice(&self.page.body()[..len]);
        self.slots[number].set_answer(unique, error, len);
        self.commit(number, unique)
    }

    fn push(&mut self, entry: &squeue::Entry128) -> io::Result<()> {
        loop {
            #[expect(unsafe_code, reason = "the ring takes addresses")]
            // SAFETY: the buffers that entries name belong to this struct, are boxed, and outlive
            // the ring. Those of reads are kept until the kernel has answered, or for ever.
            let pushed = unsafe { self.ring.submission().push(entry) };
            match pushed {
                Ok(()) => return Ok(()),
                Err(_) => self.submit()?,
            }
        }
    }

    /// Gives the kernel what is queued. What it cannot take just now stays queued.
    fn submit(&self) -> io::Result<()> {
        match self.ring.submit() {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                thread::yield_now();
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Submits a read of the doorbell, which completes when the mailbox has answers.
    fn listen(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.from.queue.doorbell.as_raw_fd());
        let len = self.doorbell_value.len() as u32;
        let read = opcode::Read::new(fd, self.doorbell_value.as_mut_ptr(), len)
            .build()
            .user_data(DOORBELL);
        self.push(&read.into())
    }

    fn command(&self, code: u32, commit_id: u64, slot: usize) -> squeue::Entry128 {
        let request =
            UringCmdReq { commit_id, qid: self.from.queue.number, ..UringCmdReq::default() };
        let mut cmd = [0_u8; 80];
        cmd[..size_of::<UringCmdReq>()].copy_from_slice(request.as_bytes());
        let fd = types::Fd(self.from.device.file().as_raw_fd());
        let parts = (code == abi::URING_REGISTER).then(|| self.slots[slot].parts());
        let entry =
            opcode::UringCmd80::new(fd, code).cmd(cmd).addr(parts).build().user_data(slot as u64);
        if parts.is_some() { with_len(entry, 2) } else { entry }
    }

    fn grow(&mut self, count: usize) -> io::Result<()> {
        let first = self.slots.len();
        for slot in first..first + count {
            self.slots.push(self.from.memory.slot(self.from.queue.number, slot));
        }
        self.register_all((first..first + count).collect())
    }

    fn commit(&mut self, slot: usize, unique: u64) -> io::Result<()> {
        self.committing.push((slot, unique));
        self.push(&self.command(abi::URING_COMMIT_AND_FETCH, unique, slot))
    }

    /// Submits what is queued, and waits for completions: their tokens and results.
    fn wait(&mut self) -> io::Result<Vec<(u64, i32)>> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => self.note_committed(),
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
            Err(e) => return Err(e),
        }
        let mut completed = std::mem::take(&mut self.completed);
        completed.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
        Ok(completed)
    }

    /// Notes that the kernel has taken what was submitted.
    fn note_committed(&mut self) {
        if self.ring.submission().is_empty() {
            for (slot, unique) in self.committing.drain(..) {
                self.slots[slot].set_committed(unique);
            }
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut completed = self.wait()?;
            self.boost.begin_turn();
            let (fetching, mut ends) = (self.fetching.take(), false);
            for (token, result) in completed.drain(..) {
                if token == DOORBELL {
                    ends = !self.doorbell_rang()?;
                    continue;
                }
                if token == KEEPER {
                    continue;
                }
                if token & READ != 0 {
                    self.reads.ended(token as u32, result);
                    self.boost.served(usize::try_from(result).unwrap_or(0));
                    continue;
                }
                let (slot, parked) = (token as usize, self.parked);
                self.arrived(slot, result)?;
                if fetching == Some(slot) {
                    let keeps_slot = self.parked > parked;
                    self.probe_due |= keeps_slot;
                    self.fetching = (!keeps_slot).then_some(slot);
                }
            }
            self.completed = completed;
            if ends {
                return self.finish_reads();
            }
            self.issue_reads()?;
            self.send_parked_answers()?;
            match self.drain {
                Drain::No => self.make_room()?,
                Drain::Parked | Drain::Slots | Drain::Done => self.go_on_draining()?,
            }
            self.boost.end_turn();
            if let Some(placement) = &mut self.placement {
                placement.end_turn(self.reads.in_flight());
            }
        }
    }

    /// Puts the reads into the ring that the served requests have begun.
    fn issue_reads(&mut self) -> io::Result<()> {
        while let Some((number, entry)) = self.reads.next() {
            self.push(&entry.user_data(READ | u64::from(number)).into())?;
        }
        Ok(())
    }

    /// The mount is gone: waits for the reads that are under way.
    fn finish_reads(&mut self) -> io::Result<()> {
        self.issue_reads()?;
        while self.reads.in_flight() > 0 {
            for (token, result) in self.wait()? {
                if token != DOORBELL && token != KEEPER && token & READ != 0 {
                    self.reads.ended(token as u32, result);
                }
            }
            self.issue_reads()?;
        }
        Ok(())
    }

    /// Adds slots before the last one is taken. If slots are added, or none was free, the kernel
    /// may have queued requests before. It sends one of them whenever a slot is committed. A
    /// request that is answered at once fetches the next one itself; at the beginning, and after
    /// each request that parks, a probe does, until a probe fetches nothing.
    fn make_room(&mut self) -> io::Result<()> {
        let free = self.slots.len() - self.parked;
        self.probe_due |= free == 0;
        if free < SPARE_SLOTS && self.slots.len() < SLOTS_MAX {
            self.grow(SPARE_SLOTS)?;
            self.probe_due = true;
        }
        if self.probe_due && self.slots.len() > self.parked && self.knows_file() {
            self.probe_due = false;
            self.submit()?;
            let _known = self.probe_any();
        }
        Ok(())
    }

    /// Whether a regular file is known by which the kernel can be asked. No request has named one
    /// at the beginning, while those that would are queued.
    fn knows_file(&self) -> bool {
        self.file != 0 || !self.from.dispatcher.fs.known_files().is_empty()
    }

    /// Asks for a request without a meaning. Gives the file by which it was asked for; `None`: the
    /// kernel knows none.
    fn probe_any(&self) -> Option<Ino> {
        let known = || self.from.dispatcher.fs.known_files();
        let files = std::iter::once(self.file).chain(std::iter::once_with(known).flatten());
        files.filter(|file| *file != 0).find(|file| self.probe(*file))
    }

    /// Asks for a request without a meaning; `false`: the kernel does not know the file.
    fn probe(&self, file: u64) -> bool {
        let queue = u64::from(self.from.queue.number);
        let number = PROBE | queue << 40 | self.page.next_probe() << 1;
        ask_for_request(&self.from.device, file, number)
    }

    /// Listens again; `false`: the mount is gone, or another process goes on with it.
    fn doorbell_rang(&mut self) -> io::Result<bool> {
        let order = self.from.queue.mailbox.lock().order;
        match order {
            Order::End => return Ok(false),
            Order::Serve if self.drain == Drain::No => {}
            Order::Serve => self.end_drain()?,
            Order::Drain { number, file } => {
                self.order = number;
                self.file = if file == 0 { self.file } else { file };
                // If the order before was withdrawn, what it did counts for this one.
                self.drain = match self.drain {
                    Drain::No => Drain::Parked,
                    Drain::Done => Drain::Slots,
                    under_way => under_way,
                };
            }
        }
        self.listen()?;
        Ok(true)
    }

    /// Serves what was held: no other process goes on.
    fn end_drain(&mut self) -> io::Result<()> {
        self.drain = Drain::No;
        let held = std::mem::take(&mut self.held);
        self.take_back(held)
    }

    /// Looks how far the drain is. Nothing of what arrived is to be committed any more.
    fn go_on_draining(&mut self) -> io::Result<()> {
        if self.drain == Drain::Parked && self.parked_others == 0 {
            self.drain = Drain::Slots;
            self.submit()?;
            self.fill_slots();
        }
        if self.drain == Drain::Slots && self.parked == 0 && self.held.len() >= self.fillable {
            self.drain = Drain::Done;
            // The receiver is gone only if the process ends anyway.
            let _told = self.from.drained.send(self.order);
        }
        Ok(())
    }

    /// Makes the kernel fill each slot that it has. It can only if it knows a regular file.
    fn fill_slots(&mut self) {
        let free = self.slots.len() - self.parked - self.held.len();
        // The kernel sends a probe to the queue of the core that asks for it.
        let pinned = self.placement.as_mut().is_some_and(Placement::stay);
        let known = if pinned { self.probe_any() } else { None };
        let all = known.is_some_and(|file| (1..free).all(|_| self.probe(file)));
        self.fillable = if all { self.slots.len() } else { 0 };
    }

    /// Commits the answers of parked requests.
    fn send_parked_answers(&mut self) -> io::Result<()> {
        let mut mailbox = self.from.queue.mailbox.lock();
        std::mem::swap(&mut mailbox.answers, &mut self.answers);
        drop(mailbox);
        let mut answers = std::mem::take(&mut self.answers);
        for answer in answers.drain(..) {
            let slot = answer.slot as usize;
            let opcode = self.slots[slot].opcode();
            self.parked -= 1;
            self.parked_others -= usize::from(opcode != op::READ);
            let len = put_answer(
                (&mut self.slots[slot], &mut self.page),
                (answer.unique, opcode),
                answer.error,
                Body::Bytes(&answer.body),
            );
            self.boost.served(len);
            match self.drain {
                Drain::No | Drain::Parked => self.commit(slot, answer.unique)?,
                Drain::Slots | Drain::Done => self.held.push(slot),
            }
        }
        self.answers = answers;
        Ok(())
    }

    /// A slot holds a request, or its command has ended.
    fn arrived(&mut self, slot: usize, result: i32) -> io::Result<()> {
        match -result {
            0 if self.is_held(slot) => {
                self.held.push(slot);
                Ok(())
            }
            0 => self.request(slot),
            // The process before was killed when the kernel had just taken this answer.
            libc::ENOENT => self.register(slot),
            // The mount is ending; the doorbell will say so.
            libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV | libc::ECANCELED => Ok(()),
            errno => {
                let error = io::Error::from_raw_os_error(errno);
                tracing::error!(%error, slot, queue = self.from.queue.number, "a FUSE queue entry failed");
                Ok(())
            }
        }
    }

    /// Whether a request that has arrived is for the next process.
    fn is_held(&mut self, slot: usize) -> bool {
        match self.drain {
            Drain::No => false,
            Drain::Parked => !matches!(self.slots[slot].opcode(), op::READ | op::WRITE),
            Drain::Slots | Drain::Done => true,
        }
    }

    fn request(&mut self, number: usize) -> io::Result<()> {
        let Self { slots, page, from, port, reads, file, .. } = self;
        let slot = &mut slots[number];
        let (headers, payload) = slot.buffers();
        let (Ok((head, _)), Ok((entry, _))) = (
            InHeader::read_from_prefix(&headers[..]),
            UringEntInOut::read_from_prefix(&headers[URING_RING_ENT..]),
        ) else {
            unreachable!("the header buffer holds both");
        };
        let _doing = activity::begin(abi::operation(head.opcode));
        if matches!(head.opcode, op::FSYNC | op::READ | op::WRITE) {
            *file = head.nodeid;
        }
        if head.opcode == op::NOTIFY_REPLY {
            slot.set_answer(head.unique, 0, 0);
            self.fetching = Some(number);
            return self.commit(number, head.unique);
        }
        let fixed_len = abi::op_len(head.opcode, from.dispatcher.setxattr_ext)
            .min(URING_RING_ENT - URING_OP_IN);
        let fixed = &headers[URING_OP_IN..URING_OP_IN + fixed_len];
        let (counters, reads) = (&*from.counters, Some(&*reads as &dyn ReadRing));
        let replayed =
            RequestId { slot: slot_number(from.queue.number, number) as u32, unique: head.unique };
        let (slot_of, replayed) = (number as u32, Some(replayed));
        let origin = Origin { port, slot: slot_of, replayed, counters, reads };
        let bulk = is_bulk(head.opcode);
        let outcome = if bulk {
            from.dispatcher.serve(&head, RequestArgs { fixed, data: &[] }, payload, &origin)
        } else {
            let len = (entry.payload_sz as usize).min(payload.len());
            let small = &mut page.body()[..SMALL_MAX];
            let args = RequestArgs { fixed, data: &payload[..len] };
            from.dispatcher.serve(&head, args, small, &origin)
        };
        let (error, body) = match &outcome {
            ServeResult::Answer(AnswerBody::Out(n)) if bulk => (0, Body::InSlot(*n)),
            ServeResult::Answer(AnswerBody::Out(n)) => (0, Body::InPage(*n)),
            ServeResult::Answer(AnswerBody::Bytes(bytes)) => (0, Body::Bytes(bytes)),
            ServeResult::Error(errno) => (-errno.0, Body::InPage(0)),
            ServeResult::Nothing => {
                self.parked += 1;
                self.parked_others += usize::from(head.opcode != op::READ);
                self.boost.served(entry.payload_sz as usize);
                return Ok(());
            }
        };
        let len = put_answer((slot, page), (head.unique, head.opcode), error, body);
        match head.opcode {
            op::COPY_FILE_RANGE | op::FALLOCATE | op::SETATTR => self.boost.served_long(),
            _ => self.boost.served(len.max(entry.payload_sz as usize)),
        }
        self.commit(number, head.unique)
    }
}

/// The slots that are held, the one first whose answer the queue's page has: the next answer of the
/// queue takes the page.
fn answered_first(page: &QueuePage, slots: &mut [RequestSlot], mut held: Vec<usize>) -> Vec<usize> {
    held.sort_by_key(|number| page.answer(slots[*number].unique()).is_none());
    held
}

/// Where the body of an answer is.
enum Body<'a> {
    /// In its slot, so many bytes: only of [`is_bulk`] requests.
    InSlot(usize),
    /// In the queue's page, so many bytes.
    InPage(usize),
    Bytes(&'a [u8]),
}

/// Puts an answer into its slot, and returns the length of its body. It is in the queue's page
/// before, as far as it has room there.
fn put_answer(
    (slot, page): (&mut RequestSlot, &mut QueuePage),
    (unique, opcode): (u64, u32),
    error: i32,
    body: Body<'_>,
) -> usize {
    let (error, len) = match body {
        Body::InSlot(len) => {
            slot.keep_opcode(unique, opcode);
            (error, len)
        }
        Body::Bytes(bytes) if is_bulk(opcode) || bytes.len() > page.body().len() => {
            slot.keep_opcode(unique, opcode);
            match slot.set_body(bytes) {
                Ok(len) => (error, len),
                Err(errno) => (-errno, 0),
            }
        }
        Body::InPage(len) => {
            page.set_answer(unique, error, len);
            slot.buffers().1[..len].copy_from_slice(&page.body()[..len]);
            (error, len)
        }
        Body::Bytes(bytes) => {
            page.body()[..bytes.len()].copy_from_slice(bytes);
            page.set_answer(unique, error, bytes.len());
            slot.buffers().1[..bytes.len()].copy_from_slice(bytes);
            (error, bytes.len())
        }
    };
    slot.set_answer(unique, error, len);
    len
}

/// Sets the length field of a submission entry, which the builder of this command does not offer.
fn with_len(mut entry: squeue::Entry128, len: u32) -> squeue::Entry128 {
    /// The field's offset in `struct io_uring_sqe`.
    const LEN_AT: usize = 24;
    const {
        assert!(
            size_of::<squeue::Entry128>() == 128,
            "an entry is the kernel's structure and nothing else"
        )
    };
    let bytes = (&raw mut entry).cast::<u8>();
    #[expect(unsafe_code, reason = "the field is private")]
    // SAFETY: the entry is 128 bytes long, so four bytes at 24 are inside it; any value is valid
    // there.
    unsafe {
        bytes.add(LEN_AT).cast::<u32>().write_unaligned(len);
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The process was killed while it copied the answer to the second request into its slot.
    #[test]
    fn an_answer_that_only_the_page_has_is_written_before_another_request_is_replayed() {
        let memory = Arc::new(QueueMemory::new(1).expect("memory"));
        let (mut slots, mut page) =
            ([memory.slot(0, 0), memory.slot(0, 1), memory.slot(0, 2)], memory.page(0));
        for (slot, unique) in slots.iter_mut().zip([2_u64, 4, 6]) {
            let entry = UringEntInOut { commit_id: unique, ..UringEntInOut::default() };
            slot.buffers().0[URING_RING_ENT..].copy_from_slice(entry.as_bytes());
        }
        assert_eq!(answered_first(&page, &mut slots, vec![0, 1, 2]), [0, 1, 2]);
        page.body()[..3].copy_from_slice(b"abc");
        page.set_answer(4, 0, 3);
        assert_eq!(answered_first(&page, &mut slots, vec![0, 1, 2]), [1, 0, 2]);
    }
}
