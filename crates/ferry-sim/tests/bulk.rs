//! Many files made durable together: whatever a crash leaves, what was answered is there; and what
//! waits, waits on no thread.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_check::{FsckOptions, fsck};
use ferry_device::BlockDevice;
use ferry_fs::{
    Answer, Complete, Cx, Errno, Filesystem, FsOptions, InProcess, Ino, Interrupt, LocalFs,
    MkfsOptions, Park, ROOT, Stop, ioctl, mkfs,
};
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const ME: InProcess = InProcess::ROOT;

fn open(device: &Arc<SimDevice>, background: bool) -> Arc<LocalFs> {
    let options = FsOptions { background, ..FsOptions::default() };
    LocalFs::open(device.clone(), options, sim_env(1).0).unwrap()
}

fn volume(bytes: u64) -> Arc<SimDevice> {
    volume_with(bytes, MkfsOptions::default())
}

fn volume_with(bytes: u64, options: MkfsOptions) -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new(bytes));
    let as_device: Arc<dyn BlockDevice> = device.clone();
    mkfs(&as_device, &options, &sim_env(1).0).unwrap();
    device
}

fn make(fs: &LocalFs, dir: Ino, name: &str, data: &[u8]) -> (Ino, u64) {
    let (entry, opened) =
        ME.call(|cx| fs.create(cx, dir, name.as_bytes(), 0o644, libc::O_RDWR)).unwrap();
    let ino = entry.attr.unwrap().ino;
    ME.call(|cx| fs.write(cx, ino, opened.fh, 0, data, false, false)).unwrap();
    (ino, opened.fh)
}

fn read(fs: &LocalFs, dir: Ino, name: &str) -> Option<Vec<u8>> {
    let attr = ME.call(|cx| fs.lookup(cx, dir, name.as_bytes())).unwrap().attr?;
    let fh = ME.call(|cx| fs.open(cx, attr.ino, libc::O_RDONLY, false)).unwrap().fh;
    let mut data = vec![0; 1 << 20];
    let len = ME.call(|cx| fs.read(cx, attr.ino, fh, 0, &mut data)).unwrap();
    data.truncate(len);
    Some(data)
}

fn message(inos: &[Ino]) -> Vec<u8> {
    let mut bytes = (inos.len() as u32).to_ne_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(inos.iter().flat_map(|ino| ino.to_ne_bytes()));
    bytes
}

fn bulk_sync(fs: &LocalFs, cx: &Cx, inos: &[Ino]) -> Answer<Vec<u8>> {
    fs.ioctl(cx, ROOT, ioctl::SYNC_FILES, &message(inos), ioctl::SYNC_FILES_LEN as usize)
}

#[test]
fn files_of_an_answered_bulk_sync_survive_every_crash() {
    let (mut images, mut early) = (0, 0);
    for seed in 0..6 {
        let mut rng = SimRng::new(seed);
        let device = volume(64 << 20);
        let fs = open(&device, false);
        device.restart_trace();
        let dir = ME.call(|cx| fs.mkdir(cx, ROOT, b"dir", 0o755)).unwrap().attr.unwrap().ino;
        let contents: Vec<Vec<u8>> = (0..200)
            .map(|i| vec![i as u8 + 1; [1, 2048, 4096, 5000, 40_000][rng.index(5)]])
            .collect();
        let files: Vec<_> =
            (0..200).map(|i| make(&fs, dir, &i.to_string(), &contents[i])).collect();
        // The names change after the contents: they are covered too.
        ME.call(|cx| fs.rename(cx, ROOT, b"dir", ROOT, b"moved", Default::default())).unwrap();
        let inos: Vec<Ino> = files.iter().map(|(ino, _)| *ino).collect();
        let (asked, others) = inos.split_at(150);
        let answer = ME.call(|cx| bulk_sync(&fs, cx, asked)).unwrap();
        assert!(answer[8..].iter().all(|byte| *byte == 0));
        let answered = device.trace_len();
        for (ino, fh) in &files[150..] {
            ME.call(|cx| fs.write(cx, *ino, *fh, 0, b"new", false, false)).unwrap();
        }
        ME.call(|cx| bulk_sync(&fs, cx, others)).unwrap();

        let mut points = device.flush_points();
        points.extend((0..6).map(|_| rng.index(device.trace_len() + 1)).chain([answered]));
        for point in points {
            for _ in 0..2 {
                let image = Arc::new(device.crash_image(point, &mut rng));
                let as_device: Arc<dyn BlockDevice> = image.clone();
                let report = fsck(&as_device, FsckOptions::default(), &sim_env(1).0).unwrap();
                assert!(report.clean, "seed {seed}, crash at {point}: {:#?}", report.findings);
                let after = open(&image, false);
                images += 1;
                if point < answered {
                    early += 1;
                    continue;
                }
                let moved =
                    ME.call(|cx| after.lookup(cx, ROOT, b"moved")).unwrap().attr.unwrap().ino;
                for (i, data) in contents.iter().enumerate().take(150) {
                    let found = read(&after, moved, &i.to_string());
                    assert!(
                        found.as_ref() == Some(data),
                        "seed {seed}, crash at {point}: file {i}"
                    );
                }
            }
        }
    }
    assert!(images > 60 && early > 10, "{images} images, {early} of them before the answer");
}

/// A transport that has one thread, and counts the answers that come later.
#[derive(Default)]
struct OneThread {
    answers: Arc<Mutex<BTreeMap<Result<(), i32>, usize>>>,
    parked: AtomicUsize,
}

