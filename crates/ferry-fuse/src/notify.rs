//! Notifications: tell the kernel to forget what it has cached.
//!
//! A notification may block in the kernel until requests are answered (that of a name takes the
//! directory's lock), so threads of their own send them. One thread sends notifications of
//! attributes, which wait for nothing. One sends those of names. One sends those of contents:
//! before the kernel forgets pages, it writes back what programs have stored there, and it waits
//! for pages that are being read. One sends those of a sync, which may wait for any file that is
//! open for writing: direct writes, whose pages the thread of contents drops, do not wait for it.
//!
//! Queuing a notification never waits: the thread that queues may be one that answers requests, and
//! a notification may be waiting for just such an answer. The queues are bounded all the same: an
//! inode's attributes are queued once, all syncs that wait are one, and there are as many of the
//! others as leases and parked requests.
//!
//! If the process is killed while one of these waits in the kernel, the next process must not wait
//! for that (`outlet.rs`).
//!
//! Before another process goes on with the mount, those of names and contents that no request waits
//! for *rest*: none is under way in the kernel, and later ones are left to that process. One that
//! waited there for a page would wait for a request that nobody serves, and this process could not
//! end.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use ferry_fs::{Host, Ino, ToForget};
use parking_lot::{Condvar, Mutex};
use zerocopy::IntoBytes;

use crate::abi;
use crate::device::FuseDevice;
use crate::init::Agreed;
use crate::outlet::Outlet;
use crate::request::counters::MountCounters;
use crate::request::direct_write::DropPages;
use crate::request::dispatch::WriteBack;
use crate::request::idle_poll::IdlePoll;
use crate::request::parked::ParkTable;
use crate::request::realtime::RealTime;

/// If the kernel does not know an inode, it may be about to learn it: the notification is repeated
/// this often.
const REPEATS_MAX: usize = 10;
/// The pause before each repetition.
const REPEAT_INTERVAL: Duration = Duration::from_millis(1);

enum Notice {
    /// All names.
    Names {
        done: Box<dyn FnOnce() + Send>,
    },
    Contents {
        ino: Ino,
    },
    Attributes {
        ino: Ino,
    },
    Forget {
        what: ToForget,
        done: Box<dyn FnOnce() + Send>,
    },
    Pages {
        ino: Ino,
        offset: u64,
        len: u64,
        done: Box<dyn FnOnce() + Send>,
    },
    WriteBack {
        files: Vec<Ino>,
        done: Vec<Box<dyn FnOnce() + Send>>,
    },
}

impl fmt::Debug for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Names { .. } => write!(f, "Names"),
            Self::Contents { ino } => write!(f, "Contents({ino})"),
            Self::Attributes { ino } => write!(f, "Attributes({ino})"),
            Self::Forget { what, .. } => write!(f, "Forget({what:?})"),
            Self::Pages { ino, .. } => write!(f, "Pages({ino})"),
            Self::WriteBack { files, .. } => write!(f, "WriteBack({files:?})"),
        }
    }
}

impl Notice {
    /// A request waits for it, and with that the end of the requests that are under way. Or it
    /// waits for nobody itself.
    fn is_awaited(&self) -> bool {
        matches!(
            self,
            Self::Names { .. }
                | Self::Attributes { .. }
                | Self::Pages { .. }
                | Self::WriteBack { .. }
        )
    }
}

#[derive(Debug, Default)]
struct QueuedNotices {
    waiting: VecDeque<Notice>,
    /// Those that nobody awaits stay in the queue.
    rests: bool,
    /// One of these is being sent.
    sending: bool,
    /// Inodes for which a [`Notice::Attributes`] is queued.
    attributes: HashSet<Ino>,
    closed: bool,
}

/// The notifications that one thread sends.
#[derive(Debug, Default)]
struct NoticeQueue {
    notices: Mutex<QueuedNotices>,
    /// Signalled when a notification is queued or the queue is closed.
    filled: Condvar,
    /// Signalled when one was sent.
    sent: Condvar,
}

/// What one thread of the notifier sends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoticeKind {
    Attributes,
    Names,
    Contents,
    WriteBack,
}

impl NoticeKind {
    pub(crate) const ALL: [Self; 4] =
        [Self::Attributes, Self::Names, Self::Contents, Self::WriteBack];
}

