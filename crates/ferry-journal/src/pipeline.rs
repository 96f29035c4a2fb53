//! The group commit: contexts are sealed, written, flushed, and become durable in order.
//!
//! Nothing here has a thread of its own. Whoever brings news (a force, a write that completed, a flush that ended)
//! records it under the lock and calls [`Core::drive`]. One thread at a time drives: it takes the next step that is
//! due, without the lock, until none is. So a device that completes inside `submit` does not recurse, and a device
//! with a completion thread goes on from that thread.

use crate::context::{Context, Countdown};
use crate::core::Core;
use crate::disk::io_error;
use crate::format::{LOG_BLOCK, RecordKind, blocks_for};
use crate::home::Point;
use crate::layers::Merge;
use crate::policy::{Caller, Crossing, Dispatcher, Sail};
use crate::record::{RecordPlan, encode};
use crate::stats::FlushStats;
use crate::{Completion, JournalError, Seq};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Records whose writes are under way at the same time, at most.
pub const IN_FLIGHT_MAX: usize = 8;
/// A context with more data than this flushes it before its record is written, so that recovery has little to verify.
pub const UNFLUSHED_DATA_MAX: u64 = 32 << 20;

/// A record between its seal and its durability.
struct Flight {
    kind: RecordKind,
    seq: Seq,
    /// The durable stamp that it carries.
    stamp: Seq,
    end: Point,
    /// Data and log writes that are not complete: 2, 1, 0.
    parts: u8,
    transactions: u64,
    /// When its context was begun, when it was sealed, handed to the device, and written.
    begun_at: Duration,
    sealed_at: Duration,
    sent_at: Duration,
    written_at: Duration,
    waiters: Vec<Waiter>,
    /// Flushes that were made for it alone, begun and ended.
    alone: (usize, usize),
}

impl Flight {
    /// Flushes that it takes where each caller has its own.
    fn flushes_alone(&self) -> usize {
        self.waiters.len().max(1)
    }

    /// Written, and every flush that is its own has ended.
    fn flushed_alone(&self) -> bool {
        self.parts == 0 && self.alone.1 >= self.flushes_alone()
    }
}

/// Who waits for a context to be durable.
struct Waiter {
    caller: Caller,
    done: Completion,
}

/// A record that waits for its turn to be written.
struct Unsent {
    plan: RecordPlan,
    ticket: u64,
    context: Option<Context>,
}

/// State of the group commit.
pub struct Pipe {
    /// Where the next record starts; its `id` is that of the newest record.
    next: Point,
    /// Durable up to here.
    pub end: Point,
    /// Where recovery would start.
    pub tail: u64,
    /// Newest context that a durable stamp covers.
    pub stamped: Seq,
    flights: VecDeque<Flight>,
    /// Ticket of the oldest flight.
    first_ticket: u64,
    /// The last flights, not yet handed to the device.
    unsent: VecDeque<Unsent>,
    /// Who waits for the context being collected.
    boarding: Vec<Waiter>,
    /// Decides when they sail.
    pub dispatcher: Dispatcher,
    /// They are held until this time, or until the dispatcher changes its mind.
    pub held_until: Option<Duration>,
    /// Seal without being asked by anyone.
    pub seal_wanted: bool,
    /// Space for a stamp record is taken; write one when nothing else is under way.
    stamp_paid: bool,
    stamp_waiters: Vec<(Seq, Completion)>,
    /// Nothing is sealed: the log is being exchanged.
    pub frozen: bool,
    /// Called when nothing is under way.
    idle_waiters: Vec<Completion>,
    /// A flush for the flights up to this ticket is under way, and since when.
    flushing: Option<(u64, Duration)>,
    /// Completions that are due.
    due: Vec<(Completion, Result<(), JournalError>)>,
    tell_stamped: bool,
    driving: bool,
}

enum Step {
    Flush(u64),
    /// For this flight and no other.
    FlushAlone(u64),
    Call(Vec<(Completion, Result<(), JournalError>)>),
    TellStamped(Seq),
    Send(Unsent),
}

