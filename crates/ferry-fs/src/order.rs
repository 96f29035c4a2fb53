//! The order of locks (`docs/locking.md`), asserted in debug builds and in this crate's own tests:
//! a thread that waits for a lock holds none that comes behind it. In other release builds nothing
//! of this remains.

use crate::api::Ino;
use std::ops::{Deref, DerefMut};

/// Locks that are held over waits or over each other, from the outside in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// The rename lock.
    Rename,
    /// `DataStore::inode_locks`.
    #[cfg(feature = "compare")]
    Compared,
    /// `FileData::tail`.
    Tail,
    /// The wait queue for space.
    SpaceQueue,
    /// `DataStore::room`.
    Room,
    /// The right to change a file's extents. One that is tried and not waited for may join others.
    Extents,
    /// The inode lock; several by ascending number.
    Inode(Ino),
    /// `FileData::pages`.
    Pages,
}

/// That this thread holds a lock.
#[derive(Debug)]
pub struct Held {
    #[cfg(any(test, debug_assertions))]
    rank: Rank,
}

#[cfg(any(test, debug_assertions))]
mod held {
    use super::{Held, Rank};
    use std::cell::RefCell;

    thread_local! {
        static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    impl Held {
        /// The thread is about to wait for a lock.
        pub fn wait(rank: Rank) -> Self {
            HELD.with_borrow(|held| {
                let behind = held.iter().find(|held| **held >= rank);
                assert!(
                    behind.is_none(),
                    "{rank:?} is waited for while this thread holds {behind:?}, of {held:?}"
                );
            });
            Self::tried(rank)
        }

        /// The thread has got a lock that it did not wait for.
        pub fn tried(rank: Rank) -> Self {
            HELD.with_borrow_mut(|held| held.push(rank));
            Self { rank }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.with_borrow_mut(|held| {
                if let Some(at) = held.iter().rposition(|held| *held == self.rank) {
                    held.swap_remove(at);
                }
            });
        }
    }
}

#[cfg(not(any(test, debug_assertions)))]
impl Held {
    /// The thread is about to wait for a lock.
    pub fn wait(_rank: Rank) -> Self {
        Self {}
    }

    /// The thread has got a lock that it did not wait for.
    pub fn tried(_rank: Rank) -> Self {
        Self {}
    }
}

/// A lock's guard, and the note that it is held.
#[derive(Debug)]
pub struct Guard<G> {
    guard: G,
    held: Held,
}

impl<G> Guard<G> {
    /// Waits for a lock: `lock` does it.
    pub fn wait(rank: Rank, lock: impl FnOnce() -> G) -> Self {
        let held = Held::wait(rank);
        Self { guard: lock(), held }
    }

    /// A lock that was not waited for.
    pub fn tried(rank: Rank, guard: G) -> Self {
        Self { guard, held: Held::tried(rank) }
    }

    /// The same lock, held in another way.
    pub fn map<H>(self, change: impl FnOnce(G) -> H) -> Guard<H> {
        Guard { guard: change(self.guard), held: self.held }
    }
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use super::{Held, Rank};

    #[test]
    fn locks_are_taken_from_the_outside_in() {
        let held =
            (Held::wait(Rank::Extents), Held::wait(Rank::Inode(3)), Held::wait(Rank::Inode(4)));
        drop((Held::wait(Rank::Pages), held));
        drop(Held::wait(Rank::Extents));
    }

    #[test]
    fn a_lock_that_is_tried_may_come_from_anywhere() {
        let _held = Held::wait(Rank::Extents);
        drop((Held::tried(Rank::Extents), Held::tried(Rank::Room)));
    }

    #[test]
    #[should_panic(expected = "Inode(3) is waited for while this thread holds Some(Inode(4))")]
    fn inodes_are_locked_by_ascending_number() {
        let _held = Held::wait(Rank::Inode(4));
        Held::wait(Rank::Inode(3));
    }

    #[test]
    #[should_panic(expected = "Extents is waited for")]
    fn a_thread_with_an_inode_lock_does_not_wait_for_an_extents_right() {
        let _held = Held::wait(Rank::Inode(1));
        Held::wait(Rank::Extents);
    }
}
