//! The home store on a volume that runs out of segments: whose segments are whose, reading goes on,
//! removing works.

use crate::common::{self, Owner, SEGMENT, Volume, credits, options};
use ferry_device::MemDevice;
use ferry_env::Env;
use ferry_journal::*;
use ferry_sim::device::SimRng;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn set(
    journal: &Journal,
    model: &mut Model,
    key: u32,
    value: Option<&[u8]>,
) -> Result<(), JournalError> {
    let key = key.to_be_bytes();
    let len = value.map_or(0, <[u8]>::len) + key.len();
    let mut t = journal.begin(Credits { urgent: true, ..credits(1, len as u32) })?;
    match value {
        Some(value) => {
            t.put(&key, value);
            model.insert(key.to_vec(), value.to_vec());
        }
        None => {
            t.delete(&key);
            model.remove(&key[..]);
        }
    }
    t.commit();
    Ok(())
}

/// No segment is the home store's (by its map on the device) and its owner's at once.
fn assert_disjoint(volume: &Volume, owner: &Owner, hidden: &[u32], context: &str) {
    let reader = JournalOptions { read_only: true, ..options(false) };
    let (_journal, recovered) = volume.open_with(reader).unwrap();
    let home: HashSet<u32> = recovered.home_segments.iter().copied().collect();
    let free = owner.free.lock().unwrap();
    let both: Vec<_> = free.iter().chain(hidden).filter(|s| home.contains(s)).collect();
    assert!(both.is_empty(), "{context}: segments {both:?} are free and in the home store's map");
}

#[test]
fn a_segment_that_a_failed_checkpoint_keeps_is_not_given_back() {
    for shrinks in 3..8 {
        let volume = Volume::new(16 << 20);
        let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
        let mut model = Model::new();
        for key in 0..4000 {
            set(&journal, &mut model, key, Some(&[1; 1200])).unwrap();
        }
        journal.checkpoint().unwrap();
        for key in 0..4000 {
            set(&journal, &mut model, key, None).unwrap();
        }
        // The end of the file is free by and by; it is cut bit by bit, each time after a commit.
        // What was cut is given back by the commit that follows.
        let before = owner.free.lock().unwrap().len();
        for key in 0..shrinks {
            set(&journal, &mut model, 9000 + key, Some(b"small")).unwrap();
            journal.checkpoint().unwrap();
        }
        let context =
            format!("{shrinks}: {before} free, {} then", owner.free.lock().unwrap().len());
        assert_disjoint(&volume, &owner, &[], &context);
        let hidden = std::mem::take(&mut *owner.free.lock().unwrap());
        let mut key = 0;
        while set(&journal, &mut model, key, Some(&[2; 1200])).is_ok() {
            key += 1;
            assert!(key < 60_000, "the home store cannot take it all");
        }
        assert_disjoint(&volume, &owner, &hidden, &format!("{context}, without space"));
        owner.free.lock().unwrap().extend(hidden);
        for round in 0..4 {
            set(&journal, &mut model, 9100 + round, Some(b"small"))
                .unwrap_or_else(|e| panic!("{context}: {e}"));
            journal.checkpoint().unwrap();
            let now = owner.free.lock().unwrap().len();
            assert_disjoint(
                &volume,
                &owner,
                &[],
                &format!("{context}, {key} keys, round {round}, {now} free"),
            );
        }
        common::assert_same(&journal, &model);
    }
}

/// With what the owner keeps back (what one log can bring, and a quarter of what the home store
/// has), files can be removed whatever was changed before.
#[test]
fn removing_works_on_a_full_volume() {
    let geo = common::geometry(2 << 20, 512);
    let volume = Volume::on(Arc::new(MemDevice::new(common::device_len(&geo))), geo, Env::real());
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let mut model = Model::new();
    for key in 0..12_000 {
        set(&journal, &mut model, 2 * key, Some(&[1; 1800])).unwrap();
    }
    journal.checkpoint().unwrap();
    journal.checkpoint().unwrap();
    let home = journal.stats().home_bytes / SEGMENT;
    let reserve = (geo.log_len / SEGMENT + 2 + home / 4) as usize;
    owner.free.lock().unwrap().truncate(reserve);
    // Small changes all over: each key of the log is another page of the home store.
    let mut rng = SimRng::new(1);
    for i in 0..40_000 {
        let key = rng.below(12_000) as u32;
        let remove = i % 8 == 7;
        let value = [2; 40];
        let done =
            set(&journal, &mut model, 2 * key + u32::from(!remove), (!remove).then_some(&value));
        assert!(done.is_ok(), "change {i}, home {home} segments, {reserve} kept: {done:?}");
    }
}

