//! Space: what may be reserved, and the pool of free segments.
//!
//! One number says how many more blocks may be reserved: the *capacity* of the segments that the
//! host has really given us, less what is kept back, less what is used (live blocks, blocks
//! of unwritten extents, dirty blocks). It grows by taking segments from the host, before
//! anything is reserved in them. Kept back are
//! * the home reserve: only the home store takes from it, so that a checkpoint never lacks space;
//! * the cleaner's reserve: so that dead blocks can always be gathered into free segments;
//! * a share of everything, so that what has to be moved to gain a free segment stays bounded when
//!   the volume is full.

use crate::api::ReservationId;
use crate::keys::BLOCK;
use crate::space::free_blocks::{Claim, Free, ReservedSpace, Want};
use ferry_device::BlockDevice;
use ferry_env::planted::{Bug, is_planted};
use ferry_journal::{Geometry, Seq, home_unit_bytes};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Segments that only the cleaner takes.
pub(crate) const CLEANER_RESERVE: u32 = 2;
/// One segment for so many that data has is the home store's, or kept for it.
const HOME_SHARE: u32 = 16;
/// One segment in so many stays free for the cleaner to work with.
const SLACK_SHARE: u32 = 32;
/// At least so many of them do.
pub(crate) const SLACK_MIN: u32 = 2;
/// So many bytes of free segments are kept before the rest is given back to the host.
const KEEP_BYTES: u64 = 64 << 20;
/// What the host keeps when the volume asks for more.
pub(crate) const HOST_SLACK_BYTES: u64 = 16 << 20;

/// What a free segment is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// New data.
    Data,
    /// Data that the cleaner moves.
    Clean,
    /// The home store.
    Home,
}

/// The state of free segments.
pub(crate) struct Pool {
    /// Free, and the host has given their space.
    pub(crate) backed: BTreeSet<u32>,
    /// Free, without space of the host.
    pub(crate) bare: BTreeSet<u32>,
    /// Those of them of which the host may still hold something: all, when the volume is opened.
    pub(crate) stale: BTreeSet<u32>,
    /// Bytes of free segments that are kept beside the reserves: none once the volume is quiet or
    /// being closed.
    pub(crate) keep_bytes: u64,
    /// The home store's.
    pub(crate) home: BTreeSet<u32>,
    /// Segments that the host has given since the mount (or that a live block proves).
    pub(crate) given: BTreeSet<u32>,
    /// Segments with space of the host that are not the home store's, in use or free.
    pub(crate) backed_total: u32,
    /// Capacity that `Space::free` was computed from, in blocks.
    pub(crate) capacity: i64,
    /// Segments taken since the mount, but for the cleaner.
    taken: u64,
    /// Where the volume's parts are now.
    pub(crate) geometry: Geometry,
    /// While the volume is made smaller: the first segment that is to be given up. None from here
    /// on is taken, and none counts.
    pub(crate) limit: Option<u32>,
    /// Those of them that are free.
    pub(crate) withdrawn: BTreeSet<u32>,
}

impl Pool {
    /// Segments that may be used.
    pub(crate) fn segments(&self) -> u32 {
        self.limit.unwrap_or(self.geometry.segment_count)
    }
}

/// Space of a volume.
pub struct Space {
    pub(crate) dev: Arc<dyn BlockDevice>,
    /// Where the volume's parts were when it was opened: of use for what never changes.
    pub(crate) geometry: Geometry,
    /// Blocks that may still be reserved, and the threads that wait for some.
    pub(crate) free: Free,
    /// Blocks of extents, unwritten ones too: what of the used ones is not in memory only.
    mapped: AtomicI64,
    /// Blocks of the home reserve that overwriting may use.
    lent: AtomicI64,
    /// The newest durable point.
    durable_point: AtomicU64,
    /// Held over calls of the host; nothing but `pending` is locked inside it, and the journal
    /// calls [`Space::take`].
    pub(crate) pool: Mutex<Pool>,
    /// Free as soon as the durable point covers the context. Commits add to it, so it is held over
    /// nothing.
    pending: Mutex<VecDeque<(Seq, u32)>>,
    /// Reservations of clients. No other lock is taken inside it.
    pub(crate) reservations: Mutex<BTreeMap<ReservationId, Arc<ReservedSpace>>>,
    newest_reservation: AtomicU64,
}

/// Blocks of a segment that can hold data, the least that its summaries leave.
pub fn usable_blocks(geometry: &Geometry) -> i64 {
    let blocks = (geometry.segment_len / BLOCK) as i64;
    blocks - 2 - blocks / 128
}

/// Segments that a home store of `home` needs to write anew what it has.
fn copying(home: u32) -> u32 {
    2 + home / 4
}

