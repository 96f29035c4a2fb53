//! The cache's state under its lock: attributes and names under read leases, and what else follows
//! the same rules.

use crate::rt::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::rt::{Mutex, MutexGuard};
use ferry_env::Clock;
use ferry_env::planted::{Bug, is_planted};
use ferry_fs::{Attr, Ino, Timestamp, ToForget};
use serde_json::Value;

use crate::client::clock_reading::ClockReading;
use crate::client::contents::CONTENTS_MAX;
use crate::client::model::Model;
use crate::client::names::{Name, Names};
use crate::client::reservation::Reservation;
use crate::client::server_clock::ServerClock;
use crate::message::{self, Known, Op};

use super::ahead::Walks;
use super::asking::Asking;
use super::kernel_cached::{KernelCached, View};
use super::version::CacheVersion;

/// Inodes and names that are cached. Beyond this, half of the inodes are returned.
pub(super) const ENTRIES_MAX: usize = 1 << 17;
/// A power of two.
const SLOTS: usize = 4096;

#[derive(Default)]
pub(super) struct Node {
    pub(super) attr: Option<Attr>,
    pub(super) names: Names,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    /// Changes of ours in flight.
    pub(super) changing: u32,
    /// When the last one began or ended.
    pub(super) last: u64,
    /// When the last one began.
    pub(super) begun: u64,
}

/// What the lock of [`Cache`] protects.
pub(in crate::client) struct State {
    pub(super) nodes: HashMap<Ino, Node>,
    pub(super) names: usize,
    /// Counts returned leases.
    pub(super) returns: u64,
    /// Counts beginnings and ends of our changes.
    pub(super) events: u64,
    pub(super) slots: Vec<Slot>,
    /// Changes in flight that touch inodes which we cannot name: nothing is used meanwhile.
    pub(super) blind: u32,
    pub(super) term: Duration,
    /// Leases last for a term from here.
    pub(super) valid_from: Option<ClockReading>,
    /// When the server was greeted.
    pub(super) greeted: Option<ClockReading>,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) recalled: u64,
    pub(in crate::client) model: Model,
    pub(in crate::client) reservation: Reservation,
    pub(super) asking: Asking,
    pub(super) walks: Walks,
    pub(super) kernel_cached: KernelCached,
    pub(super) clock: ServerClock,
    /// Changes are acknowledged early, where that is possible. They are decided under this lock:
    /// once it is switched off, no more are.
    pub(in crate::client) asynchronous: bool,
}

impl State {
    pub(super) fn slot(&mut self, ino: Ino) -> &mut Slot {
        let hash = ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        &mut self.slots[hash as usize & (SLOTS - 1)]
    }

    /// Whether leases last.
    pub(in crate::client) fn is_valid(&self, now: ClockReading) -> bool {
        self.valid_from
            .is_some_and(|from| now.since(from) < self.term || is_planted(Bug::EndlessTerm))
    }

    pub(super) fn drop_node(&mut self, ino: Ino) {
        let node = self.nodes.remove(&ino);
        self.model.contents.drop(ino);
        self.names -= node.map_or(0, |node| node.names.len());
    }

    /// Nothing is known any more; gives the write leases that were held.
    pub(super) fn drop_all(&mut self, now: ClockReading) -> Vec<Ino> {
        self.kernel_cached.forget_all(now);
        self.nodes.clear();
        self.names = 0;
        self.returns += 1;
        self.asking.forget_all();
        self.walks.leave_all_out();
        self.model.clear()
    }

    pub(super) fn set_name(&mut self, dir: Ino, name: &[u8], what: Name) {
        if self.model.holds(dir) {
            return self.model.learn_name(dir, name, what);
        }
        let node = self.nodes.entry(dir).or_default();
        self.names = self.names.saturating_add_signed(node.names.set(name, what));
    }

    /// Names that we are about to change, or do not know any more.
    pub(super) fn unknow(&mut self, dir: Ino, name: &[u8]) {
        if self.nodes.contains_key(&dir) {
            self.set_name(dir, name, Name::Unknown);
        }
    }

    /// What a name means, as far as that is known.
    pub(in crate::client) fn name(&self, dir: Ino, name: &[u8]) -> Name {
        if self.model.holds(dir) {
            return self.model.name(dir, name);
        }
        self.nodes.get(&dir).map_or(Name::Unknown, |node| node.names.get(name))
    }

    /// The attributes, under whatever lease.
    pub(super) fn known_attr(&self, ino: Ino) -> Option<Attr> {
        let read = || self.nodes.get(&ino).and_then(|node| node.attr).filter(|_| self.blind == 0);
        self.model.attr(ino).or_else(read)
    }

    /// Whether there is a lease on an inode.
    pub(in crate::client) fn is_leased(&self, ino: Ino) -> bool {
        self.known_attr(ino).is_some()
    }

    /// The time at the server.
    pub(in crate::client) fn server_time(&mut self, now: ClockReading) -> Timestamp {
        self.clock.now(now.monotonic)
    }

