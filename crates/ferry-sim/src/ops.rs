//! What a simulated program does: operations on a small name space, generated from a seed so that
//! most of them succeed and so that any subset of a sequence is a sequence again (which is what
//! shrinking needs).

use crate::device::SimRng;
use crate::model::{Kind, Model};
use std::fmt;

/// Names are drawn from so many.
pub const NAMES: u8 = 5;
/// Handles that a program may hold over several operations.
pub const SLOTS: u8 = 3;
/// A longest path, in names.
const DEPTH_MAX: usize = 3;
/// Files stay below this size, in bytes.
pub const FILE_MAX: u64 = 1536 << 10;

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
    /// Swap.
    Exchange,
}

/// One operation.
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
    /// Rename.
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

/// Draws operations; follows what they do in a model of its own.
pub struct Generator {
    model: Model,
    next_ino: u64,
    heavy: bool,
}

impl Generator {
    /// Starts from the state that the sequence will start from.
    pub fn new(model: Model) -> Self {
        Self { model, next_ino: 1 << 40, heavy: false }
    }

    /// Writes much at a time, so that the volume runs full and must be cleaned.
    pub fn heavy(self) -> Self {
        Self { heavy: true, ..self }
    }

    /// Makes large files, so that little space is left for what follows.
    pub fn ballast(&mut self, files: u8) -> Vec<Op> {
        let dir = Path(vec![0]);
        let mut ops = vec![Op::Mkdir(dir)];
        for n in 0..files {
            let path =
                Path(if n < NAMES { vec![0, n] } else { vec![1 + (n - NAMES) % (NAMES - 1)] });
            ops.extend([Op::Create(path.clone()), Op::Write(Which::At(path), 0, 1 << 20)]);
        }
        ops.push(Op::Sync);
        for op in &ops {
            self.next_ino += 1;
            if self.model.outcome(op).is_ok() {
                self.model.apply(op, 0, self.next_ino);
            }
        }
        ops
    }

    /// Draws `count` operations.
    pub fn draw(&mut self, rng: &mut SimRng, count: usize) -> Vec<Op> {
        (0..count).map(|_| self.draw_one(rng)).collect()
    }

    fn draw_one(&mut self, rng: &mut SimRng) -> Op {
        // Nine of ten operations are ones that succeed; a few tries find one.
        let strict = rng.below(10) != 0;
        let mut op = self.candidate(rng);
        for _ in 0..8 {
            if !strict || self.model.outcome(&op).is_ok() {
                break;
            }
            op = self.candidate(rng);
        }
        if self.model.outcome(&op).is_ok() {
            self.next_ino += 1;
            self.model.apply(&op, 0, self.next_ino);
        }
        op
    }

    fn candidate(&mut self, rng: &mut SimRng) -> Op {
        let slot = rng.below(u64::from(SLOTS)) as u8;
        match rng.below(100) {
            0..13 => Op::Create(self.fresh(rng)),
            13..18 => Op::Mkdir(self.fresh(rng)),
            18..20 => {
                let most = if rng.below(8) == 0 { 4000 } else { 60 };
                Op::Symlink(self.fresh(rng), 1 + rng.below(most) as u16)
            }
            20 => Op::Fifo(self.fresh(rng)),
            21..24 => Op::Link(self.existing(rng, Kind::File), self.fresh(rng)),
            24..29 => Op::Unlink(self.existing(rng, Kind::File)),
            29..31 => Op::Rmdir(self.existing(rng, Kind::Dir)),
            31..37 => self.rename(rng),
            37..50 => Op::Write(self.file(rng), offset(rng), self.length(rng)),
            50..55 => Op::Append(self.file(rng), self.length(rng)),
            55..60 => Op::Truncate(self.file(rng), if rng.below(4) == 0 { 0 } else { offset(rng) }),
            60..65 => {
                let how = [Alloc::Extend, Alloc::Keep, Alloc::Punch, Alloc::Zero, Alloc::ZeroKeep];
                Op::Fallocate(self.file(rng), how[rng.below(5) as usize], offset(rng), length(rng))
            }
            65..68 => {
                let len = if rng.below(6) == 0 { 9000 } else { 300 };
                Op::SetXattr(self.any(rng), rng.below(3) as u8, rng.below(len) as u16)
            }
            68 => Op::RemoveXattr(self.any(rng), rng.below(3) as u8),
            69..71 => Op::Chmod(self.any(rng), 0o400 | rng.below(0o1000) as u32),
            71..73 => Op::Read(self.file(rng), offset(rng), length(rng)),
            73..76 => Op::Hold(self.existing(rng, Kind::File), slot),
            76 => Op::HoldTmp(self.existing(rng, Kind::Dir), slot),
            77 => Op::LinkHeld(slot, self.fresh(rng)),
            78..80 => Op::Release(slot),
            80..89 => Op::Fsync(self.file(rng), rng.below(3) == 0),
            89..93 => Op::FsyncDir(self.existing(rng, Kind::Dir)),
            93..95 => Op::Sync,
            // Where segments come and go.
            95 if self.heavy => Op::Trim,
            _ => Op::Tick(rng.below(1500) as u16),
        }
    }

