//! A device for the tests of composites: in memory, counts what it is asked for, fails when told to.

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, FlushTimer, FlushTiming, HEAD_LEN, Io, Kind,
    MemDevice, MirrorDevice, Observer, Side,
};
use std::io;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const BLOCK: u64 = BLOCK_SIZE as u64;

/// What fails, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fail {
    Reads,
    Changes,
}

/// The device.
pub struct Faulty {
    pub inner: MemDevice,
    pub flushes: AtomicU64,
    pub requests: AtomicU64,
    /// Writes and flushes that succeed before all fail; negative: none ever fails.
    changes_left: AtomicI64,
    reads_left: AtomicI64,
    flush_time: Duration,
    timer: FlushTimer,
}

impl Faulty {
    pub fn new(capacity: u64) -> Arc<Self> {
        Self::with_flush_time(capacity, Duration::from_millis(1))
    }

    /// Says that each flush takes this long.
    pub fn with_flush_time(capacity: u64, flush_time: Duration) -> Arc<Self> {
        Arc::new(Self {
            inner: MemDevice::new(capacity),
            flushes: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            changes_left: AtomicI64::new(-1),
            reads_left: AtomicI64::new(-1),
            flush_time,
            timer: FlushTimer::default(),
        })
    }

    /// After so many more, all of them fail.
    pub fn fail_after(&self, what: Fail, count: i64) {
        match what {
            Fail::Reads => self.reads_left.store(count, Ordering::SeqCst),
            Fail::Changes => self.changes_left.store(count, Ordering::SeqCst),
        }
    }

    pub fn heal(&self) {
        self.fail_after(Fail::Reads, -1);
        self.fail_after(Fail::Changes, -1);
    }

    fn count(left: &AtomicI64) -> io::Result<()> {
        let step = |left: i64| Some(if left > 0 { left - 1 } else { left });
        match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step) {
            Ok(0) => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Ok(()),
        }
    }

    fn change(&self) -> io::Result<()> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        Self::count(&self.changes_left)
    }
}

impl BlockDevice for Faulty {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        Self::count(&self.reads_left)?;
        self.inner.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.change()?;
        self.inner.write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.change()?;
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.timer.record(self.flush_time);
        Ok(())
    }
    fn submit(&self, batch: Vec<Io>) {
        for io in batch {
            match io {
                Io::Write { offset, buf, done } => done(self.write(offset, &buf)),
                Io::Flush { done } => done(self.flush()),
            }
        }
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change()?;
        self.inner.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        None
    }
    fn flush_timing(&self) -> FlushTiming {
        self.timer.get()
    }
    fn reset_flush_timing(&self) {
        self.timer.reset();
    }
}

/// What a mirror's descriptor would remember.
#[derive(Default)]
pub struct Memory {
    pub generation: AtomicU64,
    pub rebuilt: Mutex<Vec<(String, String)>>,
}

impl Observer for Memory {
    fn raised(&self, generation: u64) {
        self.generation.store(generation, Ordering::SeqCst);
    }
    fn rebuilt(&self, old: &str, new: &str) {
        self.rebuilt.lock().expect("no panic").push((old.into(), new.into()));
    }
}

/// Names of sides.
pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Bytes of the test mirrors: eight regions.
pub const MIRROR_LEN: u64 = 32 << 20;

/// Writes the headers of a new mirror.
pub fn format_mirror(devices: &[Arc<Faulty>]) {
    let ids: Vec<u64> = (0..devices.len() as u64).map(|i| 100 + i).collect();
    for (slot, device) in devices.iter().enumerate() {
        let header = ComponentHeader {
            kind: Kind::Mirror,
            set: *b"a set of sides..",
            id: ids[slot],
            slot: slot as u32,
            slots: devices.len() as u32,
            len: MIRROR_LEN,
            unit: 4 << 20,
            generation: 1,
            active: ids.clone(),
        };
        header.write(&**device).expect("a new device works");
    }
}

/// The sides as an opener finds them.
pub fn sides(devices: &[Arc<Faulty>], these: &[usize]) -> Vec<Side> {
    let side = |&i: &usize| Side {
        name: NAMES[i].into(),
        device: devices[i].clone(),
        header: ComponentHeader::read(&*devices[i]).expect("readable").expect("a side"),
    };
    these.iter().map(side).collect()
}

pub fn open(devices: &[Arc<Faulty>], these: &[usize], memory: &Arc<Memory>) -> MirrorDevice {
    let generation = memory.generation.load(Ordering::SeqCst);
    MirrorDevice::open(sides(devices, these), false, generation, memory.clone()).expect("it opens")
}

/// `count` new devices that are a mirror.
pub fn new_mirror(count: usize) -> Vec<Arc<Faulty>> {
    let devices: Vec<_> = (0..count).map(|_| Faulty::new(HEAD_LEN + MIRROR_LEN)).collect();
    format_mirror(&devices);
    devices
}

pub fn filled(len: usize, seed: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    for (at, byte) in buf.iter_mut().enumerate() {
        *byte = (seed.wrapping_mul(31).wrapping_add(at as u64 / 512 * 7) >> 1) as u8 | 1;
    }
    buf
}

pub fn contents(dev: &dyn BlockDevice, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = AlignedBuf::zeroed(len);
    dev.read(offset, &mut buf).expect("readable");
    buf.to_vec()
}
