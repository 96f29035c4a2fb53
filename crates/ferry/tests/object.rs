//! Volumes in a store that is a directory: made, mounted, killed, taken over, refused (these need
//! root and /dev/fuse).

#[path = "object/backup.rs"]
mod backup;
#[path = "object/clone.rs"]
mod clone;
#[path = "object/copy.rs"]
mod copy;
#[path = "object/diff.rs"]
mod diff;
#[path = "object/far.rs"]
mod far;
#[path = "shared/holder.rs"]
mod holder;
#[path = "object/replica.rs"]
mod replica;
#[path = "object/resize.rs"]
mod resize;
#[path = "object/snapdir.rs"]
mod snapdir;
#[path = "object/standby.rs"]
mod standby;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use ferry_env::Env;
use holder::holder_of;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

/// A store and two mount points, which no mount outlives.
struct Store(TempDir);

impl Store {
    /// Nothing is made yet.
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        for name in ["first", "second"] {
            fs::create_dir(dir.path().join(name)).expect("a mount point");
        }
        Self(dir)
    }

    /// With a volume.
    fn made() -> Self {
        let store = Self::new();
        ok(&store.ferry(&["mkfs", &store.url()]));
        store
    }

    fn directory(&self) -> PathBuf {
        self.0.path().join("store")
    }

    fn url(&self) -> String {
        self.url_of("store")
    }

    /// Another store beside it.
    fn url_of(&self, name: &str) -> String {
        format!("dir://{}", self.at(name).display())
    }

    fn at(&self, mount: &str) -> PathBuf {
        self.0.path().join(mount)
    }

    fn log(&self, mount: &str) -> String {
        fs::read_to_string(self.at(&format!("{mount}.log"))).expect("the daemon's log")
    }

    fn ferry(&self, args: &[&str]) -> Output {
        let mut bounded = Command::new("timeout");
        bounded.args(["--signal=KILL", "60", FERRY]).args(args);
        bounded.current_dir(self.0.path()).output().expect("the command runs")
    }

    fn try_mount(&self, mount: &str, more: &[&str]) -> Output {
        let log = format!("log={}", self.at(&format!("{mount}.log")).display());
        let url = self.url();
        let args = [&["mount", &url, mount, "-o", &log], more].concat();
        self.ferry(&args)
    }

    fn mount(&self, mount: &str) {
        ok(&self.try_mount(mount, &[]));
    }

    fn stats(&self, target: &str) -> serde_json::Value {
        let stats = self.ferry(&["stats", target, "--json"]);
        ok(&stats);
        serde_json::from_slice(&stats.stdout).expect("statistics are JSON")
    }

    fn daemon(&self, mount: &str) -> Pid {
        let pid = self.stats(mount)["fuse"]["daemon"].as_i64();
        let pid = pid.and_then(|pid| i32::try_from(pid).ok());
        pid.and_then(Pid::from_raw).expect("the daemon's number")
    }

    /// Kills a mount as a loss of power does: with its holder.
    fn kill(&self, mount: &str) {
        let daemon = self.daemon(mount);
        kill_process(holder_of(daemon), Signal::KILL).expect("it is ours");
        while Path::new(&format!("/proc/{daemon}/exe")).exists() {
            std::thread::yield_now();
        }
    }

    /// All files of the store and their lengths, except the locks.
    fn contents(&self) -> Vec<(PathBuf, u64)> {
        let mut found = Vec::new();
        let mut todo = vec![self.directory()];
        while let Some(directory) = todo.pop() {
            for entry in fs::read_dir(directory).expect("it is there") {
                let path = entry.expect("it can be read").path();
                match fs::metadata(&path).expect("it is there") {
                    meta if meta.is_file() => found.push((path, meta.len())),
                    _ if path.ends_with("lock") => {}
                    _ => todo.push(path),
                }
            }
        }
        found.sort();
        found
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Nothing is mounted if the test went well.
        let table = fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
        for mount in ["first", "second"] {
            if table.contains(self.at(mount).to_str().expect("UTF-8")) {
                self.ferry(&["umount", "--force", mount]);
            }
        }
    }
}

fn ok(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn fails(output: &Output, code: i32, texts: &[&str]) {
    let text = said(output);
    let all = texts.iter().all(|wanted| text.contains(wanted));
    assert!(output.status.code() == Some(code) && all, "{output:?} lacks one of {texts:?}");
    assert_eq!(text.lines().count(), 1, "one sentence: {text}");
}

/// Contents of file `n`: no two are equal, some are inline, some take several blocks.
fn contents(n: usize) -> Vec<u8> {
    let line = format!("file {n} has this line many times\n");
    line.repeat(1 + n % 300).into_bytes()
}

/// Writes files in folders of a hundred.
fn write_files(at: &Path, files: std::ops::Range<usize>) {
    for n in files {
        let folder = at.join(format!("{:03}", n / 100));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(format!("{n}")), contents(n)).expect("a file");
    }
}

fn check_files(at: &Path, files: std::ops::Range<usize>) {
    for n in files {
        let path = at.join(format!("{:03}/{n}", n / 100));
        let found = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(found == contents(n), "{} has other contents", path.display());
    }
}

#[test]
fn what_was_synced_survives_a_killed_daemon_and_the_next_mount_waits_for_nobody() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..3000);
    ok(&store.ferry(&["sync", "first"]));
    store.kill("first");
    store.mount("first");
    check_files(&store.at("first"), 0..3000);
    assert!(!store.log("first").contains("waits"), "{}", store.log("first"));
    ok(&store.ferry(&["scrub", "first"]));
    ok(&store.ferry(&["sync", &store.url()]));
    ok(&store.ferry(&["umount", &store.url()]));
    ok(&store.ferry(&["fsck", &store.url()]));
    ok(&store.ferry(&["scrub", &store.url()]));
    let inode = store.ferry(&["debug", &store.url(), "path", "/029/2999", "--json"]);
    ok(&inode);
    assert!(String::from_utf8_lossy(&inode.stdout).contains("inode"), "{inode:?}");
}

