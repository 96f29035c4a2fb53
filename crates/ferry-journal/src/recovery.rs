//! Reading the log back.
//!
//! Recovery starts where the home store says and follows the chain: each record must lie where the one before it
//! ended, be whole, and name that one's random id. So nothing stale is ever replayed: a block of an earlier cycle has
//! another position, a block of another volume another id, a record that an earlier recovery cut off another
//! predecessor. Where the chain ends, the rest of the ring is searched for a record that claims a context durable
//! which was not found: then the end is damage, not the end of the log, and recovery refuses to lose what was promised.

use crate::disk::{Disk, io_error};
use crate::format::{BLOCK_STAMP, BlockStamp, LOG_BLOCK, RECORD_HEADER, RecordHeader, RecordKind};
use crate::home::Point;
use crate::layers::Changes;
use crate::record::{Body, ExtentEntry, LogArea, append_payload, decode_body};
use crate::{JournalError, LogDamage, Seq};
use ferry_device::{AlignedBuf, BLOCK_SIZE, Clock, Env};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are never half written.
const SECTOR: usize = 512;
/// Bytes read at a time.
const READ_BYTES: usize = 1 << 20;

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
    /// Contexts replayed.
    pub contexts: u64,
    /// Records of any kind found.
    pub records: u64,
    /// Bytes of log that they take.
    pub bytes: u64,
    /// What was cut off because it is damaged, if that was to be accepted.
    pub damage: Option<LogDamage>,
    /// Places behind the end of blocks that were never written so. They cost nothing, and must be gone before the log comes to them: where
    /// it ends after a crash they would be damage.
    pub strange: Vec<u64>,
}

/// A record of the chain.
pub struct Found {
    pub header: RecordHeader,
    body: Body,
    /// Where the next one begins.
    pub end: Point,
}

/// Reads the log from `start` on. With `accept_damage`, a log that is damaged ends where the damage is. `at_rest`: nothing was written to
/// it since `start`, so nobody minds what lies there.
pub fn replay(
    disk: &Disk,
    area: &LogArea,
    start: Point,
    at_rest: bool,
    accept_damage: bool,
    progress: Progress<'_>,
) -> Result<Replay, JournalError> {
    let mut reader = Reader::new(disk, area, start.position, accept_damage);
    let mut found: Vec<Found> = Vec::new();
    let mut end = start;
    let mut why = None;
    loop {
        match reader.record(end) {
            Ok(Some(record)) => {
                end = record.end;
                found.push(record);
                let done = (end.position - start.position) * LOG_BLOCK as u64;
                progress(done, area.blocks * LOG_BLOCK as u64, "of log read");
            }
            Ok(None) => break,
            Err(JournalError::Damaged { detail, .. }) if accept_damage => {
                why = Some(detail);
                break;
            }
            Err(error) => return Err(error),
        }
    }
    let behind = reader.behind(end)?;
    let mut damage = None;
    let strange = if at_rest { None } else { reader.strange(end)? };
    if let Some(detail) = why.or_else(|| behind.missing(end)).or(strange) {
        if !accept_damage {
            return Err(reader.damaged(end.position, detail));
        }
        let (lost_from, lost_to) = (Seq(end.seq.0 + 1), Seq(behind.newest.max(end.seq.0 + 1)));
        damage = Some(LogDamage { offset: area.place(end.position), detail, lost_from, lost_to });
    }
    let newest_stamp = found.iter().map(|f| f.header.stamp).fold(start.seq.0.max(behind.stamp), u64::max);
    let keep = whole_prefix(disk, &found, newest_stamp)?;
    if keep < found.len() {
        tracing::info!(cut = found.len() - keep, "the log ends at a context whose data was not written");
    }
    found.truncate(keep);
    let strange = behind.strange.iter().map(|position| area.place(*position)).collect();
    let mut out =
        Replay { changes: Changes::new(), end: start, contexts: 0, records: 0, bytes: 0, damage, strange };
    let all = (found.last().map_or(start, |f| f.end).position - start.position) * LOG_BLOCK as u64;
    for record in found {
        progress(out.bytes, all, "of log put in order");
        out.records += 1;
        out.contexts += u64::from(record.header.kind != RecordKind::Stamp);
        out.bytes += record.header.blocks() * LOG_BLOCK as u64;
        out.end = record.end;
        if out.changes.is_empty() {
            out.changes = record.body.changes;
        } else {
            out.changes.extend(record.body.changes);
        }
    }
    Ok(out)
}

