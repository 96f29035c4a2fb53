//! What a change was that the server has decided: as if it had been promised, so that it can be made again.

use super::kept::KeptChange;
use crate::message::{Known, Made, Op, Outcome, Promised};

/// Its time, and the number of what it has made; `None`: it cannot be made again. An append gets its place in the file.
pub(super) fn as_made(change: &mut KeptChange, outcome: &Outcome, made: &Made) -> Option<Promised> {
    let ino = match (&mut change.op, outcome) {
        (Op::Mknod { .. } | Op::Mkdir { .. } | Op::Symlink { .. }, Outcome::Entry { known: Some(known) }) => {
            known.attr.ino
        }
        (Op::Create { .. }, Outcome::Entry { known: Some(known) }) if is_new(known) => known.attr.ino,
        (Op::Write { offset, data, append, .. }, Outcome::Count { count }) => {
            data.truncate(*count as usize);
            if std::mem::take(append) {
                *offset = made.size.checked_sub(*count)?;
            }
            0
        }
        (Op::Open { flags, .. }, _) if *flags & libc::O_TRUNC == 0 => return None,
        (
            Op::Link { .. }
            | Op::Unlink { .. }
            | Op::Rmdir { .. }
            | Op::Rename { .. }
            | Op::Setattr { .. }
            | Op::Setxattr { .. }
            | Op::Removexattr { .. }
            | Op::Fallocate { .. }
            | Op::Open { .. },
            _,
        ) => 0,
        _ => return None,
    };
    Some(Promised { at: made.at, ino })
}

/// It may have been there, and was opened.
fn is_new(Known { attr, .. }: &Known) -> bool {
    attr.nlink == 1 && attr.size == 0 && attr.atime == attr.ctime && attr.mtime == attr.ctime
}
