//! Snapshots of a volume in one file (these need root, /dev/fuse and mkfs.xfs, of Debian's package
//! xfsprogs).

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

/// A directory on an XFS of its own, and two mount points, which no mount outlives.
struct Host(TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(TempDir::new().expect("a directory"));
        for name in ["xfs", "first", "second"] {
            fs::create_dir(host.at(name)).expect("a mount point");
        }
        let image = File::create(host.at("image")).expect("an image");
        image.set_len(1 << 30).expect("a sparse image");
        let mut made = Command::new("mkfs.xfs");
        let made = made.args(["-q", "-m", "reflink=1"]).arg(host.at("image")).output();
        ok(&made.expect("mkfs.xfs is missing: as root: apt-get install xfsprogs"));
        let mount = ["-o", "loop", "image", "xfs"];
        let mount = Command::new("mount").args(mount).current_dir(host.0.path()).output();
        ok(&mount.expect("mount runs"));
        host
    }

    /// With a volume, which is mounted on `first`.
    fn mounted() -> Self {
        let host = Self::new();
        ok(&host.ferry(&["mkfs", "xfs/vol", "--size", "256M"]));
        ok(&host.ferry(&["mount", "xfs/vol", "first"]));
        host
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn ferry(&self, args: &[&str]) -> Output {
        let mut bounded = Command::new("timeout");
        bounded.args(["--signal=KILL", "60", FERRY]).args(args);
        bounded.current_dir(self.0.path()).output().expect("the command runs")
    }

    fn kill_daemon(&self, mount: &str) {
        let stats = self.ferry(&["stats", mount, "--json"]);
        ok(&stats);
        let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).expect("JSON");
        let pid = stats["fuse"]["daemon"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.and_then(Pid::from_raw).expect("the daemon's number");
        kill_process(pid, Signal::KILL).expect("it can be killed");
        // Waits until it has let go of the volume.
        while rustix::process::test_kill_process(pid).is_ok() {
            thread::yield_now();
        }
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.at("xfs/vol.snapshots")).expect("it is there");
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry.expect("it can be read").file_name().into_string().expect("UTF-8")
        };
        entries.map(name).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for mount in ["first", "second"] {
            self.ferry(&["umount", "--force", mount]);
        }
        drop(Command::new("umount").arg(self.at("xfs")).output());
    }
}

fn ok(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn fails(output: &Output, code: i32, texts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    let all = texts.iter().all(|wanted| said.contains(wanted));
    assert!(output.status.code() == Some(code) && all, "{output:?} lacks one of {texts:?}");
}

#[test]
fn a_snapshot_of_a_file_has_what_was_synced_and_stays_as_it_was() {
    let host = Host::mounted();
    let (stop, synced) = (AtomicBool::new(false), AtomicUsize::new(0));
    let line = |n: usize| format!("file {n} has this line\n").repeat(200).into_bytes();
    let before = thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..).take_while(|_| !stop.load(Ordering::Acquire)) {
                let mut file = File::create(host.at(&format!("first/{n}"))).expect("a file");
                file.write_all(&line(n)).expect("it is written");
                file.sync_all().expect("it is synced");
                synced.store(n + 1, Ordering::Release);
            }
        });
        while synced.load(Ordering::Acquire) < 50 {
            thread::yield_now();
        }
        let before = synced.load(Ordering::Acquire);
        let made = host.ferry(&["snapshot", "create", "first", "one"]);
        stop.store(true, Ordering::Release);
        ok(&made);
        before
    });
    host.kill_daemon("first");
    ok(&host.ferry(&["fsck", "xfs/vol@one"]));
    ok(&host.ferry(&["mount", "xfs/vol", "first"]));
    ok(&host.ferry(&["mount", "xfs/vol@one", "second"]));
    let bytes = fs::read(host.at("xfs/vol.snapshots/one")).expect("the snapshot's file");
    for n in 0..synced.load(Ordering::Acquire) {
        assert_eq!(fs::read(host.at(&format!("first/{n}"))).expect("synced"), line(n));
        fs::write(host.at(&format!("first/{n}")), b"overwritten").expect("it can be written");
    }
    ok(&host.ferry(&["sync", "first"]));
    for n in 0..before {
        assert_eq!(fs::read(host.at(&format!("second/{n}"))).expect("in the snapshot"), line(n));
    }
    let refused = File::create(host.at("second/new")).expect_err("it is read only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    let delete = || host.ferry(&["snapshot", "delete", "first", "one"]);
    fails(&delete(), 1, &["mounted on this machine"]);
    ok(&host.ferry(&["umount", "second"]));
    assert!(fs::read(host.at("xfs/vol.snapshots/one")).expect("the file") == bytes);
    fails(&host.ferry(&["fsck", "--repair", "xfs/vol@one"]), 8, &["never changes"]);
    fails(&host.ferry(&["mkfs", "--force", "xfs/vol@one"]), 2, &["never changes"]);
    let mut inside = Command::new(FERRY);
    let inside = inside.args(["fsck", "--repair", "one"]).current_dir(host.at("xfs/vol.snapshots"));
    fails(&inside.output().expect("the command runs"), 8, &["never changes"]);
    for more in [&[][..], &["-o", "snapshot=two"]] {
        let volume = if more.is_empty() { "xfs/vol@two" } else { "xfs/vol" };
        let absent = host.ferry(&[&["mount", volume, "second"], more].concat());
        fails(&absent, 1, &["there is no such snapshot"]);
    }
    fails(&host.ferry(&["mount", "--create", "xfs/vol@two", "second"]), 2, &["never changes"]);
    ok(&delete());
    assert!(host.names().is_empty());
    ok(&host.ferry(&["umount", "first"]));
    ok(&host.ferry(&["fsck", "xfs/vol"]));
}

