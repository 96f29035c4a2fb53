//! Copies a volume that nobody has mounted to another device, as it is: the same inodes, the same
//! log, the same identity.
//!
//! * COPY-1: What recovery reads is copied: both slots of the home store's map, the home store, the
//!   whole log, what is filled of the segments with data, and the data that contexts in the log
//!   name though nothing maps it any more. Without the last, recovery of the copy could end the
//!   log earlier than that of the source. (`plan`)
//! * COPY-2: Until all of it is durable, marks lie where the superblocks belong. Nothing takes the
//!   device for a volume meanwhile. ([`ferry_fs::volume::CopyMark`])
//! * COPY-3: A mark says what is done only after a flush of that.
//! * COPY-4: A copy goes on only where the source is in the state that the mark names.
//! * COPY-5: Data is held against its checksums as it is read (`sums`). The metadata of the copy is
//!   checked, and its log must end where the source's ends, before it becomes a volume. The data of
//!   a copy that went on is read, too.
//!
//! The source is only read.

mod plan;
mod sums;
#[cfg(test)]
mod tests;
mod transfer;
mod types;

use crate::fsck::{Code, FsckOptions, Progress, Report, check_copied, fsck};
use crate::inspect::Inspector;
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_fs::keys::BLOCK;
use ferry_fs::volume::{
    CopyMark, SourceState, Superblock, VolumeError, end_copy, find_superblock, read_copy_mark,
    read_superblock, write_copy_mark,
};
use ferry_journal::inspect::{home_map, log_end, log_start};
use plan::Plan;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use transfer::transfer;
use types::target;
pub use types::{Copied, CopyError, CopyOptions, Copying, Tell};

/// A volume that can be copied: it was checked, and what of it is needed is known.
pub struct Checked {
    sb: Superblock,
    state: SourceState,
    inspector: Inspector,
    plan: Plan,
}

impl Checked {
    /// Checks the volume on `from`. A copy's target need not be there yet.
    pub fn new(from: &Arc<dyn BlockDevice>, env: &Env, tell: Tell<'_>) -> Result<Self, CopyError> {
        let sb = read_superblock(from).map_err(CopyError::Source)?;
        let state = state_of(from, &sb)?;
        told(Copying { bytes: 0, bytes_total: 0 }, &mut *tell)?;
        let mut progress = |_: Progress| tell(Copying { bytes: 0, bytes_total: 0 });
        let options = FsckOptions { progress: Some(&mut progress), ..FsckOptions::default() };
        let report = fsck(from, options, env).map_err(|error| match error {
            VolumeError::Stopped => CopyError::Stopped,
            error => CopyError::Source(error),
        })?;
        if let Some(first) = source_finding(&report, from, &sb) {
            return Err(CopyError::SourceDamaged { first });
        }
        told(Copying { bytes: 0, bytes_total: 0 }, &mut *tell)?;
        let inspector = Inspector::open(from, env).map_err(CopyError::Source)?;
        // The check has just read the whole log. A plan without the end of it would be a guess.
        if let Some(damage) = &inspector.recovered().log_damage {
            let (offset, source) = (damage.offset, io::Error::other(damage.detail.clone()));
            return Err(CopyError::SourceUnread { offset, source });
        }
        let plan = Plan::new(&inspector)?;
        told(Copying { bytes: 0, bytes_total: plan.bytes() }, tell)?;
        Ok(Self { sb, state, inspector, plan })
    }
}

/// Copies the volume on `from` to the device `to`, which is empty or has a copy of the same state
/// that has not ended: that goes on where it was.
pub fn copy(
    from: &Arc<dyn BlockDevice>,
    to: &Arc<dyn BlockDevice>,
    options: CopyOptions,
    env: &Env,
    tell: Tell<'_>,
) -> Result<Copied, CopyError> {
    // A caller that stops at once is asked when there is a mark.
    let checked = Checked::new(from, env, &mut |_| ControlFlow::Continue(()))?;
    copy_checked(&checked, to, options, env, tell)
}

