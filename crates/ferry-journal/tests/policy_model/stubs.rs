//! What the pipeline stands on, in the model: locks of the model checker, a log of bare numbers, a
//! device that keeps account.

/// A lock that is taken as the journal's own are.
pub struct Lock<T>(shuttle::sync::Mutex<T>);

impl<T> Lock<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }
    pub fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0.lock().expect("a model stops at the first panic")
    }
    pub fn read(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.lock()
    }
    pub fn write(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.lock()
    }
}

pub mod context {
    use crate::Seq;
    use crate::completion::Countdown;
    use std::sync::Arc;

    pub struct Context {
        pub seq: Seq,
        pub layers: Vec<()>,
        pub payload: u64,
        pub transactions: u64,
        pub since: std::time::Duration,
        pub extents: Vec<()>,
        pub data_bytes: u64,
        pub data: Arc<Countdown>,
    }
}

pub mod completion {
    use crate::JournalError;
    use std::sync::Arc;

    type Then = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

    /// Of at most one write, and no data: what counts here is the record.
    pub struct Countdown(super::Lock<(u32, Option<JournalError>, Option<Then>)>);

    impl Countdown {
        pub fn new(n: u32) -> Arc<Self> {
            Arc::new(Self(super::Lock::new((n + 1, None, None))))
        }
        pub fn done(&self, result: Result<(), JournalError>) {
            let mut state = self.0.lock();
            state.0 -= 1;
            if let Err(error) = result {
                state.1.get_or_insert(error);
            }
            if state.0 == 0 {
                let (result, then) = (state.1.take().map_or(Ok(()), Err), state.2.take());
                drop(state);
                then.expect("set before the last count is given up")(result);
            }
        }
        pub fn then(&self, then: impl FnOnce(Result<(), JournalError>) + Send + 'static) {
            self.0.lock().2 = Some(Box::new(then));
            self.done(Ok(()));
        }
    }
}

pub mod options {
    pub const IN_FLIGHT_MAX: usize = ferry_journal::IN_FLIGHT_MAX;
}

pub mod types {
    #[derive(Clone, Copy)]
    pub struct Point {
        pub seq: crate::Seq,
        pub position: u64,
        pub id: u64,
    }
}

pub mod layers {
    pub struct Merge;
    impl Merge {
        pub fn all(_layers: &[()]) -> std::iter::Empty<()> {
            std::iter::empty()
        }
    }
}

pub mod record {
    use crate::format::RecordKind;

    pub struct RecordPlan {
        pub kind: RecordKind,
        pub position: u64,
        pub id: u64,
        pub prev: u64,
        pub seq: u64,
        pub durable_point: u64,
        pub body_len: u64,
    }

    /// Where the log is.
    pub struct LogArea;

    /// One write, whose offset is the context's number.
    pub fn encode(
        _area: &LogArea,
        plan: &RecordPlan,
        _extents: &[()],
        _changes: impl Iterator<Item = ()>,
    ) -> Vec<(u64, Vec<u8>)> {
        vec![(plan.seq, vec![0])]
    }
}

pub mod stats {
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    pub struct FlushStats {
        pub policy: crate::policy::FlushPolicy,
        pub fast_flush: Duration,
        pub commit_time: Duration,
        pub commit_delays: u64,
        pub commit_delays_in_vain: u64,
        pub delayed_callers: u64,
        pub commit_delay_time: Duration,
        pub overlapped: u64,
    }

    #[derive(Default)]
    pub struct Counters {
        pub forces: AtomicU64,
        pub transactions: AtomicU64,
        pub log_bytes: AtomicU64,
        pub log_writes: AtomicU64,
    }

    impl Counters {
        pub fn note_in_flight(&self, _n: u64) {}
        pub fn note_stages(&self, _at: [Duration; 5]) {}
        pub fn note_context(&self, _context: &crate::context::Context, _boarded: u64) {}
    }
}

pub mod disk {
    use super::Lock;
    use super::core::Time;
    use crate::JournalError;
    use shuttle::rand::{Rng, thread_rng};
    use shuttle::thread;
    use std::collections::BTreeSet;
    use std::io;
    use std::sync::Arc;

    type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

    pub struct Write {
        context: u64,
        done: Done,
    }

    #[derive(Default)]
    struct Ledger {
        completed: BTreeSet<u64>,
        durable: BTreeSet<u64>,
        lost: BTreeSet<u64>,
        flushes: u64,
    }

    /// A device that knows which records are durable.
    pub struct Disk {
        ledger: Lock<Ledger>,
        time: Arc<Time>,
        fails: Option<u64>,
    }

