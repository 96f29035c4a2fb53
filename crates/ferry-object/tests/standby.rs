//! Servers that stand by for the owner of a volume.

mod common;

use common::TestStore;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::{Clock, Env};
use ferry_object::{
    Claimant, Followed, Follower, Found, Limits, ObjectDevice, ObjectError, Standby,
    ThreadExecutor, VolumeOptions,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A clock that a test moves. Owners beat in real time.
struct Moved(AtomicU64);

impl Clock for Moved {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::SeqCst))
    }
    fn wall(&self) -> Duration {
        self.monotonic()
    }
}

struct World {
    objects: TestStore,
    clock: Arc<Moved>,
    env: Env,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(Moved(AtomicU64::new(0)));
        let env = Env { clock: clock.clone(), ..Env::real() };
        let world = Self { objects: TestStore::new(), clock, env };
        let options = VolumeOptions::new(64 << 20, (0, 1 << 20));
        ObjectDevice::make(world.objects.store(), world.threads(), &options, &world.env)
            .expect("a new volume");
        world
    }

    fn threads(&self) -> Arc<ThreadExecutor> {
        Arc::new(ThreadExecutor::new(&Env::real()).expect("threads can be started"))
    }

    fn open(&self, from: Option<u64>, beats: bool) -> Result<Arc<ObjectDevice>, ObjectError> {
        self.open_behind(Followed::default(), from, beats)
    }

    fn open_behind(
        &self,
        followed: Followed,
        from: Option<u64>,
        beats: bool,
    ) -> Result<Arc<ObjectDevice>, ObjectError> {
        let take_over = from.is_some();
        let claimant =
            Claimant { take_over, only_from: from, beats, followed, ..Claimant::default() };
        self.open_as(&claimant, Duration::from_millis(20))
    }

    fn open_as(
        &self,
        claimant: &Claimant,
        term: Duration,
    ) -> Result<Arc<ObjectDevice>, ObjectError> {
        let limits = Limits { term, root_log_objects: 100, ..Limits::default() };
        ObjectDevice::open(self.objects.store(), self.threads(), claimant, limits, &self.env)
    }

    fn standby(&self) -> Standby {
        let (store, threads) = (self.objects.store(), self.threads());
        let follower = Follower::open(store, threads, None, Limits::default(), &self.env);
        Standby::new(follower.expect("it can be followed"))
    }

    /// A look after a pause.
    fn look(&self, standby: &mut Standby) -> Found {
        self.clock.0.fetch_add(Standby::PAUSE.as_millis() as u64, Ordering::SeqCst);
        standby.look().expect("the store answers")
    }

    /// The first thing that looks find beside an owner that lives, and after how long.
    fn silent_after(&self, standby: &mut Standby) -> (Duration, Found) {
        let begun = self.clock.monotonic();
        loop {
            match self.look(standby) {
                LIVES => assert!(self.clock.monotonic() < begun + Duration::from_secs(60), "never"),
                other => return (self.clock.monotonic() - begun, other),
            }
        }
    }
}

const LIVES: Found = Found::InUse { may_be_dead: false };

fn is_some_heartbeats(time: Duration) -> bool {
    (Duration::from_secs(3)..Duration::from_secs(7)).contains(&time)
}

#[test]
fn an_idle_owner_that_beats_is_left_alone_and_one_that_does_no_more_is_silent() {
    let world = World::new();
    let mut standby = world.standby();
    assert_eq!(standby.look(), Ok(Found::Closed), "nobody has it yet");
    assert_eq!(standby.owner(), None);
    let owner = world.open(None, true).expect("it is free");
    let (wall, mut looks) = (Env::real().clock, 0);
    let until = wall.monotonic() + Duration::from_secs(8);
    while wall.monotonic() < until {
        std::thread::park_timeout(Standby::PAUSE);
        assert_eq!(world.look(&mut standby), LIVES);
        looks += 1;
    }
    assert!(looks > 12 && standby.owner().is_some());
    // It is not dropped before the next one has begun, as one that is stopped.
    let (after, found) = world.silent_after(&mut standby);
    let Found::Silent { epoch } = found else { panic!("{found:?}") };
    assert!(is_some_heartbeats(after), "{after:?}");
    assert!(matches!(world.open(Some(epoch + 1), true), Err(ObjectError::InUse { .. })));
    let next = world.open(Some(epoch), true).expect("it is taken over");
    let block = AlignedBuf::zeroed(BLOCK_SIZE);
    let failed = owner.write(0, &block).and_then(|()| owner.flush());
    assert!(failed.is_err() && !owner.is_surely_ours() && owner.ascertain_ours().is_err());
    assert_eq!(world.look(&mut standby), LIVES);
    assert!(next.ascertain_ours().is_ok() && next.is_surely_ours());
    world.look(&mut standby);
    assert!(!next.is_surely_ours(), "its last look is too old");
    next.close().expect("it is closed");
    assert_eq!(standby.look(), Ok(Found::Closed));
}

