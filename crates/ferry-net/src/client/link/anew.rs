//! The state of a link moves from a session that has ended to a new one.

use std::sync::Arc;

use ferry_fs::{Errno, Ino};

use super::restore::{Before, Ended, Restore, Restored};
use super::state::State;
use super::unclaimed::Unclaimed;
use crate::client::change::{Change, Key, Stage};
use crate::client::replay_log::{self, Replayable, Unanswered};
use crate::message::Op;

/// What the server's welcome says of the new session.
pub(super) struct Welcomed {
    pub(super) boot: u128,
    /// The epoch in which the session begins.
    pub(super) epoch: u32,
    /// Changes up to these were applied, and are durable.
    pub(super) applied: u64,
    pub(super) durable: u64,
    /// The last-applied sequence number of the session before, if its server has crashed.
    pub(super) last_applied: Option<u64>,
    /// Its server has ended it, and all answers were heard: what has none was not applied.
    pub(super) is_complete: bool,
}

/// The changes of the session before.
#[derive(Default)]
struct Sorted {
    /// They are not sent again.
    ended: Ended,
    /// They get numbers of the new session.
    resend: Vec<Change>,
    /// They were acknowledged early, and enter the replay.
    replayed: Vec<Change>,
    /// Inodes that a `Numbered` has named whose answer never arrived.
    unnamed: Vec<Ino>,
}

/// Decides what becomes of each change of the session before (LINK-3). `unlocked`: its file locks
/// may have gone to other clients.
fn sort(state: &mut State, welcomed: &Welcomed, unlocked: bool) -> Sorted {
    let Welcomed { durable, last_applied, is_complete, .. } = *welcomed;
    let clean = state.phase.is_clean() || is_complete;
    let eio = Errno(libc::EIO);
    let mut sorted = Sorted::default();
    for change in state.changes.take_all() {
        let Sorted { ended, resend, replayed, unnamed } = &mut sorted;
        let is_acknowledged = change.pending.role.is_acknowledged();
        if is_acknowledged && last_applied.is_some() {
            replayed.push(change);
            continue;
        }
        // What it names again is not in the replay log: the last-applied sequence number covers it.
        if let Op::Numbered { made, .. } = &change.pending.op {
            unnamed.extend(&made.0);
        }
        let (is_abandoned, is_fatal) = (change.is_abandoned(), change.stage() == Stage::Fatal);
        match &change.pending.op {
            // What it makes has an inode number of the session that has ended. A file that it only
            // opens is opened again with all others.
            op if is_acknowledged && (is_fatal || replay_log::matters(op)) => {
                ended.add(change, Stage::Lost);
            }
            // The new session knows nothing yet that could be forgotten.
            Op::Forget { .. } => ended.fail(change, eio),
            // Nor has it given any space.
            Op::Remaining { .. } => ended.add(change, Stage::Withdrawn),
            _ if is_acknowledged || is_abandoned || change.pending.role.restores() => {
                ended.add(change, Stage::Withdrawn);
            }
            _ if is_fatal => ended.fail(change, eio),
            Op::Release { .. } | Op::Unlock { .. } => resend.push(change),
            // What changes the session alone, such as opening a file, is not done in the new one.
            op if change.may_be_applied() && !clean && replay_log::matters(op) => {
                let found =
                    |last_applied| state.log.unanswered(change.seq, op, (last_applied, durable));
                match last_applied.map(found) {
                    Some(Unanswered::Again) => resend.push(change),
                    Some(Unanswered::Made) => ended.add(change, Stage::Applied),
                    Some(Unanswered::Unknown) | None => ended.fail(change, eio),
                }
            }
            // The new session takes the locks that are held, or has lost them.
            Op::Reclaim { .. } => ended.add(change, Stage::Withdrawn),
            _ if unlocked => ended.fail(change, eio),
            _ => resend.push(change),
        }
    }
    sorted
}

/// Gives the changes of the session before numbers of the new one, behind what restores it. Gives
/// those that are not sent again. If there is a last-applied sequence number, early-acknowledged
/// changes that are not durable are replayed.
pub(super) fn begin_anew(state: &mut State, welcomed: &Welcomed, restore: &dyn Restore) -> Ended {
    let Welcomed { boot, epoch, applied, durable, last_applied, .. } = *welcomed;
    let clean = state.phase.is_clean();
    let ended_by_server = last_applied.is_none() && !clean && boot == state.boot;
    // Others may have had its locks since: a change that waits may rely on one.
    let unlocked = ended_by_server && restore.has_locks(None);
    if unlocked {
        state.lose_locks();
    }
    let Sorted { mut ended, resend, replayed, unnamed } = sort(state, welcomed, unlocked);
    state.lose(&ended, restore);
    let mut again = Vec::new();
    for change in resend {
        if state.is_damaged(&change.pending, Some(restore)) {
            ended.fail(change, Errno(libc::EIO));
        } else {
            again.push(change);
        }
    }
    let mut claims = Vec::new();
    let before = if last_applied.is_none() && clean {
        state.log.clear();
        Before::Clean
    } else if ended_by_server {
        state.log.give_up();
        Before::Ended
    } else {
        let replayable =
            Replayable { made: unnamed, ..state.log.take(last_applied, durable, replayed) };
        if last_applied.is_some() {
            claims.clone_from(&replayable.claims);
        } else {
            state.log.clear();
        }
        Before::Crashed(replayable)
    };
    let Restored { first, rest } = restore.restore(before);
    state.changes.begin_session(epoch, applied);
    state.log.begin_behind(applied);
    state.returned = 0;
    let claims_first = first.iter().filter(|pending| matches!(pending.op, Op::Claim { .. }));
    state.unclaimed = Unclaimed::new(rest, claims_first.count());
    first.into_iter().for_each(|pending| state.push_restoring(pending));
    (state.requests.after, state.requests.remaining) = (state.changes.last(), 0);
    state.log.keep_claims(claims, state.requests.after);
    // They were requested from a server that has ended.
    let requests = &mut state.requests.by_id;
    requests.retain(|_, request| !matches!(request.pending.op, Op::Settled {}));
    for change in again {
        let waiter = Arc::clone(&change.pending.waiter);
        let seq = state.push_change(change);
        ended.moved.push((waiter, Key::Change(seq)));
    }
    let requests = std::mem::take(&mut state.requests.by_id);
    requests.values().for_each(|request| state.claim_for(&request.pending.op));
    state.requests.by_id = requests;
    let newest = state.changes.last();
    for request in state.requests.by_id.values_mut() {
        (request.after, request.covers) = (newest, newest);
    }
    ended.held = state.take_held();
    ended
}
