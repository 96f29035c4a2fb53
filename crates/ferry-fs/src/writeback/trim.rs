//! Giving free space back to the host: soon after the volume has become quiet, at unmount, and when
//! somebody asks for it.
//!
//! Only what lies in the pool of free segments is given back. A segment comes there when its being
//! free is durable (`space.rs`), and the thread that gives it back holds the pool's lock, so nobody
//! takes it meanwhile.

use crate::error::FsError;
use crate::keys::BLOCK;
use crate::store::data_store::DataStore;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// If no segment was taken for so long, those to spare go back.
const QUIET_TIME: Duration = Duration::from_secs(20);
/// Calls of the host in one round of the background thread, at most.
const CALLS_AT_ONCE: u32 = 64;
/// At unmount no further segment is given back after this time.
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(5);

/// Dead blocks that may lie about in a quiet volume beside as many as are live: 16 MiB.
const DEAD_BLOCKS_MAX: u64 = (16 << 20) / BLOCK;

/// What the background thread remembers from one round to the next.
#[derive(Default)]
pub struct Quiet {
    /// Segments that had been taken, live and dead blocks; and since when nobody but this thread
    /// has changed that.
    seen: (u64, (u64, u64)),
    since: Duration,
    /// Nothing is left to give back.
    done: bool,
}

impl DataStore {
    /// The background thread's share: once nothing was written or removed for some time, gathers
    /// what is live in mostly dead segments, and gives back what is to spare.
    pub(crate) fn give_back_when_quiet(
        &self,
        quiet: &mut Quiet,
        now: Duration,
    ) -> Result<(), FsError> {
        let seen = || (self.space.taken(), self.table.live_and_dead());
        if quiet.seen != seen() {
            *quiet = Quiet { seen: seen(), since: now, done: false };
        }
        if quiet.done || !self.space.is_hosted() || now.saturating_sub(quiet.since) < QUIET_TIME {
            return Ok(());
        }
        let cleaned = || self.counters.cleaned_segments.load(Ordering::Relaxed);
        let before = cleaned();
        self.tidy_beyond(DEAD_BLOCKS_MAX)?;
        self.space.keep_no_spare();
        let (_, all) = self.give_back(|calls| calls < CALLS_AT_ONCE);
        quiet.done = all && cleaned() == before && !self.space.has_pending();
        quiet.seen = seen();
        Ok(())
    }

    /// At unmount, when everything is written back.
    pub(crate) fn give_back_at_unmount(&self) -> Result<(), FsError> {
        if !self.space.is_hosted() && !self.space.keeps_what_is_dead() {
            return Ok(());
        }
        if self.space.has_pending() {
            self.force_durable_point(&*self.journal()?)?;
        }
        let end = self.env.clock.monotonic() + UNMOUNT_TIME_MAX;
        self.space.keep_no_spare();
        self.give_back(|_| self.env.clock.monotonic() < end);
        Ok(())
    }

    /// Gives back all that is free, but for the reserves. Returns the bytes.
    pub fn trim(&self) -> Result<u64, FsError> {
        self.writable()?;
        self.tidy_beyond(DEAD_BLOCKS_MAX)?;
        if self.space.has_pending() {
            self.force_durable_point(&*self.journal()?)?;
        }
        self.space.keep_no_spare();
        let (segments, _) = self.give_back(|_| self.writable().is_ok());
        Ok(segments * self.geometry().segment_len)
    }

    /// Gives back while `go_on` says so of the calls made. Returns how many segments, and whether
    /// none are left.
    fn give_back(&self, go_on: impl Fn(u32) -> bool) -> (u64, bool) {
        let (mut segments, mut calls) = (0, 0);
        while go_on(calls) {
            match self.space.trim_some() {
                Ok(Some(some)) => segments += u64::from(some),
                Ok(None) => return (segments, true),
                Err(error) => {
                    tracing::warn!(%error, "the host does not take back the space of free segments");
                    return (segments, true);
                }
            }
            calls += 1;
        }
        (segments, false)
    }
}
