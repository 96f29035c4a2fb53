//! A store that notes what changed it, so that a machine can crash at each of its requests.

use super::objects::{Effect, Objects};
use crate::crash::Traced;
use crate::device::{SimClock, sim_env};
use ferry_env::Env;
use ferry_object::{
    Claimant, Executor, Job, Limits, ObjectDevice, ObjectError, Passphrase, Store, VolumeOptions,
};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A store that notes each change, so that it can be had as it was after any of them.
#[derive(Clone, Default)]
pub struct NotedStore {
    objects: Arc<Mutex<Objects>>,
    changes: Arc<Mutex<Vec<Effect>>>,
    /// What the names of its volume's objects begin with.
    prefix: String,
}

impl NotedStore {
    /// Changes so far.
    pub fn trace_len(&self) -> usize {
        self.changes.lock().len()
    }

    /// A store as this one was after so many changes.
    pub fn after(&self, changes: usize) -> Self {
        let mut objects = Objects::default();
        for change in &self.changes.lock()[..changes] {
            drop(objects.apply(change, Duration::ZERO));
        }
        Self { objects: Arc::new(Mutex::new(objects)), ..Self::default() }
    }

    /// Makes a volume in it.
    pub fn make(self: &Arc<Self>, options: &VolumeOptions, seed: u64) -> Result<(), ObjectError> {
        let (env, clock) = sim_env(seed);
        ObjectDevice::make(self.clone(), Arc::new(InlineExecutor(clock)), options, &env)
    }

    /// Takes its volume over.
    pub fn own(
        self: &Arc<Self>,
        passphrase: Option<Passphrase>,
        seed: u64,
    ) -> Result<Owner, ObjectError> {
        let (env, clock) = sim_env(seed);
        let executor = Arc::new(InlineExecutor(Arc::clone(&clock)));
        let claimant = Claimant { take_over: true, passphrase, ..Claimant::default() };
        let device = ObjectDevice::open(self.clone(), executor, &claimant, limits(), &env)?;
        Ok(Owner { device, clock, env })
    }

    /// The place of another volume in it.
    pub(super) fn at(&self, prefix: &str) -> Self {
        Self { prefix: prefix.to_owned(), ..self.clone() }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn change(&self, effect: Effect) -> Result<(), ObjectError> {
        self.objects.lock().apply(&effect, Duration::ZERO)?;
        self.changes.lock().push(effect);
        Ok(())
    }
}

impl Store for NotedStore {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.objects.lock().read(&self.key(name), range)
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.change(Effect::Create(self.key(name), Arc::new(bytes.to_vec())))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.change(Effect::Put(self.key(name), Arc::new(bytes.to_vec())))
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.change(Effect::Delete(self.key(name)))
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        let found = self.objects.lock().names(&self.key(prefix), |_| false);
        Ok(found.iter().filter_map(|key| Some(key.strip_prefix(&self.prefix)?.into())).collect())
    }

    fn name(&self) -> Result<String, ObjectError> {
        Ok(self.prefix.strip_suffix('/').unwrap_or_default().into())
    }

    fn beside(&self, name: &str) -> Result<Arc<dyn Store>, ObjectError> {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
        Ok(Arc::new(self.at(&prefix)))
    }
}

impl Traced for NotedStore {
    fn trace_len(&self) -> usize {
        Self::trace_len(self)
    }
}

/// Runs each job at once.
pub(super) struct InlineExecutor(pub Arc<SimClock>);

impl Executor for InlineExecutor {
    fn start(&self, job: Job) {
        (job.run)()();
    }

    fn step(&self) -> bool {
        false
    }

    fn pause(&self, time: Duration) {
        self.0.advance(time);
    }
}

/// Small enough that roots, deletions and data objects come all the time.
fn limits() -> Limits {
    Limits {
        seal_bytes: 256 << 10,
        unsent_bytes_max: 512 << 10,
        data_run_bytes_min: 16 << 10,
        data_bytes_max: 64 << 10,
        root_log_bytes: 1 << 20,
        root_log_objects: 12,
        root_delay: Duration::from_secs(20),
        grace: Duration::from_secs(60),
        repack_bytes_min: 16 << 10,
        sweep: Duration::from_secs(100),
        term: Duration::from_secs(5),
        ahead_bytes_max: 1 << 20,
        holds: true,
        patience: Duration::MAX,
    }
}

/// A device that an owner has opened, and the handle that moves its time.
pub struct Owner {
    /// The device.
    pub device: Arc<ObjectDevice>,
    pub(super) clock: Arc<SimClock>,
    pub(super) env: Env,
}
