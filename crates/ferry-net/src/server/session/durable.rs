//! Which changes of a session are durable, and what the volume knows of the session.

use std::time::Duration;

use ferry_fs::{Errno, Ino, SessionStore};

use super::change::one_of;
use super::link::{removed_names, send};
use super::phase::CloseReason;
use super::state::{Registration, Session};
use crate::frame;
use crate::message::{DirName, ToClient};

/// So many changes of a session, or so many bytes, are synced at once.
const URGENT_CHANGES: u64 = 16_384;
const URGENT_BYTES: usize = 16 << 20;

impl Session {
    /// Records the session on the volume, so that the next server waits for it after a crash. Waits
    /// for the device, once. `is_early`: for an early-acknowledged change of the current epoch.
    pub(in crate::server) fn register(
        &self,
        fs: &dyn SessionStore,
        is_early: bool,
    ) -> Result<(), Errno> {
        let mut registration = self.registration.lock();
        match *registration {
            Registration::Absent => {}
            Registration::Fenced if is_early => {}
            Registration::Recorded | Registration::Fenced => return Ok(()),
        }
        if self.is_over() {
            return Err(Errno(libc::EIO));
        }
        fs.add_session(self.id)?;
        *registration = Registration::Recorded;
        Ok(())
    }

    /// Whether it is recorded: then each of its changes leaves its number on the volume, and
    /// becomes durable soon.
    pub(in crate::server) fn is_registered(&self) -> bool {
        *self.registration.lock() == Registration::Recorded
    }

    /// Other clients may change what this one has acknowledged early, so it must not replay that,
    /// whatever crashes (DURABLE-4). It is recorded again when it has heard of the fence and
    /// acknowledges anew. Waits for the device.
    pub(in crate::server) fn fence(&self, fs: &dyn SessionStore) {
        let mut registration = self.registration.lock();
        if std::mem::replace(&mut *registration, Registration::Fenced) == Registration::Recorded {
            fs.revoke_sessions(&[self.id]);
        }
    }

    /// The session has ended: no later server waits for it. Unless its client has nothing to
    /// replay, this waits for the device (DURABLE-4).
    pub(in crate::server) fn unregister(&self, fs: &dyn SessionStore, reason: CloseReason) {
        let mut registration = self.registration.lock();
        if std::mem::replace(&mut *registration, Registration::Absent) != Registration::Recorded {
            return;
        }
        match reason {
            CloseReason::Left | CloseReason::Stopped => fs.remove_session(self.id),
            CloseReason::Violation
            | CloseReason::Evicted
            | CloseReason::Away
            | CloseReason::HandedOver => fs.revoke_sessions(&[self.id]),
        }
    }

    /// A change was applied that the client has in its replay log. Returns whether a sync is
    /// urgent.
    pub(in crate::server) fn note_unstable(&self, seq: u64, bytes: usize, now: Duration) -> bool {
        let mut state = self.state.lock();
        state.newest_unstable = seq;
        state.unsynced.0 += 1;
        state.unsynced.1 += bytes;
        state.unsynced_since.get_or_insert(now);
        state.unsynced.0 >= URGENT_CHANGES || state.unsynced.1 >= URGENT_BYTES
    }

    /// A sync begins. Returns the newest change that it covers, without changes behind it that were
    /// refused. `None`: everything in the client's replay log is durable.
    pub(in crate::server) fn begin_sync(&self, now: Duration) -> Option<u64> {
        let mut state = self.state.lock();
        if state.newest_unstable <= state.durable {
            return None;
        }
        state.unsynced = (0, 0);
        state.unsynced_since = Some(now);
        Some(state.newest_unstable)
    }

    /// Another client is about to sync an inode. Returns the newest change that this covers, if
    /// this client may have changes of the inode in its replay log.
    pub(in crate::server) fn newest_unstable(&self, ino: Ino) -> Option<u64> {
        let state = self.state.lock();
        (state.newest_unstable > state.durable && self.knows(&state, ino))
            .then_some(state.newest_unstable)
    }

    /// Another client has synced it. The client is told, unless too many such messages wait. Soon
    /// everything is durable, and the client is told that in any case.
    pub(in crate::server) fn send_synced(&self, ino: Ino, seq: u64) {
        let Some(room) = one_of(&self.notices) else { return };
        let mut state = self.state.lock();
        if seq > state.durable {
            let synced = ToClient::Synced { ino: self.client_ino(ino), seq };
            send(&mut state, frame::encode(&synced), Some(room));
        }
    }

    /// Another client finds no space. This one is asked to return reservations that it does not
    /// need, and to forget files without a name. The message is left out if there is nothing of
    /// either, or if too many messages wait.
    pub(in crate::server) fn ask_for_space(&self) {
        let [granted, _] = self.reservations.figures();
        let mut state = self.state.lock();
        if granted == (0, 0) && state.removed_names.0.is_empty() {
            return;
        }
        let Some(room) = one_of(&self.notices) else { return };
        let names: Vec<DirName> = std::mem::take(&mut state.removed_names).0.into();
        let frames = [removed_names(&names), frame::encode(&ToClient::Lack {})].concat();
        send(&mut state, frames, Some(room));
    }

    /// Changes up to this one are durable, and the client is told.
    pub(in crate::server) fn became_durable(&self, seq: u64) {
        let mut state = self.state.lock();
        if seq <= state.durable {
            return;
        }
        state.durable = seq;
        if state.newest_unstable <= seq {
            state.unsynced_since = None;
        }
        send(&mut state, frame::encode(&ToClient::Durable { seq }), None);
    }

    /// Changes up to this one are durable.
    pub(in crate::server) fn durable(&self) -> u64 {
        self.state.lock().durable
    }
}
