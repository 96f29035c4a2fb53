//! A deterministic world: many threads and tasks, of which one runs at a time, on a virtual clock.
//!
//! There is one baton. The thread that has it runs; the others wait for it. A thread gives the
//! baton up when it waits (for a future, for a lock) or when the seed says so at a lock. Then the
//! seed picks who is next among all that are ready: a thread, a task to be polled, or a closure
//! for the blocking pool. Tasks and closures run on workers: threads that have nothing else to do.
//! Time stands still while anything is ready; then it jumps to the next deadline.
//!
//! What must stay true, else a seed does not reproduce: whoever touches the world has the baton;
//! what is ready is ordered by number, not by arrival (tokio's `watch` wakes in random order); no
//! hash map with random keys decides an order; nobody asks for real time or real randomness.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ferry_env::{Clock, Env};
use ferry_sim::device::{SimEntropy, SimRng};
use parking_lot::{Condvar, Mutex};

/// Where virtual time starts, and where wall-clock time starts: some day in 2023.
const START: Duration = Duration::from_secs(1000);
const WALL_START: Duration = Duration::from_secs(1_700_000_000);
/// So many events are remembered for a report.
const LAST_EVENTS: usize = 400;
/// A run in which so much happens without the clock going on spins.
const STEPS_AT_ONCE_MAX: u64 = 3_000_000;
/// A run that makes no progress for so long in real time waits for something that is not simulated.
const REAL_TIME_MAX: Duration = Duration::from_secs(60);

pub(super) type Future = Pin<Box<dyn std::future::Future<Output = ()> + Send>>;
type Closure = Box<dyn FnOnce() + Send>;

/// Tasks and closures that end together: those of one runtime.
pub(super) type Group = u64;

enum Ready {
    Thread,
    Task,
    Closure(Group, Closure),
}

enum Work {
    Poll(u64, Group, Future),
    Call(Group, Closure),
}

/// What a thread that waits for the baton is given with it.
enum Baton {
    Resume,
    Work(Work),
    End,
}

#[derive(Default)]
struct Parker {
    baton: Mutex<Option<Baton>>,
    given: Condvar,
}

impl Parker {
    fn give(&self, baton: Baton) {
        *self.baton.lock() = Some(baton);
        self.given.notify_one();
    }

    fn wait(&self) -> Baton {
        let mut baton = self.baton.lock();
        loop {
            match baton.take() {
                Some(baton) => return baton,
                None => self.given.wait(&mut baton),
            }
        }
    }
}

#[derive(PartialEq)]
enum Waits {
    No,
    /// For its waker.
    Wake,
    Lock,
}

struct Thread {
    parker: Arc<Parker>,
    waits: Waits,
    /// Its waker was called while it did not wait for it.
    woken: bool,
}

struct Task {
    group: Group,
    /// `None` while it is polled.
    future: Option<Future>,
    /// It is among what is ready, or it is to be polled again at once.
    woken: bool,
}

/// What happened, in the order in which it happened.
struct Event {
    now: Duration,
    id: u64,
    what: What,
}

enum What {
    Resumes,
    Polled,
    Called,
    Note(String),
}

impl Event {
    fn write(&self, text: &mut String) {
        let Self { now, id, what } = self;
        let what = match what {
            What::Resumes => "resumes",
            What::Polled => "is polled",
            What::Called => "is called",
            What::Note(note) => note,
        };
        let _fits = writeln!(text, "{:>12} {id:>5} {what}", now.as_micros());
    }
}

/// What happened, or its end.
struct Trace {
    /// All of it is remembered, not only its end.
    whole: bool,
    events: VecDeque<Event>,
    count: u64,
    hash: u64,
}

