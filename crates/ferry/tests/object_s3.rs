//! Volumes in a store that speaks S3: proven, made, mounted, killed, taken over, held, served
//! (these need root and /dev/fuse). The store is one of this process, which does wrong what a test
//! asks it to.

#[expect(dead_code, reason = "tests of the store itself use the rest")]
#[path = "../../ferry-object/tests/fake/mod.rs"]
mod fake;
#[path = "shared/holder.rs"]
mod holder;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use fake::{BUCKET, Fake, Fault};
use holder::holder_of;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");
const SECRET: &str = "secret-of-the-test";
/// Where a store's locks are on this machine.
const LOCKS: &str = "/var/lib/ferry/locks";

/// Kills a mount as a loss of power does: with its holder.
fn kill_mount_of(daemon: Pid) {
    kill_process(holder_of(daemon), Signal::KILL).expect("it is ours");
    while Path::new(&format!("/proc/{daemon}/exe")).exists() {
        std::thread::yield_now();
    }
}

/// A store and two mount points, which no mount outlives.
struct Store {
    fake: Fake,
    dir: TempDir,
}

impl Store {
    /// Nothing is made yet.
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        for name in ["first", "second"] {
            fs::create_dir(dir.path().join(name)).expect("a mount point");
        }
        Self { fake: Fake::start_large(), dir }
    }

    /// With a volume.
    fn made() -> Self {
        let store = Self::new();
        ok(&store.ferry(&["mkfs", &store.url()]));
        store
    }

    fn url(&self) -> String {
        format!("s3://{BUCKET}/a/vol?endpoint={}", self.fake.url())
    }

    fn at(&self, mount: &str) -> PathBuf {
        self.dir.path().join(mount)
    }

    fn log(&self, mount: &str) -> String {
        fs::read_to_string(self.at(&format!("{mount}.log"))).expect("the daemon's log")
    }

    /// A command with the keys in its environment.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("AWS_ACCESS_KEY_ID", "KEYID").env("AWS_SECRET_ACCESS_KEY", SECRET);
        command.env("HOME", self.dir.path()).env("AWS_REGION", "eu-test-1");
        for name in ["AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"]
        {
            command.env_remove(name);
        }
        command.current_dir(self.dir.path());
        command
    }

    fn ferry(&self, args: &[&str]) -> Output {
        let mut bounded = self.command("timeout");
        bounded.args(["--signal=KILL", "60", FERRY]).args(args);
        bounded.output().expect("the command runs")
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

    /// The directories of this machine with the locks of this store, by whatever name it has.
    fn locks(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(LOCKS).into_iter().flatten().flatten().map(|entry| entry.path());
        let address = self.fake.url();
        let is_ours = |path: &PathBuf| {
            let text = fs::read_to_string(path.join("id")).unwrap_or_default();
            text.lines().nth(1).is_some_and(|name| name.contains(&address))
        };
        all.filter(is_ours).collect()
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
        for directory in self.locks() {
            fs::remove_dir_all(directory).expect("it is there");
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
    assert!(!text.contains(SECRET), "{text}");
}

/// Contents of file `n`: some are inline, some take several blocks.
fn contents(n: usize) -> Vec<u8> {
    let line = format!("file {n} has this line many times\n");
    line.repeat(1 + n % 300).into_bytes()
}

fn write_files(at: &Path, files: std::ops::Range<usize>) {
    for n in files {
        fs::write(at.join(format!("{n}")), contents(n)).expect("a file");
    }
}

fn check_files(at: &Path, files: std::ops::Range<usize>) {
    for n in files {
        let path = at.join(format!("{n}"));
        let found = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(found == contents(n), "{} has other contents", path.display());
    }
}

#[test]
fn what_was_synced_survives_a_killed_daemon_and_no_secret_is_shown() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..500);
    let mut file = fs::File::create(store.at("first").join("synced")).expect("a file");
    file.write_all(&contents(299)).and_then(|()| file.sync_all()).expect("it is durable");
    drop(file);
    ok(&store.ferry(&["sync", "first"]));
    let daemon = store.daemon("first");
    let table = fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
    assert!(table.contains(&format!(" {} ", store.url())), "{table}");
    let of_daemon = |file: &str| {
        let path = format!("/proc/{}/{file}", daemon.as_raw_nonzero());
        String::from_utf8_lossy(&fs::read(path).expect("it runs")).into_owned()
    };
    for text in [table, of_daemon("cmdline"), store.log("first")] {
        assert!(!text.contains(SECRET), "{text}");
    }
    kill_mount_of(daemon);
    store.mount("first");
    check_files(&store.at("first"), 0..500);
    assert_eq!(fs::read(store.at("first").join("synced")).expect("it is there"), contents(299));
    ok(&store.ferry(&["scrub", "first"]));
    ok(&store.ferry(&["sync", &store.url()]));
    assert!(store.stats(&store.url())["store"]["puts"].as_u64() > Some(0));
    ok(&store.ferry(&["umount", &store.url()]));
    ok(&store.ferry(&["fsck", &store.url()]));
    ok(&store.ferry(&["scrub", &store.url()]));
    let inode = store.ferry(&["debug", &store.url(), "path", "/synced", "--json"]);
    ok(&inode);
    assert!(String::from_utf8_lossy(&inode.stdout).contains("inode"), "{inode:?}");
    assert_eq!(store.locks().len(), 1, "{:?}", store.locks());
}

