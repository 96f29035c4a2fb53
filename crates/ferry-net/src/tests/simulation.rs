//! A simulation of a server on a device that crashes, several clients, and a network that is late,
//! ends and falls silent, all as a seed says. Programs on the clients check each answer; at the end
//! it is checked on the volume, and once more after a crash, that nothing that was durable is lost,
//! nothing was done twice, and each loss was told.
//!
//! A run of its own: `SIMULATION_SECONDS=600 SIMULATION_SEED=1 cargo test --release -p ferry-net
//! --lib simulation -- --ignored --nocapture`. Threads run as they like, so a seed says what
//! befalls whom, not in which order all of it happens.

mod cases;
mod network;
mod program;
mod records;
pub(super) mod store;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use ferry_env::planted::Bug;
use ferry_sim::device::{self, Fault, SimDevice, SimRng, sim_env};

use super::*;
use crate::rt::{sim, thread, time};
use network::{Faults, Net, Way};
use program::{Left, Program};
use store::{Tenure, Undivided};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Directories, each with a file that all append to.
const DIRS: usize = 3;
/// In a grace period of so long all clients come back.
const GRACE_ENOUGH: Duration = Duration::from_secs(30);
/// An operation that takes longer is taken for one that is never answered. A session ends after a
/// minute, and a client that came back and makes no progress is given up after 72 s.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Made or not, whole or not.
    Doubtful,
    Acknowledged,
    Durable,
}

/// A record: where, whose, and which of theirs.
type Record = (usize, u64, u64);

/// All records, and what readers have not seen.
#[derive(Default)]
struct Ledger {
    states: BTreeMap<Record, State>,
    /// Acknowledged, and not there for somebody who read later: lost, and that is told.
    missed: BTreeMap<Record, String>,
}

impl Ledger {
    fn acknowledged(&self, index: usize) -> Vec<(Record, State)> {
        let there = |(record, state): (&Record, &State)| {
            (record.0 == index && *state != State::Doubtful).then_some((*record, *state))
        };
        self.states.iter().filter_map(there).collect()
    }

    /// Somebody has read a file of which he could have known this.
    fn seen(&mut self, index: usize, bytes: &[u8], before: &[(Record, State)], at: &str) {
        let counts = self.counts(index, bytes, at);
        for (record, state) in before {
            if !counts.contains_key(&(record.1, record.2)) {
                assert_ne!(*state, State::Durable, "{at}: {record:?} is not there");
                self.missed.insert(*record, at.into());
            }
        }
    }

    fn counts(&self, index: usize, bytes: &[u8], at: &str) -> BTreeMap<(u64, u64), u64> {
        let counts = records::count(bytes, at);
        for ((id, number), count) in &counts {
            assert_eq!(*count, 1, "{at}: {number} of {id}");
            assert!(
                self.states.contains_key(&(index, *id, *number)),
                "{at}: {number} of {id} out of nothing"
            );
        }
        counts
    }

    /// All was synced, or it was told that it is lost.
    fn check(&self, index: usize, bytes: &[u8], at: &str) {
        let counts = self.counts(index, bytes, at);
        for (record, state) in self.states.iter().filter(|(record, _)| record.0 == index) {
            let there = counts.contains_key(&(record.1, record.2));
            match state {
                State::Durable => assert!(there, "{at}: {record:?} was durable, and is lost"),
                State::Acknowledged => panic!("{at}: {record:?}: nobody has synced it"),
                State::Doubtful => {}
            }
            if let Some(reader) = self.missed.get(record) {
                assert!(
                    !there,
                    "{at}: {record:?} was not there for a reader ({reader}), and now it is"
                );
                assert_eq!(*state, State::Doubtful, "{at}: {record:?} was not there for {reader}");
            }
        }
    }
}

/// What a client's life tells the thread that directs.
enum Event {
    Step,
    /// Has ended, or has gone without a word and another is in its place.
    Left(Left, bool),
    /// All has ended at a frame.
    Cut,
    /// A program has found what must not be.
    Failed,
}

/// Tells of a thread that panics.
struct Watched(UnboundedSender<Event>);

impl Drop for Watched {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _sent = self.0.send(Event::Failed);
        }
    }
}

