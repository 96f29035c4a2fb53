//! One connection: the greeting, then messages in and answers out. Whatever the other side sends
//! costs it at most its connection.

use crate::rt::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::planted::{Bug, is_planted};
use ferry_fs::SessionStore;

use crate::rt::Mutex;
use crate::rt::time::timeout;
use tokio::io::ReadHalf;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::admission::Newcomer;
use super::apply::Respond;
use super::core::{Core, Stage};
use super::panics::answered;
use super::requests::Request;
use super::session::{Change, CloseReason, Line, Room, Session, Violation, one_of, wall};
use crate::frame::{self, Frames, Stream};
use crate::lanes::{self, AsTaken, Pace};
use crate::limits::Peer;
use crate::message::{
    BATCH_MAX, Caller, FRAME_MAX, HELLO_MAX, Op, Outcome, ToClient, ToServer, VERSION,
    WINDOW_BYTES, WINDOW_OPS, WINDOW_UNIT,
};
use crate::protocol::Protocol;
use crate::refusal::{Cause, Refusal};

/// The number of `Hello` among the messages.
const HELLO: u8 = 1;
/// The first message must arrive within this time.
const HELLO_TIME_MAX: Duration = Duration::from_secs(10);
/// A peer that is silent for this long is considered dead. A client sends at least pings, and more
/// often.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// How often the server notes that a client sends something.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);
/// The other side has so long to read the last message and to hang up.
const LAST_MESSAGE_TIME_MAX: Duration = Duration::from_secs(1);
/// Requests of a client that wait for locks, or whose late answers are not sent yet.
const LOCK_WAITS_MAX: usize = 4096;
/// Pings whose answers are not sent yet; more are not answered.
const PINGS_MAX: usize = 16;

type Messages = Frames<ReadHalf<Box<dyn Stream>>>;

/// As fast as the client takes it, while this server surely has the volume.
struct OfOwner {
    taken: AsTaken,
    fs: Arc<dyn SessionStore>,
}

impl Pace for OfOwner {
    fn chunk(&self) -> Option<usize> {
        self.taken.chunk()
    }

    fn wrote(&self, bytes: usize) -> Option<Vec<u8>> {
        self.taken.wrote(bytes)
    }

    fn left(&self, bytes: usize, took: Duration) {
        self.taken.left(bytes, took);
    }

    fn bell(&self) -> &Notify {
        self.taken.bell()
    }

    fn is_sure(&self) -> bool {
        self.fs.is_surely_ours() || is_planted(Bug::ReadsAfterTerm)
    }

    fn ascertain(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        let fs = Arc::clone(&self.fs);
        Box::pin(async move {
            let looked = crate::rt::task::spawn_blocking(move || fs.ascertain_ours()).await;
            matches!(looked, Ok(Ok(())))
        })
    }
}

/// Serves a client until one of the two ends the connection. `peer` is the client's identity,
/// `newcomer` its entry in the admission.
pub(super) async fn serve(
    core: Arc<Core>,
    stream: Box<dyn Stream>,
    peer: Peer,
    newcomer: Option<Newcomer>,
) {
    let (reader, writer) = tokio::io::split(stream);
    let mut messages = Frames::new(reader, HELLO_MAX);
    let (line, outgoing) = lanes::line();
    let under_way = Arc::clone(&core.writing);
    let pace = OfOwner { taken: AsTaken::default(), fs: Arc::clone(&core.fs) };
    let writing = crate::rt::spawn(async move { lanes::write_all(writer, outgoing, &pace).await });
    let mut inside = None;
    let (from, certificate) = (newcomer.as_ref().map(|newcomer| newcomer.from), peer.name.clone());
    let last = match greet(&core, &mut messages, &line, (peer, from), (newcomer, &mut inside)).await
    {
        Ok((session, number, protocol)) => {
            let mut connection = Connection::new(&core, &session, (number, protocol), &line);
            messages.count_in(&session.heard);
            let ended = connection.run(&mut messages).await;
            drop(connection);
            session.disconnect(number, core.env.clock.monotonic(), &core.locks);
            session.log_departure(from, ended.as_ref().err().map(String::as_str));
            ended.err().map(|reason| ToClient::Refused { reason: reason.into_bytes() })
        }
        Err(refusal) => {
            core.refusals.note(&*core.env.clock, (from, certificate.as_deref()), &refusal);
            let reason = refusal.reason.into_bytes();
            let is_evicted = refusal.cause == Cause::Evicted;
            Some(if is_evicted {
                ToClient::Evicted { reason }
            } else {
                ToClient::Refused { reason }
            })
        }
    };
    if let Some(message) = last {
        line.send_first(frame::encode(&message), Vec::new());
    }
    drop(line);
    // The writer ends when everything that may answer has done so, or soon after the other side has
    // stopped reading.
    let _written = writing.await;
    // If a connection is closed with unread bytes, it is reset, and the other side may lose the
    // last message.
    let _elapsed = timeout(LAST_MESSAGE_TIME_MAX, messages.discard()).await;
    drop((under_way, inside));
}

