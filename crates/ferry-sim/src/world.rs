//! Drives a `LocalFs` on a simulated device as a kernel would: looks names up, opens, does one
//! thing, closes, forgets.

use crate::device::{SimClock, sim_env};
use crate::model::{DIR_MODE, FILE_MODE, Model, pattern, target, xattr_name};
use crate::ops::{COMMIT_INTERVAL_MS, Move, Op, Path, SLOTS, Which};
use ferry_check::{FsckOptions, Report, fsck};
use ferry_device::BlockDevice;
use ferry_fs::ioctl::ResizeAnswer;
use ferry_fs::{
    Answer, CacheMode, Complete, Cx, Errno, Filesystem, FlushPolicy, FsOptions, Ino, Interrupt,
    LocalFs, Park, ROOT, RenameFlags, Reply, SetAttr, Stop, XattrFlags, ioctl,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Why an operation was not answered as expected.
#[derive(Debug)]
pub enum Trouble {
    /// With an error.
    Errno(i32),
    /// It was done; then closing the file told of an error.
    Close(i32),
    /// With something wrong, or not at all.
    Wrong(String),
}

impl From<Errno> for Trouble {
    fn from(errno: Errno) -> Self {
        Trouble::Errno(errno.0)
    }
}

impl From<Trouble> for String {
    fn from(trouble: Trouble) -> Self {
        format!("{trouble:?}")
    }
}

pub(crate) fn wrong<T>(text: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Wrong(text.into()))
}

/// Keeps the answer of a parked request.
#[derive(Default)]
pub(crate) struct Waiter(pub(crate) Arc<Mutex<Option<Result<Reply, Errno>>>>);

impl Park for Waiter {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let slot = self.0.clone();
        Box::new(move |result| *slot.lock() = Some(result))
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

/// Checks that a volume is clean, data and all.
pub(crate) fn check_clean(
    device: &Arc<impl BlockDevice + 'static>,
    seed: u64,
) -> Result<Report, String> {
    let (env, _) = sim_env(seed);
    let device: Arc<dyn BlockDevice> = device.clone();
    let options = FsckOptions { verify_data: true, ..FsckOptions::default() };
    let report = fsck(&device, options, &env).map_err(|error| format!("cannot check: {error}"))?;
    if report.clean {
        return Ok(report);
    }
    let findings: Vec<_> = report.findings.iter().map(|finding| format!("\n{finding}")).collect();
    Err(format!("fsck finds damage:{}", findings.concat()))
}

/// A volume that a simulated program works on.
pub struct World {
    pub(crate) fs: Arc<LocalFs>,
    pub(crate) clock: Arc<SimClock>,
    pub(crate) held: Vec<Option<(Ino, u64)>>,
}

/// How the volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    /// Everything random follows from it; no two openings of one volume may share it.
    pub seed: u64,
    /// Memory for caches, in bytes.
    pub cache_bytes: usize,
    /// Simulated time since the start of everything.
    pub time: Duration,
    /// When a context that somebody waits for is sealed; where nothing else is said, one of them
    /// that follows from the seed.
    pub flush: Option<FlushPolicy>,
}

impl World {
    /// Opens the volume on `device`, recovering it.
    pub fn open(
        device: &Arc<impl BlockDevice + 'static>,
        opening: Opening,
    ) -> Result<Self, String> {
        let (env, clock) = sim_env(opening.seed);
        clock.advance(opening.time);
        let options = FsOptions {
            read_only: false,
            cache: CacheMode::Kernel,
            cache_bytes: opening.cache_bytes,
            commit_interval: Duration::from_millis(u64::from(COMMIT_INTERVAL_MS)),
            background: false,
            flush: opening.flush.unwrap_or(FlushPolicy::ALL[(opening.seed % 4) as usize]),
            ..FsOptions::default()
        };
        let device: Arc<dyn BlockDevice> = device.clone();
        let fs =
            LocalFs::open(device, options, env).map_err(|error| format!("cannot open: {error}"))?;
        Ok(Self { fs, clock, held: vec![None; usize::from(SLOTS)] })
    }

