//! A lost lock is never reclaimed, and what was written under a lost lock never lands under the
//! lock of another client.

use std::sync::mpsc::{Receiver, Sender, channel};

use ferry_env::Clock;

use super::restarts::long_terms;
use super::*;

const EIO: Errno = Errno(libc::EIO);
const EAGAIN: Errno = Errno(libc::EAGAIN);

/// Sessions end as soon as their connection is closed.
fn short_lives() -> ServerOptions {
    let lease_term = Duration::from_millis(500);
    ServerOptions { session_life: Duration::ZERO, lease_term, ..server_options() }
}

/// A client with a network of its own: it can be away while others are not.
struct Away {
    net: Arc<Network>,
    client: Client,
}

impl Away {
    fn new(world: &World, asynchronous: bool) -> Self {
        Self::with(world, ClientOptions { asynchronous, ..world.client_options("/") })
    }

    fn with(world: &World, options: ClientOptions) -> Self {
        let net = Network::new(world.net.random.next());
        *net.server.lock() = Some(world.server());
        let fs = RemoteFs::connect(net.clone(), options, &Env::real()).unwrap();
        Self { net, client: Client { fs, me: InProcess::default() } }
    }

    /// Its connections fail until it is back.
    fn goes(&self) {
        drop(self.net.server.lock().take());
        self.net.cut_all();
    }

    /// The same, until the server has ended its session. `others`: sessions that stay.
    fn goes_for_good(&self, world: &World, others: usize) {
        self.goes();
        while world.server().control().clients().as_array().unwrap().len() > others {
            std::thread::yield_now();
        }
    }

    fn comes_back(&self, world: &World) {
        *self.net.server.lock() = Some(world.server());
    }
}

fn flock(client: &Client, ino: Ino, fh: u64, kind: i32) -> Done {
    let lock = FileLock { start: 0, end: u64::MAX, kind, pid: 1, owner: fh, flock: true };
    client.me.call(|cx| client.fs.setlk(cx, ino, fh, &lock, false))
}

/// Both clients have the file open, and one has locked and written it.
fn locked(world: &World, away: &Client, other: &Client) -> (Ino, u64, u64) {
    let (ino, fh) = away.create(ROOT, "f").unwrap();
    away.lock(ino, fh, 1, libc::F_WRLCK, false).unwrap();
    away.write(ino, fh, 0, b"away").unwrap();
    away.sync().unwrap();
    assert_eq!(other.ino(ROOT, "f"), ino);
    let theirs = other.open(ino).unwrap();
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(EAGAIN));
    assert_eq!(world.figure("locks"), 1);
    (ino, fh, theirs)
}

#[test]
fn a_lock_that_another_client_had_meanwhile_is_not_reclaimed() {
    for flocks in [false, true] {
        let world = World::with(700, short_lives());
        let (away, other) = (Away::new(&world, true), world.client());
        let (ino, fh, theirs) = locked(&world, &away.client, &other);
        let second = away.client.open(ino).unwrap();
        if flocks {
            away.client.lock(ino, fh, 1, libc::F_UNLCK, false).unwrap();
            flock(&away.client, ino, fh, libc::F_WRLCK).unwrap();
        }
        away.goes_for_good(&world, 1);
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
        other.write(ino, theirs, 0, b"OTHER").unwrap();
        other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
        away.comes_back(&world);
        let client = &away.client;
        for fh in [fh, second] {
            assert_eq!(client.write(ino, fh, 0, b"stale"), Err(EIO));
            assert_eq!(client.read(ino, fh, 10), Err(EIO));
            assert_eq!(client.fsync(ino, fh), Err(EIO));
            assert_eq!(client.lock(ino, fh, 1, libc::F_WRLCK, false), Err(EIO));
            assert_eq!(client.me.call(|cx| client.fs.flush(cx, ino, fh, 1)), Err(EIO), "close");
        }
        assert_eq!(world.figure("locks"), 0);
        assert_eq!(
            client.lock(ino, fh, 1, libc::F_UNLCK, false),
            Ok(()),
            "it gives back what it has not"
        );
        // A new descriptor works.
        let anew = client.open(ino).unwrap();
        assert_eq!(client.read(ino, anew, 10).unwrap(), b"OTHER");
        client.lock(ino, anew, 1, libc::F_WRLCK, true).unwrap();
        assert_eq!(client.append(ino, anew, b"!"), Ok(1));
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Err(EAGAIN));
        for fh in [fh, second, anew] {
            client.close(ino, fh);
        }
        assert_eq!(other.read(ino, theirs, 10).unwrap(), b"OTHER!");
    }
}

