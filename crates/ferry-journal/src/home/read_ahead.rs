//! Blocks read before they are asked for.
//!
//! * Where somebody goes through all keys in order, a branch of the tree names the pages that come
//!   next. They are read together, neighbours at once ([`Ahead`]).
//! * Keys that were made one after the other lie near each other. A program that lists a directory
//!   asks for one inode after the other, and the pages with these are neighbours, in about the same
//!   order. Where a second block is asked for near another, all around it is read
//!   ([`Neighbours`]).
//!
//! Blocks wait here as they were read. Only when the database asks for one of them is it held
//! against its checksum: so nothing that was written meanwhile is taken from here, and what is
//! damaged is read again in the ordinary way.

use crate::disk::Disk;
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Bytes that wait here, at most twice; no more are asked for at once.
const WAITING_MAX: usize = 8 << 20;
/// Longest read, in bytes. What is longer is not read ahead.
pub const READ_MAX: u64 = 1 << 20;
/// Bytes that nobody asked for are read, too, where that saves a read.
const GAP_MAX: u64 = 16 * BLOCK_SIZE as u64;
/// A read of neighbours: a range of the device that begins at a multiple of this.
const WINDOW: u64 = 128 << 10;
/// Neighbours that wait take so many bytes, at most twice.
const NEIGHBOURS_MAX: usize = 4 << 20;
/// So many windows of which one block was read are remembered.
const SEEN_MAX: usize = 32;

/// What was read ahead, by its offset on the device.
pub struct Ahead(Mutex<Waiting>);

/// Blocks around those that were asked for.
pub struct Neighbours(Mutex<Near>);

struct Near {
    waiting: Waiting,
    /// Windows of which one block was read, the oldest first.
    seen: VecDeque<u64>,
}

struct Waiting {
    /// Bytes of `newer`, and of `older`, at most.
    most: usize,
    newer: BTreeMap<u64, AlignedBuf>,
    newer_bytes: usize,
    /// Dropped when there is as much of newer ones.
    older: BTreeMap<u64, AlignedBuf>,
}

impl Default for Ahead {
    fn default() -> Self {
        Self(Mutex::new(Waiting::new(WAITING_MAX)))
    }
}

impl Default for Neighbours {
    fn default() -> Self {
        Self(Mutex::new(Near { waiting: Waiting::new(NEIGHBOURS_MAX), seen: VecDeque::new() }))
    }
}

impl Neighbours {
    /// Copies blocks that wait here, or reads them with all around them that lies in `within`, if
    /// that is the second read there. `false`: the caller has to read them.
    pub fn read(
        &self,
        disk: &Disk,
        offset: u64,
        out: &mut AlignedBuf,
        within: &Range<u64>,
    ) -> bool {
        let window = offset / WINDOW;
        let range = (window * WINDOW).max(within.start)..((window + 1) * WINDOW).min(within.end);
        if offset + out.len() as u64 > range.end {
            return false;
        }
        {
            let mut near = self.0.lock();
            if near.waiting.copy(offset, out) {
                return true;
            }
            if !near.is_second(window) {
                return false;
            }
        }
        let (start, mut chunk) = blank(range);
        if disk.read(start, &mut chunk).is_err() {
            return false;
        }
        let mut near = self.0.lock();
        near.waiting.add(start, chunk);
        near.waiting.copy(offset, out)
    }
}

impl Near {
    /// Whether the window was seen before; the next read there is then a first one.
    fn is_second(&mut self, window: u64) -> bool {
        if let Some(at) = self.seen.iter().position(|seen| *seen == window) {
            self.seen.remove(at);
            return true;
        }
        if self.seen.len() == SEEN_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(window);
        false
    }
}

impl Ahead {
    /// Copies blocks that wait here; `false` if not all of them do.
    pub fn copy(&self, offset: u64, out: &mut AlignedBuf) -> bool {
        self.0.lock().copy(offset, out)
    }