/// A volume whose home store lacks segments: its log is full of changes that would rewrite every
/// page.
fn starved(volume: &Volume) -> (Journal, Arc<Owner>, Model) {
    let small = JournalOptions { home_cache_bytes: 64 * 1024, ..options(false) };
    let (journal, _, owner) = volume.open_owned(small).unwrap();
    let mut model = Model::new();
    for key in 0..3000 {
        set(&journal, &mut model, key, Some(&[7; 1200])).unwrap();
    }
    journal.checkpoint().unwrap();
    owner.free.lock().unwrap().clear();
    let mut key = 10_000;
    while set(&journal, &mut model, key, Some(&[8; 1200])).is_ok() {
        key += 1;
        assert!(key < 13_000, "there is no room for so much");
    }
    (journal, owner, model)
}

/// A reader does not notice that a checkpoint found no space.
#[test]
fn a_scan_outlives_a_checkpoint_without_space() {
    let volume = Volume::new(1 << 20);
    let (journal, owner, model) = starved(&volume);
    let mut seen = Vec::new();
    let scanned = journal.scan(b"", &[0xff; 8], &mut |key, value| {
        seen.push((key.to_vec(), value.to_vec()));
        if [10, 1010].contains(&seen.len()) {
            // One more is worth an attempt, and not enough.
            owner.free.lock().unwrap().push(200 + (seen.len() / 1000) as u32);
            assert!(matches!(journal.checkpoint(), Err(JournalError::NoSpace)));
        }
        true
    });
    assert!(scanned.is_ok(), "after {} of {} keys: {scanned:?}", seen.len(), model.len());
    assert!(seen.into_iter().eq(model), "each key once, with its value");
}

/// Where a checkpoint succeeds after one failed, a scan that began before goes on with what is
/// there then.
#[test]
fn a_scan_outlives_a_checkpoint_with_space_after_one_without() {
    let volume = Volume::new(1 << 20);
    let (journal, owner, model) = starved(&volume);
    let mut seen = Vec::new();
    let scanned = journal.scan(b"", &[0xff; 8], &mut |key, value| {
        seen.push((key.to_vec(), value.to_vec()));
        if seen.len() == 10 {
            owner.free.lock().unwrap().push(200);
            assert!(matches!(journal.checkpoint(), Err(JournalError::NoSpace)));
            owner.free.lock().unwrap().extend(201..240);
            journal.checkpoint().unwrap();
        }
        true
    });
    assert!(scanned.is_ok(), "{scanned:?}");
    assert!(seen.into_iter().eq(model), "each key once, with its value");
}

#[test]
fn a_thread_reads_on_while_checkpoints_find_no_space() {
    let volume = Volume::new(1 << 20);
    let (journal, owner, model) = starved(&volume);
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let results = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                common::assert_same(&journal, &model);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let results: Vec<_> = (0..2)
            .map(|i| {
                // In the midst of reading.
                let before = rounds.load(Ordering::Relaxed);
                while rounds.load(Ordering::Relaxed) == before && !reader.is_finished() {
                    std::thread::yield_now();
                }
                owner.free.lock().unwrap().push(200 + i);
                journal.checkpoint()
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        results
    });
    assert!(results.iter().all(|r| matches!(r, Err(JournalError::NoSpace))), "{results:?}");
    common::assert_same(&journal, &model);
}

/// Without a segment more, another attempt costs the owner's answer and nothing else; with enough,
/// it succeeds.
#[test]
fn a_checkpoint_without_space_only_asks_for_segments_again() {
    let volume = Volume::new(1 << 20);
    let (journal, owner, model) = starved(&volume);
    // An attempt for certain: there is one more.
    owner.free.lock().unwrap().push(200);
    assert!(matches!(journal.checkpoint(), Err(JournalError::NoSpace)));
    for _ in 0..3 {
        let asked = owner.asked.swap(0, Ordering::Relaxed);
        assert!(asked > 0);
        assert!(matches!(journal.checkpoint(), Err(JournalError::NoSpace)));
        assert_eq!(owner.asked.load(Ordering::Relaxed), 1);
    }
    owner.free.lock().unwrap().extend(201..240);
    journal.checkpoint().unwrap();
    common::assert_same(&journal, &model);
}

/// A close that failed does not say later that all is well.
#[test]
fn a_failed_close_fails_again() {
    let volume = Volume::new(1 << 20);
    let (journal, _owner, model) = starved(&volume);
    assert!(matches!(journal.close(), Err(JournalError::NoSpace)));
    assert!(matches!(journal.close(), Err(JournalError::NoSpace)));
    drop(journal);
    let (journal, _, _owner) = volume.open_owned(options(false)).unwrap();
    common::assert_same(&journal, &model);
    journal.close().unwrap();
    journal.close().unwrap();
}

/// What the home store needs beyond what was foreseen it asks for while it grows.
#[test]
fn a_checkpoint_takes_segments_as_it_needs_them() {
    let volume = Volume::new(8 << 20);
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let mut model = Model::new();
    for key in 0..2000 {
        set(&journal, &mut model, key, Some(&[1; 1250])).unwrap();
    }
    // The provision before it begins gets nothing.
    owner.refuse.store(1, Ordering::Relaxed);
    journal.checkpoint().unwrap();
    assert!(owner.asked.load(Ordering::Relaxed) > 1);
    common::assert_same(&journal, &model);
}
