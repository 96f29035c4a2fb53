//! A model of the lock that `Locking::Inode` takes, under loom: writers exclude everybody, and
//! nobody sleeps for ever, even where no wait ends by itself.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "../src/compare/rwsem.rs"]
mod rwsem;

/// What `rwsem.rs` is compiled against here.
mod sync {
    use std::time::Duration;

    pub use loom::sync::atomic::{AtomicBool, Ordering};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};

    pub const LOOKS: u32 = 1;

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
    pub fn wait_at_most<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        _most: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        (condvar.wait(guard).unwrap(), false)
    }
    pub fn pause() {
        loom::thread::yield_now();
    }
}

use loom::thread;
use rwsem::Rwsem;
use std::sync::Arc;
use sync::{AtomicBool, Ordering};

/// Writers that each make two changes which belong together, and readers that look at both.
fn check(readers: usize, writers: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let all = Arc::new((Rwsem::default(), [AtomicBool::new(false), AtomicBool::new(false)]));
        let read = |all: &(Rwsem, [AtomicBool; 2])| {
            let held = all.0.read();
            assert_eq!(
                all.1[0].load(Ordering::Relaxed),
                all.1[1].load(Ordering::Relaxed),
                "half a write"
            );
            drop(held);
        };
        let write = |all: &(Rwsem, [AtomicBool; 2])| {
            let held = all.0.write();
            for half in &all.1 {
                half.store(!half.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            drop(held);
        };
        let mut threads = Vec::new();
        for _ in 0..readers {
            let all = Arc::clone(&all);
            threads.push(thread::spawn(move || read(&all)));
        }
        for _ in 1..writers {
            let all = Arc::clone(&all);
            threads.push(thread::spawn(move || write(&all)));
        }
        write(&all);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_writer_excludes_readers_and_nobody_sleeps_for_ever() {
    check(2, 1);
}

#[test]
fn writers_exclude_each_other_and_nobody_sleeps_for_ever() {
    check(1, 2);
}
