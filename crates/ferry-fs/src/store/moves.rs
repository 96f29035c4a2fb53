//! Where blocks were that the cleaner has moved, until their new places are durable.
//!
//! No folio has what is moved. If the device fails to write it, or to flush it, it can be read from
//! the old place alone. That is as it was: a segment is filled anew, or given back to the host,
//! only when the transaction that emptied it is stamped, and so is the move then. After a failure
//! nothing is stamped any more, so the old places stay known until the unmount, and what is mounted
//! next finds them mapped.

use ferry_journal::Seq;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Moves whose transactions are not stamped.
#[derive(Default)]
pub struct Moves(Mutex<State>);

#[derive(Default)]
struct State {
    /// By the first device block of the new place.
    unstamped: BTreeMap<u64, Move>,
    stamped: Seq,
}

struct Move {
    from: u64,
    len: u64,
    seq: Seq,
}

impl Moves {
    /// The transaction `seq` maps `len` blocks to `to` that were at `from`. Called before anybody
    /// sees the new place.
    pub fn note(&self, from: u64, to: u64, len: u32, seq: Seq) {
        let mut state = self.0.lock();
        if seq > state.stamped {
            state.unstamped.insert(to, Move { from, len: len.into(), seq });
        }
    }

    /// All transactions up to this one are stamped.
    pub fn stamped(&self, seq: Seq) {
        let mut state = self.0.lock();
        state.stamped = state.stamped.max(seq);
        state.unstamped.retain(|_, one| one.seq > seq);
    }

    /// Where device block `at` was, if the move is not stamped.
    pub fn old_place(&self, at: u64) -> Option<u64> {
        let state = self.0.lock();
        let (to, one) = state.unstamped.range(..=at).next_back()?;
        (at - to < one.len).then(|| one.from + (at - to))
    }

    /// How many there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.lock().unstamped.len()
    }
}