    /// Reads these ranges of the device. What cannot be read does not wait here.
    pub fn read(&self, disk: &Disk, mut wanted: Vec<Range<u64>>) {
        {
            let waiting = self.0.lock();
            let mut room = WAITING_MAX as u64;
            wanted.retain(|range| {
                let len = range.end - range.start;
                let new = len <= room && waiting.chunk(range.start, len as usize).is_none();
                room -= if new { len } else { 0 };
                new
            });
        }
        if wanted.is_empty() {
            return;
        }
        let mut reads = joined(wanted).into_iter().map(blank).collect::<Vec<_>>();
        let results = disk.read_many(&mut reads);
        let mut waiting = self.0.lock();
        for ((offset, chunk), result) in reads.into_iter().zip(results) {
            if result.is_ok() {
                waiting.add(offset, chunk);
            }
        }
    }
}

impl Waiting {
    fn new(most: usize) -> Self {
        Self { most, newer: BTreeMap::new(), newer_bytes: 0, older: BTreeMap::new() }
    }

    /// Copies blocks; `false` if not all of them are here.
    fn copy(&self, offset: u64, out: &mut AlignedBuf) -> bool {
        let Some((from, chunk)) = self.chunk(offset, out.len()) else { return false };
        let to = from + out.len();
        out.copy_from_slice(&chunk[from..to]);
        true
    }

    /// The buffer with these bytes, and where in it they begin.
    fn chunk(&self, offset: u64, len: usize) -> Option<(usize, &AlignedBuf)> {
        [&self.newer, &self.older].into_iter().find_map(|chunks| {
            let (begin, chunk) = chunks.range(..=offset).next_back()?;
            let from = (offset - begin) as usize;
            (from + len <= chunk.len()).then_some((from, chunk))
        })
    }

    fn add(&mut self, offset: u64, chunk: AlignedBuf) {
        if self.newer_bytes + chunk.len() > self.most {
            self.older = std::mem::take(&mut self.newer);
            self.newer_bytes = 0;
        }
        self.newer_bytes += chunk.len();
        if let Some(before) = self.newer.insert(offset, chunk) {
            self.newer_bytes -= before.len();
        }
    }
}

/// The same as few reads, ascending.
fn joined(mut wanted: Vec<Range<u64>>) -> Vec<Range<u64>> {
    wanted.sort_unstable_by_key(|range| range.start);
    let mut reads: Vec<Range<u64>> = Vec::new();
    for range in wanted {
        match reads.last_mut() {
            Some(last)
                if range.start <= last.end + GAP_MAX && range.end <= last.start + READ_MAX =>
            {
                last.end = last.end.max(range.end);
            }
            _ => reads.push(range),
        }
    }
    reads
}

fn blank(range: Range<u64>) -> (u64, AlignedBuf) {
    (range.start, AlignedBuf::zeroed((range.end - range.start) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = BLOCK_SIZE as u64;

    fn blocks(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        ranges.iter().map(|range| range.start * BLOCK..range.end * BLOCK).collect()
    }

    #[test]
    fn neighbours_are_read_at_once() {
        let wanted = blocks(&[40..41, 1..2, 2..4, 20..21, 38..39, 22..23]);
        assert_eq!(joined(wanted), blocks(std::slice::from_ref(&(1..41))));
        let apart = blocks(&[0..1, 17..18, 35..36]);
        assert_eq!(joined(apart), blocks(&[0..18, 35..36]));
        let long = blocks(&[0..200, 200..256, 256..257]);
        assert_eq!(joined(long), blocks(&[0..256, 256..257]));
    }

    #[test]
    fn the_read_ahead_is_bounded_and_keeps_the_newest() {
        let mut waiting = Waiting::new(WAITING_MAX);
        let chunk = WAITING_MAX / 4;
        for n in 0..100 {
            waiting.add(n * chunk as u64, AlignedBuf::zeroed(chunk));
            let bytes: usize =
                waiting.newer.values().chain(waiting.older.values()).map(|p| p.len()).sum();
            assert!(bytes <= 2 * WAITING_MAX && waiting.chunk(n * chunk as u64, chunk).is_some());
        }
        assert!(waiting.chunk(0, 1).is_none());
        // A chunk that is read again counts once.
        for _ in 0..100 {
            waiting.add(0, AlignedBuf::zeroed(BLOCK_SIZE));
        }
        assert_eq!(waiting.newer_bytes, waiting.newer.values().map(|p| p.len()).sum::<usize>());
    }
}
