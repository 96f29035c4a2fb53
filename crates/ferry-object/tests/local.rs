//! The local log in front of a store: what it has survives, whatever is wrong with it is said, and
//! callers never lose an object to it. `ferry-sim` crashes it.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_object::{Executor, Job, LocalStore, NotTaken, ObjectError, Store, ThreadExecutor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A store that can be away.
#[derive(Default)]
struct TestStore {
    away: AtomicBool,
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl TestStore {
    fn check(&self) -> Result<(), ObjectError> {
        match self.away.load(Ordering::Relaxed) {
            true => Err(ObjectError::Unavailable("it is away".into())),
            false => Ok(()),
        }
    }
}

impl Store for TestStore {
    fn get(&self, name: &str, _range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.check()?;
        let objects = self.objects.lock().expect("no test panics here");
        objects.get(name).cloned().ok_or_else(|| ObjectError::NotFound(name.into()))
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.put(name, bytes)
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.check()?;
        self.objects.lock().expect("no test panics here").insert(name.into(), bytes.to_vec());
        Ok(())
    }
    fn delete(&self, _name: &str) -> Result<(), ObjectError> {
        self.check()
    }
    fn list(&self, _prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.check().map(|()| Vec::new())
    }
}

const VOLUME: [u8; 16] = [7; 16];

fn open(
    store: &Arc<TestStore>,
    device: &Arc<impl BlockDevice + 'static>,
    volume: [u8; 16],
) -> Result<Arc<LocalStore>, NotTaken> {
    let env = Env::real();
    let executor = Arc::new(ThreadExecutor::new(&env).expect("threads can be started"));
    open_with(store, executor, device, volume)
}

fn open_with(
    store: &Arc<TestStore>,
    executor: Arc<dyn Executor>,
    device: &Arc<impl BlockDevice + 'static>,
    volume: [u8; 16],
) -> Result<Arc<LocalStore>, NotTaken> {
    let env = Env::real();
    LocalStore::open(store.clone(), executor, device.clone(), volume, 4, Duration::ZERO, &env)
}

fn name(n: u64) -> String {
    format!("s/{n:02x}/0000000000000001-{n:x}")
}

fn bytes(n: u64) -> Vec<u8> {
    (0..5000).map(|at| (at * 7 + n * 13) as u8).collect()
}

/// A log with objects that the store does not have.
fn filled(store: &Arc<TestStore>, device: &Arc<MemDevice>, count: u64) {
    store.away.store(true, Ordering::Relaxed);
    let local = open(store, device, VOLUME).expect("it is new");
    local.upload_all().expect("there is nothing");
    local.serve();
    for n in 0..count {
        local.put(&name(n), &bytes(n)).expect("the log takes it");
    }
    assert_eq!(local.waiting().expect("it has a log").objects, count);
    for n in 0..count {
        assert_eq!(local.get(&name(n), None), Ok(bytes(n)), "it is read from the log");
        assert_eq!(local.get(&name(n), Some(100..300)), Ok(bytes(n)[100..300].to_vec()));
    }
    end(local);
    store.away.store(false, Ordering::Relaxed);
}

/// Waits for the upload that is being tried, too: it must not find the store back.
fn end(local: Arc<LocalStore>) {
    let held = Arc::downgrade(&local);
    drop(local);
    while held.strong_count() > 0 {
        std::thread::yield_now();
    }
}

fn await_uploads(local: &LocalStore) {
    while local.waiting().is_some_and(|waiting| waiting.objects > 0) {
        std::thread::yield_now();
    }
}

#[test]
fn what_the_log_has_is_uploaded_by_the_next_opening() {
    let (store, device) = (Arc::default(), Arc::new(MemDevice::new(1 << 20)));
    filled(&store, &device, 20);
    store.away.store(true, Ordering::Relaxed);
    let local = open(&store, &device, VOLUME).expect("it is ours");
    assert!(matches!(local.upload_all(), Err(ObjectError::Unavailable(_))), "it is said");
    store.away.store(false, Ordering::Relaxed);
    let local = open(&store, &device, VOLUME).expect("it is ours");
    assert_eq!((local.cut(), local.upload_all()), (0, Ok(())));
    for n in 0..20 {
        assert_eq!(store.get(&name(n), None), Ok(bytes(n)));
    }
    assert_eq!(local.waiting().expect("it has a log").objects, 0);
    let local = open(&store, &device, VOLUME).expect("it is ours");
    assert_eq!(local.waiting().expect("it has a log").objects, 0, "that is durable");
}

#[test]
fn a_damaged_record_cuts_the_log_and_that_is_said() {
    let (store, device) = (Arc::default(), Arc::new(MemDevice::new(1 << 20)));
    filled(&store, &device, 20);
    // Each record has two blocks, behind two blocks of headers.
    let at = (2 + 2 * 12) * BLOCK_SIZE as u64;
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(at, &mut block).expect("it is there");
    block[1000] ^= 1;
    device.write(at, &block).expect("it is there");
    let local = open(&store, &device, VOLUME).expect("it is ours");
    assert_eq!(local.upload_all(), Ok(()));
    // The last one does not say of itself that it was acknowledged.
    assert_eq!(local.cut(), 7);
    for n in 0..20 {
        assert_eq!(store.get(&name(n), None).is_ok(), n < 12, "{n}");
    }
}

#[test]
fn a_log_of_another_volume_or_program_is_left_alone() {
    let (store, device) = (Arc::default(), Arc::new(MemDevice::new(1 << 20)));
    filled(&store, &device, 3);
    assert_eq!(open(&store, &device, [8; 16]).err(), Some(NotTaken::OtherVolume));
    let mut block = AlignedBuf::zeroed(2 * BLOCK_SIZE);
    block.fill(b'x');
    let foreign = Arc::new(MemDevice::new(1 << 20));
    foreign.write(0, &block).expect("it is there");
    assert_eq!(open(&store, &foreign, VOLUME).err(), Some(NotTaken::Foreign));
    let local = open(&store, &device, VOLUME).expect("it is ours");
    assert_eq!(local.upload_all(), Ok(()));
    assert_eq!(store.get(&name(2), None), Ok(bytes(2)));
}

#[test]
fn callers_wait_when_the_log_is_full_and_lose_nothing() {
    let (store, device) = (Arc::<TestStore>::default(), Arc::new(MemDevice::new(60 << 12)));
    store.away.store(true, Ordering::Relaxed);
    let local = open(&store, &device, VOLUME).expect("it is new");
    local.serve();
    let (ended, end) = channel();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (local, ended) = (&local, ended.clone());
            scope.spawn(move || {
                for n in 0..30 {
                    local.put(&name(thread * 30 + n), &bytes(n)).expect("it waits");
                    ended.send(()).expect("the test waits");
                }
            });
        }
        // As many as the ring has room for; a record may need as much again, to begin at its front.
        for _ in 0..20 {
            end.recv().expect("the log takes it");
        }
        assert!(local.waiting().expect("it has a log").objects < 30);
        store.away.store(false, Ordering::Relaxed);
    });
    assert_eq!(open(&store, &device, VOLUME).expect("it is ours").upload_all(), Ok(()));
    for thread in 0..4 {
        for n in 0..30 {
            assert_eq!(store.get(&name(thread * 30 + n), None), Ok(bytes(n)), "{thread} {n}");
        }
    }
}

