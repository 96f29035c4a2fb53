//! The types of [`super`] for this crate's tests: simulated on a thread of a simulation, and
//! tokio's, parking_lot's and std's own everywhere else.

use std::future::Future;
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use super::sim::{self, Sim};

pub(crate) use task::spawn;

/// An invariant is broken: the test fails.
pub(crate) fn broken(what: &str) {
    // The run of a simulation fails if one of its tasks panics.
    assert!(sim::current().is_none(), "{what}");
    // tokio would catch the panic, and the test would go on.
    let _written = std::io::stderr().write_all(format!("{what}\n").as_bytes());
    std::process::abort();
}

/// As tokio's, but the branches are polled in order: tokio draws a random one to begin with.
macro_rules! select {
    ($($branches:tt)*) => { tokio::select! { biased; $($branches)* } };
}
pub(crate) use select;

/// Counts who waits for one lock.
#[derive(Debug, Default)]
struct Contended(AtomicBool);

impl Contended {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Takes the lock: in a simulation the seed says when, and elsewhere it waits.
    fn take<G>(&self, now: impl Fn() -> Option<G>, later: impl FnOnce() -> G) -> G {
        sim::at_lock();
        loop {
            if let Some(guard) = now() {
                return guard;
            }
            if sim::current().is_none() {
                return later();
            }
            self.0.store(true, Ordering::SeqCst);
            sim::wait_for_lock(self.address());
        }
    }

    fn released(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            sim::released(self.address());
        }
    }
}

macro_rules! guard {
    ($name:ident $(, $mutable:ident)?) => {
        /// Tells those that wait for the lock when it is released.
        pub(crate) struct $name<'l, T>(Option<parking_lot::$name<'l, T>>, &'l Contended);

        impl<T> Deref for $name<'_, T> {
            type Target = T;
            fn deref(&self) -> &T {
                self.0.as_ref().expect("it is held")
            }
        }

        $(impl<T> $mutable for $name<'_, T> {
            fn deref_mut(&mut self) -> &mut T {
                self.0.as_mut().expect("it is held")
            }
        })?

        impl<T> Drop for $name<'_, T> {
            fn drop(&mut self) {
                drop(self.0.take());
                self.1.released();
            }
        }
    };
}

guard!(MutexGuard, DerefMut);
guard!(RwLockReadGuard);
guard!(RwLockWriteGuard, DerefMut);

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>, Contended);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value), Contended::default())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.1.take(|| self.0.try_lock(), || self.0.lock());
        MutexGuard(Some(guard), &self.1)
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(parking_lot::RwLock<T>, Contended);

impl<T> RwLock<T> {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        let guard = self.1.take(|| self.0.try_read(), || self.0.read());
        RwLockReadGuard(Some(guard), &self.1)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        let guard = self.1.take(|| self.0.try_write(), || self.0.write());
        RwLockWriteGuard(Some(guard), &self.1)
    }
}

pub(crate) mod collections {
    pub(crate) use std::collections::*;
    use std::hash::{BuildHasherDefault, DefaultHasher};

    /// Without random keys: what comes first in a map must not differ from run to run.
    type Hashing = BuildHasherDefault<DefaultHasher>;
    pub(crate) type HashMap<K, V> = std::collections::HashMap<K, V, Hashing>;
    pub(crate) type HashSet<T> = std::collections::HashSet<T, Hashing>;
}

pub(crate) mod task {
    use std::pin::Pin;
    use std::task::{Context, Poll, ready};

    use super::*;

    /// The task has panicked, or was ended.
    #[derive(Debug)]
    pub(crate) struct JoinError;

    pub(crate) enum JoinHandle<T> {
        Real(tokio::task::JoinHandle<T>),
        Simulated(std::sync::Arc<Sim>, u64, tokio::sync::oneshot::Receiver<T>),
    }

    impl<T> JoinHandle<T> {
        pub(crate) fn abort(&self) {
            match self {
                Self::Real(task) => task.abort(),
                Self::Simulated(sim, id, _) => sim.abort(*id),
            }
        }
    }

