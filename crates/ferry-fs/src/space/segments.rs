//! The segment table: how full each segment is, where new blocks go, and commits that change the
//! counts.
//!
//! The table's lock is held while a transaction that changes counts commits, so that the journal
//! has the records in the order of the changes. It is taken after every inode lock; inside it only
//! the pool's lock and the journal's own are taken.

use crate::api::Ino;
use crate::error::FsError;
use crate::extents::Delta;
use crate::keys::{self, BLOCK, Key, Number, Segment};
use crate::space::pool::{Need, Space};
use crate::space::summary::{self, ENTRIES, Entry, Home};
use ferry_device::AlignedBuf;
use ferry_journal::{Geometry, Journal, Seq, Transaction};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

/// Segments that one commit frees beside its own.
pub const CLOSED_PER_COMMIT: usize = 4;
/// Entries remembered in memory because they came too late for a summary.
const UNSUMMARIZED_MAX: usize = 16 * 1024;

/// Remembers what no summary of a segment says. Without it, the cleaner would have to ask every
/// extent.
fn remember(unsummarized: &mut Vec<(u32, Entry)>, segment: u32, entries: Vec<Entry>) {
    if unsummarized.len() < UNSUMMARIZED_MAX {
        unsummarized.extend(entries.into_iter().map(|entry| (segment, entry)));
    }
}

/// What fills a segment: data that was just written, or data that has been moved (and will live
/// longer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Just written.
    New = 0,
    /// Moved by the cleaner.
    Moved = 1,
}

/// Blocks given out in an open segment: data first, then, perhaps, summaries.
#[derive(Debug)]
pub struct Chunk {
    /// What it is used for.
    pub stream: Stream,
    /// The segment.
    pub segment: u32,
    /// First block within the segment.
    pub at: u32,
    /// Blocks for data.
    pub len: u32,
    /// Blocks behind them that are kept for summaries.
    summaries: u32,
}

impl Chunk {
    /// Blocks behind the data that are kept for summaries.
    pub fn summaries(&self) -> u32 {
        self.summaries
    }
}

/// A segment that is being filled.
struct Open {
    segment: u32,
    /// Extents that no summary names yet.
    unnamed: Vec<Entry>,
}

struct State {
    /// What is in each; nothing in one that is free, or the home store's.
    segments: Vec<Segment>,
    /// How often each was taken or given back since the mount: odd while it is the table's,
    /// whatever is in it.
    lives: Vec<u64>,
    open: [Option<Open>; 2],
    /// Closed since the last commit, perhaps with nothing live.
    closed: Vec<u32>,
    /// Chunks given out and not yet committed, by segment: such a segment is not free, whatever its
    /// count.
    in_use: Vec<u32>,
    /// How many chunks are done, and how many wait for one to be.
    chunks_done: u64,
    waiting: u32,
    /// Entries that came too late for their segment's last summary.
    unsummarized: Vec<(u32, Entry)>,
    /// Blocks of unwritten extents, on the whole volume.
    reserved: u64,
    /// Sum of live blocks.
    live: u64,
}

impl State {
    /// A segment is the table's from now on.
    fn open(&mut self, stream: Stream, segment: u32) {
        self.lives[segment as usize] += 1;
        self.open[stream as usize] = Some(Open { segment, unnamed: Vec::new() });
    }

    fn has(&self, segment: u32) -> bool {
        self.lives[segment as usize] % 2 == 1
    }
}

/// The table.
pub struct Table {
    geometry: Geometry,
    blocks: u32,
    /// Number of segments now. The table's vectors have as many, or more.
    count: AtomicU32,
    state: Mutex<State>,
    /// Somebody is done with a chunk.
    done: Condvar,
    /// A test holds it, and no transaction joins a context.
    #[cfg(test)]
    pub joining: Mutex<()>,
}

/// What the journal says of a segment, for the cleaner's choice.
#[derive(Clone, Copy, Debug)]
pub struct Victim {
    /// The segment.
    pub segment: u32,
    /// Its counts.
    pub record: Segment,
    /// Tells it from what the same segment held before it was free, and will hold when it is filled
    /// again.
    pub life: u64,
}

