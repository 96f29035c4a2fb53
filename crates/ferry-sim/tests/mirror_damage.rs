//! A block that no side of a mirror can read any more becomes zeros on a new side. The volume on it
//! calls these zeros damage, of the file that they belong to, and nothing else is lost.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod grow_support;

use ferry_check::{FsckOptions, fsck};
use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, ComponentState, HEAD_LEN, HookedDevice,
    Kind, MirrorDevice, Observer, Side,
};
use ferry_fs::scrub::{ScrubProgress, Watch};
use ferry_fs::{Errno, Filesystem, ROOT, ScrubOptions, scrub};
use ferry_sim::device::{SimDevice, sim_env};
use grow_support::{Files, ME, format, make, open, read};
use std::io;
use std::sync::Arc;
use std::time::Duration;

const LEN: u64 = 32 << 20;
const BLOCK: u64 = BLOCK_SIZE as u64;

struct Nobody;

impl Observer for Nobody {
    fn raised(&self, _generation: u64) -> io::Result<()> {
        Ok(())
    }
    fn rebuilt(&self, _old: &str, _new: &str) {}
}

struct ToTheEnd;

impl Watch for ToTheEnd {
    fn progress(&mut self, _at: &ScrubProgress) -> bool {
        true
    }
    fn wait(&mut self, _time: Duration) -> bool {
        true
    }
}

fn device() -> Arc<HookedDevice> {
    Arc::new(HookedDevice::new(Arc::new(SimDevice::new(HEAD_LEN + LEN))))
}

fn mirror_of(name: &str, device: &Arc<HookedDevice>) -> Arc<MirrorDevice> {
    let header = ComponentHeader::read(&**device).unwrap().expect("a side");
    let side = Side { name: name.into(), device: device.clone(), header };
    Arc::new(MirrorDevice::open(vec![side], false, 0, Arc::new(Nobody)).unwrap())
}

fn location_of(device: &HookedDevice, block: &[u8]) -> u64 {
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    let holds = |at: &u64| {
        device.inner().read(*at, &mut buf).unwrap();
        buf[..] == *block
    };
    (HEAD_LEN..device.capacity()).step_by(BLOCK_SIZE).find(holds).expect("it was written")
}

#[test]
fn zeros_of_a_rebuild_are_damage_of_the_file_and_never_its_contents() {
    let (last, new) = (device(), device());
    let header = ComponentHeader {
        kind: Kind::Mirror,
        set: *b"a set of sides..",
        id: 100,
        slot: 0,
        slots: 2,
        len: LEN,
        unit: 4 << 20,
        generation: 1,
        active: vec![100, 101],
    };
    header.write(&*last).unwrap();
    let mirror = mirror_of("a", &last);
    let volume: Arc<dyn BlockDevice> = mirror.clone();
    format(&volume, 1 << 20);
    let mut files = Files::new();
    let contents = |n: u32| {
        (0..40_000_u32)
            .map(|i| (i.wrapping_mul(n.wrapping_mul(2_654_435_761)) >> 9) as u8 | 1)
            .collect()
    };
    let fs = open(volume.clone(), false);
    (1..6).for_each(|n| make(&fs, &mut files, format!("file {n}"), contents(n)));
    fs.close().unwrap();
    drop(fs);

    // The third block of one file goes bad on the only side there is.
    let bad = &files["file 3"][2 * BLOCK_SIZE..3 * BLOCK_SIZE];
    last.set_unreadable([location_of(&last, bad)]);
    mirror.rebuild("b", "c".into(), new.clone(), 102, true).unwrap();
    while mirror.is_rebuilding() {
        std::thread::yield_now();
    }
    let built = &mirror.components()[1];
    assert_eq!((built.state, built.unreadable), (ComponentState::Active, 1));
    drop((mirror, volume));

    let volume: Arc<dyn BlockDevice> = mirror_of("c", &new);
    let report = scrub(&volume, ScrubOptions::default(), &sim_env(1).0, &mut ToTheEnd).unwrap();
    let found: Vec<_> =
        report.damage.iter().map(|one| (one.path.clone(), one.file_offset)).collect();
    assert_eq!(found, [(Some("/file 3".into()), Some(2 * BLOCK))]);
    let report =
        fsck(&volume, FsckOptions { verify_data: true, ..FsckOptions::default() }, &sim_env(1).0)
            .unwrap();
    assert!(!report.clean, "{report:#?}");
    let fs = open(volume, false);
    for (name, contents) in &files {
        if name != "file 3" {
            assert!(read(&fs, name).as_ref() == Some(contents), "{name}");
            continue;
        }
        let ino = ME.call(|cx| fs.lookup(cx, ROOT, name.as_bytes())).unwrap().attr.unwrap().ino;
        let fh = ME.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).unwrap().fh;
        for (n, block) in contents.chunks(BLOCK_SIZE).enumerate() {
            let mut buf = vec![0; block.len()];
            let read = ME.call(|cx| fs.read(cx, ino, fh, n as u64 * BLOCK, &mut buf));
            if n == 2 {
                assert_eq!(read, Err(Errno(libc::EIO)));
            } else {
                assert!(read.is_ok() && buf == block, "block {n}");
            }
        }
    }
}
