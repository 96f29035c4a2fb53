//! Keys and values read back as they were written.

use crate::api::Timestamp;
use crate::keys::*;

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
    for bad in
        [&b""[..], &[0x10, 1], &[0x77], &[0x20, 1], &[0x32, 1], &[0x10, 0, 0, 0, 0, 0, 0, 0, 1, 9]]
    {
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
