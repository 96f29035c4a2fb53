//! A client that knows many inodes comes to another server: it claims what it needs first, and the
//! rest when there is time. And how long a server waits for a client that replays.

use ferry_env::Clock;

use super::early_ack::Teller;
use super::replay::Crashing;
use super::*;
use crate::codec::List;
use crate::message::*;

/// More than some batches of background claims.
const FILES: usize = 700;

/// A directory with many files, which a client has looked up: the client, and their inodes.
fn known(crashing: &Crashing) -> (Client, Ino, Vec<Ino>) {
    let (fs, me) = (&crashing.world.fs, InProcess::default());
    let dir = me.call(|cx| fs.mkdir(cx, ROOT, b"d", 0o755)).unwrap().attr.unwrap().ino;
    for n in 0..FILES {
        let name = format!("f{n}").into_bytes();
        let made = me.call(|cx| fs.mknod(cx, dir, &name, libc::S_IFREG | 0o644, 0)).unwrap();
        fs.forget(made.attr.unwrap().ino, 1);
    }
    let client = crashing.world.client().warm_up();
    assert_eq!(client.ino(ROOT, "d"), dir);
    let inos = client.list(dir).unwrap().iter().map(|name| client.ino(dir, name)).collect();
    (client, dir, inos)
}

fn attr(client: &Client, ino: Ino) -> Done<Attr> {
    client.me.call(|cx| client.fs.getattr(cx, ino, None)).map(|(attr, _)| attr)
}

/// An event that must come.
pub(super) fn until(what: &str, mut has_come: impl FnMut() -> bool) {
    let clock = Env::real().clock;
    let deadline = clock.monotonic() + Duration::from_secs(30);
    while !has_come() {
        assert!(clock.monotonic() < deadline, "{what}: never");
        std::thread::yield_now();
    }
}

#[test]
fn claims_survive_connections_that_end_meanwhile() {
    for (message, crashes) in (1..16).step_by(2).map(|message| (message, message % 4 == 1)) {
        let at = format!("message {message}, again: {crashes}");
        let mut crashing = Crashing::new(8000 + message);
        crashing.world.net.messages.cut_at.store(u64::MAX, Ordering::SeqCst);
        let (client, dir, inos) = known(&crashing);
        // Removed before the crash, and open, or known alone.
        let (open, fh) = client.create(dir, "open").unwrap();
        client.write(open, fh, 0, b"still open").unwrap();
        assert_eq!(client.sync(), Ok(()), "{at}");
        for name in ["open", "f3"] {
            client.unlink(dir, name).unwrap();
        }
        let removed =
            inos.iter().copied().find(|ino| attr(&client, *ino).unwrap().nlink == 0).expect("f3");
        assert_eq!(client.sync(), Ok(()), "{at}");
        let removed_again = client.ino(dir, "f4");
        let before = crashing.world.figure("inodes");
        // And a change to replay: one inode loses its last name by it.
        client.unlink(dir, "f4").unwrap();
        let (again, theirs) = client.create(dir, "again").unwrap();
        client.write(again, theirs, 0, b"again").unwrap();
        crashing.crash();
        crashing.start_and_cut(message, crashes);
        // Some are forgotten, some looked up, whatever the claims have reached.
        let (forgotten, remembered): (Vec<Ino>, Vec<Ino>) =
            inos.iter().partition(|ino| **ino % 3 == 0);
        for ino in &forgotten {
            client.fs.forget(*ino, 1);
        }
        for ino in &remembered {
            assert_eq!(attr(&client, *ino).map(|attr| attr.ino), Ok(*ino), "{at}");
        }
        for ino in [removed, removed_again].into_iter().filter(|ino| remembered.contains(ino)) {
            assert_eq!(attr(&client, ino).unwrap().nlink, 0, "{at}");
        }
        assert_eq!(client.read(open, fh, 100).unwrap(), b"still open", "{at}");
        assert_eq!(client.read(again, theirs, 100).unwrap(), b"again", "{at}");
        assert_eq!(client.fsync(again, theirs), Ok(()), "{at}");
        assert_eq!(client.sync(), Ok(()), "{at}");
        // The server knows as much as the kernel, and no more.
        until("all is claimed", || client.fs.connection()["unclaimed"] == 0);
        let known = before + 1 - forgotten.len() as u64;
        until(&at, || crashing.world.figure("inodes") == known);
    }
}

/// A clock that the test moves.
struct Hands(AtomicU64);

impl Hands {
    fn go_on(&self, ms: u64) {
        self.0.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for Hands {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::SeqCst))
    }
    fn wall(&self) -> Duration {
        self.monotonic()
    }
}

const HOLD_MS: u64 = 2000;

/// The server has crashed, and a recorded client is there again.
fn come_again(seed: u64) -> (Crashing, Arc<Hands>, Teller) {
    let grace = Duration::from_millis(HOLD_MS);
    let mut crashing = Crashing::with(seed, ServerOptions { grace, ..server_options() });
    let mut teller = Teller::new(&crashing.world);
    assert_eq!(teller.lease(&[ROOT]).len(), 1);
    let number = teller.numbers().start;
    let made = teller.make(number, Op::Mkdir { parent: ROOT, name: b"d".into(), mode: 0o755 });
    assert!(matches!(teller.changed(made), Outcome::Entry { .. }));
    crashing.crash();
    let hands = Arc::new(Hands(AtomicU64::new(1_000_000)));
    crashing.world.env = Env { clock: hands.clone(), ..Env::real() };
    crashing.world.start();
    let teller = teller.again(&crashing.world);
    (crashing, hands, teller)
}

#[test]
fn a_replay_that_makes_progress_is_never_given_up() {
    let (crashing, hands, mut teller) = come_again(8100);
    for _ in 0..100 {
        hands.go_on(HOLD_MS + HOLD_MS / 2);
        let nothing_there = Op::Claim { inodes: List::default() };
        assert!(matches!(teller.change(nothing_there), Outcome::Count { .. }));
    }
    assert!(matches!(teller.change(Op::Replayed {}), Outcome::Count { .. }));
    assert_eq!(crashing.world.fs.sessions().unwrap().len(), 1, "it is not given up");
    assert_eq!(teller.ask(Op::Settled {}), Outcome::Done {});
    assert!(matches!(teller.ask(Op::Getattr { ino: ROOT }), Outcome::Attributes { .. }));
}

#[test]
fn a_replay_without_progress_is_given_up() {
    let (crashing, hands, mut teller) = come_again(8101);
    let mut round = 0;
    until("it is given up", || {
        hands.go_on(HOLD_MS);
        // Being connected is not progress.
        teller.ping();
        round += 1;
        if round < 100 {
            teller.change(Op::Nothing {});
        }
        crashing.world.fs.sessions().unwrap().is_empty()
    });
    assert!(matches!(teller.ask(Op::Getattr { ino: ROOT }), Outcome::Attributes { .. }));
}