#[test]
fn an_owner_that_was_taken_over_stops_and_loses_nothing_that_was_synced() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..50);
    let mut late = fs::File::create(store.at("first").join("late")).expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    let first = store.at("first").canonicalize().expect("it is mounted");
    let refused = store.try_mount("second", &[]);
    let pid = format!("process {} on ", store.daemon("first"));
    let mounted = format!("mounted on {}: unmount it first", first.display());
    fails(&refused, 1, &["in use by", &pid, "since", "ago", &mounted, "--take-over"]);

    ok(&store.try_mount("second", &["--take-over"]));
    check_files(&store.at("second"), 0..50);
    let written = late.write_all(b"never durable").and_then(|()| late.sync_all());
    assert!(written.is_err(), "the first owner acknowledges a sync");
    drop(late);
    let log = store.log("first");
    assert!(log.contains("the volume was taken over by process "), "{log}");
    write_files(&store.at("second"), 50..60);
    ok(&store.ferry(&["sync", "second"]));
    ok(&store.ferry(&["umount", "second"]));
    // Its end tells that it could not write everything.
    assert!(!store.ferry(&["umount", "first"]).status.success());
    store.mount("first");
    check_files(&store.at("first"), 0..60);
    assert_eq!(fs::read(store.at("first").join("late")).expect("it was synced"), b"");
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &store.url()]));
}

/// The snapshots of a volume, or of the one that is mounted there.
fn snapshots(store: &Store, target: &str) -> Vec<String> {
    let listed = store.ferry(&["snapshot", "list", target, "--json"]);
    ok(&listed);
    let all: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("it is JSON");
    let name = |one: &serde_json::Value| one["name"].as_str().expect("it has a name").to_owned();
    all.as_array().expect("a list").iter().map(name).collect()
}

#[test]
fn a_snapshot_is_read_beside_its_volume_and_stays_as_it_was() {
    let store = Store::made();
    let (url, before) = (store.url(), format!("{}@before", store.url()));
    store.mount("first");
    write_files(&store.at("first"), 0..300);
    ok(&store.ferry(&["sync", "first"]));
    // What nobody has synced is in it, too.
    write_files(&store.at("first"), 300..400);
    ok(&store.ferry(&["snapshot", "create", "first", "before"]));
    fs::remove_dir_all(store.at("first/000")).expect("it is there");
    for n in 100..400 {
        fs::write(store.at("first").join(format!("{:03}/{n}", n / 100)), "new").expect("a file");
    }
    ok(&store.ferry(&["sync", "first"]));
    ok(&store.ferry(&["snapshot", "create", &url, "after"]));
    assert_eq!(snapshots(&store, "first"), ["before", "after"]);
    for target in ["first", &url] {
        let sizes = store.ferry(&["snapshot", "list", target, "--sizes", "--json"]);
        ok(&sizes);
        let sizes: serde_json::Value = serde_json::from_slice(&sizes.stdout).expect("it is JSON");
        assert_eq!(sizes["snapshots"][0]["name"], "before");
        let alone = sizes["snapshots"][0]["alone_bytes"].as_u64().expect("a number");
        let held = sizes["held_bytes"].as_u64().expect("a number");
        assert!(0 < alone && alone <= held, "{sizes}");
        let lines = store.ferry(&["snapshot", "list", target, "--sizes"]);
        ok(&lines);
        let lines = String::from_utf8(lines.stdout).expect("it is text");
        assert!(lines.contains("iB  before\n"), "{lines}");
        assert!(lines.contains("\nall snapshots together hold "), "{lines}");

        let figures = store.ferry(&["stats", target, "--snapshots", "--json"]);
        ok(&figures);
        let figures: serde_json::Value = serde_json::from_slice(&figures.stdout).expect("JSON");
        assert_eq!(figures["snapshots"]["count"], 2);
        assert_eq!(figures["snapshots"]["held_bytes"], sizes["held_bytes"]);
        assert_eq!(figures["snapshots"]["snapshots"], sizes["snapshots"]);
        assert!(figures["volume"].is_object(), "the other statistics are there, too: {figures}");
        let table = store.ferry(&["stats", target, "--snapshots"]);
        ok(&table);
        let table = String::from_utf8(table.stdout).expect("it is text");
        let hint = format!("ferry snapshot list --sizes '{target}'");
        assert!(table.contains("\nsnapshots\n") && table.contains(&hint), "{table}");
    }
    assert_eq!(store.stats("first")["snapshots"], serde_json::Value::Null);
    fails(&store.ferry(&["stats", &before, "--snapshots"]), 2, &["that is a snapshot"]);

    for more in [&[&before[..], "second"][..], &[&url, "second", "-o", "snapshot=before,rw"]] {
        ok(&store.ferry(&[&["mount"], more].concat()));
        check_files(&store.at("second"), 0..400);
        let error = fs::write(store.at("second/000/0"), "x").expect_err("it is read only");
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        let table = fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
        assert!(table.contains(&before), "{table}");
        let refused = store.ferry(&["snapshot", "delete", "first", "before"]);
        fails(&refused, 1, &["@before: mounted on this machine: unmount it first"]);
        ok(&store.ferry(&["umount", &before]));
    }
    ok(&store.ferry(&["fsck", &before]));
    let deeper = store.ferry(&["debug", &before, "path", "/003/399", "--json"]);
    assert!(String::from_utf8_lossy(&deeper.stdout).contains("inode"), "{deeper:?}");
    // The owner goes on, and is not waited for.
    fs::write(store.at("first/more"), "x").expect("nobody fenced it off");
    ok(&store.ferry(&["sync", "first"]));

    store.kill("first");
    ok(&store.ferry(&["mount", &before, "second"]));
    check_files(&store.at("second"), 0..400);
    ok(&store.ferry(&["umount", "second"]));
    store.ferry(&["umount", "first"]);
    ok(&store.ferry(&["snapshot", "create", &url, "while nobody has it"]));
    ok(&store.ferry(&["snapshot", "delete", &url, "before"]));
    assert_eq!(snapshots(&store, &url), ["after", "while nobody has it"]);
    ok(&store.ferry(&["fsck", &format!("{url}@while nobody has it")]));
    ok(&store.ferry(&["fsck", &url]));
}

