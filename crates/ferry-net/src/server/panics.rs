//! A panic while a client's change or request is answered: a bug.
//!
//! * PANIC-1: the client is told, and does not ask for the same again. Otherwise the next server
//!   would end the same way, again and again.
//! * PANIC-2: if the process asked for it ([`super::Server::on_panic`]), nothing else goes on:
//!   nothing is applied, made durable or answered after the panic, because the state of the server
//!   is unknown. What was in progress waits for the next server.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::rt::runtime::Handle;
use tokio::sync::Semaphore;

use super::session::{Room, one_of};

/// The last message to the client has so long to be sent.
const LAST_MESSAGE_TIME_MAX: Duration = Duration::from_secs(1);

thread_local! {
    static ANSWERED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread, now, is answered. A panic hook need not end the process then:
/// the server does ([`super::Server::on_panic`]).
pub fn panic_is_answered() -> bool {
    ANSWERED.get()
}

/// Acts; a panic in it is answered.
pub(super) fn answered<T>(act: impl FnOnce() -> T) -> T {
    struct Until(bool);
    impl Drop for Until {
        fn drop(&mut self) {
            ANSWERED.set(self.0);
        }
    }
    let _until = Until(ANSWERED.replace(true));
    act()
}

/// Ends the process.
pub(super) type End = Box<dyn Fn() + Send + Sync>;

/// The panics of one server.
#[derive(Default)]
pub(super) struct Panics {
    end: OnceLock<End>,
    ending: AtomicBool,
}

impl Panics {
    pub(super) fn on(&self, end: End) {
        let _once = self.end.set(end);
    }

    /// Whether nothing goes on any more.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// Answering has panicked. If the server is to end, `tell` sends the last message to the
    /// client, and gives back its room when that is on its way; `false`: the server goes on.
    pub(super) fn end_server(
        self: &Arc<Self>,
        runtime: &Handle,
        tell: impl FnOnce(Option<Room>),
    ) -> bool {
        if self.end.get().is_none() {
            return false;
        }
        self.ending.store(true, Ordering::Relaxed);
        let sent = Arc::new(Semaphore::new(1));
        tell(one_of(&sent));
        let panics = Arc::clone(self);
        runtime.spawn(async move {
            let _elapsed = crate::rt::time::timeout(LAST_MESSAGE_TIME_MAX, sent.acquire()).await;
            panics.end.get().inspect(|end| end());
        });
        true
    }
}
