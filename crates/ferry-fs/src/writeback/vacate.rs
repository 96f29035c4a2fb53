//! Moves everything out of the segments from the limit on, so that the volume can end there: data
//! by the cleaner, the home store by a copy of itself.

use crate::error::FsError;
use crate::order::{Guard, Rank};
use crate::space::pool::{Need, usable_blocks};
use crate::space::resize::NoLimit;
use crate::store::data_store::DataStore;
use crate::writeback::cleaner::Going;

/// How far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vacated {
    /// All of them are free.
    All,
    /// Some are left: the time is over, or somebody is about to give one back.
    Left,
    /// What lies in this segment cannot be read, so it stays.
    Stuck(u32),
}

impl DataStore {
    /// Gathers what is live before `end` in fewer segments, until there is room to move to, as long
    /// as `go_on` says so. Called without any lock but that of the resize.
    pub(crate) fn make_room_before(
        &self,
        end: u32,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Result<Vacated, NoLimit>, FsError> {
        let journal = self.journal()?;
        loop {
            self.free_closed(&journal)?;
            if self.space.has_pending() {
                self.force_durable_point(&journal)?;
            }
            match self.space.lacking_before(end) {
                Ok(0) => return Ok(Ok(Vacated::All)),
                Ok(_) if !go_on() => return Ok(Ok(Vacated::Left)),
                Ok(_) => {}
                Err(no_limit) => return Ok(Err(no_limit)),
            }
            let mut progress = Guard::wait(Rank::Room, || self.room.lock());
            self.table.retain_alive(&mut progress.stuck);
            // Of more the summaries might take all that is gained.
            let most = usable_blocks(&self.geometry()).max(1) as u32 - 1;
            match self.table.victim_before(end, most, &progress.stuck) {
                Some(victim) => {
                    self.clean(victim, &mut progress, Going::Wait, &journal)?;
                }
                None if self.table.wait_for_chunk() => {}
                None if journal.make_room()? => {}
                // No more can be gained. What there is may be enough.
                None => return Ok(Ok(Vacated::All)),
            }
        }
    }

    /// Empties the segments behind the limit `end`, as long as `go_on` says so. Called without any
    /// lock but that of the resize.
    pub(crate) fn vacate(&self, end: u32, go_on: &dyn Fn() -> bool) -> Result<Vacated, FsError> {
        let journal = self.journal()?;
        // What could not be read before may be readable now.
        let mut progress = Guard::wait(Rank::Room, || self.room.lock());
        progress.stuck.retain(|(segment, _)| *segment < end);
        drop(progress);
        // Nothing was left to do but to wait for others.
        let mut idle = false;
        loop {
            self.table.close_behind(end);
            self.free_closed(&journal)?;
            if self.space.has_pending() {
                self.force_durable_point(&journal)?;
            }
            if self.space.used_from(end) == 0 {
                return Ok(Vacated::All);
            }
            if !go_on() {
                return Ok(Vacated::Left);
            }
            if self.table.live_behind(end).is_some() && !self.space.can_take(Need::Clean) {
                self.make_room()?;
            }
            let mut progress = Guard::wait(Rank::Room, || self.room.lock());
            self.table.retain_alive(&mut progress.stuck);
            if let Some(victim) = self.table.victim_behind(end, &progress.stuck) {
                idle = false;
                self.clean(victim, &mut progress, Going::Wait, &journal)?;
                continue;
            }
            drop(progress);
            if self.table.wait_for_chunk() {
                continue;
            }
            if let Some(segment) = self.table.live_behind(end) {
                return Ok(Vacated::Stuck(segment));
            }
            journal.vacate(end)?;
            if std::mem::replace(&mut idle, true) {
                return Ok(Vacated::Left);
            }
        }
    }
}
