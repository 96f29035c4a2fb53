//! Reading the log back.
//!
//! Recovery starts where the home store says and follows the chain: each record must lie where the
//! one before it ended, be whole, and name that one's random id. So nothing stale is ever replayed:
//! a block of an earlier cycle has another position, a block of another volume another id, a record
//! that an earlier recovery cut off another predecessor. Where the chain ends, the rest of the ring
//! is searched for a record that claims a context durable which was not found: then the end is
//! damage, not the end of the log, and recovery refuses to lose what was acknowledged. A block that
//! the device cannot read is damage where the chain leads to it; anywhere else nothing is lost with
//! it.

use super::format::{
    BLOCK_HEADER, BlockHeader, LOG_BLOCK, RECORD_HEADER, RecordHeader, RecordKind,
};
use super::reader::{ChainRecord, READ_BYTES, Reader, read_blocks};
use super::record::ExtentEntry;
use super::ring::LogArea;
use crate::disk::Disk;
use crate::types::{Changes, Point};
use crate::{JournalError, LogDamage, Seq};
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use ferry_env::{Clock, Env};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A recovery that takes longer says how far it is, and again each time as much has passed.
const TELL: Duration = Duration::from_secs(1);

/// Told how far a recovery is: bytes done, of so many at most, of what.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64, &str);

/// Progress for the log that people read: nothing about a recovery that is soon over.
pub fn tell(env: &Env) -> impl FnMut(u64, u64, &str) {
    let mut due = due_every(TELL, env.clock.clone());
    move |done, most, what| {
        if due() {
            tracing::info!("recovering: {} of at most {} MiB {what}", done >> 20, most >> 20);
        }
    }
}

/// Says `true` each time that so much has passed since the last time, or since it was made.
fn due_every(interval: Duration, clock: Arc<dyn Clock>) -> impl FnMut() -> bool {
    let mut last = clock.monotonic();
    move || {
        let now = clock.monotonic();
        let due = now.saturating_sub(last) >= interval;
        if due {
            last = now;
        }
        due
    }
}

/// What the log says happened after the checkpoint.
pub struct Replay {
    /// The newest change of each key.
    pub changes: Changes,
    /// Where the log goes on.
    pub end: Point,
    pub contexts: u64,
    /// Records of any kind found.
    pub records: u64,
    /// Bytes of log that they take.
    pub bytes: u64,
    /// What was cut off because it is damaged, if that was to be accepted.
    pub damage: Option<LogDamage>,
    /// Offsets of blocks behind the end that were never written so. They cost nothing, and must be
    /// overwritten before the log comes to them: where it ends after a crash they would be damage.
    pub strange: Vec<u64>,
    /// Offsets of blocks behind the end that the device cannot read. They cost nothing either; many
    /// a device reads them again once they are written.
    pub unreadable: Vec<u64>,
}

/// Reads the log from `start` on. With `accept_damage`, a log that is damaged ends where the damage
/// is. `at_rest`: nothing was written to it since `start`, so nobody minds what lies there.
///
/// A block that the device cannot read may have held anything. Where the chain needs it (it is
/// where the next record begins, or all that is missing of one) that is damage, and never the end
/// of the log. Elsewhere nothing is lost with it.
pub fn replay(
    disk: &Disk,
    area: &LogArea,
    start: Point,
    at_rest: bool,
    accept_damage: bool,
    progress: Progress<'_>,
) -> Result<Replay, JournalError> {
    let mut reader = Reader::new(disk, area, start.position);
    // There the rest of the ring is not worth what it costs to fetch: each session begins with a
    // record of its own, so none has written since.
    if at_rest && disk.keeps_what_is_dead() && reader.nothing_follows(start) {
        return Ok(Replay::nothing(start));
    }
    let Chain { mut found, cut } =
        read_chain(&mut reader, area, start, at_rest, accept_damage, progress)?;
    let end = found.last().map_or(start, |record| record.end);
    let (why, unreadable) = cut.unzip();
    let behind = reader.behind(end);
    let mut damage = None;
    let strange = if at_rest { None } else { reader.strange(end) };
    if let Some(detail) = why.or_else(|| behind.missing(end)).or(strange) {
        if !accept_damage {
            return Err(reader.damaged(end.position, detail));
        }
        let (lost_from, lost_to) = (Seq(end.seq.0 + 1), Seq(behind.newest.max(end.seq.0 + 1)));
        damage = Some(LogDamage {
            offset: area.offset(end.position),
            detail,
            unreadable: unreadable.flatten(),
            lost_from,
            lost_to,
        });
    }
    let newest_point = found
        .iter()
        .map(|f| f.header.durable_point)
        .fold(start.seq.0.max(behind.durable_point), u64::max);
    let keep = whole_prefix(disk, &found, newest_point);
    if keep < found.len() {
        tracing::info!(
            cut = found.len() - keep,
            "the log ends at a context whose data was not written"
        );
    }
    found.truncate(keep);
    let offsets =
        |positions: &[u64]| positions.iter().map(|position| area.offset(*position)).collect();
    let (strange, unreadable) = (offsets(&behind.strange), offsets(&behind.unreadable));
    let mut out = Replay { damage, strange, unreadable, ..Replay::nothing(start) };
    out.apply(found, start, progress);
    Ok(out)
}