impl Pipe {
    /// Nothing under way; the log is durable up to `end` and starts at `tail`.
    pub fn new(end: Point, tail: u64, dispatcher: Dispatcher) -> Self {
        Self {
            next: end,
            end,
            tail,
            stamped: end.seq,
            flights: VecDeque::new(),
            first_ticket: 0,
            unsent: VecDeque::new(),
            boarding: Vec::new(),
            dispatcher,
            held_until: None,
            seal_wanted: false,
            stamp_paid: false,
            stamp_waiters: Vec::new(),
            frozen: false,
            idle_waiters: Vec::new(),
            flushing: None,
            due: Vec::new(),
            tell_stamped: false,
            driving: false,
        }
    }

    /// Nothing is being written.
    pub fn idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Blocks between the log's tail and its end.
    pub fn used_blocks(&self) -> u64 {
        self.next.position - self.tail
    }

    /// The flush policy and what it did.
    pub fn flush_stats(&self) -> FlushStats {
        let (holds, (policy, fast_flush)) = (self.dispatcher.holds(), self.dispatcher.get());
        FlushStats {
            policy,
            fast_flush,
            crossing: self.dispatcher.crossing(),
            holds: holds.holds,
            holds_in_vain: holds.in_vain,
            held_callers: holds.callers,
            hold_time: holds.time,
            beside: holds.beside,
        }
    }

    /// Plans the next record, at the end of the log.
    fn plan(&mut self, kind: RecordKind, seq: Seq, body_len: u64, id: u64) -> RecordPlan {
        let plan = RecordPlan {
            kind,
            position: self.next.position,
            id,
            prev: self.next.id,
            seq: seq.0,
            stamp: 0,
            body_len,
        };
        self.next = Point { seq, position: self.next.position + blocks_for(body_len), id };
        plan
    }

    fn take_off(&mut self, plan: RecordPlan, context: Option<Context>, now: Duration) {
        let ticket = self.first_ticket + self.flights.len() as u64;
        self.flights.push_back(Flight {
            kind: plan.kind,
            seq: Seq(plan.seq),
            stamp: Seq(0),
            end: self.next,
            parts: 2,
            transactions: context.as_ref().map_or(0, |c| c.transactions),
            begun_at: context.as_ref().map_or(now, |c| c.since),
            sealed_at: now,
            sent_at: now,
            written_at: now,
            waiters: Vec::new(),
            alone: (0, 0),
        });
        self.unsent.push_back(Unsent { plan, ticket, context });
    }

    /// A newer stamp is durable.
    pub fn advance_stamp(&mut self, seq: Seq) {
        if seq > self.stamped {
            self.stamped = seq;
            self.tell_stamped = true;
            for (_, done) in self.stamp_waiters.extract_if(.., |(wanted, _)| *wanted <= seq) {
                self.due.push((done, Ok(())));
            }
        }
    }

    /// Flights that are not of the flush that is under way.
    fn unflushed(&self) -> usize {
        let flushing = self.flushing.map_or(0, |(ticket, _)| (ticket + 1).saturating_sub(self.first_ticket));
        self.flights.len() - flushing as usize
    }

    /// Ticket of the newest of the oldest flights that are all written.
    fn written(&self) -> Option<u64> {
        let n = self.flights.iter().take_while(|f| f.parts == 0).count() as u64;
        (n > 0).then(|| self.first_ticket + n - 1)
    }

    /// A planted bug: nobody waits for the flush any more, so there is time.
    #[cfg(feature = "planted")]
    fn puts_flush_off(&self) -> bool {
        use crate::planted::{Bug, is};
        let waiting = self.stamp_paid
            || !self.boarding.is_empty()
            || self.flights.iter().any(|f| !f.waiters.is_empty());
        is(Bug::EarlyAnswer) && !waiting && self.flights.len() == 1
    }

    #[cfg(not(feature = "planted"))]
    const fn puts_flush_off(&self) -> bool {
        false
    }

    /// The flush to begin: one for all that is written, or one for a single flight.
    fn next_flush(&mut self, now: impl Fn() -> Duration) -> Option<Step> {
        if self.dispatcher.flushes_alone() {
            let mut flights = self.flights.iter();
            let at = flights.position(|f| f.parts == 0 && f.alone.0 < f.flushes_alone())?;
            self.flights[at].alone.0 += 1;
            return Some(Step::FlushAlone(self.first_ticket + at as u64));
        }
        if self.flushing.is_some() {
            return None;
        }
        let ticket = self.written()?;
        self.flushing = Some((ticket, now()));
        Some(Step::Flush(ticket))
    }

