//! The file system as a transport sees it: each request as a message, and each answer as a reply.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ferry_fs::*;
use serde_json::Value;

use super::answers::{
    NOT_CACHED, attributes, count, created, cut_off, data, dir_entry, done, entry, is_dir,
    kernel_cached, listing, made, opened, unfit,
};
use super::change::{Key, Pending};
use super::moving::Moving;
use super::names;
use super::notes::NotedDir;
use super::remote::{RemoteFs, caller, number};
use super::tables::Tables;
use super::waiting::{Finish, Keep, Waiting};
use crate::message::{Caller, IO_MAX, LEASED, LEASED_FOUND, Op, Outcome, Purpose};

/// So many files that the kernel knows are told, at most.
const KNOWN_FILES: usize = 64;
/// A file that is no longer is read as a whole, whatever is asked for first.
const READ_WHOLE_MAX: u64 = 64 << 10;
/// A file of which no more than this is to be copied is read and written: so the client has what it
/// has written, and nobody waits for it.
const COPY_MIN: u64 = 1 << 20;
/// Bytes that one request copies within the server: others wait behind it.
const COPY_MAX: u64 = 16 << 20;

impl RemoteFs {
    /// What an open file was opened with, if it can be used.
    pub(super) fn usable(&self, fh: u64) -> Result<i32, Errno> {
        self.tables.lock().usable(fh)
    }

    /// The number of a file that a request opens: the one that a process before has chosen, which
    /// was killed, or a new one.
    fn open_fh(&self, cx: &Cx<'_>) -> Result<u64, Errno> {
        match self.left.opens(number(cx)) {
            Some(fh) => Ok(fh),
            None => self.tables.lock().open_fh(),
        }
    }

    /// Nothing is changed on top of what was lost before the program was told.
    pub(super) fn writable(&self, fh: u64) -> Result<(), Errno> {
        self.tables.lock().writable(fh)
    }

    /// A file handle is opened: the kernel asks for an inode by its number, or for what is above a
    /// directory. Neither is a name.
    fn look_up_handle(&self, cx: &Cx<'_>, ino: Ino, name: &[u8]) -> Answer<Entry> {
        let finish: Finish = Box::new(|fs, outcome| match outcome {
            Outcome::Entry { known: Some(known) } => {
                fs.tables.lock().learn(&known);
                Ok(Reply::Entry(entry(Some(&known))))
            }
            Outcome::Entry { known: None } => Ok(Reply::Entry(entry(None))),
            other => Err(unfit(other)),
        });
        self.send(cx, Op::Lookup { parent: ino, name: name.into() }, finish)
    }

    /// A name was looked up.
    fn looks_at(&self, caller: Caller, parent: Ino, attr: &Attr) {
        if !is_dir(attr) {
            self.does(caller, parent, Purpose::Look {});
        }
    }

    /// Makes something durable; then the descriptor is told of what was lost.
    fn sync_one(
        &self,
        cx: &Cx<'_>,
        op: Op,
        tell: impl Fn(&Tables) -> Result<(), Errno> + Send + Sync + 'static,
    ) -> Answer<()> {
        let finish: Finish = Box::new(move |fs, outcome| {
            let reply = done(outcome)?;
            tell(&fs.tables.lock())?;
            Ok(reply)
        });
        self.send(cx, op, finish)
    }

    /// Keeps the attributes that a request brings which is made now.
    fn keep_attributes(&self) -> Keep {
        let version = self.cache.version();
        Box::new(move |fs, outcome, leased| {
            if let Outcome::Attributes { attr } = outcome
                && leased & LEASED != 0
            {
                fs.link.give_back(&fs.cache.learn_attr(version, attr));
            }
        })
    }

    /// Asks for a read lease that nobody waits for.
    fn ask_for_lease(&self, cx: &Cx, ino: Ino) {
        let keep = self.keep_attributes();
        let waiter =
            Waiting::new(self.this.clone(), (Box::new(|_, _| Ok(Reply::Empty)), Some(keep)), None);
        self.link.request(Pending::new(caller(cx), Op::Getattr { ino }, waiter));
    }

