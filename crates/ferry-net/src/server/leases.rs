//! Read leases: which sessions keep what they were told of an inode, and changes that wait until they no longer do.
//!
//! * E1: a lease is entered before what it covers is read (`grant`), and none is given on an inode that somebody is about to change.
//! * E2: a change has its turn on all inodes that it touches at once, in the order in which changes asked: so no two wait for each other.
//! * E3: a turn begins when no other session has a lease on any of its inodes: each has given it back, or its term is over. Giving back
//!   needs nothing but the client's word, which waits for no other operation: so the ordered stream waits for others no longer than a term.
//! * E4: a session's term goes on with each sign of life, but not while it owes an answer to a recall.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ferry_device::Clock;
use ferry_fs::Ino;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep;

/// A session's number.
type SessionId = u128;
/// Leases of one session; it is given no more.
const LEASES_MAX: usize = 1 << 18;
/// Leases of all sessions.
const LEASES_TOTAL_MAX: usize = 1 << 22;

#[derive(Default)]
struct Inode {
    /// Who has a lease, and whether it was asked to give it back.
    readers: Vec<(SessionId, bool)>,
    /// Whose turn it is to change it.
    turn: Option<SessionId>,
}

#[derive(Default)]
struct Holder {
    /// Until when it relies on its leases.
    until: Duration,
    leases: usize,
    /// Those that it was asked to give back.
    recalled: usize,
}

#[derive(Default)]
struct State {
    inodes: HashMap<Ino, Inode>,
    holders: HashMap<SessionId, Holder>,
    leases: usize,
    /// Changes that wait for their turn, oldest first.
    line: VecDeque<(u64, Vec<Ino>)>,
    tickets: u64,
}

impl State {
    /// Whether a change may have its turn, before all that came after `ticket`.
    fn is_free(&self, inos: &[Ino], ticket: u64) -> bool {
        let taken = |ino| self.inodes.get(ino).is_some_and(|inode| inode.turn.is_some());
        let earlier = || self.line.iter().take_while(|(other, _)| *other < ticket);
        !inos.iter().any(taken) && !earlier().any(|(_, others)| others.iter().any(|ino| inos.contains(ino)))
    }

    fn take_turn(&mut self, session: SessionId, inos: &[Ino]) {
        for ino in inos {
            self.inodes.entry(*ino).or_default().turn = Some(session);
        }
    }

    fn tidy(&mut self, ino: Ino) {
        if self.inodes.get(&ino).is_some_and(|inode| inode.readers.is_empty() && inode.turn.is_none()) {
            self.inodes.remove(&ino);
        }
    }

    /// A lease is no more.
    fn remove(&mut self, session: SessionId, ino: Ino) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let Some(at) = inode.readers.iter().position(|(reader, _)| *reader == session) else { return };
        let (_, recalled) = inode.readers.swap_remove(at);
        self.leases -= 1;
        if let Some(holder) = self.holders.get_mut(&session) {
            holder.leases -= 1;
            holder.recalled -= usize::from(recalled);
        }
        self.tidy(ino);
    }

    /// All leases of a session are no more.
    fn remove_all(&mut self, session: SessionId) {
        if self.holders.get(&session).is_none_or(|holder| holder.leases == 0) {
            return;
        }
        let own = |inode: &Inode| inode.readers.iter().any(|(reader, _)| *reader == session);
        let inos: Vec<Ino> =
            self.inodes.iter().filter(|(_, inode)| own(inode)).map(|(ino, _)| *ino).collect();
        inos.into_iter().for_each(|ino| self.remove(session, ino));
    }

    /// When a session's term is over.
    fn ends(&self, session: SessionId) -> Duration {
        self.holders.get(&session).map_or(Duration::ZERO, |holder| holder.until)
    }

    /// Who is in the way of a turn: what to recall from whom, and when the first of their terms is over. `None`: nobody.
    fn in_the_way(&mut self, session: SessionId, inos: &[Ino], now: Duration) -> Option<(Recalls, Duration)> {
        let mut others: Vec<SessionId> = Vec::new();
        for inode in inos.iter().filter_map(|ino| self.inodes.get(ino)) {
            others
                .extend(inode.readers.iter().map(|(reader, _)| *reader).filter(|reader| *reader != session));
        }
        let (late, alive): (Vec<_>, Vec<_>) = others.into_iter().partition(|other| self.ends(*other) <= now);
        late.into_iter().for_each(|other| self.remove_all(other));
        let first = alive.iter().map(|other| self.ends(*other)).min()?;
        let mut recalls = Recalls::new();
        for ino in inos {
            let Some(inode) = self.inodes.get_mut(ino) else { continue };
            for (reader, recalled) in
                inode.readers.iter_mut().filter(|(r, recalled)| *r != session && !recalled)
            {
                *recalled = true;
                if let Some(holder) = self.holders.get_mut(reader) {
                    holder.recalled += 1;
                }
                recalls.entry(*reader).or_default().push(*ino);
            }
        }
        Some((recalls, first))
    }
}

