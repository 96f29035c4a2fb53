//! The way to the server: operations that wait for their answers, and the connection that is made
//! again when it is lost.
//!
//! * LINK-1: a change keeps its number until it is answered or its session is gone; after a
//!   reconnect to the same session everything unanswered is sent again, in order.
//! * LINK-2: an operation that nobody waits for any more is not made if it has not been made yet:
//!   `Nothing` goes in its place. What gives something back (a lock, an open file), and what
//!   restores a session, is made in any case.
//! * LINK-3: when the session is gone, changes that were never sent go to the new one, behind what
//!   restores its state. Those that were sent go there too, where they were not made or come to the
//!   same once more (`kept::Unanswered`), and after a goodbye; else they fail with `EIO`: they may
//!   have been applied or not. Promised ones among them are made again, with those that were
//!   answered and not durable (`kept`); else they are lost, and that is told (`promises`).
//! * LINK-4: `answer`, `fail` and `moved` are called without the lock held, and nothing that has a
//!   [`Touch`] is dropped under it.

use crate::rt::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::time::{interval, sleep, timeout};
use ferry_env::Clock;
use ferry_fs::{Errno, Ino, ToForget};
use serde_json::Value;
use tokio::sync::Notify;

use super::cache::{Cache, Touch};
use super::kernel::Kernel;
use super::waiting::Waiting;
use crate::codec;
use crate::frame::{self, Frames, Stream};
use crate::lanes;
use crate::message::{
    Claim, FRAME_MAX, Numbers, Op, Outcome, Promised, ToClient, ToServer, VERSION, Who,
};
use crate::tls::in_words;

mod decided;
mod flow;
mod kept;
mod promises;
mod stream;
mod unclaimed;

use flow::Flow;
use kept::Kept;
pub(super) use kept::{KeptChange, Redo};
use promises::Gone;
use stream::{Line, Outbox, Window, begin_anew, pump, pump_requests};
use unclaimed::Unclaimed;

/// A connection and its greeting must be made after this time.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// The server is asked at least so often whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(3);
/// And not more often, whatever term the server names.
const PING_INTERVAL_MIN: Duration = Duration::from_millis(20);
/// Who says nothing for so long is gone,
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// or for so long where operations may not wait longer.
const SILENCE_MIN: Duration = Duration::from_secs(5);
/// After a connection that failed the next is tried after this time, then twice that, and so on,
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// up to this,
const RETRY_MAX: Duration = Duration::from_secs(1);
/// or up to this where the server says that it does not want this client.
const RETRY_REFUSED_MAX: Duration = Duration::from_secs(30);

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send + 'a>>;

/// Makes connections.
pub trait Connector: Send + Sync + 'static {
    /// A new connection to the server.
    fn connect(&self) -> Connecting<'_>;
}

/// Who waits for an operation.
pub(super) trait Waiter: Send + Sync {
    /// The answer, and what may be kept of it; also when [`Waiter::fail`] was called before.
    fn answer(&self, outcome: Outcome, leased: u8);
    /// There will hardly be an answer.
    fn fail(&self, errno: Errno);
    /// The operation has another place now.
    fn moved(&self, _key: Key) {}
}

/// An operation on its way.
pub(super) struct Pending {
    pub(super) who: Who,
    pub(super) op: Op,
    pub(super) waiter: Arc<dyn Waiter>,
    /// The open files that it names.
    pub(super) files: Vec<(u64, Ino)>,
    /// What a change does to what is kept.
    pub(super) touch: Option<Touch>,
    /// The change was answered already, and this was shown.
    pub(super) promised: Option<Promised>,
    /// Requests about these inodes are made behind the change.
    pub(super) touched: Vec<Ino>,
    /// Write leases that were taken for the change alone.
    pub(super) borrowed: Vec<Ino>,
    /// It is made again after a crash, and nobody has to hear of it if what it touches is gone.
    pub(super) quiet: bool,
    /// So often the server has found no space for it.
    pub(super) refusals: u32,
}

