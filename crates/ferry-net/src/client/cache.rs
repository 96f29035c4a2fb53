//! What this client keeps of inodes on which it has a lease: attributes, and names in directories.
//!
//! * CACHE-1: nothing is used when the term is over. It ends a fixed time after the last ping that
//!   was answered was *sent*; what was kept then is gone, also if a later ping is answered.
//! * CACHE-2: an answer is kept only if nothing was given back (recalled, thrown out, a connection
//!   lost) since its request was made. `epoch` counts that, before and after the server is told: a
//!   request between the two may have been answered under a lease that is gone.
//! * CACHE-3: a change makes what is kept of the inodes that it touches unknown when it is sent. An
//!   answer to a request is not kept if a change of its own touched the inode meanwhile. `slots`
//!   say so by a hash of the number: two inodes that share one are kept less often.
//! * CACHE-4: a directory that is `complete` has no names but those that are kept; a name of which
//!   nothing is known is kept as that.
//! * CACHE-5: what is under a write lease is in the `model` and not here; nothing that the server
//!   says of it is taken over, for our own changes may be on their way.
//! * CACHE-6: this lock comes before that of the link, and that before the one of the tables: what
//!   is decided here and what is put into the ordered stream have the same order.
//! * CACHE-7: a read lease covers contents too: nobody changes a file whose readers have not given
//!   their leases back. Contents that were read are kept by the same rules as attributes, and go
//!   where those become unknown; but not where only the access time has moved.

use crate::rt::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::rt::{Mutex, MutexGuard};
use ferry_env::Clock;
use ferry_fs::{Attr, Ino, Timestamp, ToForget};
use serde_json::Value;

use super::contents::CONTENTS_MAX;
use super::model::{Model, Name, Names};
use super::purse::Purse;
use super::server_clock::ServerClock;
use crate::message::{self, Known, Op};

mod ahead;
mod asking;
mod changes;
mod shown;

use ahead::Walks;
use asking::Asking;
pub(super) use changes::Touch;
use shown::Shown;
pub(super) use shown::{FullName, NAME_SHOWN_MAX, SHOWN_MAX, View, rename_all};

/// Inodes and names that are kept; beyond this half of the inodes are given back.
const KEPT_MAX: usize = 1 << 17;
/// A power of two.
const SLOTS: usize = 4096;

#[derive(Default)]
struct Node {
    attr: Option<Attr>,
    names: Names,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Changes of ours under way.
    changing: u32,
    /// When the last one began or ended.
    last: u64,
    /// When the last one began.
    begun: u64,
}

/// A moment, by two clocks: the first stands still while the machine sleeps, the second may be set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    monotonic: Duration,
    wall: Duration,
}

impl Moment {
    pub(super) fn now(clock: &dyn Clock) -> Self {
        Self { monotonic: clock.monotonic(), wall: clock.wall() }
    }

    #[cfg(test)]
    pub(super) fn at(time: Duration) -> Self {
        Self { monotonic: time, wall: time }
    }

    pub(super) fn since(self, earlier: Self) -> Duration {
        let slept = self.wall.saturating_sub(earlier.wall);
        self.monotonic.saturating_sub(earlier.monotonic).max(slept)
    }
}

/// What the lock of [`Cache`] protects.
pub(super) struct State {
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
    /// When the server was greeted.
    greeted: Option<Moment>,
    hits: u64,
    misses: u64,
    recalled: u64,
    pub(super) model: Model,
    pub(super) purse: Purse,
    asking: Asking,
    walks: Walks,
    shown: Shown,
    clock: ServerClock,
}

impl State {
    fn slot(&mut self, ino: Ino) -> &mut Slot {
        let hash = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        &mut self.slots[hash as usize & (SLOTS - 1)]
    }

    /// Whether leases last.
    pub(super) fn is_valid(&self, now: Moment) -> bool {
        self.valid_from.is_some_and(|from| now.since(from) < self.term)
    }

    fn drop_node(&mut self, ino: Ino) {
        let node = self.nodes.remove(&ino);
        self.model.contents.drop(ino);
        self.names -= node.map_or(0, |node| node.names.len());
    }

