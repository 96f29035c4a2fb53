//! Mounts that follow a volume while its owner changes it.

use super::snapdir::{errno, names, same, tree};
use super::*;
use std::fs::File;
use std::os::unix::fs::{MetadataExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

/// So long a replica may take to show what is durable.
const BOUND: Duration = Duration::from_secs(40);

pub(super) fn follow(store: &Store) {
    ok(&store.try_mount("second", &["-o", "replica=100ms"]));
}

pub(super) fn sync(store: &Store) {
    ok(&store.ferry(&["sync", "first"]));
}

/// Its own statistics.
fn lag(store: &Store) -> serde_json::Value {
    store.stats("second")["replica"].clone()
}

/// Returns when the replica says that it shows all that is durable now.
pub(super) fn caught_up(store: &Store) -> serde_json::Value {
    let clock = Env::real().clock;
    let durable = clock.monotonic();
    loop {
        let asked = clock.monotonic();
        let lag = lag(store);
        let behind = Duration::from_nanos(lag["behind_ns"].as_u64().expect("a time"));
        if behind <= asked - durable {
            return lag;
        }
        assert!(asked - durable < BOUND, "{lag}");
    }
}

fn read_at(file: &File, len: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let read = file.read_at(&mut bytes, 0)?;
    bytes.truncate(read);
    Ok(bytes)
}

#[test]
fn a_replica_shows_what_is_durable_and_files_that_are_open_follow() {
    let store = Store::made();
    store.mount("first");
    let (first, second) = (store.at("first"), store.at("second"));
    write_files(&first, 0..300);
    sync(&store);
    let epoch = store.stats("first")["store"]["epoch"].clone();
    follow(&store);
    same(&tree(&second), &tree(&first));
    let changed = File::open(second.join("000/77")).expect("it is there");
    let removed = File::open(second.join("000/78")).expect("it is there");
    assert_eq!(read_at(&changed, 1 << 20).expect("a read"), contents(77));

    // Other bytes of the same length, while the kernel has pages of the file.
    let other: Vec<u8> = contents(77).iter().map(|byte| byte ^ 1).collect();
    let file = File::options().write(true).open(first.join("000/77")).expect("it is there");
    file.write_all_at(&other, 0).expect("a write");
    file.sync_all().expect("it is durable");
    fs::remove_file(first.join("000/78")).expect("it is there");
    fs::rename(first.join("001"), first.join("000/inner")).expect("a rename");
    fs::hard_link(first.join("000/7"), first.join("seven")).expect("a link");
    symlink("000/7", first.join("to")).expect("a link");
    write_files(&first, 300..400);
    sync(&store);
    let lag = caught_up(&store);
    assert_eq!(read_at(&changed, 1 << 20).expect("a read"), other);
    same(&tree(&second), &tree(&first));
    assert!(lag["versions"].as_u64() >= Some(2) && lag["error"].is_null(), "{lag}");
    assert_eq!(lag["rollbacks"], 0);
    // It is open.
    assert_eq!(read_at(&removed, 1 << 20).expect("a read"), contents(78));
    assert_eq!(removed.metadata().expect("it is open").len(), contents(78).len() as u64);
    assert_eq!(errno(File::open(second.join("000/78"))), Some(libc::ENOENT));

    assert_eq!(errno(fs::write(second.join("x"), "x")), Some(libc::EROFS));
    assert_eq!(errno(fs::remove_file(second.join("seven"))), Some(libc::EROFS));
    assert_eq!(store.stats("first")["store"]["epoch"], epoch, "nothing was claimed");
    drop((changed, removed, file));
    ok(&store.ferry(&["umount", "first"]));
    caught_up(&store);
    check_files(&second, 300..400);
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["fsck", &store.url()]));
}

/// Changes two files in turn, and the only name in a directory, each durable before the next.
fn change_in_turn(at: &Path, ended: &AtomicBool) {
    let directory = File::open(at).expect("it is there");
    let mut n = 1_u64;
    while !ended.load(Ordering::Relaxed) {
        for name in ["a", "b"] {
            let new = at.join("new");
            let mut file = File::create(&new).expect("a file");
            file.write_all(n.to_string().as_bytes()).expect("a write");
            file.sync_all().expect("it is durable");
            fs::rename(&new, at.join(name)).expect("a rename");
            directory.sync_all().expect("it is durable");
        }
        let name = |n: u64| at.join(format!("names/{n}"));
        fs::rename(name(n - 1), name(n)).expect("a rename");
        n += 1;
    }
}

