//! The server crashes, and the device loses what was not flushed: what clients were told is there
//! again when they are back.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use ferry_sim::device::{SimDevice, SimRng};

use super::restarts::long_terms;
use super::simulation::store::Undivided;
use super::*;

/// A world whose device forgets.
pub(super) struct Crashing {
    pub(super) world: World,
    sim: Arc<SimDevice>,
    rng: SimRng,
}

impl Crashing {
    pub(super) fn new(seed: u64) -> Self {
        Self::with(seed, long_terms())
    }

    pub(super) fn with(seed: u64, options: ServerOptions) -> Self {
        let sim = Arc::new(SimDevice::new(128 << 20));
        let at_first = ServerOptions { grace: Duration::ZERO, ..options.clone() };
        let mut world = World::on(sim.clone(), seed, at_first);
        world.options = options;
        Self { world, sim, rng: SimRng::new(seed) }
    }

    /// From here on nothing becomes durable before the crash.
    pub(super) fn hold(&self) {
        self.sim.set_hold(true);
    }

    /// Kills the server, and the machine that it runs on.
    pub(super) fn crash(&mut self) {
        self.crash_by(|world| drop(world.take_server()));
    }

    /// The same; `end` takes the server away.
    fn crash_by(&mut self, end: impl FnOnce(&World)) {
        // From here on nothing becomes durable, so nobody is told that anything is.
        self.sim.set_hold(true);
        let image = self.sim.crash_image(self.sim.trace_len(), &mut self.rng);
        end(&self.world);
        self.world.net.cut_all();
        self.sim = Arc::new(image);
        self.world.dev = self.sim.clone();
        let fs = LocalFs::open(self.world.dev.clone(), fs_options(), Env::real()).unwrap();
        // What the dead server began never ends.
        std::mem::forget(std::mem::replace(&mut self.world.fs, fs));
    }

    /// Behind a crash: the connection ends at this message from here, and the next server crashes,
    /// too, or goes on.
    pub(super) fn start_and_cut(&mut self, message: u64, crashes: bool) {
        let messages = Arc::clone(&self.world.net.messages);
        let mut cuts = self.world.net.cuts.subscribe();
        messages.cut_at.store(messages.so_far.load(Ordering::SeqCst) + message, Ordering::SeqCst);
        self.world.start();
        self.world.net.runtime.block_on(cuts.changed()).unwrap();
        // Otherwise the connection alone is lost.
        if crashes {
            self.crash_and_start();
        }
    }

    /// Begins `act`, which waits for something to become durable, and does `then` meanwhile:
    /// nothing does before that.
    pub(super) fn held<T: Send>(
        &mut self,
        act: impl FnOnce() -> T + Send,
        then: impl FnOnce(&mut Self),
    ) -> T {
        self.sim.set_hold(true);
        let sim = Arc::clone(&self.sim);
        std::thread::scope(|scope| {
            let acting = scope.spawn(act);
            while sim.held() == 0 {
                std::thread::yield_now();
            }
            then(self);
            self.sim.set_hold(false);
            while !acting.is_finished() {
                self.sim.release_all(&mut self.rng);
                std::thread::yield_now();
            }
            acting.join().unwrap()
        })
    }

    /// The first client does not hear any more of what `act` makes durable.
    pub(super) fn unheard_by_the_first<T: Send>(&mut self, act: impl FnOnce() -> T + Send) -> T {
        self.held(act, |crashing| {
            crashing.world.net.silent_below.send_replace(1);
        })
    }

    /// The server crashes while `act` waits for something to become durable.
    pub(super) fn crash_under<T: Send>(&mut self, act: impl FnOnce() -> T + Send) -> T {
        self.held(act, |crashing| crashing.crash_and_start())
    }

    pub(super) fn crash_and_start(&mut self) {
        self.crash();
        self.world.start();
    }
}

/// What a client sees of an inode, and what its file holds.
pub(super) type Seen = BTreeMap<String, (Attr, Vec<u8>)>;

impl Client {
    pub(super) fn see(&self) -> Seen {
        let mut seen = Seen::new();
        self.see_below(ROOT, "", &mut seen);
        seen
    }

