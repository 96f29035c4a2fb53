//! Durable points: what they cover survives any crash, and the owner knows it before anyone relies
//! on it.

use crate::common::{self, Volume, credits, device_len, force, geometry, options, put};
use ferry_device::{AlignedBuf, BlockDevice, FileDevice, Io, MemDevice};
use ferry_env::Env;
use ferry_journal::*;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

fn extent(offset: u64, fill: u8) -> DataExtent {
    let mut buf = AlignedBuf::zeroed(4096);
    buf.fill(fill);
    let crc = crc32c::crc32c(&crc32c::crc32c(&buf).to_le_bytes());
    DataExtent { offset, buf: Arc::new(buf), crc }
}

/// A device in memory that counts flushes.
struct Flushed {
    inner: MemDevice,
    ordered: bool,
    flushes: AtomicU64,
}

impl BlockDevice for Flushed {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> std::io::Result<()> {
        self.inner.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> std::io::Result<()> {
        self.inner.write(offset, buf)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.inner.flush()
    }
    fn submit(&self, batch: Vec<Io>) {
        let flushes = batch.iter().filter(|io| matches!(io, Io::Flush { .. })).count();
        self.flushes.fetch_add(flushes as u64, Ordering::Relaxed);
        self.inner.submit(batch);
    }
    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.inner.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.inner.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        self.inner.host_free()
    }
    fn is_ordered(&self) -> bool {
        self.ordered
    }
}

#[test]
fn much_data_is_flushed_before_its_record_but_on_an_ordered_device() {
    for (ordered, expected) in [(false, 2), (true, 1)] {
        let geo = geometry(256 * 1024, 256);
        let inner = MemDevice::new(device_len(&geo));
        let device = Arc::new(Flushed { inner, ordered, flushes: AtomicU64::new(0) });
        let volume = Volume::on(device.clone(), geo, Env::real());
        let (journal, _) = volume.open();
        let mut t = journal.begin(credits(1, 10)).unwrap();
        t.put(b"key", b"v");
        let buf = Arc::new(AlignedBuf::zeroed(1 << 20));
        for n in 0..33 {
            let offset = geo.segments_offset + 16 * geo.segment_len + (n << 20);
            let extent = DataExtent { offset, buf: buf.clone(), crc: 0 };
            t.write_data(extent, Box::new(|r| r.unwrap()));
        }
        let seq = t.commit();
        let before = device.flushes.load(Ordering::Relaxed);
        force(&journal, seq).unwrap();
        let flushes = device.flushes.load(Ordering::Relaxed) - before;
        assert_eq!(flushes, expected, "ordered: {ordered}");
        drop(journal); // a crash: MemDevice keeps all
        let (journal, recovered) = volume.open();
        assert_eq!(recovered.last, seq);
        assert_eq!(journal.get(b"key").unwrap().as_deref(), Some(&b"v"[..]));
    }
}

/// A ring without a free block leaves recovery no room for its durable point; what it has found is
/// then not covered.
#[test]
fn recovery_claims_no_durable_point_that_it_could_not_write() {
    let volume = Volume::new(256 * 1024);
    let offset = volume.geo.segments_offset + 40 * volume.geo.segment_len;
    let (journal, _) = volume.open();
    let mut seq = Seq(0);
    let mut i = 0_u32;
    while journal.stats().log_free_bytes > 2 * 4096 {
        let mut t = journal.begin(Credits { urgent: true, ..credits(1, 10) }).unwrap();
        t.put(&i.to_be_bytes(), b"v");
        seq = t.commit();
        force(&journal, seq).unwrap();
        i += 1;
    }
    assert_eq!(journal.stats().log_free_bytes, 2 * 4096);
    // A record of two blocks, with data that nothing refers to any more: written and removed in one
    // context.
    let value = vec![9; 4000];
    let mut t = journal.begin(Credits { urgent: true, ..credits(1, 4012) }).unwrap();
    t.put(b"acknowledged", &value);
    t.write_data(extent(offset, 1), Box::new(|r| r.unwrap()));
    let last = t.commit();
    force(&journal, last).unwrap();
    assert_eq!((last.0, journal.stats().log_free_bytes), (seq.0 + 1, 0));
    drop(journal); // a crash: MemDevice keeps all
    let (journal, recovered) = volume.open();
    assert_eq!(recovered.last, last);
    if journal.durable_point() >= last {
        // So the owner may use the blocks again, here for the home store, as its next checkpoint
        // would.
        let mut junk = AlignedBuf::zeroed(4096);
        junk.fill(0xee);
        volume.dev.write(offset, &junk).unwrap();
    }
    drop(journal);
    let (journal, recovered) = volume.open();
    assert_eq!(
        journal.get(b"acknowledged").unwrap().as_deref(),
        Some(&value[..]),
        "it was acknowledged"
    );
    assert_eq!(recovered.last, last);
}