/// A disk of which one write fails, or some reads.
struct BadDisk {
    disk: MemDevice,
    /// The next write fails.
    full: AtomicBool,
    /// So many of the next reads fail.
    bad_reads: AtomicU32,
    /// Told when that write has come. It fails once `go_on` says so.
    came: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
}

impl BadDisk {
    /// A ring of 40 blocks; what is told of the write that fails, and what lets it go on.
    fn new() -> (Arc<Self>, Receiver<()>, Sender<()>) {
        let ((come, came), (tell, told)) = (channel(), channel());
        let disk = Self {
            disk: MemDevice::new(42 << 12),
            full: AtomicBool::new(false),
            bad_reads: AtomicU32::new(0),
            came: Mutex::new(come),
            go_on: Mutex::new(told),
        };
        (Arc::new(disk), came, tell)
    }
}

impl BlockDevice for BadDisk {
    fn capacity(&self) -> u64 {
        self.disk.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> std::io::Result<()> {
        let left = |bad: u32| bad.checked_sub(1);
        match self.bad_reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left) {
            Ok(_) => Err(std::io::ErrorKind::Other.into()),
            Err(_) => self.disk.read(offset, buf),
        }
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> std::io::Result<()> {
        if !self.full.swap(false, Ordering::Relaxed) {
            return self.disk.write(offset, buf);
        }
        self.came.lock().expect("no test panics here").send(()).expect("the test waits");
        self.go_on.lock().expect("no test panics here").recv().expect("the test says so");
        Err(std::io::ErrorKind::StorageFull.into())
    }
    fn flush(&self) -> std::io::Result<()> {
        self.disk.flush()
    }
    fn submit(&self, batch: Vec<ferry_device::Io>) {
        self.disk.submit(batch);
    }
    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.disk.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.disk.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        self.disk.host_free()
    }
}

#[test]
fn a_write_that_the_disk_refuses_gives_its_room_to_those_who_wait() {
    let ((device, came, tell), store) = (BadDisk::new(), Arc::<TestStore>::default());
    let local = open(&store, &device, VOLUME).expect("it is new");
    local.upload_all().expect("there is nothing");
    local.serve();
    device.full.store(true, Ordering::Relaxed);
    // Each reserves more than half of the ring.
    let large = vec![5; 60_000];
    let (end, ended) = channel();
    for n in 0..2 {
        let (local, large, end) = (local.clone(), large.clone(), end.clone());
        // Not scoped: one that waits for ever must fail the test.
        std::thread::spawn(move || end.send(local.put(&name(n), &large)));
        if n == 0 {
            came.recv().expect("the first one writes");
        }
    }
    while local.callers_waiting() == 0 {
        std::thread::yield_now();
    }
    tell.send(()).expect("the disk waits");
    for _ in 0..2 {
        let put = ended.recv_timeout(Duration::from_secs(20));
        assert_eq!(put.expect("nobody waits for ever"), Ok(()));
    }
    await_uploads(&local);
    for n in 0..2 {
        assert_eq!(store.get(&name(n), None), Ok(large.clone()));
    }
}

