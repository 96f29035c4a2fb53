//! A copy that has not ended: its marks are read and written, and at the end superblocks replace
//! them.

use crate::volume::mark::{CopyMark, SECTOR};
use crate::volume::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use std::io;

impl Superblock {
    /// What tells it from every other superblock.
    pub fn crc(&self) -> u32 {
        crc32c::crc32c(&self.encode())
    }
}

/// The mark of a copy that has not ended, if there is one on the device: the one that is further.
pub fn read_copy_mark(dev: &dyn BlockDevice) -> io::Result<Option<CopyMark>> {
    let mut furthest: Option<CopyMark> = None;
    for offset in SUPERBLOCK_OFFSETS {
        if offset + BLOCK_SIZE as u64 > dev.capacity() {
            break;
        }
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        dev.read(offset, &mut block)?;
        let further = |mark: &CopyMark| furthest.as_ref().is_none_or(|old| old.done < mark.done);
        if let Some(mark) = CopyMark::decode(&block).filter(further) {
            furthest = Some(mark);
        }
    }
    Ok(furthest)
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
        CopyMark { state, done }
    }

    #[test]
    fn a_mark_reads_back_and_a_damaged_one_does_not() {
        let mut block = mark(9).encode();
        assert_eq!(CopyMark::decode(&block), Some(mark(9)));
        block[60] ^= 1;
        assert_eq!(CopyMark::decode(&block), None);
    }

    #[test]
    fn a_copy_with_one_mark_is_no_volume_though_the_other_superblocks_are_whole() {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(64 << 20));
        let sb = mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        for offset in SUPERBLOCK_OFFSETS {
            end_copy(&*dev, &sb, &mark(9)).unwrap();
            assert_eq!(read_superblock(&dev).unwrap(), sb);
            dev.write(offset, &mark(9).encode()).unwrap();
            assert!(matches!(read_superblock(&dev), Err(VolumeError::Unfinished)));
            assert!(matches!(find_superblock(&dev), Err(VolumeError::Unfinished)));
            assert_eq!(read_copy_mark(&*dev).unwrap(), Some(mark(9)));
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
}
