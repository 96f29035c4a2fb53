//! What differs between two states of one volume: two snapshots, or a snapshot and the volume.
//!
//! The keys of both are read side by side. Those that are equal, with their values, need no second
//! look, so the contents of a file that nobody changed are not read. What differs leads to inodes
//! whose contents and attributes may differ (`inodes`), and to names that only one side has
//! (`names`). Memory grows with the directories of both sides and with what differs, and not with
//! the contents of files.

mod contents;
mod inodes;
mod names;
mod rows;
#[cfg(test)]
mod tests;

use crate::inspect::Inspector;
use ferry_fs::error::FsError;

/// One thing that differs. Paths begin at the root of the volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Difference {
    /// A name that only the old side has.
    Removed(Vec<u8>),
    /// A name that only the new side has.
    Made(Vec<u8>),
    /// The same file or directory has another name. What is in a directory moves with it.
    Moved {
        /// Its path on the old side.
        from: Vec<u8>,
        /// Its path on the new side.
        to: Vec<u8>,
    },
    /// Contents or size. Its attributes may differ, too.
    Contents(Vec<u8>),
    /// Only the permission bits, the owner, the group or extended attributes.
    Attributes(Vec<u8>),
}

impl Difference {
    /// The path that it is sorted by: on the new side, except of what was removed or moved.
    pub fn path(&self) -> &[u8] {
        match self {
            Self::Removed(path)
            | Self::Made(path)
            | Self::Moved { from: path, .. }
            | Self::Contents(path)
            | Self::Attributes(path) => path,
        }
    }
}

/// What differs between two states of one volume, sorted by path.
pub fn diff(old: &Inspector, new: &Inspector) -> Result<Vec<Difference>, FsError> {
    let keys = names::compare(old, new)?;
    let mut inodes = inodes::Inodes::new(old, new);
    let mut found = names::pair(&keys, &mut inodes)?;
    names::add_changed(new, &keys, &mut inodes, &mut found)?;
    let mut all: Vec<Difference> = found.differences.into_iter().collect();
    all.sort_by(|a, b| a.path().cmp(b.path()).then_with(|| a.cmp(b)));
    Ok(all)
}
