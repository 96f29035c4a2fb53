//! File locks: the server's, remembered for a new session.
//!
//! A lock that is granted when nobody waits for it any more is returned, and only that: not what
//! its owner had before, nor what it has got since. So the owner's next requests stay here until it
//! is known what the server did for the one that was interrupted.

use std::sync::Arc;

use crate::rt::Mutex;
use ferry_fs::{Answer, Cx, FileLock, Ino, Reply, Stop};

use super::answers::{done, unfit};
use super::remote::RemoteFs;
use super::tables::{DeferredLock, LockStage, Owner};
use super::waiting::{Finish, Unsettled};
use crate::message::{Op, Outcome};

impl RemoteFs {
    /// The lock that is in the way.
    pub(super) fn blocker(&self, cx: &Cx<'_>, ino: Ino, lock: FileLock) -> Answer<FileLock> {
        let finish: Finish = Box::new(|_, outcome| match outcome {
            Outcome::Blocker { lock } => Ok(Reply::Lock(lock)),
            other => Err(unfit(other)),
        });
        self.send(cx, Op::Getlk { ino, lock }, finish)
    }

    pub(super) fn unlock(&self, cx: &Cx<'_>, ino: Ino, fh: u64, lock: FileLock) -> Answer<()> {
        // As soon as it is asked for: a new session would not take it again.
        let before = {
            let mut tables = self.tables.lock();
            let before = tables.locks_within(ino, &lock);
            tables.remove_lock(ino, &lock);
            before
        };
        // It would be told at last, once for each time that a program asks.
        if before.is_empty()
            && let Some(errno) = self.link.unreachable()
        {
            return Err(errno.into());
        }
        let finish: Finish = Box::new(move |fs, outcome| {
            // The server has as many locks of the file as it takes, and this would cut one into
            // two.
            if matches!(outcome, Outcome::Failed { errno: libc::ENOLCK }) {
                let mut tables = fs.tables.lock();
                before.iter().for_each(|lock| tables.set_lock(ino, fh, lock));
            }
            done(outcome)
        });
        let answer = self.change(cx, Op::Unlock { ino, lock }, finish);
        self.tables.lock().note_locks(ino);
        answer
    }

    /// The same, and nobody waits for it.
    pub(super) fn give_back_lock(&self, ino: Ino, lock: FileLock) {
        self.tables.lock().remove_lock(ino, &lock);
        self.tell(Op::Unlock { ino, lock });
        self.tables.lock().note_locks(ino);
    }

    pub(super) fn lock(
        &self,
        cx: &Cx<'_>,
        ino: Ino,
        fh: u64,
        lock: FileLock,
        wait: bool,
    ) -> Answer<()> {
        self.usable(fh)?;
        let before = Arc::new(Mutex::new(None));
        let saved = Arc::clone(&before);
        let finish: Finish = Box::new(move |fs, outcome| {
            let reply = done(outcome)?;
            let mut tables = fs.tables.lock();
            *saved.lock() = Some(tables.locks_within(ino, &lock));
            tables.set_lock(ino, fh, &lock);
            Ok(reply)
        });
        let stage = LockStage::new();
        let unsettled = Box::new(Asked { ino, fh, lock, before, stage: stage.clone() });
        let parked = self.park(cx, Op::Lock { ino, lock, wait }, (finish, None), Some(unsettled));
        let due = self.tables.lock().defer(Owner::of(ino, &lock), DeferredLock { parked, stage });
        if let Some(parked) = due {
            self.send_parked(parked);
        }
        Err(Stop::Parked)
    }
}

/// A lock that was asked for.
struct Asked {
    ino: Ino,
    fh: u64,
    lock: FileLock,
    /// What its owner had of the range before it was granted.
    before: Arc<Mutex<Option<Vec<FileLock>>>>,
    stage: LockStage,
}

impl Unsettled for Asked {
    fn interrupted(&self, fs: &RemoteFs) {
        fs.tables.lock().interrupt_lock(Owner::of(self.ino, &self.lock), &self.stage);
    }

    /// The server is told to have what the tables have.
    fn over(&self, fs: &RemoteFs) {
        let (ino, lock) = (self.ino, self.lock);
        let ranges: Vec<FileLock> = {
            let mut tables = fs.tables.lock();
            if let Some(before) = self.before.lock().take() {
                tables.remove_lock(ino, &lock);
                before.iter().for_each(|lock| tables.set_lock(ino, self.fh, lock));
            }
            tables.ranges(ino, &lock)
        };
        for lock in ranges {
            if lock.kind == libc::F_UNLCK {
                fs.tell(Op::Unlock { ino, lock });
            } else {
                fs.reclaim(ino, lock);
            }
        }
        fs.tables.lock().note_locks(ino);
        self.unheard(fs);
    }

    /// The owner's next requests go on.
    fn unheard(&self, fs: &RemoteFs) {
        let due = fs.tables.lock().settle(Owner::of(self.ino, &self.lock), &self.stage);
        due.into_iter().for_each(|parked| fs.send_parked(parked));
    }
}