/// What befalls them.
#[derive(Clone, Copy, Debug)]
struct Plan {
    clients: u64,
    steps: u64,
    faults: Faults,
    term: Duration,
    grace: Duration,
    session_life: Duration,
    /// Of so many steps one is made under a lock that all want; 0: none is.
    locked_of: u64,
    /// Bytes of the device, and of the log.
    device: u64,
    log: Option<u64>,
    /// A planted bug: what the device says that it has flushed it has not.
    lies: bool,
    /// One in the server or in the client.
    bug: Bug,
    /// So many frames lie between two crashes, at most; 0: it does not crash.
    crash_every: u64,
    crashes: u64,
    /// The server stops in order, and another starts, so often.
    stops: u64,
    /// Another server takes the volume from it so often, and it lives on.
    take_overs: u64,
    /// Of so many steps one is a client's last.
    vanish_of: u64,
    /// So many files are there that nobody changes, and that each client looks up first.
    known: u64,
    /// One of so many clients waits for the answer to each change (`async=off`); 0: none does.
    waiting_of: u64,
    /// One of so many clients speaks protocol 8; 0: none does.
    before_of: u64,
    /// Of so many steps one comes after a pause of up to two terms; 0: none does.
    pause_of: u64,
}

impl Plan {
    /// Nothing may be lost: connections end and are late, that is all.
    const GENTLE: Self = Self {
        clients: 3,
        steps: 120,
        faults: Faults { cut: 60, swallow: 0, hold: 300, rate: 0, latency: 0 },
        term: Duration::from_secs(6),
        grace: Duration::ZERO,
        session_life: Duration::from_secs(60),
        locked_of: 0,
        device: 48 << 20,
        log: None,
        lies: false,
        bug: Bug::None,
        crash_every: 0,
        crashes: 0,
        stops: 0,
        take_overs: 0,
        vanish_of: 0,
        known: 0,
        waiting_of: 0,
        before_of: 0,
        pause_of: 0,
    };
    /// The same on lines that carry less than the programs say: what waits takes longer than a
    /// term.
    const SLOW: Self = Self {
        steps: 100,
        faults: Faults { rate: 30_000, hold: 0, cut: 0, ..Self::GENTLE.faults },
        term: Duration::from_millis(1200),
        ..Self::GENTLE
    };
    /// Everything that may come.
    const ROUGH: Self = Self {
        clients: 3,
        steps: 150,
        faults: Faults { cut: 40, swallow: 15, hold: 200, rate: 0, latency: 0 },
        term: Duration::from_millis(500),
        grace: Duration::from_secs(1),
        crash_every: 900,
        crashes: 2,
        stops: 1,
        vanish_of: 200,
        known: 30,
        ..Self::GENTLE
    };
    /// The server crashes, and waits until all have come back: what a crash has taken they make
    /// again.
    const RETURNING: Self = Self {
        steps: 60,
        faults: Faults { cut: 20, ..Self::GENTLE.faults },
        term: Duration::from_secs(3),
        grace: GRACE_ENOUGH,
        crash_every: 500,
        crashes: 2,
        known: 20,
        waiting_of: 2,
        ..Self::GENTLE
    };
    /// Sessions end while their clients are away, and with them their locks.
    const LOCKS: Self = Self {
        steps: 50,
        faults: Faults { cut: 40, swallow: 60, hold: 200, rate: 0, latency: 0 },
        session_life: Duration::from_millis(100),
        locked_of: 2,
        crash_every: 700,
        crashes: 1,
        vanish_of: 0,
        ..Self::ROUGH
    };
}

struct Sim {
    seed: u64,
    plan: Plan,
    net: Arc<Net>,
    ledger: Mutex<Ledger>,
    doing: Mutex<BTreeMap<u64, String>>,
    volume: Mutex<(Arc<SimDevice>, Arc<LocalFs>)>,
    tenure: Mutex<Arc<Tenure>>,
    next_id: AtomicU64,
    /// How often a program was told that something may be lost.
    losses: AtomicU64,
    env: Env,
    /// Clients that have vanished, while they end.
    ending: Mutex<Vec<thread::Joined<()>>>,
}

/// In a simulation the volume has no threads of its own.
fn open(device: &Arc<SimDevice>, env: &Env) -> Arc<LocalFs> {
    let device: Arc<dyn BlockDevice> = device.clone();
    let options = FsOptions { background: sim::current().is_none(), ..fs_options() };
    LocalFs::open(device, options, env.clone()).expect("what a crash leaves can be opened")
}

