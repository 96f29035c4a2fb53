//! The queue of [`LocalStore`] under the model checker: callers, uploads and the store in each
//! order that it tries. Planted bugs show that it would find violations.

use super::*;
use crate::format::{Header, encode, encode_entries, log_name, new_header, root_name};
use ferry_device::{AlignedBuf, BLOCK_SIZE, Io, MemDevice};
use ferry_env::planted::plant_here;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread::{self, JoinHandle};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

const SCHEDULES: usize = 1_000;
const VOLUME: Id = [7; 16];
/// Log objects that the store may lack, from the first one that it lacks on.
const WINDOW: u64 = 2;
/// Room for two callers: each reserves two blocks.
const RING_BLOCKS: u64 = 4;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The disk refuses this write (from 0), and takes the later ones.
    Write(u64),
    /// A flush fails.
    Flush,
    /// The store does not answer for so many requests.
    Outage(u32),
    /// Another owner has taken this number in the log.
    Fenced(u64),
}

/// The disk of the log.
struct Disk {
    memory: MemDevice,
    fault: Fault,
    writes: std::sync::atomic::AtomicU64,
}

impl BlockDevice for Disk {
    fn capacity(&self) -> u64 {
        self.memory.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        // Others may write over what is to be read.
        thread::yield_now();
        self.memory.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        let number = self.writes.fetch_add(1, Ordering::Relaxed);
        match self.fault == Fault::Write(number) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => self.memory.write(offset, buf),
        }
    }
    fn flush(&self) -> io::Result<()> {
        // The first one makes the log.
        match self.fault == Fault::Flush && self.writes.load(Ordering::Relaxed) > 4 {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        }
    }
    fn submit(&self, batch: Vec<Io>) {
        self.memory.submit(batch);
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.memory.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.memory.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        None
    }
}

/// What the store has, and what it must have before it may get an object.
#[derive(Default)]
struct Objects {
    there: BTreeMap<String, Vec<u8>>,
    /// Objects that were acknowledged.
    acknowledged: BTreeSet<String>,
    /// Of an object that is being created: what was acknowledged before.
    before: BTreeMap<String, BTreeSet<String>>,
    outage: u32,
}

struct ModelStore {
    objects: Mutex<Objects>,
}

impl ModelStore {
    /// The caller begins to create an object.
    fn begins(&self, name: &str) {
        let mut objects = lock(&self.objects);
        let acknowledged = objects.acknowledged.clone();
        objects.before.insert(name.into(), acknowledged);
    }

    fn acknowledges(&self, name: &str) {
        lock(&self.objects).acknowledged.insert(name.into());
    }

    fn request<T>(
        &self,
        answer: impl FnOnce(&mut Objects) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        thread::yield_now();
        let mut objects = lock(&self.objects);
        if let Some(left) = objects.outage.checked_sub(1) {
            objects.outage = left;
            return Err(ObjectError::Unavailable("it is away".into()));
        }
        answer(&mut objects)
    }
}

impl Objects {
    fn check_order(&self, name: &str) {
        let number = |name: &str| {
            let object = ObjectRef::of_name(name).filter(|_| name.starts_with(LOGS));
            object.map(|object| object.number)
        };
        for before in self.before.get(name).into_iter().flatten() {
            let late = match (number(name), number(before)) {
                (Some(seq), Some(before)) => before + WINDOW <= seq,
                _ => true,
            };
            let there = !late || self.there.contains_key(before);
            assert!(there, "LOCAL-2, LOCAL-3: the store gets {name} and lacks {before}");
        }
    }
}

