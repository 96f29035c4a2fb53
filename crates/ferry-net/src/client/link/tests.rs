//! What is sent on a new connection.

use ferry_env::Env;

use std::io;

use super::restore::{Before, Restored};
use super::window::FOR_REQUESTS;
use super::*;
use crate::client::cache::{ATTR_VALID_MAX, NAME_VALID_MAX};
use crate::codec::{List, decode};
use crate::lanes;
use crate::message::{Acknowledged, Claim, Outcome, ToClient, WINDOW_OPS};
use crate::transport::Connecting;

struct Nowhere;

impl Connector for Nowhere {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async { Err(io::ErrorKind::ConnectionRefused.into()) })
    }
}

/// One open file, with locks or without.
struct OneFile {
    is_locked: bool,
}

const OPEN: OneFile = OneFile { is_locked: false };

fn pending(op: Op) -> Pending {
    Pending::unattended(op)
}

fn open() -> Op {
    Op::Open { ino: 5, fh: 1, flags: 0, kill_suidgid: false }
}

impl Restore for OneFile {
    fn restore(&self, _before: Before) -> Restored {
        Restored { first: vec![pending(open())], rest: Vec::new() }
    }
    fn has_locks(&self, of: Option<Ino>) -> bool {
        self.is_locked && of == Some(5)
    }
    fn claimed(&self, _inos: &[Claim], _stamp: u64) {}
    fn fatal(&self, _op: &Op) {}
    fn lost(&self, _changes: Vec<Pending>) {}
    fn busy(&self, _change: Pending) {}
    fn given_up(&self, _inos: Option<&[Ino]>) {}
    fn differs(&self, ino: Ino) {
        panic!("{ino}")
    }
    fn tick(&self) {}
}

/// A connection to the server in its given session: what was sent on it.
fn connect(link: &Link, session: u128, resumed: bool) -> lanes::Outgoing<()> {
    connect_with(link, (session, resumed), &OPEN)
}

fn connect_with(
    link: &Link,
    (session, resumed): (u128, bool),
    restore: &dyn Restore,
) -> lanes::Outgoing<()> {
    let (line, sent) = lanes::line();
    // The connection before is closed.
    link.state.lock().phase.disconnect(Duration::ZERO);
    link.enter(welcome(session, resumed), &line, restore).expect("welcome");
    sent
}

fn welcome(session: u128, resumed: bool) -> ToClient {
    ToClient::Welcome {
        session,
        boot: 1,
        resumed,
        applied: 0,
        durable: 0,
        read_only: false,
        early_acks: true,
        term_ms: 1000,
        epoch: 0,
        now: ferry_fs::Timestamp(0),
        mark: None,
        former: None,
    }
}

fn sent(link: &Link, line: &mut lanes::Outgoing<()>) -> Vec<ToServer> {
    link.send_now();
    let mut messages = Vec::new();
    while let Some((frames, ())) = line.try_recv() {
        let mut rest = frames.as_slice();
        while let Some((head, tail)) = rest.split_first_chunk() {
            let (frame, behind) = tail.split_at(u32::from_le_bytes(*head) as usize);
            messages.push(decode(frame).expect("a message"));
            rest = behind;
        }
    }
    messages
}

fn link() -> Arc<Link> {
    link_by(Env::real().clock)
}

fn link_by(clock: Arc<dyn Clock>) -> Arc<Link> {
    let names = (b"/".to_vec(), b"test".to_vec());
    let caches = (Arc::new(Cache::new(Arc::clone(&clock))), Arc::default());
    Link::new(Arc::new(Nowhere), clock, names, Duration::ZERO, caches, None)
}

fn pong(epoch: u32) -> ToClient {
    ToClient::Pong { number: 1, renewed: true, epoch, durable: 0, now: ferry_fs::Timestamp(0) }
}

fn answer(seq: u64) -> ToClient {
    ToClient::Changed {
        seq,
        after: List::default(),
        empty: false,
        made: None,
        outcome: Outcome::Done {},
    }
}

