//! [`Executor`]: what runs a device's requests to the store beside its callers.

use ferry_env::activity::{self, Operation};
use ferry_env::{Clock, Env};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// An object that a job writes.
#[derive(Clone, Debug)]
pub struct Upload {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: Arc<Vec<u8>>,
    /// It is created, and not put.
    pub exclusive: bool,
}

/// Tells the device how a job ended.
pub type Answer = Box<dyn FnOnce() + Send>;

/// Something that may wait for the store.
pub struct Job {
    /// What it writes, if it does.
    pub upload: Option<Upload>,
    /// It is not run before so much time has passed.
    pub after: Duration,
    /// Runs it. What it returns must be called once, then or later.
    pub run: Box<dyn FnOnce() -> Answer + Send>,
}

/// Runs the jobs of a device. A device calls it with no lock held.
pub trait Executor: Send + Sync {
    /// Runs a job, soon, in any order and beside others. It does not wait for it.
    fn start(&self, job: Job);
    /// A thread waits for jobs to end. `false`: others run them, so that it may block. `true`: it
    /// ran a part of them, and has to look again.
    fn step(&self) -> bool;
    /// The device was given something.
    fn poke(&self) {}
    /// Returns after this time.
    fn pause(&self, time: Duration);
}

/// Threads that run jobs, the oldest first.
pub struct ThreadExecutor {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// For threads that pause: they must not take the wake-up of one that would run a job.
    stopped: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Each with the time before which it is not run.
    jobs: VecDeque<(Duration, Job)>,
    stop: bool,
}

/// Requests to a store that are under way together, at most.
const THREADS: usize = 16;

impl ThreadExecutor {
    /// Starts the threads.
    pub fn new(env: &Env) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            clock: Arc::clone(&env.clock),
            queue: Mutex::default(),
            changed: Condvar::new(),
            stopped: Condvar::new(),
        });
        let mut executor = Self { shared, threads: Vec::new() };
        for n in 0..THREADS {
            let shared = Arc::clone(&executor.shared);
            let thread = std::thread::Builder::new().name(format!("ferry-store-{n}"));
            executor.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(executor)
    }
}

impl Shared {
    fn work(&self) {
        let mut queue = self.queue.lock();
        while !queue.stop {
            let now = self.clock.monotonic();
            if let Some(at) = queue.jobs.iter().position(|(due, _)| *due <= now) {
                let Some((_, job)) = queue.jobs.remove(at) else { continue };
                drop(queue);
                let doing = activity::begin(Operation::Store);
                (job.run)()();
                drop(doing);
                queue = self.queue.lock();
                continue;
            }
            match queue.jobs.iter().map(|(due, _)| *due).min() {
                Some(due) => drop(self.changed.wait_for(&mut queue, due - now)),
                None => self.changed.wait(&mut queue),
            }
        }
    }
}

impl Executor for ThreadExecutor {
    fn start(&self, job: Job) {
        let due = match job.after {
            Duration::ZERO => Duration::ZERO,
            after => self.shared.clock.monotonic() + after,
        };
        self.shared.queue.lock().jobs.push_back((due, job));
        self.shared.changed.notify_one();
    }

    fn step(&self) -> bool {
        false
    }

    fn pause(&self, time: Duration) {
        let end = self.shared.clock.monotonic() + time;
        let mut queue = self.shared.queue.lock();
        while !queue.stop {
            let left = end.saturating_sub(self.shared.clock.monotonic());
            if left.is_zero() {
                break;
            }
            self.shared.stopped.wait_for(&mut queue, left);
        }
    }
}

impl Drop for ThreadExecutor {
    fn drop(&mut self) {
        self.shared.queue.lock().stop = true;
        self.shared.changed.notify_all();
        self.shared.stopped.notify_all();
        for thread in self.threads.drain(..) {
            // A job may hold the last reference to the device, and so to this.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a thread that talks to the store panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_job_is_run_however_many_threads_pause() {
        let executor = Arc::new(ThreadExecutor::new(&Env::real()).expect("threads can be started"));
        let pausing = Arc::clone(&executor);
        let (begun, has_begun) = mpsc::channel();
        let pauses = std::thread::spawn(move || {
            begun.send(()).expect("the test waits");
            pausing.pause(Duration::from_secs(3600));
        });
        has_begun.recv().expect("it pauses");
        // Waiters are woken in turn, so each of them is asked more than once.
        for _ in 0..20 * THREADS {
            let (ran, has_run) = mpsc::channel();
            let run = move || -> Answer {
                ran.send(()).expect("the test waits");
                Box::new(|| ())
            };
            executor.start(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
            has_run.recv_timeout(Duration::from_secs(20)).expect("the job is run");
        }
        executor.shared.queue.lock().stop = true;
        executor.shared.stopped.notify_all();
        pauses.join().expect("it ends");
    }
}
