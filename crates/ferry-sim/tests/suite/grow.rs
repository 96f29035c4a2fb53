//! The log of a volume in use grows: at every moment a crash leaves either the old log or the new
//! one, and with either everything that was made durable.

use crate::grow_support::{
    Files, ME, assert_clean, contents, format, grow, log_len, make, open, read, sync,
};
use ferry_device::BlockDevice;
use ferry_fs::volume::{LOG_MIN, read_superblock_copies};
use ferry_fs::{Errno, Filesystem, LocalFs, ROOT};
use ferry_sim::device::{SimDevice, SimRng};
use std::sync::Arc;

const VOLUME: u64 = 64 << 20;

fn volume(log: u64) -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new(VOLUME));
    format(&as_device(&device), log);
    device
}

fn as_device(device: &Arc<SimDevice>) -> Arc<dyn BlockDevice> {
    device.clone()
}

#[test]
fn a_crash_while_the_log_grows_leaves_one_log_with_everything() {
    let device = volume(LOG_MIN);
    let fs = open(device.clone(), false);
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
        assert_clean(&as_device(&image));
        let len = log_len(&as_device(&image));
        lens[usize::from(len > LOG_MIN)] += 1;
        assert!(point < grown_at || len == 4 << 20, "the log was said to have grown");
        let expected = if point >= synced_at { &after } else { &files };
        let check = |fs: &LocalFs| {
            for (name, data) in expected {
                assert_eq!(read(fs, name).as_ref(), Some(data), "{name} after a crash at {point}");
            }
        };
        let fs = open(image.clone(), false);
        check(&fs);
        // It is used again, so that a log which must not count would be in the way, and crashes
        // once more.
        let mut more = Files::new();
        for n in 0..10 {
            make(&fs, &mut more, format!("more {n}"), contents(n));
        }
        sync(&fs);
        let copies = read_superblock_copies(&*image);
        let whole: Vec<_> = copies.iter().filter_map(|(_, copy)| copy.as_ref().ok()).collect();
        assert!(whole.windows(2).all(|pair| pair[0] == pair[1]), "{copies:?}");
        drop(fs);
        let image = Arc::new(image.crash_image(image.trace_len(), &mut rng));
        let fs = open(image.clone(), false);
        check(&fs);
        for (name, data) in &more {
            assert_eq!(read(&fs, name).as_ref(), Some(data));
        }
        fs.close().unwrap();
        drop(fs);
        assert_clean(&as_device(&image));
    }
    assert!(lens.iter().all(|n| *n > 0), "crashes on both sides of the change: {lens:?}");
}

#[test]
fn the_log_grows_twice_under_load_and_keeps_its_size() {
    let device = volume(LOG_MIN);
    let fs = open(device.clone(), true);
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
    assert_clean(&as_device(&device));
    let fs = open(device.clone(), true);
    assert_eq!(fs.stats()["log"]["bytes"], 4 << 20);
    for (name, data) in &files {
        assert_eq!(read(&fs, name).as_ref(), Some(data), "{name}");
    }
    fs.close().unwrap();
}

/// What is in the way is said, and nothing has changed; what makes room lets it grow.
#[test]
fn a_full_volume_keeps_its_log() {
    let device = volume(LOG_MIN);
    let fs = open(device.clone(), true);
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
    let copies = read_superblock_copies(&*device);
    assert!(
        copies.len() == 3
            && copies.iter().all(|(_, copy)| copy.as_ref().unwrap().log_len == LOG_MIN)
    );
    assert_clean(&as_device(&device));
}
