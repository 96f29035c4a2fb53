//! Backups of a volume, cut off at every request to the store that gets them.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_object::{
    BackedUp, BackupError, BackupSource, Claimant, Copying, Encryption, Kdf, Limits, ObjectDevice,
    ObjectError, Passphrase, SnapshotSizes, Store, ThreadExecutor, VolumeOptions,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const SUPER: &str = "super";
const BLOCK: u64 = BLOCK_SIZE as u64;
/// The device has several shards of 1 GiB, and blocks of two of them are used.
const CAPACITY: u64 = 4 << 30;
const AREAS: [u64; 2] = [0, (2 << 30) + BLOCK];
/// Blocks of each area.
const AREA: u64 = 400;

/// When requests begin to fail.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// The request of this number is not carried out.
    Before(usize),
    /// It is, and nobody hears of it.
    Behind(usize),
}

#[derive(Clone, Default)]
struct Objects {
    objects: BTreeMap<String, Arc<Vec<u8>>>,
    requests: usize,
    cut: Option<Cut>,
    got_bytes: usize,
    put_bytes: usize,
    /// Names that were deleted.
    deleted: BTreeSet<String>,
    /// Names that were made durable.
    durable: BTreeSet<String>,
    /// A name that is deleted when the next root is made.
    lost: Option<String>,
}

/// What is done before a request.
type Hook = Box<dyn FnOnce() + Send>;

/// A store in memory.
#[derive(Default)]
struct Memory(Mutex<Objects>, Mutex<Option<Hook>>);

impl Memory {
    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.0.lock().expect("nobody panics")
    }

    fn copy(&self) -> Arc<Self> {
        let objects = self.objects().objects.clone();
        Arc::new(Self(Mutex::new(Objects { objects, ..Objects::default() }), Mutex::default()))
    }

    /// Carries out a request, unless the store is cut off.
    fn request<T>(
        &self,
        run: impl FnOnce(&mut Objects) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let mut objects = self.objects();
        let number = objects.requests;
        objects.requests += 1;
        let cut = || Err(ObjectError::Refused("it is cut off".into()));
        match objects.cut {
            Some(Cut::Before(at)) if number >= at => cut(),
            Some(Cut::Behind(at)) if number > at => cut(),
            Some(Cut::Behind(at)) if number == at => run(&mut objects).and_then(|_| cut()),
            _ => run(&mut objects),
        }
    }

    /// Whether it was cut off; it is not any more.
    fn mend(&self) -> bool {
        let mut objects = self.objects();
        let requests = objects.requests;
        match objects.cut.take() {
            Some(Cut::Before(at) | Cut::Behind(at)) => requests > at,
            None => false,
        }
    }

    fn names(&self) -> BTreeSet<String> {
        self.objects().objects.keys().cloned().collect()
    }
}

impl Store for Memory {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Vec<u8>, ObjectError> {
        self.request(|store| {
            let found = store.objects.get(name);
            let found = found.ok_or_else(|| ObjectError::NotFound(name.into()))?;
            let len = found.len();
            let range = range.map_or(0..len, |range| {
                (range.start as usize).min(len)..(range.end as usize).min(len)
            });
            let found = found[range].to_vec();
            store.got_bytes += found.len();
            Ok(found)
        })
    }
    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.request(|store| {
            if store.objects.contains_key(name) {
                return Err(ObjectError::Exists(name.into()));
            }
            store.put_bytes += bytes.len();
            store.objects.insert(name.into(), Arc::new(bytes.to_vec()));
            if let Some(lost) = store.lost.take_if(|_| name.starts_with("c/")) {
                store.objects.remove(&lost);
            }
            Ok(())
        })
    }
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.request(|store| {
            store.put_bytes += bytes.len();
            let old = store.objects.insert(name.into(), Arc::new(bytes.to_vec()));
            assert!(old.is_none_or(|old| *old == bytes), "{name} is changed");
            Ok(())
        })
    }
    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let before = self.1.lock().expect("nobody panics").take_if(|_| name.starts_with("s/"));
        if let Some(before) = before {
            before();
        }
        self.request(|store| {
            store.objects.remove(name);
            store.deleted.insert(name.into());
            Ok(())
        })
    }
    fn make_durable(&self, names: &mut dyn Iterator<Item = String>) -> Result<(), ObjectError> {
        self.request(|store| {
            store.durable.extend(names);
            Ok(())
        })
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, ObjectError> {
        Ok(self.list_sizes(prefix)?.into_iter().map(|(name, _)| name).collect())
    }
    fn list_sizes(&self, prefix: &str) -> Result<Vec<(String, u64)>, ObjectError> {
        self.request(|store| {
            let found = store.objects.iter().filter(|(name, _)| name.starts_with(prefix));
            Ok(found.map(|(name, bytes)| (name.clone(), bytes.len() as u64)).collect())
        })
    }
}

