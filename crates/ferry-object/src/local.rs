//! [`LocalStore`]: a store whose log and data objects are durable on this machine first, and are
//! uploaded behind that (`durability=local`).
//!
//! * LOCAL-1: a log or data object is acknowledged when its record, and all before it, are flushed.
//!   It is read from the local log until the store has it.
//! * LOCAL-2: a log object is uploaded only after all data objects that were appended before it,
//!   and no further than the volume's window from the first one that the store lacks. So what the
//!   store has is what an owner without a local log could have left.
//! * LOCAL-3: a root is created only when the store has all that was appended before it. So nothing
//!   is deleted that the newest two roots in the store need.
//! * LOCAL-4: what a dead owner left is uploaded in its name, before the volume is claimed anew. A
//!   name that another owner took in the log ends that: what follows was never part of the volume.
//! * LOCAL-5: if the local log cannot take an object, as where its disk is full, the caller waits
//!   for the store instead.
//! * LOCAL-6: callers for whom the log has no room wait in a queue, and each is woken once.

mod sync;
#[cfg(test)]
mod tests;

use crate::access::{Access, Created, Held, Patience, Tries, backoff};
use crate::error::ObjectError;
use crate::executor::{Answer, Executor, Job};
use crate::format::{Id, Kind, LOGS, ObjectRef, ROOTS, header};
use crate::local_log::{
    LocalLog, NoLog, Object, Record, Recovered, Slot, read, read_whole, record_bytes,
};
use crate::store::{RequestCosts, Store, Waiting};
use ferry_device::{BlockDevice, FlushCoordinator};
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;
use sync::{AtomicBool, Mutex, Ordering, lock, mpsc, try_lock};

/// Uploads that are under way together.
const UPLOADS_MAX: usize = 16;
/// So many waiting objects are looked at for one that may be uploaded.
const LOOK_MAX: usize = 256;
/// An object that the log does not give is read so often, in 1.5 s.
const READS_MAX: u32 = 5;
/// If the oldest object waits for so long, callers wait, too.
const AGE_MAX: Duration = Duration::from_secs(600);

/// An object that the store does not have.
struct Entry {
    slot: Slot,
    name: String,
    /// It is created, and not put.
    exclusive: bool,
    since: Duration,
    /// Seconds since the Unix epoch.
    secs: u64,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its record is written, and not flushed.
    Written,
    Durable,
    Uploading,
}

/// Why an object was not uploaded.
enum NotUploaded {
    /// The log does not give it.
    Unread(ObjectError),
    Store(ObjectError),
}

/// How often the upload of an object failed.
#[derive(Default)]
struct UploadTries {
    store: Tries,
    /// Reads of the log that failed since the store was asked last.
    reads: u32,
}

/// A caller that waits. It is told once, or hears that nobody will tell it.
type Waiter = mpsc::Sender<()>;

struct State {
    /// By the numbers of their records.
    entries: BTreeMap<u64, Entry>,
    names: HashMap<String, u64>,
    /// Position and number of the next record.
    head: u64,
    next: u64,
    /// All records before this number are flushed.
    durable: u64,
    /// Bytes of the ring that are reserved to callers.
    granted: u64,
    uploading: usize,
    /// Callers that wait for so many bytes of the ring, in order.
    room: VecDeque<(u64, Waiter)>,
    /// Callers that wait until no record before a number waits.
    barriers: Vec<(u64, Waiter)>,
    /// Why nothing is taken or uploaded any more.
    failed: Option<ObjectError>,
    /// The log takes nothing more: its disk has failed.
    broken: bool,
    /// The log has said that its disk takes nothing at present.
    warned: bool,
}

/// What was lost with objects that cannot be uploaded any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Flushes.
    pub flushes: u64,
    /// When the first of them was acknowledged, in seconds since the Unix epoch.
    pub since_secs: u64,
}

/// Why a local log is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// It is the log of another volume.
    OtherVolume,
    /// It is no local log.
    Foreign,
    /// Its disk fails.
    Failed(String),
}

/// The module's documentation has the rules.
pub struct LocalStore {
    access: Access,
    env: Env,
    window: u64,
    ring: u64,
    flusher: Arc<FlushCoordinator>,
    log: Mutex<LocalLog>,
    state: Mutex<State>,
    /// The volume is served: requests are repeated without end.
    serving: AtomicBool,
    /// Acknowledged records that a damaged one has cut off.
    cut: u64,
    id: Id,
    me: Weak<Self>,
}