impl Store for ModelStore {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.request(|objects| {
            let found = objects.there.get(name).ok_or(ObjectError::NotFound(name.into()))?;
            let range = range.unwrap_or(0..u64::MAX);
            let (start, end) = (range.start as usize, found.len().min(range.end as usize));
            Ok(found[start..end].to_vec())
        })
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.request(|objects| {
            if objects.there.contains_key(name) {
                return Err(ObjectError::Exists(name.into()));
            }
            objects.check_order(name);
            objects.there.insert(name.into(), bytes.into());
            Ok(())
        })
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.request(|objects| {
            objects.there.insert(name.into(), bytes.into());
            Ok(())
        })
    }
    fn delete(&self, _name: &str) -> Result<(), ObjectError> {
        unreachable!("the model deletes nothing")
    }
    fn list(&self, _prefix: &str) -> Result<Vec<String>, ObjectError> {
        unreachable!("the model lists nothing")
    }
}

/// A thread for each job.
#[derive(Default)]
struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Threads {
    /// Waits until no job is left.
    fn join(&self) {
        loop {
            let Some(job) = lock(&self.0).pop() else { return };
            job.join().expect("a job");
        }
    }
}

impl Executor for Threads {
    fn start(&self, job: Job) {
        let job = thread::spawn(move || (job.run)()());
        lock(&self.0).push(job);
    }
    fn step(&self) -> bool {
        false
    }
    fn pause(&self, _time: Duration) {
        thread::yield_now();
    }
}

/// What the threads of a model share.
struct Model {
    store: Arc<ModelStore>,
    executor: Arc<Threads>,
    local: Arc<LocalStore>,
    fault: Fault,
}

fn log_header(seq: u64) -> Header {
    new_header(Kind::Log, VOLUME, 1, seq, &Env::real())
}

fn data_name(n: u64) -> String {
    ObjectRef { epoch: 1, number: n }.name()
}

impl Model {
    fn new(fault: Fault) -> Arc<Self> {
        let outage = if let Fault::Outage(requests) = fault { requests } else { 0 };
        let mut objects = Objects { outage, ..Objects::default() };
        if let Fault::Fenced(seq) = fault {
            let fence = Header { kind: Kind::Fence, epoch: 2, ..log_header(seq) };
            objects.there.insert(log_name(seq), encode(&Default::default(), &fence, &[], &[]));
        }
        let store = Arc::new(ModelStore { objects: Mutex::new(objects) });
        let executor = Arc::<Threads>::default();
        let memory = MemDevice::new((2 + RING_BLOCKS) * BLOCK_SIZE as u64);
        let disk = Arc::new(Disk { memory, fault, writes: Default::default() });
        let env = Env::real();
        let (window, patience) = (WINDOW as u32, Duration::ZERO);
        let local =
            LocalStore::open(store.clone(), executor.clone(), disk, VOLUME, window, patience, &env);
        let local = local.expect("it is new");
        local.serve();
        Arc::new(Self { store, executor, local, fault })
    }

    /// What a caller was told of an object.
    fn told(&self, name: &str, bytes: &[u8], result: Result<(), ObjectError>) -> bool {
        match result {
            Ok(()) => {
                self.store.acknowledges(name);
                self.reads(name, bytes);
                true
            }
            // What goes to the store itself is repeated by the device.
            Err(ObjectError::Unavailable(_)) => false,
            Err(error) => {
                let fenced = matches!(error, ObjectError::Fenced { .. });
                assert!(fenced && matches!(self.fault, Fault::Fenced(_)), "{error}");
                true
            }
        }
    }

    /// An object is there once it was acknowledged, whether the store has it or the log.
    fn reads(&self, name: &str, bytes: &[u8]) {
        let found = loop {
            match self.local.get(name, None) {
                Err(ObjectError::Unavailable(_)) => thread::yield_now(),
                found => break found,
            }
        };
        assert!(found.as_deref() == Ok(bytes), "LOCAL-1: {name} was acknowledged");
    }

    fn put(&self, n: u64) {
        let (name, bytes) = (data_name(n), vec![n as u8; 100]);
        while !self.told(&name, &bytes, self.local.put(&name, &bytes)) {}
    }

    fn create(&self, name: &str, bytes: &[u8]) {
        self.store.begins(name);
        while !self.told(name, bytes, self.local.create(name, bytes)) {}
    }

