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

/// The sequence number and the bits, if the block is a whole map of this mirror.
pub fn decode(
    block: &[u8],
    set: &[u8; 16],
    region_len: u64,
    regions: usize,
) -> Option<(u64, Vec<bool>)> {
    let ours = block[..8] == MAGIC
        && is_sealed(block)
        && block[8..24] == *set
        && u64_at(block, 32) == region_len
        && u32_at(block, 40) as usize == regions;
    let bit = |i: usize| block[BITS_AT + i / 8] & (1 << (i % 8)) != 0;
    ours.then(|| (u64_at(block, 24), (0..regions).map(bit).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_return_what_was_written_and_nothing_else() {
        let set = *b"0123456789abcdef";
        let dirty: Vec<bool> = (0..19).map(|i| i % 3 == 0 || i == 17).collect();
        let block = encode(&set, 5, 4 << 20, &dirty);
        assert_eq!(decode(&block, &set, 4 << 20, 19), Some((5, dirty)));
        assert_eq!(decode(&block, &set, 8 << 20, 19), None);
        assert_eq!(decode(&block, &[0; 16], 4 << 20, 19), None);
        assert_eq!(decode(&block, &set, 4 << 20, 20), None);
        let mut torn = encode(&set, 5, 4 << 20, &[false; 19]);
        torn[50] ^= 1;
        assert_eq!(decode(&torn, &set, 4 << 20, 19), None);
        assert_eq!(decode(&[0; BLOCK_SIZE], &set, 4 << 20, 19), None);
    }
}
