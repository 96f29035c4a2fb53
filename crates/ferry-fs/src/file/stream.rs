//! Sequential reads of one open file, on a device that wants to know what comes next.
//!
//! The page cache's own read-ahead (`ahead.rs`) has one thread, which reads the next few MiB. A
//! device whose requests take long, as an object store, needs many at a time: it is told what will
//! be read, further ahead the longer the reader goes on, and fetches that beside all readers.
//! Nothing enters the page cache by this.

use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::store::ahead_jobs::Job;
use crate::store::data_store::DataStore;
use crate::store::fetch::missing;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// The first time so many bytes are read ahead, and each time twice as many.
const WINDOW_MIN: u64 = 128 << 10;
/// A kernel splits its read-ahead into a few requests, which arrive in any order: reads that are
/// apart by no more than so many times their length are one sequence.
const NEAR_READS: u64 = 4;

/// Where the reads of an open file got.
#[derive(Default)]
pub(crate) struct Stream(Mutex<Position>);

#[derive(Default)]
struct Position {
    /// The end of the reads, in bytes.
    end: u64,
    /// How far the device has been told.
    told: u64,
    /// By how much it was told ahead; 0: nothing was sequential yet.
    window: u64,
    /// There was a read.
    begun: bool,
}

impl Position {
    /// Notes a read; returns what the device should be told. `most`: it is told so far ahead.
    fn read(&mut self, offset: u64, len: u64, most: u64) -> Option<Range<u64>> {
        let (near, end) = (len.saturating_mul(NEAR_READS), offset.saturating_add(len));
        let follows = offset <= self.end.saturating_add(near)
            && offset.saturating_add(near) >= self.end
            && self.begun;
        if !follows {
            *self = Self { end, told: end, window: 0, begun: true };
            return None;
        }
        if end <= self.end {
            return None;
        }
        self.end = end;
        if self.told > end + self.window / 2 {
            return None;
        }
        self.window = (2 * self.window).max(WINDOW_MIN).min(most);
        let range = self.told.max(end)..end.saturating_add(self.window);
        self.told = range.end;
        Some(range)
    }
}

impl DataStore {
    /// Notes a read of an open file that begins now. The device is told what the next ones will
    /// read.
    pub(crate) fn note_read(&self, stream: &Stream, inode: &Arc<Inode>, offset: u64, len: usize) {
        let most = self.dev.read_ahead_bytes();
        if most == 0 {
            return;
        }
        let range = stream.0.lock().read(offset, len as u64, most);
        let Some(range) = range else { return };
        if self.options.background {
            self.ahead.push(inode, Job::Tell(range));
        } else {
            self.tell_device(inode, range);
        }
    }

    /// Tells the device that a range of a file will be read. What is in memory is left out.
    pub(crate) fn tell_device(&self, inode: &Arc<Inode>, bytes: Range<u64>) {
        let size = inode.state.share().rec.size;
        let blocks = bytes.start / BLOCK..bytes.end.min(size).div_ceil(BLOCK);
        if let Err(error) = self.tell_blocks(inode, blocks) {
            tracing::debug!(inode = inode.ino, %error, "the device is not told what comes");
        }
    }

    fn tell_blocks(&self, inode: &Arc<Inode>, blocks: Range<u64>) -> Result<(), FsError> {
        // Blocks of the device that stand together.
        let mut next: Range<u64> = 0..0;
        let tell = |range: &Range<u64>| {
            if !range.is_empty() {
                self.dev.read_ahead(range.start * BLOCK, (range.end - range.start) * BLOCK);
            }
        };
        self.look_by_window(inode, blocks, missing, |runs| {
            for run in runs {
                let end = run.dev + run.crcs.len() as u64;
                if run.dev == next.end {
                    next.end = end;
                } else {
                    tell(&next);
                    next = run.dev..end;
                }
            }
        })?;
        tell(&next);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Reads so many ranges one after the other; what the device is told.
    fn told(position: &mut Position, reads: impl Iterator<Item = (u64, u64)>) -> Vec<Range<u64>> {
        reads.filter_map(|(offset, len)| position.read(offset, len, 32 * MIB)).collect()
    }

    #[test]
    fn the_longer_it_is_sequential_the_further_is_told_and_each_byte_once() {
        let mut position = Position::default();
        let told = told(&mut position, (0..2000).map(|n| (n * (128 << 10), 128 << 10)));
        assert_eq!(told[0], 256 << 10..384 << 10, "from the second read on");
        assert!(told.windows(2).all(|pair| pair[0].end == pair[1].start));
        let ahead: Vec<u64> = told.iter().map(|range| range.end - range.start).collect();
        assert!(ahead.iter().all(|len| *len <= 32 * MIB), "{ahead:?}");
        let end = position.end;
        assert!(position.told > end + 15 * MIB && position.told <= end + 32 * MIB);
        assert!(told.len() < 40, "{}", told.len());
    }

    #[test]
    fn requests_of_one_read_ahead_in_any_order_are_a_sequence() {
        let mut position = Position::default();
        let pairs = (0..50).flat_map(|n| [((2 * n + 1) * MIB, MIB), (2 * n * MIB, MIB)]);
        assert!(told(&mut position, pairs).len() > 10);
        assert_eq!(position.window, 32 * MIB);
    }

    #[test]
    fn a_random_reader_costs_nothing_and_a_jump_begins_anew() {
        let mut position = Position::default();
        let random = (0..1000).map(|n| (n * 7919 % 1000 * MIB, 64 << 10));
        assert_eq!(told(&mut position, random), []);
        let backwards = (0..1000).rev().map(|n| (n * MIB, MIB));
        assert_eq!(told(&mut position, backwards), []);
        assert!(!told(&mut position, (500..600).map(|n| (n * MIB, MIB))).is_empty());
        assert_eq!(position.read(9000 * MIB, MIB, 32 * MIB), None);
        let next = 9002 * MIB..9002 * MIB + WINDOW_MIN;
        assert_eq!(position.read(9001 * MIB, MIB, 32 * MIB), Some(next));
    }
}
