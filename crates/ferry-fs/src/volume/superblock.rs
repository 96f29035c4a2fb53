//! The superblock: one block that says how the rest of the device is laid out, at two fixed places
//! in front and, since volumes are made so, in the volume's last block.

use crate::volume::error::VolumeError;
use crate::volume::mark::CopyMark;
use crate::volume::version::FORMAT_VERSION;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_journal::Geometry;
use ferry_journal::inspect::home_map;
use siphasher::sip128::{Hasher128, SipHasher24};
use std::hash::Hasher;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Bytes 0 to 8 of every superblock.
const MAGIC: [u8; 8] = *b"FERRYVOL";
/// Where the two copies in front are, in bytes.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 1 << 20];
/// Compatible feature: a third copy is in the volume's last block. A volume that has lost its front
/// is found there.
pub(super) const LAST_COPY: u64 = 1;
/// What has no superblock is called empty if so many bytes that the host does not call a hole are
/// zeros, and the last block is.
const LOOKED_AT: u64 = 256 << 20;
/// The last copy is looked for so far back, in bytes that the host does not call a hole: a program
/// that makes a volume's file longer leaves a hole behind it.
const SEARCHED: u64 = 1 << 30;
/// Bytes read at once.
const CHUNK_BYTES: u64 = 1 << 20;
pub(super) const BLOCK: u64 = BLOCK_SIZE as u64;
/// Incompatible feature: the log lies behind the segments, because it has grown.
pub(super) const LOG_BEHIND: u64 = 1;
/// Incompatible feature: the slots of the home map lie behind the segments, because the volume has
/// grown beyond those in front.
pub(super) const MAP_BEHIND: u64 = 2;
/// Incompatible features that this code knows.
const KNOWN_INCOMPATIBLE: u64 = LOG_BEHIND | MAP_BEHIND;
/// Bytes that a segment may have: a power of two.
pub(super) const SEGMENT_SIZES: RangeInclusive<u64> = 256 << 10..=1 << 30;
/// A smallest log, in bytes. Volumes that are made now have [`crate::volume::LOG_MIN`] at least.
pub(super) const LOG_MIN: u64 = 512 << 10;
/// A longest log, in bytes, when a volume is made and when its log grows. The journal counts the
/// bytes of a log in 40 bits (`ferry-journal/src/log/space`).
pub(crate) const LOG_MAX: u64 = 1 << 39;
/// A longest label, in bytes.
const LABEL_MAX: usize = 64;
/// Where the fields end and the reserved zeros begin.
const FIELDS_LEN: usize = 232;
/// Where the label is, and where the timeline.
const LABEL_AT: usize = 144;
const TIMELINE_AT: usize = LABEL_AT + LABEL_MAX;
/// Where the CRC32C of everything before it is.
const CRC_AT: usize = BLOCK_SIZE - 4;
const _: () = assert!(8 + 4 + 4 + 8 * 2 + 16 * 2 + 8 + 4 * 2 + 8 * 7 + 8 == LABEL_AT);
const LAYOUT_AT: usize = TIMELINE_AT + 16;
const _: () = assert!(LAYOUT_AT + 8 == FIELDS_LEN);
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
    /// Unique; written into everything that belongs to this volume.
    pub volume_id: [u8; 16],
    /// Key of the hash of names (SipHash).
    pub hash_key: [u8; 16],
    /// Bytes of the whole volume.
    pub size: u64,
    /// When it was made: seconds since the epoch.
    pub created_secs: u64,
    /// A name for people, up to 64 bytes of UTF-8; may be empty.
    pub label: String,
    /// Random since a rollback or a clone began a timeline of its own; zeros before.
    pub timeline: [u8; 16],
    /// How often the log, the slots or the end of the volume have moved.
    pub layout: u64,
    /// Log offset, in bytes.
    pub log_offset: u64,
    /// Log length, in bytes.
    pub log_len: u64,
    /// The two slots of the home store's map, in bytes: one before the place of the first log, one
    /// behind it, so that no range of damage has both.
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
    /// A copy to this device has not ended.
    Unfinished,
}

