//! Checkpoints: the durable layers are written to the home store, and the log's tail moves. Merges,
//! which keep the number of layers small.

use super::core::Core;
use crate::home::Renewal;
use crate::log::format::LOG_BLOCK;
use crate::view::layers::{Layer, Merge, View, merged};
use crate::{JournalError, Seq};
use ferry_env::activity;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Spare segments that the home store's map names, so that opening never lacks one.
pub const SPARE_RETAINED: usize = 2;
/// Durable layers are merged if there are more than this.
pub const LAYERS_MAX: usize = 6;
/// After a checkpoint that found no segment, the next is tried at the latest when this part (1/8)
/// of the log space that was free then is used: the changes since may have removed the keys that
/// needed the room.
const RETRY_FRACTION: u64 = 8;
/// Contexts in the log, at about which it is checkpointed if each is a request to read: programs
/// wait for these requests when a mount or a server goes on elsewhere.
const FAR_CONTEXTS_MAX: u64 = 2000;
/// Bytes in the home store for a changed key: the page that holds it is written anew.
const PAGE: u64 = 4096;

/// Why a checkpoint is made. This decides whether there is time to compact the home store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpoint {
    /// The log is short of space: callers wait for it, and for nothing else.
    Log,
    /// There is time. A compaction that follows the checkpoint is given up if the log becomes short
    /// of space.
    Calm,
    /// The volume is short of space.
    Volume,
    /// The owner wants the segments from this one on: the home store moves to others.
    Vacate(u32),
    /// The journal is being closed, and the store then marked clean.
    Close,
}

impl Core {
    /// Writes all durable changes to the home store and moves the log's tail.
    pub fn checkpoint(self: &Arc<Self>, why: Checkpoint) -> Result<(), JournalError> {
        if self.options.read_only {
            return Ok(());
        }
        let closing = why == Checkpoint::Close;
        let mut starved = self.checkpointing.lock();
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let (end, tail, layers) = {
            let pipe = self.pipe.lock();
            let mut head = self.head.write();
            head.barrier = pipe.end.seq;
            let layers = head.view.layers.iter().filter(|l| l.last <= pipe.end.seq).cloned();
            (pipe.end, pipe.tail.position, layers.collect::<Vec<_>>())
        };
        if end.position == tail && !closing && !matches!(why, Checkpoint::Vacate(_)) {
            return Ok(());
        }
        if !closing && starved.is_some_and(|retry_at| self.still_starved(end.position, retry_at)) {
            self.head.write().barrier = Seq(0);
            self.space.fail_waiters();
            return Err(JournalError::NoSpace);
        }
        let _inside = activity::enter(activity::Layer::Checkpoint);
        let started = self.env.clock.monotonic();
        // From now on the hold thread seals in time.
        self.hold_timer.arm(started);
        self.make_room_at_home(&layers);
        let written = self.home.checkpoint(Merge::all(&layers), end, closing);
        if let Err(error) = written.and_then(|()| self.show_home(end.seq)) {
            let free = self.space.free() / LOG_BLOCK as u64;
            if matches!(error, JournalError::Damaged { .. }) {
                tracing::error!(%error, "metadata cannot be written home; run `ferry fsck --repair` on the volume");
            }
            *starved = Some(end.position + (free / RETRY_FRACTION).max(1));
            return Err(self.checkpoint_failed(error));
        }
        *starved = None;
        self.discard_log(tail);
        {
            let mut pipe = self.pipe.lock();
            pipe.tail = end;
            pipe.advance_durable_point(end.seq);
        }
        if end.position > tail {
            let owed = self.owed.swap(0, Ordering::Relaxed);
            self.stats.tail_moves.fetch_add(1, Ordering::Relaxed);
            self.space.release((end.position - tail) * LOG_BLOCK as u64 - owed);
        }
        let keys = layers.iter().map(|l| l.changes.len() as u64).sum();
        self.stats.note_checkpoint(self.env.clock.monotonic().saturating_sub(started), keys);
        self.give_back();
        let shrunk = self.shrink_home(why);
        self.give_back();
        self.drive();
        shrunk
    }

