//! A whole file system on a volume in an object store. Its machine crashes at every request that
//! changes the store: what is there then is opened by the next owner, checked, and compared with
//! what the model allows.

use super::noted::{InlineExecutor, NotedStore, Owner};
use super::stored;
use crate::crash::Life;
use crate::device::SimRng;
use crate::generator::Generator;
use crate::history::History;
use crate::model::Model;
use crate::overlap::Step;
use crate::plan::{Failure, Plan, Tally};
use crate::world::{Opening, World};
use ferry_device::BlockDevice;
use ferry_fs::volume::{MkfsOptions, mkfs, read_superblock};
use ferry_object::{ObjectDevice, ObjectError, Replaced, Store, VolumeOptions};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// Operations on the file system between two ticks of the device.
const OPS_PER_TICK: usize = 8;
/// Simulated time between two operations.
const OP_TIME: Duration = Duration::from_secs(3);
/// The snapshot that is made in the middle of a run.
const SNAPSHOT: &str = "middle";

/// What the names of a clone of it begin with.
const CLONE: &str = "clone-0/";

/// A run that follows from a seed.
#[derive(Clone, Debug)]
pub struct VolumePlan {
    /// The seed.
    pub seed: u64,
    /// Operations on the file system.
    pub ops: usize,
    /// Crash points, at most.
    pub points_max: usize,
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default)]
pub struct VolumeTally {
    /// Requests that changed the store.
    pub changes: usize,
    /// Points at which the machine crashed.
    pub points: usize,
    /// Of these, those behind which it had another size than it was made with.
    pub resized: usize,
    /// Objects that were deleted.
    pub deletes: u64,
    /// Points at which a machine crashed that went back to a snapshot, where the volume is as it
    /// was, and where it is what the snapshot has.
    pub rolled_back: [usize; 2],
    /// The same of a machine that made a clone of the snapshot: where there is none, and where
    /// there is a whole one.
    pub cloned: [usize; 2],
}

impl VolumePlan {
    fn fail<T>(stage: impl Into<String>, what: impl Into<String>) -> Result<T, Failure> {
        Err(Failure { life: 0, stage: stage.into(), what: what.into() })
    }

    fn owner(&self, store: &Arc<NotedStore>, stage: &str, seed: u64) -> Result<Owner, Failure> {
        store
            .own(stored::passphrase(self.seed), seed)
            .or_else(|error| Self::fail(stage, format!("the volume cannot be opened: {error}")))
    }

