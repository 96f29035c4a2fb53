//! Damage in the home store: one copy of a block is mended, both cost the keys that lie there and
//! nothing else.

use crate::common::home::{
    APART, BLOCK, LOG, Model, PAGES, free_of, open_on, reader, rebuild, setup,
};
use crate::common::{self, assert_same, force, options, put};
use ferry_device::AlignedBuf;
use ferry_journal::*;
use ferry_sim::device::{Fault, Op, SimRng};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Each block of the home store, its copies and its checksums, damaged in three ways.
#[test]
fn one_bad_copy_of_any_block_costs_nothing() {
    let setup = setup(700, 1);
    let leaves = setup.leaves();
    let (mut counted, mut headers) = (0, 0);
    for &segment in &setup.home {
        for block in 0..2 * APART {
            let device_offset = setup.offset(segment, block);
            let before = setup.block(device_offset);
            let header = before.starts_with(b"redb");
            for damage in 0..3 {
                let setup = setup.fork();
                match damage {
                    0 => setup.garbage(device_offset),
                    1 => setup.write(device_offset, &AlignedBuf::zeroed(BLOCK as usize)),
                    _ => setup.unreadable(device_offset),
                }
                let seen = setup.check(reader());
                assert!(
                    seen > 0 || !(header && block == 0 || leaves.contains(&device_offset)),
                    "{damage} of {block}"
                );
                assert!(
                    damage == 2 || setup.block(device_offset)[..] != before[..] || seen == 0,
                    "only read"
                );
                let mended = setup.check(JournalOptions { home_cache_bytes: 0, ..options(false) });
                assert!(mended > 0 || seen == 0, "{damage} of {block}");
                setup.bad.set_unreadable([]);
                if seen > 0 {
                    counted += 1;
                    headers += u32::from(header);
                    assert!(
                        !leaves.contains(&device_offset)
                            || setup.block(device_offset)[..] == before[..],
                        "{damage} of {block}"
                    );
                    assert_eq!(setup.check(reader()), 0, "{damage} of {block}");
                }
            }
        }
    }
    assert!(counted > 3 * leaves.len() && headers == 6, "{counted}, {headers}");
}

/// The device refuses the writes that would mend a checksum block: the next checkpoint makes it,
/// whether it changes anything there or not.
#[test]
fn checksums_that_could_not_be_mended_are_not_forgotten() {
    let setup = setup(5000, 1);
    let (mut refused, mut salvaged) = (0, 0);
    for &segment in &setup.home {
        // Whether a checkpoint comes to write it on its own is seen where nobody reads what it
        // says.
        let mended = [false, true].map(|read| {
            let setup = setup.fork();
            let [first, second] = [0, 1].map(|copy| setup.offset(segment, PAGES + copy * APART));
            setup.garbage(second);
            let (journal, _) = setup
                .volume
                .open_with(JournalOptions { home_cache_bytes: 0, ..options(false) })
                .unwrap();
            if read {
                setup.device.inject(Fault { op: Op::Write, after: 0, errno: 5, sticky: true });
                assert_same(&journal, &setup.model);
                setup.device.heal();
                refused += usize::from(setup.device.struck() > 0);
            }
            put(&journal, b"one more", b"value");
            journal.checkpoint().unwrap();
            drop(journal);
            // Of blocks that were never written there is nothing to be told.
            let (first, second) = (setup.block(first), setup.block(second));
            let same =
                first.chunks(4).zip(second.chunks(4)).all(|(one, two)| one == [0; 4] || one == two);
            (setup.device.struck() > 0, same)
        });
        let [(_, on_its_own), (struck, after)] = mended;
        assert!(after || !struck, "segment {segment}");
        salvaged += usize::from(struck && !on_its_own);
    }
    assert!(refused > 0 && salvaged > 0, "{refused} {salvaged}");
}

