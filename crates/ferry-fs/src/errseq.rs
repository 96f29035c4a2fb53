//! An error sequence, as Linux has it (`errseq_t`): what happened behind the programs' backs, and
//! who was told of it.
//!
//! * Each descriptor has a cursor. It is told of each error that came behind its cursor, once; of
//!   several the newest.
//! * Whoever is told changes nothing for the others: each has its own cursor.
//! * A new descriptor begins behind the errors that somebody was told of. One that nobody was told
//!   of is its business, too.

use crate::api::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// Somebody has been told of the newest error.
const TOLD: u64 = 1 << 31;

/// The sequence, of a file or a whole mount.
#[derive(Debug, Default)]
pub struct ErrorSequence {
    /// Count of errors << 32 | [`TOLD`] | the newest errno.
    newest: AtomicU64,
}

/// How far somebody was told.
#[derive(Debug, Default)]
pub struct ErrorCursor(AtomicU64);

fn errno(newest: u64) -> Errno {
    Errno((newest & (TOLD - 1)) as i32)
}

impl ErrorSequence {
    /// An error has come.
    pub fn add(&self, Errno(errno): Errno) {
        let next = |old: u64| Some(((old >> 32) + 1) << 32 | u64::from(errno.unsigned_abs()));
        // The closure always gives a value.
        let _ = self.newest.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// Where a new descriptor begins.
    pub fn sample(&self) -> ErrorCursor {
        let newest = self.newest.load(Ordering::Acquire);
        let untold = newest != 0 && newest & TOLD == 0;
        ErrorCursor(AtomicU64::new((newest >> 32) - u64::from(untold)))
    }

    /// A cursor behind all errors, told or not.
    pub fn end(&self) -> ErrorCursor {
        ErrorCursor(AtomicU64::new(self.newest.load(Ordering::Acquire) >> 32))
    }

    /// Somebody was told of the newest error, or there is none.
    pub fn is_told(&self) -> bool {
        let newest = self.newest.load(Ordering::Acquire);
        newest == 0 || newest & TOLD != 0
    }

    /// The error that [`ErrorSequence::tell`] would give.
    pub fn untold(&self, cursor: &ErrorCursor) -> Option<Errno> {
        let newest = self.newest.load(Ordering::Acquire);
        (cursor.0.load(Ordering::Acquire) < newest >> 32).then_some(errno(newest))
    }

    /// An error behind the cursor, which is told now.
    pub fn tell(&self, cursor: &ErrorCursor) -> Option<Errno> {
        let newest = self.newest.load(Ordering::Acquire);
        let count = newest >> 32;
        // Of two that ask at the same time, one may have seen a newer error: the cursor never goes
        // back, or that is told twice.
        (cursor.0.fetch_max(count, Ordering::AcqRel) < count).then(|| {
            // A newer one that came meanwhile nobody has been told.
            let told = newest | TOLD;
            let _ = self.newest.compare_exchange(newest, told, Ordering::AcqRel, Ordering::Acquire);
            errno(newest)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EIO: Errno = Errno(libc::EIO);
    const ENOSPC: Errno = Errno(libc::ENOSPC);

    #[test]
    fn each_descriptor_is_told_of_each_error_once() {
        let errors = ErrorSequence::default();
        let (a, b) = (errors.sample(), errors.sample());
        assert_eq!(errors.tell(&a), None);
        errors.add(EIO);
        assert_eq!(
            (errors.untold(&a), errors.tell(&a), errors.tell(&a)),
            (Some(EIO), Some(EIO), None)
        );
        assert_eq!((errors.tell(&b), errors.tell(&b)), (Some(EIO), None));
        errors.add(EIO);
        errors.add(ENOSPC);
        assert_eq!((errors.tell(&a), errors.tell(&a)), (Some(ENOSPC), None), "of two the newest");
    }

    #[test]
    fn a_new_descriptor_is_told_of_what_nobody_was_told() {
        let errors = ErrorSequence::default();
        errors.add(EIO);
        let (first, end) = (errors.sample(), errors.end());
        assert!(!errors.is_told());
        assert_eq!((errors.tell(&end), errors.tell(&first)), (None, Some(EIO)));
        assert!(errors.is_told());
        assert_eq!(errors.tell(&errors.sample()), None);
    }

    /// Whoever asks with what it saw of the errors before the newest one came.
    #[test]
    fn an_error_that_was_told_is_not_told_again_by_who_saw_an_older_one() {
        let errors = ErrorSequence::default();
        let cursor = errors.sample();
        errors.add(EIO);
        cursor.0.store(2, Ordering::Release);
        assert_eq!((errors.untold(&cursor), errors.tell(&cursor)), (None, None));
        assert_eq!(cursor.0.load(Ordering::Acquire), 2, "the cursor does not go back");
        errors.add(ENOSPC);
        assert_eq!(errors.tell(&cursor), None, "the second was told");
        errors.add(EIO);
        assert_eq!(errors.tell(&cursor), Some(EIO));
    }
}