#[test]
fn a_schedule_makes_what_is_due_and_deletes_only_its_own() {
    let store = Store::made();
    let url = store.url();
    store.mount("first");
    fs::write(store.at("first/file"), "x").expect("a file");
    // They are of this week, and later than one that is made first.
    let old = ["scheduled-2001-01-01-000000", "scheduled-2001-01-02-000000"];
    for name in ["scheduled-by-hand", "before", old[0], old[1]] {
        ok(&store.ferry(&["snapshot", "create", "first", name]));
    }
    let schedule = |target: &str, rules: &str| {
        let done = store.ferry(&["snapshot", "create", target, "--schedule", rules]);
        ok(&done);
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    // This hour has some, of which the first one is needed; but the hour may end just now.
    ok(&store.ferry(&["mount", &format!("{url}@{}", old[1]), "second"]));
    let done = store.ferry(&["snapshot", "create", "first", "--schedule", "weekly=1"]);
    ok(&done);
    assert!(said(&done).contains(&format!("{}: it stays: mounted", old[1])), "{done:?}");
    ok(&store.ferry(&["umount", "second"]));
    assert_eq!(schedule("first", "weekly=1"), format!("{url}: deleted the snapshot {}\n", old[1]));
    assert_eq!(snapshots(&store, "first"), ["scheduled-by-hand", "before", old[0]]);
    assert_eq!(schedule("first", "weekly=1"), "", "nothing is due or spare");
    ok(&store.ferry(&["snapshot", "delete", "first", old[0]]));
    ok(&store.ferry(&["umount", "first"]));
    let made = schedule(&url, "daily=3,weekly=2");
    let name = made.trim().strip_prefix(&format!("{url}: made the snapshot scheduled-20"));
    let name = format!("scheduled-20{}", name.expect("one is due"));
    assert_eq!(snapshots(&store, &url), ["scheduled-by-hand", "before", &name]);
    assert!(!schedule(&url, "daily=3,weekly=2").contains("deleted"));
}

#[test]
fn what_cannot_be_done_with_a_snapshot_is_said() {
    let store = Store::made();
    let (url, one) = (store.url(), format!("{}@one", store.url()));
    store.mount("first");
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    let snapshot = |words: &[&str]| store.ferry(&[&["snapshot"], words].concat());
    for target in ["first", &url] {
        fails(&snapshot(&["create", target, "one"]), 1, &["\"one\" already", "delete that one"]);
        fails(&snapshot(&["delete", target, "two"]), 1, &["no snapshot \"two\"; there are one"]);
        for name in ["", ".", "a/b", "a@b", "a,b", &"x".repeat(256)] {
            fails(&snapshot(&["create", target, name]), 2, &["is no name for a snapshot"]);
        }
    }
    fails(&snapshot(&["create", &one, "two"]), 2, &["that is a snapshot, which never changes"]);
    let absent = store.ferry(&["mount", &url, "second", "-o", "snapshot=two"]);
    fails(&absent, 1, &["no snapshot \"two\"; there are one"]);
    let mount = |more: &[&str]| store.ferry(&[&["mount", &one, "second"], more].concat());
    fails(&mount(&["--take-over"]), 2, &["a snapshot has no owner"]);
    fails(&mount(&["--create"]), 2, &["never changes"]);
    fails(&mount(&["-o", "snapshot=two"]), 2, &["is a snapshot already"]);
    fails(&store.ferry(&["fsck", "--repair", &one]), 8, &["never changes"]);
    ok(&mount(&[]));
    fails(&snapshot(&["create", "second", "two"]), 2, &["that is a snapshot"]);
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));

    ok(&store.ferry(&["mkfs", "file.ferry", "--size", "256M"]));
    ok(&store.ferry(&["mount", "file.ferry", "first"]));
    for target in ["file.ferry", "first"] {
        fails(&snapshot(&["create", target, "one"]), 1, &["cannot share blocks", "`ferry copy`"]);
    }
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_rollback_brings_the_files_of_a_snapshot_back_and_loses_none() {
    let store = Store::made();
    let (url, before) = (store.url(), format!("{}@before", store.url()));
    store.mount("first");
    write_files(&store.at("first"), 0..200);
    ok(&store.ferry(&["snapshot", "create", "first", "before"]));
    fs::remove_dir_all(store.at("first/000")).expect("it is there");
    fs::write(store.at("first/new"), "new").expect("a file");
    let in_use = store.ferry(&["rollback", &before]);
    fails(&in_use, 1, &["in use by", "/first: unmount it first"]);
    fails(&store.ferry(&["rollback", "first"]), 2, &["that is a mount: unmount it", "@NAME`"]);
    // A mount of a snapshot stays as it is.
    ok(&store.ferry(&["mount", &before, "second"]));
    ok(&store.ferry(&["umount", "first"]));

    let absent = store.ferry(&["rollback", &format!("{url}@after")]);
    fails(&absent, 1, &["no snapshot \"after\"; there are before"]);
    fails(&store.ferry(&["rollback", &url]), 2, &["VOLUME@NAME", "ferry snapshot list"]);
    let done = store.ferry(&["rollback", &before]);
    ok(&done);
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(said.starts_with(&format!("ferry: {url} is what it was in before (made 20")), "{said}");
    assert!(said.ends_with("; what it was before is in the snapshot before-rollback\n"), "{said}");
    ok(&store.ferry(&["fsck", &url]));
    assert_eq!(snapshots(&store, &url), ["before", "before-rollback"]);
    check_files(&store.at("second"), 0..200);
    ok(&store.ferry(&["umount", "second"]));

    store.mount("first");
    check_files(&store.at("first"), 0..200);
    assert!(!store.at("first/new").exists(), "it is of today");
    fs::write(store.at("first/more"), "x").expect("it can be written");
    ok(&store.ferry(&["mount", &format!("{url}@before-rollback"), "second"]));
    assert_eq!(fs::read(store.at("second/new")).expect("it is there"), b"new");
    assert!(!store.at("second/000").exists(), "it was removed");
    ok(&store.ferry(&["umount", "second"]));
    store.kill("first");
    store.ferry(&["umount", "first"]);

    let done = store.ferry(&["rollback", &format!("{url}@before-rollback"), "--discard"]);
    ok(&done);
    assert!(String::from_utf8_lossy(&done.stdout).ends_with("; what it was before is discarded\n"));
    assert_eq!(snapshots(&store, &url), ["before", "before-rollback"]);
    store.mount("first");
    assert_eq!(fs::read(store.at("first/new")).expect("it is there"), b"new");
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &url]));

    ok(&store.ferry(&["mkfs", "file.ferry", "--size", "256M"]));
    fails(&store.ferry(&["rollback", "file.ferry"]), 2, &["VOLUME@NAME"]);
    // Some file systems below cannot have snapshots, others have none of it.
    fails(&store.ferry(&["rollback", "file.ferry@before"]), 1, &["file.ferry", "snapshot"]);
}

