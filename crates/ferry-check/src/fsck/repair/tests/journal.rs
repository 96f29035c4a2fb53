//! Damage of the log and of the home store.

use super::*;
use ferry_device::HookedDevice;
use ferry_fs::volume::SUPERBLOCK_OFFSETS;

/// The block at `at`.
fn block(dev: &Arc<dyn BlockDevice>, at: u64) -> AlignedBuf {
    let mut block = AlignedBuf::zeroed(4096);
    dev.read(at, &mut block).unwrap();
    block
}

/// Each file that is left has its contents or cannot be read: no other contents are shown instead.
fn nothing_is_made_up(before: &Snapshot, after: &Snapshot) {
    let by_ino: BTreeMap<_, _> = before.values().map(|seen| (seen.ino, seen)).collect();
    for (path, seen) in after.iter().filter(|(_, seen)| seen.mode & libc::S_IFMT == libc::S_IFREG) {
        let was = by_ino.get(&seen.ino).unwrap_or_else(|| panic!("{path} was not there"));
        for (now, then) in seen.contents.iter().zip(&was.contents).filter(|(now, _)| now.is_some())
        {
            let (now, then) = (now.as_ref().unwrap(), then.as_ref().unwrap());
            assert!(now.starts_with(then), "{path} shows other contents");
        }
    }
}

#[test]
fn a_lost_page_of_the_home_store_costs_only_its_keys() {
    let whole = Volume::new().snapshot();
    let mut costs = BTreeSet::new();
    // Whatever stands together with these names, attributes and contents is lost.
    for needle in [&b"lost name"[..], b"n11", b"deep down", b"user.a", &pattern(3, 900)[..200]] {
        let volume = Volume::new();
        let fs = mount(&volume.dev, false);
        make_file(&fs, ROOT, "lost name", &pattern(7, 30_000));
        fs.detach();
        fs.close().unwrap();
        let before = volume.snapshot();
        let end =
            volume.sb.segments_offset + u64::from(volume.sb.segment_count) * volume.sb.segment_len;
        let mut spoiled = 0;
        for at in (volume.sb.segments_offset..end).step_by(4096) {
            if block(&volume.dev, at).windows(needle.len()).any(|bytes| bytes == needle) {
                volume.spoil(at);
                spoiled += 1;
            }
        }
        assert!(spoiled >= 2, "both copies");
        assert!(volume.codes().contains(&Code::HomeStore), "{}", needle.escape_ascii());
        // The log of so young a volume has everything.
        let with_log = volume.copy();
        let report = with_log.repaired("home store, with the log");
        let of_store = report.repairs.iter().filter(|r| r.code == Code::HomeStore);
        assert!(
            of_store.clone().count() > 0 && of_store.clone().all(|r| r.lost.is_none()),
            "{:#?}",
            report.repairs
        );
        nothing_is_made_up(&before, &with_log.snapshot());
        assert_eq!(with_log.snapshot().len(), before.len());
        volume.wipe_log();
        let report = volume.repaired("home store");
        assert!(report.repairs.iter().any(|r| r.code == Code::HomeStore && r.lost.is_some()));
        let after = volume.snapshot();
        nothing_is_made_up(&before, &after);
        costs.insert(before.len() - after.len().min(before.len()));
        volume.works("home store");
    }
    assert!(
        costs.iter().all(|lost| *lost < whole.len()),
        "something is left in each case: {costs:?}"
    );
}

#[test]
fn one_bad_copy_of_a_page_is_found_and_written_anew() {
    let volume = Volume::new();
    let before = volume.snapshot();
    let end =
        volume.sb.segments_offset + u64::from(volume.sb.segment_count) * volume.sb.segment_len;
    let (mut found, needle) = (0, b"deep down");
    for at in (volume.sb.segments_offset..end).step_by(4096) {
        let good = block(&volume.dev, at);
        if !good.windows(needle.len()).any(|bytes| bytes == needle) {
            continue;
        }
        volume.spoil(at);
        let report = volume.check();
        // Not found: a page of an older state.
        if report.clean {
            volume.dev.write(at, &good).unwrap();
            continue;
        }
        found += 1;
        assert_eq!(volume.codes(), BTreeSet::from([Code::HomeCopy]));
        assert_eq!(report.findings[0].location.device_offset, Some(at));
        let report = volume.repaired("one copy");
        assert_eq!(
            report.repairs.iter().map(|r| (r.code, r.lost.is_some())).collect::<Vec<_>>(),
            [(Code::HomeCopy, false)]
        );
        assert!(block(&volume.dev, at)[..] == good[..], "it is what it was");
        assert_eq!(volume.snapshot(), before);
    }
    assert!(found > 0);
}

#[test]
fn one_bad_slot_of_the_home_map_is_found_and_written_anew() {
    let volume = Volume::new();
    let before = volume.snapshot();
    for offset in volume.sb.home_map_offsets {
        // Its header, or its entries.
        for part in [0, 4096] {
            volume.spoil(offset + part);
            let report = volume.check();
            assert_eq!(volume.codes(), BTreeSet::from([Code::HomeMap]));
            assert_eq!(report.findings[0].location.device_offset, Some(offset));
            assert_eq!(volume.snapshot(), before);
            let report = volume.repaired("a slot of the home map");
            assert_eq!(report.repairs.iter().map(|r| r.code).collect::<Vec<_>>(), [Code::HomeMap]);
            assert_eq!(volume.snapshot(), before);
            volume.spoil(offset + part);
            volume.works("a slot of the home map");
            let now = block(&volume.dev, offset);
            assert_eq!(&now[..4], b"FHM1", "a mount writes it anew");
        }
    }
}

