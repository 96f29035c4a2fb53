//! What recovery does with a log and a home map that are not as they were written.

use crate::common::{self, Volume, device_len, force, geometry, options, put};
use ferry_device::{AlignedBuf, BlockDevice};
use ferry_journal::*;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::sync::Arc;

const LOG: u64 = 512 * 1024;

fn block(volume: &Volume, offset: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(4096);
    volume.dev.read(offset, &mut buf).unwrap();
    buf
}

/// Offset of the log's block with this position.
fn log_block(volume: &Volume, position: u64) -> u64 {
    volume.geo.log_offset + position * 4096
}

fn damage(volume: &Volume, offset: u64, at: usize) {
    let mut buf = block(volume, offset);
    buf[at] ^= 0x40;
    volume.dev.write(offset, &buf).unwrap();
}

/// Opens, commits and forces `n` contexts of one block each, and goes away without a close. The
/// first block of the log is taken by the durable point that opening writes; context `i` is in
/// block `i`.
fn contexts(volume: &Volume, n: u64) {
    let (journal, recovered) = volume.open();
    for i in recovered.last.0 + 1..=recovered.last.0 + n {
        let seq = put(&journal, b"newest", &i.to_le_bytes());
        assert_eq!(seq, Seq(i));
        force(&journal, seq).unwrap();
    }
}

fn newest(journal: &Journal) -> Option<u64> {
    journal.get(b"newest").unwrap().map(|v| u64::from_le_bytes(v[..].try_into().unwrap()))
}

#[test]
fn damage_before_the_durable_point_is_reported_with_its_offset() {
    for (position, at) in [(1, 0), (1, 30), (2, 100), (3, 130), (0, 3)] {
        let volume = Volume::new(LOG);
        contexts(&volume, 4);
        damage(&volume, log_block(&volume, position), at);
        match volume.open_with(options(false)) {
            Err(JournalError::Damaged { what: "log", offset, .. }) => {
                assert_eq!(offset, log_block(&volume, position))
            }
            other => panic!("block {position}: {:?}", other.map(|(_, r)| r)),
        }
        // It stays so: nothing was written over it.
        assert!(volume.open_with(options(false)).is_err());
    }
}

#[test]
fn the_newest_record_torn_is_the_end_of_the_log() {
    for sectors in 0..8_u8 {
        let volume = Volume::new(LOG);
        contexts(&volume, 3);
        let mut buf = block(&volume, log_block(&volume, 3));
        let end = usize::from(sectors) * 512;
        // Random bytes of a stranger where the record's end should be.
        SimRng::new(u64::from(sectors)).fill(&mut buf[end..]);
        volume.dev.write(log_block(&volume, 3), &buf).unwrap();
        if sectors == 0 {
            // No block of the log ever began so: nothing was acknowledged, but no crash does this.
            let opened = volume.open_with(options(false));
            assert!(matches!(opened, Err(JournalError::Damaged { what: "log", .. })));
            volume.dev.write(log_block(&volume, 3), &AlignedBuf::zeroed(4096)).unwrap();
        }
        let (journal, recovered) = volume.open();
        // A record of one sector's length is whole if that sector is.
        let expected = if sectors == 0 { 2 } else { 3 };
        assert_eq!((recovered.last.0, newest(&journal)), (expected, Some(expected)));
        let seq = put(&journal, b"after", b"");
        force(&journal, seq).unwrap();
        assert_eq!(seq.0, expected + 1);
    }
}

#[test]
fn damage_before_the_durable_point_is_an_error() {
    let volume = Volume::new(LOG);
    let (journal, _) = volume.open();
    put(&journal, b"newest", &1_u64.to_le_bytes());
    journal.force_durable_point().unwrap();
    assert_eq!(journal.durable_point(), Seq(1));
    drop(journal);
    damage(&volume, log_block(&volume, 1), 120);
    assert!(matches!(
        volume.open_with(options(false)),
        Err(JournalError::Damaged { what: "log", .. })
    ));
}

#[test]
fn an_idle_log_gets_a_durable_point() {
    let geo = geometry(LOG, 64);
    let (env, clock) = sim_env(1);
    let volume = Volume::on(Arc::new(SimDevice::new(device_len(&geo))), geo, env);
    let (journal, _) = volume.open();
    put(&journal, b"newest", &1_u64.to_le_bytes());
    journal.tick().unwrap();
    assert_eq!(journal.durable(), Seq(0), "not yet time");
    clock.advance(options(false).commit_interval);
    journal.tick().unwrap();
    assert_eq!((journal.durable(), journal.durable_point()), (Seq(1), Seq(0)));
    journal.tick().unwrap();
    assert_eq!(journal.durable_point(), Seq(1));
    assert!(journal.stats().log_used_bytes > 0);
    clock.advance(options(false).commit_interval * 10);
    journal.tick().unwrap();
    assert_eq!(journal.stats().log_used_bytes, 0, "and then checkpointed");
}

