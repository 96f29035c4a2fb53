//! What a server asks of the volume: reserved inode numbers and space, and the records of sessions.

use crate::api::{Errno, Ino, ROOT, SessionSeq};
use crate::credits::SESSION_BYTES;
use crate::error::FsError;
use crate::keys::{self, INODE_HAS_XATTRS, Key, Number};
use crate::local::local_fs::{FsOptions, LocalFs};
use crate::session_store::{Needed, Reservation, SessionStore};
use crate::store::data_store::Busy;
use crate::volume::{VolumeError, write_timeline};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use ferry_journal::{Credits, Journal};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Inode numbers that are reserved at a time, at most.
const NUMBERS_MAX: u64 = 1 << 16;
/// No session has this number. The record under it holds the limit of inode numbers of the mount
/// that handed the volume over.
const HANDED_OVER: u128 = 0;
/// Sessions of which one transaction changes the records, at most.
const SESSIONS_MAX: usize = 64;

impl SessionStore for LocalFs {
    fn is_far(&self) -> bool {
        self.data.is_far()
    }

    fn read_ahead(&self, needed: Vec<Needed>) {
        needed.into_iter().for_each(|one| self.do_read_ahead(one));
    }

    fn is_surely_ours(&self) -> bool {
        self.dev.is_surely_ours()
    }

    fn ascertain_ours(&self) -> Result<(), Errno> {
        self.dev.ascertain_ours().map_err(|_| Errno(libc::EIO))
    }

    fn reserve_numbers(&self, count: u32) -> Result<Range<Ino>, Errno> {
        self.do_reserve_numbers(count)
            .map_err(|error| self.report("reserving numbers", ROOT, error))
    }

    fn reserve_space(&self, bytes: u64, inodes: u64) -> Result<Box<dyn Reservation>, Errno> {
        if self.options.read_only {
            Err(Errno(libc::EROFS))
        } else {
            self.data.reserve(bytes, inodes)
        }
    }

    fn add_session(&self, session: u128) -> Result<(), Errno> {
        self.do_add_session(session)
            .map_err(|error| self.report("recording a session", ROOT, error))
    }

    fn remove_session(&self, session: u128) {
        if let Err(error) = self.do_remove_session(session) {
            self.report("removing a session's record", ROOT, error);
        }
    }

    fn revoke_sessions(&self, sessions: &[u128]) {
        if let Err(error) = self.do_revoke_sessions(sessions) {
            self.report("revoking sessions", ROOT, error);
        }
    }

    fn sessions(&self) -> Result<Vec<u128>, Errno> {
        self.do_sessions().map_err(|error| self.report("listing sessions", ROOT, error))
    }

    fn last_applied(&self, session: u128) -> Result<Option<u64>, Errno> {
        self.do_last_applied(session)
            .map_err(|error| self.report("reading a session's record", ROOT, error))
    }

    fn sync_sessions(&self, upto: &[SessionSeq]) -> Result<(), Errno> {
        self.do_sync_sessions(upto).map_err(|error| self.not_durable("sync", ROOT, error))
    }

    fn durable_watermark(&self, session: u128) -> Result<u64, Errno> {
        let watermark = self.do_durable_watermark(session);
        watermark.map_err(|error| self.report("reading a session's record", ROOT, error))
    }

    fn add_lock_holder(&self, session: u128) -> Result<(), Errno> {
        self.do_add_lock_holder(session)
            .map_err(|error| self.report("recording a lock holder", ROOT, error))
    }

    fn lock_holders(&self) -> Result<Vec<u128>, Errno> {
        self.do_lock_holders().map_err(|error| self.report("listing lock holders", ROOT, error))
    }

    fn remove_lock_holders(&self, sessions: &[u128]) -> Result<(), Errno> {
        self.do_remove_lock_holders(sessions)
            .map_err(|error| self.report("removing lock holders", ROOT, error))
    }

    fn evict(&self, sessions: &[SessionSeq], forgotten: &[u128]) -> Result<(), Errno> {
        self.do_evict(sessions, forgotten)
            .map_err(|error| self.report("recording an eviction", ROOT, error))
    }

    fn evicted(&self) -> Result<Vec<SessionSeq>, Errno> {
        self.do_evicted().map_err(|error| self.report("listing evictions", ROOT, error))
    }

    fn is_plain(&self, ino: Ino) -> Result<bool, Errno> {
        self.do_is_plain(ino).map_err(|error| self.report("is_plain", ino, error))
    }

    fn keep_removed(&self) {
        self.keeping_removed.store(true, Ordering::Release);
    }

    fn reclaim_removed(&self) {
        self.reclaim_leftovers();
    }

    fn hand_over(&self) -> Result<(), Errno> {
        self.do_hand_over().map_err(|error| self.report("handing over", ROOT, error))
    }

    fn was_handed_over(&self) -> bool {
        self.was_handed_over
    }
}

impl LocalFs {
    fn do_reserve_numbers(&self, count: u32) -> Result<Range<Ino>, FsError> {
        self.writable()?;
        let count = u64::from(count).clamp(1, NUMBERS_MAX);
        self.counters.reserve(count, |commit| self.limit_made_durable(commit))
    }