/// What is to be recalled from whom.
pub(super) type Recalls = HashMap<SessionId, Vec<Ino>>;

/// All of them.
pub(super) struct Leases {
    state: Mutex<State>,
    /// A turn has ended, or a lease.
    moved: Notify,
    clock: Arc<dyn Clock>,
    /// How long a lease lasts after the last sign of life.
    term: Duration,
    /// Nothing is changed before: clients may rely on leases of the server before this one.
    held_until: Duration,
}

impl Leases {
    /// `hold`: how long nothing is changed.
    pub(super) fn new(clock: Arc<dyn Clock>, term: Duration, hold: Duration) -> Self {
        let held_until = clock.monotonic() + hold;
        Self { state: Mutex::default(), moved: Notify::new(), clock, term, held_until }
    }

    /// A session has a connection that knows of no leases.
    pub(super) fn begin(&self, session: SessionId) {
        let mut state = self.state.lock();
        state.remove_all(session);
        state.holders.entry(session).or_default().until = self.clock.monotonic() + self.term;
        drop(state);
        self.moved.notify_waiters();
    }

    /// A sign of life; whether the term goes on.
    pub(super) fn renew(&self, session: SessionId) -> bool {
        let until = self.clock.monotonic() + self.term;
        match self.state.lock().holders.get_mut(&session) {
            Some(holder) if holder.recalled == 0 => {
                holder.until = until;
                true
            }
            _ => false,
        }
    }

    /// A session is told of an inode, and may keep it if this says so. Before it is read.
    pub(super) fn grant(&self, session: SessionId, ino: Ino) -> bool {
        let mut state = self.state.lock();
        let others_turn = |inode: &Inode| inode.turn.is_some_and(|whose| whose != session);
        if state.inodes.get(&ino).is_some_and(others_turn) {
            return false;
        }
        // Who stands in line would have to recall it at once.
        if state.line.iter().any(|(_, inos)| inos.contains(&ino)) {
            return false;
        }
        let full = state.leases >= LEASES_TOTAL_MAX;
        let now = self.clock.monotonic();
        let State { inodes, holders, leases, .. } = &mut *state;
        let Some(holder) = holders.get_mut(&session).filter(|holder| holder.until > now) else {
            return false;
        };
        if let Some(inode) = inodes.get(&ino)
            && let Some((_, recalled)) = inode.readers.iter().find(|(reader, _)| *reader == session)
        {
            return !recalled;
        }
        if full || holder.leases >= LEASES_MAX {
            return false;
        }
        holder.leases += 1;
        *leases += 1;
        inodes.entry(ino).or_default().readers.push((session, false));
        true
    }

    /// A session relies on these no more.
    pub(super) fn give_back(&self, session: SessionId, inos: &[Ino]) {
        {
            let mut state = self.state.lock();
            inos.iter().for_each(|ino| state.remove(session, *ino));
        }
        self.moved.notify_waiters();
    }

    /// A session relies on none any more, and never will.
    pub(super) fn end(&self, session: SessionId) {
        {
            let mut state = self.state.lock();
            state.remove_all(session);
            state.holders.remove(&session);
        }
        self.moved.notify_waiters();
    }

