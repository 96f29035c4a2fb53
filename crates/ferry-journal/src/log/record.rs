//! Records: a context's bytes, spread over log blocks, and back.

use super::format::{
    BLOCK_HEADER, BLOCK_PAYLOAD, BlockHeader, EXTENT_ENTRY, KEY_ENTRY, LOG_BLOCK, RECORD_HEADER,
    RecordHeader, RecordKind,
};
use super::ring::LogArea;
use crate::Value;
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::types::{Change, Changes, Key};
use ferry_device::AlignedBuf;

/// Flag of a key's entry: the key was removed.
const REMOVED: u16 = 1;
/// Longest chunk of a record that is one write, in blocks.
const CHUNK_BLOCKS: u64 = 256;

/// A data extent as the log names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentEntry {
    /// Offset on the device, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// CRC32C over the CRC32Cs of its 4 KiB blocks.
    pub crc: u32,
}

/// Bytes that a key's change takes in a record.
pub fn entry_len(key: &[u8], change: &Change) -> u64 {
    (KEY_ENTRY + key.len() + change.as_ref().map_or(0, |v| v.len())) as u64
}

/// Most bytes of a record's body with these changes and extents.
pub fn body_len(changes: &Changes, extents: &[ExtentEntry]) -> u64 {
    let keys: u64 = changes.iter().map(|(key, change)| entry_len(key, change)).sum();
    keys + (extents.len() * EXTENT_ENTRY) as u64
}

/// What a record says of itself before its body is known.
#[derive(Clone, Copy, Debug)]
pub struct RecordPlan {
    pub kind: RecordKind,
    pub position: u64,
    pub id: u64,
    pub prev: u64,
    pub seq: u64,
    pub durable_point: u64,
    /// Bytes of the body; what is encoded must come to exactly this.
    pub body_len: u64,
}

/// Encodes a record; the result is a list of writes, each an offset on the device and its bytes.
pub fn encode<'a>(
    area: &LogArea,
    plan: &RecordPlan,
    extents: &[ExtentEntry],
    changes: impl Iterator<Item = (&'a Key, &'a Change)>,
) -> Vec<(u64, AlignedBuf)> {
    let mut out = Writer::new(area, plan);
    for extent in extents {
        let mut entry = [0_u8; EXTENT_ENTRY];
        entry[0..8].copy_from_slice(&extent.offset.to_le_bytes());
        entry[8..12].copy_from_slice(&extent.len.to_le_bytes());
        entry[12..16].copy_from_slice(&extent.crc.to_le_bytes());
        out.put(&entry);
    }
    let mut keys = 0;
    for (key, change) in changes {
        let value: &[u8] = change.as_deref().unwrap_or_default();
        let mut entry = [0_u8; KEY_ENTRY];
        entry[0..2].copy_from_slice(&(key.len() as u16).to_le_bytes());
        entry[2..4].copy_from_slice(&(if change.is_none() { REMOVED } else { 0 }).to_le_bytes());
        entry[4..8].copy_from_slice(&(value.len() as u32).to_le_bytes());
        out.put(&entry);
        out.put(key);
        out.put(value);
        keys += 1;
    }
    out.finish(plan, keys, extents.len() as u32)
}

/// Spreads bytes over the payloads of log blocks.
struct Writer {
    chunks: Vec<(u64, AlignedBuf)>,
    /// The chunk being filled, and the next byte in it.
    chunk: usize,
    at: usize,
    written: u64,
    body_crc: u32,
}

impl Writer {
    fn new(area: &LogArea, plan: &RecordPlan) -> Self {
        let blocks = super::format::blocks_for(plan.body_len);
        let mut chunks = Vec::new();
        let mut index = 0;
        while index < blocks {
            let position = plan.position + index;
            let n = (blocks - index).min(area.run(position)).min(CHUNK_BLOCKS);
            let mut buf = AlignedBuf::zeroed(n as usize * LOG_BLOCK);
            for (i, block) in buf.chunks_exact_mut(LOG_BLOCK).enumerate() {
                let i = i as u64;
                BlockHeader {
                    volume_id: area.volume_id,
                    position: position + i,
                    record_id: plan.id,
                    index: (index + i) as u32,
                }
                .encode(block);
            }
            chunks.push((area.offset(position), buf));
            index += n;
        }
        Self { chunks, chunk: 0, at: BLOCK_HEADER + RECORD_HEADER, written: 0, body_crc: 0 }
    }

    fn put(&mut self, mut bytes: &[u8]) {
        self.body_crc = crc32c::crc32c_append(self.body_crc, bytes);
        self.written += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.at.is_multiple_of(LOG_BLOCK) {
                if self.at == self.chunks[self.chunk].1.len() {
                    self.chunk += 1;
                    self.at = 0;
                }
                self.at += BLOCK_HEADER;
            }
            let n = bytes.len().min(LOG_BLOCK - self.at % LOG_BLOCK);
            self.chunks[self.chunk].1[self.at..self.at + n].copy_from_slice(&bytes[..n]);
            self.at += n;
            bytes = &bytes[n..];
        }
    }

    fn finish(mut self, plan: &RecordPlan, keys: u32, extents: u32) -> Vec<(u64, AlignedBuf)> {
        assert_eq!(self.written, plan.body_len, "a record's size is settled before it is encoded");
        let header = RecordHeader {
            kind: plan.kind,
            id: plan.id,
            prev: plan.prev,
            seq: plan.seq,
            durable_point: plan.durable_point,
            body_len: plan.body_len as u32,
            keys,
            extents,
            body_crc: self.body_crc,
        };
        self.chunks[0].1[BLOCK_HEADER..BLOCK_HEADER + RECORD_HEADER]
            .copy_from_slice(&header.encode());
        self.chunks
    }
}

/// A record's body, taken apart.
#[derive(Debug, Default)]
pub struct Body {
    pub extents: Vec<ExtentEntry>,
    pub changes: Changes,
}

/// Takes a body apart whose checksum matched; `None` if it is not well formed all the same.
pub fn decode_body(header: &RecordHeader, mut body: &[u8]) -> Option<Body> {
    let mut out = Body::default();
    for _ in 0..header.extents {
        let (entry, rest) = body.split_at_checked(EXTENT_ENTRY)?;
        out.extents.push(ExtentEntry {
            offset: u64_at(entry, 0),
            len: u32_at(entry, 8),
            crc: u32_at(entry, 12),
        });
        body = rest;
    }
    for _ in 0..header.keys {
        let (entry, rest) = body.split_at_checked(KEY_ENTRY)?;
        let (key, rest) = rest.split_at_checked(usize::from(u16_at(entry, 0)))?;
        let (value, rest) = rest.split_at_checked(u32_at(entry, 4) as usize)?;
        let change = (u16_at(entry, 2) & REMOVED == 0).then(|| Value::from(value));
        out.changes.insert(Key::from(key), change);
        body = rest;
    }
    body.is_empty().then_some(out)
}

/// Copies the payloads of `blocks` (whole log blocks) to the end of `out`.
pub fn append_payload(blocks: &[u8], out: &mut Vec<u8>) {
    for block in blocks.chunks_exact(LOG_BLOCK) {
        out.extend_from_slice(&block[BLOCK_HEADER..BLOCK_HEADER + BLOCK_PAYLOAD]);
    }
}