/// Whether a block that need not be whole begins as the superblock of this volume.
pub(super) fn superblock_begins(block: &[u8], volume_id: [u8; 16]) -> bool {
    block[..8] == MAGIC && block[32..48] == volume_id
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

    /// The volume id as two words.
    pub(crate) fn number(&self) -> [u64; 2] {
        two_words(self.volume_id)
    }

    /// The timeline as two words.
    pub(crate) fn timeline_words(&self) -> [u64; 2] {
        two_words(self.timeline)
    }

    /// The volume id as people write it.
    pub fn id(&self) -> String {
        let hex: String = self.volume_id.iter().map(|b| format!("{b:02x}")).collect();
        format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// Key of what proves to a server that a client was given an inode number. In another timeline
    /// that inode may be missing, or have what it had long ago, so each timeline has its own key.
    pub fn capability_key(&self) -> [u8; 16] {
        if self.timeline == [0; 16] {
            return self.hash_key;
        }
        let mut hasher = SipHasher24::new_with_key(&self.hash_key);
        hasher.write(b"ferry timeline\0");
        hasher.write(&self.timeline);
        hasher.finish128().as_bytes()
    }

    /// Whether it has this incompatible feature.
    pub(super) fn has(&self, feature: u64) -> bool {
        self.incompatible & feature != 0
    }

    pub(super) fn has_last_copy(&self) -> bool {
        self.compatible & LAST_COPY != 0
    }

    /// Bytes of the last copy.
    pub(super) fn last_len(&self) -> u64 {
        if self.has_last_copy() { BLOCK } else { 0 }
    }

    /// Where its copies are, in bytes.
    pub fn offsets(&self) -> Vec<u64> {
        let last = self.has_last_copy().then(|| self.size - BLOCK);
        SUPERBLOCK_OFFSETS.into_iter().chain(last).collect()
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
        let numbers = [
            self.segment_len,
            self.log_offset,
            self.log_len,
            self.home_map_offsets[0],
            self.home_map_offsets[1],
            self.home_map_len,
            self.segments_offset,
            self.created_secs,
        ];
        numbers.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
        out.extend_from_slice(self.label.as_bytes());
        out.resize(TIMELINE_AT, 0);
        out.extend_from_slice(&self.timeline);
        out.extend_from_slice(&self.layout.to_le_bytes());
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
        if CopyMark::decode(block).is_some() {
            return Err(Bad::Unfinished);
        }
        if block[..8] != MAGIC {
            return Err(Bad::NoMagic);
        }
        let u32_at =
            |at: usize| block[at..at + 4].iter().rev().fold(0, |v, b| v << 8 | u32::from(*b));
        let u64_at =
            |at: usize| block[at..at + 8].iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
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
        let label = &block[LABEL_AT..TIMELINE_AT];
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
            timeline: sixteen(TIMELINE_AT),
            layout: u64_at(LAYOUT_AT),
        };
        if u32_at(72) != BLOCK_SIZE as u32 {
            return Err(Bad::Damaged(format!("block size {}", u32_at(72))));
        }
        sb.check().map_err(Bad::Damaged)?;
        Ok(sb)
    }

    /// No matter who wrote the block, its offsets must not overlap or lie outside: the bytes may
    /// come from a stranger.
    fn check(&self) -> Result<(), String> {
        let [first_map, second_map] = self.home_map_offsets;
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
        let room = self.size.saturating_sub(self.last_len());
        // Everything in the order of the device: what is in front, the segments, what is behind.
        let log = (self.log_offset, self.log_len);
        let maps = self.home_map_offsets.map(|offset| (offset, self.home_map_len));
        let (log_behind, map_behind) = (self.has(LOG_BEHIND), self.has(MAP_BEHIND));
        let mut parts = vec![(0, SUPERBLOCK_OFFSETS[1] + BLOCK)];
        parts.extend((!map_behind).then_some(maps[0]));
        parts.extend((!log_behind).then_some(log));
        parts.extend((!map_behind).then_some(maps[1]));
        let segments = self.segment_len.checked_mul(u64::from(self.segment_count));
        parts.push((self.segments_offset, segments.unwrap_or(u64::MAX)));
        let mut behind = Vec::new();
        behind.extend(log_behind.then_some(log));
        behind.extend(if map_behind { maps.to_vec() } else { Vec::new() });
        behind.sort_unstable();
        parts.extend(behind);
        parts.push((room, 0));
        let ordered = first_map < second_map
            && parts
                .windows(2)
                .all(|pair| pair[0].0.checked_add(pair[0].1).is_some_and(|end| end <= pair[1].0));
        if !aligned || !ordered || self.home_map_len < map_need || self.segment_count == 0 {
            return Err("its places contradict each other".into());
        }
        if !self.segment_len.is_power_of_two() || !SEGMENT_SIZES.contains(&self.segment_len) {
            return Err(format!("segments of {} bytes", self.segment_len));
        }
        // A log that grew has whole segments.
        if self.log_len < LOG_MIN || self.log_len > LOG_MAX + SEGMENT_SIZES.end() {
            return Err(format!("a log of {} bytes", self.log_len));
        }
        Ok(())
    }
}

