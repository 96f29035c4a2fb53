//! What an administrator sees of a server and does with it.

use std::sync::Arc;

use super::core::Core;
use super::session::Session;

/// What an administrator sees of a server and does with it.
#[derive(Clone)]
pub struct Control(pub(super) Arc<Core>);

impl Control {
    /// The state of the sessions, oldest first.
    pub fn clients(&self) -> serde_json::Value {
        let mut all = self.0.all();
        all.sort_unstable_by_key(|session| session.number);
        let now = self.0.env.clock.monotonic();
        let one = |session: &Arc<Session>| {
            let mut json = session.json(now);
            json["locks"] = self.0.locks.held_by(session.id).into();
            let (leases, writes) = self.0.leases.held_by(session.number);
            json["leases"] = leases.into();
            json["write_leases"] = writes.into();
            json
        };
        all.iter().map(one).collect()
    }

    /// The number of sessions, with those of clients that are away.
    pub fn sessions(&self) -> usize {
        self.0.sessions.lock().len()
    }

    /// How many leases the sessions have, and how many of them are write leases.
    pub fn leases(&self) -> (usize, usize) {
        let held = self.0.all().into_iter().map(|session| self.0.leases.held_by(session.number));
        held.fold((0, 0), |(all, writes), (more, more_writes)| (all + more, writes + more_writes))
    }

    /// The second of Unix time up to which the server's certificate is good. `None`: it has none.
    pub fn certificate_until(&self) -> Option<u64> {
        *self.0.certificate_until.lock()
    }

    /// How many clients were refused since the server's start, by cause.
    pub fn refused(&self) -> serde_json::Value {
        self.0.refusals.json()
    }

    /// Ends the sessions of that name or number for good: what they hold is free, and their mounts
    /// fail. Returns how many.
    pub fn evict(&self, which: &str) -> usize {
        self.0.evict(which)
    }
}
