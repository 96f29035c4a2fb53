//! What is sent on a connection, in which order, and how much of it at a time.

use crate::frame;
use crate::message::{Op, ToServer, WINDOW_BYTES, WINDOW_OPS, WINDOW_UNIT};

use super::{Change, Request, Restore, State};

/// Numbers the changes of a new session; gives those that are lost.
pub(super) fn begin_anew(state: &mut State, boot: u128, restore: &dyn Restore) -> Vec<Change> {
    let clean = state.said_goodbye;
    let (mut kept, mut lost) = (Vec::new(), Vec::new());
    for change in std::mem::take(&mut state.changes).into_values() {
        match change.pending.op {
            // The new session knows nothing yet that could be forgotten.
            Op::Forget { .. } => lost.push(change),
            _ if change.abandoned || change.restores => {}
            Op::Release { .. } | Op::Unlock { .. } => kept.push(change),
            _ if change.sent && !clean => lost.push(change),
            _ => kept.push(change),
        }
    }
    let restored = restore.restore(clean || boot == state.boot).into_iter();
    let restored: Vec<_> = restored
        .map(|pending| Change { pending, sent: false, units: 0, abandoned: false, restores: true })
        .collect();
    state.answered = 0;
    state.after = restored.len() as u64;
    let all = restored.into_iter().chain(kept.into_iter().map(|c| Change { sent: false, units: 0, ..c }));
    state.changes = (1..).zip(all).collect();
    state.next_change = state.changes.len() as u64 + 1;
    let newest = state.next_change - 1;
    state.requests.values_mut().for_each(|request| request.after = newest);
    lost
}

/// What is under way of the server's window: beyond it the server does not read, not even a lease that is given back.
#[derive(Default)]
pub(super) struct Window {
    ops: usize,
    units: usize,
}

impl Window {
    /// Takes room for an operation whose message is so long.
    fn take(&mut self, op: &Op, message: usize) -> Option<usize> {
        let units = op.units(message);
        let fits = self.ops < WINDOW_OPS && self.units + units <= WINDOW_BYTES / WINDOW_UNIT;
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

/// Sends the changes that are due and that the window has room for.
pub(super) fn pump(state: &mut State) {
    let Some(line) = &state.line else { return };
    while state.sent + 1 - state.answered <= WINDOW_OPS as u64 {
        let seq = state.sent + 1;
        let Some(change) = state.changes.get_mut(&seq) else { break };
        let nothing = Op::Nothing {};
        let op = if change.abandoned { &nothing } else { &change.pending.op };
        let frame = frame::encode_change(seq, state.answered, change.pending.who, op);
        let Some(units) = state.window.take(op, frame.len()) else { break };
        (change.sent, change.units) = (true, units);
        let _gone = line.send((frame, ()));
        state.sent = seq;
    }
    pump_requests(state);
}

/// Sends the requests whose changes are on their way: the server, which takes a limited number of messages, never has one that waits for
/// a change that cannot come.
pub(super) fn pump_requests(state: &mut State) {
    let Some(line) = &state.line else { return };
    state.delayed.retain(|id| {
        let Some(Request { pending, after, units, cancelled }) = state.requests.get_mut(id) else {
            return false;
        };
        if *after > state.sent {
            return true;
        }
        let frame = frame::encode_request(*id, *after, pending.who, &pending.op);
        // Who waits for a lock takes no room, or only for a moment.
        if !matches!(pending.op, Op::Lock { .. }) {
            let Some(taken) = state.window.take(&pending.op, frame.len()) else { return true };
            *units = taken;
        }
        let _gone = line.send((frame, ()));
        if *cancelled {
            let _gone = line.send((frame::encode(&ToServer::Cancel { id: *id }), ()));
        }
        false
    });
}
