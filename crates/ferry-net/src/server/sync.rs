//! The server makes durable what clients have in their replay logs, and tells them.
//!
//! * DURABLE-1: only two things cost a sync: an early-acknowledged change, and a client that comes
//!   to what another has changed (`unstable`, UNSTABLE-3). An early-acknowledged change is durable
//!   after about two seconds, and sooner if there is much.
//! * DURABLE-2: a sync covers what was applied before it began. All that ask meanwhile get the next
//!   one together.
//! * DURABLE-3: a sync records the durable watermark of each session on the volume. So a client
//!   that has not heard of it replays nothing that others may have changed since.
//! * DURABLE-4: a session whose client must not replay any more (it was fenced, has ended, or has
//!   not come back in time) loses its record durably before another client may change what the
//!   first one has in its replay log. That change is in a replay log, too. If a crash took only the
//!   removal of the record, both clients would replay.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferry_env::planted::{Bug, is_planted};
use ferry_fs::{Errno, Ino, SessionSeq};
use tokio::sync::oneshot;

use super::core::Core;
use super::leases::SessionId;
use super::session::Session;
use super::sync_queue::Synced;

/// The least time between two syncs that no client has asked for, unless one is urgent.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

impl Core {
    /// Makes early-acknowledged changes durable in the background. Never ends.
    pub(super) async fn keep_durable(self: Arc<Self>) {
        loop {
            self.sync_queue.due.notified().await;
            crate::rt::select! {
                () = crate::rt::time::sleep(SYNC_INTERVAL) => {}
                () = self.sync_queue.urgent.notified() => {}
            }
            self.sync_queue.is_due.store(false, Ordering::Relaxed);
            let (told, synced) = oneshot::channel();
            self.make_durable(Box::new(move |result| {
                let _sent = told.send(result);
            }));
            if !matches!(synced.await, Ok(Ok(()))) {
                // The cause mostly stays. Clients keep their replay logs, and stop acknowledging
                // early when those are full.
                crate::rt::time::sleep(SYNC_INTERVAL).await;
                self.sync_queue.unstable(false);
            }
        }
    }

    /// Makes everything durable that was applied; the caller's thread does not wait.
    pub(super) fn make_durable(self: &Arc<Self>, synced: Synced) {
        {
            let mut asked = self.sync_queue.asked.lock();
            asked.waiting.push(synced);
            if std::mem::replace(&mut asked.syncing, true) {
                return;
            }
        }
        let core = Arc::clone(self);
        self.runtime.spawn_blocking(move || core.sync_while_asked());
    }

    fn sync_while_asked(&self) {
        loop {
            let waiting = {
                let mut asked = self.sync_queue.asked.lock();
                if asked.waiting.is_empty() {
                    asked.syncing = false;
                    return;
                }
                std::mem::take(&mut asked.waiting)
            };
            // If one panics, the others still get the next sync.
            let result =
                catch_unwind(AssertUnwindSafe(|| self.sync())).unwrap_or(Err(Errno(libc::EIO)));
            if let Err(error) = &result {
                tracing::error!(%error, "what clients have changed cannot be made durable");
            }
            for synced in waiting {
                let _panicked = catch_unwind(AssertUnwindSafe(|| synced(result)));
            }
        }
    }

    /// Makes everything durable that was applied, and tells the sessions. Waits for the device.
    pub(super) fn sync(&self) -> Result<(), Errno> {
        let _one = self.sync_queue.turn.lock();
        if self.panics.is_ending() {
            return Err(Errno(libc::EIO));
        }
        let now = self.env.clock.monotonic();
        // A session has counted each change that the unstable set has (UNSTABLE-2).
        let entered = self.unstable.newest();
        let sessions: Vec<(Arc<Session>, SessionSeq)> = (self.all().into_iter())
            .filter_map(|session| {
                let mark = SessionSeq { session: session.id, seq: session.begin_sync(now)? };
                Some((session, mark))
            })
            .collect();
        let upto: Vec<SessionSeq> = sessions.iter().map(|(_, mark)| *mark).collect();
        if !is_planted(Bug::EarlyDurable) {
            self.fs.sync_sessions(&upto)?;
        }
        // A client that gets a lease after this has heard before what it need not replay.
        sessions.into_iter().for_each(|(session, mark)| session.became_durable(mark.seq));
        self.unstable.are_durable(entered);
        Ok(())
    }

    /// Sends an answer that shows these inodes, when what others have changed there is durable, as
    /// far as possible.
    pub(super) fn answer_when_durable(
        self: &Arc<Self>,
        session: SessionId,
        inos: &[Ino],
        answer: impl FnOnce() + Send + 'static,
    ) {
        if self.unstable.is_others(session, inos) {
            self.make_durable(Box::new(move |_| answer()));
        } else {
            answer();
        }
    }

    /// A client is about to sync an inode: the other clients that may have changes of it in their
    /// replay logs, and their newest ones.
    pub(super) fn unstable_changes_of(&self, ino: Ino, by: &Session) -> Vec<(Arc<Session>, u64)> {
        if self.is_alone() {
            return Vec::new();
        }
        self.others(by)
            .filter_map(|other| other.newest_unstable(ino).map(|seq| (other, seq)))
            .collect()
    }

    /// Makes durable what others have changed of these inodes. Returns whether it is.
    pub(super) async fn is_safe(self: &Arc<Self>, session: &Session, inos: &[Ino]) -> bool {
        if !self.unstable.is_others(session.number, inos) {
            return true;
        }
        let (told, synced) = oneshot::channel();
        self.make_durable(Box::new(move |result| {
            let _sent = told.send(result);
        }));
        matches!(synced.await, Ok(Ok(())))
    }
}
