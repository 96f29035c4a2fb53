//! Many threads on one journal with its background thread: order, durability, waiting for log space.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod common;

use common::{Volume, credits, force, options};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Each thread owns its keys, so that the outcome is known; a tiny log makes them wait for space all the time.
fn many_threads(log_len: u64, threads: u64, rounds: u64, force_every: u64) {
    let volume = Volume::new(log_len);
    let mut options = options(true);
    options.commit_interval = Duration::from_millis(5);
    let (journal, _, owner) = volume.open_owned(options).unwrap();
    let journal = Arc::new(journal);
    let workers: Vec<_> = (0..threads)
        .map(|t| {
            let journal = journal.clone();
            std::thread::spawn(move || {
                let mut model = BTreeMap::new();
                for n in 0..rounds {
                    let key = format!("{t:02} {:03}", n * 7919 % 61).into_bytes();
                    let value = vec![n as u8; (n * 131 % 700) as usize];
                    let mut tx = journal.begin(credits(2, 1600)).unwrap();
                    assert_eq!(tx.get(&key).unwrap().as_deref(), model.get(&key).map(|v: &Vec<u8>| &v[..]));
                    tx.put(&key, &value);
                    model.insert(key, value);
                    if n.is_multiple_of(7) {
                        let gone = format!("{t:02} {:03}", n * 31 % 61).into_bytes();
                        tx.delete(&gone);
                        model.remove(&gone);
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
    assert_eq!(stats.space.wakes, stats.space.grants, "every wake-up brought a grant");
    journal.force_stamped().unwrap();
    assert_eq!(owner.stamped.load(std::sync::atomic::Ordering::SeqCst), journal.stamped().0);
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
    many_threads(4 << 20, 8, 2000, 3);
}

#[test]
fn threads_wait_for_a_tiny_log() {
    many_threads(256 * 1024, 16, 500, 50);
}

#[test]
fn threads_never_force() {
    many_threads(512 * 1024, 4, 3000, u64::MAX);
}
