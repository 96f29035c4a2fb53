//! Repairs a volume that nobody has mounted.
//!
//! Check, repair in passes, check again, until nothing more is found. Each pass reads the whole
//! view in key order and plans changes that are ordinary transactions; every one of them leaves a
//! volume from which the next run goes on, so that a repair may be killed at any write. The order
//! of the passes:
//! 1. the superblock's copies; the log and the home store (`home`);
//! 2. what one inode's keys say of themselves (`inodes`): afterwards everything can be decoded;
//! 3. extents and the blocks that they claim (`extents`);
//! 4. the tree of names, and `/lost+found` (`tree`);
//! 5. whatever is counted (`counts`).
//!
//! Nothing is made up: what cannot be told from what is left is removed and said, and a range of a
//! file whose contents are gone becomes a lost extent, which reads as an error.

mod blocks;
mod counts;
mod edits;
mod extents;
mod home;
mod inodes;
mod rows;
#[cfg(test)]
mod tests;
mod tree;

use super::report::{Code, Repair, Report};
use super::volume::{FsckOptions, HOME_CACHE_BYTES, check};
use crate::reader::Reader;
use blocks::{Blocks, Reading};
use edits::{Repairs, Writer};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::keys::{self, Key};
use ferry_fs::volume::{Superblock, VolumeError, find_superblock, rewrite_bad_copies};
use ferry_journal::{
    Journal, JournalClient, JournalError, JournalOptions, Recovered, Seq, mend_map_slot,
};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Rounds of check and repair. One is enough unless one repair uncovers the next damage.
const ROUNDS_MAX: usize = 5;

/// The volume that is repaired.
#[derive(Clone, Copy)]
struct Volume<'v> {
    dev: &'v Arc<dyn BlockDevice>,
    sb: &'v Superblock,
    env: &'v Env,
}

/// Checks the volume on `dev` and repairs what can be repaired. An error means that it could not be
/// checked, or that the repair could not go on (what was repaired so far stays); damage that is
/// left is in the report.
pub fn repair(
    dev: &Arc<dyn BlockDevice>,
    mut options: FsckOptions<'_>,
    env: &Env,
) -> Result<Report, VolumeError> {
    let (sb, used) = find_superblock(dev)?;
    let volume = Volume { dev, sb: &sb, env };
    let mut repairs = Repairs::default();
    for offset in rewrite_bad_copies(dev, used)? {
        let what =
            format!("wrote the copy of the superblock at byte {offset} anew, from another one");
        repairs.add(Repair::new(Code::SuperblockCopy, what).then("check the disk below"));
    }
    if let Some(offset) = mend_map_slot(dev, &sb.geometry())? {
        let what = format!(
            "wrote the copy of the home store's map at byte {offset} anew, from the other one"
        );
        repairs.add(Repair::new(Code::HomeMap, what).then("check the disk below"));
    }
    let (verify, give_up) = (options.verify_data, options.give_up_unreadable);
    // No check compares the copies of a volume that was not unmounted. Repaired, it looks like one
    // that was.
    let mut uncompared = false;
    for _ in 0..ROUNDS_MAX {
        let progress = options.progress.as_mut().map(|progress| &mut **progress as _);
        let options = FsckOptions { verify_data: verify, progress, ..FsckOptions::default() };
        let checked = check(dev, &sb, options, env, &mut repairs.list);
        if matches!(checked, Err(VolumeError::Stopped))
            && let Some(code) = repairs.lost
        {
            // The next repair may find nothing more, and could not tell that something was lost.
            forget_marks(volume, code, &mut repairs)?;
        }
        let mut report = checked?;
        report.repaired = repairs.count;
        let before = repairs.count;
        let found = |code| report.findings.iter().any(|finding| finding.code == code);
        // What is deepest comes first: on top of it the rest would be judged wrongly.
        let unreadable = found(Code::LogUnreadable);
        if unreadable && !give_up {
            // It stays as it is, and is in the report.
        } else if found(Code::HomeStore) {
            home::rebuild(volume, give_up, &mut repairs)?;
        } else if found(Code::Log) || unreadable {
            home::cut_log(volume, &mut repairs)?;
        } else if found(Code::HomeCopy) {
            home::mend_copies(volume, &mut repairs)?;
        } else if found(Code::HomeClaim) && home::move_away(volume, give_up, &mut repairs)? {
            // What the home map had claimed is the files' alone now.
        } else if !report.clean {
            structure(volume, Reading { verify, give_up }, &mut repairs)?;
        }
        uncompared |= verify && report.holdings.unclean;
        let readable = !found(Code::HomeStore) && !found(Code::Log) && !unreadable;
        if repairs.count == before && readable && std::mem::take(&mut uncompared) {
            home::mend_copies(volume, &mut repairs)?;
        }
        if readable && let Some(code) = repairs.lost.take() {
            forget_marks(volume, code, &mut repairs)?;
        }
        if repairs.count == before {
            report.repairs = repairs.list;
            return Ok(report);
        }
    }
    let progress = options.progress.as_mut().map(|progress| &mut **progress as _);
    let options = FsckOptions { verify_data: verify, progress, ..FsckOptions::default() };
    let mut report = check(dev, &sb, options, env, &mut repairs.list)?;
    (report.repaired, report.repairs) = (repairs.count, repairs.list);
    Ok(report)
}

