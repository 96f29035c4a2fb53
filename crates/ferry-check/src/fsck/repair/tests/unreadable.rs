//! Every block of a volume in turn cannot be read, after an unmount and after a crash: that costs
//! what lay there, and what the device reads the next time is whole again.

use super::*;
use ferry_device::{BLOCK_SIZE, HookedDevice};
use ferry_fs::volume::VolumeError;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// What a device does with a block that it cannot read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sector {
    /// It never reads it again.
    Dead,
    /// It reads it again once it is written, as a disk does that moves a bad sector.
    Heals,
}

/// A copy of the volume on a device that cannot read some blocks.
fn bad_sectors(
    volume: &Volume,
    bad: impl IntoIterator<Item = u64>,
    sector: Sector,
) -> (Arc<HookedDevice>, Arc<dyn BlockDevice>) {
    let device = HookedDevice::new(volume.copy().dev);
    device.set_unreadable(bad);
    if sector == Sector::Heals {
        device.heal_by_writing();
    }
    let device = Arc::new(device);
    (device.clone(), device)
}

/// Blocks that hold something, and all of the log.
fn offsets(volume: &Volume) -> Vec<u64> {
    let log = volume.sb.log_offset..volume.sb.log_offset + volume.sb.log_len;
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    let all = (0..volume.dev.capacity()).step_by(BLOCK_SIZE);
    let used = all.filter(|at| {
        volume.dev.read(*at, &mut block).unwrap();
        log.contains(at) || block.iter().any(|byte| *byte != 0)
    });
    used.collect()
}

/// A volume that was unmounted, and one that was left while it was mounted, with data that no
/// durable point covers.
fn volumes() -> [(&'static str, Volume); 2] {
    let unmounted = Volume::of(16 << 20);
    let crashed = unmounted.copy();
    let fs = mount(&crashed.dev, false);
    make_file(&fs, ROOT, "durable", &pattern(50, 50_000));
    let dir = make_dir(&fs, ROOT, "late");
    make_file(&fs, dir, "small", b"late and small");
    make_file(&fs, dir, "large", &pattern(51, 130_000));
    let left = crashed.copy();
    drop(fs);
    [("unmounted", unmounted), ("crashed", left)]
}

/// Blocks that cannot be read; all else must be as it was.
fn missing(snapshot: &Snapshot, whole: &Snapshot, context: &str) -> usize {
    assert!(snapshot.keys().eq(whole.keys()), "{context}: other names");
    let mut missing = 0;
    for (path, seen) in snapshot {
        let expected = &whole[path];
        let plain = |seen: &Seen| Seen { contents: Vec::new(), ..seen.clone() };
        assert_eq!(plain(seen), plain(expected), "{context}: {path}");
        assert_eq!(seen.contents.len(), expected.contents.len(), "{context}: {path}");
        for (block, known) in seen.contents.iter().zip(&expected.contents) {
            missing += usize::from(block.is_none());
            assert!(block.is_none() || block == known, "{context}: {path} holds something else");
        }
    }
    missing
}

fn open(dev: &Arc<dyn BlockDevice>) -> Result<(), VolumeError> {
    let options = FsOptions { background: false, cache_bytes: 8 << 20, ..FsOptions::default() };
    let fs = LocalFs::open(dev.clone(), options, env())?;
    fs.detach();
    fs.close().unwrap();
    Ok(())
}

fn all() -> FsckOptions<'static> {
    FsckOptions { verify_data: true, ..FsckOptions::default() }
}

#[test]
fn an_unreadable_block_costs_only_what_it_held() {
    for (state, volume) in volumes() {
        let whole = volume.snapshot();
        let (mut needed, mut data) = (0, 0);
        for device_offset in offsets(&volume) {
            for sector in [Sector::Dead, Sector::Heals] {
                let context = format!("{state}, byte {device_offset}, {sector:?}");
                let (_, dev) = bad_sectors(&volume, [device_offset], sector);
                let seen = Volume { dev: dev.clone(), sb: volume.sb.clone() };
                match open(&dev) {
                    Ok(()) => {
                        let missing = missing(&seen.snapshot(), &whole, &context);
                        assert!(missing <= 1, "{context}");
                        data += missing;
                    }
                    Err(VolumeError::Unreadable(JournalError::Unreadable { offset, .. })) => {
                        assert!(
                            offset == device_offset && state == "crashed",
                            "{context}: {offset}"
                        );
                        needed += 1;
                        // It is not given up without being asked.
                        let report = repair(&dev, all(), &env()).unwrap();
                        let codes: Vec<_> =
                            report.findings.iter().map(|finding| finding.code).collect();
                        assert_eq!(
                            (codes, report.repaired),
                            (vec![Code::LogUnreadable], 0),
                            "{context}"
                        );
                        let give_up = FsckOptions { give_up_unreadable: true, ..all() };
                        let report = repair(&dev, give_up, &env()).unwrap();
                        assert!(report.clean, "{context}: {:#?}", report.findings);
                        let cut = report.repairs.iter().find(|r| r.code == Code::LogUnreadable);
                        assert!(
                            cut.is_some_and(|cut| cut.lost.is_some()),
                            "{context}: {:#?}",
                            report.repairs
                        );
                        open(&dev).unwrap_or_else(|error| panic!("{context}: {error}"));
                    }
                    Err(error) => panic!("{context}: {error}"),
                }
            }
        }
        println!("{state}: {needed} needed by the log, {data} of files");
        assert_eq!(needed > 0, state == "crashed");
        assert!(data > 10, "{state}: {data}");
    }
}

