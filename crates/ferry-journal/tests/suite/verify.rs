//! What `verify_log`, `verify_home` and `inspect` say of volumes that are whole, damaged, or in
//! use.

use crate::common::{Volume, device_len, force, geometry, options, put};
use ferry_device::{AlignedBuf, HookedDevice, MemDevice};
use ferry_env::Env;
use ferry_journal::inspect::{LogRecord, Wholeness, home_map, log_end, log_records, log_start};
use ferry_journal::*;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const LOG: u64 = 512 * 1024;

/// Changes one bit of a block.
fn damage(volume: &Volume, offset: u64, at: usize) {
    let mut buf = AlignedBuf::zeroed(4096);
    volume.dev.read(offset, &mut buf).unwrap();
    buf[at] ^= 0x40;
    volume.dev.write(offset, &buf).unwrap();
}

/// What verifying the log finds, and how many bytes it reads.
fn verify_log(journal: &Journal) -> (Vec<BadRange>, u64) {
    let (mut found, mut read) = (Vec::new(), 0);
    let all = journal.verify_log(&mut |bad| found.push(bad), &mut |bytes| {
        read += bytes;
        true
    });
    assert!(all);
    (found, read)
}

fn records(volume: &Volume) -> Vec<LogRecord> {
    let mut all = Vec::new();
    log_records(&volume.dev, &volume.geo, &mut |record| {
        all.push(*record);
        true
    })
    .unwrap();
    all
}

#[test]
fn each_damaged_block_of_the_log_is_found_while_recovery_would_need_it() {
    for bad in 0..5_u64 {
        let volume = Volume::new(LOG);
        let (journal, _) = volume.open();
        for i in 1..=4_u64 {
            force(&journal, put(&journal, b"key", &i.to_le_bytes())).unwrap();
        }
        // The durable point that opening writes, and four contexts of one block each.
        assert_eq!(verify_log(&journal), (Vec::new(), 5 * 4096));
        let offset = volume.geo.log_offset + bad * 4096;
        damage(&volume, offset, 60 + bad as usize);
        let (found, _) = verify_log(&journal);
        let offsets: Vec<_> = found.iter().map(|bad| (bad.what, bad.offset, bad.len)).collect();
        assert_eq!(offsets, [("log", offset, 4096)]);
        journal.checkpoint().unwrap();
        assert_eq!(verify_log(&journal).0, [], "after a checkpoint nobody needs it");
    }
}

#[test]
fn a_journal_in_use_gives_no_false_alarm() {
    let volume = Volume::new(LOG);
    let (journal, _) = volume.open_with(options(true)).unwrap();
    let (over, read) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (journal, over) = (&journal, &over);
            scope.spawn(move || {
                let mut i = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    i += 1;
                    let key = ((thread << 32) + i % 50).to_be_bytes();
                    let seq = put(journal, &key, &vec![7; (i * 131 % 9000) as usize]);
                    force(journal, seq).unwrap();
                    if i % 40 == thread {
                        journal.checkpoint().unwrap();
                    }
                }
            });
        }
        for _ in 0..300 {
            let (mut found, bytes) = verify_log(&journal);
            assert!(journal.verify_home(&mut |bad| found.push(bad), &mut |_| true));
            if !found.is_empty() {
                over.store(true, Ordering::Relaxed);
                panic!("{found:?}");
            }
            read.fetch_add(bytes, Ordering::Relaxed);
        }
        while journal.stats().checkpoints < 20 || read.load(Ordering::Relaxed) == 0 {
            let (found, bytes) = verify_log(&journal);
            assert_eq!(found, []);
            read.fetch_add(bytes, Ordering::Relaxed);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(read.into_inner() > 0);
}

