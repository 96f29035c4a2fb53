//! The io_uring of a file device, driven by the I/O thread alone.
#![expect(
    unsafe_code,
    reason = "io_uring reads buffers through raw pointers while a request is in flight"
)]

use super::inbox::Shared;
use crate::buffer::BLOCK_SIZE;
use crate::device::Io;
use ferry_env::activity::{self, Operation};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// Entries of the submission queue. Every slot and the bell have at most one entry queued, so it
/// never overflows; the completion queue is twice as long.
const ENTRIES: u32 = 256;
/// Requests in flight at most.
const SLOTS: usize = ENTRIES as usize - 1;
/// `user_data` of the read that waits for the bell; requests have their slot's number.
const BELL: u64 = u64::MAX;
/// Most bytes asked of the kernel at once; it moves a little less than 2 GiB per request.
const TRANSFER_MAX: usize = 1 << 30;

const _: () = assert!(TRANSFER_MAX.is_multiple_of(BLOCK_SIZE));

/// Whether the I/O thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    GoOn,
    Ended,
}

/// A request that the kernel has.
struct InFlight {
    io: Io,
    /// Bytes already written.
    moved: usize,
    begun: Duration,
}

/// The ring and what is in flight on it.
pub(super) struct Ring {
    uring: IoUring,
    shared: Arc<Shared>,
    /// The device's file. It is not registered with the ring: that would hold it, and the volume's
    /// lock, until the kernel gets round to taking the ring apart, well after the process has
    /// exited or was killed. As it is, the lock outlives a killed process just as long as its last
    /// writes do.
    file: Fd,
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
    backlog: VecDeque<Io>,
    /// Where the kernel puts the bell's counter.
    bell_count: Box<u64>,
    bell_armed: bool,
}

/// A ring for the calling thread.
fn new_uring() -> io::Result<IoUring> {
    // A request that ends does not interrupt the thread. Linux 6.0 and later; before, a plain ring.
    // With `DEFER_TASKRUN` a request that ends behind its thread would hold the file, and the
    // volume's lock, for as long as anything of a killed process is left.
    match IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(ENTRIES) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(ENTRIES),
        other => other,
    }
}

