//! A run: owners that write, flush, read, sleep, crash and take the volume over.

use super::clones::{Clones, is_pin};
use super::disk::SimDisk;
use super::executor::SimExecutor;
use super::history::{BLOCKS, Change, History, Image};
use super::snapshots::Snapshots;
use super::store::{Faults, SimStore};
use super::stored;
use super::turns::{Crashed, Turns, World};
use crate::device::{Fault, Op, SimDevice, SimRng};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, Io, LockHolder};
use ferry_env::{Clock, Entropy, Env};
use ferry_object::{
    Claimant, Executor, Followed, Follower, Limits, LocalStore, Locks, ObjectDevice, ObjectError,
    Owner, Replaced, Snapshot, Store, VolumeOptions,
};
use parking_lot::Mutex;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// What a seed stands for.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) seed: u64,
    owners: usize,
    /// Lives of each owner: each ends with a crash, with a close, or when another one took over.
    lives: u32,
    /// Operations in a life, at most.
    ops_max: u64,
    pub(super) limits: Limits,
    window: u32,
    pub(super) faults: Faults,
    /// How long an owner thinks between two operations, at most, in milliseconds.
    think_max: u64,
    /// Machines crash early and are back at once, and the store answers soon: many owners come
    /// within one term.
    hurried: bool,
    /// Of each owner whether its machine may have a local log, and how many bytes that takes.
    disks: Vec<Option<u64>>,
    /// Owners make, read and delete snapshots.
    snapshots: bool,
    /// Owners go back to snapshots.
    rollbacks: bool,
    /// Owners clone snapshots.
    clones: bool,
    /// Owners follow the volume before they claim it.
    follows: bool,
}

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// What must not happen, and did.
    pub violation: Option<String>,
    /// Requests to the store.
    pub requests: u64,
    /// Machines that crashed, each at one of these requests: while they opened the volume, and when
    /// they had it.
    pub crashes: [u64; 2],
    /// Volumes that were opened.
    pub opened: u64,
    /// Orphans that sweeps of the last owner deleted.
    pub swept: u64,
    /// Bytes that owners repacked.
    pub repacked: u64,
    /// Snapshots that were read as a whole, and those that were deleted.
    pub snapshots: (u64, u64),
    /// Times that the volume went back to a snapshot.
    pub rollbacks: u64,
    /// Clones that were made, and that were read as a whole.
    pub clones: (u64, u64),
    /// Local logs that had objects when they were opened, and that had some which were lost to
    /// another machine.
    pub replayed: (u64, u64),
    /// A number that depends on all that happened, in its order.
    pub digest: u64,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
}

/// The locks of a machine on which one process runs: the one that asks.
struct OneProcess;

impl Locks for OneProcess {
    fn hold(&self, _epoch: u64, _alone: bool) -> Result<Option<LockHolder>, ObjectError> {
        Ok(None)
    }
    fn holder(&self, _epoch: u64) -> Result<Option<LockHolder>, ObjectError> {
        Ok(None)
    }
}

struct SimClock(Arc<Turns>);

impl Clock for SimClock {
    fn monotonic(&self) -> Duration {
        self.0.world().now
    }
    fn wall(&self) -> Duration {
        self.0.world().now + Duration::from_secs(1_800_000_000)
    }
}

struct SimEntropy(Arc<Turns>);

impl Entropy for SimEntropy {
    fn next_u64(&self) -> u64 {
        self.0.world().rng.next_u64()
    }
}

pub(super) struct Run {
    pub(super) plan: Plan,
    turns: Arc<Turns>,
    history: Mutex<History>,
    /// The number of the last write.
    writes: AtomicU64,
    crashes: [AtomicU64; 2],
    opened: AtomicU64,
    swept: AtomicU64,
    repacked: AtomicU64,
    replayed: [AtomicU64; 2],
    pub(super) snapshots: Mutex<Snapshots>,
    pub(super) clones: Mutex<Clones>,
    rollbacks: AtomicU64,
    /// The disks of the machines, where they have local logs.
    disks: Vec<Mutex<Arc<SimDevice>>>,
}