#[test]
fn each_version_that_a_replica_shows_is_one_that_a_crash_would_leave() {
    let store = Store::made();
    store.mount("first");
    let (first, second) = (store.at("first"), store.at("second"));
    fs::create_dir(first.join("names")).expect("a directory");
    for (name, text) in [("names/0", ""), ("a", "0"), ("b", "0")] {
        fs::write(first.join(name), text).expect("a file");
    }
    sync(&store);
    follow(&store);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| change_in_turn(&first, &ended));
        let number = |name: &str| -> u64 {
            let text = fs::read_to_string(second.join(name)).expect("it can be read");
            text.parse().unwrap_or_else(|_| panic!("{name} has {text:?}"))
        };
        let check = || {
            let (mut last, mut listed) = (0, 0);
            while lag(&store)["versions"].as_u64() < Some(20) {
                for _ in 0..20 {
                    // What is read later is not older.
                    let (b, a) = (number("b"), number("a"));
                    assert!(last <= b && b <= a, "{last}, then b has {b} and a has {a}");
                    let b = number("b");
                    assert!(a <= b + 1, "a had {a}, then b has {b}");
                    last = b;
                    let found: Vec<_> = names(&second.join("names")).into_iter().collect();
                    let [name] = &found[..] else { panic!("one name, not {found:?}") };
                    let name: u64 = name.parse().expect("digits");
                    assert!(listed <= name, "{listed}, then {name}");
                    listed = name;
                }
            }
        };
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
        ended.store(true, Ordering::Relaxed);
        checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    sync(&store);
    caught_up(&store);
    same(&tree(&second), &tree(&first));
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_replica_follows_the_next_owner_of_a_killed_one() {
    let store = Store::made();
    store.mount("first");
    let (first, second) = (store.at("first"), store.at("second"));
    write_files(&first, 0..100);
    sync(&store);
    follow(&store);
    let open = File::open(second.join("000/7")).expect("it is there");
    for round in 1..4 {
        let epoch = caught_up(&store)["epoch"].as_u64();
        store.kill("first");
        check_files(&second, 0..100 * round);
        store.mount("first");
        write_files(&first, 100 * round..100 * (round + 1));
        sync(&store);
        let lag = caught_up(&store);
        assert!(lag["epoch"].as_u64() > epoch && lag["rollbacks"] == 0, "{lag}");
        same(&tree(&second), &tree(&first));
        assert_eq!(read_at(&open, 1 << 20).expect("it stays open"), contents(7));
    }
    drop(open);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["umount", "second"]));
}

/// Mounts a volume with 100 files in its snapshot `before` and 100 more, and its replica.
fn follow_behind_snapshot(store: &Store) {
    let first = store.at("first");
    store.mount("first");
    write_files(&first, 0..100);
    ok(&store.ferry(&["snapshot", "create", "first", "before"]));
    write_files(&first, 100..200);
    sync(store);
    follow(store);
}

#[test]
fn a_replica_follows_a_rollback_and_open_files_have_their_own_bytes() {
    let store = Store::made();
    let (first, second) = (store.at("first"), store.at("second"));
    follow_behind_snapshot(&store);
    let open = File::open(second.join("001/150")).expect("it is there");
    ok(&store.ferry(&["umount", "first"]));
    assert_eq!(caught_up(&store)["rollbacks"], 0);
    assert_eq!(read_at(&open, 1 << 20).expect("a read"), contents(150));
    ok(&store.ferry(&["rollback", &format!("{}@before", store.url())]));
    let rollbacks = caught_up(&store)["rollbacks"].clone();
    assert!(rollbacks == 1 || rollbacks == 2, "a root tells of it, and then the volume");
    assert_eq!(read_at(&open, 1 << 20).expect("it is open"), contents(150));
    assert!(!second.join("001").exists(), "it is of later");
    store.mount("first");
    write_files(&first, 200..300);
    sync(&store);
    assert_eq!(caught_up(&store)["rollbacks"], rollbacks);
    same(&tree(&second), &tree(&first));
    assert_eq!(read_at(&open, 1 << 20).expect("it is open"), contents(150));
    assert!(store.log("second").contains("rolled back"));
    drop(open);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["umount", "second"]));
}

