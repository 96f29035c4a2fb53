//! Reads the ring block by block and record by record.

use super::format::{
    BLOCK_HEADER, BlockHeader, LOG_BLOCK, RECORD_HEADER, RecordHeader, RecordKind,
};
use super::record::{Body, append_payload, decode_body};
use super::ring::LogArea;
use crate::disk::Disk;
use crate::types::Point;
use crate::{JournalError, Seq};
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use ferry_env::planted::{Bug, is_planted};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Bytes that are never half written.
const SECTOR: usize = 512;
/// Bytes read at a time.
pub const READ_BYTES: usize = 1 << 20;
/// A device that reads ahead is told of so many blocks.
const AHEAD_BLOCKS: u64 = 1024;

/// A record of the chain.
pub struct ChainRecord {
    pub header: RecordHeader,
    pub body: Body,
    /// Where the next one begins.
    pub end: Point,
}

/// No block of the log that was ever written is like this, nor what a crash leaves of one: its
/// first sector is old or new, and both are a block header, or zeros.
fn is_strange(block: &[u8]) -> bool {
    BlockHeader::decode(block).is_none() && block[..SECTOR].iter().any(|byte| *byte != 0)
}

/// Blocks of a chunk that cannot be read, by their number in it.
#[derive(Default)]
pub struct Failed(BTreeMap<usize, io::Error>);

impl Failed {
    pub fn first(mut self) -> io::Result<()> {
        self.0.pop_first().map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Reads a chunk; where the device fails, block by block, so that one bad block costs no other.
pub fn read_blocks(disk: &Disk, offset: u64, chunk: &mut AlignedBuf) -> Failed {
    let mut failed = Failed::default();
    if disk.read(offset, chunk).is_ok() {
        return failed;
    }
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    for (i, part) in chunk.chunks_exact_mut(BLOCK_SIZE).enumerate() {
        match disk.read(offset + (i * BLOCK_SIZE) as u64, &mut block) {
            Ok(()) => part.copy_from_slice(&block),
            Err(error) => drop(failed.0.insert(i, error)),
        }
    }
    failed
}

/// Reads blocks of the ring, in larger chunks.
pub struct Reader<'a> {
    disk: &'a Disk,
    area: &'a LogArea,
    /// First position that counts; the ring holds as many blocks from there on as it has.
    tail: u64,
    chunk: AlignedBuf,
    /// Positions in `chunk`.
    from: u64,
    to: u64,
    /// The device has been told that it will be read up to here.
    told: u64,
    /// Blocks that could not be read, by position, so that each is tried once.
    unreadable: BTreeMap<u64, Arc<io::Error>>,
}

/// What the ring holds behind the log's end.
pub struct Behind {
    /// Newest context that a record there says was durable.
    pub durable_point: u64,
    /// Newest context that is named there.
    pub newest: u64,
    /// Positions of blocks that were never written so.
    pub strange: Vec<u64>,
    /// Positions of blocks that cannot be read.
    pub unreadable: Vec<u64>,
}

impl Behind {
    /// What is missing, if something is: a context after `end` was durable.
    pub fn missing(&self, end: Point) -> Option<String> {
        (self.durable_point > end.seq.0)
            .then(|| format!("context {} was durable and is not whole", end.seq.0 + 1))
    }
}

impl<'a> Reader<'a> {
    /// Reads what lies from `tail` on.
    pub fn new(disk: &'a Disk, area: &'a LogArea, tail: u64) -> Self {
        let (chunk, unreadable) = (AlignedBuf::zeroed(LOG_BLOCK), BTreeMap::new());
        Self { disk, area, tail, chunk, from: 0, to: 0, told: tail, unreadable }
    }

    fn limit(&self) -> u64 {
        self.tail + self.area.blocks
    }

    /// Bytes of a block; [`JournalError::Unreadable`] if the device cannot read it.
    pub fn block(&mut self, position: u64) -> Result<&[u8], JournalError> {
        if !(self.from..self.to).contains(&position) && !self.unreadable.contains_key(&position) {
            let n = (READ_BYTES / LOG_BLOCK) as u64;
            self.tell_device(position);
            self.read(position, n.min(self.area.run(position)).min(self.limit() - position));
        }
        if let Some(source) = self.unreadable.get(&position) {
            let offset = self.area.offset(position);
            return Err(JournalError::Unreadable { what: "log", offset, source: source.clone() });
        }
        let at = (position - self.from) as usize * LOG_BLOCK;
        Ok(&self.chunk[at..at + LOG_BLOCK])
    }

    /// The block where the next record would begin can be read, and no record begins there. Only
    /// that block is read.
    pub fn nothing_follows(&mut self, end: Point) -> bool {
        self.read(end.position, 1);
        let header = self.header(end.position);
        header.is_ok_and(|header| header.is_none_or(|header| header.prev != end.id))
    }

    fn tell_device(&mut self, position: u64) {
        let to = (position + AHEAD_BLOCKS).min(self.limit());
        if self.disk.reads_ahead() {
            let ranges = self.area.ranges(self.told.max(position)..to);
            ranges.for_each(|(offset, len)| self.disk.read_ahead(offset, len));
        }
        self.told = self.told.max(to);
    }

    fn read(&mut self, position: u64, blocks: u64) {
        if self.chunk.len() != blocks as usize * LOG_BLOCK {
            self.chunk = AlignedBuf::zeroed(blocks as usize * LOG_BLOCK);
        }
        let failed = read_blocks(self.disk, self.area.offset(position), &mut self.chunk);
        (self.from, self.to) = (position, position + blocks);
        let failed = failed.0.into_iter().map(|(i, error)| (position + i as u64, Arc::new(error)));
        self.unreadable.extend(failed);
    }

