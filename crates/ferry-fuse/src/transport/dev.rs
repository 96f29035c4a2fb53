//! The classic transport: each thread reads requests from, and writes answers to, its own
//! descriptor of /dev/fuse.
//!
//! A request's answer must go to the descriptor that the request was read from; a parked request
//! therefore keeps its descriptor.
//!
//! If no request occupies a thread for long, one thread *leads*: it alone reads, and serves what it
//! reads. Otherwise the kernel would wake the thread that has slept longest, often on another core,
//! which costs more than most requests do. The leader hands the lead to another thread before it
//! serves a large request, or when more requests have been waiting for a while.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use zerocopy::{FromBytes, IntoBytes};

use super::buffer::Buffer;
use crate::abi::{InHeader, OutHeader, READ_BUFFER_MIN, WriteIn};
use crate::decode::RequestArgs;
use crate::device::FuseDevice;
use crate::encode::{AnswerBody, AnswerBytes};
use crate::init::IO_MAX;
use crate::request::counters::ThreadCounters;
use crate::request::dispatch::{Dispatcher, Origin, ServeResult};
use crate::request::parked::AnswerPort;

const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// A message of this many bytes takes longer to serve than another thread takes to wake up.
const LARGE: usize = 32 << 10;
/// The leader hands over when more messages waited this many times in a row.
const BACKLOG: u32 = 16;

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
    /// Held by the thread that leads; `None`: every thread reads.
    lead: Option<Arc<Mutex<()>>>,
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
        lead: Option<Arc<Mutex<()>>>,
    ) -> Self {
        let (request, answer) = buffers();
        let port = Arc::clone(&device) as Arc<dyn AnswerPort>;
        Self { device, port, dispatcher, counters, request, answer, lead }
    }

    /// Serves until the mount is gone.
    pub(crate) fn run(mut self) {
        let lead = self.lead.take();
        let mut leading: Option<MutexGuard<'_, ()>> = None;
        let mut backlog = 0;
        loop {
            if let (Some(lead), None) = (&lead, &leading) {
                leading = Some(lead.lock());
            }
            let Some(len) = self.device.receive(self.request.bytes()) else { return };
            if leading.is_some() {
                backlog = if self.device.has_more() { backlog + 1 } else { 0 };
                if backlog >= BACKLOG || backlog > 0 && len >= LARGE {
                    leading = None;
                }
            }
            self.serve(len);
        }
    }

    fn serve(&mut self, len: usize) {
        let message = &self.request.bytes()[..len];
        let Ok((head, body)) = InHeader::read_from_prefix(message) else {
            tracing::error!(len, "a FUSE message without a header");
            return;
        };
        let args = RequestArgs::split(head.opcode, self.dispatcher.setxattr_ext, body);
        let answer = self.answer.bytes();
        let origin = Origin { port: &self.port, slot: 0, counters: &self.counters };
        match self.dispatcher.serve(&head, args, &mut answer[OUT_HEADER..], &origin) {
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

/// Reads the kernel's first message, gives it to `answer`, and sends what `answer` returns. `unmounted`
/// makes the error if there is no such message.
pub(crate) fn handshake<E>(
    device: &FuseDevice,
    answer: impl FnOnce(&InHeader, &[u8]) -> Result<Vec<u8>, E>,
    unmounted: impl FnOnce() -> E,
) -> Result<(), E> {
    let (mut request, _) = buffers();
    let Some(len) = device.receive(request.bytes()) else { return Err(unmounted()) };
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
