//! What clients have promised becomes durable, and they are told: until then they keep it.
//!
//! * DURABLE-1: only who promises costs anything, and who comes to what another has changed
//!   (`unstable`, UNSTABLE-3). What is promised is durable after two seconds or so, sooner where it is
//!   much.
//! * DURABLE-2: a sync covers what was applied before it began. Whoever asks meanwhile gets the
//!   next one, together with all who ask.
//! * DURABLE-3: it leaves a word on the volume of how far each session is durable, so that a client
//!   which has not heard of it makes nothing again that others may have changed since.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferry_fs::{Errno, Ino, SessionSeq};
use tokio::sync::oneshot;

use super::core::Core;
use super::leases::SessionId;
use super::session::Session;
use super::sync_queue::Synced;

/// What is promised is not durable for so long at least, unless somebody asks for it or it is much.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

impl Core {
    /// Keeps what is promised from being lost for long. Never ends.
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
                let _gone = told.send(result);
            }));
            if !matches!(synced.await, Ok(Ok(()))) {
                // It stays so, mostly; clients keep what they have promised, and promise no more
                // when that is too much.
                crate::rt::time::sleep(SYNC_INTERVAL).await;
                self.sync_queue.unstable(false);
            }
        }
    }

    /// Makes everything durable that was applied; no thread of the caller waits.
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
            // Whatever panics, others wait for the next one.
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
        // What is entered is counted by its session (UNSTABLE-2).
        let entered = self.unstable.newest();
        let sessions: Vec<(Arc<Session>, SessionSeq)> = (self.all().into_iter())
            .filter_map(|session| {
                let mark = SessionSeq { session: session.id, seq: session.begin_sync(now)? };
                Some((session, mark))
            })
            .collect();
        let upto: Vec<SessionSeq> = sessions.iter().map(|(_, mark)| *mark).collect();
        self.fs.sync_sessions(&upto)?;
        // Who gets a lease then has heard before what need not be made again.
        sessions.into_iter().for_each(|(session, mark)| session.became_durable(mark.seq));
        self.unstable.are_durable(entered);
        Ok(())
    }

    /// Tells what was read of these inodes: when what others have changed there is durable, as far
    /// as it can be.
    pub(super) fn show(
        self: &Arc<Self>,
        session: SessionId,
        inos: &[Ino],
        tell: impl FnOnce() + Send + 'static,
    ) {
        if self.unstable.is_others(session, inos) {
            self.make_durable(Box::new(move |_| tell()));
        } else {
            tell();
        }
    }

    /// One client is about to sync an inode: the other clients that may keep changes of it, and how
    /// far they are.
    pub(super) fn unstable_changes_of(&self, ino: Ino, by: &Session) -> Vec<(Arc<Session>, u64)> {
        if self.is_alone() {
            return Vec::new();
        }
        self.others(by)
            .filter_map(|other| other.newest_unstable(ino).map(|seq| (other, seq)))
            .collect()
    }

    /// Sees that what others have changed of these inodes is durable; whether it is.
    pub(super) async fn is_safe(self: &Arc<Self>, session: &Session, inos: &[Ino]) -> bool {
        if !self.unstable.is_others(session.number, inos) {
            return true;
        }
        let (told, synced) = oneshot::channel();
        self.make_durable(Box::new(move |result| {
            let _gone = told.send(result);
        }));
        matches!(synced.await, Ok(Ok(())))
    }
}
