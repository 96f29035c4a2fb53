//! A client's session: what it knows and has open, and the ordered stream.
//!
//! Rules, each with a test in `tests/`:
//! * SESSION-1: changes are applied in the order of their numbers, one at a time, each once. A new
//!   connection begins with the answers that are kept; a number that comes again is not applied
//!   again; one that leaves a gap, or whose answer the client has said to have, ends the session.
//! * SESSION-2: an answer is kept until the client says that it has it; it may have no more than
//!   `WINDOW_OPS` changes without answer.
//! * SESSION-3: a session outlives its connections. The newest connection is the one that counts:
//!   what an older one still brings changes nothing and takes no lock, for the newer one brings it
//!   again.
//! * SESSION-4: the file system counts one lookup for each inode that a session knows, however many
//!   answers named it.
//! * SESSION-6: a session that may promise is entered on the volume first, and from then on each
//!   change leaves its number there, promised or not: so a server that takes the place of one that
//!   crashed knows whom to wait for, and what is there already. The session that comes then has the
//!   old number, and its changes go on counting.
//! * SESSION-5: a promise that cannot be kept ends the series of changes that it belongs to:
//!   nothing of that is made behind it.

use crate::rt::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::rt::{Mutex, RwLock, RwLockReadGuard};
use ferry_env::Clock;
use ferry_env::planted::{Bug, is_planted};
use ferry_fs::{Attr, Errno, Filesystem, Ino, ROOT, SessionStore, Timestamp};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::durability::{MUCH_BYTES, MUCH_CHANGES};
use super::leases::Leases;
use super::locks::Locks;
use super::provisions::Provisions;
use super::walls::Walls;
use crate::codec::List;
use crate::frame;
use crate::limits::Peer;
use crate::message::{
    BATCH_MAX, Made, OPEN_MAX, Op, Outcome, Place, Promised, ToClient, WINDOW_OPS, Who,
};

/// No more answers wait for company,
const OUTBOX_ANSWERS_MAX: usize = 64;
/// and no more bytes of them.
const OUTBOX_BYTES_MAX: usize = 32 << 10;
/// So much that a client is told unasked is on its way; more is not said.
const NOTICES_MAX: usize = 16;
/// Answers of so many bytes do not delay shorter ones.
const BULK_MIN: usize = 8 << 10;
/// A client gives leases back behind changes that are so many ahead of what has come.
const AHEAD_MAX: u64 = 1 << 17;
/// Of names that others have taken away between two pings a client is told of the newest, so many
/// bytes of them.
const GONE_BYTES_MAX: usize = 2 << 20;
/// Changes of a session, and KiB of them, that may restore it after a crash: for what comes beyond
/// them it is not waited for.
const RESTORING_MAX: u64 = 4 << 20;
const RESTORING_KIB_MAX: u64 = 1 << 20;
/// So many bytes that have arrived are progress, too: the next message may be a long one, on a slow
/// line.
const PROGRESS_BYTES: u64 = 4 << 10;
/// Bytes of such a name beside the name itself.
const GONE_BYTES: usize = 64;

/// Room in the window, held from a message's arrival until its answer is on its way.
pub(super) type Room = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// Room for one more, if there is any.
pub(super) fn one_of(semaphore: &Arc<Semaphore>) -> Option<Room> {
    let one = Arc::clone(semaphore).try_acquire_owned().ok()?;
    let nothing = Arc::clone(semaphore).try_acquire_many_owned(0).ok()?;
    Some((one, nothing))
}
/// Frames to be sent.
pub(super) type Line = crate::lanes::Line<Vec<Room>>;

/// The client has broken the rules.
#[derive(Debug)]
pub(super) struct Violation(pub(super) &'static str);

/// An open file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    pub(super) ino: Ino,
    /// The file system's number for it.
    pub(super) fh: u64,
    pub(super) writes: bool,
    pub(super) reads: bool,
    /// A lock on the file was lost: everything but closing fails.
    pub(super) lost: bool,
}

/// What the server says of itself to each connection.
pub(super) struct Greeting {
    pub(super) boot: u128,
    pub(super) term_ms: u32,
    pub(super) clock: Arc<dyn Clock>,
}

/// How a change ended.
pub(super) struct Applied {
    pub(super) outcome: Outcome,
    /// What the client may keep.
    pub(super) after: Vec<Attr>,
    pub(super) empty: bool,
    pub(super) made: Option<Made>,
}

impl Applied {
    /// Nothing of it may be kept.
    pub(super) fn alone(outcome: Outcome) -> Self {
        Self { outcome, after: Vec::new(), empty: false, made: None }
    }

    /// The inode that was made, as the volume numbers it.
    pub(super) fn after_made(&self, session: &Session) -> Option<Ino> {
        match &self.outcome {
            Outcome::Entry { known: Some(known) } => session.inward(known.attr.ino),
            _ => None,
        }
    }

    pub(super) fn failed(Errno(errno): Errno) -> Self {
        Self::alone(Outcome::Failed { errno })
    }
}

