//! A program that makes requests: like [`ferry_fs::InProcess`], and in a simulation it lets others
//! run while it waits.

use ferry_fs::inprocess::FromReply;
use ferry_fs::{Answer, Complete, Cx, EarlyAck, Errno, Interrupt, Park, Reply, Stop};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::rt::sim;

/// Who calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct InProcess {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) umask: u32,
    pub(super) caller: u32,
    pub(super) ack: Option<EarlyAck>,
}

type Outcome = Result<Reply, Errno>;

/// The end that a parked answer is sent to. Its lock is no simulated one: the thread that parks a
/// request must not stop there.
struct Waiter {
    end: Mutex<Option<oneshot::Sender<Outcome>>>,
    ack: Option<EarlyAck>,
}

impl Park for Waiter {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let end = self.end.lock().take().expect("a request is parked once");
        Box::new(move |outcome| drop(end.send(outcome)))
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn early_ack(&self) -> Option<EarlyAck> {
        self.ack
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

impl InProcess {
    /// Makes one request, and waits for its answer.
    pub(super) fn call<T: FromReply>(
        &self,
        request: impl FnOnce(&Cx) -> Answer<T>,
    ) -> Result<T, Errno> {
        let Self { uid, gid, umask, caller, ack } = *self;
        if sim::current().is_none() {
            let me =
                ferry_fs::InProcess { uid, gid, umask, caller, ack, ..ferry_fs::InProcess::ROOT };
            return me.call(request);
        }
        let (tell, told) = oneshot::channel();
        let waiter = Waiter { end: Mutex::new(Some(tell)), ack };
        match request(&Cx { uid, gid, pid: caller, umask, park: &waiter }) {
            Ok(answer) => Ok(answer),
            Err(Stop::Errno(error)) => Err(error),
            Err(Stop::Parked) => {
                let outcome = crate::rt::thread::block_on(told).expect("all that is parked ends");
                T::from_reply(outcome?).ok_or(Errno(libc::EPROTO))
            }
        }
    }
}
