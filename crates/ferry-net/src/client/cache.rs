//! What this client keeps of inodes on which it has a lease: attributes, and names in directories.
//!
//! * K1: nothing is used when the term is over. It ends a fixed time after the last ping that was answered was *sent*; what was kept
//!   then is gone, also if a later ping is answered.
//! * K2: an answer is kept only if nothing was given back (recalled, thrown out, a connection lost) since its request was made. `epoch`
//!   counts that, before and after the server is told: a request between the two may have been answered under a lease that is gone.
//! * K3: a change makes what is kept of the inodes that it touches unknown when it is sent. An answer to a request is not kept if a change of
//!   its own touched the inode meanwhile. `slots` say so by a hash of the number: two inodes that share one are kept less often.
//! * K4: a directory that is `complete` has no names but those that are kept; a name of which nothing is known is kept as that.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use ferry_device::Clock;
use ferry_fs::{Attr, Ino};
use parking_lot::Mutex;
use serde_json::Value;

use crate::message::{Known, Op, Outcome};

/// Inodes and names that are kept; beyond this half of the inodes are given back.
const KEPT_MAX: usize = 1 << 17;
/// A power of two.
const SLOTS: usize = 4096;

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Is(Ino),
    Absent,
    Unknown,
}

#[derive(Default)]
struct Node {
    attr: Option<Attr>,
    names: HashMap<Vec<u8>, Name>,
    complete: bool,
}

impl Node {
    fn name(&self, name: &[u8]) -> Name {
        let otherwise = if self.complete { Name::Absent } else { Name::Unknown };
        self.names.get(name).copied().unwrap_or(otherwise)
    }
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Changes of ours under way.
    changing: u32,
    /// When the last one began or ended.
    last: u64,
}

/// A moment, by two clocks: the first stands still while the machine sleeps, the second may be set.
#[derive(Clone, Copy)]
struct Moment {
    monotonic: Duration,
    wall: Duration,
}

impl Moment {
    fn now(clock: &dyn Clock) -> Self {
        Self { monotonic: clock.monotonic(), wall: clock.wall() }
    }

    fn since(self, earlier: Self) -> Duration {
        let slept = self.wall.saturating_sub(earlier.wall);
        self.monotonic.saturating_sub(earlier.monotonic).max(slept)
    }
}

struct State {
    nodes: HashMap<Ino, Node>,
    names: usize,
    /// Counts what was given back.
    epoch: u64,
    /// Counts beginnings and ends of our changes.
    moments: u64,
    slots: Vec<Slot>,
    /// Changes under way that touch inodes which we cannot name: nothing is used meanwhile.
    blind: u32,
    term: Duration,
    /// Leases last for a term from here.
    valid_from: Option<Moment>,
    /// When the pings were sent that are not answered yet.
    pings: VecDeque<Moment>,
    hits: u64,
    misses: u64,
    recalled: u64,
}

impl State {
    fn slot(&mut self, ino: Ino) -> &mut Slot {
        let hash = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        &mut self.slots[hash as usize & (SLOTS - 1)]
    }

    fn is_valid(&self, now: Moment) -> bool {
        self.valid_from.is_some_and(|from| now.since(from) < self.term)
    }

    fn drop_node(&mut self, ino: Ino) {
        let node = self.nodes.remove(&ino);
        self.names -= node.map_or(0, |node| node.names.len());
    }

    fn drop_all(&mut self) {
        self.nodes.clear();
        self.names = 0;
        self.epoch += 1;
    }

    fn set_name(&mut self, dir: Ino, name: &[u8], what: Name) {
        let node = self.nodes.entry(dir).or_default();
        if what == Name::Unknown && !node.complete {
            self.names -= usize::from(node.names.remove(name).is_some());
        } else {
            self.names += usize::from(node.names.insert(name.into(), what).is_none());
        }
    }

