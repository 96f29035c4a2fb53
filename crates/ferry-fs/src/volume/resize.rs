//! Where the parts of a volume are when it has another size.
//!
//! What is in front of the segments stays. The log, if it lies behind the segments, moves with the
//! end of the volume. So do the slots of the home map; and if those in front are too short for the
//! segments that there will be, longer ones are made behind the segments.

use crate::volume::superblock::{BLOCK, LAST_COPY, LOG_BEHIND, MAP_BEHIND, Superblock};

/// Bytes between the slots of the home map: no range of damage up to this has both.
const APART: u64 = 512 << 10;
/// Fewest segments of a volume.
pub(crate) const SEGMENTS_MIN: u32 = 16;

/// Why a volume cannot have a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// What moves would lie over what has to stay until then. It may have this size, or more.
    AtLeast(u64),
    /// The same; it may have this size, or less.
    AtMost(u64),
    /// It would have too few segments, or more than can be counted.
    Segments,
}

impl Superblock {
    /// First byte behind the segments.
    pub(crate) fn segments_end(&self) -> u64 {
        self.segments_offset + u64::from(self.segment_count) * self.segment_len
    }

    /// Bytes of what lies behind the segments, but for the last copy, where the slots have this
    /// length.
    fn tail_len(&self, map_behind: bool, map_len: u64) -> u64 {
        let log = if self.has(LOG_BEHIND) { self.log_len } else { 0 };
        if map_behind { 2 * map_len + log.max(APART) } else { log }
    }

    /// Bytes of the smallest volume with so many segments, no more than there are.
    pub(crate) fn size_with(&self, segments: u32) -> u64 {
        let tail = self.tail_len(self.has(MAP_BEHIND), self.home_map_len);
        let data = u64::from(segments) * self.segment_len;
        self.segments_offset + data + tail + self.last_len()
    }

    /// Where everything is in a volume of `size` bytes; `None`: its segments are too few or too
    /// many.
    fn laid_out(&self, size: u64) -> Option<Self> {
        let room = size.checked_sub(self.last_len())?;
        let span = room.checked_sub(self.segments_offset)?;
        let most = span / self.segment_len;
        let need = |bytes: u64| BLOCK + (bytes * most).next_multiple_of(BLOCK);
        let longer = need(4) > self.home_map_len;
        let map_behind = longer || self.has(MAP_BEHIND);
        // With room for as many segments again, so that they do not move each time.
        let map_len = if longer { need(8) } else { self.home_map_len };
        let data = span.checked_sub(self.tail_len(map_behind, map_len))?;
        let segment_count = u32::try_from(data / self.segment_len).ok()?;
        let segments_end = self.segments_offset + u64::from(segment_count) * self.segment_len;
        let log_offset = match self.has(LOG_BEHIND) {
            true => segments_end + if map_behind { map_len } else { 0 },
            false => self.log_offset,
        };
        let home_map_offsets = match map_behind {
            true => [segments_end, room - map_len],
            false => self.home_map_offsets,
        };
        (segment_count >= SEGMENTS_MIN).then(|| Self {
            incompatible: self.incompatible | if map_behind { MAP_BEHIND } else { 0 },
            size,
            layout: self.layout + 1,
            segment_count,
            log_offset,
            home_map_offsets,
            home_map_len: map_len,
            ..self.clone()
        })
    }

    /// Whether it has all that a volume has which is made now.
    pub fn is_newest(&self) -> bool {
        self.has_last_copy()
    }

    /// As it is with all that, on a device that can have `most` bytes; with as many segments as
    /// before, if that is possible. `None`: what lies behind the segments would be in the way.
    pub(crate) fn upgraded(&self, most: u64) -> Option<Self> {
        let newest = Self { compatible: self.compatible | LAST_COPY, ..self.clone() };
        let sizes = [self.size, self.size + BLOCK].into_iter().filter(|size| *size <= most);
        let possible: Vec<Self> = sizes.filter_map(|size| newest.resized(size).ok()).collect();
        let as_many = possible.iter().find(|new| new.segment_count >= self.segment_count);
        as_many.or(possible.first()).cloned()
    }

