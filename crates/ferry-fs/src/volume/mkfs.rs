//! Making a volume.

use crate::api::{ROOT, Timestamp};
use crate::credits::LARGEST_TRANSACTION;
use crate::keys::{self, Counters, InodeRecord};
use crate::volume::error::VolumeError;
use crate::volume::resize::SEGMENTS_MIN;
use crate::volume::superblock::{
    LAST_COPY, LOG_MAX, SEGMENT_SIZES, SUPERBLOCK_OFFSETS, Superblock, clear_superblocks,
    random_16, read_superblock, write_superblock,
};
use crate::volume::version::FORMAT_VERSION;
use ferry_device::{BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_journal::{
    Credits, Geometry, Journal, JournalClient, JournalError, JournalOptions, Seq, home_unit_bytes,
    smallest_log,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A smallest volume, in bytes.
pub const SIZE_MIN: u64 = 16 << 20;
const SEGMENT_DEFAULT_MAX: u64 = 8 << 20;
/// A smallest log, in bytes: every operation fits one of its transactions, or is done in several.
pub const LOG_MIN: u64 = smallest_log(&LARGEST_TRANSACTION);
const LOG_DEFAULT_MAX: u64 = 64 << 20;
/// A fresh home store gets so much, at least, in bytes: an empty database is a little longer than 1
/// MiB.
const HOME_INITIAL: u64 = (1 << 20) + (64 << 10);

/// What kind of volume to make.
#[derive(Clone, Debug, Default)]
pub struct MkfsOptions {
    /// Bytes; 0: all of the device.
    pub size: u64,
    /// Length of the log in bytes; by default a sixteenth of the volume, at most 64 MiB.
    pub log_size: Option<u64>,
    /// Length of a segment in bytes, a power of two; by default 8 MiB, less on a small volume.
    pub segment_size: Option<u64>,
    /// Overwrite whatever is there.
    pub force: bool,
    /// A name for people, up to 64 bytes.
    pub label: String,
    /// The root directory's owner.
    pub uid: u32,
    /// The root directory's group.
    pub gid: u32,
}

/// Makes a volume on `dev`. The superblocks are written last: a volume that is half made is no
/// volume.
pub fn mkfs(
    dev: &Arc<dyn BlockDevice>,
    options: &MkfsOptions,
    env: &Env,
) -> Result<Superblock, VolumeError> {
    let sb = plan(dev.capacity(), options, env)?;
    if !options.force {
        refuse_content(dev)?;
    }
    let io = |what| move |source| VolumeError::Io { what, source };
    clear_superblocks(&**dev, &sb).map_err(io("clear the old superblock"))?;
    dev.discard(sb.segments_offset, sb.size - sb.segments_offset)
        .map_err(io("discard the old contents"))?;

    let geometry = sb.geometry();
    let home_segments: Vec<u32> =
        (0..HOME_INITIAL.div_ceil(home_unit_bytes(sb.segment_len)) as u32).collect();
    for segment in &home_segments {
        let at = sb.segments_offset + u64::from(*segment) * sb.segment_len;
        dev.allocate(at, sb.segment_len).map_err(io("take space from the host"))?;
    }
    Journal::format(dev, &geometry, &home_segments, env)?;
    write_root(dev, &geometry, home_segments.len() as u32, options, env)?;

    write_superblock(&**dev, &sb).map_err(io("write the superblock"))?;
    Ok(sb)
}

/// Whether [`mkfs`] would take these options on a device of so many bytes: to be asked before a
/// file gets that size, and loses what it had.
pub fn check_options(capacity: u64, options: &MkfsOptions, env: &Env) -> Result<(), VolumeError> {
    plan(capacity, options, env).map(drop)
}

/// Where the segments of such a volume are: the first byte of the first one, and the length of
/// each.
pub fn segments_of(
    capacity: u64,
    options: &MkfsOptions,
    env: &Env,
) -> Result<(u64, u64), VolumeError> {
    plan(capacity, options, env).map(|sb| (sb.segments_offset, sb.segment_len))
}

/// Where everything goes.
fn plan(capacity: u64, options: &MkfsOptions, env: &Env) -> Result<Superblock, VolumeError> {
    let bad = |text: String| Err(VolumeError::Option(text));
    let size = if options.size == 0 { capacity } else { options.size };
    let size = size - size % BLOCK_SIZE as u64;
    if size > capacity {
        return bad(format!(
            "a volume of {size} bytes does not fit into the {capacity} bytes that are there"
        ));
    }
    if size < SIZE_MIN {
        return bad(format!("a volume needs at least {} MiB", SIZE_MIN >> 20));
    }
    if options.label.len() > 64 || options.label.contains('\0') {
        return bad("a label is up to 64 bytes without NUL".into());
    }
    let floor = 1_u64 << (size / 64).ilog2();
    let segment_len =
        options.segment_size.unwrap_or(floor.clamp(*SEGMENT_SIZES.start(), SEGMENT_DEFAULT_MAX));
    if !segment_len.is_power_of_two() || !SEGMENT_SIZES.contains(&segment_len) {
        return bad(format!(
            "a segment is a power of two between {} bytes and 1 GiB",
            SEGMENT_SIZES.start()
        ));
    }
    let log_len = options.log_size.unwrap_or((size / 16).clamp(LOG_MIN, LOG_DEFAULT_MAX));
    let log_len = log_len.next_multiple_of(BLOCK_SIZE as u64);
    let log_max = LOG_MAX.min(size / 4);
    if log_len < LOG_MIN || log_len > log_max {
        return bad(format!(
            "a log of this volume has between {} and {} KiB",
            LOG_MIN >> 10,
            log_max >> 10
        ));
    }
    let most_segments = size / segment_len;
    let home_map_len = BLOCK_SIZE as u64 + (4 * most_segments).next_multiple_of(BLOCK_SIZE as u64);
    let first_map = SUPERBLOCK_OFFSETS[1] + BLOCK_SIZE as u64;
    let log_offset = (first_map + home_map_len).next_multiple_of(64 << 10);
    let second_map = log_offset + log_len;
    let segments_offset = (second_map + home_map_len).next_multiple_of(64 << 10);
    // The last block is the superblock's.
    let segment_count = size.saturating_sub(segments_offset + BLOCK_SIZE as u64) / segment_len;
    if segment_count < u64::from(SEGMENTS_MIN) {
        return bad(format!(
            "{size} bytes are too few for segments of {segment_len} and a log of {log_len}"
        ));
    }
    let Ok(segment_count) = u32::try_from(segment_count) else {
        return bad(format!("{segment_count} segments are too many: choose larger ones"));
    };
    Ok(Superblock {
        version: FORMAT_VERSION,
        compatible: LAST_COPY,
        incompatible: 0,
        volume_id: random_16(env),
        hash_key: random_16(env),
        size,
        created_secs: env.clock.wall().as_secs(),
        label: options.label.clone(),
        timeline: [0; 16],
        layout: 0,
        log_offset,
        log_len,
        home_map_offsets: [first_map, second_map],
        home_map_len,
        segments_offset,
        segment_len,
        segment_count,
    })
}

/// Only what is empty is overwritten without being asked to.
fn refuse_content(dev: &Arc<dyn BlockDevice>) -> Result<(), VolumeError> {
    match read_superblock(dev) {
        Ok(sb) => Err(VolumeError::Exists { label: sb.name() }),
        Err(VolumeError::Empty) => Ok(()),
        Err(error @ (VolumeError::Io { .. } | VolumeError::Foreign | VolumeError::Unfinished)) => {
            Err(error)
        }
        Err(error) => Err(VolumeError::Exists { label: error.to_string() }),
    }
}

/// The root directory and the counters, through the journal as any other change.
fn write_root(
    dev: &Arc<dyn BlockDevice>,
    geometry: &Geometry,
    next_segment: u32,
    options: &MkfsOptions,
    env: &Env,
) -> Result<(), VolumeError> {
    let client =
        Arc::new(Maker { next: AtomicU32::new(next_segment), count: geometry.segment_count });
    let journal_options = JournalOptions { read_only: false, ..JournalOptions::offline(1 << 20) };
    let (journal, _) = Journal::open(dev.clone(), *geometry, journal_options, env.clone(), client)?;
    let now = Timestamp(env.clock.wall().as_nanos() as i128);
    let root = InodeRecord {
        mode: libc::S_IFDIR | 0o755,
        uid: options.uid,
        gid: options.gid,
        nlink: 2,
        parent: ROOT,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        ..InodeRecord::default()
    };
    let mut txn = journal.begin(Credits { keys: 2, bytes: 512, urgent: false })?;
    txn.put(&keys::inode(ROOT), &root.encode());
    txn.put(&keys::counters(), &Counters { next_ino: keys::INO_FIRST, inodes: 1 }.encode());
    txn.commit();
    journal.close()?;
    Ok(())
}

/// The journal's owner while the volume is made: hands out segments in order.
struct Maker {
    next: AtomicU32,
    count: u32,
}

impl JournalClient for Maker {
    fn durable_point(&self, _seq: Seq) {}
    fn failed(&self, _error: &JournalError) {}
    fn take_home_segment(&self) -> Option<u32> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        (next < self.count).then_some(next)
    }
    fn release_home_segments(&self, _segments: &[u32]) {}
}
