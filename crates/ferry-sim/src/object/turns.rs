//! Whose turn it is, and virtual time.

use super::objects::{Effect, Objects};
use crate::device::SimRng;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::time::Duration;

/// What an owner's thread unwinds with when its machine crashes.
pub(super) struct Crashed;

/// What all owners share. One thread at a time looks at it.
pub(super) struct World {
    pub now: Duration,
    pub rng: SimRng,
    pub objects: Objects,
    /// What happens to the store at a later time, in order. The number keeps equal times apart.
    late: BTreeMap<(Duration, u64), Effect>,
    late_count: u64,
    /// When each owner goes on; `None`: it has ended.
    wakes: Vec<Option<Duration>>,
    /// Turns that each owner has before its machine crashes.
    pub crash_in: Vec<Option<u64>>,
    /// Turns that each owner has before it sleeps, and for how long.
    pub sleep_in: Vec<Option<(u64, Duration)>>,
    /// How long each owner sleeps before it creates the next object of the log.
    pub sleep_at_log: Vec<Option<Duration>>,
    turn: Option<usize>,
    /// What must not happen, and did.
    pub violation: Option<String>,
    /// A number that depends on all that happened, in its order.
    pub digest: u64,
    pub requests: u64,
    /// What happened, if somebody wants to read it.
    pub trace: Option<Vec<String>>,
}

/// The turns of a run.
pub(super) struct Turns {
    world: Mutex<World>,
    changed: Vec<Condvar>,
}

impl World {
    /// Has something happen to the store after `time`.
    pub fn happen_after(&mut self, time: Duration, effect: Effect) {
        self.late_count += 1;
        self.late.insert((self.now + time, self.late_count), effect);
    }

    /// Notes what happened.
    pub fn note(&mut self, text: impl Fn() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>9} ms  {}", self.now.as_millis(), text()));
        }
    }

    /// Mixes what happened into the digest.
    pub fn mix(&mut self, texts: &[&str]) {
        let now = self.now.as_nanos() as u64;
        let parts = texts.iter().map(|text| crc32c::crc32c(text.as_bytes()).into());
        for part in parts.chain([now]) {
            self.digest = (self.digest ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
    }

    /// Notes what must not happen. The run ends.
    pub fn fail(&mut self, what: String) {
        self.note(|| what.clone());
        self.violation.get_or_insert(what);
    }

    /// How long the owner sleeps at this turn.
    fn sleeps(&mut self, owner: usize) -> Duration {
        match &mut self.sleep_in[owner] {
            None => Duration::ZERO,
            Some((0, time)) => {
                let time = *time;
                self.sleep_in[owner] = None;
                self.note(|| format!("owner {owner} sleeps {} s", time.as_secs()));
                time
            }
            Some((left, _)) => {
                *left -= 1;
                Duration::ZERO
            }
        }
    }

    /// Gives the turn to the owner that wakes first.
    fn next_turn(&mut self) {
        let wakes = self.wakes.iter().enumerate();
        let first = wakes.filter_map(|(owner, wake)| Some(((*wake)?, owner))).min();
        self.turn = first.map(|(_, owner)| owner);
        let Some((wake, _)) = first else { return };
        while let Some(entry) = self.late.first_entry()
            && entry.key().0 <= wake
        {
            let ((time, _), effect) = entry.remove_entry();
            self.now = self.now.max(time);
            let now = self.now;
            let name = effect.name().to_owned();
            self.note(|| format!("late: {name}"));
            drop(self.objects.apply(&effect, now));
        }
        self.now = self.now.max(wake);
    }
}

impl Turns {
    pub fn new(owners: usize, seed: u64, trace: bool) -> Self {
        let world = World {
            now: Duration::from_secs(1000),
            rng: SimRng::new(seed),
            objects: Objects::default(),
            late: BTreeMap::new(),
            late_count: 0,
            wakes: (0..owners as u64).map(|owner| Some(Duration::from_millis(owner))).collect(),
            crash_in: vec![None; owners],
            sleep_in: vec![None; owners],
            sleep_at_log: vec![None; owners],
            turn: Some(0),
            violation: None,
            digest: 0,
            requests: 0,
            trace: trace.then(Vec::new),
        };
        Self { world: Mutex::new(world), changed: (0..owners).map(|_| Condvar::new()).collect() }
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock()
    }

    /// Waits for the first turn.
    pub fn begin(&self, owner: usize) {
        let mut world = self.world.lock();
        while world.turn != Some(owner) {
            self.changed[owner].wait(&mut world);
        }
    }

    /// The owner goes on after `time`; others have their turns meanwhile.
    ///
    /// # Panics
    /// With [`Crashed`] when the owner's machine crashes, or when the run has failed.
    pub fn pass(&self, owner: usize, time: Duration) {
        let mut world = self.world.lock();
        let sleep = world.sleeps(owner);
        world.wakes[owner] = Some(world.now + time + sleep);
        world.next_turn();
        if world.turn != Some(owner) {
            self.hand_over(&world);
            while world.turn != Some(owner) {
                self.changed[owner].wait(&mut world);
            }
        }
        let crashes = match &mut world.crash_in[owner] {
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        };
        if crashes {
            world.crash_in[owner] = None;
            world.note(|| format!("owner {owner} crashes"));
        }
        if crashes || world.violation.is_some() {
            drop(world);
            resume_unwind(Box::new(Crashed));
        }
    }

    /// The owner has ended.
    pub fn end(&self, owner: usize) {
        let mut world = self.world.lock();
        world.wakes[owner] = None;
        world.next_turn();
        self.hand_over(&world);
    }

    fn hand_over(&self, world: &World) {
        if let Some(next) = world.turn {
            self.changed[next].notify_one();
        }
    }
}
