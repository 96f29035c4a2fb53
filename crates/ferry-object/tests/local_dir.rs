//! Local logs in directories: what an opening leaves behind that fails.

use ferry_env::Env;
use ferry_object::{
    ObjectDevice, ObjectError, OnDisk, Opening, StoreUrl, VolumeOptions, make_volume, open_volume,
};
use std::fs;
use std::path::Path;
use std::sync::Arc;

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