    /// Asks, and waits for the answer if it is parked.
    fn ask<T>(
        &self,
        question: impl FnOnce(&Cx) -> Answer<T>,
        unpark: impl FnOnce(Reply) -> Option<T>,
    ) -> Result<T, Trouble> {
        let waiter = Waiter::default();
        let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &waiter };
        match question(&cx) {
            Ok(answer) => return Ok(answer),
            Err(Stop::Errno(errno)) => return Err(errno.into()),
            Err(Stop::Parked) => {}
        }
        let Some(result) = waiter.0.lock().take() else {
            return wrong("a parked request was not answered although nothing is left to wait for");
        };
        unpark(result?).map_or_else(|| wrong("a parked request got the answer of another"), Ok)
    }

    /// Asks what never parks.
    pub(crate) fn now<T>(&self, question: impl FnOnce(&Cx) -> Answer<T>) -> Result<T, Trouble> {
        self.ask(question, |_| None)
    }

    /// Asks what answers with nothing but success, now or later.
    pub(crate) fn done(&self, question: impl FnOnce(&Cx) -> Answer<()>) -> Result<(), Trouble> {
        self.ask(question, |reply| matches!(reply, Reply::Empty).then_some(()))
    }

    /// Gives the volume another size, in bytes.
    pub(crate) fn resize(&self, bytes: u64) -> Result<(), Trouble> {
        loop {
            let asked = bytes.to_ne_bytes();
            let answer = self.now(|cx| self.fs.ioctl(cx, ROOT, ioctl::RESIZE, &asked, 16))?;
            match ResizeAnswer::decode(&answer) {
                Some(ResizeAnswer::Left(_)) => {}
                Some(ResizeAnswer::Done(size)) if size == bytes => return Ok(()),
                answer => return wrong(format!("a volume is to have {bytes} bytes: {answer:?}")),
            }
        }
    }

    /// Tells what has no answer.
    pub(crate) fn tell(&self, notice: impl FnOnce(&Cx)) {
        let waiter = Waiter::default();
        notice(&Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &waiter });
    }

    /// Looks a path up, name by name, and hands the inode to `act`; forgets it all afterwards.
    fn at<T>(
        &self,
        path: &Path,
        act: impl FnOnce(Ino) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let mut known = Vec::new();
        let result = self.walk(path, &mut known).and_then(act);
        self.forget(&known);
        result
    }

    /// Looks a path up, name by name. Each inode on the way is known from then on, to be forgotten
    /// once.
    pub(crate) fn walk(&self, path: &Path, known: &mut Vec<Ino>) -> Result<Ino, Trouble> {
        let mut ino = ROOT;
        for n in &path.0 {
            let entry = self.now(|cx| self.fs.lookup(cx, ino, &Path::name(*n)))?;
            ino = entry.attr.ok_or(Trouble::Errno(libc::ENOENT))?.ino;
            known.push(ino);
        }
        Ok(ino)
    }

    pub(crate) fn forget(&self, known: &[Ino]) {
        known.iter().for_each(|ino| self.fs.forget(*ino, 1));
    }

    fn in_parent<T>(
        &self,
        path: &Path,
        act: impl FnOnce(Ino, &[u8]) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let (last, dirs) = path.0.split_last().expect("operations on names have a path");
        self.at(&Path(dirs.to_vec()), |dir| act(dir, &Path::name(*last)))
    }

    /// Opens the file, or takes the held handle, and hands it to `act`.
    fn with<T>(
        &self,
        which: &Which,
        act: impl FnOnce(Ino, u64) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        match which {
            Which::Held(slot) => {
                let (ino, fh) =
                    self.held[usize::from(*slot)].expect("the model knows which handles are held");
                act(ino, fh)
            }
            Which::At(path) => self.at(path, |ino| {
                let opened = self.now(|cx| self.fs.open(cx, ino, libc::O_RDWR, false))?;
                let result = act(ino, opened.fh);
                let flushed = self.done(|cx| self.fs.flush(cx, ino, opened.fh, 0));
                self.tell(|cx| self.fs.release(cx, ino, opened.fh));
                let answer = result?;
                flushed.map_err(at_close)?;
                Ok(answer)
            }),
        }
    }

    /// Does one operation. `n` decides the bytes written. Returns the number of an inode it made.
    pub fn run(&mut self, op: &Op, n: usize, model: &Model) -> Result<Ino, Trouble> {
        self.clock.advance(Duration::from_millis(1));
        let fs = self.fs.clone();
        match op {
            Op::Create(_) | Op::Mkdir(_) | Op::Symlink(..) | Op::Fifo(_) => {
                return self.make(op, n);
            }
            Op::Link(from, to) => self.at(from, |ino| self.link(ino, to))?,
            Op::LinkHeld(slot, to) => {
                let (ino, _) =
                    self.held[usize::from(*slot)].expect("the model knows which handles are held");
                self.link(ino, to)?;
            }
            Op::Unlink(path) => {
                self.in_parent(path, |dir, name| self.done(|cx| fs.unlink(cx, dir, name)))?
            }
            Op::Rmdir(path) => {
                self.in_parent(path, |dir, name| self.done(|cx| fs.rmdir(cx, dir, name)))?
            }
            Op::Rename(from, to, how) => {
                let flags = RenameFlags {
                    no_replace: *how == Move::NoReplace,
                    exchange: *how == Move::Exchange,
                    whiteout: false,
                };
                self.in_parent(from, |dir, name| {
                    self.in_parent(to, |to_dir, to_name| {
                        self.done(|cx| fs.rename(cx, dir, name, to_dir, to_name, flags))
                    })
                })?;
            }
            Op::Write(which, offset, len) => {
                self.write(which, *offset, &pattern(n, *len), false)?
            }
            Op::Append(which, len) => self.write(which, 0, &pattern(n, *len), true)?,
            Op::Truncate(which, size) => self.with(which, |ino, fh| {
                let set = SetAttr { size: Some(*size), ..SetAttr::default() };
                self.now(|cx| fs.setattr(cx, ino, Some(fh), &set)).map(drop)
            })?,
            Op::Fallocate(which, how, offset, len) => self.with(which, |ino, fh| {
                self.done(|cx| fs.fallocate(cx, ino, fh, how.mode(), *offset, *len))
            })?,
            Op::SetXattr(path, name, len) => self.at(path, |ino| {
                let (name, value) = (xattr_name(*name), pattern(n, u64::from(*len)));
                self.done(|cx| fs.setxattr(cx, ino, &name, &value, XattrFlags::default()))
            })?,
            Op::RemoveXattr(path, name) => {
                self.at(path, |ino| self.done(|cx| fs.removexattr(cx, ino, &xattr_name(*name))))?;
            }
            Op::Chmod(path, mode) => self.at(path, |ino| {
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                self.now(|cx| fs.setattr(cx, ino, None, &set)).map(drop)
            })?,
            Op::Read(which, offset, len) => self.compare(which, *offset, *len, model)?,
            Op::Hold(path, slot) => {
                let held = self.at(path, |ino| {
                    Ok((ino, self.now(|cx| fs.open(cx, ino, libc::O_RDWR, false))?.fh))
                })?;
                self.held[usize::from(*slot)] = Some(held);
            }
            Op::HoldTmp(path, slot) => {
                let (entry, opened) = self.at(path, |dir| {
                    self.now(|cx| fs.tmpfile(cx, dir, libc::S_IFREG | FILE_MODE, libc::O_RDWR))
                })?;
                let ino = made(entry.attr)?;
                self.held[usize::from(*slot)] = Some((ino, opened.fh));
                fs.forget(ino, 1);
                return Ok(ino);
            }
            Op::Release(slot) => {
                let (ino, fh) =
                    self.held[usize::from(*slot)].take().expect("the model knows which are held");
                self.tell(|cx| fs.release(cx, ino, fh));
            }
            Op::Fsync(which, data_only) => {
                self.with(which, |ino, fh| self.done(|cx| fs.fsync(cx, ino, fh, *data_only)))?;
            }
            Op::FsyncDir(path) => self.at(path, |ino| {
                let opened = self.now(|cx| fs.opendir(cx, ino))?;
                let result = self.done(|cx| fs.fsyncdir(cx, ino, opened.fh, false));
                self.tell(|cx| fs.releasedir(cx, ino, opened.fh));
                result
            })?,
            Op::Sync => fs.sync().map_err(|error| Trouble::Errno(error.errno().0))?,
            Op::Trim => drop(self.now(|cx| fs.ioctl(cx, ROOT, ioctl::TRIM, &[], 8))?),
            Op::Tick(ms) => {
                self.clock.advance(Duration::from_millis(u64::from(*ms)));
                fs.tick().map_err(|error| Trouble::Errno(error.errno().0))?;
            }
        }
        Ok(0)
    }

    fn make(&self, op: &Op, n: usize) -> Result<Ino, Trouble> {
        let fs = &self.fs;
        let attr = match op {
            Op::Create(path) => self.in_parent(path, |dir, name| {
                let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
                let (entry, opened) =
                    self.now(|cx| fs.create(cx, dir, name, libc::S_IFREG | FILE_MODE, flags))?;
                let ino = made(entry.attr)?;
                self.tell(|cx| fs.release(cx, ino, opened.fh));
                Ok(entry.attr)
            }),
            Op::Mkdir(path) => self.in_parent(path, |dir, name| {
                self.now(|cx| fs.mkdir(cx, dir, name, DIR_MODE)).map(|e| e.attr)
            }),
            Op::Symlink(path, len) => self.in_parent(path, |dir, name| {
                self.now(|cx| fs.symlink(cx, dir, name, &target(n, *len))).map(|e| e.attr)
            }),
            Op::Fifo(path) => self.in_parent(path, |dir, name| {
                self.now(|cx| fs.mknod(cx, dir, name, libc::S_IFIFO | FILE_MODE, 0)).map(|e| e.attr)
            }),
            _ => unreachable!("only operations that make an inode come here"),
        }?;
        let ino = made(attr)?;
        fs.forget(ino, 1);
        Ok(ino)
    }

    fn link(&self, ino: Ino, to: &Path) -> Result<(), Trouble> {
        self.in_parent(to, |dir, name| self.now(|cx| self.fs.link(cx, ino, dir, name)))?;
        self.fs.forget(ino, 1);
        Ok(())
    }

    fn write(&self, which: &Which, offset: u64, data: &[u8], append: bool) -> Result<(), Trouble> {
        self.with(which, |ino, fh| {
            let count = self.now(|cx| self.fs.write(cx, ino, fh, offset, data, append, false))?;
            if count == data.len() as u64 {
                Ok(())
            } else {
                wrong(format!("{count} bytes of {} written", data.len()))
            }
        })
    }

    pub(crate) fn read(
        &self,
        ino: Ino,
        fh: u64,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, Trouble> {
        let mut out = vec![0xee; len];
        let count = self.now(|cx| self.fs.read(cx, ino, fh, offset, &mut out))?;
        out.truncate(count);
        Ok(out)
    }

    fn compare(&self, which: &Which, offset: u64, len: u64, model: &Model) -> Result<(), Trouble> {
        let bytes = model.contents(model.which(which).expect("the model judged it"));
        let start = (offset as usize).min(bytes.len());
        let expected = &bytes[start..(start + len as usize).min(bytes.len())];
        let found = self.with(which, |ino, fh| self.read(ino, fh, offset, len as usize))?;
        same(expected, &found, offset)
    }

    /// Closes held handles and unmounts.
    pub fn close(self) -> Result<(), String> {
        for (ino, fh) in self.held.iter().flatten() {
            self.tell(|cx| self.fs.release(cx, *ino, *fh));
        }
        self.fs.detach();
        self.fs.close().map_err(|error| format!("cannot close: {error}"))
    }
}

fn at_close(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Errno(errno) => Trouble::Close(errno),
        other => other,
    }
}

pub(crate) fn made(attr: Option<ferry_fs::Attr>) -> Result<Ino, Trouble> {
    attr.map_or_else(|| wrong("the name that was just there is absent"), |attr| Ok(attr.ino))
}

fn same(expected: &[u8], found: &[u8], offset: u64) -> Result<(), Trouble> {
    if expected == found {
        return Ok(());
    }
    let at = expected.iter().zip(found).position(|(e, f)| e != f);
    wrong(format!(
        "{} bytes read, {} expected, the first wrong one at {at:?} behind {offset}",
        found.len(),
        expected.len()
    ))
}