#[test]
fn the_log_is_listed_record_by_record() {
    let volume = Volume::new(LOG);
    let (journal, _) = volume.open();
    for i in 1..=4_u64 {
        force(&journal, put(&journal, b"key", &vec![1; 5000 * i as usize])).unwrap();
    }
    drop(journal);
    let start = log_start(&volume.dev, &volume.geo).unwrap();
    assert_eq!((start.position, start.seq, start.clean), (0, Seq(0), true));
    let end = log_end(&volume.dev, &volume.geo, &start).unwrap();
    assert_eq!((end.seq, end.contexts, end.records), (Seq(4), 4, 5));
    let all = records(&volume);
    assert_eq!(all.iter().map(|r| r.header.seq).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert!(all.iter().all(|r| r.state == Wholeness::Whole));
    assert!(all.windows(2).all(
        |w| w[0].position + w[0].blocks == w[1].position && w[0].header.id == w[1].header.prev
    ));
    assert_eq!(end.position, all[4].position + all[4].blocks);
    // The last block of the last record, then a byte in the middle of it.
    let last = all[4];
    damage(&volume, last.offset + (last.blocks - 1) * 4096, 3);
    assert_eq!(records(&volume)[4].state, Wholeness::Missing(last.blocks - 1));
    // No crash leaves a block like this.
    let end = log_end(&volume.dev, &volume.geo, &start);
    assert!(matches!(end, Err(JournalError::Damaged { what: "log", .. })));
    damage(&volume, last.offset + (last.blocks - 1) * 4096, 3);
    damage(&volume, last.offset + 4096, 1000);
    assert_eq!(records(&volume)[4].state, Wholeness::BadBody);
    assert_eq!(log_end(&volume.dev, &volume.geo, &start).unwrap().seq, Seq(3));
    // One whose loss recovery does not accept.
    damage(&volume, all[1].offset, 200);
    assert!(matches!(
        log_end(&volume.dev, &volume.geo, &start),
        Err(JournalError::Damaged { what: "log", .. })
    ));
    assert_eq!(records(&volume).len(), 5);
}

#[test]
fn a_log_that_has_wrapped_is_listed_from_its_oldest_block() {
    let volume = Volume::new(LOG);
    let (journal, _) = volume.open();
    for i in 0..300_u64 {
        force(&journal, put(&journal, &(i % 7).to_be_bytes(), &vec![i as u8; 3000])).unwrap();
    }
    drop(journal);
    let all = records(&volume);
    assert!(all.windows(2).all(|w| w[0].position < w[1].position));
    assert!(all[0].position > 100 && all.len() > 100, "{} from {}", all.len(), all[0].position);
    let start = log_start(&volume.dev, &volume.geo).unwrap();
    assert!(all.iter().any(|r| r.position == start.position));
}

#[test]
fn inspecting_garbage_anywhere_never_panics() {
    let mut x = 99_u64;
    let mut next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x >> 33
    };
    for _ in 0..200 {
        let volume = Volume::new(LOG);
        let (journal, _) = volume.open();
        for i in 0..20_u64 {
            force(&journal, put(&journal, &i.to_be_bytes(), &[3; 2000])).unwrap();
        }
        journal.close().unwrap();
        let offsets =
            [volume.geo.log_offset, volume.geo.home_map_offsets[1], volume.geo.segments_offset];
        let mut block = AlignedBuf::zeroed(4096);
        for _ in 0..4 {
            let offset = offsets[next() as usize % 3] + next() % 8 * 4096;
            volume.dev.read(offset, &mut block).unwrap();
            let (at, bits) = (next() as usize % 128, next() as u8);
            block[at] ^= bits;
            volume.dev.write(offset, &block).unwrap();
        }
        records(&volume);
        drop(home_map(&volume.dev, &volume.geo));
        if let Ok(start) = log_start(&volume.dev, &volume.geo) {
            drop(log_end(&volume.dev, &volume.geo, &start));
        }
    }
}

#[test]
fn blocks_of_the_home_store_that_cannot_be_read_are_found_each() {
    let geo = geometry(LOG, 256);
    let dev = Arc::new(HookedDevice::new(Arc::new(MemDevice::new(device_len(&geo)))));
    let volume = Volume::on(dev.clone(), geo, Env::real());
    let (journal, recovered) = volume.open();
    for i in 0..200_u64 {
        force(&journal, put(&journal, &i.to_be_bytes(), &[1; 1000])).unwrap();
    }
    journal.checkpoint().unwrap();
    let verify = || {
        let (mut found, mut read) = (Vec::new(), 0);
        assert!(journal.verify_home(&mut |bad| found.push(bad), &mut |bytes| {
            read += bytes;
            true
        }));
        (found.iter().map(|bad: &BadRange| (bad.what, bad.offset)).collect::<Vec<_>>(), read)
    };
    let (found, read) = verify();
    assert_eq!(found, []);
    // A unit has 31 blocks and one of checksums, and all of it twice.
    let units = journal.stats().home_bytes / (31 * 4096);
    assert_eq!(read, units * geo.segment_len + 2 * geo.home_map_len);
    let first = geo.segments_offset + u64::from(recovered.home_segments[0]) * geo.segment_len;
    for bad in [first, first + 5 * 4096, first + geo.segment_len - 4096] {
        dev.set_unreadable([bad]);
        assert_eq!(verify().0, [("home store", bad)]);
    }
    let slots = geo.home_map_offsets;
    for slot in slots {
        dev.set_unreadable([slot]);
        assert_eq!(verify().0, [("home map", slot)]);
    }
    dev.set_unreadable([]);
    damage(&volume, slots[1], 30);
    assert_eq!(verify().0, [("home map", slots[1])]);
    let mut steps = 0;
    let all = journal.verify_home(&mut |_| (), &mut |_| {
        steps += 1;
        steps < 3
    });
    assert!(!all && steps == 3, "it ends when it is told");
}