    /// Forgets what is over, and sessions that are not `alive`.
    pub(super) fn expire(&self, alive: &HashSet<SessionId>) {
        {
            let now = self.clock.monotonic();
            let mut state = self.state.lock();
            let over = |holder: &Holder| holder.until <= now;
            let late: Vec<SessionId> = state
                .holders
                .iter()
                .filter(|(_, holder)| over(holder))
                .map(|(session, _)| *session)
                .collect();
            late.into_iter().for_each(|session| state.remove_all(session));
            state.holders.retain(|session, holder| alive.contains(session) || !over(holder));
        }
        self.moved.notify_waiters();
    }

    /// How many a session has.
    pub(super) fn held_by(&self, session: SessionId) -> usize {
        self.state.lock().holders.get(&session).map_or(0, |holder| holder.leases)
    }

    /// A turn that nobody has to be asked for; `None`: it is to be waited for.
    pub(super) fn turn_now(self: &Arc<Self>, session: SessionId, inos: &[Ino]) -> Option<Turn> {
        let mut state = self.state.lock();
        let held = !inos.is_empty() && self.clock.monotonic() < self.held_until;
        if held || !state.is_free(inos, u64::MAX) {
            return None;
        }
        let shared = |inode: &Inode| inode.readers.iter().any(|(reader, _)| *reader != session);
        if inos.iter().any(|ino| state.inodes.get(ino).is_some_and(shared)) {
            return None;
        }
        state.take_turn(session, inos);
        Some(Turn { leases: Arc::clone(self), session, inos: inos.to_vec() })
    }

    /// Waits for a turn; `recall` asks sessions to give back what is in the way.
    pub(super) async fn turn(
        self: &Arc<Self>,
        session: SessionId,
        inos: Vec<Ino>,
        recall: impl Fn(Recalls),
    ) -> Turn {
        let held = self.held_until.saturating_sub(self.clock.monotonic());
        if !inos.is_empty() && !held.is_zero() {
            sleep(held).await;
        }
        let turn = self.stand_in_line(session, inos).await;
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            moved.as_mut().enable();
            let now = self.clock.monotonic();
            let waits = self.state.lock().in_the_way(session, &turn.inos, now);
            let Some((recalls, first)) = waits else { return turn };
            if !recalls.is_empty() {
                recall(recalls);
            }
            tokio::select! {
                () = moved => {}
                () = sleep(first.saturating_sub(now)) => {}
            }
        }
    }

    async fn stand_in_line(self: &Arc<Self>, session: SessionId, inos: Vec<Ino>) -> Turn {
        let place = {
            let mut state = self.state.lock();
            state.tickets += 1;
            let ticket = state.tickets;
            state.line.push_back((ticket, inos.clone()));
            Place { leases: self, ticket }
        };
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            moved.as_mut().enable();
            {
                let mut state = self.state.lock();
                if state.is_free(&inos, place.ticket) {
                    state.take_turn(session, &inos);
                    break;
                }
            }
            moved.await;
        }
        Turn { leases: Arc::clone(self), session, inos }
    }
}

/// A place in the line, left when this is dropped.
struct Place<'a> {
    leases: &'a Leases,
    ticket: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leases.state.lock().line.retain(|(ticket, _)| *ticket != self.ticket);
        self.leases.moved.notify_waiters();
    }
}

/// Nobody but this session relies on these inodes, or changes them, as long as this lives.
pub(super) struct Turn {
    leases: Arc<Leases>,
    session: SessionId,
    inos: Vec<Ino>,
}

