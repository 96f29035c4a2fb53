//! How a session ends, and what becomes of what it held.

use crate::rt::collections::HashSet;
use std::sync::Arc;

use ferry_env::planted::{Bug, is_planted};
use ferry_fs::SessionSeq;

use super::core::{Core, EVICTED};
use super::session::{CloseReason, Session};
use crate::message::ToClient;

/// The number of evicted sessions that are remembered.
const EVICTED_MAX: usize = 4096;

impl Core {
    /// Ends a session.
    pub(super) fn end(&self, session: &Session, reason: CloseReason) {
        session.close(reason, &self.locks);
        self.release(session, reason);
    }

    /// A session has ended: what it holds is free.
    pub(super) fn release(&self, session: &Session, reason: CloseReason) {
        // In all other cases the client may rely on its leases until their term is over.
        if reason == CloseReason::Left {
            self.leases.end(session.number);
        }
        // The next server waits for what the client may have acknowledged.
        if reason == CloseReason::HandedOver {
            return self.remove(session);
        }
        // While the session is recorded, a sync records its durable watermark.
        session.unregister(&*self.fs, reason);
        self.free_locks(session);
        self.remove(session);
        self.barrier.release(session.id);
    }

    /// A session has ended: its locks are free, or will be when the change is done that is being
    /// applied.
    pub(super) fn free_locks(&self, session: &Session) {
        let keeps_locks = self.locks.is_closed() || is_planted(Bug::RetainedLocks);
        if !session.is_applying() && !keeps_locks {
            session.unrecord_lock_holder(&*self.fs);
            self.locks.end(session.id);
        }
    }

    pub(super) fn remove(&self, session: &Session) {
        self.sessions.lock().remove(&session.id);
        session.clear(&*self.fs);
    }

    /// Ends for good the sessions with this name or number, or with a certificate of this name.
    /// Returns how many.
    pub(super) fn evict(&self, which: &str) -> usize {
        let mut all = self.all();
        all.retain(|session| {
            let certificate = session.peer.name.as_deref();
            session.name == which
                || certificate == Some(which)
                || session.number.to_string() == which
        });
        self.shut_out(&all, EVICTED);
        all.len()
    }

    /// Ends the sessions whose certificate was revoked.
    pub(super) fn end_revoked(&self) {
        let all = self.all();
        let revoked = self.revocations.revoked(all.iter().map(|session| &session.peer));
        if revoked.is_empty() {
            return;
        }
        let is_revoked = |session: &Arc<Session>| revoked.contains(&session.peer.serial);
        let ended: Vec<Arc<Session>> = all.into_iter().filter(is_revoked).collect();
        for session in &ended {
            tracing::warn!(
                client = session.name,
                certificate = session.peer.name,
                "its certificate was revoked"
            );
        }
        self.shut_out(&ended, "the client's certificate was revoked");
    }

    /// Ends these sessions for good. The volume records it before others get what they held: none
    /// of them replays anything at the next server, whatever happens to this one.
    pub(super) fn shut_out(&self, all: &[Arc<Session>], why: &str) {
        if all.is_empty() {
            return;
        }
        let noted = {
            let mut evicted = self.evicted.lock();
            let newest = evicted.back().map_or(0, |mark| mark.seq);
            let numbered = (newest + 1..)
                .zip(all)
                .map(|(seq, session)| SessionSeq { session: session.id, seq });
            let numbered: Vec<SessionSeq> = numbered.collect();
            evicted.extend(&numbered);
            let surplus = evicted.len().saturating_sub(EVICTED_MAX);
            let forgotten: Vec<u128> = evicted.drain(..surplus).map(|mark| mark.session).collect();
            // Under the lock, so that the volume and `evicted` agree.
            self.fs.evict(&numbered, &forgotten)
        };
        if let Err(error) = noted {
            tracing::error!(%error, "an eviction could not be noted on the volume: when the server starts anew the client may come back");
        }
        for session in all {
            session.send_last(&ToClient::Evicted { reason: why.into() });
            self.end(session, CloseReason::Evicted);
            tracing::warn!(client = session.name, number = session.number, "evicted");
        }
    }

    /// Other clients may change what is in the session's replay log, and its client may not know
    /// that this is durable: it must not replay it. Waits for the device.
    pub(super) fn fence(&self, session: &Session) {
        session.fence(&*self.fs);
        self.leases.end_fenced_epoch(session.number);
    }

    pub(super) fn expire(&self) {
        let alive: HashSet<u64> =
            self.sessions.lock().values().map(|session| session.number).collect();
        self.leases.expire(&alive);
        let Some(deadline) = self.env.clock.monotonic().checked_sub(self.session_life) else {
            return;
        };
        for session in self.all() {
            let remember = |former| self.formers.lock().add(&session, former);
            if session.close_if_away(deadline, &self.locks, remember) {
                self.release(&session, CloseReason::Away);
                tracing::warn!(
                    client = session.name,
                    "has been away for too long: its session has ended"
                );
            }
        }
    }
}
