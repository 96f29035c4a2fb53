//! FerryFS, called as the kernel calls it: the kernel's own checks, which come before any file
//! system is asked, are made here.

use super::ops::{Op, Outcome, Path, REFUSED, SLOTS, Stat, System, name, pattern};
use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::{
    Attr, Errno, Filesystem, FsOptions, InProcess, Ino, LocalFs, MkfsOptions, ROOT, RenameFlags,
    SetAttr, SetTime, Timestamp, XattrFlags, mkfs,
};
use std::collections::BTreeMap;
use std::sync::Arc;

pub struct Ferry {
    device: Arc<dyn BlockDevice>,
    options: FsOptions,
    fs: Arc<LocalFs>,
    me: InProcess,
    slots: [Option<(Ino, u64)>; SLOTS],
}

type Done<T> = Result<T, Errno>;

impl Ferry {
    pub fn new() -> Self {
        let device: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(64 << 20));
        mkfs(&device, &MkfsOptions::default(), &Env::real()).expect("there is room");
        let options = FsOptions { background: false, cache_bytes: 3 << 20, ..FsOptions::default() };
        let fs =
            LocalFs::open(device.clone(), options.clone(), Env::real()).expect("it was just made");
        Self { device, options, fs, me: InProcess::default(), slots: Default::default() }
    }

    /// Closes; the volume is clean.
    pub fn end(mut self) {
        self.close_all();
        self.fs.detach();
        self.fs.close().expect("no faults");
        let options =
            ferry_check::FsckOptions { verify_data: true, ..ferry_check::FsckOptions::default() };
        let report =
            ferry_check::fsck(&self.device, options, &Env::real()).expect("it can be checked");
        assert!(report.clean, "{:#?}", report.findings);
    }

    fn close_all(&mut self) {
        for slot in 0..SLOTS {
            self.close(slot);
        }
    }

    fn close(&mut self, slot: usize) {
        if let Some((ino, fh)) = self.slots[slot].take() {
            self.tell(|cx| self.fs.release(cx, ino, fh));
        }
    }

    fn tell(&self, notice: impl FnOnce(&ferry_fs::Cx)) {
        let told = self.me.call(|cx| {
            notice(cx);
            Ok(())
        });
        told.expect("nothing fails");
    }

    fn attr(&self, ino: Ino) -> Done<Attr> {
        Ok(self.me.call(|cx| self.fs.getattr(cx, ino, None))?.0)
    }

    /// The inode of a name, if there is one. The lookup is forgotten at once: nobody else is here.
    fn child(&self, dir: Ino, name: &[u8]) -> Done<Option<Ino>> {
        if self.attr(dir)?.mode & libc::S_IFMT != libc::S_IFDIR {
            return Err(Errno(libc::ENOTDIR));
        }
        let entry = self.me.call(|cx| self.fs.lookup(cx, dir, name))?;
        Ok(entry.attr.map(|attr| {
            self.fs.forget(attr.ino, 1);
            attr.ino
        }))
    }

    fn walk(&self, path: &[u8]) -> Done<Ino> {
        path.iter().try_fold(ROOT, |at, n| self.child(at, &name(*n))?.ok_or(Errno(libc::ENOENT)))
    }

    fn parent(&self, path: &Path) -> Done<(Ino, Vec<u8>)> {
        let (last, dirs) = path.split_last().expect("these operations have a path");
        let dir = self.walk(dirs)?;
        if self.attr(dir)?.mode & libc::S_IFMT != libc::S_IFDIR {
            return Err(Errno(libc::ENOTDIR));
        }
        Ok((dir, name(*last)))
    }

    /// Directory and name for something new: the kernel looks the name up before it asks.
    fn free(&self, path: &Path) -> Done<(Ino, Vec<u8>)> {
        let (dir, last) = self.parent(path)?;
        match self.child(dir, &last)? {
            Some(_) => Err(Errno(libc::EEXIST)),
            None => Ok((dir, last)),
        }
    }

    fn slot(&self, slot: usize) -> Done<(Ino, u64)> {
        self.slots[slot].ok_or(Errno(libc::EBADF))
    }

    fn keep(&mut self, slot: usize, ino: Ino, fh: u64) -> Done<Outcome> {
        self.close(slot);
        self.slots[slot] = Some((ino, fh));
        Ok(Outcome::Done)
    }

    fn open(&mut self, ino: Ino, slot: usize, truncate: bool) -> Done<Outcome> {
        match self.attr(ino)?.mode & libc::S_IFMT {
            libc::S_IFLNK => return Err(Errno(libc::ELOOP)),
            libc::S_IFIFO => return Err(Errno(REFUSED)),
            _ => {}
        }
        let flags = libc::O_RDWR | if truncate { libc::O_TRUNC } else { 0 };
        let opened = self.me.call(|cx| self.fs.open(cx, ino, flags, false))?;
        self.keep(slot, ino, opened.fh)
    }

    /// A path that attributes can be asked of: of a file or a directory.
    fn attributed(&self, path: &Path) -> Done<Ino> {
        let ino = self.walk(path)?;
        match self.attr(ino)?.mode & libc::S_IFMT {
            libc::S_IFREG | libc::S_IFDIR => Ok(ino),
            _ => Err(Errno(REFUSED)),
        }
    }

    fn set(&self, ino: Ino, set: SetAttr) -> Done<()> {
        self.me.call(|cx| self.fs.setattr(cx, ino, None, &set)).map(drop)
    }

    /// `below` hangs from `dir`.
    fn is_below(&self, below: Ino, dir: Ino) -> Done<bool> {
        let mut at = below;
        while at != dir && at != ROOT {
            at = self.child(at, b"..")?.ok_or(Errno(libc::EIO))?;
        }
        Ok(at == dir)
    }

    fn rename(&self, from: &Path, to: &Path, flags: RenameFlags) -> Done<()> {
        self.walk(&from[..from.len() - 1])?;
        self.walk(&to[..to.len() - 1])?;
        let ((from_dir, from_name), (to_dir, to_name)) = (self.parent(from)?, self.parent(to)?);
        let source = self.child(from_dir, &from_name)?.ok_or(Errno(libc::ENOENT))?;
        let target = self.child(to_dir, &to_name)?;
        match target {
            Some(_) if flags.no_replace => return Err(Errno(libc::EEXIST)),
            None if flags.exchange => return Err(Errno(libc::ENOENT)),
            _ => {}
        }
        // The kernel finds these before it asks a file system.
        if self.is_below(to_dir, source)? {
            return Err(Errno(libc::EINVAL));
        }
        if let Some(target) = target
            && self.is_below(from_dir, target)?
        {
            return Err(Errno(if flags.exchange { libc::EINVAL } else { libc::ENOTEMPTY }));
        }
        self.me.call(|cx| self.fs.rename(cx, from_dir, &from_name, to_dir, &to_name, flags))
    }

    fn step(&mut self, op: &Op, n: usize) -> Done<Outcome> {
        let fs = self.fs.clone();
        match op {
            Op::Create { path, slot, exclusive, truncate, mode } => {
                let (dir, last) = self.parent(path)?;
                match self.child(dir, &last)? {
                    Some(_) if *exclusive => return Err(Errno(libc::EEXIST)),
                    Some(ino) if self.attr(ino)?.mode & libc::S_IFMT == libc::S_IFDIR => {
                        return Err(Errno(libc::EISDIR));
                    }
                    Some(ino) => return self.open(ino, *slot, *truncate),
                    None => {}
                }
                let flags = libc::O_RDWR | libc::O_CREAT;
                let (entry, opened) =
                    self.me.call(|cx| fs.create(cx, dir, &last, libc::S_IFREG | mode, flags))?;
                let ino = self.made(entry.attr)?;
                return self.keep(*slot, ino, opened.fh);
            }
            Op::Open { path, slot, truncate } => {
                let ino = self.walk(path)?;
                return self.open(ino, *slot, *truncate);
            }
            Op::Tmpfile { dir, slot } => {
                let dir = self.walk(dir)?;
                if self.attr(dir)?.mode & libc::S_IFMT != libc::S_IFDIR {
                    return Err(Errno(libc::ENOTDIR));
                }
                let (entry, opened) =
                    self.me.call(|cx| fs.tmpfile(cx, dir, libc::S_IFREG | 0o644, libc::O_RDWR))?;
                let ino = self.made(entry.attr)?;
                return self.keep(*slot, ino, opened.fh);
            }
            Op::LinkSlot { slot, path } => {
                self.walk(&path[..path.len() - 1])?;
                let (ino, _) = self.slot(*slot)?;
                let (dir, last) = self.parent(path)?;
                if self.child(dir, &last)?.is_some() {
                    return Err(Errno(libc::EEXIST));
                }
                let entry = self.me.call(|cx| fs.link(cx, ino, dir, &last))?;
                self.made(entry.attr)?;
            }
            Op::Close(slot) => {
                self.slot(*slot)?;
                self.close(*slot);
            }
            Op::Mkdir(path, mode) => {
                let (dir, last) = self.free(path)?;
                let entry = self.me.call(|cx| fs.mkdir(cx, dir, &last, *mode))?;
                self.made(entry.attr)?;
            }
            Op::Rmdir(path) => {
                let (dir, last) = self.parent(path)?;
                self.child(dir, &last)?.ok_or(Errno(libc::ENOENT))?;
                self.me.call(|cx| fs.rmdir(cx, dir, &last))?;
            }
            Op::Unlink(path) => {
                let (dir, last) = self.parent(path)?;
                self.child(dir, &last)?.ok_or(Errno(libc::ENOENT))?;
                self.me.call(|cx| fs.unlink(cx, dir, &last))?;
            }
            Op::Rename { from, to, no_replace, exchange } => {
                self.rename(
                    from,
                    to,
                    RenameFlags { no_replace: *no_replace, exchange: *exchange, whiteout: false },
                )?;
            }
            Op::Link(from, to) => {
                self.walk(&from[..from.len() - 1])?;
                self.walk(&to[..to.len() - 1])?;
                let ino = self.walk(from)?;
                let (dir, last) = self.free(to)?;
                if self.attr(ino)?.mode & libc::S_IFMT == libc::S_IFDIR {
                    return Err(Errno(libc::EPERM));
                }
                let entry = self.me.call(|cx| fs.link(cx, ino, dir, &last))?;
                self.made(entry.attr)?;
            }
            Op::Symlink(path, len) => {
                // The kernel reads the target before it looks the name up.
                self.walk(&path[..path.len() - 1])?;
                if *len == 0 || *len >= 4096 {
                    return Err(Errno(if *len == 0 { libc::ENOENT } else { libc::ENAMETOOLONG }));
                }
                let (dir, last) = self.free(path)?;
                let entry = self.me.call(|cx| fs.symlink(cx, dir, &last, &vec![b't'; *len]))?;
                self.made(entry.attr)?;
            }
            Op::Fifo(path) => {
                let (dir, last) = self.free(path)?;
                let entry =
                    self.me.call(|cx| fs.mknod(cx, dir, &last, libc::S_IFIFO | 0o644, 0))?;
                self.made(entry.attr)?;
            }
            Op::Readlink(path) => {
                let ino = self.walk(path)?;
                return Ok(Outcome::Bytes(self.me.call(|cx| fs.readlink(cx, ino))?));
            }
            Op::Stat(path) => return Ok(Outcome::Stat(stat(&self.attr(self.walk(path)?)?))),
            Op::StatSlot(slot) => return Ok(Outcome::Stat(stat(&self.attr(self.slot(*slot)?.0)?))),
            Op::List(path) => return self.list(self.walk(path)?),
            Op::Chmod(path, mode) => {
                let ino = self.walk(path)?;
                if self.attr(ino)?.mode & libc::S_IFMT == libc::S_IFLNK {
                    return Err(Errno(REFUSED));
                }
                self.set(ino, SetAttr { mode: Some(*mode), ..SetAttr::default() })?;
            }
            Op::Chown(path, uid, gid) => {
                let ino = self.walk(path)?;
                let kill_suidgid = self.attr(ino)?.mode & libc::S_IFMT != libc::S_IFDIR;
                let set = SetAttr {
                    uid: Some(*uid),
                    gid: Some(*gid),
                    kill_suidgid,
                    ..SetAttr::default()
                };
                self.set(ino, set)?;
            }
            Op::Times(path, accessed, modified) => {
                let time = |t: &u64| Some(SetTime::At(Timestamp(i128::from(*t))));
                let set =
                    SetAttr { atime: time(accessed), mtime: time(modified), ..SetAttr::default() };
                self.set(self.walk(path)?, set)?;
            }
            Op::Truncate(path, size) => {
                let ino = self.walk(path)?;
                if self.attr(ino)?.mode & libc::S_IFMT == libc::S_IFLNK {
                    return Err(Errno(REFUSED));
                }
                self.set(ino, SetAttr { size: Some(*size), ..SetAttr::default() })?;
            }
            Op::TruncateSlot(slot, size) => {
                self.set(self.slot(*slot)?.0, SetAttr { size: Some(*size), ..SetAttr::default() })?;
            }
            Op::Read(slot, offset, len) => {
                let (ino, fh) = self.slot(*slot)?;
                if *len == 0 {
                    return Ok(Outcome::Bytes(Vec::new())); // it does not reach a file system
                }
                let mut out = vec![0xee; *len];
                let got = self.me.call(|cx| fs.read(cx, ino, fh, *offset, &mut out))?;
                out.truncate(got);
                return Ok(Outcome::Bytes(out));
            }
            Op::Write(slot, offset, len) => {
                let (ino, fh) = self.slot(*slot)?;
                if *len == 0 {
                    return Ok(Outcome::Number(0)); // it does not reach a file system
                }
                let bytes = pattern(n, *len);
                let wrote =
                    self.me.call(|cx| fs.write(cx, ino, fh, *offset, &bytes, false, false))?;
                return Ok(Outcome::Number(wrote));
            }
            Op::Allocate { slot, mode, offset, len } => {
                let (ino, fh) = self.slot(*slot)?;
                self.me.call(|cx| fs.fallocate(cx, ino, fh, *mode, *offset, *len))?;
            }
            Op::Seek { slot, offset, data } => {
                let (ino, fh) = self.slot(*slot)?;
                let whence = if *data { libc::SEEK_DATA } else { libc::SEEK_HOLE };
                return Ok(Outcome::Number(
                    self.me.call(|cx| fs.lseek(cx, ino, fh, *offset, whence))?,
                ));
            }
            Op::SetXattr { path, number, len, create, replace } => {
                let ino = self.attributed(path)?;
                let flags = XattrFlags { create: *create, replace: *replace, acl_kill_sgid: false };
                let (name, value) = (format!("user.{number}"), pattern(n, *len as u64));
                self.me.call(|cx| fs.setxattr(cx, ino, name.as_bytes(), &value, flags))?;
            }
            Op::GetXattr(path, number) => {
                let ino = self.attributed(path)?;
                let name = format!("user.{number}");
                return Ok(Outcome::Bytes(
                    self.me.call(|cx| fs.getxattr(cx, ino, name.as_bytes()))?,
                ));
            }
            Op::ListXattr(path) => {
                let ino = self.attributed(path)?;
                let names = self.me.call(|cx| fs.listxattr(cx, ino))?;
                let names = names.split(|b| *b == 0).filter(|name| !name.is_empty());
                return Ok(Outcome::Names(names.map(|name| (name.to_vec(), 0)).collect()));
            }
            Op::RemoveXattr(path, number) => {
                let ino = self.attributed(path)?;
                let name = format!("user.{number}");
                self.me.call(|cx| fs.removexattr(cx, ino, name.as_bytes()))?;
            }
            Op::Fsync(slot) => {
                let (ino, fh) = self.slot(*slot)?;
                self.me.call(|cx| fs.fsync(cx, ino, fh, false))?;
            }
            Op::Sync => fs.sync().map_err(|error| error.errno())?,
            Op::Remount => {
                drop(fs);
                self.close_all();
                self.fs.detach();
                self.fs.close().map_err(|error| error.errno())?;
                self.fs = LocalFs::open(self.device.clone(), self.options.clone(), Env::real())
                    .expect("it was just closed");
            }
        }
        Ok(Outcome::Done)
    }

    fn made(&self, attr: Option<Attr>) -> Done<Ino> {
        let ino = attr.ok_or(Errno(libc::EIO))?.ino;
        self.fs.forget(ino, 1);
        Ok(ino)
    }

    fn list(&self, dir: Ino) -> Done<Outcome> {
        let opened = self.me.call(|cx| self.fs.opendir(cx, dir))?;
        let mut names = BTreeMap::new();
        self.me.call(|cx| {
            self.fs.readdir(cx, dir, opened.fh, 0, false, &mut |entry| {
                assert!(
                    names.insert(entry.name.to_vec(), entry.kind).is_none(),
                    "a name is listed once"
                );
                true
            })
        })?;
        self.tell(|cx| self.fs.releasedir(cx, dir, opened.fh));
        Ok(Outcome::Names(names))
    }
}

impl System for Ferry {
    fn run(&mut self, op: &Op, n: usize) -> Outcome {
        self.step(op, n).unwrap_or_else(|errno| Outcome::Error(errno.0))
    }
}

fn stat(attr: &Attr) -> Stat {
    let kind = attr.mode & libc::S_IFMT;
    Stat {
        kind,
        mode: attr.mode & 0o7777,
        nlink: u64::from(attr.nlink),
        uid: attr.uid,
        gid: attr.gid,
        size: (kind != libc::S_IFDIR).then_some(attr.size),
        atime: Stat::set_time(attr.atime.secs(), attr.atime.nanos()),
        mtime: Stat::set_time(attr.mtime.secs(), attr.mtime.nanos()),
    }
}
