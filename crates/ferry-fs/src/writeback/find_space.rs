//! Finding space for a change that lacks some, and room for what grows the metadata.

use crate::api::{Errno, ReservationId};
use crate::error::FsError;
use crate::keys::BLOCK;
use crate::order::{Held, Rank};
use crate::space::free_blocks::{Claim, Want};
use crate::space::reservation::{INODE_BLOCKS, target_cost};
use crate::store::data_store::{Busy, DataStore, Dirty};

impl DataStore {
    /// Stands in the wait queue for space: asks the host, then has everything written back (what is
    /// overwritten becomes free) and takes back what the home store does not need; `ENOSPC` if that
    /// came to nothing. Called without any lock but a file's `tail`.
    pub(crate) fn find_space(&self, want: Want, claim: &mut Claim<'_>) -> Result<(), FsError> {
        let _queue = Held::wait(Rank::SpaceQueue);
        let some = || if self.space.grow_for(want) { Ok(()) } else { self.await_space(want) };
        if claim.wait(want, some, || self.free_all(want))? {
            return Ok(());
        }
        Err(Errno(libc::ENOSPC).into())
    }

    /// The same, for a caller that may not be able to wait.
    pub(crate) fn find_space_or_refuse(
        &self,
        busy: Busy,
        want: Want,
        claim: &mut Claim<'_>,
    ) -> Result<(), FsError> {
        if busy == Busy::Refuse { Err(FsError::WouldWait) } else { self.find_space(want, claim) }
    }

    /// Waits while the background thread writes back, until there is so much or it has come to its
    /// end.
    pub(crate) fn await_space(&self, want: Want) -> Result<(), FsError> {
        // The round under way may have passed by what is dirty.
        let rounds = self.signal.rounds() + 2;
        let held = || {
            let waits = !self.space.has(want) && self.cache.dirty() > 0;
            waits && self.signal.rounds() < rounds && self.writable().is_ok()
        };
        if self.options.background {
            self.signal.wait_while(held);
        }
        self.writable()
    }

    /// Waits for the space of removed files, until there is so much.
    pub(crate) fn await_removed(&self, want: Want) {
        if self.options.background {
            let lacking = || !self.space.has(want) && self.writable().is_ok();
            self.removed.wait_while(&*self.env.clock, lacking);
        }
    }

    /// Makes everything free that can be.
    pub(crate) fn free_all(&self, want: Want) -> Result<(), FsError> {
        self.await_removed(want);
        self.write_back(Dirty::All, Busy::Wait)?;
        if let Some(journal) = self.space.has_pending().then(|| self.journal()).transpose()? {
            self.force_durable_point(&journal)?;
            self.space.reap_now();
        }
        if !self.space.grow_for(want) {
            self.shrink_home()?;
            // What it gave back may have gone on to the host.
            self.space.grow_for(want);
        }
        Ok(())
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
        if self
            .reserved_space(reservation)
            .is_some_and(|reserved_space| reserved_space.draw(blocks, 1))
        {
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
