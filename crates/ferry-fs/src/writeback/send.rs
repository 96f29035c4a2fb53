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
use crate::keys::{self, BLOCK, INLINE_MAX};
use crate::space::segments::Chunk;
use crate::store::data_store::{Busy, DataStore, count};
use crate::writeback::batch::{BATCH_BLOCKS, Cargo, Contents, Taken, Work};
use crate::writeback::map::Entry;
use ferry_device::AlignedBuf;
use ferry_journal::{Credits, DataExtent, Journal};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// What one run of blocks may cost a transaction beside its checksums: the halves of an extent that
/// it splits.
const RUN_BYTES: usize = 2300;
/// What a block may cost a transaction that overwrites it: its checksum, the key of an extent that
/// goes, and the record of the segment that this was in.
const OVERWRITTEN_BYTES: usize = 104;
/// The same of a block that was a hole.
const NEW_BYTES: usize = 4;

impl DataStore {
    /// Room for a chunk's data.
    pub(crate) fn cargo(&self, chunk: Option<Chunk>, busy: Busy) -> Cargo {
        let large = (BATCH_BLOCKS as usize + 16) * BLOCK_BYTES;
        let blocks = chunk.as_ref().map(|c| (c.len + c.summaries()) as usize);
        let buf = blocks.map(|b| self.traffic.buffer(b * BLOCK_BYTES, large));
        let place = chunk.as_ref().map_or(0..0, |c| {
            let first = self.table.first_block(c.segment) + u64::from(c.at);
            first..first + u64::from(c.len + c.summaries())
        });
        let batch = Batch::start(place, &self.traffic);
        Cargo { chunk, buf, batch, busy, used: 0, entries: Vec::new() }
    }

    /// Nothing came of it.
    pub(crate) fn cancel(&self, cargo: Cargo) {
        cargo.batch.land(Ok(()));
        cargo.batch.set_logged();
        if let Some(chunk) = &cargo.chunk {
            self.table.done(chunk, true);
        }
    }

    /// Takes dirty blocks of `range` out of the cache, as far as `cargo` and one transaction have
    /// room.
    pub(crate) fn take(
        &self,
        guard: ExtentsGuard,
        range: Range<u64>,
        cargo: &mut Cargo,
        journal: &Journal,
    ) -> Result<Option<Work>, FsError> {
        let inode = Arc::clone(guard.inode());
        self.load_windows(&inode, range.clone(), cargo.left())?;
        let state = inode.state.share();
        if inode.file.dead.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut pages = inode.file.pages.write();
        let mut work = Work {
            guard,
            runs: Vec::new(),
            contents: Contents::Extents,
            held: 0,
            over_hole: 0,
            size: Some(state.rec.size),
            next: None,
            kept_crcs: Vec::new(),
        };
        if let Some(contents) = inline_contents(&state, &pages) {
            if pages.is_dirty(0) {
                pages.with_folio(0, |f| f.fly(&cargo.batch));
                clean_run(&mut pages, 0..1, &mut work);
            }
            pages.inline_taken = true;
            work.contents = Contents::Inline(contents);
            return Ok(Some(work));
        }
        let budget = usize::try_from(journal.max_transaction_bytes() / 2).unwrap_or(usize::MAX);
        self.take_runs(&state, &mut pages, range, cargo, budget, &mut work);
        inode.file.set_hint(pages.dirty_blocks);
        Ok(Some(work))
    }

    fn take_runs(
        &self,
        state: &InodeState,
        pages: &mut Pages,
        range: Range<u64>,
        cargo: &mut Cargo,
        budget: usize,
        work: &mut Work,
    ) {
        let inode = Arc::clone(work.guard.inode());
        let (mapped, mut cursor, mut cost) = (state.logged.blocks, range.start, 0);
        while let Some(run) = pages.dirty_run(cursor, range.end) {
            let joins =
                work.runs.last().is_some_and(|last| last.block + u64::from(last.len) == run.start);
            let left = u64::from(cargo.left());
            let block = if mapped > 0 { OVERWRITTEN_BYTES } else { NEW_BYTES };
            cost += if joins { 0 } else { RUN_BYTES } + block * (run.end - run.start) as usize;
            let unknown = matches!(pages.place(run.start, mapped), Known::Load(_));
            let busy = pages.busy_frame(run.start).is_some();
            if left == 0 || unknown || busy || (cost > budget && !work.runs.is_empty()) {
                work.next = Some(run.start);
                break;
            }
            let run = run.start..run.end.min(run.start + left);
            let (at, len) = (cargo.used, (run.end - run.start) as u32);
            let Some(buf) = cargo.buf.as_mut().and_then(Arc::get_mut) else {
                work.next = Some(run.start);
                break;
            };
            let index = run.start / FOLIO_BLOCKS;
            let out = &mut buf[at as usize * BLOCK_BYTES..(at + len) as usize * BLOCK_BYTES];
            pages.with_folio(index, |folio| {
                folio.get((run.start % FOLIO_BLOCKS) as usize * BLOCK_BYTES, out);
                folio.fly(&cargo.batch);
            });
            clean_run(pages, run.clone(), work);
            pages.settle(&inode, index);
            match work.runs.last_mut().filter(|_| joins) {
                Some(last) => last.len += len,
                None => work.runs.push(Taken { block: run.start, at, len, from: None }),
            }
            cargo.used += len;
            cursor = run.end;
        }
        // What is logged must not be longer than what is there: the rest's size comes with the
        // rest.
        let rest = pages.dirty_run(cursor, u64::MAX / BLOCK).map_or(u64::MAX, |r| r.start * BLOCK);
        work.size = Some(state.logged.size.max(state.rec.size.min(rest)));
        if !work.runs.is_empty() {
            cargo.batch.add_file(inode.clone());
            cargo.entries.extend(work.runs.iter().map(|r| (inode.ino, r.block, r.len)));
        }
    }

