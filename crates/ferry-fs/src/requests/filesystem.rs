//! The file system as a transport sees it: every request, its checks of the request itself, and its
//! answer.

use crate::api::*;
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::inprocess::FromReply;
use crate::known::inode_flag;
use crate::local::local_fs::{CacheMode, LocalFs, VALID};
use crate::local::transaction::How;
use crate::namespace::create::New;
use crate::namespace::remove::Kind;
use crate::posix;
use crate::requests::contents::COPY_MAX;
use crate::requests::durable::Until;
use crate::requests::trim::fitrim_answer;
use crate::store::data_store::{At, Busy};
use ferry_journal::Caller;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// So many files that the kernel knows are named: it may have forgotten some.
const KNOWN_FILES: usize = 64;

impl LocalFs {
    /// The answer, from a result; what programs need not know is logged.
    fn answer<T>(&self, what: &'static str, ino: Ino, result: Result<T, FsError>) -> Answer<T> {
        result.map_err(|error| Stop::Errno(self.report(what, ino, error)))
    }

    /// The answer to a request that this thread makes; if it would have to wait, to what is done
    /// `elsewhere`.
    fn answer_or<T>(
        &self,
        cx: &Cx,
        (what, ino): (&'static str, Ino),
        request: impl FnOnce() -> Result<T, FsError>,
        elsewhere: impl FnOnce() -> Answer<T>,
    ) -> Answer<T> {
        match self.at_once(cx, request) {
            Err(FsError::WouldWait) => elsewhere(),
            result => self.answer(what, ino, result),
        }
    }

    /// The same for a change. A change that would have had to wait runs once more, by `again`, on a
    /// thread that may wait.
    fn answer_change<T, F>(
        &self,
        cx: &Cx,
        (what, ino): (&'static str, Ino),
        change: impl FnOnce() -> Result<T, FsError>,
        again: impl FnOnce() -> F,
    ) -> Answer<T>
    where
        T: Into<Reply> + FromReply,
        F: FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    {
        self.answer_or(cx, (what, ino), change, || self.later(cx, again()))
    }

    /// The same for a request that changes nothing.
    fn answer_read<T, F>(
        &self,
        cx: &Cx,
        (what, ino): (&'static str, Ino),
        read: impl FnOnce() -> Result<T, FsError>,
        again: impl FnOnce() -> F,
    ) -> Answer<T>
    where
        T: Into<Reply> + FromReply,
        F: FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    {
        self.answer_or(cx, (what, ino), read, || self.read_later(cx, again()))
    }
}

impl LocalFs {
    /// Lists a directory as [`Filesystem::readdir`] with attributes, on a thread that may wait. No
    /// access time changes.
    pub fn survey(
        &self,
        dir: Ino,
        cookie: u64,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Result<(), Errno> {
        self.do_survey(dir, cookie, sink).map_err(|error| self.report("survey", dir, error))
    }
}

impl Filesystem for LocalFs {
    fn attach(&self, host: Arc<dyn Host>) {
        // The caller has given the holder what the process behind this one goes on from.
        self.journal.forget_left();
        if let Some(known) = self.stale.lock().take() {
            host.forget_all(known, Box::new(|| ()));
        }
        *self.host.write() = Some(host);
    }

    fn detach(&self) {
        self.do_detach();
    }

    fn lookup(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry> {
        let look_up = || self.do_lookup(parent, name);
        self.answer_read(cx, ("lookup", parent), look_up, || {
            let name = name.to_vec();
            move |fs, cx| fs.lookup(cx, parent, &name).inspect(|entry| fs.load_around(entry))
        })
    }

    fn forget(&self, ino: Ino, count: u64) {
        match self.table.forget(ino, count) {
            Some(inode) => self.forget_inode(&inode, count),
            None => self.note_forgotten(ino, count),
        }
    }

    fn getattr(&self, cx: &Cx, ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)> {
        fh.map_or(Ok(()), |fh| self.tell_deferred_error(ino, fh))?;
        let read = || Ok((self.do_getattr(ino)?, VALID));
        self.answer_read(cx, ("getattr", ino), read, || move |fs, cx| fs.getattr(cx, ino, None))
    }

    fn statx(&self, cx: &Cx, ino: Ino) -> Answer<(Attr, Duration, Timestamp)> {
        let read = || {
            let attr = self.do_getattr(ino)?;
            Ok((attr, VALID, self.do_birth_time(ino)?))
        };
        self.answer_read(cx, ("statx", ino), read, || move |fs, cx| fs.statx(cx, ino))
    }

    fn birth_time(&self, ino: Ino) -> Option<Timestamp> {
        // What is not there is told so when its attributes are asked for.
        Some(self.do_birth_time(ino).unwrap_or_default())
    }

    fn loses_privileges(&self, ino: Ino) -> bool {
        let mode = |inode: Arc<Inode>| inode.state.share().rec.mode;
        self.table.need(ino).map(mode).is_ok_and(posix::has_set_ids)
    }

    fn setattr(
        &self,
        cx: &Cx,
        ino: Ino,
        _fh: Option<u64>,
        set: &SetAttr,
    ) -> Answer<(Attr, Duration)> {
        let Some(new) = set.size else {
            let set = *set;
            let change = || Ok((self.do_setattr(self.how(cx), ino, &set)?, VALID));
            return self.answer_change(cx, ("setattr", ino), change, || {
                move |fs, cx| fs.setattr(cx, ino, None, &set)
            });
        };
        let (set, ack) = (*set, cx.early_ack());
        let drops = |size| new < size;
        self.answer_dropping(cx, "setattr", ino, 0, drops, move |fs| {
            Ok((fs.do_setattr(How::waiting(ack), ino, &set)?, VALID))
        })
    }

    fn readlink(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        let read = || self.do_readlink(ino);
        self.answer_read(cx, ("readlink", ino), read, || move |fs, cx| fs.readlink(cx, ino))
    }

    fn mknod(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry> {
        match mode & libc::S_IFMT {
            libc::S_IFREG | libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK => {}
            libc::S_IFDIR => return Err(Errno(libc::EPERM).into()),
            _ => return Err(Errno(libc::EINVAL).into()),
        }
        let device = matches!(mode & libc::S_IFMT, libc::S_IFCHR | libc::S_IFBLK);
        let new = New { mode, rdev: if device { rdev } else { 0 }, target: None };
        let make = || Ok(self.entry(self.do_make(cx, parent, name, new)?));
        self.answer_change(cx, ("mknod", parent), make, || {
            let name = name.to_vec();
            move |fs, cx| fs.mknod(cx, parent, &name, mode, rdev)
        })
    }

    fn mkdir(&self, cx: &Cx, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry> {
        let new = New { mode: libc::S_IFDIR | mode & 0o1777, rdev: 0, target: None };
        let make = || Ok(self.entry(self.do_make(cx, parent, name, new)?));
        self.answer_change(cx, ("mkdir", parent), make, || {
            let name = name.to_vec();
            move |fs, cx| fs.mkdir(cx, parent, &name, mode)
        })
    }

    fn symlink(&self, cx: &Cx, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry> {
        let make = || Ok(self.entry(self.do_symlink(cx, parent, name, target)?));
        self.answer_change(cx, ("symlink", parent), make, || {
            let (name, target) = (name.to_vec(), target.to_vec());
            move |fs, cx| fs.symlink(cx, parent, &name, &target)
        })
    }

    fn link(&self, cx: &Cx, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry> {
        let link = || Ok(self.entry(self.do_link(self.how(cx), ino, parent, name)?));
        self.answer_change(cx, ("link", ino), link, || {
            let name = name.to_vec();
            move |fs, cx| fs.link(cx, ino, parent, &name)
        })
    }

    fn unlink(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        let remove = || self.do_remove(self.how(cx), parent, name, Kind::File);
        self.answer_change(cx, ("unlink", parent), remove, || {
            let name = name.to_vec();
            move |fs, cx| fs.unlink(cx, parent, &name)
        })
    }

    fn rmdir(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        let remove = || self.do_remove(self.how(cx), parent, name, Kind::Directory);
        self.answer_change(cx, ("rmdir", parent), remove, || {
            let name = name.to_vec();
            move |fs, cx| fs.rmdir(cx, parent, &name)
        })
    }

    fn rename(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let rename = || {
            let (from, to) = ((parent, name), (new_parent, new_name));
            self.do_rename(self.how(cx), from, to, flags, (cx.uid, cx.gid))
        };
        self.answer_change(cx, ("rename", parent), rename, || {
            let (name, new_name) = (name.to_vec(), new_name.to_vec());
            move |fs, cx| fs.rename(cx, parent, &name, new_parent, &new_name, flags)
        })
    }

    fn open(&self, cx: &Cx, ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened> {
        let open = || self.do_open(cx, &self.table.need(ino)?, flags, kill_suidgid);
        self.answer_change(cx, ("open", ino), open, || {
            move |fs, cx| fs.open(cx, ino, flags, kill_suidgid)
        })
    }

    fn create(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)> {
        let make = || {
            let (attr, opened) = self.do_create(cx, parent, name, mode, flags)?;
            Ok((self.entry(attr), opened))
        };
        self.answer_change(cx, ("create", parent), make, || {
            let name = name.to_vec();
            move |fs, cx| fs.create(cx, parent, &name, mode, flags)
        })
    }

    fn tmpfile(&self, cx: &Cx, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)> {
        let make = || {
            let (attr, opened) = self.do_tmpfile(cx, parent, mode, flags)?;
            Ok((self.entry(attr), opened))
        };
        self.answer_change(cx, ("tmpfile", parent), make, || {
            move |fs, cx| fs.tmpfile(cx, parent, mode, flags)
        })
    }

    fn read(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        self.do_read(cx, (ino, fh), offset, out, false)
    }

    fn read_pages(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        self.do_read(cx, (ino, fh), offset, out, true)
    }

    fn keeps_pages(&self, ino: Ino, fh: u64) -> bool {
        self.is_mapped_past(ino, fh)
    }

    fn finds_end(&self, ino: Ino) -> bool {
        self.has_lost(ino, inode_flag::RESIZED)
    }

    fn known_files(&self) -> Vec<Ino> {
        let is_known = |inode: &Arc<Inode>| inode.lookups.load(Ordering::Acquire) > 0;
        let all = self.table.all().into_iter().filter(is_known);
        let files = all.filter(|inode| {
            inode.state.try_share().is_some_and(|state| posix::is_regular(state.rec.mode))
        });
        files.take(KNOWN_FILES).map(|inode| inode.ino).collect()
    }

    fn cached_names(&self, inodes: &BTreeSet<Ino>) -> Vec<CachedName> {
        // A file may have a million names.
        let one_of_each = self.table.cached_names(inodes).map(|name| (name.0, name));
        one_of_each.collect::<BTreeMap<_, _>>().into_values().collect()
    }

    fn open_for_writing(&self) -> Vec<Ino> {
        self.handles.open_for_writing()
    }

    fn write(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        kill_suidgid: bool,
    ) -> Answer<u64> {
        let waits = self.data.holds_writers() || (kill_suidgid && self.journal.is_short(true));
        if waits && self.patience(cx) == Busy::Refuse {
            let data = data.to_vec();
            return self.later(cx, move |fs, cx| {
                fs.write(cx, ino, fh, offset, &data, append, kill_suidgid)
            });
        }
        let at = if append { At::End } else { At::Offset(offset) };
        let how = How { busy: self.patience(cx), ..How::waiting(cx.early_ack()) };
        let written = match self.do_write(how, ino, fh, at, data, kill_suidgid) {
            Err(FsError::WouldWait) => {
                let data = data.to_vec();
                return self.later(cx, move |fs, cx| {
                    fs.write(cx, ino, fh, offset, &data, append, kill_suidgid)
                });
            }
            written => self.answer("write", ino, written),
        };
        if let Err(Stop::Errno(error)) = &written {
            self.note_deferred_error(ino, fh, *error);
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

    fn fallocate(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Answer<()> {
        let drops = |_| mode & !libc::FALLOC_FL_KEEP_SIZE != 0;
        let (ack, kill) = (cx.early_ack(), cx.uid != 0);
        let change = move |fs: &Self| fs.do_fallocate(ack, (ino, fh), mode, (offset, len), kill);
        self.answer_dropping(cx, "fallocate", ino, len, drops, change)
    }

    fn lseek(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64> {
        // The kernel does not hand over first what it holds back: that would be called a hole. It
        // takes all of a file for data instead.
        if self.writeback_cache() {
            return Err(Errno(libc::ENOSYS).into());
        }
        if self.data.is_refused(self.patience(cx)) {
            return self.read_later(cx, move |fs, cx| fs.lseek(cx, ino, fh, offset, whence));
        }
        self.answer("lseek", ino, self.do_lseek(ino, fh, offset, whence))
    }

    fn copy_file_range(
        &self,
        cx: &Cx,
        ino_in: Ino,
        fh_in: u64,
        off_in: u64,
        ino_out: Ino,
        fh_out: u64,
        off_out: u64,
        len: u64,
    ) -> Answer<u64> {
        let waits = self.data.holds_writers()
            || self.data.is_short_of(len.min(COPY_MAX))
            || self.data.is_far();
        if waits && self.patience(cx) == Busy::Refuse {
            return self.later(cx, move |fs, cx| {
                fs.copy_file_range(cx, ino_in, fh_in, off_in, ino_out, fh_out, off_out, len)
            });
        }
        let copied = self.do_copy(
            cx.early_ack(),
            (ino_in, fh_in, off_in),
            (ino_out, fh_out, off_out),
            len,
            cx.uid != 0,
        );
        self.answer("copy_file_range", ino_out, copied)
    }

    fn opendir(&self, cx: &Cx, ino: Ino) -> Answer<Opened> {
        let open = || self.do_opendir(ino);
        self.answer_read(cx, ("opendir", ino), open, || move |fs, cx| fs.opendir(cx, ino))
    }

    fn readdir(
        &self,
        cx: &Cx,
        ino: Ino,
        _fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        let list = || self.do_readdir(ino, cookie, plus, sink);
        self.answer_or(cx, ("readdir", ino), list, || self.list_later(cx, ino, cookie, plus))
    }

    fn releasedir(&self, _cx: &Cx, _ino: Ino, _fh: u64) {}

    fn fsyncdir(&self, cx: &Cx, ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        self.do_fsyncdir(cx, ino)
    }

    fn statfs(&self, _cx: &Cx) -> Answer<Statfs> {
        Ok(self.do_statfs())
    }

    fn setxattr(
        &self,
        cx: &Cx,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Answer<()> {
        let set = || self.do_setxattr(self.how(cx), ino, name, value, flags);
        self.answer_change(cx, ("setxattr", ino), set, || {
            let (name, value) = (name.to_vec(), value.to_vec());
            move |fs, cx| fs.setxattr(cx, ino, &name, &value, flags)
        })
    }

    fn getxattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        let read = || self.do_getxattr(ino, name);
        self.answer_read(cx, ("getxattr", ino), read, || {
            let name = name.to_vec();
            move |fs, cx| fs.getxattr(cx, ino, &name)
        })
    }

    fn listxattr(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        let read = || self.do_listxattr(ino);
        self.answer_read(cx, ("listxattr", ino), read, || move |fs, cx| fs.listxattr(cx, ino))
    }

    fn removexattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<()> {
        let remove = || self.do_removexattr(self.how(cx), ino, name);
        self.answer_change(cx, ("removexattr", ino), remove, || {
            let name = name.to_vec();
            move |fs, cx| fs.removexattr(cx, ino, &name)
        })
    }

    fn getlk(&self, _cx: &Cx, _ino: Ino, _fh: u64, _lock: &FileLock) -> Answer<FileLock> {
        Err(Errno(libc::ENOSYS).into())
    }

    fn setlk(&self, _cx: &Cx, _ino: Ino, _fh: u64, _lock: &FileLock, _wait: bool) -> Answer<()> {
        Err(Errno(libc::ENOSYS).into())
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn writeback_cache(&self) -> bool {
        self.options.cache == CacheMode::Writeback
    }

    fn ioctl(&self, cx: &Cx, ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>> {
        match cmd {
            ioctl::SYNC => self.do_sync(cx, Until::Forced(Caller(cx.pid))),
            ioctl::WAIT => self.do_wait(cx),
            ioctl::WAIT_FILE => self.do_wait_file(cx, ino),
            ioctl::SYNC_FILES => self.do_sync_files(cx, input, out_max),
            ioctl::REPLACE => self.answer("replace", ino, self.do_replace(cx, input)),
            ioctl::STATS => self.answer("stats", ino, self.stats_bytes(out_max)),
            ioctl::SCRUB_START => self.answer("scrub", ino, self.scrub_start(cx, input)),
            ioctl::SCRUB_STOP => self.answer("scrub", ino, self.scrub_stop(cx)),
            ioctl::SCRUB_DAMAGE => self.answer("scrub", ino, self.scrub_damage(cx, input, out_max)),
            ioctl::SCRUB_STATUS => self.answer("scrub", ino, self.scrub_status_bytes(out_max)),
            ioctl::TUNE => self.answer("tune", ino, self.do_tune(cx, input)),
            ioctl::GROW_LOG => self.do_grow_log(cx, input),
            ioctl::RESIZE => self.do_resize(cx, input),
            ioctl::TRIM => self.do_trim(cx, |bytes| bytes.to_ne_bytes().to_vec()),
            ioctl::WARM => self.do_warm(cx, input),
            ioctl::SNAPSHOT_CREATE | ioctl::SNAPSHOT_DELETE => {
                self.do_change_snapshots(cx, cmd, input)
            }
            ioctl::SNAPSHOT_LIST => {
                self.answer("list snapshots", ino, self.do_list_snapshots(cx, input, out_max))
            }
            ioctl::FITRIM => self.do_trim(cx, fitrim_answer),
            _ => Err(Errno(libc::ENOTTY).into()),
        }
    }
}
