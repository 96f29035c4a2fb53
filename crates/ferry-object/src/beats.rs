//! [`Beats`]: the heartbeat of an owner that others may take for dead.
//!
//! Each second an object is put, from the claim on until the owner has closed the volume. It has a
//! thread of its own and depends on nothing else: an owner that waits, for the term of the one
//! before or for a large upload, lives.

use crate::error::ObjectError;
use crate::format::{BEATS, beat_name, beat_of};
use crate::store::Store;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

/// The time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);
/// So many heartbeats stay. Who stands by asks for each in turn.
const RETAINED: u64 = 120;
/// What each says.
const CONTENTS: &[u8] = b"FERRYLIV";

/// What the threads know of each other.
#[derive(Debug, Default)]
struct Progress {
    /// So many heartbeats were put.
    put: u64,
    ended: bool,
}

type Shared = (Mutex<Progress>, Condvar);

/// A heartbeat. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Beats(Arc<Shared>);

impl Beats {
    /// Begins the heartbeat of an epoch.
    pub fn start(store: Arc<dyn Store>, epoch: u64) -> Result<Self, ObjectError> {
        let this = Self(Arc::default());
        let (removes_from, progress) = (Arc::clone(&store), Arc::clone(&this.0));
        spawn("ferry-beat", move || beat(&*store, epoch, &progress))?;
        let progress = Arc::clone(&this.0);
        spawn("ferry-beat-old", move || remove_old(&*removes_from, epoch, &progress))?;
        Ok(this)
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        // The threads may wait for the store, and nobody waits for that.
        self.0.0.lock().ended = true;
        self.0.1.notify_all();
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), ObjectError> {
    let thread = Builder::new().name(name.into()).spawn(run);
    thread.map_err(|error| ObjectError::Refused(format!("cannot start a thread: {error}")))?;
    Ok(())
}

/// Puts the heartbeats.
fn beat(store: &dyn Store, epoch: u64, (progress, changed): &Shared) {
    let mut number = 0;
    while !progress.lock().ended {
        match store.put(&beat_name(epoch, number), CONTENTS) {
            Ok(()) => number += 1,
            Err(error) => tracing::debug!(%error, "a heartbeat"),
        }
        let mut progress = progress.lock();
        progress.put = number;
        changed.notify_all();
        if !progress.ended {
            changed.wait_for(&mut progress, INTERVAL);
        }
    }
}

/// Removes heartbeats that nobody asks for: those of the owners before, and old ones of this. It
/// has a thread of its own: a store that is slow at removing must not make an owner look dead.
fn remove_old(store: &dyn Store, epoch: u64, shared: &Shared) {
    if !has_put(shared, 1) {
        return;
    }
    for name in older_than(store, epoch) {
        if shared.0.lock().ended {
            return;
        }
        remove(store, &name);
    }
    let mut old = 0;
    while has_put(shared, old + RETAINED + 1) {
        remove(store, &beat_name(epoch, old));
        old += 1;
    }
}

/// Waits until so many heartbeats were put; `false`: there will be no more.
fn has_put((progress, changed): &Shared, count: u64) -> bool {
    let mut progress = progress.lock();
    while !progress.ended && progress.put < count {
        changed.wait(&mut progress);
    }
    !progress.ended
}

/// The heartbeats of the owners before.
fn older_than(store: &dyn Store, epoch: u64) -> Vec<String> {
    let is_older = |name: &String| beat_of(name).is_some_and(|(of, _)| of < epoch);
    let all = store.list(BEATS);
    let all = all.inspect_err(|error| tracing::debug!(%error, "old heartbeats"));
    all.unwrap_or_default().into_iter().filter(is_older).collect()
}

fn remove(store: &dyn Store, name: &str) {
    if let Err(error) = store.delete(name) {
        tracing::debug!(%error, "an old heartbeat");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    /// The requests in their order, with what owners before have left.
    #[derive(Debug, Default)]
    struct Recorded {
        calls: Mutex<Vec<String>>,
        /// While it is held, nothing is removed.
        removes: Mutex<()>,
    }

    impl Recorded {
        fn note(&self, what: &str, name: &str) -> Result<(), ObjectError> {
            self.calls.lock().push(format!("{what} {name}"));
            Ok(())
        }

        fn wait_for(&self, call: &str) {
            while !self.calls.lock().iter().any(|one| one == call) {
                std::thread::park_timeout(Duration::from_millis(20));
            }
        }
    }

    impl Store for Recorded {
        fn get(&self, name: &str, _range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
            Err(ObjectError::NotFound(name.into()))
        }
        fn create(&self, name: &str, _bytes: &[u8]) -> Result<(), ObjectError> {
            self.note("create", name)
        }
        fn put(&self, name: &str, _bytes: &[u8]) -> Result<(), ObjectError> {
            self.note("put", name)
        }
        fn delete(&self, name: &str) -> Result<(), ObjectError> {
            self.note("delete", name)?;
            drop(self.removes.lock());
            Ok(())
        }
        fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
            self.note("list", prefix)?;
            Ok((0..RETAINED).map(|number| beat_name(3, number)).collect())
        }
    }

    /// Otherwise a store that does not remove would make it look dead.
    #[test]
    fn an_owner_beats_before_and_while_it_removes_what_owners_before_have_left() {
        let store = Arc::new(Recorded::default());
        let held = store.removes.lock();
        let beats = Beats::start(Arc::clone(&store) as Arc<dyn Store>, 4).expect("threads");
        store.wait_for(&format!("put {}", beat_name(4, 2)));
        let calls = store.calls.lock().clone();
        assert_eq!(calls[0], format!("put {}", beat_name(4, 0)));
        assert_eq!(calls.iter().filter(|call| call.starts_with("delete")).count(), 1);
        drop(held);
        store.wait_for(&format!("delete {}", beat_name(3, RETAINED - 1)));
        drop(beats);
    }
}
