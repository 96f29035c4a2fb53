//! Reservations of clients: made, drawn from, given back.

use crate::api::{Errno, ReservationId};
use crate::keys::BLOCK;
use crate::session_store::Reservation;
use crate::space::free_blocks::{Purse, Want};
use crate::space::reservation::{INODE_BLOCKS, amount};
use crate::store::data_store::DataStore;
use std::sync::{Arc, Weak};

/// Space reserved in a volume. It does not keep the volume open.
pub(crate) struct Reserved {
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
}
