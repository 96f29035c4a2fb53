//! The command as a user calls it: exit codes, messages, and mounts (these need root and
//! /dev/fuse).

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

/// A directory that no mount outlives.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        std::fs::create_dir(dir.path().join("mnt")).expect("a mount point");
        Self { dir }
    }

    fn volume(&self) -> PathBuf {
        self.dir.path().join("volume.ferry")
    }

    fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn log_option(&self) -> String {
        format!("log={}", self.dir.path().join("log").display())
    }

    /// Mounts a small volume, made for it.
    fn mount(&self) {
        ok(&ferry(&["mkfs", path(&self.volume()), "--size", "256M"]));
        ok(&ferry(&["mount", path(&self.volume()), path(&self.mnt()), "-o", &self.log_option()]));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nothing is mounted if the test went well.
        ferry(&["umount", "--force", path(&self.mnt())]);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a temporary directory's name is UTF-8")
}

fn ferry(args: &[&str]) -> Output {
    Command::new(FERRY).args(args).output().expect("the command runs")
}

fn ok(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

/// Failed with this code and exactly one line that holds `text`.
fn fails(output: &Output, code: i32, text: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(text), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
}

#[test]
fn wrong_usage_is_code_2() {
    assert_eq!(ferry(&["mount"]).status.code(), Some(2));
    assert_eq!(ferry(&["mkfs", "v", "--size", "big"]).status.code(), Some(2));
    let place = Place::new();
    let unknown = ferry(&["mount", "v", path(&place.mnt()), "-o", "nonsense"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("nonsense"));
}

#[test]
fn what_is_not_there_is_named() {
    let place = Place::new();
    fails(&ferry(&["mount", "/no/such/volume", path(&place.mnt())]), 1, "/no/such/volume");
    fails(
        &ferry(&["mount", path(&place.volume()), "/no/such/place", "--create"]),
        1,
        "/no/such/place",
    );
    assert!(!place.volume().exists(), "a mount that cannot be makes no volume");
    fails(&ferry(&["fsck", "/no/such/volume"]), 8, "/no/such/volume");
    fails(&ferry(&["umount", path(&place.mnt())]), 1, "no FerryFS is mounted here");
    fails(&ferry(&["sync", path(&place.mnt())]), 1, "no FerryFS is mounted here");
    fails(&ferry(&["stats", path(&place.mnt())]), 1, "no FerryFS is mounted here");
}

#[test]
fn only_an_empty_file_becomes_a_volume() {
    let place = Place::new();
    std::fs::write(place.volume(), "foreign").expect("writable");
    let volume = place.volume();
    fails(&ferry(&["mkfs", path(&volume), "--size", "64M"]), 1, "--force");
    assert_eq!(std::fs::read(&volume).expect("still there"), b"foreign");
    fails(&ferry(&["mount", path(&volume), path(&place.mnt())]), 1, path(&volume));

    ok(&ferry(&["mkfs", path(&volume), "--size", "64M", "--force"]));
    ok(&ferry(&["fsck", path(&volume)]));
    fails(&ferry(&["mkfs", path(&volume)]), 1, "--force");
    fails(&ferry(&["mkfs", path(&place.dir.path().join("tiny")), "--size", "1M"]), 1, "16 MiB");
    assert!(!place.dir.path().join("tiny").exists(), "half a volume is left over");
}

#[test]
fn a_file_that_is_no_volume_is_called_what_it_is() {
    let place = Place::new();
    let at = |name: &str| place.dir.path().join(name);
    std::fs::write(at("short"), "foreign").expect("writable");
    // Disc images and the like begin with zeros.
    let mut zeros_first = vec![0; 3 << 20];
    zeros_first[32 << 10] = 1;
    std::fs::write(at("image"), &zeros_first).expect("writable");
    std::fs::write(at("zeros"), vec![0; 3 << 20]).expect("writable");
    for (name, text) in [
        ("short", "too short to be one"),
        ("image", "it holds other data"),
        ("zeros", "it is empty"),
        ("mnt", "neither a regular file"),
        ("absent", "No such file"),
    ] {
        let file = at(name);
        for (command, code) in [
            (vec!["fsck", path(&file)], 8),
            (vec!["fsck", path(&file), "--repair"], 8),
            (vec!["debug", path(&file), "superblock"], 8),
            (vec!["debug", path(&file), "keys"], 8),
        ] {
            let done = ferry(&command);
            fails(&done, code, text);
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(!said.contains("unmount") && !said.contains("--force"), "{said}");
            assert!(done.stdout.is_empty());
        }
        if name != "absent" {
            fails(&ferry(&["mount", path(&file), path(&place.mnt())]), 1, text);
        }
        if name != "absent" && name != "mnt" {
            fails(&ferry(&["scrub", path(&file)]), 8, text);
            fails(&ferry(&["replace", path(&file), "a", "b"]), 1, "not a mirror");
        }
    }
    fails(&ferry(&["mount", path(&at("absent")), path(&place.mnt())]), 1, "--create");
    for size in ["0", "1K", "15M"] {
        fails(&ferry(&["mkfs", path(&at("absent")), "--size", size]), 1, "at least 16 MiB");
    }
    ok(&ferry(&["mkfs", path(&at("odd")), "--size", "67108865"]));
}

#[test]
fn a_check_that_cannot_be_is_said_in_json_too() {
    let place = Place::new();
    place.mount();
    let volume = place.volume();
    let absent = place.dir.path().join("absent");
    for (command, text) in [
        (["fsck", path(&volume), "--json"], "unmount it first"),
        (["fsck", path(&absent), "--json"], "No such file"),
        (["scrub", path(&absent), "--json"], "No such file"),
    ] {
        let done = ferry(&command);
        assert!(!done.status.success(), "{done:?}");
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
        assert!(report["error"].as_str().is_some_and(|error| error.contains(text)), "{report}");
    }
    fails(&ferry(&["fsck", path(&volume)]), 8, &format!("mounted on {}", place.mnt().display()));
    ok(&ferry(&["umount", path(&place.mnt())]));
    let clean = ferry(&["fsck", path(&volume), "--metadata-only"]);
    assert!(String::from_utf8_lossy(&clean.stdout).contains("which were not read"));
    let clean = ferry(&["fsck", path(&volume)]);
    assert!(String::from_utf8_lossy(&clean.stdout).contains("which were read"));
}

#[test]
fn the_flush_policy_is_an_option_and_can_be_tuned() {
    let place = Place::new();
    ok(&ferry(&["mkfs", path(&place.volume()), "--size", "256M"]));
    let options = format!("flush=delay,fast_flush=500us,{}", place.log_option());
    ok(&ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", &options]));
    let flush = || {
        let stats = ferry(&["stats", path(&place.mnt()), "--json"]);
        ok(&stats);
        let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
        stats["flush"].clone()
    };
    assert_eq!(
        (flush()["policy"].as_str(), flush()["fast_flush_ns"].as_u64()),
        (Some("delay"), Some(500_000))
    );
    for policy in ["each", "gather", "adaptive"] {
        ok(&ferry(&["tune", path(&place.mnt()), "--flush", policy]));
        assert_eq!(flush()["policy"], policy);
        std::fs::write(place.mnt().join(policy), "kept").expect("writable");
        let file = std::fs::File::open(place.mnt().join(policy)).expect("readable");
        file.sync_all().expect("durable");
    }
    assert!(flush()["flush_samples"].as_u64() > Some(0));
    ok(&ferry(&["tune", path(&place.mnt()), "--fast-flush", "3ms", "--reset-flush-time"]));
    assert_eq!(flush()["fast_flush_ns"], 3_000_000);
    fails(&ferry(&["tune", path(&place.mnt())]), 2, "nothing to change");
    ok(&ferry(&["umount", path(&place.mnt())]));
    fails(
        &ferry(&["tune", path(&place.mnt()), "--flush", "each"]),
        1,
        "no FerryFS is mounted here",
    );
}

#[test]
fn who_unmounts_what_was_read_only_finds_the_volume_free() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    place.mount();
    ok(&ferry(&["umount", path(&place.mnt())]));
    let inode = format!(":{} ", std::fs::metadata(place.volume()).expect("a file").ino());
    let locked =
        || std::fs::read_to_string("/proc/locks").expect("the table of locks").contains(&inode);
    let two = place.dir.path().join("mnt 2");
    std::fs::create_dir(&two).expect("a mount point");
    for _ in 0..10 {
        ok(&ferry(&[
            "mount",
            path(&place.volume()),
            path(&place.mnt()),
            "-o",
            "ro",
            "-o",
            &place.log_option(),
        ]));
        assert!(locked());
        ok(&ferry(&["umount", path(&place.mnt())]));
        assert!(!locked());
    }
    // Another reader is not waited for.
    for mnt in [&two, &place.mnt()] {
        ok(&ferry(&[
            "mount",
            path(&place.volume()),
            path(mnt),
            "-o",
            "ro",
            "-o",
            &place.log_option(),
        ]));
    }
    ok(&ferry(&["umount", path(&place.mnt())]));
    assert!(locked());
    ok(&ferry(&["umount", path(&two)]));
    assert!(!locked());
}

#[test]
fn top_ends_when_nobody_reads_it() {
    let place = Place::new();
    place.mount();
    let mnt = place.mnt();
    fails(&ferry(&["top", path(&mnt), "--interval", "0ms"]), 2, "at least 50ms");
    let script = r#"{ timeout 20 "$0" top "$1" --interval 50ms; echo "exit $?" >&2; } | head -n 1"#;
    let seen =
        Command::new("sh").args(["-c", script, FERRY, path(&mnt)]).output().expect("a shell");
    assert!(String::from_utf8_lossy(&seen.stdout).contains("inodes"), "{seen:?}");
    assert_eq!(String::from_utf8_lossy(&seen.stderr), "exit 0\n");
    ok(&ferry(&["umount", path(&mnt)]));
}

#[test]
fn the_log_is_grown_by_several_at_once() {
    let place = Place::new();
    place.mount();
    let mnt = place.mnt();
    let tune = |size: &str| {
        let mut command = Command::new(FERRY);
        command
            .args(["tune", path(&mnt), "--log-size", size])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().expect("the command runs")
    };
    // The longest takes its time; those behind it find that nothing is left to do.
    let running = ["64M", "40M", "32M", "24M"].map(tune);
    let mut grown = 0;
    for tuned in running.map(|child| child.wait_with_output().expect("it is a child")) {
        let said = String::from_utf8_lossy(&tuned.stderr);
        assert!(tuned.status.success() || said.contains("it does not shrink"), "{tuned:?}");
        grown += u32::from(tuned.status.success());
    }
    assert!(grown > 0);
    fails(&ferry(&["tune", path(&mnt), "--log-size", "64M"]), 1, "the log has 64.0 MiB already");
    ok(&ferry(&["umount", path(&mnt)]));
    ok(&ferry(&["fsck", path(&place.volume())]));
}

#[test]
fn a_volume_is_mounted_used_and_unmounted() {
    let place = Place::new();
    place.mount();
    std::fs::write(place.mnt().join("file"), "kept").expect("writable");
    ok(&ferry(&["sync", path(&place.mnt())]));
    let stats = ferry(&["stats", path(&place.mnt()), "--json"]);
    ok(&stats);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
    assert!(stats.is_object());
    ok(&ferry(&["stats", path(&place.mnt())]));

    // The holder is named to whoever wants the volume too.
    let other = place.dir.path().join("other");
    std::fs::create_dir(&other).expect("a directory");
    fails(&ferry(&["mount", path(&place.volume()), path(&other)]), 1, "in use by process");
    fails(&ferry(&["fsck", path(&place.volume())]), 8, "in use by process");

    ok(&ferry(&["umount", path(&place.mnt())]));
    // At once: the daemon has closed the volume.
    let checked = ferry(&["fsck", path(&place.volume()), "--json"]);
    ok(&checked);
    let report: serde_json::Value = serde_json::from_slice(&checked.stdout).expect("JSON");
    assert_eq!(report["clean"], serde_json::Value::Bool(true));
    ok(&ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", "ro"]));
    assert_eq!(std::fs::read(place.mnt().join("file")).expect("kept"), b"kept");
    std::fs::write(place.mnt().join("file"), "changed").expect_err("read only");
    // The volume's name will do as well.
    ok(&ferry(&["umount", path(&place.volume())]));
}

#[test]
fn a_mount_point_takes_one_volume() {
    let place = Place::new();
    place.mount();
    let (mnt, second) = (place.mnt(), place.dir.path().join("second.ferry"));
    ok(&ferry(&["mkfs", path(&second), "--size", "64M"]));
    // As mount(8) calls it, too.
    let helper = place.dir.path().join("mount.fuse.ferry");
    std::os::unix::fs::symlink(FERRY, &helper).expect("a link");
    for volume in [&second, &place.volume()] {
        fails(&ferry(&["mount", path(volume), path(&mnt)]), 1, "is mounted here already");
        let called = Command::new(&helper).args([volume, &mnt]).output().expect("the helper runs");
        fails(&called, 1, "is mounted here already");
    }
    ok(&ferry(&["scrub", path(&place.volume())]));
    ok(&ferry(&["umount", path(&place.volume())]));
    fails(&ferry(&["umount", path(&second)]), 1, "no FerryFS is mounted here");
}

#[test]
fn what_is_hidden_by_another_mount_is_not_mistaken_for_it() {
    let place = Place::new();
    place.mount();
    let (mnt, volume) = (place.mnt(), place.volume());
    ok(&Command::new("mount")
        .args(["-t", "tmpfs", "none", path(&mnt)])
        .output()
        .expect("mount runs"));
    for command in ["umount", "scrub"] {
        fails(&ferry(&[command, path(&volume)]), 1, "hidden there by none (tmpfs)");
    }
    ok(&Command::new("umount").arg(&mnt).output().expect("umount runs"));
    ok(&ferry(&["umount", path(&volume)]));
}

#[test]
fn a_busy_mount_is_not_unmounted_unless_told() {
    let place = Place::new();
    place.mount();
    let open = std::fs::File::create(place.mnt().join("open")).expect("writable");
    fails(&ferry(&["umount", path(&place.mnt())]), 1, "busy");
    ok(&ferry(&["umount", "--force", path(&place.mnt())]));
    open.sync_all().expect_err("its file system has gone");
    ok(&ferry(&["fsck", path(&place.volume())]));
}

#[test]
fn a_dead_daemons_mount_is_cleared_by_the_next() {
    let place = Place::new();
    place.mount();
    let said = ferry(&["fsck", path(&place.volume())]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let pid: String = said
        .split("process ")
        .nth(1)
        .expect("the holder")
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    ok(&Command::new("kill").args(["-9", &pid]).output().expect("kill runs"));

    let again =
        ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", &place.log_option()]);
    ok(&again);
    assert!(String::from_utf8_lossy(&again.stderr).contains("cleared the mount"), "{again:?}");
    std::fs::read_dir(place.mnt()).expect("alive");
    ok(&ferry(&["umount", path(&place.mnt())]));
}

#[test]
fn a_mount_in_the_foreground_ends_with_sigterm() {
    let place = Place::new();
    ok(&ferry(&["mkfs", path(&place.volume()), "--size", "256M"]));
    // As systemd starts it: it says when the mount can be used.
    let notify = place.dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&notify).expect("a socket");
    let mut daemon = Command::new(FERRY)
        .args(["mount", "--foreground", path(&place.volume()), path(&place.mnt())])
        .env("NOTIFY_SOCKET", &notify)
        .spawn()
        .expect("the command runs");
    let mut message = [0; 64];
    let len = socket.recv(&mut message).expect("a message");
    assert_eq!(&message[..len], b"READY=1");
    std::fs::write(place.mnt().join("file"), "kept").expect("writable");
    ok(&Command::new("kill")
        .args(["-TERM", &daemon.id().to_string()])
        .output()
        .expect("kill runs"));
    assert!(daemon.wait().expect("it ends").success());
    ok(&ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", &place.log_option()]));
    assert_eq!(std::fs::read(place.mnt().join("file")).expect("kept"), b"kept");
    ok(&ferry(&["umount", path(&place.mnt())]));
}

/// Flips bits of a volume where `what` stands in it for the first time, behind the superblocks and
/// the log.
fn spoil(volume: &Path, what: &[u8]) {
    use std::os::unix::fs::FileExt;
    let bytes = std::fs::read(volume).expect("readable");
    let at = bytes.windows(what.len()).position(|window| window == what).expect("it is there");
    let file = std::fs::OpenOptions::new().write(true).open(volume).expect("writable");
    file.write_all_at(&[bytes[at] ^ 0xff], at as u64).expect("writable");
}

#[test]
fn fsck_repairs_and_says_what_is_lost() {
    let place = Place::new();
    ok(&ferry(&["mkfs", path(&place.volume()), "--size", "64M"]));
    ok(&ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", &place.log_option()]));
    let mut data = vec![7_u8; 40_000];
    data[20_000..20_013].copy_from_slice(b"spoil me here");
    std::fs::write(place.mnt().join("file"), &data).expect("writable");
    std::fs::write(place.mnt().join("other"), "kept").expect("writable");
    let volume = place.volume();
    fails(&ferry(&["fsck", path(&volume), "--repair"]), 8, "in use by process");
    ok(&ferry(&["umount", path(&place.mnt())]));
    let run = |args: &[&str], code: i32, texts: &[&str]| {
        let output = ferry(&[&["fsck", path(&volume)], args].concat());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {output:?}");
        texts.iter().for_each(|text| assert!(said.contains(text), "{args:?}: no {text} in {said}"));
    };
    run(&["--repair"], 0, &["clean;"]);

    spoil(&volume, b"FERRYVOL");
    run(&[], 4, &["superblock-copy", "ferry fsck --repair"]);
    run(&["--repair"], 1, &["repaired superblock-copy", "clean after 1 repairs"]);
    run(&["--repair"], 0, &["clean;"]);

    spoil(&volume, b"spoil me here");
    run(&["--metadata-only"], 0, &["clean;"]);
    run(&[], 4, &["checksum", "/file"]);
    run(
        &["--repair"],
        1,
        &["repaired checksum", "/file", "lost: bytes 16384 to 20480", "known loss"],
    );
    run(&["--repair"], 0, &["known loss: bytes 16384 to 20480 of [/file"]);
    let json = ferry(&["fsck", path(&volume), "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!((&json["repaired"], &json["lost"][0]["bytes"]), (&0.into(), &4096.into()));

    ok(&ferry(&["mount", path(&volume), path(&place.mnt()), "-o", &place.log_option()]));
    assert_eq!(std::fs::read(place.mnt().join("other")).expect("unharmed"), b"kept");
    let error = std::fs::read(place.mnt().join("file")).expect_err("a part of it is lost");
    assert_eq!(error.raw_os_error(), Some(5));
    std::fs::write(place.mnt().join("file"), &data).expect("writable");
    assert!(std::fs::read(place.mnt().join("file")).expect("whole again") == data);
    ok(&ferry(&["umount", path(&place.mnt())]));
    run(&[], 0, &["clean;"]);
    for (args, read) in [(&["--json"][..], true), (&["--json", "--metadata-only"], false)] {
        let json = ferry(&[&["fsck", path(&volume)], args].concat());
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
        assert_eq!((&json["clean"], &json["data_read"]), (&true.into(), &read.into()));
    }
}

/// Makes a volume that holds a file of 100,000 bytes.
fn volume_with_a_file(place: &Place) -> Vec<u8> {
    place.mount();
    let data: Vec<u8> = (0..100_000_u32).map(|at| (at / 3) as u8).collect();
    std::fs::write(place.mnt().join("file"), &data).expect("writable");
    ok(&ferry(&["umount", path(&place.mnt())]));
    data
}

#[test]
fn a_volume_whose_front_is_zeros_is_repaired_and_never_made_anew() {
    use std::os::unix::fs::FileExt;
    let place = Place::new();
    let data = volume_with_a_file(&place);
    let (volume, mnt) = (place.volume(), place.mnt());
    let file = std::fs::OpenOptions::new().write(true).open(&volume).expect("writable");
    file.write_all_at(&vec![0; 2 << 20], 0).expect("writable");
    drop(file);
    fails(&ferry(&["mkfs", path(&volume)]), 1, "a FerryFS volume here already");
    fails(&ferry(&["mount", path(&volume), path(&mnt)]), 1, "ferry fsck --repair");
    let checked = ferry(&["fsck", path(&volume)]);
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(
        checked.status.code() == Some(4) && !said.contains("mkfs") && checked.stderr.is_empty(),
        "{said}"
    );
    assert_eq!(ferry(&["fsck", path(&volume), "--repair"]).status.code(), Some(1));
    ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", &place.log_option()]));
    assert!(std::fs::read(mnt.join("file")).expect("readable") == data);
    ok(&ferry(&["umount", path(&mnt)]));

    // Nothing is left: no advice to make a volume.
    std::fs::write(&volume, vec![0; 20 << 20]).expect("writable");
    let nothing = ferry(&["fsck", path(&volume)]);
    fails(&nothing, 8, "it is empty");
    assert!(!String::from_utf8_lossy(&nothing.stderr).contains("mkfs"));
}

#[test]
fn a_volume_that_was_cut_off_gets_its_length_again() {
    let place = Place::new();
    let data = volume_with_a_file(&place);
    let (volume, mnt) = (place.volume(), place.mnt());
    let length = std::fs::metadata(&volume).expect("there").len();
    let file = std::fs::OpenOptions::new().write(true).open(&volume).expect("writable");
    file.set_len(200 << 20).expect("it can be cut");
    drop(file);
    let advice = format!("truncate -s {length} {}", volume.display());
    fails(&ferry(&["fsck", path(&volume)]), 8, &advice);
    let repaired = ferry(&["fsck", path(&volume), "--repair"]);
    let said = String::from_utf8_lossy(&repaired.stdout).into_owned();
    assert_eq!(repaired.status.code(), Some(1), "{repaired:?}");
    assert!(
        said.contains("repaired cut-off") && said.contains("lost: what was stored from byte"),
        "{said}"
    );
    assert_eq!(std::fs::metadata(&volume).expect("there").len(), length);
    ok(&ferry(&["fsck", path(&volume)]));
    ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", &place.log_option()]));
    assert!(std::fs::read(mnt.join("file")).expect("readable") == data, "it lay before the cut");
    ok(&ferry(&["umount", path(&mnt)]));
}

#[test]
fn neighbouring_bad_blocks_are_one_line() {
    use std::os::unix::fs::FileExt;
    let place = Place::new();
    let data = volume_with_a_file(&place);
    let bytes = std::fs::read(place.volume()).expect("readable");
    let at = bytes.windows(64).position(|window| window == &data[..64]).expect("it is there");
    let file = std::fs::OpenOptions::new().write(true).open(place.volume()).expect("writable");
    file.write_all_at(&[0x55; 5 * 4096], at as u64 + 4096).expect("writable");
    let checked = ferry(&["fsck", path(&place.volume())]);
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.code() == Some(4) && checked.stderr.is_empty(), "{checked:?}");
    let range = format!("at byte 4096, {} bytes", 5 * 4096);
    assert!(
        said.contains(&range) && said.lines().count() == 3,
        "a range, what it means, the verdict: {said}"
    );
}

/// A limit on the length of files stands for a file system that has one.
#[test]
fn a_size_that_the_host_refuses_leaves_what_was_there() {
    let place = Place::new();
    let (new, old) = (place.volume(), place.dir.path().join("old"));
    std::fs::write(&old, "kept").expect("writable");
    for (volume, force) in [(&new, ""), (&old, "--force")] {
        // In units of 1 KiB. The signal that comes with it is ignored, as where the file system
        // refuses.
        let limited = "trap '' XFSZ; ulimit -f 102400; exec \"$0\" mkfs \"$1\" --size 200M $2";
        let made = Command::new("bash").args(["-c", limited, FERRY, path(volume), force]).output();
        fails(&made.expect("a shell"), 1, "takes no file of 200");
    }
    assert!(!new.exists(), "half a volume is left over");
    assert_eq!(std::fs::read(&old).expect("there"), b"kept");
}

#[test]
fn mkfs_with_an_option_that_cannot_be_leaves_what_it_would_overwrite() {
    let dir = TempDir::new().expect("a directory");
    let (data, absent, set) =
        (dir.path().join("data"), dir.path().join("absent"), dir.path().join("set"));
    let contents = vec![7; 5 << 20];
    std::fs::write(&data, &contents).expect("it fits");
    for bad in [["--size", "64M", "--log-size", "64M"], ["--size", "1M", "--log-size", "1M"]] {
        fails(&ferry(&[&["mkfs", path(&data), "--force"], &bad[..]].concat()), 1, "a ");
        fails(&ferry(&[&["mkfs", path(&absent)], &bad[..]].concat()), 1, "a ");
        let of_files =
            ["mkfs", path(&set), "--force", "--device", "mirror", path(&data), path(&absent)];
        fails(&ferry(&[&of_files[..], &bad[..]].concat()), 1, "a ");
    }
    fails(
        &ferry(&["mkfs", path(&data), "--force", "--log-size", "1K"]),
        1,
        "a log of this volume has between",
    );
    assert!(std::fs::read(&data).expect("it is there") == contents);
    assert!(!absent.exists() && !set.exists());
}

#[test]
fn mkfs_says_that_a_volume_may_come_to_need_more_than_there_is() {
    let dir = TempDir::new().expect("a directory");
    let host = rustix::fs::statvfs(dir.path()).expect("it is there");
    let more = (host.f_bavail * host.f_frsize + (64 << 30)).to_string();
    for (size, warns) in [(more.as_str(), true), ("64M", false)] {
        let made = ferry(&["mkfs", path(&dir.path().join(size)), "--size", size]);
        ok(&made);
        let said = String::from_utf8_lossy(&made.stderr);
        assert_eq!(said.contains("the file system on which it lies has"), warns, "{said}");
    }
}

#[test]
fn no_file_is_made_in_the_place_of_a_device() {
    let absent = Path::new("/dev/ferry-no-such-device");
    for args in [vec!["mkfs", path(absent)], vec!["mkfs", path(absent), "--force", "--size", "64M"]]
    {
        fails(&ferry(&args), 1, "no file is made below /dev");
        assert!(!absent.exists());
    }
    let place = Place::new();
    let volume = place.volume();
    let set = ["mkfs", path(&volume), "--size", "64M", "--device", "linear", path(absent)];
    fails(&ferry(&set), 1, "no file is made below /dev");
    assert!(!absent.exists() && !volume.exists());
}

/// The process that has a volume open.
fn holder(volume: &Path) -> String {
    let said = ferry(&["fsck", path(volume)]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    said.split("process ")
        .nth(1)
        .expect("the holder")
        .chars()
        .take_while(char::is_ascii_digit)
        .collect()
}

fn device_state(mountpoint: &Path, device: &Path) -> Option<String> {
    let stats = ferry(&["stats", path(mountpoint), "--json"]);
    ok(&stats);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
    stats["devices"][path(device)]["state"].as_str().map(str::to_owned)
}

#[test]
fn a_mirror_outlives_a_killed_daemon_and_a_lost_side_and_gets_a_new_one() {
    let place = Place::new();
    let dir = place.dir.path().canonicalize().expect("it exists");
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.join(name));
    let (volume, mnt, log) = (place.volume(), place.mnt(), place.log_option());
    let mount = || ferry(&["mount", path(&volume), path(&mnt), "-o", &log]);
    let mkfs = ["mkfs", path(&volume), "--size", "256M", "--device", "mirror", path(&a), path(&b)];
    ok(&ferry(&mkfs));
    fails(&ferry(&mkfs), 1, "--force");
    fails(&ferry(&["fsck", path(&a)]), 8, "one component of a composite volume");

    ok(&mount());
    let file = |n: usize| mnt.join(format!("file {n}"));
    let contents = |n: usize| vec![n as u8; 1000 * n];
    (1..40).for_each(|n| std::fs::write(file(n), contents(n)).expect("writable"));
    ok(&ferry(&["sync", path(&mnt)]));
    std::fs::write(file(40), contents(40)).expect("writable");
    ok(&Command::new("kill").args(["-9", &holder(&volume)]).output().expect("kill runs"));

    // One side is gone, the other goes on without it.
    std::fs::rename(&b, dir.join("lost")).expect("it is a file");
    let degraded = mount();
    ok(&degraded);
    assert!(String::from_utf8_lossy(&degraded.stderr).contains("degraded"), "{degraded:?}");
    let all_there = || {
        (1..40).for_each(|n| assert!(std::fs::read(file(n)).expect("kept") == contents(n), "{n}"))
    };
    all_there();
    assert_eq!(device_state(&mnt, &a).as_deref(), Some("active"));
    assert_eq!(device_state(&mnt, &b).as_deref(), Some("absent or stale"));
    std::fs::write(file(41), contents(41)).expect("writable");

    let replace = |old: &Path, new: &Path| ferry(&["replace", path(&volume), path(old), path(new)]);
    fails(&replace(&c, &dir.join("new")), 1, "not a side of");
    std::fs::write(&c, "foreign").expect("writable");
    fails(&replace(&b, &c), 1, "holds data");
    fails(&replace(&b, &a), 1, "in use, by this volume");
    fails(&replace(&b, &dir), 1, "neither a regular file");
    fails(&replace(&b, &dir.join("no/such/place")), 1, "cannot open or make it");
    std::fs::remove_file(&c).expect("there");
    ok(&replace(&b, &c));
    assert_eq!(device_state(&mnt, &c).as_deref(), Some("active"));
    ok(&ferry(&["umount", path(&mnt)]));
    let said_by_fsck = |option: &[&str]| {
        let checked = ferry(&[&["fsck", path(&volume)], option].concat());
        ok(&checked);
        String::from_utf8_lossy(&checked.stdout).into_owned()
    };
    assert!(!said_by_fsck(&[]).contains("mirror"));

    // The new side alone has everything; the lost one alone is refused.
    std::fs::rename(&a, dir.join("gone")).expect("it is a file");
    ok(&mount());
    all_there();
    assert!(std::fs::read(file(41)).expect("kept") == contents(41));
    ok(&ferry(&["umount", path(&mnt)]));
    let said = said_by_fsck(&[]);
    assert!(said.contains(path(&a)) && said.contains("clean, the mirror is degraded"), "{said}");
    let said: serde_json::Value = serde_json::from_str(&said_by_fsck(&["--json"])).expect("JSON");
    assert_eq!(
        said["missing_sides"].as_array().expect("a list"),
        &[path(&a).into()] as &[serde_json::Value]
    );
    std::fs::remove_file(&c).expect("there");
    std::fs::rename(dir.join("lost"), &c).expect("it is a file");
    let stale = mount();
    assert_eq!(stale.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&stale.stderr).contains("only stale sides"), "{stale:?}");
}

#[test]
fn linear_and_striped_volumes_need_all_of_their_components() {
    for kind in ["linear", "stripe"] {
        let place = Place::new();
        let dir = place.dir.path().canonicalize().expect("it exists");
        let parts = ["a", "b", "c"].map(|name| dir.join(name));
        let (volume, mnt) = (place.volume(), place.mnt());
        let mut mkfs = vec!["mkfs", path(&volume), "--size", "256M", "--device", kind];
        mkfs.extend(parts.iter().map(|part| path(part)));
        ok(&ferry(&mkfs));
        ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", &place.log_option()]));
        let contents: Vec<u8> = (0..100_000_000_u32).map(|n| (n >> 9) as u8).collect();
        std::fs::write(mnt.join("file"), &contents).expect("writable");
        assert_eq!(device_state(&mnt, &parts[1]).as_deref(), Some("active"));
        fails(&ferry(&["replace", path(&volume), path(&parts[1]), "new"]), 1, "not a mirror");
        ok(&ferry(&["umount", path(&mnt)]));
        ok(&ferry(&["fsck", path(&volume)]));
        ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", "ro"]));
        assert!(std::fs::read(mnt.join("file")).expect("kept") == contents);
        ok(&ferry(&["umount", path(&mnt)]));
        std::fs::rename(&parts[1], dir.join("lost")).expect("it is a file");
        fails(&ferry(&["fsck", path(&volume)]), 8, "needs all of its components");
        let mounted = ferry(&["mount", path(&volume), path(&mnt)]);
        assert!(
            String::from_utf8_lossy(&mounted.stderr).contains("needs all of its components"),
            "{mounted:?}"
        );
    }
}

#[test]
fn a_mirror_that_nobody_has_mounted_gets_a_new_side_too() {
    let place = Place::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| place.dir.path().join(name));
    let volume = place.volume();
    ok(&ferry(&["mkfs", path(&volume), "--size", "64M", "--device", "mirror", path(&a), path(&b)]));
    let replace = |old: &Path, new: &Path| ferry(&["replace", path(&volume), path(old), path(new)]);
    std::fs::write(&c, "foreign").expect("writable");
    for (old, new, text) in [
        (&c, &a, "not a side of this mirror"),
        (&a, &a, "in use by this very volume"),
        (&a, &b, "in use by this very volume"),
        (&a, &c, "it holds data, which is left alone: remove it"),
        (&a, &place.mnt(), "neither a regular file nor a block device"),
        (&a, &place.mnt().join("no/such"), "No such file or directory"),
    ] {
        fails(&replace(old, new), 1, text);
    }
    std::fs::remove_file(&c).expect("there");
    ok(&replace(&a, &c));
    fails(&replace(&a, &b), 1, "not a side of this mirror");
    std::fs::remove_file(&a).expect("there");
    std::fs::remove_file(&b).expect("there");
    ok(&ferry(&["fsck", path(&volume)]));
}