    /// The header of a record that starts at `position`, whatever its predecessor.
    pub fn header(&mut self, position: u64) -> Result<Option<RecordHeader>, JournalError> {
        let volume_id = self.area.volume_id;
        let block = self.block(position)?;
        let Some(at_start) = BlockHeader::decode(block) else { return Ok(None) };
        if at_start.volume_id != volume_id || at_start.position != position || at_start.index != 0 {
            return Ok(None);
        }
        let header = RecordHeader::decode(&block[BLOCK_HEADER..BLOCK_HEADER + RECORD_HEADER]);
        Ok(header.filter(|h| h.id == at_start.record_id))
    }

    /// The record that follows `before`, or `None` where the chain ends.
    pub fn record(&mut self, before: Point) -> Result<Option<ChainRecord>, JournalError> {
        if before.position >= self.limit() {
            return Ok(None);
        }
        if is_planted(Bug::StaleRecord) {
            return self.any_record(before);
        }
        let Some(header) = self.header(before.position)? else { return Ok(None) };
        if header.prev != before.id || header.blocks() > self.limit() - before.position {
            return Ok(None);
        }
        let expected =
            if header.kind == RecordKind::DurablePoint { before.seq.0 } else { before.seq.0 + 1 };
        if header.seq != expected {
            return Err(self.damaged(
                before.position,
                format!("context {} follows {}", header.seq, before.seq.0),
            ));
        }
        let mut payload = Vec::with_capacity(header.blocks() as usize * LOG_BLOCK);
        let mut unreadable = None;
        for index in 0..header.blocks() {
            let volume_id = self.area.volume_id;
            let position = before.position + index;
            let want =
                BlockHeader { volume_id, position, record_id: header.id, index: index as u32 };
            match self.block(position) {
                Ok(block) if BlockHeader::decode(block) != Some(want) => return Ok(None),
                Ok(block) => append_payload(block, &mut payload),
                // Where another block of it never arrived, nothing was acknowledged.
                Err(error) => drop(unreadable.get_or_insert(error)),
            }
        }
        if let Some(error) = unreadable {
            return Err(error);
        }
        let body = &payload[RECORD_HEADER..RECORD_HEADER + header.body_len as usize];
        if crc32c::crc32c(body) != header.body_crc {
            return Ok(None);
        }
        let body = decode_body(&header, body).ok_or_else(|| {
            self.damaged(before.position, "a whole record does not make sense".into())
        })?;
        let end = Point {
            seq: Seq(header.seq),
            position: before.position + header.blocks(),
            id: header.id,
        };
        Ok(Some(ChainRecord { header, body, end }))
    }

    /// A planted bug: whatever lies there counts, if it is whole.
    fn any_record(&mut self, before: Point) -> Result<Option<ChainRecord>, JournalError> {
        let block = self.block(before.position)?;
        let durable_point =
            BlockHeader::decode(block).filter(|durable_point| durable_point.index == 0);
        let header = RecordHeader::decode(&block[BLOCK_HEADER..BLOCK_HEADER + RECORD_HEADER]);
        let (Some(_), Some(header)) = (durable_point, header) else { return Ok(None) };
        if header.blocks() > self.limit() - before.position {
            return Ok(None);
        }
        let mut payload = Vec::new();
        for index in 0..header.blocks() {
            append_payload(self.block(before.position + index)?, &mut payload);
        }
        let body = &payload[RECORD_HEADER..RECORD_HEADER + header.body_len as usize];
        if crc32c::crc32c(body) != header.body_crc {
            return Ok(None);
        }
        let seq = before.seq.0 + u64::from(header.kind != RecordKind::DurablePoint);
        let end =
            Point { seq: Seq(seq), position: before.position + header.blocks(), id: header.id };
        Ok(decode_body(&header, body).map(|body| ChainRecord {
            header: RecordHeader { seq, ..header },
            body,
            end,
        }))
    }

    /// What is wrong where the record after `end` should be, if that cannot be what a crash left of
    /// it.
    pub fn strange(&mut self, end: Point) -> Option<String> {
        if end.position >= self.limit() {
            return None;
        }
        let header =
            self.header(end.position).ok().flatten().filter(|header| header.prev == end.id);
        let blocks = header.map_or(1, |header| header.blocks()).min(self.limit() - end.position);
        let mut record = end.position..end.position + blocks;
        let strange = record.find(|position| self.block(*position).is_ok_and(is_strange))?;
        Some(format!("the block at position {strange} is none that was ever written"))
    }

    /// What the records after `end` say of contexts.
    pub fn behind(&mut self, end: Point) -> Behind {
        let mut behind =
            Behind { durable_point: 0, newest: 0, strange: Vec::new(), unreadable: Vec::new() };
        for position in end.position..self.limit() {
            match self.block(position) {
                Ok(block) if is_strange(block) => behind.strange.push(position),
                Ok(_) => {}
                Err(_) => {
                    behind.unreadable.push(position);
                    continue;
                }
            }
            let Ok(Some(header)) = self.header(position) else { continue };
            behind.durable_point = behind.durable_point.max(header.durable_point);
            behind.newest = behind.newest.max(header.seq).max(header.durable_point);
        }
        behind
    }

    pub fn damaged(&self, position: u64, detail: String) -> JournalError {
        JournalError::Damaged { what: "log", offset: self.area.offset(position), detail }
    }
}
