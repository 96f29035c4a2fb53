//! A volume in a simulation: a call of it happens at once, as far as others can see.
//!
//! The volume waits with the means of the operating system, of which a simulation knows nothing. So
//! no thread may stop inside it. Answers that it completes meanwhile are passed on when the call
//! has come back, for they run the server's code.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferry_env::Clock;
use ferry_sim::device::SimDevice;

use super::super::*;
use crate::rt::sim;

/// Whether a server has its volume still, as in an object store: it knows for a term behind each
/// look, and when the store refuses what it writes.
pub(super) struct Tenure {
    device: Arc<SimDevice>,
    clock: Arc<dyn Clock>,
    term: Duration,
    looked: Mutex<Duration>,
    taken: AtomicBool,
}

impl Tenure {
    pub(super) fn new(device: &Arc<SimDevice>, env: &Env, term: Duration) -> Arc<Self> {
        let (device, clock) = (Arc::clone(device), Arc::clone(&env.clock));
        let looked = Mutex::new(clock.monotonic());
        Arc::new(Self { device, clock, term, looked, taken: AtomicBool::new(false) })
    }

    /// Another server has claimed the volume. This one hears of it when it looks.
    pub(super) fn end(&self) {
        self.taken.store(true, Ordering::SeqCst);
    }
}

pub(in crate::tests) struct Undivided {
    fs: Arc<LocalFs>,
    /// `None`: nobody takes it.
    tenure: Option<Arc<Tenure>>,
    /// So many syncs fail from now on.
    failing_syncs: AtomicU32,
}

impl Undivided {
    pub(in crate::tests) fn new(fs: Arc<LocalFs>) -> Self {
        Self::failing(fs, 0)
    }

    /// One whose first syncs fail.
    pub(in crate::tests) fn failing(fs: Arc<LocalFs>, syncs: u32) -> Self {
        Self { fs, tenure: None, failing_syncs: AtomicU32::new(syncs) }
    }

    /// One that another server may take.
    pub(super) fn held(fs: Arc<LocalFs>, tenure: Arc<Tenure>) -> Self {
        Self { tenure: Some(tenure), ..Self::new(fs) }
    }

    pub(in crate::tests) fn failing_syncs(&self) -> u32 {
        self.failing_syncs.load(Ordering::SeqCst)
    }
}

type Outcome = Result<Reply, Errno>;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static COMPLETED: RefCell<Vec<(Complete, Outcome)>> = const { RefCell::new(Vec::new()) };
}

fn undivided<T>(call: impl FnOnce() -> T) -> T {
    if INSIDE.replace(true) {
        return call();
    }
    let value = sim::undivided(call);
    INSIDE.set(false);
    for (complete, outcome) in COMPLETED.take() {
        complete(outcome);
    }
    value
}

/// Passes answers on later.
struct Later<'c>(&'c dyn Park);

impl Park for Later<'_> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        let complete = self.0.park(interrupt);
        Box::new(move |outcome| match INSIDE.get() {
            true => COMPLETED.with_borrow_mut(|completed| completed.push((complete, outcome))),
            false => complete(outcome),
        })
    }

    fn may_wait(&self) -> bool {
        self.0.may_wait()
    }

    fn early_ack(&self) -> Option<EarlyAck> {
        self.0.early_ack()
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

macro_rules! requests {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self, cx: &Cx, $($arg: $type),*) -> $out {
            let Cx { uid, gid, pid, umask, park } = *cx;
            undivided(|| self.fs.$name(&Cx { uid, gid, pid, umask, park: &Later(park) }, $($arg),*))
        })*
    };
}

macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self, $($arg: $type),*) -> $out {
            undivided(|| self.fs.$name($($arg),*))
        })*
    };
}

