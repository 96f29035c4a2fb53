//! A deterministic world: many threads and tasks, of which one runs at a time, on a virtual clock.
//!
//! There is one baton. The thread that has it runs; the others wait for it. A thread gives the
//! baton up when it waits (for a future, for a lock) or when the seed says so at a lock. Then the
//! seed picks who is next among all that are ready: a thread, a task to be polled, or a closure
//! for the blocking pool. Tasks and closures run on workers: threads that have nothing else to do.
//! Time stands still while anything is ready; then it jumps to the next deadline.
//!
//! What must stay true, else a seed does not reproduce: only the thread with the baton touches the
//! world; what is ready is ordered by number, not by arrival (tokio's `watch` wakes in random
//! order); no hash map with random keys decides an order; nobody asks for real time or real
//! randomness.

mod scheduler;
mod trace;

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ferry_env::planted::{Bug, plant_here};
use ferry_env::{Clock, Env};
use ferry_sim::device::{SimEntropy, SimRng};
use parking_lot::Mutex;

pub(super) use scheduler::Group;
use scheduler::{Baton, Ready, State, ThreadWaker, Waits, Work};
use trace::{Trace, What};

/// Where virtual time starts, and where wall-clock time starts: some day in 2023.
const START: Duration = Duration::from_secs(1000);
const WALL_START: Duration = Duration::from_secs(1_700_000_000);
/// A run that makes no progress for so long in real time waits for something that is not simulated.
const REAL_TIME_MAX: Duration = Duration::from_secs(60);

/// The world of one seed.
pub(crate) struct Sim {
    bug: Bug,
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
    /// The seed does not let others run at locks.
    is_undivided: bool,
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

/// Runs `body` and all that it starts in a world of its own, in which a bug is planted. After a
/// failure its threads stay as they are, and so does what they hold.
pub(crate) fn run(
    seed: u64,
    bug: Bug,
    whole_trace: bool,
    body: impl FnOnce(Env) + Send + 'static,
) -> Run {
    let mut state = State::new(SimRng::new(seed ^ 0x5eed), Trace::new(whole_trace));
    let entropy = Arc::new(SimEntropy::new(state.random.fork()));
    let (to, ended) = mpsc::channel();
    let sim = Arc::new(Sim { bug, state: Mutex::new(state), ended: Mutex::new(to) });
    let env = Env { clock: Arc::new(VirtualClock(Arc::clone(&sim))), entropy };
    let main = sim.new_thread();
    let world = Arc::clone(&sim);
    os_thread(sim.bug, move || {
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

fn os_thread(bug: Bug, body: impl FnOnce() + Send + 'static) {
    let builder = std::thread::Builder::new().name("simulated".into()).stack_size(2 << 20);
    let body = move || {
        let _planted = plant_here(bug);
        body();
    };
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
    os_thread(sim.bug, move || {
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
        if let Some(worker) = state.threads.remove(&me).and_then(|thread| thread.lent_as) {
            state.threads.remove(&worker);
        }
        if state.is_over {
            return;
        }
        let (state, parker) = self.idle_worker(state);
        drop(state);
        parker.give(Baton::Work(Work::Call(0, Box::new(|| {}))));
    }
}

/// Before a lock is taken: the seed may let others run first.
pub(super) fn at_lock() {
    if HERE.with(|here| here.borrow().is_none()) {
        return;
    }
    let Here { sim, thread, is_undivided, .. } = here().expect("there is one");
    if is_undivided {
        return;
    }
    let passed_over = {
        let mut state = sim.state.lock();
        let of = state.yields_of;
        !state.is_over && of > 0 && !state.ready.is_empty() && state.random.chance(1, of)
    };
    if passed_over && !std::thread::panicking() {
        sim.step_back(thread);
    }
}

/// Nobody else runs meanwhile.
pub(crate) fn undivided<T>(call: impl FnOnce() -> T) -> T {
    let set = |to| HERE.with(|here| here.borrow_mut().as_mut().map(|here| here.is_undivided = to));
    set(true);
    let value = call();
    set(false);
    value
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
