//! Runs a sequence of operations once, then crashes it everywhere: at each flush boundary, and at points between, what a loss of
//! power may leave is checked, opened, read, compared with the model, worked on and closed again.
//!
//! A run has several lives: each starts from a crash of the one before, so that recovery itself crashes, and old logs and
//! old data lie below new ones.

use crate::device::{Fault, Op as DeviceOp, SimDevice, SimRng, sim_env};
use crate::history::{History, Observed, difference};
use crate::model::{Effects, Model, Outcome};
use crate::ops::{Generator, Op, Path, Which};
use crate::world::{COMMIT_INTERVAL_MS, Opening, Trouble, World};
use ferry_device::BlockDevice;
use ferry_fs::volume::{MkfsOptions, mkfs};
use ferry_fs::{FsckOptions, Ino, Report, fsck};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

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
}

fn draw_fault(rng: &mut SimRng) -> Fault {
    let (op, errno) = *rng.pick(&[
        (DeviceOp::Write, libc::EIO),
        (DeviceOp::Write, libc::EIO),
        (DeviceOp::Flush, libc::EIO),
        (DeviceOp::Allocate, libc::ENOSPC),
    ]);
    let most = if op == DeviceOp::Allocate { 6 } else { 60 };
    Fault { op, after: rng.below(most), errno, sticky: op == DeviceOp::Allocate || rng.chance(1, 2) }
}

/// What was tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Sequences.
    pub runs: u64,
    /// Operations.
    pub ops: u64,
    /// Operations for which there was no space.
    pub no_space: u64,
    /// Crash points.
    pub points: u64,
    /// Crash images recovered and compared.
    pub images: u64,
    /// Lives that an error of the device ended.
    pub failed: u64,
    /// Crashes during recovery.
    pub crashed_recoveries: u64,
    /// Images worked on, closed and opened again.
    pub resumed: u64,
}

impl Tally {
    /// Adds another.
    pub fn add(&mut self, other: &Tally) {
        self.runs += other.runs;
        self.ops += other.ops;
        self.no_space += other.no_space;
        self.points += other.points;
        self.images += other.images;
        self.failed += other.failed;
        self.crashed_recoveries += other.crashed_recoveries;
        self.resumed += other.resumed;
    }
}

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which life, counted from 0.
    pub life: usize,
    /// Where in it.
    pub stage: String,
    /// What.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "life {}, {}: {}", self.life, self.stage, self.what)
    }
}

impl Plan {
    /// Draws a run from a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = SimRng::new(seed);
        // One of eight is long: the log wraps, checkpoints come. Some of those write much: the volume runs full and is cleaned.
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
            volume_bytes: if long { 16 << 20 } else { *rng.pick(&[16 << 20, 16 << 20, 24 << 20, 32 << 20]) },
            log_bytes: *rng.pick(&[512 << 10, 512 << 10, 1 << 20]),
            cache_bytes: *rng.pick(&[1 << 20, 4 << 20]),
            lives,
            points_max: usize::MAX,
            images: 1,
            flush_lies: false,
            fault: rng.chance(1, 5).then(|| draw_fault(&mut rng)),
        }
    }

    /// Operations of all lives.
    pub fn ops(&self) -> usize {
        self.lives.iter().map(Vec::len).sum()
    }

    fn rng(&self, life: usize, what: u64) -> SimRng {
        SimRng::new(
            self.seed
                ^ (life as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ what.wrapping_mul(0xd134_2543_de82_ef95),
        )
    }

    /// The same on a thread that bears the seed's name, so that a panic says which run it was; where panics unwind, one is a
    /// failure like any other.
    pub fn run_apart(&self) -> Result<Tally, Failure> {
        let run = || self.run();
        std::thread::scope(|scope| {
            let thread =
                std::thread::Builder::new().name(format!("seed {}", self.seed)).spawn_scoped(scope, run);
            let joined = thread.expect("a thread can be started").join();
            joined.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                Err(Failure { life: self.lives.len() - 1, stage: "panic".into(), what: text.into() })
            })
        })
    }

    /// Runs and crashes it.
    pub fn run(&self) -> Result<Tally, Failure> {
        let mut tally = Tally { runs: 1, ..Tally::default() };
        let mut device = Arc::new(self.fresh()?);
        let mut model = Model::empty();
        let mut seen = HashSet::new();
        for (life, ops) in self.lives.iter().enumerate() {
            let mut life = Life { plan: self, number: life, rng: self.rng(life, 0), seen, tally: &mut tally };
            let history = life.live(&device, &mut model, ops)?;
            (device, model, seen) = life.crash_everywhere(&device, &history)?;
        }
        Ok(tally)
    }

    /// The volume as some crash of the first life leaves it: a volume to do damage to.
    pub fn first_life_crashed(&self) -> Result<Arc<SimDevice>, Failure> {
        let mut tally = Tally::default();
        let device = Arc::new(self.fresh()?);
        let mut model = Model::empty();
        let mut life =
            Life { plan: self, number: 0, rng: self.rng(0, 0), seen: HashSet::new(), tally: &mut tally };
        life.live(&device, &mut model, &self.lives[0])?;
        let point = life.rng.index(device.trace_len() + 1);
        Ok(life.image(&device, point, 0).0)
    }

    fn fresh(&self) -> Result<SimDevice, Failure> {
        let device = Arc::new(SimDevice::new(self.volume_bytes));
        let (env, _) = sim_env(self.seed ^ 0x6d6b_6673);
        let options = MkfsOptions { log_size: Some(self.log_bytes), ..MkfsOptions::default() };
        let dyn_device: Arc<dyn BlockDevice> = device.clone();
        let failed =
            |error: &dyn fmt::Display| Failure { life: 0, stage: "mkfs".into(), what: error.to_string() };
        mkfs(&dyn_device, &options, &env).map_err(|error| failed(&error))?;
        drop(dyn_device);
        device.restart_trace();
        Arc::into_inner(device).ok_or_else(|| failed(&"somebody keeps the device"))
    }
}

