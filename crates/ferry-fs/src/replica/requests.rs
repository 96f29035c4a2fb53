//! [`Replica`]: requests, and the version that answers them.

use crate::api::*;
use crate::local::local_fs::CacheMode;
use crate::local::pool::{Pool, Work};
use crate::replica::carried::CarriedReplica;
use crate::replica::follow::{Following, Lag, ReplicaOptions, Version, Versions};
use crate::replica::showing::{Current, Request};
use crate::requests::stats::ended;
use crate::volume::VolumeError;
use ferry_env::Env;
use ferry_env::activity::{self, Layer, Operation};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The thread that looks for versions has so long to end, and is looked at so often.
const FOLLOWER_END: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);
/// So many open files are named to a transport that needs one that the kernel knows.
const KNOWN_FILES: usize = 1024;

/// A file system that shows the newest version of a volume. The module's documentation has the
/// rules.
pub struct Replica {
    pub(crate) following: Arc<Following>,
    reads: Arc<Pool<Self, Read>>,
    others: Arc<Pool<Self, Other>>,
    /// The handle of the next directory that is opened; no process before has given it.
    directories: AtomicU64,
    follower: Mutex<Option<(Sender<()>, JoinHandle<()>)>>,
}

impl Replica {
    /// Shows `first`, and then what `source` finds. `begun`: when the look began that found it,
    /// by the clock that counts sleep. `before`: what the process before has left, if this one goes
    /// on with its mount.
    pub fn open(
        (first, begun): (&Version, Duration),
        before: Option<&CarriedReplica>,
        source: Box<dyn Versions>,
        options: ReplicaOptions,
        env: Env,
    ) -> Result<Arc<Self>, VolumeError> {
        let directories = AtomicU64::new(env.entropy.next_u64());
        let following = Arc::new(Following::open((first, begun), before, options, env)?);
        let (stop, stopped) = channel();
        let theirs = Arc::clone(&following);
        let thread =
            Builder::new().name("ferry-replica".into()).spawn(move || theirs.run(source, &stopped));
        let failed = |source| VolumeError::Io { what: "start a thread", source };
        let replica = Arc::new(Self {
            following,
            reads: Arc::default(),
            others: Arc::default(),
            directories,
            follower: Mutex::new(Some((stop, thread.map_err(failed)?))),
        });
        replica.reads.serve(&replica);
        replica.others.serve(&replica);
        Ok(replica)
    }

    /// How far behind the volume it is.
    pub fn lag(&self) -> Lag {
        self.following.lag()
    }

    /// Counters of what is shown now, and how far behind it is, as JSON.
    pub fn stats(&self) -> serde_json::Value {
        let mut stats = self.following.showing.now().reader.fs.stats();
        let lag = serde_json::to_value(self.lag());
        stats["replica"] = lag.expect("plain numbers and strings are JSON");
        stats["replica"]["files_held"] = self.following.showing.held().into();
        stats["fuse"] =
            self.following.showing.host().map_or(serde_json::Value::Null, |host| host.stats());
        stats
    }

    /// What the next process needs. No request is under way, and none comes any more.
    pub fn carry(&self) -> CarriedReplica {
        self.following.carry()
    }

    /// Does this while no newer version is turned to: another process takes over the mount then,
    /// and the kernel must not wait for pages that nobody reads.
    pub fn without_turns<T>(&self, work: impl FnOnce() -> T) -> T {
        self.following.without_turns(work)
    }

    /// From now on `bytes` of memory may be used, no more than it was opened with.
    pub fn set_memory_limit(&self, bytes: usize) {
        self.following.set_memory_limit(bytes);
    }

    /// Requests fail from now on, and nothing newer is looked for. It does not wait for what is
    /// under way.
    pub fn end(&self) {
        self.following.showing.end();
    }

