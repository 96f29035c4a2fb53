//! The device fails at each request in turn: no hang, no panic, no false success, the errors of the
//! contract, and nothing lost that was acknowledged. `faults` (the program) tries them all.

use ferry_check::{FsckOptions, fsck};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::volume::LOG_MIN;
use ferry_fs::{Errno, Filesystem, FsOptions, InProcess, LocalFs, MkfsOptions, ROOT, mkfs};
use ferry_sim::device::{Fault, Op, SimDevice, SimRng, sim_env};
use ferry_sim::faults::{KINDS, campaign};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Requests of a kind that are made to fail, in each workload.
const MOST: u64 = if cfg!(debug_assertions) { 12 } else { 40 };
/// Workloads. One of four writes so much that the cleaner works.
const WORKLOADS: u64 = 5;

#[test]
fn nothing_acknowledged_is_lost_if_any_request_fails() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let tally = campaign(0, WORKLOADS, MOST, threads).unwrap_or_else(|what| panic!("{what}"));
    println!("{tally:?}");
    assert!(tally.runs > 3 * WORKLOADS * MOST, "requests of most kinds were there to fail");
    assert_eq!(tally.struck, tally.runs, "each fault came");
    assert!(tally.told > tally.runs && tally.read_only > tally.runs / 20 && tally.unopened > 0);
}

fn write(fs: &LocalFs, name: &[u8], bytes: &[u8]) -> Result<(u64, u64), Errno> {
    let me = InProcess::default();
    let (entry, opened) =
        me.call(|cx| fs.create(cx, ROOT, name, libc::S_IFREG | 0o644, libc::O_RDWR))?;
    let ino = entry.attr.expect("it was made").ino;
    me.call(|cx| fs.write(cx, ino, opened.fh, 0, bytes, false, false))?;
    Ok((ino, opened.fh))
}

/// Reads it all in parts that go through the cache.
fn read(fs: &LocalFs, (ino, fh): (u64, u64), len: usize) -> Result<Vec<u8>, Errno> {
    let mut all = vec![0; len];
    for (n, count) in all.chunks_mut(4096).enumerate() {
        InProcess::default().call(|cx| fs.read(cx, ino, fh, n as u64 * 4096, count))?;
    }
    Ok(all)
}

/// Memory is the only place where they are: reading much else does not push them out.
#[test]
fn contents_that_could_not_be_written_stay_readable() {
    let device = Arc::new(SimDevice::new(32 << 20));
    let dyn_device: Arc<dyn BlockDevice> = device.clone();
    let (env, _) = sim_env(1);
    mkfs(&dyn_device, &MkfsOptions::default(), &env).expect("there is room");
    let options = FsOptions { background: false, cache_bytes: 2 << 20, ..FsOptions::default() };
    let fs = LocalFs::open(dyn_device, options, env).expect("it was just made");
    let other = write(&fs, b"other", &vec![7; 4 << 20]).expect("there is room");
    fs.sync().expect("no faults");

    let bytes: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8 + 1).collect();
    let file = write(&fs, b"file", &bytes).expect("there is room");
    device.inject(Fault { op: Op::Write, after: 0, errno: libc::EIO, sticky: true });
    let told = InProcess::default().call(|cx| fs.fsync(cx, file.0, file.1, false));
    assert_eq!(told, Err(Errno(libc::EIO)));
    assert!(read(&fs, other, 4 << 20).expect("reading goes on") == vec![7; 4 << 20]);
    assert!(read(&fs, file, bytes.len()).expect("reading goes on") == bytes);
}

/// Blocks of a file that is overwritten until the cleaner has to work.
const CLEANED_BLOCKS: u64 = 1000;
/// Writes that are made to fail, spread over all of them.
const CLEANED_FAULTS: u64 = if cfg!(debug_assertions) { 20 } else { 80 };

/// Block `block` as of its `version`th write.
fn versioned(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes.chunks_exact_mut(16).for_each(|words| {
        words[..8].copy_from_slice(&block.to_le_bytes());
        words[8..].copy_from_slice(&version.to_le_bytes());
    });
    bytes
}

