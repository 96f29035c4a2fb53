//! A home store that is mostly free is replaced by a small one: while it is read, whenever power is
//! lost, and where there is no room.

use crate::common::{self, Volume, assert_same, device_len, force, geometry, options, put};
use ferry_device::{AlignedBuf, BlockDevice, HookedDevice, MemDevice, Op};
use ferry_env::Env;
use ferry_journal::*;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn name(i: u32) -> Vec<u8> {
    format!("key {i:06}").into_bytes()
}

fn set(journal: &Journal, model: &mut Model, i: u32, len: usize) {
    let value = vec![i as u8; len];
    put(journal, &name(i), &value);
    model.insert(name(i), value);
}

fn remove(journal: &Journal, model: &mut Model, i: u32) {
    let mut t = journal.begin(Credits { urgent: true, ..common::credits(1, 16) }).unwrap();
    t.delete(&name(i));
    t.commit();
    model.remove(&name(i));
}

/// Fills the home store and removes all but one key in `keep`; a checkpoint is still to come.
fn emptied(journal: &Journal, keys: u32, keep: u32) -> Model {
    let mut model = Model::new();
    for i in 0..keys {
        set(journal, &mut model, i, 1200);
    }
    journal.checkpoint().unwrap();
    (0..keys).filter(|i| i % keep != 0).for_each(|i| remove(journal, &mut model, i));
    model
}

#[test]
fn removed_keys_give_their_segments_back_while_readers_remain() {
    let geo = geometry(16 << 20, 256);
    let volume = Volume::on(Arc::new(MemDevice::new(device_len(&geo))), geo, Env::real());
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let segments = || owner.free.lock().unwrap().len();
    for round in 0..3 {
        let mut model = emptied(&journal, 4000, 500);
        let (before, free) = (journal.stats().home_bytes, segments());
        assert!(before > 4 << 20, "round {round}: {before}");
        // A reader keeps what it reads.
        let (mut seen, mut during) = (Vec::new(), 0);
        journal
            .scan(b"", &[0xff; 8], &mut |key, value| {
                if seen.is_empty() {
                    journal.checkpoint().unwrap();
                    during = segments();
                }
                seen.push((key.to_vec(), value.to_vec()));
                true
            })
            .unwrap();
        assert!(seen.into_iter().eq(model.clone()), "round {round}");
        assert!(during <= free, "round {round}: the segments of what is being read are not free");
        let after = journal.stats().home_bytes;
        assert!(after * 8 < before, "round {round}: {before} bytes before, {after} after");
        set(&journal, &mut model, 1, 10);
        journal.checkpoint().unwrap();
        assert!(
            segments() > free + 30,
            "round {round}: {free} segments were free, {} are",
            segments()
        );
        assert_same(&journal, &model);
        (0..4000).for_each(|i| remove(&journal, &mut model, i));
        journal.checkpoint().unwrap();
    }
    journal.close().unwrap();
    drop(journal);
    let (journal, recovered) = volume.open();
    assert!(!recovered.unclean && recovered.home_segments.len() < 10, "{recovered:?}");
    assert_same(&journal, &Model::new());
}

/// It stays as it is where nothing is free, and shrinks when something is.
#[test]
fn the_home_store_stays_if_a_new_one_does_not_fit() {
    let geo = geometry(16 << 20, 256);
    let volume = Volume::on(Arc::new(MemDevice::new(device_len(&geo))), geo, Env::real());
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let mut model = emptied(&journal, 4000, 500);
    let before = journal.stats().home_bytes;
    let mut hidden = std::mem::take(&mut *owner.free.lock().unwrap());
    owner.free.lock().unwrap().extend(hidden.split_off(hidden.len() - 3));
    journal.checkpoint().unwrap();
    assert_eq!(journal.stats().home_bytes, before);
    assert_same(&journal, &model);
    owner.free.lock().unwrap().extend(hidden);
    set(&journal, &mut model, 1, 10);
    journal.checkpoint().unwrap();
    assert!(journal.stats().home_bytes * 8 < before);
    assert_same(&journal, &model);
}

