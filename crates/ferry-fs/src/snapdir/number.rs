//! The number of an inode, with the tree that it is in.

use crate::api::{Errno, Ino, ROOT};

/// A tree has so many bits of numbers. At a million new files a second a volume needs half a year
/// for as many.
const INO_BITS: u32 = 44;
/// The volume itself has numbers below this one. A volume that has a higher one when it is mounted
/// shows no snapshots: the rest would not last for the mount.
pub(crate) const LIVE_END: Ino = 1 << (INO_BITS - 1);
/// The tree of the directory `.snapshots`.
const DIRECTORY_TREE: u64 = (1 << (u64::BITS - INO_BITS)) - 1;
/// So many snapshots can be looked up in a mount.
pub(crate) const TREES_MAX: usize = DIRECTORY_TREE as usize - 1;
/// The directory `.snapshots`.
pub(crate) const DIRECTORY: Ino = DIRECTORY_TREE << INO_BITS | ROOT;

/// A snapshot, as the inode numbers of this mount have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Tree(u64);

impl Tree {
    /// The one behind so many others of a mount whose trees begin at `first`. Each mount begins at
    /// random: a file handle that outlives a mount leads to no other snapshot of the next one.
    pub(crate) fn behind(first: usize, others: usize) -> Self {
        assert!(others < TREES_MAX, "each tree has its number");
        Self(((first + others) % TREES_MAX) as u64 + 1)
    }

    /// How many are before it.
    pub(crate) fn index(self, first: usize) -> usize {
        (self.0 as usize - 1 + TREES_MAX - first % TREES_MAX) % TREES_MAX
    }

    /// The number that programs see of inode `ino` of the snapshot. `EOVERFLOW`: it is too high to
    /// be one, on a damaged volume.
    pub(crate) fn outer(self, ino: Ino) -> Result<Ino, Errno> {
        joined(self.0, ino)
    }
}

/// The number with `upper` in the bits that inode numbers do not use, and `ino` in the others.
pub(crate) fn joined(upper: u64, ino: Ino) -> Result<Ino, Errno> {
    if ino >> INO_BITS == 0 { Ok(upper << INO_BITS | ino) } else { Err(Errno(libc::EOVERFLOW)) }
}

/// The two parts of a number that was [`joined`].
pub(crate) fn parted(number: Ino) -> (u64, Ino) {
    (number >> INO_BITS, number & ((1 << INO_BITS) - 1))
}

/// What an inode number means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    /// An inode of the volume itself.
    Live,
    /// The directory `.snapshots`.
    Directory,
    /// An inode of a snapshot.
    Snapshot(Tree, Ino),
}

impl Node {
    #[inline]
    pub(crate) fn of(number: Ino) -> Self {
        match parted(number) {
            (0, _) => Self::Live,
            (DIRECTORY_TREE, _) => Self::Directory,
            (tree, ino) => Self::Snapshot(Tree(tree), ino),
        }
    }

    /// Whether both are in the volume itself, or in the same snapshot.
    pub(crate) fn is_beside(self, other: Self) -> bool {
        match (self, other) {
            (Self::Snapshot(one, _), Self::Snapshot(other, _)) => one == other,
            (one, other) => one == other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_different_trees_differ_and_lead_back() {
        assert_eq!((Node::of(ROOT), Node::of(LIVE_END)), (Node::Live, Node::Live));
        assert_eq!(Node::of(DIRECTORY), Node::Directory);
        for begin in [0, 7, TREES_MAX - 1, 3 * TREES_MAX + 5] {
            for others in [0, 1, TREES_MAX - 1] {
                assert_eq!(Tree::behind(begin, others).index(begin), others);
            }
        }
        let (first, last) = (Tree::behind(0, 0), Tree::behind(0, TREES_MAX - 1));
        for tree in [first, last] {
            for ino in [ROOT, (1 << INO_BITS) - 1] {
                let number = tree.outer(ino).expect("it is no higher than others");
                assert_eq!(Node::of(number), Node::Snapshot(tree, ino));
            }
        }
        assert_eq!(first.outer(1 << INO_BITS), Err(Errno(libc::EOVERFLOW)));
        assert_eq!((first.index(0), last.index(0)), (0, TREES_MAX - 1));
    }
}
