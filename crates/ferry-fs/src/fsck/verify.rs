//! Reads the blocks of extents and holds them against their checksums.

use super::report::{Code, Finding, Findings};
use crate::api::Ino;
use crate::keys::BLOCK;
use ferry_device::{AlignedBuf, BlockDevice};

/// Blocks read at once.
const READ_BLOCKS: usize = 256;

/// Reads through one buffer.
pub(super) struct Verifier<'d> {
    device: &'d dyn BlockDevice,
    buffer: AlignedBuf,
}

impl<'d> Verifier<'d> {
    pub(super) fn new(device: &'d dyn BlockDevice) -> Self {
        Self { device, buffer: AlignedBuf::zeroed(READ_BLOCKS * BLOCK as usize) }
    }

    /// Checks an extent whose place is known to be on the device.
    pub(super) fn check(&mut self, ino: Ino, offset: u64, block: u64, crcs: &[u32], findings: &mut Findings) {
        for (i, piece) in crcs.chunks(READ_BLOCKS).enumerate() {
            let first = (i * READ_BLOCKS) as u64;
            self.check_piece(ino, offset + first * BLOCK, block + first, piece, findings);
        }
    }

    fn check_piece(&mut self, ino: Ino, offset: u64, block: u64, crcs: &[u32], findings: &mut Findings) {
        let len = crcs.len() * BLOCK as usize;
        if self.buffer.len() != len {
            self.buffer = AlignedBuf::zeroed(len);
        }
        if let Err(error) = self.device.read(block * BLOCK, &mut self.buffer) {
            let what = format!("{} blocks cannot be read: {error}", crcs.len());
            findings.add(Finding::new(Code::ReadError, what).of(ino).at(offset).on_device(block * BLOCK));
            return;
        }
        for (i, (bytes, crc)) in self.buffer.chunks_exact(BLOCK as usize).zip(crcs).enumerate() {
            let found = crc32c::crc32c(bytes);
            if found != *crc {
                let what = format!("a block has the checksum {found:08x}, it should have {crc:08x}");
                let skip = i as u64 * BLOCK;
                findings.add(
                    Finding::new(Code::Checksum, what)
                        .of(ino)
                        .at(offset + skip)
                        .on_device(block * BLOCK + skip),
                );
            }
        }
    }
}
