//! A block that no side of a mirror can read any more becomes zeros on a new side. The volume on it
//! calls these zeros damage, of the file that they belong to, and nothing else is lost.

use crate::grow_support::{Files, ME, format, make, open, read};
use ferry_check::{FsckOptions, fsck, repair};
use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, ComponentHeader, ComponentState, HEAD_LEN, HookedDevice,
    Kind, MirrorDevice, Observer, Side,
};
use ferry_fs::scrub::{ScrubProgress, Watch};
use ferry_fs::{Errno, Filesystem, ROOT, ScrubOptions, scrub};
use ferry_sim::device::{SimDevice, sim_env};
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

fn mirror_of(sides: &[(&str, &Arc<HookedDevice>)]) -> Arc<MirrorDevice> {
    let side = |(name, device): &(&str, &Arc<HookedDevice>)| {
        let header = ComponentHeader::read(&***device).unwrap().expect("a side");
        Side { name: (*name).into(), device: Arc::clone(device) as Arc<dyn BlockDevice>, header }
    };
    let sides = sides.iter().map(side).collect();
    Arc::new(MirrorDevice::open(sides, false, 0, Arc::new(Nobody)).unwrap())
}

/// The header of a side of a mirror that has two.
fn header(slot: usize) -> ComponentHeader {
    ComponentHeader {
        kind: Kind::Mirror,
        set: *b"a set of sides..",
        id: 100 + slot as u64,
        slot: slot as u32,
        slots: 2,
        len: LEN,
        unit: 4 << 20,
        generation: 1,
        active: vec![100, 101],
    }
}

/// Makes some files and closes the volume.
fn filled(volume: &Arc<dyn BlockDevice>) -> Files {
    format(volume, 1 << 20);
    let mut files = Files::new();
    let contents = |n: u32| {
        (0..40_000_u32)
            .map(|i| (i.wrapping_mul(n.wrapping_mul(2_654_435_761)) >> 9) as u8 | 1)
            .collect()
    };
    let fs = open(volume.clone(), false);
    (1..6).for_each(|n| make(&fs, &mut files, format!("file {n}"), contents(n)));
    fs.close().unwrap();
    files
}

/// A side that answers with wrong bytes is asked first, or is not asked at all.
#[test]
fn a_wrong_block_on_one_side_costs_no_contents() {
    let env = sim_env(1).0;
    let thorough = || FsckOptions { verify_data: true, ..FsckOptions::default() };
    for wrong in [0, 1] {
        let devices = [device(), device()];
        (0..).zip(&devices).for_each(|(slot, side)| header(slot).write(&**side).unwrap());
        let mirror = || mirror_of(&[("a", &devices[0]), ("b", &devices[1])]);
        let volume: Arc<dyn BlockDevice> = mirror();
        let files = filled(&volume);
        drop(volume);
        let good = &files["file 3"][2 * BLOCK_SIZE..3 * BLOCK_SIZE];
        let at = location_of(&devices[wrong], good);
        let spoil = || devices[wrong].inner().write(at, &AlignedBuf::zeroed(BLOCK_SIZE)).unwrap();

        spoil();
        let volume: Arc<dyn BlockDevice> = mirror();
        let report = fsck(&volume, thorough(), &env).unwrap();
        assert!(report.clean && report.lost.is_empty(), "{report:#?}");
        spoil();
        let report = repair(&volume, thorough(), &env).unwrap();
        assert!(report.clean && report.repaired == 0 && report.lost.is_empty(), "{report:#?}");
        spoil();
        let fs = open(volume, false);
        files.iter().for_each(|(name, contents)| {
            assert!(read(&fs, name).as_ref() == Some(contents), "{name}");
        });
    }
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
    header(0).write(&*last).unwrap();
    let mirror = mirror_of(&[("a", &last)]);
    let volume: Arc<dyn BlockDevice> = mirror.clone();
    let files = filled(&volume);

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

    let volume: Arc<dyn BlockDevice> = mirror_of(&[("c", &new)]);
    let report = scrub(&volume, ScrubOptions::default(), &sim_env(1).0, &mut ToTheEnd).unwrap();
    let found: Vec<_> = report
        .damage
        .iter()
        .map(|one| (one.location.path.clone(), one.location.file_offset))
        .collect();
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
