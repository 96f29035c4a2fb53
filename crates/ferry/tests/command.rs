//! The command as a user calls it: exit codes, messages, and mounts (these need root and /dev/fuse).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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
    fails(&ferry(&["mount", path(&place.volume()), "/no/such/place", "--create"]), 1, "/no/such/place");
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
    let pid: String =
        said.split("process ").nth(1).expect("the holder").chars().take_while(char::is_ascii_digit).collect();
    ok(&Command::new("kill").args(["-9", &pid]).output().expect("kill runs"));

    let again = ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", &place.log_option()]);
    ok(&again);
    assert!(String::from_utf8_lossy(&again.stderr).contains("cleared the mount"), "{again:?}");
    std::fs::read_dir(place.mnt()).expect("alive");
    ok(&ferry(&["umount", path(&place.mnt())]));
}

#[test]
fn the_null_file_system_is_mounted_like_any_other() {
    let place = Place::new();
    ok(&ferry(&["bench", "null", path(&place.mnt()), "-o", &place.log_option()]));
    std::fs::write(place.mnt().join("file"), "in memory").expect("writable");
    assert_eq!(std::fs::read(place.mnt().join("file")).expect("readable"), b"in memory");
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
    ok(&Command::new("kill").args(["-TERM", &daemon.id().to_string()]).output().expect("kill runs"));
    assert!(daemon.wait().expect("it ends").success());
    ok(&ferry(&["mount", path(&place.volume()), path(&place.mnt()), "-o", &place.log_option()]));
    assert_eq!(std::fs::read(place.mnt().join("file")).expect("kept"), b"kept");
    ok(&ferry(&["umount", path(&place.mnt())]));
}
