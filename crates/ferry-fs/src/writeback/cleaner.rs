//! The cleaner: gathers what is live in mostly dead segments, so that these become free.
//!
//! It reads a segment, finds summaries, holds each entry against the extent map, and moves what is
//! still mapped as ordinary transactions: a block that moved or died meanwhile is left alone. A
//! damaged block is moved as it is, with the checksum that it does not match, so that it stays
//! known as damaged.

use crate::api::Errno;
use crate::cache::folio::CHUNK_BYTES;
use crate::error::FsError;
use crate::extents::{Mapping, WINDOW_BLOCKS};
use crate::inode::extents_right::ExtentsGuard;
use crate::inode::incore::Inode;
use crate::keys::{self, BLOCK, Extent, Key};
use crate::order::{Guard, Rank};
use crate::space::pool::{Need, usable_blocks};
use crate::space::segments::{Stream, Victim};
use crate::space::summary::{self, Entry};
use crate::store::data_store::{Busy, DataStore, Progress, count};
use crate::store::fetch::{MISMATCH, Run};
use crate::writeback::batch::{Contents, OpenBatch, Work};
use ferry_device::AlignedBuf;
use ferry_journal::{Credits, Journal};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_BYTES: usize = BLOCK as usize;
/// Free segments beyond those kept back at which cleaning ahead of need begins.
const AHEAD_SEGMENTS: u32 = 4;
/// Ahead of need only segments are cleaned of which so much is dead: one part in this number.
const AHEAD_DEAD_SHARE: u32 = 4;

/// Dead blocks that may lie about beside as many as are live: 512 MiB.
const DEAD_BLOCKS_MAX: u64 = (512 << 20) / BLOCK;
/// On a device that keeps what is dead: one part in this number of what is filled may be dead, and
/// so many blocks in any case (16 MiB).
const DEAD_SHARE_MAX: u32 = 5;
const DEAD_BLOCKS_MIN: u64 = (16 << 20) / BLOCK;
/// So many checkpoints are waited for before the cleaner finds that there is no segment for it.
const CHECKPOINTS_WAITED: u32 = 4;
/// Most segments that one round of the background thread cleans.
const SEGMENTS_AT_ONCE: u32 = 16;

/// What the cleaner does about a file that is being removed. Its blocks are never moved: they go
/// with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Going {
    /// Waits until it is removed: a writer waits for the space.
    Wait,
    /// Leaves the segment for another time.
    Leave,
}

/// Live blocks of a file that stand together in a segment.
pub(crate) struct Live {
    /// The file.
    pub ino: u64,
    /// First block of the file.
    pub block: u64,
    /// First block within the segment.
    pub at: u32,
    /// Number of blocks.
    pub len: u32,
}

impl DataStore {
    /// Reserved space cannot be had: that is a bug, so everything is logged that may explain
    /// it.
    pub(crate) fn no_room(&self, taker: &str) -> FsError {
        count(&self.counters.no_room, 1);
        let stats = self.stats();
        tracing::error!(space = ?self.space, ?stats, segments = %self.table.fullness(), "no segment is free for {taker}");
        Errno(libc::ENOSPC).into()
    }

    /// Makes at least one segment free for new data: by a durable point past what is dead already,
    /// else by cleaning. `false` when there is nothing to gain. Called without any lock.
    pub(crate) fn make_room(&self) -> Result<bool, FsError> {
        let mut progress = Guard::wait(Rank::Room, || self.room.lock());
        let journal = self.journal()?;
        self.table.retain_alive(&mut progress.stuck);
        // Cleaning k segments with one dead block each frees one at last; each step gains, so this
        // ends.
        loop {
            let (free, reserve) = self.space.reap_now();
            if free > reserve && self.space.can_take(Need::Data) {
                return Ok(true);
            }
            if self.free_closed(&journal)? {
                continue;
            }
            if self.space.has_pending() {
                self.force_durable_point(&journal)?;
                continue;
            }
            // Of more the summaries might take all that is gained.
            let most = usable_blocks(&self.geometry()).max(1) as u32 - 1;
            match self.table.victim(most, &progress.stuck) {
                Some(victim) => {
                    self.clean(victim, &mut progress, Going::Wait, &journal)?;
                }
                // Others have more than they need, or nothing to write after all.
                None if self.table.wait_for_chunk() => {}
                None if !journal.make_room()? => return Ok(false),
                None => {
                    let (free, reserve) = self.space.reap_now();
                    return Ok(free > reserve && self.space.can_take(Need::Data));
                }
            }
        }
    }

