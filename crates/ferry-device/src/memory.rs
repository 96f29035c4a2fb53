//! A device in memory, for tests and for measurements that leave the disk out. Only what was
//! written takes memory.

use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::device::{BlockDevice, Io, Longest, check_range, read_at_once};
use crate::started::{ReadDone, ReadRing};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory is taken in chunks of this many bytes.
const CHUNK_SIZE: usize = 64 * 1024;
/// Locks that neighbouring chunks are spread over.
const SHARDS: usize = 16;

type Shard = RwLock<HashMap<u64, Box<[u8]>>>;

/// A sparse device in memory. Everything completes before the call returns; a flush has nothing to
/// do.
pub struct MemDevice {
    capacity: AtomicU64,
    shards: [Shard; SHARDS],
}

/// The part of a transfer that lies in one chunk.
struct ChunkRange {
    chunk: u64,
    /// First byte within the chunk.
    start: usize,
    len: usize,
    /// First byte within the transfer.
    at: usize,
}

impl MemDevice {
    /// A device of `capacity` bytes, all zeros.
    ///
    /// # Panics
    /// When `capacity` is not a multiple of [`BLOCK_SIZE`].
    pub fn new(capacity: u64) -> Self {
        assert!(
            capacity.is_multiple_of(BLOCK_SIZE as u64),
            "capacity {capacity} is not whole blocks"
        );
        Self { capacity: capacity.into(), shards: std::array::from_fn(|_| Shard::default()) }
    }

    /// Bytes of memory that the contents take.
    pub fn resident(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read().len() as u64).sum::<u64>() * CHUNK_SIZE as u64
    }

    fn shard(&self, chunk: u64) -> &Shard {
        &self.shards[(chunk % SHARDS as u64) as usize]
    }
}

fn chunk_ranges(offset: u64, len: u64) -> impl Iterator<Item = ChunkRange> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == len {
            return None;
        }
        let start = ((offset + at) % CHUNK_SIZE as u64) as usize;
        let range_len = (len - at).min((CHUNK_SIZE - start) as u64);
        let chunk = (offset + at) / CHUNK_SIZE as u64;
        let range = ChunkRange { chunk, start, len: range_len as usize, at: at as usize };
        at += range_len;
        Some(range)
    })
}

impl BlockDevice for MemDevice {
    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        Ok(Longest::Asked(u64::MAX / 2))
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        let before = self.capacity();
        if bytes < before {
            let whole = bytes.next_multiple_of(CHUNK_SIZE as u64);
            self.discard(bytes, whole.min(before) - bytes)?;
            let first = whole / CHUNK_SIZE as u64;
            self.shards.iter().for_each(|shard| shard.write().retain(|chunk, _| *chunk < first));
        }
        self.capacity.store(bytes, Ordering::Release);
        Ok(())
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        check_range(self.capacity(), offset, buf.len() as u64)?;
        for range in chunk_ranges(offset, buf.len() as u64) {
            let target = &mut buf[range.at..range.at + range.len];
            match self.shard(range.chunk).read().get(&range.chunk) {
                Some(chunk) => target.copy_from_slice(&chunk[range.start..range.start + range.len]),
                None => target.fill(0),
            }
        }
        Ok(())
    }

    fn start_read(&self, _ring: &dyn ReadRing, offset: u64, buf: Arc<AlignedBuf>, done: ReadDone) {
        read_at_once(self, offset, buf, done);
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        check_range(self.capacity(), offset, buf.len() as u64)?;
        for range in chunk_ranges(offset, buf.len() as u64) {
            let mut shard = self.shard(range.chunk).write();
            let chunk =
                shard.entry(range.chunk).or_insert_with(|| vec![0; CHUNK_SIZE].into_boxed_slice());
            chunk[range.start..range.start + range.len]
                .copy_from_slice(&buf[range.at..range.at + range.len]);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn submit(&self, batch: Vec<Io>) {
        for io in batch {
            match io {
                Io::Write { offset, buf, done } => done(self.write(offset, &buf)),
                Io::Flush { done } => done(self.flush()),
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        check_range(self.capacity(), offset, len)?;
        for range in chunk_ranges(offset, len) {
            let mut shard = self.shard(range.chunk).write();
            if range.len == CHUNK_SIZE {
                shard.remove(&range.chunk);
            } else if let Some(chunk) = shard.get_mut(&range.chunk) {
                chunk[range.start..range.start + range.len].fill(0);
            }
        }
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        check_range(self.capacity(), offset, len)
    }

    fn host_free(&self) -> Option<u64> {
        None
    }

    fn next_data(&self, offset: u64) -> u64 {
        let first = offset / CHUNK_SIZE as u64;
        let of_shard =
            |shard: &Shard| shard.read().keys().filter(|chunk| **chunk >= first).min().copied();
        let next = self.shards.iter().filter_map(of_shard).min();
        next.map_or_else(|| self.capacity(), |chunk| (chunk * CHUNK_SIZE as u64).max(offset))
    }
}
