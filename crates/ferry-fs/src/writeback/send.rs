//! Sending dirty data: taking it out of folios, the device write, and the transactions that map it.
//!
//! The data of one batch goes out with its first transaction. The others map more of it; they join
//! the same context or a later one, so recovery never sees a mapping whose data it did not check.

use crate::cache::batch::Batch;
use crate::cache::folio::{FOLIO_BLOCKS, mask};
use crate::cache::pages::{Known, Pages};
use crate::error::FsError;
use crate::extents::Delta;
use crate::inode::extents_right::ExtentsGuard;
use crate::inode::incore::Inode;
use crate::inode::state::InodeState;
use crate::keys::{BLOCK, INLINE_MAX};
use crate::space::segments::Chunk;
use crate::store::data_store::{Busy, DataStore, count};
use crate::writeback::batch::{BATCH_BLOCKS, Contents, OpenBatch, Taken, Work};
use crate::writeback::map::Entry;
use ferry_device::{AlignedBuf, SHARED_BUFFER_MAX};
use ferry_journal::{Credits, DataExtent, Journal};
use parking_lot::RwLockReadGuard;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// The longest buffer: a full batch and its summaries. It can outlive the process.
const BUFFER_BYTES: usize = (BATCH_BLOCKS as usize + 16) * BLOCK_BYTES;
const _: () = assert!(BUFFER_BYTES <= SHARED_BUFFER_MAX);
/// What one run of blocks may cost a transaction beside its checksums: the halves of an extent that
/// it splits.
const RUN_BYTES: usize = 2300;
/// What a block may cost a transaction that overwrites it: its checksum, the key of an extent that
/// goes, and the record of the segment that this was in.
const OVERWRITTEN_BYTES: usize = 104;
/// The same of a block that was a hole.
const NEW_BYTES: usize = 4;
/// Blocks that are copied under one hold of the page lock: others wait for that long, about 50 µs.
const HOLD_BLOCKS: u32 = 64;

/// How far a file's dirty blocks have been taken.
struct Taking {
    /// The first block that was not looked at.
    cursor: u64,
    /// Behind the last block to take.
    end: u64,
    /// What the runs cost the transaction, and what it may have.
    cost: usize,
    budget: usize,
}

impl DataStore {
    /// Room for a chunk's data.
    pub(crate) fn open_batch(&self, chunk: Option<Chunk>, busy: Busy) -> OpenBatch {
        let blocks = chunk.as_ref().map(|c| (c.len + c.summaries()) as usize);
        let buf = blocks.map(|b| self.writes.buffer(b * BLOCK_BYTES, BUFFER_BYTES));
        let range = chunk.as_ref().map_or(0..0, |c| {
            let first = self.table.first_block(c.segment) + u64::from(c.at);
            first..first + u64::from(c.len + c.summaries())
        });
        let batch = Batch::start(range, &self.writes);
        OpenBatch { chunk, buf, batch, busy, used: 0, entries: Vec::new() }
    }

    /// Ends a batch that took nothing: its blocks go back to the segment.
    pub(crate) fn cancel(&self, open: OpenBatch) {
        open.batch.complete(Ok(()));
        open.batch.set_logged();
        if let Some(chunk) = &open.chunk {
            self.table.done(chunk, true);
        }
    }

