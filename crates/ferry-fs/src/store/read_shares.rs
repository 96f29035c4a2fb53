//! The bound of what is read through the rings of a transport at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that such reads may have in flight; the read pool takes what is beyond.
const IN_FLIGHT_MAX: usize = 32 << 20;

/// Bytes that are in flight.
#[derive(Default)]
pub(crate) struct ReadShares(Arc<AtomicUsize>);

/// The bytes of one read. They are given back when it is dropped.
pub(crate) struct ReadShare {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl ReadShares {
    /// `None`: too much is in flight.
    pub fn take(&self, bytes: usize) -> Option<ReadShare> {
        let share = ReadShare { all: Arc::clone(&self.0), bytes };
        let before = self.0.fetch_add(bytes, Ordering::Relaxed);
        (before + bytes <= IN_FLIGHT_MAX).then_some(share)
    }
}

impl Drop for ReadShare {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_flight_is_bounded_and_given_back() {
        let shares = ReadShares::default();
        let half = shares.take(IN_FLIGHT_MAX / 2).expect("nothing is in flight");
        let rest = shares.take(IN_FLIGHT_MAX - IN_FLIGHT_MAX / 2).expect("half is free");
        assert!(shares.take(1).is_none());
        drop(half);
        assert!(shares.take(IN_FLIGHT_MAX / 2).is_some());
        drop(rest);
        assert!(shares.take(IN_FLIGHT_MAX).is_some());
    }
}
