//! Whether this thread may wait for the store.
//!
//! A transport's thread serves every program of a core. On a local device it reads missing metadata
//! itself: that takes as long as handing the request to another thread. On a device that is far
//! away, one read is a request over a network, and for as long as it takes no program of that core
//! would be served. So the thread says that it must not wait ([`Hurried`]). Whatever would read
//! metadata asks first ([`may_wait`]). The request then fails with [`FsError::WouldWait`], before
//! it has changed anything, and another thread makes it anew.

use crate::error::FsError;
use std::cell::Cell;

thread_local! {
    static IS_HURRIED: Cell<bool> = const { Cell::new(false) };
}

/// As long as this lives, its thread does not wait for the store.
pub(crate) struct Hurried {
    before: bool,
}

impl Hurried {
    /// From now on, if `is_hurried`.
    pub(crate) fn if_so(is_hurried: bool) -> Self {
        Self { before: IS_HURRIED.replace(is_hurried) }
    }
}

impl Drop for Hurried {
    fn drop(&mut self) {
        IS_HURRIED.set(self.before);
    }
}

/// Whether the thread must not wait.
pub(crate) fn is_hurried() -> bool {
    IS_HURRIED.get()
}

/// Refuses what would wait for the store, on a thread that must not.
pub(crate) fn may_wait() -> Result<(), FsError> {
    if is_hurried() { Err(FsError::WouldWait) } else { Ok(()) }
}