impl Pending {
    pub(super) fn new(who: Who, op: Op, waiter: Arc<dyn Waiter>) -> Self {
        let (files, touched, borrowed) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            who,
            op,
            waiter,
            files,
            touch: None,
            promised: None,
            touched,
            borrowed,
            quiet: false,
            refusals: 0,
        }
    }

    /// The inode of an open file.
    pub(super) fn file(&self, fh: u64) -> Option<Ino> {
        self.files.iter().find(|(file, _)| *file == fh).map(|(_, ino)| *ino)
    }

    /// Bytes that it keeps in memory, roughly.
    fn bytes(&self) -> usize {
        self.op.info().data_bytes
    }
}

/// What a new session needs to know of the old one.
pub(super) trait Restore: Send + Sync {
    /// What brings the new session to where the old one was.
    fn restore(&self, before: Before) -> Restored;
    /// The server has ended because of something that restores the session: that is not done again.
    fn fatal(&self, op: &Op);
    /// These are known in the session, if they are there: named by an answer with this stamp.
    fn claimed(&self, inos: &[Claim], stamp: u64);
    /// Whether any file locks are held. Called with the link's lock held.
    fn has_locks(&self) -> bool {
        false
    }
    /// These promised changes are lost: nothing is changed on top of them before programs are told.
    /// Called with the link's lock held.
    fn damaged(&self, _changes: &[&Pending]) {}
    /// Whether a change would be made on top of what is lost. Called with the link's lock held.
    fn refuses(&self, _op: &Op, _files: &[(u64, Ino)]) -> bool {
        false
    }
    /// Promised changes are lost, and [`Restore::damaged`] was told.
    fn lost(&self, changes: Vec<Pending>);
    /// Nothing of these (`None`: of any inode) is kept any more, whoever might have asked for it.
    fn given_up(&self, inos: Option<&[Ino]>);
    /// A change was not made, for another session has write leases on what it touches.
    fn busy(&self, change: Pending);
    /// A change was not made, for there is no space.
    fn lacks_space(&self, change: Pending) {
        change.waiter.answer(Outcome::Failed { errno: libc::ENOSPC }, 0);
    }
    /// Another client finds no space: what its files take that have no name any more is to be free
    /// soon.
    fn hurry(&self) {}
    /// Attributes are not what the client had decided.
    fn differs(&self, ino: Ino);
    /// Some time has passed.
    fn tick(&self);
}

/// What a new session is told.
#[derive(Default)]
pub(super) struct Restored {
    /// Before anything else, in this order.
    pub(super) first: Vec<Pending>,
    /// What the kernel knows beside that: it is claimed when it is needed, or when there is time.
    pub(super) rest: Vec<Claim>,
}

/// What became of the server before.
pub(super) enum Before {
    /// All that it had answered is durable.
    Clean,
    /// It goes on, and has ended the session.
    Ended,
    /// It has crashed, and this may be lost.
    Crashed(Redo),
}

/// An operation's place.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    Change(u64),
    Request(u64),
}

pub(super) struct Change {
    pub(super) pending: Pending,
    /// It was sent on some connection of this session.
    sent: bool,
    /// What it takes of the window on this connection; 0: it was not sent.
    units: usize,
    abandoned: bool,
    /// It brings a session to where the one before it was.
    restores: bool,
    /// The server has ended because of it: it is not sent again.
    fatal: bool,
    /// It ends with the promised change of the same series that fails.
    series: u32,
    /// When it came into the stream.
    since: Duration,
}

impl Change {
    /// Nobody waits for it.
    fn is_patient(&self) -> bool {
        self.pending.promised.is_some() || !self.pending.op.info().is_awaited
    }

    fn new(pending: Pending, series: u32) -> Self {
        Self {
            pending,
            sent: false,
            units: 0,
            abandoned: false,
            restores: false,
            fatal: false,
            series,
            since: Duration::ZERO,
        }
    }

    /// Nobody waits for it any more: it is not made, unless it gives something back or the session
    /// needs it.
    fn give_up(&mut self) {
        let is_always_made = self.pending.op.info().is_always_made;
        self.abandoned |= !is_always_made && !self.restores && self.pending.promised.is_none();
    }
}

struct Request {
    pending: Pending,
    /// It is made behind this change.
    after: u64,
    /// And behind all changes of the inode that it names, up to this one.
    covers: u64,
    units: usize,
    cancelled: bool,
}

