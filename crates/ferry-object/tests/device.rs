//! The device on a real store, with real threads.

mod common;

use common::TestStore;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, FileRead, Io, ReadRing};
use ferry_env::Env;
use ferry_object::{
    Claimant, Cloned, Encryption, Executor, Follower, Kdf, Limits, ObjectDevice, ObjectError,
    Passphrase, Replaced, SNAPSHOTS_MAX, SnapshotSizes, Store, ThreadExecutor, VolumeOptions,
};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const BLOCK: u64 = BLOCK_SIZE as u64;
const BLOCKS: u64 = 4096;
const WINDOW: u32 = 4;
/// So often a test ticks while it waits for threads, at most.
const TICKS_MAX: u32 = 100_000;

struct Volume {
    objects: TestStore,
    env: Env,
}

impl Volume {
    /// A store with a new volume.
    fn new() -> Self {
        Self::encrypted(None)
    }

    /// The same, perhaps encrypted.
    fn encrypted(passphrase: Option<&Passphrase>) -> Self {
        let volume = Self { objects: TestStore::new(), env: Env::real() };
        let encryption = passphrase.map(|passphrase| Encryption {
            passphrase: passphrase.clone(),
            kdf: Kdf { memory_kib: 8, passes: 1 },
        });
        let options = VolumeOptions {
            window: WINDOW,
            encryption,
            ..VolumeOptions::new(BLOCKS * BLOCK, (0, 1 << 20))
        };
        let (store, threads) = (volume.store(), volume.threads());
        ObjectDevice::make(store, threads, &options, &volume.env).expect("a new volume");
        volume
    }

    fn store(&self) -> Arc<dyn Store> {
        self.objects.store()
    }

    fn threads(&self) -> Arc<ThreadExecutor> {
        Arc::new(ThreadExecutor::new(&self.env).expect("threads can be started"))
    }

    fn open(&self, take_over: bool, limits: Limits) -> Result<Arc<ObjectDevice>, ObjectError> {
        let claimant = Claimant { take_over, ..Claimant::default() };
        self.open_in(self.store(), &claimant, limits)
    }

    /// The same of a volume beside it.
    fn open_in(
        &self,
        store: Arc<dyn Store>,
        claimant: &Claimant,
        limits: Limits,
    ) -> Result<Arc<ObjectDevice>, ObjectError> {
        ObjectDevice::open(store, self.threads(), claimant, limits, &self.env)
    }

    /// Makes a clone of a snapshot of the volume in `store`, which `owner` has.
    fn make_clone(
        &self,
        (store, owner): (Arc<dyn Store>, &ObjectDevice),
        names: (&str, &str),
        passphrase: Option<&Passphrase>,
    ) -> Result<Cloned, ObjectError> {
        let pin = |name: &str| owner.create_snapshot(name);
        let from = (store, self.threads() as Arc<dyn Executor>);
        ObjectDevice::make_clone(from, names, passphrase, Duration::MAX, &self.env, pin)
    }
}

/// Small, so that a few blocks fill everything.
fn small() -> Limits {
    Limits {
        seal_bytes: 64 << 10,
        unsent_bytes_max: 128 << 10,
        data_run_bytes_min: 16 << 10,
        data_bytes_max: 64 << 10,
        root_log_objects: 5,
        grace: Duration::ZERO,
        root_delay: Duration::ZERO,
        term: Duration::from_millis(20),
        ..Limits::default()
    }
}

fn filled(blocks: u64, byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed((blocks * BLOCK) as usize);
    // No two blocks are equal.
    for (n, block) in buf.chunks_exact_mut(BLOCK_SIZE).enumerate() {
        block.fill(byte);
        block[..8].copy_from_slice(&(n as u64 + 1).to_le_bytes());
    }
    buf
}

fn read(device: &ObjectDevice, block: u64, blocks: u64) -> Vec<u8> {
    let mut buf = AlignedBuf::zeroed((blocks * BLOCK) as usize);
    device.read(block * BLOCK, &mut buf).expect("it can be read");
    buf.to_vec()
}

#[test]
fn what_was_flushed_is_there_for_the_next_owner() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("it is free");
    device.write(0, &filled(3, 1)).expect("write");
    device.write(100 * BLOCK, &filled(40, 2)).expect("write");
    device.discard(110 * BLOCK, 2 * BLOCK).expect("discard");
    assert_eq!(read(&device, 0, 3), *filled(3, 1), "from memory");
    device.flush().expect("flush");
    assert_eq!(read(&device, 100, 10), filled(40, 2)[..10 * BLOCK_SIZE], "from the store");
    assert_eq!(read(&device, 110, 3)[..2 * BLOCK_SIZE], [0; 2 * BLOCK_SIZE]);
    assert_eq!(device.next_data(50 * BLOCK), 100 * BLOCK);

    let refused = volume.open(false, small()).err();
    assert!(matches!(refused, Some(ObjectError::InUse { .. })), "{refused:?}");

    let next = volume.open(true, small()).expect("it can be taken over");
    assert_eq!(read(&next, 0, 3), *filled(3, 1));
    assert_eq!(read(&next, 112, 28), filled(40, 2)[12 * BLOCK_SIZE..]);
    device.write(0, &filled(1, 9)).expect("a write completes in memory");
    assert!(device.flush().is_err(), "the old owner acknowledges nothing more");
    assert!(matches!(device.failure(), Some(ObjectError::Fenced { .. })));
    assert_eq!(read(&next, 0, 3), *filled(3, 1));
    next.close().expect("close");
    volume.open(false, small()).expect("a closed volume is free");
}

#[test]
fn what_the_log_has_is_read_once_to_recover_a_volume() {
    let volume = Volume::new();
    let limits = Limits { root_log_objects: 1000, root_delay: Duration::from_secs(60), ..small() };
    let device = volume.open(false, limits).expect("it is free");
    for block in 0..20 {
        device.write(block * BLOCK, &filled(1, block as u8)).expect("write");
        device.flush().expect("flush");
    }
    let next = volume.open(true, limits).expect("it can be taken over");
    let opened = next.stats().gets;
    next.write(100 * BLOCK, &filled(1, 1)).expect("write");
    next.flush().expect("flush");
    for block in 0..20 {
        assert_eq!(read(&next, block, 1), *filled(1, block as u8));
    }
    let looked = next.stats().gets - opened;
    assert!(looked < 10, "{looked} requests, where only looks for other owners are needed");
}

#[test]
fn a_device_that_was_made_longer_or_shorter_is_so_long_for_the_next_owner() {
    let volume = Volume::new();
    let (made, longer) = (BLOCKS * BLOCK, 3 * BLOCKS * BLOCK);
    let errno = |result: std::io::Result<()>| result.expect_err("it is refused").raw_os_error();
    let device = volume.open(false, small()).expect("it is free");
    device.write(0, &filled(3, 1)).expect("write");
    let past_the_end = device.write(made, &filled(1, 2));
    assert_eq!(errno(past_the_end), Some(libc::EINVAL));
    device.create_snapshot("before").expect("it can be made");
    device.resize(longer).expect("a store has room");
    device.write(made, &filled(1, 2)).expect("it is longer");
    assert_eq!(errno(device.resize(u64::MAX / BLOCK * BLOCK)), Some(libc::ENOSPC));
    // Nothing is flushed but what it does itself.
    device.create_snapshot("longer").expect("it can be made");
    device.resize(longer).expect("it is so long");
    drop(device);

    let snapshot = |name: &str| {
        let (store, threads) = (volume.store(), volume.threads());
        ObjectDevice::open_snapshot(store, threads, name, None, small(), &volume.env)
            .expect("it is there")
    };
    let next = volume.open(true, small()).expect("it can be taken over");
    assert_eq!(next.capacity(), longer);
    assert_eq!(read(&next, BLOCKS, 1), *filled(1, 2));
    let mut follower = follower(&volume, small());
    let seen = follower.look(false).expect("it can look").expect("there is a version").device;
    assert_eq!(seen.capacity(), longer);
    assert_eq!(errno(seen.resize(made)), Some(libc::EROFS));
    assert_eq!([snapshot("before").capacity(), snapshot("longer").capacity()], [made, longer]);

    next.write(longer - BLOCK, &filled(1, 3)).expect("write");
    next.resize(made + BLOCK).expect("it can be cut");
    assert_eq!(errno(next.write(longer - BLOCK, &filled(1, 3))), Some(libc::EINVAL));
    next.close().expect("close");
    let shorter = volume.open(false, small()).expect("it is free");
    assert_eq!(shorter.capacity(), made + BLOCK, "the last block in use is at its end");
    shorter.resize(BLOCK * 8).expect("it can be cut");
    shorter.resize(longer).expect("a store has room");
    assert_eq!(read(&shorter, BLOCKS, 1), [0; BLOCK_SIZE], "what was cut off is gone");
    assert_eq!(read(&shorter, 0, 3), *filled(3, 1));
    shorter.close().expect("close");
}

