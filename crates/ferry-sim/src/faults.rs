//! One workload, run again and again, each time with an error of the device at another request.
//!
//! The workload opens a volume that lost power, works, closes it, opens it again and reads what is
//! no longer in memory. Whatever request fails: nothing panics or waits for ever; a program hears
//! only of errors that the contract allows, and what it was not told to have failed is so; after a
//! loss of power at the end, and on the same device once it has healed, the volume is clean, opens,
//! and holds everything that was acknowledged.

use crate::crash::Plan;
use crate::device::{Fault, Op as DeviceOp, SimDevice, SimRng};
use crate::generator::Generator;
use crate::history::{History, compare};
use crate::model::{Effects, Model, Outcome};
use crate::ops::{Alloc, FILE_MAX, Op, SLOTS};
use crate::plan::panic_text;
use crate::world::{Opening, Trouble, World, check_clean};
use ferry_fs::volume::LOG_MIN;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Kinds of requests that can fail.
pub const KINDS: [DeviceOp; 5] =
    [DeviceOp::Read, DeviceOp::Write, DeviceOp::Flush, DeviceOp::Discard, DeviceOp::Allocate];
/// A run that takes longer hangs: the longest takes less than a second.
const RUN_TIME_MAX: Duration = Duration::from_secs(120);
/// Failed operations that a failure's message lists.
const STORY_MAX: usize = 6;
/// Images of the loss of power at the end of a run.
const IMAGES: u64 = 2;

/// A volume and what is done to it, wholly determined.
#[derive(Clone)]
pub struct Workload {
    seed: u64,
    cache_bytes: usize,
    volume: Arc<SimDevice>,
    start: Model,
    /// What is done between one opening and the next.
    sittings: Vec<Vec<Op>>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Requests of each of [`KINDS`] that the device was asked for.
    pub asked: [u64; KINDS.len()],
    /// Requests that failed.
    pub struck: u64,
    /// Operations that were told of an error.
    pub told: u64,
    /// The volume could not be opened.
    pub unopened: bool,
    /// The volume became read-only.
    pub read_only: bool,
}

impl Workload {
    /// Draws one from a seed: a volume that some crash left, and operations for two mounts of it.
    pub fn draw(seed: u64) -> Result<Self, String> {
        let mut rng = SimRng::new(seed ^ 0x6661_756c_7473);
        let heavy = seed.is_multiple_of(4);
        let generator = || {
            if heavy {
                Generator::new(Model::empty()).heavy()
            } else {
                Generator::new(Model::empty())
            }
        };
        let mut first = generator();
        let mut life = if heavy { first.ballast(5) } else { Vec::new() };
        life.extend(first.draw(&mut rng, 40));
        let plan = Plan {
            lives: vec![life],
            fault: None,
            volume_bytes: 16 << 20,
            log_bytes: LOG_MIN,
            ..Plan::draw(seed)
        };
        let volume = plan.first_life_crashed().map_err(|failure| failure.to_string())?;
        let cache_bytes = 1 << 20;
        let copy = Arc::new(volume.crash_image(0, &mut rng));
        let world =
            World::open(&copy, Opening { seed, cache_bytes, time: Duration::ZERO, flush: None })?;
        let found = world.observe()?;
        let start = Model::new(found.tree, found.contents);
        let mut next = Generator::new(start.clone());
        if heavy {
            next = next.heavy();
        }
        let sittings = [50, 25].map(|ops| next.draw(&mut rng, ops)).to_vec();
        Ok(Self { seed, cache_bytes, volume, start, sittings })
    }

    /// Runs it on a thread of its own; a panic and a run without end are failures like any other.
    pub fn run(&self, fault: Option<Fault>) -> Result<Ended, String> {
        let (tell, told) = mpsc::channel();
        let workload = self.clone();
        let thread = std::thread::Builder::new().name(format!("seed {} {fault:?}", self.seed));
        let run = move || tell.send(Run::new(&workload, fault).whole()).unwrap_or_default();
        let thread = thread.spawn(run).map_err(|error| error.to_string())?;
        match told.recv_timeout(RUN_TIME_MAX) {
            Ok(result) => result,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(format!("still not done after {RUN_TIME_MAX:?}"))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(format!("panic: {}", panic_text(thread.join())))
            }
        }
    }
}

/// The faults to try: of each kind of request, at each of so many (at most `most` of a kind, evenly
/// spread), once and from then on.
pub fn faults(asked: [u64; KINDS.len()], most: u64) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (op, count) in KINDS.into_iter().zip(asked) {
        let tried = count.min(most);
        for n in 0..tried {
            let after = n * count / tried;
            faults.extend([false, true].map(|sticky| Fault {
                op,
                after,
                errno: libc::EIO,
                sticky,
            }));
        }
    }
    faults
}

/// One run of the workload with one fault.
struct Run<'w> {
    workload: &'w Workload,
    device: Arc<SimDevice>,
    fault: Option<Fault>,
    model: Model,
    history: History,
    rng: SimRng,
    ended: Ended,
    /// Operations so far, over all sittings.
    count: usize,
    /// The first few operations that were told of an error, for people.
    story: Vec<String>,
}

