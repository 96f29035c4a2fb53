//! What the file system asks of the kernel: to forget what it has cached.
//!
//! A notification may block in the kernel until requests are answered (it takes the inode's lock), so it is sent from a
//! thread of its own. The queue is bounded: a caller that outruns the kernel waits, and must therefore hold no lock that a
//! request may want.

use std::collections::VecDeque;
use std::io::{IoSlice, Write};
use std::sync::{Arc, Weak};

use ferry_fs::{Host, Ino, NAME_MAX};
use parking_lot::{Condvar, Mutex};
use zerocopy::IntoBytes;

use crate::abi;
use crate::counters::AllCounters;
use crate::idle::IdlePoll;
use crate::park::ParkTable;
use crate::transport::dev::Device;

/// Notifications waiting to be sent.
const QUEUE_MAX: usize = 4096;

#[derive(Debug)]
enum Notice {
    Inode { ino: Ino, offset: u64, len: u64 },
    Attributes { ino: Ino },
    Entry { parent: Ino, name: Box<[u8]> },
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Notice>,
    closed: bool,
}

/// The file system's side of the mount.
#[derive(Debug)]
pub(crate) struct Notifier {
    queue: Mutex<Queue>,
    /// Something was queued, or the queue was closed.
    filled: Condvar,
    /// Something was taken from a full queue, or the queue was closed.
    drained: Condvar,
    counters: Arc<AllCounters>,
    parked: Weak<ParkTable>,
    idle: Arc<IdlePoll>,
}

impl Notifier {
    pub(crate) fn new(counters: Arc<AllCounters>, parked: &Arc<ParkTable>, idle: Arc<IdlePoll>) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Condvar::new(),
            drained: Condvar::new(),
            counters,
            parked: Arc::downgrade(parked),
            idle,
        }
    }

    fn push(&self, notice: Notice) {
        let mut queue = self.queue.lock();
        while queue.waiting.len() >= QUEUE_MAX && !queue.closed {
            self.drained.wait(&mut queue);
        }
        if !queue.closed {
            queue.waiting.push_back(notice);
            self.filled.notify_one();
        }
    }

    /// The mount is gone; what is queued has no receiver.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.filled.notify_all();
        self.drained.notify_all();
    }

    fn next(&self) -> Option<Notice> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(notice) = queue.waiting.pop_front() {
                self.drained.notify_one();
                return Some(notice);
            }
            self.filled.wait(&mut queue);
        }
    }

    /// Sends until closed.
    pub(crate) fn run(&self, device: &Device) {
        while let Some(notice) = self.next() {
            match &notice {
                Notice::Inode { ino, offset, len } => {
                    let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
                    // A length of 0 (or less) is "to the end" for the kernel too.
                    let out = abi::NotifyInvalInode { ino: *ino, off: signed(*offset), len: signed(*len) };
                    send(device, abi::NOTIFY_INVAL_INODE, &[out.as_bytes()]);
                }
                Notice::Attributes { ino } => {
                    // No contents: that is what an offset below 0 says.
                    let out = abi::NotifyInvalInode { ino: *ino, off: -1, len: 0 };
                    send(device, abi::NOTIFY_INVAL_INODE, &[out.as_bytes()]);
                }
                Notice::Entry { parent, name } => {
                    let namelen = name.len() as u32;
                    let out = abi::NotifyInvalEntry { parent: *parent, namelen, flags: 0 };
                    send(device, abi::NOTIFY_INVAL_ENTRY, &[out.as_bytes(), name, &[0]]);
                }
            }
        }
    }
}

/// Has the kernel send a request (NOTIFY_REPLY, with no data) of this number, to the queue of the core that this runs on. `file` is a
/// regular file that the kernel knows.
pub(crate) fn ask_for_request(device: &Device, file: Ino, unique: u64) {
    let out = abi::NotifyRetrieve { notify_unique: unique, nodeid: file, ..abi::NotifyRetrieve::default() };
    send(device, abi::NOTIFY_RETRIEVE, &[out.as_bytes()]);
}

fn send(device: &Device, code: i32, parts: &[&[u8]]) {
    let len = size_of::<abi::OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
    let head = abi::OutHeader { len: len as u32, error: code, unique: 0 };
    let mut slices = vec![IoSlice::new(head.as_bytes())];
    slices.extend(parts.iter().map(|p| IoSlice::new(p)));
    if let Err(error) = device.file().write_vectored(&slices) {
        // ENOENT: the kernel does not know the inode or name, so there is nothing to forget.
        if error.raw_os_error() != Some(libc::ENOENT) {
            tracing::debug!(code, %error, "the kernel refused a notification");
        }
    }
}

impl Host for Notifier {
    fn invalidate_inode(&self, ino: Ino, offset: u64, len: u64) {
        self.push(Notice::Inode { ino, offset, len });
    }

    fn invalidate_attributes(&self, ino: Ino) {
        self.push(Notice::Attributes { ino });
    }

    fn invalidate_entry(&self, parent: Ino, name: &[u8]) {
        assert!(name.len() <= NAME_MAX, "the name is that of an entry");
        self.push(Notice::Entry { parent, name: name.into() });
    }

    fn stats(&self) -> serde_json::Value {
        let mut stats = self.counters.json();
        stats["parked"] = self.parked.upgrade().map_or(0, |t| t.len()).into();
        stats["idle_poll"] = self.idle.json();
        stats
    }
}
