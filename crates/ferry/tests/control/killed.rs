//! The daemon of a mount is killed, and the mount goes on.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_env::Env;

use super::*;

/// How often the daemon is killed.
const TIMES: usize = 20;
/// A daemon that has served for so long was not killed at once.
const A_WHILE: Duration = Duration::from_millis(400);

/// What a program may see: what it changed and did not sync may be lost.
fn is_lost(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::ESTALE | libc::ENOENT))
}

/// Makes and syncs files until `enough`; returns what was synced.
fn sync_files(dir: &Path, enough: &AtomicBool) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut synced, mut number) = (Vec::new(), 0);
    while !enough.load(Ordering::Relaxed) {
        number += 1;
        let path = dir.join(format!("{number}"));
        let bytes = vec![number as u8; 1 + number * 97 % 5000];
        let make = || -> io::Result<()> {
            let mut file = File::create_new(&path)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            File::open(dir)?.sync_all()
        };
        match make() {
            Ok(()) => synced.push((path, bytes)),
            Err(error) => assert!(is_lost(&error), "{error}"),
        }
    }
    synced
}

/// Makes, moves and removes files until `enough`, and syncs nothing.
fn work(dir: &Path, enough: &AtomicBool) {
    let mut number = 0;
    while !enough.load(Ordering::Relaxed) {
        number += 1;
        let (path, moved) = (dir.join(format!("{number}")), dir.join(format!("moved-{number}")));
        let change = || -> io::Result<()> {
            fs::create_dir_all(dir)?;
            fs::write(&path, "contents")?;
            fs::rename(&path, &moved)?;
            fs::read(&moved)?;
            if number % 3 > 0 { fs::remove_file(&moved) } else { Ok(()) }
        };
        if let Err(error) = change() {
            assert!(is_lost(&error), "{error}");
        }
    }
}

fn now() -> (std::sync::Arc<dyn ferry_env::Clock>, Duration) {
    let clock = Env::real().clock;
    let begun = clock.monotonic();
    (clock, begun)
}

/// Unmounts. The command says if something was lost, and succeeds if all that is there is durable.
fn unmount(fixture: &TestVolume) {
    let (clock, begun) = now();
    let mut done = ferry(&["umount", path(&fixture.mnt())]);
    // A program that another test starts has this one's open files until it runs.
    while String::from_utf8_lossy(&done.stderr).contains(": busy:")
        && clock.monotonic() - begun < Duration::from_secs(10)
    {
        wait_a_while();
        done = ferry(&["umount", path(&fixture.mnt())]);
    }
    ok(&done);
}

fn wait_a_while() {
    let (clock, begun) = now();
    while clock.monotonic() - begun < A_WHILE {
        std::thread::park_timeout(A_WHILE);
    }
}

/// Kills the daemon of a new mount of `volume` again and again, while programs work there.
fn kill_again_and_again(fixture: &TestVolume, volume: &str) {
    let (mnt, enough) = (fixture.mnt(), AtomicBool::new(false));
    let open = File::options().create_new(true).read(true).write(true).open(mnt.join("open"));
    let open = open.expect("creates");
    let removed = File::options().create_new(true).read(true).write(true).open(mnt.join("removed"));
    let removed = removed.expect("creates");
    removed.write_all_at(b"contents", 0).expect("writes");
    fs::remove_file(mnt.join("removed")).expect("removes");
    ["a", "b"].iter().for_each(|name| fs::create_dir(mnt.join(name)).expect("mkdir"));
    ok(&ferry(&["sync", path(&mnt)]));
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| {
        let enough = &enough;
        let syncing = ["a", "b"].map(|name| {
            let dir = mnt.join(name);
            scope.spawn(move || sync_files(&dir, enough))
        });
        for name in ["c", "d"] {
            let dir = mnt.join(name);
            scope.spawn(move || work(&dir, enough));
        }
        for turn in 0..TIMES {
            wait_a_while();
            let daemon = fixture.daemon();
            let (clock, begun) = now();
            kill_process(daemon, Signal::KILL).expect("it is ours");
            let written = open.write_all_at(&[turn as u8], turn as u64);
            longest = longest.max(clock.monotonic() - begun);
            written.expect("an open file can be written");
            open.sync_all().expect("it was synced before");
            assert_ne!(fixture.daemon(), daemon);
            let mut contents = [0; 8];
            removed.read_exact_at(&mut contents, 0).expect("reads");
            assert_eq!(&contents, b"contents");
        }
        enough.store(true, Ordering::Relaxed);
        for synced in syncing {
            let synced = synced.join().expect("no other error");
            assert!(synced.len() > TIMES);
            for (path, bytes) in synced {
                assert!(fs::read(&path).expect("it was synced") == bytes, "{}", path.display());
            }
        }
    });
    let mut contents = vec![0; TIMES];
    open.read_exact_at(&mut contents, 0).expect("reads");
    assert_eq!(contents, (0..TIMES as u8).collect::<Vec<_>>());
    assert!(longest < Duration::from_secs(10), "{longest:?}");
    drop((open, removed));
    unmount(fixture);
    ok(&ferry(&["fsck", volume]));
}

