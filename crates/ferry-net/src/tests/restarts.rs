//! The server stops, crashes, or is away for good.

use super::*;

#[test]
fn work_continues_when_the_server_is_back() {
    let mut world = World::new(10);
    let client = Arc::new(world.client());
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"before").unwrap();
    client.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    let dir = client.mkdir(ROOT, "d").unwrap();
    world.stop();
    world.options.grace = Duration::from_secs(1);
    let waiting = {
        let client = client.clone();
        std::thread::spawn(move || client.create(dir, "made while the server was gone"))
    };
    world.reopen();
    world.start();
    let (made, _) = waiting.join().unwrap().unwrap();
    assert_eq!(client.ino(dir, "made while the server was gone"), made);
    assert_eq!(client.append(ino, fh, b" after"), Ok(6));
    assert_eq!(client.read(ino, fh, 100).unwrap(), b"before after");
    assert_eq!(client.fsync(ino, fh), Ok(()), "it has stopped as it should: nothing is lost");
    let other = world.client();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    assert_eq!(
        other.lock(ino, theirs, 1, libc::F_RDLCK, false),
        Err(Errno(libc::EAGAIN)),
        "the lock is held"
    );
}

/// A term that no test could wait for: longer than a client waits for its server.
pub(super) fn long_terms() -> ServerOptions {
    let (grace, lease_term) = (Duration::from_secs(60), Duration::from_secs(60));
    ServerOptions { grace, lease_term, ..server_options() }
}

#[test]
fn a_new_volume_is_served_without_a_grace_period_and_not_after_a_crash() {
    let mut world = World::with(21, long_terms());
    assert!(world.fs.was_handed_over());
    let client = world.client();
    client.create(ROOT, "f").expect("it would have waited for a minute, and been given up");
    drop(world.take_server());
    world.reopen();
    assert!(!world.fs.was_handed_over());
}

#[test]
fn a_server_begins_at_once_after_an_orderly_stop() {
    let mut world = World::with(17, ServerOptions { grace: Duration::ZERO, ..long_terms() });
    world.options = long_terms();
    for round in 0..3 {
        let (reader, writer) = (world.client(), world.client());
        let dir = writer.mkdir(ROOT, &format!("d{round}")).unwrap();
        assert_eq!(reader.list(ROOT).unwrap().len(), round + 1);
        writer.create(dir, "before").unwrap();
        assert!(world.figure("leases") > 0);
        world.stop();
        world.reopen();
        assert!(world.fs.was_handed_over());
        world.start();
        assert!(writer.create(dir, "after").is_ok(), "it would have waited for a minute");
        assert_eq!(
            reader.list(reader.ino(ROOT, &format!("d{round}"))).unwrap(),
            ["after", "before"]
        );
        // The server would wait for clients that vanish.
        [reader, writer].iter().for_each(|client| client.fs.close());
        world.until_nobody_is_there();
    }
}

/// A client that only reads has nothing to replay, so nobody awaits it.
#[test]
fn a_server_that_waits_for_the_leases_of_a_crashed_one_does_not_hand_over() {
    let mut world = World::with(17, ServerOptions { grace: Duration::ZERO, ..long_terms() });
    world.options = long_terms();
    let reader = world.client();
    assert_eq!(reader.list(ROOT).unwrap().len(), 0);
    drop(world.take_server());
    world.reopen();
    world.start();
    world.stop();
    world.reopen();
    assert!(!world.fs.was_handed_over(), "the reader may rely on its lease for a minute");
}

#[test]
fn a_crashed_server_has_not_handed_the_volume_over() {
    let mut world = World::with(18, ServerOptions { grace: Duration::ZERO, ..long_terms() });
    let client = world.client();
    client.create(ROOT, "f").unwrap();
    world.stop();
    world.reopen();
    world.start();
    client.create(ROOT, "g").unwrap();
    drop(world.take_server());
    world.reopen();
    assert!(!world.fs.was_handed_over());
    world.start();
}

/// The server cannot know what becomes of it.
#[test]
fn a_client_that_is_cut_off_while_the_server_stops_is_waited_for() {
    let options = ServerOptions { lease_term: Duration::from_secs(1), ..server_options() };
    let mut world = World::with(19, options);
    let client = world.client();
    assert_eq!(client.list(ROOT).unwrap().len(), 0);
    world.net.silence_all();
    world.stop();
    world.reopen();
    assert!(world.fs.was_handed_over(), "its term is over");
    world.start();
}

#[test]
fn a_silent_server_counts_as_dead_after_the_operation_timeout() {
    let world = World::new(24);
    let timeout = Duration::from_secs(1);
    let options = ClientOptions { timeout, ..world.client_options("/") };
    let client = world.mount_with(options).unwrap();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"x").unwrap();
    world.net.silence_all();
    assert_eq!(client.fsync(ino, fh), Err(Errno(libc::ETIMEDOUT)));
}

