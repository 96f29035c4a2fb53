//! [`LocalLog`]: objects that the store does not have yet, in a ring on a disk of this machine.
//!
//! Two blocks with headers come first, then the ring. A record has an object's name and bytes; it
//! begins at a block, so that no write tears one that is durable. Positions count on from lap to
//! lap; no record reaches over the end of the ring. `docs/format.md` describes the bytes.
//!
//! * LOCAL-LOG-1: records are written in the order of their numbers, one after the other. A flush
//!   that began after a record was written covers all before it, too, so what was acknowledged has
//!   no gap.
//! * LOCAL-LOG-2: before a record is written over what a header names that may be the newest one on
//!   the disk after a loss of power, a header that names the present start is durable. That holds
//!   if nothing waits, too: records that are overwritten in part look like damage.
//! * LOCAL-LOG-3: each opening begins a new *run* of the log: records behind a torn one, which
//!   nobody was told of, are never taken for new ones.

use crate::format::{Id, random_id};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, FlushCoordinator, Target};
use ferry_env::Env;
use std::io;
use std::ops::Range;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks before the ring: two headers, written in turn.
const HEADERS: u64 = 2;
const MAGIC: &[u8; 8] = b"FERRYLOC";
const VERSION: u32 = 1;
/// Bytes of a header: it fits a sector, so that it is never torn.
const HEADER_LEN: usize = 96;
const RECORD_MAGIC: &[u8; 4] = b"FLR1";
/// Bytes of a record before its name.
const RECORD_LEN: usize = 64;
/// If nothing waits, the log begins at the front of the ring again once it is so long: blocks that
/// were written before are written faster, and the file stays small.
const FRONT_BYTES: u64 = 4 << 20;
/// So far behind a record that is not whole others are looked for.
const LOOK_BYTES: u64 = 64 << 20;

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    volume: Id,
    log: Id,
    run: u64,
    /// Of two headers the one with the higher count is newer.
    count: u64,
    /// Position and number of the first record.
    start: u64,
    number: u64,
}

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An object that is put.
    Put = 1,
    /// An object that is created.
    Create = 2,
    /// Nothing: the next record is at the front of the ring.
    Skip = 3,
}

/// An object to append.
pub(crate) struct Object<'a> {
    pub name: &'a str,
    pub bytes: &'a [u8],
    /// It is created, and not put.
    pub exclusive: bool,
    /// Seconds since the Unix epoch, for people.
    pub secs: u64,
    /// All records before this number are known to be durable.
    pub durable: u64,
}

/// Where an object's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Position of its record.
    pub at: u64,
    /// Number of its record.
    pub number: u64,
    /// The first byte behind the record's name.
    skip: u64,
    /// Bytes of the object.
    pub len: u64,
    crc: u32,
}

/// A record that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub slot: Slot,
    pub name: String,
    pub exclusive: bool,
    pub secs: u64,
}

/// What a log had when it was opened.
#[derive(Default)]
pub(crate) struct Recovered {
    /// Whole records, in order.
    pub records: Vec<Record>,
    /// So many records were found behind one that is damaged although it had been acknowledged.
    pub cut: u64,
}

/// Why there is no log.
#[derive(Debug)]
pub(crate) enum NoLog {
    /// The file is new: it is zeros.
    Blank,
    /// It is something else.
    Foreign,
    /// It is the log of this volume, and not of the one that was asked for.
    OtherVolume,
    Io(io::Error),
}