#[test]
fn one_of_two_snapshots_of_a_file_that_get_one_name_is_made() {
    let host = Host::mounted();
    // What a killed command leaves.
    let create = || host.ferry(&["snapshot", "create", "xfs/vol", "one"]);
    ok(&host.ferry(&["snapshot", "create", "xfs/vol", "older"]));
    fs::write(host.at("xfs/vol.snapshots/@"), b"half").expect("it can be written");
    let made = thread::scope(|scope| {
        let both = [scope.spawn(create), scope.spawn(create)];
        both.map(|one| one.join().expect("no panic"))
    });
    let lost = made.iter().filter(|one| !one.status.success()).collect::<Vec<_>>();
    assert_eq!(lost.len(), 1, "{made:?}");
    fails(lost[0], 1, &["\"one\" already"]);
    let mut names = host.names();
    names.sort();
    assert_eq!(names, ["older", "one"]);
    let mode = fs::metadata(host.at("xfs/vol.snapshots")).expect("it is there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o700);
    let list = host.ferry(&["snapshot", "list", "first", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).expect("JSON");
    assert_eq!(list[1]["name"], "one");
    fails(&host.ferry(&["snapshot", "delete", "first", "two"]), 1, &["there are older, one"]);
    ok(&host.ferry(&["snapshot", "create", "first", "--schedule", "daily=7"]));
    assert_eq!(host.names().len(), 3);
}

#[test]
fn a_full_host_leaves_no_half_snapshot_and_a_whole_volume() {
    let host = Host::mounted();
    fs::write(host.at("first/file"), b"data").expect("it is written");
    ok(&host.ferry(&["umount", "first"]));
    let mut rest = File::create(host.at("xfs/rest")).expect("a file");
    for size in [1 << 20, 4096, 1] {
        while rest.write_all(&vec![1; size]).and_then(|()| rest.sync_all()).is_ok() {}
    }
    let made = host.ferry(&["snapshot", "create", "xfs/vol", "one"]);
    fails(&made, 1, &["No space left"]);
    assert!(!host.at("xfs/vol.snapshots").exists() || host.names().is_empty());
    drop(rest);
    fs::remove_file(host.at("xfs/rest")).expect("it can be removed");
    ok(&host.ferry(&["fsck", "xfs/vol"]));
    ok(&host.ferry(&["snapshot", "create", "xfs/vol", "one"]));
    ok(&host.ferry(&["fsck", "xfs/vol@one"]));
}
