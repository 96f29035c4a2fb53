//! The table of leases as data: which session has which lease, and which waits for which. Nothing
//! here waits, sends, or reads a clock.

use crate::rt::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use ferry_fs::Ino;

use super::state::{LeaseEvent, LeaseState};

/// The number of a session.
pub(in crate::server) type SessionId = u64;
/// A client across its sessions: a hash of its certificate or, without one, of its address.
pub(in crate::server) type ClientId = u64;
/// The number of a waiter: a smaller one came first.
pub(in crate::server) type WaiterId = u64;

/// Leases that one session gets when it asks.
pub(super) const LEASES_MAX: usize = 1 << 18;
/// With the inodes that it makes itself, a session may have so many.
const NEW_LEASES_MAX: usize = 2 * LEASES_MAX;
/// A session that sends changes may owe the answer to a recall for so many terms.
const OWING_TERMS: u32 = 2;
/// Leases of all sessions. Beyond it, sessions get only those of inodes that they make.
pub(super) const LEASES_TOTAL_MAX: usize = 1 << 22;
/// So many terms may end in silence without consequence: a connection may just have been lost.
const IGNORED_FREE: u32 = 1;
/// The longest time without leases is 2 to this many terms.
const BARRED_DOUBLINGS_MAX: u32 = 6;
/// After so many terms the silence is forgotten.
const FORGIVEN_TERMS: u32 = 2 << BARRED_DOUBLINGS_MAX;

/// A time of the clock in sixteenths of a second. Each lease has one, and there may be millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Coarse(u32);

impl Coarse {
    /// The last one before `time`, or at it.
    pub(super) fn of(time: Duration) -> Self {
        Self((time.as_millis() * 16 / 1000) as u32)
    }
}

/// A session's lease on an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    pub(super) session: SessionId,
    /// It is the write lease, and the only lease on this inode.
    pub(super) writes: bool,
    pub(super) state: LeaseState,
    /// When the session got it, or changed the inode under it, last.
    pub(super) used: Coarse,
}

/// What the table knows of a session.
#[derive(Clone, Debug, Default)]
pub(super) struct Holder {
    /// The end of the term: until then the session relies on its leases.
    pub(super) until: Duration,
    pub(super) inos: HashSet<Ino>,
    /// The number of its write leases.
    pub(super) writes: usize,
    /// Its leases that are recalled and not returned, with the time of each recall.
    pub(super) recalled: HashMap<Ino, Duration>,
    /// These recalls, the oldest first. Behind the oldest that is open there may be any number of
    /// others that were answered; they go when it is answered, or when its session is fenced.
    pub(super) recalls: VecDeque<(Duration, Ino)>,
    /// Recalls of earlier connections that nothing has answered, with the time of the first. They
    /// count as long as somebody waits for the inode: who waits recalls it again.
    owed: HashMap<Ino, Duration>,
    /// Write leases that end when the change with this number has been applied, in this order.
    pub(super) returning: VecDeque<(u64, Vec<Ino>)>,
    /// The current epoch. Early-acknowledged changes of older ones are dropped.
    pub(super) epoch: u32,
    /// The epoch that began with the last fence.
    pub(super) fenced_before: u32,
    /// A change of the session is being applied: its write leases stay until that is done.
    pub(super) applying: bool,
    /// *Fenced*: its term was over and another session wants what it has. Until [`Table::fenced`]
    /// nobody may use its leases, neither itself nor others. A change under a new epoch may be
    /// applied meanwhile, so this is independent of `applying`.
    pub(super) is_fenced: bool,
    /// Those that wait for the end of that change, or of a fence.
    pub(super) waiters: Vec<WaiterId>,
    /// The client of the session.
    client: ClientId,
    /// The end of the last term that has passed while the session owed an answer to a recall.
    ignored: Duration,
}

/// How a client has ignored recalls, in all of its sessions.
#[derive(Clone, Debug, Default)]
struct Silence {
    /// The number of terms in a row that have passed while it owed an answer.
    times: u32,
    /// The session in which that happened last.
    session: SessionId,
    /// When that happened last.
    at: Duration,
    /// The client gets no lease before this time.
    barred_until: Duration,
}

