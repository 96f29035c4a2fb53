//! What a change was that the server has decided: as if it had been promised, so that it can be
//! made again.

use super::kept::KeptChange;
use crate::message::{Effect, Known, Made, Naming, Op, Outcome, Promised, Replay};

/// Its time, and the number of what it has made; `None`: it cannot be made again. An append gets
/// its place in the file.
pub(super) fn as_made(change: &mut KeptChange, outcome: &Outcome, made: &Made) -> Option<Promised> {
    match (&mut change.op, outcome) {
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
    let info = change.op.info();
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
    Some(Promised { at: made.at, ino })
}

/// It may have been there, and was opened.
fn is_new(Known { attr, .. }: &Known) -> bool {
    attr.nlink == 1 && attr.size == 0 && attr.atime == attr.ctime && attr.mtime == attr.ctime
}
