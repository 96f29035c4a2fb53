//! An exhaustive model: every order of events of a few clients at the table of leases: what they
//! send, what arrives when, which waiter is woken when. Checked in each state: a write lease is
//! alone, a change finds no session that relies on what it changes, an early-acknowledged change
//! succeeds, a request sees everything that was acknowledged before it was made. Checked where
//! nothing can happen any more: each client has done all that it wanted. A waiter looks again only
//! when it is woken, so a forgotten wake-up is found, too.

use crate::rt::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt::Write as _;

use super::state::LeaseState;
use super::table::*;
use super::*;

/// What a client does, one after the other.
#[derive(Clone, Debug)]
enum Act {
    /// A change that the client acknowledges early, under write leases that it asks for.
    Early(Vec<Ino>),
    /// A change that waits for the server; after `Busy`, once more under write leases.
    Change(Vec<Ino>),
    /// A request, whose answer the client caches if it may.
    Read(Vec<Ino>),
    /// Returns leases that were not recalled.
    Return(Vec<Ino>),
    /// Asks ahead, for write leases if this says so, and goes on.
    Walk(Vec<Ino>, bool),
    /// The client falls silent for good.
    Vanish,
}

#[derive(Clone, Debug)]
enum Up {
    Change {
        seq: u64,
        is_early: bool,
        inos: Vec<Ino>,
    },
    Returned {
        inos: Vec<Ino>,
    },
    Lease(Vec<Ino>),
    /// And what had been acknowledged when it was made.
    Read(Vec<Ino>, Vec<u64>),
    Walk(Vec<Ino>, bool),
}

#[derive(Clone, Debug)]
enum Down {
    Changed(Progress),
    Recall(Ino),
    Leases(Vec<Ino>),
    Read {
        inos: Vec<Ino>,
        leased: bool,
    },
    /// Leases, and those of them that are write leases.
    Walked(Vec<Ino>, Vec<Ino>),
}

/// One change at the server.
#[derive(Clone, Debug)]
struct Under {
    seq: u64,
    is_early: bool,
    inos: Vec<Ino>,
    waiter: Option<WaiterId>,
    begun: bool,
}

#[derive(Clone, Debug, Default)]
struct Client {
    script: VecDeque<Act>,
    /// The leases on which it relies: `true`, the write lease.
    holds: BTreeMap<Ino, bool>,
    waits: bool,
    /// It has returned a lease since its request.
    tainted: bool,
    /// What it has returned or changed since it asked ahead.
    stale: BTreeSet<Ino>,
    vanished: bool,
    sent: u64,
    up: VecDeque<Up>,
    down: VecDeque<Down>,
    // At the server:
    queue: VecDeque<(u64, bool, Vec<Ino>)>,
    under: Option<Under>,
    received: u64,
    applied: u64,
    /// A request that waits at the server.
    asked: Option<(WaiterId, Up)>,
    /// Write leases whose answer is not sent yet.
    telling: Option<Vec<Ino>>,
    /// What it has asked for ahead, and the answer that is not sent yet.
    walk: Option<(WaiterId, Vec<Ino>, bool)>,
    walked: Option<(Vec<Ino>, Vec<Ino>)>,
}

#[derive(Clone, Default)]
struct World {
    table: Table,
    clients: Vec<Client>,
    /// What every client must see of an inode: the number of acknowledged changes.
    owed: BTreeMap<Ino, u64>,
    applied: BTreeMap<Ino, u64>,
    woken: BTreeSet<WaiterId>,
    /// Sessions whose fence the volume has not recorded yet.
    fencing: BTreeSet<SessionId>,
    /// So many answers that grant leases fail to be sent.
    failures: usize,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Act(usize),
    Arrives(usize),
    Heard(usize),
    /// The next change of a session begins, or tries again.
    Begin(usize),
    End(usize),
    Asked(usize),
    Told(usize),
    NotTold(usize),
    /// A walk looks again, or has waited long enough.
    Walk(usize),
    TimedOut(usize),
    Walked(usize),
    NotWalked(usize),
    /// The volume has recorded a fence.
    Fenced(SessionId),
}

