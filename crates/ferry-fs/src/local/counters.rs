//! Inode numbers and the number of inodes.
//!
//! The counters' key says the newest of both in every context: it is put and committed under one
//! lock, so that commits happen in the order of the counts. Numbers are handed out without it: the
//! stored limit runs ahead of them. A number that anybody saw before a crash is not given to
//! another inode after it, for none is handed out that is not below a *durable* limit. That as many
//! operations make the limit durable does not follow: what is made and removed again leaves nothing
//! in the log, and a flush may take long. So a thread that is about to make an inode, and holds
//! nothing yet, looks how far the durable limit is and raises it where that is near; a thread that
//! reserves numbers does the same.

use crate::api::{Errno, Ino};
use crate::error::FsError;
use crate::keys::{self, Counters, INO_END};
use ferry_env::planted::{Bug, is_planted};
use ferry_journal::{Seq, Transaction};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far the stored limit runs ahead.
const AHEAD: u64 = 1 << 20;
/// Numbers that the durable limit is ahead, at least, when an operation begins that takes one: more
/// than there are such operations at a time.
const MARGIN: u64 = 1 << 16;

/// Commits a transaction with a higher limit.
pub(crate) type Commit<'c> = dyn FnMut(Transaction<'_>) -> Seq + 'c;

/// The volume's counters in memory.
pub(crate) struct VolumeCounters {
    first: Ino,
    next: AtomicU64,
    logged: Mutex<Counters>,
    /// A durable limit.
    durable: AtomicU64,
    /// Held while a higher one is made durable.
    raising: Mutex<()>,
    /// Reserved and not used: the first number of each range, and the one behind it.
    reserved: Mutex<BTreeMap<Ino, Ino>>,
}

impl VolumeCounters {
    pub(crate) fn new(stored: Counters) -> Self {
        Self {
            first: stored.next_ino,
            next: AtomicU64::new(stored.next_ino),
            logged: Mutex::new(stored),
            durable: AtomicU64::new(stored.next_ino),
            raising: Mutex::new(()),
            // Nobody knows what earlier mounts reserved; they handed out nothing behind this.
            reserved: Mutex::new(BTreeMap::from([(1, stored.next_ino)])),
        }
    }

    /// The first number that this mount hands out.
    pub(crate) fn first(&self) -> Ino {
        self.first
    }

    /// Commits the limit for a new mount: it must be durable before a number is handed out.
    pub(crate) fn commit_limit(&self, txn: Transaction<'_>) -> Seq {
        let (seq, limit) = self.commit_ahead(txn);
        // Nobody asks before the mount has waited for it.
        self.durable.store(limit, Ordering::SeqCst);
        seq
    }

    /// Commits a higher limit, and says which.
    fn commit_ahead(&self, mut txn: Transaction<'_>) -> (Seq, Ino) {
        let mut counters = self.logged.lock();
        counters.next_ino = counters.next_ino.max(self.next.load(Ordering::Relaxed)) + AHEAD;
        txn.put(&keys::counters(), &counters.encode());
        (txn.commit(), counters.next_ino)
    }

    /// A number that no inode ever had. The operation has asked [`VolumeCounters::is_short`] before
    /// it began.
    pub(crate) fn next_ino(&self) -> Ino {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// No number may be taken before [`VolumeCounters::raise`].
    pub(crate) fn is_short(&self) -> bool {
        self.next.load(Ordering::Relaxed) + MARGIN > self.durable.load(Ordering::Relaxed)
    }

    /// Makes a limit durable that is far ahead, unless another thread has. `make_durable` as for
    /// [`VolumeCounters::reserve`].
    pub(crate) fn raise(
        &self,
        make_durable: impl Fn(&mut Commit<'_>) -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        let _raising = self.raising.lock();
        while self.is_short() {
            self.raise_once(&make_durable)?;
        }
        Ok(())
    }

    /// The caller is the only one who raises.
    fn raise_once(
        &self,
        make_durable: &impl Fn(&mut Commit<'_>) -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        let mut limit = 0;
        make_durable(&mut |txn| {
            let (seq, committed) = self.commit_ahead(txn);
            limit = committed;
            seq
        })?;
        self.durable.store(limit, Ordering::SeqCst);
        Ok(())
    }

    /// Reserves `count` numbers, no more than a quarter of what the limit runs ahead.
    /// `make_durable` commits by the function that it is given, and waits.
    pub(crate) fn reserve(
        &self,
        count: u64,
        make_durable: impl Fn(&mut Commit<'_>) -> Result<(), FsError>,
    ) -> Result<Range<Ino>, FsError> {
        let _raising = self.raising.lock();
        if is_planted(Bug::UnraisedLimit) {
            self.durable.store(INO_END, Ordering::SeqCst);
        }
        loop {
            // Half of what it runs ahead stays for operations that take one number at a time, and
            // looks before.
            while self.next.load(Ordering::Relaxed) + count + AHEAD / 2
                > self.durable.load(Ordering::SeqCst)
            {
                self.raise_once(&make_durable)?;
            }
            let first = self.next.fetch_add(count, Ordering::Relaxed);
            let range = first..first + count;
            if range.end >= INO_END {
                return Err(Errno(libc::ENOSPC).into());
            }
            if range.end <= self.durable.load(Ordering::SeqCst) {
                self.reserved.lock().insert(range.start, range.end);
                return Ok(range);
            }
        }
    }

    /// Uses a number that was reserved; `false`: it was not, or it was used.
    pub(crate) fn use_number(&self, ino: Ino) -> bool {
        let mut reserved = self.reserved.lock();
        let Some((&start, &end)) = reserved.range(..=ino).next_back() else { return false };
        if ino >= end {
            return false;
        }
        reserved.remove(&start);
        if start < ino {
            reserved.insert(start, ino);
        }
        if ino + 1 < end {
            reserved.insert(ino + 1, end);
        }
        true
    }

    /// No number below this is handed out any more, once the limit was raised.
    pub(crate) fn skip_to(&self, ino: Ino) {
        self.next.fetch_max(ino, Ordering::SeqCst);
    }

    /// No number that was handed out is so high.
    pub(crate) fn limit(&self) -> Ino {
        self.logged.lock().next_ino
    }

    /// Nobody has so many inodes in a test: as if they had been made and removed.
    #[cfg(test)]
    pub(crate) fn skip_to_last(&self, left: u64) {
        self.next.store(self.durable.load(Ordering::SeqCst) - left, Ordering::SeqCst);
    }

    /// Inodes that exist.
    pub(crate) fn inodes(&self) -> u64 {
        self.logged.lock().inodes
    }

    /// Commits a transaction that makes one inode.
    pub(crate) fn commit_made(&self, mut txn: Transaction<'_>) -> Seq {
        let mut counters = self.logged.lock();
        counters.inodes = counters.inodes.saturating_add(1);
        if self.next.load(Ordering::Relaxed) + AHEAD / 2 > counters.next_ino {
            counters.next_ino += AHEAD;
        }
        txn.put(&keys::counters(), &counters.encode());
        txn.commit()
    }

    /// Puts into `txn` that one inode is gone. The guard is held until `txn` is committed.
    pub(crate) fn put_removed(&self, txn: &mut Transaction<'_>) -> MutexGuard<'_, Counters> {
        let mut counters = self.logged.lock();
        counters.inodes = counters.inodes.saturating_sub(1);
        txn.put(&keys::counters(), &counters.encode());
        counters
    }
}
