//! Makes a journal on a device of its own, without a file system above it.

use ferry_device::BLOCK_SIZE;
use ferry_journal::{Geometry, JournalClient, JournalError, Seq};
use parking_lot::Mutex;

/// The layout of a device with a log of this size and this many segments of this length.
pub(crate) fn geometry(
    volume_id: [u8; 16],
    log_len: u64,
    (segment_count, segment_len): (u32, u64),
) -> Geometry {
    let (block, home_map_len) = (BLOCK_SIZE as u64, 2 * BLOCK_SIZE as u64);
    let home_map_offset = block + log_len;
    Geometry {
        volume_id,
        hash_key: [7; 16],
        log_offset: block,
        log_len,
        home_map_offsets: [home_map_offset, home_map_offset + home_map_len],
        home_map_len,
        segments_offset: (home_map_offset + 2 * home_map_len).next_multiple_of(segment_len),
        segment_len,
        segment_count,
    }
}

/// Gives the home store its segments.
pub(crate) struct Owner(Mutex<Vec<u32>>);

impl Owner {
    /// Segments that are free.
    pub(crate) fn of(segments: impl Iterator<Item = u32>) -> Self {
        Self(Mutex::new(segments.collect()))
    }
}

impl JournalClient for Owner {
    fn durable_point(&self, _seq: Seq) {}
    fn failed(&self, _error: &JournalError) {}
    fn take_home_segment(&self) -> Option<u32> {
        self.0.lock().pop()
    }
    fn release_home_segments(&self, segments: &[u32]) {
        self.0.lock().extend(segments);
    }
}
