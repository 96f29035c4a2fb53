//! What is sent on a new connection.

use ferry_device::Env;
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::client::cache::{NAME_SHOWN_MAX, SHOWN_MAX};
use crate::client::waiting::Nobody;
use crate::codec::{List, decode};
use crate::message::WINDOW_OPS;

struct Nowhere;

impl Connector for Nowhere {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async { Err(io::ErrorKind::ConnectionRefused.into()) })
    }
}

/// One open file.
struct OneFile;

fn pending(op: Op) -> Pending {
    Pending::new(Who::default(), op, Arc::new(Nobody))
}

fn open() -> Op {
    Op::Open { ino: 5, fh: 1, flags: 0, kill_suidgid: false }
}

impl Restore for OneFile {
    fn restore(&self, _before: Before) -> Vec<Pending> {
        vec![pending(open())]
    }
    fn lost(&self, _changes: Vec<Pending>) {}
    fn busy(&self, _change: Pending) {}
    fn given_up(&self, _inos: Option<&[Ino]>) {}
    fn differs(&self, ino: Ino) {
        panic!("{ino}")
    }
    fn tick(&self) {}
}

/// A connection to the server in its given session: what was sent on it.
fn connect(link: &Link, session: u128, resumed: bool) -> UnboundedReceiver<(Vec<u8>, ())> {
    let (line, sent) = unbounded_channel();
    let welcome = ToClient::Welcome {
        session,
        boot: 1,
        resumed,
        applied: 0,
        durable: 0,
        read_only: false,
        promises: true,
        term_ms: 1000,
        series: 0,
        now: ferry_fs::Timestamp(0),
        mark: None,
    };
    link.enter(welcome, &line, &OneFile).expect("welcome");
    sent
}