impl Plan {
    /// The plan of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = SimRng::new(seed);
        let rng = &mut rng;
        let millis = |rng: &mut SimRng, choices: &[u64]| {
            Duration::from_millis(choices[rng.index(choices.len())])
        };
        let limits = Limits {
            seal_bytes: BLOCK_SIZE * (2 + rng.index(20)),
            unsent_bytes_max: BLOCK_SIZE * (8 + rng.index(60)),
            data_run_bytes_min: BLOCK_SIZE * (2 + rng.index(6)),
            data_bytes_max: BLOCK_SIZE * (1 + rng.index(8)),
            root_log_bytes: 1 << (13 + rng.below(6)),
            root_log_objects: 2 + rng.below(20),
            root_delay: millis(rng, &[0, 1000, 60_000]),
            grace: millis(rng, &[2_000, 30_000, 600_000]),
            repack_bytes_min: BLOCK_SIZE,
            sweep: Duration::ZERO,
            term: Duration::from_secs(5),
            ahead_bytes_max: 1 << 20,
            holds: true,
            patience: Duration::MAX,
        };
        let hurried = rng.chance(1, 4);
        let faults = Faults {
            per_1000: if hurried { 0 } else { [0, 5, 30, 200][rng.index(4)] },
            answer_max: if hurried { Duration::from_millis(2) } else { millis(rng, &[2, 50, 400]) },
            sleep_one_in: [40, 300, 3000][rng.index(3)],
            sleep_max: millis(rng, &[20_000, 3_600_000, 86_400_000]),
            // A list lags for less than the grace: `newest_root` needs that.
            list_lag: limits.grace * [0, 3, 9][rng.index(3)] / 10,
        };
        let plan = Self {
            seed,
            owners: if hurried { 3 } else { 1 + rng.index(3) },
            lives: 1 + rng.below(4) as u32,
            ops_max: 10 + rng.below(300),
            limits,
            window: [1, 2, 4, 64][rng.index(4)],
            faults,
            think_max: if hurried { 4_000 } else { [1, 100, 20_000, 900_000][rng.index(4)] },
            hurried,
            disks: Vec::new(),
            snapshots: SimRng::new(seed ^ 0x5a_a95).chance(1, 2),
            rollbacks: SimRng::new(seed ^ 0xb_acc0).chance(1, 2),
            clones: SimRng::new(seed ^ 0xc_10e5).chance(1, 2),
            follows: SimRng::new(seed ^ 0xf0_110).chance(1, 2),
        };
        // Numbers of their own: seeds without local logs stay what they were.
        let disks = &mut SimRng::new(seed ^ 0x10ca1);
        let with_disks = disks.chance(1, 2);
        let disk = |_| {
            let bytes = (BLOCK_SIZE as u64) * (42 + disks.below(300));
            (with_disks && disks.chance(3, 4)).then_some(bytes)
        };
        let plan = Self { disks: (0..plan.owners).map(disk).collect(), ..plan };
        let sweep = millis(rng, &[0, 10_000, 86_400_000]);
        Self { limits: Limits { sweep, ..plan.limits }, ..plan }
    }

    /// Runs it.
    pub fn run(self, trace: bool) -> Outcome {
        let owners = self.owners;
        let turns = Arc::new(Turns::new(owners + 1, self.seed, trace));
        let disk = |bytes: &Option<u64>| Mutex::new(Arc::new(SimDevice::new(bytes.unwrap_or(0))));
        let disks = self.disks.iter().map(disk).collect();
        let run = Arc::new(Run {
            plan: self,
            turns: Arc::clone(&turns),
            history: Mutex::default(),
            writes: AtomicU64::new(0),
            crashes: Default::default(),
            opened: AtomicU64::new(0),
            swept: AtomicU64::new(0),
            repacked: AtomicU64::new(0),
            replayed: Default::default(),
            snapshots: Mutex::default(),
            clones: Mutex::default(),
            rollbacks: AtomicU64::new(0),
            disks,
        });
        thread::scope(|scope| {
            // The last one makes the volume, and looks at it when the others have ended.
            for owner in 0..=owners {
                let run = Arc::clone(&run);
                let name = format!("owner-{owner}");
                let body = move || run.owner(owner);
                let started = thread::Builder::new().name(name).spawn_scoped(scope, body);
                drop(started.expect("a thread can be started"));
            }
        });
        let world = &mut *turns.world();
        Outcome {
            violation: world.violation.take(),
            requests: world.requests,
            crashes: run.crashes.each_ref().map(|count| count.load(Ordering::Relaxed)),
            opened: run.opened.load(Ordering::Relaxed),
            swept: run.swept.load(Ordering::Relaxed),
            repacked: run.repacked.load(Ordering::Relaxed),
            snapshots: run.snapshots.lock().counts(),
            rollbacks: run.rollbacks.load(Ordering::Relaxed),
            clones: run.clones.lock().counts(),
            replayed: (
                run.replayed[0].load(Ordering::Relaxed),
                run.replayed[1].load(Ordering::Relaxed),
            ),
            digest: world.digest,
            trace: world.trace.take().unwrap_or_default(),
        }
    }
}

