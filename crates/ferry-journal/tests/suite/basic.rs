//! The journal over a memory device: what one session wrote, the next one finds.

use crate::common::{self, Volume, credits, device_len, geometry, options, put};
use ferry_device::{BlockDevice, HookedDevice, MemDevice};
use ferry_env::Env;
use ferry_journal::{Journal, JournalError, Seq};
use ferry_sim::device::{SimDevice, sim_env};
use std::sync::{Arc, mpsc};

#[test]
fn a_fresh_volume_is_empty_and_clean() {
    let volume = Volume::new(1 << 20);
    let (journal, recovered) = volume.open();
    assert!(!recovered.unclean);
    assert_eq!((recovered.contexts, recovered.last), (0, Seq(0)));
    assert_eq!(journal.get(b"nothing").unwrap(), None);
    journal.close().unwrap();
}

#[test]
fn changes_are_visible_at_commit_and_survive_a_clean_close() {
    let volume = Volume::new(1 << 20);
    let (journal, _) = volume.open();
    let mut t = journal.begin(credits(2, 100)).unwrap();
    t.put(b"a", b"1");
    t.put(b"b", b"2");
    assert_eq!(t.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(journal.get(b"a").unwrap(), None, "not before the commit");
    t.commit();
    assert_eq!(journal.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
    journal.close().unwrap();
    drop(journal);
    let (journal, recovered) = volume.open();
    assert!(!recovered.unclean);
    assert_eq!(journal.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(journal.get(b"b").unwrap().as_deref(), Some(&b"2"[..]));
}

#[test]
fn forced_changes_survive_without_a_close() {
    let volume = Volume::new(1 << 20);
    let (journal, _) = volume.open();
    let mut t = journal.begin(credits(1, 100)).unwrap();
    t.put(b"a", b"1");
    let seq = t.commit();
    common::force(&journal, seq).unwrap();
    assert_eq!(journal.durable(), seq);
    drop(journal);
    let (journal, recovered) = volume.open();
    assert!(recovered.unclean);
    assert_eq!((recovered.contexts, recovered.last), (1, seq));
    assert_eq!(journal.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
}

/// Blocks of the log that are not zeros.
fn blocks_in_log(volume: &Volume) -> usize {
    let mut ring = ferry_device::AlignedBuf::zeroed(volume.geo.log_len as usize);
    volume.dev.read(volume.geo.log_offset, &mut ring).unwrap();
    ring.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0)).count()
}

#[test]
fn a_device_that_keeps_what_is_dead_gets_back_the_log_that_the_home_store_has() {
    let geo = geometry(1 << 20, 256);
    let memory: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(device_len(&geo)));
    for (dev, keeps) in [
        (Arc::clone(&memory), false),
        (Arc::new(HookedDevice::new(memory).keeping_what_is_dead()) as Arc<dyn BlockDevice>, true),
    ] {
        let volume = Volume::on(dev, geo, Env::real());
        let mut model = std::collections::BTreeMap::new();
        let mut write = |journal: &Journal, round: u32| {
            for n in 0..150_u32 {
                let (key, value) = (n.to_be_bytes(), (round * 1000 + n).to_be_bytes());
                let seq = put(journal, &key, &value);
                common::force(journal, seq).unwrap();
                model.insert(key.to_vec(), value.to_vec());
            }
            model.clone()
        };
        // More than the log has room for.
        for round in 0..3 {
            let (journal, recovered) = volume.open();
            assert!(!recovered.unclean, "round {round}");
            let model = write(&journal, round);
            common::assert_same(&journal, &model);
            assert!(blocks_in_log(&volume) > 140, "the log is needed");
            journal.close().unwrap();
        }
        // The home store has two states. What the older one lacks stays: the last session's log.
        let found = blocks_in_log(&volume);
        assert!(if keeps { (150..160).contains(&found) } else { found > 250 }, "{found} blocks");
        // Without a close there is what the log has, and nothing older.
        let (journal, _) = volume.open();
        let model = write(&journal, 7);
        drop(journal);
        let (journal, recovered) = volume.open();
        assert!(recovered.unclean && recovered.contexts == 150);
        common::assert_same(&journal, &model);
        journal.close().unwrap();
    }
}

#[test]
fn a_tiny_log_wraps_many_times() {
    let volume = Volume::new(256 * 1024);
    let mut model = std::collections::BTreeMap::new();
    let mut n = 0_u64;
    for round in 0..6 {
        let (journal, recovered) = volume.open();
        assert_eq!(recovered.unclean, round > 0);
        common::assert_same(&journal, &model);
        for _ in 0..600 {
            n += 1;
            let key = format!("key {:03}", n * 7919 % 500).into_bytes();
            let value = vec![n as u8; (n * 31 % 900) as usize];
            let mut t = journal.begin(credits(2, 2000)).unwrap();
            t.put(&key, &value);
            if n.is_multiple_of(5) {
                let deleted = format!("key {:03}", n * 104_729 % 500).into_bytes();
                t.delete(&deleted);
                model.remove(&deleted);
                model.insert(key.clone(), value);
                if key == deleted {
                    model.remove(&key);
                }
            } else {
                model.insert(key, value);
            }
            let seq = t.commit();
            if n.is_multiple_of(3) {
                common::force(&journal, seq).unwrap();
            }
        }
        common::assert_same(&journal, &model);
        common::force(&journal, journal.current()).unwrap();
        let stats = journal.stats();
        assert!(stats.checkpoints > 0, "{stats:?}");
    }
}

/// What a caller that waits for a context has heard.
fn wait_for(journal: &Journal, seq: Seq) -> mpsc::Receiver<Result<(), JournalError>> {
    let (send, receive) = mpsc::channel();
    journal.when_durable(seq, Box::new(move |durable| send.send(durable).unwrap()));
    receive
}

#[test]
fn a_wait_forces_nothing_and_ends_with_the_timers_commit_or_somebody_elses() {
    let geo = geometry(512 * 1024, 64);
    let (env, clock) = sim_env(1);
    let volume = Volume::on(Arc::new(SimDevice::new(device_len(&geo))), geo, env);
    let (journal, _) = volume.open();
    wait_for(&journal, journal.current()).try_recv().expect("nothing is to be waited for").unwrap();
    for forced in [false, true] {
        let seq = put(&journal, b"key", b"value");
        let waits = [wait_for(&journal, seq), wait_for(&journal, Seq(u64::MAX))];
        journal.tick().unwrap();
        assert!(waits.iter().all(|wait| wait.try_recv().is_err()), "not yet time");
        assert_eq!(journal.durable().0, seq.0 - 1);
        if forced {
            common::force(&journal, seq).unwrap();
        } else {
            clock.advance(options(false).commit_interval);
            journal.tick().unwrap();
        }
        assert_eq!(journal.durable(), seq);
        waits.iter().for_each(|wait| wait.try_recv().expect("it is durable").unwrap());
        wait_for(&journal, seq).try_recv().expect("it was durable").unwrap();
    }
    assert_eq!(journal.stats().forces, 1, "no wait forced anything");
    let seq = put(&journal, b"key", b"other");
    let wait = wait_for(&journal, seq);
    journal.close().unwrap();
    wait.try_recv().expect("it is durable").unwrap();
}

#[test]
fn a_wait_ends_with_an_error_if_the_journal_does() {
    let volume = Volume::new(1 << 20);
    let (journal, _) = volume.open();
    let wait = wait_for(&journal, put(&journal, b"key", b"value"));
    drop(journal);
    assert!(wait.try_recv().expect("nobody waits for ever").is_err());
}
