//! The superblock: one block at two fixed places that says how the rest of the device is laid out.

use super::VolumeError;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_journal::Geometry;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Bytes 0 to 8 of every superblock.
const MAGIC: [u8; 8] = *b"FERRYVOL";
/// The format that this code reads and writes.
pub const FORMAT_VERSION: u32 = 4;
/// Where the two copies are, in bytes.
pub const SUPERBLOCK_PLACES: [u64; 2] = [0, 1 << 20];
/// Something else is looked for in so much of the front, in bytes: where both superblocks are gone, what comes behind them in a volume, too.
const FRONT: usize = 2 << 20;
/// Incompatible feature: the log lies behind the segments, because it has grown.
pub(super) const LOG_BEHIND: u64 = 1;
/// Incompatible features that this code knows.
const KNOWN_INCOMPATIBLE: u64 = LOG_BEHIND;
/// Bytes that a segment may have: a power of two.
pub(super) const SEGMENT_SIZES: RangeInclusive<u64> = 256 << 10..=1 << 30;
/// A smallest log, in bytes. Volumes that are made now have [`super::LOG_MIN`] at least.
pub(super) const LOG_MIN: u64 = 512 << 10;
/// A longest label, in bytes.
const LABEL_MAX: usize = 64;
/// Where the fields end and the reserved zeros begin.
const FIELDS_LEN: usize = 208;
/// Where the label is.
const LABEL_AT: usize = 144;
/// Where the CRC32C of everything before it is.
const CRC_AT: usize = BLOCK_SIZE - 4;
const _: () = assert!(8 + 4 + 4 + 8 * 2 + 16 * 2 + 8 + 4 * 2 + 8 * 7 + 8 + LABEL_MAX == FIELDS_LEN);
const _: () = assert!(FIELDS_LEN <= CRC_AT);

/// What a volume says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The format's version.
    pub version: u32,
    /// Features that older programs may ignore.
    pub compatible: u64,
    /// Features that a program must know to touch the volume.
    pub incompatible: u64,
    /// Unique; stamped into everything that belongs to this volume.
    pub volume_id: [u8; 16],
    /// Key of the hash of names (SipHash).
    pub hash_key: [u8; 16],
    /// Bytes of the whole volume.
    pub size: u64,
    /// When it was made: seconds since the epoch.
    pub created_secs: u64,
    /// A name for people, up to 64 bytes of UTF-8; may be empty.
    pub label: String,
    /// Log offset, in bytes.
    pub log_offset: u64,
    /// Log length, in bytes.
    pub log_len: u64,
    /// The two slots of the home store's map, in bytes: one before the place of the first log, one behind it, so that no stretch of
    /// damage has both.
    pub home_map_offsets: [u64; 2],
    /// Length of one slot, in bytes.
    pub home_map_len: u64,
    /// Segment 0, in bytes.
    pub segments_offset: u64,
    /// Length of a segment, in bytes.
    pub segment_len: u64,
    /// Number of segments.
    pub segment_count: u32,
}

/// Why a block is no superblock that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    Zeros,
    NoMagic,
    Damaged(String),
    Version(u32),
    Features(u64),
}

