//! The host's file system, below a directory. Symbolic links are never followed.

use super::ops::{Op, Outcome, Path, REFUSED, SLOTS, Stat, System, name, pattern};
use rustix::fs::{
    self, AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

pub struct Host {
    root: OwnedFd,
    slots: [Option<OwnedFd>; SLOTS],
}

type Done<T> = Result<T, Errno>;

impl Host {
    pub fn new(dir: &std::path::Path) -> Self {
        let root = fs::open(dir, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())
            .expect("it was just made");
        fs::chmod(dir, Mode::from_raw_mode(0o755)).expect("it is ours");
        Self { root, slots: Default::default() }
    }

    fn open_path(&self, path: &[u8]) -> Done<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let mut at = fs::openat(&self.root, ".", flags, Mode::empty())?;
        for n in path {
            at = fs::openat(&at, name(*n), flags, Mode::empty())?;
        }
        Ok(at)
    }

    /// The directory of a path's last name, and the name.
    fn parent(&self, path: &Path) -> Done<(OwnedFd, Vec<u8>)> {
        let (last, dirs) = path.split_last().expect("these operations have a path");
        Ok((self.open_path(dirs)?, name(*last)))
    }

    fn kind(&self, path: &Path) -> Done<FileType> {
        Ok(FileType::from_raw_mode(fs::fstat(&self.open_path(path)?)?.st_mode))
    }

    /// A name of the open file for calls that know no descriptor of this kind.
    fn by_descriptor(fd: impl AsFd) -> String {
        format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
    }

    fn slot(&self, slot: usize) -> Done<&OwnedFd> {
        self.slots[slot].as_ref().ok_or(Errno::BADF)
    }

    fn keep(&mut self, slot: usize, file: OwnedFd) -> Done<Outcome> {
        self.slots[slot] = Some(file);
        Ok(Outcome::Done)
    }

    /// A path that attributes can be asked of: of a file or a directory.
    fn attributed(&self, path: &Path) -> Done<(OwnedFd, String)> {
        let at = self.open_path(path)?;
        match FileType::from_raw_mode(fs::fstat(&at)?.st_mode) {
            FileType::RegularFile | FileType::Directory => {
                let path = Self::by_descriptor(&at);
                Ok((at, path))
            }
            _ => Err(Errno::from_raw_os_error(REFUSED)),
        }
    }

    fn step(&mut self, op: &Op, n: usize) -> Done<Outcome> {
        match op {
            Op::Create { path, slot, exclusive, truncate, mode } => {
                let (dir, last) = self.parent(path)?;
                if !exclusive && self.kind(path) == Ok(FileType::Fifo) {
                    return Err(Errno::from_raw_os_error(REFUSED));
                }
                let mut flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW;
                flags.set(OFlags::EXCL, *exclusive);
                flags.set(OFlags::TRUNC, *truncate);
                let file = fs::openat(&dir, last, flags, Mode::from_raw_mode(*mode))?;
                return self.keep(*slot, file);
            }
            Op::Open { path, slot, truncate } => {
                let (dir, last) = self.parent(path)?;
                if self.kind(path)? == FileType::Fifo {
                    return Err(Errno::from_raw_os_error(REFUSED));
                }
                let mut flags = OFlags::RDWR | OFlags::NOFOLLOW;
                flags.set(OFlags::TRUNC, *truncate);
                let file = fs::openat(&dir, last, flags, Mode::empty())?;
                return self.keep(*slot, file);
            }
            Op::Tmpfile { dir, slot } => {
                let dir = self.open_path(dir)?;
                let file = fs::openat(
                    &dir,
                    ".",
                    OFlags::RDWR | OFlags::TMPFILE,
                    Mode::from_raw_mode(0o644),
                )?;
                return self.keep(*slot, file);
            }
            Op::LinkSlot { slot, path } => {
                let (dir, last) = self.parent(path)?;
                let path = Self::by_descriptor(self.slot(*slot)?);
                fs::linkat(fs::CWD, path, &dir, last, AtFlags::SYMLINK_FOLLOW)?;
            }
            Op::Close(slot) => drop(self.slots[*slot].take().ok_or(Errno::BADF)?),
            Op::Mkdir(path, mode) => {
                let (dir, last) = self.parent(path)?;
                fs::mkdirat(&dir, last, Mode::from_raw_mode(*mode))?;
            }
            Op::Rmdir(path) => {
                let (dir, last) = self.parent(path)?;
                fs::unlinkat(&dir, last, AtFlags::REMOVEDIR)?;
            }
            Op::Unlink(path) => {
                let (dir, last) = self.parent(path)?;
                fs::unlinkat(&dir, last, AtFlags::empty())?;
            }
            Op::Rename { from, to, no_replace, exchange } => {
                let (from_dir, from_name) = self.parent(from)?;
                let (to_dir, to_name) = self.parent(to)?;
                let mut flags = RenameFlags::empty();
                flags.set(RenameFlags::NOREPLACE, *no_replace);
                flags.set(RenameFlags::EXCHANGE, *exchange);
                fs::renameat_with(&from_dir, from_name, &to_dir, to_name, flags)?;
            }
            Op::Link(from, to) => {
                let (from_dir, from_name) = self.parent(from)?;
                let (to_dir, to_name) = self.parent(to)?;
                fs::linkat(&from_dir, from_name, &to_dir, to_name, AtFlags::empty())?;
            }
            Op::Symlink(path, len) => {
                let (dir, last) = self.parent(path)?;
                fs::symlinkat(vec![b't'; *len], &dir, last)?;
            }
            Op::Fifo(path) => {
                let (dir, last) = self.parent(path)?;
                fs::mknodat(&dir, last, FileType::Fifo, Mode::from_raw_mode(0o644), 0)?;
            }
            Op::Readlink(path) => {
                let (dir, last) = self.parent(path)?;
                return Ok(Outcome::Bytes(fs::readlinkat(&dir, last, Vec::new())?.into_bytes()));
            }
            Op::Stat(path) => return Ok(Outcome::Stat(stat(&fs::fstat(self.open_path(path)?)?))),
            Op::StatSlot(slot) => return Ok(Outcome::Stat(stat(&fs::fstat(self.slot(*slot)?)?))),
            Op::List(path) => {
                let at = self.open_path(path)?;
                let dir = fs::openat(&at, ".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
                let mut names = BTreeMap::new();
                for entry in fs::Dir::new(dir)? {
                    let entry = entry?;
                    names.insert(
                        entry.file_name().to_bytes().to_vec(),
                        entry.file_type().as_raw_mode(),
                    );
                }
                return Ok(Outcome::Names(names));
            }
            Op::Chmod(path, mode) => {
                let at = self.open_path(path)?;
                if FileType::from_raw_mode(fs::fstat(&at)?.st_mode) == FileType::Symlink {
                    return Err(Errno::from_raw_os_error(REFUSED));
                }
                fs::chmod(Self::by_descriptor(&at), Mode::from_raw_mode(*mode))?;
            }
            Op::Chown(path, uid, gid) => {
                let (dir, last) = self.parent(path)?;
                let (uid, gid) = (Some(Uid::from_raw(*uid)), Some(Gid::from_raw(*gid)));
                fs::chownat(&dir, last, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Op::Times(path, accessed, modified) => {
                let (dir, last) = self.parent(path)?;
                let spec = |t: &u64| Timespec {
                    tv_sec: (t / 1_000_000_000) as i64,
                    tv_nsec: (t % 1_000_000_000) as i64,
                };
                let times =
                    Timestamps { last_access: spec(accessed), last_modification: spec(modified) };
                fs::utimensat(&dir, last, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Op::Truncate(path, size) => {
                let at = self.open_path(path)?;
                if FileType::from_raw_mode(fs::fstat(&at)?.st_mode) == FileType::Symlink {
                    return Err(Errno::from_raw_os_error(REFUSED));
                }
                let path = Self::by_descriptor(&at);
                match FileType::from_raw_mode(fs::fstat(&at)?.st_mode) {
                    FileType::RegularFile => {}
                    FileType::Directory => return Err(Errno::ISDIR),
                    _ => return Err(Errno::INVAL),
                }
                let file = fs::open(path, OFlags::WRONLY, Mode::empty())?;
                fs::ftruncate(&file, *size)?;
            }
            Op::TruncateSlot(slot, size) => fs::ftruncate(self.slot(*slot)?, *size)?,
            Op::Read(slot, offset, len) => {
                let mut out = vec![0; *len];
                let got = rustix::io::pread(self.slot(*slot)?, &mut out[..], *offset)?;
                out.truncate(got);
                return Ok(Outcome::Bytes(out));
            }
            Op::Write(slot, offset, len) => {
                let wrote = rustix::io::pwrite(self.slot(*slot)?, &pattern(n, *len), *offset)?;
                return Ok(Outcome::Number(wrote as u64));
            }
            Op::Allocate { slot, mode, offset, len } => {
                let mode = FallocateFlags::from_bits_retain(*mode as u32);
                fs::fallocate(self.slot(*slot)?, mode, *offset, *len)?;
            }
            Op::Seek { slot, offset, data } => {
                let to = if *data { SeekFrom::Data(*offset) } else { SeekFrom::Hole(*offset) };
                return Ok(Outcome::Number(fs::seek(self.slot(*slot)?, to)?));
            }
            Op::SetXattr { path, number, len, create, replace } => {
                let (_at, path) = self.attributed(path)?;
                let mut flags = XattrFlags::empty();
                flags.set(XattrFlags::CREATE, *create);
                flags.set(XattrFlags::REPLACE, *replace);
                fs::setxattr(path, format!("user.{number}"), &pattern(n, *len as u64), flags)?;
            }
            Op::GetXattr(path, number) => {
                let (_at, path) = self.attributed(path)?;
                let mut out = vec![0; 4096];
                let got = fs::getxattr(path, format!("user.{number}"), &mut out[..])?;
                out.truncate(got);
                return Ok(Outcome::Bytes(out));
            }
            Op::ListXattr(path) => {
                let (_at, path) = self.attributed(path)?;
                let mut out = vec![0; 4096];
                let got = fs::listxattr(path, &mut out[..])?;
                let names = out[..got].split(|b| *b == 0).filter(|name| name.starts_with(b"user."));
                return Ok(Outcome::Names(names.map(|name| (name.to_vec(), 0)).collect()));
            }
            Op::RemoveXattr(path, number) => {
                let (_at, path) = self.attributed(path)?;
                fs::removexattr(path, format!("user.{number}"))?;
            }
            // The host's devices are not what is tested.
            Op::Fsync(slot) => drop(self.slot(*slot)?),
            Op::Sync => {}
            Op::Remount => self.slots = Default::default(),
        }
        Ok(Outcome::Done)
    }
}

impl System for Host {
    fn run(&mut self, op: &Op, n: usize) -> Outcome {
        self.step(op, n).unwrap_or_else(|errno| Outcome::Error(errno.raw_os_error()))
    }
}

fn stat(stat: &fs::Stat) -> Stat {
    let kind = stat.st_mode & libc::S_IFMT;
    Stat {
        kind,
        mode: stat.st_mode & 0o7777,
        nlink: stat.st_nlink,
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: (kind != libc::S_IFDIR).then_some(stat.st_size as u64),
        atime: Stat::set_time(stat.st_atime, stat.st_atime_nsec as u32),
        mtime: Stat::set_time(stat.st_mtime, stat.st_mtime_nsec as u32),
    }
}
