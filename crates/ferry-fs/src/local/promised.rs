//! Changes that were answered before they came here, by a client of the server: what each was promised is kept to the letter.
//!
//! * Its time is the one that its maker was shown.
//! * The inode that it makes has the number that its maker was told, one of those that were set aside for it.
//! * Its *mark* is put into the transaction that makes it, so whoever finds the mark after a crash finds the change too, and all that the
//!   session changed before it.
//! * Its space was set aside (`data/aside.rs`).

use super::{LocalFs, errno};
use crate::api::{Aside, AsideId, Cx, Errno, Ino, Mark, Promise, Timestamp};
use crate::data::Busy;
use crate::error::FsError;
use crate::keys::{self, INODE_HAS_XATTRS, Key, Number};
use ferry_journal::{Credits, Journal, Transaction};
use std::ops::Range;

/// Numbers that are set aside at a time, at most.
const NUMBERS_MAX: u64 = 1 << 16;
/// No session has this number. Its mark is the limit of inode numbers of the mount that handed the volume over.
const HANDED_OVER: u128 = 0;
/// A mark's key and value, in bytes.
const MARK_BYTES: u32 = 32;
/// Sessions of which one transaction says how far they are durable.
const MARKS_MAX: usize = 64;

/// What a transaction takes that stores a mark, too.
pub(super) const fn with_mark(Credits { keys, bytes, urgent }: Credits) -> Credits {
    Credits { keys: keys + 1, bytes: bytes + MARK_BYTES, urgent }
}

/// How a change is made.
#[derive(Clone, Copy)]
pub(super) struct How {
    /// Whether it may wait.
    pub(super) busy: Busy,
    promise: Option<Promise>,
}

impl How {
    /// By who may wait.
    pub(super) fn waiting(promise: Option<Promise>) -> Self {
        Self { busy: Busy::Wait, promise }
    }

    /// As nobody was told before.
    pub(super) fn unpromised(busy: Busy) -> Self {
        Self { busy, promise: None }
    }

    /// A step of it, and not the last.
    pub(super) fn without_mark(self) -> Self {
        Self { promise: self.promise.map(|promise| Promise { mark: None, ..promise }), ..self }
    }

    /// Where it takes its space from.
    pub(super) fn aside(self) -> Option<AsideId> {
        self.promise?.aside
    }
}

impl LocalFs {
    /// How a request's change is made. One that was promised has a thread that may wait: nothing is taken for it twice.
    pub(super) fn how(&self, cx: &Cx) -> How {
        let busy = if cx.promise.is_some() { Busy::Wait } else { self.patience(cx) };
        How { busy, promise: cx.promise }
    }

    /// The time of a change.
    pub(super) fn time(&self, how: How) -> Timestamp {
        how.promise.map_or_else(|| self.now(), |promise| promise.at)
    }

