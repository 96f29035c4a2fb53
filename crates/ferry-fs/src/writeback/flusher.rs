//! The background thread: writes back what is old or too much, frees what became dead, cleans ahead
//! of need.

use crate::store::data_store::{Busy, DataStore, Dirty};
use crate::store::signal::Signal;
use crate::writeback::trim::Quiet;
use ferry_env::activity::{self, Operation};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Starts the thread. It holds the store only while it works.
pub fn start(store: &Arc<DataStore>) {
    let (weak, signal) = (Arc::downgrade(store), Arc::clone(&store.signal));
    let body = {
        let signal = Arc::clone(&signal);
        move || run(&weak, &signal)
    };
    match std::thread::Builder::new().name("ferry-writeback".into()).spawn(body) {
        Ok(thread) => signal.set_thread(thread),
        Err(error) => {
            tracing::error!(%error, "no write-back thread: data is written at fsync only")
        }
    }
}

fn run(store: &Weak<DataStore>, signal: &Signal) {
    let (mut stuck, mut untidy, mut quiet) = (false, false, Quiet::default());
    while let Some(wanted) = signal.wait() {
        let Some(store) = store.upgrade() else { return };
        let _doing = activity::begin(Operation::WriteBack);
        let result = store.round(wanted);
        if let (Err(error), false) = (&result, stuck) {
            tracing::error!(%error, "write-back failed");
        }
        stuck = result.is_err();
        signal.end_round(stuck);
        let result =
            if stuck { Ok(()) } else { store.idle_work(&mut quiet, store.env.clock.monotonic()) };
        if let (Err(error), false) = (&result, untidy) {
            tracing::error!(%error, "the cleaner failed");
        }
        untidy = result.is_err();
    }
}

impl DataStore {
    /// Does what the background thread would do now; only for `background: false`.
    pub fn tick(&self) -> Result<(), crate::error::FsError> {
        if self.options.read_only { Ok(()) } else { self.round(false) }
    }

    /// What follows a round of write-back.
    pub(crate) fn idle_work(
        &self,
        quiet: &mut Quiet,
        now: Duration,
    ) -> Result<(), crate::error::FsError> {
        self.tidy()?;
        self.give_back_when_quiet(quiet, now)
    }

    /// One round of write-back.
    fn round(&self, wanted: bool) -> Result<(), crate::error::FsError> {
        self.share_memory();
        if self.failed.load(Ordering::Relaxed) {
            return self.writable();
        }
        let much = self.cache.dirty() > self.dirty_threshold()
            || self.too_much()
            || self.space.is_wanted();
        let since = match (
            wanted && much,
            self.env.clock.monotonic().checked_sub(self.options.writeback_age),
        ) {
            (true, _) => Duration::MAX,
            (false, Some(since)) => since,
            (false, None) => return Ok(()),
        };
        if self.queue.oldest().is_some_and(|oldest| oldest <= since) {
            self.write_back(Dirty::Since(since), Busy::Skip)?;
        }
        Ok(())
    }
}
