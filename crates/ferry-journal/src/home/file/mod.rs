//! The database's file: a virtual length, made of units that are each attached to a segment on
//! their first write.
//!
//! What redb may rely on, and why it holds:
//! * A length that was synced is there after a crash: [`HomeFile::sync`] writes the map, then
//!   flushes.
//! * A unit attached since the last sync is in the map that the same sync writes. redb's commit
//!   syncs twice, and only the second sync makes the new pages count, so a map and the pages under
//!   it may become durable in any order.
//! * A segment is given back only when neither slot on the device names it any more.
//!
//! Here is the file's life: opening, publishing, syncing. `io` reads and writes bytes, `spare`
//! keeps the segments, `user` is what redb calls, `verify` reads everything without the caches.

use super::blocks::Pages;
use super::links::Links;
use super::map::{HomeMap, Slots};
use super::state::HashKey;
use super::tree::Header;
use super::unit::header;
use super::write_buffer::WriteBuffer;
use crate::disk::{Disk, io_error};
use crate::{Geometry, JournalClient, JournalError};
use ferry_device::{AlignedBuf, BLOCK_SIZE};
use ferry_env::planted::{Bug, is_planted};
use parking_lot::{Mutex, RwLock};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

mod io;
mod spare;
mod user;
pub mod verify;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The file that the database lives in.
pub struct HomeFile {
    disk: Arc<Disk>,
    /// Changed by [`HomeFile::adopt`] alone, while nobody writes the map.
    geo: RwLock<Geometry>,
    state: RwLock<FileState>,
    pages: Pages,
    /// Written, and not yet handed to the device.
    buffer: WriteBuffer,
    /// What pages say of those below them.
    links: Links,
    /// Held over a sync, so that the slots are written one at a time; readers do not want it.
    syncing: Mutex<()>,
    /// Users of an older epoch have failed and write no more. Read-locked while one writes, and any
    /// thread that reads may.
    epoch: RwLock<u64>,
    /// A write found no segment to attach.
    lacked_space: AtomicBool,
    /// Another file has taken its place.
    retired: AtomicBool,
    /// A reader of a branch is going to read all pages that it names.
    in_order: AtomicBool,
    /// Gives more segments; unset while the journal is being opened.
    owner: OnceLock<Arc<dyn JournalClient>>,
}

/// How a file is opened.
#[derive(Clone, Copy, Default)]
pub struct Opening {
    /// Nothing reaches the device.
    pub read_only: bool,
    /// All keys are going to be read in order: pages are read ahead.
    pub in_order: bool,
}

struct FileState {
    map: HomeMap,
    /// The map stays in memory until [`HomeFile::publish`].
    unpublished: bool,
    /// The map differs from what the newer slot holds.
    changed: bool,
    /// The slot `next_slot` differs from the other one.
    other_behind: bool,
    /// The slot that the next change goes to: never the only one that is whole and newest.
    next_slot: u64,
    /// Segments that a slot on the device may still name; free once none does.
    dropped: Vec<u32>,
    /// Spare segments that no slot names: only in memory.
    floating: Vec<u32>,
    /// Instead of the device, where nothing may be written: blocks by their number in the file.
    in_memory: Option<HashMap<u64, Box<[u8]>>>,
}

impl HomeFile {
    /// Lays out the map of an empty file that owns `segments`.
    pub fn format(
        disk: &Arc<Disk>,
        geo: &Geometry,
        segments: &[u32],
    ) -> Result<Arc<Self>, JournalError> {
        let map = HomeMap { generation: 1, spare: segments.to_vec(), ..HomeMap::default() };
        let file = Arc::new(Self::with_map(disk, geo, map, false, None));
        let buf = file.state.read().map.encode(geo);
        for slot in 0..2 {
            disk.write(HomeMap::slot_offset(geo, slot), &buf).map_err(io_error("home map"))?;
        }
        disk.flush_wait().map_err(io_error("home map"))?;
        Ok(file)
    }