    /// The newest change of what an operation is about to change, as far as that is known.
    pub(in crate::client) fn changed_at(&self, op: &Op, file: Option<Ino>) -> Timestamp {
        let info = op.info();
        let named = info.names().flat_map(|(dir, name)| {
            let target = if let Name::Is(ino) = self.name(dir, name) { Some(ino) } else { None };
            [Some(dir), target]
        });
        let inos = named.flatten().chain(info.inodes()).chain(file);
        inos.filter_map(|ino| self.known_attr(ino)).map(|attr| attr.ctime).max().unwrap_or_default()
    }

    /// This client has decided a change: earlier answers of the server are not cached.
    pub(in crate::client) fn decided(&mut self, touched: &[Ino]) {
        self.walks.changed(touched);
        self.events += 1;
        let event = self.events;
        for ino in touched {
            let slot = self.slot(*ino);
            (slot.last, slot.begun) = (event, event);
        }
    }

    /// Whether an answer that was requested at `version` may be cached for this inode.
    pub(super) fn may_keep(&mut self, version: CacheVersion, ino: Ino) -> bool {
        let slot = *self.slot(ino);
        let given_back = version.returns != self.returns || self.kernel_cached.is_withdrawn(ino);
        !given_back && slot.changing == 0 && slot.last <= version.event
    }

    /// The same of a name in a directory, or of what a file contains. Under a write lease only
    /// changes of our own matter.
    pub(super) fn may_keep_part(&mut self, version: CacheVersion, dir: Ino) -> bool {
        if !self.model.holds(dir) {
            return self.blind == 0 && self.may_keep(version, dir);
        }
        let slot = *self.slot(dir);
        slot.changing == 0 && slot.last <= version.event && self.model.held_since(dir, version.tick)
    }

    pub(super) fn keep_attr(&mut self, attr: &Attr) {
        if self.model.holds(attr.ino) {
            return;
        }
        self.nodes.entry(attr.ino).or_default().attr = Some(*attr);
    }

    pub(super) fn version(&self) -> CacheVersion {
        CacheVersion { returns: self.returns, event: self.events, tick: self.model.tick() }
    }

    /// Inodes to give back.
    pub(super) fn surplus(&mut self) -> Vec<Ino> {
        if self.nodes.len() + self.names <= ENTRIES_MAX {
            return Vec::new();
        }
        let half: Vec<Ino> =
            self.nodes.keys().copied().take(self.nodes.len().div_ceil(2)).collect();
        self.returns += 1;
        half.iter().for_each(|ino| self.drop_node(*ino));
        half
    }
}

fn is_file(attr: &Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFREG
}

/// All that is cached.
pub(in crate::client) struct Cache {
    pub(super) state: Mutex<State>,
    pub(super) clock: Arc<dyn Clock>,
}

impl Cache {
    pub(in crate::client) fn new(clock: Arc<dyn Clock>) -> Self {
        let state = State {
            nodes: HashMap::default(),
            names: 0,
            returns: 0,
            events: 0,
            slots: vec![Slot::default(); SLOTS],
            blind: 0,
            term: Duration::ZERO,
            valid_from: None,
            greeted: None,
            hits: 0,
            misses: 0,
            recalled: 0,
            model: Model::default(),
            reservation: Reservation::default(),
            asking: Asking::default(),
            walks: Walks::default(),
            kernel_cached: KernelCached::default(),
            clock: ServerClock::default(),
            asynchronous: false,
        };
        Self { state: Mutex::new(state), clock }
    }

    /// The server is about to be greeted, or the connection is closed: nothing stays cached.
    pub(in crate::client) fn drop_all(&self) {
        let now = ClockReading::now(&*self.clock);
        let mut state = self.state.lock();
        state.drop_all(now);
        state.valid_from = None;
        state.greeted = Some(now);
    }

    /// The greeting, sent when [`Cache::drop_all`] was called, is answered: how long a lease lasts,
    /// and the server's clock.
    pub(in crate::client) fn welcomed(&self, term: Duration, server: Timestamp) {
        let now = ClockReading::now(&*self.clock);
        let mut state = self.state.lock();
        state.term = term;
        state.valid_from = state.greeted.take();
        let asked = state.valid_from.map_or(now.monotonic, |sent| sent.monotonic);
        state.clock.heard(asked, now.monotonic, server);
    }

