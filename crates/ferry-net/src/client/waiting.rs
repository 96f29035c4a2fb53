//! A request of the kernel that waits for the server.
//!
//! It is answered once: by the server's answer, by a signal, or because the server is away for too
//! long. An answer that comes when nobody waits any more is undone: what it opened is closed, what
//! it named is forgotten.

use std::sync::{Arc, Weak};

use crate::rt::Mutex;
use ferry_env::activity::{self, Layer};
use ferry_fs::{Answer, Complete, Cx, Errno, Ino, Reply, Stop};

use super::change::{Key, Pending, Waiter};
use super::remote::{RemoteFs, caller, number};
use crate::message::{Op, Outcome};

/// Turns the server's answer into the kernel's.
pub(super) type Finish = Box<dyn Fn(&RemoteFs, Outcome) -> Result<Reply, Errno> + Send + Sync>;

/// Caches what an answer says.
pub(super) type Keep = Box<dyn Fn(&RemoteFs, &Outcome, u8) + Send + Sync>;

/// A request of which it matters what the server did, though nobody waits for it any more.
pub(super) trait Unsettled: Send + Sync {
    /// Nobody waits any more; the kernel is not told yet.
    fn interrupted(&self, fs: &RemoteFs);
    /// The server has made it for nobody, or will not make it. May be called more than once.
    fn over(&self, fs: &RemoteFs);
    /// The server has never heard of it.
    fn unheard(&self, fs: &RemoteFs);
}

/// What an answer has given that its receiver would give back.
#[derive(Debug)]
enum Undo {
    Forget(Ino),
    Release(u64, Option<Ino>),
}

impl Undo {
    fn of(reply: &Result<Reply, Errno>) -> Option<Self> {
        match reply {
            Ok(Reply::Entry(entry)) => entry.attr.map(|attr| Undo::Forget(attr.ino)),
            Ok(Reply::Opened(opened)) => Some(Undo::Release(opened.fh, None)),
            Ok(Reply::Created(entry, opened)) => {
                Some(Undo::Release(opened.fh, entry.attr.map(|attr| attr.ino)))
            }
            _ => None,
        }
    }
}

#[derive(Default)]
struct State {
    complete: Option<Complete>,
    key: Option<Key>,
    undo: Option<Undo>,
    interrupted: bool,
}

/// The request.
pub(super) struct Waiting {
    fs: Weak<RemoteFs>,
    finish: Finish,
    keep: Option<Keep>,
    unsettled: Option<Box<dyn Unsettled>>,
    state: Mutex<State>,
}

impl Waiting {
    pub(super) fn new(
        fs: Weak<RemoteFs>,
        (finish, keep): (Finish, Option<Keep>),
        unsettled: Option<Box<dyn Unsettled>>,
    ) -> Arc<Self> {
        Arc::new(Self { fs, finish, keep, unsettled, state: Mutex::default() })
    }

    /// Where the answer goes; before the request is sent.
    pub(super) fn set_complete(&self, complete: Complete) {
        self.state.lock().complete = Some(complete);
    }

    /// The answer is nobody's.
    fn undo(&self, undo: Option<Undo>, fs: &RemoteFs) {
        if let Some(unsettled) = &self.unsettled {
            unsettled.over(fs);
        }
        let Some(undo) = undo else { return };
        let (fh, ino) = match undo {
            Undo::Forget(ino) => (None, Some(ino)),
            Undo::Release(fh, ino) => (Some(fh), ino),
        };
        if let Some(fh) = fh {
            fs.release_handle(fh);
        }
        if let Some(ino) = ino {
            fs.forget_known(ino, 1);
        }
    }

    /// The kernel is told `EINTR`, and will not hear of any answer, not even of one that has just
    /// been given.
    pub(super) fn interrupt(&self) {
        let Some(fs) = self.fs.upgrade() else { return };
        if let Some(unsettled) = &self.unsettled {
            unsettled.interrupted(&fs);
        }
        let (key, undo, done) = {
            let mut state = self.state.lock();
            state.interrupted = true;
            let done = state.complete.take().is_none();
            (state.key, state.undo.take(), done)
        };
        if done {
            self.undo(undo, &fs);
        } else if let Some(key) = key {
            fs.link.abandon(key);
        }
    }
}

