//! A small home store in the place of one that is mostly free.
//!
//! The database never gives back what it once used, but at its end. So everything in it is copied,
//! in the order of the keys, into a new file in free segments, which then takes the old one's place
//! by one write of a map slot: whenever power is lost, either the old file counts or the new one,
//! and both say the same. Readers of the old one may go on; its segments are free when nobody does.
//! Redb's own compaction was the alternative: nobody may read meanwhile.

use super::batches::Batches;
use super::database::{database, end};
use super::file::HomeFile;
use super::store::Home;
use super::view::HomeView;
use crate::{JournalClient, JournalError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of a new file for each byte of keys and values, in halves: pages that were filled in order
/// are half full at least.
const HALVES_PER_BYTE: u64 = 5;
/// Units for what the database keeps for itself.
const UNITS_BASE: u64 = 3;
/// A file that is larger than a new one would be by this factor, and by so many units, is worth it.
const FACTOR: u64 = 2;
const UNITS_MIN: u64 = 2;

/// How a renewal is made.
pub struct Renewal<'a> {
    /// The journal is closed with it.
    pub closing: bool,
    /// Asked now and then; `false`: there is no time for it any more.
    pub go_on: &'a dyn Fn() -> bool,
}

/// Keys between two questions whether to go on.
const ASK_KEYS: u64 = 64;

impl Home {
    /// How many segments a new file must be given, `spare` ones among them, if it is worth it.
    pub fn worth_renewing(&self, spare: usize) -> Option<usize> {
        self.worth_renewing_without(0).map(|need| need as usize + spare)
    }

    /// The same, without spare ones, if so many bytes of keys and values were removed.
    fn worth_renewing_without(&self, less: u64) -> Option<u64> {
        let need = self.units_of(self.live_bytes().saturating_sub(less));
        let worth = self.file().attached() as u64 >= FACTOR * need + UNITS_MIN;
        (worth && !self.renewals.failed.load(Ordering::Relaxed)).then_some(need)
    }

    /// How many segments a new file must be given, `spare` ones among them.
    pub fn renewal_need(&self, spare: usize) -> usize {
        self.units_of(self.live_bytes()) as usize + spare
    }

    /// Units of a new file for so many bytes of keys and values.
    fn units_of(&self, live: u64) -> u64 {
        UNITS_BASE + (live * HALVES_PER_BYTE / 2).div_ceil(self.file().unit_bytes())
    }

    /// How many segments there will be at most when the store has been renewed, `spare` ones among
    /// them, if it is worth it then.
    pub fn wanted(&self, less: u64, spare: usize) -> u32 {
        self.worth_renewing_without(less).map_or(u32::MAX, |need| need as u32 + spare as u32)
    }

    /// Copies what `view` shows, all that the newest checkpoint wrote, into a new file in
    /// `segments`, and goes on with that. Returns those that are free again. Readers go on with
    /// what they have. No checkpoint may be made meanwhile.
    ///
    /// What cannot be read, does not fit, or takes too long, leaves everything as it is. An error
    /// means that it is not known which file counts on the device.
    pub fn renew(
        &self,
        view: &HomeView,
        segments: &[u32],
        spare: usize,
        owner: &Arc<dyn JournalClient>,
        renewal: Renewal<'_>,
    ) -> Result<Vec<u32>, JournalError> {
        let old = self.file();
        old.settle()?;
        let new = old.successor(segments);
        let in_order = old.read_in_order(true);
        let copied = copy(view, &new, &renewal);
        old.read_in_order(in_order);
        let opened =
            copied.and_then(|whole| whole.then(|| database(&new, self.cache_bytes)).transpose());
        let db = match opened.map_err(|error| new.explain(error)) {
            Ok(Some(db)) => db,
            Ok(None) => return Ok(segments.to_vec()),
            Err(error) => {
                tracing::warn!(%error, "the home store stays as large as it is");
                self.renewals.failed.store(true, Ordering::Relaxed);
                return Ok(segments.to_vec());
            }
        };
        let published = new.publish(spare);
        let unused = match published {
            Ok(unused) => unused,
            Err(error) => {
                end(Some(db));
                return Err(error);
            }
        };
        new.set_owner(owner.clone());
        let old_db = {
            let mut open = self.db.lock();
            old.retire();
            *self.file.write() = new;
            open.replace(db)
        };
        end(old_db);
        self.renewals.retired.lock().push(old);
        Ok(unused)
    }

    /// Segments of files that nobody reads any more.
    pub fn take_retired(&self) -> Vec<u32> {
        let mut retired = self.renewals.retired.lock();
        let unused = retired.extract_if(.., |file| Arc::strong_count(file) == 1);
        unused.flat_map(|file| [file.segments(), file.take_dropped()]).flatten().collect()
    }
}

/// Copies everything; `false` if there was no time for it.
fn copy(view: &HomeView, new: &Arc<HomeFile>, renewal: &Renewal<'_>) -> Result<bool, JournalError> {
    let (mut batches, mut keys) = (Batches::new(new)?, 0_u64);
    let whole = view.each(&mut |key, value| {
        batches.put(key, value)?;
        keys += 1;
        Ok(!keys.is_multiple_of(ASK_KEYS) || (renewal.go_on)())
    })?;
    if whole {
        batches.finish(view.point, renewal.closing)?;
    }
    Ok(whole)
}
