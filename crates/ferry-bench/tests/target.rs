//! A directory of the host's file system and a volume in memory behave the same.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_bench::{Counters, DeviceModel, Target, VolumeOptions, threads};
use ferry_fs::{FlushPolicy, FsOptions};
use std::io::ErrorKind;
use std::time::Duration;

fn volume() -> Target {
    let device = DeviceModel { flush_time: Duration::from_micros(50), ..DeviceModel::default() };
    // Nothing is committed but what is asked for.
    let fs = FsOptions { commit_interval: Duration::from_secs(3600), ..FsOptions::default() };
    Target::in_process(&VolumeOptions { device, capacity: 1 << 30, fs, ..VolumeOptions::default() })
        .unwrap()
}

fn works(target: &Target) {
    let root = target.root();
    let dir = root.mkdir("a").unwrap();
    assert_eq!(root.mkdir("a").err().unwrap().kind(), ErrorKind::AlreadyExists);
    let file = dir.create("f").unwrap();
    assert_eq!(dir.create("f").err().unwrap().kind(), ErrorKind::AlreadyExists);
    file.write_at(b"hello", 3).unwrap();
    let mut out = [9; 16];
    assert_eq!(file.read_at(&mut out, 0).unwrap(), 8);
    assert_eq!(&out[..8], b"\0\0\0hello");
    file.sync().unwrap();
    assert_eq!(dir.stat("f").unwrap(), 8);
    let other = dir.mkdir("b").unwrap();
    dir.link("f", &other, "g").unwrap();
    dir.rename("f", &other, "h").unwrap();
    assert_eq!(dir.stat("f").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(dir.open("f").err().unwrap().kind(), ErrorKind::NotFound);
    assert_eq!(root.open_dir("a").unwrap().open_dir("b").unwrap().stat("h").unwrap(), 8);
    other.unlink("g").unwrap();
    assert_eq!(other.open("h").unwrap().read_at(&mut out, 3).unwrap(), 5);
    target.sync_files((0..2100).map(|n| dir.create(&format!("n{n}")))).unwrap();
    assert!(target.sync_files((0..1).map(|_| dir.open("absent"))).is_err());
    target.sync().unwrap();
    drop((file, other, dir));
    root.remove_tree("a").unwrap();
    assert_eq!(root.stat("a").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_directory() {
    let host = tempfile::tempdir().unwrap();
    let target = Target::on(host.path(), None).unwrap();
    works(&target);
    assert!(target.stats().unwrap().is_none());
    assert!(target.tune(FlushPolicy::Each).is_err());
    assert!(target.take_lateness().is_none());
    let beside = Target::on(host.path(), Some(std::process::id())).unwrap();
    assert!(beside.cpu_time().unwrap().daemon.is_some());
    drop((target, beside));
    assert_eq!(std::fs::read_dir(host.path()).unwrap().count(), 0, "nothing is left");
    assert!(Target::on(&host.path().join("absent"), None).is_err());
}

#[test]
fn a_volume() {
    let target = volume();
    works(&target);
    target.tune(FlushPolicy::Gather).unwrap();
    assert_eq!(target.stats().unwrap().unwrap()["flush"]["policy"], "gather");
    assert!(target.take_lateness().unwrap().count() > 0);
}

/// One thread: each new file that is synced costs one commit and one flush.
#[test]
fn counters_say_what_a_file_costs() {
    let target = volume();
    let dir = target.root().mkdir("d").unwrap();
    target.sync().unwrap();
    let before = Counters::of(&target).unwrap();
    for n in 0..10 {
        let file = dir.create(&n.to_string()).unwrap();
        file.write_at(&[1; 4096], 0).unwrap();
        file.sync().unwrap();
    }
    let spent = Counters::of(&target).unwrap().since(&before);
    assert_eq!(spent.commits, Some(10.0));
    // If the journal sees its log idle between two files, it writes one durable point, with a
    // flush.
    assert!(matches!(spent.flushes, Some(10.0 | 11.0)), "{:?}", spent.flushes);
    assert!(spent.cpu_s > 0.0);
}

#[test]
fn threads_return_in_order_or_with_an_error() {
    assert_eq!(threads(3, Ok::<_, std::io::Error>).unwrap(), [0, 1, 2]);
    let failed = threads(3, |n| {
        if n == 1 { Err(ErrorKind::NotFound.into()) } else { Ok::<_, std::io::Error>(n) }
    });
    assert!(failed.is_err());
}
