//! The command as a user calls it: exit codes, messages, and mounts (these need root and
//! /dev/fuse).

#[path = "shared/holder.rs"]
mod holder;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use holder::holder_of;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

/// A directory that no mount outlives.
struct TestVolume {
    dir: TempDir,
}

impl TestVolume {
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

impl Drop for TestVolume {
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
    let fixture = TestVolume::new();
    let unknown = ferry(&["mount", "v", path(&fixture.mnt()), "-o", "nonsense"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("nonsense"));
    for (options, text) in [("ro,rw", "contradict"), ("commit_interval=0", "at least 1ms")] {
        let refused = ferry(&["mount", "v", path(&fixture.mnt()), "-o", options]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains(text), "{refused:?}");
    }
}

/// As mount(8) does without the helper: fuse's own one runs the file system's type as a program.
#[test]
fn a_mount_without_the_helper_says_what_must_be_installed() {
    for volume in ["/srv/data.ferry", "ferry://files.example.org/", "s3://bucket/data"] {
        let called = ferry(&[volume, "/mnt", "-o", "rw,dev,suid"]);
        fails(&called, 2, "mount.fuse.ferry");
        assert!(String::from_utf8_lossy(&called.stderr).contains("scripts/install"), "{called:?}");
    }
    assert!(String::from_utf8_lossy(&ferry(&["mnt", "x"]).stderr).contains("unrecognized"));
}

#[test]
fn a_missing_file_is_named() {
    let fixture = TestVolume::new();
    fails(&ferry(&["mount", "/no/such/volume", path(&fixture.mnt())]), 1, "/no/such/volume");
    fails(
        &ferry(&["mount", path(&fixture.volume()), "/no/such/place", "--create"]),
        1,
        "/no/such/place",
    );
    assert!(!fixture.volume().exists(), "a mount that cannot be makes no volume");
    fails(&ferry(&["mount", "host:/dir", path(&fixture.mnt())]), 1, "ferry://host/dir");
    let as_nfs = ferry(&["mount", "host:/", path(&fixture.mnt()), "-o", "tls=/etc/ferryfs/laptop"]);
    fails(&as_nfs, 2, "only: write ferry://host/");
    fails(&ferry(&["fsck", "/no/such/volume"]), 8, "/no/such/volume");
    fails(&ferry(&["umount", path(&fixture.mnt())]), 1, "no FerryFS is mounted here");
    fails(&ferry(&["sync", path(&fixture.mnt())]), 1, "no FerryFS is mounted here");
    fails(&ferry(&["stats", path(&fixture.mnt())]), 1, "no FerryFS is mounted here");
}

#[test]
fn only_an_empty_file_becomes_a_volume() {
    let fixture = TestVolume::new();
    std::fs::write(fixture.volume(), "foreign").expect("writable");
    let volume = fixture.volume();
    fails(&ferry(&["mkfs", path(&volume), "--size", "64M"]), 1, "--force");
    assert_eq!(std::fs::read(&volume).expect("still there"), b"foreign");
    fails(&ferry(&["mount", path(&volume), path(&fixture.mnt())]), 1, path(&volume));

    ok(&ferry(&["mkfs", path(&volume), "--size", "64M", "--force"]));
    ok(&ferry(&["fsck", path(&volume)]));
    fails(&ferry(&["mkfs", path(&volume)]), 1, "--force");
    fails(&ferry(&["mkfs", path(&fixture.dir.path().join("tiny")), "--size", "1M"]), 1, "16 MiB");
    assert!(!fixture.dir.path().join("tiny").exists(), "half a volume is left over");
}

#[test]
fn a_file_that_is_no_volume_is_refused_with_its_kind() {
    let fixture = TestVolume::new();
    let at = |name: &str| fixture.dir.path().join(name);
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
            fails(&ferry(&["mount", path(&file), path(&fixture.mnt())]), 1, text);
        }
        if name != "absent" && name != "mnt" {
            fails(&ferry(&["scrub", path(&file)]), 8, text);
            fails(&ferry(&["replace", path(&file), "a", "b"]), 1, "not a mirror");
        }
    }
    fails(&ferry(&["mount", path(&at("absent")), path(&fixture.mnt())]), 1, "--create");
    for size in ["0", "1K", "15M"] {
        fails(&ferry(&["mkfs", path(&at("absent")), "--size", size]), 1, "at least 16 MiB");
    }
    ok(&ferry(&["mkfs", path(&at("odd")), "--size", "67108865"]));
}

