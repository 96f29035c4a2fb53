//! Reads of devices on a queue's own ring: the thread that serves a request also finds the end of
//! the read that the request waits for.

use std::cell::RefCell;
use std::os::fd::AsRawFd;

use ferry_device::{FileRead, ReadRing};
use io_uring::{opcode, squeue, types};

/// Bytes asked of the kernel at once at most.
const TRANSFER_MAX: usize = 1 << 30;

/// The reads of a queue.
#[derive(Default)]
pub(super) struct DeviceReads {
    /// Begun by the requests that are being served; not in the ring yet.
    begun: RefCell<Vec<FileRead>>,
    /// In the ring, by number.
    in_flight: Vec<Option<FileRead>>,
    free: Vec<u32>,
}

impl ReadRing for DeviceReads {
    fn start(&self, read: FileRead) {
        self.begun.borrow_mut().push(read);
    }
}

impl DeviceReads {
    /// Reads that the kernel has.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len()
    }

    /// A read that was begun, as an entry of the ring, and its number. The entry must be submitted.
    pub(super) fn next(&mut self) -> Option<(u32, squeue::Entry)> {
        let read = self.begun.get_mut().pop()?;
        let number = self.free.pop().unwrap_or_else(|| {
            self.in_flight.push(None);
            self.in_flight.len() as u32 - 1
        });
        let read = self.in_flight[number as usize].insert(read);
        let (file, offset, buf) = read.rest();
        let len = buf.len().min(TRANSFER_MAX) as u32;
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buf.as_mut_ptr(), len)
            .offset(offset)
            .build();
        Some((number, entry))
    }

    /// The kernel has answered read `number`. Calls back if the read has ended.
    pub(super) fn ended(&mut self, number: u32, result: i32) {
        let read = self.in_flight[number as usize].take().expect("the kernel has this read");
        self.free.push(number);
        if let Some(read) = read.step(result) {
            self.begun.get_mut().push(read);
        }
    }
}

impl Drop for DeviceReads {
    fn drop(&mut self) {
        // The kernel may still write into the buffers of a ring that failed.
        self.in_flight.drain(..).flatten().for_each(std::mem::forget);
    }
}