#[test]
fn a_mount_survives_its_daemon() {
    let fixture = TestVolume::new();
    fixture.mount();
    kill_again_and_again(&fixture, path(&fixture.volume()));
}

/// Mounts a new volume in a store.
fn mount_store(fixture: &TestVolume, options: &str) -> String {
    let store = fixture.make_store(&[]);
    let options = format!("{},{options}", fixture.log());
    ok(&ferry(&["mount", &store, path(&fixture.mnt()), "-o", &options]));
    store
}

#[test]
fn a_mount_of_a_volume_in_a_store_survives_its_daemon() {
    let fixture = TestVolume::new();
    let store = mount_store(&fixture, "rw");
    kill_again_and_again(&fixture, &store);
    let said = fixture.daemon_log();
    assert!(!said.contains("waits 4.5 s"), "all owners are of this machine, and dead: {said}");
}

#[test]
fn what_only_a_local_log_has_is_there_after_a_kill() {
    let fixture = TestVolume::new();
    let beside = |name: &str| fixture.0.path().join(name).display().to_string();
    let (log, cache) = (beside("local-log"), beside("cache"));
    let store = mount_store(&fixture, &format!("durability=local,local_log={log},cache={cache}"));
    kill_again_and_again(&fixture, &store);
}

#[test]
fn snapshots_that_programs_look_into_stay_when_the_daemon_is_killed() {
    let fixture = TestVolume::new();
    let (mnt, store) = (fixture.mnt(), mount_store(&fixture, "rw"));
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&ferry(&["snapshot", "create", path(&mnt), "one"]));
    fs::write(mnt.join("file"), "after").expect("writes");
    let seen = mnt.join(".snapshots/one/file");
    let open = File::open(&seen).expect("opens");
    for _ in 0..3 {
        wait_a_while();
        kill_process(fixture.daemon(), Signal::KILL).expect("it is ours");
        let mut contents = [0; 6];
        open.read_exact_at(&mut contents, 0).expect("reads");
        assert_eq!(&contents, b"before");
        assert_eq!(fs::read(&seen).expect("reads"), b"before");
    }
    drop(open);
    unmount(&fixture);
    ok(&ferry(&["fsck", &store]));
}

/// Kills the daemon of a mount that only reads, and has another program go on with it in order.
fn kill_and_upgrade(fixture: &TestVolume) {
    let mnt = fixture.mnt();
    let open = File::open(mnt.join("file")).expect("opens");
    for turn in 0..4 {
        wait_a_while();
        let daemon = fixture.daemon();
        if turn == 2 {
            ok(&ferry(&["upgrade-mount", path(&mnt)]));
        } else {
            kill_process(daemon, Signal::KILL).expect("it is ours");
        }
        let mut contents = [0; 6];
        open.read_exact_at(&mut contents, 0).expect("reads");
        assert_eq!(&contents, b"before");
        assert_eq!(fs::read(mnt.join("file")).expect("reads"), b"before");
        assert_ne!(fixture.daemon(), daemon);
        let refused = fs::write(mnt.join("other"), "").expect_err("it is only read");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    }
    drop(open);
    unmount(fixture);
}