#[test]
fn changes_queued_under_a_lost_lock_fail() {
    let world = World::with(701, short_lives());
    let (away, other) = (Away::new(&world, false), world.client());
    let (ino, fh, theirs) = locked(&world, &away.client, &other);
    let (data, data_fh) = away.client.create(ROOT, "data").unwrap();
    away.goes_for_good(&world, 1);
    let truncate = SetAttr { size: Some(0), ..SetAttr::default() };
    std::thread::scope(|scope| {
        let client = &away.client;
        let queued = [
            scope.spawn(|| client.write(ino, fh, 0, b"stale").map(drop)),
            scope.spawn(|| {
                client.me.call(|cx| client.fs.setattr(cx, ino, Some(fh), &truncate)).map(drop)
            }),
            // What the lock was to protect may be in another file.
            scope.spawn(|| client.write(data, data_fh, 0, b"stale").map(drop)),
        ];
        while client.fs.connection()["unanswered_changes"].as_u64() < Some(3) {
            std::thread::yield_now();
        }
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
        other.write(ino, theirs, 0, b"OTHER").unwrap();
        away.comes_back(&world);
        queued.into_iter().for_each(|one| assert_eq!(one.join().unwrap(), Err(EIO)));
    });
    assert_eq!(other.read(ino, theirs, 10).unwrap(), b"OTHER");
    let theirs = other.open(other.ino(ROOT, "data")).unwrap();
    assert_eq!(other.read(data, theirs, 10).unwrap(), b"");
    assert_eq!(away.client.write(data, data_fh, 0, b"goes on"), Ok(7), "there was no lock on it");
}

#[test]
fn a_client_that_comes_after_the_grace_period_has_lost_its_locks() {
    for (crashes, removes) in [(false, false), (true, false), (true, true)] {
        let mut world = World::new(702);
        let (away, other) = (Away::new(&world, false), world.client());
        let (ino, fh, theirs) = locked(&world, &away.client, &other);
        let (data, data_fh) = away.client.create(ROOT, "data").unwrap();
        away.client.sync().unwrap();
        away.goes();
        let unanswered = || away.client.fs.connection()["unanswered_changes"].as_u64().unwrap();
        let before = unanswered();
        let client = || Client { fs: Arc::clone(&away.client.fs), me: InProcess::default() };
        // What the lock was to protect may be in another file, or the file is meant by its name.
        let (of_file, of_data, of_name) = (client(), client(), client());
        let cut = SetAttr { size: Some(2), ..SetAttr::default() };
        let (reader, syncer) = (client(), client());
        let asking = [
            std::thread::spawn(move || reader.read(ino, fh, 10).map(drop)),
            std::thread::spawn(move || syncer.fsync(ino, fh)),
        ];
        let requests = || away.client.fs.connection()["unanswered_requests"].as_u64().unwrap();
        while requests() < 2 {
            std::thread::yield_now();
        }
        let writing = [
            std::thread::spawn(move || of_file.write(ino, fh, 0, b"stale").map(drop)),
            std::thread::spawn(move || of_data.write(data, data_fh, 0, b"stale").map(drop)),
            std::thread::spawn(move || {
                of_name.me.call(|cx| of_name.fs.setattr(cx, ino, None, &cut)).map(drop)
            }),
        ];
        while unanswered() < before + 3 {
            std::thread::yield_now();
        }
        world.options.grace = Duration::from_millis(100);
        if crashes {
            drop(world.take_server())
        } else {
            world.stop()
        }
        world.reopen();
        world.start();
        // It is granted after the grace period.
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
        other.write(ino, theirs, 0, b"OTHER").unwrap();
        other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
        if removes {
            other.unlink(ROOT, "f").unwrap();
            other.close(ino, theirs);
            other.fs.forget(ino, 1);
            while InProcess::default().call(|cx| world.fs.getattr(cx, ino, None)).is_ok() {
                std::thread::yield_now();
            }
        }
        away.comes_back(&world);
        for (number, one) in asking.into_iter().enumerate() {
            assert!(one.join().unwrap().is_err(), "{crashes}, {removes}, request {number}");
        }
        for (number, one) in writing.into_iter().enumerate() {
            let answer = one.join().unwrap();
            let is_refused = answer == Err(EIO) || removes && answer == Err(Errno(libc::ESTALE));
            assert!(is_refused, "{crashes}, {removes}, {number}: {answer:?}");
        }
        assert_eq!(other.ino(ROOT, "data"), data);
        assert_eq!(other.read(data, other.open(data).unwrap(), 10).unwrap(), b"");
        assert_eq!(away.client.write(data, data_fh, 0, b"goes on"), Ok(7), "it has heard of it");
        assert_eq!(away.client.write(ino, fh, 0, b"stale"), Err(EIO));
        if !removes {
            assert_eq!(other.read(ino, theirs, 10).unwrap(), b"OTHER");
        }
        assert_eq!(world.figure("locks"), 0);
    }
}