impl Run {
    pub(super) fn world<T>(&self, look: impl FnOnce(&mut World) -> T) -> T {
        look(&mut self.turns.world())
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.world(|world| world.rng.below(bound))
    }

    pub(super) fn fail(&self, what: String) {
        self.world(|world| world.fail(what));
    }

    fn check(&self, result: Result<(), String>) {
        if let Err(what) = result {
            self.fail(what);
        }
    }

    /// A flush of so many changes ended with success.
    fn flushed(&self, epoch: u64, count: usize) {
        let allowed = self.history.lock().flushed(epoch, count);
        self.check(allowed);
    }

    pub(super) fn env(&self) -> Env {
        Env {
            clock: Arc::new(SimClock(Arc::clone(&self.turns))),
            entropy: Arc::new(SimEntropy(Arc::clone(&self.turns))),
        }
    }

    pub(super) fn store(&self, owner: usize, faults: Faults) -> Arc<SimStore> {
        let prefix = String::new();
        Arc::new(SimStore { turns: Arc::clone(&self.turns), owner, faults, prefix })
    }

    pub(super) fn quiet(&self) -> Faults {
        Faults { per_1000: 0, sleep_one_in: u64::MAX, list_lag: Duration::ZERO, ..self.plan.faults }
    }

    /// All of an owner's lives.
    fn owner(self: &Arc<Self>, owner: usize) {
        self.turns.begin(owner);
        let last = owner == self.plan.owners;
        let lives = if last { 1 } else { self.plan.lives };
        for life in 0..lives {
            let executor = SimExecutor::new(&self.turns, owner);
            let uploads = SimExecutor::new(&self.turns, owner);
            let opened = AtomicBool::new(false);
            let body = || match last {
                true => self.make_and_look(owner, &executor),
                false => self.live(owner, life, &executor, &uploads, &opened),
            };
            match catch_unwind(AssertUnwindSafe(body)) {
                Ok(_) => {}
                Err(payload) if payload.is::<Crashed>() => {
                    let had_it = usize::from(opened.load(Ordering::Relaxed));
                    self.crashes[had_it].fetch_add(1, Ordering::Relaxed);
                }
                Err(payload) => {
                    let text = payload.downcast_ref::<String>().cloned();
                    let text = text.or(payload.downcast_ref::<&str>().map(|&text| text.to_owned()));
                    self.fail(format!("owner {owner} panics: {}", text.unwrap_or_default()));
                }
            }
            executor.crash();
            uploads.crash();
            if !last {
                self.end_disk(owner);
            }
            self.world(|world| {
                world.crash_in[owner] = None;
                world.sleep_in[owner] = None;
                world.sleep_at_log[owner] = None;
            });
            if self.world(|world| world.violation.is_some()) {
                break;
            }
        }
        self.turns.end(owner);
    }

    /// Makes the volume; and when all others have ended, its contents are what they may be.
    fn make_and_look(&self, owner: usize, executor: &Arc<SimExecutor>) {
        let Plan { window, .. } = self.plan;
        let (capacity, boundary) =
            ((BLOCKS * BLOCK_SIZE) as u64, (8 * BLOCK_SIZE as u64, 16 * BLOCK_SIZE as u64));
        let options =
            VolumeOptions { window, ..stored::options(self.plan.seed, capacity, boundary) };
        let store = self.store(owner, self.quiet());
        let made = ObjectDevice::make(store, executor.clone(), &options, &self.env());
        if let Err(error) = made {
            self.fail(format!("the volume cannot be made: {error}"));
        }
        // Longer than all that the others may sleep.
        executor.pause(Duration::from_secs(100 * 86_400));
        let passphrase = stored::passphrase(self.plan.seed);
        let claimant = Claimant { take_over: true, passphrase, force: true, ..Claimant::default() };
        match ObjectDevice::open(
            self.store(owner, self.quiet()),
            executor.clone(),
            &claimant,
            self.plan.limits,
            &self.env(),
        ) {
            Ok(device) => match self.look_at_all(owner, &device, false) {
                Some(_) => {
                    self.end_snapshots(owner, &device, executor);
                    if self.plan.clones {
                        self.rewrite(&device, executor);
                        self.end_clones(owner, &device, executor);
                    }
                    self.rewrite(&device, executor);
                    self.look_at_rest(&device);
                }
                None => self.fail("the volume cannot be read at the end".into()),
            },
            Err(error) => self.fail(format!("the volume cannot be opened at the end: {error}")),
        }
    }

