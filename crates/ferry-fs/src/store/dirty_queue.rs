//! The write-back queue: inodes that the journal is behind on, the longest waiting first.

use crate::inode::incore::Inode;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[derive(Default)]
struct State {
    last: u64,
    waiting: BTreeMap<u64, (Arc<Inode>, Duration)>,
}

/// Inodes with something to write back. It keeps them in memory.
#[derive(Default)]
pub struct Queue(Mutex<State>);

impl Queue {
    /// `inode` has something to write back since `now`, if not since longer. Tells whether it is
    /// new here.
    pub fn enter(&self, inode: &Arc<Inode>, now: impl FnOnce() -> Duration) -> bool {
        if inode.file.ticket.load(Ordering::Acquire) != 0 {
            return false;
        }
        let mut state = self.0.lock();
        if inode.file.ticket.load(Ordering::Acquire) != 0 {
            return false;
        }
        state.last += 1;
        let ticket = state.last;
        inode.file.ticket.store(ticket, Ordering::Release);
        state.waiting.insert(ticket, (Arc::clone(inode), now()));
        true
    }

    /// `inode` has nothing to write back. The caller holds its inode lock, as everybody does who
    /// lets it enter.
    pub fn leave(&self, inode: &Inode) {
        let ticket = inode.file.ticket.load(Ordering::Acquire);
        if ticket != 0 {
            let mut state = self.0.lock();
            let ticket = inode.file.ticket.swap(0, Ordering::AcqRel);
            let gone = state.waiting.remove(&ticket);
            drop(state);
            drop(gone); // perhaps the last reference: never under the lock
        }
    }

    /// Up to `most` inodes that wait behind place `after` and since `since` or longer, in order.
    pub fn waiting(&self, after: u64, since: Duration, most: usize) -> Vec<(u64, Arc<Inode>)> {
        let state = self.0.lock();
        let due = state.waiting.range(after + 1..).take_while(|(_, (_, from))| *from <= since);
        due.take(most).map(|(ticket, (inode, _))| (*ticket, Arc::clone(inode))).collect()
    }

    /// The newest place given out.
    pub fn newest(&self) -> u64 {
        self.0.lock().last
    }

    /// Since when the first one waits.
    pub fn oldest(&self) -> Option<Duration> {
        self.0.lock().waiting.first_key_value().map(|(_, (_, since))| *since)
    }

    /// Inodes that wait.
    pub fn len(&self) -> usize {
        self.0.lock().waiting.len()
    }
}
