//! The inode lock, and the times that are noted beside it.
//!
//! Reads change the access time and writes that share the lock the others; neither may take the
//! lock exclusively for that. They leave the time in an atomic; a thread that takes the lock to
//! look at attributes or to change them brings them in line first.

use crate::api::{Ino, Timestamp};
use crate::error::FsError;
use crate::inode::state::InodeState;
use crate::order::{Guard, Rank};
use crate::patience;
use ferry_env::activity::{self, Layer};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

/// A write moves a time that nobody has looked at by no less than this: 1 ms.
const STEP_NANOS: i64 = 1_000_000;
/// An access time older than this is renewed by the next read, even if nothing changed since.
const RELATIME_NANOS: i64 = 24 * 60 * 60 * 1_000_000_000;

/// A thread that does not wait for the store has the lock for less than this, mostly.
const BRIEFLY: Duration = Duration::from_micros(500);

/// *The inode lock*, and what it protects.
pub struct StateLock {
    ino: Ino,
    state: RwLock<InodeState>,
    /// When the file was last written under the shared lock; 0: not since the times were brought in
    /// line. In nanoseconds, as the next two.
    written: AtomicI64,
    /// When it was last read, where that moves the access time; 0: as `written`.
    accessed: AtomicI64,
    /// Up to this time a read moves nothing, unless something is written before.
    quiet_until: AtomicI64,
    /// Somebody has been told to have the access time logged.
    listed: AtomicBool,
}

/// It, held with others.
pub type Shared<'l> = Guard<RwLockReadGuard<'l, InodeState>>;
/// It, held alone.
pub type Exclusive<'l> = Guard<RwLockWriteGuard<'l, InodeState>>;

impl StateLock {
    /// A lock that nobody holds.
    pub fn new(ino: Ino, state: InodeState) -> Self {
        Self {
            ino,
            state: RwLock::new(state),
            written: AtomicI64::new(0),
            accessed: AtomicI64::new(0),
            quiet_until: AtomicI64::new(0),
            listed: AtomicBool::new(false),
        }
    }

