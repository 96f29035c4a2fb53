//! Bugs to plant, one at a time, for the tests that show that the simulation would find them.
//! Exists with the feature `planted` only.

use std::sync::atomic::{AtomicU8, Ordering};

/// A bug that the simulation must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// None: everything is as it should be.
    None,
    /// A flush ends when its own log object is answered, whatever is missing before it.
    FlushBeforeGap,
    /// A log object is sent while data objects that it names are not answered.
    LogBeforeData,
    /// A new owner writes no root before it follows the log.
    NoTakeoverRoot,
    /// A new owner does not look for a newer claim once its fences are in.
    NoLookAfterFence,
    /// Entries of log objects are installed in the order of the answers.
    InstalledInAnyOrder,
    /// The collector deletes fences, too.
    DeletedFence,
}

static PLANTED: AtomicU8 = AtomicU8::new(Bug::None as u8);

/// Plants a bug in every device of this process, in place of the one before.
pub fn plant(bug: Bug) {
    PLANTED.store(bug as u8, Ordering::SeqCst);
}

/// Whether this one is planted.
pub fn is(bug: Bug) -> bool {
    PLANTED.load(Ordering::SeqCst) == bug as u8
}