#[test]
fn a_failed_check_is_reported_in_json_too() {
    let fixture = TestVolume::new();
    fixture.mount();
    let volume = fixture.volume();
    let absent = fixture.dir.path().join("absent");
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
    fails(&ferry(&["scrub", path(&absent)]), 8, "could not check the volume");
    fails(&ferry(&["scrub", "--stop", path(&absent)]), 1, "No such file");
    fails(&ferry(&["fsck", path(&volume)]), 8, &format!("mounted on {}", fixture.mnt().display()));
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    let clean = ferry(&["fsck", path(&volume), "--metadata-only"]);
    assert!(String::from_utf8_lossy(&clean.stdout).contains("which were not read"));
    let clean = ferry(&["fsck", path(&volume)]);
    assert!(String::from_utf8_lossy(&clean.stdout).contains("which were read"));
}

#[test]
fn the_flush_policy_is_an_option_and_can_be_tuned() {
    let fixture = TestVolume::new();
    ok(&ferry(&["mkfs", path(&fixture.volume()), "--size", "256M"]));
    let options = format!("flush=delay,fast_flush=500us,{}", fixture.log_option());
    ok(&ferry(&["mount", path(&fixture.volume()), path(&fixture.mnt()), "-o", &options]));
    let flush = || {
        let stats = ferry(&["stats", path(&fixture.mnt()), "--json"]);
        ok(&stats);
        let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
        stats["flush"].clone()
    };
    assert_eq!(
        (flush()["policy"].as_str(), flush()["fast_flush_ns"].as_u64()),
        (Some("delay"), Some(500_000))
    );
    for policy in ["each", "gather", "adaptive"] {
        ok(&ferry(&["tune", path(&fixture.mnt()), "--flush", policy]));
        assert_eq!(flush()["policy"], policy);
        std::fs::write(fixture.mnt().join(policy), "kept").expect("writable");
        let file = std::fs::File::open(fixture.mnt().join(policy)).expect("readable");
        file.sync_all().expect("durable");
    }
    assert!(flush()["flush_samples"].as_u64() > Some(0));
    ok(&ferry(&["tune", path(&fixture.mnt()), "--fast-flush", "3ms", "--reset-flush-time"]));
    assert_eq!(flush()["fast_flush_ns"], 3_000_000);
    fails(&ferry(&["tune", path(&fixture.mnt())]), 2, "nothing to change");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    fails(
        &ferry(&["tune", path(&fixture.mnt()), "--flush", "each"]),
        1,
        "no FerryFS is mounted here",
    );
}