/// Waits for `Hello`, and finds or makes the session.
async fn greet(
    core: &Arc<Core>,
    messages: &mut Messages,
    line: &Line,
    peer: (Peer, Option<SocketAddr>),
    (newcomer, inside): (Option<Newcomer>, &mut Option<OwnedSemaphorePermit>),
) -> Result<(Arc<Session>, u64, Protocol), Refusal> {
    let ready = timeout(HELLO_TIME_MAX, messages.ready()).await;
    let first = messages.next().filter(|_| matches!(ready, Ok(Ok(true))));
    let version = first.and_then(version_of).unwrap_or(VERSION);
    let Some(protocol) = Protocol::of(version) else {
        let (newer, older) =
            if version < VERSION { ("server", "client") } else { ("client", "server") };
        let reason = format!(
            "the client speaks version {version} of the protocol, the server {}: install the {newer}'s FerryFS on the {older}'s machine",
            Protocol::all()
        );
        return Err(Refusal::new(Cause::Version, reason));
    };
    let line = line.clone().speak(protocol, protocol.of_server());
    let hello = first.map(|message| protocol.decode_client(message));
    let Some(Ok(ToServer::Hello { session, path, name, newest, .. })) = hello else {
        let reason =
            "this is a FerryFS server, and the first message was no greeting of a FerryFS client";
        return Err(Refusal::new(Cause::NoGreeting, reason));
    };
    messages.expect(FRAME_MAX, protocol.has_chunks());
    // Not after this: a client that enters a session must not be cut off in between.
    if let Some(newcomer) = newcomer {
        let full =
            || Refusal::new(Cause::Full, "the server has as many connections as it can take");
        *inside = Some(newcomer.admit().ok_or_else(full)?);
    }
    let name: String =
        String::from_utf8_lossy(&name).chars().filter(|c| !c.is_control()).take(80).collect();
    let core = Arc::clone(core);
    let entered = crate::rt::task::spawn_blocking(move || {
        let entered = core.enter((session, newest), peer, &path, name, &line);
        entered.map(|(session, number)| (session, number, protocol))
    })
    .await;
    entered.unwrap_or_else(|_| Err(Refusal::new(Cause::Server, "the server stops")))
}

/// The version in a greeting. It has the same offset in every version.
fn version_of(greeting: &[u8]) -> Option<u32> {
    let (number, rest) = greeting.split_first()?;
    (*number == HELLO).then(|| rest.first_chunk().map(|version| u32::from_le_bytes(*version)))?
}

/// A request that is to be answered. If answering it panics, its client gets an error and does not
/// wait for ever.
struct Unanswered(Option<(Arc<Core>, Arc<Session>)>, (u64, u64));

impl Unanswered {
    fn new(core: &Arc<Core>, session: &Arc<Session>, id: (u64, u64)) -> Self {
        Self(Some((Arc::clone(core), Arc::clone(session))), id)
    }

    fn reply(mut self, leased: u8, outcome: Outcome, room: Option<Room>) {
        if let Some((_, session)) = self.0.take() {
            session.reply(self.1, leased, outcome, room);
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        // If the session or the server has ended, nothing is sent, which is no error.
        if let Some((core, session)) = self.0.take().filter(|_| std::thread::panicking()) {
            tracing::error!(client = session.name, "answering a request has panicked");
            let reply = |room| session.reply(self.1, 0, Outcome::Failed { errno: libc::EIO }, room);
            if !core.panics.end_server(&core.runtime, reply) {
                reply(None);
            }
        }
    }
}

/// Requests for locks that are not answered, and whether they are cancelled: a cancel may come
/// before its request is in the queue.
type Locking = Arc<Mutex<HashMap<u64, bool>>>;

/// Changes that have arrived and that no thread applies yet. They are applied together, when no
/// more have arrived.
struct Due<'a> {
    core: &'a Arc<Core>,
    session: &'a Arc<Session>,
    any: bool,
}

impl Due<'_> {
    fn begin(&mut self) {
        if std::mem::take(&mut self.any) {
            let (core, session) = (Arc::clone(self.core), Arc::clone(self.session));
            self.core.runtime.spawn_blocking(move || core.apply_all(&session));
        }
    }
}

impl Drop for Due<'_> {
    fn drop(&mut self) {
        self.begin();
    }
}