    fn log(&self, seq: u64) {
        let table = encode_entries(&[]);
        self.create(&log_name(seq), &encode(&Default::default(), &log_header(seq), &table, &[]));
    }

    fn root(&self, n: u64) {
        self.create(&root_name(n), b"a root");
    }

    /// All callers have ended: so do the uploads, and nothing is left.
    fn end(&self) {
        self.executor.join();
        let state = lock(&self.local.state);
        let waiting = state.room.len() + state.barriers.len();
        assert_eq!((waiting, state.granted, state.uploading), (0, 0, 0), "nothing is under way");
        assert_eq!(state.failed.is_some(), matches!(self.fault, Fault::Fenced(_)));
        let objects = lock(&self.store.objects);
        if state.failed.is_none() {
            assert!(state.entries.is_empty() && state.names.is_empty(), "all are uploaded");
            let lacks = |name: &&String| !objects.there.contains_key(*name);
            assert_eq!(objects.acknowledged.iter().find(lacks), None, "the store lacks it");
        }
    }
}

/// Three threads: one writes data and log objects, one data, and one a root at last.
fn callers(fault: Fault) {
    let model = Model::new(fault);
    let with = |work: fn(&Model)| {
        let model = Arc::clone(&model);
        thread::spawn(move || work(&model))
    };
    let threads = [
        with(|model| {
            for n in 0..2 {
                model.put(n);
                model.log(n + 1);
            }
            model.log(3);
        }),
        with(|model| (10..13).for_each(|n| model.put(n))),
        with(|model| {
            model.put(20);
            model.log(4);
            model.root(1);
        }),
    ];
    threads.into_iter().for_each(|thread| thread.join().expect("a caller"));
    model.end();
}

/// One thread reads what is written over meanwhile.
fn reader() {
    let model = Model::new(Fault::Nothing);
    model.put(0);
    let writer = Arc::clone(&model);
    let writer = thread::spawn(move || (1..8).for_each(|n| writer.put(n)));
    let reader = Arc::clone(&model);
    let reader = thread::spawn(move || (0..2).for_each(|_| reader.reads(&data_name(0), &[0; 100])));
    [writer, reader].into_iter().for_each(|thread| thread.join().expect("a caller"));
    model.end();
}

fn check(fault: impl Fn() -> Fault + Send + Sync + Clone + 'static) {
    check_model(move || callers(fault()));
}

fn check_model(model: impl Fn() + Send + Sync + Clone + 'static) {
    let config = || {
        let mut config = shuttle::Config::new();
        config.stack_size = 256 << 10;
        config
    };
    let again = model.clone();
    let random = RandomScheduler::new(SCHEDULES);
    shuttle::Runner::new(random, config()).run(model);
    shuttle::Runner::new(PctScheduler::new(3, SCHEDULES), config()).run(again);
}

#[test]
fn callers_lose_nothing_and_none_waits_for_ever() {
    check(|| Fault::Nothing);
}

#[test]
fn a_read_gets_no_bytes_of_a_later_object() {
    check_model(reader);
}

#[test]
fn an_outage_of_the_store_loses_nothing() {
    check(|| Fault::Outage(thread_rng().gen_range(1..12)));
}

#[test]
fn a_disk_that_fails_makes_callers_wait_for_the_store() {
    check(|| Fault::Write(thread_rng().gen_range(1..12)));
    check(|| Fault::Flush);
}

#[test]
fn every_caller_hears_that_another_owner_is_there() {
    check(|| Fault::Fenced(thread_rng().gen_range(1..4)));
}

#[test]
fn each_planted_bug_is_found() {
    for bug in [Bug::UploadedBeforeData, Bug::RootBeforeUploads] {
        let planted = plant_here(bug);
        // Schedules are drawn anew each time, and few of them show the bug.
        let found =
            (0..5).any(|_| catch_unwind(AssertUnwindSafe(|| check(|| Fault::Nothing))).is_err());
        drop(planted);
        assert!(found, "{bug:?} is not found");
    }
}