/// A durable point that is in flight when the journal closes is part of what it closes: else
/// recovery would find a record behind the end.
#[test]
fn a_close_waits_for_the_durable_point_in_flight() {
    let geo = geometry(256 * 1024, 64);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    let volume = Volume::on(device.clone(), geo, sim_env(1).0);
    let (journal, _) = volume.open();
    force(&journal, put(&journal, b"key", b"value")).unwrap();
    device.set_hold(true);
    journal.tick().unwrap();
    assert_eq!(device.held(), 1, "the durable point");
    let closing = std::thread::spawn(move || journal.close());
    // What comes later is completed first; the durable point when nothing has come for long.
    let mut idle = 0;
    while !closing.is_finished() {
        let held = device.held();
        if held > 1 || idle > 10_000 {
            device.release(held.saturating_sub(1));
            idle = 0;
        } else {
            std::thread::yield_now();
            idle += 1;
        }
    }
    closing.join().unwrap().unwrap();
    device.set_hold(false);
    device.release_all(&mut SimRng::new(1));
    let (_, recovered) = volume.open();
    assert!(!recovered.unclean, "{recovered:?}");
}

/// Told late, as a busy owner is.
struct Slow {
    inner: Arc<common::Owner>,
    told: AtomicU64,
}

impl JournalClient for Slow {
    fn durable_point(&self, seq: Seq) {
        (0..20_000).for_each(|_| std::thread::yield_now());
        self.told.fetch_max(seq.0, Ordering::SeqCst);
    }
    fn failed(&self, error: &JournalError) {
        self.inner.failed(error);
    }
    fn take_home_segment(&self) -> Option<u32> {
        self.inner.take_home_segment()
    }
    fn release_home_segments(&self, segments: &[u32]) {
        self.inner.release_home_segments(segments);
    }
}

/// "What it freed is reusable" when it returns: the owner must have been told by then.
#[test]
fn force_durable_point_returns_after_the_owner_was_told() {
    let geo = geometry(512 * 1024, 64);
    let env = Env::real();
    let path =
        std::env::temp_dir().join(format!("ferry-journal-durable-point-{}", std::process::id()));
    let device = FileDevice::create(&path, device_len(&geo), true, &env).unwrap();
    std::fs::remove_file(&path).unwrap();
    let volume = Volume::on(Arc::new(device), geo, env);
    let inner = common::Owner::new(&geo, &[0, 1, 2, 3]);
    let owner = Arc::new(Slow { inner, told: AtomicU64::new(0) });
    let (journal, _) =
        Journal::open(volume.dev.clone(), geo, options(false), volume.env.clone(), owner.clone())
            .unwrap();
    for i in 0..5_u32 {
        let seq = put(&journal, &i.to_be_bytes(), b"v");
        journal.force_durable_point().unwrap();
        let told = owner.told.load(Ordering::SeqCst);
        assert!(
            told >= seq.0,
            "the durable point covers context {}, the owner knows of {told}",
            seq.0
        );
    }
}