    #[cfg(test)]
    fn planted_ticket(&self, ticket: u64) -> u64 {
        match self.dispatcher.planted {
            crate::policy::Planted::JoinsAnyFlush => {
                self.written().map_or(ticket, |written| ticket.max(written))
            }
            _ => ticket,
        }
    }

    /// A planted bug: the flush that ended counts for whatever is written by now.
    #[cfg(feature = "planted")]
    fn joined_ticket(&self, ticket: u64) -> u64 {
        let joins = crate::planted::is(crate::planted::Bug::JoinedFlush);
        self.written().filter(|_| joins).map_or(ticket, |written| ticket.max(written))
    }

    fn fail_all(&mut self, error: &JournalError) {
        let waiters =
            self.flights.iter_mut().flat_map(|f| f.waiters.drain(..)).chain(self.boarding.drain(..));
        let waiters = waiters
            .map(|waiter| waiter.done)
            .chain(self.stamp_waiters.drain(..).map(|(_, done)| done))
            .chain(self.idle_waiters.drain(..));
        self.due.extend(waiters.map(|done| (done, Err(error.clone()))));
        self.dispatcher.abandoned();
        self.held_until = None;
        self.unsent.clear();
        self.seal_wanted = false;
        self.stamp_paid = false;
    }
}

impl Core {
    /// Group commit: `done` is called once `seq` is durable.
    pub fn force(self: &Arc<Self>, caller: Caller, seq: Seq, done: Completion) {
        if self.durable() >= seq {
            return done(Ok(()));
        }
        self.stats.forces.fetch_add(1, Ordering::Relaxed);
        let now = self.env.clock.monotonic();
        let mut pipe = self.pipe.lock();
        let collecting = {
            let head = self.head.read();
            !head.is_empty() && head.seq <= seq
        };
        let (end, newest) = (pipe.end.seq, pipe.next.seq);
        if let Some(error) = self.failure() {
            pipe.due.push((done, Err(error)));
        } else if collecting {
            pipe.boarding.push(Waiter { caller, done });
            pipe.dispatcher.came(now, caller, true);
        } else if let Some(flight) = pipe.flights.iter_mut().find(|f| f.seq >= seq.min(newest) && f.seq > end)
        {
            flight.waiters.push(Waiter { caller, done });
            pipe.dispatcher.came(now, caller, false);
        } else {
            pipe.due.push((done, Ok(())));
        }
        drop(pipe);
        self.drive();
    }

    /// Asks for a stamp record that covers `seq`, which is durable. The space for it is already taken.
    pub fn write_stamp(self: &Arc<Self>, seq: Seq, done: Completion) {
        let mut pipe = self.pipe.lock();
        let spare = pipe.stamp_paid || pipe.stamped >= seq || self.failure().is_some();
        match self.failure() {
            Some(error) => pipe.due.push((done, Err(error))),
            None if pipe.stamped >= seq => pipe.due.push((done, Ok(()))),
            None => {
                pipe.stamp_paid = true;
                pipe.stamp_waiters.push((seq, done));
            }
        }
        drop(pipe);
        if spare {
            self.space.release(LOG_BLOCK as u64);
        }
        self.drive();
    }

    /// Calls `done` once the owner knows that `seq` is stamped, which it is already.
    pub fn when_stamped(self: &Arc<Self>, seq: Seq, done: Completion) {
        let mut pipe = self.pipe.lock();
        match self.failure() {
            Some(error) => pipe.due.push((done, Err(error))),
            None if pipe.stamped >= seq => pipe.due.push((done, Ok(()))),
            None => pipe.stamp_waiters.push((seq, done)),
        }
        drop(pipe);
        self.drive();
    }

    /// Calls `done` when nothing is under way.
    pub fn when_idle(self: &Arc<Self>, done: Completion) {
        let mut pipe = self.pipe.lock();
        match self.failure() {
            Some(error) => pipe.due.push((done, Err(error))),
            None if pipe.idle() => pipe.due.push((done, Ok(()))),
            None => pipe.idle_waiters.push(done),
        }
        drop(pipe);
        self.drive();
    }

