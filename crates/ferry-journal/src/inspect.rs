//! What a volume that nobody has open holds, told record by record, as far as it can be read.
//! Nothing is written.

use crate::disk::Disk;
use crate::home::map::HomeMap;
use crate::home::{Home, HomeState, Opening};
use crate::log::format::{BlockHeader, RECORD_HEADER, RecordHeader};
use crate::log::reader::Reader;
use crate::log::record::append_payload;
use crate::log::recovery::replay;
use crate::log::ring::LogArea;
use crate::types::Point;
use crate::{Geometry, JournalError, Seq};
use ferry_device::{AlignedBuf, BlockDevice};
use std::ops::Range;
use std::sync::Arc;

/// Memory for the home store while its state is read, in bytes.
const CACHE_BYTES: usize = 1 << 20;

/// How a record fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wholeness {
    /// Every block is there and the body's checksum matches.
    Whole,
    /// This block of it (0 is the first) is missing or another record's.
    Missing(u64),
    /// All blocks are there, but they do not hold what was written.
    BadBody,
}

/// A record found in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// Position of its first block.
    pub position: u64,
    /// The same on the device, in bytes.
    pub offset: u64,
    /// Blocks that it takes.
    pub blocks: u64,
    /// What it says of itself.
    pub header: RecordHeader,
    /// Whether it is all there.
    pub state: Wholeness,
}

/// Where the home store says that recovery begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStart {
    /// Newest context in the home store.
    pub seq: Seq,
    /// Position of the first record that is not in it.
    pub position: u64,
    /// Id of the record before that.
    pub id: u64,
    /// The volume was closed cleanly.
    pub clean: bool,
    /// Bytes of all keys and values.
    pub live_bytes: u64,
}

/// Where recovery would end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEnd {
    /// Newest context that would be there.
    pub seq: Seq,
    /// Position behind its record.
    pub position: u64,
    /// Id of that record.
    pub id: u64,
    /// The same on the device, in bytes.
    pub offset: u64,
    /// Contexts that would be applied.
    pub contexts: u64,
    /// Records read for it, durable points among them.
    pub records: u64,
    /// Bytes of log read for it.
    pub bytes: u64,
}

/// One copy of the home store's map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapCopy {
    /// Grows with every change: the copy with the larger one counts.
    pub generation: u64,
    /// Length of the home store's file, in bytes.
    pub len: u64,
    /// Segments with a part of it, in the order of the file; `None` where nothing was ever written.
    pub units: Vec<Option<u32>>,
    /// Segments kept for its growth.
    pub spare: Vec<u32>,
    /// Nothing was written to the home store since its journal was closed: both copies are the
    /// same, but for damage.
    pub at_rest: bool,
}

/// Asks the home store where the log begins. Needs the home store to be readable.
pub fn log_start(dev: &Arc<dyn BlockDevice>, geo: &Geometry) -> Result<LogStart, JournalError> {
    let disk = Arc::new(Disk::new(dev.clone()));
    let opening = Opening { read_only: true, in_order: false };
    let (_, HomeState { point, clean, live_bytes }) = Home::open(&disk, geo, CACHE_BYTES, opening)?;
    Ok(LogStart { seq: point.seq, position: point.position, id: point.id, clean, live_bytes })
}

/// Finds out where recovery would end, as it would.
pub fn log_end(
    dev: &Arc<dyn BlockDevice>,
    geo: &Geometry,
    start: &LogStart,
) -> Result<LogEnd, JournalError> {
    let (disk, area) = (Disk::new(dev.clone()), LogArea::new(geo));
    let point = Point { seq: start.seq, position: start.position, id: start.id };
    let at_rest = HomeMap::read(&disk, geo)?.map.at_rest;
    let replayed = replay(&disk, &area, point, at_rest, false, &mut |_, _, _| ())?;
    Ok(LogEnd {
        seq: replayed.end.seq,
        position: replayed.end.position,
        id: replayed.end.id,
        offset: area.offset(replayed.end.position),
        contexts: replayed.contexts,
        records: replayed.records,
        bytes: replayed.bytes,
    })
}

