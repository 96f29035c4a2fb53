//! A model of work that is left to the holder of a lock, under loom (`src/cache/deferred.rs`).
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "../src/cache/deferred.rs"]
mod deferred;

/// What `deferred.rs` is compiled against here.
mod sync {
    pub use loom::sync::atomic::{AtomicBool, Ordering, fence};
    pub use loom::sync::{Mutex, MutexGuard};

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
}

use deferred::Deferred;
use loom::sync::RwLock;
use loom::thread;
use std::sync::Arc;

/// A lock, what it protects, and work for its holder.
#[derive(Default)]
struct Locked {
    done: RwLock<Vec<u8>>,
    work: Deferred<u8>,
}

impl Locked {
    fn run(&self) {
        self.work.run(|| self.done.try_write().ok(), |done, item| done.push(item));
    }

    fn leave(&self, item: u8) {
        self.work.add(item);
        self.run();
    }

    fn read(&self) {
        drop(self.done.read().unwrap());
        self.run();
    }

    fn write(&self) {
        drop(self.done.write().unwrap());
        self.run();
    }
}

fn bounded() -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model
}

#[test]
fn what_is_left_beside_a_reader_is_done_when_both_are_gone() {
    bounded().check(|| {
        let locked = Arc::new(Locked::default());
        let reader = {
            let locked = Arc::clone(&locked);
            thread::spawn(move || locked.read())
        };
        locked.leave(1);
        reader.join().unwrap();
        assert_eq!(*locked.done.read().unwrap(), [1]);
    });
}

#[test]
fn each_item_is_done_once_among_adders_and_a_writer() {
    bounded().check(|| {
        let locked = Arc::new(Locked::default());
        let others = [1, 2].map(|item| {
            let locked = Arc::clone(&locked);
            thread::spawn(move || if item == 1 { locked.leave(item) } else { locked.write() })
        });
        locked.leave(3);
        for other in others {
            other.join().unwrap();
        }
        let mut done = locked.done.read().unwrap().clone();
        done.sort_unstable();
        assert_eq!(done, [1, 3]);
    });
}
