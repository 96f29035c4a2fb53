//! [`ObjectDevice`]: a block device whose blocks are in an object store.
//!
//! A write completes in memory. A flush seals what is in memory into a batch, which becomes one log
//! object, and data objects where much was written together. The rules:
//!
//! * OBJECT-1: a log object is sent only after every data object that it names has answered.
//! * OBJECT-2: log objects are sent in parallel, those from the lowest unanswered one to W behind
//!   it.
//! * OBJECT-3: a flush ends when every log object up to its own has answered. What lies behind a
//!   gap is not committed: a new owner ignores it.
//! * OBJECT-4: log objects are installed in the map in the order of their numbers, whatever the
//!   order of their answers.
//! * OBJECT-5: `submit` never waits. The device seals unasked from [`Limits::seal_bytes`] on, so a
//!   caller that flushes only when its writes have completed never meets a device that waits for a
//!   flush.
//! * OBJECT-6: when another owner has taken a name in the log, nothing is acknowledged any more.
//! * OBJECT-7: the device is as long as the object `super` says. If its last block in use lies
//!   further behind, it ends there. So who makes it longer writes the new last block first.

use crate::access::{Access, Held, Patience, Tries};
use crate::ahead::Ahead;
use crate::batch::{Batch, Built, Layout, Pending, build};
use crate::beats::Beats;
use crate::cache::{CacheStats, DiskCache};
use crate::error::ObjectError;
use crate::executor::{Answer, Executor, Job, ThreadExecutor, Upload};
use crate::format::{
    BLOCK, DATA_MAX, Entry, EntryKind, Front, Header, Kind, Location, ObjectRef, claim_name,
    encode, encode_entries, log_name, new_header,
};
use crate::inherited::Inherited;
use crate::keys::Passphrase;
use crate::locks::Locks;
use crate::pins::{no_snapshot, numbered};
use crate::runs::Run;
use crate::small::SmallObjects;
use crate::state::{Effects, Map, Roots, Sealed, Stage, State};
use crate::store::{Store, exists};
use crate::volume::{
    Chain, Claimant, Ownership, Shards, Volume, VolumeOptions, await_alone, claim, identify, make,
    observe, observe_snapshot, owner_of, read_pinned,
};
use crate::warming::Warming;
use ferry_device::{
    AlignedBuf, BlockDevice, FlushTimer, FlushTiming, HeldRequests, Io, IoDone, Longest, Snapshot,
    WarmDone,
};
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::Duration;
use zeroize::Zeroizing;

/// How a device uses the store.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A batch of so many bytes is sealed without a flush.
    pub seal_bytes: usize,
    /// Bytes in memory that the store does not have, at most; beyond that writes wait.
    pub unsent_bytes_max: usize,
    /// So many bytes without a hole go to a data object, and not to the log object.
    pub data_run_bytes_min: usize,
    /// Bytes of a data object, at most 16 MiB.
    pub data_bytes_max: usize,
    /// A root is written when the log has so many bytes that the newest one lacks.
    pub root_log_bytes: u64,
    /// The same in objects.
    pub root_log_objects: u64,
    /// A root is written this long after an object died.
    pub root_delay: Duration,
    /// Objects that no root needs are deleted after this time.
    pub grace: Duration,
    /// Objects that are mostly dead are repacked when so many bytes of them are.
    pub repack_bytes_min: usize,
    /// The time between two sweeps. The first one begins when the grace has passed.
    pub sweep: Duration,
    /// How long reads are answered after a look that no newer claim exists.
    pub term: Duration,
    /// Bytes in memory that were read ahead of their readers, at most.
    pub ahead_bytes_max: u64,
    /// A request that the store refuses, or does not answer, is repeated until it is carried out,
    /// as where the store's disk is full. Otherwise the device fails.
    pub holds: bool,
    /// For how long requests are repeated while a volume is opened, if they are not answered.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            seal_bytes: 16 << 20,
            unsent_bytes_max: 32 << 20,
            data_run_bytes_min: 1 << 20,
            data_bytes_max: DATA_MAX,
            root_log_bytes: 256 << 20,
            root_log_objects: 1000,
            root_delay: Duration::from_secs(60),
            grace: Duration::from_secs(600),
            repack_bytes_min: 4 << 20,
            sweep: Duration::from_secs(86_400),
            term: Duration::from_secs(3),
            ahead_bytes_max: 2 * READ_AHEAD_BYTES,
            holds: true,
            patience: Duration::MAX,
        }
    }
}

/// What a device asked the store for, and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectStats {
    /// Objects created and put, repetitions included.
    pub puts: u64,
    /// Their bytes.
    pub put_bytes: u64,
    /// Objects read, or parts of them.
    pub gets: u64,
    /// Their bytes.
    pub get_bytes: u64,
    /// Objects deleted.
    pub deletes: u64,
    /// Those of them that nothing had named.
    pub orphans: u64,
    /// Bytes of blocks that were moved out of objects that were mostly dead.
    pub repacked_bytes: u64,
    /// Requests that had to be repeated.
    pub retries: u64,
    /// Bytes of the device that are not zeros, as the map has them.
    pub mapped_bytes: u64,
    /// Runs of the map, all of which is in memory.
    pub map_runs: usize,
    /// Bytes in memory that the store does not have.
    pub unsent_bytes: usize,
    /// Bytes in memory, or on their way, that were read ahead of their readers.
    pub ahead_bytes: u64,
    /// Number of the newest root.
    pub root: u64,
    /// The owner's epoch.
    pub epoch: u64,
}

