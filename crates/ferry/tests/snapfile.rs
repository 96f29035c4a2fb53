//! Snapshots of a volume in one file (these need root, /dev/fuse, mkfs.xfs and mkfs.btrfs, of
//! Debian's packages xfsprogs and btrfs-progs).

#[path = "shared/holder.rs"]
mod holder;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use ferry_device::{BlockDevice, FileDevice, OpenMode};
use ferry_env::Env;
use ferry_fs::volume::read_superblock;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use holder::holder_of;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

/// How a file system is made on which files share blocks.
const XFS: &[&str] = &["mkfs.xfs", "-q", "-m", "reflink=1"];
const BTRFS: &[&str] = &["mkfs.btrfs", "-q"];

/// A directory on a file system of its own, and two mount points, which no mount outlives.
struct Host(TempDir);

impl Host {
    fn new(made: &[&str]) -> Self {
        let host = Self(TempDir::new().expect("a directory"));
        for name in ["host", "first", "second"] {
            fs::create_dir(host.at(name)).expect("a mount point");
        }
        let image = File::create(host.at("image")).expect("an image");
        image.set_len(1 << 30).expect("a sparse image");
        let mkfs = Command::new(made[0]).args(&made[1..]).arg(host.at("image")).output();
        ok(&mkfs.expect("it is missing: as root: apt-get install xfsprogs btrfs-progs"));
        let mount = ["-o", "loop", "image", "host"];
        let mount = Command::new("mount").args(mount).current_dir(host.0.path()).output();
        ok(&mount.expect("mount runs"));
        host
    }

    /// On XFS, with a volume, which is mounted on `first`.
    fn mounted() -> Self {
        Self::mounted_on(XFS)
    }

    fn mounted_on(made: &[&str]) -> Self {
        let host = Self::new(made);
        ok(&host.ferry(&["mkfs", "host/vol", "--size", "256M"]));
        ok(&host.ferry(&["mount", "host/vol", "first"]));
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
        // The daemon ends with its holder.
        kill_process(holder_of(pid), Signal::KILL).expect("it can be killed");
        // Waits until it has let go of the volume.
        while rustix::process::test_kill_process(pid).is_ok() {
            thread::yield_now();
        }
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.at("host/vol.snapshots")).expect("it is there");
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
        drop(Command::new("umount").arg(self.at("host")).output());
    }
}