impl Trace {
    fn add(&mut self, event: Event) {
        let kind = match &event.what {
            What::Resumes => 1,
            What::Polled => 2,
            What::Called => 3,
            What::Note(note) => note.bytes().fold(4, |hash, byte| mix(hash, u64::from(byte))),
        };
        self.hash = mix(mix(mix(self.hash, event.now.as_nanos() as u64), event.id), kind);
        self.count += 1;
        if !self.whole && self.events.len() == LAST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn text(&self) -> String {
        let mut text = String::new();
        self.events.iter().for_each(|event| event.write(&mut text));
        text
    }
}

fn mix(hash: u64, with: u64) -> u64 {
    (hash ^ with).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

struct State {
    now: Duration,
    random: SimRng,
    /// A thread is passed over at one of so many locks; 0: at none.
    yields_of: u64,
    next: u64,
    ready: BTreeMap<u64, Ready>,
    tasks: BTreeMap<u64, Task>,
    timers: BTreeMap<(Duration, u64), Waker>,
    threads: BTreeMap<u64, Thread>,
    idle: Vec<u64>,
    /// Threads that wait for the lock at an address.
    locks: BTreeMap<usize, Vec<u64>>,
    groups: Vec<Group>,
    trace: Trace,
    steps_at_once: u64,
    is_over: bool,
    panics: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn note(&mut self, id: u64, what: What) {
        let now = self.now;
        self.trace.add(Event { now, id, what });
    }

    /// Takes one of those that are ready, as the seed says.
    fn pick(&mut self) -> Option<(u64, Ready)> {
        let count = self.ready.len();
        let index = match count {
            0 => return None,
            1 => 0,
            _ => self.random.index(count),
        };
        let id = *self.ready.keys().nth(index).expect("there are so many");
        Some((id, self.ready.remove(&id).expect("it was found there")))
    }
}

/// The world of one seed.
pub(crate) struct Sim {
    state: Mutex<State>,
    ended: Mutex<mpsc::Sender<Result<(), String>>>,
}

/// Where a simulated thread is.
#[derive(Clone)]
struct Here {
    sim: Arc<Sim>,
    thread: u64,
    /// The runtime that it works for.
    group: Option<Group>,
}

thread_local! {
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

fn here() -> Option<Here> {
    HERE.with(|here| here.borrow().clone())
}

/// The world that the calling thread belongs to.
pub(crate) fn current() -> Option<Arc<Sim>> {
    HERE.with(|here| here.borrow().as_ref().map(|here| Arc::clone(&here.sim)))
}

/// The runtime that the calling thread works for.
pub(super) fn current_group() -> Option<(Arc<Sim>, Group)> {
    here().and_then(|here| Some((here.sim, here.group?)))
}

fn set_group(group: Option<Group>) -> Option<Group> {
    HERE.with(|here| {
        here.borrow_mut().as_mut().and_then(|here| std::mem::replace(&mut here.group, group))
    })
}

/// How a run was.
pub(crate) struct Run {
    /// Says whether two runs were the same.
    pub(crate) hash: u64,
    pub(crate) events: u64,
    /// The virtual time that it took.
    pub(crate) time: Duration,
    /// All events, if that was asked for; otherwise the last ones.
    pub(crate) trace: String,
    /// What was wrong.
    pub(crate) failure: Option<String>,
}

/// Runs `body` and all that it starts in a world of its own. After a failure its threads stay as
/// they are, and so does what they hold.
pub(crate) fn run(seed: u64, whole_trace: bool, body: impl FnOnce(Env) + Send + 'static) -> Run {
    let mut random = SimRng::new(seed ^ 0x5eed);
    let yields_of = [0, 4, 16, 64][random.index(4)];
    let entropy = Arc::new(SimEntropy::new(random.fork()));
    let (to, ended) = mpsc::channel();
    let trace = Trace { whole: whole_trace, events: VecDeque::new(), count: 0, hash: 0 };
    let sim = Arc::new(Sim {
        state: Mutex::new(State {
            now: START,
            random,
            yields_of,
            next: 0,
            ready: BTreeMap::new(),
            tasks: BTreeMap::new(),
            timers: BTreeMap::new(),
            threads: BTreeMap::new(),
            idle: Vec::new(),
            locks: BTreeMap::new(),
            groups: Vec::new(),
            trace,
            steps_at_once: 0,
            is_over: false,
            panics: 0,
        }),
        ended: Mutex::new(to),
    });
    let env = Env { clock: Arc::new(VirtualClock(Arc::clone(&sim))), entropy };
    let main = sim.new_thread();
    let world = Arc::clone(&sim);
    os_thread(move || {
        world.enter(main);
        let result = catch_unwind(AssertUnwindSafe(|| body(env)));
        let result = result.map_err(|panic| message(&*panic));
        world.end(result);
        HERE.with(|here| here.borrow_mut().take());
    });
    sim.parker(main).give(Baton::Resume);
    let mut events = 0;
    let result = loop {
        match ended.recv_timeout(REAL_TIME_MAX) {
            Ok(result) => break result,
            Err(_) => {
                let count = sim.state.lock().trace.count;
                if count == events {
                    break Err("it waits for what is not simulated".into());
                }
                events = count;
            }
        }
    };
    let state = sim.state.lock();
    let trace = &state.trace;
    let failure = match result {
        Err(failure) => Some(failure),
        Ok(()) if state.panics > 0 => Some("a task has panicked".into()),
        Ok(()) => None,
    };
    let text = if whole_trace || failure.is_some() { trace.text() } else { String::new() };
    let (hash, events, time) = (trace.hash, trace.count, state.now - START);
    Run { hash, events, time, trace: text, failure }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "it has panicked".into())
}

fn os_thread(body: impl FnOnce() + Send + 'static) {
    let builder = std::thread::Builder::new().name("simulated".into()).stack_size(2 << 20);
    drop(builder.spawn(body).expect("a thread can be started"));
}

struct VirtualClock(Arc<Sim>);

impl Clock for VirtualClock {
    fn monotonic(&self) -> Duration {
        self.0.now()
    }

    fn wall(&self) -> Duration {
        WALL_START + self.monotonic()
    }
}

/// Adds an event to the trace, if the calling thread is simulated.
pub(crate) fn note(what: impl FnOnce() -> String) {
    if let Some(here) = here() {
        let what = What::Note(what());
        here.sim.state.lock().note(here.thread, what);
    }
}

impl Sim {
    pub(super) fn now(&self) -> Duration {
        self.state.lock().now
    }

    fn new_thread(&self) -> u64 {
        let mut state = self.state.lock();
        let id = state.number();
        let thread = Thread { parker: Arc::default(), waits: Waits::No, woken: false };
        state.threads.insert(id, thread);
        id
    }

    fn parker(&self, thread: u64) -> Arc<Parker> {
        Arc::clone(&self.state.lock().threads[&thread].parker)
    }

    /// Becomes that thread, and waits for the baton.
    fn enter(self: &Arc<Self>, thread: u64) {
        let here = Here { sim: Arc::clone(self), thread, group: None };
        HERE.with(|cell| *cell.borrow_mut() = Some(here));
        self.parker(thread).wait();
    }

    /// The run is over. After a failure all stand still; otherwise what is left is dropped.
    fn end(self: &Arc<Self>, result: Result<(), String>) {
        let failed = result.is_err();
        let (tasks, ready, timers, idle) = {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.is_over, true) {
                return;
            }
            let idle: Vec<Arc<Parker>> = std::mem::take(&mut state.idle)
                .into_iter()
                .map(|id| Arc::clone(&state.threads[&id].parker))
                .collect();
            state.groups.clear();
            let state = &mut *state;
            let taken = (
                std::mem::take(&mut state.tasks),
                std::mem::take(&mut state.ready),
                std::mem::take(&mut state.timers),
            );
            (taken.0, taken.1, taken.2, idle)
        };
        idle.iter().for_each(|parker| parker.give(Baton::End));
        let _heard = self.ended.lock().send(result);
        let left = (tasks, ready, timers);
        if failed {
            // What they would do when they are dropped may wait for others.
            std::mem::forget(left);
        } else {
            drop(left);
        }
    }

    /// Gives the baton to somebody, and waits until it comes back.
    fn pass(self: &Arc<Self>, me: u64, is_idle: bool) -> Baton {
        loop {
            let mut state = self.state.lock();
            if state.is_over {
                return self.over(state, me, is_idle);
            }
            let Some((id, ready)) = state.pick() else {
                if let Err(failure) = self.advance(state) {
                    self.end(Err(failure));
                }
                continue;
            };
            state.steps_at_once += 1;
            if state.steps_at_once > STEPS_AT_ONCE_MAX {
                drop(state);
                self.end(Err("it spins: time does not go on".into()));
                continue;
            }
            let work = match ready {
                Ready::Thread => {
                    state.note(id, What::Resumes);
                    if id == me {
                        return Baton::Resume;
                    }
                    let next = Arc::clone(&state.threads[&id].parker);
                    return self.hand_over(state, me, is_idle, &next, Baton::Resume);
                }
                Ready::Task => {
                    let task = state.tasks.get_mut(&id).expect("it is ready");
                    task.woken = false;
                    let group = task.group;
                    let future = task.future.take().expect("nobody polls what is ready");
                    state.note(id, What::Polled);
                    Work::Poll(id, group, future)
                }
                Ready::Closure(group, closure) => {
                    state.note(id, What::Called);
                    Work::Call(group, closure)
                }
            };
            if is_idle {
                return Baton::Work(work);
            }
            let worker = match state.idle.pop() {
                Some(worker) => Arc::clone(&state.threads[&worker].parker),
                None => {
                    drop(state);
                    let worker = self.new_thread();
                    let sim = Arc::clone(self);
                    os_thread(move || sim.work(worker));
                    state = self.state.lock();
                    Arc::clone(&state.threads[&worker].parker)
                }
            };
            return self.hand_over(state, me, is_idle, &worker, Baton::Work(work));
        }
    }

    fn hand_over(
        &self,
        mut state: parking_lot::MutexGuard<'_, State>,
        me: u64,
        is_idle: bool,
        next: &Parker,
        baton: Baton,
    ) -> Baton {
        let mine = Arc::clone(&state.threads[&me].parker);
        if is_idle {
            state.idle.push(me);
        }
        drop(state);
        next.give(baton);
        mine.wait()
    }

    /// Nobody runs any more: workers end, and others stay where they are.
    fn over(&self, state: parking_lot::MutexGuard<'_, State>, me: u64, is_idle: bool) -> Baton {
        if is_idle {
            return Baton::End;
        }
        let mine = Arc::clone(&state.threads[&me].parker);
        drop(state);
        loop {
            drop(mine.wait());
        }
    }

    /// Nobody is ready: time goes on to the next deadline.
    fn advance(&self, mut state: parking_lot::MutexGuard<'_, State>) -> Result<(), String> {
        let Some(((deadline, _), _)) = state.timers.first_key_value() else {
            return Err("all wait, and nothing is to come".into());
        };
        let deadline = *deadline;
        state.now = state.now.max(deadline);
        state.steps_at_once = 0;
        let mut due = Vec::new();
        while let Some(entry) = state.timers.first_entry()
            && entry.key().0 <= deadline
        {
            due.push(entry.remove());
        }
        drop(state);
        due.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// A worker's life.
    fn work(self: &Arc<Self>, me: u64) {
        let here = Here { sim: Arc::clone(self), thread: me, group: None };
        HERE.with(|cell| *cell.borrow_mut() = Some(here));
        let mut baton = self.parker(me).wait();
        while let Baton::Work(work) = baton {
            match work {
                Work::Poll(id, group, future) => self.poll(id, group, future),
                Work::Call(group, closure) => {
                    set_group(Some(group));
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(closure)) {
                        self.panicked(me, &*panic);
                    }
                }
            }
            set_group(None);
            baton = self.pass(me, true);
        }
        HERE.with(|here| here.borrow_mut().take());
    }

    fn panicked(&self, id: u64, panic: &(dyn Any + Send)) {
        let mut state = self.state.lock();
        state.panics += 1;
        state.note(id, What::Note(format!("panics: {}", message(panic))));
    }

    fn poll(self: &Arc<Self>, id: u64, group: Group, mut future: Future) {
        set_group(Some(group));
        let waker = Waker::from(Arc::new(TaskWaker { sim: Arc::clone(self), id }));
        let mut context = Context::from_waker(&waker);
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context)));
        let mut state = self.state.lock();
        match polled {
            Ok(Poll::Pending) => {
                // Otherwise its runtime has ended meanwhile.
                if let Some(task) = state.tasks.get_mut(&id) {
                    task.future = Some(future);
                    if task.woken {
                        state.ready.insert(id, Ready::Task);
                    }
                    return;
                }
            }
            Ok(Poll::Ready(())) => drop(state.tasks.remove(&id)),
            Err(panic) => {
                state.tasks.remove(&id);
                drop(state);
                self.panicked(id, &*panic);
                return drop(future);
            }
        }
        drop(state);
        drop(future);
    }

    /// Lets `me` wait until its waker is called.
    fn wait(self: &Arc<Self>, me: u64) {
        {
            let mut state = self.state.lock();
            let thread = state.threads.get_mut(&me).expect("it runs");
            if std::mem::take(&mut thread.woken) {
                return;
            }
            thread.waits = Waits::Wake;
        }
        self.pass(me, false);
    }

    /// Others may run now.
    fn step_back(self: &Arc<Self>, me: u64) {
        self.state.lock().ready.insert(me, Ready::Thread);
        self.pass(me, false);
    }

    pub(super) fn new_group(&self) -> Group {
        let mut state = self.state.lock();
        let group = state.number();
        state.groups.push(group);
        group
    }

    /// Drops the tasks of a runtime, and the closures that have not begun.
    pub(super) fn end_group(&self, group: Group) {
        let mut state = self.state.lock();
        state.groups.retain(|other| *other != group);
        let tasks: Vec<u64> =
            state.tasks.iter().filter(|(_, task)| task.group == group).map(|(id, _)| *id).collect();
        let calls: Vec<u64> = state
            .ready
            .iter()
            .filter(|(_, ready)| matches!(ready, Ready::Closure(of, _) if *of == group))
            .map(|(id, _)| *id)
            .collect();
        let mut ended = Vec::new();
        for id in tasks.iter().chain(&calls) {
            ended.push((state.tasks.remove(id), state.ready.remove(id)));
        }
        drop(state);
        drop(ended);
    }

    pub(super) fn spawn(&self, group: Group, future: Future) -> u64 {
        let mut state = self.state.lock();
        let id = state.number();
        if state.groups.contains(&group) {
            state.tasks.insert(id, Task { group, future: Some(future), woken: true });
            state.ready.insert(id, Ready::Task);
        } else {
            drop(state);
            drop(future);
        }
        id
    }

    pub(super) fn call(&self, group: Group, closure: Closure) {
        let mut state = self.state.lock();
        let id = state.number();
        if state.groups.contains(&group) {
            state.ready.insert(id, Ready::Closure(group, closure));
        } else {
            drop(state);
            drop(closure);
        }
    }

    /// Ends one task.
    pub(super) fn abort(&self, id: u64) {
        let mut state = self.state.lock();
        let ended = (state.tasks.remove(&id), state.ready.remove(&id));
        drop(state);
        drop(ended);
    }

    pub(super) fn set_timer(&self, deadline: Duration, id: Option<u64>, waker: &Waker) -> u64 {
        let mut state = self.state.lock();
        let id = id.unwrap_or_else(|| state.number());
        let old = state.timers.insert((deadline, id), waker.clone());
        drop(state);
        drop(old);
        id
    }

    pub(super) fn remove_timer(&self, deadline: Duration, id: u64) {
        let old = self.state.lock().timers.remove(&(deadline, id));
        drop(old);
    }
}

