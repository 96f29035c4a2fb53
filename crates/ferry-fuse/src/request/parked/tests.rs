use super::*;
use crate::abi::op;
use crate::request::counters::MountCounters;

/// Remembers what was answered.
#[derive(Default)]
struct Answers(Mutex<Vec<(u64, i32)>>);

impl AnswerPort for Answers {
    fn answer(&self, unique: u64, _slot: u32, error: i32, _body: AnswerBytes<'_>) {
        self.0.lock().push((unique, error));
    }
}

struct Bench {
    table: Arc<ParkTable>,
    answers: Arc<Answers>,
    port: Arc<dyn AnswerPort>,
}

impl Bench {
    fn new() -> Self {
        let answers = Arc::new(Answers::default());
        let table = Arc::new(ParkTable::new(MountCounters::default().block(), Arc::default()));
        Self { table, port: Arc::clone(&answers) as Arc<dyn AnswerPort>, answers }
    }

    fn park(&self, unique: u64, interrupt: Option<Interrupt>) -> Complete {
        self.park_for(0, unique, interrupt)
    }

    fn park_for(&self, pid: u32, unique: u64, interrupt: Option<Interrupt>) -> Complete {
        let parker = RequestParker {
            begun: crate::request::idle_poll::now(),
            table: &self.table,
            port: &self.port,
            unique,
            slot: 0,
            replayed: None,
            form: AnswerForm { opcode: op::FSYNC, size: 0 },
            pid,
            reads: None,
            parked: AtomicBool::new(false),
        };
        parker.park(interrupt)
    }

    fn answers(&self) -> Vec<(u64, i32)> {
        self.answers.0.lock().clone()
    }
}

fn counted() -> (Arc<Mutex<u32>>, Interrupt) {
    let count = Arc::new(Mutex::new(0));
    let shared = Arc::clone(&count);
    (count, Box::new(move || *shared.lock() += 1))
}

#[test]
fn an_answer_is_sent_once_and_a_later_interrupt_does_nothing() {
    let b = Bench::new();
    let (count, interrupt) = counted();
    b.park(2, Some(interrupt))(Ok(Reply::Empty));
    b.table.settled(2);
    b.table.interrupt(2);
    assert_eq!(b.answers(), [(2, 0)]);
    assert_eq!(*count.lock(), 0);
}

#[test]
fn an_interrupt_answers_at_once_and_a_later_answer_is_dropped() {
    let b = Bench::new();
    let (count, interrupt) = counted();
    let complete = b.park(2, Some(interrupt));
    b.table.settled(2);
    b.table.interrupt(2);
    complete(Ok(Reply::Empty));
    assert_eq!(b.answers(), [(2, -libc::EINTR)]);
    assert_eq!(*count.lock(), 1);
}

#[test]
fn an_early_interrupt_takes_effect_when_the_operation_returns() {
    let b = Bench::new();
    let (count, interrupt) = counted();
    b.table.interrupt(2);
    let _complete = b.park(2, Some(interrupt));
    assert_eq!(
        (b.answers().len(), *count.lock()),
        (0, 0),
        "the file system may hold locks while it parks"
    );
    b.table.settled(2);
    assert_eq!(b.answers(), [(2, -libc::EINTR)]);
    assert_eq!(*count.lock(), 1);
}

#[test]
fn an_interrupt_between_parking_and_returning_is_not_lost() {
    let b = Bench::new();
    let _complete = b.park(2, None);
    b.table.interrupt(2);
    b.table.settled(2);
    assert_eq!(b.answers(), [(2, -libc::EINTR)]);
}

/// A process that waits until it is killed.
fn sleeper() -> std::process::Child {
    std::process::Command::new("sleep").arg("600").spawn().expect("sleep(1) is there")
}

fn wait_for(what: impl Fn() -> bool) {
    let env = ferry_env::Env::real();
    let end = env.clock.monotonic() + Duration::from_secs(20);
    while !what() {
        assert!(env.clock.monotonic() < end, "it does not happen");
        std::thread::yield_now();
    }
}

#[test]
fn a_wait_that_survived_a_signal_ends_when_the_process_is_killed() {
    let b = Bench::new();
    let mut process = sleeper();
    let (count, interrupt) = counted();
    let after = b.park_for(process.id(), 2, Some(interrupt));
    b.table.settled(2);
    b.table.interrupt(2);
    b.table.interrupt(4);
    let before = b.park_for(process.id(), 4, None);
    b.table.settled(4);
    assert_eq!(b.answers(), [], "it sleeps, and nobody has killed it");
    assert_eq!(b.table.watched.lock().requests.len(), 2);
    process.kill().expect("it is ours");
    process.wait().expect("it was killed");
    wait_for(|| b.table.len() == 0);
    wait_for(|| !b.table.watched.lock().watching);
    let mut answers = b.answers();
    answers.sort_unstable();
    assert_eq!(answers, [(2, -libc::EINTR), (4, -libc::EINTR)]);
    assert_eq!(*count.lock(), 1);
    drop((before, after));
}

