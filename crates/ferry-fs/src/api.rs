//! What a file system offers to whatever carries requests to it.
//!
//! An operation runs to completion on the thread that brought it and returns its answer, or it
//! *parks*: it takes the request's [`Parked`] handle with [`Cx::park`], returns [`Stop::Parked`],
//! and completes the handle later from any thread. So no thread waits for durability, a lease or a
//! lock.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

/// An inode number. 1 is the root; 0 means "none".
pub type Ino = u64;
/// The root directory.
pub const ROOT: Ino = 1;
/// A longest file name, in bytes.
pub const NAME_MAX: usize = 255;
/// A longest symlink target, in bytes.
pub const SYMLINK_MAX: usize = 4095;
/// A longest extended attribute's value, in bytes.
pub const XATTR_SIZE_MAX: usize = 65536;

/// An error as programs see it: one of `libc::E…`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({self})")
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl From<Errno> for std::io::Error {
    fn from(error: Errno) -> Self {
        Self::from_raw_os_error(error.0)
    }
}

/// Why an operation gives no answer now.
#[derive(Debug)]
pub enum Stop {
    /// It failed.
    Errno(Errno),
    /// The request was parked; its [`Parked`] handle will be completed.
    Parked,
}

impl From<Errno> for Stop {
    fn from(e: Errno) -> Self {
        Stop::Errno(e)
    }
}

/// What an operation returns.
pub type Answer<T> = Result<T, Stop>;

/// Every form that a parked answer can take.
#[derive(Debug)]
pub enum Reply {
    /// Nothing but success.
    Empty,
    /// A name looked up or made.
    Entry(Entry),
    /// Attributes.
    Attr(Attr, Duration),
    /// An opened file or directory.
    Opened(Opened),
    /// A file made and opened.
    Created(Entry, Opened),
    /// Bytes taken by a write or a copy, or a position.
    Count(u64),
    /// Bytes read: of a file, a link's target, an attribute's value.
    Data(Vec<u8>),
    /// Bytes read, in memory that somebody may use again afterwards.
    Shared(SharedBytes),
    /// Directory entries, in order.
    Dir(Vec<DirEntry>),
    /// A file system's totals.
    Statfs(Statfs),
    /// A lock that stands in the way, or none.
    Lock(FileLock),
}

macro_rules! reply_from {
    ($($t:ty => $v:ident),*) => {$(
        impl From<$t> for Reply { fn from(x: $t) -> Reply { Reply::$v(x) } }
    )*};
}
reply_from!(Entry => Entry, Opened => Opened, u64 => Count, Vec<u8> => Data, Vec<DirEntry> => Dir, Statfs => Statfs, FileLock => Lock);

impl From<()> for Reply {
    fn from((): ()) -> Self {
        Reply::Empty
    }
}

impl From<(Attr, Duration)> for Reply {
    fn from((a, t): (Attr, Duration)) -> Self {
        Reply::Attr(a, t)
    }
}

impl From<(Entry, Opened)> for Reply {
    fn from((e, o): (Entry, Opened)) -> Self {
        Reply::Created(e, o)
    }
}

/// Bytes that nobody changes while they are shared.
pub type SharedBytes = std::sync::Arc<ferry_device::AlignedBuf>;

/// Takes the reply of a parked request; given by the transport.
pub type Complete = Box<dyn FnOnce(Result<Reply, Errno>) + Send>;
/// Called once if the requester no longer waits (a signal, the mount's end). The transport has then
/// already answered `EINTR`; a later completion is dropped.
pub type Interrupt = Box<dyn FnOnce() + Send>;

/// The transport's side of parking.
pub trait Park {
    /// Keeps the current request open. Called at most once a request.
    fn park(&self, interrupt: Option<Interrupt>) -> Complete;
    /// Whether the request has its thread to itself, so that what would park may as well wait.
    fn may_wait(&self) -> bool {
        false
    }
    /// What the maker of the change was told before the change came here. Only a server's caller
    /// answers more than `None`.
    fn early_ack(&self) -> Option<EarlyAck> {
        None
    }
}

