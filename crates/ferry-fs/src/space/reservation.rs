//! Space that is reserved for the changes of one client, before they come here.
//!
//! A reservation takes blocks from the free ones when it is made, and they count as used until a
//! change draws from them or the reservation gives them back. A change that finds enough in its
//! reservation neither stands in the wait queue nor asks whether there is room for names: it cannot
//! fail for want of space. Nothing of a reservation is on the device: after a crash there is
//! nothing to give back.

use crate::api::{Errno, ReservationId};
use crate::error::FsError;
use crate::keys::BLOCK;
use crate::session_store::Reservation;
use crate::space::free_blocks::{Purse, Want};
use crate::store::data_store::{DataStore, PIECE};
use crate::writeback::write_back::Busy;
use std::sync::{Arc, Weak};

/// Blocks of the home store that a new inode, or a new name, takes at most: record and entry with
/// the longest name are some 450 bytes, twice because of the copies, twice because pages may be
/// half full.
const INODE_BLOCKS: i64 = 1;
/// Bytes of the home store that a byte of a symbolic link's target takes, for the same reasons.
const TARGET_COPIES: usize = 4;

/// Bytes that a write of `len` bytes takes of a reservation, at most, wherever it writes. A change
/// of size takes as much as a write of nothing.
pub fn write_cost(len: usize) -> u64 {
    // A block that is written in part at each end; one behind the old end, and one that leaves the
    // record.
    (len / BLOCK as usize + len / PIECE + 4) as u64 * BLOCK
}

/// Bytes that a symbolic link takes of a reservation beside one inode.
pub fn target_cost(len: usize) -> u64 {
    ((TARGET_COPIES * len) as u64).div_ceil(BLOCK) * BLOCK
}

/// Space reserved in a volume. It does not keep the volume open.
struct Reserved {
    store: Weak<DataStore>,
    id: ReservationId,
    purse: Arc<Purse>,
}

impl Reservation for Reserved {
    fn id(&self) -> ReservationId {
        self.id
    }

    fn left(&self) -> (u64, u64) {
        let (blocks, inodes) = self.purse.left();
        (blocks as u64 * BLOCK, inodes as u64)
    }

    fn add(&self, bytes: u64, inodes: u64) -> Result<(), Errno> {
        let (blocks, inodes) = amount(bytes, inodes)?;
        let store = self.store.upgrade().ok_or(Errno(libc::EIO))?;
        store.take_reserved(blocks + inodes * INODE_BLOCKS)?;
        self.purse.put(blocks, inodes);
        Ok(())
    }

    fn keep_only(&self, bytes: u64, inodes: u64) {
        let Some(store) = self.store.upgrade() else { return };
        let (has_blocks, has_inodes) = self.purse.left();
        let blocks = (has_blocks - bytes.div_ceil(BLOCK) as i64).max(0);
        let inodes = (has_inodes - inodes as i64).max(0);
        if self.purse.draw(blocks, inodes) {
            store.space.settle(blocks + inodes * INODE_BLOCKS);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Some(store) = self.store.upgrade() else { return };
        store.space.reservations.lock().remove(&self.id);
        let (blocks, inodes) = self.purse.empty();
        store.space.settle(blocks + inodes * INODE_BLOCKS);
    }
}

/// Blocks and inodes; more than any volume has there is not.
fn amount(bytes: u64, inodes: u64) -> Result<(i64, i64), Errno> {
    let blocks = bytes.div_ceil(BLOCK);
    if blocks.max(inodes) > 1 << 40 {
        Err(Errno(libc::ENOSPC))
    } else {
        Ok((blocks as i64, inodes as i64))
    }
}

impl DataStore {
    /// Reserves space: `bytes` of contents, and what `inodes` new names and inodes take.
    pub fn reserve(
        self: &Arc<Self>,
        bytes: u64,
        inodes: u64,
    ) -> Result<Box<dyn Reservation>, Errno> {
        let (id, purse) = self.space.new_purse();
        let reserved = Reserved { store: Arc::downgrade(self), id, purse };
        reserved.add(bytes, inodes)?;
        Ok(Box::new(reserved))
    }

    /// Takes free blocks for a reservation: never more than half of them, and none while a change
    /// waits for some.
    fn take_reserved(&self, blocks: i64) -> Result<(), Errno> {
        let want = Want { blocks, leave: blocks };
        if self.space.grow_for(want) && self.space.claim().take(want) {
            return Ok(());
        }
        Err(Errno(libc::ENOSPC))
    }

    /// The space that a change names, if it is still reserved.
    pub(crate) fn purse(&self, reservation: Option<ReservationId>) -> Option<Arc<Purse>> {
        self.space.reservations.lock().get(&reservation?).cloned()
    }

    /// `ENOSPC` if there is no room for what an operation adds to the metadata, and none reserved
    /// for it. Only a checkpoint can tell for sure. `target`: bytes of a symbolic link's target.
    pub fn admit(
        &self,
        busy: Busy,
        reservation: Option<ReservationId>,
        target: usize,
    ) -> Result<(), FsError> {
        let blocks = (target_cost(target) / BLOCK) as i64;
        if self.purse(reservation).is_some_and(|purse| purse.draw(blocks, 1)) {
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
        self.await_removed(Want::new(0));
        self.shrink_home()?;
        if self.space.admits() { Ok(()) } else { Err(Errno(libc::ENOSPC).into()) }
    }
}
