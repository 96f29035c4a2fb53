//! Inodes that the kernel knows and that a new session has not claimed yet.
//!
//! * CLAIM-1: a session claims what its restoring needs first. The rest is claimed afterwards, one
//!   small batch at a time, or before the first operation that names it: that stands behind the
//!   claim.
//! * CLAIM-2: what the kernel forgets before that is never claimed.
//! * CLAIM-3: the next session begins anew with all that the kernel knows then; nothing of this is
//!   carried over.

use ferry_fs::Ino;

use crate::message::Claim;

/// The inodes that one session has not claimed.
#[derive(Default)]
pub(super) struct Unclaimed {
    /// In the order of their numbers: so the server finds them side by side. Emptied from the end.
    claims: Vec<Claim>,
    /// Which of them were claimed or forgotten.
    done: Vec<bool>,
    /// Claims without answers.
    in_flight: usize,
}

impl Unclaimed {
    /// These are left, and so many claims have no answer yet.
    pub(super) fn new(mut claims: Vec<Claim>, in_flight: usize) -> Self {
        claims.sort_unstable_by_key(|claim| claim.ino);
        let done = vec![false; claims.len()];
        Self { claims, done, in_flight }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// How many may be left.
    pub(super) fn len(&self) -> usize {
        self.claims.len()
    }

    /// Claims without answers.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// A claim stands in the stream.
    pub(super) fn begin(&mut self) {
        self.in_flight += 1;
    }

    /// A claim is answered.
    pub(super) fn answered(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Takes one out, if it is left.
    pub(super) fn take(&mut self, ino: Ino) -> Option<Claim> {
        let at = self.claims.binary_search_by_key(&ino, |claim| claim.ino).ok()?;
        (!std::mem::replace(&mut self.done[at], true)).then(|| self.claims[at])
    }

    /// Takes out the next batch; it may be empty only where none is left.
    pub(super) fn next(&mut self, batch_max: usize) -> Vec<Claim> {
        let mut batch = Vec::new();
        while batch.len() < batch_max
            && let (Some(claim), Some(done)) = (self.claims.pop(), self.done.pop())
        {
            batch.extend((!done).then_some(claim));
        }
        if self.claims.is_empty() {
            (self.claims, self.done) = (Vec::new(), Vec::new());
        }
        batch
    }
}
