//! Reads the blocks of extents and holds them against their checksums.

use super::report::{Code, Finding, Findings};
use crate::reader::{READ_BLOCKS, Reader};
use ferry_device::BlockDevice;
use ferry_fs::api::Ino;
use ferry_fs::keys::BLOCK;
use std::sync::Arc;

/// What is said of a block that is not what was written.
const MISMATCH: &str = "the checksum does not match";

/// Of a whole volume.
pub(super) struct Verifier(Reader);

impl Verifier {
    pub(super) fn new(device: &Arc<dyn BlockDevice>) -> Self {
        Self(Reader::new(device, true))
    }

    /// Checks an extent whose blocks are known to be on the device.
    pub(super) fn check(
        &mut self,
        ino: Ino,
        offset: u64,
        block: u64,
        crcs: &[u32],
        findings: &mut Findings,
    ) {
        for (i, chunk) in crcs.chunks(READ_BLOCKS as usize).enumerate() {
            let first = i as u64 * READ_BLOCKS;
            self.check_blocks(ino, offset + first * BLOCK, block + first, chunk, findings);
        }
    }

    fn check_blocks(
        &mut self,
        ino: Ino,
        offset: u64,
        block: u64,
        crcs: &[u32],
        findings: &mut Findings,
    ) {
        let bytes = match self.0.blocks(block, crcs.len() as u64) {
            Ok(bytes) => bytes,
            // Each on its own: one bad block costs no other.
            Err(_) if crcs.len() > 1 => {
                for (i, crc) in (0..).zip(crcs.chunks(1)) {
                    self.check_blocks(ino, offset + i * BLOCK, block + i, crc, findings);
                }
                return;
            }
            Err(error) => {
                if self.0.elsewhere(block, crcs[0]) {
                    return;
                }
                let what = format!("the device cannot read it: {error}");
                let finding = Finding::new(Code::ReadError, what).of(ino);
                findings.add(finding.at(offset).on_device(block * BLOCK).blocks(1));
                return;
            }
        };
        let each = (0..).zip(bytes.chunks_exact(BLOCK as usize).zip(crcs));
        let differ = each.filter(|(_, (bytes, crc))| crc32c::crc32c(bytes) != **crc);
        let differ: Vec<(u64, u32)> = differ.map(|(i, (_, crc))| (i, *crc)).collect();
        for (i, crc) in differ {
            if !self.0.elsewhere(block + i, crc) {
                let (finding, skip) = (Finding::new(Code::Checksum, MISMATCH).of(ino), i * BLOCK);
                findings.add(finding.at(offset + skip).on_device(block * BLOCK + skip).blocks(1));
            }
        }
    }
}
