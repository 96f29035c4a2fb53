//! Commands for a volume that `ferry serve` has, while a client writes (these need root and
//! /dev/fuse).

#[path = "served/start.rs"]
mod start;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");
/// Bytes of a file that the client writes.
const FILE_LEN: usize = 256 << 10;

/// A command that would wait for ever fails its test instead.
fn ferry(args: &[&str]) -> Output {
    Command::new("timeout")
        .args(["--signal=KILL", "100", FERRY])
        .args(args)
        .output()
        .expect("the command runs")
}

#[track_caller]
fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn text(path: &Path) -> String {
    path.to_str().expect("a temporary directory's name is UTF-8").to_owned()
}

/// Starts a server; returns its address, too.
fn serve(volume: &str, listen: &str) -> (Child, String) {
    start::start_server(&mut Command::new(FERRY), volume, listen, "0s")
}

/// A served volume and a mount of it, which the test does not outlive.
struct Served {
    dir: TempDir,
    server: Child,
    address: String,
}

impl Served {
    /// `made`: what `ferry mkfs` is told beside the volume, where `DIR` is the directory.
    fn new(made: &[&str]) -> Self {
        let dir = TempDir::new().expect("a directory");
        let volume = text(&dir.path().join("volume.ferry"));
        let made: Vec<String> =
            made.iter().map(|word| word.replace("DIR", &text(dir.path()))).collect();
        let mut mkfs = vec!["mkfs", &volume];
        mkfs.extend(made.iter().map(String::as_str));
        ok(&ferry(&mkfs));
        Self::of(dir, &volume)
    }

    /// Serves a volume that is there; the mount and its log are in `dir`.
    fn of(dir: TempDir, volume: &str) -> Self {
        let (server, address) = serve(volume, "127.0.0.1:0");
        let served = Self { dir, server, address };
        fs::create_dir(served.mnt()).expect("a mount point");
        let log = format!("insecure,log={}", served.dir.path().join("log").display());
        ok(&ferry(&[
            "mount",
            &format!("ferry://{}/", served.address),
            &text(&served.mnt()),
            "-o",
            &log,
        ]));
        served
    }

    fn path(&self, name: &str) -> String {
        text(&self.dir.path().join(name))
    }

    fn volume(&self) -> String {
        self.path("volume.ferry")
    }

    fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// Where a test mounts the volume without a server.
    fn local(&self) -> PathBuf {
        self.dir.path().join("local")
    }

    fn stats(&self) -> Value {
        let stats = ok(&ferry(&["stats", &self.volume(), "--json"]));
        serde_json::from_str(&stats).expect("statistics are JSON")
    }

    fn end(&mut self) {
        ok(&ferry(&["umount", &text(&self.mnt())]));
        self.stop_server();
    }

    fn stop_server(&mut self) {
        let server =
            i32::try_from(self.server.id()).ok().and_then(Pid::from_raw).expect("a process");
        kill_process(server, Signal::TERM).expect("it is ours");
        assert!(self.server.wait().expect("it is ours").success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Both are gone if the test went well.
        drop(self.server.kill());
        drop(self.server.wait());
        for mount in [self.mnt(), self.local()] {
            ferry(&["umount", "--force", &text(&mount)]);
        }
    }
}

fn contents(number: usize) -> Vec<u8> {
    (0..FILE_LEN).map(|at| (at / 7 + number * 31) as u8).collect()
}

/// Writes and syncs files until `enough` is said; how many.
fn write_files(dir: &Path, enough: &AtomicBool) -> usize {
    let mut number = 0;
    while !enough.load(Ordering::Relaxed) {
        let mut file = File::create(dir.join(number.to_string())).expect("it can be made");
        file.write_all(&contents(number)).expect("it fits");
        file.sync_all().expect("it is durable");
        number += 1;
        // The volume has room for so many.
        if number == 1000 {
            break;
        }
    }
    number
}

/// `work` is done while a client writes; how many files it wrote, which are all there.
fn while_a_client_writes(served: &Served, work: impl FnOnce()) -> usize {
    let enough = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writing = scope.spawn(|| write_files(&served.mnt(), &enough));
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        enough.store(true, Ordering::Relaxed);
        let written = writing.join().expect("it writes");
        worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        written
    });
    assert_ne!(written, 0);
    for number in 0..written {
        let there = fs::read(served.mnt().join(number.to_string())).expect("it is there");
        assert!(there == contents(number), "file {number}");
    }
    written
}

