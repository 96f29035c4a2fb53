//! One rule after the other. `model` checks all of them in every order of events.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::*;

const IN_USE: Duration = Duration::from_millis(20);

/// A clock that stands still until it is set.
#[derive(Default)]
struct Hand(Mutex<Duration>);

impl Clock for Hand {
    fn monotonic(&self) -> Duration {
        *self.0.lock()
    }
    fn wall(&self) -> Duration {
        *self.0.lock()
    }
}

impl Hand {
    fn set(&self, secs: u64) {
        *self.0.lock() = Duration::from_secs(secs);
    }
}

fn leases() -> (Arc<Leases>, Arc<Hand>) {
    let hand = Arc::new(Hand::default());
    let leases = Leases::new(hand.clone(), Duration::from_secs(5), Duration::ZERO, IN_USE);
    for session in 1..=3 {
        leases.begin(session, session);
    }
    (Arc::new(leases), hand)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

const NO_ONE: fn(&Recalls) = |_| {};

impl Leases {
    fn change(self: &Arc<Self>, session: SessionId, is_early: bool, inos: &[Ino]) -> Begin {
        self.begin_change(session, (Some(self.epoch(session)), is_early), inos.into(), NO_ONE)
    }
    fn guard(self: &Arc<Self>, session: SessionId, inos: &[Ino]) -> ChangeGuard {
        let Begin::Now(guard) = self.change(session, false, inos) else { panic!("not now") };
        guard
    }
    fn queued(self: &Arc<Self>, session: SessionId, inos: &[Ino]) -> QueuePosition {
        let Begin::Later(position) = self.change(session, false, inos) else {
            panic!("not queued")
        };
        position
    }
    fn refusal(self: &Arc<Self>, session: SessionId, is_early: bool, inos: &[Ino]) -> Progress {
        let Begin::Not(why) = self.change(session, is_early, inos) else { panic!("not refused") };
        why
    }
    /// Write leases that can be granted at once.
    fn lease(self: &Arc<Self>, session: SessionId, inos: &[Ino]) -> Vec<Ino> {
        let position = self.ask(session, Wants::Lease, inos.into());
        match self.progress(position.waiter) {
            Progress::Begun(granted) => {
                self.grant_sent(session, &granted);
                granted
            }
            other => panic!("{other:?}"),
        }
    }
    /// How far a waiter has come, and what it recalls.
    fn recalls(self: &Arc<Self>, position: &QueuePosition) -> Option<Recalls> {
        match self.progress(position.waiter) {
            Progress::Waits(recalls, _) => Some(recalls),
            _ => None,
        }
    }
}

#[test]
fn a_change_waits_for_returned_read_leases_and_no_lease_is_granted_meanwhile() {
    let (runtime, (leases, hand)) = (runtime(), leases());
    let _inside = runtime.enter();
    assert!(leases.grant(1, 10) && leases.grant(2, 10) && leases.grant(2, 10));
    let recalled = Mutex::new(Vec::new());
    let recall = |recalls: &Recalls| recalled.lock().extend(recalls.clone());
    let Begin::Later(position) = leases.begin_change(1, (Some(0), false), vec![10, 11], recall)
    else {
        panic!("another relies on it")
    };
    assert_eq!(*recalled.lock(), [(2, vec![10])], "not its own");
    {
        let mut wait = pin!(position.wait(recall));
        assert!(poll(wait.as_mut()).is_none());
        assert!(!leases.grant(3, 10) && !leases.grant(2, 10), "it is about to change");
        assert!(leases.renew(2).0, "it has just been asked");
        hand.set(1);
        assert!(!leases.renew(2).0, "it owes an answer");
        assert!(poll(wait.as_mut()).is_none());
        assert_eq!(recalled.lock().len(), 1, "asked once");
        leases.give_back(2, &[10], Some(7));
        assert_eq!(
            poll(wait),
            Some(Progress::Begun(Vec::new())),
            "a read lease needs only the answer"
        );
    }
    assert!(leases.renew(2).0);
    assert!(leases.grant(1, 11), "its own change is being applied");
    assert!(!leases.grant(2, 11));
    drop(position.into_guard());
    assert!(leases.grant(2, 11));
    assert_eq!((leases.held_by(1), leases.held_by(2)), ((2, 0), (1, 0)));
    leases.end(1);
    leases.give_back(2, &[11, 12], None);
    let shared = leases.shared.lock();
    assert!(
        shared.table.inodes.is_empty() && shared.table.leases == 0 && shared.wakeups.is_empty()
    );
}

/// Each second client 2 is sent a recall, shows a sign of life while it owes the answer, and
/// answers. Its leases stay.
fn recalled_all_the_time(sign_of_life: impl Fn(&Leases, u64)) -> Arc<Leases> {
    let (leases, hand) = leases();
    let inos: Vec<Ino> = (100..140).collect();
    assert!(inos.iter().all(|ino| leases.grant(2, *ino)));
    for (secs, pair) in (0..).zip(inos.windows(2)) {
        hand.set(secs);
        leases.renew(1);
        let position = leases.queued(1, &[pair[0]]);
        sign_of_life(&leases, secs);
        leases.give_back(2, &[pair[0]], None);
        drop(position.into_guard());
        assert!(leases.grant(2, pair[1]), "at {secs}");
    }
    leases
}

#[test]
fn a_client_that_answers_recalls_keeps_its_leases_however_many_there_are() {
    let leases = recalled_all_the_time(|leases, secs| assert!(leases.renew(2).0, "at {secs}"));
    assert!(leases.shared.lock().table.holders[&2].recalls.len() <= 1, "answered ones go");
}

#[test]
fn a_client_that_answers_recalls_keeps_its_leases_though_only_its_changes_arrive() {
    recalled_all_the_time(|leases, _| leases.makes_progress(2));
}

#[test]
fn an_answered_recall_does_not_count_when_the_lease_is_recalled_again() {
    let (leases, hand) = leases();
    assert!(leases.grant(2, 10) && leases.grant(2, 11));
    let [other, first] = [10, 11].map(|ino| leases.queued(1, &[ino]));
    leases.give_back(2, &[11], None);
    drop(first.into_guard());
    hand.set(4);
    leases.renew(1);
    assert!(leases.grant(2, 11));
    let _second = leases.queued(1, &[11]);
    assert!(!leases.renew(2).0, "it owes the answer to the other recall");
    leases.give_back(2, &[10], None);
    assert!(leases.renew(2).0, "it has just been asked");
    drop(other.into_guard());
}

#[test]
fn a_session_that_sends_changes_may_owe_a_recall_for_two_terms() {
    let (leases, hand) = leases();
    assert_eq!(leases.lease(1, &[10]), [10]);
    hand.set(4);
    leases.makes_progress(1);
    let reader = leases.ask(2, Wants::Read, vec![10]);
    hand.set(8);
    assert_eq!(
        leases.recalls(&reader),
        Some(Recalls::from_iter([(1, vec![10])])),
        "its term went on"
    );
    for secs in [8, 12, 16] {
        hand.set(secs);
        leases.makes_progress(1);
        assert_eq!(leases.renew(1).0, secs == 8, "it owes the answer for too long");
        assert!(leases.recalls(&reader).is_some(), "it is on its way");
    }
    hand.set(18);
    leases.makes_progress(1);
    hand.set(20);
    assert!(leases.recalls(&reader).is_some());
    hand.set(21);
    leases.makes_progress(1);
    assert!(leases.recalls(&reader).is_none(), "not for ever");
    assert_eq!(leases.epoch(1), 1);
    // Once it has returned the lease, only silence ends its term.
    leases.begin(1, 1);
    assert_eq!(leases.lease(1, &[11]), [11]);
    let reader = leases.ask(2, Wants::Read, vec![11]);
    assert!(leases.recalls(&reader).is_some());
    leases.give_back(1, &[11], Some(9));
    for secs in [24, 28, 32, 36, 40, 44] {
        hand.set(secs);
        leases.makes_progress(1);
        assert!(leases.recalls(&reader).is_some());
    }
    leases.refused(1, 9);
    assert!(leases.recalls(&reader).is_none());
    assert_eq!(leases.epoch(1), 1, "it has lost nothing");
}

#[test]
fn a_lease_whose_term_is_over_delays_no_change() {
    let (leases, hand) = leases();
    assert!(leases.grant(2, 10));
    hand.set(4);
    assert!(leases.renew(2).0);
    let position = leases.queued(1, &[10]);
    hand.set(8);
    assert!(leases.recalls(&position).is_some());
    hand.set(9);
    leases.expire(&HashSet::from_iter([1, 2, 3]));
    assert!(leases.recalls(&position).is_none());
    assert!(!leases.grant(2, 12), "nothing is heard of it");
    leases.begin(2, 2);
    assert!(leases.grant(2, 12));
}

#[test]
fn changes_begin_in_queue_order_and_never_wait_for_each_other() {
    let (leases, _) = leases();
    leases.begin(4, 4);
    let first = leases.guard(1, &[1, 2]);
    let second = leases.queued(2, &[2, 3]);
    let third = leases.queued(3, &[1, 3]);
    drop(leases.guard(4, &[4]));
    drop(first);
    assert!(leases.recalls(&third).is_some(), "not before the second");
    assert!(leases.recalls(&second).is_none());
    drop(second.into_guard());
    assert!(leases.recalls(&third).is_none());
}

#[test]
fn no_change_begins_while_leases_of_an_earlier_server_may_last() {
    let hand = Arc::new(Hand::default());
    let leases =
        Arc::new(Leases::new(hand.clone(), Duration::from_secs(5), Duration::from_secs(5), IN_USE));
    leases.begin(1, 1);
    drop(leases.queued(1, &[1]));
    let (runtime, position) = (runtime(), leases.ask(1, Wants::Lease, vec![1]));
    let _inside = runtime.enter();
    assert!(poll(pin!(position.wait(NO_ONE))).is_none(), "and nobody decides about it alone");
    drop(position);
    hand.set(5);
    leases.begin(1, 1);
    drop(leases.guard(1, &[1]));
}

#[test]
fn a_returned_write_lease_is_free_when_earlier_changes_are_applied() {
    let (leases, hand) = leases();
    assert_eq!(leases.lease(1, &[10, 11]), [10, 11]);
    assert!(leases.grant(1, 10) && !leases.grant(2, 10), "it is alone");
    assert!(leases.is_readable(1, &[10]) && !leases.is_readable(2, &[9, 10]));
    let reader = leases.ask(2, Wants::Read, vec![10]);
    assert_eq!(leases.recalls(&reader), Some(Recalls::from_iter([(1, vec![10])])));
    hand.set(1);
    assert!(!leases.renew(1).0);
    leases.give_back(1, &[10], Some(2));
    assert!(leases.renew(1).0, "it has answered");
    assert_eq!(
        leases.recalls(&reader),
        Some(Recalls::default()),
        "its changes are still to be applied"
    );
    leases.guard(1, &[10]).done(1);
    assert!(leases.recalls(&reader).is_some());
    leases.refused(1, 2);
    assert!(leases.recalls(&reader).is_none());
    assert_eq!(leases.held_by(1), (1, 1));
    leases.give_back(1, &[11], Some(3));
    let again = leases.ask(1, Wants::Lease, vec![11]);
    assert_eq!(leases.recalls(&again), Some(Recalls::default()), "what it is about to lose");
    leases.refused(1, 3);
    assert_eq!(leases.progress(again.waiter), Progress::Begun(vec![11]));
    assert_eq!(
        leases.refusal(1, true, &[10]),
        Progress::Broken,
        "an early-acknowledged change without a lease"
    );
}

#[test]
fn a_change_under_another_sessions_write_lease_is_busy() {
    let (leases, _) = leases();
    assert!(leases.grant(3, 20));
    assert_eq!(leases.lease(1, &[10]), [10]);
    assert_eq!(leases.refusal(2, false, &[10, 11]), Progress::Busy);
    let asking = leases.ask(2, Wants::Lease, vec![10, 20]);
    assert_eq!(leases.refusal(3, false, &[20]), Progress::Busy, "another waits for it");
    drop(leases.guard(1, &[10]));
    assert_eq!(
        leases.recalls(&asking),
        Some(Recalls::from_iter([(1, vec![10]), (3, vec![20])])),
        "early-acknowledged changes pass the queue, and waiters for leases are not in their own way"
    );
    drop(leases.queued(2, &[20]));
    leases.give_back(1, &[10], None);
    leases.give_back(3, &[20], None);
    assert_eq!(leases.progress(asking.waiter), Progress::Begun(vec![10, 20]));
}

#[test]
fn a_waiter_for_leases_waits_for_those_too_that_it_does_not_get() {
    let (leases, _) = leases();
    assert_eq!(leases.lease(1, &[11]), [11]);
    let asking = leases.ask_for_leases(2, vec![10, 11], vec![11]);
    assert_eq!(leases.recalls(&asking), Some(Recalls::from_iter([(1, vec![11])])));
    assert_eq!(leases.refusal(3, false, &[11]), Progress::Busy);
    leases.give_back(1, &[11], None);
    assert_eq!(leases.progress(asking.waiter), Progress::Begun(vec![10]));
    assert_eq!(leases.held_by(2), (1, 1));
}

#[test]
fn a_recall_never_overtakes_the_answer_that_grants() {
    let (leases, _) = leases();
    let asking = leases.ask(1, Wants::Lease, vec![10]);
    assert_eq!(leases.progress(asking.waiter), Progress::Begun(vec![10]));
    let other = leases.ask(2, Wants::Lease, vec![10]);
    assert_eq!(leases.recalls(&other), Some(Recalls::default()));
    leases.grant_sent(1, &[10]);
    assert_eq!(leases.recalls(&other), Some(Recalls::from_iter([(1, vec![10])])));
    // The recall may be lost with the connection.
    leases.begin(1, 1);
    assert_eq!(leases.recalls(&other), Some(Recalls::from_iter([(1, vec![10])])));
    let again = leases.ask(1, Wants::Lease, vec![10]);
    assert!(leases.recalls(&again).is_some(), "behind the other");
    leases.give_back(1, &[10], None);
    assert_eq!(leases.progress(other.waiter), Progress::Begun(vec![10]));
}

#[test]
fn a_slow_client_that_answers_and_always_owes_something_is_not_fenced() {
    let (leases, hand) = leases();
    let inos: Vec<Ino> = (10..40).collect();
    assert_eq!(leases.lease(1, &inos), inos);
    let mut readers = Vec::new();
    for (secs, ino) in (0..).zip(&inos) {
        hand.set(secs);
        leases.renew(2);
        readers.push((*ino, leases.ask(2, Wants::Read, vec![*ino])));
        assert!(leases.recalls(&readers.last().unwrap().1).is_some());
        // A term has five seconds. Each answer takes two, and each ping comes between two recalls.
        if secs >= 2 {
            assert!(!leases.renew(1).0, "no ping renews anything");
            let (ino, reader) = readers.remove(0);
            leases.give_back(1, &[ino], None);
            assert!(leases.recalls(&reader).is_none());
        }
        assert!(readers.iter().all(|(_, reader)| leases.recalls(reader).is_some()), "{secs}");
    }
    assert_eq!(leases.epoch(1), 0, "it has lost nothing");
    // Once it is silent, others wait for a term.
    hand.set(34);
    let reader = leases.ask(3, Wants::Read, vec![39]);
    assert!(leases.recalls(&reader).is_none());
    assert_eq!((leases.held_by(1), leases.epoch(1)), ((0, 0), 1));
}

#[test]
fn a_session_that_reconnects_and_never_answers_a_recall_is_fenced() {
    let (leases, hand) = leases();
    assert_eq!(leases.lease(1, &[10, 11]), [10, 11]);
    let reader = leases.ask(2, Wants::Read, vec![10]);
    // A term has five seconds. It connects again within each, and a waiter recalls again.
    for secs in [0, 4, 8] {
        hand.set(secs);
        leases.begin(1, 1);
        leases.begin(2, 2);
        assert_eq!(leases.recalls(&reader), Some(Recalls::from_iter([(1, vec![10])])), "{secs}");
    }
    hand.set(12);
    leases.begin(1, 1);
    assert!(!leases.grant(1, 20), "it must not rely on a lease of a term that is over");
    leases.begin(2, 2);
    assert!(leases.recalls(&reader).is_none(), "not for ever");
    assert_eq!((leases.held_by(1), leases.epoch(1)), ((0, 0), 1));
}

#[test]
fn a_recall_that_nobody_waits_for_any_more_is_not_owed_over_a_new_connection() {
    let (leases, hand) = leases();
    assert_eq!(leases.lease(1, &[10]), [10]);
    let reader = leases.ask(2, Wants::Read, vec![10]);
    assert!(leases.recalls(&reader).is_some());
    leases.begin(1, 1);
    drop(reader);
    hand.set(4);
    assert!(leases.renew(1).0, "no recall is open");
    hand.set(100);
    leases.begin(1, 1);
    leases.begin(2, 2);
    let reader = leases.ask(2, Wants::Read, vec![10]);
    assert_eq!(leases.recalls(&reader), Some(Recalls::from_iter([(1, vec![10])])));
}

#[test]
fn a_silent_session_is_fenced_but_not_while_its_change_is_applied() {
    let (leases, hand) = leases();
    assert_eq!(leases.lease(1, &[10, 11]), [10, 11]);
    hand.set(6);
    leases.begin(2, 2);
    leases.expire(&HashSet::from_iter([1, 2, 3]));
    let changing = leases.guard(1, &[11]);
    let reader = leases.ask(2, Wants::Read, vec![10]);
    assert!(leases.recalls(&reader).is_some(), "its change is being made");
    changing.done(1);
    assert!(leases.recalls(&reader).is_none());
    assert_eq!((leases.held_by(1), leases.epoch(1)), ((0, 0), 1));
    let Begin::Not(Progress::Dropped) = leases.begin_change(1, (Some(0), true), vec![11], NO_ONE)
    else {
        panic!("of an epoch that is over")
    };
    assert_eq!(leases.begin(1, 1), 1);
    leases.end_epoch(1, 0);
    assert_eq!(leases.epoch(1), 1, "ended once");
}

#[test]
fn a_client_has_the_write_lease_of_what_it_makes() {
    let (leases, _) = leases();
    assert!(leases.grant_new(1, 10));
    assert!(!leases.grant_new(2, 10) && !leases.grant(2, 10));
    drop(leases.guard(1, &[10]));
    leases.revoke_new(1, 10);
    assert!(leases.grant(2, 10));
    // It may be returned before it is made.
    leases.give_back(1, &[11, 12], Some(3));
    leases.refused(1, 2);
    assert!(leases.grant_new(1, 11));
    leases.refused(1, 3);
    assert!(leases.grant_new(1, 12));
    assert_eq!((leases.held_by(1), leases.is_readable(2, &[11])), ((1, 1), true));
}

#[test]
fn a_server_that_stops_knows_whether_it_has_all_leases_back() {
    let (leases, hand) = leases();
    assert_eq!(leases.relied_on(), (false, false));
    assert!(leases.grant(1, 10) && leases.grant(2, 10) && leases.grant(2, 11));
    assert_eq!(leases.lease(3, &[12]), [12]);
    assert_eq!(leases.relied_on(), (true, true));
    let mut recalls = leases.close();
    recalls.values_mut().for_each(|inos| inos.sort_unstable());
    assert_eq!(recalls, Recalls::from_iter([(1, vec![10]), (2, vec![10, 11]), (3, vec![12])]));
    assert_eq!(leases.close(), Recalls::default(), "asked once");
    assert!(!leases.grant(1, 13) && leases.lease(1, &[13]).is_empty(), "nothing more is given");
    leases.give_back(1, &[10], None);
    leases.give_back(3, &[12], Some(5));
    assert_eq!(leases.relied_on(), (true, true), "some of its changes are still to be made");
    leases.refused(3, 5);
    assert_eq!(leases.relied_on(), (true, false));
    hand.set(5);
    assert_eq!(leases.relied_on(), (false, false), "its term is over");

    let (leases, hand) = self::leases();
    assert_eq!(leases.lease(3, &[12]), [12]);
    assert_eq!(leases.close(), Recalls::from_iter([(3, vec![12])]));
    hand.set(5);
    assert_eq!(leases.relied_on(), (false, true), "what it has acknowledged it may still send");
}

#[test]
fn repeated_returns_behind_one_change_are_one_entry() {
    let mut table = Table::default();
    table.begin(1, 1, Duration::ZERO);
    for ino in 0..1000 {
        table.give_back(1, &[10 + ino], Some(7), Duration::ZERO);
    }
    assert_eq!(table.holders[&1].returning.len(), 1);
    table.give_back(1, &[9], Some(8), Duration::ZERO);
    assert_eq!(table.holders[&1].returning.len(), 2);
    table.end_change(1, Some(8));
    assert!(table.holders[&1].returning.is_empty());
}

#[test]
fn a_client_that_ignores_recalls_gets_no_leases_for_growing_times() {
    const TERM: u64 = 5;
    let (leases, hand) = leases();
    let mut now = 0;
    // Session 1 has a lease and sends signs of life, but does not answer the recall. Session 2
    // changes the inode.
    let mut ignores = |answers: bool| {
        assert!(leases.grant(1, 7), "at {now}");
        let position = leases.queued(2, &[7]);
        now += 1;
        hand.set(now);
        assert!(!leases.renew(1).0);
        if answers {
            leases.give_back(1, &[7], None);
        } else {
            now += TERM - 1;
            hand.set(now);
            assert!(!leases.renew(1).0 && leases.renew(2).0);
        }
        assert!(matches!(leases.progress(position.waiter), Progress::Begun(_)));
        position.into_guard().done(1);
        assert!(leases.renew(1).0, "it goes on, without what it had");
        // For how long it gets nothing.
        let begun = now;
        while !leases.grant(1, 7) {
            assert!(leases.is_barred(1));
            let position = leases.ask(1, Wants::Lease, vec![8]);
            assert_eq!(leases.progress(position.waiter), Progress::Begun(vec![]));
            now += 1;
            hand.set(now);
            leases.renew(1);
            leases.renew(2);
        }
        now - begun
    };
    let times = [false; 5].map(&mut ignores);
    assert_eq!(times, [0, TERM, 2 * TERM, 4 * TERM, 8 * TERM]);
    // An answer in time, and all is forgotten.
    assert_eq!([true, false, false].map(&mut ignores), [0, 0, TERM]);
}

#[test]
fn a_fence_delays_no_other_session_and_frees_leases_only_when_recorded() {
    let (leases, hand) = leases();
    let fencing = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&fencing);
    leases.on_fence(Box::new(move |session, one| told.lock().push((session, one))));
    assert_eq!(leases.lease(1, &[10, 11]), [10, 11]);
    assert!(leases.grant(2, 12));
    hand.set(20);
    leases.begin(2, 2);
    leases.begin(3, 3);
    assert!(leases.grant(2, 12));
    let position = leases.ask(2, Wants::Lease, vec![10, 12]);
    let reader = leases.ask(3, Wants::Read, vec![11]);
    assert_eq!(leases.recalls(&position), Some(Recalls::default()));
    assert_eq!(leases.recalls(&reader), Some(Recalls::default()));
    let (session, one) = fencing.lock().pop().unwrap();
    assert!(session == 1 && fencing.lock().is_empty(), "once");
    // The volume takes its time. Others go on. The fenced session is back, and has nothing.
    assert!(leases.grant(3, 13) && leases.renew(3).0);
    assert_eq!(leases.begin(1, 1), 1, "its epoch has ended");
    assert!(leases.renew(1).0 && !leases.grant(1, 14) && !leases.grant_new(1, 15));
    assert_eq!(leases.refusal(1, true, &[10]), Progress::Broken);
    assert_eq!(leases.refusal(1, false, &[10]), Progress::Busy);
    leases.give_back(1, &[10, 11], None);
    leases.expire(&HashSet::from_iter([1, 2, 3]));
    assert!(leases.recalls(&position).is_some() && leases.recalls(&reader).is_some());
    one.done();
    assert_eq!(leases.progress(position.waiter), Progress::Begun(vec![10, 12]));
    assert_eq!(leases.progress(reader.waiter), Progress::Begun(Vec::new()));
    assert_eq!(leases.held_by(1), (0, 0));
    assert!(leases.grant(1, 14));
}

