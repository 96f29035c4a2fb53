//! The home store: its map, and the blocks of its database, each of which lies twice in its
//! segment, each time with its checksum behind it (`docs/format.md`, "The home store").

use super::{put_crc, read, read_long, replace, scramble, write};
use crate::device::{SimDevice, SimRng};
use crate::fuzz::bases::Base;
use ferry_device::{AlignedBuf, BLOCK_SIZE};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of the header of the map's slot that its checksum covers.
const MAP_HEADER: usize = 60;
/// Bytes that redb uses of the file's first block.
const HEADER_USED: usize = 320;
/// Where that block's own checksum is.
const HEADER_CRC: usize = 508;

/// One segment of the home store.
struct Unit {
    /// Its number in the file; `None`: it holds nothing yet.
    number: Option<u64>,
    /// First byte of the segment.
    offset: u64,
    /// Blocks of one copy, and of one copy of their checksums.
    pages: u64,
    sums: u64,
}

impl Unit {
    fn page(&self, block: u64, copy: u64) -> u64 {
        self.offset + (copy * (self.pages + self.sums) + block) * BLOCK
    }

    /// Offset of the block with a block's checksum, and where it is in it.
    fn sum(&self, block: u64, copy: u64) -> (u64, usize) {
        let entries = BLOCK / 4;
        let at = self.pages + copy * (self.pages + self.sums) + block / entries;
        (self.offset + at * BLOCK, (block % entries) as usize * 4)
    }

    /// Writes both copies of a block with checksums that are right.
    fn store(&self, device: &SimDevice, block: u64, mut buf: AlignedBuf) {
        if self.number == Some(0) && block == 0 {
            put_crc(&mut buf, 0..HEADER_CRC, HEADER_CRC);
        }
        for copy in 0..2 {
            write(device, self.page(block, copy), &buf);
            let (offset, at) = self.sum(block, copy);
            let mut sums = read(device, offset);
            let sum = crc32c::crc32c(&buf).max(1);
            sums[at..at + 4].copy_from_slice(&sum.to_le_bytes());
            write(device, offset, &sums);
        }
    }
}

/// Segments that the first slot of the map names.
pub(super) fn segments(device: &SimDevice, base: &Base) -> Vec<u32> {
    units(device, base)
        .iter()
        .map(|unit| {
            ((unit.offset - base.superblock.segments_offset) / base.superblock.segment_len) as u32
        })
        .collect()
}

fn units(device: &SimDevice, base: &Base) -> Vec<Unit> {
    let sb = &base.superblock;
    let map = read_long(device, sb.home_map_offsets[0], sb.home_map_len as usize);
    let half = sb.segment_len / BLOCK / 2;
    let sums = half.div_ceil(BLOCK / 4 + 1);
    let unit = |segment: u32| {
        let entry = map[BLOCK_SIZE + 4 * segment as usize..][..4]
            .iter()
            .rev()
            .fold(0, |n, b| n << 8 | u64::from(*b));
        let offset = sb.segments_offset + u64::from(segment) * sb.segment_len;
        let number = (entry != u64::from(u32::MAX)).then(|| entry.wrapping_sub(1));
        (entry != 0).then_some(Unit { number, offset, pages: half - sums, sums })
    };
    (0..sb.segment_count).filter_map(unit).collect()
}

/// Damages some blocks of the database.
pub(super) fn pages(device: &SimDevice, base: &Base, rng: &mut SimRng) {
    let units = units(device, base);
    let mut used = Vec::new();
    for unit in &units {
        let first = unit.page(0, 0);
        let inside = first..first + unit.pages * BLOCK;
        used.extend(
            base.used
                .iter()
                .filter(|at| inside.contains(at))
                .map(|at| (unit, (at - first) / BLOCK)),
        );
    }
    if used.is_empty() {
        return;
    }
    for _ in 0..1 + rng.below(3) {
        let (unit, block) = *rng.pick(&used);
        match rng.below(8) {
            0 => replace(device, base, unit.page(block, rng.below(2)), rng),
            1 => (0..2).for_each(|copy| replace(device, base, unit.page(block, copy), rng)),
            2 => replace(device, base, unit.sum(block, rng.below(2)).0, rng),
            kind => {
                let mut buf = read(device, unit.page(block, 0));
                let header = unit.number == Some(0) && block == 0;
                let (other, from) = *rng.pick(&used);
                match kind {
                    3 if !header => buf = read(device, other.page(from, 0)),
                    4 => buf = read(&base.old, unit.page(block, 0)),
                    _ => {
                        let end = if header { HEADER_USED } else { BLOCK_SIZE };
                        // What matters most stands in front.
                        let end = if rng.chance(1, 2) { end.min(128) } else { end };
                        for _ in 0..1 + rng.below(2) {
                            scramble(&mut buf[..end], rng);
                        }
                    }
                }
                unit.store(device, block, buf);
            }
        }
    }
}

/// Damages the map.
pub(super) fn map(device: &SimDevice, base: &Base, rng: &mut SimRng) {
    let (slots, len) = (base.superblock.home_map_offsets, base.superblock.home_map_len);
    let slot = *rng.pick(&slots);
    let mut buf = read_long(device, slot, len as usize);
    if rng.chance(1, 2) {
        scramble(&mut buf[..MAP_HEADER + 4], rng);
    } else {
        let entries = BLOCK_SIZE..BLOCK_SIZE + 4 * base.superblock.segment_count as usize;
        for _ in 0..1 + rng.below(3) {
            scramble(&mut buf[entries.clone()], rng);
        }
    }
    if rng.chance(3, 4) {
        put_crc(&mut buf, BLOCK_SIZE..len as usize, 44);
        put_crc(&mut buf, 0..MAP_HEADER, MAP_HEADER);
    }
    write(device, slot, &buf);
    if rng.chance(1, 2) {
        slots.into_iter().for_each(|slot| write(device, slot, &buf));
    }
}
