//! Moves everything out of the segments from the limit on, so that the volume can end there: data by
//! the cleaner, the home store by a copy of itself.

use crate::error::FsError;
use crate::order::{Guard, Rank};
use crate::space::pool::Need;
use crate::store::data_store::DataStore;
use crate::writeback::cleaner::Going;
use ferry_journal::JournalError;

/// How far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vacated {
    /// All of them are free.
    All,
    /// So many are left: the time is over, or somebody is about to give one back.
    Left(u32),
    /// What lies in this segment cannot be read, so it stays.
    Stuck(u32),
    /// The other segments have no room for what is left.
    NoRoom,
}

impl DataStore {
    /// Empties the segments behind the limit `end`, as long as `go_on` says so. Called without any
    /// lock but that of the resize.
    pub(crate) fn vacate(&self, end: u32, go_on: &dyn Fn() -> bool) -> Result<Vacated, FsError> {
        let journal = self.journal()?;
        // Times in a row that nothing was found to do, though not all are free.
        let mut idle = false;
        loop {
            self.table.close_behind(end);
            self.free_closed(&journal)?;
            if self.space.has_pending() {
                self.force_durable_point(&journal)?;
            }
            let left = self.space.behind_limit();
            if left == 0 {
                return Ok(Vacated::All);
            }
            if !go_on() {
                return Ok(Vacated::Left(left));
            }
            if self.table.live_behind(end).is_some() && !self.space.can_take(Need::Clean) {
                self.make_room()?;
            }
            let mut progress = Guard::wait(Rank::Room, || self.room.lock());
            self.table.retain_alive(&mut progress.stuck);
            if let Some(victim) = self.table.victim_behind(end, &progress.stuck) {
                idle = false;
                match self.clean(victim, &mut progress, Going::Wait, &journal) {
                    Err(error) if error.errno().0 == libc::ENOSPC => return Ok(Vacated::NoRoom),
                    done => done?,
                };
                continue;
            }
            drop(progress);
            if self.table.wait_for_chunk() {
                continue;
            }
            if let Some(segment) = self.table.live_behind(end) {
                return Ok(Vacated::Stuck(segment));
            }
            match journal.vacate(end) {
                Err(JournalError::NoSpace) => return Ok(Vacated::NoRoom),
                done => done?,
            }
            if std::mem::replace(&mut idle, true) {
                return Ok(Vacated::Left(self.space.behind_limit()));
            }
        }
    }
}
