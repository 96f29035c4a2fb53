//! Clients that wait for the answer to each change (`async=off`, or a limited certificate) are
//! recorded on the volume as others are: after a crash they know what is there, and replay what is
//! not.

use super::certificates::{Root, limited};
use super::replay::Crashing;
use super::*;

/// A client that waits for each answer; and a directory in which it may do what it likes.
fn waiting(crashing: &Crashing, is_limited: bool) -> (Client, Ino) {
    let world = &crashing.world;
    let dir = Root(&world.fs).dir(ROOT, "home", (1000, 1000), 0o755);
    world.fs.sync_sessions(&[]).unwrap();
    let me = InProcess { uid: 1000, gid: 1000, caller: 5, ..InProcess::default() };
    if is_limited {
        *world.net.peer.lock() = limited("1000", "1000");
    }
    let client = Client { me, ..if is_limited { world.client() } else { world.waiting_client() } };
    assert_eq!(client.ino(ROOT, "home"), dir);
    (client, dir)
}

/// Several changes of every kind. Returns the file that is open.
fn work(client: &Client, dir: Ino) -> (Ino, u64) {
    let sub = client.mkdir(dir, "sub").unwrap();
    let (ino, fh) = client.create(sub, "f").unwrap();
    client.write(ino, fh, 0, b"first").unwrap();
    client.append(ino, fh, b" second").unwrap();
    client.rename(sub, "f", "g").unwrap();
    client.create(dir, "gone").map(|(ino, fh)| client.close(ino, fh)).unwrap();
    client.unlink(dir, "gone").unwrap();
    (ino, fh)
}

/// All is there, and no loss is reported.
fn assert_unchanged(client: &Client, dir: Ino, (ino, fh): (Ino, u64)) {
    assert_eq!(client.list(dir).unwrap(), ["sub"]);
    let sub = client.ino(dir, "sub");
    assert_eq!(client.list(sub).unwrap(), ["g"]);
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"first second");
    assert_eq!(client.fsync(ino, fh), Ok(()));
    assert_eq!(client.me.call(|cx| client.fs.fsyncdir(cx, dir, 0, false)), Ok(()));
    assert_eq!(client.sync(), Ok(()));
    assert_eq!(client.fs.figures()["connection"]["lost_changes"], 0);
}

#[test]
fn a_durable_change_of_a_waiting_client_is_not_reported_lost() {
    for is_limited in [false, true] {
        let mut crashing = Crashing::new(740);
        let (client, dir) = waiting(&crashing, is_limited);
        let open = work(&client, dir);
        // Durable, and the client does not know it.
        crashing.world.fs.sync_sessions(&[]).unwrap();
        crashing.crash_and_start();
        assert_unchanged(&client, dir, open);
    }
}

#[test]
fn a_waiting_client_replays_what_a_crash_took() {
    for is_limited in [false, true] {
        let mut crashing = Crashing::new(741);
        let (client, dir) = waiting(&crashing, is_limited);
        let open = work(&client, dir);
        crashing.crash_and_start();
        assert_unchanged(&client, dir, open);
    }
}

#[test]
fn a_limited_client_replays_only_what_it_may() {
    let mut crashing = Crashing::new(742);
    let (client, dir) = waiting(&crashing, true);
    client.mkdir(dir, "sub").unwrap();
    crashing.crash();
    let volume = Root(&crashing.world.fs);
    volume.set(dir, (0, 0), 0o755);
    crashing.world.start();
    assert_eq!(client.sync(), Err(Errno(libc::EIO)), "it is lost");
    assert!(Root(&crashing.world.fs).names(dir).is_empty());
}
