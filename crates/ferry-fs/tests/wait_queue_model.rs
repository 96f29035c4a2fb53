//! Models of the row of those who wait for space, under loom (`docs/locking.md`, rules SPACE-1 to
//! SPACE-3): writers overwrite blocks of a volume that has room for few dirty ones; each dirty
//! block that is written back gives its old place back.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "../src/space/free_blocks.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod free_blocks;

/// What `free_blocks.rs` is compiled against here.
mod sync {
    pub use loom::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
    pub fn hand_over<T>(guard: MutexGuard<'_, T>) {
        drop(guard);
    }
    pub fn wait_for<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).unwrap()
    }
}

use free_blocks::{Claim, Free, Want};
use loom::thread;
use std::convert::Infallible;
use std::sync::Arc;
use sync::{AtomicI64, Ordering};

struct Volume {
    free: Free,
    dirty: AtomicI64,
}

impl Volume {
    fn new(free: i64, dirty: i64) -> Arc<Self> {
        Arc::new(Self { free: Free::new(free), dirty: AtomicI64::new(dirty) })
    }

    fn write_back(&self) -> Result<(), Infallible> {
        self.free.add(self.dirty.swap(0, Ordering::AcqRel));
        Ok(())
    }

    /// One write that dirties `blocks`; `false`: `ENOSPC`.
    fn overwrite(&self, blocks: i64) -> bool {
        let (mut claim, want) = (Claim::new(&self.free, None), Want { blocks, leave: 0 });
        while !claim.take(want) {
            let Ok(found) = claim.wait(want, || self.write_back(), || self.write_back());
            if !found {
                return false;
            }
        }
        self.dirty.fetch_add(blocks, Ordering::AcqRel);
        true
    }

    /// The same without the row: take, write back, take again.
    fn overwrite_alone(&self, blocks: i64) -> bool {
        let want = Want { blocks, leave: 0 };
        if !self.free.take(want) {
            let Ok(()) = self.write_back();
            if !self.free.take(want) {
                return false;
            }
        }
        self.dirty.fetch_add(blocks, Ordering::AcqRel);
        true
    }
}

fn bounded() -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model
}

fn writers(first: i64, write: impl Fn(&Volume, i64) -> bool + Send + Sync + Copy + 'static) {
    bounded().check(move || {
        let volume = Volume::new(1, 1);
        let other = {
            let volume = Arc::clone(&volume);
            thread::spawn(move || write(&volume, 2))
        };
        assert!(write(&volume, first), "an ENOSPC that is not true");
        assert!(other.join().unwrap(), "an ENOSPC that is not true");
        let Ok(()) = volume.write_back();
        assert_eq!(volume.free.get(), 2, "space is lost or made up");
        assert!(!volume.free.is_wanted());
    });
}

#[test]
fn no_writer_is_told_enospc_because_another_was_faster() {
    writers(1, Volume::overwrite);
    writers(2, Volume::overwrite);
}

#[test]
#[should_panic(expected = "an ENOSPC that is not true")]
fn without_the_row_the_model_finds_a_false_error() {
    writers(2, Volume::overwrite_alone);
}

#[test]
fn who_asks_for_more_than_there_is_hears_it_and_takes_nothing_along() {
    bounded().check(|| {
        let volume = Volume::new(1, 0);
        let other = {
            let volume = Arc::clone(&volume);
            thread::spawn(move || volume.overwrite(1))
        };
        assert!(!volume.overwrite(2));
        assert!(other.join().unwrap());
        let Ok(()) = volume.write_back();
        assert_eq!(volume.free.get(), 1);
    });
}