impl Waiting {
    /// There will hardly be an answer.
    fn end(&self, errno: Errno, settle: impl FnOnce(&dyn Unsettled, &RemoteFs)) {
        let complete = self.state.lock().complete.take();
        if let (Some(unsettled), Some(fs)) = (&self.unsettled, self.fs.upgrade()) {
            settle(&**unsettled, &fs);
        }
        if let Some(complete) = complete {
            complete(Err(errno));
        }
    }
}

impl Waiter for Waiting {
    fn answer(&self, outcome: Outcome, leased: u8) {
        let Some(fs) = self.fs.upgrade() else { return };
        if let Some(keep) = &self.keep {
            keep(&fs, &outcome, leased);
        }
        let reply = (self.finish)(&fs, outcome);
        let complete = {
            let mut state = self.state.lock();
            state.undo = Undo::of(&reply);
            state.complete.take()
        };
        if let Some(complete) = complete {
            complete(reply);
            return;
        }
        let undo = self.state.lock().undo.take();
        self.undo(undo, &fs);
    }

    fn moved(&self, key: Key) {
        let interrupted = {
            let mut state = self.state.lock();
            state.key = Some(key);
            state.interrupted
        };
        if interrupted && let Some(fs) = self.fs.upgrade() {
            fs.link.abandon(key);
        }
    }

    fn is_interrupted(&self) -> bool {
        self.state.lock().interrupted
    }

    fn fail(&self, errno: Errno) {
        self.end(errno, |unsettled, fs| unsettled.over(fs));
    }

    fn refuse(&self, errno: Errno) {
        self.end(errno, |unsettled, fs| unsettled.unheard(fs));
    }
}

impl RemoteFs {
    /// Sends an operation; its answer comes later.
    pub(super) fn send<T>(&self, cx: &Cx<'_>, op: Op, finish: Finish) -> Answer<T> {
        let parked = self.park(cx, op, (finish, None), None);
        self.send_parked(parked);
        Err(Stop::Parked)
    }

    /// The same; what the answer says is cached if that is safe.
    pub(super) fn send_and_keep<T>(
        &self,
        cx: &Cx<'_>,
        op: Op,
        finish: Finish,
        keep: Keep,
    ) -> Answer<T> {
        let parked = self.park(cx, op, (finish, Some(keep)), None);
        self.send_parked(parked);
        Err(Stop::Parked)
    }

    /// Parks a request that is not sent yet.
    pub(super) fn park(
        &self,
        cx: &Cx<'_>,
        op: Op,
        finish: (Finish, Option<Keep>),
        unsettled: Option<Box<dyn Unsettled>>,
    ) -> Pending {
        let waiting = Waiting::new(self.this.clone(), finish, unsettled);
        // It keeps the request: an answer that has just come must still be undone.
        let interrupted = Arc::clone(&waiting);
        let interrupt = Box::new(move || interrupted.interrupt());
        let _inside = activity::enter(Layer::Server);
        waiting.set_complete(cx.park.park(Some(interrupt)));
        let files = self.files_of(&op);
        let (request, locks_lost) = (number(cx), self.link.locks_lost());
        Pending { files, request, locks_lost, ..Pending::new(caller(cx), op, waiting) }
    }

    /// Sends a request that is parked.
    pub(super) fn send_parked(&self, pending: Pending) {
        let ordered = pending.op.is_ordered();
        // If there is hardly any space, the server needs what was removed, and hears of it before
        // the change.
        if ordered && self.cache.lock().reservation.is_refused(self.cache.now()) {
            self.hurry();
        }
        let waiter = Arc::clone(&pending.waiter);
        let key = if ordered { self.link.change(pending) } else { self.link.request(pending) };
        if let Some(key) = key {
            waiter.moved(key);
        }
    }
}