struct TaskWaker {
    sim: Arc<Sim>,
    id: u64,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut state = self.sim.state.lock();
        let state = &mut *state;
        if let Some(task) = state.tasks.get_mut(&self.id)
            && !std::mem::replace(&mut task.woken, true)
            && task.future.is_some()
        {
            state.ready.insert(self.id, Ready::Task);
        }
    }
}

struct ThreadWaker {
    sim: Arc<Sim>,
    id: u64,
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        let mut state = self.sim.state.lock();
        let state = &mut *state;
        let Some(thread) = state.threads.get_mut(&self.id) else { return };
        if thread.waits == Waits::Wake {
            thread.waits = Waits::No;
            state.ready.insert(self.id, Ready::Thread);
        } else {
            thread.woken = true;
        }
    }
}

/// Drives the future on the calling thread, which is simulated; for that runtime, if any.
pub(super) fn block_on<T>(group: Option<Group>, future: impl std::future::Future<Output = T>) -> T {
    let Here { sim, thread, .. } = here().expect("a simulated thread");
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(ThreadWaker { sim: Arc::clone(&sim), id: thread }));
    let mut context = Context::from_waker(&waker);
    loop {
        let before = set_group(group);
        let polled = future.as_mut().poll(&mut context);
        set_group(before);
        if let Poll::Ready(value) = polled {
            return value;
        }
        sim.wait(thread);
    }
}

