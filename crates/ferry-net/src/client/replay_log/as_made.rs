//! How the server has applied a change that it has decided itself: what a replay needs to know.

use crate::message::{Acknowledged, Effect, Known, Made, Naming, Op, Outcome, Replay};

/// The time of the change, and the inode number of what it has made. `None`: the change cannot be
/// replayed. An append becomes a write at its offset.
pub(super) fn as_made(op: &mut Op, outcome: &Outcome, made: &Made) -> Option<Acknowledged> {
    match (&mut *op, outcome) {
        (Op::Write { offset, data, append, .. }, Outcome::Count { count }) => {
            data.truncate(*count as usize);
            if std::mem::take(append) {
                *offset = made.size.checked_sub(*count)?;
            }
        }
        (Op::Write { .. }, _) => return None,
        (Op::Open { flags, .. }, _) if *flags & libc::O_TRUNC == 0 => return None,
        _ => {}
    }
    let info = op.info();
    if info.effect == Effect::Nothing || info.replay == Replay::Never {
        return None;
    }
    let ino = match outcome {
        _ if !info.makes.is_inode() => 0,
        Outcome::Entry { known: Some(known) }
            if info.naming != Naming::AddsOrOpens || is_new(known) =>
        {
            known.attr.ino
        }
        _ => return None,
    };
    Some(Acknowledged { at: made.at, ino })
}

/// Whether the change has made the inode. It may have opened an older one.
fn is_new(Known { attr, .. }: &Known) -> bool {
    attr.nlink == 1 && attr.size == 0 && attr.atime == attr.ctime && attr.mtime == attr.ctime
}