impl Table {
    /// Empty until [`Table::load`].
    pub fn new(geometry: Geometry) -> Self {
        let state = State {
            segments: vec![Segment { filled: 0, live: 0 }; geometry.segment_count as usize],
            lives: vec![0; geometry.segment_count as usize],
            open: [None, None],
            closed: Vec::new(),
            in_use: Vec::new(),
            chunks_done: 0,
            waiting: 0,
            unsummarized: Vec::new(),
            reserved: 0,
            live: 0,
        };
        Self {
            geometry,
            blocks: (geometry.segment_len / BLOCK) as u32,
            count: AtomicU32::new(geometry.segment_count),
            state: Mutex::new(state),
            done: Condvar::new(),
            #[cfg(test)]
            joining: Mutex::default(),
        }
    }

    /// Reads the records. Returns the segments in use and the number of live and unwritten blocks.
    /// Segments that are partly filled are filled on, the emptiest first.
    pub fn load(&self, journal: &Journal) -> Result<(BTreeSet<u32>, u64), FsError> {
        let mut state = self.state.lock();
        let mut used = BTreeSet::new();
        let mut bad = None;
        journal.scan(&keys::segment(0), &keys::segment_end(), &mut |key, value| match (
            keys::parse(key),
            Segment::decode(value),
        ) {
            (Some(Key::Segment(index)), Ok(record))
                if index < self.geometry.segment_count && record.filled <= self.blocks =>
            {
                state.segments[index as usize] = record;
                state.lives[index as usize] = 1;
                state.live += u64::from(record.live);
                used.insert(index);
                true
            }
            _ => {
                bad = Some(keys::BadRecord { what: "segment" });
                false
            }
        })?;
        if let Some(bad) = bad {
            return Err(bad.into());
        }
        if let Some(value) = journal.get(&keys::unwritten())? {
            // A damaged volume may say anything; this much can be counted with.
            let all = u64::from(self.blocks) * u64::from(self.geometry.segment_count);
            state.reserved = Number::decode(&value)?.0.min(all);
        }
        let mut partly: Vec<_> = used
            .iter()
            .copied()
            .filter(|&s| state.segments[s as usize].filled < self.blocks)
            .collect();
        partly.sort_by_key(|&s| state.segments[s as usize].filled);
        for (stream, segment) in partly.iter().take(2).enumerate() {
            state.open[stream] = Some(Open { segment: *segment, unnamed: Vec::new() });
        }
        let open: Vec<_> = state.open.iter().flatten().map(|o| o.segment).collect();
        state.closed = used
            .iter()
            .copied()
            .filter(|s| state.segments[*s as usize].live == 0 && !open.contains(s))
            .collect();
        Ok((used, state.live + state.reserved))
    }

    /// The volume has so many segments from now on. Nothing is in those that it has no more.
    pub fn set_count(&self, count: u32) {
        let mut state = self.state.lock();
        let len = state.segments.len().max(count as usize);
        state.segments.resize(len, Segment { filled: 0, live: 0 });
        state.lives.resize(len, 0);
        self.count.store(count, Ordering::Release);
    }

    /// Blocks in a segment.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// First device block of a segment.
    pub fn first_block(&self, segment: u32) -> u64 {
        (self.geometry.segments_offset + u64::from(segment) * self.geometry.segment_len) / BLOCK
    }

    /// The segment that holds device block `dev`, and the block within it.
    pub fn locate(&self, dev: u64) -> Option<(u32, u32)> {
        let at = dev.checked_sub(self.geometry.segments_offset / BLOCK)?;
        let segment = u32::try_from(at / u64::from(self.blocks)).ok()?;
        (segment < self.count.load(Ordering::Acquire))
            .then_some((segment, (at % u64::from(self.blocks)) as u32))
    }

    /// What a summary of the segment says that it is.
    pub fn home(&self, segment: u32) -> Home {
        Home { volume_id: self.geometry.volume_id, segment }
    }

    /// Takes up to `want` blocks of the open segment, or of a free one. `None`: no segment is free
    /// for this stream.
    ///
    /// A free segment may cost a call of the host: the table is not locked over it.
    pub fn allocate(&self, stream: Stream, want: u32, space: &Space) -> Option<Chunk> {
        let need = if stream == Stream::New { Need::Data } else { Need::Clean };
        loop {
            if let Some(chunk) = self.carve(stream, want) {
                return Some(chunk);
            }
            let segment = space.take(need)?;
            let mut state = self.state.lock();
            if state.open[stream as usize].is_some() {
                drop(state);
                space.give_back(segment); // somebody else was quicker
            } else {
                state.open(stream, segment);
            }
        }
    }

