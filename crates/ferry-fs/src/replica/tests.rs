//! Tests of a replica without a store: its versions are copies of a device in memory.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::{CarriedReplica, Replica, ReplicaOptions, Version, Versions};
use crate::InProcess;
use crate::api::*;
use crate::known::{Known, LeftWords};
use crate::local::local_fs::{CacheMode, FsOptions, LocalFs};
use crate::volume::{MkfsOptions, VolumeError, mkfs, write_timeline};
use ferry_device::{AlignedBuf, BlockDevice, MemDevice};
use ferry_env::{Clock, Env};
use parking_lot::Mutex;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

const BYTES: u64 = 64 << 20;

/// The owner's volume.
struct Owner {
    dev: Arc<dyn BlockDevice>,
    fs: Arc<LocalFs>,
}

impl Owner {
    fn new() -> Self {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(BYTES));
        mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        let options = FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() };
        let fs = LocalFs::open(dev.clone(), options, Env::real()).unwrap();
        Self { dev, fs }
    }

    /// Makes or replaces the file `name`; its inode.
    fn write(&self, name: &str, text: &str) -> Ino {
        let (ino, fh) = self.write_and_hold(name, text);
        let release = |cx: &Cx| {
            self.fs.release(cx, ino, fh);
            Ok(())
        };
        InProcess::default().call(release).unwrap();
        ino
    }

    /// The same of a file that stays open: its inode and its handle.
    fn write_and_hold(&self, name: &str, text: &str) -> (Ino, u64) {
        let (me, name) = (InProcess::default(), name.as_bytes());
        let (entry, opened) =
            me.call(|cx| self.fs.create(cx, ROOT, name, 0o644, libc::O_RDWR)).unwrap();
        let ino = entry.attr.unwrap().ino;
        let bytes = text.as_bytes();
        me.call(|cx| self.fs.write(cx, ino, opened.fh, 0, bytes, false, false)).unwrap();
        me.call(|cx| self.fs.fsync(cx, ino, opened.fh, false)).unwrap();
        (ino, opened.fh)
    }

    fn sync(&self) {
        InProcess::default().call(|cx| self.fs.fsyncdir(cx, ROOT, 0, false)).unwrap();
    }

    /// What a crash would leave now.
    fn version(&self, new_timeline: bool) -> Version {
        let copy = MemDevice::new(BYTES);
        let mut buf = AlignedBuf::zeroed(1 << 16);
        let mut at = self.dev.next_data(0);
        while at < BYTES {
            self.dev.read(at, &mut buf).unwrap();
            copy.write(at, &buf).unwrap();
            at = self.dev.next_data(at + (1 << 16));
        }
        let is_readable = Box::new(|| true);
        Version { dev: Arc::new(copy), new_timeline, epoch: 1, root: 1, log: 1, is_readable }
    }
}

/// Versions that a test hands over.
#[derive(Clone, Default)]
struct Given(Arc<Mutex<Vec<Version>>>);

impl Versions for Given {
    fn look(&mut self, _anew: bool) -> Result<Option<Version>, Box<dyn Error>> {
        Ok(self.0.lock().pop())
    }
}

type Done = Box<dyn FnOnce() + Send>;
/// The files whose pages the kernel is to drop, and what is called then.
type Asked = (Vec<Ino>, Done);

/// A kernel that has pages of files until a test says that it has dropped them.
struct Kernel(Mutex<Sender<Asked>>);