struct Connection<'a> {
    core: &'a Arc<Core>,
    session: &'a Arc<Session>,
    connection: u64,
    protocol: Protocol,
    line: &'a Line,
    due: Due<'a>,
    ops: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    locking: Locking,
    /// Room for requests that wait for locks, and for pings.
    lock_waits: Arc<Semaphore>,
    pings: Arc<Semaphore>,
    /// When the server last noted that the client sends something, and whether it has since the
    /// last ping.
    progress: (Duration, bool),
}

impl<'a> Connection<'a> {
    fn new(
        core: &'a Arc<Core>,
        session: &'a Arc<Session>,
        (connection, protocol): (u64, Protocol),
        line: &'a Line,
    ) -> Self {
        let ops = Arc::new(Semaphore::new(WINDOW_OPS));
        let bytes = Arc::new(Semaphore::new(WINDOW_BYTES / WINDOW_UNIT));
        let due = Due { core, session, any: false };
        let (lock_waits, pings) =
            (Arc::new(Semaphore::new(LOCK_WAITS_MAX)), Arc::new(Semaphore::new(PINGS_MAX)));
        let locking = Locking::default();
        let progress = (core.env.clock.monotonic(), false);
        Self {
            core,
            session,
            connection,
            protocol,
            line,
            due,
            ops,
            bytes,
            locking,
            lock_waits,
            pings,
            progress,
        }
    }

