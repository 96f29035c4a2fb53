//! A mount to test with: the null file system, whose fsync can be made to wait.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferry_bench::null::{NullFs, NullOptions};
use ferry_env::Env;
use ferry_fs::{
    Answer, Attr, Cx, DirEntry, Entry, FileLock, Filesystem, Host, Ino, Mode, Opened, Parked,
    RenameFlags, SetAttr, Statfs, Stop, XattrFlags,
};
use ferry_fuse::{Ended, MountHandle, MountOptions, Session, Transport, Unmount};
use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;

/// What the waiting fsyncs tell the test.
#[derive(Default)]
pub struct Waiting {
    pub parked: Vec<Parked<()>>,
    pub interrupted: usize,
    pub host: Option<Arc<dyn Host>>,
    pub detached: bool,
    /// Lookups and getattrs that came.
    pub asked: usize,
    /// A lookup of "held" waits on the thread that serves it, while this says so.
    pub holds: bool,
    /// A lookup of "held" waits now.
    pub held: bool,
    /// The first forget waits on the thread that serves it, while this says so.
    pub holds_forget: bool,
    /// It has come.
    pub forgetting: bool,
}

/// The null file system; its fsync parks.
pub struct SlowSync {
    inner: NullFs,
    is_shared: bool,
    pub waiting: Arc<(Mutex<Waiting>, Condvar)>,
}

/// Waits until `enough` says so.
pub fn until(waiting: &(Mutex<Waiting>, Condvar), enough: impl Fn(&Waiting) -> bool) {
    let mut state = waiting.0.lock();
    waiting.1.wait_while(&mut state, |w| !enough(w));
}

/// A mount of it in a directory of its own.
pub struct Mounted {
    pub dir: TempDir,
    fs: Arc<SlowSync>,
    options: MountOptions,
    pub session: Option<Session>,
    waited: Option<(MountHandle, JoinHandle<Ended>)>,
    pub waiting: Arc<(Mutex<Waiting>, Condvar)>,
}

impl Mounted {
    pub fn new(transport: Transport) -> Self {
        Self::of(transport, false)
    }

    /// Of a file system that others use too, if it `is_shared`.
    pub fn of(transport: Transport, is_shared: bool) -> Self {
        assert!(
            Path::new("/dev/fuse").exists(),
            "these tests mount: they need /dev/fuse, and root or fusermount3"
        );
        let dir = tempfile::tempdir().expect("a directory to mount on");
        let inner = NullFs::new(&Env::real(), NullOptions::default());
        let waiting = Arc::new((Mutex::new(Waiting::default()), Condvar::new()));
        let fs = Arc::new(SlowSync { inner, is_shared, waiting: Arc::clone(&waiting) });
        let options = MountOptions { transport, ..MountOptions::default() };
        let session = Session::mount(Arc::clone(&fs) as _, dir.path(), &options)
            .expect("mounts (as root, or with fusermount3)");
        Self { dir, fs, options, session: Some(session), waited: None, waiting }
    }

    /// Another session goes on with the mount, as another process does; `false`: requests were
    /// under way for too long. `open`: a file there that is open meanwhile.
    pub fn hand_over(&mut self, patience: Duration, open: Option<&File>) -> bool {
        let (handle, ended) = self.waited();
        let ino = open.map(|file| file.metadata().expect("stats").ino());
        if !handle.hand_over(patience, ino).expect("it is mounted") {
            self.waited = Some((handle, ended));
            return false;
        }
        let Ended::HandedOver(connection) = ended.join().expect("no panic") else {
            panic!("nobody has unmounted it")
        };
        let fs = Arc::clone(&self.fs) as _;
        let next = Session::go_on(fs, self.dir.path(), &self.options, connection);
        self.session = Some(next.expect("it goes on"));
        true
    }

    /// The session, for which a thread waits.
    fn waited(&mut self) -> (MountHandle, JoinHandle<Ended>) {
        self.waited.take().unwrap_or_else(|| {
            let session = self.session.take().expect("not ended before");
            (session.handle(), thread::spawn(|| session.wait()))
        })
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    pub fn host(&self) -> Arc<dyn Host> {
        self.waiting.0.lock().host.clone().expect("attached")
    }

    /// Unmounts and waits until all is over. A program that another test is starting has all files
    /// of this process until it runs, also those that were closed meanwhile: as long the mount is
    /// busy.
    #[expect(clippy::disallowed_methods, reason = "nothing says when that process runs")]
    pub fn end(mut self, how: Unmount) {
        let (handle, ended) = self.waited();
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Err(error) = handle.unmount(how) {
            assert!(Instant::now() < deadline, "{error}");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(ended.join().expect("no panic"), Ended::Unmounted));
        assert!(self.waiting.0.lock().detached);
        // Nor does anybody wait who asks for that too late.
        assert!(matches!(handle.hand_over(Duration::from_millis(20), None), Ok(false)));
    }
}

/// Runs a test on both transports (the second is the first again where the kernel offers no other).
pub fn on_each_transport(test: impl Fn(Mounted)) {
    for transport in [Transport::Device, Transport::Auto] {
        test(Mounted::new(transport));
    }
}

macro_rules! pass_on {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name(&self, $($arg: $ty),*) -> $ret { self.inner.$name($($arg),*) }
    )*};
}

impl Filesystem for SlowSync {
    fn attach(&self, host: Arc<dyn Host>) {
        self.waiting.0.lock().host = Some(Arc::clone(&host));
        self.inner.attach(host);
    }

