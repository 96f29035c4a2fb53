//! [`WithSnapshots`]: which file system a request is for.

use crate::api::*;
use crate::local::carried::{Carried, CarriedTrees};
use crate::local::local_fs::{AccessTimes, FsOptions, LocalFs, VALID};
use crate::local::pool::{Pool, Work};
use crate::reader::{Outer, Reader};
use crate::snapdir::directory::{Directory, NAME};
use crate::snapdir::number::{DIRECTORY, LIVE_END, Node, Tree};
use crate::snapdir::open::{OPEN_MAX, OpenSnapshots, Source};
use ferry_env::activity::{self, Layer};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Open snapshots have this share of the mount's memory together, at most.
const LENT_SHARE: usize = 4;
/// An open snapshot has at least so much.
const CACHE_MIN: usize = 2 << 20;

/// A volume's file system, with its snapshots below `.snapshots`.
pub struct WithSnapshots {
    live: Arc<LocalFs>,
    directory: Directory,
    open: Arc<OpenSnapshots<Beside>>,
    pool: Arc<Pool<Self, Job>>,
}

impl WithSnapshots {
    /// `None`: the volume is not in a store, or it has given out so many inode numbers that those
    /// of snapshots would not be told apart. `carried`: what this process goes on with.
    pub fn new(live: &Arc<LocalFs>, carried: Option<&Carried>) -> Option<Arc<Self>> {
        live.dev.snapshot_numbers().ok()?;
        if live.counters.next_ino() >= LIVE_END {
            tracing::warn!(volume = live.name, "inode numbers are too high for .snapshots");
            return None;
        }
        let (open_max, cache_bytes) = share(live.options.cache_bytes);
        let source = Beside { live: Arc::clone(live), cache_bytes };
        let random = || CarriedTrees { first: live.env.entropy.next_u64(), numbers: Vec::new() };
        let trees = carried.map_or_else(random, |carried| carried.snapshots().clone());
        if let Some(known) = &live.options.known {
            known.trees_begin(trees.first);
        }
        let fs = Arc::new(Self {
            live: Arc::clone(live),
            directory: Directory::new(Arc::clone(&live.dev), live.now()),
            open: OpenSnapshots::new(source, Arc::clone(&live.env.clock), trees, open_max),
            pool: Arc::default(),
        });
        fs.pool.serve(&fs);
        Some(fs)
    }

    /// What the next process needs, as [`LocalFs::carry`].
    pub fn carry(&self) -> Carried {
        self.live.carry().with_snapshots(self.open.carry())
    }

    /// Requests to snapshots fail from now on. It does not wait for those under way.
    pub fn end(&self) {
        self.open.end();
    }

    /// Closes the snapshots, and waits for requests to them. The volume itself is not closed.
    /// Idempotent.
    pub fn close(&self) {
        self.end();
        self.pool.stop();
        self.open.close();
    }

    /// Makes a request of a snapshot, by a thread of the pool. The answer has the form `T`.
    fn later<T, A>(
        &self,
        cx: &Cx,
        tree: Tree,
        request: impl FnOnce(&Reader) -> Result<T, Errno> + Send + 'static,
    ) -> Answer<A>
    where
        T: Into<Reply> + Send + 'static,
    {
        let parked: Parked<T> = cx.park_in(Layer::Pool, None);
        let operation = activity::operation();
        self.pool.push(Job(Box::new(move |fs| {
            let _resumed = activity::resume(operation);
            let answer = fs.open.with(tree, request);
            parked.complete(answer);
        })));
        Err(Stop::Parked)
    }

    /// Whether the volume has a `.snapshots` of its own, or that cannot be read. Then the name is
    /// the volume's alone.
    fn has_own(&self) -> bool {
        match self.live.do_lookup(ROOT, NAME) {
            Ok(Entry { attr: None, .. }) => false,
            Ok(Entry { attr: Some(attr), .. }) => {
                self.live.forget(attr.ino, 1);
                true
            }
            Err(_) => true,
        }
    }

