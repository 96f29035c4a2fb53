//! The locks and atomics of the code that is model-checked: `tests/frame_model.rs` compiles `frame.rs` and `front.rs` against the
//! model checkers' versions of the same names.

pub use parking_lot::{Mutex, MutexGuard};
pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Takes the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Takes the lock if nobody has it.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock()
}
