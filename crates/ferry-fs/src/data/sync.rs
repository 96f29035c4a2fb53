//! The locks and atomics of the code that is model-checked: `tests/frame_model.rs` and `tests/row_model.rs` compile `frame.rs` and
//! `row.rs` against the model checkers' versions of the same names.

pub use parking_lot::{Condvar, Mutex, MutexGuard};
pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering, fence};

/// Takes the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Takes the lock if nobody has it.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock()
}

/// Gives the lock up, to whoever has waited longest for it.
pub fn hand_over<T>(guard: MutexGuard<'_, T>) {
    MutexGuard::unlock_fair(guard);
}

/// Waits for a signal without holding the lock meanwhile.
pub fn wait_for<'a, T>(condvar: &Condvar, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(&mut guard);
    guard
}