impl Space {
    /// Knows nothing yet: nothing is free before [`Space::start`].
    pub fn new(dev: Arc<dyn BlockDevice>, geometry: Geometry) -> Self {
        let pool = Pool {
            backed: BTreeSet::new(),
            bare: BTreeSet::new(),
            stale: BTreeSet::new(),
            keep_bytes: KEEP_BYTES,
            home: BTreeSet::new(),
            given: BTreeSet::new(),
            backed_total: 0,
            capacity: 0,
            taken: 0,
            geometry,
            limit: None,
            withdrawn: BTreeSet::new(),
        };
        Self {
            dev,
            geometry,
            free: Free::new(0),
            mapped: AtomicI64::new(0),
            lent: AtomicI64::new(0),
            durable_point: AtomicU64::new(0),
            pool: Mutex::new(pool),
            pending: Mutex::default(),
            reservations: Mutex::default(),
            newest_reservation: AtomicU64::new(0),
        }
    }

    /// Sets what the journal knows: `used` segments hold data, `home` are the home store's;
    /// `blocks` are live or unwritten.
    pub fn start(&self, used: &BTreeSet<u32>, home: &[u32], blocks: u64, read_only: bool) {
        let mut pool = self.pool.lock();
        pool.home = home.iter().copied().collect();
        pool.bare = (0..self.geometry.segment_count)
            .filter(|s| !used.contains(s) && !pool.home.contains(s))
            .collect();
        pool.stale = pool.bare.clone();
        pool.backed_total = used.len() as u32;
        self.committed(0, blocks as i64);
        self.rebase(&mut pool);
        if !read_only {
            if self.keeps_what_is_dead() {
                self.discard_left(&pool);
                pool.stale.clear();
            }
            let reserve = self.home_reserve(&pool, pool.backed_total) + CLEANER_RESERVE + SLACK_MIN;
            self.back(&mut pool, reserve);
        }
    }

    pub(crate) fn segment_offset(&self, index: u32) -> u64 {
        self.geometry.segments_offset + u64::from(index) * self.geometry.segment_len
    }

    /// Segments kept for the home store where data has `total`: what one log can bring it, and room
    /// to copy what it has; and so many of them, with what it has already, that large files can be
    /// overwritten until each of their blocks has an extent of its own.
    pub(crate) fn home_reserve(&self, pool: &Pool, total: u32) -> u32 {
        self.reserve_beside(pool.home.len() as u32, total, pool.segments(), pool)
    }

    /// The same where the home store has `home` segments of `segments`.
    pub(crate) fn reserve_beside(&self, home: u32, total: u32, segments: u32, pool: &Pool) -> u32 {
        let log = (pool.geometry.log_len / home_unit_bytes(self.geometry.segment_len)) as u32;
        let share = (total / HOME_SHARE).saturating_sub(home);
        let wanted = (log + copying(home)).max(share);
        wanted.clamp(2, (segments / 4).max(2))
    }

    /// Free segments that must remain when one is taken for `need`.
    ///
    /// What the home store took of its reserve may be missing from what data has reserved: so far
    /// data may use the reserve too. What counts is what extents hold: dirty data that overwrites
    /// gives back as much as it takes, so the cleaner can always make room for it. The cleaner
    /// gives back more than it takes, so all but the last one are its own: it must go on however
    /// little is free.
    fn reserve_for(&self, pool: &Pool, need: Need) -> u32 {
        let lacking = (self.mapped.load(Ordering::Relaxed) - pool.capacity).max(0) as u64;
        let lacking = lacking.div_ceil(usable_blocks(&self.geometry) as u64) as u32;
        match need {
            Need::Data => {
                let reserve = self.home_reserve(pool, pool.backed_total) + CLEANER_RESERVE;
                reserve.saturating_sub(lacking).max(CLEANER_RESERVE + 1)
            }
            Need::Clean => 1,
            Need::Home => 0,
        }
    }

    /// Blocks that `total` segments can give.
    pub(crate) fn capacity(&self, total: u32, pool: &Pool) -> i64 {
        self.capacity_beside(pool.home.len() as u32, total, pool.segments(), pool)
    }

    /// The same where the home store has `home` segments of `segments`.
    pub(crate) fn capacity_beside(&self, home: u32, total: u32, segments: u32, pool: &Pool) -> i64 {
        let reserve = self.reserve_beside(home, total, segments, pool)
            + CLEANER_RESERVE
            + (total / SLACK_SHARE).max(SLACK_MIN);
        (i64::from(total) - i64::from(reserve)) * usable_blocks(&self.geometry)
    }

    /// Brings `free` in line with the segments that there are.
    pub(crate) fn rebase(&self, pool: &mut Pool) {
        let capacity = self.capacity(pool.backed_total, pool);
        self.free.add(capacity - pool.capacity);
        pool.capacity = capacity;
        let lent = self
            .home_reserve(pool, pool.backed_total)
            .saturating_sub(copying(pool.home.len() as u32));
        self.lent.store(i64::from(lent) * usable_blocks(&self.geometry), Ordering::Relaxed);
    }

