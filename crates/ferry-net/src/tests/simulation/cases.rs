//! Cases in which file systems whose clients answer before the server does have lost or mixed up
//! what programs had been told.

use std::collections::BTreeSet;

use super::*;

/// No faults but those of the case.
const CASE: Plan = Plan {
    clients: 0,
    steps: 0,
    faults: Faults { cut: 0, swallow: 0, hold: 0, rate: 0, latency: 0 },
    ..Plan::GENTLE
};

/// A server, and clients that come as they are asked for.
struct Lab {
    sim: Arc<Sim>,
    random: SimRng,
    _from: UnboundedReceiver<Event>,
}

struct Mounted {
    way: Arc<Way>,
    client: Client,
}

impl std::ops::Deref for Mounted {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Lab {
    fn new(seed: u64) -> Self {
        Self::with(seed, CASE)
    }

    fn with(seed: u64, plan: Plan) -> Self {
        Self::on(seed, plan, Env::real())
    }

    fn on(seed: u64, plan: Plan, env: Env) -> Self {
        let (to, from) = unbounded_channel();
        Self { sim: Sim::new(seed, plan, &to, env), random: SimRng::new(seed), _from: from }
    }

    fn mount(&self, asynchronous: bool) -> Mounted {
        let id = self.sim.next_id.fetch_add(1, Ordering::SeqCst);
        let way = Way::new(&self.sim.net, id, false);
        let client = mount(&way, id, asynchronous, &self.sim.env);
        Mounted { way, client }
    }

    fn client(&self) -> Mounted {
        self.mount(true)
    }

    /// A client that decides alone in a directory of its own.
    fn alone(&self, name: &str) -> (Mounted, Ino) {
        let client = self.client();
        let dir = client.mkdir(ROOT, name).unwrap();
        client.warm(dir, "first");
        (client, dir)
    }

    fn crash(&mut self) {
        self.sim.crash(&mut self.random);
    }

    fn fs(&self) -> Arc<LocalFs> {
        self.sim.volume.lock().1.clone()
    }

    /// What is on the volume under that name.
    fn found(&self, dir: Ino, name: &str) -> Option<(Ino, Vec<u8>)> {
        let fs = self.fs();
        inode(&fs, dir, name).map(|ino| (ino, contents(&fs, ino)))
    }

    fn sessions(&self) -> Vec<serde_json::Value> {
        let server = self.sim.net.server.lock().clone().unwrap();
        server.control().clients().as_array().unwrap().clone()
    }

    fn figure(&self, of: &str) -> u64 {
        self.sessions().iter().map(|session| session[of].as_u64().unwrap()).sum()
    }
}

impl Mounted {
    /// The first changes ask for what later ones need.
    fn warm(&self, dir: Ino, name: &str) {
        let (ino, fh) = self.create(dir, name).unwrap();
        self.write(ino, fh, 0, b"first").unwrap();
        self.close(ino, fh);
        self.sync().unwrap();
    }

    /// What it was told is made, or that it is lost is told, once; `true`: it is made.
    fn is_intact(&self) -> bool {
        let is_intact = match self.sync() {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(error, Errno(libc::EIO));
                false
            }
        };
        assert_eq!(self.sync(), Ok(()), "told once");
        is_intact
    }

    fn size(&self, ino: Ino) -> u64 {
        self.me.call(|cx| self.fs.getattr(cx, ino, None)).unwrap().0.size
    }

    fn fdatasync(&self, ino: Ino, fh: u64) -> Done {
        self.me.call(|cx| self.fs.fsync(cx, ino, fh, true))
    }
}

/// An event that must come.
fn until(what: &str, mut has_come: impl FnMut() -> bool) {
    let clock = Env::real().clock;
    let deadline = clock.monotonic() + ANSWER_TIME_MAX / 2;
    while !has_come() {
        assert!(clock.monotonic() < deadline, "{what}: never");
        std::thread::yield_now();
    }
}