impl Filesystem for Undivided {
    requests! {
        lookup(parent: Ino, name: &[u8]) -> Answer<Entry>;
        getattr(ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)>;
        statx(ino: Ino) -> Answer<(Attr, Duration, Timestamp)>;
        setattr(ino: Ino, fh: Option<u64>, set: &SetAttr) -> Answer<(Attr, Duration)>;
        readlink(ino: Ino) -> Answer<Vec<u8>>;
        mknod(parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry>;
        mkdir(parent: Ino, name: &[u8], mode: u32) -> Answer<Entry>;
        symlink(parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry>;
        link(ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry>;
        unlink(parent: Ino, name: &[u8]) -> Answer<()>;
        rmdir(parent: Ino, name: &[u8]) -> Answer<()>;
        rename(parent: Ino, name: &[u8], to: Ino, new: &[u8], flags: RenameFlags) -> Answer<()>;
        open(ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened>;
        create(parent: Ino, name: &[u8], mode: Mode, flags: i32) -> Answer<(Entry, Opened)>;
        tmpfile(parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)>;
        read(ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize>;
        read_pages(ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize>;
        write(ino: Ino, fh: u64, offset: u64, data: &[u8], append: bool, kill: bool) -> Answer<u64>;
        flush(ino: Ino, fh: u64, lock_owner: u64) -> Answer<()>;
        release(ino: Ino, fh: u64) -> ();
        fsync(ino: Ino, fh: u64, data_only: bool) -> Answer<()>;
        fallocate(ino: Ino, fh: u64, mode: i32, offset: u64, len: u64) -> Answer<()>;
        lseek(ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64>;
        copy_file_range(ino: Ino, fh: u64, at: u64, to: Ino, to_fh: u64, to_at: u64, len: u64)
            -> Answer<u64>;
        opendir(ino: Ino) -> Answer<Opened>;
        readdir(ino: Ino, fh: u64, at: u64, plus: bool, sink: &mut dyn FnMut(&DirEntry) -> bool)
            -> Answer<()>;
        releasedir(ino: Ino, fh: u64) -> ();
        fsyncdir(ino: Ino, fh: u64, data_only: bool) -> Answer<()>;
        statfs() -> Answer<Statfs>;
        setxattr(ino: Ino, name: &[u8], value: &[u8], flags: XattrFlags) -> Answer<()>;
        getxattr(ino: Ino, name: &[u8]) -> Answer<Vec<u8>>;
        listxattr(ino: Ino) -> Answer<Vec<u8>>;
        removexattr(ino: Ino, name: &[u8]) -> Answer<()>;
        getlk(ino: Ino, fh: u64, lock: &FileLock) -> Answer<FileLock>;
        setlk(ino: Ino, fh: u64, lock: &FileLock, wait: bool) -> Answer<()>;
        ioctl(ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>>;
    }
    calls! {
        attach(host: Arc<dyn Host>) -> ();
        detach() -> ();
        forget(ino: Ino, count: u64) -> ();
        birth_time(ino: Ino) -> Option<Timestamp>;
        loses_privileges(ino: Ino) -> bool;
        keeps_pages(ino: Ino, fh: u64) -> bool;
        is_shared() -> bool;
        writeback_cache() -> bool;
    }
}

impl SessionStore for Undivided {
    fn is_surely_ours(&self) -> bool {
        self.tenure.as_ref().is_none_or(|tenure| {
            let lasts = tenure.clock.monotonic() < *tenure.looked.lock() + tenure.term;
            lasts && tenure.device.struck() == 0
        })
    }

    fn ascertain_ours(&self) -> Result<(), Errno> {
        let Some(tenure) = &self.tenure else { return Ok(()) };
        if tenure.taken.load(Ordering::SeqCst) || tenure.device.struck() > 0 {
            return Err(Errno(libc::EIO));
        }
        *tenure.looked.lock() = tenure.clock.monotonic();
        Ok(())
    }

    fn sync_sessions(&self, upto: &[SessionSeq]) -> Result<(), Errno> {
        let fewer = |syncs: u32| syncs.checked_sub(1);
        match self.failing_syncs.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer) {
            Ok(_) => Err(Errno(libc::EIO)),
            Err(_) => undivided(|| self.fs.sync_sessions(upto)),
        }
    }

    calls! {
        reserve_numbers(count: u32) -> Result<Range<Ino>, Errno>;
        reserve_space(bytes: u64, inodes: u64) -> Result<Box<dyn Reservation>, Errno>;
        add_session(session: u128) -> Result<(), Errno>;
        remove_session(session: u128) -> ();
        revoke_sessions(sessions: &[u128]) -> ();
        sessions() -> Result<Vec<u128>, Errno>;
        last_applied(session: u128) -> Result<Option<u64>, Errno>;
        durable_watermark(session: u128) -> Result<u64, Errno>;
        add_lock_holder(session: u128) -> Result<(), Errno>;
        lock_holders() -> Result<Vec<u128>, Errno>;
        remove_lock_holders(sessions: &[u128]) -> Result<(), Errno>;
        evict(sessions: &[SessionSeq], forgotten: &[u128]) -> Result<(), Errno>;
        evicted() -> Result<Vec<SessionSeq>, Errno>;
        is_far() -> bool;
        read_ahead(needed: Vec<Needed>) -> ();
        is_plain(ino: Ino) -> Result<bool, Errno>;
        keep_removed() -> ();
        reclaim_removed() -> ();
        hand_over() -> Result<(), Errno>;
        was_handed_over() -> bool;
    }
}