/// Whether an object of the store, or its name, has these bytes.
fn shows(store: &Store, bytes: &[u8]) -> bool {
    let has = |whole: &[u8]| whole.windows(bytes.len()).any(|part| part == bytes);
    store.contents().iter().any(|(path, _)| {
        has(path.as_os_str().as_encoded_bytes()) || has(&fs::read(path).expect("an object"))
    })
}

#[test]
fn an_encrypted_volume_shows_nothing_and_opens_with_its_passphrase_alone() {
    let store = Store::new();
    for (name, word) in [("old", "open sesame\n"), ("new", "a better one"), ("none", "\n")] {
        fs::write(store.at(name), word).expect("a passphrase");
    }
    let url = store.url();
    let mkfs = ["mkfs", &url, "--encrypt", "--compress", "off", "--passphrase-file"];
    fails(&store.ferry(&[&mkfs[..], &["none"]].concat()), 1, &["there is no passphrase in it"]);
    ok(&store.ferry(&[&mkfs[..], &["old"]].concat()));

    let before = store.contents();
    fails(&store.try_mount("first", &[]), 1, &["is encrypted", "--passphrase-file"]);
    let wrong = store.try_mount("first", &["--passphrase-file", "new"]);
    fails(&wrong, 1, &["not the passphrase of the volume"]);
    assert_eq!(store.contents(), before, "nothing was changed");

    ok(&store.try_mount("first", &["-o", "passphrase_file=old"]));
    let text = "a line that nobody may read\n".repeat(5000);
    let name = "a-name-that-nobody-may-read";
    fs::write(store.at("first").join(name), &text).expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    assert!(!shows(&store, b"nobody may read") && !shows(&store, b"nobody-may-read"));
    assert!(!shows(&store, b"sesame"));
    // The same in the clear would be seen.
    let clear = Store::new();
    ok(&clear.ferry(&["mkfs", &clear.url(), "--compress", "off"]));
    clear.mount("first");
    fs::write(clear.at("first").join(name), &text).expect("a file");
    ok(&clear.ferry(&["umount", "first"]));
    assert!(shows(&clear, b"nobody may read") && shows(&clear, b"nobody-may-read"));

    // The passphrase is changed while the volume is used.
    let change = ["passphrase", &url, "--new-passphrase-file", "new", "--passphrase-file"];
    fails(&store.ferry(&[&change[..], &["new"]].concat()), 1, &["not the passphrase"]);
    ok(&store.ferry(&[&change[..], &["old"]].concat()));
    fs::write(store.at("first").join("later"), "x").expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    store.kill("first");
    store.ferry(&["umount", "first"]);
    let old = store.try_mount("first", &["--passphrase-file", "old"]);
    fails(&old, 1, &["not the passphrase of the volume"]);
    ok(&store.try_mount("first", &["--passphrase-file", "new"]));
    assert_eq!(fs::read_to_string(store.at("first").join(name)).expect("a file"), text);
    assert_eq!(fs::read_to_string(store.at("first").join("later")).expect("a file"), "x");
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &url, "--passphrase-file", "new"]));
}

#[test]
fn what_gains_by_compression_takes_less_of_the_store() {
    let put_bytes = |how: &str| {
        let store = Store::new();
        ok(&store.ferry(&["mkfs", &store.url(), "--compress", how]));
        store.mount("first");
        write_files(&store.at("first"), 0..500);
        ok(&store.ferry(&["sync", "first"]));
        let bytes = store.stats("first")["store"]["put_bytes"].as_u64().expect("a number");
        ok(&store.ferry(&["umount", "first"]));
        store.mount("second");
        check_files(&store.at("second"), 0..500);
        ok(&store.ferry(&["umount", "second"]));
        bytes
    };
    let (zstd, off) = (put_bytes("zstd"), put_bytes("off"));
    assert!(zstd * 3 < off, "{zstd} bytes with zstd, {off} without");
}

#[test]
fn only_a_volume_in_a_store_is_encrypted_or_compressed() {
    let store = Store::new();
    for word in ["--encrypt", "--compress=zstd"] {
        fails(&store.ferry(&["mkfs", "file.ferry", word]), 2, &["for a volume in a store"]);
    }
    assert!(!store.at("file.ferry").exists());
    ok(&store.ferry(&["mkfs", &store.url()]));
    let change = store.ferry(&["passphrase", &store.url()]);
    fails(&change, 1, &["the volume is not encrypted"]);
}

