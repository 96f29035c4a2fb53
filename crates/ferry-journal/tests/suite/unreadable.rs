//! Blocks that the device cannot read: fatal only where the log's chain leads to them, and never
//! taken for its end.

use crate::common::{Volume, credits, device_len, force, geometry, options, put};
use ferry_device::{AlignedBuf, BlockDevice, HookedDevice, MemDevice};
use ferry_env::Env;
use ferry_journal::*;
use std::sync::Arc;

const LOG: u64 = 256 * 1024;
const BLOCKS: u64 = LOG / 4096;

/// A volume, and its device's bad blocks.
fn volume() -> (Volume, Arc<HookedDevice>) {
    let geo = geometry(LOG, 64);
    let bad = Arc::new(HookedDevice::new(Arc::new(MemDevice::new(device_len(&geo)))));
    (Volume::on(bad.clone(), geo, Env::real()), bad)
}

/// A copy of the volume as it is, with a device whose blocks are all good.
fn copy(volume: &Volume) -> (Volume, Arc<HookedDevice>) {
    let memory = Arc::new(MemDevice::new(volume.dev.capacity()));
    let mut chunk = AlignedBuf::zeroed(256 * 1024);
    for at in (0..volume.dev.capacity()).step_by(chunk.len()) {
        volume.dev.read(at, &mut chunk).unwrap();
        memory.write(at, &chunk).unwrap();
    }
    let bad = Arc::new(HookedDevice::new(memory));
    (Volume { dev: bad.clone(), geo: volume.geo, env: volume.env.clone() }, bad)
}

fn log_block(volume: &Volume, position: u64) -> u64 {
    volume.geo.log_offset + position % BLOCKS * 4096
}

fn newest(journal: &Journal) -> Option<u64> {
    journal.get(b"newest").unwrap().map(|v| u64::from_le_bytes(v[..].try_into().unwrap()))
}

/// Commits and forces contexts up to `n` of one block each, and goes away without a close. Opening
/// takes the first block.
fn contexts(volume: &Volume, n: u64) {
    let (journal, recovered) = volume.open();
    for i in recovered.last.0 + 1..=n {
        let seq = put(&journal, b"newest", &i.to_le_bytes());
        force(&journal, seq).unwrap();
    }
}

#[test]
fn no_block_of_a_log_at_rest_is_needed() {
    let (whole, _) = volume();
    contexts(&whole, 5);
    whole.open().0.close().unwrap();
    for position in 0..BLOCKS {
        for heals in [false, true] {
            let (volume, bad) = copy(&whole);
            bad.set_unreadable([log_block(&volume, position)]);
            if heals {
                bad.heal_by_writing();
            }
            let read_only = JournalOptions { read_only: true, ..options(false) };
            assert_eq!(newest(&volume.open_with(read_only).unwrap().0), Some(5), "{position}");
            let (journal, recovered) = volume.open();
            assert_eq!((newest(&journal), recovered.unclean), (Some(5), false), "{position}");
            let seq = put(&journal, b"newest", &6_u64.to_le_bytes());
            force(&journal, seq).unwrap();
            journal.close().unwrap();
            assert_eq!(bad.unreadable().is_empty(), heals, "{position}: it was written anew");
            assert_eq!(newest(&volume.open().0), Some(6), "{position}");
        }
    }
}