/// A reader that goes on sequentially is read ahead by so much, at most.
const READ_AHEAD_BYTES: u64 = 32 << 20;

/// A device is no longer than this, in bytes.
const CAPACITY_MAX: u64 = (1 << 62) - BLOCK as u64;

/// What a device has in its last block when it has become longer, until its owner writes there.
const END_MARK: [u8; 8] = *b"FERRYEND";

/// For how long a snapshot that was opened beside its volume asks a store that does not answer.
const BESIDE_PATIENCE: Duration = Duration::from_secs(10);
/// It reads ahead so much, at most.
const BESIDE_AHEAD_BYTES_MAX: u64 = 16 << 20;

/// Objects that are deleted after one look, at most.
pub(crate) const DELETES_PER_LOOK: usize = 64;

/// The objects of a batch.
struct Objects {
    /// Data objects.
    uploads: Vec<Upload>,
    /// The log object, and what it says.
    log: Arc<Vec<u8>>,
    entries: Vec<Entry>,
}

/// What is done with the answer to an upload.
pub(crate) type Then = Box<dyn FnOnce(&ObjectDevice, Result<(), ObjectError>) + Send>;

/// A block device in an object store. The module's documentation has the rules.
pub struct ObjectDevice {
    pub(crate) access: Access,
    pub(crate) env: Env,
    pub(crate) volume: Volume,
    /// Its length in bytes (OBJECT-7).
    capacity: AtomicU64,
    pub(crate) limits: Limits,
    pub(crate) state: Mutex<State>,
    pub(crate) inherited: Inherited,
    /// Number of the next data object or shard of this owner.
    pub(crate) next_object: AtomicU64,
    pub(crate) fronts: Mutex<HashMap<ObjectRef, Arc<Front>>>,
    /// Small objects that were read since the volume was opened, until a root is written.
    pub(crate) small: Mutex<SmallObjects>,
    /// For snapshots that are opened beside the volume, once there was one.
    beside: Mutex<Option<Arc<dyn Executor>>>,
    pub(crate) cache: OnceLock<Arc<DiskCache>>,
    pub(crate) ahead: Ahead,
    pub(crate) warming: Warming,
    /// When the last look for a newer claim that found none began.
    looked: Mutex<Duration>,
    /// From when on it may serve, if it is an owner.
    serves_from: Duration,
    /// Since when, or from when on, no older owner answers reads, if this is one.
    alone_since: Option<Duration>,
    /// It has failed, or another owner has taken the volume over: it acknowledges nothing.
    has_failed: AtomicBool,
    /// Its heartbeat, if others may take it for dead.
    beats: Option<Beats>,
    flush_timer: FlushTimer,
    /// A read has failed.
    read_failed: AtomicBool,
    /// They are held for as long as the device is there.
    _locks: Option<Arc<dyn Locks>>,
    me: Weak<Self>,
}

/// The volume in a store, and access to it.
pub(crate) fn identified(
    store: Arc<dyn Store>,
    executor: Arc<dyn Executor>,
    passphrase: Option<&Passphrase>,
    limits: Limits,
    env: &Env,
) -> Result<(Access, Volume), ObjectError> {
    let patience = Patience::Opening(limits.patience);
    identify(Access::new(store, executor, patience, env), passphrase)
}

impl ObjectDevice {
    /// Makes a volume in an empty store; its device reads as zeros.
    pub fn make(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        options: &VolumeOptions,
        env: &Env,
    ) -> Result<(), ObjectError> {
        let patience = Patience::Opening(Limits::default().patience);
        make(Access::new(store, executor, patience, env), options, env)
    }

