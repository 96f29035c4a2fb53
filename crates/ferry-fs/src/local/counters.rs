//! Inode numbers and the number of inodes.
//!
//! The counters' key says the newest of both in every context: it is put and committed under one lock, so that commits
//! happen in the order of the counts. Numbers are handed out without it: the stored limit runs ahead of them. It is made
//! durable at the mount and raised when half of what it allows is used, by operations that the log cannot hold as many of
//! before it becomes durable; so a number that anybody saw before a crash is not given to another inode after it.
//! Who sets numbers aside needs no operations for that: it waits until a limit so far ahead is durable.

use crate::api::{Errno, Ino};
use crate::error::FsError;
use crate::keys::{self, Counters, INO_END};
use ferry_journal::{Seq, Transaction};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far the stored limit runs ahead.
const AHEAD: u64 = 1 << 20;

/// The volume's counters in memory.
pub(super) struct VolumeCounters {
    first: Ino,
    next: AtomicU64,
    logged: Mutex<Counters>,
    /// A durable limit. The lock is held while a higher one is made durable.
    durable: Mutex<Ino>,
    /// Set aside and not used: the first number of each range, and the one behind it.
    aside: Mutex<BTreeMap<Ino, Ino>>,
}

impl VolumeCounters {
    pub(super) fn new(stored: Counters) -> Self {
        Self {
            first: stored.next_ino,
            next: AtomicU64::new(stored.next_ino),
            logged: Mutex::new(stored),
            durable: Mutex::new(stored.next_ino),
            // What earlier mounts set aside nobody knows; they handed out nothing behind this.
            aside: Mutex::new(BTreeMap::from([(1, stored.next_ino)])),
        }
    }

    /// The first number that this mount hands out.
    pub(super) fn first(&self) -> Ino {
        self.first
    }

    /// Commits the limit for a new mount: it must be durable before a number is handed out.
    pub(super) fn commit_limit(&self, txn: Transaction<'_>) -> Seq {
        let (seq, limit) = self.commit_ahead(txn);
        // Nobody asks before the mount has waited for it.
        *self.durable.lock() = limit;
        seq
    }

    /// Commits a higher limit, and says which.
    fn commit_ahead(&self, mut txn: Transaction<'_>) -> (Seq, Ino) {
        let mut counters = self.logged.lock();
        counters.next_ino = counters.next_ino.max(self.next.load(Ordering::Relaxed)) + AHEAD;
        txn.put(&keys::counters(), &counters.encode());
        (txn.commit(), counters.next_ino)
    }

    /// A number that no inode ever had.
    pub(super) fn next_ino(&self) -> Ino {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sets `count` numbers aside, no more than a quarter of what the limit runs ahead. `make_durable` commits by the function that it is given, and waits.
    pub(super) fn set_aside(
        &self,
        count: u64,
        make_durable: impl Fn(&mut dyn FnMut(Transaction<'_>) -> Seq) -> Result<(), FsError>,
    ) -> Result<Range<Ino>, FsError> {
        let mut durable = self.durable.lock();
        #[cfg(feature = "planted")]
        if ferry_journal::planted::is(ferry_journal::planted::Bug::UnraisedLimit) {
            *durable = INO_END;
        }
        loop {
            // Half of what it runs ahead stays for who hands out numbers without looking at it.
            while self.next.load(Ordering::Relaxed) + count + AHEAD / 2 > *durable {
                let mut limit = 0;
                make_durable(&mut |txn| {
                    let (seq, committed) = self.commit_ahead(txn);
                    limit = committed;
                    seq
                })?;
                *durable = limit;
            }
            let first = self.next.fetch_add(count, Ordering::Relaxed);
            let range = first..first + count;
            if range.end >= INO_END {
                return Err(Errno(libc::ENOSPC).into());
            }
            if range.end <= *durable {
                self.aside.lock().insert(range.start, range.end);
                return Ok(range);
            }
        }
    }

    /// Uses a number that was set aside; `false`: it was not, or it was used.
    pub(super) fn use_number(&self, ino: Ino) -> bool {
        let mut aside = self.aside.lock();
        let Some((&start, &end)) = aside.range(..=ino).next_back() else { return false };
        if ino >= end {
            return false;
        }
        aside.remove(&start);
        if start < ino {
            aside.insert(start, ino);
        }
        if ino + 1 < end {
            aside.insert(ino + 1, end);
        }
        true
    }

    /// No number that was handed out is so high.
    pub(super) fn limit(&self) -> Ino {
        self.logged.lock().next_ino
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
