//! State of the group commit: the records in flight, the callers that wait for them, and what is
//! due next.

use super::context::Context;
use super::policy::{Caller, Dispatcher};
use super::stats::FlushStats;
use crate::log::format::{RecordKind, blocks_for};
use crate::log::record::RecordPlan;
use crate::types::Point;
use crate::{Completion, JournalError, Seq};
use std::collections::VecDeque;
use std::time::Duration;

/// If a context has more data than this, the data is safe before the record is written, so that
/// recovery has little to verify: it was flushed, or the device is ordered.
pub const UNFLUSHED_DATA_MAX: u64 = 32 << 20;

/// A record between its seal and its durability.
pub struct InFlight {
    pub kind: RecordKind,
    pub seq: Seq,
    /// The durable point that it carries.
    pub durable_point: Seq,
    pub end: Point,
    /// How many of its two parts (data, log) are not written yet.
    pub parts: u8,
    pub transactions: u64,
    /// When its context got its first change, was sealed, handed to the device, and written.
    pub begun_at: Duration,
    pub sealed_at: Duration,
    pub sent_at: Duration,
    pub written_at: Duration,
    pub waiters: Vec<Waiter>,
    /// Flushes for it alone: how many have begun, and how many have ended.
    pub alone: (usize, usize),
}

impl InFlight {
    /// Flushes that it needs if each caller has its own.
    pub fn flushes_alone(&self) -> usize {
        self.waiters.len().max(1)
    }

    /// It is written, and all its own flushes have ended.
    pub fn flushed_alone(&self) -> bool {
        self.parts == 0 && self.alone.1 >= self.flushes_alone()
    }
}

/// A caller that waits for a context to be durable.
pub struct Waiter {
    pub caller: Caller,
    pub done: Completion,
}

/// A record that waits for its turn to be written.
pub struct Unsent {
    pub plan: RecordPlan,
    pub number: u64,
    pub context: Option<Context>,
}

/// The pipeline of the group commit: the open context's waiters, and the records in flight in log
/// order.
pub struct Pipe {
    /// Where the next record starts; its `id` is that of the newest record.
    pub next: Point,
    /// The log is durable up to here.
    pub end: Point,
    /// Where recovery would start.
    pub tail: Point,
    /// The log before this position was discarded, or is written over.
    pub discarded: u64,
    /// Durable point: the newest context that a durable record, or the home store, names as
    /// durable.
    pub durable_point: Seq,
    pub in_flight: VecDeque<InFlight>,
    /// Number of the oldest record in flight; numbers count records since the journal was opened.
    pub first_number: u64,
    /// The newest of them, not handed to the device yet.
    pub unsent: VecDeque<Unsent>,
    /// Callers that wait for the open context.
    pub open_waiters: Vec<Waiter>,
    /// Callers that wait for a context and want nothing done for it.
    pub durable_waiters: Vec<(Seq, Completion)>,
    /// Decides when the open context is sealed for `open_waiters`.
    pub dispatcher: Dispatcher,
    /// The seal is held until this time, or until the dispatcher decides otherwise.
    pub held_until: Option<Duration>,
    /// Seal although no caller waits.
    pub seal_wanted: bool,
    /// Log space for a durable-point record is reserved; write the record when no other is in
    /// flight.
    pub point_reserved: bool,
    pub point_waiters: Vec<(Seq, Completion)>,
    /// No context is sealed: the log is being replaced by a larger one.
    pub frozen: bool,
    /// Called when no record is in flight.
    pub idle_waiters: Vec<Completion>,
    /// The flush in flight covers the records up to this number; and when it began.
    pub flushing: Option<(u64, Duration)>,
    /// Completions to be called, with their results.
    pub due: Vec<(Completion, Result<(), JournalError>)>,
    pub report_point: bool,
    pub driving: bool,
}

pub enum Action {
    Flush(u64),
    /// A flush for this record alone.
    FlushAlone(u64),
    Call(Vec<(Completion, Result<(), JournalError>)>),
    ReportDurablePoint(Seq),
    Send(Unsent),
}

impl Pipe {
    /// No record in flight; the log is durable up to `end` and starts at `tail`.
    pub fn new(end: Point, tail: Point, dispatcher: Dispatcher) -> Self {
        Self {
            next: end,
            end,
            tail,
            discarded: 0,
            durable_point: end.seq,
            in_flight: VecDeque::new(),
            first_number: 0,
            unsent: VecDeque::new(),
            open_waiters: Vec::new(),
            durable_waiters: Vec::new(),
            dispatcher,
            held_until: None,
            seal_wanted: false,
            point_reserved: false,
            point_waiters: Vec::new(),
            frozen: false,
            idle_waiters: Vec::new(),
            flushing: None,
            due: Vec::new(),
            report_point: false,
            driving: false,
        }
    }