#[test]
fn a_volume_that_lies_on_a_mount_is_not_taken_for_the_volume_of_that_mount() {
    let fixture = TestVolume::new();
    fixture.mount();
    let inner = fixture.mnt().join("inner.ferry");
    ok(&ferry(&["mkfs", path(&inner), "--size", "64M"]));
    for asked in [&["trim"][..], &["tune", "--flush", "each"], &["stats"]] {
        fails(&ferry(&[asked, &[path(&inner)]].concat()), 1, "no FerryFS is mounted here");
    }
    for asked in ["profile", "space", "trace"] {
        fails(&ferry(&[asked, path(&inner)]), 1, "no mounted volume");
    }
    let scrubbed = ferry(&["scrub", path(&inner), "--json"]);
    ok(&scrubbed);
    let report: serde_json::Value = serde_json::from_slice(&scrubbed.stdout).expect("JSON");
    assert_eq!(
        report["verified"]["extents"], 0,
        "the inner volume is empty, and the outer is not: {report}"
    );
    let stats = ferry(&["stats", path(&fixture.mnt()), "--json"]);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
    assert_ne!(stats["flush"]["policy"], "each");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_volume_is_free_after_a_read_only_unmount() {
    use std::os::unix::fs::MetadataExt;
    let fixture = TestVolume::new();
    fixture.mount();
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    let inode = format!(":{} ", std::fs::metadata(fixture.volume()).expect("a file").ino());
    // The kernel shows the table in parts: a lock may be missed while others come and go.
    let table = || std::fs::read_to_string("/proc/locks").expect("the table of locks");
    let locked = || (0..10).any(|_| table().contains(&inode));
    let two = fixture.dir.path().join("mnt 2");
    std::fs::create_dir(&two).expect("a mount point");
    for _ in 0..10 {
        ok(&ferry(&[
            "mount",
            path(&fixture.volume()),
            path(&fixture.mnt()),
            "-o",
            "ro",
            "-o",
            &fixture.log_option(),
        ]));
        assert!(locked());
        ok(&ferry(&["umount", path(&fixture.mnt())]));
        assert!(!locked());
    }
    // Another reader is not waited for.
    for mnt in [&two, &fixture.mnt()] {
        ok(&ferry(&[
            "mount",
            path(&fixture.volume()),
            path(mnt),
            "-o",
            "ro",
            "-o",
            &fixture.log_option(),
        ]));
    }
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    assert!(locked());
    ok(&ferry(&["umount", path(&two)]));
    assert!(!locked());
}

#[test]
fn top_ends_when_its_reader_stops() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    fails(&ferry(&["top", path(&mnt), "--interval", "0ms"]), 2, "at least 50ms");
    let script = r#"{ timeout 20 "$0" top "$1" --interval 50ms; echo "exit $?" >&2; } | head -n 1"#;
    let seen =
        Command::new("sh").args(["-c", script, FERRY, path(&mnt)]).output().expect("a shell");
    assert!(String::from_utf8_lossy(&seen.stdout).contains("inodes"), "{seen:?}");
    assert_eq!(String::from_utf8_lossy(&seen.stderr), "exit 0\n");
    ok(&ferry(&["umount", path(&mnt)]));
}

#[test]
fn several_processes_may_grow_the_log_at_once() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    let tune = |size: &str| {
        let mut command = Command::new(FERRY);
        command
            .args(["tune", path(&mnt), "--log-size", size])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().expect("the command runs")
    };
    // The longest takes its time; those behind it find that nothing is left to do.
    // In any order: a volume of this size has no room for a fourth ring before the next checkpoint.
    let running = ["64M", "40M", "24M"].map(tune);
    let mut grown = 0;
    for tuned in running.map(|child| child.wait_with_output().expect("it is a child")) {
        let said = String::from_utf8_lossy(&tuned.stderr);
        assert!(tuned.status.success() || said.contains("it does not shrink"), "{tuned:?}");
        grown += u32::from(tuned.status.success());
    }
    assert!(grown > 0);
    fails(&ferry(&["tune", path(&mnt), "--log-size", "64M"]), 1, "the log has 64.0 MiB already");
    ok(&ferry(&["umount", path(&mnt)]));
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

#[test]
fn a_volume_is_mounted_used_and_unmounted() {
    let fixture = TestVolume::new();
    fixture.mount();
    std::fs::write(fixture.mnt().join("file"), "kept").expect("writable");
    ok(&ferry(&["sync", path(&fixture.mnt())]));
    let stats = ferry(&["stats", path(&fixture.mnt()), "--json"]);
    ok(&stats);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
    assert!(stats.is_object());
    ok(&ferry(&["stats", path(&fixture.mnt())]));

    // The message names the process that holds the volume.
    let other = fixture.dir.path().join("other");
    std::fs::create_dir(&other).expect("a directory");
    fails(&ferry(&["mount", path(&fixture.volume()), path(&other)]), 1, "in use by process");
    fails(&ferry(&["fsck", path(&fixture.volume())]), 8, "in use by process");

    ok(&ferry(&["umount", path(&fixture.mnt())]));
    // At once: the daemon has closed the volume.
    let checked = ferry(&["fsck", path(&fixture.volume()), "--json"]);
    ok(&checked);
    let report: serde_json::Value = serde_json::from_slice(&checked.stdout).expect("JSON");
    assert_eq!(report["clean"], serde_json::Value::Bool(true));
    ok(&ferry(&["mount", path(&fixture.volume()), path(&fixture.mnt()), "-o", "ro"]));
    assert_eq!(std::fs::read(fixture.mnt().join("file")).expect("kept"), b"kept");
    std::fs::write(fixture.mnt().join("file"), "changed").expect_err("read only");
    // The volume's name will do as well.
    ok(&ferry(&["umount", path(&fixture.volume())]));
}

