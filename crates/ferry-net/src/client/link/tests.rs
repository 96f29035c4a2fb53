//! What is sent on a new connection.

use ferry_device::Env;
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::client::waiting::Nobody;
use crate::codec::decode;
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
    Pending { who: Who::default(), op, waiter: Arc::new(Nobody), touch: None }
}

fn open() -> Op {
    Op::Open { ino: 5, fh: 1, flags: 0, kill_suidgid: false }
}

impl Restore for OneFile {
    fn restore(&self, _clean: bool) -> Vec<Pending> {
        vec![pending(open())]
    }
}

/// A connection to the server in its given session: what was sent on it.
fn connect(link: &Link, session: u128, resumed: bool) -> UnboundedReceiver<(Vec<u8>, ())> {
    let (line, sent) = unbounded_channel();
    let welcome =
        ToClient::Welcome { session, boot: 1, resumed, applied: 0, read_only: false, term_ms: 1000 };
    link.enter(welcome, &line, &OneFile).expect("welcome");
    sent
}

fn sent(line: &mut UnboundedReceiver<(Vec<u8>, ())>) -> Vec<ToServer> {
    std::iter::from_fn(|| line.try_recv().ok())
        .map(|(frame, ())| decode(&frame[4..]).expect("a message"))
        .collect()
}

fn link() -> Link {
    let names = (b"/".to_vec(), b"test".to_vec());
    let clock = Env::real().clock;
    Link::new(Arc::new(Nowhere), clock.clone(), names, Duration::ZERO, Arc::new(Cache::new(clock)))
}

fn answer(seq: u64) -> ToClient {
    ToClient::Changed { seq, after: List::default(), empty: false, outcome: Outcome::Done {} }
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
    assert_eq!(changes(sent(&mut line)), [open()], "a new session is brought to where the old one was");
    let abandoned = link.change(pending(Op::Nothing {})).expect("connected");
    let unlocking = link.change(pending(unlock.clone())).expect("connected");
    link.abandon(abandoned);
    link.abandon(unlocking);
    assert!(!link.leave());
    link.give_up_if_late();
    let mut line = connect(&link, 2, true);
    assert_eq!(changes(sent(&mut line)), [open(), Op::Nothing {}, unlock]);
}

#[test]
fn a_lock_is_asked_for_behind_all_changes_that_were_asked_for_before() {
    let link = link();
    let mut line = connect(&link, 1, false);
    let changes = WINDOW_OPS as u64 + 1;
    for _ in 0..changes {
        link.change(pending(Op::Nothing {}));
    }
    let lock = Op::Lock { ino: 5, lock: ferry_fs::FileLock::default(), wait: true };
    let key = link.request(pending(lock.clone())).expect("connected");
    assert_eq!(
        sent(&mut line).len(),
        WINDOW_OPS,
        "the last change has no room yet, and the request waits for it"
    );
    link.take(answer(1)).expect("in order");
    let more = sent(&mut line);
    assert!(
        matches!(more[..], [ToServer::Change { .. }, ToServer::Request { after, .. }] if after == changes)
    );
    // Cancelled, it is asked for again only to learn what became of it.
    link.abandon(key);
    assert!(!link.leave());
    let mut line = connect(&link, 1, true);
    loop {
        let seq = link.state.lock().answered + 1;
        if link.take(answer(seq)).is_err() {
            break;
        }
    }
    let again = sent(&mut line);
    assert!(matches!(again[again.len() - 2..], [ToServer::Request { .. }, ToServer::Cancel { .. }]));
}