fn changes(messages: Vec<ToServer>) -> Vec<Op> {
    messages
        .into_iter()
        .filter_map(|m| if let ToServer::Change { op, .. } = m { Some(op) } else { None })
        .collect()
}

#[test]
fn a_welcome_that_comes_behind_the_end_of_the_mount_connects_nothing() {
    let link = link();
    link.close();
    let (line, mut outgoing) = lanes::line();
    link.enter(welcome(1, false), &line, &OPEN).expect_err("the mount has ended");
    assert!(link.state.lock().phase.is_closed());
    assert!(sent(&link, &mut outgoing).is_empty());
}

#[test]
fn restoring_and_releasing_changes_are_never_abandoned() {
    let link = link();
    drop(connect(&link, 1, false));
    let unlock = Op::Unlock { ino: 5, lock: ferry_fs::FileLock::default() };
    let mut line = connect(&link, 2, false);
    assert_eq!(
        changes(sent(&link, &mut line)),
        [open()],
        "a new session is brought to where the old one was"
    );
    let abandoned = link.change(pending(Op::Nothing {})).expect("connected");
    let unlocking = link.change(pending(unlock.clone())).expect("connected");
    link.abandon(abandoned);
    link.abandon(unlocking);
    assert!(!link.leave());
    link.give_up_if_overdue();
    let mut line = connect(&link, 2, true);
    assert_eq!(changes(sent(&link, &mut line)), [open(), Op::Nothing {}, unlock]);
}

#[test]
fn changes_behind_a_lock_that_ends_the_server_are_not_made() {
    for (is_locked, then) in [(false, mkdir("name")), (true, Op::Nothing {})] {
        let link = link();
        drop(connect(&link, 1, false));
        let mut line = connect_with(&link, (2, false), &OneFile { is_locked });
        link.change(pending(mkdir("name"))).expect("connected");
        assert_eq!(changes(sent(&link, &mut line)), [open(), mkdir("name")]);
        link.receive(ToClient::Fatal { seq: 1 }, &OneFile { is_locked }).expect("it was sent");
        assert!(!link.leave());
        let mut line = connect_with(&link, (2, true), &OneFile { is_locked });
        assert_eq!(changes(sent(&link, &mut line)), [Op::Nothing {}, then]);
    }
}

#[test]
fn a_lock_request_stands_behind_all_earlier_changes() {
    let link = link();
    let mut line = connect(&link, 1, false);
    let room = WINDOW_OPS - FOR_REQUESTS.0;
    let changes = room as u64 + 1;
    for _ in 0..changes {
        link.change(pending(Op::Nothing {}));
    }
    let lock = Op::Lock { ino: 5, lock: ferry_fs::FileLock::default(), wait: true };
    let key = link.request(pending(lock.clone())).expect("connected");
    assert_eq!(
        sent(&link, &mut line).len(),
        room,
        "the last change has no room yet, and the request waits for it"
    );
    link.receive(answer(1), &OPEN).expect("in order");
    let more = sent(&link, &mut line);
    assert!(
        matches!(more[..], [ToServer::Change { .. }, ToServer::Request { after, .. }] if after == changes)
    );
    // Cancelled, it is asked for again only to learn what became of it.
    link.abandon(key);
    assert!(!link.leave());
    let mut line = connect(&link, 1, true);
    loop {
        let seq = link.state.lock().changes.answered() + 1;
        if link.receive(answer(seq), &OPEN).is_err() {
            break;
        }
    }
    let again = sent(&link, &mut line);
    assert!(matches!(
        again[again.len() - 2..],
        [ToServer::Request { .. }, ToServer::Cancel { .. }]
    ));
}

/// What the link says of early-acknowledged changes.
#[derive(Default)]
struct Told {
    lost: Mutex<Vec<Op>>,
    busy: Mutex<Vec<Op>>,
}

