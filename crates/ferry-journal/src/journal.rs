//! The journal as its owner sees it.

use crate::commit::policy::{Caller, FlushPolicy};
use crate::commit::stats::JournalStats;
use crate::completion::Wait;
use crate::disk::{Disk, io_error};
use crate::engine::checkpoint::{Checkpoint, SPARE_RETAINED};
use crate::engine::core::Core;
use crate::engine::options::JournalOptions;
use crate::home::{Home, HomeView, Opening};
use crate::log::format::{LOG_BLOCK, LOG_MIN};
use crate::log::recovery::{replay, tell};
use crate::log::ring::{LogArea, lay_out};
use crate::log::settle::settle;
use crate::log::take::take;
use crate::transaction::Transaction;
use crate::types::{Changes, Point};
use crate::view::layers::View;
use crate::view::salvage::LostKeys;
use crate::{Completion, Credits, Geometry, JournalClient, JournalError, Recovered, Seq, Value};
use ferry_device::BlockDevice;
use ferry_env::Env;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// Transactions find room without waiting while this part of the log is free for them.
const SHORT_FRACTION: u64 = 16;

/// An open journal.
pub struct Journal {
    pub(crate) core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// What the first [`Journal::close`] came to.
    outcome: Mutex<Option<Result<(), JournalError>>>,
}

impl Journal {
    /// Lays out an empty journal: writes the whole log once, an empty home store and both map
    /// slots, then flushes. `first_segments` are given to the home store.
    pub fn format(
        dev: &Arc<dyn BlockDevice>,
        geo: &Geometry,
        first_segments: &[u32],
        env: &Env,
    ) -> Result<(), JournalError> {
        assert!(
            geo.log_len >= LOG_MIN && geo.log_len.is_multiple_of(LOG_BLOCK as u64),
            "the log is whole blocks"
        );
        let disk = Arc::new(Disk::new(dev.clone()));
        lay_out(&disk, geo.log_offset, geo.log_len)?;
        let start = Point { seq: Seq(0), position: 0, id: env.entropy.next_u64() };
        Home::format(&disk, geo, first_segments, start)?;
        disk.flush_wait().map_err(io_error("log"))
    }

    /// Opens and recovers.
    pub fn open(
        dev: Arc<dyn BlockDevice>,
        geo: Geometry,
        mut options: JournalOptions,
        env: Env,
        client: Arc<dyn JournalClient>,
    ) -> Result<(Self, Recovered), JournalError> {
        let disk = Arc::new(Disk::new(dev));
        let area = LogArea::new(&geo);
        disk.note_ring(geo.log_offset, geo.log_len);
        let opening = Opening { read_only: options.read_only, in_order: options.reads_all };
        let (home, state) = Home::open(&disk, &geo, options.home_cache_bytes, opening)?;
        let at_rest = home.file().is_at_rest();
        let accept = options.accept_damage;
        let mut replayed = replay(&disk, &area, state.point, at_rest, accept, &mut tell(&env))?;
        let left = options.left.take();
        let taken = take(&disk, &area, &mut replayed, state.point, left.as_deref(), &env)?;
        // If somebody else has written the log since, no id is noted there: the log is theirs for
        // the next process, too.
        options.left = left.filter(|_| taken.is_ours);
        let recovered = Recovered {
            contexts: replayed.contexts,
            bytes: replayed.bytes,
            unclean: !state.clean || replayed.records > 0,
            at_rest,
            last: replayed.end.seq,
            logged: taken.logged,
            is_ours: taken.is_ours,
            requests: taken.requests,
            home_segments: home.file().segments(),
            log_damage: replayed.damage.clone(),
        };
        if !options.read_only {
            let left = options.left.as_deref();
            settle(&disk, &area, &mut replayed, state.point, left, &env)?;
        }
        let core = Core::new(disk, area, home, state.point, replayed, options, env, client)?;
        let journal = Self { core, threads: Mutex::default(), outcome: Mutex::new(None) };
        if journal.core.options.background {
            journal.start("ferry-journal", Core::run)?;
            journal.start("ferry-hold", Core::run_holds)?;
        }
        Ok((journal, recovered))
    }

