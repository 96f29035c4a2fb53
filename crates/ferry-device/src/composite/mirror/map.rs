//! The write-intent map on the disk: a bit for each region that may differ between the sides.
//! `docs/format.md` draws it.

use super::super::header::{is_sealed, seal, u32_at, u64_at};
use super::regions::REGIONS_MAX;
use crate::buffer::{AlignedBuf, BLOCK_SIZE};

const MAGIC: [u8; 8] = *b"FERRYWIM";
const BITS_AT: usize = 48;
const _: () = assert!(8 + 16 + 8 + 8 + 4 + 4 == BITS_AT);
const _: () = assert!(BITS_AT + REGIONS_MAX as usize / 8 <= BLOCK_SIZE - 4);

/// The block of a map.
pub fn encode(set: &[u8; 16], sequence: u64, region_len: u64, dirty: &[bool]) -> AlignedBuf {
    let mut out = Vec::with_capacity(BLOCK_SIZE);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(set);
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(&region_len.to_le_bytes());
    out.extend_from_slice(&(dirty.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    let byte = |bits: &[bool]| bits.iter().rev().fold(0_u8, |byte, bit| byte << 1 | u8::from(*bit));
    out.extend(dirty.chunks(8).map(byte));
    seal(&out)
}

/// What a slot says.
#[derive(Debug, PartialEq, Eq)]
pub struct Map {
    /// Of the slots of a side the higher one counts.
    pub sequence: u64,
    region_len: u64,
    dirty: Vec<bool>,
}

/// The map, if the block is a whole one of this mirror.
pub fn decode(block: &[u8], set: &[u8; 16]) -> Option<Map> {
    let ours = block[..8] == MAGIC && is_sealed(block) && block[8..24] == *set;
    let (region_len, regions) = (u64_at(block, 32), u32_at(block, 40) as usize);
    let sound = ours && region_len > 0 && regions <= REGIONS_MAX as usize;
    let bit = |i: usize| block[BITS_AT + i / 8] & (1 << (i % 8)) != 0;
    let dirty = || (0..regions).map(bit).collect();
    sound.then(|| Map { sequence: u64_at(block, 24), region_len, dirty: dirty() })
}

impl Map {
    /// Which regions of a mirror of so many bytes may differ between the sides. A map from before
    /// it got another length may have regions of another length, or end earlier: what it says
    /// nothing of may differ.
    pub fn regions(&self, capacity: u64, region_len: u64) -> Vec<bool> {
        let is_dirty = |region: u64| {
            let end = ((region + 1) * region_len).min(capacity).div_ceil(self.region_len);
            let mut parts = region * region_len / self.region_len..end;
            parts.any(|part| self.dirty.get(part as usize).copied().unwrap_or(true))
        };
        (0..capacity.div_ceil(region_len)).map(is_dirty).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_return_what_was_written_and_nothing_else() {
        let set = *b"0123456789abcdef";
        let dirty: Vec<bool> = (0..19).map(|i| i % 3 == 0 || i == 17).collect();
        let block = encode(&set, 5, 4 << 20, &dirty);
        let map = decode(&block, &set).expect("a whole map");
        assert_eq!((map.sequence, map.region_len), (5, 4 << 20));
        assert_eq!(map.regions(76 << 20, 4 << 20), dirty);
        assert_eq!(decode(&block, &[0; 16]), None);
        let mut torn = encode(&set, 5, 4 << 20, &[false; 19]);
        torn[50] ^= 1;
        assert_eq!(decode(&torn, &set), None);
        assert_eq!(decode(&[0; BLOCK_SIZE], &set), None);
    }

    #[test]
    fn a_map_of_another_length_misses_no_dirty_region() {
        let (set, mib) = (*b"0123456789abcdef", 1 << 20);
        let dirty = [true, false, false, true, false, false, false];
        let map = decode(&encode(&set, 5, 4 * mib, &dirty), &set).expect("a whole map");
        // 26 MiB: the last region is a short one.
        assert_eq!(map.regions(26 * mib, 8 * mib), [true, true, false, false]);
        assert_eq!(map.regions(12 * mib, 4 * mib), [true, false, false]);
        let longer = map.regions(36 * mib, 4 * mib);
        assert_eq!((&longer[..7], &longer[7..]), (&dirty[..], &[true; 2][..]));
        assert_eq!(map.regions(40 * mib, 16 * mib), [true, true, true]);
        assert_eq!(map.regions(10 * mib, 2 * mib), [true, true, false, false, false]);
    }
}