    /// The last owner writes all blocks again, and deletes what the volume needs no more.
    fn rewrite(&self, device: &Arc<ObjectDevice>, executor: &Arc<SimExecutor>) {
        let Limits { root_delay, grace, sweep, .. } = self.plan.limits;
        let mut buf = AlignedBuf::zeroed(BLOCKS * BLOCK_SIZE);
        // The first root lacks what died, the second one has it deleted, the third one the second.
        for round in 0..6 {
            buf.fill(round + 1);
            if device.write(0, &buf).is_err() || device.flush().is_err() {
                return self.fail("the volume cannot be written at the end".into());
            }
            for _ in 0..4 {
                executor.pause(root_delay + grace + sweep + Duration::from_secs(1));
                device.tick();
                while executor.run_one() {}
            }
        }
    }

    /// Nothing of the older owners is left but what is never deleted.
    fn look_at_rest(&self, device: &Arc<ObjectDevice>) {
        let epoch = device.stats().epoch;
        let left = self.world(|world| world.objects.older_than(epoch));
        if !left.is_empty() {
            self.fail(format!("nothing needs {left:?}, and it is there for ever"));
        }
        self.swept.fetch_add(device.stats().orphans, Ordering::Relaxed);
    }

    /// The last owner reads all snapshots, overwrites and collects what they had, reads them again
    /// and deletes them.
    fn end_snapshots(&self, owner: usize, device: &Arc<ObjectDevice>, executor: &Arc<SimExecutor>) {
        let Limits { root_delay, grace, sweep, .. } = self.plan.limits;
        let missing = |name: &String| device.snapshots().iter().all(|found| found.name != *name);
        let lost: Vec<String> =
            self.snapshots.lock().certain().into_iter().filter(missing).collect();
        if !lost.is_empty() {
            return self.fail(format!("the snapshots {lost:?} are lost"));
        }
        let snapshots = || {
            device.snapshots().into_iter().filter(|found| !is_pin(&found.name)).collect::<Vec<_>>()
        };
        for round in 1..=2 {
            for found in snapshots() {
                self.read_snapshot(owner, self.quiet(), &found.name, executor);
            }
            let mut buf = AlignedBuf::zeroed(BLOCKS * BLOCK_SIZE);
            buf.fill(0xf0 + round);
            if device.write(0, &buf).is_err() || device.flush().is_err() {
                return self.fail("the volume cannot be written at the end".into());
            }
            for _ in 0..3 {
                executor.pause(root_delay + grace + sweep + Duration::from_secs(1));
                device.tick();
                while executor.run_one() {}
            }
        }
        for found in snapshots() {
            self.read_snapshot(owner, self.quiet(), &found.name, executor);
            self.snapshots.lock().ends(&found.name);
            if let Err(error) = device.delete_snapshot(&found.name) {
                self.fail(format!("the snapshot {} cannot be deleted: {error}", found.name));
            }
        }
    }

    /// Reads a snapshot beside the owner of the volume: it holds what was there when it was made.
    fn read_snapshot(&self, owner: usize, faults: Faults, name: &str, executor: &Arc<SimExecutor>) {
        let opened = ObjectDevice::open_snapshot(
            self.store(owner, faults),
            executor.clone(),
            name,
            stored::passphrase(self.plan.seed).as_ref(),
            self.plan.limits,
            &self.env(),
        );
        let mut buf = AlignedBuf::zeroed(BLOCKS * BLOCK_SIZE);
        let read = match opened {
            // A list may lag for longer than a reader looks for a root.
            Err(ObjectError::Damaged { what, .. })
                if what.starts_with("no root") || what.starts_with("the volume is enc") =>
            {
                return;
            }
            Err(error) => Err(error.to_string()),
            Ok(device) => device.read(0, &mut buf).map_err(|error| error.to_string()),
        };
        let found: Vec<u64> = buf.chunks_exact(BLOCK_SIZE).map(value).collect();
        let checked = self.snapshots.lock().read(name, read.map(|()| found));
        self.check(checked.map_err(|what| format!("owner {owner}: snapshot {name}: {what}")));
    }

    /// The process of an owner has ended, and often its machine has lost power.
    fn end_disk(&self, owner: usize) {
        let mut disk = self.disks[owner].lock();
        disk.heal();
        let world = &mut *self.turns.world();
        if world.rng.below(3) > 0 {
            *disk = Arc::new(disk.crash_image(disk.trace_len(), &mut world.rng));
        }
    }

    /// The disk fails, or is full, for some time or from then on.
    fn spoil_disk(&self, owner: usize) {
        let world = &mut *self.turns.world();
        let (op, errno) = match world.rng.below(12) {
            0..=1 => (Op::Write, libc::ENOSPC),
            2 => (Op::Flush, libc::EIO),
            _ => return,
        };
        let (after, sticky) = (world.rng.below(30), world.rng.below(2) == 0);
        self.disks[owner].lock().inject(Fault { op, after, errno, sticky });
    }