#[test]
fn what_is_done_to_a_file_whose_create_is_not_confirmed_is_done_once() {
    let mut lab = Lab::new(500);
    let (client, dir) = lab.alone("d");
    client.way.silence();
    let (ino, fh) = client.create(dir, "a").unwrap();
    assert_eq!(client.write(ino, fh, 0, b"contents"), Ok(8));
    client.rename(dir, "a", "b").unwrap();
    client.set(ino, SetAttr { mode: Some(0o600), size: Some(4), ..SetAttr::default() }).unwrap();
    client.link(ino, dir, "c").unwrap();
    assert_eq!(client.append(ino, fh, b"end"), Ok(3));
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| client.fsync(ino, fh));
        let other = scope.spawn(|| client.fsync_dir(dir));
        assert!(!syncing.is_finished() && !other.is_finished(), "nothing of it is there yet");
        assert_eq!(lab.found(dir, "b"), None);
        // Nothing that was sent has arrived: all of it goes on the next connection.
        lab.sim.net.cut_all();
        assert_eq!((syncing.join().unwrap(), other.join().unwrap()), (Ok(()), Ok(())));
    });
    lab.crash();
    assert_eq!(lab.found(dir, "a"), None);
    for name in ["b", "c"] {
        assert_eq!(lab.found(dir, name), Some((ino, b"contend".to_vec())), "{name}");
    }
    let attr = client.lookup(dir, "b").unwrap().unwrap();
    assert_eq!((attr.ino, attr.mode & 0o7777, attr.nlink, attr.size), (ino, 0o600, 2, 7));
    assert!(client.is_intact(), "all of it was durable");
    assert_eq!(client.append(ino, fh, b"."), Ok(1), "and it is open");
}

#[test]
fn an_unconfirmed_name_that_replaces_a_removed_one_means_the_second_file() {
    let mut lab = Lab::new(501);
    let (client, dir) = lab.alone("d");
    for (round, confirmed) in [false, true].into_iter().enumerate() {
        let name = format!("n{round}");
        client.warm(dir, &format!("warm {round}"));
        let (first, old) = client.create(dir, &name).unwrap();
        client.write(first, old, 0, b"first file").unwrap();
        if confirmed {
            client.sync().unwrap();
        }
        client.way.silence();
        client.unlink(dir, &name).unwrap();
        let (second, new) = client.create(dir, &name).unwrap();
        assert_ne!(first, second);
        client.write(second, new, 0, b"second").unwrap();
        assert_eq!(client.write(first, old, 10, b", open"), Ok(6), "without a name it lives on");
        lab.sim.net.cut_all();
        let other = lab.client();
        assert_eq!(other.ino(ROOT, "d"), dir);
        assert_eq!(other.ino(dir, &name), second);
        assert_eq!(client.read(first, old, 100).unwrap(), b"first file, open");
        assert!(client.is_intact());
        other.fs.close();
        lab.crash();
        assert_eq!(lab.found(dir, &name), Some((second, b"second".to_vec())));
        // Files without names went with the server.
        let _told = client.is_intact();
        client.close(first, old);
        client.close(second, new);
    }
}

#[test]
fn what_fdatasync_has_said_survives_a_crash_and_what_came_behind_it_survives_or_is_told() {
    let mut lab = Lab::new(502);
    let (client, dir) = lab.alone("d");
    client.way.silence();
    let (ino, fh) = client.create(dir, "f").unwrap();
    client.write(ino, fh, 0, b"synced").unwrap();
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| client.fdatasync(ino, fh));
        lab.sim.net.cut_all();
        assert_eq!(syncing.join().unwrap(), Ok(()));
    });
    client.append(ino, fh, b", not synced").unwrap();
    lab.crash();
    let told = client.fsync(ino, fh);
    let (found, bytes) = lab.found(dir, "f").expect("its name is durable with it");
    assert_eq!((found, &bytes[..6]), (ino, &b"synced"[..]));
    match told {
        Ok(()) => assert_eq!(bytes, b"synced, not synced"),
        Err(error) => assert_eq!(error, Errno(libc::EIO)),
    }
    assert_eq!(client.fsync(ino, fh), Ok(()), "once");
}

