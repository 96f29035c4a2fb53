//! Write leases and early-acknowledged changes, seen by a client that sends any message, true or
//! not.

use super::boundaries::{Raw, assert_well};
use super::*;
use crate::codec::List;
use crate::message::*;
use std::collections::BTreeSet;

/// A client that decides for itself what it has been granted.
pub(super) struct Teller {
    raw: Raw,
    pub(super) session: u128,
    pub(super) seq: u64,
    pub(super) epoch: u32,
    requests: u64,
    /// Recalls that came while it waited for something else.
    recalled: Vec<Ino>,
}

pub(super) const AT: Timestamp = Timestamp(1_234_567_890_123_456_789);

impl Teller {
    pub(super) fn new(world: &World) -> Self {
        Self::enter(Raw::new(world), 0, 0)
    }

    fn enter(mut raw: Raw, session: u128, seq: u64) -> Self {
        raw.send(&ToServer::Hello {
            version: VERSION,
            session,
            path: b"/".into(),
            name: b"teller".to_vec(),
            newest: seq,
        });
        match raw.hear() {
            Some(ToClient::Welcome { session, epoch, .. }) => {
                Self { raw, session, seq, epoch, requests: 0, recalled: Vec::new() }
            }
            other => panic!("{other:?}"),
        }
    }

    /// The same session on another connection.
    pub(super) fn again(self, world: &World) -> Self {
        Self::enter(Raw::new(world), self.session, self.seq)
    }

    pub(super) fn send(&mut self, acknowledged: Option<Acknowledged>, op: Op) -> u64 {
        self.seq += 1;
        self.send_again(self.seq, acknowledged, op);
        self.seq
    }

    pub(super) fn send_again(&mut self, seq: u64, acknowledged: Option<Acknowledged>, op: Op) {
        let (epoch, caller) = (self.epoch, Caller::default());
        self.raw.send(&ToServer::Change { seq, answered: 0, epoch, acknowledged, caller, op });
    }

    pub(super) fn acknowledge(&mut self, op: Op) -> u64 {
        self.make(0, op)
    }

    /// Acknowledges early that something is made under that number.
    pub(super) fn make(&mut self, ino: Ino, op: Op) -> u64 {
        self.send(Some(Acknowledged { at: AT, ino }), op)
    }

    pub(super) fn give_back(&mut self, inodes: &[Ino], after: u64) {
        self.raw.send(&ToServer::Returned { inodes: List(inodes.into()), after });
    }