#[test]
fn a_mount_of_a_server_goes_on_in_another_process_while_a_client_writes() {
    let mut served = Served::new(&["--size", "1G"]);
    let (mnt, other) = (served.mnt(), served.local());
    fs::create_dir(&other).expect("a mount point");
    let url = format!("ferry://{}/", served.address);
    ok(&ferry(&["mount", &url, &text(&other), "-o", "insecure"]));
    let locked = File::create(mnt.join("locked")).expect("it can be made");
    locked.lock().expect("nobody has it");
    let removed = File::options().create_new(true).read(true).write(true).open(mnt.join("removed"));
    let removed = removed.expect("it can be made");
    removed.write_all_at(b"contents", 0).expect("it fits");
    fs::remove_file(mnt.join("removed")).expect("it is there");
    let written = while_a_client_writes(&served, || {
        for turn in 0..10 {
            ok(&ferry(&["upgrade-mount", &text(&mnt)]));
            fs::write(mnt.join("turn"), format!("{turn}")).expect("it fits");
            assert_eq!(fs::read(other.join("turn")).expect("reads"), format!("{turn}").as_bytes());
            let mut bytes = [0; 8];
            removed.read_exact_at(&mut bytes, 0).expect("it is open");
            assert_eq!(&bytes, b"contents");
            let theirs = File::open(other.join("locked")).expect("it is there");
            assert!(theirs.try_lock().is_err(), "the lock goes on, too");
        }
    });
    assert!(written > 0);
    drop((locked, removed));
    ok(&ferry(&["umount", &text(&other)]));
    served.end();
    ok(&ferry(&["fsck", &served.volume()]));
}

#[test]
fn a_side_of_a_served_mirror_is_replaced_while_a_client_writes() {
    let mut served = Served::new(&["--device", "mirror", "--size", "1G", "DIR/a", "DIR/b"]);
    let written = while_a_client_writes(&served, || {
        let said = ok(&ferry(&["replace", &served.volume(), &served.path("b"), &served.path("c")]));
        assert!(said.contains("has replaced"), "{said}");
    });
    let stats = served.stats();
    let sides = stats["devices"].as_object().expect("the sides");
    assert!(
        sides.iter().any(|(name, side)| name.ends_with("/c") && side["state"] == "active"),
        "{stats:#}"
    );
    served.end();
    ok(&ferry(&["fsck", &served.volume()]));
    // The new side alone has everything.
    fs::remove_file(served.path("a")).expect("it is there");
    let mnt = text(&served.mnt());
    ok(&ferry(&["mount", &served.volume(), &mnt, "-o", &format!("log={}", served.path("log"))]));
    for number in 0..written {
        assert!(
            fs::read(served.mnt().join(number.to_string())).expect("it is there")
                == contents(number)
        );
    }
    ok(&ferry(&["umount", &mnt]));
}

#[test]
fn a_server_looks_whether_its_address_is_free_before_it_opens_the_volume() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("an address").to_string();
    let refused = ferry(&["serve", "/no/such/volume", "--listen", &address, "--insecure"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("cannot listen at") && said.contains("another port"), "{said}");
    assert_eq!(refused.status.code(), Some(1), "{said}");
}