    /// What the stamp record covers that is being written or is to be, if there is one.
    pub fn stamp_under_way(&self) -> Option<Seq> {
        let pipe = self.pipe.lock();
        let stamp = pipe.flights.iter().find(|flight| flight.kind == RecordKind::Stamp);
        stamp.map(|flight| flight.seq).or(pipe.stamp_paid.then_some(pipe.end.seq))
    }

    /// Seals the context being collected if it is still `seq`.
    pub fn seal_if(self: &Arc<Self>, seq: Seq) {
        let mut pipe = self.pipe.lock();
        if self.head.read().seq == seq {
            self.seal(&mut pipe);
        }
        drop(pipe);
        self.drive();
    }

    /// Takes every step that is due, unless another thread is at it: that one will see what we brought.
    pub fn drive(self: &Arc<Self>) {
        let mut pipe = self.pipe.lock();
        if pipe.driving {
            return;
        }
        pipe.driving = true;
        while let Some(step) = self.next_step(&mut pipe) {
            drop(pipe);
            self.perform(step);
            pipe = self.pipe.lock();
        }
        pipe.driving = false;
    }

    fn next_step(&self, pipe: &mut Pipe) -> Option<Step> {
        if let Some(error) = self.failure() {
            pipe.fail_all(&error);
        } else if !pipe.puts_flush_off()
            && let Some(flush) = pipe.next_flush(|| self.env.clock.monotonic())
        {
            return Some(flush);
        }
        // The owner first: who waits for a stamp relies on what the owner does with it.
        if std::mem::take(&mut pipe.tell_stamped) {
            return Some(Step::TellStamped(pipe.stamped));
        }
        if !pipe.due.is_empty() {
            return Some(Step::Call(std::mem::take(&mut pipe.due)));
        }
        if !pipe.frozen && pipe.unsent.is_empty() && self.wants_seal(pipe) {
            self.seal(pipe);
        }
        if !pipe.frozen && pipe.stamp_paid && pipe.flights.is_empty() {
            self.plan_stamp(pipe);
        }
        let in_flight = pipe.flights.len() - pipe.unsent.len().min(pipe.flights.len());
        if in_flight < self.options.log.buffers.clamp(1, IN_FLIGHT_MAX)
            && let Some(mut unsent) = pipe.unsent.pop_front()
        {
            let stamp = pipe.end.seq;
            unsent.plan.stamp = stamp.0;
            let at = (unsent.ticket - pipe.first_ticket) as usize;
            pipe.flights[at].stamp = stamp;
            pipe.flights[at].sent_at = self.env.clock.monotonic();
            self.stats.note_in_flight(in_flight as u64 + 1);
            return Some(Step::Send(unsent));
        }
        None
    }

    fn wants_seal(&self, pipe: &mut Pipe) -> bool {
        if std::mem::take(&mut pipe.seal_wanted) {
            return true;
        }
        if pipe.boarding.is_empty() {
            return false;
        }
        let (now, in_flight, unflushed) = (self.env.clock.monotonic(), pipe.flights.len(), pipe.unflushed());
        match pipe.dispatcher.sails(now, in_flight, unflushed, || self.disk.flush_timing().avg) {
            Sail::Now => return true,
            Sail::AfterLanding => pipe.held_until = None,
            Sail::Until(until) => {
                pipe.held_until = Some(until);
                self.hold_timer.arm(until);
            }
        }
        false
    }

    /// Ends the context being collected, if it has any change, and gives it its place in the log.
    fn seal(&self, pipe: &mut Pipe) {
        if pipe.frozen {
            return;
        }
        let context = {
            let mut head = self.head.write();
            if head.is_empty() {
                return;
            }
            head.seal()
        };
        let now = self.env.clock.monotonic();
        self.sealed_at.store(now.as_nanos() as u64, Ordering::Relaxed);
        self.stats.note_context(&context, pipe.boarding.len() as u64);
        pipe.dispatcher.sealed(now, pipe.boarding.len(), pipe.flights.len());
        pipe.held_until = None;
        tracing::trace!(context = context.seq.0, waiting = pipe.boarding.len(), "sealed");
        let kind = if context.data_bytes > UNFLUSHED_DATA_MAX {
            RecordKind::ContextAfterData
        } else {
            RecordKind::Context
        };
        let plan = pipe.plan(kind, context.seq, context.payload, self.env.entropy.next_u64());
        let waiters = std::mem::take(&mut pipe.boarding);
        pipe.take_off(plan, Some(context), now);
        pipe.flights.back_mut().expect("just added").waiters = waiters;
    }

