//! Questions to a mount's daemon beside the mount; how the daemon begins and ends (these need
//! root and /dev/fuse).

#[path = "control/dashboard.rs"]
mod dashboard;
#[path = "control/doctor.rs"]
mod doctor;
#[path = "control/go_on.rs"]
mod go_on;
#[path = "shared/holder.rs"]
mod holder;
#[path = "control/killed.rs"]
mod killed;
#[path = "control/metrics.rs"]
mod metrics;
#[path = "control/profile.rs"]
mod profile;
#[path = "control/space.rs"]
mod space;
#[path = "control/trace.rs"]
mod trace;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use holder::holder_of;

const FERRY: &str = env!("CARGO_BIN_EXE_ferry");

/// A volume and a mount point, which no mount outlives.
struct TestVolume(TempDir);

impl TestVolume {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        std::fs::create_dir(dir.path().join("mnt")).expect("a mount point");
        let fixture = Self(dir);
        ok(&ferry(&["mkfs", path(&fixture.volume()), "--size", "256M"]));
        fixture
    }

    fn volume(&self) -> PathBuf {
        self.0.path().join("volume.ferry")
    }

    fn mnt(&self) -> PathBuf {
        self.0.path().join("mnt")
    }

    fn log(&self) -> String {
        format!("log={}", self.0.path().join("log").display())
    }

    /// What the daemon has said.
    fn daemon_log(&self) -> String {
        std::fs::read_to_string(self.0.path().join("log")).expect("the daemon's log")
    }

    /// Makes a volume in a store, with these options, too.
    fn make_store(&self, more: &[&str]) -> String {
        let store = format!("dir://{}", self.0.path().join("store").display());
        ok(&ferry(&[&["mkfs", &store, "--size", "256M"], more].concat()));
        store
    }

    /// Makes an encrypted one, and mounts it. Gives the file of its passphrase.
    fn mount_encrypted(&self) -> PathBuf {
        let file = self.0.path().join("passphrase");
        std::fs::write(&file, "correct horse").expect("writes");
        let store = self.make_store(&["--encrypt", "--passphrase-file", path(&file)]);
        let named = format!("passphrase_file={}", path(&file));
        ok(&ferry(&["mount", &store, path(&self.mnt()), "-o", &named, "-o", &self.log()]));
        file
    }

    fn mount(&self) -> &Self {
        ok(&ferry(&["mount", path(&self.volume()), path(&self.mnt()), "-o", &self.log()]));
        self
    }

    fn daemon(&self) -> Pid {
        let stats = ferry(&["stats", path(&self.mnt()), "--json"]);
        let stats: serde_json::Value =
            serde_json::from_slice(&stats.stdout).expect("statistics are JSON");
        let pid = stats["fuse"]["daemon"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        pid.and_then(Pid::from_raw).expect("the daemon's number")
    }

    /// Kills the holder of the mount, and with it the daemon.
    fn kill_holder(&self) {
        let daemon = self.daemon();
        kill_process(holder_of(daemon), Signal::KILL).expect("it is ours");
        while Path::new(&format!("/proc/{daemon}/exe")).exists() {
            std::thread::yield_now();
        }
    }

    fn is_mounted(&self) -> bool {
        let table = std::fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
        table.contains(path(&self.mnt()))
    }
}

impl Drop for TestVolume {
    fn drop(&mut self) {
        // Nothing is mounted if the test went well.
        if self.is_mounted() {
            ferry(&["umount", "--force", path(&self.mnt())]);
        }
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a temporary directory's name is UTF-8")
}

/// A command that would wait for ever fails its test instead.
fn ferry(args: &[&str]) -> Output {
    let mut bounded = Command::new("timeout");
    bounded.args(["--signal=KILL", "60", FERRY]).args(args).output().expect("the command runs")
}

/// Stops a process. A signal reaches its threads one after another, so this waits until each of
/// them has stopped.
fn stop(process: Pid) {
    kill_process(process, Signal::STOP).expect("it is ours");
    let threads = format!("/proc/{process}/task");
    let state = |stat: &str| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    let runs = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat =
            std::fs::read_to_string(thread.expect("the process is there").path().join("stat"));
        stat.is_ok_and(|stat| state(&stat) != Some('T'))
    };
    while std::fs::read_dir(&threads).expect("the process is there").any(runs) {
        std::thread::yield_now();
    }
}

