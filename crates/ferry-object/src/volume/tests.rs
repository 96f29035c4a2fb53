//! The requests with which a volume is opened, on a store whose answers come in rounds.

use super::*;
use crate::access::Patience;
use crate::dir::DirStore;
use crate::executor::{Executor, Job};
use crate::format::{BLOCK, encode_shard};
use crate::locks::DirLocks;
use crate::store::Store;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs all jobs that wait, the newest first, whenever somebody waits for one: that is a round.
#[derive(Default)]
struct Rounds {
    jobs: Mutex<Vec<Job>>,
    rounds: AtomicU64,
}

impl Executor for Rounds {
    fn start(&self, job: Job) {
        self.jobs.lock().push(job);
    }
    fn step(&self) -> bool {
        let jobs = std::mem::take(&mut *self.jobs.lock());
        if jobs.is_empty() {
            return false;
        }
        self.rounds.fetch_add(1, Ordering::Relaxed);
        jobs.into_iter().rev().for_each(|job| (job.run)()());
        true
    }
    fn pause(&self, _time: Duration) {}
}

/// A directory in which one object appears after the first request for it.
struct Late {
    inner: DirStore,
    late: Mutex<Option<String>>,
    gets: AtomicU64,
}

impl Store for Late {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        match self.late.lock().take_if(|late| late == name) {
            Some(late) => Err(ObjectError::NotFound(late)),
            None => self.inner.get(name, range),
        }
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.inner.create(name, bytes)
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.inner.put(name, bytes)
    }
    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.inner.delete(name)
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        self.inner.list(prefix)
    }
}

/// A new volume.
struct World {
    _directory: tempfile::TempDir,
    store: Arc<Late>,
    executor: Arc<Rounds>,
    access: Access,
    volume: Volume,
    env: Env,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let env = Env::real();
        let inner = DirStore::open(directory.path(), env.clone()).expect("it is there");
        let store = Arc::new(Late { inner, late: Mutex::default(), gets: AtomicU64::new(0) });
        let executor = Arc::<Rounds>::default();
        let patience = Patience::Opening(Duration::ZERO);
        let access = Access::new(store.clone(), executor.clone(), patience, &env);
        make(access.clone(), &VolumeOptions::new(1 << 30, (0, 1 << 24)), &env)
            .expect("it is empty");
        let volume = read_super(&access).expect("it was made");
        Self { _directory: directory, store, executor, access, volume, env }
    }

    fn create(&self, name: &str, header: &Header, table: &[u8]) {
        let bytes = encode(&self.access.codec, header, table, &[]);
        self.store.create(name, &bytes).expect("the name is free");
    }

    /// Writes so many log objects. The one `astray` does not continue the one before it.
    fn log(&self, objects: u64, astray: u64) {
        let mut previous = [0; 16];
        for seq in 1..=objects {
            let new = new_header(Kind::Log, self.volume.id, 1, seq, &self.env);
            let before = if seq == astray { [9; 16] } else { previous };
            let header = Header { previous: before, next: seq + 1, ..new };
            self.create(&log_name(seq), &header, &[]);
            previous = header.id;
        }
    }

    /// Follows the log. Returns how many objects it has.
    fn follow(&self) -> Result<u64, ObjectError> {
        let mut chain = Chain::new(newest_root(&self.access, &self.volume)?);
        self.store.gets.store(0, Ordering::Relaxed);
        chain.follow(&self.access, &self.volume, None)?;
        let followed: Vec<u64> = chain.links.iter().map(|link| link.seq).collect();
        assert_eq!(followed, (1..chain.next).collect::<Vec<_>>());
        Ok(chain.next - 1)
    }

    /// A process of one machine claims the volume, which has its lock until that is dropped.
    /// Returns whether it has to wait.
    fn claim(&self, take_over: bool) -> (Arc<dyn Locks>, bool) {
        let locks = DirLocks::new(self._directory.path().join("lock"));
        let locks: Arc<dyn Locks> = Arc::new(locks);
        let owner = Owner { machine: "here".into(), ..Owner::default() };
        let locked = Some(Arc::clone(&locks));
        let claimant = Claimant { owner, take_over, locks: locked, ..Claimant::default() };
        let term = Duration::from_secs(3);
        let claimed = claim(&self.access, self.volume.clone(), &claimant, term, &self.env);
        let (_, owns) = claimed.expect("it is claimed");
        (locks, owns.serves_from > self.env.clock.monotonic_with_sleep())
    }

    fn rounds(&self) -> u64 {
        self.executor.rounds.load(Ordering::Relaxed)
    }
}

#[test]
fn a_new_owner_waits_only_if_an_older_one_may_still_answer_reads() {
    let world = World::new();
    for _ in 0..5 {
        let (killed, waited) = world.claim(false);
        assert!(!waited, "all before it are dead, and none has served");
        drop(killed);
    }
    let (hung, _) = world.claim(false);
    let (killed, waited) = world.claim(true);
    assert!(waited, "the volume is taken from an owner that is alive");
    drop(killed);
    for _ in 0..4 {
        let (killed, waited) = world.claim(false);
        assert!(waited, "those that were killed since may not have waited");
        drop(killed);
    }
    drop(hung);
    let (_, waited) = world.claim(false);
    assert!(!waited, "now that one is dead, too");
}

