//! The map of the home store: which of the volume's segments hold which units of the database's
//! file.
//!
//! Two slots on the device; the newer whole one counts. A change goes to the slots in turn, with a
//! flush between, so one of them is always whole; after every change both are brought up to date,
//! so that either may be lost.
//!
//! A crash may leave one slot half written, and so may damage. Which it was, the mark *at rest*
//! tells: it is set when both slots, and both copies of everything else, are the same on the
//! device, and taken before anything is written again. Either is a write of one sector, which a
//! crash cannot leave half done.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | magic `FHM1` |
//! | 4..6 | version |
//! | 6..8 | zero |
//! | 8..24 | volume id |
//! | 24..32 | generation |
//! | 32..40 | length of the database's file |
//! | 40..44 | segments on the volume |
//! | 44..48 | CRC32C of the entries |
//! | 48 | 1 if the home store is at rest: nothing was written to it since its journal was closed |
//! | 49..60 | zero |
//! | 60..64 | CRC32C of bytes 0..60 |
//! | 4096.. | 4 bytes for each segment: 0 not ours, `u32::MAX` spare, else its unit + 1 |

use super::segments::unit_bytes;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::disk::{Disk, io_error};
use crate::{Geometry, JournalError};
use ferry_device::{AlignedBuf, BLOCK_SIZE};

const MAGIC: u32 = u32::from_le_bytes(*b"FHM1");
const VERSION: u16 = 1;
const SPARE: u32 = u32::MAX;
const HEADER: usize = 64;
const AT_REST: usize = 48;
/// Bytes of redb's largest region, and some.
const REGION_MAX: u64 = (4 << 30) + (1 << 20);
const _: () = assert!(HEADER <= BLOCK_SIZE);

/// One state of the map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HomeMap {
    /// Grows with every change.
    pub generation: u64,
    /// Length of the database's file, in bytes.
    pub len: u64,
    /// Segment of each unit; shorter than the file where its end was never written.
    pub units: Vec<Option<u32>>,
    /// Segments that hold no unit yet.
    pub spare: Vec<u32>,
    /// What was read is marked so. What is written is not: see [`HomeMap::mark`].
    pub at_rest: bool,
}

/// What both slots came to.
pub struct Slots {
    /// The newer whole map.
    pub map: HomeMap,
    /// The slot that does not hold it, if one does not.
    pub behind: Option<u64>,
    /// Why that one is not whole.
    pub problem: Option<&'static str>,
}

impl HomeMap {
    /// All segments that the home store owns.
    pub fn segments(&self) -> impl Iterator<Item = u32> {
        self.units.iter().flatten().chain(&self.spare).copied()
    }

    /// The segment of the file's beginning.
    pub fn first(&self) -> Option<u32> {
        self.units.first().copied().flatten()
    }

    /// The bytes of a slot.
    pub fn encode(&self, geo: &Geometry) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(geo.home_map_len as usize);
        let mut set = |segment: u32, entry: u32| {
            let at = BLOCK_SIZE + segment as usize * 4;
            buf[at..at + 4].copy_from_slice(&entry.to_le_bytes());
        };
        for (unit, segment) in
            self.units.iter().enumerate().filter_map(|(u, s)| Some((u as u32, (*s)?)))
        {
            set(segment, unit + 1);
        }
        self.spare.iter().for_each(|&segment| set(segment, SPARE));
        let entries_crc = crc32c::crc32c(&buf[BLOCK_SIZE..]);
        buf[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        buf[4..6].copy_from_slice(&VERSION.to_le_bytes());
        buf[8..24].copy_from_slice(&geo.volume_id);
        buf[24..32].copy_from_slice(&self.generation.to_le_bytes());
        buf[32..40].copy_from_slice(&self.len.to_le_bytes());
        buf[40..44].copy_from_slice(&geo.segment_count.to_le_bytes());
        buf[44..48].copy_from_slice(&entries_crc.to_le_bytes());
        seal(&mut buf);
        buf
    }