    /// The server's counters, with those of this end.
    fn stats(&self, cx: &Cx<'_>, most: usize) -> Answer<Vec<u8>> {
        let finish: Finish = Box::new(move |fs, outcome| {
            let Reply::Data(bytes) = data(outcome, usize::MAX)? else {
                return Err(Errno(libc::EPROTO));
            };
            let text = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
            let mut stats: Value = serde_json::from_slice(text).map_err(|_| Errno(libc::EPROTO))?;
            if !stats.is_object() {
                return Err(Errno(libc::EPROTO));
            }
            if let (Some(stats), Value::Object(own)) = (stats.as_object_mut(), fs.figures()) {
                stats.extend(own);
            }
            let mut bytes = stats.to_string().into_bytes();
            bytes.push(0);
            if bytes.len() > most { Err(Errno(libc::ERANGE)) } else { Ok(Reply::Data(bytes)) }
        });
        self.send(cx, Op::Stats {}, finish)
    }

    /// Gives the kernel names of a directory of which all names are known when the listing begins.
    fn list_whole(
        &self,
        cx: &Cx<'_>,
        (ino, fh): (Ino, u64),
        cookie: u64,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> bool {
        let all = if cookie == 0 { self.cache.list(ino) } else { None };
        if let Some(all) = &all {
            self.lists(caller(cx), ino, all, true);
        }
        let all = {
            let mut tables = self.tables.lock();
            let Some(dir) = tables.dirs.get_mut(&fh) else { return false };
            if cookie == 0 {
                dir.whole = all;
            }
            let Some(all) = &dir.whole else { return false };
            let all = Arc::clone(all);
            if cookie == 0 {
                tables.note_dir(&NotedDir { fh, ino, names: all.len() as u64 });
            }
            all
        };
        let rest =
            usize::try_from(cookie).ok().and_then(|cookie| all.get(cookie..)).unwrap_or_default();
        let _full = rest.iter().all(|name| sink(&dir_entry(name)));
        true
    }

    /// Gives the kernel names that came with an earlier answer; `false`: there are none for this
    /// place.
    fn list_received(&self, fh: u64, cookie: u64, sink: &mut dyn FnMut(&DirEntry) -> bool) -> bool {
        let mut tables = self.tables.lock();
        let Some(dir) = tables.dirs.get_mut(&fh) else { return false };
        if cookie == 0 || dir.cookie != cookie || dir.names.is_empty() {
            dir.names.clear();
            return false;
        }
        while let Some(name) = dir.names.front() {
            if !sink(&dir_entry(name)) {
                break;
            }
            dir.cookie = name.cookie;
            dir.names.pop_front();
        }
        true
    }
}

impl Filesystem for RemoteFs {
    fn attach(&self, host: Arc<dyn Host>) {
        if let Some(runtime) = &*self.runtime.lock() {
            self.kernel.attach(Arc::clone(&host), runtime.handle().clone());
        }
        if self.left.is_there() {
            self.kernel.forget_all(&*host, self.left.take_known());
        } else {
            self.begin();
        }
    }

    fn goes_on(&self) {
        if self.left.is_there() {
            self.left.end().into_iter().for_each(|seq| self.link.abandon(Key::Change(seq)));
            // Until all is durable that the process before was answered, a crash of the server may
            // cost some of it: nobody has it in a replay log.
            self.link.request(Pending::unattended(Op::Sync {}));
        }
        self.begin();
    }

    fn detach(&self) {
        self.kernel.detach();
        self.close();
    }