#[test]
fn a_served_volume_is_tuned_trimmed_synced_and_asked_for_its_figures() {
    let mut served = Served::new(&["--size", "1G", "--log-size", "16M"]);
    let volume = served.volume();
    while_a_client_writes(&served, || {
        ok(&ferry(&[
            "tune",
            &volume,
            "--flush",
            "delay",
            "--fast-flush",
            "3ms",
            "--reset-flush-time",
        ]));
        assert_eq!(served.stats()["log"]["bytes"], 16 << 20);
        ok(&ferry(&["tune", &volume, "--log-size", "64M"]));
        assert_eq!(served.stats()["log"]["bytes"], 64 << 20);
        ok(&ferry(&["sync", &volume]));
        ok(&ferry(&["trim", &volume]));
    });
    let stats = served.stats();
    assert_eq!(
        (&stats["flush"]["policy"], &stats["volume"]["size"]),
        (&"delay".into(), &(1_u64 << 30).into())
    );
    served.end();
    ok(&ferry(&["fsck", &volume]));
}

#[test]
fn async_is_switched_while_a_client_writes() {
    let mut served = Served::new(&["--size", "1G"]);
    let mnt = text(&served.mnt());
    let listed = |word: &str| {
        let mounts = Command::new("mount").output().expect("the command runs");
        let mounts = String::from_utf8_lossy(&mounts.stdout).into_owned();
        mounts.lines().any(|line| line.contains(&mnt) && line.contains(word))
    };
    assert!(listed("async=on"));
    while_a_client_writes(&served, || {
        for word in ["off", "on", "off", "off", "on", "on", "off", "on", "off"] {
            ok(&ferry(&["tune", &mnt, "--async", word]));
            let stats = ok(&ferry(&["stats", &mnt, "--json"]));
            let stats: Value = serde_json::from_str(&stats).expect("statistics are JSON");
            let connection = &stats["connection"];
            assert_eq!(connection["async"], word == "on", "{connection}");
            assert!(word == "on" || connection["early_acknowledged"] == 0, "{connection}");
            assert_eq!(connection["lost_changes"], 0);
        }
    });
    assert!(listed("async=off"));

    let refused = |target: &str, word: &str, uid: u32, why: &str| {
        let mut tune = Command::new(FERRY);
        let said = tune.args(["tune", target, "--async", word]).uid(uid).gid(uid).output();
        let said = said.expect("the command runs");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(!said.status.success() && text.contains(why), "{said:?}");
    };
    refused(&mnt, "maybe", 0, "say on or off");
    refused(&mnt, "on", 65534, "only root and the user who has mounted it");
    refused("/", "on", 0, "no FerryFS is mounted here");
    served.end();
    ok(&ferry(&["mount", &served.volume(), &mnt, "-o", &format!("log={}", served.path("log"))]));
    refused(&mnt, "on", 0, "this one has the volume itself");
    ok(&ferry(&["umount", &mnt]));
    ok(&ferry(&["fsck", &served.volume()]));
}

#[test]
fn a_warm_of_a_remote_mount_says_where_the_cache_is() {
    let mut served = Served::new(&["--size", "1G"]);
    let said = ferry(&["warm", &text(&served.mnt())]);
    let error = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.code() == Some(1) && error.lines().count() == 1, "{said:?}");
    for part in ["mounted from ferry://", "the server's (`ferry serve --cache DIR`)"] {
        assert!(error.contains(part), "{error}");
    }
    served.end();
}

#[test]
fn statistics_of_a_served_volume_say_who_is_there_and_why_clients_were_refused() {
    let mut served = Served::new(&["--size", "1G"]);
    let before = served.stats();
    assert_eq!(
        (&before["server"]["sessions"], &before["server"]["refused"]["path"]),
        (&1.into(), &0.into())
    );
    let nowhere = format!("ferry://{}/nowhere", served.address);
    let other = served.dir.path().join("other");
    fs::create_dir(&other).expect("a mount point");
    let refused = ferry(&["mount", &nowhere, &text(&other), "-o", "insecure"]);
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(served.stats()["server"]["refused"]["path"], 1);
    assert!(ok(&ferry(&["stats", &served.volume()])).contains("refused"));
    served.end();
}

