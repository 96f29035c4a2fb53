//! Every code is found where it should be, and only there.

use super::check::Checker;
use super::report::Code;
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::keys::{self, *};
use ferry_journal::Geometry;
use std::collections::BTreeMap;

const SEGMENT_BLOCKS: u64 = 64;
const FIRST_BLOCK: u64 = 1024;

fn geometry() -> Geometry {
    Geometry {
        volume_id: [7; 16],
        hash_key: [7; 16],
        log_offset: 1 << 20,
        log_len: 1 << 20,
        home_map_offsets: [64 << 10, 72 << 10],
        home_map_len: 8192,
        segments_offset: FIRST_BLOCK * BLOCK,
        segment_len: SEGMENT_BLOCKS * BLOCK,
        segment_count: 8,
    }
}

fn hash(name: &[u8]) -> u64 {
    u64::from(crc32c::crc32c(name)) + 1
}

/// A view as a map, with a small tree in it: /d/f (extents), /d/g and /h (one inode, inline), /s ->
/// target.
struct Volume(BTreeMap<Vec<u8>, Vec<u8>>);

const D: Ino = 2;
const F: Ino = 3;
const G: Ino = 4;
const S: Ino = 5;
const NEXT: Ino = 9;

fn file(size: u64, blocks: u64, nlink: u32) -> InodeRecord {
    InodeRecord { mode: libc::S_IFREG | 0o644, nlink, size, blocks, ..InodeRecord::default() }
}

fn dir(parent: Ino, nlink: u32, names: u64) -> InodeRecord {
    InodeRecord {
        mode: libc::S_IFDIR | 0o755,
        nlink,
        parent,
        size: names,
        ..InodeRecord::default()
    }
}

fn inline(mode: u32, nlink: u32, bytes: &[u8]) -> InodeRecord {
    InodeRecord {
        flags: INODE_INLINE,
        mode,
        nlink,
        size: bytes.len() as u64,
        inline: bytes.to_vec(),
        ..InodeRecord::default()
    }
}

impl Volume {
    fn new() -> Self {
        let mut v = Self(BTreeMap::new());
        v.set(keys::counters(), &Counters { next_ino: NEXT, inodes: 5 }.encode());
        v.record(ROOT, &dir(ROOT, 3, 3));
        v.record(D, &InodeRecord { flags: INODE_HAS_XATTRS, ..dir(ROOT, 2, 2) });
        v.set(keys::xattr(D, b"user.a"), b"1");
        v.record(F, &file(3 * BLOCK + 1, 6, 1));
        v.data(F, 0, FIRST_BLOCK + 1, 4);
        v.set(keys::extent(F, 8 * BLOCK), &Extent::Reserved { blocks: 2 }.encode());
        v.record(G, &inline(libc::S_IFREG | 0o600, 2, b"small"));
        v.record(S, &inline(libc::S_IFLNK | 0o777, 1, b"target"));
        v.name(ROOT, b"d", D, libc::S_IFDIR);
        v.name(ROOT, b"h", G, libc::S_IFREG);
        v.name(ROOT, b"s", S, libc::S_IFLNK);
        v.name(D, b"f", F, libc::S_IFREG);
        v.name(D, b"g", G, libc::S_IFREG);
        v.set(keys::segment(0), &Segment { filled: 5, live: 4 }.encode());
        v.set(keys::reserved(), &Number(2).encode());
        v
    }
    fn set(&mut self, key: Vec<u8>, value: &[u8]) {
        self.0.insert(key, value.to_vec());
    }
    fn record(&mut self, ino: Ino, record: &InodeRecord) {
        self.set(keys::inode(ino), &record.encode());
    }
    /// Adds a name; a directory's size follows.
    fn name(&mut self, dir: Ino, name: &[u8], ino: Ino, kind: u32) {
        self.name_at(dir, hash(name) << 8, name, ino, kind);
    }
    fn name_at(&mut self, dir: Ino, cookie: u64, name: &[u8], ino: Ino, kind: u32) {
        self.set(keys::dentry(dir, cookie, name), &Dentry { ino, kind }.encode());
        self.count_names(dir);
    }
    fn unname(&mut self, dir: Ino, name: &[u8]) {
        self.0.remove(&keys::dentry(dir, hash(name) << 8, name));
        self.count_names(dir);
    }
    fn count_names(&mut self, dir: Ino) {
        let names = self.0.range(keys::dentry_from(dir, 0)..keys::dentry_end(dir)).count() as u64;
        let Some(value) = self.0.get(&keys::inode(dir)) else { return };
        let record = InodeRecord::decode(value).expect("made here");
        if record.mode & libc::S_IFMT == libc::S_IFDIR {
            self.record(dir, &InodeRecord { size: names, ..record });
        }
    }
    fn data(&mut self, ino: Ino, offset: u64, block: u64, blocks: usize) {
        self.set(
            keys::extent(ino, offset),
            &Extent::Data { block, crcs: vec![0; blocks] }.encode(),
        );
    }
    fn check(&self) -> Vec<Code> {
        let hash: super::check::NameHash<'_> = &hash;
        let mut checker = Checker::new(&geometry(), hash, &[6, 7], None);
        for (key, value) in &self.0 {
            checker.key(key, value);
        }
        checker.finish();
        let mut codes: Vec<_> = checker.findings.list.iter().map(|finding| finding.code).collect();
        codes.dedup();
        codes
    }
}

