//! A copy that has not ended: its marks are read and written, and at the end superblocks replace
//! them.

use crate::volume::mark::{CopyMark, SECTOR};
use crate::volume::superblock::{Bad, SUPERBLOCK_OFFSETS, Superblock, superblock_begins};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use std::io;

impl Superblock {
    /// What tells it from every other superblock.
    pub fn crc(&self) -> u32 {
        crc32c::crc32c(&self.encode())
    }
}

/// The mark of a copy that has not ended, if there is one on the device: the one that is further.
/// `None` also if the other place of a mark has what no copy leaves there: the device was used for
/// something else since. So also if there is anything between them: a copy begins where zeros are,
/// and writes nothing there, but others do that leave both places alone (md at 4 KiB, ZFS at
/// 16 KiB).
pub fn read_copy_mark(dev: &dyn BlockDevice) -> io::Result<Option<CopyMark>> {
    if SUPERBLOCK_OFFSETS.iter().any(|offset| offset + BLOCK_SIZE as u64 > dev.capacity()) {
        return Ok(None);
    }
    let read = |offset| {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        dev.read(offset, &mut block).map(|()| block)
    };
    let [first, second] = SUPERBLOCK_OFFSETS;
    let (first, second) = (read(first)?, read(second)?);
    let found = match (CopyMark::decode(&first), CopyMark::decode(&second)) {
        (Some(one), Some(other)) => Some(if one.done < other.done { other } else { one }),
        (Some(mark), None) => Some(mark).filter(|mark| may_be_beside(mark, &second)),
        (None, Some(mark)) => Some(mark).filter(|mark| may_be_beside(mark, &first)),
        (None, None) => None,
    };
    if found.is_none() {
        return Ok(None);
    }
    let [from, to] = SUPERBLOCK_OFFSETS;
    let from = from + BLOCK_SIZE as u64;
    let mut between = AlignedBuf::zeroed((to - from) as usize);
    dev.read(from, &mut between)?;
    Ok(found.filter(|_| between.iter().all(|byte| *byte == 0)))
}

/// Whether a copy with this mark may have left this block at the other place: zeros from before its
/// first mark, a mark or its superblock, which may be torn.
fn may_be_beside(mark: &CopyMark, block: &[u8]) -> bool {
    match Superblock::decode(block) {
        Ok(sb) => sb.crc() == mark.state.superblock_crc,
        Err(Bad::Zeros) => true,
        Err(_) => CopyMark::begins(block) || superblock_begins(block, mark.state.volume_id),
    }
}

/// Writes the mark and makes it durable. What it says is done must be durable before.
pub fn write_copy_mark(dev: &dyn BlockDevice, mark: &CopyMark) -> io::Result<()> {
    let block = mark.encode();
    for offset in SUPERBLOCK_OFFSETS {
        dev.write(offset, &block)?;
        dev.flush()?;
    }
    Ok(())
}

