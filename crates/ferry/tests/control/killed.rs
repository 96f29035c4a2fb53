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

fn wait_a_while() {
    let (clock, begun) = now();
    while clock.monotonic() - begun < A_WHILE {
        std::thread::park_timeout(A_WHILE);
    }
}

#[test]
fn a_mount_survives_its_daemon() {
    let fixture = TestVolume::new();
    fixture.mount();
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
    ok(&ferry(&["umount", path(&mnt)]));
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