#[test]
fn a_session_that_is_lost_before_anything_was_answered_leaves_nobody_waiting() {
    let mut lab = Lab::new(503);
    let (client, dir) = lab.alone("d");
    let first = client.ino(dir, "first");
    let fh = client.open(first).unwrap();
    client.sync().unwrap();
    client.way.silence();
    let made = client.create(dir, "told").unwrap();
    client.write(first, fh, 0, b"FIRST").unwrap();
    let (waits, asks, syncs, locks) = std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            client
                .me
                .call(|cx| client.fs.setxattr(cx, first, b"user.a", b"b", XattrFlags::default()))
        });
        let asks = scope.spawn(|| client.list(ROOT));
        let syncs = scope.spawn(|| client.sync());
        let locks = scope.spawn(|| client.lock(first, fh, 1, libc::F_WRLCK, true));
        until("they ask", || client.fs.connection()["unanswered_requests"].as_u64() >= Some(3));
        lab.crash();
        (waits.join().unwrap(), asks.join().unwrap(), syncs.join().unwrap(), locks.join().unwrap())
    });
    assert!(matches!(waits, Ok(()) | Err(Errno(libc::EIO))), "{waits:?}");
    assert_eq!(asks.unwrap(), ["d", "d0", "d1", "d2"]);
    assert_eq!(locks, Ok(()));
    let is_intact = syncs.is_ok() & client.is_intact();
    let there = lab.found(dir, "told").is_some();
    assert!(there || !is_intact, "lost, and nobody was told");
    if is_intact {
        assert_eq!(lab.found(dir, "first").unwrap().1, b"FIRST");
    }
    client.close(made.0, made.1);
    assert_eq!(client.lock(first, fh, 1, libc::F_UNLCK, false), Ok(()));
    // Nothing is left of it: another has what it had.
    let other = lab.client();
    assert_eq!(other.ino(ROOT, "d"), dir);
    assert_eq!(other.ino(dir, "first"), first);
    let theirs = other.open(first).unwrap();
    assert_eq!(other.lock(first, theirs, 1, libc::F_WRLCK, true), Ok(()));
    assert!(other.create(dir, "free").is_ok());
}

#[test]
fn a_number_that_was_shown_is_nobody_elses_after_a_crash() {
    let mut lab = Lab::new(504);
    let (client, dir) = lab.alone("d");
    let mut reported = BTreeSet::new();
    for round in 0..3 {
        client.warm(dir, &format!("warm {round}"));
        client.way.silence();
        for i in 0..20 {
            let (ino, fh) = client.create(dir, &format!("{round}-{i}")).unwrap();
            assert!(reported.insert(ino), "{ino} a second time");
            client.close(ino, fh);
        }
        lab.crash();
        let other = lab.client();
        for i in 0..50 {
            let (ino, fh) = other.create(ROOT, &format!("other {round}-{i}")).unwrap();
            assert!(reported.insert(ino), "{ino} was shown as another file");
            other.close(ino, fh);
        }
        let _told = client.is_intact();
    }
}

