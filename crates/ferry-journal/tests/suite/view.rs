//! Reading: layers, scans of one moment, and sizes at their limits.

use crate::common::{self, SEGMENT, Volume, credits, force, options, put};
use ferry_device::AlignedBuf;
use ferry_journal::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes `n` keys in one go, all with the same value.
fn generation(journal: &Journal, n: u32, value: u64) -> Seq {
    let mut t = journal.begin(credits(n, n * 16)).unwrap();
    for i in 0..n {
        t.put(&[b"g".as_slice(), &i.to_be_bytes()].concat(), &value.to_le_bytes());
    }
    t.commit()
}

/// A scan sees one generation, while others are written, sealed, forced and taken home under it.
#[test]
fn a_scan_sees_one_consistent_state() {
    let volume = Volume::new(1 << 20);
    let (journal, _, _owner) = volume.open_owned(options(true)).unwrap();
    // More than a scan copies, so that layers are frozen under it.
    const KEYS: u32 = 700;
    generation(&journal, KEYS, 0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1..400 {
                let seq = generation(&journal, KEYS, value);
                match value % 5 {
                    0 => force(&journal, seq).unwrap(),
                    1 => journal.checkpoint().unwrap(),
                    _ => {}
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
        let mut scans = 0;
        let mut newest = 0;
        while !stop.load(Ordering::SeqCst) || scans < 20 {
            let mut seen = Vec::new();
            journal
                .scan(b"g", b"h", &mut |_, v| {
                    seen.push(u64::from_le_bytes(v[..].try_into().unwrap()));
                    std::thread::yield_now();
                    true
                })
                .unwrap();
            assert_eq!(seen.len(), KEYS as usize);
            assert!(seen.iter().all(|v| *v == seen[0]), "a mix of generations: {:?}", &seen[..10]);
            assert!(seen[0] >= newest, "and no earlier one than before");
            newest = seen[0];
            scans += 1;
        }
    });
}

#[test]
fn a_scan_merges_all_layers_and_stops_when_told() {
    let volume = Volume::new(1 << 20);
    let (journal, _) = volume.open();
    for (key, value) in [("a", "home"), ("b", "home"), ("c", "home"), ("d", "home")] {
        put(&journal, key.as_bytes(), value.as_bytes());
    }
    journal.checkpoint().unwrap();
    let seq = put(&journal, b"b", b"overlay");
    force(&journal, seq).unwrap();
    let mut t = journal.begin(credits(3, 20)).unwrap();
    t.delete(b"c");
    t.put(b"bb", b"active");
    t.delete(b"nowhere");
    t.commit();
    let scan = |from: &[u8], to: &[u8], most: usize| {
        let mut seen = Vec::new();
        journal
            .scan(from, to, &mut |k, v| {
                seen.push(format!("{}={}", String::from_utf8_lossy(k), String::from_utf8_lossy(v)));
                seen.len() < most
            })
            .unwrap();
        seen
    };
    assert_eq!(scan(b"", b"z", 9), ["a=home", "b=overlay", "bb=active", "d=home"]);
    assert_eq!(scan(b"b", b"d", 9), ["b=overlay", "bb=active"]);
    assert_eq!(scan(b"", b"z", 2), ["a=home", "b=overlay"]);
    assert_eq!(scan(b"z", b"a", 9), [""; 0]);
}

#[test]
fn a_key_changed_again_is_logged_once() {
    let volume = Volume::new(4 << 20);
    let (journal, _) = volume.open();
    for n in 0..10_000_u64 {
        put(&journal, b"the directory's inode", &n.to_le_bytes());
    }
    force(&journal, journal.current()).unwrap();
    let stats = journal.stats();
    assert_eq!((stats.contexts, stats.transactions, stats.log_written_bytes), (1, 10_000, 4096));
    // In spite of a scan that froze a part of the context in between.
    let (bytes, model) = (journal.stats().log_written_bytes, 600_u32);
    for round in 0..4 {
        generation(&journal, model, round);
        journal.scan(b"g", b"h", &mut |_, _| true).unwrap();
    }
    force(&journal, journal.current()).unwrap();
    let written = journal.stats().log_written_bytes - bytes;
    assert_eq!(written, (64 + u64::from(model) * (8 + 5 + 8)).div_ceil(4048) * 4096);
}

#[test]
fn the_largest_transaction_fits_and_one_byte_more_does_not() {
    for log in [256 * 1024, 4 << 20] {
        let volume = Volume::new(log);
        let (journal, _) = volume.open();
        let limit = journal.max_transaction_bytes();
        let bytes = (limit - 24) as u32;
        assert!(matches!(journal.begin(credits(1, bytes + 1)), Err(JournalError::TooLarge { .. })));
        for round in 0..20_u8 {
            let mut t = journal.begin(credits(1, bytes)).unwrap();
            t.put(b"k", &vec![round; bytes as usize - 1]);
            let seq = t.commit();
            if round % 3 == 0 {
                force(&journal, seq).unwrap();
            }
        }
        force(&journal, journal.current()).unwrap();
        drop(journal);
        let (journal, _) = volume.open();
        assert_eq!(journal.get(b"k").unwrap().unwrap()[..], vec![19; bytes as usize - 1][..]);
    }
}

#[test]
fn values_of_odd_sizes_are_read_back_unchanged() {
    let volume = Volume::new(2 << 20);
    let mut model = BTreeMap::new();
    // Around the ends of payloads: one entry alone, and entries one after the other.
    for round in 0..3 {
        let (journal, _) = volume.open();
        for len in (0..40).chain(3900..4100).chain(8050..8120) {
            let key = format!("{len} of round {round}").into_bytes();
            let value: Vec<u8> = (0..len).map(|i| (i * 7 + round) as u8).collect();
            let seq = put(&journal, &key, &value);
            model.insert(key, value);
            if round == 0 || len % 16 == 0 {
                force(&journal, seq).unwrap();
            }
        }
        force(&journal, journal.current()).unwrap();
        drop(journal);
        common::assert_same(&volume.open().0, &model);
    }
}

#[test]
fn many_small_commits_leave_few_layers() {
    let volume = Volume::new(4 << 20);
    let (journal, _) = volume.open();
    for n in 0..500_u32 {
        let seq = put(&journal, &n.to_be_bytes(), b"v");
        force(&journal, seq).unwrap();
        assert!(journal.stats().layers <= 12, "{}", journal.stats().layers);
    }
    assert_eq!(journal.stats().overlay_keys, 500);
}

/// More data than recovery should have to verify: it is flushed before the record is written.
#[test]
fn a_context_with_much_data_flushes_the_data_before_its_record() {
    let volume = Volume::new(4 << 20);
    let (journal, _) = volume.open();
    let offset = volume.geo.segments_offset + 8 * SEGMENT;
    let mut t = journal.begin(credits(40, 4000)).unwrap();
    for n in 0..40_u64 {
        let mut buf = AlignedBuf::zeroed(1 << 20);
        buf.fill(n as u8);
        let buf = Arc::new(buf);
        // A wrong checksum: recovery would cut the context off if it looked.
        t.write_data(
            DataExtent { offset: offset + (n << 20), buf, crc: 1 },
            Box::new(|r| r.unwrap()),
        );
        t.put(&n.to_be_bytes(), b"mapped");
    }
    let seq = t.commit();
    let flushes = journal.stats().flushes;
    force(&journal, seq).unwrap();
    assert_eq!(journal.stats().flushes - flushes, 2);
    drop(journal);
    let (journal, recovered) = volume.open();
    assert_eq!(recovered.last, seq);
    assert_eq!(journal.get(&39_u64.to_be_bytes()).unwrap().as_deref(), Some(&b"mapped"[..]));
}

/// Data that does not match its checksum, in a context that nothing says was durable.
#[test]
fn recovery_ends_before_a_context_whose_data_never_arrived() {
    let volume = Volume::new(1 << 20);
    let (journal, _) = volume.open();
    let offset = volume.geo.segments_offset + 8 * SEGMENT;
    let write = |key: &[u8], n: u64, crc: u32| {
        let mut t = journal.begin(credits(1, 40)).unwrap();
        t.put(key, b"mapped");
        let buf = Arc::new(AlignedBuf::zeroed(8192));
        t.write_data(DataExtent { offset: offset + n * 8192, buf, crc }, Box::new(|r| r.unwrap()));
        let seq = t.commit();
        force(&journal, seq).unwrap();
        seq
    };
    let block = crc32c::crc32c(&[0; 4096]).to_le_bytes();
    let right = crc32c::crc32c(&[block, block].concat());
    let whole = write(b"whole", 0, right);
    write(b"broken", 1, right ^ 1);
    drop(journal);
    let (journal, recovered) = volume.open();
    assert_eq!(recovered.last, whole);
    assert!(journal.get(b"whole").unwrap().is_some());
    assert!(journal.get(b"broken").unwrap().is_none());
}

#[test]
fn the_home_store_shrinks_when_it_is_mostly_empty() {
    let volume = Volume::new(4 << 20);
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let keys = 60_000_u32;
    let write = |value: Option<&[u8]>| {
        for i in (0..keys).step_by(500) {
            let mut t = journal.begin(credits(500, 500 * 220)).unwrap();
            for i in i..i + 500 {
                match value {
                    Some(value) => t.put(&i.to_be_bytes(), value),
                    None => t.delete(&i.to_be_bytes()),
                }
            }
            t.commit();
        }
        journal.checkpoint().unwrap();
    };
    write(Some(&[5; 200]));
    let full = journal.stats().home_bytes;
    assert!(full > u64::from(keys) * 200);
    let before = owner.free.lock().unwrap().len();
    write(None);
    put(&journal, b"the last", b"one");
    journal.close().unwrap();
    let given = owner.free.lock().unwrap().len() - before;
    assert!(given as u64 * SEGMENT > full / 2, "{given} segments given back");
    drop(journal);
    let (journal, recovered) = volume.open();
    assert!(
        recovered.home_segments.len() as u64 * SEGMENT < full / 2,
        "{:?}",
        recovered.home_segments
    );
    let free = owner.free.lock().unwrap();
    assert!(
        recovered.home_segments.iter().all(|s| !free.contains(s)),
        "none is both free and the home store's"
    );
    common::assert_same(&journal, &BTreeMap::from([(b"the last".to_vec(), b"one".to_vec())]));
}