#[test]
fn statistics_show_what_the_store_was_asked_for() {
    let store = Store::made();
    store.mount("first");
    let of = |name: &str| store.stats(&store.url())["store"][name].as_u64().expect("a number");
    let (puts, bytes) = (of("puts"), of("put_bytes"));
    fs::write(store.at("first").join("a"), noise(100_000)).expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    assert!(of("puts") > puts && of("put_bytes") > bytes + 4096);
    let table = store.ferry(&["stats", "first"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("\nstore\n"), "{table:?}");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_volume_that_is_read_has_no_owner_meanwhile() {
    let store = Store::made();
    ok(&store.ferry(&["mount", &store.url(), "first", "-o", "ro"]));
    ok(&store.ferry(&["fsck", &store.url()]));
    fails(&store.try_mount("second", &[]), 1, &["in use by process", "mounted on"]);
    ok(&store.ferry(&["umount", "first"]));
    store.mount("second");
    fails(&store.ferry(&["fsck", &store.url()]), 8, &["in use by process", "second"]);
    ok(&store.ferry(&["umount", "second"]));
    fails(&store.try_mount("first", &["--take-over", "-o", "ro"]), 2, &["--take-over"]);
}

#[test]
fn what_cannot_be_opened_is_said_and_left_as_it_is() {
    let store = Store::new();
    let url = store.url();
    let mkfs = |more: &[&str]| store.ferry(&[&["mkfs", url.as_str()], more].concat());
    fails(&store.try_mount("first", &[]), 1, &["there is no such directory", "make it"]);
    assert!(!store.directory().exists());
    let below = format!("{url}/a/b");
    fails(&store.ferry(&["mkfs", &below]), 1, &["there is no such directory"]);
    assert!(!store.directory().exists());

    fs::create_dir(store.directory()).expect("a directory");
    fails(&store.try_mount("first", &[]), 1, &["no FerryFS volume here", "ferry mkfs dir://"]);
    fs::write(store.directory().join("letter"), "mine").expect("a file");
    fails(&mkfs(&[]), 1, &["letter", "is left alone", "empty directory"]);
    assert_eq!(store.contents().len(), 1);
    fs::remove_file(store.directory().join("letter")).expect("it is there");

    fails(&mkfs(&["--force"]), 2, &["never overwritten"]);
    ok(&mkfs(&[]));
    fails(&mkfs(&[]), 1, &["a FerryFS volume here already"]);
    fails(&store.ferry(&["replace", &url, "a", "b"]), 1, &["not a mirror"]);
    fails(&store.ferry(&["mount", "first", "second", "--take-over"]), 2, &["--take-over is for"]);
    store.mount("first");
    ok(&store.ferry(&["umount", "first"]));

    let made = store.contents();
    let named = |part: &str| {
        let is_in = |(path, _): &&(PathBuf, u64)| path.parent().is_some_and(|p| p.ends_with(part));
        made.iter().filter(is_in).map(|(path, _)| path.clone()).next_back()
    };
    let superblock = store.directory().join("super");
    let shard = named("m/00000000").expect("the map has a first shard");
    let newer = |mut bytes: Vec<u8>| {
        bytes[8] = 9;
        let crc = crc32c(&bytes[..124]);
        bytes[124..128].copy_from_slice(&crc.to_le_bytes());
        bytes
    };
    let whole = fs::read(&superblock).expect("it is there");
    fs::write(&superblock, newer(whole.clone())).expect("it can be written");
    fails(&store.try_mount("first", &[]), 1, &["super has format version 9", "newer one"]);
    fs::write(&superblock, whole).expect("it can be written");
    for (path, change, texts) in [
        (&superblock, Some((40, 1)), ["super is damaged", "backup"]),
        (&superblock, Some((0, 0)), ["super is damaged", "backup"]),
        (&shard, Some((140, 77)), ["is damaged", "backup"]),
        (&shard, None, ["is missing", "Bring it back"]),
    ] {
        let whole = fs::read(path).expect("it is there");
        match change {
            None => fs::remove_file(path).expect("it is there"),
            Some((at, byte)) => {
                let mut bytes = whole.clone();
                bytes[at] = byte;
                fs::write(path, bytes).expect("it can be written");
            }
        }
        let before = store.contents();
        fails(&store.try_mount("first", &[]), 1, &texts);
        fails(&store.ferry(&["fsck", &url]), 8, &texts);
        assert_eq!(store.contents(), before, "nothing is claimed");
        fs::write(path, whole).expect("it can be written");
    }
    store.mount("first");
    ok(&store.ferry(&["umount", "first"]));
}

/// The checksum of a header, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// A small file system that is full soon.
struct Small(PathBuf);

impl Small {
    fn new(at: PathBuf, bytes: u64) -> Self {
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "none"]).arg(&at);
        ok(&mount.output().expect("mount runs"));
        Self(at)
    }

    fn resize(&self, bytes: u64) {
        let size = format!("remount,size={bytes}");
        ok(&Command::new("mount").args(["-o", &size]).arg(&self.0).output().expect("mount runs"));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(&self.0).output().expect("umount runs");
    }
}

#[test]
fn a_full_disk_refuses_a_new_volume_and_is_waited_for_by_a_mounted_one() {
    let store = Store::new();
    fs::create_dir(store.directory()).expect("a directory");
    let small = Small::new(store.directory(), 64 << 10);
    let url = format!("{}/v", store.url());
    fails(&store.ferry(&["mkfs", &url]), 1, &["No space left on device"]);
    assert!(!store.directory().join("v").exists(), "nothing is left");

    small.resize(16 << 20);
    ok(&store.ferry(&["mkfs", &url]));
    let log = format!("log={}", store.at("first.log").display());
    ok(&store.ferry(&["mount", &url, "first", "-o", &log]));
    let path = store.at("first").join("large");
    fs::write(&path, noise(32 << 20)).expect("it is in memory");
    let mut sync = Command::new(FERRY).arg("sync").arg(store.at("first")).spawn().expect("it runs");
    while !store.log("first").contains("No space left on device") {
        std::thread::yield_now();
    }
    assert!(sync.try_wait().expect("it is ours").is_none(), "the sync waits for room");
    assert!(store.stats("first")["store"]["repeated"].as_u64() > Some(0));
    small.resize(256 << 20);
    assert!(sync.wait().expect("it ends").success());
    assert_eq!(fs::read(&path).expect("it can be read"), noise(32 << 20));
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &url]));
}

/// Bytes in which no two blocks are equal.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()
    };
    (0..len / 8).flat_map(|_| next()).collect()
}

#[test]
fn a_sequential_reader_is_read_ahead_and_a_random_one_is_not() {
    let store = Store::made();
    store.mount("first");
    let contents = noise(64 << 20);
    fs::write(store.at("first/file"), &contents).expect("it can be written");
    let read = |read: &dyn Fn(&Path)| {
        ok(&store.ferry(&["umount", "first"]));
        store.mount("first");
        let before = store.stats("first");
        read(&store.at("first/file"));
        let after = store.stats("first");
        let figure = |stats: &serde_json::Value, name: &str| {
            stats["store"][name].as_u64().expect("a figure of the store")
        };
        assert!(figure(&after, "ahead_bytes") <= 64 << 20);
        ["gets", "get_bytes"].map(|name| figure(&after, name) - figure(&before, name))
    };
    // Each request of the kernel was one to the store, and so was each page of a table. On a busy
    // machine a reader may overtake what is read ahead, but not each time.
    let rounds = [(); 4].map(|()| {
        read(&|file| {
            assert!(fs::read(file).expect("it can be read") == contents);
        })
    });
    assert!(rounds.iter().any(|[gets, bytes]| *gets < 40 && *bytes < 72 << 20), "{rounds:?}");
    let [_, bytes] = read(&|file| {
        let file = fs::File::open(file).expect("it is there");
        for n in 0..40_u64 {
            let at = (n * 29 % 64) << 20;
            let mut found = [0; 4096];
            file.read_exact_at(&mut found, at).expect("a read");
            assert_eq!(found, contents[at as usize..][..4096]);
        }
    });
    // A frame and a front for each read, and tables.
    assert!(bytes < 40 * (80 << 10) + (2 << 20), "{bytes} bytes for 40 blocks");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_volume_opens_with_few_requests_after_many_fsyncs() {
    let store = Store::made();
    store.mount("first");
    let file = fs::File::create(store.at("first/file")).expect("it can be made");
    for n in 0..300_u64 {
        file.write_all_at(&n.to_le_bytes(), 8 * n).expect("a write");
        file.sync_all().expect("a sync");
    }
    drop(file);
    let gets = || store.stats("first")["store"]["gets"].as_u64().expect("a number");
    store.kill("first");
    store.mount("first");
    // Each sync was an object: it says what it has, and then the journal reads its part of that.
    assert!((300..750).contains(&gets()), "{} requests after a crash", gets());
    for mount in 0..2 {
        ok(&store.ferry(&["umount", "first"]));
        store.mount("first");
        assert!(gets() < 100, "{} requests, mount {mount}", gets());
    }
    ok(&store.ferry(&["umount", "first"]));
}

/// A store whose volume has files, and is mounted with a cache that has nothing of them.
fn cold_with_cache(size: &str) -> (Store, String) {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..1000);
    fs::write(store.at("first/large"), noise(40 << 20)).expect("it can be written");
    ok(&store.ferry(&["umount", "first"]));
    let cache = format!("cache={},cache_disk={size}", store.at("cache").display());
    ok(&store.try_mount("first", &["-o", &cache]));
    (store, cache)
}