    /// Takes blocks of the open segment; closes it if it has none left.
    fn carve(&self, stream: Stream, want: u32) -> Option<Chunk> {
        let mut state = self.state.lock();
        let open = state.open[stream as usize].as_ref()?;
        let (segment, unnamed) = (open.segment, open.unnamed.len());
        let at = state.segments[segment as usize].filled;
        match self.fit(self.blocks - at, want, unnamed) {
            Some((len, summaries)) => {
                state.segments[segment as usize].filled = at + len + summaries;
                state.in_use.push(segment);
                Some(Chunk { stream, segment, at, len, summaries })
            }
            None => {
                // What was sealed behind the last chunk of the segment came too late for its
                // summaries.
                if let Some(open) = state.open[stream as usize].take() {
                    remember(&mut state.unsummarized, segment, open.unnamed);
                }
                state.closed.push(segment);
                None
            }
        }
    }

    /// Splits `left` blocks into data and summaries so that the last blocks of a segment always
    /// have room for what is unnamed by then. Each block may become an extent of its own.
    fn fit(&self, left: u32, want: u32, unnamed: usize) -> Option<(u32, u32)> {
        let summaries = |len: u32| (unnamed as u32 + len).div_ceil(ENTRIES as u32);
        let mut len = want.min(left);
        while len > 0 && len + summaries(len) > left {
            len -= (len + summaries(len) - left).min(len);
        }
        if len == 0 {
            return None;
        }
        let closing = len + summaries(len) + 1 >= left;
        Some((len, if closing { left - len } else { (unnamed as u32 + len) / ENTRIES as u32 }))
    }

    /// The chunk's data is in `buf`, `entries` say what; writes the summaries that are due behind
    /// it and returns the blocks used, from the start of `buf`. What is left of the chunk goes
    /// back.
    ///
    /// A segment may have been closed by a later chunk meanwhile: then its entries are remembered
    /// in memory only.
    pub fn seal(&self, chunk: &Chunk, entries: &[(Ino, u64, u32)], buf: &mut AlignedBuf) -> u32 {
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut at = chunk.at;
        let mut named = Vec::with_capacity(entries.len());
        for &(ino, file_block, len) in entries {
            named.push(Entry { ino, file_block, at, len });
            at += len;
        }
        let mut used = at - chunk.at;
        let filled_to = chunk.at + chunk.len + chunk.summaries;
        if let Some(open) = &mut state.open[chunk.stream as usize]
            && open.segment == chunk.segment
        {
            open.unnamed.append(&mut named);
            let closing = filled_to == self.blocks;
            for _ in 0..chunk.summaries {
                if open.unnamed.is_empty() || (open.unnamed.len() < ENTRIES && !closing) {
                    break;
                }
                let these: Vec<_> = open.unnamed.drain(..open.unnamed.len().min(ENTRIES)).collect();
                let from = used as usize * BLOCK as usize;
                summary::encode(
                    self.home(chunk.segment),
                    &these,
                    &mut buf[from..from + BLOCK as usize],
                );
                used += 1;
            }
        } else {
            remember(&mut state.unsummarized, chunk.segment, named);
        }
        let record = &mut state.segments[chunk.segment as usize];
        if record.filled == filled_to {
            record.filled = chunk.at + used;
        }
        used
    }

    /// The chunk is not needed any more: it was committed, or nothing came of it.
    pub fn done(&self, chunk: &Chunk, nothing_written: bool) {
        let mut state = self.state.lock();
        if let Some(i) = state.in_use.iter().position(|&s| s == chunk.segment) {
            state.in_use.swap_remove(i);
        }
        state.chunks_done += 1;
        if state.waiting > 0 {
            self.done.notify_all();
        }
        let record = &mut state.segments[chunk.segment as usize];
        if nothing_written && record.filled == chunk.at + chunk.len + chunk.summaries {
            record.filled = chunk.at;
        }
        if record.live == 0 {
            state.closed.push(chunk.segment);
        }
    }

    /// Waits until one of the chunks that are given out is done: what it had and did not need is
    /// there for others then. `false`: there is none. Never called by a thread that has one, or
    /// that has what its owner may be waiting for: the right to a file's extents.
    pub fn wait_for_chunk(&self) -> bool {
        let mut state = self.state.lock();
        if state.in_use.is_empty() {
            return false;
        }
        let before = state.chunks_done;
        state.waiting += 1;
        while state.chunks_done == before {
            self.done.wait(&mut state);
        }
        state.waiting -= 1;
        true
    }

    /// How many wait for chunks.
    #[cfg(test)]
    pub fn waiting(&self) -> u32 {
        self.state.lock().waiting
    }

