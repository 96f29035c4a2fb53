//! One connection: the greeting, then messages in, answers out. Whatever comes from the other side costs it its connection at most.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::ReadHalf;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use super::apply::Told;
use super::requests::Request;
use super::session::{Change, Line, Room, Session, Violation, one_of};
use super::{Core, Refusal, Stage};
use crate::codec::List;
use crate::frame::{self, Frames, Stream};
use crate::limits::Peer;
use crate::message::{
    BATCH_MAX, FRAME_MAX, HELLO_MAX, Op, Outcome, ToClient, ToServer, VERSION, WINDOW_BYTES, WINDOW_OPS,
    WINDOW_UNIT, Who,
};

/// The first message must have come after this time.
const HELLO_TIME_MAX: Duration = Duration::from_secs(10);
/// Who says nothing for so long is gone: a client says at least that it is there, more often than that.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// The other side has so long to take the last words and to hang up.
const LAST_WORDS_TIME_MAX: Duration = Duration::from_secs(1);
/// Requests of a client that wait for locks, or whose late answers are not on their way.
const LOCK_WAITS_MAX: usize = 4096;
/// Pings whose answers are not on their way; more are not answered: who does not read has no use for them.
const PINGS_MAX: usize = 16;

type Messages = Frames<ReadHalf<Box<dyn Stream>>>;

/// Speaks with a client until one of the two goes. `peer` says who it is.
pub(super) async fn serve(core: Arc<Core>, stream: Box<dyn Stream>, peer: Peer) {
    let (reader, writer) = tokio::io::split(stream);
    let mut messages = Frames::new(reader, HELLO_MAX);
    let (line, frames) = unbounded_channel();
    let under_way = Arc::clone(&core.writing);
    let writing = tokio::spawn(frame::write_all(writer, frames));
    let ended = match greet(&core, &mut messages, &line, peer).await {
        Ok((session, epoch)) => {
            let mut connection = Connection::new(&core, &session, epoch, &line);
            messages.set_max(FRAME_MAX);
            let ended = connection.run(&mut messages).await;
            drop(connection);
            session.disconnect(epoch, core.env.clock.monotonic(), &core.locks);
            tracing::info!(client = session.name, error = ended.as_ref().err(), "disconnected");
            ended.map_err(Refusal::Because)
        }
        Err(refused) => Err(refused),
    };
    if let Err(refusal) = ended {
        let word = match refusal {
            Refusal::Because(reason) => ToClient::Refused { reason: reason.into_bytes() },
            Refusal::Evicted => ToClient::Evicted {},
        };
        let _gone = line.send((frame::encode(&word), Vec::new()));
    }
    drop(line);
    // It ends when whoever may still answer has done so, or soon after the other side has stopped to read.
    let _written = writing.await;
    // A connection that is closed with something unread is reset, and the other side may lose the last words.
    let _late = timeout(LAST_WORDS_TIME_MAX, messages.discard()).await;
    drop(under_way);
}

/// Waits for `Hello`, and finds or makes the session.
async fn greet(
    core: &Arc<Core>,
    messages: &mut Messages,
    line: &Line,
    peer: Peer,
) -> Result<(Arc<Session>, u64), Refusal> {
    let ready = timeout(HELLO_TIME_MAX, messages.ready()).await;
    let hello = messages.next().filter(|_| matches!(ready, Ok(Ok(true)))).map(crate::codec::decode);
    let Some(Ok(ToServer::Hello { version, session, path, name, newest })) = hello else {
        return Err("this is a FerryFS server, and what came was no greeting of a FerryFS client".into());
    };
    if version != VERSION {
        return Err(Refusal::Because(format!(
            "the client speaks version {version} of the protocol, the server {VERSION}: install the same FerryFS on both"
        )));
    }
    let name: String = String::from_utf8_lossy(&name).chars().filter(|c| !c.is_control()).take(80).collect();
    let core = Arc::clone(core);
    let line = line.clone();
    let entered =
        tokio::task::spawn_blocking(move || core.enter((session, newest), peer, &path, name, &line)).await;
    entered.unwrap_or_else(|_| Err("the server stops".into()))
}

