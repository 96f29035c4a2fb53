//! Which inodes are in memory whole, and what is remembered of those that are not.
//!
//! An inode number is in one of three states:
//!
//! * *absent*: the kernel does not know it, and nothing of it is in memory;
//! * *resident*: the inode is in memory whole;
//! * *remembered*: the kernel knows it, and [`Remembered`] is all that is in memory. The rest is
//!   read again from the journal when a request names the number.
//!
//! All transitions are in this file, under the lock of the number's shard:
//!
//! * RESIDENT-1. A number is never resident and remembered, so no lookup is counted twice or lost.
//! * RESIDENT-2. An inode leaves only while nobody else refers to it. References are taken under
//!   the shard's lock, so a count of one stays one. (The cache and read-ahead have weak references
//!   of their own. What they do to an inode that has left concerns only what left with it.)
//! * RESIDENT-3. An inode leaves only if the journal has all of it ([`Store::part`] says so). An
//!   inode that comes back counts as changed by the newest context that changed any that left, so
//!   an fsync never forces too little.
//!
//! An inode has no generation: its number is never given to another inode (`local/counters.rs`).
//!
//! An inode is read without the shard's lock, by one thread: those that want the same one wait for
//! it, those that want others do not. To be deleted an inode must be resident, so one that is there
//! is not deleted while it is read. A number may be given out while it is read, and that inode be
//! deleted: what was read of it counts no more ([`Shard::remove`]).
//!
//! A shard has a queue of its residents, the oldest first. Each one that is added looks at a few at
//! the front: one that was used since the last look goes to the back, another one leaves. So the
//! work of a request is bounded, and one walk over all files does not drive out what is in use.

use crate::api::Ino;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, Ordering, fence, lock, wait_for};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// So many residents are looked at for each one that is added.
pub const STEPS: usize = 4;
/// A table of what is remembered that is emptier than a quarter shrinks, if it has room for so
/// many.
const SHRINK_MIN: usize = 256;

/// What is remembered of an inode: the lookups that the kernel has not taken back, and whether the
/// kernel has mapped it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered(u32);

impl Remembered {
    const MAPPED: u32 = 1 << 31;
    /// So many lookups are counted.
    pub const MOST: u64 = Self::MAPPED as u64 - 1;

    /// `None`: there are too many lookups.
    pub fn new(lookups: u64, mapped: bool) -> Option<Self> {
        let lookups = u32::try_from(lookups).ok().filter(|count| count & Self::MAPPED == 0)?;
        Some(Self(lookups | if mapped { Self::MAPPED } else { 0 }))
    }

    /// Lookups that the kernel has not taken back.
    pub fn lookups(self) -> u64 {
        u64::from(self.0 & !Self::MAPPED)
    }

    /// The kernel has mapped it.
    pub fn is_mapped(self) -> bool {
        self.0 & Self::MAPPED != 0
    }
}

/// Whether a resident may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// It leaves; this is remembered.
    Leaves(Remembered),
    /// It stays for now.
    Stays,
    /// It stays until its times are logged, which nobody else will do.
    Behind,
}

/// Where inodes come from. `part` is called under a shard's lock: it waits for no lock of an inode.
pub trait Store {
    /// An inode in memory.
    type Inode;
    /// Why one could not be read.
    type Error;
    /// An error where the caller must not wait until another thread has read the inode.
    fn may_wait(&self) -> Result<(), Self::Error>;
    /// Reads an inode; `None`: there is none. Waits for no lock of an inode.
    fn load(&self, ino: Ino) -> Result<Option<Self::Inode>, Self::Error>;
    /// Whether an inode that nobody refers to may leave.
    fn part(&self, inode: &Self::Inode) -> Parting;
    /// The newest context that changed the inode.
    fn newest_change(&self, inode: &Self::Inode) -> u64;
    /// The inode is back: what was remembered, and the newest context that may have changed it.
    fn restore(&self, inode: &Self::Inode, known: Remembered, newest_change: u64);
    /// A request names the inode.
    fn note_use(&self, inode: &Self::Inode);
    /// Whether a request has named it since the last call.
    fn take_used(&self, inode: &Self::Inode) -> bool;
}

/// Inodes that a call has moved; they are dropped without the shard's lock.
pub struct Moved<I> {
    /// They have left.
    pub left: Vec<Arc<I>>,
    /// They are resident, and their times are to be logged.
    pub behind: Vec<Arc<I>>,
}

impl<I> Default for Moved<I> {
    fn default() -> Self {
        Self { left: Vec::new(), behind: Vec::new() }
    }
}