    /// Takes dirty blocks of `range` out of the cache, as far as `open` and one transaction have
    /// room.
    pub(crate) fn take(
        &self,
        guard: ExtentsGuard,
        range: Range<u64>,
        open: &mut OpenBatch,
        journal: &Journal,
    ) -> Result<Option<Work>, FsError> {
        let inode = Arc::clone(guard.inode());
        self.load_windows(&inode, range.clone(), open.left())?;
        let mut work = Work {
            guard,
            runs: Vec::new(),
            contents: Contents::Extents,
            held: 0,
            over_hole: 0,
            size: None,
            next: None,
            retained_crcs: Vec::new(),
        };
        let (mut state, mut pages) = (inode.state.share(), inode.file.pages.write());
        if inode.file.dead.load(Ordering::Acquire) {
            return Ok(None);
        }
        let size = state.rec.size;
        work.size = Some(size);
        if let Some(contents) = inline_contents(&state, &pages) {
            if pages.is_dirty(0) {
                pages.with_folio(0, |f| f.add_batch(&open.batch));
                clean_run(&mut pages, 0..1, &mut work);
            }
            pages.inline_taken = true;
            work.contents = Contents::Inline(contents);
            return Ok(Some(work));
        }
        let budget = usize::try_from(journal.max_transaction_bytes() / 2).unwrap_or(usize::MAX);
        // The file may grow between two holds: what came since is left to the next batch. Nothing
        // of it can be cut, since that takes the right to change extents.
        let mut taking = Taking {
            cursor: range.start,
            end: range.end.min(size.div_ceil(BLOCK)),
            cost: 0,
            budget,
        };
        while self.take_some(&state, &mut pages, open, &mut taking, &mut work) {
            inode.file.set_hint(pages.dirty_blocks);
            pages.hand_over();
            state.map(RwLockReadGuard::unlock_fair);
            (state, pages) = (inode.state.share(), inode.file.pages.write());
        }
        inode.file.set_hint(pages.dirty_blocks);
        // What is logged must not be longer than what is there: the rest's size comes with the
        // rest.
        let rest = pages.dirty_run(taking.cursor, u64::MAX / BLOCK);
        let rest = rest.map_or(u64::MAX, |run| run.start * BLOCK);
        work.size = Some(state.logged.size.max(size.min(rest)));
        if !work.runs.is_empty() {
            open.batch.add_file(inode.clone());
            open.entries.extend(work.runs.iter().map(|r| (inode.ino, r.block, r.len)));
        }
        Ok(Some(work))
    }

    /// Takes no more than [`HOLD_BLOCKS`]. Tells whether there may be more to take.
    fn take_some(
        &self,
        state: &InodeState,
        pages: &mut Pages,
        open: &mut OpenBatch,
        taking: &mut Taking,
        work: &mut Work,
    ) -> bool {
        let inode = Arc::clone(work.guard.inode());
        let (mapped, to) = (state.logged.blocks, open.used + HOLD_BLOCKS);
        while let Some(run) = pages.dirty_run(taking.cursor, taking.end) {
            if open.used >= to {
                return true;
            }
            let joins =
                work.runs.last().is_some_and(|last| last.block + u64::from(last.len) == run.start);
            let left = u64::from(open.left());
            let block = if mapped > 0 { OVERWRITTEN_BYTES } else { NEW_BYTES };
            taking.cost +=
                if joins { 0 } else { RUN_BYTES } + block * (run.end - run.start) as usize;
            let unknown = matches!(pages.mapping(run.start, mapped), Known::Load(_));
            let busy = pages.busy_frame(run.start).is_some();
            let full = taking.cost > taking.budget && !work.runs.is_empty();
            if left == 0 || unknown || busy || full {
                work.next = Some(run.start);
                return false;
            }
            let run = run.start..run.end.min(run.start + left);
            let (at, len) = (open.used, (run.end - run.start) as u32);
            let Some(buf) = open.buf.as_mut().and_then(Arc::get_mut) else {
                work.next = Some(run.start);
                return false;
            };
            let index = run.start / FOLIO_BLOCKS;
            let out = &mut buf[at as usize * BLOCK_BYTES..(at + len) as usize * BLOCK_BYTES];
            pages.with_folio(index, |folio| {
                folio.get((run.start % FOLIO_BLOCKS) as usize * BLOCK_BYTES, out);
                folio.add_batch(&open.batch);
            });
            clean_run(pages, run.clone(), work);
            pages.settle(&inode, index);
            match work.runs.last_mut().filter(|_| joins) {
                Some(last) => last.len += len,
                None => work.runs.push(Taken { block: run.start, at, len, from: None }),
            }
            open.used += len;
            taking.cursor = run.end;
        }
        false
    }

