//! What a simulated program does: operations on a small name space, generated from a seed so that
//! most of them succeed and so that any subset of a sequence is a sequence again (which is what
//! shrinking needs).

use std::fmt;

/// Names are drawn from so many.
pub const NAMES: u8 = 5;
/// Handles that a program may hold over several operations.
pub const SLOTS: u8 = 3;
/// A longest path, in names.
pub const DEPTH_MAX: usize = 3;
/// Files stay below this size, in bytes.
pub const FILE_MAX: u64 = 1536 << 10;

/// Changes of metadata are durable after this time at the latest, in milliseconds.
pub const COMMIT_INTERVAL_MS: u16 = 1000;

/// A path from the root: the number of each name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path(pub Vec<u8>);

impl Path {
    /// The bytes of name number `n`; one of them is long.
    pub fn name(n: u8) -> Vec<u8> {
        if n == NAMES - 1 { vec![b'z'; 200] } else { vec![b'a' + n] }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|n| write!(f, "/{}", (b'a' + n) as char))?;
        if self.0.is_empty() { f.write_str("/") } else { Ok(()) }
    }
}

/// A file by its path, or by a handle that is held open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// The file that has this path at the moment.
    At(Path),
    /// The file behind a held handle.
    Held(u8),
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Which::At(path) => write!(f, "{path}"),
            Which::Held(slot) => write!(f, "handle {slot}"),
        }
    }
}

/// How fallocate(2) is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alloc {
    /// Allocate space and extend.
    Extend,
    /// Allocate space, keep the size.
    Keep,
    /// Punch a hole.
    Punch,
    /// Zero a range.
    Zero,
    /// Zero a range, keep the size.
    ZeroKeep,
}

impl Alloc {
    /// The mode bits.
    pub fn mode(self) -> i32 {
        use libc::{
            FALLOC_FL_KEEP_SIZE as KEEP, FALLOC_FL_PUNCH_HOLE as PUNCH,
            FALLOC_FL_ZERO_RANGE as ZERO,
        };
        match self {
            Alloc::Extend => 0,
            Alloc::Keep => KEEP,
            Alloc::Punch => PUNCH | KEEP,
            Alloc::Zero => ZERO,
            Alloc::ZeroKeep => ZERO | KEEP,
        }
    }
}

/// How rename is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Replace what is there.
    Replace,
    /// Fail if something is there.
    NoReplace,
    /// Swaps both names.
    Exchange,
}

/// One operation of a program, or time that passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Make a file (`O_EXCL`).
    Create(Path),
    /// Make a directory.
    Mkdir(Path),
    /// Make a symbolic link with a target of so many bytes.
    Symlink(Path, u16),
    /// Make a FIFO.
    Fifo(Path),
    /// Give a file another name.
    Link(Path, Path),
    /// Remove a name.
    Unlink(Path),
    /// Remove a directory.
    Rmdir(Path),
    /// Renames the first path to the second.
    Rename(Path, Path, Move),
    /// Write so many bytes at an offset.
    Write(Which, u64, u64),
    /// Write so many bytes at the end.
    Append(Which, u64),
    /// Set the size.
    Truncate(Which, u64),
    /// Allocate, punch or zero.
    Fallocate(Which, Alloc, u64, u64),
    /// Set attribute number n to so many bytes.
    SetXattr(Path, u8, u16),
    /// Remove attribute number n.
    RemoveXattr(Path, u8),
    /// Set the permission bits.
    Chmod(Path, u32),
    /// Read and compare.
    Read(Which, u64, u64),
    /// Open a file and keep the handle.
    Hold(Path, u8),
    /// Make a file without a name and keep the handle.
    HoldTmp(Path, u8),
    /// Give a held file a name.
    LinkHeld(u8, Path),
    /// Close a held handle.
    Release(u8),
    /// fsync or, with `true`, fdatasync of a file.
    Fsync(Which, bool),
    /// fsync of a directory.
    FsyncDir(Path),
    /// Sync of the whole volume.
    Sync,
    /// Free space is given back to the host.
    Trim,
    /// So many milliseconds pass, and background work is due.
    Tick(u16),
}

impl Op {
    /// It makes an inode.
    pub fn makes_inode(&self) -> bool {
        matches!(
            self,
            Op::Create(_) | Op::Mkdir(_) | Op::Symlink(..) | Op::Fifo(_) | Op::HoldTmp(..)
        )
    }

    /// It may fail for want of space. A write to allocated space may not, nor what gives space
    /// back.
    pub fn may_lack_space(&self) -> bool {
        let gives_back =
            matches!(self, Op::Unlink(_) | Op::Rmdir(_) | Op::RemoveXattr(..) | Op::Truncate(_, 0));
        let allocated =
            matches!(self, Op::Fsync(..) | Op::FsyncDir(_) | Op::Sync | Op::Trim | Op::Tick(_));
        !gives_back && !allocated && !matches!(self, Op::Read(..) | Op::Hold(..) | Op::Release(_))
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Create(path) => write!(f, "create {path}"),
            Op::Mkdir(path) => write!(f, "mkdir {path}"),
            Op::Symlink(path, len) => write!(f, "symlink {path}, a target of {len} bytes"),
            Op::Fifo(path) => write!(f, "mkfifo {path}"),
            Op::Link(from, to) => write!(f, "link {from} to {to}"),
            Op::Unlink(path) => write!(f, "unlink {path}"),
            Op::Rmdir(path) => write!(f, "rmdir {path}"),
            Op::Rename(from, to, how) => write!(f, "rename {from} to {to}, {how:?}"),
            Op::Write(which, offset, len) => write!(f, "write {len} bytes at {offset} of {which}"),
            Op::Append(which, len) => write!(f, "append {len} bytes to {which}"),
            Op::Truncate(which, size) => write!(f, "truncate {which} to {size}"),
            Op::Fallocate(which, how, offset, len) => {
                write!(f, "fallocate {how:?} {len} bytes at {offset} of {which}")
            }
            Op::SetXattr(path, n, len) => write!(f, "set attribute {n} of {path} to {len} bytes"),
            Op::RemoveXattr(path, n) => write!(f, "remove attribute {n} of {path}"),
            Op::Chmod(path, mode) => write!(f, "chmod {path} to {mode:o}"),
            Op::Read(which, offset, len) => write!(f, "read {len} bytes at {offset} of {which}"),
            Op::Hold(path, slot) => write!(f, "open {path} as handle {slot}"),
            Op::HoldTmp(path, slot) => {
                write!(f, "open a file without a name in {path} as handle {slot}")
            }
            Op::LinkHeld(slot, path) => write!(f, "link handle {slot} to {path}"),
            Op::Release(slot) => write!(f, "close handle {slot}"),
            Op::Fsync(which, false) => write!(f, "fsync {which}"),
            Op::Fsync(which, true) => write!(f, "fdatasync {which}"),
            Op::FsyncDir(path) => write!(f, "fsync directory {path}"),
            Op::Sync => write!(f, "sync the volume"),
            Op::Trim => write!(f, "give free space back"),
            Op::Tick(ms) => write!(f, "{ms} ms pass"),
        }
    }
}
