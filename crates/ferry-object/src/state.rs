//! What a device knows: the map, changes that are not in the store yet, and who waits for them.

use crate::batch::{Batch, Pending};
use crate::error::ObjectError;
use crate::executor::Job;
use crate::format::{
    BLOCK, Entry, EntryKind, Id, Location, ObjectRef, Pin, Root, RootState, SHARD_BLOCKS,
};
use crate::retained::Retained;
use crate::runs::{Run, RunMap, Sliced};
use crate::victims::{Pass, choose, objects_in};
use ferry_device::{Io, IoDone};
use ferry_env::planted::{Bug, is_planted};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A root that is being written.
pub(crate) struct Writing {
    pub root: Root,
    pub shards: BTreeMap<u64, ObjectRef>,
    /// Shards that have not answered.
    pub left: usize,
    /// What it needs no more, and the root before it does.
    pub dead: Vec<String>,
}

/// What the committed part of the log says of each block.
#[derive(Default)]
pub(crate) struct Map {
    runs: RunMap<Location>,
    /// Blocks that refer to each object.
    live: BTreeMap<ObjectRef, u64>,
    /// Blocks of the contents of each, as far as that is known.
    lengths: BTreeMap<ObjectRef, u64>,
    /// Data objects that no block refers to any more.
    dead: Vec<ObjectRef>,
    /// A log object has lost its last block by repacking.
    emptied: bool,
    /// Log objects that exist.
    logs: BTreeSet<u64>,
    /// Shards that changed since the last root.
    changed: BTreeSet<u64>,
}

impl Map {
    /// The map that a root has, by the runs of its shards in their order.
    pub fn load(shards: &[Vec<Run<Location>>]) -> Self {
        let mut live: BTreeMap<ObjectRef, u64> = BTreeMap::new();
        let same_object =
            |one: &Run<Location>, next: &Run<Location>| one.value.object == next.value.object;
        for runs in shards.iter().flat_map(|runs| runs.chunk_by(same_object)) {
            let blocks: u64 = runs.iter().map(|run| run.len).sum();
            *live.entry(runs[0].value.object).or_default() += blocks;
        }
        let logs = live.keys().filter(|object| object.is_log()).map(|object| object.number);
        Self {
            logs: logs.collect(),
            runs: RunMap::from_sorted(shards.iter().flatten().cloned()),
            live,
            ..Self::default()
        }
    }

    /// A fence of the chain. It is never deleted, so it counts nowhere.
    pub fn fence(&mut self, seq: u64) {
        if is_planted(Bug::DeletedFence) {
            self.logs.insert(seq);
        }
    }

    /// Installs a log object.
    pub fn install(&mut self, epoch: u64, seq: u64, entries: &[Entry]) {
        self.logs.insert(seq);
        for entry in entries {
            let location = match entry.value {
                EntryKind::Zeros => None,
                EntryKind::Here { block } => {
                    Some(Location { object: ObjectRef::log(seq), block: u64::from(block) })
                }
                EntryKind::Data { number, block } => {
                    let object = ObjectRef { epoch, number };
                    Some(Location { object, block: u64::from(block) })
                }
            };
            self.note_length(location, entry.len);
            self.set(entry.start, entry.len, location);
        }
    }

    fn set(&mut self, start: u64, len: u64, location: Option<Location>) {
        // The new blocks are counted first, so that an object that is overwritten with itself does
        // not die.
        if let Some(location) = location {
            *self.live.entry(location.object).or_default() += len;
        }
        let removed = match location {
            Some(location) => self.runs.insert(start, len, location),
            None => self.runs.remove(start, len),
        };
        if location.is_some() {
            self.mark(start, len);
        }
        for run in removed {
            self.mark(run.start, run.len);
            self.release(run.value.object, run.len);
        }
    }

    fn mark(&mut self, start: u64, len: u64) {
        self.changed.extend(start / SHARD_BLOCKS..=(start + len - 1) / SHARD_BLOCKS);
    }

    fn release(&mut self, object: ObjectRef, blocks: u64) {
        let Some(live) = self.live.get_mut(&object) else { return };
        *live -= blocks;
        if *live == 0 {
            self.live.remove(&object);
            self.lengths.remove(&object);
            if !object.is_log() {
                self.dead.push(object);
            }
        }
    }

    /// What repacking may do next, where the file system's log is in `ring`. An object that would
    /// stay anyhow is left.
    pub fn pass(
        &self,
        ring: &Range<u64>,
        dead_min: u64,
        stays: impl Fn(ObjectRef) -> bool + Clone,
    ) -> Option<Pass> {
        let live = self.live.iter().filter(|(object, _)| !stays(**object));
        choose(live, &self.lengths, &objects_in(&self.runs, ring), dead_min)
    }

    /// So many blocks are in these objects; 0: nobody can tell.
    pub fn learn(&mut self, lengths: &[(ObjectRef, u64)]) {
        let known = lengths.iter().filter(|(object, _)| self.live.contains_key(object));
        self.lengths.extend(known.copied());
    }

