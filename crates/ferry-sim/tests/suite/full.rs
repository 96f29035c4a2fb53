//! A volume that many fill until nothing fits any more, each file made durable on its own, and
//! empty again, round after round; the mount goes on, ends in order, or is killed between. What a
//! write or a create was answered is never refused by an fsync, and no round has less room than the
//! one before.

use ferry_check::FsckOptions;
use ferry_check::fsck;
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::{Errno, Filesystem, FsOptions, InProcess, Ino, LocalFs, MkfsOptions, ROOT};
use ferry_fs::{ioctl, mkfs};
use ferry_sim::device::{Op, SimDevice};
use std::sync::{Arc, Mutex};

const ME: InProcess = InProcess::ROOT;
const VOLUME: u64 = 48 << 20;
const ROUNDS: u32 = 6;
const PEOPLE: u64 = 4;
/// How long files are; the first is kept in its record.
const SIZES: [usize; 5] = [900, 20_000, 300_000, 5_000, 1_500_000];

/// What comes between two rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    Nothing,
    Remount,
    /// The mount is killed, while it is filled or while it is emptied, and what the host has of it
    /// then goes on.
    Kill,
}

fn open(device: &Arc<SimDevice>) -> Arc<LocalFs> {
    let dev: Arc<dyn BlockDevice> = device.clone();
    LocalFs::open(dev, FsOptions { cache_bytes: 8 << 20, ..FsOptions::default() }, Env::real())
        .unwrap()
}

fn no_room(fs: &LocalFs) -> u64 {
    let stats =
        ME.call(|cx| fs.ioctl(cx, ROOT, ioctl::STATS, &[], ioctl::STATS_LEN as usize)).unwrap();
    let len = stats.iter().position(|b| *b == 0).unwrap_or(stats.len());
    let stats: serde_json::Value = serde_json::from_slice(&stats[..len]).unwrap();
    stats["data"]["no_room"].as_u64().unwrap()
}

/// Files that were made durable, and their lengths.
type Durable = Mutex<Vec<(String, usize)>>;

/// Makes files until there is no room.
fn fill(fs: &LocalFs, me: u64, durable: &Durable) {
    for n in 0.. {
        let name = format!("{me} {n}");
        let made = ME.call(|cx| fs.create(cx, ROOT, name.as_bytes(), 0o644, libc::O_RDWR));
        let (entry, opened) = match made {
            Err(Errno(libc::ENOSPC)) => return,
            made => made.unwrap(),
        };
        let ino = entry.attr.unwrap().ino;
        let data = vec![n as u8; SIZES[(n + me) as usize % SIZES.len()]];
        let written = ME.call(|cx| fs.write(cx, ino, opened.fh, 0, &data, false, false));
        let synced = ME.call(|cx| fs.fsync(cx, ino, opened.fh, false));
        assert_eq!(synced, Ok(()), "{name}: what was answered is kept");
        release(fs, ino, opened.fh);
        match written {
            Err(Errno(libc::ENOSPC)) => return,
            written => assert_eq!(written, Ok(data.len() as u64)),
        }
        durable.lock().unwrap().push((name, data.len()));
    }
}

fn release(fs: &LocalFs, ino: Ino, fh: u64) {
    let released: Result<(), Errno> = ME.call(|cx| {
        fs.release(cx, ino, fh);
        Ok(())
    });
    released.unwrap();
    fs.forget(ino, 1);
}

/// Gives the bytes that were made durable. `meanwhile` runs when `begun` of them are.
fn fill_together(fs: &LocalFs, begun: usize, meanwhile: impl FnOnce(&Durable)) -> usize {
    let durable = Durable::default();
    let bytes = || durable.lock().unwrap().iter().map(|(_, len)| len).sum::<usize>();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..PEOPLE)
            .map(|me| {
                let durable = &durable;
                scope.spawn(move || fill(fs, me, durable))
            })
            .collect();
        while bytes() < begun && !all.iter().all(|one| one.is_finished()) {
            std::thread::yield_now();
        }
        meanwhile(&durable);
    });
    bytes()
}

fn assert_there(fs: &LocalFs, durable: &[(String, usize)]) {
    for (name, len) in durable {
        let attr = ME.call(|cx| fs.lookup(cx, ROOT, name.as_bytes())).unwrap().attr;
        let attr = attr.unwrap_or_else(|| panic!("{name} was durable"));
        fs.forget(attr.ino, 1);
        assert_eq!(attr.size, *len as u64, "{name}");
    }
}

/// Each removes a share of all files.
fn remove_all(fs: &LocalFs) {
    let mut names = Vec::new();
    ME.call(|cx| {
        fs.readdir(cx, ROOT, 0, 2, false, &mut |entry| {
            names.push(entry.name.to_vec());
            true
        })
    })
    .unwrap();
    std::thread::scope(|scope| {
        for share in names.chunks(names.len().div_ceil(PEOPLE as usize).max(1)) {
            scope.spawn(move || {
                share.iter().for_each(|name| ME.call(|cx| fs.unlink(cx, ROOT, name)).unwrap());
            });
        }
    });
}

/// What a kill leaves as soon as more has been written to the device than now, or nobody writes any
/// more.
fn kill(device: &SimDevice, over: impl Fn() -> bool) -> Arc<SimDevice> {
    let before = device.asked(Op::Write);
    while device.asked(Op::Write) < before + 10 && !over() {
        std::thread::yield_now();
    }
    Arc::new(device.copy())
}

fn fill_and_empty(between: Between) {
    let mut device = Arc::new(SimDevice::new(VOLUME));
    let dev: Arc<dyn BlockDevice> = device.clone();
    mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
    let mut fs = open(&device);
    let mut rounds = Vec::new();
    for round in 0..ROUNDS {
        let mut killed = None;
        let begun = VOLUME as usize / 20 * round as usize;
        rounds.push(fill_together(&fs, begun, |durable| {
            if between == Between::Kill {
                let there = durable.lock().unwrap().clone();
                killed = Some((there, Arc::new(device.copy())));
            }
        }));
        assert_eq!(no_room(&fs), 0, "{between:?}, round {round}");
        if between == Between::Remount {
            fs.close().unwrap();
            fs = open(&device);
        }
        if let Some((there, killed)) = killed {
            fs.close().unwrap();
            device = killed;
            fs = open(&device);
            assert_there(&fs, &there);
            let killed = std::thread::scope(|scope| {
                let removing = scope.spawn(|| remove_all(&fs));
                kill(&device, || removing.is_finished())
            });
            fs.close().unwrap();
            device = killed;
            fs = open(&device);
        }
        remove_all(&fs);
        assert_eq!(no_room(&fs), 0, "{between:?}, round {round}");
    }
    fs.close().unwrap();
    let dev: Arc<dyn BlockDevice> = device;
    let report = fsck(&dev, FsckOptions::default(), &Env::real()).unwrap();
    assert!(report.clean, "{:?}", report.findings);
    let (least, first) = (*rounds.iter().min().unwrap(), rounds[0]);
    let volume = VOLUME as usize;
    assert!(least > volume / 3 && least + volume / 8 > first, "{between:?}: {rounds:?}");
}

#[test]
fn removed_files_give_their_space_back_while_mounted() {
    fill_and_empty(Between::Nothing);
}

#[test]
fn removed_files_give_their_space_back_after_an_unmount() {
    fill_and_empty(Between::Remount);
}

#[test]
fn removed_files_give_their_space_back_after_a_crash() {
    fill_and_empty(Between::Kill);
}
