//! Space that is set aside for changes whose makers were told that they are made, before they come here.
//!
//! It is taken from what may be promised when it is set aside, and counts as used until a change draws from it or it is given back. A change
//! that finds enough there neither stands in the row nor asks whether there is room for names: it cannot fail for want of space.
//! Nothing of it is on the device: after a crash there is nothing to give back.

use super::row::{Purse, Want};
use super::{BLOCK, Busy, DataStore, PIECE};
use crate::api::{AsideId, Errno};
use crate::error::FsError;
use std::sync::{Arc, Weak};

/// A new inode, or a new name, takes no more of the home store than so many blocks: record and entry with the longest name are some
/// 450 bytes, twice because of the copies, twice because pages may be half full.
const INODE_BLOCKS: i64 = 1;
/// A byte of a symbolic link's target takes so many of the home store, for the same reasons.
const TARGET_COPIES: usize = 4;

/// Space set aside. Dropping it gives back what is left of it.
pub struct Aside {
    /// Whoever keeps this does not keep the volume open.
    store: Weak<DataStore>,
    id: AsideId,
    purse: Arc<Purse>,
}

impl Aside {
    /// Bytes that a write of `len` bytes takes of it, at most, wherever it writes. A change of size takes as much as a write of nothing.
    pub fn of_write(len: usize) -> u64 {
        // A block that is written in part at each end; one behind the old end, and one that leaves the record.
        (len / BLOCK as usize + len / PIECE + 4) as u64 * BLOCK
    }

    /// Bytes that a symbolic link takes of it beside one inode.
    pub fn of_target(len: usize) -> u64 {
        ((TARGET_COPIES * len) as u64).div_ceil(BLOCK) * BLOCK
    }

    /// What changes name it by.
    pub fn id(&self) -> AsideId {
        self.id
    }

    /// Bytes and inodes that are left of it.
    pub fn left(&self) -> (u64, u64) {
        let (blocks, inodes) = self.purse.left();
        (blocks as u64 * BLOCK, inodes as u64)
    }

    /// Sets more aside. `ENOSPC`: there is not so much, and nothing is changed.
    pub fn add(&self, bytes: u64, inodes: u64) -> Result<(), Errno> {
        let (blocks, inodes) = amount(bytes, inodes)?;
        let store = self.store.upgrade().ok_or(Errno(libc::EIO))?;
        store.take_aside(blocks + inodes * INODE_BLOCKS)?;
        self.purse.put(blocks, inodes);
        Ok(())
    }

    /// Gives back what is beyond this. Whoever draws at the same time may draw that, or find less.
    pub fn keep_only(&self, bytes: u64, inodes: u64) {
        let Some(store) = self.store.upgrade() else { return };
        let (has_blocks, has_inodes) = self.purse.left();
        let blocks = (has_blocks - bytes.div_ceil(BLOCK) as i64).max(0);
        let inodes = (has_inodes - inodes as i64).max(0);
        if self.purse.draw(blocks, inodes) {
            store.space.settle(blocks + inodes * INODE_BLOCKS);
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let Some(store) = self.store.upgrade() else { return };
        store.space.asides.lock().remove(&self.id);
        let (blocks, inodes) = self.purse.empty();
        store.space.settle(blocks + inodes * INODE_BLOCKS);
    }
}

/// Blocks and inodes; more than any volume has there is not.
fn amount(bytes: u64, inodes: u64) -> Result<(i64, i64), Errno> {
    let blocks = bytes.div_ceil(BLOCK);
    if blocks.max(inodes) > 1 << 40 { Err(Errno(libc::ENOSPC)) } else { Ok((blocks as i64, inodes as i64)) }
}

impl DataStore {
    /// Sets space aside: `bytes` of contents, and what `inodes` new names and inodes take.
    pub fn set_aside(self: &Arc<Self>, bytes: u64, inodes: u64) -> Result<Aside, Errno> {
        let (id, purse) = self.space.new_purse();
        let aside = Aside { store: Arc::downgrade(self), id, purse };
        aside.add(bytes, inodes)?;
        Ok(aside)
    }

    /// Takes blocks of what may be promised, for nobody's use yet: never more than half of it, and nothing while somebody waits for some.
    fn take_aside(&self, blocks: i64) -> Result<(), Errno> {
        let want = Want { blocks, leave: blocks };
        if self.space.grow_for(want) && self.space.claim().take(want) {
            return Ok(());
        }
        Err(Errno(libc::ENOSPC))
    }

    /// The space that a change names, if it is still set aside.
    pub(super) fn purse(&self, aside: Option<AsideId>) -> Option<Arc<Purse>> {
        self.space.asides.lock().get(&aside?).cloned()
    }

    /// `ENOSPC` when there is no room for what an operation adds to the metadata, and none set aside for it: only a checkpoint says that for
    /// sure. `target`: bytes of a symbolic link's target.
    pub fn admit(&self, busy: Busy, aside: Option<AsideId>, target: usize) -> Result<(), FsError> {
        let blocks = (Aside::of_target(target) / BLOCK) as i64;
        if self.purse(aside).is_some_and(|purse| purse.draw(blocks, 1)) {
            // The home store takes it from here: what it grows by is not counted in blocks.
            self.space.settle(blocks + INODE_BLOCKS);
            return Ok(());
        }
        if self.space.admits() {
            return Ok(());
        }
        if busy == Busy::Refuse {
            return Err(FsError::WouldWait);
        }
        self.shrink_home()?;
        if self.space.admits() { Ok(()) } else { Err(Errno(libc::ENOSPC).into()) }
    }
}
