//! A session as data: what all parts of `session` work on.

use crate::rt::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use crate::rt::{Mutex, RwLock};
use ferry_env::Clock;
use ferry_fs::{Ino, ROOT};
use tokio::sync::Semaphore;

use super::change::{Change, Line, Open, Room};
use super::phase::{Event, Phase};
use crate::limits::Peer;
use crate::message::{DirName, Made, Outcome};
use crate::protocol::Protocol;
use crate::server::exports::Bounds;
use crate::server::reservations::Reservations;

/// Messages that the client did not ask for and that are not sent yet. The server sends no more.
const NOTICES_MAX: usize = 16;

/// What the server tells each new connection about itself.
pub(in crate::server) struct Greeting {
    pub(in crate::server) boot: u128,
    pub(in crate::server) term_ms: u32,
    pub(in crate::server) clock: Arc<dyn Clock>,
}

/// What a client mounts.
pub(in crate::server) struct Mounted {
    pub(in crate::server) path: Vec<u8>,
    /// The directory that the client sees as its root.
    pub(in crate::server) root: Ino,
    pub(in crate::server) read_only: bool,
    /// `None`: the session may use the whole volume, so nothing is checked.
    pub(in crate::server) bounds: Option<Bounds>,
}

/// A request that waits until a change has been applied.
pub(in crate::server) struct Delayed {
    pub(in crate::server) after: u64,
    pub(in crate::server) run: Box<dyn FnOnce() + Send>,
}

/// Whether the volume has a record of the session, so that the next server waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Registration {
    Absent,
    Recorded,
    /// It had one, and the session was fenced.
    Fenced,
}

/// The connection on which the client is reached.
#[derive(Default)]
pub(in crate::server) enum Link {
    /// No connection has come yet, or the server has sent the last message.
    #[default]
    Silent,
    Connected(Line),
    /// The last connection has broken. The client may come back.
    Away {
        since: Duration,
    },
}

impl Link {
    pub(in crate::server) fn hang_up(&mut self) {
        if matches!(self, Self::Connected(_)) {
            *self = Self::Silent;
        }
    }
}

/// What the thread is doing that applies the session's changes, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::server) enum Worker {
    /// No change waits.
    #[default]
    Idle,
    /// A change has arrived, and a thread is about to begin.
    Starting,
    /// A change is being applied, or waits for leases of others or for a sync.
    Applying(UnderWay),
    /// A change waits for the grace-period barrier. The server does not wait for it when it stops.
    AtBarrier(UnderWay),
}

/// The change that is being applied: when it came, and the bytes of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) struct UnderWay {
    pub(in crate::server) arrived: Duration,
    pub(in crate::server) bytes: usize,
}

impl Worker {
    pub(in crate::server) fn under_way(self) -> Option<UnderWay> {
        match self {
            Self::Idle | Self::Starting => None,
            Self::Applying(change) | Self::AtBarrier(change) => Some(change),
        }
    }
}

/// So many changes of a session count as progress of its replay. For more the server does not wait.
pub(in crate::server) const RESTORING_MAX: u64 = 4 << 20;

/// Progress of a replay: the server gives a client up that makes none.
#[derive(Default)]
pub(in crate::server) struct RestoreProgress {
    /// The time of the last progress.
    pub(in crate::server) at: Duration,
    /// The newest change that counts.
    pub(in crate::server) newest: u64,
    /// So many more changes may count.
    pub(in crate::server) changes_left: u64,
    /// Bytes that had arrived at the last progress.
    pub(in crate::server) counted: u64,
    /// So many syncs have failed for which a change has waited.
    pub(in crate::server) failed_syncs: u32,
}

#[derive(Default)]
pub(in crate::server) struct State {
    /// Inodes, each with the stamp of the newest answer that named it.
    pub(in crate::server) known: HashMap<Ino, u64>,
    pub(in crate::server) stamp: u64,
    pub(in crate::server) handles: HashMap<u64, Open>,
    pub(in crate::server) received: u64,
    /// The newest change behind which the client has returned leases.
    pub(in crate::server) owed: u64,
    pub(in crate::server) applied: u64,
    /// The newest change by which the client asked for a file lock of before, and was refused.
    pub(in crate::server) lock_lost: u64,
    pub(in crate::server) answers: VecDeque<(u64, Outcome, Option<Made>)>,
    pub(in crate::server) queue: VecDeque<Change>,
    /// Bytes of the changes in the queue.
    pub(in crate::server) queued: usize,
    pub(in crate::server) delayed: Vec<Delayed>,
    /// Names of inodes in `known` that others have removed since the last ping, and their bytes.
    pub(in crate::server) removed_names: (VecDeque<DirName>, usize),
    /// The session was taken up with this last-applied number, and no change has arrived since: the
    /// client may not have seen the `Welcome` that says so. No part of the phase, because that
    /// answer may be lost and sent again in each phase.
    pub(in crate::server) unheard_welcome: Option<u64>,
    pub(in crate::server) worker: Worker,
    /// How the replay goes on, while the server waits for it.
    pub(in crate::server) progress: RestoreProgress,
    /// When the client last claimed an inode.
    pub(in crate::server) claimed_at: Option<Duration>,
    /// Changes up to this one are durable.
    pub(in crate::server) durable: u64,
    /// The newest applied change that the client has in its replay log.
    pub(in crate::server) newest_unstable: u64,
    /// Such changes since the last sync began, their bytes, and when the first was applied.
    pub(in crate::server) unsynced: (u64, usize),
    pub(in crate::server) unsynced_since: Option<Duration>,
    pub(in crate::server) link: Link,
    /// The protocol of the newest connection.
    pub(in crate::server) protocol: Protocol,
    /// The address of the newest connection.
    pub(in crate::server) from: Option<SocketAddr>,
    /// Answers that no program waits for, with their room. They are sent before the next message,
    /// or when no more changes wait.
    pub(in crate::server) outbox: (Vec<u8>, Vec<Room>),
    /// The number of the newest connection: 1, 2, 3, …
    pub(in crate::server) connection: u64,
}