fn limits() -> Limits {
    Limits {
        seal_bytes: 64 << 10,
        data_run_bytes_min: 16 << 10,
        data_bytes_max: 64 << 10,
        term: Duration::from_millis(1),
        patience: Duration::ZERO,
        ..Limits::default()
    }
}

fn threads() -> Arc<ThreadExecutor> {
    Arc::new(ThreadExecutor::new(&Env::real()).expect("threads can be started"))
}

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec().into()).expect("it is not empty")
}

/// A store with a new volume.
fn new_volume(encryption: Option<Encryption>) -> Arc<Memory> {
    let store = Arc::new(Memory::default());
    let options = VolumeOptions { encryption, ..VolumeOptions::new(CAPACITY, (0, 1 << 20)) };
    ObjectDevice::make(store.clone(), threads(), &options, &Env::real()).expect("a new volume");
    store
}

fn claimant() -> Claimant {
    Claimant { take_over: true, passphrase: Some(passphrase("one")), ..Claimant::default() }
}

fn open(store: &Arc<Memory>) -> Result<Arc<ObjectDevice>, ObjectError> {
    ObjectDevice::open(store.clone(), threads(), &claimant(), limits(), &Env::real())
}

/// Blocks that cannot be compressed.
fn noise(area: u64, byte: u8, blocks: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed((blocks * BLOCK) as usize);
    for (n, block) in buf.chunks_exact_mut(BLOCK_SIZE).enumerate() {
        let mut state = (area << 20) + (n as u64) * 256 + u64::from(byte);
        for word in block.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x5851_f42d);
            word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
        }
    }
    buf
}

/// Changes a volume, one area more than the other, and makes a snapshot.
fn change(store: &Arc<Memory>, byte: u8, blocks: Range<u64>, name: &str) {
    let device = open(store).expect("it can be opened");
    for (area, part) in AREAS.into_iter().zip([1, 4]) {
        let mut buf = noise(area, byte, (blocks.end - blocks.start) / part);
        device.write(area + blocks.start * BLOCK, &buf).expect("write");
        device.flush().expect("flush");
        // Small writes, which stay in the log objects.
        buf[..BLOCK_SIZE].fill(byte);
        let mut one = AlignedBuf::zeroed(BLOCK_SIZE);
        one.fill(byte);
        device.write(area + (AREA - 1) * BLOCK, &one).expect("write");
        device.flush().expect("flush");
    }
    device.create_snapshot(name).expect("a snapshot");
    device.close().expect("close");
}

/// What the areas hold.
fn image(device: &ObjectDevice) -> Vec<u8> {
    let mut all = Vec::new();
    for area in AREAS {
        let mut buf = AlignedBuf::zeroed((AREA * BLOCK) as usize);
        device.read(area, &mut buf).expect("it can be read");
        all.extend_from_slice(&buf);
    }
    all
}

/// What a volume has, and each of its snapshots.
type Contents = (Vec<u8>, BTreeMap<String, Vec<u8>>);

/// What the volume in a store has; `None`: there is none.
fn contents(store: &Arc<Memory>) -> Option<Contents> {
    let (env, claimant) = (Env::real(), claimant());
    let now = ObjectDevice::open_read_only(store.clone(), threads(), &claimant, limits(), &env);
    let now = match now {
        Err(ObjectError::NoVolume) => return None,
        Err(ObjectError::UnfinishedBackup) => {
            let pass = claimant.passphrase.as_ref();
            let sizes = SnapshotSizes::measure(store.clone(), threads(), pass, &env);
            assert_eq!(sizes.map(drop), Err(ObjectError::UnfinishedBackup), "no snapshot counts");
            return None;
        }
        now => now.expect("it can be opened"),
    };
    let mut snapshots = BTreeMap::new();
    for snapshot in now.snapshots() {
        let (name, pass) = (snapshot.name, claimant.passphrase.as_ref());
        let limits = limits();
        let device =
            ObjectDevice::open_snapshot(store.clone(), threads(), &name, pass, limits, &env);
        let image = image(&device.expect("it can be opened"));
        snapshots.insert(name, image);
    }
    Some((image(&now), snapshots))
}