const TERM: Duration = Duration::from_secs(5);
const NOW: Duration = Duration::from_secs(1);
/// No lease is in use any more. Leases in use are left out, as those that come too late are.
const LATER: Duration = Duration::from_secs(3);

impl World {
    fn new(scripts: &[&[Act]], failures: usize) -> Self {
        let mut world = World { failures, ..World::default() };
        world.table.term = TERM;
        for (client, script) in scripts.iter().enumerate() {
            world.table.begin(client as SessionId, 0, NOW);
            world
                .clients
                .push(Client { script: script.iter().cloned().collect(), ..Client::default() });
        }
        world
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (at, client) in self.clients.iter().enumerate() {
            let runs =
                |waiter: Option<WaiterId>| waiter.is_none_or(|waiter| self.woken.contains(&waiter));
            if !client.waits && !client.vanished && !client.script.is_empty() {
                events.push(Event::Act(at));
            }
            // A request comes behind the early-acknowledged changes of its client.
            let early = matches!(client.up.front(), Some(Up::Read(..) | Up::Walk(..)))
                && client.received > client.applied;
            if !client.up.is_empty() && !early {
                events.push(Event::Arrives(at));
            }
            if !client.down.is_empty() && !client.vanished {
                events.push(Event::Heard(at));
            }
            match &client.under {
                None if !client.queue.is_empty() => events.push(Event::Begin(at)),
                Some(under) if under.begun => events.push(Event::End(at)),
                Some(under) if runs(under.waiter) => events.push(Event::Begin(at)),
                _ => {}
            }
            if client.asked.as_ref().is_some_and(|(waiter, _)| runs(Some(*waiter))) {
                events.push(Event::Asked(at));
            }
            if client.telling.is_some() {
                events.push(Event::Told(at));
                events.extend((self.failures > 0).then_some(Event::NotTold(at)));
            }
            if let Some((waiter, ..)) = client.walk {
                events.push(Event::TimedOut(at));
                if runs(Some(waiter)) {
                    events.push(Event::Walk(at));
                }
            }
            if client.walked.is_some() {
                events.push(Event::Walked(at));
                events.extend((self.failures > 0).then_some(Event::NotWalked(at)));
            }
        }
        events.extend(self.fencing.iter().copied().map(Event::Fenced));
        events
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Act(at) => self.act(at),
            Event::Arrives(at) => self.arrives(at),
            Event::Heard(at) => self.heard(at),
            Event::Begin(at) => self.begin(at),
            Event::End(at) => self.end(at),
            Event::Asked(at) => self.asked(at),
            Event::Told(at) => {
                let inos = self.clients[at].telling.take().expect("to be told");
                self.clients[at].down.push_back(Down::Leases(inos.clone()));
                self.table.grant_sent(at as SessionId, &inos);
            }
            Event::NotTold(at) => {
                self.failures -= 1;
                let inos = self.clients[at].telling.take().expect("to be told");
                self.clients[at].down.push_back(Down::Leases(Vec::new()));
                let recalled = self.table.grant_not_sent(at as SessionId, &inos, Duration::ZERO);
                self.recall(Recalls::from_iter([(at as SessionId, recalled)]));
            }
            Event::NotWalked(at) => {
                self.failures -= 1;
                let (_, held) = self.clients[at].walked.take().expect("to be told");
                let recalled = self.table.grant_not_sent(at as SessionId, &held, Duration::ZERO);
                self.recall(Recalls::from_iter([(at as SessionId, recalled)]));
            }
            Event::Fenced(session) => {
                self.fencing.remove(&session);
                self.table.fenced(session);
            }
            Event::Walk(at) => self.walk(at, false),
            Event::TimedOut(at) => self.walk(at, true),
            Event::Walked(at) => {
                let (leased, held) = self.clients[at].walked.take().expect("to be told");
                self.clients[at].down.push_back(Down::Walked(leased, held.clone()));
                self.table.grant_sent(at as SessionId, &held);
            }
        }
        self.woken.extend(self.table.woken.drain(..));
        self.fencing.extend(self.table.to_fence.drain(..));
        self.check();
    }

    fn walk(&mut self, at: usize, overdue: bool) {
        let session = at as SessionId;
        let (waiter, inos, writes) = self.clients[at].walk.clone().expect("it walks");
        self.woken.remove(&waiter);
        if !overdue && let Progress::Waits(recalls, _) = self.table.progress(waiter, LATER) {
            return self.recall(recalls);
        }
        self.table.leave(waiter);
        let leased: Vec<Ino> =
            inos.into_iter().filter(|ino| self.table.grant(session, *ino, LATER)).collect();
        let held = if writes { self.table.upgrade(session, &leased, LATER) } else { Vec::new() };
        (self.clients[at].walk, self.clients[at].walked) = (None, Some((leased, held)));
    }

    fn walked(&mut self, at: usize, leased: &[Ino], held: &[Ino]) {
        let client = &mut self.clients[at];
        for ino in leased {
            let writes = held.contains(ino);
            if client.holds.get(ino) == Some(&true) {
                continue;
            }
            if !client.stale.contains(ino) {
                client.holds.insert(*ino, writes);
            } else if writes {
                client.holds.remove(ino);
                client.tainted = true;
                client.up.push_back(Up::Returned { inos: vec![*ino] });
            }
        }
    }

    fn act(&mut self, at: usize) {
        let client = &mut self.clients[at];
        match client.script.front().cloned().expect("something to do") {
            Act::Early(inos) => {
                if inos.iter().all(|ino| client.holds.get(ino) == Some(&true)) {
                    client.sent += 1;
                    client.stale.extend(&inos);
                    client.up.push_back(Up::Change {
                        seq: client.sent,
                        is_early: true,
                        inos: inos.clone(),
                    });
                    client.script.pop_front();
                    inos.iter().for_each(|ino| *self.owed.entry(*ino).or_default() += 1);
                } else {
                    client.up.push_back(Up::Lease(inos));
                    (client.waits, client.tainted) = (true, false);
                }
            }
            Act::Change(inos) => {
                client.sent += 1;
                client.stale.extend(&inos);
                client.up.push_back(Up::Change { seq: client.sent, is_early: false, inos });
                client.waits = true;
            }
            Act::Read(inos) => {
                let owed =
                    inos.iter().map(|ino| self.owed.get(ino).copied().unwrap_or(0)).collect();
                client.up.push_back(Up::Read(inos, owed));
                (client.waits, client.tainted) = (true, false);
            }
            Act::Walk(inos, writes) => {
                client.stale.clear();
                client.up.push_back(Up::Walk(inos, writes));
                client.script.pop_front();
            }
            Act::Return(inos) => {
                client.stale.extend(&inos);
                client.holds.retain(|ino, _| !inos.contains(ino));
                client.up.push_back(Up::Returned { inos });
                client.script.pop_front();
            }
            Act::Vanish => {
                // Its own term is over before the server says so.
                (client.vanished, client.script) = (true, VecDeque::new());
                client.holds.clear();
                // Its acknowledged changes are dropped if they have not been applied by then.
                let overdue = client.up.iter().filter_map(|up| match up {
                    Up::Change { is_early: true, inos, .. } => Some(inos),
                    _ => None,
                });
                let queued = client
                    .queue
                    .iter()
                    .filter(|(_, is_early, _)| *is_early)
                    .map(|(_, _, inos)| inos);
                let under =
                    client.under.iter().filter(|under| under.is_early).map(|under| &under.inos);
                for ino in overdue.chain(queued).chain(under).flatten() {
                    *self.owed.get_mut(ino).expect("acknowledged") -= 1;
                }
                self.table.holders.get_mut(&(at as SessionId)).expect("there").until =
                    Duration::ZERO;
                // Waiters have set their clocks to the end of its term.
                self.woken.extend(self.table.waiting.keys());
            }
        }
    }

    fn arrives(&mut self, at: usize) {
        let session = at as SessionId;
        let client = &mut self.clients[at];
        match client.up.pop_front().expect("something has come") {
            Up::Change { seq, is_early, inos } => {
                client.received = seq;
                client.queue.push_back((seq, is_early, inos));
            }
            Up::Returned { inos } => {
                let after = (client.received > client.applied).then_some(client.received);
                self.table.give_back(session, &inos, after, NOW);
            }
            Up::Lease(inos) => {
                let waiter = self.table.ask(session, Wants::Lease, inos.clone());
                client.asked = Some((waiter, Up::Lease(inos)));
                self.woken.insert(waiter);
            }
            Up::Walk(inos, writes) => {
                let waiter = self.table.ask(session, Wants::Walk { writes }, inos.clone());
                client.walk = Some((waiter, inos, writes));
                self.woken.insert(waiter);
            }
            Up::Read(inos, owed) => {
                let waiter = self.table.ask(session, Wants::Read, inos.clone());
                client.asked = Some((waiter, Up::Read(inos, owed)));
                self.woken.insert(waiter);
            }
        }
    }

    fn recall(&mut self, recalls: Recalls) {
        for (session, inos) in recalls {
            for ino in inos {
                self.clients[session as usize].down.push_back(Down::Recall(ino));
            }
        }
    }

    fn asked(&mut self, at: usize) {
        let session = at as SessionId;
        let (waiter, what) = self.clients[at].asked.clone().expect("asked");
        self.woken.remove(&waiter);
        match (self.table.progress(waiter, NOW), what) {
            (Progress::Waits(recalls, _), _) => self.recall(recalls),
            (Progress::Begun(granted), Up::Lease(_)) => {
                (self.clients[at].asked, self.clients[at].telling) = (None, Some(granted));
            }
            (Progress::Begun(_), Up::Read(inos, owed)) => {
                for (ino, owed) in inos.iter().zip(owed) {
                    let seen = self.applied.get(ino).copied().unwrap_or(0);
                    // The changes of a client that has vanished meanwhile do not count.
                    let owed = owed.min(self.owed.get(ino).copied().unwrap_or(0));
                    assert!(seen >= owed, "{ino}: less than was acknowledged");
                }
                let leased = inos.iter().all(|ino| self.table.grant(session, *ino, NOW));
                self.clients[at].down.push_back(Down::Read { inos, leased });
                self.clients[at].asked = None;
                self.table.leave(waiter);
            }
            other => panic!("{other:?}"),
        }
    }

    fn heard(&mut self, at: usize) {
        let client = &mut self.clients[at];
        match client.down.pop_front().expect("something has come") {
            Down::Recall(ino) => {
                client.holds.remove(&ino);
                client.tainted = true;
                client.stale.insert(ino);
                client.up.push_back(Up::Returned { inos: vec![ino] });
            }
            Down::Walked(leased, held) => self.walked(at, &leased, &held),
            Down::Leases(inos) if client.tainted => {
                client.stale.extend(&inos);
                // What it has returned since it asked may have been this.
                client.holds.retain(|ino, _| !inos.contains(ino));
                client.up.push_back(Up::Returned { inos });
                client.waits = false;
                self.act(at);
            }
            Down::Leases(inos) => {
                client.holds.extend(inos.into_iter().map(|ino| (ino, true)));
                // The client uses at once what was granted.
                client.waits = false;
                self.act(at);
            }
            Down::Read { inos, leased } => {
                if leased && !client.tainted {
                    inos.into_iter().for_each(|ino| {
                        client.holds.entry(ino).or_insert(false);
                    });
                }
                client.waits = false;
                client.script.pop_front();
            }
            Down::Changed(Progress::Begun(_)) => {
                client.waits = false;
                client.script.pop_front();
            }
            Down::Changed(Progress::Busy) => {
                let Some(Act::Change(inos)) = client.script.front().cloned() else {
                    panic!("no change")
                };
                client.up.push_back(Up::Lease(inos));
                client.tainted = false;
            }
            Down::Changed(other) => panic!("{other:?}: an early-acknowledged change failed"),
        }
    }

    fn begin(&mut self, at: usize) {
        let session = at as SessionId;
        if self.clients[at].under.is_none() {
            let (seq, is_early, inos) = self.clients[at].queue.pop_front().expect("a change");
            let begun = match self.table.begin_own(session, Some(0), &inos, NOW) {
                None => false,
                Some(Progress::Begun(_)) => true,
                Some(progress) => return self.refuse(at, (seq, is_early), progress),
            };
            let waiter = (!begun).then(|| {
                self.table.ask(session, Wants::Change { epoch: Some(0), is_early }, inos.clone())
            });
            self.clients[at].under = Some(Under { seq, is_early, inos, waiter, begun });
        }
        let under = self.clients[at].under.clone().expect("a change");
        let Some(waiter) = under.waiter else { return };
        self.woken.remove(&waiter);
        match self.table.progress(waiter, NOW) {
            Progress::Waits(recalls, _) => self.recall(recalls),
            Progress::Begun(_) => self.clients[at].under.as_mut().expect("a change").begun = true,
            progress => {
                self.table.leave(waiter);
                self.clients[at].under = None;
                self.refuse(at, (under.seq, under.is_early), progress);
            }
        }
    }

    fn refuse(&mut self, at: usize, (seq, is_early): (u64, bool), progress: Progress) {
        if is_early {
            assert!(
                self.clients[at].vanished,
                "{progress:?}: an early-acknowledged change under leases succeeds"
            );
            self.table.end_epoch(at as SessionId, 0);
        }
        self.done(at, seq, is_early, progress);
    }

    fn end(&mut self, at: usize) {
        let Under { seq, is_early, inos, waiter, .. } =
            self.clients[at].under.take().expect("a change");
        let overdue = self.clients[at].vanished;
        for ino in &inos {
            *self.applied.entry(*ino).or_default() += 1;
            if !is_early || overdue {
                *self.owed.entry(*ino).or_default() += 1;
            }
            for (other, client) in self.clients.iter().enumerate().filter(|(other, _)| *other != at)
            {
                assert!(!client.holds.contains_key(ino), "{other} relies on {ino}");
            }
        }
        self.done(at, seq, is_early, Progress::Begun(Vec::new()));
        if let Some(waiter) = waiter {
            self.table.leave(waiter);
        }
    }

    fn done(&mut self, at: usize, seq: u64, is_early: bool, progress: Progress) {
        let client = &mut self.clients[at];
        client.applied = seq;
        if !is_early {
            client.down.push_back(Down::Changed(progress));
        }
        self.table.end_change(at as SessionId, Some(seq));
    }

    fn check(&self) {
        self.table.check();
        // No session changes, or is granted, what a session that is being fenced had.
        for session in &self.fencing {
            let had = |ino: &Ino| self.table.hold(*session, *ino).is_some_and(|hold| hold.writes);
            for (at, client) in
                self.clients.iter().enumerate().filter(|(at, _)| *at as SessionId != *session)
            {
                let under =
                    client.under.iter().filter(|under| under.begun).flat_map(|under| &under.inos);
                assert!(
                    !under.chain(client.telling.iter().flatten()).any(had),
                    "{at} goes on too early"
                );
            }
            let holder = &self.table.holders[session];
            assert!(
                holder.is_fenced && holder.writes > 0,
                "{session} has lost its leases too early"
            );
        }
        let mut holders: BTreeMap<Ino, Vec<bool>> = BTreeMap::new();
        for client in &self.clients {
            client
                .holds
                .iter()
                .for_each(|(ino, writes)| holders.entry(*ino).or_default().push(*writes));
        }
        for (ino, holds) in holders {
            assert!(holds.len() == 1 || !holds.contains(&true), "{ino}: a writer is not alone");
        }
    }

    fn check_end(&self) {
        for (at, client) in self.clients.iter().enumerate().filter(|(_, client)| !client.vanished) {
            assert!(client.script.is_empty() && !client.waits, "{at} waits without end");
        }
        assert!(self.table.waiting.is_empty() && self.table.queues.is_empty());
    }

    /// The state as text, without the numbers of waiters.
    fn key(&self) -> String {
        let order: BTreeMap<WaiterId, usize> = {
            let mut all: Vec<WaiterId> = self.table.waiting.keys().copied().collect();
            all.sort_unstable();
            all.into_iter().zip(0..).collect()
        };
        let index = |waiter: &WaiterId| order.get(waiter).copied();
        let mut key = String::new();
        for (ino, holds) in self.table.inodes.iter().collect::<BTreeMap<_, _>>() {
            let mut holds = holds.clone();
            holds.sort_unstable_by_key(|hold| hold.session);
            let _ok = write!(key, "{ino}{holds:?}");
        }
        for (session, holder) in self.table.holders.iter().collect::<BTreeMap<_, _>>() {
            let behind: Vec<_> = holder.waiters.iter().map(index).collect();
            let Holder { until, returning, epoch, applying, is_fenced, .. } = holder;
            let _ok = write!(
                key,
                "{session}{until:?}{returning:?}{epoch}{applying}{is_fenced}{behind:?}"
            );
        }
        for (waiter, waiting) in self.table.waiting.iter().collect::<BTreeMap<_, _>>() {
            let _ok = write!(key, "{:?}{waiting:?}", index(waiter));
        }
        for client in &self.clients {
            let under = client
                .under
                .as_ref()
                .map(|u| (u.seq, u.is_early, &u.inos, u.waiter.as_ref().map(index), u.begun));
            let asked = client.asked.as_ref().map(|(waiter, up)| (index(waiter), up));
            let walk =
                client.walk.as_ref().map(|(waiter, inos, writes)| (index(waiter), inos, *writes));
            let Client {
                script,
                holds,
                waits,
                tainted,
                vanished,
                sent,
                up,
                down,
                queue,
                received,
                applied,
                telling,
                stale,
                walked,
                ..
            } = client;
            let _ok = write!(
                key,
                "{under:?}{asked:?}{script:?}{holds:?}{waits}{tainted}{vanished}{sent}{up:?}{down:?}{queue:?}{received}{applied}{telling:?}{stale:?}{walk:?}{walked:?}"
            );
        }
        let woken: Vec<_> = self.woken.iter().filter_map(index).collect();
        let _ok = write!(key, "{:?}{:?}{woken:?}{}", self.owed, self.applied, self.failures);
        key
    }
}