impl Superblock {
    /// Where the journal and the segments are.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            volume_id: self.volume_id,
            hash_key: self.hash_key,
            log_offset: self.log_offset,
            log_len: self.log_len,
            home_map_offsets: self.home_map_offsets,
            home_map_len: self.home_map_len,
            segments_offset: self.segments_offset,
            segment_len: self.segment_len,
            segment_count: self.segment_count,
        }
    }

    /// The volume id as people write it.
    pub fn id(&self) -> String {
        let hex: String = self.volume_id.iter().map(|b| format!("{b:02x}")).collect();
        format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// What to call the volume in messages: its label, else its id.
    pub fn name(&self) -> String {
        if self.label.is_empty() { self.id() } else { self.label.clone() }
    }

    pub(super) fn encode(&self) -> AlignedBuf {
        assert!(self.label.len() <= LABEL_MAX, "the label was checked when the volume was made");
        let mut out = Vec::with_capacity(FIELDS_LEN);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.compatible.to_le_bytes());
        out.extend_from_slice(&self.incompatible.to_le_bytes());
        out.extend_from_slice(&self.volume_id);
        out.extend_from_slice(&self.hash_key);
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&(BLOCK_SIZE as u32).to_le_bytes());
        out.extend_from_slice(&self.segment_count.to_le_bytes());
        let places = [
            self.segment_len,
            self.log_offset,
            self.log_len,
            self.home_map_offsets[0],
            self.home_map_offsets[1],
            self.home_map_len,
            self.segments_offset,
            self.created_secs,
        ];
        places.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
        out.extend_from_slice(self.label.as_bytes());
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        block[..out.len()].copy_from_slice(&out);
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        block[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        block
    }

    pub(super) fn decode(block: &[u8]) -> Result<Self, Bad> {
        if block.iter().all(|b| *b == 0) {
            return Err(Bad::Zeros);
        }
        if block[..8] != MAGIC {
            return Err(Bad::NoMagic);
        }
        let u32_at = |at: usize| block[at..at + 4].iter().rev().fold(0, |v, b| v << 8 | u32::from(*b));
        let u64_at = |at: usize| block[at..at + 8].iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
        if crc32c::crc32c(&block[..CRC_AT]) != u32_at(CRC_AT) {
            return Err(Bad::Damaged("wrong checksum".into()));
        }
        if u32_at(8) != FORMAT_VERSION {
            return Err(Bad::Version(u32_at(8)));
        }
        let incompatible = u64_at(24);
        if incompatible & !KNOWN_INCOMPATIBLE != 0 {
            return Err(Bad::Features(incompatible & !KNOWN_INCOMPATIBLE));
        }
        let sixteen = |at: usize| {
            let mut id = [0; 16];
            id.copy_from_slice(&block[at..at + 16]);
            id
        };
        let label = &block[LABEL_AT..FIELDS_LEN];
        let label = &label[..label.iter().position(|b| *b == 0).unwrap_or(LABEL_MAX)];
        let sb = Self {
            version: u32_at(8),
            compatible: u64_at(16),
            incompatible,
            volume_id: sixteen(32),
            hash_key: sixteen(48),
            size: u64_at(64),
            segment_count: u32_at(76),
            segment_len: u64_at(80),
            log_offset: u64_at(88),
            log_len: u64_at(96),
            home_map_offsets: [u64_at(104), u64_at(112)],
            home_map_len: u64_at(120),
            segments_offset: u64_at(128),
            created_secs: u64_at(136),
            label: String::from_utf8_lossy(label).into_owned(),
        };
        if u32_at(72) != BLOCK_SIZE as u32 {
            return Err(Bad::Damaged(format!("block size {}", u32_at(72))));
        }
        sb.check().map_err(Bad::Damaged)?;
        Ok(sb)
    }

    /// Whoever wrote the block, its places must not overlap or lie outside: the bytes may come from a stranger.
    fn check(&self) -> Result<(), String> {
        let end = |offset: u64, len: u64| offset.checked_add(len);
        let map_ends = self.home_map_offsets.map(|offset| end(offset, self.home_map_len));
        let [first_map, second_map] = self.home_map_offsets;
        let segments = self.segment_len.checked_mul(u64::from(self.segment_count));
        let segments_end = segments.and_then(|len| end(self.segments_offset, len));
        let map_need = BLOCK_SIZE as u64 + 4 * u64::from(self.segment_count);
        let aligned = [
            self.size,
            self.segment_len,
            self.log_offset,
            self.log_len,
            first_map,
            second_map,
            self.home_map_len,
            self.segments_offset,
        ]
        .iter()
        .all(|v| v.is_multiple_of(BLOCK_SIZE as u64));
        let log_end = end(self.log_offset, self.log_len);
        let log_in_place = match self.incompatible & LOG_BEHIND {
            0 => {
                map_ends[0].is_some_and(|e| e <= self.log_offset) && log_end.is_some_and(|e| e <= second_map)
            }
            _ => {
                segments_end.is_some_and(|e| e <= self.log_offset) && log_end.is_some_and(|e| e <= self.size)
            }
        };
        let ordered = first_map >= SUPERBLOCK_PLACES[1] + BLOCK_SIZE as u64
            && map_ends[0].is_some_and(|e| e <= second_map)
            && map_ends[1].is_some_and(|e| e <= self.segments_offset)
            && log_in_place
            && segments_end.is_some_and(|e| e <= self.size);
        if !aligned || !ordered || self.home_map_len < map_need || self.segment_count == 0 {
            return Err("its places contradict each other".into());
        }
        if !self.segment_len.is_power_of_two() || !SEGMENT_SIZES.contains(&self.segment_len) {
            return Err(format!("segments of {} bytes", self.segment_len));
        }
        if self.log_len < LOG_MIN {
            return Err(format!("a log of {} bytes", self.log_len));
        }
        Ok(())
    }
}

