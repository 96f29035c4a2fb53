//! Summary blocks: what a segment holds, for the cleaner (`docs/format.md` draws them).
//!
//! A summary stands somewhere behind the blocks that it names. It is a hint: what it says is held
//! against the extent map, so neither a lost summary nor a file that contains one can do harm.

use crate::api::Ino;

/// Bytes of a block.
const BLOCK: usize = crate::keys::BLOCK as usize;
const MAGIC: [u8; 8] = *b"FERRYSUM";
const VERSION: u32 = 1;
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// Entries of one summary block.
pub const ENTRIES: usize = (BLOCK - HEADER) / ENTRY;
const _: () = assert!(HEADER + ENTRIES * ENTRY <= BLOCK && ENTRIES == 168);

/// Blocks of one file that stand together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The file.
    pub ino: Ino,
    /// First block of the file.
    pub file_block: u64,
    /// First block in the segment.
    pub at: u32,
    /// Number of blocks.
    pub len: u32,
}

/// Which segment of which volume.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    /// The volume.
    pub volume_id: [u8; 16],
    /// The segment.
    pub segment: u32,
}

/// Writes a summary of at most [`ENTRIES`] entries into `block`.
pub fn encode(home: Home, entries: &[Entry], block: &mut [u8]) {
    assert!(entries.len() <= ENTRIES, "{} entries do not fit a summary block", entries.len());
    block.fill(0);
    block[..8].copy_from_slice(&MAGIC);
    block[8..12].copy_from_slice(&VERSION.to_le_bytes());
    block[12..28].copy_from_slice(&home.volume_id);
    block[28..32].copy_from_slice(&home.segment.to_le_bytes());
    block[32..36].copy_from_slice(&(entries.len() as u32).to_le_bytes());
    for (entry, out) in entries.iter().zip(block[HEADER..].chunks_exact_mut(ENTRY)) {
        out[..8].copy_from_slice(&entry.ino.to_le_bytes());
        out[8..16].copy_from_slice(&entry.file_block.to_le_bytes());
        out[16..20].copy_from_slice(&entry.at.to_le_bytes());
        out[20..24].copy_from_slice(&entry.len.to_le_bytes());
    }
    let crc = crc32c::crc32c(block);
    block[36..40].copy_from_slice(&crc.to_le_bytes());
}

/// Reads a block; `None` when it is no whole summary of this segment.
pub fn decode(home: Home, block: &[u8]) -> Option<Vec<Entry>> {
    if block.get(..8)? != MAGIC {
        return None;
    }
    let u32_at = |i: usize| Some(u32::from_le_bytes(block.get(i..i + 4)?.try_into().ok()?));
    let u64_at = |i: usize| Some(u64::from_le_bytes(block.get(i..i + 8)?.try_into().ok()?));
    let same = u32_at(8)? == VERSION
        && block.get(12..28)? == home.volume_id
        && u32_at(28)? == home.segment;
    let zero = crc32c::crc32c_append(crc32c::crc32c(block.get(..36)?), &[0; 4]);
    if !same || crc32c::crc32c_append(zero, block.get(40..)?) != u32_at(36)? {
        return None;
    }
    let count = u32_at(32)? as usize;
    if count > ENTRIES {
        return None;
    }
    (0..count)
        .map(|i| {
            let at = HEADER + i * ENTRY;
            Some(Entry {
                ino: u64_at(at)?,
                file_block: u64_at(at + 8)?,
                at: u32_at(at + 16)?,
                len: u32_at(at + 20)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_reads_back_and_no_other_block_does() {
        let home = Home { volume_id: [7; 16], segment: 3 };
        let entries: Vec<_> = (0..ENTRIES as u64)
            .map(|i| Entry { ino: i, file_block: i * 9, at: i as u32, len: 1 })
            .collect();
        let mut block = vec![0xaa; BLOCK];
        encode(home, &entries, &mut block);
        assert_eq!(decode(home, &block), Some(entries));
        assert_eq!(decode(Home { segment: 4, ..home }, &block), None);
        assert_eq!(decode(Home { volume_id: [8; 16], ..home }, &block), None);
        for at in [0, 9, 20, 33, 37, 41, 600, BLOCK - 1] {
            let mut bad = block.clone();
            bad[at] ^= 1;
            assert_eq!(decode(home, &bad), None, "byte {at}");
        }
        assert_eq!(decode(home, &block[..100]), None);
        assert_eq!(decode(home, &vec![0; BLOCK]), None);
    }
}
