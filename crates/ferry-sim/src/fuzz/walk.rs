//! Somebody mounts the volume, reads all of it, and works on it; whatever comes is an answer.

use crate::device::{SimRng, sim_env};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::inprocess::FromReply;
use ferry_fs::{
    Answer, Attr, CacheMode, Cx, Errno, Filesystem, FsOptions, InProcess, Ino, LocalFs, ROOT,
    RenameFlags, SetAttr, XattrFlags,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Inodes looked at, at most.
const INODES_MAX: usize = 4000;
/// Entries taken from one directory, at most.
const ENTRIES_MAX: usize = 4000;
/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;
/// Reads of one file, at most.
const READS_MAX: u64 = 40;
/// Files that are changed, at most.
const CHANGED_MAX: usize = 12;

/// Mounts read-only and reads everything. `threads`: now and then with threads of its own.
pub fn read_only(device: &Arc<dyn BlockDevice>, threads: bool, rng: &mut SimRng) {
    visit(device, rng, threads, true);
}

/// Mounts, reads everything, changes something, unmounts.
pub fn read_write(device: &Arc<dyn BlockDevice>, threads: bool, rng: &mut SimRng) {
    visit(device, rng, threads, false);
}

fn visit(device: &Arc<dyn BlockDevice>, rng: &mut SimRng, threads: bool, read_only: bool) {
    // With threads of its own, as a daemon has it, now and then: they must not die either.
    let background = threads && rng.chance(1, 4);
    let env = if background { Env::real() } else { sim_env(rng.next_u64()).0 };
    let options = FsOptions {
        read_only,
        cache: CacheMode::Kernel,
        cache_bytes: 4 << 20,
        commit_interval: Duration::from_secs(1),
        background,
        ..FsOptions::default()
    };
    let Ok(fs) = LocalFs::open(device.clone(), options, env) else { return };
    let mut walk = Walk { fs: &fs, me: InProcess::default(), rng, found: Vec::new() };
    walk.everything();
    if !read_only {
        walk.change();
        // That it does not come to that is an answer, too.
        drop(fs.sync());
        drop(fs.tick());
    }
    drop(fs.stats());
    fs.detach();
    drop(fs.close());
}

struct Walk<'w> {
    fs: &'w LocalFs,
    me: InProcess,
    rng: &'w mut SimRng,
    /// What the walk met: each is looked up once.
    found: Vec<Attr>,
}