/// Inode numbers are dense, and those of one shard have equal low bits: the hash spreads the
/// others.
#[derive(Default)]
pub struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_right(32)
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0 << 8 | u64::from(*b);
        }
    }
    fn write_u32(&mut self, v: u32) {
        self.0 = self.0 << 32 | u64::from(v);
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = v;
    }
}

/// An inode number in two halves, so that it and what is remembered take twelve bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Half(u32, u32);

impl From<Ino> for Half {
    fn from(ino: Ino) -> Self {
        Self((ino >> 32) as u32, ino as u32)
    }
}

impl From<Half> for Ino {
    fn from(Half(high, low): Half) -> Self {
        Self::from(high) << 32 | Self::from(low)
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<InoHasher>>;

/// The bytes of an entry of the table of what is remembered, with its byte of control.
const ENTRY_BYTES: usize = size_of::<(Half, Remembered)>() + 1;
const _: () = assert!(ENTRY_BYTES == 13);

struct State<I> {
    resident: Map<Ino, Arc<I>>,
    remembered: Map<Half, Remembered>,
    /// Those that a thread is reading.
    loading: Vec<Ino>,
    /// Each resident once, the oldest first; and numbers of some that were removed.
    queue: VecDeque<Ino>,
    /// The newest context that changed one that left.
    newest_left: u64,
}

impl<I> State<I> {
    fn admit(&mut self, ino: Ino, inode: &Arc<I>) {
        let before = self.resident.insert(ino, Arc::clone(inode));
        assert!(before.is_none(), "inode {ino} was handed out twice");
        self.queue.push_back(ino);
    }

    fn remember(&mut self, ino: Ino, known: Remembered) {
        if known.lookups() > 0 {
            let before = self.remembered.insert(ino.into(), known);
            assert!(before.is_none(), "inode {ino} was resident and remembered");
        }
    }

    fn recall(&mut self, ino: Ino) -> Remembered {
        let known = self.remembered.remove(&ino.into()).unwrap_or_default();
        let (len, capacity) = (self.remembered.len(), self.remembered.capacity());
        if capacity >= SHRINK_MIN && len < capacity / 4 {
            self.remembered.shrink_to(capacity / 2);
        }
        known
    }

    /// Looks at up to `steps` residents if there are more than `most`.
    fn make_room(
        &mut self,
        store: &impl Store<Inode = I>,
        most: usize,
        steps: usize,
        moved: &mut Moved<I>,
    ) {
        for _ in 0..steps {
            if self.queue.len() <= most {
                return;
            }
            let Some(ino) = self.queue.pop_front() else { return };
            let Some(inode) = self.resident.get(&ino) else { continue };
            let over = self.resident.len() > most;
            if over && Arc::strong_count(inode) == 1 && !store.take_used(inode) {
                // Whatever was done through a reference that is gone is seen from here on.
                fence(Ordering::Acquire);
                match store.part(inode) {
                    Parting::Leaves(known) => {
                        self.newest_left = self.newest_left.max(store.newest_change(inode));
                        moved.left.extend(self.resident.remove(&ino));
                        self.remember(ino, known);
                        continue;
                    }
                    Parting::Behind => moved.behind.push(Arc::clone(inode)),
                    Parting::Stays => {}
                }
            }
            self.queue.push_back(ino);
        }
    }
}

/// How much a shard holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Inodes in memory whole.
    pub resident: usize,
    /// Inodes that the kernel knows, and that are not.
    pub remembered: usize,
    /// Length of the queue.
    pub queued: usize,
    /// Bytes of the table of what is remembered.
    pub remembered_bytes: usize,
}

/// The inodes whose numbers have one remainder.
pub struct Shard<I> {
    state: Mutex<State<I>>,
    /// An inode was read.
    loaded: Condvar,
}

impl<I> Default for Shard<I> {
    fn default() -> Self {
        let state = State {
            resident: Map::default(),
            remembered: Map::default(),
            loading: Vec::new(),
            queue: VecDeque::new(),
            newest_left: 0,
        };
        Self { state: Mutex::new(state), loaded: Condvar::new() }
    }
}

impl<I> Shard<I> {
    /// The inode, read if it is not resident; `None`: it does not exist. If more than `most` are
    /// resident then, some leave.
    pub fn get<S: Store<Inode = I>>(
        &self,
        store: &S,
        ino: Ino,
        most: usize,
        moved: &mut Moved<I>,
    ) -> Result<Option<Arc<I>>, S::Error> {
        let mut state = lock(&self.state);
        loop {
            if let Some(inode) = state.resident.get(&ino) {
                store.note_use(inode);
                return Ok(Some(Arc::clone(inode)));
            }
            if !state.loading.contains(&ino) {
                break;
            }
            store.may_wait()?;
            state = wait_for(&self.loaded, state);
        }
        let loaded;
        (state, loaded) = self.load(store, ino, state);
        // A number that nobody knew may have been given to a new inode meanwhile.
        if let Some(inode) = state.resident.get(&ino) {
            return Ok(Some(Arc::clone(inode)));
        }
        let Some(inode) = loaded? else { return Ok(None) };
        let known = state.recall(ino);
        store.restore(&inode, known, state.newest_left);
        let inode = Arc::new(inode);
        state.admit(ino, &inode);
        state.make_room(store, most, STEPS, moved);
        Ok(Some(inode))
    }