    fn see_below(&self, dir: Ino, path: &str, seen: &mut Seen) {
        for name in self.list(dir).unwrap() {
            let attr = self.lookup(dir, &name).unwrap().unwrap();
            let path = format!("{path}/{name}");
            let contents = match attr.mode & libc::S_IFMT {
                libc::S_IFREG => {
                    let fh = self.open(attr.ino).unwrap();
                    let contents = self.read(attr.ino, fh, 1 << 20).unwrap();
                    self.close(attr.ino, fh);
                    contents
                }
                libc::S_IFLNK => self.me.call(|cx| self.fs.readlink(cx, attr.ino)).unwrap(),
                _ => Vec::new(),
            };
            // These are not told exactly.
            let zero = Timestamp::default();
            seen.insert(
                path.clone(),
                (Attr { blocks: 0, atime: zero, ctime: zero, ..attr }, contents),
            );
            if attr.mode & libc::S_IFMT == libc::S_IFDIR {
                self.see_below(attr.ino, &path, seen);
            }
        }
    }

    /// Until it acknowledges early: earlier changes are decided by the server.
    pub(super) fn warm_up(self) -> Self {
        while self.figures("connection", "early_acknowledged") == 0 {
            self.mkdir(ROOT, "warm").unwrap();
            self.me.call(|cx| self.fs.rmdir(cx, ROOT, b"warm")).unwrap();
        }
        self.sync().unwrap();
        self
    }

    pub(super) fn not_durable(&self) -> u64 {
        // Both at one time.
        let connection = self.fs.connection();
        let of = |key: &str| connection[key].as_u64().expect("a number");
        of("replay_log_changes") + of("early_acknowledged")
    }
}

/// Early-acknowledged changes of every kind, one after the other.
struct History {
    dir: Ino,
    files: BTreeMap<&'static str, (Ino, u64)>,
}

const STEPS: usize = 22;

impl History {
    fn new() -> Self {
        Self { dir: ROOT, files: BTreeMap::new() }
    }

    fn make(&mut self, client: &Client, name: &'static str) {
        self.files.insert(name, client.create(self.dir, name).unwrap());
    }

    fn write(&self, client: &Client, name: &str, offset: u64, data: &[u8]) {
        let (ino, fh) = self.files[name];
        assert_eq!(client.write(ino, fh, offset, data), Ok(data.len() as u64));
    }

    fn step(&mut self, client: &Client, step: usize) {
        let dir = self.dir;
        match step {
            0 => self.dir = client.mkdir(ROOT, "d").unwrap(),
            1 => self.make(client, "a"),
            2 => self.write(client, "a", 0, b"contents of a"),
            3 => self.make(client, "b"),
            4 => self.write(client, "b", 0, &[7; 10_000]),
            5 => client.rename(dir, "a", "c").unwrap(),
            6 => drop(
                client
                    .set(self.files["a"].0, SetAttr { mode: Some(0o600), ..SetAttr::default() })
                    .unwrap(),
            ),
            7 => drop(
                client
                    .set(self.files["b"].0, SetAttr { size: Some(100), ..SetAttr::default() })
                    .unwrap(),
            ),
            8 => drop(client.me.call(|cx| client.fs.symlink(cx, dir, b"s", b"target")).unwrap()),
            9 => {
                client.me.call(|cx| client.fs.link(cx, self.files["a"].0, dir, b"l")).unwrap();
            }
            10 => self.write(client, "b", 5000, b"behind a hole"),
            11 => client.unlink(dir, "l").unwrap(),
            12 => self.make(client, "e"),
            13 => self.write(client, "e", 0, b"never to be seen"),
            14 => client.unlink(dir, "e").unwrap(),
            15 => self.write(client, "e", 5, b"still open"),
            16 => {
                let at = SetTime::At(Timestamp::new(1_000_000, 7));
                client
                    .set(self.files["b"].0, SetAttr { mtime: Some(at), ..SetAttr::default() })
                    .unwrap();
            }
            17 => drop(client.mkdir(dir, "gone").unwrap()),
            18 => client.me.call(|cx| client.fs.rmdir(cx, dir, b"gone")).unwrap(),
            19 => self.make(client, "f"),
            20 => self.write(client, "f", 0, b"replaces b"),
            21 => client.rename(dir, "f", "b").unwrap(),
            _ => unreachable!("there are no more"),
        }
    }
}