    pub fn io_error(what: &'static str) -> impl Fn(io::Error) -> JournalError {
        move |e| JournalError::Io { what, source: Arc::new(e) }
    }

    /// Now, or later on another thread: either may happen.
    fn complete(then: impl FnOnce() + Send + 'static) {
        if thread_rng().gen_bool(0.3) {
            then();
        } else {
            thread::spawn(then);
        }
    }

    impl Disk {
        pub fn new(time: Arc<Time>, fails: Option<u64>) -> Arc<Self> {
            Arc::new(Self { ledger: Lock::new(Ledger::default()), time, fails })
        }

        /// The context, and all before it, are on the medium.
        pub fn is_durable(&self, context: u64) -> bool {
            let ledger = self.ledger.lock();
            (1..=context).all(|c| ledger.durable.contains(&c))
        }

        pub fn is_ordered(&self) -> bool {
            false
        }

        pub fn write_request(
            &self,
            _what: &'static str,
            context: u64,
            _buf: Arc<Vec<u8>>,
            done: impl FnOnce(io::Result<()>) + Send + 'static,
        ) -> Write {
            Write { context, done: Box::new(done) }
        }

        pub fn submit(self: &Arc<Self>, batch: Vec<Write>) {
            for Write { context, done } in batch {
                let me = self.clone();
                complete(move || {
                    me.ledger.lock().completed.insert(context);
                    done(Ok(()));
                });
            }
        }

        pub fn flush(self: &Arc<Self>, done: Done) {
            let mut ledger = self.ledger.lock();
            let (number, covered) = (ledger.flushes, ledger.completed.clone());
            ledger.flushes += 1;
            drop(ledger);
            let me = self.clone();
            complete(move || {
                me.time.pass(super::core::FLUSH);
                let mut ledger = me.ledger.lock();
                if me.fails == Some(number) {
                    let lost: Vec<_> = covered.difference(&ledger.durable).copied().collect();
                    ledger.lost.extend(lost);
                    drop(ledger);
                    return done(Err(io::Error::from_raw_os_error(5)));
                }
                // What the device guarantees: no flush succeeds that covers what is lost, whichever
                // caller heard of it first.
                if !covered.is_disjoint(&ledger.lost) {
                    drop(ledger);
                    return done(Err(io::Error::from_raw_os_error(5)));
                }
                ledger.durable.extend(covered);
                drop(ledger);
                done(Ok(()));
            });
        }

        pub fn flush_alone(self: &Arc<Self>, done: Done) {
            self.flush(done);
        }

        pub fn flush_timing(&self) -> ferry_device::FlushTiming {
            ferry_device::FlushTiming {
                avg: std::time::Duration::from_nanos(super::core::FLUSH),
                samples: 1,
            }
        }
    }
}

pub mod core {
    use super::Lock;
    use super::completion::Countdown;
    use super::context::Context;
    use super::disk::Disk;
    use super::stats::Counters;
    use super::types::Point;
    use crate::pipeline::Pipe;
    use crate::policy::{Dispatcher, FlushPolicy};
    use crate::{JournalError, Seq};
    use ferry_env::{Clock, Entropy, Env};
    use shuttle::rand::RngCore;
    use shuttle::sync::{Condvar, Mutex};
    use shuttle::thread;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;

    /// What a flush takes, in nanoseconds of the model.
    pub const FLUSH: u64 = 200;
    /// `delay` waits where flushes take more than this.
    pub const FAST: u64 = 10;

    /// What a model is made of.
    #[derive(Clone, Copy)]
    pub struct Setup {
        pub policy: FlushPolicy,
        /// The flush with this number fails.
        pub fails: Option<u64>,
        /// What each caller takes between two calls, in nanoseconds of the model.
        pub think: u64,
        /// The least interval between flushes, in nanoseconds of the model.
        pub interval_min: u64,
    }

    impl Setup {
        pub fn of(policy: FlushPolicy) -> Self {
            Self { policy, fails: None, think: 0, interval_min: 0 }
        }
    }

    /// Time passes a little whenever somebody looks, and much with each flush.
    pub struct Time(AtomicU64);

