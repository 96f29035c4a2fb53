//! The classic transport: each thread reads requests from, and writes answers to, its own
//! descriptor of /dev/fuse.
//!
//! A request's answer must go to the descriptor that the request was read from; a parked request
//! therefore keeps its descriptor.
//!
//! If no request occupies a thread for long, one thread *leads*: it alone reads, and serves what it
//! reads. Otherwise the kernel would wake the thread that has slept longest, often on another core,
//! which costs more than most requests do. The leader hands the lead to another thread before it
//! serves a large request or many FORGETs, or when more requests have been waiting for a while.
//!
//! If io_uring queues carry the requests, only FORGET and INTERRUPT come here. Nobody waits for a
//! FORGET, and the kernel gives all that are due as one message. So one thread reads, and the
//! thread that reads after a FORGET pauses first: the kernel wakes a thread once for what a pause
//! has gathered, and not for each file. A FORGET may reclaim a file, so the reader gives up the
//! lead before it serves what it has read: what comes behind does not wait for that.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ferry_env::activity;
use parking_lot::{Mutex, MutexGuard};
use zerocopy::{FromBytes, IntoBytes};

use super::buffer::Buffer;
use crate::abi::{self, InHeader, OutHeader, READ_BUFFER_MIN, WriteIn, op};
use crate::decode::RequestArgs;
use crate::device::FuseDevice;
use crate::encode::{AnswerBody, AnswerBytes};
use crate::init::IO_MAX;
use crate::request::counters::ThreadCounters;
use crate::request::dispatch::{Dispatcher, Origin, ServeResult};
use crate::request::parked::AnswerPort;
use crate::sys;

const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// A message of this many bytes takes longer to serve than another thread takes to wake up.
const LARGE: usize = 32 << 10;
/// The leader hands over when more messages waited this many times in a row.
const BACKLOG: u32 = 16;
/// FORGETs gather for this time. An INTERRUPT may wait as long.
const GATHER: Duration = Duration::from_millis(2);
/// How often a thread that is to stop is interrupted.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(1);

/// Which threads read.
#[derive(Clone)]
pub(crate) enum Readers {
    /// Every thread.
    All,
    /// The thread that holds this lead.
    Leader(Arc<Mutex<()>>),
    /// The thread that holds this lead, and only FORGET and INTERRUPT are expected. After any other
    /// message all read: the queues have failed. The flag: a FORGET was the last to come.
    Gatherer(Arc<Mutex<bool>>),
}

/// The threads that read, to stop them when another process goes on with the mount.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    stop: AtomicBool,
    threads: Mutex<Vec<libc::pid_t>>,
}

impl Reading {
    /// New threads may read.
    pub(crate) fn restart(&self) {
        self.stop.store(false, Ordering::Release);
    }

    /// Tells the threads to stop, each between two messages, and waits until they have.
    /// [`sys::let_signals_interrupt`] was called before.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        loop {
            let threads = self.threads.lock().clone();
            if threads.is_empty() {
                return;
            }
            // A thread that was just about to wait has not noticed: it is told again.
            threads.into_iter().for_each(sys::interrupt);
            thread::park_timeout(INTERRUPT_INTERVAL);
        }
    }
}

impl AnswerPort for FuseDevice {
    fn answer(&self, unique: u64, _slot: u32, error: i32, body: AnswerBytes<'_>) {
        Self::answer(self, unique, error, &body);
    }
}

/// One serving thread.
pub(crate) struct DeviceWorker {
    device: Arc<FuseDevice>,
    port: Arc<dyn AnswerPort>,
    dispatcher: Arc<Dispatcher>,
    counters: Arc<ThreadCounters>,
    request: Buffer,
    answer: Buffer,
    readers: Readers,
    reading: Arc<Reading>,
}

/// Buffers for one message each way. The data of a WRITE, and of the answer to a READ, is
/// page-aligned.
fn buffers() -> (Buffer, Buffer) {
    let front = IN_HEADER + size_of::<WriteIn>();
    (Buffer::new(front, IO_MAX + READ_BUFFER_MIN), Buffer::new(OUT_HEADER, IO_MAX))
}

impl DeviceWorker {
    pub(crate) fn new(
        device: Arc<FuseDevice>,
        dispatcher: Arc<Dispatcher>,
        counters: Arc<ThreadCounters>,
        readers: Readers,
        reading: Arc<Reading>,
    ) -> Self {
        let (request, answer) = buffers();
        let port = Arc::clone(&device) as Arc<dyn AnswerPort>;
        Self { device, port, dispatcher, counters, request, answer, readers, reading }
    }