#[test]
fn many_sessions_that_end_at_the_same_time_free_what_others_wait_for() {
    const MANY: usize = 12;
    let lab = Lab::with(505, Plan { term: Duration::from_millis(700), ..CASE });
    let stays = lab.client();
    let dir = stays.mkdir(ROOT, "shared").unwrap();
    let (log, fh) = stays.create(dir, "log").unwrap();
    let all: Vec<Mounted> = (0..MANY).map(|_| lab.client()).collect();
    for (i, client) in all.iter().enumerate() {
        assert_eq!(client.ino(ROOT, "shared"), dir);
        let own = client.mkdir(dir, &format!("own {i}")).unwrap();
        client.create(own, "f").unwrap();
        assert_eq!(client.ino(dir, "log"), log);
        // They all want the next one's directory, too.
        assert!(client.list(dir).unwrap().len() > i);
    }
    let first = all[0].open(log).unwrap();
    all[0].lock(log, first, 1, libc::F_WRLCK, false).unwrap();
    std::thread::scope(|scope| {
        let locking = scope.spawn(|| stays.lock(log, fh, 1, libc::F_WRLCK, true));
        let making = scope.spawn(|| stays.create(dir, "mine"));
        // Every other one says goodbye, all at once; the rest goes without a word.
        let ending: Vec<_> = all
            .into_iter()
            .enumerate()
            .map(|(i, Mounted { way, client })| {
                scope.spawn(move || {
                    if i % 2 == 1 {
                        way.vanish();
                    }
                    drop(client);
                })
            })
            .collect();
        assert_eq!(locking.join().unwrap(), Ok(()));
        assert!(making.join().unwrap().is_ok());
        let names = stays.list(dir).unwrap();
        let own: Vec<Ino> = names
            .iter()
            .filter(|n| n.starts_with("own"))
            .map(|name| stays.ino(dir, name))
            .collect();
        assert_eq!(own.len(), MANY);
        own.iter().for_each(|own| assert!(stays.create(*own, "g").is_ok()));
        ending.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Sees that a device that completes nothing does so at the end.
struct Well<'a>(&'a SimDevice);

impl Well<'_> {
    fn release(&self) {
        self.0.set_hold(false);
        self.0.release_all(&mut SimRng::new(1));
    }
}

impl Drop for Well<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

#[test]
fn a_recall_while_the_log_is_full_waits_and_nothing_is_lost() {
    /// Fewer than the numbers that a client is given at a time: for more it would wait for the
    /// device.
    const FILES: usize = 3000;
    // The names need more than the log has. (On a small volume the client would be given little
    // space, and wait for more.)
    let lab = Lab::with(506, Plan { device: 256 << 20, log: Some(576 << 10), ..CASE });
    let (client, dir) = lab.alone("d");
    let other = lab.client();
    let device = lab.sim.volume.lock().0.clone();
    // The device takes everything and completes nothing, so the log becomes full.
    device.set_hold(true);
    let made = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // Whatever fails here, nobody waits for the device afterwards.
        let well = Well(&device);
        let making = scope.spawn(|| {
            for i in 0..FILES {
                let name = format!("{i:0>250}");
                let mode = libc::S_IFREG | 0o644;
                client.me.call(|cx| client.fs.mknod(cx, dir, name.as_bytes(), mode, 0)).unwrap();
                made.fetch_add(1, Ordering::SeqCst);
            }
        });
        // On a busy machine the client acknowledges no more because of the age of what is not
        // answered, before there is so much of it.
        let is_stuck = || {
            lab.figure("unanswered") >= 800 || client.figures("connection", "unanswered_ms") >= 3000
        };
        until("the log is full", || is_stuck() || making.is_finished());
        assert!(!making.is_finished(), "the log has room for all");
        let least = made.load(Ordering::SeqCst);
        let wanting = scope.spawn(|| {
            assert_eq!(other.ino(ROOT, "d"), dir);
            let seen = other.list(dir).unwrap().len();
            other.create(dir, "other's").unwrap();
            seen
        });
        until("others ask", || other.fs.connection()["unanswered_requests"].as_u64() >= Some(1));
        assert!(!wanting.is_finished(), "an acknowledged change is not made");
        until("all go on", || {
            well.release();
            making.is_finished() && wanting.is_finished()
        });
        making.join().unwrap();
        assert!(wanting.join().unwrap() as u64 >= least);
    });
    assert!(client.is_intact());
    assert_eq!(client.figures("connection", "lost_changes"), 0);
    assert_eq!(other.list(dir).unwrap().len(), FILES + 2);
}

#[test]
fn early_acknowledged_changes_fit_though_others_have_filled_the_volume() {
    let lab = Lab::with(507, Plan { device: 32 << 20, ..CASE });
    let (client, dir) = lab.alone("d");
    let filler = lab.mount(false);
    let (full, fh) = filler.create(ROOT, "full").unwrap();
    let mut offset = 0;
    let chunk = vec![7; 64 << 10];
    let error = loop {
        match filler.write(full, fh, offset, &chunk) {
            Ok(count) => offset += count,
            Err(error) => break error,
        }
    };
    assert_eq!(error, Errno(libc::ENOSPC));
    let mut told = Vec::new();
    for i in 0..3000_u32 {
        let name = format!("f{i}");
        let Ok((ino, fh)) = client.create(dir, &name) else { break };
        let written = client.write(ino, fh, 0, &i.to_le_bytes().repeat(1000));
        client.close(ino, fh);
        if written.is_err() {
            break;
        }
        told.push((name, i, ino));
    }
    assert!(client.is_intact(), "none of it has failed afterwards");
    assert_eq!(client.figures("connection", "lost_changes"), 0);
    assert!(told.len() > 10, "{}: its reservation was its own", told.len());
    for (name, i, ino) in told {
        assert_eq!(lab.found(dir, &name), Some((ino, i.to_le_bytes().repeat(1000))), "{name}");
    }
}