struct State {
    session: u128,
    boot: u128,
    next_change: u64,
    answered: u64,
    /// Changes up to this one were sent on this connection.
    sent: u64,
    changes: BTreeMap<u64, Box<Change>>,
    series: u32,
    /// The newest change of each inode that has unanswered ones.
    touching: HashMap<Ino, u64>,
    /// Promised changes that are not answered: how many, the newest one, and the bytes of all
    /// changes.
    promised: usize,
    newest_promised: u64,
    queued_bytes: usize,
    /// Changes that are answered and not durable.
    kept: Kept,
    /// What the kernel knows and the session does not yet.
    unclaimed: Unclaimed,
    /// What is promised and shown when there is room in the window again.
    held: Vec<(Arc<Waiting>, Outcome)>,
    /// The newest change behind which leases were given back: the server waits for it.
    returned: u64,
    next_request: u64,
    requests: BTreeMap<u64, Request>,
    window: Window,
    /// Requests that are not sent yet: behind changes that are not, or without room.
    delayed: Vec<u64>,
    /// All requests are made behind this change.
    after: u64,
    /// And those for space behind this one, which says how much is left: what they bring is not
    /// counted there.
    spare: u64,
    line: Option<Line>,
    /// How much the connection carries.
    flow: Option<Arc<Flow>>,
    outbox: Outbox,
    /// Since when there is no connection.
    gone_at: Option<Duration>,
    said_goodbye: bool,
    /// Nothing goes on any more: what operations fail with.
    over: Option<Errno>,
    reconnects: u64,
    read_only: bool,
    clock: Arc<dyn Clock>,
    /// Promised changes were lost, once at least.
    lossy: bool,
    /// Why the server does not let this client in, if that is what it says.
    refused: Option<String>,
}

impl State {
    /// Promised changes are lost.
    fn lose(&mut self, gone: &mut Gone, restore: &dyn Restore) {
        if !gone.promised.is_empty() {
            self.lossy = true;
            restore
                .damaged(&gone.promised.iter().map(|change| &change.pending).collect::<Vec<_>>());
        }
    }

    /// Whether a change would be made on top of what was lost, and its program does not know.
    fn is_damaged(&self, pending: &Pending, restore: Option<&dyn Restore>) -> bool {
        self.lossy && restore.is_some_and(|owner| owner.refuses(&pending.op, &pending.files))
    }
}

/// The way to one server.
pub(super) struct Link {
    connector: Arc<dyn Connector>,
    clock: Arc<dyn Clock>,
    path: Vec<u8>,
    name: Vec<u8>,
    /// Operations wait so long for a server that is gone.
    timeout: Duration,
    cache: Arc<Cache>,
    kernel: Arc<Kernel>,
    this: Weak<Link>,
    state: Mutex<State>,
    owner: Mutex<Option<Arc<dyn Restore>>>,
    closed: Notify,
    ended: Notify,
    /// No promised change is unanswered, or the connection is gone.
    drained: Notify,
}

type Greeted = (Box<dyn Stream>, ToClient);

impl Link {
    pub(super) fn new(
        connector: Arc<dyn Connector>,
        clock: Arc<dyn Clock>,
        (path, name): (Vec<u8>, Vec<u8>),
        timeout: Duration,
        (cache, kernel): (Arc<Cache>, Arc<Kernel>),
    ) -> Arc<Self> {
        let state = State {
            session: 0,
            boot: 0,
            next_change: 1,
            answered: 0,
            sent: 0,
            changes: BTreeMap::new(),
            series: 0,
            touching: HashMap::default(),
            promised: 0,
            newest_promised: 0,
            queued_bytes: 0,
            kept: Kept::default(),
            unclaimed: Unclaimed::default(),
            held: Vec::new(),
            returned: 0,
            next_request: 1,
            requests: BTreeMap::new(),
            window: Window::default(),
            delayed: Vec::new(),
            after: 0,
            spare: 0,
            line: None,
            flow: None,
            outbox: Outbox::default(),
            gone_at: Some(clock.monotonic()),
            said_goodbye: false,
            over: None,
            reconnects: 0,
            read_only: false,
            clock: Arc::clone(&clock),
            lossy: false,
            refused: None,
        };
        Arc::new_cyclic(|this| Self {
            connector,
            clock,
            path,
            name,
            timeout,
            cache,
            kernel,
            this: this.clone(),
            state: Mutex::new(state),
            owner: Mutex::default(),
            closed: Notify::new(),
            ended: Notify::new(),
            drained: Notify::new(),
        })
    }