impl NoticeQueue {
    /// Queues a notification; never waits.
    fn push(&self, notice: Notice) {
        let mut queue = self.notices.lock();
        let waits = match &notice {
            Notice::Attributes { ino } => !queue.attributes.insert(*ino),
            _ => false,
        };
        let mut notice = notice;
        if let Notice::WriteBack { files, done } = &mut notice
            && let Some(Notice::WriteBack { files: first, done: before }) =
                queue.waiting.pop_front()
        {
            files.extend(first);
            files.sort_unstable();
            files.dedup();
            done.extend(before);
        }
        if !queue.closed && !waits {
            queue.waiting.push_back(notice);
            self.filled.notify_one();
        }
    }

    fn close(&self) {
        self.notices.lock().closed = true;
        self.filled.notify_all();
    }

    /// Sends none any more that nobody awaits; `false`: one is still being sent after this time.
    fn rest(&self, patience: Duration) -> bool {
        let mut queue = self.notices.lock();
        queue.rests = true;
        !self.sent.wait_while_for(&mut queue, |queue| queue.sending, patience).timed_out()
    }

    fn go_on(&self) {
        self.notices.lock().rests = false;
        self.filled.notify_all();
    }

    /// What is left of those that nobody awaits.
    fn take_left(&self) -> VecDeque<Notice> {
        let mut queue = self.notices.lock();
        let (awaited, left) = queue.waiting.drain(..).partition(Notice::is_awaited);
        queue.waiting = awaited;
        left
    }

    fn next(&self) -> Option<Notice> {
        let mut queue = self.notices.lock();
        queue.sending = false;
        self.sent.notify_all();
        loop {
            // Those about attributes wait for nobody, and the next process of a mount does not know
            // of them.
            let is_due = |notice: &Notice| matches!(notice, Notice::Attributes { .. });
            if queue.closed && !queue.waiting.front().is_some_and(is_due) {
                return None;
            }
            let rests = queue.rests;
            let at = queue.waiting.iter().position(|notice| !rests || notice.is_awaited());
            if let Some(notice) = at.and_then(|at| queue.waiting.remove(at)) {
                queue.sending = !notice.is_awaited();
                if let Notice::Attributes { ino } = notice {
                    // A later change needs another notification.
                    queue.attributes.remove(&ino);
                }
                return Some(notice);
            }
            self.filled.wait(&mut queue);
        }
    }
}

/// The kernel of a mount, as the file system sees it.
#[derive(Debug)]
pub(crate) struct Notifier {
    queues: [NoticeQueue; NoticeKind::ALL.len()],
    counters: Arc<MountCounters>,
    parked: Weak<ParkTable>,
    idle: Arc<IdlePoll>,
    realtime: Arc<RealTime>,
    expires_names: AtomicBool,
}

impl Notifier {
    pub(crate) fn new(
        counters: Arc<MountCounters>,
        parked: &Arc<ParkTable>,
        idle: Arc<IdlePoll>,
        realtime: Arc<RealTime>,
    ) -> Self {
        Self {
            queues: Default::default(),
            counters,
            parked: Arc::downgrade(parked),
            idle,
            realtime,
            expires_names: AtomicBool::new(false),
        }
    }

    /// The kernel has agreed to these capabilities.
    pub(crate) fn agreed(&self, agreed: &Agreed) {
        self.expires_names.store(agreed.expires_names, Ordering::Relaxed);
    }

    fn queue(&self, kind: NoticeKind) -> &NoticeQueue {
        &self.queues[kind as usize]
    }

    /// What nobody awaits is left to the next process from now on; `false`: the kernel has not
    /// taken one of these in this time, and all are sent again.
    pub(crate) fn rest(&self, patience: Duration) -> bool {
        let rested = [NoticeKind::Names, NoticeKind::Contents]
            .into_iter()
            .all(|kind| self.queue(kind).rest(patience));
        if !rested {
            self.go_on();
        }
        rested
    }

    /// They are sent again.
    pub(crate) fn go_on(&self) {
        self.queues.iter().for_each(NoticeQueue::go_on);
    }

    /// What is left to the next process.
    pub(crate) fn take_left(&self) -> ToForget {
        let mut left = ToForget::default();
        for notice in self.queues.iter().flat_map(NoticeQueue::take_left) {
            match notice {
                Notice::Contents { ino } => left.contents.push(ino),
                Notice::Forget { what, .. } => left.append(what),
                _ => {}
            }
        }
        left
    }

    /// The mount is gone: what is queued has no receiver.
    pub(crate) fn close(&self) {
        self.queues.iter().for_each(NoticeQueue::close);
    }