impl Table {
    /// Figures that are kept twice agree.
    fn check(&self) {
        assert_eq!(self.leases, self.inodes.values().map(Vec::len).sum::<usize>());
        for (ino, holds) in &self.inodes {
            assert!(
                holds.len() == 1 || !holds.iter().any(|hold| hold.writes),
                "{ino}: a writer is not alone"
            );
        }
        for (session, holder) in &self.holders {
            let own: Vec<(Ino, Hold)> = self
                .inodes
                .iter()
                .flat_map(|(ino, holds)| holds.iter().map(|hold| (*ino, *hold)))
                .filter(|(_, hold)| hold.session == *session)
                .collect();
            let count =
                |which: &dyn Fn(&Hold) -> bool| own.iter().filter(|(_, hold)| which(hold)).count();
            assert_eq!(own.iter().map(|(ino, _)| *ino).collect::<HashSet<_>>(), holder.inos);
            assert_eq!(
                (count(&|h| h.writes), count(&|h| h.state == LeaseState::Recalled)),
                (holder.writes, holder.recalled.len())
            );
        }
    }
}

/// Goes through every order of events. Returns the number of states.
fn explore(scripts: &[&[Act]]) -> usize {
    explore_failures(scripts, 0)
}

/// The same, while so many answers fail to be sent.
fn explore_failures(scripts: &[&[Act]], failures: usize) -> usize {
    let (mut seen, mut open) = (HashSet::default(), vec![World::new(scripts, failures)]);
    while let Some(world) = open.pop() {
        let events = world.events();
        if events.is_empty() {
            world.check_end();
        }
        for event in events {
            let mut next = world.clone();
            next.happen(event);
            if seen.insert(next.key()) {
                open.push(next);
            }
        }
    }
    seen.len()
}