/// The test is for each file system on which files share blocks.
fn on_each(test: impl Fn(Host)) {
    [XFS, BTRFS].into_iter().for_each(|made| test(Host::mounted_on(made)));
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
    on_each(|host| {
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
        ok(&host.ferry(&["fsck", "host/vol@one"]));
        ok(&host.ferry(&["mount", "host/vol", "first"]));
        ok(&host.ferry(&["mount", "host/vol@one", "second"]));
        let bytes = fs::read(host.at("host/vol.snapshots/one")).expect("the snapshot's file");
        for n in 0..synced.load(Ordering::Acquire) {
            assert_eq!(fs::read(host.at(&format!("first/{n}"))).expect("synced"), line(n));
            fs::write(host.at(&format!("first/{n}")), b"overwritten").expect("it can be written");
        }
        ok(&host.ferry(&["sync", "first"]));
        for n in 0..before {
            assert_eq!(
                fs::read(host.at(&format!("second/{n}"))).expect("in the snapshot"),
                line(n)
            );
        }
        let refused = File::create(host.at("second/new")).expect_err("it is read only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        let delete = || host.ferry(&["snapshot", "delete", "first", "one"]);
        fails(&delete(), 1, &["mounted on this machine"]);
        ok(&host.ferry(&["umount", "second"]));
        assert!(fs::read(host.at("host/vol.snapshots/one")).expect("the file") == bytes);
        fails(&host.ferry(&["fsck", "--repair", "host/vol@one"]), 8, &["never changes"]);
        fails(&host.ferry(&["mkfs", "--force", "host/vol@one"]), 2, &["never changes"]);
        let mut inside = Command::new(FERRY);
        let inside =
            inside.args(["fsck", "--repair", "one"]).current_dir(host.at("host/vol.snapshots"));
        fails(&inside.output().expect("the command runs"), 8, &["never changes"]);
        for more in [&[][..], &["-o", "snapshot=two"]] {
            let volume = if more.is_empty() { "host/vol@two" } else { "host/vol" };
            let absent = host.ferry(&[&["mount", volume, "second"], more].concat());
            fails(&absent, 1, &["there is no such snapshot"]);
        }
        fails(&host.ferry(&["mount", "--create", "host/vol@two", "second"]), 2, &["never changes"]);
        ok(&delete());
        assert!(host.names().is_empty());
        ok(&host.ferry(&["umount", "first"]));
        ok(&host.ferry(&["fsck", "host/vol"]));
    });
}

#[test]
fn one_of_two_snapshots_of_a_file_that_get_one_name_is_made() {
    let host = Host::mounted();
    let create = || host.ferry(&["snapshot", "create", "host/vol", "one"]);
    ok(&host.ferry(&["snapshot", "create", "host/vol", "older"]));
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
    let mode = fs::metadata(host.at("host/vol.snapshots")).expect("it is there").permissions();
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
    let mut rest = File::create(host.at("host/rest")).expect("a file");
    for size in [1 << 20, 4096, 1] {
        while rest.write_all(&vec![1; size]).and_then(|()| rest.sync_all()).is_ok() {}
    }
    let made = host.ferry(&["snapshot", "create", "host/vol", "one"]);
    fails(&made, 1, &["No space left"]);
    assert!(!host.at("host/vol.snapshots").exists() || host.names().is_empty());
    drop(rest);
    fs::remove_file(host.at("host/rest")).expect("it can be removed");
    ok(&host.ferry(&["fsck", "host/vol"]));
    ok(&host.ferry(&["snapshot", "create", "host/vol", "one"]));
    ok(&host.ferry(&["fsck", "host/vol@one"]));
}

#[test]
fn a_clone_of_a_file_is_written_beside_its_volume_and_each_has_its_own_files() {
    on_each(|host| {
        let write = |at: &str, text: &str| fs::write(host.at(at), text).expect("it is written");
        let read = |at: &str| fs::read_to_string(host.at(at)).expect("it is read");
        write("first/file", "old");
        ok(&host.ferry(&["snapshot", "create", "first", "one"]));
        write("first/file", "not synced");
        ok(&host.ferry(&["clone", "host/vol@one", "host/of-one"]));
        ok(&host.ferry(&["clone", "first", "host/of-now"]));
        for (clone, has) in [("host/of-one", "old"), ("host/of-now", "not synced")] {
            ok(&host.ferry(&["fsck", clone]));
            ok(&host.ferry(&["mount", clone, "second"]));
            assert_eq!(read("second/file"), has);
            write("second/file", "written in the clone");
            write("second/new", clone);
            ok(&host.ferry(&["umount", "second"]));
            ok(&host.ferry(&["fsck", clone]));
        }
        assert_eq!(read("first/file"), "not synced");
        assert!(!host.at("first/new").exists());
        // It stays when its volume does not, and has snapshots of its own.
        ok(&host.ferry(&["umount", "first"]));
        ok(&host.ferry(&["mount", "host/vol@one", "second"]));
        assert_eq!(read("second/file"), "old");
        ok(&host.ferry(&["umount", "second"]));
        let mode = |at: &str| fs::metadata(host.at(at)).expect("it is there").permissions().mode();
        assert_eq!(mode("host/of-one"), mode("host/vol"));
        fs::remove_dir_all(host.at("host/vol.snapshots")).expect("they can be removed");
        fs::remove_file(host.at("host/vol")).expect("it can be removed");
        ok(&host.ferry(&["snapshot", "create", "host/of-one", "two"]));
        ok(&host.ferry(&["clone", "host/of-one@two", "host/of-two"]));
        ok(&host.ferry(&["mount", "host/of-two", "first"]));
        assert_eq!(read("first/new"), "host/of-one");
    });
}

#[test]
fn a_clone_of_a_file_that_cannot_be_made_leaves_nothing() {
    let host = Host::mounted();
    let none = host.ferry(&["clone", "host/vol@one", "host/new"]);
    fails(&none, 1, &["there is no snapshot \"one\""]);
    ok(&host.ferry(&["snapshot", "create", "first", "one"]));
    let entries = || fs::read_dir(host.at("host")).expect("it is there").count();
    let before = entries();
    let refused = |from: &str, to: &str, code: i32, texts: &[&str]| {
        fails(&host.ferry(&["clone", from, to]), code, texts);
    };
    fs::write(host.at("host/there"), b"mine").expect("it is written");
    refused("host/vol", "host/there", 1, &["exists already"]);
    assert_eq!(fs::read(host.at("host/there")).expect("it is read"), b"mine");
    fs::remove_file(host.at("host/there")).expect("it can be removed");
    refused("host/vol", "other", 1, &["another file system", "`ferry copy`"]);
    assert!(!host.at("other").exists());
    refused("host/vol@two", "host/new", 1, &["there is no snapshot", "there are one"]);
    refused("host/absent", "host/new", 1, &["No such file"]);
    refused("host/vol", "host/vol@new", 2, &["never changes"]);
    refused("host/vol@one", "dir:///somewhere", 2, &["same file system", "`ferry copy`"]);
    refused("host/vol", "host/no/such", 1, &["No such file"]);
    ok(&host.ferry(&["mkfs", "plain", "--size", "64M"]));
    refused("plain", "new", 1, &["cannot share blocks", "`ferry copy`"]);
    assert_eq!(entries(), before);
    ok(&host.ferry(&["clone", "host/vol", "host/new"]));
}

#[test]
fn a_rollback_of_a_file_brings_a_snapshot_back_and_loses_nothing() {
    on_each(|host| {
        let write = |text: &str| fs::write(host.at("first/file"), text).expect("it is written");
        let read = |at: &str| fs::read_to_string(host.at(at)).expect("it is read");
        write("old");
        ok(&host.ferry(&["snapshot", "create", "first", "one"]));
        write("new");
        let back = |more: &[&str]| host.ferry(&[&["rollback", "host/vol@one"][..], more].concat());
        fails(&back(&[]), 1, &["in use by process", "mounted on", "first: unmount it first"]);
        fails(&host.ferry(&["rollback", "first"]), 2, &["unmount it, and name the snapshot"]);
        ok(&host.ferry(&["umount", "first"]));
        ok(&host.ferry(&["mount", "host/vol", "first", "-o", "ro"]));
        fails(&back(&[]), 1, &["in use by process", "first: unmount it first"]);
        ok(&host.ferry(&["umount", "first"]));
        fails(
            &host.ferry(&["rollback", "host/vol@two"]),
            1,
            &["there is no snapshot", "there are one"],
        );
        fails(&host.ferry(&["rollback", "host/vol"]), 2, &["VOLUME@NAME"]);
        fails(&back(&["--take-over"]), 2, &["for volumes in a store"]);
        assert_eq!(host.names(), ["one"]);
        let mode = fs::Permissions::from_mode(0o640);
        fs::set_permissions(host.at("host/vol"), mode).expect("it can be set");
        chown(host.at("host/vol"), Some(12), Some(34)).expect("it can be set");
        // What a killed rollback leaves.
        fs::write(host.at("host/.vol.rollback"), b"half").expect("it can be written");
        // A snapshot may be mounted meanwhile.
        ok(&host.ferry(&["mount", "host/vol@one", "second"]));
        let done = back(&[]);
        ok(&done);
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(said.contains("what it was before is in the snapshot before-rollback\n"), "{said}");
        let is_now = fs::metadata(host.at("host/vol")).expect("it is there");
        assert_eq!((is_now.mode() & 0o777, is_now.uid(), is_now.gid()), (0o640, 12, 34));
        ok(&host.ferry(&["umount", "second"]));
        ok(&host.ferry(&["fsck", "host/vol"]));
        ok(&host.ferry(&["mount", "host/vol", "first"]));
        ok(&host.ferry(&["mount", "host/vol@before-rollback", "second"]));
        assert_eq!((read("first/file"), read("second/file")), ("old".into(), "new".into()));
        write("newer");
        for mount in ["first", "second"] {
            ok(&host.ferry(&["umount", mount]));
        }
        ok(&back(&["--discard"]));
        ok(&back(&[]));
        let mut names = host.names();
        names.sort();
        assert_eq!(names, ["before-rollback", "before-rollback-2", "one"]);
        assert!(!host.at("host/.vol.rollback").exists());
        ok(&host.ferry(&["rollback", "host/vol@before-rollback"]));
        ok(&host.ferry(&["mount", "host/vol", "first"]));
        assert_eq!(read("first/file"), "new");
    });
}

#[test]
fn a_clone_and_a_rollback_of_a_file_begin_timelines() {
    let host = Host::mounted();
    let key = |at: &str| {
        let device = FileDevice::open(&host.at(at), OpenMode::ReadOnly, &Env::real());
        let device: Arc<dyn BlockDevice> = Arc::new(device.expect("it can be opened"));
        let superblock = read_superblock(&device).expect("it is a volume");
        (superblock.volume_id, superblock.capability_key())
    };
    ok(&host.ferry(&["snapshot", "create", "first", "one"]));
    ok(&host.ferry(&["umount", "first"]));
    let (id, first) = key("host/vol");
    ok(&host.ferry(&["clone", "host/vol@one", "host/new"]));
    let mut keys = vec![first, key("host/new").1];
    assert_eq!(key("host/vol.snapshots/one"), (id, first));
    for _ in 0..2 {
        ok(&host.ferry(&["rollback", "host/vol@one"]));
        keys.push(key("host/vol").1);
        assert_eq!(key("host/vol").0, id);
    }
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4, "no two have the same");
    ok(&host.ferry(&["fsck", "host/vol"]));
}

