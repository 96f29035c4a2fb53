//! Clients that want to harm.

use super::boundaries::Raw;
use super::*;
use crate::message::*;

/// What a client may make the server keep for it that it does not read: what the connection itself holds, and a little.
const ANSWERS_MAX: usize = 100_000;

#[test]
fn who_asks_whether_the_server_is_there_and_does_not_listen_takes_no_memory() {
    let world = World::new(900);
    let mut raw = Raw::greeted(&world);
    for _ in 0..4 * ANSWERS_MAX {
        raw.send(&ToServer::Ping {});
    }
    raw.send(&ToServer::Request { id: 1, after: 0, who: Who::default(), op: Op::Statfs {} });
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
fn who_takes_locks_and_does_not_listen_takes_no_memory() {
    let world = World::new(901);
    let mut raw = Raw::greeted(&world);
    let lock = FileLock { start: 0, end: 1, kind: libc::F_WRLCK, pid: 1, owner: 1, flock: false };
    let mut sent = 0;
    for id in 1..=4 * ANSWERS_MAX as u64 {
        let op = Op::Lock { ino: ROOT, lock, wait: false };
        if !raw.send_soon(&ToServer::Request { id, after: 0, who: Who::default(), op }) {
            break;
        }
        sent = id;
    }
    assert!(sent < 4 * ANSWERS_MAX as u64, "the server takes more than it can answer");
}
