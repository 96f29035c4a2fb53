//! How the volume of a seed stores its objects: compressed or not, encrypted or not.

use ferry_object::{Compression, Encryption, Kdf, Passphrase, VolumeOptions};

/// The options of the volume of a seed.
pub(super) fn options(seed: u64, capacity: u64, boundary: (u64, u64)) -> VolumeOptions {
    // One seed in four: it takes time that other seeds can use.
    let compression = if seed.is_multiple_of(4) { Compression::Zstd } else { Compression::Off };
    let encryption = passphrase(seed).map(|passphrase| Encryption {
        passphrase,
        // The cheapest: many owners open it.
        kdf: Kdf { memory_kib: 8, passes: 1 },
    });
    VolumeOptions { compression, encryption, ..VolumeOptions::new(capacity, boundary) }
}

/// What opens the volume of a seed, if it is encrypted.
pub(super) fn passphrase(seed: u64) -> Option<Passphrase> {
    let passphrase = Passphrase::new(b"open sesame".to_vec().into());
    passphrase.filter(|_| seed % 8 < 2)
}