fn source(store: &Arc<Memory>) -> Arc<BackupSource> {
    let pass = passphrase("one");
    let env = Env::real();
    let source = BackupSource::open(store.clone(), threads(), Some(&pass), limits(), &env);
    Arc::new(source.expect("it is a volume"))
}

fn open_target(from: &Arc<Memory>, to: &Arc<Memory>) -> Result<Arc<ObjectDevice>, BackupError> {
    let limits = Limits { holds: false, ..limits() };
    source(from).open_target(to.clone(), threads(), &claimant(), limits, &Env::real())
}

/// Backs a snapshot up, as the command does.
fn back_up(from: &Arc<Memory>, to: &Arc<Memory>, name: &str) -> Result<BackedUp, BackupError> {
    let device = open_target(from, to)?;
    device.back_up(&source(from), name, &mut |_| ControlFlow::Continue(()))
}

/// A volume with two snapshots, and what they have.
fn with_two() -> (Arc<Memory>, [Vec<u8>; 2]) {
    let from = new_volume(None);
    change(&from, 1, 0..AREA, "one");
    let one = contents(&from).expect("it is there").0;
    change(&from, 2, 10..50, "two");
    let two = contents(&from).expect("it is there").0;
    assert_ne!(one, two);
    (from, [one, two])
}

#[test]
fn a_backup_that_is_cut_off_at_any_request_is_there_as_a_whole_or_not_at_all() {
    let (from, [one, two]) = with_two();
    let before = from.names();
    let begun = Arc::new(Memory::default());
    back_up(&from, &begun, "one").expect("a backup");
    let empty = Arc::new(Memory::default());
    let mut cuts = 0;
    for (base, name) in [(&empty, "one"), (&begun, "two")] {
        let whole = |found: &Option<Contents>| match (found, name) {
            (Some((now, snapshots)), "one") => *now == one && snapshots["one"] == one,
            (Some((now, snapshots)), _) => {
                *now == two && snapshots["one"] == one && snapshots["two"] == two
            }
            (None, _) => false,
        };
        let old = |found: &Option<Contents>| match (found, name) {
            (None, _) => name == "one",
            // It is no volume yet, which `ferry mkfs` could take for its own.
            (Some(_), "one") => false,
            (Some((now, snapshots)), _) => {
                *now == one && snapshots["one"] == one && snapshots.len() == 1
            }
        };
        for cut in [Cut::Before as fn(usize) -> Cut, Cut::Behind] {
            for at in 0.. {
                let to = base.copy();
                to.objects().cut = Some(cut(at));
                let done = back_up(&from, &to, name);
                if !to.mend() {
                    done.expect("nothing was in its way");
                    break;
                }
                cuts += 1;
                let found = contents(&to);
                assert!(whole(&found) || (done.is_err() && old(&found)), "{name} {:?}", cut(at));
                let there = to.names();
                let done = back_up(&from, &to, name);
                let done = done.unwrap_or_else(|error| panic!("{name} {:?}: {error}", cut(at)));
                assert!(whole(&contents(&to)), "{name} {:?}, run again", cut(at));
                // What was copied is not copied again.
                if let BackedUp::Copied { objects, objects_total, .. } = done {
                    let is_copy = |name: &&String| {
                        before.contains(*name) && ["s/", "w/", "m/"].contains(&&name[..2])
                    };
                    let there = there.iter().filter(is_copy).count() as u64;
                    // Requests that were under way may have brought more since.
                    let is_new = objects + there <= objects_total;
                    assert!(name == "two" || is_new, "{:?}: {done:?}", cut(at));
                }
            }
        }
    }
    assert!(cuts > 200, "only {cuts} cuts");
    assert_eq!(from.names(), before, "the volume is as it was");
}

