//! The locks and atomics of the code that is model-checked: `tests/frame_model.rs`,
//! `tests/frame_table_model.rs`, `tests/deferred_model.rs`, `tests/wait_queue_model.rs`,
//! `tests/residency_model.rs` and `tests/rwsem_model.rs` compile `frame.rs`, `frame_table.rs`,
//! `deferred.rs`, `free_blocks.rs`, `residency.rs` and `rwsem.rs` against the model checkers'
//! versions of the same names.

pub(crate) use crate::cache::memory::{FrameWords, Unsaved};
pub use parking_lot::{Condvar, Mutex, MutexGuard};
pub use std::sync::Arc;
pub use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(feature = "compare")]
use std::time::Duration;
use zerocopy::FromZeros;

/// How often a writer looks for the lock of `rwsem.rs` before it sleeps; while others write 4 KiB
/// it gets it earlier.
#[cfg(feature = "compare")]
pub const LOOKS: u32 = 20_000;

/// So many words of zeros. Memory that comes fresh from the system is not written again.
pub fn zeros(words: usize) -> FrameWords {
    #[expect(clippy::expect_used, reason = "as any other allocation")]
    let zeros = <[AtomicU64]>::new_box_zeroed_with_elems(words).expect("memory for a frame");
    FrameWords::Heap(zeros)
}

/// Takes the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Takes the lock if nobody has it.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.try_lock()
}

/// Gives the lock up, to the thread that has waited longest for it.
pub fn hand_over<T>(guard: MutexGuard<'_, T>) {
    MutexGuard::unlock_fair(guard);
}

/// Waits for a signal without holding the lock meanwhile.
pub fn wait_for<'a, T>(condvar: &Condvar, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(&mut guard);
    guard
}

/// The same, for no longer than `most`; and whether it took so long.
#[cfg(feature = "compare")]
pub fn wait_at_most<'a, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'a, T>,
    most: Duration,
) -> (MutexGuard<'a, T>, bool) {
    let timed_out = condvar.wait_for(&mut guard, most).timed_out();
    (guard, timed_out)
}

/// Between two looks at what another thread is about to change.
#[cfg(feature = "compare")]
pub fn pause() {
    std::hint::spin_loop();
}