    /// Takes messages until the connection ends. An error is sent to the other side.
    async fn run(&mut self, messages: &mut Messages) -> Result<(), String> {
        let mut stopping = self.core.stopping.subscribe();
        let mut stopped = self.core.stopping.subscribe();
        loop {
            if !messages.is_ready() {
                self.due.begin();
                let more = crate::rt::select! {
                    more = timeout(SILENCE_MAX, messages.more()) => more,
                    // No more messages are taken; those that were taken are answered before the
                    // end.
                    () = Stage::Draining.reached(&mut stopping) => {
                        self.due.begin();
                        Stage::Ended.reached(&mut stopped).await;
                        return Ok(());
                    }
                };
                match more {
                    Err(_) => return Err("nothing was heard of the client for a while".into()),
                    Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                        return Err("the client sent what is no message".into());
                    }
                    Ok(Err(_) | Ok(false)) => return Ok(()),
                    Ok(Ok(true)) => {}
                }
                if !messages.is_ready() {
                    // A long message arrives slowly.
                    self.makes_progress();
                    continue;
                }
            } else if Stage::Draining.is_reached(&stopping) {
                self.due.begin();
                Stage::Ended.reached(&mut stopped).await;
                return Ok(());
            }
            let Some(bytes) = messages.next() else { continue };
            let len = bytes.len();
            // Another connection has taken over, or the session has ended: the client must not
            // think that this connection is good.
            if !self.session.is_at(self.connection) {
                return Ok(());
            }
            let Ok(message) = self.protocol.decode_client(bytes) else {
                return Err("the client sent what is no message".into());
            };
            match message {
                ToServer::Bye {} => {
                    self.end(CloseReason::Left).await;
                    return Ok(());
                }
                message => {
                    if let Err(Violation(rule)) = self.take(message, len).await {
                        // Nothing that it says of its session can be trusted any more.
                        self.end(CloseReason::Violation).await;
                        return Err(format!(
                            "the client has broken the rules of the protocol: {rule}"
                        ));
                    }
                }
            }
        }
    }

    /// The client sends something, however slowly. Returns the time.
    fn makes_progress(&mut self) -> Duration {
        let now = self.core.env.clock.monotonic();
        let noted = std::mem::replace(&mut self.progress.1, true);
        if !noted || now.saturating_sub(self.progress.0) >= PROGRESS_INTERVAL {
            self.progress.0 = now;
            self.core.leases.makes_progress(self.session.number);
        }
        now
    }

    /// Ends the session. That may wait for the device.
    async fn end(&self, reason: CloseReason) {
        let (core, session) = (Arc::clone(self.core), Arc::clone(self.session));
        let _ended = crate::rt::task::spawn_blocking(move || core.end(&session, reason)).await;
    }

    async fn room(&mut self, op: &Op, message: usize) -> Room {
        let units = op.units(message) as u32;
        let at_once = (
            Arc::clone(&self.ops).try_acquire_owned(),
            Arc::clone(&self.bytes).try_acquire_many_owned(units),
        );
        if let (Ok(ops), Ok(bytes)) = at_once {
            return (ops, bytes);
        }
        // There is room when those that have arrived are answered.
        self.due.begin();
        let ops = Arc::clone(&self.ops).acquire_owned().await.expect("the window is never closed");
        let bytes = Arc::clone(&self.bytes)
            .acquire_many_owned(units)
            .await
            .expect("the window is never closed");
        (ops, bytes)
    }

    async fn take(&mut self, message: ToServer, len: usize) -> Result<(), Violation> {
        match message {
            ToServer::Hello { .. } | ToServer::Bye {} => Err(Violation("a second greeting")),
            ToServer::Ping { number } => {
                // A client that has returned leases behind changes must send those changes.
                let brings = std::mem::take(&mut self.progress.1);
                let leases = &self.core.leases;
                let (renewed, epoch) = if brings || !self.session.owes_changes() {
                    leases.renew(self.session.number)
                } else {
                    (false, leases.fenced_before(self.session.number))
                };
                if let Some(room) = one_of(&self.pings) {
                    let durable = self.session.durable();
                    let mut frames = self.session.take_removed_names();
                    let now = wall(&*self.core.env.clock);
                    frames.extend(frame::encode(&ToClient::Pong {
                        number,
                        renewed,
                        epoch,
                        durable,
                        now,
                    }));
                    self.line.send_first(frames, vec![room]);
                }
                Ok(())
            }
            ToServer::Returned { inodes, after } => {
                if inodes.0.len() > BATCH_MAX {
                    return Err(Violation("more inodes than a message holds"));
                }
                self.session.returned(self.connection, (&inodes.0, after), &self.core.leases)
            }
            ToServer::Cancel { id } => {
                if let Some(cancelled) = self.locking.lock().get_mut(&id) {
                    *cancelled = true;
                }
                self.core.locks.cancel(self.session.id, Some(id));
                Ok(())
            }
            ToServer::Change { seq, answered, epoch, acknowledged: early, caller, op } => {
                if !op.is_ordered() {
                    return Err(Violation("a request among the changes"));
                }
                let room = self.room(&op, len).await;
                let arrived = self.makes_progress();
                let bytes = len;
                self.core.read_ahead(|| self.session.needed_by(&op, &self.core.key));
                let change =
                    Change { seq, answered, epoch, early, arrived, bytes, caller, op, room };
                self.due.any |= self.session.push(self.connection, change, &self.core.leases)?;
                Ok(())
            }
            ToServer::Request { id, after, caller, op } => {
                if op.is_ordered() {
                    return Err(Violation("a change among the requests"));
                }
                let room = self.room(&op, len).await;
                if !matches!(op, Op::Lock { .. }) {
                    self.request((id, after), caller, op, room);
                } else if let Some(slot) = one_of(&self.lock_waits) {
                    self.locking.lock().insert(id, false);
                    self.request_lock((id, after), caller, op, (room, slot));
                } else {
                    let refused = Outcome::Failed { errno: libc::ENOLCK };
                    self.session.reply((self.connection, id), 0, refused, Some(room));
                }
                Ok(())
            }
        }
    }

    fn request(&self, (id, after): (u64, u64), caller: Caller, op: Op, room: Room) {
        let (core, session, connection) =
            (Arc::clone(self.core), Arc::clone(self.session), self.connection);
        let runtime = core.runtime.clone();
        let run = move || {
            runtime.spawn_blocking(move || {
                let answer = Unanswered::new(&core, &session, (connection, id));
                let respond: Respond =
                    Box::new(move |outcome, leased| answer.reply(leased, outcome, Some(room)));
                answered(|| {
                    core.answer(Request { session, id: (connection, id), caller, op, respond })
                });
            });
        };
        self.session.when_applied(after, Box::new(run));
    }

    /// A lock may be waited for without end: such requests leave their room in the window to
    /// others, and their answers have room of their own.
    fn request_lock(
        &self,
        (id, after): (u64, u64),
        caller: Caller,
        op: Op,
        (room, slot): (Room, Room),
    ) {
        let (core, session, connection) =
            (Arc::clone(self.core), Arc::clone(self.session), self.connection);
        let locking = Arc::clone(&self.locking);
        let runtime = core.runtime.clone();
        let run = move || {
            runtime.spawn_blocking(move || {
                drop(room);
                let over = Arc::clone(&locking);
                let answer = Unanswered::new(&core, &session, (connection, id));
                let respond: Respond = Box::new(move |outcome, leased| {
                    over.lock().remove(&id);
                    answer.reply(leased, outcome, Some(slot));
                });
                let is_cancelled = || locking.lock().get(&id) == Some(&true);
                if is_cancelled() {
                    return respond(Outcome::Failed { errno: libc::EINTR }, 0);
                }
                let request = Request {
                    session: Arc::clone(&session),
                    id: (connection, id),
                    caller,
                    op,
                    respond,
                };
                answered(|| core.answer(request));
                if is_cancelled() {
                    core.locks.cancel(session.id, Some(id));
                }
            });
        };
        self.session.when_applied(after, Box::new(run));
    }
}