    /// Names that we are about to change, or do not know any more.
    fn unknow(&mut self, dir: Ino, name: &[u8]) {
        if self.nodes.contains_key(&dir) {
            self.set_name(dir, name, Name::Unknown);
        }
    }

    fn name(&self, dir: Ino, name: &[u8]) -> Name {
        self.nodes.get(&dir).map_or(Name::Unknown, |node| node.name(name))
    }

    /// Whether an answer that was asked for at `sight` may be kept of this inode.
    fn may_keep(&mut self, sight: Sight, ino: Ino) -> bool {
        let slot = *self.slot(ino);
        sight.epoch == self.epoch && slot.changing == 0 && slot.last <= sight.moment
    }

    fn keep_attr(&mut self, attr: &Attr) {
        self.nodes.entry(attr.ino).or_default().attr = Some(*attr);
    }

    /// A change is no longer under way.
    fn over(&mut self, touch: &mut Touch) {
        if std::mem::take(&mut touch.blind) {
            // Of what it has touched we know no more than that it may be any of them.
            self.blind -= 1;
            self.epoch += 1;
            self.nodes.values_mut().for_each(|node| node.attr = None);
        }
        self.moments += 1;
        let moment = self.moments;
        for ino in touch.inos.drain(..) {
            let slot = self.slot(ino);
            slot.changing -= 1;
            slot.last = moment;
        }
    }

    /// Inodes to give back.
    fn surplus(&mut self) -> Vec<Ino> {
        if self.nodes.len() + self.names <= KEPT_MAX {
            return Vec::new();
        }
        let half: Vec<Ino> = self.nodes.keys().copied().take(self.nodes.len().div_ceil(2)).collect();
        self.epoch += 1;
        half.iter().for_each(|ino| self.drop_node(*ino));
        half
    }
}

/// What was known when a request was made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sight {
    epoch: u64,
    moment: u64,
}

/// A change under way. Dropped without [`Cache::end`], it was not answered and never will be.
pub(super) struct Touch {
    cache: Arc<Cache>,
    epoch: u64,
    inos: Vec<Ino>,
    blind: bool,
    names: Vec<(Ino, Vec<u8>, Becomes)>,
}

impl Drop for Touch {
    fn drop(&mut self) {
        let cache = Arc::clone(&self.cache);
        cache.state.lock().over(self);
    }
}

/// What a name means after the change, if that is made.
#[derive(Clone, Copy)]
enum Becomes {
    /// What the change has made, or linked.
    Made,
    Name(Name),
}

/// All that is kept.
pub(super) struct Cache {
    state: Mutex<State>,
    clock: Arc<dyn Clock>,
}