    /// Nothing is known any more; gives the write leases that were held.
    fn drop_all(&mut self, now: Moment) -> Vec<Ino> {
        self.shown.forget_all(now);
        self.nodes.clear();
        self.names = 0;
        self.epoch += 1;
        self.asking.forget_all();
        self.walks.leave_all_out();
        self.model.clear()
    }

    fn set_name(&mut self, dir: Ino, name: &[u8], what: Name) {
        if self.model.holds(dir) {
            return self.model.learn_name(dir, name, what);
        }
        let node = self.nodes.entry(dir).or_default();
        self.names = self.names.saturating_add_signed(node.names.set(name, what));
    }

    /// Names that we are about to change, or do not know any more.
    fn unknow(&mut self, dir: Ino, name: &[u8]) {
        if self.nodes.contains_key(&dir) {
            self.set_name(dir, name, Name::Unknown);
        }
    }

    /// What a name means, as far as that is known.
    pub(super) fn name(&self, dir: Ino, name: &[u8]) -> Name {
        if self.model.holds(dir) {
            return self.model.name(dir, name);
        }
        self.nodes.get(&dir).map_or(Name::Unknown, |node| node.names.get(name))
    }

    /// The attributes, under whatever lease.
    fn known_attr(&self, ino: Ino) -> Option<Attr> {
        let read = || self.nodes.get(&ino).and_then(|node| node.attr).filter(|_| self.blind == 0);
        self.model.attr(ino).or_else(read)
    }

    /// Whether there is a lease on an inode.
    pub(super) fn is_leased(&self, ino: Ino) -> bool {
        self.known_attr(ino).is_some()
    }

    /// The time at the server.
    pub(super) fn server_time(&mut self, now: Moment) -> Timestamp {
        self.clock.now(now.monotonic)
    }

    /// The newest change of what an operation is about to change, as far as that is known.
    pub(super) fn changed_at(&self, op: &Op, file: Option<Ino>) -> Timestamp {
        let info = op.info();
        let named = info.names().flat_map(|(dir, name)| {
            let target = if let Name::Is(ino) = self.name(dir, name) { Some(ino) } else { None };
            [Some(dir), target]
        });
        let inos = named.flatten().chain(info.inodes()).chain(file);
        inos.filter_map(|ino| self.known_attr(ino)).map(|attr| attr.ctime).max().unwrap_or_default()
    }

    /// A change of ours was decided here: what the server has answered before is not kept.
    pub(super) fn decided(&mut self, touched: &[Ino]) {
        self.walks.changed(touched);
        self.moments += 1;
        let moment = self.moments;
        for ino in touched {
            let slot = self.slot(*ino);
            (slot.last, slot.begun) = (moment, moment);
        }
    }

    /// Whether an answer that was asked for at `sight` may be kept of this inode.
    fn may_keep(&mut self, sight: Sight, ino: Ino) -> bool {
        let slot = *self.slot(ino);
        let given_back = sight.epoch != self.epoch || self.shown.is_withdrawn(ino);
        !given_back && slot.changing == 0 && slot.last <= sight.moment
    }

    /// The same of a name in a directory, or of what a file contains. Under a write lease only
    /// changes of our own matter.
    fn may_keep_part(&mut self, sight: Sight, dir: Ino) -> bool {
        if !self.model.holds(dir) {
            return self.blind == 0 && self.may_keep(sight, dir);
        }
        let slot = *self.slot(dir);
        slot.changing == 0 && slot.last <= sight.moment && self.model.held_since(dir, sight.tick)
    }

    fn keep_attr(&mut self, attr: &Attr) {
        if self.model.holds(attr.ino) {
            return;
        }
        self.nodes.entry(attr.ino).or_default().attr = Some(*attr);
    }

    fn sight(&self) -> Sight {
        Sight { epoch: self.epoch, moment: self.moments, tick: self.model.tick() }
    }

    /// Inodes to give back.
    fn surplus(&mut self) -> Vec<Ino> {
        if self.nodes.len() + self.names <= KEPT_MAX {
            return Vec::new();
        }
        let half: Vec<Ino> =
            self.nodes.keys().copied().take(self.nodes.len().div_ceil(2)).collect();
        self.epoch += 1;
        half.iter().for_each(|ino| self.drop_node(*ino));
        half
    }
}

fn is_file(attr: &Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFREG
}

/// What was known when a request was made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sight {
    epoch: u64,
    moment: u64,
    tick: u64,
}