/// A store that notes its changes: `None` is a deletion.
struct Noting {
    inner: Arc<dyn Store>,
    changes: Mutex<Vec<(String, Option<Vec<u8>>)>>,
}

impl Noting {
    fn change(
        &self,
        name: &str,
        bytes: Option<&[u8]>,
        change: impl FnOnce() -> Result<(), ObjectError>,
    ) -> Result<(), ObjectError> {
        let mut changes = self.changes.lock().expect("no thread panics");
        change()?;
        changes.push((name.into(), bytes.map(<[u8]>::to_vec)));
        Ok(())
    }
}

impl Store for Noting {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.inner.get(name, range)
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.change(name, Some(bytes), || self.inner.create(name, bytes))
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.change(name, Some(bytes), || self.inner.put(name, bytes))
    }
    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.change(name, None, || self.inner.delete(name))
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.inner.list(prefix)
    }
    fn name(&self) -> Result<String, ObjectError> {
        self.inner.name()
    }
    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        self.inner.beside(name)
    }
}

/// The journal relies on it: it flushes nothing between data and the record that names it.
#[test]
fn a_write_that_ended_before_another_one_is_there_after_a_crash_if_the_other_one_is() {
    const PAIRS: u64 = 10;
    let volume = Volume::new();
    let first = objects(&*volume.store());
    let first = first.into_iter().map(|(name, _)| {
        let bytes = volume.store().get(&name, None).expect("it is there");
        (name, Some(bytes))
    });
    let noting = Arc::new(Noting { inner: volume.store(), changes: Mutex::new(first.collect()) });
    let device = volume.open_in(noting.clone(), &Claimant::default(), small()).expect("it is free");
    assert!(device.is_ordered());
    for n in 0..PAIRS {
        // Large ones go to objects of their own, several at a time.
        device.write(n * 16 * BLOCK, &filled(12, n as u8)).expect("write");
        device.write((1000 + n) * BLOCK, &filled(1, n as u8)).expect("write");
    }
    device.flush().expect("flush");
    let changes = noting.changes.lock().expect("no thread panics").clone();
    let (mut seen, mut partly) = (0, 0);
    for crash in 0..=changes.len() {
        let (_, store) = volume.objects.beside(&format!("crash-{crash}"));
        for (name, bytes) in &changes[..crash] {
            match bytes {
                Some(bytes) => store.put(name, bytes).expect("it is put"),
                None => store.delete(name).expect("it is deleted"),
            }
        }
        let claimant = Claimant { take_over: true, ..Claimant::default() };
        let Ok(next) = volume.open_in(store, &claimant, small()) else { continue };
        let there = (0..PAIRS).filter(|n| {
            let second = read(&next, 1000 + n, 1) == *filled(1, *n as u8);
            let first = read(&next, n * 16, 12) == *filled(12, *n as u8);
            assert!(first || !second, "crash after change {crash}: pair {n}");
            second
        });
        let count = there.count() as u64;
        seen += 1;
        partly += u64::from(count > 0 && count < PAIRS);
    }
    assert!(seen > 10 && partly > 3, "{seen} crashes, {partly} in the middle");
}

/// A ring that nothing is to be read through.
struct NoRing;

impl ReadRing for NoRing {
    fn start(&self, _read: FileRead) {
        panic!("the store is no file");
    }
}

/// The thread that starts a read serves others: it must not wait for the store.
#[test]
fn a_read_is_not_started_where_it_would_have_to_wait() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("it is free");
    device.write(0, &filled(3, 1)).expect("write");
    device.flush().expect("flush");
    let (ended, end) = mpsc::channel();
    let done = Box::new(move |result| ended.send(result).expect("somebody waits"));
    device.start_read(&NoRing, 0, Arc::new(AlignedBuf::zeroed(BLOCK_SIZE)), done);
    let refused = end.try_recv().expect("it has ended").expect_err("it refuses");
    assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
    assert_eq!(read(&device, 0, 3), *filled(3, 1));
}

#[test]
fn writes_wait_for_room_and_never_for_a_flush() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("it is free");
    let (ended, end) = mpsc::channel();
    let batch = (0..100_u64).map(|n| {
        let ended = ended.clone();
        let done = Box::new(move |result| ended.send((n, result)).expect("the test waits"));
        Io::Write { offset: n * 8 * BLOCK, buf: Arc::new(filled(8, n as u8)), done }
    });
    device.submit(batch.collect());
    for _ in 0..100 {
        end.recv().expect("each is answered").1.expect("each succeeds");
    }
    assert!(device.stats().unsent_bytes <= 128 << 10);
    device.flush().expect("flush");
    for n in 0..100 {
        assert_eq!(read(&device, n * 8, 8), *filled(8, n as u8));
    }
}

#[test]
fn what_is_overwritten_is_deleted_and_fences_stay() {
    let volume = Volume::new();
    let store = volume.store();
    let count = |prefix: &str| store.list(prefix).expect("it can be listed").len();
    for owner in 1..=3_u8 {
        let device = volume.open(true, small()).expect("it can be taken over");
        for round in 0..30_u8 {
            device.write(0, &filled(2, owner * 50 + round)).expect("write");
            device.write(64 * BLOCK, &filled(8, owner * 50 + round)).expect("write");
            device.flush().expect("flush");
            device.tick();
        }
        // A store may be slower with deletions than the owner is with the rest.
        let owners = usize::from(owner);
        for _ in 0..1000 {
            if count("s/") < 20 * owners && count("w/") < 20 * owners + 10 {
                break;
            }
            device.tick();
        }
    }
    let device = volume.open(true, small()).expect("it can be taken over");
    assert_eq!(read(&device, 0, 2), *filled(2, 179));
    assert_eq!(read(&device, 64, 8), *filled(8, 179));
    assert_eq!(count("e/"), 4);
    assert!(count("s/") < 60, "{} of 90 data objects are left", count("s/"));
    assert!(count("w/") < 70, "{} of 90 log objects and 8 fences are left", count("w/"));
}

#[test]
fn what_is_mostly_dead_is_packed_together_but_for_the_ring() {
    let volume = Volume::new();
    let store = volume.store();
    let logs = || store.list("w/").expect("it can be listed").len();
    let limits = Limits {
        repack_bytes_min: 1,
        root_log_objects: 1000,
        data_run_bytes_min: 1 << 20,
        ..small()
    };
    let device = volume.open(false, limits).expect("it is free");
    device.note_ring(0..64 * BLOCK);
    let block_of = |n: u64| 1000 + 8 * n;
    for n in 0..20 {
        device.write(block_of(n) * BLOCK, &filled(8, n as u8)).expect("write");
        if n >= 10 {
            device.write(n * BLOCK, &filled(1, n as u8)).expect("write");
        }
        device.flush().expect("flush");
    }
    for n in 0..20 {
        device.discard(block_of(n) * BLOCK, 7 * BLOCK).expect("discard");
    }
    device.flush().expect("flush");
    let before = logs();
    for _ in 0..TICKS_MAX {
        if device.stats().repacked_bytes >= 10 * BLOCK && logs() <= before - 10 {
            break;
        }
        device.tick();
    }
    assert_eq!(device.stats().repacked_bytes, 10 * BLOCK, "those beside the ring wait");
    assert!(
        logs() <= before - 10,
        "{} log objects of {before} are left: {:?}",
        logs(),
        device.stats()
    );
    let check = |device: &ObjectDevice| {
        for n in 0..20 {
            let last = &filled(8, n as u8)[7 * BLOCK_SIZE..];
            assert_eq!(read(device, block_of(n) + 7, 1), last, "block {n}");
            assert_eq!(read(device, block_of(n), 7), vec![0; 7 * BLOCK_SIZE]);
        }
        (10..20).for_each(|n| assert_eq!(read(device, n, 1), *filled(1, n as u8)));
    };
    check(&device);
    // When the ring has been written over, the others follow.
    device.discard(0, 64 * BLOCK).expect("discard");
    device.flush().expect("flush");
    device.write(10 * BLOCK, &filled(10, 7)).expect("write");
    device.flush().expect("flush");
    for _ in 0..TICKS_MAX {
        if device.stats().repacked_bytes >= 20 * BLOCK {
            break;
        }
        device.tick();
    }
    assert_eq!(device.stats().repacked_bytes, 20 * BLOCK);
    drop(device);
    let next = volume.open(true, limits).expect("it can be taken over");
    for n in 0..20 {
        assert_eq!(
            read(&next, block_of(n) + 7, 1),
            filled(8, n as u8)[7 * BLOCK_SIZE..],
            "block {n}"
        );
    }
}

