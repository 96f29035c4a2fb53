//! A server: it starts, listens, and stops.

use crate::rt::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::runtime::Runtime;
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use ferry_fs::{SessionSeq, SessionStore};
use tokio::sync::watch;

use super::barrier::Barrier;
use super::connection;
use super::control::Control;
use super::core::{Core, Stage, WalkTimes, random};
use super::leases::Leases;
use super::listen::{self, Bound};
use super::locks::Locks;
use super::recovery::EXPIRY_INTERVAL;
use super::refusals::Refusals;
use super::session::{CloseReason, Greeting};
use super::sync_queue::SyncQueue;
use super::unstable::UnstableSet;
use crate::error::NetError;
use crate::frame::Stream;
use crate::limits::{Export, Peer};
use crate::message::ToClient;
use crate::tls::{Revocations, ServerTls, ends_soon};

/// Threads that may wait for the device or the log on behalf of clients.
const THREADS_MAX: usize = 32;
/// How often the server checks whether its own certificate ends soon.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);
/// A server that stops waits so long for operations in progress.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);
/// And so long for clients to read their last answers.
const FAREWELL_TIME_MAX: Duration = Duration::from_secs(2);
/// How often the server looks for clients that it has to give up.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How often a server that stops looks whether it can go on.
const STOP_INTERVAL: Duration = Duration::from_millis(5);
/// After so many looks it recalls leases again.
const RECALL_ROUND: u32 = 20;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// What clients may mount.
    pub exports: Vec<Export>,
    /// A session ends when its client has been away for so long.
    pub session_life: Duration,
    /// For so long after its start the server grants only locks that clients held before. For the
    /// same time, or one term of a lease if that is shorter, it changes nothing: clients that do
    /// not know yet that the previous server has ended may rely on their leases. It does not wait
    /// if that server has handed the volume over: it has stopped in order, and no client relies on
    /// a lease.
    pub grace: Duration,
    /// Clients that may have acknowledged what was lost with the previous server are awaited for so
    /// long at least, if that server did not stop in order: they may have to find this one.
    pub returns: Duration,
    /// The server before has told clients nothing for so long.
    pub silent: Duration,
    /// A client may cache what it was told for so long after the server last heard of it.
    pub lease_term: Duration,
    /// A secret of the volume's timeline, under which capabilities are hashed.
    pub key: [u8; 16],
}

impl ServerOptions {
    /// The term of a lease. A change waits no longer for a client that is silent.
    pub const LEASE_TERM: Duration = Duration::from_secs(6);

    /// For how long clients may still rely on leases of this term, if their server has told them
    /// nothing for `silent`.
    pub fn leases_left(term: Duration, silent: Duration) -> Duration {
        as_measured_here(term).saturating_sub(silent)
    }
}

