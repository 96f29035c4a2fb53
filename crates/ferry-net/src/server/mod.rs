//! The server: gives a file system to clients.
//!
//! `connection` speaks with one client, `session` is what remains of it between connections,
//! `apply` turns what it asks for into calls of the file system, `door` is for who has said nothing
//! yet, `locks` are the file locks of all of them, `leases` what they may keep, `turns` how a
//! change waits for them, `requests` how a request does, `refusals` who is not let in and why,
//! `walking` what is asked for ahead, `walls` what lies within an export, `provisions` are what it
//! may promise out of. `durability` makes durable what was promised, `gate` lets nobody pass after
//! a crash before those who had promised something have made it again, `fresh` knows whose changes
//! are not durable. `rights` is what a client may do whose certificate names its users.

mod apply;
mod connection;
mod door;
mod durability;
mod fresh;
mod gate;
mod keeping;
mod leases;
mod locks;
mod panics;
mod provisions;
mod refusals;
mod requests;
mod rights;
mod session;
mod turns;
mod walking;
mod walls;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::{Attr, InProcess, Ino, ROOT, SessionSeq, SessionStore, Statfs};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{oneshot, watch};

use crate::error::NetError;
use crate::frame::Stream;
use crate::limits::{Export, Limits, Peer};
use crate::message::ToClient;
use crate::tls::{self, Revocations, ServerTls, ends_soon};
use door::{Door, Stranger};
use durability::Durability;
use fresh::Fresh;
use gate::Gate;
use leases::Leases;
use locks::Locks;
pub(crate) use locks::set_range;
use panics::Panics;
pub use panics::panic_is_answered;
use refusals::Refusals;
pub(crate) use refusals::{Cause, Refusal};
use session::{CloseReason, Greeting, Line, Mounted, Session, Sessions};

/// Sessions at the same time, connected or not.
const SESSIONS_MAX: usize = 1024;
/// Of these with one certificate.
pub(crate) const SESSIONS_OF_CERTIFICATE_MAX: usize = 128;
/// Evicted sessions that are remembered.
const EVICTED_MAX: usize = 4096;
/// Threads that may wait for the device or the log on behalf of clients.
const THREADS_MAX: usize = 32;
/// Why an evicted client is not let in.
const EVICTED: &str = "the session was ended by the server's administrator (`ferry evict`)";
/// A TLS handshake must be complete after this time.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// How often it is looked whether the server's own certificate ends soon.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);
/// How often sessions are looked at whose client has gone.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);
/// A server that stops waits so long for operations that are under way.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);
/// And so long for clients to take their last answers.
const FAREWELL_TIME_MAX: Duration = Duration::from_secs(2);
/// Who makes something again after a crash is given up after so many holds without anything that it
/// does.
const STALL_HOLDS: u32 = 2;
/// How often it is looked for who is given up.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// A client that is not let in has so long to take the last words and to hang up.
const LAST_WORDS_TIME_MAX: Duration = Duration::from_secs(1);
/// How often it looks.
const STOP_INTERVAL: Duration = Duration::from_millis(5);
/// And how many times before it asks for leases again.
const RECALL_ROUND: u32 = 20;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// What clients may mount.
    pub exports: Vec<Export>,
    /// A session ends when its client has been away for so long.
    pub session_life: Duration,
    /// After its start the server gives for so long only locks that clients held before; and it
    /// changes nothing in this time, or in one term of a lease if that is shorter: clients that do
    /// not know yet that the server before is gone may rely on theirs. Not if that one has handed
    /// the volume over: it has stopped in order, and nobody does.
    pub grace: Duration,
    /// A client may keep what it was told for so long after the server heard of it last.
    pub lease_term: Duration,
    /// A secret of the volume, from which it is proved that a client may use an inode.
    pub key: [u8; 16],
}

impl ServerOptions {
    /// The term of a lease. A change waits no longer for a client that has gone without a word.
    pub const LEASE_TERM: Duration = Duration::from_secs(6);
}

/// What all connections share.
struct Core {
    fs: Arc<dyn SessionStore>,
    env: Env,
    exports: Vec<Export>,
    session_life: Duration,
    key: [u8; 16],
    greeting: Greeting,
    locks: Locks,
    leases: Arc<Leases>,
    durability: Durability,
    fresh: Fresh,
    gate: Gate,
    panics: Panics,
    sessions: Sessions,
    door: Arc<Door>,
    /// Held while a session is found or made.
    entering: Mutex<()>,
    /// Certificates that are not let in any more.
    revocations: Revocations,
    refusals: Refusals,
    /// Sessions so far.
    numbers: AtomicU64,
    /// Names so far that were moved from one directory to another.
    moves: AtomicU64,
    /// Sessions that nobody goes on with, as they stand on the volume, oldest first.
    evicted: Mutex<VecDeque<SessionSeq>>,
    runtime: Handle,
    stopping: watch::Sender<Stage>,
    /// Held by each connection that may still have something to send.
    writing: Arc<()>,
}