    /// Uploads what the local log of a machine has. Returns the store with the log in front of it;
    /// `None`: the machine has no local log.
    fn local(&self, owner: usize, uploads: &Arc<SimExecutor>) -> Option<Arc<LocalStore>> {
        self.plan.disks[owner]?;
        loop {
            let device = Arc::clone(&*self.disks[owner].lock());
            let disk = SimDisk { turns: Arc::clone(&self.turns), owner, device };
            let opened = LocalStore::open(
                self.store(owner, self.plan.faults),
                uploads.clone(),
                Arc::new(disk),
                self.world(|world| world.objects.volume()),
                self.plan.window,
                Duration::MAX,
                &self.env(),
            );
            let layer = match opened {
                Ok(layer) => layer,
                Err(error) => {
                    self.fail(format!("owner {owner} cannot open its local log: {error:?}"));
                    uploads.pause(Duration::from_secs(1));
                    continue;
                }
            };
            if layer.cut() > 0 {
                self.fail(format!("owner {owner}: its local log is cut, and nobody damaged it"));
            }
            let had = layer.waiting().is_some_and(|waiting| waiting.objects > 0);
            self.replayed[0].fetch_add(u64::from(had), Ordering::Relaxed);
            self.world(|world| {
                world.note(|| format!("owner {owner} uploads its local log: {had}"))
            });
            let uploaded = layer.upload_all();
            let said = uploaded.is_err();
            let allowed = self.history.lock().recovered(owner, said);
            self.check(allowed);
            match uploaded {
                Ok(()) => return Some(layer),
                Err(ObjectError::Fenced { .. }) => {
                    self.world(|world| {
                        world.note(|| format!("owner {owner} has lost {:?}", layer.lost()));
                    });
                    self.replayed[1].fetch_add(1, Ordering::Relaxed);
                    // It is left under another name.
                    let capacity = self.disks[owner].lock().capacity();
                    *self.disks[owner].lock() = Arc::new(SimDevice::new(capacity));
                }
                Err(error) => self.fail(format!("owner {owner} cannot upload: {error}")),
            }
        }
    }

    /// One life of an owner.
    fn live(
        self: &Arc<Self>,
        owner: usize,
        life: u32,
        executor: &Arc<SimExecutor>,
        uploads: &Arc<SimExecutor>,
        has_opened: &AtomicBool,
    ) {
        let sleep_max_ms = self.plan.faults.sleep_max.as_millis() as u64;
        if self.below(3) > 0 {
            // Many crash while they open the volume.
            let most = if self.plan.hurried { 90 } else { [60, 400][self.below(2) as usize] };
            let crash_in = Some(self.below(most));
            self.world(|world| world.crash_in[owner] = crash_in);
        }
        // Many sleep while they open the volume, as a paused machine does.
        if self.below(2) == 0 {
            let (turns, time) =
                (self.below(120), Duration::from_millis(self.below(sleep_max_ms) + 1));
            self.world(|world| match turns {
                0..60 => world.sleep_in[owner] = Some((turns, time)),
                // Before its first fence.
                _ => world.sleep_at_log[owner] = Some(time),
            });
        }
        // The volume is made first. Later a machine is back soon.
        let back_ms = if self.plan.hurried { 200 } else { 3_000 };
        let start = if life == 0 { 10_000 } else { self.below(back_ms) };
        executor.pause(Duration::from_millis(start));
        let mut follower = None;
        let (device, epoch, local) = loop {
            let followed = self.followed(&mut follower, owner, executor);
            // What the log has is uploaded, whether it is used now or not.
            let layer = self.local(owner, uploads);
            let id = layer.as_ref().map(|layer| layer.id());
            let layer = layer.filter(|_| self.below(4) > 0);
            executor.set_log(layer.is_some());
            let store: Arc<dyn Store> = match &layer {
                Some(layer) => layer.clone(),
                None => self.store(owner, self.plan.faults),
            };
            let claimant = Claimant {
                owner: Owner {
                    host: format!("host-{owner}"),
                    machine: format!("machine-{owner}"),
                    pid: life,
                    ..Owner::default()
                },
                take_over: self.below(3) > 0,
                locks: (self.plan.hurried || self.below(2) > 0)
                    .then(|| Arc::new(OneProcess) as Arc<dyn Locks>),
                passphrase: stored::passphrase(self.plan.seed),
                local: layer.as_ref().and(id),
                uploaded: id.into_iter().collect(),
                force: !self.plan.disks.iter().any(Option::is_some) || self.below(2) == 0,
                followed,
                serves_later: self.below(2) == 0,
                ..Claimant::default()
            };
            let opened = ObjectDevice::open(
                store,
                executor.clone(),
                &claimant,
                self.plan.limits,
                &self.env(),
            );
            match opened {
                Ok(device) => {
                    let epoch = device.stats().epoch;
                    if let Some(layer) = &layer {
                        layer.serve();
                    }
                    if claimant.serves_later && !self.recovers(owner, &device) {
                        continue;
                    }
                    if layer.is_some() {
                        self.spoil_disk(owner);
                    }
                    break (device, epoch, layer.is_some());
                }
                Err(
                    ObjectError::InUse { .. }
                    | ObjectError::ClaimLost { .. }
                    | ObjectError::NotUploaded { .. },
                ) => {}
                // A list may lag for longer than an owner looks for a root or the key.
                Err(ObjectError::Damaged { what, .. })
                    if what.starts_with("no root") || what.starts_with("the volume is enc") => {}
                Err(error) => {
                    self.fail(format!("owner {owner} cannot open the volume: {error}"));
                }
            }
            let time = self.below(20_000);
            executor.pause(Duration::from_millis(time));
        };
        self.opened.fetch_add(1, Ordering::Relaxed);
        has_opened.store(true, Ordering::Relaxed);
        self.world(|world| world.note(|| format!("owner {owner} serves, epoch {epoch}")));
        let Some(image) = self.look_at_all(owner, &device, local) else { return };
        let ended = Arc::default();
        Life { run: self, owner, epoch, device, executor, uploads, image, begun: 0, ended }.work();
    }

