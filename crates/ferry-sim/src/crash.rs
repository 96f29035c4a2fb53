//! Runs a sequence of operations once, then crashes it everywhere: at each flush boundary, and at
//! points between, what a loss of power may leave is checked, opened, read, compared with the
//! model, worked on and closed again.
//!
//! A run has several lives: each starts from a crash of the one before, so that recovery itself
//! crashes, and old logs and old data lie below new ones.

use crate::begin::{Begin, Start};
use crate::device::{SimDevice, SimRng};
use crate::history::{History, Observed, compare};
use crate::model::{Effects, Kind, Model, Outcome};
use crate::observe::Space;
use crate::ops::{Alloc, Op, Path, Which};
use crate::overlap::{Overlap, Step};
pub use crate::plan::{Failure, Plan, Tally};
use crate::world::{Opening, Trouble, World, check_clean};
use ferry_check::fsck::Holdings;
use ferry_device::BlockDevice;
use ferry_fs::Ino;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

mod overlapping;

/// Simulated time between one opening of a volume and a later one.
const PAUSE: Duration = Duration::from_secs(3600);

/// Crash points tried while a prepared volume is closed.
const CLOSING_POINTS: usize = 3;

/// What counts its events: each is a point at which the power may fail.
pub(crate) trait Traced {
    /// Events so far.
    fn trace_len(&self) -> usize;
}

impl Traced for SimDevice {
    fn trace_len(&self) -> usize {
        self.trace_len()
    }
}

/// One life of the volume.
pub(crate) struct Life<'p> {
    pub(crate) plan: &'p Plan,
    number: usize,
    rng: SimRng,
    /// Inode numbers that programs saw before this life; none may come again.
    seen: HashSet<Ino>,
    pub(crate) tally: &'p mut Tally,
    /// Events of the device's trace when the volume was open, and when the last operation had
    /// ended.
    worked: std::ops::Range<usize>,
    /// Ranges of the trace in which the cleaner worked, or a checkpoint.
    cleaning: Vec<std::ops::Range<usize>>,
    checkpoints: Vec<std::ops::Range<usize>>,
}

impl<'p> Life<'p> {
    pub(crate) fn new(
        plan: &'p Plan,
        number: usize,
        seen: HashSet<Ino>,
        tally: &'p mut Tally,
    ) -> Self {
        let rng = plan.rng(number, 0);
        Self {
            plan,
            number,
            rng,
            seen,
            tally,
            worked: 0..0,
            cleaning: Vec::new(),
            checkpoints: Vec::new(),
        }
    }

    fn fail<T>(&self, stage: impl Into<String>, what: impl Into<String>) -> Result<T, Failure> {
        Err(Failure { life: self.number, stage: stage.into(), what: what.into() })
    }

    /// A result with where it was, if it is a failure.
    fn at<T>(
        &self,
        stage: impl Into<String>,
        result: Result<T, impl Into<String>>,
    ) -> Result<T, Failure> {
        result.or_else(|what| self.fail(stage, what))
    }

    /// `later`: after this life, not for it.
    fn opening(&mut self, later: bool) -> Opening {
        let time = PAUSE * (2 * self.number as u32 + u32::from(later));
        let (seed, flush) = (self.rng.next_u64(), self.plan.under_way);
        Opening { seed, cache_bytes: self.plan.cache_bytes, time, flush }
    }