    fn do_add_session(&self, session: u128) -> Result<(), FsError> {
        self.writable()?;
        if self.do_last_applied(session)?.is_some() {
            return Ok(());
        }
        let mut txn =
            self.journal.begin(Credits { keys: 1, bytes: SESSION_BYTES, urgent: false })?;
        txn.put(&keys::mark(session), &Number(0).encode());
        self.force(txn.commit())
    }

    fn do_last_applied(&self, session: u128) -> Result<Option<u64>, FsError> {
        self.number_at(&keys::mark(session))
    }

    fn do_durable_watermark(&self, session: u128) -> Result<u64, FsError> {
        Ok(self.number_at(&keys::synced(session))?.unwrap_or(0))
    }

    fn number_at(&self, key: &[u8]) -> Result<Option<u64>, FsError> {
        let stored = self.journal.get(key)?;
        Ok(stored.map(|value| Number::decode(&value)).transpose()?.map(|number| number.0))
    }

    /// The watermarks are committed after everything that they cover, so they come later in the
    /// log.
    fn do_sync_sessions(&self, upto: &[SessionSeq]) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        if is_planted(Bug::EarlyWatermark) {
            let mut early = self.journal.begin(Credits {
                keys: 64,
                bytes: 64 * SESSION_BYTES,
                urgent: false,
            })?;
            upto.iter()
                .for_each(|at| early.put(&keys::synced(at.session), &Number(at.seq).encode()));
            self.force(early.commit())?;
        }
        let mut seq = self.commit_everything(Busy::Wait)?;
        for some in upto.chunks(SESSIONS_MAX) {
            let keys = some.len() as u32;
            let mut txn =
                self.journal.begin(Credits { keys, bytes: keys * SESSION_BYTES, urgent: false })?;
            // A session that is removed meanwhile leaves no watermark.
            let _marking = self.marking.lock();
            for SessionSeq { session, seq } in some {
                if self.do_last_applied(*session)?.is_some() {
                    txn.put(&keys::synced(*session), &Number(*seq).encode());
                }
            }
            seq = seq.max(txn.commit());
        }
        self.force(seq)
    }

    fn do_sessions(&self) -> Result<Vec<u128>, FsError> {
        let mut sessions = Vec::new();
        self.journal.scan(&keys::mark(HANDED_OVER + 1), &keys::mark_end(), &mut |key, _| {
            if let Some(Key::Mark(session)) = keys::parse(key) {
                sessions.push(session);
            }
            true
        })?;
        Ok(sessions)
    }

    fn do_remove_session(&self, session: u128) -> Result<(), FsError> {
        let both = [keys::mark(session), keys::synced(session)];
        if self.options.read_only
            || self.number_at(&both[0])?.or(self.number_at(&both[1])?).is_none()
        {
            return Ok(());
        }
        let mut txn =
            self.journal.begin(Credits { keys: 2, bytes: 2 * SESSION_BYTES, urgent: true })?;
        let _marking = self.marking.lock();
        both.iter().for_each(|key| txn.delete(key));
        txn.commit();
        Ok(())
    }

    fn do_revoke_sessions(&self, sessions: &[u128]) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        let mut newest = None;
        for some in sessions.chunks(SESSIONS_MAX) {
            let keys = 2 * some.len() as u32;
            let mut txn =
                self.journal.begin(Credits { keys, bytes: keys * SESSION_BYTES, urgent: true })?;
            let _marking = self.marking.lock();
            for session in some {
                [keys::mark(*session), keys::synced(*session)]
                    .iter()
                    .for_each(|key| txn.delete(key));
            }
            newest = newest.max(Some(txn.commit()));
        }
        newest.map_or(Ok(()), |seq| self.force(seq))
    }

    fn do_add_lock_holder(&self, session: u128) -> Result<(), FsError> {
        if self.writable().is_err() {
            return Ok(());
        }
        let mut txn =
            self.journal.begin(Credits { keys: 1, bytes: SESSION_BYTES, urgent: false })?;
        txn.put(&keys::locker(session), &Number(0).encode());
        self.force(txn.commit())
    }

    fn do_lock_holders(&self) -> Result<Vec<u128>, FsError> {
        let mut sessions = Vec::new();
        self.journal.scan(&keys::locker(0), &keys::locker_end(), &mut |key, _| {
            if let Some(Key::Locker(session)) = keys::parse(key) {
                sessions.push(session);
            }
            true
        })?;
        Ok(sessions)
    }

    fn do_remove_lock_holders(&self, sessions: &[u128]) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        for some in sessions.chunks(SESSIONS_MAX) {
            let keys = some.len() as u32;
            let mut txn =
                self.journal.begin(Credits { keys, bytes: keys * SESSION_BYTES, urgent: true })?;
            some.iter().for_each(|session| txn.delete(&keys::locker(*session)));
            self.force(txn.commit())?;
        }
        Ok(())
    }

    fn do_evict(&self, sessions: &[SessionSeq], forgotten: &[u128]) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        let mut newest = None;
        for some in sessions.chunks(SESSIONS_MAX) {
            let keys = 3 * some.len() as u32;
            let mut txn =
                self.journal.begin(Credits { keys, bytes: keys * SESSION_BYTES, urgent: true })?;
            let _marking = self.marking.lock();
            for SessionSeq { session, seq } in some {
                txn.put(&keys::evicted(*session), &Number(*seq).encode());
                [keys::mark(*session), keys::synced(*session)]
                    .iter()
                    .for_each(|key| txn.delete(key));
            }
            newest = newest.max(Some(txn.commit()));
        }
        for some in forgotten.chunks(SESSIONS_MAX) {
            let keys = some.len() as u32;
            let mut txn =
                self.journal.begin(Credits { keys, bytes: keys * SESSION_BYTES, urgent: true })?;
            some.iter().for_each(|session| txn.delete(&keys::evicted(*session)));
            newest = newest.max(Some(txn.commit()));
        }
        newest.map_or(Ok(()), |seq| self.force(seq))
    }

    fn do_evicted(&self) -> Result<Vec<SessionSeq>, FsError> {
        let mut evicted = Vec::new();
        self.journal.scan(&keys::evicted(0), &keys::evicted_end(), &mut |key, value| {
            // A session whose number cannot be read counts as evicted, too.
            if let Some(Key::Evicted(session)) = keys::parse(key) {
                let seq = Number::decode(value).map_or(0, |number| number.0);
                evicted.push(SessionSeq { session, seq });
            }
            true
        })?;
        evicted.sort_unstable_by_key(|at| at.seq);
        Ok(evicted)
    }

    /// Every later mount durably raises the limit of inode numbers before it does anything. So the
    /// record is true until then and no longer.
    fn do_hand_over(&self) -> Result<(), FsError> {
        if self.options.read_only {
            return Ok(());
        }
        let mut txn =
            self.journal.begin(Credits { keys: 1, bytes: SESSION_BYTES, urgent: true })?;
        txn.put(&keys::mark(HANDED_OVER), &Number(self.counters.limit()).encode());
        self.force(txn.commit())
    }

    fn do_is_plain(&self, ino: Ino) -> Result<bool, FsError> {
        let flags = self.table.need(ino)?.state.read().rec.flags;
        Ok(flags & INODE_HAS_XATTRS == 0)
    }
}