    /// As it is with `size` bytes, whole blocks. What moves lies over nothing that is there.
    pub(crate) fn resized(&self, size: u64) -> Result<Self, Unfit> {
        let moves = |new: &Self| {
            (new.log_offset, new.home_map_offsets) != (self.log_offset, self.home_map_offsets)
        };
        let free = |new: &Self| {
            !moves(new)
                || if size > self.size {
                    new.segments_end() >= self.size
                } else {
                    new.size <= self.segments_end()
                }
        };
        let new = self.laid_out(size).ok_or(Unfit::Segments)?;
        if free(&new) {
            return Ok(new);
        }
        if size < self.size {
            return Err(Unfit::AtMost(self.segments_end()));
        }
        let mut larger = size;
        loop {
            larger += self.segment_len;
            match self.laid_out(larger) {
                None => return Err(Unfit::Segments),
                Some(new) if free(&new) => return Err(Unfit::AtLeast(larger)),
                Some(_) => {}
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests may unwrap")]
mod tests {
    use super::*;
    use crate::volume::{MkfsOptions, mkfs};
    use ferry_device::{BlockDevice, MemDevice};
    use ferry_env::Env;
    use std::sync::Arc;

    fn volume(size: u64) -> Superblock {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(size));
        mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap()
    }

    /// A superblock that a program takes.
    fn sound(sb: &Superblock) -> bool {
        Superblock::decode(&sb.encode()).as_ref() == Ok(sb)
    }

    #[test]
    fn a_volume_of_any_size_has_its_parts_in_order() {
        for start in [16 << 20, 100 << 20, 1 << 30] {
            let plain = volume(start);
            let log_behind = plain.with_log_behind(8);
            for sb in [plain, log_behind] {
                assert!(sound(&sb));
                let mut largest = 0;
                for doubled in 0..14 {
                    for size in [start << doubled, (start << doubled) + 12_288, start + 8192] {
                        match sb.resized(size) {
                            Ok(new) => {
                                assert!(sound(&new), "{new:?}");
                                assert!(new.segment_count >= sb.segment_count || size < start);
                                largest = largest.max(size / start);
                            }
                            Err(Unfit::AtLeast(more)) => {
                                assert!(more > size && sb.resized(more).is_ok());
                            }
                            Err(unfit) => panic!("{size}: {unfit:?}"),
                        }
                    }
                }
                assert!(largest >= 1 << 13, "{largest}");
            }
        }
    }

    #[test]
    fn slots_that_are_too_short_move_behind_the_segments() {
        let sb = volume(16 << 20);
        let within = sb.resized(128 << 20).unwrap();
        assert_eq!((within.incompatible, within.home_map_offsets), (0, sb.home_map_offsets));
        let beyond = sb.resized(1 << 30).unwrap();
        assert_eq!(beyond.incompatible, MAP_BEHIND);
        let [first, second] = beyond.home_map_offsets;
        assert!(first >= beyond.segments_end() && second >= first + beyond.home_map_len + APART);
        let again = beyond.resized(2 << 30).unwrap();
        assert!(again.home_map_len == beyond.home_map_len && again.segments_end() >= beyond.size);
    }

    /// As release 0.1.0 made it, with so many blocks behind everything.
    fn without_last_copy(sb: &Superblock, spare_blocks: u64) -> Superblock {
        let end = sb.segments_end().max(sb.log_offset + sb.log_len);
        let size = end + spare_blocks * BLOCK;
        Superblock { compatible: sb.compatible & !LAST_COPY, size, ..sb.clone() }
    }

    #[test]
    fn an_upgraded_volume_keeps_its_segments_if_there_is_a_block_for_the_last_copy() {
        let plain = volume(100 << 20);
        for sb in [plain.clone(), plain.with_log_behind(8)] {
            assert!(sb.is_newest());
            for spare in 0..3 {
                let old = without_last_copy(&sb, spare);
                assert!(sound(&old) && !old.is_newest());
                let new = old.upgraded(u64::MAX).unwrap();
                assert!(sound(&new) && new.is_newest() && new.layout > old.layout);
                assert_eq!(new.size, old.size + if spare == 0 { BLOCK } else { 0 });
                assert_eq!(new.geometry(), old.geometry());
            }
        }
        // On a device of one length a segment makes way, or nothing can.
        let full = without_last_copy(&plain, 0);
        let new = full.upgraded(full.size).unwrap();
        assert_eq!((new.size, new.segment_count), (full.size, full.segment_count - 1));
        let full = without_last_copy(&plain.with_log_behind(8), 0);
        assert_eq!(full.upgraded(full.size), None);
    }

    #[test]
    fn the_smallest_volume_with_some_segments_has_as_many() {
        for sb in [volume(100 << 20), volume(100 << 20).with_log_behind(8)] {
            for segments in SEGMENTS_MIN..sb.segment_count - 20 {
                let size = sb.size_with(segments);
                assert_eq!(sb.resized(size).unwrap().segment_count, segments);
                let less = sb.resized(size - BLOCK).map(|less| less.segment_count);
                assert!(less == Ok(segments - 1) || segments == SEGMENTS_MIN, "{less:?}");
            }
        }
    }
}
