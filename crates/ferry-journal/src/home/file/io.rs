//! Reads and writes bytes of the database's file.

use super::{BLOCK, HomeFile};
use crate::JournalError;
use crate::home::map::HomeMap;
use crate::home::read_ahead::READ_MAX;
use crate::home::shape::{children, is_sound};
use crate::home::tree::{Header, NOT_THE_ONE, PageSource, Tree, Walk};
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl HomeFile {
    /// Where `offset` of the file is on the device, and how many bytes follow it there; `None`
    /// where nothing was ever written.
    fn locate(&self, map: &HomeMap, offset: u64) -> (Option<u64>, u64) {
        let segments = self.pages.segments();
        let (unit, within) = ((offset / segments.unit) as usize, offset % segments.unit);
        let location = map.units.get(unit).copied().flatten();
        (location.map(|segment| segments.offset(segment) + within), segments.unit - within)
    }

    /// Where `offset` is and how many bytes follow it in its unit. The lock is not held over the
    /// I/O that follows: redb neither reads what it is writing nor writes what a reader may see.
    fn location_of(&self, offset: u64, end: u64) -> Result<Location, JournalError> {
        let state = self.state.read();
        if end > state.map.len {
            return Err(beyond_end(offset));
        }
        let (device, room) = self.locate(&state.map, offset);
        Ok(Location { device, room, in_memory: state.in_memory.is_some() })
    }

    /// Reads whole blocks that lie in one unit.
    fn read_blocks(
        &self,
        location: &Location,
        offset: u64,
        out: &mut AlignedBuf,
    ) -> Result<(), JournalError> {
        match location.device {
            Some(device) => {
                self.buffer.read_through(device, out, |out| self.pages.read(device, out))?
            }
            None => out.fill(0),
        }
        if location.in_memory
            && let Some(memory) = &self.state.read().in_memory
        {
            for (at, block) in out.chunks_exact_mut(BLOCK_SIZE).enumerate() {
                if let Some(newer) = memory.get(&(offset / BLOCK + at as u64)) {
                    block.copy_from_slice(newer);
                }
            }
        }
        Ok(())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), JournalError> {
        let end = offset.checked_add(out.len() as u64).ok_or_else(|| beyond_end(offset))?;
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let start = at - at % BLOCK;
            let location = self.location_of(start, end)?;
            let want = end - start;
            let mut blocks =
                AlignedBuf::zeroed(want.next_multiple_of(BLOCK).min(location.room) as usize);
            self.read_blocks(&location, start, &mut blocks)?;
            let from = (at - start) as usize;
            let n = (blocks.len() - from).min(out.len() - done);
            out[done..done + n].copy_from_slice(&blocks[from..from + n]);
            done += n;
        }
        Ok(())
    }

    /// All that the database reads are pages, but its header.
    fn check_shape(&self, offset: u64, page: &[u8]) -> Result<(), JournalError> {
        if offset == 0 || is_sound(page, self.state.read().map.len) {
            return Ok(());
        }
        Err(self.damaged(offset, "a page makes no sense to the database"))
    }

    pub(super) fn damaged(&self, offset: u64, detail: &str) -> JournalError {
        JournalError::Damaged {
            what: "home store",
            offset: self.device_offset(offset),
            detail: detail.to_owned(),
        }
    }

    /// Reads what the database asks for.
    pub(super) fn read_page(&self, offset: u64, out: &mut [u8]) -> Result<(), JournalError> {
        self.read(offset, out)?;
        self.check_shape(offset, out)?;
        if offset == 0 || self.links.check(offset / BLOCK, out) {
            return Ok(());
        }
        Err(self.damaged(offset, NOT_THE_ONE))
    }

    /// Learns from the header and the table of tables which pages belong where; the pages below say
    /// more as they are read.
    pub(super) fn learn_links(self: &Arc<Self>, header: &[u8]) {
        let Some(header) = Header::decode(header) else { return };
        self.links.learn(header.links());
        for own in [false, true] {
            let tables = Walk::tables(self, &header, own, &mut |_| {});
            self.links.learn(tables.iter().filter_map(Tree::link).collect());
        }
    }

    /// Reads the pages that a branch names in advance, if a reader goes through all keys in order.
    pub(super) fn read_ahead(&self, page: &[u8]) {
        if !self.in_order.load(Ordering::Relaxed) {
            return;
        }
        let mut wanted = Vec::new();
        {
            let state = self.state.read();
            let pages = children(page).filter(|range| range.end - range.start <= READ_MAX);
            for Range { mut start, end } in pages {
                while start < end {
                    let (location, room) = self.locate(&state.map, start);
                    let len = room.min(end - start);
                    wanted.extend(location.map(|location| location..location + len));
                    start += len;
                }
            }
        }
        self.pages.read_ahead(wanted);
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end =
            offset.checked_add(data.len() as u64).filter(|end| *end <= self.state.read().map.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.links.write(offset / BLOCK..end.div_ceil(BLOCK));
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let from = (at % BLOCK) as usize;
            let start = at - from as u64;
            self.attach(start)?;
            let location = self.location_of(start, end).map_err(io::Error::other)?;
            let left = data.len() - done;
            if from == 0 && left >= BLOCK_SIZE {
                let n = (left - left % BLOCK_SIZE).min(location.room as usize);
                self.store(&location, start, &data[done..done + n])?;
                done += n;
            } else {
                let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
                self.read_blocks(&location, start, &mut block).map_err(io::Error::other)?;
                let n = (BLOCK_SIZE - from).min(left);
                block[from..from + n].copy_from_slice(&data[done..done + n]);
                self.store(&location, start, &block)?;
                done += n;
            }
        }
        Ok(())
    }

    /// Writes whole blocks that lie in one unit.
    fn store(&self, location: &Location, offset: u64, blocks: &[u8]) -> io::Result<()> {
        if location.in_memory {
            let mut state = self.state.write();
            let memory = state.in_memory.as_mut().expect("an in-memory file stays one");
            for (at, block) in blocks.chunks_exact(BLOCK_SIZE).enumerate() {
                memory.insert(offset / BLOCK + at as u64, block.into());
            }
            return Ok(());
        }
        let device = location.device.expect("attached just before");
        if self.buffer.put(device, blocks) {
            self.drain(None)?;
        }
        Ok(())
    }

    /// Sees to it that the unit of `offset` has a segment.
    fn attach(&self, offset: u64) -> io::Result<()> {
        let unit = (offset / self.unit_bytes()) as usize;
        if matches!(self.state.read().map.units.get(unit), Some(Some(_))) {
            return Ok(());
        }
        while !self.state.write().attach(unit, &self.pages) {
            // How much redb writes is known only as it does. The owner is asked without our lock:
            // readers want that.
            let Some(segment) = self.owner.get().and_then(|o| o.take_home_segment()) else {
                self.lacked_space.store(true, Ordering::Release);
                return Err(io::ErrorKind::StorageFull.into());
            };
            self.add_spare(segment, false);
        }
        Ok(())
    }

    pub(super) fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.state.write();
        state.map.len = len;
        let units = len.div_ceil(self.unit_bytes()) as usize;
        if units < state.map.units.len() {
            let cut_off: Vec<u32> = state.map.units.drain(units..).flatten().collect();
            cut_off.iter().for_each(|segment| self.pages.forget(*segment));
            self.pages.set_first(state.map.first());
            state.dropped.extend(cut_off);
        }
        if let Some(memory) = &mut state.in_memory {
            memory.retain(|block, _| block * BLOCK < len);
        }
        state.changed = true;
        Ok(())
    }
}

impl PageSource for HomeFile {
    fn page(&self, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<(), JournalError> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.state.read().map.len);
        end.ok_or_else(|| beyond_end(offset))?;
        let mut page = vec![0; len];
        self.read(offset, &mut page)?;
        self.check_shape(offset, &page)?;
        self.read_ahead(&page);
        *out = page;
        Ok(())
    }

    fn device_offset(&self, offset: u64) -> u64 {
        self.locate(&self.state.read().map, offset).0.unwrap_or(0)
    }
}

/// Where an offset of the file is.
struct Location {
    /// On the device; `None` where nothing was ever written.
    device: Option<u64>,
    /// Bytes from there to the end of the unit.
    room: u64,
    /// Nothing may reach the device.
    in_memory: bool,
}

fn beyond_end(offset: u64) -> JournalError {
    let detail = format!("nothing is at byte {offset} of the database's file");
    JournalError::Damaged { what: "home store", offset: 0, detail }
}
