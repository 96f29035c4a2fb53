//! Values: counters, inodes, names, segments.

use crate::api::{Ino, Timestamp};

/// Version byte of every value that this code writes.
pub const VALUE_VERSION: u8 = 1;

/// A file up to this size lives in its inode record, in bytes.
pub const INLINE_MAX: usize = 2048;

/// Extents map whole blocks of this many bytes.
pub const BLOCK: u64 = 4096;

/// A value that this version cannot read.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("undecodable {what} record")]
pub struct BadRecord {
    /// Which type of record.
    pub what: &'static str,
}

/// Reads little-endian fields in order.
pub(crate) struct Fields<'v> {
    pub(crate) rest: &'v [u8],
    pub(crate) what: &'static str,
}

impl<'v> Fields<'v> {
    pub(crate) fn open(value: &'v [u8], what: &'static str) -> Result<Self, BadRecord> {
        match value {
            [VALUE_VERSION, rest @ ..] => Ok(Self { rest, what }),
            _ => Err(BadRecord { what }),
        }
    }
    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N], BadRecord> {
        let (head, rest) =
            self.rest.split_first_chunk::<N>().ok_or(BadRecord { what: self.what })?;
        self.rest = rest;
        Ok(*head)
    }
    pub(crate) fn u8(&mut self) -> Result<u8, BadRecord> {
        Ok(self.take::<1>()?[0])
    }
    pub(crate) fn u32(&mut self) -> Result<u32, BadRecord> {
        Ok(u32::from_le_bytes(self.take()?))
    }
    pub(crate) fn u64(&mut self) -> Result<u64, BadRecord> {
        Ok(u64::from_le_bytes(self.take()?))
    }
    pub(crate) fn time(&mut self) -> Result<Timestamp, BadRecord> {
        let secs = i64::from_le_bytes(self.take()?);
        Ok(Timestamp::new(secs, self.u32()?))
    }
    pub(crate) fn end(self) -> Result<(), BadRecord> {
        if self.rest.is_empty() { Ok(()) } else { Err(BadRecord { what: self.what }) }
    }
}

fn put_time(out: &mut Vec<u8>, t: Timestamp) {
    out.extend_from_slice(&t.secs().to_le_bytes());
    out.extend_from_slice(&t.nanos().to_le_bytes());
}

/// What the volume counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// The next inode number never handed out.
    pub next_ino: Ino,
    /// Inodes that exist, the root and orphans among them.
    pub inodes: u64,
}

impl Counters {
    /// As stored.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VALUE_VERSION];
        out.extend_from_slice(&self.next_ino.to_le_bytes());
        out.extend_from_slice(&self.inodes.to_le_bytes());
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let mut f = Fields::open(value, "counters")?;
        let counters = Self { next_ino: f.u64()?, inodes: f.u64()? };
        f.end()?;
        Ok(counters)
    }
}

/// Something is stored under [`xattr`] for this inode.
pub const INODE_HAS_XATTRS: u32 = 1;
/// The contents (or a symlink's target) are the record's own tail.
pub const INODE_INLINE: u32 = 2;

/// An inode as stored: its attributes and, if it is small, its contents.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct InodeRecord {
    /// `INODE_…` bits.
    pub flags: u32,
    /// Type and permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names (a directory: 2 and one for each subdirectory).
    pub nlink: u32,
    /// Device number.
    pub rdev: u32,
    /// Bytes.
    pub size: u64,
    /// Blocks of 4 KiB mapped by extents, reserved and lost ones among them.
    pub blocks: u64,
    /// A directory's parent; 0 otherwise.
    pub parent: Ino,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the contents.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// When it was made.
    pub btime: Timestamp,
    /// The contents, where [`INODE_INLINE`] is set; else empty.
    pub inline: Vec<u8>,
}

impl InodeRecord {
    /// As stored.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(100 + self.inline.len());
        out.push(VALUE_VERSION);
        for v in [self.flags, self.mode, self.uid, self.gid, self.nlink, self.rdev] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        for v in [self.size, self.blocks, self.parent] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        for t in [self.atime, self.mtime, self.ctime, self.btime] {
            put_time(&mut out, t);
        }
        out.extend_from_slice(&self.inline);
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let mut f = Fields::open(value, "inode")?;
        let (flags, mode, uid, gid, nlink, rdev) =
            (f.u32()?, f.u32()?, f.u32()?, f.u32()?, f.u32()?, f.u32()?);
        let (size, blocks, parent) = (f.u64()?, f.u64()?, f.u64()?);
        let (atime, mtime, ctime, btime) = (f.time()?, f.time()?, f.time()?, f.time()?);
        let inline = f.rest.to_vec();
        let inline_len_ok =
            if flags & INODE_INLINE != 0 { inline.len() as u64 == size } else { inline.is_empty() };
        if !inline_len_ok {
            return Err(BadRecord { what: "inode" });
        }
        Ok(Self {
            flags,
            mode,
            uid,
            gid,
            nlink,
            rdev,
            size,
            blocks,
            parent,
            atime,
            mtime,
            ctime,
            btime,
            inline,
        })
    }
}

/// A name's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dentry {
    /// The inode.
    pub ino: Ino,
    /// The `S_IFMT` bits of its mode.
    pub kind: u32,
}

impl Dentry {
    /// As stored.
    pub fn encode(&self) -> [u8; 10] {
        let mut out = [VALUE_VERSION; 10];
        out[1..9].copy_from_slice(&self.ino.to_le_bytes());
        out[9] = (self.kind >> 12) as u8;
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let mut f = Fields::open(value, "dentry")?;
        let dentry = Self { ino: f.u64()?, kind: u32::from(f.u8()?) << 12 };
        f.end()?;
        Ok(dentry)
    }
}

/// A plain number, as the values of [`reserved`] (blocks), [`intent`] (bytes) and [`mark`] (a
/// change) are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number(pub u64);

impl Number {
    /// As stored.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VALUE_VERSION];
        out.extend_from_slice(&self.0.to_le_bytes());
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let mut f = Fields::open(value, "number")?;
        let number = Self(f.u64()?);
        f.end()?;
        Ok(number)
    }
}

/// A segment that holds, or held, data. A segment without a record is free (or the home store's).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Blocks written from its start, summary blocks among them.
    pub filled: u32,
    /// Blocks that extents refer to.
    pub live: u32,
}

impl Segment {
    /// As stored.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VALUE_VERSION];
        out.extend_from_slice(&self.filled.to_le_bytes());
        out.extend_from_slice(&self.live.to_le_bytes());
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let mut f = Fields::open(value, "segment")?;
        let segment = Self { filled: f.u32()?, live: f.u32()? };
        f.end()?;
        Ok(segment)
    }
}