    impl Time {
        pub fn pass(&self, nanos: u64) {
            self.0.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    impl Clock for Time {
        fn monotonic(&self) -> Duration {
            Duration::from_nanos(self.0.fetch_add(1, Ordering::Relaxed))
        }
        fn wall(&self) -> Duration {
            self.monotonic()
        }
    }

    struct Numbers;

    impl Entropy for Numbers {
        fn next_u64(&self) -> u64 {
            shuttle::rand::thread_rng().next_u64()
        }
    }

    pub struct Head {
        pub seq: Seq,
        pub transactions: u64,
    }

    impl Head {
        pub fn is_empty(&self) -> bool {
            self.transactions == 0
        }
        pub fn seal(&mut self) -> Context {
            let (seq, transactions) = (self.seq, std::mem::take(&mut self.transactions));
            self.seq.0 += 1;
            let data = Countdown::new(0);
            Context {
                seq,
                layers: vec![],
                payload: 1,
                transactions,
                since: Duration::ZERO,
                extents: vec![],
                data_bytes: 0,
                data,
            }
        }
    }

    pub struct Client;
    impl Client {
        pub fn durable_point(&self, _seq: Seq) {}
        pub fn failed(&self, _error: &JournalError) {}
    }

    pub struct Space;
    impl Space {
        pub fn release(&self, _bytes: u64) {}
        pub fn stop(&self) {}
    }

    #[derive(Default)]
    pub struct Options {
        pub log: ferry_journal::LogOptions,
        pub tail: Option<ferry_journal::Tail>,
    }

    pub struct Core {
        pub options: Options,
        pub disk: Arc<Disk>,
        pub env: Env,
        pub time: Arc<Time>,
        pub think: u64,
        pub client: Client,
        pub space: Space,
        pub head: Lock<Head>,
        pub pipe: Lock<Pipe>,
        pub hold_timer: HoldTimer,
        pub durable: AtomicU64,
        pub durable_point: AtomicU64,
        pub sealed_at: AtomicU64,
        pub closed: AtomicBool,
        pub failed: OnceLock<JournalError>,
        pub stats: Counters,
    }

    impl Core {
        pub fn new_record_id(&self) -> u64 {
            self.env.entropy.next_u64()
        }

        pub fn new(setup: Setup) -> Arc<Self> {
            let time = Arc::new(Time(AtomicU64::new(1)));
            let dispatcher = Dispatcher::new(setup.policy, Duration::from_nanos(FAST))
                .with_interval_min(Duration::from_nanos(setup.interval_min));
            Arc::new(Self {
                options: Options::default(),
                disk: Disk::new(time.clone(), setup.fails),
                env: Env { clock: time.clone(), entropy: Arc::new(Numbers) },
                time,
                think: setup.think,
                client: Client,
                space: Space,
                head: Lock::new(Head { seq: Seq(1), transactions: 0 }),
                pipe: Lock::new(Pipe::new(
                    Point { seq: Seq(0), position: 0, id: 0 },
                    Point { seq: Seq(0), position: 0, id: 0 },
                    dispatcher,
                )),
                hold_timer: HoldTimer::default(),
                durable: AtomicU64::new(0),
                durable_point: AtomicU64::new(0),
                sealed_at: AtomicU64::new(0),
                closed: AtomicBool::new(false),
                failed: OnceLock::new(),
                stats: Counters::default(),
            })
        }

        /// Commits a transaction; the context that it joins.
        pub fn change(&self) -> Seq {
            let mut head = self.head.write();
            head.transactions += 1;
            head.seq
        }

        pub fn area(&self) -> crate::record::LogArea {
            crate::record::LogArea
        }

        pub fn failure(&self) -> Option<JournalError> {
            self.failed.get().cloned()
        }

        pub fn durable(&self) -> Seq {
            Seq(self.durable.load(Ordering::Acquire))
        }

        pub fn after_commit(&self) {}
    }

    #[derive(Default)]
    pub struct HoldTimer {
        state: Mutex<(Option<Duration>, bool)>,
        wake: Condvar,
    }

    impl HoldTimer {
        pub fn arm(&self, until: Duration) {
            let mut state = self.state.lock().unwrap();
            if until < Duration::MAX && state.0.is_none_or(|armed| until < armed) {
                state.0 = Some(until);
                self.wake.notify_one();
            }
        }
        pub fn stop(&self) {
            self.state.lock().unwrap().1 = true;
            self.wake.notify_one();
        }
    }

    /// The thread that ends holds. A hold's time passes when this thread has its turn.
    pub fn run_holds(core: &Arc<Core>) -> thread::JoinHandle<()> {
        let core = core.clone();
        thread::spawn(move || {
            loop {
                let mut state = core.hold_timer.state.lock().unwrap();
                let until = loop {
                    if state.1 {
                        return;
                    }
                    if let Some(until) = state.0.take() {
                        break until;
                    }
                    state = core.hold_timer.wake.wait(state).unwrap();
                };
                drop(state);
                core.time.0.fetch_max(until.as_nanos() as u64, Ordering::Relaxed);
                core.drive();
            }
        })
    }
}
