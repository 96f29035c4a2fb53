//! The snapshots of a volume below `.snapshots` of its mount.

use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};

/// What is below a directory: mode, owner, links, size, time and bytes of each name.
pub(super) type Tree = BTreeMap<PathBuf, String>;

pub(super) fn tree(at: &Path) -> Tree {
    let (mut all, mut todo) = (Tree::new(), vec![at.to_path_buf()]);
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(&directory).expect("it can be listed") {
            let path = entry.expect("it can be read").path();
            let meta = fs::symlink_metadata(&path).expect("it is there");
            let bytes = match meta.file_type() {
                kind if kind.is_file() => fs::read(&path).expect("it can be read"),
                kind if kind.is_symlink() => {
                    fs::read_link(&path).expect("it is one").as_os_str().as_bytes().to_vec()
                }
                _ => Vec::new(),
            };
            if meta.is_dir() {
                todo.push(path.clone());
            }
            let what = format!(
                "{:o} {}:{} {} {} {}.{} {:08x}",
                meta.mode(),
                meta.uid(),
                meta.gid(),
                meta.nlink(),
                if meta.is_dir() { 0 } else { meta.size() },
                meta.mtime(),
                meta.mtime_nsec(),
                crc32c(&bytes)
            );
            all.insert(path.strip_prefix(at).expect("it is below").into(), what);
        }
    }
    all
}

pub(super) fn same(one: &Tree, other: &Tree) {
    let differs = one.iter().find(|(path, what)| other.get(*path) != Some(what));
    assert_eq!((differs, one.len()), (None, other.len()));
}

/// Inode numbers of all that is below a directory, and of itself.
fn numbers(at: &Path) -> BTreeSet<u64> {
    let all = tree(at).into_keys().map(|path| at.join(path)).chain([at.to_path_buf()]);
    all.map(|path| fs::symlink_metadata(path).expect("it is there").ino()).collect()
}

pub(super) fn names(at: &Path) -> BTreeSet<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let all = fs::read_dir(at).expect("it can be listed").map(name);
    all.map(|name| name.into_string().expect("UTF-8")).collect()
}

pub(super) fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

fn runs(command: &str, args: &[&Path]) {
    let mut words = command.split(' ');
    let program = words.next().expect("a program");
    ok(&Command::new(program).args(words).args(args).output().expect("it runs"));
}

/// A mounted volume with directories, links, holes, attributes and many files.
fn filled() -> Store {
    let store = Store::made();
    store.mount("first");
    let at = store.at("first");
    write_files(&at, 0..300);
    fs::hard_link(at.join("000/7"), at.join("001/seven")).expect("a link");
    symlink("../000/7", at.join("001/to")).expect("a symlink");
    fs::set_permissions(at.join("000/8"), Permissions::from_mode(0o4751)).expect("it is ours");
    let sparse = File::create(at.join("sparse")).expect("a file");
    sparse.write_all_at(b"end", 5 << 20).expect("room");
    rustix::fs::setxattr(at.join("000/9"), "user.x", b"value", rustix::fs::XattrFlags::empty())
        .expect("an attribute");
    store
}

fn snapshot(store: &Store, name: &str) {
    ok(&store.ferry(&["snapshot", "create", "first", name]));
}

#[test]
fn snapshots_below_the_mount_have_what_was_there_and_are_not_listed() {
    let store = filled();
    let (at, all) = (store.at("first"), store.at("first/.snapshots"));
    assert_eq!(names(&all), BTreeSet::new());
    let before = tree(&at);
    snapshot(&store, "before");
    fs::remove_dir_all(at.join("000")).expect("it is there");
    write_files(&at, 300..400);
    fs::write(at.join("001/101"), "new").expect("a file");
    let between = tree(&at);
    snapshot(&store, "between");
    fs::write(at.join("001/102"), "newest").expect("a file");
    let now = tree(&at);

    assert_eq!(names(&all), ["before", "between"].map(str::to_owned).into());
    assert!(!names(&at).contains(".snapshots"));
    for _ in 0..2 {
        same(&tree(&all.join("before")), &before);
        same(&tree(&all.join("between")), &between);
        same(&tree(&at), &now);
    }
    let value = &mut [0; 16];
    let found = rustix::fs::getxattr(all.join("before/000/9"), "user.x", &mut value[..]);
    assert_eq!(found.map(|len| value[..len].to_vec()), Ok(b"value".to_vec()));
    let sparse = File::open(all.join("before/sparse")).expect("it is there");
    assert_eq!(rustix::fs::seek(&sparse, rustix::fs::SeekFrom::Data(0)), Ok(5 << 20));
    drop(sparse);

    let trees = [at.clone(), all.join("before"), all.join("between")].map(|at| numbers(&at));
    let together: BTreeSet<u64> = trees.iter().flatten().copied().collect();
    assert_eq!(
        together.len(),
        trees.iter().map(BTreeSet::len).sum::<usize>(),
        "no number is there twice"
    );
    let number = |path: &str| fs::metadata(all.join(path)).expect("it is there").ino();
    assert_eq!(number("before/000/7"), number("before/001/seven"));
    assert_eq!(number("before/.."), number("."));
    assert_eq!(number(".."), fs::metadata(&at).expect("it is there").ino());

    let copied = store.at("copied");
    runs("cp -a", &[&all.join("before"), &copied]);
    // Also links and times.
    same(&tree(&copied), &before);
    runs("diff -r", &[&all.join("before"), &copied]);
    fs::create_dir(at.join("restored")).expect("a directory");
    runs("cp -a", &[&all.join("before/000"), &at.join("restored")]);
    runs("diff -r", &[&all.join("before/000"), &at.join("restored/000")]);
    runs("tar -cf", &[&store.at("tar"), &all.join("before")]);
    let found = Command::new("find").arg(&all).args(["-type", "f"]).output().expect("it runs");
    ok(&found);
    let files = String::from_utf8_lossy(&found.stdout).lines().count();
    assert!(files > 600, "{files} files in two snapshots");
    ok(&store.ferry(&["umount", "first"]));
    assert_eq!(fs::read_dir(store.at("first")).expect("it is a directory").count(), 0);
}