#[test]
fn the_list_of_mounts_and_servers_says_how_each_is() {
    let mut served = Served::new(&["--size", "1G"]);
    let dir = text(served.dir.path());
    let list = || -> Vec<Value> {
        let json = ok(&ferry(&["list", "--json"]));
        let all: Vec<Value> = serde_json::from_str(&json).expect("the list is JSON");
        // Other tests have mounts and servers, too.
        let ours = |one: &Value| {
            [&one["volume"], &one["at"]].iter().any(|one| one.to_string().contains(&dir))
        };
        all.into_iter().filter(ours).collect()
    };
    let state = |all: &[Value], kind: &str| {
        let mut found = all.iter().filter(|one| one["kind"] == kind);
        let one = found.next().unwrap_or_else(|| panic!("no {kind}: {all:?}"));
        assert!(found.next().is_none(), "{all:?}");
        (one["state"].as_str().expect("it has a state").to_owned(), one["process"].as_i64())
    };
    let all = list();
    assert_eq!(state(&all, "mount").0, "ok");
    let (is, server) = state(&all, "server");
    assert_eq!(
        (&*is, server),
        ("1 of 1 clients are connected", Some(i64::from(served.server.id())))
    );
    let daemon = state(&all, "mount").1.expect("it has a daemon");
    let daemon = Pid::from_raw(i32::try_from(daemon).expect("a pid")).expect("a pid");
    kill_process(daemon, Signal::STOP).expect("it can be stopped");
    let stopped = list();
    kill_process(daemon, Signal::CONT).expect("it goes on");
    assert_eq!(state(&stopped, "mount"), ("does not answer".into(), state(&all, "mount").1));
    assert!(ok(&ferry(&["list"])).contains("mount   ok"));
    served.end();
    assert!(list().is_empty());
}

/// Whether the next server of the volume begins without a grace period.
fn next_server_begins_at_once(volume: &str) -> bool {
    let env = ferry_env::Env::real();
    let device =
        ferry_device::FileDevice::open(Path::new(volume), ferry_device::OpenMode::ReadOnly, &env)
            .expect("it can be opened");
    let options = ferry_fs::FsOptions { read_only: true, ..ferry_fs::FsOptions::default() };
    let fs =
        ferry_fs::LocalFs::open(std::sync::Arc::new(device), options, env).expect("it is a volume");
    let at_once = ferry_fs::SessionStore::was_handed_over(&*fs);
    fs.close().expect("nothing was written");
    at_once
}

#[test]
fn a_mount_hands_a_volume_on_only_if_it_was_handed_over_in_order() {
    let mut served = Served::new(&["--size", "1G"]);
    let (volume, mnt) = (served.volume(), text(&served.mnt()));
    served.end();
    assert!(next_server_begins_at_once(&volume), "the server has stopped in order");
    let mount_and_unmount = || {
        ok(&ferry(&["mount", &volume, &mnt, "-o", &format!("log={}", served.path("log"))]));
        fs::write(served.mnt().join("by a mount"), "contents").expect("it fits");
        ok(&ferry(&["umount", &mnt]));
    };
    mount_and_unmount();
    assert!(next_server_begins_at_once(&volume), "nobody had leases");
    // A server that is killed has handed nothing over, and a mount behind it has not, either.
    let mut killed = Served::of(TempDir::new().expect("a directory"), &volume);
    fs::write(killed.mnt().join("by a client"), "contents").expect("it fits");
    killed.server.kill().expect("it is ours");
    killed.server.wait().expect("it is ours");
    // It says what is lost without the server.
    assert!(!ferry(&["umount", "--force", &text(&killed.mnt())]).status.success());
    assert!(!next_server_begins_at_once(&volume));
    mount_and_unmount();
    assert!(!next_server_begins_at_once(&volume));
}

