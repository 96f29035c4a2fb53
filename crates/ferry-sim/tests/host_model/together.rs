//! Threads that work on the same few names and files of FerryFS at the same time, and what each was
//! told when.

use super::order::{Answer, DIRS, Entry, Event, FILES, How, Op, State};
use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::{
    Attr, Complete, Cx, Errno, Filesystem, FsOptions, InProcess, Ino, Interrupt, LocalFs,
    MkfsOptions, Park, ROOT, RenameFlags, Reply, SetAttr, Stop, mkfs,
};
use ferry_sim::device::SimRng;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Bytes that each file has at first.
pub const START_BYTES: usize = 64 << 10;
/// Files stay below this size, in bytes.
const FILE_MAX: usize = 160 << 10;
/// Bytes of a file that everything else must make room for.
const NOISE_BYTES: usize = 8 << 20;

/// A lie that is planted, so that it is seen that lies are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    None,
    /// A file's second read shows what the first did.
    StaleRead,
    /// A write of many blocks is made in two halves.
    HalfWrites,
    /// A file that was just made is not found.
    LostName,
}

/// Waits for an answer as a transport does: a read that needs the device gives its thread back
/// first.
#[derive(Clone, Default)]
struct Patient(Arc<(Mutex<Given>, Condvar)>);

/// An answer, once it is there.
type Given = Option<Result<Reply, Errno>>;

impl Park for Patient {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let theirs = self.0.clone();
        Box::new(move |result| {
            *theirs.0.lock() = Some(result);
            theirs.1.notify_one();
        })
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

impl Patient {
    fn wait(&self) -> Result<Reply, Errno> {
        let mut answer = self.0.0.lock();
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            self.0.1.wait(&mut answer);
        }
    }
}

/// A mounted volume, with its threads.
pub struct Together {
    /// A file that is much larger than the cache, and its handle.
    noise: (Ino, u64),
    fs: Arc<LocalFs>,
    me: InProcess,
    clock: AtomicU64,
    /// Reads that gave their thread back.
    pub parked: AtomicU64,
    lie: Lie,
}

/// The directories and files of one history.
struct Ground {
    dirs: [Ino; DIRS],
    files: [(Ino, u64); FILES],
}

type Done<T> = Result<T, Errno>;

/// Draws what one thread does.
pub fn draw(rng: &mut SimRng, count: usize, thread: usize, data: bool) -> Vec<Op> {
    (0..count).map(|n| draw_one(rng, (thread * count + n) as u8 + 1, data)).collect()
}

fn draw_one(rng: &mut SimRng, tag: u8, data: bool) -> Op {
    let entry = |rng: &mut SimRng| -> Entry { (rng.index(DIRS), rng.below(3) as u8) };
    let file = if data { 0 } else { rng.index(FILES) };
    let offset = *rng.pick(&[0, 0, 100, 4096, 20_000, 65_535]);
    let len = *rng.pick(&[1, 2000, 4096, 10_000, 65_536, 65_536]);
    if data {
        return match rng.below(10) {
            0..4 => Op::Read { file, offset: 0, len: FILE_MAX },
            4 => Op::Read { file, offset, len },
            5..8 => Op::Write { file, offset, len, tag },
            8 => match rng.below(3) {
                0 => Op::Append { file, len: len.min(10_000), tag },
                1 => Op::Truncate { file, size: offset },
                _ => Op::Stat(file),
            },
            _ => Op::Fsync(file),
        };
    }
    match rng.below(20) {
        0..3 => Op::Create(entry(rng)),
        3 | 4 => Op::Mkdir(entry(rng)),
        5 | 6 => Op::Unlink(entry(rng)),
        7 => Op::Rmdir(entry(rng)),
        8..12 => {
            let how = *rng.pick(&[How::Replace, How::Replace, How::NoReplace, How::Exchange]);
            Op::Rename { from: entry(rng), to: entry(rng), how }
        }
        12 => Op::Link(file, entry(rng)),
        13 | 14 => Op::Lookup(entry(rng)),
        15 | 16 => Op::List(rng.index(DIRS)),
        17 => Op::StatDir(rng.index(DIRS)),
        18 => Op::Stat(file),
        _ => Op::SyncDir(rng.index(DIRS)),
    }
}