    /// Commits `txn` together with the counts that `delta` changes (and those of `chunk`'s
    /// segment). `held` blocks had been reserved for it; what it does not use of them, and what it
    /// frees, may be reserved anew.
    pub fn commit(
        &self,
        mut txn: Transaction<'_>,
        delta: &Delta,
        held: u64,
        chunk: Option<&Chunk>,
        space: &Space,
    ) -> Seq {
        #[cfg(test)]
        drop(self.joining.lock());
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut touched: Vec<u32> = chunk.map(|c| c.segment).into_iter().collect();
        for &(dev, by) in &delta.live {
            self.count(state, dev, by, &mut touched);
        }
        touched.sort_unstable();
        touched.dedup();
        if delta.unwritten != 0 {
            state.reserved = state.reserved.saturating_add_signed(delta.unwritten);
            txn.put(&keys::unwritten(), &Number(state.reserved).encode());
        }
        let mut freed = Vec::new();
        touched.extend(state.closed.drain(..CLOSED_PER_COMMIT.min(state.closed.len())));
        for segment in touched {
            let open = state.open.iter().flatten().any(|o| o.segment == segment);
            if !state.has(segment) {
                continue;
            }
            let record = &mut state.segments[segment as usize];
            // Also one in which nothing was written after all: nobody else would give it back
            // before the next mount.
            if record.live == 0 && !open && !state.in_use.contains(&segment) {
                *record = Segment { filled: 0, live: 0 };
                state.lives[segment as usize] += 1;
                state.unsummarized.retain(|(s, _)| *s != segment);
                txn.delete(&keys::segment(segment));
                freed.push(segment);
            } else {
                txn.put(&keys::segment(segment), &record.encode());
            }
        }
        let seq = txn.commit();
        for segment in freed {
            space.freed(seq, segment);
        }
        space.committed(held, delta.mapped());
        seq
    }

    /// How many segments' records a commit with this delta may put.
    pub fn records(&self, delta: &Delta) -> usize {
        let of_run = |(dev, by): &(u64, i64)| {
            let (first, at) = self.locate(*dev).unwrap_or_default();
            first..first + ((u64::from(at) + by.unsigned_abs()) / u64::from(self.blocks)) as u32 + 1
        };
        let mut segments: Vec<u32> = delta.live.iter().flat_map(of_run).collect();
        segments.sort_unstable();
        segments.dedup();
        segments.len() + CLOSED_PER_COMMIT + 2
    }

    /// Applies one run of a delta, which may cross from one segment into the next.
    fn count(&self, state: &mut State, dev: u64, by: i64, touched: &mut Vec<u32>) {
        let (mut dev, mut left) = (dev, by.unsigned_abs());
        while left > 0 {
            let Some((segment, at)) = self.locate(dev) else {
                sound!(false, "device block {dev} lies in no segment");
                return;
            };
            let here = left.min(u64::from(self.blocks - at));
            let record = &mut state.segments[segment as usize];
            if by > 0 {
                record.live += here as u32;
                state.live += here;
            } else {
                sound!(u64::from(record.live) >= here, "segment {segment} has too few live blocks");
                record.live = record.live.saturating_sub(here as u32);
                state.live = state.live.saturating_sub(here);
            }
            if touched.last() != Some(&segment) {
                touched.push(segment);
            }
            dev += here;
            left -= here;
        }
    }

    /// Segments that commits have yet to free.
    pub fn has_closed(&self) -> bool {
        !self.state.lock().closed.is_empty()
    }

    /// The closed segment with the fewest live blocks for what is gained by moving them, if
    /// something is.
    pub fn victim(&self, most_live: u32, not: &BTreeSet<(u32, u64)>) -> Option<Victim> {
        self.victim_before(u32::MAX, most_live, not)
    }

    /// The same of the segments before `end`.
    pub fn victim_before(
        &self,
        end: u32,
        most_live: u32,
        not: &BTreeSet<(u32, u64)>,
    ) -> Option<Victim> {
        let state = self.state.lock();
        let open: Vec<_> = state.open.iter().flatten().map(|o| o.segment).collect();
        state
            .segments
            .iter()
            .zip(0..end)
            .filter(|(r, s)| r.filled > 0 && r.live <= most_live && !open.contains(s))
            .filter(|(_, s)| {
                !state.in_use.contains(s) && !not.contains(&(*s, state.lives[*s as usize]))
            })
            .min_by_key(|(r, _)| r.live)
            .map(|(record, segment)| Victim {
                segment,
                record: *record,
                life: state.lives[segment as usize],
            })
    }

