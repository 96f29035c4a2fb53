//! Locking several inodes: always by ascending number, whatever they are to each other.
//!
//! An operation first finds out, holding nothing, which inodes it concerns; then it locks them all
//! by number and looks again; if the names meanwhile lead elsewhere, it starts over. So no two
//! operations can wait for each other, and there is no order among parents and children to prove.
//! (The alternative, ancestors before descendants, needs one lock for all renames between
//! directories.)

use crate::api::Ino;
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::inode::state_lock::Exclusive;

/// Most inodes that one operation changes: rename has two directories and two children.
const MOST: usize = 4;

/// Several inodes, exclusively locked.
pub(crate) struct Locked<'i> {
    guards: [Option<(Ino, Exclusive<'i>)>; MOST],
}

impl<'i> Locked<'i> {
    /// Locks the inodes; one that is named twice is locked once. A thread that must not wait gets
    /// [`FsError::WouldWait`] if another one has any of them.
    pub(crate) fn new<const N: usize>(mut inodes: [&'i Inode; N]) -> Result<Self, FsError> {
        const { assert!(N <= MOST) };
        inodes.sort_unstable_by_key(|i| i.ino);
        let mut guards = [const { None }; MOST];
        let mut last = 0;
        for (slot, inode) in guards.iter_mut().zip(inodes) {
            if inode.ino != last {
                *slot = Some((inode.ino, inode.state.write_now()?));
                last = inode.ino;
            }
        }
        Ok(Self { guards })
    }

    /// The state of one of them.
    pub(crate) fn state(&mut self, inode: &Inode) -> &mut InodeState {
        let guard = self.guards.iter_mut().flatten().find(|(ino, _)| *ino == inode.ino);
        &mut guard.expect("the inode is one of those locked").1
    }
}