    /// For an operation that needs space: to be asked before it changes anything.
    pub fn claim(&self) -> Claim<'_> {
        Claim::new(&self.free, None)
    }

    /// The same, for a change that draws from a reservation first.
    pub fn claim_from(&self, reserved_space: Option<Arc<ReservedSpace>>) -> Claim<'_> {
        Claim::new(&self.free, reserved_space)
    }

    /// An empty reservation.
    pub fn new_reservation(&self) -> (ReservationId, Arc<ReservedSpace>) {
        let id = ReservationId(self.newest_reservation.fetch_add(1, Ordering::Relaxed) + 1);
        let reserved_space = Arc::<ReservedSpace>::default();
        self.reservations.lock().insert(id, reserved_space.clone());
        (id, reserved_space)
    }

    /// Somebody waits for space.
    pub fn is_wanted(&self) -> bool {
        self.free.is_wanted()
    }

    /// Blocks for dirty data that lies over mapped blocks. They come back when it is written; only
    /// the map of the extents may grow by it. So they may be taken of what is kept for that: a
    /// volume that was filled can be overwritten.
    pub fn overwriting(&self, blocks: u64) -> Want {
        Want { blocks: blocks as i64, leave: -self.lent.load(Ordering::Relaxed) }
    }

    /// So much could be reserved now.
    pub fn has(&self, want: Want) -> bool {
        self.free.get() - want.blocks >= want.leave
    }

    /// Gives a reservation back, or counts what became dead.
    pub fn release(&self, blocks: u64) {
        self.free.add(blocks as i64);
    }

    /// A commit for which `held` blocks were held changed by `mapped` how many extents refer to,
    /// unwritten ones too.
    pub fn committed(&self, held: u64, mapped: i64) {
        self.mapped.fetch_add(mapped, Ordering::Relaxed);
        self.free.add(held as i64 - mapped);
    }

    /// So many blocks less are used than were held (negative: more).
    pub fn settle(&self, blocks: i64) {
        self.free.add(blocks);
    }

    /// There is room for things that grow the home store. What overwriting has borrowed comes back.
    pub fn admits(&self) -> bool {
        let borrowed = || {
            let lent = self.free.get() >= -self.lent.load(Ordering::Relaxed);
            lent && self.mapped.load(Ordering::Relaxed) <= self.pool.lock().capacity
        };
        self.grow_for(Want::new(0)) || borrowed()
    }

    /// The durable point covers contexts up to `seq`. Takes no lock.
    pub fn note_durable_point(&self, seq: Seq) {
        self.durable_point.fetch_max(seq.0, Ordering::Release);
    }

    /// There is a segment for this need.
    pub fn can_take(&self, need: Need) -> bool {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        let reserve = self.reserve_for(&pool, need);
        let missing = (reserve + 1).saturating_sub(pool.backed.len() as u32);
        missing == 0 || self.back(&mut pool, missing) == missing
    }

    /// Takes the free segment that stands first.
    pub fn take(&self, need: Need) -> Option<u32> {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        let reserve = self.reserve_for(&pool, need);
        if pool.backed.len() as u32 <= reserve {
            let missing = reserve + 1 - pool.backed.len() as u32;
            self.back(&mut pool, missing);
        }
        if pool.backed.len() as u32 <= reserve {
            return None;
        }
        let segment = pool.backed.pop_first()?;
        if need != Need::Clean {
            pool.taken += 1;
            pool.keep_bytes = KEEP_BYTES;
        }
        if need == Need::Home {
            pool.home.insert(segment);
            pool.backed_total -= 1;
            self.rebase(&mut pool);
        }
        Some(segment)
    }

    /// What was taken for data is not needed.
    pub fn give_back(&self, segment: u32) {
        let mut pool = self.pool.lock();
        if !self.withdraw(&mut pool, segment) {
            pool.backed.insert(segment);
        }
    }

    /// Keeps a segment that has become free from being used if it lies behind the limit.
    fn withdraw(&self, pool: &mut Pool, segment: u32) -> bool {
        let behind = pool.limit.is_some_and(|end| segment >= end);
        if behind {
            pool.withdrawn.insert(segment);
        }
        behind
    }

    /// The home store gave these back.
    pub fn release_home(&self, segments: &[u32]) {
        let mut pool = self.pool.lock();
        for segment in segments {
            if pool.home.remove(segment) {
                self.discard_freed(*segment);
                if !self.withdraw(&mut pool, *segment) {
                    pool.backed_total += 1;
                    pool.backed.insert(*segment);
                }
            }
        }
        self.rebase(&mut pool);
        self.trim(&mut pool);
    }

    /// `segment` holds nothing live since context `seq`.
    pub fn freed(&self, seq: Seq, segment: u32) {
        self.pending.lock().push_back((seq, segment));
    }

    /// Segments wait for the durable point.
    pub fn has_pending(&self) -> bool {
        !self.pending.lock().is_empty()
    }

    /// Newest context that a segment waits for.
    pub fn newest_pending(&self) -> Option<Seq> {
        self.pending.lock().back().map(|p| p.0)
    }

    /// Frees what the durable point covers; returns the number of free segments, and how many are
    /// kept for others than data.
    pub fn reap_now(&self) -> (u32, u32) {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        let free = (pool.backed.len() + pool.bare.len()) as u32;
        (free, self.reserve_for(&pool, Need::Data))
    }

    /// The next segment that waited for a context up to `durable_point`.
    fn next_durable(&self, durable_point: u64) -> Option<u32> {
        let durable_point = if is_planted(Bug::EarlyReuse) { u64::MAX } else { durable_point };
        let mut pending = self.pending.lock();
        pending.front().filter(|(seq, _)| seq.0 <= durable_point)?;
        pending.pop_front().map(|(_, segment)| segment)
    }

    pub(crate) fn reap(&self, pool: &mut Pool) {
        let durable_point = self.durable_point.load(Ordering::Acquire);
        let mut any = false;
        while let Some(segment) = self.next_durable(durable_point) {
            any = true;
            self.discard_freed(segment);
            if self.withdraw(pool, segment) {
                continue;
            }
            // Of a segment from an earlier mount parts may be holes of the host by now: ask for all
            // of it again.
            let (offset, len) = (self.segment_offset(segment), self.geometry.segment_len);
            if pool.given.contains(&segment) || self.dev.allocate(offset, len).is_ok() {
                pool.given.insert(segment);
                pool.backed.insert(segment);
            } else {
                pool.bare.insert(segment);
                pool.stale.insert(segment);
                pool.backed_total -= 1;
            }
        }
        if any {
            self.rebase(pool);
            self.trim(pool);
        }
    }

    /// Segments taken since the mount, but for the cleaner.
    pub fn taken(&self) -> u64 {
        self.pool.lock().taken
    }

    /// Where the volume's parts are now.
    pub fn geometry(&self) -> Geometry {
        self.pool.lock().geometry
    }

    /// Blocks that data has, dirty and reserved included.
    pub(crate) fn held(&self, pool: &Pool) -> i64 {
        pool.capacity - self.free.get()
    }

    /// For statfs, in bytes: total, free, available, what data has. `removed` blocks are on their
    /// way back, and the home store needs no more than `home_wanted` segments, if somebody asks for
    /// the others.
    pub fn totals(&self, removed: u64, home_wanted: u32) -> (u64, u64, u64, u64) {
        let pool = self.pool.lock();
        let (segments, usable) = (pool.segments(), usable_blocks(&self.geometry));
        let home_now = pool.home.len() as u32;
        let home = home_now.min(home_wanted);
        // What data has, dirty and reserved included, when all is back that is on its way.
        let held = (self.held(&pool) - removed as i64).max(0);
        let total = i64::from(segments) * usable;
        let free = (total - i64::from(home) * usable - held).max(0) as u64 * BLOCK;
        let most = self.capacity_beside(home, segments.saturating_sub(home), segments, &pool);
        let available = (most - held).max(0) as u64 * BLOCK;
        let backed =
            (pool.capacity - held + i64::from(home_now - home) * usable).max(0) as u64 * BLOCK;
        let host = self.dev.host_free().map_or(u64::MAX, |h| h.saturating_sub(HOST_SLACK_BYTES));
        let available = available.min(free).min(backed.saturating_add(host));
        (total as u64 * BLOCK, free, available, held as u64 * BLOCK)
    }

    /// What may still be reserved, and what could be if nothing were used.
    #[cfg(test)]
    pub fn audit(&self) -> (i64, i64) {
        let pool = self.pool.lock();
        (self.free.get(), pool.capacity)
    }

    /// Free segments (with and without space of the host), waiting ones, the home store's.
    pub fn counts(&self) -> (u32, u32, u32, u32) {
        let pool = self.pool.lock();
        let len = |n: usize| n as u32;
        (
            len(pool.backed.len()),
            len(pool.bare.len()),
            len(self.pending.lock().len()),
            len(pool.home.len()),
        )
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pool = self.pool.lock();
        f.debug_struct("Space")
            .field("free_blocks", &self.free.get())
            .field("mapped_blocks", &self.mapped)
            .field("capacity_blocks", &pool.capacity)
            .field("segments", &pool.backed_total)
            .field("home_reserve", &self.home_reserve(&pool, pool.backed_total))
            .field("reserve_from_data", &self.reserve_for(&pool, Need::Data))
            .finish_non_exhaustive()
    }
}