#[test]
fn a_mount_that_only_reads_survives_its_daemon() {
    let fixture = TestVolume::new();
    let (mnt, store) = (fixture.mnt(), mount_store(&fixture, "rw"));
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&ferry(&["snapshot", "create", path(&mnt), "one"]));
    ok(&ferry(&["umount", path(&mnt)]));
    fixture.mount();
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&ferry(&["umount", path(&mnt)]));
    for volume in [path(&fixture.volume()), &store, &format!("{store}@one")] {
        ok(&ferry(&["mount", volume, path(&mnt), "-o", "ro", "-o", &fixture.log()]));
        kill_and_upgrade(&fixture);
    }
}

#[test]
fn programs_wait_if_the_store_is_away_when_the_daemon_is_killed() {
    let fixture = TestVolume::new();
    let (mnt, store) = (fixture.mnt(), mount_store(&fixture, "rw"));
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&ferry(&["sync", path(&mnt)]));
    let (here, away) = (fixture.0.path().join("store"), fixture.0.path().join("away"));
    let daemon = fixture.daemon();
    stop(daemon);
    fs::rename(&here, &away).expect("it goes away");
    kill_process(daemon, Signal::KILL).expect("it is ours");
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| fs::read(mnt.join("file")));
        // Longer than a volume on a disk of this machine is waited for.
        while fixture.daemon_log().matches("it is tried again").count() < 13 {
            std::thread::park_timeout(A_WHILE);
        }
        fs::rename(&away, &here).expect("it comes back");
        assert_eq!(reads.join().expect("it ends").expect("reads"), b"before");
    });
    unmount(&fixture);
    ok(&ferry(&["fsck", &store]));
}

#[test]
fn what_others_have_done_to_a_volume_after_a_kill_is_there_and_open_files_are_told() {
    let fixture = TestVolume::new();
    let (mnt, _store) = (fixture.mnt(), mount_store(&fixture, "rw"));
    let open = File::options().create_new(true).read(true).write(true).open(mnt.join("open"));
    let open = open.expect("creates");
    open.write_all_at(b"before", 0).expect("writes");
    open.sync_all().expect("syncs");
    let (here, away) = (fixture.0.path().join("store"), fixture.0.path().join("away"));
    let other = fixture.0.path().join("other");
    fs::create_dir(&other).expect("mkdir");
    let daemon = fixture.daemon();
    stop(daemon);
    fs::rename(&here, &away).expect("it goes away");
    kill_process(daemon, Signal::KILL).expect("it is ours");
    ok(&ferry(&["mount", &format!("dir://{}", away.display()), path(&other)]));
    fs::write(other.join("file"), "another's").expect("writes");
    ok(&ferry(&["umount", path(&other)]));
    fs::rename(&away, &here).expect("it comes back");
    assert_eq!(fs::read(mnt.join("file")).expect("reads"), b"another's");
    let told = open.sync_all().expect_err("nobody knows whether all of it is there");
    assert_eq!(told.raw_os_error(), Some(libc::EIO));
    open.sync_all().expect("it is told once");
    drop(open);
    unmount(&fixture);
}

#[test]
fn an_encrypted_volume_is_opened_after_a_kill_without_its_passphrase() {
    let fixture = TestVolume::new();
    let (mnt, file) = (fixture.mnt(), fixture.mount_encrypted());
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&ferry(&["sync", path(&mnt)]));
    fs::remove_file(&file).expect("removes");
    for _ in 0..2 {
        wait_a_while();
        kill_process(fixture.daemon(), Signal::KILL).expect("it is ours");
        assert_eq!(fs::read(mnt.join("file")).expect("reads"), b"before");
    }
    unmount(&fixture);
}