#[test]
fn after_a_tenth_has_changed_a_backup_moves_a_tenth() {
    let (from, _) = with_two();
    let to = Arc::new(Memory::default());
    let reset = |store: &Arc<Memory>| {
        let mut objects = store.objects();
        (objects.got_bytes, objects.put_bytes) = (0, 0);
    };
    let moved = |name: &str| {
        [&from, &to].into_iter().for_each(reset);
        let done = back_up(&from, &to, name).expect("a backup");
        let BackedUp::Copied { objects, bytes, .. } = done else { panic!("{done:?}") };
        let (read, written) = (from.objects().got_bytes, to.objects().put_bytes);
        assert!(bytes as usize <= written && objects > 0);
        (read, written)
    };
    let (first_read, first_written) = moved("one");
    let (read, written) = moved("two");
    assert!(first_written > 1_900_000, "{first_written} bytes");
    let most = |first: usize| first * 15 / 100;
    assert!(read <= most(first_read), "{read} bytes read, {first_read} the first time");
    assert!(written <= most(first_written), "{written} bytes written, {first_written} before");
    assert_eq!(back_up(&from, &to, "two"), Ok(BackedUp::WasThere));
}

/// A backup of the first of the snapshots of [`with_two`].
fn with_backup() -> (Arc<Memory>, Arc<Memory>, [Vec<u8>; 2]) {
    let (from, images) = with_two();
    let to = Arc::new(Memory::default());
    back_up(&from, &to, "one").expect("a backup");
    (from, to, images)
}

#[test]
fn what_only_a_deleted_backup_needed_leaves_the_target_with_the_next_one() {
    let (from, to, [_, two]) = with_backup();
    change(&from, 3, 0..AREA, "three");
    back_up(&from, &to, "two").expect("a backup");
    back_up(&from, &to, "three").expect("a backup");
    let data = |store: &Arc<Memory>| {
        let names = store.names().into_iter();
        names.filter(|name| name.starts_with("s/") || name.starts_with("m/")).count()
    };
    let before = data(&to);
    let device = open(&to).expect("it can be opened");
    device.delete_snapshot("one").expect("it is deleted");
    device.close().expect("close");
    change(&from, 4, 0..10, "four");
    back_up(&from, &to, "four").expect("a backup");
    let (now, snapshots) = contents(&to).expect("it is there");
    assert_eq!(snapshots.keys().collect::<Vec<_>>(), ["four", "three", "two"]);
    assert!(snapshots["two"] == two && snapshots["four"] == now);
    let of = contents(&from).expect("it is there");
    assert!(now == of.0 && snapshots["three"] == of.1["three"]);
    assert!(to.objects().deleted.iter().any(|name| name.starts_with("s/")));
    // Four's objects came, and those that only one needed left: it shares most with two.
    assert!(data(&to) < before + 4, "{before} objects, then {}", data(&to));
    // What nobody needs is deleted, too: a cut off backup of two snapshots that are deleted.
    let device = open(&to).expect("it can be opened");
    for name in ["two", "three"] {
        device.delete_snapshot(name).expect("it is deleted");
    }
    device.close().expect("close");
    change(&from, 5, 0..10, "five");
    back_up(&from, &to, "five").expect("a backup");
    assert!(data(&to) < before, "{before} objects, then {}", data(&to));
    assert!(contents(&to).expect("it is there").1["five"] == contents(&from).expect("it").0);
}

#[test]
fn a_restored_backup_and_its_volume_never_write_objects_of_one_name() {
    let (from, to, [one, _]) = with_backup();
    let restored = Arc::new(Memory::default());
    back_up(&to, &restored, "one").expect("a backup is a volume, which can be backed up");
    assert!(contents(&restored).expect("it is there").0 == one);
    let before = [&from, &to, &restored].map(|store| store.names());
    for round in 0..3 {
        for store in [&from, &to, &restored] {
            change(store, 50 + round, 0..30, &format!("later-{round}"));
        }
    }
    let written = |store: &Arc<Memory>, before: &BTreeSet<String>| -> BTreeSet<String> {
        let names = store.names();
        let data = names.difference(before).filter(|name| !name.starts_with("c/"));
        data.cloned().collect()
    };
    let all =
        [written(&from, &before[0]), written(&to, &before[1]), written(&restored, &before[2])];
    assert!(all.iter().all(|names| names.len() > 10));
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        assert_eq!(all[a].intersection(&all[b]).count(), 0, "{a} {b}");
    }
    // Both are volumes of their own now.
    let refused = back_up(&from, &to, "two");
    assert!(matches!(refused, Err(BackupError::OwnVolume { .. })), "{refused:?}");
    let refused = back_up(&to, &from, "one");
    assert!(matches!(refused, Err(BackupError::OwnVolume { .. })), "{refused:?}");
}

