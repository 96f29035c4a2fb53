//! Inode numbers and the number of inodes.
//!
//! The counters' key says the newest of both in every context: it is put and committed under one lock, so that commits
//! happen in the order of the counts. Numbers are handed out without it: the stored limit runs ahead of them. It is made
//! durable at the mount and raised when half of what it allows is used, by operations that the log cannot hold as many of
//! before it becomes durable; so a number that anybody saw before a crash is not given to another inode after it.

use crate::api::Ino;
use crate::keys::{self, Counters};
use ferry_journal::{Seq, Transaction};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicU64, Ordering};

/// How far the stored limit runs ahead.
const AHEAD: u64 = 1 << 20;

/// The volume's counters in memory.
pub(super) struct VolumeCounters {
    next: AtomicU64,
    logged: Mutex<Counters>,
}

impl VolumeCounters {
    pub(super) fn new(stored: Counters) -> Self {
        Self { next: AtomicU64::new(stored.next_ino), logged: Mutex::new(stored) }
    }

    /// Commits the limit for a new mount: it must be durable before a number is handed out.
    pub(super) fn commit_limit(&self, mut txn: Transaction<'_>) -> Seq {
        let mut counters = self.logged.lock();
        counters.next_ino += AHEAD;
        txn.put(&keys::counters(), &counters.encode());
        txn.commit()
    }

    /// A number that no inode ever had.
    pub(super) fn next_ino(&self) -> Ino {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Inodes that exist.
    pub(super) fn inodes(&self) -> u64 {
        self.logged.lock().inodes
    }

    /// Commits a transaction that makes one inode.
    pub(super) fn commit_made(&self, mut txn: Transaction<'_>) -> Seq {
        let mut counters = self.logged.lock();
        counters.inodes += 1;
        if self.next.load(Ordering::Relaxed) + AHEAD / 2 > counters.next_ino {
            counters.next_ino += AHEAD;
        }
        txn.put(&keys::counters(), &counters.encode());
        txn.commit()
    }

    /// Puts into `txn` that one inode is gone. The guard is held until `txn` is committed.
    pub(super) fn put_gone(&self, txn: &mut Transaction<'_>) -> MutexGuard<'_, Counters> {
        let mut counters = self.logged.lock();
        counters.inodes = counters.inodes.saturating_sub(1);
        txn.put(&keys::counters(), &counters.encode());
        counters
    }
}
