//! Reads that wait for the device keep nobody else waiting.

use crate::local::jobs::PooledRead;
use crate::local::pool::Work;
use crate::requests::tests::*;
use ferry_device::{HookedDevice, Op};
use parking_lot::{Condvar, Mutex};

/// Large enough to be answered without a copy, where it stands in one place.
const CHUNK_BYTES: usize = 512 << 10;
const CHUNKS: usize = 20;

/// Whether the device stalls: then it answers no large read.
#[derive(Default)]
struct Stalling {
    stalls: Mutex<bool>,
    changed: Condvar,
}

impl Stalling {
    fn stall(&self, stalls: bool) {
        *self.stalls.lock() = stalls;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut stalls = self.stalls.lock();
        while *stalls {
            self.changed.wait(&mut stalls);
        }
    }
}

/// The number of a read, and what came of it.
type Answered = (usize, Result<Vec<u8>, Errno>);

/// Takes the answers of parked reads, as a transport does.
#[derive(Clone, Default)]
struct Transport(Arc<(Mutex<Vec<Answered>>, Condvar)>);

/// One request of it.
struct Request(usize, Transport);

impl Park for Request {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let (number, Transport(answers)) = (self.0, self.1.clone());
        Box::new(move |result| {
            let bytes = result.map(|reply| match reply {
                Reply::Data(bytes) => bytes,
                Reply::Shared(bytes) => bytes.to_vec(),
                _ => panic!("not what was asked for"),
            });
            answers.0.lock().push((number, bytes));
            answers.1.notify_all();
        })
    }

    fn request(&self) -> Option<ferry_journal::RequestId> {
        None
    }
}

impl Transport {
    fn wait(&self, count: usize) -> Vec<Answered> {
        let mut answers = self.0.0.lock();
        while answers.len() < count {
            self.0.1.wait(&mut answers);
        }
        let mut answers = std::mem::take(&mut *answers);
        answers.sort_by_key(|(number, _)| *number);
        answers
    }
}

fn chunk(number: usize) -> Vec<u8> {
    (0..CHUNK_BYTES).map(|i| (i / 512 + 7 * number) as u8).collect()
}

/// A file that is in no memory, opened; the device stalls.
fn cold() -> (World, Arc<Stalling>, Ino, u64) {
    let (device, stalling) =
        (HookedDevice::new(Arc::new(MemDevice::new(64 << 20))), Arc::<Stalling>::default());
    let stalls = Arc::clone(&stalling);
    device.set_hook(move |request, serve| {
        if request.op == Op::Read && request.len >= CHUNK_BYTES as u64 / 2 {
            stalls.wait();
        }
        serve()
    });
    let dev: Arc<dyn BlockDevice> = Arc::new(device);
    let options = FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() };
    let mut world = World::on(dev, &MkfsOptions::default(), options);
    let ino = world.file(ROOT, "file").unwrap();
    let fh = world.open(ino).unwrap();
    for number in 0..CHUNKS {
        let offset = (number * CHUNK_BYTES) as u64;
        world
            .me
            .call(|cx| world.fs.write(cx, ino, fh, offset, &chunk(number), false, false))
            .unwrap();
    }
    world.release(ino, fh);
    world.reopen();
    assert!(!world.exists(ROOT, "warm"));
    let ino = world.lookup(ROOT, "file").unwrap().unwrap().ino;
    let fh = world.open(ino).unwrap();
    stalling.stall(true);
    (world, stalling, ino, fh)
}

/// Asks for all pieces, more than there are readers.
fn ask(world: &World, ino: Ino, fh: u64) -> Transport {
    let transport = Transport::default();
    for number in 0..CHUNKS {
        let request = Request(number, transport.clone());
        let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &request };
        let answer =
            world.fs.read(&cx, ino, fh, (number * CHUNK_BYTES) as u64, &mut vec![0; CHUNK_BYTES]);
        assert!(matches!(answer, Err(Stop::Parked)), "chunk {number} is not in memory");
    }
    transport
}

#[test]
fn requests_proceed_while_reads_wait_for_the_device() {
    let (world, device, ino, fh) = cold();
    let transport = ask(&world, ino, fh);
    for n in 0..100 {
        let made = world.file(ROOT, &format!("made meanwhile {n}")).unwrap();
        let fh = world.open(made).unwrap();
        world.me.call(|cx| world.fs.fsync(cx, made, fh, false)).unwrap();
        world.release(made, fh);
    }
    assert!(transport.0.0.lock().is_empty(), "the device has answered nobody");
    device.stall(false);
    for (number, bytes) in transport.wait(CHUNKS) {
        assert!(bytes.unwrap() == chunk(number), "chunk {number}");
    }
    world.release(ino, fh);
}

#[test]
fn reads_that_wait_when_the_volume_is_closed_are_answered() {
    let (world, device, ino, fh) = cold();
    let transport = ask(&world, ino, fh);
    std::thread::scope(|scope| {
        scope.spawn(|| world.fs.read_pool.stop());
        // Those that no reader has taken yet fail at once; the device still has the others, if they
        // were taken in time.
        let mut answers = transport.wait(CHUNKS - <PooledRead as Work<LocalFs>>::THREADS_MAX);
        assert!(answers.iter().all(|(_, answer)| *answer == Err(Errno(libc::EIO))));
        device.stall(false);
        answers.extend(transport.wait(CHUNKS - answers.len()));
        for (number, answer) in answers {
            assert!(
                answer == Err(Errno(libc::EIO)) || answer == Ok(chunk(number)),
                "chunk {number}"
            );
        }
    });
    world.release(ino, fh);
}