/// The same for a volume that was checked.
pub fn copy_checked(
    checked: &Checked,
    to: &Arc<dyn BlockDevice>,
    options: CopyOptions,
    env: &Env,
    tell: Tell<'_>,
) -> Result<Copied, CopyError> {
    let Checked { sb, state, inspector, plan } = checked;
    if to.capacity() < sb.size {
        return Err(CopyError::TooSmall { has: to.capacity(), needs: sb.size });
    }
    let begins = begin_of(to, state, options.restart)?;
    if let Begin::Anew { written } = begins {
        // The mark says of the earlier copy, too, where it ends, until that was discarded.
        let end = written.min(to.capacity() / BLOCK * BLOCK).max(sb.size);
        write_copy_mark(&**to, &CopyMark { state: state.clone(), done: 0, end })
            .map_err(target("write the mark of the copy"))?;
        // What an earlier copy left in free segments could be taken for data by a repair.
        to.discard(sb.segments_offset, end - sb.segments_offset)
            .map_err(target("discard the old contents"))?;
        if end > sb.size {
            // A larger volume may have its last superblock there.
            let zeros = AlignedBuf::zeroed(BLOCK_SIZE);
            to.write(end - BLOCK, &zeros).map_err(target("write over the old contents"))?;
        }
    }
    for range in plan.fixed() {
        to.allocate(range.start, range.end - range.start)
            .map_err(target("take space from the host"))?;
    }
    let done = match begins {
        Begin::Anew { .. } => 0,
        Begin::At(done) => done,
    };
    let mark = CopyMark { state: state.clone(), done, end: sb.size };
    let (bytes, zeroed) = transfer(inspector, to, plan, mark, options, &mut *tell)?;
    go_on(plan, &mut *tell)?;
    let mut progress =
        |_: Progress| tell(Copying { bytes: plan.bytes(), bytes_total: plan.bytes() });
    // What an earlier attempt wrote may have changed since.
    let verify_data = done > 0;
    let checking =
        FsckOptions { verify_data, progress: Some(&mut progress), ..FsckOptions::default() };
    verify(to, sb, state, checking, env)?;
    go_on(plan, &mut *tell)?;
    let mark = CopyMark { state: state.clone(), done: sb.size, end: sb.size };
    end_copy(&**to, sb, &mark).map_err(target("write the superblock"))?;
    Ok(Copied { bytes, bytes_total: plan.bytes(), zeroed })
}

/// Everything was copied: whether to go on.
fn go_on(plan: &Plan, tell: Tell<'_>) -> Result<(), CopyError> {
    told(Copying { bytes: plan.bytes(), bytes_total: plan.bytes() }, tell)
}

/// Tells how far it is: whether to go on.
fn told(copying: Copying, tell: Tell<'_>) -> Result<(), CopyError> {
    match tell(copying) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(CopyError::Stopped),
    }
}

/// Where a copy begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begin {
    /// Nothing is there, or nothing that counts: earlier copies wrote before this byte of the
    /// device, and nowhere else.
    Anew { written: u64 },
    /// What lies before this byte of the device was copied.
    At(u64),
}

/// Whether the target may be written to, and from where on.
fn begin_of(
    to: &Arc<dyn BlockDevice>,
    state: &SourceState,
    restart: bool,
) -> Result<Begin, CopyError> {
    match read_copy_mark(&**to).map_err(target("read the device"))? {
        Some(mark) if mark.state == *state && mark.done > 0 && !restart => Ok(Begin::At(mark.done)),
        // It may have been cut off before it discarded what was there.
        Some(mark) if mark.state == *state || restart => Ok(Begin::Anew { written: mark.end }),
        Some(_) => Err(CopyError::OtherState),
        None => match read_superblock(to) {
            Ok(sb) => Err(CopyError::NotEmpty(VolumeError::Exists { label: sb.name() })),
            Err(VolumeError::Empty) => Ok(Begin::Anew { written: 0 }),
            // A mark is left, and the device was used for something else since.
            Err(VolumeError::Unfinished) => Err(CopyError::NotEmpty(VolumeError::Foreign)),
            Err(error) => Err(CopyError::NotEmpty(error)),
        },
    }
}

/// The state that the volume on a device is in. The device need not have superblocks.
fn state_of(dev: &Arc<dyn BlockDevice>, sb: &Superblock) -> Result<SourceState, CopyError> {
    let geometry = sb.geometry();
    let start = log_start(dev, &geometry)?;
    let end = log_end(dev, &geometry, &start)?;
    let maps = home_map(dev, &geometry);
    let home_generation = maps.iter().flatten().map(|map| map.generation).max().unwrap_or(0);
    Ok(SourceState {
        volume_id: sb.volume_id,
        home_generation,
        log_start: start.position,
        log_end: end.position,
        log_end_id: end.id,
        superblock_crc: sb.crc(),
    })
}

/// The copy, which has no superblocks yet, is what the source is.
fn verify(
    to: &Arc<dyn BlockDevice>,
    sb: &Superblock,
    state: &SourceState,
    options: FsckOptions<'_>,
    env: &Env,
) -> Result<(), CopyError> {
    let damaged = |what: String| CopyError::TargetDamaged { what };
    let found = state_of(to, sb).map_err(|error| damaged(error.to_string()))?;
    if found != *state {
        return Err(damaged("its log does not end where the log of the volume ends".into()));
    }
    let checked = check_copied(to, sb, options, env);
    let report = checked.map_err(|error| match error {
        VolumeError::Stopped => CopyError::Stopped,
        error => damaged(error.to_string()),
    })?;
    first_finding(&report).map_or(Ok(()), |first| Err(damaged(first)))
}

/// The first finding that a copy would have, too. It has superblocks of its own.
fn source_finding(report: &Report, from: &Arc<dyn BlockDevice>, sb: &Superblock) -> Option<String> {
    let is_used = find_superblock(from).is_ok_and(|(found, _)| found == *sb);
    let stays = |code: Code| code != Code::SuperblockCopy || !is_used;
    report.findings.iter().find(|finding| stays(finding.code)).map(ToString::to_string)
}

fn first_finding(report: &Report) -> Option<String> {
    report.findings.first().map(ToString::to_string)
}
