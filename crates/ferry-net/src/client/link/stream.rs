//! What is sent on a connection, in which order, and how much of it at a time.

use std::sync::Arc;
use std::time::Duration;

use ferry_fs::Errno;
use tokio::sync::Notify;

use crate::frame;
use crate::message::{Op, ToServer, WINDOW_BYTES, WINDOW_OPS, WINDOW_UNIT};

use super::kept::Unanswered;
use super::promises::Gone;
use super::unclaimed::Unclaimed;
use super::{Before, Change, KeptChange, Redo, Request, Restore, Restored, State};

/// More bytes do not wait for company.
const OUTBOX_MAX: usize = 32 << 10;
/// Operations and bytes of the window that changes leave to requests.
pub(super) const FOR_REQUESTS: (usize, usize) = (64, 3 << 20);

/// Numbers the changes of a new session, behind `applied`; gives those that are lost. With a mark,
/// promised ones are made again that are not durable.
pub(super) fn begin_anew(
    state: &mut State,
    boot: u128,
    (applied, durable, mark): (u64, u64, Option<u64>),
    now: Duration,
    restore: &dyn Restore,
) -> Gone {
    let clean = state.said_goodbye;
    let ended = mark.is_none() && !clean && boot == state.boot;
    // Others may have had its locks since: what waits may have been meant to be made under one.
    let unlocked = ended && restore.has_locks();
    let (mut kept, mut gone) = (Vec::new(), Gone::new(Errno(libc::EIO)));
    let (mut again, mut unnamed) = (Vec::new(), Vec::new());
    for (seq, change) in std::mem::take(&mut state.changes) {
        let change = *change;
        if let (Some(promised), Some(_)) = (change.pending.promised, mark) {
            let promised = (!change.fatal).then_some(promised);
            again.push(KeptChange::new(seq, change.pending, promised, now));
            continue;
        }
        // What is said of it again cannot be found in what is kept: the mark covers that.
        if let Op::Numbered { made, .. } = &change.pending.op {
            unnamed.extend(&made.0);
        }
        match change.pending.op {
            // What it makes has a number of the session that is gone.
            _ if change.pending.promised.is_some() => gone.add(change),
            // The new session knows nothing yet that could be forgotten.
            Op::Forget { .. } => gone.add(change),
            // Nor has it given any space.
            Op::Spare { .. } => gone.dropped.push(change),
            _ if change.abandoned || change.restores => gone.dropped.push(change),
            _ if change.fatal => gone.failed.push(change),
            Op::Release { .. } | Op::Unlock { .. } => kept.push(change),
            _ if change.sent && !clean => {
                let op = &change.pending.op;
                match mark.map(|mark| state.kept.unanswered(seq, op, (mark, durable))) {
                    Some(Unanswered::Again) => kept.push(change),
                    Some(Unanswered::Made) => gone.made.push(change),
                    Some(Unanswered::Unknown) | None => gone.failed.push(change),
                }
            }
            // The new session takes the locks that are held, or has lost them.
            Op::Reclaim { .. } => gone.dropped.push(change),
            _ if unlocked => gone.failed.push(change),
            _ => kept.push(change),
        }
    }
    state.lose(&mut gone, restore);
    let (on_top, kept): (Vec<_>, Vec<_>) =
        kept.into_iter().partition(|change| state.is_damaged(&change.pending, Some(restore)));
    gone.failed.extend(on_top);
    let mut claims = Vec::new();
    let before = if mark.is_none() && clean {
        state.kept.clear();
        Before::Clean
    } else if ended {
        state.kept.give_up();
        Before::Ended
    } else {
        let redo = Redo { made: unnamed, ..state.kept.take(mark, durable, again) };
        if mark.is_some() {
            claims.clone_from(&redo.claims);
        } else {
            state.kept.clear();
        }
        Before::Crashed(redo)
    };
    let Restored { first, rest } = restore.restore(before);
    (state.answered, state.next_change) = (applied, applied + 1);
    state.forget_changes();
    state.returned = 0;
    let claims_first =
        first.iter().filter(|pending| matches!(pending.op, Op::Claim { .. })).count();
    state.unclaimed = Unclaimed::new(rest, claims_first);
    for pending in first {
        let _place = state.push_again(Change { restores: true, ..Change::new(pending, 0) });
    }
    (state.after, state.spare) = (state.next_change - 1, 0);
    state.kept.keep_claims(claims, state.after);
    // Those that are no more had been asked for of a server that is no more.
    state.requests.retain(|_, request| !matches!(request.pending.op, Op::Settled {}));
    for change in kept {
        gone.moved.push((Arc::clone(&change.pending.waiter), state.push_again(change)));
    }
    let requests = std::mem::take(&mut state.requests);
    requests.values().for_each(|request| state.claim_for(&request.pending.op));
    state.requests = requests;
    let newest = state.next_change - 1;
    state
        .requests
        .values_mut()
        .for_each(|request| (request.after, request.covers) = (newest, newest));
    gone.held = state.take_held();
    gone
}

