//! What is in flight on a connection: the window that the server allows, and the frames that wait
//! to be sent together.

use std::sync::Arc;

use tokio::sync::Notify;

use crate::message::{Op, WINDOW_BYTES, WINDOW_OPS, WINDOW_UNIT};

/// Beyond so many bytes, frames are sent at once.
const OUTBOX_MAX: usize = 32 << 10;
/// Operations and bytes of the window that changes leave to requests.
pub(super) const FOR_REQUESTS: (usize, usize) = (64, 3 << 20);

/// The part of the server's window that is in use. Beyond its window the server reads nothing, not
/// even a lease that is returned.
#[derive(Default)]
pub(super) struct Window {
    ops: usize,
    units: usize,
}

impl Window {
    /// Takes room for an operation whose message is so long, and leaves some for others. Gives the
    /// units that it takes.
    pub(super) fn take(
        &mut self,
        op: &Op,
        message: usize,
        (ops, bytes): (usize, usize),
    ) -> Option<usize> {
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

/// Frames that no program waits for. They are sent together, a few milliseconds later, which costs
/// both ends less.
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
