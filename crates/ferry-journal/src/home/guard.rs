//! Calls of redb, from which nothing escapes but a result.
//!
//! redb trusts its pages: on one that makes no sense it panics. And it refuses everything after the
//! first error of its file, for good. So a panic ends here, as an error; and a block that cannot be
//! read *unwinds* through redb, while it only reads, and is an error here: then redb never learns
//! of it, and other pages remain readable. It holds no lock while it reads from its file. Reopening
//! it after each error was the alternative: milliseconds and a cold cache for each read of a bad
//! block, and every reader interrupted.
//!
//! What a panic unwinds through has destructors, and one that panics then ends the process. So
//! pages that would make redb panic are kept from it where their shape shows it (`home/shape.rs`),
//! and a database is ended without a last commit ([`ending`]).

use crate::JournalError;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Guard {
    None,
    /// Panics end here.
    Calls,
    /// Panics end here, and a failed read may be one.
    Reads,
}

thread_local! {
    static GUARD: Cell<Guard> = const { Cell::new(Guard::None) };
}

/// A panic of this thread, now, would be caught and become an error: a panic hook need not end the
/// process.
pub fn panic_is_caught() -> bool {
    GUARD.get() != Guard::None
}

/// Calls `f`, which may change the database.
pub fn calling<T>(f: impl FnOnce() -> Result<T, JournalError>) -> Result<T, JournalError> {
    guarded(Guard::Calls, f)
}

/// Calls `f`, which only reads: an error there leaves the database usable.
pub fn reading<T>(f: impl FnOnce() -> Result<T, JournalError>) -> Result<T, JournalError> {
    guarded(Guard::Reads, f)
}

/// Drops `database` as a panic would. It then commits nothing more as it ends: every commit was
/// whole by itself, the state of its allocator included, and what it would do last has pages to
/// read that may make no sense.
pub fn ending<T>(database: T) {
    let ended: Result<(), _> = catch_unwind(AssertUnwindSafe(|| {
        let _dropped_by_the_panic = database;
        // Not `panic_any`: the panic hook has no part in this.
        resume_unwind(Box::new(()))
    }));
    debug_assert!(ended.is_err(), "it panicked");
}

/// A block cannot be read. Returns if the caller of the database can handle an error.
pub fn unreadable(error: JournalError) -> JournalError {
    if GUARD.get() == Guard::Reads {
        // Not `panic_any`: the panic hook has no part in this.
        resume_unwind(Box::new(error));
    }
    error
}

fn guarded<T>(
    guard: Guard,
    f: impl FnOnce() -> Result<T, JournalError>,
) -> Result<T, JournalError> {
    let outer = GUARD.replace(guard);
    let result = catch_unwind(AssertUnwindSafe(f));
    GUARD.set(outer);
    result.unwrap_or_else(|payload| Err(error_of(payload)))
}

fn error_of(payload: Box<dyn Any + Send>) -> JournalError {
    let payload = match payload.downcast::<JournalError>() {
        Ok(error) => return *error,
        Err(payload) => payload,
    };
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    JournalError::Damaged {
        what: "home store",
        offset: 0,
        detail: format!("a page makes no sense to the database: {text}"),
    }
}
