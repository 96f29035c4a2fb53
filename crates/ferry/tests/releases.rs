//! A server and clients of this release and of the one before, together on one volume. These need
//! root, /dev/fuse, and the program of release 0.1.0 (`FERRY_OLD`).

#[path = "served/start.rs"]
mod start;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const NEW: &str = env!("CARGO_BIN_EXE_ferry");
/// Files that each side makes before the server is killed.
const FILES: usize = 200;

fn old() -> PathBuf {
    PathBuf::from(std::env::var_os("FERRY_OLD").expect("FERRY_OLD: a path"))
}

/// A volume, its server, and a mount of each release.
struct Together {
    dir: TempDir,
    server: Child,
    address: String,
}

/// The two mounts, by their names in the directory.
const MOUNTS: [&str; 2] = ["old", "new"];

impl Together {
    fn new(serves: &Path) -> Self {
        let dir = TempDir::new().expect("a directory");
        run(serves, dir.path(), &["mkfs", "volume", "--size", "256M"]);
        let (server, address) = serve(serves, dir.path(), "127.0.0.1:0");
        let this = Self { dir, server, address };
        for name in MOUNTS {
            fs::create_dir(this.at(name)).expect("a mount point");
            this.mount(name);
        }
        this
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn client(name: &str) -> PathBuf {
        if name == "old" { old() } else { NEW.into() }
    }

    fn mount(&self, name: &str) {
        let (from, options) =
            (format!("ferry://{}/", self.address), format!("insecure,timeout=90s,log={name}.log"));
        let options = options.replace("log=", &format!("log={}/", self.dir.path().display()));
        run(&Self::client(name), self.dir.path(), &["mount", &from, name, "-o", &options]);
    }

    fn end_server(&mut self, signal: Signal) {
        let pid = i32::try_from(self.server.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("it is ours");
        self.server.wait().expect("it is ours");
    }

    /// The server ends, and another program takes its place.
    fn restart(&mut self, signal: Signal, serves: &Path) {
        self.end_server(signal);
        self.server = serve(serves, self.dir.path(), &self.address).0;
    }

    /// Both clients change one tree, and see what the other has done.
    fn work(&self, round: &str) {
        for (maker, other) in [("old", "new"), ("new", "old")] {
            let (here, there) = (self.at(maker).join(round), self.at(other).join(round));
            fs::create_dir_all(&here).expect("a directory");
            let (made, moved) = (format!("made by {maker}"), format!("moved by {maker}"));
            let file = File::create_new(here.join(&made)).expect("it is new");
            file.write_all_at(&vec![7; 3 << 20], 0).expect("written");
            file.sync_all().expect("durable");
            assert_eq!(fs::read(there.join(&made)).expect("it is seen"), vec![7; 3 << 20]);
            let appended = OpenOptions::new().append(true).open(there.join(&made));
            appended.expect("it opens").write_all(b"and more").expect("appended");
            assert_eq!(file.metadata().expect("attributes").len(), (3 << 20) + 8);
            fs::rename(here.join(&made), here.join(&moved)).expect("it is moved");
            assert!(!there.join(&made).exists() && there.join(&moved).exists());
            // A lock of one client keeps the other one out.
            let (ours, theirs) = (File::open(here.join(&moved)), File::open(there.join(&moved)));
            let (ours, theirs) = (ours.expect("it opens"), theirs.expect("it opens"));
            flock(&ours, FlockOperation::LockExclusive).expect("it is free");
            let try_lock = || flock(&theirs, FlockOperation::NonBlockingLockExclusive);
            assert_eq!(try_lock(), Err(Errno::AGAIN), "{round}: {other} has a lock of {maker}");
            flock(&ours, FlockOperation::Unlock).expect("it is ours");
            assert_eq!(try_lock(), Ok(()), "{round}: {maker} has given it back");
        }
    }

    /// The server ends while each client holds open files and has changes that are not synced.
    fn end_under_both(&mut self, round: &str, signal: Signal, serves: &Path, keeps_locks: bool) {
        let mut held = Vec::new();
        for name in MOUNTS {
            let dir = self.at(name).join(format!("{round} of {name}"));
            fs::create_dir(&dir).expect("a directory");
            for n in 0..FILES {
                fs::write(dir.join(n.to_string()), vec![n as u8; n * 50]).expect("written");
            }
            fs::rename(dir.join("0"), dir.join("zero")).expect("moved");
            let locked = File::create_new(dir.join("locked")).expect("it is new");
            if keeps_locks {
                flock(&locked, FlockOperation::LockExclusive).expect("it is free");
            }
            let removed = File::create_new(dir.join("removed")).expect("it is new");
            removed.write_all_at(b"without a name", 0).expect("written");
            fs::remove_file(dir.join("removed")).expect("it has no name");
            held.push((dir, locked, removed));
        }
        self.restart(signal, serves);
        for (dir, locked, removed) in &held {
            locked.write_all_at(b"behind the end", 0).expect("it goes on");
            locked.sync_all().expect("nothing is lost");
            let mut found = [0; 14];
            removed.read_exact_at(&mut found, 0).expect("it is open");
            assert_eq!(&found, b"without a name", "{}", dir.display());
        }
        for seen_by in MOUNTS {
            for name in MOUNTS {
                let dir = self.at(seen_by).join(format!("{round} of {name}"));
                for n in 1..FILES {
                    let found = fs::read(dir.join(n.to_string()));
                    let found =
                        found.unwrap_or_else(|error| panic!("{round}: {name} {n}: {error}"));
                    assert_eq!(found, vec![n as u8; n * 50], "{round}: {name} {n} at {seen_by}");
                }
                assert!(dir.join("zero").exists() && !dir.join("0").exists());
                let locked = File::open(dir.join("locked")).expect("it opens");
                if keeps_locks && seen_by != name {
                    let taken = flock(&locked, FlockOperation::NonBlockingLockExclusive);
                    assert_eq!(taken, Err(Errno::AGAIN), "{round}: the lock of {name} is gone");
                }
            }
        }
    }

    /// An evicted client is told, and may come again.
    fn evict(&self, name: &str, number: &str, serves: &Path) {
        run(serves, self.dir.path(), &["evict", number, "--volume", "volume"]);
        let write = || fs::write(self.at(name).join("after the eviction"), b"x");
        // It hears of it with its next message at the latest.
        let refused = (0..1000).any(|_| write().is_err());
        assert!(refused, "{name} goes on");
        ferry(&Self::client(name), self.dir.path(), &["umount", "--force", name]);
        self.mount(name);
        write().expect("it is another session");
    }

    /// Both unmount in order, the server stops, and each program finds the volume clean.
    fn end(mut self, serves: &Path) {
        for name in MOUNTS {
            run(&Self::client(name), self.dir.path(), &["umount", name]);
        }
        self.end_server(Signal::TERM);
        for program in [NEW.as_ref(), serves] {
            run(program, self.dir.path(), &["fsck", "volume"]);
        }
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in MOUNTS {
                let log = fs::read_to_string(self.at(&format!("{name}.log"))).unwrap_or_default();
                println!("{name}: {log}");
            }
        }
        // All of it has ended if the test went well.
        drop(self.server.kill());
        drop(self.server.wait());
        for name in MOUNTS {
            ferry(&Self::client(name), self.dir.path(), &["umount", "--force", name]);
        }
    }
}

/// A command that would wait for ever fails its test instead.
fn ferry(program: &Path, dir: &Path, args: &[&str]) -> Output {
    let mut bounded = Command::new("timeout");
    bounded.args(["--signal=KILL", "100"]).arg(program).args(args);
    bounded.current_dir(dir).output().expect("the command runs")
}

#[track_caller]
fn run(program: &Path, dir: &Path, args: &[&str]) {
    let output = ferry(program, dir, args);
    assert!(output.status.success(), "{} {args:?}: {output:?}", program.display());
}

/// Starts a server; returns its address, too.
fn serve(program: &Path, dir: &Path, listen: &str) -> (Child, String) {
    start::start_server(Command::new(program).current_dir(dir), "volume", listen, "10s")
}

/// Clients of both releases at a server of `serves`, which is killed and restarted under them.
fn both_clients_at(serves: &Path) {
    let mut together = Together::new(serves);
    together.work("first");
    together.evict("old", "1", serves);
    together.evict("new", "2", serves);
    together.work("after the evictions");
    together.end_under_both("killed", Signal::KILL, serves, true);
    together.work("after the kill");
    together.end_under_both("stopped", Signal::TERM, serves, true);
    together.work("after the stop");
    together.end(serves);
}

#[test]
#[ignore = "needs the program of release 0.1.0"]
fn a_server_of_this_release_serves_clients_of_both() {
    both_clients_at(NEW.as_ref());
}

#[test]
#[ignore = "needs the program of release 0.1.0"]
fn a_server_of_the_release_before_serves_clients_of_both() {
    both_clients_at(&old());
}

#[test]
#[ignore = "needs the program of release 0.1.0"]
fn a_server_is_upgraded_under_clients_of_both() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut together = Together::new(&old());
        together.work("before");
        together.end_under_both("upgraded", signal, NEW.as_ref(), false);
        together.work("after");
        together.end_under_both("restarted", signal, NEW.as_ref(), true);
        together.end(NEW.as_ref());
    }
}