    /// Sends until closed.
    pub(crate) fn run(&self, device: &Arc<FuseDevice>, kind: NoticeKind) {
        let device = &Outlet::of(device, !matches!(kind, NoticeKind::Attributes));
        while let Some(notice) = self.queue(kind).next() {
            match notice {
                Notice::Names { done } => {
                    let _known = send(device, abi::NOTIFY_INC_EPOCH, &[]);
                    done();
                }
                Notice::Contents { ino } => invalidate_inode(device, ino, 0, 0),
                Notice::Attributes { ino } => {
                    invalidate_attributes(device, ino);
                }
                Notice::Forget { what, done } => self.send_forget(device, kind, what, done),
                Notice::Pages { ino, offset, len, done } => {
                    invalidate_inode(device, ino, offset, len);
                    done();
                }
                Notice::WriteBack { files, done } => {
                    files.into_iter().for_each(|ino| invalidate_inode(device, ino, 0, 0));
                    done.into_iter().for_each(|done| done());
                }
            }
        }
    }

    /// Sends one request of the file system; hands names on to their own thread.
    fn send_forget(
        &self,
        device: &Outlet,
        kind: NoticeKind,
        what: ToForget,
        done: Box<dyn FnOnce() + Send>,
    ) {
        let ToForget { inodes, names, removed, contents } = what;
        forget_attributes(device, inodes);
        if matches!(kind, NoticeKind::Attributes) && !(names.is_empty() && removed.is_empty()) {
            let what = ToForget { inodes: Vec::new(), names, removed, contents };
            return self.queue(NoticeKind::Names).push(Notice::Forget { what, done });
        }
        names
            .iter()
            .for_each(|(parent, name)| invalidate_entry(device, *parent, name, abi::EXPIRE_ONLY));
        removed.iter().for_each(|(parent, name)| invalidate_entry(device, *parent, name, 0));
        done();
        contents
            .into_iter()
            .for_each(|ino| self.queue(NoticeKind::Contents).push(Notice::Contents { ino }));
    }
}

/// Invalidates attributes, also those that the kernel is about to learn.
fn forget_attributes(device: &Outlet, inodes: Vec<Ino>) {
    let mut inodes = inodes;
    inodes.retain(|ino| !invalidate_attributes(device, *ino));
    for _ in 0..REPEATS_MAX {
        if inodes.is_empty() {
            break;
        }
        pause(REPEAT_INTERVAL);
        inodes.retain(|ino| !invalidate_attributes(device, *ino));
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the kernel does not say when a process has processed an answer"
)]
fn pause(time: Duration) {
    thread::sleep(time);
}

/// Invalidates attributes and contents. A length of 0 (or less) means "to the end", as for the
/// kernel.
fn invalidate_inode(device: &Outlet, ino: Ino, offset: u64, len: u64) {
    let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let out = abi::NotifyInvalInode { ino, off: signed(offset), len: signed(len) };
    let _known = send(device, abi::NOTIFY_INVAL_INODE, &[out.as_bytes()]);
}

/// Invalidates the attributes of an inode; `false`: the kernel does not know the inode.
fn invalidate_attributes(device: &Outlet, ino: Ino) -> bool {
    // An offset below 0 excludes the contents.
    let out = abi::NotifyInvalInode { ino, off: -1, len: 0 };
    send(device, abi::NOTIFY_INVAL_INODE, &[out.as_bytes()])
}

/// Invalidates a name.
fn invalidate_entry(device: &Outlet, parent: Ino, name: &[u8], flags: u32) {
    let out = abi::NotifyInvalEntry { parent, namelen: name.len() as u32, flags };
    send(device, abi::NOTIFY_INVAL_ENTRY, &[out.as_bytes(), name, &[0]]);
}

/// Makes the kernel send a request (NOTIFY_REPLY, without data) of this number to the queue of the
/// calling thread's core. `file` is a regular file; `false`: the kernel does not know it.
pub(crate) fn ask_for_request(device: &FuseDevice, file: Ino, unique: u64) -> bool {
    let out = abi::NotifyRetrieve {
        notify_unique: unique,
        nodeid: file,
        ..abi::NotifyRetrieve::default()
    };
    is_known(
        abi::NOTIFY_RETRIEVE,
        device.file().write(&message(abi::NOTIFY_RETRIEVE, &[out.as_bytes()])),
    )
}

/// Sends a notification; `false`: the kernel does not know the inode or name, so it has nothing to
/// forget.
fn send(device: &Outlet, code: i32, parts: &[&[u8]]) -> bool {
    is_known(code, device.write(message(code, parts)))
}

fn message(code: i32, parts: &[&[u8]]) -> Vec<u8> {
    let len = size_of::<abi::OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
    let head = abi::OutHeader { len: len as u32, error: code, unique: 0 };
    [&[head.as_bytes()], parts].concat().concat()
}

