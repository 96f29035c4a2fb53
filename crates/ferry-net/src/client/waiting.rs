//! A request of the kernel that waits for the server.
//!
//! It is answered once: by the server's answer, by a signal, or because the server is gone for too
//! long. An answer that comes when nobody waits any more is undone: what it opened is closed, what
//! it named is forgotten.

use std::sync::{Arc, Weak};

use crate::rt::Mutex;
use ferry_fs::{Complete, Errno, Ino, Reply};

use super::RemoteFs;
use super::link::{Key, Waiter};
use crate::message::Outcome;

/// Turns the server's answer into the kernel's.
pub(super) type Finish = Box<dyn Fn(&RemoteFs, Outcome) -> Result<Reply, Errno> + Send + Sync>;

/// Keeps what an answer says that may be kept.
pub(super) type Keep = Box<dyn Fn(&RemoteFs, &Outcome, u8) + Send + Sync>;

/// A request of which it matters what the server did, though nobody waits for it any more.
pub(super) trait Unsettled: Send + Sync {
    /// Nobody waits any more; the kernel is not told yet.
    fn interrupted(&self, fs: &RemoteFs);
    /// The server has made it for nobody, or will not make it. May be called more than once.
    fn over(&self, fs: &RemoteFs);
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

    pub(super) fn is_interrupted(&self) -> bool {
        self.state.lock().interrupted
    }

    /// Where the answer goes; before the request is sent.
    pub(super) fn set_complete(&self, complete: Complete) {
        self.state.lock().complete = Some(complete);
    }

    /// Where the request is; after it was sent.
    pub(super) fn set_key(&self, key: Key) {
        let interrupted = {
            let mut state = self.state.lock();
            state.key = Some(key);
            state.interrupted
        };
        if interrupted && let Some(fs) = self.fs.upgrade() {
            fs.link.abandon(key);
        }
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
        self.set_key(key);
    }

    fn fail(&self, errno: Errno) {
        let complete = self.state.lock().complete.take();
        if let (Some(unsettled), Some(fs)) = (&self.unsettled, self.fs.upgrade()) {
            unsettled.over(&fs);
        }
        if let Some(complete) = complete {
            complete(Err(errno));
        }
    }
}

/// For what nobody waits for.
pub(super) struct Nobody;

impl Waiter for Nobody {
    fn answer(&self, _outcome: Outcome, _leased: u8) {}
    fn fail(&self, _errno: Errno) {}
}