    /// Opens the volume, does it all, compares, closes, checks.
    pub(crate) fn live(
        &mut self,
        device: &Arc<SimDevice>,
        model: &mut Model,
        ops: &[Op],
    ) -> Result<History, Failure> {
        device.restart_trace();
        device.set_flush_lies(self.plan.flush_lies);
        let mut history = History::new(model);
        let opening = self.opening(false);
        let mut world = self.at("open", World::open(device, opening))?;
        self.worked = device.trace_len()..device.trace_len();
        self.note_times(&world, &mut history, model, model.tree().keys())?;
        if let Some(fault) = self.plan.fault {
            device.inject(fault);
        }
        let mut overlap =
            self.plan.under_way.map(|_| Overlap::new(device, self.plan.rng(self.number, 1)));
        for (i, op) in ops.iter().enumerate() {
            let n = self.number * 100_000 + i;
            let step = match &mut overlap {
                Some(overlap) => {
                    self.step_overlapping(overlap, &mut world, &mut history, model, op, n)
                }
                None => self.step(&mut world, &mut history, model, op, n, &**device),
            };
            match self.at(format!("operation {i}: {op}"), step)? {
                Step::Done => {}
                Step::DeviceFailed => {
                    if let Some(overlap) = overlap {
                        overlap.abandon(&world, &mut history);
                    }
                    self.tally.failed += 1;
                    return Ok(history);
                }
            }
        }
        if let Some(overlap) = overlap {
            let step = overlap.settle(&world, &mut history, self.plan.fault.is_some());
            if let Step::DeviceFailed = self.at("the last fsyncs", step)? {
                self.tally.failed += 1;
                return Ok(history);
            }
        }
        let found = self.at("at the end", world.observe())?;
        self.at("at the end", compare(model, &found))?;
        let inodes = self.at("at the end", world.inodes())?;
        if inodes != model.inodes() {
            let what = format!("{inodes} inodes counted, there are {}", model.inodes());
            return self.fail("at the end", what);
        }
        let work = world.work();
        self.tally.in_flight_max = self.tally.in_flight_max.max(work.in_flight_max);
        self.tally.log_rounds += work.log.0 / work.log.1;
        self.tally.holds += work.holds;
        match world.close() {
            Ok(()) => {}
            Err(_) if self.plan.fault.is_some() => {
                self.tally.failed += 1;
                return Ok(history);
            }
            Err(what) => return self.fail("close", what),
        }
        self.checkpoints.push(self.worked.end..device.trace_len());
        history.ended(model.tree(), Effects::default(), device.trace_len());
        history.sync_answered();
        device.heal();
        self.check(device, "after close", true)?;
        Ok(history)
    }