/// Nothing is lost, and nobody is told that anything is.
fn assert_all_there(world: &World, client: &Client, history: &History, before: &Seen, at: &str) {
    let now = client.see();
    assert!(now == *before, "{at}: {:?}\nnot {:?}", now.keys(), before.keys());
    for (name, (ino, fh)) in history.files.iter().filter(|(name, _)| **name != "e") {
        assert_eq!(client.fsync(*ino, *fh), Ok(()), "{at}: {name}");
    }
    // A file without a name ends with the server if its last name was removed durably. Its
    // early-acknowledged changes are reported as lost.
    let nameless = history.files.get("e").filter(|_| !before.contains_key("/d/e"));
    match nameless.map(|(ino, fh)| client.read(*ino, *fh, 100)) {
        Some(Err(Errno(libc::EIO))) => drop(client.sync()),
        Some(Ok(contents)) => assert!(contents.starts_with(b"never"), "{at}: {contents:?}"),
        Some(Err(error)) => panic!("{at}: {error}"),
        None => {}
    }
    assert_eq!(client.sync(), Ok(()), "{at}");
    assert_eq!(client.not_durable(), 0, "{at}: all of it is durable");
    assert_eq!(world.client().see(), *before, "{at}: seen by another");
}

#[test]
fn early_acknowledged_changes_survive_a_crash_after_any_change() {
    for seed in 0..2 {
        for steps in 0..=STEPS {
            let at = format!("seed {seed}, {steps} steps");
            let mut crashing = Crashing::new(1000 * seed + steps as u64);
            let client = crashing.world.client().warm_up();
            let mut history = History::new();
            for step in 0..steps {
                history.step(&client, step);
                // Now and then something becomes durable on the way.
                if (steps + step) % 7 == seed as usize * 3 {
                    client.sync().unwrap();
                }
            }
            let before = client.see();
            crashing.crash_and_start();
            assert_all_there(&crashing.world, &client, &history, &before, &at);
        }
    }
}

#[test]
fn a_replay_survives_a_crash_at_any_message() {
    for (message, crashes) in (1..24).flat_map(|message| [(message, true), (message, false)]) {
        let at = format!("message {message}, again: {crashes}");
        let mut crashing = Crashing::new(50 + message);
        crashing.world.net.messages.cut_at.store(u64::MAX, Ordering::SeqCst);
        let client = crashing.world.client().warm_up();
        let mut history = History::new();
        (0..STEPS).for_each(|step| history.step(&client, step));
        let before = client.see();
        crashing.crash();
        crashing.start_and_cut(message, crashes);
        assert_all_there(&crashing.world, &client, &history, &before, &at);
    }
}

#[test]
fn the_end_of_a_replay_waits_for_a_sync_that_succeeds() {
    let mut crashing = Crashing::new(9);
    let client = crashing.world.client().warm_up();
    let dir = client.mkdir(ROOT, "d").unwrap();
    client.sync().unwrap();
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.write(ino, fh, 0, b"told").unwrap();
    crashing.crash();
    let store = Arc::new(Undivided::failing(crashing.world.fs.clone(), 2));
    crashing.world.start_on(store.clone());
    let other = crashing.world.client();
    assert_eq!((other.ino(ROOT, "d"), other.ino(dir, "f")), (dir, ino), "behind the replay");
    assert_eq!(store.failing_syncs(), 0);
    // Nobody asked for another sync.
    crashing.crash_and_start();
    assert_eq!((client.sync(), client.figures("connection", "lost_changes")), (Ok(()), 0));
    assert_eq!(client.read(ino, fh, 10).unwrap(), b"told");
    let last = crashing.world.client();
    assert_eq!((last.ino(ROOT, "d"), last.ino(dir, "f")), (dir, ino), "it is durable");
}

