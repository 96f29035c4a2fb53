//! Model of the group commit under shuttle: the real pipeline and the real policies, on a device
//! that knows what is durable.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]
#![allow(missing_docs, dead_code, reason = "the model needs a part of what it includes")]

#[path = "../src/engine/group_commit.rs"]
mod group_commit;
#[path = "../src/commit/pipeline.rs"]
mod pipeline;
#[path = "../src/commit/policy.rs"]
mod policy;
#[path = "policy_model/stubs.rs"]
mod stubs;

use ferry_journal::{Completion, JournalError, Seq, format};
use stubs::{completion, context, core, disk, options, record, stats};

// The paths by which the included files name the rest of the crate.
mod commit {
    pub(crate) use crate::{context, pipeline, policy};
}
mod log {
    pub(crate) use crate::{format, record};
}
mod types {
    pub(crate) use crate::stubs::types::Point;
}
mod view {
    pub(crate) use crate::stubs::layers;
}

use ferry_env::planted::{Bug, plant_here};
use policy::{Caller, CommitTimes, Dispatcher, FlushPolicy, SealDecision};
use shuttle::sync::mpsc;
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stubs::core::{Core, FAST, FLUSH, Setup, run_holds};

const SCHEDULES: usize = 400;

/// Rounds of each caller: enough to become trusted, and to be held.
const ROUNDS: usize = 5;

/// Changes something, asks for it to be durable, and looks whether it is; `false` once the journal
/// has failed.
fn round(core: &Arc<Core>, caller: u32) -> bool {
    let seq = core.change();
    let (tell, told) = mpsc::channel();
    core.force(Caller(caller), seq, Box::new(move |result| tell.send(result).unwrap()));
    let answer = told.recv().expect("every force is answered");
    assert!(told.recv().is_err(), "answered once");
    match answer {
        Ok(()) => assert!(core.disk.is_durable(seq.0), "{seq:?} was called durable and is not"),
        Err(_) => assert!(core.failure().is_some(), "an error that the journal did not have"),
    }
    answer.is_ok()
}

