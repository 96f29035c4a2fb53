//! The workload on the host's own file system, and lies that the check must see through.

use super::*;
use std::cell::Cell;

/// Runs `steps` steps of one thread in a fresh directory; returns the directory and the log.
fn worked(steps: u64) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let log_path = dir.path().join("log");
    let log = OpenOptions::new().append(true).create_new(true).open(&log_path).expect("a new log");
    let left = Cell::new(steps);
    let stop = || left.replace(left.get().saturating_sub(1)) == 0;
    let worker = Worker {
        root: dir.path(),
        log: &log,
        number: 0,
        rng: SimRng::new(5),
        syncs_replacements: false,
    };
    let (acknowledged, result) = worker.work(&stop);
    result.expect("the host's file system works");
    assert_eq!(acknowledged, steps);
    let text = fs::read_to_string(log_path).expect("the log");
    (dir, text)
}

#[test]
fn a_workload_verifies_after_it_ran() {
    let (dir, log) = worked(200);
    assert!(verify(dir.path(), &log).expect("nothing is wrong") > 10);
    assert!(verify(dir.path(), &format!("{log}begin t0/fi")).is_ok(), "a line cut short is none");
}

#[test]
fn verification_finds_every_lost_file() {
    let (dir, log) = worked(200);
    let mut names: Vec<_> = fs::read_dir(dir.path().join("t0"))
        .expect("made")
        .map(|entry| entry.expect("listed").path())
        .collect();
    names.sort();
    assert!(names.len() > 10);
    for path in names {
        let bytes = fs::read(&path).expect("a file");
        let mut flipped = bytes.clone();
        flipped[bytes.len() / 2] ^= 1;
        for wrong in [Some(&flipped[..]), Some(&bytes[..bytes.len() - 1]), Some(&[]), None] {
            match wrong {
                Some(wrong) => fs::write(&path, wrong).expect("written"),
                None => fs::remove_file(&path).expect("removed"),
            }
            assert_eq!(verify(dir.path(), &log).expect_err("damage").len(), 1, "{path:?}");
        }
        fs::write(&path, &bytes).expect("written");
    }
    assert!(verify(dir.path(), &log).is_ok());
}

#[test]
fn a_removed_file_that_comes_back_is_seen() {
    let (dir, log) = worked(1);
    fs::write(dir.path().join("t0/file1"), b"x").expect("written");
    let log =
        format!("{log}begin t0/file1 1\ndone t0/file1 1\nbegin t0/file1 0\ndone t0/file1 0\n");
    assert!(verify(dir.path(), &log).is_err());
}

#[test]
fn an_unanswered_operation_may_or_may_not_survive() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::create_dir(dir.path().join("t0")).expect("made");
    let path = dir.path().join("t0/file1");
    let log = "begin t0/file1 1\ndone t0/file1 1\nbegin t0/file1 2\n";
    for version in [1, 2] {
        fs::write(&path, whole("t0/file1", version)).expect("written");
        assert_eq!(verify(dir.path(), log), Ok(1));
    }
    fs::write(&path, whole("t0/file1", 3)).expect("written");
    assert!(verify(dir.path(), log).is_err());
}
