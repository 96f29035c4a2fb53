//! The queue of inodes without a name that are to be reclaimed in the background, and its thread.

use crate::api::Ino;
use crate::inode::incore::Inode;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;

/// So many inodes wait for the background; beyond that the caller does the work.
const QUEUE_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct Queue {
    /// Left over from before the mount, or removed while somebody may still know what is.
    pub(crate) leftovers: BTreeSet<Ino>,
    /// Somebody may still know them.
    pub(crate) held: bool,
    /// Removed since.
    pub(crate) removed: VecDeque<Arc<Inode>>,
    /// The kernel has forgotten these, and they may have no name.
    pub(crate) forgotten: VecDeque<Arc<Inode>>,
    pub(crate) stop: bool,
}

impl Queue {
    /// What is to be reclaimed next, if there is anything.
    pub(crate) fn take(&mut self) -> Option<Job> {
        if let Some(inode) = self.removed.pop_front() {
            return Some(Job::Removed(inode));
        }
        if let Some(inode) = self.forgotten.pop_front() {
            return Some(Job::Forgotten(inode));
        }
        let ino = if self.held { None } else { self.leftovers.pop_first() };
        ino.map(|ino| Job::Leftover(ino, self.leftovers.len()))
    }
}

pub(crate) enum Job {
    Leftover(Ino, usize),
    Removed(Arc<Inode>),
    Forgotten(Arc<Inode>),
}

/// The background's queue and thread.
#[derive(Default)]
pub(crate) struct Reclaimer {
    pub(crate) queue: Mutex<Queue>,
    pub(crate) wake: Condvar,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reclaimer {
    /// The next inode to reclaim; waits for one. `None`: the volume is being closed.
    pub(crate) fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(job) = queue.take() {
                return Some(job);
            }
            self.wake.wait(&mut queue);
        }
    }

    /// Hands an inode over; `false`: the caller must reclaim it.
    pub(crate) fn hand_over(&self, inode: &Arc<Inode>) -> bool {
        let mut queue = self.queue.lock();
        if queue.stop || queue.removed.len() >= QUEUE_MAX {
            return false;
        }
        queue.removed.push_back(inode.clone());
        self.wake.notify_one();
        true
    }

    /// The thread reclaims an inode if it has no name and nobody knows it. Whatever the number of
    /// those that wait: the caller has no time for any.
    pub(crate) fn look_at(&self, inode: &Arc<Inode>) {
        self.queue.lock().forgotten.push_back(inode.clone());
        self.wake.notify_one();
    }

    /// Stops the thread; what is queued stays for the next mount.
    pub(crate) fn stop(&self) {
        self.queue.lock().stop = true;
        self.wake.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let ended = thread.join();
            if ended.is_err() {
                tracing::error!("the reclaiming thread panicked");
            }
        }
    }

    /// Whether a client that is not back yet may know inodes without a name.
    pub(crate) fn holds(&self) -> bool {
        self.queue.lock().held
    }

    /// An inode has lost its last name, and nobody knows it; `true`: a client that is not back yet
    /// may, so it is left over, too.
    pub(crate) fn takes_in(&self, ino: Ino) -> bool {
        let mut queue = self.queue.lock();
        if queue.held {
            queue.leftovers.insert(ino);
        }
        queue.held
    }

    pub(crate) fn waiting(&self) -> usize {
        let queue = self.queue.lock();
        queue.leftovers.len() + queue.removed.len() + queue.forgotten.len()
    }
}