/// It was not in the stream, for it waited for a lease.
#[test]
fn a_change_that_waited_for_a_lease_when_a_lock_was_lost_fails() {
    let mut world = World::with(713, ServerOptions { grace: Duration::ZERO, ..long_terms() });
    let (away, other) = (Away::new(&world, true), world.client());
    let away = Away { client: away.client.warm_up(), net: away.net };
    let (ino, _, theirs) = locked(&world, &away.client, &other);
    let (data, of_data) = other.create(ROOT, "data").unwrap();
    assert_eq!(away.client.ino(ROOT, "data"), data);
    let data_fh = away.client.open(data).unwrap();
    other.write(data, of_data, 0, b"before").unwrap();
    // It may come back behind the hold time, which is short, and then replays nothing.
    other.sync().unwrap();
    world.net.silence_all();
    let client = Client { fs: Arc::clone(&away.client.fs), me: InProcess::default() };
    let waiting = std::thread::spawn(move || client.write(data, data_fh, 0, b"stale"));
    let requests = || away.client.fs.connection()["unanswered_requests"].as_u64().unwrap();
    while requests() == 0 {
        std::thread::yield_now();
    }
    away.goes();
    drop(world.take_server());
    world.options.grace = Duration::from_millis(100);
    world.options.lease_term = Duration::from_millis(500);
    world.reopen();
    world.start();
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
    other.write(data, of_data, 0, b"OTHERS").unwrap();
    other.sync().unwrap();
    other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
    away.comes_back(&world);
    assert_eq!(waiting.join().unwrap(), Err(EIO));
    assert_eq!(other.read(data, of_data, 10).unwrap(), b"OTHERS");
}

/// Otherwise nobody could have it as long as the client lives.
#[test]
fn a_lock_that_is_given_back_after_the_operation_timeout_is_free_when_the_client_is_back() {
    let world = World::new(714);
    let timeout = Duration::from_millis(300);
    let options = ClientOptions { timeout, ..world.client_options("/") };
    let (away, other) = (Away::with(&world, options), world.client());
    let (ino, fh, theirs) = locked(&world, &away.client, &other);
    away.goes();
    let timed_out = Err(Errno(libc::ETIMEDOUT));
    assert_eq!(away.client.sync(), timed_out);
    // However often a program asks, the server is told once.
    for _ in 0..10 {
        assert_eq!(away.client.lock(ino, fh, 1, libc::F_UNLCK, false), timed_out);
        assert_eq!(away.client.lock(ino, fh, 1, libc::F_WRLCK, false), timed_out);
    }
    assert_eq!(away.client.fs.connection()["unanswered_changes"], 1);
    away.client.close(ino, fh);
    away.comes_back(&world);
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
    other.close(ino, theirs);
    while world.figure("open_files") > 0 {
        std::thread::yield_now();
    }
}

/// There is no lock on it, and opening it has changed nothing.
#[test]
fn a_file_that_was_opened_early_when_the_session_ended_is_open_in_the_next() {
    let world = World::with(712, short_lives());
    let Away { net, client } = Away::new(&world, true);
    let away = Away { net, client: client.warm_up() };
    let client = &away.client;
    let (ino, made) = client.create(ROOT, "f").unwrap();
    client.write(ino, made, 0, b"x").unwrap();
    client.sync().unwrap();
    away.net.silence_all();
    let early = client.open(ino).unwrap();
    assert_eq!(client.fs.unanswered(), Ok(1), "the server does not know that it is open");
    away.goes_for_good(&world, 0);
    away.comes_back(&world);
    for fh in [made, early] {
        assert_eq!(client.read(ino, fh, 10).unwrap(), b"x");
    }
}

