//! Bugs to plant, one at a time, for the tests that show that the crash simulation would find them.
//! Exists with the feature `planted` only.

use std::sync::atomic::{AtomicU8, Ordering};

/// A bug that the crash simulation must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// None: everything is as it should be.
    None,
    /// A force is answered when the record is written, not when it is flushed; the flush comes with
    /// the next one.
    EarlyAnswer,
    /// Recovery takes any whole record that lies where the next one should, whatever its place in
    /// the log's history.
    StaleRecord,
    /// A segment is reused before the transaction that freed it is durable.
    EarlyReuse,
    /// A file that loses its last name is not noted as an orphan.
    ForgottenOrphan,
    /// A transaction goes to the log as two contexts.
    HalfContext,
    /// Whoever is written when a flush ends joins it, even if it began before.
    JoinedFlush,
    /// A flush that failed counts as done.
    SwallowedError,
    /// Of a block of the home store only the first copy is written.
    SingleCopy,
    /// A new home store takes the place of the old one before it is flushed.
    UnflushedRenewal,
    /// A mount leaves the mark that the home store is at rest.
    KeptMark,
    /// A read without a lock does not look whether what it copied was being changed.
    UncheckedRead,
    /// A mark is durable before the change that it belongs to is made.
    EarlyMark,
    /// The word that a session's changes are durable is so before they are.
    EarlySynced,
    /// Inode numbers are set aside beyond the limit that is stored.
    UnraisedLimit,
}

static PLANTED: AtomicU8 = AtomicU8::new(Bug::None as u8);

/// Plants a bug in every volume of this process, in place of the one before.
pub fn plant(bug: Bug) {
    PLANTED.store(bug as u8, Ordering::SeqCst);
}

/// Whether this one is planted.
pub fn is(bug: Bug) -> bool {
    PLANTED.load(Ordering::SeqCst) == bug as u8
}