/// What the store was asked for since its volume was mounted.
fn get_bytes(store: &Store) -> u64 {
    store.stats("first")["store"]["get_bytes"].as_u64().expect("a number")
}

/// Whether no contents were fetched from the store. Meanwhile the owner may have looked at the
/// fronts of objects that are mostly dead, 128 bytes each.
fn nothing_was_fetched(store: &Store, before: u64, what: &str) {
    let fetched = get_bytes(store) - before;
    assert!(fetched < 4096, "{what}: {fetched} bytes");
}

#[test]
fn after_a_warm_a_cold_read_asks_the_store_for_nothing() {
    let (store, cache) = cold_with_cache("1G");
    let warm = || {
        let warm = store.ferry(&["warm", "first"]);
        ok(&warm);
        String::from_utf8(warm.stdout).expect("UTF-8")
    };
    let before = get_bytes(&store);
    let line = warm();
    let fetched = get_bytes(&store) - before;
    assert!(line.starts_with("1,001 files: ") && line.lines().count() == 1, "{line}");
    assert!(line.contains(" read from the store, ") && line.contains(" were there"), "{line}");
    assert!((40 << 20..48 << 20).contains(&fetched), "{fetched} bytes");
    // Nothing is fetched twice.
    let before = get_bytes(&store);
    let line = warm();
    assert!(line.starts_with("1,001 files: 0 B read from the store, 4"), "{line}");
    assert_eq!(get_bytes(&store), before);
    for mount in 0..2 {
        ok(&store.ferry(&["umount", "first"]));
        ok(&store.try_mount("first", &["-o", &cache]));
        let before = get_bytes(&store);
        check_files(&store.at("first"), 0..1000);
        let large = fs::read(store.at("first/large")).expect("it can be read");
        assert!(large == noise(40 << 20));
        nothing_was_fetched(&store, before, &format!("mount {mount}"));
    }
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_file_is_warmed_alone_and_one_that_is_in_memory_too() {
    let (store, cache) = cold_with_cache("1G");
    let small = store.at("first/009/999");
    assert_eq!(fs::read(&small).expect("it can be read"), contents(999));
    let large = store.at("first/large");
    let mut part = [0; 4096];
    fs::File::open(&large).and_then(|file| file.read_exact_at(&mut part, 0)).expect("a read");
    ok(&store.ferry(&["warm", "first/009/999", "first/large", "first/large"]));
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.try_mount("first", &["-o", &cache]));
    let before = get_bytes(&store);
    assert!(fs::read(&large).expect("it can be read") == noise(40 << 20));
    nothing_was_fetched(&store, before, "a large file");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_tree_that_is_larger_than_the_cache_is_warmed_until_that_is_full() {
    let store = Store::made();
    store.mount("first");
    for name in ["a", "b", "c"] {
        fs::write(store.at("first").join(name), noise(30 << 20)).expect("it can be written");
    }
    ok(&store.ferry(&["umount", "first"]));
    let cache = format!("cache={},cache_disk=64M", store.at("cache").display());
    ok(&store.try_mount("first", &["-o", &cache]));
    let warm = store.ferry(&["warm", "first"]);
    fails(&warm, 1, &["first: too large for the cache on disk (6", "cache_disk", "are there"]);
    let fetched = get_bytes(&store);
    assert!((50 << 20..72 << 20).contains(&fetched), "{fetched} bytes");
    // What fits replaces it.
    ok(&store.ferry(&["warm", "first/c"]));
    let before = get_bytes(&store);
    assert!(fs::read(store.at("first/c")).expect("it can be read") == noise(30 << 20));
    nothing_was_fetched(&store, before, "what fits");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_mount_right_after_an_unmount_waits_for_the_cache_of_the_one_before() {
    let store = Store::made();
    let cache = format!("cache={},cache_disk=64M", store.at("cache").display());
    for round in 0..3 {
        ok(&store.try_mount("first", &["-o", &cache]));
        fs::write(store.at("first/file"), noise(20 << 20)).expect("it can be written");
        // It does not wait for the daemon, which still writes.
        let unmount = Command::new("umount").arg(store.at("first")).output();
        ok(&unmount.expect("umount runs"));
        let mounted = store.try_mount("first", &["-o", &cache]);
        assert!(mounted.status.success(), "{round}: {mounted:?}");
        // One that is in use is told.
        let other = store.try_mount("second", &["-o", &cache]);
        fails(&other, 1, &["ferry-cache is in use by process", "name another directory"]);
        ok(&store.ferry(&["umount", "first"]));
    }
}

#[test]
fn a_warm_that_cannot_be_done_says_why() {
    let store = Store::made();
    store.mount("first");
    fs::write(store.at("first/file"), "x").expect("it can be written");
    fails(&store.ferry(&["warm", "first"]), 1, &["has no cache on disk", "cache=DIR,cache_disk="]);
    fails(&store.ferry(&["warm", "first/none"]), 1, &["first/none: cannot warm: No such file"]);
    fails(&store.ferry(&["warm", "none"]), 1, &["none: cannot warm: No such file"]);
    fails(&store.ferry(&["warm", "second"]), 1, &["no FerryFS is mounted here"]);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["mount", "local.ferry", "second", "--create"]));
    fails(&store.ferry(&["warm", "second"]), 1, &["nothing to warm", "not in a store"]);
    ok(&store.ferry(&["umount", "second"]));
}

