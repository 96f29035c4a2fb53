//! Draws operations that mostly make sense: the generator knows what is there by then.

use crate::device::SimRng;
use crate::model::{Kind, Model};
use crate::ops::{Alloc, DEPTH_MAX, Move, NAMES, Op, Path, SLOTS, Which};

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