/// A simulated thread that was started.
pub(crate) struct Joined<T>(tokio::sync::oneshot::Receiver<T>);

impl<T> Joined<T> {
    /// Waits for its end. A thread that panics ends the run.
    pub(crate) fn join(self) -> T {
        block_on(None, self.0).expect("a thread that panics ends the run")
    }
}

/// Starts a simulated thread.
pub(crate) fn spawn_thread<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> Joined<T> {
    let sim = current().expect("a simulated thread");
    let (tell, told) = tokio::sync::oneshot::channel();
    let id = sim.new_thread();
    let world = Arc::clone(&sim);
    os_thread(move || {
        world.enter(id);
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(value) => drop(tell.send(value)),
            Err(panic) => world.end(Err(message(&*panic))),
        }
        world.leave(id);
        HERE.with(|here| here.borrow_mut().take());
    });
    sim.state.lock().ready.insert(id, Ready::Thread);
    Joined(told)
}

impl Sim {
    /// The thread ends, and passes the baton on for good: to a worker that looks for who is next.
    fn leave(self: &Arc<Self>, me: u64) {
        let mut state = self.state.lock();
        state.threads.remove(&me);
        if state.is_over {
            return;
        }
        let worker = match state.idle.pop() {
            Some(worker) => worker,
            None => {
                drop(state);
                let worker = self.new_thread();
                let sim = Arc::clone(self);
                os_thread(move || sim.work(worker));
                state = self.state.lock();
                worker
            }
        };
        let parker = Arc::clone(&state.threads[&worker].parker);
        drop(state);
        parker.give(Baton::Work(Work::Call(0, Box::new(|| {}))));
    }
}

