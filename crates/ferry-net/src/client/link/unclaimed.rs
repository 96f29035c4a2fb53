//! Inodes that the kernel knows and that a new session has not claimed yet.
//!
//! * CLAIM-1: a session claims what its restoring needs first. The rest is claimed afterwards, a
//!   few batches at a time, or before the first operation that names it: that stands behind the
//!   claim.
//! * CLAIM-2: what the kernel forgets before that is never claimed.
//! * CLAIM-3: the next session begins anew with all that the kernel knows then; nothing of this is
//!   carried over.

use std::sync::Arc;

use ferry_fs::Ino;

use super::stream::pump;
use super::{Change, Link, Pending, State};
use crate::client::waiting::Nobody;
use crate::codec::List;
use crate::message::{BATCH_MAX, Claim, Op, Who};

/// Inodes of a claim that no operation waits for: what programs ask for meanwhile stands behind a
/// few of these.
const BATCH: usize = 256;
/// Claims without answers beyond which no more are sent unasked.
const UNDER_WAY_MAX: usize = 4;

/// Of one session.
#[derive(Default)]
pub(super) struct Unclaimed {
    /// In the order of their numbers: so the server finds them side by side. Emptied from the end.
    claims: Vec<Claim>,
    /// Which of them were claimed or forgotten.
    done: Vec<bool>,
    /// Claims without answers.
    under_way: usize,
}

impl Unclaimed {
    /// These are left, and so many claims have no answer yet.
    pub(super) fn new(mut claims: Vec<Claim>, under_way: usize) -> Self {
        claims.sort_unstable_by_key(|claim| claim.ino);
        let done = vec![false; claims.len()];
        Self { claims, done, under_way }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// How many may be left.
    pub(super) fn len(&self) -> usize {
        self.claims.len()
    }

    /// Takes one out, if it is left.
    fn take(&mut self, ino: Ino) -> Option<Claim> {
        let at = self.claims.binary_search_by_key(&ino, |claim| claim.ino).ok()?;
        (!std::mem::replace(&mut self.done[at], true)).then(|| self.claims[at])
    }

    /// Takes out the next batch; it may be empty only where none is left.
    fn next(&mut self) -> Vec<Claim> {
        let mut batch = Vec::new();
        while batch.len() < BATCH
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

impl State {
    /// Claims what an operation names, in front of it.
    pub(super) fn claim_for(&mut self, op: &Op) {
        if !self.unclaimed.is_empty() {
            let claims: Vec<Claim> =
                op.info().inodes().filter_map(|ino| self.unclaimed.take(ino)).collect();
            claims.chunks(BATCH_MAX).for_each(|claims| self.claim(claims.to_vec()));
        }
    }

    /// Requests that name these inodes are made behind it.
    fn claim(&mut self, claims: Vec<Claim>) {
        let touched = claims.iter().map(|claim| claim.ino).collect();
        let op = Op::Claim { inodes: List(claims) };
        let pending = Pending { touched, ..Pending::new(Who::default(), op, Arc::new(Nobody)) };
        self.unclaimed.under_way += 1;
        self.push_again(Change { restores: true, ..Change::new(pending, 0) });
    }

    /// Claims more, when the session is restored.
    pub(super) fn claim_more(&mut self) {
        if self.answered < self.after {
            return;
        }
        while self.unclaimed.under_way < UNDER_WAY_MAX && !self.unclaimed.is_empty() {
            let claims = self.unclaimed.next();
            if !claims.is_empty() {
                self.claim(claims);
            }
        }
    }

    /// A claim is answered.
    pub(super) fn claimed(&mut self) {
        self.unclaimed.under_way = self.unclaimed.under_way.saturating_sub(1);
    }

    /// The kernel does not know an inode any more; whether it was not claimed.
    pub(super) fn unclaim(&mut self, ino: Ino) -> bool {
        self.unclaimed.take(ino).is_some()
    }
}

impl Link {
    /// Claims more of what is left.
    pub(super) fn claim_more(&self) {
        let mut state = self.state.lock();
        state.claim_more();
        pump(&mut state);
    }
}