#[test]
fn a_volume_that_was_restored_from_a_backup_is_backed_up_to_another_store() {
    let (_, to, [one, _]) = with_backup();
    let restored = Arc::new(Memory::default());
    back_up(&to, &restored, "one").expect("it is restored");
    // Before it was used, and then.
    for round in 0..2 {
        let (name, before) = (format!("of-round-{round}"), to.objects().objects.clone());
        change(&restored, 70 + round, 0..AREA, &name);
        assert_eq!(back_up(&restored, &to, &name), Err(BackupError::Ahead));
        assert!(to.objects().objects == before, "the target is as it was");
    }
    let (now, snapshots) = contents(&to).expect("it is there");
    assert!(now == one && snapshots.len() == 1 && snapshots["one"] == one);
    let other = Arc::new(Memory::default());
    for name in ["one", "of-round-0", "of-round-1"] {
        back_up(&restored, &other, name).expect("a backup");
    }
    assert!(contents(&other).expect("it is there") == contents(&restored).expect("it is there"));
}

#[test]
fn a_backup_that_cannot_be_is_refused_before_anything_is_copied() {
    let (from, to, _) = with_backup();
    let device = open(&from).expect("it can be opened");
    let clone = format!("two@{}@clone", "0f".repeat(16));
    device.create_snapshot(&clone).expect("a clone's pin");
    device.close().expect("close");
    let refused = back_up(&from, &to, &clone).expect_err("it is no snapshot");
    let BackupError::Source(ObjectError::NoSnapshot { names, .. }) = &refused else {
        panic!("{refused:?}")
    };
    assert_eq!(names, &["one", "two"]);
    // The target has as many as there may be.
    let device = open(&to).expect("it can be opened");
    for n in 1..1000 {
        device.create_snapshot(&format!("{n}")).expect("a snapshot");
    }
    device.close().expect("close");
    let data = |store: &Arc<Memory>| -> BTreeSet<String> {
        let names = store.names().into_iter();
        names.filter(|name| name.starts_with("s/") || name.starts_with("m/")).collect()
    };
    let before = data(&to);
    let refused = back_up(&from, &to, "two");
    assert_eq!(refused, Err(BackupError::Target(ObjectError::TooManySnapshots(1000))));
    assert_eq!(data(&to), before, "objects were copied");
}

#[test]
fn a_target_that_was_changed_or_is_another_volume_is_refused_and_left() {
    let (from, to, [one, _]) = with_backup();
    // Another volume, and one that nobody made.
    let other = new_volume(None);
    let before = other.names();
    assert_eq!(back_up(&from, &other, "one"), Err(BackupError::OtherVolume));
    assert_eq!(other.names(), before);
    // Changes that are in the log only: the owner is dead.
    let device = open(&to).expect("it can be opened");
    device.write(0, &AlignedBuf::zeroed(BLOCK_SIZE)).expect("write");
    device.flush().expect("flush");
    drop(device);
    let refused = back_up(&from, &to, "two");
    assert!(matches!(refused, Err(BackupError::OwnVolume { .. })), "{refused:?}");
    let (now, snapshots) = contents(&to).expect("it is there");
    assert!(now[..BLOCK_SIZE].iter().all(|byte| *byte == 0), "the change is there");
    assert!(snapshots["one"] == one);
    // An owner that is alive.
    let to = Arc::new(Memory::default());
    let owner = open_target(&from, &to).expect("it is made");
    let second = source(&from).open_target(
        to.clone(),
        threads(),
        &Claimant::default(),
        limits(),
        &Env::real(),
    );
    let second = second.err();
    assert!(matches!(second, Some(BackupError::Target(ObjectError::InUse { .. }))), "{second:?}");
    // One that was taken over cannot end its backup.
    let done = back_up(&from, &to, "one").expect("a backup");
    assert!(matches!(done, BackedUp::Copied { .. }));
    let late = owner.back_up(&source(&from), "two", &mut |_| ControlFlow::Continue(()));
    assert!(matches!(late, Err(BackupError::Target(ObjectError::Fenced { .. }))), "{late:?}");
    let (now, snapshots) = contents(&to).expect("it is there");
    assert!(now == one && snapshots.len() == 1);
}

