//! One connection after the other: greeting, reading what arrives, pings, and the time between two
//! connections.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::time::{interval, sleep, timeout};
use ferry_fs::{Errno, ToForget};

use super::Link;
use super::anew::{Welcomed, begin_anew};
use super::flow::Flow;
use super::restore::{Ended, Restore, restores_locks};
use super::state::Request;
use super::window::Line;
use crate::client::change::{Stage, Waiter};
use crate::client::notes::flag;
use crate::codec;
use crate::frame::{self, Frames, Stream};
use crate::lanes;
use crate::message::{Answered, FRAME_MAX, Former, ToClient, ToServer};
use crate::protocol::Protocol;
use crate::tls::in_words;

/// A connection and its greeting must be made after this time.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// The same where another server may have the volume now. Of later tries some take longer: a
/// network may be slow. A server that takes the volume waits longer than that for its clients.
const CONNECT_TIME_OTHERS: Duration = Duration::from_secs(2);
const CONNECT_TIME_SLOW: Duration = Duration::from_secs(5);
const FIRST_TRIES: u32 = 20;
/// The server is asked at least so often whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(3);
/// And not more often, whatever term the server names.
const PING_INTERVAL_MIN: Duration = Duration::from_millis(20);
/// A server that is silent for this long is considered dead.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// The same, if operations have a shorter timeout.
const SILENCE_MIN: Duration = Duration::from_secs(5);
/// After a failed connection the next one is tried after this time, then after twice that, and so
/// on.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// The longest of these times.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// The same where another server may have the volume.
const RETRY_OTHERS_MAX: Duration = Duration::from_millis(250);
/// The same, if the server refuses this client.
const RETRY_REFUSED_MAX: Duration = Duration::from_secs(30);

/// So many reasons are logged of why no connection comes about.
const REASONS_MAX: usize = 16;

/// A connection whose greetings are exchanged.
pub(in crate::client) struct Greeted {
    stream: Box<dyn Stream>,
    pub(in crate::client) protocol: Protocol,
    pub(in crate::client) answer: ToClient,
}

impl Link {
    /// Connects and exchanges greetings: in the newest protocol or, if the server is of the release
    /// before, in that one's. The server is asked each time, because it may have been upgraded.
    /// A client that may have acknowledged changes early does not go back.
    pub(in crate::client) async fn greet(&self, time: Duration) -> io::Result<Greeted> {
        let greeted = self.greet_in(Protocol::default(), time).await?;
        match greeted.protocol.instead(&greeted.answer) {
            Some(before) if !self.has_early_acks() => {
                self.connector.stay();
                self.greet_in(before, time).await
            }
            _ => Ok(greeted),
        }
    }

    async fn greet_in(&self, protocol: Protocol, time: Duration) -> io::Result<Greeted> {
        let greeting = async {
            let mut stream = self.connector.connect().await?;
            // With the greeting the client says that it caches nothing, nor does its kernel.
            self.cache.drop_all();
            let inherited = std::mem::take(&mut *self.inherited.lock());
            self.kernel.forgotten(inherited).await;
            self.kernel.all_forgotten().await;
            let to_forget = self.cache.lock().take_to_forget();
            self.kernel.forgotten(to_forget).await;
            let (session, newest) = {
                let state = self.state.lock();
                (state.session, state.changes.last())
            };
            let hello = ToServer::Hello {
                version: protocol.version(),
                session,
                path: self.path.clone(),
                name: self.name.clone(),
                newest,
            };
            tokio::io::AsyncWriteExt::write_all(&mut stream, &frame::encode(&hello)).await?;
            tokio::io::AsyncWriteExt::flush(&mut stream).await?;
            let answer = frame::read_bytes(&mut stream, FRAME_MAX).await?;
            let answer =
                protocol.decode_server(&answer.ok_or(io::ErrorKind::UnexpectedEof)?, || None);
            let answer = answer.map_err(|codec::Malformed| frame::malformed())?;
            Ok(Greeted { stream, protocol, answer })
        };
        let greeted = timeout(time, greeting).await;
        // The server looks at the certificate when this side takes the handshake for done.
        greeted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(in_words)
    }