impl Turn {
    pub(super) fn inos(&self) -> &[Ino] {
        &self.inos
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        {
            let mut state = self.leases.state.lock();
            for ino in &self.inos {
                if let Some(inode) = state.inodes.get_mut(ino).filter(|i| i.turn == Some(self.session)) {
                    inode.turn = None;
                }
                state.tidy(*ino);
            }
        }
        self.leases.moved.notify_waiters();
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// A clock that stands still until it is set.
    #[derive(Default)]
    struct Hand(Mutex<Duration>);

    impl Clock for Hand {
        fn monotonic(&self) -> Duration {
            *self.0.lock()
        }
        fn wall(&self) -> Duration {
            *self.0.lock()
        }
    }

    fn leases() -> (Arc<Leases>, Arc<Hand>) {
        let hand = Arc::new(Hand::default());
        let leases = Leases::new(hand.clone(), Duration::from_secs(5), Duration::ZERO);
        (1..=3).for_each(|session| leases.begin(session));
        (Arc::new(leases), hand)
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_change_waits_for_the_word_of_others_and_gives_no_lease_meanwhile() {
        let (runtime, (leases, _)) = (runtime(), leases());
        let _inside = runtime.enter();
        assert!(leases.grant(1, 10) && leases.grant(2, 10) && leases.grant(2, 10));
        assert!(leases.turn_now(1, &[10]).is_none(), "another relies on it");
        let recalled = Mutex::new(Vec::new());
        let mut turn = pin!(leases.turn(1, vec![10, 11], |recalls| recalled.lock().push(recalls)));
        assert!(poll(turn.as_mut()).is_none());
        assert_eq!(*recalled.lock(), [Recalls::from([(2, vec![10])])], "not its own");
        assert!(!leases.grant(3, 10) && !leases.grant(2, 10), "it is about to change");
        assert!(!leases.renew(2), "it owes a word");
        assert!(poll(turn.as_mut()).is_none());
        assert_eq!(recalled.lock().len(), 1, "asked once");
        leases.give_back(2, &[10]);
        let turn = poll(turn.as_mut()).expect("nobody is in the way");
        assert!(leases.renew(2));
        assert!(leases.grant(1, 11), "whose turn it is");
        assert!(!leases.grant(2, 11));
        drop(turn);
        assert!(leases.grant(2, 11));
        assert_eq!((leases.held_by(1), leases.held_by(2)), (2, 1));
        leases.end(1);
        leases.give_back(2, &[11, 12]);
        assert!(leases.state.lock().inodes.is_empty() && leases.state.lock().leases == 0);
    }

    #[test]
    fn a_term_that_is_over_is_not_waited_for() {
        let (runtime, (leases, hand)) = (runtime(), leases());
        let _inside = runtime.enter();
        assert!(leases.grant(2, 10));
        *hand.0.lock() = Duration::from_secs(4);
        assert!(leases.renew(2));
        let mut turn = pin!(leases.turn(1, vec![10], |_| {}));
        *hand.0.lock() = Duration::from_secs(8);
        assert!(poll(turn.as_mut()).is_none());
        *hand.0.lock() = Duration::from_secs(9);
        leases.expire(&HashSet::from([1, 2, 3]));
        assert!(poll(turn.as_mut()).is_some());
        assert!(!leases.grant(2, 12), "nothing is heard of it");
        leases.begin(2);
        assert!(leases.grant(2, 12));
    }

    #[test]
    fn turns_come_in_order_and_never_wait_for_each_other() {
        let (runtime, (leases, _)) = (runtime(), leases());
        let _inside = runtime.enter();
        let first = leases.turn_now(1, &[1, 2]).expect("free");
        let mut second = pin!(leases.turn(2, vec![2, 3], |_| {}));
        assert!(poll(second.as_mut()).is_none());
        assert!(leases.turn_now(3, &[3]).is_none(), "the second stands in line for it");
        assert!(leases.turn_now(3, &[4]).is_some());
        let mut third = pin!(leases.turn(3, vec![3, 1], |_| {}));
        assert!(poll(third.as_mut()).is_none());
        drop(first);
        assert!(poll(third.as_mut()).is_none(), "not before the second");
        let second = poll(second.as_mut()).expect("its turn");
        drop(second);
        assert!(poll(third.as_mut()).is_some());
    }

    #[test]
    fn nothing_is_changed_while_leases_of_an_earlier_server_may_last() {
        let hand = Arc::new(Hand::default());
        let leases = Arc::new(Leases::new(hand.clone(), Duration::from_secs(5), Duration::from_secs(5)));
        assert!(leases.turn_now(1, &[1]).is_none());
        *hand.0.lock() = Duration::from_secs(5);
        assert!(leases.turn_now(1, &[1]).is_some());
    }
}
