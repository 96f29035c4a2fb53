//! Another program goes on with a mount, while programs use it.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// How often the mount goes on in another process.
const TIMES: usize = 15;

fn upgrade(fixture: &TestVolume, more: &[&str]) -> Output {
    Command::new("timeout")
        .args(["--signal=KILL", "100", FERRY, "upgrade-mount", path(&fixture.mnt())])
        .args(more)
        .output()
        .expect("the command runs")
}

/// Makes, syncs, moves, reads and removes files until `enough`; how many.
fn work_on(dir: &Path, enough: &AtomicBool) -> usize {
    fs::create_dir(dir).expect("mkdir");
    let mut files = 0;
    while !enough.load(Ordering::Relaxed) {
        let (path, moved) = (dir.join(format!("{files}")), dir.join(format!("moved-{files}")));
        let bytes = vec![files as u8; 1 + files * 977 % 100_000];
        let mut file = File::create_new(&path).expect("creates");
        file.write_all(&bytes).expect("writes");
        if files % 3 == 0 {
            file.sync_all().expect("syncs");
        }
        drop(file);
        fs::rename(&path, &moved).expect("renames");
        assert!(fs::read(&moved).expect("reads") == bytes, "{}", moved.display());
        assert!(!path.exists());
        if files % 2 == 0 {
            fs::remove_file(&moved).expect("removes");
        }
        files += 1;
    }
    let left = fs::read_dir(dir).expect("lists").count();
    assert_eq!(left, files / 2);
    files
}

