//! Decodes every kind of key and value.

use crate::api::Ino;
use crate::keys::{self, Counters, Dentry, Extent, InodeRecord, Key, Number, Segment};

/// A key that can be decoded.
pub(crate) enum Decoded {
    /// Blocks of a file on the device: inode, byte in the file, first device block, checksums.
    Data(Ino, u64, u64, Vec<u32>),
    /// Anything else.
    Other,
}

/// What cannot be decoded: what is wrong, and whose it is.
pub(crate) struct Undecodable {
    pub(crate) what: String,
    pub(crate) ino: Option<Ino>,
    pub(crate) file_offset: Option<u64>,
}

/// Decodes a key and its value.
pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Decoded, Undecodable> {
    let Some(parsed) = keys::parse(key) else {
        let what = format!("unknown key {}", hex(key));
        return Err(Undecodable { what, ino: None, file_offset: None });
    };
    let done = match parsed {
        Key::Counters => Counters::decode(value).map(drop),
        Key::Unwritten
        | Key::Intent(_)
        | Key::Mark(_)
        | Key::Synced(_)
        | Key::Locker(_)
        | Key::Evicted(_) => Number::decode(value).map(drop),
        Key::Inode(_) => InodeRecord::decode(value).map(drop),
        Key::Dentry(..) => Dentry::decode(value).map(drop),
        Key::Segment(_) => Segment::decode(value).map(drop),
        Key::Xattr(..) | Key::Orphan(_) => Ok(()),
        Key::Extent(ino, offset) => match Extent::decode(value) {
            Ok(Extent::Data { block, crcs }) => return Ok(Decoded::Data(ino, offset, block, crcs)),
            other => other.map(drop),
        },
    };
    done.map(|()| Decoded::Other).map_err(|bad| {
        let (ino, file_offset) = match parsed {
            Key::Inode(ino) | Key::Dentry(ino, ..) | Key::Intent(ino) => (Some(ino), None),
            Key::Extent(ino, offset) => (Some(ino), Some(offset)),
            _ => (None, None),
        };
        Undecodable {
            what: format!("the {} record {} cannot be decoded", bad.what, hex(key)),
            ino,
            file_offset,
        }
    })
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
