//! Log space of transactions whose size other layers must know: mkfs computes the smallest log from
//! the largest transaction.

use crate::api::{NAME_MAX, SYMLINK_MAX, XATTR_SIZE_MAX};
use ferry_journal::Credits;

/// A longest name of an extended attribute, in bytes.
pub(crate) const XATTR_NAME_MAX: usize = 255;
/// Bytes of a session's record in the log: key and value.
pub(crate) const SESSION_BYTES: u32 = 32;

/// Bytes of a key and a record without contents, at most.
pub(crate) const RECORD_BYTES: u32 = 128;

/// Bytes of the longest entry and its key.
pub(crate) const DENTRY_BYTES: u32 = 32 + NAME_MAX as u32;

/// Bytes of the counters, and of an orphan's key.
pub(crate) const SMALL_BYTES: u32 = 32;

/// Bytes of a record with the longest contents that it can hold, and its key.
pub(crate) const FULL_RECORD_BYTES: u32 = RECORD_BYTES + SYMLINK_MAX as u32;

/// The credits of a transaction that also stores a session's last-applied sequence number.
pub(crate) const fn with_seq(Credits { keys, bytes, urgent }: Credits) -> Credits {
    Credits { keys: keys + 1, bytes: bytes + SESSION_BYTES, urgent }
}

/// What setting an attribute takes of the log: its key and value, and the inode's record.
pub(crate) const fn xattr_credits(name: usize, value: usize) -> Credits {
    Credits { keys: 2, bytes: FULL_RECORD_BYTES + (16 + name + value) as u32, urgent: false }
}

/// No operation that is done in one transaction needs a larger one.
pub(crate) const LARGEST_TRANSACTION: Credits =
    with_seq(xattr_credits(XATTR_NAME_MAX, XATTR_SIZE_MAX));