/// An identifier as two words.
fn two_words(bytes: [u8; 16]) -> [u64; 2] {
    let (words, _) = bytes.as_chunks::<8>();
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

fn read_copy(dev: &dyn BlockDevice, offset: u64) -> Result<Superblock, Bad> {
    if offset.saturating_add(BLOCK) > dev.capacity() {
        return Err(Bad::Zeros);
    }
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    dev.read(offset, &mut block)
        .map_err(|e| Bad::Damaged(format!("the device cannot read it: {e}")))?;
    Superblock::decode(&block)
}

/// All copies in front, and the last one if a copy in front says that there is one; each with its
/// place.
fn copies(dev: &dyn BlockDevice) -> Vec<(u64, Result<Superblock, Bad>)> {
    let mut copies: Vec<_> =
        SUPERBLOCK_OFFSETS.iter().map(|offset| (*offset, read_copy(dev, *offset))).collect();
    let known = copies.iter().find_map(|(_, copy)| copy.as_ref().ok());
    let last = known.and_then(|sb| sb.offsets().get(SUPERBLOCK_OFFSETS.len()).copied());
    copies.extend(last.map(|offset| (offset, read_copy(dev, offset))));
    copies
}

/// Reads all copies, or what is wrong with each.
pub fn read_superblock_copies(dev: &dyn BlockDevice) -> Vec<(u64, Result<Superblock, String>)> {
    let reason = |bad| match bad {
        Bad::Zeros => "there is nothing but zeros".into(),
        Bad::NoMagic => "it does not begin as a superblock does".into(),
        Bad::Damaged(detail) => detail,
        Bad::Version(found) => format!("format version {found}, which this program does not know"),
        Bad::Features(bits) => format!("features that this program does not know (bits {bits:#x})"),
        Bad::Unfinished => "a copy that has not ended has its mark there".into(),
    };
    let copies = copies(dev).into_iter().map(|(offset, copy)| {
        let missing = offset.saturating_add(BLOCK) > dev.capacity();
        let copy = if missing {
            Err("it lies behind the end of the volume".to_owned())
        } else {
            copy.map_err(reason)
        };
        (offset, copy)
    });
    copies.collect()
}

/// Which copy counts: the first that is whole; or another of those in front, of a later layout.
/// Then the first was written before, and the device has lost that. Programs that know no layouts
/// make a log longer, too: of one layout that with fewer segments is the later one. They may leave
/// the last copy as it is.
fn counting(copies: &[(u64, Result<Superblock, Bad>)]) -> Option<usize> {
    let whole = |at: &usize| copies[*at].1.as_ref().ok();
    let first = (0..copies.len()).find(|at| whole(at).is_some())?;
    let later = |best: usize, at: usize| match (whole(&best), whole(&at)) {
        (Some(a), Some(b)) if a.volume_id == b.volume_id => {
            let longer_log = b.segment_count < a.segment_count && b.layout >= a.layout;
            let in_front = SUPERBLOCK_OFFSETS.contains(&copies[at].0);
            if longer_log || in_front && b.layout > a.layout { at } else { best }
        }
        _ => best,
    };
    Some((first..copies.len()).fold(first, later))
}

/// Reads the volume's superblock: the copy that counts. If another could not take its place, that
/// is logged, and does no harm. The last copy alone is not enough: what else the front has lost is
/// for a repair to find out.
pub fn read_superblock(dev: &Arc<dyn BlockDevice>) -> Result<Superblock, VolumeError> {
    let mut copies = copies(&**dev);
    // While one mark is there, the other superblocks may be whole already, and count for nothing.
    if copies.iter().any(|(_, copy)| copy.as_ref().err() == Some(&Bad::Unfinished)) {
        return Err(VolumeError::Unfinished);
    }
    let Some(used) = counting(&copies) else {
        return Err(refusal(dev, copies.into_iter().filter_map(|(_, copy)| copy.err()).collect()));
    };
    let (_, Ok(sb)) = copies.swap_remove(used) else {
        unreachable!("the copy that counts is whole")
    };
    if sb.size > dev.capacity() {
        return Err(VolumeError::Truncated { expected: sb.size, found: dev.capacity() });
    }
    for (offset, other) in copies.iter().filter(|(_, other)| other.as_ref() != Ok(&sb)) {
        tracing::warn!(
            volume = sb.name(),
            offset,
            ?other,
            "a superblock is not like its copy, which is used"
        );
    }
    Ok(sb)
}

/// The same for a repair, which the last copy is enough for, where that is a volume's: its home
/// store's map must be there, too. Returns where the copy is that is used.
pub fn find_superblock(dev: &Arc<dyn BlockDevice>) -> Result<(Superblock, u64), VolumeError> {
    let error = match read_superblock(dev) {
        Ok(sb) => {
            let copies = copies(&**dev);
            let used = counting(&copies).map_or(SUPERBLOCK_OFFSETS[0], |used| copies[used].0);
            return Ok((sb, used));
        }
        Err(
            error @ (VolumeError::Io { .. }
            | VolumeError::Unfinished
            | VolumeError::Version { .. }
            | VolumeError::Features { .. }),
        ) => {
            return Err(error);
        }
        Err(error @ VolumeError::Truncated { .. }) => return Err(error),
        Err(error) => error,
    };
    let found = last_copy(&**dev, SEARCHED);
    let is_volume = |sb: &Superblock| home_map(dev, &sb.geometry()).iter().any(Result::is_ok);
    found.filter(is_volume).map(|sb| (sb.clone(), sb.size - BLOCK)).ok_or(error)
}

/// The last copy, where the front does not say how long the volume is: in the device's last block,
/// or before at most `behind` bytes that are behind the volume's end. A copy says itself where it
/// belongs, so one in a file's contents is not taken for it.
fn last_copy(dev: &dyn BlockDevice, behind: u64) -> Option<Superblock> {
    let own = |offset: u64, block: &[u8]| {
        let sb = Superblock::decode(block).ok()?;
        (sb.offsets().get(SUPERBLOCK_OFFSETS.len()) == Some(&offset)).then_some(sb)
    };
    let last = dev.capacity().checked_sub(BLOCK)?;
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    if dev.read(last, &mut block).is_ok()
        && let Some(sb) = own(last, &block)
    {
        return Some(sb);
    }
    let (mut end, mut left) = (dev.capacity(), behind);
    while end > 0 && left > 0 {
        let start = (end - 1) / CHUNK_BYTES * CHUNK_BYTES;
        if dev.next_data(start) < end {
            left = left.saturating_sub(end - start);
            let mut buf = AlignedBuf::zeroed((end - start) as usize);
            let read = dev.read(start, &mut buf).is_ok();
            for (i, block) in buf.chunks_exact(BLOCK_SIZE).enumerate().rev().filter(|_| read) {
                if let Some(sb) = own(start + i as u64 * BLOCK, block) {
                    return Some(sb);
                }
            }
        }
        end = start;
    }
    None
}

/// Whether a block may be what a crash left of a copy that was being written, when the log grew:
/// each sector is the old one or the new one.
pub fn may_be_torn(block: &[u8], sb: &Superblock) -> bool {
    block[..8] == MAGIC
        && block[32..48] == sb.volume_id
        && block[FIELDS_LEN..CRC_AT].iter().all(|byte| *byte == 0)
}

/// Writes all copies, one after the other: a crash leaves the old ones, or the new one first. Those
/// in front must be written; without the last one the volume works.
pub(crate) fn write_superblock(dev: &dyn BlockDevice, sb: &Superblock) -> std::io::Result<()> {
    write_copies(dev, sb, &sb.offsets())
}

fn write_copies(dev: &dyn BlockDevice, sb: &Superblock, offsets: &[u64]) -> std::io::Result<()> {
    for offset in offsets {
        match dev.write(*offset, &sb.encode()).and_then(|()| dev.flush()) {
            Err(error) if !SUPERBLOCK_OFFSETS.contains(offset) => {
                tracing::warn!(offset, %error, "the last copy of the superblock cannot be written");
            }
            written => written?,
        }
    }
    Ok(())
}

/// The same where the volume's end moves. A crash leaves the old size or the new one: the new last
/// copy is written first, and the old one becomes a copy of the new superblock, which is none where
/// it lies. So no copy is left that says the old size, on a device that stays longer than the
/// volume.
pub(crate) fn write_resized(
    dev: &dyn BlockDevice,
    old: &Superblock,
    new: &Superblock,
) -> std::io::Result<()> {
    let mut offsets: Vec<u64> = new.offsets().into_iter().chain(old.offsets()).collect();
    offsets.retain(|offset| !SUPERBLOCK_OFFSETS.contains(offset));
    offsets.dedup();
    offsets.extend(SUPERBLOCK_OFFSETS);
    write_copies(dev, new, &offsets)
}

/// The volume, which nobody has open, is in a timeline of its own from now on.
pub(crate) fn write_timeline(dev: &Arc<dyn BlockDevice>, env: &Env) -> Result<(), VolumeError> {
    let sb = Superblock { timeline: random_16(env), ..read_superblock(dev)? };
    let what = "write the superblock";
    write_superblock(&**dev, &sb).map_err(|source| VolumeError::Io { what, source })
}

/// An id or a key.
pub(super) fn random_16(env: &Env) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    id[8..].copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    id
}