#[test]
fn a_mount_point_takes_one_volume() {
    let fixture = TestVolume::new();
    fixture.mount();
    let (mnt, second) = (fixture.mnt(), fixture.dir.path().join("second.ferry"));
    ok(&ferry(&["mkfs", path(&second), "--size", "64M"]));
    // As mount(8) calls it, too.
    let helper = fixture.dir.path().join("mount.fuse.ferry");
    std::os::unix::fs::symlink(FERRY, &helper).expect("a link");
    for volume in [&second, &fixture.volume()] {
        fails(&ferry(&["mount", path(volume), path(&mnt)]), 1, "is mounted here already");
        let called = Command::new(&helper).args([volume, &mnt]).output().expect("the helper runs");
        fails(&called, 1, "is mounted here already");
    }
    ok(&ferry(&["scrub", path(&fixture.volume())]));
    ok(&ferry(&["umount", path(&fixture.volume())]));
    fails(&ferry(&["umount", path(&second)]), 1, "no FerryFS is mounted here");
}

#[test]
fn commands_refuse_a_mount_that_another_hides() {
    let fixture = TestVolume::new();
    fixture.mount();
    let (mnt, volume) = (fixture.mnt(), fixture.volume());
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
fn a_busy_mount_is_unmounted_only_with_lazy_or_force() {
    let fixture = TestVolume::new();
    fixture.mount();
    let open = std::fs::File::create(fixture.mnt().join("open")).expect("writable");
    fails(&ferry(&["umount", path(&fixture.mnt())]), 1, "busy");
    ok(&ferry(&["umount", "--force", path(&fixture.mnt())]));
    open.sync_all().expect_err("its file system has gone");
    ok(&ferry(&["fsck", path(&fixture.volume())]));
}

#[test]
fn the_next_mount_clears_a_dead_daemons_mount() {
    let fixture = TestVolume::new();
    fixture.mount();
    kill_mount(&fixture.volume());

    let again = ferry(&[
        "mount",
        path(&fixture.volume()),
        path(&fixture.mnt()),
        "-o",
        &fixture.log_option(),
    ]);
    ok(&again);
    assert!(String::from_utf8_lossy(&again.stderr).contains("cleared the mount"), "{again:?}");
    std::fs::read_dir(fixture.mnt()).expect("alive");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_mount_in_the_foreground_ends_with_sigterm() {
    let fixture = TestVolume::new();
    ok(&ferry(&["mkfs", path(&fixture.volume()), "--size", "256M"]));
    // As systemd starts it: it says when the mount can be used.
    let notify = fixture.dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&notify).expect("a socket");
    let mut daemon = Command::new(FERRY)
        .args(["mount", "--foreground", path(&fixture.volume()), path(&fixture.mnt())])
        .env("NOTIFY_SOCKET", &notify)
        .spawn()
        .expect("the command runs");
    let mut message = [0; 64];
    let len = socket.recv(&mut message).expect("a message");
    assert_eq!(&message[..len], b"READY=1");
    std::fs::write(fixture.mnt().join("file"), "kept").expect("writable");
    ok(&Command::new("kill")
        .args(["-TERM", &daemon.id().to_string()])
        .output()
        .expect("kill runs"));
    assert!(daemon.wait().expect("it ends").success());
    ok(&ferry(&[
        "mount",
        path(&fixture.volume()),
        path(&fixture.mnt()),
        "-o",
        &fixture.log_option(),
    ]));
    assert_eq!(std::fs::read(fixture.mnt().join("file")).expect("kept"), b"kept");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
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
    let fixture = TestVolume::new();
    ok(&ferry(&["mkfs", path(&fixture.volume()), "--size", "64M"]));
    ok(&ferry(&[
        "mount",
        path(&fixture.volume()),
        path(&fixture.mnt()),
        "-o",
        &fixture.log_option(),
    ]));
    let mut data = vec![7_u8; 40_000];
    data[20_000..20_013].copy_from_slice(b"spoil me here");
    std::fs::write(fixture.mnt().join("file"), &data).expect("writable");
    std::fs::write(fixture.mnt().join("other"), "kept").expect("writable");
    let volume = fixture.volume();
    fails(&ferry(&["fsck", path(&volume), "--repair"]), 8, "in use by process");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
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

    ok(&ferry(&["mount", path(&volume), path(&fixture.mnt()), "-o", &fixture.log_option()]));
    assert_eq!(std::fs::read(fixture.mnt().join("other")).expect("unharmed"), b"kept");
    let error = std::fs::read(fixture.mnt().join("file")).expect_err("a part of it is lost");
    assert_eq!(error.raw_os_error(), Some(5));
    std::fs::write(fixture.mnt().join("file"), &data).expect("writable");
    assert!(std::fs::read(fixture.mnt().join("file")).expect("whole again") == data);
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    run(&[], 0, &["clean;"]);
    for (args, read) in [(&["--json"][..], true), (&["--json", "--metadata-only"], false)] {
        let json = ferry(&[&["fsck", path(&volume)], args].concat());
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
        assert_eq!((&json["clean"], &json["data_read"]), (&true.into(), &read.into()));
    }
}

/// Makes a volume that holds a file of 100,000 bytes.
fn volume_with_a_file(fixture: &TestVolume) -> Vec<u8> {
    fixture.mount();
    let data: Vec<u8> = (0..100_000_u32).map(|at| (at / 3) as u8).collect();
    std::fs::write(fixture.mnt().join("file"), &data).expect("writable");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    data
}

#[test]
fn a_volume_whose_front_is_zeros_is_repaired_and_never_made_anew() {
    use std::os::unix::fs::FileExt;
    let fixture = TestVolume::new();
    let data = volume_with_a_file(&fixture);
    let (volume, mnt) = (fixture.volume(), fixture.mnt());
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
    ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", &fixture.log_option()]));
    assert!(std::fs::read(mnt.join("file")).expect("readable") == data);
    ok(&ferry(&["umount", path(&mnt)]));

    // Nothing is left: no advice to make a volume.
    std::fs::write(&volume, vec![0; 20 << 20]).expect("writable");
    let nothing = ferry(&["fsck", path(&volume)]);
    fails(&nothing, 8, "it is empty");
    assert!(!String::from_utf8_lossy(&nothing.stderr).contains("mkfs"));
}

#[test]
fn repair_restores_the_length_of_a_truncated_volume() {
    let fixture = TestVolume::new();
    let data = volume_with_a_file(&fixture);
    let (volume, mnt) = (fixture.volume(), fixture.mnt());
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
    ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", &fixture.log_option()]));
    assert!(std::fs::read(mnt.join("file")).expect("readable") == data, "it lay before the cut");
    ok(&ferry(&["umount", path(&mnt)]));
}

#[test]
fn neighbouring_bad_blocks_are_one_line() {
    use std::os::unix::fs::FileExt;
    let fixture = TestVolume::new();
    let data = volume_with_a_file(&fixture);
    let bytes = std::fs::read(fixture.volume()).expect("readable");
    let at = bytes.windows(64).position(|window| window == &data[..64]).expect("it is there");
    let file = std::fs::OpenOptions::new().write(true).open(fixture.volume()).expect("writable");
    file.write_all_at(&[0x55; 5 * 4096], at as u64 + 4096).expect("writable");
    let checked = ferry(&["fsck", path(&fixture.volume())]);
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
fn mkfs_with_a_size_that_the_host_refuses_keeps_the_file() {
    let fixture = TestVolume::new();
    let (new, old) = (fixture.volume(), fixture.dir.path().join("old"));
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
fn mkfs_with_an_impossible_option_keeps_the_file() {
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
fn mkfs_warns_if_the_volume_may_outgrow_the_host() {
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
fn no_file_is_made_where_a_device_is_named() {
    let absent = Path::new("/dev/ferry-no-such-device");
    for args in [vec!["mkfs", path(absent)], vec!["mkfs", path(absent), "--force", "--size", "64M"]]
    {
        fails(&ferry(&args), 1, "no file is made below /dev");
        assert!(!absent.exists());
    }
    let fixture = TestVolume::new();
    let volume = fixture.volume();
    let set = ["mkfs", path(&volume), "--size", "64M", "--device", "linear", path(absent)];
    fails(&ferry(&set), 1, "no file is made below /dev");
    assert!(!absent.exists() && !volume.exists());
    let sides = ["a", "b"].map(|side| volume.with_extension(side));
    let [a, b] = [path(&sides[0]), path(&sides[1])];
    ok(&ferry(&["mkfs", path(&volume), "--size", "64M", "--device", "mirror", a, b]));
    let replace = ["replace", path(&volume), a, path(absent)];
    fails(&ferry(&replace), 1, "no file is made below /dev");
    assert!(!absent.exists());
}

/// The process that has a volume open.
/// Kills the daemon of a volume's mount, and the process that would start another one.
fn kill_mount(volume: &Path) {
    let said = ferry(&["fsck", path(volume)]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let daemon = said.split("process ").nth(1).expect("it is in use");
    let daemon: String = daemon.chars().take_while(char::is_ascii_digit).collect();
    let daemon = daemon.parse().ok().and_then(Pid::from_raw).expect("a number");
    for process in [holder_of(daemon), daemon] {
        kill_process(process, Signal::KILL).expect("it is ours");
    }
}

fn device_state(mountpoint: &Path, device: &Path) -> Option<String> {
    let stats = ferry(&["stats", path(mountpoint), "--json"]);
    ok(&stats);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
    stats["devices"][path(device)]["state"].as_str().map(str::to_owned)
}

#[test]
fn a_mirror_outlives_a_killed_daemon_and_a_lost_side_and_gets_a_new_one() {
    let fixture = TestVolume::new();
    let dir = fixture.dir.path().canonicalize().expect("it exists");
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.join(name));
    let (volume, mnt, log) = (fixture.volume(), fixture.mnt(), fixture.log_option());
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
    kill_mount(&volume);

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
        let fixture = TestVolume::new();
        let dir = fixture.dir.path().canonicalize().expect("it exists");
        let parts = ["a", "b", "c"].map(|name| dir.join(name));
        let (volume, mnt) = (fixture.volume(), fixture.mnt());
        let mut mkfs = vec!["mkfs", path(&volume), "--size", "256M", "--device", kind];
        mkfs.extend(parts.iter().map(|part| path(part)));
        ok(&ferry(&mkfs));
        ok(&ferry(&["mount", path(&volume), path(&mnt), "-o", &fixture.log_option()]));
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
fn replace_rebuilds_a_side_of_an_unmounted_mirror() {
    let fixture = TestVolume::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| fixture.dir.path().join(name));
    let volume = fixture.volume();
    ok(&ferry(&["mkfs", path(&volume), "--size", "64M", "--device", "mirror", path(&a), path(&b)]));
    let replace = |old: &Path, new: &Path| ferry(&["replace", path(&volume), path(old), path(new)]);
    std::fs::write(&c, "foreign").expect("writable");
    for (old, new, text) in [
        (&c, &a, "not a side of this mirror"),
        (&a, &a, "in use by this very volume"),
        (&a, &b, "in use by this very volume"),
        (&a, &c, "it holds data, which is left alone: remove it"),
        (&a, &fixture.mnt(), "neither a regular file nor a block device"),
        (&a, &fixture.mnt().join("no/such"), "No such file or directory"),
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
