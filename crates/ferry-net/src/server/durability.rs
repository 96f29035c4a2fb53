//! What clients have promised becomes durable, and they are told: until then they keep it.
//!
//! * D1: only who promises costs anything. What is promised is durable after two seconds or so, sooner where it is much.
//! * D2: a sync covers what was applied before it began. Whoever asks meanwhile gets the next one, together with all who ask.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_fs::{Errno, InProcess, Ino, ROOT, ioctl};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::Core;
use super::fresh::Fresh;
use super::session::Session;
use crate::message::{Op, Outcome};

/// What is promised is not durable for so long at least, unless somebody asks for it or it is much.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// So many changes of a session are much, and so many bytes.
pub(super) const MUCH_CHANGES: u64 = 16_384;
pub(super) const MUCH_BYTES: usize = 16 << 20;

/// Hears whether everything that was applied before it asked is durable.
pub(super) type Synced = Box<dyn FnOnce(Result<(), Errno>) + Send>;

#[derive(Default)]
struct Asked {
    waiting: Vec<Synced>,
    /// A thread syncs.
    syncing: bool,
}

/// Of one server.
#[derive(Default)]
pub(super) struct Durability {
    /// Something was promised since the last look.
    promised: AtomicBool,
    news: Notify,
    much: Notify,
    asked: Mutex<Asked>,
}

/// How far each session was when a sync began.
pub(super) struct Noted(Vec<(Arc<Session>, u64)>, Arc<Fresh>, u64);

impl Durability {
    /// A promised change was applied. `much`: its session has much that is not durable.
    pub(super) fn promised(&self, much: bool) {
        if !self.promised.swap(true, Ordering::Relaxed) {
            self.news.notify_one();
        }
        if much {
            self.much.notify_one();
        }
    }
}

impl Core {
    /// Keeps what is promised from being lost for long. Never ends.
    pub(super) async fn keep_durable(self: Arc<Self>) {
        loop {
            self.durability.news.notified().await;
            tokio::select! {
                () = tokio::time::sleep(SYNC_INTERVAL) => {}
                () = self.durability.much.notified() => {}
            }
            self.durability.promised.store(false, Ordering::Relaxed);
            let (told, synced) = oneshot::channel();
            self.make_durable(Box::new(move |result| {
                let _gone = told.send(result);
            }));
            if !matches!(synced.await, Ok(Ok(()))) {
                // It stays so, mostly; clients keep what they have promised, and promise no more when that is too much.
                tokio::time::sleep(SYNC_INTERVAL).await;
                self.durability.promised(false);
            }
        }
    }

    /// Makes everything durable that was applied; no thread of the caller waits.
    pub(super) fn make_durable(self: &Arc<Self>, synced: Synced) {
        {
            let mut asked = self.durability.asked.lock();
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
                let mut asked = self.durability.asked.lock();
                if asked.waiting.is_empty() {
                    asked.syncing = false;
                    return;
                }
                std::mem::take(&mut asked.waiting)
            };
            let result = self.sync();
            if let Err(error) = &result {
                tracing::error!(%error, "what clients have promised cannot be made durable");
            }
            waiting.into_iter().for_each(|synced| synced(result));
        }
    }

    /// Makes everything durable that was applied, and tells the sessions. Waits for the device.
    pub(super) fn sync(&self) -> Result<(), Errno> {
        let noted = self.note();
        // Parked, it is answered with bytes, though there are none.
        let _nothing: Vec<u8> =
            InProcess::default().call(|cx| self.fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0))?;
        noted.are_durable();
        Ok(())
    }

    /// A sync is about to begin.
    pub(super) fn note(&self) -> Noted {
        let now = self.env.clock.monotonic();
        let (fresh, noted) = (Arc::clone(&self.fresh), self.fresh.note());
        let all = self.all().into_iter();
        Noted(all.filter_map(|session| session.note(now).map(|seq| (session, seq))).collect(), fresh, noted)
    }

    /// The same for an inode that one client syncs: the other clients that may keep changes of it.
    pub(super) fn note_of(&self, ino: Ino, by: &Session) -> Vec<(Arc<Session>, u64)> {
        if self.is_alone() {
            return Vec::new();
        }
        self.others(by).filter_map(|other| other.note_of(ino).map(|seq| (other, seq))).collect()
    }

    /// A client is about to give leases back, and makes sure that it need not make anything again that others may see or overwrite.
    pub(super) fn settle(self: &Arc<Self>, session: Arc<Session>, told: Box<dyn FnOnce(Outcome) + Send>) {
        self.make_durable(Box::new(move |result| {
            told(match result {
                Ok(()) => Outcome::Count { count: session.durable() },
                Err(Errno(errno)) => Outcome::Failed { errno },
            });
        }));
    }
}

impl Noted {
    /// The sync has succeeded.
    pub(super) fn are_durable(self) {
        // Who gets a lease then has heard before what need not be made again.
        self.0.into_iter().for_each(|(session, seq)| session.became_durable(seq));
        self.1.are_durable(self.2);
    }
}

/// What a promised change adds to what is not durable.
pub(super) fn bytes(op: &Op) -> usize {
    if let Op::Write { data, .. } = op { data.len() } else { 0 }
}