    /// Loads the windows of the next `most` dirty blocks, and waits for the thread that copies into
    /// the first. The caller keeps windows from being evicted by holding the right to change
    /// extents.
    fn load_windows(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        most: u32,
    ) -> Result<(), FsError> {
        loop {
            let (missing, busy) = {
                let state = inode.state.share();
                let pages = inode.file.pages.read();
                let first = pages.dirty_run(range.start, range.end);
                let busy = first.and_then(|run| pages.busy_frame(run.start));
                let missing = missing_window(&state, &pages, range.clone(), most);
                (missing, busy)
            };
            match (missing, busy) {
                (_, Some(frame)) => frame.wait(),
                (Some(window), None) => self.load_window(inode, window)?,
                (None, None) => return Ok(()),
            }
        }
    }

    /// Adds blocks that are moved, not written: `data` is what the device has of them, from device
    /// block `from` on.
    pub(crate) fn add_moved(
        open: &mut OpenBatch,
        inode: &Arc<Inode>,
        block: u64,
        from: u64,
        data: &[u8],
    ) -> Option<Taken> {
        let (at, len) = (open.used, (data.len() / BLOCK_BYTES) as u32);
        let buf = open.buf.as_mut().and_then(Arc::get_mut)?;
        let out = buf.get_mut(at as usize * BLOCK_BYTES..(at + len) as usize * BLOCK_BYTES)?;
        out.copy_from_slice(data);
        open.used += len;
        open.entries.push((inode.ino, block, len));
        Some(Taken { block, at, len, from: Some(from) })
    }

    /// Writes the batch and logs each inode's share. On an error everything that was not logged is
    /// dirty again.
    pub(crate) fn send(
        &self,
        works: Vec<Work>,
        open: OpenBatch,
        journal: &Journal,
    ) -> Result<(), FsError> {
        let OpenBatch { chunk, mut buf, batch, busy, used, entries } = open;
        let mut crcs = Vec::new();
        let mut data = None;
        if let (Some(chunk), true) = (&chunk, used > 0)
            && let Some(mut buf) = buf.take()
        {
            let bytes = Arc::get_mut(&mut buf).expect("nobody else has it before it is sent");
            let total = self.table.seal(chunk, &entries, bytes);
            bytes.set_len(total as usize * BLOCK_BYTES);
            crcs = bytes.chunks_exact(BLOCK_BYTES).map(crc32c::crc32c).collect::<Vec<u32>>();
            count(&self.counters.batches, 1);
            count(&self.counters.written_bytes, bytes.len() as u64);
            let all =
                crcs.iter().fold(0, |all, crc| crc32c::crc32c_append(all, &crc.to_le_bytes()));
            let offset = (self.table.first_block(chunk.segment) + u64::from(chunk.at)) * BLOCK;
            buf.goes_to(offset);
            self.writes.keep(&buf, BUFFER_BYTES);
            data = Some(DataExtent { offset, buf, crc: all });
        }
        if data.is_none() {
            batch.complete(Ok(()));
        }
        let mut result = Ok(());
        let mut works = works.into_iter();
        for work in works.by_ref() {
            let logged = self.log((journal, busy), work, chunk.as_ref(), &crcs, &mut data, &batch);
            if let Err(failed) = logged {
                self.undo(&failed.0);
                result = Err(failed.1);
                break;
            }
        }
        works.for_each(|work| self.undo(&work));
        if data.is_some() {
            batch.complete(Ok(()));
        }
        batch.set_logged();
        if let Some(chunk) = &chunk {
            self.table.done(chunk, used == 0);
        }
        self.cache.shrink_much();
        result
    }