fn sent(link: &Link, line: &mut UnboundedReceiver<(Vec<u8>, ())>) -> Vec<ToServer> {
    link.send_now();
    let mut messages = Vec::new();
    while let Ok((frames, ())) = line.try_recv() {
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
    let kept = (Arc::new(Cache::new(Arc::clone(&clock))), Arc::default());
    Link::new(Arc::new(Nowhere), clock, names, Duration::ZERO, kept)
}

fn answer(seq: u64) -> ToClient {
    ToClient::Changed { seq, after: List::default(), empty: false, made: None, outcome: Outcome::Done {} }
}

fn changes(messages: Vec<ToServer>) -> Vec<Op> {
    messages
        .into_iter()
        .filter_map(|m| if let ToServer::Change { op, .. } = m { Some(op) } else { None })
        .collect()
}

#[test]
fn what_restores_a_session_or_gives_back_is_never_given_up() {
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
    link.give_up_if_late();
    let mut line = connect(&link, 2, true);
    assert_eq!(changes(sent(&link, &mut line)), [open(), Op::Nothing {}, unlock]);
}

#[test]
fn a_lock_is_asked_for_behind_all_changes_that_were_asked_for_before() {
    let link = link();
    let mut line = connect(&link, 1, false);
    let room = WINDOW_OPS - stream::FOR_REQUESTS.0;
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
    link.take(answer(1), &OneFile).expect("in order");
    let more = sent(&link, &mut line);
    assert!(
        matches!(more[..], [ToServer::Change { .. }, ToServer::Request { after, .. }] if after == changes)
    );
    // Cancelled, it is asked for again only to learn what became of it.
    link.abandon(key);
    assert!(!link.leave());
    let mut line = connect(&link, 1, true);
    loop {
        let seq = link.state.lock().answered + 1;
        if link.take(answer(seq), &OneFile).is_err() {
            break;
        }
    }
    let again = sent(&link, &mut line);
    assert!(matches!(again[again.len() - 2..], [ToServer::Request { .. }, ToServer::Cancel { .. }]));
}

/// What the link says of promised changes.
#[derive(Default)]
struct Told {
    lost: Mutex<Vec<Op>>,
    busy: Mutex<Vec<Op>>,
}

impl Restore for Told {
    fn restore(&self, _before: Before) -> Vec<Pending> {
        Vec::new()
    }
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

/// `true`: there is no more room.
fn promise(link: &Link, name: &str, ino: Ino) -> bool {
    let promised = Some(Promised { at: ferry_fs::Timestamp(1), ino });
    let pending = Pending { promised, touched: vec![1, ino], ..pending(mkdir(name)) };
    let _cache = link.cache.lock();
    link.promising().expect("connected").promise(pending)
}

fn failed(seq: u64) -> ToClient {
    let outcome = Outcome::Failed { errno: libc::ESTALE };
    ToClient::Changed { seq, after: List::default(), empty: false, made: None, outcome }
}

#[test]
fn a_promise_that_fails_ends_its_series_and_what_was_not_promised_is_sent_again() {
    let (link, told) = (link(), Told::default());
    let mut line = connect(&link, 1, false);
    promise(&link, "a", 10);
    promise(&link, "b", 11);
    let release = Op::Release { fh: 7 };
    link.change(pending(release.clone())).expect("connected");
    promise(&link, "c", 12);
    assert_eq!(changes(sent(&link, &mut line)), [mkdir("a"), mkdir("b"), release.clone(), mkdir("c")]);
    link.take(answer(1), &told).expect("in order");
    link.take(failed(2), &told).expect("in order");
    assert_eq!(*told.lost.lock(), [mkdir("b"), mkdir("c")]);
    let again: Vec<_> = sent(&link, &mut line)
        .into_iter()
        .filter_map(|m| match m {
            ToServer::Change { seq, series, op, .. } => Some((seq, series, op)),
            _ => None,
        })
        .collect();
    assert_eq!(again, [(5, 1, release)]);
    let dropped = |seq| ToClient::Changed {
        seq,
        after: List::default(),
        empty: false,
        made: None,
        outcome: Outcome::Dropped {},
    };
    link.take(dropped(3), &told).expect("in order");
    link.take(dropped(4), &told).expect("in order");
    link.take(answer(5), &told).expect("in order");
    assert_eq!(told.lost.lock().len(), 2, "each once");
    assert_eq!(link.json()["promised"], 0);
}

#[test]
fn leases_are_given_back_and_requests_made_behind_the_changes_of_their_inodes() {
    let link = link();
    let mut line = connect(&link, 1, false);
    promise(&link, "a", 10);
    promise(&link, "b", 11);
    link.change(pending(Op::Nothing {})).expect("connected");
    link.request(pending(Op::Getattr { ino: 10 })).expect("connected");
    link.request(pending(Op::Getattr { ino: 20 })).expect("connected");
    assert!(link.take(ToClient::Recall { inodes: List(vec![1]) }, &Told::default()).expect("in order"));
    link.give_back(&[20]);
    let afters: Vec<u64> = sent(&link, &mut line)
        .into_iter()
        .filter_map(|message| match message {
            ToServer::Change { .. } => None,
            ToServer::Request { after, .. } | ToServer::Returned { after, .. } => Some(after),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(afters, [1, 0, 2, 0]);
}

#[test]
fn leases_wait_with_the_changes_that_the_window_has_no_room_for() {
    let link = link();
    let mut line = connect(&link, 1, false);
    let most = WINDOW_OPS as u64;
    (0..most).for_each(|i| {
        promise(&link, "x", i + 10);
    });
    // Behind a change that the server decides.
    let borrowed = vec![most + 9];
    link.change(Pending { borrowed, ..pending(Op::Nothing {}) }).expect("connected");
    let returned = |m: &ToServer| matches!(m, ToServer::Returned { .. });
    assert!(!sent(&link, &mut line).iter().any(returned), "its change was not sent");
    (1..=most / 2).for_each(|seq| assert!(link.take(answer(seq), &Told::default()).expect("in order")));
    let messages = sent(&link, &mut line);
    assert!(messages.last().is_some_and(returned), "behind all of them");
    assert_eq!(messages.iter().filter(|m| returned(m)).count(), 1);
}

#[test]
fn a_change_that_is_refused_for_anothers_leases_is_handed_back() {
    let (link, told) = (link(), Told::default());
    drop(connect(&link, 1, false));
    link.change(pending(mkdir("a"))).expect("connected");
    let outcome = Outcome::Busy {};
    link.take(ToClient::Changed { seq: 1, after: List::default(), empty: false, made: None, outcome }, &told)
        .expect("in order");
    assert_eq!(*told.busy.lock(), [mkdir("a")]);
    assert!(told.lost.lock().is_empty());
}

type Done = Box<dyn FnOnce() + Send>;

/// A kernel that forgets when it is told to go on.
#[derive(Default)]
struct SlowKernel(Mutex<Vec<(Vec<Ino>, Done)>>);

impl SlowKernel {
    fn go_on(&self) -> Vec<Ino> {
        let (inodes, done) = self.0.lock().remove(0);
        done();
        inodes
    }
}

impl ferry_fs::Host for SlowKernel {
    fn invalidate_inode(&self, _ino: Ino, _offset: u64, _len: u64) {}
    fn invalidate_attributes(&self, _ino: Ino) {}
    fn invalidate_entry(&self, _parent: Ino, _name: &[u8]) {}
    fn forget(&self, what: ferry_fs::ToForget, done: Done) {
        self.0.lock().push((what.inodes, done));
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
async fn a_lease_is_given_back_when_the_kernel_has_forgotten_what_it_was_shown() {
    let (link, kernel) = (link(), Arc::new(SlowKernel::default()));
    link.kernel.attach(Arc::clone(&kernel) as Arc<dyn ferry_fs::Host>, tokio::runtime::Handle::current());
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
        link.cache.learn_attr(link.cache.sight(), &attr);
    };
    let learn = |ino| learn_as(libc::S_IFREG, ino);
    learn(5);
    link.take(recall_of(5), &OneFile).expect("a recall");
    assert_eq!(returned(&sent(&link, &mut line)), [5], "the kernel was not shown it");
    learn(5);
    assert!(link.cache.show(5, None).is_some());
    link.take(recall_of(5), &OneFile).expect("a recall");
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0], "the kernel still believes it");
    learn(5);
    assert!(link.cache.attr(5).is_none(), "it is not kept on its way back");
    assert_eq!(kernel.go_on(), [5]);
    assert_eq!(returned(&sent(&link, &mut line)), [5]);
    // A kernel that is kept from forgetting: what it was shown ends by itself.
    learn(5);
    assert!(link.cache.show(5, None).is_some());
    link.take(recall_of(5), &OneFile).expect("a recall");
    tokio::time::sleep(SHOWN_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0], "a second after it was taken in");
    tokio::time::sleep(2 * SHOWN_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [5]);
    kernel.go_on();
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0], "once");
    // A name is forgotten behind the attributes, and not waited for as long.
    learn_as(libc::S_IFDIR, 6);
    assert!(link.cache.show(6, Some((1, b"name"))).is_some());
    link.take(recall_of(6), &OneFile).expect("a recall");
    tokio::time::sleep(SHOWN_MAX).await;
    assert_eq!(kernel.go_on(), [6]);
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0]);
    tokio::time::sleep(NAME_SHOWN_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [0; 0]);
    tokio::time::sleep(3 * NAME_SHOWN_MAX).await;
    assert_eq!(returned(&sent(&link, &mut line)), [6]);
    assert_eq!(kernel.go_on(), [0; 0], "the name");
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
fn nothing_is_promised_behind_a_change_that_the_server_leaves_unanswered() {
    let clock = Arc::new(Seconds::default());
    let link = link_by(clock.clone());
    link.cache.drop_all();
    let _line = connect(&link, 1, false);
    let promise = |ino| promise(&link, "name", ino);
    assert!(!promise(10), "there is room");
    clock.0.store(2, std::sync::atomic::Ordering::Relaxed);
    assert!(!promise(11), "the first one is on its way");
    clock.0.store(3, std::sync::atomic::Ordering::Relaxed);
    assert!(promise(12), "the first one is too old");
    assert_eq!(link.json()["unanswered_ms"], 3000);
    link.take(answer(1), &OneFile).expect("in order");
    assert!(!promise(13), "the second one is not");
}
