//! Metadata that only the store has: who needs it waits for the store, and nobody else does.

use super::*;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::process::{Child, Stdio};

const DIRECTORIES: usize = 24;
const FILES: usize = 2000;

/// A mounted volume of which nothing is in memory but the names in its root.
fn cold() -> Store {
    let store = Store::made();
    store.mount("first");
    for directory in 0..DIRECTORIES {
        let at = store.at(&format!("first/cold/{directory}"));
        fs::create_dir_all(&at).expect("it can be made");
        for file in 0..FILES {
            fs::write(at.join(file.to_string()), "x").expect("the volume takes it");
        }
    }
    ok(&store.ferry(&["umount", "first"]));
    store.mount("first");
    assert_eq!(fs::read_dir(store.at("first")).expect("the root").count(), 1);
    fs::create_dir(store.at("first/warm")).expect("the volume takes it");
    store
}

/// Lists a directory and its files, in a process of its own.
fn list(store: &Store, directory: usize) -> Child {
    let at = store.at(&format!("first/cold/{directory}"));
    let mut ls = Command::new("ls");
    ls.arg("-l").arg(at).stdout(Stdio::piped()).spawn().expect("ls is installed")
}

/// Returns when a request waits for the store.
fn wait_for_held_request(store: &Store, mount: &str) {
    let clock = Env::real().clock;
    while store.stats(mount)["store"]["held"].is_null() {
        assert!(clock.monotonic() < Duration::from_secs(30), "nobody asks the store");
        std::thread::yield_now();
    }
}

/// Makes, reads, renames and removes files on each processor in turn.
fn work_on_all_processors(at: &Path) {
    let all = sched_getaffinity(None).expect("of this thread");
    for processor in (0..CpuSet::MAX_CPU).filter(|processor| all.is_set(*processor)) {
        let mut one = CpuSet::new();
        one.set(processor);
        sched_setaffinity(None, &one).expect("one of ours");
        for n in 0..200 {
            let (path, new) = (at.join(format!("{n}")), at.join(format!("{n} renamed")));
            fs::write(&path, "contents").expect("the volume takes it");
            fs::rename(&path, &new).expect("the volume takes it");
            assert_eq!(fs::read(&new).expect("it is there"), b"contents");
            fs::remove_file(&new).expect("it is there");
        }
    }
    sched_setaffinity(None, &all).expect("as before");
}

#[test]
fn a_store_that_is_away_holds_up_only_who_needs_metadata_of_it() {
    let store = cold();
    let away = store.at("away");
    fs::rename(store.directory(), &away).expect("it is ours");
    let mut lists: Vec<Child> = (0..DIRECTORIES).map(|n| list(&store, n)).collect();
    wait_for_held_request(&store, "first");
    let (at, (done, ended)) = (store.at("first/warm"), std::sync::mpsc::channel());
    let working = std::thread::spawn(move || {
        work_on_all_processors(&at);
        done.send(()).expect("it is waited for");
    });
    let worked = ended.recv_timeout(Duration::from_secs(60));
    let is_waiting = |ls: &mut Child| ls.try_wait().expect("ours").is_none();
    let waiting = lists.iter_mut().map(is_waiting).filter(|waits| *waits).count();
    let mut killed = lists.pop().expect("there are some");
    killed.kill().expect("it is ours");
    killed.wait().expect("a process that waits for the store can be killed");
    fs::rename(&away, store.directory()).expect("it is ours");
    worked.expect("programs that need nothing of the store wait for it");
    working.join().expect("it has ended");
    assert!(waiting > 0, "what only the store has was listed without it");
    for ls in lists {
        let said = ls.wait_with_output().expect("it ends");
        ok(&said);
        let text = String::from_utf8(said.stdout).expect("names are numbers");
        let names: BTreeSet<&str> =
            text.lines().skip(1).filter_map(|line| line.split(' ').next_back()).collect();
        assert_eq!(names.len(), FILES, "{text}");
    }
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_mount_of_a_snapshot_ends_while_its_store_is_away() {
    let store = Store::made();
    store.mount("first");
    // What can be compressed comes with the front of its object.
    let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| (n.wrapping_mul(n) >> 7) as u8).collect();
    fs::write(store.at("first/file"), bytes).expect("the volume takes it");
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.try_mount("second", &["-o", "snapshot=one"]));
    let away = store.at("away");
    fs::rename(store.directory(), &away).expect("it is ours");
    let mut cat = Command::new("cat");
    let mut cat = cat.arg(store.at("second/file")).stdout(Stdio::null()).spawn().expect("it runs");
    wait_for_held_request(&store, "second");
    cat.kill().expect("it is ours");
    cat.wait().expect("it can be killed");
    ok(&store.ferry(&["umount", "second"]));
    fs::rename(&away, store.directory()).expect("it is ours");
}
