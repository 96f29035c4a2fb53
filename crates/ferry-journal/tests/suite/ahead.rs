//! A scan of all keys reads the home store in few and long reads, and sees what everybody else
//! sees.

use crate::common::{Volume, assert_same, credits, device_len, geometry, options, put};
use ferry_device::{AlignedBuf, BLOCK_SIZE, HookedDevice, MemDevice, Op};
use ferry_env::Env;
use ferry_journal::*;
use std::collections::BTreeMap;
use std::sync::Arc;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

const KEYS: u64 = 6000;

fn value(i: u64, salt: u64) -> Vec<u8> {
    vec![(i + salt) as u8; 600 + (i % 800) as usize]
}

/// A volume whose keys were put in no order, over several checkpoints.
fn volume() -> (Arc<HookedDevice>, Volume, Model) {
    let geo = geometry(16 << 20, 256);
    let device = Arc::new(HookedDevice::new(Arc::new(MemDevice::new(device_len(&geo)))));
    let volume = Volume::on(device.clone(), geo, Env::real());
    let mut model = Model::new();
    let (journal, ..) = volume.open_owned(options(false)).unwrap();
    for n in 0..KEYS {
        let i = n * 1999 % KEYS;
        let key = i.to_be_bytes().to_vec();
        put(&journal, &key, &value(i, 0));
        model.insert(key, value(i, 0));
        if n % 1000 == 999 {
            journal.checkpoint().unwrap();
        }
    }
    journal.close().unwrap();
    (device, volume, model)
}

fn reader(reads_all: bool) -> JournalOptions {
    JournalOptions { reads_all, home_cache_bytes: 1 << 20, ..JournalOptions::offline(0) }
}

/// Scans everything: reads (many at once as one), bytes read, keys seen.
fn scan(device: &HookedDevice, journal: &Journal) -> (u64, u64, u64) {
    let before = device.asked(Op::Read);
    let mut keys = 0;
    journal
        .scan(b"", &[0xff; 8], &mut |_, _| {
            keys += 1;
            true
        })
        .unwrap();
    let after = device.asked(Op::Read);
    (after.requests - before.requests, after.bytes - before.bytes, keys)
}

#[test]
fn going_through_all_keys_takes_few_reads() {
    let (device, volume, model) = volume();
    let count = |reads_all| {
        let (journal, _) = volume.open_with(reader(reads_all)).unwrap();
        let counted = scan(&device, &journal);
        assert_same(&journal, &model);
        counted
    };
    let (near, near_bytes, keys) = count(false);
    let (ahead, bytes, keys_ahead) = count(true);
    assert_eq!((keys, keys_ahead), (KEYS, KEYS));
    // By themselves these are 2,000 reads and more.
    assert!(near < KEYS / 12, "{near} reads with neighbours");
    assert!(ahead * 5 < near * 4, "{ahead} reads ahead, {near} with neighbours");
    assert!(bytes < 3 * near_bytes, "{bytes} bytes read ahead, {near_bytes} with neighbours");
}

#[test]
fn a_scan_with_read_ahead_sees_pages_that_are_rewritten() {
    let (_, volume, mut model) = volume();
    let all = JournalOptions { reads_all: true, home_cache_bytes: 64 << 10, ..options(false) };
    let (journal, ..) = volume.open_owned(all).unwrap();
    for round in 1..6 {
        assert_same(&journal, &model);
        let mut seen = Vec::new();
        let before = model.clone();
        journal
            .scan(b"", &[0xff; 8], &mut |key, value| {
                // Pages that were read ahead are written anew, and their blocks used for others,
                // before they are come to.
                if seen.len() == 1000 {
                    for part in 0..2_u64 {
                        for i in (part..KEYS).step_by(7) {
                            let key = i.to_be_bytes().to_vec();
                            let mut t = journal.begin(credits(1, 2000)).unwrap();
                            t.put(&key, &shorter(i, round));
                            t.commit();
                            model.insert(key, shorter(i, round));
                        }
                        journal.checkpoint().unwrap();
                    }
                }
                seen.push((key.to_vec(), value.to_vec()));
                true
            })
            .unwrap();
        assert!(seen.into_iter().eq(before), "a scan shows one moment");
    }
    journal.close().unwrap();
}

fn shorter(i: u64, round: u64) -> Vec<u8> {
    let mut value = value(i, round);
    value.truncate(1900);
    value
}

/// Offsets of blocks of pages with our values in the home store's file, first copies.
fn blocks(device: &HookedDevice, geo: &Geometry, segments: &[u32]) -> Vec<u64> {
    let blocks = home_unit_bytes(geo.segment_len) / BLOCK_SIZE as u64;
    let offset = |segment: &u32| geo.segments_offset + u64::from(*segment) * geo.segment_len;
    let all =
        segments.iter().flat_map(|s| (0..blocks).map(move |b| offset(s) + b * BLOCK_SIZE as u64));
    let is_leaf = |offset: &u64| {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        device.inner().read(*offset, &mut block).unwrap();
        let inside = &block[1990..2010];
        block[0] == 1 && inside[0] > 0 && inside.iter().all(|byte| *byte == inside[0])
    };
    all.filter(is_leaf).collect()
}

#[test]
fn damage_is_met_as_without_reading_ahead() {
    let (device, volume, model) = volume();
    let (journal, recovered) = volume.open_with(reader(true)).unwrap();
    drop(journal);
    let copy = volume.geo.segment_len / 2;
    let ruin = |offset: u64| {
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        device.inner().read(offset, &mut block).unwrap();
        block[2000] ^= 0x55;
        device.inner().write(offset, &block).unwrap();
    };
    let leaves = blocks(&device, &volume.geo, &recovered.home_segments);
    assert!(leaves.len() > 500, "{}", leaves.len());
    for offset in leaves.iter().step_by(5) {
        ruin(*offset);
    }
    let bad = |reads_all| {
        let (journal, _) = volume.open_with(reader(reads_all)).unwrap();
        assert_same(&journal, &model);
        journal.home_bad_copies()
    };
    let found = bad(true);
    assert!(found.len() > 50, "{}", found.len());
    assert_eq!(found, bad(false));
    // The other copy, too.
    found.iter().for_each(|offset| ruin(offset + copy));
    let ended = |reads_all| {
        let (journal, _) = volume.open_with(reader(reads_all)).unwrap();
        let mut seen = 0;
        let scanned = journal.scan(b"", &[0xff; 8], &mut |_, _| {
            seen += 1;
            true
        });
        (seen, scanned.unwrap_err().to_string())
    };
    assert_eq!(ended(true), ended(false));
}
