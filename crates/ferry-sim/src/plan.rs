//! A run, wholly determined by its parts; what it counted; how it failed.

use crate::begin::Begin;
use crate::device::{Fault, Op as DeviceOp, SimRng};
use crate::generator::Generator;
use crate::model::Model;
use crate::ops::{Op, Which};
use ferry_fs::FlushPolicy;
use ferry_fs::volume::LOG_MIN;
use std::fmt;
use std::ops::Range;

/// A run, wholly determined.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Decides everything that the rest leaves open.
    pub seed: u64,
    /// Bytes of the volume.
    pub volume_bytes: u64,
    /// Bytes of its log.
    pub log_bytes: u64,
    /// Memory for caches, in bytes.
    pub cache_bytes: usize,
    /// What is done in each life.
    pub lives: Vec<Vec<Op>>,
    /// Crash points tried in each life, at most.
    pub points_max: usize,
    /// Images tried at each point.
    pub images: usize,
    /// A planted bug: the device's flush does nothing.
    pub flush_lies: bool,
    /// The device fails at some moment of each life.
    pub fault: Option<Fault>,
    /// What it begins on.
    pub begin: Begin,
    /// Nobody waits for an fsync: with this policy, many are under way together, and the device
    /// completes its requests late and in any order. Otherwise each is complete before the next
    /// begins, and the policy follows from the seed.
    pub under_way: Option<FlushPolicy>,
}

/// What half of the runs begin on was in use before.
fn draw_begin(rng: &mut SimRng) -> Begin {
    match rng.below(8) {
        0..4 => Begin::Blank,
        4 => Begin::Scribbled,
        n => {
            let count = 20 + rng.index(200);
            Begin::Over { ops: Generator::new(Model::empty()).draw(rng, count), same_id: n > 5 }
        }
    }
}

fn draw_fault(rng: &mut SimRng) -> Fault {
    let (op, errno) = *rng.pick(&[
        (DeviceOp::Write, libc::EIO),
        (DeviceOp::Write, libc::EIO),
        (DeviceOp::Flush, libc::EIO),
        (DeviceOp::Allocate, libc::ENOSPC),
    ]);
    let most = if op == DeviceOp::Allocate { 6 } else { 60 };
    Fault {
        op,
        after: rng.below(most),
        errno,
        sticky: op == DeviceOp::Allocate || rng.chance(1, 2),
    }
}

/// What was tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Sequences of operations.
    pub runs: u64,
    /// Operations of all sequences.
    pub ops: u64,
    /// Operations for which there was no space.
    pub no_space: u64,
    /// Crash points that were tried.
    pub points: u64,
    /// Crash images recovered and compared.
    pub images: u64,
    /// Lives that an error of the device ended.
    pub failed: u64,
    /// Crashes during recovery.
    pub crashed_recoveries: u64,
    /// Images worked on, closed and opened again.
    pub resumed: u64,
    /// Images emptied, whose space was all there again.
    pub emptied: u64,
    /// Crash points at which the cleaner was at work.
    pub in_cleaning: u64,
    /// Crash points in a checkpoint.
    pub in_checkpoint: u64,
    /// fsyncs that others overtook before they were answered.
    pub overlapped: u64,
    /// Records of the log that were under way at the same time, at most.
    pub in_flight_max: u64,
    /// How often logs were written from end to end.
    pub log_rounds: u64,
    /// Commits held for callers who were expected.
    pub holds: u64,
}

impl Tally {
    /// Adds what another run tried.
    pub fn add(&mut self, other: &Tally) {
        self.runs += other.runs;
        self.ops += other.ops;
        self.no_space += other.no_space;
        self.points += other.points;
        self.images += other.images;
        self.failed += other.failed;
        self.crashed_recoveries += other.crashed_recoveries;
        self.resumed += other.resumed;
        self.emptied += other.emptied;
        self.in_cleaning += other.in_cleaning;
        self.in_checkpoint += other.in_checkpoint;
        self.overlapped += other.overlapped;
        self.in_flight_max = self.in_flight_max.max(other.in_flight_max);
        self.log_rounds += other.log_rounds;
        self.holds += other.holds;
    }
}

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which life, counted from 0.
    pub life: usize,
    /// Where in it.
    pub stage: String,
    /// What must not be.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "life {}, {}: {}", self.life, self.stage, self.what)
    }
}

/// The message of the panic that ended a thread.
pub(crate) fn panic_text(ended: std::thread::Result<()>) -> String {
    let panic = ended.err();
    let text = panic.as_ref().and_then(|panic| panic.downcast_ref::<String>().cloned());
    let word = || Some((*panic.as_ref()?.downcast_ref::<&str>()?).to_owned());
    text.or_else(word).unwrap_or_else(|| "no message".into())
}

