//! Which ranges of its device a volume needs.

use super::types::CopyError;
use crate::inspect::{Inspector, SegmentUse};
use ferry_fs::keys::BLOCK;
use ferry_journal::inspect::{log_extents, log_start};
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of a device in bytes, whole blocks, ascending; none touches another.
pub(super) struct Plan {
    ranges: Vec<Range<u64>>,
    /// What is written over in place, and must never want space.
    fixed: Vec<Range<u64>>,
    bytes: u64,
}

impl Plan {
    /// Of a volume that is open. Memory grows with the number of its segments.
    pub(super) fn new(inspector: &Inspector) -> Result<Self, CopyError> {
        let geometry = inspector.superblock().geometry();
        let log = geometry.log_offset..geometry.log_offset + geometry.log_len;
        let maps = geometry.home_map_offsets.map(|offset| offset..offset + geometry.home_map_len);
        let mut ranges = vec![log.clone()];
        ranges.extend(maps);
        let mut fixed = vec![log];
        inspector.segments(&mut |segment| {
            let filled = match segment.used {
                SegmentUse::Free => return true,
                SegmentUse::Data(record) => {
                    (u64::from(record.filled) * BLOCK).min(geometry.segment_len)
                }
                SegmentUse::Home | SegmentUse::Unknown => geometry.segment_len,
            };
            let range = segment.offset..segment.offset + filled;
            if segment.used == SegmentUse::Home {
                fixed.push(range.clone());
            }
            ranges.push(range);
            true
        })?;
        ranges.extend(named_by_log(inspector)?);
        let ranges = merged(ranges);
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        Ok(Self { ranges, fixed: merged(fixed), bytes })
    }

    /// What is to be copied, ascending.
    pub(super) fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// The log and the home store.
    pub(super) fn fixed(&self) -> &[Range<u64>] {
        &self.fixed
    }

    /// Bytes of all ranges.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of those parts that lie before a byte of the device.
    pub(super) fn bytes_before(&self, end: u64) -> u64 {
        let before = |range: &Range<u64>| range.end.min(end).saturating_sub(range.start);
        self.ranges.iter().map(before).sum()
    }
}

/// What contexts in the log name, as one range for each segment's length of the device. A later
/// context may have freed the segment.
fn named_by_log(inspector: &Inspector) -> Result<Vec<Range<u64>>, CopyError> {
    let geometry = inspector.superblock().geometry();
    let start = log_start(inspector.device(), &geometry)?;
    let segments = geometry.segments_offset..inspector.superblock().size - BLOCK;
    let mut named: BTreeMap<u64, Range<u64>> = BTreeMap::new();
    log_extents(inspector.device(), &geometry, &start, &mut |extent| {
        // A volume of a stranger may name anything: nothing but segments is read.
        let begin = (extent.start.min(segments.end) / BLOCK * BLOCK).max(segments.start);
        let end = extent.end.min(segments.end).next_multiple_of(BLOCK).max(begin);
        let range = named.entry(begin / geometry.segment_len).or_insert(begin..end);
        *range = range.start.min(begin)..range.end.max(end);
    })?;
    Ok(named.into_values().filter(|range| !range.is_empty()).collect())
}

/// The same bytes in ascending ranges that do not touch each other.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        debug_assert!(range.start.is_multiple_of(BLOCK), "a range is whole blocks");
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_ranges_ascend_and_do_not_touch() {
        let block = |range: Range<u64>| range.start * BLOCK..range.end * BLOCK;
        let ranges = [8..9, 0..2, 2..3, 5..5, 1..2, 8..10].map(block).to_vec();
        assert_eq!(merged(ranges), [block(0..3), block(8..10)]);
    }

    #[test]
    fn bytes_before_a_point_count_parts_of_ranges() {
        let plan = Plan { ranges: vec![10..20, 30..40], fixed: Vec::new(), bytes: 20 };
        let before = [0, 10, 15, 25, 31, 99].map(|end| plan.bytes_before(end));
        assert_eq!(before, [0, 0, 5, 10, 11, 20]);
    }
}
