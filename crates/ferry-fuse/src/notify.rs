//! What the file system asks of the kernel: to forget what it has cached.
//!
//! A notification may block in the kernel until requests are answered (that of a name takes the directory's lock), so it is sent from a
//! thread of its own: one for attributes, which waits for nothing; one for names; and one for contents, where the kernel writes back what
//! programs have stored there before it forgets them, and waits for pages that are being read. A queue is bounded: a caller that outruns the kernel waits, and must therefore hold no lock that a
//! request may want. [`Host::forget`] alone does not wait: its callers are as many as there are leases.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use ferry_fs::{Host, Ino, NAME_MAX, ToForget};
use parking_lot::{Condvar, Mutex};
use zerocopy::IntoBytes;

use crate::abi;
use crate::counters::AllCounters;
use crate::idle::IdlePoll;
use crate::init::Agreed;
use crate::park::ParkTable;
use crate::transport::dev::Device;

/// Notifications waiting to be sent.
const QUEUE_MAX: usize = 4096;
/// An inode that the kernel does not know may be one that it is just about to learn: it is told again so often,
const AGAIN_MAX: usize = 10;
/// each time after this.
const AGAIN_AFTER: Duration = Duration::from_millis(1);

enum Notice {
    Inode { ino: Ino, offset: u64, len: u64 },
    Attributes { ino: Ino },
    Entry { parent: Ino, name: Box<[u8]> },
    Forget { what: ToForget, done: Box<dyn FnOnce() + Send> },
}

impl fmt::Debug for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inode { ino, .. } => write!(f, "Inode({ino})"),
            Self::Attributes { ino } => write!(f, "Attributes({ino})"),
            Self::Entry { parent, .. } => write!(f, "Entry({parent})"),
            Self::Forget { what, .. } => write!(f, "Forget({what:?})"),
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Notice>,
    closed: bool,
}

/// Notifications for one thread.
#[derive(Debug, Default)]
struct Lane {
    queue: Mutex<Queue>,
    /// Something was queued, or the queue was closed.
    filled: Condvar,
    /// Something was taken from a full queue, or the queue was closed.
    drained: Condvar,
}

/// What a thread of the notifier sends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Attributes,
    Names,
    Contents,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Attributes, Self::Names, Self::Contents];
}

impl Lane {
    fn push(&self, notice: Notice) {
        let mut queue = self.queue.lock();
        while queue.waiting.len() >= QUEUE_MAX && !queue.closed {
            self.drained.wait(&mut queue);
        }
        drop(queue);
        self.push_over(notice);
    }

    /// The same, however many there are.
    fn push_over(&self, notice: Notice) {
        let mut queue = self.queue.lock();
        if !queue.closed {
            queue.waiting.push_back(notice);
            self.filled.notify_one();
        }
    }

    fn close(&self) {
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
}

/// The file system's side of the mount.
#[derive(Debug)]
pub(crate) struct Notifier {
    lanes: [Lane; Kind::ALL.len()],
    counters: Arc<AllCounters>,
    parked: Weak<ParkTable>,
    idle: Arc<IdlePoll>,
    expires_names: AtomicBool,
}

impl Notifier {
    pub(crate) fn new(counters: Arc<AllCounters>, parked: &Arc<ParkTable>, idle: Arc<IdlePoll>) -> Self {
        Self {
            lanes: Default::default(),
            counters,
            parked: Arc::downgrade(parked),
            idle,
            expires_names: AtomicBool::new(false),
        }
    }

    /// The kernel has said what it can.
    pub(crate) fn agreed(&self, agreed: &Agreed) {
        self.expires_names.store(agreed.expires_names, Ordering::Relaxed);
    }

    fn lane(&self, kind: Kind) -> &Lane {
        &self.lanes[kind as usize]
    }

    /// The mount is gone; what is queued has no receiver.
    pub(crate) fn close(&self) {
        self.lanes.iter().for_each(Lane::close);
    }

    /// Sends until closed.
    pub(crate) fn run(&self, device: &Device, kind: Kind) {
        while let Some(notice) = self.lane(kind).next() {
            match notice {
                Notice::Inode { ino, offset, len } => inode(device, ino, offset, len),
                Notice::Attributes { ino } => {
                    attributes(device, ino);
                }
                Notice::Entry { parent, name } => entry(device, parent, &name, 0),
                Notice::Forget { what, done } => self.forget_now(device, kind, what, done),
            }
        }
    }