/// A request whose answer comes later. Dropping it without an answer answers `EIO`.
pub struct Parked<T> {
    complete: Option<Complete>,
    answer: PhantomData<fn(T)>,
}

impl<T: Into<Reply>> Parked<T> {
    /// Answers the request.
    pub fn complete(mut self, result: Result<T, Errno>) {
        if let Some(complete) = self.complete.take() {
            complete(result.map(Into::into));
        }
    }
}

impl<T> Drop for Parked<T> {
    fn drop(&mut self) {
        if let Some(complete) = self.complete.take() {
            complete(Err(Errno(libc::EIO)));
        }
    }
}

/// Who asks, and how to park the question.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Process id, 0 where unknown.
    pub pid: u32,
    /// The process's umask, for operations that make a name (it applies only without a default
    /// ACL).
    pub umask: u32,
    /// How to park.
    pub park: &'a dyn Park,
}

/// What a client has told a program about a change that it acknowledged before the change came
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyAck {
    /// The time of the change: whatever it sets to "now" gets exactly this time.
    pub at: Timestamp,
    /// The number of the inode that it makes, a reserved one
    /// ([`SessionStore::reserve_numbers`](crate::SessionStore::reserve_numbers)). Each can be used
    /// once. `EEXIST`: the number is not reserved, or was used.
    pub ino: Option<Ino>,
    /// The change's place in its session, stored in the change's own transaction. Changes of a
    /// session that have one are made one after the other. Changes that may as well be applied
    /// twice have none: write, fallocate, copies, and a change of size.
    pub seq: Option<SessionSeq>,
    /// Where the change takes its space from, if there is enough.
    pub reservation: Option<ReservationId>,
}

/// A sequence number of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionSeq {
    /// The session.
    pub session: u128,
    /// The number of its change.
    pub seq: u64,
}

/// Names a [`Reservation`](crate::Reservation).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReservationId(pub u64);

impl Cx<'_> {
    /// Parks the request.
    pub fn park<T: Into<Reply>>(&self, interrupt: Option<Interrupt>) -> Parked<T> {
        Parked { complete: Some(self.park.park(interrupt)), answer: PhantomData }
    }

    /// Says whether the change was acknowledged before it came here, and how. Never, with a mount.
    pub(crate) fn early_ack(&self) -> Option<EarlyAck> {
        self.park.early_ack()
    }
}

/// File type bits of a mode: one of `libc::S_IF…`.
pub type Mode = u32;

/// A point in time: nanoseconds since the epoch; negative before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub i128);

impl Timestamp {
    /// From seconds and nanoseconds.
    pub fn new(secs: i64, nanos: u32) -> Self {
        Self(i128::from(secs) * 1_000_000_000 + i128::from(nanos))
    }
    /// Whole seconds, rounded down.
    pub fn secs(self) -> i64 {
        i64::try_from(self.0.div_euclid(1_000_000_000)).unwrap_or(i64::MAX)
    }
    /// Nanoseconds within the second.
    pub fn nanos(self) -> u32 {
        u32::try_from(self.0.rem_euclid(1_000_000_000)).unwrap_or(0)
    }
}

/// Attributes of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Type and permission bits.
    pub mode: Mode,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number (as the kernel encodes it) of a device node.
    pub rdev: u32,
    /// Bytes.
    pub size: u64,
    /// Space taken, in units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the contents.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
}

/// A name's answer.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The inode and its attributes; `None`: the name is known to be absent.
    pub attr: Option<Attr>,
    /// How long the name may be cached.
    pub entry_valid: Duration,
    /// How long the attributes may be cached.
    pub attr_valid: Duration,
}

/// An opened file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Opened {
    /// The implementer's handle, given back with every call.
    pub fh: u64,
    /// Reads and writes bypass the kernel's page cache.
    pub direct_io: bool,
    /// What the kernel has cached of this file is still right.
    pub keep_cache: bool,
    /// Direct writes of one file may run in parallel.
    pub parallel_direct_writes: bool,
    /// `flush` has nothing to do on close.
    pub no_flush: bool,
    /// The kernel may cache the listing of this directory.
    pub cache_dir: bool,
}