impl Holder {
    /// The number of inodes that the session has returned and that wait for changes.
    fn returning(&self) -> usize {
        self.returning.iter().map(|(_, inos)| inos.len()).sum()
    }
}

/// What a waiter wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::server) enum Wants {
    /// To apply a change of an ordered stream; without an epoch, it counts in each one.
    Change { epoch: Option<u32>, is_early: bool },
    /// To answer a request, which must see everything that the holder has acknowledged.
    Read,
    /// To get write leases.
    Lease,
    /// To answer a walk, write leases or not. No other waiter stands behind a walk, and it waits
    /// for no holder that uses its lease.
    Walk { writes: bool },
}

/// A waiter, or one whose turn has come and that is not done.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) session: SessionId,
    pub(super) wants: Wants,
    pub(super) inos: Vec<Ino>,
    /// A waiter for leases waits for these as for the others, and gets no lease on them.
    pub(super) without: Vec<Ino>,
    /// Its turn has come.
    pub(super) begun: bool,
}

/// What to recall from which session.
pub(in crate::server) type Recalls = HashMap<SessionId, Vec<Ino>>;

/// How far a waiter has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) enum Progress {
    /// Its turn has come. A waiter for leases has got these.
    Begun(Vec<Ino>),
    /// It waits: the caller sends these recalls and looks again at that time, when a term ends.
    Waits(Recalls, Option<Duration>),
    /// Another session has a write lease on what the change touches, or waits for one in front of
    /// it.
    Busy,
    /// The change belongs to an epoch that has ended.
    Dropped,
    /// An early-acknowledged change without write leases.
    Broken,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    pub(super) inodes: HashMap<Ino, Vec<Hold>>,
    pub(super) holders: HashMap<SessionId, Holder>,
    /// Clients that have ignored recalls.
    silences: HashMap<ClientId, Silence>,
    pub(super) leases: usize,
    /// The waiters for an inode, oldest first.
    pub(super) queues: HashMap<Ino, VecDeque<WaiterId>>,
    pub(super) waiting: HashMap<WaiterId, Waiting>,
    pub(super) last_waiter: WaiterId,
    /// The server is about to stop: no session gets a lease any more.
    pub(super) closing: bool,
    /// Waiters that may have come further. The caller wakes them.
    pub(super) woken: Vec<WaiterId>,
    /// Sessions to fence. The caller records the fence, and then calls [`Table::fenced`].
    pub(super) to_fence: Vec<SessionId>,
    /// How long a lease lasts after the last sign of life.
    pub(super) term: Duration,
    /// An inode is in use so long after its holder was given it, or has changed it.
    pub(super) in_use_time: Duration,
}

/// Whether another session waits for an inode, or is about to change it.
fn is_wanted(
    queues: &HashMap<Ino, VecDeque<WaiterId>>,
    waiting: &HashMap<WaiterId, Waiting>,
    ino: Ino,
) -> bool {
    let waiters = queues.get(&ino).into_iter().flatten().filter_map(|waiter| waiting.get(waiter));
    waiters.into_iter().any(|waiter| !matches!(waiter.wants, Wants::Walk { .. }))
}

impl Table {
    /// Whether another session waits for an inode, or is about to change it. Walks do not count.
    pub(super) fn is_wanted(&self, ino: Ino) -> bool {
        is_wanted(&self.queues, &self.waiting, ino)
    }

    pub(super) fn wake(&mut self, ino: Ino) {
        if let Some(queue) = self.queues.get(&ino) {
            self.woken.extend(queue);
        }
    }

    pub(super) fn hold(&self, session: SessionId, ino: Ino) -> Option<&Hold> {
        self.inodes.get(&ino)?.iter().find(|hold| hold.session == session)
    }

    pub(super) fn hold_mut(&mut self, session: SessionId, ino: Ino) -> Option<&mut Hold> {
        self.inodes.get_mut(&ino)?.iter_mut().find(|hold| hold.session == session)
    }

    pub(super) fn writer(&self, ino: Ino) -> Option<SessionId> {
        self.inodes.get(&ino)?.iter().find(|hold| hold.writes).map(|hold| hold.session)
    }

