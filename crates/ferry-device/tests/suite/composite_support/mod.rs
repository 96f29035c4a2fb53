//! Devices and mirrors for the tests of composites.

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, FileRead, HEAD_LEN, HookedDevice, Kind,
    MemDevice, MirrorDevice, Observer, Op, ReadRing, Side,
};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

pub const BLOCK: u64 = BLOCK_SIZE as u64;

/// Requests that read.
pub const READS: &[Op] = &[Op::Read];
/// Requests that change something, or make it durable.
pub const CHANGES: &[Op] = &[Op::Write, Op::Flush, Op::Discard];

/// A side or a component in memory.
pub fn device(capacity: u64) -> Arc<HookedDevice> {
    device_with_flush_time(capacity, Duration::from_millis(1))
}

/// One that says that each flush takes this long.
pub fn device_with_flush_time(capacity: u64, flush_time: Duration) -> Arc<HookedDevice> {
    let device = HookedDevice::new(Arc::new(MemDevice::new(capacity))).with_flush_time(flush_time);
    device.heal_by_writing();
    Arc::new(device)
}

/// The block at this offset of the mirror cannot be read until it is written.
pub fn spoil(side: &HookedDevice, offset: u64) {
    side.add_unreadable(HEAD_LEN + offset);
}

/// From now on submitted writes wait until [`release`] or [`HookedDevice::release_all`].
pub fn hold(side: &HookedDevice) {
    side.hold(|request| request.submitted && request.op == Op::Write);
}

/// Ends the oldest write that was held, and holds no more: the write happens, or fails.
pub fn release(side: &HookedDevice, well: bool) {
    side.stop_holding();
    side.release(if well { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) });
}

/// Requests so far that change something, or make it durable.
pub fn changes(side: &HookedDevice) -> u64 {
    CHANGES.iter().map(|op| side.asked(*op).requests).sum()
}

/// Flushes that succeeded.
pub fn flushes(side: &HookedDevice) -> u32 {
    side.flush_timing().samples
}

/// What a mirror's descriptor would remember.
#[derive(Default)]
pub struct Memory {
    pub generation: AtomicU64,
    pub rebuilt: Mutex<Vec<(String, String)>>,
    /// It cannot write anything down.
    pub refuses: AtomicBool,
}

impl Observer for Memory {
    fn raised(&self, generation: u64) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        self.generation.store(generation, Ordering::SeqCst);
        Ok(())
    }
    fn rebuilt(&self, old: &str, new: &str) {
        self.rebuilt.lock().expect("no panic").push((old.into(), new.into()));
    }
}

/// A ring that ends each read before the call returns.
struct Ring;

impl ReadRing for Ring {
    fn start(&self, read: FileRead) {
        let mut next = Some(read);
        while let Some(mut read) = next {
            let (file, offset, buf) = read.rest();
            let file = File::from(file.try_clone_to_owned().expect("another descriptor"));
            let result = file.read_at(buf, offset).map_or(-libc::EIO, |bytes| bytes as i32);
            next = read.step(result);
        }
    }
}

/// What a read that is started gets.
pub fn started(dev: &dyn BlockDevice, offset: u64, len: usize) -> io::Result<Arc<AlignedBuf>> {
    let (ended, end) = mpsc::channel();
    let done = Box::new(move |result| ended.send(result).expect("somebody waits"));
    dev.start_read(&Ring, offset, Arc::new(AlignedBuf::zeroed(len)), done);
    end.recv().expect("it ends once")
}

/// The components of a linear or striped composite, which use so many bytes of each.
pub fn span_sides(
    kind: Kind,
    devices: &[Arc<HookedDevice>],
    lens: &[u64],
    chunk: u64,
) -> Vec<Side> {
    let side = |(slot, (device, len)): (usize, (&Arc<HookedDevice>, &u64))| Side {
        name: NAMES[slot].into(),
        device: device.clone(),
        header: ComponentHeader {
            kind,
            set: *b"a set of parts..",
            id: 100 + slot as u64,
            slot: slot as u32,
            slots: devices.len() as u32,
            len: *len,
            unit: if kind == Kind::Stripe { chunk } else { 0 },
            generation: 1,
            active: Vec::new(),
        },
    };
    devices.iter().zip(lens).enumerate().map(side).collect()
}

/// Names of sides.
pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// Bytes of the test mirrors: eight regions.
pub const MIRROR_LEN: u64 = 32 << 20;

/// Writes the headers of a new mirror.
pub fn format_mirror(devices: &[Arc<HookedDevice>]) {
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
pub fn sides(devices: &[Arc<HookedDevice>], these: &[usize]) -> Vec<Side> {
    let side = |&i: &usize| Side {
        name: NAMES[i].into(),
        device: devices[i].clone(),
        header: ComponentHeader::read(&*devices[i]).expect("readable").expect("a side"),
    };
    these.iter().map(side).collect()
}

pub fn open(devices: &[Arc<HookedDevice>], these: &[usize], memory: &Arc<Memory>) -> MirrorDevice {
    let generation = memory.generation.load(Ordering::SeqCst);
    MirrorDevice::open(sides(devices, these), false, generation, memory.clone()).expect("it opens")
}

/// `count` new devices that are a mirror.
pub fn new_mirror(count: usize) -> Vec<Arc<HookedDevice>> {
    let devices: Vec<_> = (0..count).map(|_| device(HEAD_LEN + MIRROR_LEN)).collect();
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