    /// Takes it shared, with the times in line.
    pub fn read(&self) -> Shared<'_> {
        if self.has_times() {
            drop(self.write());
        }
        self.share()
    }

    /// The times are behind.
    fn has_times(&self) -> bool {
        self.written.load(Ordering::Acquire) != 0 || self.accessed.load(Ordering::Acquire) != 0
    }

    /// Takes it shared; the times may be behind.
    pub fn share(&self) -> Shared<'_> {
        let wait = || {
            let _waiting = activity::enter(Layer::Lock);
            self.state.read()
        };
        Guard::wait(Rank::Inode(self.ino), || self.state.try_read().unwrap_or_else(wait))
    }

    /// The same, unless somebody has it exclusively.
    pub fn try_share(&self) -> Option<Shared<'_>> {
        Some(Guard::tried(Rank::Inode(self.ino), self.state.try_read()?))
    }

    /// As [`StateLock::read`], unless the thread must not wait and another one has it: that one may
    /// be waiting for the store.
    pub(crate) fn read_now(&self) -> Result<Shared<'_>, FsError> {
        if !patience::is_hurried() {
            return Ok(self.read());
        }
        if self.has_times() {
            drop(self.write_now()?);
        }
        let state = self.state.try_read_for(BRIEFLY).ok_or(FsError::WouldWait)?;
        Ok(Guard::tried(Rank::Inode(self.ino), state))
    }

    /// As [`StateLock::write`], with the same exception.
    pub(crate) fn write_now(&self) -> Result<Exclusive<'_>, FsError> {
        if !patience::is_hurried() {
            return Ok(self.write());
        }
        let state = self.state.try_write_for(BRIEFLY).ok_or(FsError::WouldWait)?;
        Ok(self.in_line(Guard::tried(Rank::Inode(self.ino), state)))
    }

    /// Takes it exclusively, with the times in line.
    pub fn write(&self) -> Exclusive<'_> {
        let wait = || {
            let _waiting = activity::enter(Layer::Lock);
            self.state.write()
        };
        let lock = || self.state.try_write().unwrap_or_else(wait);
        self.in_line(Guard::wait(Rank::Inode(self.ino), lock))
    }

    /// The same, if nobody has it.
    pub fn try_write(&self) -> Option<Exclusive<'_>> {
        Some(self.in_line(Guard::tried(Rank::Inode(self.ino), self.state.try_write()?)))
    }

    fn in_line<'l>(&self, mut state: Exclusive<'l>) -> Exclusive<'l> {
        let take = |time: &AtomicI64| match time.load(Ordering::Relaxed) {
            0 => 0,
            _ => time.swap(0, Ordering::AcqRel),
        };
        let (written, accessed) = (take(&self.written), take(&self.accessed));
        if written != 0 {
            let written = Timestamp(written.into());
            (state.rec.mtime, state.rec.ctime) = (written, written);
        }
        if accessed != 0 {
            state.rec.atime = Timestamp(accessed.into());
        }
        state.times_dirty |= written != 0 || accessed != 0;
        if self.quiet_until.load(Ordering::Relaxed) != 0 {
            self.quiet_until.store(0, Ordering::Relaxed);
        }
        state
    }

    /// Notes a write; the caller holds the lock shared. Returns the time that programs see.
    pub fn note_write(&self, now: Timestamp) -> Timestamp {
        let (now, seen) = (nanos(now), self.written.load(Ordering::Relaxed));
        if seen == 0 || now < seen || now - seen >= STEP_NANOS {
            self.written.store(now, Ordering::Release);
            return Timestamp(now.into());
        }
        Timestamp(seen.into())
    }

    /// The same, to the nanosecond. `now` is one of those that can be noted: behind the epoch, and
    /// within 64 bits.
    pub fn note_write_exactly(&self, now: Timestamp) {
        self.written.store(nanos(now), Ordering::Release);
    }

    /// When the newest write was that the record does not say yet.
    pub fn newest_write(&self) -> Option<Timestamp> {
        let seen = self.written.load(Ordering::Acquire);
        (seen != 0).then(|| Timestamp(seen.into()))
    }

    /// Notes a read, where that moves the access time: if it is not newer than the last change, or
    /// is a day old. `true`: the caller sees to it that the time is logged some day, and says so by
    /// [`StateLock::unlist`] before. Called without the lock. `always`: each read moves it.
    pub fn note_read(&self, now: Timestamp, always: bool) -> bool {
        let now = nanos(now);
        if always {
            self.accessed.store(now, Ordering::Release);
            return self.list();
        }
        let (written, accessed) =
            (self.written.load(Ordering::Acquire), self.accessed.load(Ordering::Acquire));
        if accessed != 0 && accessed > written {
            return false;
        }
        if written == 0 {
            if now < self.quiet_until.load(Ordering::Acquire) {
                return false;
            }
            // A time that moves once too often harms nothing; a thread that has the lock may be
            // waiting for the store.
            if let Some(state) = self.state.try_read() {
                let (atime, changed) =
                    (nanos(state.rec.atime), nanos(state.rec.mtime.max(state.rec.ctime)));
                if atime > changed && now - atime < RELATIME_NANOS {
                    self.quiet_until.store(atime.saturating_add(RELATIME_NANOS), Ordering::Release);
                    return false;
                }
            }
        }
        self.accessed.store(now, Ordering::Release);
        self.list()
    }

    /// The times are to be logged some day. `true`: the caller sees to it.
    pub fn list(&self) -> bool {
        !self.listed.swap(true, Ordering::AcqRel)
    }

    /// The time is being logged: the next one has to be listed again.
    pub fn unlist(&self) {
        self.listed.store(false, Ordering::Release);
    }
}

/// 0 stands for none.
fn nanos(time: Timestamp) -> i64 {
    i64::try_from(time.0.max(1)).unwrap_or(i64::MAX)
}