    /// Ends, and waits for what is under way. Idempotent.
    pub fn close(&self) {
        self.end();
        if let Some((stop, thread)) = self.follower.lock().take() {
            drop(stop);
            let clock = &self.following.env.clock;
            let end = clock.monotonic() + FOLLOWER_END;
            while !thread.is_finished() && clock.monotonic() < end {
                std::thread::park_timeout(LOOK);
            }
            // It only reads, and may wait for the store for long: the process ends without it.
            if thread.is_finished() && thread.join().is_err() {
                tracing::error!("the thread that follows the volume panicked");
            }
        }
        self.reads.stop();
        self.others.stop();
    }

    /// Drops a version that is held no more, by a thread that may wait.
    fn leave(&self, version: Option<Arc<Current>>) {
        if let Some(version) = version {
            self.others.push(Other(Box::new(move |_| drop(version))));
        }
    }

    /// Makes a request of the version that is shown, by a thread that may wait. The answer has
    /// the form `T`.
    fn later<T, A>(
        &self,
        cx: &Cx,
        number: Ino,
        request: impl Fn(&Current, Ino) -> Result<T, Errno> + Send + 'static,
    ) -> Answer<A>
    where
        T: Into<Reply> + Send + 'static,
    {
        self.others.push(Other(run(cx, Request::Other, number, request)));
        Err(Stop::Parked)
    }

    /// The same for a read of contents.
    fn read_later<T, A>(
        &self,
        cx: &Cx,
        number: Ino,
        request: impl Fn(&Current, Ino) -> Result<T, Errno> + Send + 'static,
    ) -> Answer<A>
    where
        T: Into<Reply> + Send + 'static,
    {
        self.reads.push(Read(run(cx, Request::Contents, number, request)));
        Err(Stop::Parked)
    }
}

/// Parks a request: what a thread does to answer it.
fn run<T: Into<Reply> + Send + 'static>(
    cx: &Cx,
    kind: Request,
    number: Ino,
    request: impl Fn(&Current, Ino) -> Result<T, Errno> + Send + 'static,
) -> Run {
    let parked: Parked<T> = cx.park_in(Layer::Pool, None);
    let operation = activity::operation();
    Box::new(move |replica| {
        let _resumed = activity::resume(operation);
        parked.complete(replica.following.showing.with(kind, number, request));
    })
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.close();
    }
}

type Run = Box<dyn FnOnce(&Replica) + Send>;

/// A read of contents.
struct Read(Run);

/// Another request.
struct Other(Run);

impl Work<Replica> for Read {
    const NAME: &'static str = "ferry-reads";
    const THREADS_MAX: usize = 16;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, replica: &Replica) {
        these.into_iter().for_each(|Self(run)| run(replica));
    }
}

impl Work<Replica> for Other {
    const NAME: &'static str = "ferry-names";
    const THREADS_MAX: usize = 16;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, replica: &Replica) {
        these.into_iter().for_each(|Self(run)| run(replica));
    }
}

/// Nothing is changed here.
fn refused<T>() -> Answer<T> {
    Err(Errno(libc::EROFS).into())
}

impl Filesystem for Replica {
    fn attach(&self, host: Arc<dyn Host>) {
        let showing = &self.following.showing;
        showing.set_host(Some(Arc::clone(&host)));
        if let Some(files) = showing.older_pages() {
            let following = Arc::clone(&self.following);
            host.forget_contents(files, Box::new(move || following.showing.taken_over()));
        }
    }

    fn detach(&self) {
        self.following.showing.set_host(None);
    }