fn read_copy(dev: &Arc<dyn BlockDevice>, place: u64) -> Result<Result<Superblock, Bad>, VolumeError> {
    if place + BLOCK_SIZE as u64 > dev.capacity() {
        return Ok(Err(Bad::Zeros));
    }
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    dev.read(place, &mut block).map_err(|source| VolumeError::Io { what: "read the superblock", source })?;
    Ok(Superblock::decode(&block))
}

/// Reads both copies, or what is wrong with each.
pub fn read_superblock_copies(dev: &dyn BlockDevice) -> [Result<Superblock, String>; 2] {
    SUPERBLOCK_PLACES.map(|place| {
        if place + BLOCK_SIZE as u64 > dev.capacity() {
            return Err("it lies behind the end of the volume".into());
        }
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        dev.read(place, &mut block).map_err(|e| format!("the device cannot read it: {e}"))?;
        Superblock::decode(&block).map_err(|bad| match bad {
            Bad::Zeros => "there is nothing but zeros".into(),
            Bad::NoMagic => "it does not begin as a superblock does".into(),
            Bad::Damaged(detail) => detail,
            Bad::Version(found) => format!("format version {found}, which this program does not know"),
            Bad::Features(bits) => format!("features that this program does not know (bits {bits:#x})"),
        })
    })
}

/// Which of two copies counts: the first that is whole; or the second, where its log has grown and that of the first has not. Then the first was
/// written before, and the device has lost that.
fn counting<E>(copies: [&Result<Superblock, E>; 2]) -> Option<usize> {
    match copies {
        [Ok(first), Ok(second)] => {
            let grown = first.volume_id == second.volume_id && second.segment_count < first.segment_count;
            Some(usize::from(grown))
        }
        [first, second] => [first, second].iter().position(|copy| copy.is_ok()),
    }
}

/// Reads the volume's superblock: the copy that counts. If the other could not take its place, that is logged, and does no harm.
pub fn read_superblock(dev: &Arc<dyn BlockDevice>) -> Result<Superblock, VolumeError> {
    let mut copies = SUPERBLOCK_PLACES
        .map(|place| read_copy(dev, place).unwrap_or_else(|error| Err(Bad::Damaged(error.to_string()))));
    let [first, second] = &copies;
    let Some(used) = counting([first, second]) else {
        let bad: Vec<Bad> = copies.into_iter().filter_map(Result::err).collect();
        return Err(refusal(dev, &bad));
    };
    copies.swap(0, used);
    let [Ok(sb), other] = copies else { unreachable!("the copy that counts is whole") };
    if sb.size > dev.capacity() {
        return Err(VolumeError::Truncated { expected: sb.size, found: dev.capacity() });
    }
    if other.as_ref() != Ok(&sb) {
        let offset = SUPERBLOCK_PLACES[1 - used];
        tracing::warn!(
            volume = sb.name(),
            offset,
            ?other,
            "a superblock is not like its copy, which is used"
        );
    }
    Ok(sb)
}

/// Whether a block may be what a crash left of a copy that was being written, when the log grew: each sector is the old one or the new one.
pub(crate) fn may_be_torn(block: &[u8], sb: &Superblock) -> bool {
    block[..8] == MAGIC
        && block[32..48] == sb.volume_id
        && block[FIELDS_LEN..CRC_AT].iter().all(|byte| *byte == 0)
}

/// Writes both copies, one after the other: a crash leaves the old ones, or the new one first.
pub(crate) fn write_superblock(dev: &dyn BlockDevice, sb: &Superblock) -> std::io::Result<()> {
    for place in SUPERBLOCK_PLACES {
        dev.write(place, &sb.encode())?;
        dev.flush()?;
    }
    Ok(())
}