/// A change that waits for its turn.
pub(super) struct Change {
    pub(super) seq: u64,
    pub(super) series: u32,
    pub(super) promised: Option<Promised>,
    /// When it came, and how long its message was.
    pub(super) came: Duration,
    pub(super) bytes: usize,
    pub(super) who: Who,
    pub(super) op: Op,
    pub(super) room: Room,
}

/// A request that waits for a change.
pub(super) struct Delayed {
    after: u64,
    run: Box<dyn FnOnce() + Send>,
}

/// Whether a session has a mark on the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Enlisted {
    No,
    Yes,
    /// Not any more: it has lost its leases without a word of its own.
    Fenced,
}

/// What a session does of what the server waits for after a crash.
#[derive(Default)]
struct Restoring {
    /// When it came, or came on.
    at: Duration,
    /// The newest change that restores it.
    newest: u64,
    /// So many more changes of it may count.
    changes_left: u64,
    /// Bytes that had arrived when they counted last.
    counted: u64,
}

#[derive(Default)]
struct State {
    /// Inodes, each with the number of the newest answer that named it.
    known: HashMap<Ino, u64>,
    stamp: u64,
    handles: HashMap<u64, Open>,
    received: u64,
    /// The newest change behind which leases were given back.
    owed: u64,
    applied: u64,
    answers: VecDeque<(u64, Outcome, Option<Made>)>,
    queue: VecDeque<Change>,
    /// When the change came that is being applied, and its bytes.
    under_way: Option<(Duration, usize)>,
    /// Bytes of changes in the queue.
    queued: usize,
    delayed: Vec<Delayed>,
    /// Names of inodes in `known` that others have taken away since the last ping, and their bytes.
    gone: (VecDeque<Place>, usize),
    /// The session was taken up, with this mark, and no change has come yet: the client may not
    /// have heard of it.
    taken_up: Option<u64>,
    /// A thread applies the queue.
    busy: bool,
    /// How far it is restored after a crash, while the server waits for that.
    restoring: Restoring,
    /// When it claimed anything last.
    claimed_at: Option<Duration>,
    /// The change that is to be applied waits for clients that make again what they had promised.
    at_gate: bool,
    /// Changes up to this one are durable.
    durable: u64,
    /// The newest change that was made and that the client keeps.
    promised: u64,
    /// Such changes since a sync began last, their bytes, and when the first came.
    unsynced: (u64, usize),
    unsynced_since: Option<Duration>,
    line: Option<Line>,
    /// Where the newest connection comes from.
    from: Option<SocketAddr>,
    /// Answers that nobody waits for, and their room: they go before whatever is sent next, at the
    /// latest when no more changes wait.
    outbox: (Vec<u8>, Vec<Room>),
    /// Counts connections.
    epoch: u64,
    /// When the last connection went.
    left_at: Option<Duration>,
    /// Changes that come now are for the next server.
    deaf: bool,
}

/// What a client mounts.
pub(super) struct Mounted {
    pub(super) path: Vec<u8>,
    /// The directory that the client sees as its root.
    pub(super) root: Ino,
    pub(super) read_only: bool,
    /// `None`: there is nothing that they would keep it from.
    pub(super) walls: Option<Walls>,
}

/// The session.
pub(super) struct Session {
    pub(super) id: u128,
    /// What people call it: 1, 2, 3, … since the server's start.
    pub(super) number: u64,
    /// What the client calls itself.
    pub(super) name: String,
    /// Who it is. Another one does not get the session.
    pub(super) peer: Peer,
    pub(super) path: Vec<u8>,
    /// The directory that the client sees as its root.
    pub(super) root: Ino,
    pub(super) read_only: bool,
    pub(super) walls: Option<Walls>,
    /// The connection that may take locks; `None`: the session has ended. Locked before `state`,
    /// and held while a lock is taken: no older connection takes one behind the newest, none
    /// outlives the session.
    locker: RwLock<Option<u64>>,
    state: Mutex<State>,
    /// What it promises out of.
    pub(super) provisions: Provisions,
    /// Whether it has a mark on the volume. Locked behind the leases, by whoever fences it, and
    /// `state` comes before those: so nothing of the session is locked under it.
    enlisted: Mutex<Enlisted>,
    /// It has ended. Set under the lock of `state`, so that it stays as it is for who has that.
    over: AtomicBool,
    /// Room for what it is told unasked.
    notices: Arc<Semaphore>,
    /// It makes again what it had promised to a server that crashed. Held while one of these
    /// changes is made.
    redoing: RwLock<bool>,
    /// One of them could not be made.
    stumbled: AtomicBool,
    /// Bytes that have arrived, on whatever connection.
    pub(super) heard: Arc<AtomicU64>,
    /// It may have held file locks at the server before.
    had_locks: AtomicBool,
    /// It is entered on the volume as one that may hold file locks.
    locker_entered: Mutex<bool>,
}