    /// A ping that was sent at this time was answered, with the time at the server. Whether what
    /// was cached is dropped, because the term had ended.
    pub(in crate::client) fn ponged(
        &self,
        sent: ClockReading,
        renewed: bool,
        server: Timestamp,
    ) -> bool {
        let now = ClockReading::now(&*self.clock);
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
    pub(in crate::client) fn term(&self) -> Duration {
        self.state.lock().term
    }

    /// To decide, and to put what was decided into the ordered stream.
    pub(in crate::client) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Now, as terms are reckoned.
    pub(in crate::client) fn now(&self) -> ClockReading {
        ClockReading::now(&*self.clock)
    }

    /// The attributes, if they are known, and how long the kernel may keep them.
    pub(in crate::client) fn attr(&self, ino: Ino) -> Option<(Attr, Duration)> {
        let now = ClockReading::now(&*self.clock);
        let mut state = self.state.lock();
        let known = state.known_attr(ino).filter(|_| state.is_valid(now));
        *(if known.is_some() { &mut state.hits } else { &mut state.misses }) += 1;
        known.map(|attr| {
            (attr, state.show(ino, None, now).map_or(Duration::ZERO, |view| view.valid))
        })
    }

    /// What the kernel is told of an inode that it has asked for, under this name, if it may keep
    /// that.
    pub(in crate::client) fn show(&self, ino: Ino, name: Option<(Ino, &[u8])>) -> Option<View> {
        let now = ClockReading::now(&*self.clock);
        self.state.lock().show(ino, name, now)
    }

    /// What a name means, if that is known, with its attributes; `Some(None)`: nothing.
    pub(in crate::client) fn lookup(&self, dir: Ino, name: &[u8]) -> Option<Option<Attr>> {
        let now = ClockReading::now(&*self.clock);
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
    pub(in crate::client) fn version(&self) -> CacheVersion {
        let state = self.state.lock();
        state.version()
    }

    /// Attributes have come, under a lease. Gives inodes to give back, as do the others.
    pub(in crate::client) fn learn_attr(&self, version: CacheVersion, attr: &Attr) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.blind == 0 && state.may_keep(version, attr.ino) {
            state.keep_attr(attr);
        }
        state.surplus()
    }

    /// Attributes as an answer should show them: ours, where they are newer.
    pub(in crate::client) fn newest(&self, attr: Attr) -> Attr {
        self.state.lock().model.attr(attr.ino).unwrap_or(attr)
    }

    /// Whether an inode is known to have no extended attributes.
    pub(in crate::client) fn is_plain(&self, ino: Ino) -> bool {
        let now = ClockReading::now(&*self.clock);
        let state = self.state.lock();
        state.is_valid(now) && state.model.is_plain(ino)
    }

    /// Reads what is known of a file's contents; `quiet`: and moves no access time.
    pub(in crate::client) fn read(
        &self,
        ino: Ino,
        offset: u64,
        out: &mut [u8],
        quiet: bool,
    ) -> Option<usize> {
        let now = ClockReading::now(&*self.clock);
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
    pub(in crate::client) fn map(&self, ino: Ino) -> bool {
        let now = ClockReading::now(&*self.clock);
        self.state.lock().map(ino, now)
    }

    /// What the kernel has to forget of what is over without anybody's word.
    pub(in crate::client) fn over(&self) -> ToForget {
        let now = ClockReading::now(&*self.clock);
        let mut state = self.state.lock();
        if !state.is_valid(now) {
            state.kernel_cached.forget_all(now);
        }
        state.take_to_forget()
    }

    /// A file is about to be read from its beginning: how long it is, if it is leased and its
    /// contents may be cached.
    pub(in crate::client) fn before_reading(&self, ino: Ino) -> Option<(u64, CacheVersion)> {
        let now = ClockReading::now(&*self.clock);
        let state = self.state.lock();
        let attr =
            state.known_attr(ino).filter(|attr| is_file(attr) && attr.size <= CONTENTS_MAX)?;
        state.is_valid(now).then(|| (attr.size, state.version()))
    }

    /// A file was read from its beginning. It was leased at `version`, before the request.
    pub(in crate::client) fn learn_contents(&self, version: CacheVersion, ino: Ino, bytes: &[u8]) {
        let mut state = self.state.lock();
        let whole = state
            .known_attr(ino)
            .is_some_and(|attr| is_file(&attr) && attr.size == bytes.len() as u64);
        if whole && state.may_keep_part(version, ino) {
            state.model.contents.set(ino, bytes.to_vec());
        }
    }

    /// The names of a directory, if all are known: a cookie says where the listing goes on.
    pub(in crate::client) fn list(&self, dir: Ino) -> Option<Arc<[message::Name]>> {
        let now = ClockReading::now(&*self.clock);
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
    pub(in crate::client) fn target(&self, ino: Ino) -> Option<Vec<u8>> {
        let now = ClockReading::now(&*self.clock);
        let state = self.state.lock();
        state.model.target(ino).filter(|_| state.is_valid(now))
    }

    /// Whether there is a write lease on an inode.
    pub(in crate::client) fn holds(&self, ino: Ino) -> bool {
        self.state.lock().model.holds(ino)
    }

    /// A name was looked up, under a lease of the directory.
    pub(in crate::client) fn learn_name(
        &self,
        version: CacheVersion,
        dir: Ino,
        name: &[u8],
        known: Option<&Known>,
    ) -> Vec<Ino> {
        let mut state = self.state.lock();
        if state.may_keep_part(version, dir) {
            state.set_name(dir, name, known.map_or(Name::Absent, |known| Name::Is(known.attr.ino)));
        }
        state.surplus()
    }

    /// The file was read: the server may have moved the access time.
    pub(in crate::client) fn was_read(&self, ino: Ino) {
        let now = ClockReading::now(&*self.clock);
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
    pub(in crate::client) fn json(&self) -> Value {
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