impl Cache {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        let state = State {
            nodes: HashMap::new(),
            names: 0,
            epoch: 0,
            moments: 0,
            slots: vec![Slot::default(); SLOTS],
            blind: 0,
            term: Duration::ZERO,
            valid_from: None,
            pings: VecDeque::new(),
            hits: 0,
            misses: 0,
            recalled: 0,
        };
        Self { state: Mutex::new(state), clock }
    }

    /// The server is about to be greeted, or the connection is gone: nothing is kept.
    pub(super) fn drop_all(&self) {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        state.drop_all();
        state.valid_from = None;
        state.pings = VecDeque::from([now]);
    }

    /// The greeting, sent when [`Cache::drop_all`] was called, is answered.
    pub(super) fn welcomed(&self, term: Duration) {
        let mut state = self.state.lock();
        state.term = term;
        state.valid_from = state.pings.pop_front();
    }

    /// A ping is about to be sent.
    pub(super) fn pinged(&self) {
        let now = Moment::now(&*self.clock);
        self.state.lock().pings.push_back(now);
    }

    /// A ping was answered.
    pub(super) fn ponged(&self, renewed: bool) {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let Some(sent) = state.pings.pop_front() else { return };
        if !state.is_valid(now) {
            state.drop_all();
        }
        if renewed {
            state.valid_from = Some(sent);
        }
    }

    /// How long a lease lasts.
    pub(super) fn term(&self) -> Duration {
        self.state.lock().term
    }

    /// These are no longer kept. To be called before the server is told, and [`Cache::given_back`] behind it.
    pub(super) fn recall(&self, inos: &[Ino]) {
        let mut state = self.state.lock();
        state.recalled += inos.len() as u64;
        state.epoch += 1;
        inos.iter().for_each(|ino| state.drop_node(*ino));
    }

    /// The server was told.
    pub(super) fn given_back(&self) {
        self.state.lock().epoch += 1;
    }

    /// The attributes, if they are known.
    pub(super) fn attr(&self, ino: Ino) -> Option<Attr> {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let known = state.nodes.get(&ino).and_then(|node| node.attr);
        let known = known.filter(|_| state.blind == 0 && state.is_valid(now));
        *(if known.is_some() { &mut state.hits } else { &mut state.misses }) += 1;
        known
    }

    /// What a name means, if that is known, with its attributes; `Some(None)`: nothing.
    pub(super) fn lookup(&self, dir: Ino, name: &[u8]) -> Option<Option<Attr>> {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let known = match state.name(dir, name) {
            Name::Is(ino) => state.nodes.get(&ino).and_then(|node| node.attr).map(Some),
            Name::Absent => Some(None),
            Name::Unknown => None,
        };
        let known =
            known.filter(|_| state.blind == 0 && state.is_valid(now) && name != b"." && name != b"..");
        *(if known.is_some() { &mut state.hits } else { &mut state.misses }) += 1;
        known
    }

    /// A request is about to be made.
    pub(super) fn sight(&self) -> Sight {
        let state = self.state.lock();
        Sight { epoch: state.epoch, moment: state.moments }
    }

    /// Attributes have come, under a lease. Gives inodes to give back, as do the others.
    pub(super) fn learn_attr(&self, sight: Sight, attr: &Attr) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.blind == 0 && state.may_keep(sight, attr.ino) {
            state.keep_attr(attr);
        }
        state.surplus()
    }

    /// A name was looked up, under a lease of the directory.
    pub(super) fn learn_name(&self, sight: Sight, dir: Ino, name: &[u8], known: Option<&Known>) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.blind == 0 && state.may_keep(sight, dir) {
            state.set_name(dir, name, known.map_or(Name::Absent, |known| Name::Is(known.attr.ino)));
        }
        state.surplus()
    }

    /// The file was read: the server may have moved the access time.
    pub(super) fn was_read(&self, ino: Ino) {
        let mut state = self.state.lock();
        if let Some(node) = state.nodes.get_mut(&ino)
            && node.attr.is_some_and(|attr| attr.atime <= attr.mtime.max(attr.ctime))
        {
            node.attr = None;
        }
    }

    /// A change is about to be sent; `file` gives the inode of an open file. `None`: it touches nothing that is kept.
    pub(super) fn begin(self: &Arc<Self>, op: &Op, file: impl Fn(u64) -> Option<Ino>) -> Option<Touch> {
        let mut state = self.state.lock();
        let mut blind = false;
        let (mut inos, mut names) = (Vec::new(), Vec::new());
        let mut child = |state: &State, dir: Ino, name: &[u8]| {
            let found = state.name(dir, name);
            match found {
                Name::Is(ino) => inos.push(ino),
                Name::Absent => {}
                Name::Unknown => blind = true,
            }
            found
        };
        match op {
            Op::Setattr { ino, .. } | Op::Setxattr { ino, .. } | Op::Removexattr { ino, .. } => {
                inos.push(*ino)
            }
            Op::Open { ino, flags, kill_suidgid, .. } if *kill_suidgid || flags & libc::O_TRUNC != 0 => {
                inos.push(*ino);
            }
            Op::Mknod { parent, name, .. }
            | Op::Mkdir { parent, name, .. }
            | Op::Symlink { parent, name, .. } => {
                inos.push(*parent);
                names.push((*parent, name.clone(), Becomes::Made));
            }
            Op::Create { parent, name, .. } => {
                // A name that is there after all may be opened, and cut off.
                child(&state, *parent, name);
                inos.push(*parent);
                names.push((*parent, name.clone(), Becomes::Made));
            }
            Op::Link { ino, parent, name } => {
                inos.extend([*ino, *parent]);
                names.push((*parent, name.clone(), Becomes::Made));
            }
            Op::Unlink { parent, name } | Op::Rmdir { parent, name } => {
                child(&state, *parent, name);
                inos.push(*parent);
                names.push((*parent, name.clone(), Becomes::Name(Name::Absent)));
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => {
                let old = child(&state, *parent, name);
                let new = child(&state, *new_parent, new_name);
                inos.extend([*parent, *new_parent]);
                // Two names of one inode both stay.
                let moves =
                    matches!(old, Name::Is(_)) && new != Name::Unknown && old != new && !flags.exchange;
                let (left, taken) = if moves { (Name::Absent, old) } else { (Name::Unknown, Name::Unknown) };
                names.push((*parent, name.clone(), Becomes::Name(left)));
                names.push((*new_parent, new_name.clone(), Becomes::Name(taken)));
            }
            Op::Write { fh, .. } | Op::Fallocate { fh, .. } | Op::Copy { fh_out: fh, .. } => {
                inos.extend(file(*fh))
            }
            _ => return None,
        }
        inos.sort_unstable();
        inos.dedup();
        state.moments += 1;
        let moment = state.moments;
        for ino in &inos {
            let slot = state.slot(*ino);
            slot.changing += 1;
            slot.last = moment;
            if let Some(node) = state.nodes.get_mut(ino) {
                node.attr = None;
            }
        }
        names.iter().for_each(|(dir, name, _)| state.unknow(*dir, name));
        if blind {
            state.blind += 1;
            state.epoch += 1;
        }
        Some(Touch { cache: Arc::clone(self), epoch: state.epoch, inos, blind, names })
    }

    /// A change is answered: `after` are attributes that may be kept, `empty`: the directory that was made is.
    pub(super) fn end(&self, mut touch: Touch, outcome: &Outcome, after: &[Attr], empty: bool) -> Vec<Ino> {
        let mut state = self.state.lock();
        let names = std::mem::take(&mut touch.names);
        state.over(&mut touch);
        let begun = Sight { epoch: touch.epoch, moment: state.moments };
        // The ordered stream answers in order: if none of ours is under way, this is how they all have left it.
        for attr in after {
            if state.blind == 0 && state.may_keep(begun, attr.ino) {
                state.keep_attr(attr);
            }
        }
        let made = match outcome {
            Outcome::Entry { known: Some(known) } => Some(known.attr.ino),
            _ => None,
        };
        if !matches!(outcome, Outcome::Failed { .. }) {
            let leased = |ino: Ino| after.iter().any(|attr| attr.ino == ino);
            for (dir, name, becomes) in &names {
                let what = match becomes {
                    Becomes::Made => made.map_or(Name::Unknown, Name::Is),
                    Becomes::Name(name) => *name,
                };
                if leased(*dir) && state.may_keep(begun, *dir) {
                    state.set_name(*dir, name, what);
                }
            }
            if let Some(made) = made.filter(|made| empty && leased(*made) && state.may_keep(begun, *made)) {
                state.nodes.entry(made).or_default().complete = true;
            }
        }
        state.surplus()
    }

    /// For `ferry stats`.
    pub(super) fn json(&self) -> Value {
        let state = self.state.lock();
        Value::from_iter([
            ("inodes", Value::from(state.nodes.len())),
            ("names", state.names.into()),
            ("hits", state.hits.into()),
            ("misses", state.misses.into()),
            ("recalled", state.recalled.into()),
        ])
    }
}

#[cfg(test)]
mod tests;