#[test]
fn a_header_that_cannot_be_written_hides_no_later_record() {
    let ((device, _came, tell), store) = (BadDisk::new(), Arc::<TestStore>::default());
    let local = open(&store, &device, VOLUME).expect("it is new");
    local.upload_all().expect("there is nothing");
    local.serve();
    // Each record has 5 of the 40 blocks.
    let bytes = vec![5; 20_000];
    let put = |local: &LocalStore, n| {
        local.put(&name(n), &bytes).expect("the log or the store takes it");
    };
    let uploaded = |local: &LocalStore| {
        store.away.store(false, Ordering::Relaxed);
        await_uploads(local);
    };
    let all = |local: &LocalStore, numbers: Range<u64>| {
        for n in numbers {
            put(local, n);
            uploaded(local);
        }
    };
    all(&local, 0..3);
    // The last one of these is at the front, and a durable header names the first.
    store.away.store(true, Ordering::Relaxed);
    (3..9).for_each(|n| put(&local, n));
    uploaded(&local);
    // The last one of these needs a durable header.
    all(&local, 9..12);
    // The next one would be at the front again, and the header that says so cannot be written.
    device.full.store(true, Ordering::Relaxed);
    tell.send(()).expect("the disk waits");
    all(&local, 12..13);
    assert!(!device.full.load(Ordering::Relaxed), "a write has failed");
    store.away.store(true, Ordering::Relaxed);
    put(&local, 13);
    assert_eq!(local.waiting().expect("it has a log").objects, 1);
    end(local);
    store.away.store(false, Ordering::Relaxed);
    assert_eq!(open(&store, &device, VOLUME).expect("it is ours").upload_all(), Ok(()));
    assert!(store.get(&name(13), None) == Ok(bytes), "it was durable in the log");
}

/// Runs jobs when it is told to, and notes the pauses before them in milliseconds.
#[derive(Default)]
struct ByHand {
    jobs: Mutex<Vec<Job>>,
    pauses: Mutex<Vec<u128>>,
}

impl Executor for ByHand {
    fn start(&self, job: Job) {
        self.jobs.lock().expect("no test panics here").push(job);
    }
    fn step(&self) -> bool {
        let Some(job) = self.jobs.lock().expect("no test panics here").pop() else { return false };
        self.pauses.lock().expect("no test panics here").push(job.after.as_millis());
        (job.run)()();
        true
    }
    fn pause(&self, _time: Duration) {}
}

/// Puts one object while the store is away for `outage` requests. Then `bad_reads` of the log
/// fail. Returns the pauses before the reads, if the store has the object at last.
fn upload_with_bad_reads(outage: usize, bad_reads: u32) -> Option<Vec<u128>> {
    let ((device, _came, _tell), store) = (BadDisk::new(), Arc::<TestStore>::default());
    let executor = Arc::<ByHand>::default();
    let local = open_with(&store, executor.clone(), &device, VOLUME).expect("it is new");
    local.upload_all().expect("there is nothing");
    local.serve();
    store.away.store(true, Ordering::Relaxed);
    local.put(&name(0), &bytes(0)).expect("the log takes it");
    for _ in 0..outage {
        assert!(executor.step(), "the upload is repeated");
    }
    store.away.store(false, Ordering::Relaxed);
    device.bad_reads.store(bad_reads, Ordering::Relaxed);
    executor.pauses.lock().expect("no test panics here").clear();
    while executor.step() {}
    let pauses = executor.pauses.lock().expect("no test panics here").clone();
    let waits = local.waiting().expect("it has a log").objects > 0;
    assert_eq!(local.put(&name(1), &bytes(1)).is_err(), waits, "nothing is taken any more");
    (!waits).then_some(pauses)
}

#[test]
fn an_object_that_the_log_does_not_give_is_read_again_for_a_while() {
    assert_eq!(upload_with_bad_reads(0, 0), Some(vec![0]));
    assert_eq!(upload_with_bad_reads(0, 4), Some(vec![0, 100, 200, 400, 800]));
    assert_eq!(upload_with_bad_reads(0, 5), None);
    // Requests that the store did not answer are not counted as reads that failed.
    assert_eq!(upload_with_bad_reads(20, 4), Some(vec![5000, 100, 200, 400, 800]));
    assert_eq!(upload_with_bad_reads(20, 5), None);
}