fn early(inos: &[Ino]) -> Act {
    Act::Early(inos.into())
}

fn change(inos: &[Ino]) -> Act {
    Act::Change(inos.into())
}

fn read(inos: &[Ino]) -> Act {
    Act::Read(inos.into())
}

#[test]
fn two_sessions_that_want_each_others_leases_both_go_on() {
    let one: &[Act] = &[early(&[1]), early(&[1, 2]), early(&[1])];
    let states = explore(&[one, &[early(&[2]), early(&[1, 2])]]);
    assert!(states > 1000, "{states}");
}

/// Each returns what is behind its own change, which touches what the other has.
#[test]
fn changes_never_wait_for_write_leases() {
    let one: &[Act] = &[early(&[1]), change(&[2]), early(&[1])];
    let states = explore(&[one, &[early(&[2]), change(&[1]), early(&[2])]]);
    assert!(states > 1000, "{states}");
}

#[test]
fn a_returned_lease_counts_again_only_when_it_is_granted_again() {
    let first: &[Act] = &[early(&[1]), Act::Return(vec![1]), early(&[1])];
    let states = explore(&[first, &[early(&[1]), read(&[1])]]);
    assert!(states > 500, "{states}");
}

#[test]
fn three_sessions_that_want_one_inode_all_get_it() {
    let states = explore(&[&[early(&[1])], &[early(&[1]), read(&[1])], &[change(&[1])]]);
    assert!(states > 1000, "{states}");
}

