//! Fsyncs through io_uring: the kernel runs each on a worker thread of its own.
#![expect(unsafe_code, reason = "pushing to the submission queue: an fsync refers to no memory")]

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode};
use std::io;
use std::os::fd::RawFd;

pub struct FsyncRing {
    uring: IoUring,
    flags: FsyncFlags,
    /// The descriptor of each slot, for retries.
    slots: Vec<RawFd>,
    /// Entries that were pushed and not submitted.
    unsubmitted: usize,
    /// This many are submitted together.
    submit_at: usize,
}

impl FsyncRing {
    /// `jobs`: the most fsyncs in flight.
    pub fn new(jobs: usize, data_only: bool) -> io::Result<Self> {
        let uring = IoUring::new(u32::try_from(jobs.next_power_of_two()).unwrap_or(u32::MAX))?;
        let workers = u32::try_from(jobs).unwrap_or(u32::MAX);
        // The default is four workers for each core. Linux before 5.15 cannot change it.
        let _at_its_own_pace = uring.submitter().register_iowq_max_workers(&mut [workers, workers]);
        let flags = if data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
        Ok(Self {
            uring,
            flags,
            slots: Vec::new(),
            unsubmitted: 0,
            submit_at: (jobs / 4).clamp(1, 16),
        })
    }

    /// Starts an fsync. The descriptor must stay open until the slot has ended.
    pub fn push(&mut self, file: RawFd, slot: usize) {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, -1);
        }
        self.slots[slot] = file;
        self.issue(slot);
        if self.unsubmitted >= self.submit_at {
            self.enter(0);
        }
    }

    fn issue(&mut self, slot: usize) {
        let entry = opcode::Fsync::new(Fd(self.slots[slot]))
            .flags(self.flags)
            .build()
            .user_data(slot as u64);
        // SAFETY: an fsync refers to no memory.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        pushed.expect("the queue has an entry for each slot");
        self.unsubmitted += 1;
    }

    /// Submits, and waits until `want` have ended.
    fn enter(&mut self, want: usize) {
        match self.uring.submit_and_wait(want) {
            Ok(taken) => self.unsubmitted -= taken,
            Err(error) => match error.raw_os_error() {
                // The next call submits what the kernel did not take.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ => panic!("io_uring_enter: {error}"),
            },
        }
    }

    /// Waits until at least one has ended.
    pub fn reap(&mut self, ended: &mut Vec<(usize, io::Result<()>)>) {
        self.enter(1);
        while let Some((slot, result)) = self.next_ended() {
            match -result {
                libc::EINTR | libc::EAGAIN => self.issue(slot),
                errno if errno > 0 => ended.push((slot, Err(io::Error::from_raw_os_error(errno)))),
                _ => ended.push((slot, Ok(()))),
            }
        }
    }

    fn next_ended(&mut self) -> Option<(usize, i32)> {
        self.uring.completion().next().map(|entry| (entry.user_data() as usize, entry.result()))
    }
}