#[test]
fn one_bad_copy_is_found_and_mended_and_two_are_found_again_and_again() {
    let volume = Volume::new(LOG);
    let (journal, recovered) = volume.open();
    for i in 0..200_u64 {
        force(&journal, put(&journal, &i.to_be_bytes(), &[1; 1000])).unwrap();
    }
    journal.checkpoint().unwrap();
    let verify = || {
        let mut found = Vec::new();
        assert!(
            journal.verify_home(&mut |bad| found.push((bad.offset, bad.detail)), &mut |_| true)
        );
        found
    };
    assert_eq!(verify(), []);
    let first =
        volume.geo.segments_offset + u64::from(recovered.home_segments[0]) * volume.geo.segment_len;
    let (mut used, mut both) = (0, None);
    for block in 0..31 {
        for copy in [0, 32] {
            let offset = first + (copy + block) * 4096;
            damage(&volume, offset, 100);
            let found = verify();
            // A block that was never written holds nothing that could be damaged.
            if found.is_empty() {
                continue;
            }
            used += 1;
            assert_eq!(found.iter().map(|bad| bad.0).collect::<Vec<_>>(), [offset]);
            assert!(found[0].1.ends_with("the other copy is good"), "{found:?}");
            if block > 0 {
                assert_eq!(verify(), [], "block {block} was mended");
                both = Some(block);
            } else {
                damage(&volume, offset, 100);
            }
        }
    }
    assert!(used > 20, "{used}");
    let block = both.expect("there are more than the first");
    for copy in [0, 32] {
        damage(&volume, first + (copy + block) * 4096, 100);
    }
    for _ in 0..2 {
        let found = verify();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|bad| bad.1.ends_with("the other copy is lost too")), "{found:?}");
    }
}

/// Power is lost while free pages of the home store are written: they are nobody's damage. A page
/// that is used is.
#[test]
fn free_pages_left_by_a_lost_checkpoint_are_no_damage() {
    let geo = geometry(LOG, 256);
    let (env, _) = sim_env(3);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    let volume = Volume::on(device.clone(), geo, env);
    let (journal, _) = volume.open();
    let change = |round: u8| {
        for i in 0..100_u64 {
            force(&journal, put(&journal, &i.to_be_bytes(), &[round; 1000])).unwrap();
        }
    };
    // Pages are written, freed and written again.
    for round in 0..4 {
        change(round);
        journal.checkpoint().unwrap();
    }
    change(5);
    device.restart_trace();
    journal.checkpoint().unwrap();
    let mut torn = 0;
    for point in 0..device.trace_len() {
        let left = Arc::new(device.crash_image(point, &mut SimRng::new(point as u64)));
        let after = Volume { dev: left.clone(), geo, env: sim_env(4).0 };
        let (journal, recovered) =
            after.open_with(JournalOptions { read_only: true, ..options(false) }).unwrap();
        let verify = |journal: &Journal| {
            let mut found = Vec::new();
            assert!(journal.verify_home(&mut |bad| found.push(bad), &mut |_| true));
            found
        };
        assert_eq!(verify(&journal), [], "event {point}");
        torn += usize::from(journal.stats().home_blocks_healed > 0);
        if point % 8 != 0 {
            continue;
        }
        // Both copies of a leaf that holds keys.
        let lost = recovered.home_segments.iter().find_map(|segment| {
            let first = geo.segments_offset + u64::from(*segment) * geo.segment_len;
            (1..31).map(|block| first + block * 4096).find(|offset| {
                [*offset, offset + 32 * 4096]
                    .into_iter()
                    .for_each(|copy| damage(&after, copy, 2000));
                let lost = loses_keys(&after);
                [*offset, offset + 32 * 4096]
                    .into_iter()
                    .for_each(|copy| damage(&after, copy, 2000));
                lost
            })
        });
        let offset = lost.expect("some page is used");
        [offset, offset + 32 * 4096].into_iter().for_each(|copy| damage(&after, copy, 2000));
        let found: Vec<_> = verify(&journal).into_iter().map(|bad| bad.offset).collect();
        assert_eq!(found, [offset, offset + 32 * 4096], "event {point}");
    }
    println!("{torn} of {} crashes left a page whole in one copy alone", device.trace_len());
}

/// The volume can be opened, and not every key be read.
fn loses_keys(volume: &Volume) -> bool {
    let reader = JournalOptions { read_only: true, home_cache_bytes: 0, ..options(false) };
    let opened = volume.open_with(reader);
    opened.is_ok_and(|(journal, _)| journal.scan(b"", &[0xff; 9], &mut |_, _| true).is_err())
}