#[test]
fn a_replica_of_a_backup_follows_backups_and_finds_that_their_source_was_rolled_back() {
    let store = Store::new();
    let (source, url) = (store.at("source"), store.url());
    let of = store.url_of("of");
    fs::create_dir(&source).expect("a mount point");
    ok(&store.ferry(&["mkfs", &of, "--size", "1G"]));
    let change = |numbers: std::ops::Range<usize>| {
        let log = format!("log={}", store.at("source.log").display());
        ok(&store.ferry(&["mount", &of, "source", "-o", &log]));
        write_files(&source, numbers);
        ok(&store.ferry(&["umount", "source"]));
    };
    let back_up = |name: &str| {
        ok(&store.ferry(&["snapshot", "create", &of, name]));
        ok(&store.ferry(&["backup", &format!("{of}@{name}"), &url]));
    };
    change(0..100);
    back_up("before");
    follow(&store);
    let second = store.at("second");
    change(100..200);
    back_up("more");
    assert_eq!(caught_up(&store)["rollbacks"], 0);
    let open = File::open(second.join("001/150")).expect("it is there");
    assert_eq!(read_at(&open, 1 << 20).expect("a read"), contents(150));
    ok(&store.ferry(&["rollback", &format!("{of}@before")]));
    change(200..300);
    back_up("other");
    assert_eq!(caught_up(&store)["rollbacks"], 1);
    assert_eq!(read_at(&open, 1 << 20).expect("it is open"), contents(150));
    assert!(!second.join("001").exists() && second.join("002").exists());
    drop(open);
    ok(&store.ferry(&["umount", "second"]));
}

#[test]
fn a_replica_whose_store_is_away_says_so_and_follows_again() {
    let store = Store::made();
    let (first, second) = (store.at("first"), store.at("second"));
    store.mount("first");
    write_files(&first, 0..100);
    ok(&store.ferry(&["umount", "first"]));
    follow(&store);
    let before = tree(&second);
    let away = store.at("away");
    fs::rename(store.directory(), &away).expect("it is ours");
    while lag(&store)["error"].is_null() {
        std::thread::yield_now();
    }
    let behind = |lag: serde_json::Value| lag["behind_ns"].as_u64().expect("a time");
    let earlier = behind(lag(&store));
    assert!(behind(lag(&store)) > earlier, "it grows");
    same(&tree(&second), &before);
    fs::rename(&away, store.directory()).expect("it is ours");
    store.mount("first");
    write_files(&first, 100..200);
    sync(&store);
    let lag = caught_up(&store);
    assert!(lag["error"].is_null() && lag["looks_failed"].as_u64() > Some(0), "{lag}");
    same(&tree(&second), &tree(&first));
    assert!(store.log("second").contains("follows again"));
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
}

/// Ways in which another process goes on with the replica.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    Killed,
    Upgraded,
}

/// Another process goes on. Returns its statistics.
fn change(store: &Store, how: Change) -> serde_json::Value {
    let daemon = store.daemon("second");
    match how {
        Change::Killed => kill_process(daemon, Signal::KILL).expect("it is ours"),
        Change::Upgraded => ok(&store.ferry(&["upgrade-mount", "second"])),
    }
    // A request waits for the next process, which answers questions only then.
    fs::metadata(store.at("second")).expect("it is mounted");
    while !ok_stats(store) {
        std::thread::yield_now();
    }
    assert_ne!(store.daemon("second"), daemon);
    lag(store)
}

fn ok_stats(store: &Store) -> bool {
    store.ferry(&["stats", "second", "--json"]).status.success()
}

/// The names that a shell finds in the directory where it is.
fn shell_in(at: &Path) -> std::process::Child {
    Command::new("sh")
        .args(["-c", "read line; ls"])
        .current_dir(at)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it runs")
}

