//! The rules FLUSH-1 to FLUSH-5 under the model checker. Planted bugs show that it would find
//! violations.

use super::*;
use crate::buffer::AlignedBuf;
use ferry_env::planted::plant_here;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::mpsc;
use shuttle::thread;
use std::collections::BTreeSet;

/// A device that knows which writes are durable, and fails the test when two flushes overlap.
#[derive(Default)]
struct Ledger {
    state: Mutex<LedgerState>,
    /// The flush with this number (from 0) fails, and what it covered is lost for good.
    fails: Option<u64>,
}

#[derive(Default)]
struct LedgerState {
    completed: BTreeSet<u64>,
    durable: BTreeSet<u64>,
    lost: BTreeSet<u64>,
    flushes: u64,
    flushing: bool,
}

impl Ledger {
    fn failing(fails: Option<u64>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), fails })
    }

    fn complete(&self, write: u64) {
        assert!(lock(&self.state).completed.insert(write), "each write has its own number");
    }

    fn is_durable(&self, write: u64) -> bool {
        lock(&self.state).durable.contains(&write)
    }

    fn flushes(&self) -> u64 {
        lock(&self.state).flushes
    }
}

/// The ledger serves flushes alone.
fn unused<T>() -> io::Result<T> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

impl BlockDevice for Arc<Ledger> {
    fn capacity(&self) -> u64 {
        0
    }
    fn read(&self, _offset: u64, _buf: &mut AlignedBuf) -> io::Result<()> {
        unused()
    }
    fn write(&self, _offset: u64, _buf: &AlignedBuf) -> io::Result<()> {
        unused()
    }
    fn flush(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        assert!(!state.flushing, "FLUSH-1: two flushes in flight");
        state.flushing = true;
        let number = state.flushes;
        state.flushes += 1;
        let covered = state.completed.clone();
        drop(state);
        thread::yield_now();
        let mut state = lock(&self.state);
        state.flushing = false;
        if self.fails == Some(number) {
            let lost: Vec<_> = covered.difference(&state.durable).copied().collect();
            state.lost.extend(lost);
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let durable: Vec<_> = covered.difference(&state.lost).copied().collect();
        state.durable.extend(durable);
        Ok(())
    }
    /// Completes before it returns, or later on another thread: either may happen.
    fn submit(&self, batch: Vec<Io>) {
        for io in batch {
            let Io::Flush { done } = io else { continue };
            if thread_rng().gen_bool(0.5) {
                done(self.flush());
            } else {
                let me = Arc::clone(self);
                thread::spawn(move || done(me.flush()));
            }
        }
    }
    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        unused()
    }
    fn allocate(&self, _offset: u64, _len: u64) -> io::Result<()> {
        unused()
    }
    fn host_free(&self) -> Option<u64> {
        None
    }
}

fn coordinator(ledger: &Arc<Ledger>) -> Arc<FlushCoordinator> {
    let device: Arc<dyn BlockDevice> = Arc::new(Arc::clone(ledger));
    FlushCoordinator::new(device)
}

/// How a model's thread asks for its flush.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Wait,
    Call,
}

/// Writes and flushes a few times; what it is told to be durable must be so.
fn writer(ledger: &Ledger, shared: &Arc<FlushCoordinator>, way: Way, writes: std::ops::Range<u64>) {
    for write in writes {
        ledger.complete(write);
        let own = shared.write_completed();
        let target = if thread_rng().gen_bool(0.5) { own } else { shared.target() };
        let result = match way {
            Way::Wait => shared.flush_wait(target),
            Way::Call => {
                let (tx, rx) = mpsc::channel();
                shared.flush(
                    target,
                    Box::new(move |result| tx.send(result).expect("the writer waits")),
                );
                rx.recv().expect("told once")
            }
        };
        match result {
            Ok(()) => {
                assert!(
                    ledger.is_durable(write),
                    "FLUSH-2, FLUSH-3: {write} was called durable and is not"
                )
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EIO));
                assert!(ledger.fails.is_some(), "an error that no flush had");
            }
        }
    }
}