fn ok(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn fails(output: &Output, text: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains(text), "{output:?}");
}

#[test]
fn an_unmount_fails_if_the_volume_cannot_be_closed() {
    let fixture = TestVolume::new();
    fixture.mount();
    let volume =
        std::fs::OpenOptions::new().write(true).open(fixture.volume()).expect("it is there");
    volume.set_len(0).expect("root may do anything");
    fails(&ferry(&["umount", path(&fixture.mnt())]), "not closed cleanly");
    assert!(!fixture.is_mounted());
}

/// Any user may bind any name, so it need not be UTF-8.
#[test]
fn a_foreign_socket_does_not_hide_the_result_of_closing() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let name =
        format!("x{}", std::process::id()).into_bytes().into_iter().chain([0xff, 0x1b, b'\n']);
    let name = SocketAddr::from_abstract_name(name.collect::<Vec<_>>()).expect("a name");
    let _foreign = UnixListener::bind_addr(&name).expect("nobody has it");
    let fixture = TestVolume::new();
    fixture.mount();
    ok(&ferry(&["clients"]));
    cut(&fixture);
    fails(&ferry(&["umount", path(&fixture.mnt())]), "not closed cleanly");
    assert!(!fixture.is_mounted());
}

/// Another network name space has sockets of its own: nobody answers there.
#[test]
fn umount_trusts_the_clean_mark_if_the_daemon_cannot_be_asked() {
    let elsewhere = |fixture: &TestVolume| {
        let mut bounded = Command::new("timeout");
        bounded.args([
            "--signal=KILL",
            "60",
            "unshare",
            "--net",
            FERRY,
            "umount",
            path(&fixture.mnt()),
        ]);
        bounded.output().expect("unshare runs")
    };
    let fixture = TestVolume::new();
    fixture.mount();
    std::fs::write(fixture.mnt().join("file"), "x").expect("it fits");
    ok(&elsewhere(&fixture));
    fixture.mount();
    std::fs::write(fixture.mnt().join("file"), "y").expect("it fits");
    cut(&fixture);
    fails(&elsewhere(&fixture), "closed cleanly");
    assert!(!fixture.is_mounted());
}

#[test]
fn root_learns_how_another_users_volume_was_closed() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let fixture = TestVolume::new();
    std::fs::set_permissions(fixture.0.path(), std::fs::Permissions::from_mode(0o777))
        .expect("it is ours");
    for owned in [fixture.volume(), fixture.mnt()] {
        chown(&owned, Some(65534), Some(65534)).expect("this runs as root");
    }
    let mut mount = Command::new(FERRY);
    let mount =
        mount.args(["mount", path(&fixture.volume()), path(&fixture.mnt()), "-o", &fixture.log()]);
    let mounted = mount.uid(65534).gid(65534).output().expect("the command runs");
    if !mounted.status.success() {
        eprintln!("not tested, users may not mount here: {mounted:?}");
        return;
    }
    cut(&fixture);
    fails(&ferry(&["umount", path(&fixture.mnt())]), "not closed cleanly");
    assert!(!fixture.is_mounted());
}