/// Records that follow each other.
struct Chain {
    found: Vec<ChainRecord>,
    /// Damage that ends the chain: what is wrong, and the device's error if it cannot read it.
    cut: Option<(String, Option<Arc<io::Error>>)>,
}

fn read_chain(
    reader: &mut Reader<'_>,
    area: &LogArea,
    start: Point,
    at_rest: bool,
    accept_damage: bool,
    progress: Progress<'_>,
) -> Result<Chain, JournalError> {
    let mut chain = Chain { found: Vec::new(), cut: None };
    let mut end = start;
    loop {
        match reader.record(end) {
            Ok(Some(record)) => {
                end = record.end;
                chain.found.push(record);
                let done = (end.position - start.position) * LOG_BLOCK as u64;
                progress(done, area.blocks * LOG_BLOCK as u64, "of log read");
            }
            Ok(None) => return Ok(chain),
            Err(JournalError::Unreadable { .. }) if at_rest => return Ok(chain),
            Err(JournalError::Damaged { detail, .. }) if accept_damage => {
                return Ok(Chain { cut: Some((detail, None)), ..chain });
            }
            Err(JournalError::Unreadable { source, .. }) if accept_damage => {
                let detail = format!("the device cannot read it: {source}");
                return Ok(Chain { cut: Some((detail, Some(source))), ..chain });
            }
            Err(error) => return Err(error),
        }
    }
}

impl Replay {
    /// Nothing was logged after the checkpoint.
    fn nothing(start: Point) -> Self {
        Self {
            changes: Changes::new(),
            end: start,
            contexts: 0,
            records: 0,
            bytes: 0,
            damage: None,
            strange: Vec::new(),
            unreadable: Vec::new(),
        }
    }

    /// Merges the changes of these records, in order.
    fn apply(&mut self, found: Vec<ChainRecord>, start: Point, progress: Progress<'_>) {
        let end = found.last().map_or(start, |record| record.end);
        let all = (end.position - start.position) * LOG_BLOCK as u64;
        for record in found {
            progress(self.bytes, all, "of log put in order");
            self.records += 1;
            self.contexts += u64::from(record.header.kind != RecordKind::DurablePoint);
            self.bytes += record.header.blocks() * LOG_BLOCK as u64;
            self.end = record.end;
            if self.changes.is_empty() {
                self.changes = record.body.changes;
            } else {
                self.changes.extend(record.body.changes);
            }
        }
    }
}

/// What nothing in the ring has reached, as far as it can be read.
pub struct Beyond {
    /// A point in the log.
    pub position: u64,
    /// The newest context that is named.
    pub seq: Seq,
    /// Blocks that cannot be read: each may be of one context more.
    pub unreadable: u64,
}

/// Looks at every block of the ring.
pub fn beyond(disk: &Disk, area: &LogArea) -> Beyond {
    let (mut position, mut seq, mut unreadable) = (0, 0, 0);
    // Positions 0 to the ring's length are each block of the ring once, whatever positions the
    // blocks name.
    let mut reader = Reader::new(disk, area, 0);
    for at in 0..area.blocks {
        let Ok(block) = reader.block(at) else {
            unreadable += 1;
            continue;
        };
        let Some(of_block) = BlockHeader::decode(block).filter(|s| s.volume_id == area.volume_id)
        else {
            continue;
        };
        position = position.max(of_block.position + 1);
        if let Some(header) =
            RecordHeader::decode(&block[BLOCK_HEADER..BLOCK_HEADER + RECORD_HEADER])
        {
            seq = seq.max(header.seq).max(header.durable_point);
        }
    }
    Beyond { position, seq: Seq(seq), unreadable }
}

