//! Many threads on one journal with its background thread: order, durability, waiting for log
//! space.

use crate::common::{self, Volume, credits, device_len, force, geometry, options, put};
use ferry_device::{AlignedBuf, FileDevice, HookedDevice, MemDevice};
use ferry_env::Env;
use ferry_journal::{DataExtent, Geometry, JournalOptions, LogOptions, Wake};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A block of data in the volume's second half, each `n` at an offset of its own.
fn data(geo: Geometry, n: u64) -> DataExtent {
    let from = geo.segments_offset + u64::from(geo.segment_count / 2) * geo.segment_len;
    let offsets = u64::from(geo.segment_count / 2) * geo.segment_len / 4096;
    let mut buf = AlignedBuf::zeroed(4096);
    buf[..8].copy_from_slice(&n.to_le_bytes());
    let crc = crc32c::crc32c(&crc32c::crc32c(&buf).to_le_bytes());
    assert!(n < offsets, "no offset is used twice");
    DataExtent { offset: from + n * 4096, buf: Arc::new(buf), crc }
}

/// Each thread owns its keys, so that the outcome is known; a tiny log makes them wait for space
/// all the time.
fn many_threads(volume: &Volume, threads: u64, rounds: u64, force_every: u64) {
    many_threads_with(volume, threads, rounds, force_every, LogOptions::default());
}

fn many_threads_with(
    volume: &Volume,
    threads: u64,
    rounds: u64,
    force_every: u64,
    log: LogOptions,
) {
    let mut options = options(true);
    options.log = log;
    options.commit_interval = Duration::from_millis(5);
    let (journal, _, owner) = volume.open_owned(options).unwrap();
    let journal = Arc::new(journal);
    let volume_geo = volume.geo;
    let workers: Vec<_> = (0..threads)
        .map(|t| {
            let journal = journal.clone();
            std::thread::spawn(move || {
                let mut model = BTreeMap::new();
                for n in 0..rounds {
                    let key = format!("{t:02} {:03}", n * 7919 % 61).into_bytes();
                    let value = vec![n as u8; (n * 131 % 700) as usize];
                    let mut tx = journal.begin(credits(2, 1600)).unwrap();
                    assert_eq!(
                        tx.get(&key).unwrap().as_deref(),
                        model.get(&key).map(|v: &Vec<u8>| &v[..])
                    );
                    let extent = data(volume_geo, t * rounds + n);
                    tx.write_data(extent, Box::new(|written| written.unwrap()));
                    tx.put(&key, &value);
                    model.insert(key, value);
                    if n.is_multiple_of(7) {
                        let deleted = format!("{t:02} {:03}", n * 31 % 61).into_bytes();
                        tx.delete(&deleted);
                        model.remove(&deleted);
                    }
                    let seq = tx.commit();
                    if n.is_multiple_of(force_every) {
                        force(&journal, seq).unwrap();
                        assert!(journal.durable() >= seq);
                    }
                }
                model
            })
        })
        .collect();
    let mut all = BTreeMap::new();
    for worker in workers {
        all.extend(worker.join().unwrap());
    }
    common::assert_same(&journal, &all);
    let stats = journal.stats();
    let space = stats.space;
    assert_eq!((space.waits, space.waiting), (space.grants, 0));
    assert!(!log.wake.grants() || space.wakes == space.grants, "every wake-up brought a grant");
    assert!(space.wakes >= space.grants);
    assert_eq!(stats.space_waits.count, space.waits);
    assert!(stats.log_in_flight_max <= log.buffers as u64);
    let stages = [stats.stages.collect, stats.stages.queue, stats.stages.write, stats.stages.flush];
    assert!(
        stages.iter().all(|stage| stage.count == journal.durable().0),
        "each durable context was in each stage"
    );
    journal.force_durable_point().unwrap();
    assert_eq!(
        owner.durable_point.load(std::sync::atomic::Ordering::SeqCst),
        journal.durable_point().0
    );
    // Without a close, then with one.
    drop(journal);
    let (journal, recovered) = volume.open();
    assert!(recovered.unclean);
    common::assert_same(&journal, &all);
    journal.close().unwrap();
    drop(journal);
    let (journal, recovered) = volume.open();
    assert!(!recovered.unclean);
    common::assert_same(&journal, &all);
}

#[test]
fn threads_share_commits() {
    many_threads(&Volume::new(4 << 20), 8, 1000, 3);
}

