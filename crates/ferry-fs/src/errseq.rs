//! An error sequence, as Linux has it (`errseq_t`): errors of writes that programs did not wait
//! for, and which descriptors were told of them.
//!
//! * Each descriptor has a cursor. It is told of each error that came behind its cursor, once; of
//!   several the newest.
//! * A descriptor that is told changes nothing for the others: each has its own cursor.
//! * Closing tells without moving the cursor. The kernel reports each close of a descriptor, also
//!   of the copy that a child process closes as it starts another program. Nobody hears of that
//!   one, so the program's own fsync and close must still be told. The last close counts as heard.
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

impl ErrorCursor {
    /// All that it is, for [`ErrorCursor::at`].
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// The cursor that another process had.
    pub fn at(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }
}

fn errno(newest: u64) -> Errno {
    Errno((newest & (TOLD - 1)) as i32)
}

impl ErrorSequence {
    /// All that it is, for [`ErrorSequence::restore`].
    pub fn value(&self) -> u64 {
        self.newest.load(Ordering::Acquire)
    }

    /// Becomes what another process had.
    pub fn restore(&self, value: u64) {
        self.newest.store(value, Ordering::Release);
    }

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

    /// There was no error.
    pub fn is_empty(&self) -> bool {
        self.newest.load(Ordering::Acquire) == 0
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

    /// The error that a close reports: one behind the cursor, which stays where it is. `closed`
    /// remembers it for [`ErrorSequence::released`].
    pub fn tell_at_close(&self, cursor: &ErrorCursor, closed: &ErrorCursor) -> Option<Errno> {
        let newest = self.newest.load(Ordering::Acquire);
        let count = newest >> 32;
        (cursor.0.load(Ordering::Acquire) < count).then(|| {
            closed.0.fetch_max(count, Ordering::AcqRel);
            errno(newest)
        })
    }

    /// The descriptor is gone: what its last close reported counts as told.
    pub fn released(&self, closed: &ErrorCursor) {
        let newest = self.newest.load(Ordering::Acquire);
        if newest != 0 && closed.0.load(Ordering::Acquire) == newest >> 32 {
            self.set_told(newest);
        }
    }

    /// A newer error that came meanwhile nobody has been told.
    fn set_told(&self, newest: u64) {
        let told = newest | TOLD;
        let _ = self.newest.compare_exchange(newest, told, Ordering::AcqRel, Ordering::Acquire);
    }

    /// An error behind the cursor, which is told now.
    pub fn tell(&self, cursor: &ErrorCursor) -> Option<Errno> {
        let newest = self.newest.load(Ordering::Acquire);
        let count = newest >> 32;
        // Of two that ask at the same time, one may have seen a newer error: the cursor never goes
        // back, or that is told twice.
        (cursor.0.fetch_max(count, Ordering::AcqRel) < count).then(|| {
            self.set_told(newest);
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
    fn a_close_tells_and_leaves_the_error_to_fsync_and_the_next_close() {
        let errors = ErrorSequence::default();
        let (told, closed) = (errors.sample(), ErrorCursor::default());
        assert_eq!(errors.tell_at_close(&told, &closed), None);
        errors.add(EIO);
        for _ in 0..2 {
            assert_eq!(errors.tell_at_close(&told, &closed), Some(EIO));
            assert!(!errors.is_told(), "a child process may have closed its copy");
        }
        assert_eq!(errors.tell(&told), Some(EIO));
        assert_eq!(errors.tell_at_close(&told, &closed), None);
        errors.add(ENOSPC);
        errors.released(&closed);
        assert!(!errors.is_told(), "the second one has come since");
        let (told, closed) = (errors.sample(), ErrorCursor::default());
        assert_eq!(errors.tell_at_close(&told, &closed), Some(ENOSPC));
        errors.released(&closed);
        assert!(errors.is_told(), "the last close was told");
    }

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
    fn a_new_descriptor_is_told_of_an_untold_error() {
        let errors = ErrorSequence::default();
        errors.add(EIO);
        let (first, end) = (errors.sample(), errors.end());
        assert!(!errors.is_told());
        assert_eq!((errors.tell(&end), errors.tell(&first)), (None, Some(EIO)));
        assert!(errors.is_told());
        assert_eq!(errors.tell(&errors.sample()), None);
    }

    /// A descriptor asks with what it saw before the newest error came.
    #[test]
    fn an_error_is_not_told_again_by_an_older_cursor() {
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