#[test]
fn a_snapshot_of_another_volume_of_this_name_is_not_rolled_back_to() {
    let host = Host::mounted();
    fs::write(host.at("first/file"), "earlier").expect("it is written");
    ok(&host.ferry(&["snapshot", "create", "first", "one"]));
    ok(&host.ferry(&["umount", "first"]));
    fs::remove_file(host.at("host/vol")).expect("it can be removed");
    ok(&host.ferry(&["mkfs", "host/vol", "--size", "256M"]));
    ok(&host.ferry(&["mount", "host/vol", "first"]));
    fs::write(host.at("first/new"), "now").expect("it is written");
    ok(&host.ferry(&["umount", "first"]));
    for more in [&[][..], &["--discard"]] {
        let back = host.ferry(&[&["rollback", "host/vol@one"][..], more].concat());
        fails(&back, 1, &["a snapshot of another volume", "`ferry clone ", "@one NEW`"]);
    }
    assert_eq!(host.names(), ["one"]);
    ok(&host.ferry(&["mount", "host/vol", "first"]));
    assert_eq!(fs::read_to_string(host.at("first/new")).expect("it is there"), "now");
    ok(&host.ferry(&["clone", "host/vol@one", "host/earlier"]));
    ok(&host.ferry(&["mount", "host/earlier", "second"]));
    assert_eq!(fs::read_to_string(host.at("second/file")).expect("it is there"), "earlier");
}

