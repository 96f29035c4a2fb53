//! What both are asked to do, and what they answer.

use ferry_sim::device::SimRng;
use std::collections::BTreeMap;
use std::fmt;

/// Open files, at most.
pub const SLOTS: usize = 3;
/// Files stay below this size, in bytes.
const FILE_MAX: u64 = 400 << 10;
/// Errors that both give for what neither is asked: the kernel itself refuses it.
pub const REFUSED: i32 = libc::EOPNOTSUPP;

/// The number of each name, from the root.
pub type Path = Vec<u8>;

/// The bytes of name number `n`.
pub fn name(n: u8) -> Vec<u8> {
    match n {
        4 => vec![b'n'; 255],
        5 => vec![b'n'; 256],
        n => vec![b'a' + n],
    }
}

/// What a write of operation `n` writes; a few of its bytes tell it from all others.
pub fn pattern(n: usize, len: u64) -> Vec<u8> {
    (0..len).map(|i| (n as u64 * 37 + i / 8 * 11 + i) as u8 | 1).collect()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Create {
        path: Path,
        slot: usize,
        exclusive: bool,
        truncate: bool,
        mode: u32,
    },
    Open {
        path: Path,
        slot: usize,
        truncate: bool,
    },
    Tmpfile {
        dir: Path,
        slot: usize,
    },
    LinkSlot {
        slot: usize,
        path: Path,
    },
    Close(usize),
    Mkdir(Path, u32),
    Rmdir(Path),
    Unlink(Path),
    Rename {
        from: Path,
        to: Path,
        no_replace: bool,
        exchange: bool,
    },
    Link(Path, Path),
    Symlink(Path, usize),
    Fifo(Path),
    Readlink(Path),
    Stat(Path),
    List(Path),
    Chmod(Path, u32),
    Chown(Path, u32, u32),
    /// Access and modification time, in nanoseconds since 1970; all of them in its first days.
    Times(Path, u64, u64),
    Truncate(Path, u64),
    TruncateSlot(usize, u64),
    StatSlot(usize),
    Read(usize, u64, usize),
    Write(usize, u64, u64),
    Allocate {
        slot: usize,
        mode: i32,
        offset: u64,
        len: u64,
    },
    Seek {
        slot: usize,
        offset: u64,
        data: bool,
    },
    SetXattr {
        path: Path,
        number: u8,
        len: usize,
        create: bool,
        replace: bool,
    },
    GetXattr(Path, u8),
    ListXattr(Path),
    RemoveXattr(Path, u8),
    Fsync(usize),
    /// FerryFS alone: everything is made durable.
    Sync,
    /// All files are closed; FerryFS is unmounted and mounted again.
    Remount,
}

/// Attributes that both have alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    pub kind: u32,
    pub mode: u32,
    pub nlink: u64,
    pub uid: u32,
    pub gid: u32,
    /// Not of directories.
    pub size: Option<u64>,
    /// Times that were set, and not since changed by the clock.
    pub atime: Option<u64>,
    pub mtime: Option<u64>,
}

/// Times behind this one, in seconds, are the clock's: nobody sets them.
const CLOCK_FROM: i64 = 1_000_000_000;

impl Stat {
    pub fn set_time(secs: i64, nanos: u32) -> Option<u64> {
        (secs < CLOCK_FROM).then_some(secs as u64 * 1_000_000_000 + u64::from(nanos))
    }
}
#[derive(Clone, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Error(i32),
    Bytes(Vec<u8>),
    Stat(Stat),
    /// Names and types.
    Names(BTreeMap<Vec<u8>, u32>),
    Number(u64),
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => write!(f, "done"),
            Outcome::Error(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Outcome::Bytes(bytes) => {
                write!(f, "{} bytes {:x?}…", bytes.len(), &bytes[..bytes.len().min(12)])
            }
            Outcome::Stat(stat) => write!(f, "{stat:?}"),
            Outcome::Names(names) => {
                let names: Vec<_> = names
                    .iter()
                    .map(|(name, kind)| format!("{}:{kind:o}", name.escape_ascii()))
                    .collect();
                write!(f, "{names:?}")
            }
            Outcome::Number(number) => write!(f, "{number}"),
        }
    }
}

/// Something that does operations: FerryFS, or the host.
pub trait System {
    /// Does operation number `n`.
    fn run(&mut self, op: &Op, n: usize) -> Outcome;
}

/// Draws a sequence.
pub fn draw(rng: &mut SimRng, count: usize) -> Vec<Op> {
    (0..count).map(|_| draw_one(rng)).collect()
}

