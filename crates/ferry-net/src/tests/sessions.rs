//! Connections are cut at any byte: nothing is lost, nothing is done twice.

use super::boundaries::Raw;
use super::*;
use crate::limits::Peer;
use crate::message::{Answered, Caller, Former, Op, Outcome, ToClient, ToServer, VERSION};

/// One client's history on a network that cuts each connection after fewer than `limit` bytes. Each
/// operation's result is exact: a change that was applied twice, or not at all, shows as an error,
/// a missing or a double line.
fn history(seed: u64, limit: u64) {
    let world = World::new(seed);
    let client = world.client();
    let (log, fh) = client.create(ROOT, "log").unwrap();
    world.net.cut_below.store(limit, Ordering::Relaxed);
    // The present connection is not limited: the next ones are.
    let (mut expected, mut names) = (Vec::new(), std::collections::BTreeSet::new());
    let mut reconnected = false;
    for i in 0..400_u64 {
        if i == 10 {
            world.net.cut_all();
        }
        let line = format!("{seed}:{i}\n");
        match world.net.random.below(5) {
            0 => {
                let name = format!("f{i}");
                let (ino, fh) = client
                    .create(ROOT, &name)
                    .unwrap_or_else(|e| panic!("{seed}: create {name}: {e}"));
                client.close(ino, fh);
                names.insert(name);
            }
            1 if !names.is_empty() => {
                let name = names.pop_first().unwrap();
                client.unlink(ROOT, &name).unwrap_or_else(|e| panic!("{seed}: unlink {name}: {e}"));
            }
            2 if !names.is_empty() => {
                let (name, new) = (names.pop_last().unwrap(), format!("r{i}"));
                client
                    .rename(ROOT, &name, &new)
                    .unwrap_or_else(|e| panic!("{seed}: rename {name}: {e}"));
                names.insert(new);
            }
            3 => {
                assert_eq!(
                    client.lookup(ROOT, "log").unwrap().unwrap().size,
                    expected.len() as u64,
                    "{seed}"
                );
            }
            _ => {
                let n = client
                    .append(log, fh, line.as_bytes())
                    .unwrap_or_else(|e| panic!("{seed}: append: {e}"));
                assert_eq!(n, line.len() as u64);
                expected.extend_from_slice(line.as_bytes());
            }
        }
        reconnected |= world.figure("connections") > 2;
    }
    client.sync().unwrap();
    reconnected |= world.figure("connections") > 2;
    assert!(reconnected, "{seed}: the network was to cut");
    client.fsync(log, fh).unwrap();
    assert_eq!(client.read(log, fh, 1 << 20).unwrap(), expected, "{seed}");
    names.insert("log".into());
    assert_eq!(client.list(ROOT).unwrap(), names.into_iter().collect::<Vec<_>>(), "{seed}");
    assert_eq!(world.figure("open_files"), 1, "{seed}: everything else was closed, once");
}

#[test]
fn a_session_outlives_its_connections_and_applies_each_change_once() {
    // Unanswered changes are sent again on each connection: with fewer bytes it takes long until
    // all have arrived.
    for seed in 0..4 {
        history(seed, 6000 + seed * 2000);
    }
}