impl Together {
    /// A volume in memory: a small cache and short intervals, so that write-back, commits and
    /// eviction happen all the time.
    pub fn new(lie: Lie) -> Self {
        let device: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(128 << 20));
        mkfs(&device, &MkfsOptions::default(), &Env::real()).expect("there is room");
        let options = FsOptions {
            cache_bytes: 2 << 20,
            commit_interval: Duration::from_millis(5),
            background: true,
            ..FsOptions::default()
        };
        let fs = LocalFs::open(device, options, Env::real()).expect("it was just made");
        let me = InProcess::default();
        let made = me.call(|cx| fs.create(cx, ROOT, b"noise", libc::S_IFREG | 0o644, libc::O_RDWR));
        let (entry, opened) = made.expect("it is new");
        let noise = (entry.attr.expect("it was made").ino, opened.fh);
        let wrote =
            me.call(|cx| fs.write(cx, noise.0, noise.1, 0, &vec![1; NOISE_BYTES], false, false));
        assert_eq!(wrote, Ok(NOISE_BYTES as u64));
        Self { noise, fs, me, clock: AtomicU64::new(0), parked: AtomicU64::new(0), lie }
    }

    /// Reads what nobody else wants, so that what the others want leaves the cache.
    fn make_noise(&self, over: &AtomicBool) {
        let mut out = [0; 4096];
        for at in (0..NOISE_BYTES as u64).step_by(out.len()).cycle() {
            if over.load(Ordering::Relaxed) {
                return;
            }
            let read =
                self.me.call(|cx| self.fs.read(cx, self.noise.0, self.noise.1, at, &mut out));
            assert_eq!(read, Ok(out.len()));
        }
    }

    /// Lets each thread do its operations, number n of all of them at about the same time. The
    /// first state, and what was seen.
    pub fn run(&self, history: usize, threads: &[Vec<Op>]) -> (State, Vec<Event>) {
        let ground = self.ground(history);
        let start = State::new(ground.files.map(|(ino, _)| ino), START_BYTES);
        let together = Barrier::new(threads.len());
        let work = |thread: usize| {
            let mut events = Vec::new();
            let mut first_read = None;
            for op in &threads[thread] {
                together.wait();
                let began = self.clock.fetch_add(1, Ordering::SeqCst);
                let mut answer = self.answer(&ground, op);
                let ended = self.clock.fetch_add(1, Ordering::SeqCst);
                if self.lie == Lie::StaleRead && matches!(op, Op::Read { offset: 0, .. }) {
                    answer = first_read.get_or_insert(answer).clone();
                }
                if self.lie == Lie::LostName && matches!(op, Op::Lookup(_)) {
                    answer = Answer::Ino(None);
                }
                events.push(Event { thread, op: op.clone(), answer, began, ended });
            }
            events
        };
        let mut events = Vec::new();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| self.make_noise(&over));
            let threads: Vec<_> =
                (0..threads.len()).map(|thread| scope.spawn(move || work(thread))).collect();
            let joined: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            over.store(true, Ordering::Relaxed);
            joined.into_iter().for_each(|seen| events.extend(seen.expect("no thread panics")));
        });
        self.leave(&ground);
        (start, events)
    }

    fn ground(&self, history: usize) -> Ground {
        let dirs: [Ino; DIRS] = std::array::from_fn(|n| {
            let name = format!("{history}-{n}");
            let entry = self.me.call(|cx| self.fs.mkdir(cx, ROOT, name.as_bytes(), 0o755));
            entry.expect("it is new").attr.expect("it was made").ino
        });
        let files = std::array::from_fn(|n| {
            let (name, mode) = ([b'0' + n as u8], libc::S_IFREG | 0o644);
            let made =
                self.me.call(|cx| self.fs.create(cx, dirs[n % DIRS], &name, mode, libc::O_RDWR));
            let (entry, opened) = made.expect("it is new");
            let ino = entry.attr.expect("it was made").ino;
            let zeros = vec![0; START_BYTES];
            let wrote =
                self.me.call(|cx| self.fs.write(cx, ino, opened.fh, 0, &zeros, false, false));
            assert_eq!(wrote, Ok(START_BYTES as u64));
            (ino, opened.fh)
        });
        Ground { dirs, files }
    }

    /// Closes and forgets; what is left goes with its directories.
    fn leave(&self, ground: &Ground) {
        for (ino, fh) in ground.files {
            self.release(ino, fh);
            self.fs.forget(ino, 1);
        }
        for dir in ground.dirs {
            for name in self.list(dir).expect("it is there").keys() {
                let name = [b'0' + name];
                let removed = self.me.call(|cx| self.fs.unlink(cx, dir, &name));
                removed
                    .or_else(|_| self.me.call(|cx| self.fs.rmdir(cx, dir, &name)))
                    .expect("it is there");
            }
            self.fs.forget(dir, 1);
        }
    }

    /// Unmounts; the volume was sound all the time.
    pub fn end(self) {
        self.fs.detach();
        self.fs.close().expect("no faults");
    }

    fn release(&self, ino: Ino, fh: u64) {
        let released = self.me.call(|cx| {
            self.fs.release(cx, ino, fh);
            Ok(())
        });
        released.expect("it has no answer");
    }

    fn made(&self, attr: Option<Attr>) -> Answer {
        Answer::Ino(attr.map(|attr| {
            self.fs.forget(attr.ino, 1);
            attr.ino
        }))
    }

    fn list(&self, dir: Ino) -> Done<BTreeMap<u8, Ino>> {
        let mut names = BTreeMap::new();
        self.me.call(|cx| {
            self.fs.readdir(cx, dir, 0, 2, false, &mut |entry| {
                names.insert(entry.name[0] - b'0', entry.ino);
                true
            })
        })?;
        Ok(names)
    }

    fn answer(&self, ground: &Ground, op: &Op) -> Answer {
        self.step(ground, op).unwrap_or_else(|errno| Answer::Error(errno.0))
    }

    fn step(&self, ground: &Ground, op: &Op) -> Done<Answer> {
        let (fs, me) = (&self.fs, &self.me);
        let at = |entry: &Entry| (ground.dirs[entry.0], [b'0' + entry.1]);
        match op {
            Op::Create(entry) => {
                let (dir, name) = at(entry);
                let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
                let (entry, opened) =
                    me.call(|cx| fs.create(cx, dir, &name, libc::S_IFREG | 0o644, flags))?;
                self.release(entry.attr.ok_or(Errno(libc::EIO))?.ino, opened.fh);
                return Ok(self.made(entry.attr));
            }
            Op::Mkdir(entry) => {
                let (dir, name) = at(entry);
                return Ok(self.made(me.call(|cx| fs.mkdir(cx, dir, &name, 0o755))?.attr));
            }
            Op::Unlink(entry) => {
                let (dir, name) = at(entry);
                me.call(|cx| fs.unlink(cx, dir, &name))?;
            }
            Op::Rmdir(entry) => {
                let (dir, name) = at(entry);
                me.call(|cx| fs.rmdir(cx, dir, &name))?;
            }
            Op::Rename { from, to, how } => {
                let ((from, from_name), (to, to_name)) = (at(from), at(to));
                let flags = RenameFlags {
                    no_replace: *how == How::NoReplace,
                    exchange: *how == How::Exchange,
                    whiteout: false,
                };
                me.call(|cx| fs.rename(cx, from, &from_name, to, &to_name, flags))?;
            }
            Op::Link(file, entry) => {
                let (dir, name) = at(entry);
                self.made(me.call(|cx| fs.link(cx, ground.files[*file].0, dir, &name))?.attr);
            }
            Op::Lookup(entry) => {
                let (dir, name) = at(entry);
                return Ok(self.made(me.call(|cx| fs.lookup(cx, dir, &name))?.attr));
            }
            Op::List(dir) => return Ok(Answer::Names(self.list(ground.dirs[*dir])?)),
            Op::StatDir(dir) => return self.stat(ground.dirs[*dir]),
            Op::Stat(file) => return self.stat(ground.files[*file].0),
            Op::Read { file, offset, len } => {
                let (ino, fh) = ground.files[*file];
                let mut out = vec![0xee; *len];
                let patient = Patient::default();
                let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &patient };
                let bytes = match fs.read(&cx, ino, fh, *offset as u64, &mut out) {
                    Ok(got) => {
                        out.truncate(got);
                        out
                    }
                    Err(Stop::Errno(errno)) => return Err(errno),
                    Err(Stop::Parked) => match patient.wait()? {
                        Reply::Data(bytes) => {
                            self.parked.fetch_add(1, Ordering::Relaxed);
                            bytes
                        }
                        _ => return Err(Errno(libc::EPROTO)),
                    },
                };
                return Ok(Answer::Bytes(Arc::new(bytes)));
            }
            Op::Write { file, offset, len, tag } => {
                let (first, second) =
                    if self.lie == Lie::HalfWrites { (len / 2, len - len / 2) } else { (*len, 0) };
                self.write(ground.files[*file], *offset, first, *tag, false)?;
                if second > 0 {
                    self.write(ground.files[*file], offset + first, second, *tag, false)?;
                }
            }
            Op::Append { file, len, tag } => {
                self.write(ground.files[*file], 0, *len, *tag, true)?
            }
            Op::Truncate { file, size } => {
                let set = SetAttr { size: Some(*size as u64), ..SetAttr::default() };
                me.call(|cx| fs.setattr(cx, ground.files[*file].0, None, &set))?;
            }
            Op::Fsync(file) => {
                let (ino, fh) = ground.files[*file];
                me.call(|cx| fs.fsync(cx, ino, fh, false))?;
            }
            Op::SyncDir(dir) => me.call(|cx| fs.fsyncdir(cx, ground.dirs[*dir], 0, false))?,
        }
        Ok(Answer::Done)
    }

    fn write(
        &self,
        (ino, fh): (Ino, u64),
        offset: usize,
        len: usize,
        tag: u8,
        append: bool,
    ) -> Done<()> {
        let bytes = vec![tag; len];
        let wrote =
            self.me.call(|cx| self.fs.write(cx, ino, fh, offset as u64, &bytes, append, false))?;
        if wrote == len as u64 { Ok(()) } else { Err(Errno(libc::EIO)) }
    }

    fn stat(&self, ino: Ino) -> Done<Answer> {
        let (attr, _) = self.me.call(|cx| self.fs.getattr(cx, ino, None))?;
        Ok(Answer::Stat(u64::from(attr.nlink), attr.size as usize))
    }
}