/// Mounts, as soon as there is a server.
fn mount(way: &Arc<Way>, id: u64, asynchronous: bool, env: &Env) -> Client {
    loop {
        let options = ClientOptions {
            server: "simulated".into(),
            path: b"/".to_vec(),
            name: format!("p{id}").into_bytes(),
            timeout: Duration::from_secs(60),
            asynchronous,
            noatime: false,
            notes: None,
        };
        match RemoteFs::connect(way.clone(), options, env) {
            Ok(fs) => break Client { fs, me: InProcess::default() },
            Err(NetError::Reach { .. }) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn inode(fs: &LocalFs, dir: Ino, name: &str) -> Option<Ino> {
    let found = InProcess::default().call(|cx| fs.lookup(cx, dir, name.as_bytes())).unwrap().attr?;
    fs.forget(found.ino, 1);
    Some(found.ino)
}

fn contents(fs: &LocalFs, ino: Ino) -> Vec<u8> {
    let me = InProcess::default();
    let fh = me.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).unwrap().fh;
    me.call(|cx| {
        let mut out = vec![0; 1 << 20];
        let len = fs.read(cx, ino, fh, 0, &mut out)?;
        out.truncate(len);
        fs.release(cx, ino, fh);
        Ok(out)
    })
    .unwrap()
}

/// A volume with what the programs of a plan expect. It is made once for all runs.
fn volume(plan: Plan) -> Arc<SimDevice> {
    type Made = BTreeMap<(u64, Option<u64>, u64), Arc<SimDevice>>;
    static ALL: OnceLock<parking_lot::Mutex<Made>> = OnceLock::new();
    let mut all = ALL.get_or_init(Default::default).lock();
    let make = || make_volume(plan);
    Arc::clone(all.entry((plan.device, plan.log, plan.known)).or_insert_with(make))
}

fn make_volume(plan: Plan) -> Arc<SimDevice> {
    let (env, _) = sim_env(0);
    let device = Arc::new(SimDevice::new(plan.device));
    let any: Arc<dyn BlockDevice> = device.clone();
    let options = MkfsOptions { log_size: plan.log, ..MkfsOptions::default() };
    mkfs(&any, &options, &env).unwrap();
    let fs = LocalFs::open(any, FsOptions { background: false, ..fs_options() }, env).unwrap();
    let me = InProcess::default();
    for index in 0..DIRS {
        let name = format!("d{index}");
        let dir =
            me.call(|cx| fs.mkdir(cx, ROOT, name.as_bytes(), 0o755)).unwrap().attr.unwrap().ino;
        for name in [&b"log"[..], b"locked"] {
            me.call(|cx| fs.mknod(cx, dir, name, libc::S_IFREG | 0o644, 0)).unwrap();
        }
    }
    if plan.known > 0 {
        let dir = me.call(|cx| fs.mkdir(cx, ROOT, b"known", 0o755)).unwrap().attr.unwrap().ino;
        for n in 0..plan.known {
            let name = n.to_string().into_bytes();
            me.call(|cx| fs.mknod(cx, dir, &name, libc::S_IFREG | 0o644, 0)).unwrap();
        }
    }
    let _: Vec<u8> = me.call(|cx| fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).unwrap();
    fs.close().unwrap();
    drop(fs);
    device.restart_trace();
    device
}

impl Sim {
    fn new(seed: u64, plan: Plan, events: &UnboundedSender<Event>, env: Env) -> Arc<Self> {
        let device = Arc::new(volume(plan).copy());
        device.set_flush_lies(plan.lies);
        let fs = open(&device, &env);
        let tenure = Tenure::new(&device, &env, plan.term);
        let events = events.clone();
        let silence = plan.term.as_millis() as u64 * 2;
        let net = Net::new(seed, plan.faults, silence, move || drop(events.send(Event::Cut)));
        let sim = Arc::new(Self {
            seed,
            plan,
            net,
            ledger: Mutex::default(),
            doing: Mutex::default(),
            volume: Mutex::new((device, fs)),
            tenure: Mutex::new(tenure),
            next_id: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            env,
            ending: Mutex::default(),
        });
        sim.start(Duration::ZERO);
        sim
    }

    /// Whether something may be lost.
    fn is_rough(&self) -> bool {
        let Plan { faults, vanish_of, stops, session_life, term, .. } = self.plan;
        let crashes = self.plan.crashes + self.plan.take_overs;
        // The server ends a session if its client is away when it stops, or for so long.
        let ends = faults.cut > 0 && (stops > 0 || session_life < term);
        faults.swallow > 0 || crashes > 0 || vanish_of > 0 || ends
    }

    /// Nothing that was answered may be lost though the server crashes: it waits for all.
    fn all_come_back(&self) -> bool {
        let Plan { faults, crashes, take_overs, vanish_of, grace, .. } = self.plan;
        crashes + take_overs > 0 && grace >= GRACE_ENOUGH && faults.swallow == 0 && vanish_of == 0
    }

    fn say(&self, id: u64, what: String) {
        sim::note(|| format!("program {id}: {what}"));
        self.doing.lock().insert(id, what);
    }

    fn start(&self, grace: Duration) {
        let Plan { term: lease_term, session_life, .. } = self.plan;
        // Clients may try the one before first.
        let returns = lease_term * if self.plan.take_overs > 0 { 6 } else { 0 };
        let options =
            ServerOptions { lease_term, grace, returns, session_life, ..server_options() };
        let fs = self.volume.lock().1.clone();
        let fs: Arc<dyn SessionStore> = match sim::current() {
            Some(_) if self.plan.take_overs > 0 => {
                Arc::new(Undivided::held(fs, self.tenure.lock().clone()))
            }
            Some(_) => Arc::new(Undivided::new(fs)),
            None => fs,
        };
        let server = Server::start(fs, options, self.env.clone()).unwrap();
        *self.net.server.lock() = Some(Arc::new(server));
    }

    /// The machine of the server is gone, and what was not flushed; then it is there again.
    fn crash(&self, random: &mut SimRng) {
        let server = self.net.take_server();
        // What is sent from now on arrives nowhere, so nobody knows of what is not in the image.
        self.net.cut_all();
        let mut volume = self.volume.lock();
        let image = Arc::new(volume.0.crash_image(volume.0.trace_len(), random));
        drop(server);
        *volume = (Arc::clone(&image), open(&image, &self.env));
        drop(volume);
        self.start(self.plan.grace);
    }

    /// Another server takes the volume from the one that has it. That one lives, and its clients
    /// have their connections still.
    fn take_over(&self, random: &mut SimRng) {
        sim::note(|| "the volume is taken over".into());
        // Its fences are in: what is flushed from now on is not part of the volume.
        let before = self.volume.lock().0.clone();
        let image = Arc::new(before.crash_image(before.trace_len(), random));
        if self.plan.bug != Bug::AcknowledgedAfterFence {
            let errno = libc::EIO;
            before.inject(Fault { op: device::Op::Flush, after: 0, errno, sticky: true });
        }
        self.tenure.lock().end();
        thread::block_on(time::sleep(self.plan.term * 3 / 2));
        *self.volume.lock() = (Arc::clone(&image), open(&image, &self.env));
        *self.tenure.lock() = Tenure::new(&image, &self.env, self.plan.term);
        let former = self.net.server.lock().take();
        self.start(self.plan.grace);
        *self.net.former.lock() = former;
    }

    /// Stops in order; the volume is closed and opened again.
    fn stop(&self) {
        self.net.take_server().stop();
        let mut volume = self.volume.lock();
        volume.1.detach();
        volume.1.close().unwrap();
        volume.1 = open(&volume.0, &self.env);
        drop(volume);
        self.start(self.plan.grace);
    }

    /// A client's whole life, and the lives of those who come in its place.
    fn live(self: &Arc<Self>, mut random: SimRng, events: &UnboundedSender<Event>) {
        let _watched = Watched(events.clone());
        let fresh = |random: &mut SimRng| {
            Program::new(self, self.next_id.fetch_add(1, Ordering::SeqCst), random.fork())
        };
        let mut program = fresh(&mut random);
        for _ in 0..self.plan.steps {
            if self.plan.pause_of > 0 && random.chance(1, self.plan.pause_of) {
                let percent = random.below(200) as u32;
                thread::block_on(time::sleep(self.plan.term * percent / 100));
            }
            program.step();
            let _sent = events.send(Event::Step);
            if self.plan.vanish_of > 0 && random.chance(1, self.plan.vanish_of) {
                let _sent = events.send(Event::Left(program.vanish(), false));
                program = fresh(&mut random);
            }
        }
        let _sent = events.send(Event::Left(program.finish(), true));
    }

    fn next_event(&self, events: &mut UnboundedReceiver<Event>) -> Event {
        match thread::block_on(async { time::timeout(ANSWER_TIME_MAX, events.recv()).await }) {
            Ok(Some(Event::Failed)) => panic!("seed {}: a program has failed", self.seed),
            Ok(Some(event)) => event,
            Ok(None) | Err(_) => {
                let clients =
                    self.net.server.lock().as_ref().map(|server| server.control().clients());
                panic!(
                    "seed {}: nobody goes on: {:#?}\n{clients:#?}",
                    self.seed,
                    *self.doing.lock()
                );
            }
        }
    }

    /// Directs until all have ended; gives what all leave.
    fn direct(
        self: &Arc<Self>,
        to: &UnboundedSender<Event>,
        from: &mut UnboundedReceiver<Event>,
    ) -> Vec<Left> {
        let mut random = SimRng::new(self.seed);
        let Plan { clients, steps, crash_every, mut crashes, mut stops, take_overs, .. } =
            self.plan;
        let lives: Vec<_> = (0..clients)
            .map(|_| {
                let (sim, random, to) = (Arc::clone(self), random.fork(), to.clone());
                thread::spawn(move || sim.live(random, &to))
            })
            .collect();
        let (mut left, mut ended, mut done) = (Vec::new(), 0, 0);
        if crashes > 0 {
            self.net.end_after(1 + random.below(crash_every));
        }
        let all = clients * steps;
        while ended < clients {
            match self.next_event(from) {
                Event::Step => {
                    done += 1;
                    // Towards the end all is well again.
                    if done == all - all / 8 {
                        self.net.calm.store(true, Ordering::SeqCst);
                    }
                    if (1..=take_overs).any(|n| done == all * n / (take_overs + 2)) {
                        self.take_over(&mut random);
                    }
                    if stops > 0 && done == all / 2 {
                        stops -= 1;
                        self.stop();
                    }
                }
                Event::Left(one, is_end) => {
                    left.push(one);
                    ended += u64::from(is_end);
                }
                Event::Cut if crashes > 0 => {
                    crashes -= 1;
                    self.crash(&mut random);
                    if crashes > 0 {
                        self.net.end_after(1 + random.below(crash_every));
                    }
                }
                Event::Cut | Event::Failed => {}
            }
        }
        lives.into_iter().for_each(|life| life.join());
        left
    }

    /// As it is, and as a crash leaves it.
    fn check(&self, left: &[Left]) {
        let (device, fs) = self.volume.lock().clone();
        let mut random = SimRng::new(!self.seed);
        drop(self.net.former.lock().take());
        drop(self.net.take_server());
        let crashed =
            open(&Arc::new(device.crash_image(device.trace_len(), &mut random)), &self.env);
        for (fs, when) in [(fs, "at the end"), (crashed, "after a crash")] {
            let at = format!("seed {}, {when}", self.seed);
            for index in 0..DIRS {
                let dir = inode(&fs, ROOT, &format!("d{index}")).expect("it is durable");
                let log = inode(&fs, dir, "log").expect("it is durable");
                self.ledger.lock().check(index, &contents(&fs, log), &at);
            }
            left.iter().for_each(|one| one.check(&fs, &at));
        }
    }
}

/// One run; gives how many frames were carried.
fn live_through(seed: u64, plan: Plan, env: Env) -> u64 {
    let (to, mut from) = unbounded_channel();
    let sim = Sim::new(seed, plan, &to, env);
    let left = sim.direct(&to, &mut from);
    sim.finish(&left)
}

/// One run in a world of its own, in which all follows from the seed.
fn simulate(seed: u64, plan: Plan, whole_trace: bool) -> sim::Run {
    sim::run(seed, plan.bug, whole_trace, move |env| _ = live_through(seed, plan, env))
}

/// The same, that must be well.
fn run(seed: u64, plan: Plan) {
    let run = simulate(seed, plan, false);
    if let Some(failure) = run.failure {
        panic!("seed {seed}: {failure}\n{}\n{plan:?}", run.trace);
    }
}

/// A run on real threads and a real clock: a seed says what befalls whom, and not in which order.
fn run_in_real_time(seed: u64, plan: Plan) {
    live_through(seed, plan, Env::real());
}

#[test]
fn connections_that_end_and_are_late_cost_nothing() {
    (1..40).for_each(|seed| run(seed, Plan::GENTLE));
}

#[test]
fn crashes_silence_and_clients_that_vanish_cost_nothing_that_is_not_told() {
    (10..50).for_each(|seed| run(seed, Plan::ROUGH));
}

/// Each answered change is there or is replayed, also of clients that wait for each answer
/// (`async=off`), and no loss is reported.
#[test]
fn crashes_cost_nothing_where_all_clients_come_back() {
    (50..90).for_each(|seed| run(seed, Plan::RETURNING));
}

/// A client that sends its changes, however slowly, is not considered dead: else its programs
/// would hear of a loss.
#[test]
fn lines_that_carry_little_cost_nothing() {
    (40..60).for_each(|seed| run(seed, Plan::SLOW));
}

#[test]
fn nothing_lands_under_a_lock_that_was_written_under_one_that_is_lost() {
    (40..80).for_each(|seed| run(seed, Plan::LOCKS));
}

/// True parallelism, which a simulation does not have.
#[test]
fn real_threads_cost_nothing_either() {
    for seed in 1..3 {
        run_in_real_time(seed, Plan::GENTLE);
        run_in_real_time(seed + 10, Plan::ROUGH);
        run_in_real_time(seed + 49, Plan::RETURNING);
    }
    run_in_real_time(40, Plan::SLOW);
    run_in_real_time(40, Plan::LOCKS);
}

/// Seeds of long runs that have failed. In most of these an answer was lost with a connection and
/// sent again on the next one, without how its change was made; so a crash then lost the change. In
/// the last but two a client that gets no leases sent a change again and again, without any delay.
/// In the last but one a crash lost a fence, and the fenced client replayed a write over another's.
/// In the last one the server gave a replay up, and dropped the claims in front of a request. In
/// the one of servers that take the volume from each other a client asked for a lock before its
/// file was open: when that was refused, nothing was marked as lost, and a program read what the
/// lock's next holder had written.
#[test]
fn seeds_that_have_failed_are_well() {
    let seeds =
        [1_003_381, 1_016_197, 2_000_385, 2_004_545, 2_021_825, 2_008_075, 5_092_626, 20_002_763];
    for seed in seeds.into_iter().chain([TAKEN_FROM + 10_005_131]) {
        run(seed, plan_of(seed));
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    for plan in [Plan::GENTLE, Plan::ROUGH, Plan::RETURNING, Plan::LOCKS] {
        let runs = [7, 7, 8].map(|seed| simulate(seed, plan, true));
        assert!(runs.iter().all(|run| run.failure.is_none()));
        assert!(runs[0].trace == runs[1].trace, "{plan:?}: {}", difference(&runs[0], &runs[1]));
        assert!(runs[0].hash == runs[1].hash && runs[0].events == runs[1].events);
        assert!(runs[0].trace != runs[2].trace && runs[0].hash != runs[2].hash);
    }
}

/// Where two runs begin to differ.
fn difference(one: &sim::Run, other: &sim::Run) -> String {
    let (mut lines, mut others) = (one.trace.lines(), other.trace.lines());
    let mut same: Vec<&str> = Vec::new();
    loop {
        let (line, theirs) = (lines.next(), others.next());
        if line != theirs || line.is_none() {
            let from = same.len().saturating_sub(30);
            return format!("{}\n{line:?}\n{theirs:?}", same[from..].join("\n"));
        }
        same.extend(line);
    }
}

/// Whether one of so many runs fails. Some crashes lose nothing.
fn is_found(plan: Plan, seeds: u64) -> bool {
    (20..20 + seeds).any(|seed| {
        let failure = simulate(seed, plan, false).failure;
        failure.inspect(|failure| println!("{:?}: seed {seed}: {failure}", plan.bug)).is_some()
    })
}

/// Servers that take the volume from each other, and clients that live.
const TAKEN: Plan = Plan { crashes: 0, take_overs: 2, ..Plan::RETURNING };
/// The same, where clients also vanish and fall silent.
const TAKEN_ROUGH: Plan = Plan { crashes: 0, stops: 0, vanish_of: 0, take_overs: 2, ..Plan::ROUGH };

/// A server that has lost the volume to another one, and lives, tells nobody what is not true.
#[test]
fn servers_that_take_the_volume_from_each_other_cost_nothing_that_is_not_told() {
    (10..40).for_each(|seed| run(seed, TAKEN_ROUGH));
    (40..60).for_each(|seed| run(seed, Plan { take_overs: 1, crashes: 0, ..Plan::LOCKS }));
}

/// What was answered is there, too, as all clients find the server that has the volume; so are
/// their locks.
#[test]
fn servers_that_take_the_volume_from_each_other_lose_nothing_of_clients_that_live() {
    for seed in 50..75 {
        run(seed, TAKEN);
        run(seed, Plan { locked_of: 2, ..TAKEN });
    }
}

#[test]
fn a_server_that_speaks_or_acknowledges_when_it_has_lost_the_volume_is_found() {
    assert!(is_found(Plan { bug: Bug::ReadsAfterTerm, ..TAKEN_ROUGH }, 100));
    assert!(is_found(Plan { bug: Bug::AcknowledgedAfterFence, ..TAKEN_ROUGH }, 100));
}

#[test]
fn a_server_that_forgets_locks_or_replays_twice_when_it_has_taken_the_volume_is_found() {
    assert!(is_found(Plan { bug: Bug::ForgottenLocks, locked_of: 2, ..TAKEN }, 100));
    assert!(is_found(Plan { bug: Bug::AppliedTwice, ..TAKEN }, 300));
}

/// The simulation sees what it is there to see.
#[test]
fn a_server_that_calls_durable_what_is_not_is_found() {
    assert!(is_found(Plan { lies: true, steps: 30, ..Plan::GENTLE }, 10));
    assert!(is_found(Plan { bug: Bug::EarlyDurable, ..Plan::RETURNING }, 50));
}

#[test]
fn changes_that_are_applied_twice_are_found() {
    assert!(is_found(Plan { bug: Bug::AppliedTwice, ..Plan::GENTLE }, 50));
}

#[test]
fn locks_that_outlive_their_session_are_found() {
    let faults = Faults { swallow: 300, ..Plan::LOCKS.faults };
    let away = Plan { faults, crashes: 0, stops: 0, steps: 100, ..Plan::LOCKS };
    assert!(is_found(Plan { bug: Bug::RetainedLocks, ..away }, 60));
}

/// So is a client's decision that differs from the server's answer.
#[test]
fn a_broken_invariant_that_the_product_survives_is_found() {
    let run = sim::run(20, Bug::None, false, |_| crate::rt::broken("attributes differ"));
    assert_eq!(run.failure.as_deref(), Some("attributes differ"));
}

/// Connections that fall silent for longer than a term, and nothing else.
#[test]
fn silence_for_longer_than_a_term_costs_nothing() {
    let faults = Faults { swallow: 150, cut: 0, hold: 0, ..Plan::ROUGH.faults };
    let silent = Plan { faults, crashes: 0, stops: 0, vanish_of: 0, pause_of: 1, ..Plan::ROUGH };
    (100..140).for_each(|seed| run(seed, silent));
}

/// One client's short life ends, and begins again, at each frame.
fn at_every_frame(crashes: bool) {
    let quiet = Plan {
        clients: 1,
        steps: 10,
        faults: Faults::default(),
        grace: Duration::ZERO,
        crash_every: u64::MAX,
        crashes: u64::from(crashes),
        stops: 0,
        vanish_of: 0,
        ..Plan::GENTLE
    };
    let reached = Arc::new(AtomicU64::new(0));
    for frame in 1.. {
        let told = Arc::clone(&reached);
        let run = sim::run(30, Bug::None, false, move |env| {
            let (to, mut from) = unbounded_channel();
            let sim = Sim::new(30, quiet, &to, env);
            sim.net.end_after(frame);
            let left = sim.direct_at(frame, &to, &mut from);
            told.store(sim.finish(&left), Ordering::SeqCst);
        });
        if let Some(failure) = run.failure {
            panic!("frame {frame}: {failure}\n{}", run.trace);
        }
        if reached.load(Ordering::SeqCst) < frame {
            assert!(frame > 30, "{frame}");
            break;
        }
    }
}

impl Sim {
    /// The same with one client, and the end at that frame.
    fn direct_at(
        self: &Arc<Self>,
        frame: u64,
        to: &UnboundedSender<Event>,
        from: &mut UnboundedReceiver<Event>,
    ) -> Vec<Left> {
        let mut random = SimRng::new(frame);
        let (sim, events) = (Arc::clone(self), to.clone());
        let life = thread::spawn(move || sim.live(SimRng::new(sim.seed), &events));
        let left = loop {
            match self.next_event(from) {
                Event::Cut if self.plan.crashes > 0 => self.crash(&mut random),
                Event::Step | Event::Cut | Event::Failed => {}
                Event::Left(left, _) => break left,
            }
        };
        life.join();
        vec![left]
    }

    /// All have ended: what they leave must be as it should.
    fn finish(&self, left: &[Left]) -> u64 {
        // On a real clock nobody waits for the last words of a client that has vanished.
        if sim::current().is_some() {
            std::mem::take(&mut *self.ending.lock()).into_iter().for_each(thread::Joined::join);
        }
        self.check(left);
        let losses = self.losses.load(Ordering::SeqCst);
        sim::note(|| format!("{losses} losses were told"));
        self.net.frames()
    }
}

#[test]
fn a_connection_that_ends_at_any_frame_costs_nothing() {
    at_every_frame(false);
}

#[test]
fn a_crash_at_any_frame_costs_nothing_that_is_not_told() {
    at_every_frame(true);
}

#[test]
fn clients_of_protocol_8_lose_nothing_alone_or_among_newer_ones() {
    for seed in 1..12 {
        let before_of = 1 + seed % 2;
        run(300 + seed, Plan { before_of, ..Plan::GENTLE });
        run(400 + seed, Plan { before_of, ..Plan::ROUGH });
        run(500 + seed, Plan { before_of, ..Plan::RETURNING });
        run(600 + seed, Plan { before_of, ..Plan::LOCKS });
    }
}

/// From this seed on servers take the volume from each other in long runs.
const TAKEN_FROM: u64 = 1 << 32;

/// What befalls whom in a long run.
fn plan_of(seed: u64) -> Plan {
    if let Some(seed) = seed.checked_sub(TAKEN_FROM) {
        let plan = plan_of(seed);
        // Without a grace period a server waits for nobody.
        let grace = plan.grace.max(Duration::from_secs(1));
        return Plan { crashes: 0, take_overs: 1 + seed / 4 % 3, grace, ..plan };
    }
    let mut random = SimRng::new(seed);
    let latency = [0, 50, 300, 5000][random.index(4)];
    // Short lives mostly: more of them, and more of what happens at their beginnings and ends.
    let steps = if seed.is_multiple_of(16) { 100 } else { 8 } + random.below(32);
    let rough = Plan {
        clients: 1 + random.below(4),
        steps,
        faults: Faults {
            cut: random.below(100),
            swallow: random.below(30),
            hold: random.below(400),
            rate: random.below(4) * 40_000,
            latency,
        },
        crash_every: 30 + random.below(12 * steps),
        crashes: random.below(4),
        stops: random.below(2),
        vanish_of: random.below(2) * (20 + random.below(100)),
        known: random.below(2) * 30,
        session_life: Duration::from_millis([100, 60_000][random.index(2)]),
        locked_of: random.below(2) * 3,
        waiting_of: random.below(3),
        ..Plan::ROUGH
    };
    let slower = |plan: Plan| Plan {
        faults: Faults { latency, ..plan.faults },
        clients: 1 + seed / 4 % 4,
        steps,
        crash_every: 30 + 8 * steps,
        ..plan
    };
    let plan = match seed % 4 {
        0 => slower(Plan { waiting_of: random.below(3), ..Plan::GENTLE }),
        1 => slower(Plan { waiting_of: random.below(3), ..Plan::RETURNING }),
        _ => rough,
    };
    // A quarter of all runs, of each kind.
    Plan { before_of: if seed / 4 % 4 == 3 { 1 + seed / 16 % 3 } else { 0 }, ..plan }
}

/// `SIMULATION_SECONDS`, `SIMULATION_SEED` (the first one), `SIMULATION_TAKE_OVERS` (the seeds are
/// those of servers that take the volume from each other), `SIMULATION_THREADS`.
#[test]
#[ignore = "as long as one wants"]
fn for_so_many_seconds() {
    let number = |name: &str, or: u64| std::env::var(name).map_or(or, |text| text.parse().unwrap());
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let (seconds, first) = (number("SIMULATION_SECONDS", 60), number("SIMULATION_SEED", 1000));
    let threads = number("SIMULATION_THREADS", threads);
    let first = first + number("SIMULATION_TAKE_OVERS", 0) * TAKEN_FROM;
    let (clock, time) = (Env::real().clock, Duration::from_secs(seconds));
    let begun = clock.monotonic();
    let (next, simulated) = (AtomicU64::new(first), AtomicU64::new(0));
    let failed = Mutex::new(Vec::new());
    let report = |seeds: u64| {
        let rate = seeds as f64 / (clock.monotonic() - begun).as_secs_f64();
        let simulated = simulated.load(Ordering::SeqCst) / 1000;
        let failed = failed.lock().len();
        println!(
            "{seeds} seeds, {rate:.1} a second, {simulated} s of virtual time, {failed} failed"
        );
    };
    let work = || {
        while clock.monotonic() - begun < time {
            let seed = next.fetch_add(1, Ordering::SeqCst);
            let plan = plan_of(seed);
            let run = simulate(seed, plan, false);
            simulated.fetch_add(run.time.as_millis() as u64, Ordering::SeqCst);
            if let Some(failure) = &run.failure {
                println!("{}\nseed {seed}: {plan:?}\nseed {seed}: {failure}", run.trace);
                failed.lock().push(seed);
            }
            if seed.is_multiple_of(100) {
                assert_eq!(simulate(seed, plan, false).hash, run.hash, "seed {seed}, once more");
            }
            if (seed - first + 1).is_multiple_of(1000) {
                report(seed - first + 1);
            }
        }
    };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    report(next.load(Ordering::SeqCst) - first);
    assert!(failed.lock().is_empty(), "failed: {:?}", *failed.lock());
}

/// One seed of a long run once more, with all that happens: `SIMULATION_SEED`.
#[test]
#[ignore = "for a seed that has failed"]
fn once_more() {
    tracing::subscriber::set_global_default(Logged).unwrap();
    let seed = std::env::var("SIMULATION_SEED").map_or(1000, |text| text.parse().unwrap());
    let (plan, run) = (plan_of(seed), simulate(seed, plan_of(seed), true));
    println!("{}seed {seed}: {plan:?}", run.trace);
    assert!(run.failure.is_none(), "seed {seed}: {}", run.failure.unwrap_or_default());
}

/// Adds what the client and the server log to the trace.
struct Logged;

impl tracing::Subscriber for Logged {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("ferry")
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!(" {field}={value:?}");
            }
        }
        let mut text = Text(format!("{} logs", event.metadata().target()));
        event.record(&mut text);
        sim::note(|| text.0);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
