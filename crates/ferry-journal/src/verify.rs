//! Reading what the journal keeps on the device, while everything goes on, to see whether it is
//! still what was written.

use crate::disk::{Disk, io_error};
use crate::home::map::HomeMap;
use crate::home::{HomeFile, Suspect};
use crate::journal::Journal;
use crate::log::format::LOG_BLOCK;
use crate::log::reader::Reader;
use crate::{BadRange, Geometry, JournalError, Step};
use ferry_device::BlockDevice;
use std::sync::Arc;

/// Where a slot of the home store's map is that is damaged while the other one is whole, and what
/// is wrong with it. One that a crash may have left so is not damaged.
pub fn bad_map_slot(dev: &Arc<dyn BlockDevice>, geo: &Geometry) -> Option<(u64, &'static str)> {
    let (slot, _, why) = HomeMap::bad_slot(&Disk::new(dev.clone()), geo)?;
    Some((HomeMap::slot_offset(geo, slot), why))
}

/// Writes such a slot anew, from the other one; says where. The journal must not be open.
pub fn mend_map_slot(
    dev: &Arc<dyn BlockDevice>,
    geo: &Geometry,
) -> Result<Option<u64>, JournalError> {
    let disk = Disk::new(dev.clone());
    let Some((slot, map, _)) = HomeMap::bad_slot(&disk, geo) else { return Ok(None) };
    let offset = HomeMap::slot_offset(geo, slot);
    disk.write(offset, &map.encode(geo))
        .and_then(|()| disk.flush_wait())
        .map_err(io_error("home map"))?;
    HomeMap::mark(&disk, geo, true)?;
    Ok(Some(offset))
}

impl Journal {
    /// Reads every record that recovery would need now, from the newest checkpoint to the newest
    /// durable context. The first that is not whole is reported: what follows it cannot be told
    /// from garbage. `false`: `step` ended it.
    pub fn verify_log(&self, found: &mut dyn FnMut(BadRange), step: Step<'_>) -> bool {
        let core = &self.core;
        loop {
            // A checkpoint shows its point before it gives the log's space back: while the point
            // stays, so do the records.
            let start = core.head.read().view.home.point;
            let durable = core.pipe.lock().end.seq;
            let area = core.area();
            let mut reader = Reader::new(&core.disk, &area, start.position);
            let mut end = start;
            let mut broken = None;
            while broken.is_none() && end.seq < durable {
                match reader.record(end) {
                    Ok(Some(record)) => {
                        let blocks = record.end.position - end.position;
                        end = record.end;
                        if !step(blocks * LOG_BLOCK as u64) {
                            return false;
                        }
                    }
                    Ok(None) => broken = Some(format!("context {} is not whole", end.seq.0 + 1)),
                    Err(error) => broken = Some(error.to_string()),
                }
            }
            let Some(detail) = broken else { return true };
            if core.head.read().view.home.point == start && core.area() == area {
                let offset = area.offset(end.position);
                found(BadRange { what: "log", offset, len: LOG_BLOCK as u64, detail });
                return true;
            }
        }
    }

    /// Reads both copies of the home store's map and of every block of its file, and holds them
    /// against their checksums. What one copy alone has lost is mended from the other, unless the
    /// volume is read-only. `false`: `step` ended it.
    pub fn verify_home(&self, found: &mut dyn FnMut(BadRange), step: Step<'_>) -> bool {
        loop {
            let file = self.core.home.file();
            let mut suspects = Vec::new();
            let go_on = file.verify(found, &mut suspects, step);
            if !suspects.is_empty() && !self.judge(&file, &suspects, found, &mut *step) {
                return false;
            }
            if !go_on || Arc::ptr_eq(&file, &self.core.home.file()) {
                return go_on;
            }
        }
    }

    /// Reports those of the suspects that the database uses: a commit that power was lost in leaves
    /// pages behind that are not whole, and free. `false`: `step` ended it.
    fn judge(
        &self,
        file: &HomeFile,
        suspects: &[Suspect],
        found: &mut dyn FnMut(BadRange),
        step: Step<'_>,
    ) -> bool {
        let core = &self.core;
        let (_view, salvage) = {
            // No checkpoint: the view and what is opened here are of the same one. The view then
            // keeps its pages, but not the database's own.
            let _checkpointing = core.checkpointing.lock();
            let salvage = core.home.salvage().map(|salvage| (salvage.own_blocks(), salvage));
            (core.head.read().view.home.clone(), salvage)
        };
        match salvage.map(|(own, salvage)| (own, salvage.blocks(step))) {
            Ok((own, Some(ours))) => {
                file.judge(suspects, &|block| own.contains(&block) || ours.contains(&block), found);
            }
            Ok((_, None)) => return false,
            Err(error) => {
                tracing::warn!(%error, "which pages the home store uses is not known: all are judged");
                file.judge(suspects, &|_| true, found);
            }
        }
        true
    }

    /// Holds every page of the home store's database against what the page above it says of it. No
    /// checkpoint is made meanwhile. `step` may end it.
    pub fn verify_pages(&self, found: &mut dyn FnMut(BadRange), step: Step<'_>) {
        let _checkpointing = self.core.checkpointing.lock();
        match self.core.home.salvage() {
            Ok(salvage) => salvage.verify(found, step),
            Err(JournalError::Damaged { what, offset, detail }) => {
                found(BadRange { what, offset, len: LOG_BLOCK as u64, detail });
            }
            Err(error) => {
                found(BadRange {
                    what: "home store",
                    offset: 0,
                    len: 0,
                    detail: error.to_string(),
                });
            }
        }
    }

    /// Offsets on the device where a block of the home store that was read since the opening was
    /// not what was written, while its other copy was. Unless the journal is read-only they have
    /// been mended.
    pub fn home_bad_copies(&self) -> Vec<u64> {
        self.core.home.file().bad_copies()
    }

    /// Bytes of all keys and values, as of the newest checkpoint.
    pub fn stored_bytes(&self) -> u64 {
        self.core.home.live_bytes()
    }
}
