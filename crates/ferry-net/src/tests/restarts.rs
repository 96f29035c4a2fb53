//! The server stops, crashes, or is gone for good.

use super::*;

#[test]
fn work_goes_on_where_it_was_when_the_server_is_back() {
    let mut world = World::new(10);
    let client = Arc::new(world.client());
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"before").unwrap();
    client.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    let dir = client.mkdir(ROOT, "d").unwrap();
    world.stop();
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

#[test]
fn nobody_takes_a_lock_before_those_who_had_one_are_back() {
    let options = ServerOptions { grace: Duration::from_secs(60), ..server_options() };
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
    assert_eq!(other.lock(ino, theirs, 1, libc::F_RDLCK, false), Err(Errno(libc::EAGAIN)));
    assert_eq!(client.append(ino, fh, b"x"), Ok(1));
    while world.figure("locks") != 1 {
        std::thread::yield_now();
    }
}

#[test]
fn a_crash_of_the_server_is_told_by_fsync_of_what_was_not_synced() {
    let mut world = World::new(12);
    let client = world.client();
    let (synced, a) = client.create(ROOT, "synced").unwrap();
    let (unsynced, b) = client.create(ROOT, "unsynced").unwrap();
    client.write(synced, a, 0, b"x").unwrap();
    client.fsync(synced, a).unwrap();
    client.write(unsynced, b, 0, b"y").unwrap();
    // Gone without a word.
    drop(world.take_server());
    world.reopen();
    world.start();
    assert_eq!(client.fsync(synced, a), Ok(()));
    assert_eq!(client.fsync(unsynced, b), Err(Errno(libc::EIO)), "it may have been lost");
    assert_eq!(client.fsync(unsynced, b), Ok(()), "told once");
    let dir = client.me.call(|cx| client.fs.fsyncdir(cx, ROOT, 0, false));
    assert_eq!(dir, Err(Errno(libc::EIO)), "names may have been lost");
    let sync = || client.me.call(|cx| client.fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0));
    assert_eq!(sync(), Ok(Vec::new()), "all of it was told");
}

#[test]
fn operations_wait_for_a_server_that_is_gone_and_then_fail() {
    let mut world = World::new(13);
    let options = ClientOptions {
        server: "memory".into(),
        path: b"/".to_vec(),
        name: b"impatient".to_vec(),
        timeout: Duration::from_millis(300),
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
fn an_unmount_does_not_wait_for_a_server_that_is_gone() {
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
}

#[test]
fn who_is_interrupted_leaves_nothing_behind() {
    let mut world = World::new(15);
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

    // A lock that is granted too late is given back.
    let (ino, fh) = client.create(ROOT, "locked").unwrap();
    let other = world.client();
    assert_eq!(other.ino(ROOT, "locked"), ino);
    let theirs = other.open(ino).unwrap();
    other.lock(ino, theirs, 1, libc::F_WRLCK, false).unwrap();
    let parking = Parking::default();
    let cx = Cx { uid: 0, gid: 0, pid: 1, umask: 0, park: &parking };
    let lock = FileLock { end: u64::MAX, kind: libc::F_WRLCK, pid: 1, owner: 2, ..FileLock::default() };
    assert!(matches!(client.fs.setlk(&cx, ino, fh, &lock, true), Err(Stop::Parked)));
    parking.interrupt.lock().take().unwrap()();
    other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
    assert!(client.lookup(ROOT, "locked").unwrap().is_some());
    while other.lock(ino, theirs, 1, libc::F_WRLCK, false).is_err() {
        std::thread::yield_now();
    }
}