    impl<T> Future for JoinHandle<T> {
        type Output = Result<T, JoinError>;
        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            Poll::Ready(match &mut *self {
                Self::Real(task) => ready!(Pin::new(task).poll(context)).map_err(|_| JoinError),
                Self::Simulated(_, _, told) => {
                    ready!(Pin::new(told).poll(context)).map_err(|_| JoinError)
                }
            })
        }
    }

    pub(crate) fn spawn<F>(future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        runtime::Handle::current().spawn(future)
    }

    pub(crate) fn spawn_blocking<T: Send + 'static>(
        closure: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        runtime::Handle::current().spawn_blocking(closure)
    }

    /// Others may run.
    pub(crate) async fn yield_now() {
        if sim::current().is_none() {
            return tokio::task::yield_now().await;
        }
        let mut has_yielded = false;
        std::future::poll_fn(|context| {
            if std::mem::replace(&mut has_yielded, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}

pub(crate) mod runtime {
    use std::io;
    use std::sync::Arc;

    use super::task::JoinHandle;
    use super::*;

    #[derive(Clone)]
    pub(crate) enum Handle {
        Real(tokio::runtime::Handle),
        Simulated(Arc<Sim>, u64),
    }

    impl Handle {
        pub(crate) fn current() -> Self {
            match sim::current_group() {
                Some((sim, group)) => Self::Simulated(sim, group),
                None => Self::Real(tokio::runtime::Handle::current()),
            }
        }

        pub(crate) fn try_current() -> Result<Self, ()> {
            match (sim::current_group(), sim::current()) {
                (Some((sim, group)), _) => Ok(Self::Simulated(sim, group)),
                (None, Some(_)) => Err(()),
                (None, None) => tokio::runtime::Handle::try_current().map(Self::Real).map_err(drop),
            }
        }

        pub(crate) fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
        where
            F: Future<Output: Send> + Send + 'static,
        {
            match self {
                Self::Real(handle) => JoinHandle::Real(handle.spawn(future)),
                Self::Simulated(sim, group) => {
                    let (tell, told) = tokio::sync::oneshot::channel();
                    let task = Box::pin(async move { drop(tell.send(future.await)) });
                    JoinHandle::Simulated(Arc::clone(sim), sim.spawn(*group, task), told)
                }
            }
        }

        pub(crate) fn spawn_blocking<T: Send + 'static>(
            &self,
            closure: impl FnOnce() -> T + Send + 'static,
        ) -> JoinHandle<T> {
            match self {
                Self::Real(handle) => JoinHandle::Real(handle.spawn_blocking(closure)),
                Self::Simulated(sim, group) => {
                    let (tell, told) = tokio::sync::oneshot::channel();
                    sim.call(*group, Box::new(move || drop(tell.send(closure()))));
                    JoinHandle::Simulated(Arc::clone(sim), 0, told)
                }
            }
        }
    }

    pub(crate) struct Runtime {
        handle: Handle,
        real: Option<tokio::runtime::Runtime>,
    }

    impl Runtime {
        pub(crate) fn handle(&self) -> &Handle {
            &self.handle
        }

        pub(crate) fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
        where
            F: Future<Output: Send> + Send + 'static,
        {
            self.handle.spawn(future)
        }

        pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
            match (&self.handle, &self.real) {
                (Handle::Simulated(_, group), _) => sim::block_on(Some(*group), future),
                (_, real) => real.as_ref().expect("it has not ended").block_on(future),
            }
        }

        /// Waits until nothing runs there any more.
        pub(crate) fn shutdown_timeout(mut self, timeout: std::time::Duration) {
            if let Some(real) = self.real.take() {
                real.shutdown_timeout(timeout);
            }
        }

        pub(crate) fn shutdown_background(mut self) {
            if let Some(real) = self.real.take() {
                real.shutdown_background();
            }
        }
    }

    impl Drop for Runtime {
        fn drop(&mut self) {
            if let Handle::Simulated(sim, group) = &self.handle {
                sim.end_group(*group);
            }
        }
    }

    pub(crate) struct Builder(tokio::runtime::Builder);

    impl Builder {
        pub(crate) fn new_multi_thread() -> Self {
            Self(tokio::runtime::Builder::new_multi_thread())
        }

        pub(crate) fn worker_threads(&mut self, count: usize) -> &mut Self {
            self.0.worker_threads(count);
            self
        }

        pub(crate) fn max_blocking_threads(&mut self, count: usize) -> &mut Self {
            self.0.max_blocking_threads(count);
            self
        }

        pub(crate) fn thread_name(&mut self, name: &str) -> &mut Self {
            self.0.thread_name(name);
            self
        }

        pub(crate) fn enable_all(&mut self) -> &mut Self {
            self.0.enable_all();
            self
        }

        pub(crate) fn build(&mut self) -> io::Result<Runtime> {
            Ok(match sim::current() {
                Some(sim) => {
                    let group = sim.new_group();
                    Runtime { handle: Handle::Simulated(sim, group), real: None }
                }
                None => {
                    let real = self.0.build()?;
                    Runtime { handle: Handle::Real(real.handle().clone()), real: Some(real) }
                }
            })
        }
    }
}

pub(crate) mod time {
    use std::ops::Add;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};
    use std::time::Duration;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Instant {
        Real(tokio::time::Instant),
        Simulated(Duration),
    }

    impl Instant {
        pub(crate) fn now() -> Self {
            match sim::current() {
                Some(sim) => Self::Simulated(sim.now()),
                None => Self::Real(tokio::time::Instant::now()),
            }
        }

        pub(crate) fn elapsed(&self) -> Duration {
            match (self, sim::current()) {
                (Self::Real(begun), _) => begun.elapsed(),
                (Self::Simulated(begun), sim) => {
                    sim.expect("its thread is simulated").now().saturating_sub(*begun)
                }
            }
        }
    }

    impl Add<Duration> for Instant {
        type Output = Self;
        fn add(self, time: Duration) -> Self {
            match self {
                Self::Real(instant) => Self::Real(instant + time),
                Self::Simulated(instant) => Self::Simulated(instant + time),
            }
        }
    }

    pub(crate) enum Sleep {
        Real(Pin<Box<tokio::time::Sleep>>),
        Simulated { sim: Arc<Sim>, deadline: Duration, timer: Option<u64> },
    }

    impl Sleep {
        fn until(instant: Instant) -> Self {
            match instant {
                Instant::Real(instant) => Self::Real(Box::pin(tokio::time::sleep_until(instant))),
                Instant::Simulated(deadline) => {
                    let sim = sim::current().expect("its thread is simulated");
                    Self::Simulated { sim, deadline, timer: None }
                }
            }
        }
    }

    impl Future for Sleep {
        type Output = ();
        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            match &mut *self {
                Self::Real(sleep) => sleep.as_mut().poll(context),
                Self::Simulated { sim, deadline, .. } if sim.now() >= *deadline => Poll::Ready(()),
                Self::Simulated { sim, deadline, timer } => {
                    *timer = Some(sim.set_timer(*deadline, *timer, context.waker()));
                    Poll::Pending
                }
            }
        }
    }

    impl Drop for Sleep {
        fn drop(&mut self) {
            if let Self::Simulated { sim, deadline, timer: Some(timer) } = self {
                sim.remove_timer(*deadline, *timer);
            }
        }
    }

    pub(crate) fn sleep(time: Duration) -> Sleep {
        match sim::current() {
            Some(sim) => {
                // As long as anybody could wait.
                let deadline = sim.now().saturating_add(time);
                Sleep::Simulated { sim, deadline, timer: None }
            }
            None => Sleep::Real(Box::pin(tokio::time::sleep(time))),
        }
    }

    /// The time is over.
    #[derive(Debug)]
    pub(crate) struct Elapsed;

    impl From<Elapsed> for std::io::Error {
        fn from(_: Elapsed) -> Self {
            std::io::ErrorKind::TimedOut.into()
        }
    }

    async fn before<F: Future>(sleep: Sleep, future: F) -> Result<F::Output, Elapsed> {
        tokio::select! {
            biased;
            value = future => Ok(value),
            () = sleep => Err(Elapsed),
        }
    }

    pub(crate) fn timeout<F: Future>(
        time: Duration,
        future: F,
    ) -> impl Future<Output = Result<F::Output, Elapsed>> {
        before(sleep(time), future)
    }

    pub(crate) fn timeout_at<F: Future>(
        deadline: Instant,
        future: F,
    ) -> impl Future<Output = Result<F::Output, Elapsed>> {
        before(Sleep::until(deadline), future)
    }

    pub(crate) struct Interval {
        period: Duration,
        next: Instant,
    }

    impl Interval {
        pub(crate) async fn tick(&mut self) {
            Sleep::until(self.next).await;
            self.next = self.next + self.period;
        }
    }

    pub(crate) fn interval(period: Duration) -> Interval {
        Interval { period, next: Instant::now() }
    }
}

/// Threads of tests.
pub(crate) mod thread {
    use std::time::Duration;

    use super::*;

    /// Others may run, and the clock goes on: a thread that polls does not stop it.
    pub(crate) fn yield_now() {
        match sim::current() {
            Some(_) => sim::block_on(None, time::sleep(Duration::from_micros(10))),
            None => std::thread::yield_now(),
        }
    }

    /// Waits for the future.
    pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
        if sim::current().is_some() {
            return sim::block_on(None, future);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime without threads starts").block_on(future)
    }

    pub(crate) enum Joined<T> {
        Real(std::thread::JoinHandle<T>),
        Simulated(sim::Joined<T>),
    }

    impl<T> Joined<T> {
        pub(crate) fn join(self) -> T {
            match self {
                Self::Real(thread) => thread.join().expect("the thread does not panic"),
                Self::Simulated(thread) => thread.join(),
            }
        }
    }

    pub(crate) fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Joined<T> {
        match sim::current() {
            Some(_) => Joined::Simulated(sim::spawn_thread(body)),
            None => Joined::Real(std::thread::spawn(body)),
        }
    }
}