impl From<io::Error> for NoLog {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A log that is open, to be appended to.
pub(crate) struct LocalLog {
    flusher: Arc<FlushCoordinator>,
    /// What the newest header that was written says.
    header: Header,
    /// The start that a durable header names. No header that is older counts any more.
    durable_start: u64,
    /// Position and number of the next record.
    head: u64,
    number: u64,
}

/// Bytes of the ring that a record takes.
pub(crate) fn record_bytes(name: &str, bytes: &[u8]) -> u64 {
    ((RECORD_LEN + name.len() + bytes.len()) as u64).next_multiple_of(BLOCK)
}

fn ring_of(device: &dyn BlockDevice) -> u64 {
    device.capacity() / BLOCK * BLOCK - HEADERS * BLOCK
}

/// The byte of the device that a position is at.
fn offset(ring: u64, at: u64) -> u64 {
    HEADERS * BLOCK + at % ring
}

impl Header {
    fn encode(&self) -> AlignedBuf {
        let mut out = Vec::with_capacity(HEADER_LEN);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.volume);
        out.extend(self.log);
        for value in [self.run, self.count, self.start, self.number] {
            out.extend(value.to_le_bytes());
        }
        out.extend([0; 12]);
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        assert_eq!(out.len(), HEADER_LEN, "docs/format.md says so");
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        block[..HEADER_LEN].copy_from_slice(&out);
        block
    }