#[test]
fn a_scrub_of_a_served_volume_finds_damage_while_a_client_writes() {
    let mut served = Served::new(&["--size", "1G"]);
    let volume = served.volume();
    let damaged = contents(77_777);
    fs::write(served.mnt().join("damaged"), &damaged).expect("it fits");
    ok(&ferry(&["sync", &text(&served.mnt())]));
    while_a_client_writes(&served, || {
        assert!(ok(&ferry(&["scrub", &volume])).contains("clean"));
        spoil(Path::new(&volume), &damaged[..4096]);
        let found = ferry(&["scrub", &volume, "--json"]);
        assert_eq!(found.status.code(), Some(4), "{found:?}");
        let report: Value = serde_json::from_slice(&found.stdout).expect("a report is JSON");
        assert_eq!(
            (&report["complete"], &report["damage"][0]["path"]),
            (&true.into(), &"/damaged".into()),
            "{report:#}"
        );
        ok(&ferry(&["scrub", &volume, "--stop"]));
    });
    served.end();
}

/// Overwrites a few bytes of the block that has these contents.
fn spoil(volume: &Path, contents: &[u8]) {
    let file = OpenOptions::new().read(true).write(true).open(volume).expect("it is there");
    let mut block = vec![0; contents.len()];
    let blocks = file.metadata().expect("it is there").len() / block.len() as u64;
    let at = (0..blocks).map(|block| block * contents.len() as u64).find(|at| {
        file.read_exact_at(&mut block, *at).expect("readable");
        block == contents
    });
    file.write_all_at(b"spoiled", at.expect("it is on the volume")).expect("writable");
}