impl Ring {
    /// Makes the ring; to be called on the thread that will drive it.
    pub fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let uring = new_uring()?;
        let slots = std::iter::repeat_with(|| None).take(SLOTS).collect();
        Ok(Self {
            uring,
            file: Fd(shared.host.file.as_raw_fd()),
            shared,
            slots,
            free: (0..SLOTS).rev().collect(),
            backlog: VecDeque::new(),
            bell_count: Box::new(0),
            bell_armed: false,
        })
    }

    /// Issues what has arrived, waits until something ends, and completes all that has.
    pub fn turn(&mut self) -> Turn {
        let closing = self.shared.take_arrivals(&mut self.backlog);
        while let Some(slot) = self.free.pop() {
            let Some(io) = self.backlog.pop_front() else {
                self.free.push(slot);
                break;
            };
            let begun = self.shared.host.env.clock.monotonic();
            self.slots[slot] = Some(InFlight { io, moved: 0, begun });
            self.issue(slot);
        }
        if closing && !self.bell_armed && self.free.len() == SLOTS {
            assert!(self.backlog.is_empty(), "free slots and a backlog");
            return Turn::Ended;
        }
        // The last bell has rung when the device closes; a read armed after that would never end.
        if !closing && !self.bell_armed {
            self.arm_bell();
        }
        self.enter();
        self.shared.awake();
        self.reap();
        Turn::GoOn
    }

    fn arm_bell(&mut self) {
        let fd = Fd(self.shared.bell.as_raw_fd());
        let count: *mut u64 = &raw mut *self.bell_count;
        self.push(&opcode::Read::new(fd, count.cast(), 8).build().user_data(BELL));
        self.bell_armed = true;
    }

    /// Queues the next step of a slot's request.
    fn issue(&mut self, slot: usize) {
        let request = self.slots[slot].as_ref().expect("an occupied slot");
        let entry = match &request.io {
            Io::Write { offset, buf, .. } => {
                let rest = &buf[request.moved..];
                let len = rest.len().min(TRANSFER_MAX) as u32;
                opcode::Write::new(self.file, rest.as_ptr(), len)
                    .offset(offset + request.moved as u64)
                    .build()
            }
            Io::Flush { .. } => opcode::Fsync::new(self.file).flags(FsyncFlags::DATASYNC).build(),
        };
        self.push(&entry.user_data(slot as u64));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory an entry points to lives until its completion is reaped: a slot keeps
        // its buffer that long, `bell_count` lives as long as the ring, and neither is dropped with
        // requests in flight (see `Drop`).
        let pushed = unsafe { self.uring.submission().push(entry) };
        pushed.expect("one queue entry for each slot and the bell");
    }

    /// Submits what is queued and waits for at least one completion.
    fn enter(&self) {
        if let Err(error) = self.uring.submit_and_wait(1) {
            // Nothing was lost: what the kernel did not take is still queued and goes with the next
            // call.
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ => panic!("io_uring_enter: {error}"),
            }
        }
    }

    fn reap(&mut self) {
        while let Some((user_data, result)) = self.next_completion() {
            let _doing = activity::begin(Operation::Completion);
            if user_data == BELL {
                self.bell_armed = false;
            } else {
                self.step(user_data as usize, result);
            }
        }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.uring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// The kernel is through with what was issued for `slot`: go on with it, or complete it.
    fn step(&mut self, slot: usize, result: i32) {
        let request = self.slots[slot].as_mut().expect("completions are of occupied slots");
        let outcome = match (&request.io, result) {
            (_, errno) if matches!(-errno, libc::EINTR | libc::EAGAIN) => None,
            (_, errno) if errno < 0 => Some(Err(io::Error::from_raw_os_error(-errno))),
            (Io::Flush { .. }, _) => {
                let now = self.shared.host.env.clock.monotonic();
                self.shared.host.timer.record(now.saturating_sub(request.begun));
                Some(Ok(()))
            }
            // No progress and no reason given: never try for ever.
            (Io::Write { .. }, 0) => Some(Err(io::Error::from_raw_os_error(libc::EIO))),
            (Io::Write { buf, .. }, n) => {
                request.moved += n as usize;
                (request.moved == buf.len()).then_some(Ok(()))
            }
        };
        match outcome {
            None => self.issue(slot),
            Some(result) => {
                let request = self.slots[slot].take().expect("still occupied");
                self.free.push(slot);
                // The buffer may be the caller's to reuse in `done`, so our share of it goes first.
                let done = request.io.into_done();
                done(result);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        assert!(
            self.free.len() == SLOTS && !self.bell_armed,
            "the ring is dropped only when nothing is in flight"
        );
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::super::{lock, sys};
    use super::*;
    use crate::buffer::AlignedBuf;
    use std::os::fd::AsRawFd;
    use std::time::Instant;

    #[test]
    fn a_write_that_ends_behind_its_thread_gives_the_lock_back_though_the_ring_stays() {
        const WRITES: usize = 32;
        let file = tempfile::NamedTempFile::new().unwrap();
        let owned = file.reopen().unwrap();
        assert!(lock::acquire(&owned, true).unwrap().is_ok());
        sys::set_direct(&owned, true).unwrap();
        std::thread::scope(|scope| {
            let begin = || {
                let (mut uring, fd) = (new_uring().unwrap(), Fd(owned.as_raw_fd()));
                for at in 0..WRITES {
                    let buf = Box::leak(Box::new(AlignedBuf::zeroed(1 << 20)));
                    let write = opcode::Write::new(fd, buf.as_ptr(), buf.len() as u32)
                        .offset((at * buf.len()) as u64)
                        .build();
                    // SAFETY: the buffer is never freed.
                    unsafe { uring.submission().push(&write) }.unwrap();
                }
                assert_eq!(uring.submit().unwrap(), WRITES);
                std::mem::forget(uring);
            };
            scope.spawn(begin);
        });
        drop(owned);
        let (other, begun) = (file.reopen().unwrap(), Instant::now());
        while lock::acquire(&other, true).unwrap().is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "a request holds the file");
        }
    }
}