/// Shows where the data lies, in bytes of the device, that the contexts in the log name, also those
/// that recovery would cut off: it reads that data to find out where the log ends.
pub fn log_extents(
    dev: &Arc<dyn BlockDevice>,
    geo: &Geometry,
    start: &LogStart,
    visit: &mut dyn FnMut(Range<u64>),
) -> Result<(), JournalError> {
    let (disk, area) = (Disk::new(dev.clone()), LogArea::new(geo));
    let mut reader = Reader::new(&disk, &area, start.position);
    let mut end = Point { seq: start.seq, position: start.position, id: start.id };
    while let Some(record) = reader.record(end)? {
        for extent in &record.body.extents {
            visit(extent.offset..extent.offset.saturating_add(extent.len.into()));
        }
        end = record.end;
    }
    Ok(())
}

/// Shows every record whose beginning is in the log, the oldest position first, those that no
/// recovery would use among them; what the device cannot read is passed over. `visit` returns
/// `false` to end it.
pub fn log_records(
    dev: &Arc<dyn BlockDevice>,
    geo: &Geometry,
    visit: &mut dyn FnMut(&LogRecord) -> bool,
) -> Result<(), JournalError> {
    let (disk, area) = (Disk::new(dev.clone()), LogArea::new(geo));
    let Some(newest) = newest_position(&disk, &area) else { return Ok(()) };
    let tail = (newest + 1).saturating_sub(area.blocks);
    let mut reader = Reader::new(&disk, &area, tail);
    let mut position = tail;
    while position <= newest {
        let Ok(Some(header)) = reader.header(position) else {
            position += 1;
            continue;
        };
        let (blocks, mut state) = (header.blocks(), Wholeness::Whole);
        let mut payload = Vec::new();
        for index in 0..blocks {
            let at = position + index;
            let want = BlockHeader {
                volume_id: geo.volume_id,
                position: at,
                record_id: header.id,
                index: u32::try_from(index).unwrap_or(u32::MAX),
            };
            let block =
                Some(at).filter(|at| *at < tail + area.blocks).and_then(|at| reader.block(at).ok());
            let Some(block) = block.filter(|block| BlockHeader::decode(block) == Some(want)) else {
                state = Wholeness::Missing(index);
                break;
            };
            append_payload(block, &mut payload);
        }
        let body = payload.get(RECORD_HEADER..RECORD_HEADER + header.body_len as usize);
        if state == Wholeness::Whole && body.map(crc32c::crc32c) != Some(header.body_crc) {
            state = Wholeness::BadBody;
        }
        let whole = state == Wholeness::Whole;
        if !visit(&LogRecord { position, offset: area.offset(position), blocks, header, state }) {
            return Ok(());
        }
        position += if whole { blocks } else { 1 };
    }
    Ok(())
}

/// The newest position that any whole block header in the ring names.
fn newest_position(disk: &Disk, area: &LogArea) -> Option<u64> {
    let mut reader = Reader::new(disk, area, 0);
    let mut newest = None;
    for at in 0..area.blocks {
        let header = reader.block(at).ok().and_then(BlockHeader::decode);
        let ours =
            header.filter(|s| s.volume_id == area.volume_id && s.position % area.blocks == at);
        newest = newest.max(ours.map(|s| s.position));
    }
    newest
}

/// Both copies of the home store's map, or what is wrong with each.
pub fn home_map(dev: &Arc<dyn BlockDevice>, geo: &Geometry) -> [Result<MapCopy, String>; 2] {
    [0, 1].map(|slot| {
        let mut buf = AlignedBuf::zeroed(geo.home_map_len as usize);
        dev.read(HomeMap::slot_offset(geo, slot), &mut buf).map_err(|e| e.to_string())?;
        let map = HomeMap::decode(&buf, geo).map_err(str::to_owned)?;
        let HomeMap { generation, len, units, spare, at_rest } = map;
        Ok(MapCopy { generation, len, units, spare, at_rest })
    })
}
