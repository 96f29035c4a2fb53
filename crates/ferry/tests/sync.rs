//! `ferry sync` of many files: on a mount as one commit for two thousand, on any other file system
//! one by one, and both at a time.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "shared/holder.rs"]
mod holder;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use holder::holder_of;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

fn ferry(args: &[&str]) -> Output {
    Command::new(FERRY).args(args).output().unwrap()
}

fn ok(output: Output) -> Output {
    assert!(output.status.success(), "{output:?}");
    output
}

/// `ferry sync ARGS --from -` with this list.
fn sync_from(list: &[u8], args: &[&str]) -> Output {
    let mut command = Command::new(FERRY);
    command
        .arg("sync")
        .args(args)
        .args(["--from", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(list).unwrap();
    child.wait_with_output().unwrap()
}

/// A mounted volume that makes nothing durable on its own.
struct Mounted {
    dir: TempDir,
}

impl Mounted {
    fn new(options: &str) -> Self {
        let mounted = Self { dir: TempDir::new().unwrap() };
        fs::create_dir(mounted.mnt()).unwrap();
        ok(ferry(&["mkfs", mounted.volume().to_str().unwrap(), "--size", "1G"]));
        mounted.mount(options);
        mounted
    }
    fn mount(&self, options: &str) {
        let log = self.dir.path().join("log");
        let options = format!("commit_interval=1h,log={}{options}", log.display());
        ok(ferry(&[
            "mount",
            self.volume().to_str().unwrap(),
            self.mnt().to_str().unwrap(),
            "-o",
            &options,
        ]));
    }
    fn volume(&self) -> PathBuf {
        self.dir.path().join("volume.ferry")
    }
    fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
    fn stats(&self) -> serde_json::Value {
        let out = ok(ferry(&["stats", self.mnt().to_str().unwrap(), "--json"]));
        serde_json::from_slice(&out.stdout).unwrap()
    }
    fn contexts(&self) -> u64 {
        self.stats()["log"]["contexts"].as_u64().unwrap()
    }
    /// The daemon dies, and the volume is mounted again.
    fn crash(&self) {
        self.crash_to("");
    }
    /// The same, with these options.
    fn crash_to(&self, options: &str) {
        let said = ferry(&["fsck", self.volume().to_str().unwrap()]);
        let said = String::from_utf8(said.stderr).unwrap();
        let pid: String = said
            .split("process ")
            .nth(1)
            .unwrap()
            .chars()
            .take_while(char::is_ascii_digit)
            .collect();
        let daemon = Pid::from_raw(pid.parse().unwrap()).unwrap();
        // The holder would start another daemon.
        for process in [holder_of(daemon), daemon] {
            kill_process(process, Signal::KILL).unwrap();
        }
        self.mount(options);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        ferry(&["umount", "--force", self.mnt().to_str().unwrap()]);
    }
}

/// Files of one block, each with its own contents.
fn make(dir: &Path, count: usize) -> Vec<PathBuf> {
    fs::create_dir_all(dir).unwrap();
    (0..count)
        .map(|i| {
            let path = dir.join(i.to_string());
            fs::write(&path, block(i)).unwrap();
            path
        })
        .collect()
}

fn block(i: usize) -> Vec<u8> {
    i.to_le_bytes().repeat(512)
}

fn list(paths: &[PathBuf], separator: &str) -> Vec<u8> {
    paths.iter().map(|p| format!("{}{separator}", p.display())).collect::<String>().into_bytes()
}

#[test]
fn ten_thousand_files_are_a_few_commits_and_survive_the_daemons_death() {
    let mounted = Mounted::new("");
    for (name, recursive) in [("tree", true), ("list", false)] {
        let dir = mounted.mnt().join(name);
        let files = make(&dir, 10_000);
        let before = mounted.contexts();
        if recursive {
            ok(ferry(&["sync", "-r", dir.to_str().unwrap()]));
        } else {
            ok(sync_from(&list(&files, "\0"), &["--data"]));
        }
        // Each request carries 2,000 files; the directory has been read, which moved its access
        // time.
        let (commits, most) = (mounted.contexts() - before, if recursive { 6 } else { 5 });
        assert!((1..=most).contains(&commits), "{name}: {commits} commits");
        mounted.crash();
        for (i, file) in files.iter().enumerate() {
            assert_eq!(fs::read(file).unwrap(), block(i), "{}", file.display());
        }
    }
    ok(ferry(&["umount", mounted.mnt().to_str().unwrap()]));
    ok(ferry(&["fsck", mounted.volume().to_str().unwrap()]));
}

#[test]
fn stores_to_mapped_memory_are_synced() {
    let modes = ["", ",cache=strict", ",cache=writeback"];
    for (options, volume) in modes.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mounted = Mounted::new(options);
        let path = mounted.mnt().join("mapped");
        fs::write(&path, block(1)).unwrap();
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        store_through_a_mapping(&file, &block(2));
        let other = mounted.mnt().join("other");
        fs::write(&other, block(3)).unwrap();
        if volume {
            ok(ferry(&["sync", mounted.mnt().to_str().unwrap()]));
        } else {
            ok(ferry(&["sync", path.to_str().unwrap(), other.to_str().unwrap()]));
        }
        drop(file);
        mounted.crash();
        assert_eq!(fs::read(&path).unwrap(), block(2), "{options}");
        assert_eq!(fs::read(&other).unwrap(), block(3), "{options}");
    }
}

/// Leaves the stores in the page cache.
#[expect(unsafe_code, reason = "mmap(2)")]
fn store_through_a_mapping(file: &fs::File, contents: &[u8]) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let (len, prot) = (contents.len(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping of `len` bytes, which nobody else knows, written to inside its bounds,
    // and unmapped once.
    unsafe {
        let at = mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0).unwrap();
        std::ptr::copy_nonoverlapping(contents.as_ptr(), at.cast::<u8>(), len);
        munmap(at, len).unwrap();
    }
}

/// A write with `O_SYNC`, `O_DSYNC` or `RWF_DSYNC` is durable when it returns. Depending on the
/// mode, the kernel or the daemon ensures it.
#[test]
fn synchronous_writes_are_durable_when_they_return() {
    use rustix::fs::{Mode, OFlags, open};
    use rustix::io::{ReadWriteFlags, pwritev2};
    let durable = [
        (OFlags::SYNC, ReadWriteFlags::empty()),
        (OFlags::DSYNC, ReadWriteFlags::empty()),
        (OFlags::empty(), ReadWriteFlags::DSYNC),
    ];
    let ways = [OFlags::WRONLY, OFlags::WRONLY | OFlags::APPEND, OFlags::RDWR];
    for options in ["", ",cache=strict", ",cache=writeback"] {
        let mounted = Mounted::new(options);
        let all = ways
            .iter()
            .flat_map(|way| durable.iter().map(move |(open, write)| (*way | *open, *write)));
        for (i, (flags, write)) in all.enumerate() {
            let path = mounted.mnt().join(i.to_string());
            let file =
                open(&path, flags | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(0o600))
                    .unwrap();
            let bytes = block(i + 1);
            let written = pwritev2(&file, &[std::io::IoSlice::new(&bytes)], 0, write).unwrap();
            assert_eq!(written, bytes.len());
            // Nothing of it is made durable by what the next one does.
            mounted.crash_to(options);
            drop(file);
            assert_eq!(fs::read(&path).unwrap(), bytes, "{options} {flags:?} {write:?}");
        }
    }
}

#[test]
fn files_of_several_file_systems_are_synced_together_and_failures_are_named() {
    let mounted = Mounted::new("");
    let mut files = make(&mounted.mnt().join("a"), 50);
    files.extend(make(&mounted.dir.path().join("b"), 50));
    files.push(mounted.mnt().join("absent"));
    files.push(mounted.mnt().join("a"));
    std::os::unix::fs::symlink("nowhere", mounted.mnt().join("a/link")).unwrap();
    files.push(mounted.mnt().join("a/link"));
    let synced = sync_from(&list(&files, "\n"), &[]);
    assert_eq!(synced.status.code(), Some(1));
    let said = String::from_utf8(synced.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("mnt/absent") && said.contains("No such file"), "{said}");
    // The tree that holds the volume, the mount in it, and the daemon's files.
    ok(ferry(&["sync", "-r", mounted.dir.path().to_str().unwrap(), "--jobs", "8"]));
    mounted.crash();
    assert_eq!(fs::read(mounted.mnt().join("a/49")).unwrap(), block(49));
    assert!(mounted.mnt().join("a/link").is_symlink());
}

#[test]
fn sync_of_a_directory_syncs_its_volume_and_follows_named_links() {
    let mounted = Mounted::new("");
    make(&mounted.mnt().join("a"), 1);
    make(&mounted.mnt().join("b"), 1);
    ok(ferry(&["sync", mounted.mnt().join("b").to_str().unwrap()]));
    mounted.crash();
    assert_eq!(fs::read(mounted.mnt().join("a/0")).unwrap(), block(0));

    let link = mounted.dir.path().join("link");
    std::os::unix::fs::symlink(mounted.mnt().join("a"), &link).unwrap();
    make(&mounted.mnt().join("a"), 3);
    ok(ferry(&["sync", "-r", link.to_str().unwrap()]));
    mounted.crash();
    assert_eq!(fs::read(mounted.mnt().join("a/2")).unwrap(), block(2));

    let plain = ferry(&["sync", mounted.dir.path().to_str().unwrap()]);
    assert_eq!(plain.status.code(), Some(1));
    assert!(String::from_utf8(plain.stderr).unwrap().contains("no FerryFS is mounted here"));
}

/// Waits for a program, which the test does not outlive.
struct Running(std::process::Child);

impl Running {
    fn ends(mut self) -> Output {
        let code = self.0.wait().unwrap();
        let mut stderr = Vec::new();
        std::io::Read::read_to_end(&mut self.0.stderr.take().unwrap(), &mut stderr).unwrap();
        Output { status: code, stdout: Vec::new(), stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
    }
}

#[test]
fn waiting_forces_nothing_and_ends_with_somebody_elses_fsync() {
    let mounted = Mounted::new("");
    let mnt = mounted.mnt();
    let wait_for = |path: &Path| {
        let mut command = Command::new(FERRY);
        command.args(["sync", "--wait-only", path.to_str().unwrap()]).stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    };
    fs::write(mnt.join("other"), block(0)).unwrap();
    ok(ferry(&["sync", mnt.to_str().unwrap()]));
    let before = mounted.contexts();
    ok(wait_for(&mnt).ends());
    assert_eq!(mounted.contexts(), before, "nothing is left to be made durable");
    for (n, scope) in ["a/0", "a"].into_iter().enumerate() {
        let file = &make(&mnt.join("a"), n + 1)[n];
        let dirty = || mounted.stats()["data"]["dirty_bytes"].as_u64().unwrap();
        assert!(dirty() > 0);
        let before = mounted.contexts();
        let mut waits = wait_for(&mnt.join(scope));
        // It has asked once the file is on its way to the device.
        while dirty() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(mounted.contexts(), before);
        assert!(waits.0.try_wait().unwrap().is_none(), "nobody made it durable");
        fs::write(mnt.join("other"), block(n + 1)).unwrap();
        fs::File::open(mnt.join("other")).unwrap().sync_all().unwrap();
        ok(waits.ends());
        mounted.crash();
        assert_eq!(fs::read(file).unwrap(), block(n));
    }
}

#[test]
fn waiting_for_several_paths_waits_for_one_commit() {
    let mounted = Mounted::new("");
    let files = make(&mounted.mnt().join("a"), 3);
    let absent = mounted.mnt().join("absent");
    let mut command = Command::new(FERRY);
    command.args(["sync", "--wait-only"]).args(&files).arg(absent).stderr(Stdio::piped());
    let waits = Running(command.spawn().unwrap());
    while mounted.stats()["fuse"]["parked"] != 3 {
        std::thread::yield_now();
    }
    fs::write(mounted.mnt().join("other"), block(9)).unwrap();
    fs::File::open(mounted.mnt().join("other")).unwrap().sync_all().unwrap();
    let ended = waits.ends();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.lines().count() == 1 && said.contains("mnt/absent"), "{said}");
    mounted.crash();
    for (n, file) in files.iter().enumerate() {
        assert_eq!(fs::read(file).unwrap(), block(n));
    }
}

#[test]
fn waiting_ends_with_the_timers_commit() {
    let mounted = Mounted::new(",commit_interval=200ms");
    make(&mounted.mnt(), 3);
    let forces = mounted.stats()["log"]["forces"].clone();
    ok(ferry(&["sync", "--wait-only", mounted.mnt().to_str().unwrap()]));
    assert_eq!(mounted.stats()["log"]["forces"], forces);
    let fifo = mounted.mnt().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    ok(ferry(&["sync", "--wait-only", fifo.to_str().unwrap()]));
    mounted.crash();
    assert_eq!(fs::read(mounted.mnt().join("2")).unwrap(), block(2));
    assert!(fs::symlink_metadata(fifo).is_ok(), "the FIFO's name is durable");
}

#[test]
fn waiting_where_nobody_can_say_is_refused() {
    let mounted = Mounted::new(",cache=writeback");
    let elsewhere = mounted.dir.path().join("elsewhere");
    fs::write(&elsewhere, block(0)).unwrap();
    for (path, why) in [(mounted.mnt(), "cache=writeback"), (elsewhere, "not on FerryFS")] {
        let refused = ferry(&["sync", "--wait-only", path.to_str().unwrap()]);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(ferry(&["sync", "--wait-only", "-r", "x"]).status.code(), Some(2));
}

#[test]
fn bad_usage_and_unreadable_lists_are_refused() {
    assert_eq!(ferry(&["sync"]).status.code(), Some(2));
    assert_eq!(ferry(&["sync", "--jobs", "0", "x"]).status.code(), Some(2));
    let absent = ferry(&["sync", "--from", "/no/such/list"]);
    assert_eq!(absent.status.code(), Some(1));
    assert!(String::from_utf8(absent.stderr).unwrap().contains("/no/such/list"));
    ok(sync_from(b"", &[]));
}
