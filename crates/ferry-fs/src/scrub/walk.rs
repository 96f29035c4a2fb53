//! The way through a volume: superblocks, log, home store, then all keys and the blocks that they
//! name.

use crate::api::Ino;
use crate::error::FsError;
use crate::keys::{self, BLOCK, Extent, Key, Segment};
use crate::scrub::decode::{Decoded, decode};
use crate::scrub::pace::Pace;
use crate::scrub::report::{Damage, Location, Part, ScrubReport};
use crate::scrub::source::{ScrubProgress, Source, Watch};
use ferry_device::AlignedBuf;
use ferry_journal::{BadRange, Journal, Value};

const BLOCK_BYTES: usize = BLOCK as usize;
/// Blocks that are gathered before they are read: 4 MiB of memory for 512 MiB of data.
const WINDOW_BLOCKS: usize = 1 << 17;
/// Keys of one scan: the view that a scan holds keeps pages of the home store from being reused.
const WINDOW_KEYS: u64 = 1 << 16;
/// Blocks read at once.
const READ_BLOCKS: u64 = 256;
/// So many unused blocks between two used ones are read with them.
const GAP_BLOCKS: u64 = 4;
/// A block that is written anew, elsewhere, so often while the scrub looks at it is left to the
/// next scrub.
const CHASES_MAX: usize = 16;
/// What is said of a block that is not what was written.
const MISMATCH: &str = "the checksum does not match";

/// A block of a file.
#[derive(Clone, Copy)]
struct Block {
    /// On the device, in blocks.
    dev: u64,
    crc: u32,
    ino: Ino,
    /// In the file, in blocks.
    at: u64,
}

/// What came of a block that did not match at first.
enum Outcome {
    Good,
    Damaged(Block, String),
    /// The file no longer has it.
    Passed,
}

/// A scrub under way.
pub(crate) struct Walk<'w> {
    source: &'w Source<'w>,
    pace: Pace,
    watch: &'w mut dyn Watch,
    report: ScrubReport,
    total_bytes: u64,
    buffer: AlignedBuf,
}

impl<'w> Walk<'w> {
    pub(crate) fn new(source: &'w Source<'w>, pace: Pace, watch: &'w mut dyn Watch) -> Self {
        let stats = source.journal.stats();
        let home = stats.home_bytes + 2 * source.geometry.home_map_len;
        let total_bytes =
            source.live_bytes + stats.log_used_bytes + home + source.journal.stored_bytes();
        let buffer = AlignedBuf::zeroed(READ_BLOCKS as usize * BLOCK_BYTES);
        Self { source, pace, watch, report: ScrubReport::default(), total_bytes, buffer }
    }

    pub(crate) fn finish(mut self, complete: bool) -> ScrubReport {
        self.report.complete = complete;
        self.report.clean = self.report.damaged_blocks == 0;
        self.report
    }

    /// So many bytes were read: tells the caller, and waits as long as the rate asks for.
    fn step(&mut self, bytes: u64) -> bool {
        pause(&mut self.pace, &mut *self.watch, &self.report, self.total_bytes, bytes)
    }

    /// Both copies. `false`: stopped.
    pub(crate) fn superblocks(&mut self) -> bool {
        let copies = &self.source.superblocks;
        for (offset, copy) in copies {
            let what = match copy {
                Ok(copy) if copy.geometry() == self.source.geometry => {
                    self.report.verified.superblocks += 1;
                    continue;
                }
                Ok(_) => "it is of another volume",
                Err(what) => what.as_str(),
            };
            let device_offset = Some(*offset);
            let at = Location { length: Some(BLOCK), device_offset, ..Location::default() };
            self.report.add(Damage::new(Part::Superblock, what, at));
        }
        self.step(copies.len() as u64 * BLOCK)
    }

    /// Everything that recovery would read.
    pub(crate) fn log(&mut self) -> bool {
        let Self { source, pace, watch, report, total_bytes, .. } = self;
        let mut found = Vec::new();
        let go_on = source.journal.verify_log(&mut |bad| found.push(bad), &mut |bytes| {
            report.verified.log_bytes += bytes;
            pause(pace, &mut **watch, report, *total_bytes, bytes)
        });
        found.into_iter().for_each(|bad| self.report.add(damage_at(Part::Log, bad)));
        go_on
    }