/// Takes away what would be taken for a volume, before another is made: copies in front, in the
/// last block of the volume that is to be, and one that an earlier volume has left in the device's
/// last block.
pub(super) fn clear_superblocks(dev: &dyn BlockDevice, sb: &Superblock) -> std::io::Result<()> {
    let zeros = AlignedBuf::zeroed(BLOCK_SIZE);
    let earlier = last_copy(dev, 0).map(|sb| sb.size - BLOCK);
    for offset in sb.offsets().into_iter().chain(earlier) {
        dev.write(offset, &zeros)?;
    }
    dev.flush()
}

/// Ends a move of the log or of the volume's end that a crash has interrupted: one copy counts, and
/// nothing else may be written before the other in front says the same. Also mends a copy that is
/// damaged for another reason.
pub(crate) fn settle_copies(dev: &Arc<dyn BlockDevice>) -> Result<(), VolumeError> {
    let undecided = || {
        let [first, second] = SUPERBLOCK_OFFSETS.map(|offset| read_copy(&**dev, offset));
        matches!((first, second), (Ok(first), Ok(second)) if first != second)
    };
    let copies = copies(&**dev);
    let Some(used) = counting(&copies).map(|used| copies[used].0) else { return Ok(()) };
    match rewrite_bad_copies(dev, used) {
        Ok(written) => {
            for offset in written {
                tracing::warn!(offset, "a superblock was not like its copy, and is written anew");
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
            layout: self.layout + 1,
            log_offset: self.segments_offset + u64::from(segment_count) * self.segment_len,
            log_len: u64::from(segments) * self.segment_len,
            segment_count,
            ..self.clone()
        }
    }
}

/// Makes all copies the same, byte for byte: as the one at `used`. Returns where one was written.
pub fn rewrite_bad_copies(dev: &Arc<dyn BlockDevice>, used: u64) -> Result<Vec<u64>, VolumeError> {
    let io = |what| move |source| VolumeError::Io { what, source };
    let mut good = AlignedBuf::zeroed(BLOCK_SIZE);
    dev.read(used, &mut good).map_err(io("read the superblock"))?;
    let Ok(sb) = Superblock::decode(&good) else { return Ok(Vec::new()) };
    let mut written = Vec::new();
    for offset in sb.offsets() {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        if dev.read(offset, &mut block).is_err() || block[..] != good[..] {
            dev.write(offset, &good)
                .and_then(|()| dev.flush())
                .map_err(io("write the superblock"))?;
            written.push(offset);
        }
    }
    Ok(written)
}

/// The most telling of the reasons.
fn refusal(dev: &Arc<dyn BlockDevice>, bad: Vec<Bad>) -> VolumeError {
    let telling = |b: &Bad| match b {
        Bad::Version(found) => Some(VolumeError::Version { found: *found }),
        Bad::Features(bits) => Some(VolumeError::Features { bits: *bits }),
        _ => None,
    };
    if let Some(error) = bad.iter().find_map(telling) {
        return error;
    }
    if let Some(sb) = last_copy(&**dev, 0) {
        return VolumeError::LastCopy { name: sb.name() };
    }
    let damaged =
        bad.iter().find_map(|b| if let Bad::Damaged(d) = b { Some(d.clone()) } else { None });
    match damaged {
        Some(detail) => VolumeError::Damaged { detail },
        None if bad.contains(&Bad::NoMagic) => VolumeError::Foreign,
        None if SUPERBLOCK_OFFSETS.iter().any(|offset| offset + BLOCK > dev.capacity()) => {
            VolumeError::TooShort
        }
        None => emptiness(&**dev),
    }
}

/// Where there is no superblock there may be something else: many formats begin with zeros, and a
/// volume may have lost its front. What is empty holds zeros in its last block, and in the first
/// [`LOOKED_AT`] bytes that are no hole.
fn emptiness(dev: &dyn BlockDevice) -> VolumeError {
    let is_zeros = |at: u64, len: u64| {
        let mut buf = AlignedBuf::zeroed(len as usize);
        dev.read(at, &mut buf).map(|()| buf.iter().all(|byte| *byte == 0))
    };
    let (mut at, mut left) = (0, LOOKED_AT);
    let mut zeros = is_zeros(dev.capacity() - BLOCK, BLOCK);
    while let Ok(true) = zeros {
        at = dev.next_data(at) / BLOCK * BLOCK;
        if at >= dev.capacity() || left == 0 {
            break;
        }
        let len = CHUNK_BYTES.min(dev.capacity() - at).min(left);
        zeros = is_zeros(at, len);
        (at, left) = (at + len, left - len);
    }
    match zeros {
        Err(source) => VolumeError::Io { what: "read the device", source },
        Ok(true) => VolumeError::Empty,
        Ok(false) => VolumeError::Foreign,
    }
}
