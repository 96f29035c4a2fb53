//! The classic transport: each thread reads requests from, and writes answers to, its own descriptor of /dev/fuse.
//!
//! A request's answer must go to the descriptor that it was read from; a parked request therefore keeps it.
//!
//! Where no request keeps a thread for long, one thread *leads*: it alone reads, and serves what it has read. Left to itself the kernel wakes
//! the thread that has slept longest, often on another core, which costs more than most requests do. Before it serves a large request, or
//! when more has been waiting for a while, the leader leaves the lead to another one.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, IntoBytes};

use super::buffer::Buffer;
use crate::abi::{InHeader, OutHeader, READ_BUFFER_MIN, WriteIn};
use crate::core::{Core, Origin, Outcome};
use crate::counters::Counters;
use crate::decode::Args;
use crate::encode::{Body, Bytes};
use crate::init::IO_MAX;
use crate::park::Port;
use crate::sys;

const DEVICE: &str = "/dev/fuse";
const IN_HEADER: usize = size_of::<InHeader>();
const OUT_HEADER: usize = size_of::<OutHeader>();
/// A message of so many bytes takes longer to serve than it takes another thread to wake up.
const LARGE: usize = 32 << 10;
/// More waits all the time: so often in a row.
const BACKLOG: u32 = 16;

/// A descriptor of a mount.
#[derive(Debug)]
pub(crate) struct Device(File);

impl Device {
    /// Opens a descriptor that is of no mount yet.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self(OpenOptions::new().read(true).write(true).open(DEVICE)?))
    }

    pub(crate) fn from_file(file: File) -> Self {
        Self(file)
    }

    /// Another descriptor of the same mount, with a queue of its own for what it has taken.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        let fresh = Self::open()?;
        sys::clone_device(fresh.0.as_fd(), self.0.as_fd())?;
        Ok(fresh)
    }

    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Reads one message into `buffer`; `None`: the mount is gone.
    fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            match (&self.0).read(buffer) {
                Ok(n) => return Some(n),
                Err(e) => match e.raw_os_error() {
                    // ENOENT: the request was taken back (its process was killed) while it was copied.
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                    Some(libc::ENODEV | libc::ECONNABORTED) => return None,
                    _ => {
                        tracing::error!(error = %e, "reading /dev/fuse");
                        return None;
                    }
                },
            }
        }
    }

    /// Whether more messages wait. An error says so too: whoever reads next sees what it is.
    fn has_more(&self) -> bool {
        let mut this = [PollFd::new(&self.0, PollFlags::IN)];
        !matches!(poll(&mut this, Some(&Timespec::default())), Ok(0))
    }

    fn sent(unique: u64, result: io::Result<usize>) {
        if let Err(error) = result {
            // ENOENT: the request was aborted; ENODEV: the mount is gone. Nobody waits.
            if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) {
                tracing::error!(unique, %error, "the kernel refused an answer");
            }
        }
    }
}

impl Port for Device {
    fn answer(&self, unique: u64, _slot: u32, error: i32, body: Bytes<'_>) {
        let head = OutHeader { len: (OUT_HEADER + body.len()) as u32, error, unique };
        let parts = [IoSlice::new(head.as_bytes()), IoSlice::new(&body)];
        Self::sent(unique, (&self.0).write_vectored(&parts));
    }
}

/// One serving thread.
pub(crate) struct Worker {
    device: Arc<Device>,
    port: Arc<dyn Port>,
    core: Arc<Core>,
    counters: Arc<Counters>,
    request: Buffer,
    answer: Buffer,
    /// Whose turn it is to read, where one leads.
    lead: Option<Arc<Mutex<()>>>,
}

/// Buffers for one message each way. The data of a WRITE, and of the answer to a READ, is page-aligned.
fn buffers() -> (Buffer, Buffer) {
    let front = IN_HEADER + size_of::<WriteIn>();
    (Buffer::new(front, IO_MAX + READ_BUFFER_MIN), Buffer::new(OUT_HEADER, IO_MAX))
}

impl Worker {
    pub(crate) fn new(
        device: Arc<Device>,
        core: Arc<Core>,
        counters: Arc<Counters>,
        lead: Option<Arc<Mutex<()>>>,
    ) -> Self {
        let (request, answer) = buffers();
        let port = Arc::clone(&device) as Arc<dyn Port>;
        Self { device, port, core, counters, request, answer, lead }
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
        let args = Args::split(head.opcode, self.core.setxattr_ext, body);
        let answer = self.answer.bytes();
        let origin = Origin { port: &self.port, slot: 0, counters: &self.counters };
        match self.core.serve(&head, args, &mut answer[OUT_HEADER..], &origin) {
            Outcome::Answer(Body::Out(n)) => {
                let total = OUT_HEADER + n;
                let out = OutHeader { len: total as u32, error: 0, unique: head.unique };
                answer[..OUT_HEADER].copy_from_slice(out.as_bytes());
                Device::sent(head.unique, self.device.file().write(&answer[..total]));
            }
            Outcome::Answer(Body::Bytes(bytes)) => self.device.answer(head.unique, 0, 0, bytes),
            Outcome::Error(errno) => self.device.answer(head.unique, 0, -errno.0, Bytes::Borrowed(&[])),
            Outcome::Nothing => {}
        }
    }
}

/// Reads the kernel's first message, gives its body to `answer`, and sends what that returns.
pub(crate) fn handshake<E>(
    device: &Device,
    answer: impl FnOnce(&InHeader, &[u8]) -> Result<Vec<u8>, E>,
    gone: impl FnOnce() -> E,
) -> Result<(), E> {
    let (mut request, _) = buffers();
    let Some(len) = device.receive(request.bytes()) else { return Err(gone()) };
    let Ok((head, body)) = InHeader::read_from_prefix(&request.bytes()[..len]) else { return Err(gone()) };
    match answer(&head, body) {
        Ok(bytes) => {
            device.answer(head.unique, 0, 0, Bytes::Owned(bytes));
            Ok(())
        }
        Err(e) => {
            device.answer(head.unique, 0, -libc::EPROTO, Bytes::Borrowed(&[]));
            Err(e)
        }
    }
}