impl State {
    fn tail(&self) -> Option<Slot> {
        self.entries.first_key_value().map(|(_, entry)| entry.slot)
    }

    fn has_room(&self, need: u64, ring: u64, now: Duration) -> bool {
        let oldest = self.entries.first_key_value().map(|(_, entry)| entry);
        let tail = oldest.map_or(self.head, |oldest| oldest.slot.at);
        let young = oldest.is_none_or(|oldest| now < oldest.since + AGE_MAX);
        young && self.head + self.granted + need <= tail + ring
    }

    /// Entries that are to be uploaded now (LOCAL-2).
    fn next_uploads(&mut self, window: u64) -> Vec<u64> {
        let logs = self.entries.values().take(LOOK_MAX).filter_map(Entry::log_seq);
        let end = logs.min().map_or(0, |first| first + window);
        let (mut chosen, mut data_waits) = (Vec::new(), false);
        for (number, entry) in self.entries.iter_mut().take(LOOK_MAX) {
            if self.uploading >= UPLOADS_MAX {
                break;
            }
            let free = match entry.log_seq() {
                Some(seq) => (!data_waits || is_planted(Bug::UploadedBeforeData)) && seq < end,
                None => true,
            };
            if free && entry.stage == Stage::Durable {
                entry.stage = Stage::Uploading;
                self.uploading += 1;
                chosen.push(*number);
            }
            data_waits |= entry.log_seq().is_none();
        }
        chosen
    }

    /// Wakes callers whose time has come.
    fn wake(&mut self, ring: u64, now: Duration) {
        while let Some((need, _)) = self.room.front()
            && self.has_room(*need, ring, now)
        {
            let Some((need, waiter)) = self.room.pop_front() else { break };
            self.granted += need;
            waiter.send(()).ok();
        }
        let first = self.entries.first_key_value().map_or(u64::MAX, |(number, _)| *number);
        self.barriers.retain(|(before, waiter)| {
            let waits = first < *before;
            if !waits {
                waiter.send(()).ok();
            }
            waits
        });
    }

    fn fail(&mut self, error: ObjectError) {
        self.failed.get_or_insert(error);
        self.room.clear();
        self.barriers.clear();
    }

    fn remove(&mut self, number: u64) {
        if let Some(entry) = self.entries.remove(&number) {
            self.names.remove(&entry.name);
        }
    }
}

impl UploadTries {
    /// The pause before the next try; none before the first one.
    fn pause(&self) -> Duration {
        self.reads.checked_sub(1).map_or_else(|| self.store.pause(), backoff)
    }

    /// Whether an upload that failed so is tried again; if so, the try is counted.
    fn repeats(&mut self, access: &Access, why: &NotUploaded) -> bool {
        match why {
            NotUploaded::Store(error) => {
                self.reads = 0;
                access.repeats(error, &mut self.store)
            }
            NotUploaded::Unread(error) => {
                if self.reads == 0 {
                    tracing::warn!(%error, "an object is read from the local log again");
                }
                self.reads += 1;
                self.reads < READS_MAX
            }
        }
    }
}

impl NotUploaded {
    fn into_error(self) -> ObjectError {
        let (Self::Unread(error) | Self::Store(error)) = self;
        error
    }
}

impl Entry {
    /// Of a log object: its number.
    fn log_seq(&self) -> Option<u64> {
        self.exclusive.then(|| ObjectRef::of_name(&self.name).map(|object| object.number)).flatten()
    }
}