impl Restore for Told {
    fn restore(&self, _before: Before) -> Restored {
        Restored::default()
    }
    fn claimed(&self, _inos: &[Claim], _stamp: u64) {}
    fn fatal(&self, _op: &Op) {}
    fn lost(&self, changes: Vec<Pending>) {
        self.lost.lock().extend(changes.into_iter().map(|change| change.op));
    }
    fn busy(&self, change: Pending) {
        self.busy.lock().push(change.op);
    }
    fn given_up(&self, _inos: Option<&[Ino]>) {}
    fn differs(&self, ino: Ino) {
        panic!("{ino}")
    }
    fn tick(&self) {}
}

fn mkdir(name: &str) -> Op {
    Op::Mkdir { parent: 1, name: name.into(), mode: 0 }
}

fn acknowledged(op: Op, ino: Ino) -> Pending {
    let Pending { caller, waiter, .. } = pending(Op::Nothing {});
    Pending::acknowledged(caller, op, waiter, Acknowledged { at: ferry_fs::Timestamp(1), ino })
}

/// `true`: there is no more room.
fn acknowledge(link: &Link, name: &str, ino: Ino) -> bool {
    let pending = Pending { touched: vec![1, ino], ..acknowledged(mkdir(name), ino) };
    let _cache = link.cache.lock();
    link.early_acks().expect("connected").acknowledge(pending)
}

fn failed(seq: u64) -> ToClient {
    let outcome = Outcome::Failed { errno: libc::ESTALE };
    ToClient::Changed { seq, after: List::default(), empty: false, made: None, outcome }
}

/// A directory is made in another directory.
fn acknowledge_in(link: &Link, parent: Ino, name: &str, ino: Ino) {
    let op = Op::Mkdir { parent, name: name.into(), mode: 0 };
    let pending = Pending { touched: vec![parent, ino], ..acknowledged(op, ino) };
    let _cache = link.cache.lock();
    link.early_acks().expect("connected").acknowledge(pending);
}

fn dropped(seq: u64) -> ToClient {
    let outcome = Outcome::Dropped {};
    ToClient::Changed { seq, after: List::default(), empty: false, made: None, outcome }
}

#[test]
fn a_refused_change_loses_only_its_dependents() {
    let (link, told) = (link(), Told::default());
    let mut line = connect(&link, 1, false);
    acknowledge_in(&link, 1, "a", 10);
    acknowledge_in(&link, 1, "b", 11);
    let release = Op::Release { fh: 7 };
    link.change(pending(release.clone())).expect("connected");
    acknowledge_in(&link, 2, "other", 12);
    acknowledge_in(&link, 11, "below b", 13);
    acknowledge_in(&link, 12, "below other", 14);
    acknowledge_in(&link, 13, "below that", 15);
    assert_eq!(changes(sent(&link, &mut line)).len(), 7);
    link.receive(answer(1), &told).expect("in order");
    link.receive(failed(2), &told).expect("in order");
    let made = |parent, name: &str| Op::Mkdir { parent, name: name.into(), mode: 0 };
    let lost = [made(1, "b"), made(11, "below b"), made(13, "below that")];
    assert_eq!(*told.lost.lock(), lost);
    // What does not depend on it is sent again in the next epoch, and the leases go back behind
    // that.
    let mut again = Vec::new();
    let mut returned_behind = Vec::new();
    for message in sent(&link, &mut line) {
        match message {
            ToServer::Change { seq, epoch, op, acknowledged, .. } => {
                again.push((seq, epoch, op, acknowledged.map(|acknowledged| acknowledged.ino)));
            }
            ToServer::Returned { after, .. } => returned_behind.push(after),
            _ => {}
        }
    }
    let expected = [
        (8, 1, release, None),
        (9, 1, made(2, "other"), Some(12)),
        (10, 1, made(12, "below other"), Some(14)),
    ];
    assert_eq!(again, expected);
    assert!(returned_behind.iter().all(|after| *after == 10), "{returned_behind:?}");
    (3..=7).for_each(|seq| assert!(link.receive(dropped(seq), &told).expect("in order")));
    (8..=10).for_each(|seq| assert!(link.receive(answer(seq), &told).expect("in order")));
    assert_eq!(told.lost.lock().len(), 3, "each once");
    assert_eq!(link.json()["early_acknowledged"], 0);
}

