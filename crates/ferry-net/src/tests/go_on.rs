//! Another process goes on with a client's mount: the session, open files, locks and what the
//! kernel knows go with it.

use super::*;
use crate::Carried;

const EAGAIN: Errno = Errno(libc::EAGAIN);

/// The next process has what the one before encoded.
fn goes_on(world: &World, before: Client) -> (Client, Arc<Forgets>) {
    let carried = before.fs.carry().expect("the session is there");
    before.fs.detach();
    drop(before);
    let bytes = carried.encode();
    assert_eq!(Carried::decode(&bytes[..bytes.len() - 1]), None, "not whole");
    let found = Carried::decode(&bytes).expect("it is whole");
    assert_eq!(found, carried);
    let options = world.client_options("/");
    let fs = RemoteFs::go_on(world.net.clone(), options, &found, &Env::real()).unwrap();
    let host = Arc::new(Forgets::default());
    fs.attach(host.clone());
    (Client { fs, me: InProcess::default() }, host)
}

#[test]
fn a_client_goes_on_in_another_process_with_its_files_and_locks() {
    let world = World::new(900);
    let (mut client, other) = (world.client(), world.client());
    let (ino, fh) = client.create(ROOT, "file").unwrap();
    let dir = client.mkdir(ROOT, "dir").unwrap();
    let (removed, removed_fh) = client.create(dir, "removed").unwrap();
    client.write(removed, removed_fh, 0, b"contents").unwrap();
    client.unlink(dir, "removed").unwrap();
    client.lock(ino, fh, 7, libc::F_WRLCK, false).unwrap();
    let sessions = || world.server().control().clients().as_array().unwrap().len();
    assert_eq!(sessions(), 2);
    let mut expected = Vec::new();
    for turn in 0..5_u8 {
        // Answered early, and on its way.
        client.append(ino, fh, &[turn; 100]).unwrap();
        expected.extend([turn; 100]);
        let made = client.mkdir(dir, &format!("{turn}")).unwrap();
        let (next, host) = goes_on(&world, client);
        client = next;
        assert_eq!(client.read(ino, fh, 1 << 20).unwrap(), expected);
        assert_eq!(client.read(removed, removed_fh, 100).unwrap(), b"contents");
        assert_eq!(client.ino(dir, &format!("{turn}")), client.ino(dir, &format!("{turn}")));
        // The kernel forgets it before the server is greeted.
        assert!(host.0.lock().inodes.contains(&made), "the kernel may have cached it");
        let theirs = other.open(other.ino(ROOT, "file")).unwrap();
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(EAGAIN));
        assert_eq!(other.read(ino, theirs, 1 << 20).unwrap(), expected);
        other.append(ino, theirs, b".").unwrap();
        expected.push(b'.');
        assert_eq!(client.read(ino, fh, 1 << 20).unwrap(), expected, "its cache is right");
        other.close(ino, theirs);
    }
    assert_eq!(sessions(), 2, "it is the same session");
    client.lock(ino, fh, 7, libc::F_UNLCK, false).unwrap();
    client.close(ino, fh);
    client.close(removed, removed_fh);
    assert_eq!(client.list(dir).unwrap().len(), 5);
    client.sync().unwrap();
    assert_eq!(world.figure("open_files"), 0, "the server knew each open file");
    assert_eq!(world.figure("locks"), 0);
    assert_eq!(client.fs.figures()["connection"]["lost_changes"], 0);
}

#[test]
fn a_client_that_goes_on_has_its_session_at_the_next_server_too() {
    let mut world = World::new(901);
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "file").unwrap();
    client.append(ino, fh, b"before ").unwrap();
    client.lock(ino, fh, 7, libc::F_WRLCK, false).unwrap();
    let (client, _host) = goes_on(&world, client);
    client.append(ino, fh, b"after ").unwrap();
    world.options.grace = Duration::from_secs(1);
    world.stop();
    world.reopen();
    world.start();
    client.append(ino, fh, b"the restart").unwrap();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"before after the restart");
    client.fsync(ino, fh).unwrap();
    assert_eq!(client.fs.figures()["connection"]["lost_changes"], 0);
    let other = world.client();
    let theirs = other.open(other.ino(ROOT, "file")).unwrap();
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(EAGAIN), "it was reclaimed");
}

#[test]
fn a_client_that_goes_on_while_the_server_is_away_waits_for_it() {
    let world = World::new(902);
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "file").unwrap();
    client.append(ino, fh, b"before").unwrap();
    world.net.cut_all();
    let (client, _host) = goes_on(&world, client);
    world.net.cut_all();
    client.append(ino, fh, b" after").unwrap();
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"before after");
}
