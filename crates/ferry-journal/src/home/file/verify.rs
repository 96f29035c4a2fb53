//! Reads the home store's map and file from the device, without its caches.

use super::BLOCK;
use crate::home::file::HomeFile;
use crate::home::map::HomeMap;
use crate::{BadRange, Step};
use ferry_device::AlignedBuf;
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Blocks verified at a time, while nothing is written to the file.
const STEP_BLOCKS: u32 = 128;

/// A block of the file of which a copy is not what was written, and may not need to be.
#[derive(Clone, Copy)]
pub struct Suspect {
    unit: usize,
    segment: u32,
    block: u32,
}

impl HomeFile {
    /// Reads both slots of the map, both copies of every block of every unit that is attached, and
    /// their checksums. Pages that are not what was written are [`Suspect`]: whether the database
    /// uses them is not known here. `false`: `step` ended it.
    pub fn verify(
        &self,
        found: &mut dyn FnMut(BadRange),
        suspects: &mut Vec<Suspect>,
        step: Step<'_>,
    ) -> bool {
        for slot in 0..2 {
            self.verify_slot(slot, found);
            if !step(self.geo().home_map_len) {
                return false;
            }
        }
        let units = self.state.read().map.units.clone();
        let blocks = u32::try_from(self.unit_bytes() / BLOCK).unwrap_or(u32::MAX);
        for (unit, segment) in
            units.iter().enumerate().filter_map(|(unit, segment)| Some((unit, (*segment)?)))
        {
            let mut at = 0;
            while at < blocks && self.has(unit, segment) {
                let count = STEP_BLOCKS.min(blocks - at);
                let (mut bad, mut read) = (Vec::new(), 0);
                if at == 0 {
                    read += self.pages.verify_sums(segment, &mut |offset| bad.push(offset));
                }
                read += self.pages.suspects(segment, at, count, &mut |block| {
                    suspects.push(Suspect { unit, segment, block });
                });
                if self.has(unit, segment) {
                    bad.into_iter().for_each(&mut *found);
                }
                if !step(read) {
                    return false;
                }
                at += count;
            }
        }
        true
    }

    /// The unit is there still. One that was given back is nobody's damage, nor is one of a file
    /// whose place was taken.
    fn has(&self, unit: usize, segment: u32) -> bool {
        !self.retired.load(Ordering::Acquire)
            && self.state.read().map.units.get(unit) == Some(&Some(segment))
    }

    /// Reports what is wrong with those of the suspects that the database uses, as `used` says of
    /// blocks of the file.
    pub fn judge(
        &self,
        suspects: &[Suspect],
        used: &dyn Fn(u64) -> bool,
        found: &mut dyn FnMut(BadRange),
    ) {
        let each = self.unit_bytes() / BLOCK;
        // A block of checksums has those of many.
        let mut told = HashSet::new();
        for suspect in suspects {
            let mut bad = Vec::new();
            if used(suspect.unit as u64 * each + u64::from(suspect.block)) {
                self.pages.judge(suspect.segment, suspect.block, &mut |offset| bad.push(offset));
            }
            if self.has(suspect.unit, suspect.segment) {
                bad.into_iter().filter(|offset| told.insert(offset.offset)).for_each(&mut *found);
            }
        }
    }

    fn verify_slot(&self, slot: u64, found: &mut dyn FnMut(BadRange)) {
        // No slot is being written now.
        let _one_at_a_time = self.syncing.lock();
        let geo = self.geo();
        let (offset, len) = (HomeMap::slot_offset(&geo, slot), geo.home_map_len);
        let mut buf = AlignedBuf::zeroed(len as usize);
        match self.disk.read(offset, &mut buf) {
            Err(error) => found(BadRange::unreadable("home map", offset, len, &error)),
            Ok(()) => {
                if let Err(detail) = HomeMap::decode(&buf, &geo) {
                    found(BadRange { what: "home map", offset, len, detail: detail.into() });
                }
            }
        }
    }
}
