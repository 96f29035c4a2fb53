//! Write-back: of one file, for fsync; of all that is due, gathered into large batches.

use crate::error::FsError;
use crate::inode::extents_right::ExtentsGuard;
use crate::inode::incore::Inode;
use crate::keys::{BLOCK, INLINE_MAX};
use crate::space::segments::{Chunk, Stream};
use crate::store::data_store::{Busy, DataStore, Dirty};
use crate::writeback::batch::{BATCH_BLOCKS, OpenBatch};
use crate::writeback::send::lacks_windows;
use ferry_journal::{Journal, Seq};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A caller who waits writes so many blocks back whatever is under way.
const SMALL_BLOCKS: u32 = 16;
/// Inodes looked at in one step.
const GROUP_INODES: usize = 512;

impl DataStore {
    /// Puts dirty data into contexts up to the returned one; the caller forces it. On an error,
    /// what could not be written stays dirty.
    pub fn write_back(&self, what: Dirty<'_>, busy: Busy) -> Result<Seq, FsError> {
        let newest = || Seq(self.last_seq.load(Ordering::Acquire));
        match what {
            Dirty::File(inode) => self.write_back_file(inode, busy),
            Dirty::Files(inodes) => self.write_back_files(inodes, busy).map(|()| newest()),
            Dirty::Since(since) => self.write_back_since(since, busy).map(|()| newest()),
            Dirty::All => self.write_back_since(Duration::MAX, busy).map(|()| newest()),
        }
    }

    fn write_back_file(&self, inode: &Arc<Inode>, busy: Busy) -> Result<Seq, FsError> {
        if self.is_dirty(inode) {
            self.writable()?;
            let journal = self.journal()?;
            let end = inode.state.share().rec.size.div_ceil(BLOCK);
            let mut from = Some(0);
            while let Some(start) = from {
                let want = blocks_wanted(inode);
                let mut open = self.new_batch(want, busy)?;
                let guard = match self.extents_for(inode, &journal, busy) {
                    Ok(guard) => guard,
                    Err(error) => {
                        self.cancel(open);
                        return Err(error);
                    }
                };
                from = match self.take(guard, start..end, &mut open, &journal) {
                    Ok(Some(work)) => {
                        let next = work.next;
                        self.send(vec![work], open, &journal)?;
                        self.signal.progress();
                        next
                    }
                    none => {
                        self.cancel(open);
                        none?;
                        None
                    }
                };
            }
        }
        Ok(Seq(inode.last_seq.load(Ordering::Acquire)))
    }

    fn write_back_files(&self, mut inodes: Vec<Arc<Inode>>, busy: Busy) -> Result<(), FsError> {
        inodes.retain(|inode| self.is_dirty(inode));
        if inodes.is_empty() {
            return Ok(());
        }
        self.writable()?;
        // Each once, and in the order of their numbers: files made together lie together.
        inodes.sort_unstable_by_key(|inode| inode.ino);
        inodes.dedup_by_key(|inode| inode.ino);
        match self.write_back_group(inodes.into_iter(), busy) {
            Err(error) if error.is_of_one_file() => Ok(()),
            done => done,
        }
    }