/// Where the row of records in the ring begins that follow each other and lead to the newest
/// context, the longest of such rows; `None`: there is no record.
pub fn newest_chain(disk: &Disk, area: &LogArea) -> Option<Point> {
    let end = beyond(disk, area).position;
    let tail = end.saturating_sub(area.blocks);
    let mut reader = Reader::new(disk, area, tail);
    let mut best: Option<((Seq, u64), Point)> = None;
    let mut chain: Option<(Point, Point)> = None;
    for position in tail..end {
        let Ok(Some(header)) = reader.header(position) else { continue };
        let seq =
            Seq(header.seq.saturating_sub(u64::from(header.kind != RecordKind::DurablePoint)));
        let before = Point { seq, position, id: header.prev };
        let behind =
            Point { seq: Seq(header.seq), position: position + header.blocks(), id: header.id };
        let start = chain.filter(|(_, last)| *last == before).map_or(before, |(start, _)| start);
        chain = Some((start, behind));
        let reach = (behind.seq, behind.position - start.position);
        if best.is_none_or(|(furthest, _)| reach > furthest) {
            best = Some((reach, start));
        }
    }
    best.map(|(_, start)| start)
}

/// Records before the first context past `durable_point` whose data is not what it says.
///
/// Data that the device cannot read says nothing. The context counts: it may have been
/// acknowledged, and if the log ended before it, all that it holds would be gone without a word. As
/// it is, one range of one file reads as an error, or as what was written once the device can read
/// it.
fn whole_prefix(disk: &Disk, found: &[ChainRecord], durable_point: u64) -> usize {
    for (i, record) in found.iter().enumerate() {
        if record.header.kind != RecordKind::Context || record.header.seq <= durable_point {
            continue;
        }
        for extent in &record.body.extents {
            match extent_matches(disk, extent) {
                Ok(true) => {}
                Ok(false) => return i,
                Err(error) => {
                    let context = record.header.seq;
                    let ExtentEntry { offset, len, .. } = extent;
                    tracing::warn!(context, offset, len, %error, "data that is mapped cannot be read");
                }
            }
        }
    }
    found.len()
}

/// The checksum of blocks' checksums, behind those before.
pub fn crc_of_blocks(before: u32, blocks: &[u8]) -> u32 {
    let append = |crc, block| crc32c::crc32c_append(crc, &crc32c::crc32c(block).to_le_bytes());
    blocks.chunks_exact(BLOCK_SIZE).fold(before, append)
}

/// The error is that of the first block that cannot be read.
pub fn extent_matches(disk: &Disk, extent: &ExtentEntry) -> io::Result<bool> {
    let mut left = extent.len as usize;
    let mut offset = extent.offset;
    let mut crc = 0;
    while left > 0 {
        let mut buf = AlignedBuf::zeroed(left.min(READ_BYTES).next_multiple_of(BLOCK_SIZE));
        read_blocks(disk, offset, &mut buf).first()?;
        crc = crc_of_blocks(crc, &buf);
        left = left.saturating_sub(buf.len());
        offset += buf.len() as u64;
    }
    Ok(crc == extent.crc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that counts milliseconds.
    #[derive(Default)]
    struct Hand(AtomicU64);

    impl Clock for Hand {
        fn monotonic(&self) -> Duration {
            Duration::from_millis(self.0.load(Ordering::Relaxed))
        }
        fn wall(&self) -> Duration {
            self.monotonic()
        }
    }

    #[test]
    fn progress_is_reported_once_an_interval() {
        let clock = Arc::new(Hand::default());
        let mut due = due_every(TELL, clock.clone());
        let after = |ms: u64| {
            clock.0.fetch_add(ms, Ordering::Relaxed);
            due()
        };
        assert_eq!(
            [0, 999, 1, 0, 500, 700, 900, 100].map(after),
            [false, false, true, false, false, true, false, true]
        );
    }
}
