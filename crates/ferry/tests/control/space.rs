//! `ferry space`: which directories take the space, compared with `du`.

use super::*;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

fn counted(target: &Path, depth: &str) -> Value {
    let output = ferry(&["space", path(target), "--json", "--depth", depth]);
    ok(&output);
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The directory of an answer that lies there.
fn at<'a>(answer: &'a Value, names: &[&str]) -> &'a Value {
    names.iter().fold(&answer["tree"], |dir, name| {
        let mut below = dir["largest"].as_array().expect("a list").iter();
        below.find(|one| one["name"] == *name).unwrap_or_else(|| panic!("{name}: {dir:#}"))
    })
}

fn number(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_else(|| panic!("{key}: {of}"))
}

/// What `du` says: bytes, and how many inodes with that of the directory.
fn du(dir: &Path) -> (u64, u64) {
    let one = |option: &str| {
        let output = Command::new("du").args(["-s", "-x", option]).arg(dir).output();
        let output = output.expect("du runs");
        let text = String::from_utf8_lossy(&output.stdout);
        text.split_whitespace().next().expect("a number").parse::<u64>().expect("a number")
    };
    (one("--block-size=1"), one("--inodes"))
}

#[track_caller]
fn is_as_du(of: &Value, dir: &Path) {
    let (bytes, inodes) = du(dir);
    let ours = 1 + number(of, "files") + number(of, "directories");
    assert_eq!((number(of, "bytes"), ours), (bytes, inodes), "{}", dir.display());
}

fn write(file: &Path, bytes: usize) {
    let mut file = File::create(file).expect("it fits");
    file.write_all(&vec![7; bytes]).expect("it fits");
}

#[test]
fn the_space_of_directories_is_that_of_du() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    for dir in ["linked", "sparse", "odd", "empty"] {
        fs::create_dir(mnt.join(dir)).expect("it fits");
    }
    write(&mnt.join("linked/one"), 3 << 20);
    for name in ["linked/two", "empty/three"] {
        fs::hard_link(mnt.join("linked/one"), mnt.join(name)).expect("the same volume");
    }
    let sparse = File::create(mnt.join("sparse/holes")).expect("it fits");
    sparse.write_all_at(&[1; 8192], 1 << 30).expect("it fits");
    write(&mnt.join("sparse/inline"), 100);
    std::os::unix::fs::symlink("../linked", mnt.join("sparse/link")).expect("it fits");
    for name in [&b"a\xff\n\x1b[2J"[..], "ä \"\\".as_bytes(), &[b'x'; 255]] {
        let dir = mnt.join("odd").join(std::ffi::OsStr::from_bytes(name));
        fs::create_dir(&dir).expect("it fits");
        write(&dir.join("file"), 20_000);
    }
    let mut deep = mnt.join("deep");
    for level in 0..200 {
        fs::create_dir(&deep).expect("it fits");
        write(&deep.join("file"), 4096 * (level % 3));
        deep.push("below");
    }
    let old = Command::new("touch").args(["-a", "-d", "2001-01-01"]).arg(mnt.join("odd")).status();
    assert!(old.expect("touch runs").success());
    let read_at = || fs::metadata(mnt.join("odd")).expect("it is there").atime();
    let read_before = read_at();
    let all = counted(&mnt, "3");
    assert_eq!(read_at(), read_before, "nobody has read the directory");
    is_as_du(&all["tree"], &mnt);
    for dir in ["sparse", "odd", "deep"] {
        is_as_du(at(&all, &[dir]), &mnt.join(dir));
    }
    is_as_du(at(&all, &["deep", "below", "below"]), &mnt.join("deep/below/below"));
    let linked = ["linked", "empty"].map(|dir| number(at(&all, &[dir]), "bytes"));
    assert!(linked == [3 << 20, 0] || linked == [0, 3 << 20], "counted once: {linked:?}");
    assert_eq!(number(&at(&all, &["sparse"])["own"], "files"), 3);
    let odd = at(&all, &["odd"])["largest"].as_array().expect("a list");
    let mut names: Vec<&str> = odd.iter().filter_map(|one| one["name"].as_str()).collect();
    names.sort_unstable();
    assert_eq!(names[0], r"a\xff\n\x1b[2J");
    assert_eq!((names[1].len(), names[2]), (255, "ä \"\\"));
    assert_eq!((number(&all, "missed"), number(&all, "counted")), (0, du(&mnt).1));

    let below = counted(&mnt.join("deep"), "1");
    is_as_du(&below["tree"], &mnt.join("deep"));
    let table = ferry(&["space", path(&fixture.volume())]);
    ok(&table);
    let table = String::from_utf8_lossy(&table.stdout);
    assert!(table.contains("/linked") && table.contains("100.0 %"), "{table}");
    let odd = ferry(&["space", path(&mnt.join("odd"))]);
    assert!(!odd.stdout.contains(&0x1b), "names are printable");
    fails(&ferry(&["space", path(&mnt.join("linked/one"))]), "no directory");
    fails(&ferry(&["space", path(fixture.0.path())]), "no FerryFS is mounted here");
}

