//! The locks and atomics of lock-free and lock code: the real ones, and in this crate's unit tests
//! those of the model checker. Tests that need real threads are integration tests, in `tests/`.

#[cfg(not(test))]
pub(crate) use {
    parking_lot::{Condvar, Mutex, MutexGuard},
    std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

#[cfg(test)]
pub(crate) use shuttle::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

#[cfg(not(test))]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Gives up the lock, waits to be notified, takes it again.
#[cfg(not(test))]
pub(crate) fn wait<'a, T>(condvar: &Condvar, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(&mut guard);
    guard
}

#[cfg(test)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a model stops at the first panic")
}

/// Gives up the lock, waits to be notified, takes it again.
#[cfg(test)]
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).expect("a model stops at the first panic")
}
