//! Reads that go through the ring of the thread that serves them.

use crate::requests::tests::*;
use ferry_device::{FileDevice, FileRead, HookedDevice, ReadRing};
use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

const BLOCK: usize = 4096;
const BLOCKS: usize = 64;

/// What came of a read.
type Bytes = Result<Vec<u8>, Errno>;

/// A transport with a ring, and the answers that it got.
#[derive(Default)]
struct Transport {
    begun: RefCell<Vec<FileRead>>,
    answers: Arc<(Mutex<Vec<Bytes>>, Condvar)>,
}

impl ReadRing for Transport {
    fn start(&self, read: FileRead) {
        self.begun.borrow_mut().push(read);
    }
}

impl Park for Transport {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let answers = Arc::clone(&self.answers);
        Box::new(move |result| {
            let bytes = result.map(|reply| match reply {
                Reply::Data(bytes) => bytes,
                Reply::Shared(bytes) => bytes.to_vec(),
                _ => panic!("not what was asked for"),
            });
            answers.0.lock().push(bytes);
            answers.1.notify_all();
        })
    }

    fn read_ring(&self) -> Option<&dyn ReadRing> {
        Some(self)
    }

    fn request(&self) -> Option<ferry_journal::RequestId> {
        None
    }
}

impl Transport {
    /// Does what the kernel does. `spoil` may change what was read, or fail it.
    fn complete(&self, spoil: impl Fn(&mut [u8]) -> Result<(), i32>) {
        for mut read in self.begun.take() {
            let (file, offset, buf) = read.rest();
            let file = File::from(file.try_clone_to_owned().unwrap());
            let len = file.read_at(buf, offset).unwrap();
            let result = spoil(buf).map_or_else(|errno| -errno, |()| len as i32);
            assert!(read.step(result).is_none(), "it was read in one go");
        }
    }

    /// The answers, once there is one.
    fn wait(&self) -> Vec<Bytes> {
        let mut answers = self.answers.0.lock();
        while answers.is_empty() {
            self.answers.1.wait(&mut answers);
        }
        std::mem::take(&mut answers)
    }

    fn answers(&self) -> Vec<Bytes> {
        std::mem::take(&mut self.answers.0.lock())
    }
}

struct Cold {
    world: World,
    ino: Ino,
    fh: u64,
    transport: Transport,
    _dir: tempfile::TempDir,
}

fn block(number: usize, round: u8) -> Vec<u8> {
    (0..BLOCK).map(|i| (i / 64) as u8 ^ number as u8 ^ round).collect()
}

/// A file that is in no memory, on a device that is a file. Its blocks stand in reverse order on
/// the device. The part of the extent map is in memory.
fn cold() -> Cold {
    cold_on(|device| device)
}

/// The same on what `wrap` makes of the device.
fn cold_on(wrap: impl FnOnce(Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice>) -> Cold {
    let dir = tempfile::tempdir().unwrap();
    let device = FileDevice::create(&dir.path().join("volume"), 64 << 20, false, &Env::real());
    let dev = wrap(Arc::new(device.unwrap()));
    let options = FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() };
    let mut world = World::on(dev, &MkfsOptions::default(), options);
    let ino = world.file(ROOT, "file").unwrap();
    let fh = world.open(ino).unwrap();
    for number in (0..BLOCKS).rev() {
        write(&world, (ino, fh), number, 0);
        world.me.call(|cx| world.fs.fsync(cx, ino, fh, true)).unwrap();
    }
    world.release(ino, fh);
    world.reopen();
    let ino = world.lookup(ROOT, "file").unwrap().unwrap().ino;
    let fh = world.open(ino).unwrap();
    let cold = Cold { world, ino, fh, transport: Transport::default(), _dir: dir };
    assert!(matches!(cold.read(BLOCKS - 1, BLOCK), Err(Stop::Parked)));
    assert_eq!(cold.transport.wait(), [Ok(block(BLOCKS - 1, 0))]);
    cold
}

fn write(world: &World, (ino, fh): (Ino, u64), number: usize, round: u8) {
    let (offset, bytes) = ((number * BLOCK) as u64, block(number, round));
    world.me.call(|cx| world.fs.write(cx, ino, fh, offset, &bytes, false, false)).unwrap();
}