#[test]
fn a_reader_changes_nothing() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("it is free");
    device.write(0, &filled(3, 1)).expect("write");
    device.flush().expect("flush");
    let before = volume.store().list("").expect("it can be listed");
    let reader = ObjectDevice::open_read_only(
        volume.store(),
        volume.threads(),
        &Claimant { take_over: true, ..Claimant::default() },
        Limits::default(),
        &volume.env,
    );
    let reader = reader.expect("it can be read");
    assert_eq!(read(&reader, 0, 3), *filled(3, 1));
    assert!(reader.write(0, &filled(1, 2)).is_err());
    assert!(reader.discard(0, BLOCK).is_err());
    reader.close().expect("there is nothing to close");
    assert_eq!(volume.store().list("").expect("it can be listed"), before);
    device.flush().expect("the owner goes on");
}

/// A store whose reads of log and data objects wait while a test says so.
struct Slow {
    inner: Arc<dyn Store>,
    /// What waits for the test; then what the test waits for.
    waits: Mutex<Option<mpsc::Receiver<()>>>,
    waiting: mpsc::Sender<()>,
}

impl Store for Slow {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let found = self.inner.get(name, range);
        if name.starts_with("w/")
            && let Some(end) = self.waits.lock().expect("nobody panics").take()
        {
            self.waiting.send(()).expect("the test waits");
            end.recv().expect("the test ends it");
        }
        found
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.inner.create(name, bytes)
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.inner.put(name, bytes)
    }
    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.inner.delete(name)
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.inner.list(prefix)
    }
}

#[test]
fn a_read_that_waited_past_the_term_is_not_answered_after_a_take_over() {
    let volume = Volume::new();
    let limits = Limits { term: Duration::from_millis(50), ..small() };
    let (waiting, waits) = mpsc::channel();
    let slow = Arc::new(Slow { inner: volume.store(), waits: Mutex::new(None), waiting });
    let first = ObjectDevice::open(
        Arc::clone(&slow) as Arc<dyn Store>,
        volume.threads(),
        &Claimant::default(),
        limits,
        &volume.env,
    );
    let first = first.expect("it is free");
    first.write(0, &filled(1, 1)).expect("write");
    first.flush().expect("flush");
    let (end, ends) = mpsc::channel();
    *slow.waits.lock().expect("nobody panics") = Some(ends);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| {
            let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
            first.read(0, &mut buf).map(|()| buf[0])
        });
        waits.recv().expect("the read waits for the store");
        let second = volume.open(true, limits).expect("it can be taken over");
        second.write(0, &filled(1, 2)).expect("write");
        second.flush().expect("flush");
        end.send(()).expect("the read still waits");
        let read = read.join().expect("no panic");
        assert!(read.is_err(), "the block is {read:?}, and has been overwritten");
    });
    assert!(matches!(first.failure(), Some(ObjectError::Fenced { .. })));
}

/// Blocks that cannot be compressed.
fn noise(blocks: u64, seed: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed((blocks * BLOCK) as usize);
    let mut state = (u64::from(seed) << 32) | 1;
    for word in buf.chunks_exact_mut(8) {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    buf
}

/// A volume full of data, and a device that has read nothing of it.
fn cold(limits: Limits) -> (Volume, Arc<ObjectDevice>) {
    let volume = Volume::new();
    let device = volume.open(false, limits).expect("it is free");
    for n in 0..BLOCKS / 256 {
        device.write(n * 256 * BLOCK, &noise(256, n as u8 + 1)).expect("write");
    }
    device.flush().expect("flush");
    device.close().expect("close");
    let next = volume.open(false, limits).expect("it is free");
    (volume, next)
}

#[test]
fn what_was_read_ahead_is_fetched_once_in_large_parts_and_is_right() {
    let (_volume, device) = cold(Limits::default());
    let before = device.stats();
    device.read_ahead(0, BLOCKS * BLOCK);
    for n in 0..BLOCKS / 256 {
        assert_eq!(read(&device, n * 256, 256), *noise(256, n as u8 + 1), "{n}");
    }
    let after = device.stats();
    let (gets, bytes) = (after.gets - before.gets, after.get_bytes - before.get_bytes);
    assert!(gets <= BLOCKS / 256, "{gets} requests: one for each object, with its front");
    assert!(bytes <= BLOCKS * BLOCK + (1 << 20), "{bytes} bytes");
    assert!(after.ahead_bytes <= Limits::default().ahead_bytes_max);
}

#[test]
fn a_reader_that_is_told_nothing_ahead_fetches_what_it_reads() {
    let (_volume, device) = cold(Limits::default());
    let before = device.stats();
    for n in [7, 3, 11, 5] {
        assert_eq!(read(&device, n * 256, 1), noise(256, n as u8 + 1)[..BLOCK_SIZE]);
    }
    let after = device.stats();
    // A frame and a front for each.
    let bytes = after.get_bytes - before.get_bytes;
    assert!(bytes <= 4 * ((64 << 10) + (8 << 10) + 100), "{bytes} bytes");
    assert_eq!(after.ahead_bytes, 0);
}

#[test]
fn what_was_overwritten_after_it_was_read_ahead_is_read_as_it_is_now() {
    let (_volume, device) = cold(Limits::default());
    device.read_ahead(0, BLOCKS * BLOCK);
    assert_eq!(read(&device, 0, 4), noise(4, 1).to_vec());
    device.write(BLOCK, &noise(2, 99)).expect("write");
    device.discard(3 * BLOCK, BLOCK).expect("discard");
    let expect = |device: &ObjectDevice| {
        assert_eq!(read(device, 0, 1), noise(1, 1).to_vec());
        assert_eq!(read(device, 1, 2), noise(2, 99).to_vec());
        assert_eq!(read(device, 3, 1), vec![0; BLOCK_SIZE]);
    };
    expect(&device);
    device.flush().expect("flush");
    expect(&device);
}

/// A store that refuses changes, and counts them.
struct Unchanged(Arc<dyn Store>, Arc<AtomicU64>);

impl Unchanged {
    fn refuse(&self) -> Result<(), ObjectError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        Err(ObjectError::Refused("it may not be changed".into()))
    }
}

impl Store for Unchanged {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.0.get(name, range)
    }
    fn create(&self, _: &str, _: &[u8]) -> Result<(), ObjectError> {
        self.refuse()
    }
    fn put(&self, _: &str, _: &[u8]) -> Result<(), ObjectError> {
        self.refuse()
    }
    fn delete(&self, _: &str) -> Result<(), ObjectError> {
        self.refuse()
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.0.list(prefix)
    }
}