/// A session.
pub(in crate::server) struct Session {
    pub(in crate::server) id: u128,
    /// The number for people: 1, 2, 3, … since the server's start.
    pub(in crate::server) number: u64,
    /// The name that the client gives itself.
    pub(in crate::server) name: String,
    /// The client's identity. No other one gets the session.
    pub(in crate::server) peer: Peer,
    pub(in crate::server) path: Vec<u8>,
    /// The directory that the client sees as its root.
    pub(in crate::server) root: Ino,
    pub(in crate::server) read_only: bool,
    pub(in crate::server) bounds: Option<Bounds>,
    /// Held for reading while a file lock is taken, and for writing while a connection takes over
    /// or the session ends: so no older connection takes a lock behind the newest, and no lock
    /// outlives the session. Locked before `state`.
    pub(in crate::server) locking: RwLock<()>,
    pub(in crate::server) state: Mutex<State>,
    /// Written under the lock of `state`, so that it stays as it is for a thread that has that
    /// lock. Nothing is locked under it.
    phase: Mutex<Phase>,
    /// Inode numbers and space for early-acknowledged changes.
    pub(in crate::server) reservations: Reservations,
    /// Locked behind the leases, by the thread that fences the session, and `state` comes before
    /// the leases: so of the session only `phase` is locked under it.
    pub(in crate::server) registration: Mutex<Registration>,
    /// Room for messages that the client did not ask for.
    pub(in crate::server) notices: Arc<Semaphore>,
    /// Held for reading while a change is replayed: the thread that ends the replay waits for that.
    pub(in crate::server) replaying: RwLock<()>,
    /// Bytes that have arrived, on all connections.
    pub(in crate::server) heard: Arc<AtomicU64>,
    /// The session may have held file locks at the previous server.
    pub(in crate::server) had_locks: AtomicBool,
    /// The volume records the session as one that may hold file locks.
    pub(in crate::server) lock_record: Mutex<bool>,
}

impl State {
    /// Puts a change at the end of the queue; `true`: no thread applies changes yet.
    pub(in crate::server) fn enqueue(&mut self, change: Change) -> bool {
        self.queued += change.bytes;
        self.queue.push_back(change);
        let starts = self.worker == Worker::Idle;
        if starts {
            self.worker = Worker::Starting;
        }
        starts
    }
}

impl Session {
    pub(in crate::server) fn new(
        (id, number): (u128, u64),
        name: String,
        peer: Peer,
        Mounted { path, root, read_only, bounds }: Mounted,
    ) -> Self {
        Self {
            id,
            number,
            name,
            peer,
            path,
            root,
            read_only,
            bounds,
            locking: RwLock::default(),
            state: Mutex::default(),
            phase: Mutex::new(Phase::Connecting),
            reservations: Reservations::default(),
            registration: Mutex::new(Registration::Absent),
            notices: Arc::new(Semaphore::new(NOTICES_MAX)),
            replaying: RwLock::default(),
            heard: Arc::default(),
            had_locks: AtomicBool::new(false),
            lock_record: Mutex::new(false),
        }
    }

    /// The only place where the phase changes. The caller has the lock of `state`.
    pub(super) fn transition(&self, _locked: &mut State, event: Event) {
        let mut phase = self.phase.lock();
        let before = *phase;
        let after = before.after(event);
        let after = after.unwrap_or_else(|| panic!("{event:?} of a session that is {before:?}"));
        if before != after {
            tracing::debug!(client = self.name, ?before, ?after, "the session's phase");
        }
        *phase = after;
    }

    pub(in crate::server) fn phase(&self) -> Phase {
        *self.phase.lock()
    }

    /// Whether it has ended.
    pub(in crate::server) fn is_over(&self) -> bool {
        self.phase().is_closed()
    }

    /// Whether the session goes on, on the connection with this number.
    pub(in crate::server) fn is_at(&self, connection: u64) -> bool {
        let state = self.state.lock();
        state.connection == connection && !self.is_over()
    }

    /// Whether the client knows an inode, by the volume's number.
    pub(in crate::server) fn knows(&self, state: &State, ino: Ino) -> bool {
        ino == self.root || state.known.contains_key(&ino)
    }

    /// The volume's number of an inode that the client may use.
    pub(in crate::server) fn volume_ino(&self, ino: Ino) -> Option<Ino> {
        self.known_in(&self.state.lock(), ino)
    }

    pub(super) fn known_in(&self, state: &State, ino: Ino) -> Option<Ino> {
        if ino == ROOT { Some(self.root) } else { state.known.contains_key(&ino).then_some(ino) }
    }

    /// The number under which the client knows an inode.
    pub(in crate::server) fn client_ino(&self, ino: Ino) -> Ino {
        if ino == self.root { ROOT } else { ino }
    }

    /// Whether its client may acknowledge changes early. Others get no reservations.
    pub(in crate::server) fn may_acknowledge_early(&self) -> bool {
        !self.read_only && self.peer.limits.is_none()
    }
}

/// The sessions by number.
pub(in crate::server) type Sessions = Mutex<HashMap<u128, Arc<Session>>>;