#[test]
fn a_passphrase_that_was_typed_is_typed_once() {
    let fixture = TestVolume::new();
    let (mnt, file) = (fixture.mnt(), fixture.0.path().join("passphrase"));
    fs::write(&file, "correct horse").expect("writes");
    let store = format!("dir://{}", fixture.0.path().join("store").display());
    ok(&ferry(&["mkfs", &store, "--size", "256M", "--encrypt", "--passphrase-file", path(&file)]));
    let mount = format!("{FERRY} mount -f {store} {}", path(&mnt));
    let mut terminal = Command::new("script")
        .args(["-qec", &mount, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("util-linux has it");
    let mut typed = terminal.stdin.take().expect("it is a pipe");
    typed.write_all(b"correct horse\n").expect("types");
    let is_mounted = || {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the table of mounts");
        mounts.contains(path(&mnt))
    };
    let (clock, begun) = now();
    while !is_mounted() && clock.monotonic() - begun < Duration::from_secs(60) {
        std::thread::park_timeout(A_WHILE);
    }
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&ferry(&["sync", path(&mnt)]));
    wait_a_while();
    kill_process(fixture.daemon(), Signal::KILL).expect("it is ours");
    assert_eq!(fs::read(mnt.join("file")).expect("reads"), b"before");
    unmount(&fixture);
    assert!(terminal.wait().expect("it ends").success());
}

/// Makes, moves, reads and removes files until `enough`: nothing of that may fail or be lost.
/// Returns the names that are there.
fn change_files(dir: &Path, enough: &AtomicBool) -> Vec<String> {
    let (mut names, mut number) = (Vec::new(), 0);
    fs::create_dir(dir).expect("mkdir");
    while !enough.load(Ordering::Relaxed) {
        number += 1;
        let (path, moved) = (dir.join(format!("{number}")), dir.join(format!("moved-{number}")));
        let bytes = vec![number as u8; 1 + number * 97 % 9000];
        let mut file = File::create_new(&path).expect("it is made once");
        file.write_all(&bytes).expect("writes");
        if number % 5 == 0 {
            file.sync_all().expect("syncs");
        }
        drop(file);
        fs::rename(&path, &moved).expect("it is moved once");
        assert!(fs::read(&moved).expect("it is there") == bytes);
        if number % 3 > 0 {
            fs::remove_file(&moved).expect("it is removed once");
        } else {
            names.push(format!("moved-{number}"));
        }
    }
    names.sort();
    names
}

/// Appends numbers to a file, one by one; how many.
fn append_records(path: &Path, enough: &AtomicBool) -> u64 {
    let mut file = File::options().create_new(true).append(true).open(path).expect("creates");
    let mut records = 0_u64;
    while !enough.load(Ordering::Relaxed) {
        file.write_all(&records.to_le_bytes()).expect("appends");
        records += 1;
    }
    records
}

#[test]
fn a_mount_of_a_server_survives_its_daemon_and_nothing_is_lost() {
    let fixture = TestVolume::new();
    let server = Served::new(&fixture.volume());
    let options = format!("insecure,{}", fixture.log());
    let source = format!("ferry://{}/", server.1);
    ok(&ferry(&["mount", &source, path(&fixture.mnt()), "-o", &options]));
    let (mnt, enough) = (fixture.mnt(), AtomicBool::new(false));
    let open = File::options().create_new(true).read(true).write(true).open(mnt.join("open"));
    let open = open.expect("creates");
    open.lock().expect("nobody has it");
    let removed = File::options().create_new(true).read(true).write(true).open(mnt.join("removed"));
    let removed = removed.expect("creates");
    removed.write_all_at(b"contents", 0).expect("writes");
    fs::remove_file(mnt.join("removed")).expect("removes");
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| {
        let enough = &enough;
        let changing = ["a", "b", "c"].map(|name| {
            let dir = mnt.join(name);
            (name, scope.spawn(move || change_files(&dir, enough)))
        });
        let appending = scope.spawn(|| append_records(&mnt.join("appended"), enough));
        for turn in 0..TIMES {
            wait_a_while();
            let daemon = fixture.daemon();
            let (clock, begun) = now();
            // It has not arrived at the server.
            open.write_all_at(&[turn as u8], turn as u64).expect("writes");
            kill_process(daemon, Signal::KILL).expect("it is ours");
            open.write_all_at(&[turn as u8], (TIMES + turn) as u64).expect("writes");
            longest = longest.max(clock.monotonic() - begun);
            open.sync_all().expect("nothing is lost");
            assert_ne!(fixture.daemon(), daemon);
            let other = File::open(mnt.join("open")).expect("opens");
            assert!(other.try_lock().is_err(), "it is held");
            let mut contents = [0; 8];
            removed.read_exact_at(&mut contents, 0).expect("reads");
            assert_eq!(&contents, b"contents");
        }
        enough.store(true, Ordering::Relaxed);
        let records = appending.join().expect("no error");
        let found = fs::read(mnt.join("appended")).expect("reads");
        let numbers = found.as_chunks().0.iter().map(|record| u64::from_le_bytes(*record));
        assert_eq!(numbers.collect::<Vec<_>>(), (0..records).collect::<Vec<_>>(), "each once");
        for (name, changing) in changing {
            let expected = changing.join().expect("no error");
            let found = fs::read_dir(mnt.join(name)).expect("lists");
            let mut found: Vec<String> = found
                .map(|entry| entry.expect("lists").file_name().into_string().expect("text"))
                .collect();
            found.sort();
            assert!(expected.len() > TIMES / 3 && found == expected, "{name}");
        }
    });
    let mut contents = vec![0; 2 * TIMES];
    open.read_exact_at(&mut contents, 0).expect("reads");
    let turns = 0..TIMES as u8;
    assert_eq!(contents, turns.clone().chain(turns).collect::<Vec<_>>());
    assert!(longest < Duration::from_secs(10), "{longest:?}");
    drop((open, removed));
    ok(&ferry(&["umount", path(&mnt)]));
    drop(server);
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

#[test]
fn a_daemon_that_is_killed_whenever_it_serves_ends_the_mount() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mut killed = 0;
    // Without a daemon, nothing can be asked: by then the mount has ended.
    while let Ok(daemon) = std::panic::catch_unwind(|| fixture.daemon()) {
        // It may have ended since.
        let _ended = kill_process(daemon, Signal::KILL);
        killed += 1;
        assert!(killed < 100);
    }
    assert!(killed > 2);
    assert!(fixture.daemon_log().contains("one process after the other was killed"));
    fails(&ferry(&["umount", path(&fixture.mnt())]), "has died");
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

#[test]
fn a_volume_that_cannot_be_recovered_ends_the_mount() {
    let fixture = TestVolume::new();
    fixture.mount();
    fs::write(fixture.mnt().join("file"), "contents").expect("writes");
    let daemon = fixture.daemon();
    stop(daemon);
    cut(&fixture);
    kill_process(daemon, Signal::KILL).expect("it is ours");
    assert!(fs::metadata(fixture.mnt().join("other")).is_err(), "programs do not wait for ever");
    let said = fixture.daemon_log();
    assert!(said.contains("this process does not go on with the mount"), "{said}");
    fails(&ferry(&["umount", path(&fixture.mnt())]), "has died");
}

/// Mounts what no process serves, until its input ends.
const UNSERVED: &str = "import ctypes, os, sys
device = os.open('/dev/fuse', os.O_RDWR)
options = f'fd={device},rootmode=40000,user_id=0,group_id=0'.encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b'/nowhere.ferry', sys.argv[1].encode(), b'fuse.ferry', 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
print('mounted', flush=True)
sys.stdin.read()";

/// As between a process that was killed and one that cannot start.
#[test]
fn commands_say_that_a_mount_waits_for_its_next_process() {
    let fixture = TestVolume::new();
    let mut python = Command::new("python3");
    python.args(["-c", UNSERVED, path(&fixture.mnt())]).stdin(Stdio::piped());
    let mut unserved = python.stdout(Stdio::piped()).spawn().expect("python3 is installed");
    let mut said = String::new();
    let stdout = unserved.stdout.take().expect("it is piped");
    BufReader::new(stdout).read_line(&mut said).expect("it can be read");
    assert_eq!(said, "mounted\n");
    std::thread::scope(|scope| {
        for command in ["stats", "tune", "umount"] {
            let options: &[&str] = if command == "tune" { &["--reset-flush-time"] } else { &[] };
            let mnt = fixture.mnt();
            scope.spawn(move || {
                let done = ferry(&[&[command, path(&mnt)], options].concat());
                fails(&done, "no process has served this mount");
            });
        }
        scope.spawn(|| {
            let listed = ferry(&["list"]);
            let listed = String::from_utf8_lossy(&listed.stdout);
            let line = listed.lines().find(|line| line.contains(path(&fixture.mnt())));
            assert!(line.is_some_and(|line| line.contains("no daemon answers")), "{listed}");
        });
    });
    assert!(fixture.is_mounted());
    ok(&ferry(&["umount", "--force", path(&fixture.mnt())]));
    assert!(!fixture.is_mounted());
    drop(unserved.stdin.take());
    unserved.wait().expect("it has ended");
}