#[test]
fn umount_reports_a_daemon_that_has_died() {
    let fixture = TestVolume::new();
    for (option, code) in [(None, 1), (Some("--force"), 0), (Some("--lazy"), 0)] {
        fixture.mount();
        fixture.kill_holder();
        let args: Vec<&str> = ["umount"].into_iter().chain(option).collect();
        let said = ferry(&[&args[..], &[path(&fixture.mnt())]].concat());
        let words = String::from_utf8_lossy(&said.stderr);
        assert!(
            said.status.code() == Some(code) && words.contains("has died"),
            "{option:?}: {said:?}"
        );
        assert!(!fixture.is_mounted());
    }
    fixture.mount();
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

fn cut(fixture: &TestVolume) {
    let volume =
        std::fs::OpenOptions::new().write(true).open(fixture.volume()).expect("it is there");
    volume.set_len(0).expect("root may do anything");
}

#[test]
fn requests_to_a_hung_daemon_fail_soon() {
    let fixture = TestVolume::new();
    fixture.mount();
    let daemon = fixture.daemon();
    stop(daemon);
    let asked: Vec<Output> = std::thread::scope(|scope| {
        let mnt = path(&fixture.mnt()).to_owned();
        let questions = [vec!["stats"], vec!["umount"], vec!["sync"], vec!["stats", "--json"]];
        let asking: Vec<_> = questions
            .into_iter()
            .map(|mut question| {
                question.push(&mnt);
                let question: Vec<String> = question.into_iter().map(str::to_owned).collect();
                scope.spawn(move || ferry(&question.iter().map(String::as_str).collect::<Vec<_>>()))
            })
            .collect();
        asking.into_iter().map(|one| one.join().expect("it ended")).collect()
    });
    kill_process(daemon, Signal::CONT).expect("it is ours");
    asked.iter().for_each(|answer| fails(answer, "has not answered"));
    let error: serde_json::Value =
        serde_json::from_slice(&asked[3].stdout).expect("an error is JSON, too");
    assert!(error["error"].as_str().is_some_and(|error| error.contains("kill -CONT")), "{error}");
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_waiting_mount_names_the_holder_and_ends_with_its_caller() {
    let fixture = TestVolume::new();
    let held =
        ferry::Volume::open(fixture.volume(), &ferry::Options::default()).expect("nobody has it");
    let mut mount = Command::new(FERRY)
        .args(["mount", path(&fixture.volume()), path(&fixture.mnt()), "-o", &fixture.log()])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let mut said = BufReader::new(mount.stderr.take().expect("it is piped"));
    let mut line = String::new();
    said.read_line(&mut line).expect("it says something");
    assert!(line.contains(&format!("process {}", std::process::id())), "{line}");
    mount.kill().expect("it is ours");
    mount.wait().expect("it has ended");
    // A daemon that still waited would get the volume now. It has the other end, too, until it
    // mounts or ends.
    held.close().expect("it can be written");
    drop(held);
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("it ends");
    assert!(!fixture.is_mounted(), "{rest}");
    fixture.mount();
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn a_waiting_fsck_names_the_holder_once() {
    let fixture = TestVolume::new();
    fixture.mount();
    let daemon = fixture.daemon();
    // The mount is gone, and its daemon cannot end.
    stop(daemon);
    ok(&ferry(&["umount", "--lazy", path(&fixture.mnt())]));
    let mut check = Command::new(FERRY)
        .args(["fsck", path(&fixture.volume())])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let mut said = BufReader::new(check.stderr.take().expect("it is piped"));
    let mut line = String::new();
    said.read_line(&mut line).expect("it says something");
    kill_process(daemon, Signal::CONT).expect("it is ours");
    assert!(line.contains(&format!("process {}", daemon.as_raw_nonzero())), "{line}");
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("it ends");
    assert!(check.wait().expect("it ends").success() && rest.is_empty(), "{line}{rest}");
}

/// A file system in memory, as small as the host's disk may be.
struct SmallHost(PathBuf);

impl SmallHost {
    fn new(fixture: &TestVolume) -> Self {
        let at = fixture.0.path().join("host");
        std::fs::create_dir(&at).expect("a mount point");
        let mount = ["-t", "tmpfs", "-o", "size=100M", "none", path(&at)];
        ok(&Command::new("mount").args(mount).output().expect("it runs"));
        Self(at)
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        let _unmounted = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

#[test]
fn a_mount_on_a_host_that_is_nearly_full_says_so() {
    let fixture = TestVolume::new();
    let host = SmallHost::new(&fixture);
    let volume = host.0.join("volume.ferry");
    ok(&ferry(&["mkfs", path(&volume), "--size", "1G"]));
    let mounted = ferry(&["mount", path(&volume), path(&fixture.mnt()), "-o", &fixture.log()]);
    ok(&mounted);
    let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
    ok(&ferry(&["umount", path(&fixture.mnt())]));
    assert!(said.contains("it may come to need") && said.contains("make room there"), "{said}");
}

/// A server of a volume, ended with the test.
struct Served(Child, String);

impl Served {
    fn new(volume: &Path) -> Self {
        let mut server = Command::new(FERRY)
            .args(["serve", path(volume), "--listen", "127.0.0.1:0", "--insecure"])
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command runs");
        let mut lines = BufReader::new(server.stderr.take().expect("it is piped")).lines();
        let address = lines.by_ref().find_map(|line| {
            let line = line.expect("it is text");
            Some(line.split_once("address=")?.1.split_whitespace().next()?.to_owned())
        });
        // The server must not block on its output.
        std::thread::spawn(move || lines.for_each(drop));
        Self(server, address.expect("it says where it listens"))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

#[test]
fn a_successful_mount_prints_nothing() {
    let fixture = TestVolume::new();
    let says_nothing = |source: &str, options: &str| {
        let options = format!("{},{options}", fixture.log());
        let mut mount = Command::new(FERRY);
        mount.arg0("mount.fuse.ferry").args([source, path(&fixture.mnt()), "-o", &options]);
        let mount = mount.output().expect("the command runs");
        ok(&mount);
        ok(&ferry(&["umount", path(&fixture.mnt())]));
        assert!(mount.stderr.is_empty() && mount.stdout.is_empty(), "{mount:?}");
    };
    says_nothing(path(&fixture.volume()), "rw");
    let server = Served::new(&fixture.volume());
    says_nothing(&format!("ferry://{}/", server.1), "insecure");
}

#[test]
fn a_reused_device_number_leads_to_the_new_daemon() {
    let (ending, fixture) = (TestVolume::new(), TestVolume::new());
    ending.mount();
    let old = ending.daemon();
    // The mount is gone, and its daemon cannot end.
    stop(old);
    ok(&ferry(&["umount", "--lazy", path(&ending.mnt())]));
    fixture.mount();
    let asked = fixture.daemon();
    kill_process(old, Signal::CONT).expect("it is ours");
    assert_ne!(asked, old);
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn trim_returns_free_space_to_the_host() {
    let fixture = TestVolume::new();
    fixture.mount();
    let large = fixture.mnt().join("large");
    std::fs::write(&large, vec![7; 64 << 20]).expect("it fits");
    ok(&ferry(&["sync", path(&fixture.mnt())]));
    std::fs::remove_file(&large).expect("it is there");
    let before = held(&fixture.volume());
    let trimmed = ferry(&["trim", path(&fixture.mnt())]);
    ok(&trimmed);
    assert!(
        held(&fixture.volume()) + (32 << 20) < before,
        "{before} bytes, then {}",
        held(&fixture.volume())
    );
    if Command::new("fstrim").arg("--version").output().is_ok() {
        ok(&Command::new("fstrim").arg(fixture.mnt()).output().expect("it runs"));
    }
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

#[test]
fn flags_of_chattr_and_project_ids_are_refused_as_unknown() {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let fixture = TestVolume::new();
    fixture.mount();
    let file = fixture.mnt().join("file");
    std::fs::write(&file, "x").expect("it fits");
    for path in [fixture.mnt(), file] {
        let open = std::fs::File::open(&path).expect("it is there");
        assert_eq!(ioctl_getflags(&open), Err(rustix::io::Errno::NOTTY), "{}", path.display());
        assert_eq!(ioctl_setflags(&open, IFlags::IMMUTABLE), Err(rustix::io::Errno::NOTTY));
        // As programs ask: neither may believe that a flag is set.
        for program in [
            &["lsattr", "-d"][..],
            &["lsattr", "-p", "-d"],
            &["chattr", "+i"],
            &["chattr", "-p", "7"],
        ] {
            if let Ok(asked) = Command::new(program[0]).args(&program[1..]).arg(&path).output() {
                assert!(!asked.status.success(), "{asked:?}");
            }
        }
    }
    ok(&ferry(&["umount", path(&fixture.mnt())]));
}

/// Bytes of the host that a file takes.
fn held(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(file).expect("it is there").blocks() * 512
}
