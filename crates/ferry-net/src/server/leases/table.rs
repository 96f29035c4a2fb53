//! The table of leases as data: who has which, and who waits for which. Nothing here waits, sends,
//! or looks at a clock.

use crate::rt::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use ferry_fs::Ino;

use super::state::{LeaseEvent, LeaseState};

/// A session's number.
pub(in crate::server) type SessionId = u64;
/// A client, whichever of its sessions: its certificate or, without one, its address.
pub(in crate::server) type ClientId = u64;
/// The place of somebody who waits: the smaller came first.
pub(in crate::server) type WaiterId = u64;

/// Leases that one session is given when it asks.
pub(super) const LEASES_MAX: usize = 1 << 18;
/// What it makes itself may bring it up to this.
const NEW_LEASES_MAX: usize = 2 * LEASES_MAX;
/// A session that brings changes may owe the answer to a recall for so many terms.
const OWING_TERMS: u32 = 2;
/// Leases of all sessions; beyond it only what they make themselves.
pub(super) const LEASES_TOTAL_MAX: usize = 1 << 22;
/// So many terms that end in silence cost nothing: a connection may just have been lost.
const IGNORED_FREE: u32 = 1;
/// The longest time without leases is 2 to this many terms.
const BARRED_DOUBLINGS_MAX: u32 = 6;
/// After so many terms it is forgotten.
const FORGIVEN_TERMS: u32 = 2 << BARRED_DOUBLINGS_MAX;

/// A time of the clock in sixteenths of a second: there may be millions of them.
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
    /// It is the write lease, and the only one on this inode.
    pub(super) writes: bool,
    pub(super) state: LeaseState,
    /// When its session was given it, or changed the inode under it, last.
    pub(super) used: Coarse,
}

/// What a session has.
#[derive(Clone, Debug, Default)]
pub(super) struct Holder {
    /// Until when it relies on its leases.
    pub(super) until: Duration,
    pub(super) inos: HashSet<Ino>,
    /// Write leases among them.
    pub(super) writes: usize,
    /// Those that it was asked to give back, and owes an answer.
    pub(super) recalled: usize,
    /// Since when it does, as far as that was noted.
    owing_since: Option<Duration>,
    /// Write leases that end when the change with this number has been applied, in this order.
    pub(super) returning: VecDeque<(u64, Vec<Ino>)>,
    /// Counts the promises that were broken: those made before are worth nothing.
    pub(super) epoch: u32,
    /// The oldest epoch under whose leases it still is: they were taken away when this one began.
    pub(super) fenced_before: u32,
    /// A change of its is being made: its write leases stay until it is done.
    pub(super) applying: bool,
    /// *Fenced*: its term was over and another session wants what it has. Until [`Table::fenced`]
    /// nobody may use its leases, neither itself nor others. A change under a new epoch may be
    /// applied meanwhile, so this is independent of `applying`.
    pub(super) is_fenced: bool,
    /// Who waits for one of these to end.
    pub(super) waiters: Vec<WaiterId>,
    /// The client whose session it is.
    client: ClientId,
    /// The last term that has ended while it owed an answer to a recall.
    ignored: Duration,
}

/// What a client has done with recalls, in all of its sessions.
#[derive(Clone, Debug, Default)]
struct Silence {
    /// How often in a row a term has ended while it owed an answer,
    times: u32,
    /// at last in this session,
    session: SessionId,
    /// then.
    at: Duration,
    /// It gets no lease before this.
    barred_until: Duration,
}

impl Holder {
    /// Inodes that it has given back, and that still have to wait.
    fn returning(&self) -> usize {
        self.returning.iter().map(|(_, inos)| inos.len()).sum()
    }
}

/// What somebody waits to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::server) enum Wants {
    /// A change of an ordered stream.
    Change { epoch: u32, is_early: bool },
    /// A request that would see less than what was is_early.
    Read,
    /// A request for write leases.
    Lease,
    /// A request that is ahead of whoever will need it: nobody stands waiters it, and it waits for
    /// nobody who is at work. For write leases?
    Walk { writes: bool },
}

/// Somebody who waits, or who has waited and is not done.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) session: SessionId,
    pub(super) wants: Wants,
    pub(super) inos: Vec<Ino>,
    /// Its turn has come.
    pub(super) begun: bool,
}

/// What is to be recalled from whom.
pub(in crate::server) type Recalls = HashMap<SessionId, Vec<Ino>>;

