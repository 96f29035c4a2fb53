//! Space that is reserved for the changes of one client, before they come here.
//!
//! A reservation takes blocks from the free ones when it is made, and they count as used until a
//! change draws from them or the reservation gives them back. A change that finds enough in its
//! reservation neither stands in the wait queue nor asks whether there is room for names: it cannot
//! fail for want of space. Nothing of a reservation is on the device: after a crash there is
//! nothing to give back.

use crate::api::Errno;
use crate::cache::folio::PIECE;
use crate::keys::BLOCK;

/// Blocks of the home store that a new inode, or a new name, takes at most: record and entry with
/// the longest name are some 450 bytes, twice because of the copies, twice because pages may be
/// half full.
pub(crate) const INODE_BLOCKS: i64 = 1;
/// Bytes of the home store that a byte of a symbolic link's target takes, for the same reasons.
const TARGET_COPIES: usize = 4;

/// Bytes that a write of `len` bytes takes of a reservation, at most, wherever it writes. A change
/// of size takes as much as a write of nothing.
pub fn write_cost(len: usize) -> u64 {
    // A block that is written in part at each end; one behind the old end, and one that leaves the
    // record.
    (len / BLOCK as usize + len / PIECE + 4) as u64 * BLOCK
}

/// Bytes that a symbolic link takes of a reservation beside one inode.
pub fn target_cost(len: usize) -> u64 {
    ((TARGET_COPIES * len) as u64).div_ceil(BLOCK) * BLOCK
}

/// Blocks and inodes; more than any volume has there is not.
pub(crate) fn amount(bytes: u64, inodes: u64) -> Result<(i64, i64), Errno> {
    let blocks = bytes.div_ceil(BLOCK);
    if blocks.max(inodes) > 1 << 40 {
        Err(Errno(libc::ENOSPC))
    } else {
        Ok((blocks as i64, inodes as i64))
    }
}