#[test]
fn a_mount_goes_on_in_another_process_while_programs_use_it() {
    let fixture = TestVolume::new();
    fixture.mount();
    let (mnt, enough) = (fixture.mnt(), AtomicBool::new(false));
    let made = OpenOptions::new().create_new(true).read(true).append(true).open(mnt.join("open"));
    let mut open = made.expect("creates");
    let removed = File::options().create_new(true).read(true).write(true).open(mnt.join("removed"));
    let removed = removed.expect("creates");
    removed.write_all_at(b"contents", 0).expect("writes");
    fs::remove_file(mnt.join("removed")).expect("removes");
    fs::create_dir(mnt.join("work")).expect("mkdir");
    let mut inside = Command::new("sh")
        .args(["-c", "read line; pwd -P >/dev/null && ls -a . | wc -l"])
        .current_dir(mnt.join("work"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    fs::remove_dir(mnt.join("work")).expect("rmdir");
    let mut daemons = vec![fixture.daemon()];
    std::thread::scope(|scope| {
        let worker = |name: &str| {
            let (dir, enough) = (mnt.join(name), &enough);
            scope.spawn(move || work_on(&dir, enough))
        };
        let workers = ["a", "b", "c"].map(worker);
        for turn in 0..TIMES {
            let done = upgrade(&fixture, &[]);
            ok(&done);
            assert!(String::from_utf8_lossy(&done.stdout).contains("goes on"), "{done:?}");
            writeln!(open, "{turn}").expect("appends");
            daemons.push(fixture.daemon());
        }
        enough.store(true, Ordering::Relaxed);
        for worker in workers {
            assert!(worker.join().expect("no error") > 0);
        }
    });
    daemons.dedup();
    assert_eq!(daemons.len(), TIMES + 1, "each time another process");
    let mut text = String::new();
    open.seek(SeekFrom::Start(0)).expect("seeks");
    open.read_to_string(&mut text).expect("reads");
    assert_eq!(text, (0..TIMES).map(|turn| format!("{turn}\n")).collect::<String>());
    let mut contents = [0; 8];
    removed.read_exact_at(&mut contents, 0).expect("reads");
    assert_eq!(&contents, b"contents");
    drop(inside.stdin.take());
    let inside = inside.wait_with_output().expect("it ends");
    assert!(inside.status.success(), "a program may be in a directory that was removed");
    drop((open, removed));
    ok(&ferry(&["umount", path(&mnt)]));
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

/// The kernel knows no regular file then, and the queues cannot be filled.
#[test]
fn programs_that_only_use_directories_go_on_too() {
    let fixture = TestVolume::new();
    fixture.mount();
    let (mnt, enough) = (fixture.mnt(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let worker = |name: &str| {
            let (dir, enough) = (mnt.join(name), &enough);
            scope.spawn(move || {
                while !enough.load(Ordering::Relaxed) {
                    fs::create_dir(&dir).expect("mkdir");
                    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("chmod");
                    fs::remove_dir(&dir).expect("rmdir");
                }
            })
        };
        let workers = ["a", "b", "c", "d"].map(worker);
        for _ in 0..TIMES {
            ok(&upgrade(&fixture, &[]));
        }
        enough.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("no error");
        }
    });
    ok(&ferry(&["umount", path(&mnt)]));
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

/// A program that calls itself ferry, and else only ends.
fn impostor(fixture: &TestVolume, ends: &str) -> PathBuf {
    let [text, program] = ["impostor.sh", "impostor"].map(|name| fixture.0.path().join(name));
    let script = format!("#!/bin/sh\n[ \"$1\" = --version ] && echo ferry 9 && exit\n{ends}\n");
    fs::write(&text, script).expect("writes");
    // This process must not write the program: what another test starts meanwhile would have it
    // open for writing, too, and nobody could run it.
    let install = Command::new("install").arg(&text).arg(&program).status().expect("install runs");
    assert!(install.success());
    program
}

#[test]
fn if_the_new_program_does_not_start_the_one_before_goes_on() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mut open = File::create(fixture.mnt().join("open")).expect("creates");
    for ends in ["exit 1", "kill -SEGV $$"] {
        open.set_len(0).expect("cuts");
        let before = fixture.daemon();
        let refused = upgrade(&fixture, &["--program", path(&impostor(&fixture, ends))]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("the one before goes on"), "{said}");
        assert_ne!(fixture.daemon(), before, "it was started again");
        open.sync_all().expect("nothing is lost");
    }
    open.write_all(b"x").expect("writes");
    // That it can be replaced was not lost.
    ok(&upgrade(&fixture, &[]));
    open.write_all(b"y").expect("writes");
    drop(open);
    assert_eq!(fs::read(fixture.mnt().join("open")).expect("reads"), b"xy");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    let other = upgrade(&fixture, &[]);
    assert!(String::from_utf8_lossy(&other.stderr).contains("no FerryFS is mounted here"));
}

#[test]
fn if_the_new_program_is_killed_before_it_serves_another_one_goes_on() {
    let fixture = TestVolume::new();
    fixture.mount();
    let file = File::create(fixture.mnt().join("open")).expect("creates");
    for ms in (10..200).step_by(30) {
        // It is killed once.
        let killed = fixture.0.path().join(format!("killed-{ms}"));
        let kill = format!("sleep 0.{ms:03} && kill -9 $$ && touch {}/done", path(&killed));
        let kill = format!("mkdir {} && {kill} &", path(&killed));
        let ends = format!("{kill}\nexec {FERRY} \"$@\"");
        // Whether it has gone on before, time tells.
        upgrade(&fixture, &["--program", path(&impostor(&fixture, &ends))]);
        file.write_all_at(&[ms as u8], ms).expect("writes");
        file.sync_all().expect("nothing is lost");
        // Otherwise it could be killed while it closes the volume.
        while !killed.join("done").exists() {
            std::thread::park_timeout(std::time::Duration::from_millis(10));
        }
    }
    drop(file);
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

#[test]
fn a_new_program_that_is_killed_again_and_again_leaves_the_mount_to_the_one_before() {
    let fixture = TestVolume::new();
    fixture.mount();
    let file = File::create(fixture.mnt().join("open")).expect("creates");
    let ends = format!("(sleep 0.1; kill -9 $$) &\nexec {FERRY} \"$@\"");
    upgrade(&fixture, &["--program", path(&impostor(&fixture, &ends))]);
    let mut daemons = Vec::new();
    while daemons.len() < 200 {
        file.write_all_at(b"x", daemons.len() as u64).expect("writes");
        file.sync_all().expect("nothing is lost");
        daemons.push(fixture.daemon());
        std::thread::park_timeout(std::time::Duration::from_millis(10));
    }
    let lasts = daemons.iter().rev().take_while(|pid| Some(*pid) == daemons.last()).count();
    assert!(lasts > 50, "{daemons:?}");
    drop(file);
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

/// How often a program was started that notes each start in this file.
fn starts(file: &Path) -> usize {
    fs::read_to_string(file).map_or(0, |starts| starts.lines().count())
}

/// Only the newer program is sure to know the form of what it had noted.
#[test]
fn a_new_program_that_ends_while_it_recovers_is_started_again_and_not_the_one_before() {
    for ends in ["exit 1", "kill -9 $$"] {
        let fixture = TestVolume::new();
        fixture.mount();
        let file = File::create(fixture.mnt().join("open")).expect("creates");
        let started = fixture.0.path().join("started");
        let noted = path(&started);
        let second = format!("echo >> {noted}\n[ $(wc -l < {noted}) = 2 ] && {ends}");
        let program = impostor(&fixture, &format!("{second}\nexec {FERRY} \"$@\""));
        upgrade(&fixture, &["--program", path(&program)]);
        assert_eq!(starts(&started), 1);
        file.write_all_at(b"x", 0).expect("writes");
        kill_process(fixture.daemon(), Signal::KILL).expect("it is ours");
        file.write_all_at(b"y", 1).expect("writes");
        file.sync_all().expect("nothing is lost");
        assert_eq!(starts(&started), 3, "{ends}");
        drop(file);
        ok(&ferry(&["umount", path(&fixture.mnt())]));
        ok(&ferry(&["fsck", path(&fixture.volume())]));
    }
}

/// The one before finds another volume, and says that no process can go on.
#[test]
fn if_the_one_before_cannot_go_on_either_the_new_program_is_started_again() {
    let fixture = TestVolume::new();
    fixture.mount();
    let file = File::create(fixture.mnt().join("open")).expect("creates");
    file.sync_all().expect("syncs");
    let beside = |name: &str| fixture.0.path().join(name);
    let (started, other, away) = (beside("started"), beside("other"), beside("away"));
    ok(&ferry(&["mkfs", path(&other), "--size", "256M"]));
    let volume = fixture.volume();
    let [log, started_at, volume, other, away] =
        [&beside("log"), &started, &volume, &other, &away].map(|file| path(file).to_owned());
    let ends = format!(
        "echo >> {started_at}
if grep -q 'the program before goes on' {log}; then
    [ -e {away} ] && mv {volume} {other} && mv {away} {volume}
elif [ $(wc -l < {started_at}) -gt 1 ]; then
    [ -e {away} ] || mv {volume} {away}
    [ -e {volume} ] || mv {other} {volume}
    kill -9 $$
fi
exec {FERRY} \"$@\""
    );
    upgrade(&fixture, &["--program", path(&impostor(&fixture, &ends))]);
    assert_eq!(starts(&started), 1);
    kill_process(fixture.daemon(), Signal::KILL).expect("it is ours");
    file.write_all_at(b"x", 0).expect("writes");
    let said = fixture.daemon_log();
    assert!(said.contains("the newer one does"), "{said}");
    assert!(starts(&started) > 3);
    drop(file);
    assert_eq!(fs::read(fixture.mnt().join("open")).expect("reads"), b"x");
    ferry(&["umount", path(&fixture.mnt())]);
    assert!(!fixture.is_mounted());
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

/// Also when it has begun to serve.
#[test]
fn a_new_program_that_lacks_descriptors_leaves_the_mount_to_the_one_before() {
    let mut begun = 0;
    for sixteenths in 8..14 {
        let fixture = TestVolume::new();
        fixture.mount();
        let file = File::create(fixture.mnt().join("open")).expect("creates");
        file.write_all_at(b"x", 0).expect("writes");
        let used = fs::read_dir(format!("/proc/{}/fd", fixture.daemon())).expect("lists").count();
        let ends = format!("ulimit -n {}\nexec {FERRY} \"$@\"", used * sixteenths / 16);
        let program = impostor(&fixture, &ends);
        // It cannot be asked if it lacks descriptors when it serves.
        Command::new("timeout")
            .args(["--signal=KILL", "20", FERRY, "upgrade-mount", path(&fixture.mnt())])
            .args(["--program", path(&program)])
            .output()
            .expect("the command runs");
        file.write_all_at(b"y", 1).expect("the mount is there");
        file.sync_all().expect("nothing is lost");
        begun += fixture.daemon_log().matches("ends as if it was killed").count();
        if fixture.daemon_log().contains("the program before") {
            drop(file);
            ok(&ferry(&["umount", path(&fixture.mnt())]));
            ok(&ferry(&["fsck", path(&fixture.volume())]));
        }
    }
    assert!(begun > 0, "none has failed when it began to serve");
}

#[test]
fn what_is_no_ferry_is_refused() {
    let fixture = TestVolume::new();
    fixture.mount();
    let refused = upgrade(&fixture, &["--program", "/bin/true"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("/bin/true: that is no ferry"));
    assert_eq!(fs::read_dir(fixture.mnt()).expect("it is served on").count(), 0);
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_mount_of_a_volume_in_a_store_goes_on_and_so_do_its_snapshots() {
    let fixture = TestVolume::new();
    let (mnt, store, enough) = (fixture.mnt(), fixture.make_store(&[]), AtomicBool::new(false));
    ok(&ferry(&["mount", &store, path(&mnt), "-o", &fixture.log()]));
    fs::write(mnt.join("file"), "before").expect("writes");
    fs::create_dir(mnt.join("dir")).expect("mkdir");
    ok(&ferry(&["snapshot", "create", path(&mnt), "one"]));
    fs::write(mnt.join("file"), "after").expect("writes");
    ok(&ferry(&["snapshot", "create", path(&mnt), "two"]));
    // The order in which they are looked up is not that in which they were made.
    let seen = |name: &str| File::open(mnt.join(".snapshots").join(name).join("file"));
    let (two, one) = (seen("two").expect("opens"), seen("one").expect("opens"));
    let mut inside = Command::new("sh")
        .args(["-c", "read line; cat ../file"])
        .current_dir(mnt.join(".snapshots/one/dir"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    std::thread::scope(|scope| {
        let worker = |name: &str| {
            let (dir, enough) = (mnt.join(name), &enough);
            scope.spawn(move || work_on(&dir, enough))
        };
        let workers = ["a", "b"].map(worker);
        for _ in 0..5 {
            ok(&upgrade(&fixture, &[]));
            let mut bytes = [0; 6];
            assert_eq!(one.read_at(&mut bytes, 0).expect("reads"), 6);
            assert_eq!(&bytes, b"before");
            assert_eq!(two.read_at(&mut bytes, 0).expect("reads"), 5);
            assert_eq!(&bytes[..5], b"after");
        }
        enough.store(true, Ordering::Relaxed);
        for worker in workers {
            assert!(worker.join().expect("no error") > 0);
        }
    });
    drop((inside.stdin.take(), one, two));
    let inside = inside.wait_with_output().expect("it ends");
    assert_eq!(inside.stdout, b"before", "{inside:?}");
    ok(&ferry(&["umount", path(&mnt)]));
    ok(&ferry(&["fsck", &store]));
}

#[test]
fn programs_wait_while_the_store_of_a_mount_that_goes_on_is_away() {
    let fixture = TestVolume::new();
    let (mnt, store) = (fixture.mnt(), fixture.make_store(&[]));
    ok(&ferry(&["mount", &store, path(&mnt), "-o", &fixture.log()]));
    fs::write(mnt.join("file"), "before").expect("writes");
    let (here, away) = (fixture.0.path().join("store"), fixture.0.path().join("away"));
    let program = fixture.0.path().join("mover");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo ferry 9 && exit\nmv {} {}\nexit 1\n",
        path(&here),
        path(&away)
    );
    fs::write(&program, script).expect("writes");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("chmod");
    std::thread::scope(|scope| {
        let upgraded = scope.spawn(|| upgrade(&fixture, &["--program", path(&program)]));
        while !fixture.daemon_log().contains("it is tried again") {
            std::thread::yield_now();
        }
        let reads = scope.spawn(|| fs::read(mnt.join("file")));
        fs::rename(&away, &here).expect("it comes back");
        assert_eq!(reads.join().expect("it ends").expect("reads"), b"before");
        let said = upgraded.join().expect("it ends");
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains("the one before goes on"), "{said}");
    });
    ok(&upgrade(&fixture, &[]));
    ok(&ferry(&["umount", path(&mnt)]));
    ok(&ferry(&["fsck", &store]));
}

#[test]
fn a_mount_whose_passphrase_is_gone_is_served_on() {
    let fixture = TestVolume::new();
    let (mnt, file) = (fixture.mnt(), fixture.mount_encrypted());
    fs::write(mnt.join("file"), "before").expect("writes");
    ok(&upgrade(&fixture, &[]));
    fs::remove_file(&file).expect("removes");
    let refused = upgrade(&fixture, &[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("cannot read the passphrase"), "{said}");
    assert_eq!(fs::read(mnt.join("file")).expect("reads"), b"before");
    ok(&ferry(&["umount", path(&mnt)]));
}

#[test]
fn the_daemon_ends_with_its_holder() {
    let fixture = TestVolume::new();
    fixture.mount();
    fixture.kill_holder();
    assert!(fs::metadata(fixture.mnt().join("x")).is_err());
    fails(&ferry(&["umount", path(&fixture.mnt())]), "its daemon has died before");
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}