impl LocalStore {
    /// Opens the log on a device, or makes it there, for the volume in a store. `executor` runs
    /// the uploads, and nothing that waits for them.
    pub fn open(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        device: Arc<dyn BlockDevice>,
        volume: Id,
        window: u32,
        patience: Duration,
        env: &Env,
    ) -> Result<Arc<Self>, NotTaken> {
        let failed = |error: &io::Error| NotTaken::Failed(error.to_string());
        let (log, found) = match LocalLog::open(Arc::clone(&device), &volume) {
            Ok(opened) => opened,
            Err(NoLog::Blank) => {
                let log = LocalLog::make(device, volume, env).map_err(|error| failed(&error))?;
                (log, Recovered::default())
            }
            Err(NoLog::OtherVolume) => return Err(NotTaken::OtherVolume),
            Err(NoLog::Foreign) => return Err(NotTaken::Foreign),
            Err(NoLog::Io(error)) => return Err(failed(&error)),
        };
        let access = Access::new(store, executor, Patience::Opening(patience), env);
        let next = found.records.last().map_or(0, |record| record.slot.number + 1);
        let mut state = State {
            entries: BTreeMap::new(),
            names: HashMap::new(),
            head: log.head(),
            next,
            durable: next,
            granted: 0,
            uploading: 0,
            room: VecDeque::new(),
            barriers: Vec::new(),
            failed: None,
            broken: false,
            warned: false,
        };
        let since = env.clock.monotonic();
        for Record { slot, name, exclusive, secs } in found.records {
            let number = slot.number;
            state.names.insert(name.clone(), number);
            let entry = Entry { slot, name, exclusive, since, secs, stage: Stage::Durable };
            state.entries.insert(number, entry);
        }
        Ok(Arc::new_cyclic(|me| Self {
            access,
            env: env.clone(),
            window: u64::from(window),
            ring: log.ring(),
            flusher: log.flusher(),
            id: log.id(),
            log: Mutex::new(log),
            state: Mutex::new(state),
            serving: AtomicBool::new(false),
            cut: found.cut,
            me: me.clone(),
        }))
    }

    /// The number that tells the log from others.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Records that were acknowledged, and that are lost because one before them is damaged.
    pub fn cut(&self) -> u64 {
        self.cut
    }

    /// Uploads what the log had when it was opened (LOCAL-4). It is empty then, and that is
    /// durable.
    pub fn upload_all(&self) -> Result<(), ObjectError> {
        self.pump();
        self.await_uploads()?;
        let emptied = lock(&self.log).restart(&self.env);
        emptied.map_err(|error| {
            ObjectError::Setup(format!("the local log cannot be written: {error}"))
        })?;
        let log = lock(&self.log);
        let mut state = lock(&self.state);
        (state.head, state.next, state.durable) = (log.head(), 0, 0);
        Ok(())
    }

    /// Callers that wait until the log has room.
    pub fn callers_waiting(&self) -> usize {
        lock(&self.state).room.len()
    }

    /// From now on requests are repeated until the store carries them out.
    pub fn serve(&self) {
        self.serving.store(true, Ordering::Relaxed);
    }

    /// What is in the log and not in the volume, when [`LocalStore::upload_all`] has failed.
    pub fn lost(&self) -> Lost {
        let state = lock(&self.state);
        let flushes = state.entries.values().filter(|entry| entry.exclusive);
        let since_secs = flushes.clone().map(|entry| entry.secs).min().unwrap_or_default();
        Lost { flushes: flushes.count() as u64, since_secs }
    }

    fn access(&self) -> Access {
        let mut access = self.access.clone();
        if self.serving.load(Ordering::Relaxed) {
            access.patience = Patience::Serving;
        }
        access
    }

    /// Waits until it is told; an error: the layer has failed.
    fn wait(&self, told: &mpsc::Receiver<()>) -> Result<(), ObjectError> {
        let heard = loop {
            match told.try_recv() {
                Ok(()) => break true,
                Err(mpsc::TryRecvError::Empty) if self.access.executor.step() => {}
                Err(_) => break told.recv().is_ok(),
            }
        };
        match (heard, &lock(&self.state).failed) {
            (true, _) => Ok(()),
            (false, Some(error)) => Err(error.clone()),
            (false, None) => Err(ObjectError::Unavailable("the local log was closed".into())),
        }
    }

    /// Waits until the store has all that was appended until now (LOCAL-3).
    fn await_uploads(&self) -> Result<(), ObjectError> {
        let told = {
            let mut state = lock(&self.state);
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.entries.is_empty() || is_planted(Bug::RootBeforeUploads) {
                return Ok(());
            }
            let (tell, told) = mpsc::channel();
            let next = state.next;
            state.barriers.push((next, tell));
            told
        };
        self.wait(&told)
    }