/// All that is kept.
pub(super) struct Cache {
    state: Mutex<State>,
    clock: Arc<dyn Clock>,
}

impl Cache {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        let state = State {
            nodes: HashMap::default(),
            names: 0,
            epoch: 0,
            moments: 0,
            slots: vec![Slot::default(); SLOTS],
            blind: 0,
            term: Duration::ZERO,
            valid_from: None,
            greeted: None,
            hits: 0,
            misses: 0,
            recalled: 0,
            model: Model::default(),
            purse: Purse::default(),
            asking: Asking::default(),
            walks: Walks::default(),
            shown: Shown::default(),
            clock: ServerClock::default(),
        };
        Self { state: Mutex::new(state), clock }
    }

    /// The server is about to be greeted, or the connection is gone: nothing is kept.
    pub(super) fn drop_all(&self) {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        state.drop_all(now);
        state.valid_from = None;
        state.greeted = Some(now);
    }

    /// The greeting, sent when [`Cache::drop_all`] was called, is answered: how long a lease lasts,
    /// and the server's clock.
    pub(super) fn welcomed(&self, term: Duration, server: Timestamp) {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        state.term = term;
        state.valid_from = state.greeted.take();
        let asked = state.valid_from.map_or(now.monotonic, |sent| sent.monotonic);
        state.clock.heard(asked, now.monotonic, server);
    }

    /// A ping that was sent at this time was answered, with the time at the server. Whether what
    /// was kept is gone, for the term was over.
    pub(super) fn ponged(&self, sent: Moment, renewed: bool, server: Timestamp) -> bool {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        state.clock.heard(sent.monotonic, now.monotonic, server);
        let over = !state.is_valid(now);
        if over {
            state.drop_all(now);
        }
        if renewed {
            state.valid_from = Some(sent);
        }
        over
    }

    /// How long a lease lasts.
    pub(super) fn term(&self) -> Duration {
        self.state.lock().term
    }

    /// To decide, and to put what was decided into the ordered stream.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Now, as terms are reckoned.
    pub(super) fn now(&self) -> Moment {
        Moment::now(&*self.clock)
    }

    /// The attributes, if they are known, and how long the kernel may keep them.
    pub(super) fn attr(&self, ino: Ino) -> Option<(Attr, Duration)> {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let known = state.known_attr(ino).filter(|_| state.is_valid(now));
        *(if known.is_some() { &mut state.hits } else { &mut state.misses }) += 1;
        known.map(|attr| {
            (attr, state.show(ino, None, now).map_or(Duration::ZERO, |view| view.valid))
        })
    }

    /// What the kernel is told of an inode that it has asked for, under this name, if it may keep
    /// that.
    pub(super) fn show(&self, ino: Ino, name: Option<(Ino, &[u8])>) -> Option<View> {
        let now = Moment::now(&*self.clock);
        self.state.lock().show(ino, name, now)
    }

    /// What a name means, if that is known, with its attributes; `Some(None)`: nothing.
    pub(super) fn lookup(&self, dir: Ino, name: &[u8]) -> Option<Option<Attr>> {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let known = match state.name(dir, name) {
            Name::Is(ino) => state.known_attr(ino).map(Some),
            Name::Absent => Some(None),
            Name::Unknown => None,
        };
        let sure = state.blind == 0 || state.model.holds(dir);
        let known = known.filter(|_| sure && state.is_valid(now) && name != b"." && name != b"..");
        *(if known.is_some() { &mut state.hits } else { &mut state.misses }) += 1;
        known
    }

    /// A request is about to be made.
    pub(super) fn sight(&self) -> Sight {
        let state = self.state.lock();
        state.sight()
    }

    /// Attributes have come, under a lease. Gives inodes to give back, as do the others.
    pub(super) fn learn_attr(&self, sight: Sight, attr: &Attr) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.blind == 0 && state.may_keep(sight, attr.ino) {
            state.keep_attr(attr);
        }
        state.surplus()
    }

    /// Attributes as an answer should show them: ours, where they are newer.
    pub(super) fn newest(&self, attr: Attr) -> Attr {
        self.state.lock().model.attr(attr.ino).unwrap_or(attr)
    }

    /// Whether an inode is known to have no extended attributes.
    pub(super) fn is_plain(&self, ino: Ino) -> bool {
        let now = Moment::now(&*self.clock);
        let state = self.state.lock();
        state.is_valid(now) && state.model.is_plain(ino)
    }

    /// Reads what is known of a file's contents; `quiet`: and moves no access time.
    pub(super) fn read(&self, ino: Ino, offset: u64, out: &mut [u8], quiet: bool) -> Option<usize> {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        if !state.is_valid(now) || state.blind > 0 && !state.model.holds(ino) {
            return None;
        }
        let len = state.model.read(ino, offset, out)?;
        if !quiet {
            let at = state.server_time(now);
            state.model.was_read(ino, at);
        }
        Some(len)
    }

    /// The kernel asks for contents to keep them; `false`: it may not.
    pub(super) fn map(&self, ino: Ino) -> bool {
        let now = Moment::now(&*self.clock);
        self.state.lock().map(ino, now)
    }

    /// What the kernel has to forget of what is over without anybody's word.
    pub(super) fn over(&self) -> ToForget {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        if !state.is_valid(now) {
            state.shown.forget_all(now);
        }
        state.take_to_forget()
    }

    /// A file is about to be read from its beginning: how long it is, if it is leased and its
    /// contents may be kept.
    pub(super) fn before_reading(&self, ino: Ino) -> Option<(u64, Sight)> {
        let now = Moment::now(&*self.clock);
        let state = self.state.lock();
        let attr =
            state.known_attr(ino).filter(|attr| is_file(attr) && attr.size <= CONTENTS_MAX)?;
        state.is_valid(now).then(|| (attr.size, state.sight()))
    }

    /// A file was read from its beginning; it was leased at `sight`, before that was asked for.
    pub(super) fn learn_contents(&self, sight: Sight, ino: Ino, bytes: &[u8]) {
        let mut state = self.state.lock();
        let whole = state
            .known_attr(ino)
            .is_some_and(|attr| is_file(&attr) && attr.size == bytes.len() as u64);
        if whole && state.may_keep_part(sight, ino) {
            state.model.contents.set(ino, bytes.to_vec());
        }
    }

    /// The names of a directory, if all are known: a cookie says where the listing goes on.
    pub(super) fn list(&self, dir: Ino) -> Option<Arc<[message::Name]>> {
        let now = Moment::now(&*self.clock);
        let state = self.state.lock();
        if !state.is_valid(now) {
            return None;
        }
        if state.model.holds(dir) {
            return state.model.list(dir);
        }
        let node = state.nodes.get(&dir).filter(|_| state.blind == 0)?;
        node.names.whole().map(|whole| Arc::clone(&whole.names))
    }

    /// A symbolic link's target, if it is known.
    pub(super) fn target(&self, ino: Ino) -> Option<Vec<u8>> {
        let now = Moment::now(&*self.clock);
        let state = self.state.lock();
        state.model.target(ino).filter(|_| state.is_valid(now))
    }

    /// Whether there is a write lease on an inode.
    pub(super) fn holds(&self, ino: Ino) -> bool {
        self.state.lock().model.holds(ino)
    }

    /// A name was looked up, under a lease of the directory.
    pub(super) fn learn_name(
        &self,
        sight: Sight,
        dir: Ino,
        name: &[u8],
        known: Option<&Known>,
    ) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.may_keep_part(sight, dir) {
            state.set_name(dir, name, known.map_or(Name::Absent, |known| Name::Is(known.attr.ino)));
        }
        state.surplus()
    }

    /// The file was read: the server may have moved the access time.
    pub(super) fn was_read(&self, ino: Ino) {
        let now = Moment::now(&*self.clock);
        let mut state = self.state.lock();
        let at = state.server_time(now);
        state.model.was_read(ino, at);
        if let Some(node) = state.nodes.get_mut(&ino)
            && node.attr.is_some_and(|attr| attr.atime <= attr.mtime.max(attr.ctime))
        {
            node.attr = None;
        }
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
            ("held_inodes", state.model.len().into()),
            ("held_names", state.model.names().into()),
            ("walks", state.walks.asked.into()),
            ("walked", state.walks.brought.into()),
            ("contents_bytes", state.model.contents.bytes().into()),
        ])
    }
}

#[cfg(test)]
mod tests;
