//! The requests of one owner. Its one thread runs them when it waits, in any order.

use super::objects::Effect;
use super::turns::Turns;
use ferry_object::{Answer, Executor, Job};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Default)]
struct Queue {
    /// Each with the time before which it is not run.
    jobs: Vec<(Duration, Job)>,
    /// Of jobs that have run.
    answers: Vec<Answer>,
}

/// Runs an owner's jobs.
pub(super) struct SimExecutor {
    turns: Arc<Turns>,
    owner: usize,
    queue: Mutex<Queue>,
    /// What its jobs write goes to a local log first: it is not on its way to the store.
    has_log: AtomicBool,
}

impl SimExecutor {
    pub fn new(turns: &Arc<Turns>, owner: usize) -> Arc<Self> {
        Arc::new(Self {
            turns: Arc::clone(turns),
            owner,
            queue: Mutex::default(),
            has_log: AtomicBool::new(false),
        })
    }

    /// From now on a local log is in front of the store, or not.
    pub fn set_log(&self, has_log: bool) {
        self.has_log.store(has_log, Ordering::Relaxed);
    }

    /// The machine has crashed: what was on its way to the store may arrive, or not.
    pub fn crash(&self) {
        let queue = std::mem::take(&mut *self.queue.lock());
        let jobs = queue.jobs.into_iter().map(|(_, job)| (job.upload, job.run));
        let (uploads, runs): (Vec<_>, Vec<_>) = jobs.unzip();
        let mut world = self.turns.world();
        let arrive = !self.has_log.load(Ordering::Relaxed);
        for upload in uploads.into_iter().flatten().filter(|_| arrive) {
            let effect = match upload.exclusive {
                true => Effect::Create(upload.name, upload.bytes),
                false => Effect::Put(upload.name, upload.bytes),
            };
            if world.rng.below(2) == 0 {
                let late = match world.rng.below(4) {
                    0 => world.rng.below(7_200_000),
                    _ => world.rng.below(5_000),
                };
                world.happen_after(Duration::from_millis(late), effect);
            }
        }
        // What they hold may ask for the time when it is dropped.
        drop(world);
        drop((runs, queue.answers));
    }

    /// Runs one job, or passes one answer on; `false`: there is none.
    pub fn run_one(&self) -> bool {
        enum Next {
            Job(Job),
            Answer(Answer),
            Wait(Duration),
        }
        let next = {
            let mut queue = self.queue.lock();
            let mut world = self.turns.world();
            let due = |(_, (due, _)): &(usize, &(Duration, Job))| *due <= world.now;
            let due: Vec<usize> =
                queue.jobs.iter().enumerate().filter(due).map(|(n, _)| n).collect();
            let choices = due.len() + queue.answers.len();
            if choices > 0 {
                let choice = world.rng.index(choices);
                match due.get(choice) {
                    Some(at) => Next::Job(queue.jobs.swap_remove(*at).1),
                    None => Next::Answer(queue.answers.swap_remove(choice - due.len())),
                }
            } else {
                match queue.jobs.iter().map(|(due, _)| *due).min() {
                    Some(due) => Next::Wait(due - world.now),
                    None => return false,
                }
            }
        };
        match next {
            Next::Job(job) => {
                let answer = (job.run)();
                self.queue.lock().answers.push(answer);
            }
            Next::Answer(answer) => answer(),
            Next::Wait(time) => self.turns.pass(self.owner, time),
        }
        true
    }
}

impl Executor for SimExecutor {
    fn start(&self, job: Job) {
        let due = self.turns.world().now + job.after;
        self.queue.lock().jobs.push((due, job));
    }

    fn step(&self) -> bool {
        if !self.run_one() {
            let owner = self.owner;
            self.turns.world().fail(format!("owner {owner} waits, and nothing is under way"));
            self.turns.pass(owner, Duration::ZERO);
        }
        true
    }

    fn poke(&self) {
        // Other threads of the owner would go on now.
        let steps = {
            let mut world = self.turns.world();
            if world.rng.below(3) == 0 { world.rng.below(6) } else { 0 }
        };
        for _ in 0..steps {
            if !self.run_one() {
                break;
            }
        }
    }

    fn pause(&self, time: Duration) {
        self.turns.pass(self.owner, time);
    }
}