    /// Opens the file.
    pub fn open(
        disk: &Arc<Disk>,
        geo: &Geometry,
        opening: Opening,
    ) -> Result<Arc<Self>, JournalError> {
        let slots = HomeMap::read(disk, geo)?;
        if !opening.read_only && !is_planted(Bug::StaleRestMark) {
            HomeMap::mark(disk, geo, false)?;
        }
        let file = Self::with_map(disk, geo, slots.map, opening.read_only, slots.behind);
        Ok(Arc::new(Self { in_order: AtomicBool::new(opening.in_order), ..file }))
    }

    /// The same file as of its newest map, for reading past damage: nothing reaches the device.
    pub fn salvage(&self) -> Arc<Self> {
        let map = self.state.read().map.clone();
        let file = Self::with_map(&self.disk, &self.geo(), map, true, None);
        Arc::new(Self { in_order: AtomicBool::new(true), ..file })
    }

    /// The volume's secret.
    pub fn hash_key(&self) -> HashKey {
        self.geo.read().hash_key
    }

    /// Where the volume's parts are.
    fn geo(&self) -> Geometry {
        *self.geo.read()
    }

    /// The database's header, if there is one.
    pub fn header(&self) -> Result<Option<AlignedBuf>, JournalError> {
        self.pages
            .settle_header(&|block| Header::decode(block).and_then(|header| header.commit(self)))
    }

    /// Blocks of the file that have a segment, unit by unit.
    pub fn blocks(&self) -> Vec<Range<u64>> {
        let state = self.state.read();
        let each = self.unit_bytes() / BLOCK;
        let attached = (0..).zip(&state.map.units).filter(|(_, segment)| segment.is_some());
        attached
            .map(|(unit, _)| unit * each..((unit + 1) * each).min(state.map.len / BLOCK))
            .collect()
    }

    /// An empty file in `segments` that no map on the device knows, to take the place of the one
    /// that `old` maps.
    pub fn unpublished(
        disk: &Arc<Disk>,
        geo: &Geometry,
        segments: &[u32],
        old: Option<&Self>,
    ) -> Arc<Self> {
        let (generation, next_slot) = old.map_or((0, 0), |old| {
            let old = old.state.read();
            (old.map.generation, old.next_slot)
        });
        let map = HomeMap { generation, spare: segments.to_vec(), ..HomeMap::default() };
        let file = Self::with_map(disk, geo, map, false, None);
        {
            let mut state = file.state.write();
            (state.unpublished, state.next_slot) = (true, next_slot);
        }
        Arc::new(file)
    }

    /// An empty file in `segments` that is to take this one's place.
    pub fn successor(&self, segments: &[u32]) -> Arc<Self> {
        let new = Self::unpublished(&self.disk, &self.geo(), segments, Some(self));
        new.read_in_order(self.in_order.load(Ordering::Relaxed));
        new
    }

    /// Makes this file the one that the map on the device names, by one slot; then the other one
    /// follows. `keep` spare segments stay; the others, which no map has named, are returned.
    pub fn publish(&self, keep: usize) -> Result<Vec<u32>, JournalError> {
        // What the map will name is there before it.
        self.sync().map_err(error_of)?;
        let surplus = {
            let mut state = self.state.write();
            (state.unpublished, state.changed) = (false, true);
            let retained = state.map.spare.len().min(keep);
            state.map.spare.split_off(retained)
        };
        self.settle()?;
        Ok(surplus)
    }

    /// Whether somebody goes through all keys in order from now on; whether somebody did before.
    pub fn read_in_order(&self, yes: bool) -> bool {
        self.in_order.swap(yes, Ordering::Relaxed)
    }