    /// Reads the inode without the lock.
    #[expect(clippy::type_complexity, reason = "the lock again, and what was read, for one caller")]
    fn load<'s, S: Store<Inode = I>>(
        &'s self,
        store: &S,
        ino: Ino,
        mut state: MutexGuard<'s, State<I>>,
    ) -> (MutexGuard<'s, State<I>>, Result<Option<I>, S::Error>) {
        state.loading.push(ino);
        drop(state);
        let loaded = store.load(ino);
        let mut state = lock(&self.state);
        let counts = state.loading.contains(&ino);
        state.loading.retain(|other| *other != ino);
        self.loaded.notify_all();
        (state, if counts { loaded } else { Ok(None) })
    }

    /// The inode, if it is resident.
    pub fn peek(&self, ino: Ino) -> Option<Arc<I>> {
        lock(&self.state).resident.get(&ino).cloned()
    }

    /// Adds an inode that was just made.
    pub fn insert(
        &self,
        store: &impl Store<Inode = I>,
        ino: Ino,
        inode: &Arc<I>,
        most: usize,
        moved: &mut Moved<I>,
    ) {
        let mut state = lock(&self.state);
        state.admit(ino, inode);
        state.make_room(store, most, STEPS, moved);
    }

    /// Removes an inode whose record in the journal was deleted. It is resident: its last user is
    /// the caller.
    pub fn remove(&self, ino: Ino) -> Option<Arc<I>> {
        let mut state = lock(&self.state);
        // What a thread has read of it counts no more: it may have begun before the inode was made.
        state.loading.retain(|other| *other != ino);
        state.resident.remove(&ino)
    }

    /// The kernel takes `count` lookups back. The inode, if it is resident: the caller counts them.
    pub fn forget(&self, ino: Ino, count: u64) -> Option<Arc<I>> {
        let mut state = lock(&self.state);
        if let Some(inode) = state.resident.get(&ino) {
            return Some(Arc::clone(inode));
        }
        let known = state.recall(ino);
        let left = Remembered::new(known.lookups().saturating_sub(count), known.is_mapped());
        state.remember(ino, left.expect("fewer lookups than were counted"));
        None
    }

    /// Looks at up to `steps` residents, and lets some leave if there are more than `most`.
    pub fn trim(
        &self,
        store: &impl Store<Inode = I>,
        most: usize,
        steps: usize,
        moved: &mut Moved<I>,
    ) {
        lock(&self.state).make_room(store, most, steps, moved);
    }

    /// What is remembered of those that are not resident.
    pub fn remembered(&self) -> Vec<(Ino, Remembered)> {
        let state = lock(&self.state);
        state.remembered.iter().map(|(ino, known)| ((*ino).into(), *known)).collect()
    }

    /// The kernel knows an inode since before this process.
    pub fn adopt(&self, store: &impl Store<Inode = I>, ino: Ino, known: Remembered) {
        let mut state = lock(&self.state);
        match state.resident.get(&ino) {
            Some(inode) => store.restore(inode, known, state.newest_left),
            None => state.remember(ino, known),
        }
    }

    /// The kernel has forgotten everything. All residents.
    pub fn forget_all(&self) -> Vec<Arc<I>> {
        let mut state = lock(&self.state);
        state.remembered = Map::default();
        state.resident.values().cloned().collect()
    }

    /// All residents.
    pub fn residents(&self) -> Vec<Arc<I>> {
        lock(&self.state).resident.values().cloned().collect()
    }

    /// How much it holds.
    pub fn counts(&self) -> Counts {
        let state = lock(&self.state);
        Counts {
            resident: state.resident.len(),
            remembered: state.remembered.len(),
            queued: state.queue.len(),
            // An eighth of the table stays free.
            remembered_bytes: state.remembered.capacity() * 8 / 7 * ENTRY_BYTES,
        }
    }
}