#[test]
fn a_file_that_is_removed_while_open_outlives_the_server() {
    let options = ServerOptions { grace: Duration::from_secs(20), ..server_options() };
    let mut world = World::with(23, server_options());
    world.options = options;
    let (client, other) = (world.client(), world.client());
    let (mine, a) = client.create(ROOT, "mine").unwrap();
    let (theirs, b) = client.create(ROOT, "theirs").unwrap();
    client.write(mine, a, 0, b"removed by its client").unwrap();
    client.write(theirs, b, 0, b"removed by another").unwrap();
    assert_eq!(client.sync(), Ok(()));
    client.unlink(ROOT, "mine").unwrap();
    other.unlink(ROOT, "theirs").unwrap();
    for crashes in [true, false, true] {
        assert_eq!(client.sync(), Ok(()));
        if crashes {
            // The process that dies forgets nothing in order.
            world.fs.keep_removed();
            drop(world.take_server());
        } else {
            world.stop();
        }
        world.reopen();
        world.start();
        assert_eq!(client.read(mine, a, 100).unwrap(), b"removed by its client");
        assert_eq!(client.read(theirs, b, 100).unwrap(), b"removed by another");
        assert_eq!(client.write(mine, a, 0, b"removed"), Ok(7));
    }
    assert_eq!(client.fsync(mine, a), Ok(()));
    client.close(mine, a);
    client.close(theirs, b);
    assert_eq!(client.list(ROOT).unwrap().len(), 0);
}

#[test]
fn new_locks_wait_for_the_grace_period() {
    let options = ServerOptions { grace: Duration::from_secs(3), ..server_options() };
    let mut world = World::with(11, server_options());
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    world.stop();
    world.options = options;
    world.start();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    let asking = std::thread::spawn(move || other.lock(ino, theirs, 1, libc::F_RDLCK, false));
    assert_eq!(client.append(ino, fh, b"x"), Ok(1), "it has its lock again");
    assert_eq!(asking.join().unwrap(), Err(Errno(libc::EAGAIN)));
    assert_eq!(world.figure("locks"), 1);
}

/// The volume knows nothing of a session that has changed nothing.
#[test]
fn a_file_that_was_being_opened_in_a_crash_is_opened_at_the_next_server() {
    let mut world = World::new(25);
    let (maker, client) = (world.waiting_client(), world.waiting_client());
    let (ino, _) = maker.create(ROOT, "f").unwrap();
    assert_eq!(client.ino(ROOT, "f"), ino);
    // It is sent, and there is no answer.
    world.net.silence_all();
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| client.open(ino));
        while client.fs.connection()["unanswered_changes"] != 1 {
            std::thread::yield_now();
        }
        drop(world.take_server());
        world.net.cut_all();
        world.reopen();
        world.start();
        let fh = opening.join().unwrap().expect("nothing can have been changed");
        assert_eq!(client.write(ino, fh, 0, b"x"), Ok(1));
    });
}

#[test]
fn fsync_reports_unsynced_data_lost_in_a_crash() {
    let mut world = World::new(12);
    let client = world.client();
    let (synced, a) = client.create(ROOT, "synced").unwrap();
    let (unsynced, b) = client.create(ROOT, "unsynced").unwrap();
    client.write(synced, a, 0, b"x").unwrap();
    client.fsync(synced, a).unwrap();
    client.write(unsynced, b, 0, b"y").unwrap();
    // It vanishes.
    drop(world.take_server());
    world.reopen();
    world.start();
    assert_eq!(client.fsync(synced, a), Ok(()));
    assert_eq!(client.fsync(unsynced, b), Err(Errno(libc::EIO)), "it may have been lost");
    assert_eq!(client.fsync(unsynced, b), Ok(()), "told once");
    let dir = client.me.call(|cx| client.fs.fsyncdir(cx, ROOT, 0, false));
    assert_eq!(dir, Err(Errno(libc::EIO)), "names may have been lost");
    assert_eq!(client.sync(), Err(Errno(libc::EIO)), "a sync of everything is told, too");
    assert_eq!(client.sync(), Ok(()), "once");
}

#[test]
fn operations_wait_for_a_dead_server_and_then_fail() {
    let world = World::new(13);
    let options = ClientOptions {
        server: "memory".into(),
        path: b"/".to_vec(),
        name: b"impatient".to_vec(),
        timeout: Duration::from_millis(300),
        asynchronous: true,
        noatime: false,
        notes: None,
    };
    let fs = RemoteFs::connect(world.net.clone(), options, &Env::real()).unwrap();
    let client = Client { fs, me: InProcess::default() };
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    world.stop();
    assert_eq!(client.create(ROOT, "late"), Err(Errno(libc::ETIMEDOUT)));
    assert_eq!(client.lookup(ROOT, "f"), Err(Errno(libc::ETIMEDOUT)));
    world.start();
    while client.lookup(ROOT, "f").is_err() {
        std::thread::yield_now();
    }
    assert_eq!(client.append(ino, fh, b"x"), Ok(1));
    assert_eq!(client.lookup(ROOT, "late"), Ok(None), "what has failed is not made afterwards");
    client.create(ROOT, "late").unwrap();
}

