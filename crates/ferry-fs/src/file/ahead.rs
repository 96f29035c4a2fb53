//! Reading ahead: who reads a file from front to back finds the next part in memory.
//!
//! A thread of its own reads it, so that the device works while the reader does. The kernel's own
//! read-ahead asks for small pieces, several at a time and not always in order: reads near each
//! other count as one row.

use crate::cache::file_data::{FileData, Known};
use crate::error::FsError;
use crate::extents::Place;
use crate::file::read::{DIRECT_BLOCKS, Run, lacks};
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::store::data_store::DataStore;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Reads no further apart than this, in bytes, are one row.
const NEAR: u64 = 512 << 10;
/// How far to read ahead, in blocks.
const AHEAD_BLOCKS: u64 = 1024;
/// What the device is asked for at once, in blocks.
const CHUNK_BLOCKS: u64 = 256;
/// Jobs that wait for the thread; more are dropped, and the reader reads for itself.
const JOBS_MAX: usize = 16;

#[derive(Default)]
struct State {
    jobs: VecDeque<(Weak<Inode>, Range<u64>)>,
    stopping: bool,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What the thread is to do.
#[derive(Default)]
pub struct Jobs {
    state: Mutex<State>,
    changed: Condvar,
}

impl Jobs {
    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.abandon();
        let thread = self.state.lock().thread.take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the read-ahead thread panicked");
        }
    }

    /// Tells the thread to end.
    pub fn abandon(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }

    fn push(&self, inode: &Arc<Inode>, blocks: Range<u64>) {
        let mut state = self.state.lock();
        if state.jobs.len() < JOBS_MAX {
            state.jobs.push_back((Arc::downgrade(inode), blocks));
            self.changed.notify_one();
        }
    }

    fn next(&self) -> Option<(Weak<Inode>, Range<u64>)> {
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            self.changed.wait(&mut state);
        }
    }
}

/// Starts the thread. It holds the store only while it works.
pub fn start(store: &Arc<DataStore>) {
    let (weak, jobs) = (Arc::downgrade(store), Arc::clone(&store.ahead));
    let body = move || {
        while let Some((inode, blocks)) = jobs.next() {
            let (Some(store), Some(inode)) = (weak.upgrade(), inode.upgrade()) else { continue };
            store.prefetch(&inode, blocks);
        }
    };
    match std::thread::Builder::new().name("ferry-readahead".into()).spawn(body) {
        Ok(thread) => store.ahead.state.lock().thread = Some(thread),
        Err(error) => {
            tracing::warn!(%error, "no read-ahead thread: sequential reads will be slower")
        }
    }
}

/// Blocks of a file that somebody is reading from the device: others wait for them instead of
/// reading them too.
#[derive(Default)]
pub struct Fetching {
    ranges: Mutex<Vec<Range<u64>>>,
    done: Condvar,
}

impl Fetching {
    fn begin(&self, blocks: Range<u64>) {
        self.ranges.lock().push(blocks);
    }

    fn end(&self, blocks: &Range<u64>) {
        let mut ranges = self.ranges.lock();
        if let Some(at) = ranges.iter().position(|r| r == blocks) {
            ranges.swap_remove(at);
        }
        self.done.notify_all();
    }

    /// Waits if `block` is being read; tells whether it was.
    pub fn wait(&self, block: u64) -> bool {
        let mut ranges = self.ranges.lock();
        let mut waited = false;
        while ranges.iter().any(|r| r.contains(&block)) {
            waited = true;
            self.done.wait(&mut ranges);
        }
        waited
    }
}

/// Notes a read that ended; returns the blocks that should be read ahead now. `missed`: it had to
/// wait for the device.
fn row(
    file: &FileData,
    offset: u64,
    len: usize,
    size: u64,
    ahead: u64,
    missed: bool,
) -> Option<Range<u64>> {
    if !missed && file.row.load(Ordering::Relaxed) == 0 {
        return None; // in memory, and in no row: nothing shared is written
    }
    let (end, seen) = (offset + len as u64, file.read_end.load(Ordering::Relaxed));
    if offset > seen + NEAR || offset + NEAR < seen {
        file.row.store(0, Ordering::Relaxed);
        file.read_end.store(end, Ordering::Relaxed);
        file.ahead_to.store(0, Ordering::Relaxed);
        return None;
    }
    let reached = file.read_end.fetch_max(end, Ordering::Relaxed).max(end).div_ceil(BLOCK);
    if file.row.swap(1, Ordering::Relaxed) == 0 {
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
    /// Notes a read that ended, and reads ahead if it stands in a row with others.
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
        let ahead = (self.cache.limit() as u64 / 8 / BLOCK).clamp(CHUNK_BLOCKS / 8, AHEAD_BLOCKS);
        if let Some(blocks) = row(&inode.file, offset, len, size, ahead, missed) {
            if self.options.background {
                self.ahead.push(inode, blocks);
            } else {
                self.prefetch(inode, blocks);
            }
        }
    }

    /// Brings blocks into the cache. Errors are nobody's yet: who wants the block finds it again.
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
        }
        self.cache.shrink();
    }

    fn prefetch_chunk(&self, inode: &Arc<Inode>, chunk: &Range<u64>) -> Result<(), FsError> {
        let runs = loop {
            match missing(inode, chunk) {
                Ok(runs) => break runs,
                Err(window) => self.load_window(inode, window)?,
            }
        };
        let fetched = self.fetch(inode, runs, &(0..0))?;
        self.fill(inode, &fetched);
        Ok(())
    }
}

/// Blocks of `chunk` that have data and are not in memory, or the window to load first.
pub(crate) fn missing(inode: &Inode, chunk: &Range<u64>) -> Result<Vec<Run>, u64> {
    let state = inode.state.share();
    let pages = inode.file.pages.read();
    let mut runs = Vec::new();
    for block in chunk.clone().filter(|b| !pages.has(*b)) {
        match pages.place(block, state.logged.blocks) {
            Known::Load(window) => return Err(window),
            Known::Is(Place::Data(dev, crc)) => lacks(&mut runs, block, dev, crc),
            Known::Is(_) => {}
        }
    }
    Ok(runs)
}
