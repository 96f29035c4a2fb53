//! `ferry trace`: what a program does on a mount is shown, with its paths and errors.

use super::*;
use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

/// A trace that runs, and what it prints.
struct Trace(Child, BufReader<std::process::ChildStdout>);

impl Trace {
    /// Of what is below a directory of the mount. It records when this returns.
    fn begin(dir: &Path, more: &[&str]) -> Self {
        let mut trace = Command::new("timeout");
        trace.args(["--signal=KILL", "60", FERRY, "trace", path(dir), "--json"]).args(more);
        let mut trace = trace.stdout(Stdio::piped()).spawn().expect("the command runs");
        let out = BufReader::new(trace.stdout.take().expect("it is a pipe"));
        let mut trace = Self(trace, out);
        let records = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let names = (0..).map(|n| dir.join(format!("none-{n}")));
                let mut names = names.take_while(|_| !records.load(Ordering::Relaxed));
                assert!(names.all(|name| fs::metadata(name).is_err()));
            });
            trace.next();
            records.store(true, Ordering::Relaxed);
        });
        trace
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("it is readable");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// The first that is wanted, which is there before the command is killed.
    fn find(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Value {
        std::iter::repeat_with(|| self.next()).find(is_wanted).expect("it never ends")
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // It may have ended with its mount.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        self.0.wait().expect("it is ours");
    }
}

#[test]
fn a_trace_shows_each_request_with_its_caller_path_and_error() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    fs::create_dir(mnt.join("before")).expect("it fits");
    let old = File::create(mnt.join("before/old")).expect("it fits");
    let mut trace = Trace::begin(&mnt, &[]);
    fs::metadata(mnt.join("absent")).expect_err("nobody made it");
    let missing = trace.find(|one| one["path"] == "/absent");
    assert_eq!((&missing["operation"], &missing["found"]), (&"lookup".into(), &Value::Null));
    old.set_len(5).expect("it is open");
    let change = trace.find(|one| one["operation"] == "setattr");
    assert_eq!(change["path"], "/before/old", "it was open before");
    assert!(change["time_ns"].as_u64() > Some(0), "{change}");
    // The kernel names the thread.
    let name = fs::read_to_string("/proc/thread-self/comm").expect("it runs");
    assert_eq!(change["caller"], name.trim_end());
    fs::rename(mnt.join("before"), mnt.join("after")).expect("it is there");
    let moved = trace.find(|one| one["to_name"] == "after");
    assert_eq!(moved["errno"], Value::Null);
    fs::remove_dir(mnt.join("after")).expect_err("it is not empty");
    let refused = trace.find(|one| one["operation"] == "rmdir");
    assert_eq!((&refused["errno"], &refused["path"]), (&libc::ENOTEMPTY.into(), &"/after".into()));
    let said = ferry(&["stats", path(&mnt), "--json"]);
    let stats: Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert!(stats["fuse"]["operations"]["setattr"]["average_ns"].as_u64() > Some(0), "{stats}");
    drop((old, trace));
    ok(&ferry(&["umount", path(&mnt)]));
}

#[test]
fn a_trace_shows_only_what_is_wanted_and_ends_with_the_mount() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    let wanted = mnt.join("wanted");
    fs::create_dir(&wanted).expect("it fits");
    let outside = ferry(&["trace", path(&mnt), "--path", "/etc"]);
    assert_eq!(outside.status.code(), Some(2), "{outside:?}");
    let mut trace = Trace::begin(&wanted, &["--path", path(&wanted), "--slow", "1us"]);
    for n in 0..50 {
        fs::write(mnt.join(format!("other-{n}")), "x").expect("it fits");
        fs::write(wanted.join(format!("file-{n}")), "x").expect("it fits");
    }
    let mut all = Vec::new();
    while all.last().is_none_or(|one: &Value| one["path"] != "/wanted/file-49") {
        all.push(trace.next());
    }
    let below = |one: &Value| one["path"].as_str().is_some_and(|path| path.starts_with("/wanted"));
    let slow = |one: &Value| one["time_ns"].as_u64() >= Some(1000);
    assert!(all.iter().all(|one| below(one) && slow(one)), "{all:?}");
    ok(&ferry(&["umount", path(&mnt)]));
    let mut rest = String::new();
    trace.1.read_to_string(&mut rest).expect("it ends by itself");
    assert!(!rest.contains("other-"), "{rest}");
    let ended = ferry(&["trace", path(&mnt)]);
    assert_eq!(ended.status.code(), Some(1), "nothing is mounted: {ended:?}");
}
