//! Calling a file system in process: a request that parks blocks its caller, and nobody else.

use crate::api::*;
use ferry_journal::RequestId;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// The caller, and a way to wait. Every call has its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InProcess {
    /// User id of the caller.
    pub uid: u32,
    /// Group id of the caller.
    pub gid: u32,
    /// The caller's umask.
    pub umask: u32,
    /// Tells the callers in one process apart, as thread numbers do for a mount (the flush policy
    /// wants to know); 0: one of many.
    pub caller: u32,
    /// What the maker of the change was told before it came here.
    pub ack: Option<EarlyAck>,
    /// The request of a transport that this is.
    pub request: Option<RequestId>,
}

impl InProcess {
    /// Root, one of many.
    pub const ROOT: Self = Self { uid: 0, gid: 0, umask: 0, caller: 0, ack: None, request: None };

    /// Makes one request: `request` calls a method of a [`Filesystem`] with the context. Waits for
    /// a parked answer.
    ///
    /// ```
    /// # use ferry_fs::{Errno, Filesystem, InProcess, ROOT};
    /// fn sync_root(fs: &dyn Filesystem) -> Result<(), Errno> {
    ///     InProcess::default().call(|cx| fs.fsyncdir(cx, ROOT, 0, false))
    /// }
    /// ```
    pub fn call<T: FromReply>(&self, request: impl FnOnce(&Cx) -> Answer<T>) -> Result<T, Errno> {
        let Self { uid, gid, umask, caller: pid, ack, request: of } = *self;
        let waiter = Waiter { outcome: Arc::default(), ack, of };
        let cx = Cx { uid, gid, pid, umask, park: &waiter };
        match request(&cx) {
            Ok(answer) => Ok(answer),
            Err(Stop::Errno(error)) => Err(error),
            Err(Stop::Parked) => T::from_reply(waiter.wait()?).ok_or(Errno(libc::EPROTO)),
        }
    }
}

type Outcome = (Mutex<Option<Result<Reply, Errno>>>, Condvar);

struct Waiter {
    outcome: Arc<Outcome>,
    ack: Option<EarlyAck>,
    of: Option<RequestId>,
}

impl Waiter {
    fn wait(&self) -> Result<Reply, Errno> {
        let (outcome, completed) = &*self.outcome;
        let mut outcome = outcome.lock();
        loop {
            if let Some(result) = outcome.take() {
                return result;
            }
            completed.wait(&mut outcome);
        }
    }
}

impl Park for Waiter {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let theirs = self.outcome.clone();
        Box::new(move |result| {
            *theirs.0.lock() = Some(result);
            theirs.1.notify_one();
        })
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn early_ack(&self) -> Option<EarlyAck> {
        self.ack
    }

    fn request(&self) -> Option<RequestId> {
        self.of
    }
}

/// What a parked answer can be turned back into.
pub trait FromReply: Sized {
    /// The reply's contents, if they are of this type.
    fn from_reply(reply: Reply) -> Option<Self>;
}

macro_rules! from_reply {
    ($($t:ty = $p:pat => $v:expr),* $(,)?) => {$(
        impl FromReply for $t {
            fn from_reply(reply: Reply) -> Option<Self> {
                if let $p = reply { Some($v) } else { None }
            }
        }
    )*};
}

from_reply! {
    () = Reply::Empty => (),
    Entry = Reply::Entry(entry) => entry,
    (Attr, std::time::Duration) = Reply::Attr(attr, valid) => (attr, valid),
    (Attr, std::time::Duration, Timestamp) = Reply::Statx(attr, valid, born) => (attr, valid, born),
    Opened = Reply::Opened(opened) => opened,
    (Entry, Opened) = Reply::Created(entry, opened) => (entry, opened),
    u64 = Reply::Count(count) => count,
    usize = Reply::Count(count) => usize::try_from(count).ok()?,
    Vec<u8> = Reply::Data(data) => data,
    Vec<DirEntry> = Reply::Dir(entries) => entries,
    Statfs = Reply::Statfs(statfs) => statfs,
    FileLock = Reply::Lock(lock) => lock,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_a_parked_answer_and_hears_of_one_that_never_comes() {
        let answered = InProcess::default().call(|cx| {
            let parked = cx.park::<u64>(None);
            std::thread::spawn(move || parked.complete(Ok(7)));
            Err::<u64, _>(Stop::Parked)
        });
        assert_eq!(answered, Ok(7));
        let dropped = InProcess::default().call(|cx| {
            drop(cx.park::<()>(None));
            Err::<(), _>(Stop::Parked)
        });
        assert_eq!(dropped, Err(Errno(libc::EIO)));
        let wrong = InProcess::default().call(|cx| {
            cx.park::<u64>(None).complete(Ok(7));
            Err::<(), _>(Stop::Parked)
        });
        assert_eq!(wrong, Err(Errno(libc::EPROTO)));
    }
}
