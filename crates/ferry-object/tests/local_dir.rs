//! Local logs in directories: what an opening leaves behind that fails.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_object::{
    ObjectDevice, ObjectError, OnDisk, Opening, StoreUrl, VolumeOptions, make_volume, open_volume,
};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A volume whose owner lost its power when its last flushes were in its local log only. Returns
/// the volume and the log's directory.
fn powerless(directory: &Path) -> (StoreUrl, PathBuf) {
    let (store, log) = (directory.join("store"), directory.join("log"));
    let url = StoreUrl::Dir(store.clone());
    let options = VolumeOptions::new(1 << 20, (0, 1 << 20));
    let made = make_volume(&url, &options, &Env::real()).expect("a new volume");
    made.device.close().expect("it is at rest");
    drop(made);
    let device = open(&url, Some(&log)).expect("it is free");
    copy(&store, &directory.join("store then"));
    // Nothing can be uploaded: a file is where the log objects belong.
    fs::rename(store.join("w"), store.join("away")).expect("it can be renamed");
    fs::write(store.join("w"), "in the way").expect("it can be written");
    for at in [0, BLOCK_SIZE as u64] {
        device.write(at, &content()).expect("it is taken");
        device.flush().expect("it is durable in the log");
    }
    copy(&log, &directory.join("log then"));
    fs::remove_file(store.join("w")).expect("it can be removed");
    fs::rename(store.join("away"), store.join("w")).expect("it can be renamed");
    device.close().expect("it is at rest");
    drop(device);
    for (then, now) in [("store then", &store), ("log then", &log)] {
        fs::remove_dir_all(now).expect("it can be removed");
        fs::rename(directory.join(then), now).expect("it can be renamed");
    }
    (url, log)
}

fn content() -> AlignedBuf {
    let mut content = AlignedBuf::zeroed(BLOCK_SIZE);
    content.fill(7);
    content
}

/// With the holes of files.
fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").args(["-a", "--sparse=always"]).arg(from).arg(to).status();
    assert!(done.expect("cp runs").success());
}

fn open(url: &StoreUrl, log: Option<&Path>) -> Result<Arc<ObjectDevice>, ObjectError> {
    let opening = Opening::Own { take_over: false, force: false };
    let on_disk = OnDisk { local_log: log.map(Into::into), ..OnDisk::default() };
    open_volume(url, opening, None, &on_disk, &Env::real())
}

#[test]
fn a_log_that_was_uploaded_and_removed_is_not_missed_after_a_failure() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let url = StoreUrl::Dir(at("store"));
    let options = VolumeOptions::new(1 << 20, (0, 1 << 20));
    let made = make_volume(&url, &options, &Env::real()).expect("a new volume");
    made.device.close().expect("it is at rest");
    drop(made);
    let device = open(&url, Some(&at("first"))).expect("it is free");
    device.close().expect("it is at rest");
    drop(device);
    // The second directory has a file of somebody else.
    fs::create_dir(at("second")).expect("a directory");
    fs::write(at("second/ferry-local-log"), vec![b'x'; 1 << 20]).expect("it can be written");
    let refused = open(&url, Some(&at("second"))).err().expect("it is refused");
    assert!(refused.to_string().contains("this is no local log"), "{refused}");
    assert!(!at("first/ferry-local-log").exists(), "what it had is in the store");
    let device = open(&url, None).expect("nothing is missing");
    device.close().expect("it is at rest");
}

#[test]
fn a_copy_of_the_volume_does_not_get_what_the_originals_log_has() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, log) = powerless(directory.path());
    let copied = directory.path().join("copied");
    copy(&directory.path().join("store"), &copied);
    let refused = open(&StoreUrl::Dir(copied), Some(&log)).err().expect("it is refused");
    assert!(refused.to_string().contains("or of a copy of this one"), "{refused}");
    let device = open(&url, Some(&log)).expect("its log is there");
    let mut found = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(0, &mut found).expect("it can be read");
    assert!(found[..] == content()[..], "what was flushed is there");
    device.close().expect("it is at rest");
}

#[test]
fn a_reader_does_not_pass_over_a_damaged_log() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, log) = powerless(directory.path());
    // The first record is behind two blocks of headers.
    let file = log.join("ferry-local-log");
    let file = fs::OpenOptions::new().read(true).write(true).open(file).expect("it is there");
    let mut byte = [0];
    let at = 2 * BLOCK_SIZE as u64 + 100;
    file.read_exact_at(&mut byte, at).expect("it can be read");
    file.write_all_at(&[!byte[0]], at).expect("it can be written");
    drop(file);
    let read = open_volume(&url, Opening::Read, None, &OnDisk::default(), &Env::real());
    let refused = read.err().expect("it is refused");
    assert!(refused.to_string().contains("this local log is damaged"), "{refused}");
}
