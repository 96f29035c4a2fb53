//! The server: gives a file system to clients.
//!
//! `connection` speaks with one client, `session` is what remains of it between connections, `apply` turns what it asks for into calls
//! of the file system, `locks` are the file locks of all of them, `leases` what they may keep, `turns` how a change waits for them,
//! `requests` how a request does, `walking` what is asked for ahead, `provisions` are what it may promise out of. `durability` makes durable what was promised, `gate` lets
//! nobody pass after a crash before those who had promised something have made it again, `fresh` knows whose changes are not durable. `rights` is
//! what a client may do whose certificate names its users.

mod apply;
mod connection;
mod durability;
mod fresh;
mod gate;
mod keeping;
mod leases;
mod locks;
mod provisions;
mod requests;
mod rights;
mod session;
mod turns;
mod walking;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_device::Env;
use ferry_fs::{Attr, Filesystem, InProcess, Ino, ROOT};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{Semaphore, watch};

use crate::error::NetError;
use crate::frame::Stream;
use crate::limits::Peer;
use crate::message::ToClient;
use crate::tls::ServerTls;
use durability::Durability;
use fresh::Fresh;
use gate::Gate;
use leases::Leases;
use locks::Locks;
pub(crate) use locks::set_range;
use session::{Greeting, Line, Session, Sessions};

/// Connections at the same time, greeted or not.
const CONNECTIONS_MAX: usize = 1024;
/// Sessions at the same time, connected or not.
const SESSIONS_MAX: usize = 1024;
/// Evicted sessions that are remembered.
const EVICTED_MAX: usize = 4096;
/// Threads that may wait for the device or the log on behalf of clients.
const THREADS_MAX: usize = 32;
/// A TLS handshake must be complete after this time.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// How often sessions are looked at whose client has gone.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);
/// A server that stops waits so long for operations that are under way.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);
/// So long, before that, for clients to give back their leases and to send what they have promised.
const RETURN_TIME_MAX: Duration = Duration::from_secs(10);
/// And so long for clients to take their last answers.
const FAREWELL_TIME_MAX: Duration = Duration::from_secs(2);
/// How often it looks.
const STOP_INTERVAL: Duration = Duration::from_millis(5);
/// And how many times before it asks for leases again.
const RECALL_ROUND: u32 = 20;

/// A directory that clients may mount, with all that is below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its path on the volume, `/` for all of it.
    pub path: Vec<u8>,
    /// Clients can change nothing.
    pub read_only: bool,
}

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// What clients may mount.
    pub exports: Vec<Export>,
    /// A session ends when its client has been away for so long.
    pub session_life: Duration,
    /// After its start the server gives for so long only locks that clients held before; and it changes nothing in this time, or in one
    /// term of a lease if that is shorter: clients that do not know yet that the server before is gone may rely on theirs. Not if that one
    /// has handed the volume over: it has stopped in order, and nobody does.
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
    fs: Arc<dyn Filesystem>,
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
    sessions: Sessions,
    /// Held while a session is found or made.
    entering: Mutex<()>,
    /// Sessions so far.
    numbers: AtomicU64,
    /// Sessions that nobody goes on with.
    evicted: Mutex<VecDeque<u128>>,
    runtime: Handle,
    stopping: watch::Sender<Stage>,
    /// Held by each connection that may still have something to send.
    writing: Arc<()>,
}

/// Why a client is not let in.
#[derive(Debug)]
enum Refusal {
    Because(String),
    Evicted,
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self::Because(reason)
    }
}