/// How far the server's end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Stage {
    Serving,
    /// Nothing more is taken.
    Draining,
    /// Everything was answered.
    Ended,
}

impl Stage {
    /// Whether the server has come so far.
    fn is_reached(self, at: &watch::Receiver<Stage>) -> bool {
        *at.borrow() >= self
    }

    /// Waits until the server has come so far.
    async fn reached(self, at: &mut watch::Receiver<Stage>) {
        // The sender lives as long as the server: an error is an end, too.
        let _reached = at.wait_for(|stage| *stage >= self).await.map(drop);
    }
}

impl Core {
    /// Finds the session that a client wants to go on with, or makes one.
    fn enter(
        &self,
        (id, newest): (u128, u64),
        (peer, from): (Peer, Option<SocketAddr>),
        path: &[u8],
        name: String,
        line: &Line,
    ) -> Result<(Arc<Session>, u64), Refusal> {
        let path = normal(path);
        let _entering = self.entering.lock();
        // Now, not when the connection was made: its client may have let time pass before it said
        // anything.
        let standing = self.revocations.standing(&peer, self.env.clock.wall());
        if self.evicted.lock().iter().any(|evicted| evicted.session == id) {
            let why = standing.err().map_or_else(|| EVICTED.to_owned(), |refusal| refusal.reason);
            return Err(Refusal::new(Cause::Evicted, why));
        }
        standing?;
        if let Some(ending) = peer.until.and_then(|until| ends_soon(until, self.env.clock.wall())) {
            tracing::warn!(
                certificate = peer.name,
                from = from.map(|from| from.to_string()),
                "the client's certificate {ending}"
            );
        }
        let old =
            self.sessions.lock().get(&id).filter(|s| s.peer == peer && s.path == path).cloned();
        if let Some(old) = old
            && let Some(epoch) = old.connect(
                (line, from),
                &self.greeting,
                (true, newest),
                (&self.locks, &self.leases),
            )
        {
            old.log_arrival("connected again");
            return Ok((old, epoch));
        }
        let shown = String::from_utf8_lossy(&path).into_owned();
        let of_server = walls::access(&[&self.exports], &path);
        let not_there = |reason: String| Refusal::new(Cause::Path, reason);
        of_server.ok_or_else(|| not_there(format!("the server does not export {shown}")))?;
        let lists = [&self.exports[..], &peer.exports].into_iter().filter(|list| !list.is_empty());
        let access = walls::access(&lists.collect::<Vec<_>>(), &path).ok_or_else(|| {
            let exports: Vec<String> = peer.exports.iter().map(Export::to_string).collect();
            not_there(format!(
                "the client's certificate is not for {shown}, but for {}",
                exports.join(",")
            ))
        })?;
        let root = self.resolve(&path, peer.limits.as_ref()).map_err(not_there)?;
        let walls = self.walls(&path, root, &access).map_err(not_there)?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let (all, of_certificate) = {
            let sessions = self.sessions.lock();
            let same = |session: &&Arc<Session>| session.peer.certificate == peer.certificate;
            (sessions.len(), sessions.values().filter(same).count())
        };
        if all >= SESSIONS_MAX {
            return Err(Refusal::new(Cause::Full, "the server has as many clients as it can take"));
        }
        if !peer.certificate.is_empty() && of_certificate >= SESSIONS_OF_CERTIFICATE_MAX {
            let reason = format!(
                "there are {of_certificate} mounts with this client's certificate, and no more are taken: unmount some, or `ferry evict` those that \
                 are gone"
            );
            return Err(Refusal::new(Cause::Full, reason));
        }
        let mark = self.marks_of(id, newest);
        let had_locks = self.locks.may_reclaim(id);
        let id = if mark.is_some() { id } else { random(&self.env) };
        let mounted = Mounted { path, root, read_only: access.read_only, walls };
        let session = Arc::new(Session::new((id, number), name, peer, mounted));
        if had_locks {
            session.reclaims_locks(mark.is_some());
        }
        if let Some(mark) = mark {
            session.take_up(mark, self.env.clock.monotonic());
        }
        self.sessions.lock().insert(session.id, Arc::clone(&session));
        let both = (&self.locks, &*self.leases);
        let epoch = session.connect((line, from), &self.greeting, (false, newest), both);
        let epoch = epoch.ok_or_else(|| Refusal::new(Cause::Server, "the server stops"))?;
        session.log_arrival(if mark.is_some() {
            "connected again, to another server"
        } else {
            "connected"
        });
        Ok((session, epoch))
    }