#[test]
fn a_replica_goes_on_in_another_process_with_its_open_files_and_directories() {
    for how in [Change::Killed, Change::Upgraded] {
        let store = Store::made();
        store.mount("first");
        let (first, second) = (store.at("first"), store.at("second"));
        write_files(&first, 0..200);
        sync(&store);
        follow(&store);
        let mut inside = shell_in(&second.join("001"));
        let open = File::open(second.join("000/7")).expect("it is there");
        let changed = File::open(second.join("000/77")).expect("it is there");
        let number = open.metadata().expect("it is open").ino();
        assert_eq!(read_at(&changed, 1 << 20).expect("a read"), contents(77));
        let mut listed = fs::read_dir(second.join("000")).expect("it can be listed");
        listed.next().expect("it has names").expect("it can be listed");
        let lag = change(&store, how);
        assert_eq!((&lag["rollbacks"], &lag["files_held"]), (&0.into(), &0.into()), "{lag}");
        assert_eq!(open.metadata().expect("it is open").ino(), number);
        assert_eq!(read_at(&open, 1 << 20).expect("it stays open"), contents(7));
        let names: Result<Vec<_>, _> = listed.collect();
        assert_eq!(names.expect("it can be listed").len(), 99, "nothing was changed");
        // The kernel has pages of both files.
        let other: Vec<u8> = contents(77).iter().map(|byte| byte ^ 1).collect();
        let file = File::options().write(true).open(first.join("000/77")).expect("it is there");
        file.write_all_at(&other, 0).expect("a write");
        file.sync_all().expect("it is durable");
        caught_up(&store);
        assert_eq!(read_at(&changed, 1 << 20).expect("a read"), other, "{how:?}");
        fs::remove_file(first.join("000/7")).expect("it is there");
        sync(&store);
        caught_up(&store);
        assert_eq!(read_at(&open, 1 << 20).expect("it is open"), contents(7));
        assert_eq!(self::lag(&store)["files_held"], 1);
        drop(inside.stdin.take());
        let inside = inside.wait_with_output().expect("it ends");
        assert_eq!(String::from_utf8_lossy(&inside.stdout).lines().count(), 100);
        // What was held is stale then, and the close is taken.
        change(&store, how);
        assert_eq!(errno(open.metadata()), Some(libc::ESTALE));
        assert_eq!(read_at(&changed, 1 << 20).expect("a read"), other);
        drop((open, changed, file));
        same(&tree(&second), &tree(&first));
        ok(&store.ferry(&["list"]));
        ok(&store.ferry(&["umount", "second"]));
        ok(&store.ferry(&["umount", "first"]));
        ok(&store.ferry(&["fsck", &store.url()]));
    }
}

/// What a file has, which stays open. One that was replaced before another process began is stale
/// in that one: `None`.
fn number_in(at: &Path) -> Option<(File, u64)> {
    let read = File::open(at).and_then(|file| {
        let text = read_at(&file, 100)?;
        Ok((file, text))
    });
    let is_stale = |error: &std::io::Error| error.raw_os_error() == Some(libc::ESTALE);
    if read.as_ref().is_err_and(is_stale) {
        return None;
    }
    let (file, text) = read.expect("it can be read");
    let text = String::from_utf8(text).expect("text");
    Some((file, text.parse().unwrap_or_else(|_| panic!("{} has {text:?}", at.display()))))
}

/// Reads what [`change_in_turn`] changes: what is read later is not older. The last number.
fn read_in_turn(at: &Path, ended: &AtomicBool) -> u64 {
    let mut last = 0;
    while !ended.load(Ordering::Relaxed) {
        let Some((_open, b)) = number_in(&at.join("b")) else { continue };
        let Some((_open, a)) = number_in(&at.join("a")) else { continue };
        assert!(last <= b && b <= a, "{last}, then b has {b} and a has {a}");
        last = b;
    }
    last
}