    fn lookup(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry> {
        let name = name.to_vec();
        self.later(cx, parent, move |current, parent| {
            current.reader.look_up(current.timeline, parent, &name)
        })
    }

    fn forget(&self, _ino: Ino, _count: u64) {}

    fn getattr(&self, cx: &Cx, ino: Ino, _fh: Option<u64>) -> Answer<(Attr, Duration)> {
        self.later(cx, ino, |current, ino| current.attributes(ino))
    }

    fn statx(&self, cx: &Cx, ino: Ino) -> Answer<(Attr, Duration, Timestamp)> {
        self.later(cx, ino, |current, ino| {
            let (attr, valid) = current.attributes(ino)?;
            let born = current.reader.fs.birth_time(ino).unwrap_or_default();
            Ok((attr, valid, born))
        })
    }

    fn setattr(
        &self,
        _cx: &Cx,
        _ino: Ino,
        _fh: Option<u64>,
        _set: &SetAttr,
    ) -> Answer<(Attr, Duration)> {
        refused()
    }

    fn readlink(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        self.later(cx, ino, |current, ino| current.reader.ask(|fs, cx| fs.readlink(cx, ino)))
    }

    fn mknod(&self, _: &Cx, _: Ino, _: &[u8], _: Mode, _: u32) -> Answer<Entry> {
        refused()
    }

    fn mkdir(&self, _: &Cx, _: Ino, _: &[u8], _: u32) -> Answer<Entry> {
        refused()
    }

    fn symlink(&self, _: &Cx, _: Ino, _: &[u8], _: &[u8]) -> Answer<Entry> {
        refused()
    }

    fn link(&self, _: &Cx, _: Ino, _: Ino, _: &[u8]) -> Answer<Entry> {
        refused()
    }

    fn unlink(&self, _: &Cx, _: Ino, _: &[u8]) -> Answer<()> {
        refused()
    }

    fn rmdir(&self, _: &Cx, _: Ino, _: &[u8]) -> Answer<()> {
        refused()
    }

    fn rename(&self, _: &Cx, _: Ino, _: &[u8], _: Ino, _: &[u8], _: RenameFlags) -> Answer<()> {
        refused()
    }

    /// The kernel drops pages that it has of the file since it was open last: they may be of an
    /// older version.
    fn open(&self, cx: &Cx, number: Ino, flags: i32, _kill_suidgid: bool) -> Answer<Opened> {
        if flags & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY {
            return refused();
        }
        let direct_io =
            self.following.options.cache == CacheMode::Strict || flags & libc::O_DIRECT != 0;
        let parked: Parked<Opened> = cx.park_in(Layer::Pool, None);
        self.others.push(Other(Box::new(move |replica| {
            let _resumed = activity::resume(Operation::Open);
            // A turn that begins now drops its pages.
            let fh = replica.following.showing.opened(number);
            let answer = replica
                .following
                .showing
                .with(Request::Other, number, |current, ino| current.attributes(ino).map(drop));
            if answer.is_err() {
                drop(replica.following.showing.released(fh));
            }
            parked.complete(answer.map(|()| Opened {
                fh,
                direct_io,
                no_flush: true,
                ..Opened::default()
            }));
        })));
        Err(Stop::Parked)
    }

    fn create(&self, _: &Cx, _: Ino, _: &[u8], _: Mode, _: i32) -> Answer<(Entry, Opened)> {
        refused()
    }

    fn tmpfile(&self, _: &Cx, _: Ino, _: Mode, _: i32) -> Answer<(Entry, Opened)> {
        refused()
    }

    fn read(&self, cx: &Cx, ino: Ino, _fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        let len = out.len();
        self.read_later(cx, ino, move |current, ino| current.reader.read(ino, offset, len))
    }

    fn write(
        &self,
        _cx: &Cx,
        _ino: Ino,
        _fh: u64,
        _offset: u64,
        _data: &[u8],
        _append: bool,
        _kill_suidgid: bool,
    ) -> Answer<u64> {
        refused()
    }

    fn flush(&self, _cx: &Cx, _ino: Ino, _fh: u64, _lock_owner: u64) -> Answer<()> {
        Ok(())
    }

    fn release(&self, _cx: &Cx, _ino: Ino, fh: u64) {
        self.leave(self.following.showing.released(fh));
    }

    fn known_files(&self) -> Vec<Ino> {
        self.following.showing.some_open(KNOWN_FILES)
    }

    /// What is shown is durable.
    fn fsync(&self, _cx: &Cx, _ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        Ok(())
    }

    fn fallocate(&self, _: &Cx, _: Ino, _: u64, _: i32, _: u64, _: u64) -> Answer<()> {
        refused()
    }

    /// Where data and holes are tells the size, as attributes do. The kernel holds no lock of a
    /// page meanwhile.
    fn lseek(&self, cx: &Cx, ino: Ino, _fh: u64, offset: u64, whence: i32) -> Answer<u64> {
        self.later(cx, ino, move |current, ino| {
            current.reader.ask_of_file(ino, |fs, cx, fh| fs.lseek(cx, ino, fh, offset, whence))
        })
    }

    fn copy_file_range(
        &self,
        _cx: &Cx,
        _ino_in: Ino,
        _fh_in: u64,
        _off_in: u64,
        _ino_out: Ino,
        _fh_out: u64,
        _off_out: u64,
        _len: u64,
    ) -> Answer<u64> {
        refused()
    }

    fn opendir(&self, _cx: &Cx, _ino: Ino) -> Answer<Opened> {
        let fh = self.directories.fetch_add(1, Ordering::Relaxed);
        Ok(Opened { fh, ..Opened::default() })
    }

    fn readdir(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        cookie: u64,
        plus: bool,
        _sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        let bytes = cx.park.listing_bytes();
        let kind = Request::Listing { handle: fh, begins: cookie == 0 };
        let list = move |current: &Current, ino| {
            // The kernel may know newer attributes.
            let into = Listing::new(plus && !current.is_replaced(), bytes);
            current.reader.listing(current.timeline, ino, cookie, into)
        };
        self.others.push(Other(run(cx, kind, ino, list)));
        Err(Stop::Parked)
    }

    fn releasedir(&self, _cx: &Cx, _ino: Ino, fh: u64) {
        self.leave(self.following.showing.listed(fh));
    }

    fn fsyncdir(&self, _cx: &Cx, _ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        Ok(())
    }

    fn statfs(&self, cx: &Cx) -> Answer<Statfs> {
        self.later(cx, ROOT, |current, _| current.reader.ask(|fs, cx| fs.statfs(cx)))
    }

    fn setxattr(&self, _: &Cx, _: Ino, _: &[u8], _: &[u8], _: XattrFlags) -> Answer<()> {
        refused()
    }

    fn getxattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        let name = name.to_vec();
        self.later(cx, ino, move |current, ino| {
            current.reader.ask(|fs, cx| fs.getxattr(cx, ino, &name))
        })
    }