#[test]
fn a_snapshot_holds_what_was_there_while_its_volume_is_overwritten_and_collected() {
    let (volume, changes) = (Volume::new(), Arc::new(AtomicU64::new(0)));
    let open = |name: &str| {
        let (store, threads) = (Unchanged(volume.store(), Arc::clone(&changes)), volume.threads());
        ObjectDevice::open_snapshot(Arc::new(store), threads, name, None, small(), &volume.env)
    };
    let device = volume.open(false, small()).expect("nobody has it");
    device.write(0, &filled(64, 1)).expect("it can be written");
    // The last write was not flushed.
    device.create_snapshot("one").expect("it can be made");
    for round in 2..40 {
        device.write(0, &filled(64, round)).expect("it can be written");
        device.flush().expect("it can be flushed");
        device.tick();
    }
    device.create_snapshot("two").expect("it can be made");
    device.write(0, &filled(64, 99)).expect("it can be written");
    let deletes = device.stats().deletes;
    assert!(deletes > 0, "what no snapshot needs is deleted");
    for (name, byte) in [("one", 1), ("two", 39)] {
        let snapshot = open(name).expect("it is there");
        assert_eq!(read(&snapshot, 0, 64), filled(64, byte).to_vec(), "{name}");
        let refused = snapshot.write(0, &filled(1, 7)).expect_err("it is read only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        assert_eq!(snapshot.create_snapshot("three"), Err(ObjectError::ReadOnly));
        snapshot.close().expect("there is nothing to do");
    }
    assert_eq!(changes.load(Ordering::Relaxed), 0, "who reads a snapshot writes nothing");
    device.flush().expect("nobody fenced its owner off");
    device.close().expect("it can be closed");
    drop(device);

    let device = volume.open(false, small()).expect("nobody has it");
    let names: Vec<_> = device.snapshots().into_iter().map(|found| found.name).collect();
    assert_eq!(names, ["one", "two"], "the next owner has them");
    let roots = || volume.store().list("c/").expect("it can be listed");
    let oldest = roots().into_iter().min().expect("there are roots");
    device.delete_snapshot("one").expect("it can be deleted");
    let mut ticks = 0;
    while roots().contains(&oldest) {
        device.tick();
        ticks += 1;
        assert!(ticks < TICKS_MAX, "the root of the deleted snapshot is there");
    }
    assert_eq!(read(&open("two").expect("it is there"), 0, 64), filled(64, 39).to_vec());
    let error = open("one").err().expect("it was deleted").to_string();
    assert_eq!(error, "there is no snapshot \"one\"; there are two");
}

#[test]
fn what_only_a_deleted_snapshot_needed_leaves_the_store() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.write(0, &filled(64, 1)).expect("it can be written");
    device.create_snapshot("one").expect("it can be made");
    let data = || volume.store().list("s/").expect("it can be listed");
    let needed = data();
    assert!(!needed.is_empty(), "it has data objects");
    let overwrite = |byte| {
        device.write(0, &filled(64, byte)).expect("it can be written");
        device.flush().expect("it can be flushed");
        device.tick();
    };
    (2..40).for_each(overwrite);
    assert!(needed.iter().all(|name| data().contains(name)), "the snapshot needs them");
    BlockDevice::delete_snapshot(&*device, "one").expect("it can be deleted");
    let mut ticks = 0;
    while needed.iter().any(|name| data().contains(name)) {
        overwrite(40);
        ticks += 1;
        assert!(ticks < TICKS_MAX, "nothing needs them any more");
    }
    let error = BlockDevice::delete_snapshot(&*device, "one").expect_err("it was deleted");
    assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    assert_eq!(BlockDevice::snapshots(&*device).expect("it has none"), []);
}

#[test]
fn a_snapshot_that_cannot_be_made_or_deleted_is_refused() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.create_snapshot("one").expect("it can be made");
    // Between two roots with a pin there is another one.
    let newest = || volume.store().list("c/").expect("it can be listed").into_iter().max();
    let before = newest();
    device.create_snapshot("at once").expect("it can be made");
    let between = volume.store().list("c/").expect("it can be listed");
    let newer = between.into_iter().filter(|name| Some(name) > before.as_ref()).count();
    assert_eq!(newer, 2);
    device.delete_snapshot("at once").expect("it can be deleted");
    let refused = |result: Result<(), ObjectError>| result.expect_err("it is refused").to_string();
    assert!(refused(device.create_snapshot("one")).contains("already"));
    assert_eq!(
        refused(device.delete_snapshot("two")),
        "there is no snapshot \"two\"; there are one"
    );
    let long = "x".repeat(256);
    for name in ["", ".", "..", "a/b", "a,b", "a@b", "a?b", "a\nb", &long] {
        assert!(refused(device.create_snapshot(name)).contains("no name"), "{name:?}");
    }
    for n in 1..SNAPSHOTS_MAX {
        device.create_snapshot(&format!("{n:0>255}")).expect("it can be made");
    }
    assert!(refused(device.create_snapshot("more")).contains("delete some"));
    device.close().expect("it can be closed");
    drop(device);
    let device = volume.open(false, small()).expect("nobody has it");
    assert_eq!(device.snapshots().len(), SNAPSHOTS_MAX);
    device.delete_snapshot("one").expect("it can be deleted");
    device.create_snapshot("more").expect("there is room");
}

fn names(device: &ObjectDevice) -> Vec<String> {
    device.snapshots().into_iter().map(|found| found.name).collect()
}

/// Writes the first 64 blocks so often, as what they hold from then on; the collector is at work.
fn overwrite(device: &ObjectDevice, bytes: Range<u8>) {
    for byte in bytes {
        device.write(0, &filled(64, byte)).expect("it can be written");
        device.flush().expect("it can be flushed");
        device.tick();
    }
}

/// Ticks until that is so.
fn tick_until(device: &ObjectDevice, what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..TICKS_MAX {
        if is_so() {
            return;
        }
        device.tick();
    }
    panic!("not so: {what}");
}

#[test]
fn a_rollback_restores_every_byte_and_loses_nothing() {
    let volume = Volume::new();
    let (then, now) = ((100, filled(40, 50)), (200, filled(9, 51)));
    let open = || volume.open(false, small()).expect("nobody has it");
    let snapshot = |name: &str| {
        let (store, threads) = (volume.store(), volume.threads());
        ObjectDevice::open_snapshot(store, threads, name, None, small(), &volume.env)
            .expect("it is there")
    };
    let holds_then = |device: &ObjectDevice, what: &str| {
        assert_eq!(read(device, 0, 64), *filled(64, 1), "{what}");
        assert_eq!(read(device, then.0, 40), *then.1, "{what}");
        assert_eq!(read(device, now.0, 9), vec![0; 9 * BLOCK_SIZE], "{what}");
    };
    let holds_now = |device: &ObjectDevice, what: &str| {
        assert_eq!(read(device, 0, 64), *filled(64, 39), "{what}");
        assert_eq!(read(device, then.0, 40), vec![0; 40 * BLOCK_SIZE], "{what}");
        assert_eq!(read(device, now.0, 9), *now.1, "{what}");
    };
    let device = open();
    device.write(then.0 * BLOCK, &then.1).expect("it can be written");
    overwrite(&device, 1..2);
    device.create_snapshot("one").expect("it can be made");
    device.discard(then.0 * BLOCK, 40 * BLOCK).expect("it can be discarded");
    overwrite(&device, 2..40);
    // Nobody flushes this.
    device.write(now.0 * BLOCK, &now.1).expect("it can be written");
    let rolled_back = device.roll_back("one", Replaced::Snapshot).expect("it can go back");
    assert_eq!(rolled_back.before.as_deref(), Some("before-rollback"));
    let refused = device.write(0, &filled(1, 7)).expect_err("its owner has ended");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    drop(device);

    let device = open();
    holds_then(&device, "rolled back");
    assert_eq!(names(&device), ["one", "before-rollback"]);
    overwrite(&device, 60..99);
    tick_until(&device, "what nobody needs is deleted", || device.stats().deletes > 0);
    holds_then(&snapshot("one"), "overwritten and collected");
    holds_now(&snapshot("before-rollback"), "overwritten and collected");
    drop(device);

    // The owner was killed, and the volume goes back and forth.
    let device = volume.open(true, small()).expect("it can be taken over");
    let rolled_back = device.roll_back("before-rollback", Replaced::Snapshot).expect("and forth");
    assert_eq!(rolled_back.before.as_deref(), Some("before-rollback-2"));
    drop(device);
    let device = open();
    holds_now(&device, "rolled forth");
    device.roll_back("one", Replaced::Discarded).expect("it can go back");
    drop(device);
    let device = open();
    holds_then(&device, "rolled back again");
    assert_eq!(names(&device), ["one", "before-rollback", "before-rollback-2"]);
    let refused = device.roll_back("two", Replaced::Snapshot).expect_err("there is none");
    assert!(refused.to_string().contains("there are one, before-rollback"), "{refused}");
    assert_eq!(snapshot("one").roll_back("one", Replaced::Snapshot), Err(ObjectError::ReadOnly));
    overwrite(&device, 1..2);
}

