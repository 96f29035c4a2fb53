//! What the home store says about itself, signed: a search for lost trees meets bytes that users
//! chose, and must not believe them.

use crate::Seq;
use crate::bytes::u64_at;
use crate::log::format::POSITION_END;
use crate::types::Point;
use siphasher::sip::SipHasher24;

/// The volume's secret.
pub type HashKey = [u8; 16];

/// Bytes of the record in the home store: context, position, chain id, bytes of all keys and
/// values, 8 each; a byte, 1 if clean; the signature of all that, 8.
const STATE_LEN: usize = SIGNED_LEN + 8;
const SIGNED_LEN: usize = 33;
/// Names of files are hashed under the same key, and have no zeros in them: no hash of a name is a
/// signature.
const DOMAIN: [u8; 8] = *b"\0state\0\0";

/// What the home store says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeState {
    /// The log is read from here.
    pub point: Point,
    /// The journal was closed after this checkpoint, and nothing was written since.
    pub clean: bool,
    /// Bytes of all keys and values.
    pub live_bytes: u64,
}

impl HomeState {
    pub(super) fn encode(&self, key: &HashKey) -> [u8; STATE_LEN] {
        let mut out = [0; STATE_LEN];
        out[0..8].copy_from_slice(&self.point.seq.0.to_le_bytes());
        out[8..16].copy_from_slice(&self.point.position.to_le_bytes());
        out[16..24].copy_from_slice(&self.point.id.to_le_bytes());
        out[24..32].copy_from_slice(&self.live_bytes.to_le_bytes());
        out[32] = u8::from(self.clean);
        let signature = sign(&out[..SIGNED_LEN], key);
        out[SIGNED_LEN..].copy_from_slice(&signature);
        out
    }

    /// `None`: no journal of this volume has written it.
    pub(super) fn decode(bytes: &[u8], key: &HashKey) -> Option<Self> {
        if bytes.len() != STATE_LEN || sign(&bytes[..SIGNED_LEN], key) != bytes[SIGNED_LEN..] {
            return None;
        }
        let state = Self {
            point: Point {
                seq: Seq(u64_at(bytes, 0)),
                position: u64_at(bytes, 8),
                id: u64_at(bytes, 16),
            },
            live_bytes: u64_at(bytes, 24),
            clean: bytes[32] != 0,
        };
        Some(state)
            .filter(|state| state.point.seq.0 < POSITION_END && state.point.position < POSITION_END)
    }
}

fn sign(bytes: &[u8], key: &HashKey) -> [u8; 8] {
    SipHasher24::new_with_key(key).hash(&[&DOMAIN, bytes].concat()).to_le_bytes()
}