#[test]
fn damaged_objects_and_deleted_snapshots_end_a_backup_and_the_target_stays() {
    let (from, to, [one, _]) = with_backup();
    let there = |to: &Arc<Memory>| {
        let (now, snapshots) = contents(to).expect("it is there");
        assert!(now == one && snapshots.len() == 1 && snapshots["one"] == one);
    };
    // Each byte of what would be copied counts.
    let lacking: Vec<String> = {
        let whole = to.copy();
        back_up(&from, &whole, "two").expect("a backup");
        let (names, whole) = (to.names(), whole.names());
        let new = whole.difference(&names);
        new.filter(|name| from.names().contains(*name) && !name.starts_with("c/"))
            .cloned()
            .collect()
    };
    assert!(lacking.len() > 3, "{lacking:?}");
    for name in &lacking {
        let len = from.objects().objects[name].len();
        for at in [0, 20, 90, 127, len / 2, len - 1] {
            let damaged = from.copy();
            let mut bytes = damaged.objects().objects[name].to_vec();
            bytes[at] ^= 1;
            damaged.objects().objects.insert(name.clone(), Arc::new(bytes));
            let done = back_up(&damaged, &to.copy(), "two");
            let is_found = matches!(
                done,
                Err(BackupError::Source(ObjectError::Damaged { .. } | ObjectError::Version { .. }))
            );
            assert!(is_found, "{name} byte {at}: {done:?}");
        }
        let shorter = from.copy();
        let bytes = shorter.objects().objects[name][..len - 1].to_vec();
        shorter.objects().objects.insert(name.clone(), Arc::new(bytes));
        let copy = to.copy();
        let done = back_up(&shorter, &copy, "two");
        assert!(matches!(done, Err(BackupError::Source(_))), "{name}: {done:?}");
        there(&copy);
    }
    // An object of the target that is too short is not taken for whole.
    let (copy, name) = (to.copy(), &lacking[0]);
    copy.objects().objects.insert(name.clone(), Arc::new(vec![1, 2, 3]));
    assert_eq!(back_up(&from, &copy, "two"), Err(BackupError::Differs(name.clone())));
    there(&copy);

    // Of two objects of one name and different lengths the one of the volume is looked at first.
    let name = to.names().into_iter().find(|name| name.starts_with("s/")).expect("it has data");
    let shorter = from.copy();
    let mut bytes = shorter.objects().objects[&name].to_vec();
    bytes.truncate(bytes.len() - 1);
    shorter.objects().objects.insert(name, Arc::new(bytes));
    for snapshot in ["one", "two"] {
        let done = back_up(&shorter, &to.copy(), snapshot);
        assert!(matches!(done, Err(BackupError::Source(_))), "{done:?}");
    }
    // One that is another one, or becomes that while the backup is made, is left.
    let (name, other) = (&lacking[0], from.objects().objects[SUPER].clone());
    for meanwhile in [false, true] {
        let copy = to.copy();
        let device = open_target(&from, &copy).expect("it is free");
        let set = || copy.objects().objects.insert(name.clone(), Arc::clone(&other));
        if !meanwhile {
            set();
        }
        let done = device.back_up(&source(&from), "two", &mut |_: Copying| {
            set();
            ControlFlow::Continue(())
        });
        assert_eq!(done, Err(BackupError::Forked(name.clone())));
        device.close().expect("close");
        there(&copy);
        assert!(copy.objects().objects[name] == other);
    }

    // The snapshot is deleted while it is copied, and its objects, too; or only at the end.
    for loses in [true, false] {
        let (from, copy) = (from.copy(), to.copy());
        let device = open_target(&from, &copy).expect("it is free");
        let mut asked = 0;
        let done = device.back_up(&source(&from), "two", &mut |_: Copying| {
            asked += 1;
            if asked == 1 {
                let owner = open(&from).expect("it can be opened");
                owner.delete_snapshot("two").expect("it is there");
                owner.close().expect("close");
                if loses {
                    lacking.iter().for_each(|name| from.delete(name).expect("it is there"));
                }
            }
            ControlFlow::Continue(())
        });
        assert_eq!(done, Err(BackupError::Deleted("two".into())));
        device.close().expect("close");
        there(&copy);
    }
    // The user stops it.
    let device = open_target(&from, &to).expect("it is free");
    let done = device.back_up(&source(&from), "two", &mut |copying| match copying.objects {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    });
    assert_eq!(done, Err(BackupError::Stopped));
    device.close().expect("close");
    there(&to);
    assert_eq!(
        back_up(&from, &to, "none").err().map(|e| e.to_string().contains("none")),
        Some(true)
    );
    back_up(&from, &to, "two").expect("a backup");
}

