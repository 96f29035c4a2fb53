//! Log space in virtual time: more processors than this machine has, and what a spin lock costs.
//!
//! A discrete-event simulation of the load of the parent module. It assumes:
//!
//! * Processors take the threads that can run in the order in which they became able to. A thread
//!   keeps its processor until it sleeps, or until [`SLICE`] is over while others can run.
//! * One spin lock protects the wait queue. Who wants it while it is held spins on its processor;
//!   it is handed on in order of arrival, which takes [`TRANSFER`].
//! * Under the lock a release looks at the waiters that there is room for ([`VISIT`] each) and
//!   wakes them: [`WAKE`] for one that sleeps, [`WAKE_AGAIN`] for one that is awake already and has
//!   not run yet. A thread that queues up, or is woken and takes its space itself, needs the lock,
//!   too ([`ENTER`]).
//! * To begin with another thread takes a processor [`SWITCH`]. An operation computes for
//!   [`WORK`], half of it more or less. The tail moves [`TAIL`] after a quarter of the log is used.
//!
//! The times are those of a present server, rounded. With `all` a waiter is woken again by each
//! release until it runs. These calls are made under the lock, by the threads that hold log space:
//! the lock becomes the bottleneck, processors spin, and the waiters run even later.

use super::{Options, TAKES, USES};
use crate::run::{Case, Sample, Variant};
use crate::workload::numbers::Numbers;
use ferry_env::Entropy;
use ferry_journal::{BARGES_MAX, Wake};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Numbers of processors.
const PROCESSORS: [u32; 6] = [2, 4, 8, 16, 32, 64];
/// All times are in nanoseconds.
const TURN: u64 = 200_000_000;
const SLICE: u64 = 3_000_000;
const TRANSFER: u64 = 100;
const VISIT: u64 = 50;
const WAKE: u64 = 1_000;
const WAKE_AGAIN: u64 = 300;
const ENTER: u64 = 150;
const SWITCH: u64 = 1_500;
const TAKE: u64 = 50;
const WORK: u64 = 10_000;
const TAIL: u64 = 50_000;

/// A case for each number of processors.
pub fn cases(options: &Options, waiters: u32) -> impl Iterator<Item = Case<'static>> {
    PROCESSORS.into_iter().map(move |processors| {
        let variants = options.wake.iter().map(|wake| {
            let (wake, blocks) = (*wake, options.log_blocks());
            let turn = move |round: u32| {
                let mut world = World::new(wake, processors, waiters, blocks, round.into());
                world.run();
                Ok(world.sample())
            };
            Variant::new(wake.name(), turn)
        });
        let mut case = Case::new(
            format!("{waiters} waiters, {processors} processors, in virtual time"),
            variants.collect(),
        );
        case.group = format!("{waiters} waiters, in virtual time");
        (case.x, case.x_label) = (Some(f64::from(processors)), "processors");
        case.reference = super::reference(&options.wake);
        case
    })
}

/// What a thread does next, or is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Takes space without the lock, if it may.
    Take,
    /// Queues up, under the lock.
    Enter,
    /// Sleeps, or has been woken and does not run yet.
    Waits,
    /// Takes its space itself after it was woken, under the lock.
    TakeOwn,
    /// Computes, with space.
    Work,
    /// Serves waiters, under the lock.
    Pass,
}

struct Thread {
    step: Step,
    /// It was woken and has not run since.
    awake: bool,
    /// It was woken with its space in hand.
    granted: bool,
    waits_since: u64,
    runs_since: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A thread has done its step.
    Done(usize),
    /// The tail can move.
    Tail,
}

/// The lock of the wait queue.
#[derive(Default)]
struct Lock {
    held: bool,
    spinning: VecDeque<usize>,
    /// Whom the holder wakes, once it is done.
    woken: Vec<usize>,
}

#[derive(Default)]
struct Counts {
    operations: u64,
    waits: u64,
    wakes: u64,
    grants: u64,
    barges: u64,
    switches: u64,
    longest_wait: u64,
    /// Time of processors that do something, and of those that hold the lock or spin.
    busy: u64,
    locked: u64,
}

struct World {
    wake: Wake,
    crowd: u64,
    now: u64,
    planned: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    threads: Vec<Thread>,
    /// The thread that moves the tail is the last one.
    tail: usize,
    idle: u32,
    processors: u32,
    ready: VecDeque<usize>,
    lock: Lock,
    free: u64,
    used: u64,
    quarter: u64,
    released: u64,
    queue: VecDeque<usize>,
    operations: u64,
    barges_left: u64,
    random: Numbers,
    counts: Counts,
}

