//! The hash that orders the names of a directory.

use siphasher::sip::SipHasher13;

/// The keyed hash that orders the names of this volume: nobody can choose names that collide.
pub(crate) struct NameHash(SipHasher13);

impl NameHash {
    pub(crate) fn new(key: &[u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(key))
    }

    /// The cookie of `name` with disambiguator 0: 54 bits of hash, never all zero, and 8 of
    /// disambiguator.
    pub(crate) fn base(&self, name: &[u8]) -> u64 {
        (self.0.hash(name) >> 10).max(1) << 8
    }
}