/// How far somebody has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) enum Progress {
    /// Its turn has come; a request for leases has these.
    Begun(Vec<Ino>),
    /// These are to be asked, and at that time somebody's term is over.
    Waits(Recalls, Option<Duration>),
    /// Another session has a write lease on what a change touches, or stands before it in line for
    /// one.
    Busy,
    /// A change of a epoch that has ended.
    Dropped,
    /// A promise without a lease.
    Broken,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    pub(super) inodes: HashMap<Ino, Vec<Hold>>,
    pub(super) holders: HashMap<SessionId, Holder>,
    /// Those who have left others waiting.
    silences: HashMap<ClientId, Silence>,
    pub(super) leases: usize,
    /// Who waits for an inode, oldest first.
    pub(super) queues: HashMap<Ino, VecDeque<WaiterId>>,
    pub(super) waiting: HashMap<WaiterId, Waiting>,
    pub(super) last_waiter: WaiterId,
    /// The server is about to stop: nobody gets a lease any more.
    pub(super) closing: bool,
    /// Who may have come further; whoever calls has them look again.
    pub(super) woken: Vec<WaiterId>,
    /// Sessions that are to be fenced; whoever calls sees to it, and calls [`Table::fenced`] then.
    pub(super) to_fence: Vec<SessionId>,
    /// How long a lease lasts after the last sign of life.
    pub(super) term: Duration,
}

impl Table {
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

