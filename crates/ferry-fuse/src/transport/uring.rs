//! FUSE over io_uring (kernel 6.14 and later): one queue for each core, served by a thread pinned to that core, so that a
//! request and its answer need not wake another core.
//!
//! An entry of a queue (here: a slot) is a header buffer and a payload buffer, registered with the kernel. The kernel fills one
//! with a request and completes its command; the answer is put into the same buffers and committed, which hands the
//! slot back. A parked request keeps its slot; its answer comes by the queue's mailbox, because only the queue's own thread
//! touches its ring and its slots.
//!
//! When no slot is free the kernel queues requests, and takes the next from that queue when a slot is committed, but not when one is
//! registered. So slots are added before the last is taken (`SPARE`). Should a burst be faster, the queue asks the kernel for a request
//! of no meaning: it comes by one of the new slots, and committing that one brings what was queued (`Ring::make_room`). Beyond
//! `SLOTS_MAX`, requests wait until a parked one is answered, which every one is but those that wait for locks: a file system that keeps
//! locks itself must let fewer wait than that.
//!
//! FORGET, INTERRUPT and notifications still travel through /dev/fuse.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use parking_lot::Mutex;
use zerocopy::{FromBytes, IntoBytes};

use super::buffer::Buffer;
use super::dev::Device;
use crate::abi::{
    self, InHeader, OutHeader, URING_HEADER, URING_OP_IN, URING_RING_ENT, UringCmdReq, UringEntInOut, op,
};
use crate::core::{Core, Origin, Outcome};
use crate::counters::{AllCounters, Counters};
use crate::decode::Args;
use crate::encode::{Body, Bytes, SMALL_MAX};
use crate::init::IO_MAX;
use crate::notify::ask_for_request;
use crate::park::Port;
use crate::sys;

/// Slots that a queue starts with.
const SLOTS_START: usize = 1024;
/// When fewer than so many are left, as many are added.
const SPARE: usize = 512;
/// Slots that a queue may grow to: 16,384 parked requests.
const SLOTS_MAX: usize = 1 << 14;
/// Entries of the submission ring; more are submitted in several system calls.
const SUBMIT_MAX: u32 = 128;
/// Numbers of the requests that are asked for: the kernel counts its own from 2 up.
const ASKED: u64 = 1 << 62;
/// The completion that says "look into the mailbox".
const BELL: u64 = u64::MAX;

/// The answer of a parked request.
struct Letter {
    slot: u32,
    unique: u64,
    error: i32,
    body: Bytes<'static>,
}

#[derive(Default)]
struct Mail {
    letters: Vec<Letter>,
    stop: bool,
}

/// What others see of a queue.
struct Queue {
    number: u16,
    mail: Mutex<Mail>,
    bell: File,
}

impl Queue {
    fn ring_bell(&self) {
        if let Err(error) = (&self.bell).write(&1_u64.to_ne_bytes()) {
            tracing::error!(%error, queue = self.number, "ringing a queue's bell");
        }
    }
}

impl Port for Queue {
    fn answer(&self, unique: u64, slot: u32, error: i32, body: Bytes<'_>) {
        let mut mail = self.mail.lock();
        let first = mail.letters.is_empty();
        mail.letters.push(Letter { slot, unique, error, body: body.keep() });
        drop(mail);
        if first {
            self.ring_bell();
        }
    }
}

/// The queues of a mount.
pub(crate) struct Queues {
    all: Vec<(Arc<Queue>, JoinHandle<()>)>,
}