#[test]
fn threads_wait_for_a_tiny_log_whose_old_part_is_discarded() {
    let geo = geometry(256 * 1024, 256);
    let memory = Arc::new(MemDevice::new(device_len(&geo)));
    let device = HookedDevice::new(memory).keeping_what_is_dead();
    many_threads(&Volume::on(Arc::new(device), geo, Env::real()), 16, 500, 50);
}

#[test]
fn threads_wait_for_a_tiny_log() {
    many_threads(&Volume::new(256 * 1024), 16, 500, 50);
}

/// The ways of waking that are there to compare with, and one record at a time.
#[test]
fn threads_wait_for_a_tiny_log_with_each_way_of_waking() {
    for (wake, buffers) in [(Wake::Handoff, 8), (Wake::Flag, 8), (Wake::All, 1)] {
        many_threads_with(&Volume::new(256 * 1024), 16, 300, 50, LogOptions { wake, buffers });
    }
}

#[test]
fn threads_never_force() {
    many_threads(&Volume::new(512 * 1024), 4, 2000, u64::MAX);
}

/// Over a real device, whose completions come from a thread of its own.
#[test]
fn threads_share_commits_on_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let geo = geometry(512 * 1024, 256);
    let env = Env::real();
    let device =
        FileDevice::create(&dir.path().join("volume"), device_len(&geo), false, &env).unwrap();
    many_threads(&Volume::on(Arc::new(device), geo, env), 8, 300, 3);
}

/// Log writes that complete touch nobody's space: only the tail gives it back, once for all that
/// lie before it.
#[test]
fn space_is_given_back_once_for_many_log_writes() {
    const RECORDS: u64 = 60;
    let volume = Volume::new(1 << 20);
    let (journal, _) = volume.open();
    let before = journal.stats();
    for n in 0..RECORDS {
        force(&journal, put(&journal, &n.to_be_bytes(), &[7; 100])).unwrap();
    }
    let full = journal.stats();
    assert_eq!(
        (full.log_writes - before.log_writes, full.tail_moves),
        (RECORDS, before.tail_moves)
    );
    assert_eq!(
        before.log_free_bytes - full.log_free_bytes,
        RECORDS * 4096,
        "each record holds its block"
    );
    journal.checkpoint().unwrap();
    let after = journal.stats();
    assert_eq!((after.tail_moves, after.log_used_bytes), (full.tail_moves + 1, 0));
    journal.close().unwrap();
}

/// A process that recovers it would ask a store for each record.
#[test]
fn a_log_far_away_is_checkpointed_at_some_thousand_contexts_and_one_on_disk_when_it_fills_up() {
    const CONTEXTS: u64 = 2500;
    let moves = |far: bool| {
        let geo = geometry(64 << 20, 256);
        let memory = Arc::new(MemDevice::new(device_len(&geo)));
        let device = HookedDevice::new(memory).far_away(if far { 1 << 20 } else { 0 });
        // An idle log is not checkpointed meanwhile.
        let options = JournalOptions { commit_interval: Duration::from_secs(60), ..options(true) };
        let volume = Volume::on(Arc::new(device), geo, Env::real());
        let (journal, _) = volume.open_with(options).unwrap();
        let moves = || journal.stats().tail_moves;
        let before = moves();
        for n in 0..CONTEXTS {
            force(&journal, put(&journal, &n.to_be_bytes(), &[7; 100])).unwrap();
        }
        let clock = Env::real().clock;
        let until = clock.monotonic() + Duration::from_secs(20);
        while far && moves() == before && clock.monotonic() < until {
            std::thread::yield_now();
        }
        let moved = moves() - before;
        journal.close().unwrap();
        moved
    };
    assert_eq!((moves(false), moves(true)), (0, 1));
}

#[test]
fn a_change_is_durable_in_time_though_the_thread_would_rest_for_longer() {
    let interval = Duration::from_secs(2);
    let volume = Volume::new(1 << 20);
    let (journal, _, _) =
        volume.open_owned(JournalOptions { commit_interval: interval, ..options(true) }).unwrap();
    force(&journal, put(&journal, b"forced", b"value")).unwrap();
    // It has written a durable point, and would look again for a checkpoint in some seconds.
    std::thread::sleep(interval * 3 / 2);
    let clock = Env::real().clock;
    let (seq, begun) = (put(&journal, b"later", b"value"), clock.monotonic());
    while journal.durable() < seq {
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = clock.monotonic() - begun;
    assert!(took < interval * 5 / 2, "{took:?}");
}