    /// Sends a change behind all before it, or keeps it until it can be sent. Write leases on what
    /// it touches are given back behind it.
    pub(super) fn change(&self, mut pending: Pending) -> Option<Key> {
        debug_assert!(pending.op.is_ordered(), "{:?}", pending.op);
        let mut cache = self.cache.lock();
        let mut state = self.state.lock();
        if let Some(errno) = self.hopeless(&state) {
            drop((state, cache));
            pending.waiter.fail(errno);
            return None;
        }
        if state.lossy && state.is_damaged(&pending, self.owner.lock().as_deref()) {
            drop((state, cache));
            pending.waiter.fail(Errno(libc::EIO));
            return None;
        }
        let mut returned = std::mem::take(&mut pending.borrowed);
        if let Op::Open { ino, .. } = &pending.op {
            pending.touched = vec![*ino];
        }
        pending.touch = self.cache.begin(&mut cache, &pending.op, |fh| pending.file(fh));
        if let Some(touch) = &mut pending.touch {
            pending.touched.clone_from(&touch.inos().to_vec());
            returned.extend(touch.take_held());
        }
        let seq = state.push(pending);
        if !returned.is_empty() {
            returned.sort_unstable();
            returned.dedup();
            cache.recall(&returned, false, self.cache.now());
            let to_forget = cache.take_to_forget();
            if to_forget == ToForget::default() {
                state.give_back(&returned, seq);
                cache.given_back();
                pump(&mut state);
            } else {
                cache.withdraw(&returned);
                pump(&mut state);
                drop((state, cache));
                self.return_withdrawn(returned, to_forget, seq);
            }
            return Some(Key::Change(seq));
        }
        pump(&mut state);
        Some(Key::Change(seq))
    }

    /// Sends a request, or keeps it until it can be sent.
    pub(super) fn request(&self, pending: Pending) -> Option<Key> {
        debug_assert!(!pending.op.is_ordered(), "{:?}", pending.op);
        let mut state = self.state.lock();
        if let Some(errno) = self.hopeless(&state) {
            drop(state);
            pending.waiter.fail(errno);
            return None;
        }
        Some(Key::Request(state.ask(pending)))
    }

    /// Numbers have been given, for what is promised.
    pub(super) fn numbered(&self, numbers: Numbers) {
        self.state.lock().kept.add_numbers(numbers);
    }

    /// The kernel has forgotten an inode: what is kept may need it. Whether the session knows it,
    /// or will.
    pub(super) fn remember(&self, claim: Claim) -> bool {
        let mut state = self.state.lock();
        let newest = state.next_change - 1;
        state.kept.remember(claim, newest);
        !state.unclaim(claim.ino)
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&self, key: Key) {
        let mut state = self.state.lock();
        match key {
            Key::Change(seq) => {
                if let Some(change) = state.changes.get_mut(&seq) {
                    change.give_up();
                }
            }
            Key::Request(id) => {
                if let Some(request) = state.requests.get_mut(&id) {
                    request.cancelled = true;
                    send(&mut state, frame::encode(&ToServer::Cancel { id }));
                }
            }
        }
    }

    /// A file is lost: changes of it that are not sent yet fail.
    pub(super) fn fail_unsent(&self, ino: Ino) {
        let mut waiters = Vec::new();
        {
            let mut state = self.state.lock();
            let unsent = state.sent + 1;
            for change in state.changes.range_mut(unsent..).map(|(_, change)| change) {
                let Pending { touched, files, .. } = &change.pending;
                let names_it = touched.contains(&ino) || files.iter().any(|(_, file)| *file == ino);
                if names_it && !change.abandoned {
                    change.give_up();
                    waiters.extend(change.abandoned.then(|| Arc::clone(&change.pending.waiter)));
                }
            }
        }
        waiters.iter().for_each(|waiter| waiter.fail(Errno(libc::EIO)));
    }