    pub(super) fn writes(&self, session: SessionId, ino: Ino) -> bool {
        !self.is_fenced(session) && self.hold(session, ino).is_some_and(|hold| hold.writes)
    }

    pub(super) fn is_fenced(&self, session: SessionId) -> bool {
        self.holders.get(&session).is_some_and(|holder| holder.is_fenced)
    }

    /// A session's term is over. If it owed an answer to a recall, others have waited for that in
    /// vain.
    pub(super) fn count_silence(&mut self, session: SessionId, now: Duration) {
        let term = self.term;
        let owes = self.oldest_recall(session).is_some();
        let Some(holder) = self.holders.get_mut(&session) else { return };
        if !owes || holder.ignored == holder.until {
            return;
        }
        holder.ignored = holder.until;
        let silence = self.silences.entry(holder.client).or_default();
        if let Some(doublings) = silence.times.checked_sub(IGNORED_FREE) {
            silence.barred_until = now + term * (1 << doublings.min(BARRED_DOUBLINGS_MAX));
        }
        (silence.times, silence.session, silence.at) =
            (silence.times.saturating_add(1), session, now);
    }

    /// Whether no client has ignored recalls, or all of that is forgotten.
    #[cfg(test)]
    pub(super) fn forgives_all(&self) -> bool {
        self.silences.is_empty()
    }

    /// Whether a session gets no lease at this time.
    pub(super) fn is_barred(&self, session: SessionId, now: Duration) -> bool {
        let silence =
            self.holders.get(&session).and_then(|holder| self.silences.get(&holder.client));
        silence.is_some_and(|silence| silence.barred_until > now)
    }

    /// The only function in which a lease that stays changes its state. It removes a recall that
    /// was answered.
    fn transition(&mut self, session: SessionId, ino: Ino, event: LeaseEvent) {
        let Some(hold) = self.hold_mut(session, ino) else { return };
        let before = hold.state;
        let after = before.after(event);
        let after = after.unwrap_or_else(|| panic!("{event:?} of a lease that is {before:?}"));
        hold.state = after;
        let Some(holder) = self.holders.get_mut(&session) else { return };
        let recalled = if before == LeaseState::Recalled && after != LeaseState::Recalled {
            holder.recalled.remove(&ino)
        } else {
            None
        };
        match event {
            LeaseEvent::Reconnected => holder.owed.extend(recalled.map(|at| (ino, at))),
            LeaseEvent::Granted | LeaseEvent::Returned => drop(holder.owed.remove(&ino)),
            LeaseEvent::GrantSent | LeaseEvent::Recalled => {}
        }
    }

    /// An answer is to grant the write lease: the session has it from now on.
    pub(super) fn enter_write(&mut self, session: SessionId, ino: Ino, now: Duration) {
        self.enter(session, ino, true, now);
        self.transition(session, ino, LeaseEvent::Granted);
    }

    /// Enters a lease, or turns one that is there into a write lease.
    pub(super) fn enter(&mut self, session: SessionId, ino: Ino, writes: bool, now: Duration) {
        let used = Coarse::of(now);
        let Some(holder) = self.holders.get_mut(&session) else { return };
        let holds = self.inodes.entry(ino).or_default();
        if let Some(hold) = holds.iter_mut().find(|hold| hold.session == session) {
            holder.writes += usize::from(writes && !hold.writes);
            (hold.writes, hold.used) = (hold.writes || writes, used);
            return;
        }
        holds.reserve_exact(1);
        holds.push(Hold { session, writes, state: LeaseState::Held, used });
        holder.inos.insert(ino);
        holder.writes += usize::from(writes);
        self.leases += 1;
    }