/// A place in the log, and a context number, that nothing in the ring has reached.
pub fn beyond(disk: &Disk, area: &LogArea) -> Result<(u64, Seq), JournalError> {
    let (mut position, mut seq) = (0, 0);
    // Positions 0 to the ring's length are each block of the ring once, whatever positions the blocks name.
    let mut reader = Reader::new(disk, area, 0, true);
    for at in 0..area.blocks {
        let block = reader.block(at)?;
        let Some(stamp) = BlockStamp::decode(block).filter(|s| s.volume_id == area.volume_id) else {
            continue;
        };
        position = position.max(stamp.position + 1);
        if let Some(header) = RecordHeader::decode(&block[BLOCK_STAMP..BLOCK_STAMP + RECORD_HEADER]) {
            seq = seq.max(header.seq).max(header.stamp);
        }
    }
    Ok((position, Seq(seq)))
}

/// Where the row of records in the ring begins that follow each other and lead to the newest context, the longest of such rows; `None`: there is
/// no record.
pub fn newest_row(disk: &Disk, area: &LogArea) -> Result<Option<Point>, JournalError> {
    let (end, _) = beyond(disk, area)?;
    let tail = end.saturating_sub(area.blocks);
    let mut reader = Reader::new(disk, area, tail, true);
    let mut best: Option<((Seq, u64), Point)> = None;
    let mut row: Option<(Point, Point)> = None;
    for position in tail..end {
        let Some(header) = reader.header(position)? else { continue };
        let seq = Seq(header.seq.saturating_sub(u64::from(header.kind != RecordKind::Stamp)));
        let before = Point { seq, position, id: header.prev };
        let behind = Point { seq: Seq(header.seq), position: position + header.blocks(), id: header.id };
        let start = row.filter(|(_, last)| *last == before).map_or(before, |(start, _)| start);
        row = Some((start, behind));
        let reach = (behind.seq, behind.position - start.position);
        if best.is_none_or(|(furthest, _)| reach > furthest) {
            best = Some((reach, start));
        }
    }
    Ok(best.map(|(_, start)| start))
}

/// Makes records behind a cut unreadable: they promise contexts that are no longer there.
pub fn erase_behind(disk: &Disk, area: &LogArea, start: Point, end: Point) -> Result<(), JournalError> {
    let zeros = AlignedBuf::zeroed(LOG_BLOCK);
    for position in end.position..start.position + area.blocks {
        disk.write(area.place(position), &zeros).map_err(io_error("log"))?;
    }
    Ok(())
}

/// Records before the first context past `stamp` whose data is not what it says.
fn whole_prefix(disk: &Disk, found: &[Found], stamp: u64) -> Result<usize, JournalError> {
    for (i, record) in found.iter().enumerate() {
        if record.header.kind != RecordKind::Context || record.header.seq <= stamp {
            continue;
        }
        for extent in &record.body.extents {
            if !extent_matches(disk, extent)? {
                return Ok(i);
            }
        }
    }
    Ok(found.len())
}

/// No block of the log that was ever written is like this, nor what a crash leaves of one: its first sector is old or new, and both are a
/// stamp, or zeros.
fn is_strange(block: &[u8]) -> bool {
    BlockStamp::decode(block).is_none() && block[..SECTOR].iter().any(|byte| *byte != 0)
}