    /// Writes a summary that stands alone.
    pub(crate) fn send_summary(
        &self,
        journal: &Journal,
        chunk: Chunk,
        buf: AlignedBuf,
    ) -> Result<(), FsError> {
        let begun = journal.begin(Credits { keys: 8, bytes: 256, urgent: true });
        if let Ok(mut txn) = begun {
            let offset = (self.table.first_block(chunk.segment) + u64::from(chunk.at)) * BLOCK;
            let crc = crc32c::crc32c(&crc32c::crc32c(&buf).to_le_bytes());
            txn.write_data(DataExtent { offset, buf: Arc::new(buf), crc }, Box::new(|_| ()));
            let seq = self.table.commit(txn, &Delta::default(), 0, Some(&chunk), &self.space);
            self.note_seq(None, seq);
            self.table.done(&chunk, false);
            return Ok(());
        }
        self.table.done(&chunk, true);
        begun.map(drop).map_err(FsError::from)
    }

    /// One inode's transaction. The first one takes the data along.
    fn log(
        &self,
        (journal, busy): (&Journal, Busy),
        work: Work,
        chunk: Option<&Chunk>,
        crcs: &[u32],
        data: &mut Option<DataExtent>,
        batch: &Arc<Batch>,
    ) -> Result<(), Box<(Work, FsError)>> {
        let entry = self.edits(work, chunk, crcs)?;
        let credits = self.credits(&entry.changes, &entry.delta, false);
        let begun = match busy {
            Busy::Refuse => journal.try_begin(credits),
            Busy::Wait | Busy::Skip => journal.begin(credits).map(Some),
        };
        let mut txn = match begun {
            Ok(Some(txn)) => txn,
            Ok(None) => return Err(Box::new((entry.work, FsError::WouldWait))),
            Err(error) => return Err(Box::new((entry.work, error.into()))),
        };
        let Entry { work, edits, changes, delta } = entry;
        if let Some(extent) = data.take() {
            let batch = Arc::clone(batch);
            txn.write_data(extent, Box::new(move |result| batch.complete(result)));
        }
        let inode = work.guard.inode();
        let mut state = inode.state.write();
        let mut pages = inode.file.pages.write();
        pages.in_flight -= work.over_hole;
        pages.inline_taken = false;
        for (key, value) in &changes {
            match value {
                Some(value) => txn.put(key, value),
                None => txn.delete(key),
            }
        }
        let taken_anew = apply_logged(&mut state, &mut pages, &work, delta.counted());
        self.space.settle(-taken_anew);
        self.set_windows(inode, &mut pages, edits);
        if let Some(size) = work.size {
            state.logged.size = size;
            state.times_dirty = false;
        }
        state.count_blocks(&pages);
        let inline = state.logged.inline.as_ref().map(|i| i.len() as u64);
        checked!(
            inline.is_none_or(|len| len == state.logged.size),
            "contents and size belong together"
        );
        self.put_record(&mut txn, inode, &state);
        let seq = self.table.commit(txn, &delta, work.held, chunk, &self.space);
        for run in &work.runs {
            let folios =
                run.block / FOLIO_BLOCKS..=(run.block + u64::from(run.len) - 1) / FOLIO_BLOCKS;
            folios.for_each(|index| pages.mapped(index, seq.0));
        }
        if matches!(work.contents, Contents::Inline(_)) {
            pages.mapped(0, seq.0);
            // The record has it: it need not be cached. Before the commit, its frame is all that
            // the next process would find of it.
            if !pages.is_dirty(0) {
                pages.forget(0, 1);
            }
        }
        if let Some(chunk) = chunk {
            let first = self.table.first_block(chunk.segment) + u64::from(chunk.at);
            for run in &work.runs {
                run.from.into_iter().for_each(|from| {
                    self.moves.note(from, first + u64::from(run.at), run.len, seq);
                });
            }
        }
        self.note_seq(Some(inode), seq);
        self.leave_if_clean(inode, &state, &pages);
        Ok(())
    }