#[test]
fn what_a_rollback_discards_leaves_the_store_and_what_it_brings_back_stays() {
    let volume = Volume::new();
    let open = || volume.open(false, small()).expect("nobody has it");
    let list = |prefix: &str| volume.store().list(prefix).expect("it can be listed");
    let device = open();
    device.write(100 * BLOCK, &filled(40, 50)).expect("it can be written");
    overwrite(&device, 1..2);
    device.create_snapshot("one").expect("it can be made");
    let needed = list("s/");
    // Another owner has overwritten it, so that its own map lacks it.
    device.close().expect("it can be closed");
    drop(device);
    let device = open();
    device.discard(100 * BLOCK, 40 * BLOCK).expect("it can be discarded");
    overwrite(&device, 2..40);
    device.roll_back("one", Replaced::Discarded).expect("it can go back");
    let discarded: Vec<String> =
        list("s/").into_iter().filter(|name| !needed.contains(name)).collect();
    assert!(!discarded.is_empty(), "there are data objects of what was discarded");
    drop(device);

    let device = open();
    let has = |names: &[String]| names.iter().any(|name| list("s/").contains(name));
    tick_until(&device, "what was discarded is deleted", || !has(&discarded));
    let root = list("c/").into_iter().min().expect("there are roots");
    device.delete_snapshot("one").expect("it can be deleted");
    // With more roots, and the sweep that follows.
    device.write(200 * BLOCK, &filled(9, 51)).expect("it can be written");
    tick_until(&device, "the root of the snapshot is deleted", || !list("c/").contains(&root));
    device.close().expect("it can be closed");
    drop(device);
    let device = open();
    tick_until(&device, "the next owner has swept", || device.stats().orphans > 0);
    assert!(needed.iter().all(|name| list("s/").contains(name)), "the volume needs them");
    assert_eq!(read(&device, 0, 64), *filled(64, 1));
    assert_eq!(read(&device, 100, 40), *filled(40, 50));
    assert_eq!(read(&device, 200, 9), *filled(9, 51));
}

/// All that a store has.
fn objects(store: &dyn Store) -> Vec<(String, usize)> {
    let found = store.list_sizes("").expect("it can be listed");
    found.into_iter().map(|(name, len)| (name, len as usize)).collect()
}

/// Closes a volume, and waits until nothing that its owner asked for is under way.
fn end(device: Arc<ObjectDevice>) {
    device.close().expect("it can be closed");
    while Arc::strong_count(&device) > 1 {
        std::thread::yield_now();
    }
}

fn bytes(store: &dyn Store) -> usize {
    objects(store).iter().map(|(_, len)| len).sum()
}

/// Removes a volume.
fn remove(store: &dyn Store) {
    for (name, _) in objects(store) {
        store.delete(&name).expect("it can be deleted");
    }
}

/// What `clones` have at the beginning.
fn holds_then(device: &ObjectDevice, what: &str) {
    assert_eq!(read(device, 0, 64), *noise(64, 1), "{what}");
    assert_eq!(read(device, 100, 40), *noise(40, 50), "{what}");
    assert_eq!(read(device, 200, 9), vec![0; 9 * BLOCK_SIZE], "{what}");
}

/// Overwrites what [`holds_then`] asks for.
fn write_noise(device: &ObjectDevice, seeds: Range<u8>) {
    device.discard(100 * BLOCK, 40 * BLOCK).expect("it can be discarded");
    for seed in seeds {
        device.write(0, &noise(64, seed)).expect("it can be written");
        device.write(200 * BLOCK, &noise(9, seed)).expect("it can be written");
        device.flush().expect("it can be flushed");
        device.tick();
    }
}

#[test]
fn a_clone_holds_each_byte_of_its_snapshot_whatever_becomes_of_its_source() {
    let passphrase = Passphrase::new(b"open sesame".to_vec().into());
    for passphrase in [None, passphrase] {
        clone_and_overwrite(passphrase.as_ref());
    }
}

fn clone_and_overwrite(passphrase: Option<&Passphrase>) {
    let volume = Volume::encrypted(passphrase);
    let claimant = Claimant { passphrase: passphrase.cloned(), ..Claimant::default() };
    let open = |store: &Arc<dyn Store>| {
        let opened = volume.open_in(Arc::clone(store), &claimant, small());
        opened.unwrap_or_else(|error| panic!("nobody has it: {error}"))
    };
    let source = volume.store();
    let device = open(&source);
    device.write(100 * BLOCK, &noise(40, 50)).expect("it can be written");
    device.write(0, &noise(64, 1)).expect("it can be written");
    device.create_snapshot("one").expect("it can be made");
    write_noise(&device, 2..9);
    device.create_snapshot("two").expect("it can be made");

    let (name, store) = volume.objects.beside("clone");
    let data = || {
        let mut all = objects(&*source);
        all.retain(|(name, _)| name.starts_with("s/") || name.starts_with("w/"));
        all
    };
    let (gets, held) = (device.stats().gets, data());
    let from = (Arc::clone(&source), &*device);
    let cloned = volume.make_clone(from, ("one", &name), passphrase).expect("it can be cloned");
    let made: Vec<String> = objects(&*store).into_iter().map(|(name, _)| name).collect();
    let expected = ["c/0000000000000000", "k/0000000000000000", "super"];
    let expected: Vec<_> = expected
        .into_iter()
        .filter(|name| passphrase.is_some() || !name.starts_with('k'))
        .collect();
    assert_eq!(made, expected, "nothing is copied");
    assert!(device.stats().gets - gets < 9, "the owner writes a root");
    assert!(data().iter().all(|object| held.contains(object)), "nor is data written anew");
    assert_eq!(names(&device), ["one", &cloned.pin, "two"]);
    // All snapshots of the source go, and what they had.
    device.delete_snapshot("one").expect("the pin has the same root");
    device.delete_snapshot("two").expect("it can be deleted");
    write_noise(&device, 10..30);
    tick_until(&device, "what nobody needs is deleted", || device.stats().deletes > 20);

    let clone = open(&store);
    holds_then(&clone, "the source was overwritten and collected");
    drop((device, clone));
    // Other owners sweep. That of the source was killed.
    let device = volume
        .open_in(source.clone(), &Claimant { take_over: true, ..claimant.clone() }, small())
        .expect("it can be taken over");
    let clone = volume
        .open_in(store.clone(), &Claimant { take_over: true, ..claimant.clone() }, small())
        .expect("it can be taken over");
    write_noise(&device, 30..40);
    holds_then(&clone, "the next owner of the source has it");
    let before = bytes(&*store);
    clone.write(300 * BLOCK, &noise(1, 7)).expect("it can be written");
    clone.flush().expect("it can be flushed");
    clone.create_snapshot("of the clone").expect("it can be made");
    let grown = bytes(&*store) - before;
    assert!(grown < 16 << 10, "{grown} bytes for a block: what differs is stored");
    assert_eq!(read(&device, 300, 1), vec![0; BLOCK_SIZE], "the source has no such block");
    assert_eq!(read(&device, 0, 64), *noise(64, 39));

    // The clone is overwritten, repacked and swept, and its source has what it had.
    end(device);
    let before = objects(&*source);
    write_noise(&clone, 60..90);
    tick_until(&clone, "what nobody needs is deleted", || clone.stats().deletes > 20);
    clone.close().expect("it can be closed");
    drop(clone);
    let clone = open(&store);
    write_noise(&clone, 90..95);
    tick_until(&clone, "the next owner has swept", || clone.stats().deletes > 5);
    assert_eq!(read(&clone, 0, 64), *noise(64, 94));
    assert_eq!(objects(&*source), before, "a clone changes nothing of its source");

    // A clone of the clone, which goes back itself.
    let (second, third) = (volume.objects.beside("second"), volume.objects.beside("third"));
    let from = (Arc::clone(&store), &*clone);
    let cloned = volume.make_clone(from, ("of the clone", &second.0), passphrase);
    let of_clone = cloned.expect("it can be cloned").pin;
    let too_late = clone.delete_snapshot(&of_clone);
    assert_eq!(too_late, Err(ObjectError::NeededByClone(second.0.clone())));
    clone.roll_back("of the clone", Replaced::Discarded).expect("it can go back");
    drop(clone);
    let (clone, again) = (open(&store), open(&second.1));
    for device in [&clone, &again] {
        holds_then(device, "the clone of the clone, and the clone that went back");
        assert_eq!(read(device, 300, 1), *noise(1, 7));
    }
    write_noise(&again, 100..110);
    holds_then(&clone, "its clone was overwritten");

    // What ends a clone's pin.
    let device = open(&source);
    let pin = names(&device).remove(0);
    assert_eq!(names(&device), [&*pin]);
    let refused = device.delete_snapshot(&pin).expect_err("the clone is there");
    assert_eq!(refused, ObjectError::NeededByClone(name.clone()));
    let from = (Arc::clone(&source), &*device);
    let absent = volume.make_clone(from, ("one", &third.0), passphrase).expect_err("it is deleted");
    assert!(matches!(absent, ObjectError::NoSnapshot { .. }), "{absent}");
    assert_eq!(objects(&*third.1), [], "nothing is left");
    drop((clone, again));
    remove(&*store);
    let missing = volume.open_in(second.1.clone(), &claimant, small()).err().expect("it is gone");
    assert!(missing.to_string().contains("bring it back"), "{missing}");
    device.delete_snapshot(&pin).expect("the clone was removed");
    let needed = objects(&*source).len();
    write_noise(&device, 40..60);
    device.close().expect("it can be closed");
    drop(device);
    let device = open(&source);
    tick_until(&device, "what the clone needed is deleted", || objects(&*source).len() < needed);
    assert_eq!(read(&device, 0, 64), *noise(64, 59));
}

