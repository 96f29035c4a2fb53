//! The log of a volume in use grows: at every moment a crash leaves either the old log or the new one, and with either everything that
//! was made durable.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_device::BlockDevice;
use ferry_fs::volume::{SUPERBLOCK_PLACES, read_superblock, read_superblock_copies};
use ferry_fs::{
    Errno, Filesystem, FsOptions, FsckOptions, InProcess, LocalFs, MkfsOptions, ROOT, fsck, ioctl, mkfs,
};
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::collections::BTreeMap;
use std::sync::Arc;

const ME: InProcess = InProcess { uid: 0, gid: 0, umask: 0, caller: 0 };
const VOLUME: u64 = 64 << 20;

type Files = BTreeMap<String, Vec<u8>>;

fn open(device: &Arc<SimDevice>, background: bool) -> Arc<LocalFs> {
    let options = FsOptions { background, cache_bytes: 8 << 20, ..FsOptions::default() };
    LocalFs::open(device.clone(), options, sim_env(1).0).unwrap()
}

fn volume(log: u64) -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new(VOLUME));
    let as_device: Arc<dyn BlockDevice> = device.clone();
    let options = MkfsOptions { log_size: Some(log), ..MkfsOptions::default() };
    mkfs(&as_device, &options, &sim_env(1).0).unwrap();
    device
}

fn log_len(device: &Arc<SimDevice>) -> u64 {
    let as_device: Arc<dyn BlockDevice> = device.clone();
    read_superblock(&as_device).unwrap().log_len
}

fn make(fs: &LocalFs, files: &mut Files, name: String, data: Vec<u8>) {
    let made = ME.call(|cx| {
        let (entry, opened) = fs.create(cx, ROOT, name.as_bytes(), 0o644, libc::O_RDWR)?;
        let ino = entry.attr.unwrap().ino;
        fs.write(cx, ino, opened.fh, 0, &data, false, false)?;
        fs.release(cx, ino, opened.fh);
        Ok(())
    });
    made.unwrap_or_else(|e| panic!("{name}: {e}"));
    files.insert(name, data);
}

fn sync(fs: &LocalFs) {
    ME.call(|cx| fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0)).unwrap();
}

fn grow(fs: &LocalFs, bytes: u64) -> Result<(), Errno> {
    ME.call(|cx| fs.ioctl(cx, ROOT, ioctl::GROW_LOG, &bytes.to_ne_bytes(), 0)).map(drop)
}

/// The file's contents, if it is there.
fn read(fs: &LocalFs, name: &str) -> Option<Vec<u8>> {
    let attr = ME.call(|cx| fs.lookup(cx, ROOT, name.as_bytes())).unwrap().attr?;
    let fh = ME.call(|cx| fs.open(cx, attr.ino, libc::O_RDONLY, false)).unwrap().fh;
    let mut data = vec![0; attr.size as usize];
    let len = ME.call(|cx| fs.read(cx, attr.ino, fh, 0, &mut data)).unwrap();
    assert_eq!(len, data.len());
    Some(data)
}

fn assert_clean(device: &Arc<SimDevice>) {
    let as_device: Arc<dyn BlockDevice> = device.clone();
    let report = fsck(&as_device, FsckOptions::default(), &sim_env(1).0).unwrap();
    assert!(report.clean, "{:?}", report.findings);
}

fn contents(n: u32) -> Vec<u8> {
    vec![n as u8; [10, 3000, 20_000][n as usize % 3]]
}

