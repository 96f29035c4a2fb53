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
            remove_older(&*store, epoch);
            let mut number = 0;
            let (ended, changed) = &*told;
            while !*ended.lock() {
                match store.put(&beat_name(epoch, number), CONTENTS) {
                    Ok(()) => {
                        if let Some(old) = number.checked_sub(RETAINED) {
                            remove(&*store, &beat_name(epoch, old));
                        }
                        number += 1;
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

/// Removes the heartbeats of the owners before.
fn remove_older(store: &dyn Store, epoch: u64) {
    let older = |name: &String| beat_of(name).is_some_and(|(of, _)| of < epoch);
    match store.list(BEATS) {
        Ok(all) => all.iter().filter(|name| older(name)).for_each(|name| remove(store, name)),
        Err(error) => tracing::debug!(%error, "old heartbeats"),
    }
}

fn remove(store: &dyn Store, name: &str) {
    if let Err(error) = store.delete(name) {
        tracing::debug!(%error, "an old heartbeat");
    }
}
