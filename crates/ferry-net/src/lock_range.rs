//! How a range of file locks changes: the same rule at the server and at the client.

use ferry_fs::FileLock;

/// Gives a range to the owner as `lock` says (`F_UNLCK`: to nobody), among the locks of one client.
/// Locks of one kind that touch become one.
pub(crate) fn set_range(held: &mut Vec<FileLock>, lock: &FileLock) {
    let mut whole = *lock;
    for old in std::mem::take(held) {
        let other = old.owner != lock.owner || old.flock != lock.flock;
        let touches =
            old.start <= lock.end.saturating_add(1) && lock.start <= old.end.saturating_add(1);
        if !other && touches && old.kind == lock.kind {
            (whole.start, whole.end) = (whole.start.min(old.start), whole.end.max(old.end));
            continue;
        }
        if other || old.end < lock.start || lock.end < old.start {
            held.push(old);
            continue;
        }
        if old.start < lock.start {
            held.push(FileLock { end: lock.start - 1, ..old });
        }
        if old.end > lock.end {
            held.push(FileLock { start: lock.end + 1, ..old });
        }
    }
    if lock.kind != libc::F_UNLCK {
        held.push(whole);
    }
}
