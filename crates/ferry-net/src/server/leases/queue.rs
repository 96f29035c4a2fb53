//! Waiters for leases of other sessions: their order, and how far each has come (LEASE-2, LEASE-3,
//! and LEASE-5 to LEASE-8).

use std::time::Duration;

use ferry_fs::Ino;

use super::state::LeaseState;
use super::table::{
    Coarse, Hold, LEASES_MAX, LEASES_TOTAL_MAX, Progress, Recalls, SessionId, Table, WaiterId,
    Waiting, Wants,
};

/// What is in the way of a waiter.
#[derive(Default)]
struct InTheWay {
    recalls: Recalls,
    until: Option<Duration>,
    any: bool,
}

impl InTheWay {
    fn waits(self) -> Option<Progress> {
        self.any.then_some(Progress::Waits(self.recalls, self.until))
    }
}

impl Table {
    /// Adds a waiter to the queues of its inodes.
    pub(super) fn ask(&mut self, session: SessionId, wants: Wants, inos: Vec<Ino>) -> WaiterId {
        self.last_waiter += 1;
        for ino in &inos {
            self.queues.entry(*ino).or_default().push_back(self.last_waiter);
        }
        let waiting = Waiting { session, wants, inos, without: Vec::new(), begun: false };
        self.waiting.insert(self.last_waiter, waiting);
        self.last_waiter
    }

    /// The same for a waiter for leases. It waits for all of `inos`, and gets none on `without`.
    pub(super) fn ask_for_leases(
        &mut self,
        session: SessionId,
        inos: Vec<Ino>,
        without: Vec<Ino>,
    ) -> WaiterId {
        let waiter = self.ask(session, Wants::Lease, inos);
        if let Some(waiting) = self.waiting.get_mut(&waiter) {
            waiting.without = without;
        }
        waiter
    }

    /// Removes a waiter: it is done, or does not wait any more.
    pub(super) fn leave(&mut self, waiter: WaiterId) {
        let Some(waiting) = self.waiting.remove(&waiter) else { return };
        for ino in waiting.inos {
            if let Some(queue) = self.queues.get_mut(&ino) {
                queue.retain(|other| *other != waiter);
                if queue.is_empty() {
                    self.queues.remove(&ino);
                }
            }
            self.wake(ino);
        }
    }

    /// Begins a change without a queue, if its session has the write leases of all that it touches.
    /// Those in the queues wait for it.
    pub(super) fn begin_own(
        &mut self,
        session: SessionId,
        epoch: Option<u32>,
        inos: &[Ino],
        now: Duration,
    ) -> Option<Progress> {
        if !self.is_in(session, epoch) {
            return Some(Progress::Dropped);
        }
        debug_assert!(!self.holders[&session].applying, "one at a time");
        if !inos.iter().all(|ino| self.writes(session, *ino)) {
            return None;
        }
        self.uses(session, inos, now);
        self.set_applying(session, true);
        Some(Progress::Begun(Vec::new()))
    }

    /// Whether a change of this epoch counts.
    fn is_in(&self, session: SessionId, epoch: Option<u32>) -> bool {
        self.holders
            .get(&session)
            .is_some_and(|holder| epoch.is_none_or(|epoch| holder.epoch == epoch))
    }

    /// A session is about to change these.
    fn uses(&mut self, session: SessionId, inos: &[Ino], now: Duration) {
        for ino in inos {
            if let Some(hold) = self.hold_mut(session, *ino) {
                hold.used = Coarse::of(now);
            }
        }
    }