impl<'w> Run<'w> {
    fn new(workload: &'w Workload, fault: Option<Fault>) -> Self {
        let mut rng = SimRng::new(workload.seed);
        let device = Arc::new(workload.volume.crash_image(0, &mut rng));
        if let Some(fault) = fault {
            device.inject(fault);
        }
        let model = workload.start.clone();
        let history = History::new(&model);
        Self {
            workload,
            device,
            fault,
            model,
            history,
            rng,
            ended: Ended::default(),
            count: 0,
            story: Vec::new(),
        }
    }

    fn whole(mut self) -> Result<Ended, String> {
        match self.lives() {
            Ok(()) => Ok(self.ended),
            Err(what) => Err(format!("{what}\n  {}", self.story.join("\n  "))),
        }
    }

    fn lives(&mut self) -> Result<(), String> {
        for sitting in &self.workload.sittings {
            let opening = self.opening();
            let world = match World::open(&self.device, opening) {
                Ok(world) => world,
                Err(_) if self.device.struck() > 0 => {
                    self.ended.unopened = true;
                    break;
                }
                Err(what) => return Err(what),
            };
            if !self.sit(world, sitting)? {
                break;
            }
        }
        self.ended.asked = KINDS.map(|op| self.device.asked(op));
        self.ended.struck = self.device.struck();
        let point = self.device.trace_len();
        for n in 0..IMAGES {
            let image = Arc::new(self.device.crash_image(point, &mut self.rng));
            self.recover(&image, point)
                .map_err(|what| format!("power lost at the end, image {n}: {what}"))?;
        }
        self.device.heal();
        let device = self.device.clone();
        self.recover(&device, point).map_err(|what| format!("healed: {what}"))
    }

    fn opening(&mut self) -> Opening {
        Opening {
            seed: self.rng.next_u64(),
            cache_bytes: self.workload.cache_bytes,
            time: Duration::ZERO,
            flush: None,
        }
    }

    /// From an opening to the next closing; `false`: the volume could not be closed well.
    fn sit(&mut self, mut world: World, ops: &[Op]) -> Result<bool, String> {
        self.ended.read_only = false;
        for op in ops {
            self.step(&mut world, op)
                .map_err(|what| format!("operation {}, {op}: {what}", self.count))?;
            self.count += 1;
        }
        for slot in (0..SLOTS).filter(|slot| self.model.held(*slot).is_some()).collect::<Vec<_>>() {
            self.step(&mut world, &Op::Release(slot))?;
            self.count += 1;
        }
        let struck_before = self.device.struck();
        match world.observe() {
            Ok(found) => {
                compare(&self.model, &found).map_err(|what| format!("in memory, {what}"))?;
            }
            Err(Trouble::Errno(libc::EIO))
                if self.read_may_fail_now(self.device.struck() > struck_before) => {}
            Err(trouble) => return Err(format!("reading goes on: {trouble:?}")),
        }
        match world.close() {
            Ok(()) => {
                self.history.ended(self.model.tree(), Effects::default(), self.device.trace_len());
                self.history.sync_answered();
                Ok(true)
            }
            Err(_) if self.device.struck() > 0 => Ok(false),
            Err(what) => Err(what),
        }
    }

    fn reads_may_fail(&self) -> bool {
        self.fault.is_some_and(|fault| fault.op == DeviceOp::Read)
    }

    /// A reader may get an error of just now; an earlier one only if it has not gone away.
    fn read_may_fail_now(&self, struck_now: bool) -> bool {
        self.fault.is_some_and(|fault| fault.op == DeviceOp::Read && (struck_now || fault.sticky))
    }

    /// One operation, on the volume and in the model.
    fn step(&mut self, world: &mut World, op: &Op) -> Result<(), String> {
        let outcome = self.model.outcome(op);
        if outcome == Outcome::Skip {
            return Ok(());
        }
        let synced = self.model.synced_by(op);
        let struck_before = self.device.struck();
        let result = world.run(op, self.count, &self.model);
        let struck = self.device.struck() > 0;
        if let Err(Trouble::Errno(errno) | Trouble::Close(errno)) = &result
            && outcome == Outcome::Done
            && self.story.len() < STORY_MAX
        {
            self.story.push(format!("operation {}, {op}: error {errno}", self.count));
        }
        let effects = match (outcome, result) {
            (_, Err(Trouble::Wrong(what))) => return Err(what),
            (Outcome::Done, Ok(new)) => {
                if self.ended.read_only && changes(op) {
                    return Err("it succeeds on a volume that has become read-only".into());
                }
                self.model.apply(op, self.count, new)
            }
            // It was done, and closing the file tells of an error of which nobody was told.
            (Outcome::Done, Err(Trouble::Close(libc::EIO))) if struck => {
                self.ended.told += 1;
                self.model.apply(op, self.count, 0)
            }
            (Outcome::Done, Err(Trouble::Errno(errno))) if struck => {
                self.allowed(op, errno, self.device.struck() > struck_before)?;
                self.ended.told += 1;
                self.ended.read_only |= errno == libc::EROFS;
                let effects = self.partly(world, op)?;
                self.history.ended(self.model.tree(), effects, self.device.trace_len());
                return Ok(());
            }
            (Outcome::Done, Err(Trouble::Errno(libc::ENOSPC))) if op.may_lack_space() => {
                Effects::default()
            }
            (Outcome::Fails(expected), Err(Trouble::Errno(errno)))
                if errno == expected
                    || struck && matches!(errno, libc::EIO | libc::EROFS | libc::ENOSPC) =>
            {
                Effects::default()
            }
            (outcome, result) => return Err(format!("{outcome:?} expected, {result:?} happened")),
        };
        self.history.ended(self.model.tree(), effects, self.device.trace_len());
        self.history.op_answered(op, synced, &self.model);
        Ok(())
    }