    /// The home store gives back what removed files leave of it. Called without any lock.
    pub(crate) fn shrink_home(&self) -> Result<(), FsError> {
        let _one_at_a_time = Guard::wait(Rank::Room, || self.room.lock());
        self.journal()?.make_room()?;
        Ok(())
    }

    /// Waits until the durable point covers all that was committed, and notes it.
    pub(crate) fn force_durable_point(&self, journal: &Journal) -> Result<(), FsError> {
        let newest = self.space.newest_pending();
        journal.force_durable_point()?;
        if let Some(seq) = newest {
            self.space.note_durable_point(seq);
        }
        Ok(())
    }

    /// Frees segments that were closed with nothing live in them, and that no other commit has come
    /// by to free.
    pub(crate) fn free_closed(&self, journal: &Journal) -> Result<bool, FsError> {
        let any = self.table.has_closed();
        while self.table.has_closed() {
            let txn = journal.begin(Credits { keys: 8, bytes: 256, urgent: true })?;
            let seq =
                self.table.commit(txn, &crate::extents::Delta::default(), 0, None, &self.space);
            self.note_seq(None, seq);
        }
        Ok(any)
    }

    /// The background thread's share: frees what is dead, gives space back to the host, cleans
    /// ahead of need: when few segments are free, or when so much is dead that the host could have
    /// it back.
    pub(crate) fn tidy(&self) -> Result<(), FsError> {
        self.tidy_beyond(DEAD_BLOCKS_MAX)
    }