#[test]
fn nothing_is_made_where_a_clone_is_whose_first_root_was_deleted() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.create_snapshot("one").expect("it can be made");
    let (name, store) = volume.objects.beside("clone");
    let cloned = volume.make_clone((volume.store(), &device), ("one", &name), None);
    cloned.expect("it can be cloned");
    let clone = volume.open_in(store.clone(), &Claimant::default(), small()).expect("it is free");
    write_noise(&clone, 1..20);
    let first_root = || store.get("c/0000000000000000", None);
    tick_until(&clone, "the first root is deleted", || first_root().is_err());
    end(clone);
    let options = VolumeOptions::new(BLOCKS * BLOCK, (0, 1 << 20));
    let made = ObjectDevice::make(store.clone(), volume.threads(), &options, &volume.env);
    assert_eq!(made, Err(ObjectError::VolumeExists));
    assert!(matches!(first_root(), Err(ObjectError::NotFound(_))));
}

/// Copies all objects of a volume.
fn copy(from: &dyn Store, to: &dyn Store) {
    for (name, _) in objects(from) {
        let bytes = from.get(&name, None).expect("it is there");
        to.create(&name, &bytes).expect("nothing else is there");
    }
}

#[test]
fn a_clone_that_was_moved_or_has_no_pin_is_not_opened() {
    let passphrase = Passphrase::new(b"open sesame".to_vec().into());
    let volume = Volume::encrypted(passphrase.as_ref());
    let claimant = Claimant { passphrase, take_over: true, ..Claimant::default() };
    let passphrase = claimant.passphrase.as_ref();
    let open = |store: &Arc<dyn Store>| volume.open_in(store.clone(), &claimant, small());
    let text = |opened: Result<_, ObjectError>| opened.err().expect("it is refused").to_string();
    let device = open(&volume.store()).expect("it can be opened");
    write_noise(&device, 1..2);
    device.create_snapshot("one").expect("it can be made");
    let ((trial, store), (_, moved)) =
        (volume.objects.beside("trial"), volume.objects.beside("moved"));
    let cloned = volume.make_clone((volume.store(), &device), ("one", &trial), passphrase);
    let pin = cloned.expect("it can be cloned").pin;
    let clone = open(&store).expect("it is where it was made");
    clone.create_snapshot("two").expect("it can be made");
    let (second, of_clone) = volume.objects.beside("second");
    let cloned = volume.make_clone((store.clone(), &clone), ("two", &second), passphrase);
    cloned.expect("it can be cloned");
    end(clone);

    copy(&*store, &*moved);
    remove(&*store);
    let read_only = |store: &Arc<dyn Store>| {
        let (store, threads) = (store.clone(), volume.threads());
        ObjectDevice::open_read_only(store, threads, &claimant, small(), &volume.env)
    };
    for refused in [text(open(&moved)), text(read_only(&moved))] {
        assert!(refused.contains(&format!("move it back to {trial:?}")), "{refused}");
    }
    copy(&*moved, &*store);
    for store in [&store, &of_clone] {
        end(open(store).expect("it is back"));
    }
    // The pin is deleted while the clone is not to be seen.
    remove(&*moved);
    copy(&*store, &*moved);
    remove(&*store);
    device.delete_snapshot(&pin).expect("the clone is not there");
    copy(&*moved, &*store);
    for refused in [text(open(&store)), text(read_only(&store)), text(open(&of_clone))] {
        assert!(refused.contains(&format!("{trial:?} is a clone, and its pin")), "{refused}");
    }
}

/// A store in which something happens before some object is created. If it is an error, that is the
/// answer.
struct Broken {
    inner: Arc<dyn Store>,
    at: &'static str,
    then: Arc<dyn Fn() -> Result<(), ObjectError> + Send + Sync>,
    /// Deletions that were not answered; `None`: all are.
    lost_deletes: Option<Arc<AtomicU64>>,
}

impl Broken {
    fn new(
        inner: Arc<dyn Store>,
        at: &'static str,
        then: impl Fn() -> Result<(), ObjectError> + Send + Sync + 'static,
    ) -> Self {
        Self { inner, at, then: Arc::new(then), lost_deletes: None }
    }
}

impl Store for Broken {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.inner.get(name, range)
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        if name.starts_with(self.at) {
            (self.then)()?;
        }
        self.inner.create(name, bytes)
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.inner.put(name, bytes)
    }
    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let Some(lost) = &self.lost_deletes else { return self.inner.delete(name) };
        assert_eq!(lost.fetch_add(1, Ordering::Relaxed), 0, "a deletion is not repeated");
        Err(ObjectError::Unavailable("simulated".into()))
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.inner.list(prefix)
    }
    fn name(&self) -> Result<String, ObjectError> {
        self.inner.name()
    }
    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        let (inner, then) = (self.inner.beside(name)?, self.then.clone());
        Ok(Arc::new(Self { inner, at: self.at, then, lost_deletes: self.lost_deletes.clone() }))
    }
}

#[test]
fn a_clone_that_was_not_made_is_no_volume_and_its_pin_can_be_deleted() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.write(0, &noise(64, 1)).expect("it can be written");
    device.create_snapshot("one").expect("it can be made");
    let (name, store) = volume.objects.beside("clone");
    for (at, pins) in [("c/", 0), ("super", 1)] {
        let refuse = || Err(ObjectError::Refused("simulated".into()));
        let broken = Arc::new(Broken::new(volume.store(), at, refuse));
        let failed = volume.make_clone((broken, &device), ("one", &name), None);
        match failed.expect_err("an object cannot be created") {
            ObjectError::Refused(_) => assert_eq!(pins, 0, "it has no pin yet"),
            error => {
                let (pin, error) = (names(&device).remove(1), error.to_string());
                assert!(
                    error.contains(&format!("ferry snapshot delete VOLUME {pin:?}")),
                    "{error}"
                );
            }
        }
        let opened = volume.open_in(store.clone(), &Claimant::default(), small()).err();
        assert_eq!(opened, Some(ObjectError::NoVolume), "{at}");
        assert_eq!(names(&device).len(), 1 + pins, "{at}");
    }
    // Nobody knows whether the other process will still end it.
    let pin = names(&device).remove(1);
    assert_eq!(device.delete_snapshot(&pin), Err(ObjectError::NeededByClone(name)));
    remove(&*store);
    device.delete_snapshot(&pin).expect("there is nothing of the clone");
    device.delete_snapshot("one").expect("it can be deleted");
    let refused = |name: &str| device.create_snapshot(name).expect_err("it is refused");
    let pin = format!("one@{}@clone", "0".repeat(32));
    assert!(matches!(refused(&pin), ObjectError::NoSnapshot { .. }));
    assert!(matches!(refused("one@clone"), ObjectError::SnapshotName(..)));
}

