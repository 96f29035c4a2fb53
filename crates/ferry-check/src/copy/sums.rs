//! The checksums of the data in a window of the device, as the extents of all files say.

use crate::inspect::Inspector;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_fs::keys::{self, BLOCK, Extent, Key};
use ferry_journal::JournalError;
use std::io;
use std::ops::Range;

use super::plan::Plan;
use super::types::CopyError;

/// So often a block of a disk is read before it counts as one that the disk cannot read. A store
/// was asked again by its own device, for longer.
const TRIES: usize = 4;

/// The checksums of the blocks of one window.
pub(super) struct Sums {
    first: u64,
    crcs: Vec<Option<u32>>,
}

impl Sums {
    /// Of a window of so many bytes that begins at this byte of the device.
    pub(super) fn load(
        inspector: &Inspector,
        offset: u64,
        bytes: u64,
    ) -> Result<Self, JournalError> {
        let first = offset / BLOCK;
        let blocks = inspector.superblock().size.div_ceil(BLOCK).saturating_sub(first);
        let mut sums = Self { first, crcs: vec![None; blocks.min(bytes / BLOCK) as usize] };
        inspector.keys(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| {
            if let (Some(Key::Extent(..)), Ok(Extent::Data { block, crcs })) =
                (keys::parse(key), Extent::decode(value))
            {
                sums.note(block, &crcs);
            }
            true
        })?;
        Ok(sums)
    }

    fn note(&mut self, block: u64, crcs: &[u32]) {
        for (block, crc) in (block..).zip(crcs) {
            let slot = block.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
            if let Some(slot) = slot.and_then(|at| self.crcs.get_mut(at)) {
                *slot = Some(*crc);
            }
        }
    }

    /// The bytes of the device whose checksums it has.
    pub(super) fn range(&self) -> Range<u64> {
        self.first * BLOCK..(self.first + self.crcs.len() as u64) * BLOCK
    }

    /// The checksum of the block at this byte of the device, if it holds data of a file.
    fn of(&self, offset: u64) -> Option<u32> {
        let at = usize::try_from((offset / BLOCK).checked_sub(self.first)?).ok()?;
        self.crcs.get(at).copied().flatten()
    }

    /// Reads a chunk of the volume. A block of it that is not what was written is looked for on the
    /// other copies that the device has. One that nothing needs becomes zeros if it cannot be read:
    /// returns how many. An error that may pass is no reason for zeros.
    pub(super) fn read(
        &self,
        inspector: &Inspector,
        plan: &Plan,
        offset: u64,
        buf: &mut AlignedBuf,
    ) -> Result<u64, CopyError> {
        let device = &**inspector.device();
        let mut zeroed = 0;
        let whole = device.read(offset, buf).is_ok();
        let mut one = AlignedBuf::zeroed(BLOCK as usize);
        for (i, block) in (0..).zip(buf.chunks_exact_mut(BLOCK as usize)) {
            let at = offset + i * BLOCK;
            let crc = self.of(at);
            let wanted = |bytes: &[u8]| crc.is_none_or(|crc| crc32c::crc32c(bytes) == crc);
            if whole && wanted(block) {
                continue;
            }
            let read = read_again(device, at, &mut one);
            let good = (read.is_ok() && wanted(&one))
                || (crc.is_some() && device.read_matching(at, &mut one, &wanted));
            if !good {
                return Err(match read {
                    Err(_) if crc.is_none() && plan.is_spare(at) && has_lost_it(inspector) => {
                        block.fill(0);
                        zeroed += 1;
                        continue;
                    }
                    Err(source) if crc.is_none() => CopyError::SourceUnread { offset: at, source },
                    Err(source) => CopyError::SourceRead { offset: at, source },
                    Ok(()) => CopyError::SourceData { offset: at },
                });
            }
            block.copy_from_slice(&one);
        }
        Ok(zeroed)
    }
}

/// Reads a block, of a disk more than once if that fails.
fn read_again(device: &dyn BlockDevice, offset: u64, out: &mut AlignedBuf) -> io::Result<()> {
    let mut read = device.read(offset, out);
    let mut tries = 1;
    while read.is_err() && tries < TRIES && !device.keeps_what_is_dead() {
        read = device.read(offset, out);
        tries += 1;
    }
    read
}

/// Whether what the device has just failed to read, again and again, is gone. If it cannot read a
/// superblock either, it is the device that is away. A store has no bad blocks: if it does not
/// answer, it has what it had when it comes back.
fn has_lost_it(inspector: &Inspector) -> bool {
    let device = inspector.device();
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    let answers = |offset| device.read(offset, &mut block).is_ok();
    !device.keeps_what_is_dead() && inspector.superblock().offsets().into_iter().any(answers)
}
