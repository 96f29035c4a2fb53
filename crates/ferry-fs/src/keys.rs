//! Keys and values of the file system in the journal's view (`docs/format.md` draws them).
//!
//! All integers of a key are big-endian, so that keys sort by number; those of values are
//! little-endian. Everything that belongs to one inode stands together: its record, its attributes,
//! its names (a directory) or its extents (a file). The first byte of every value is the version of
//! its type.

use crate::api::{Ino, ROOT, Timestamp};

/// Version byte of every value that this code writes.
pub const VALUE_VERSION: u8 = 1;
/// A file up to this size lives in its inode record, in bytes.
pub const INLINE_MAX: usize = 2048;
/// Extents map whole blocks of this many bytes.
pub const BLOCK: u64 = 4096;

const SPACE_COUNTERS: u8 = 0x01;
const SPACE_UNWRITTEN: u8 = 0x02;
const SPACE_INODE: u8 = 0x10;
const SPACE_SEGMENT: u8 = 0x20;
const SPACE_ORPHAN: u8 = 0x30;
const SPACE_INTENT: u8 = 0x31;
const SPACE_MARK: u8 = 0x32;
const SPACE_SYNCED: u8 = 0x33;
const SPACE_LOCKER: u8 = 0x34;
const SPACE_EVICTED: u8 = 0x35;

const PART_RECORD: u8 = 1;
const PART_XATTR: u8 = 2;
const PART_DENTRY: u8 = 3;
const PART_EXTENT: u8 = 4;

/// The first number that a new volume gives to an inode.
pub const INO_FIRST: Ino = ROOT + 1;
/// No inode number is so high: numbers are given one after the other, and there must always be a
/// next one.
pub const INO_END: Ino = u64::MAX - (1 << 40);

/// A value that this version cannot read.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("undecodable {what} record")]
pub struct BadRecord {
    /// Which type of record.
    pub what: &'static str,
}

/// The volume-wide counters' key.
pub fn counters() -> Vec<u8> {
    vec![SPACE_COUNTERS]
}

/// The key of the number of blocks in unwritten extents, on the whole volume (absent:
/// none).
pub fn unwritten() -> Vec<u8> {
    vec![SPACE_UNWRITTEN]
}

fn numbered<const N: usize>(space: u8, number: [u8; N]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + N);
    key.push(space);
    key.extend_from_slice(&number);
    key
}

fn of_inode(ino: Ino, part: u8, room: usize) -> Vec<u8> {
    let mut key = Vec::with_capacity(10 + room);
    key.push(SPACE_INODE);
    key.extend_from_slice(&ino.to_be_bytes());
    key.push(part);
    key
}

/// An inode record's key.
pub fn inode(ino: Ino) -> Vec<u8> {
    of_inode(ino, PART_RECORD, 0)
}

/// The key of attribute `name`; with an empty name the first of all of them.
pub fn xattr(ino: Ino, name: &[u8]) -> Vec<u8> {
    let mut key = of_inode(ino, PART_XATTR, name.len());
    key.extend_from_slice(name);
    key
}

/// The first key behind all attributes of `ino`.
pub fn xattr_end(ino: Ino) -> Vec<u8> {
    of_inode(ino, PART_XATTR + 1, 0)
}

/// The key of a directory entry: `cookie` is the name's hash and disambiguator of the name, as in
/// `docs/format.md`.
pub fn dentry(dir: Ino, cookie: u64, name: &[u8]) -> Vec<u8> {
    let mut key = dentry_from(dir, cookie);
    key.extend_from_slice(name);
    key
}

/// The first key of a directory entry with at least this cookie.
pub fn dentry_from(dir: Ino, cookie: u64) -> Vec<u8> {
    let mut key = of_inode(dir, PART_DENTRY, 8 + 24);
    key.extend_from_slice(&cookie.to_be_bytes());
    key
}

/// The first key behind all entries of `dir`.
pub fn dentry_end(dir: Ino) -> Vec<u8> {
    of_inode(dir, PART_DENTRY + 1, 0)
}

/// The key of the extent that starts at byte `offset` of the file.
pub fn extent(ino: Ino, offset: u64) -> Vec<u8> {
    let mut key = of_inode(ino, PART_EXTENT, 8);
    key.extend_from_slice(&offset.to_be_bytes());
    key
}