    /// How a change ended.
    pub(super) fn changed(&mut self, seq: u64) -> Outcome {
        loop {
            match self.raw.hear() {
                Some(ToClient::Changed { seq: found, outcome, .. }) if found == seq => {
                    return outcome;
                }
                Some(ToClient::Changed { seq: found, .. }) if found < seq => {}
                Some(ToClient::Recall { inodes }) => self.recalled.extend(inodes.0),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(super) fn change(&mut self, op: Op) -> Outcome {
        let seq = self.send(None, op);
        self.changed(seq)
    }

    pub(super) fn request(&mut self, op: Op) -> u64 {
        self.requests += 1;
        let (id, after, caller) = (self.requests, 0, Caller::default());
        self.raw.send(&ToServer::Request { id, after, caller, op });
        id
    }

    pub(super) fn replied(&mut self, id: u64) -> Outcome {
        loop {
            match self.raw.hear() {
                Some(ToClient::Reply { id: found, outcome, .. }) if found == id => return outcome,
                Some(ToClient::Recall { inodes }) => self.recalled.extend(inodes.0),
                Some(ToClient::Changed { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    pub(super) fn ask(&mut self, op: Op) -> Outcome {
        let id = self.request(op);
        self.replied(id)
    }

    pub(super) fn lookup(&mut self, parent: Ino, name: &str) -> Ino {
        match self.ask(Op::Lookup { parent, name: name.into() }) {
            Outcome::Entry { known: Some(known) } => known.attr.ino,
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Asks for write leases; gives what it has.
    pub(super) fn lease(&mut self, inodes: &[Ino]) -> Vec<Held> {
        match self.ask(Op::Lease { inodes: List(inodes.into()) }) {
            Outcome::Leases { held } => held.0,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn numbers(&mut self) -> std::ops::Range<Ino> {
        match self.ask(Op::Numbers {}) {
            Outcome::Numbers { numbers: Numbers { first, count, .. } } => {
                first..first + Ino::from(count)
            }
            other => panic!("{other:?}"),
        }
    }

    /// The next inodes that are to be given back.
    pub(super) fn recall(&mut self) -> Vec<Ino> {
        if self.recalled.is_empty() {
            match self.raw.hear() {
                Some(ToClient::Recall { inodes }) => self.recalled.extend(inodes.0),
                other => panic!("{other:?}"),
            }
        }
        std::mem::take(&mut self.recalled)
    }

    pub(super) fn ping(&mut self) -> (bool, u32) {
        self.raw.send(&ToServer::Ping { number: 1 });
        loop {
            match self.raw.hear() {
                Some(ToClient::Pong { renewed, epoch, .. }) => return (renewed, epoch),
                Some(ToClient::Recall { inodes }) => self.recalled.extend(inodes.0),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(super) fn open(&mut self, ino: Ino, fh: u64) {
        let open = Op::Open { ino, fh, flags: libc::O_RDWR, kill_suidgid: false };
        assert_eq!(self.change(open), Outcome::Done {});
    }
}

pub(super) fn mkdir(parent: Ino, name: &str) -> Op {
    Op::Mkdir { parent, name: name.into(), mode: 0o755 }
}

pub(super) fn create(parent: Ino, name: &str, fh: u64) -> Op {
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    Op::Create { parent, name: name.into(), mode: 0o644, flags, fh }
}

pub(super) fn write(fh: u64, offset: u64, data: &[u8]) -> Op {
    Op::Write { fh, offset, data: data.into(), append: false, kill_suidgid: false }
}

fn chmod(ino: Ino, mode: u32) -> Op {
    Op::Setattr { ino, fh: None, set: SetAttr { mode: Some(mode), ..SetAttr::default() } }
}

fn failed(errno: i32) -> Outcome {
    Outcome::Failed { errno }
}

impl World {
    /// A directory and a file in it, made by a client that has left.
    pub(super) fn furnished(&self) -> (Ino, Ino) {
        let maker = self.client();
        let dir = maker.mkdir(ROOT, "d").unwrap();
        let (ino, fh) = maker.create(dir, "f").unwrap();
        maker.close(ino, fh);
        maker.fs.close();
        self.until_nobody_is_there();
        (dir, ino)
    }
}

#[test]
fn early_acknowledged_changes_are_applied_before_another_client_is_answered() {
    let world = World::new(300);
    let (dir, ino) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    teller.open(ino, 1);
    let held = teller.lease(&[dir, ino, 1 << 60]);
    // Which of the two has the smaller number depends on when its maker got a range of them.
    let inos: BTreeSet<Ino> = held.iter().map(|held| held.attr.ino).collect();
    assert_eq!(inos, BTreeSet::from([dir, ino]), "not what it does not know");
    assert_eq!(world.figure("write_leases"), 2);
    let other = world.client();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            assert_eq!(other.ino(ROOT, "d"), dir);
            assert_eq!(other.lookup(dir, "f").unwrap(), None, "moved");
            other.lookup(dir, "g").unwrap().unwrap()
        });
        assert_eq!(teller.recall(), [dir]);
        teller.acknowledge(write(1, 0, b"told"));
        teller.acknowledge(chmod(ino, 0o600));
        let (name, new_name) = (b"f".to_vec(), b"g".to_vec());
        let flags = RenameFlags::default();
        let moved =
            teller.acknowledge(Op::Rename { parent: dir, name, new_parent: dir, new_name, flags });
        assert!(!reading.is_finished());
        teller.give_back(&[dir], moved);
        assert_eq!(teller.changed(moved), Outcome::Done {});
        assert_eq!(teller.recall(), [ino]);
        teller.give_back(&[ino], moved);
        let attr = reading.join().unwrap();
        assert_eq!((attr.size, attr.mode & 0o7777), (4, 0o600));
    });
    assert_eq!(world.figure("write_leases"), 0);
    // Its own requests never wait for its own leases.
    assert_eq!(teller.lease(&[dir]).len(), 1);
    assert!(matches!(teller.ask(Op::Getattr { ino: dir }), Outcome::Attributes { .. }));
}

#[test]
fn a_change_of_a_leased_inode_is_busy_and_leases_are_granted_in_turn() {
    let world = World::new(301);
    let (dir, ino) = world.furnished();
    let mut tellers: Vec<Teller> = (0..3).map(|_| Teller::new(&world)).collect();
    for teller in &mut tellers {
        assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
        teller.give_back(&[ROOT, dir, ino], 0);
    }
    assert_eq!(tellers[0].lease(&[dir]).len(), 1);
    assert_eq!(tellers[1].change(mkdir(dir, "x")), Outcome::Busy {});
    assert_eq!(tellers[2].change(mkdir(dir, "x")), Outcome::Busy {});
    let second = tellers[1].request(Op::Lease { inodes: List(vec![dir, ino]) });
    assert_eq!(tellers[0].recall(), [dir]);
    let third = tellers[2].request(Op::Lease { inodes: List(vec![dir]) });
    let made = tellers[0].send(None, mkdir(dir, "0"));
    tellers[0].give_back(&[dir], made);
    assert!(matches!(tellers[0].changed(made), Outcome::Entry { .. }));
    assert!(matches!(tellers[1].replied(second), Outcome::Leases { held } if held.0.len() == 2));
    assert_eq!(tellers[1].recall(), [dir], "behind the answer that grants it");
    let made = tellers[1].send(None, mkdir(dir, "1"));
    tellers[1].give_back(&[dir], made);
    assert!(matches!(tellers[1].changed(made), Outcome::Entry { .. }));
    assert!(matches!(tellers[2].replied(third), Outcome::Leases { held } if held.0.len() == 1));
    assert!(matches!(tellers[2].change(mkdir(dir, "2")), Outcome::Entry { .. }));
    // What is still leased of it does not hold up what is not.
    assert_eq!(tellers[2].change(chmod(ino, 0o600)), Outcome::Busy {});
    assert!(matches!(tellers[2].change(mkdir(ROOT, "free")), Outcome::Entry { .. }));
}

#[test]
fn an_early_acknowledged_create_is_leased_to_its_client_at_once() {
    let world = World::new(302);
    let other = world.client();
    let mut teller = Teller::new(&world);
    let numbers = teller.numbers();
    assert!(numbers.end - numbers.start >= 16);
    assert_eq!(teller.lease(&[ROOT]).len(), 1);
    let (dir, file) = (numbers.start + 1, numbers.start);
    teller.make(dir, mkdir(ROOT, "d"));
    let made = teller.make(file, create(dir, "f", 1));
    let written = teller.acknowledge(write(1, 0, b"whole"));
    match teller.changed(made) {
        Outcome::Entry { known: Some(known) } => {
            assert_eq!((known.attr.ino, known.attr.mtime, known.attr.ctime), (file, AT, AT));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(teller.changed(written), Outcome::Count { count: 5 });
    assert_eq!(world.figure("write_leases"), 3);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let dir = other.ino(ROOT, "d");
            let attr = other.lookup(dir, "f").unwrap().unwrap();
            (dir, attr)
        });
        for expected in [ROOT, dir, dir, file] {
            let recalled = teller.recall();
            assert!(
                recalled == [expected] || expected == dir && recalled == [file],
                "{recalled:?}"
            );
            teller.give_back(&recalled, written);
            if recalled == [file] {
                break;
            }
        }
        let (found, attr) = reading.join().unwrap();
        assert_eq!((found, attr.ino, attr.size, attr.mtime), (dir, file, 5, AT));
    });
}

#[test]
fn a_failed_early_acknowledged_change_ends_its_epoch() {
    let world = World::new(303);
    let (dir, ino) = world.furnished();
    let honest = world.client();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    let numbers = teller.numbers();
    let mut number = numbers.start;
    type Lie<'l> = dyn Fn(&mut Teller, Ino) -> (u64, i32) + 'l;
    let lies: [&Lie<'_>; 7] = [
        &|teller, _| (teller.acknowledge(chmod(ino, 0o700)), libc::ESTALE),
        &|teller, number| (teller.make(number, mkdir(dir, "f")), libc::EEXIST),
        &|teller, number| (teller.make(number, create(dir, "f", 9)), libc::EEXIST),
        &|teller, _| (teller.acknowledge(mkdir(dir, "x")), libc::EINVAL),
        &|teller, _| (teller.make(1 << 40, mkdir(dir, "x")), libc::EINVAL),
        &|teller, _| (teller.make(ino, mkdir(dir, "x")), libc::EINVAL),
        &|teller, number| (teller.make(number, chmod(dir, 0o711)), libc::EINVAL),
    ];
    for (round, lie) in lies.into_iter().enumerate() {
        assert_eq!(teller.lease(&[dir]).len(), 1);
        number += 1;
        let (seq, errno) = lie(&mut teller, number);
        let acknowledged = teller.acknowledge(chmod(dir, 0o701));
        let waited = teller.send(None, mkdir(dir, "y"));
        assert_eq!(teller.changed(seq), failed(errno), "{round}");
        assert_eq!(teller.changed(acknowledged), Outcome::Dropped {}, "{round}");
        assert_eq!(teller.changed(waited), Outcome::Dropped {}, "{round}");
        assert_eq!(teller.ping(), (true, 0), "{round}: the leases stay");
        teller.epoch += 1;
        let applied = teller.acknowledge(chmod(dir, 0o755));
        assert!(
            matches!(teller.changed(applied), Outcome::Attributes { .. }),
            "{round}: the next epoch goes on"
        );
    }
    let made = teller.make(numbers.start, mkdir(dir, "once"));
    assert!(matches!(teller.changed(made), Outcome::Entry { .. }));
    let twice = teller.make(numbers.start, mkdir(dir, "twice"));
    assert_eq!(teller.changed(twice), failed(libc::EINVAL), "a number is used once");
    assert_eq!(honest.ino(ROOT, "d"), dir);
    std::thread::scope(|scope| {
        let listing = scope.spawn(|| honest.list(dir));
        assert_eq!(teller.recall(), [dir]);
        teller.give_back(&[dir], teller.seq);
        assert_eq!(listing.join().unwrap(), Ok(vec!["f".into(), "once".into()]));
    });
}

#[test]
fn false_lease_messages_end_only_their_own_session() {
    let world = World::new(304);
    let (dir, ino) = world.furnished();
    let honest = world.waiting_client();
    let lies: [&dyn Fn(&mut Teller); 4] = [
        &|teller| teller.give_back(&[dir], u64::MAX),
        &|teller| {
            teller.epoch = 1;
            teller.acknowledge(Op::Nothing {});
        },
        &|teller| teller.give_back(&vec![dir; BATCH_MAX + 1], 0),
        &|teller| {
            teller.acknowledge(Op::Statfs {});
        },
    ];
    for lie in lies {
        let mut teller = Teller::new(&world);
        lie(&mut teller);
        assert!(teller.raw.refused().contains("rules"));
        assert_eq!(
            world.server().control().clients().as_array().unwrap().len(),
            1,
            "its session has ended"
        );
        assert_well(&honest);
    }
    let mut teller = Teller::new(&world);
    assert_eq!(
        teller.ask(Op::Lease { inodes: List(vec![dir; BATCH_MAX + 1]) }),
        failed(libc::EINVAL)
    );
    assert_eq!(teller.lease(&[dir, ino, 0, u64::MAX]), [], "numbers that were guessed");
    assert_eq!(teller.lease(&[]), []);
    teller.give_back(&[dir, ino, 0, u64::MAX, ROOT], 0);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    teller.give_back(&[ROOT, dir, ino], 0);
    // What was never leased, given back; what was not asked for, given back; the same twice.
    assert_eq!(teller.lease(&[dir, dir]).len(), 1);
    teller.give_back(&[ino, dir, dir], 0);
    teller.give_back(&[dir], 0);
    assert_eq!(teller.ping(), (true, 0));
    assert_eq!(world.figure("write_leases"), 0);
    let reserve = |bytes, inodes| Op::Reserve { bytes, inodes };
    let free = world.free_bytes();
    for greedy in [reserve(u64::MAX, 1), reserve(1, u64::MAX), reserve(1 << 40, 0)] {
        let Outcome::Space { .. } = teller.ask(greedy) else { panic!("what there is") };
        assert!(free - world.free_bytes() <= free / 8, "no more than an eighth of what is free");
    }
    assert_eq!(
        teller.change(Op::Remaining { bytes: u64::MAX, inodes: u64::MAX }),
        Outcome::Done {}
    );
    assert_eq!(teller.change(Op::Remaining { bytes: 4096, inodes: 1 }), Outcome::Done {});
    assert_eq!(free - world.free_bytes(), 2 * 4096);
    assert_eq!(teller.ask(reserve(1 << 20, 10)), Outcome::Space { bytes: 1 << 20, inodes: 10 });
    for _ in 0..20 {
        teller.numbers();
    }
    assert_eq!(teller.ping(), (true, 0));
    assert_well(&honest);
    assert_eq!(teller.lease(&[ROOT]).len(), 1);
}

#[test]
fn a_read_only_export_acknowledges_nothing_early() {
    let export = |path: &str, read_only| Export { path: path.into(), read_only };
    let options = ServerOptions { exports: vec![export("/", true)], ..server_options() };
    let world = World::with(305, options);
    let mut teller = Teller::new(&world);
    assert_eq!(teller.lease(&[ROOT]), []);
    let acknowledged = teller.acknowledge(chmod(ROOT, 0o700));
    assert_eq!(teller.changed(acknowledged), failed(libc::ESTALE));
}

#[test]
fn leases_and_early_acknowledged_changes_survive_a_connection() {
    let world = World::new(306);
    let (dir, ino) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    assert_eq!(teller.lease(&[dir, ino]).len(), 2);
    let lost = teller.seq + 1;
    let mut teller = teller.again(&world);
    assert_eq!((teller.epoch, world.figure("write_leases")), (0, 2));
    teller.seq = lost;
    teller.send_again(lost, Some(Acknowledged { at: AT, ino: 0 }), chmod(ino, 0o600));
    assert!(matches!(teller.changed(lost), Outcome::Attributes { .. }), "it was not lost");
    // A recall that the old connection may have lost comes again on the new one.
    let other = world.client();
    std::thread::scope(|scope| {
        let reading =
            scope.spawn(|| other.ino(ROOT, "d") == dir && other.list(dir).unwrap() == ["f"]);
        assert_eq!(teller.recall(), [dir]);
        let mut teller = teller.again(&world);
        assert!(matches!(teller.raw.hear(), Some(ToClient::Changed { seq, .. }) if seq == lost));
        assert_eq!(teller.recall(), [dir]);
        teller.give_back(&[dir], lost);
        assert!(reading.join().unwrap());
    });
}

/// Whichever of its messages is the last on a connection: early-acknowledged changes are applied,
/// once, in order.
#[test]
fn early_acknowledged_changes_survive_a_connection_that_closes_at_any_message() {
    const CHANGES: u64 = 12;
    for last in 0..CHANGES {
        let world = World::new(320);
        let (dir, ino) = world.furnished();
        let mut teller = Teller::new(&world);
        assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
        let numbers = teller.numbers();
        assert_eq!(teller.lease(&[dir]).len(), 1);
        let burst: Vec<(Ino, Op)> = (0..CHANGES / 3)
            .flat_map(|i| {
                let (made, name) = (numbers.start + i, format!("n{}", i % 2));
                let parent = dir;
                [
                    (made, create(dir, &name, i + 1)),
                    (0, write(i + 1, 0, &[b'a' + i as u8; 5])),
                    (0, Op::Unlink { parent, name: name.into() }),
                ]
            })
            .collect();
        let acknowledged = |at: u64| {
            let (ino, op) = burst[at as usize].clone();
            (Some(Acknowledged { at: AT, ino }), op)
        };
        // The last name stays.
        let all = CHANGES - 1;
        for at in 0..last.min(all) {
            let (acknowledged, op) = acknowledged(at);
            teller.send(acknowledged, op);
        }
        let mut teller = teller.again(&world);
        assert_eq!((teller.epoch, world.figure("write_leases") >= 1), (0, true), "{last}");
        for at in 0..all {
            let (acknowledged, op) = acknowledged(at);
            teller.send_again(at + 1, acknowledged, op);
        }
        teller.seq = all;
        for seq in 1..=all {
            let outcome = teller.changed(seq);
            assert!(
                !matches!(outcome, Outcome::Failed { .. } | Outcome::Dropped {}),
                "{last}: {seq}: {outcome:?}"
            );
        }
        teller.raw.send(&ToServer::Bye {});
        let client = world.client();
        assert_eq!(client.ino(ROOT, "d"), dir);
        assert_eq!(client.list(dir).unwrap(), ["f", "n1"], "{last}");
        let left = client.ino(dir, "n1");
        assert_eq!(left, numbers.start + 3);
        let fh = client.open(left).unwrap();
        assert_eq!(client.read(left, fh, 100).unwrap(), b"ddddd", "{last}");
    }
}

#[test]
fn a_client_that_returns_after_its_leases_were_granted_to_others_is_fenced() {
    let term = Duration::from_millis(600);
    let world = World::with(307, ServerOptions { lease_term: term, ..server_options() });
    let (dir, ino) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    assert_eq!(teller.lease(&[dir, ino]).len(), 2);
    let other = world.client();
    // It hears of the recall, and says nothing.
    assert_eq!(other.ino(ROOT, "d"), dir);
    let made = other.mkdir(dir, "by another").unwrap();
    let fenced = teller.acknowledge(chmod(ino, 0o600));
    let waited = teller.send(None, chmod(ino, 0o606));
    assert_eq!(teller.changed(fenced), Outcome::Dropped {}, "of a lease that nobody wanted, too");
    assert_eq!(teller.changed(waited), Outcome::Dropped {});
    assert_eq!(teller.ping().1, 1);
    let mut teller = teller.again(&world);
    assert_eq!(teller.epoch, 1);
    for _ in 0..teller.seq {
        teller.raw.hear();
    }
    assert_eq!(teller.lookup(dir, "by another"), made);
    assert_eq!(teller.lease(&[ino])[0].attr.mode & 0o7777, 0o644);
    let applied = teller.acknowledge(chmod(ino, 0o640));
    assert!(matches!(teller.changed(applied), Outcome::Attributes { .. }));
}

/// Counts clients that have ended, one way or the other.
struct OnDrop<'a>(&'a AtomicU64);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Each has the directory for one operation at a time. A client that looks sees at once what was
/// acknowledged to any of them.
#[test]
fn changes_of_three_clients_in_turn_are_visible_at_once() {
    const ROUNDS: u64 = 40;
    let world = World::new(310);
    let (dir, _) = world.furnished();
    let (acknowledged, over) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for which in 0..3 {
            let (world, acknowledged, over) = (&world, &acknowledged, &over);
            scope.spawn(move || {
                let _counted = OnDrop(over);
                let mut teller = Teller::new(world);
                assert_eq!(teller.lookup(ROOT, "d"), dir);
                teller.give_back(&[ROOT, dir], 0);
                let numbers = teller.numbers();
                for round in 0..ROUNDS {
                    teller.ping();
                    assert_eq!(teller.lease(&[dir]).len(), 1);
                    let number = numbers.start + round;
                    let made = teller.make(number, mkdir(dir, &format!("{which}-{round}")));
                    let changed = teller.acknowledge(chmod(number, 0o700));
                    acknowledged.fetch_add(1, Ordering::SeqCst);
                    teller.give_back(&[dir, number], changed);
                    assert!(matches!(teller.changed(made), Outcome::Entry { .. }));
                    assert!(matches!(teller.changed(changed), Outcome::Attributes { .. }));
                }
                teller.raw.send(&ToServer::Bye {});
            });
        }
        let reader = world.client();
        assert_eq!(reader.ino(ROOT, "d"), dir);
        loop {
            let (is_over, least) =
                (over.load(Ordering::SeqCst) == 3, acknowledged.load(Ordering::SeqCst));
            let names = reader.list(dir).unwrap();
            assert!(names.len() as u64 > least, "{} of {least}", names.len());
            for name in names.iter().rev().filter(|name| *name != "f").take(2) {
                assert_eq!(reader.lookup(dir, name).unwrap().unwrap().mode & 0o7777, 0o700);
            }
            if is_over {
                break;
            }
        }
    });
    let client = world.client();
    assert_eq!(client.ino(ROOT, "d"), dir);
    assert_eq!(client.list(dir).unwrap().len() as u64, 3 * ROUNDS + 1);
}

/// What a client makes is leased to it, and it does not give it back: others wait for its term,
/// whether it is there or not.
#[test]
fn a_lease_that_is_not_returned_ends_with_its_term() {
    for stays in [true, false] {
        let term = Duration::from_millis(600);
        let world = World::with(311, ServerOptions { lease_term: term, ..server_options() });
        let other = world.client();
        let mut teller = Teller::new(&world);
        let number = teller.numbers().start;
        assert_eq!(teller.lease(&[ROOT]).len(), 1);
        let made = teller.make(number, mkdir(ROOT, "d"));
        teller.give_back(&[ROOT], made);
        assert!(matches!(teller.changed(made), Outcome::Entry { .. }));
        let mut there = Some(teller).filter(|_| stays);
        if let Some(teller) = &mut there {
            teller.ping();
        }
        assert_eq!(other.ino(ROOT, "d"), number);
        assert_eq!(other.list(number).unwrap(), [""; 0]);
        assert_eq!(world.figure("write_leases"), 0);
    }
}

#[test]
fn a_stopping_server_waits_for_early_acknowledged_changes() {
    let world = World::new(309);
    let (dir, ino) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!((teller.lookup(ROOT, "d"), teller.lookup(dir, "f")), (dir, ino));
    teller.give_back(&[ROOT], 0);
    assert_eq!(teller.lease(&[dir, ino]).len(), 2);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| world.stop());
        let mut recalled = teller.recall();
        if recalled.len() == 1 {
            recalled.extend(teller.recall());
        }
        assert_eq!(BTreeSet::from_iter(recalled.iter().copied()), BTreeSet::from([dir, ino]));
        assert_eq!(teller.lease(&[ROOT]), [], "nobody decides alone any more");
        assert!(!stopping.is_finished());
        let acknowledged = teller.acknowledge(chmod(ino, 0o600));
        teller.give_back(&recalled, acknowledged);
        assert!(matches!(teller.changed(acknowledged), Outcome::Attributes { .. }));
        assert_eq!(teller.raw.hear(), Some(ToClient::Goodbye {}));
        stopping.join().unwrap();
    });
    world.start();
    let client = world.client();
    assert_eq!(client.ino(ROOT, "d"), dir);
    assert_eq!(client.lookup(dir, "f").unwrap().unwrap().mode & 0o7777, 0o600);
}

#[test]
fn a_client_that_ends_its_session_leaves_nothing_leased() {
    let world = World::new(308);
    let (dir, _) = world.furnished();
    let mut teller = Teller::new(&world);
    assert_eq!(teller.lookup(ROOT, "d"), dir);
    assert_eq!(teller.lease(&[dir]).len(), 1);
    let other = world.client();
    std::thread::scope(|scope| {
        let reading =
            scope.spawn(|| other.ino(ROOT, "d") == dir && other.list(dir).unwrap() == ["f"]);
        assert_eq!(teller.recall(), [dir]);
        teller.raw.send(&ToServer::Bye {});
        assert!(reading.join().unwrap());
    });
}