    /// Loads the windows of the next `most` dirty blocks, and waits for who copies into the first.
    /// The caller keeps windows from being evicted by holding the right to change extents.
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
                let (mut cursor, mut left) = (range.start, u64::from(most));
                let first = pages.dirty_run(cursor, range.end);
                let busy = first.and_then(|run| pages.busy_frame(run.start));
                let missing = loop {
                    let Some(run) = pages.dirty_run(cursor, range.end).filter(|_| left > 0) else {
                        break None;
                    };
                    if let Known::Load(window) = pages.place(run.start, state.logged.blocks) {
                        break Some(window);
                    }
                    left = left.saturating_sub(run.end - run.start);
                    cursor = run.end;
                };
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
    pub(crate) fn load_moved(
        cargo: &mut Cargo,
        inode: &Arc<Inode>,
        block: u64,
        from: u64,
        data: &[u8],
    ) -> Option<Taken> {
        let (at, len) = (cargo.used, (data.len() / BLOCK_BYTES) as u32);
        let buf = cargo.buf.as_mut().and_then(Arc::get_mut)?;
        let out = buf.get_mut(at as usize * BLOCK_BYTES..(at + len) as usize * BLOCK_BYTES)?;
        out.copy_from_slice(data);
        cargo.used += len;
        cargo.entries.push((inode.ino, block, len));
        Some(Taken { block, at, len, from: Some(from) })
    }

    /// Writes the batch and logs each inode's share. On an error everything that was not logged is
    /// dirty again.
    pub(crate) fn send(
        &self,
        works: Vec<Work>,
        cargo: Cargo,
        journal: &Journal,
    ) -> Result<(), FsError> {
        let Cargo { chunk, mut buf, batch, busy, used, entries } = cargo;
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
            self.traffic.keep(&buf, (BATCH_BLOCKS as usize + 16) * BLOCK_BYTES);
            data = Some(DataExtent { offset, buf, crc: all });
        }
        if data.is_none() {
            batch.land(Ok(()));
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
            batch.land(Ok(()));
        }
        batch.set_logged();
        if let Some(chunk) = &chunk {
            self.table.done(chunk, used == 0);
        }
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
            txn.write_data(extent, Box::new(move |result| batch.land(result)));
        }
        let inode = work.guard.inode();
        let mut state = inode.state.write();
        let mut pages = inode.file.pages.write();
        pages.flying -= work.over_hole;
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
        txn.put(&keys::inode(inode.ino), &state.record().encode());
        let seq = self.table.commit(txn, &delta, work.held, chunk, &self.space);
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
        pages.flying -= work.over_hole;
        pages.inline_taken = false;
        let mut again = 0;
        let inline = matches!(work.contents, Contents::Inline(_)).then_some(0..1);
        let runs = work.runs.iter().map(|r| r.block..r.block + u64::from(r.len));
        for block in runs.chain(inline).flatten() {
            if work.size.is_some() && pages.has(block) && !pages.is_dirty(block) {
                let bit = block % FOLIO_BLOCKS;
                pages.mark_dirty(block / FOLIO_BLOCKS, mask(bit, bit + 1), state.logged.blocks);
                again += u64::from(!pages.is_promised(block));
            }
        }
        self.space.settle(work.held as i64 - again as i64);
        if work.size.is_some() {
            self.dirtied(inode, &mut state, &pages);
        }
    }
}

/// The contents that go into the record: of a small file without promised space that has something
/// new.
fn inline_contents(state: &InodeState, pages: &Pages) -> Option<Box<[u8]>> {
    let size = usize::try_from(state.rec.size).ok().filter(|s| *s <= INLINE_MAX && *s > 0)?;
    let alone = match state.logged.blocks {
        0 => true,
        1 => matches!(pages.place(0, 1), Known::Is(crate::extents::Place::Data(..))),
        _ => false,
    };
    let inline = state.logged.inline.as_deref();
    if pages.no_inline || !alone || !(pages.is_dirty(0) || inline.is_some_and(|i| i.len() != size))
    {
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
        .with_folio(run.start / FOLIO_BLOCKS, |f| f.clean(mask(run.start - base, run.end - base)));
    work.held += cleaned.held;
    work.over_hole += cleaned.over_hole;
    pages.delayed -= cleaned.over_hole;
    pages.flying += cleaned.over_hole;
}

/// Brings the inode in line with what was logged. Returns the blocks of space that must be taken
/// for blocks which were dirtied again meanwhile, over promises that are now used up.
fn apply_logged(state: &mut InodeState, pages: &mut Pages, work: &Work, counted: i64) -> i64 {
    state.logged.blocks = state.logged.blocks.saturating_add_signed(counted);
    let mut taken_anew = 0;
    match &work.contents {
        Contents::Inline(contents) => {
            state.logged.inline = Some(contents.clone());
            if !pages.is_dirty(0) {
                pages.forget(0, 1); // the record has it: it need not be cached
            }
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
