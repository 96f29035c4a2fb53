//! Local logs in directories: what an opening leaves behind that fails.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_object::{
    Encryption, Kdf, ObjectDevice, ObjectError, OnDisk, Opening, Passphrase, StoreUrl,
    VolumeOptions, make_volume, open_volume,
};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A volume in a directory's `store`, which was made and closed.
fn made(directory: &Path) -> StoreUrl {
    let url = StoreUrl::Dir(directory.join("store"));
    let options = VolumeOptions::new(1 << 20, (0, 1 << 20));
    let made = make_volume(&url, &options, &Env::real()).expect("a new volume");
    made.device.close().expect("it is at rest");
    url
}

/// A volume whose owner lost its power when its last flushes were in its local log only. Returns
/// the volume and the log's directory.
fn powerless(directory: &Path) -> (StoreUrl, PathBuf) {
    let log = directory.join("log");
    let url = made(directory);
    let device = open(&url, Some(&log)).expect("it is free");
    loses_power(directory, &log, device);
    (url, log)
}

/// The owner flushes while the store is away, and loses its power.
fn loses_power(directory: &Path, log: &Path, device: Arc<ObjectDevice>) {
    let store = directory.join("store");
    copy(&store, &directory.join("store then"));
    // Nothing can be uploaded: a file is where the log objects belong.
    fs::rename(store.join("w"), store.join("away")).expect("it can be renamed");
    fs::write(store.join("w"), "in the way").expect("it can be written");
    for at in [0, BLOCK_SIZE as u64] {
        device.write(at, &content()).expect("it is taken");
        device.flush().expect("it is durable in the log");
    }
    copy(log, &directory.join("log then"));
    fs::remove_file(store.join("w")).expect("it can be removed");
    fs::rename(store.join("away"), store.join("w")).expect("it can be renamed");
    device.close().expect("it is at rest");
    drop(device);
    for (then, now) in [("store then", &*store), ("log then", log)] {
        fs::remove_dir_all(now).expect("it can be removed");
        fs::rename(directory.join(then), now).expect("it can be renamed");
    }
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

const OWN: Opening = Opening::OWN;
const FORCE: Opening = Opening::Own { take_over: true, force: true };

fn open(url: &StoreUrl, log: Option<&Path>) -> Result<Arc<ObjectDevice>, ObjectError> {
    open_with(url, OWN, log)
}

fn open_with(
    url: &StoreUrl,
    opening: Opening,
    log: Option<&Path>,
) -> Result<Arc<ObjectDevice>, ObjectError> {
    let on_disk = OnDisk { local_log: log.map(Into::into), ..OnDisk::default() };
    loop {
        match open_volume(url, opening.clone(), None, &on_disk, &Env::real()) {
            // A request of the owner before this one, which was of this process, is just ending.
            Err(ObjectError::Locked(holder)) if holder.pid == std::process::id() => {
                std::thread::yield_now();
            }
            opened => return opened,
        }
    }
}

/// The claim fails: a file is where the roots belong.
fn fails(url: &StoreUrl, opening: Opening, log: Option<&Path>) {
    let StoreUrl::Dir(store) = url else { unreachable!("it is a directory") };
    let (roots, away) = (store.join("c"), store.join("away"));
    fs::rename(&roots, &away).expect("it can be renamed");
    fs::write(&roots, "in the way").expect("it can be written");
    open_with(url, opening, log).err().expect("it cannot be claimed");
    fs::remove_file(&roots).expect("it can be removed");
    fs::rename(&away, &roots).expect("it can be renamed");
}

/// What was flushed when the power was lost is there. Closes the volume.
fn has_content(device: Arc<ObjectDevice>) {
    let mut found = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(0, &mut found).expect("it can be read");
    assert!(found[..] == content()[..], "what was flushed is there");
    device.close().expect("it is at rest");
}

fn log_of(directory: &Path) -> PathBuf {
    directory.join("ferry-local-log")
}

#[test]
fn a_log_is_removed_only_behind_the_claim() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, log) = powerless(directory.path());
    fails(&url, OWN, None);
    assert!(log_of(&log).exists(), "the volume has not been claimed");
    has_content(open(&url, None).expect("nothing is wrong"));
    assert!(!log_of(&log).exists(), "nothing needs it any more");
    open(&url, None).expect("nothing is missing").close().expect("it is at rest");
}

#[test]
fn a_log_that_is_missing_stays_noted_until_the_claim() {
    for other in [None, Some("other")] {
        let directory = tempfile::tempdir().expect("a directory");
        let (url, log) = powerless(directory.path());
        let (away, other) =
            (directory.path().join("away"), other.map(|o| directory.path().join(o)));
        fs::rename(&log, &away).expect("it can be renamed");
        fails(&url, FORCE, other.as_deref());
        fs::rename(&away, &log).expect("it can be renamed");
        has_content(open(&url, None).expect("its log is found"));
    }
}

