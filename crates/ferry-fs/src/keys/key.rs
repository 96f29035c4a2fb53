//! Keys: built, and taken apart.

use crate::api::{Ino, ROOT};

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