/// Overwrites blocks of the file at random, with an fsync now and then, until an error comes or
/// segments enough were cleaned. How often each block was written, and whether an error came.
fn overwrite(fs: &LocalFs, (ino, fh): (u64, u64)) -> (Vec<u64>, bool) {
    let me = InProcess::default();
    let mut versions = vec![0; CLEANED_BLOCKS as usize];
    let mut rng = SimRng::new(7);
    for step in 0..12 * CLEANED_BLOCKS {
        let block = rng.below(CLEANED_BLOCKS);
        let next = versions[block as usize] + 1;
        let bytes = versioned(block, next);
        if me.call(|cx| fs.write(cx, ino, fh, block * 4096, &bytes, false, false)).is_err() {
            return (versions, true);
        }
        versions[block as usize] = next;
        if step % 50 == 0 && me.call(|cx| fs.fsync(cx, ino, fh, false)).is_err() {
            return (versions, true);
        }
    }
    (versions, false)
}

fn cleaned_segments(fs: &LocalFs) -> u64 {
    fs.stats()["data"]["cleaned_segments"].as_u64().expect("it is counted")
}

/// An error that passes, at one write after the other while the cleaner moves data: all that was
/// written can be read.
#[test]
fn data_that_the_cleaner_moves_stays_readable_if_any_write_fails() {
    let base = Arc::new(SimDevice::new(16 << 20));
    let dyn_base: Arc<dyn BlockDevice> = base.clone();
    let (env, _) = sim_env(1);
    mkfs(&dyn_base, &MkfsOptions { log_size: Some(LOG_MIN), ..MkfsOptions::default() }, &env)
        .expect("there is room");
    let options = FsOptions { background: false, cache_bytes: 1 << 20, ..FsOptions::default() };
    let open = |device: &Arc<SimDevice>| {
        let device: Arc<dyn BlockDevice> = device.clone();
        LocalFs::open(device, options.clone(), sim_env(2).0).expect("it is sound")
    };
    let fs = open(&base);
    let all: Vec<u8> = (0..CLEANED_BLOCKS).flat_map(|block| versioned(block, 0)).collect();
    let (ino, _) = write(&fs, b"file", &all).expect("there is room");
    fs.sync().expect("no faults");
    fs.detach();
    fs.close().expect("no faults");
    drop(fs);

    let run = |fault: Option<u64>| {
        let device = Arc::new(base.copy());
        let fs = open(&device);
        let fh = InProcess::default()
            .call(|cx| fs.open(cx, ino, libc::O_RDWR, false))
            .expect("it is there")
            .fh;
        let before = device.asked(Op::Write);
        if let Some(after) = fault {
            device.inject(Fault { op: Op::Write, after, errno: libc::EIO, sticky: false });
        }
        let (versions, failed) = overwrite(&fs, (ino, fh));
        let (writes, cleaned) = (device.asked(Op::Write) - before, cleaned_segments(&fs));
        assert_eq!(failed, fault.is_some(), "{fault:?}");
        let found =
            read(&fs, (ino, fh), all.len()).unwrap_or_else(|errno| panic!("{fault:?}: {errno}"));
        for (block, bytes) in (0..).zip(found.chunks(4096)) {
            assert!(
                bytes == versioned(block, versions[block as usize]),
                "{fault:?}: block {block}"
            );
        }
        (writes, cleaned)
    };
    let (writes, cleaned) = run(None);
    assert!(cleaned > 20, "{cleaned} segments cleaned");
    let in_cleaning =
        (0..CLEANED_FAULTS).filter(|n| run(Some(n * writes / CLEANED_FAULTS)).1 > 0).count();
    assert!(in_cleaning as u64 > CLEANED_FAULTS / 4, "{in_cleaning}");
}

/// Storms: threads at work while the device fails.
const STORMS: u64 = if cfg!(debug_assertions) { 60 } else { 150 };
/// One storm that takes longer hangs: it takes a fraction of a second.
const STORM_TIME_MAX: Duration = Duration::from_secs(120);
/// Files that each of its threads makes.
const STORM_FILES: u8 = 30;