fn extent_matches(disk: &Disk, extent: &ExtentEntry) -> Result<bool, JournalError> {
    let mut left = extent.len as usize;
    let mut offset = extent.offset;
    let mut crc = 0;
    while left > 0 {
        let mut buf = AlignedBuf::zeroed(left.min(READ_BYTES).next_multiple_of(BLOCK_SIZE));
        disk.read(offset, &mut buf).map_err(io_error("data"))?;
        for block in buf.chunks_exact(BLOCK_SIZE) {
            crc = crc32c::crc32c_append(crc, &crc32c::crc32c(block).to_le_bytes());
        }
        left = left.saturating_sub(buf.len());
        offset += buf.len() as u64;
    }
    Ok(crc == extent.crc)
}

/// Reads blocks of the ring, in larger pieces.
pub struct Reader<'a> {
    disk: &'a Disk,
    area: &'a LogArea,
    /// First position that counts; the ring holds as many blocks from there on as it has.
    tail: u64,
    piece: AlignedBuf,
    /// Positions in `piece`.
    from: u64,
    to: u64,
    /// A block that cannot be read is taken for a damaged one.
    accept_damage: bool,
}

/// What the ring holds behind the log's end.
struct Behind {
    /// Newest context that a record there says was durable.
    stamp: u64,
    /// Newest context that is named there.
    newest: u64,
    /// Positions of blocks that were never written so.
    strange: Vec<u64>,
}

impl Behind {
    /// What is missing, if something is: a context after `end` was durable.
    fn missing(&self, end: Point) -> Option<String> {
        (self.stamp > end.seq.0).then(|| format!("context {} was durable and is not whole", end.seq.0 + 1))
    }
}

impl<'a> Reader<'a> {
    /// Reads what lies from `tail` on. With `accept_damage`, blocks that cannot be read are as if they were not there.
    pub fn new(disk: &'a Disk, area: &'a LogArea, tail: u64, accept_damage: bool) -> Self {
        Self { disk, area, tail, piece: AlignedBuf::zeroed(LOG_BLOCK), from: 0, to: 0, accept_damage }
    }

    fn limit(&self) -> u64 {
        self.tail + self.area.blocks
    }

    /// Bytes of a block.
    pub fn block(&mut self, position: u64) -> Result<&[u8], JournalError> {
        if !(self.from..self.to).contains(&position) {
            let n = (READ_BYTES / LOG_BLOCK) as u64;
            let n = n.min(self.area.run(position)).min(self.limit() - position);
            match self.fill(position, n) {
                Err(_) if self.accept_damage => {
                    if self.fill(position, 1).is_err() {
                        self.piece.fill(0);
                        (self.from, self.to) = (position, position + 1);
                    }
                }
                filled => filled?,
            }
        }
        let at = (position - self.from) as usize * LOG_BLOCK;
        Ok(&self.piece[at..at + LOG_BLOCK])
    }

    fn fill(&mut self, position: u64, blocks: u64) -> Result<(), JournalError> {
        if self.piece.len() != blocks as usize * LOG_BLOCK {
            self.piece = AlignedBuf::zeroed(blocks as usize * LOG_BLOCK);
        }
        self.to = self.from;
        self.disk.read(self.area.place(position), &mut self.piece).map_err(io_error("log"))?;
        (self.from, self.to) = (position, position + blocks);
        Ok(())
    }

    /// The header of a record that starts at `position`, whatever its predecessor.
    pub fn header(&mut self, position: u64) -> Result<Option<RecordHeader>, JournalError> {
        let volume_id = self.area.volume_id;
        let block = self.block(position)?;
        let Some(stamp) = BlockStamp::decode(block) else { return Ok(None) };
        if stamp.volume_id != volume_id || stamp.position != position || stamp.index != 0 {
            return Ok(None);
        }
        let header = RecordHeader::decode(&block[BLOCK_STAMP..BLOCK_STAMP + RECORD_HEADER]);
        Ok(header.filter(|h| h.id == stamp.record_id))
    }

