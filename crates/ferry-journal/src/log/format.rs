//! The log on the device: constants, block headers and record headers. `docs/format.md` draws them.
//!
//! The log is a ring of 4 KiB blocks. A block's *position* counts blocks since the volume was made
//! and never repeats: block `position % blocks` of the ring holds it, `position / blocks` is the
//! log's cycle. A record fills whole blocks. All numbers are little-endian.

use crate::bytes::{u16_at, u32_at, u64_at};
use ferry_device::BLOCK_SIZE;

/// Bytes of a log block.
pub const LOG_BLOCK: usize = BLOCK_SIZE;
/// Bytes of the header at the start of each log block.
pub const BLOCK_HEADER: usize = 48;
/// Bytes of a record that one block carries.
pub const BLOCK_PAYLOAD: usize = LOG_BLOCK - BLOCK_HEADER;
/// Bytes of the header at the start of each record.
pub const RECORD_HEADER: usize = 64;
/// Bytes of a data extent's entry in a record.
pub const EXTENT_ENTRY: usize = 16;
/// Bytes in front of each key in a record.
pub const KEY_ENTRY: usize = 8;
/// Longest key, in bytes.
pub const KEY_MAX: usize = u16::MAX as usize;
/// Version of the record format.
pub const RECORD_VERSION: u16 = 1;
/// Smallest log, in bytes.
pub const LOG_MIN: u64 = 256 * 1024;
/// A context never takes more than this many bytes of log, however long the log is.
pub const CONTEXT_MAX: u64 = 256 << 20;

/// Positions and numbers of contexts stay below: 2^60 bytes of log. What says more was never
/// written.
pub const POSITION_END: u64 = 1 << 48;

const BLOCK_MAGIC: u32 = u32::from_le_bytes(*b"FLB1");
const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"FLR1");

const _: () = assert!(BLOCK_HEADER + BLOCK_PAYLOAD == 4096 && RECORD_HEADER < BLOCK_PAYLOAD);
const _: () = assert!(CONTEXT_MAX < u32::MAX as u64);

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RecordKind {
    /// A context whose data extents recovery verifies while no newer durable point covers it.
    Context = 1,
    /// A context whose data was durable before its record was written.
    ContextAfterData = 2,
    /// Nothing but a durable point.
    DurablePoint = 3,
}

impl RecordKind {
    fn from_u16(n: u16) -> Option<Self> {
        match n {
            1 => Some(Self::Context),
            2 => Some(Self::ContextAfterData),
            3 => Some(Self::DurablePoint),
            _ => None,
        }
    }
}

/// The header of one block.
///
/// | bytes | |
/// |---|---|
/// | 0..4 | magic `FLB1` |
/// | 4..8 | CRC32C of bytes 8..48 |
/// | 8..24 | volume id |
/// | 24..32 | position |
/// | 32..40 | id of the record |
/// | 40..44 | number of this block within the record |
/// | 44..48 | zero |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// The volume's id.
    pub volume_id: [u8; 16],
    /// The block's position.
    pub position: u64,
    /// Id of the record that it belongs to.
    pub record_id: u64,
    /// Its number within the record.
    pub index: u32,
}

impl BlockHeader {
    /// Writes the header into the first bytes of `block`.
    pub fn encode(&self, block: &mut [u8]) {
        block[0..4].copy_from_slice(&BLOCK_MAGIC.to_le_bytes());
        block[8..24].copy_from_slice(&self.volume_id);
        block[24..32].copy_from_slice(&self.position.to_le_bytes());
        block[32..40].copy_from_slice(&self.record_id.to_le_bytes());
        block[40..44].copy_from_slice(&self.index.to_le_bytes());
        block[44..48].fill(0);
        let crc = crc32c::crc32c(&block[8..BLOCK_HEADER]);
        block[4..8].copy_from_slice(&crc.to_le_bytes());
    }