    /// Gives back the space of records before `tail`, which neither the last state of the home
    /// store needs nor the one before it: a repair may go back to that one, and on by the log from
    /// `tail`.
    ///
    /// New records lie in the same blocks one turn of the ring later. While the bytes of a range
    /// are taken from the log's space, no record is given a position there.
    fn discard_log(&self, tail: u64) {
        if !self.disk.keeps_what_is_dead() {
            return;
        }
        let area = self.area();
        let from = {
            let pipe = self.pipe.lock();
            pipe.discarded.max(pipe.next.position.saturating_sub(area.blocks))
        };
        let blocks = tail.saturating_sub(from).min(self.space.free() / LOG_BLOCK as u64);
        let bytes = blocks * LOG_BLOCK as u64;
        if blocks == 0 || !self.space.try_take_for_log(bytes) {
            return;
        }
        let ranges = area.ranges(tail - blocks..tail);
        ranges.for_each(|(offset, len)| self.disk.discard_log(offset, len));
        self.space.release(bytes);
        self.pipe.lock().discarded = tail;
    }

    /// Gives segments that the home store no longer needs back to the owner. The caller excludes
    /// checkpoints.
    pub fn give_back(&self) {
        let file = self.home.file();
        let mut surplus = file.take_surplus(SPARE_RETAINED);
        surplus.extend(file.take_dropped());
        drop(file);
        surplus.extend(self.home.take_retired());
        if !surplus.is_empty() {
            self.client.release_home_segments(&surplus);
        }
    }

    /// Compacts a home store that is mostly free, if there is time, or moves it. After an error
    /// nothing more can be written.
    fn shrink_home(self: &Arc<Self>, why: Checkpoint) -> Result<(), JournalError> {
        if why == Checkpoint::Log {
            return Ok(());
        }
        let need = match why {
            Checkpoint::Vacate(end) => {
                let behind = self.home.file().segments().iter().any(|segment| *segment >= end);
                behind.then(|| self.home.renewal_need(SPARE_RETAINED))
            }
            _ => self.home.worth_renewing(SPARE_RETAINED),
        };
        let Some(need) = need else { return Ok(()) };
        let mut segments = Vec::with_capacity(need);
        while segments.len() < need {
            let Some(segment) = self.client.take_home_segment() else { break };
            segments.push(segment);
        }
        if segments.len() < need {
            self.client.release_home_segments(&segments);
            return match why {
                Checkpoint::Vacate(_) => Err(JournalError::NoSpace),
                _ => Ok(()),
            };
        }
        let view = self.head.read().view.home.clone();
        let closing = why == Checkpoint::Close;
        // A compaction may take seconds. Meanwhile the log is not emptied, and transactions would
        // wait.
        let go_on = || why != Checkpoint::Calm || !self.short_of_space();
        let renewed = self.home.renew(
            &view,
            &segments,
            SPARE_RETAINED,
            &self.client,
            Renewal { closing, go_on: &go_on },
        );
        drop(view);
        let renewed = renewed.and_then(|unused| self.show_home(Seq(0)).map(|()| unused));
        match renewed {
            Ok(unused) => {
                self.client.release_home_segments(&unused);
                Ok(())
            }
            Err(error) => {
                self.fail(error.clone());
                Err(error)
            }
        }
    }

    /// Whether another checkpoint would fail too: since one found no segment, the owner still has
    /// none, and too little was logged for the changes to have become fewer.
    fn still_starved(&self, position: u64, retry_at: u64) -> bool {
        if position >= retry_at {
            return false;
        }
        match self.client.take_home_segment() {
            Some(segment) => {
                let file = self.home.file();
                file.add_spare(segment, file.mapped_spare() < SPARE_RETAINED);
                false
            }
            None => true,
        }
    }

    /// Gives readers a view of the home store as it is now, and drops the layers up to `up_to`,
    /// which it contains.
    fn show_home(&self, up_to: Seq) -> Result<(), JournalError> {
        let home = self.home.view()?;
        let mut head = self.head.write();
        let layers = head.view.layers.iter().filter(|l| l.last > up_to).cloned().collect();
        head.view = Arc::new(View { layers, home });
        head.barrier = Seq(0);
        Ok(())
    }