impl Plan {
    /// Draws a run from a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = SimRng::new(seed);
        // One of eight is long: the log wraps, checkpoints come. Some of those write much: the
        // volume runs full and is cleaned.
        let long = rng.chance(1, 8);
        let heavy = long && rng.chance(1, 3);
        let count = if rng.chance(1, 4) { 3 } else { 2 };
        let lives = (0..count)
            .map(|_| {
                let ops = if long { 200 + rng.index(400) } else { 10 + rng.index(50) };
                let mut generator = Generator::new(Model::empty());
                let mut drawn = Vec::new();
                if heavy {
                    generator = generator.heavy();
                    drawn = generator.ballast(7 + rng.below(3) as u8);
                }
                drawn.extend(generator.draw(&mut rng, ops));
                drawn
            })
            .collect();
        Self {
            seed,
            volume_bytes: if long {
                16 << 20
            } else {
                *rng.pick(&[16 << 20, 16 << 20, 24 << 20, 32 << 20])
            },
            log_bytes: *rng.pick(&[LOG_MIN, LOG_MIN, 1 << 20]),
            cache_bytes: *rng.pick(&[1 << 20, 4 << 20]),
            lives,
            points_max: usize::MAX,
            images: 1,
            flush_lies: false,
            fault: rng.chance(1, 5).then(|| draw_fault(&mut rng)),
            begin: draw_begin(&mut rng),
            under_way: None,
        }
    }

    /// Draws one life of fifty operations, with the rest as in [`Plan::draw`].
    pub fn fifty(seed: u64) -> Self {
        let ops = Generator::new(Model::empty()).draw(&mut SimRng::new(!seed), 50);
        Self {
            volume_bytes: 16 << 20,
            log_bytes: LOG_MIN,
            lives: vec![ops],
            fault: None,
            ..Self::draw(seed)
        }
    }

    /// Draws one life on a small volume that is half full of large files, which are overwritten
    /// here and there: their segments are cleaned all the time.
    pub fn churning(seed: u64) -> Self {
        let mut rng = SimRng::new(!seed);
        let mut ops = Generator::new(Model::empty()).ballast(8);
        let files: Vec<Which> = ops
            .iter()
            .filter_map(|op| if let Op::Write(file, ..) = op { Some(file.clone()) } else { None })
            .collect();
        for n in 0..160 {
            let file = rng.pick(&files).clone();
            let (block, blocks) = (rng.below(240), 1 + rng.below(12));
            ops.push(Op::Write(file.clone(), 4096 * block, 4096 * blocks));
            match n % 8 {
                3 => ops.push(Op::Fsync(file, false)),
                7 => ops.push(Op::Tick(1200)),
                _ => {}
            }
        }
        Self {
            volume_bytes: 16 << 20,
            log_bytes: LOG_MIN,
            lives: vec![ops],
            points_max: 60,
            fault: None,
            ..Self::draw(seed)
        }
    }

    /// Draws two lives in which fsyncs are under way together, on the smallest log there is, which
    /// is written from end to end several times.
    pub fn under_way(seed: u64, policy: FlushPolicy) -> Self {
        Self::on_log(seed, policy, LOG_MIN, 3000..9000)
    }

    /// The same on a log of 4 MiB, with records of many blocks.
    pub fn wrapping(seed: u64, policy: FlushPolicy) -> Self {
        Self::on_log(seed, policy, 4 << 20, 20_000..60_000)
    }

    fn on_log(seed: u64, policy: FlushPolicy, log_bytes: u64, fill: Range<u16>) -> Self {
        let mut rng = SimRng::new(!seed);
        let life = |rng: &mut SimRng| {
            let mut ops = Vec::new();
            for op in Generator::new(Model::empty()).draw(rng, 400) {
                let file = match &op {
                    Op::Write(file, ..) | Op::Append(file, _) | Op::Truncate(file, _) => {
                        Some(file.clone())
                    }
                    Op::Create(path) => Some(Which::At(path.clone())),
                    _ => None,
                };
                ops.push(op);
                if rng.chance(1, 6) {
                    // Seals what is collected, whatever is under way.
                    ops.push(Op::Tick(1000 + rng.below(200) as u16));
                }
                if let Some(Which::At(path)) = &file {
                    // Fills the log.
                    ops.push(Op::SetXattr(
                        path.clone(),
                        rng.below(3) as u8,
                        fill.start + rng.below(u64::from(fill.end - fill.start)) as u16,
                    ));
                }
                ops.extend(file.map(|file| Op::Fsync(file, false)));
            }
            ops
        };
        let drawn = Self::draw(seed);
        Self {
            volume_bytes: 64 << 20,
            log_bytes,
            cache_bytes: 16 << 20,
            lives: vec![life(&mut rng), life(&mut rng)],
            points_max: 40,
            // A request that gets no space from the host waits for the device, which is late here
            // and completes nothing while this one thread waits.
            fault: drawn.fault.filter(|fault| fault.op != DeviceOp::Allocate),
            under_way: Some(policy),
            ..drawn
        }
    }

    /// Operations of all lives.
    pub fn ops(&self) -> usize {
        self.lives.iter().map(Vec::len).sum()
    }

    pub(crate) fn rng(&self, life: usize, what: u64) -> SimRng {
        SimRng::new(
            self.seed
                ^ (life as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ what.wrapping_mul(0xd134_2543_de82_ef95),
        )
    }
}
