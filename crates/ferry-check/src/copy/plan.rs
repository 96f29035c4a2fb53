//! Which ranges of its device a volume needs.

use super::types::CopyError;
use crate::inspect::{Inspector, SegmentUse};
use ferry_fs::keys::BLOCK;
use ferry_journal::inspect::{log_end, log_extents, log_start};
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of a device in bytes, whole blocks, ascending; none touches another.
pub(super) struct Plan {
    ranges: Vec<Range<u64>>,
    /// What is written over in place, and must never want space.
    fixed: Vec<Range<u64>>,
    /// The log and the segments with data: what of them no file uses may be zeros in a copy, ...
    spare: Vec<Range<u64>>,
    /// ... but not these: recovery reads them.
    recovered: Vec<Range<u64>>,
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
        let (mut fixed, mut spare) = (vec![log.clone()], vec![log]);
        inspector.segments(&mut |segment| {
            let filled = match segment.used {
                SegmentUse::Free => return true,
                SegmentUse::Data(record) => {
                    (u64::from(record.filled) * BLOCK).min(geometry.segment_len)
                }
                SegmentUse::Home | SegmentUse::Unknown => geometry.segment_len,
            };
            let range = segment.offset..segment.offset + filled;
            match segment.used {
                SegmentUse::Home => fixed.push(range.clone()),
                SegmentUse::Data(_) => spare.push(range.clone()),
                SegmentUse::Free | SegmentUse::Unknown => {}
            }
            ranges.push(range);
            true
        })?;
        let named = named_by_log(inspector)?;
        ranges.extend(named.iter().cloned());
        let ranges = merged(ranges);
        let recovered = merged([named, used_log(inspector)?].concat());
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        Ok(Self { ranges, fixed: merged(fixed), spare: merged(spare), recovered, bytes })
    }

    /// What is to be copied, ascending.
    pub(super) fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// The log and the home store.
    pub(super) fn fixed(&self) -> &[Range<u64>] {
        &self.fixed
    }

    /// Whether nothing but a file could need the block at this byte of the device.
    pub(super) fn is_spare(&self, offset: u64) -> bool {
        let within = |ranges: &[Range<u64>]| {
            let at = ranges.partition_point(|range| range.end <= offset);
            ranges.get(at).is_some_and(|range| range.contains(&offset))
        };
        within(&self.spare) && !within(&self.recovered)
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

/// The part of the log that recovery reads.
fn used_log(inspector: &Inspector) -> Result<Vec<Range<u64>>, CopyError> {
    let geometry = inspector.superblock().geometry();
    let start = log_start(inspector.device(), &geometry)?;
    let end = log_end(inspector.device(), &geometry, &start)?;
    let (offset, blocks) = (geometry.log_offset, geometry.log_len / BLOCK);
    let block = |position: u64| offset + position % blocks * BLOCK;
    let (first, behind) = (block(start.position), block(end.position));
    let whole = offset..offset + geometry.log_len;
    Ok(match end.position - start.position {
        0 => Vec::new(),
        used if used >= blocks => std::iter::once(whole).collect(),
        _ if first < behind => std::iter::once(first..behind).collect(),
        _ => vec![first..whole.end, whole.start..behind],
    })
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
        let plan = Plan {
            ranges: vec![10..20, 30..40],
            fixed: Vec::new(),
            spare: std::iter::once(10..20).collect(),
            recovered: std::iter::once(12..14).collect(),
            bytes: 20,
        };
        let before = [0, 10, 15, 25, 31, 99].map(|end| plan.bytes_before(end));
        assert_eq!(before, [0, 0, 5, 10, 11, 20]);
        let spare = [9, 10, 11, 12, 14, 19, 20, 30].map(|at| plan.is_spare(at));
        assert_eq!(spare, [false, true, true, false, true, true, false, false]);
    }
}