#[test]
fn only_root_and_the_servers_own_user_may_ask() {
    let mut served = Served::new(&["--size", "256M"]);
    // The way there is open, the answer is no.
    fs::set_permissions(served.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("it is ours");
    for question in ["stats", "trim", "scrub", "sync"] {
        let asked =
            Command::new(FERRY).args([question, &served.volume()]).uid(65534).gid(65534).output();
        let asked = asked.expect("the command runs");
        let said = String::from_utf8_lossy(&asked.stderr);
        assert!(
            !asked.status.success() && said.contains("only its own user and root"),
            "{question}: {asked:?}"
        );
    }
    let asked = |args: &[&str]| {
        let asked = Command::new(FERRY).args(args).uid(65534).gid(65534).output();
        asked.expect("the command runs")
    };
    for args in [&["clients"][..], &["clients", "--json"], &["evict", "nobody"]] {
        let asked = asked(args);
        let said = String::from_utf8_lossy(&asked.stderr);
        assert_eq!(asked.status.code(), Some(1), "{asked:?}");
        assert!(said.contains("a server of root runs here"), "{asked:?}");
        // Servers of other tests may be ending.
        let silent = format!("ferry-serve-{} does not answer", served.server.id());
        assert!(!said.contains(&silent), "{asked:?}");
    }
    let all: Vec<Value> = serde_json::from_slice(&asked(&["list", "--json"]).stdout).expect("JSON");
    let ours = |one: &&Value| one["kind"] == "server" && one["process"] == served.server.id();
    let server = all.iter().find(ours).expect("it is in the list");
    assert_eq!(server["state"], "answers no questions of this user");
    let doctor = asked(&["doctor"]);
    let said = String::from_utf8_lossy(&doctor.stdout);
    assert!(said.contains("its own user may ask"), "{said}");
    let unmounted = asked(&["umount", &text(&served.mnt())]);
    assert_eq!(unmounted.status.code(), Some(1), "{unmounted:?}");
    let said = String::from_utf8_lossy(&unmounted.stderr);
    assert!(said.contains("root has mounted it: only root may unmount it"), "{said}");
    served.end();
}

#[test]
fn umount_says_that_the_server_has_evicted_the_mount() {
    let served = Served::new(&["--size", "1G"]);
    ok(&ferry(&["evict", "1", "--volume", &served.volume()]));
    // The client has heard of it.
    while fs::read_dir(served.mnt()).is_ok() {
        std::thread::yield_now();
    }
    let list = ok(&ferry(&["list"]));
    let line = list.lines().find(|line| line.contains(&text(&served.mnt()))).expect("a line");
    assert!(line.contains("its server refuses it: "), "{list}");
    let unmounted = ferry(&["umount", &text(&served.mnt())]);
    let said = String::from_utf8_lossy(&unmounted.stderr);
    assert_eq!(unmounted.status.code(), Some(1), "{said}");
    assert!(said.contains("ended by the server's administrator"), "{said}");
    assert!(!said.contains("away") && !said.contains("is lost"), "{said}");
}

#[test]
fn umount_speaks_of_no_loss_if_the_server_is_away_and_has_everything() {
    let mut served = Served::new(&["--size", "256M"]);
    ok(&ferry(&["umount", &text(&served.mnt())]));
    let remote = format!("ferry://{}/", served.address);
    ok(&ferry(&["mount", &remote, &text(&served.mnt()), "-o", "insecure,timeout=1s"]));
    fs::write(served.mnt().join("f"), "x").expect("it fits");
    ok(&ferry(&["sync", &text(&served.mnt())]));
    served.stop_server();
    let unmounted = ferry(&["umount", &text(&served.mnt())]);
    let said = String::from_utf8_lossy(&unmounted.stderr);
    assert_eq!(unmounted.status.code(), Some(1), "{said}");
    assert!(said.contains("it had all changes") && !said.contains("is lost"), "{said}");
}

#[test]
fn umount_of_a_volume_with_several_mounts_wants_one_of_them() {
    let mut served = Served::new(&["--size", "256M"]);
    let remote = format!("ferry://{}/", served.address);
    let other = served.dir.path().join("other");
    fs::create_dir(&other).expect("a mount point");
    ok(&ferry(&["mount", &remote, &text(&other), "-o", "insecure"]));
    let several = ferry(&["umount", &remote]);
    let said = String::from_utf8_lossy(&several.stderr);
    assert_eq!(several.status.code(), Some(2), "{said}");
    assert!(
        said.contains(&format!("name one of {}, {}", text(&served.mnt()), text(&other))),
        "{said}"
    );
    ok(&ferry(&["umount", &text(&other)]));
    ok(&ferry(&["umount", &remote]));
    served.stop_server();
}

/// A client goes on at the address of its server, which serves next what `make` has made of the
/// volume and of its snapshot.
#[track_caller]
fn a_client_takes_no_new_file_for_an_old_one(make: impl FnOnce(&str) -> String) {
    let dir = TempDir::new().expect("a directory");
    let volume = format!("dir://{}", text(&dir.path().join("store")));
    ok(&ferry(&["mkfs", &volume, "--size", "1G"]));
    ok(&ferry(&["snapshot", "create", &volume, "one"]));
    let mut served = Served::of(dir, &volume);
    let (mnt, local) = (served.mnt(), served.local());
    fs::create_dir(&local).expect("a mount point");
    (0..100).for_each(|n| drop(File::create(mnt.join(n.to_string())).expect("it can be made")));
    let mut old = File::options();
    let old = old.read(true).write(true).create_new(true).open(mnt.join("old")).expect("a file");
    old.write_all_at(b"of the client", 0).expect("it fits");
    old.sync_all().expect("it is durable");
    let number = old.metadata().expect("it is open").ino();
    served.stop_server();

    let volume = make(&volume);
    let log = format!("log={}", served.path("local.log"));
    ok(&ferry(&["mount", &volume, &text(&local), "-o", &log]));
    fs::write(local.join("new"), "of another").expect("it fits");
    let new = fs::metadata(local.join("new")).expect("it is there").ino();
    assert!(new > number, "{new} is given anew: the older file had {number}");
    ok(&ferry(&["umount", &text(&local)]));

    served.server = serve(&volume, &served.address).0;
    let mut read = [0; 20];
    let written = old.write_all_at(b"lost", 0).and_then(|()| old.sync_all());
    assert!(written.is_err(), "it is gone");
    assert!(old.read_at(&mut read, 0).is_err(), "it is gone");
    assert_eq!(fs::read_to_string(mnt.join("new")).expect("it is there"), "of another");
    // It is one client among others: what it knows now is not refused with what it knew.
    let mut new = File::options();
    let new = new.read(true).write(true).open(mnt.join("new")).expect("it is there");
    served.stop_server();
    served.server = serve(&volume, &served.address).0;
    new.write_all_at(b"by it", 0).expect("it is open");
    new.sync_all().expect("it is durable");
    assert_eq!(fs::read_to_string(mnt.join("new")).expect("it is there"), "by itother");
    assert!(!mnt.join("old").exists());
    drop(old);
    // It says what is lost.
    ferry(&["umount", "--force", &text(&mnt)]);
    served.stop_server();
}

#[test]
fn a_client_of_before_a_rollback_takes_no_new_file_for_an_old_one() {
    a_client_takes_no_new_file_for_an_old_one(|volume| {
        ok(&ferry(&["rollback", &format!("{volume}@one")]));
        volume.to_owned()
    });
}

#[test]
fn a_client_of_a_volume_takes_no_file_of_its_clone_for_an_old_one() {
    a_client_takes_no_new_file_for_an_old_one(|volume| {
        let clone = format!("{volume}-clone");
        ok(&ferry(&["clone", &format!("{volume}@one"), &clone]));
        clone
    });
}

#[test]
fn a_client_of_a_volume_takes_no_file_of_a_copied_snapshot_for_an_old_one() {
    a_client_takes_no_new_file_for_an_old_one(|volume| {
        let copy = format!("{volume}-copy");
        ok(&ferry(&["copy", &format!("{volume}@one"), &copy]));
        copy
    });
}

#[test]
fn a_client_of_a_lost_volume_takes_no_file_of_its_restored_backup_for_an_old_one() {
    a_client_takes_no_new_file_for_an_old_one(|volume| {
        let (backup, restored) = (format!("{volume}-backup"), format!("{volume}-restored"));
        ok(&ferry(&["backup", &format!("{volume}@one"), &backup]));
        fs::remove_dir_all(volume.trim_start_matches("dir://")).expect("it is lost");
        ok(&ferry(&["backup", &format!("{backup}@one"), &restored]));
        ok(&ferry(&["rollback", "--discard", &format!("{restored}@one")]));
        restored
    });
}

#[test]
fn the_server_and_not_its_client_says_which_directories_take_the_space() {
    let served = Served::new(&["--size", "64M"]);
    let dir = served.mnt().join("videos");
    fs::create_dir(&dir).expect("it fits");
    let mut file = File::create(dir.join("one")).expect("it fits");
    file.write_all(&vec![7; FILE_LEN]).expect("it fits");
    file.sync_all().expect("it is durable");
    let volume = text(&served.dir.path().join("volume.ferry"));
    let all = ok(&ferry(&["space", &volume, "--json"]));
    let all: Value = serde_json::from_str(&all).expect("JSON");
    let videos = &all["tree"]["largest"][0];
    assert_eq!((&videos["name"], &videos["bytes"]), (&"videos".into(), &FILE_LEN.into()));
    assert_eq!((&all["counted"], &all["missed"]), (&3.into(), &0.into()));
    let refused = ferry(&["space", &text(&served.mnt())]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success(), "the client has no volume");
    assert!(said.contains("the machine that has the volume"), "{said}");
}