#[test]
fn a_log_that_was_lost_is_not_missed_once_the_volume_was_claimed_without_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, log) = powerless(directory.path());
    fs::remove_dir_all(&log).expect("it can be removed");
    let missing = open(&url, None).err().expect("it is refused");
    assert!(missing.to_string().contains("is not there"), "{missing}");
    let device = open_with(&url, FORCE, None).expect("it is told to");
    device.close().expect("it is at rest");
    open(&url, None).expect("nothing is missing").close().expect("it is at rest");
}

#[test]
fn a_directory_that_was_in_use_stays_noted_until_its_log_is_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, first) = powerless(directory.path());
    let second = directory.path().join("second");
    fails(&url, OWN, Some(&second));
    // Both are known: the volume needs no option, and no force.
    assert!(log_of(&first).exists() && log_of(&second).exists(), "the volume was not claimed");
    fails(&url, OWN, None);
    has_content(open(&url, Some(&first)).expect("nothing is wrong"));
    assert!(!log_of(&second).exists(), "nothing needs it any more");
    has_content(open(&url, Some(&second)).expect("nothing is wrong"));
    assert!(!log_of(&first).exists(), "nothing needs it any more");
}

#[test]
fn another_name_of_the_logs_directory_is_not_another_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    let (link, real) = (directory.path().join("log"), directory.path().join("real"));
    let url = made(directory.path());
    // It was noted under the name that is a symbolic link now.
    open(&url, Some(&link)).expect("it is free").close().expect("it is at rest");
    fs::rename(&link, &real).expect("it can be renamed");
    symlink(&real, &link).expect("it can be made");
    let device = open(&url, Some(&link)).expect("its log is there");
    assert!(log_of(&real).exists(), "the owner has its log");
    loses_power(directory.path(), &real, device);
    has_content(open(&url, Some(&real)).expect("its log is there"));
    assert!(log_of(&real).exists(), "it is the log of the next owner");
}

#[test]
fn a_log_that_was_uploaded_and_removed_is_not_missed_after_a_failure() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let url = made(directory.path());
    let device = open(&url, Some(&at("first"))).expect("it is free");
    device.close().expect("it is at rest");
    drop(device);
    // The second directory has a file of somebody else.
    fs::create_dir(at("second")).expect("a directory");
    fs::write(log_of(&at("second")), vec![b'x'; 1 << 20]).expect("it can be written");
    let refused = open(&url, Some(&at("second"))).err().expect("it is refused");
    assert!(refused.to_string().contains("this is no local log"), "{refused}");
    let device = open(&url, None).expect("nothing is missing");
    assert!(!log_of(&at("first")).exists(), "what it had is in the store");
    device.close().expect("it is at rest");
}

#[test]
fn a_wrong_passphrase_leaves_the_log_as_it_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, log) = (StoreUrl::Dir(directory.path().join("store")), directory.path().join("log"));
    let passphrase = |text: &str| Passphrase::new(text.as_bytes().to_vec().into());
    let right = passphrase("right").expect("it is not empty");
    let kdf = Kdf { memory_kib: 8, passes: 1 };
    let encryption = Some(Encryption { passphrase: right, kdf });
    let options = VolumeOptions { encryption, ..VolumeOptions::new(1 << 20, (0, 1 << 20)) };
    let made = make_volume(&url, &options, &Env::real()).expect("a new volume");
    made.device.close().expect("it is at rest");
    drop(made);
    let on_disk = OnDisk { local_log: Some(log.clone()), ..OnDisk::default() };
    let opened = |text| open_volume(&url, OWN, passphrase(text), &on_disk, &Env::real());
    assert_eq!(opened("wrong").err(), Some(ObjectError::WrongPassphrase));
    assert!(!log.exists(), "nothing was changed");
    let device = opened("right").expect("nothing is wrong");
    assert!(log_of(&log).exists(), "its owner has a log");
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
    has_content(open(&url, Some(&log)).expect("its log is there"));
}

#[test]
fn a_reader_does_not_pass_over_a_damaged_log() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url, log) = powerless(directory.path());
    // The first record is behind two blocks of headers.
    let file =
        fs::OpenOptions::new().read(true).write(true).open(log_of(&log)).expect("it is there");
    let mut byte = [0];
    let at = 2 * BLOCK_SIZE as u64 + 100;
    file.read_exact_at(&mut byte, at).expect("it can be read");
    file.write_all_at(&[!byte[0]], at).expect("it can be written");
    drop(file);
    let read = open_volume(&url, Opening::Read, None, &OnDisk::default(), &Env::real());
    let refused = read.err().expect("it is refused");
    assert!(refused.to_string().contains("this local log is damaged"), "{refused}");
}