/// Both copies of one leaf after the other.
#[test]
fn a_lost_leaf_costs_its_keys_only() {
    let setup = setup(700, 2);
    let leaves = setup.leaves();
    let mut lost_some = 0;
    for &device_offset in &leaves {
        for damage in 0..2 {
            let copies =
                [device_offset, device_offset + APART * BLOCK].map(|p| (p, setup.block(p)));
            for (p, _) in &copies {
                if damage == 0 { setup.garbage(*p) } else { setup.unreadable(*p) }
            }
            let (journal, _) = setup.volume.open_with(reader()).unwrap();
            let (found, gaps) = setup.readable(&journal);
            setup.explained(&found, &gaps);
            assert!(gaps.len() <= 1);
            let lost: BTreeSet<_> =
                setup.model.keys().filter(|k| !found.contains_key(*k)).collect();
            assert_eq!(lost.is_empty(), gaps.is_empty());
            for gap in &gaps {
                assert_eq!(gap.offset, device_offset, "{gap:?}");
                lost_some += 1;
            }
            // One after the other, and each key that is not there twice: the mount goes on.
            for _ in 0..2 {
                for (key, value) in &setup.model {
                    match journal.get(key) {
                        Ok(there) => assert_eq!(there.as_deref(), Some(&value[..])),
                        Err(JournalError::Damaged { what: "home store", offset, .. }) => {
                            assert!(lost.contains(key) && offset == device_offset);
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            assert_eq!(journal.scan(b"", &[0xff; 8], &mut |_, _| true).is_err(), !lost.is_empty());
            drop(journal);
            setup.bad.set_unreadable([]);
            copies.iter().for_each(|(p, bytes)| setup.write(*p, bytes));
        }
    }
    assert!(lost_some >= leaves.len(), "{lost_some} of {}", leaves.len());
}

/// A checkpoint that needs what cannot be read ends all changes, and no reading.
#[test]
fn a_checkpoint_that_meets_damage_stops_changes_but_not_reads() {
    let setup = setup(700, 3);
    setup.lose_a_leaf();
    let (journal, _) = setup.volume.open();
    let (found, gaps) = setup.readable(&journal);
    let lost: Vec<_> = setup.model.keys().filter(|k| !found.contains_key(*k)).cloned().collect();
    assert!(lost.len() > 1 && gaps.len() == 1);
    for key in &lost {
        put(&journal, key, b"again");
    }
    assert!(matches!(journal.checkpoint(), Err(JournalError::Damaged { .. })));
    assert!(matches!(journal.begin(common::credits(1, 1)), Err(JournalError::ReadOnly(_))));
    for (key, value) in &setup.model {
        let expected = if lost.contains(key) { b"again" } else { &value[..] };
        assert_eq!(journal.get(key).unwrap().as_deref(), Some(expected));
    }
}

/// Leaves with keys in them damaged, and a log with contexts that are not home yet: rebuilding
/// keeps all the rest.
#[test]
fn a_rebuilt_home_store_has_what_is_readable() {
    let mut setup = setup(700, 4);
    let (journal, _) = setup.volume.open();
    for i in 0..20_u32 {
        let (key, value) = (format!("log {i:03}").into_bytes(), i.to_le_bytes().to_vec());
        let seq = put(&journal, &key, &value);
        force(&journal, seq).unwrap();
        setup.model.insert(key, value);
    }
    drop(journal);
    setup.forget_old_log();
    setup.lose_a_leaf();
    let needed = match rebuild(&setup, &setup.device, &free_of(&setup, 1)) {
        Err(JournalError::HomeNeeds { segments }) => segments,
        other => panic!("{other:?}"),
    };
    let before = open_on(&setup, &setup.device);
    let (found, gaps) = setup.readable(&before.0);
    drop(before);
    assert_eq!(gaps.len(), 1);
    setup.device.restart_trace();
    let rebuilt = rebuild(&setup, &setup.device, &free_of(&setup, needed as usize)).unwrap();
    assert_eq!((rebuilt.lost.len(), rebuilt.keys), (gaps.len(), found.len() as u64));
    assert_eq!(BTreeSet::from_iter(&rebuilt.old_segments), BTreeSet::from_iter(&setup.home));
    setup.explained(&found, &rebuilt.lost);
    // Killed at any write: the old store or the new one, and the second attempt comes to the same.
    let mut rng = SimRng::new(4);
    let points = setup.device.trace_len();
    let mut new = 0;
    for point in (0..=points).filter(|p| points < 80 || p % (points / 60) == 0 || points - p < 12) {
        let image = Arc::new(setup.device.crash_image(point, &mut rng));
        let (journal, recovered) = open_on(&setup, &image);
        let (there, gaps) = setup.readable(&journal);
        assert_eq!(there, found, "point {point} of {points}");
        drop(journal);
        new += u32::from(gaps.is_empty());
        let free =
            (0..setup.volume.geo.segment_count).filter(|s| !recovered.home_segments.contains(s));
        let again =
            rebuild(&setup, &image, &free.take(needed as usize).collect::<Vec<_>>()).unwrap();
        assert_eq!(again.keys, found.len() as u64);
        assert_same(&open_on(&setup, &image).0, &found);
    }
    assert!(new > 0 && (new as usize) < points, "{new} of {points}");
    // It takes changes, and is clean.
    let (journal, recovered) = setup.volume.open();
    assert!(!recovered.unclean && recovered.log_damage.is_none(), "{recovered:?}");
    let seq = put(&journal, b"more", b"1");
    force(&journal, seq).unwrap();
    journal.close().unwrap();
}

/// Nothing of the home store is left: one gap covers all, and what the log has takes its place.
#[test]
fn a_home_store_without_a_root_is_one_gap() {
    let setup = setup(200, 5);
    let with_log = setup.fork();
    setup.forget_old_log();
    for setup in [&setup, &with_log] {
        for &segment in &setup.home {
            (0..2 * APART).for_each(|block| setup.garbage(setup.offset(segment, block)));
        }
        assert!(matches!(setup.volume.open_with(reader()), Err(JournalError::Damaged { .. })));
    }
    let rebuilt = rebuild(&with_log, &with_log.device, &free_of(&with_log, 8)).unwrap();
    assert_eq!((rebuilt.keys, rebuilt.lost.len()), (200, 0));
    assert_eq!(rebuilt.found, Some(FoundState { complete: true }));
    assert_same(&open_on(&with_log, &with_log.device).0, &with_log.model);
    let rebuilt = rebuild(&setup, &setup.device, &free_of(&setup, 8)).unwrap();
    assert_eq!((rebuilt.keys, rebuilt.lost.len()), (0, 1));
    let (journal, _) = setup.volume.open();
    assert_same(&journal, &Model::new());
    put(&journal, b"new", b"1");
    journal.close().unwrap();
}

/// A log damaged before its durable end, accepted: it ends there, for good once it was opened for
/// writing.
#[test]
fn an_accepted_log_ends_at_its_damage() {
    for unreadable in [false, true] {
        let setup = setup(50, 6);
        let (journal, first) = setup.volume.open();
        for i in 1..=6_u64 {
            let seq = put(&journal, b"newest", &i.to_le_bytes());
            assert_eq!(seq.0, first.last.0 + i);
            force(&journal, seq).unwrap();
        }
        drop(journal);
        // The block of the third context: the last three are readable behind it.
        let geo = setup.volume.geo;
        let third = (0..LOG / BLOCK).map(|b| geo.log_offset + b * BLOCK).find(|device_offset| {
            let block = setup.block(*device_offset);
            block[..4] == *b"FLB1"
                && block.windows(8).any(|w| w == (first.last.0 + 3).to_le_bytes())
                && {
                    let seq = u64::from_le_bytes(block[48 + 24..48 + 32].try_into().unwrap());
                    seq == first.last.0 + 3
                }
        });
        let third = third.unwrap();
        if unreadable {
            setup.unreadable(third)
        } else {
            setup.garbage(third)
        }
        assert!(setup.volume.open_with(options(false)).is_err());
        let accept =
            |read_only| JournalOptions { read_only, accept_damage: true, ..options(false) };
        let newest = |journal: &Journal| {
            journal.get(b"newest").unwrap().map(|v| u64::from_le_bytes(v[..].try_into().unwrap()))
        };
        let (journal, recovered) = setup.volume.open_with(accept(true)).unwrap();
        let damage = recovered.log_damage.unwrap();
        assert_eq!((newest(&journal), damage.offset), (Some(2), third));
        assert_eq!((damage.lost_from.0, damage.lost_to.0), (first.last.0 + 3, first.last.0 + 6));
        drop(journal);
        setup.bad.set_unreadable([]);
        assert!(
            setup.volume.open_with(options(false)).is_err() || unreadable,
            "nothing was written"
        );
        if unreadable {
            setup.garbage(third);
        }
        let (journal, recovered) = setup.volume.open_with(accept(false)).unwrap();
        assert!(recovered.log_damage.is_some() && newest(&journal) == Some(2));
        drop(journal);
        let (journal, recovered) = setup.volume.open();
        assert!(recovered.log_damage.is_none() && newest(&journal) == Some(2));
        let seq = put(&journal, b"newest", &9_u64.to_le_bytes());
        force(&journal, seq).unwrap();
        drop(journal);
        assert_eq!(newest(&setup.volume.open().0), Some(9));
    }
}

/// Pages that are what their checksums say and make no sense: errors, never a panic, and the rest
/// is readable.
#[test]
fn forged_pages_are_errors() {
    // Thousands of panics that become errors: no backtrace of each.
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !panic_is_caught() {
            before(info);
        }
    }));
    let setup = setup(300, 7);
    let mut rng = SimRng::new(7);
    let (mut failed, mut readable) = (0, 0);
    for (n, &leaf) in setup.leaves().iter().enumerate() {
        for kind in 0..4_u8 {
            let fork = setup.fork();
            let mut page = fork.block(leaf);
            match kind {
                0 => rng.fill(&mut page),
                1 => rng.fill(&mut page[4..]),
                2 => page[2..4].copy_from_slice(&u16::MAX.to_le_bytes()),
                _ => page[0] = 2,
            }
            fork.forge(leaf, &page);
            let (journal, _) = fork.volume.open();
            for (key, value) in &fork.model {
                match journal.get(key) {
                    Ok(there) => readable += u32::from(there.as_deref() == Some(&value[..])),
                    Err(_) => failed += 1,
                }
            }
            let _ = journal.scan(b"", &[0xff; 8], &mut |_, _| true);
            let mut visited = 0;
            let visit = &mut |_: &[u8], _: &Value| {
                visited += 1;
                true
            };
            journal.scan_readable(b"", &[0xff; 8], visit, &mut |_| ()).unwrap();
            for key in fork.model.keys().step_by(1 + n % 3) {
                put(&journal, key, b"again");
            }
            let written = journal.checkpoint();
            let begun = journal.begin(common::credits(1, 1)).map(drop);
            assert_eq!(written.is_err(), begun.is_err(), "{written:?} {begun:?}");
        }
    }
    assert!(failed > 0 && readable > 5 * failed, "{failed} {readable}");
}

/// Pages whose checksums are right, at each other's offsets: a search and a scan would see
/// different keys.
#[test]
fn a_page_at_the_wrong_offset_is_damage() {
    let setup = setup(700, 11);
    let leaves = setup.leaves();
    let mut refused = 0;
    for (n, &leaf) in leaves.iter().enumerate() {
        let other = leaves[(n + 1 + n / 2) % leaves.len()];
        let fork = setup.fork();
        fork.forge(leaf, &setup.block(other));
        let (journal, _) = fork.volume.open_with(reader()).unwrap();
        let mut bad = Vec::new();
        journal.verify_pages(&mut |device_offset| bad.push(device_offset.offset), &mut |_| true);
        let mut missed = 0;
        for (key, value) in &fork.model {
            match journal.get(key) {
                Ok(there) => assert_eq!(there.as_deref(), Some(&value[..]), "{n}"),
                Err(error) => {
                    assert!(
                        matches!(error, JournalError::Damaged { offset, .. } if offset == leaf),
                        "{error}"
                    );
                    missed += 1;
                }
            }
        }
        // Some leaves are free pages by now.
        assert_eq!(bad, if missed > 0 { vec![leaf] } else { Vec::new() }, "{n}");
        let (found, gaps) = fork.readable(&journal);
        fork.explained(&found, &gaps);
        assert!(found.len() + missed >= fork.model.len(), "{n}: nothing else is lost");
        refused += usize::from(missed > 0);
    }
    assert!(refused > leaves.len() / 2, "{refused} of {}", leaves.len());
}

/// What a page that is not the right one has of what belongs there is kept, and said to be
/// doubtful.
#[test]
fn readable_keys_of_a_damaged_page_are_salvaged() {
    let setup = setup(700, 12);
    let mut salvaged = 0;
    for leaf in setup.leaves() {
        let fork = setup.fork();
        let mut page = setup.block(leaf);
        // The last byte of the last value.
        let used = page.iter().rposition(|byte| *byte != 0).unwrap();
        page[used] ^= 1;
        fork.forge(leaf, &page);
        let (journal, _) = fork.volume.open_with(reader()).unwrap();
        let (found, gaps) = fork.readable(&journal);
        let wrong = found.iter().filter(|(key, value)| fork.model.get(*key) != Some(value)).count();
        assert_eq!((found.len(), wrong), (fork.model.len(), gaps.len()), "{gaps:?}");
        for gap in gaps {
            assert_eq!(gap.offset, leaf);
            let inside = |key: &Vec<u8>| gap.after < *key && *key < gap.before;
            assert_eq!(gap.doubtful as usize, fork.model.keys().filter(|key| inside(key)).count());
            salvaged += gap.doubtful;
        }
    }
    assert!(salvaged > 600, "{salvaged}");
}

/// A stray block of the log claims a number that no context can have; what a rebuilt volume gets
/// after that would never be found.
#[test]
fn an_impossible_context_number_is_damage() {
    use ferry_journal::format::{
        BLOCK_HEADER, BlockHeader, RECORD_HEADER, RecordHeader, RecordKind,
    };
    for (seq, durable_point, position) in
        [(u64::MAX, 0, None), (7, u64::MAX, None), (7, 0, Some(u64::MAX))]
    {
        let setup = setup(50, 13);
        let geo = setup.volume.geo;
        let last = geo.log_len / BLOCK - 1;
        let mut block = AlignedBuf::zeroed(BLOCK as usize);
        let position = position.unwrap_or(last);
        BlockHeader { volume_id: geo.volume_id, position, record_id: 5, index: 0 }
            .encode(&mut block);
        let (kind, body_crc) = (RecordKind::Context, 0);
        let header = RecordHeader {
            kind,
            id: 5,
            prev: 4,
            seq,
            durable_point,
            body_len: 0,
            keys: 0,
            extents: 0,
            body_crc,
        };
        block[BLOCK_HEADER..BLOCK_HEADER + RECORD_HEADER].copy_from_slice(&header.encode());
        setup.write(geo.log_offset + last * BLOCK, &block);
        rebuild(&setup, &setup.device, &free_of(&setup, 8)).unwrap();
        let (journal, _) = setup.volume.open();
        force(&journal, put(&journal, b"after", b"value")).unwrap();
        drop(journal);
        let (journal, _) = setup.volume.open_with(reader()).unwrap();
        assert_eq!(journal.get(b"after").unwrap().as_deref(), Some(&b"value"[..]), "{header:?}");
    }
}

/// A header that claims more than there is would have tables made for it before anything else is
/// looked at.
#[test]
fn a_forged_header_is_damage() {
    let setup = setup(10, 8);
    let mut offsets = setup.home.iter().map(|&segment| setup.offset(segment, 0));
    let device_offset =
        offsets.find(|device_offset| setup.block(*device_offset).starts_with(b"redb")).unwrap();
    for (at, value) in
        [(12, 8192_u32), (16, u32::MAX), (20, 1), (20, u32::MAX), (24, u32::MAX), (28, 1 << 19)]
    {
        let fork = setup.fork();
        let mut header = fork.block(device_offset);
        header[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let sum = crc32c::crc32c(&header[..508]);
        header[508..512].copy_from_slice(&sum.to_le_bytes());
        fork.write(device_offset, &header);
        let opened = fork.volume.open_with(reader());
        assert!(
            matches!(opened, Err(JournalError::Damaged { what: "home store", .. })),
            "{value} at {at}"
        );
    }
}

#[test]
fn a_home_map_that_cannot_be_read_is_not_needed() {
    let setup = setup(10, 9);
    let geo = setup.volume.geo;
    for slot in geo.home_map_offsets {
        setup.unreadable(slot);
        assert_eq!(setup.check(reader()), 0);
        setup.bad.set_unreadable([]);
    }
}

/// A copy of checksums that the device cannot read is found.
#[test]
fn an_unreadable_copy_of_checksums_is_found() {
    for copy in 0..2 {
        let setup = setup(300, 5);
        let device_offset = setup.offset(setup.home[0], PAGES + copy * APART);
        setup.unreadable(device_offset);
        let (journal, recovered) = setup.volume.open_with(reader()).unwrap();
        assert!(recovered.at_rest);
        let mut found = BTreeSet::new();
        journal.verify_home(&mut |bad| _ = found.insert(bad.offset), &mut |_| true);
        assert!(
            found.contains(&device_offset) && journal.home_bad_copies().contains(&device_offset),
            "copy {copy}"
        );
    }
}