impl From<&str> for Refusal {
    fn from(reason: &str) -> Self {
        Self::Because(reason.into())
    }
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
        peer: Peer,
        path: &[u8],
        name: String,
        line: &Line,
    ) -> Result<(Arc<Session>, u64), Refusal> {
        let path = normal(path);
        let _entering = self.entering.lock();
        let old = self.sessions.lock().get(&id).filter(|s| s.peer == peer && s.path == path).cloned();
        if let Some(old) = old
            && let Some(epoch) =
                old.connect(line, &self.greeting, (true, newest), (&self.locks, &self.leases))
        {
            tracing::info!(client = old.name, "connected again");
            return Ok((old, epoch));
        }
        if self.evicted.lock().contains(&id) {
            return Err(Refusal::Evicted);
        }
        let shown = String::from_utf8_lossy(&path).into_owned();
        let covers = |e: &&Export| is_below(&path, &normal(&e.path));
        let export = self.exports.iter().filter(covers).max_by_key(|e| normal(&e.path).len());
        let export = export.ok_or_else(|| format!("the server does not export {shown}"))?;
        let root = self.resolve(&path).ok_or_else(|| format!("{shown}: no such directory on the server"))?;
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        if self.sessions.lock().len() >= SESSIONS_MAX {
            return Err("the server has as many clients as it can take".into());
        }
        let mark = self.marks_of(id, newest);
        let id = if mark.is_some() { id } else { random(&self.env) };
        let session = Arc::new(Session::new((id, number), name, peer, path, root, export.read_only));
        if let Some(mark) = mark {
            session.take_up(mark);
        }
        self.sessions.lock().insert(session.id, Arc::clone(&session));
        let both = (&self.locks, &*self.leases);
        let epoch = session.connect(line, &self.greeting, (false, newest), both).ok_or("the server stops")?;
        tracing::info!(client = session.name, path = shown, again = mark.is_some(), "connected");
        Ok((session, epoch))
    }

    /// How far the changes of a session came at a server that crashed, and how far they are durable, if it may make again what is missing.
    fn marks_of(&self, id: u128, newest: u64) -> Option<(u64, u64)> {
        if id == 0 || !self.gate.is_shut() {
            return None;
        }
        let mark = self.fs.mark(id).ok().flatten().filter(|mark| *mark <= newest)?;
        let durable = self.fs.synced(id).ok().filter(|durable| *durable <= newest)?;
        self.gate.come(id).then_some((mark, durable))
    }

    /// The directory at `path`. Symbolic links are not followed.
    fn resolve(&self, path: &[u8]) -> Option<Ino> {
        let mut ino = ROOT;
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            ino = self.named(ino, name)?.ino;
        }
        let (attr, _) = InProcess::default().call(|cx| self.fs.getattr(cx, ino, None)).ok()?;
        (attr.mode & libc::S_IFMT == libc::S_IFDIR).then_some(ino)
    }

    /// What a name means, for nobody who would then know it.
    fn named(&self, dir: Ino, name: &[u8]) -> Option<Attr> {
        let found = InProcess::default().call(|cx| self.fs.lookup(cx, dir, name)).ok()?;
        found.attr.inspect(|attr| self.fs.forget(attr.ino, 1))
    }

    /// Ends a session: what it holds is given back.
    fn end(&self, session: &Arc<Session>) {
        self.end_if_left(session, None);
    }

    /// The same for one whose client relies on nothing any more: when it is not there, nor are its leases.
    fn leave(&self, session: &Arc<Session>) {
        session.end(None, &self.locks);
        self.leases.end(session.number);
        self.end(session);
    }

    /// [`Core::end`], but not if its client is there or was there after `left`.
    fn end_if_left(&self, session: &Arc<Session>, left: Option<Duration>) -> bool {
        let ended = session.end(left, &self.locks);
        if ended {
            // As long as it has a mark, a sync says how far it is durable.
            session.unmark(&*self.fs);
            self.remove(session);
            self.gate.done(session.id);
        }
        ended
    }

    /// Ends a session; what it may have promised is still looked for by the next server.
    fn close(&self, session: &Arc<Session>) {
        if session.end(None, &self.locks) {
            self.remove(session);
        }
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
            self.fs.unmark(id);
        }
    }

    /// The time of those who have come is over, too.
    fn give_up_late(&self) {
        for id in self.gate.awaited() {
            let session = self.sessions.lock().get(&id).cloned();
            if let Some(session) = session {
                tracing::warn!(client = session.name, "has not made again in time what it had promised");
                self.disown(&session);
                session.redone();
            }
        }
        self.gate.open();
    }

    /// Ends the sessions of that name or number, or with a certificate of that name, for good; gives how many.
    fn evict(&self, which: &str) -> usize {
        let mut all = self.all();
        all.retain(|session| {
            let certificate = session.peer.name.as_deref();
            session.name == which || certificate == Some(which) || session.number.to_string() == which
        });
        for session in &all {
            {
                let mut evicted = self.evicted.lock();
                evicted.push_back(session.id);
                if evicted.len() > EVICTED_MAX {
                    evicted.pop_front();
                }
            }
            session.say_last(&ToClient::Evicted {});
            self.end(session);
            tracing::warn!(client = session.name, number = session.number, "evicted");
        }
        all.len()
    }

    /// Others may change what a session keeps, and it need not have heard that this is durable: it makes nothing of it again.
    fn disown(&self, session: &Session) {
        session.fence(&*self.fs);
        self.leases.end_series(session.number, self.leases.series(session.number));
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

    fn all(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().values().cloned().collect()
    }

    fn expire(&self) {
        let alive: HashSet<u64> = self.sessions.lock().values().map(|session| session.number).collect();
        self.leases.expire(&alive);
        let Some(deadline) = self.env.clock.monotonic().checked_sub(self.session_life) else { return };
        for session in self.all() {
            if self.end_if_left(&session, Some(deadline)) {
                tracing::warn!(client = session.name, "has been away for too long: its session has ended");
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
    let inside = path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"));
    !climbs && (base == b"/" || inside)
}

/// A server. Dropping it ends it as a crash would, for the clients.
pub struct Server {
    core: Arc<Core>,
    runtime: Option<Runtime>,
}

impl Server {
    /// Starts to serve `fs`; clients come with [`Server::listen`].
    pub fn start(fs: Arc<dyn Filesystem>, options: ServerOptions, env: Env) -> Result<Self, NetError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(THREADS_MAX)
            .thread_name("ferry-server")
            .enable_all()
            .build()
            .map_err(NetError::Start)?;
        let locks = Locks::default();
        if !options.grace.is_zero() {
            locks.begin_grace();
        }
        // Clocks of two machines do not go at quite the same speed.
        let term = options.lease_term + options.lease_term / 8;
        let hold = if fs.was_handed_over() { Duration::ZERO } else { options.grace.min(term) };
        let marked = fs.marked().unwrap_or_default();
        let awaited = if hold.is_zero() {
            marked.iter().for_each(|id| fs.unmark(*id));
            Vec::new()
        } else {
            marked
        };
        let core = Arc::new(Core {
            fs,
            durability: Durability::default(),
            fresh: Fresh::default(),
            gate: Gate::new(awaited),
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
            numbers: AtomicU64::new(0),
            evicted: Mutex::default(),
            runtime: runtime.handle().clone(),
            stopping: watch::Sender::new(Stage::Serving),
            writing: Arc::default(),
        });
        for export in core.exports.iter().filter(|export| core.resolve(&export.path).is_none()) {
            let path = String::from_utf8_lossy(&export.path);
            tracing::warn!(
                "{path} is exported and is no directory of the volume: nobody can mount it until it is"
            );
        }
        let graceful = Arc::clone(&core);
        runtime.spawn(async move {
            tokio::time::sleep(options.grace).await;
            let core = Arc::clone(&graceful);
            let _done = tokio::task::spawn_blocking(move || core.locks.end_grace()).await;
            // Who makes something again after a crash opens its files behind that.
            tokio::time::sleep(hold).await;
            let _done = tokio::task::spawn_blocking(move || graceful.fs.reclaim_removed()).await;
        });
        let fencing = Arc::downgrade(&core);
        core.leases.on_fence(Box::new(move |number| {
            if let Some(core) = fencing.upgrade() {
                let session = core.sessions.lock().values().find(|session| session.number == number).cloned();
                session.iter().for_each(|session| session.fence(&*core.fs));
            }
        }));
        runtime.spawn(Arc::clone(&core).keep_durable());
        if core.gate.is_shut() {
            let waiting = Arc::clone(&core);
            runtime.spawn(async move {
                tokio::time::sleep(hold).await;
                let core = Arc::clone(&waiting);
                let _done = tokio::task::spawn_blocking(move || core.give_up_absent()).await;
                tokio::time::sleep(hold).await;
                let _done = tokio::task::spawn_blocking(move || waiting.give_up_late()).await;
            });
        }
        let expiring = Arc::clone(&core);
        runtime.spawn(async move {
            let mut tick = tokio::time::interval(EXPIRY_INTERVAL);
            loop {
                tick.tick().await;
                let core = Arc::clone(&expiring);
                let _done = tokio::task::spawn_blocking(move || core.expire()).await;
            }
        });
        Ok(Self { core, runtime: Some(runtime) })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it runs until it is dropped")
    }

    /// Takes connections at `addr`; gives the address with the port that was chosen where it says 0.
    pub fn listen(&self, addr: SocketAddr, tls: Option<ServerTls>) -> Result<SocketAddr, NetError> {
        let failed = |error| NetError::Listen { addr, error };
        let listener = self.runtime().block_on(TcpListener::bind(addr)).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        self.runtime().spawn(accept(Arc::clone(&self.core), listener, tls));
        Ok(bound)
    }

    /// Takes one connection that somebody else has made.
    pub fn serve_stream(&self, stream: Box<dyn Stream>) {
        self.serve_peer(stream, Peer::default());
    }

    /// The same, of somebody who has proved who it is.
    pub(crate) fn serve_peer(&self, stream: Box<dyn Stream>, peer: Peer) {
        self.runtime().spawn(connection::serve(Arc::clone(&self.core), stream, peer));
    }

    /// For an administrator.
    pub fn control(&self) -> Control {
        Control(Arc::clone(&self.core))
    }

    /// Stops: clients give back what they decide alone, what has come is applied and answered, everything is made durable, and the clients
    /// are told.
    pub fn stop(self) {
        let returned = async { tokio::time::timeout(RETURN_TIME_MAX, self.take_leases_back()).await };
        let nobody_relies = self.runtime().block_on(returned).unwrap_or(false);
        if !nobody_relies {
            tracing::warn!(
                "stopping: a client does not give its leases back; what it has shown as done and not sent may be lost"
            );
        }
        self.core.stopping.send_replace(Stage::Draining);
        // Who still makes something again does so at the next server.
        let nothing_kept = self.core.gate.stop();
        // A message may have been read just before.
        self.core.all().iter().for_each(|session| session.close_ears());
        self.runtime().block_on(self.drain());
        let synced = self.core.sync();
        if let Err(error) = &synced {
            tracing::error!(%error, "stopping: not everything could be made durable");
        }
        // Their programs go on with the next server.
        self.core.fs.keep_removed();
        for session in self.core.all() {
            if synced.is_ok() && !*session.redoing() {
                session.say_last(&ToClient::Goodbye {});
                self.core.end(&session);
            } else {
                self.core.close(&session);
            }
        }
        // The next server may begin at once: no client believes anything, and all that was promised has been made.
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

    /// Until nobody relies on a lease any more. Whether all that was promised under leases has been made, too.
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

    /// Ends the sessions of that name or number: what they hold is free, and their mounts are of no use any more. Gives how many.
    pub fn evict(&self, which: &str) -> usize {
        self.0.evict(which)
    }
}

async fn accept(core: Arc<Core>, listener: TcpListener, tls: Option<ServerTls>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut stopping = core.stopping.subscribe();
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = Stage::Draining.reached(&mut stopping) => return,
        };
        match accepted {
            Ok((stream, from)) => {
                let (core, tls) = (Arc::clone(&core), tls.clone());
                tokio::spawn(async move {
                    match greet(stream, tls).await {
                        Ok((stream, peer)) => connection::serve(core, stream, peer).await,
                        Err(error) => tracing::info!(%from, %error, "no connection"),
                    }
                    drop(permit);
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

async fn greet(stream: TcpStream, tls: Option<ServerTls>) -> std::io::Result<(Box<dyn Stream>, Peer)> {
    stream.set_nodelay(true)?;
    match tls {
        None => Ok((Box::new(stream), Peer::default())),
        Some(tls) => tokio::time::timeout(HANDSHAKE_TIME_MAX, tls.accept(stream))
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())),
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