#[test]
fn a_client_that_returns_after_its_lease_was_given_away_is_fenced_and_told() {
    let term = Duration::from_millis(700);
    let lab = Lab::with(508, Plan { term, ..CASE });
    let (away, dir) = lab.alone("d");
    let (ino, fh) = away.create(dir, "f").unwrap();
    away.write(ino, fh, 0, b"before").unwrap();
    away.fsync(ino, fh).unwrap();
    let other = lab.client();
    away.way.silence();
    // Its own leases are good for a while, and nobody else knows.
    let created = away.create(dir, "late").map(|(ino, fh)| away.close(ino, fh));
    let written = std::thread::scope(|scope| {
        let writing = scope.spawn(|| away.write(ino, fh, 0, b"LATE"));
        // Others that want them wait for the end of the term.
        assert_eq!(other.ino(ROOT, "d"), dir);
        assert_eq!(other.ino(dir, "f"), ino);
        let theirs = other.open(ino).unwrap();
        assert_eq!(other.write(ino, theirs, 0, b"OTHER"), Ok(5));
        assert!(other.create(dir, "late").is_ok(), "it was not there");
        assert_eq!(other.fsync(ino, theirs), Ok(()));
        lab.sim.net.cut_all();
        writing.join().unwrap()
    });
    let told = away.fsync(ino, fh);
    let acknowledged = created.is_ok();
    assert!(!(acknowledged && away.is_intact()) || told.is_err(), "its changes were worth nothing");
    let (_, bytes) = lab.found(dir, "f").unwrap();
    match (written, told) {
        // Made behind the other's, when it was back.
        (Ok(4), Ok(())) => assert_eq!(bytes, b"LATERe"),
        (_, told) => {
            assert_eq!(told, Err(Errno(libc::EIO)));
            assert_eq!(bytes, b"OTHERe");
        }
    }
    assert_eq!(away.read(ino, fh, 100).unwrap(), bytes, "it believes nothing of what it knew");
    assert_ne!(away.ino(dir, "late"), 0);
    assert_eq!(away.fsync(ino, fh), Ok(()), "told once");
    assert!(away.create(dir, "again").is_ok());
}

/// Its answer is lost with a connection, and the epoch that it was in has ended before the next
/// one.
#[test]
fn an_applied_change_is_not_repeated_because_its_epoch_has_ended() {
    let lab = Lab::with(509, Plan { term: Duration::from_millis(700), ..CASE });
    let (away, dir) = lab.alone("d");
    let (ino, _) = away.create(dir, "f").unwrap();
    away.sync().unwrap();
    let other = lab.client();
    away.way.deafen();
    let xattr = |fs: &dyn Filesystem| {
        InProcess::default().call(|cx| fs.getxattr(cx, ino, b"user.once")).is_ok()
    };
    std::thread::scope(|scope| {
        // Decided by the server, and it fails if it is made twice.
        let setting = scope.spawn(|| {
            let once = XattrFlags { create: true, ..XattrFlags::default() };
            away.me.call(|cx| away.fs.setxattr(cx, ino, b"user.once", b"x", once))
        });
        until("it is made", || xattr(&*lab.fs()));
        // It does not hear that its leases are recalled: they are taken away at the end of its
        // term.
        assert_eq!(other.ino(ROOT, "d"), dir);
        assert!(other.create(dir, "mine").is_ok());
        lab.sim.net.cut_all();
        assert_eq!(setting.join().unwrap(), Ok(()));
    });
    assert!(away.create(dir, "again").is_ok());
}

/// A file of which a client that is away has acknowledged a change, which never arrives.
struct Contested {
    dir: Ino,
    ino: Ino,
    away: Mounted,
    fh: u64,
}

impl Contested {
    fn new(lab: &Lab) -> Self {
        let (away, dir) = lab.alone("d");
        let (ino, fh) = away.create(dir, "f").unwrap();
        away.write(ino, fh, 0, b"before").unwrap();
        away.sync().unwrap();
        away.way.silence();
        away.write(ino, fh, 0, b"AWAY").unwrap();
        Self { dir, ino, away, fh }
    }