#[test]
fn a_damaged_log_costs_the_newest_changes() {
    let volume = Volume::new();
    let sound = volume.snapshot();
    let fs = mount(&volume.dev, false);
    for i in 0..20 {
        make_file(&fs, ROOT, &format!("late {i}"), &pattern(i, 5000));
    }
    // As a crash leaves it.
    let crashed = volume.copy();
    fs.detach();
    fs.close().unwrap();
    assert!(crashed.check().clean);
    let log = crashed.sb.log_offset..crashed.sb.log_offset + crashed.sb.log_len;
    let mut blocks: Vec<(u64, u64)> = log
        .step_by(4096)
        .filter_map(|at| {
            let block = block(&crashed.dev, at);
            (block[..4] == *b"FLB1")
                .then(|| (u64::from_le_bytes(block[24..32].try_into().unwrap()), at))
        })
        .collect();
    blocks.sort_unstable();
    crashed.spoil(blocks[blocks.len() - 15].1);
    assert_eq!(crashed.codes(), BTreeSet::from([Code::Log]));
    let report = crashed.repaired("log");
    assert!(
        report.repairs.iter().any(|r| r.code == Code::Log && r.lost.is_some()),
        "{:#?}",
        report.repairs
    );
    let after = crashed.snapshot();
    let late = after.keys().filter(|path| path.starts_with("/late")).count();
    assert!((1..20).contains(&late), "{late} of 20");
    for (path, seen) in &sound {
        assert_eq!((&after[path].contents, after[path].ino), (&seen.contents, seen.ino), "{path}");
    }
    crashed.works("log");
}

/// Where garbage lies, something else was written before: that the log ends there is not believed.
#[test]
fn a_log_that_is_all_garbage_is_damaged_and_not_empty() {
    let volume = Volume::new();
    let sound = volume.snapshot();
    let fs = mount(&volume.dev, false);
    for i in 0..20 {
        make_file(&fs, ROOT, &format!("late {i}"), &pattern(i, 5000));
    }
    let crashed = volume.copy();
    fs.detach();
    fs.close().unwrap();
    let garbage = |volume: &Volume| {
        let mut log = AlignedBuf::zeroed(volume.sb.log_len as usize);
        let mut state = 1_u64;
        log.iter_mut().for_each(|byte| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        });
        volume.dev.write(volume.sb.log_offset, &log).unwrap();
    };
    garbage(&crashed);
    assert_eq!(crashed.codes(), BTreeSet::from([Code::Log]));
    let report = crashed.repaired("log");
    assert!(
        report.repairs.iter().any(|r| r.code == Code::Log && r.lost.is_some()),
        "{:#?}",
        report.repairs
    );
    assert_eq!(crashed.snapshot(), sound);
    crashed.works("log");
    // Nobody needs the log of a volume that was unmounted.
    let before = volume.snapshot();
    garbage(&volume);
    assert_eq!(volume.codes(), BTreeSet::new());
    assert_eq!(volume.snapshot(), before);
    // Nor is it in the way of the log that is written there.
    let fs = mount(&volume.dev, false);
    make_file(&fs, ROOT, "later", &pattern(1, 5000));
    let crashed = volume.copy();
    assert_eq!(crashed.codes(), BTreeSet::new());
    assert_eq!(crashed.snapshot().len(), before.len() + 1);
    fs.detach();
    fs.close().unwrap();
    volume.works("log");
}

#[test]
fn a_bad_superblock_is_found_after_a_crash_too() {
    let volume = Volume::new();
    let fs = mount(&volume.dev, false);
    make_file(&fs, ROOT, "late", &pattern(1, 5000));
    for offset in SUPERBLOCK_OFFSETS {
        let crashed = volume.copy();
        assert!(crashed.check().clean);
        crashed.spoil(offset);
        assert_eq!(crashed.codes(), BTreeSet::from([Code::SuperblockCopy]));
        crashed.repaired("superblock");
        crashed.works("superblock");
    }
    fs.detach();
    fs.close().unwrap();
}

/// What stays bad is not called mended.
#[test]
fn a_copy_that_cannot_be_written_anew_is_damage_that_is_left() {
    let volume = Volume::new();
    let copies = volume.home_blocks(|block| block.starts_with(b"redb"));
    // A block that cannot be read, whatever is written there.
    let worn = HookedDevice::new(volume.dev.clone());
    worn.set_unreadable([copies[0]]);
    let worn: Arc<dyn BlockDevice> = Arc::new(worn);
    let report =
        repair(&worn, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env()).unwrap();
    assert_eq!(
        report.findings.iter().map(|f| (f.code, f.location.device_offset)).collect::<Vec<_>>(),
        [(Code::HomeCopy, Some(copies[0]))]
    );
    assert!(!report.clean && report.repairs.is_empty(), "{:#?}", report.repairs);
}