#[test]
fn a_sound_tree_is_clean_and_counted() {
    let volume = Volume::new();
    assert_eq!(volume.check(), []);
    let hash: super::check::NameHash<'_> = &hash;
    let mut checker = Checker::new(&geometry(), hash, &[6, 7], None);
    volume.0.iter().for_each(|(key, value)| checker.key(key, value));
    checker.finish();
    let holdings = checker.holdings;
    assert_eq!(
        (holdings.inodes, holdings.directories, holdings.files, holdings.names),
        (5, 2, 2, 5)
    );
    assert_eq!((holdings.xattrs, holdings.extents, holdings.data_bytes), (1, 1, 4 * BLOCK));
    assert_eq!(
        (holdings.reserved_bytes, holdings.data_segments, holdings.home_segments),
        (2 * BLOCK, 1, 2)
    );
}

#[test]
fn orphans_are_no_damage() {
    let mut v = Volume::new();
    v.set(keys::counters(), &Counters { next_ino: NEXT, inodes: 7 }.encode());
    v.record(6, &file(0, 0, 0));
    v.record(7, &dir(D, 0, 0));
    v.set(keys::orphan(6), b"");
    v.set(keys::orphan(7), b"");
    assert_eq!(v.check(), []);
}

/// What to break, and the codes that must come of it.
type Case = (&'static str, fn(&mut Volume), &'static [Code]);