    fn detach(&self) {
        let mut waiting = self.waiting.0.lock();
        waiting.detached = true;
        waiting.host = None;
        self.inner.detach();
    }

    fn lookup(&self, cx: &Cx<'_>, parent: Ino, name: &[u8]) -> Answer<Entry> {
        let mut waiting = self.waiting.0.lock();
        waiting.asked += 1;
        if name == b"held" && waiting.holds {
            waiting.held = true;
            self.waiting.1.notify_all();
            self.waiting.1.wait_while(&mut waiting, |w| w.holds);
        }
        drop(waiting);
        self.inner.lookup(cx, parent, name)
    }

    fn getattr(&self, cx: &Cx<'_>, ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)> {
        self.waiting.0.lock().asked += 1;
        self.inner.getattr(cx, ino, fh)
    }

    fn fsync(&self, cx: &Cx<'_>, _ino: Ino, _fh: u64, _data_only: bool) -> Answer<()> {
        let shared = Arc::clone(&self.waiting);
        let interrupt = Box::new(move || {
            shared.0.lock().interrupted += 1;
            shared.1.notify_all();
        });
        let parked = cx.park(Some(interrupt));
        self.waiting.0.lock().parked.push(parked);
        self.waiting.1.notify_all();
        Err(Stop::Parked)
    }

    fn forget(&self, ino: Ino, count: u64) {
        let mut waiting = self.waiting.0.lock();
        if waiting.holds_forget && !waiting.forgetting {
            waiting.forgetting = true;
            self.waiting.1.notify_all();
            self.waiting.1.wait_while(&mut waiting, |w| w.holds_forget);
        }
        drop(waiting);
        self.inner.forget(ino, count);
    }

    fn is_shared(&self) -> bool {
        self.is_shared
    }

    pass_on! {
        fn setattr(cx: &Cx<'_>, ino: Ino, fh: Option<u64>, set: &SetAttr) -> Answer<(Attr, Duration)>;
        fn readlink(cx: &Cx<'_>, ino: Ino) -> Answer<Vec<u8>>;
        fn mknod(cx: &Cx<'_>, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry>;
        fn mkdir(cx: &Cx<'_>, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry>;
        fn symlink(cx: &Cx<'_>, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry>;
        fn link(cx: &Cx<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry>;
        fn unlink(cx: &Cx<'_>, parent: Ino, name: &[u8]) -> Answer<()>;
        fn rmdir(cx: &Cx<'_>, parent: Ino, name: &[u8]) -> Answer<()>;
        fn rename(cx: &Cx<'_>, from: Ino, name: &[u8], to: Ino, new: &[u8], flags: RenameFlags) -> Answer<()>;
        fn open(cx: &Cx<'_>, ino: Ino, flags: i32, kill: bool) -> Answer<Opened>;
        fn create(cx: &Cx<'_>, parent: Ino, name: &[u8], mode: Mode, flags: i32) -> Answer<(Entry, Opened)>;
        fn tmpfile(cx: &Cx<'_>, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)>;
        fn read(cx: &Cx<'_>, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize>;
        fn write(cx: &Cx<'_>, ino: Ino, fh: u64, at: u64, data: &[u8], append: bool, kill: bool) -> Answer<u64>;
        fn flush(cx: &Cx<'_>, ino: Ino, fh: u64, owner: u64) -> Answer<()>;
        fn release(cx: &Cx<'_>, ino: Ino, fh: u64) -> ();
        fn fallocate(cx: &Cx<'_>, ino: Ino, fh: u64, mode: i32, offset: u64, len: u64) -> Answer<()>;
        fn lseek(cx: &Cx<'_>, ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64>;
        fn copy_file_range(cx: &Cx<'_>, a: Ino, b: u64, c: u64, d: Ino, e: u64, f: u64, len: u64) -> Answer<u64>;
        fn opendir(cx: &Cx<'_>, ino: Ino) -> Answer<Opened>;
        fn readdir(cx: &Cx<'_>, ino: Ino, fh: u64, at: u64, plus: bool, sink: &mut dyn FnMut(&DirEntry) -> bool) -> Answer<()>;
        fn releasedir(cx: &Cx<'_>, ino: Ino, fh: u64) -> ();
        fn fsyncdir(cx: &Cx<'_>, ino: Ino, fh: u64, data_only: bool) -> Answer<()>;
        fn statfs(cx: &Cx<'_>) -> Answer<Statfs>;
        fn setxattr(cx: &Cx<'_>, ino: Ino, name: &[u8], value: &[u8], flags: XattrFlags) -> Answer<()>;
        fn getxattr(cx: &Cx<'_>, ino: Ino, name: &[u8]) -> Answer<Vec<u8>>;
        fn listxattr(cx: &Cx<'_>, ino: Ino) -> Answer<Vec<u8>>;
        fn removexattr(cx: &Cx<'_>, ino: Ino, name: &[u8]) -> Answer<()>;
        fn getlk(cx: &Cx<'_>, ino: Ino, fh: u64, lock: &FileLock) -> Answer<FileLock>;
        fn setlk(cx: &Cx<'_>, ino: Ino, fh: u64, lock: &FileLock, wait: bool) -> Answer<()>;
        fn writeback_cache() -> bool;
        fn ioctl(cx: &Cx<'_>, ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>>;
    }
}
