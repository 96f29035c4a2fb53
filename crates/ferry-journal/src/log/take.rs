//! Writes to the log what a process has left that was killed.

use super::format::{LOG_BLOCK, RecordKind, blocks_for};
use super::record::{ExtentEntry, RecordPlan, body_len, encode};
use super::recovery::{Replay, crc_of_blocks, extent_matches};
use super::ring::LogArea;
use super::tail::{LeftLog, UnloggedContext};
use crate::disk::{Disk, io_error};
use crate::types::{Point, RequestId};
use crate::{JournalError, Seq};
use ferry_device::LeftBuffers;
use ferry_env::Env;
use std::io;

/// What was taken.
#[derive(Debug, Default)]
pub struct Taken {
    /// The newest context that the log had.
    pub logged: Seq,
    /// The log ends with a record of the process that has left the rest.
    pub is_ours: bool,
    pub requests: Vec<RequestId>,
}

/// Appends the contexts in `left` to what was read from the log, which begins at `start`. They are
/// durable once that is settled.
pub fn take(
    disk: &Disk,
    area: &LogArea,
    replayed: &mut Replay,
    start: Point,
    left: Option<&LeftLog>,
    env: &Env,
) -> Result<Taken, JournalError> {
    let Some(LeftLog { tail, data }) = left else {
        return Ok(Taken { logged: replayed.end.seq, ..Taken::default() });
    };
    let left = tail.left(replayed.end);
    let (found, mut taken) = (left.contexts.len(), 0);
    for context in left.contexts {
        let body_len = body_len(&context.changes, &context.extents);
        // The durable point of this recovery has a block, too.
        let used = replayed.end.position - start.position + blocks_for(body_len) + 1;
        if used > area.blocks || !has_data(disk, &context, data) {
            break;
        }
        let plan = RecordPlan {
            kind: RecordKind::Context,
            position: replayed.end.position,
            id: env.entropy.next_u64(),
            prev: replayed.end.id,
            seq: context.seq.0,
            durable_point: 0,
            body_len,
        };
        tail.record(plan.id);
        for (offset, buf) in encode(area, &plan, &context.extents, context.changes.iter()) {
            disk.write(offset, &buf).map_err(io_error("log"))?;
            // They are right now, and are not settled by zeros.
            let is_elsewhere = |at: &u64| !(offset..offset + buf.len() as u64).contains(at);
            replayed.strange.retain(is_elsewhere);
            replayed.unreadable.retain(is_elsewhere);
        }
        let position = plan.position + blocks_for(body_len);
        replayed.end = Point { seq: context.seq, position, id: plan.id };
        replayed.changes.extend(context.changes);
        replayed.contexts += 1;
        replayed.records += 1;
        replayed.bytes += blocks_for(body_len) * LOG_BLOCK as u64;
        taken += 1;
    }
    if left.is_ours {
        tail.taken(replayed.end.seq);
    }
    if found > 0 {
        tracing::info!(taken, lost = found - taken, "contexts that the log did not have yet");
    }
    let is_there = |(request, seq)| (seq <= replayed.end.seq).then_some(request);
    let requests = left.requests.into_iter().filter_map(is_there).collect();
    Ok(Taken { logged: left.logged, is_ours: left.is_ours, requests })
}

/// Whether the device has what the context maps. Its writes have ended, whatever came of them: one
/// that did not reach the device is replayed.
fn has_data(disk: &Disk, context: &UnloggedContext, data: &LeftBuffers) -> bool {
    let is_there = |extent: &ExtentEntry| match extent_matches(disk, extent) {
        Ok(true) => true,
        _ => write_again(disk, extent, data).unwrap_or_else(|error| {
            tracing::warn!(offset = extent.offset, %error, "data is not written again");
            false
        }),
    };
    context.extents.iter().all(is_there)
}

/// Writes the data of an extent, if it is in memory.
fn write_again(disk: &Disk, extent: &ExtentEntry, data: &LeftBuffers) -> io::Result<bool> {
    let found = data.that_go_to(extent.offset, extent.len as usize)?;
    let Some(buf) = found.iter().find(|buf| crc_of_blocks(0, buf) == extent.crc) else {
        return Ok(false);
    };
    disk.write(extent.offset, buf)?;
    Ok(true)
}