#[test]
fn the_maker_of_a_clone_deletes_nothing_of_another_volume() {
    const FIRST_ROOT: &str = "c/0000000000000000";
    let passphrase = Passphrase::new(b"open sesame".to_vec().into());
    let other = Volume::encrypted(passphrase.as_ref());
    let cases = [
        (&passphrase, "c/", false),
        (&passphrase, "k/", false),
        (&passphrase, "k/", true),
        (&None, "c/", false),
        (&None, "super", false),
    ];
    for (passphrase, at, loses_deletes) in cases {
        let volume = Volume::encrypted(passphrase.as_ref());
        let claimant = Claimant { passphrase: passphrase.clone(), ..Claimant::default() };
        let device = volume.open_in(volume.store(), &claimant, small()).expect("nobody has it");
        device.create_snapshot("one").expect("it can be made");
        let (name, store) = volume.objects.beside("clone");
        // Another volume is made there, and its collector has deleted the first root.
        let made = Mutex::new(Some((other.store(), store.clone())));
        let mut broken = Broken::new(volume.store(), at, move || {
            let Some((other, store)) = made.lock().expect("no test failed").take() else {
                return Ok(());
            };
            for (name, _) in objects(&*other).into_iter().filter(|(name, _)| name != FIRST_ROOT) {
                store.create(&name, &other.get(&name, None)?)?;
            }
            Ok(())
        });
        broken.lost_deletes = loses_deletes.then(Arc::default);
        let names = ("one", name.as_str());
        let made = volume.make_clone((Arc::new(broken), &device), names, passphrase.as_ref());
        made.expect_err("another volume is there");
        let mut left = objects(&*store);
        let first = left.iter().position(|(name, _)| name == FIRST_ROOT);
        assert_eq!(first.map(|first| left.remove(first)).is_some(), loses_deletes, "{at}");
        let mut expected = objects(&*other.store());
        expected.retain(|(name, _)| name != FIRST_ROOT);
        assert_eq!(left, expected, "{at}");
    }
}

#[test]
fn a_clone_whose_first_root_is_removed_at_this_moment_is_not_reported_as_made() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.create_snapshot("one").expect("it can be made");
    let (name, store) = volume.objects.beside("clone");
    let removed = store.clone();
    let broken = Broken::new(volume.store(), "super", move || {
        remove(&*removed);
        Ok(())
    });
    let made = volume.make_clone((Arc::new(broken), &device), ("one", &name), None);
    let error = made.expect_err("it has no root").to_string();
    assert!(error.contains("it is no volume"), "{error}");
}

fn sizes(volume: &Volume) -> SnapshotSizes {
    let measured = SnapshotSizes::measure(volume.store(), volume.threads(), None, &volume.env);
    measured.expect("the store answers")
}

/// What a store has, but for the newest two roots, which each change of the volume replaces.
fn bytes_behind_roots(store: &dyn Store) -> u64 {
    let all = objects(store);
    let mut roots: Vec<_> = all.iter().filter(|(name, _)| name.starts_with("c/")).collect();
    roots.sort();
    let newest: usize = roots.iter().rev().take(2).map(|(_, len)| len).sum();
    (bytes(store) - newest) as u64
}

/// Ticks until the device has deleted what nothing needs.
fn settle(device: &ObjectDevice, volume: &Volume) {
    let threads = volume.threads();
    for _ in 0..TICKS_MAX {
        device.tick();
        // For the threads of the device: no event tells that they have nothing more to delete.
        threads.pause(Duration::from_millis(3));
        if device.is_at_rest() {
            return;
        }
    }
    panic!("the device does not come to rest");
}

/// Snapshots that overlap, two of them with no change between, of one owner or of several.
fn make_overlapping(volume: &Volume, several: bool) -> Arc<ObjectDevice> {
    let limits = Limits { repack_bytes_min: usize::MAX, ..small() };
    let open = || volume.open(false, limits).expect("nobody has it");
    let mut device = open();
    for round in 0..5_u8 {
        let at = u64::from(round) * 20 + 100;
        // The first blocks are overwritten in each round, a half of the next in the next round.
        device.write(0, &noise(64, round)).expect("it can be written");
        device.write(at * BLOCK, &noise(40, 50 + round)).expect("it can be written");
        device.write((400 + at) * BLOCK, &noise(2, 90 + round)).expect("it can be written");
        device.create_snapshot(&format!("{round}")).expect("it can be made");
        if round == 2 {
            device.create_snapshot("2 again").expect("it can be made");
            device.discard(100 * BLOCK, 50 * BLOCK).expect("it can be discarded");
        }
        if several && round % 2 == 1 {
            end(device);
            device = open();
        }
    }
    overwrite(&device, 200..203);
    settle(&device, volume);
    device
}

#[test]
fn the_deletion_of_a_snapshot_frees_what_it_holds_alone_to_the_byte() {
    let orders = [["0", "1", "2", "2 again", "3", "4"], ["4", "2", "0", "3", "2 again", "1"]];
    for (order, several) in orders.into_iter().flat_map(|order| [(order, false), (order, true)]) {
        let volume = Volume::new();
        let store = volume.store();
        let device = make_overlapping(&volume, several);
        let mut left = bytes_behind_roots(&*store);
        let SnapshotSizes { held_bytes, alone_bytes } = sizes(&volume);
        let held_alone: u64 = alone_bytes.iter().map(|(_, alone)| alone).sum();
        assert!(held_alone < held_bytes, "several share a part");
        let end_bytes = left - held_bytes;
        for name in order {
            let SnapshotSizes { held_bytes, alone_bytes } = sizes(&volume);
            let names: Vec<&str> = alone_bytes.iter().map(|(one, _)| &*one.name).collect();
            assert_eq!(names, self::names(&device), "the oldest one first");
            assert_eq!(left - held_bytes, end_bytes, "the volume needs as much as before");
            let alone = alone_bytes.iter().find(|(one, _)| one.name == name);
            left -= alone.expect("it is there").1;
            device.delete_snapshot(name).expect("it can be deleted");
            settle(&device, &volume);
            assert_eq!(bytes_behind_roots(&*store), left, "{name} of {order:?}, {several}");
        }
        assert_eq!(left, end_bytes);
        assert_eq!(sizes(&volume), SnapshotSizes { held_bytes: 0, alone_bytes: Vec::new() });
        end(device);
    }
}

#[test]
fn a_snapshot_of_which_a_clone_was_made_holds_nothing_alone() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.write(0, &noise(64, 1)).expect("it can be written");
    device.create_snapshot("one").expect("it can be made");
    overwrite(&device, 2..20);
    let before = sizes(&volume);
    assert!(before.held_bytes >= 64 * BLOCK && before.alone_bytes[0].1 == before.held_bytes);
    device.create_snapshot("one@00112233445566778899aabbccddeeff@clone").expect("it has a pin");
    let after = sizes(&volume);
    assert!(after.alone_bytes.iter().all(|(_, alone)| *alone == 0), "{after:?}");
    assert!(after.held_bytes >= 64 * BLOCK, "{after:?}");
    end(device);
}

/// Its volume gets a snapshot each time that the sizes of roots are asked for, so many times.
struct Restless(Arc<dyn Store>, Arc<ObjectDevice>, Mutex<u32>);

impl Store for Restless {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.0.get(name, range)
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.0.create(name, bytes)
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.0.put(name, bytes)
    }
    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.0.delete(name)
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.0.list(prefix)
    }
    fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, ObjectError> {
        let mut left = self.2.lock().expect("nobody panicked");
        if prefix == "c/" && *left > 0 {
            *left -= 1;
            self.1.create_snapshot(&format!("{left} more"))?;
        }
        self.0.list_sizes(prefix)
    }
}