#[test]
fn an_unreadable_block_is_damage_only_where_the_chain_leads_to_it() {
    const LAST: u64 = 5;
    let (whole, _) = volume();
    contexts(&whole, LAST);
    for position in 0..BLOCKS {
        let (volume, bad) = copy(&whole);
        let device_offset = log_block(&volume, position);
        bad.set_unreadable([device_offset]);
        // Position 0 holds the durable point of the opening, contexts follow. The block behind them
        // may have held another.
        if position <= LAST + 1 {
            for _ in 0..2 {
                match volume.open_with(options(false)) {
                    Err(JournalError::Unreadable { what: "log", offset, .. }) => {
                        assert_eq!(offset, device_offset)
                    }
                    other => panic!("{position}: {:?}", other.map(|(_, recovered)| recovered)),
                }
            }
            let accepting =
                JournalOptions { read_only: true, accept_damage: true, ..options(false) };
            let (journal, recovered) = volume.open_with(accepting.clone()).unwrap();
            let damage = recovered.log_damage.unwrap();
            assert!(
                damage.unreadable.is_some() && damage.offset == device_offset,
                "{position}: {damage:?}"
            );
            assert_eq!(newest(&journal).unwrap_or(0), position.saturating_sub(1), "{position}");
            drop(journal);
            // The device can read it after all.
            bad.set_unreadable([]);
            assert_eq!(newest(&volume.open().0), Some(LAST), "{position}");
            // If it is given up, what is before it is left, and a log that works.
            let (volume, bad) = copy(&whole);
            bad.set_unreadable([device_offset]);
            let cut = JournalOptions { read_only: false, ..accepting };
            drop(volume.open_with(cut).unwrap());
            bad.set_unreadable([]);
            let (journal, recovered) = volume.open();
            assert_eq!(newest(&journal).unwrap_or(0), position.saturating_sub(1), "{position}");
            assert!(recovered.log_damage.is_none());
        } else {
            bad.heal_by_writing();
            let (journal, recovered) = volume.open();
            assert_eq!((newest(&journal), recovered.last), (Some(LAST), Seq(LAST)), "{position}");
            assert!(bad.unreadable().is_empty(), "{position}: it was written anew");
            drop(journal);
            contexts(&volume, 20);
            assert_eq!(newest(&volume.open().0), Some(20), "{position}");
        }
    }
}

/// A record that never arrived whole ends the log, whatever of it cannot be read.
#[test]
fn a_torn_record_with_an_unreadable_block_ends_the_log() {
    let (volume, bad) = volume();
    let (journal, _) = volume.open();
    force(&journal, put(&journal, b"newest", &1_u64.to_le_bytes())).unwrap();
    let mut t = journal.begin(credits(1, 20_000)).unwrap();
    t.put(b"large", &[7; 16_000]);
    force(&journal, t.commit()).unwrap();
    drop(journal);
    // Positions 2 to 5: of the last block nothing arrived, the third cannot be read.
    volume.dev.write(log_block(&volume, 5), &AlignedBuf::zeroed(4096)).unwrap();
    bad.set_unreadable([log_block(&volume, 4)]);
    let (journal, recovered) = volume.open();
    assert_eq!((newest(&journal), recovered.last), (Some(1), Seq(1)));
    assert_eq!(journal.get(b"large").unwrap(), None);
}

/// It was acknowledged, so it counts; what cannot be read is one range of one file.
#[test]
fn recovery_keeps_a_context_whose_data_cannot_be_read() {
    for (differs, expected) in [(false, Some(2)), (true, Some(1))] {
        let (volume, bad) = volume();
        let device_offset = volume.geo.segments_offset + 40 * volume.geo.segment_len;
        let (journal, _) = volume.open();
        force(&journal, put(&journal, b"newest", &1_u64.to_le_bytes())).unwrap();
        let mut t = journal.begin(credits(1, 14)).unwrap();
        t.put(b"newest", &2_u64.to_le_bytes());
        for i in 0..2_u8 {
            let mut buf = AlignedBuf::zeroed(8192);
            buf.fill(i + 1);
            let crc = crc32c::crc32c(&buf[..4096]).to_le_bytes();
            let crc = crc32c::crc32c(&[crc, crc].concat());
            let extent =
                DataExtent { offset: device_offset + u64::from(i) * 8192, buf: Arc::new(buf), crc };
            t.write_data(extent, Box::new(|r| r.unwrap()));
        }
        force(&journal, t.commit()).unwrap();
        drop(journal);
        if differs {
            volume.dev.write(device_offset + 8192, &AlignedBuf::zeroed(4096)).unwrap();
        }
        bad.set_unreadable([device_offset + 4096]);
        let (journal, _) = volume.open();
        assert_eq!(newest(&journal), expected);
    }
}