#[test]
fn each_damage_has_its_code() {
    use Code::*;
    let cases: &[Case] = &[
        ("unknown key", |v| v.set(vec![0x77, 1], b""), &[UnknownKey]),
        ("mark cut short", |v| v.set(keys::mark(7), &[1, 9]), &[BadRecord]),
        ("mark of a sync cut short", |v| v.set(keys::synced(7), &[1, 9]), &[BadRecord]),
        ("counters gone", |v| drop(v.0.remove(&keys::counters())), &[NoCounters]),
        (
            "next_ino low",
            |v| v.set(keys::counters(), &Counters { next_ino: 5, inodes: 5 }.encode()),
            &[NextIno],
        ),
        (
            "count",
            |v| v.set(keys::counters(), &Counters { next_ino: 9, inodes: 6 }.encode()),
            &[InodeCount],
        ),
        (
            "unreadable",
            |v| v.set(keys::extent(F, 8 * BLOCK), &[1, 9]),
            &[BadRecord, BlockCount, ReservedCount],
        ),
        ("mode", |v| v.record(G, &inline(0o644, 2, b"x")), &[InodeFields, DentryKind]),
        ("link target", |v| v.record(S, &inline(libc::S_IFLNK, 1, b"")), &[InodeFields]),
        ("size", |v| v.record(F, &file(1 << 63, 6, 1)), &[InodeFields]),
        ("xattr flag", |v| v.record(D, &dir(ROOT, 2, 2)), &[XattrFlag]),
        ("no xattrs", |v| drop(v.0.remove(&keys::xattr(D, b"user.a"))), &[XattrFlag]),
        ("xattr of none", |v| v.set(keys::xattr(8, b"user.a"), b"1"), &[NoInode]),
        ("names in a file", |v| v.name(G, b"x", F, libc::S_IFREG), &[NamesInFile, LinkCount]),
        (
            "wrong hash",
            |v| {
                v.unname(D, b"f");
                v.name_at(D, 77 << 8, b"f", F, libc::S_IFREG);
            },
            &[DentryHash],
        ),
        (
            "name twice",
            |v| {
                v.name_at(D, hash(b"f") << 8 | 1, b"f", F, libc::S_IFREG);
                v.record(F, &file(3 * BLOCK + 1, 6, 2));
            },
            &[DuplicateName],
        ),
        (
            "bad name",
            |v| {
                v.name(D, b"a/b", F, libc::S_IFREG);
                v.record(F, &file(3 * BLOCK + 1, 6, 2));
            },
            &[BadName],
        ),
        ("dangling", |v| v.name(D, b"x", 8, libc::S_IFREG), &[DanglingName]),
        ("kind", |v| v.name(D, b"f", F, libc::S_IFIFO), &[DentryKind]),
        (
            "parent",
            |v| v.record(D, &InodeRecord { flags: INODE_HAS_XATTRS, ..dir(7, 2, 2) }),
            &[Parent],
        ),
        (
            "two names of a directory",
            |v| {
                v.name(D, b"again", D, libc::S_IFDIR);
                v.record(D, &InodeRecord { flags: INODE_HAS_XATTRS, ..dir(ROOT, 3, 3) });
            },
            &[Parent, DirectoryNames],
        ),
        (
            "circle",
            |v| {
                v.record(6, &dir(7, 3, 1));
                v.record(7, &dir(6, 3, 1));
                v.name(6, b"x", 7, libc::S_IFDIR);
                v.name(7, b"x", 6, libc::S_IFDIR);
                v.set(keys::counters(), &Counters { next_ino: NEXT, inodes: 7 }.encode());
            },
            &[Cycle],
        ),
        ("lost file", |v| v.unname(D, b"f"), &[Unreachable]),
        ("link count", |v| v.record(G, &inline(libc::S_IFREG, 3, b"x")), &[LinkCount]),
        ("directory links", |v| v.record(ROOT, &dir(ROOT, 2, 3)), &[LinkCount]),
        ("orphan with a name", |v| v.set(keys::orphan(F), b""), &[OrphanKey]),
        ("orphan of none", |v| v.set(keys::orphan(8), b""), &[OrphanKey]),
        (
            "extent of a directory",
            |v| {
                v.set(keys::extent(D, 0), &Extent::Reserved { blocks: 1 }.encode());
                let d = InodeRecord { flags: INODE_HAS_XATTRS, blocks: 1, ..dir(ROOT, 2, 2) };
                v.record(D, &d);
            },
            &[ExtentOwner, ReservedCount],
        ),
        (
            "overlap",
            |v| {
                v.set(keys::extent(F, 2 * BLOCK), &Extent::Reserved { blocks: 1 }.encode());
                v.record(F, &file(3 * BLOCK + 1, 7, 1));
            },
            &[ExtentOverlap, ReservedCount],
        ),
        (
            "endless extent",
            |v| {
                v.set(keys::extent(F, 8 * BLOCK), &Extent::Reserved { blocks: u64::MAX }.encode());
                v.record(F, &file(3 * BLOCK + 1, u64::MAX, 1));
            },
            &[ExtentOverlap, ReservedCount],
        ),
        ("beyond the end", |v| v.record(F, &file(3 * BLOCK, 6, 1)), &[ExtentBeyondEnd]),
        (
            "outside",
            |v| v.data(F, 0, FIRST_BLOCK + SEGMENT_BLOCKS * 8, 4),
            &[ExtentLocation, SegmentLive],
        ),
        (
            "across",
            |v| v.data(F, 0, FIRST_BLOCK + SEGMENT_BLOCKS - 1, 4),
            &[ExtentLocation, SegmentLive],
        ),
        ("before", |v| v.data(F, 0, 3, 4), &[ExtentLocation, SegmentLive]),
        (
            "shared block",
            |v| {
                v.data(F, 9 * BLOCK, FIRST_BLOCK + 4, 1);
                v.0.remove(&keys::extent(F, 8 * BLOCK));
                v.0.remove(&keys::reserved());
                v.record(F, &file(10 * BLOCK, 5, 1));
            },
            &[BlockShared],
        ),
        ("blocks", |v| v.record(F, &file(3 * BLOCK + 1, 5, 1)), &[BlockCount]),
        (
            "segment of none",
            |v| v.set(keys::segment(8), &Segment { filled: 1, live: 0 }.encode()),
            &[SegmentRecord],
        ),
        (
            "home segment",
            |v| v.set(keys::segment(6), &Segment { filled: 1, live: 0 }.encode()),
            &[HomeClaim],
        ),
        ("free segment", |v| drop(v.0.remove(&keys::segment(0))), &[SegmentFree]),
        (
            "unfilled",
            |v| v.set(keys::segment(0), &Segment { filled: 4, live: 4 }.encode()),
            &[SegmentFilled],
        ),
        (
            "live",
            |v| v.set(keys::segment(0), &Segment { filled: 5, live: 5 }.encode()),
            &[SegmentLive],
        ),
        (
            "overfull",
            |v| v.set(keys::segment(0), &Segment { filled: 65, live: 4 }.encode()),
            &[SegmentRecord],
        ),
        ("entries", |v| v.record(ROOT, &dir(ROOT, 3, 4)), &[DirectorySize]),
        ("unwritten count", |v| drop(v.0.remove(&keys::reserved())), &[ReservedCount]),
        (
            "no root",
            |v| {
                for (ino, name) in [(D, &b"d"[..]), (G, b"h"), (S, b"s")] {
                    v.0.remove(&keys::dentry(ROOT, hash(name) << 8, name));
                    v.set(keys::orphan(ino), b"");
                }
                v.0.retain(|key, _| {
                    !matches!(
                        keys::parse(key),
                        Some(
                            Key::Inode(_)
                                | Key::Dentry(..)
                                | Key::Extent(..)
                                | Key::Xattr(..)
                                | Key::Orphan(_)
                                | Key::Segment(_)
                                | Key::Reserved
                        )
                    )
                });
                v.set(keys::counters(), &Counters { next_ino: NEXT, inodes: 0 }.encode());
            },
            &[NoRoot],
        ),
    ];
    for (name, break_it, codes) in cases {
        let mut volume = Volume::new();
        break_it(&mut volume);
        assert_eq!(volume.check(), *codes, "{name}");
    }
}

#[test]
fn finding_codes_have_distinct_names_and_texts() {
    let names: std::collections::BTreeSet<_> = Code::ALL.iter().map(|code| code.name()).collect();
    assert_eq!(names.len(), Code::ALL.len());
    assert!(Code::ALL.iter().all(|code| !code.means().is_empty() && !code.advice().is_empty()));
}

#[test]
fn any_bytes_are_judged_without_a_panic() {
    let mut seed = 42_u64;
    let mut next = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    for _ in 0..2000 {
        let mut volume = Volume::new();
        for _ in 0..1 + next() % 4 {
            let at = next() % volume.0.len();
            let (key, mut value) =
                volume.0.iter().nth(at).map(|(k, v)| (k.clone(), v.clone())).expect("in range");
            volume.0.remove(&key);
            let mut key = key;
            for bytes in [&mut key, &mut value] {
                match next() % 4 {
                    0 if !bytes.is_empty() => {
                        let i = next() % bytes.len();
                        bytes[i] ^= 1 << (next() % 8);
                    }
                    1 => bytes.truncate(next() % (bytes.len() + 1)),
                    2 => bytes.push(next() as u8),
                    _ => {}
                }
            }
            volume.0.insert(key, value);
        }
        volume.check();
    }
}