    fn length(&self, rng: &mut SimRng) -> u64 {
        if self.heavy && rng.below(2) == 0 { 1 + rng.below(1 << 20) } else { length(rng) }
    }

    fn rename(&mut self, rng: &mut SimRng) -> Op {
        let from = self.any(rng);
        let to = if rng.below(2) == 0 { self.any(rng) } else { self.fresh(rng) };
        let how = match rng.below(6) {
            0 => Move::NoReplace,
            1 => Move::Exchange,
            _ => Move::Replace,
        };
        Op::Rename(from, to, how)
    }

    /// A name in some directory, perhaps a free one.
    fn fresh(&mut self, rng: &mut SimRng) -> Path {
        let mut path = self.existing(rng, Kind::Dir);
        path.0.truncate(DEPTH_MAX - 1);
        path.0.push(rng.below(u64::from(NAMES)) as u8);
        path
    }

    fn existing(&mut self, rng: &mut SimRng, kind: Kind) -> Path {
        let paths = self.model.paths(Some(kind));
        pick(rng, paths).unwrap_or(Path(vec![0]))
    }

    fn any(&mut self, rng: &mut SimRng) -> Path {
        let mut paths = self.model.paths(None);
        paths.retain(|path| !path.0.is_empty());
        pick(rng, paths).unwrap_or(Path(vec![0]))
    }

    fn file(&mut self, rng: &mut SimRng) -> Which {
        let held = rng.below(u64::from(SLOTS)) as u8;
        if rng.below(4) == 0 && self.model.held(held).is_some() {
            return Which::Held(held);
        }
        Which::At(self.existing(rng, Kind::File))
    }
}

fn pick(rng: &mut SimRng, mut paths: Vec<Path>) -> Option<Path> {
    if paths.is_empty() {
        return None;
    }
    let i = rng.below(paths.len() as u64) as usize;
    Some(paths.swap_remove(i))
}

/// Offsets and sizes gather where the code has edges: the inline limit, a block, a folio, a
/// segment.
fn offset(rng: &mut SimRng) -> u64 {
    match rng.below(8) {
        0 | 1 => 0,
        2 => rng.below(3000),
        3 => 4096 * rng.below(20),
        4 => 4096 * rng.below(20) + rng.below(4096),
        5 => rng.below(20_000),
        6 => (64 << 10) - 2 + rng.below(4),
        _ => rng.below(200 << 10),
    }
}

fn length(rng: &mut SimRng) -> u64 {
    match rng.below(10) {
        0..3 => 1 + rng.below(200),
        3 => 2046 + rng.below(4),
        4 => 4096 * (1 + rng.below(4)),
        5 => 4094 + rng.below(4),
        6 => 1 + rng.below(9000),
        7 => 1 + rng.below(40_000),
        8 => 1 + rng.below(100),
        _ => 1 + rng.below(100_000),
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
