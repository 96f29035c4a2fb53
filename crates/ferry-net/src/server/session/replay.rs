//! The session of a server that crashed: its client replays what was not durable.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::rt::RwLockReadGuard;
use ferry_fs::SessionStore;

use super::phase::{Event, Replay};
use super::state::{RESTORING_MAX, Registration, RestoreProgress, Session, Worker};

/// The same in KiB.
const RESTORING_KIB_MAX: u64 = 1 << 20;
/// So many bytes that have arrived are progress, too: the next message may be long, on a slow line.
const PROGRESS_BYTES: u64 = 4 << 10;

/// A replay waits for so many syncs that fail. Then the server waits no longer for a device that
/// makes nothing durable.
const FAILED_SYNCS_MAX: u32 = 30;

impl Session {
    /// This is the session of a server that has crashed. `mark` is its last-applied sequence
    /// number, `durable` its durable watermark.
    pub(in crate::server) fn begin_restoring(&self, (mark, durable): (u64, u64), now: Duration) {
        *self.registration.lock() = Registration::Recorded;
        let mut state = self.state.lock();
        (state.unheard_welcome, state.durable) = (Some(mark), durable);
        state.progress =
            RestoreProgress { at: now, changes_left: RESTORING_MAX, ..RestoreProgress::default() };
        self.transition(&mut state, Event::TakenUp);
    }

    /// Whether the replay has made no progress for longer than `most`. While the server has
    /// something to apply, the client is not to blame.
    pub(in crate::server) fn is_stalled(&self, now: Duration, most: Duration) -> bool {
        let heard = self.heard.load(Ordering::Relaxed);
        let mut state = self.state.lock();
        if !self.phase().is_restoring() {
            return false;
        }
        let waits = matches!(state.worker, Worker::AtBarrier(_));
        let busy = state.progress.newest > state.applied && !waits;
        let progress = &mut state.progress;
        let arrives =
            heard - progress.counted >= PROGRESS_BYTES && heard >> 10 <= RESTORING_KIB_MAX;
        if progress.changes_left > 0 && (busy || arrives) {
            (progress.at, progress.counted) = (now, heard);
        }
        now.saturating_sub(progress.at) > most
    }

    /// A sync has failed. Whether the client replays, and its change waits for another one.
    pub(in crate::server) fn waits_for_another_sync(&self) -> bool {
        let mut state = self.state.lock();
        let waits = self.is_replaying() && state.progress.failed_syncs < FAILED_SYNCS_MAX;
        state.progress.failed_syncs += u32::from(waits);
        waits
    }

    /// Whether the client may still replay changes.
    pub(in crate::server) fn is_replaying(&self) -> bool {
        self.phase().replays()
    }

    /// The right to replay one change, if the client may; the replay does not end while it is held.
    pub(in crate::server) fn replay_right(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let right = self.replaying.read();
        self.is_replaying().then_some(right)
    }

    /// The client has replayed everything.
    pub(in crate::server) fn replayed(&self) {
        self.end_replay(Event::Replayed, || {});
    }

    /// The server waits for the replay no longer: other clients may change what is in the replay
    /// log. Waits for the device.
    pub(in crate::server) fn give_up_replay(&self, fs: &dyn SessionStore) {
        // A change that is replayed meanwhile would bring the session's record back.
        self.end_replay(Event::GivenUp, || self.fence(fs));
    }

    fn end_replay(&self, event: Event, first: impl FnOnce()) {
        {
            let _none_under_way = self.replaying.write();
            first();
            self.transition(&mut self.state.lock(), event);
        }
        self.reservations.forget_former();
    }

    /// The client knows that what it has replayed is durable; `false`: it has not replayed all.
    pub(in crate::server) fn settle(&self) -> bool {
        let mut state = self.state.lock();
        let settles = !self.is_replaying();
        if settles {
            self.transition(&mut state, Event::Settled);
        }
        settles
    }

    /// A change could not be replayed.
    pub(in crate::server) fn replay_failed(&self) {
        self.transition(&mut self.state.lock(), Event::ReplayFailed);
    }

    /// Whether a change could not be replayed, and the replay goes on.
    pub(in crate::server) fn has_failed_replay(&self) -> bool {
        self.phase().replay() == Replay::Failed
    }
}
