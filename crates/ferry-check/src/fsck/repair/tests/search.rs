//! A home store whose beginning is lost is found again among its pages; where its pages are lost,
//! too, the log says what it can.

use super::*;
use ferry_journal::inspect::log_start;

const MOUNTS: u64 = 5;
const FILES: u64 = 16;

impl Volume {
    /// After several mounts, in each of which names came and went.
    fn used() -> Self {
        Self::used_with_log().0
    }

    /// The same, and how many bytes of the log are older than the last mount.
    fn used_with_log() -> (Self, u64) {
        let (volume, mut older) = (Self::new(), 0);
        for round in 0..MOUNTS {
            older = log_start(&volume.dev, &volume.sb.geometry()).unwrap().position * 4096;
            let fs = mount(&volume.dev, false);
            let dir = make_dir(&fs, ROOT, &format!("round {round}"));
            for n in 0..FILES {
                make_file(
                    &fs,
                    dir,
                    &format!("file {n}"),
                    &pattern(round + n, 700 * (n as usize % 8)),
                );
            }
            if round > 0 {
                let me = InProcess::default();
                let old = me
                    .call(|cx| fs.lookup(cx, ROOT, format!("round {}", round - 1).as_bytes()))
                    .unwrap();
                let old = old.attr.unwrap().ino;
                for n in (0..FILES).step_by(3) {
                    me.call(|cx| fs.unlink(cx, old, format!("file {n}").as_bytes())).unwrap();
                }
                fs.forget(old, 1);
            }
            fs.detach();
            fs.close().unwrap();
        }
        assert!(older < volume.sb.log_len / 2, "it was not written round");
        (volume, older)
    }

    /// First copies of blocks of the home store of which this is true.
    pub(super) fn home_blocks(&self, which: impl Fn(&[u8]) -> bool) -> Vec<u64> {
        let (journal, recovered) = Journal::open(
            self.dev.clone(),
            self.sb.geometry(),
            reader(),
            env(),
            Arc::new(Segments::default()),
        )
        .unwrap();
        drop(journal);
        let mut found = Vec::new();
        for segment in recovered.home_segments {
            let first = self.sb.segments_offset + u64::from(segment) * self.sb.segment_len;
            found.extend(
                (first..first + self.sb.segment_len / 2)
                    .step_by(4096)
                    .filter(|at| which(&self.block(*at))),
            );
        }
        found
    }

    fn block(&self, at: u64) -> AlignedBuf {
        let mut block = AlignedBuf::zeroed(4096);
        self.dev.read(at, &mut block).unwrap();
        block
    }

    /// Zeros over both copies of a block; what was there.
    fn wipe(&self, at: u64) -> [(u64, AlignedBuf); 2] {
        [at, at + self.sb.segment_len / 2].map(|at| {
            let before = self.block(at);
            self.dev.write(at, &AlignedBuf::zeroed(4096)).unwrap();
            (at, before)
        })
    }

    /// Repairs; whether the report says that something may be missing.
    fn found_again(&self, name: &str) -> bool {
        assert!(self.codes().contains(&Code::HomeStore), "{name}");
        let report = self.repaired(name);
        let of_store: Vec<_> =
            report.repairs.iter().filter(|repair| repair.code == Code::HomeStore).collect();
        assert!(!of_store.is_empty(), "{name}: {:#?}", report.repairs);
        self.works(name);
        of_store.iter().any(|repair| repair.lost.is_some())
    }
}

fn reader() -> JournalOptions {
    JournalOptions { read_only: true, ..JournalOptions::offline(1 << 20) }
}

fn is_header(block: &[u8]) -> bool {
    block.starts_with(b"redb")
}

/// A leaf with the names of both tables.
fn is_table_of_tables(block: &[u8]) -> bool {
    let has = |name: &[u8]| block.windows(name.len()).any(|bytes| bytes == name);
    block[..4] == [1, 0, 2, 0] && has(b"keysmeta")
}

fn is_page(block: &[u8]) -> bool {
    block.iter().any(|byte| *byte != 0)
}