#[test]
fn a_fenced_session_loses_all_unanswered_early_acknowledged_changes() {
    let (link, told) = (link(), Told::default());
    let mut line = connect(&link, 1, false);
    acknowledge_in(&link, 1, "a", 10);
    acknowledge_in(&link, 2, "b", 11);
    assert_eq!(changes(sent(&link, &mut line)).len(), 2);
    link.receive(dropped(1), &told).expect("in order");
    assert_eq!(told.lost.lock().len(), 2);
    assert!(changes(sent(&link, &mut line)).is_empty(), "the leases are gone");
}

/// More operations restore a session than the window holds; the last ones are not acknowledged.
struct Much {
    acknowledged: u64,
    others: u64,
}

impl Restore for Much {
    fn restore(&self, _before: Before) -> Restored {
        let acknowledged = (0..self.acknowledged)
            .map(|n| Pending { touched: vec![1], ..acknowledged(mkdir("again"), 100 + n) });
        let first = acknowledged.chain((0..self.others).map(|_| pending(open()))).collect();
        Restored { first, rest: Vec::new() }
    }
    fn claimed(&self, _inos: &[Claim], _stamp: u64) {}
    fn fatal(&self, _op: &Op) {}
    fn lost(&self, _changes: Vec<Pending>) {}
    fn busy(&self, _change: Pending) {}
    fn given_up(&self, _inos: Option<&[Ino]>) {}
    fn differs(&self, ino: Ino) {
        panic!("{ino}")
    }
    fn tick(&self) {}
}

/// The epoch ends while `much` restores a session: the messages that are sent behind that until all
/// changes are answered.
fn an_epoch_ends_while(much: &Much) -> Vec<ToServer> {
    let link = link();
    drop(connect(&link, 1, false));
    let mut sent_on = connect_with(&link, (2, false), much);
    link.request(pending(Op::Getattr { ino: 20 })).expect("connected");
    sent(&link, &mut sent_on);
    link.receive(pong(1), much).expect("a new epoch");
    link.request(pending(Op::Getattr { ino: 21 })).expect("connected");
    let mut messages = sent(&link, &mut sent_on);
    while link.state.lock().changes.len() > 0 {
        let seq = link.state.lock().changes.answered() + 1;
        link.receive(answer(seq), much).expect("in order");
        messages.extend(sent(&link, &mut sent_on));
    }
    messages
}

#[test]
fn requests_continue_when_an_epoch_ends_during_restoring() {
    let much = Much { acknowledged: 3 * WINDOW_OPS as u64, others: 0 };
    let asked: Vec<Op> = (an_epoch_ends_while(&much).into_iter())
        .filter_map(|m| if let ToServer::Request { op, .. } = m { Some(op) } else { None })
        .collect();
    assert_eq!(asked, [Op::Getattr { ino: 20 }, Op::Getattr { ino: 21 }]);
}

#[test]
fn requests_stay_behind_restoring_changes_when_an_epoch_ends() {
    let much = Much { acknowledged: 10, others: 100 };
    let messages = an_epoch_ends_while(&much);
    let asked = messages.iter().position(|m| matches!(m, ToServer::Request { .. })).expect("sent");
    let opens = |m: &&ToServer| matches!(m, ToServer::Change { op: Op::Open { .. }, .. });
    assert_eq!(messages[..asked].iter().filter(opens).count(), 100);
    let ToServer::Request { after, .. } = &messages[asked] else { unreachable!("it is one") };
    let newest = messages.iter().rev().find_map(|m| match m {
        ToServer::Change { seq, .. } => Some(*seq),
        _ => None,
    });
    assert_eq!(Some(*after), newest);
}

