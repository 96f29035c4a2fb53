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

/// The same as a server of release 0.1.0 has given it, which names no directory.
fn of_inode_before(key: &[u8; 16], path: &[u8], ino: Ino) -> u128 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(b"ferry ticket\0");
    hasher.write_u64(ino);
    hasher.write(path);
    hasher.finish128().as_u128()
}

/// Where an inode was found, as a good capability says.
pub(super) enum FoundIn {
    /// In this directory (0: it is a directory).
    Dir(Ino),
    /// The server was of release 0.1.0, which does not say that.
    Somewhere,
}

/// Where an inode was found, if the capability is good.
pub(super) fn found_in(key: &[u8; 16], path: &[u8], claim: &Claim) -> Option<FoundIn> {
    let dir = (claim.capability >> 64) as Ino;
    if claim.capability == of_inode(key, path, claim.ino, dir) {
        return Some(FoundIn::Dir(dir));
    }
    let before = claim.capability == of_inode_before(key, path, claim.ino);
    before.then_some(FoundIn::Somewhere)
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