#[test]
fn a_second_owner_is_refused_until_it_takes_the_volume_over() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..50);
    let mut late = fs::File::create(store.at("first").join("late")).expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    let refused = store.try_mount("second", &[]);
    let pid = format!("process {} on ", store.daemon("first"));
    let first = store.at("first").canonicalize().expect("it is mounted");
    let mounted = format!("mounted on {}: unmount it first", first.display());
    fails(&refused, 1, &["in use by", &pid, "since", "ago", &mounted, "--take-over"]);
    ok(&store.try_mount("second", &["--take-over"]));
    check_files(&store.at("second"), 0..50);
    let written = late.write_all(b"never durable").and_then(|()| late.sync_all());
    assert!(written.is_err(), "the first owner acknowledges a sync");
    drop(late);
    write_files(&store.at("second"), 50..60);
    ok(&store.ferry(&["umount", "second"]));
    assert!(!store.ferry(&["umount", "first"]).status.success(), "it could not write everything");
    store.mount("first");
    check_files(&store.at("first"), 0..60);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &store.url()]));
}

#[test]
fn an_owner_that_no_lock_proves_dead_is_taken_for_alive() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..5);
    ok(&store.ferry(&["sync", "first"]));
    kill_mount_of(store.daemon("first"));
    // As on a machine that has lost its disk, or on a copy of it, or under another name.
    let [locks] = &store.locks()[..] else { panic!("{:?}", store.locks()) };
    fs::rename(locks, store.at("locks")).expect("they can be moved");
    ok(&store.ferry(&["umount", "--force", "first"]));
    let refused = store.try_mount("first", &[]);
    fails(&refused, 1, &["in use by process", "since", "unmount it there", "--take-over"]);
    let [others] = &store.locks()[..] else { panic!("{:?}", store.locks()) };
    fs::remove_dir_all(others).expect("they are there");
    fs::rename(store.at("locks"), others).expect("they can be moved");
    // With its locks the machine knows better.
    store.mount("first");
    check_files(&store.at("first"), 0..5);
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn what_the_store_refuses_for_a_time_is_held_shown_and_goes_on() {
    let store = Store::made();
    store.mount("first");
    write_files(&store.at("first"), 0..20);
    assert!(store.stats("first")["store"]["held"].is_null());
    for (fault, word) in [
        (Fault::error(403, "AccessDenied"), "AccessDenied"),
        (Fault::error(404, "NoSuchBucket"), "NoSuchBucket"),
        (Fault::error(403, "QuotaExceeded"), "no space left"),
        (Fault::RequestLost, "127.0.0.1"),
    ] {
        store.fake.fail_all(Some(fault));
        fs::write(store.at("first").join("new"), word).expect("it is in memory");
        let mut sync = store.command(FERRY).args(["sync", "first"]).spawn().expect("it runs");
        // A look for newer owners is held, too.
        while store.stats("first")["store"]["held"]["reason"].is_null() {
            std::thread::yield_now();
        }
        assert!(sync.try_wait().expect("it is ours").is_none(), "the sync waits");
        let held = store.stats("first")["store"]["held"].clone();
        assert!(held["reason"].as_str().is_some_and(|reason| reason.contains(word)), "{held}");
        assert!(held["requests"].as_u64() > Some(0) && held["time_ns"].is_u64(), "{held}");
        let top = store.ferry(&["top", "first", "--interval", "50ms", "--count", "1"]);
        assert!(String::from_utf8_lossy(&top.stdout).contains("  held for "), "{top:?}");
        store.fake.fail_all(None);
        assert!(sync.wait().expect("it ends").success());
        while !store.stats("first")["store"]["held"].is_null() {
            std::thread::yield_now();
        }
    }
    let log = store.log("first");
    assert_eq!(log.matches("requests to the store are held").count(), 4, "once each: {log}");
    assert_eq!(log.matches("no request to the store is held any more").count(), 4, "{log}");
    check_files(&store.at("first"), 0..20);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &store.url()]));
}

