//! Leases for walks: a client asks for them before its programs need them.
//!
//! * WALK-LEASE-1: a walk recalls nothing that its holder uses, which means: got, or changed under
//!   the lease, within [`Table::in_use_time`]. It leaves out what another session waits for.
//! * WALK-LEASE-2: a walk takes nothing away from a session whose term is over, and no other waiter
//!   stands behind a walk.
//! * WALK-LEASE-3: a write lease replaces a read lease under which everything was read, if no other
//!   session has asked for the inode since.

use std::time::Duration;

use ferry_fs::Ino;

use super::state::LeaseState;
use super::table::{Coarse, Hold, Progress, Recalls, SessionId, Table};

impl Table {
    /// Whether there is nothing left to wait for. In both cases some leases may not be available.
    pub(super) fn progress_walk(
        &mut self,
        session: SessionId,
        inos: &[Ino],
        writes: bool,
        now: Duration,
    ) -> Progress {
        let (mut recalls, mut waits) = (Recalls::default(), false);
        for ino in inos {
            if self.is_wanted(*ino) {
                continue;
            }
            let holds = self.inodes.get(ino).into_iter().flatten();
            let others = holds.filter(|hold| hold.session != session && (writes || hold.writes));
            let others: Vec<Hold> = others.copied().collect();
            if others.iter().any(|hold| !self.is_idle(hold, now)) {
                continue;
            }
            waits |= !others.is_empty();
            for hold in others.iter().filter(|hold| !hold.state.is_leaving()) {
                self.recall(hold.session, *ino, now);
                recalls.entry(hold.session).or_default().push(*ino);
            }
        }
        if waits { Progress::Waits(recalls, None) } else { Progress::Begun(Vec::new()) }
    }

    /// A recall would bring it back soon.
    fn is_idle(&self, hold: &Hold, now: Duration) -> bool {
        let silent = self.holders.get(&hold.session).is_none_or(|holder| holder.until <= now);
        let used = Coarse::of(now.saturating_sub(self.in_use_time)) < hold.used;
        !silent && (hold.state.is_leaving() || !used && hold.state == LeaseState::Held)
    }

    /// Turns leases into write leases where the session has the only lease. They are not recalled
    /// before [`Table::grant_sent`]. Returns them.
    pub(super) fn upgrade(&mut self, session: SessionId, inos: &[Ino], now: Duration) -> Vec<Ino> {
        let valid = self
            .holders
            .get(&session)
            .is_some_and(|holder| holder.until > now && !holder.is_fenced);
        let mut granted = Vec::new();
        for ino in inos.iter().filter(|_| valid && !self.closing).copied().collect::<Vec<_>>() {
            let alone = self.inodes.get(&ino).is_some_and(|holds| holds.len() == 1);
            let is_free = |hold: &Hold| !hold.writes && !hold.state.is_leaving();
            if !alone || self.is_wanted(ino) || !self.hold(session, ino).is_some_and(is_free) {
                continue;
            }
            self.enter_write(session, ino, now);
            granted.push(ino);
        }
        granted
    }
}