    fn plan_stamp(&self, pipe: &mut Pipe) {
        pipe.stamp_paid = false;
        if pipe.stamped >= pipe.end.seq {
            self.space.release(LOG_BLOCK as u64);
            return;
        }
        let seq = pipe.end.seq;
        let plan = pipe.plan(RecordKind::Stamp, seq, 0, self.env.entropy.next_u64());
        pipe.take_off(plan, None, self.env.clock.monotonic());
    }

    fn perform(self: &Arc<Self>, step: Step) {
        match step {
            Step::Flush(ticket) => {
                let core = self.clone();
                self.disk.flush(Box::new(move |result| core.flushed(ticket, result)));
            }
            Step::FlushAlone(ticket) => {
                let core = self.clone();
                self.disk.flush_alone(Box::new(move |result| core.flushed_alone(ticket, result)));
            }
            Step::Call(due) => due.into_iter().for_each(|(done, result)| done(result)),
            Step::TellStamped(seq) => {
                self.client.stamped(seq);
                self.stamped.store(seq.0, Ordering::Release);
            }
            Step::Send(unsent) => self.send(unsent),
        }
    }

    /// Hands a record to the device: log and data are written at the same time, unless there is too much data.
    fn send(self: &Arc<Self>, unsent: Unsent) {
        let Unsent { plan, ticket, context } = unsent;
        let core = self.clone();
        let Some(context) = context else {
            self.write_record(&plan, ticket, None);
            return self.part_done(ticket, Ok(()));
        };
        let data = context.data.clone();
        if plan.kind == RecordKind::Context {
            self.write_record(&plan, ticket, Some(&context));
            data.then(move |result| core.part_done(ticket, result));
        } else {
            data.then(move |result| match result {
                Ok(()) => core.clone().disk.flush(Box::new(move |result| match result {
                    Ok(()) => {
                        core.write_record(&plan, ticket, Some(&context));
                        core.part_done(ticket, Ok(()));
                    }
                    Err(e) => core.fail(io_error("data")(e)),
                })),
                Err(e) => core.fail(e),
            });
        }
    }

    fn write_record(self: &Arc<Self>, plan: &RecordPlan, ticket: u64, context: Option<&Context>) {
        let area = self.area();
        let pieces = match context {
            Some(c) => encode(&area, plan, &c.extents, Merge::all(&c.layers)),
            None => encode(&area, plan, &[], std::iter::empty()),
        };
        let writes = Countdown::new(pieces.len() as u32);
        let mut batch = Vec::with_capacity(pieces.len());
        for (offset, buf) in pieces {
            self.stats.log_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
            let writes = writes.clone();
            let done = move |result: std::io::Result<()>| writes.done(result.map_err(io_error("log")));
            batch.push(self.disk.write_request("log", offset, Arc::new(buf), done));
        }
        self.stats.log_writes.fetch_add(batch.len() as u64, Ordering::Relaxed);
        let core = self.clone();
        writes.then(move |result| core.part_done(ticket, result));
        self.disk.submit(batch);
    }

    /// The data or the log writes of a flight are complete.
    fn part_done(self: &Arc<Self>, ticket: u64, result: Result<(), JournalError>) {
        if let Err(error) = result {
            return self.fail(error);
        }
        let mut pipe = self.pipe.lock();
        let at = (ticket - pipe.first_ticket) as usize;
        pipe.flights[at].parts -= 1;
        let written = pipe.flights[at].parts == 0;
        if written {
            pipe.flights[at].written_at = self.env.clock.monotonic();
        }
        #[cfg(feature = "planted")]
        if written
            && crate::planted::is(crate::planted::Bug::EarlyAnswer)
            && !self.closed.load(Ordering::Relaxed)
        {
            let waiters = std::mem::take(&mut pipe.flights[at].waiters);
            pipe.due.extend(waiters.into_iter().map(|w| (w.done, Ok(()))));
        }
        drop(pipe);
        if written {
            self.drive();
        }
    }