/// The first key behind all extents of `ino`.
pub fn extent_end(ino: Ino) -> Vec<u8> {
    of_inode(ino, PART_EXTENT + 1, 0)
}

/// The first key behind everything that belongs to `ino`.
pub fn inode_end(ino: Ino) -> Vec<u8> {
    of_inode(ino, 0xff, 0)
}

/// A segment record's key.
pub fn segment(index: u32) -> Vec<u8> {
    numbered(SPACE_SEGMENT, index.to_be_bytes())
}

/// The first key behind all segments.
pub fn segment_end() -> Vec<u8> {
    vec![SPACE_SEGMENT + 1]
}

/// The key that says: `ino` has no name left and waits to be reclaimed.
pub fn orphan(ino: Ino) -> Vec<u8> {
    numbered(SPACE_ORPHAN, ino.to_be_bytes())
}

/// The first key behind all orphans.
pub fn orphan_end() -> Vec<u8> {
    vec![SPACE_ORPHAN + 1]
}

/// The key that says: a truncation of `ino` was begun; extents behind the size in its value are
/// still to be dropped.
pub fn intent(ino: Ino) -> Vec<u8> {
    numbered(SPACE_INTENT, ino.to_be_bytes())
}

/// The first key behind all intents.
pub fn intent_end() -> Vec<u8> {
    vec![SPACE_INTENT + 1]
}

/// The key that says which change of a client's session was made last, of those that left a mark.
pub fn mark(session: u128) -> Vec<u8> {
    numbered(SPACE_MARK, session.to_be_bytes())
}

/// The first key behind all marks.
pub fn mark_end() -> Vec<u8> {
    vec![SPACE_MARK + 1]
}

/// The key that says up to which change of a client's session everything is durable, contents too.
pub fn synced(session: u128) -> Vec<u8> {
    numbered(SPACE_SYNCED, session.to_be_bytes())
}

/// The first key behind all of those.
pub fn synced_end() -> Vec<u8> {
    vec![SPACE_SYNCED + 1]
}

/// The key that says: a client's session may hold file locks, and may reclaim them from the next
/// server.
pub fn locker(session: u128) -> Vec<u8> {
    numbered(SPACE_LOCKER, session.to_be_bytes())
}

/// The first key behind all of those.
pub fn locker_end() -> Vec<u8> {
    vec![SPACE_LOCKER + 1]
}

/// The key that says: a client's session was evicted by an administrator, and nobody goes on with
/// it.
pub fn evicted(session: u128) -> Vec<u8> {
    numbered(SPACE_EVICTED, session.to_be_bytes())
}

/// The first key behind all of those.
pub fn evicted_end() -> Vec<u8> {
    vec![SPACE_EVICTED + 1]
}