#[test]
fn a_client_that_ignores_recalls_gets_no_leases_in_a_new_session_either() {
    let (leases, hand) = leases();
    let alive = HashSet::default();
    let mut now = 0;
    let mut ignores = |session: SessionId, client: ClientId| {
        leases.begin(session, client);
        assert_eq!(leases.lease(session, &[10]), [10]);
        let reader = leases.ask(2, Wants::Read, vec![10]);
        assert!(leases.recalls(&reader).is_some_and(|recalls| recalls.contains_key(&session)));
        now += 6;
        hand.set(now);
        assert!(leases.recalls(&reader).is_none(), "its term is over");
        leases.end(session);
        leases.expire(&alive);
    };
    let barred = |session: SessionId, client: ClientId| {
        leases.begin(session, client);
        leases.is_barred(session)
    };
    ignores(11, 7);
    assert!(!barred(12, 7), "a connection may just have been lost");
    ignores(13, 7);
    assert!(barred(14, 7) && !leases.grant(14, 20) && !barred(15, 8));
    // A client with several sessions answers in one, and ignores in the others.
    ignores(16, 8);
    leases.begin(17, 8);
    assert_eq!(leases.lease(17, &[10]), [10]);
    let reader = leases.ask(2, Wants::Read, vec![10]);
    assert!(leases.recalls(&reader).is_some());
    leases.give_back(17, &[10], None);
    drop(reader);
    leases.end(17);
    ignores(18, 8);
    assert!(barred(19, 8));
    hand.set(5000);
    leases.expire(&alive);
    assert!(!barred(20, 7) && leases.shared.lock().table.forgives_all());
}