/// A request that is to be answered. If answering it panics, its client hears of an error, and does not wait for ever.
struct Unanswered(Option<Arc<Session>>, (u64, u64));

impl Unanswered {
    fn new(session: &Arc<Session>, id: (u64, u64)) -> Self {
        Self(Some(Arc::clone(session)), id)
    }

    fn reply(mut self, leased: u8, outcome: Outcome, room: Option<Room>) {
        if let Some(session) = self.0.take() {
            session.reply(self.1, leased, outcome, room);
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        // Nobody hears it where the session or the server has ended, which is no error.
        if let Some(session) = self.0.take().filter(|_| std::thread::panicking()) {
            tracing::error!(client = session.name, "answering a request has panicked");
            session.reply(self.1, 0, Outcome::Failed { errno: libc::EIO }, None);
        }
    }
}

/// Requests for locks that are not answered, and whether they are cancelled: a cancel may come before its request stands in line.
type Locking = Arc<Mutex<HashMap<u64, bool>>>;

/// Changes that have come and that nobody applies yet: they are applied together, when no more have come. Once they are taken, in any case.
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
    epoch: u64,
    line: &'a Line,
    due: Due<'a>,
    ops: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    locking: Locking,
    /// Room for those who wait for locks, and for pings.
    lock_waits: Arc<Semaphore>,
    pings: Arc<Semaphore>,
}

impl<'a> Connection<'a> {
    fn new(core: &'a Arc<Core>, session: &'a Arc<Session>, epoch: u64, line: &'a Line) -> Self {
        let ops = Arc::new(Semaphore::new(WINDOW_OPS));
        let bytes = Arc::new(Semaphore::new(WINDOW_BYTES / WINDOW_UNIT));
        let due = Due { core, session, any: false };
        let (lock_waits, pings) =
            (Arc::new(Semaphore::new(LOCK_WAITS_MAX)), Arc::new(Semaphore::new(PINGS_MAX)));
        let locking = Locking::default();
        Self { core, session, epoch, line, due, ops, bytes, locking, lock_waits, pings }
    }

