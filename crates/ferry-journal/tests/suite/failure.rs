//! Errors of the device, volumes without space, and the end of the journal's life.

use crate::common::{self, Owner, Volume, credits, device_len, force, geometry, options, put};
use ferry_device::AlignedBuf;
use ferry_journal::*;
use ferry_sim::device::{Fault, Op, SimDevice, sim_env};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

const LOG: u64 = 512 * 1024;
const EIO: i32 = 5;

fn sim_volume() -> (Volume, Arc<SimDevice>) {
    let geo = geometry(LOG, 64);
    let (env, _) = sim_env(1);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    (Volume::on(device.clone(), geo, env), device)
}

fn fault(op: Op, after: u64) -> Fault {
    Fault { op, after, errno: EIO, sticky: true }
}

/// The journal is read-only, says so, and still reads.
fn assert_stopped(journal: &Journal, owner: &Owner) {
    assert!(owner.failed.load(Ordering::SeqCst), "the owner was told");
    assert!(matches!(journal.begin(credits(1, 10)), Err(JournalError::ReadOnly(_))));
    assert!(journal.force_durable_point().is_err());
    assert!(journal.checkpoint().is_err());
    assert_eq!(journal.get(b"before").unwrap().as_deref(), Some(&b"x"[..]));
    let mut seen = 0;
    journal
        .scan(b"", b"\xff", &mut |_, _| {
            seen += 1;
            true
        })
        .unwrap();
    assert!(seen >= 1);
}

fn reopened_with(volume: &Volume, device: &SimDevice, key: &[u8]) -> Option<Value> {
    device.heal();
    let (journal, _) = volume.open();
    assert_eq!(journal.get(b"before").unwrap().as_deref(), Some(&b"x"[..]));
    let seq = put(&journal, b"and", b"on");
    force(&journal, seq).unwrap();
    journal.get(key).unwrap()
}

#[test]
fn a_failed_log_write_or_flush_stops_the_journal() {
    for op in [Op::Write, Op::Flush] {
        let (volume, device) = sim_volume();
        let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
        let seq = put(&journal, b"before", b"x");
        force(&journal, seq).unwrap();
        let mut open = journal.begin(credits(1, 10)).unwrap();
        device.inject(fault(op, 0));
        let seq = put(&journal, b"lost", b"y");
        assert!(matches!(force(&journal, seq), Err(JournalError::Io { what: "log", .. })));
        assert_eq!(journal.durable().0, seq.0 - 1);
        assert!(force(&journal, Seq(seq.0 - 1)).is_ok(), "what was durable stays so");
        open.put(b"late", b"z");
        let late = open.commit();
        assert!(force(&journal, late).is_err());
        assert_stopped(&journal, &owner);
        assert!(journal.close().is_err());
        drop(journal);
        assert_eq!(reopened_with(&volume, &device, b"late"), None, "it never reached the log");
    }
}

#[test]
fn a_failed_data_write_stops_the_journal_once_its_record_is_written() {
    let (volume, device) = sim_volume();
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let seq = put(&journal, b"before", b"x");
    force(&journal, seq).unwrap();
    let offset = volume.geo.segments_offset + 40 * volume.geo.segment_len;
    let write = |key: &[u8], commit: bool| {
        let mut t = journal.begin(credits(1, 10)).unwrap();
        t.put(key, b"y");
        let buf = Arc::new(AlignedBuf::zeroed(4096));
        let crc = crc32c::crc32c(&crc32c::crc32c(&buf).to_le_bytes());
        let (send, receive) = mpsc::channel();
        t.write_data(DataExtent { offset, buf, crc }, Box::new(move |r| send.send(r).unwrap()));
        let seq = if commit { Some(t.commit()) } else { None };
        (seq, receive.recv().unwrap())
    };
    device.inject(Fault { sticky: false, ..fault(Op::Write, 0) });
    let (_, written) = write(b"forgotten", false);
    assert!(matches!(written, Err(JournalError::Io { what: "data", .. })));
    let (seq, written) = write(b"fine", true);
    assert!(written.is_ok());
    force(&journal, seq.unwrap()).unwrap();
    device.inject(Fault { sticky: false, ..fault(Op::Write, 0) });
    let (seq, written) = write(b"lost", true);
    assert!(written.is_err());
    assert!(matches!(force(&journal, seq.unwrap()), Err(JournalError::Io { what: "data", .. })));
    assert_stopped(&journal, &owner);
    drop(journal);
    reopened_with(&volume, &device, b"fine").unwrap();
}

