//! Tests of the namespace: a small world to act in, and the rules that every volume keeps.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod acls;
mod bulk;
mod bypass;
mod carried;
mod cold_inodes;
mod deferred_errors;
mod durable;
mod far;
mod killed;
mod long_drops;
mod orphans;
mod pressure;
mod property;
mod read_pool;
mod removed;
mod renames;
mod reservation;
mod ring_reads;
mod rules;
mod scrub;
mod session_store;
mod smallest_log;
mod stability;
mod stress;
mod times;
mod xattrs;

use crate::InProcess;
use crate::api::*;
use crate::keys;
use crate::local::local_fs::{CacheMode, FsOptions, LocalFs};
use crate::session_store::{Reservation, SessionStore};
use crate::volume::{MkfsOptions, mkfs};
use crate::{target_cost, write_cost};
use ferry_check::{FsckOptions, fsck};
use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A volume in memory and somebody who works on it.
struct World {
    dev: Arc<dyn BlockDevice>,
    fs: Arc<LocalFs>,
    me: InProcess,
    options: FsOptions,
}

type Done<T = ()> = Result<T, Errno>;

impl World {
    fn new() -> Self {
        Self::with(FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() })
    }

    fn with(options: FsOptions) -> Self {
        Self::made(64 << 20, &MkfsOptions::default(), options)
    }

    fn made(bytes: u64, made: &MkfsOptions, options: FsOptions) -> Self {
        Self::on(Arc::new(MemDevice::new(bytes)), made, options)
    }

    /// A new volume on `dev`.
    fn on(dev: Arc<dyn BlockDevice>, made: &MkfsOptions, options: FsOptions) -> Self {
        mkfs(&dev, made, &Env::real()).unwrap();
        let fs = LocalFs::open(dev.clone(), options.clone(), Env::real()).unwrap();
        Self { dev, fs, me: InProcess::default(), options }
    }

    /// The mount goes, cleanly, and comes again.
    fn reopen(&mut self) {
        self.fs.detach();
        self.fs.close().unwrap();
        self.fs = LocalFs::open(self.dev.clone(), self.options.clone(), Env::real()).unwrap();
    }

    fn lookup(&self, dir: Ino, name: &str) -> Done<Option<Attr>> {
        Ok(self.me.call(|cx| self.fs.lookup(cx, dir, name.as_bytes()))?.attr)
    }
    /// The inode number of a name that is there.
    fn ino(&self, dir: Ino, name: &str) -> Ino {
        let attr = self.lookup(dir, name).unwrap().unwrap_or_else(|| panic!("{name} is missing"));
        self.fs.forget(attr.ino, 1);
        attr.ino
    }
    fn exists(&self, dir: Ino, name: &str) -> bool {
        let found = self.lookup(dir, name).unwrap();
        found.inspect(|attr| self.fs.forget(attr.ino, 1)).is_some()
    }
    fn attr(&self, ino: Ino) -> Attr {
        self.me.call(|cx| self.fs.getattr(cx, ino, None)).unwrap().0
    }
    fn set(&self, ino: Ino, set: SetAttr) -> Done<Attr> {
        Ok(self.me.call(|cx| self.fs.setattr(cx, ino, None, &set))?.0)
    }
    fn forgotten(&self, entry: Entry) -> Attr {
        let attr = entry.attr.expect("what was made has attributes");
        self.fs.forget(attr.ino, 1);
        attr
    }
    fn mkdir(&self, dir: Ino, name: &str) -> Done<Ino> {
        let entry = self.me.call(|cx| self.fs.mkdir(cx, dir, name.as_bytes(), 0o755))?;
        Ok(self.forgotten(entry).ino)
    }
    fn mknod(&self, dir: Ino, name: &str, mode: u32) -> Done<Ino> {
        let entry = self.me.call(|cx| self.fs.mknod(cx, dir, name.as_bytes(), mode, 0))?;
        Ok(self.forgotten(entry).ino)
    }
    fn file(&self, dir: Ino, name: &str) -> Done<Ino> {
        self.mknod(dir, name, libc::S_IFREG | 0o644)
    }
    /// Makes and opens a file; the lookup stays counted.
    fn create(&self, dir: Ino, name: &str) -> Done<(Ino, u64)> {
        let (entry, opened) =
            self.me.call(|cx| self.fs.create(cx, dir, name.as_bytes(), 0o644, libc::O_RDWR))?;
        Ok((entry.attr.expect("it was made").ino, opened.fh))
    }
    fn open(&self, ino: Ino) -> Done<u64> {
        Ok(self.me.call(|cx| self.fs.open(cx, ino, libc::O_RDWR, false))?.fh)
    }
    fn release(&self, ino: Ino, fh: u64) {
        let released = self.me.call(|cx| {
            self.fs.release(cx, ino, fh);
            Ok(())
        });
        released.unwrap();
    }
    fn symlink(&self, dir: Ino, name: &str, target: &str) -> Done<Ino> {
        let entry =
            self.me.call(|cx| self.fs.symlink(cx, dir, name.as_bytes(), target.as_bytes()))?;
        Ok(self.forgotten(entry).ino)
    }
    fn link(&self, ino: Ino, dir: Ino, name: &str) -> Done {
        let entry = self.me.call(|cx| self.fs.link(cx, ino, dir, name.as_bytes()))?;
        self.forgotten(entry);
        Ok(())
    }
    fn unlink(&self, dir: Ino, name: &str) -> Done {
        self.me.call(|cx| self.fs.unlink(cx, dir, name.as_bytes()))
    }
    fn rmdir(&self, dir: Ino, name: &str) -> Done {
        self.me.call(|cx| self.fs.rmdir(cx, dir, name.as_bytes()))
    }
    fn rename_with(&self, from: (Ino, &str), to: (Ino, &str), flags: RenameFlags) -> Done {
        self.me
            .call(|cx| self.fs.rename(cx, from.0, from.1.as_bytes(), to.0, to.1.as_bytes(), flags))
    }
    fn rename(&self, from: (Ino, &str), to: (Ino, &str)) -> Done {
        self.rename_with(from, to, RenameFlags::default())
    }
    fn write(&self, ino: Ino, fh: u64, offset: u64, data: &[u8]) -> Done<u64> {
        self.me.call(|cx| self.fs.write(cx, ino, fh, offset, data, false, false))
    }
    fn read(&self, ino: Ino, fh: u64, len: usize) -> Done<Vec<u8>> {
        let mut out = vec![0; len];
        let got = self.me.call(|cx| self.fs.read(cx, ino, fh, 0, &mut out))?;
        out.truncate(got);
        Ok(out)
    }
    fn setxattr(&self, ino: Ino, name: &str, value: &[u8]) -> Done {
        let flags = XattrFlags::default();
        self.me.call(|cx| self.fs.setxattr(cx, ino, name.as_bytes(), value, flags))
    }
    fn getxattr(&self, ino: Ino, name: &str) -> Done<Vec<u8>> {
        self.me.call(|cx| self.fs.getxattr(cx, ino, name.as_bytes()))
    }
    /// All names but the dots.
    fn list(&self, dir: Ino) -> BTreeMap<String, Ino> {
        let mut names = BTreeMap::new();
        self.me
            .call(|cx| {
                self.fs.readdir(cx, dir, 0, 2, false, &mut |entry| {
                    let name = String::from_utf8(entry.name.to_vec()).unwrap();
                    assert!(names.insert(name, entry.ino).is_none(), "a name is listed once");
                    true
                })
            })
            .unwrap();
        names
    }

    /// Every rule that a stored volume keeps; what is only in memory is written back first. Beside
    /// threads in the background it is looked again where something seems wrong: a checkpoint may
    /// be under way, and damage stays.
    fn check(&self) {
        let mut looks = if self.options.background { 10 } else { 1 };
        loop {
            self.fs.sync().unwrap();
            let report = fsck(&self.dev, FsckOptions::default(), &Env::real()).unwrap();
            looks -= 1;
            assert!(report.clean || looks > 0, "{:#?}", report.findings);
            if report.clean {
                return;
            }
        }
    }

    /// Whether the volume holds such an inode, with a name or without.
    fn stored(&self, ino: Ino) -> bool {
        self.fs.journal.get(&keys::inode(ino)).unwrap().is_some()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let closed = self.fs.close();
        assert!(closed.is_ok() || std::thread::panicking(), "{closed:?}");
    }
}

#[track_caller]
fn code<T: std::fmt::Debug>(result: Done<T>) -> i32 {
    result.expect_err("it should fail").0
}
