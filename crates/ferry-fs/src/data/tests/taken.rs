//! What lies between taking dirty data, logging it, and its landing on the device.

use super::*;
use crate::data::file::ExtentsGuard;
use crate::data::segments::Stream;
use ferry_device::{AlignedBuf, Io};
use std::io;

#[test]
fn small_contents_stay_in_memory_until_they_are_logged() {
    let volume = Volume::new(16, 1 << 20, 1 << 20, false);
    let file = volume.create(10);
    volume.write(&file, 0, b"hello");
    let mut cargo = volume.store.cargo(None);
    let guard = ExtentsGuard::lock(&file);
    let work = volume.store.take(guard, 0..u64::MAX / BLOCK, &mut cargo, &volume.journal).unwrap().unwrap();
    volume.evict();
    assert_eq!(volume.read(&file, 0, 5), b"hello");
    volume.store.send(vec![work], cargo, &volume.journal).unwrap();
    volume.evict();
    assert_eq!(volume.read(&file, 0, 5), b"hello");
}

#[test]
fn a_file_that_outgrows_its_record_while_that_is_logged_leaves_it() {
    let volume = Volume::new(16, 1 << 20, 1 << 20, false);
    let file = volume.create(10);
    volume.write(&file, 0, b"hello");
    let mut cargo = volume.store.cargo(None);
    let guard = ExtentsGuard::lock(&file);
    let work = volume.store.take(guard, 0..u64::MAX / BLOCK, &mut cargo, &volume.journal).unwrap().unwrap();
    volume.write(&file, 10_000, b"far");
    volume.store.send(vec![work], cargo, &volume.journal).unwrap();
    volume.store.write_back(&file).unwrap();
    assert_eq!(volume.read(&file, 0, 5), b"hello");
    let state = file.state.read();
    assert!(state.logged.inline.is_none() && state.logged.blocks == 2, "{:?}", state.logged);
    drop(state);
    volume.check();
}

#[test]
fn data_that_has_landed_stays_in_memory_until_it_is_logged() {
    let volume = Volume::new(16, 1 << 20, 8 << 20, false);
    let (first, second) = (volume.create(10), volume.create(11));
    for file in [&first, &second] {
        volume.write(file, 0, &pattern(file.ino, 8192));
    }
    std::thread::scope(|scope| {
        // Both are in one batch, which lands with the first one's transaction; the second one's waits for this lock.
        let state = second.state.read();
        let done = scope.spawn(|| volume.store.write_back_all());
        while volume.store.is_dirty(&first) {
            std::thread::yield_now();
        }
        volume.evict();
        let there = second.file.pages.read().has(0);
        drop(state);
        done.join().unwrap().unwrap();
        assert!(there, "evicted before it was mapped");
    });
    volume.evict();
    assert!(volume.read(&second, 0, 8192) == pattern(11, 8192));
}

/// A device whose submitted writes wait until they are let go.
struct Held {
    below: MemDevice,
    holding: AtomicBool,
    waiting: Mutex<Vec<Io>>,
}

impl Held {
    fn let_go(&self) {
        self.holding.store(false, Ordering::Release);
        let waiting = std::mem::take(&mut *self.waiting.lock());
        self.below.submit(waiting);
    }
}

impl BlockDevice for Held {
    fn capacity(&self) -> u64 {
        self.below.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.below.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.below.write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.below.flush()
    }
    fn submit(&self, batch: Vec<Io>) {
        if self.holding.load(Ordering::Acquire) {
            self.waiting.lock().extend(batch);
        } else {
            self.below.submit(batch);
        }
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        self.below.host_free()
    }
}

#[test]
fn what_the_cleaner_moves_can_be_read_before_it_has_landed() {
    let plain = Volume::new(16, 256 << 10, 1 << 20, false);
    let geometry = plain.geometry;
    let held = Arc::new(Held {
        below: MemDevice::new(plain.dev.capacity()),
        holding: AtomicBool::new(false),
        waiting: Mutex::default(),
    });
    let dev: Arc<dyn BlockDevice> = held.clone();
    let env = Env::real();
    Journal::format(&dev, &geometry, &[0, 1], &env).unwrap();
    let client = Arc::new(Client(Mutex::new(None)));
    let options = JournalOptions {
        commit_interval: Duration::from_secs(1),
        home_cache_bytes: 1 << 20,
        read_only: false,
        background: false,
    };
    let (journal, recovered) =
        Journal::open(dev.clone(), geometry, options, env.clone(), client.clone()).unwrap();
    let journal = Arc::new(journal);
    let store = DataStore::new(dev, geometry, plain.options.clone(), env);
    *client.0.lock() = Some(Arc::clone(&store));
    let inodes = Arc::new(Inodes { journal: Arc::downgrade(&journal), known: Mutex::default() });
    store.start(Arc::clone(&journal), &recovered, inodes.clone()).unwrap();
    let rec = InodeRecord { mode: libc::S_IFREG | 0o644, nlink: 1, ..InodeRecord::default() };
    let mut txn = journal.begin(Credits { keys: 1, bytes: 200, urgent: false }).unwrap();
    txn.put(&keys::inode(10), &rec.encode());
    txn.commit();
    let file = inodes.inode(10).unwrap().unwrap();
    let data = pattern(1, 64 << 10);
    store.write(&file, At::Offset(0), &data, &mut |_| ()).unwrap();
    store.write_back(&file).unwrap();
    // The segment is closed, as if it were full.
    let segment = store.table.open_segments()[0];
    store.table.close_segment(segment);
    file.file.pages.write().evict_all();
    held.holding.store(true, Ordering::Release);
    store.clean_once().unwrap();
    assert!(!held.waiting.lock().is_empty(), "something was moved");
    let mut out = vec![0; data.len()];
    let read = store.read(&file, 0, &mut out);
    held.let_go();
    assert_eq!(read.unwrap(), data.len());
    assert!(out == data);
    file.file.pages.write().evict_all();
    assert_eq!(store.read(&file, 0, &mut out).unwrap(), data.len());
    assert!(out == data);
    assert!(store.table.allocate(Stream::New, 1, &store.space).is_some());
}