/// The server that it comes to has a grace period, but another client had the lock at the server in
/// between.
#[test]
fn a_lock_of_two_servers_ago_is_not_reclaimed() {
    let mut world = World::new(703);
    let (away, other) = (Away::new(&world, true), world.client());
    let (ino, fh, theirs) = locked(&world, &away.client, &other);
    away.goes();
    world.stop();
    world.options.grace = Duration::from_millis(100);
    world.reopen();
    world.start();
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
    other.write(ino, theirs, 0, b"OTHER").unwrap();
    other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
    // It has another lock, so the next server has a grace period.
    let (_, mine) = other
        .create(ROOT, "mine")
        .map(|(ino, fh)| (other.lock(ino, fh, 1, libc::F_WRLCK, true), ino))
        .unwrap();
    world.stop();
    world.options.grace = Duration::from_secs(60);
    world.reopen();
    world.start();
    away.comes_back(&world);
    assert_eq!(away.client.write(ino, fh, 0, b"stale"), Err(EIO));
    let mine_fh = other.open(mine).unwrap();
    assert_eq!(other.write(mine, mine_fh, 0, b"x"), Ok(1), "a connected client has its lock again");
    assert_eq!(world.figure("locks"), 1);
}

#[test]
fn a_session_that_has_ended_reclaims_nothing_from_the_next_server() {
    let mut world = World::with(704, short_lives());
    let (away, other) = (Away::new(&world, true), world.client());
    let (ino, fh, theirs) = locked(&world, &away.client, &other);
    away.goes_for_good(&world, 1);
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
    other.write(ino, theirs, 0, b"OTHER").unwrap();
    other.sync().unwrap();
    drop(world.take_server());
    world.options = ServerOptions {
        grace: Duration::from_secs(60),
        lease_term: Duration::from_millis(100),
        ..server_options()
    };
    world.reopen();
    // It comes first.
    let server = world.net.server.lock().take();
    assert!(server.is_none());
    world.start();
    let begun = world.net.server.lock().take();
    away.net.server.lock().clone_from(&begun);
    assert_eq!(away.client.write(ino, fh, 0, b"stale"), Err(EIO));
    *world.net.server.lock() = begun;
    assert_eq!(other.write(ino, theirs, 0, b"other"), Ok(5), "it has its lock again");
    assert_eq!(world.figure("locks"), 1);
}

#[test]
fn no_lock_changes_its_holder_while_the_server_stops() {
    let mut world = World::new(705);
    let (away, other) = (Away::new(&world, true), Arc::new(world.client()));
    let (ino, fh, theirs) = locked(&world, &away.client, &other);
    let waiting = std::thread::spawn({
        let other = Arc::clone(&other);
        move || other.lock(ino, theirs, 1, libc::F_WRLCK, true)
    });
    while other.fs.connection()["unanswered_requests"].as_u64() != Some(1) {
        std::thread::yield_now();
    }
    drop(away.net.server.lock().take());
    world.stop();
    world.options.grace = Duration::from_secs(60);
    world.reopen();
    world.start();
    away.comes_back(&world);
    assert_eq!(away.client.write(ino, fh, 0, b"mine"), Ok(4), "it has its lock again");
    assert!(!waiting.is_finished());
    away.client.lock(ino, fh, 1, libc::F_UNLCK, false).unwrap();
    other.fs.close();
    waiting.join().unwrap().unwrap_err();
}

/// Stops a thread of the server that asks for the time of day, when the test says so: a change asks
/// when it is about to be applied.
struct Stopped {
    clock: Arc<dyn Clock>,
    stop: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Clock for Stopped {
    fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }
    fn wall(&self) -> Duration {
        let stop = self.stop.lock().take();
        if let Some((reached, go_on)) = stop {
            reached.send(()).unwrap();
            go_on.recv().unwrap();
        }
        self.clock.wall()
    }
}

#[test]
fn a_lock_is_free_after_the_last_change_of_its_session() {
    let clock = Arc::new(Stopped { clock: Env::real().clock, stop: Mutex::default() });
    let env = Env { clock: clock.clone(), ..Env::real() };
    let world = World::serving(706, server_options(), env);
    let (holder, other) = (world.waiting_client(), world.waiting_client());
    let (ino, fh, theirs) = locked(&world, &holder, &other);
    let ((reached, is_reached), (go_on, goes_on)) = (channel(), channel());
    std::thread::scope(|scope| {
        *clock.stop.lock() = Some((reached, goes_on));
        let _writing = scope.spawn(|| holder.write(ino, fh, 0, b"last").map(drop));
        is_reached.recv().unwrap();
        assert_eq!(world.server().control().evict("1"), 1);
        assert_eq!(
            other.lock(ino, theirs, 1, libc::F_WRLCK, false),
            Err(EAGAIN),
            "its write may still come"
        );
        go_on.send(()).unwrap();
        assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, true), Ok(()));
        let read = other.read(ino, theirs, 10).unwrap();
        assert_eq!(other.read(ino, theirs, 10).unwrap(), read);
    });
}