    /// The map in a slot's bytes, or what is wrong with them.
    pub fn decode(buf: &[u8], geo: &Geometry) -> Result<Self, &'static str> {
        if !has_header(buf) {
            return Err("no whole header");
        }
        // Segments that the volume had when this was written; those that the log has taken since
        // were free.
        let segments = u32_at(buf, 40);
        if u16_at(buf, 4) != VERSION || buf[8..24] != geo.volume_id || segments < geo.segment_count
        {
            return Err("of another volume or version");
        }
        if u32_at(buf, 44) != crc32c::crc32c(&buf[BLOCK_SIZE..]) {
            return Err("entries do not match their checksum");
        }
        // redb doubles a file of one region and then adds regions; what is longer makes tables as
        // long in memory.
        if u64_at(buf, 32)
            > 2 * unit_bytes(geo.segment_len) * u64::from(geo.segment_count) + 2 * REGION_MAX
        {
            return Err("a file longer than the volume can hold");
        }
        let at_rest = buf[AT_REST] == 1;
        let mut map =
            Self { generation: u64_at(buf, 24), len: u64_at(buf, 32), at_rest, ..Self::default() };
        for segment in 0..geo.segment_count {
            match u32_at(buf, BLOCK_SIZE + segment as usize * 4) {
                0 => {}
                SPARE => map.spare.push(segment),
                entry => {
                    let unit = entry as usize - 1;
                    if unit as u64 >= map.len.div_ceil(unit_bytes(geo.segment_len)) {
                        return Err("a unit beyond the file's end");
                    }
                    if map.units.len() <= unit {
                        map.units.resize(unit + 1, None);
                    }
                    if map.units[unit].replace(segment).is_some() {
                        return Err("two segments for one unit");
                    }
                }
            }
        }
        Ok(map)
    }

    /// Device offset of one of the two slots.
    pub fn slot_offset(geo: &Geometry, slot: u64) -> u64 {
        geo.home_map_offsets[slot as usize]
    }

    /// Marks the slots that are whole as at rest, or not; durable when it returns.
    pub fn mark(disk: &Disk, geo: &Geometry, at_rest: bool) -> Result<(), JournalError> {
        let mut wrote = false;
        for slot in 0..2 {
            let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
            let read = disk.read(Self::slot_offset(geo, slot), &mut block).is_ok();
            if read && has_header(&block) && block[AT_REST] != u8::from(at_rest) {
                block[AT_REST] = u8::from(at_rest);
                seal(&mut block);
                disk.write(Self::slot_offset(geo, slot), &block).map_err(io_error("home map"))?;
                wrote = true;
            }
        }
        if wrote { disk.flush_wait().map_err(io_error("home map")) } else { Ok(()) }
    }

    /// The slot that is not what was written to it, and the map that it should hold; `None` too
    /// where a crash may have left it so.
    pub fn bad_slot(disk: &Disk, geo: &Geometry) -> Option<(u64, Self, &'static str)> {
        let Slots { map, behind, problem } = Self::read(disk, geo).ok()?;
        let slot = behind.filter(|_| map.at_rest)?;
        Some((slot, map, problem.unwrap_or("it is older than the other one")))
    }

    /// Reads both slots.
    pub fn read(disk: &Disk, geo: &Geometry) -> Result<Slots, JournalError> {
        let mut buf = AlignedBuf::zeroed(geo.home_map_len as usize);
        let mut slots = Vec::new();
        for slot in 0..2 {
            let read = disk.read(Self::slot_offset(geo, slot), &mut buf);
            slots.push(read.map_err(|_| "cannot be read").and_then(|()| Self::decode(&buf, geo)));
        }
        let second = slots.pop().expect("two slots");
        let first = slots.pop().expect("two slots");
        let newer = |map, behind| Ok(Slots { map, behind, problem: None });
        let only = |map, slot, what| {
            tracing::warn!(slot, what, "one of the two home maps is not whole; the other is used");
            Ok(Slots { map, behind: Some(slot), problem: Some(what) })
        };
        match (first, second) {
            // Where only one slot could be unmarked, the store is not at rest.
            (Ok(a), Ok(b)) if a.generation == b.generation => {
                newer(Self { at_rest: a.at_rest && b.at_rest, ..a }, None)
            }
            (Ok(a), Ok(b)) if a.generation > b.generation => newer(a, Some(1)),
            (Ok(_), Ok(b)) => newer(b, Some(0)),
            (Ok(a), Err(what)) => only(a, 1, what),
            (Err(what), Ok(b)) => only(b, 0, what),
            (Err(detail), Err(_)) => Err(JournalError::Damaged {
                what: "home map",
                offset: geo.home_map_offsets[0],
                detail: format!("both copies: {detail}"),
            }),
        }
    }
}

fn has_header(block: &[u8]) -> bool {
    u32_at(block, 0) == MAGIC && u32_at(block, 60) == crc32c::crc32c(&block[..60])
}

fn seal(block: &mut [u8]) {
    let crc = crc32c::crc32c(&block[..60]);
    block[60..64].copy_from_slice(&crc.to_le_bytes());
}