    /// Runs it, and crashes it.
    pub fn run(&self) -> Result<VolumeTally, Failure> {
        let plan = Plan { fault: None, ..Plan::fifty(self.seed) };
        let mut rng = SimRng::new(self.seed);
        let store = Arc::new(NotedStore::default());
        let options = VolumeOptions {
            window: 4,
            ..stored::options(self.seed, plan.volume_bytes, (0, 1 << 20))
        };
        store
            .make(&options, rng.next_u64())
            .or_else(|error| Self::fail("make", error.to_string()))?;
        let mut made_at = None;
        let owner = self.owner(&store, "the first opening", rng.next_u64())?;
        let device: Arc<dyn BlockDevice> = owner.device.clone();
        let volume = MkfsOptions { log_size: Some(plan.log_bytes), ..MkfsOptions::default() };
        mkfs(&device, &volume, &owner.env)
            .or_else(|error| Self::fail("mkfs", error.to_string()))?;
        let made = store.trace_len();

        let mut tally = Tally::default();
        let mut life = Life::new(&plan, 0, HashSet::new(), &mut tally);
        let mut model = Model::empty();
        let mut history = History::new(&model);
        let opening = |seed, time| Opening { seed, cache_bytes: 1 << 20, time, flush: None };
        let mut world = World::open(&owner.device, opening(rng.next_u64(), Duration::ZERO))
            .or_else(|what| Self::fail("mount", what))?;
        life.note_times(&world, &mut history, &model, model.tree().keys())?;
        let ops = Generator::new(Model::empty()).draw(&mut rng, self.ops);
        // Longer than `super` says; for each other seed so long that the home map moves.
        let longest = if self.seed.is_multiple_of(2) { 3 * plan.volume_bytes } else { 1 << 30 };
        let sizes = [(1, longest), (2, 2 * plan.volume_bytes)];
        let mut resized_at = Vec::new();
        for (n, op) in ops.iter().enumerate() {
            owner.clock.advance(OP_TIME);
            if n % OPS_PER_TICK == 0 {
                owner.device.tick();
            }
            if let Some((_, bytes)) = sizes.iter().find(|(third, _)| n == third * ops.len() / 3) {
                let resized = world.resize(*bytes);
                resized.or_else(|why| Self::fail("another size", format!("{why:?}")))?;
                resized_at.push(store.trace_len());
            }
            if n == ops.len() / 2 {
                owner
                    .device
                    .create_snapshot(SNAPSHOT)
                    .or_else(|error| Self::fail("the snapshot", error.to_string()))?;
                made_at = Some(store.trace_len());
            }
            let step = life.step(&mut world, &mut history, &mut model, op, n, &*store);
            match step.or_else(|what| Self::fail(format!("operation {n}: {op}"), what))? {
                Step::Done => {}
                Step::DeviceFailed => break,
            }
        }
        let deletes = owner.device.stats().deletes;
        drop(world);

        let changes = store.trace_len();
        let mut points: Vec<usize> = (made..=changes).collect();
        while points.len() > self.points_max {
            points.swap_remove(rng.index(points.len()));
        }
        // What is there in a store that a crash has left.
        let mut found_in = |copy: &Arc<NotedStore>, stage: &str| {
            let next = self.owner(copy, stage, rng.next_u64())?;
            life.check(&next.device, stage, false)?;
            let time = Duration::from_secs(100_000);
            let world = World::open(&next.device, opening(rng.next_u64(), time))
                .or_else(|what| Self::fail(stage, what))?;
            let found = world.observe();
            let found = found.or_else(|trouble| Self::fail(stage, format!("{trouble:?}")))?;
            let device: Arc<dyn BlockDevice> = next.device.clone();
            let size = read_superblock(&device).map(|sb| sb.size);
            Ok((found, size.or_else(|error| Self::fail(stage, error.to_string()))?))
        };
        let mut resized = 0;
        for point in &points {
            let stage = format!("crash at {point} of {changes}");
            let (found, size) = found_in(&Arc::new(store.after(*point)), &stage)?;
            history.explain(*point, &found).or_else(|what| Self::fail(&*stage, what))?;
            let said = resized_at.iter().filter(|at| *at <= point).count();
            let all = [plan.volume_bytes, sizes[0].1, sizes[1].1];
            let possible = &all[said..all.len().min(said + 2)];
            if !possible.contains(&size) {
                let what = format!("it has {size} bytes, and may have {possible:?}");
                return Self::fail(stage, what);
            }
            resized += usize::from(size != all[0]);
        }
        let (mut rolled_back, mut cloned) = ([0; 2], [0; 2]);
        if let Some(made_at) = made_at {
            self.roll_back(&store)?;
            let ended = store.trace_len();
            for point in changes..=ended {
                let stage = format!("crash at {point} of a rollback, {changes} to {ended}");
                let (found, _) = found_in(&Arc::new(store.after(point)), &stage)?;
                let as_it_was = history.explain(changes, &found);
                let behind = as_it_was.is_err() || point == ended;
                if behind {
                    history.explain(made_at, &found).or_else(|what| Self::fail(&*stage, what))?;
                }
                rolled_back[usize::from(behind)] += 1;
            }
            self.make_clone(&store)?;
            let (begun, ended) = (ended, store.trace_len());
            for point in begun..=ended {
                let stage = format!("crash at {point} of a clone, {begun} to {ended}");
                let left = Arc::new(store.after(point));
                let clone = Arc::new(left.at(CLONE));
                let is_there = clone.get("super", None).is_ok();
                let volumes = [left].into_iter().chain(is_there.then_some(clone));
                for volume in volumes {
                    let (found, _) = found_in(&volume, &stage)?;
                    history.explain(made_at, &found).or_else(|what| Self::fail(&*stage, what))?;
                }
                if point == ended && !is_there {
                    return Self::fail(stage, "the clone was made, and is not there");
                }
                cloned[usize::from(is_there)] += 1;
            }
        }
        let changes = changes - made;
        Ok(VolumeTally { changes, points: points.len(), resized, deletes, rolled_back, cloned })
    }

    /// The next owner makes a clone of the snapshot.
    fn make_clone(&self, store: &Arc<NotedStore>) -> Result<(), Failure> {
        let Owner { device, clock, env } =
            self.owner(store, "the opening before a clone", self.seed)?;
        let made = ObjectDevice::make_clone(
            (store.clone(), Arc::new(InlineExecutor(clock))),
            (SNAPSHOT, CLONE.trim_end_matches('/')),
            stored::passphrase(self.seed).as_ref(),
            Duration::MAX,
            &env,
            |pin| device.create_snapshot(pin),
        );
        made.map(drop).or_else(|error: ObjectError| Self::fail("the clone", error.to_string()))
    }

    /// The next owner goes back to the snapshot.
    fn roll_back(&self, store: &Arc<NotedStore>) -> Result<(), Failure> {
        let owner = self.owner(store, "the opening before a rollback", self.seed)?;
        let rolled_back = owner.device.roll_back(SNAPSHOT, Replaced::Snapshot);
        rolled_back.map(drop).or_else(|error| Self::fail("the rollback", error.to_string()))
    }
}