/// An entry of a directory listing.
#[derive(Clone, Debug)]
pub struct DirEntry {
    /// The name.
    pub name: Box<[u8]>,
    /// Its inode.
    pub ino: Ino,
    /// Its type: the `S_IFMT` bits of its mode.
    pub kind: Mode,
    /// Where the listing continues after this entry: non-zero, below 2^63.
    pub cookie: u64,
    /// The entry as `lookup` would give it (it counts as one lookup), when `plus` was asked for;
    /// never for `.` and `..`.
    pub entry: Option<Entry>,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the call.
    Now,
    /// This one.
    At(Timestamp),
}

/// What `setattr` changes; `None` leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Truncate or extend to.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the contents.
    pub mtime: Option<SetTime>,
    /// Last change of the inode (only from a write-back cache).
    pub ctime: Option<Timestamp>,
    /// Set-user-id, set-group-id (where the group may execute) and file capabilities go, as on a
    /// write.
    pub kill_suidgid: bool,
}

/// Whole-volume totals, in blocks of `block_size` bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statfs {
    /// Bytes in a block.
    pub block_size: u32,
    /// All.
    pub blocks: u64,
    /// Free.
    pub blocks_free: u64,
    /// Free for users who are not root.
    pub blocks_available: u64,
    /// Inodes in use and free.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
}

/// A POSIX or flock lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileLock {
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// `libc::F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: i32,
    /// Holder.
    pub pid: u32,
    /// The holder as the kernel names it.
    pub owner: u64,
    /// A `flock`, not an `fcntl` lock.
    pub flock: bool,
}

/// What a mounted file system may ask of the transport.
pub trait Host: Send + Sync {
    /// The kernel must forget the cached attributes.
    fn invalidate_attributes(&self, ino: Ino);
    /// The kernel must forget attributes, and look up names again before it uses them; then `done`
    /// is called, by another thread. Not if the mount ends before.
    fn forget(&self, what: ToForget, done: Box<dyn FnOnce() + Send>);
    /// Whether [`Host::forget`] can be done for names.
    fn forgets_names(&self) -> bool;
    /// The transport's counters, for `stats`.
    fn stats(&self) -> serde_json::Value;
}

/// What the kernel must forget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToForget {
    /// The attributes of these,
    pub inodes: Vec<Ino>,
    /// what these mean,
    pub names: Vec<(Ino, Box<[u8]>)>,
    /// that these are there, and with them what has no other name and is not open,
    pub removed: Vec<(Ino, Box<[u8]>)>,
    /// and, behind the word that all this is forgotten, the contents of these: what programs have
    /// stored in mapped memory is written first.
    pub contents: Vec<Ino>,
}

/// Renaming: flags of renameat2(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenameFlags {
    /// Fail with `EEXIST` when the new name exists.
    pub no_replace: bool,
    /// Swap the two names.
    pub exchange: bool,
    /// The old name leads to a new character device 0/0 (an overlay's mark that nothing is there).
    pub whiteout: bool,
}

/// Extended attributes: how `setxattr` treats an existing one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XattrFlags {
    /// Fail with `EEXIST` when it exists.
    pub create: bool,
    /// Fail with `ENODATA` when it does not.
    pub replace: bool,
    /// Setting an access ACL clears the set-group-id bit.
    pub acl_kill_sgid: bool,
}