impl Walk<'_> {
    /// Asks; whatever comes is an answer.
    fn ask<T: FromReply>(&self, request: impl FnOnce(&Cx) -> Answer<T>) {
        let _ = self.me.call(request);
    }

    fn everything(&mut self) {
        self.ask(|cx| self.fs.statfs(cx));
        let Ok((root, _)) = self.me.call(|cx| self.fs.getattr(cx, ROOT, None)) else { return };
        self.found.push(root);
        let mut seen = BTreeSet::from([ROOT]);
        let mut next = 0;
        while let Some(attr) = self.found.get(next).copied() {
            next += 1;
            self.attributes(attr.ino);
            match attr.mode & libc::S_IFMT {
                libc::S_IFREG => self.contents(&attr),
                libc::S_IFLNK => self.ask(|cx| self.fs.readlink(cx, attr.ino)),
                _ => self.names(attr.ino, &mut seen),
            }
        }
    }

    fn names(&mut self, dir: Ino, seen: &mut BTreeSet<Ino>) {
        let Ok(opened) = self.me.call(|cx| self.fs.opendir(cx, dir)) else { return };
        let mut names = Vec::new();
        self.ask(|cx| {
            self.fs.readdir(cx, dir, opened.fh, 0, false, &mut |entry| {
                names.push(entry.name.clone());
                names.len() < ENTRIES_MAX
            })
        });
        for name in names {
            let Ok(entry) = self.me.call(|cx| self.fs.lookup(cx, dir, &name)) else { continue };
            let Some(attr) = entry.attr else { continue };
            if self.found.len() < INODES_MAX && seen.insert(attr.ino) {
                self.found.push(attr);
            } else {
                self.fs.forget(attr.ino, 1);
            }
        }
    }

    fn attributes(&self, ino: Ino) {
        self.ask(|cx| self.fs.getattr(cx, ino, None));
        let names = self.me.call(|cx| self.fs.listxattr(cx, ino)).unwrap_or_default();
        for name in names.split(|b| *b == 0).filter(|name| !name.is_empty()).take(100) {
            self.ask(|cx| self.fs.getxattr(cx, ino, name));
        }
    }

    fn contents(&mut self, attr: &Attr) {
        let ino = attr.ino;
        let Ok(fh) = self.open(ino, libc::O_RDONLY) else { return };
        let mut out = vec![0; READ_BYTES];
        let end = attr.size.saturating_sub(READ_BYTES as u64 / 2);
        let mut offsets: Vec<u64> = (0..attr.size)
            .step_by(READ_BYTES)
            .take(READS_MAX as usize)
            .chain([end, 1 << 40, i64::MAX as u64])
            .collect();
        offsets.push(self.rng.below(attr.size.max(1)));
        for at in offsets {
            self.ask(|cx| self.fs.read(cx, ino, fh, at, &mut out));
        }
        let mut at = 0;
        for whence in
            [libc::SEEK_DATA, libc::SEEK_HOLE].into_iter().cycle().take(READS_MAX as usize)
        {
            match self.me.call(|cx| self.fs.lseek(cx, ino, fh, at, whence)) {
                Ok(next) => at = next,
                Err(_) => break,
            }
        }
        self.release(ino, fh);
    }

    fn open(&self, ino: Ino, flags: i32) -> Result<u64, Errno> {
        self.me.call(|cx| self.fs.open(cx, ino, flags, false)).map(|opened| opened.fh)
    }

    fn release(&self, ino: Ino, fh: u64) {
        self.ask(|cx| {
            self.fs.release(cx, ino, fh);
            Ok(())
        });
    }

    /// Changes of all kinds to some of what was found.
    fn change(&mut self) {
        for n in 0..CHANGED_MAX {
            if self.found.is_empty() {
                return;
            }
            let attr = *self.rng.pick(&self.found);
            let name = format!("new {n}").into_bytes();
            match attr.mode & libc::S_IFMT {
                libc::S_IFDIR => self.change_directory(attr.ino, &name),
                libc::S_IFREG => self.change_file(&attr),
                _ => self.ask(|cx| self.fs.link(cx, attr.ino, ROOT, &name)),
            }
            let set = SetAttr { mode: Some(0o640), uid: Some(7), ..SetAttr::default() };
            self.ask(|cx| self.fs.setattr(cx, attr.ino, None, &set));
            let value = vec![3; self.rng.index(5000)];
            self.ask(|cx| {
                self.fs.setxattr(cx, attr.ino, b"user.new", &value, XattrFlags::default())
            });
            self.ask(|cx| self.fs.removexattr(cx, attr.ino, b"user.attribute-1"));
        }
        self.change_directory(ROOT, b"last");
    }

    fn change_file(&mut self, attr: &Attr) {
        let Ok(fh) = self.open(attr.ino, libc::O_RDWR) else { return };
        let ino = attr.ino;
        for _ in 0..4 {
            let at = *self.rng.pick(&[
                0,
                4096,
                attr.size / 2,
                attr.size,
                attr.size.saturating_add(5000),
            ]);
            let len = *self.rng.pick(&[1, 100, 4096, 50_000]);
            match self.rng.below(5) {
                0 | 1 => self.ask(|cx| self.fs.write(cx, ino, fh, at, &vec![9; len], false, false)),
                2 => {
                    let set = SetAttr { size: Some(at), ..SetAttr::default() };
                    self.ask(|cx| self.fs.setattr(cx, ino, Some(fh), &set));
                }
                3 => {
                    let mode = *self.rng.pick(&[
                        0,
                        libc::FALLOC_FL_KEEP_SIZE,
                        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                        libc::FALLOC_FL_ZERO_RANGE,
                    ]);
                    self.ask(|cx| self.fs.fallocate(cx, ino, fh, mode, at, len as u64));
                }
                _ => self.ask(|cx| self.fs.write(cx, ino, fh, 0, &vec![8; len], true, false)),
            }
        }
        self.ask(|cx| self.fs.fsync(cx, ino, fh, false));
        self.release(ino, fh);
    }

    fn change_directory(&mut self, dir: Ino, name: &[u8]) {
        let mode = libc::S_IFREG | 0o644;
        if let Ok((entry, opened)) =
            self.me.call(|cx| self.fs.create(cx, dir, name, mode, libc::O_RDWR))
            && let Some(attr) = entry.attr
        {
            let bytes = vec![5; 9000];
            self.ask(|cx| self.fs.write(cx, attr.ino, opened.fh, 0, &bytes, false, false));
            self.ask(|cx| self.fs.fsync(cx, attr.ino, opened.fh, false));
            self.release(attr.ino, opened.fh);
            self.fs.forget(attr.ino, 1);
        }
        let sub = [name, b" directory"].concat();
        if let Ok(entry) = self.me.call(|cx| self.fs.mkdir(cx, dir, &sub, 0o755))
            && let Some(attr) = entry.attr
        {
            self.fs.forget(attr.ino, 1);
        }
        let mut names: Vec<Box<[u8]>> = Vec::new();
        self.ask(|cx| {
            self.fs.readdir(cx, dir, 0, 2, false, &mut |entry| {
                names.push(entry.name.clone());
                names.len() < 50
            })
        });
        if names.is_empty() {
            return;
        }
        let (one, two) = (self.rng.pick(&names).clone(), self.rng.pick(&names).clone());
        let exchange = self.rng.chance(1, 2);
        let flags = RenameFlags { no_replace: false, exchange, whiteout: false };
        self.ask(|cx| self.fs.rename(cx, dir, &one, ROOT, &two, flags));
        let removed = self.rng.pick(&names).clone();
        self.ask(|cx| self.fs.unlink(cx, dir, &removed));
        self.ask(|cx| self.fs.rmdir(cx, dir, &removed));
        self.ask(|cx| self.fs.fsyncdir(cx, dir, 0, false));
    }
}
