//! A copy whose target crashes at any moment is no volume or a whole one, and ends whole when it is
//! run again.

use std::ops::ControlFlow;
use std::sync::Arc;

use ferry_check::copy::{CopyError, CopyOptions, copy};
use ferry_check::{FsckOptions, fsck};
use ferry_device::{AlignedBuf, BlockDevice};
use ferry_env::Env;
use ferry_fs::api::{Filesystem, ROOT};
use ferry_fs::volume::{LOG_MIN, VolumeError, read_superblock};
use ferry_fs::{FsOptions, InProcess, LocalFs, MkfsOptions, mkfs};
use ferry_object::VolumeOptions;
use ferry_sim::crash::Plan;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use ferry_sim::object::NotedStore;

const VOLUME_BYTES: u64 = 32 << 20;
/// Crash points between flushes tried for each volume.
const SAMPLE: usize = 40;

fn env() -> Env {
    sim_env(1).0
}

fn volume() -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = Arc::new(SimDevice::new(VOLUME_BYTES));
    let options = MkfsOptions { log_size: Some(LOG_MIN), ..MkfsOptions::default() };
    mkfs(&device, &options, &env()).expect("a volume");
    let options = FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() };
    let fs = LocalFs::open(device.clone(), options, env()).expect("it can be mounted");
    let me = InProcess::default();
    for n in 0..40_usize {
        let name = format!("f{n}");
        let made = me.call(|cx| fs.create(cx, ROOT, name.as_bytes(), 0o644, libc::O_RDWR));
        let (entry, opened) = made.expect("room");
        let ino = entry.attr.expect("made").ino;
        let data: Vec<u8> = (0..n * 9000).map(|at| (at / 7 + n) as u8).collect();
        me.call(|cx| fs.write(cx, ino, opened.fh, 0, &data, false, false)).expect("room");
        me.call(|cx| {
            fs.release(cx, ino, opened.fh);
            Ok(())
        })
        .expect("released");
        fs.forget(ino, 1);
    }
    fs.detach();
    fs.close().expect("closed");
    device
}

/// A copy has many chunks, legs and windows.
fn small() -> CopyOptions {
    let (chunk_bytes, leg_bytes, window_bytes) = (256 << 10, 1 << 20, 5 << 20);
    CopyOptions { restart: false, chunk_bytes, leg_bytes, window_bytes }
}

fn copied(from: &Arc<dyn BlockDevice>, to: &Arc<dyn BlockDevice>) -> Result<(), CopyError> {
    copy(from, to, small(), &env(), &mut |_| ControlFlow::Continue(())).map(drop)
}

fn bytes(device: &Arc<dyn BlockDevice>) -> Vec<u8> {
    let mut out = AlignedBuf::zeroed(device.capacity() as usize);
    device.read(0, &mut out).expect("no faults");
    out.to_vec()
}

/// A copy that was cut off is a volume, or it goes on and becomes one. Returns which.
fn is_whole(
    from: &Arc<dyn BlockDevice>,
    left: &Arc<dyn BlockDevice>,
    expected: &[u8],
    at: &str,
) -> bool {
    let whole = match read_superblock(left) {
        Ok(_) => true,
        // `Empty`: it was cut off before the first mark was durable, and nothing else is there.
        Err(VolumeError::Unfinished | VolumeError::Empty) => {
            copied(from, left).unwrap_or_else(|error| panic!("{at}: {error}"));
            false
        }
        Err(error) => panic!("{at}: {error}"),
    };
    let options = FsckOptions { verify_data: true, ..FsckOptions::default() };
    let report = fsck(left, options, &env()).expect("it can be checked");
    assert!(report.clean, "{at}: {:#?}", report.findings);
    assert!(bytes(left) == expected, "{at}: other bytes");
    whole
}

/// Copies, and crashes the target at many points. Returns how many of the crashes left a volume.
fn crashes(from: &Arc<dyn BlockDevice>, seed: u64) -> usize {
    let traced = Arc::new(SimDevice::new(from.capacity()));
    let to: Arc<dyn BlockDevice> = traced.clone();
    copied(from, &to).expect("it is copied");
    let expected = bytes(&to);
    let mut rng = SimRng::new(seed);
    let mut points = traced.flush_points();
    points.extend((0..SAMPLE).map(|_| rng.index(traced.trace_len() + 1)));
    let left_a_volume = |point: &usize| {
        let image: Arc<dyn BlockDevice> = Arc::new(traced.crash_image(*point, &mut rng));
        is_whole(from, &image, &expected, &format!("crashed at {point}"))
    };
    points.into_iter().filter(left_a_volume).count()
}

#[test]
fn a_copy_that_crashes_at_any_point_is_no_volume_or_a_whole_one() {
    assert!(crashes(&volume(), 7) > 0);
}

#[test]
fn a_volume_after_a_crash_is_copied_as_recovery_would_find_it() {
    for seed in 0..6 {
        let device = Plan::draw(seed).first_life_crashed().expect("the run itself is sound");
        let from: Arc<dyn BlockDevice> = Arc::new(device.copy());
        crashes(&from, seed);
    }
}

#[test]
fn a_copy_to_a_store_that_is_cut_at_any_request_is_no_volume_or_a_whole_one() {
    let from = volume();
    let sb = read_superblock(&from).expect("a volume");
    let store = Arc::new(NotedStore::default());
    let options = VolumeOptions::new(VOLUME_BYTES, (sb.segments_offset, sb.segment_len));
    store.make(&options, 1).expect("nothing is there");
    let made = store.trace_len();
    let owned = |store: &Arc<NotedStore>, seed| -> Arc<dyn BlockDevice> {
        store.own(None, seed).expect("it opens").device
    };
    let to = owned(&store, 2);
    copied(&from, &to).expect("it is copied");
    let expected = bytes(&to);
    drop(to);
    let mut whole = Vec::new();
    for point in made..=store.trace_len() {
        let left = owned(&Arc::new(store.after(point)), 3);
        whole.push(is_whole(&from, &left, &expected, &format!("cut at {point}")));
    }
    assert!(whole.len() > 50 && whole.is_sorted() && whole.last() == Some(&true), "{whole:?}");
    // And back from the store.
    let back: Arc<dyn BlockDevice> = Arc::new(SimDevice::new(VOLUME_BYTES));
    copied(&owned(&store, 4), &back).expect("it is copied");
    assert!(bytes(&back) == expected, "other bytes");
}