#[test]
fn changes_survive_several_crashes() {
    let mut crashing = Crashing::new(7);
    // Whose term is over decides nothing, and what it has sent may fail.
    crashing.world.options = ServerOptions { lease_term: Duration::from_secs(4), ..long_terms() };
    let client = crashing.world.client().warm_up();
    let mut expected = BTreeMap::new();
    for round in 0..3 {
        let dir = client.mkdir(ROOT, &format!("d{round}")).unwrap();
        for i in 0..100 {
            let (ino, fh) = client.create(dir, &format!("f{i}")).unwrap();
            let data = format!("{round} {i}").into_bytes();
            client.write(ino, fh, 0, &data).unwrap();
            client.close(ino, fh);
            if i % 3 == 0 {
                client.fs.forget(ino, 1);
            }
            expected.insert(format!("/d{round}/f{i}"), data);
            if i == 50 {
                crashing.crash_and_start();
            }
        }
        // What came before it could acknowledge early again was decided by the server, and its
        // loss would be a deferred error.
        assert_eq!(client.sync(), Ok(()));
    }
    let seen = client.see();
    let files = seen.iter().filter(|(_, (attr, _))| attr.mode & libc::S_IFMT == libc::S_IFREG);
    let files: BTreeMap<_, _> =
        files.map(|(name, (_, data))| (name.clone(), data.clone())).collect();
    assert!(files == expected, "{:?}", files.keys().collect::<Vec<_>>());
}

#[test]
fn a_replay_does_not_overwrite_later_writes_of_another_client() {
    let mut crashing = Crashing::new(8);
    let (first, second) = (crashing.world.client().warm_up(), crashing.world.client());
    let (ino, fh) = first.create(ROOT, "f").unwrap();
    first.write(ino, fh, 0, b"first").unwrap();
    assert_eq!(second.ino(ROOT, "f"), ino);
    let theirs = second.open(ino).unwrap();
    // Changes acknowledged under the lease are durable before.
    second.write(ino, theirs, 0, b"SECOND").unwrap();
    assert_eq!(second.fsync(ino, theirs), Ok(()));
    crashing.crash_and_start();
    for (client, fh) in [(&first, fh), (&second, theirs)] {
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"SECOND");
        assert_eq!(client.fsync(ino, fh), Ok(()), "nothing of it is lost");
        assert_eq!(client.sync(), Ok(()));
    }
}

#[test]
fn changes_of_returned_inodes_are_durable_and_not_replayed() {
    let mut crashing = Crashing::new(9);
    let (first, second) = (crashing.world.client().warm_up(), crashing.world.client());
    let (ino, fh) = first.create(ROOT, "f").unwrap();
    first.write(ino, fh, 0, b"zero").unwrap();
    first.sync().unwrap();
    first.write(ino, fh, 0, b"first").unwrap();
    // The server decides this, and the lease goes behind it.
    first.me.call(|cx| first.fs.setxattr(cx, ino, b"user.a", b"1", XattrFlags::default())).unwrap();
    let theirs = {
        assert_eq!(second.ino(ROOT, "f"), ino);
        second.open(ino).unwrap()
    };
    second.write(ino, theirs, 0, b"SECOND").unwrap();
    assert_eq!(second.fsync(ino, theirs), Ok(()));
    crashing.crash_and_start();
    assert_eq!(second.read(ino, theirs, 100).unwrap(), b"SECOND");
    assert_eq!(second.fsync(ino, theirs), Ok(()));
    assert_eq!(first.read(ino, fh, 100).unwrap(), b"SECOND");
    // Where the other had the lease, its own write was durable before; else whether it was lost is
    // not known.
    let told = first.fsync(ino, fh);
    assert!(matches!(told, Ok(()) | Err(Errno(libc::EIO))), "{told:?}");
    assert_eq!(first.fsync(ino, fh), Ok(()), "once");
}