impl Park for OneThread {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        self.parked.fetch_add(1, Ordering::Relaxed);
        let answers = Arc::clone(&self.answers);
        Box::new(move |reply| {
            *answers.lock().entry(reply.map(drop).map_err(|e: Errno| e.0)).or_default() += 1;
        })
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        None
    }
}

/// Waits until `most` answers have come. What is held comes to an end here, in any order.
fn release_until(device: &SimDevice, transport: &OneThread, most: usize) {
    let mut rng = SimRng::new(3);
    while transport.answers.lock().values().sum::<usize>() < most {
        device.release_all(&mut rng);
        std::thread::yield_now();
    }
}

/// 10,000 files are more than may be on their way to the device at a time: the rest waits, but not
/// on the transport's only thread.
fn stalled(broken: bool) -> (Arc<SimDevice>, OneThread) {
    const FILES: usize = 10_000;
    let device = volume(1 << 30);
    let fs = open(&device, true);
    let files: Vec<_> =
        (0..FILES).map(|i| make(&fs, ROOT, &i.to_string(), &[i as u8; 12288])).collect();
    device.set_hold(true);
    let transport = OneThread::default();
    let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &transport };
    for (ino, fh) in &files[..FILES - 1000] {
        assert!(matches!(fs.fsync(&cx, *ino, *fh, false), Err(Stop::Parked)));
    }
    let rest: Vec<Ino> = files[FILES - 1000..].iter().map(|(ino, _)| *ino).collect();
    assert!(matches!(bulk_sync(&fs, &cx, &rest), Err(Stop::Parked)));
    assert!(matches!(fs.ioctl(&cx, ROOT, ioctl::SYNC, &[], 0), Err(Stop::Parked)));
    // Other work goes on meanwhile.
    make(&fs, ROOT, "meanwhile", b"x");
    assert_eq!(read(&fs, ROOT, "77").unwrap(), [77; 12288]);
    assert!(transport.answers.lock().is_empty(), "the device has not done anything yet");
    let most = FILES - 1000 + 2;
    assert_eq!(transport.parked.load(Ordering::Relaxed), most);
    if broken {
        device.inject(ferry_sim::device::Fault {
            op: ferry_sim::device::Op::Flush,
            after: 0,
            errno: libc::EIO,
            sticky: true,
        });
    }
    release_until(&device, &transport, most);
    device.set_hold(false);
    device.heal();
    if broken {
        fs.close().ok();
    } else {
        fs.close().unwrap();
    }
    (device, transport)
}

#[test]
fn ten_thousand_fsyncs_wait_on_no_thread() {
    let (device, transport) = stalled(false);
    assert_eq!(transport.answers.lock().keys().collect::<Vec<_>>(), [&Ok(())]);
    let fs = open(&device, false);
    for i in [0, 5000, 8999, 9000, 9999] {
        assert_eq!(read(&fs, ROOT, &i.to_string()).unwrap(), [i as u8; 12288]);
    }
}

#[test]
fn ten_thousand_fsyncs_hear_that_the_device_failed() {
    let (_, transport) = stalled(true);
    let answers = transport.answers.lock();
    assert!(answers.keys().all(|answer| *answer != Ok(()) || answers[answer] <= 1), "{answers:?}");
    assert!(answers[&Err(libc::EIO)] > 0, "{answers:?}");
}

/// Longer than anything in it takes: a call that is not back by then waits.
const PATIENCE: Duration = Duration::from_secs(60);

/// The device stalls, and the log has no room for what is dirty: a call that wants it durable waits
/// for room, but not on the transport's only thread.
#[test]
fn fsyncs_that_find_the_log_full_wait_on_no_thread() {
    const FILES: usize = 1200;
    let device =
        volume_with(256 << 20, MkfsOptions { log_size: Some(1 << 20), ..MkfsOptions::default() });
    let fs = open(&device, true);
    let files: Vec<_> =
        (0..FILES).map(|i| make(&fs, ROOT, &i.to_string(), &[i as u8; 2000])).collect();
    let all: Vec<Ino> = files.iter().map(|(ino, _)| *ino).collect();
    device.set_hold(true);
    let transport = OneThread::default();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &transport };
            for (ino, fh) in &files {
                assert!(matches!(fs.fsync(&cx, *ino, *fh, false), Err(Stop::Parked)));
            }
            assert!(matches!(bulk_sync(&fs, &cx, &all), Err(Stop::Parked)));
            assert!(matches!(fs.ioctl(&cx, ROOT, ioctl::SYNC, &[], 0), Err(Stop::Parked)));
            assert!(matches!(fs.fsyncdir(&cx, ROOT, 0, false), Err(Stop::Parked)));
            assert_eq!(read(&fs, ROOT, "77").unwrap(), [77; 2000]);
            tell.send(transport.answers.lock().len()).unwrap();
        });
        let answered = told.recv_timeout(PATIENCE);
        device.set_hold(false);
        release_until(&device, &transport, FILES + 3);
        assert_eq!(answered, Ok(0), "nobody waits on the thread, and nothing is durable yet");
    });
    assert_eq!(*transport.answers.lock(), BTreeMap::from([(Ok(()), FILES + 3)]));
    drop(fs);
    let fs = open(&device, false);
    for i in 0..FILES {
        assert_eq!(read(&fs, ROOT, &i.to_string()).unwrap(), [i as u8; 2000]);
    }
}