/// A file system. Names are bytes without `/` and NUL, never empty; the kernel resolves `.` and
/// `..`, except that `lookup` answers both. Permission is the kernel's to check
/// (`default_permissions`), except where a method says otherwise.
///
/// `lookup`, `mknod`, `mkdir`, `symlink`, `link`, `create`, `tmpfile` and each `plus` entry count
/// one lookup on the inode they return; it lives until `forget` took all of them back and its last
/// name and handle are gone.
pub trait Filesystem: Send + Sync + 'static {
    /// Called once, before the first request.
    fn attach(&self, host: Arc<dyn Host>);
    /// The mount is gone: nothing is open, no inode is known to the kernel any more.
    fn detach(&self);

    /// Finds a name. A missing name is `Ok` with `attr: None`.
    fn lookup(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<Entry>;
    /// Takes back `count` lookups.
    fn forget(&self, ino: Ino, count: u64);
    /// Reads attributes; the duration is how long they may be cached.
    fn getattr(&self, cx: &Cx, ino: Ino, fh: Option<u64>) -> Answer<(Attr, Duration)>;
    /// When the inode was made, where that is known.
    fn birth_time(&self, _ino: Ino) -> Option<Timestamp> {
        None
    }
    /// Whether a change of its contents by somebody who is not privileged may take set-id bits of
    /// the inode.
    fn loses_privileges(&self, _ino: Ino) -> bool {
        false
    }
    /// Changes attributes.
    fn setattr(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: Option<u64>,
        set: &SetAttr,
    ) -> Answer<(Attr, Duration)>;
    /// A symbolic link's target.
    fn readlink(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>>;
    /// Makes a regular file, device node, FIFO or socket.
    fn mknod(&self, cx: &Cx, parent: Ino, name: &[u8], mode: Mode, rdev: u32) -> Answer<Entry>;
    /// Makes a directory.
    fn mkdir(&self, cx: &Cx, parent: Ino, name: &[u8], mode: u32) -> Answer<Entry>;
    /// Makes a symbolic link.
    fn symlink(&self, cx: &Cx, parent: Ino, name: &[u8], target: &[u8]) -> Answer<Entry>;
    /// Gives an inode another name.
    fn link(&self, cx: &Cx, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Entry>;
    /// Removes a name that is not a directory.
    fn unlink(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()>;
    /// Removes an empty directory.
    fn rmdir(&self, cx: &Cx, parent: Ino, name: &[u8]) -> Answer<()>;
    /// Renames.
    fn rename(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()>;

    /// Opens a file; `flags` are those of open(2). `O_TRUNC` truncates; `kill_suidgid` says that it
    /// then also clears those bits.
    fn open(&self, cx: &Cx, ino: Ino, flags: i32, kill_suidgid: bool) -> Answer<Opened>;
    /// Makes a file (or opens the one that is there, unless `O_EXCL`) and opens it.
    fn create(
        &self,
        cx: &Cx,
        parent: Ino,
        name: &[u8],
        mode: Mode,
        flags: i32,
    ) -> Answer<(Entry, Opened)>;
    /// Makes and opens a file without a name.
    fn tmpfile(&self, cx: &Cx, parent: Ino, mode: Mode, flags: i32) -> Answer<(Entry, Opened)>;
    /// Reads up to `out.len()` bytes at `offset` into `out`; fewer only at the end of the file.
    /// Returns the number.
    fn read(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize>;
    /// The same, for what the kernel keeps of files that programs have mapped into memory.
    fn read_pages(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, out: &mut [u8]) -> Answer<usize> {
        self.read(cx, ino, fh, offset, out)
    }
    /// Whether the kernel may have read pages of the file ([`Filesystem::read_pages`]) though this
    /// handle writes past them. The answer is asked for behind a write: a read of pages that it
    /// does not know of begins after the write.
    fn keeps_pages(&self, _ino: Ino, _fh: u64) -> bool {
        false
    }
    /// Writes all of `data`, or fails. `append`: at the end, whatever `offset` says.
    #[expect(clippy::too_many_arguments, reason = "the request's own shape")]
    fn write(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        offset: u64,
        data: &[u8],
        append: bool,
        kill_suidgid: bool,
    ) -> Answer<u64>;
    /// A descriptor was closed (not the last one, perhaps). Reports a pending write error.
    fn flush(&self, cx: &Cx, ino: Ino, fh: u64, lock_owner: u64) -> Answer<()>;
    /// The handle's last descriptor was closed.
    fn release(&self, cx: &Cx, ino: Ino, fh: u64);
    /// Makes the file durable. Parks.
    fn fsync(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()>;
    /// Allocates, punches or zeroes; `mode` as fallocate(2). Set-id bits go as on a write, unless
    /// root asks; so with copies.
    fn fallocate(&self, cx: &Cx, ino: Ino, fh: u64, mode: i32, offset: u64, len: u64)
    -> Answer<()>;
    /// `SEEK_DATA` or `SEEK_HOLE`.
    fn lseek(&self, cx: &Cx, ino: Ino, fh: u64, offset: u64, whence: i32) -> Answer<u64>;
    /// Copies within the file system; returns the bytes copied.
    #[expect(
        clippy::too_many_arguments,
        reason = "two files, two places, a length: the system call's own shape"
    )]
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
    ) -> Answer<u64>;

    /// Opens a directory.
    fn opendir(&self, cx: &Cx, ino: Ino) -> Answer<Opened>;
    /// Lists from `cookie` (0: the start), `.` and `..` first, until `sink` returns `false`, which
    /// says that the entry it was just given did not fit (its lookup, if any, does not count).
    fn readdir(
        &self,
        cx: &Cx,
        ino: Ino,
        fh: u64,
        cookie: u64,
        plus: bool,
        sink: &mut dyn FnMut(&DirEntry) -> bool,
    ) -> Answer<()>;
    /// Closes a directory.
    fn releasedir(&self, cx: &Cx, ino: Ino, fh: u64);
    /// Makes a directory's entries durable. Parks.
    fn fsyncdir(&self, cx: &Cx, ino: Ino, fh: u64, data_only: bool) -> Answer<()>;

    /// Totals.
    fn statfs(&self, cx: &Cx) -> Answer<Statfs>;
    /// Sets an extended attribute. POSIX ACLs are the attributes `system.posix_acl_access` and
    /// `_default` in the kernel's binary form.
    fn setxattr(
        &self,
        cx: &Cx,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Answer<()>;
    /// Reads an extended attribute.
    fn getxattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<Vec<u8>>;
    /// All names, each ended by NUL.
    fn listxattr(&self, cx: &Cx, ino: Ino) -> Answer<Vec<u8>>;
    /// Removes an extended attribute.
    fn removexattr(&self, cx: &Cx, ino: Ino, name: &[u8]) -> Answer<()>;

    /// Tests for a lock (only where the implementer keeps locks itself, see
    /// [`Filesystem::is_shared`]).
    fn getlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock) -> Answer<FileLock>;
    /// Takes or releases a lock; with `wait` it parks until it has it.
    fn setlk(&self, cx: &Cx, ino: Ino, fh: u64, lock: &FileLock, wait: bool) -> Answer<()>;
    /// Others change the files, too: locks go through `getlk` and `setlk`. Otherwise the kernel
    /// keeps them, for this mount alone.
    fn is_shared(&self) -> bool;
    /// Most files go through the kernel's page cache.
    fn kernel_caches(&self) -> bool {
        !self.is_shared()
    }
    /// The kernel should use its write-back cache.
    fn writeback_cache(&self) -> bool;
    /// FerryFS's own requests (see [`ioctl`]); the answer's bytes, at most `out_max`. Unknown:
    /// `ENOTTY`.
    fn ioctl(&self, cx: &Cx, ino: Ino, cmd: u32, input: &[u8], out_max: usize) -> Answer<Vec<u8>>;
}

/// FerryFS's own requests, numbered as ioctls are, `_IOC(dir, 'F', nr, size)`: on any file or
/// directory of a mount, or over the control socket of a server.
pub mod ioctl {
    const fn ioc(dir: u32, nr: u32, size: u32) -> u32 {
        dir << 30 | size << 16 | (b'F' as u32) << 8 | nr
    }
    /// Bytes of a request's message and of its answer, at most: its number says so.
    pub const fn message_len(request: u32) -> usize {
        (request >> 16 & 0x3fff) as usize
    }
    /// Makes everything on the volume durable; parks. `_IO('F', 1)`.
    pub const SYNC: u32 = ioc(0, 1, 0);
    /// Bytes of a [`STATS`] answer.
    pub const STATS_LEN: u32 = 16383;
    /// Starts a scrub: the rate in bytes a second (0: none) as `u64`; its number comes back in the
    /// same place. `EBUSY`: one is on its way. For root and who has mounted the volume, as the next
    /// two; others hear `EPERM`. `_IOWR('F', 3, u64)`.
    pub const SCRUB_START: u32 = ioc(3, 3, 8);
    /// Stops the scrub that is on its way, if one is. `_IO('F', 4)`.
    pub const SCRUB_STOP: u32 = ioc(0, 4, 0);
    /// Damage that the newest scrub has found: the place in its list to begin with as `u64`; comes
    /// back as a JSON list of as many as fit, ended by NUL. `_IOWR('F', 5, char[16383])`.
    pub const SCRUB_DAMAGE: u32 = ioc(3, 5, STATS_LEN);
    /// What the newest scrub is at, as JSON, ended by NUL. `_IOR('F', 6, char[16383])`.
    pub const SCRUB_STATUS: u32 = ioc(2, 6, STATS_LEN);
    /// Bytes of a [`REPLACE`] message.
    pub const REPLACE_LEN: u32 = 8192;
    /// Begins to rebuild a mirror's side: the path of the old one, NUL, that of the new one, NUL.
    /// Answered when work goes to the new side too; [`STATS`] shows how far it is. For root and who
    /// has mounted the volume; others hear `EPERM`. `_IOW('F', 32, char[8192])`.
    pub const REPLACE: u32 = ioc(1, 32, REPLACE_LEN);
    /// The counters as JSON, ended by NUL. `_IOR('F', 2, char[16383])`.
    pub const STATS: u32 = ioc(2, 2, STATS_LEN);
    /// Files of one [`SYNC_FILES`], at most.
    pub const SYNC_FILES_MAX: usize = 2000;
    /// Bytes of its message: `u32 count, u32 flags, u64 files[2000]`; of the answer's `files` only
    /// the first `count` are written.
    pub const SYNC_FILES_LEN: u32 = 8 + 8 * SYNC_FILES_MAX as u32;
    /// A flag: of each file the data only, as fdatasync(2).
    pub const SYNC_FILES_DATA: u32 = 1;
    /// Makes files durable together; parks. In: inode numbers; out: an errno or 0 for each
    /// (`docs/bulk-sync.md`). `_IOWR('F', 16, char[16008])`.
    pub const SYNC_FILES: u32 = ioc(3, 16, SYNC_FILES_LEN);
    /// Bytes of a [`TUNE`] message.
    pub const TUNE_LEN: u32 = 16;
    /// In the first word of [`TUNE`]: set the flush policy (`policy`: 0 each, 1 delay, 2 gather, 3
    /// adaptive).
    pub const TUNE_FLUSH: u32 = 1;
    /// In the first word of [`TUNE`]: set the time below which the policy `delay` does not wait.
    pub const TUNE_FAST_FLUSH: u32 = 2;
    /// In the first word of [`TUNE`]: forget how long the device's flushes took.
    pub const TUNE_RESET_FLUSH_TIME: u32 = 4;
    /// Changes how a mounted volume flushes: `u32 what, u32 policy, u64 fast_flush_ns`. For root
    /// and the owner of the volume's root directory, others hear `EPERM`. `_IOW('F', 24,
    /// char[16])`.
    pub const TUNE: u32 = ioc(1, 24, TUNE_LEN);
    /// Moves the log of a mounted volume to its end, where it has so many bytes, rounded up to
    /// whole segments: `u64`. For those who may [`TUNE`]. Parks. `EINVAL`: no log of that length,
    /// or the log is as long already; `ENOSPC`: the end of the volume is in use. `_IOW('F', 25,
    /// char[8])`.
    pub const GROW_LOG: u32 = ioc(1, 25, 8);
    /// Gives the space of free segments back to the host; answers with the bytes, `u64`. For those
    /// who may [`TUNE`]. Parks. `_IOR('F', 26, char[8])`.
    pub const TRIM: u32 = ioc(2, 26, 8);
    /// The same as fstrim(8) asks for it: `u64 start, u64 len, u64 minlen`, answered with the bytes
    /// in `len`. All that is free is given back, whatever the range. `FITRIM`, `_IOWR('X', 121,
    /// struct fstrim_range)`.
    pub const FITRIM: u32 = 3 << 30 | 24 << 16 | (b'X' as u32) << 8 | 121;
}