    /// Another client changes the file, and nothing makes that durable.
    fn taken_by(&self, other: &Mounted) {
        assert_eq!(other.ino(ROOT, "d"), self.dir);
        assert_eq!(other.ino(self.dir, "f"), self.ino);
        let fh = other.open(self.ino).unwrap();
        other.write(self.ino, fh, 0, b"OTHER").unwrap();
    }

    /// Behind a crash: the client that was away has lost its change, and the other has not.
    fn is_the_others(&self, lab: &Lab, other: &Mounted) {
        assert!(!self.away.is_intact(), "another client had the file since");
        assert!(other.is_intact(), "it has come back in time");
        assert_eq!(lab.found(self.dir, "f").unwrap().1, b"OTHERe");
        assert_eq!(self.away.read(self.ino, self.fh, 100).unwrap(), b"OTHERe");
    }
}

/// A case on a virtual clock, on a volume that makes nothing durable unasked.
fn simulated(seed: u64, plan: Plan, case: impl FnOnce(Lab) + Send + 'static) {
    let run = sim::run(seed, Bug::None, false, move |env| case(Lab::on(seed, plan, env)));
    if let Some(failure) = run.failure {
        panic!("{failure}\n{}", run.trace);
    }
}

const LONG_GRACE: Plan = Plan { term: Duration::from_secs(1), grace: GRACE_ENOUGH, ..CASE };

#[test]
fn a_fence_survives_a_crash_though_nothing_was_synced_after_it() {
    simulated(510, LONG_GRACE, |mut lab| {
        let (other, _) = lab.alone("e");
        let contested = Contested::new(&lab);
        contested.taken_by(&other);
        lab.crash();
        contested.is_the_others(&lab, &other);
    });
}

#[test]
fn a_session_that_has_ended_replays_nothing_though_nothing_was_synced_since() {
    let plan = Plan { session_life: Duration::from_millis(100), ..LONG_GRACE };
    simulated(511, plan, |mut lab| {
        let (other, _) = lab.alone("e");
        let contested = Contested::new(&lab);
        contested.away.way.vanish();
        lab.sim.net.cut_all();
        thread::block_on(time::sleep(Duration::from_secs(3)));
        assert_eq!(lab.sessions().len(), 1, "its client was away for too long");
        contested.taken_by(&other);
        contested.away.way.return_again();
        lab.crash();
        contested.is_the_others(&lab, &other);
    });
}

#[test]
fn a_client_that_was_given_up_replays_nothing_though_nothing_was_synced_since() {
    let plan = Plan { grace: Duration::from_secs(1), ..LONG_GRACE };
    simulated(512, plan, |mut lab| {
        let (other, _) = lab.alone("e");
        let contested = Contested::new(&lab);
        contested.away.way.vanish();
        lab.crash();
        contested.taken_by(&other);
        contested.away.way.return_again();
        lab.crash();
        contested.is_the_others(&lab, &other);
    });
}

/// What a client reads of a file that another has changed, when its connection has been silent for
/// longer than a term.
fn read_in_silence(bug: Bug) -> sim::Run {
    let plan = Plan { term: Duration::from_millis(500), ..CASE };
    sim::run(513, bug, false, move |env| {
        let lab = Lab::on(513, plan, env);
        let (client, dir) = lab.alone("d");
        let ino = client.ino(dir, "first");
        let other = lab.client();
        assert_eq!(other.ino(ROOT, "d"), dir);
        let (theirs, fh) = (other.ino(dir, "first"), other.open(ino).unwrap());
        assert_eq!((theirs, client.size(ino)), (ino, 5));
        client.way.silence();
        assert_eq!(client.size(ino), 5, "it may be told so for a term");
        other.append(ino, fh, b" and second").unwrap();
        other.sync().unwrap();
        assert_eq!(client.size(ino), 16, "it was told an old size");
    })
}

#[test]
fn clients_that_rely_on_leases_for_too_long_are_found() {
    assert_eq!(read_in_silence(Bug::None).failure, None);
    let found = read_in_silence(Bug::EndlessTerm).failure.expect("it is found");
    assert!(found.contains("it was told an old size"), "{found}");
}