    /// An owner that serves later reads some blocks, and writes them again as they are. `false`:
    /// another owner took over before it may serve.
    fn recovers(&self, owner: usize, device: &Arc<ObjectDevice>) -> bool {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut recover = || {
            for _ in 0..self.below(8) {
                let at = self.below(BLOCKS as u64) * BLOCK_SIZE as u64;
                device.read(at, &mut block)?;
                device.write(at, &block)?;
                if self.below(2) == 0 {
                    device.flush()?;
                }
            }
            Ok(())
        };
        let recovered = recover().map_err(|error: std::io::Error| error.to_string());
        match recovered.and_then(|()| device.await_alone().map_err(|error| error.to_string())) {
            Ok(()) => true,
            Err(_) if self.is_claimed_beyond(device.stats().epoch) => false,
            Err(error) => {
                self.fail(format!("owner {owner} cannot recover the volume: {error}"));
                false
            }
        }
    }

    /// What a claimant has followed of the volume, if it has: just now, or a while ago.
    fn followed(
        &self,
        follower: &mut Option<Follower>,
        owner: usize,
        executor: &Arc<SimExecutor>,
    ) -> Followed {
        if follower.is_none() && self.plan.follows && self.below(2) == 0 {
            let (store, executor) = (self.store(owner, self.plan.faults), executor.clone());
            let passphrase = stored::passphrase(self.plan.seed);
            let (limits, env) = (self.plan.limits, self.env());
            *follower = Follower::open(store, executor, passphrase.as_ref(), limits, &env).ok();
        }
        let Some(follower) = follower else { return Followed::default() };
        for _ in 0..self.below(3) {
            // What it has seen before stays if it sees nothing now.
            let _version = follower.look(false);
            let time = self.below(2_000);
            executor.pause(Duration::from_millis(time));
        }
        follower.followed()
    }

    /// Reads the whole volume, and compares it with what may be there; `None`: another owner took
    /// over.
    fn look_at_all(&self, owner: usize, device: &Arc<ObjectDevice>, local: bool) -> Option<Image> {
        let epoch = device.stats().epoch;
        {
            let mut history = self.history.lock();
            history.serves = history.serves.max(epoch);
        }
        let mut image = [0; BLOCKS];
        let step = 1 + self.below(BLOCKS as u64) as usize;
        for start in (0..BLOCKS).step_by(step) {
            let count = step.min(BLOCKS - start);
            image[start..start + count].copy_from_slice(&self.read(owner, device, start, count)?);
        }
        // A newer owner may have begun to write.
        if self.history.lock().serves == epoch {
            let found = self.history.lock().found(epoch, image, owner, local);
            let is_right = found.is_ok();
            self.check(found);
            is_right.then_some(image)
        } else {
            None
        }
    }