    /// A segment from `end` on with something in it that can be moved.
    pub fn victim_behind(&self, end: u32, not: &BTreeSet<(u32, u64)>) -> Option<Victim> {
        let state = self.state.lock();
        let life = |segment: u32| state.lives[segment as usize];
        (end..self.count.load(Ordering::Acquire))
            .map(|segment| (segment, state.segments[segment as usize]))
            .find(|(segment, record)| {
                record.live > 0
                    && !state.in_use.contains(segment)
                    && !not.contains(&(*segment, life(*segment)))
            })
            .map(|(segment, record)| Victim { segment, record, life: life(segment) })
    }

    /// The first segment from `end` on in which something is live.
    pub fn live_behind(&self, end: u32) -> Option<u32> {
        let state = self.state.lock();
        let count = self.count.load(Ordering::Acquire);
        (end..count).find(|segment| state.segments[*segment as usize].live > 0)
    }

    /// No segment from `end` on is filled on.
    pub fn close_behind(&self, end: u32) {
        let open = self.open_segments();
        open.into_iter().filter(|segment| *segment >= end).for_each(|s| self.close_segment(s));
    }

    /// What is left of a segment that was to be emptied; `None`: it was free meanwhile, and is what
    /// it was no more.
    pub fn left(&self, victim: &Victim) -> Option<u32> {
        let state = self.state.lock();
        let same = state.lives[victim.segment as usize] == victim.life;
        same.then(|| state.segments[victim.segment as usize].live)
    }

    /// Of these segments those that are what they were.
    pub fn retain_alive(&self, segments: &mut BTreeSet<(u32, u64)>) {
        let state = self.state.lock();
        segments.retain(|(segment, life)| state.lives[*segment as usize] == *life);
    }

    /// Live and dead blocks in segments that are not being filled.
    pub fn live_and_dead(&self) -> (u64, u64) {
        let state = self.state.lock();
        let filled: u64 = state.segments.iter().map(|r| u64::from(r.filled)).sum();
        (state.live, filled.saturating_sub(state.live))
    }

    /// How many segments there are by their live blocks, in eighths, for messages; and those that
    /// are being filled.
    pub fn fullness(&self) -> String {
        let state = self.state.lock();
        let mut by_eighths = [0; 9];
        for record in state.segments.iter().filter(|r| r.filled > 0) {
            by_eighths[(record.live * 8 / self.blocks) as usize] += 1;
        }
        let open: Vec<_> = state.open.iter().flatten().map(|o| o.segment).collect();
        format!("{by_eighths:?} by eighths, open {open:?}, in use {:?}", state.in_use)
    }

    /// Makes a summary of what no summary of the stream's open segment names, if there is
    /// something. Returns its place, as a chunk without data, and the block.
    pub fn name_all(&self, stream: Stream) -> Option<(Chunk, AlignedBuf)> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let open = state.open[stream as usize].as_mut().filter(|o| !o.unnamed.is_empty())?;
        let record = &mut state.segments[open.segment as usize];
        if record.filled == self.blocks {
            return None;
        }
        let these: Vec<_> = open.unnamed.drain(..open.unnamed.len().min(ENTRIES)).collect();
        let mut buf = AlignedBuf::zeroed(BLOCK as usize);
        summary::encode(self.home(open.segment), &these, &mut buf);
        let chunk =
            Chunk { stream, segment: open.segment, at: record.filled, len: 0, summaries: 1 };
        record.filled += 1;
        state.in_use.push(open.segment);
        Some((chunk, buf))
    }

    /// What is remembered of a segment beside its summaries.
    pub fn unsummarized_entries(&self, segment: u32) -> Vec<Entry> {
        let state = self.state.lock();
        state.unsummarized.iter().filter(|(s, _)| *s == segment).map(|(_, e)| *e).collect()
    }

    /// A segment is not filled on.
    pub fn close_segment(&self, segment: u32) {
        let mut state = self.state.lock();
        for open in &mut state.open {
            open.take_if(|o| o.segment == segment);
        }
        state.closed.push(segment);
    }

    /// Segments that are being filled.
    pub fn open_segments(&self) -> Vec<u32> {
        self.state.lock().open.iter().flatten().map(|o| o.segment).collect()
    }

    /// Segments that hold data, or are being filled.
    #[cfg(test)]
    pub fn segments_in_use(&self) -> BTreeSet<u32> {
        let state = self.state.lock();
        (0..state.lives.len() as u32).filter(|segment| state.has(*segment)).collect()
    }

    /// Live blocks, and blocks of unwritten extents.
    pub fn used(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.live, state.reserved)
    }
}