#[test]
fn a_warm_that_is_interrupted_stops_at_once_and_says_so() {
    let (store, _) = cold_with_cache("1G");
    // The store answers nothing any more; the walk needs nothing of it.
    ok(&Command::new("find").arg(store.at("first")).arg("-ls").output().expect("find runs"));
    let (at, away) = (store.directory().join("s"), store.directory().join("away"));
    fs::rename(&at, &away).expect("it can be moved");
    fs::write(&at, "").expect("it can be written");
    let mut warm = Command::new(FERRY);
    warm.args(["warm", "first"]).current_dir(store.0.path()).stdout(std::process::Stdio::piped());
    let warm = warm.spawn().expect("it runs");
    while store.stats("first")["store"]["repeated"].as_u64() == Some(0) {
        std::thread::yield_now();
    }
    let pid = i32::try_from(warm.id()).ok().and_then(Pid::from_raw).expect("a number");
    kill_process(pid, Signal::INT).expect("it is ours");
    let warm = warm.wait_with_output().expect("it ends");
    assert_eq!(warm.status.code(), Some(1), "{warm:?}");
    assert!(warm.stdout.starts_with(b"stopped: 1,001 files: "), "{warm:?}");
    fs::remove_file(&at).expect("it is there");
    fs::rename(&away, &at).expect("it can be moved");
    check_files(&store.at("first"), 0..1000);
    ok(&store.ferry(&["warm", "first"]));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn statistics_of_snapshots_end_with_an_error_while_their_maps_are_away() {
    let store = Store::made();
    store.mount("first");
    ok(&store.ferry(&["snapshot", "create", "first", "before"]));
    let (at, away) = (store.directory().join("m"), store.directory().join("away"));
    fs::rename(&at, &away).expect("it can be moved");
    fs::write(&at, "").expect("it can be written");
    fails(&store.ferry(&["stats", "first", "--snapshots"]), 1, &["the store refuses"]);
    // The figures of the mount need no store.
    ok(&store.ferry(&["stats", "first"]));
    fs::remove_file(&at).expect("it is there");
    fs::rename(&away, &at).expect("it can be moved");
    ok(&store.ferry(&["stats", "first", "--snapshots"]));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn statistics_of_snapshots_end_with_a_signal_while_no_store_answers() {
    // Nobody listens there any more.
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr());
    let url = format!("s3://bucket/a?endpoint=http://{}", port.expect("a port"));
    // A shell starts what runs in its background with the signal ignored, and so these tests.
    let mut command = Command::new("env");
    command.args(["--default-signal=INT", FERRY, "stats", &url, "--snapshots"]);
    command.envs([("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")]);
    let piped = std::process::Stdio::piped;
    let mut stats = command.stdout(piped()).stderr(piped()).spawn().expect("it runs");
    let mut said = BufReader::new(stats.stderr.take().expect("it is piped")).lines();
    let line = said.next().expect("it says that it waits").expect("text");
    assert!(line.contains("a request to the store is repeated"), "{line}");
    let pid = i32::try_from(stats.id()).ok().and_then(Pid::from_raw).expect("a number");
    kill_process(pid, Signal::INT).expect("it is ours");
    assert_eq!(stats.wait().expect("it ends").signal(), Some(Signal::INT.as_raw()));
}

/// The unit of systemd with its settings, as systemd would run it.
#[test]
fn the_unit_for_snapshots_makes_those_that_are_due() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/ferry-snapshot@.service");
    let unit = fs::read_to_string(unit).expect("it is there");
    let value = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name));
    let command = value("ExecStart=/usr/bin/ferry ").expect("it runs ferry");
    let schedule = value("Environment=SCHEDULE=").expect("it has a schedule");
    let store = Store::made();
    let command = command.replace("${SCHEDULE}", schedule).replace("${VOLUME}", &store.url());
    let args: Vec<&str> = command.split(' ').collect();
    for mounted in [false, true] {
        if mounted {
            store.mount("first");
        }
        ok(&store.ferry(&args));
        let made = snapshots(&store, &store.url());
        assert!((1..=2).contains(&made.len()), "at most one for each hour: {made:?}");
        assert!(made.iter().all(|name| name.starts_with("scheduled-")), "{made:?}");
    }
    ok(&store.ferry(&["umount", "first"]));
}

/// Programs that fsync as fast as they can, with a mount option: the PUTs that it cost, and the
/// time.
fn puts_of_fsyncs(option: &str, threads: usize, rounds: usize) -> (u64, Duration) {
    let store = Store::made();
    ok(&store.try_mount("first", &["-o", option]));
    let puts = || store.stats("first")["store"]["puts"].as_u64().expect("a number");
    let clock = Env::real().clock;
    let (before, begun) = (puts(), clock.monotonic());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let path = store.at(&format!("first/{thread}"));
            scope.spawn(move || {
                let mut file = fs::File::create(path).expect("a file");
                for n in 0..rounds {
                    file.write_all(format!("{n}\n").as_bytes()).expect("a write");
                    file.sync_all().expect("a sync");
                }
            });
        }
    });
    let found = (puts() - before, clock.monotonic() - begun);
    store.kill("first");
    store.mount("second");
    for thread in 0..threads {
        let found = fs::read_to_string(store.at(&format!("second/{thread}"))).expect("a file");
        assert_eq!(found.lines().count(), rounds, "what was synced is there");
    }
    store.ferry(&["umount", "first"]);
    ok(&store.ferry(&["umount", "second"]));
    found
}

#[test]
fn a_least_interval_between_flushes_bounds_the_puts_of_fsyncs() {
    for threads in [1, 6] {
        let (puts, time) = puts_of_fsyncs("flush_interval_min=250ms", threads, 8);
        // The first one does not wait.
        assert!(time >= Duration::from_millis(7 * 250), "{threads}: {time:?}");
        let most = time.as_millis() as u64 / 250 + 2;
        assert!((8..=most).contains(&puts), "{threads}: {puts} PUTs in {time:?}");
    }
    let (puts, _) = puts_of_fsyncs("flush_interval_min=0", 1, 40);
    assert!(puts >= 40, "{puts} PUTs");
}