    fn is_directory(&self, parent: Ino, name: &[u8]) -> bool {
        parent == ROOT && name == NAME && !self.has_own()
    }

    /// Refuses to make a name below `.snapshots`, and the name itself.
    fn may_make(&self, parent: Ino, name: &[u8]) -> Result<(), Errno> {
        is_live(parent)?;
        if self.is_directory(parent, name) { Err(Errno(libc::EEXIST)) } else { Ok(()) }
    }

    /// The same for removing it.
    fn may_remove(&self, parent: Ino, name: &[u8]) -> Result<(), Errno> {
        is_live(parent)?;
        if self.is_directory(parent, name) { Err(Errno(libc::EROFS)) } else { Ok(()) }
    }

    /// The directory. It is looked up, and its attributes are asked for, each time: the list of
    /// snapshots changes without the kernel.
    fn directory_entry(&self) -> Result<Entry, Errno> {
        Ok(Entry {
            attr: Some(self.directory.attr(self.live.now())?),
            entry_valid: Duration::ZERO,
            attr_valid: Duration::ZERO,
        })
    }

    fn look_up_snapshot(&self, cx: &Cx, name: &[u8]) -> Answer<Entry> {
        let Some(number) = self.directory.find(name)? else {
            let never = Duration::ZERO;
            return Ok(Entry { attr: None, entry_valid: never, attr_valid: never });
        };
        let tree = self.open.tree(number)?;
        self.later(cx, tree, move |reader| {
            let (attr, attr_valid) = reader.attributes(tree, ROOT)?;
            Ok(Entry { attr: Some(attr), entry_valid: Duration::ZERO, attr_valid })
        })
    }

    fn read_snapshot(
        &self,
        cx: &Cx,
        tree: Tree,
        ino: Ino,
        offset: u64,
        len: usize,
    ) -> Answer<usize> {
        self.later(cx, tree, move |reader| reader.read(ino, offset, len))
    }
}

impl Drop for WithSnapshots {
    fn drop(&mut self) {
        self.close();
    }
}

/// How many snapshots may be open, and bytes of memory of each.
fn share(cache_bytes: usize) -> (usize, usize) {
    let lent = cache_bytes / LENT_SHARE;
    let open_max = (lent / CACHE_MIN).clamp(1, OPEN_MAX);
    (open_max, (lent / open_max).max(CACHE_MIN))
}

/// Refuses to change what is not in the volume itself.
fn is_live(ino: Ino) -> Result<(), Errno> {
    if Node::of(ino) == Node::Live { Ok(()) } else { Err(Errno(libc::EROFS)) }
}

/// Names, and copies without reading, stay in one tree.
fn same_tree(one: Ino, other: Ino) -> Result<(), Errno> {
    if Node::of(one).is_beside(Node::of(other)) { Ok(()) } else { Err(Errno(libc::EXDEV)) }
}

/// Where snapshots come from: they are opened beside the volume.
struct Beside {
    live: Arc<LocalFs>,
    cache_bytes: usize,
}

impl Source for Beside {
    type Snapshot = Reader;

    fn open(&self, number: u64) -> Result<Reader, Errno> {
        let errno = |error: std::io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
        let dev = self.live.dev.open_snapshot(number).map_err(errno)?;
        let options = FsOptions {
            read_only: true,
            access_times: AccessTimes::Never,
            directory_access_times: false,
            cache_bytes: self.cache_bytes,
            owner: self.live.options.owner,
            ..FsOptions::default()
        };
        let opened = LocalFs::open(dev, options, self.live.env.clone());
        opened.map(Reader::new).map_err(|error| {
            tracing::error!(%error, number, "a snapshot cannot be read");
            Errno(libc::EIO)
        })
    }

    fn close(&self, snapshot: Arc<Reader>) {
        if let Err(error) = snapshot.fs.close() {
            tracing::warn!(%error, "a snapshot was not closed cleanly");
        }
    }

    fn note_tree(&self, number: u64) {
        if let Some(known) = &self.live.options.known {
            known.add_tree(number);
        }
    }

    fn note_open(&self, open: usize) {
        self.live.lend(open * self.cache_bytes);
    }
}