/// No session holds a lock, so the server need not wait.
#[test]
fn a_server_grants_locks_at_once_if_none_can_be_reclaimed() {
    let mut world = World::new(707);
    let client = world.client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    world.stop();
    world.options.grace = Duration::from_secs(600);
    world.reopen();
    world.start();
    assert_eq!(client.lock(ino, fh, 1, libc::F_WRLCK, true), Ok(()));
}

/// The kernel does not report such a lock when the open file is closed: no process owns it.
#[test]
fn a_lock_of_an_open_file_description_ends_with_it() {
    let world = World::new(708);
    let (holder, other) = (world.waiting_client(), world.client());
    let (ino, fh) = holder.create(ROOT, "f").unwrap();
    let second = holder.open(ino).unwrap();
    let theirs = other.open(other.ino(ROOT, "f")).unwrap();
    let (process, description) = (1, 77);
    let flush = |fh| holder.me.call(|cx| holder.fs.flush(cx, ino, fh, process));
    // An answer comes behind the messages that were sent before it.
    let told = |name| assert!(holder.mkdir(ROOT, name).is_ok());

    holder.lock(ino, fh, description, libc::F_WRLCK, false).unwrap();
    flush(fh).unwrap();
    flush(second).unwrap();
    holder.close(ino, second);
    told("other descriptors");
    assert_eq!(
        other.lock(ino, theirs, 1, libc::F_WRLCK, false),
        Err(EAGAIN),
        "the description is still open"
    );
    flush(fh).unwrap();
    holder.close(ino, fh);
    told("closed");
    assert_eq!(world.figure("locks"), 0);
    assert_eq!(other.lock(ino, theirs, 1, libc::F_WRLCK, false), Ok(()));
    other.lock(ino, theirs, 1, libc::F_UNLCK, false).unwrap();
}

#[test]
fn closing_a_file_keeps_locks_taken_through_another_description() {
    let world = World::new(709);
    let (holder, other) = (world.waiting_client(), world.client());
    let (ino, first) = holder.create(ROOT, "f").unwrap();
    let (second, third) = (holder.open(ino).unwrap(), holder.open(ino).unwrap());
    let theirs = other.open(other.ino(ROOT, "f")).unwrap();
    let told = |name| assert!(holder.mkdir(ROOT, name).is_ok());

    // A process closes one, and locks through another before the kernel's release of the first
    // arrives.
    holder.lock(ino, first, 1, libc::F_WRLCK, false).unwrap();
    holder.me.call(|cx| holder.fs.flush(cx, ino, first, 1)).unwrap();
    holder.lock(ino, second, 1, libc::F_WRLCK, false).unwrap();
    holder.close(ino, first);
    told("process");
    assert_eq!(other.lock(ino, theirs, 1, libc::F_RDLCK, false), Err(EAGAIN));
    // The same without a flush between: the range is the newer's.
    holder.lock(ino, third, 1, libc::F_WRLCK, false).unwrap();
    holder.close(ino, second);
    told("range");
    assert_eq!(other.lock(ino, theirs, 1, libc::F_RDLCK, false), Err(EAGAIN));
    assert_eq!(world.figure("locks"), 1);
    holder.close(ino, third);
    told("none");
    assert_eq!(other.lock(ino, theirs, 1, libc::F_RDLCK, false), Ok(()));
}

#[test]
fn a_lock_is_reclaimed_after_a_crash_only_with_its_open_file() {
    let mut world = World::new(710);
    let holder = world.waiting_client();
    let [held, closed] = ["held", "closed"].map(|name| {
        let (ino, fh) = holder.create(ROOT, name).unwrap();
        holder.lock(ino, fh, 77, libc::F_WRLCK, false).unwrap();
        (ino, fh)
    });
    holder.sync().unwrap();
    assert_eq!(world.figure("locks"), 2);
    drop(world.take_server());
    holder.close(closed.0, closed.1);
    world.options.grace = Duration::from_secs(60);
    world.reopen();
    world.start();
    assert_eq!(holder.write(held.0, held.1, 0, b"here"), Ok(4));
    assert_eq!(world.figure("locks"), 1, "of the file that is open");
    holder.close(held.0, held.1);
    holder.mkdir(ROOT, "told").unwrap();
    assert_eq!(world.figure("locks"), 0);
}