/// Power is lost at every event of a checkpoint, or of an unmount, that makes the home store small.
fn crash_everywhere(closing: bool) {
    let geo = geometry(2 << 20, 64);
    let (env, _) = sim_env(5);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    device.scribble(0, device_len(&geo), &mut SimRng::new(6));
    let volume = Volume::on(device.clone(), geo, env);
    let (journal, _, _owner) = volume.open_owned(options(false)).unwrap();
    let model = emptied(&journal, 700, 50);
    journal.force_durable_point().unwrap();
    let before = journal.stats().home_bytes;
    device.restart_trace();
    if closing {
        journal.close().unwrap();
    } else {
        journal.checkpoint().unwrap();
    }
    assert!(journal.stats().home_bytes * 2 < before, "it became small");
    let (mut old, mut new) = (0, 0);
    for point in 0..=device.trace_len() {
        let left: Arc<dyn BlockDevice> =
            Arc::new(device.crash_image(point, &mut SimRng::new(point as u64)));
        let (env, _) = sim_env(point as u64);
        let after = Volume { dev: left, geo, env };
        let context = format!("closing {closing}, event {point}");
        let (journal, _, owner) =
            after.open_owned(options(false)).unwrap_or_else(|e| panic!("{context}: {e}"));
        assert_same(&journal, &model);
        if journal.stats().home_bytes == before {
            old += 1
        } else {
            new += 1
        }
        // Neither slot is left behind: it would name what may be used for something else.
        let [first, second] = inspect::home_map(&after.dev, &geo);
        assert_eq!(first.unwrap(), second.unwrap(), "{context}");
        let mut bad = Vec::new();
        assert!(journal.verify_home(&mut |offset| bad.push(offset), &mut |_| true));
        assert_eq!(bad, [], "{context}");
        // It goes on from there, in what is free then.
        let mut model = model.clone();
        (0..100).for_each(|i| set(&journal, &mut model, i, 300));
        journal.checkpoint().unwrap_or_else(|e| panic!("{context}: {e}"));
        assert!(!owner.failed.load(std::sync::atomic::Ordering::SeqCst));
        drop(journal);
        let (journal, _) = after.open();
        assert_same(&journal, &model);
    }
    assert!(old > 10 && new > 0, "{old} saw the old one, {new} the new one");
}

#[test]
fn power_may_be_lost_at_any_point_of_a_checkpoint() {
    crash_everywhere(false);
}

#[test]
fn power_may_be_lost_at_any_point_of_an_unmount() {
    crash_everywhere(true);
}

/// A device whose next read of a segment, once it is armed, waits until it is let go.
struct Stalling {
    armed: Arc<AtomicBool>,
    reached: Receiver<()>,
    go: Sender<()>,
}

fn stalling() -> (Stalling, Volume) {
    let geo = geometry(16 << 20, 256);
    let device = HookedDevice::new(Arc::new(MemDevice::new(device_len(&geo))));
    let armed = Arc::new(AtomicBool::new(false));
    let ((reach, reached), (go, goes)) = (channel(), channel());
    let (stalls, goes) = (Arc::clone(&armed), Mutex::new(goes));
    device.set_hook(move |request, serve| {
        let segment = request.op == Op::Read && request.offset >= geo.segments_offset;
        if segment && stalls.swap(false, Ordering::SeqCst) {
            reach.send(()).unwrap();
            goes.lock().unwrap().recv().unwrap();
        }
        serve()
    });
    (Stalling { armed, reached, go }, Volume::on(Arc::new(device), geo, Env::real()))
}

/// Takes log space until there is little left.
fn press(journal: &Journal) -> Vec<Transaction<'_>> {
    let take =
        || journal.try_begin(Credits { urgent: true, ..common::credits(1, 100_000) }).unwrap();
    std::iter::from_fn(take).collect()
}

#[test]
fn a_renewal_of_the_home_store_gives_way_when_the_log_is_short() {
    let (device, volume) = stalling();
    let small = JournalOptions { home_cache_bytes: 64 << 10, ..options(false) };
    let (journal, _, owner) = volume.open_owned(small).unwrap();
    let mut model = emptied(&journal, 4000, 8);
    let large = journal.stats().home_bytes;
    // While it copies the log becomes short of space.
    device.armed.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| journal.checkpoint());
        device.reached.recv().unwrap();
        let taken = press(&journal);
        assert!(taken.len() > 10);
        device.go.send(()).unwrap();
        checkpoint.join().unwrap().unwrap();
    });
    assert!(journal.stats().home_bytes >= large, "the copy went on");
    let retained = journal.stats().home_bytes / home_unit_bytes(volume.geo.segment_len);
    let free = owner.free.lock().unwrap().len() as u64;
    // Some are kept for the next checkpoint; a copy takes seventeen.
    assert!(
        free + retained + 4 >= u64::from(volume.geo.segment_count),
        "{free} are free, the store has {retained}"
    );
    assert_same(&journal, &model);
    // A checkpoint that makes room in the log does nothing else.
    set(&journal, &mut model, 3, 10);
    force(&journal, journal.current()).unwrap();
    let (taken, checkpoints) = (press(&journal), journal.stats().checkpoints);
    journal.tick().unwrap();
    assert_eq!(journal.stats().checkpoints, checkpoints + 1);
    assert!(journal.stats().home_bytes >= large, "it was copied while the log was short of space");
    drop(taken);
    // A caller that needs room on the volume has the store copied, whatever else goes on.
    set(&journal, &mut model, 3, 11);
    let taken = press(&journal);
    assert!(journal.make_room().unwrap());
    drop(taken);
    assert!(
        journal.stats().home_bytes < large / 2,
        "{} bytes of {large}",
        journal.stats().home_bytes
    );
    assert_same(&journal, &model);
    journal.close().unwrap();
}

