//! Data that is on its way to the device when somebody wants it.

use crate::file::tests::*;
use crate::scrub::live::{Mounted, Scrubs};
use crate::scrub::{Part, ScrubOptions, ScrubState};
use ferry_device::{HookedDevice, Op};
use parking_lot::Condvar;
use std::collections::BTreeSet;

/// A device that can hold what is submitted, and knows where it was read.
struct Holding {
    dev: Arc<HookedDevice>,
    reads: Arc<(Mutex<Reads>, Condvar)>,
}

#[derive(Default)]
struct Reads {
    count: u64,
    /// Where it was read since it last began to hold, in bytes.
    places: BTreeSet<u64>,
}

impl Holding {
    fn around(inner: Arc<MemDevice>) -> Self {
        let (dev, reads) =
            (Arc::new(HookedDevice::new(inner)), Arc::<(Mutex<Reads>, Condvar)>::default());
        let noted = Arc::clone(&reads);
        dev.set_hook(move |request, serve| {
            serve()?;
            if request.op == Op::Read {
                let mut reads = noted.0.lock();
                reads.count += 1;
                reads.places.insert(request.offset);
                noted.1.notify_all();
            }
            Ok(())
        });
        Self { dev, reads }
    }
    fn hold(&self) {
        self.reads.0.lock().places.clear();
        self.dev.hold(|request| request.submitted);
    }
    fn let_go(&self) {
        self.dev.release_all();
    }
    fn reads(&self) -> u64 {
        self.reads.0.lock().count
    }
    /// Waits until somebody has read at this byte.
    fn wait_for_read_at(&self, offset: u64) {
        let mut reads = self.reads.0.lock();
        while !reads.places.contains(&offset) {
            self.reads.1.wait(&mut reads);
        }
    }
    /// Waits until the device has been read so many times.
    fn wait_for_reads(&self, count: u64) {
        let mut reads = self.reads.0.lock();
        while reads.count < count {
            self.reads.1.wait(&mut reads);
        }
    }
}

fn held_volume(cache: usize) -> (Volume, Holding) {
    let mut holding = None;
    let volume = Volume::on(64, 256 << 10, cache, false, |inner| {
        let made = Holding::around(inner);
        let dev = made.dev.clone();
        holding = Some(made);
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
    let before = dev.reads();
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
    let crate::extents::Place::Data(first, _) = volume.store.window(&file, 0).unwrap().place(0)
    else {
        panic!("the file is mapped")
    };
    let (scrubs, env) = (Scrubs::default(), Env::real());
    let mounted = Mounted {
        journal: volume.journal.clone(),
        data: volume.store.clone(),
        growing: Arc::default(),
        env: env.clone(),
    };
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

/// What is done behind the next write, once.
type Act = Box<dyn FnOnce() + Send>;

/// Two files travel in one batch. When its data has landed, the second one's new place is not in
/// its extent map yet.
#[test]
fn what_has_landed_and_is_not_yet_logged_stays_in_memory() {
    let next: Arc<Mutex<Option<Act>>> = Arc::default();
    let after_write = Arc::clone(&next);
    let volume = Volume::on(64, 256 << 10, 8 << 20, false, |inner| {
        let dev = HookedDevice::new(inner);
        dev.set_after_submit(move || {
            let act = after_write.lock().take();
            act.into_iter().for_each(|act| act());
        });
        Arc::new(dev)
    });
    let files: Vec<_> = (5..7).map(|ino| volume.create(ino)).collect();
    for version in 1..4 {
        for file in &files {
            volume.write(file, 0, &pattern(version, 20_000));
        }
        let (store, file) = (Arc::clone(&volume.store), Arc::clone(&files[1]));
        let (tell, told) = std::sync::mpsc::channel();
        *next.lock() = Some(Box::new(move || {
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