/// More numbers than a volume gives before somebody notices that it is another one.
const NUMBERS_SKIPPED: u64 = 1 << 32;

/// The inode numbers that a volume has given in other timelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// None but those below this limit.
    Below(Ino),
    /// Those below this limit, and others, which nobody knows.
    Also(Ino),
}

impl LocalFs {
    /// The limit of the inode numbers that the volume on `dev`, which is only read, has given.
    pub fn limit_of_numbers(dev: &Arc<dyn BlockDevice>, env: &Env) -> Result<Ino, VolumeError> {
        let options = FsOptions { read_only: true, ..FsOptions::default() };
        let fs = Self::open(Arc::clone(dev), options, env.clone())?;
        let limit = fs.counters.limit();
        fs.close()?;
        Ok(limit)
    }

    /// The volume on `dev`, which nobody has open, was rolled back, or is a clone or the copy of a
    /// snapshot: it goes on in a timeline of its own. Nothing is believed of what clients were told
    /// before, they replay nothing, and no inode number is given that was `given`: another file may
    /// have it there.
    pub fn begin_timeline(
        dev: &Arc<dyn BlockDevice>,
        given: Given,
        env: &Env,
    ) -> Result<(), VolumeError> {
        let options = FsOptions { background: false, ..FsOptions::default() };
        let fs = Self::open(Arc::clone(dev), options, env.clone())?;
        let left = fs.leave_timeline(given);
        let closed = fs.close();
        left?;
        closed?;
        write_timeline(dev, env)
    }

    /// Opening the volume has raised its limit, so no server's handing over counts any more.
    fn leave_timeline(&self, given: Given) -> Result<(), FsError> {
        self.do_revoke_sessions(&self.do_sessions()?)?;
        self.do_remove_lock_holders(&self.do_lock_holders()?)?;
        let limit = self.counters.limit();
        // The second sum is the same for each return to one snapshot.
        self.counters.skip_to(match given {
            Given::Below(given) => limit.max(given),
            Given::Also(given) => (limit + NUMBERS_SKIPPED).max(given),
        });
        self.counters.raise(|commit| self.limit_made_durable(commit))
    }
}

/// Whether no server's sessions can be left: nobody has raised the limit of a new volume, or the
/// mount that raised it to this has handed the volume over. No, if the record cannot be read.
pub(crate) fn was_handed_over(journal: &Journal, limit: Ino) -> bool {
    if limit == keys::INO_FIRST {
        return true;
    }
    let said = journal.get(&keys::mark(HANDED_OVER)).ok().flatten();
    said.is_some_and(|value| Number::decode(&value) == Ok(Number(limit)))
}
