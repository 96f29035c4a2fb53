//! How bytes become what an object stores: compressed, then encrypted and authenticated.
//!
//! An object is sealed in parts: each of its frames, and its table. Where the volume is encrypted:
//!
//! * SEAL-1: each object has a key of its own, which follows from the volume's key and the object's
//!   random id. So a nonce is the number of a part: no two parts of one key share it, even where
//!   two owners write objects of one name.
//! * SEAL-2: what identifies the object (its header up to the bytes of contents) and the part (its
//!   number, codec and length) is authenticated with it. No part can take the place of another.
//! * SEAL-3: every object has a sealed table, an empty one too, so that no header is taken for true
//!   that was not written with the key. `super` and the objects that hold the wrapped key are
//!   plain: they are read first, and the wrapping authenticates `super`.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use zeroize::Zeroizing;

/// A random number that names one volume, or one object.
pub(crate) type Id = [u8; 16];

/// Bytes that sealing adds to a part.
pub(crate) const TAG_LEN: usize = 16;
/// The number of the part that is an object's table. Frames count from 0.
pub(crate) const TABLE_PART: u32 = u32::MAX;
/// Bytes of a header that identify its object.
pub(crate) const IDENTITY_LEN: usize = 88;
/// A frame holds the contents themselves.
pub(crate) const CODEC_STORED: u8 = 0;
/// A frame holds the contents compressed with zstd.
pub(crate) const CODEC_ZSTD: u8 = 1;

/// The fastest of the usual levels: most of the gain, and a processor compresses several hundred MB
/// in a second.
const ZSTD_LEVEL: i32 = 1;

/// Whether what an owner writes is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Frames hold the contents themselves.
    Off,
    /// Frames are compressed with zstd, except where that gains little.
    #[default]
    Zstd,
}

/// How a volume's objects are stored. The default reads what is not encrypted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Codec {
    pub compression: Compression,
    pub key: Option<Arc<VolumeKey>>,
}

/// The key of a volume, in the form from which the keys of objects follow.
pub(crate) struct VolumeKey {
    from: Prk,
    secret: Zeroizing<[u8; KEY_LEN]>,
}

/// It shows nothing of the key.
impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeKey")
    }
}

/// Bytes of a key, of a volume or an object.
pub(crate) const KEY_LEN: usize = 32;

impl VolumeKey {
    pub fn new(key: &Zeroizing<[u8; KEY_LEN]>, volume: &Id) -> Self {
        let from = Salt::new(HKDF_SHA256, volume).extract(&key[..]);
        Self { from, secret: key.clone() }
    }

    /// The key itself.
    pub fn secret(&self) -> &[u8; KEY_LEN] {
        &self.secret
    }

    /// The key of an object.
    pub fn object(&self, id: &Id) -> ObjectKey {
        let info = [&b"object"[..], id];
        let expanded = self.from.expand(&info, &AES_256_GCM);
        ObjectKey(LessSafeKey::new(UnboundKey::from(
            expanded.expect("a key of AES-256 is shorter than what HKDF can give"),
        )))
    }
}

/// What seals and opens the parts of one object.
#[derive(Clone)]
pub(crate) struct ObjectKey(LessSafeKey);

/// It shows nothing of the key.
impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ObjectKey")
    }
}

/// A part of an object: what is authenticated beside its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    /// The first bytes of the object's header, behind the magic number.
    pub identity: &'a [u8; IDENTITY_LEN],
    pub number: u32,
    pub codec: u8,
    pub plain_len: u32,
}

impl Part<'_> {
    fn nonce(&self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&self.number.to_le_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    fn associated(&self) -> Aad<[u8; IDENTITY_LEN + 12]> {
        let mut bytes = [0; IDENTITY_LEN + 12];
        let (identity, rest) = bytes.split_at_mut(IDENTITY_LEN);
        identity.copy_from_slice(self.identity);
        rest[..4].copy_from_slice(&self.number.to_le_bytes());
        rest[4..8].copy_from_slice(&u32::from(self.codec).to_le_bytes());
        rest[8..].copy_from_slice(&self.plain_len.to_le_bytes());
        Aad::from(bytes)
    }
}

impl ObjectKey {
    /// Appends the part to `out`, sealed, [`TAG_LEN`] bytes longer.
    pub fn seal(&self, part: Part<'_>, plain: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(plain);
        let tag =
            self.0.seal_in_place_separate_tag(part.nonce(), part.associated(), &mut out[start..]);
        out.extend_from_slice(tag.expect("a part is shorter than AES-GCM can seal").as_ref());
    }