    /// Waits until the server has heard that the mount has ended.
    pub(in crate::client) async fn told(&self) {
        self.ended.notified().await;
    }

    /// Lives as long as the mount. `first`: the first connection, if there is one.
    pub(in crate::client) async fn run(&self, first: Option<Greeted>, restore: Arc<dyn Restore>) {
        *self.owner.lock() = Some(Arc::clone(&restore));
        let first = match first {
            Some(first) => Some(first),
            None => self
                .greet(self.connect_time(0))
                .await
                .inspect_err(|error| tracing::warn!(%error, "no connection"))
                .ok(),
        };
        self.stay_connected(first, restore).await;
        self.ended.notify_one();
    }

    /// On the first connection, then on each one after it.
    async fn stay_connected(&self, mut greeted: Option<Greeted>, restore: Arc<dyn Restore>) {
        let mut retry = RETRY_FIRST;
        let mut tries = 0;
        // Why no connection came about since the last one, each reason once.
        let mut said: Vec<String> = Vec::new();
        loop {
            let mut most = if self.connector.has_others() { RETRY_OTHERS_MAX } else { RETRY_MAX };
            match greeted.take() {
                Some(Greeted { answer: ToClient::Refused { reason }, .. }) => {
                    most = RETRY_REFUSED_MAX;
                    let reason = String::from_utf8_lossy(&reason).into_owned();
                    if self.state.lock().phase.set_refusal(Some(reason.clone())) {
                        tracing::error!(
                            "the server refuses this client: {reason}: operations wait, and fail if that lasts"
                        );
                    }
                }
                Some(greeted) => {
                    let is_welcome = matches!(greeted.answer, ToClient::Welcome { .. });
                    self.state.lock().phase.set_refusal(None);
                    let ended = self.converse(greeted, &*restore).await;
                    if self.leave() {
                        return;
                    }
                    // A connection that the server has welcomed may break soon after.
                    if is_welcome {
                        (retry, tries) = (RETRY_FIRST, 0);
                        said.clear();
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
            tries += 1;
            greeted = crate::rt::select! {
                result = self.greet(self.connect_time(tries)) => result.inspect_err(|error| {
                    let error = error.to_string();
                    if said.len() < REASONS_MAX && !said.contains(&error) {
                        tracing::warn!(error, "no connection");
                        said.push(error);
                    }
                }).ok(),
                () = self.overdue() => None,
                () = self.closed.notified() => return,
            };
        }
    }

    /// How long the try of this number may take.
    fn connect_time(&self, tries: u32) -> Duration {
        match self.connector.has_others() {
            false => CONNECT_TIME_MAX,
            true if tries > FIRST_TRIES && tries.is_multiple_of(4) => CONNECT_TIME_SLOW,
            true => CONNECT_TIME_OTHERS,
        }
    }

    /// The first connection of a mount: all servers are tried for as long as one may take.
    pub(in crate::client) async fn greet_first(&self) -> io::Result<Greeted> {
        let until = self.clock.monotonic() + CONNECT_TIME_MAX;
        loop {
            match self.greet(self.connect_time(0)).await {
                Err(_) if self.connector.has_others() && self.clock.monotonic() < until => {
                    sleep(RETRY_OTHERS_MAX).await;
                }
                greeted => return greeted,
            }
        }
    }

    /// Until it is time to try again; whether the mount has ended. Operations that have waited long
    /// enough meanwhile fail.
    async fn waits_to_try(&self, retry: Duration) -> bool {
        let mut wait = pin!(sleep(retry));
        loop {
            let over = crate::rt::select! {
                () = &mut wait => Some(false),
                () = self.overdue() => None,
                () = self.closed.notified() => Some(true),
            };
            self.give_up_if_overdue();
            if let Some(over) = over {
                return over;
            }
        }
    }

    /// When operations have waited long enough.
    pub(super) async fn overdue(&self) {
        let at = self.state.lock().phase.disconnected_since().map(|since| since + self.timeout);
        let now = self.clock.monotonic();
        match at {
            Some(at) if at > now => sleep(at - now).await,
            _ => std::future::pending().await,
        }
    }

    /// One connection's life.
    async fn converse(&self, greeted: Greeted, restore: &dyn Restore) -> io::Result<()> {
        let Greeted { stream, protocol, answer: welcome } = greeted;
        let (reader, writer) = tokio::io::split(stream);
        let mut messages = Frames::new(reader, FRAME_MAX);
        messages.expect(FRAME_MAX, protocol.has_chunks());
        let (line, outgoing) = lanes::line();
        let (outbound, pings) = protocol.of_client(&welcome, &self.clock);
        let line = line.speak(protocol, outbound);
        if let Some(request) = protocol.first_request() {
            line.send(request, ());
        }
        let flow = Arc::new(Flow::new(Arc::clone(&self.clock), self.term_of(&welcome)));
        let paced = Arc::clone(&flow);
        let writing =
            crate::rt::spawn(async move { lanes::write_all(writer, outgoing, &*paced).await });
        self.state.lock().flow = Some(Arc::clone(&flow));
        // Before there is anything else: so long takes a ping on an empty connection.
        line.send_first(flow.ping(), ());
        self.enter(welcome, &line, restore)?;
        tracing::info!(protocol = protocol.version(), "connected to the server");
        let heard = Mutex::new(self.clock.monotonic());
        let mut reading = pin!(async {
            while messages.more().await? {
                *heard.lock() = self.clock.monotonic();
                while let Some(bytes) = messages.next() {
                    let message = protocol.decode_server(bytes, || pings.answered());
                    let message = message.map_err(|codec::Malformed| frame::malformed())?;
                    if !self.receive(message, restore)? {
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
                    let longest = if self.connector.has_others() { SILENCE_MIN } else { SILENCE_MAX };
                    if self.clock.monotonic().saturating_sub(heard) > self.timeout.clamp(SILENCE_MIN, longest) {
                        self.state.lock().phase.disconnect(heard);
                        break Err(io::ErrorKind::TimedOut.into());
                    }
                    self.kernel.forget_unasked(self.cache.over());
                    line.send_first(flow.ping(), ());
                    self.return_unneeded();
                    restore.tick();
                }
            }
        };
        self.state.lock().phase.disconnect(self.clock.monotonic());
        drop(line);
        if !self.state.lock().phase.is_closed() {
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
    pub(super) fn enter(
        &self,
        welcome: ToClient,
        line: &Line,
        restore: &dyn Restore,
    ) -> io::Result<()> {
        let (session, resumed, read_only, mut welcomed, former) = match welcome {
            ToClient::Welcome {
                session,
                boot,
                resumed,
                applied,
                durable,
                read_only,
                term_ms,
                epoch,
                now,
                mark: last_applied,
                former,
                ..
            } => {
                self.cache.welcomed(Duration::from_millis(term_ms.into()), now);
                (
                    session,
                    resumed,
                    read_only,
                    Welcomed { boot, epoch, applied, durable, last_applied, is_complete: false },
                    // The numbers of another server's session are others.
                    former.filter(|_| !resumed && self.state.lock().boot == boot),
                )
            }
            ToClient::Evicted { reason } => {
                self.evicted(&reason);
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            _ => return Err(frame::malformed()),
        };
        let (mut ended, mut is_unsure) = (Ended::default(), false);
        // If the session goes on, the epoch is believed when a ping is answered. Answers that the
        // server has stored arrive before that: what they say was applied, in an epoch that has
        // ended since, is not applied again.
        if let Some(former) = former {
            welcomed.is_complete = self.hear_former(former, restore);
        }
        if resumed {
            self.say_what_is_left();
        } else {
            self.cache.lock().reservation.empty();
            // They are acknowledged, and programs know it before the new session does.
            let held = std::mem::take(&mut self.state.lock().held);
            held.into_iter().for_each(|(waiter, outcome)| waiter.answer(outcome, 0));
        }
        {
            let mut state = self.state.lock();
            if state.phase.is_closed() {
                // The mount has ended while the server was asked.
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            let first = state.session == 0;
            if !resumed && !first {
                tracing::warn!("the server does not know this session any more: it is made anew");
                let is_known = welcomed.is_complete || welcomed.last_applied.is_some();
                is_unsure = !is_known && !state.phase.is_clean();
                ended = begin_anew(&mut state, &welcomed, restore);
            }
            (state.session, state.boot, state.read_only) = (session, welcomed.boot, read_only);
            state.reconnects += u64::from(!first);
            state.note_flag(flag::READ_ONLY, read_only);
            state.note_unclaimed();
            state.commit_notes();
            state.connect(line.clone());
            state.claim_more();
            state.pump();
            state.outbox.send(line);
        }
        self.drained.notify_waiters();
        if is_unsure && ended.lost().next().is_some() {
            tracing::warn!(
                "the server does not know how far the session had come: the changes that are named next were not answered, and may be there"
            );
        }
        ended.tell(Some(restore));
        restore.entered();
        restore.given_up(None);
        Ok(())
    }

    /// The answers to changes of a session that has ended: they are applied or were refused, as if
    /// the last connection had brought these answers. Whether no answer is missing.
    fn hear_former(&self, former: Former, restore: &dyn Restore) -> bool {
        let Former { durable, answers } = former;
        for Answered { seq, made, outcome } in answers.0 {
            if self.changed(seq, (&[], false, made), outcome, restore).is_err() {
                return false;
            }
        }
        self.durable(durable);
        true
    }

    /// A message; `false`: the connection ends.
    pub(super) fn receive(&self, message: ToClient, restore: &dyn Restore) -> io::Result<bool> {
        match message {
            ToClient::Changed { seq, after, empty, made, outcome } => {
                return self.changed(seq, (&after.0, empty, made), outcome, restore);
            }
            ToClient::Reply { id, leased, outcome } => {
                let request = {
                    let mut state = self.state.lock();
                    let request = state.requests.by_id.remove(&id);
                    if let Some(request) = &request {
                        state.window.give(request.units);
                        state.pump();
                    }
                    request
                };
                if let Some(Request { pending, covers, .. }) = request {
                    self.synced(&pending, &outcome, covers);
                    pending.waiter.answer(outcome, leased);
                }
            }
            ToClient::Durable { seq } => self.durable(seq),
            ToClient::Pong { number, renewed, epoch, durable, now } => {
                let flow = self.state.lock().flow.clone();
                let sent = flow.as_ref().and_then(|flow| flow.ponged(number));
                if let Some(ping) = flow.and_then(|flow| flow.follow_up())
                    && let Some(line) = self.state.lock().phase.line()
                {
                    line.send_first(ping, ());
                }
                self.durable(durable);
                self.epoch_over(epoch, restore);
                if sent.is_some_and(|sent| self.cache.ponged(sent, renewed, now)) {
                    restore.given_up(None);
                }
            }
            ToClient::Recall { inodes } => {
                self.return_leases(&inodes.0, true);
                restore.given_up(Some(&inodes.0));
            }
            ToClient::Synced { ino, seq } => self.state.lock().synced(ino, seq),
            ToClient::Removed { names } => {
                let removed =
                    names.0.into_iter().map(|name| (name.parent, name.name.into())).collect();
                self.kernel.forget_unasked(ToForget { removed, ..ToForget::default() });
            }
            ToClient::Lack {} => {
                self.spare_all();
                restore.hurry();
            }
            ToClient::Fatal { seq } => self.fatal(seq, restore),
            ToClient::Goodbye {} => {
                let answered = {
                    let mut state = self.state.lock();
                    state.phase.drain();
                    state.note_flag(flag::CLEAN, true);
                    state.changes.answered()
                };
                self.durable(answered);
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
        let (restores, abandoned) = {
            let mut state = self.state.lock();
            let Some(change) = state.changes.get_mut(seq) else { return };
            let loses_locks = restores_locks(&change.pending, restore);
            if change.may_be_applied() && change.stage() != Stage::Fatal {
                change.advance(Stage::Fatal);
            }
            let restores = change.pending.role.restores().then(|| change.pending.op.clone());
            state.changes.note_fatal(seq);
            // Nobody asks the next server for the lock.
            let abandoned = if loses_locks { state.abandon_unanswered() } else { Vec::new() };
            (restores, abandoned)
        };
        tracing::error!(
            "the server ends because of a change of this client: the change is not sent again"
        );
        abandoned.iter().for_each(|waiter| waiter.fail(Errno(libc::EIO)));
        restores.iter().for_each(|op| restore.fatal(op));
    }

    /// The connection is closed; `true`: for good.
    pub(super) fn leave(&self) -> bool {
        self.cache.drop_all();
        let mut state = self.state.lock();
        state.phase.disconnect(self.clock.monotonic());
        let closed = state.phase.is_closed();
        drop(state);
        self.drained.notify_waiters();
        closed
    }

    /// If operations have waited long enough, they fail. Changes keep their numbers, and are not
    /// applied if they were not applied yet.
    pub(super) fn give_up_if_overdue(&self) {
        let (waiters, held): (Vec<Arc<dyn Waiter>>, _) = {
            let mut state = self.state.lock();
            if self.errno(&state).is_none() {
                return;
            }
            let requests = std::mem::take(&mut state.requests.by_id);
            let mut waiters: Vec<_> =
                requests.into_values().map(|request| request.pending.waiter).collect();
            for change in state.changes.iter_mut() {
                if !change.is_abandoned() && !change.pending.role.is_acknowledged() {
                    change.abandon();
                    waiters.push(Arc::clone(&change.pending.waiter));
                }
            }
            (waiters, std::mem::take(&mut state.held))
        };
        waiters.iter().for_each(|waiter| waiter.fail(Errno(libc::ETIMEDOUT)));
        // They are acknowledged and stay in the stream, with or without room.
        held.into_iter().for_each(|(waiter, outcome)| waiter.answer(outcome, 0));
    }

    fn evicted(&self, reason: &[u8]) {
        self.cache.drop_all();
        self.state.lock().send(&ToServer::Bye {});
        let reason = String::from_utf8_lossy(reason);
        tracing::error!("evicted: {reason}: every operation fails; unmount, and mount again");
        self.end(Errno(libc::EIO), Some(reason.into_owned()));
    }

    /// The mount has ended: tells the server, and fails what waits.
    pub(in crate::client) fn close(&self) {
        self.cache.drop_all();
        self.state.lock().send(&ToServer::Bye {});
        self.end(Errno(libc::ENOTCONN), None);
    }

    /// Nothing goes on any more: what waits fails, and so do later operations.
    fn end(&self, errno: Errno, refused: Option<String>) {
        let (mut ended, requests) = {
            let mut state = self.state.lock();
            state.phase.close(errno, refused);
            let mut ended = Ended::default();
            state.changes.take_all().into_iter().for_each(|change| ended.fail(change, errno));
            ended.held = std::mem::take(&mut state.held);
            state.log.clear();
            (ended, std::mem::take(&mut state.requests.by_id))
        };
        self.closed.notify_one();
        self.drained.notify_waiters();
        let owner = self.owner.lock().clone();
        match &owner {
            Some(owner) => self.state.lock().lose(&ended, &**owner),
            // No server was reached yet, so nothing was acknowledged either.
            None => ended.held.clear(),
        }
        ended.tell(owner.as_deref());
        requests.into_values().for_each(|request| request.pending.waiter.fail(errno));
    }
}