    /// The home store's map and file.
    pub(crate) fn home(&mut self) -> bool {
        let Self { source, pace, watch, report, total_bytes, .. } = self;
        let mut found = Vec::new();
        let go_on = source.journal.verify_home(&mut |bad| found.push(bad), &mut |bytes| {
            report.verified.home_bytes += bytes;
            pause(pace, &mut **watch, report, *total_bytes, bytes)
        });
        found.into_iter().for_each(|bad| self.report.add(damage_at(Part::Home, bad)));
        go_on
    }

    /// All keys, and the blocks that they name.
    pub(crate) fn keys_and_data(&mut self) -> bool {
        let mut from = Some(Vec::new());
        while let Some(start) = from {
            let mut blocks = Vec::new();
            let before = self.report.verified.key_bytes;
            from = match self.gather(&start, &mut blocks) {
                Ok(next) => next,
                Err(error) => {
                    let what = format!(
                        "the keys from {} on cannot be read: {error}",
                        crate::scrub::decode::hex(&start)
                    );
                    self.report.add(Damage::new(Part::Keys, what, Location::default()));
                    None
                }
            };
            let bytes = self.report.verified.key_bytes - before;
            if !self.step(bytes) || !self.blocks(blocks) {
                return false;
            }
        }
        true
    }

    /// Scans from `start` until there is enough to read; where to go on, if there is more.
    fn gather(
        &mut self,
        start: &[u8],
        blocks: &mut Vec<Block>,
    ) -> Result<Option<Vec<u8>>, FsError> {
        let (mut next, mut keys) = (None, 0);
        let journal = self.source.journal;
        let mut visit = |key: &[u8], value: &Value| {
            self.report.verified.keys += 1;
            self.report.verified.key_bytes += (key.len() + value.len()) as u64;
            keys += 1;
            self.key(key, value, blocks);
            if blocks.len() >= WINDOW_BLOCKS || keys >= WINDOW_KEYS {
                next = Some([key, &[0]].concat());
            }
            next.is_none()
        };
        journal.scan(start, &[0xff; 32], &mut visit)?;
        Ok(next)
    }

    fn key(&mut self, key: &[u8], value: &[u8], blocks: &mut Vec<Block>) {
        match decode(key, value) {
            Ok(Decoded::Other) => {}
            Ok(Decoded::Data(ino, offset, first, crcs)) => {
                self.report.verified.extents += 1;
                if self.may_hold_data(first, crcs.len() as u64) {
                    let each = (first..).zip(offset / BLOCK..).zip(crcs);
                    blocks.extend(each.map(|((dev, at), crc)| Block { dev, crc, ino, at }));
                } else {
                    let what =
                        format!("the extent is said to be where no data can be, at block {first}");
                    let at = Location {
                        ino: Some(ino),
                        file_offset: Some(offset),
                        length: Some(crcs.len() as u64 * BLOCK),
                        ..Location::default()
                    };
                    self.report.add(Damage::new(Part::Keys, what, at));
                }
            }
            Err(bad) => {
                let (ino, file_offset) = (bad.ino, bad.file_offset);
                let at = Location { ino, file_offset, ..Location::default() };
                self.report.add(Damage::new(Part::Keys, bad.what, at));
            }
        }
    }

    fn may_hold_data(&self, first: u64, len: u64) -> bool {
        let geo = &self.source.geometry;
        let begin = geo.segments_offset / BLOCK;
        // What was read of the keys may be older than a change of the volume's size, or newer.
        let segments = geo.segment_count.max((self.source.segments)());
        let end = begin + geo.segment_len / BLOCK * u64::from(segments);
        first >= begin && first.checked_add(len).is_some_and(|last| last <= end)
    }

    /// Reads blocks, in the order of the device and as many at once as stand together.
    fn blocks(&mut self, mut blocks: Vec<Block>) -> bool {
        blocks.sort_unstable_by_key(|block| block.dev);
        let mut rest = &blocks[..];
        while let Some(first) = rest.first().map(|block| block.dev) {
            let together = rest.windows(2).take_while(|pair| {
                pair[1].dev - pair[0].dev <= 1 + GAP_BLOCKS && pair[1].dev - first < READ_BLOCKS
            });
            let (now, later) = rest.split_at(1 + together.count());
            if !self.read(now) {
                return false;
            }
            rest = later;
        }
        true
    }