#[test]
fn commands_that_read_a_volume_read_a_snapshot_of_a_file() {
    let host = Host::mounted();
    fs::write(host.at("first/kept"), b"same").expect("it is written");
    fs::write(host.at("first/file"), b"old").expect("it is written");
    ok(&host.ferry(&["snapshot", "create", "first", "one"]));
    fs::write(host.at("first/file"), b"new").expect("it is written");
    fs::write(host.at("first/more"), b"more").expect("it is written");
    ok(&host.ferry(&["snapshot", "create", "first", "two"]));
    let printed = |output: &Output, code: i32, text: &str| {
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.code() == Some(code) && said.contains(text), "{output:?}: {text}");
    };
    printed(&host.ferry(&["fsck", "host/vol@one"]), 0, "clean");
    printed(&host.ferry(&["scrub", "host/vol@one"]), 0, "clean");
    printed(&host.ferry(&["debug", "host/vol@one", "path", "/file"]), 0, "size=3");
    printed(&host.ferry(&["diff", "host/vol@one", "host/vol@two"]), 1, "M /file\n+ /more\n");
    let in_use = host.ferry(&["diff", "host/vol@one", "host/vol"]);
    fails(&in_use, 2, &["in use, so it changes: name a snapshot", "host/vol NAME"]);
    printed(&host.ferry(&["diff", "first@one", "first@two"]), 1, "M /file\n+ /more\n");
    ok(&host.ferry(&["copy", "first@one", "copy"]));
    let in_use = host.ferry(&["copy", "host/vol", "other"]);
    fails(&in_use, 1, &["in use by process", "copy VOLUME@NAME"]);
    fails(&host.ferry(&["copy", "copy", "host/vol@one"]), 2, &["never changes"]);
    let backup = host.ferry(&["backup", "host/vol@one", "dir:///somewhere"]);
    fails(&backup, 2, &["only volumes in a store", "`ferry copy`"]);
    fails(&host.ferry(&["stats", "host/vol@one"]), 1, &["no FerryFS is mounted here"]);
    for volume in ["host/vol@one", "copy"] {
        ok(&host.ferry(&["mount", volume, "second"]));
        printed(&host.ferry(&["stats", volume]), 0, "vol");
        assert_eq!(fs::read(host.at("second/file")).expect("it is read"), b"old");
        ok(&host.ferry(&["umount", volume]));
    }
    ok(&host.ferry(&["umount", "first"]));
    printed(&host.ferry(&["diff", "host/vol@two", "host/vol"]), 0, "");
}