fn path(rng: &mut SimRng) -> Path {
    let depth = *rng.pick(&[1, 1, 1, 1, 2, 2, 2, 3]);
    (0..depth)
        .map(|_| match rng.below(40) {
            0 => 5,
            1 | 2 => 4,
            _ => rng.below(4) as u8,
        })
        .collect()
}

fn dir(rng: &mut SimRng) -> Path {
    if rng.chance(1, 3) { Vec::new() } else { path(rng) }
}

fn offset(rng: &mut SimRng) -> u64 {
    let at = match rng.below(7) {
        0 | 1 => 0,
        2 => rng.below(3000),
        3 => 4096 * rng.below(20),
        4 => 2040 + rng.below(16),
        5 => rng.below(20_000),
        _ => rng.below(150 << 10),
    };
    at.min(FILE_MAX / 2)
}

fn length(rng: &mut SimRng) -> u64 {
    match rng.below(8) {
        0..3 => 1 + rng.below(200),
        3 => 2040 + rng.below(16),
        4 => 4096 * (1 + rng.below(6)),
        5 => 4094 + rng.below(4),
        6 => 0,
        _ => 1 + rng.below(100_000),
    }
}

fn draw_one(rng: &mut SimRng) -> Op {
    let slot = rng.index(SLOTS);
    // Not 1777: what `fs.protected_*` does there is the kernel's affair.
    let mode = *rng.pick(&[0o644, 0o600, 0o777, 0o400, 0o4755, 0o2755, 0o1755, 0o2644]);
    match rng.below(100) {
        0..10 => {
            let (exclusive, truncate) = (rng.chance(1, 3), rng.chance(1, 4));
            Op::Create { path: path(rng), slot, exclusive, truncate, mode }
        }
        10..14 => Op::Open { path: path(rng), slot, truncate: rng.chance(1, 5) },
        14 => Op::Tmpfile { dir: dir(rng), slot },
        15 => Op::LinkSlot { slot, path: path(rng) },
        16..19 => Op::Close(slot),
        19..25 => Op::Mkdir(path(rng), mode),
        25..28 => Op::Rmdir(path(rng)),
        28..32 => Op::Unlink(path(rng)),
        32..40 => {
            let (no_replace, exchange) =
                *rng.pick(&[(false, false), (false, false), (true, false), (false, true)]);
            Op::Rename { from: path(rng), to: path(rng), no_replace, exchange }
        }
        40..43 => Op::Link(path(rng), path(rng)),
        43..45 => Op::Symlink(path(rng), *rng.pick(&[1, 30, 59, 60, 2048, 4095, 4096, 0])),
        45 => Op::Fifo(path(rng)),
        46 => Op::Readlink(path(rng)),
        47..51 => Op::Stat(dir(rng)),
        51..54 => Op::List(dir(rng)),
        54..57 => Op::Chmod(dir(rng), mode),
        57..59 => Op::Chown(path(rng), rng.below(3) as u32, rng.below(3) as u32),
        59..61 => Op::Times(path(rng), rng.below(1 << 45), rng.below(1 << 45)),
        61..63 => Op::Truncate(path(rng), offset(rng)),
        63..65 => Op::TruncateSlot(slot, offset(rng)),
        65..67 => Op::StatSlot(slot),
        67..72 => Op::Read(slot, offset(rng), length(rng) as usize),
        72..81 => Op::Write(slot, offset(rng), length(rng)),
        81..86 => {
            use libc::{
                FALLOC_FL_KEEP_SIZE as KEEP, FALLOC_FL_PUNCH_HOLE as PUNCH,
                FALLOC_FL_ZERO_RANGE as ZERO,
            };
            let mode = *rng.pick(&[0, KEEP, PUNCH | KEEP, ZERO, ZERO | KEEP]);
            Op::Allocate { slot, mode, offset: offset(rng), len: length(rng) }
        }
        86..88 => Op::Seek { slot, offset: offset(rng), data: rng.chance(1, 2) },
        88..91 => {
            let (create, replace) =
                *rng.pick(&[(false, false), (false, false), (true, false), (false, true)]);
            Op::SetXattr {
                path: dir(rng),
                number: rng.below(3) as u8,
                len: rng.index(300),
                create,
                replace,
            }
        }
        91 | 92 => Op::GetXattr(dir(rng), rng.below(3) as u8),
        93 => Op::ListXattr(dir(rng)),
        94 => Op::RemoveXattr(dir(rng), rng.below(3) as u8),
        95 | 96 => Op::Fsync(slot),
        97 | 98 => Op::Sync,
        _ => Op::Remount,
    }
}