    /// A flush ended: the flights up to `ticket` are durable.
    fn flushed(self: &Arc<Self>, ticket: u64, result: std::io::Result<()>) {
        #[cfg(test)]
        let result = self.planted_result(result);
        #[cfg(feature = "planted")]
        let result = result.or_else(|error| {
            if crate::planted::is(crate::planted::Bug::SwallowedError) { Ok(()) } else { Err(error) }
        });
        if let Err(error) = result {
            return self.fail(io_error("log")(error));
        }
        let mut pipe = self.pipe.lock();
        #[cfg(test)]
        let ticket = pipe.planted_ticket(ticket);
        #[cfg(feature = "planted")]
        let ticket = pipe.joined_ticket(ticket);
        let flush_at = pipe.flushing.take().map(|(_, began)| began);
        while pipe.first_ticket <= ticket {
            self.land(&mut pipe, flush_at);
        }
        drop(pipe);
        self.drive();
        self.after_commit();
    }

    /// A flush ended that was made for one flight alone. What is durable counts from the oldest flight on.
    fn flushed_alone(self: &Arc<Self>, ticket: u64, result: std::io::Result<()>) {
        if let Err(error) = result {
            return self.fail(io_error("log")(error));
        }
        let mut pipe = self.pipe.lock();
        // A shared flush may have ended since: then the flight has landed.
        if let Some(at) = ticket.checked_sub(pipe.first_ticket) {
            pipe.flights[at as usize].alone.1 += 1;
        }
        while pipe.flights.front().is_some_and(Flight::flushed_alone) {
            self.land(&mut pipe, None);
        }
        drop(pipe);
        self.drive();
        self.after_commit();
    }

    #[cfg(test)]
    fn planted_result(&self, result: std::io::Result<()>) -> std::io::Result<()> {
        let swallow = self.pipe.lock().dispatcher.planted == crate::policy::Planted::SwallowsErrors;
        if swallow { Ok(()) } else { result }
    }

    /// The oldest flight is durable, by a flush of its own or one that began then.
    fn land(&self, pipe: &mut Pipe, flush_at: Option<Duration>) {
        let flight = pipe.flights.pop_front().expect("flights stay until they are durable");
        pipe.first_ticket += 1;
        pipe.end = flight.end;
        pipe.advance_stamp(flight.stamp);
        if flight.kind != RecordKind::Stamp {
            debug_assert_eq!(flight.seq.0, self.durable().0 + 1, "contexts become durable in order");
            tracing::trace!(context = flight.seq.0, waiting = flight.waiters.len(), "durable");
            self.durable.store(flight.seq.0, Ordering::Release);
            self.stats.transactions.fetch_add(flight.transactions, Ordering::Relaxed);
            let now = self.env.clock.monotonic();
            self.stats.note_stages([
                flight.begun_at,
                flight.sealed_at,
                flight.sent_at,
                flight.written_at,
                now,
            ]);
            let times = Crossing {
                sealed_at: flight.sealed_at,
                written_at: flight.written_at,
                flush_at: flush_at.unwrap_or(flight.written_at),
            };
            pipe.dispatcher.landed(now, times, flight.waiters.iter().map(|waiter| waiter.caller));
        }
        pipe.due.extend(flight.waiters.into_iter().map(|waiter| (waiter.done, Ok(()))));
        if pipe.flights.is_empty() {
            let waiters = std::mem::take(&mut pipe.idle_waiters);
            pipe.due.extend(waiters.into_iter().map(|done| (done, Ok(()))));
        }
    }

    /// Fail-stop: nothing is promised from now on, everyone who waits is told, reading goes on.
    pub fn fail(self: &Arc<Self>, error: JournalError) {
        let first = self.failed.set(error.clone()).is_ok();
        self.space.stop();
        if first {
            tracing::error!(%error, "the journal failed; the volume is read-only from now on");
            self.client.failed(&error);
        }
        self.drive();
    }
}