    /// The same where so many dead blocks may lie about beside as many as are live, if the device
    /// is none that keeps what is dead.
    pub(crate) fn tidy_beyond(&self, dead_max: u64) -> Result<(), FsError> {
        let journal = self.journal()?;
        self.free_closed(&journal)?;
        for _ in 0..SEGMENTS_AT_ONCE {
            let (free, reserve) = self.space.reap_now();
            let few = free <= reserve + AHEAD_SEGMENTS;
            let (live, dead) = self.table.live_and_dead();
            let early = self.space.keeps_what_is_dead();
            let wasted = match early {
                true => dead > DEAD_BLOCKS_MIN.max((live + dead) / u64::from(DEAD_SHARE_MAX)),
                false => dead > live + dead_max,
            };
            if !(few || wasted) || (few && self.space.has_pending()) {
                return Ok(());
            }
            let Some(progress) = self.room.try_lock() else { return Ok(()) };
            let mut progress = Guard::tried(Rank::Room, progress);
            let blocks = self.table.blocks();
            let most = match few {
                true => blocks - blocks / AHEAD_DEAD_SHARE,
                false if early => blocks - blocks / DEAD_SHARE_MAX,
                false => blocks / AHEAD_DEAD_SHARE,
            };
            self.table.retain_alive(&mut progress.stuck);
            let Some(victim) = self.table.victim(most, &progress.stuck) else { return Ok(()) };
            if !self.clean(victim, &mut progress, Going::Leave, &journal)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Cleans the segment that stands first, however full it is.
    #[cfg(test)]
    pub(crate) fn clean_once(&self) -> Result<(), FsError> {
        let mut progress = Guard::wait(Rank::Room, || self.room.lock());
        match self.table.victim(u32::MAX, &progress.stuck) {
            Some(victim) => {
                self.clean(victim, &mut progress, Going::Wait, &*self.journal()?).map(drop)
            }
            None => Ok(()),
        }
    }

    /// Moves everything live out of a segment. A damaged record of one file keeps that file's
    /// blocks where they are, and nobody else's. `false`: it was left, for a file in it is being
    /// removed.
    pub(crate) fn clean(
        &self,
        victim: Victim,
        progress: &mut Progress,
        going: Going,
        journal: &Journal,
    ) -> Result<bool, FsError> {
        match self.empty(victim, progress, going, journal) {
            Err(error) if error.is_of_one_file() => {
                tracing::warn!(segment = victim.segment, %error, "a segment cannot be cleaned");
                progress.stuck.insert((victim.segment, victim.life));
                Ok(true)
            }
            done => done,
        }
    }

    fn empty(
        &self,
        victim: Victim,
        progress: &mut Progress,
        going: Going,
        journal: &Journal,
    ) -> Result<bool, FsError> {
        let (entries, readable) = self.entries(victim)?;
        if !readable {
            // Nothing is readable in a volume that another owner has by now.
            self.writable()?;
        }
        if !self.move_entries(victim.segment, entries, going, journal)? {
            return Ok(false);
        }
        if self.table.left(&victim).is_some_and(|left| left > 0) && readable {
            // As behind a crash, which came between the data and their summary.
            tracing::info!(
                segment = victim.segment,
                "a segment's summaries do not name all that is in it: all extents are looked through"
            );
            let entries = self.scan_extents(victim.segment, journal)?;
            if !self.move_entries(victim.segment, entries, going, journal)? {
                return Ok(false);
            }
        }
        match self.table.left(&victim) {
            // None of it was moved, and nobody has removed any.
            Some(left) if left > 0 && left >= victim.record.live => {
                tracing::warn!(
                    segment = victim.segment,
                    live = left,
                    "a segment cannot be cleaned"
                );
                progress.stuck.insert((victim.segment, victim.life));
            }
            _ => count(&self.counters.cleaned_segments, 1),
        }
        Ok(true)
    }

    /// What summaries say of a segment; and whether all of it could be read.
    fn entries(&self, victim: Victim) -> Result<(Vec<Entry>, bool), FsError> {
        let mut found = self.table.unsummarized_entries(victim.segment);
        let first = self.table.first_block(victim.segment);
        // Its last summaries may be on their way still.
        self.writes.wait_for(first..first + u64::from(victim.record.filled));
        let mut readable = true;
        let mut at = 0;
        while at < victim.record.filled {
            let len = (victim.record.filled - at).min((CHUNK_BYTES / BLOCK_BYTES) as u32);
            let mut buf = self.reads.buffer(len as usize * BLOCK_BYTES, CHUNK_BYTES);
            let bytes = Arc::get_mut(&mut buf).expect("just made or idle: ours alone");
            readable &= self.dev.read((first + u64::from(at)) * BLOCK, bytes).is_ok();
            let home = self.table.home(victim.segment);
            found.extend(
                bytes.chunks_exact(BLOCK_BYTES).filter_map(|b| summary::decode(home, b)).flatten(),
            );
            self.reads.keep(&buf, CHUNK_BYTES);
            at += len;
        }
        Ok((found, readable))
    }

    /// What the extent maps of all files have in a segment.
    fn scan_extents(&self, segment: u32, journal: &Journal) -> Result<Vec<Entry>, FsError> {
        let mut found = Vec::new();
        journal.scan(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| {
            if let (Some(Key::Extent(ino, offset)), Ok(Extent::Data { block, crcs })) =
                (keys::parse(key), Extent::decode(value))
                && let Some((there, at)) = self.table.locate(block)
                && there == segment
            {
                found.push(Entry { ino, file_block: offset / BLOCK, at, len: crcs.len() as u32 });
            }
            true
        })?;
        Ok(found)
    }

    /// Moves what is live of `entries`, file by file, in batches. `false`: something of a file that
    /// is being removed was left.
    fn move_entries(
        &self,
        segment: u32,
        mut entries: Vec<Entry>,
        going: Going,
        journal: &Journal,
    ) -> Result<bool, FsError> {
        let mut all = true;
        entries.sort_by_key(|e| (e.ino, e.file_block, e.at));
        let source = self.source()?;
        for of_file in entries.chunk_by(|a, b| a.ino == b.ino) {
            let inode = match source.inode(of_file[0].ino) {
                Ok(Some(inode)) => inode,
                Ok(None) => continue,
                Err(error) if error.is_of_one_file() => {
                    tracing::error!(inode = of_file[0].ino, %error, "the cleaner cannot read the file's record");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if inode.file.dead.load(Ordering::Acquire) {
                // The thread that removes it has the right to its extents until then, and never
                // waits for us.
                match going {
                    Going::Wait => drop(ExtentsGuard::lock(&inode)),
                    Going::Leave => all = false,
                }
                continue;
            }
            match self.move_of_file(&inode, segment, of_file, journal) {
                Err(error) if error.is_of_one_file() => {
                    tracing::error!(inode = inode.ino, %error, "the cleaner cannot read the file's extents");
                }
                done => done?,
            }
        }
        Ok(all)
    }

    fn move_of_file(
        &self,
        inode: &Arc<Inode>,
        segment: u32,
        entries: &[Entry],
        journal: &Journal,
    ) -> Result<(), FsError> {
        // One right at a time, and nothing else is held: the thread that has it never waits for us.
        let mut guard = Some(self.extents_right(inode, journal)?);
        let mut live = self.live(inode, segment, entries)?;
        live.reverse();
        while !live.is_empty() {
            let held = match guard.take() {
                Some(guard) => guard,
                None => self.extents_right(inode, journal)?,
            };
            self.move_some(held, segment, &mut live, journal)?;
        }
        Ok(())
    }

    /// Those entries of one file that are mapped to where they say, cut where they are not.
    fn live(
        &self,
        inode: &Arc<Inode>,
        segment: u32,
        entries: &[Entry],
    ) -> Result<Vec<Live>, FsError> {
        let first = self.table.first_block(segment);
        let mut live: Vec<Live> = Vec::new();
        for entry in entries {
            for i in 0..entry.len.min(self.table.blocks()) {
                let (block, at) =
                    (entry.file_block.saturating_add(i.into()), entry.at.saturating_add(i));
                let window = self.window(inode, block / WINDOW_BLOCKS)?;
                let mapped = matches!(window.mapping(block % WINDOW_BLOCKS),
                    Mapping::Data(dev, _) if dev == first + u64::from(at));
                let known = live.iter().any(|l| (l.at..l.at + l.len).contains(&at));
                if !mapped || known {
                    continue;
                }
                match live.last_mut() {
                    Some(l) if l.block + u64::from(l.len) == block && l.at + l.len == at => {
                        l.len += 1
                    }
                    _ => live.push(Live { ino: inode.ino, block, at, len: 1 }),
                }
            }
        }
        Ok(live)
    }

    /// Moves the last pieces of `live`, as many as one batch and one transaction take.
    pub(crate) fn move_some(
        &self,
        guard: ExtentsGuard,
        segment: u32,
        live: &mut Vec<Live>,
        journal: &Journal,
    ) -> Result<(), FsError> {
        let inode = Arc::clone(guard.inode());
        let want = live.iter().map(|l| l.len).sum::<u32>().min(256);
        let Some(chunk) = self.table.allocate(Stream::Moved, want, &self.space) else {
            // The reserve is used up: what has become free so far must be behind the durable point
            // before more can be moved.
            drop(guard);
            self.free_closed(journal)?;
            if self.space.has_pending() {
                self.force_durable_point(journal)?;
                self.space.reap_now();
                return Ok(());
            }
            if self.table.wait_for_chunk() {
                return Ok(());
            }
            // A checkpoint has taken all that it may need; what it did not need it gives back at
            // its end. The next one may follow at once.
            for _ in 0..CHECKPOINTS_WAITED {
                journal.make_room()?;
                if self.space.can_take(Need::Clean) {
                    return Ok(());
                }
            }
            return Err(self.no_room("the cleaner"));
        };
        let mut open = self.open_batch(Some(chunk), Busy::Wait);
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
        let budget = (journal.max_transaction_bytes() / 2 / 2400).max(1) as usize;
        while let Some(live_run) = live.pop() {
            let len = live_run.len.min(open.left());
            if len == 0 || work.runs.len() >= budget {
                live.push(live_run);
                break;
            }
            if len < live_run.len {
                let (block, at) = (live_run.block + u64::from(len), live_run.at + len);
                live.push(Live { ino: live_run.ino, block, at, len: live_run.len - len });
            }
            let loaded =
                self.add_live_run(&inode, segment, &Live { len, ..live_run }, &mut open, &mut work);
            if loaded.is_err() {
                self.cancel(open);
                return loaded;
            }
        }
        if work.runs.is_empty() {
            self.cancel(open);
            return Ok(());
        }
        let blocks: u64 = work.runs.iter().map(|r| u64::from(r.len)).sum();
        self.send(vec![work], open, journal)?;
        count(&self.counters.moved_bytes, blocks * BLOCK);
        Ok(())
    }

    /// Reads a live run and puts it into the batch. The right to change extents is held, so it is
    /// still live when it moves.
    fn add_live_run(
        &self,
        inode: &Arc<Inode>,
        segment: u32,
        live_run: &Live,
        open: &mut OpenBatch,
        work: &mut Work,
    ) -> Result<(), FsError> {
        let dev = self.table.first_block(segment) + u64::from(live_run.at);
        // What is not where it was when this began is left alone. It is not even read: its place
        // may be in use anew, by the batch that is being loaded here (`read_again`).
        let mut run = Run { block: live_run.block, dev, crcs: Vec::new() };
        for i in 0..u64::from(live_run.len) {
            let block = live_run.block + i;
            match self.window(inode, block / WINDOW_BLOCKS)?.mapping(block % WINDOW_BLOCKS) {
                Mapping::Data(there, crc) if there == dev + i => run.crcs.push(crc),
                _ => {
                    self.add_run(inode, &run, open, work);
                    run = Run { block: block + 1, dev: dev + i + 1, crcs: Vec::new() };
                }
            }
        }
        self.add_run(inode, &run, open, work);
        Ok(())
    }

    /// The same for blocks that are all where they are said to be. What cannot be read stays there.
    fn add_run(&self, inode: &Arc<Inode>, run: &Run, open: &mut OpenBatch, work: &mut Work) {
        if run.crcs.is_empty() {
            return;
        }
        let mut buf = AlignedBuf::zeroed(run.crcs.len() * BLOCK_BYTES);
        let bad = self.read_checked(run.dev, &run.crcs, &mut buf);
        let mut from = 0;
        for (i, detail) in bad {
            if detail == MISMATCH {
                let (block, dev) = (run.block + i as u64, run.dev + i as u64);
                self.damaged(inode, block, dev, format!("{MISMATCH}; it is moved as it is"));
                work.retained_crcs.push((open.position() + (i - from) as u32, run.crcs[i]));
            } else {
                Self::add_blocks(inode, run, &buf, from..i, open, work);
                from = i + 1;
            }
        }
        Self::add_blocks(inode, run, &buf, from..run.crcs.len(), open, work);
    }

    fn add_blocks(
        inode: &Arc<Inode>,
        run: &Run,
        buf: &AlignedBuf,
        part: Range<usize>,
        open: &mut OpenBatch,
        work: &mut Work,
    ) {
        if part.is_empty() {
            return;
        }
        let data = &buf[part.start * BLOCK_BYTES..part.end * BLOCK_BYTES];
        let first = part.start as u64;
        work.runs.extend(Self::add_moved(open, inode, run.block + first, run.dev + first, data));
    }

    /// At the end of a mount: summaries for what no summary names yet.
    pub(crate) fn name_everything(&self) -> Result<(), FsError> {
        let journal = self.journal()?;
        for stream in [Stream::New, Stream::Moved] {
            while let Some((chunk, buf)) = self.table.name_all(stream) {
                self.send_summary(&journal, chunk, buf)?;
            }
        }
        Ok(())
    }
}