/// Before a lock is taken: the seed may let others run first.
pub(super) fn at_lock() {
    if HERE.with(|here| here.borrow().is_none()) {
        return;
    }
    let Here { sim, thread, .. } = here().expect("there is one");
    let passed_over = {
        let mut state = sim.state.lock();
        let of = state.yields_of;
        !state.is_over && of > 0 && !state.ready.is_empty() && state.random.chance(1, of)
    };
    if passed_over && !std::thread::panicking() {
        sim.step_back(thread);
    }
}

/// Waits until the lock at that address is released; `false`: not a simulated thread.
pub(super) fn wait_for_lock(address: usize) -> bool {
    let Some(Here { sim, thread, .. }) = here() else { return false };
    {
        let mut state = sim.state.lock();
        state.locks.entry(address).or_default().push(thread);
        state.threads.get_mut(&thread).expect("it runs").waits = Waits::Lock;
    }
    sim.pass(thread, false);
    true
}

/// The lock at that address was released.
pub(super) fn released(address: usize) {
    let sim = HERE.try_with(|here| here.borrow().as_ref().map(|here| Arc::clone(&here.sim)));
    let Ok(Some(sim)) = sim else { return };
    let mut state = sim.state.lock();
    let state = &mut *state;
    for id in state.locks.remove(&address).unwrap_or_default() {
        if let Some(thread) = state.threads.get_mut(&id) {
            thread.waits = Waits::No;
            state.ready.insert(id, Ready::Thread);
        }
    }
}