/// What is under way of the server's window: beyond it the server does not read, not even a lease
/// that is given back.
#[derive(Default)]
pub(super) struct Window {
    ops: usize,
    units: usize,
}

impl Window {
    /// Takes room for an operation whose message is so long, and leaves some for others.
    fn take(&mut self, op: &Op, message: usize, (ops, bytes): (usize, usize)) -> Option<usize> {
        let units = op.units(message);
        let left = (WINDOW_OPS - ops, (WINDOW_BYTES - bytes) / WINDOW_UNIT);
        let fits = self.ops < left.0 && self.units + units <= left.1;
        fits.then(|| {
            self.ops += 1;
            self.units += units;
            units
        })
    }

    /// An operation is answered.
    pub(super) fn give(&mut self, units: usize) {
        self.ops -= usize::from(units > 0);
        self.units -= units;
    }
}

/// What a connection is sent through.
pub(super) type Line = crate::lanes::Line<()>;

/// Frames that nobody waits for: they go together, a moment later. Each costs both ends less so.
#[derive(Default)]
pub(super) struct Outbox {
    frames: Vec<u8>,
    /// Something waits.
    waiting: Arc<Notify>,
}

impl Outbox {
    /// Sends a frame behind all before it, now or with the next ones.
    pub(super) fn put(&mut self, line: &Line, frame: Vec<u8>, now: bool) {
        if self.frames.is_empty() {
            if now {
                line.send(frame, ());
                return;
            }
            self.waiting.notify_one();
        }
        self.frames.extend_from_slice(&frame);
        if now || self.frames.len() >= OUTBOX_MAX {
            self.send(line);
        }
    }

    /// Told when something waits.
    pub(super) fn waiting(&self) -> Arc<Notify> {
        Arc::clone(&self.waiting)
    }

    /// Sends what waits.
    pub(super) fn send(&mut self, line: &Line) {
        if !self.frames.is_empty() {
            line.send(std::mem::take(&mut self.frames), ());
        }
    }

    pub(super) fn clear(&mut self) {
        self.frames.clear();
    }
}

/// Sends the changes that are due and that the window has room for.
pub(super) fn pump(state: &mut State) {
    let Some(line) = &state.line else { return };
    while state.sent + 1 - state.answered <= WINDOW_OPS as u64 {
        let seq = state.sent + 1;
        let Some(change) = state.changes.get_mut(&seq) else { break };
        let nothing = Op::Nothing {};
        let op = if change.abandoned { &nothing } else { &change.pending.op };
        let promised = change.pending.promised;
        let place = (seq, state.answered, change.series);
        let frame = frame::encode_change(place, promised, change.pending.who, op);
        let Some(units) = state.window.take(op, frame.len(), FOR_REQUESTS) else { break };
        (change.sent, change.units) = (true, units);
        // Whoever waits for nothing may wait for company.
        state.outbox.put(line, frame, !change.is_patient());
        state.sent = seq;
    }
    pump_requests(state);
}

/// Sends the requests whose changes are on their way: the server, which takes a limited number of
/// messages, never has one that waits for a change that cannot come.
pub(super) fn pump_requests(state: &mut State) {
    let Some(line) = &state.line else { return };
    state.delayed.retain(|id| {
        let Some(Request { pending, after, units, cancelled, .. }) = state.requests.get_mut(id)
        else {
            return false;
        };
        if *after > state.sent {
            return true;
        }
        let frame = frame::encode_request(*id, *after, pending.who, &pending.op);
        // Who waits for a lock takes no room, or only for a moment.
        if !matches!(pending.op, Op::Lock { .. }) {
            let Some(taken) = state.window.take(&pending.op, frame.len(), (0, 0)) else {
                return true;
            };
            *units = taken;
        }
        if matches!(pending.op, Op::Settled {}) {
            // Others wait for it.
            line.send_first(frame, ());
        } else {
            state.outbox.put(line, frame, true);
        }
        if *cancelled {
            state.outbox.put(line, frame::encode(&ToServer::Cancel { id: *id }), true);
        }
        false
    });
}