impl Queues {
    /// Whether this process may have rings at all. To be asked before the kernel is told that they are coming: it then waits for them.
    pub(crate) fn possible() -> bool {
        match builder().build(1) {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(%error, "no io_uring here");
                false
            }
        }
    }

    /// Starts a queue for each core that the machine may have; the kernel holds requests back until all are there.
    pub(crate) fn start(device: &Arc<Device>, core: &Arc<Core>, counters: &AllCounters) -> io::Result<Self> {
        let mut queues = Self { all: Vec::new() };
        for number in 0..possible_cores()? {
            let counters = counters.block();
            if let Err(e) = queues.add(number, Arc::clone(device), Arc::clone(core), counters) {
                queues.stop();
                return Err(e);
            }
        }
        Ok(queues)
    }

    fn add(
        &mut self,
        number: u16,
        device: Arc<Device>,
        core: Arc<Core>,
        counters: Arc<Counters>,
    ) -> io::Result<()> {
        let queue = Arc::new(Queue { number, mail: Mutex::default(), bell: File::from(sys::eventfd()?) });
        let (ready, is_ready) = sync_channel(1);
        let serving = Serving { queue: Arc::clone(&queue), device, core, counters };
        let name = format!("fuse-ring-{number}");
        let thread = thread::Builder::new().name(name).spawn(move || serving.run(&ready))?;
        self.all.push((queue, thread));
        is_ready.recv().map_err(io::Error::other)?
    }

    /// The mount is gone: ends the threads.
    pub(crate) fn stop(self) {
        for (queue, _) in &self.all {
            queue.mail.lock().stop = true;
            queue.ring_bell();
        }
        for (_, thread) in self.all {
            thread.join().expect("a queue's thread does not panic");
        }
    }
}

/// Only its own thread submits to a ring, and the kernel's part of a command runs when that thread asks for completions, not as
/// an interruption.
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

/// The buffers of one entry. Boxed: the kernel has their addresses.
struct Slot {
    headers: Box<[u8; URING_HEADER]>,
    payload: Buffer,
    parts: Box<[libc::iovec; 2]>,
}

impl Slot {
    fn new() -> Self {
        let mut headers = Box::new([0_u8; URING_HEADER]);
        let mut payload = Buffer::new(0, IO_MAX);
        let part =
            |bytes: &mut [u8]| libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let parts = Box::new([part(&mut headers[..]), part(payload.bytes())]);
        Self { headers, payload, parts }
    }

    fn set_answer(&mut self, unique: u64, error: i32, payload: usize) {
        let len = (size_of::<OutHeader>() + payload) as u32;
        let head = OutHeader { len, error, unique };
        self.headers[..size_of::<OutHeader>()].copy_from_slice(head.as_bytes());
        let entry =
            UringEntInOut { commit_id: unique, payload_sz: payload as u32, ..UringEntInOut::default() };
        self.headers[URING_RING_ENT..].copy_from_slice(entry.as_bytes());
    }

    fn set_body(&mut self, body: &[u8]) -> Result<usize, i32> {
        let place = self.payload.bytes().get_mut(..body.len()).ok_or(libc::EIO)?;
        place.copy_from_slice(body);
        Ok(body.len())
    }
}

/// What a queue's thread starts with.
struct Serving {
    queue: Arc<Queue>,
    device: Arc<Device>,
    core: Arc<Core>,
    counters: Arc<Counters>,
}