fn journal_options(read_only: bool, accept_damage: bool) -> JournalOptions {
    JournalOptions { read_only, accept_damage, ..JournalOptions::offline(HOME_CACHE_BYTES) }
}

/// Opens the journal to be written, when it is known which segments it may take.
fn open(
    Volume { dev, sb, env }: Volume<'_>,
    accept_damage: bool,
) -> Result<(Journal, Recovered), VolumeError> {
    let client = Arc::new(Segments::default());
    let open = |read_only| {
        let options = journal_options(read_only, accept_damage);
        Journal::open(dev.clone(), sb.geometry(), options, env.clone(), client.clone())
    };
    {
        let (journal, recovered) = open(true)?;
        client.learn(dev, sb, &journal, &recovered.home_segments)?;
    }
    Ok(open(false)?)
}

/// One round of the passes over the keys.
fn structure(
    volume: Volume<'_>,
    reading: Reading,
    repairs: &mut Repairs,
) -> Result<(), VolumeError> {
    let geometry = volume.sb.geometry();
    let (journal, recovered) = open(volume, false)?;
    let mut writer = Writer::new(&journal, volume, repairs);
    inodes::run(&mut writer)?;
    let mut blocks = Blocks::load(&journal, &geometry, &recovered.home_segments)?;
    let mut reader = Reader::new(volume.dev, reading.verify);
    extents::run(&mut writer, &mut blocks, &mut reader, reading)?;
    drop((blocks, reader));
    tree::run(&mut writer)?;
    counts::run(&mut writer, &geometry, &recovered.home_segments)?;
    journal.close()?;
    Ok(())
}

/// A mark says that all that a client has changed up to it is there. Where something was lost
/// (`code` says where) that is not known: the client would hold for made what is gone. Without
/// marks it makes its changes again, or tells that it cannot.
fn forget_marks(volume: Volume<'_>, code: Code, repairs: &mut Repairs) -> Result<(), VolumeError> {
    let (journal, _) = open(volume, false)?;
    let mut writer = Writer::new(&journal, volume, repairs);
    writer.delete_range(&keys::synced(0), &keys::synced_end())?;
    // One that was removed may be here again, and others may have had the locks since. Who was
    // evicted stays so, whatever was lost.
    writer.delete_range(&keys::locker(0), &keys::locker_end())?;
    let marks = writer.delete_range(&keys::mark(0), &keys::mark_end())?;
    if marks > 0 {
        let what = format!(
            "removed the marks of what {marks} remote clients have changed: some of it may be lost"
        );
        writer.say(Repair::new(code, what));
    }
    writer.flush()?;
    journal.close()?;
    Ok(())
}

/// The journal's owner during a repair: gives the home store segments that nothing claims, whatever
/// their records say.
#[derive(Default)]
struct Segments(Mutex<Option<Pool>>);

struct Pool {
    device: Arc<dyn BlockDevice>,
    offset: u64,
    len: u64,
    free: BTreeSet<u32>,
}

impl Segments {
    fn learn(
        &self,
        dev: &Arc<dyn BlockDevice>,
        sb: &Superblock,
        journal: &Journal,
        home: &[u32],
    ) -> Result<(), JournalError> {
        let mut free = Blocks::load(journal, &sb.geometry(), home)?.unclaimed();
        journal.scan(&keys::segment(0), &keys::segment_end(), &mut |key, _| {
            if let Some(Key::Segment(index)) = keys::parse(key) {
                free.remove(&index);
            }
            true
        })?;
        free.retain(|segment| !home.contains(segment));
        let pool =
            Pool { device: dev.clone(), offset: sb.segments_offset, len: sb.segment_len, free };
        *self.0.lock() = Some(pool);
        Ok(())
    }
}

impl JournalClient for Segments {
    fn durable_point(&self, _seq: Seq) {}
    fn failed(&self, _error: &JournalError) {}
    fn take_home_segment(&self) -> Option<u32> {
        let mut pool = self.0.lock();
        let pool = pool.as_mut()?;
        let segment = pool.free.pop_first()?;
        pool.device.allocate(pool.offset + u64::from(segment) * pool.len, pool.len).ok()?;
        Some(segment)
    }
    fn release_home_segments(&self, segments: &[u32]) {
        if let Some(pool) = self.0.lock().as_mut() {
            pool.free.extend(segments);
        }
    }
}