    fn start(&self, name: &str, run: fn(&Arc<Core>)) -> Result<(), JournalError> {
        let core = self.core.clone();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&core));
        self.threads.lock().push(thread.map_err(io_error("background thread"))?);
        Ok(())
    }

    /// If this process is killed from now on, nobody goes on from [`JournalOptions::left`].
    pub fn forget_left(&self) {
        let _unmapped_without_the_lock = self.core.left.lock().take();
    }

    /// Reserves log space, waiting for it in turn; take no lock that a checkpoint or another
    /// transaction wants before.
    pub fn begin(&self, credits: Credits) -> Result<Transaction<'_>, JournalError> {
        Ok(self.transaction(self.core.reserve(&credits)?))
    }

    /// The same for a caller that must not wait; `None`: it would have to.
    pub fn try_begin(&self, credits: Credits) -> Result<Option<Transaction<'_>>, JournalError> {
        Ok(self.core.try_reserve(&credits)?.map(|reserved| self.transaction(reserved)))
    }

    fn transaction(&self, reserved: u64) -> Transaction<'_> {
        Transaction {
            core: &self.core,
            changes: Changes::new(),
            extents: Vec::new(),
            writes: None,
            reserved: Some(reserved),
            request: None,
        }
    }

    /// For a caller that runs many transactions and would fill the log with them. If log space is
    /// short, this returns once the log has been emptied, so that others find room in it. Take no
    /// lock that a checkpoint or another transaction wants before.
    pub fn give_way(&self) -> Result<(), JournalError> {
        if !self.core.short_of_space() {
            return Ok(());
        }
        self.force_all()?;
        match self.core.checkpoint(Checkpoint::Log) {
            // What goes on may free the space that is lacking.
            Err(JournalError::NoSpace) => Ok(()),
            done => done,
        }
    }

    /// The log is so short of space that [`Journal::begin`] may have to wait. A guess: others begin
    /// transactions, too.
    pub fn is_short(&self, urgent: bool) -> bool {
        let space = &self.core.space;
        space.is_short() || space.room(urgent) < self.core.log_bytes() / SHORT_FRACTION
    }

    /// The newest committed value.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>, JournalError> {
        self.core.get(key)
    }

    /// Calls `visit` for each key in `[from, to)`, ascending, until it returns `false`. No lock of
    /// the journal is held during `visit`; it sees one moment of the view.
    pub fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &Value) -> bool,
    ) -> Result<(), JournalError> {
        self.core.scan(from, to, visit)
    }

    /// Like [`Journal::scan`], but where the home store cannot be read it goes on behind the
    /// damage: `visit` gets what is readable, in order, and `lost` each gap, between the keys
    /// around it. Reads the whole home store.
    pub fn scan_readable(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &Value) -> bool,
        lost: &mut dyn FnMut(LostKeys),
    ) -> Result<(), JournalError> {
        self.core.scan_readable(from, to, visit, lost)
    }

    /// Calls `done` once `seq` and all before it are durable (at once if they are). Not held for
    /// anyone.
    pub fn force(&self, seq: Seq, done: Completion) {
        self.core.force(Caller::UNKNOWN, seq, done);
    }

    /// As [`Journal::force`], for a caller whom the flush policy can tell apart from others.
    pub fn force_for(&self, caller: Caller, seq: Seq, done: Completion) {
        self.core.force(caller, seq, done);
    }

    /// Calls `done` once `seq` and all before it are durable (at once if they are), and makes
    /// nothing durable for it: a later force or the timer does. The open context is sealed at the
    /// latest [`JournalOptions::commit_interval`] after its first change.
    pub fn when_durable(&self, seq: Seq, done: Completion) {
        self.core.when_durable(seq, done);
    }

    /// Changes the flush policy from now on.
    pub fn set_flush_policy(&self, policy: FlushPolicy, fast_flush: Duration) {
        self.core.pipe.lock().dispatcher.set(policy, fast_flush);
        self.core.drive();
    }

    /// Forgets how long the device's flushes took.
    pub fn reset_flush_timing(&self) {
        self.core.disk.reset_flush_timing();
    }

    /// The context that a transaction committed now would join.
    pub fn current(&self) -> Seq {
        self.core.head.read().seq
    }

    /// Newest durable context.
    pub fn durable(&self) -> Seq {
        self.core.durable()
    }

    /// Newest context that a durable point covers (see [`JournalClient::durable_point`]).
    pub fn durable_point(&self) -> Seq {
        self.core.durable_point()
    }

    /// Makes everything committed so far durable, and covers it with a durable point, then returns:
    /// what it freed is reusable.
    pub fn force_durable_point(&self) -> Result<(), JournalError> {
        let seq = self.force_all()?;
        if self.core.durable_point() >= seq {
            return Ok(());
        }
        if self.core.space.try_take_for_log(LOG_BLOCK as u64) {
            Wait::until(|done| self.core.write_durable_point(seq, done))
        } else {
            // A home store that has a context proves as much as a durable point.
            self.core.checkpoint(Checkpoint::Log)?;
            Wait::until(|done| self.core.when_durable_point(seq, done))
        }
    }

    /// Makes everything committed so far durable; the newest context of that.
    fn force_all(&self) -> Result<Seq, JournalError> {
        let seq = {
            let head = self.core.head.read();
            if head.is_empty() { Seq(head.seq.0 - 1) } else { head.seq }
        };
        Wait::until(|done| self.core.force(Caller::UNKNOWN, seq, done))?;
        Ok(seq)
    }

    /// Writes the overlay home and moves the log's tail, then returns.
    pub fn checkpoint(&self) -> Result<(), JournalError> {
        self.force_all()?;
        self.core.checkpoint(Checkpoint::Calm)
    }

    /// Makes the home store as small as the removed keys allow, for a caller that finds no space.
    /// `false`: nothing has changed since the last attempt.
    pub fn make_room(&self) -> Result<bool, JournalError> {
        if self.core.options.read_only {
            return Ok(false);
        }
        if self.core.releasable() == 0 && self.core.head.read().is_empty() {
            // A replaced store that was still being read may be free by now.
            let _checkpointing = self.core.checkpointing.lock();
            self.core.give_back();
            return Ok(false);
        }
        self.force_all()?;
        self.core.checkpoint(Checkpoint::Volume)?;
        Ok(true)
    }

    /// Moves the home store out of the segments from `end` on; the owner gives it none of those.
    /// [`JournalError::NoSpace`]: there are not enough others. It may take another call until the
    /// owner has them all, because somebody may still read in them.
    pub fn vacate(&self, end: u32) -> Result<(), JournalError> {
        self.force_all()?;
        self.core.checkpoint(Checkpoint::Vacate(end))
    }

    /// Newest context that the home store has.
    pub fn home_seq(&self) -> Seq {
        self.core.head.read().view.home.point.seq
    }

    /// Segments that the home store will have at most once [`Journal::make_room`] has been called,
    /// if `less` bytes of the keys and values in it are removed.
    pub fn home_segments_wanted(&self, less: u64) -> u32 {
        self.core.home.wanted(less, SPARE_RETAINED)
    }

    /// Does due background work (a hold or `commit_interval` is over, log idle); only for
    /// `background: false`.
    pub fn tick(&self) -> Result<(), JournalError> {
        self.core.tick()
    }

    /// How long until a hold is over or a context must be sealed, so that `tick` has something to
    /// do; `None` while neither is to come.
    pub fn next_due(&self) -> Option<Duration> {
        self.core.next_due()
    }

    /// The largest `Credits::bytes` (keys counted with their overhead) that `begin` accepts.
    pub fn max_transaction_bytes(&self) -> u64 {
        self.core.payload_max()
    }

    /// Goes on with the log, the slots of the home map and the number of segments that `to` says.
    /// Nobody needs anything that lies in new places, the home store has no segment that is none
    /// any more, and the log becomes no shorter. `persist` is called when the log is empty and both
    /// sets of places are right; it must make durable which of them counts, so that each crash
    /// leaves one of the two.
    pub fn relocate(
        &self,
        to: &Geometry,
        persist: &mut dyn FnMut() -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        match self.core.refuses_relocation() {
            Some(error) => Err(error),
            None => self.core.relocate(to, persist),
        }
    }

    /// Counters, and how full the log is.
    pub fn stats(&self) -> JournalStats {
        self.core.stats()
    }

    /// Forces, checkpoints, marks the log clean and stops the threads. Idempotent: once closed, it
    /// says again what the first call said.
    pub fn close(&self) -> Result<(), JournalError> {
        let mut outcome = self.outcome.lock();
        outcome.get_or_insert_with(|| self.close_once()).clone()
    }

    fn close_once(&self) -> Result<(), JournalError> {
        self.core.closed.store(true, Ordering::Release);
        // From here on nobody else begins a record.
        self.end_threads();
        let result = self.write_out();
        self.core.space.stop();
        // The layers above the home store are in it by now.
        let mut head = self.core.head.write();
        head.view = Arc::new(View { layers: head.view.layers.clone(), home: HomeView::closed() });
        drop(head);
        result.and_then(|()| self.close_home())
    }

    /// Why nothing can be written any more, if so.
    pub fn failure(&self) -> Option<JournalError> {
        self.core.failure()
    }

    fn write_out(&self) -> Result<(), JournalError> {
        if let Some(error) = self.core.failure() {
            return Err(error);
        }
        if self.core.options.read_only {
            return Ok(());
        }
        // No durable point: the checkpoint below covers every context, as a durable point would.
        self.force_all()?;
        // Behind the end that the home store names there must not be any record.
        if let Some(seq) = self.core.durable_point_in_flight() {
            Wait::until(|done| self.core.when_durable_point(seq, done))?;
        }
        self.core.checkpoint(Checkpoint::Close)
    }

    fn close_home(&self) -> Result<(), JournalError> {
        let core = &self.core;
        if core.options.read_only {
            return core.home.close();
        }
        let file = core.home.file();
        file.drop_spare(SPARE_RETAINED);
        core.home.close()?;
        let mut released = file.take_dropped();
        released.extend(file.take_surplus(0));
        released.extend(core.home.take_retired());
        if !released.is_empty() {
            core.client.release_home_segments(&released);
        }
        Ok(())
    }

    fn stop(&self) {
        self.core.space.stop();
        self.end_threads();
    }

    fn end_threads(&self) {
        self.core.signal.stop();
        self.core.hold_timer.stop();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the journal panicked");
            }
        }
    }
}

impl Drop for Journal {
    /// Without a [`Journal::close`]: what was not durable is lost, as in a crash, and its waiters
    /// get an error.
    fn drop(&mut self) {
        self.core.closed.store(true, Ordering::Release);
        if self.core.failed.set(JournalError::Closed).is_err() {
            self.core.home.abandon();
        }
        self.stop();
        self.core.drive();
        // Here, not where the last completion lets go of the rest.
        self.core.home.end();
    }
}
