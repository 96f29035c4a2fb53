//! Segments that the volume gets when it is made longer, and gives up when it is made shorter.
//!
//! While it is made shorter there is a limit. Segments from it on count for nothing: none is taken,
//! and one that becomes free is withdrawn. What the others can hold is all that may be reserved, so
//! there is room for all that lies behind the limit. When all are withdrawn, the volume can end
//! there.

use crate::space::pool::{CLEANER_RESERVE, Pool, SLACK_MIN, Space};
use crate::volume::SEGMENTS_MIN;
use ferry_journal::Geometry;

/// Why no limit was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoLimit {
    /// What is used needs so many segments.
    Needs(u32),
    /// What the volume lies on has no space for what would move.
    HostFull,
}

impl Space {
    /// The volume has become longer, and its parts are where `new` says.
    pub fn extend(&self, new: &Geometry) {
        let mut pool = self.pool.lock();
        let added = pool.geometry.segment_count..new.segment_count;
        pool.bare.extend(added.clone());
        // A device may hold something there.
        pool.stale.extend(added);
        pool.geometry = *new;
        self.rebase(&mut pool);
        drop(pool);
        self.grow();
    }

    /// How many free segments before `end` are lacking until a limit may be set there: what moves
    /// needs room to move to, and the home store room to write what the log brings it.
    pub fn lacking_before(&self, end: u32) -> Result<u32, NoLimit> {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        self.fits(&pool, end)?;
        let free = pool.backed.range(..end).chain(pool.bare.range(..end)).count() as u32;
        let home = pool.home.len() as u32;
        let wanted = self.reserve_beside(home, end.saturating_sub(home), end, &pool)
            + CLEANER_RESERVE
            + SLACK_MIN;
        Ok(wanted.saturating_sub(free))
    }

    fn fits(&self, pool: &Pool, end: u32) -> Result<(), NoLimit> {
        let fewest = self.fewest(pool);
        if end < fewest { Err(NoLimit::Needs(fewest)) } else { Ok(()) }
    }

    /// Uses no segment from `end` on any more.
    pub fn set_limit(&self, end: u32) -> Result<(), NoLimit> {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        self.fits(&pool, end)?;
        pool.backed_total -= self.used_behind(&pool, end) + pool.backed.range(end..).count() as u32;
        pool.limit = Some(end);
        let (backed, bare) = (pool.backed.split_off(&end), pool.bare.split_off(&end));
        pool.withdrawn = backed.into_iter().chain(bare).collect();
        pool.stale.split_off(&end);
        pool.given.split_off(&end);
        self.rebase(&mut pool);
        if self.free.get() >= 0 || self.back_enough(&mut pool) {
            return Ok(());
        }
        self.lift(&mut pool);
        Err(NoLimit::HostFull)
    }

    /// The volume stays as long as it is.
    pub fn lift_limit(&self) {
        self.lift(&mut self.pool.lock());
    }

    fn lift(&self, pool: &mut Pool) {
        let Some(end) = pool.limit.take() else { return };
        let free = std::mem::take(&mut pool.withdrawn);
        pool.bare.extend(&free);
        pool.stale.extend(&free);
        pool.backed_total += self.used_behind(pool, end);
        self.rebase(pool);
    }

    /// Segments from `end` on that are not free, and not the home store's.
    fn used_behind(&self, pool: &Pool, end: u32) -> u32 {
        let others = [&pool.backed, &pool.bare, &pool.home, &pool.withdrawn];
        let known: usize = others.iter().map(|set| set.range(end..).count()).sum();
        pool.geometry.segment_count - end - known as u32
    }

    /// Segments from `end` on that are not free.
    pub fn used_from(&self, end: u32) -> u32 {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        self.used_behind(&pool, end) + pool.home.range(end..).count() as u32
    }

    /// The volume ends at the limit, and its parts are where `new` says.
    pub fn cut(&self, new: &Geometry) {
        let mut pool = self.pool.lock();
        assert_eq!(pool.limit, Some(new.segment_count), "the limit is where the volume is to end");
        pool.limit = None;
        pool.withdrawn.clear();
        pool.geometry = *new;
        self.rebase(&mut pool);
    }

    /// The fewest segments that can hold what is used.
    pub fn fewest_segments(&self) -> u32 {
        let mut pool = self.pool.lock();
        self.reap(&mut pool);
        self.fewest(&pool)
    }

    fn fewest(&self, pool: &Pool) -> u32 {
        let (home, held) = (pool.home.len() as u32, self.held(pool));
        let holds = |segments: &u32| {
            self.capacity_beside(home, segments.saturating_sub(home), *segments, pool) >= held
        };
        let all = pool.geometry.segment_count;
        (SEGMENTS_MIN..all).find(holds).unwrap_or(all)
    }
}