    fn lookup(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry> {
        if matches!(name, b"." | b"..") {
            return self.look_up_handle(cx, parent, name);
        }
        match self.cache.lookup(parent, name) {
            Some(None) => return Ok(entry(None)),
            Some(Some(attr)) if self.tables.lock().relearn(attr.ino) => {
                self.is_found(&attr, parent, name);
                self.looks_at(caller(cx), parent, &attr);
                return Ok(kernel_cached(self, attr, Some((parent, name))));
            }
            _ => {}
        }
        let version = self.cache.version();
        let asked = name.to_vec();
        let keep: Keep = Box::new(move |fs, outcome, leased| {
            let Outcome::Entry { known } = outcome else { return };
            let mut surplus = Vec::new();
            if leased & LEASED != 0 || fs.cache.holds(parent) {
                surplus = fs.cache.learn_name(version, parent, &asked, known.as_ref());
            }
            if let Some(known) = known
                && leased & LEASED_FOUND != 0
            {
                surplus.extend(fs.cache.learn_attr(version, &known.attr));
            }
            fs.link.give_back(&surplus);
        });
        let (found, caller) = (name.to_vec(), caller(cx));
        let finish: Finish = Box::new(move |fs, outcome| match outcome {
            Outcome::Entry { known: Some(known) } => {
                fs.tables.lock().learn(&known);
                fs.is_found(&known.attr, parent, &found);
                fs.looks_at(caller, parent, &known.attr);
                Ok(Reply::Entry(kernel_cached(fs, known.attr, Some((parent, &found)))))
            }
            Outcome::Entry { known: None } => Ok(Reply::Entry(entry(None))),
            other => Err(unfit(other)),
        });
        self.send_and_keep(cx, Op::Lookup { parent, name: name.into() }, finish, keep)
    }

    fn forget(&self, ino: Ino, count: u64) {
        self.forget_known(ino, count);
    }

    fn getattr(&self, cx: &Cx, ino: Ino, _fh: Option<u64>) -> Answer<(Attr, Duration)> {
        if let Some(known) = self.cache.attr(ino) {
            return Ok(known);
        }
        let keep = self.keep_attributes();
        let finish: Finish = Box::new(|fs, outcome| match outcome {
            Outcome::Attributes { attr } => {
                let view = fs.cache.show(attr.ino, None);
                let old = || (fs.cache.newest(attr), NOT_CACHED);
                let (attr, valid) = view.map_or_else(old, |view| (view.attr, view.valid));
                Ok(Reply::Attr(attr, valid))
            }
            other => Err(unfit(other)),
        });
        self.send_and_keep(cx, Op::Getattr { ino }, finish, keep)
    }

    fn loses_privileges(&self, ino: Ino) -> bool {
        self.cache.attr(ino).is_none_or(|(attr, _)| posix::has_set_ids(attr.mode))
    }

    fn setattr(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: Option<u64>,
        set: &SetAttr,
    ) -> Answer<(Attr, Duration)> {
        if let Some(fh) = fh.filter(|_| set.size.is_some()) {
            self.writable(fh)?;
        }
        self.change(
            cx,
            Op::Setattr { ino, fh, set: *set },
            Box::new(|_, outcome| attributes(outcome)),
        )
    }

    fn readlink(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        if let Some(target) = self.cache.target(ino) {
            return Ok(target);
        }
        self.send(cx, Op::Readlink { ino }, Box::new(|_, outcome| data(outcome, SYMLINK_MAX)))
    }

    fn mknod(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry> {
        self.change(cx, Op::Mknod { parent, name: name.into(), mode, rdev }, made(parent, name))
    }

    fn mkdir(&self, cx: &Cx, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry> {
        self.change(cx, Op::Mkdir { parent, name: name.into(), mode }, made(parent, name))
    }

    fn symlink(&self, cx: &Cx, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry> {
        self.change(
            cx,
            Op::Symlink { parent, name: name.into(), target: target.into() },
            made(parent, name),
        )
    }

    fn link(&self, cx: &Cx, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry> {
        self.change(cx, Op::Link { ino, parent, name: name.into() }, made(parent, name))
    }

    fn unlink(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        self.does(caller(cx), parent, Purpose::Remove {});
        self.change(
            cx,
            Op::Unlink { parent, name: name.into() },
            Box::new(|_, outcome| done(outcome)),
        )
    }

    fn rmdir(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        self.does(caller(cx), parent, Purpose::Remove {});
        self.change(
            cx,
            Op::Rmdir { parent, name: name.into() },
            Box::new(|_, outcome| done(outcome)),
        )
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
        let op =
            Op::Rename { parent, name: name.into(), new_parent, new_name: new_name.into(), flags };
        let moving = Moving::begin(self, (parent, name.into()), (new_parent, new_name.into()));
        let moved = self.cache.lock().name(parent, name);
        let (from, to) = (name.to_vec(), new_name.to_vec());
        let finish: Finish = Box::new(move |fs, outcome| {
            moving.end(matches!(outcome, Outcome::Done {}).then_some(flags));
            if matches!(outcome, Outcome::Done {}) {
                let mut tables = fs.tables.lock();
                match moved {
                    names::Name::Is(ino) if !flags.exchange => {
                        drop(tables.name(ino, new_parent, &to))
                    }
                    _ => tables.rename((parent, &from), (new_parent, &to), flags.exchange),
                }
            }
            done(outcome)
        });
        self.change(cx, op, finish)
    }

    fn open(&self, cx: &Cx, ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened> {
        let flags = flags | self.open_flags;
        let fh = self.open_fh(cx)?;
        let finish: Finish = Box::new(move |fs, outcome| {
            done(outcome)?;
            fs.tables.lock().add_handle(fh, ino, flags);
            Ok(Reply::Opened(opened(fh)))
        });
        self.change(cx, Op::Open { ino, fh, flags, kill_suidgid }, finish)
    }

    fn create(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)> {
        let flags = flags | self.open_flags;
        let fh = self.open_fh(cx)?;
        let op = Op::Create { parent, name: name.into(), mode, flags, fh };
        self.change(cx, op, created(Some((parent, name.into())), fh, flags))
    }

    fn tmpfile(&self, cx: &Cx, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)> {
        let flags = flags | self.open_flags;
        let fh = self.open_fh(cx)?;
        self.change(cx, Op::Tmpfile { parent, mode, flags, fh }, created(None, fh, flags))
    }

    fn read(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        let quiet = self.usable(fh)? & libc::O_NOATIME != 0;
        if let Some(len) = self.cache.read(ino, offset, out, quiet) {
            return Ok(len);
        }
        let most = out.len().min(IO_MAX);
        let cached = if offset == 0 { self.cache.before_reading(ino) } else { None };
        let Some((size, version)) = cached else {
            let finish: Finish = Box::new(move |fs, outcome| {
                if !quiet {
                    fs.cache.was_read(ino);
                }
                data(outcome, most)
            });
            return self.send(cx, Op::Read { fh, offset, size: most as u32 }, finish);
        };
        // A small file is read as a whole, so that it can be cached.
        let asked = if size <= READ_WHOLE_MAX { most.max(size as usize) } else { most };
        let keep: Keep = Box::new(move |fs, outcome, _| {
            if let Outcome::Data { bytes } = outcome {
                fs.cache.learn_contents(version, ino, bytes);
            }
        });
        let finish: Finish = Box::new(move |fs, outcome| {
            if !quiet {
                fs.cache.was_read(ino);
            }
            data(outcome, asked).map(|reply| cut_off(reply, most))
        });
        self.send_and_keep(cx, Op::Read { fh, offset, size: asked as u32 }, finish, keep)
    }

    fn read_pages(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        if let Some(node) = self.tables.lock().nodes.get_mut(&ino) {
            node.is_mapped = true;
        }
        self.some_mapped.store(true, Ordering::SeqCst);
        // Either the read that follows sees a write, or the writer sees that the file is
        // mapped.
        fence(Ordering::SeqCst);
        if self.cache.map(ino) {
            return self.read(cx, ino, fh, offset, out);
        }
        self.usable(fh)?;
        self.ask_for_lease(cx, ino);
        let most = out.len().min(IO_MAX);
        let finish: Finish = Box::new(move |fs, outcome| {
            // The kernel has the pages locked until it is answered, so it forgets them behind that.
            fs.kernel.forget_unasked(ToForget { contents: vec![ino], ..ToForget::default() });
            data(outcome, most)
        });
        self.send(cx, Op::Read { fh, offset, size: most as u32 }, finish)
    }

    fn keeps_pages(&self, ino: Ino, _fh: u64) -> bool {
        self.some_mapped.load(Ordering::SeqCst)
            && self.tables.lock().nodes.get(&ino).is_some_and(|node| node.is_mapped)
    }

    fn open_for_writing(&self) -> Vec<Ino> {
        self.tables.lock().open_for_writing()
    }

    fn write(
        &self,
        cx: &Cx,
        _ino: Ino,
        fh: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        kill_suidgid: bool,
    ) -> Answer<u64> {
        self.writable(fh)?;
        if data.len() > IO_MAX {
            return Err(Errno(libc::EINVAL).into());
        }
        let op = Op::Write { fh, offset, data: data.into(), append, kill_suidgid };
        self.change(cx, op, Box::new(|_, outcome| count(outcome)))
    }

    fn flush(&self, cx: &Cx, ino: Ino, fh: u64, lock_owner: u64) -> Answer<()> {
        let (has_locks, usable) = {
            let tables = self.tables.lock();
            let whole = tables.tell_of_loss_at_close(fh);
            (tables.has_locks(ino, lock_owner), tables.usable(fh).and(whole))
        };
        if !has_locks {
            return Ok(usable?);
        }
        let lock = FileLock {
            end: u64::MAX,
            kind: libc::F_UNLCK,
            owner: lock_owner,
            ..FileLock::default()
        };
        if let Err(errno) = usable {
            self.give_back_lock(ino, lock);
            return Err(errno.into());
        }
        self.unlock(cx, ino, fh, lock)
    }

    fn release(&self, _cx: &Cx, _ino: Ino, fh: u64) {
        self.release_handle(fh);
    }

    fn fsync(&self, cx: &Cx, _ino: Ino, fh: u64, data_only: bool) -> Answer<()> {
        self.usable(fh)?;
        self.sync_one(cx, Op::Fsync { fh, data_only }, move |tables| tables.tell_of_loss(fh))
    }

    fn fallocate(
        &self,
        cx: &Cx,
        _ino: Ino,
        fh: u64,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Answer<()> {
        self.writable(fh)?;
        self.change(
            cx,
            Op::Fallocate { fh, mode, offset, len },
            Box::new(|_, outcome| done(outcome)),
        )
    }

    fn lseek(&self, cx: &Cx, _ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64> {
        self.usable(fh)?;
        self.send(cx, Op::Lseek { fh, offset, whence }, Box::new(|_, outcome| count(outcome)))
    }

    fn copy_file_range(
        &self,
        cx: &Cx,
        ino_in: Ino,
        fh_in: u64,
        off_in: u64,
        _ino_out: Ino,
        fh_out: u64,
        off_out: u64,
        len: u64,
    ) -> Answer<u64> {
        self.usable(fh_in)?;
        self.writable(fh_out)?;
        let left = self.cache.attr(ino_in).map(|(attr, _)| attr.size.saturating_sub(off_in));
        if left.is_some_and(|left| left.min(len) <= COPY_MIN) {
            return Err(Errno(libc::EOPNOTSUPP).into());
        }
        let len = len.min(COPY_MAX);
        let op = Op::Copy { fh_in, off_in, fh_out, off_out, len };
        self.change(cx, op, Box::new(|_, outcome| count(outcome)))
    }

    fn opendir(&self, _cx: &Cx, ino: Ino) -> Answer<Opened> {
        let mut tables = self.tables.lock();
        let fh = tables.fresh_fh();
        tables.add_dir(fh, ino);
        Ok(Opened { fh, ..Opened::default() })
    }

    fn readdir(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        cookie: u64,
        _plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        let Some(cookie) = self.tables.lock().listing_goes_on(fh, cookie) else { return Ok(()) };
        if self.list_whole(cx, (ino, fh), cookie, sink) || self.list_received(fh, cookie, sink) {
            return Ok(());
        }
        let caller = caller(cx);
        let finish: Finish = Box::new(move |fs, outcome| match outcome {
            Outcome::Listing { names } => {
                fs.lists(caller, ino, &names.0, cookie == 0);
                Ok(Reply::Dir(listing(fs, fh, names.0)))
            }
            other => Err(unfit(other)),
        });
        self.send(cx, Op::Readdir { ino, cookie }, finish)
    }

    fn releasedir(&self, _cx: &Cx, _ino: Ino, fh: u64) {
        self.tables.lock().remove_dir(fh);
    }

    fn fsyncdir(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()> {
        self.sync_one(cx, Op::Fsyncdir { ino, data_only }, move |tables| {
            tables.tell_of_loss_in(ino, fh)
        })
    }

    fn statfs(&self, cx: &Cx) -> Answer<Statfs> {
        let finish: Finish = Box::new(|_, outcome| match outcome {
            Outcome::Totals { totals } => Ok(Reply::Statfs(totals)),
            other => Err(unfit(other)),
        });
        self.send(cx, Op::Statfs {}, finish)
    }

    fn setxattr(
        &self,
        cx: &Cx,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Answer<()> {
        let op = Op::Setxattr { ino, name: name.into(), value: value.into(), flags };
        self.change(cx, op, Box::new(|_, outcome| done(outcome)))
    }

    fn getxattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        if self.cache.is_plain(ino) {
            return Err(Errno(libc::ENODATA).into());
        }
        let op = Op::Getxattr { ino, name: name.into() };
        self.send(cx, op, Box::new(|_, outcome| data(outcome, XATTR_SIZE_MAX)))
    }

    fn listxattr(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        if self.cache.is_plain(ino) {
            return Ok(Vec::new());
        }
        self.send(cx, Op::Listxattr { ino }, Box::new(|_, outcome| data(outcome, XATTR_SIZE_MAX)))
    }

    fn removexattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<()> {
        self.change(
            cx,
            Op::Removexattr { ino, name: name.into() },
            Box::new(|_, outcome| done(outcome)),
        )
    }

    fn getlk(&self, cx: &Cx, ino: Ino, _fh: u64, lock: &FileLock) -> Answer<FileLock> {
        self.blocker(cx, ino, *lock)
    }

    fn setlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock, wait: bool) -> Answer<()> {
        if lock.kind == libc::F_UNLCK {
            self.unlock(cx, ino, fh, *lock)
        } else {
            self.lock(cx, ino, fh, *lock, wait)
        }
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn left_to_forget(&self, left: ToForget) {
        self.kernel.left(left);
    }

    fn known_files(&self) -> Vec<Ino> {
        self.tables.lock().handles.values().map(|handle| handle.ino).take(KNOWN_FILES).collect()
    }

    fn writeback_cache(&self) -> bool {
        false
    }

    fn ioctl(
        &self,
        cx: &Cx,
        _ino: Ino,
        cmd: u32,
        _input: &[u8],
        out_max: usize,
    ) -> Answer<Vec<u8>> {
        match cmd {
            ioctl::SYNC => {
                let finish: Finish = Box::new(move |fs, outcome| {
                    let bytes = data(outcome, 0)?;
                    fs.tables.lock().tell_of_any_loss()?;
                    Ok(bytes)
                });
                self.send(cx, Op::Sync {}, finish)
            }
            ioctl::STATS => self.stats(cx, out_max),
            _ => Err(Errno(libc::ENOTTY).into()),
        }
    }
}
