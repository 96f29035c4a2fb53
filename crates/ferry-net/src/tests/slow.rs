//! Connections that carry little, and clients that send more.

use super::early_ack::{Teller, write};
use super::*;
use crate::message::Outcome;

const TERM: Duration = Duration::from_millis(1500);
/// What clients send arrives at so many bytes a second.
const RATE: u64 = 500_000;
/// So much takes longer than a term.
const BYTES: usize = 1_500_000;
const CHUNK: usize = 100_000;

fn slow_world(seed: u64) -> World {
    World::with(seed, ServerOptions { lease_term: TERM, ..server_options() })
}

/// A client that decides alone in a directory of its own, before the network becomes slow.
fn writer(world: &World) -> (Client, Ino) {
    let client = world.client();
    let dir = client.mkdir(ROOT, "d").unwrap();
    let (ino, fh) = client.create(dir, "first").unwrap();
    client.write(ino, fh, 0, b"first").unwrap();
    client.close(ino, fh);
    client.sync().unwrap();
    (client, dir)
}

fn contents() -> Vec<u8> {
    (0..BYTES).map(|n| (n / 1000) as u8).collect()
}

#[test]
fn a_client_with_a_slow_connection_keeps_its_leases() {
    let world = slow_world(900);
    let (client, dir) = writer(&world);
    world.net.up_rate.store(RATE, Ordering::Relaxed);
    let contents = contents();
    let (ino, fh) = client.create(dir, "part").unwrap();
    let other = world.client();
    std::thread::scope(|scope| {
        // It looks while most of it is on its way.
        let looking = scope.spawn(|| {
            while client.size(ino) < BYTES as u64 / 2 {
                std::thread::yield_now();
            }
            assert_eq!((other.ino(ROOT, "d"), other.ino(dir, "part")), (dir, ino));
            other.list(dir).unwrap()
        });
        for (n, chunk) in contents.chunks(CHUNK).enumerate() {
            assert_eq!(client.write(ino, fh, (n * CHUNK) as u64, chunk), Ok(chunk.len() as u64));
        }
        client.close(ino, fh);
        client.rename(dir, "part", "whole").unwrap();
        let names = looking.join().unwrap();
        assert!(names == ["first", "part"] || names == ["first", "whole"], "{names:?}");
    });
    let read = other.ino(dir, "whole");
    let fh = other.open(read).unwrap();
    for (n, chunk) in contents.chunks(CHUNK).enumerate() {
        let read = other.me.call(|cx| {
            let mut out = vec![0; chunk.len()];
            let n = other.fs.read(cx, read, fh, (n * CHUNK) as u64, &mut out)?;
            out.truncate(n);
            Ok(out)
        });
        assert!(read.as_deref() == Ok(chunk), "chunk {n}");
    }
    client.sync().unwrap();
    let figures = client.fs.connection();
    assert_eq!((&figures["epoch"], &figures["reconnects"]), (&0.into(), &0.into()));
}

#[test]
fn a_lease_return_passes_the_changes_that_it_waits_for() {
    let world = World::new(901);
    let (dir, ino) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    teller.give_back(&[ROOT], 0);
    let fh = 1;
    teller.open(ino, fh);
    assert_eq!(teller.lease(&[dir, ino]).len(), 2);
    let other = world.client();
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            assert_eq!(other.ino(ROOT, "d"), dir);
            assert_eq!(other.ino(dir, "f"), ino);
            other.size(ino)
        });
        let mut recalled = teller.recall();
        while !recalled.contains(&ino) {
            teller.give_back(&recalled, 0);
            recalled = teller.recall();
        }
        let next = teller.seq + 1;
        teller.give_back(&recalled, next);
        // The first one says that it has brought something before.
        teller.ping();
        assert_eq!(
            teller.ping(),
            (false, 0),
            "a client that owes changes is not waited for for ever"
        );
        assert_eq!(teller.acknowledge(write(fh, 0, b"answered before")), next);
        assert!(matches!(teller.changed(next), Outcome::Count { .. }));
        assert_eq!(looking.join().unwrap(), 15);
    });
    assert_eq!(teller.ping(), (true, 0));
}

#[test]
fn a_client_that_withholds_changes_behind_a_returned_lease_is_fenced() {
    let term = Duration::from_millis(600);
    let world = World::with(902, ServerOptions { lease_term: term, ..server_options() });
    let (dir, ino) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    assert_eq!(teller.lease(&[ino]).len(), 1);
    teller.give_back(&[ino], teller.seq + 1);
    let other = world.client();
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let dir = other.ino(ROOT, "d");
            other.lookup(dir, "f").unwrap().unwrap().ino
        });
        teller.ping();
        while !looking.is_finished() {
            assert!(!teller.ping().0, "it says that it is there, and brings nothing");
        }
        assert_eq!(looking.join().unwrap(), ino);
    });
    assert_eq!(teller.ping().1, 1, "the epoch has ended");
}