    /// Waits until the log has room for so many bytes, which are reserved then (LOCAL-6).
    fn await_room(&self, need: u64) -> Result<(), ObjectError> {
        let told = {
            let mut state = lock(&self.state);
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let now = self.env.clock.monotonic();
            if state.room.is_empty() && state.has_room(need, self.ring, now) {
                state.granted += need;
                return Ok(());
            }
            let (tell, told) = mpsc::channel();
            state.room.push_back((need, tell));
            told
        };
        self.wait(&told)
    }

    /// Makes an object durable in the log; `false`: the log does not take it (LOCAL-5).
    fn append(&self, name: &str, bytes: &[u8], exclusive: bool) -> Result<bool, ObjectError> {
        // A record may have to begin at the front of the ring.
        let need = 2 * record_bytes(name, bytes);
        if lock(&self.state).broken || need > self.ring {
            return Ok(false);
        }
        self.await_room(need)?;
        let secs = self.env.clock.wall().as_secs();
        let appended = {
            let mut log = lock(&self.log);
            let (tail, durable) = {
                let state = lock(&self.state);
                (state.tail(), state.durable)
            };
            let appended = log.append(&Object { name, bytes, exclusive, secs, durable }, tail);
            let mut state = lock(&self.state);
            state.granted -= need;
            state.head = log.head();
            if appended.is_err() {
                // No upload may follow that would wake them.
                state.wake(self.ring, self.env.clock.monotonic());
            }
            appended.map(|(slot, target)| {
                state.next = slot.number + 1;
                state.names.insert(name.into(), slot.number);
                let since = self.env.clock.monotonic();
                let stage = Stage::Written;
                let entry = Entry { slot, name: name.into(), exclusive, since, secs, stage };
                state.entries.insert(slot.number, entry);
                (slot.number, target)
            })
        };
        let (number, target) = match appended {
            Ok(appended) => appended,
            Err(error) => {
                self.warn(&error, false);
                return Ok(false);
            }
        };
        let flushed = match is_planted(Bug::AcknowledgedBeforeLocalFlush) {
            true => Ok(()),
            false => self.flusher.flush_wait(target),
        };
        {
            let mut state = lock(&self.state);
            if flushed.is_ok() {
                if let Some(entry) = state.entries.get_mut(&number) {
                    entry.stage = Stage::Durable;
                }
                state.durable = state.durable.max(number + 1);
                state.warned = false;
            } else {
                state.remove(number);
                let now = self.env.clock.monotonic();
                state.wake(self.ring, now);
            }
        }
        if let Err(error) = flushed {
            self.warn(&error, true);
            // What had to wait for the object may be uploaded now.
            self.pump();
            return Ok(false);
        }
        self.pump();
        Ok(true)
    }

    /// Says that callers wait for the store because the local disk takes nothing.
    fn warn(&self, error: &io::Error, broken: bool) {
        let mut state = lock(&self.state);
        state.broken |= broken;
        if !std::mem::replace(&mut state.warned, true) {
            tracing::warn!(%error, "the local log takes nothing: its disk is full or has failed; syncs wait for the store meanwhile");
        }
    }

    /// Starts the uploads that may start.
    fn pump(&self) {
        let numbers = {
            let mut state = lock(&self.state);
            if state.failed.is_some() { Vec::new() } else { state.next_uploads(self.window) }
        };
        for number in numbers {
            self.access.executor.start(self.upload(number, UploadTries::default()));
        }
    }

    fn upload(&self, number: u64, mut tries: UploadTries) -> Job {
        let (me, after) = (Weak::clone(&self.me), tries.pause());
        let run = move || -> Answer {
            let Some(me) = me.upgrade() else { return Box::new(|| ()) };
            let access = me.access();
            match me.upload_once(&access, number) {
                Err(why) if tries.repeats(&access, &why) => {
                    Box::new(move || me.access.executor.start(me.upload(number, tries)))
                }
                result => {
                    Box::new(move || me.answered(number, result.map_err(NotUploaded::into_error)))
                }
            }
        };
        Job { upload: None, after, run: Box::new(run) }
    }