#[test]
fn lease_returns_and_requests_stand_behind_changes_of_their_inodes() {
    let link = link();
    let mut line = connect(&link, 1, false);
    acknowledge(&link, "a", 10);
    acknowledge(&link, "b", 11);
    link.change(pending(Op::Nothing {})).expect("connected");
    link.request(pending(Op::Getattr { ino: 10 })).expect("connected");
    link.request(pending(Op::Getattr { ino: 20 })).expect("connected");
    assert!(
        link.receive(ToClient::Recall { inodes: List(vec![1]) }, &Told::default())
            .expect("in order")
    );
    link.give_back(&[20]);
    let afters: Vec<u64> = sent(&link, &mut line)
        .into_iter()
        .filter_map(|message| match message {
            ToServer::Change { .. } => None,
            ToServer::Request { after, .. } | ToServer::Returned { after, .. } => Some(after),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(afters, [2, 0, 1, 0], "what is given back passes all else, and says behind what");
}

#[test]
fn lease_returns_pass_changes_that_have_no_room_in_the_window() {
    let link = link();
    let mut line = connect(&link, 1, false);
    let most = WINDOW_OPS as u64;
    (0..most).for_each(|i| {
        acknowledge(&link, "x", i + 10);
    });
    // Behind a change that the server decides.
    let borrowed = vec![most + 9];
    link.change(Pending { borrowed, ..pending(Op::Nothing {}) }).expect("connected");
    let messages = sent(&link, &mut line);
    let returned = ToServer::Returned { inodes: List(vec![most + 9]), after: most + 1 };
    assert_eq!(messages.iter().filter(|message| **message == returned).count(), 1, "at once");
    let newest = |messages: &[ToServer]| match messages.last() {
        Some(ToServer::Change { seq, .. }) => *seq,
        other => panic!("{other:?}"),
    };
    let under_way = newest(&messages);
    assert!(under_way < most);
    // The server waits for that number, whatever becomes of the changes.
    let told = Told::default();
    assert!(link.receive(pong(1), &told).expect("in order"));
    for seq in 1..=under_way {
        let dropped = Outcome::Dropped {};
        let (after, empty, made) = (List::default(), false, None);
        let changed = ToClient::Changed { seq, after, empty, made, outcome: dropped };
        assert!(link.receive(changed, &told).expect("in order"));
    }
    let rest = sent(&link, &mut line);
    let seqs: Vec<u64> = rest
        .iter()
        .map(|message| match message {
            ToServer::Change { seq, op, .. } if *op == Op::Nothing {} => *seq,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(seqs[..(most + 1 - under_way) as usize], Vec::from_iter(under_way + 1..=most + 1));
}

#[test]
fn a_change_that_is_refused_for_anothers_leases_is_handed_back() {
    let (link, told) = (link(), Told::default());
    drop(connect(&link, 1, false));
    link.change(pending(mkdir("a"))).expect("connected");
    let outcome = Outcome::Busy {};
    link.receive(
        ToClient::Changed { seq: 1, after: List::default(), empty: false, made: None, outcome },
        &told,
    )
    .expect("in order");
    assert_eq!(*told.busy.lock(), [mkdir("a")]);
    assert!(told.lost.lock().is_empty());
}

type Done = Box<dyn FnOnce() + Send>;

/// A kernel that forgets when it is told to go on.
#[derive(Default)]
struct SlowKernel(Mutex<Vec<(Vec<Ino>, Done)>>);

impl SlowKernel {
    fn resume(&self) -> Vec<Ino> {
        let (inodes, done) = self.0.lock().remove(0);
        done();
        inodes
    }
}

impl ferry_fs::Host for SlowKernel {
    fn invalidate_attributes(&self, _ino: Ino) {}
    fn forget(&self, what: ferry_fs::ToForget, done: Done) {
        self.0.lock().push((what.inodes, done));
    }
    fn forget_contents(&self, _files: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forget_all(&self, _known: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forgets_names(&self) -> bool {
        true
    }
    fn stats(&self) -> Value {
        Value::Null
    }
}

fn returned(messages: &[ToServer]) -> Vec<Ino> {
    let inodes = |message: &ToServer| match message {
        ToServer::Returned { inodes, .. } => inodes.0.clone(),
        _ => Vec::new(),
    };
    messages.iter().flat_map(inodes).collect()
}

fn recall_of(ino: Ino) -> ToClient {
    ToClient::Recall { inodes: List(vec![ino]) }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_returned_after_the_kernel_has_dropped_its_cache() {
    let (link, kernel) = (link(), Arc::new(SlowKernel::default()));
    link.kernel.attach(
        Arc::clone(&kernel) as Arc<dyn ferry_fs::Host>,
        crate::rt::runtime::Handle::current(),
    );
    link.cache.drop_all();
    let mut line = connect(&link, 1, false);
    sent(&link, &mut line);
    let learn_as = |kind, ino| {
        let time = ferry_fs::Timestamp(0);
        let (mode, nlink, uid, gid, rdev, size, blocks) = (kind | 0o644, 1, 0, 0, 0, 0, 0);
        let attr = ferry_fs::Attr {
            ino,
            mode,
            nlink,
            uid,
            gid,
            rdev,
            size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
        };
        link.cache.learn_attr(link.cache.version(), &attr);
    };
    let learn = |ino| learn_as(libc::S_IFREG, ino);
    learn(5);
    link.receive(recall_of(5), &OPEN).expect("a recall");
    assert_eq!(returned(&sent(&link, &mut line)), [5], "the kernel has not cached it");
    learn(5);
    assert!(link.cache.show(5, None).is_some());
    link.receive(recall_of(5), &OPEN).expect("a recall");
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0], "the kernel still believes it");
    learn(5);
    assert!(link.cache.attr(5).is_none(), "it is not kept on its way back");
    assert_eq!(kernel.resume(), [5]);
    assert_eq!(returned(&sent(&link, &mut line)), [5]);
    // A kernel that cannot forget: its entries expire.
    learn(5);
    assert!(link.cache.show(5, None).is_some());
    link.receive(recall_of(5), &OPEN).expect("a recall");
    tokio::time::sleep(ATTR_VALID_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0], "a second after it was taken in");
    tokio::time::sleep(2 * ATTR_VALID_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [5]);
    kernel.resume();
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0], "once");
    // A name is forgotten behind the attributes, and not waited for as long.
    learn_as(libc::S_IFDIR, 6);
    assert!(link.cache.show(6, Some((1, b"name"))).is_some());
    link.receive(recall_of(6), &OPEN).expect("a recall");
    tokio::time::sleep(ATTR_VALID_MAX).await;
    assert_eq!(kernel.resume(), [6]);
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0]);
    tokio::time::sleep(NAME_VALID_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0]);
    tokio::time::sleep(3 * NAME_VALID_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [6]);
    assert_eq!(kernel.resume(), [0; 0], "the name");
}