#[test]
fn nothing_is_lost_if_blocks_are_readable_after_the_repair() {
    for (state, volume) in volumes() {
        let whole = volume.snapshot();
        let mut kept = 0;
        for device_offset in offsets(&volume) {
            let context = format!("{state}, byte {device_offset}");
            let (device, dev) = bad_sectors(&volume, [device_offset], Sector::Dead);
            let report = repair(&dev, all(), &env()).unwrap();
            kept += usize::from(!report.clean);
            device.set_unreadable([]);
            let seen = Volume { dev: dev.clone(), sb: volume.sb.clone() };
            open(&dev).unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_eq!(missing(&seen.snapshot(), &whole, &context), 0, "{context}");
            let report = seen.check();
            assert!(report.clean && report.lost.is_empty(), "{context}: {:#?}", report.findings);
        }
        assert!(kept > 10, "{state}: {kept}");
    }
}

/// What cannot be read is lost when that is asked for, and nothing else is.
#[test]
fn a_range_is_given_up_only_when_asked() {
    let volume = Volume::new();
    let whole = volume.snapshot();
    let mut offsets = Vec::new();
    volume.edit(|image| {
        for path in ["d/f", "e"] {
            for (_, extent) in image.extents(path) {
                let Extent::Data { block, crcs } = extent else { panic!("{extent:?}") };
                offsets.extend((block..block + crcs.len() as u64).map(|block| block * BLOCK));
            }
        }
    });
    for device_offset in offsets {
        let (device, dev) = bad_sectors(&volume, [device_offset], Sector::Dead);
        let report = repair(&dev, all(), &env()).unwrap();
        let codes: Vec<_> = report.findings.iter().map(|finding| finding.code).collect();
        assert_eq!(
            (codes, report.repaired),
            (vec![Code::ReadError], 0),
            "{device_offset}: {:#?}",
            report.repairs
        );
        let report =
            repair(&dev, FsckOptions { give_up_unreadable: true, ..all() }, &env()).unwrap();
        assert!(report.clean && report.repaired > 0, "{device_offset}: {:#?}", report.findings);
        assert_eq!(
            report.lost.iter().map(|range| range.bytes).sum::<u64>(),
            BLOCK,
            "{device_offset}"
        );
        device.set_unreadable([]);
        let seen = Volume { dev, sb: volume.sb.clone() };
        assert_eq!(missing(&seen.snapshot(), &whole, "given up"), 1, "{device_offset}");
    }
}

/// The home store without a log that says the same: what both copies of a block have is nowhere
/// else.
#[test]
fn keys_without_a_readable_copy_are_given_up_only_when_asked() {
    let volume = Volume::new();
    volume.wipe_log();
    let whole = volume.snapshot();
    let half = volume.sb.segment_len / 2;
    let blocks = volume.home_blocks(|block| block.iter().any(|byte| *byte != 0));
    let maps = volume.sb.home_map_offsets;
    let pairs: Vec<_> = blocks.into_iter().map(|at| [at, at + half]).chain([maps]).collect();
    let mut refused = 0;
    for pair in pairs {
        let context = format!("bytes {pair:?}");
        let (device, dev) = bad_sectors(&volume, pair, Sector::Dead);
        let lost = match repair(&dev, all(), &env()) {
            Ok(report) => {
                // Without any map nothing can be found.
                let untouched = pair == maps && report.repaired == 0;
                assert!(report.clean || untouched, "{context}: {:#?}", report.findings);
                false
            }
            Err(VolumeError::Unreadable(JournalError::Unreadable { offset, .. })) => {
                assert!(pair.contains(&offset), "{context}: {offset}");
                true
            }
            Err(error) => panic!("{context}: {error}"),
        };
        device.set_unreadable([]);
        let seen = Volume { dev, sb: volume.sb.clone() };
        assert_eq!(missing(&seen.snapshot(), &whole, &context), 0, "{context}");
        let report = seen.check();
        assert!(report.clean && report.lost.is_empty(), "{context}: {:#?}", report.findings);
        if lost && pair != maps {
            refused += 1;
            let (_, dev) = bad_sectors(&volume, pair, Sector::Dead);
            let give_up = FsckOptions { give_up_unreadable: true, ..all() };
            let report = repair(&dev, give_up, &env()).unwrap();
            // Of the database's trees that are left it takes the best, which may be one of its own.
            let clean = report.findings.iter().all(|finding| finding.code == Code::UnknownKey);
            assert!(clean, "{context}: {:#?}", report.findings);
            let lost = report.repairs.iter().any(|repair| repair.lost.is_some());
            assert!(lost, "{context}: {:#?}", report.repairs);
        }
    }
    assert!(refused > 3, "{refused}");
}