    fn upload_once(&self, access: &Access, number: u64) -> Result<(), NotUploaded> {
        let (name, slot, exclusive) = {
            let state = lock(&self.state);
            match (&state.failed, state.entries.get(&number)) {
                (Some(error), _) => return Err(NotUploaded::Store(error.clone())),
                (None, None) => return Ok(()),
                (None, Some(entry)) => (entry.name.clone(), entry.slot, entry.exclusive),
            }
        };
        let bytes = self.read_back(&name, &slot).map_err(NotUploaded::Unread)?;
        let created = match exclusive {
            true => access.create_once(&name, &bytes),
            false => access.put_once(&name, &bytes).map(|()| Created::Ours),
        };
        let owned = created.and_then(|created| match created {
            Created::Foreign(_) | Created::Vanished if is_planted(Bug::UploadedOverAnother) => {
                Ok(())
            }
            created => created.or_fenced(),
        });
        owned.map_err(NotUploaded::Store)
    }

    /// The bytes of an object, as they were appended.
    fn read_back(&self, name: &str, slot: &Slot) -> Result<Vec<u8>, ObjectError> {
        let damaged = |what| ObjectError::Damaged { name: name.into(), what };
        read_whole(&**self.flusher.device(), slot)
            .map_err(|_| damaged("the local log, which alone has it, cannot be read"))?
            .ok_or_else(|| damaged("the local log, which alone has it, was changed"))
    }

    fn answered(&self, number: u64, result: Result<(), ObjectError>) {
        let empty = {
            let mut state = lock(&self.state);
            state.uploading -= 1;
            match result {
                Ok(()) => state.remove(number),
                Err(error) => {
                    if state.failed.is_none() && self.serving.load(Ordering::Relaxed) {
                        tracing::error!(%error, "what the local log has cannot be uploaded");
                    }
                    return state.fail(error);
                }
            }
            let now = self.env.clock.monotonic();
            state.wake(self.ring, now);
            state.entries.is_empty() && !state.broken
        };
        if empty && let Some(mut log) = try_lock(&self.log) {
            // Another record may have been appended; none is while the log is locked.
            let still = lock(&self.state).entries.is_empty();
            if still && let Err(error) = log.note_empty() {
                tracing::debug!(%error, "the local log does not note that it is empty");
            }
        }
        self.pump();
    }
}

impl Store for LocalStore {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let find = || {
            let state = lock(&self.state);
            state.names.get(name).and_then(|number| Some(state.entries.get(number)?.slot))
        };
        if let Some(slot) = find() {
            let found = read(&**self.flusher.device(), &slot, range.clone());
            // If the store has it meanwhile, other bytes may be there.
            if find() == Some(slot) {
                let what = "the local log, which alone has it, cannot be read";
                return found.map_err(|_| ObjectError::Damaged { name: name.into(), what });
            }
        }
        self.access.store.get(name, range)
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        if name.starts_with(LOGS) && header(name, bytes)?.kind == Kind::Log {
            if self.append(name, bytes, true)? {
                return Ok(());
            }
            self.await_uploads()?;
        } else if name.starts_with(ROOTS) {
            self.await_uploads()?;
        }
        self.access.store.create(name, bytes)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        if name.starts_with(ObjectRef::DATA) && self.append(name, bytes, false)? {
            return Ok(());
        }
        self.access.store.put(name, bytes)
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.access.store.delete(name)
    }

    fn name(&self) -> Result<String, ObjectError> {
        self.access.store.name()
    }

    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        self.access.store.beside(name)
    }

    fn settle(&self) {
        self.access.store.settle();
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.access.store.list(prefix)
    }

    fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, ObjectError> {
        self.access.store.list_sizes(prefix)
    }

    fn sample(&self) -> Result<Vec<String>, ObjectError> {
        self.access.store.sample()
    }

    fn request_costs(&self) -> Option<RequestCosts> {
        self.access.store.request_costs()
    }

    fn check_rules(&self) -> Result<Vec<String>, ObjectError> {
        self.access.store.check_rules()
    }

    fn waiting(&self) -> Option<Waiting> {
        let state = lock(&self.state);
        let now = self.env.clock.monotonic();
        let oldest = state.entries.first_key_value();
        Some(Waiting {
            objects: state.entries.len() as u64,
            bytes: state.entries.values().map(|entry| entry.slot.len).sum(),
            oldest: oldest.map_or(Duration::ZERO, |(_, entry)| now.saturating_sub(entry.since)),
        })
    }

    fn held(&self) -> Option<Held> {
        self.access.held()
    }
}