/// Seconds that somebody sets.
#[derive(Default)]
struct Seconds(std::sync::atomic::AtomicU64);

impl Clock for Seconds {
    fn monotonic(&self) -> Duration {
        Duration::from_secs(self.0.load(std::sync::atomic::Ordering::Relaxed))
    }
    fn wall(&self) -> Duration {
        self.monotonic()
    }
}

#[test]
fn early_acknowledgement_stops_behind_a_change_that_stays_unanswered() {
    let clock = Arc::new(Seconds::default());
    let link = link_by(clock.clone());
    link.cache.drop_all();
    let _line = connect(&link, 1, false);
    let acknowledge = |ino| acknowledge(&link, "name", ino);
    assert!(!acknowledge(10), "there is room");
    clock.0.store(2, std::sync::atomic::Ordering::Relaxed);
    assert!(!acknowledge(11), "the first one is on its way");
    clock.0.store(3, std::sync::atomic::Ordering::Relaxed);
    assert!(acknowledge(12), "the first one is too old");
    assert_eq!(link.json()["unanswered_ms"], 3000);
    link.receive(answer(1), &OPEN).expect("in order");
    assert!(!acknowledge(13), "the second one is not");
}

/// A kernel that knows many inodes, and has one file open.
#[derive(Default)]
struct Knowing(Mutex<Vec<(Ino, u64)>>);

const KNOWN: std::ops::Range<Ino> = 100..1600;

