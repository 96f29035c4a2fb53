//! Other rules of exclusion between readers and writers of one file, for benchmarks alone (feature
//! `compare`): they show what the rule of FerryFS gains.

use crate::api::Ino;
use crate::compare::rwsem::{Reading, Rwsem, Writing};
use crate::order::{Guard, Rank};

/// Locks of [`Locking::Inode`]: inodes share them by their number.
const INODE_LOCKS: usize = 64;

/// Who excludes whom on one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locking {
    /// Those that touch the same folios. What FerryFS does.
    #[default]
    Range,
    /// The same for writes inside one folio. Longer writes exclude all others, and readers take the
    /// inode lock.
    Folio,
    /// A writer excludes all others, by the rules of the lock that XFS uses (`rwsem.rs`).
    Inode,
}

impl Locking {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Range, Self::Folio, Self::Inode];

    /// Whether readers take no lock.
    pub(crate) fn reads_free(self) -> bool {
        self == Self::Range
    }

    /// Whether a write that touches so many folios shares the inode lock.
    pub(crate) fn shares(self, folios: usize) -> bool {
        match self {
            Self::Range => true,
            Self::Folio => folios <= 1,
            Self::Inode => false,
        }
    }

    /// The word that options use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Range => "range",
            Self::Folio => "folio",
            Self::Inode => "inode",
        }
    }
}

impl std::fmt::Display for Locking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Locking {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|locking| locking.name() == word);
        found.ok_or_else(|| format!("{word:?} is no rule: use range, folio or inode"))
    }
}

/// The lock around each read and write of a file; there is none but for [`Locking::Inode`].
pub(crate) struct InodeLocks(Box<[Rwsem]>);

impl InodeLocks {
    pub(crate) fn new(locking: Locking) -> Self {
        let locks = if locking == Locking::Inode { INODE_LOCKS } else { 0 };
        Self((0..locks).map(|_| Rwsem::default()).collect())
    }

    /// Excludes writers.
    pub(crate) fn read(&self, ino: Ino) -> Option<Guard<Reading<'_>>> {
        let lock = self.0.get(ino as usize % INODE_LOCKS)?;
        Some(Guard::wait(Rank::Compared, || lock.read()))
    }

    /// Excludes all others.
    pub(crate) fn write(&self, ino: Ino) -> Option<Guard<Writing<'_>>> {
        let lock = self.0.get(ino as usize % INODE_LOCKS)?;
        Some(Guard::wait(Rank::Compared, || lock.write()))
    }
}