/// Makes a copy a volume, once everything else of it is durable. The superblock that replaces the
/// mark at 1 MiB is the switch. All of its block behind the mark's sector is written before, so
/// that a crash leaves a copy that has not ended, or a volume without a torn superblock.
pub fn end_copy(dev: &dyn BlockDevice, sb: &Superblock, mark: &CopyMark) -> io::Result<()> {
    let [first, switch] = SUPERBLOCK_OFFSETS;
    let whole = sb.encode();
    let mut nearly = sb.encode();
    nearly[..SECTOR].copy_from_slice(&mark.encode()[..SECTOR]);
    let last = sb.offsets().into_iter().filter(|offset| !SUPERBLOCK_OFFSETS.contains(offset));
    let copies = last.chain([first, switch]).map(|offset| (offset, &whole));
    for (offset, block) in [(switch, &nearly)].into_iter().chain(copies) {
        dev.write(offset, block)?;
        dev.flush()?;
    }
    Ok(())
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use crate::volume::{
        MkfsOptions, SourceState, VolumeError, find_superblock, mkfs, read_superblock,
    };
    use ferry_device::MemDevice;
    use ferry_env::Env;
    use std::sync::Arc;

    fn mark(done: u64) -> CopyMark {
        let state = SourceState {
            volume_id: [7; 16],
            home_generation: 1,
            log_start: 2,
            log_end: 3,
            log_end_id: 4,
            superblock_crc: 5,
        };
        CopyMark { state, done, end: 64 << 20 }
    }

    #[test]
    fn a_mark_reads_back_and_a_damaged_one_does_not() {
        let mut block = mark(9).encode();
        assert_eq!(CopyMark::decode(&block), Some(mark(9)));
        block[60] ^= 1;
        assert_eq!(CopyMark::decode(&block), None);
    }

    #[test]
    fn a_mark_of_an_older_program_ends_where_it_says_that_all_is_done() {
        let mut block = mark(9).encode();
        block[68..76].fill(0);
        let crc = crc32c::crc32c(&block[..SECTOR - 4]);
        block[SECTOR - 4..SECTOR].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(CopyMark::decode(&block), Some(CopyMark { end: 9, ..mark(9) }));
    }

    #[test]
    fn a_copy_with_one_mark_is_no_volume_though_the_other_superblocks_are_whole() {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(64 << 20));
        let sb = mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        let mut mark = mark(9);
        mark.state.superblock_crc = sb.crc();
        for offset in SUPERBLOCK_OFFSETS {
            end_copy(&*dev, &sb, &mark).unwrap();
            assert_eq!(read_superblock(&dev).unwrap(), sb);
            dev.write(offset, &mark.encode()).unwrap();
            assert!(matches!(read_superblock(&dev), Err(VolumeError::Unfinished)));
            assert!(matches!(find_superblock(&dev), Err(VolumeError::Unfinished)));
            assert_eq!(read_copy_mark(&*dev).unwrap(), Some(mark.clone()));
        }
        let again = mkfs(&dev, &MkfsOptions::default(), &Env::real());
        assert!(matches!(again, Err(VolumeError::Unfinished)));
    }

    #[test]
    fn of_two_marks_the_further_one_counts() {
        let dev = MemDevice::new(64 << 20);
        assert_eq!(read_copy_mark(&dev).unwrap(), None);
        write_copy_mark(&dev, &mark(1)).unwrap();
        dev.write(SUPERBLOCK_OFFSETS[0], &mark(2).encode()).unwrap();
        assert_eq!(read_copy_mark(&dev).unwrap(), Some(mark(2)));
    }

    #[test]
    fn marks_with_other_data_between_them_do_not_count() {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(64 << 20));
        let mut other = AlignedBuf::zeroed(BLOCK_SIZE);
        other[9] = 7;
        for offset in [4 << 10, 16 << 10, (1 << 20) - (4 << 10)] {
            write_copy_mark(&*dev, &mark(9)).unwrap();
            dev.write(offset, &other).unwrap();
            assert_eq!(read_copy_mark(&*dev).unwrap(), None, "{offset}");
            assert!(matches!(read_superblock(&dev), Err(VolumeError::Unfinished)));
            dev.write(offset, &AlignedBuf::zeroed(BLOCK_SIZE)).unwrap();
            assert_eq!(read_copy_mark(&*dev).unwrap(), Some(mark(9)), "{offset}");
        }
    }

    #[test]
    fn a_mark_beside_what_no_copy_leaves_does_not_count() {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(64 << 20));
        let mut noise = AlignedBuf::zeroed(BLOCK_SIZE);
        noise.fill(7);
        let other = mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        for (marked, beside) in
            [(0, 1), (1, 0)].map(|(a, b)| (SUPERBLOCK_OFFSETS[a], SUPERBLOCK_OFFSETS[b]))
        {
            dev.write(marked, &mark(9).encode()).unwrap();
            for block in [&noise, &other.encode()] {
                dev.write(beside, block).unwrap();
                assert_eq!(read_copy_mark(&*dev).unwrap(), None);
                assert!(matches!(read_superblock(&dev), Err(VolumeError::Unfinished)));
            }
            dev.write(beside, &AlignedBuf::zeroed(BLOCK_SIZE)).unwrap();
            assert_eq!(read_copy_mark(&*dev).unwrap(), Some(mark(9)));
            let mut own = mark(9);
            own.state.superblock_crc = other.crc();
            dev.write(marked, &own.encode()).unwrap();
            dev.write(beside, &other.encode()).unwrap();
            assert_eq!(read_copy_mark(&*dev).unwrap(), Some(own));
        }
    }
}