    /// Reads blocks; `None`: another owner took over.
    fn read(
        &self,
        owner: usize,
        device: &Arc<ObjectDevice>,
        start: usize,
        count: usize,
    ) -> Option<Vec<u64>> {
        let epoch = device.stats().epoch;
        let newest_before = self.history.lock().serves;
        let mut buf = AlignedBuf::zeroed(count * BLOCK_SIZE);
        match device.read((start * BLOCK_SIZE) as u64, &mut buf) {
            Ok(()) if newest_before > epoch => {
                let what = "reads after a newer owner has begun to serve";
                self.fail(format!("owner {owner}, epoch {epoch}, {what} ({newest_before})"));
                None
            }
            Ok(()) => Some(buf.chunks_exact(BLOCK_SIZE).map(value).collect()),
            // Another owner is there, so objects may be deleted.
            Err(_) if device.failure().is_some() || self.is_claimed_beyond(epoch) => None,
            Err(error) => {
                self.fail(format!("owner {owner}, epoch {epoch}, cannot read: {error}"));
                None
            }
        }
    }

    pub(super) fn is_claimed_beyond(&self, epoch: u64) -> bool {
        self.world(|world| world.objects.has_claim_beyond(epoch))
    }
}

/// The number of the write that a block holds.
pub(super) fn value(block: &[u8]) -> u64 {
    let number = u64::from_le_bytes(block[..8].try_into().expect("eight bytes"));
    assert!(
        block.chunks_exact(8).all(|part| part == &block[..8]),
        "a block has parts of several writes"
    );
    number
}

/// An owner at work.
pub(super) struct Life<'r> {
    pub(super) run: &'r Arc<Run>,
    pub(super) owner: usize,
    pub(super) epoch: u64,
    pub(super) device: Arc<ObjectDevice>,
    pub(super) executor: &'r Arc<SimExecutor>,
    /// Of its local log.
    uploads: &'r Arc<SimExecutor>,
    /// What it wrote, on what it found.
    image: Image,
    /// Changes that were begun, and how many of them ended: all of them in order.
    begun: usize,
    ended: Arc<AtomicUsize>,
}