/// A client that takes the leases of those that it silences, by writing and syncing file `f`. They
/// do not know that they are not heard of any more.
fn fences_others(world: &World, ino: Ino) -> (Client, u64) {
    world.net.silence_all();
    let client = world.client();
    assert_eq!(client.ino(ROOT, "f"), ino);
    let fh = client.open(ino).unwrap();
    client.write(ino, fh, 0, b"SECOND").unwrap();
    assert_eq!(client.fsync(ino, fh), Ok(()));
    (client, fh)
}

#[test]
fn a_fenced_client_replays_nothing() {
    let mut crashing =
        Crashing::with(13, ServerOptions { lease_term: Duration::from_secs(1), ..long_terms() });
    let first = crashing.world.client().warm_up();
    let (ino, fh) = first.create(ROOT, "f").unwrap();
    first.sync().unwrap();
    first.write(ino, fh, 0, b"first").unwrap();
    let (second, theirs) = fences_others(&crashing.world, ino);
    crashing.crash_and_start();
    assert_eq!(second.read(ino, theirs, 100).unwrap(), b"SECOND");
    assert_eq!(first.read(ino, fh, 100).unwrap(), b"SECOND");
    assert_eq!(first.sync(), Err(Errno(libc::EIO)), "its write may be lost");
    assert_eq!(first.sync(), Ok(()), "once");
}

/// Otherwise the next server would not wait for what it acknowledges.
#[test]
fn a_fenced_client_is_recorded_again_before_it_acknowledges_early() {
    let options = ServerOptions { lease_term: Duration::from_secs(1), ..long_terms() };
    let mut crashing = Crashing::with(15, options);
    let first = crashing.world.client().warm_up();
    let dir = first.mkdir(ROOT, "d").unwrap();
    let (ino, fh) = first.create(ROOT, "f").unwrap();
    first.sync().unwrap();
    first.write(ino, fh, 0, b"first").unwrap();
    let (second, _) = fences_others(&crashing.world, ino);
    assert_eq!(crashing.world.fs.sessions().unwrap().len(), 1, "the first one is fenced");
    crashing.world.net.cut_all();
    assert_eq!(first.sync(), Err(Errno(libc::EIO)), "its write is lost");
    first.create(dir, "anew").unwrap();
    assert_eq!(crashing.world.fs.sessions().unwrap().len(), 2);
    first.create(dir, "early").unwrap();
    crashing.crash_and_start();
    assert_eq!(second.ino(ROOT, "d"), dir);
    assert!(second.lookup(dir, "anew").unwrap().is_some());
    assert!(second.lookup(dir, "early").unwrap().is_some());
    assert_eq!(first.sync(), Ok(()));
}

#[test]
fn other_clients_never_see_an_older_state_during_a_replay() {
    let mut crashing = Crashing::new(10);
    let first = crashing.world.client().warm_up();
    first.create(ROOT, "f").unwrap();
    crashing.crash();
    // Another is there before it.
    let fs = crashing.world.fs.clone() as Arc<dyn SessionStore>;
    let server = Arc::new(
        Server::start_with(fs, crashing.world.options.clone(), Env::real(), WALK_TIMES).unwrap(),
    );
    let own = Network::new(10);
    *own.server.lock() = Some(server.clone());
    let options = crashing.world.client_options("/");
    let fs = RemoteFs::connect(own.clone(), options, &Env::real()).unwrap();
    let second = Client { fs, me: InProcess::default() };
    assert_eq!(second.sync(), Ok(()), "it is connected, and what shows nothing waits for nobody");
    let asking = std::thread::spawn(move || second.lookup(ROOT, "f").unwrap().is_some());
    *crashing.world.net.server.lock() = Some(server);
    assert!(asking.join().unwrap(), "it waited for the client that had acknowledged it");
    assert_eq!(first.sync(), Ok(()));
    own.server.lock().take();
}

#[test]
fn an_open_for_writing_does_not_wait_for_leases_of_a_crashed_server() {
    let mut crashing = Crashing::new(14);
    let client = crashing.world.client().warm_up();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"contents").unwrap();
    client.close(ino, fh);
    client.sync().unwrap();
    crashing.crash_and_start();
    assert_eq!(client.lookup(ROOT, "f").unwrap().unwrap().ino, ino, "it has a read lease");
    let (opened, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| opened.send(client.open(ino)).unwrap());
        // A write lease is granted when the terms of the dead server are over, after 60 s.
        assert!(told.recv_timeout(Duration::from_secs(30)).expect("it is open").is_ok());
    });
}