    /// The record that follows `before`, or `None` where the chain ends.
    pub fn record(&mut self, before: Point) -> Result<Option<Found>, JournalError> {
        if before.position >= self.limit() {
            return Ok(None);
        }
        #[cfg(feature = "planted")]
        if crate::planted::is(crate::planted::Bug::StaleRecord) {
            return self.any_record(before);
        }
        let Some(header) = self.header(before.position)? else { return Ok(None) };
        if header.prev != before.id || header.blocks() > self.limit() - before.position {
            return Ok(None);
        }
        let expected = if header.kind == RecordKind::Stamp { before.seq.0 } else { before.seq.0 + 1 };
        if header.seq != expected {
            return Err(
                self.damaged(before.position, format!("context {} follows {}", header.seq, before.seq.0))
            );
        }
        let mut payload = Vec::with_capacity(header.blocks() as usize * LOG_BLOCK);
        for index in 0..header.blocks() {
            let volume_id = self.area.volume_id;
            let position = before.position + index;
            let block = self.block(position)?;
            let want = BlockStamp { volume_id, position, record_id: header.id, index: index as u32 };
            if BlockStamp::decode(block) != Some(want) {
                return Ok(None);
            }
            append_payload(block, &mut payload);
        }
        let body = &payload[RECORD_HEADER..RECORD_HEADER + header.body_len as usize];
        if crc32c::crc32c(body) != header.body_crc {
            return Ok(None);
        }
        let body = decode_body(&header, body)
            .ok_or_else(|| self.damaged(before.position, "a whole record does not make sense".into()))?;
        let end = Point { seq: Seq(header.seq), position: before.position + header.blocks(), id: header.id };
        Ok(Some(Found { header, body, end }))
    }

    /// A planted bug: whatever lies there counts, if it is whole.
    #[cfg(feature = "planted")]
    fn any_record(&mut self, before: Point) -> Result<Option<Found>, JournalError> {
        let block = self.block(before.position)?;
        let stamp = BlockStamp::decode(block).filter(|stamp| stamp.index == 0);
        let header = RecordHeader::decode(&block[BLOCK_STAMP..BLOCK_STAMP + RECORD_HEADER]);
        let (Some(_), Some(header)) = (stamp, header) else { return Ok(None) };
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
        let seq = before.seq.0 + u64::from(header.kind != RecordKind::Stamp);
        let end = Point { seq: Seq(seq), position: before.position + header.blocks(), id: header.id };
        Ok(decode_body(&header, body).map(|body| Found { header: RecordHeader { seq, ..header }, body, end }))
    }

    /// What is wrong where the record after `end` should be, if that cannot be what a crash left of it.
    fn strange(&mut self, end: Point) -> Result<Option<String>, JournalError> {
        if end.position >= self.limit() {
            return Ok(None);
        }
        let header = self.header(end.position)?.filter(|header| header.prev == end.id);
        let blocks = header.map_or(1, |header| header.blocks()).min(self.limit() - end.position);
        for position in end.position..end.position + blocks {
            if is_strange(self.block(position)?) {
                return Ok(Some(format!("the block at position {position} is none that was ever written")));
            }
        }
        Ok(None)
    }

    /// What the records after `end` say of contexts.
    fn behind(&mut self, end: Point) -> Result<Behind, JournalError> {
        let mut behind = Behind { stamp: 0, newest: 0, strange: Vec::new() };
        for position in end.position..self.limit() {
            if is_strange(self.block(position)?) {
                behind.strange.push(position);
            }
            let Some(header) = self.header(position)? else { continue };
            behind.stamp = behind.stamp.max(header.stamp);
            behind.newest = behind.newest.max(header.seq).max(header.stamp);
        }
        Ok(behind)
    }

    fn damaged(&self, position: u64, detail: String) -> JournalError {
        JournalError::Damaged { what: "log", offset: self.area.place(position), detail }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Milliseconds.
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
    fn progress_is_told_once_an_interval() {
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
