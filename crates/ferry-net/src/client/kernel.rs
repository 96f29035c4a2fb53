//! The kernel of this machine: it must forget what it caches before the server is told that a lease
//! is returned.

use std::sync::Arc;
use std::time::Duration;

use crate::rt::runtime::Handle;
use crate::rt::{Mutex, RwLock};
use ferry_fs::{Host, Ino, ToForget};
use serde_json::Value;
use tokio::sync::oneshot;

use super::cache::{ATTR_VALID_MAX, NAME_VALID_MAX};

/// After this time kernel-cached attributes have expired, whatever keeps the kernel from
/// forgetting.
const OVER: Duration = ATTR_VALID_MAX.saturating_mul(2);
/// The same for names.
const NAMES_OVER: Duration = NAME_VALID_MAX.saturating_mul(3);

/// Whichever comes first calls it.
struct Once(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Once {
    fn call(&self) {
        let done = self.0.lock().take();
        if let Some(done) = done {
            done();
        }
    }
}

/// The kernel, once there is a mount, and the runtime on which its entries expire.
#[derive(Default)]
pub(super) struct Kernel {
    host: RwLock<Option<(Arc<dyn Host>, Handle)>>,
    /// What it was to forget and has not, when another process is to go on.
    left: Mutex<ToForget>,
    /// It is to forget all that it was told by a process that was killed.
    forgetting: Mutex<Option<oneshot::Receiver<()>>>,
}

impl Kernel {
    pub(super) fn attach(&self, host: Arc<dyn Host>, runtime: Handle) {
        *self.host.write() = Some((host, runtime));
    }

    pub(super) fn detach(&self) {
        *self.host.write() = None;
    }

    /// The kernel has not forgotten this, and another process is to go on.
    pub(super) fn left(&self, what: ToForget) {
        self.left.lock().append(what);
    }

    /// All of that.
    pub(super) fn take_left(&self) -> ToForget {
        std::mem::take(&mut *self.left.lock())
    }

    /// It is to forget all: a process was killed that knew that it knows these.
    pub(super) fn forget_all(&self, host: &dyn Host, known: Vec<Ino>) {
        let (tell, told) = oneshot::channel();
        *self.forgetting.lock() = Some(told);
        host.forget_all(known, Box::new(move || drop(tell)));
    }

    /// It has forgotten all, if it was to.
    pub(super) async fn all_forgotten(&self) {
        let forgetting = self.forgetting.lock().take();
        if let Some(forgetting) = forgetting {
            let _elapsed = crate::rt::time::timeout(NAMES_OVER, forgetting).await;
        }
    }

    /// The transport's counters.
    pub(super) fn stats(&self) -> Value {
        self.host.read().as_ref().map_or(Value::Null, |(host, _)| host.stats())
    }

    /// Whether it can be made to look a name up again.
    pub(super) fn forgets_names(&self) -> bool {
        self.host.read().as_ref().is_some_and(|(host, _)| host.forgets_names())
    }

    /// Calls `done` when the kernel has forgotten: soon; or it would have to wait for an operation
    /// that waits for others: when what it was told is over. No lock may be held.
    pub(super) fn forget(&self, what: ToForget, done: impl FnOnce() + Send + 'static) {
        let Some((host, runtime)) = self.host.read().clone() else { return done() };
        if what.names.is_empty() && what.removed.is_empty() {
            return forget(&host, &runtime, what, OVER, done);
        }
        let ToForget { inodes, .. } = what;
        let names = ToForget { inodes: Vec::new(), ..what };
        if inodes.is_empty() {
            return forget(&host, &runtime, names, NAMES_OVER, done);
        }
        let attributes = ToForget { inodes, ..ToForget::default() };
        let (then, on) = (Arc::clone(&host), runtime.clone());
        forget(&host, &runtime, attributes, OVER, move || {
            forget(&then, &on, names, NAMES_OVER, done)
        });
    }

    /// The same; the caller waits.
    pub(super) async fn forgotten(&self, what: ToForget) {
        let (tell, told) = oneshot::channel();
        self.forget(what, move || {
            let _nobody = tell.send(());
        });
        let _closed = told.await;
    }

    /// The same, where nobody waits for it.
    pub(super) fn forget_unasked(&self, what: ToForget) {
        if let Some((host, _)) = self.host.read().clone().filter(|_| what != ToForget::default()) {
            host.forget(what, Box::new(|| {}));
        }
    }
}

fn forget(
    host: &Arc<dyn Host>,
    runtime: &Handle,
    what: ToForget,
    over: Duration,
    done: impl FnOnce() + Send + 'static,
) {
    let once = Arc::new(Once(Mutex::new(Some(Box::new(done)))));
    let on_timeout = Arc::clone(&once);
    host.forget(what, Box::new(move || once.call()));
    runtime.spawn(async move {
        crate::rt::time::sleep(over).await;
        on_timeout.call();
    });
}
