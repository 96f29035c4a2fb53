//! Data that is on its way to the device when somebody wants it.

use super::*;
use crate::scrub::live::{Mounted, Scrubs};
use crate::scrub::{Part, ScrubOptions, ScrubState};
use ferry_device::{AlignedBuf, Io};
use parking_lot::Condvar;
use std::collections::BTreeSet;
use std::io;

/// A device whose submitted writes wait until they are let go.
struct Holding {
    inner: Arc<MemDevice>,
    state: Mutex<Held>,
    read: Condvar,
}

#[derive(Default)]
struct Held {
    hold: bool,
    waiting: Vec<Io>,
    reads: u64,
    /// Where it was read since it last began to hold, in bytes.
    places: BTreeSet<u64>,
}

impl Holding {
    fn hold(&self) {
        let mut state = self.state.lock();
        state.hold = true;
        state.places.clear();
    }
    fn let_go(&self) {
        let mut state = self.state.lock();
        state.hold = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.inner.submit(waiting);
    }
    /// Waits until somebody has read at this byte.
    fn wait_for_read_at(&self, offset: u64) {
        let mut state = self.state.lock();
        while !state.places.contains(&offset) {
            self.read.wait(&mut state);
        }
    }
    /// Waits until the device has been read `reads` times since it began to hold.
    fn wait_for_reads(&self, reads: u64) {
        let mut state = self.state.lock();
        while state.reads < reads {
            self.read.wait(&mut state);
        }
    }
}

impl BlockDevice for Holding {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.inner.read(offset, buf)?;
        let mut state = self.state.lock();
        state.reads += u64::from(state.hold);
        state.places.insert(offset);
        self.read.notify_all();
        Ok(())
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.inner.write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }
    fn submit(&self, batch: Vec<Io>) {
        let mut state = self.state.lock();
        if state.hold {
            state.waiting.extend(batch);
        } else {
            drop(state);
            self.inner.submit(batch);
        }
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        self.inner.host_free()
    }
}

fn held_volume(cache: usize) -> (Volume, Arc<Holding>) {
    let mut holding = None;
    let volume = Volume::on(64, 256 << 10, cache, false, |inner| {
        let dev = Arc::new(Holding { inner, state: Mutex::default(), read: Condvar::new() });
        holding = Some(dev.clone());
        dev
    });
    (volume, holding.expect("made just now"))
}

#[test]
fn a_block_that_the_cleaner_is_moving_is_waited_for_and_not_taken_for_damaged() {
    let (volume, dev) = held_volume(8 << 20);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 80_000));
    volume.store.write_back_all().unwrap();
    for segment in volume.store.table.open_segments() {
        volume.store.table.close_segment(segment);
    }
    volume.evict();
    dev.hold();
    volume.store.clean_once().unwrap();
    let before = dev.state.lock().reads;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| volume.read(&file, 0, 80_000));
        dev.wait_for_reads(before + 1);
        dev.let_go();
        assert!(reader.join().unwrap() == pattern(1, 80_000));
    });
    assert_eq!(volume.store.stats().damaged_blocks, 0);
    volume.check();
}

#[test]
fn a_scrub_waits_for_what_is_on_its_way_and_does_not_call_it_damaged() {
    let (volume, dev) = held_volume(8 << 20);
    let file = volume.create(5);
    volume.write(&file, 0, &pattern(1, 80_000));
    dev.hold();
    volume.store.write_back(&file).unwrap();
    let super::super::extents::Place::Data(first, _) = volume.store.window(&file, 0).unwrap().place(0) else {
        panic!("the file is mapped")
    };
    let (scrubs, env) = (Scrubs::default(), Env::real());
    let mounted = Mounted { journal: volume.journal.clone(), data: volume.store.clone(), env: env.clone() };
    scrubs.start(mounted, ScrubOptions::default(), true).unwrap();
    dev.wait_for_read_at(first * BLOCK);
    for _ in 0..1000 {
        assert_eq!(scrubs.status(&env).state, ScrubState::Running);
        std::thread::yield_now();
    }
    dev.let_go();
    while scrubs.status(&env).state == ScrubState::Running {
        std::thread::yield_now();
    }
    // This volume has no superblocks.
    assert!(scrubs.damage(0, 100).iter().all(|damage| damage.part == Part::Superblock));
    assert_eq!(scrubs.status(&env).verified.data_bytes, 20 * BLOCK);
}

#[test]
fn what_is_being_written_stays_in_memory_until_it_is_written() {
    let (volume, dev) = held_volume(64 << 10);
    let file = volume.create(5);
    dev.hold();
    volume.write(&file, 0, &pattern(1, 60_000));
    volume.store.write_back(&file).unwrap();
    volume.store.cache.shrink();
    volume.evict();
    assert!(volume.read(&file, 0, 60_000) == pattern(1, 60_000));
    assert!(volume.store.stats().in_flight_bytes > 0);
    // Cut and removed while it flies: the space is free, and what flies harms nobody.
    volume.store.set_size(&file, 10_000, &mut |_| ()).unwrap();
    drop(file);
    volume.remove(5);
    dev.let_go();
    assert_eq!(volume.store.stats().in_flight_bytes, 0);
    assert_eq!(volume.store.table.used(), (0, 0));
    volume.check();
}

/// A device that calls back when a write was submitted and has completed.
struct Telling {
    inner: Arc<MemDevice>,
    tell: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl BlockDevice for Telling {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.inner.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.inner.write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }
    fn submit(&self, batch: Vec<Io>) {
        self.inner.submit(batch);
        let tell = self.tell.lock().take();
        if let Some(tell) = tell {
            tell();
        }
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        self.inner.host_free()
    }
}

/// Two files travel in one batch. When its data has landed, the second one's new place is not in its extent map yet.
#[test]
fn what_has_landed_and_is_not_yet_logged_stays_in_memory() {
    let mut telling = None;
    let volume = Volume::on(64, 256 << 10, 8 << 20, false, |inner| {
        let dev = Arc::new(Telling { inner, tell: Mutex::new(None) });
        telling = Some(dev.clone());
        dev
    });
    let telling = telling.expect("made just now");
    let files: Vec<_> = (5..7).map(|ino| volume.create(ino)).collect();
    for version in 1..4 {
        for file in &files {
            volume.write(file, 0, &pattern(version, 20_000));
        }
        let (store, file) = (Arc::clone(&volume.store), Arc::clone(&files[1]));
        let (tell, told) = std::sync::mpsc::channel();
        *telling.tell.lock() = Some(Box::new(move || {
            file.file.pages.write().evict_all();
            let mut out = vec![0; 20_000];
            let read = store.read(&file, 0, &mut out);
            tell.send(read.is_ok() && out == pattern(version, 20_000)).unwrap();
        }));
        volume.store.write_back_all().unwrap();
        assert!(told.recv().unwrap(), "version {version} was not what was read");
    }
    volume.check();
}
