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
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);
/// So many heartbeats stay. Who stands by asks for each in turn.
const RETAINED: u64 = 120;
/// So many of the owners before are removed behind each.
const REMOVED: usize = 4;
/// What each says.
const CONTENTS: &[u8] = b"FERRYLIV";

/// A heartbeat. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Beats {
    ends: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    /// Begins the heartbeat of an epoch.
    pub fn start(store: Arc<dyn Store>, epoch: u64) -> Result<Self, ObjectError> {
        let ends = Arc::<(Mutex<bool>, Condvar)>::default();
        let told = Arc::clone(&ends);
        let beat = move || {
            let (mut number, mut older) = (0, None);
            let (ended, changed) = &*told;
            while !*ended.lock() {
                match store.put(&beat_name(epoch, number), CONTENTS) {
                    Ok(()) => {
                        if let Some(old) = number.checked_sub(RETAINED) {
                            remove(&*store, &beat_name(epoch, old));
                        }
                        number += 1;
                        // Behind a beat, and few at a time: the next one is due.
                        let older: &mut Vec<String> =
                            older.get_or_insert_with(|| older_than(&*store, epoch));
                        let few = older.len().saturating_sub(REMOVED)..;
                        older.drain(few).for_each(|name| remove(&*store, &name));
                    }
                    Err(error) => tracing::debug!(%error, "a heartbeat"),
                }
                let mut ended = ended.lock();
                if !*ended {
                    changed.wait_for(&mut ended, INTERVAL);
                }
            }
        };
        let thread = Builder::new()
            .name("ferry-beat".into())
            .spawn(beat)
            .map_err(|error| ObjectError::Refused(format!("cannot start a thread: {error}")))?;
        Ok(Self { ends, thread: Some(thread) })
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        *self.ends.0.lock() = true;
        self.ends.1.notify_all();
        // It may wait for the store, and nobody waits for that.
        drop(self.thread.take());
    }
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
    struct Recorded(Mutex<Vec<String>>);

    impl Recorded {
        fn note(&self, what: &str, name: &str) -> Result<(), ObjectError> {
            self.0.lock().push(format!("{what} {name}"));
            Ok(())
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
            self.note("delete", name)
        }
        fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
            self.note("list", prefix)?;
            Ok((0..RETAINED).map(|number| beat_name(3, number)).collect())
        }
    }

    /// Otherwise a store that is slow at removing would make it look dead.
    #[test]
    fn an_owner_beats_before_and_while_it_removes_what_owners_before_have_left() {
        let store = Arc::new(Recorded::default());
        let beats = Beats::start(Arc::clone(&store) as Arc<dyn Store>, 4).expect("a thread");
        let second = format!("put {}", beat_name(4, 1));
        while !store.0.lock().contains(&second) {
            std::thread::park_timeout(Duration::from_millis(20));
        }
        drop(beats);
        let calls = store.0.lock();
        assert_eq!(calls[0], format!("put {}", beat_name(4, 0)));
        let between = calls.iter().position(|call| *call == second).expect("it is there");
        let removed = calls[..between].iter().filter(|call| call.starts_with("delete"));
        assert_eq!(removed.count(), REMOVED);
    }
}
