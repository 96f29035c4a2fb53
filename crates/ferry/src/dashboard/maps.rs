//! Which directories take the space of a mount or server, for the page that asks for it. A daemon
//! counts while the page looks, and the newest answers are remembered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ferry_env::{Clock, Env};
use parking_lot::Mutex;
use serde_json::Value;

use crate::socket::object;
use crate::space::{self, Daemon};

/// Levels of directories in an answer.
const DEPTH: usize = 3;
/// How long a count goes on while no page looks at it.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most answers that are remembered.
const REMEMBERED_MAX: usize = 8;

/// The counts, by the numbers of what they are of.
#[derive(Clone)]
pub struct Maps {
    clock: Arc<dyn Clock>,
    known: Arc<Mutex<BTreeMap<u64, Map>>>,
}

struct Map {
    /// When a page looked last.
    looked: Duration,
    stage: Stage,
}

/// What a count is at.
enum Stage {
    /// So many files and directories of so many; the flag ends it.
    Running(u64, u64, Arc<AtomicBool>),
    Complete(Value),
    Failed(String),
}

impl Maps {
    pub fn new() -> Self {
        Self { clock: Env::real().clock, known: Arc::default() }
    }

    /// How far the count of a source is, or what it has found.
    pub fn look(&self, source: u64) -> Value {
        let mut known = self.known.lock();
        let Some(map) = known.get_mut(&source) else { return object([("state", "none".into())]) };
        map.looked = self.clock.monotonic();
        match &map.stage {
            Stage::Running(counted, of, _) => object([
                ("state", "running".into()),
                ("counted", (*counted).into()),
                ("of", (*of).into()),
            ]),
            Stage::Complete(map) => object([("state", "complete".into()), ("map", map.clone())]),
            Stage::Failed(why) => object([("state", "failed".into()), ("why", why.clone().into())]),
        }
    }

    /// Begins a count, if none of this source is running.
    pub fn begin(&self, source: u64, daemon: Daemon) {
        let stop = Arc::new(AtomicBool::new(false));
        let looked = self.clock.monotonic();
        {
            let mut known = self.known.lock();
            if known.get(&source).is_some_and(|map| matches!(map.stage, Stage::Running(..))) {
                return;
            }
            known.remove(&source);
            while known.len() >= REMEMBERED_MAX {
                let oldest = known.iter().min_by_key(|(_, map)| map.looked).map(|(of, _)| *of);
                oldest.and_then(|oldest| known.remove(&oldest)).inspect(Map::stop);
            }
            known.insert(source, Map { looked, stage: Stage::Running(0, 0, stop.clone()) });
        }
        let maps = self.clone();
        let counting = move || maps.count(source, &daemon, &stop);
        if let Err(error) = thread::Builder::new().name("ferry-map".into()).spawn(counting) {
            let why = Stage::Failed(format!("cannot start a thread: {error}"));
            self.known.lock().insert(source, Map { looked, stage: why });
        }
    }

    /// Ends the count of a source.
    pub fn stop(&self, source: u64) {
        if let Some(map) = self.known.lock().get(&source) {
            map.stop();
        }
    }

    /// The thread of a count.
    fn count(&self, source: u64, daemon: &Daemon, stop: &Arc<AtomicBool>) {
        let told = |counted, of| {
            let now = self.clock.monotonic();
            match self.known.lock().get_mut(&source) {
                Some(map) if map.is(stop) && now.saturating_sub(map.looked) < PATIENCE => {
                    map.stage = Stage::Running(counted, of, stop.clone());
                }
                _ => stop.store(true, Ordering::Relaxed),
            }
        };
        let counted = space::count(daemon, DEPTH, None, stop, told);
        let mut known = self.known.lock();
        let Some(map) = known.get_mut(&source).filter(|map| map.is(stop)) else { return };
        match counted {
            Ok(Some(answer)) => map.stage = Stage::Complete(answer),
            Err(error) => map.stage = Stage::Failed(error.to_string()),
            Ok(None) => drop(known.remove(&source)),
        }
    }
}

impl Map {
    /// Whether it is at the count that this flag ends.
    fn is(&self, stop: &Arc<AtomicBool>) -> bool {
        matches!(&self.stage, Stage::Running(_, _, own) if Arc::ptr_eq(own, stop))
    }

    fn stop(&self) {
        if let Stage::Running(_, _, stop) = &self.stage {
            stop.store(true, Ordering::Relaxed);
        }
    }
}