#[test]
fn a_failed_checkpoint_stops_the_journal_and_reading_goes_on() {
    for (op, after) in
        [(Op::Write, 0), (Op::Write, 1), (Op::Flush, 0), (Op::Flush, 1), (Op::Read, 0)]
    {
        let (volume, device) = sim_volume();
        let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
        put(&journal, b"before", b"x");
        journal.checkpoint().unwrap();
        for i in 0..2000_u32 {
            put(&journal, &i.to_be_bytes(), &[1; 60]);
        }
        let seq = put(&journal, b"newer", b"z");
        force(&journal, seq).unwrap();
        device.inject(fault(op, after));
        let failed = journal.checkpoint();
        device.heal();
        if op == Op::Read && failed.is_ok() {
            continue; // All pages were in its cache.
        }
        assert!(failed.is_err(), "{op:?} {after}");
        assert_stopped(&journal, &owner);
        assert_eq!(journal.get(b"newer").unwrap().as_deref(), Some(&b"z"[..]));
        drop(journal);
        reopened_with(&volume, &device, b"newer").unwrap();
    }
}

#[test]
fn a_checkpoint_without_segments_fails_and_can_be_repeated() {
    let (volume, _device) = sim_volume();
    let (journal, _, owner) = volume.open_owned(options(false)).unwrap();
    let all = std::mem::take(&mut *owner.free.lock().unwrap());
    put(&journal, b"before", b"x");
    let mut stored = BTreeMap::from([(b"before".to_vec(), b"x".to_vec())]);
    let mut refused = false;
    for i in 0..3000_u32 {
        let Ok(mut t) = journal.begin(credits(1, 2000)) else {
            refused = true;
            break;
        };
        let value = vec![i as u8; 1500];
        t.put(&i.to_be_bytes(), &value);
        t.commit();
        stored.insert(i.to_be_bytes().to_vec(), value);
    }
    assert!(refused, "the home store cannot take it all");
    assert!(matches!(journal.checkpoint(), Err(JournalError::NoSpace)));
    assert!(!owner.failed.load(Ordering::SeqCst), "no space is not a failure");
    common::assert_same(&journal, &stored);
    *owner.free.lock().unwrap() = all;
    journal.checkpoint().unwrap();
    common::assert_same(&journal, &stored);
    journal.close().unwrap();
    drop(journal);
    common::assert_same(&volume.open().0, &stored);
}

#[test]
fn a_read_only_journal_writes_nothing() {
    let (volume, device) = sim_volume();
    let (journal, _) = volume.open();
    let mut model = BTreeMap::new();
    for i in 0..500_u32 {
        put(&journal, &i.to_be_bytes(), b"v");
        model.insert(i.to_be_bytes().to_vec(), b"v".to_vec());
    }
    journal.checkpoint().unwrap();
    let seq = put(&journal, b"later", b"w");
    model.insert(b"later".to_vec(), b"w".to_vec());
    force(&journal, seq).unwrap();
    // As a crash would leave it: the database below is not closed either.
    let image =
        Arc::new(device.crash_image(device.trace_len(), &mut ferry_sim::device::SimRng::new(1)));
    drop(journal);
    let volume = Volume { dev: image.clone(), ..volume };
    let mut options = options(false);
    options.read_only = true;
    let (journal, recovered) = volume.open_with(options).unwrap();
    assert!(recovered.unclean && recovered.contexts > 0);
    common::assert_same(&journal, &model);
    assert!(matches!(journal.begin(credits(1, 1)), Err(JournalError::ReadOnly(_))));
    journal.force_durable_point().unwrap();
    journal.close().unwrap();
    drop(journal);
    assert_eq!(image.trace_len(), 0, "nothing was written, flushed or discarded");
}

#[test]
fn a_closed_journal_refuses_changes_and_a_second_close_does_nothing() {
    let (volume, _) = sim_volume();
    let (journal, _) = volume.open();
    put(&journal, b"k", b"v");
    journal.close().unwrap();
    journal.close().unwrap();
    assert!(matches!(journal.begin(credits(1, 1)), Err(JournalError::Closed)));
    assert!(matches!(journal.get(b"k"), Err(JournalError::Closed)));
}

#[test]
fn callers_that_wait_for_space_get_the_error_of_a_failure() {
    let volume = Volume::new(256 * 1024);
    let (journal, _, _owner) = volume.open_owned(options(true)).unwrap();
    let limit = journal.max_transaction_bytes() as u32;
    // All space is in transactions that nobody commits, so only the end can end the waits.
    let mut open = Vec::new();
    while journal.stats().log_free_bytes > 100 * 1024 {
        open.push(journal.begin(credits(0, limit)).unwrap());
    }
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut more = Vec::new();
            loop {
                match journal.begin(credits(0, limit)) {
                    Ok(t) => more.push(t),
                    Err(e) => return e,
                }
            }
        });
        while journal.stats().space.waits == 0 {
            std::thread::yield_now();
        }
        journal.close().unwrap();
        assert!(matches!(waiter.join().unwrap(), JournalError::Closed));
    });
}