#[test]
fn a_least_interval_between_flushes_does_not_delay_the_end_of_a_mount() {
    let store = Store::made();
    ok(&store.try_mount("first", &["-o", "flush_interval_min=60s"]));
    let synced = |name: &str| {
        let path = store.at("first").join(name);
        fs::write(&path, name).expect("a file");
        fs::File::open(path).expect("it is there").sync_all()
    };
    synced("a").expect("the first one does not wait");
    fs::write(store.at("first/b"), "b").expect("a file");
    // What other tests start has copies of open files, for a moment.
    let mut unmounted;
    while {
        unmounted = Command::new("umount").arg(store.at("first")).output().expect("umount runs");
        String::from_utf8_lossy(&unmounted.stderr).contains("busy")
    } {
        std::thread::yield_now();
    }
    ok(&unmounted);
    // It waits for the daemon before, for 30 s at most.
    store.mount("first");
    assert_eq!(fs::read(store.at("first/b")).expect("it was written"), b"b");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_mount_whose_volume_another_machine_has_taken_says_that_it_has_failed() {
    let store = Store::made();
    store.mount("first");
    fs::write(store.at("first/file"), "durable").expect("it fits");
    ok(&store.ferry(&["sync", "first"]));
    assert!(store.stats("first")["volume"]["failed"].is_null());
    // The claim of the next owner, as its machine would make it in the store.
    let claims = store.directory().join("e");
    let newest = fs::read_dir(&claims).expect("it is there").map(|claim| {
        let name = claim.expect("it can be read").file_name();
        u64::from_str_radix(name.to_str().expect("UTF-8"), 16).expect("a number")
    });
    let next = newest.max().expect("it has an owner") + 1;
    let of = |epoch: u64| claims.join(format!("{epoch:016x}"));
    fs::copy(of(next - 1), of(next)).expect("it can be written");
    let failed = || store.stats("first")["volume"]["failed"].as_str().map(str::to_owned);
    let mut reasons = std::iter::repeat_with(failed).take(5000).flatten();
    let reason = reasons.next().expect("it looks for newer owners");
    assert!(reason.contains("another owner"), "{reason}");
    let listed = store.ferry(&["list"]);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let at = store.at("first");
    let line = listed.lines().find(|line| line.ends_with(&*at.to_string_lossy()));
    assert!(line.is_some_and(|line| line.contains("has failed: ")), "{listed}");
    let doctor = store.ferry(&["doctor"]);
    let advice = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert_eq!(doctor.status.code(), Some(1));
    assert!(advice.contains("nothing can be changed any more"), "{advice}");
    assert_eq!(fs::read_to_string(store.at("first/file")).expect("it is cached"), "durable");
    let more = fs::File::create(store.at("first/more")).and_then(|file| file.sync_all());
    more.expect_err("nothing gets durable");
    store.ferry(&["umount", "--force", "first"]);
}

#[test]
fn only_its_user_may_look_into_a_store_that_is_a_directory() {
    let store = Store::made();
    store.mount("first");
    fs::write(store.at("first/secret"), "of one user").expect("it fits");
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    ok(&store.ferry(&["clone", &(store.url() + "@one"), &store.url_of("clone")]));
    ok(&store.ferry(&["backup", &(store.url() + "@one"), &store.url_of("backup")]));
    ok(&store.ferry(&["umount", "first"]));
    for name in ["store", "clone", "backup"] {
        let mut todo = vec![store.at(name)];
        while let Some(path) = todo.pop() {
            let meta = fs::metadata(&path).expect("it is there");
            assert_eq!(meta.permissions().mode() & 0o077, 0, "{}", path.display());
            // What is in there is of no use to who cannot come there.
            if meta.is_dir() && !path.ends_with("lock") {
                let below = fs::read_dir(&path).expect("it is there");
                todo.extend(below.map(|entry| entry.expect("it can be read").path()));
            }
        }
    }
}

#[test]
fn a_store_that_others_may_use_stays_open_to_them() {
    let store = Store::made();
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode();
    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is the user's");
    };
    set(&store.at("store"), 0o2770);
    set(&store.at("store/super"), 0o640);
    // As in a store that was not used since it was made.
    fs::remove_dir(store.at("store/tmp")).expect("it is empty");
    store.mount("first");
    fs::write(store.at("first/file"), "of a group").expect("it fits");
    ok(&store.ferry(&["umount", "first"]));
    assert_eq!(mode(&store.at("store/tmp")) & 0o7777, 0o2750);
    let claims = fs::read_dir(store.at("store/c")).expect("it is there").map(|entry| {
        let path = entry.expect("it can be read").path();
        (mode(&path), path)
    });
    let claims: Vec<_> = claims.collect();
    assert!(claims.iter().any(|(mode, _)| mode & 0o777 == 0o640), "{claims:?}");
}

#[test]
fn a_snapshot_is_named_by_the_mount_point_of_its_volume_too() {
    let store = Store::made();
    store.mount("first");
    fs::write(store.at("first/file"), "old").expect("it fits");
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    fs::write(store.at("first/file"), "new").expect("it fits");
    ok(&store.ferry(&["snapshot", "create", "first", "two"]));
    let changed = store.ferry(&["diff", "first@one", "first@two"]);
    assert_eq!(String::from_utf8_lossy(&changed.stdout), "M /file\n");
    ok(&store.ferry(&["copy", "first@one", "copy.ferry"]));
    ok(&store.ferry(&["backup", "first@one", &store.url_of("backup")]));
    ok(&store.ferry(&["clone", "first@one", &store.url_of("clone")]));
    ok(&store.ferry(&["mount", "first@one", "second"]));
    assert_eq!(fs::read_to_string(store.at("second/file")).expect("it is there"), "old");
    ok(&store.ferry(&["umount", "second"]));
    let none = store.ferry(&["mount", "first@three", "second"]);
    assert!(said(&none).contains("there is no snapshot \"three\""), "{none:?}");
    // What has that name is that.
    fs::create_dir(store.at("first@here")).expect("it is made");
    let other = store.ferry(&["diff", "first@one", "first@here"]);
    assert!(!said(&other).contains("no snapshot"), "{other:?}");
    ok(&store.ferry(&["umount", "first"]));
}