    /// So many blocks are at this location: the object is no shorter.
    fn note_length(&mut self, location: Option<Location>, blocks: u64) {
        if let Some(Location { object, block }) = location {
            let len = self.lengths.entry(object).or_default();
            *len = (*len).max(block + blocks);
        }
    }

    /// Blocks of a range that are at `from` are at `to` from now on. Returns how many.
    pub fn relocate(&mut self, start: u64, len: u64, from: Location, to: Option<Location>) -> u64 {
        let mut blocks = 0;
        let found: Vec<_> = self.runs.find(start, len).collect();
        for run in found {
            let skip = run.start - start;
            if run.value != from.after(skip) && !is_planted(Bug::RepackedAnyway) {
                continue;
            }
            let to = to.map(|to| to.after(skip));
            self.note_length(to, run.len);
            self.set(run.start, run.len, to);
            self.emptied |= from.object.is_log() && !self.live.contains_key(&from.object);
            blocks += run.len;
        }
        blocks
    }

    /// These were put, and those of them that no block refers to are of no use.
    pub fn drop_unused(&mut self, objects: &[ObjectRef]) {
        let unused = |object: &&ObjectRef| !self.live.contains_key(object);
        let unused: Vec<ObjectRef> = objects.iter().filter(unused).copied().collect();
        self.dead.extend(unused);
    }

    /// What lies in the range.
    pub fn find(&self, start: u64, len: u64) -> impl Iterator<Item = Run<Location>> + '_ {
        self.runs.find(start, len)
    }

    /// Shards that changed since this was asked last, with what they hold now.
    pub fn take_changed(&mut self) -> Vec<(u64, Vec<Run<Location>>)> {
        let shard = |shard| (shard, self.runs.find(shard * SHARD_BLOCKS, SHARD_BLOCKS).collect());
        std::mem::take(&mut self.changed).into_iter().map(shard).collect()
    }

    /// Objects that a root needs no more whose first log object is `first`: log objects ascending,
    /// then data objects. They are known no longer here.
    pub fn take_dead(&mut self, first: u64) -> Vec<ObjectRef> {
        let live = &self.live;
        let is_dead = |seq: &u64| !live.contains_key(&ObjectRef::log(*seq));
        let logs: Vec<u64> = self.logs.range(..first).copied().filter(is_dead).collect();
        for seq in &logs {
            self.logs.remove(seq);
        }
        let mut dead: Vec<_> = logs.into_iter().map(ObjectRef::log).collect();
        dead.append(&mut self.dead);
        self.emptied = false;
        dead
    }

    /// Whether [`Map::take_dead`] would return data objects, or what was repacked.
    pub fn has_dead(&self) -> bool {
        self.emptied || !self.dead.is_empty()
    }

    /// Whether the newest root lacks a change.
    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Behind the last block that is in use.
    pub fn end(&self) -> u64 {
        self.runs.end()
    }

    /// Blocks in use, and runs.
    pub fn size(&self) -> (u64, usize) {
        (self.live.values().sum(), self.runs.len())
    }
}

/// How far a sealed batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its objects are made.
    Building,
    /// Its data objects are sent; so many are not answered yet.
    Data { left: usize },
    /// Its log object is sent.
    Log,
    /// Its log object was answered. Log objects before it may not have been.
    Answered,
}

/// A batch that takes no more changes, and is sent.
pub(crate) struct Sealed {
    pub seq: u64,
    pub id: Id,
    pub runs: Arc<RunMap<Pending>>,
    /// Bytes of memory that its data takes.
    pub bytes: usize,
    pub stage: Stage,
    /// When it is built: its entries and the bytes of its log object.
    pub entries: Vec<Entry>,
    pub log: Arc<Vec<u8>>,
}

/// What is done once the state is not locked any more.
#[derive(Default)]
pub(crate) struct Effects {
    pub jobs: Vec<Job>,
    pub ends: Vec<(IoDone, io::Result<()>)>,
}

/// The root that is being written, and what the last one had.
#[derive(Default)]
pub(crate) struct Roots {
    /// The number and the id of the newest root.
    pub number: u64,
    pub id: Id,
    /// Where its shards are.
    pub shards: BTreeMap<u64, ObjectRef>,
    /// The root that is being written.
    pub writing: Option<Writing>,
    /// Told when no root is being written any more.
    pub waiters: Vec<IoDone>,
    /// So many wait to make or delete a snapshot.
    pub pinning: usize,
    /// Bytes and number of log objects that the newest root lacks.
    pub log_bytes: u64,
    pub log_objects: u64,
    /// When something died that the newest root refers to.
    pub died: Option<Duration>,
    /// The snapshots that the newest root has.
    pub pins: Vec<Pin>,
    /// What is dead and a snapshot may need.
    pub retained: Vec<Retained>,
    /// Names that the newest root does not need, and the one before it does.
    pub staged: Vec<String>,
    /// Names that none of the newest two roots needs, and since when. They are deleted in this
    /// order.
    pub condemned: VecDeque<(Duration, String)>,
    /// A collector is at work.
    pub collecting: bool,
    /// A sweep is at work.
    pub sweeping: bool,
    /// When the next one begins.
    pub sweep_due: Duration,
}