    /// Serves until the mount is gone, or the thread is told to stop.
    pub(crate) fn run(mut self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.reading.threads.lock().push(thread);
        self.read();
        self.reading.threads.lock().retain(|other| *other != thread);
    }

    /// The next message; `None`: there is none any more.
    fn receive(&mut self) -> Option<usize> {
        self.device.receive(self.request.bytes(), &self.reading.stop)
    }

    fn read(&mut self) {
        match self.readers.clone() {
            Readers::All => {}
            Readers::Leader(lead) => return self.run_led(&lead),
            Readers::Gatherer(lead) => {
                if !self.gather(&lead) {
                    return;
                }
            }
        }
        while let Some(len) = self.receive() {
            if let Some(head) = self.head(len) {
                self.serve(&head, len);
            }
        }
    }

    fn run_led(&mut self, lead: &Mutex<()>) {
        let mut leading: Option<MutexGuard<'_, ()>> = None;
        let mut backlog = 0;
        loop {
            leading.get_or_insert_with(|| lead.lock());
            let Some(len) = self.receive() else { return };
            let Some(head) = self.head(len) else { continue };
            backlog = if self.device.has_more() { backlog + 1 } else { 0 };
            let long = len >= LARGE && backlog > 0 || head.opcode == op::BATCH_FORGET;
            if backlog >= BACKLOG || long {
                leading = None;
            }
            self.serve(&head, len);
        }
    }

    /// Serves what the queues do not carry; `false`: the mount is gone, `true`: the queues are.
    fn gather(&mut self, lead: &Mutex<bool>) -> bool {
        loop {
            let mut leading = lead.lock();
            if mem::take(&mut *leading) {
                thread::park_timeout(GATHER);
            }
            let Some(len) = self.receive() else { return false };
            let Some(head) = self.head(len) else { continue };
            *leading = matches!(head.opcode, op::FORGET | op::BATCH_FORGET);
            let failed = !*leading && head.opcode != op::INTERRUPT;
            drop(leading);
            self.serve(&head, len);
            if failed {
                return true;
            }
        }
    }

    /// The header of the message.
    fn head(&mut self, len: usize) -> Option<InHeader> {
        let head = InHeader::read_from_prefix(&self.request.bytes()[..len]);
        if head.is_err() {
            tracing::error!(len, "a FUSE message without a header");
        }
        head.ok().map(|(head, _)| head)
    }

    /// Serves a message.
    fn serve(&mut self, head: &InHeader, len: usize) {
        let _doing = activity::begin(abi::operation(head.opcode));
        let body = &self.request.bytes()[IN_HEADER..len];
        let args = RequestArgs::split(head.opcode, self.dispatcher.setxattr_ext, body);
        let answer = self.answer.bytes();
        let (port, counters) = (&self.port, &self.counters);
        let origin = Origin { port, slot: 0, replayed: None, counters, reads: None };
        match self.dispatcher.serve(head, args, &mut answer[OUT_HEADER..], &origin) {
            ServeResult::Answer(AnswerBody::Out(n)) => {
                let total = OUT_HEADER + n;
                let out = OutHeader { len: total as u32, error: 0, unique: head.unique };
                answer[..OUT_HEADER].copy_from_slice(out.as_bytes());
                self.device.answer_whole(head.unique, &answer[..total]);
            }
            ServeResult::Answer(AnswerBody::Bytes(bytes)) => {
                self.device.answer(head.unique, 0, &bytes)
            }
            ServeResult::Error(errno) => self.device.answer(head.unique, -errno.0, &[]),
            ServeResult::Nothing => {}
        }
    }
}

/// Reads the kernel's first message, gives it to `answer`, and sends what `answer` returns.
/// `unmounted` makes the error if there is no such message.
pub(crate) fn handshake<E>(
    device: &FuseDevice,
    answer: impl FnOnce(&InHeader, &[u8]) -> Result<Vec<u8>, E>,
    unmounted: impl FnOnce() -> E,
) -> Result<(), E> {
    let (mut request, _) = buffers();
    let Some(len) = device.receive(request.bytes(), &AtomicBool::new(false)) else {
        return Err(unmounted());
    };
    let Ok((head, body)) = InHeader::read_from_prefix(&request.bytes()[..len]) else {
        return Err(unmounted());
    };
    match answer(&head, body) {
        Ok(bytes) => {
            device.answer(head.unique, 0, &bytes);
            Ok(())
        }
        Err(e) => {
            device.answer(head.unique, -libc::EPROTO, &[]);
            Err(e)
        }
    }
}