    /// Takes messages until the connection ends; an error is told to the other side.
    async fn run(&mut self, messages: &mut Messages) -> Result<(), String> {
        let mut stopping = self.core.stopping.subscribe();
        let mut stopped = self.core.stopping.subscribe();
        loop {
            if !messages.is_ready() {
                self.due.begin();
            }
            let ready = tokio::select! {
                ready = timeout(SILENCE_MAX, messages.ready()) => ready,
                // Nothing more is taken; what was taken is answered before the end.
                () = Stage::Draining.reached(&mut stopping) => {
                    self.due.begin();
                    Stage::Ended.reached(&mut stopped).await;
                    return Ok(());
                }
            };
            match ready {
                Err(_) => return Err("nothing was heard of the client for a while".into()),
                Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err("the client sent what is no message".into());
                }
                Ok(Err(_) | Ok(false)) => return Ok(()),
                Ok(Ok(true)) => {}
            }
            let Some(bytes) = messages.next() else { continue };
            let len = bytes.len();
            // Another connection has taken over, or the session has ended: who still speaks here must not take it for alive.
            if !self.session.is_at(self.epoch) {
                return Ok(());
            }
            let Ok(message) = crate::codec::decode(bytes) else {
                return Err("the client sent what is no message".into());
            };
            match message {
                ToServer::Bye {} => {
                    self.core.leave(self.session);
                    return Ok(());
                }
                message => self.take(message, len).await.map_err(|Violation(rule)| {
                    // Nothing that it says of its session can be believed any more.
                    self.core.end(self.session);
                    format!("the client has broken the rules of the protocol: {rule}")
                })?,
            }
        }
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
        // There is room when those that have come are answered.
        self.due.begin();
        let ops = Arc::clone(&self.ops).acquire_owned().await.expect("the window is never closed");
        let bytes =
            Arc::clone(&self.bytes).acquire_many_owned(units).await.expect("the window is never closed");
        (ops, bytes)
    }

    async fn take(&mut self, message: ToServer, len: usize) -> Result<(), Violation> {
        match message {
            ToServer::Hello { .. } | ToServer::Bye {} => Err(Violation("a second greeting")),
            ToServer::Ping {} => {
                let (renewed, series) = self.core.leases.renew(self.session.number);
                if let Some(room) = one_of(&self.pings) {
                    let durable = self.session.durable();
                    let names = self.session.take_lost_names();
                    let gone =
                        names.chunks(BATCH_MAX).map(|batch| ToClient::Gone { names: List(batch.to_vec()) });
                    let mut frames = gone.flat_map(|message| frame::encode(&message)).collect::<Vec<u8>>();
                    frames.extend(frame::encode(&ToClient::Pong { renewed, series, durable }));
                    let _closed = self.line.send((frames, vec![room]));
                }
                Ok(())
            }
            ToServer::Returned { inodes, after } => {
                if inodes.0.len() > BATCH_MAX {
                    return Err(Violation("more inodes than a message holds"));
                }
                self.session.returned(self.epoch, (&inodes.0, after), &self.core.leases)
            }
            ToServer::Cancel { id } => {
                if let Some(cancelled) = self.locking.lock().get_mut(&id) {
                    *cancelled = true;
                }
                self.core.locks.cancel(self.session.id, Some(id));
                Ok(())
            }
            ToServer::Change { seq, answered, series, promised, who, op } => {
                if !op.is_ordered() {
                    return Err(Violation("a request among the changes"));
                }
                let room = self.room(&op, len).await;
                let came = self.core.env.clock.monotonic();
                let change = Change { seq, series, promised, came, bytes: len, who, op, room };
                self.due.any |= self.session.push(self.epoch, change, answered, &self.core.leases)?;
                Ok(())
            }
            ToServer::Request { id, after, who, op } => {
                if op.is_ordered() {
                    return Err(Violation("a change among the requests"));
                }
                let room = self.room(&op, len).await;
                if !matches!(op, Op::Lock { .. }) {
                    self.request((id, after), who, op, room);
                } else if let Some(place) = one_of(&self.lock_waits) {
                    self.locking.lock().insert(id, false);
                    self.request_lock((id, after), who, op, (room, place));
                } else {
                    let refused = Outcome::Failed { errno: libc::ENOLCK };
                    self.session.reply((self.epoch, id), 0, refused, Some(room));
                }
                Ok(())
            }
        }
    }

    fn request(&self, (id, after): (u64, u64), who: Who, op: Op, room: Room) {
        let (core, session, epoch) = (Arc::clone(self.core), Arc::clone(self.session), self.epoch);
        let runtime = core.runtime.clone();
        let run = move || {
            runtime.spawn_blocking(move || {
                let answer = Unanswered::new(&session, (epoch, id));
                let told: Told = Box::new(move |outcome, leased| answer.reply(leased, outcome, Some(room)));
                core.answer(Request { session, id: (epoch, id), who, op, told });
            });
        };
        self.session.when_applied(after, Box::new(run));
    }

    /// A lock may be waited for without end: those who wait leave their room in the window to others. Their answers have another place.
    fn request_lock(&self, (id, after): (u64, u64), who: Who, op: Op, (room, place): (Room, Room)) {
        let (core, session, epoch) = (Arc::clone(self.core), Arc::clone(self.session), self.epoch);
        let locking = Arc::clone(&self.locking);
        let runtime = core.runtime.clone();
        let run = move || {
            runtime.spawn_blocking(move || {
                drop(room);
                let answered = Arc::clone(&locking);
                let answer = Unanswered::new(&session, (epoch, id));
                let told: Told = Box::new(move |outcome, leased| {
                    answered.lock().remove(&id);
                    answer.reply(leased, outcome, Some(place));
                });
                let is_cancelled = || locking.lock().get(&id) == Some(&true);
                if is_cancelled() {
                    return told(Outcome::Failed { errno: libc::EINTR }, 0);
                }
                core.answer(Request { session: Arc::clone(&session), id: (epoch, id), who, op, told });
                if is_cancelled() {
                    core.locks.cancel(session.id, Some(id));
                }
            });
        };
        self.session.when_applied(after, Box::new(run));
    }
}