impl Roots {
    /// The last root of this owner is being written: what changed now would be behind it.
    pub fn is_closing(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| writing.root.state == RootState::Closed)
    }
}

/// The state of a device.
pub(crate) struct State {
    pub map: Map,
    /// Changes that are in memory only.
    pub open: Batch,
    /// The number that they will get, when a tick had found some, and since when.
    pub unsealed: (u64, Duration),
    /// Batches in order of their log objects. The first is not answered; all before it are
    /// installed.
    pub sealed: VecDeque<Sealed>,
    /// Number and predecessor of the next log object.
    pub next_seq: u64,
    pub last_id: Id,
    /// The first log object that is not installed, and the id before it.
    pub committed: u64,
    pub committed_id: Id,
    /// Writes that found no room, in order. They are not complete.
    pub waiting: VecDeque<Io>,
    /// Flushes, each with the log object that it waits for.
    pub flushes: VecDeque<(u64, IoDone)>,
    /// Bytes in memory that are not installed.
    pub unsent: usize,
    pub roots: Roots,
    /// Blocks of the ring that the file system's log is in.
    pub ring: Range<u64>,
    /// A pass of repacking is at work.
    pub repacking: bool,
    /// When the next one may begin.
    pub repack_due: Duration,
    /// Why nothing is acknowledged any more.
    pub failed: Option<ObjectError>,
}

impl State {
    /// Takes a change into memory.
    pub fn change(&mut self, start: u64, len: u64, value: Pending) {
        let before = self.open.bytes;
        self.open.insert(start, len, value);
        self.unsent = self.unsent + self.open.bytes - before;
    }

    /// Takes a write into memory.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let (start, len) = (offset / BLOCK as u64, (bytes.len() / BLOCK) as u64);
        self.change(start, len, Pending::Data { buffer: Arc::new(bytes.to_vec()), block: 0 });
    }

    /// The sealed batch of this number.
    pub fn sealed(&mut self, seq: u64) -> Option<&mut Sealed> {
        self.sealed.iter_mut().find(|sealed| sealed.seq == seq)
    }

    /// Nothing more is acknowledged: all that waits gets the error.
    pub fn fail(&mut self, error: &ObjectError, fx: &mut Effects) {
        self.failed.get_or_insert_with(|| error.clone());
        let flushes = self.flushes.drain(..).map(|(_, done)| done);
        let writes = self.waiting.drain(..).map(|io| match io {
            Io::Write { done, .. } | Io::Flush { done } => done,
        });
        fx.ends.extend(flushes.chain(writes).map(|done| (done, Err(error.clone().into()))));
        self.open = Batch::default();
        self.sealed.clear();
        self.unsent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(start: u64, len: u64) -> Entry {
        Entry { start, len, value: EntryKind::Here { block: 0 } }
    }

    #[test]
    fn an_object_is_dead_when_no_block_refers_to_it() {
        let mut map = Map::default();
        let data = EntryKind::Data { number: 5, block: 0 };
        map.install(7, 1, &[here(0, 4), Entry { start: 10, len: 4, value: data }]);
        map.install(7, 2, &[here(0, 3)]);
        assert_eq!(map.take_dead(3), []);
        map.install(7, 3, &[here(3, 1), Entry { start: 8, len: 9, value: EntryKind::Zeros }]);
        let data = ObjectRef { epoch: 7, number: 5 };
        assert!(map.has_dead());
        assert_eq!(map.take_dead(3), [ObjectRef::log(1), data]);
        assert_eq!(map.take_dead(3), [], "each is told once");
        assert_eq!(map.size().0, 4);
    }

    #[test]
    fn a_log_object_that_the_root_lacks_is_not_dead() {
        let mut map = Map::default();
        map.install(7, 1, &[here(0, 1)]);
        map.install(7, 2, &[here(0, 1)]);
        map.install(7, 3, &[here(0, 1)]);
        assert_eq!(map.take_dead(2), [ObjectRef::log(1)]);
        assert_eq!(map.take_dead(3), [ObjectRef::log(2)]);
    }

    #[test]
    fn shards_that_lost_or_got_blocks_have_changed() {
        let mut map = Map::default();
        map.install(7, 1, &[here(SHARD_BLOCKS - 1, 2)]);
        let changed = |map: &mut Map| -> Vec<_> {
            map.take_changed().into_iter().map(|(shard, runs)| (shard, runs.len())).collect()
        };
        assert_eq!(changed(&mut map), [(0, 1), (1, 1)]);
        map.install(7, 2, &[Entry { start: SHARD_BLOCKS, len: 9, value: EntryKind::Zeros }]);
        assert_eq!(changed(&mut map), [(1, 0)]);
    }
}