#[test]
fn what_a_target_had_before_is_made_durable_and_its_map_is_read() {
    let (from, to, [one, _]) = with_backup();
    let whole = to.copy();
    back_up(&from, &whole, "two").expect("a backup");
    // A backup that was killed has sent all of it.
    let of_both = |name: &&String| from.names().contains(*name) && whole.names().contains(*name);
    let is_copy = |name: &&String| name.starts_with("s/") || name.starts_with("m/");
    let names: Vec<String> = from.names().iter().filter(is_copy).filter(of_both).cloned().collect();
    let new: Vec<&String> = names.iter().filter(|name| !to.names().contains(*name)).collect();
    for name in &new {
        let bytes = from.objects().objects[*name].clone();
        to.objects().objects.insert((*name).clone(), bytes);
    }
    let shard = new.iter().find(|name| name.starts_with("m/")).expect("a shard is new");
    let damaged = to.copy();
    let mut bytes = damaged.objects().objects[*shard].to_vec();
    *bytes.last_mut().expect("it has bytes") ^= 1;
    damaged.objects().objects.insert((*shard).clone(), Arc::new(bytes));
    assert_eq!(back_up(&from, &damaged, "two"), Err(BackupError::Differs((*shard).clone())));
    let (now, snapshots) = contents(&damaged).expect("it is there");
    assert!(now == one && snapshots.len() == 1);
    // Only log objects were lacking.
    let done = back_up(&from, &to, "two");
    assert!(matches!(done, Ok(BackedUp::Copied { objects: 0..3, .. })), "{done:?}");
    let durable = to.objects().durable.clone();
    assert!(new.iter().all(|name| durable.contains(*name)), "{new:?}");
}

#[test]
fn an_owner_that_slept_in_its_sweep_takes_nothing_from_a_later_backup() {
    let from = new_volume(None);
    change(&from, 1, 0..AREA, "one");
    let to = Arc::new(Memory::default());
    back_up(&from, &to, "one").expect("a backup");
    let before = from.names();
    change(&from, 2, 10..50, "two");
    let two = contents(&from).expect("it is there").0;
    // A backup of these was cut off, and the next one does not need them.
    let is_new = |name: &&String| name.starts_with("s/") && !before.contains(*name);
    let all = from.objects().objects.clone();
    let orphans: Vec<String> = all.keys().filter(is_new).cloned().collect();
    assert!(orphans.len() > 2, "{orphans:?}");
    for name in &orphans {
        to.objects().objects.insert(name.clone(), Arc::clone(&all[name]));
    }
    change(&from, 3, 10..50, "three");
    let slow = open_target(&from, &to).expect("it is free");
    let (of, other) = (Arc::clone(&from), Arc::clone(&to));
    let hook = move || drop(open_target(&of, &other).expect("it is taken over"));
    *to.1.lock().expect("nobody panics") = Some(Box::new(hook));
    let late = slow.back_up(&source(&from), "three", &mut |_| ControlFlow::Continue(()));
    assert!(matches!(late, Err(BackupError::Target(ObjectError::Fenced { .. }))), "{late:?}");
    let deleted = to.objects().deleted.clone();
    let deleted = orphans.iter().filter(|name| deleted.contains(*name)).count();
    assert_eq!(deleted, 1, "the request that was under way");
    // Such a request is carried out behind the root of the next backup.
    let device = open_target(&from, &to).expect("it is free");
    let done = device.back_up(&source(&from), "two", &mut |_| {
        to.objects().lost = Some(orphans[1].clone());
        ControlFlow::Continue(())
    });
    assert!(matches!(done, Ok(BackedUp::Copied { .. })), "{done:?}");
    assert!(contents(&to).expect("it is there").0 == two);
}