fn writers(ways: &[Way], fails: Option<u64>) {
    let ledger = Ledger::failing(fails);
    let shared = coordinator(&ledger);
    let threads: Vec<_> = (0..)
        .zip(ways.iter().copied())
        .map(|(n, way)| {
            let (ledger, shared) = (Arc::clone(&ledger), Arc::clone(&shared));
            thread::spawn(move || writer(&ledger, &shared, way, n * 2..n * 2 + 2))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a writer"));
    let stats = shared.stats();
    assert_eq!(stats.flushes, ledger.flushes());
    if fails.is_none() {
        assert_eq!(
            stats.flushes + stats.shared + stats.at_once,
            ways.len() as u64 * 2,
            "every caller is counted once"
        );
    }
    let queue = lock(&shared.queue);
    assert!(queue.is_idle() && queue.waiting.is_empty(), "a caller still waits");
}

const WAITERS: &[Way] = &[Way::Wait, Way::Wait, Way::Wait];
const CALLERS: &[Way] = &[Way::Call, Way::Call, Way::Call];
const MIXED: &[Way] = &[Way::Wait, Way::Call, Way::Wait, Way::Call];

fn check(model: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(model.clone(), 1_500);
    shuttle::check_pct(model, 1_500, 3);
}

/// For models in which, in some runs, one thread does everything: one of the schedulers refuses
/// those.
fn check_alone(model: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(model, 1_500);
}

#[test]
fn no_caller_is_answered_too_early_and_none_waits_for_ever() {
    for ways in [WAITERS, CALLERS, MIXED] {
        check(move || writers(ways, None));
    }
}

#[test]
fn every_later_caller_gets_the_error_of_a_failed_flush() {
    for ways in [WAITERS, CALLERS, MIXED] {
        check(move || writers(ways, Some(1)));
    }
}

#[test]
fn a_lone_caller_flushes_at_once() {
    for way in [Way::Wait, Way::Call] {
        check_alone(move || {
            let ledger = Ledger::failing(None);
            let shared = coordinator(&ledger);
            writer(&ledger, &shared, way, 0..3);
            assert_eq!(shared.stats(), FlushStats { flushes: 3, shared: 0, at_once: 0 });
        });
    }
}

#[test]
fn flush_alone_is_not_shared_and_its_failure_is() {
    check_alone(|| {
        let ledger = Ledger::failing(Some(2));
        let shared = coordinator(&ledger);
        let alone = |write| {
            ledger.complete(write);
            shared.write_completed();
            let (tx, rx) = mpsc::channel();
            shared.flush_alone(Box::new(move |result| tx.send(result).expect("the test waits")));
            rx.recv().expect("told once").map_err(|error| error.raw_os_error())
        };
        for write in 0..2 {
            assert_eq!(alone(write), Ok(()));
            assert!(ledger.is_durable(write));
        }
        assert_eq!(shared.stats(), FlushStats { flushes: 2, shared: 0, at_once: 0 });
        for write in 2..4 {
            assert_eq!(alone(write), Err(Some(libc::EIO)));
        }
        let later = shared.flush_wait(shared.target()).expect_err("what failed may be lost");
        assert_eq!(later.raw_os_error(), Some(libc::EIO));
        assert_eq!(ledger.flushes(), 3, "none after the failure");
    });
}

#[test]
fn the_fast_path_takes_no_shared_lock() {
    check_alone(|| {
        let ledger = Ledger::failing(None);
        let shared = coordinator(&ledger);
        writer(&ledger, &shared, Way::Wait, 0..1);
        // With the lock held, taking it again would be reported as a deadlock.
        let queue = lock(&shared.queue);
        shared.flush_wait(shared.target()).expect("durable");
        shared.flush(shared.target(), Box::new(|result| result.expect("durable")));
        drop(queue);
        assert_eq!(shared.stats(), FlushStats { flushes: 1, shared: 0, at_once: 2 });
    });
}

#[test]
fn callback_may_ask_for_the_next_flush() {
    check_alone(|| {
        let ledger = Ledger::failing(None);
        let shared = coordinator(&ledger);
        let (tx, rx) = mpsc::channel();
        for n in 0..2 {
            ledger.complete(n);
            let (tx, ledger, inner) = (tx.clone(), Arc::clone(&ledger), Arc::clone(&shared));
            let first = Box::new(move |result: io::Result<()>| {
                result.expect("no flush fails");
                ledger.complete(n + 10);
                let target = inner.write_completed();
                inner.flush(
                    target,
                    Box::new(move |result| tx.send((n + 10, result)).expect("the test waits")),
                );
            });
            shared.flush(shared.write_completed(), first);
        }
        for _ in 0..2 {
            let (write, result) = rx.recv().expect("told once");
            result.expect("no flush fails");
            assert!(ledger.is_durable(write));
        }
    });
}

/// A model must find this bug. All of a model runs on the thread of its test.
fn check_planted(bug: Bug, ways: &'static [Way], fails: Option<u64>) {
    let _planted = plant_here(bug);
    check(move || writers(ways, fails));
}

#[test]
#[should_panic(expected = "was called durable and is not")]
fn planted_sharing_of_any_flush_is_caught() {
    check_planted(Bug::SharesAnyFlush, WAITERS, None);
}

#[test]
#[should_panic(expected = "was called durable and is not")]
fn planted_sampling_after_the_flush_is_caught() {
    check_planted(Bug::SamplesAfterTheFlush, MIXED, None);
}

#[test]
#[should_panic(expected = "was called durable and is not")]
fn planted_forgetting_of_failures_is_caught() {
    check_planted(Bug::ForgetsFailures, WAITERS, Some(0));
}

#[test]
#[should_panic(expected = "deadlock")]
fn planted_forgetting_of_waiters_is_caught() {
    check_planted(Bug::ForgetsWaiters, CALLERS, None);
}