    /// What a failed operation did all the same: zeroing a range punches it first, and may find no
    /// space then.
    fn partly(&mut self, world: &mut World, op: &Op) -> Result<Effects, String> {
        let Op::Fallocate(which, Alloc::Zero | Alloc::ZeroKeep, offset, len) = op else {
            return Ok(Effects::default());
        };
        let whole = Op::Read(which.clone(), 0, FILE_MAX);
        match world.run(&whole, self.count, &self.model) {
            Err(Trouble::Wrong(_)) => {}
            _ => return Ok(Effects::default()),
        }
        let punch = Op::Fallocate(which.clone(), Alloc::Punch, *offset, *len);
        let effects = self.model.apply(&punch, self.count, 0);
        match world.run(&whole, self.count, &self.model) {
            Err(Trouble::Wrong(what)) => {
                Err(format!("it failed, and left neither the old bytes nor zeros: {what}"))
            }
            _ => Ok(effects),
        }
    }

    /// The errors that the contract allows, once the device has failed.
    fn allowed(&self, op: &Op, errno: i32, now: bool) -> Result<(), String> {
        let reads = matches!(op, Op::Read(..) | Op::Hold(..) | Op::Release(_));
        let fine = match errno {
            // What the host gave at an earlier mount it is asked for again.
            libc::ENOSPC => {
                op.may_lack_space()
                    || self.fault.is_some_and(|fault| fault.op == DeviceOp::Allocate)
            }
            libc::EIO if reads => {
                self.reads_may_fail() && (now || self.fault.is_some_and(|fault| fault.sticky))
            }
            libc::EIO => true,
            libc::EROFS => !reads && !self.reads_may_fail(),
            _ => false,
        };
        if fine { Ok(()) } else { Err(format!("error {errno} after {:?}", self.fault)) }
    }

    /// The volume is clean, opens, holds what was acknowledged, and takes more.
    fn recover(&mut self, device: &Arc<SimDevice>, point: usize) -> Result<(), String> {
        check_clean(device, self.workload.seed)?;
        let world = World::open(device, self.opening())?;
        let found = world.observe()?;
        self.history.explain(point, &found)?;
        world.close()?;
        check_clean(device, self.workload.seed).map(drop)
    }
}

/// It changes the volume.
fn changes(op: &Op) -> bool {
    !matches!(
        op,
        Op::Read(..)
            | Op::Hold(..)
            | Op::Release(_)
            | Op::Fsync(..)
            | Op::FsyncDir(_)
            | Op::Sync
            | Op::Trim
            | Op::Tick(_)
    )
}

/// What a campaign tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Runs with a fault.
    pub runs: u64,
    /// Of them, runs in which it came.
    pub struck: u64,
    /// Operations that were told of an error.
    pub told: u64,
    /// Runs in which the volume could not be opened.
    pub unopened: u64,
    /// Runs in which it was read-only in the end.
    pub read_only: u64,
}

/// Runs the workloads of the seeds `first`, `first` + 1, …, each without a fault and then with each
/// of its faults, at most `most` of a kind. The tally, or everything that failed.
pub fn campaign(first: u64, workloads: u64, most: u64, threads: usize) -> Result<Tally, String> {
    let tally = Mutex::new(Tally::default());
    let failed = Mutex::new(Vec::new());
    for seed in first..first + workloads {
        let workload = Workload::draw(seed).map_err(|what| format!("seed {seed}: {what}"))?;
        let asked =
            workload.run(None).map_err(|what| format!("seed {seed}, no fault: {what}"))?.asked;
        let faults = faults(asked, most);
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                match workload.run(Some(*fault)) {
                    Ok(ended) => {
                        let mut tally = tally.lock();
                        tally.runs += 1;
                        tally.struck += u64::from(ended.struck > 0);
                        tally.told += ended.told;
                        tally.unopened += u64::from(ended.unopened);
                        tally.read_only += u64::from(ended.read_only);
                    }
                    Err(what) => failed.lock().push(format!("seed {seed}, {fault:?}: {what}")),
                }
            }
        };
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    }
    let failed = failed.into_inner();
    if failed.is_empty() { Ok(tally.into_inner()) } else { Err(failed.join("\n\n")) }
}
