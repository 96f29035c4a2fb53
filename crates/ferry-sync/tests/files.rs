//! Syncing on an ordinary file system: every file is answered once, with its own answer, and few
//! are open at a time.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_sync::{Options, Summary, paths, sync_each, sync_files};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

type Results = BTreeMap<PathBuf, Result<(), i32>>;

/// The result of each path. A path that is answered twice fails the test.
fn sync(given: &[PathBuf], recursive: bool, options: &Options) -> (Results, Summary) {
    let mut results = Results::new();
    let summary = sync_each(paths(given.to_vec(), recursive), options, |path, result| {
        let result = result.map_err(|e| e.raw_os_error().expect("the kernel's own error"));
        assert!(
            results.insert(path.clone(), result).is_none(),
            "{} is answered twice",
            path.display()
        );
    });
    assert_eq!(summary.synced + summary.failed, results.len() as u64);
    (results, summary)
}

fn relative(results: &Results, top: &Path) -> Vec<String> {
    results.keys().map(|p| p.strip_prefix(top).unwrap().display().to_string()).collect()
}

fn tree() -> TempDir {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("a/b")).unwrap();
    for name in ["1", "a/2", "a/b/3"] {
        fs::write(at(name), name).unwrap();
    }
    symlink("/nowhere", at("a/link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("a/fifo"), 0o600.into()).unwrap();
    dir
}

#[test]
fn a_tree_is_walked_without_following_links_or_opening_special_files() {
    let dir = tree();
    let (results, summary) = sync(&[dir.path().into()], true, &Options::default());
    assert_eq!(relative(&results, dir.path()), ["", "1", "a", "a/2", "a/b", "a/b/3"]);
    assert_eq!(summary, Summary { synced: 6, failed: 0 });
}

#[test]
fn without_recursion_only_named_paths_are_synced() {
    let dir = tree();
    let given = ["a", "1", "a/link", "a/fifo", "absent"].map(|n| dir.path().join(n));
    let (results, summary) = sync(&given, false, &Options::default());
    assert_eq!(summary, Summary { synced: 4, failed: 1 });
    assert_eq!(results[&dir.path().join("absent")], Err(libc::ENOENT));
}

#[test]
fn an_unreadable_tree_is_reported_and_the_rest_is_synced() {
    let dir = tree();
    // Root may read anything; a file where the path wants a directory stops it too.
    let given = [dir.path().join("1/below"), dir.path().join("a")];
    let (results, summary) = sync(&given, true, &Options::default());
    assert_eq!(results[&given[0]], Err(libc::ENOTDIR));
    assert_eq!(summary, Summary { synced: 4, failed: 1 });
}

#[test]
fn a_file_that_may_only_be_written_is_synced() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("write-only");
    fs::write(&file, "x").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o200)).unwrap();
    assert_eq!(sync(&[file], false, &Options::default()).1, Summary { synced: 1, failed: 0 });
}

#[test]
fn ten_thousand_files_need_few_descriptors() {
    let dir = TempDir::new().unwrap();
    let given: Vec<PathBuf> = (0..10_000).map(|i| dir.path().join(i.to_string())).collect();
    given.iter().for_each(|path| fs::write(path, "x").unwrap());
    let options = Options { open_files: 40, jobs: 16, ..Options::default() };
    let mut open_max = 0;
    let counted = paths(given, false).inspect(|_| {
        let open = fs::read_dir("/proc/self/fd").unwrap().filter(|fd| {
            let target = fd.as_ref().ok().and_then(|fd| fs::read_link(fd.path()).ok());
            target.is_some_and(|target| target.starts_with(dir.path()))
        });
        open_max = open_max.max(open.count());
    });
    let summary = sync_each(counted, &options, |_, _| ());
    assert_eq!(summary, Summary { synced: 10_000, failed: 0 });
    assert!((1..=40).contains(&open_max), "{open_max} files are open at a time");

    let whole = Options { open_files: 40, ..Options::default() };
    assert_eq!(sync(&[dir.path().into()], true, &whole).1, Summary { synced: 10_001, failed: 0 });
}

#[test]
fn open_files_are_answered_under_their_names() {
    let dir = TempDir::new().unwrap();
    let pipe = || OwnedFd::from(io::pipe().unwrap().0);
    let file = |i: usize| OwnedFd::from(File::create(dir.path().join(i.to_string())).unwrap());
    for data_only in [false, true] {
        let files = (0..300).map(|i| (i, if i == 77 { pipe() } else { file(i) }));
        let mut results = sync_files(files, &Options { data_only, ..Options::default() });
        results.sort_by_key(|(name, _)| *name);
        assert_eq!(results.len(), 300);
        for (name, result) in results {
            assert_eq!(result.is_err(), name == 77, "{name}: {result:?}");
        }
    }
}

#[test]
fn a_started_sync_calls_back_for_each_file() {
    let dir = TempDir::new().unwrap();
    let files = (0..100).map(|i| (i, File::create(dir.path().join(i.to_string()))));
    let files: Vec<(i32, io::Result<File>)> = files.collect();
    let (told, answers) = std::sync::mpsc::channel();
    let thread = ferry_sync::start(files, Options::default(), move |name, result| {
        told.send((name, result.is_ok())).unwrap();
    });
    let mut answered: Vec<(i32, bool)> = answers.iter().collect();
    answered.sort_unstable();
    assert_eq!(answered, (0..100).map(|i| (i, true)).collect::<Vec<_>>());
    assert_eq!(thread.unwrap().join().unwrap(), Summary { synced: 100, failed: 0 });
}