#[test]
fn a_store_that_cannot_hold_a_volume_is_refused_and_left_as_it_was() {
    let expires = "<LifecycleConfiguration><Rule><ID>old</ID><Status>Enabled</Status><Prefix/>\
                   <Expiration><Days>30</Days></Expiration></Rule></LifecycleConfiguration>";
    let versions = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>";
    let skewed = String::from("Date: Thu, 23 May 2013 21:00:00 GMT\r\n");
    let skewed = Fault::Error(403, "RequestTimeTooSkewed", String::new(), skewed);
    type Prepare<'a> = &'a dyn Fn(&Fake);
    let cases: [(Prepare<'_>, &[&str]); 9] = [
        (&|fake| fake.fail_all(Some(Fault::error(404, "NoSuchBucket"))), &["no bucket bucket"]),
        (
            &|fake| fake.fail_all(Some(Fault::error(403, "SignatureDoesNotMatch"))),
            &["the secret key is not the one of KEYID"],
        ),
        (&|fake| fake.fail_all(Some(skewed.clone())), &["ahead of the store's", "set it"]),
        (
            &|fake| fake.fail_method(Some(("DELETE", Fault::error(403, "AccessDenied")))),
            &["s3:DeleteObject"],
        ),
        (&Fake::replace, &["cannot hold a volume", "If-None-Match"]),
        (&|fake| fake.rules(versions, ""), &["keeps old versions", "suspend versioning"]),
        (&|fake| fake.rules("", expires), &["lifecycle rule old", "remove it"]),
        (&|fake| fake.put("a/vol/letter", b"mine"), &["letter", "is left alone", "another prefix"]),
        (&|fake| fake.put("a/vol/w/0001", b""), &["w/0001", "super is missing"]),
    ];
    for (prepare, texts) in cases {
        let store = Store::new();
        store.fake.put("b", b"of another program");
        prepare(&store.fake);
        let before = store.fake.keys();
        fails(&store.ferry(&["mkfs", &store.url()]), 1, texts);
        let left = store.fake.keys().into_iter().filter(|key| !key.starts_with("a/vol/proof/"));
        assert_eq!(left.collect::<Vec<_>>(), before, "{texts:?}");
    }
}

#[test]
fn a_new_volume_is_complete_or_absent() {
    let store = Store::new();
    let (host, url) = (store.fake.url(), store.url());
    fails(&store.try_mount("first", &[]), 1, &["no FerryFS volume here", "ferry mkfs s3://"]);
    // What the store does not tell about itself is a warning.
    let bare = format!("s3://{BUCKET}/a/vol/");
    let made = store.ferry(&["mkfs", &bare, "--endpoint", &host, "--size", "1G"]);
    ok(&made);
    assert!(said(&made).contains("s3:GetLifecycleConfiguration"), "{made:?}");
    let printed = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(printed.starts_with(&format!("{url}: a new volume of 1.0 GiB")), "{printed}");
    assert!(!store.fake.keys().iter().any(|key| key.contains("proof")), "{:?}", store.fake.keys());
    fails(&store.ferry(&["mkfs", &url]), 1, &["a FerryFS volume here already"]);
    fails(&store.ferry(&["mkfs", &url, "--force"]), 2, &["never overwritten"]);
    fails(&store.ferry(&["mkfs", "v", "--endpoint", &host]), 2, &["--endpoint is for s3://"]);
    let nobody = format!("s3://{BUCKET}/a?endpoint=http://127.0.0.1:1");
    fails(&store.ferry(&["mkfs", &nobody]), 1, &["does not answer", "try again"]);
    let keyless =
        store.command(FERRY).env_remove("AWS_SECRET_ACCESS_KEY").args(["fsck", &url]).output();
    fails(&keyless.expect("it runs"), 8, &["AWS_SECRET_ACCESS_KEY is not set"]);
}

#[test]
fn environment_profile_and_url_name_one_store() {
    let store = Store::made();
    let host = store.fake.url();
    fs::create_dir(store.at(".aws")).expect("a directory");
    let keys = format!(
        "[work]\naws_access_key_id = WORKID\naws_secret_access_key = {SECRET}\nendpoint_url = {host}\n"
    );
    fs::write(store.at(".aws/credentials"), keys).expect("it can be written");
    let with_profile = format!("s3://{BUCKET}/a/vol?profile=work");
    let used = || {
        let seen = store.fake.seen().pop().expect("it arrived");
        seen.headers["authorization"].contains("Credential=WORKID/")
    };
    // As mount(8) calls its helper, for a line of fstab.
    let mut helper = store.command(FERRY);
    helper.arg0("mount.fuse.ferry").args([&with_profile, "first", "-o", "rw,noatime"]);
    ok(&helper.output().expect("it runs"));
    write_files(&store.at("first"), 0..3);
    ok(&store.ferry(&["sync", &with_profile]));
    assert!(used(), "the profile that is named comes before the environment");
    let table = fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
    let source = format!(" s3://{BUCKET}/a/vol?endpoint={host}&profile=work ");
    assert!(table.contains(&source), "{table}");
    // Whose keys are used makes no difference to which volume it is.
    ok(&store.ferry(&["sync", &store.url()]));
    fails(&store.try_mount("second", &[]), 1, &["in use by", "mounted on"]);
    let environment = |args: &[&str]| {
        let mut command = store.command(FERRY);
        ok(&command.env("AWS_ENDPOINT_URL", &host).args(args).output().expect("it runs"));
    };
    let bare = format!("s3://{BUCKET}/a/vol");
    environment(&["umount", &bare]);
    environment(&["fsck", &bare]);
    assert_eq!(store.locks().len(), 1, "{:?}", store.locks());
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
fn a_cache_on_disk_answers_in_place_of_the_store_and_may_be_damaged() {
    let store = Store::made();
    let option = format!("cache={},cache_disk=64M", store.at("cache").display());
    let mount = |mount: &str| ok(&store.try_mount(mount, &["-o", &option]));
    let figure = |name: &str| store.stats("first")["store"][name].as_u64().expect("a number");
    let file = store.at("cache/ferry-cache");
    let wanted = noise(16 << 20);
    mount("first");
    fs::write(store.at("first").join("large"), &wanted).expect("a file");
    ok(&store.ferry(&["umount", "first"]));
    let read = || assert!(fs::read(store.at("first").join("large")).expect("a file") == wanted);

    // What was written is there after a new mount.
    mount("first");
    let (hits, got) = (figure("cache_hits"), figure("get_bytes"));
    read();
    assert!(figure("cache_hits") > hits && figure("get_bytes") < got + (1 << 20));
    assert!(figure("cache_bytes") >= 16 << 20);
    ok(&store.ferry(&["umount", "first"]));

    // Damage costs time only.
    let len = fs::metadata(&file).expect("it is there").len();
    assert!(len <= (64 << 20) + 4096, "{len}");
    let damaged = fs::OpenOptions::new().write(true).open(&file).expect("it is there");
    let slots = 1 << 20;
    std::os::unix::fs::FileExt::write_all_at(&damaged, &noise((len - slots) as usize), slots)
        .expect("it can be written");
    mount("first");
    read();
    assert!(figure("cache_damaged") > 0);
    // It is of one volume and one process.
    let other = format!("s3://{BUCKET}/other?endpoint={}", store.fake.url());
    ok(&store.ferry(&["mkfs", &other]));
    let before = store.fake.keys();
    let refused = store.ferry(&["mount", &other, "second", "-o", &option]);
    fails(&refused, 1, &["the cache of another volume", "name another directory"]);
    assert_eq!(store.fake.keys(), before, "nothing was claimed");
    ok(&store.ferry(&["umount", "first"]));
    fs::remove_dir_all(store.at("cache")).expect("it is there");
    mount("first");
    read();
    ok(&store.ferry(&["umount", "first"]));
    fails(&store.ferry(&["mount", "v", "first", "-o", &option]), 2, &["for volumes in a store"]);
}

/// A server, which ends with its test.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_volume_in_a_bucket_is_served() {
    let store = Store::made();
    let mut command = store.command(FERRY);
    command.args(["serve", &store.url(), "--listen", "127.0.0.1:0", "--insecure"]);
    let mut server = Served(command.stderr(Stdio::piped()).spawn().expect("it runs"));
    let mut lines = BufReader::new(server.0.stderr.take().expect("it is piped")).lines();
    let address = loop {
        let line = lines.next().expect("it serves").expect("it is text");
        let Some((_, rest)) = line.split_once("address=") else { continue };
        break rest.split(' ').next().expect("it has one").to_owned();
    };
    let remote = format!("ferry://{address}/");
    ok(&store.ferry(&["mount", &remote, "first", "-o", "insecure"]));
    write_files(&store.at("first"), 0..20);
    ok(&store.ferry(&["sync", "first"]));
    let with_profile = format!("{}&profile=other", store.url());
    assert!(store.stats(&with_profile)["store"]["puts"].as_u64() > Some(0));
    // A server that is about to end is waited for.
    let refused = store.try_mount("second", &[]);
    assert!(!refused.status.success(), "{refused:?}");
    assert!(said(&refused).contains("`ferry serve`: stop that first"), "{refused:?}");
    ok(&store.ferry(&["umount", "first"]));
    let pid = i32::try_from(server.0.id()).ok().and_then(Pid::from_raw).expect("a number");
    kill_process(pid, Signal::TERM).expect("it is ours");
    assert!(server.0.wait().expect("it ends").success());
    ok(&store.ferry(&["fsck", &store.url()]));
}

#[test]
fn without_home_in_the_environment_the_users_profile_is_found() {
    let users = fs::read_to_string("/etc/passwd").expect("it can be read");
    for (uid, user) in [(0, "root:"), (65534, "nobody:")] {
        let line = users.lines().find(|line| line.starts_with(user)).expect("a user");
        let home = line.split(':').nth(5).expect("it has a home");
        // As mount(8) calls a helper.
        let mut command = Command::new(FERRY);
        command.env_clear().current_dir("/").uid(uid).gid(uid);
        let said = command.args(["fsck", "s3://bucket/a?profile=work"]).output();
        let text = String::from_utf8(said.expect("it runs").stderr).expect("UTF-8");
        let wanted = format!("no profile work in {home}/.aws/credentials or {home}/.aws/config");
        assert!(text.contains(&wanted), "{text}");
    }
}