#[test]
fn a_wait_whose_interrupt_never_arrived_ends_when_the_process_is_killed() {
    let b = Bench::new();
    let mut process = sleeper();
    let _complete = b.park_for(process.id(), 2, None);
    let _of_the_kernel = b.park_for(0, 4, None);
    (0..3).for_each(|turn| b.table.sweep(turn));
    assert_eq!(b.answers(), [], "nobody is being killed");
    process.kill().expect("it runs");
    process.wait().expect("it is killed");
    b.table.sweep(0);
    assert_eq!(b.answers(), [(2, -libc::EINTR)]);
}

#[test]
fn a_wait_that_survived_a_signal_gets_its_answer() {
    let b = Bench::new();
    let mut process = sleeper();
    let complete = b.park_for(process.id(), 2, None);
    b.table.settled(2);
    b.table.interrupt(2);
    complete(Ok(Reply::Empty));
    wait_for(|| !b.table.watched.lock().watching);
    assert_eq!(b.answers(), [(2, 0)]);
    assert!(b.table.watched.lock().requests.is_empty());
    process.kill().expect("it is ours");
    process.wait().expect("it was killed");
}

#[test]
fn the_end_of_the_mount_ends_the_watch() {
    let b = Bench::new();
    let mut process = sleeper();
    let complete = b.park_for(process.id(), 2, None);
    b.table.settled(2);
    b.table.interrupt(2);
    b.table.interrupt_all();
    wait_for(|| !b.table.watched.lock().watching);
    assert_eq!(b.answers(), [(2, -libc::EINTR)]);
    process.kill().expect("it is ours");
    process.wait().expect("it was killed");
    drop(complete);
}

#[test]
fn early_interrupts_are_bounded_and_the_newest_are_kept() {
    let b = Bench::new();
    let step = 2 * SHARDS as u64;
    let numbers: Vec<u64> = (1..=EARLY_MAX as u64 + 1).map(|i| i * step).collect();
    for &unique in &numbers {
        b.table.interrupt(unique);
    }
    let oldest = b.park(numbers[0], None);
    let newest = b.park(numbers[EARLY_MAX], None);
    b.table.settled(numbers[0]);
    b.table.settled(numbers[EARLY_MAX]);
    assert_eq!(b.answers(), [(numbers[EARLY_MAX], -libc::EINTR)]);
    drop((oldest, newest));
}

#[test]
fn the_end_of_the_mount_interrupts_ten_thousand_parked_requests() {
    let b = Bench::new();
    let parked: Vec<Complete> = (0..10_000).map(|i| b.park(2 * i, None)).collect();
    assert_eq!(b.table.len(), 10_000);
    b.table.interrupt_all();
    for complete in parked {
        complete(Ok(Reply::Empty));
    }
    let answers = b.answers();
    assert_eq!(answers.len(), 10_000);
    assert!(answers.iter().all(|&(_, error)| error == -libc::EINTR));
}

/// The kernel has a signal pending for all threads that does nothing, while one of them has all
/// signals blocked: a child ends while another one is started.
#[test]
fn a_signal_that_does_nothing_ends_no_wait() {
    let bit = |signal: i32| 1_u64 << (signal - 1);
    let status = |pending: u64, caught: u64| {
        format!(
            "SigPnd:\t0\nShdPnd:\t{pending:016x}\nSigBlk:\t0\nSigIgn:\t0\nSigCgt:\t{caught:016x}\n"
        )
    };
    let handled_or_deadly = ["SigIgn:", "SigBlk:"];
    for signal in [libc::SIGCHLD, libc::SIGCONT, libc::SIGWINCH, libc::SIGURG, libc::SIGSTOP] {
        let pending = status(bit(signal), 0);
        assert!(!says_signal_but(&pending, &["SigCgt:", "SigIgn:", "SigBlk:"]), "{signal}");
        assert!(!says_signal_but(&pending, &handled_or_deadly), "{signal}");
    }
    let handled = status(bit(libc::SIGCHLD), bit(libc::SIGCHLD));
    assert!(says_signal_but(&handled, &handled_or_deadly));
    assert!(!says_signal_but(&handled, &["SigCgt:", "SigIgn:", "SigBlk:"]));
    assert!(says_signal_but(&status(bit(libc::SIGTERM), 0), &["SigCgt:", "SigIgn:", "SigBlk:"]));
}