    /// The errno for operations that begin when the server has been gone for too long.
    fn hopeless(&self, state: &State) -> Option<Errno> {
        if state.over.is_some() {
            return state.over;
        }
        let gone = state.gone_at.map(|at| self.clock.monotonic().saturating_sub(at));
        gone.is_some_and(|gone| gone >= self.timeout).then_some(Errno(libc::ETIMEDOUT))
    }

    /// What the server's first welcome says.
    pub(super) fn set_read_only(&self, read_only: bool) {
        self.state.lock().read_only = read_only;
    }

    /// Whether the server lets this client change anything.
    pub(super) fn is_read_only(&self) -> bool {
        self.state.lock().read_only
    }

    /// For `ferry stats`.
    pub(super) fn json(&self) -> Value {
        let state = self.state.lock();
        let (kept, bytes, oldest) = state.kept.figures(self.clock.monotonic());
        Value::from_iter([
            ("kept_changes", Value::from(kept)),
            ("kept_bytes", bytes.into()),
            ("kept_oldest_ms", oldest.map(|age| age.as_millis() as u64).into()),
            ("connected", Value::from(state.line.is_some())),
            ("refused", state.refused.clone().into()),
            ("reconnects", state.reconnects.into()),
            ("changes", (state.next_change - 1).into()),
            ("unanswered_changes", state.changes.len().into()),
            ("unanswered_ms", (state.age().as_millis() as u64).into()),
            ("unanswered_requests", state.requests.len().into()),
            ("promised", state.promised.into()),
            ("series", state.series.into()),
            ("unclaimed", state.unclaimed.len().into()),
            ("bytes_under_way", state.flow.as_ref().map(|flow| flow.figures().0).into()),
            ("bytes_under_way_max", state.flow.as_ref().map(|flow| flow.figures().1).into()),
        ])
    }

    /// Connects and exchanges greetings.
    pub(super) async fn greet(&self) -> io::Result<Greeted> {
        let greeting = async {
            let mut stream = self.connector.connect().await?;
            // The server takes the greeting as word that nothing is kept, by the kernel either.
            self.cache.drop_all();
            let to_forget = self.cache.lock().take_to_forget();
            self.kernel.forgotten(to_forget).await;
            let (session, newest) = {
                let state = self.state.lock();
                (state.session, state.next_change - 1)
            };
            let hello = ToServer::Hello {
                version: VERSION,
                session,
                path: self.path.clone(),
                name: self.name.clone(),
                newest,
            };
            tokio::io::AsyncWriteExt::write_all(&mut stream, &frame::encode(&hello)).await?;
            tokio::io::AsyncWriteExt::flush(&mut stream).await?;
            let welcome = frame::read(&mut stream, FRAME_MAX).await?;
            Ok((stream, welcome.ok_or(io::ErrorKind::UnexpectedEof)?))
        };
        let greeted = timeout(CONNECT_TIME_MAX, greeting).await;
        // The server looks at the certificate when this side takes the handshake for done.
        greeted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(in_words)
    }

    /// When the server has heard that the mount is gone.
    pub(super) async fn told(&self) {
        self.ended.notified().await;
    }

    /// Lives as long as the mount.
    pub(super) async fn run(&self, first: Greeted, restore: Arc<dyn Restore>) {
        *self.owner.lock() = Some(Arc::clone(&restore));
        self.stay_connected(first, restore).await;
        self.ended.notify_one();
    }

    /// On `first`, then on each connection after it.
    async fn stay_connected(&self, first: Greeted, restore: Arc<dyn Restore>) {
        let mut greeted = Some(first);
        let mut retry = RETRY_FIRST;
        let mut refused = None;
        loop {
            let mut most = RETRY_MAX;
            match greeted.take() {
                Some((_, ToClient::Refused { reason })) => {
                    most = RETRY_REFUSED_MAX;
                    let reason = String::from_utf8_lossy(&reason).into_owned();
                    if refused.as_ref() != Some(&reason) {
                        tracing::error!(
                            "the server refuses this client: {reason}: operations wait, and fail if that lasts"
                        );
                        self.state.lock().refused = Some(reason.clone());
                        refused = Some(reason);
                    }
                }
                Some((stream, welcome)) => {
                    let is_welcome = matches!(welcome, ToClient::Welcome { .. });
                    (refused, self.state.lock().refused) = (None, None);
                    let ended = self.converse(stream, welcome, &*restore).await;
                    if self.leave() {
                        return;
                    }
                    // One that was made may be lost in the middle of a message.
                    if is_welcome {
                        retry = RETRY_FIRST;
                    }
                    if let Err(error) = ended {
                        tracing::warn!(%error, "the server is gone: operations wait for it");
                    }
                }
                None => {}
            }
            if self.waits_to_try(retry).await {
                return;
            }
            retry = most.min(retry * 2);
            greeted = crate::rt::select! {
                result = self.greet() => result.inspect_err(|error| tracing::debug!(%error, "no connection")).ok(),
                () = self.late() => None,
                () = self.closed.notified() => return,
            };
        }
    }