#[test]
fn a_crash_while_the_log_grows_leaves_one_log_with_everything() {
    let device = volume(512 << 10);
    let fs = open(&device, false);
    let (mut files, mut rng) = (Files::new(), SimRng::new(7));
    for n in 0..40 {
        make(&fs, &mut files, format!("before {n}"), contents(n));
    }
    sync(&fs);
    device.restart_trace();
    make(&fs, &mut files.clone(), "not synced".into(), contents(1));
    grow(&fs, 4 << 20).unwrap();
    let grown_at = device.trace_len();
    let mut after = files.clone();
    for n in 0..30 {
        make(&fs, &mut after, format!("after {n}"), contents(n));
    }
    sync(&fs);
    let synced_at = device.trace_len();
    let mut points = device.flush_points();
    points.extend((0..40).map(|_| rng.index(synced_at + 1)));
    points.push(synced_at);
    let mut lens = [0; 2];
    for point in points {
        let image = Arc::new(device.crash_image(point, &mut rng));
        let len = log_len(&image);
        lens[usize::from(len > 512 << 10)] += 1;
        assert!(point < grown_at || len == 4 << 20, "the log was said to have grown");
        let expected = if point >= synced_at { &after } else { &files };
        let check = |fs: &LocalFs| {
            for (name, data) in expected {
                assert_eq!(read(fs, name).as_ref(), Some(data), "{name} after a crash at {point}");
            }
        };
        let fs = open(&image, false);
        check(&fs);
        // It is used again, so that a log which must not count would be in the way, and crashes once more.
        let mut more = Files::new();
        for n in 0..10 {
            make(&fs, &mut more, format!("more {n}"), contents(n));
        }
        sync(&fs);
        let as_device: Arc<dyn BlockDevice> = image.clone();
        let copies = read_superblock_copies(&*as_device);
        assert!(copies[1].is_err() || copies[0].is_err() || copies[0] == copies[1], "{copies:?}");
        drop(fs);
        let image = Arc::new(image.crash_image(image.trace_len(), &mut rng));
        let fs = open(&image, false);
        check(&fs);
        for (name, data) in &more {
            assert_eq!(read(&fs, name).as_ref(), Some(data));
        }
        fs.close().unwrap();
        drop(fs);
        assert_clean(&image);
    }
    assert!(lens.iter().all(|n| *n > 0), "crashes on both sides of the change: {lens:?}");
}

#[test]
fn the_log_grows_twice_under_load_and_stays_so() {
    let device = volume(512 << 10);
    let fs = open(&device, true);
    let mut files = Files::new();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let fs = &fs;
                scope.spawn(move || {
                    let mut mine = Files::new();
                    for n in 0..300 {
                        make(fs, &mut mine, format!("{worker} {n}"), contents(n));
                        if n % 20 == 0 {
                            sync(fs);
                        }
                    }
                    mine
                })
            })
            .collect();
        for len in [1 << 20, 4 << 20] {
            grow(&fs, len).unwrap();
            assert_eq!(fs.stats()["log"]["bytes"], len);
        }
        workers.into_iter().for_each(|worker| files.extend(worker.join().unwrap()));
    });
    assert_eq!(grow(&fs, 2 << 20), Err(Errno(libc::EINVAL)), "it does not shrink");
    assert_eq!(grow(&fs, VOLUME / 2), Err(Errno(libc::EINVAL)), "too much of the volume");
    fs.close().unwrap();
    drop(fs);
    assert_clean(&device);
    let fs = open(&device, true);
    assert_eq!(fs.stats()["log"]["bytes"], 4 << 20);
    for (name, data) in &files {
        assert_eq!(read(&fs, name).as_ref(), Some(data), "{name}");
    }
    fs.close().unwrap();
}

/// What is in the way is said, and nothing has changed; what makes room lets it grow.
#[test]
fn a_full_volume_keeps_its_log() {
    let device = volume(512 << 10);
    let fs = open(&device, true);
    let mut files = Files::new();
    let before = fs.stats()["log"]["bytes"].clone();
    for n in 0.. {
        let name = format!("full {n}");
        let made = ME.call(|cx| {
            let (entry, opened) = fs.create(cx, ROOT, name.as_bytes(), 0o644, libc::O_RDWR)?;
            let ino = entry.attr.unwrap().ino;
            let written = fs.write(cx, ino, opened.fh, 0, &vec![n as u8; 1 << 20], false, false);
            fs.release(cx, ino, opened.fh);
            written
        });
        match made {
            Ok(_) => drop(files.insert(name, vec![n as u8; 1 << 20])),
            Err(Errno(code)) => {
                assert_eq!(code, libc::ENOSPC);
                break;
            }
        }
    }
    sync(&fs);
    assert_eq!(grow(&fs, 16 << 20), Err(Errno(libc::ENOSPC)));
    assert_eq!(fs.stats()["log"]["bytes"], before);
    for (name, data) in &files {
        assert_eq!(read(&fs, name).as_ref(), Some(data), "{name}");
    }
    fs.close().unwrap();
    drop(fs);
    let as_device: Arc<dyn BlockDevice> = device.clone();
    let places = read_superblock_copies(&*as_device).map(|copy| copy.unwrap().log_len);
    assert_eq!(places, [512 << 10; 2], "at {SUPERBLOCK_PLACES:?}");
    assert_clean(&device);
}
