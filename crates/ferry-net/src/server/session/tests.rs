use std::sync::Arc;
use std::time::Duration;

use crate::rt::Mutex;
use ferry_fs::{Needed, ROOT, SessionStore};
use tokio::sync::Semaphore;

use super::*;
use crate::codec::List;
use crate::limits::Peer;
use crate::message::{Caller, Claim, Op, Outcome};
use crate::server::leases::Leases;
use crate::server::locks::Locks;

fn change(seq: u64) -> Change {
    let permit = || Arc::new(Semaphore::new(1)).try_acquire_owned().expect("one is free");
    let (epoch, early, caller, op) = (0, None, Caller::default(), Op::Nothing {});
    let (arrived, bytes) = (Duration::ZERO, 1);
    Change {
        seq,
        answered: 0,
        epoch,
        early,
        arrived,
        bytes,
        caller,
        op,
        room: (permit(), permit()),
    }
}

fn greeting() -> Greeting {
    Greeting { boot: 1, term_ms: 1000, clock: ferry_env::Env::real().clock }
}

fn leases() -> Leases {
    Leases::new(
        ferry_env::Env::real().clock,
        Duration::from_secs(1),
        Duration::ZERO,
        Duration::ZERO,
    )
}

fn session() -> Session {
    let mounted = Mounted { path: b"/".to_vec(), root: ROOT, read_only: false, bounds: None };
    Session::new((1, 1), "test".into(), Peer::default(), mounted)
}

#[test]
fn an_older_connection_changes_nothing_and_takes_no_lock() {
    let (session, locks, leases, greeting) = (session(), Locks::default(), leases(), greeting());
    let both = (&locks, &leases);
    let (line, _frames) = crate::lanes::line();
    let old = session.connect((&line, None), &greeting, (false, 0, None), both).expect("it lives");
    assert!(session.locking_right(Some(old)).is_some());
    let new = session.connect((&line, None), &greeting, (true, 0, None), both).expect("it lives");
    assert!(session.locking_right(Some(old)).is_none());
    assert!(!session.push(old, change(1), &leases).expect("late, not against the rules"));
    assert!(session.next().is_none());
    assert!(session.push(new, change(1), &leases).expect("it comes again"));
    session.disconnect(old, Duration::ZERO, &locks);
    assert!(!session.close_if_away(Duration::MAX, &locks, drop), "the newer connection is there");
    session.disconnect(new, Duration::ZERO, &locks);
    assert!(session.close_if_away(Duration::ZERO, &locks, drop));
    assert!(session.locking_right(Some(new)).is_none() && session.locking_right(None).is_none());
    assert!(session.connect((&line, None), &greeting, (true, 0, None), both).is_none());
}

#[test]
fn answers_of_early_acknowledged_changes_are_batched_in_order() {
    let (session, locks, leases, greeting) = (session(), Locks::default(), leases(), greeting());
    let (line, mut frames) = crate::lanes::line();
    let connection = session
        .connect((&line, None), &greeting, (false, 0, None), (&locks, &leases))
        .expect("it lives");
    let mut sent =
        || frames.try_recv().map(|(bytes, rooms): (Vec<u8>, Vec<Room>)| (bytes.len(), rooms.len()));
    assert!(sent().is_some_and(|(_, rooms)| rooms == 0), "the welcome");
    for seq in 1..=5 {
        session.push(connection, change(seq), &leases).expect("in order");
    }
    let made = |is_early: bool| {
        let Change { seq, room, .. } = session.next().expect("it has come");
        let applied = Applied::alone(Outcome::Done {});
        session.applied(seq, applied, room, is_early);
    };
    made(true);
    assert_eq!(sent(), None, "there are more to come");
    session.send_answers();
    let (one, rooms) = sent().expect("it was told to");
    assert_eq!(rooms, 1);
    made(true);
    made(true);
    assert_eq!(sent(), None);
    session.reply((connection, 1), 0, Outcome::Done {}, None);
    let (more, rooms) = sent().expect("a reply never waits");
    assert!(more > 2 * one && rooms == 2 && sent().is_none());
    made(false);
    assert_eq!(sent(), Some((one, 1)), "somebody waits for it");
    made(true);
    assert_eq!(sent(), Some((one, 1)), "no more are to come");
}

/// Of the server's capabilities.
const KEY: [u8; 16] = [7; 16];