/// Ends a growth of the log that a crash has interrupted: one copy counts, and nothing else may be written before
/// the other says the same. Also mends a copy that is damaged for another reason.
pub(crate) fn settle_copies(dev: &Arc<dyn BlockDevice>) -> Result<(), VolumeError> {
    let undecided = || matches!(read_superblock_copies(&**dev), [Ok(first), Ok(second)] if first != second);
    match rewrite_bad_copies(dev) {
        Ok(written) => {
            for place in written {
                tracing::warn!(offset = place, "a superblock was not like its copy, and is written anew");
            }
            Ok(())
        }
        Err(error) if undecided() => Err(error),
        Err(error) => {
            tracing::warn!(%error, "one copy of the superblock is damaged and cannot be written anew");
            Ok(())
        }
    }
}

impl Superblock {
    /// As it is with the log in the last `segments` segments, which are no longer segments then.
    pub(crate) fn with_log_behind(&self, segments: u32) -> Self {
        let segment_count = self.segment_count - segments;
        Self {
            incompatible: self.incompatible | LOG_BEHIND,
            log_offset: self.segments_offset + u64::from(segment_count) * self.segment_len,
            log_len: u64::from(segments) * self.segment_len,
            segment_count,
            ..self.clone()
        }
    }
}

/// Makes both copies the same, byte for byte: the one that [`read_superblock`] uses. Returns where one was written.
pub(crate) fn rewrite_bad_copies(dev: &Arc<dyn BlockDevice>) -> Result<Vec<u64>, VolumeError> {
    let io = |source| VolumeError::Io { what: "write the superblock", source };
    let mut blocks = Vec::new();
    for place in SUPERBLOCK_PLACES {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        let read = dev.read(place, &mut block).is_ok();
        blocks.push((place, read.then_some(block)));
    }
    let [first, second] = [0, 1].map(|copy: usize| {
        let block: Option<&AlignedBuf> = blocks[copy].1.as_ref();
        block.map_or(Err(Bad::Zeros), |block| Superblock::decode(block))
    });
    let good = counting([&first, &second]).and_then(|copy| blocks[copy].1.as_ref());
    let Some(good) = good else { return Ok(Vec::new()) };
    let mut written = Vec::new();
    for (place, block) in &blocks {
        if block.as_ref().is_none_or(|block| block[..] != good[..]) {
            dev.write(*place, good).map_err(io)?;
            dev.flush().map_err(io)?;
            written.push(*place);
        }
    }
    Ok(written)
}

/// The most telling of the reasons.
fn refusal(dev: &Arc<dyn BlockDevice>, bad: &[Bad]) -> VolumeError {
    let telling = |b: &Bad| match b {
        Bad::Version(found) => Some(VolumeError::Version { found: *found }),
        Bad::Features(bits) => Some(VolumeError::Features { bits: *bits }),
        _ => None,
    };
    if let Some(error) = bad.iter().find_map(telling) {
        return error;
    }
    let damaged = bad.iter().find_map(|b| if let Bad::Damaged(d) = b { Some(d.clone()) } else { None });
    match damaged {
        Some(detail) => VolumeError::Damaged { detail },
        None if bad.contains(&Bad::NoMagic) => VolumeError::Foreign,
        None if SUPERBLOCK_PLACES.iter().any(|place| place + BLOCK_SIZE as u64 > dev.capacity()) => {
            VolumeError::TooShort
        }
        None => emptiness(dev),
    }
}

/// Where there is no superblock there may be something else: many formats begin with zeros.
fn emptiness(dev: &Arc<dyn BlockDevice>) -> VolumeError {
    let mut front =
        AlignedBuf::zeroed(FRONT.min(usize::try_from(dev.capacity()).unwrap_or(FRONT)) & !(BLOCK_SIZE - 1));
    match dev.read(0, &mut front) {
        Err(source) => VolumeError::Io { what: "read the device", source },
        Ok(()) if front.iter().all(|b| *b == 0) => VolumeError::Empty,
        Ok(()) => VolumeError::Foreign,
    }
}