/// A record of an earlier history where the log goes on: same volume, same position, next number.
#[test]
fn a_stale_record_is_never_replayed() {
    let volume = Volume::new(LOG);
    contexts(&volume, 1);
    let blocks = LOG / 4096;
    let before: Vec<_> = (0..blocks).map(|p| block(&volume, log_block(&volume, p))).collect();
    contexts(&volume, 3);
    // Blocks 2 (durable point), 3, 4, 5: contexts 2, 3, 4 of the first history.
    let stale: Vec<_> = (2..6).map(|p| block(&volume, log_block(&volume, p))).collect();
    for (p, buf) in (0..).zip(&before) {
        volume.dev.write(log_block(&volume, p), buf).unwrap();
    }
    contexts(&volume, 2);
    // Context 4 of the first history right behind context 3 of the second.
    volume.dev.write(log_block(&volume, 5), &stale[3]).unwrap();
    let (journal, recovered) = volume.open();
    assert_eq!((recovered.last, newest(&journal)), (Seq(3), Some(3)));
    drop(journal);
    // Context 3 of the first history in place of that of the second: its durable point says nothing
    // of what is missing.
    let second = block(&volume, log_block(&volume, 4));
    volume.dev.write(log_block(&volume, 5), &AlignedBuf::zeroed(4096)).unwrap();
    volume.dev.write(log_block(&volume, 4), &stale[2]).unwrap();
    let (journal, recovered) = volume.open();
    assert_eq!((recovered.last, newest(&journal)), (Seq(2), Some(2)));
    drop((journal, second));
}

/// Blocks of the cycle before, and of another volume, where the log goes on.
#[test]
fn blocks_of_another_cycle_or_volume_are_not_the_log() {
    let volume = Volume::new(256 * 1024);
    let mut last = 0;
    // Three times round, so that every block holds a whole record of the cycle before.
    while last < 3 * 64 {
        contexts(&volume, 40);
        let (journal, _) = volume.open();
        journal.checkpoint().unwrap();
        last = journal.durable().0;
    }
    contexts(&volume, 2);
    let (journal, recovered) = volume.open();
    assert_eq!((recovered.last.0, newest(&journal)), (last + 2, Some(last + 2)));
    drop(journal);

    let other = Volume::new(256 * 1024);
    let geo = Geometry { volume_id: *b"another volume! ", ..other.geo };
    let other = Volume { geo, ..other };
    Journal::format(&other.dev, &geo, &[0, 1], &other.env).unwrap();
    for p in 0..64 {
        other.dev.write(log_block(&other, p), &block(&volume, log_block(&volume, p))).unwrap();
    }
    let (journal, recovered) = other.open();
    assert_eq!((recovered.contexts, recovered.unclean, newest(&journal)), (0, false, None));
}

#[test]
fn either_home_map_may_be_lost_but_not_both() {
    let volume = Volume::new(LOG);
    let (journal, _) = volume.open();
    for i in 0..3000_u32 {
        put(&journal, &i.to_be_bytes(), &[i as u8; 400]);
    }
    journal.close().unwrap();
    drop(journal);
    let slot = |n: usize| volume.geo.home_map_offsets[n];
    for n in 0..2 {
        for at in [10, 4096 + 5] {
            let offset = slot(n) + at / 4096 * 4096;
            damage(&volume, offset, (at % 4096) as usize);
            let (journal, _) = volume.open();
            assert_eq!(
                journal.get(&7_u32.to_be_bytes()).unwrap().as_deref(),
                Some(&[7_u8; 400][..])
            );
            // A change brings the lost copy back.
            put(&journal, b"more", &[1; 3000]);
            journal.close().unwrap();
            drop(journal);
            damage(&volume, slot(1 - n), 20);
            assert!(volume.open_with(options(false)).is_ok(), "the repaired copy stands alone");
        }
    }
    damage(&volume, slot(0), 20);
    damage(&volume, slot(1), 20);
    assert!(matches!(
        volume.open_with(options(false)),
        Err(JournalError::Damaged { what: "home map", .. })
    ));
}

#[test]
fn a_crash_within_format_leaves_an_error_or_an_empty_journal() {
    let geo = geometry(256 * 1024, 16);
    let (env, _) = sim_env(7);
    let mut rng = SimRng::new(7);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    device.scribble(0, device_len(&geo), &mut rng);
    device.restart_trace();
    let dev: Arc<dyn BlockDevice> = device.clone();
    Journal::format(&dev, &geo, &[0, 1], &env).unwrap();
    let mut opened = 0;
    for point in 0..=device.trace_len() {
        let dev = Arc::new(device.crash_image(point, &mut rng));
        let volume = Volume { dev, geo, env: env.clone() };
        if let Ok((journal, _)) = volume.open_with(options(false)) {
            opened += 1;
            common::assert_same(&journal, &std::collections::BTreeMap::new());
        }
    }
    assert!(opened > 0, "at the latest at the end");
}

/// Any byte of the log, wrong: an error, or a prefix, but never something that was not committed.
#[test]
fn any_wrong_byte_in_the_log_leaves_a_prefix_or_an_error() {
    let volume = Volume::new(256 * 1024);
    contexts(&volume, 6);
    let whole: Vec<_> = (0..8).map(|p| block(&volume, log_block(&volume, p))).collect();
    let mut rng = SimRng::new(11);
    let mut refused = 0;
    for _ in 0..300 {
        for (p, buf) in (0..).zip(&whole) {
            volume.dev.write(log_block(&volume, p), buf).unwrap();
        }
        let (position, at) = (rng.below(8), rng.index(240));
        damage(&volume, log_block(&volume, position), at);
        let mut options = options(false);
        options.read_only = true;
        match volume.open_with(options) {
            Ok((journal, recovered)) => assert_eq!(newest(&journal).unwrap_or(0), recovered.last.0),
            Err(JournalError::Damaged { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 50, "most damage lies before a durable point: {refused}");
}