#[test]
fn an_owner_that_does_not_beat_is_waited_for_and_says_what_it_knows() {
    let world = World::new();
    let mut standby = world.standby();
    let owner = world.open(None, false).expect("it is free");
    let (_, found) = world.silent_after(&mut standby);
    assert_eq!(found, Found::InUse { may_be_dead: true });
    assert!(owner.is_surely_ours(), "nobody takes it for dead, however old its last look is");
    owner.close().expect("it is closed");
    assert_eq!(standby.look(), Ok(Found::Closed));
}

#[test]
fn a_claimant_that_died_before_it_wrote_a_root_is_silent() {
    let world = World::new();
    let mut standby = world.standby();
    assert_eq!(standby.look(), Ok(Found::Closed));
    let owner = world.open(None, true).expect("it is free");
    owner.close().expect("it is closed");
    drop(owner);
    let store = world.objects.store();
    let all = || ["c/", "w/"].map(|of| store.list(of).expect("it can be listed")).concat();
    let before = all();
    drop(world.open(None, true).expect("it is free"));
    // It has claimed the volume, and that is all.
    for name in all().iter().filter(|name| !before.contains(name)) {
        store.delete(name).expect("it can be removed");
    }
    assert_eq!(world.look(&mut standby), LIVES, "somebody has claimed it");
    let (after, found) = world.silent_after(&mut standby);
    let Found::Silent { epoch } = found else { panic!("{found:?}") };
    assert!(is_some_heartbeats(after), "{after:?}");
    let next = world.open(Some(epoch), true).expect("it is taken over");
    next.close().expect("it is closed");
}

#[test]
fn who_stood_by_takes_the_volume_over_without_the_log_being_read_again() {
    const FLUSHES: u64 = 250;
    let world = World::new();
    let owner = world.open(None, true).expect("it is free");
    let mut standby = world.standby();
    for number in 0..FLUSHES {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        block.fill(number as u8 + 1);
        owner.write(number * BLOCK_SIZE as u64, &block).expect("it is written");
        owner.flush().expect("it is durable");
        if number % 7 == 0 {
            world.look(&mut standby);
        }
    }
    assert!(owner.stats().root > 2, "roots were written: the map has most of the log");
    let (_, found) = world.silent_after(&mut standby);
    let Found::Silent { epoch } = found else { panic!("{found:?}") };
    let asked = |followed: Followed, from: u64| {
        let next = world.open_behind(followed, Some(from), true).expect("it is taken over");
        for number in 0..FLUSHES {
            let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
            next.read(number * BLOCK_SIZE as u64, &mut block).expect("it is there");
            assert!(block.iter().all(|byte| *byte == number as u8 + 1), "block {number}");
        }
        next.stats().gets
    };
    let behind = asked(standby.followed(), epoch);
    let alone = asked(Followed::default(), epoch + 1);
    assert!(behind < 60, "{behind} requests");
    assert!(alone > FLUSHES, "{alone} requests");
}

#[test]
fn who_serves_later_reads_at_once_and_makes_nothing_durable_within_the_term_of_another_owner() {
    const TERM: Duration = Duration::from_millis(400);
    let world = World::new();
    let owner = world.open(None, true).expect("it is free");
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    block.fill(7);
    owner.write(0, &block).and_then(|()| owner.flush()).expect("it is durable");
    let log = || world.objects.store().list("w/").expect("it can be listed");
    let claimant = Claimant { take_over: true, serves_later: true, ..Claimant::default() };
    let next = world.open_as(&claimant, TERM).expect("it is taken over");
    let (wall, before) = (Env::real().clock, log());
    let begun = wall.monotonic();
    next.read(0, &mut block).expect("it is read before it may serve");
    assert!(block.iter().all(|byte| *byte == 7));
    assert!(next.alone_for().is_zero());
    next.write(0, &block).and_then(|()| next.flush()).expect("it is durable in the end");
    assert!(wall.monotonic() - begun >= TERM + TERM / 2, "the clock of the owner stands still");
    assert!(log().len() > before.len());
    world.clock.0.fetch_add(2 * TERM.as_millis() as u64, Ordering::SeqCst);
    next.await_alone().expect("nobody else has claimed it");
    assert!(next.alone_for() > TERM / 2);
    drop(world.open(Some(2), true).expect("it is taken over"));
    let another = world.open_as(&Claimant { only_from: Some(3), ..claimant.clone() }, TERM);
    let another = another.expect("it is taken over");
    let lost = world.open_as(&Claimant { only_from: Some(4), ..claimant }, TERM);
    assert!(another.await_alone().is_err(), "{:?} has it", lost.map(|next| next.stats().epoch));
}