#[test]
fn changes_during_a_long_checkpoint_become_durable_within_the_interval() {
    let (device, volume) = stalling();
    let commit_interval = Duration::from_millis(20);
    let small = JournalOptions { home_cache_bytes: 64 << 10, commit_interval, ..options(true) };
    let (journal, ..) = volume.open_owned(small).unwrap();
    let mut model = Model::new();
    (0..2000).for_each(|i| set(&journal, &mut model, i, 1200));
    journal.checkpoint().unwrap();
    // The journal's own thread makes a checkpoint when nothing happens, and stays in it.
    device.armed.store(true, Ordering::SeqCst);
    (0..2000).step_by(100).for_each(|i| set(&journal, &mut model, i, 1000));
    device.reached.recv().unwrap();
    let begun = Instant::now();
    let mut durable = true;
    for i in 0..3 {
        let key = name(3000 + i);
        let seq = put(&journal, &key, b"new");
        model.insert(key, b"new".to_vec());
        while durable && journal.durable() < seq {
            durable = begun.elapsed() < Duration::from_secs(20);
            std::thread::yield_now();
        }
    }
    device.go.send(()).unwrap();
    assert!(durable, "nobody sealed what was collected");
    assert_same(&journal, &model);
    journal.close().unwrap();
}

/// Its place is taken while it is verified, and what was free is used for something else: that is
/// no damage. What is damaged of the new one is found.
#[test]
fn a_home_store_that_is_renewed_while_it_is_verified_is_not_damaged() {
    const BLOCK: usize = 4096;
    let geo = geometry(16 << 20, 256);
    for spoiled in [false, true] {
        let volume = Volume::on(Arc::new(MemDevice::new(device_len(&geo))), geo, Env::real());
        let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
        let mut model = emptied(&journal, 4000, 500);
        let offset = |segment: u32| geo.segments_offset + u64::from(segment) * geo.segment_len;
        let garbage = |at: u64, len: u64| {
            let mut bytes = AlignedBuf::zeroed(len as usize);
            SimRng::new(at).fill(&mut bytes);
            volume.dev.write(at, &bytes).unwrap();
        };
        let before = journal.stats().home_bytes;
        let (mut found, mut steps, mut bad) = (Vec::new(), 0, None);
        let whole = journal.verify_home(&mut |offset| found.push(offset.offset), &mut |_| {
            steps += 1;
            if steps == 5 {
                journal.checkpoint().unwrap();
                set(&journal, &mut model, 1, 10);
                journal.checkpoint().unwrap();
                assert!(journal.stats().home_bytes * 8 < before, "it was renewed");
                for segment in owner.free.lock().unwrap().iter() {
                    garbage(offset(*segment), geo.segment_len);
                }
                let [map, _] = inspect::home_map(&volume.dev, &geo);
                let first = offset(map.unwrap().units[0].unwrap());
                bad = spoiled.then_some(first);
                bad.into_iter().for_each(|at| garbage(at, BLOCK as u64));
            }
            true
        });
        assert!(whole && steps > 5);
        assert_eq!(found, bad.into_iter().collect::<Vec<_>>());
        assert_same(&journal, &model);
        let free = owner.free.lock().unwrap().len();
        journal.checkpoint().unwrap();
        set(&journal, &mut model, 1, 11);
        journal.checkpoint().unwrap();
        assert!(owner.free.lock().unwrap().len() > free, "nobody reads the old one any more");
        journal.close().unwrap();
    }
}
