//! Both copies of the home store and of its map: the same twice on a volume that was unmounted,
//! whatever was done before; a crash at any moment leaves a volume that a check calls clean. And
//! bugs of that kind are found.
//!
//! One test, because a bug is planted in the whole process.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod grow_support;

use ferry_check::{FsckOptions, fsck};
use ferry_device::BlockDevice;
use ferry_env::planted::{Bug, plant};
use ferry_fs::volume::{LOG_MIN, read_superblock};
use ferry_fs::{Filesystem, LocalFs, ROOT};
use ferry_journal::inspect::home_map;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use grow_support::{Files, ME, format, make, open, sync};
use std::sync::Arc;

/// Files that make the home store so large that it is renewed once they are gone.
const MANY: u32 = 1600;
/// Crashes that are looked at, beside those at a flush.
const SAMPLE: usize = 40;
/// What a crash before the end of a flush leaves is drawn so many times.
const DRAWS: usize = 3;

fn many(fs: &LocalFs) {
    for n in 0..MANY {
        make(fs, &mut Files::new(), format!("small {n}"), vec![n as u8; 2000]);
    }
}

fn none(fs: &LocalFs) {
    for n in 0..MANY {
        ME.call(|cx| fs.unlink(cx, ROOT, format!("small {n}").as_bytes())).unwrap();
    }
}

/// What a check, both copies read, finds wrong.
fn wrong(image: Arc<SimDevice>) -> Option<String> {
    let device: Arc<dyn BlockDevice> = image;
    let options = FsckOptions { verify_data: true, ..FsckOptions::default() };
    match fsck(&device, options, &sim_env(1).0) {
        Ok(report) if report.clean => None,
        Ok(report) => Some(format!("{}", report.findings[0])),
        Err(error) => Some(error.to_string()),
    }
}

fn at_rest(image: &Arc<SimDevice>) -> bool {
    let device: Arc<dyn BlockDevice> = image.clone();
    let geometry = read_superblock(&device).unwrap().geometry();
    home_map(&device, &geometry).iter().any(|map| map.as_ref().is_ok_and(|map| map.at_rest))
}

fn units_of(image: &Arc<SimDevice>) -> usize {
    let device: Arc<dyn BlockDevice> = image.clone();
    let [map, _] = home_map(&device, &read_superblock(&device).unwrap().geometry());
    map.unwrap().units.into_iter().flatten().count()
}

/// The first thing that is wrong after a crash while a volume is filled, emptied, and unmounted in
/// between.
fn first_wrong() -> Option<String> {
    let device = Arc::new(SimDevice::new(32 << 20));
    format(&(device.clone() as Arc<dyn BlockDevice>), LOG_MIN);
    device.restart_trace();
    let (mut units, mut rng) = (Vec::new(), SimRng::new(11));
    for change in [many, none] {
        let fs = open(device.clone(), false);
        change(&fs);
        sync(&fs);
        fs.close().unwrap();
        drop(fs);
        units.push(units_of(&device));
        if let Some(wrong) = wrong(Arc::new(device.copy())) {
            return Some(format!("unmounted: {wrong}"));
        }
    }
    assert!(units[1] < units[0] / 2, "the home store was renewed: {units:?}");
    let before_ends = device.flush_points().into_iter().step_by(2);
    let mut points: Vec<_> = before_ends.flat_map(|point| [point; DRAWS]).collect();
    points.extend((0..SAMPLE).map(|_| rng.index(device.trace_len() + 1)));
    let (mut resting, mut busy) = (0, 0);
    for point in points {
        let image = Arc::new(device.crash_image(point, &mut rng));
        *if at_rest(&image) { &mut resting } else { &mut busy } += 1;
        if let Some(wrong) = wrong(image) {
            return Some(format!("a crash at event {point}: {wrong}"));
        }
    }
    assert!(resting > 0 && busy > 0, "{resting} crashes at rest, {busy} others");
    None
}

#[test]
fn both_copies_are_the_same_and_bugs_there_are_found() {
    assert_eq!(first_wrong(), None);
    for bug in [Bug::SingleCopy, Bug::UnflushedRenewal, Bug::KeptRestMark] {
        let planted = plant(bug);
        let found = first_wrong();
        drop(planted);
        println!("{bug:?}: {}", found.unwrap_or_else(|| panic!("{bug:?} is not found")));
    }
}