/// How an operation went.
enum Step {
    Done,
    DeviceFailed,
}

/// One life of the volume.
struct Life<'p> {
    plan: &'p Plan,
    number: usize,
    rng: SimRng,
    /// Inode numbers that programs saw before this life; none may come again.
    seen: HashSet<Ino>,
    tally: &'p mut Tally,
}

impl Life<'_> {
    fn fail<T>(&self, stage: impl Into<String>, what: impl Into<String>) -> Result<T, Failure> {
        Err(Failure { life: self.number, stage: stage.into(), what: what.into() })
    }

    fn opening(&mut self) -> Opening {
        Opening { seed: self.rng.next_u64(), cache_bytes: self.plan.cache_bytes }
    }

    /// Opens the volume, does it all, compares, closes, checks.
    fn live(&mut self, device: &Arc<SimDevice>, model: &mut Model, ops: &[Op]) -> Result<History, Failure> {
        device.restart_trace();
        device.set_flush_lies(self.plan.flush_lies);
        let mut history = History::new(model);
        let opening = self.opening();
        let mut world = World::open(device, opening).or_else(|what| self.fail("open", what))?;
        if let Some(fault) = self.plan.fault {
            device.inject(fault);
        }
        for (i, op) in ops.iter().enumerate() {
            let n = self.number * 100_000 + i;
            let step = self.step(&mut world, &mut history, model, op, n, device);
            match step.or_else(|what| self.fail(format!("operation {i}: {op}"), what))? {
                Step::Done => {}
                Step::DeviceFailed => {
                    self.tally.failed += 1;
                    return Ok(history);
                }
            }
        }
        let found = world.observe().or_else(|trouble| self.fail("at the end", format!("{trouble:?}")))?;
        self.compare(model, &found, "at the end")?;
        let inodes = world.inodes().or_else(|trouble| self.fail("at the end", format!("{trouble:?}")))?;
        if inodes != model.inodes() {
            return self.fail("at the end", format!("{inodes} inodes counted, there are {}", model.inodes()));
        }
        match world.close() {
            Ok(()) => {}
            Err(_) if self.plan.fault.is_some() => {
                self.tally.failed += 1;
                return Ok(history);
            }
            Err(what) => return self.fail("close", what),
        }
        history.ended(model.tree(), Effects::default(), device.trace_len());
        history.promised_all();
        device.heal();
        self.check(device, "after close", true)?;
        Ok(history)
    }

    /// One operation, on the volume and in the model.
    fn step(
        &mut self,
        world: &mut World,
        history: &mut History,
        model: &mut Model,
        op: &Op,
        n: usize,
        device: &SimDevice,
    ) -> Result<Step, String> {
        let outcome = model.outcome(op);
        if outcome == Outcome::Skip {
            return Ok(Step::Done);
        }
        let synced = match op {
            Op::Fsync(which, _) => model.which(which),
            Op::FsyncDir(path) => model.resolve(path),
            _ => None,
        };
        self.tally.ops += 1;
        let effects = match (outcome, world.run(op, n, model)) {
            (_, Err(Trouble::Wrong(what))) => return Err(what),
            (Outcome::Done, Ok(new)) if op.makes_inode() => {
                if self.seen.contains(&new) || !history.saw(new) {
                    return Err(format!("inode number {new} is given a second time"));
                }
                model.apply(op, n, new)
            }
            (Outcome::Done, Ok(_)) => model.apply(op, n, 0),
            (_, Err(Trouble::Errno(libc::ENOSPC))) if op.may_lack_space() => {
                self.tally.no_space += 1;
                history.ended(model.tree(), Effects::default(), device.trace_len());
                return Ok(Step::Done);
            }
            (_, Err(Trouble::Errno(libc::EIO | libc::EROFS))) if self.plan.fault.is_some() => {
                // It failed for the program; at a crash it may have happened all the same.
                if outcome == Outcome::Done && !op.makes_inode() {
                    let effects = model.apply(op, n, 0);
                    history.ended(model.tree(), effects, usize::MAX);
                }
                return Ok(Step::DeviceFailed);
            }
            (Outcome::Fails(expected), Err(Trouble::Errno(errno))) if errno == expected => Effects::default(),
            (outcome, result) => return Err(format!("{outcome:?} expected, {result:?} happened")),
        };
        history.ended(model.tree(), effects, device.trace_len());
        match (synced, op) {
            (Some(ino), _) => history.promised(ino, &model.above(ino)),
            (None, Op::Sync) => history.promised_all(),
            (None, Op::Tick(ms)) if *ms >= COMMIT_INTERVAL_MS => history.promised_metadata(),
            _ => {}
        }
        Ok(Step::Done)
    }

    /// Crashes the life at many points. Returns one of the images, and the state in it, for the next life.
    fn crash_everywhere(
        &mut self,
        device: &Arc<SimDevice>,
        history: &History,
    ) -> Result<(Arc<SimDevice>, Model, HashSet<Ino>), Failure> {
        let points = self.points(device);
        let heir = self.rng.index(points.len());
        let mut next = None;
        for (i, point) in points.iter().enumerate() {
            self.tally.points += 1;
            for n in 0..self.plan.images as u64 {
                let (image, mut rng) = self.image(device, *point, n);
                let observed = self.recover(&image, history, *point, &mut rng)?;
                if i == heir && n == 0 {
                    // The same image once more: the recovery has changed the first.
                    let (image, _) = self.image(device, *point, n);
                    let seen = self.seen.iter().copied().chain(history.seen_by(*point)).collect();
                    next = Some((image, Model::new(observed.tree, observed.contents), seen));
                }
            }
        }
        next.map_or_else(|| self.fail("crash", "no crash point"), Ok)
    }

    /// Image number `n` of a crash at `point`, and the random numbers for what is done with it.
    fn image(&self, device: &SimDevice, point: usize, n: u64) -> (Arc<SimDevice>, SimRng) {
        let mut rng = self.plan.rng(self.number, 1 << 60 | (point as u64) << 8 | n);
        (Arc::new(device.crash_image(point, &mut rng)), rng)
    }

    /// All flush boundaries and as many points between, thinned out to what the plan allows.
    fn points(&mut self, device: &SimDevice) -> Vec<usize> {
        let len = device.trace_len();
        let mut points = device.flush_points();
        for _ in 0..points.len() / 2 + 1 {
            points.push(self.rng.index(len + 1));
        }
        while points.len() > self.plan.points_max {
            points.swap_remove(self.rng.index(points.len()));
        }
        points.sort_unstable();
        points.dedup();
        points
    }

    /// Checks a crash image, recovers it, compares; sometimes crashes the recovery, sometimes works on.
    fn recover(
        &mut self,
        image: &Arc<SimDevice>,
        history: &History,
        point: usize,
        rng: &mut SimRng,
    ) -> Result<Observed, Failure> {
        let stage = format!("crash at {point}");
        self.tally.images += 1;
        self.check(image, &stage, false)?;
        if image.trace_len() != 0 {
            return self.fail(stage, "the check wrote to the volume");
        }
        let opening = self.opening();
        let world = World::open(image, opening).or_else(|what| self.fail(&*stage, what))?;
        let recovered_at = image.trace_len();
        let found = world.observe().or_else(|trouble| self.fail(&*stage, format!("{trouble:?}")))?;
        let t = history.explain(point, &found).or_else(|what| self.fail(&*stage, what))?;
        if rng.chance(1, 3) {
            self.crash_recovery(image, rng.index(recovered_at + 1), history, point, rng)?;
        }
        if rng.chance(1, 4) {
            self.resume(image, world, &found, &format!("{stage} ({t} operations there)"))?;
        }
        Ok(found)
    }

    /// The power fails again, during recovery.
    fn crash_recovery(
        &mut self,
        image: &Arc<SimDevice>,
        at: usize,
        history: &History,
        point: usize,
        rng: &mut SimRng,
    ) -> Result<(), Failure> {
        let stage = format!("crash at {point}, then at {at} of recovery");
        self.tally.crashed_recoveries += 1;
        let image = Arc::new(image.crash_image(at, rng));
        self.check(&image, &stage, false)?;
        let opening = self.opening();
        let world = World::open(&image, opening).or_else(|what| self.fail(&*stage, what))?;
        let found = world.observe().or_else(|trouble| self.fail(&*stage, format!("{trouble:?}")))?;
        history.explain(point, &found).or_else(|what| self.fail(&*stage, what))?;
        Ok(())
    }

    /// What recovery made is a volume like any other: it takes more, closes, and shows all of it when opened again.
    fn resume(
        &mut self,
        image: &Arc<SimDevice>,
        mut world: World,
        found: &Observed,
        stage: &str,
    ) -> Result<(), Failure> {
        self.tally.resumed += 1;
        let mut model = Model::new(found.tree.clone(), found.contents.clone());
        let mut history = History::new(&model);
        let path = (0..crate::ops::NAMES).map(|n| Path(vec![n])).find(|path| model.resolve(path).is_none());
        if let Some(path) = path {
            let file = Which::At(path.clone());
            for op in [Op::Create(path), Op::Write(file.clone(), 0, 6000), Op::Fsync(file, false)] {
                self.step(&mut world, &mut history, &mut model, &op, 99_999, image)
                    .map(drop)
                    .or_else(|what| self.fail(format!("{stage}, then {op}"), what))?;
            }
        }
        world.close().or_else(|what| self.fail(format!("{stage}, then close"), what))?;
        self.check(image, &format!("{stage}, then closed"), true)?;
        let opening = self.opening();
        let world =
            World::open(image, opening).or_else(|what| self.fail(format!("{stage}, opened again"), what))?;
        let again =
            world.observe().or_else(|trouble| self.fail(stage, format!("opened again: {trouble:?}")))?;
        self.compare(&model, &again, &format!("{stage}, opened again"))
    }

    /// A volume is clean, data and all; a closed one holds no orphans.
    fn check(&self, device: &Arc<SimDevice>, stage: &str, closed: bool) -> Result<(), Failure> {
        let (env, _) = sim_env(self.plan.seed);
        let device: Arc<dyn BlockDevice> = device.clone();
        let options = FsckOptions { verify_data: true, progress: None };
        let report: Report = match fsck(&device, options, &env) {
            Ok(report) => report,
            Err(error) => return self.fail(stage, format!("cannot check: {error}")),
        };
        if !report.clean {
            let findings: Vec<_> = report.findings.iter().map(|finding| format!("\n{finding}")).collect();
            return self.fail(stage, format!("fsck finds damage:{}", findings.concat()));
        }
        let holdings = report.holdings;
        if closed && (holdings.orphans > 0 || holdings.unclean || holdings.recovered_contexts > 0) {
            return self.fail(stage, format!("a closed volume has {holdings:?}"));
        }
        Ok(())
    }

    fn compare(&self, model: &Model, found: &Observed, stage: &str) -> Result<(), Failure> {
        if model.tree() != found.tree {
            return self.fail(
                stage,
                format!("names or attributes differ:{}", difference(&model.tree(), &found.tree)),
            );
        }
        for (ino, bytes) in model.all_contents() {
            let other = &found.contents[&ino];
            if bytes != *other {
                let at = bytes.iter().zip(other.iter()).position(|(a, b)| a != b);
                let what = format!(
                    "inode {ino}: {} bytes expected, {} found, first difference at {at:?}",
                    bytes.len(),
                    other.len()
                );
                return self.fail(stage, what);
            }
        }
        Ok(())
    }
}
