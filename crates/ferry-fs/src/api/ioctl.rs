//! FerryFS's own requests, numbered as ioctls are, `_IOC(dir, 'F', nr, size)`: on any file or
//! directory of a mount, or over the control socket of a server.

const fn ioc(dir: u32, nr: u32, size: u32) -> u32 {
    dir << 30 | size << 16 | (b'F' as u32) << 8 | nr
}
/// Bytes of a request's message and of its answer, at most: its number says so.
pub const fn message_len(request: u32) -> usize {
    (request >> 16 & 0x3fff) as usize
}
/// Makes everything on the volume durable; parks. A mount makes the kernel write back first what it
/// alone has. `_IO('F', 1)`.
pub const SYNC: u32 = ioc(0, 1, 0);
/// Answers once everything that the volume has now is durable, and makes nothing durable itself;
/// parks. `EOPNOTSUPP`: the mount has `cache=writeback`. `_IO('F', 7)`.
pub const WAIT: u32 = ioc(0, 7, 0);
/// The same for the file or directory that is asked. `_IO('F', 8)`.
pub const WAIT_FILE: u32 = ioc(0, 8, 0);
/// Bytes of a [`STATS`] answer.
pub const STATS_LEN: u32 = 16383;
/// Starts a scrub: the rate in bytes a second (0: none) as `u64`; its number comes back in the
/// same place. `EBUSY`: one is on its way. For root and the user that has mounted the volume, as
/// the next two; others hear `EPERM`. `_IOWR('F', 3, u64)`.
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
/// Gives a mounted volume another size, or does a part of the work for it: `u64` bytes, 0 for all
/// that its device has. Answered with a [`ResizeAnswer`]: the caller asks again while something is
/// left. For those who may [`TUNE`]. Parks. `EOPNOTSUPP`: the device has one length for good.
/// `_IOWR('F', 33, char[16])`.
pub const RESIZE: u32 = ioc(3, 33, RESIZE_LEN);
/// Bytes of a [`RESIZE`] answer.
pub const RESIZE_LEN: u32 = 16;

/// The answer to [`RESIZE`]: two words, which of these it is, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeAnswer {
    /// The volume has so many bytes.
    Done(u64),
    /// So many segments have to be emptied; until the caller asks again all is as before.
    Left(u64),
    /// What is used needs a volume of so many bytes.
    TooSmall(u64),
    /// The volume can have so many bytes, or more.
    AtLeast(u64),
    /// The volume can have so many bytes, or less.
    AtMost(u64),
    /// What lies in this segment cannot be read, so it cannot move.
    Stuck(u64),
    /// There is no room for what would move.
    NoRoom,
    /// What the volume lies on is full.
    HostFull,
    /// The volume lies in a file, which can have any size.
    SizeWanted,
}

impl ResizeAnswer {
    /// As it is answered.
    pub fn encode(self) -> Vec<u8> {
        let (kind, number) = match self {
            Self::Done(bytes) => (0, bytes),
            Self::Left(segments) => (1, segments),
            Self::TooSmall(bytes) => (2, bytes),
            Self::AtLeast(bytes) => (3, bytes),
            Self::AtMost(bytes) => (4, bytes),
            Self::Stuck(segment) => (5, segment),
            Self::NoRoom => (6, 0),
            Self::HostFull => (7, 0),
            Self::SizeWanted => (8, 0),
        };
        [kind, number].into_iter().flat_map(u64::to_ne_bytes).collect()
    }

    /// What these bytes say.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let number = word(8)?;
        Some(match word(0)? {
            0 => Self::Done(number),
            1 => Self::Left(number),
            2 => Self::TooSmall(number),
            3 => Self::AtLeast(number),
            4 => Self::AtMost(number),
            5 => Self::Stuck(number),
            6 => Self::NoRoom,
            7 => Self::HostFull,
            8 => Self::SizeWanted,
            _ => return None,
        })
    }
}

/// Gives the space of free segments back to the host; answers with the bytes, `u64`. For those
/// who may [`TUNE`]. Parks. `_IOR('F', 26, char[8])`.
pub const TRIM: u32 = ioc(2, 26, 8);
/// Files of one [`WARM`], at most.
pub const WARM_FILES_MAX: usize = 1000;
/// Bytes of its message: `u64 flags, u64 offset, u64 length, u64 files[]`.
pub const WARM_LEN: u32 = 24 + 8 * WARM_FILES_MAX as u32;
/// A flag: what earlier requests have warmed may leave the cache again.
pub const WARM_BEGINS: u64 = 1;
/// Brings a range of the contents of files into the cache that an object store's volume has on a
/// local disk; parks. In: inode numbers, up to the first 0; one that is no file any more is
/// skipped. Out: `u64 fetched, u64 cached, u64 full`: bytes that were fetched and that were there,
/// as they are stored; not 0 if the cache is full of what was warmed, and the rest was left out.
/// For those who may [`TUNE`]. `EOPNOTSUPP`: the volume is not in a store; `ENOMEDIUM`: it has no
/// cache; `ENOSPC`: the cache's disk is full or has failed. `_IOWR('F', 27, char[8024])`.
pub const WARM: u32 = ioc(3, 27, WARM_LEN);
/// Bytes of a [`SNAPSHOT_CREATE`] or [`SNAPSHOT_DELETE`] message: the name of a snapshot and a NUL.
pub const SNAPSHOT_LEN: u32 = 256;
/// Makes a snapshot of the volume: all that it has now is made durable first. What only the kernel
/// has is not in it, unless a [`SYNC`] came before.
/// Parks. For those who may [`TUNE`], as the next two. `EOPNOTSUPP`: the volume is not in a store,
/// and has no snapshots; `EEXIST`: it has one of this name; `EMLINK`: it has as many as it may
/// have; `EINVAL`: a snapshot cannot have this name. `_IOW('F', 28, char[256])`.
pub const SNAPSHOT_CREATE: u32 = ioc(1, 28, SNAPSHOT_LEN);
/// Deletes a snapshot; parks. `ENOENT`: there is none of this name. `_IOW('F', 29, char[256])`.
pub const SNAPSHOT_DELETE: u32 = ioc(1, 29, SNAPSHOT_LEN);
/// The snapshots, in the order in which they were made: the index of the first one as `u64`; comes
/// back as a JSON list of as many as fit, each a name and the seconds since the Unix epoch when it
/// was made, ended by NUL. `_IOWR('F', 30, char[16383])`.
pub const SNAPSHOT_LIST: u32 = ioc(3, 30, STATS_LEN);
/// The same as fstrim(8) asks for it: `u64 start, u64 len, u64 minlen`, answered with the bytes
/// in `len`. All that is free is given back, whatever the range. `FITRIM`, `_IOWR('X', 121,
/// struct fstrim_range)`.
pub const FITRIM: u32 = 3 << 30 | 24 << 16 | (b'X' as u32) << 8 | 121;
