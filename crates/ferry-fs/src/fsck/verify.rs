//! Reads the blocks of extents and holds them against their checksums.

use super::reader::{READ_BLOCKS, Reader};
use super::report::{Code, Finding, Findings};
use crate::api::Ino;
use crate::keys::BLOCK;
use ferry_device::BlockDevice;
use std::sync::Arc;

/// Of a whole volume.
pub(super) struct Verifier(Reader);

impl Verifier {
    pub(super) fn new(device: &Arc<dyn BlockDevice>) -> Self {
        Self(Reader::new(device, true))
    }

    /// Checks an extent whose place is known to be on the device.
    pub(super) fn check(&mut self, ino: Ino, offset: u64, block: u64, crcs: &[u32], findings: &mut Findings) {
        for (i, piece) in crcs.chunks(READ_BLOCKS as usize).enumerate() {
            let first = i as u64 * READ_BLOCKS;
            self.check_piece(ino, offset + first * BLOCK, block + first, piece, findings);
        }
    }

    fn check_piece(&mut self, ino: Ino, offset: u64, block: u64, crcs: &[u32], findings: &mut Findings) {
        let bytes = match self.0.blocks(block, crcs.len() as u64) {
            Ok(bytes) => bytes,
            Err(error) => {
                let what = format!("{} blocks cannot be read: {error}", crcs.len());
                findings.add(Finding::new(Code::ReadError, what).of(ino).at(offset).on_device(block * BLOCK));
                return;
            }
        };
        for (i, (bytes, crc)) in bytes.chunks_exact(BLOCK as usize).zip(crcs).enumerate() {
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