#[test]
fn many_programs_on_a_network_that_cuts_connections() {
    let world = World::new(50);
    let client = Arc::new(world.client());
    world.net.cut_below.store(20_000, Ordering::Relaxed);
    world.net.cut_all();
    let threads: Vec<_> = (0..8)
        .map(|t| {
            let client = client.clone();
            std::thread::spawn(move || {
                let dir = client.mkdir(ROOT, &format!("d{t}")).unwrap();
                for i in 0..60 {
                    let (ino, fh) = client.create(dir, &format!("f{i}")).unwrap();
                    assert_eq!(client.append(ino, fh, &[t; 300]), Ok(300));
                    assert_eq!(client.append(ino, fh, &[t; 300]), Ok(300));
                    if i % 10 == 0 {
                        client.fsync(ino, fh).unwrap();
                    }
                    assert_eq!(client.read(ino, fh, 1000).unwrap(), [t; 600]);
                    client.close(ino, fh);
                }
                assert_eq!(client.list(dir).unwrap().len(), 60);
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert!(world.figure("connections") > 3);
}

#[test]
fn a_client_that_is_away_too_long_gets_a_new_session() {
    // Its leases outlive its session until their term is over.
    let lease_term = Duration::from_millis(500);
    let options = ServerOptions { session_life: Duration::ZERO, lease_term, ..server_options() };
    let world = World::with(60, options);
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"kept").unwrap();
    client.sync().unwrap();
    // Connections fail until the session has ended.
    let server = world.net.server.lock().take().unwrap();
    world.net.cut_all();
    while !server.control().clients().as_array().unwrap().is_empty() {
        std::thread::yield_now();
    }
    *world.net.server.lock() = Some(server);
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"kept", "the file was opened again");
    assert_eq!(client.append(ino, fh, b"!"), Ok(1));
    assert_eq!(client.fsync(ino, fh), Ok(()), "the server was there all the time: nothing is lost");
    client.sync().unwrap();
    assert_eq!(world.figure("open_files"), 1);
}

/// Nobody reaches the server until it has ended the session, and then it is there again.
fn away_too_long(world: &World) {
    let server = world.net.server.lock().take().unwrap();
    world.net.cut_all();
    while !server.control().clients().as_array().unwrap().is_empty() {
        std::thread::yield_now();
    }
    *world.net.server.lock() = Some(server);
}

/// A server that ends sessions at once, and whose leases outlive them for some time.
fn impatient(seed: u64) -> World {
    let lease_term = Duration::from_secs(3);
    let options = ServerOptions { session_life: Duration::ZERO, lease_term, ..server_options() };
    World::with(seed, options)
}

/// Waits until the server has applied a change: the volume has this name.
fn until_there(world: &World, dir: Ino, name: &str) {
    let me = InProcess::default();
    let is_there = || {
        let found = me.call(|cx| world.fs.lookup(cx, dir, name.as_bytes()));
        found.is_ok_and(|entry| entry.attr.is_some())
    };
    while !is_there() {
        std::thread::yield_now();
    }
}

#[test]
fn what_a_server_had_applied_before_it_ended_the_session_is_not_lost() {
    let world = impatient(61);
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    let (open, open_fh) = client.create(dir, "open").unwrap();
    client.sync().unwrap();
    world.net.silence_server();
    let name = |i: u8| format!("f{i}");
    for i in 0..20 {
        let (ino, fh) = client.create(dir, &name(i)).unwrap();
        client.write(ino, fh, 0, &[i; 100]).unwrap();
        client.close(ino, fh);
    }
    client.write(open, open_fh, 0, b"applied").unwrap();
    let (made, made_fh) = client.create(dir, "made").unwrap();
    client.rename(dir, "f0", "renamed").unwrap();
    let sub = client.mkdir(dir, "sub").unwrap();
    client.create(sub, "last").map(|(ino, fh)| client.close(ino, fh)).unwrap();
    until_there(&world, sub, "last");
    away_too_long(&world);
    assert_eq!(client.fsync(open, open_fh), Ok(()));
    assert_eq!(client.write(made, made_fh, 0, b"goes on"), Ok(7));
    assert_eq!(client.fsync(made, made_fh), Ok(()));
    assert_eq!(client.sync(), Ok(()));
    assert_eq!(client.figures("connection", "lost_changes"), 0);
    assert_eq!(client.list(dir).unwrap().len(), 23);
    for i in 1..20 {
        let ino = client.ino(dir, &name(i));
        let fh = client.open(ino).unwrap();
        assert_eq!(client.read(ino, fh, 1000).unwrap(), [i; 100]);
        assert_eq!(client.fsync(ino, fh), Ok(()));
        client.close(ino, fh);
    }
    assert_eq!(client.read(open, open_fh, 100).unwrap(), b"applied");
    assert_eq!(client.read(made, made_fh, 100).unwrap(), b"goes on");
    assert_eq!(client.list(sub).unwrap(), ["last"]);
    assert_eq!(world.figure("open_files"), 2, "no more than programs have open");
}

#[test]
fn what_never_arrived_is_lost_with_the_session_and_nothing_else() {
    let world = impatient(62);
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    let (first, first_fh) = client.create(dir, "first").unwrap();
    let (second, second_fh) = client.create(dir, "second").unwrap();
    client.sync().unwrap();
    world.net.silence_server();
    client.write(first, first_fh, 0, b"applied").unwrap();
    client.create(dir, "made").map(|(ino, fh)| client.close(ino, fh)).unwrap();
    until_there(&world, dir, "made");
    world.net.silence_all();
    client.write(second, second_fh, 0, b"lost").unwrap();
    away_too_long(&world);
    assert_eq!(client.fsync(second, second_fh), Err(Errno(libc::EIO)));
    assert_eq!(client.fsync(first, first_fh), Ok(()));
    assert_eq!(client.figures("connection", "lost_changes"), 1);
    assert_eq!(client.sync(), Err(Errno(libc::EIO)), "once");
    assert_eq!(client.sync(), Ok(()));
    assert_eq!(client.read(first, first_fh, 100).unwrap(), b"applied");
    assert_eq!(client.read(second, second_fh, 100).unwrap(), b"");
    assert_eq!(client.list(dir).unwrap(), ["first", "made", "second"]);
}

#[test]
fn a_program_hears_how_its_change_ended_though_the_session_has_ended() {
    let world = impatient(63);
    let client = world.waiting_client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    client.create(dir, "f").map(|(ino, fh)| client.close(ino, fh)).unwrap();
    client.sync().unwrap();
    std::thread::scope(|scope| {
        world.net.silence_server();
        let made = scope.spawn(|| client.mkdir(dir, "made"));
        until_there(&world, dir, "made");
        world.net.silence_all();
        let unlinked = scope.spawn(|| client.unlink(dir, "f"));
        while client.fs.figures()["connection"]["unanswered_changes"] == 1 {
            std::thread::yield_now();
        }
        away_too_long(&world);
        let made = made.join().unwrap().expect("it was made");
        assert_eq!(unlinked.join().unwrap(), Ok(()), "it was not applied, and is sent again");
        let (ino, fh) = client.create(made, "inside").unwrap();
        client.close(ino, fh);
    });
    assert_eq!((client.sync(), client.figures("connection", "lost_changes")), (Ok(()), 0));
    assert_eq!(client.list(dir).unwrap(), ["made"]);
}

#[test]
fn a_client_is_told_how_far_its_own_session_had_come_and_no_other() {
    let world = impatient(64);
    let welcome = |session, path: &str, certificate: &[u8]| {
        let peer = Peer { certificate: certificate.into(), ..Peer::default() };
        let mut raw = Raw::connected(&world, peer);
        let (path, name) = (path.into(), b"raw".to_vec());
        raw.send(&ToServer::Hello { version: VERSION, session, path, name, newest: 3 });
        match raw.hear() {
            Some(ToClient::Welcome { session, resumed, former, .. }) => {
                assert!(!resumed);
                (raw, session, former)
            }
            other => panic!("{other:?}"),
        }
    };
    let (mut raw, session, former) = welcome(0, "/", b"own");
    assert_eq!(former, None);
    for (seq, answered, name) in [(1, 0, "a"), (2, 1, "a"), (3, 1, "b")] {
        let op = Op::Mkdir { parent: ROOT, name: name.into(), mode: 0o755 };
        let (epoch, acknowledged, caller) = (0, None, Caller::default());
        raw.send(&ToServer::Change { seq, answered, epoch, acknowledged, caller, op });
        let is_answer =
            |heard| matches!(heard, Some(ToClient::Changed { seq: found, .. }) if found == seq);
        while !is_answer(raw.hear()) {}
    }
    drop(raw);
    world.until_nobody_is_there();
    for _ in 0..2 {
        let (_raw, _, former) = welcome(session, "/", b"own");
        let Former { answers, .. } = former.expect("it is told as often as it asks");
        let [Answered { seq: 2, outcome: refused, .. }, Answered { seq: 3, outcome: made, .. }] =
            &answers.0[..]
        else {
            panic!("{answers:?}")
        };
        assert_eq!(*refused, Outcome::Failed { errno: libc::EEXIST });
        assert!(matches!(made, Outcome::Entry { known: Some(_) }));
    }
    assert_eq!(welcome(session + 1, "/", b"own").2, None);
    assert_eq!(welcome(session, "/a", b"own").2, None, "another path");
    assert_eq!(welcome(session, "/", b"another").2, None, "another client");
}