impl Cold {
    fn read(&self, number: usize, len: usize) -> Answer<usize> {
        let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &self.transport };
        self.world.fs.read(&cx, self.ino, self.fh, (number * BLOCK) as u64, &mut vec![0; len])
    }

    /// Asks for one block, which must park, with so many requests to the ring.
    fn begin(&self, number: usize, len: usize, requests: usize) {
        assert!(matches!(self.read(number, len), Err(Stop::Parked)));
        assert_eq!(self.transport.begun.borrow().len(), requests);
        assert!(self.transport.answers().is_empty(), "the device has not answered");
    }

    fn end(self) {
        self.world.release(self.ino, self.fh);
    }
}

#[test]
fn a_read_that_misses_is_answered_by_the_thread_that_began_it() {
    let cold = cold();
    cold.begin(3, BLOCK, 1);
    cold.transport.complete(|_| Ok(()));
    assert_eq!(cold.transport.answers(), [Ok(block(3, 0))]);
    assert!(matches!(cold.read(3, BLOCK), Ok(BLOCK)), "it is in the cache now");
    cold.end();
}

#[test]
fn a_read_of_blocks_that_stand_apart_is_answered_when_the_last_has_come() {
    let cold = cold();
    cold.begin(5, 3 * BLOCK, 3);
    let last = cold.transport.begun.borrow_mut().pop().unwrap();
    cold.transport.complete(|_| Ok(()));
    assert!(cold.transport.answers().is_empty());
    cold.transport.begun.borrow_mut().push(last);
    cold.transport.complete(|_| Ok(()));
    assert_eq!(cold.transport.answers(), [Ok([block(5, 0), block(6, 0), block(7, 0)].concat())]);
    cold.end();
}

#[test]
fn a_read_answers_what_the_file_has_when_it_ends() {
    let cold = cold();
    for (number, durable) in [(10, false), (11, true)] {
        cold.begin(number, BLOCK, 1);
        write(&cold.world, (cold.ino, cold.fh), number, 9);
        if durable {
            cold.world.me.call(|cx| cold.world.fs.fsync(cx, cold.ino, cold.fh, true)).unwrap();
        }
        cold.transport.complete(|_| Ok(()));
        assert_eq!(cold.transport.wait(), [Ok(block(number, 9))]);
    }
    cold.end();
}

#[test]
fn a_read_ends_at_the_end_that_the_file_has_when_it_ends() {
    let cold = cold();
    cold.begin(20, 2 * BLOCK, 2);
    let set = SetAttr { size: Some(20 * BLOCK as u64 + 100), ..SetAttr::default() };
    cold.world.me.call(|cx| cold.world.fs.setattr(cx, cold.ino, None, &set)).unwrap();
    cold.transport.complete(|_| Ok(()));
    assert_eq!(cold.transport.wait(), [Ok(block(20, 0)[..100].to_vec())]);
    cold.end();
}

#[test]
fn what_the_ring_could_not_read_well_is_read_again_by_a_thread_that_may_wait() {
    let cold = cold();
    cold.begin(30, BLOCK, 1);
    cold.transport.complete(|bytes| {
        bytes[17] ^= 1;
        Ok(())
    });
    assert_eq!(cold.transport.wait(), [Ok(block(30, 0))]);
    cold.begin(31, BLOCK, 1);
    cold.transport.complete(|_| Err(libc::EIO));
    assert_eq!(cold.transport.wait(), [Ok(block(31, 0))]);
    cold.end();
}

#[test]
fn where_the_device_can_only_wait_the_read_is_left_to_a_thread_that_may() {
    let cold = cold_on(|inner| {
        let device = HookedDevice::new(inner);
        device.refuse_started_reads();
        Arc::new(device)
    });
    assert!(matches!(cold.read(30, BLOCK), Err(Stop::Parked)));
    assert!(cold.transport.begun.borrow().is_empty());
    assert_eq!(cold.transport.wait(), [Ok(block(30, 0))]);
    cold.end();
}

#[test]
fn a_read_that_ends_after_the_volume_was_closed_is_answered() {
    let cold = cold();
    cold.begin(40, BLOCK, 1);
    cold.world.release(cold.ino, cold.fh);
    cold.world.fs.close().unwrap();
    cold.transport.complete(|bytes| {
        bytes[0] ^= 1; // it would have to be read again
        Ok(())
    });
    assert_eq!(cold.transport.answers(), [Err(Errno(libc::EIO))]);
}