    /// Reads blocks that stand together.
    fn read(&mut self, blocks: &[Block]) -> bool {
        let (first, last) = (blocks[0].dev, blocks[blocks.len() - 1].dev);
        let bytes = (last - first + 1) as usize * BLOCK_BYTES;
        self.buffer.set_len(bytes);
        let read = self.source.device.read(first * BLOCK, &mut self.buffer).is_ok();
        for block in blocks {
            let at = (block.dev - first) as usize * BLOCK_BYTES;
            if !(read && crc32c::crc32c(&self.buffer[at..at + BLOCK_BYTES]) == block.crc) {
                match self.look_again(*block) {
                    Outcome::Good => {}
                    Outcome::Passed => {
                        self.report.passed_blocks += 1;
                        continue;
                    }
                    Outcome::Damaged(block, what) => {
                        let at = Location {
                            ino: Some(block.ino),
                            path: None,
                            file_offset: Some(block.at * BLOCK),
                            length: Some(BLOCK),
                            device_offset: Some(block.dev * BLOCK),
                        };
                        self.report.add(Damage::new(Part::Data, what, at));
                        continue;
                    }
                }
            }
            self.report.verified.data_bytes += BLOCK;
        }
        self.step(bytes as u64)
    }

    /// Reads one block alone, where the file has it by now. It is damaged if that is the same place
    /// before and after.
    fn look_again(&self, mut block: Block) -> Outcome {
        let mut one = AlignedBuf::zeroed(BLOCK_BYTES);
        let mut known = false;
        for _ in 0..CHASES_MAX {
            (self.source.settled)(block.dev);
            let what = match self.source.device.read(block.dev * BLOCK, &mut one) {
                Ok(()) if crc32c::crc32c(&one) == block.crc => return Outcome::Good,
                Ok(()) => MISMATCH.to_owned(),
                Err(error) => format!("the device cannot read it: {error}"),
            };
            let wanted = |bytes: &[u8]| crc32c::crc32c(bytes) == block.crc;
            if self.source.device.read_matching(block.dev * BLOCK, &mut one, &wanted) {
                return Outcome::Good;
            }
            match location_of(self.source.journal, block.ino, block.at) {
                Err(error) => return Outcome::Damaged(block, format!("{what}; {error}")),
                Ok(None) => return Outcome::Passed,
                Ok(Some(stored)) if stored == (block.dev, block.crc) && known => {
                    return Outcome::Damaged(block, what);
                }
                Ok(Some((dev, crc))) if self.may_hold_data(dev, 1) => {
                    block = Block { dev, crc, ..block };
                    known = true;
                }
                Ok(Some(_)) => return Outcome::Passed,
            }
        }
        Outcome::Passed
    }
}

/// Tells the caller how far it is, and waits as long as the rate asks for; `false`: it is to
/// end.
fn pause(
    pace: &mut Pace,
    watch: &mut dyn Watch,
    report: &ScrubReport,
    total_bytes: u64,
    bytes: u64,
) -> bool {
    let done_bytes = report.verified.bytes();
    let at = ScrubProgress {
        done_bytes,
        total_bytes: total_bytes.max(done_bytes),
        damaged_blocks: report.damaged_blocks,
    };
    watch.progress(&at) && pace.took(bytes).is_none_or(|time| watch.wait(time))
}

fn damage_at(part: Part, bad: BadRange) -> Damage {
    let (length, device_offset) = (Some(bad.len), Some(bad.offset));
    let at = Location { length, device_offset, ..Location::default() };
    Damage::new(part, format!("{}: {}", bad.what, bad.detail), at)
}

/// Where block `at` of a file is now: device block and checksum.
fn location_of(journal: &Journal, ino: Ino, at: u64) -> Result<Option<(u64, u32)>, FsError> {
    // The longest extent that may hold it begins so far before it.
    let from = at.saturating_sub(keys::EXTENT_BLOCKS_MAX as u64 - 1) * BLOCK;
    let mut found = None;
    journal.scan(
        &keys::extent(ino, from),
        &keys::extent(ino, at * BLOCK + 1),
        &mut |key, value| {
            found = match (keys::parse(key), Extent::decode(value)) {
                (Some(Key::Extent(_, offset)), Ok(Extent::Data { block, crcs })) => {
                    let inside = at - offset / BLOCK;
                    crcs.get(inside as usize).map(|crc| (block + inside, *crc))
                }
                _ => None,
            };
            true
        },
    )?;
    Ok(found)
}

/// Bytes that extents refer to, as the segments' records count them.
pub(crate) fn live_bytes(journal: &Journal) -> Result<u64, FsError> {
    let mut blocks = 0;
    journal.scan(&keys::segment(0), &keys::segment_end(), &mut |_, value| {
        blocks += Segment::decode(value).map_or(0, |segment| u64::from(segment.live));
        true
    })?;
    Ok(blocks * BLOCK)
}
