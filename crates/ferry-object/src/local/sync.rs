//! The locks, atomics and channels of [`LocalStore`](super::LocalStore): the real ones, and in this
//! crate's unit tests those of the model checker. Tests that need real threads are integration
//! tests, in `tests/`.

#[cfg(not(test))]
pub(super) use {
    parking_lot::{Mutex, MutexGuard},
    std::sync::atomic::{AtomicBool, Ordering},
    std::sync::mpsc,
};

#[cfg(test)]
pub(super) use shuttle::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
    mpsc,
};

#[cfg(not(test))]
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Takes the lock if nobody has it.
#[cfg(not(test))]
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock()
}

#[cfg(test)]
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a model stops at the first panic")
}

/// Takes the lock if nobody has it.
#[cfg(test)]
pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock().ok()
}