    fn decode(block: &[u8]) -> Option<Self> {
        let (fields, crc) = block[..HEADER_LEN].split_at(HEADER_LEN - 4);
        let known = &fields[..8] == MAGIC && fields[8..12] == VERSION.to_le_bytes();
        if !known || crc != crc32c::crc32c(fields).to_le_bytes() {
            return None;
        }
        let id = |at: usize| fields[at..at + 16].try_into().expect("it has 16 bytes");
        Some(Self {
            volume: id(16),
            log: id(32),
            run: u64_at(fields, 48),
            count: u64_at(fields, 56),
            start: u64_at(fields, 64),
            number: u64_at(fields, 72),
        })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("it has 8 bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("it has 4 bytes"))
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// The newest header of a device.
fn newest_header(device: &dyn BlockDevice) -> Result<Header, NoLog> {
    if device.capacity() <= (HEADERS + 1) * BLOCK {
        return Err(NoLog::Foreign);
    }
    let mut blocks = AlignedBuf::zeroed((HEADERS * BLOCK) as usize);
    device.read(0, &mut blocks)?;
    let headers = blocks.chunks_exact(BLOCK_SIZE).filter_map(Header::decode);
    match headers.max_by_key(|header| header.count) {
        Some(header) => Ok(header),
        None if blocks.iter().all(|byte| *byte == 0) => Err(NoLog::Blank),
        None => Err(NoLog::Foreign),
    }
}

/// What the first block of a record says.
struct Front {
    kind: Kind,
    number: u64,
    durable: u64,
    secs: u64,
    name_len: usize,
    len: u64,
    crc: u32,
}

impl Front {
    fn decode(block: &[u8], run: u64) -> Option<Self> {
        if &block[..4] != RECORD_MAGIC || u64_at(block, 8) != run {
            return None;
        }
        let kind = match u16_at(block, 40) {
            1 => Kind::Put,
            2 => Kind::Create,
            3 => Kind::Skip,
            _ => return None,
        };
        Some(Self {
            kind,
            number: u64_at(block, 16),
            durable: u64_at(block, 24),
            secs: u64_at(block, 32),
            name_len: u16_at(block, 42),
            len: u64::from(u32_at(block, 44)),
            crc: u32_at(block, 4),
        })
    }

    fn bytes(&self) -> u64 {
        ((RECORD_LEN + self.name_len) as u64 + self.len).next_multiple_of(BLOCK)
    }
}

/// A record that is whole, with its front; `None`: there is none at this position.
fn read_record(device: &dyn BlockDevice, run: u64, at: u64) -> io::Result<Option<(Front, Record)>> {
    let ring = ring_of(device);
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(offset(ring, at), &mut block)?;
    let Some(front) = Front::decode(&block, run) else { return Ok(None) };
    if front.bytes() > ring - at % ring {
        return Ok(None);
    }
    let mut bytes = AlignedBuf::zeroed(front.bytes() as usize);
    device.read(offset(ring, at), &mut bytes)?;
    let (name, end) =
        (RECORD_LEN + front.name_len, RECORD_LEN + front.name_len + front.len as usize);
    if crc32c::crc32c(&bytes[8..end]) != front.crc {
        return Ok(None);
    }
    let Ok(text) = std::str::from_utf8(&bytes[RECORD_LEN..name]) else { return Ok(None) };
    let slot = Slot {
        at,
        number: front.number,
        skip: name as u64,
        len: front.len,
        crc: crc32c::crc32c(&bytes[name..end]),
    };
    let exclusive = front.kind == Kind::Create;
    let record = Record { slot, name: text.into(), exclusive, secs: front.secs };
    Ok(Some((front, record)))
}

impl LocalLog {
    /// Makes the log of a volume, which is empty.
    pub fn make(device: Arc<dyn BlockDevice>, volume: Id, env: &Env) -> io::Result<Self> {
        let header = Header {
            volume,
            log: random_id(env),
            run: env.entropy.next_u64(),
            count: 1,
            start: 0,
            number: 0,
        };
        device.write(BLOCK, &header.encode())?;
        let flusher = FlushCoordinator::new(device);
        let log = Self { flusher, header, durable_start: 0, head: 0, number: 0 };
        log.flush(log.flusher.write_completed())?;
        Ok(log)
    }

    /// Opens the log of a volume, and reads what it has.
    pub fn open(device: Arc<dyn BlockDevice>, volume: &Id) -> Result<(Self, Recovered), NoLog> {
        let header = newest_header(&*device)?;
        if header.volume != *volume {
            return Err(NoLog::OtherVolume);
        }
        let mut found = Recovered::default();
        let (ring, mut head, mut number) = (ring_of(&*device), header.start, header.number);
        while head - header.start < ring {
            let Some((front, record)) = read_record(&*device, header.run, head)? else { break };
            if front.number != number {
                break;
            }
            number += 1;
            head = match front.kind {
                Kind::Skip => (head + 1).next_multiple_of(ring),
                _ => head + front.bytes(),
            };
            if front.kind != Kind::Skip {
                found.records.push(record);
            }
        }
        // What a crash tore had not been acknowledged. A later record tells if this had.
        let mut at = head + BLOCK;
        while at < (head + LOOK_BYTES).min(header.start + ring) {
            let later = read_record(&*device, header.run, at)?;
            let later = later.filter(|(front, _)| front.number > number && front.durable > number);
            found.cut += u64::from(later.is_some());
            at += later.map_or(BLOCK, |(front, _)| front.bytes());
        }
        let flusher = FlushCoordinator::new(device);
        Ok((Self { flusher, header, durable_start: header.start, head, number }, found))
    }

    /// The number that tells it from others.
    pub fn id(&self) -> Id {
        self.header.log
    }

    /// Flushes for all writers, and reads.
    pub fn flusher(&self) -> Arc<FlushCoordinator> {
        Arc::clone(&self.flusher)
    }

    /// Bytes of the ring.
    pub fn ring(&self) -> u64 {
        ring_of(&**self.flusher.device())
    }

    /// Position of the next record.
    pub fn head(&self) -> u64 {
        self.head
    }

    fn flush(&self, target: Target) -> io::Result<()> {
        self.flusher.flush_wait(target)
    }

    fn write_header(&mut self, start: u64, number: u64) -> io::Result<Target> {
        let header = Header { count: self.header.count + 1, start, number, ..self.header };
        let at = header.count % HEADERS * BLOCK;
        self.flusher.device().write(at, &header.encode())?;
        self.header = header;
        Ok(self.flusher.write_completed())
    }

    /// All that it has is in the store: it is empty, and that is durable.
    pub fn restart(&mut self, env: &Env) -> io::Result<()> {
        let ring = self.ring();
        self.header.run = env.entropy.next_u64();
        (self.head, self.number) = (self.head.next_multiple_of(ring), 0);
        self.write_durable_header(self.head, 0)
    }

    fn write_durable_header(&mut self, start: u64, number: u64) -> io::Result<()> {
        let target = self.write_header(start, number)?;
        self.flush(target)?;
        self.durable_start = start;
        Ok(())
    }

    /// Nothing waits: notes that for the next opening, which then has less to look at. It is not
    /// flushed.
    pub fn note_empty(&mut self) -> io::Result<()> {
        self.write_header(self.head, self.number).map(drop)
    }

    /// Writes a record. It is durable once the target is flushed. `tail`: the first record that
    /// waits.
    pub fn append(
        &mut self,
        object: &Object<'_>,
        tail: Option<Slot>,
    ) -> io::Result<(Slot, Target)> {
        let (ring, len) = (self.ring(), record_bytes(object.name, object.bytes));
        if tail.is_none() && self.head % ring >= FRONT_BYTES.min(ring / 2) {
            // The header first: without it nothing leads an opening to the front.
            let front = self.head.next_multiple_of(ring);
            self.write_durable_header(front, self.number)?;
            self.head = front;
        }
        let left = ring - self.head % ring;
        let skips = len > left;
        let at = if skips { self.head + left } else { self.head };
        let end = at + len;
        if end > self.durable_start + ring {
            let (start, number) =
                tail.map_or((self.head, self.number), |tail| (tail.at, tail.number));
            if end > start + ring {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.write_durable_header(start, number)?;
        }
        if skips {
            let nothing = Object { name: "", bytes: &[], ..*object };
            self.write_record(Kind::Skip, &nothing, self.head)?;
            (self.head, self.number) = (at, self.number + 1);
        }
        let kind = if object.exclusive { Kind::Create } else { Kind::Put };
        let crc = self.write_record(kind, object, at)?;
        let target = self.flusher.write_completed();
        let skip = (RECORD_LEN + object.name.len()) as u64;
        let slot = Slot { at, number: self.number, skip, len: object.bytes.len() as u64, crc };
        (self.head, self.number) = (end, self.number + 1);
        Ok((slot, target))
    }

    /// Returns the checksum of the object's bytes.
    fn write_record(&self, kind: Kind, object: &Object<'_>, at: u64) -> io::Result<u32> {
        let mut buf = AlignedBuf::zeroed(record_bytes(object.name, object.bytes) as usize);
        let name = RECORD_LEN + object.name.len();
        let end = name + object.bytes.len();
        buf[..4].copy_from_slice(RECORD_MAGIC);
        for (at, value) in
            [(8, self.header.run), (16, self.number), (24, object.durable), (32, object.secs)]
        {
            buf[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        buf[40..42].copy_from_slice(&(kind as u16).to_le_bytes());
        buf[42..44].copy_from_slice(&(object.name.len() as u16).to_le_bytes());
        buf[44..48].copy_from_slice(&(object.bytes.len() as u32).to_le_bytes());
        buf[RECORD_LEN..name].copy_from_slice(object.name.as_bytes());
        buf[name..end].copy_from_slice(object.bytes);
        let crc = crc32c::crc32c(&buf[8..end]);
        buf[4..8].copy_from_slice(&crc.to_le_bytes());
        self.flusher.device().write(offset(self.ring(), at), &buf)?;
        Ok(crc32c::crc32c(object.bytes))
    }
}

/// Bytes of an object in the log, or those of `range`; what lies behind its end is left out. They
/// are not verified.
pub(crate) fn read(
    device: &dyn BlockDevice,
    slot: &Slot,
    range: Option<Range<u64>>,
) -> io::Result<Vec<u8>> {
    let range = range.unwrap_or(0..slot.len);
    let (start, end) = (range.start.min(slot.len), range.end.min(slot.len));
    if start >= end {
        return Ok(Vec::new());
    }
    let first = slot.skip + start;
    let (from, to) = (first / BLOCK * BLOCK, (slot.skip + end).next_multiple_of(BLOCK));
    let mut buf = AlignedBuf::zeroed((to - from) as usize);
    device.read(offset(ring_of(device), slot.at) + from, &mut buf)?;
    let skip = (first - from) as usize;
    Ok(buf[skip..skip + (end - start) as usize].to_vec())
}

/// All bytes of an object in the log; `None`: they are not what was written.
pub(crate) fn read_whole(device: &dyn BlockDevice, slot: &Slot) -> io::Result<Option<Vec<u8>>> {
    let bytes = read(device, slot, None)?;
    Ok(Some(bytes).filter(|bytes| crc32c::crc32c(bytes) == slot.crc))
}
