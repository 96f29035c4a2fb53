//! Space that may be promised, and the row of those who wait for some.
//!
//! Whoever finds too little stands in the row. The first one makes space and takes what it needs
//! before it steps out: it does not have to look again among those who came later, to whom nothing
//! is given while anybody stands there. So nobody starves, nobody is woken to find nothing, and an
//! error means that nothing could be made, not that others were faster.

use crate::sync::{
    AtomicI64, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, hand_over, lock, wait_for as sleep,
};
use std::sync::Arc;

/// One who stands in the row; below it, those who have taken space.
const WAITING: u64 = 1 << 32;

/// What an operation wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// So many blocks.
    pub blocks: i64,
    /// So many must be left then; negative for who may use what is kept back.
    pub leave: i64,
}

impl Want {
    /// `blocks` that nothing is given back for.
    pub fn new(blocks: u64) -> Self {
        Self { blocks: blocks as i64, leave: 0 }
    }
}

/// Blocks that may still be promised. Negative when the home store took what was kept back.
pub struct Free {
    blocks: AtomicI64,
    /// How many stand in the row ([`WAITING`] each), and how many have taken space and not yet said
    /// what became of it. One number: who takes has either been seen by whoever comes to stand
    /// here, or sees them.
    people: AtomicU64,
    /// Whose turn it is.
    turn: Mutex<()>,
    /// For `landed`.
    quiet: Mutex<()>,
    /// All who had taken space have said what became of it.
    landed: Condvar,
}

impl Free {
    /// So many blocks.
    pub fn new(blocks: i64) -> Self {
        Self {
            blocks: AtomicI64::new(blocks),
            people: AtomicU64::new(0),
            turn: Mutex::new(()),
            quiet: Mutex::new(()),
            landed: Condvar::new(),
        }
    }

    /// The number.
    pub fn get(&self) -> i64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// More, or fewer.
    pub fn add(&self, blocks: i64) {
        if blocks != 0 {
            self.blocks.fetch_add(blocks, Ordering::Relaxed);
        }
    }

    /// Takes what is wanted, if it is there.
    pub fn take(&self, want: Want) -> bool {
        let left = |free: i64| (free - want.blocks >= want.leave).then_some(free - want.blocks);
        want.blocks == 0
            || self.blocks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }

    /// Somebody stands in the row.
    pub fn is_wanted(&self) -> bool {
        self.people.load(Ordering::Relaxed) >= WAITING
    }

    /// Comes to take space, if nobody stands in the row.
    fn come(&self) -> bool {
        let one_more = |people: u64| (people < WAITING).then_some(people + 1);
        self.people.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// Has used what it took, or given it back.
    fn go(&self) {
        if self.people.fetch_sub(1, Ordering::AcqRel) > WAITING {
            drop(lock(&self.quiet));
            self.landed.notify_all();
        }
    }

    /// Waits until nobody has space whose use is not known. Nobody comes meanwhile.
    fn wait_for_others(&self) {
        let mut quiet = lock(&self.quiet);
        while !self.people.load(Ordering::Acquire).is_multiple_of(WAITING) {
            quiet = sleep(&self.landed, quiet);
        }
    }
}

/// Space that was taken before anybody wanted it, for the changes of one client.
#[derive(Default)]
pub struct Purse {
    blocks: AtomicI64,
    inodes: AtomicI64,
}

impl Purse {
    /// More of it.
    pub fn put(&self, blocks: i64, inodes: i64) {
        self.blocks.fetch_add(blocks, Ordering::Relaxed);
        self.inodes.fetch_add(inodes, Ordering::Relaxed);
    }

    /// What is left of it: blocks, and inodes.
    pub fn left(&self) -> (i64, i64) {
        (self.blocks.load(Ordering::Relaxed), self.inodes.load(Ordering::Relaxed))
    }

    /// Takes so much, all or nothing.
    pub fn draw(&self, blocks: i64, inodes: i64) -> bool {
        let less = |of: &AtomicI64, by: i64| {
            let left = |has: i64| (has >= by).then_some(has - by);
            by == 0 || of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
        };
        if !less(&self.inodes, inodes) {
            return false;
        }
        let drawn = less(&self.blocks, blocks);
        if !drawn {
            self.inodes.fetch_add(inodes, Ordering::Relaxed);
        }
        drawn
    }

    /// Takes all that is left.
    pub fn empty(&self) -> (i64, i64) {
        (self.blocks.swap(0, Ordering::Relaxed), self.inodes.swap(0, Ordering::Relaxed))
    }
}

/// Whose turn it is. It comes to those who wait in the order in which they came.
struct Turn<'f> {
    free: &'f Free,
    guard: Option<MutexGuard<'f, ()>>,
}

impl<'f> Turn<'f> {
    fn wait(free: &'f Free) -> Self {
        free.people.fetch_add(WAITING, Ordering::AcqRel);
        Self { free, guard: Some(lock(&free.turn)) }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            hand_over(guard);
        }
        self.free.people.fetch_sub(WAITING, Ordering::AcqRel);
    }
}

/// What one operation has taken of the space. It lives until what is done with it can be seen:
/// until blocks are dirty and in the queue.
pub struct Claim<'f> {
    free: &'f Free,
    /// Taken, and not yet used: for an operation that has to look again how many it needs.
    blocks: i64,
    /// It is counted among those who have taken something.
    counted: bool,
    /// Where it takes from first.
    purse: Option<Arc<Purse>>,
}

impl<'f> Claim<'f> {
    /// Nothing yet.
    pub fn new(free: &'f Free, purse: Option<Arc<Purse>>) -> Self {
        Self { free, blocks: 0, counted: false, purse }
    }

    /// Takes what is wanted for good, out of what it has if that will do; the rest of it is given
    /// back. `false`: it has to wait.
    pub fn take(&mut self, want: Want) -> bool {
        if want.blocks > self.blocks {
            if self.purse.as_ref().is_some_and(|purse| purse.draw(want.blocks, 0)) {
                return true;
            }
            if self.counted || !self.free.come() {
                return false;
            }
            self.counted = true;
            return self.free.take(want);
        }
        self.free.add(self.blocks - want.blocks);
        self.blocks = 0;
        true
    }

    /// Waits in the row until what is wanted is there to be taken. `some` is to make some free,
    /// maybe not enough; `all` whatever can be made free. `false`: not even that was enough.
    pub fn wait<E>(
        &mut self,
        want: Want,
        some: impl FnOnce() -> Result<(), E>,
        all: impl FnOnce() -> Result<(), E>,
    ) -> Result<bool, E> {
        // What it had others may need, and it comes last now.
        self.give_back();
        let turn = Turn::wait(self.free);
        let mut taken = self.free.take(want);
        if !taken {
            some()?;
            taken = self.free.take(want);
        }
        if !taken {
            self.free.wait_for_others();
            all()?;
            taken = self.free.take(want);
        }
        if taken {
            self.free.people.fetch_add(1, Ordering::AcqRel);
            (self.blocks, self.counted) = (want.blocks, true);
        }
        drop(turn);
        Ok(taken)
    }

    fn give_back(&mut self) {
        self.free.add(std::mem::take(&mut self.blocks));
        if std::mem::take(&mut self.counted) {
            self.free.go();
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}
