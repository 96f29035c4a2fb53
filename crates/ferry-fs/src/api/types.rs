//! The vocabulary of requests: inode numbers, errors, attributes, times, flags.

use std::fmt;
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

/// A listing for an answer that comes later: as much as its asker has room for.
#[derive(Debug)]
pub struct Listing {
    /// In order.
    pub entries: Vec<DirEntry>,
    /// Its entries may have attributes.
    pub plus: bool,
    /// Bytes that are left.
    room: usize,
}

impl Listing {
    /// Every asker has room for so many bytes.
    pub const BYTES_MIN: usize = 4096;
    /// What an entry takes beside its name, and what its attributes take.
    const ENTRY_BYTES: usize = 24;
    const ATTRIBUTES_BYTES: usize = 128;

    /// An empty one of up to `bytes`; with `plus` its entries may have attributes.
    pub fn new(plus: bool, bytes: usize) -> Self {
        Self { entries: Vec::new(), plus, room: bytes }
    }

    /// Whether it has room for the entry. Adds it then.
    pub fn push(&mut self, entry: &DirEntry) -> bool {
        let attributes = if self.plus { Self::ATTRIBUTES_BYTES } else { 0 };
        let bytes = (attributes + Self::ENTRY_BYTES + entry.name.len()).next_multiple_of(8);
        let room = self.room.checked_sub(bytes);
        // Nothing comes behind an entry that did not fit.
        self.room = room.unwrap_or(0);
        self.entries.extend(room.is_some().then(|| entry.clone()));
        room.is_some()
    }
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
    /// Free for users other than root.
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