impl Session {
    pub(super) fn new(
        (id, number): (u128, u64),
        name: String,
        peer: Peer,
        Mounted { path, root, read_only, walls }: Mounted,
    ) -> Self {
        let (locker, state, provisions) =
            (RwLock::new(Some(0)), Mutex::default(), Provisions::default());
        let (enlisted, over, redoing) =
            (Mutex::new(Enlisted::No), AtomicBool::new(false), RwLock::new(false));
        Self {
            id,
            number,
            name,
            peer,
            path,
            root,
            read_only,
            walls,
            locker,
            state,
            provisions,
            enlisted,
            over,
            notices: Arc::new(Semaphore::new(NOTICES_MAX)),
            redoing,
            stumbled: AtomicBool::new(false),
            heard: Arc::default(),
            had_locks: AtomicBool::new(false),
            locker_entered: Mutex::new(false),
        }
    }

    /// It may have held file locks at the server before. `same`: under the same number.
    pub(super) fn reclaims_locks(&self, same: bool) {
        self.had_locks.store(true, Ordering::SeqCst);
        *self.locker_entered.lock() = same;
    }

    /// Whether it may have held file locks at the server before.
    pub(super) fn had_locks(&self) -> bool {
        self.had_locks.load(Ordering::SeqCst)
    }

    /// It is about to take a file lock: the next server has to know. Waits for the device, once.
    /// Where that cannot be noted, it reclaims nothing from the next one.
    pub(super) fn enter_locker(&self, fs: &dyn SessionStore) {
        let mut entered = self.locker_entered.lock();
        if !*entered && !self.is_over() {
            *entered = fs.add_lock_holder(self.id).is_ok();
        }
    }

    /// It has ended, and reclaims nothing: that is durable before others get its locks.
    pub(super) fn remove_locker(&self, fs: &dyn SessionStore) {
        let mut entered = self.locker_entered.lock();
        if *entered {
            *entered = fs.remove_lock_holders(&[self.id]).is_err();
        }
    }

    /// Whether it is entered as one that may hold locks.
    pub(super) fn is_locker(&self) -> bool {
        *self.locker_entered.lock()
    }

    /// A lock on this file was lost: what it has open of it is of no use any more.
    pub(super) fn lose(&self, ino: Ino) {
        let mut state = self.state.lock();
        state.handles.values_mut().filter(|open| open.ino == ino).for_each(|open| open.lost = true);
    }

    /// The same session as at a server that crashed, which has left this mark, and this word of how
    /// far it was durable.
    pub(super) fn take_up(&self, (mark, durable): (u64, u64), now: Duration) {
        *self.enlisted.lock() = Enlisted::Yes;
        *self.redoing.write() = true;
        let mut state = self.state.lock();
        (state.taken_up, state.durable) = (Some(mark), durable);
        state.restoring =
            Restoring { at: now, changes_left: RESTORING_MAX, ..Restoring::default() };
    }

    /// Whether nothing of what the server waits for has come for so long. As long as the server
    /// itself has something to do, it is not the client that is late.
    pub(super) fn is_stalled(&self, now: Duration, most: Duration) -> bool {
        let heard = self.heard.load(Ordering::Relaxed);
        let mut state = self.state.lock();
        let busy = state.restoring.newest > state.applied && !state.at_gate;
        let restoring = &mut state.restoring;
        let arrives =
            heard - restoring.counted >= PROGRESS_BYTES && heard >> 10 <= RESTORING_KIB_MAX;
        if restoring.changes_left > 0 && (busy || arrives) {
            (restoring.at, restoring.counted) = (now, heard);
        }
        now.saturating_sub(restoring.at) > most
    }

