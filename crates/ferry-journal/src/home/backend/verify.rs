//! Reads the home store's map and file from the device, without its caches.

use super::HomeFile;
use crate::home::map::HomeMap;
use crate::verify::{BadPlace, Step};
use ferry_device::{AlignedBuf, BLOCK_SIZE};

/// Blocks verified at a time, while nothing is written to the file.
const STEP_BLOCKS: u32 = 128;

impl HomeFile {
    /// Reads both slots of the map, and both copies of every block of every unit that is attached. `false`: `step` ended it.
    pub fn verify(&self, found: &mut dyn FnMut(BadPlace), step: Step<'_>) -> bool {
        for slot in 0..2 {
            self.verify_slot(slot, found);
            if !step(self.geo.home_map_len) {
                return false;
            }
        }
        let units = self.state.read().map.units.clone();
        let blocks = u32::try_from(self.unit_bytes() / BLOCK_SIZE as u64).unwrap_or(u32::MAX);
        for (unit, segment) in
            units.iter().enumerate().filter_map(|(unit, segment)| Some((unit, (*segment)?)))
        {
            let mut at = 0;
            // A unit that was given back meanwhile is nobody's damage.
            let still_there = || self.state.read().map.units.get(unit) == Some(&Some(segment));
            while at < blocks && still_there() {
                let count = STEP_BLOCKS.min(blocks - at);
                let mut bad = Vec::new();
                let read = self.pages.verify(segment, at, count, &mut |place| bad.push(place));
                if still_there() {
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

    fn verify_slot(&self, slot: u64, found: &mut dyn FnMut(BadPlace)) {
        let (offset, len) = (HomeMap::slot_offset(&self.geo, slot), self.geo.home_map_len);
        let mut buf = AlignedBuf::zeroed(len as usize);
        // No slot is being written now.
        let _one_at_a_time = self.syncing.lock();
        match self.disk.read(offset, &mut buf) {
            Err(error) => found(BadPlace::unreadable("home map", offset, len, &error)),
            Ok(()) => {
                if let Err(detail) = HomeMap::decode(&buf, &self.geo) {
                    found(BadPlace { what: "home map", offset, len, detail: detail.into() });
                }
            }
        }
    }
}
