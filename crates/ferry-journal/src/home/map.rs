//! The map of the home store: which of the volume's segments hold which units of the database's file.
//!
//! Two slots on the device; the newer whole one counts. A change goes to the slots in turn, with a flush between, so
//! one of them is always whole; after every change both are brought up to date, so that either may be lost.
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
//! | 48..60 | zero |
//! | 60..64 | CRC32C of bytes 0..60 |
//! | 4096.. | an entry of 4 bytes for each segment: 0 not ours, `u32::MAX` ours and spare, else the unit's number + 1 |

use super::unit::unit_bytes;
use crate::disk::Disk;
use crate::format::{u16_at, u32_at, u64_at};
use crate::{Geometry, JournalError};
use ferry_device::{AlignedBuf, BLOCK_SIZE};

const MAGIC: u32 = u32::from_le_bytes(*b"FHM1");
const VERSION: u16 = 1;
const SPARE: u32 = u32::MAX;
const HEADER: usize = 64;
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
        for (unit, segment) in self.units.iter().enumerate().filter_map(|(u, s)| Some((u as u32, (*s)?))) {
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
        let crc = crc32c::crc32c(&buf[..60]);
        buf[60..64].copy_from_slice(&crc.to_le_bytes());
        buf
    }

    /// The map in a slot's bytes, or what is wrong with them.
    pub fn decode(buf: &[u8], geo: &Geometry) -> Result<Self, &'static str> {
        if u32_at(buf, 0) != MAGIC || u32_at(buf, 60) != crc32c::crc32c(&buf[..60]) {
            return Err("no whole header");
        }
        // Segments that the volume had when this was written; those that the log has taken since were free.
        let segments = u32_at(buf, 40);
        if u16_at(buf, 4) != VERSION || buf[8..24] != geo.volume_id || segments < geo.segment_count {
            return Err("of another volume or version");
        }
        if u32_at(buf, 44) != crc32c::crc32c(&buf[BLOCK_SIZE..]) {
            return Err("entries do not match their checksum");
        }
        // redb doubles a file of one region and then adds regions; what is longer makes tables as long in memory.
        if u64_at(buf, 32) > 2 * unit_bytes(geo.segment_len) * u64::from(geo.segment_count) + 2 * REGION_MAX {
            return Err("a file longer than the volume can hold");
        }
        let mut map = Self { generation: u64_at(buf, 24), len: u64_at(buf, 32), ..Self::default() };
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

    /// Place of one of the two slots.
    pub fn slot_offset(geo: &Geometry, slot: u64) -> u64 {
        geo.home_map_offset + slot * geo.home_map_len
    }

    fn warn(slot: u64, what: &str) -> u64 {
        tracing::warn!(slot, what, "one of the two home maps is not whole; the other is used");
        slot
    }

    /// Reads both slots: the newer whole map, and the slot that does not hold it, if one does not.
    pub fn read(disk: &Disk, geo: &Geometry) -> Result<(Self, Option<u64>), JournalError> {
        let mut buf = AlignedBuf::zeroed(geo.home_map_len as usize);
        let mut slots = Vec::new();
        for slot in 0..2 {
            let read = disk.read(Self::slot_offset(geo, slot), &mut buf);
            slots.push(read.map_err(|_| "cannot be read").and_then(|()| Self::decode(&buf, geo)));
        }
        let second = slots.pop().expect("two slots");
        let first = slots.pop().expect("two slots");
        match (first, second) {
            (Ok(a), Ok(b)) if a.generation == b.generation => Ok((a, None)),
            (Ok(a), Ok(b)) if a.generation > b.generation => Ok((a, Some(1))),
            (Ok(_), Ok(b)) => Ok((b, Some(0))),
            (Ok(a), Err(what)) => Ok((a, Some(Self::warn(1, what)))),
            (Err(what), Ok(b)) => Ok((b, Some(Self::warn(0, what)))),
            (Err(detail), Err(_)) => Err(JournalError::Damaged {
                what: "home map",
                offset: geo.home_map_offset,
                detail: format!("both copies: {detail}"),
            }),
        }
    }
}
