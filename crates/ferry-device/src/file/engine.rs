//! The I/O thread of a file device: it alone issues asynchronous requests and completes them.
//!
//! Requests are handed to one thread and not put into the ring by their callers: the kernel ties an
//! io_uring request to the thread that issued it, cancels what is queued when that thread exits (a
//! flush that fails for such a reason would stop the volume), and interrupts the thread to complete
//! what it issued. A ring with a single issuer needs none of this and no lock. The hand-over is
//! cheap: the bell is rung only when the I/O thread sleeps, and what a completion submits needs no
//! bell at all.
//!
//! A caller is never made to wait for room in the ring (it might be a completion, on the I/O thread
//! itself). What does not fit waits in the inbox: its buffers exist already, so callers bound it by
//! what they hold.

use super::host::{HostFile, write_all};
use super::inbox::Shared;
use super::ring::{Ring, Turn};
use crate::device::Io;
use ferry_env::activity::{self, Layer, Operation};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// Handle to the I/O thread. Dropping it waits until every request has ended.
pub(super) struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the I/O thread of `host`, with io_uring if the kernel grants it and the host has
    /// `O_DIRECT`.
    pub fn start(host: Arc<HostFile>) -> io::Result<Self> {
        Self::start_with(host, true)
    }

    fn start_with(host: Arc<HostFile>, uring: bool) -> io::Result<Self> {
        // A flush of the host's page cache goes alone, and no later one succeeds if it fails: the
        // ring would issue it beside others.
        let uring = uring && host.cached.is_none();
        let shared = Arc::new(Shared {
            host,
            inbox: Mutex::default(),
            bell: File::from(eventfd(0, EventfdFlags::CLOEXEC)?),
        });
        let theirs = Arc::clone(&shared);
        let thread =
            thread::Builder::new().name("ferry-io".into()).spawn(move || run(&theirs, uring))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues a batch, in order.
    pub fn submit(&self, batch: Vec<Io>) {
        if batch.is_empty() {
            return;
        }
        let mut inbox = self.shared.inbox.lock();
        inbox.queue.extend(batch);
        let asleep = std::mem::replace(&mut inbox.asleep, false);
        drop(inbox);
        if asleep {
            self.shared.ring_bell();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.inbox.lock().closing = true;
        self.shared.ring_bell();
        let Some(thread) = self.thread.take() else { return };
        // A completion may hold the last handle of the device. The I/O thread cannot wait for
        // itself; it ends on its own once all is done, and keeps the file (and its lock) until
        // then.
        if thread.thread().id() != thread::current().id() {
            thread.join().expect("the I/O thread aborts the process rather than panic");
        }
    }
}

/// Ends the process if a completion panics: requests in flight still use buffers that unwinding
/// would free, and callers would wait for ever.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

thread_local! {
    static ON_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is the I/O thread of some device: it must not wait for anything that such a thread
/// completes.
pub(crate) fn on_io_thread() -> bool {
    ON_IO_THREAD.get()
}

fn run(shared: &Arc<Shared>, uring: bool) {
    ON_IO_THREAD.set(true);
    let _guard = AbortOnPanic;
    if uring {
        match Ring::new(Arc::clone(shared)) {
            Ok(mut ring) => {
                while ring.turn() == Turn::GoOn {}
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "no io_uring here: requests are executed one by one")
            }
        }
    }
    run_one_by_one(shared);
}

/// The way without io_uring (containers often forbid it) and through the host's page cache: the I/O
/// thread executes each request itself.
fn run_one_by_one(shared: &Shared) {
    let mut work = VecDeque::new();
    loop {
        let closing = shared.take_arrivals(&mut work);
        if work.is_empty() {
            if closing {
                return;
            }
            (&shared.bell).read_exact(&mut [0; 8]).expect("an eventfd gives 8 bytes");
        }
        shared.awake();
        let _doing = activity::begin(Operation::Completion);
        for io in work.drain(..) {
            match io {
                Io::Write { offset, buf, done } => {
                    let writing = activity::enter(Layer::DeviceWrite);
                    let result = write_all(&shared.host.file, offset, &buf);
                    drop(writing);
                    drop(buf);
                    done(result);
                }
                Io::Flush { done } => done(shared.host.flush()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