    /// How far the changes of a session came at a server that crashed, and how far they are
    /// durable, if it may make again what is missing.
    fn marks_of(&self, id: u128, newest: u64) -> Option<(u64, u64)> {
        if id == 0 || !self.gate.is_shut() {
            return None;
        }
        let mark = self.fs.last_applied(id).ok().flatten().filter(|mark| *mark <= newest)?;
        let durable = self.fs.durable_watermark(id).ok().filter(|durable| *durable <= newest)?;
        self.gate.come(id).then_some((mark, durable))
    }

    /// The directory at `path`, for a client with this certificate: some user of it may search each
    /// directory on the way. Symbolic links are not followed.
    fn resolve(&self, path: &[u8], limits: Option<&Limits>) -> Result<Ino, String> {
        let shown = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
        let missing = || format!("{}: no such directory on the server", shown(path));
        let attr = |ino| {
            InProcess::default().call(|cx| self.fs.getattr(cx, ino, None)).map(|(attr, _)| attr)
        };
        let is_dir = |attr: &Attr| attr.mode & libc::S_IFMT == libc::S_IFDIR;
        let (mut at, mut way) = (attr(ROOT).map_err(|_| missing())?, Vec::new());
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            if limits
                .is_some_and(|limits| is_dir(&at) && !rights::may_search(&*self.fs, limits, &at))
            {
                let dir = shown(&normal(&way));
                return Err(format!(
                    "the users of the client's certificate may not search {dir}: a certificate for others is needed (`ferry cert issue`), or \
                     another mode of that directory"
                ));
            }
            at = self.named(at.ino, name).ok_or_else(missing)?;
            way.push(b'/');
            way.extend_from_slice(name);
        }
        if is_dir(&at) { Ok(at.ino) } else { Err(missing()) }
    }

    /// What a name means, for nobody who would then know it.
    fn named(&self, dir: Ino, name: &[u8]) -> Option<Attr> {
        let found = InProcess::default().call(|cx| self.fs.lookup(cx, dir, name)).ok()?;
        found.attr.inspect(|attr| self.fs.forget(attr.ino, 1))
    }

    /// Ends a session, for whatever reason.
    fn end(&self, session: &Session, reason: CloseReason) {
        session.close(reason, &self.locks);
        self.release(session, reason);
    }

    /// A session has ended: what it holds is given back.
    fn release(&self, session: &Session, reason: CloseReason) {
        // In each other case the client may rely on its leases until their term is over.
        if reason == CloseReason::Left {
            self.leases.end(session.number);
        }
        // What the client may have shown to programs is still looked for by the next server.
        if reason == CloseReason::HandedOver {
            return self.remove(session);
        }
        // As long as it has a mark, a sync says how far it is durable.
        session.unmark(&*self.fs);
        self.free_locks(session);
        self.remove(session);
        self.gate.done(session.id);
    }

    /// A session has ended: its locks are free, unless one of its changes is still being made. Then
    /// they are when that is over.
    fn free_locks(&self, session: &Session) {
        if !session.is_applying() && !self.locks.is_closed() {
            session.remove_locker(&*self.fs);
            self.locks.end(session.id);
        }
    }

    /// Whoever has held a lock at the server before and has not come loses it.
    fn end_grace(&self) {
        let here: HashSet<u128> = self
            .all()
            .iter()
            .filter(|session| session.is_locker())
            .map(|session| session.id)
            .collect();
        let mut absent = self.locks.former();
        absent.retain(|id| !here.contains(id));
        if !absent.is_empty()
            && let Err(error) = self.fs.remove_lock_holders(&absent)
        {
            tracing::error!(%error, "clients that have lost their locks may take them for theirs at the next server");
        }
        self.locks.end_grace();
    }

    fn remove(&self, session: &Session) {
        self.sessions.lock().remove(&session.id);
        session.clear(&*self.fs);
    }

    /// The hold is over: clients that have not come by now can make nothing again.
    fn give_up_absent(&self) {
        for id in self.gate.give_up_absent() {
            tracing::warn!(
                "a client has not come back in time: what it had promised and was not durable is lost"
            );
            self.fs.remove_session(id);
        }
    }

    /// Who has not come in a hold since `began` is not waited for any longer, nor who has come and
    /// then done nothing of what is waited for.
    fn give_up_late(&self, began: Duration, hold: Duration) {
        let now = self.env.clock.monotonic();
        if now.saturating_sub(began) >= hold {
            self.give_up_absent();
        }
        let most = hold * STALL_HOLDS;
        for id in self.gate.awaited() {
            let session = self.sessions.lock().get(&id).cloned();
            if let Some(session) = session.filter(|session| session.is_stalled(now, most)) {
                tracing::warn!(
                    client = session.name,
                    "does not go on making again what it had promised"
                );
                self.disown(&session);
                session.give_up_replay();
                self.gate.done(id);
            }
        }
    }

    /// Until all is made again after a crash, or given up; whether the server still goes on then.
    async fn made_again(&self) -> bool {
        let (told, open) = oneshot::channel();
        self.gate.wait(Box::new(move || {
            let _gone = told.send(());
        }));
        open.await.is_ok()
    }

    /// Until nobody has claimed anything for so long.
    async fn all_claimed(&self, quiet: Duration) {
        let claims = || {
            let since = self.env.clock.monotonic().saturating_sub(quiet);
            self.all().iter().any(|session| session.has_claimed(since))
        };
        while claims() {
            tokio::time::sleep(EXPIRY_INTERVAL).await;
        }
    }

    /// Ends the sessions of that name or number, or with a certificate of that name, for good;
    /// gives how many.
    fn evict(&self, which: &str) -> usize {
        let mut all = self.all();
        all.retain(|session| {
            let certificate = session.peer.name.as_deref();
            session.name == which
                || certificate == Some(which)
                || session.number.to_string() == which
        });
        self.shut_out(&all, EVICTED);
        all.len()
    }

    /// Ends the sessions whose certificate was revoked: they would not come in again, and what they
    /// held is for others.
    fn end_revoked(&self) {
        let all = self.all();
        let revoked = self.revocations.revoked(all.iter().map(|session| &session.peer));
        if revoked.is_empty() {
            return;
        }
        let gone = |session: &Arc<Session>| revoked.contains(&session.peer.serial);
        let gone: Vec<Arc<Session>> = all.into_iter().filter(gone).collect();
        for session in &gone {
            tracing::warn!(
                client = session.name,
                certificate = session.peer.name,
                "its certificate was revoked"
            );
        }
        self.shut_out(&gone, "the client's certificate was revoked");
    }

    /// Ends these sessions for good. That stands on the volume before anybody gets what they held:
    /// none of them makes anything again at the next server, whatever becomes of this one.
    fn shut_out(&self, all: &[Arc<Session>], why: &str) {
        if all.is_empty() {
            return;
        }
        let noted = {
            let mut evicted = self.evicted.lock();
            let newest = evicted.back().map_or(0, |mark| mark.seq);
            let numbered = (newest + 1..)
                .zip(all)
                .map(|(seq, session)| SessionSeq { session: session.id, seq });
            let numbered: Vec<SessionSeq> = numbered.collect();
            evicted.extend(&numbered);
            let surplus = evicted.len().saturating_sub(EVICTED_MAX);
            let forgotten: Vec<u128> = evicted.drain(..surplus).map(|mark| mark.session).collect();
            // Under the lock: what stands there is what is here.
            self.fs.evict(&numbered, &forgotten)
        };
        if let Err(error) = noted {
            tracing::error!(%error, "an eviction could not be noted on the volume: when the server starts anew the client may come back");
        }
        for session in all {
            session.say_last(&ToClient::Evicted { reason: why.into() });
            self.end(session, CloseReason::Evicted);
            tracing::warn!(client = session.name, number = session.number, "evicted");
        }
    }

    /// Others may change what a session keeps, and it need not have heard that this is durable: it
    /// makes nothing of it again.
    fn disown(&self, session: &Session) {
        session.fence(&*self.fs);
        self.leases.disown(session.number);
    }

    /// Whether there is no second session.
    fn is_alone(&self) -> bool {
        self.sessions.lock().len() < 2
    }

    /// The sessions but one.
    fn others(&self, than: &Session) -> impl Iterator<Item = Arc<Session>> {
        let number = than.number;
        self.all().into_iter().filter(move |session| session.number != number)
    }

    /// What a client is shown of the volume's space: what is reserved for clients is free, for they
    /// give it back to who needs it.
    fn totals(&self, totals: Statfs) -> Statfs {
        let reserved: u64 = self.all().iter().map(|session| session.provisions.reserved()).sum();
        let blocks = reserved / u64::from(totals.block_size.max(1));
        let (free, available) = (totals.blocks_free + blocks, totals.blocks_available + blocks);
        Statfs {
            blocks_free: free.min(totals.blocks),
            blocks_available: available.min(totals.blocks),
            ..totals
        }
    }

    fn all(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().values().cloned().collect()
    }

    fn expire(&self) {
        let alive: HashSet<u64> =
            self.sessions.lock().values().map(|session| session.number).collect();
        self.leases.expire(&alive);
        let Some(deadline) = self.env.clock.monotonic().checked_sub(self.session_life) else {
            return;
        };
        for session in self.all() {
            if session.close_if_away(deadline, &self.locks) {
                self.release(&session, CloseReason::Away);
                tracing::warn!(
                    client = session.name,
                    "has been away for too long: its session has ended"
                );
            }
        }
    }
}