/// The torn record at the log's end says that a context was durable whose data is damaged: that is
/// damage, not the end.
#[test]
fn the_durable_point_of_a_torn_record_covers_the_data_before_it() {
    let geo = geometry(512 * 1024, 64);
    let (env, _clock) = sim_env(1);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    let volume = Volume::on(device.clone(), geo, env);
    let offset = geo.segments_offset + 40 * geo.segment_len;
    let (journal, _) = volume.open();
    let seq = put(&journal, b"before", b"x");
    force(&journal, seq).unwrap();
    let mut t = journal.begin(credits(1, 20)).unwrap();
    t.put(b"acknowledged", b"y");
    t.write_data(extent(offset, 1), Box::new(|r| r.unwrap()));
    let acknowledged = t.commit();
    force(&journal, acknowledged).unwrap();
    device.restart_trace();
    // The next record, of two blocks, is torn by the crash; its header says that `acknowledged` was
    // durable.
    let lost = {
        let mut t = journal.begin(credits(1, 6000)).unwrap();
        t.put(b"lost", &[3; 5000]);
        t.commit()
    };
    force(&journal, lost).unwrap();
    drop(journal);
    let image = device.crash_image(device.trace_len(), &mut SimRng::new(1));
    // Torn: the second block of `lost`. Damaged: the data of `acknowledged`.
    let mut block = AlignedBuf::zeroed(4096);
    let mut records = Vec::new();
    for at in (geo.log_offset..geo.log_offset + geo.log_len).step_by(4096) {
        image.read(at, &mut block).unwrap();
        let seq = u64::from_le_bytes(block[48 + 24..48 + 32].try_into().unwrap());
        let kind = u16::from_le_bytes(block[48 + 6..48 + 8].try_into().unwrap());
        if &block[..4] == b"FLB1" && kind == 1 {
            records.push((at, seq));
        }
    }
    let at = records.iter().find(|r| r.1 == lost.0).unwrap().0;
    let zeros = AlignedBuf::zeroed(4096);
    image.write(at + 4096, &zeros).unwrap();
    image.write(offset, &zeros).unwrap();
    let volume = Volume { dev: Arc::new(image), ..volume };
    let opened = volume.open_with(options(false));
    // Reported, or kept (reading the data then says what is damaged); never cut off.
    let newest = opened.map(|(_, r)| r.last);
    assert!(
        matches!(&newest, Err(JournalError::Damaged { .. }))
            || newest.as_ref().is_ok_and(|s| *s >= acknowledged),
        "{newest:?}"
    );
}

/// Looks whether a context can become durable while its owner hears what joins it.
struct Listening {
    owner: Arc<common::Owner>,
    journal: OnceLock<Weak<Journal>>,
    heard: Mutex<Vec<(RequestId, Seq)>>,
    forced: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

impl JournalClient for Listening {
    fn durable_point(&self, seq: Seq) {
        self.owner.durable_point(seq);
    }
    fn failed(&self, error: &JournalError) {
        self.owner.failed(error);
    }
    fn take_home_segment(&self) -> Option<u32> {
        self.owner.take_home_segment()
    }
    fn release_home_segments(&self, segments: &[u32]) {
        self.owner.release_home_segments(segments);
    }
    fn joins(&self, request: RequestId, seq: Seq) {
        let journal = self.journal.get().and_then(Weak::upgrade).unwrap();
        let forcing = Arc::clone(&journal);
        let forced = std::thread::spawn(move || force(&forcing, seq).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!forced.is_finished() && journal.durable() < seq, "it is durable too early");
        self.heard.lock().unwrap().push((request, seq));
        self.forced.lock().unwrap().push(forced);
    }
}

#[test]
fn the_owner_hears_of_a_request_before_its_change_is_durable() {
    let geo = geometry(256 * 1024, 256);
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(device_len(&geo)));
    Journal::format(&dev, &geo, &[0, 1, 2, 3], &Env::real()).unwrap();
    let listening = Arc::new(Listening {
        owner: common::Owner::new(&geo, &[0, 1, 2, 3]),
        journal: OnceLock::new(),
        heard: Mutex::default(),
        forced: Mutex::default(),
    });
    let (journal, _) =
        Journal::open(dev, geo, options(false), Env::real(), listening.clone()).unwrap();
    let journal = Arc::new(journal);
    listening.journal.set(Arc::downgrade(&journal)).unwrap();
    let mut expected = Vec::new();
    for unique in 1..4 {
        // The context is not empty, so it could be sealed at any time.
        put(&journal, b"other", b"value");
        let mut txn = journal.begin(credits(1, 10)).unwrap();
        txn.put(b"key", &[unique as u8]);
        let request = RequestId { slot: 7, unique };
        txn.set_request(Some(request));
        expected.push((request, txn.commit()));
        listening.forced.lock().unwrap().drain(..).for_each(|forced| forced.join().unwrap());
        assert!(journal.durable() >= expected.last().unwrap().1);
    }
    assert_eq!(*listening.heard.lock().unwrap(), expected);
}