fn callers(core: &Arc<Core>, callers: u32) {
    let threads: Vec<_> = (1..=callers)
        .map(|caller| {
            let core = core.clone();
            thread::spawn(move || {
                for _ in 0..ROUNDS {
                    core.time.pass(core.think);
                    if !round(&core, caller) {
                        return;
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// Callers of one policy, a thread that seals as commit intervals do, and the thread that ends
/// holds.
fn model(setup: Setup, count: u32) -> u64 {
    let core = Core::new(setup);
    let timer = run_holds(&core);
    let sealer = {
        let core = core.clone();
        thread::spawn(move || {
            for _ in 0..3 {
                thread::yield_now();
                let seq = core.head.read().seq;
                core.seal_if(seq);
            }
        })
    };
    callers(&core, count);
    sealer.join().unwrap();
    core.hold_timer.stop();
    timer.join().unwrap();
    core.pipe.lock().dispatcher.holds().holds
}

#[test]
fn every_force_is_answered_once_and_not_before_it_is_durable() {
    for policy in FlushPolicy::ALL {
        let holds = Arc::new(AtomicU64::new(0));
        let seen = holds.clone();
        shuttle::check_random(
            move || {
                seen.fetch_add(model(Setup::of(policy), 3), Ordering::Relaxed);
            },
            SCHEDULES,
        );
        let expected = matches!(policy, FlushPolicy::Delay | FlushPolicy::Adaptive);
        assert_eq!(holds.load(Ordering::Relaxed) > 0, expected, "{policy}: holds");
    }
}

#[test]
fn a_failed_flush_is_everyones_error_held_or_not() {
    for policy in FlushPolicy::ALL {
        for fails in [0, 3, 6] {
            let setup = Setup { fails: Some(fails), ..Setup::of(policy) };
            shuttle::check_random(
                move || {
                    let _ = model(setup, 3);
                },
                SCHEDULES / 4,
            );
        }
    }
}

#[test]
fn the_end_of_the_journal_ends_every_hold() {
    for policy in FlushPolicy::ALL {
        shuttle::check_random(
            move || {
                let core = Core::new(Setup::of(policy));
                let timer = run_holds(&core);
                let there = core.clone();
                let ender = thread::spawn(move || {
                    for _ in
                        0..shuttle::rand::Rng::gen_range(&mut shuttle::rand::thread_rng(), 0..60)
                    {
                        thread::yield_now();
                    }
                    there.hold_timer.stop();
                    there.fail(JournalError::Closed);
                });
                callers(&core, 3);
                ender.join().unwrap();
                timer.join().unwrap();
            },
            SCHEDULES,
        );
    }
}

#[test]
fn a_change_of_policy_loses_no_caller() {
    shuttle::check_random(
        || {
            let core = Core::new(Setup::of(FlushPolicy::Each));
            let timer = run_holds(&core);
            let there = core.clone();
            let changer = thread::spawn(move || {
                for policy in FlushPolicy::ALL.into_iter().rev() {
                    thread::yield_now();
                    there.pipe.lock().dispatcher.set(policy, std::time::Duration::from_nanos(FAST));
                    there.drive();
                }
            });
            callers(&core, 3);
            changer.join().unwrap();
            core.hold_timer.stop();
            timer.join().unwrap();
        },
        SCHEDULES,
    );
}

/// Two callers who take their time: a flush is not worth waiting for company, and the next record
/// is written beside it.
#[test]
fn records_are_written_beside_a_flush_and_nothing_is_called_durable_early() {
    let beside = Arc::new(AtomicU64::new(0));
    let seen = beside.clone();
    shuttle::check_random(
        move || {
            let core = Core::new(Setup { think: FLUSH / 2, ..Setup::of(FlushPolicy::Adaptive) });
            let timer = run_holds(&core);
            callers(&core, 2);
            core.hold_timer.stop();
            timer.join().unwrap();
            seen.fetch_add(core.pipe.lock().dispatcher.holds().overlapped, Ordering::Relaxed);
        },
        SCHEDULES,
    );
    assert!(beside.load(Ordering::Relaxed) > 0);
}

fn lone() {
    for policy in [FlushPolicy::Each, FlushPolicy::Gather, FlushPolicy::Adaptive] {
        shuttle::check_random(
            move || {
                let core = Core::new(Setup::of(policy));
                let timer = run_holds(&core);
                callers(&core, 1);
                core.hold_timer.stop();
                timer.join().unwrap();
                let holds = core.pipe.lock().dispatcher.holds().holds;
                assert_eq!(holds, 0, "POLICY-2: a lone caller was held");
            },
            SCHEDULES,
        );
    }
}

#[test]
fn a_lone_caller_is_never_held() {
    lone();
}

// A planted bug is planted in one thread: all of a model runs on the thread of its test.

#[test]
#[should_panic(expected = "a lone caller was held")]
fn planted_holding_of_the_lone_is_caught() {
    let _planted = plant_here(Bug::HoldsTheLone);
    lone();
}

/// One caller syncs, each time as soon as it was answered: when its contexts are sealed.
fn seals_of_a_lone(policy: FlushPolicy, interval_min: Duration, rounds: u32) -> Vec<Duration> {
    let flush = Duration::from_millis(5);
    let mut dispatcher =
        Dispatcher::new(policy, Duration::from_millis(2)).with_interval_min(interval_min);
    let (mut now, mut seals) = (Duration::from_secs(1), Vec::new());
    for _ in 0..rounds {
        dispatcher.arrived(now, Caller(7), true);
        while let SealDecision::Until(until) = dispatcher.decide(now, 0, 0, || flush) {
            assert!(until > now, "a hold ends");
            now = until;
        }
        seals.push(now);
        dispatcher.sealed(now, 1, 0);
        let times = CommitTimes { sealed_at: now, written_at: now, flush_at: now };
        now += flush;
        dispatcher.completed(now, times, std::iter::once(Caller(7)));
    }
    seals
}

#[test]
fn seals_of_callers_are_apart_by_the_least_interval_under_any_policy() {
    let interval = Duration::from_millis(100);
    for policy in FlushPolicy::ALL {
        let seals = seals_of_a_lone(policy, interval, 20);
        let apart = |pair: &[Duration]| pair[1] - pair[0] == interval;
        assert!(seals.windows(2).all(apart), "{policy}: {seals:?}");
        // Without it nobody waits longer than a flush.
        let seals = seals_of_a_lone(policy, Duration::ZERO, 20);
        assert!(seals[19] - seals[0] <= Duration::from_millis(19 * 5 + 5), "{policy}: {seals:?}");
    }
}

#[test]
fn the_least_interval_holds_nobody_who_comes_later_and_not_the_journal_itself() {
    let at = Duration::from_millis;
    let interval = at(100);
    let mut dispatcher = Dispatcher::new(FlushPolicy::Adaptive, at(2)).with_interval_min(interval);
    let decide = |dispatcher: &mut Dispatcher, now, in_flight| {
        dispatcher.decide(now, in_flight, 0, || at(5))
    };
    dispatcher.arrived(at(1000), Caller(1), true);
    assert_eq!(decide(&mut dispatcher, at(1000), 0), SealDecision::Now, "the first one");
    dispatcher.sealed(at(1000), 1, 0);
    // Others come while that is in flight, and later: they share.
    for (now, caller, in_flight) in [(1010, 2, 1), (1020, 3, 1), (1090, 4, 0)] {
        dispatcher.arrived(at(now), Caller(caller), true);
        let decided = decide(&mut dispatcher, at(now), in_flight);
        assert_eq!(decided, SealDecision::Until(at(1100)), "{caller}");
    }
    assert_eq!(decide(&mut dispatcher, at(1100), 0), SealDecision::Now);
    dispatcher.sealed(at(1100), 3, 0);
    // A seal that nobody waits for counts, too.
    dispatcher.sealed(at(1150), 0, 0);
    dispatcher.arrived(at(1240), Caller(1), true);
    assert_eq!(decide(&mut dispatcher, at(1240), 0), SealDecision::Until(at(1250)));
    dispatcher.arrived(at(1241), Caller::UNKNOWN, true);
    assert_eq!(decide(&mut dispatcher, at(1241), 0), SealDecision::Now, "the journal's own");
    dispatcher.sealed(at(1241), 2, 0);
    dispatcher.arrived(at(1400), Caller(1), true);
    assert_eq!(decide(&mut dispatcher, at(1400), 0), SealDecision::Now, "long after");
}

#[test]
fn with_a_least_interval_every_force_is_answered_once_it_is_durable() {
    for policy in FlushPolicy::ALL {
        let setup = Setup { interval_min: 3 * FLUSH, ..Setup::of(policy) };
        let run = move || {
            model(setup, 3);
        };
        shuttle::check_random(run, SCHEDULES);
    }
}

fn check_planted(bug: Bug, policy: FlushPolicy, fails: Option<u64>) {
    let _planted = plant_here(bug);
    let setup = Setup { fails, ..Setup::of(policy) };
    shuttle::check_random(
        move || {
            let _ = model(setup, 3);
        },
        20 * SCHEDULES,
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn planted_holding_for_ever_is_caught() {
    check_planted(Bug::HoldsForEver, FlushPolicy::Adaptive, None);
}

#[test]
#[should_panic(expected = "was called durable and is not")]
fn planted_joining_of_any_flush_is_caught() {
    check_planted(Bug::JoinedFlush, FlushPolicy::Gather, None);
}

#[test]
#[should_panic(expected = "was called durable and is not")]
fn planted_joining_is_caught_where_records_are_written_beside_a_flush() {
    let _planted = plant_here(Bug::JoinedFlush);
    let setup = Setup { think: FLUSH / 2, ..Setup::of(FlushPolicy::Adaptive) };
    shuttle::check_random(
        move || {
            let core = Core::new(setup);
            let timer = run_holds(&core);
            callers(&core, 2);
            core.hold_timer.stop();
            timer.join().unwrap();
        },
        20 * SCHEDULES,
    );
}

#[test]
#[should_panic(expected = "was called durable and is not")]
fn planted_swallowing_of_errors_is_caught() {
    check_planted(Bug::SwallowedError, FlushPolicy::Gather, Some(2));
}
