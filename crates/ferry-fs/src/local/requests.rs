//! The file system as a transport sees it: every request, its checks of the request itself, and its answer.

use super::make::New;
use super::remove::Kind;
use super::{CacheMode, LocalFs, VALID};
use crate::api::*;
use crate::data::At;
use crate::error::FsError;
use crate::inode::Inode;
use std::sync::Arc;
use std::time::Duration;

impl LocalFs {
    /// The answer, from a result; what programs need not know is logged.
    fn answer<T>(&self, what: &'static str, ino: Ino, result: Result<T, FsError>) -> Answer<T> {
        result.map_err(|error| Stop::Errno(self.report(what, ino, error)))
    }

    fn inode_for(&self, what: &'static str, ino: Ino) -> Answer<Arc<Inode>> {
        self.answer(what, ino, self.table.need(ino))
    }
}

impl Filesystem for LocalFs {
    fn attach(&self, host: Arc<dyn Host>) {
        *self.host.write() = Some(host);
    }

    fn detach(&self) {
        self.do_detach();
    }

    fn lookup(&self, _cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry> {
        self.answer("lookup", parent, self.do_lookup(parent, name))
    }

    fn forget(&self, ino: Ino, count: u64) {
        if let Some(inode) = self.table.peek(ino) {
            self.forget_inode(&inode, count);
        }
    }

    fn getattr(&self, _cx: &Cx, ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)> {
        fh.map_or(Ok(()), |fh| self.tell_of_failure_behind(ino, fh))?;
        self.answer("getattr", ino, self.do_getattr(ino)).map(|attr| (attr, VALID))
    }

    fn setattr(&self, cx: &Cx, ino: Ino, _fh: Option<u64>, set: &SetAttr) -> Answer<(Attr, Duration)> {
        if set.size.is_none() {
            return self.answer("setattr", ino, self.do_setattr(ino, set)).map(|attr| (attr, VALID));
        }
        let set = *set;
        self.answer_dropping(cx, "setattr", ino, move |fs| Ok((fs.do_setattr(ino, &set)?, VALID)))
    }

    fn readlink(&self, _cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        self.answer("readlink", ino, self.do_readlink(ino))
    }

    fn mknod(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry> {
        match mode & libc::S_IFMT {
            libc::S_IFREG | libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK => {}
            libc::S_IFDIR => return Err(Errno(libc::EPERM).into()),
            _ => return Err(Errno(libc::EINVAL).into()),
        }
        let device = matches!(mode & libc::S_IFMT, libc::S_IFCHR | libc::S_IFBLK);
        let new = New { mode, rdev: if device { rdev } else { 0 }, target: None };
        self.answer("mknod", parent, self.do_make(cx, parent, name, new)).map(|attr| self.entry(attr))
    }

    fn mkdir(&self, cx: &Cx, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry> {
        let new = New { mode: libc::S_IFDIR | mode & 0o1777, rdev: 0, target: None };
        self.answer("mkdir", parent, self.do_make(cx, parent, name, new)).map(|attr| self.entry(attr))
    }

    fn symlink(&self, cx: &Cx, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry> {
        self.answer("symlink", parent, self.do_symlink(cx, parent, name, target)).map(|attr| self.entry(attr))
    }

    fn link(&self, _cx: &Cx, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry> {
        self.answer("link", ino, self.do_link(ino, parent, name)).map(|attr| self.entry(attr))
    }

    fn unlink(&self, _cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        self.answer("unlink", parent, self.do_remove(parent, name, Kind::File))
    }

    fn rmdir(&self, _cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        self.answer("rmdir", parent, self.do_remove(parent, name, Kind::Directory))
    }

    fn rename(
        &self,
        _cx: &Cx,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        self.answer("rename", parent, self.do_rename((parent, name), (new_parent, new_name), flags))
    }

    fn open(&self, cx: &Cx, ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened> {
        let inode = self.inode_for("open", ino)?;
        self.answer("open", ino, self.do_open(cx, &inode, flags, kill_suidgid))
    }

    fn create(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, flags: i32) -> Answer<(Entry, Opened)> {
        let made = self.answer("create", parent, self.do_create(cx, parent, name, mode, flags));
        made.map(|(attr, opened)| (self.entry(attr), opened))
    }

    fn tmpfile(&self, cx: &Cx, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)> {
        let made = self.answer("tmpfile", parent, self.do_tmpfile(cx, parent, mode, flags));
        made.map(|(attr, opened)| (self.entry(attr), opened))
    }

    fn read(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        self.do_read(cx, ino, fh, offset, out)
    }

    fn write(
        &self,
        _cx: &Cx,
        ino: Ino,
        fh: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        kill_suidgid: bool,
    ) -> Answer<u64> {
        let at = if append { At::End } else { At::Offset(offset) };
        let written = self.answer("write", ino, self.do_write(ino, fh, at, data, kill_suidgid));
        if let Err(Stop::Errno(error)) = &written {
            self.failed_behind(ino, fh, *error);
        }
        written
    }

    fn flush(&self, _cx: &Cx, ino: Ino, fh: u64, _lock_owner: u64) -> Answer<()> {
        self.answer("flush", ino, self.do_flush(ino, fh))
    }

    fn release(&self, _cx: &Cx, _ino: Ino, fh: u64) {
        self.do_release(fh);
    }

    fn fsync(&self, cx: &Cx, ino: Ino, fh: u64, _data_only: bool) -> Answer<()> {
        self.do_fsync(cx, ino, fh)
    }

    fn fallocate(&self, cx: &Cx, ino: Ino, fh: u64, mode: i32, offset: u64, len: u64) -> Answer<()> {
        self.answer_dropping(cx, "fallocate", ino, move |fs| fs.do_fallocate(ino, fh, mode, offset, len))
    }

    fn lseek(&self, _cx: &Cx, ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64> {
        self.answer("lseek", ino, self.do_lseek(ino, fh, offset, whence))
    }

    fn copy_file_range(
        &self,
        _cx: &Cx,
        ino_in: Ino,
        fh_in: u64,
        off_in: u64,
        ino_out: Ino,
        fh_out: u64,
        off_out: u64,
        len: u64,
    ) -> Answer<u64> {
        let copied = self.do_copy((ino_in, fh_in, off_in), (ino_out, fh_out, off_out), len);
        self.answer("copy_file_range", ino_out, copied)
    }

    fn opendir(&self, _cx: &Cx, ino: Ino) -> Answer<Opened> {
        self.answer("opendir", ino, self.do_opendir(ino))
    }

    fn readdir(
        &self,
        _cx: &Cx,
        ino: Ino,
        _fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        self.answer("readdir", ino, self.do_readdir(ino, cookie, plus, sink))
    }

    fn releasedir(&self, _cx: &Cx, _ino: Ino, _fh: u64) {}

    fn fsyncdir(&self, cx: &Cx, ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        self.do_fsyncdir(cx, ino)
    }

    fn statfs(&self, _cx: &Cx) -> Answer<Statfs> {
        Ok(self.do_statfs())
    }

    fn setxattr(&self, _cx: &Cx, ino: Ino, name: &[u8], value: &[u8], flags: XattrFlags) -> Answer<()> {
        self.answer("setxattr", ino, self.do_setxattr(ino, name, value, flags))
    }

    fn getxattr(&self, _cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        self.answer("getxattr", ino, self.do_getxattr(ino, name))
    }

    fn listxattr(&self, _cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        self.answer("listxattr", ino, self.do_listxattr(ino))
    }

    fn removexattr(&self, _cx: &Cx, ino: Ino, name: &[u8]) -> Answer<()> {
        self.answer("removexattr", ino, self.do_removexattr(ino, name))
    }

    fn getlk(&self, _cx: &Cx, _ino: Ino, _fh: u64, _lock: &FileLock) -> Answer<FileLock> {
        Err(Errno(libc::ENOSYS).into())
    }

    fn setlk(&self, _cx: &Cx, _ino: Ino, _fh: u64, _lock: &FileLock, _wait: bool) -> Answer<()> {
        Err(Errno(libc::ENOSYS).into())
    }

    fn remote_locks(&self) -> bool {
        false
    }

    fn writeback_cache(&self) -> bool {
        self.options.cache == CacheMode::Writeback
    }

    fn ioctl(&self, cx: &Cx, ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>> {
        match cmd {
            ioctl::SYNC => self.do_sync(cx),
            ioctl::SYNC_FILES => self.do_sync_files(cx, input, out_max),
            ioctl::REPLACE => self.answer("replace", ino, self.do_replace(cx, input)),
            ioctl::STATS => self.answer("stats", ino, self.stats_bytes(out_max)),
            ioctl::SCRUB_START => self.answer("scrub", ino, self.scrub_start(cx, input)),
            ioctl::SCRUB_STOP => self.answer("scrub", ino, self.scrub_stop(cx)),
            ioctl::SCRUB_DAMAGE => self.answer("scrub", ino, self.scrub_damage(cx, input, out_max)),
            ioctl::SCRUB_STATUS => self.answer("scrub", ino, self.scrub_status_bytes(out_max)),
            ioctl::TUNE => self.answer("tune", ino, self.do_tune(cx, input)),
            ioctl::GROW_LOG => self.do_grow_log(cx, input),
            _ => Err(Errno(libc::ENOTTY).into()),
        }
    }
}