impl Host for Kernel {
    fn invalidate_attributes(&self, _ino: Ino) {}
    fn forget(&self, _what: ToForget, done: Done) {
        done();
    }
    fn forget_contents(&self, files: Vec<Ino>, done: Done) {
        self.0.lock().send((files, done)).unwrap();
    }
    fn forget_all(&self, _known: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forgets_names(&self) -> bool {
        false
    }
    fn stats(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

fn follow(owner: &Owner) -> (Arc<Replica>, Given, Receiver<Asked>) {
    follow_each(Duration::from_millis(1), owner, Env::real())
}

fn follow_each(
    interval: Duration,
    owner: &Owner,
    env: Env,
) -> (Arc<Replica>, Given, Receiver<Asked>) {
    let (replica, given) = begin(&owner.version(false), None, None, interval, env).unwrap();
    let asks = attach(&replica);
    (replica, given, asks)
}

/// Shows this version, perhaps after another process. It has no kernel yet.
fn begin(
    first: &Version,
    before: Option<&CarriedReplica>,
    known: Option<Arc<Known>>,
    interval: Duration,
    env: Env,
) -> Result<(Arc<Replica>, Given), VolumeError> {
    let options = ReplicaOptions {
        interval,
        cache: CacheMode::Kernel,
        cache_bytes: 8 << 20,
        owner: 0,
        known,
    };
    let given = Given::default();
    let first = (first, env.clock.monotonic_with_sleep());
    let replica = Replica::open(first, before, Box::new(given.clone()), options, env)?;
    Ok((replica, given))
}

fn attach(replica: &Replica) -> Receiver<Asked> {
    let (asked, asks) = channel();
    replica.attach(Arc::new(Kernel(Mutex::new(asked))));
    asks
}

fn open(replica: &Replica, ino: Ino) -> Result<Opened, Errno> {
    InProcess::default().call(|cx| replica.open(cx, ino, libc::O_RDONLY, false))
}

fn read(replica: &Replica, ino: Ino) -> Result<Vec<u8>, Errno> {
    InProcess::default().call(|cx| match replica.read(cx, ino, 0, 0, &mut [0; 100]) {
        Err(stop) => Err::<Vec<u8>, _>(stop),
        Ok(_) => panic!("another thread reads"),
    })
}

fn size(replica: &Replica, ino: Ino) -> Result<u64, Errno> {
    InProcess::default().call(|cx| replica.getattr(cx, ino, None)).map(|(attr, _)| attr.size)
}

fn hole_from(replica: &Replica, ino: Ino) -> Result<u64, Errno> {
    InProcess::default().call(|cx| replica.lseek(cx, ino, 0, 0, libc::SEEK_HOLE))
}

#[test]
fn attributes_of_a_new_version_wait_until_the_kernel_has_no_older_page_and_reads_do_not() {
    let owner = Owner::new();
    let ino = owner.write("f", "old");
    let (replica, given, asks) = follow(&owner);
    open(&replica, ino).unwrap();
    assert_eq!(read(&replica, ino).unwrap(), b"old");
    assert_eq!(owner.write("f", "newer"), ino);
    given.0.lock().push(owner.version(false));
    let (files, dropped) = asks.recv().unwrap();
    assert_eq!(files, [ino]);
    // More than there are threads for them.
    let (told, answers) = channel();
    let asking: Vec<_> = (0..20)
        .map(|n| {
            let (replica, told) = (replica.clone(), told.clone());
            // Where a hole begins tells the size, too.
            let ask = if n == 0 { hole_from } else { size };
            thread::spawn(move || told.send(ask(&replica, ino)).unwrap())
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(read(&replica, ino).unwrap(), b"newer", "the kernel waits for reads");
    }
    let waits = Duration::from_millis(100);
    assert_eq!(answers.recv_timeout(waits), Err(RecvTimeoutError::Timeout));
    dropped();
    (0..20).for_each(|_| assert_eq!(answers.recv().unwrap(), Ok(5)));
    asking.into_iter().for_each(|asks| asks.join().unwrap());
    replica.close();
    assert_eq!(size(&replica, ino), Err(Errno(libc::EIO)), "it has ended");
}

#[test]
fn a_kernel_that_ends_holds_up_no_end_of_a_replica() {
    let owner = Owner::new();
    let ino = owner.write("f", "old");
    let (replica, given, asks) = follow(&owner);
    open(&replica, ino).unwrap();
    given.0.lock().push(owner.version(false));
    let never = asks.recv().unwrap();
    replica.close();
    drop(never);
}

#[test]
fn a_file_of_an_older_timeline_is_read_while_it_is_open_and_then_stale() {
    let owner = Owner::new();
    let ino = owner.write("f", "old");
    let (replica, given, asks) = follow(&owner);
    let fh = open(&replica, ino).unwrap().fh;
    given.0.lock().push(owner.version(true));
    let rolled_back = |times| {
        while replica.lag().rollbacks < times {
            thread::yield_now();
        }
    };
    rolled_back(1);
    assert_eq!(owner.write("f", "new"), ino);
    given.0.lock().push(owner.version(true));
    rolled_back(2);
    assert_eq!(read(&replica, ino).unwrap(), b"old", "it is open");
    assert_eq!(size(&replica, ino), Ok(3));
    assert_eq!(replica.stats()["replica"]["files_held"], 1);
    release(&replica, ino, fh);
    assert!(asks.try_recv().is_err(), "the kernel has no page of another version");
    assert_eq!(size(&replica, ino), Err(Errno(libc::ESTALE)));
    assert_eq!(open(&replica, ino).map(|opened| opened.fh), Err(Errno(libc::ESTALE)));
    let found = InProcess::default().call(|cx| replica.lookup(cx, ROOT, b"f")).unwrap();
    let new = found.attr.unwrap().ino;
    assert_ne!(new, ino);
    assert_eq!(read(&replica, new).unwrap(), b"new");
}

fn release(replica: &Replica, ino: Ino, fh: u64) {
    let release = |cx: &Cx| {
        replica.release(cx, ino, fh);
        Ok(())
    };
    InProcess::default().call(release).unwrap();
}

#[test]
fn a_volume_that_says_that_it_was_rolled_back_is_in_another_timeline() {
    let owner = Owner::new();
    owner.write("f", "text");
    let (replica, given, _asks) = follow(&owner);
    let mut versions = 1;
    let mut rollbacks_after = |new_timeline| {
        given.0.lock().push(owner.version(new_timeline));
        versions += 1;
        await_versions(&replica, versions);
        replica.lag().rollbacks
    };
    let says_so = || write_timeline(&owner.dev, &Env::real()).unwrap();
    assert_eq!(rollbacks_after(false), 0);
    says_so();
    assert_eq!(rollbacks_after(false), 1, "a backup has brought it");
    assert_eq!(rollbacks_after(false), 1);
    assert_eq!(rollbacks_after(true), 2, "a root tells of it");
    says_so();
    assert_eq!(rollbacks_after(true), 3, "both tell of one");
    assert_eq!(rollbacks_after(false), 3);
    replica.close();
}

#[test]
fn a_file_that_its_owner_has_open_without_a_name_is_read_as_it_was() {
    let owner = Owner::new();
    let (ino, _) = owner.write_and_hold("f", "old");
    let (replica, given, asks) = follow(&owner);
    let fh = open(&replica, ino).unwrap().fh;
    InProcess::default().call(|cx| owner.fs.unlink(cx, ROOT, b"f")).unwrap();
    owner.sync();
    given.0.lock().push(owner.version(false));
    await_versions(&replica, 2);
    assert!(asks.try_recv().is_err(), "the kernel has no page of another version");
    assert_eq!(read(&replica, ino).unwrap(), b"old");
    assert_eq!((size(&replica, ino), replica.following.showing.held()), (Ok(3), 1));
    let later = replica.following.env.clock.monotonic_with_sleep() + Duration::from_secs(121);
    replica.following.showing.leave_held(later);
    assert_eq!(read(&replica, ino), Err(Errno(libc::ESTALE)), "it was held for two minutes");
    assert_eq!(hole_from(&replica, ino), Err(Errno(libc::ESTALE)));
    release(&replica, ino, fh);
    assert_eq!(open(&replica, ino).map(|opened| opened.fh), Err(Errno(libc::ESTALE)));
    assert_eq!(size(&replica, ino), Err(Errno(libc::ESTALE)));
    replica.close();
}

/// What a directory that is open lists behind `cookie`.
fn listing(replica: &Replica, fh: u64, cookie: u64) -> Vec<DirEntry> {
    let list = |cx: &Cx| match replica.readdir(cx, ROOT, fh, cookie, true, &mut |_| true) {
        Err(stop) => Err::<Vec<DirEntry>, _>(stop),
        Ok(()) => panic!("another thread lists"),
    };
    InProcess::default().call(list).unwrap()
}

#[test]
fn a_listing_is_of_the_version_in_which_it_began() {
    let owner = Owner::new();
    // More than one answer has room for.
    for n in 0..200 {
        owner.write(&n.to_string(), "text");
    }
    let (replica, given, _asks) = follow(&owner);
    let [fh, other] =
        [(); 2].map(|()| InProcess::default().call(|cx| replica.opendir(cx, ROOT)).unwrap().fh);
    let mut listed = listing(&replica, fh, 0);
    assert!(listed.iter().any(|entry| entry.entry.is_some()));
    for n in 0..200 {
        let (from, to) = (n.to_string(), format!("new-{n}"));
        let rename = |cx: &Cx| {
            let flags = RenameFlags::default();
            owner.fs.rename(cx, ROOT, from.as_bytes(), ROOT, to.as_bytes(), flags)
        };
        InProcess::default().call(rename).unwrap();
    }
    owner.sync();
    given.0.lock().push(owner.version(false));
    await_versions(&replica, 2);
    loop {
        let more = listing(&replica, fh, listed.last().unwrap().cookie);
        if more.is_empty() {
            break;
        }
        assert!(more.iter().all(|entry| entry.entry.is_none()), "the kernel may know newer ones");
        listed.extend(more);
    }
    let mut names: Vec<String> =
        listed.iter().map(|entry| String::from_utf8(entry.name.to_vec()).unwrap()).collect();
    names.sort();
    let mut before: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    before.extend([".".into(), "..".into()]);
    before.sort();
    assert_eq!(names, before);
    for fh in [fh, other] {
        assert!(listing(&replica, fh, 0).iter().skip(2).all(|it| it.name.starts_with(b"new-")));
    }
    // What is shown is not held.
    assert_eq!(replica.following.showing.held(), 0);
    given.0.lock().push(owner.version(false));
    await_versions(&replica, 3);
    assert_eq!(replica.following.showing.held(), 2);
    let release = |cx: &Cx| {
        replica.releasedir(cx, ROOT, fh);
        Ok(())
    };
    InProcess::default().call(release).unwrap();
    assert_eq!(replica.following.showing.held(), 1);
    let later = replica.following.env.clock.monotonic_with_sleep() + Duration::from_secs(121);
    replica.following.showing.leave_held(later);
    assert_eq!(replica.following.showing.held(), 0);
    replica.close();
}

#[test]
fn versions_are_held_for_open_files_for_a_time_and_only_a_few() {
    let owner = Owner::new();
    let (replica, given, _asks) = follow(&owner);
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut numbers = Vec::new();
    for (n, name) in names.into_iter().enumerate() {
        owner.write(name, name);
        given.0.lock().push(owner.version(false));
        let found = || {
            let look_up = InProcess::default().call(|cx| replica.lookup(cx, ROOT, name.as_bytes()));
            look_up.unwrap().attr
        };
        let number = loop {
            if let Some(attr) = found() {
                break attr.ino;
            }
        };
        open(&replica, number).unwrap();
        numbers.push(number);
        given.0.lock().push(owner.version(true));
        while replica.lag().rollbacks <= n as u64 {
            thread::yield_now();
        }
    }
    let now = replica.following.env.clock.monotonic_with_sleep();
    replica.following.showing.leave_held(now);
    let read: Vec<_> = numbers.iter().map(|number| read(&replica, *number).is_ok()).collect();
    assert_eq!(read, [false, false, true, true, true, true]);
    replica.following.showing.leave_held(now + Duration::from_secs(119));
    assert_eq!(replica.following.showing.held(), 4);
    replica.following.showing.leave_held(now + Duration::from_secs(121));
    assert_eq!(replica.following.showing.held(), 0);
    assert_eq!(size(&replica, numbers[5]), Err(Errno(libc::ESTALE)));
}

/// A machine that has slept for so many seconds.
#[derive(Default)]
struct Slept(AtomicU64);

impl Clock for Slept {
    fn monotonic(&self) -> Duration {
        Duration::ZERO
    }
    fn monotonic_with_sleep(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
    fn wall(&self) -> Duration {
        self.monotonic_with_sleep()
    }
}

#[test]
fn a_replica_whose_machine_slept_says_how_far_behind_it_is() {
    let (owner, clock) = (Owner::new(), Arc::new(Slept::default()));
    let env = Env { clock: clock.clone(), ..Env::real() };
    let (replica, _given, _asks) = follow_each(Duration::from_secs(3600), &owner, env);
    assert_eq!(replica.lag().behind_ns, 0);
    clock.0.store(600, Ordering::Relaxed);
    assert_eq!(replica.lag().behind_ns, 600_000_000_000);
    replica.close();
}

/// Waits until the replica has shown so many versions.
fn await_versions(replica: &Replica, versions: u64) {
    let clock = Env::real().clock;
    while replica.lag().versions < versions {
        assert!(clock.monotonic() < Duration::from_secs(60), "it does not turn");
        thread::yield_now();
    }
}

#[test]
fn a_version_that_cannot_be_read_whole_now_is_not_shown() {
    let owner = Owner::new();
    let ino = owner.write("a", "one");
    let (replica, given, _asks) = follow(&owner);
    owner.write("a", "longer");
    given.0.lock().push(Version { is_readable: Box::new(|| false), ..owner.version(false) });
    while replica.lag().looks_failed == 0 {
        thread::yield_now();
    }
    assert_eq!((replica.lag().versions, size(&replica, ino)), (1, Ok(3)));
    given.0.lock().push(owner.version(false));
    await_versions(&replica, 2);
    assert_eq!(size(&replica, ino), Ok(6));
    replica.close();
}

#[test]
fn a_replica_turns_while_programs_go_on_opening_files() {
    let owner = Owner::new();
    let files: Vec<Ino> = (0..400).map(|n| owner.write(&n.to_string(), "text")).collect();
    let (replica, given, asks) = follow(&owner);
    let turned = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for part in files.chunks(100) {
            let (replica, turned) = (&replica, &turned);
            scope.spawn(move || {
                for ino in part.iter().cycle() {
                    if turned.load(Ordering::Relaxed) {
                        return;
                    }
                    let fh = open(replica, *ino).unwrap().fh;
                    let release = |cx: &Cx| {
                        replica.release(cx, *ino, fh);
                        Ok(())
                    };
                    InProcess::default().call(release).unwrap();
                }
            });
        }
        given.0.lock().push(owner.version(false));
        let replica = &replica;
        let turning = scope.spawn(move || await_versions(replica, 2));
        while !turning.is_finished() {
            if let Ok((_, done)) = asks.try_recv() {
                done();
            }
            thread::yield_now();
        }
        turned.store(true, Ordering::Relaxed);
        turning.join().unwrap();
    });
    replica.close();
}

/// What the process with this memory leaves if it is killed.
fn left_by(known: &Known) -> CarriedReplica {
    let words = LeftWords::of(known.file().unwrap()).unwrap();
    CarriedReplica::left(&words).unwrap()
}

/// The next process of the mount goes on with `version`. What the one before has left, in order and
/// as if it was killed, is the same.
fn goes_on(
    before: &Replica,
    known: &Known,
    version: &Version,
) -> Result<(Arc<Replica>, Given), VolumeError> {
    let left = left_by(known);
    assert_eq!(CarriedReplica::decode(&before.carry().encode()).as_ref(), Some(&left));
    before.close();
    begin(version, Some(&left), None, Duration::from_millis(1), Env::real())
}

/// A replica that notes what another process needs.
fn noting(owner: &Owner) -> (Arc<Replica>, Given, Receiver<Asked>, Arc<Known>) {
    let known = Arc::new(Known::new().unwrap());
    let version = owner.version(false);
    let interval = Duration::from_millis(1);
    let begun = begin(&version, None, Some(Arc::clone(&known)), interval, Env::real());
    let (replica, given) = begun.unwrap();
    let asks = attach(&replica);
    (replica, given, asks, known)
}

#[test]
fn another_process_has_the_kernel_drop_pages_before_it_tells_attributes() {
    let owner = Owner::new();
    let (ino, removed) = (owner.write("f", "old"), owner.write("g", "removed"));
    let (before, _given, _asks, known) = noting(&owner);
    let fhs = [(); 2].map(|()| open(&before, ino).unwrap().fh);
    let fh = open(&before, removed).unwrap().fh;
    let closed = open(&before, removed).unwrap().fh;
    release(&before, removed, closed);
    assert_eq!(owner.write("f", "newer"), ino);
    InProcess::default().call(|cx| owner.fs.unlink(cx, ROOT, b"g")).unwrap();
    owner.sync();
    let (replica, given) = goes_on(&before, &known, &owner.version(false)).unwrap();
    // What the kernel has of a file that is not there any more is of no other version.
    let asks = attach(&replica);
    let (files, dropped) = asks.recv().unwrap();
    assert_eq!(files, [ino]);
    let asking = replica.clone();
    let (told, answer) = channel();
    let asking = thread::spawn(move || told.send(size(&asking, ino)).unwrap());
    assert_eq!(read(&replica, ino).unwrap(), b"newer", "the kernel waits for reads");
    // No newer version is turned to meanwhile.
    owner.write("f", "newest");
    given.0.lock().push(owner.version(false));
    let waits = Duration::from_millis(100);
    assert_eq!(answer.recv_timeout(waits), Err(RecvTimeoutError::Timeout));
    assert_eq!(replica.lag().versions, 1);
    dropped();
    assert!(answer.recv().unwrap().is_ok());
    asking.join().unwrap();
    let (files, dropped) = asks.recv().unwrap();
    assert_eq!(files, [ino], "it is open");
    dropped();
    await_versions(&replica, 2);
    assert_eq!((read(&replica, removed), size(&replica, ino)), (Err(Errno(libc::ESTALE)), Ok(6)));
    // Closes, one of which the process before had served.
    release(&replica, removed, closed);
    release(&replica, removed, fh);
    fhs.iter().for_each(|fh| release(&replica, ino, *fh));
    release(&replica, ino, fhs[0]);
    assert_eq!(replica.carry().open(), 0);
    let new = open(&replica, ino).unwrap().fh;
    assert!(![fhs[0], fhs[1], fh, closed].contains(&new), "no handle comes again");
    replica.close();
}

#[test]
fn numbers_mean_the_same_in_the_next_process_until_the_volume_is_rolled_back() {
    let owner = Owner::new();
    owner.write("f", "text");
    let (mut before, given, _asks, mut known) = noting(&owner);
    given.0.lock().push(owner.version(true));
    await_versions(&before, 2);
    let number_in = |replica: &Replica| {
        let found = InProcess::default().call(|cx| replica.lookup(cx, ROOT, b"f")).unwrap();
        found.attr.unwrap().ino
    };
    let mut numbers = vec![number_in(&before)];
    // A root tells of a rollback, then nothing does, then the volume itself does.
    for (new_timeline, says_so) in [(true, false), (false, false), (false, true)] {
        if says_so {
            write_timeline(&owner.dev, &Env::real()).unwrap();
        }
        let version = owner.version(new_timeline);
        let (replica, _given) = goes_on(&before, &known, &version).unwrap();
        let asks = attach(&replica);
        asks.recv().unwrap().1();
        let (number, was) = (number_in(&replica), *numbers.last().unwrap());
        let is_new = new_timeline || says_so;
        assert_eq!(number != was, is_new);
        assert_eq!(replica.lag().rollbacks, u64::from(is_new));
        for older in numbers.iter().filter(|older| **older != number) {
            assert_eq!(size(&replica, *older), Err(Errno(libc::ESTALE)));
        }
        assert_eq!(size(&replica, number), Ok(4));
        numbers.push(number);
        replica.close();
        // One that is killed leaves what this one would.
        let next = Arc::new(Known::new().unwrap());
        let left = left_by(&known);
        let interval = Duration::from_millis(1);
        let again = begin(&version, Some(&left), Some(next.clone()), interval, Env::real());
        before = again.unwrap().0;
        known = next;
    }
    before.close();
}

#[test]
fn no_process_goes_on_with_an_older_version_or_with_another_volume() {
    let owner = Owner::new();
    let (before, given, _asks, known) = noting(&owner);
    given.0.lock().push(Version { root: 5, log: 7, ..owner.version(false) });
    await_versions(&before, 2);
    let other = Owner::new().version(false);
    for (version, is_right) in [
        (Version { root: 4, log: 9, ..owner.version(false) }, false),
        (Version { root: 5, log: 6, ..owner.version(false) }, false),
        (Version { root: 5, log: 7, ..other }, false),
        (Version { root: 5, log: 7, ..owner.version(false) }, true),
        (Version { root: 6, log: 6, ..owner.version(false) }, true),
    ] {
        let opened = goes_on(&before, &known, &version);
        assert_eq!(opened.is_ok(), is_right, "{:?}", opened.err());
    }
}

#[test]
fn nothing_is_turned_to_while_another_process_takes_over() {
    let owner = Owner::new();
    let (replica, given, _asks, _known) = noting(&owner);
    replica.without_turns(|| {
        given.0.lock().push(owner.version(false));
        while !given.0.lock().is_empty() {
            thread::yield_now();
        }
        thread::park_timeout(Duration::from_millis(100));
        assert_eq!(replica.lag().versions, 1);
    });
    await_versions(&replica, 2);
    replica.close();
}
