//! The end of an epoch: what becomes of the changes that are queued or in flight.
//!
//! An early-acknowledged change that fails ends its epoch, and so does a fence. EARLY-ACK-3
//! (`early_ack.rs`) says which changes are lost then.

use crate::rt::collections::HashSet;
use std::sync::Arc;

use ferry_fs::{Errno, Ino};

use super::restore::{Ended, Restore};
use super::state::State;
use crate::client::change::{Change, Key, Stage};
use crate::message::Op;

/// Why an epoch has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The server could not apply an early-acknowledged change. The session has its leases still.
    Refused,
    /// The server has taken the session's leases away.
    Fenced,
}

/// Begins an epoch before the unanswered changes, and before `first`, which the server has not
/// applied. Gives the changes that are not sent again, and the number behind which the leases of
/// the old epoch go back.
pub(super) fn begin_epoch(
    state: &mut State,
    epoch: u32,
    first: Option<Change>,
    why: End,
    restore: &dyn Restore,
) -> (Ended, u64) {
    let mut ended = Ended::default();
    // The server waits for the changes that it was told of, sent or not.
    let sent = state.changes.sent().max(state.returned);
    state.log.end_epoch(sent);
    let unanswered = state.changes.begin_epoch(epoch, sent);
    let mut again = Vec::new();
    let mut lost_inodes: HashSet<Ino> = HashSet::default();
    // The oldest number of a change that gets another one.
    let mut moved_from = None;
    let first = first.map(|change| (0, change));
    let unanswered = unanswered.into_iter().map(|change| (change.seq, change));
    for (seq, change) in first.into_iter().chain(unanswered) {
        let touched = &change.pending.touched;
        let depends =
            why == End::Fenced || seq == 0 || touched.iter().any(|ino| lost_inodes.contains(ino));
        if change.pending.role.is_acknowledged() && depends {
            lost_inodes.extend(touched.iter().copied());
            ended.add(change, Stage::Lost);
        } else if matches!(change.pending.op, Op::Remaining { .. }) {
            // It was true under its number only.
            ended.add(change, Stage::Withdrawn);
        } else {
            moved_from.get_or_insert(seq);
            again.push(change);
        }
    }
    state.lose(&ended, restore);
    for change in again {
        let is_acknowledged = change.pending.role.is_acknowledged();
        if !is_acknowledged && state.is_damaged(&change.pending, Some(restore)) {
            ended.fail(change, Errno(libc::EIO));
            continue;
        }
        let waiter = Arc::clone(&change.pending.waiter);
        let seq = state.push_change(change);
        ended.moved.push((waiter, Key::Change(seq)));
    }
    // No change has a number behind the newest. A request behind a change that has another number
    // now is behind that one.
    let newest = state.changes.last();
    let behind = |after: u64| match moved_from {
        Some(from) if after >= from => newest,
        _ => after.min(newest),
    };
    let requests = &mut state.requests;
    for request in requests.by_id.values_mut() {
        (request.after, request.covers) = (behind(request.after), request.covers.min(sent));
    }
    (requests.after, requests.remaining) = (behind(requests.after), requests.remaining.min(newest));
    state.see_restored();
    state.commit_notes();
    // Changes that are sent again are applied under the leases.
    (ended, if why == End::Refused { newest } else { sent })
}