impl Life<'_> {
    fn work(&mut self) {
        let run = self.run;
        for _ in 0..run.below(run.plan.ops_max) + 1 {
            match run.below(20) {
                0..=8 => self.write(),
                9..=11 => self.flush(),
                12 => self.discard(),
                13..=15 => self.read(),
                16..=17 => self.device.tick(),
                18 => {
                    let time = Duration::from_millis(run.below(run.plan.think_max) + 1);
                    self.executor.pause(time);
                }
                _ => self.run_some(self.executor),
            }
            if run.plan.disks[self.owner].is_some() && run.below(4) == 0 {
                self.run_some(self.uploads);
            }
            if run.plan.snapshots && run.below(8) == 0 {
                self.snapshots();
            }
            if run.plan.snapshots && run.plan.clones && run.below(16) == 0 {
                self.clones();
            }
            if let Some(error) = self.device.failure() {
                if !run.is_claimed_beyond(self.epoch) {
                    let (owner, epoch) = (self.owner, self.epoch);
                    run.fail(format!(
                        "owner {owner}, epoch {epoch}, stops, and nobody claimed the volume: {error}"
                    ));
                }
                return;
            }
        }
        run.repacked.fetch_add(self.device.stats().repacked_bytes, Ordering::Relaxed);
        if run.plan.snapshots && run.plan.rollbacks && run.below(2) == 0 {
            return self.roll_back();
        }
        // Otherwise it ends as if its machine crashed.
        if run.below(3) == 0 {
            self.settle();
            if self.device.close().is_ok() {
                run.flushed(self.epoch, self.begun);
            }
        }
    }

    /// Makes, deletes or reads a snapshot.
    fn snapshots(&mut self) {
        let run = self.run;
        let there = self.no_pins();
        let drawn = there.get(run.below(there.len().max(1) as u64) as usize);
        match (run.below(4), drawn) {
            (0..=1, _) if there.len() < 6 => {
                self.settle();
                let name = run.snapshots.lock().begins(self.image);
                let local = run.plan.disks[self.owner].is_some();
                if self.device.create_snapshot(&name).is_ok() {
                    run.snapshots.lock().made(&name, !local);
                }
            }
            (2, Some(drawn)) => {
                run.snapshots.lock().ends(&drawn.name);
                drop(self.device.delete_snapshot(&drawn.name));
            }
            (_, Some(drawn)) => {
                run.read_snapshot(self.owner, run.plan.faults, &drawn.name, self.executor);
            }
            _ => {}
        }
    }

    /// The snapshots, without the pins of clones.
    fn no_pins(&self) -> Vec<Snapshot> {
        self.device.snapshots().into_iter().filter(|found| !is_pin(&found.name)).collect()
    }

    /// Goes back to a snapshot, if there is one. That is one change of all blocks, which is durable
    /// when the owner is told so.
    fn roll_back(&mut self) {
        let run = self.run;
        let there = self.no_pins();
        let Some(drawn) = there.get(run.below(there.len().max(1) as u64) as usize) else { return };
        self.settle();
        self.image = run.snapshots.lock().image(&drawn.name);
        let change = Change { start: 0, values: self.image.to_vec() };
        self.begun += 1;
        run.history.lock().changes(self.epoch, change);
        if run.below(2) == 0 {
            // At one of its requests.
            let crash_in = Some(run.below(12));
            run.world(|world| world.crash_in[self.owner] = crash_in);
        }
        match self.device.roll_back(&drawn.name, Replaced::Discarded) {
            Ok(_) => {
                run.rollbacks.fetch_add(1, Ordering::Relaxed);
                run.flushed(self.epoch, self.begun);
            }
            Err(_) if run.is_claimed_beyond(self.epoch) => {}
            Err(error) => {
                let (owner, epoch) = (self.owner, self.epoch);
                run.fail(format!(
                    "owner {owner}, epoch {epoch}, cannot go back to {}: {error}",
                    drawn.name
                ));
            }
        }
    }

    fn run_some(&self, executor: &SimExecutor) {
        for _ in 0..self.run.below(20) {
            if !executor.run_one() {
                break;
            }
        }
    }

    /// Waits until each change has ended.
    fn settle(&self) {
        while self.ended.load(Ordering::Relaxed) < self.begun {
            self.executor.step();
        }
    }

    /// Draws a change, and notes it.
    fn change(&mut self, zeros: bool) -> Change {
        let run = self.run;
        let len = 1 + run.below(if run.below(3) == 0 { 12 } else { 3 }) as usize;
        let start = run.below((BLOCKS - len + 1) as u64) as usize;
        let values = (0..len).map(|_| match zeros {
            true => 0,
            false => run.writes.fetch_add(1, Ordering::Relaxed) + 1,
        });
        let change = Change { start, values: values.collect() };
        change.apply(&mut self.image);
        self.begun += 1;
        run.history.lock().changes(self.epoch, change.clone());
        change
    }

    fn write(&mut self) {
        let change = self.change(false);
        let mut buf = AlignedBuf::zeroed(change.values.len() * BLOCK_SIZE);
        for (block, value) in buf.chunks_exact_mut(BLOCK_SIZE).zip(&change.values) {
            block.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&value.to_le_bytes()));
        }
        let offset = (change.start * BLOCK_SIZE) as u64;
        let ended = Arc::clone(&self.ended);
        let done = Box::new(move |_| {
            ended.fetch_add(1, Ordering::Relaxed);
        });
        self.device.submit(vec![Io::Write { offset, buf: Arc::new(buf), done }]);
        if self.run.below(3) > 0 {
            self.settle();
        }
    }

    fn discard(&mut self) {
        self.settle();
        let change = self.change(true);
        let len = (change.values.len() * BLOCK_SIZE) as u64;
        drop(self.device.discard((change.start * BLOCK_SIZE) as u64, len));
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Flushes. The owner waits for the end, or goes on meanwhile.
    fn flush(&mut self) {
        let count = self.ended.load(Ordering::Relaxed);
        let (run, epoch, ended) =
            (Arc::clone(self.run), self.epoch, Arc::new(AtomicBool::new(false)));
        let noted = Arc::clone(&ended);
        let done = Box::new(move |result: io::Result<()>| {
            noted.store(true, Ordering::Relaxed);
            if result.is_ok() {
                run.flushed(epoch, count);
            }
        });
        self.device.submit(vec![Io::Flush { done }]);
        if self.run.below(2) == 0 {
            while !ended.load(Ordering::Relaxed) {
                self.executor.step();
            }
        }
    }

    /// Reads some blocks: they hold what was written.
    fn read(&mut self) {
        self.settle();
        let run = self.run;
        let start = run.below(BLOCKS as u64) as usize;
        let count = 1 + run.below((BLOCKS - start) as u64) as usize;
        let expected = self.image[start..start + count].to_vec();
        if let Some(found) = run.read(self.owner, &self.device, start, count)
            && found != expected
        {
            let (owner, epoch) = (self.owner, self.epoch);
            run.fail(format!(
                "owner {owner}, epoch {epoch}: blocks from {start} on hold {found:?} and not {expected:?}"
            ));
        }
    }
}