#[test]
fn a_long_log_is_read_in_few_rounds() {
    let world = World::new();
    world.log(100, 0);
    assert_eq!(world.follow(), Ok(100));
    assert!(world.rounds() <= 9, "{} rounds", world.rounds());
    assert!(world.store.gets.load(Ordering::Relaxed) < 100 + AT_ONCE as u64);
}

#[test]
fn an_empty_log_is_read_with_one_request() {
    let world = World::new();
    assert_eq!(world.follow(), Ok(0));
    assert_eq!((world.rounds(), world.store.gets.load(Ordering::Relaxed)), (0, 1));
}

#[test]
fn a_log_object_that_appears_before_its_turn_is_followed() {
    for late in 1..=40 {
        let world = World::new();
        world.log(40, 0);
        *world.store.late.lock() = Some(log_name(late));
        let turns = [1, 2, 4, 8, 16, 32];
        // What is asked for in its turn, and is not there, is the end.
        let expected = if turns.contains(&late) { late - 1 } else { 40 };
        assert_eq!(world.follow(), Ok(expected), "{late}");
    }
}

#[test]
fn the_log_ends_at_the_first_gap_whatever_is_behind_it() {
    for behind in 7..20 {
        let world = World::new();
        world.log(5, 0);
        world.store.create(&log_name(behind), b"damaged").expect("the name is free");
        assert_eq!(world.follow(), Ok(5), "{behind}");
    }
}

#[test]
fn a_log_object_that_does_not_continue_the_log_is_refused() {
    for astray in 1..=20 {
        let world = World::new();
        world.log(20, astray);
        let Err(ObjectError::Damaged { name, .. }) = world.follow() else { panic!("{astray}") };
        assert_eq!(name, log_name(astray));
    }
}

#[test]
fn a_fence_goes_past_names_that_were_read_ahead() {
    let world = World::new();
    world.log(9, 0);
    let mut chain = Chain::new(newest_root(&world.access, &world.volume).expect("the first"));
    chain.follow(&world.access, &world.volume, None).expect("it can be read");
    let new = |kind, seq| new_header(kind, world.volume.id, 1, seq, &world.env);
    // Log objects of an owner that did not see the fence are behind it.
    for seq in 11..20 {
        world.create(&log_name(seq), &Header { next: seq + 1, ..new(Kind::Log, seq) }, &[]);
    }
    let fence = Header { next: 30, previous: chain.last_id, ..new(Kind::Fence, 10) };
    world.create(&log_name(10), &fence, &[]);
    let behind = Header { next: 31, previous: fence.id, ..new(Kind::Log, 30) };
    world.create(&log_name(30), &behind, &[]);
    let mut chain = Chain::new(newest_root(&world.access, &world.volume).expect("the first"));
    chain.follow(&world.access, &world.volume, None).expect("it can be read");
    let followed: Vec<u64> = chain.links.iter().map(|link| link.seq).collect();
    assert_eq!(followed, (1..=10).chain([30]).collect::<Vec<_>>());
    assert_eq!(chain.next, 31);
}

#[test]
fn a_log_object_of_a_later_owner_is_told_in_its_turn() {
    for later in 1..=20 {
        let world = World::new();
        world.log(later - 1, 0);
        let new = new_header(Kind::Log, world.volume.id, 9, later, &world.env);
        world.create(&log_name(later), &Header { next: later + 1, ..new }, &[]);
        let mut chain = Chain::new(newest_root(&world.access, &world.volume).expect("the first"));
        let followed = chain.follow(&world.access, &world.volume, Some(8));
        assert_eq!(followed, Err(ObjectError::ClaimLost { epoch: 9 }));
        assert_eq!(chain.next, later);
    }
}

#[test]
fn shards_are_read_together_and_one_that_is_missing_is_an_error() {
    let world = World::new();
    let mut expected = Vec::new();
    let shards: Vec<(u64, ObjectRef)> =
        (0..40).map(|shard| (shard, ObjectRef { epoch: 1, number: 100 - shard })).collect();
    for (shard, at) in &shards {
        let blocks = (1 << 30) / BLOCK as u64;
        let value = Location { object: *at, block: 0 };
        let runs = vec![Run { start: shard * blocks, len: 1, value }];
        let header = new_header(Kind::Shard, world.volume.id, 1, at.number, &world.env);
        world.create(&shard_name(*shard, *at), &header, &encode_shard(&runs));
        expected.push(runs);
    }
    assert_eq!(load_shards(&world.access, &world.volume, &shards), Ok(expected));
    assert_eq!(world.rounds(), 3, "16 at a time");
    let (shard, at) = shards[0];
    world.store.delete(&shard_name(shard, at)).expect("it is there");
    let loaded = load_shards(&world.access, &world.volume, &shards);
    assert_eq!(loaded, Err(ObjectError::NotFound(shard_name(shard, at))));
    assert!(world.executor.jobs.lock().is_empty(), "all that was asked for was waited for");
    assert_eq!(world.rounds(), 3 + 2, "nothing is asked for after the error");
}