fn contents(name: [u8; 2]) -> Vec<u8> {
    let len = *SimRng::new(u64::from_le_bytes([name[0], name[1], 0, 0, 0, 0, 0, 0]))
        .pick(&[100, 3000, 9000, 90_000]);
    (0..len).map(|i| (i as u8 ^ name[0]).wrapping_add(name[1]) | 1).collect()
}

/// One thread of a storm: makes files, each durable before the next; the names of those that were
/// acknowledged.
fn make_files(fs: &LocalFs, thread: u8) -> Vec<[u8; 2]> {
    let me = InProcess::default();
    let mut acknowledged = Vec::new();
    for n in b'0'..b'0' + STORM_FILES {
        let name = [thread, n];
        let bytes = contents(name);
        let Ok((ino, fh)) = write(fs, &name, &bytes) else { continue };
        match me.call(|cx| fs.fsync(cx, ino, fh, false)) {
            Ok(()) => acknowledged.push(name),
            Err(errno) => {
                assert!([libc::EIO, libc::EROFS, libc::ENOSPC].contains(&errno.0), "{errno}")
            }
        }
        if let Ok(found) = read(fs, (ino, fh), bytes.len()) {
            assert!(found == bytes, "a read that succeeds is right");
        }
        let released = me.call(|cx| {
            fs.release(cx, ino, fh);
            Ok(())
        });
        released.expect("it has no answer");
        fs.forget(ino, 1);
    }
    acknowledged
}

fn storm(seed: u64) {
    let mut rng = SimRng::new(seed);
    let device = Arc::new(SimDevice::new(32 << 20));
    let dyn_device: Arc<dyn BlockDevice> = device.clone();
    mkfs(&dyn_device, &MkfsOptions::default(), &Env::real()).expect("there is room");
    let options = FsOptions {
        cache_bytes: 2 << 20,
        commit_interval: Duration::from_millis(5),
        background: true,
        ..FsOptions::default()
    };
    let fs = LocalFs::open(dyn_device, options.clone(), Env::real()).expect("it was just made");
    device.inject(Fault {
        op: *rng.pick(&KINDS),
        after: rng.below(120),
        errno: libc::EIO,
        sticky: rng.chance(1, 2),
    });
    let acknowledged: Vec<[u8; 2]> = std::thread::scope(|scope| {
        let threads = [b'a', b'b', b'c'].map(|thread| {
            scope.spawn({
                let fs = &fs;
                move || make_files(fs, thread)
            })
        });
        threads.into_iter().flat_map(|thread| thread.join().expect("no thread panics")).collect()
    });
    let crashed = device.crash_image(device.trace_len(), &mut rng);
    fs.detach();
    // Where the device failed for good it cannot be closed well.
    drop(fs.close());
    drop(fs);
    device.heal();
    let healed = device.crash_image(device.trace_len(), &mut rng);
    for device in [crashed, healed] {
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        let report = fsck(
            &device,
            FsckOptions { verify_data: true, ..FsckOptions::default() },
            &Env::real(),
        );
        let report = report.expect("it can be checked");
        assert!(report.clean, "{:#?}", report.findings);
        let fs = LocalFs::open(device, options.clone(), Env::real()).expect("it is sound");
        for name in &acknowledged {
            let me = InProcess::default();
            let entry = me.call(|cx| fs.lookup(cx, ROOT, name)).expect("no faults");
            let ino = entry.attr.expect("it was acknowledged").ino;
            let fh = me.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).expect("it is there").fh;
            let expected = contents(*name);
            assert!(read(&fs, (ino, fh), expected.len()).expect("no faults") == expected);
        }
        fs.detach();
        fs.close().expect("no faults");
    }
}

#[test]
fn threads_end_whatever_fails_and_lose_nothing_acknowledged() {
    for seed in 0..STORMS {
        let (tell, told) = mpsc::channel();
        let name = format!("storm {seed}");
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            storm(seed);
            tell.send(()).expect("somebody waits for it");
        });
        let thread = thread.expect("a thread can be started");
        match told.recv_timeout(STORM_TIME_MAX) {
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("storm {seed} does not end"),
            _ => thread.join().unwrap_or_else(|_| panic!("storm {seed} failed")),
        }
    }
}