impl World {
    fn new(wake: Wake, processors: u32, waiters: u32, blocks: u64, seed: u64) -> Self {
        let thread = || Thread {
            step: Step::Take,
            awake: false,
            granted: false,
            waits_since: 0,
            runs_since: 0,
        };
        let mut threads: Vec<_> = (0..=waiters).map(|_| thread()).collect();
        let tail = waiters as usize;
        threads[tail].step = Step::Waits;
        Self {
            wake,
            crowd: processors.into(),
            now: 0,
            planned: 0,
            events: BinaryHeap::new(),
            threads,
            tail,
            idle: processors,
            processors,
            ready: (0..tail).collect(),
            lock: Lock::default(),
            free: blocks,
            used: 0,
            quarter: blocks / 4,
            released: 0,
            queue: VecDeque::new(),
            operations: 0,
            barges_left: 0,
            random: Numbers::new(seed),
            counts: Counts::default(),
        }
    }

    fn run(&mut self) {
        self.dispatch();
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            let time = at - self.now;
            self.counts.busy += time * u64::from(self.processors - self.idle);
            let locked = self.lock.spinning.len() as u64 + u64::from(self.lock.held);
            self.counts.locked += time * locked;
            self.now = at;
            if at >= TURN {
                return;
            }
            match event {
                Event::Tail => {
                    self.released += std::mem::take(&mut self.used);
                    if self.is_asleep(self.tail) {
                        self.make_ready(self.tail);
                    }
                }
                Event::Done(thread) => self.done(thread),
            }
            self.dispatch();
        }
        unreachable!("threads sleep for ever in {:?}", self.wake);
    }

    fn plan(&mut self, after: u64, event: Event) {
        self.planned += 1;
        self.events.push(Reverse((self.now + after, self.planned, event)));
    }

    /// Idle processors take threads that can run.
    fn dispatch(&mut self) {
        while self.idle > 0 {
            let Some(thread) = self.ready.pop_front() else { return };
            self.idle -= 1;
            self.counts.switches += 1;
            self.threads[thread].runs_since = self.now + SWITCH;
            self.plan(SWITCH, Event::Done(thread));
        }
    }

    fn make_ready(&mut self, thread: usize) {
        self.threads[thread].awake = true;
        self.ready.push_back(thread);
    }

    fn is_asleep(&self, thread: usize) -> bool {
        self.threads[thread].step == Step::Waits && !self.threads[thread].awake
    }

    fn sleep(&mut self, thread: usize) {
        self.threads[thread].step = Step::Waits;
        self.idle += 1;
    }

    fn done(&mut self, thread: usize) {
        let step = self.threads[thread].step;
        match step {
            Step::Take if self.takes() => self.work(thread),
            Step::Take => self.acquire(thread, Step::Enter),
            Step::Waits => self.wakes_up(thread),
            Step::Work => self.end(thread),
            Step::Enter | Step::TakeOwn | Step::Pass => self.unlock(thread),
        }
    }

    /// Takes space without the lock.
    fn takes(&mut self) -> bool {
        let barges = !self.queue.is_empty();
        if self.free < TAKES || barges && self.barges_left == 0 {
            return false;
        }
        if barges {
            self.barges_left -= 1;
            self.counts.barges += 1;
        }
        self.free -= TAKES;
        self.operations += 1;
        true
    }

    fn work(&mut self, thread: usize) {
        self.threads[thread].step = Step::Work;
        let time = WORK / 2 + self.random.next_u64() % WORK;
        self.plan(time, Event::Done(thread));
    }

    /// An operation ends.
    fn end(&mut self, thread: usize) {
        self.counts.operations += 1;
        self.operations -= 1;
        self.free += TAKES - USES;
        self.used += USES;
        if self.used == self.quarter {
            self.plan(TAIL, Event::Tail);
        }
        self.after_release(thread);
    }

    fn after_release(&mut self, thread: usize) {
        if !self.queue.is_empty() && self.free >= TAKES && !self.leaves() {
            self.acquire(thread, Step::Pass);
        } else {
            self.go_on(thread);
        }
    }

    fn leaves(&self) -> bool {
        self.barges_left > 0 && self.operations >= self.crowd
    }

    /// The thread begins its next operation, or lets another one run.
    fn go_on(&mut self, thread: usize) {
        if thread == self.tail {
            return self.move_tail();
        }
        self.threads[thread].step = Step::Take;
        if self.now - self.threads[thread].runs_since >= SLICE && !self.ready.is_empty() {
            self.idle += 1;
            self.ready.push_back(thread);
        } else {
            self.plan(TAKE, Event::Done(thread));
        }
    }

    fn wakes_up(&mut self, thread: usize) {
        self.threads[thread].awake = false;
        if thread == self.tail {
            self.move_tail();
        } else if std::mem::take(&mut self.threads[thread].granted) {
            self.waited(thread);
            self.work(thread);
        } else {
            self.acquire(thread, Step::TakeOwn);
        }
    }

    fn move_tail(&mut self) {
        match std::mem::take(&mut self.released) {
            0 => self.sleep(self.tail),
            released => {
                self.free += released;
                self.after_release(self.tail);
            }
        }
    }

    fn waited(&mut self, thread: usize) {
        let time = self.now - self.threads[thread].waits_since;
        self.counts.longest_wait = self.counts.longest_wait.max(time);
    }

    /// Does `step` under the lock, or spins.
    fn acquire(&mut self, thread: usize, step: Step) {
        self.threads[thread].step = step;
        if self.lock.held {
            self.lock.spinning.push_back(thread);
        } else {
            self.lock.held = true;
            self.hold(thread);
        }
    }

    /// What the holder of the lock does, and how long that takes.
    fn hold(&mut self, thread: usize) {
        let time = match self.threads[thread].step {
            Step::Enter => {
                self.counts.waits += 1;
                self.threads[thread].waits_since = self.now;
                if self.queue.is_empty() {
                    self.renew_barges();
                }
                self.queue.push_back(thread);
                ENTER + self.serve()
            }
            Step::TakeOwn => ENTER + self.take_own(thread),
            _ => self.serve(),
        };
        self.plan(TRANSFER + time, Event::Done(thread));
    }

    fn renew_barges(&mut self) {
        self.barges_left = if self.wake == Wake::Barging { BARGES_MAX } else { 0 };
    }

    /// Serves or wakes waiters; the time that takes.
    fn serve(&mut self) -> u64 {
        let mut time = 0;
        if self.wake.grants() {
            while self.free >= TAKES && !self.leaves() {
                let Some(first) = self.queue.pop_front() else { break };
                self.free -= TAKES;
                self.operations += 1;
                self.counts.grants += 1;
                self.counts.wakes += 1;
                self.threads[first].granted = true;
                self.lock.woken.push(first);
                self.renew_barges();
                time += VISIT + WAKE;
            }
            return time;
        }
        let room = (self.free / TAKES) as usize;
        for waiter in self.queue.iter().copied().take(room) {
            time += VISIT;
            let state = &mut self.threads[waiter];
            if state.awake && self.wake == Wake::Flag {
                continue;
            }
            self.counts.wakes += 1;
            if state.step == Step::Waits && !state.awake {
                self.lock.woken.push(waiter);
                time += WAKE;
            } else {
                time += WAKE_AGAIN;
            }
            state.awake = true;
        }
        time
    }

    /// A woken thread takes its space if there is enough for those before it, too.
    fn take_own(&mut self, thread: usize) -> u64 {
        let before = self.queue.iter().position(|waiter| *waiter == thread);
        let before = before.expect("it waits until it has its space");
        if self.free >= (before as u64 + 1) * TAKES {
            self.queue.remove(before);
            self.free -= TAKES;
            self.operations += 1;
            self.counts.grants += 1;
            self.threads[thread].granted = true;
        }
        VISIT * before as u64
    }

    fn unlock(&mut self, thread: usize) {
        for woken in std::mem::take(&mut self.lock.woken) {
            // The thread itself may be among them: it does not sleep then.
            if woken != thread {
                self.make_ready(woken);
            }
        }
        let state = &mut self.threads[thread];
        match state.step {
            Step::Enter | Step::TakeOwn if state.granted => {
                state.granted = false;
                self.waited(thread);
                self.work(thread);
            }
            Step::Enter | Step::TakeOwn if std::mem::take(&mut state.awake) => {
                self.acquire(thread, Step::TakeOwn);
            }
            Step::Enter | Step::TakeOwn => self.sleep(thread),
            _ => self.go_on(thread),
        }
        match self.lock.spinning.pop_front() {
            Some(next) => self.hold(next),
            None => self.lock.held = false,
        }
    }

    fn sample(&self) -> Sample {
        let counts = &self.counts;
        let (operations, time) = (counts.operations as f64, self.now as f64);
        let mut sample = Sample::from([
            ("ops_per_s", operations / time * 1e9),
            ("cpu_us_per_op", counts.busy as f64 / 1e3 / operations),
            ("switches_per_op", counts.switches as f64 / operations),
            ("longest_wait_ms", counts.longest_wait as f64 / 1e6),
            ("waits_per_op", counts.waits as f64 / operations),
            ("barges_per_op", counts.barges as f64 / operations),
            ("lock_percent", 100.0 * counts.locked as f64 / counts.busy as f64),
        ]);
        if counts.grants > 0 {
            sample.insert("wakes_per_grant", counts.wakes as f64 / counts.grants as f64);
        }
        sample
    }
}