/// The clocks of two machines do not run at the same speed.
fn as_measured_here(term: Duration) -> Duration {
    term + term / 8
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
        Self::start_with(fs, options, env, WalkTimes::default())
    }

    /// The same, with other times for clients that walk through a tree.
    pub(crate) fn start_with(
        fs: Arc<dyn SessionStore>,
        options: ServerOptions,
        env: Env,
        walk_times: WalkTimes,
    ) -> Result<Self, NetError> {
        let runtime = crate::rt::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(THREADS_MAX)
            .thread_name("ferry-server")
            .enable_all()
            .build()
            .map_err(NetError::Start)?;
        let locks = former_locks(&*fs, options.grace);
        let term = as_measured_here(options.lease_term);
        let left =
            options.grace.min(ServerOptions::leases_left(options.lease_term, options.silent));
        // None at all means that no client is waited for.
        let least = options.grace.min(Duration::from_millis(1));
        let hold = if fs.was_handed_over() { Duration::ZERO } else { left.max(least) };
        let evicted = fs.evicted().unwrap_or_else(|error| {
            tracing::error!(%error, "the list of evicted clients cannot be read: they may come back");
            Vec::new()
        });
        let awaited = awaited_sessions(&*fs, &evicted, hold);
        let core = Arc::new(Core {
            fs,
            sync_queue: SyncQueue::default(),
            unstable: UnstableSet::default(),
            barrier: Barrier::new(awaited),
            panics: Arc::default(),
            entering: Mutex::default(),
            greeting: Greeting {
                boot: random(&env),
                term_ms: options.lease_term.as_millis() as u32,
                clock: Arc::clone(&env.clock),
            },
            leases: Arc::new(Leases::new(Arc::clone(&env.clock), term, hold, walk_times.in_use)),
            walk_times,
            env,
            exports: options.exports.clone(),
            session_life: options.session_life,
            key: options.key,
            locks,
            sessions: Mutex::new(HashMap::default()),
            admission: Arc::default(),
            revocations: Revocations::default(),
            certificate_until: Mutex::default(),
            refusals: Refusals::default(),
            numbers: AtomicU64::new(0),
            moves: AtomicU64::new(0),
            formers: Mutex::default(),
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
        let server = Self { core, runtime: Some(runtime) };
        server.begin_tasks(&options, hold);
        Ok(server)
    }

    /// Begins what the server does on its own, besides serving connections.
    fn begin_tasks(&self, options: &ServerOptions, hold: Duration) {
        self.begin_grace(options.grace, options.lease_term, hold);
        self.begin_fencing();
        self.runtime().spawn(Arc::clone(&self.core).keep_durable());
        if self.core.barrier.is_closed() {
            self.begin_giving_up(hold.max(options.returns));
        }
        self.begin_expiry();
    }

    /// Ends the grace period of file locks, and later frees deleted files that no client has
    /// claimed.
    fn begin_grace(&self, grace: Duration, lease_term: Duration, hold: Duration) {
        let graceful = Arc::clone(&self.core);
        self.runtime().spawn(async move {
            crate::rt::time::sleep(grace).await;
            // Clients that replay open their files and take their locks behind that.
            if !graceful.all_settled().await {
                return;
            }
            let core = Arc::clone(&graceful);
            let _done = crate::rt::task::spawn_blocking(move || core.end_grace()).await;
            // And claim the other inodes that they know behind that.
            crate::rt::time::sleep(hold).await;
            graceful.all_claimed(lease_term).await;
            let _done =
                crate::rt::task::spawn_blocking(move || graceful.fs.reclaim_removed()).await;
        });
    }

    /// Records a fence on the volume before the leases are free.
    fn begin_fencing(&self) {
        let fencing = Arc::downgrade(&self.core);
        self.core.leases.on_fence(Box::new(move |number, fencing_one| {
            let Some(core) = fencing.upgrade() else { return };
            let session =
                core.sessions.lock().values().find(|session| session.number == number).cloned();
            let runtime = core.runtime.clone();
            // Recording may wait for the device, and the thread that has found the session must
            // not.
            runtime.spawn_blocking(move || {
                session.iter().for_each(|session| session.fence(&*core.fs));
                fencing_one.done();
            });
        }));
    }

    /// Gives clients up that do not replay, until the barrier is open.
    fn begin_giving_up(&self, hold: Duration) {
        let waiting = Arc::clone(&self.core);
        let began = self.core.env.clock.monotonic();
        self.runtime().spawn(async move {
            while waiting.barrier.is_closed() {
                crate::rt::time::sleep(LOOK_INTERVAL).await;
                let core = Arc::clone(&waiting);
                let _done =
                    crate::rt::task::spawn_blocking(move || core.give_up_overdue(began, hold))
                        .await;
            }
        });
    }

    /// Looks for sessions whose client is away for too long, or whose certificate was revoked.
    fn begin_expiry(&self) {
        let expiring = Arc::clone(&self.core);
        self.runtime().spawn(async move {
            let mut tick = crate::rt::time::interval(EXPIRY_INTERVAL);
            loop {
                tick.tick().await;
                let core = Arc::clone(&expiring);
                let look = move || {
                    core.expire();
                    core.end_revoked();
                };
                let _done = crate::rt::task::spawn_blocking(look).await;
            }
        });
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it runs until it is dropped")
    }

    /// Accepts connections at an address.
    pub fn listen(&self, bound: Bound, tls: Option<ServerTls>) -> Result<(), NetError> {
        let listener = self.runtime().block_on(bound.watched())?;
        if let Some(tls) = &tls {
            self.core.revocations.add(tls.revoked().to_owned());
            *self.core.certificate_until.lock() = tls.until();
            let (until, clock) = (tls.until(), Arc::clone(&self.core.env.clock));
            self.runtime().spawn(async move {
                loop {
                    if let Some(ending) = until.and_then(|until| ends_soon(until, clock.wall())) {
                        tracing::warn!("the server's certificate {ending}: move server.pem and server.key away, and `ferry cert init` makes new ones");
                    }
                    crate::rt::time::sleep(CERTIFICATE_INTERVAL).await;
                }
            });
        }
        self.runtime().spawn(listen::accept(Arc::clone(&self.core), listener, tls));
        Ok(())
    }

    /// Serves a connection that the caller has made.
    pub fn serve_stream(&self, stream: Box<dyn Stream>) {
        self.serve_peer(stream, Peer::default());
    }

    /// The same for a client that has proved who it is.
    pub(crate) fn serve_peer(&self, stream: Box<dyn Stream>, peer: Peer) {
        self.runtime().spawn(connection::serve(Arc::clone(&self.core), stream, peer, None));
    }

    /// `end` ends the process. It is called when answering a client has panicked and the client was
    /// told. Without it the server goes on.
    pub fn on_panic(&self, end: impl Fn() + Send + Sync + 'static) {
        self.core.panics.on(Box::new(end));
    }

    /// For an administrator.
    pub fn control(&self) -> Control {
        Control(Arc::clone(&self.core))
    }

    /// Stops: the clients return their leases, everything that has arrived is applied, answered and
    /// made durable, and the clients are told.
    pub fn stop(self) {
        // As long as clients send what they have acknowledged: the term of a silent one ends.
        let nobody_relies = self.runtime().block_on(self.take_leases_back());
        self.core.stopping.send_replace(Stage::Draining);
        // Clients that still replay go on at the next server.
        let nothing_to_replay = self.core.barrier.stop();
        // A message may have been read just before.
        self.core.all().iter().for_each(|session| session.drain());
        self.runtime().block_on(self.drain());
        // The operation of such a client may yet be done, and then be neither answered nor durable.
        let busy = self.core.all().into_iter().filter(|session| session.is_busy());
        let busy: Vec<u64> = busy.map(|session| session.number).collect();
        let synced = self.core.sync();
        if let Err(error) = &synced {
            tracing::error!(%error, "stopping: not everything could be made durable");
        }
        // Programs go on with the next server, with their locks.
        self.core.locks.close();
        self.core.fs.keep_removed();
        for session in self.core.all() {
            // What the client has acknowledged and not sent goes to the next server, as after a
            // crash: the session stays recorded.
            let owes_changes =
                session.is_registered() && self.core.leases.held_by(session.number).1 > 0;
            if owes_changes {
                tracing::warn!(
                    client = session.name,
                    "stopping: it is silent, and may have acknowledged to programs what it has not sent; the next server waits for it"
                );
            }
            let is_busy = busy.contains(&session.number);
            if synced.is_ok() && !session.is_replaying() && !owes_changes && !is_busy {
                session.send_last(&ToClient::Goodbye {});
                self.core.end(&session, CloseReason::Stopped);
            } else {
                self.core.end(&session, CloseReason::HandedOver);
            }
        }
        // The next server may begin at once: no client relies on a lease, and everything that
        // clients acknowledged is applied.
        if nobody_relies
            && !self.core.leases.former_relied_on()
            && nothing_to_replay
            && synced.is_ok()
            && busy.is_empty()
            && let Err(error) = self.core.fs.hand_over()
        {
            tracing::warn!(%error, "stopping: the next server will wait for leases that nobody has");
        }
        self.core.stopping.send_replace(Stage::Ended);
        self.runtime().block_on(async {
            let sent = self.until(|| Arc::strong_count(&self.core.writing) == 1);
            if crate::rt::time::timeout(FAREWELL_TIME_MAX, sent).await.is_err() {
                tracing::warn!("stopping: a client does not take its last answers");
            }
        });
    }

    /// Waits until no session relies on a lease. Returns whether everything that clients
    /// acknowledged is applied, too.
    async fn take_leases_back(&self) -> bool {
        loop {
            // More than once: a lease that was being granted is recalled later.
            self.core.recall(&self.core.leases.close());
            for _ in 0..RECALL_ROUND {
                let (relied_on, unapplied) = self.core.leases.relied_on();
                if !relied_on {
                    return !unapplied;
                }
                crate::rt::time::sleep(STOP_INTERVAL).await;
            }
        }
    }

    async fn drain(&self) {
        let drained = self.until(|| !self.core.all().iter().any(|s| s.is_busy()));
        if crate::rt::time::timeout(STOP_TIME_MAX, drained).await.is_err() {
            tracing::warn!("stopping: an operation does not end");
        }
    }

    async fn until(&self, condition: impl Fn() -> bool) {
        while !condition() {
            crate::rt::time::sleep(STOP_INTERVAL).await;
        }
    }
}

/// The file locks of a server that begins: in the grace period only their former holders get some.
fn former_locks(fs: &dyn SessionStore, grace: Duration) -> Locks {
    let (locks, holders) = (Locks::default(), fs.lock_holders());
    if is_planted(Bug::ForgottenLocks) {
        return locks;
    }
    if grace.is_zero() {
        let _reported = fs.remove_lock_holders(&holders.unwrap_or_default());
    } else if !matches!(&holders, Ok(none) if none.is_empty()) {
        locks.begin_grace(holders.unwrap_or_default());
    }
    locks
}

/// The recorded sessions whose clients may replay. The records of all others are removed.
fn awaited_sessions(fs: &dyn SessionStore, evicted: &[SessionSeq], hold: Duration) -> Vec<u128> {
    let is_awaited =
        |id: &u128| !hold.is_zero() && !evicted.iter().any(|evicted| evicted.session == *id);
    let (awaited, others): (Vec<u128>, Vec<u128>) =
        fs.sessions().unwrap_or_default().into_iter().partition(is_awaited);
    fs.revoke_sessions(&others);
    awaited
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