#[test]
fn no_change_is_applied_on_top_of_a_lost_one() {
    let term = Duration::from_millis(600);
    let world = World::with(903, ServerOptions { lease_term: term, ..server_options() });
    let (client, dir) = writer(&world);
    let (ino, fh) = client.create(dir, "part").unwrap();
    let (held, held_fh) = client.create(dir, "kept").unwrap();
    assert_eq!(client.write(ino, fh, 0, b"there"), Ok(5));
    client.sync().unwrap();
    // What is written now arrives nowhere, and another client takes the leases when the term is
    // over.
    world.net.silence_all();
    assert_eq!(client.write(ino, fh, 5, b" and lost"), Ok(9));
    let other = world.client();
    assert_eq!((other.ino(ROOT, "d"), other.ino(dir, "part")), (dir, ino));
    assert_eq!(other.size(ino), 5);
    world.net.cut_all();
    while client.fs.connection()["epoch"] == 0 {
        std::thread::yield_now();
    }
    let lost = Err(Errno(libc::EIO));
    assert_eq!(client.write(ino, fh, 14, b"on top"), lost);
    assert_eq!(client.me.call(|cx| client.fs.flush(cx, ino, fh, 0)), lost.map(drop));
    assert_eq!(client.fsync(ino, fh), lost.map(drop), "a child process may have closed its copy");
    assert_eq!(client.fsync(ino, fh), Ok(()), "once");
    client.close(ino, fh);
    assert_eq!(client.rename(dir, "part", "whole"), lost.map(drop), "as if it had been written");
    assert_eq!(client.lookup(dir, "whole"), Ok(None));
    // What was not touched goes on, and what is opened again.
    assert_eq!(client.write(held, held_fh, 0, b"kept"), Ok(4));
    let again = client.open(ino).unwrap();
    assert_eq!(client.write(ino, again, 5, b" again"), Ok(6));
    client.rename(dir, "part", "whole").unwrap();
    assert_eq!((other.size(ino), other.ino(dir, "whole")), (11, ino));
}

#[test]
fn a_stopping_server_waits_while_early_acknowledged_changes_arrive() {
    let world = slow_world(904);
    let (client, dir) = writer(&world);
    world.net.up_rate.store(RATE, Ordering::Relaxed);
    let (ino, fh) = client.create(dir, "f").unwrap();
    let contents = contents();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for (n, chunk) in contents.chunks(CHUNK).enumerate() {
                assert_eq!(
                    client.write(ino, fh, (n * CHUNK) as u64, chunk),
                    Ok(chunk.len() as u64)
                );
            }
        });
        while client.size(ino) < BYTES as u64 / 4 {
            std::thread::yield_now();
        }
        world.stop();
        world.start();
        writing.join().unwrap();
    });
    client.sync().unwrap();
    assert_eq!(client.figures("connection", "lost_changes"), 0);
    world.net.up_rate.store(0, Ordering::Relaxed);
    assert_eq!(client.read(ino, fh, CHUNK), Ok(contents[..CHUNK].to_vec()));
    assert_eq!(client.size(ino), BYTES as u64);
}

#[test]
fn a_silent_clients_changes_are_applied_at_the_next_server() {
    let term = Duration::from_millis(600);
    let options =
        ServerOptions { lease_term: term, grace: Duration::from_secs(10), ..server_options() };
    let mut world = World::with(905, options);
    let (client, dir) = writer(&world);
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.sync().unwrap();
    world.net.silence_all();
    assert_eq!(client.write(ino, fh, 0, b"answered"), Ok(8));
    world.stop();
    world.reopen();
    world.start();
    world.net.cut_all();
    client.sync().unwrap();
    assert_eq!(client.figures("connection", "lost_changes"), 0);
    let other = world.client();
    assert_eq!((other.ino(ROOT, "d"), other.ino(dir, "f"), other.size(ino)), (dir, ino, 8));
}

/// `ls -l` requests them of each file, twice. It does not wait for a client that writes the file:
/// these are never acknowledged early.
#[test]
fn extended_attributes_are_read_beside_a_write_lease() {
    let term = Duration::from_millis(600);
    let world = World::with(906, ServerOptions { lease_term: term, ..server_options() });
    let (dir, ino) = world.furnished();
    let other = world.client();
    assert_eq!((other.ino(ROOT, "d"), other.ino(dir, "f")), (dir, ino));
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    assert_eq!(teller.lease(&[ino]).len(), 1);
    teller.ping();
    let get = || other.me.call(|cx| other.fs.getxattr(cx, ino, b"system.posix_acl_access"));
    assert_eq!(get(), Err(Errno(libc::ENODATA)));
    assert_eq!(other.me.call(|cx| other.fs.listxattr(cx, ino)), Ok(Vec::new()));
    // Nothing was asked back, else it would have been fenced, for it gives nothing back.
    assert_eq!(teller.ping(), (true, 0));
}