#[test]
fn of_many_directories_the_largest_are_named_and_the_others_added_up() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    for n in 0..300_usize {
        let dir = mnt.join(format!("d{n:03}"));
        fs::create_dir(&dir).expect("it fits");
        write(&dir.join("file"), 4096 * (1 + n % 7) + if n == 150 { 1 << 20 } else { 0 });
    }
    let wide = mnt.join("wide");
    fs::create_dir(&wide).expect("it fits");
    for n in 0..50_000 {
        File::create(wide.join(n.to_string())).expect("it fits");
    }
    let all = counted(&mnt, "1");
    is_as_du(&all["tree"], &mnt);
    let named = all["tree"]["largest"].as_array().expect("a list");
    assert_eq!((named.len(), &named[0]["name"]), (100, &"d150".into()));
    assert_eq!(number(&all["tree"]["others"], "directories"), 201);
    assert_eq!(number(&all["tree"]["others"], "files"), 50_200, "`wide` takes no space");
    let sizes: Vec<u64> = named.iter().map(|one| number(one, "bytes")).collect();
    assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
    let sum: u64 = sizes.iter().sum::<u64>() + number(&all["tree"]["others"], "bytes");
    assert_eq!(sum, number(&all["tree"], "bytes"));
    assert_eq!(number(at(&counted(&wide, "1"), &[]), "files"), 50_000);
}

#[test]
fn a_tree_that_changes_meanwhile_fails_no_count_and_two_count_at_once() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    fs::create_dir(mnt.join("still")).expect("it fits");
    for n in 0..2000 {
        write(&mnt.join(format!("still/{n}")), 5000);
    }
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..).take_while(|_| !ends.load(Ordering::Relaxed)) {
                let (dir, to) =
                    (mnt.join(format!("new{}", n % 9)), mnt.join(format!("to{}", n % 7)));
                fs::create_dir_all(dir.join("below/below")).expect("it fits");
                write(&dir.join("below/file"), 9000);
                let _ = fs::remove_dir_all(&to);
                fs::rename(&dir, &to).expect("nothing is there");
            }
        });
        let counts = [(); 2].map(|()| scope.spawn(|| [(); 10].map(|()| counted(&mnt, "2"))));
        for all in counts.into_iter().flat_map(|count| count.join().expect("it succeeds")) {
            assert_eq!(number(at(&all, &["still"]), "bytes"), 2000 * 8192);
        }
        ends.store(true, Ordering::Relaxed);
    });
    is_as_du(&counted(&mnt, "1")["tree"], &mnt);
}

#[test]
fn a_count_stops_with_ctrl_c_and_the_mount_ends_at_once() {
    let fixture = TestVolume::new();
    fixture.mount();
    let mnt = fixture.mnt();
    for dir in 0..40 {
        fs::create_dir(mnt.join(dir.to_string())).expect("it fits");
        for n in 0..1000 {
            File::create(mnt.join(format!("{dir}/{n}"))).expect("it fits");
        }
    }
    let count = || {
        let mut command = Command::new(FERRY);
        command.args(["space", path(&mnt)]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the command runs")
    };
    let threads = || {
        let tasks = format!("/proc/{}/task", fixture.daemon().as_raw_nonzero());
        let names = fs::read_dir(tasks)
            .expect("it runs")
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.trim() == "ferry-space").count()
    };
    let waits_for = |wanted: usize| {
        let clock = ferry_env::Env::real().clock;
        let end = clock.monotonic() + metrics::TIME_MAX;
        while threads() != wanted {
            assert!(clock.monotonic() < end, "{} walk", threads());
        }
    };
    // The daemon hears of it within a part of a second, not after its own patience.
    let counting = count();
    waits_for(1);
    kill_process(Pid::from_child(&counting), Signal::INT).expect("it is ours");
    let stopped = counting.wait_with_output().expect("it is ours");
    let said = String::from_utf8_lossy(&stopped.stderr);
    assert!(!stopped.status.success() && said.contains("stopped"), "{said}");
    waits_for(0);
    // One that is asked for by a process which is stopped outlasts nothing either.
    let counting = count();
    waits_for(1);
    kill_process(Pid::from_child(&counting), Signal::STOP).expect("it is ours");
    ok(&ferry(&["umount", path(&mnt)]));
    kill_process(Pid::from_child(&counting), Signal::CONT).expect("it is ours");
    let ended = counting.wait_with_output().expect("it is ours");
    // On a busy machine the walk may have ended before the mount, and the answer been sent.
    let said = String::from_utf8_lossy(&ended.stderr);
    let answered = ended.status.success() && said.is_empty();
    assert!(answered || said.starts_with("ferry: "), "{ended:?}");
}