    /// Claims the volume in the store and opens it. The owner before is fenced off.
    pub fn open(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        claimant: &Claimant,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<Self>, ObjectError> {
        let passphrase = claimant.passphrase.as_ref();
        let (access, volume) = identified(store, executor, passphrase, limits, env)?;
        Self::claim_identified(access, volume, claimant, limits, env)
    }

    /// The same, of a volume that was identified.
    pub(crate) fn claim_identified(
        access: Access,
        volume: Volume,
        claimant: &Claimant,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<Self>, ObjectError> {
        let (found, owns) = claim(&access, volume, claimant, limits.term, env)?;
        if !claimant.serves_later {
            await_alone(&access, &found.0, owns.serves_from, claimant.tell, env)?;
        }
        let locks = claimant.locks.clone();
        Ok(Self::opened(access, found, limits, Some(owns), locks, env))
    }

    /// The key of an encrypted volume, for [`Passphrase::of_key`].
    pub fn key(&self) -> Option<Zeroizing<Vec<u8>>> {
        self.access.key()
    }

    /// Opens the volume as it is, for reading only. Nothing is claimed and nothing is written. If
    /// `claimant` would take it over, an owner goes on; what it needs no more is deleted after the
    /// grace, and then missing here.
    pub fn open_read_only(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        claimant: &Claimant,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<Self>, ObjectError> {
        let passphrase = claimant.passphrase.as_ref();
        let (access, volume) = identified(store, executor, passphrase, limits, env)?;
        Self::observe_identified(access, volume, claimant, limits, env)
    }

    /// The same, of a volume that was identified.
    pub(crate) fn observe_identified(
        access: Access,
        volume: Volume,
        claimant: &Claimant,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<Self>, ObjectError> {
        let found = observe(&access, volume, claimant, env)?;
        let locks = claimant.locks.clone();
        Ok(Self::opened(access, found, limits, None, locks, env))
    }

    /// Opens a snapshot of the volume, for reading only, beside its owner. Nothing is claimed and
    /// nothing is written. Once the snapshot is deleted, its objects are missing here after the
    /// grace.
    pub fn open_snapshot(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        name: &str,
        passphrase: Option<&Passphrase>,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<Self>, ObjectError> {
        let (access, volume) = identified(store, executor, passphrase, limits, env)?;
        Self::snapshot_identified(access, volume, name, limits, env)
    }

    /// The same, of a volume that was identified.
    pub(crate) fn snapshot_identified(
        access: Access,
        volume: Volume,
        name: &str,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<Self>, ObjectError> {
        let found = observe_snapshot(&access, volume, name)?;
        Ok(Self::opened(access, found, limits, None, None, env))
    }

    /// Opens the snapshot whose root has this number beside this device, for reading only: from the
    /// same store, and through the same cache. A store that does not answer is asked for
    /// [`BESIDE_PATIENCE`].
    pub fn open_beside(&self, number: u64) -> Result<Arc<Self>, ObjectError> {
        {
            let pins = &self.state.lock().roots.pins;
            if !numbered(pins).any(|(root, _)| root == number) {
                return Err(no_snapshot(&format!("number {number}"), pins));
            }
        }
        let mut access = self.access.clone();
        access.patience = Patience::Opening(BESIDE_PATIENCE);
        access.executor = self.executor_beside()?;
        let volume = Volume { epoch: 0, ..self.volume.clone() };
        let (chain, shards) = read_pinned(&access, &volume, number)?;
        let limits =
            Limits { holds: false, ahead_bytes_max: BESIDE_AHEAD_BYTES_MAX, ..self.limits };
        let found = (volume, chain, shards);
        let device = Self::opened(access, found, limits, None, None, &self.env);
        if let Some(cache) = self.cache.get() {
            device.share_cache(Arc::clone(cache));
        }
        Ok(device)
    }

    /// A version of the volume, for reading only, while its owner goes on. What its objects have is
    /// read from this cache, if it is there.
    pub(crate) fn version(
        access: Access,
        found: (Volume, Chain, Shards),
        cache: Option<Arc<DiskCache>>,
        limits: Limits,
        env: &Env,
    ) -> Arc<Self> {
        let device = Self::opened(access, found, limits, None, None, env);
        if let Some(cache) = cache {
            device.share_cache(cache);
        }
        device
    }

    /// Runs what snapshots read ahead: no upload of the volume waits for that.
    fn executor_beside(&self) -> Result<Arc<dyn Executor>, ObjectError> {
        let mut executor = self.beside.lock();
        if let Some(executor) = &*executor {
            return Ok(Arc::clone(executor));
        }
        let new: Arc<dyn Executor> = Arc::new(ThreadExecutor::new(&self.env).map_err(|error| {
            ObjectError::Unavailable(format!("threads for a snapshot: {error}"))
        })?);
        Ok(Arc::clone(executor.insert(new)))
    }

    fn opened(
        mut access: Access,
        (volume, chain, shards): (Volume, Chain, Shards),
        limits: Limits,
        owns: Option<Ownership>,
        locks: Option<Arc<dyn Locks>>,
        env: &Env,
    ) -> Arc<Self> {
        let (looked, serves_from) =
            owns.as_ref().map_or_else(Default::default, |owns| (owns.looked, owns.serves_from));
        let (alone_since, beats) = owns.map(|owns| (owns.alone_since, owns.beats)).unzip();
        if limits.holds {
            access.patience = Patience::Serving;
        }
        let inherited = Inherited::new(&chain, &shards);
        let mut map = Map::load(&shards);
        for link in &chain.links {
            match link.header.kind {
                Kind::Log => map.install(link.header.epoch, link.seq, &link.entries),
                _ => map.fence(link.seq),
            }
        }
        let roots = Roots {
            number: chain.root.header.number,
            id: chain.root.header.id,
            shards: chain.root.root.shards.iter().copied().collect(),
            log_objects: chain.links.len() as u64,
            pins: chain.root.root.pins.clone(),
            sweep_due: env.clock.monotonic() + limits.grace,
            ..Roots::default()
        };
        let capacity = volume.info.capacity.max(map.end() * BLOCK as u64);
        let state = State {
            map,
            open: Batch::default(),
            unsealed: (0, Duration::ZERO),
            sealed: VecDeque::new(),
            next_seq: chain.next,
            last_id: chain.last_id,
            committed: chain.next,
            committed_id: chain.last_id,
            waiting: VecDeque::new(),
            flushes: VecDeque::new(),
            unsent: 0,
            roots,
            ring: 0..0,
            repacking: false,
            repack_due: Duration::ZERO,
            failed: None,
        };
        Arc::new_cyclic(|me| Self {
            access,
            env: env.clone(),
            volume,
            capacity: AtomicU64::new(capacity),
            limits,
            state: Mutex::new(state),
            inherited,
            next_object: AtomicU64::new(0),
            fronts: Mutex::default(),
            small: Mutex::new(chain.read.unwrap_or_default()),
            beside: Mutex::default(),
            cache: OnceLock::new(),
            ahead: Ahead::new(limits.ahead_bytes_max),
            warming: Warming::default(),
            looked: Mutex::new(looked),
            serves_from,
            alone_since,
            has_failed: AtomicBool::new(false),
            beats: beats.flatten(),
            flush_timer: FlushTimer::default(),
            read_failed: AtomicBool::new(false),
            _locks: locks,
            me: me.clone(),
        })
    }

    /// What it asked for and holds.
    pub fn stats(&self) -> ObjectStats {
        let counters = &self.access.counters;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = self.state.lock();
        let (blocks, map_runs) = state.map.size();
        ObjectStats {
            puts: count(&counters.puts),
            put_bytes: count(&counters.put_bytes),
            gets: count(&counters.gets),
            get_bytes: count(&counters.get_bytes),
            deletes: count(&counters.deletes),
            orphans: count(&counters.orphans),
            repacked_bytes: count(&counters.repacked_bytes),
            retries: count(&counters.retries),
            mapped_bytes: blocks * BLOCK as u64,
            map_runs,
            unsent_bytes: state.unsent,
            ahead_bytes: self.ahead.bytes(),
            root: state.roots.number,
            epoch: self.volume.epoch,
        }
    }

    /// What objects have is read from this cache from now on, if it is there.
    pub(crate) fn use_cache(&self, cache: DiskCache) {
        self.share_cache(Arc::new(cache));
    }

    /// The same of a cache that other devices use, too.
    fn share_cache(&self, cache: Arc<DiskCache>) {
        let set = self.cache.set(cache);
        assert!(set.is_ok(), "a device has one cache");
    }

    /// What the cache on disk did, if there is one.
    pub fn cache_stats(&self) -> Option<CacheStats> {
        self.cache.get().map(|cache| cache.stats())
    }

    /// Requests that the store does not carry out now.
    pub fn held_requests(&self) -> Option<Held> {
        let mine = self.access.held();
        // Its uploads are what holds the others up.
        self.access.store.held().or(mine)
    }

    /// Why it acknowledges nothing any more, if it does not.
    pub fn failure(&self) -> Option<ObjectError> {
        self.state.lock().failed.clone()
    }

    /// Nobody wants what is being read: what the store does not answer ends with an error. An owner
    /// reads on, because it may need that to close the volume.
    pub fn give_up_reads(&self) {
        if self.is_read_only() {
            self.access.given_up.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.volume.epoch == 0
    }

    pub(crate) fn me(&self) -> Arc<Self> {
        self.me.upgrade().expect("a method runs, so a reference exists")
    }

    /// Access to the volume that has an object: this one, or one that it refers to.
    pub(crate) fn access_of(&self, object: ObjectRef) -> Cow<'_, Access> {
        self.access.of(&self.volume.info, object)
    }

    pub(crate) fn next_object(&self) -> ObjectRef {
        let number = self.next_object.fetch_add(1, Ordering::Relaxed);
        ObjectRef { epoch: self.volume.epoch, number }
    }

    /// Changes the state, and then does what has to be done without its lock.
    pub(crate) fn with(&self, change: impl FnOnce(&mut State, &mut Effects)) {
        let mut fx = Effects::default();
        change(&mut self.state.lock(), &mut fx);
        fx.jobs.into_iter().for_each(|job| self.access.executor.start(job));
        fx.ends.into_iter().for_each(|(done, result)| done(result));
    }

    /// Waits for the end of a request.
    pub(crate) fn wait(&self, end: &mpsc::Receiver<io::Result<()>>) -> io::Result<()> {
        loop {
            match end.try_recv() {
                Ok(result) => return result,
                Err(mpsc::TryRecvError::Empty) if self.access.executor.step() => {}
                Err(_) => {
                    return end.recv().unwrap_or_else(|_| Err(io::ErrorKind::NotConnected.into()));
                }
            }
        }
    }

    /// A job that uploads, and repeats that until the store has carried it out.
    pub(crate) fn upload(&self, upload: Upload, then: Then) -> Job {
        self.upload_again(upload, Tries::default(), then)
    }

    fn upload_again(&self, upload: Upload, mut tries: Tries, then: Then) -> Job {
        let me = self.me();
        // Who has written a log object or a root has waited, as the next owner believes.
        let held = if upload.exclusive { self.serves_in() } else { Duration::ZERO };
        let after = tries.pause().max(held);
        let run = {
            let upload = upload.clone();
            move || -> Answer {
                let result = if upload.exclusive {
                    let created = me.access.create_once(&upload.name, &upload.bytes);
                    created.and_then(|created| created.or_fenced())
                } else {
                    me.access.put_once(&upload.name, &upload.bytes)
                };
                if result.is_ok() {
                    me.cache_upload(&upload);
                }
                Box::new(move || match result {
                    Err(error) if me.access.repeats(&error, &mut tries) => {
                        me.access.executor.start(me.upload_again(upload, tries, then));
                    }
                    result => {
                        drop(tries);
                        then(&me, result);
                    }
                })
            }
        };
        Job { upload: Some(upload), after, run: Box::new(run) }
    }

    /// Puts an object once, and has it in the cache then.
    pub(crate) fn put(&self, upload: &Upload) -> Result<(), ObjectError> {
        self.access.put_once(&upload.name, &upload.bytes)?;
        self.cache_upload(upload);
        Ok(())
    }

    fn cache_upload(&self, upload: &Upload) {
        if let (Some(cache), Some(object)) = (self.cache.get(), ObjectRef::of_name(&upload.name)) {
            cache.add(object, 0, &upload.bytes);
        }
    }

    /// Takes a request, or keeps it until there is room.
    fn accept(&self, state: &mut State, io: Io, fx: &mut Effects) {
        let failed = match &state.failed {
            None if self.is_read_only() || state.roots.is_closing() => Some(ObjectError::ReadOnly),
            failed => failed.clone(),
        };
        match (io, failed) {
            (Io::Write { done, .. } | Io::Flush { done }, Some(error)) => {
                fx.ends.push((done, Err(error.into())));
            }
            (Io::Flush { done }, None) => self.flush_state(state, done, fx),
            (Io::Write { offset, buf, done }, None) => {
                if let Err(error) = self.check(offset, buf.len() as u64) {
                    fx.ends.push((done, Err(error)));
                } else if !state.waiting.is_empty() || !self.has_room(state, buf.len()) {
                    state.waiting.push_back(Io::Write { offset, buf, done });
                    self.seal(state, fx);
                } else {
                    state.write(offset, &buf);
                    fx.ends.push((done, Ok(())));
                    self.seal_if_full(state, fx);
                }
            }
        }
    }

    fn has_room(&self, state: &State, len: usize) -> bool {
        state.unsent == 0 || state.unsent + len <= self.limits.unsent_bytes_max
    }

    fn seal_if_full(&self, state: &mut State, fx: &mut Effects) {
        if state.open.bytes >= self.limits.seal_bytes {
            self.seal(state, fx);
        }
    }

    /// Has `done` called when all that is in memory now is durable.
    pub(crate) fn flush_state(&self, state: &mut State, done: IoDone, fx: &mut Effects) {
        self.seal(state, fx);
        match state.sealed.back() {
            None => fx.ends.push((done, Ok(()))),
            Some(last) => {
                let start = self.env.clock.monotonic();
                let me = self.me();
                let timed: IoDone = Box::new(move |result| {
                    if result.is_ok() {
                        me.flush_timer.record(me.env.clock.monotonic() - start);
                    }
                    done(result);
                });
                state.flushes.push_back((last.seq, timed));
            }
        }
    }

    /// Closes the batch and starts to send it.
    pub(crate) fn seal(&self, state: &mut State, fx: &mut Effects) {
        if state.open.runs.is_empty() {
            return;
        }
        let batch = std::mem::take(&mut state.open);
        let (seq, previous) = (state.next_seq, state.last_id);
        let header = Header { previous, next: seq + 1, ..self.header(Kind::Log, seq) };
        let id = header.id;
        let runs = Arc::new(batch.runs);
        (state.next_seq, state.last_id) = (seq + 1, id);
        state.sealed.push_back(Sealed {
            seq,
            id,
            runs: Arc::clone(&runs),
            bytes: batch.bytes,
            stage: Stage::Building,
            entries: Vec::new(),
            log: Arc::default(),
        });
        let me = self.me();
        let run = move || -> Answer {
            let objects = me.objects(&header, build(&runs, me.layout()));
            Box::new(move || me.built(seq, objects))
        };
        fx.jobs.push(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
    }

    pub(crate) fn layout(&self) -> Layout {
        let (first, len) = self.volume.info.boundary;
        let block = BLOCK as u64;
        Layout {
            data_run_min: (self.limits.data_run_bytes_min / BLOCK) as u64,
            data_max: self.limits.data_bytes_max,
            boundary: (first / block, len / block),
        }
    }

    /// Makes the objects of a batch: this takes the longest, and is done with no lock held.
    fn objects(&self, log: &Header, built: Built) -> Objects {
        let Built { data, contents, mut entries } = built;
        let objects: Vec<ObjectRef> = data.iter().map(|_| self.next_object()).collect();
        for entry in &mut entries {
            if let EntryKind::Data { number, .. } = &mut entry.value {
                *number = objects[*number as usize].number;
            }
        }
        let codec = &self.access.codec;
        let uploads = objects.iter().zip(data).map(|(object, contents)| {
            let header = self.header(Kind::Data, object.number);
            Upload {
                name: object.name(),
                bytes: Arc::new(encode(codec, &header, &[], &contents)),
                exclusive: false,
            }
        });
        let uploads = uploads.collect();
        let log = Arc::new(encode(codec, log, &encode_entries(&entries), &contents));
        Objects { uploads, log, entries }
    }

    /// The objects of a batch are made: its data objects are sent.
    fn built(&self, seq: u64, objects: Objects) {
        let Objects { uploads, log, entries } = objects;
        self.with(|state, fx| {
            let Some(sealed) = state.sealed(seq) else { return };
            assert_eq!(sealed.stage, Stage::Building, "a batch is built once");
            (sealed.log, sealed.entries) = (log, entries);
            sealed.stage = Stage::Data { left: uploads.len() };
            for upload in uploads {
                let then = move |me: &Self, result| me.data_answered(seq, result);
                fx.jobs.push(self.upload(upload, Box::new(then)));
            }
            self.send_logs(state, fx);
        });
    }

    pub(crate) fn header(&self, kind: Kind, number: u64) -> Header {
        new_header(kind, self.volume.id, self.volume.epoch, number, &self.env)
    }

    fn data_answered(&self, seq: u64, result: Result<(), ObjectError>) {
        self.with(|state, fx| {
            if let Err(error) = result {
                return self.fail(state, &error, fx);
            }
            if let Some(Sealed { stage: Stage::Data { left }, .. }) = state.sealed(seq) {
                *left -= 1;
            }
            self.send_logs(state, fx);
        });
    }

    /// Sends the log objects that may be sent now (OBJECT-1, OBJECT-2).
    fn send_logs(&self, state: &mut State, fx: &mut Effects) {
        let Some(first) = state.sealed.front().map(|sealed| sealed.seq) else { return };
        let window = u64::from(self.volume.info.window);
        for sealed in state.sealed.iter_mut().take_while(|sealed| sealed.seq < first + window) {
            match sealed.stage {
                Stage::Data { left: 0 } => {}
                Stage::Data { .. } if is_planted(Bug::LogBeforeData) => {}
                _ => continue,
            }
            sealed.stage = Stage::Log;
            let seq = sealed.seq;
            let bytes = Arc::clone(&sealed.log);
            let upload = Upload { name: log_name(seq), bytes, exclusive: true };
            let then = move |me: &Self, result| me.log_answered(seq, result);
            fx.jobs.push(self.upload(upload, Box::new(then)));
        }
    }

    /// A log object was answered: the prefix without a gap is installed and acknowledged (OBJECT-3,
    /// OBJECT-4).
    fn log_answered(&self, seq: u64, result: Result<(), ObjectError>) {
        self.with(|state, fx| {
            if let Err(error) = result {
                return self.fail(state, &error, fx);
            }
            let Some(sealed) = state.sealed(seq) else { return };
            assert_eq!(sealed.stage, Stage::Log, "a log object is answered once");
            sealed.stage = Stage::Answered;
            if is_planted(Bug::FlushBeforeGap) {
                let flushes = std::mem::take(&mut state.flushes).into_iter();
                let (ended, open) = flushes.partition(|(waits_for, _)| *waits_for == seq);
                state.flushes = open;
                let ended: VecDeque<_> = ended;
                fx.ends.extend(ended.into_iter().map(|(_, done)| (done, Ok(()))));
            }
            if is_planted(Bug::InstalledInAnyOrder)
                && let Some(sealed) = state.sealed(seq)
            {
                let entries = std::mem::take(&mut sealed.entries);
                state.map.install(self.volume.epoch, seq, &entries);
            }
            while let Some(first) = state.sealed.front()
                && first.stage == Stage::Answered
            {
                let Some(first) = state.sealed.pop_front() else { break };
                state.unsent -= first.bytes;
                state.map.install(self.volume.epoch, first.seq, &first.entries);
                (state.committed, state.committed_id) = (first.seq + 1, first.id);
                state.roots.log_bytes += first.log.len() as u64 + first.bytes as u64;
                state.roots.log_objects += 1;
            }
            let ended = state.flushes.partition_point(|(seq, _)| *seq < state.committed);
            fx.ends.extend(state.flushes.drain(..ended).map(|(_, done)| (done, Ok(()))));
            while let Some(Io::Write { buf, .. }) = state.waiting.front()
                && self.has_room(state, buf.len())
            {
                let Some(Io::Write { offset, buf, done }) = state.waiting.pop_front() else {
                    break;
                };
                state.write(offset, &buf);
                fx.ends.push((done, Ok(())));
                self.seal_if_full(state, fx);
            }
            if !state.waiting.is_empty() {
                self.seal(state, fx);
            }
            self.send_logs(state, fx);
            self.root_if_due(state, fx);
        });
    }

    /// Nothing more is acknowledged. If another owner is the reason, the log says who.
    pub(crate) fn fail(&self, state: &mut State, error: &ObjectError, fx: &mut Effects) {
        // Who makes a volume gets the error.
        if state.failed.is_none() && self.limits.holds {
            tracing::error!(%error, "the volume in the object store stops");
        }
        if let (None, ObjectError::Fenced { epoch: Some(epoch) }) = (&state.failed, error) {
            let (me, epoch) = (self.me(), *epoch);
            let run = move || -> Answer {
                let owner = owner_of(&me.access, &me.volume, epoch);
                Box::new(move || {
                    if let Ok(owner) = owner {
                        tracing::error!(
                            "the volume was taken over by {owner}: nothing more can be written or read here. What this process has not synced is lost, unless a client has it yet: that sends it to the next server"
                        );
                    }
                })
            };
            fx.jobs.push(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
        }
        self.has_failed.store(true, Ordering::SeqCst);
        state.fail(error, fx);
    }

    /// Looks for a newer claim. If there is one, nothing is acknowledged any more.
    pub(crate) fn look(&self) -> Result<(), ObjectError> {
        let newer = self.volume.epoch + 1;
        // A look that was held for long is as old as its last try.
        let (found, begun) = self.access.insist(|store| {
            let begun = self.env.clock.monotonic_with_sleep();
            Ok((exists(store, &claim_name(newer))?, begun))
        })?;
        self.access.counters.gets.fetch_add(1, Ordering::Relaxed);
        if found {
            let error = ObjectError::Fenced { epoch: Some(newer) };
            self.with(|state, fx| self.fail(state, &error, fx));
            return Err(error);
        }
        let mut looked = self.looked.lock();
        *looked = begun.max(*looked);
        Ok(())
    }

    /// A read is answered only within a term after a look began: a new owner waits that long. It is
    /// checked when the read has its bytes, which may have been waited for.
    pub(crate) fn await_term(&self) -> Result<(), ObjectError> {
        while !self.is_read_only() && !self.in_term() && !is_planted(Bug::ReadsAfterTerm) {
            self.look()?;
        }
        Ok(())
    }

    /// Whether no read has failed since it was opened.
    pub fn has_read_all(&self) -> bool {
        !self.read_failed.load(Ordering::Acquire)
    }

    /// For how long an older owner may yet answer reads.
    pub fn serves_in(&self) -> Duration {
        self.serves_from.saturating_sub(self.env.clock.monotonic_with_sleep())
    }

    /// Waits until no older owner answers reads. Who has opened it to serve later calls this before
    /// it answers anybody.
    pub fn await_alone(&self) -> Result<(), ObjectError> {
        await_alone(&self.access, &self.volume, self.serves_from, None, &self.env)
    }

    /// For how long no older owner has answered reads.
    pub fn alone_for(&self) -> Duration {
        let now = self.env.clock.monotonic_with_sleep();
        self.alone_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// Whether the last look is younger than a term.
    pub(crate) fn in_term(&self) -> bool {
        self.env.clock.monotonic_with_sleep() < *self.looked.lock() + self.limits.term
    }

    /// Whether it takes changes.
    fn check_writable(&self, state: &State) -> Result<(), ObjectError> {
        match &state.failed {
            Some(error) => Err(error.clone()),
            None if self.is_read_only() || state.roots.is_closing() => Err(ObjectError::ReadOnly),
            None => Ok(()),
        }
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        let whole = offset.is_multiple_of(BLOCK as u64) && len.is_multiple_of(BLOCK as u64);
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.capacity());
        if whole && inside { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
    }
}

impl BlockDevice for ObjectDevice {
    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        self.check_writable(&self.state.lock())?;
        Ok(Longest::Asked(CAPACITY_MAX))
    }

    fn is_surely_ours(&self) -> bool {
        // An owner that is never taken for dead says what it knows while its store is away, too.
        let may_be_taken = self.beats.is_some();
        !self.has_failed.load(Ordering::SeqCst) && (!may_be_taken || self.in_term())
    }

    fn ascertain_ours(&self) -> io::Result<()> {
        self.await_term()?;
        self.failure().map_or(Ok(()), |error| Err(error.into()))
    }

    /// A store takes whatever is written, so there is nothing to prepare. The next owner finds out
    /// from the last block that was written how long the device is (OBJECT-7).
    fn resize(&self, bytes: u64) -> io::Result<()> {
        if bytes > self.capacity_max()?.bytes() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let before = self.capacity();
        if bytes < before {
            self.discard(bytes, before - bytes)?;
        }
        self.capacity.store(bytes, Ordering::Release);
        if bytes > before {
            // Zeros would take no room in the store, and would not be found.
            let mut end = AlignedBuf::zeroed(BLOCK);
            end[..END_MARK.len()].copy_from_slice(&END_MARK);
            self.write(bytes - BLOCK as u64, &end)?;
            self.flush()?;
        }
        Ok(())
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        let start = offset / BLOCK as u64;
        // An object that was found may be deleted before it is read, where the blocks have been
        // overwritten for so long. Damage on the way may not come twice.
        let read = match self.read_blocks(start, buf) {
            Err(ObjectError::NotFound(_) | ObjectError::Damaged { .. }) => {
                self.fronts.lock().clear();
                self.small.lock().clear();
                self.read_blocks(start, buf)
            }
            other => other,
        };
        read.map_err(|error| {
            self.read_failed.store(true, Ordering::Release);
            // Why a volume has stopped was said once.
            if !self.has_failed.load(Ordering::SeqCst) {
                tracing::error!(%error, "cannot read {} bytes at {offset}", buf.len());
            }
            error.into()
        })
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        let mut copy = AlignedBuf::zeroed(buf.len());
        copy.copy_from_slice(buf);
        let (ended, end) = mpsc::channel();
        let done = Box::new(move |result| drop(ended.send(result)));
        self.submit(vec![Io::Write { offset, buf: Arc::new(copy), done }]);
        self.wait(&end)
    }

    fn flush(&self) -> io::Result<()> {
        let (ended, end) = mpsc::channel();
        self.submit(vec![Io::Flush { done: Box::new(move |result| drop(ended.send(result))) }]);
        self.wait(&end)
    }

    fn submit(&self, batch: Vec<Io>) {
        self.with(|state, fx| batch.into_iter().for_each(|io| self.accept(state, io, fx)));
        self.access.executor.poke();
    }

    /// The range reads as zeros afterwards.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len)?;
        let mut result = Ok(());
        self.with(|state, _| match self.check_writable(state) {
            Err(error) => result = Err(error.into()),
            Ok(()) if len == 0 => {}
            Ok(()) => state.change(offset / BLOCK as u64, len / BLOCK as u64, Pending::Zeros),
        });
        self.access.executor.poke();
        result
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len)
    }

    fn host_free(&self) -> Option<u64> {
        None
    }

    /// A write joins a batch before it ends, later ones join that batch or one behind it, and a new
    /// owner finds the batches up to the first that is missing (OBJECT-3).
    fn is_ordered(&self) -> bool {
        true
    }

    /// It has writes of [`Limits::unsent_bytes_max`] in memory while the store is slower; as many
    /// as the next batch takes wait behind them.
    fn busy_bytes(&self) -> usize {
        self.limits.seal_bytes
    }

    fn read_ahead_bytes(&self) -> u64 {
        READ_AHEAD_BYTES.min(self.limits.ahead_bytes_max / 2)
    }

    fn read_ahead(&self, offset: u64, len: u64) {
        if self.check(offset, len).is_err() || len == 0 {
            return;
        }
        self.read_blocks_ahead(offset / BLOCK as u64, len / BLOCK as u64);
    }

    fn warm(&self, begins: bool, ranges: &[Range<u64>], done: WarmDone) {
        let checked = ranges.iter().map(|range| self.check(range.start, range.end - range.start));
        if let Err(error) = checked.collect::<io::Result<()>>() {
            return done(Err(error));
        }
        let block = BLOCK as u64;
        let blocks = |range: &Range<u64>| range.start / block..range.end / block;
        self.warm_blocks(begins, &ranges.iter().map(blocks).collect::<Vec<_>>(), done);
        self.access.executor.poke();
    }

    fn keeps_what_is_dead(&self) -> bool {
        true
    }

    fn note_ring(&self, range: Range<u64>) {
        let block = BLOCK as u64;
        self.state.lock().ring = range.start / block..range.end.div_ceil(block);
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        let stats = self.stats();
        let mut figures = vec![
            ("puts", stats.puts),
            ("put_bytes", stats.put_bytes),
            ("gets", stats.gets),
            ("get_bytes", stats.get_bytes),
            ("deletes", stats.deletes),
            ("orphans", stats.orphans),
            ("repacked_bytes", stats.repacked_bytes),
            ("repeated", stats.retries),
            ("live_bytes", stats.mapped_bytes),
            ("map_runs", stats.map_runs as u64),
            ("unsent_bytes", stats.unsent_bytes as u64),
            ("ahead_bytes", stats.ahead_bytes),
            ("root", stats.root),
            ("epoch", stats.epoch),
        ];
        if let Some(costs) = self.access.store.request_costs() {
            let cost = costs.microdollars(stats.puts, stats.gets);
            figures.push(("estimated_cost_microdollars", cost));
        }
        if let Some(waiting) = self.access.store.waiting() {
            figures.extend([
                ("waiting_objects", waiting.objects),
                ("waiting_bytes", waiting.bytes),
                ("waiting_oldest_ns", waiting.oldest.as_nanos() as u64),
            ]);
        }
        if let Some(cache) = self.cache_stats() {
            figures.extend([
                ("cache_hits", cache.hits),
                ("cache_misses", cache.misses),
                ("cache_bytes", cache.bytes),
                ("cache_bytes_max", cache.bytes_max),
                ("cache_damaged", cache.damaged),
            ]);
        }
        figures
    }

    fn create_snapshot(&self, name: &str) -> io::Result<()> {
        Ok(Self::create_snapshot(self, name)?)
    }

    fn delete_snapshot(&self, name: &str) -> io::Result<()> {
        Ok(Self::delete_snapshot(self, name)?)
    }

    fn snapshots(&self) -> io::Result<Vec<Snapshot>> {
        Ok(Self::snapshots(self))
    }

    fn snapshot_numbers(&self) -> io::Result<Vec<(u64, String)>> {
        // Who does not own the volume is not told of new ones.
        if self.is_read_only() {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let state = self.state.lock();
        Ok(numbered(&state.roots.pins).map(|(number, name)| (number, name.to_owned())).collect())
    }

    fn open_snapshot(&self, number: u64) -> io::Result<Arc<dyn BlockDevice>> {
        let opened = self.open_beside(number).inspect_err(|error| {
            tracing::warn!(%error, number, "a snapshot cannot be opened");
        });
        Ok(opened?)
    }

    fn failure(&self) -> Option<String> {
        Self::failure(self).map(|error| error.to_string())
    }

    fn held(&self) -> Option<HeldRequests> {
        self.held_requests().map(|Held { requests, time, reason }| HeldRequests {
            requests,
            time,
            reason,
        })
    }

    fn flush_timing(&self) -> FlushTiming {
        self.flush_timer.get()
    }

    fn reset_flush_timing(&self) {
        self.flush_timer.reset();
    }

    fn next_data(&self, offset: u64) -> u64 {
        let first = offset / BLOCK as u64;
        let len = (self.capacity() / BLOCK as u64).saturating_sub(first);
        let state = self.state.lock();
        let pending = state.sealed.iter().map(|sealed| &*sealed.runs);
        let pending = pending.chain([&state.open.runs]).filter_map(|runs| {
            let mut data = runs.find(first, len).filter(|run| run.value.bytes(run.len).is_some());
            data.next().map(|run| run.start)
        });
        let mapped = state.map.find(first, len).next().map(|run| run.start);
        let next = pending.chain(mapped).min();
        next.map_or(self.capacity(), |block| (block * BLOCK as u64).max(offset))
    }
}

/// Runs that a shard's table has.
pub(crate) type ShardRuns = Vec<Run<Location>>;