    /// The term of a session is over: if it owed an answer to a recall, others have waited for that
    /// in vain.
    pub(super) fn count_silence(&mut self, session: SessionId, now: Duration) {
        let term = self.term;
        let Some(holder) = self.holders.get_mut(&session) else { return };
        if holder.recalled == 0 || holder.ignored == holder.until {
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

    /// Whether nobody has left others waiting, or that is forgotten.
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

    /// The only place where a lease that stays changes its state. Keeps the number of recalls that
    /// its session has not answered.
    fn transition(&mut self, session: SessionId, ino: Ino, event: LeaseEvent) {
        let Some(hold) = self.hold_mut(session, ino) else { return };
        let before = hold.state;
        let after = before.after(event);
        let after = after.unwrap_or_else(|| panic!("{event:?} of a lease that is {before:?}"));
        hold.state = after;
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.recalled += usize::from(after == LeaseState::Recalled);
            holder.recalled -= usize::from(before == LeaseState::Recalled);
        }
    }

    /// An answer is to grant the write lease: the session has it from now on.
    pub(super) fn enter_write(&mut self, session: SessionId, ino: Ino, now: Duration) {
        self.enter(session, ino, true, now);
        self.transition(session, ino, LeaseEvent::Granted);
    }

    /// Enters a lease, or makes one that is there a write lease.
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

    /// A lease is no more.
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
            holder.recalled -= usize::from(hold.state == LeaseState::Recalled);
        }
        self.wake(ino);
    }

    /// All leases of a session are no more, or all read leases.
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

    /// A session has a connection that knows of no leases: it relies on no read lease. Write leases
    /// stay, as long as nobody wants them. Gives the epoch that goes on.
    pub(super) fn begin(&mut self, session: SessionId, client: ClientId, until: Duration) -> u32 {
        self.remove_all(session, true);
        let holder = self.holders.entry(session).or_default();
        (holder.until, holder.client) = (until, client);
        let (epoch, inos) = (holder.epoch, holder.inos.iter().copied().collect::<Vec<_>>());
        for ino in inos {
            self.transition(session, ino, LeaseEvent::Reconnected);
            self.wake(ino);
        }
        epoch
    }

    /// A sign of life; whether the term goes on.
    pub(super) fn renew(&mut self, session: SessionId, until: Duration) -> bool {
        let holder = self.holders.get_mut(&session).filter(|holder| holder.recalled == 0);
        holder.map(|holder| (holder.until, holder.owing_since) = (until, None)).is_some()
    }

    /// A session brings changes. Its term goes on for whoever waits; the session hears nothing of
    /// that, and relies on its pings alone.
    pub(super) fn makes_progress(&mut self, session: SessionId, now: Duration, term: Duration) {
        let Some(holder) = self.holders.get_mut(&session) else { return };
        if holder.recalled == 0 {
            holder.owing_since = None;
        } else if now.saturating_sub(*holder.owing_since.get_or_insert(now)) >= OWING_TERMS * term {
            return;
        }
        holder.until = holder.until.max(now + term);
    }

    /// A session is told of an inode, and may keep it if this says so. Before it is read.
    pub(super) fn grant(&mut self, session: SessionId, ino: Ino, now: Duration) -> bool {
        let blocks = |waiter: &WaiterId| {
            self.waiting.get(waiter).is_some_and(|waiting| match waiting.wants {
                Wants::Read | Wants::Walk { .. } => false,
                Wants::Lease => true,
                // Whoever stands in line would have to recall it at once.
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

    /// A session is about to make an inode that nobody knows, and gets its write lease; `false`: it
    /// has too many, or somebody does know it.
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

    /// It was not made.
    pub(super) fn revoke_new(&mut self, session: SessionId, ino: Ino) {
        self.remove(session, ino);
    }

    /// A session relies on these no more. A write lease ends when the change `after` has been
    /// applied (`None`: it has); one that a change before that brings with what it makes, too.
    pub(super) fn give_back(&mut self, session: SessionId, inos: &[Ino], after: Option<u64>) {
        if self.is_fenced(session) {
            // It goes with all the rest, and not before.
            return;
        }
        let (mut later, mut returning) =
            (Vec::new(), self.holders.get(&session).map_or(0, Holder::returning));
        for ino in inos {
            let state = self.hold(session, *ino).map(|hold| hold.state);
            let answers = state == Some(LeaseState::Recalled);
            if let Some(holder) = self.holders.get(&session).filter(|_| answers)
                && let Some(silence) = self.silences.get_mut(&holder.client)
                && silence.session == session
            {
                // Another session's answer says nothing of this one.
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
            // As many entries as changes, whatever a client says: they are gone through.
            match holder.returning.back_mut() {
                Some((last, inos)) if *last >= after => inos.extend(later),
                _ => holder.returning.push_back((after, later)),
            }
        }
    }

    /// A session relies on none any more, and never will.
    pub(super) fn end(&mut self, session: SessionId) {
        self.remove_all(session, false);
        if let Some(holder) = self.holders.remove(&session) {
            self.woken.extend(holder.waiters);
        }
    }

    /// Forgets read leases that are over, and sessions that are over and not `alive`.
    pub(super) fn expire(&mut self, alive: &HashSet<SessionId>, now: Duration) {
        let forgiven = self.term * FORGIVEN_TERMS;
        self.silences.retain(|_, silence| now.saturating_sub(silence.at) < forgiven);
        let late =
            self.holders.iter().filter(|(_, holder)| holder.until <= now && !holder.applying);
        let late: Vec<SessionId> = late.map(|(session, _)| *session).collect();
        for session in late {
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

    /// The epoch before which its leases were taken away.
    pub(super) fn fenced_before(&self, session: SessionId) -> u32 {
        self.holders.get(&session).map_or(0, |holder| holder.fenced_before)
    }

    /// All that a session has is_early, and not brought yet, is worth nothing any more.
    pub(super) fn end_fenced_epoch(&mut self, session: SessionId) {
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.epoch += 1;
            holder.fenced_before = holder.epoch;
        }
    }

    /// The promises that a session has made in this epoch are worth nothing any more.
    pub(super) fn end_epoch(&mut self, session: SessionId, epoch: u32) {
        if let Some(holder) = self.holders.get_mut(&session).filter(|holder| holder.epoch == epoch)
        {
            holder.epoch += 1;
        }
    }

    /// The caller asks the session's client to return the lease.
    pub(super) fn recall(&mut self, session: SessionId, ino: Ino) {
        self.transition(session, ino, LeaseEvent::Recalled);
    }

    /// Whether anybody relies on a lease at this time, and whether anybody has is_early what was
    /// not made, now or before.
    pub(super) fn relied_on(&self, now: Duration) -> (bool, bool) {
        let relies = |holder: &Holder| holder.until > now && !holder.inos.is_empty();
        (self.holders.values().any(relies), self.holders.values().any(|holder| holder.writes > 0))
    }

    /// The answer that grants these is on its way.
    pub(super) fn grant_sent(&mut self, session: SessionId, inos: &[Ino]) {
        for ino in inos {
            self.transition(session, *ino, LeaseEvent::GrantSent);
            self.wake(*ino);
        }
    }

    /// Nobody will hear that these are write leases. The session may have had read leases before
    /// and relies on those, or hears of the same in another answer: so it is asked to give back
    /// what it has. Gives those.
    pub(super) fn grant_not_sent(&mut self, session: SessionId, inos: &[Ino]) -> Vec<Ino> {
        self.grant_sent(session, inos);
        let held =
            |ino: &Ino| self.hold(session, *ino).is_some_and(|hold| hold.state.may_be_recalled());
        let asked: Vec<Ino> = inos.iter().copied().filter(held).collect();
        asked.iter().for_each(|ino| self.recall(session, *ino));
        asked
    }

    /// Whether a request of a session sees all that was is_early of these.
    pub(super) fn is_readable(&self, session: SessionId, inos: &[Ino]) -> bool {
        inos.iter().all(|ino| self.writer(*ino).is_none_or(|writer| writer == session))
    }
}