#[test]
fn what_is_put_in_the_place_of_a_snapshot_is_not_opened() {
    let host = Host::mounted();
    ok(&host.ferry(&["umount", "first"]));
    ok(&host.ferry(&["mkfs", "host/other", "--size", "64M"]));
    ok(&host.ferry(&["snapshot", "create", "host/vol", "one"]));
    let snapshot = host.at("host/vol.snapshots/one");
    fs::remove_file(&snapshot).expect("it can be removed");
    let other = fs::read(host.at("host/other")).expect("it is read");
    let refused = |code: i32, args: &[&str]| fails(&host.ferry(args), code, &["regular file"]);
    let all = || {
        refused(8, &["fsck", "host/vol@one"]);
        refused(8, &["scrub", "host/vol@one"]);
        refused(8, &["debug", "host/vol@one", "superblock"]);
        refused(1, &["mount", "host/vol@one", "first"]);
        refused(1, &["mount", "host/vol.snapshots/one", "first"]);
        refused(1, &["copy", "host/vol@one", "copy"]);
        refused(1, &["clone", "host/vol@one", "host/clone"]);
        refused(1, &["rollback", "host/vol@one"]);
        refused(1, &["snapshot", "delete", "host/vol", "one"]);
        let repair = host.ferry(&["fsck", "--repair", "host/vol@one"]);
        fails(&repair, 8, &["never changes"]);
        let made = host.ferry(&["snapshot", "create", "host/vol", "one"]);
        fails(&made, 1, &["\"one\" already"]);
        assert!(host.ferry(&["snapshot", "list", "host/vol"]).stdout.is_empty());
        fs::remove_file(&snapshot).expect("it can be removed");
    };
    symlink(host.at("host/other"), &snapshot).expect("a link");
    all();
    let mut fifo = Command::new("mkfifo");
    ok(&fifo.arg(&snapshot).output().expect("it runs"));
    all();
    assert!(fs::read(host.at("host/other")).expect("it is read") == other);
    // The directory itself is no link either.
    fs::rename(host.at("host/vol.snapshots"), host.at("host/elsewhere")).expect("it is renamed");
    symlink("elsewhere", host.at("host/vol.snapshots")).expect("a link");
    fails(&host.ferry(&["snapshot", "create", "host/vol", "two"]), 1, &["Not a directory"]);
    fails(&host.ferry(&["snapshot", "list", "host/vol"]), 1, &["Not a directory"]);
    assert_eq!(fs::read_dir(host.at("host/elsewhere")).expect("it is there").count(), 0);
}

