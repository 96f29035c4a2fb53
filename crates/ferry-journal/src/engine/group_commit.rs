//! The group commit: contexts are sealed, written, flushed, and become durable in order.
//!
//! Nothing here has a thread of its own. The thread that brings an event (a force, a completed
//! write, a completed flush) records it in [`Pipe`] under the lock and calls [`Core::drive`]. One
//! thread at a time drives: it performs the next due action, without the lock, until none is left.
//! So a device that completes inside `submit` does not recurse, and a device with a completion
//! thread continues on that thread.

use super::core::Core;
use super::options::IN_FLIGHT_MAX;
use crate::commit::context::Context;
use crate::commit::pipeline::{Action, InFlight, Pipe, UNFLUSHED_DATA_MAX, Unsent, Waiter};
use crate::commit::policy::{Caller, CommitTimes, SealDecision};
use crate::completion::Countdown;
use crate::disk::io_error;
use crate::log::format::{LOG_BLOCK, RecordKind};
use crate::log::record::{RecordPlan, encode};
use crate::view::layers::Merge;
use crate::{Completion, JournalError, Seq};
use ferry_env::activity::{self, Layer};
use ferry_env::planted::{Bug, is_planted};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

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
            pipe.open_waiters.push(Waiter { caller, done });
            pipe.dispatcher.arrived(now, caller, true);
        } else if let Some(record) =
            pipe.in_flight.iter_mut().find(|f| f.seq >= seq.min(newest) && f.seq > end)
        {
            record.waiters.push(Waiter { caller, done });
            pipe.dispatcher.arrived(now, caller, false);
        } else {
            pipe.due.push((done, Ok(())));
        }
        drop(pipe);
        self.drive();
    }

    /// Calls `done` once `seq` is durable, and makes nothing durable for it.
    pub fn when_durable(self: &Arc<Self>, seq: Seq, done: Completion) {
        let mut pipe = self.pipe.lock();
        let newest = {
            let head = self.head.read();
            // An open context without a change is never sealed.
            if head.is_empty() { pipe.next.seq } else { head.seq }
        };
        let seq = seq.min(newest);
        match self.failure() {
            _ if self.durable() >= seq => pipe.due.push((done, Ok(()))),
            Some(error) => pipe.due.push((done, Err(error))),
            None => pipe.durable_waiters.push((seq, done)),
        }
        drop(pipe);
        self.drive();
    }

    /// Asks for a durable-point record that covers `seq`, which is durable. Its log space is
    /// already reserved.
    pub fn write_durable_point(self: &Arc<Self>, seq: Seq, done: Completion) {
        let mut pipe = self.pipe.lock();
        let spare = pipe.point_reserved || pipe.durable_point >= seq || self.failure().is_some();
        match self.failure() {
            Some(error) => pipe.due.push((done, Err(error))),
            None if pipe.durable_point >= seq => pipe.due.push((done, Ok(()))),
            None => {
                pipe.point_reserved = true;
                pipe.point_waiters.push((seq, done));
            }
        }
        drop(pipe);
        if spare {
            self.space.release(LOG_BLOCK as u64);
        }
        self.drive();
    }

    /// Calls `done` once the owner has been told of a durable point that covers `seq`. One does
    /// already.
    pub fn when_durable_point(self: &Arc<Self>, seq: Seq, done: Completion) {
        let mut pipe = self.pipe.lock();
        match self.failure() {
            Some(error) => pipe.due.push((done, Err(error))),
            None if pipe.durable_point >= seq => pipe.due.push((done, Ok(()))),
            None => pipe.point_waiters.push((seq, done)),
        }
        drop(pipe);
        self.drive();
    }

    /// Calls `done` when no record is in flight.
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

    /// The context that the durable-point record in flight, or the one asked for, covers.
    pub fn durable_point_in_flight(&self) -> Option<Seq> {
        let pipe = self.pipe.lock();
        let durable_point =
            pipe.in_flight.iter().find(|record| record.kind == RecordKind::DurablePoint);
        durable_point.map(|record| record.seq).or(pipe.point_reserved.then_some(pipe.end.seq))
    }

    /// Seals the open context if it is still `seq`.
    pub fn seal_if(self: &Arc<Self>, seq: Seq) {
        let mut pipe = self.pipe.lock();
        if self.head.read().seq == seq {
            self.seal(&mut pipe);
        }
        drop(pipe);
        self.drive();
    }

    /// Performs every due action. If another thread is driving, that thread performs them.
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

    fn next_step(&self, pipe: &mut Pipe) -> Option<Action> {
        if let Some(error) = self.failure() {
            pipe.fail_all(&error);
        } else if !(is_planted(Bug::EarlyAnswer) && pipe.puts_flush_off())
            && let Some(flush) = pipe.next_flush(|| self.env.clock.monotonic())
        {
            return Some(flush);
        }
        // The owner first: callers that wait for a durable point rely on what the owner does with
        // it.
        if std::mem::take(&mut pipe.report_point) {
            return Some(Action::ReportDurablePoint(pipe.durable_point));
        }
        if !pipe.due.is_empty() {
            return Some(Action::Call(std::mem::take(&mut pipe.due)));
        }
        if !pipe.frozen && pipe.unsent.is_empty() && self.wants_seal(pipe) {
            self.seal(pipe);
        }
        if !pipe.frozen && pipe.point_reserved && pipe.in_flight.is_empty() {
            self.plan_durable_point(pipe);
        }
        let in_flight = pipe.in_flight.len() - pipe.unsent.len().min(pipe.in_flight.len());
        if in_flight < self.options.log.buffers.clamp(1, IN_FLIGHT_MAX)
            && let Some(mut unsent) = pipe.unsent.pop_front()
        {
            let durable_point = pipe.end.seq;
            unsent.plan.durable_point = durable_point.0;
            let at = (unsent.number - pipe.first_number) as usize;
            pipe.in_flight[at].durable_point = durable_point;
            pipe.in_flight[at].sent_at = self.env.clock.monotonic();
            self.stats.note_in_flight(in_flight as u64 + 1);
            return Some(Action::Send(unsent));
        }
        None
    }

    fn wants_seal(&self, pipe: &mut Pipe) -> bool {
        if std::mem::take(&mut pipe.seal_wanted) {
            return true;
        }
        if pipe.open_waiters.is_empty() {
            return false;
        }
        let (now, in_flight, unflushed) =
            (self.env.clock.monotonic(), pipe.in_flight.len(), pipe.unflushed());
        match pipe.dispatcher.decide(now, in_flight, unflushed, || self.disk.flush_timing().avg) {
            SealDecision::Now => return true,
            SealDecision::AfterCompletion => pipe.held_until = None,
            SealDecision::Until(until) => {
                pipe.held_until = Some(until);
                self.hold_timer.arm(until);
            }
        }
        false
    }

    /// Seals the open context, if it has any change, and gives it its position in the log.
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
        self.stats.note_context(&context, pipe.open_waiters.len() as u64);
        pipe.dispatcher.sealed(now, pipe.open_waiters.len(), pipe.in_flight.len());
        pipe.held_until = None;
        tracing::trace!(context = context.seq.0, waiting = pipe.open_waiters.len(), "sealed");
        let kind = if context.data_bytes > UNFLUSHED_DATA_MAX {
            RecordKind::ContextAfterData
        } else {
            RecordKind::Context
        };
        let plan = self.plan(pipe, kind, context.seq, context.payload);
        let waiters = std::mem::take(&mut pipe.open_waiters);
        pipe.enqueue(plan, Some(context), now);
        pipe.in_flight.back_mut().expect("just added").waiters = waiters;
    }

    fn plan(&self, pipe: &mut Pipe, kind: RecordKind, seq: Seq, body_len: u64) -> RecordPlan {
        pipe.plan(kind, seq, body_len, self.new_record_id())
    }

    fn plan_durable_point(&self, pipe: &mut Pipe) {
        pipe.point_reserved = false;
        if pipe.durable_point >= pipe.end.seq {
            self.space.release(LOG_BLOCK as u64);
            return;
        }
        let seq = pipe.end.seq;
        let plan = self.plan(pipe, RecordKind::DurablePoint, seq, 0);
        pipe.enqueue(plan, None, self.env.clock.monotonic());
    }

    fn perform(self: &Arc<Self>, step: Action) {
        match step {
            Action::Flush(number) => {
                let core = self.clone();
                self.disk.flush(Box::new(move |result| core.flushed(number, result)));
            }
            Action::FlushAlone(number) => {
                let core = self.clone();
                self.disk.flush_alone(Box::new(move |result| core.flushed_alone(number, result)));
            }
            Action::Call(due) => due.into_iter().for_each(|(done, result)| done(result)),
            Action::ReportDurablePoint(seq) => {
                self.client.durable_point(seq);
                self.durable_point.store(seq.0, Ordering::Release);
            }
            Action::Send(unsent) => self.send(unsent),
        }
    }

    /// Hands a record to the device. Log and data are written at the same time, unless there is
    /// more data than [`UNFLUSHED_DATA_MAX`]: then the data is safe first.
    fn send(self: &Arc<Self>, unsent: Unsent) {
        let Unsent { plan, number, context } = unsent;
        let core = self.clone();
        let Some(context) = context else {
            self.write_record(&plan, number, None);
            return self.part_done(number, Ok(()));
        };
        let data = context.data.clone();
        if plan.kind == RecordKind::Context {
            self.write_record(&plan, number, Some(&context));
            data.then(move |result| core.part_done(number, result));
        } else {
            let me = core.clone();
            let safe = move |result: std::io::Result<()>| match result {
                Ok(()) => {
                    me.write_record(&plan, number, Some(&context));
                    me.part_done(number, Ok(()));
                }
                Err(e) => me.fail(io_error("data")(e)),
            };
            data.then(move |result| match result {
                Ok(()) if core.disk.is_ordered() => safe(Ok(())),
                Ok(()) => core.disk.flush(Box::new(safe)),
                Err(e) => core.fail(e),
            });
        }
    }

    fn write_record(self: &Arc<Self>, plan: &RecordPlan, number: u64, context: Option<&Context>) {
        let _inside = activity::enter(Layer::LogWrite);
        let area = self.area();
        let chunks = match context {
            Some(c) => encode(&area, plan, &c.extents, Merge::all(&c.layers)),
            None => encode(&area, plan, &[], std::iter::empty()),
        };
        let writes = Countdown::new(chunks.len() as u32);
        let mut batch = Vec::with_capacity(chunks.len());
        for (offset, buf) in chunks {
            self.stats.log_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
            let writes = writes.clone();
            let done =
                move |result: std::io::Result<()>| writes.done(result.map_err(io_error("log")));
            batch.push(self.disk.write_request("log", offset, Arc::new(buf), done));
        }
        self.stats.log_writes.fetch_add(batch.len() as u64, Ordering::Relaxed);
        let core = self.clone();
        writes.then(move |result| core.part_done(number, result));
        self.disk.submit(batch);
    }

    /// The data or the log writes of a record are complete.
    fn part_done(self: &Arc<Self>, number: u64, result: Result<(), JournalError>) {
        if let Err(error) = result {
            return self.fail(error);
        }
        let mut pipe = self.pipe.lock();
        let at = (number - pipe.first_number) as usize;
        pipe.in_flight[at].parts -= 1;
        let written = pipe.in_flight[at].parts == 0;
        if written {
            pipe.in_flight[at].written_at = self.env.clock.monotonic();
        }
        if written && is_planted(Bug::EarlyAnswer) && !self.closed.load(Ordering::Relaxed) {
            let waiters = std::mem::take(&mut pipe.in_flight[at].waiters);
            pipe.due.extend(waiters.into_iter().map(|w| (w.done, Ok(()))));
        }
        drop(pipe);
        if written {
            self.drive();
        }
    }

    /// A flush ended: the records up to `number` are durable.
    fn flushed(self: &Arc<Self>, number: u64, result: std::io::Result<()>) {
        if let Err(error) = result
            && !is_planted(Bug::SwallowedError)
        {
            return self.fail(io_error("log")(error));
        }
        let mut pipe = self.pipe.lock();
        let number = match pipe.written() {
            Some(written) if is_planted(Bug::JoinedFlush) => number.max(written),
            _ => number,
        };
        let flush_at = pipe.flushing.take().map(|(_, began)| began);
        while pipe.first_number <= number {
            self.complete(&mut pipe, flush_at);
        }
        drop(pipe);
        self.drive();
        self.after_commit();
    }

    /// A flush for one record alone ended. Records become durable from the oldest on.
    fn flushed_alone(self: &Arc<Self>, number: u64, result: std::io::Result<()>) {
        if let Err(error) = result {
            return self.fail(io_error("log")(error));
        }
        let mut pipe = self.pipe.lock();
        // If a shared flush has ended since, the record is durable already.
        if let Some(at) = number.checked_sub(pipe.first_number) {
            pipe.in_flight[at as usize].alone.1 += 1;
        }
        while pipe.in_flight.front().is_some_and(InFlight::flushed_alone) {
            self.complete(&mut pipe, None);
        }
        drop(pipe);
        self.drive();
        self.after_commit();
    }

    /// The oldest record in flight is durable: by flushes of its own, or by a shared one that began
    /// at `flush_at`.
    fn complete(&self, pipe: &mut Pipe, flush_at: Option<Duration>) {
        let record = pipe.in_flight.pop_front().expect("in_flight stay until they are durable");
        pipe.first_number += 1;
        pipe.end = record.end;
        pipe.advance_durable_point(record.durable_point);
        if record.kind != RecordKind::DurablePoint {
            debug_assert_eq!(
                record.seq.0,
                self.durable().0 + 1,
                "contexts become durable in order"
            );
            tracing::trace!(context = record.seq.0, waiting = record.waiters.len(), "durable");
            // Counted first: who sees that a context is durable finds it in the statistics.
            self.stats.transactions.fetch_add(record.transactions, Ordering::Relaxed);
            let now = self.env.clock.monotonic();
            self.stats.note_stages([
                record.begun_at,
                record.sealed_at,
                record.sent_at,
                record.written_at,
                now,
            ]);
            self.durable.store(record.seq.0, Ordering::Release);
            if let Some(tail) = &self.options.tail {
                tail.durable(record.seq);
            }
            pipe.durable_up_to(record.seq);
            let times = CommitTimes {
                sealed_at: record.sealed_at,
                written_at: record.written_at,
                flush_at: flush_at.unwrap_or(record.written_at),
            };
            pipe.dispatcher.completed(
                now,
                times,
                record.waiters.iter().map(|waiter| waiter.caller),
            );
        }
        pipe.due.extend(record.waiters.into_iter().map(|waiter| (waiter.done, Ok(()))));
        if pipe.in_flight.is_empty() {
            let waiters = std::mem::take(&mut pipe.idle_waiters);
            pipe.due.extend(waiters.into_iter().map(|done| (done, Ok(()))));
        }
    }

    /// Fail-stop: from now on nothing is acknowledged, every waiter gets an error, and reads
    /// continue.
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