    /// Removes a lease.
    pub(super) fn remove(&mut self, session: SessionId, ino: Ino) {
        let Some(holds) = self.inodes.get_mut(&ino) else { return };
        let Some(at) = holds.iter().position(|hold| hold.session == session) else { return };
        let hold = holds.swap_remove(at);
        if holds.is_empty() {
            self.inodes.remove(&ino);
        }
        self.leases -= 1;
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.inos.remove(&ino);
            holder.writes -= usize::from(hold.writes);
            holder.recalled.remove(&ino);
            holder.owed.remove(&ino);
        }
        self.wake(ino);
    }

    /// Removes all leases of a session, or all of its read leases.
    pub(super) fn remove_all(&mut self, session: SessionId, reads_only: bool) {
        let Some(holder) = self.holders.get(&session) else { return };
        if holder.inos.is_empty() || reads_only && holder.writes == holder.inos.len() {
            return;
        }
        let inos: Vec<Ino> = holder.inos.iter().copied().collect();
        for ino in inos {
            if !reads_only || !self.hold(session, ino).is_some_and(|hold| hold.writes) {
                self.remove(session, ino);
            }
        }
    }

    /// A session has a new connection, which knows of no leases: its read leases end. Its write
    /// leases stay until another session wants them. Its term begins anew, unless it has owed the
    /// answer to one recall for too long, over whatever connections. Then it gets no lease before
    /// it has answered. Returns the current epoch.
    pub(super) fn begin(&mut self, session: SessionId, client: ClientId, now: Duration) -> u32 {
        self.remove_all(session, true);
        let term = self.term;
        let holder = self.holders.entry(session).or_default();
        holder.client = client;
        let (epoch, inos) = (holder.epoch, holder.inos.iter().copied().collect::<Vec<_>>());
        for ino in inos {
            self.transition(session, ino, LeaseEvent::Reconnected);
            self.wake(ino);
        }
        let is_overdue = self.owes_for_too_long(session, now);
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.until = if is_overdue { now } else { now + term };
        }
        epoch
    }

    /// A sign of life. Returns whether it renews the term (LEASE-4).
    pub(super) fn renew(&mut self, session: SessionId, now: Duration) -> bool {
        let oldest = self.oldest_recall(session);
        let from = oldest.unwrap_or(now);
        let Some(holder) = self.holders.get_mut(&session) else { return false };
        // The server counts an eighth more than the client, which is a ninth of its own term.
        if now.saturating_sub(from) > self.term / 9 {
            return false;
        }
        holder.until = holder.until.max(from + self.term);
        true
    }

    /// When the oldest recall was sent that the session has not answered.
    fn oldest_recall(&mut self, session: SessionId) -> Option<Duration> {
        let Self { holders, queues, waiting, .. } = self;
        let holder = holders.get_mut(&session)?;
        holder.owed.retain(|ino, _| is_wanted(queues, waiting, *ino));
        while let Some((at, ino)) = holder.recalls.front() {
            if holder.recalled.get(ino) == Some(at) {
                break;
            }
            holder.recalls.pop_front();
        }
        let newer = holder.recalls.front().map(|(at, _)| *at);
        holder.owed.values().copied().chain(newer).min()
    }

    /// Whether the session owes the answer to one recall for so long that nothing but this answer
    /// renews its term.
    fn owes_for_too_long(&mut self, session: SessionId, now: Duration) -> bool {
        let oldest = self.oldest_recall(session);
        oldest.is_some_and(|oldest| now.saturating_sub(oldest) >= OWING_TERMS * self.term)
    }

    /// A session sends changes: its term is renewed for those that wait for it, unless it owes the
    /// answer to one recall for too long. The session does not hear of that, and relies on its
    /// pings alone.
    pub(super) fn makes_progress(&mut self, session: SessionId, now: Duration) {
        if self.owes_for_too_long(session, now) {
            return;
        }
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.until = holder.until.max(now + self.term);
        }
    }

    /// Grants a read lease, if this returns true. The caller reads the inode after this.
    pub(super) fn grant(&mut self, session: SessionId, ino: Ino, now: Duration) -> bool {
        let blocks = |waiter: &WaiterId| {
            self.waiting.get(waiter).is_some_and(|waiting| match waiting.wants {
                Wants::Read | Wants::Walk { .. } => false,
                Wants::Lease => true,
                // A waiter in the queue would have to recall the lease at once.
                Wants::Change { .. } => waiting.session != session || !waiting.begun,
            })
        };
        if self.queues.get(&ino).is_some_and(|queue| queue.iter().any(blocks)) {
            return false;
        }
        if self.writer(ino).is_some_and(|writer| writer != session) {
            return false;
        }
        let valid = |holder: &&Holder| holder.until > now && !holder.is_fenced;
        let Some(holder) = self.holders.get(&session).filter(valid) else { return false };
        let (is_full, is_barred) = (holder.inos.len() >= LEASES_MAX, self.is_barred(session, now));
        if let Some(hold) = self.hold_mut(session, ino) {
            hold.used = Coarse::of(now);
            return !hold.state.is_leaving();
        }
        if self.closing || self.leases >= LEASES_TOTAL_MAX || is_full || is_barred {
            return false;
        }
        self.enter(session, ino, false, now);
        true
    }

    /// Grants the write lease of an inode that the session is about to make; `false`: the session
    /// has too many leases, or another one knows the inode.
    pub(super) fn grant_new(&mut self, session: SessionId, ino: Ino, now: Duration) -> bool {
        let has_room = |holder: &Holder| holder.inos.len() < NEW_LEASES_MAX && !holder.is_fenced;
        let room = self.holders.get(&session).is_some_and(has_room);
        let free = room && !self.inodes.contains_key(&ino);
        if free {
            self.enter(session, ino, true, now);
            let holder = self.holders.get(&session);
            let returned =
                holder.is_some_and(|h| h.returning.iter().any(|(_, inos)| inos.contains(&ino)));
            if returned {
                self.transition(session, ino, LeaseEvent::Returned);
            }
        }
        free
    }

    /// The inode was not made.
    pub(super) fn revoke_new(&mut self, session: SessionId, ino: Ino) {
        self.remove(session, ino);
    }

    /// A session has returned these leases. A write lease ends when the change `after` has been
    /// applied (`None`: at once). So does one that an earlier change brings with the inode that it
    /// makes.
    pub(super) fn give_back(
        &mut self,
        session: SessionId,
        inos: &[Ino],
        after: Option<u64>,
        now: Duration,
    ) {
        if self.is_fenced(session) {
            // The lease goes with all the others when the fence is recorded, and not before.
            return;
        }
        let (mut later, mut has_answered, mut returning) =
            (Vec::new(), false, self.holders.get(&session).map_or(0, Holder::returning));
        for ino in inos {
            let state = self.hold(session, *ino).map(|hold| hold.state);
            let answers = state == Some(LeaseState::Recalled);
            has_answered |= answers;
            if let Some(holder) = self.holders.get(&session).filter(|_| answers)
                && let Some(silence) = self.silences.get_mut(&holder.client)
                && silence.session == session
            {
                // The answer of another session says nothing of this one.
                silence.times = 0;
            }
            let Some(hold) = self.hold(session, *ino) else {
                if after.is_some() && returning < LEASES_MAX {
                    later.push(*ino);
                    returning += 1;
                }
                continue;
            };
            if after.is_none() || !hold.writes {
                self.remove(session, *ino);
            } else if hold.state != LeaseState::Returning {
                self.transition(session, *ino, LeaseEvent::Returned);
                later.push(*ino);
            }
        }
        if let (Some(after), Some(holder), false) =
            (after, self.holders.get_mut(&session), later.is_empty())
        {
            // There are as many entries as changes, whatever a client sends: the loop over them is
            // bounded.
            match holder.returning.back_mut() {
                Some((last, inos)) if *last >= after => inos.extend(later),
                _ => holder.returning.push_back((after, later)),
            }
        }
        if has_answered {
            self.has_answered(session, now);
        }
    }

    /// A session has answered a recall: its term counts from the oldest of those that are left. A
    /// client on a slow line may always owe some answer, so that no ping renews anything. If
    /// changes are still to come, only these renew it.
    fn has_answered(&mut self, session: SessionId, now: Duration) {
        let (oldest, term) = (self.oldest_recall(session), self.term);
        if let (Some(oldest), Some(holder)) = (oldest, self.holders.get_mut(&session))
            && holder.until > now
            && holder.returning.is_empty()
        {
            holder.until = holder.until.max(oldest + term);
        }
    }

    /// A session has ended and relies on no lease.
    pub(super) fn end(&mut self, session: SessionId) {
        self.remove_all(session, false);
        if let Some(holder) = self.holders.remove(&session) {
            self.woken.extend(holder.waiters);
        }
    }

    /// Removes read leases whose term is over, and sessions that are over and not `alive`.
    pub(super) fn expire(&mut self, alive: &HashSet<SessionId>, now: Duration) {
        let forgiven = self.term * FORGIVEN_TERMS;
        self.silences.retain(|_, silence| now.saturating_sub(silence.at) < forgiven);
        let expired =
            self.holders.iter().filter(|(_, holder)| holder.until <= now && !holder.applying);
        let expired: Vec<SessionId> = expired.map(|(session, _)| *session).collect();
        for session in expired {
            self.count_silence(session, now);
            if alive.contains(&session) {
                self.remove_all(session, true);
            } else {
                self.end(session);
            }
        }
    }

    pub(super) fn epoch(&self, session: SessionId) -> u32 {
        self.holders.get(&session).map_or(0, |holder| holder.epoch)
    }

    /// How many leases a session has, and how many of them are write leases.
    pub(super) fn held_by(&self, session: SessionId) -> (usize, usize) {
        self.holders.get(&session).map_or((0, 0), |holder| (holder.inos.len(), holder.writes))
    }

    /// The epoch that began with the session's last fence.
    pub(super) fn fenced_before(&self, session: SessionId) -> u32 {
        self.holders.get(&session).map_or(0, |holder| holder.fenced_before)
    }

    /// Ends the epoch as a fence does: early-acknowledged changes of the session that have not
    /// arrived are dropped.
    pub(super) fn end_fenced_epoch(&mut self, session: SessionId) {
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.epoch += 1;
            holder.fenced_before = holder.epoch;
        }
    }

    /// Ends this epoch, if it is still the current one: early-acknowledged changes in it are
    /// dropped.
    pub(super) fn end_epoch(&mut self, session: SessionId, epoch: u32) {
        if let Some(holder) = self.holders.get_mut(&session).filter(|holder| holder.epoch == epoch)
        {
            holder.epoch += 1;
        }
    }

    /// The caller asks the session's client to return the lease.
    pub(super) fn recall(&mut self, session: SessionId, ino: Ino, now: Duration) {
        // Removes what was answered before the oldest recall that is open.
        self.oldest_recall(session);
        self.transition(session, ino, LeaseEvent::Recalled);
        if let Some(holder) = self.holders.get_mut(&session) {
            let at = holder.owed.remove(&ino).unwrap_or(now);
            holder.recalled.insert(ino, at);
            let index = holder.recalls.partition_point(|(other, _)| *other <= at);
            holder.recalls.insert(index, (at, ino));
        }
    }

    /// Whether a session relies on a lease at this time, and whether a session has write leases,
    /// whose term may be over.
    pub(super) fn relied_on(&self, now: Duration) -> (bool, bool) {
        let relies = |holder: &Holder| holder.until > now && !holder.inos.is_empty();
        (self.holders.values().any(relies), self.holders.values().any(|holder| holder.writes > 0))
    }

    /// The server has sent the answer that grants these.
    pub(super) fn grant_sent(&mut self, session: SessionId, inos: &[Ino]) {
        for ino in inos {
            self.transition(session, *ino, LeaseEvent::GrantSent);
            self.wake(*ino);
        }
    }

    /// The server will not send that answer. The session may rely on read leases that it had
    /// before, or may learn of the write leases from another answer. So the server recalls what it
    /// has. Returns what to recall.
    pub(super) fn grant_not_sent(
        &mut self,
        session: SessionId,
        inos: &[Ino],
        now: Duration,
    ) -> Vec<Ino> {
        self.grant_sent(session, inos);
        let held =
            |ino: &Ino| self.hold(session, *ino).is_some_and(|hold| hold.state.may_be_recalled());
        let asked: Vec<Ino> = inos.iter().copied().filter(held).collect();
        asked.iter().for_each(|ino| self.recall(session, *ino, now));
        asked
    }

    /// Whether a request of this session sees everything that clients have acknowledged of these
    /// inodes.
    pub(super) fn is_readable(&self, session: SessionId, inos: &[Ino]) -> bool {
        inos.iter().all(|ino| self.writer(*ino).is_none_or(|writer| writer == session))
    }
}