    /// Whether it makes again what it had promised: as long as the guard lives, if it says so.
    pub(super) fn redoing(&self) -> RwLockReadGuard<'_, bool> {
        self.redoing.read()
    }

    /// It makes nothing again any more.
    pub(super) fn redone(&self) {
        *self.redoing.write() = false;
        self.provisions.forget_old();
        self.stumbled.store(false, Ordering::SeqCst);
    }

    /// One of the changes that are made again could not be.
    pub(super) fn stumble(&self) {
        self.stumbled.store(true, Ordering::SeqCst);
    }

    /// Whether that is so since it began.
    pub(super) fn has_stumbled(&self) -> bool {
        self.stumbled.load(Ordering::SeqCst)
    }

    /// Enters it on the volume, so that it is waited for after a crash. Waits for the device, once.
    /// `promised`: for a change of the series that goes on.
    pub(super) fn enlist(&self, fs: &dyn SessionStore, promised: bool) -> Result<(), Errno> {
        let mut enlisted = self.enlisted.lock();
        match *enlisted {
            Enlisted::No => {}
            Enlisted::Fenced if promised => {}
            Enlisted::Yes | Enlisted::Fenced => return Ok(()),
        }
        if self.is_over() {
            return Err(Errno(libc::EIO));
        }
        fs.add_session(self.id)?;
        *enlisted = Enlisted::Yes;
        Ok(())
    }

    /// Whether its client may promise anything: others get nothing to promise it out of.
    pub(super) fn may_promise(&self) -> bool {
        !self.read_only && self.peer.limits.is_none()
    }

    /// Whether it is: then all that it changes leaves marks, and is durable soon.
    pub(super) fn is_enlisted(&self) -> bool {
        *self.enlisted.lock() == Enlisted::Yes
    }

    /// Others may change what it has promised: it makes nothing of it again. Not before it has
    /// heard of it and promises anew.
    pub(super) fn fence(&self, fs: &dyn SessionStore) {
        let mut enlisted = self.enlisted.lock();
        if std::mem::replace(&mut *enlisted, Enlisted::Fenced) == Enlisted::Yes {
            fs.remove_session(self.id);
        }
    }

    /// It has ended: nobody waits for it after a crash any more.
    pub(super) fn unmark(&self, fs: &dyn SessionStore) {
        if *self.enlisted.lock() == Enlisted::Yes {
            fs.remove_session(self.id);
        }
    }

    /// A change was made that the client keeps until it is durable. Whether that is much.
    pub(super) fn promised(&self, seq: u64, bytes: usize, now: Duration) -> bool {
        let mut state = self.state.lock();
        state.promised = seq;
        state.unsynced.0 += 1;
        state.unsynced.1 += bytes;
        state.unsynced_since.get_or_insert(now);
        state.unsynced.0 >= MUCH_CHANGES || state.unsynced.1 >= MUCH_BYTES
    }

    /// A sync is about to begin: the newest change that it covers, and not what was refused behind
    /// that. `None`: the client keeps nothing that is not durable.
    pub(super) fn note(&self, now: Duration) -> Option<u64> {
        let mut state = self.state.lock();
        if state.promised <= state.durable {
            return None;
        }
        state.unsynced = (0, 0);
        state.unsynced_since = Some(now);
        Some(state.promised)
    }

    /// Another client is about to sync an inode: the newest change that this covers, if this client
    /// may keep some that touch it.
    pub(super) fn note_of(&self, ino: Ino) -> Option<u64> {
        let state = self.state.lock();
        (state.promised > state.durable && self.knows(&state, ino)).then_some(state.promised)
    }

    /// It has: the client is told, unless it hears too much already. All becomes durable soon, and
    /// it is told of that.
    pub(super) fn was_synced(&self, ino: Ino, seq: u64) {
        let Some(room) = one_of(&self.notices) else { return };
        let mut state = self.state.lock();
        if seq > state.durable {
            let synced = ToClient::Synced { ino: self.outward(ino), seq };
            send(&mut state, frame::encode(&synced), Some(room));
        }
    }

    /// Another client finds no space: this one is to give back what it does not need, and to forget
    /// files that have no name any more. Not if it has nothing of either, or hears too much
    /// already.
    pub(super) fn lacks(&self) {
        let [credit, _] = self.provisions.figures();
        let mut state = self.state.lock();
        if credit == (0, 0) && state.gone.0.is_empty() {
            return;
        }
        let Some(room) = one_of(&self.notices) else { return };
        let names: Vec<Place> = std::mem::take(&mut state.gone).0.into();
        let frames = [gone(&names), frame::encode(&ToClient::Lack {})].concat();
        send(&mut state, frames, Some(room));
    }

    /// Changes up to this one are durable: the client is told.
    pub(super) fn became_durable(&self, seq: u64) {
        let mut state = self.state.lock();
        if seq <= state.durable {
            return;
        }
        state.durable = seq;
        if state.promised <= seq {
            state.unsynced_since = None;
        }
        send(&mut state, frame::encode(&ToClient::Durable { seq }), None);
    }

    /// Changes up to this one are durable.
    pub(super) fn durable(&self) -> u64 {
        self.state.lock().durable
    }

    /// The change that is to be applied waits, or goes on.
    pub(super) fn set_at_gate(&self, waits: bool) {
        self.state.lock().at_gate = waits;
    }

    /// A new connection takes over; it is told before anything else is sent to it. What waits for
    /// locks is asked again there. Gives its number; `None`: the session is over.
    pub(super) fn connect(
        &self,
        (line, from): (&Line, Option<SocketAddr>),
        greeting: &Greeting,
        (resumed, newest): (bool, u64),
        (locks, leases): (&Locks, &Leases),
    ) -> Option<u64> {
        let mut locker = self.locker.write();
        let mut state = self.state.lock();
        if self.is_over() {
            return None;
        }
        // Where it is taken up, its changes go on counting from those that the server before was
        // told of, or would have been.
        let mark = state.taken_up;
        if mark.is_some() {
            (state.received, state.applied) = (newest, newest);
        }
        let resumed = resumed && mark.is_none();
        // Its greeting says that it relies on none.
        let series = leases.begin(self.number, self.client_id(from));
        let (session, read_only, applied) = (self.id, self.read_only, state.applied);
        let Greeting { boot, term_ms, clock } = greeting;
        let (boot, term_ms) = (*boot, *term_ms);
        let now = wall(&**clock);
        let promises = self.peer.limits.is_none();
        let welcome = ToClient::Welcome {
            session,
            boot,
            resumed,
            applied,
            durable: state.durable,
            read_only,
            promises,
            term_ms,
            series,
            now,
            mark,
        };
        line.send_first(frame::encode(&welcome), Vec::new());
        // What the last connection may have lost: in order, before any newer one.
        for (seq, outcome, made) in &state.answers {
            let (after, empty) = (List::default(), false);
            let (outcome, made) = (outcome.clone(), made.clone());
            let answer = ToClient::Changed { seq: *seq, after, empty, made, outcome };
            line.send_first(frame::encode(&answer), Vec::new());
        }
        state.epoch += 1;
        state.outbox = (Vec::new(), Vec::new());
        state.line = Some(line.clone());
        (state.from, state.left_at) = (from, None);
        let epoch = state.epoch;
        drop(state);
        *locker = Some(epoch);
        locks.cancel(self.id, None);
        Some(epoch)
    }

    /// Who it is, whatever session it has: its certificate or, if it has none, its address.
    fn client_id(&self, from: Option<SocketAddr>) -> u64 {
        let mut hasher = DefaultHasher::new();
        match from.map(|from| from.ip().to_canonical()) {
            _ if !self.peer.certificate.is_empty() => self.peer.certificate.hash(&mut hasher),
            Some(address) => address.hash(&mut hasher),
            None => self.number.hash(&mut hasher),
        }
        hasher.finish()
    }

    /// Says in the log who has come.
    pub(super) fn log_arrival(&self, how: &str) {
        let (number, client, certificate) = (self.number, &self.name, self.peer.name.as_deref());
        let address = self.state.lock().from.map(|from| from.to_string());
        let path = String::from_utf8_lossy(&self.path);
        tracing::info!(number, client, certificate, address, %path, "{how}");
    }

    /// And who has gone.
    pub(super) fn log_departure(&self, from: Option<SocketAddr>, error: Option<&str>) {
        let (number, client, certificate) = (self.number, &self.name, self.peer.name.as_deref());
        tracing::info!(
            number,
            client,
            certificate,
            address = from.map(|from| from.to_string()),
            error,
            "disconnected"
        );
    }

    /// Leave for a connection (`None`: for a change, whichever brought it) to take a lock, while
    /// the guard is held.
    pub(super) fn may_lock(&self, epoch: Option<u64>) -> Option<RwLockReadGuard<'_, Option<u64>>> {
        let locker = self.locker.read();
        (locker.is_some() && epoch.is_none_or(|epoch| *locker == Some(epoch))).then_some(locker)
    }

    /// Answers a request of the connection with number `epoch`, unless another has taken over: it
    /// will be asked again there.
    pub(super) fn reply(
        &self,
        (epoch, id): (u64, u64),
        leased: u8,
        outcome: Outcome,
        room: Option<Room>,
    ) {
        let mut state = self.state.lock();
        if state.epoch != epoch {
            return;
        }
        let is_bulk = matches!(
            outcome,
            Outcome::Data { .. } | Outcome::Listing { .. } | Outcome::Walked { .. }
        );
        let frame = frame::encode(&ToClient::Reply { id, leased, outcome });
        if is_bulk && frame.len() >= BULK_MIN {
            // Nothing else may wait for it: neither a recall nor a ping's answer.
            send(&mut state, Vec::new(), None);
            if let Some(line) = &state.line {
                line.send(frame, room.into_iter().collect());
            }
        } else {
            send(&mut state, frame, room);
        }
    }

    /// The client is asked to give leases back. If there is no connection, the next one begins
    /// without any.
    pub(super) fn recall(&self, inodes: impl Iterator<Item = Ino>) {
        let inodes = List(inodes.map(|ino| self.outward(ino)).collect());
        send(&mut self.state.lock(), frame::encode(&ToClient::Recall { inodes }), None);
    }

    /// The client has given leases back, on the connection `epoch`, behind the change `after`. What
    /// an older one says is of leases that are no more, or are recalled again.
    pub(super) fn returned(
        &self,
        epoch: u64,
        (inodes, after): (&[Ino], u64),
        leases: &Leases,
    ) -> Result<(), Violation> {
        let mut state = self.state.lock();
        if state.epoch != epoch || state.deaf {
            return Ok(());
        }
        if after > state.received.saturating_add(AHEAD_MAX) {
            return Err(Violation("leases that are given back behind a change that is far ahead"));
        }
        state.owed = state.owed.max(after);
        let inward = |ino: &Ino| if *ino == ROOT { self.root } else { *ino };
        let inodes: Vec<Ino> = inodes.iter().map(inward).collect();
        // Whatever the client says: all that has come counts.
        let after = after.max(state.received);
        leases.give_back(self.number, &inodes, (after > state.applied).then_some(after));
        Ok(())
    }

    /// Whether it has given leases back behind a change that has not come.
    pub(super) fn owes_changes(&self) -> bool {
        let state = self.state.lock();
        state.owed > state.received
    }

    /// The connection with this number has gone, unless another has taken over. Nobody waits for
    /// locks any more.
    pub(super) fn disconnect(&self, epoch: u64, now: Duration, locks: &Locks) {
        let _locker = self.locker.write();
        {
            let mut state = self.state.lock();
            if state.epoch != epoch {
                return;
            }
            state.line = None;
            state.outbox = (Vec::new(), Vec::new());
            state.left_at = Some(now);
        }
        locks.cancel(self.id, None);
    }

    /// Takes a change in; `true`: the caller has to see that [`Session::next`] is called until it
    /// gives nothing.
    pub(super) fn push(
        &self,
        epoch: u64,
        change: Change,
        answered: u64,
        leases: &Leases,
    ) -> Result<bool, Violation> {
        let mut state = self.state.lock();
        if self.is_over() {
            return Err(Violation("the session has ended"));
        }
        if state.epoch != epoch || state.deaf {
            return Ok(false); // SESSION-3; and after a goodbye it goes to the next server
        }
        if answered > state.applied || change.seq.saturating_sub(answered) > WINDOW_OPS as u64 {
            return Err(Violation(
                "answers that were not given, or more changes than the window holds",
            ));
        }
        while state.answers.front().is_some_and(|(seq, ..)| *seq <= answered) {
            state.answers.pop_front();
        }
        let seq = change.seq;
        if seq <= state.applied && is_planted(Bug::AppliedTwice) {
            state.queued += change.bytes;
            state.queue.push_back(change);
            return Ok(!std::mem::replace(&mut state.busy, true));
        }
        if seq <= state.applied {
            // The answer was sent again when the connection began.
            let kept = state.answers.front().is_some_and(|(first, ..)| *first <= seq);
            return if kept {
                Ok(false)
            } else {
                Err(Violation("a change again whose answer had arrived"))
            };
        }
        if seq <= state.received {
            return Ok(false); // in the queue: it is answered on the newest connection
        }
        if seq != state.received + 1 {
            return Err(Violation("a gap in the changes"));
        }
        if change.series > leases.series(self.number) {
            return Err(Violation("a series of changes that has not begun"));
        }
        if state.restoring.changes_left > 0 {
            state.restoring.changes_left -= 1;
            if change.promised.is_some() || change.op.info().restores {
                (state.restoring.at, state.restoring.newest) = (change.came, seq);
            }
        }
        (state.received, state.taken_up) = (seq, None);
        state.queued += change.bytes;
        state.queue.push_back(change);
        Ok(!std::mem::replace(&mut state.busy, true))
    }

    /// The next change to apply; `None`: there is none, and nobody applies any more.
    pub(super) fn next(&self) -> Option<Change> {
        let mut state = self.state.lock();
        let change = if self.is_over() { None } else { state.queue.pop_front() };
        state.busy = change.is_some();
        state.under_way = change.as_ref().map(|change| (change.came, change.bytes));
        state.queued -= change.as_ref().map_or(0, |change| change.bytes);
        change
    }

    /// A change has been applied. Where its client had `promised` it, the answer may wait for those
    /// behind it.
    pub(super) fn applied(&self, seq: u64, applied: Applied, room: Room, promised: bool) {
        self.answer(seq, applied, Some(room), promised);
    }

    /// The next change has to wait: what was answered goes now.
    pub(super) fn send_answers(&self) {
        send(&mut self.state.lock(), Vec::new(), None);
    }

    /// The server ends because of a change: it is not to be sent again.
    pub(super) fn say_fatal(&self, seq: u64, room: Option<Room>) {
        send(&mut self.state.lock(), frame::encode(&ToClient::Fatal { seq }), room);
    }

    /// A change has panicked, before it was answered or behind that.
    pub(super) fn fallen(&self, seq: u64, outcome: Outcome) {
        self.answer(seq, Applied::alone(outcome), None, false);
    }

    fn answer(&self, seq: u64, applied: Applied, room: Option<Room>, patient: bool) {
        let Applied { outcome, after, empty, made } = applied;
        let ready: Vec<Delayed> = {
            let mut state = self.state.lock();
            if self.is_over() || state.applied >= seq {
                return;
            }
            state.applied = seq;
            let (after, kept) = (List(after), (seq, outcome.clone(), made.clone()));
            let frame = frame::encode(&ToClient::Changed { seq, after, empty, made, outcome });
            state.answers.push_back(kept);
            let (answers, rooms) = &mut state.outbox;
            answers.extend_from_slice(&frame);
            rooms.extend(room);
            let full = answers.len() >= OUTBOX_BYTES_MAX || rooms.len() >= OUTBOX_ANSWERS_MAX;
            if full || !patient || state.queue.is_empty() {
                send(&mut state, Vec::new(), None);
            }
            state.delayed.extract_if(.., |d| d.after <= seq).collect()
        };
        ready.into_iter().for_each(|d| (d.run)());
    }

    /// Runs `run` when the change `after` has been applied.
    pub(super) fn when_applied(&self, after: u64, run: Box<dyn FnOnce() + Send>) {
        {
            let mut state = self.state.lock();
            if after > state.applied && !self.is_over() {
                state.delayed.push(Delayed { after, run });
                return;
            }
        }
        run();
    }

    /// An answer names `ino`, whose lookup the file system has counted, and which is no directory
    /// and was found in `dir` (0: it is one, or nobody knows). Gives the stamp.
    pub(super) fn learn(&self, fs: &dyn Filesystem, ino: Ino, dir: Ino) -> u64 {
        self.found_in(ino, dir);
        let (stamp, surplus) = {
            let mut state = self.state.lock();
            state.stamp += 1;
            let stamp = state.stamp;
            let surplus =
                self.is_over() || ino == self.root || state.known.insert(ino, stamp).is_some();
            (stamp, surplus)
        };
        if surplus {
            fs.forget(ino, 1);
        }
        stamp
    }

    /// The client has found an inode, which is no directory, in `dir` (0: it is one, or nobody
    /// knows).
    pub(super) fn found_in(&self, ino: Ino, dir: Ino) {
        if let Some(walls) = self.walls.as_ref().filter(|_| dir != 0) {
            walls.found(ino, dir);
        }
    }

    /// In which directory the client has found an inode that it knows; 0: that is not known, or
    /// nobody needs it.
    pub(super) fn where_found(&self, ino: Ino) -> Ino {
        self.walls.as_ref().and_then(|walls| walls.where_found(ino)).unwrap_or(0)
    }

    /// The client has claimed these, whose lookups the file system has counted. Gives the stamp.
    pub(super) fn learn_again(&self, fs: &dyn Filesystem, inos: &[Ino], now: Duration) -> u64 {
        let (stamp, surplus) = {
            let mut state = self.state.lock();
            state.stamp += 1;
            let (stamp, over) = (state.stamp, self.is_over());
            let mut learn =
                |ino: &Ino| over || *ino == self.root || state.known.insert(*ino, stamp).is_some();
            let surplus: Vec<Ino> = inos.iter().copied().filter(|ino| learn(ino)).collect();
            if surplus.len() < inos.len() {
                state.claimed_at = Some(now);
            }
            (stamp, surplus)
        };
        surplus.into_iter().for_each(|ino| fs.forget(ino, 1));
        stamp
    }

    /// Whether it has claimed anything behind `since`, so that it may claim more.
    pub(super) fn has_claimed(&self, since: Duration) -> bool {
        self.state.lock().claimed_at.is_some_and(|at| at > since)
    }

    /// Another client has taken these names away from some of these inodes.
    pub(super) fn lose_names(&self, inos: &[Ino], names: &[Place]) {
        let mut state = self.state.lock();
        let knows = |ino: &Ino| self.knows(&state, *ino);
        let is_dir = |ino: &Ino| names.iter().any(|name| name.parent == *ino);
        if self.is_over() || !inos.iter().any(|ino| !is_dir(ino) && knows(ino)) {
            return;
        }
        let known: Vec<&Place> = names.iter().filter(|name| knows(&name.parent)).collect();
        for Place { parent, name } in known {
            let (gone, bytes) = &mut state.gone;
            gone.push_back(Place { parent: self.outward(*parent), name: name.clone() });
            *bytes += GONE_BYTES + name.len();
            while *bytes > GONE_BYTES_MAX
                && let Some(oldest) = gone.pop_front()
            {
                *bytes -= GONE_BYTES + oldest.name.len();
            }
        }
    }

    /// Says which names others have taken away since this was said last.
    pub(super) fn take_lost_names(&self) -> Vec<u8> {
        let names: Vec<Place> = std::mem::take(&mut self.state.lock().gone).0.into();
        gone(&names)
    }

    /// The client forgets an inode, unless an answer that it had not seen has named it again.
    pub(super) fn forget(&self, fs: &dyn Filesystem, ino: Ino, stamp: u64) {
        let gone = {
            let mut state = self.state.lock();
            let gone = state.known.get(&ino).is_some_and(|newest| *newest <= stamp);
            if gone {
                state.known.remove(&ino);
            }
            gone
        };
        if gone {
            if let Some(walls) = &self.walls {
                walls.forget(ino);
            }
            fs.forget(ino, 1);
        }
    }

    /// Whether the client knows an inode, by the volume's number.
    fn knows(&self, state: &State, ino: Ino) -> bool {
        ino == self.root || state.known.contains_key(&ino)
    }

    /// The volume's number of an inode that the client may use.
    pub(super) fn inward(&self, ino: Ino) -> Option<Ino> {
        if ino == ROOT {
            return Some(self.root);
        }
        self.state.lock().known.contains_key(&ino).then_some(ino)
    }

    /// The number under which the client knows an inode.
    pub(super) fn outward(&self, ino: Ino) -> Ino {
        if ino == self.root { ROOT } else { ino }
    }

    /// Enters an open file, unless its number is in use or there are too many.
    pub(super) fn open(&self, number: u64, open: Open) -> Result<(), Errno> {
        let mut state = self.state.lock();
        if self.is_over() || state.handles.contains_key(&number) {
            return Err(Errno(libc::EIO));
        }
        if state.handles.len() >= OPEN_MAX {
            return Err(Errno(libc::ENFILE));
        }
        state.handles.insert(number, open);
        Ok(())
    }

    pub(super) fn is_open(&self, number: u64) -> bool {
        self.state.lock().handles.contains_key(&number)
    }

    pub(super) fn handle(&self, number: u64) -> Option<Open> {
        self.state.lock().handles.get(&number).copied()
    }

    /// A file system's number under which the client has an inode open.
    pub(super) fn handle_of(&self, ino: Ino) -> Option<u64> {
        let state = self.state.lock();
        state.handles.values().find(|open| open.ino == ino).map(|open| open.fh)
    }

    pub(super) fn release(&self, number: u64) -> Option<Open> {
        self.state.lock().handles.remove(&number)
    }

    /// Ends the session, or only if it has been without a connection since `left`. A change that is
    /// being applied is the last one, and its locks are held until then.
    pub(super) fn end(&self, left: Option<Duration>, locks: &Locks) -> bool {
        let mut locker = self.locker.write();
        {
            let mut state = self.state.lock();
            if left.is_some_and(|deadline| state.left_at.is_none_or(|at| at > deadline)) {
                return false;
            }
            self.over.store(true, Ordering::SeqCst);
            state.line = None;
            state.outbox = (Vec::new(), Vec::new());
            state.queue.clear();
            state.queued = 0;
            state.delayed.clear();
            state.gone = (VecDeque::new(), 0);
        }
        *locker = None;
        self.provisions.end();
        locks.cancel(self.id, None);
        true
    }

    /// Whether one of its changes is being applied, or waits for its turn.
    pub(super) fn is_applying(&self) -> bool {
        self.state.lock().busy
    }

    /// Takes no more changes; those that it has are applied.
    pub(super) fn close_ears(&self) {
        self.state.lock().deaf = true;
    }

    /// The last word to a client.
    pub(super) fn say_last(&self, word: &ToClient) {
        let mut state = self.state.lock();
        send(&mut state, frame::encode(word), None);
        state.line = None;
    }

    /// Whether a change waits or is being applied; but for other clients that make something again.
    pub(super) fn is_busy(&self) -> bool {
        let state = self.state.lock();
        state.busy && !state.at_gate
    }

    /// Whether it goes on, on the connection with this number.
    pub(super) fn is_at(&self, epoch: u64) -> bool {
        let state = self.state.lock();
        state.epoch == epoch && !self.is_over()
    }

    /// Whether it has ended.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Gives back what it holds of the file system. It has ended, so nothing is added any more.
    pub(super) fn clear(&self, fs: &dyn Filesystem) {
        let (handles, known) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.handles), std::mem::take(&mut state.known))
        };
        let caller = ferry_fs::InProcess::default();
        for open in handles.into_values() {
            let _: Result<(), _> = caller.call(|cx| {
                fs.release(cx, open.ino, open.fh);
                Ok(())
            });
        }
        known.into_keys().for_each(|ino| fs.forget(ino, 1));
    }

    /// For `ferry clients`.
    pub(super) fn json(&self, now: Duration) -> Value {
        let [(credit_bytes, credit_inodes), (aside_bytes, aside_inodes)] =
            self.provisions.figures();
        let state = self.state.lock();
        let under_way = state.under_way;
        let bytes = state.queued + under_way.map_or(0, |(_, bytes)| bytes);
        let oldest =
            under_way.map(|(came, _)| came).or(state.queue.front().map(|change| change.came));
        let oldest = oldest.map(|came| now.saturating_sub(came));
        Value::from_iter([
            ("client", Value::from(self.number)),
            ("name", self.name.as_str().into()),
            ("certificate", self.peer.name.as_deref().into()),
            ("address", state.from.map(|from| from.to_string()).into()),
            ("path", String::from_utf8_lossy(&self.path).into()),
            ("read_only", self.read_only.into()),
            ("connected", state.line.is_some().into()),
            ("connections", state.epoch.into()),
            ("changes", state.applied.into()),
            ("unanswered", (state.received - state.applied).into()),
            ("unanswered_bytes", bytes.into()),
            ("oldest_ms", oldest.map(|age| age.as_millis() as u64).into()),
            ("answers_kept", state.answers.len().into()),
            (
                "promised_not_durable",
                if state.promised > state.durable { state.applied - state.durable } else { 0 }
                    .into(),
            ),
            (
                "promised_not_durable_ms",
                state.unsynced_since.map(|at| now.saturating_sub(at).as_millis() as u64).into(),
            ),
            ("credit_bytes", credit_bytes.into()),
            ("credit_inodes", credit_inodes.into()),
            ("aside_bytes", aside_bytes.into()),
            ("aside_inodes", aside_inodes.into()),
            ("inodes", state.known.len().into()),
            ("open_files", state.handles.len().into()),
        ])
    }
}

/// The messages that say which names are gone.
fn gone(names: &[Place]) -> Vec<u8> {
    let messages =
        names.chunks(BATCH_MAX).map(|batch| ToClient::Gone { names: List(batch.to_vec()) });
    messages.flat_map(|message| frame::encode(&message)).collect()
}

/// The time of day.
pub(super) fn wall(clock: &dyn Clock) -> Timestamp {
    Timestamp(i128::try_from(clock.wall().as_nanos()).unwrap_or(i128::MAX))
}

/// To the newest connection, if there is one, behind the answers that wait; a client that returns
/// asks again.
fn send(state: &mut State, frame: Vec<u8>, room: Option<Room>) {
    let (answers, mut rooms) = std::mem::take(&mut state.outbox);
    let Some(line) = &state.line else { return };
    rooms.extend(room);
    let frames = if answers.is_empty() { frame } else { [answers, frame].concat() };
    if !frames.is_empty() {
        line.send_first(frames, rooms);
    }
}

/// The sessions by number.
pub(super) type Sessions = Mutex<HashMap<u128, Arc<Session>>>;

#[cfg(test)]
mod tests;
