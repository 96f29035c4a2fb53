//! Writes to the log what a process has left that was killed.

use super::format::{LOG_BLOCK, RecordKind, blocks_for};
use super::record::{RecordPlan, body_len, encode};
use super::recovery::{Replay, extent_matches};
use super::ring::LogArea;
use super::tail::{Tail, UnloggedContext};
use crate::disk::{Disk, io_error};
use crate::types::{Point, RequestId};
use crate::{JournalError, Seq};
use ferry_env::Env;

/// What was taken.
#[derive(Debug, Default)]
pub struct Taken {
    /// The newest context that the log had.
    pub logged: Seq,
    pub requests: Vec<RequestId>,
}

/// Appends the contexts in `tail` to what was read from the log, which begins at `start`. They are
/// durable once that is settled.
pub fn take(
    disk: &Disk,
    area: &LogArea,
    replayed: &mut Replay,
    start: Point,
    tail: Option<&Tail>,
    env: &Env,
) -> Result<Taken, JournalError> {
    let Some(tail) = tail else {
        return Ok(Taken { logged: replayed.end.seq, requests: Vec::new() });
    };
    let left = tail.left(replayed.end);
    let (found, mut taken) = (left.contexts.len(), 0);
    for context in left.contexts {
        let body_len = body_len(&context.changes, &context.extents);
        // The durable point of this recovery has a block, too.
        let used = replayed.end.position - start.position + blocks_for(body_len) + 1;
        if used > area.blocks || !has_data(disk, &context) {
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
    tail.taken(replayed.end.seq);
    if found > 0 {
        tracing::info!(taken, lost = found - taken, "contexts that the log did not have yet");
    }
    let is_there = |(request, seq)| (seq <= replayed.end.seq).then_some(request);
    let requests = left.requests.into_iter().filter_map(is_there).collect();
    Ok(Taken { logged: left.logged, requests })
}

/// Whether the device has what the context maps. Its writes have ended, whatever came of them.
fn has_data(disk: &Disk, context: &UnloggedContext) -> bool {
    context.extents.iter().all(|extent| matches!(extent_matches(disk, extent), Ok(true)))
}