    /// Records the times that these inodes have now.
    pub(crate) fn note_times<'i>(
        &self,
        world: &World,
        history: &mut History,
        model: &Model,
        inodes: impl IntoIterator<Item = &'i Ino>,
    ) -> Result<(), Failure> {
        for ino in inodes {
            if model.exists(*ino) {
                let times = self.at(format!("times of {ino}"), world.times(*ino))?;
                history.timed(*ino, times);
            }
        }
        Ok(())
    }

    /// One operation, and what the background did in it.
    pub(crate) fn step(
        &mut self,
        world: &mut World,
        history: &mut History,
        model: &mut Model,
        op: &Op,
        n: usize,
        device: &dyn Traced,
    ) -> Result<Step, String> {
        let (before, from) = (world.work(), device.trace_len());
        let step = self.act(world, history, model, op, n, device)?;
        let range = from + 1..device.trace_len();
        let after = world.work();
        if after.cleaned > before.cleaned {
            self.cleaning.push(range.clone());
        }
        if after.checkpoints > before.checkpoints {
            self.checkpoints.push(range);
        }
        self.worked.end = device.trace_len();
        Ok(step)
    }

    /// One operation, on the volume and in the model.
    fn act(
        &mut self,
        world: &mut World,
        history: &mut History,
        model: &mut Model,
        op: &Op,
        n: usize,
        device: &dyn Traced,
    ) -> Result<Step, String> {
        let outcome = model.outcome(op);
        if outcome == Outcome::Skip {
            return Ok(Step::Done);
        }
        let synced = model.synced_by(op);
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
            // The range is a hole when its space is asked for: the life ends here, and a crash may
            // show the hole, or not.
            (Outcome::Done, Err(Trouble::Errno(libc::ENOSPC)))
                if matches!(op, Op::Fallocate(_, Alloc::Zero | Alloc::ZeroKeep, ..)) =>
            {
                history.times_unknown();
                let effects = model.apply(op, n, 0);
                history.ended(model.tree(), effects, usize::MAX);
                return Ok(Step::DeviceFailed);
            }
            (_, Err(Trouble::Errno(libc::ENOSPC))) if op.may_lack_space() => {
                self.tally.no_space += 1;
                history.ended(model.tree(), Effects::default(), device.trace_len());
                // Part of it may be done.
                let all = model.tree();
                self.note_times(world, history, model, all.keys())
                    .map_err(|failure| failure.what)?;
                return Ok(Step::Done);
            }
            (_, Err(Trouble::Errno(libc::EIO | libc::EROFS) | Trouble::Close(libc::EIO)))
                if self.plan.fault.is_some() =>
            {
                // It failed for the program; at a crash it may have happened all the same.
                if outcome == Outcome::Done && !op.makes_inode() {
                    history.times_unknown();
                    let effects = model.apply(op, n, 0);
                    history.ended(model.tree(), effects, usize::MAX);
                }
                return Ok(Step::DeviceFailed);
            }
            (Outcome::Fails(expected), Err(Trouble::Errno(errno))) if errno == expected => {
                Effects::default()
            }
            (outcome, result) => return Err(format!("{outcome:?} expected, {result:?} happened")),
        };
        let touched = effects.touched.clone();
        history.ended(model.tree(), effects, device.trace_len());
        self.note_times(world, history, model, &touched).map_err(|failure| failure.what)?;
        history.op_answered(op, synced, model);
        Ok(Step::Done)
    }

    /// Crashes the life at many points. Returns one of the images, and the state in it, for the
    /// next life.
    pub(crate) fn crash_everywhere(
        &mut self,
        device: &Arc<SimDevice>,
        history: &History,
    ) -> Result<Start, Failure> {
        let points = self.points(device);
        let heir = self.rng.index(points.len());
        let mut next = None;
        for (i, point) in points.iter().enumerate() {
            let within = |ranges: &[std::ops::Range<usize>]| {
                ranges.iter().any(|range| range.contains(point))
            };
            self.tally.points += 1;
            self.tally.in_cleaning += u64::from(within(&self.cleaning));
            self.tally.in_checkpoint += u64::from(within(&self.checkpoints));
            for n in 0..self.plan.images as u64 {
                let (image, mut rng) = self.image(device, *point, n);
                let observed = self.recover(&image, history, *point, &mut rng)?;
                if i == heir && n == 0 {
                    // The same image once more: the recovery has changed the first.
                    let (device, _) = self.image(device, *point, n);
                    let seen = self.seen.iter().copied().chain(history.seen_by(*point)).collect();
                    let model = Model::new(observed.tree, observed.contents);
                    next = Some(Start { device, model, seen });
                }
            }
        }
        next.map_or_else(|| self.fail("crash", "no crash point"), Ok)
    }

    /// What one crash leaves.
    pub(crate) fn some_crash(&mut self, device: &SimDevice) -> Arc<SimDevice> {
        let point = self.rng.index(device.trace_len() + 1);
        self.image(device, point, 0).0
    }

    /// Image number `n` of a crash at `point`, and the random numbers for what is done with it.
    fn image(&self, device: &SimDevice, point: usize, n: u64) -> (Arc<SimDevice>, SimRng) {
        let mut rng = self.plan.rng(self.number, 1 << 60 | (point as u64) << 8 | n);
        (Arc::new(device.crash_image(point, &mut rng)), rng)
    }

    /// All flush boundaries and half as many points between, thinned out to what the plan allows;
    /// and the end of the last operation. What opening a prepared volume does is the same in every
    /// run, and closing it hardly differs: there a few do.
    fn points(&mut self, device: &SimDevice) -> Vec<usize> {
        let len = device.trace_len();
        let prepared = self.number == 0 && matches!(self.plan.begin, Begin::Prepared(_));
        let all = if prepared { self.worked.clone() } else { 0..len };
        let mut points = device.flush_points();
        points.retain(|point| (all.start..=all.end).contains(point));
        for _ in 0..points.len() / 2 + 1 {
            points.push(all.start + self.rng.index(all.len() + 1));
        }
        for _ in 0..if prepared { CLOSING_POINTS } else { 0 } {
            points.push(all.end + self.rng.index(len - all.end + 1));
        }
        while points.len() > self.plan.points_max {
            points.swap_remove(self.rng.index(points.len()));
        }
        points.push(self.worked.end);
        points.sort_unstable();
        points.dedup();
        points
    }

    /// Checks a crash image, recovers it, compares; sometimes crashes the recovery, sometimes works
    /// on.
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
        let opening = self.opening(true);
        let world = self.at(&*stage, World::open(image, opening))?;
        let recovered_at = image.trace_len();
        let found = self.at(&*stage, world.observe())?;
        let t = self.at(&*stage, history.explain(point, &found))?;
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
        let opening = self.opening(true);
        let world = self.at(&*stage, World::open(&image, opening))?;
        let found = self.at(&*stage, world.observe())?;
        self.at(stage, history.explain(point, &found)).map(drop)
    }

    /// What recovery made is a volume like any other: it takes more, closes, and shows all of it
    /// when opened again.
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
        let path = (0..crate::ops::NAMES)
            .map(|n| Path(vec![n]))
            .find(|path| model.resolve(path).is_none());
        if let Some(path) = path {
            let file = Which::At(path.clone());
            for op in [Op::Create(path), Op::Write(file.clone(), 0, 6000), Op::Fsync(file, false)] {
                let step = self.step(&mut world, &mut history, &mut model, &op, 99_999, &**image);
                self.at(format!("{stage}, then {op}"), step)?;
            }
        }
        if self.rng.chance(1, 3) {
            let emptied = self.empty(&mut world, &mut history, &mut model, image);
            self.at(format!("{stage}, then emptied"), emptied)?;
        }
        let step = self.step(&mut world, &mut history, &mut model, &Op::Sync, 99_999, &**image);
        self.at(format!("{stage}, then synced"), step)?;
        let space = world.space();
        if space.used != space.live + space.unwritten {
            return self.fail(stage, format!("space is lost: {space:?}"));
        }
        self.at(format!("{stage}, then close"), world.close())?;
        let holdings = self.check(image, &format!("{stage}, then closed"), true)?;
        if (holdings.data_bytes, holdings.reserved_bytes) != (space.live, space.unwritten) {
            return self.fail(stage, format!("{space:?}, but a check counts {holdings:?}"));
        }
        let opening = self.opening(true);
        let stage = format!("{stage}, opened again");
        let world = self.at(&*stage, World::open(image, opening))?;
        let again = self.at(&*stage, world.observe())?;
        self.at(stage, compare(&model, &again))
    }

    /// Removes everything; all space is there again then.
    fn empty(
        &mut self,
        world: &mut World,
        history: &mut History,
        model: &mut Model,
        device: &SimDevice,
    ) -> Result<(), String> {
        self.tally.emptied += 1;
        let mut paths = model.paths(None);
        paths.retain(|path| !path.0.is_empty());
        paths.sort_by_key(|path| std::cmp::Reverse(path.0.len()));
        for path in paths {
            let dir = model.resolve(&path).is_some_and(|ino| model.node(ino).kind == Kind::Dir);
            let op = if dir { Op::Rmdir(path) } else { Op::Unlink(path) };
            self.step(world, history, model, &op, 99_999, device)
                .map_err(|what| format!("{op}: {what}"))?;
        }
        self.step(world, history, model, &Op::Sync, 99_999, device)?;
        let space = world.space();
        let inodes = world.inodes()?;
        if space == (Space { used: 0, live: 0, unwritten: 0 }) && inodes == 1 {
            return Ok(());
        }
        Err(format!("an empty volume has {inodes} inodes and {space:?}"))
    }

    /// A volume is clean, data and all; a closed one holds no orphans.
    pub(crate) fn check(
        &self,
        device: &Arc<impl BlockDevice + 'static>,
        stage: &str,
        closed: bool,
    ) -> Result<Holdings, Failure> {
        let report = self.at(stage, check_clean(device, self.plan.seed))?;
        let holdings = report.holdings;
        if closed && (holdings.orphans > 0 || holdings.unclean || holdings.recovered_contexts > 0) {
            return self.fail(stage, format!("a closed volume has {holdings:?}"));
        }
        Ok(holdings)
    }
}