#[test]
fn what_a_replica_shows_is_never_older_in_the_next_process() {
    let store = Store::made();
    store.mount("first");
    let (first, second) = (store.at("first"), store.at("second"));
    fs::create_dir(first.join("names")).expect("a directory");
    for (name, text) in [("names/0", ""), ("a", "0"), ("b", "0")] {
        fs::write(first.join(name), text).expect("a file");
    }
    sync(&store);
    follow(&store);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = &ended;
        scope.spawn(|| change_in_turn(&first, ended));
        let looking = [(); 4].map(|()| scope.spawn(|| read_in_turn(&second, ended)));
        let changed = || {
            for turn in 0..10 {
                change(&store, [Change::Killed, Change::Upgraded][turn % 2]);
            }
        };
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(changed));
        ended.store(true, Ordering::Relaxed);
        let seen = looking.map(|looking| looking.join().expect("nothing older, and no error"));
        changed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
    });
    sync(&store);
    caught_up(&store);
    same(&tree(&second), &tree(&first));
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_rollback_between_two_processes_of_a_replica_is_noticed() {
    let store = Store::made();
    let (first, second) = (store.at("first"), store.at("second"));
    follow_behind_snapshot(&store);
    let open = File::open(second.join("001/150")).expect("it is there");
    let stays = File::open(second.join("000/50")).expect("it is there");
    ok(&store.ferry(&["umount", "first"]));
    caught_up(&store);
    let daemon = store.daemon("second");
    kill_process(daemon, Signal::STOP).expect("it is ours");
    ok(&store.ferry(&["rollback", &format!("{}@before", store.url())]));
    store.mount("first");
    write_files(&first, 200..300);
    sync(&store);
    kill_process(daemon, Signal::KILL).expect("it is ours");
    check_files(&second, 200..300);
    for file in [&open, &stays] {
        assert_eq!(errno(file.metadata()), Some(libc::ESTALE));
    }
    assert_eq!(lag(&store)["rollbacks"], 1);
    same(&tree(&second), &tree(&first));
    drop((open, stays));
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn programs_wait_if_the_store_is_away_when_the_process_of_a_replica_is_killed() {
    let store = Store::made();
    let (first, second) = (store.at("first"), store.at("second"));
    store.mount("first");
    write_files(&first, 0..10);
    ok(&store.ferry(&["umount", "first"]));
    follow(&store);
    let away = store.at("away");
    let daemon = store.daemon("second");
    fs::rename(store.directory(), &away).expect("it is ours");
    kill_process(daemon, Signal::KILL).expect("it is ours");
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| check_files(&second, 0..10));
        while !store.log("second").contains("it is tried again") {
            std::thread::yield_now();
        }
        assert!(!reads.is_finished());
        fs::rename(&away, store.directory()).expect("it is ours");
        reads.join().expect("no error");
    });
    ok(&store.ferry(&["umount", "second"]));
}

#[test]
fn a_replica_of_an_encrypted_volume_goes_on_without_its_passphrase() {
    let store = Store::new();
    let (first, second, file) = (store.at("first"), store.at("second"), store.at("passphrase"));
    fs::write(&file, "correct horse").expect("a file");
    let named = format!("passphrase_file={}", file.display());
    let path = file.to_str().expect("UTF-8");
    ok(&store.ferry(&["mkfs", &store.url(), "--encrypt", "--passphrase-file", path]));
    ok(&store.try_mount("first", &["-o", &named]));
    write_files(&first, 0..10);
    sync(&store);
    ok(&store.try_mount("second", &["-o", &named, "-o", "replica=100ms"]));
    change(&store, Change::Upgraded);
    fs::remove_file(&file).expect("it is there");
    let refused = store.ferry(&["upgrade-mount", "second"]);
    fails(&refused, 1, &["cannot read the passphrase"]);
    for _ in 0..2 {
        change(&store, Change::Killed);
        check_files(&second, 0..10);
    }
    write_files(&first, 10..20);
    sync(&store);
    caught_up(&store);
    check_files(&second, 0..20);
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn what_cannot_be_followed_is_refused() {
    let store = Store::made();
    let replica = ["-o", "replica"];
    let with = |more: &[&str]| store.try_mount("second", &[&replica[..], more].concat());
    fails(&with(&["--take-over"]), 2, &["--take-over", "leaves the volume to its owner"]);
    fails(&with(&["--create"]), 2, &["--create", "a volume that is there"]);
    fails(&with(&["-o", "snapshot=one"]), 2, &["never changes"]);
    fails(&with(&["-o", "cache=writeback"]), 2, &["only read"]);
    let local = format!("durability=local,local_log={}", store.at("log").display());
    fails(&with(&["-o", &local]), 2, &["durability=local", "makes nothing durable"]);
    let snapshot = format!("{}@one", store.url());
    fails(&store.ferry(&["mount", &snapshot, "second", "-o", "replica"]), 2, &["never changes"]);
    ok(&store.ferry(&["mkfs", "file.ferry", "--size", "256M"]));
    let file = store.ferry(&["mount", "file.ferry", "second", "-o", "replica"]);
    fails(&file, 2, &["replica is for volumes in a store"]);
    let absent = format!("dir://{}", store.at("first").display());
    let absent = store.ferry(&["mount", &absent, "second", "-o", "replica"]);
    fails(&absent, 1, &["there is no FerryFS volume here"]);
}
