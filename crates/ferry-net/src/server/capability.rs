//! Proofs that an earlier server gave an inode, or inode numbers, to a client: hashes under the
//! secret of the volume's timeline.

use std::hash::Hasher;
use std::ops::Range;

use ferry_fs::Ino;
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::message::Claim;

/// Proves that a client was given an inode, which was found in `dir` (0: it is a directory).
pub(super) fn of_inode(key: &[u8; 16], path: &[u8], ino: Ino, dir: Ino) -> u128 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(b"ferry ticket\0");
    hasher.write_u64(ino);
    hasher.write_u64(dir);
    hasher.write(path);
    u128::from(dir) << 64 | u128::from(hasher.finish128().h1)
}

/// The directory in which an inode was found, if the capability is good.
pub(super) fn found_in(key: &[u8; 16], path: &[u8], claim: &Claim) -> Option<Ino> {
    let dir = (claim.capability >> 64) as Ino;
    (claim.capability == of_inode(key, path, claim.ino, dir)).then_some(dir)
}

/// Proves that inode numbers were given to a client.
pub(super) fn of_numbers(key: &[u8; 16], path: &[u8], numbers: &Range<Ino>) -> u128 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(b"ferry numbers\0");
    hasher.write_u64(numbers.start);
    hasher.write_u64(numbers.end);
    hasher.write(path);
    hasher.finish128().as_u128()
}