    /// The bytes of a part; `None` if they are not what was sealed.
    pub fn open(&self, part: Part<'_>, sealed: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = sealed.to_vec();
        let len = self.0.open_in_place(part.nonce(), part.associated(), &mut bytes).ok()?.len();
        bytes.truncate(len);
        Some(bytes)
    }
}

thread_local! {
    /// A thread makes its compressor once: its tables take some 100 KiB, and to make it asks the
    /// processor what it can do, which a virtual machine's host has to answer. Without memory for
    /// it frames are stored as they are.
    static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> =
        RefCell::new(zstd::bulk::Compressor::new(ZSTD_LEVEL).ok());
    /// The same for what reads them.
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> =
        RefCell::new(zstd::bulk::Decompressor::new().ok());
}

/// The frame, compressed into `buffer` if that makes it shorter by a block or a sixteenth at least,
/// and its codec.
pub(crate) fn compress<'a>(
    compression: Compression,
    frame: &'a [u8],
    buffer: &'a mut Vec<u8>,
) -> (u8, &'a [u8]) {
    if compression == Compression::Off {
        return (CODEC_STORED, frame);
    }
    let gain = (frame.len() / 16).min(ferry_device::BLOCK_SIZE);
    buffer.clear();
    buffer.resize(frame.len() - gain, 0);
    // A frame that does not fit is an error.
    let len = COMPRESSOR
        .with_borrow_mut(|zstd| zstd.as_mut()?.compress_to_buffer(frame, &mut buffer[..]).ok());
    match len {
        Some(len) => (CODEC_ZSTD, &buffer[..len]),
        None => (CODEC_STORED, frame),
    }
}

/// The contents of a frame of `plain_len` bytes; the error says what is wrong with it.
pub(crate) fn decompress(
    codec: u8,
    stored: Cow<'_, [u8]>,
    plain_len: usize,
) -> Result<Cow<'_, [u8]>, &'static str> {
    let plain = match codec {
        CODEC_STORED => stored,
        CODEC_ZSTD => DECOMPRESSOR
            .with_borrow_mut(|zstd| zstd.as_mut()?.decompress(&stored, plain_len).ok())
            .ok_or("a frame cannot be decompressed")?
            .into(),
        _ => return Err("a frame has an unknown codec"),
    };
    if plain.len() == plain_len { Ok(plain) } else { Err("a frame has another length") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(identity: &[u8; IDENTITY_LEN], number: u32) -> Part<'_> {
        Part { identity, number, codec: CODEC_STORED, plain_len: 5 }
    }

    #[test]
    fn a_part_is_opened_only_as_what_it_was_sealed_as() {
        let volume = VolumeKey::new(&Zeroizing::new([7; KEY_LEN]), &[1; 16]);
        let (identity, key) = ([3; IDENTITY_LEN], volume.object(&[2; 16]));
        let mut sealed = Vec::new();
        key.seal(part(&identity, 4), b"plain", &mut sealed);
        assert_eq!(sealed.len(), 5 + TAG_LEN);
        assert_eq!(key.open(part(&identity, 4), &sealed).as_deref(), Some(&b"plain"[..]));
        assert_eq!(key.open(part(&identity, 5), &sealed), None, "another part");
        assert_eq!(key.open(part(&[4; IDENTITY_LEN], 4), &sealed), None, "another object");
        let codec = Part { codec: CODEC_ZSTD, ..part(&identity, 4) };
        assert_eq!(key.open(codec, &sealed), None, "another codec");
        let other = volume.object(&[9; 16]);
        assert_eq!(other.open(part(&identity, 4), &sealed), None, "another id");
        let other = VolumeKey::new(&Zeroizing::new([7; KEY_LEN]), &[8; 16]).object(&[2; 16]);
        assert_eq!(other.open(part(&identity, 4), &sealed), None, "another volume");
    }

    #[test]
    fn a_frame_is_compressed_only_where_that_gains() {
        let mut buffer = Vec::new();
        let zstd = Compression::Zstd;
        let even = vec![b'a'; 64 << 10];
        let (codec, stored) = compress(zstd, &even, &mut buffer);
        assert_eq!(codec, CODEC_ZSTD);
        assert!(stored.len() < 1024);
        assert_eq!(decompress(codec, stored.into(), even.len()), Ok(even.clone().into()));
        assert!(decompress(codec, stored.into(), even.len() - 1).is_err());
        let mut state = 1_u64;
        let random: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(64 << 10)
        .collect();
        assert_eq!(compress(zstd, &random, &mut buffer).0, CODEC_STORED);
        assert_eq!(compress(Compression::Off, &even, &mut buffer).0, CODEC_STORED);
    }
}
