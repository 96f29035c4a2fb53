//! Reading ahead: a program that reads a file from front to back finds the next part in memory.
//!
//! A thread of its own reads it, so that the device works while the reader does. The kernel's own
//! read-ahead asks for small pieces, several at a time and not always in order: reads near each
//! other count as one sequence.

use crate::cache::file_data::FileData;
use crate::cache::pages::Known;
use crate::error::FsError;
use crate::extents::Mapping;
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::store::ahead_jobs::Job;
use crate::store::data_store::DataStore;
use crate::store::fetch::{DIRECT_BLOCKS, missing};
use ferry_env::activity::{self, Operation};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Reads no further apart than this, in bytes, are one sequence.
const NEAR: u64 = 512 << 10;
/// No file is read ahead by more than this part of the cache: it has to be there still when the
/// reader comes.
const AHEAD_SHARE: u64 = 16;
/// How far to read ahead, in blocks.
const AHEAD_BLOCKS: u64 = 1024;
/// What the device is asked for at once, in blocks.
const CHUNK_BLOCKS: u64 = 256;
/// Starts the thread. It holds the store only while it works.
pub fn start(store: &Arc<DataStore>) {
    let (weak, jobs) = (Arc::downgrade(store), Arc::clone(&store.ahead));
    let body = move || {
        while let Some((inode, job)) = jobs.next() {
            let (Some(store), Some(inode)) = (weak.upgrade(), inode.upgrade()) else { continue };
            let _doing = activity::begin(Operation::ReadAhead);
            match job {
                Job::Fetch(blocks) => store.prefetch(&inode, blocks),
                Job::Tell(bytes) => store.tell_device(&inode, bytes),
            }
        }
    };
    match std::thread::Builder::new().name("ferry-readahead".into()).spawn(body) {
        Ok(thread) => store.ahead.set_thread(thread),
        Err(error) => {
            tracing::warn!(%error, "no read-ahead thread: sequential reads will be slower")
        }
    }
}

/// Notes a read that ended; returns the blocks that should be read ahead now. `missed`: it had to
/// wait for the device.
fn next_range(
    file: &FileData,
    offset: u64,
    len: usize,
    size: u64,
    ahead: u64,
    missed: bool,
) -> Option<Range<u64>> {
    if !missed && file.sequential.load(Ordering::Relaxed) == 0 {
        return None; // in memory, and not sequential: nothing shared is written
    }
    let (end, seen) = (offset + len as u64, file.read_end.load(Ordering::Relaxed));
    if offset > seen + NEAR || offset + NEAR < seen {
        file.sequential.store(0, Ordering::Relaxed);
        file.read_end.store(end, Ordering::Relaxed);
        file.ahead_to.store(0, Ordering::Relaxed);
        return None;
    }
    let reached = file.read_end.fetch_max(end, Ordering::Relaxed).max(end).div_ceil(BLOCK);
    if file.sequential.swap(1, Ordering::Relaxed) == 0 {
        return None;
    }
    let asked = file.ahead_to.load(Ordering::Relaxed);
    let (from, to) = (asked.max(reached), (reached + ahead).min(size.div_ceil(BLOCK)));
    let due = from < to && from < reached + ahead / 2 + 1;
    let mine = due
        && file.ahead_to.compare_exchange(asked, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    mine.then_some(from..to)
}

impl DataStore {
    /// Notes a read that ended, and reads ahead if it is sequential.
    pub(crate) fn read_on(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        len: usize,
        size: u64,
        missed: bool,
    ) {
        // Large reads keep the device busy by themselves, and need no copy in the cache for it.
        if len as u64 >= DIRECT_BLOCKS * BLOCK {
            return;
        }
        let ahead = self.cache.limit() as u64 / AHEAD_SHARE / BLOCK;
        let ahead = ahead.clamp(CHUNK_BLOCKS / 8, AHEAD_BLOCKS);
        if let Some(blocks) = next_range(&inode.file, offset, len, size, ahead, missed) {
            if self.options.background {
                self.ahead.push(inode, Job::Fetch(blocks));
            } else {
                self.prefetch(inode, blocks);
            }
        }
    }

    /// Whether a write of these bytes has to read something first. One that would have to wait to
    /// know says no: somebody works on the file.
    pub(crate) fn reads_for(&self, inode: &Inode, bytes: &Range<u64>) -> bool {
        let (Some(state), Some(pages)) = (inode.state.try_share(), inode.file.pages.try_read())
        else {
            return false;
        };
        let last = bytes.end.saturating_sub(1).max(bytes.start) / BLOCK;
        let needs = |block: u64, keeps_rest: bool| {
            !pages.has(block)
                && match pages.mapping(block, state.logged.blocks) {
                    Known::Load(_) => true,
                    Known::Is(Mapping::Data(..)) => keeps_rest,
                    Known::Is(_) => false,
                }
        };
        needs(bytes.start / BLOCK, !bytes.start.is_multiple_of(BLOCK))
            || needs(last, !bytes.end.is_multiple_of(BLOCK))
    }

    /// Reads what a write of these bytes has to read first.
    pub(crate) fn bring_for(&self, inode: &Arc<Inode>, bytes: &Range<u64>) -> Result<(), FsError> {
        let blocks = bytes.start / BLOCK..bytes.end.div_ceil(BLOCK);
        self.look_by_window(inode, blocks, missing, drop)?;
        for edge in [bytes.start, bytes.end] {
            if !edge.is_multiple_of(BLOCK) {
                self.prefetch(inode, edge / BLOCK..edge / BLOCK + 1);
            }
        }
        Ok(())
    }

    /// Brings blocks into the cache. Errors are nobody's yet: a read of the block finds it again.
    fn prefetch(&self, inode: &Arc<Inode>, blocks: Range<u64>) {
        let mut at = blocks.start;
        while at < blocks.end {
            let chunk = at..blocks.end.min(at + CHUNK_BLOCKS);
            at = chunk.end;
            inode.file.fetching.begin(chunk.clone());
            let result = self.prefetch_chunk(inode, &chunk);
            inode.file.fetching.end(&chunk);
            if let Err(error) = result {
                tracing::debug!(inode = inode.ino, %error, "read-ahead failed");
                return;
            }
            self.cache.shrink();
        }
    }

    fn prefetch_chunk(&self, inode: &Arc<Inode>, chunk: &Range<u64>) -> Result<(), FsError> {
        let runs = self.look_loaded(inode, chunk, missing)?;
        let fetched = self.fetch(inode, runs, &(0..0))?;
        self.fill(inode, &fetched);
        Ok(())
    }
}