impl Serving {
    fn run(self, ready: &SyncSender<io::Result<()>>) {
        let number = self.queue.number;
        if let Err(error) = sys::pin_to_core(usize::from(number)) {
            tracing::debug!(%error, number, "a queue's core is not there to run on");
        }
        let mut ring = match Ring::new(self) {
            Ok(ring) => ring,
            Err(e) => {
                // Nobody listens only if the mount was given up.
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

/// A queue's ring and slots, owned by its thread.
struct Ring {
    /// Dropped before the slots: then the kernel has let go of them.
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    slots: Vec<Slot>,
    /// Slots that hold a parked request.
    parked: usize,
    /// The kernel may have queued requests for want of a slot: ask for one that brings the first of them.
    ask: bool,
    /// Requests asked for, and a regular file that the kernel knows to name in them: one of which a request is parked.
    asked: u64,
    file: u64,
    /// The slot whose last commit brings what the kernel has queued, if anything: with the next completions, or not at all.
    fetching: Option<usize>,
    small: Box<[u8; SMALL_MAX]>,
    bell_value: Box<[u8; 8]>,
    completed: Vec<(u64, i32)>,
    letters: Vec<Letter>,
    port: Arc<dyn Port>,
    from: Serving,
}

impl Ring {
    fn new(from: Serving) -> io::Result<Self> {
        let ring = builder().setup_cqsize(2 * SLOTS_MAX as u32).build(SUBMIT_MAX)?;
        let port = Arc::clone(&from.queue) as Arc<dyn Port>;
        let mut this = Self {
            ring,
            slots: Vec::new(),
            parked: 0,
            ask: false,
            asked: 0,
            file: 0,
            fetching: None,
            small: Box::new([0; SMALL_MAX]),
            bell_value: Box::new([0; 8]),
            completed: Vec::new(),
            letters: Vec::new(),
            port,
            from,
        };
        this.listen()?;
        this.grow(SLOTS_START)?;
        this.ring.submit()?;
        Ok(this)
    }

    fn push(&mut self, entry: &squeue::Entry128) -> io::Result<()> {
        loop {
            #[expect(unsafe_code, reason = "the ring takes addresses")]
            // SAFETY: the buffers that entries name belong to this struct, are boxed, and outlive the ring.
            let pushed = unsafe { self.ring.submission().push(entry) };
            match pushed {
                Ok(()) => return Ok(()),
                Err(_) => {
                    self.ring.submit()?;
                }
            }
        }
    }

    /// Waits for the bell.
    fn listen(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.from.queue.bell.as_raw_fd());
        let len = self.bell_value.len() as u32;
        let read = opcode::Read::new(fd, self.bell_value.as_mut_ptr(), len).build().user_data(BELL);
        self.push(&read.into())
    }

    fn command(&self, code: u32, commit_id: u64, slot: usize) -> squeue::Entry128 {
        let request = UringCmdReq { commit_id, qid: self.from.queue.number, ..UringCmdReq::default() };
        let mut cmd = [0_u8; 80];
        cmd[..size_of::<UringCmdReq>()].copy_from_slice(request.as_bytes());
        let fd = types::Fd(self.from.device.file().as_raw_fd());
        let parts = (code == abi::URING_REGISTER).then(|| self.slots[slot].parts.as_ptr() as u64);
        let entry = opcode::UringCmd80::new(fd, code).cmd(cmd).addr(parts).build().user_data(slot as u64);
        if parts.is_some() { with_len(entry, 2) } else { entry }
    }

    fn grow(&mut self, count: usize) -> io::Result<()> {
        for _ in 0..count {
            self.slots.push(Slot::new());
            let slot = self.slots.len() - 1;
            self.push(&self.command(abi::URING_REGISTER, 0, slot))?;
        }
        Ok(())
    }

    fn commit(&mut self, slot: usize, unique: u64) -> io::Result<()> {
        self.push(&self.command(abi::URING_COMMIT_AND_FETCH, unique, slot))
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
                Err(e) => return Err(e),
            }
            let mut completed = std::mem::take(&mut self.completed);
            completed.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
            let fetching = self.fetching.take();
            for (token, result) in completed.drain(..) {
                if token == BELL {
                    if !self.open_mail()? {
                        return Ok(());
                    }
                    continue;
                }
                let (slot, parked) = (token as usize, self.parked);
                self.arrived(slot, result)?;
                if fetching == Some(slot) {
                    let keeps_slot = self.parked > parked;
                    self.ask |= keeps_slot;
                    self.fetching = (!keeps_slot).then_some(slot);
                }
            }
            self.completed = completed;
            self.make_room()?;
        }
    }

    /// Slots for what comes next. Whenever some are added, or none was left, the kernel may have queued requests before; it hands over
    /// one whenever a slot is committed. Those that are answered at once bring the next one by themselves; after each that parks, and
    /// at the beginning, a request is asked for, until one brings nothing.
    fn make_room(&mut self) -> io::Result<()> {
        let free = self.slots.len() - self.parked;
        self.ask |= free == 0;
        if free < SPARE && self.slots.len() < SLOTS_MAX {
            self.grow(SPARE)?;
            self.ask = true;
        }
        if self.ask && self.slots.len() > self.parked && self.file != 0 {
            self.ask = false;
            self.asked += 1;
            self.ring.submit()?;
            let queue = u64::from(self.from.queue.number);
            ask_for_request(&self.from.device, self.file, ASKED | queue << 40 | self.asked << 1);
        }
        Ok(())
    }

    /// Sends the answers of parked requests; `false`: the mount is gone.
    fn open_mail(&mut self) -> io::Result<bool> {
        let mut mail = self.from.queue.mail.lock();
        if mail.stop {
            return Ok(false);
        }
        std::mem::swap(&mut mail.letters, &mut self.letters);
        drop(mail);
        let mut letters = std::mem::take(&mut self.letters);
        for letter in letters.drain(..) {
            self.parked -= 1;
            let slot = letter.slot as usize;
            let (error, len) = match self.slots[slot].set_body(&letter.body) {
                Ok(len) => (letter.error, len),
                Err(errno) => (-errno, 0),
            };
            self.slots[slot].set_answer(letter.unique, error, len);
            self.commit(slot, letter.unique)?;
        }
        self.letters = letters;
        self.listen()?;
        Ok(true)
    }

    /// A slot holds a request, or has come to its end.
    fn arrived(&mut self, slot: usize, result: i32) -> io::Result<()> {
        match -result {
            0 => self.request(slot),
            // The mount is ending; the bell will say so.
            libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV | libc::ECANCELED => Ok(()),
            errno => {
                let error = io::Error::from_raw_os_error(errno);
                tracing::error!(%error, slot, queue = self.from.queue.number, "a FUSE queue entry failed");
                Ok(())
            }
        }
    }

    fn request(&mut self, number: usize) -> io::Result<()> {
        let Self { slots, small, from, port, .. } = self;
        let slot = &mut slots[number];
        let (Ok((head, _)), Ok((entry, _))) = (
            InHeader::read_from_prefix(&slot.headers[..]),
            UringEntInOut::read_from_prefix(&slot.headers[URING_RING_ENT..]),
        ) else {
            unreachable!("the header buffer holds both");
        };
        if head.opcode == op::NOTIFY_REPLY {
            slot.set_answer(head.unique, 0, 0);
            self.fetching = Some(number);
            return self.commit(number, head.unique);
        }
        let fixed_len = abi::op_len(head.opcode, from.core.setxattr_ext).min(URING_RING_ENT - URING_OP_IN);
        let fixed = &slot.headers[URING_OP_IN..URING_OP_IN + fixed_len];
        let payload = slot.payload.bytes();
        let origin = Origin { port, slot: number as u32, counters: &from.counters };
        // These send nothing but their structure, and want their answer where it belongs.
        let bulk = matches!(head.opcode, op::READ | op::READDIR | op::READDIRPLUS);
        let outcome = if bulk {
            from.core.serve(&head, Args { fixed, data: &[] }, payload, &origin)
        } else {
            let len = (entry.payload_sz as usize).min(payload.len());
            from.core.serve(&head, Args { fixed, data: &payload[..len] }, &mut small[..], &origin)
        };
        let answer = match outcome {
            Outcome::Answer(Body::Out(n)) if bulk => Ok(n),
            Outcome::Answer(Body::Out(n)) => slot.set_body(&small[..n]),
            Outcome::Answer(Body::Bytes(bytes)) => slot.set_body(&bytes),
            Outcome::Error(errno) => Err(errno.0),
            Outcome::Nothing => {
                self.parked += 1;
                if matches!(head.opcode, op::FSYNC | op::READ) {
                    self.file = head.nodeid;
                }
                return Ok(());
            }
        };
        let (error, len) = match answer {
            Ok(len) => (0, len),
            Err(errno) => (-errno, 0),
        };
        slot.set_answer(head.unique, error, len);
        self.commit(number, head.unique)
    }
}

/// Sets an entry's length field, which the builder of this command does not offer.
fn with_len(mut entry: squeue::Entry128, len: u32) -> squeue::Entry128 {
    /// Where `struct io_uring_sqe` has it.
    const LEN_AT: usize = 24;
    const { assert!(size_of::<squeue::Entry128>() == 128, "an entry is the kernel's structure and nothing else") };
    let bytes = (&raw mut entry).cast::<u8>();
    #[expect(unsafe_code, reason = "the field is private")]
    // SAFETY: the entry is 128 bytes long, so four bytes at 24 are inside it; any value is valid there.
    unsafe {
        bytes.add(LEN_AT).cast::<u32>().write_unaligned(len);
    }
    entry
}
