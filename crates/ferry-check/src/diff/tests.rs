//! States that only a rollback or the cleaner makes. `crates/ferry/tests/object/diff.rs` has all
//! others.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::{Difference, diff};
use crate::inspect::Inspector;
use crate::testing::{make_dir, make_file, mount};
use ferry_device::{AlignedBuf, BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::LocalFs;
use ferry_fs::api::*;
use ferry_fs::error::FsError;
use ferry_fs::keys::{self, BLOCK, Extent, InodeRecord};
use ferry_fs::volume::{MkfsOptions, mkfs, read_superblock};
use ferry_journal::{Bystander, Credits, Journal, JournalOptions};
use std::sync::Arc;

const VOLUME_BYTES: u64 = 32 << 20;

type Device = Arc<dyn BlockDevice>;

fn made() -> Device {
    let device: Device = Arc::new(MemDevice::new(VOLUME_BYTES));
    mkfs(&device, &MkfsOptions::default(), &Env::real()).unwrap();
    device
}

/// The state of a volume, on a device of its own.
fn copy(device: &Device) -> Device {
    let other: Device = Arc::new(MemDevice::new(VOLUME_BYTES));
    let mut buffer = AlignedBuf::zeroed(1 << 20);
    for offset in (0..VOLUME_BYTES).step_by(1 << 20) {
        device.read(offset, &mut buffer).unwrap();
        other.write(offset, &buffer).unwrap();
    }
    other
}

fn change(device: &Device, change: impl FnOnce(&Arc<LocalFs>)) {
    let fs = mount(device, false);
    change(&fs);
    fs.detach();
    fs.close().unwrap();
}

fn differences(old: &Device, new: &Device) -> Result<Vec<String>, FsError> {
    let [old, new] = [old, new].map(|device| Inspector::open(device, &Env::real()).unwrap());
    let text = |one: Difference| match one {
        Difference::Made(path) => format!("+ {}", path.escape_ascii()),
        Difference::Removed(path) => format!("- {}", path.escape_ascii()),
        Difference::Contents(path) => format!("M {}", path.escape_ascii()),
        Difference::Attributes(path) => format!("A {}", path.escape_ascii()),
        Difference::Moved { from, to } => {
            format!("R {} -> {}", from.escape_ascii(), to.escape_ascii())
        }
    };
    Ok(diff(&old, &new)?.into_iter().map(text).collect())
}

#[test]
fn inode_numbers_that_a_rollback_gives_anew_are_other_files() {
    let base = made();
    let [old, new] = [copy(&base), copy(&base)];
    let fill = |device: &Device, name: &str, data: &[u8]| {
        let mut inos = Vec::new();
        change(device, |fs| {
            let dir = make_dir(fs, ROOT, name);
            inos.extend([dir, make_file(fs, dir, "same", b"x"), make_file(fs, dir, "other", data)]);
            let dir = make_dir(fs, ROOT, "both");
            inos.extend([dir, make_file(fs, dir, "same", b"x"), make_file(fs, dir, "other", data)]);
        });
        inos
    };
    assert_eq!(fill(&old, "old", &[1; 9000]), fill(&new, "new", &[2; 9000]));
    let wanted = [
        "M /both/other",
        "+ /new",
        "+ /new/other",
        "+ /new/same",
        "- /old",
        "- /old/other",
        "- /old/same",
    ];
    assert_eq!(differences(&old, &new).unwrap(), wanted);
}

#[test]
fn blocks_that_the_cleaner_moved_are_not_read_and_are_no_change() {
    let old = made();
    let mut ino = 0;
    change(&old, |fs| ino = make_file(fs, ROOT, "f", &[7; 40_000]));
    let record = {
        let inspector = Inspector::open(&old, &Env::real()).unwrap();
        InodeRecord::decode(&inspector.get(&keys::inode(ino)).unwrap().unwrap()).unwrap()
    };
    let written =
        InodeRecord { ctime: Timestamp::new(record.ctime.secs() + 1, 0), ..record.clone() };
    for (now, readable, wanted) in
        [(&record, false, Some(vec![])), (&written, false, None), (&written, true, Some(vec![]))]
    {
        let new = copy(&old);
        move_blocks(&new, ino, now, readable);
        let found = differences(&old, &new);
        match wanted {
            Some(wanted) => assert_eq!(found.unwrap(), Vec::<String>::from_iter(wanted)),
            None => assert!(matches!(found, Err(FsError::Data { offset: 0, .. })), "{found:?}"),
        }
    }
}

/// Moves the blocks of a file to the end of the volume; without `readable` their bytes stay behind.
fn move_blocks(device: &Device, ino: Ino, record: &InodeRecord, readable: bool) {
    let geometry = read_superblock(device).unwrap().geometry();
    let options = JournalOptions { read_only: false, ..JournalOptions::offline(1 << 20) };
    let (journal, _) =
        Journal::open(device.clone(), geometry, options, Env::real(), Arc::new(Bystander)).unwrap();
    let key = keys::extent(ino, 0);
    let extent = Extent::decode(&journal.get(&key).unwrap().unwrap()).unwrap();
    let Extent::Data { block, crcs } = extent else { panic!("{extent:?}") };
    let target = VOLUME_BYTES / BLOCK - 1 - 2 * crcs.len() as u64;
    if readable {
        let mut buffer = AlignedBuf::zeroed(crcs.len() * BLOCK as usize);
        device.read(block * BLOCK, &mut buffer).unwrap();
        device.write(target * BLOCK, &buffer).unwrap();
    }
    let mut txn = journal.begin(Credits { keys: 2, bytes: 1000, urgent: true }).unwrap();
    txn.put(&key, &Extent::Data { block: target, crcs }.encode());
    txn.put(&keys::inode(ino), &record.encode());
    txn.commit();
    journal.close().unwrap();
}