    /// Until it is time to try again; whether the mount is gone. Operations that have waited long
    /// enough meanwhile fail.
    async fn waits_to_try(&self, retry: Duration) -> bool {
        let mut wait = pin!(sleep(retry));
        loop {
            let over = crate::rt::select! {
                () = &mut wait => Some(false),
                () = self.late() => None,
                () = self.closed.notified() => Some(true),
            };
            self.give_up_if_late();
            if let Some(over) = over {
                return over;
            }
        }
    }

    /// When operations have waited long enough.
    async fn late(&self) {
        let at = self.state.lock().gone_at.map(|at| at + self.timeout);
        let now = self.clock.monotonic();
        match at {
            Some(at) if at > now => sleep(at - now).await,
            _ => std::future::pending().await,
        }
    }

    /// One connection's life.
    async fn converse(
        &self,
        stream: Box<dyn Stream>,
        welcome: ToClient,
        restore: &dyn Restore,
    ) -> io::Result<()> {
        let (reader, writer) = tokio::io::split(stream);
        let mut messages = Frames::new(reader, FRAME_MAX);
        let (line, outgoing) = lanes::line();
        let flow = Arc::new(Flow::new(Arc::clone(&self.clock), self.term_of(&welcome)));
        let paced = Arc::clone(&flow);
        let writing =
            crate::rt::spawn(async move { lanes::write_all(writer, outgoing, &*paced).await });
        self.state.lock().flow = Some(Arc::clone(&flow));
        // Before there is anything else: so long takes a ping on an empty connection.
        line.send_first(flow.ping(), ());
        self.enter(welcome, &line, restore)?;
        tracing::info!("connected to the server");
        let heard = Mutex::new(self.clock.monotonic());
        let mut reading = pin!(async {
            while messages.more().await? {
                *heard.lock() = self.clock.monotonic();
                while let Some(bytes) = messages.next() {
                    let message =
                        codec::decode(bytes).map_err(|codec::Malformed| frame::malformed())?;
                    if !self.take(message, restore)? {
                        return Ok(());
                    }
                }
            }
            Ok(())
        });
        // A ping may be lost, and the next one must still come in time.
        let mut tick = interval(PING_INTERVAL.min(self.cache.term() / 3).max(PING_INTERVAL_MIN));
        let mut sending = pin!(self.send_waiting());
        let ended = loop {
            crate::rt::select! {
                ended = &mut reading => break ended,
                () = &mut sending => {}
                () = self.closed.notified() => break Ok(()),
                _ = tick.tick() => {
                    let heard = *heard.lock();
                    if self.clock.monotonic().saturating_sub(heard) > self.timeout.clamp(SILENCE_MIN, SILENCE_MAX) {
                        self.state.lock().gone_at = Some(heard);
                        break Err(io::ErrorKind::TimedOut.into());
                    }
                    self.kernel.forget_unasked(self.cache.over());
                    line.send_first(flow.ping(), ());
                    self.spare();
                    restore.tick();
                }
            }
        };
        self.state.lock().line = None;
        drop(line);
        if self.state.lock().over.is_none() {
            writing.abort();
        }
        let _written = writing.await;
        ended
    }

    /// The term of the leases that the server names, as far as it does.
    fn term_of(&self, welcome: &ToClient) -> Duration {
        match welcome {
            ToClient::Welcome { term_ms, .. } => Duration::from_millis((*term_ms).into()),
            _ => self.cache.term(),
        }
    }