    /// The header of `block`, if it is whole and possible.
    pub fn decode(block: &[u8]) -> Option<Self> {
        if u32_at(block, 0) != BLOCK_MAGIC
            || u32_at(block, 4) != crc32c::crc32c(&block[8..BLOCK_HEADER])
        {
            return None;
        }
        let header = Self {
            volume_id: block[8..24].try_into().expect("16 bytes"),
            position: u64_at(block, 24),
            record_id: u64_at(block, 32),
            index: u32_at(block, 40),
        };
        (header.position < POSITION_END).then_some(header)
    }
}

/// The header of one record.
///
/// | bytes | |
/// |---|---|
/// | 0..4 | magic `FLR1` |
/// | 4..6 | version |
/// | 6..8 | kind |
/// | 8..16 | id, random |
/// | 16..24 | id of the record before it |
/// | 24..32 | number of the context (of the newest one before it, for a durable point) |
/// | 32..40 | durable point: newest context known durable when this was written |
/// | 40..44 | bytes of the body |
/// | 44..48 | keys in it |
/// | 48..52 | data extents in it |
/// | 52..56 | CRC32C of the body |
/// | 56..60 | zero |
/// | 60..64 | CRC32C of bytes 0..60 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// What it is.
    pub kind: RecordKind,
    /// Its random id.
    pub id: u64,
    /// The id of the record before it.
    pub prev: u64,
    /// Number of the context, or of the newest one before a durable point.
    pub seq: u64,
    /// Newest context known durable when it was written.
    pub durable_point: u64,
    /// Bytes of the body.
    pub body_len: u32,
    /// Keys in the body.
    pub keys: u32,
    /// Data extents in the body.
    pub extents: u32,
    /// CRC32C of the body.
    pub body_crc: u32,
}

impl RecordHeader {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; RECORD_HEADER] {
        let mut out = [0_u8; RECORD_HEADER];
        out[0..4].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&RECORD_VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&(self.kind as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.id.to_le_bytes());
        out[16..24].copy_from_slice(&self.prev.to_le_bytes());
        out[24..32].copy_from_slice(&self.seq.to_le_bytes());
        out[32..40].copy_from_slice(&self.durable_point.to_le_bytes());
        out[40..44].copy_from_slice(&self.body_len.to_le_bytes());
        out[44..48].copy_from_slice(&self.keys.to_le_bytes());
        out[48..52].copy_from_slice(&self.extents.to_le_bytes());
        out[52..56].copy_from_slice(&self.body_crc.to_le_bytes());
        let crc = crc32c::crc32c(&out[..60]);
        out[60..64].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// The header in `bytes`, if it is whole, possible, and of a kind and version that this code
    /// knows.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let known = u32_at(bytes, 0) == RECORD_MAGIC
            && u32_at(bytes, 60) == crc32c::crc32c(&bytes[..60])
            && u16_at(bytes, 4) == RECORD_VERSION;
        if !known {
            return None;
        }
        let header = Self {
            kind: RecordKind::from_u16(u16_at(bytes, 6))?,
            id: u64_at(bytes, 8),
            prev: u64_at(bytes, 16),
            seq: u64_at(bytes, 24),
            durable_point: u64_at(bytes, 32),
            body_len: u32_at(bytes, 40),
            keys: u32_at(bytes, 44),
            extents: u32_at(bytes, 48),
            body_crc: u32_at(bytes, 52),
        };
        // Nobody knows a context durable before it was written.
        (header.seq < POSITION_END && header.durable_point <= header.seq).then_some(header)
    }

    /// Blocks of log that the record fills.
    pub fn blocks(&self) -> u64 {
        blocks_for(u64::from(self.body_len))
    }
}

/// Blocks of log that a record with a body of `body` bytes fills.
pub fn blocks_for(body: u64) -> u64 {
    (RECORD_HEADER as u64 + body).div_ceil(BLOCK_PAYLOAD as u64)
}