#[test]
fn a_client_that_returns_after_the_grace_period_reports_its_losses_once() {
    let mut crashing = Crashing::new(11);
    let client = crashing.world.client().warm_up();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"x").unwrap();
    crashing.crash();
    // A short hold time, and no client comes.
    crashing.world.options = ServerOptions { grace: Duration::from_millis(10), ..long_terms() };
    assert_eq!(crashing.world.fs.sessions().unwrap().len(), 1);
    let fs = crashing.world.fs.clone() as Arc<dyn SessionStore>;
    let server =
        Server::start_with(fs, crashing.world.options.clone(), Env::real(), WALK_TIMES).unwrap();
    while !crashing.world.fs.sessions().unwrap().is_empty() {
        std::thread::yield_now();
    }
    *crashing.world.net.server.lock() = Some(Arc::new(server));
    assert_eq!(client.sync(), Err(Errno(libc::EIO)));
    assert_eq!(client.sync(), Ok(()), "once");
}

#[test]
fn early_acknowledged_changes_become_durable_without_an_fsync() {
    let crashing = Crashing::new(12);
    let client = crashing.world.client().warm_up();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"x").unwrap();
    while client.not_durable() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(crashing.world.figure("early_not_durable"), 0);
    let all = crashing.sim.crash_image(crashing.sim.trace_len(), &mut SimRng::new(1));
    let fs = LocalFs::open(Arc::new(all), fs_options(), Env::real()).unwrap();
    let me = InProcess::default();
    let found = me.call(|cx| fs.lookup(cx, ROOT, b"f")).unwrap().attr.unwrap();
    assert_eq!((found.ino, found.size), (ino, 1));
    fs.detach();
    fs.close().unwrap();
}

/// A file is made, durable, and its client was not told, when the server crashes; and so is what
/// was written to it.
#[test]
fn inodes_created_without_an_answer_survive_a_crash_during_their_claim() {
    let mut tried = 0;
    for (message, crashes) in (1..9).flat_map(|message| [(message, false), (message, true)]) {
        let at = format!("message {message}, again: {crashes}");
        let mut crashing = Crashing::new(4000 + message);
        let messages = Arc::clone(&crashing.world.net.messages);
        messages.cut_at.store(u64::MAX, Ordering::SeqCst);
        let client = crashing.world.client().warm_up();
        let dir = client.mkdir(ROOT, "d").unwrap();
        client.create(dir, "before").unwrap();
        client.sync().unwrap();
        // The change comes through, its answer does not.
        let server = crashing.world.net.server.lock().take().unwrap();
        let local = InProcess::default();
        let fs = Arc::clone(&crashing.world.fs);
        messages.cut_at.store(messages.so_far.load(Ordering::SeqCst) + 3, Ordering::SeqCst);
        let (ino, fh) = client.create(dir, "f").unwrap();
        client.write(ino, fh, 0, b"goes on").unwrap();
        let mut there = false;
        for _ in 0..2000 {
            there = local.call(|cx| fs.lookup(cx, dir, b"f")).unwrap().attr.is_some();
            if there && client.fs.connection()["connected"] == false {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if !there || client.fs.connection()["early_acknowledged"] != 2 {
            // Another message came between.
            *crashing.world.net.server.lock() = Some(server);
            continue;
        }
        tried += 1;
        local.call(|cx| fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).map(drop).unwrap();
        drop(fs);
        crashing.crash_by(|_| drop(server));
        crashing.start_and_cut(message, crashes);
        assert_eq!(client.fsync(ino, fh), Ok(()), "{at}");
        assert_eq!(client.read(ino, fh, 100).unwrap(), b"goes on", "{at}");
        assert_eq!(client.sync(), Ok(()), "{at}");
        assert_eq!(client.ino(dir, "f"), ino, "{at}");
    }
    assert!(tried >= 6, "{tried} of 16");
}