    /// If only space is lacking, the log stays as it is; any other failure ends all writing.
    /// Readers continue on a new view (see `Core::renewed`).
    fn checkpoint_failed(self: &Arc<Self>, error: JournalError) -> JournalError {
        let full = matches!(error, JournalError::NoSpace);
        if !full {
            self.fail(error.clone());
        }
        if let Err(again) = self.home.reopen(!full).and_then(|()| self.show_home(Seq(0))) {
            self.fail(again.clone());
            return again;
        }
        if full {
            tracing::warn!("no segment is free for metadata: the log cannot be emptied");
            self.space.fail_waiters();
        }
        error
    }

    /// Takes enough spare segments for a checkpoint of `layers`, if the volume has them.
    fn make_room_at_home(&self, layers: &[Arc<Layer>]) {
        let file = self.home.file();
        let keys: u64 = layers.iter().map(|l| l.changes.len() as u64).sum();
        let bytes: u64 = layers
            .iter()
            .flat_map(|l| &l.changes)
            .map(|(k, c)| (k.len() + c.as_ref().map_or(0, |v| v.len())) as u64)
            .sum();
        let pages = (keys * PAGE).min(file.attached_bytes());
        let need = SPARE_RETAINED as u64 + (pages + 2 * bytes).div_ceil(file.unit_bytes());
        while (file.spare() as u64) < need {
            let Some(segment) = self.client.take_home_segment() else { return };
            file.add_spare(segment, file.mapped_spare() < SPARE_RETAINED);
        }
    }

    /// Merges durable layers if there are many, always the two neighbours that are smallest
    /// together: so the number of times that a key is copied grows only with the logarithm of the
    /// log's length. `small`: only merges of at most [`SMALL_MERGE`] keys.
    pub fn merge_layers(&self, small: bool) {
        let Some(_one_at_a_time) = self.merging.try_lock() else { return };
        loop {
            let pair = {
                let head = self.head.read();
                let durable = self.durable();
                let layers: Vec<_> =
                    head.view.layers.iter().filter(|l| l.last <= durable).collect();
                if layers.len() <= LAYERS_MAX {
                    return;
                }
                let barrier = head.barrier;
                let crosses = |a: &Layer, b: &Layer| b.last <= barrier && a.last > barrier;
                let size = |w: &[&Arc<Layer>]| w[0].changes.len() + w[1].changes.len();
                let best =
                    layers.windows(2).filter(|w| !crosses(w[0], w[1])).min_by_key(|w| size(w));
                best.filter(|w| !small || size(w) <= SMALL_MERGE)
                    .map(|w| [w[0].clone(), w[1].clone()])
            };
            let Some(pair) = pair else { return };
            let new = merged(&pair);
            self.head.write().replace(&pair, new);
        }
    }

    /// Bytes of log that a checkpoint could release now.
    pub fn releasable(&self) -> u64 {
        let pipe = self.pipe.lock();
        (pipe.end.position - pipe.tail.position) * LOG_BLOCK as u64
    }

    /// Whether it is time for a checkpoint: half of the log is used and a checkpoint would release
    /// much of that, or log space is short. A checkpoint that began only when space is short would
    /// often end after the log is full, with every change waiting. Or a recovery would ask a store
    /// for many records.
    pub fn fills_up(&self) -> bool {
        let log = self.log_bytes();
        let half = self.space.free() < log / 2 && self.releasable() >= log / 4;
        half || self.short_of_space() || self.is_slow_to_read()
    }

    fn is_slow_to_read(&self) -> bool {
        self.disk.reads_ahead() && {
            let pipe = self.pipe.lock();
            pipe.end.seq.0 - pipe.tail.seq.0 >= FAR_CONTEXTS_MAX
        }
    }

    /// Whether less than a quarter of the log is free, or a transaction waits for space.
    pub fn short_of_space(&self) -> bool {
        self.space.free() < self.log_bytes() / 4 || self.space.is_short()
    }

    /// Newest durable context.
    pub fn durable(&self) -> Seq {
        Seq(self.durable.load(Ordering::Acquire))
    }
}

/// Most keys that are merged on the thread of a completion.
const SMALL_MERGE: usize = 512;