/// A key taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key<'k> {
    /// The volume's counters.
    Counters,
    /// The number of unwritten blocks.
    Unwritten,
    /// An inode record.
    Inode(Ino),
    /// An extended attribute and its name.
    Xattr(Ino, &'k [u8]),
    /// A directory entry: directory, cookie, name.
    Dentry(Ino, u64, &'k [u8]),
    /// A file's extent: inode and byte offset.
    Extent(Ino, u64),
    /// A segment.
    Segment(u32),
    /// An inode without a name.
    Orphan(Ino),
    /// A truncation that was begun.
    Intent(Ino),
    /// The newest change of a session.
    Mark(u128),
    /// Changes of a session that are durable.
    Synced(u128),
    /// A session that may hold file locks.
    Locker(u128),
    /// A session that was evicted.
    Evicted(u128),
}

/// Takes a key apart; `None` for one that no version of this code wrote.
pub fn parse(key: &[u8]) -> Option<Key<'_>> {
    let be64 = |b: &[u8]| Some(u64::from_be_bytes(b.try_into().ok()?));
    match key {
        [SPACE_COUNTERS] => Some(Key::Counters),
        [SPACE_UNWRITTEN] => Some(Key::Unwritten),
        [SPACE_SEGMENT, rest @ ..] => Some(Key::Segment(u32::from_be_bytes(rest.try_into().ok()?))),
        [SPACE_ORPHAN, rest @ ..] => Some(Key::Orphan(be64(rest)?)),
        [SPACE_INTENT, rest @ ..] => Some(Key::Intent(be64(rest)?)),
        [SPACE_MARK, rest @ ..] => Some(Key::Mark(u128::from_be_bytes(rest.try_into().ok()?))),
        [SPACE_SYNCED, rest @ ..] => Some(Key::Synced(u128::from_be_bytes(rest.try_into().ok()?))),
        [SPACE_LOCKER, rest @ ..] => Some(Key::Locker(u128::from_be_bytes(rest.try_into().ok()?))),
        [SPACE_EVICTED, rest @ ..] => {
            Some(Key::Evicted(u128::from_be_bytes(rest.try_into().ok()?)))
        }
        [SPACE_INODE, rest @ ..] => {
            let ino = be64(rest.get(..8)?)?;
            match (*rest.get(8)?, &rest[9..]) {
                (PART_RECORD, []) => Some(Key::Inode(ino)),
                (PART_XATTR, name) if !name.is_empty() => Some(Key::Xattr(ino, name)),
                (PART_DENTRY, tail) if tail.len() > 8 => {
                    Some(Key::Dentry(ino, be64(&tail[..8])?, &tail[8..]))
                }
                (PART_EXTENT, tail) => Some(Key::Extent(ino, be64(tail)?)),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Reads little-endian fields in order.
struct Fields<'v> {
    rest: &'v [u8],
    what: &'static str,
}

impl<'v> Fields<'v> {
    fn open(value: &'v [u8], what: &'static str) -> Result<Self, BadRecord> {
        match value {
            [VALUE_VERSION, rest @ ..] => Ok(Self { rest, what }),
            _ => Err(BadRecord { what }),
        }
    }
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BadRecord> {
        let (head, rest) =
            self.rest.split_first_chunk::<N>().ok_or(BadRecord { what: self.what })?;
        self.rest = rest;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8, BadRecord> {
        Ok(self.take::<1>()?[0])
    }
    fn u32(&mut self) -> Result<u32, BadRecord> {
        Ok(u32::from_le_bytes(self.take()?))
    }
    fn u64(&mut self) -> Result<u64, BadRecord> {
        Ok(u64::from_le_bytes(self.take()?))
    }
    fn time(&mut self) -> Result<Timestamp, BadRecord> {
        let secs = i64::from_le_bytes(self.take()?);
        Ok(Timestamp::new(secs, self.u32()?))
    }
    fn end(self) -> Result<(), BadRecord> {
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

/// Where a range of a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In a segment: first block on the device (in units of [`BLOCK`]) and the CRC32C of each
    /// block.
    Data {
        /// Device block number.
        block: u64,
        /// One for each block; their number is the extent's length.
        crcs: Vec<u32>,
    },
    /// An unwritten extent: it has space, and reads as zeros. The number of blocks.
    Unwritten {
        /// Length in blocks.
        blocks: u64,
    },
    /// The contents were lost to damage: reading fails. They take no space.
    Lost {
        /// Length in blocks.
        blocks: u64,
    },
}

const EXTENT_DATA: u8 = 0;
const EXTENT_UNWRITTEN: u8 = 1;
const EXTENT_LOST: u8 = 2;

/// A longest data extent, in blocks.
pub const EXTENT_BLOCKS_MAX: usize = 2048;

impl Extent {
    /// Length in blocks.
    pub fn blocks(&self) -> u64 {
        match self {
            Extent::Data { crcs, .. } => crcs.len() as u64,
            Extent::Unwritten { blocks } | Extent::Lost { blocks } => *blocks,
        }
    }
    /// As stored.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Extent::Data { block, crcs } => {
                let mut out = Vec::with_capacity(10 + 4 * crcs.len());
                out.extend_from_slice(&[VALUE_VERSION, EXTENT_DATA]);
                out.extend_from_slice(&block.to_le_bytes());
                crcs.iter().for_each(|c| out.extend_from_slice(&c.to_le_bytes()));
                out
            }
            Extent::Unwritten { blocks } => Self::encode_length(EXTENT_UNWRITTEN, *blocks),
            Extent::Lost { blocks } => Self::encode_length(EXTENT_LOST, *blocks),
        }
    }
    fn encode_length(kind: u8, blocks: u64) -> Vec<u8> {
        let mut out = vec![VALUE_VERSION, kind];
        out.extend_from_slice(&blocks.to_le_bytes());
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord { what: "extent" };
        let mut f = Fields::open(value, "extent")?;
        match f.u8()? {
            EXTENT_DATA => {
                let block = f.u64()?;
                let (crcs, rest) = f.rest.as_chunks::<4>();
                if crcs.is_empty() || !rest.is_empty() || crcs.len() > EXTENT_BLOCKS_MAX {
                    return Err(bad);
                }
                Ok(Extent::Data {
                    block,
                    crcs: crcs.iter().map(|c| u32::from_le_bytes(*c)).collect(),
                })
            }
            kind @ (EXTENT_UNWRITTEN | EXTENT_LOST) => {
                let blocks = f.u64()?;
                f.end()?;
                match kind {
                    _ if blocks == 0 => Err(bad),
                    EXTENT_UNWRITTEN => Ok(Extent::Unwritten { blocks }),
                    _ => Ok(Extent::Lost { blocks }),
                }
            }
            _ => Err(bad),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_parse_back_and_stand_together() {
        let keys = [
            (counters(), Key::Counters),
            (unwritten(), Key::Unwritten),
            (inode(7), Key::Inode(7)),
            (xattr(7, b"user.a"), Key::Xattr(7, b"user.a")),
            (dentry(7, 0x300, b"name"), Key::Dentry(7, 0x300, b"name")),
            (extent(7, 1 << 40), Key::Extent(7, 1 << 40)),
            (inode(8), Key::Inode(8)),
            (segment(3), Key::Segment(3)),
            (orphan(9), Key::Orphan(9)),
            (intent(9), Key::Intent(9)),
            (mark(1 << 100), Key::Mark(1 << 100)),
            (synced(1 << 100), Key::Synced(1 << 100)),
            (locker(1 << 100), Key::Locker(1 << 100)),
            (evicted(1 << 100), Key::Evicted(1 << 100)),
        ];
        for (bytes, key) in &keys {
            assert_eq!(parse(bytes).as_ref(), Some(key));
        }
        assert!(keys.windows(2).all(|w| w[0].0 < w[1].0), "keys sort in the order above");
        assert!(xattr(7, b"\xff") < xattr_end(7) && xattr_end(7) <= dentry_from(7, 0));
        assert!(
            extent(7, u64::MAX) < extent_end(7)
                && extent_end(7) < inode_end(7)
                && inode_end(7) < inode(8)
        );
        for bad in [
            &b""[..],
            &[0x10, 1],
            &[0x77],
            &[0x20, 1],
            &[0x32, 1],
            &[0x10, 0, 0, 0, 0, 0, 0, 0, 1, 9],
        ] {
            assert_eq!(parse(bad), None);
        }
    }

    #[test]
    fn values_survive_and_short_ones_are_refused() {
        let inode = InodeRecord {
            flags: INODE_INLINE,
            mode: 0o100644,
            size: 3,
            mtime: Timestamp::new(-5, 999_999_999),
            inline: b"abc".to_vec(),
            ..InodeRecord::default()
        };
        assert_eq!(InodeRecord::decode(&inode.encode()), Ok(inode.clone()));
        let data = Extent::Data { block: 99, crcs: vec![1, 2, 3] };
        let reserved = Extent::Unwritten { blocks: 7 };
        let lost = Extent::Lost { blocks: 7 };
        let dentry = Dentry { ino: 5, kind: libc::S_IFDIR };
        let segment = Segment { filled: 9, live: 4 };
        let counters = Counters { next_ino: 2, inodes: 1 };
        assert_eq!(Extent::decode(&data.encode()), Ok(data.clone()));
        assert_eq!(Extent::decode(&reserved.encode()), Ok(reserved));
        assert_eq!(Extent::decode(&lost.encode()), Ok(lost));
        assert_eq!(Dentry::decode(&dentry.encode()), Ok(dentry));
        assert_eq!(Segment::decode(&segment.encode()), Ok(segment));
        assert_eq!(Counters::decode(&counters.encode()), Ok(counters));
        assert_eq!(Number::decode(&Number(77).encode()), Ok(Number(77)));
        assert!(InodeRecord::decode(&inode.encode()[..90]).is_err());
        assert!(Extent::decode(&data.encode()[..13]).is_err());
        assert!(Extent::decode(&[VALUE_VERSION, 0, 1, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(Dentry::decode(&[2; 10]).is_err());
    }
}
