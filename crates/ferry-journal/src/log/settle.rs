//! After recovery: what it found becomes durable, and what lay behind it goes.

use super::format::{LOG_BLOCK, RecordKind};
use super::record::{RecordPlan, encode};
use super::recovery::Replay;
use super::ring::{LogArea, erase_behind};
use super::tail::LeftLog;
use crate::JournalError;
use crate::disk::{Disk, io_error};
use crate::types::Point;
use ferry_device::AlignedBuf;
use ferry_env::Env;

/// Writes a block of the log that cannot be read, and that nobody needs. Where that does not help,
/// the log works on: a record that comes to lie there cannot be read back after a crash, so people
/// are told.
fn rewrite(disk: &Disk, offset: u64, zeros: &AlignedBuf) {
    let mut back = AlignedBuf::zeroed(LOG_BLOCK);
    match disk.write(offset, zeros).and_then(|()| disk.read(offset, &mut back)) {
        Ok(()) => {
            tracing::info!(
                offset,
                "a block of the log could not be read, was not needed, and is written anew"
            )
        }
        Err(error) => tracing::warn!(
            offset,
            %error,
            "a block of the log cannot be read, although it was written anew: replace the disk, or move the log with `ferry tune --log-size`"
        ),
    }
}

/// Makes what recovery found durable and says so in the log, so that it cannot end earlier the next
/// time, and so that whatever lay behind it is gone. `left`: the memory of the process that has
/// written the log, if that was killed.
pub fn settle(
    disk: &Disk,
    area: &LogArea,
    replayed: &mut Replay,
    start: Point,
    left: Option<&LeftLog>,
    env: &Env,
) -> Result<(), JournalError> {
    let end = replayed.end;
    let zeros = AlignedBuf::zeroed(LOG_BLOCK);
    if replayed.damage.is_some() {
        erase_behind(disk, area, start, end)?;
    } else {
        for offset in &replayed.strange {
            disk.write(*offset, &zeros).map_err(io_error("log"))?;
        }
        replayed.unreadable.iter().for_each(|offset| rewrite(disk, *offset, &zeros));
    }
    disk.flush_wait().map_err(io_error("log"))?;
    if end.position >= start.position + area.blocks {
        // No block is left for it. Nothing was cut off either: the ring is full of records that are
        // whole.
        return Ok(());
    }
    let plan = RecordPlan {
        kind: RecordKind::DurablePoint,
        position: end.position,
        id: env.entropy.next_u64(),
        prev: end.id,
        seq: end.seq.0,
        durable_point: end.seq.0,
        body_len: 0,
    };
    if let Some(left) = left {
        left.tail.record(plan.id);
    }
    for (offset, buf) in encode(area, &plan, &[], std::iter::empty()) {
        disk.write(offset, &buf).map_err(io_error("log"))?;
    }
    disk.flush_wait().map_err(io_error("log"))?;
    replayed.end = Point { seq: end.seq, position: end.position + 1, id: plan.id };
    Ok(())
}
