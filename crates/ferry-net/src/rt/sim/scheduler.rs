//! Who runs next: the baton, threads, tasks, closures and timers of one world.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ferry_sim::device::SimRng;
use parking_lot::{Condvar, Mutex};

use super::trace::{Event, Trace, What};
use super::{HERE, Here, START, Sim, message, os_thread, set_group};

/// A run in which so much happens without the clock going on spins.
const STEPS_AT_ONCE_MAX: u64 = 3_000_000;

pub(in crate::rt) type Future = Pin<Box<dyn std::future::Future<Output = ()> + Send>>;
pub(super) type Closure = Box<dyn FnOnce() + Send>;

/// Tasks and closures that end together: those of one runtime.
pub(in crate::rt) type Group = u64;

pub(super) enum Ready {
    Thread,
    Task,
    Closure(Group, Closure),
}

pub(super) enum Work {
    Poll(u64, Group, Future),
    Call(Group, Closure),
}

/// What a thread that waits for the baton is given with it.
pub(super) enum Baton {
    Resume,
    Work(Work),
    End,
}

#[derive(Default)]
pub(super) struct Parker {
    baton: Mutex<Option<Baton>>,
    given: Condvar,
}

impl Parker {
    pub(super) fn give(&self, baton: Baton) {
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

#[derive(Default, PartialEq)]
pub(super) enum Waits {
    #[default]
    No,
    /// For its waker, and its thread works meanwhile.
    Lent,
    /// For its waker.
    Wake,
    Lock,
}

#[derive(Default)]
pub(super) struct Thread {
    pub(super) parker: Arc<Parker>,
    pub(super) waits: Waits,
    /// Its waker was called while it did not wait for it.
    woken: bool,
    /// The worker that it is while it waits.
    pub(super) lent_as: Option<u64>,
}

pub(super) struct Task {
    group: Group,
    /// `None` while it is polled.
    future: Option<Future>,
    /// It is among what is ready, or it is to be polled again at once.
    woken: bool,
}

pub(super) struct State {
    pub(super) now: Duration,
    pub(super) random: SimRng,
    /// A thread is passed over at one of so many locks; 0: at none.
    pub(super) yields_of: u64,
    /// A thread that waits for its waker does the work of others meanwhile: that saves changing
    /// threads. It goes on when that work has come to its end, so fewer orders are possible.
    lends_threads: bool,
    next: u64,
    pub(super) ready: BTreeMap<u64, Ready>,
    tasks: BTreeMap<u64, Task>,
    timers: BTreeMap<(Duration, u64), Waker>,
    pub(super) threads: BTreeMap<u64, Thread>,
    pub(super) idle: Vec<u64>,
    /// Threads that wait for the lock at an address.
    pub(super) locks: BTreeMap<usize, Vec<u64>>,
    groups: Vec<Group>,
    pub(super) trace: Trace,
    steps_at_once: u64,
    pub(super) is_over: bool,
    pub(super) panics: u64,
}

impl State {
    /// A world in which nothing has happened yet.
    pub(super) fn new(mut random: SimRng, trace: Trace) -> Self {
        let yields_of = [0, 4, 16, 64][random.index(4)];
        let lends_threads = random.chance(3, 4);
        Self {
            now: START,
            random,
            yields_of,
            lends_threads,
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
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn note(&mut self, id: u64, what: What) {
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

impl Sim {
    pub(in crate::rt) fn now(&self) -> Duration {
        self.state.lock().now
    }

    pub(super) fn new_thread(&self) -> u64 {
        let mut state = self.state.lock();
        let id = state.number();
        state.threads.insert(id, Thread::default());
        id
    }

    /// The parker of a worker that has nothing to do: one is started if there is none.
    /// The lock is given up meanwhile.
    pub(super) fn idle_worker<'s>(
        self: &'s Arc<Self>,
        mut state: parking_lot::MutexGuard<'s, State>,
    ) -> (parking_lot::MutexGuard<'s, State>, Arc<Parker>) {
        let worker = match state.idle.pop() {
            Some(worker) => worker,
            None => {
                drop(state);
                let worker = self.new_thread();
                let sim = Arc::clone(self);
                os_thread(self.bug, move || sim.work(worker));
                state = self.state.lock();
                worker
            }
        };
        let parker = Arc::clone(&state.threads[&worker].parker);
        (state, parker)
    }

    pub(super) fn parker(&self, thread: u64) -> Arc<Parker> {
        Arc::clone(&self.state.lock().threads[&thread].parker)
    }

    /// Becomes that thread, and waits for the baton.
    pub(super) fn enter(self: &Arc<Self>, thread: u64) {
        let here = Here { sim: Arc::clone(self), thread, group: None, is_undivided: false };
        HERE.with(|cell| *cell.borrow_mut() = Some(here));
        self.parker(thread).wait();
    }

    /// The run is over. After a failure all stand still; otherwise what is left is dropped.
    pub(super) fn end(self: &Arc<Self>, result: Result<(), String>) {
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
    pub(super) fn pass(self: &Arc<Self>, me: u64, is_idle: bool) -> Baton {
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
            if state.lends_threads && state.threads[&me].waits == Waits::Wake {
                self.lend(state, me, work);
                continue;
            }
            let worker;
            (state, worker) = self.idle_worker(state);
            return self.hand_over(state, me, is_idle, &worker, Baton::Work(work));
        }
    }

    /// Does the work on the thread that waits.
    fn lend(self: &Arc<Self>, mut state: parking_lot::MutexGuard<'_, State>, me: u64, work: Work) {
        let worker = match state.threads[&me].lent_as {
            Some(worker) => worker,
            None => {
                let worker = state.number();
                state.threads.insert(worker, Thread::default());
                worker
            }
        };
        let lender = state.threads.get_mut(&me).expect("it waits");
        (lender.lent_as, lender.waits) = (Some(worker), Waits::Lent);
        drop(state);
        let before = HERE.with(|here| {
            let mut here = here.borrow_mut();
            let here = here.as_mut().expect("a simulated thread");
            here.thread = worker;
            std::mem::take(&mut here.is_undivided)
        });
        self.run(worker, work);
        HERE.with(|here| {
            let mut here = here.borrow_mut();
            let here = here.as_mut().expect("a simulated thread");
            (here.thread, here.is_undivided) = (me, before);
        });
        let mut state = self.state.lock();
        let lender = state.threads.get_mut(&me).expect("it waits");
        if std::mem::take(&mut lender.woken) {
            lender.waits = Waits::No;
            state.ready.insert(me, Ready::Thread);
        } else {
            lender.waits = Waits::Wake;
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
    pub(super) fn work(self: &Arc<Self>, me: u64) {
        let here = Here { sim: Arc::clone(self), thread: me, group: None, is_undivided: false };
        HERE.with(|cell| *cell.borrow_mut() = Some(here));
        let mut baton = self.parker(me).wait();
        while let Baton::Work(work) = baton {
            self.run(me, work);
            baton = self.pass(me, true);
        }
        HERE.with(|here| here.borrow_mut().take());
    }

    fn run(self: &Arc<Self>, me: u64, work: Work) {
        let before = set_group(None);
        match work {
            Work::Poll(id, group, future) => self.poll(id, group, future),
            Work::Call(group, closure) => {
                set_group(Some(group));
                if let Err(panic) = catch_unwind(AssertUnwindSafe(closure)) {
                    self.panicked(me, &*panic);
                }
            }
        }
        set_group(before);
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
    pub(super) fn wait(self: &Arc<Self>, me: u64) {
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
    pub(super) fn step_back(self: &Arc<Self>, me: u64) {
        self.state.lock().ready.insert(me, Ready::Thread);
        self.pass(me, false);
    }

    pub(in crate::rt) fn new_group(&self) -> Group {
        let mut state = self.state.lock();
        let group = state.number();
        state.groups.push(group);
        group
    }

    /// Drops the tasks of a runtime, and the closures that have not begun.
    pub(in crate::rt) fn end_group(&self, group: Group) {
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

    pub(in crate::rt) fn spawn(&self, group: Group, future: Future) -> u64 {
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

    pub(in crate::rt) fn call(&self, group: Group, closure: Closure) {
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
    pub(in crate::rt) fn abort(&self, id: u64) {
        let mut state = self.state.lock();
        let ended = (state.tasks.remove(&id), state.ready.remove(&id));
        drop(state);
        drop(ended);
    }

    pub(in crate::rt) fn set_timer(
        &self,
        deadline: Duration,
        id: Option<u64>,
        waker: &Waker,
    ) -> u64 {
        let mut state = self.state.lock();
        let id = id.unwrap_or_else(|| state.number());
        let old = state.timers.insert((deadline, id), waker.clone());
        drop(state);
        drop(old);
        id
    }

    pub(in crate::rt) fn remove_timer(&self, deadline: Duration, id: u64) {
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

pub(super) struct ThreadWaker {
    pub(super) sim: Arc<Sim>,
    pub(super) id: u64,
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