/// A request of a snapshot.
struct Job(Box<dyn FnOnce(&WithSnapshots) + Send>);

impl Work<WithSnapshots> for Job {
    const NAME: &'static str = "ferry-snapdirs";
    const THREADS_MAX: usize = 16;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, fs: &WithSnapshots) {
        these.into_iter().for_each(|Self(job)| job(fs));
    }
}

/// A snapshot never changes.
impl Outer for Tree {
    const VALID: Duration = VALID;

    fn outer(self, ino: Ino) -> Result<Ino, Errno> {
        Self::outer(self, ino)
    }

    fn above_root(self) -> Ino {
        DIRECTORY
    }
}

impl Filesystem for WithSnapshots {
    fn attach(&self, host: Arc<dyn Host>) {
        self.live.attach(host);
    }

    fn detach(&self) {
        self.live.detach();
    }

    fn lookup(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry> {
        match Node::of(parent) {
            Node::Live if self.is_directory(parent, name) => Ok(self.directory_entry()?),
            Node::Live => self.live.lookup(cx, parent, name),
            Node::Directory => match name {
                b"." => Ok(self.directory_entry()?),
                b".." => self.live.lookup(cx, ROOT, b"."),
                _ => self.look_up_snapshot(cx, name),
            },
            Node::Snapshot(_, ROOT) if name == b".." => Ok(self.directory_entry()?),
            // Only the kernel asks so, for a file handle. That may be of an earlier mount, whose
            // trees were other ones.
            Node::Snapshot(..) if name == b"." => Err(Errno(libc::ESTALE).into()),
            Node::Snapshot(tree, ino) => {
                let name = name.to_vec();
                self.later(cx, tree, move |reader| reader.look_up(tree, ino, &name))
            }
        }
    }

    fn finds_end(&self, ino: Ino) -> bool {
        self.live.finds_end(ino)
    }

    fn known_files(&self) -> Vec<Ino> {
        self.live.known_files()
    }

    fn forget(&self, ino: Ino, count: u64) {
        if Node::of(ino) == Node::Live {
            self.live.forget(ino, count);
        }
    }

    fn getattr(&self, cx: &Cx, ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)> {
        match Node::of(ino) {
            Node::Live => self.live.getattr(cx, ino, fh),
            Node::Directory => Ok((self.directory.attr(self.live.now())?, Duration::ZERO)),
            Node::Snapshot(tree, ino) => {
                self.later(cx, tree, move |reader| reader.attributes(tree, ino))
            }
        }
    }

    fn statx(&self, cx: &Cx, ino: Ino) -> Answer<(Attr, Duration, Timestamp)> {
        match Node::of(ino) {
            Node::Live => self.live.statx(cx, ino),
            Node::Directory => {
                let attr = self.directory.attr(self.live.now())?;
                Ok((attr, Duration::ZERO, self.directory.made()))
            }
            Node::Snapshot(tree, ino) => self.later(cx, tree, move |reader| {
                let (attr, _, born) = reader.ask(|fs, cx| fs.statx(cx, ino))?;
                Ok((Attr { ino: tree.outer(attr.ino)?, ..attr }, VALID, born))
            }),
        }
    }

    fn birth_time(&self, ino: Ino) -> Option<Timestamp> {
        if Node::of(ino) == Node::Live { self.live.birth_time(ino) } else { None }
    }

    fn loses_privileges(&self, ino: Ino) -> bool {
        Node::of(ino) == Node::Live && self.live.loses_privileges(ino)
    }

    fn setattr(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: Option<u64>,
        set: &SetAttr,
    ) -> Answer<(Attr, Duration)> {
        is_live(ino)?;
        self.live.setattr(cx, ino, fh, set)
    }

    fn readlink(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        match Node::of(ino) {
            Node::Live => self.live.readlink(cx, ino),
            Node::Directory => Err(Errno(libc::EINVAL).into()),
            Node::Snapshot(tree, ino) => {
                self.later(cx, tree, move |reader| reader.ask(|fs, cx| fs.readlink(cx, ino)))
            }
        }
    }

    fn mknod(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry> {
        self.may_make(parent, name)?;
        self.live.mknod(cx, parent, name, mode, rdev)
    }

    fn mkdir(&self, cx: &Cx, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry> {
        self.may_make(parent, name)?;
        self.live.mkdir(cx, parent, name, mode)
    }

    fn symlink(&self, cx: &Cx, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry> {
        self.may_make(parent, name)?;
        self.live.symlink(cx, parent, name, target)
    }

    fn link(&self, cx: &Cx, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry> {
        same_tree(ino, parent)?;
        self.may_make(parent, name)?;
        self.live.link(cx, ino, parent, name)
    }

    fn unlink(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        self.may_remove(parent, name)?;
        self.live.unlink(cx, parent, name)
    }

    fn rmdir(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()> {
        self.may_remove(parent, name)?;
        self.live.rmdir(cx, parent, name)
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
        same_tree(parent, new_parent)?;
        self.may_remove(parent, name)?;
        self.may_make(new_parent, new_name)?;
        self.live.rename(cx, parent, name, new_parent, new_name, flags)
    }

    fn open(&self, cx: &Cx, ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened> {
        match Node::of(ino) {
            Node::Live => self.live.open(cx, ino, flags, kill_suidgid),
            _ if flags & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY => {
                Err(Errno(libc::EROFS).into())
            }
            Node::Directory => Err(Errno(libc::EISDIR).into()),
            Node::Snapshot(..) => {
                Ok(Opened { keep_cache: true, no_flush: true, ..Opened::default() })
            }
        }
    }

    fn create(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)> {
        self.may_make(parent, name)?;
        self.live.create(cx, parent, name, mode, flags)
    }

    fn tmpfile(&self, cx: &Cx, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)> {
        is_live(parent)?;
        self.live.tmpfile(cx, parent, mode, flags)
    }

    fn read(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        match Node::of(ino) {
            Node::Live => self.live.read(cx, ino, fh, offset, out),
            Node::Directory => Err(Errno(libc::EISDIR).into()),
            Node::Snapshot(tree, ino) => self.read_snapshot(cx, tree, ino, offset, out.len()),
        }
    }

    fn read_pages(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        match Node::of(ino) {
            Node::Live => self.live.read_pages(cx, ino, fh, offset, out),
            _ => self.read(cx, ino, fh, offset, out),
        }
    }

    fn keeps_pages(&self, ino: Ino, fh: u64) -> bool {
        Node::of(ino) == Node::Live && self.live.keeps_pages(ino, fh)
    }

    fn cached_names(&self, inodes: &BTreeSet<Ino>) -> Vec<CachedName> {
        self.live.cached_names(inodes)
    }

    fn open_for_writing(&self) -> Vec<Ino> {
        self.live.open_for_writing()
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
        is_live(ino)?;
        self.live.write(cx, ino, fh, offset, data, append, kill_suidgid)
    }

    fn flush(&self, cx: &Cx, ino: Ino, fh: u64, lock_owner: u64) -> Answer<()> {
        match Node::of(ino) {
            Node::Live => self.live.flush(cx, ino, fh, lock_owner),
            _ => Ok(()),
        }
    }

    fn release(&self, cx: &Cx, ino: Ino, fh: u64) {
        if Node::of(ino) == Node::Live {
            self.live.release(cx, ino, fh);
        }
    }

    fn fsync(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()> {
        match Node::of(ino) {
            Node::Live => self.live.fsync(cx, ino, fh, data_only),
            _ => Ok(()),
        }
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
        is_live(ino)?;
        self.live.fallocate(cx, ino, fh, mode, offset, len)
    }

    fn lseek(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64> {
        match Node::of(ino) {
            Node::Live => self.live.lseek(cx, ino, fh, offset, whence),
            Node::Directory => Err(Errno(libc::EINVAL).into()),
            Node::Snapshot(tree, ino) => self.later(cx, tree, move |reader| {
                reader.ask_of_file(ino, |fs, cx, fh| fs.lseek(cx, ino, fh, offset, whence))
            }),
        }
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
        // The kernel, or the program, then reads and writes.
        same_tree(ino_in, ino_out)?;
        is_live(ino_out)?;
        self.live.copy_file_range(cx, ino_in, fh_in, off_in, ino_out, fh_out, off_out, len)
    }

    fn opendir(&self, cx: &Cx, ino: Ino) -> Answer<Opened> {
        match Node::of(ino) {
            Node::Live => self.live.opendir(cx, ino),
            _ => Ok(Opened::default()),
        }
    }

    fn readdir(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        match Node::of(ino) {
            Node::Live => self.live.readdir(cx, ino, fh, cookie, plus, sink),
            Node::Directory => {
                let root_of = |number| self.open.tree(number)?.outer(ROOT);
                Ok(self.directory.entries(cookie, root_of, sink)?)
            }
            Node::Snapshot(tree, ino) => {
                let into = Listing::new(plus, cx.park.listing_bytes());
                self.later(cx, tree, move |reader| reader.listing(tree, ino, cookie, into))
            }
        }
    }

    fn releasedir(&self, cx: &Cx, ino: Ino, fh: u64) {
        if Node::of(ino) == Node::Live {
            self.live.releasedir(cx, ino, fh);
        }
    }

    fn fsyncdir(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()> {
        match Node::of(ino) {
            Node::Live => self.live.fsyncdir(cx, ino, fh, data_only),
            _ => Ok(()),
        }
    }

    fn statfs(&self, cx: &Cx) -> Answer<Statfs> {
        self.live.statfs(cx)
    }

    fn setxattr(
        &self,
        cx: &Cx,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Answer<()> {
        is_live(ino)?;
        self.live.setxattr(cx, ino, name, value, flags)
    }

    fn getxattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        match Node::of(ino) {
            Node::Live => self.live.getxattr(cx, ino, name),
            Node::Directory => Err(Errno(libc::ENODATA).into()),
            Node::Snapshot(tree, ino) => {
                let name = name.to_vec();
                self.later(cx, tree, move |reader| reader.ask(|fs, cx| fs.getxattr(cx, ino, &name)))
            }
        }
    }

    fn listxattr(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        match Node::of(ino) {
            Node::Live => self.live.listxattr(cx, ino),
            Node::Directory => Ok(Vec::new()),
            Node::Snapshot(tree, ino) => {
                self.later(cx, tree, move |reader| reader.ask(|fs, cx| fs.listxattr(cx, ino)))
            }
        }
    }

    fn removexattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<()> {
        is_live(ino)?;
        self.live.removexattr(cx, ino, name)
    }

    fn getlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock) -> Answer<FileLock> {
        self.live.getlk(cx, ino, fh, lock)
    }

    fn setlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock, wait: bool) -> Answer<()> {
        self.live.setlk(cx, ino, fh, lock, wait)
    }

    fn is_shared(&self) -> bool {
        self.live.is_shared()
    }

    fn writeback_cache(&self) -> bool {
        self.live.writeback_cache()
    }

    fn ioctl(&self, cx: &Cx, ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>> {
        match (Node::of(ino), cmd) {
            (Node::Live, _) => self.live.ioctl(cx, ino, cmd, input, out_max),
            // All that a snapshot has is durable.
            (_, ioctl::WAIT_FILE) => Ok(Vec::new()),
            // These are about the mount, whichever of its files they are asked of.
            (_, ioctl::SYNC | ioctl::WAIT | ioctl::SYNC_FILES | ioctl::STATS) => {
                self.live.ioctl(cx, ROOT, cmd, input, out_max)
            }
            _ => Err(Errno(libc::ENOTTY).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_snapshots_have_a_quarter_of_the_memory_or_what_one_needs() {
        assert_eq!(share(3 << 30), (8, 96 << 20));
        assert_eq!(share(64 << 20), (8, 2 << 20));
        assert_eq!(share(32 << 20), (4, 2 << 20));
        assert_eq!(share(1 << 20), (1, 2 << 20));
    }
}