#[test]
fn an_unmount_does_not_wait_for_a_dead_server() {
    let world = World::new(14);
    let client = Arc::new(world.client());
    world.stop();
    let waiting = {
        let client = client.clone();
        std::thread::spawn(move || client.mkdir(ROOT, "d"))
    };
    client.fs.close();
    assert_eq!(waiting.join().unwrap(), Err(Errno(libc::ENOTCONN)));
}

/// Parks, and is interrupted when the test says so.
#[derive(Default)]
struct Parking {
    interrupt: Mutex<Option<Interrupt>>,
    answers: Arc<Mutex<Vec<Done<Reply>>>>,
}

impl Park for Parking {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        *self.interrupt.lock() = interrupt;
        let answers = self.answers.clone();
        Box::new(move |answer| answers.lock().push(answer))
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

#[test]
fn an_interrupted_request_leaves_nothing_behind() {
    let world = World::new(15);
    let client = world.client();
    world.stop();
    let parking = Parking::default();
    let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &parking };
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    assert!(matches!(client.fs.create(&cx, ROOT, b"never", 0o644, flags), Err(Stop::Parked)));
    parking.interrupt.lock().take().unwrap()();
    world.start();
    assert_eq!(client.lookup(ROOT, "never"), Ok(None), "it was not made yet, and nobody wants it");

    // An answer that comes too late is undone.
    let parking = Parking::default();
    let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &parking };
    assert!(matches!(client.fs.create(&cx, ROOT, b"made", 0o644, flags), Err(Stop::Parked)));
    let interrupt = parking.interrupt.lock().take().unwrap();
    while parking.answers.lock().is_empty() {
        std::thread::yield_now();
    }
    interrupt();
    assert!(client.lookup(ROOT, "made").unwrap().is_some());
    while world.figure("open_files") != 0 {
        std::thread::yield_now();
    }

    // A lock that is granted too late is returned.
    let (ino, fh) = client.create(ROOT, "locked").unwrap();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "locked"), ino);
    let theirs = other.open(ino).unwrap();
    other.lock(ino, theirs, 1, libc::F_WRLCK, false).unwrap();
    let parking = Parking::default();
    let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &parking };
    let lock =
        FileLock { end: u64::MAX, kind: libc::F_WRLCK, pid: 1, owner: 2, ..FileLock::default() };
    assert!(matches!(client.fs.setlk(&cx, ino, fh, &lock, true), Err(Stop::Parked)));
    parking.interrupt.lock().take().unwrap()();
    other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
    assert!(client.lookup(ROOT, "locked").unwrap().is_some());
    while other.lock(ino, theirs, 1, libc::F_WRLCK, false).is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn an_interrupted_unlock_still_frees_the_lock() {
    let world = World::new(16);
    let (client, other) = (world.client(), world.client());
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    // Connections fail.
    let server = world.net.server.lock().take().unwrap();
    world.net.cut_all();
    while server.control().clients().as_array().unwrap().iter().any(|c| c["connected"] == true) {
        std::thread::yield_now();
    }
    let parking = Parking::default();
    let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &parking };
    let all =
        FileLock { end: u64::MAX, kind: libc::F_UNLCK, pid: 1, owner: 1, ..FileLock::default() };
    assert!(matches!(client.fs.setlk(&cx, ino, fh, &all, false), Err(Stop::Parked)));
    parking.interrupt.lock().take().unwrap()();
    *world.net.server.lock() = Some(server);
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
}

