//! Answering a client panics, which is a bug in some layer below. No client waits for ever because
//! of it.

use std::sync::atomic::AtomicBool;

use ferry_env::Clock;

use super::boundaries::assert_well;
use super::early_ack::Teller;
use super::*;
use crate::message::*;

/// A clock that panics once, in a thread of the server, when it is told to: the file system asks it
/// in most calls.
struct Trap {
    clock: Arc<dyn Clock>,
    armed: AtomicBool,
}

impl Trap {
    fn ask(&self) {
        let server = std::thread::current().name() == Some("ferry-server");
        assert!(!server || !self.armed.swap(false, Ordering::SeqCst), "planted");
    }
}

impl Clock for Trap {
    fn monotonic(&self) -> Duration {
        self.ask();
        self.clock.monotonic()
    }
    fn wall(&self) -> Duration {
        self.ask();
        self.clock.wall()
    }
}

fn trapped(seed: u64) -> (World, Arc<Trap>) {
    let mut world = World::new(seed);
    world.stop();
    let trap = Arc::new(Trap { clock: Env::real().clock, armed: AtomicBool::new(false) });
    world.fs.detach();
    world.fs.close().unwrap();
    let env = Env { clock: trap.clone(), ..Env::real() };
    world.fs = LocalFs::open(world.dev.clone(), fs_options(), env).unwrap();
    world.start();
    (world, trap)
}

/// Arms the trap, and checks that it has gone off.
fn sprung<T>(trap: &Trap, act: impl FnOnce() -> T) -> T {
    trap.armed.store(true, Ordering::SeqCst);
    let result = act();
    assert!(!trap.armed.swap(false, Ordering::SeqCst), "nothing has panicked");
    result
}

#[test]
fn a_change_that_panics_fails_and_later_ones_are_applied() {
    let (world, trap) = trapped(600);
    // Clients that send nothing on their own: the trap is for the change.
    let (client, other) = (world.waiting_client(), world.waiting_client());
    let dir = client.mkdir(ROOT, "d").unwrap();
    assert_eq!(sprung(&trap, || client.mkdir(dir, "falls")), Err(Errno(libc::EIO)));
    let (ino, fh) = client.create(dir, "f").unwrap();
    assert_eq!(client.write(ino, fh, 0, b"x"), Ok(1));
    assert_eq!(other.ino(ROOT, "d"), dir);
    assert_eq!(other.ino(dir, "f"), ino);
}

#[test]
fn a_request_that_panics_fails_and_its_room_is_free() {
    let (world, trap) = trapped(601);
    let client = world.waiting_client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"x").unwrap();
    for _ in 0..3 {
        // The access time is to be moved: the clock is asked.
        assert_eq!(sprung(&trap, || client.read(ino, fh, 1)), Err(Errno(libc::EIO)));
    }
    assert_eq!(client.read(ino, fh, 1).unwrap(), b"x");
    assert_well(&client);
}

#[test]
fn an_early_acknowledged_change_that_panics_ends_its_epoch() {
    let (world, trap) = trapped(602);
    let mut teller = Teller::new(&world);
    // A client that sends nothing on its own: the trap is for the early-acknowledged change.
    let other = world.waiting_client();
    assert_eq!(teller.lease(&[ROOT]).len(), 1);
    let (number, mkdir) = (teller.numbers().start, |name: &str| Op::Mkdir {
        parent: ROOT,
        name: name.into(),
        mode: 0o755,
    });
    let first = sprung(&trap, || {
        let first = teller.make(number, mkdir("falls"));
        let second = teller.make(number + 1, mkdir("behind"));
        teller.give_back(&[ROOT], second);
        assert_eq!(teller.changed(first), Outcome::Failed { errno: libc::EIO });
        assert_eq!(teller.changed(second), Outcome::Dropped {});
        first
    });
    assert_eq!(teller.ping(), (true, 0), "change {first} has ended its epoch, and the leases stay");
    assert!(other.mkdir(ROOT, "free").is_ok());
    assert_eq!(other.lookup(ROOT, "behind"), Ok(None));
}

#[test]
fn a_panic_in_a_sync_does_not_stop_later_syncs() {
    let (world, trap) = trapped(603);
    let client = world.waiting_client();
    let (ino, fh) = client.create(ROOT, "f").unwrap();
    client.write(ino, fh, 0, b"x").unwrap();
    assert_eq!(sprung(&trap, || client.sync()), Err(Errno(libc::EIO)));
    assert_eq!(client.sync(), Ok(()));
}