    /// Begins the transaction that makes a change: its last, where it takes several. Where it would have to wait for log space,
    /// [`FsError::WouldWait`] if the caller must not.
    pub(super) fn begin(&self, how: How, credits: Credits) -> Result<Transaction<'_>, FsError> {
        let begin = |credits| match how.busy {
            Busy::Refuse => self.journal.try_begin(credits)?.ok_or(FsError::WouldWait),
            Busy::Wait | Busy::Skip => Ok(self.journal.begin(credits)?),
        };
        let Some(mark) = how.promise.and_then(|promise| promise.mark) else { return begin(credits) };
        #[cfg(feature = "planted")]
        if ferry_journal::planted::is(ferry_journal::planted::Bug::EarlyMark) {
            let mut early = self.journal.begin(Credits { keys: 1, bytes: MARK_BYTES, urgent: false })?;
            early.put(&keys::mark(mark.session), &Number(mark.seq).encode());
            self.force(early.commit())?;
            return begin(credits);
        }
        let mut txn = begin(with_mark(credits))?;
        txn.put(&keys::mark(mark.session), &Number(mark.seq).encode());
        Ok(txn)
    }

    /// Refuses what adds to the metadata when there is no room, and none set aside for it. `target`: bytes of a symbolic link's target.
    pub(super) fn admit(&self, how: How, target: usize) -> Result<(), FsError> {
        self.data.admit(how.busy, how.aside(), target)
    }

    /// The number of a new inode. Nothing may fail after it.
    pub(super) fn number_for(&self, promise: Option<Promise>) -> Result<Ino, FsError> {
        let Some(ino) = promise.and_then(|promise| promise.ino) else { return Ok(self.counters.next_ino()) };
        // Numbers of an earlier mount were set aside by it or used by it.
        let is_new = || Ok::<_, FsError>(ino >= self.counters.first() || self.table.get(ino)?.is_none());
        if is_new()? && self.counters.use_number(ino) { Ok(ino) } else { Err(errno(libc::EEXIST)) }
    }

    pub(super) fn do_numbers(&self, count: u32) -> Result<Range<Ino>, FsError> {
        self.writable()?;
        let count = u64::from(count).clamp(1, NUMBERS_MAX);
        self.counters.set_aside(count, |commit| {
            let seq = commit(self.journal.begin(Credits { keys: 1, bytes: 64, urgent: false })?);
            self.force(seq)
        })
    }

    pub(super) fn do_enlist(&self, session: u128) -> Result<(), FsError> {
        self.writable()?;
        if self.do_mark(session)?.is_some() {
            return Ok(());
        }
        let mut txn = self.journal.begin(Credits { keys: 1, bytes: MARK_BYTES, urgent: false })?;
        txn.put(&keys::mark(session), &Number(0).encode());
        self.force(txn.commit())
    }

    pub(super) fn do_mark(&self, session: u128) -> Result<Option<u64>, FsError> {
        self.number_at(&keys::mark(session))
    }

    pub(super) fn do_synced(&self, session: u128) -> Result<u64, FsError> {
        Ok(self.number_at(&keys::synced(session))?.unwrap_or(0))
    }

    fn number_at(&self, key: &[u8]) -> Result<Option<u64>, FsError> {
        let stored = self.journal.get(key)?;
        Ok(stored.map(|value| Number::decode(&value)).transpose()?.map(|number| number.0))
    }

    /// The word stands behind all that it tells of, in the log, too.
    pub(super) fn do_sync_sessions(&self, upto: &[Mark]) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        #[cfg(feature = "planted")]
        if ferry_journal::planted::is(ferry_journal::planted::Bug::EarlySynced) {
            let mut early =
                self.journal.begin(Credits { keys: 64, bytes: 64 * MARK_BYTES, urgent: false })?;
            upto.iter().for_each(|mark| early.put(&keys::synced(mark.session), &Number(mark.seq).encode()));
            self.force(early.commit())?;
        }
        let mut seq = self.commit_everything(Busy::Wait)?;
        for some in upto.chunks(MARKS_MAX) {
            let keys = some.len() as u32;
            let mut txn = self.journal.begin(Credits { keys, bytes: keys * MARK_BYTES, urgent: false })?;
            // A mark that is removed meanwhile leaves no word behind.
            let _marking = self.marking.lock();
            for Mark { session, seq } in some {
                if self.do_mark(*session)?.is_some() {
                    txn.put(&keys::synced(*session), &Number(*seq).encode());
                }
            }
            seq = seq.max(txn.commit());
        }
        self.force(seq)
    }

    pub(super) fn do_marked(&self) -> Result<Vec<u128>, FsError> {
        let mut sessions = Vec::new();
        self.journal.scan(&keys::mark(HANDED_OVER + 1), &keys::mark_end(), &mut |key, _| {
            if let Some(Key::Mark(session)) = keys::parse(key) {
                sessions.push(session);
            }
            true
        })?;
        Ok(sessions)
    }

    pub(super) fn do_unmark(&self, session: u128) -> Result<(), FsError> {
        let both = [keys::mark(session), keys::synced(session)];
        if self.options.read_only || self.number_at(&both[0])?.or(self.number_at(&both[1])?).is_none() {
            return Ok(());
        }
        let mut txn = self.journal.begin(Credits { keys: 2, bytes: 2 * MARK_BYTES, urgent: true })?;
        let _marking = self.marking.lock();
        both.iter().for_each(|key| txn.delete(key));
        txn.commit();
        Ok(())
    }

    /// The limit of inode numbers is durably raised by every later mount before it does anything: this is true only until then.
    pub(super) fn do_hand_over(&self) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        let mut txn = self.journal.begin(Credits { keys: 1, bytes: MARK_BYTES, urgent: true })?;
        txn.put(&keys::mark(HANDED_OVER), &Number(self.counters.limit()).encode());
        self.force(txn.commit())
    }

    pub(super) fn do_is_plain(&self, ino: Ino) -> Result<bool, FsError> {
        let flags = self.table.need(ino)?.state.read().rec.flags;
        Ok(flags & INODE_HAS_XATTRS == 0)
    }

    pub(super) fn do_set_aside(&self, bytes: u64, inodes: u64) -> Result<Aside, Errno> {
        if self.options.read_only { Err(Errno(libc::EROFS)) } else { self.data.set_aside(bytes, inodes) }
    }
}

/// Whether the one who raised the limit to this has handed the volume over. What cannot be read says no.
pub(super) fn was_handed_over(journal: &Journal, limit: Ino) -> bool {
    let said = journal.get(&keys::mark(HANDED_OVER)).ok().flatten();
    said.is_some_and(|value| Number::decode(&value) == Ok(Number(limit)))
}