    /// Another file has taken this one's place: it can be read as long as somebody has it, and is
    /// written no more.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.pages.end_writing();
        self.state.write().in_memory = Some(HashMap::new());
    }

    /// Sees to it, before a database is opened, that both copies of its header are the same, and
    /// that it makes sense.
    pub fn check_header(self: &Arc<Self>) -> Result<(), JournalError> {
        let Some(block) = self.header()? else {
            let new = self.state.read().map.len == 0;
            return if new { Ok(()) } else { Err(self.damaged(0, "there is no database")) };
        };
        let senseless = header::senseless(&block, self.state.read().map.len);
        self.learn_links(&block);
        senseless.map_or(Ok(()), |detail| Err(self.damaged(0, detail)))
    }

    fn with_map(
        disk: &Arc<Disk>,
        geo: &Geometry,
        map: HomeMap,
        read_only: bool,
        behind: Option<u64>,
    ) -> Self {
        let pages = Pages::new(disk, geo, read_only);
        pages.set_first(map.first());
        let state = FileState {
            map,
            unpublished: false,
            changed: false,
            other_behind: behind.is_some(),
            next_slot: behind.unwrap_or(0),
            dropped: Vec::new(),
            floating: Vec::new(),
            in_memory: read_only.then(HashMap::new),
        };
        Self {
            disk: disk.clone(),
            geo: RwLock::new(*geo),
            pages,
            state: RwLock::new(state),
            buffer: WriteBuffer::default(),
            links: Links::default(),
            syncing: Mutex::new(()),
            epoch: RwLock::new(0),
            lacked_space: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            in_order: AtomicBool::new(false),
            owner: OnceLock::new(),
        }
    }

    /// From now on `owner` is asked when no spare segment is left.
    pub fn set_owner(&self, owner: Arc<dyn JournalClient>) {
        assert!(self.owner.set(owner).is_ok(), "a journal has one owner");
    }

    /// From now on all present users fail; none is writing when this returns.
    pub fn detach_users(&self) {
        *self.epoch.write() += 1;
    }

    /// Takes the map from the device again, after a failed database. What the lost one had attached
    /// becomes spare.
    pub fn reload(&self, read_only: bool) -> Result<(), JournalError> {
        self.buffer.clear();
        self.links.clear();
        let Slots { map, behind, .. } = HomeMap::read(&self.disk, &self.geo())?;
        let mut state = self.state.write();
        let named: HashSet<u32> = map.segments().chain(state.dropped.iter().copied()).collect();
        let floating = std::mem::take(&mut state.floating);
        let owned: Vec<u32> = state.map.segments().chain(floating).collect();
        state.floating = owned.into_iter().filter(|s| !named.contains(s)).collect();
        // What the lost database cut off is in use again, if no map without it had reached the
        // device.
        let in_use: HashSet<u32> = map.segments().collect();
        state.dropped.retain(|s| !in_use.contains(s));
        self.pages.renew(map.first(), read_only);
        state.map = map;
        state.changed = false;
        state.other_behind = behind.is_some();
        state.next_slot = behind.unwrap_or(0);
        if read_only {
            state.in_memory = Some(HashMap::new());
        }
        drop(state);
        self.lacked_space.store(false, Ordering::Release);
        Ok(())
    }

    /// A transaction begins. What a thread that only reads could not write before, for lack of
    /// space, is of no account.
    pub fn begin(&self) {
        self.lacked_space.store(false, Ordering::Release);
    }

    /// Tells "no space" from other failures of the database: redb does not hand our reason on.
    pub fn explain(&self, error: JournalError) -> JournalError {
        if self.lacked_space.load(Ordering::Acquire) { JournalError::NoSpace } else { error }
    }

    /// Blocks that were found damaged in one of their two copies.
    pub fn healed(&self) -> u64 {
        self.pages.healed()
    }

    /// Where they were, of those that were needed.
    pub fn bad_copies(&self) -> Vec<u64> {
        self.pages.bad_copies()
    }

    /// Brings both slots up to date on the device.
    pub fn settle(&self) -> Result<(), JournalError> {
        loop {
            self.sync().map_err(io_error("home map"))?;
            let state = self.state.read();
            if state.in_memory.is_some() || !(state.changed || state.other_behind) {
                return Ok(());
            }
        }
    }

    /// Brings both slots up to date, and marks the file as at rest: nothing is written to it any
    /// more.
    pub fn come_to_rest(&self) -> Result<(), JournalError> {
        self.settle()?;
        if self.state.read().in_memory.is_some() {
            return Ok(());
        }
        // What the mark says is durable before it.
        self.disk.flush_wait().map_err(io_error("home map"))?;
        HomeMap::mark(&self.disk, &self.geo(), true)
    }

    /// Sees to it that the volume's parts may be where `to` says, or where they are: slots that
    /// stay say that there are as many segments as in either case, slots that move are written in
    /// their new places, too. No map may be written until [`HomeFile::adopt`].
    pub fn prepare(&self, to: &Geometry) -> Result<(), JournalError> {
        self.settle()?;
        let from = self.geo();
        if (from.home_map_offsets, from.home_map_len) == (to.home_map_offsets, to.home_map_len) {
            self.geo.write().segment_count = from.segment_count.max(to.segment_count);
            self.state.write().changed = true;
            return self.settle();
        }
        let buf = self.state.read().map.encode(to);
        for slot in 0..2 {
            self.disk.write(HomeMap::slot_offset(to, slot), &buf).map_err(io_error("home map"))?;
        }
        self.disk.flush_wait().map_err(io_error("home map"))
    }

    /// From now on the volume's parts are where `to` says.
    pub fn adopt(&self, to: &Geometry) {
        *self.geo.write() = *to;
    }

    /// Nothing was written to it since it came to rest, as the map said when it was read: both
    /// copies of everything are the same, but for damage.
    pub fn is_at_rest(&self) -> bool {
        self.state.read().map.at_rest
    }

    fn sync(&self) -> std::io::Result<()> {
        let _one_at_a_time = self.syncing.lock();
        let units: Vec<u32> = self.state.read().map.units.iter().flatten().copied().collect();
        self.drain(Some(&units))?;
        let Some(write) = self.next_map_write() else { return Ok(()) };
        if let Some((slot, buf)) = &write {
            self.disk.write(HomeMap::slot_offset(&self.geo(), *slot), buf)?;
        }
        if is_planted(Bug::UnflushedRenewal) && self.state.read().unpublished {
            return Ok(());
        }
        self.disk.flush_wait()?;
        if let Some((slot, _)) = write {
            self.state.write().next_slot = 1 - slot;
        }
        Ok(())
    }

    fn drain(&self, sums_of: Option<&[u32]>) -> std::io::Result<()> {
        let sums_of = sums_of.filter(|_| self.state.read().in_memory.is_none());
        self.buffer.drain(|runs| self.pages.write(runs, sums_of)).map_err(|e| match e {
            JournalError::Io { source, .. } => source.raw_os_error().map_or_else(
                || std::io::Error::from(source.kind()),
                std::io::Error::from_raw_os_error,
            ),
            other => std::io::Error::other(other),
        })
    }

    /// The slot to write in this sync and its bytes, if the map changed or the other slot is
    /// behind; `None` if nothing may be written at all.
    #[expect(
        clippy::option_option,
        reason = "no sync at all, a sync without a map, a sync with one"
    )]
    fn next_map_write(&self) -> Option<Option<(u64, AlignedBuf)>> {
        let mut state = self.state.write();
        if state.in_memory.is_some() {
            return None;
        }
        if state.unpublished || !state.changed && !state.other_behind {
            return Some(None);
        }
        if state.changed {
            state.map.generation += 1;
        }
        // After a change the other slot is behind; after bringing it up to date, none is.
        state.other_behind = std::mem::take(&mut state.changed);
        Some(Some((state.next_slot, state.map.encode(&self.geo()))))
    }
}

impl FileState {
    /// Sees to it that `unit` has a segment, if it needs one; `false` if none is spare.
    fn attach(&mut self, unit: usize, pages: &Pages) -> bool {
        if self.in_memory.is_some() || matches!(self.map.units.get(unit), Some(Some(_))) {
            return true;
        }
        // Those that only memory knows first: the map keeps a few for the next opening.
        let Some(segment) = self.floating.pop().or_else(|| self.map.spare.pop()) else {
            return false;
        };
        if self.map.units.len() <= unit {
            self.map.units.resize(unit + 1, None);
        }
        pages.begin(segment);
        self.map.units[unit] = Some(segment);
        pages.set_first(self.map.first());
        self.changed = true;
        true
    }
}

/// Our error within one of the database's.
pub fn error_of(error: std::io::Error) -> JournalError {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<JournalError>()) {
        Some(ours) => ours.clone(),
        None => JournalError::Io { what: "home store", source: Arc::new(error) },
    }
}