#[test]
fn a_volume_that_was_set_back_does_not_mix_with_its_older_backups() {
    let (from, to, [one, two]) = with_backup();
    // A copy of the whole store comes back, and the volume goes on with names that it had used.
    let back = from.copy();
    change(&from, 3, 20..30, "three");
    change(&back, 4, 20..30, "three");
    back_up(&from, &to, "two").expect("a backup");
    back_up(&from, &to, "three").expect("a backup");
    change(&back, 5, 0..10, "four");
    // Objects of one name and one length differ; none of them is trusted.
    let both = |name: &&String| from.names().contains(*name) && to.names().contains(*name);
    let names = back.names();
    let forked = names.iter().filter(both).filter(|name| {
        let of = |store: &Arc<Memory>| store.objects().objects[*name].clone();
        !name.starts_with(['c', 'e']) && of(&back) != of(&to) && of(&back).len() == of(&to).len()
    });
    assert!(forked.count() > 0);
    for name in ["three", "four"] {
        let done = back_up(&back, &to, name);
        let is_refused = match &done {
            Err(BackupError::Target(error)) => {
                name == "three" && *error == ObjectError::SnapshotExists(name.into())
            }
            done => matches!(done, Err(BackupError::Forked(_) | BackupError::Differs(_))),
        };
        assert!(is_refused, "{name}: {done:?}");
    }
    let (now, snapshots) = contents(&to).expect("it is there");
    assert!(snapshots["one"] == one && snapshots["two"] == two && snapshots["three"] == now);
    assert!(now == contents(&from).expect("it is there").0);
    // However both go on, what the target takes is what the volume has.
    for round in 0..8_u8 {
        let (name, blocks) = (format!("round-{round}"), u64::from(round) * 10);
        for (volume, byte) in [(&from, 100 + round), (&back, 200 + round)] {
            change(volume, byte, blocks..if round == 4 { AREA } else { blocks + 20 }, &name);
            let target = to.copy();
            match back_up(volume, &target, &name) {
                Ok(_) => {
                    let (now, of) = (contents(&target), contents(volume));
                    assert!(now.expect("it is there").0 == of.expect("it is there").0, "{name}");
                    to.objects().objects = target.objects().objects.clone();
                }
                Err(BackupError::Forked(_) | BackupError::Differs(_)) => {}
                Err(BackupError::Target(ObjectError::SnapshotExists(_))) => {}
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
    for (name, image) in contents(&to).expect("it is there").1 {
        let of = [&from, &back].map(|volume| contents(volume).expect("it is there").1);
        assert!(of.iter().any(|snapshots| snapshots.get(&name) == Some(&image)), "{name}");
    }
}

#[test]
fn a_target_with_backups_of_two_histories_compares_with_each_of_them() {
    let (from, to, _) = with_backup();
    let back = from.copy();
    let write = |device: &ObjectDevice, area: usize, byte| {
        let start = AREAS[area];
        device.write(start, &noise(start, byte, AREA - 1)).expect("write");
        device.flush().expect("flush");
    };
    let device = open(&from).expect("it can be opened");
    write(&device, 0, 3);
    device.create_snapshot("a").expect("a snapshot");
    device.close().expect("close");
    // The same names, more of them, and then no need of the first ones.
    let device = open(&back).expect("it can be opened");
    write(&device, 0, 4);
    write(&device, 1, 5);
    device.create_snapshot("d").expect("a snapshot");
    write(&device, 0, 6);
    device.create_snapshot("b").expect("a snapshot");
    device.close().expect("close");
    back_up(&from, &to, "a").expect("a backup");
    back_up(&back, &to, "b").expect("no name of it is taken");
    let before = contents(&to).expect("it is there");
    assert!(before.1["b"] == contents(&back).expect("it is there").1["b"]);
    let done = back_up(&back, &to, "d");
    assert!(matches!(done, Err(BackupError::Forked(_))), "{done:?}");
    assert!(contents(&to).expect("it is there") == before);
}

#[test]
fn an_encrypted_backup_opens_with_the_passphrase_of_its_volume() {
    let kdf = Kdf { memory_kib: 8, passes: 1 };
    let encryption = |text: &str| Encryption { passphrase: passphrase(text), kdf };
    let from = new_volume(Some(encryption("one")));
    change(&from, 7, 0..AREA, "one");
    let mut to = Arc::new(Memory::default());
    // Cut off where the key, and then `super`, are made.
    for at in 0..8 {
        to = Arc::new(Memory::default());
        to.objects().cut = Some(Cut::Before(at));
        assert!(back_up(&from, &to, "one").is_err());
        to.mend();
        back_up(&from, &to, "one").expect("a backup");
        assert!(contents(&to).expect("it is there") == contents(&from).expect("it is there"));
    }
    let wrong = Claimant { passphrase: Some(passphrase("two")), ..claimant() };
    let wrong = ObjectDevice::open(to.clone(), threads(), &wrong, limits(), &Env::real()).err();
    assert_eq!(wrong, Some(ObjectError::WrongPassphrase));
    // Blocks of one byte are stored, and are not to be seen.
    let shows = |objects: &Objects| {
        objects.objects.values().any(|bytes| bytes.windows(64).any(|part| part == [7; 64]))
    };
    assert!(!shows(&to.objects()));
}