#[test]
fn early_acknowledged_changes_pass_waiters_for_their_leases() {
    let first: &[Act] = &[early(&[1]), early(&[1]), change(&[1, 2]), early(&[1])];
    let states = explore(&[first, &[read(&[2]), early(&[2, 1])]]);
    assert!(states > 500, "{states}");
}

#[test]
fn readers_see_what_was_acknowledged_and_a_writer_is_alone() {
    let first: &[Act] = &[early(&[1, 2]), read(&[2]), early(&[2])];
    let states = explore(&[first, &[read(&[1, 2]), change(&[2]), read(&[2])]]);
    assert!(states > 1000, "{states}");
}

#[test]
fn a_session_that_vanishes_is_fenced_and_its_late_changes_are_dropped() {
    let vanishing: &[Act] = &[early(&[1]), early(&[1]), Act::Vanish];
    for other in [read(&[1]), change(&[1]), early(&[1])] {
        let states = explore(&[vanishing, &[other, early(&[1])]]);
        assert!(states > 200, "{states}");
    }
}

/// A client asks ahead and goes on meanwhile. The others neither wait for that nor rely on anything
/// that it got.
#[test]
fn walks_take_no_lease_that_is_relied_on_and_delay_no_session() {
    for writes in [false, true] {
        let ahead = || Act::Walk(vec![1, 2], writes);
        let walker: &[Act] = &[ahead(), early(&[1]), read(&[2])];
        let states = explore(&[walker, &[early(&[1, 2]), change(&[2])]]);
        assert!(states > 1000, "{states}");
        let walker: &[Act] = &[ahead(), change(&[2]), early(&[1])];
        let states = explore(&[walker, &[early(&[1]), read(&[2]), early(&[2])]]);
        assert!(states > 1000, "{states}");
        let giving: &[Act] = &[early(&[1]), ahead(), Act::Return(vec![1]), early(&[1])];
        let states = explore(&[giving, &[read(&[1]), early(&[1])]]);
        assert!(states > 1000, "{states}");
    }
}

#[test]
fn two_walks_of_the_same_inodes_both_go_on() {
    let one: &[Act] = &[Act::Walk(vec![1], true), early(&[1])];
    let states = explore(&[one, &[Act::Walk(vec![1], true), early(&[1])]]);
    assert!(states > 1000, "{states}");
    let vanishing: &[Act] = &[early(&[1]), early(&[1]), Act::Vanish];
    let states = explore(&[vanishing, &[Act::Walk(vec![1], true), change(&[1]), early(&[1])]]);
    assert!(states > 200, "{states}");
}

/// The client relies on what it had read before it asked.
#[test]
fn a_grant_that_is_not_sent_takes_no_read_lease_away() {
    let other: &[Act] = &[change(&[1]), early(&[1])];
    let asking: &[Act] = &[read(&[1]), early(&[1]), read(&[1])];
    let states = explore_failures(&[asking, other], 1);
    assert!(states > 1000, "{states}");
    let walking: &[Act] = &[read(&[1]), Act::Walk(vec![1], true), early(&[1])];
    let states = explore_failures(&[walking, other], 1);
    assert!(states > 1000, "{states}");
}