fn random(env: &Env) -> u128 {
    u128::from(env.entropy.next_u64()) << 64 | u128::from(env.entropy.next_u64())
}

/// Without empty components, `.` and a slash at the end; `..` is refused by finding nothing.
fn normal(path: &[u8]) -> Vec<u8> {
    let mut normal = Vec::new();
    for name in path.split(|b| *b == b'/').filter(|n| !n.is_empty() && *n != b".") {
        normal.push(b'/');
        normal.extend_from_slice(name);
    }
    if normal.is_empty() { b"/".to_vec() } else { normal }
}

/// Whether `path` is `base` or below it, both normal.
fn is_below(path: &[u8], base: &[u8]) -> bool {
    let climbs = path.split(|b| *b == b'/').any(|name| name == b"..");
    let inside =
        path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"));
    !climbs && (base == b"/" || inside)
}

/// A server. Dropping it ends it as a crash would, for the clients.
pub struct Server {
    core: Arc<Core>,
    runtime: Option<Runtime>,
}

impl Server {
    /// Starts to serve `fs`; clients come with [`Server::listen`].
    pub fn start(
        fs: Arc<dyn SessionStore>,
        options: ServerOptions,
        env: Env,
    ) -> Result<Self, NetError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(THREADS_MAX)
            .thread_name("ferry-server")
            .enable_all()
            .build()
            .map_err(NetError::Start)?;
        let locks = Locks::default();
        let lockers = fs.lock_holders();
        if options.grace.is_zero() {
            let _reported = fs.remove_lock_holders(&lockers.unwrap_or_default());
        } else if !matches!(&lockers, Ok(nobody) if nobody.is_empty()) {
            locks.begin_grace(lockers.unwrap_or_default());
        }
        // Clocks of two machines do not go at quite the same speed.
        let term = options.lease_term + options.lease_term / 8;
        let hold = if fs.was_handed_over() { Duration::ZERO } else { options.grace.min(term) };
        let evicted = fs.evicted().unwrap_or_else(|error| {
            tracing::error!(%error, "the list of evicted clients cannot be read: they may come back");
            Vec::new()
        });
        let is_out = |id: &u128| evicted.iter().any(|mark| mark.session == *id);
        let (out, marked): (Vec<u128>, _) =
            fs.sessions().unwrap_or_default().into_iter().partition(is_out);
        out.iter().for_each(|id| fs.remove_session(*id));
        let awaited = if hold.is_zero() {
            marked.iter().for_each(|id| fs.remove_session(*id));
            Vec::new()
        } else {
            marked
        };
        let core = Arc::new(Core {
            fs,
            durability: Durability::default(),
            fresh: Fresh::default(),
            gate: Gate::new(awaited),
            panics: Panics::default(),
            entering: Mutex::default(),
            greeting: Greeting {
                boot: random(&env),
                term_ms: options.lease_term.as_millis() as u32,
                clock: Arc::clone(&env.clock),
            },
            leases: Arc::new(Leases::new(Arc::clone(&env.clock), term, hold)),
            env,
            exports: options.exports,
            session_life: options.session_life,
            key: options.key,
            locks,
            sessions: Mutex::new(HashMap::new()),
            door: Arc::default(),
            revocations: Revocations::default(),
            refusals: Refusals::default(),
            numbers: AtomicU64::new(0),
            moves: AtomicU64::new(0),
            evicted: Mutex::new(evicted.into()),
            runtime: runtime.handle().clone(),
            stopping: watch::Sender::new(Stage::Serving),
            writing: Arc::default(),
        });
        for export in core.exports.iter().filter(|export| core.resolve(&export.path, None).is_err())
        {
            let path = String::from_utf8_lossy(&export.path);
            tracing::warn!(
                "{path} is exported and is no directory of the volume: nobody can mount it until it is"
            );
        }
        let graceful = Arc::clone(&core);
        runtime.spawn(async move {
            tokio::time::sleep(options.grace).await;
            // Who makes something again after a crash opens its files and takes its locks behind
            // that.
            if !graceful.made_again().await {
                return;
            }
            let core = Arc::clone(&graceful);
            let _done = tokio::task::spawn_blocking(move || core.end_grace()).await;
            // And claims what else it knows behind that.
            tokio::time::sleep(hold).await;
            graceful.all_claimed(options.lease_term).await;
            let _done = tokio::task::spawn_blocking(move || graceful.fs.reclaim_removed()).await;
        });
        let fencing = Arc::downgrade(&core);
        core.leases.on_fence(Box::new(move |number, fencing_one| {
            let Some(core) = fencing.upgrade() else { return };
            let session =
                core.sessions.lock().values().find(|session| session.number == number).cloned();
            let runtime = core.runtime.clone();
            // It may wait for the device, and whoever has found it must not.
            runtime.spawn_blocking(move || {
                session.iter().for_each(|session| session.fence(&*core.fs));
                fencing_one.done();
            });
        }));
        runtime.spawn(Arc::clone(&core).keep_durable());
        if core.gate.is_shut() {
            let waiting = Arc::clone(&core);
            let began = core.env.clock.monotonic();
            runtime.spawn(async move {
                while waiting.gate.is_shut() {
                    tokio::time::sleep(LOOK_INTERVAL).await;
                    let core = Arc::clone(&waiting);
                    let _done =
                        tokio::task::spawn_blocking(move || core.give_up_late(began, hold)).await;
                }
            });
        }
        let expiring = Arc::clone(&core);
        runtime.spawn(async move {
            let mut tick = tokio::time::interval(EXPIRY_INTERVAL);
            loop {
                tick.tick().await;
                let core = Arc::clone(&expiring);
                let look = move || {
                    core.expire();
                    core.end_revoked();
                };
                let _done = tokio::task::spawn_blocking(look).await;
            }
        });
        Ok(Self { core, runtime: Some(runtime) })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it runs until it is dropped")
    }

    /// Takes connections at `addr`; gives the address with the port that was chosen where it says
    /// 0.
    pub fn listen(&self, addr: SocketAddr, tls: Option<ServerTls>) -> Result<SocketAddr, NetError> {
        let failed = |error| NetError::Listen { addr, error };
        let listener = self.runtime().block_on(TcpListener::bind(addr)).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        if let Some(tls) = &tls {
            self.core.revocations.add(tls.revoked().to_owned());
            let (tls, clock) = (tls.clone(), Arc::clone(&self.core.env.clock));
            self.runtime().spawn(async move {
                loop {
                    if let Some(ending) = tls.ending(clock.wall()) {
                        tracing::warn!("the server's certificate {ending}: move server.pem and server.key away, and `ferry cert init` makes new ones");
                    }
                    tokio::time::sleep(CERTIFICATE_INTERVAL).await;
                }
            });
        }
        self.runtime().spawn(accept(Arc::clone(&self.core), listener, tls));
        Ok(bound)
    }

    /// Takes one connection that somebody else has made.
    pub fn serve_stream(&self, stream: Box<dyn Stream>) {
        self.serve_peer(stream, Peer::default());
    }

    /// The same, of somebody who has proved who it is.
    pub(crate) fn serve_peer(&self, stream: Box<dyn Stream>, peer: Peer) {
        self.runtime().spawn(connection::serve(Arc::clone(&self.core), stream, peer, None));
    }

    /// What ends the process: called when answering a client has panicked and the client was told.
    /// Without it the server goes on.
    pub fn on_panic(&self, end: impl Fn() + Send + Sync + 'static) {
        self.core.panics.on(Box::new(end));
    }

    /// For an administrator.
    pub fn control(&self) -> Control {
        Control(Arc::clone(&self.core))
    }

    /// Stops: clients give back what they decide alone, what has come is applied and answered,
    /// everything is made durable, and the clients are told.
    pub fn stop(self) {
        // As long as they bring what they have promised: the term of one that is silent ends.
        let nobody_relies = self.runtime().block_on(self.take_leases_back());
        self.core.stopping.send_replace(Stage::Draining);
        // Who still makes something again does so at the next server.
        let nothing_kept = self.core.gate.stop();
        // A message may have been read just before.
        self.core.all().iter().for_each(|session| session.drain());
        self.runtime().block_on(self.drain());
        let synced = self.core.sync();
        if let Err(error) = &synced {
            tracing::error!(%error, "stopping: not everything could be made durable");
        }
        // Their programs go on with the next server, with their locks.
        self.core.locks.close();
        self.core.fs.keep_removed();
        for session in self.core.all() {
            // What it has promised and not brought goes to the next server, as behind a crash: it
            // keeps its mark.
            let is_owing = session.is_enlisted() && self.core.leases.held_by(session.number).1 > 0;
            if is_owing {
                tracing::warn!(
                    client = session.name,
                    "stopping: it is silent, and may have shown as done what it has not sent; the next server waits for it"
                );
            }
            if synced.is_ok() && !session.is_replaying() && !is_owing {
                session.say_last(&ToClient::Goodbye {});
                self.core.end(&session, CloseReason::Stopped);
            } else {
                self.core.end(&session, CloseReason::HandedOver);
            }
        }
        // The next server may begin at once: no client believes anything, and all that was promised
        // has been made.
        if nobody_relies
            && nothing_kept
            && synced.is_ok()
            && let Err(error) = self.core.fs.hand_over()
        {
            tracing::warn!(%error, "stopping: the next server will wait for leases that nobody has");
        }
        self.core.stopping.send_replace(Stage::Ended);
        self.runtime().block_on(async {
            let sent = self.until(|| Arc::strong_count(&self.core.writing) == 1);
            if tokio::time::timeout(FAREWELL_TIME_MAX, sent).await.is_err() {
                tracing::warn!("stopping: a client does not take its last answers");
            }
        });
    }

    /// Until nobody relies on a lease any more. Whether all that was promised under leases has been
    /// made, too.
    async fn take_leases_back(&self) -> bool {
        loop {
            // Once more now and then: what was being given before is recalled later.
            self.core.recall(&self.core.leases.close());
            for _ in 0..RECALL_ROUND {
                let (relied_on, promised) = self.core.leases.relied_on();
                if !relied_on {
                    return !promised;
                }
                tokio::time::sleep(STOP_INTERVAL).await;
            }
        }
    }

    async fn drain(&self) {
        let drained = self.until(|| !self.core.all().iter().any(|s| s.is_busy()));
        if tokio::time::timeout(STOP_TIME_MAX, drained).await.is_err() {
            tracing::warn!("stopping: an operation does not end");
        }
    }

    async fn until(&self, condition: impl Fn() -> bool) {
        while !condition() {
            tokio::time::sleep(STOP_INTERVAL).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// What an administrator sees of a server and does with it.
#[derive(Clone)]
pub struct Control(Arc<Core>);

impl Control {
    /// What the sessions are at, oldest first.
    pub fn clients(&self) -> serde_json::Value {
        let mut all = self.0.all();
        all.sort_unstable_by_key(|session| session.number);
        let now = self.0.env.clock.monotonic();
        let one = |session: &Arc<Session>| {
            let mut json = session.json(now);
            json["locks"] = self.0.locks.held_by(session.id).into();
            let (leases, writes) = self.0.leases.held_by(session.number);
            json["leases"] = leases.into();
            json["write_leases"] = writes.into();
            json
        };
        all.iter().map(one).collect()
    }

    /// The number of sessions, those of clients that are away among them.
    pub fn sessions(&self) -> usize {
        self.0.sessions.lock().len()
    }

    /// How often clients were not let in since the server's start, by cause.
    pub fn refused(&self) -> serde_json::Value {
        self.0.refusals.json()
    }

    /// Ends the sessions of that name or number: what they hold is free, and their mounts are of no
    /// use any more. Gives how many.
    pub fn evict(&self, which: &str) -> usize {
        self.0.evict(which)
    }
}

async fn accept(core: Arc<Core>, listener: TcpListener, tls: Option<ServerTls>) {
    let mut stopping = core.stopping.subscribe();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = Stage::Draining.reached(&mut stopping) => return,
        };
        match accepted {
            Ok((stream, from)) => {
                let (stranger, leave) = core.door.come(from);
                let served = serve(Arc::clone(&core), stream, tls.clone(), stranger);
                tokio::spawn(async move {
                    tokio::select! {
                        () = served => {}
                        () = leave.notified() => {
                            tracing::info!(%from, "hung up: it had said nothing, and others came");
                        }
                    }
                });
            }
            Err(error) => {
                // Out of descriptors, mostly: those that are there go on.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(core: Arc<Core>, stream: TcpStream, tls: Option<ServerTls>, stranger: Stranger) {
    let from = stranger.from;
    let greeted = tokio::time::timeout(HANDSHAKE_TIME_MAX, greet(stream, tls)).await;
    match greeted.unwrap_or_else(|_| Err(Unheard::Gone(std::io::ErrorKind::TimedOut.into()))) {
        Ok((stream, peer)) => connection::serve(core, stream, peer, Some(stranger)).await,
        Err(Unheard::Gone(error)) => tracing::info!(%from, %error, "no connection"),
        Err(Unheard::Refused(refusal, mut stream)) => {
            core.refusals.note(&*core.env.clock, (Some(from), None), &refusal);
            // One that does not speak TLS understands this; others have been told by the handshake,
            // or see that this is none.
            let last_words = async {
                if matches!(refusal.cause, Cause::Plain | Cause::Tls) {
                    let word = ToClient::Refused { reason: refusal.reason.into_bytes() };
                    stream.write_all(&crate::frame::encode(&word)).await?;
                }
                stream.shutdown().await?;
                // A connection that is closed with something unread is reset, and the other side
                // may lose the last words.
                tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
            };
            let _late = tokio::time::timeout(LAST_WORDS_TIME_MAX, last_words).await;
        }
    }
}

/// A connection that comes to nothing.
enum Unheard {
    Gone(std::io::Error),
    Refused(Refusal, TcpStream),
}

impl From<std::io::Error> for Unheard {
    fn from(error: std::io::Error) -> Self {
        Self::Gone(error)
    }
}

async fn greet(
    stream: TcpStream,
    tls: Option<ServerTls>,
) -> Result<(Box<dyn Stream>, Peer), Unheard> {
    stream.set_nodelay(true)?;
    match (tls, begins_tls(&stream).await?) {
        (None, false) => Ok((Box::new(stream), Peer::default())),
        (None, true) => Err(Unheard::Refused(
            Refusal::new(Cause::Tls, "the server does not speak TLS, and the client does"),
            stream,
        )),
        (Some(_), false) => {
            let reason = "the server speaks TLS: mount with -o tls=DIR, with what `ferry cert issue` has made at the server";
            Err(Unheard::Refused(Refusal::new(Cause::Plain, reason), stream))
        }
        (Some(tls), true) => match tls.accept(stream).await {
            Ok((stream, peer)) => Ok((stream, peer)),
            Err((error, stream)) => {
                let refusal = match tls::Fault::of(&error) {
                    None => return Err(Unheard::Gone(error)),
                    Some(tls::Fault::Certificate) => {
                        let reason = format!(
                            "the client has no certificate of this server's authority ({error})"
                        );
                        Refusal::new(Cause::Unknown, reason)
                    }
                    Some(tls::Fault::Handshake) => {
                        Refusal::new(Cause::NoGreeting, format!("no TLS of a client ({error})"))
                    }
                };
                Err(Unheard::Refused(refusal, stream))
            }
        },
    }
}

/// Whether the client begins a TLS handshake. A greeting in the clear is short: its length has a
/// zero where TLS has its version.
async fn begins_tls(stream: &TcpStream) -> std::io::Result<bool> {
    const HANDSHAKE: u8 = 0x16;
    let mut first = [0; 3];
    loop {
        match (stream.peek(&mut first).await?, first) {
            (0, _) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            (3.., [HANDSHAKE, 3, minor]) => return Ok(minor != 0),
            (1..=2, [HANDSHAKE, ..]) => {}
            _ => return Ok(false),
        }
        // The rest of it is on its way.
        tokio::time::sleep(STOP_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_below_an_export_or_not() {
        assert_eq!(normal(b"//a/./b/"), b"/a/b");
        assert_eq!(normal(b""), b"/");
        assert!(is_below(b"/a/b", b"/a") && is_below(b"/a", b"/a") && is_below(b"/a", b"/"));
        assert!(!is_below(b"/ab", b"/a") && !is_below(b"/a/../b", b"/a") && !is_below(b"/", b"/a"));
    }
}