    /// What was taken and not logged becomes dirty again.
    fn undo(&self, work: &Work) {
        let inode = work.guard.inode();
        let mut state = inode.state.write();
        let mut pages = inode.file.pages.write();
        pages.in_flight -= work.over_hole;
        pages.inline_taken = false;
        let mut again = 0;
        let inline = matches!(work.contents, Contents::Inline(_)).then_some(0..1);
        let runs = work.runs.iter().map(|r| r.block..r.block + u64::from(r.len));
        for block in runs.chain(inline).flatten() {
            if work.size.is_some() && pages.has(block) && !pages.is_dirty(block) {
                let bit = block % FOLIO_BLOCKS;
                pages.mark_dirty(block / FOLIO_BLOCKS, mask(bit, bit + 1), state.logged.blocks);
                again += u64::from(!pages.is_over_unwritten(block));
            }
        }
        self.space.settle(work.held as i64 - again as i64);
        if work.size.is_some() {
            self.dirtied(inode, &mut state, &pages);
        }
    }
}

/// The first window that is not in memory of those that the first `most` dirty blocks of `range`
/// are in.
fn missing_window(state: &InodeState, pages: &Pages, range: Range<u64>, most: u32) -> Option<u64> {
    let (mut cursor, mut left) = (range.start, u64::from(most));
    while left > 0 {
        let run = pages.dirty_run(cursor, range.end)?;
        if let Known::Load(window) = pages.mapping(run.start, state.logged.blocks) {
            return Some(window);
        }
        left = left.saturating_sub(run.end - run.start);
        cursor = run.end;
    }
    None
}

/// Whether a batch of the file's dirty blocks is in windows that have to be read first. Also if
/// another thread has the file's locks: it may be reading them.
pub(crate) fn lacks_windows(inode: &Inode) -> bool {
    let Some(state) = inode.state.try_share() else { return true };
    let pages = inode.file.pages.read();
    missing_window(&state, &pages, 0..u64::MAX / BLOCK, BATCH_BLOCKS).is_some()
}

/// The contents that go into the record: of a small file without blocks that has something new. A
/// block stays even if the contents would fit into the record: a program may have reserved it.
fn inline_contents(state: &InodeState, pages: &Pages) -> Option<Box<[u8]>> {
    let size = usize::try_from(state.rec.size).ok().filter(|s| *s <= INLINE_MAX && *s > 0)?;
    let inline = state.logged.inline.as_deref();
    let is_new = pages.is_dirty(0) || inline.is_some_and(|i| i.len() != size);
    if pages.no_inline || state.logged.blocks > 0 || !is_new {
        return None;
    }
    let mut contents = vec![0; size];
    match (pages.folio(0).filter(|_| pages.has(0)), inline) {
        (Some(folio), _) => folio.get(0, &mut contents),
        (None, Some(inline)) => {
            let held = inline.len().min(size);
            contents[..held].copy_from_slice(&inline[..held]);
        }
        (None, None) => {}
    }
    Some(contents.into_boxed_slice())
}

/// Makes a run clean (it lies in one folio) and counts what it had.
fn clean_run(pages: &mut Pages, run: Range<u64>, work: &mut Work) {
    let base = run.start / FOLIO_BLOCKS * FOLIO_BLOCKS;
    let cleaned = pages
        .with_folio(run.start / FOLIO_BLOCKS, |f| f.take(mask(run.start - base, run.end - base)));
    work.held += cleaned.held;
    work.over_hole += cleaned.over_hole;
    pages.delayed -= cleaned.over_hole;
    pages.in_flight += cleaned.over_hole;
}

/// Brings the inode in line with what was logged. Returns the blocks of space that must be taken
/// for blocks which were dirtied again meanwhile, over unwritten extents that are written now.
fn apply_logged(state: &mut InodeState, pages: &mut Pages, work: &Work, counted: i64) -> i64 {
    state.logged.blocks = state.logged.blocks.saturating_add_signed(counted);
    let mut taken_anew = 0;
    match &work.contents {
        Contents::Inline(contents) => {
            checked!(state.logged.blocks == 0, "contents in the record have no blocks beside them");
            state.logged.inline = Some(contents.clone());
        }
        Contents::Extents => {
            if work.runs.first().is_some_and(|r| r.block == 0) {
                state.logged.inline = None;
            }
            for run in &work.runs {
                taken_anew += pages.now_mapped(run.block..run.block + u64::from(run.len));
            }
        }
    }
    taken_anew
}