    /// Names are left to their own thread.
    fn forget_now(&self, device: &Device, kind: Kind, what: ToForget, done: Box<dyn FnOnce() + Send>) {
        let ToForget { inodes, names, gone, contents } = what;
        forget_attributes(device, inodes);
        if !(matches!(kind, Kind::Names) || names.is_empty() && gone.is_empty()) {
            let what = ToForget { inodes: Vec::new(), names, gone, contents };
            return self.lane(Kind::Names).push_over(Notice::Forget { what, done });
        }
        names.iter().for_each(|(parent, name)| entry(device, *parent, name, abi::EXPIRE_ONLY));
        gone.iter().for_each(|(parent, name)| entry(device, *parent, name, 0));
        done();
        let contents = contents.into_iter().map(|ino| Notice::Inode { ino, offset: 0, len: 0 });
        contents.for_each(|notice| self.lane(Kind::Contents).push_over(notice));
    }
}

/// Attributes, also of what the kernel is just about to learn.
fn forget_attributes(device: &Device, inodes: Vec<Ino>) {
    let mut inodes = inodes;
    inodes.retain(|ino| !attributes(device, *ino));
    for _ in 0..AGAIN_MAX {
        if inodes.is_empty() {
            break;
        }
        pause(AGAIN_AFTER);
        inodes.retain(|ino| !attributes(device, *ino));
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the kernel tells nobody when a process has taken an answer in"
)]
fn pause(time: Duration) {
    thread::sleep(time);
}

/// Attributes and contents. A length of 0 (or less) is "to the end" for the kernel too.
fn inode(device: &Device, ino: Ino, offset: u64, len: u64) {
    let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let out = abi::NotifyInvalInode { ino, off: signed(offset), len: signed(len) };
    let _known = send(device, abi::NOTIFY_INVAL_INODE, &[out.as_bytes()]);
}

/// Attributes of an inode; `false`: the kernel does not know it.
fn attributes(device: &Device, ino: Ino) -> bool {
    // No contents: that is what an offset below 0 says.
    let out = abi::NotifyInvalInode { ino, off: -1, len: 0 };
    send(device, abi::NOTIFY_INVAL_INODE, &[out.as_bytes()])
}

fn entry(device: &Device, parent: Ino, name: &[u8], flags: u32) {
    let out = abi::NotifyInvalEntry { parent, namelen: name.len() as u32, flags };
    send(device, abi::NOTIFY_INVAL_ENTRY, &[out.as_bytes(), name, &[0]]);
}

/// Has the kernel send a request (NOTIFY_REPLY, with no data) of this number, to the queue of the core that this runs on. `file` is a
/// regular file that the kernel knows.
pub(crate) fn ask_for_request(device: &Device, file: Ino, unique: u64) {
    let out = abi::NotifyRetrieve { notify_unique: unique, nodeid: file, ..abi::NotifyRetrieve::default() };
    let _known = send(device, abi::NOTIFY_RETRIEVE, &[out.as_bytes()]);
}

/// `false`: the kernel does not know the inode or name, so there is nothing to forget.
fn send(device: &Device, code: i32, parts: &[&[u8]]) -> bool {
    let len = size_of::<abi::OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
    let head = abi::OutHeader { len: len as u32, error: code, unique: 0 };
    let mut slices = vec![IoSlice::new(head.as_bytes())];
    slices.extend(parts.iter().map(|p| IoSlice::new(p)));
    match device.file().write_vectored(&slices) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => {
            tracing::debug!(code, %error, "the kernel refused a notification");
            true
        }
        Ok(_) => true,
    }
}

impl Host for Notifier {
    fn invalidate_inode(&self, ino: Ino, offset: u64, len: u64) {
        self.lane(Kind::Contents).push(Notice::Inode { ino, offset, len });
    }

    fn invalidate_attributes(&self, ino: Ino) {
        self.lane(Kind::Attributes).push(Notice::Attributes { ino });
    }

    fn invalidate_entry(&self, parent: Ino, name: &[u8]) {
        assert!(name.len() <= NAME_MAX, "the name is that of an entry");
        self.lane(Kind::Names).push(Notice::Entry { parent, name: name.into() });
    }

    fn forget(&self, what: ToForget, done: Box<dyn FnOnce() + Send>) {
        self.lane(Kind::Attributes).push_over(Notice::Forget { what, done });
    }

    fn forgets_names(&self) -> bool {
        self.expires_names.load(Ordering::Relaxed)
    }

    fn stats(&self) -> serde_json::Value {
        let mut stats = self.counters.json();
        stats["parked"] = self.parked.upgrade().map_or(0, |t| t.len()).into();
        stats["idle_poll"] = self.idle.json();
        stats
    }
}
