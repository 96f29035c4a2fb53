//! What all connections of a server share, and how a session is found in it.

use crate::rt::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::runtime::Handle;
use ferry_env::Env;
use ferry_fs::{Attr, InProcess, Ino, Needed, SessionSeq, SessionStore, Statfs};
use tokio::sync::watch;

use super::admission::Admission;
use super::barrier::Barrier;
use super::formers::Formers;
use super::leases::{Leases, Recalls};
use super::locks::Locks;
use super::panics::Panics;
use super::refusals::Refusals;
use super::session::{Greeting, Session, Sessions};
use super::sync_queue::SyncQueue;
use super::unstable::UnstableSet;
use crate::limits::Export;
use crate::message::BATCH_MAX;
use crate::tls::Revocations;

/// Why an evicted client is refused.
pub(super) const EVICTED: &str =
    "the session was ended by the server's administrator (`ferry evict`)";

/// How a server treats clients that walk through a tree. Tests take other times: their steps follow
/// each other sooner, and they run on busy machines.
#[derive(Clone, Copy)]
pub(crate) struct WalkTimes {
    /// An inode is in use for so long after its holder got the lease or changed the inode.
    pub(crate) in_use: Duration,
    /// All steps of a walk together wait so long for leases.
    pub(crate) wait_max: Duration,
}

impl Default for WalkTimes {
    fn default() -> Self {
        Self { in_use: Duration::from_secs(1), wait_max: Duration::from_millis(50) }
    }
}

/// What all connections share.
pub(super) struct Core {
    pub(super) fs: Arc<dyn SessionStore>,
    pub(super) env: Env,
    pub(super) exports: Vec<Export>,
    pub(super) session_life: Duration,
    pub(super) key: [u8; 16],
    pub(super) greeting: Greeting,
    pub(super) locks: Locks,
    pub(super) leases: Arc<Leases>,
    pub(super) walk_times: WalkTimes,
    pub(super) sync_queue: SyncQueue,
    pub(super) unstable: UnstableSet,
    pub(super) barrier: Barrier,
    pub(super) panics: Arc<Panics>,
    pub(super) sessions: Sessions,
    pub(super) admission: Arc<Admission>,
    /// Held while a session is found or made.
    pub(super) entering: Mutex<()>,
    /// Certificates that are revoked.
    pub(super) revocations: Revocations,
    /// The second of Unix time up to which the server's own certificate is good.
    pub(super) certificate_until: Mutex<Option<u64>>,
    pub(super) refusals: Refusals,
    /// The number of sessions so far.
    pub(super) numbers: AtomicU64,
    /// The number of names so far that were moved from one directory to another.
    pub(super) moves: AtomicU64,
    /// Sessions whose clients were away for too long.
    pub(super) formers: Mutex<Formers>,
    /// Evicted sessions, as they are recorded on the volume, oldest first.
    pub(super) evicted: Mutex<VecDeque<SessionSeq>>,
    pub(super) runtime: Handle,
    pub(super) stopping: watch::Sender<Stage>,
    /// Held by each connection that may still have something to send.
    pub(super) writing: Arc<()>,
}

/// How far the server has come in stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(super) enum Stage {
    Serving,
    /// No message is taken any more.
    Draining,
    /// Everything is answered.
    Ended,
}

impl Stage {
    /// Whether the server has come so far.
    pub(super) fn is_reached(self, at: &watch::Receiver<Stage>) -> bool {
        *at.borrow() >= self
    }

    /// Waits until the server has come so far.
    pub(super) async fn reached(self, at: &mut watch::Receiver<Stage>) {
        // The sender lives as long as the server: an error means that the server has ended.
        let _reached = at.wait_for(|stage| *stage >= self).await.map(drop);
    }
}

impl Core {
    /// What a name means. No session knows the inode by this.
    pub(super) fn named(&self, dir: Ino, name: &[u8]) -> Option<Attr> {
        let found = InProcess::default().call(|cx| self.fs.lookup(cx, dir, name)).ok()?;
        found.attr.inspect(|attr| self.fs.forget(attr.ino, 1))
    }

    /// Changes will need this. Where the volume is near, nobody asks what it is.
    pub(super) fn read_ahead<I: IntoIterator<Item = Needed>>(&self, needed: impl FnOnce() -> I) {
        if self.fs.is_far() {
            self.fs.read_ahead(needed().into_iter().collect());
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().values().cloned().collect()
    }

    /// All sessions but one.
    pub(super) fn others(&self, than: &Session) -> impl Iterator<Item = Arc<Session>> {
        let number = than.number;
        self.all().into_iter().filter(move |session| session.number != number)
    }

    /// Whether there is no second session.
    pub(super) fn is_alone(&self) -> bool {
        self.sessions.lock().len() < 2
    }

    /// The volume's space as a client sees it: reservations of clients count as free, because the
    /// clients return them to those that need them.
    pub(super) fn totals(&self, totals: Statfs) -> Statfs {
        let reserved: u64 =
            self.all().iter().map(|session| session.reservations.bytes_reserved()).sum();
        let blocks = reserved / u64::from(totals.block_size.max(1));
        let (free, available) = (totals.blocks_free + blocks, totals.blocks_available + blocks);
        Statfs {
            blocks_free: free.min(totals.blocks),
            blocks_available: available.min(totals.blocks),
            ..totals
        }
    }

    pub(super) fn recall(&self, recalls: &Recalls) {
        for (number, inos) in recalls {
            let session =
                self.sessions.lock().values().find(|session| session.number == *number).cloned();
            for batch in inos.chunks(BATCH_MAX) {
                if let Some(session) = &session {
                    session.recall(batch.iter().copied());
                }
            }
        }
    }
}

pub(super) fn random(env: &Env) -> u128 {
    u128::from(env.entropy.next_u64()) << 64 | u128::from(env.entropy.next_u64())
}