fn is_known(code: i32, sent: io::Result<usize>) -> bool {
    match sent {
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => {
            tracing::debug!(code, %error, "the kernel refused a notification");
            true
        }
        Ok(_) => true,
    }
}

impl DropPages for Notifier {
    fn drop_pages(&self, ino: Ino, offset: u64, len: u64, done: Box<dyn FnOnce() + Send>) {
        self.queue(NoticeKind::Contents).push(Notice::Pages { ino, offset, len, done });
    }
}

impl WriteBack for Notifier {
    fn write_back(&self, files: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        let notice = Notice::WriteBack { files, done: vec![done] };
        self.queue(NoticeKind::WriteBack).push(notice);
    }
}

impl Host for Notifier {
    fn invalidate_attributes(&self, ino: Ino) {
        self.queue(NoticeKind::Attributes).push(Notice::Attributes { ino });
    }

    fn forget(&self, what: ToForget, done: Box<dyn FnOnce() + Send>) {
        self.queue(NoticeKind::Attributes).push(Notice::Forget { what, done });
    }

    fn forget_contents(&self, files: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        self.write_back(files, done);
    }

    fn forget_all(&self, known: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        for ino in &known {
            self.queue(NoticeKind::Contents).push(Notice::Contents { ino: *ino });
        }
        let (tell, are_attributes_forgotten) = channel::<()>();
        let done = move || {
            let _dropped = are_attributes_forgotten.recv();
            done();
        };
        self.queue(NoticeKind::Names).push(Notice::Names { done: Box::new(done) });
        let what = ToForget { inodes: known, ..ToForget::default() };
        self.forget(what, Box::new(move || drop(tell)));
    }

    fn forgets_names(&self) -> bool {
        self.expires_names.load(Ordering::Relaxed)
    }

    fn stats(&self) -> serde_json::Value {
        let mut stats = self.counters.json();
        stats["parked"] = self.parked.upgrade().map_or(0, |t| t.len()).into();
        stats["idle_poll"] = self.idle.json();
        stats["ring_threads"] = self.realtime.json();
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::crowd::Crowd;
    use std::sync::mpsc;

    /// A notifier without threads: as if the sending thread waited for a request that the queuing
    /// thread is to answer.
    fn notifier() -> Notifier {
        let counters = Arc::<MountCounters>::default();
        let parked = Arc::new(ParkTable::new(counters.block(), Arc::default()));
        Notifier::new(
            Arc::clone(&counters),
            &parked,
            Arc::new(IdlePoll::new(counters, Crowd::of_machine())),
            Arc::default(),
        )
    }

    #[test]
    fn queuing_a_notification_never_waits() {
        let notifier = Arc::new(notifier());
        let (done, told) = mpsc::channel();
        let queuing = Arc::clone(&notifier);
        thread::spawn(move || {
            for ino in 0..5000 {
                queuing.invalidate_attributes(ino);
            }
            done.send(()).expect("the test waits");
        });
        assert_eq!(
            told.recv_timeout(Duration::from_secs(20)),
            Ok(()),
            "queuing waits for a queue that nobody empties"
        );
        notifier.close();
    }

    #[test]
    fn syncs_that_wait_are_one_notification_of_the_files_of_all() {
        let (notifier, ended) = (notifier(), Arc::new(Mutex::new(Vec::new())));
        for sync in 0..3 {
            let ended = Arc::clone(&ended);
            notifier.write_back(vec![sync, sync + 1], Box::new(move || ended.lock().push(sync)));
        }
        let queue = notifier.queue(NoticeKind::WriteBack);
        assert_eq!(queue.notices.lock().waiting.len(), 1);
        let Some(Notice::WriteBack { files, done }) = queue.next() else { panic!("none waits") };
        assert_eq!(files, [0, 1, 2, 3]);
        done.into_iter().for_each(|done| done());
        ended.lock().sort_unstable();
        assert_eq!(*ended.lock(), [0, 1, 2], "each is answered");
    }

    #[test]
    fn attributes_of_an_inode_are_queued_once_until_they_are_sent() {
        let notifier = notifier();
        let queue = notifier.queue(NoticeKind::Attributes);
        for _ in 0..2 {
            (0..5000).for_each(|n| notifier.invalidate_attributes(n % 3));
            assert_eq!(queue.notices.lock().waiting.len(), 3);
            (0..3).for_each(|ino| {
                assert!(
                    matches!(queue.next(), Some(Notice::Attributes { ino: next }) if next == ino)
                );
            });
        }
    }
}
