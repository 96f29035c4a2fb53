//! A local log on a disk that loses power at each moment: of what was not flushed, any sectors
//! survive. All that was acknowledged is uploaded by the next opening, and nothing false is said.

use ferry_env::planted::{Bug, plant};
use ferry_object::{Executor, Job, LocalStore, ObjectError, Store};
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const VOLUME: [u8; 16] = [7; 16];
const BLOCK: u64 = 4096;

/// Objects, each with the number of events of the disk after which it came.
#[derive(Default)]
struct TestStore {
    objects: Mutex<BTreeMap<String, (Vec<u8>, usize)>>,
    disk: Option<Arc<SimDevice>>,
}

impl Store for TestStore {
    fn get(&self, name: &str, _range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        let objects = self.objects.lock().expect("no test panics here");
        let found = objects.get(name).map(|(bytes, _)| bytes.clone());
        found.ok_or_else(|| ObjectError::NotFound(name.into()))
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.put(name, bytes)
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        let at = self.disk.as_ref().map_or(0, |disk| disk.trace_len());
        let mut objects = self.objects.lock().expect("no test panics here");
        objects.insert(name.into(), (bytes.to_vec(), at));
        Ok(())
    }
    fn delete(&self, _name: &str) -> Result<(), ObjectError> {
        Ok(())
    }
    fn list(&self, _prefix: &str) -> Result<Vec<String>, ObjectError> {
        Ok(Vec::new())
    }
}

/// Runs jobs when it is told, on the thread that tells.
#[derive(Default)]
struct Manual(Mutex<VecDeque<Job>>);

impl Executor for Manual {
    fn start(&self, job: Job) {
        self.0.lock().expect("no test panics here").push_back(job);
    }
    fn step(&self) -> bool {
        let job = self.0.lock().expect("no test panics here").pop_front();
        job.map(|job| (job.run)()()).is_some()
    }
    fn pause(&self, _time: Duration) {}
}

fn open(
    store: &Arc<TestStore>,
    executor: &Arc<Manual>,
    device: Arc<SimDevice>,
    seed: u64,
) -> Arc<LocalStore> {
    let (env, _) = sim_env(seed);
    LocalStore::open(store.clone(), executor.clone(), device, VOLUME, 4, Duration::ZERO, &env)
        .expect("the log is ours")
}

/// An object, and the number of events after which it was acknowledged.
struct Put {
    name: String,
    bytes: Vec<u8>,
    acknowledged: usize,
}

/// Puts objects and uploads some; then power is lost at each event.
fn run(seed: u64) -> Result<(), String> {
    let mut rng = SimRng::new(seed);
    let device = Arc::new(SimDevice::new(BLOCK * (42 + rng.below(20))));
    let store = Arc::new(TestStore { disk: Some(device.clone()), ..TestStore::default() });
    let executor = Arc::default();
    let local = open(&store, &executor, device.clone(), seed);
    local.upload_all().map_err(|error| error.to_string())?;
    local.serve();
    device.restart_trace();
    let mut puts: Vec<Put> = Vec::new();
    for n in 0..60 {
        let name = format!("s/{n:02x}/0000000000000001-{n:x}");
        let bytes = vec![n as u8 + 1; 100 + rng.below(2 * BLOCK) as usize];
        local.put(&name, &bytes).map_err(|error| error.to_string())?;
        puts.push(Put { name, bytes, acknowledged: device.trace_len() });
        // Often the log runs up to its front again before it is empty.
        let uploads = if rng.chance(1, 6) { usize::MAX } else { rng.index(2) };
        (0..uploads).take_while(|_| executor.step()).for_each(drop);
    }
    let uploaded = store.objects.lock().expect("no test panics here");
    for point in 0..=device.trace_len() {
        let left = Arc::new(device.crash_image(point, &mut rng));
        let (store, executor) = (Arc::<TestStore>::default(), Arc::default());
        let local = open(&store, &executor, left, seed);
        if local.cut() > 0 {
            return Err(format!("event {point}: says that {} records are lost", local.cut()));
        }
        local.upload_all().map_err(|error| format!("event {point}: {error}"))?;
        for put in &puts {
            let found = store.get(&put.name, None).ok();
            let only_here = uploaded.get(&put.name).is_none_or(|(_, at)| *at >= point);
            let must_be = put.acknowledged <= point && only_here;
            if found.as_ref().is_some_and(|found| *found != put.bytes) {
                return Err(format!("event {point}: {} has other bytes", put.name));
            }
            if must_be && found.is_none() {
                return Err(format!("event {point}: {} is lost", put.name));
            }
        }
    }
    Ok(())
}

#[test]
fn a_log_that_loses_power_has_what_was_acknowledged_and_says_nothing_false() {
    let _planted = plant(Bug::None);
    for seed in 0..200 {
        run(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn an_early_acknowledgement_is_found() {
    let _planted = plant(Bug::AcknowledgedBeforeLocalFlush);
    assert!((0..20).any(|seed| run(seed).is_err()));
}