    /// The server has welcomed: everything unanswered is sent.
    fn enter(&self, welcome: ToClient, line: &Line, restore: &dyn Restore) -> io::Result<()> {
        let (session, boot, resumed, read_only, series, began) = match welcome {
            ToClient::Welcome {
                session,
                boot,
                resumed,
                applied,
                durable,
                read_only,
                term_ms,
                series,
                now,
                mark,
                ..
            } => {
                self.cache.welcomed(Duration::from_millis(term_ms.into()), now);
                (session, boot, resumed, read_only, series, (applied, durable, mark))
            }
            ToClient::Evicted { reason } => {
                self.evicted(&reason);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            _ => return Err(frame::malformed()),
        };
        let mut gone = Gone::new(Errno(libc::EIO));
        // Of a session that goes on the series is believed when a ping is answered: the answers
        // that the server has kept come before that, and what they say was made, in a series that
        // has ended since, is not made again.
        if resumed {
            self.say_what_is_left();
        } else {
            self.cache.lock().purse.empty();
            // They are promised, and programs know it before the new session does.
            let held = std::mem::take(&mut self.state.lock().held);
            held.into_iter().for_each(|(waiting, outcome)| waiting.answer(outcome, 0));
        }
        {
            let mut state = self.state.lock();
            let first = state.session == 0;
            if !resumed && !first {
                tracing::warn!("the server does not know this session any more: it is made anew");
                gone = begin_anew(&mut state, boot, began, self.clock.monotonic(), restore);
                state.series = series;
            }
            (state.session, state.boot, state.read_only) = (session, boot, read_only);
            (state.gone_at, state.said_goodbye) = (None, false);
            state.reconnects += u64::from(!first);
            state.sent = state.answered;
            state.line = Some(line.clone());
            state.window = Window::default();
            state.outbox.clear();
            state.changes.values_mut().for_each(|change| change.units = 0);
            state.requests.values_mut().for_each(|request| request.units = 0);
            state.delayed = state.requests.keys().copied().collect();
            state.claim_more();
            pump(&mut state);
            pump_requests(&mut state);
            state.outbox.send(line);
        }
        self.drained.notify_waiters();
        gone.tell(restore);
        restore.given_up(None);
        Ok(())
    }

    /// A message; `false`: the connection ends.
    fn take(&self, message: ToClient, restore: &dyn Restore) -> io::Result<bool> {
        match message {
            ToClient::Changed { seq, after, empty, made, outcome } => {
                return self.changed(seq, (&after.0, empty, made), outcome, restore);
            }
            ToClient::Reply { id, leased, outcome } => {
                let request = {
                    let mut state = self.state.lock();
                    let request = state.requests.remove(&id);
                    if let Some(request) = &request {
                        state.window.give(request.units);
                        pump(&mut state);
                    }
                    request
                };
                if let Some(Request { pending, covers, .. }) = request {
                    self.synced(&pending, &outcome, covers);
                    pending.waiter.answer(outcome, leased);
                }
            }
            ToClient::Durable { seq } => self.durable(seq),
            ToClient::Pong { number, renewed, series, durable, now } => {
                let flow = self.state.lock().flow.clone();
                let sent = flow.as_ref().and_then(|flow| flow.ponged(number));
                if let Some(ping) = flow.and_then(|flow| flow.follow_up())
                    && let Some(line) = &self.state.lock().line
                {
                    line.send_first(ping, ());
                }
                self.durable(durable);
                self.series_over(series, restore);
                if sent.is_some_and(|sent| self.cache.ponged(sent, renewed, now)) {
                    restore.given_up(None);
                }
            }
            ToClient::Recall { inodes } => {
                self.return_leases(&inodes.0, true);
                restore.given_up(Some(&inodes.0));
            }
            ToClient::Synced { ino, seq } => self.state.lock().kept.synced(ino, seq),
            ToClient::Gone { names } => {
                let gone =
                    names.0.into_iter().map(|place| (place.parent, place.name.into())).collect();
                self.kernel.forget_unasked(ToForget { gone, ..ToForget::default() });
            }
            ToClient::Lack {} => {
                self.spare_all();
                restore.hurry();
            }
            ToClient::Fatal { seq } => self.fatal(seq, restore),
            ToClient::Goodbye {} => {
                self.state.lock().said_goodbye = true;
                return Ok(false);
            }
            ToClient::Refused { reason } => {
                return Err(io::Error::other(String::from_utf8_lossy(&reason).into_owned()));
            }
            ToClient::Evicted { reason } => {
                self.evicted(&reason);
                return Ok(false);
            }
            ToClient::Welcome { .. } => return Err(frame::malformed()),
        }
        Ok(true)
    }

    /// The server ends because of a change.
    fn fatal(&self, seq: u64, restore: &dyn Restore) {
        let restores = {
            let mut state = self.state.lock();
            let Some(change) = state.changes.get_mut(&seq) else { return };
            change.fatal = true;
            change.restores.then(|| change.pending.op.clone())
        };
        tracing::error!(
            "the server ends because of a change of this client: the change is not sent again"
        );
        restores.iter().for_each(|op| restore.fatal(op));
    }

    /// The connection is gone; `true`: for good.
    fn leave(&self) -> bool {
        self.cache.drop_all();
        let mut state = self.state.lock();
        state.line = None;
        state.gone_at.get_or_insert_with(|| self.clock.monotonic());
        let over = state.over.is_some();
        drop(state);
        self.drained.notify_waiters();
        over
    }

    /// Whoever waits has waited long enough. Changes keep their places, and do nothing if they come
    /// through after all.
    fn give_up_if_late(&self) {
        let (waiters, held): (Vec<Arc<dyn Waiter>>, _) = {
            let mut state = self.state.lock();
            if self.hopeless(&state).is_none() {
                return;
            }
            let requests = std::mem::take(&mut state.requests);
            let mut waiters: Vec<_> =
                requests.into_values().map(|request| request.pending.waiter).collect();
            for change in
                state.changes.values_mut().filter(|c| !c.abandoned && c.pending.promised.is_none())
            {
                change.give_up();
                waiters.push(Arc::clone(&change.pending.waiter));
            }
            (waiters, std::mem::take(&mut state.held))
        };
        waiters.iter().for_each(|waiter| waiter.fail(Errno(libc::ETIMEDOUT)));
        // They are promised and kept, whoever waits for room.
        held.into_iter().for_each(|(waiting, outcome)| waiting.answer(outcome, 0));
    }

    fn evicted(&self, reason: &[u8]) {
        self.cache.drop_all();
        send(&mut self.state.lock(), frame::encode(&ToServer::Bye {}));
        let reason = String::from_utf8_lossy(reason);
        tracing::error!("evicted: {reason}: every operation fails; unmount, and mount again");
        self.end(Errno(libc::EIO));
    }

    /// The mount is gone: says so, and fails what waits.
    pub(super) fn close(&self) {
        self.cache.drop_all();
        send(&mut self.state.lock(), frame::encode(&ToServer::Bye {}));
        self.end(Errno(libc::ENOTCONN));
    }

    /// Nothing goes on any more: what waits fails, and what comes.
    fn end(&self, errno: Errno) {
        let (changes, requests, held) = {
            let mut state = self.state.lock();
            state.over.get_or_insert(errno);
            state.line = None;
            (state.promised, state.queued_bytes) = (0, 0);
            state.touching.clear();
            state.kept.clear();
            (
                std::mem::take(&mut state.changes),
                std::mem::take(&mut state.requests),
                std::mem::take(&mut state.held),
            )
        };
        self.closed.notify_one();
        self.drained.notify_waiters();
        let mut gone = Gone::new(errno);
        changes.into_values().for_each(|change| gone.add(*change));
        gone.held = held;
        let owner = self.owner.lock().clone();
        match owner {
            Some(owner) => {
                self.state.lock().lose(&mut gone, &*owner);
                gone.tell(&*owner);
            }
            // Nobody had connected yet.
            None => gone.failed.iter().for_each(|change| change.pending.waiter.fail(errno)),
        }
        requests.into_values().for_each(|request| request.pending.waiter.fail(errno));
    }
}

fn send(state: &mut State, frame: Vec<u8>) {
    if let Some(line) = &state.line {
        state.outbox.put(line, frame, true);
    }
}

#[cfg(test)]
mod tests;