    fn listxattr(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>> {
        self.later(cx, ino, |current, ino| current.reader.ask(|fs, cx| fs.listxattr(cx, ino)))
    }

    fn removexattr(&self, _: &Cx, _: Ino, _: &[u8]) -> Answer<()> {
        refused()
    }

    /// The kernel keeps locks itself.
    fn getlk(&self, _: &Cx, _: Ino, _: u64, _: &FileLock) -> Answer<FileLock> {
        Err(Errno(libc::ENOSYS).into())
    }

    fn setlk(&self, _: &Cx, _: Ino, _: u64, _: &FileLock, _: bool) -> Answer<()> {
        Err(Errno(libc::ENOSYS).into())
    }

    fn keeps_listings(&self) -> bool {
        false
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn writeback_cache(&self) -> bool {
        false
    }

    fn ioctl(&self, _: &Cx, _: Ino, cmd: u32, _: &[u8], out_max: usize) -> Answer<Vec<u8>> {
        match cmd {
            ioctl::STATS => Ok(ended(self.stats().to_string(), out_max).map_err(|e| e.errno())?),
            // All that is shown is durable.
            ioctl::SYNC | ioctl::WAIT | ioctl::WAIT_FILE => Ok(Vec::new()),
            _ => Err(Errno(libc::ENOTTY).into()),
        }
    }
}