    fn set_applying(&mut self, session: SessionId, applying: bool) {
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.applying = applying;
            if !applying {
                self.woken.append(&mut holder.waiters);
            }
        }
    }

    /// A change is done; `applied`: and with it all changes of its session up to this one.
    pub(super) fn end_change(&mut self, session: SessionId, applied: Option<u64>) {
        self.set_applying(session, false);
        let Some(applied) = applied else { return };
        while let Some(holder) = self.holders.get_mut(&session)
            && holder.returning.front().is_some_and(|(after, _)| *after <= applied)
            && let Some((_, inos)) = holder.returning.pop_front()
        {
            for ino in inos {
                let state = self.hold(session, ino).map(|hold| hold.state);
                if state == Some(LeaseState::Returning) {
                    self.remove(session, ino);
                }
            }
        }
    }

    /// Lets a waiter go on, if it can.
    pub(super) fn progress(&mut self, waiter: WaiterId, now: Duration) -> Progress {
        let Some(Waiting { session, wants, mut inos, without, .. }) =
            self.waiting.get(&waiter).cloned()
        else {
            return Progress::Dropped;
        };
        let progress = match wants {
            Wants::Change { epoch, is_early } => {
                self.progress_change(waiter, (epoch, is_early), now)
            }
            Wants::Read => self.in_the_way(waiter, |_, hold| hold.writes, now).waits(),
            Wants::Lease if inos.iter().any(|ino| self.is_behind(waiter, *ino)) => {
                Some(Progress::Waits(Recalls::default(), None))
            }
            Wants::Lease => self.in_the_way(waiter, |_, _| true, now).waits(),
            Wants::Walk { writes } => return self.progress_walk(session, &inos, writes, now),
        };
        if let Some(not_yet) = progress {
            return not_yet;
        }
        if wants == Wants::Lease {
            inos.retain(|ino| !without.contains(ino));
            let granted = self.take(session, inos, now);
            self.leave(waiter);
            return Progress::Begun(granted);
        }
        if let Some(waiting) = self.waiting.get_mut(&waiter) {
            waiting.begun = true;
        }
        if wants != Wants::Read {
            self.uses(session, &inos, now);
            self.set_applying(session, true);
        }
        Progress::Begun(Vec::new())
    }

    /// A change waits for earlier changes and for readers to return their leases, for nothing else.
    fn progress_change(
        &mut self,
        waiter: WaiterId,
        (epoch, is_early): (Option<u32>, bool),
        now: Duration,
    ) -> Option<Progress> {
        let Waiting { session, inos, .. } = self.waiting.get(&waiter)?;
        let session = *session;
        if !self.is_in(session, epoch) {
            return Some(Progress::Dropped);
        }
        let others: Vec<Ino> =
            inos.iter().copied().filter(|ino| !self.writes(session, *ino)).collect();
        if is_early && !others.is_empty() {
            return Some(Progress::Broken);
        }
        let mut waits = false;
        for ino in &others {
            if self.writer(*ino).is_some() {
                return Some(Progress::Busy);
            }
            for earlier in self.earlier(waiter, *ino) {
                match earlier.wants {
                    Wants::Lease if earlier.session != session => return Some(Progress::Busy),
                    Wants::Change { .. } => waits = true,
                    Wants::Lease | Wants::Read | Wants::Walk { .. } => {}
                }
            }
        }
        if waits {
            return Some(Progress::Waits(Recalls::default(), None));
        }
        self.in_the_way(waiter, |ino, _| others.contains(&ino), now).waits()
    }

    fn earlier(&self, waiter: WaiterId, ino: Ino) -> impl Iterator<Item = &Waiting> {
        let queue = self.queues.get(&ino).into_iter().flatten();
        queue.take_while(move |other| **other < waiter).filter_map(|other| self.waiting.get(other))
    }

    fn is_behind(&self, waiter: WaiterId, ino: Ino) -> bool {
        self.earlier(waiter, ino).any(|earlier| !matches!(earlier.wants, Wants::Walk { .. }))
    }

    /// The leases of other sessions on what the waiter wants, as far as `matters` selects them:
    /// they are recalled, or taken away if their term is over. Of the session's own write leases,
    /// those that are recalled or returned are in the way of a new one.
    fn in_the_way(
        &mut self,
        waiter: WaiterId,
        matters: impl Fn(Ino, &Hold) -> bool,
        now: Duration,
    ) -> InTheWay {
        let mut found = InTheWay::default();
        let Some(Waiting { session, wants, inos, .. }) = self.waiting.get(&waiter).cloned() else {
            return found;
        };
        for ino in inos {
            let holds = self.inodes.get(&ino).cloned().unwrap_or_default();
            for hold in holds.into_iter().filter(|hold| matters(ino, hold)) {
                if hold.session == session {
                    let is_fenced = self.is_fenced(session);
                    found.any |= wants == Wants::Lease
                        && hold.writes
                        && (hold.state.is_leaving() || is_fenced);
                    continue;
                }
                let until =
                    self.holders.get(&hold.session).map_or(Duration::ZERO, |holder| holder.until);
                if until <= now {
                    self.count_silence(hold.session, now);
                }
                if (until <= now || self.is_fenced(hold.session)) && self.take_away(hold, waiter) {
                    continue;
                }
                found.any = true;
                if self.is_fenced(hold.session) {
                    continue;
                }
                // If a term ends while a change of the holder is being applied, the end of that
                // change wakes the waiter.
                found.until = [found.until, Some(until).filter(|until| *until > now)]
                    .into_iter()
                    .flatten()
                    .min();
                if hold.state.may_be_recalled() {
                    self.recall(hold.session, ino, now);
                    found.recalls.entry(hold.session).or_default().push(ino);
                }
            }
        }
        found
    }

    /// Takes away a lease whose term is over. Returns whether it is removed. For a write lease this
    /// fences the session, but not while a change of it is being applied; the lease is removed when
    /// the volume has recorded the fence.
    fn take_away(&mut self, hold: Hold, waits: WaiterId) -> bool {
        if !hold.writes {
            self.remove_all(hold.session, true);
            return true;
        }
        let Some(holder) = self.holders.get_mut(&hold.session) else { return false };
        holder.waiters.push(waits);
        if !holder.applying && !std::mem::replace(&mut holder.is_fenced, true) {
            holder.epoch += 1;
            holder.fenced_before = holder.epoch;
            holder.returning.clear();
            self.to_fence.push(hold.session);
        }
        false
    }

    /// The volume has recorded a fence: what the session had is free.
    pub(super) fn fenced(&mut self, session: SessionId) {
        self.remove_all(session, false);
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.is_fenced = false;
            self.woken.append(&mut holder.waiters);
        }
    }

    /// Enters the write leases that a waiter has waited for, as far as there is room. They are not
    /// recalled before [`Table::grant_sent`].
    fn take(&mut self, session: SessionId, inos: Vec<Ino>, now: Duration) -> Vec<Ino> {
        let mut granted = Vec::new();
        for ino in inos {
            let Some(holder) = self.holders.get(&session).filter(|holder| holder.until > now)
            else {
                break;
            };
            if self.closing || holder.is_fenced || self.is_barred(session, now) {
                break;
            }
            let full = self.leases >= LEASES_TOTAL_MAX || holder.inos.len() >= LEASES_MAX;
            if full && self.hold(session, ino).is_none() {
                break;
            }
            self.enter_write(session, ino, now);
            granted.push(ino);
        }
        granted
    }

    /// From now on no session gets a lease. Returns what to recall: each lease on which a session
    /// relies and that is not recalled yet.
    pub(super) fn close(&mut self, now: Duration) -> Recalls {
        self.closing = true;
        let mut recalls = Recalls::default();
        for (ino, holds) in &self.inodes {
            for hold in holds.iter().filter(|hold| hold.state.may_be_recalled()) {
                if self.holders.get(&hold.session).is_some_and(|holder| holder.until > now) {
                    recalls.entry(hold.session).or_default().push(*ino);
                }
            }
        }
        for (session, inos) in &recalls {
            inos.iter().for_each(|ino| self.recall(*session, *ino, now));
        }
        recalls
    }
}