#[test]
fn snapshots_that_change_while_they_are_measured_are_measured_three_times() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    device.create_snapshot("one").expect("it can be made");
    let measure = |changes| {
        let store = Restless(volume.store(), Arc::clone(&device), Mutex::new(changes));
        SnapshotSizes::measure(Arc::new(store), volume.threads(), None, &volume.env)
    };
    assert_eq!(measure(3), Err(ObjectError::SnapshotsChange));
    let names_of = |sizes: SnapshotSizes| -> Vec<String> {
        sizes.alone_bytes.into_iter().map(|(one, _)| one.name).collect()
    };
    names(&device).iter().for_each(|name| device.delete_snapshot(name).expect("it is there"));
    let measured = measure(2).expect("the third time is quiet");
    assert_eq!(names_of(measured), names(&device));
    assert_eq!(names(&device).len(), 2);
}

fn follower(volume: &Volume, limits: Limits) -> Follower {
    Follower::open(volume.store(), volume.threads(), None, limits, &volume.env)
        .expect("it can be followed")
}

#[test]
fn a_follower_finds_each_version_that_was_flushed_and_deletions_do_not_harm_it() {
    let volume = Volume::new();
    let mut device = volume.open(false, small()).expect("nobody has it");
    let mut follower = follower(&volume, small());
    let first = follower.look(false).expect("it can look").expect("there is one");
    assert_eq!(read(&first.device, 0, 64), vec![0; 64 * BLOCK_SIZE]);
    let (mut root, mut log) = (first.root, first.log);
    for byte in 1..120_u8 {
        if byte % 40 == 0 {
            device = volume.open(true, small()).expect("it can be taken over");
        }
        device.write(0, &filled(64, byte)).expect("it can be written");
        device.flush().expect("it can be flushed");
        let found = follower.look(false).expect("it can look").expect("there is a newer one");
        assert_eq!(read(&found.device, 0, 64), *filled(64, byte));
        assert!(!found.new_timeline && found.root >= root && found.log > log, "{byte}");
        (root, log) = (found.root, found.log);
        assert_eq!(found.epoch, device.stats().epoch);
        let refused = found.device.write(0, &filled(1, 7)).expect_err("it is read only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        device.tick();
    }
    assert!(device.stats().deletes > 0, "the collector was at work");
    device.flush().expect("nobody fenced it off");
    device.close().expect("it can be closed");
    let closed = follower.look(false).expect("it can look").expect("its last root is new");
    assert_eq!(read(&closed.device, 0, 64), *filled(64, 119));
    assert!(!closed.new_timeline);
    assert!(follower.look(false).expect("it can look").is_none(), "nothing has changed");
    let again = follower.look(true).expect("it can look").expect("it was asked for");
    assert_eq!((again.root, again.log), (closed.root, closed.log));
}

#[test]
fn a_follower_that_looks_while_the_owner_writes_never_sees_half_of_a_flush() {
    let volume = Volume::new();
    // Nothing is sealed but by a flush.
    let limits = Limits { seal_bytes: 16 << 20, unsent_bytes_max: 32 << 20, ..small() };
    let device = volume.open(false, limits).expect("nobody has it");
    let mut follower = follower(&volume, limits);
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            for byte in 1..200_u8 {
                // Two runs, one of which becomes a data object.
                device.write(0, &filled(32, byte)).expect("it can be written");
                device.write(900 * BLOCK, &filled(1, byte)).expect("it can be written");
                device.flush().expect("it can be flushed");
                device.tick();
            }
        });
        let mut last = 0;
        while !writes.is_finished() {
            let Some(found) = follower.look(false).expect("it can look") else { continue };
            // What it found may be deleted at once here: the grace is nothing.
            let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
            let mut byte = |block: u64| {
                found.device.read(block * BLOCK, &mut buf).ok().map(|()| buf[BLOCK_SIZE - 1])
            };
            let (Some(one), Some(other)) = (byte(31), byte(900)) else { continue };
            assert!(one == other && one >= last, "{last}, then {one} and {other}");
            last = one;
        }
        writes.join().expect("it wrote all");
    });
    let found = follower.look(true).expect("it can look").expect("it was asked for");
    assert_eq!(read(&found.device, 0, 32), *filled(32, 199));
}

#[test]
fn a_follower_tells_a_rollback_from_other_roots() {
    let volume = Volume::new();
    let limits = Limits { grace: Duration::from_secs(3600), ..small() };
    let open = || volume.open(false, limits).expect("nobody has it");
    let device = open();
    device.write(0, &filled(64, 1)).expect("it can be written");
    device.create_snapshot("one").expect("it can be made");
    let mut follower = follower(&volume, limits);
    let mut look = |what: &str, byte: u8, new_timeline: bool| {
        let found = follower.look(false).expect("it can look").expect(what);
        assert_eq!(read(&found.device, 0, 64), *filled(64, byte), "{what}");
        assert_eq!(found.new_timeline, new_timeline, "{what}");
    };
    look("a snapshot was made", 1, false);
    device.close().expect("it can be closed");
    look("nothing has changed since the snapshot", 1, false);
    let device = open();
    look("a fence", 1, false);
    device.close().expect("it can be closed");
    look("another owner changed nothing", 1, false);
    let device = open();
    device.write(0, &filled(64, 2)).expect("it can be written");
    device.flush().expect("it can be flushed");
    look("a change", 2, false);
    device.roll_back("one", Replaced::Snapshot).expect("it can go back");
    look("a rollback", 1, true);
    let device = open();
    device.close().expect("it can be closed");
    look("an owner after the rollback", 1, false);
    // What the log says behind the snapshot's root is lost, and the map is the same.
    let device = open();
    device.create_snapshot("two").expect("it can be made");
    device.write(0, &filled(64, 3)).expect("it can be written");
    device.flush().expect("it can be flushed");
    look("a change in the log", 3, false);
    drop(device);
    let device = volume.open(true, limits).expect("it can be taken over");
    device.roll_back("two", Replaced::Discarded).expect("it can go back");
    look("a rollback of what only the log had", 1, true);
}

#[test]
fn a_follower_that_goes_on_from_the_root_of_another_one_tells_a_rollback() {
    let volume = Volume::new();
    let limits = Limits { grace: Duration::from_secs(3600), ..small() };
    let device = volume.open(false, limits).expect("nobody has it");
    device.write(0, &filled(64, 1)).expect("it can be written");
    device.create_snapshot("one").expect("it can be made");
    let go_on = |root: u64| {
        let mut follower = follower(&volume, limits);
        follower.goes_on_from(root);
        follower.look(true)
    };
    let goes_on = |root| go_on(root).expect("it can look").expect("there is one");
    let seen = follower(&volume, limits).look(true).expect("it can look").expect("there is one");
    assert!(!goes_on(seen.root).new_timeline, "the same root");
    device.write(0, &filled(64, 2)).expect("it can be written");
    device.create_snapshot("two").expect("it can be made");
    assert!(!goes_on(seen.root).new_timeline, "another root");
    device.roll_back("one", Replaced::Snapshot).expect("it can go back");
    let found = goes_on(seen.root);
    assert!(found.new_timeline);
    assert_eq!(read(&found.device, 0, 64), *filled(64, 1));
    assert!(!goes_on(found.root).new_timeline, "nothing has changed since");
    assert!(go_on(found.root + 1).is_err(), "that would be an older version");
}

#[test]
fn a_follower_that_did_not_look_for_long_takes_it_for_another_timeline() {
    let volume = Volume::new();
    let device = volume.open(false, small()).expect("nobody has it");
    let mut follower = follower(&volume, small());
    let first = follower.look(false).expect("it can look").expect("there is one");
    overwrite(&device, 1..60);
    tick_until(&device, "the roots between are deleted", || {
        let roots = volume.store().list("c/").expect("it can be listed");
        !roots.contains(&format!("c/{:016x}", first.root + 1))
    });
    let found = follower.look(false).expect("it can look").expect("there is a newer one");
    assert!(found.new_timeline);
    assert_eq!(read(&found.device, 0, 64), *filled(64, 59));
    let mut next = self::follower(&volume, small());
    next.goes_on_from(first.root);
    let found = next.look(true).expect("it can look").expect("there is one");
    assert!(found.new_timeline, "the same in another process");
}
