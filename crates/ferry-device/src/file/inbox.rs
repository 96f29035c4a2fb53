//! What the callers of a file device and its I/O thread share: requests on their way to that
//! thread.

use super::host::HostFile;
use crate::device::Io;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;

/// What callers and the I/O thread share.
pub(super) struct Shared {
    pub host: Arc<HostFile>,
    pub inbox: Mutex<Inbox>,
    /// An eventfd: a write to it ends the I/O thread's sleep.
    pub bell: File,
}

#[derive(Default)]
pub(super) struct Inbox {
    pub queue: VecDeque<Io>,
    /// The I/O thread sleeps, or is about to without looking here again.
    pub asleep: bool,
    pub closing: bool,
}

impl Shared {
    /// Moves everything that has arrived to the end of `to`; tells whether the device is closing.
    /// Afterwards the I/O thread counts as asleep, so that the next caller rings the bell.
    pub fn take_arrivals(&self, to: &mut VecDeque<Io>) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.asleep = true;
        to.append(&mut inbox.queue);
        inbox.closing
    }

    /// From here on callers need not ring: the I/O thread will look into the inbox before it
    /// sleeps.
    pub fn awake(&self) {
        self.inbox.lock().asleep = false;
    }

    pub fn ring_bell(&self) {
        // The counter cannot overflow: it is read each time the I/O thread wakes, and rung at most
        // once per sleep.
        (&self.bell).write_all(&1_u64.to_ne_bytes()).expect("an eventfd takes a write of 8 bytes");
    }
}