#[test]
fn a_killed_clone_or_rollback_of_a_file_leaves_a_whole_volume_or_what_was_there() {
    on_each(|host| {
        let states = ["old", "new"];
        fs::write(host.at("first/file"), states[0]).expect("it is written");
        ok(&host.ferry(&["snapshot", "create", "first", "one"]));
        fs::write(host.at("first/file"), states[1]).expect("it is written");
        ok(&host.ferry(&["umount", "first"]));
        let (mut cloned, mut killed) = (0, 0);
        for millis in (0..60).step_by(3) {
            let mut kill = |args: &[&str]| {
                let mut bounded = Command::new("timeout");
                bounded.args(["--signal=KILL", &format!("0.{millis:03}"), FERRY]).args(args);
                let ended = bounded.current_dir(host.0.path()).output().expect("it runs");
                killed += u32::from(millis > 0 && !ended.status.success());
            };
            let clone = format!("host/clone-{millis}");
            kill(&["clone", "host/vol@one", &clone]);
            kill(&["rollback", "--discard", "host/vol@one"]);
            if host.at(&clone).exists() {
                ok(&host.ferry(&["fsck", &clone]));
                cloned += 1;
            }
            ok(&host.ferry(&["mount", "host/vol", "first"]));
            let found = fs::read_to_string(host.at("first/file")).expect("it is read");
            assert!(states.contains(&&*found), "{found}");
            fs::write(host.at("first/file"), states[1]).expect("it is written");
            ok(&host.ferry(&["umount", "first"]));
        }
        assert!(cloned > 0 && killed > 0, "{cloned} clones, {killed} were killed");
        let others = host.names().into_iter().filter(|name| name != "one");
        assert_eq!(others.count(), 0);
    });
}

#[test]
fn a_clone_and_a_rollback_of_a_file_let_in_nobody_whom_the_volume_keeps_out() {
    let host = Host::mounted();
    ok(&host.ferry(&["snapshot", "create", "first", "one"]));
    ok(&host.ferry(&["umount", "first"]));
    let acl = |file: &str| {
        let got = Command::new("getfacl").args(["-cp", file]).current_dir(host.0.path()).output();
        String::from_utf8(got.expect("it runs").stdout).expect("it is text")
    };
    let mut set = Command::new("setfacl");
    set.args(["-m", "u:daemon:rw,g::-", "host/vol"]).current_dir(host.0.path());
    ok(&set.output().expect("it runs"));
    let wanted = acl("host/vol");
    assert!(wanted.contains("user:daemon:rw-") && wanted.contains("group::---"), "{wanted}");
    ok(&host.ferry(&["clone", "host/vol", "host/trial"]));
    assert_eq!(acl("host/trial"), wanted);
    // The snapshot is from before the list was set.
    ok(&host.ferry(&["clone", "host/vol@one", "host/of-one"]));
    assert_eq!(acl("host/of-one"), wanted);
    ok(&host.ferry(&["rollback", "host/vol@one"]));
    assert_eq!(acl("host/vol"), wanted);
    assert_eq!(acl("host/vol.snapshots/before-rollback"), wanted);
    // A file of another user is no snapshot.
    fs::write(host.at("host/vol.snapshots/theirs"), b"theirs").expect("it is written");
    chown(host.at("host/vol.snapshots/theirs"), Some(1), Some(1)).expect("its owner is set");
    fails(&host.ferry(&["rollback", "host/vol@theirs"]), 1, &["user 1 owns it"]);
}

#[test]
fn changes_of_a_mount_that_is_not_found_by_the_name_of_the_volume_are_not_left_out() {
    let host = Host::mounted();
    fs::hard_link(host.at("host/vol"), host.at("host/other")).expect("a link");
    fs::write(host.at("first/file"), "new").expect("it is written");
    for args in
        [&["clone", "host/other", "host/trial"][..], &["snapshot", "create", "host/other", "x"]]
    {
        fails(&host.ferry(args), 1, &["has it open under another name"]);
    }
    ok(&host.ferry(&["clone", "first", "host/trial"]));
    ok(&host.ferry(&["mount", "host/trial", "second"]));
    assert_eq!(fs::read_to_string(host.at("second/file")).expect("it is read"), "new");
    ok(&host.ferry(&["umount", "second"]));
}