impl Restore for Knowing {
    fn restore(&self, _before: Before) -> Restored {
        let rest = KNOWN.rev().map(|ino| Claim { ino, capability: ino.into() }).collect();
        Restored { first: vec![pending(open())], rest }
    }
    fn claimed(&self, inos: &[Claim], stamp: u64) {
        self.0.lock().extend(inos.iter().map(|claim| (claim.ino, stamp)));
    }
    fn fatal(&self, _op: &Op) {}
    fn lost(&self, _changes: Vec<Pending>) {}
    fn busy(&self, _change: Pending) {}
    fn given_up(&self, _inos: Option<&[Ino]>) {}
    fn differs(&self, ino: Ino) {
        panic!("{ino}")
    }
    fn tick(&self) {}
}

/// The inodes that messages claim, claim by claim, with their sequence numbers.
fn claims(messages: &[ToServer]) -> Vec<(u64, Vec<Ino>)> {
    let claim = |message: &ToServer| match message {
        ToServer::Change { seq, op: Op::Claim { inodes }, .. } => {
            assert!(inodes.0.iter().all(|claim| claim.capability == claim.ino.into()));
            Some((*seq, inodes.0.iter().map(|claim| claim.ino).collect()))
        }
        _ => None,
    };
    messages.iter().filter_map(claim).collect()
}

fn found(seq: u64) -> ToClient {
    let outcome = Outcome::Count { count: 1000 + seq };
    ToClient::Changed { seq, after: List::default(), empty: false, made: None, outcome }
}

/// A link whose first session has ended, and what it says in the second.
fn anew(knowing: &Knowing) -> (Arc<Link>, lanes::Outgoing<()>) {
    let link = link();
    drop(connect(&link, 1, false));
    let line = connect_with(&link, (2, false), knowing);
    (link, line)
}

/// Answers all changes; gives what is sent meanwhile.
fn answer_all(link: &Link, line: &mut lanes::Outgoing<()>, knowing: &Knowing) -> Vec<ToServer> {
    let mut messages = sent(link, line);
    while link.state.lock().changes.len() > 0 {
        let seq = link.state.lock().changes.answered() + 1;
        link.receive(found(seq), knowing).expect("in order");
        messages.extend(sent(link, line));
    }
    messages
}

#[test]
fn unneeded_inodes_are_claimed_after_restoring_in_small_batches() {
    let knowing = Knowing::default();
    let (link, mut line) = anew(&knowing);
    assert_eq!(changes(sent(&link, &mut line)), [open()]);
    link.receive(answer(1), &knowing).expect("in order");
    let under_way = claims(&sent(&link, &mut line));
    assert_eq!(under_way.len(), 1, "an operation stands behind one of them");
    assert!(under_way[0].1.len() < 50, "{}", under_way[0].1.len());
    link.receive(found(2), &knowing).expect("in order");
    assert_eq!(claims(&sent(&link, &mut line)).len(), 1, "one more for each answer");
    answer_all(&link, &mut line, &knowing);
    let mut claimed: Vec<Ino> = knowing.0.lock().iter().map(|(ino, _)| *ino).collect();
    claimed.sort_unstable();
    assert!(claimed.into_iter().eq(KNOWN), "each once");
    assert_eq!(link.json()["unclaimed"], 0);
}

#[test]
fn an_inode_is_claimed_before_its_first_operation() {
    let knowing = Knowing::default();
    let (link, mut line) = anew(&knowing);
    sent(&link, &mut line);
    link.request(pending(Op::Getattr { ino: 200 })).expect("connected");
    link.request(pending(Op::Lookup { parent: 200, name: b"n".to_vec() })).expect("connected");
    let remove = Op::Rmdir { parent: 201, name: b"n".to_vec() };
    link.change(pending(remove.clone())).expect("connected");
    let messages = sent(&link, &mut line);
    assert_eq!(claims(&messages), [(2, vec![200]), (3, vec![201])]);
    let afters = messages.iter().filter_map(|m| match m {
        ToServer::Request { after, .. } => Some(*after),
        _ => None,
    });
    assert_eq!(afters.collect::<Vec<_>>(), [2, 2], "behind the claim");
    assert!(
        matches!(&messages[messages.len() - 1], ToServer::Change { seq: 4, op, .. } if *op == remove)
    );
    let rest = claims(&answer_all(&link, &mut line, &knowing));
    let again = |ino: &Ino| rest.iter().any(|(_, inos)| inos.contains(ino));
    assert!(!again(&200) && !again(&201) && again(&202), "each once");
}

