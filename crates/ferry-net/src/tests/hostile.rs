//! Clients that mean harm.

use super::boundaries::{Raw, hello};
use super::certificates::Listening;
use super::replay::Crashing;
use super::*;
use crate::codec::List;
use crate::limits::Peer;
use crate::message::*;
use crate::server::SESSIONS_OF_CERTIFICATE_MAX;
use crate::{Terms, authority};

/// The most that a client may make the server hold without reading: what the connection itself
/// holds, and a little more.
const ANSWERS_MAX: usize = 100_000;

#[test]
fn a_client_that_pings_and_does_not_read_takes_no_memory() {
    let world = World::new(900);
    let mut raw = Raw::greeted(&world);
    for _ in 0..4 * ANSWERS_MAX {
        raw.send(&ToServer::Ping { number: 1 });
    }
    raw.send(&ToServer::Request { id: 1, after: 0, caller: Caller::default(), op: Op::Statfs {} });
    let mut pongs = 0;
    loop {
        match raw.hear() {
            Some(ToClient::Pong { .. }) => pongs += 1,
            Some(ToClient::Reply { .. }) | None => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(pongs <= ANSWERS_MAX, "{pongs} answers were kept");
}

#[test]
fn a_client_that_locks_and_does_not_read_takes_no_memory() {
    let world = World::new(901);
    let mut raw = Raw::greeted(&world);
    let lock = FileLock { start: 0, end: 1, kind: libc::F_WRLCK, pid: 1, owner: 1, flock: false };
    let mut sent = 0;
    for id in 1..=4 * ANSWERS_MAX as u64 {
        let op = Op::Lock { ino: ROOT, lock, wait: false };
        if !raw.send_soon(&ToServer::Request { id, after: 0, caller: Caller::default(), op }) {
            break;
        }
        sent = id;
    }
    assert!(sent < 4 * ANSWERS_MAX as u64, "the server takes more than it can answer");
}

#[test]
fn a_read_only_client_gets_no_reservations() {
    let exports = vec!["/:ro".parse().unwrap()];
    let world = World::with(902, ServerOptions { exports, ..server_options() });
    let free = || InProcess::default().call(|cx| world.fs.statfs(cx)).unwrap().blocks_available;
    let before = free();
    let mut raw = Raw::greeted(&world);
    for op in [Op::Numbers {}, Op::Reserve { bytes: 64 << 20, inodes: 4096 }] {
        assert_eq!(raw.ask(op), Outcome::Failed { errno: libc::EPERM });
    }
    assert_eq!(
        (free(), world.figure("granted_bytes"), world.figure("reserved_bytes")),
        (before, 0, 0)
    );
    assert!(world.fs.sessions().unwrap().is_empty(), "nobody waits for it after a crash");
}

#[test]
fn one_certificate_cannot_take_all_sessions() {
    let world = World::new(903);
    let peer = |of: &[u8]| Peer { certificate: of.to_vec(), ..Peer::default() };
    let greedy: Vec<Raw> =
        (0..SESSIONS_OF_CERTIFICATE_MAX).map(|_| Raw::of(&world, peer(b"greedy"))).collect();
    *world.net.peer.lock() = peer(b"greedy");
    let said = world.mount("/").map(drop).unwrap_err().to_string();
    assert!(said.contains("this client's certificate") && said.contains("ferry evict"), "{said}");
    drop(Raw::of(&world, peer(b"another")));
    drop(greedy);
}

#[test]
fn silent_connections_keep_no_client_out() {
    const CROWD: usize = 400;
    let listening = Listening::new(904);
    authority::issue(listening.dir.path(), "laptop", &Terms::default(), authority::DAYS).unwrap();
    let client = listening.connect_at("laptop", "/").unwrap();
    let mut crowd: Vec<std::net::TcpStream> = (0..CROWD).map(|_| listening.stranger()).collect();
    assert!(client.create(ROOT, "f").is_ok(), "a connected client works on");
    assert!(listening.connect_at("laptop", "/").unwrap().create(ROOT, "g").is_ok());
    // The oldest was closed for the others; the newest may still send something.
    let sooner_than_for_its_silence = Duration::from_secs(5);
    crowd[0].set_read_timeout(Some(sooner_than_for_its_silence)).unwrap();
    let closed = io::Read::read(&mut crowd[0], &mut [0]);
    assert!(
        !matches!(&closed, Err(error) if error.kind() == io::ErrorKind::WouldBlock),
        "{closed:?}"
    );
    let newest = crowd.last_mut().unwrap();
    newest.set_nonblocking(true).unwrap();
    assert_eq!(
        io::Read::read(newest, &mut [0]).map_err(|e| e.kind()),
        Err(io::ErrorKind::WouldBlock)
    );
}

/// Only changes of the file system are replayed. A message that ends the replay is none, and a
/// client must not block the server by saying so.
#[test]
fn an_end_of_replay_marked_as_a_replayed_change_does_not_block_the_barrier() {
    let mut crashing = Crashing::new(905);
    let mut raw = Raw::new(&crashing.world);
    raw.send(&hello(b"/"));
    let Some(ToClient::Welcome { session, .. }) = raw.hear() else { panic!("no welcome") };
    assert!(matches!(raw.ask(Op::Numbers {}), Outcome::Numbers { .. }));
    crashing.crash_and_start();
    let mut raw = Raw::new(&crashing.world);
    let ToServer::Hello { version, path, name, newest, .. } = hello(b"/") else { unreachable!() };
    raw.send(&ToServer::Hello { version, session, path, name, newest });
    assert!(matches!(raw.hear(), Some(ToClient::Welcome { mark: Some(0), .. })));
    let acknowledged = Some(Acknowledged { at: ferry_fs::Timestamp(1), ino: 0 });
    let (answered, epoch, caller) = (0, 0, Caller::default());
    for (seq, op) in [(1, Op::Claim { inodes: List::default() }), (2, Op::Replayed {})] {
        raw.send(&ToServer::Change { seq, answered, epoch, acknowledged, caller, op });
        match raw.hear() {
            Some(ToClient::Changed { seq: of, outcome: Outcome::Count { .. }, .. }) => {
                assert_eq!(of, seq);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(raw.ask(Op::Settled {}), Outcome::Done {});
    let client = crashing.world.client();
    assert!(client.create(ROOT, "f").is_ok(), "the barrier is open");
}