/// A program that is interrupted while it waits for a lock, and asks again, as all do that handle
/// signals.
#[test]
fn asking_again_for_a_held_lock_keeps_it() {
    let world = World::new(17);
    let (client, other) = (world.client(), world.client());
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    // Held all the time: the requests below are for more than this.
    let first = FileLock { end: 9, kind: libc::F_WRLCK, pid: 1, owner: 1, ..FileLock::default() };
    client.me.call(|cx| client.fs.setlk(cx, ino, fh, &first, false)).unwrap();
    let rest = FileLock { start: 10, end: u64::MAX, ..first };
    let all = FileLock { end: u64::MAX, ..first };
    let set = |client: &Client, fh, lock: FileLock, wait| {
        client.me.call(|cx| client.fs.setlk(cx, ino, fh, &lock, wait))
    };
    let unlock = |lock| FileLock { kind: libc::F_UNLCK, ..lock };
    for round in 0..60 {
        set(&other, theirs, rest, true).unwrap();
        let parking = Parking::default();
        let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &parking };
        assert!(matches!(client.fs.setlk(&cx, ino, fh, &all, true), Err(Stop::Parked)));
        std::thread::scope(|scope| {
            let releasing = scope.spawn(|| set(&other, theirs, unlock(rest), false));
            if round % 2 == 0 {
                std::thread::sleep(Duration::from_micros(round * 20));
            }
            parking.interrupt.lock().take().unwrap()();
            assert_eq!(set(&client, fh, all, true), Ok(()));
            releasing.join().unwrap().unwrap();
        });
        assert!(client.lookup(ROOT, "f").unwrap().is_some(), "what was sent before has arrived");
        assert_eq!(
            set(&other, theirs, FileLock { start: 10, end: 10, ..first }, false),
            Err(Errno(libc::EAGAIN))
        );
        set(&client, fh, unlock(rest), false).unwrap();
        assert_eq!(
            set(&other, theirs, first, false),
            Err(Errno(libc::EAGAIN)),
            "what it had before"
        );
    }
}

#[test]
fn a_lock_is_not_given_back_with_another_request_of_its_owner_that_is_interrupted() {
    let world = World::new(19);
    let (client, other) = (world.client(), world.client());
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    let range = |start, end| {
        let kind = libc::F_WRLCK;
        FileLock { start, end, kind, pid: 1, owner: 1, ..FileLock::default() }
    };
    let set =
        |client: &Client, fh, lock| client.me.call(|cx| client.fs.setlk(cx, ino, fh, &lock, false));
    set(&other, theirs, range(5, 5)).unwrap();
    for _ in 0..10 {
        let waiting = [Parking::default(), Parking::default()];
        for (parking, end) in waiting.iter().zip([9, 99]) {
            let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: parking };
            let asked = client.fs.setlk(&cx, ino, fh, &range(0, end), true);
            assert!(matches!(asked, Err(Stop::Parked)));
        }
        for parking in &waiting {
            parking.interrupt.lock().take().unwrap()();
        }
        assert_eq!(set(&client, fh, range(10, 19)), Ok(()));
        assert!(client.lookup(ROOT, "f").unwrap().is_some(), "what was sent before has arrived");
        assert_eq!(set(&other, theirs, range(15, 15)), Err(Errno(libc::EAGAIN)));
        set(&client, fh, FileLock { kind: libc::F_UNLCK, ..range(10, 19) }).unwrap();
    }
}

#[test]
fn an_evicted_client_is_refused_and_its_locks_are_free() {
    let world = World::new(18);
    let (client, other) = (world.client(), world.client());
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"applied").unwrap();
    client.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(Errno(libc::EAGAIN)));
    let control = world.server().control();
    assert_eq!(control.evict("nobody"), 0);
    assert_eq!(control.evict("1"), 1);
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
    assert_eq!(client.append(ino, fh, b"late"), Err(Errno(libc::EIO)));
    assert_eq!(client.create(ROOT, "late"), Err(Errno(libc::EIO)));
    assert_eq!(other.read(ino, theirs, 100).unwrap(), b"applied");
    // A client that is away when it is evicted learns of it when it returns.
    let away = world.client();
    let server = world.net.server.lock().take().unwrap();
    world.net.cut_all();
    assert_eq!(control.evict("3"), 1);
    *world.net.server.lock() = Some(server);
    assert_eq!(away.lookup(ROOT, "f"), Err(Errno(libc::EIO)));
    assert_eq!(other.lookup(ROOT, "late"), Ok(None));
    assert_eq!(control.evict("test"), 1, "by name: the one that is left");
}

#[test]
fn an_eviction_survives_a_restart() {
    for crashes in [false, true] {
        let lease_term = Duration::from_millis(100);
        let options =
            ServerOptions { grace: Duration::from_secs(1), lease_term, ..server_options() };
        let mut world = World::with(19, options);
        let client = world.client();
        let (ino, fh) = client.create(ROOT, "f").unwrap();
        client.write(ino, fh, 0, b"applied").unwrap();
        client.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
        let server = world.take_server();
        world.net.cut_all();
        assert_eq!(server.control().evict("test"), 1);
        if crashes {
            drop(server)
        } else {
            server.stop()
        }
        world.reopen();
        world.start();
        assert_eq!(client.mkdir(ROOT, "late"), Err(Errno(libc::EIO)), "crash: {crashes}");
        assert_eq!(world.figure("locks"), 0);
        let other = world.client();
        assert_eq!(other.lookup(ROOT, "late"), Ok(None));
        let theirs = other.open(other.ino(ROOT, "f")).unwrap();
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
        // Only this session is evicted: a new mount works.
        assert!(world.client().mkdir(ROOT, "anew").is_ok());
    }
}