#[test]
fn nothing_below_snapshots_can_be_written() {
    let store = filled();
    snapshot(&store, "one");
    snapshot(&store, "two");
    let (at, all) = (store.at("first"), store.at("first/.snapshots"));
    let (old, new) = (all.join("one/000/7"), all.join("one/000/new"));
    let (rofs, xdev) = (Some(libc::EROFS), Some(libc::EXDEV));
    let exists = Some(libc::EEXIST);
    for append in [false, true] {
        assert_eq!(errno(File::options().write(true).append(append).open(&old)), rofs);
    }
    assert_eq!(errno(File::options().write(true).truncate(true).open(&old)), rofs);
    assert_eq!(errno(File::options().write(true).custom_flags(libc::O_TMPFILE).open(&all)), rofs);
    for dir in [all.clone(), all.join("one"), all.join("one/000")] {
        assert_eq!(errno(File::create(dir.join("new"))), rofs);
        assert_eq!(errno(fs::create_dir(dir.join("new"))), rofs);
        assert_eq!(errno(symlink("x", dir.join("new"))), rofs);
        assert_eq!(errno(fs::set_permissions(&dir, Permissions::from_mode(0o700))), rofs);
        let attribute =
            |name: &str| rustix::fs::setxattr(&dir, name, b"x", rustix::fs::XattrFlags::empty());
        assert_eq!(attribute("user.x"), Err(rustix::io::Errno::ROFS));
        assert_eq!(errno(fs::rename(at.join("001/101"), dir.join("new"))), xdev);
        assert_eq!(errno(fs::hard_link(at.join("001/101"), dir.join("new"))), xdev);
    }
    assert_eq!(errno(fs::remove_file(&old)), rofs);
    assert_eq!(errno(fs::remove_dir(all.join("one"))), rofs);
    assert_eq!(errno(fs::rename(&old, &new)), rofs);
    assert_eq!(errno(fs::hard_link(&old, &new)), rofs);
    assert_eq!(errno(fs::rename(&old, all.join("two/000/new"))), xdev);
    assert_eq!(errno(fs::hard_link(&old, all.join("two/000/new"))), xdev);
    assert_eq!(errno(fs::rename(&old, at.join("out"))), xdev);
    assert_eq!(errno(fs::hard_link(&old, at.join("out"))), xdev);
    assert_eq!(errno(fs::set_permissions(&old, Permissions::from_mode(0o600))), rofs);
    assert_eq!(errno(std::os::unix::fs::chown(&old, Some(1), None)), rofs);
    let times = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
    assert_eq!(errno(File::open(&old).expect("it can be read").set_times(times)), rofs);

    // The directory itself.
    assert_eq!(errno(fs::create_dir(&all)), exists);
    fs::write(at.join("file"), "x").expect("a file");
    fs::create_dir(at.join("dir")).expect("a directory");
    assert_eq!(errno(fs::remove_dir(&all)), rofs);
    assert_eq!(errno(fs::rename(&all, at.join("elsewhere"))), rofs);
    assert_eq!(errno(fs::rename(at.join("dir"), &all)), exists);
    assert_eq!(fs::metadata(&all).expect("it is there").mode() & 0o7777, 0o555);
    same(&tree(&all.join("one")), &tree(&all.join("two")));
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_deleted_snapshot_is_not_found_and_never_shows_other_bytes() {
    let store = filled();
    let (at, all) = (store.at("first"), store.at("first/.snapshots"));
    snapshot(&store, "one");
    let before = fs::read(all.join("one/000/7")).expect("it is there");
    let (open, unread) = (File::open(all.join("one/000/7")), File::open(all.join("one/001/150")));
    ok(&store.ferry(&["snapshot", "delete", "first", "one"]));
    assert_eq!(errno(fs::metadata(all.join("one"))), Some(libc::ENOENT));
    assert_eq!(names(&all), BTreeSet::new());
    fs::write(at.join("000/7"), "others").expect("a file");
    ok(&store.ferry(&["sync", "first"]));
    let mut bytes = vec![0; before.len()];
    let read = open.expect("it was there").read_exact_at(&mut bytes, 0);
    assert!(read.is_err() || bytes == before);
    let mut bytes = vec![0; contents(150).len()];
    let read = unread.expect("it was there").read_exact_at(&mut bytes, 0);
    assert!(read.is_err() || bytes == contents(150));
    // Another one of that name is another one.
    snapshot(&store, "one");
    assert_eq!(fs::read(all.join("one/000/7")).expect("it is there"), b"others");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn twenty_snapshots_are_looked_at_with_few_open() {
    let store = Store::made();
    store.mount("first");
    for n in 0..20 {
        fs::write(store.at("first/file"), contents(n)).expect("a file");
        snapshot(&store, &n.to_string());
    }
    let all = store.at("first/.snapshots");
    let threads = || {
        let pid = store.daemon("first").as_raw_nonzero();
        fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").count()
    };
    let mut most = 0;
    for n in (0..20).chain((0..20).rev()) {
        let found = fs::read(all.join(n.to_string()).join("file")).expect("it is there");
        assert!(found == contents(n), "{n} has its own contents");
        most = most.max(threads());
    }
    std::thread::scope(|scope| {
        for n in 0..20 {
            let path = all.join(n.to_string()).join("file");
            scope.spawn(move || {
                for _ in 0..10 {
                    assert!(fs::read(&path).expect("it is there") == contents(n));
                }
            });
        }
    });
    let lent = store.stats("first")["memory"]["lent_bytes"].as_u64().expect("it is shown");
    let size = store.stats("first")["memory"]["cache_size_bytes"].as_u64().expect("it is shown");
    assert!(0 < lent && lent <= size / 4, "{lent} of {size} bytes are for snapshots");
    // Each open snapshot has some.
    assert!(most < 200, "{most} threads");
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_mount_ends_while_a_file_of_a_snapshot_is_open() {
    let store = filled();
    snapshot(&store, "one");
    let open = File::open(store.at("first/.snapshots/one/000/7")).expect("it is there");
    let busy = store.ferry(&["umount", "first"]);
    assert!(!busy.status.success(), "it is in use: {busy:?}");
    let clock = Env::real().clock;
    ok(&store.ferry(&["umount", "--force", "first"]));
    assert!(clock.monotonic() < Duration::from_secs(20));
    drop(open);
    ok(&store.ferry(&["fsck", &store.url()]));
}

#[test]
fn a_real_name_wins_and_the_directory_can_be_switched_off() {
    let store = Store::made();
    ok(&store.try_mount("first", &["-o", "snapdir=off"]));
    let real = store.at("first/.snapshots");
    assert_eq!(errno(fs::metadata(&real)), Some(libc::ENOENT));
    fs::create_dir(&real).expect("it is an ordinary name");
    fs::write(real.join("mine"), "x").expect("a file");
    snapshot(&store, "one");
    ok(&store.ferry(&["umount", "first"]));

    store.mount("first");
    assert_eq!(names(&real), ["mine".to_owned()].into());
    assert!(names(&store.at("first")).contains(".snapshots"));
    fs::rename(&real, store.at("first/moved")).expect("it is the volume's own");
    assert_eq!(names(&real), ["one".to_owned()].into());
    assert_eq!(errno(fs::rename(store.at("first/moved"), &real)), Some(libc::EEXIST));
    assert_eq!(names(&real.join("one/.snapshots")), ["mine".to_owned()].into());
    ok(&store.ferry(&["umount", "first"]));
}

#[test]
fn a_store_that_is_away_stops_no_request_to_the_volume_itself() {
    let store = filled();
    snapshot(&store, "one");
    ok(&store.ferry(&["sync", "first"]));
    let away = store.at("away");
    fs::rename(store.directory(), &away).expect("it is ours");
    let path = store.at("first/.snapshots/one");
    let looking = std::thread::spawn(move || errno(fs::metadata(path)));
    let (clock, at) = (Env::real().clock, store.at("first"));
    for n in 0..200 {
        fs::write(at.join(format!("live {n}")), "x").expect("the volume takes it");
        fs::metadata(at.join(format!("live {n}"))).expect("it is there");
    }
    assert_eq!(names(&at.join(".snapshots")), ["one".to_owned()].into());
    assert!(clock.monotonic() < Duration::from_secs(8), "{:?}", clock.monotonic());
    let error = looking.join().expect("it ends");
    assert_eq!(error, Some(libc::EIO));
    fs::rename(&away, store.directory()).expect("it is ours");
    assert_eq!(fs::read(at.join(".snapshots/one/000/7")).expect("it is there"), contents(7));
    ok(&store.ferry(&["umount", "first"]));
}