#[test]
fn a_lost_header_costs_nothing() {
    let volume = Volume::used();
    let before = volume.snapshot();
    let headers = volume.home_blocks(is_header);
    assert_eq!(headers.len(), 1);
    volume.wipe(headers[0]);
    assert!(!volume.found_again("header"));
    assert_eq!(volume.snapshot(), before);
    // Without the log.
    let volume = Volume::used();
    volume.wipe(volume.home_blocks(is_header)[0]);
    volume.wipe_log();
    volume.found_again("header, and the log");
    assert_eq!(volume.snapshot(), before);
}

#[test]
fn a_lost_table_of_tables_costs_nothing() {
    for forgets in [false, true] {
        let (volume, older) = Volume::used_with_log();
        let before = volume.snapshot();
        if forgets {
            volume.dev.write(volume.sb.log_offset, &AlignedBuf::zeroed(older as usize)).unwrap();
        }
        let tables = volume.home_blocks(is_table_of_tables);
        assert!(tables.len() > 1, "old ones are still there");
        let needed = tables.iter().find(|table| {
            let was = volume.wipe(**table);
            let clean = volume.check().clean;
            if clean {
                was.into_iter().for_each(|(at, block)| volume.dev.write(at, &block).unwrap());
            }
            !clean
        });
        assert!(needed.is_some());
        assert!(
            !volume.found_again("table of tables"),
            "the last state but one and the log say it all"
        );
        assert_eq!(volume.snapshot(), before);
    }
}

#[test]
fn without_any_table_of_tables_the_best_tree_is_taken() {
    for log in [true, false] {
        let volume = Volume::used();
        let before = volume.snapshot();
        volume
            .home_blocks(is_table_of_tables)
            .into_iter()
            .for_each(|table| drop(volume.wipe(table)));
        if !log {
            volume.wipe_log();
        }
        assert_eq!(
            volume.found_again("tables of tables"),
            !log,
            "it may be out of date, and that is said"
        );
        assert_eq!(volume.snapshot(), before, "with the log: {log}");
    }
}

#[test]
fn the_log_alone_counts_if_no_page_is_left() {
    let volume = Volume::used();
    let before = volume.snapshot();
    volume.home_blocks(is_page).into_iter().for_each(|page| drop(volume.wipe(page)));
    volume.found_again("all pages");
    assert_eq!(volume.snapshot(), before, "the log was never written round");
}

/// A log that a repair began is not all that ever happened.
#[test]
fn a_log_that_was_begun_anew_is_not_the_whole_history() {
    let volume = Volume::used();
    let before = volume.snapshot();
    volume.home_blocks(is_table_of_tables).into_iter().for_each(|table| drop(volume.wipe(table)));
    volume.wipe_log();
    volume.found_again("tables of tables, and the log");
    assert_eq!(volume.snapshot(), before);
    volume.wipe(volume.home_blocks(is_header)[0]);
    volume.found_again("the new header");
    assert_eq!(volume.snapshot(), before);
}

/// A leaf with one entry, whose key is one byte: what the store says of itself.
fn is_meta(block: &[u8]) -> bool {
    block[..4] == [1, 0, 1, 0]
}

/// The longest row of records is older than the store.
#[test]
fn an_old_chain_of_records_is_not_replayed_over_a_newer_store() {
    let volume = Volume::used();
    volume.wipe(volume.home_blocks(is_header)[0]);
    volume.found_again("header");
    let fs = mount(&volume.dev, false);
    let me = InProcess::default();
    me.call(|cx| fs.unlink(cx, ROOT, b"e")).unwrap();
    me.call(|cx| fs.rename(cx, ROOT, b"n3", ROOT, b"renamed", RenameFlags::default())).unwrap();
    fs.detach();
    fs.close().unwrap();
    let before = volume.snapshot();
    volume.home_blocks(is_meta).into_iter().for_each(|page| drop(volume.wipe(page)));
    assert!(
        volume.found_again("what it says of itself"),
        "it may be out of date, and that is said"
    );
    assert_eq!(volume.snapshot(), before);
}