#[test]
fn what_waiting_changes_need_is_known_before_their_turn() {
    let (session, locks, leases, greeting) = (session(), Locks::default(), leases(), greeting());
    let (line, _frames) = crate::lanes::line();
    let connection = session
        .connect((&line, None), &greeting, (false, 0, None), (&locks, &leases))
        .expect("it lives");
    session.state.lock().known.insert(9, 1);
    let mut seq = 0;
    let mut arrive = |op: Op| {
        seq += 1;
        let needed = session.needed_by(&op, &KEY);
        session.push(connection, Change { op, ..change(seq) }, &leases).expect("in order");
        needed
    };
    let open = |ino, fh| Op::Open { ino, fh, flags: libc::O_RDWR, kill_suidgid: false };
    let write = |fh| {
        let (offset, data, append, kill_suidgid) = (5, b"new".to_vec(), false, false);
        Op::Write { fh, offset, data, append, kill_suidgid }
    };
    assert_eq!(arrive(open(9, 1)), [], "its own turn has come");
    assert_eq!(arrive(open(9, 2)), [Needed::Inode(9)]);
    let written = [Needed::Inode(9), Needed::Overwritten(9, 5..8)];
    assert_eq!(arrive(write(2)), written, "the change before it opens the file");
    assert_eq!(arrive(write(3)), [], "nobody knows this file");
    let mut beyond = write(2);
    if let Op::Write { offset, .. } = &mut beyond {
        *offset = u64::MAX - 1;
    }
    assert_eq!(arrive(beyond), [Needed::Inode(9)], "no file is so long");
    let proof = crate::server::capability::of_inode(&KEY, b"/", 10, 0);
    let claims = [Claim { ino: 10, capability: proof }, Claim { ino: 11, capability: proof }];
    assert_eq!(arrive(Op::Claim { inodes: List(claims.to_vec()) }), [Needed::Inode(10)]);
    let removed = Op::Unlink { parent: 9, name: b"name".to_vec() };
    assert_eq!(arrive(removed), [Needed::Inode(9), Needed::Name(9, b"name".to_vec())]);
    // Those that are too far behind are read for when others have left the queue.
    let mut waiting = 7;
    while !arrive(open(9, 4)).is_empty() {
        waiting += 1;
    }
    assert_eq!(session.needed_soon(&KEY), [Needed::Inode(9)], "{waiting} changes wait");
    while session.next().is_some() {}
    assert_eq!(session.needed_soon(&KEY), []);
}

#[test]
fn a_server_that_stops_takes_no_more_changes_and_applies_those_that_it_has() {
    let (session, locks, leases, greeting) = (session(), Locks::default(), leases(), greeting());
    let both = (&locks, &leases);
    let (line, _frames) = crate::lanes::line();
    let connection =
        session.connect((&line, None), &greeting, (false, 0, None), both).expect("it lives");
    assert!(session.push(connection, change(1), &leases).expect("in order"));
    session.drain();
    assert!(!session.push(connection, change(2), &leases).expect("not heard"));
    assert_eq!(session.next().map(|c| c.seq), Some(1));
    assert!(session.next().is_none() && !session.is_busy());
}

#[test]
fn a_fence_while_the_session_is_being_recorded_does_not_deadlock() {
    use std::sync::mpsc::{channel, sync_channel};
    let dev: Arc<dyn ferry_device::BlockDevice> = Arc::new(ferry_device::MemDevice::new(64 << 20));
    let env = ferry_env::Env::real;
    ferry_fs::mkfs(&dev, &ferry_fs::MkfsOptions::default(), &env()).expect("it is new");
    let fs =
        ferry_fs::LocalFs::open(dev, ferry_fs::FsOptions::default(), env()).expect("it is there");
    let leases = Arc::new(Leases::new(
        env().clock,
        Duration::from_millis(1),
        Duration::ZERO,
        Duration::ZERO,
    ));
    let (session, locks, greeting) = (Arc::new(session()), Locks::default(), greeting());
    let (line, _frames) = crate::lanes::line();
    let connection = session
        .connect((&line, None), &greeting, (false, 0, None), (&locks, &leases))
        .expect("it lives");
    leases.begin(2, 2);
    leases.begin(3, 3);
    assert!(leases.grant_new(2, 20) && leases.grant_new(session.number, 10));
    // Recording the first fence takes a while: there is no room in the log.
    let (begun, has_begun) = sync_channel(1);
    let (go_on, goes_on) = channel();
    let goes_on = Mutex::new(goes_on);
    let (fenced, volume) = (Arc::clone(&session), Arc::clone(&fs));
    leases.on_fence(Box::new(move |number, fencing| {
        if number == 2 {
            begun.send(()).expect("it is waited for");
            goes_on.lock().recv().expect("it goes on");
        } else {
            fenced.fence(&*volume);
        }
        fencing.done();
    }));
    while leases.relied_on().0 {
        std::thread::yield_now();
    }
    let (done, all) = channel();
    let (of_both, told) = (Arc::clone(&leases), done.clone());
    std::thread::spawn(move || {
        let position = of_both.ask(3, crate::server::leases::Wants::Lease, vec![20, 10]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("there are threads").block_on(position.wait(|_| {}));
        told.send("fenced")
    });
    has_begun.recv().expect("it begins");
    // No other session waits for that.
    let one = || all.recv_timeout(Duration::from_secs(10)).expect("the others wait for each other");
    let (pushing, of_push, told) = (Arc::clone(&session), Arc::clone(&leases), done.clone());
    std::thread::spawn(move || {
        pushing.push(connection, change(1), &of_push).expect("in order");
        told.send("pushed")
    });
    assert_eq!(one(), "pushed");
    let (registering, volume) = (Arc::clone(&session), Arc::clone(&fs));
    std::thread::spawn(move || {
        registering.register(&*volume, true).expect("it may");
        done.send("entered")
    });
    assert_eq!(one(), "entered");
    go_on.send(()).expect("it is waited for");
    assert_eq!(one(), "fenced");
    assert!(!session.is_registered() && fs.sessions().expect("it is read").is_empty());
}