    /// Whether writing these back may have to wait until the device has written what is under way,
    /// or until a device that is far away has read their extents. A guess, on the safe side.
    pub fn would_wait<'a>(&self, inodes: impl IntoIterator<Item = &'a Arc<Inode>> + Clone) -> bool {
        let hint = |inode: &Inode| inode.file.dirty_hint.load(Ordering::Relaxed) as usize;
        let dirty = inodes.clone().into_iter().map(|inode| hint(inode)).sum::<usize>();
        let (dirty, small) = (dirty * BLOCK as usize, SMALL_BLOCKS as usize * BLOCK as usize);
        dirty > small && self.writes.in_flight() + dirty > self.dev.busy_bytes() / 2
            || self.is_far()
                && inodes.into_iter().any(|inode| hint(inode) > 0 && lacks_windows(inode))
    }

    /// The same for all files.
    pub fn would_wait_for_all(&self) -> bool {
        self.is_far() || self.writes.in_flight() + self.cache.dirty() > self.dev.busy_bytes() / 2
    }

    /// Writes back what waits since `since` or longer, many files at a time.
    fn write_back_since(&self, since: Duration, busy: Busy) -> Result<(), FsError> {
        let newest = self.queue.newest();
        let (mut after, mut failed) = (0, Ok(()));
        loop {
            let mut waiting = self.queue.waiting(after, since, GROUP_INODES);
            waiting.retain(|(queue_position, _)| *queue_position <= newest);
            let Some(&(last, _)) = waiting.last() else { return failed };
            self.writable()?;
            after = last;
            match self.write_back_group(waiting.into_iter().map(|(_, inode)| inode), busy) {
                Err(error) if error.is_of_one_file() => failed = Err(error),
                done => done?,
            }
            self.signal.progress();
        }
    }

    /// Cuts a list of inodes into batches.
    fn write_back_group(
        &self,
        inodes: impl Iterator<Item = Arc<Inode>>,
        busy: Busy,
    ) -> Result<(), FsError> {
        let journal = self.journal()?;
        let mut group: Vec<Arc<Inode>> = Vec::new();
        let (mut blocks, mut failed) = (0, Ok(()));
        for inode in inodes {
            let want = blocks_wanted(&inode);
            if want >= BATCH_BLOCKS / 2 {
                self.alone(&inode, busy, &mut failed)?;
                continue;
            }
            if blocks + want > BATCH_BLOCKS {
                self.send_group(&mut group, blocks, busy, &journal)?;
                blocks = 0;
            }
            blocks += want;
            group.push(inode);
        }
        self.send_group(&mut group, blocks, busy, &journal)?;
        failed
    }

    /// Writes one file back. If its own records are damaged, it is told, and does not keep others
    /// from being written.
    fn alone(
        &self,
        inode: &Arc<Inode>,
        busy: Busy,
        failed: &mut Result<(), FsError>,
    ) -> Result<(), FsError> {
        match self.write_back_file(inode, busy) {
            Err(error) if error.is_of_one_file() => {
                tracing::error!(inode = inode.ino, %error, "write-back cannot read the file's extents");
                inode.file.errors.add(error.errno());
                *failed = Err(error);
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// Sends files together; those that do not fit the segment's rest come with the next one.
    fn send_group(
        &self,
        group: &mut Vec<Arc<Inode>>,
        blocks: u32,
        busy: Busy,
        journal: &Journal,
    ) -> Result<(), FsError> {
        let (mut waiting, mut failed) = (Vec::new(), Ok(()));
        let mut want = blocks;
        let mut inodes = std::mem::take(group);
        while !inodes.is_empty() {
            let mut open = self.new_batch(want, busy)?;
            let mut works = Vec::with_capacity(inodes.len());
            let mut later = Vec::new();
            want = 0;
            for inode in inodes {
                let wanted = blocks_wanted(&inode);
                if wanted > 0 && open.left() == 0 {
                    want += wanted;
                    later.push(inode);
                    continue;
                }
                let guard = ExtentsGuard::try_lock(&inode);
                let Some(guard) = guard.filter(|_| inode.file.pages.read().void.is_none()) else {
                    // Another thread changes its extents, or has left a drop of them unfinished.
                    waiting.push(inode);
                    continue;
                };
                match self.take(guard, 0..u64::MAX / BLOCK, &mut open, journal) {
                    Ok(None) => {}
                    Ok(Some(work)) => {
                        if work.next.is_some() {
                            want +=
                                1 + wanted.saturating_sub(work.runs.iter().map(|r| r.len).sum());
                            later.push(inode);
                        }
                        works.push(work);
                    }
                    Err(error) => {
                        // The others are not to suffer; a caller that asks for this one gets the
                        // error again.
                        tracing::error!(inode = inode.ino, %error, "write-back cannot read the file's extents");
                        inode.file.errors.add(error.errno());
                        failed = Err(error);
                    }
                }
            }
            self.send(works, open, journal)?;
            inodes = later;
        }
        for inode in waiting {
            if busy != Busy::Skip || inode.file.pages.read().void.is_some() {
                self.alone(&inode, busy, &mut failed)?;
            }
        }
        failed
    }

    /// The right to change a file's extents, from the thread that has it.
    fn extents_for(
        &self,
        inode: &Arc<Inode>,
        journal: &Journal,
        busy: Busy,
    ) -> Result<ExtentsGuard, FsError> {
        if busy != Busy::Refuse {
            return self.extents_right(inode, journal);
        }
        let guard =
            ExtentsGuard::try_lock(inode).filter(|_| inode.file.pages.read().void.is_none());
        guard.ok_or(FsError::WouldWait)
    }

    /// Room for up to `want` blocks of new data; called without any lock.
    fn new_batch(&self, want: u32, busy: Busy) -> Result<OpenBatch, FsError> {
        if want == 0 {
            return Ok(self.open_batch(None, busy));
        }
        match busy {
            // A small fsync does not wait for much that others write.
            Busy::Wait | Busy::Refuse if want <= SMALL_BLOCKS => {}
            Busy::Refuse if self.writes.in_flight() >= self.dev.busy_bytes() => {
                return Err(FsError::WouldWait);
            }
            Busy::Wait | Busy::Skip if self.options.background => {
                self.writes.wait_below(self.dev.busy_bytes())
            }
            _ => {}
        }
        Ok(self.open_batch(Some(self.allocate(want, busy)?), busy))
    }

    /// Blocks for new data, making room if there is none.
    fn allocate(&self, want: u32, busy: Busy) -> Result<Chunk, FsError> {
        loop {
            if let Some(chunk) =
                self.table.allocate(Stream::New, want.min(BATCH_BLOCKS), &self.space)
            {
                return Ok(chunk);
            }
            if busy == Busy::Refuse {
                return Err(FsError::WouldWait);
            }
            if !self.make_room()? {
                return Err(self.no_room("write-back"));
            }
        }
    }
}

/// Blocks that writing the file back will take, up to a batch: none for what goes into the record.
fn blocks_wanted(inode: &Inode) -> u32 {
    let dirty = inode.file.dirty_hint.load(Ordering::Relaxed);
    if dirty > 1 {
        return dirty.min(BATCH_BLOCKS);
    }
    let state = inode.state.share();
    let pages = inode.file.pages.read();
    let small = state.rec.size <= INLINE_MAX as u64 && state.logged.blocks == 0 && !pages.no_inline;
    if small { 0 } else { pages.dirty_blocks.min(u64::from(BATCH_BLOCKS)) as u32 }
}