    /// No record is in flight.
    pub fn idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Blocks between the log's tail and its end.
    pub fn used_blocks(&self) -> u64 {
        self.next.position - self.tail.position
    }

    /// The flush policy and its statistics.
    pub fn flush_stats(&self) -> FlushStats {
        let (holds, (policy, fast_flush)) = (self.dispatcher.holds(), self.dispatcher.get());
        FlushStats {
            policy,
            fast_flush,
            commit_time: self.dispatcher.commit_time(),
            commit_delays: holds.holds,
            commit_delays_in_vain: holds.in_vain,
            delayed_callers: holds.callers,
            commit_delay_time: holds.time,
            overlapped: holds.overlapped,
        }
    }

    /// Gives the next record its position at the end of the log.
    pub fn plan(&mut self, kind: RecordKind, seq: Seq, body_len: u64, id: u64) -> RecordPlan {
        let plan = RecordPlan {
            kind,
            position: self.next.position,
            id,
            prev: self.next.id,
            seq: seq.0,
            durable_point: 0,
            body_len,
        };
        self.next = Point { seq, position: self.next.position + blocks_for(body_len), id };
        plan
    }

    pub fn enqueue(&mut self, plan: RecordPlan, context: Option<Context>, now: Duration) {
        let number = self.first_number + self.in_flight.len() as u64;
        self.in_flight.push_back(InFlight {
            kind: plan.kind,
            seq: Seq(plan.seq),
            durable_point: Seq(0),
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
        self.unsent.push_back(Unsent { plan, number, context });
    }

    /// Contexts are durable up to `seq`.
    pub fn durable_up_to(&mut self, seq: Seq) {
        for (_, done) in self.durable_waiters.extract_if(.., |(wanted, _)| *wanted <= seq) {
            self.due.push((done, Ok(())));
        }
    }

    /// The durable point has moved to `seq`.
    pub fn advance_durable_point(&mut self, seq: Seq) {
        if seq > self.durable_point {
            self.durable_point = seq;
            self.report_point = true;
            for (_, done) in self.point_waiters.extract_if(.., |(wanted, _)| *wanted <= seq) {
                self.due.push((done, Ok(())));
            }
        }
    }

    /// Number of records in flight that the flush in flight does not cover.
    pub fn unflushed(&self) -> usize {
        let flushing =
            self.flushing.map_or(0, |(number, _)| (number + 1).saturating_sub(self.first_number));
        self.in_flight.len() - flushing as usize
    }

    /// Number of the last record before which, itself included, all are written.
    pub fn written(&self) -> Option<u64> {
        let n = self.in_flight.iter().take_while(|f| f.parts == 0).count() as u64;
        (n > 0).then(|| self.first_number + n - 1)
    }

    /// A planted bug: no caller waits for the flush any more, so there is time.
    pub fn puts_flush_off(&self) -> bool {
        let waiting = self.point_reserved
            || !self.open_waiters.is_empty()
            || self.in_flight.iter().any(|f| !f.waiters.is_empty());
        !waiting && self.in_flight.len() == 1
    }

    /// The flush to begin: one for all that is written, or one for a single record.
    pub fn next_flush(&mut self, now: impl Fn() -> Duration) -> Option<Action> {
        if self.dispatcher.flushes_alone() {
            let mut in_flight = self.in_flight.iter();
            let at = in_flight.position(|f| f.parts == 0 && f.alone.0 < f.flushes_alone())?;
            self.in_flight[at].alone.0 += 1;
            return Some(Action::FlushAlone(self.first_number + at as u64));
        }
        if self.flushing.is_some() {
            return None;
        }
        let number = self.written()?;
        self.flushing = Some((number, now()));
        Some(Action::Flush(number))
    }

    pub fn fail_all(&mut self, error: &JournalError) {
        let waiters = self
            .in_flight
            .iter_mut()
            .flat_map(|f| f.waiters.drain(..))
            .chain(self.open_waiters.drain(..));
        let waiters = waiters
            .map(|waiter| waiter.done)
            .chain(self.durable_waiters.drain(..).map(|(_, done)| done))
            .chain(self.point_waiters.drain(..).map(|(_, done)| done))
            .chain(self.idle_waiters.drain(..));
        self.due.extend(waiters.map(|done| (done, Err(error.clone()))));
        self.dispatcher.abandoned();
        self.held_until = None;
        self.unsent.clear();
        self.seal_wanted = false;
        self.point_reserved = false;
    }
}
