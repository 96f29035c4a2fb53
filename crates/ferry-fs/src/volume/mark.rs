//! The mark of a copy that has not ended: it lies where the superblocks in front belong, so nothing
//! takes the copy for a volume, and it says how far the copy is.
//!
//! ```text
//! 0    magic "FERRYCPY"
//! 8    volume id of the source, 16 bytes
//! 24   generation of its home store's map
//! 32   position in its log where recovery begins
//! 40   position in its log where recovery ends
//! 48   id of the last record before that
//! 56   done: bytes of the device before which everything was copied and is durable
//! 64   CRC32C of the source's superblock
//! 68   end: no copy has written at or behind this byte; 0: an older program, see `CopyMark::end`
//! 76   zeros
//! 508  CRC32C of bytes 0 to 508
//! 512  zeros to the end of the block; at 1 MiB, at the end, what the superblock has there
//! ```
//!
//! It fits one sector, which a crash leaves old or new. Both copies are written one after the
//! other, each with a flush, so one is whole even where sectors are torn.

use ferry_device::{AlignedBuf, BLOCK_SIZE};

const MAGIC: [u8; 8] = *b"FERRYCPY";
/// Bytes of a mark.
pub(super) const SECTOR: usize = 512;
/// Where the CRC32C of everything before it is.
const CRC_AT: usize = SECTOR - 4;
const FIELDS_LEN: usize = 8 + 16 + 8 * 5 + 4 + 8;
const _: () = assert!(FIELDS_LEN <= CRC_AT);

/// What tells one state of a volume from all others that it was or will be in: every session writes
/// to the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceState {
    /// The volume's id.
    pub volume_id: [u8; 16],
    /// Generation of the home store's map.
    pub home_generation: u64,
    /// Position in the log where recovery begins.
    pub log_start: u64,
    /// Position in the log where recovery ends.
    pub log_end: u64,
    /// Id of the last record before that.
    pub log_end_id: u64,
    /// CRC32C of the superblock.
    pub superblock_crc: u32,
}

/// Says that a copy has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyMark {
    /// Of what it is a copy.
    pub state: SourceState,
    /// Everything that lies before this byte of the device was copied and is durable.
    pub done: u64,
    /// Nothing at or behind this byte of the device is of this copy, or of one that it replaces. A
    /// mark of an older program does not say it: then it is `done`, which is all that is sure.
    pub end: u64,
}

impl CopyMark {
    pub(super) fn encode(&self) -> AlignedBuf {
        let Self { state, done, end } = self;
        let mut out = Vec::with_capacity(FIELDS_LEN);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&state.volume_id);
        let numbers =
            [state.home_generation, state.log_start, state.log_end, state.log_end_id, *done];
        numbers.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
        out.extend_from_slice(&state.superblock_crc.to_le_bytes());
        out.extend_from_slice(&end.to_le_bytes());
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        block[..out.len()].copy_from_slice(&out);
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        block[CRC_AT..SECTOR].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// Whether a block that need not be whole begins as a mark.
    pub(super) fn begins(block: &[u8]) -> bool {
        block[..8] == MAGIC
    }

    /// The mark in a block; `None`: there is none, or it is damaged.
    pub(super) fn decode(block: &[u8]) -> Option<Self> {
        let u32_at = |at: usize| {
            let bytes = &block[at..at + 4];
            bytes.iter().rev().fold(0, |v, b| v << 8 | u32::from(*b))
        };
        let u64_at = |at: usize| {
            let bytes = &block[at..at + 8];
            bytes.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))
        };
        if block[..8] != MAGIC || crc32c::crc32c(&block[..CRC_AT]) != u32_at(CRC_AT) {
            return None;
        }
        let mut volume_id = [0; 16];
        volume_id.copy_from_slice(&block[8..24]);
        let state = SourceState {
            volume_id,
            home_generation: u64_at(24),
            log_start: u64_at(32),
            log_end: u64_at(40),
            log_end_id: u64_at(48),
            superblock_crc: u32_at(64),
        };
        let done = u64_at(56);
        Some(Self { state, done, end: u64_at(68).max(done) })
    }
}