#[test]
fn an_inode_forgotten_before_its_claim_is_never_claimed() {
    let knowing = Knowing::default();
    let (link, mut line) = anew(&knowing);
    assert!(!link.remember(Claim { ino: 300, capability: 300 }), "the session does not know it");
    assert!(link.remember(Claim { ino: 5, capability: 5 }), "it may know this one");
    link.request(pending(Op::Getattr { ino: 301 })).expect("connected");
    assert!(link.remember(Claim { ino: 301, capability: 301 }), "it is on its way");
    let all = claims(&answer_all(&link, &mut line, &knowing));
    assert_eq!(all.iter().filter(|(_, inos)| inos.contains(&300)).count(), 0);
    assert_eq!(all.iter().filter(|(_, inos)| inos.contains(&301)).count(), 1);
}

#[test]
fn claims_continue_in_the_next_session_and_epoch() {
    let knowing = Knowing::default();
    let (link, mut line) = anew(&knowing);
    link.receive(answer(1), &knowing).expect("in order");
    assert!(!claims(&sent(&link, &mut line)).is_empty());
    link.request(pending(Op::Getattr { ino: 200 })).expect("connected");
    // The server crashes once more.
    assert!(!link.leave());
    let mut line = connect_with(&link, (3, false), &knowing);
    let messages = sent(&link, &mut line);
    assert_eq!(changes(messages.clone())[0], open());
    assert_eq!(claims(&messages), [(2, vec![200])], "the request that was not answered names it");
    link.receive(answer(1), &knowing).expect("in order");
    link.receive(pong(1), &knowing).expect("a new epoch");
    answer_all(&link, &mut line, &knowing);
    let claimed: std::collections::BTreeSet<Ino> =
        knowing.0.lock().iter().map(|(ino, _)| *ino).collect();
    assert!(claimed.into_iter().eq(KNOWN));
    let state = link.state.lock();
    assert!(state.requests.by_id.values().all(|request| request.after <= state.changes.sent()));
}

/// An epoch has ended in the session before: the new session begins with its own epoch, so the
/// server does not refuse what restores it.
#[test]
fn changes_of_a_new_session_belong_to_its_first_epoch() {
    let (link, told) = (link(), Told::default());
    drop(connect(&link, 1, false));
    link.receive(pong(2), &told).expect("a new epoch");
    link.change(pending(Op::Release { fh: 7 })).expect("connected");
    let mut line = connect(&link, 2, false);
    let epochs = sent(&link, &mut line).into_iter().filter_map(|message| match message {
        ToServer::Change { epoch, .. } => Some(epoch),
        _ => None,
    });
    assert_eq!(epochs.collect::<Vec<_>>(), [0, 0], "what restores the session, and the release");
}

/// A program stops waiting for a change before that was sent.
#[test]
fn an_abandoned_change_that_was_never_sent_is_not_in_the_replay_log() {
    let (link, told) = (link(), Told::default());
    let mut line = connect(&link, 1, false);
    let unsent = WINDOW_OPS as u64 - FOR_REQUESTS.0 as u64 + 1;
    let keys: Vec<Key> = (0..unsent).filter_map(|_| link.change(pending(mkdir("n")))).collect();
    link.abandon(keys[keys.len() - 1]);
    (1..=unsent).for_each(|seq| assert!(link.receive(answer(seq), &told).expect("in order")));
    let changes = changes(sent(&link, &mut line));
    assert_eq!(changes.last(), Some(&Op::Nothing {}));
    assert_eq!(link.json()["replay_log_changes"], unsent - 1);
}
