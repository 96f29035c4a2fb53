//! Planted faults, one by one.

use super::*;
use ferry_fs::volume::{SUPERBLOCK_OFFSETS, VolumeError};
use std::ops::ControlFlow;

/// A fault, the code that finds it, and the paths that it may change (those that begin so).
type Case = (&'static str, Code, fn(&mut Image), &'static [&'static str]);

fn first_data(image: &Image, path: &str) -> (u64, u64, Vec<u32>) {
    match image.extents(path).remove(0) {
        (offset, Extent::Data { block, crcs }) => (offset, block, crcs),
        other => panic!("{other:?}"),
    }
}

fn cases() -> Vec<Case> {
    use Code::*;
    vec![
        ("counters gone", NoCounters, |v| v.remove(&keys::counters()), &[]),
        ("counters unreadable", BadRecord, |v| v.put(keys::counters(), [1, 2]), &[]),
        (
            "next_ino",
            NextIno,
            |v| v.put(keys::counters(), Counters { next_ino: 3, inodes: 30 }.encode()),
            &[],
        ),
        (
            "inodes",
            InodeCount,
            |v| v.put(keys::counters(), Counters { next_ino: 500, inodes: 6 }.encode()),
            &[],
        ),
        ("unwritten count", ReservedCount, |v| v.put(keys::unwritten(), Number(77).encode()), &[]),
        ("unwritten count unreadable", BadRecord, |v| v.put(keys::unwritten(), [9]), &[]),
        ("mark unreadable", BadRecord, |v| v.put(keys::mark(7), [9]), &[]),
        ("mark of a sync unreadable", BadRecord, |v| v.put(keys::synced(7), [9]), &[]),
        ("root gone", NoRoot, |v| v.remove(&keys::inode(ROOT)), &[]),
        ("root is a file", NoRoot, |v| v.record("", |r| r.mode = libc::S_IFREG | 0o644), &[]),
        ("root unreadable", BadRecord, |v| v.put(keys::inode(ROOT), [1]), &[]),
        ("inode record gone", NoInode, |v| v.remove(&keys::inode(v.at("d"))), &["/d"]),
        ("file's record gone", NoInode, |v| v.remove(&keys::inode(v.at("e"))), &["/e"]),
        ("file's record unreadable", BadRecord, |v| v.put(keys::inode(v.at("e")), [1]), &["/e"]),
        (
            "small file's record gone",
            DanglingName,
            |v| v.remove(&keys::inode(v.at("n3"))),
            &["/n3"],
        ),
        (
            "small file's record unreadable",
            BadRecord,
            |v| v.put(keys::inode(v.at("n3")), [7]),
            &["/n3"],
        ),
        ("unknown type", InodeFields, |v| v.record("e", |r| r.mode = 0o644), &["/e"]),
        (
            "unknown type of a directory",
            InodeFields,
            |v| v.record("d", |r| r.mode = 0o755),
            &["/d"],
        ),
        ("unknown type of nothing", InodeFields, |v| v.record("n0", |r| r.mode = 0o644), &["/n0"]),
        ("unknown flags", InodeFields, |v| v.record("e", |r| r.flags |= 1 << 9), &[]),
        ("impossible size", InodeFields, |v| v.record("e", |r| r.size = 1 << 63), &["/e"]),
        (
            "link without a target",
            InodeFields,
            |v| v.record("s", |r| (r.flags, r.size, r.inline) = (0, 0, Vec::new())),
            &["/s"],
        ),
        ("number 0", InodeFields, |v| v.put(keys::inode(0), InodeRecord::default().encode()), &[]),
        (
            "number without end",
            InodeFields,
            |v| {
                let record =
                    InodeRecord { mode: libc::S_IFREG, nlink: 1, ..InodeRecord::default() };
                v.put(keys::inode(u64::MAX), record.encode());
            },
            &[],
        ),
        ("attributes of none", NoInode, |v| v.put(keys::xattr(9999, b"user.a"), b"1"), &[]),
        ("attribute flag off", XattrFlag, |v| v.record("d", |r| r.flags = 0), &[]),
        ("attribute flag on", XattrFlag, |v| v.record("e", |r| r.flags |= INODE_HAS_XATTRS), &[]),
        ("attribute's name", BadName, |v| v.put(keys::xattr(v.at("d"), b"a\0b"), b"1"), &[]),
        (
            "names in a file",
            NamesInFile,
            |v| {
                let (e, h) = (v.at("e"), v.at("h"));
                v.name(e, b"inside", h, libc::S_IFREG);
            },
            &[],
        ),
        (
            "wrong hash",
            DentryHash,
            |v| {
                let (key, dentry) = v.dentry(v.at("d"), "f");
                v.remove(&key);
                v.put(keys::dentry(v.at("d"), 77 << 8, b"f"), dentry.encode());
            },
            &[],
        ),
        (
            "name twice",
            DuplicateName,
            |v| {
                let (dir, hash) = (v.at("d"), v.hash(b"f"));
                v.put(
                    keys::dentry(dir, hash << 8 | 1, b"f"),
                    Dentry { ino: v.at("e"), kind: libc::S_IFREG }.encode(),
                );
            },
            &[],
        ),
        (
            "the only name of a file is a second",
            DuplicateName,
            |v| {
                let (dir, hash, f) = (v.at("d"), v.hash(b"f"), v.at("e"));
                v.unname("", "e");
                v.put(
                    keys::dentry(dir, hash << 8 | 1, b"f"),
                    Dentry { ino: f, kind: libc::S_IFREG }.encode(),
                );
            },
            &["/e", "/lost+found"],
        ),
        (
            "impossible name",
            BadName,
            |v| {
                let (d, f) = (v.at("d"), v.at("d/f"));
                v.unname("d", "f");
                v.name(d, b"a/b", f, libc::S_IFREG);
            },
            &["/d/f", "/lost+found"],
        ),
        (
            "dentry unreadable",
            BadRecord,
            |v| {
                let key = v.dentry(v.at("d"), "f").0;
                v.put(key, [1, 2, 3]);
            },
            &["/d/f", "/lost+found"],
        ),
        (
            "dentry without inode",
            DanglingName,
            |v| v.name(v.at("d"), b"nowhere", 9999, libc::S_IFREG),
            &[],
        ),
        ("wrong type", DentryKind, |v| v.name(v.at("d"), b"f", v.at("d/f"), libc::S_IFIFO), &[]),
        ("directory's size", DirectorySize, |v| v.record("d", |r| r.size = 99), &[]),
        ("parent", Parent, |v| v.record("d", |r| r.parent = 99), &[]),
        ("root's parent", Parent, |v| v.record("", |r| r.parent = 99), &[]),
        (
            "directory with two names",
            DirectoryNames,
            |v| v.name(ROOT, b"again", v.at("d/sub"), libc::S_IFDIR),
            &[],
        ),
        (
            "root with a name",
            DirectoryNames,
            |v| v.name(v.at("d"), b"root", ROOT, libc::S_IFDIR),
            &[],
        ),
        (
            "circle",
            Cycle,
            |v| {
                let (d, deep) = (v.at("d"), v.at("d/sub/deep"));
                v.unname("", "d");
                v.name(deep, b"up", d, libc::S_IFDIR);
            },
            &["/d", "/lost+found"],
        ),
        (
            "its own parent",
            Cycle,
            |v| {
                let sub = v.at("d/sub");
                v.unname("d", "sub");
                v.name(sub, b"self", sub, libc::S_IFDIR);
            },
            &["/d/sub", "/lost+found"],
        ),
        ("inode without dentry", Unreachable, |v| v.unname("d", "f"), &["/d/f", "/lost+found"]),
        ("tree without dentry", Unreachable, |v| v.unname("d", "sub"), &["/d/sub", "/lost+found"]),
        ("link count", LinkCount, |v| v.record("h", |r| r.nlink = 7), &[]),
        ("directory's link count", LinkCount, |v| v.record("d", |r| r.nlink = 7), &[]),
        ("orphan with a name", OrphanKey, |v| v.put(keys::orphan(v.at("e")), [1]), &[]),
        ("orphan of none", OrphanKey, |v| v.put(keys::orphan(9999), [1]), &[]),
        (
            "orphan with links",
            OrphanKey,
            |v| {
                let e = v.at("e");
                v.unname("", "e");
                v.put(keys::orphan(e), [1]);
            },
            &["/e", "/lost+found"],
        ),
        (
            "orphan with names in it",
            OrphanKey,
            |v| {
                let sub = v.at("d/sub");
                v.record("d/sub", |r| r.nlink = 0);
                v.unname("d", "sub");
                v.put(keys::orphan(sub), [1]);
            },
            &["/d/sub", "/lost+found"],
        ),
        (
            "extent of a directory",
            ExtentOwner,
            |v| v.put(keys::extent(v.at("d"), 0), Extent::Unwritten { blocks: 1 }.encode()),
            &[],
        ),
        (
            "extent beside contents",
            ExtentOwner,
            |v| {
                v.put(
                    keys::extent(v.at("n3"), 0),
                    Extent::Data { block: 4000, crcs: vec![1] }.encode(),
                )
            },
            &[],
        ),
        (
            "overlap",
            ExtentOverlap,
            |v| v.put(keys::extent(v.at("e"), 2 * BLOCK), Extent::Unwritten { blocks: 3 }.encode()),
            &[],
        ),
        (
            "overlap of data",
            ExtentOverlap,
            |v| {
                let (_, block, crcs) = first_data(v, "d/f");
                v.put(
                    keys::extent(v.at("d/f"), 2 * BLOCK),
                    Extent::Data { block: block + 100, crcs: crcs[2..5].to_vec() }.encode(),
                );
            },
            &[],
        ),
        (
            "the same data twice in a file",
            ExtentOverlap,
            |v| {
                let (_, block, crcs) = first_data(v, "d/f");
                v.put(
                    keys::extent(v.at("d/f"), 2 * BLOCK),
                    Extent::Data { block: block + 2, crcs: crcs[2..5].to_vec() }.encode(),
                );
            },
            &[],
        ),
        (
            "crooked extent",
            ExtentOverlap,
            |v| {
                v.put(
                    keys::extent(v.at("e"), 3 * BLOCK + 5),
                    Extent::Data { block: 4000, crcs: vec![1] }.encode(),
                )
            },
            &[],
        ),
        (
            "endless extent",
            ExtentOverlap,
            |v| {
                v.put(
                    keys::extent(v.at("p"), 20 * BLOCK),
                    Extent::Unwritten { blocks: u64::MAX }.encode(),
                )
            },
            &[],
        ),
        (
            "extent across windows",
            ExtentOverlap,
            |v| {
                v.put(
                    keys::extent(v.at("p"), 1023 * BLOCK),
                    Extent::Unwritten { blocks: 3 }.encode(),
                )
            },
            &[],
        ),
        ("extents beyond the size", ExtentBeyondEnd, |v| v.record("e", |r| r.size = 4096), &["/e"]),
        (
            "extent outside",
            ExtentLocation,
            |v| {
                let (offset, _, crcs) = first_data(v, "e");
                v.put(keys::extent(v.at("e"), offset), Extent::Data { block: 3, crcs }.encode());
            },
            &["/e"],
        ),
        (
            "extent unreadable",
            BadRecord,
            |v| {
                let (offset, ..) = first_data(v, "e");
                v.put(keys::extent(v.at("e"), offset), [1, 9]);
            },
            &["/e"],
        ),
        (
            "block referred to twice, the second is right",
            BlockShared,
            |v| {
                let (_, block, crcs) = first_data(v, "e");
                let (at, _, theirs) = first_data(v, "d/f");
                assert!(v.at("d/f") < v.at("e") && crcs.len() > theirs.len());
                v.put(keys::extent(v.at("d/f"), at), Extent::Data { block, crcs: theirs }.encode());
            },
            &["/d/f"],
        ),
        (
            "block referred to twice, the first is right",
            BlockShared,
            |v| {
                let (offset, _, crcs) = first_data(v, "e");
                let (_, block, _) = first_data(v, "d/f");
                v.put(keys::extent(v.at("e"), offset), Extent::Data { block, crcs }.encode());
            },
            &["/e"],
        ),
        (
            "blocks referred to behind the end of other files",
            BlockShared,
            |v| {
                let (_, block, crcs) = first_data(v, "e");
                for other in ["d/f", "p"] {
                    let extent = Extent::Data { block, crcs: crcs.clone() };
                    v.put(keys::extent(v.at(other), 1 << 40), extent.encode());
                }
            },
            &[],
        ),
        (
            "extent gone",
            BlockCount,
            |v| {
                let offset = first_data(v, "e").0;
                v.remove(&keys::extent(v.at("e"), offset));
            },
            &["/e"],
        ),
        ("blocks", BlockCount, |v| v.record("e", |r| r.blocks = 3), &[]),
        (
            "segment without end",
            SegmentRecord,
            |v| v.put(keys::segment(9999), Segment { filled: 1, live: 0 }.encode()),
            &[],
        ),
        (
            "overfull segment",
            SegmentRecord,
            |v| {
                let key =
                    v.keys.range(keys::segment(0)..keys::segment_end()).next().unwrap().0.clone();
                let live = Segment::decode(&v.keys[&key]).unwrap().live;
                v.put(key, Segment { filled: 1 << 30, live }.encode());
            },
            &[],
        ),
        ("data in a free segment", SegmentFree, |v| v.keys.retain(|key, _| key[0] != 0x20), &[]),
        ("segment unreadable", BadRecord, |v| v.put(keys::segment(20), [1, 2]), &[]),
        (
            "segment filled further",
            SegmentFilled,
            |v| {
                let key =
                    v.keys.range(keys::segment(0)..keys::segment_end()).next().unwrap().0.clone();
                v.put(key, Segment { filled: 1, live: 1 }.encode());
            },
            &[],
        ),
        (
            "leaked segment",
            SegmentLive,
            |v| v.put(keys::segment(30), Segment { filled: 9, live: 9 }.encode()),
            &[],
        ),
        (
            "unreadable note of a truncation",
            BadRecord,
            |v| v.put(keys::intent(v.at("e")), [4]),
            &[],
        ),
    ]
}

/// A file's number and contents, by path.
type Held<'s> = BTreeMap<&'s String, (Ino, &'s [Option<Vec<u8>>])>;

/// What may not have changed.
fn others<'s>(snapshot: &'s Snapshot, but: &[&str]) -> Held<'s> {
    let harmed = |path: &str| {
        but.iter().any(|start| path == *start || path.starts_with(&format!("{start}/")))
    };
    snapshot
        .iter()
        .filter(|(path, _)| !harmed(path))
        .map(|(path, seen)| (path, (seen.ino, &seen.contents[..])))
        .collect()
}

#[test]
fn each_fault_is_found_and_repaired_and_costs_nothing_else() {
    let sound = Volume::new().snapshot();
    let mut failed = Vec::new();
    for (name, code, damage, harmed) in cases() {
        let case = || {
            let volume = Volume::new();
            volume.edit(damage);
            let found = volume.codes();
            assert!(found.contains(&code), "{name}: {found:?}");
            let report = volume.repaired(name);
            assert!(report.repairs.iter().any(|r| r.code == code), "{name}: {:#?}", report.repairs);
            let snapshot = volume.snapshot();
            assert_eq!(others(&snapshot, harmed), others(&sound, harmed), "{name}");
            volume.works(name);
        };
        if std::panic::catch_unwind(case).is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Files would take the numbers, and with them the contents, of others.
#[test]
fn numbers_in_use_are_not_handed_out_again() {
    for next_ino in [3, u64::MAX - 1000] {
        let volume = Volume::new();
        volume
            .edit(|image| image.put(keys::counters(), Counters { next_ino, inodes: 30 }.encode()));
        let refused =
            LocalFs::open(volume.dev.clone(), FsOptions::default(), env()).err().expect("refused");
        assert!(refused.to_string().contains("ferry fsck --repair"), "{refused}");
        assert!(volume.snapshot().contains_key("/d/f"), "it can be read");
        volume.repaired("numbers");
        volume.works("numbers");
    }
}

#[test]
fn a_directory_that_counts_too_few_can_be_emptied() {
    let volume = Volume::new();
    volume.edit(|image| image.record("d", |record| (record.size, record.nlink) = (1, 2)));
    let fs = mount(&volume.dev, false);
    let me = InProcess::default();
    let ino = |dir, name: &[u8]| me.call(|cx| fs.lookup(cx, dir, name)).unwrap().attr.unwrap().ino;
    let d = ino(ROOT, b"d");
    me.call(|cx| fs.unlink(cx, d, b"f")).unwrap();
    me.call(|cx| fs.unlink(cx, d, b"g")).unwrap();
    me.call(|cx| fs.rename(cx, d, b"sub", ROOT, b"sub", RenameFlags::default())).unwrap();
    fs.detach();
    fs.close().unwrap();
    volume.repaired("a count");
    volume.works("a count");
}

#[test]
fn either_superblock_is_written_anew_from_the_other() {
    for offset in SUPERBLOCK_OFFSETS {
        let volume = Volume::new();
        let sound = volume.snapshot();
        volume.spoil(offset);
        assert_eq!(volume.codes(), BTreeSet::from([Code::SuperblockCopy]));
        let report = volume.repaired("superblock");
        assert_eq!((report.repaired, report.repairs[0].code), (1, Code::SuperblockCopy));
        assert_eq!(volume.snapshot(), sound);
    }
}

#[test]
fn keys_of_unknown_types_stay() {
    let volume = Volume::new();
    volume.edit(|v| v.put(vec![0x77, 1], b"of a later version"));
    for _ in 0..2 {
        let report = volume.repair();
        assert_eq!((report.clean, report.repaired), (false, 0));
        assert_eq!(report.findings[0].code, Code::UnknownKey);
    }
}

/// What a mark says is there. Where something is lost nobody knows that any more.
#[test]
fn session_records_stay_unless_something_is_lost() {
    let volume = Volume::new();
    let marks = |volume: &Volume| mount(&volume.dev, true).sessions().unwrap();
    let synced = |volume: &Volume| mount(&volume.dev, true).durable_watermark(8).unwrap();
    let lockers = |volume: &Volume| mount(&volume.dev, true).lock_holders().unwrap();
    volume.edit(|v| {
        v.put(keys::mark(7), Number(70).encode());
        v.put(keys::mark(8), Number(80).encode());
        v.put(keys::synced(8), Number(79).encode());
        v.put(keys::locker(8), Number(0).encode());
        v.put(keys::evicted(9), Number(1).encode());
        v.put(keys::unwritten(), Number(77).encode());
    });
    assert_eq!(volume.repaired("a count").repaired, 1);
    assert_eq!((marks(&volume), synced(&volume), lockers(&volume)), (vec![7, 8], 79, vec![8]));
    volume.edit(|v| v.remove(&keys::inode(v.at("n3"))));
    let report = volume.repaired("a lost file");
    let said = report.repairs.last().unwrap();
    assert!(said.what.contains("marks of what 2 remote clients"), "{said:?}");
    assert_eq!((marks(&volume), synced(&volume), lockers(&volume)), (Vec::new(), 0, Vec::new()));
    assert_eq!(
        mount(&volume.dev, true).evicted().unwrap().len(),
        1,
        "an evicted session stays evicted"
    );
}

#[test]
fn no_session_record_stays_after_a_repair_that_lost_something_and_was_stopped() {
    for stop_at in 1.. {
        let volume = Volume::new();
        volume.edit(|v| {
            v.put(keys::mark(7), Number(70).encode());
            v.remove(&keys::inode(v.at("n3")));
        });
        let mut calls = 0;
        let mut progress = |_| {
            calls += 1;
            if calls == stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let options = FsckOptions { progress: Some(&mut progress), ..FsckOptions::default() };
        match repair(&volume.dev, options, &env()) {
            Err(error) => assert!(matches!(error, VolumeError::Stopped), "{error}"),
            Ok(report) => {
                assert!(report.clean && stop_at > 2, "the repair checks more than once");
                return;
            }
        }
        assert!(volume.repair().clean);
        assert_eq!(mount(&volume.dev, true).sessions().unwrap(), Vec::new(), "call {stop_at}");
    }
}

#[test]
fn a_block_that_is_not_what_was_written_is_marked_as_lost_if_one_wants() {
    let volume = Volume::new();
    let sound = volume.snapshot();
    let mut bad = 0;
    volume.edit(|v| bad = first_data(v, "e").1 + 7);
    volume.spoil(bad * BLOCK);
    assert_eq!(volume.codes(), BTreeSet::from([Code::Checksum]));
    let without = repair(&volume.dev, FsckOptions::default(), &env()).unwrap();
    assert!(without.clean && without.repaired == 0, "nothing is read that need not be");
    let report = volume.repaired("checksum");
    assert_eq!(report.repairs[0].code, Code::Checksum);
    assert_eq!(report.repairs[0].location.path.as_deref(), Some("/e"));
    assert_eq!(report.holdings.lost_bytes, BLOCK);
    let again = volume.check();
    assert_eq!((again.lost[0].file_offset, again.lost[0].bytes), (7 * BLOCK, BLOCK));
    assert_eq!(again.lost[0].path.as_deref(), Some("/e"));

    let mut expected = sound;
    expected.get_mut("/e").unwrap().contents[7] = None;
    assert_eq!(volume.snapshot(), expected, "EIO there, and nowhere else");
    let fs = mount(&volume.dev, false);
    let me = InProcess::default();
    let ino = expected["/e"].ino;
    let fh = me.call(|cx| fs.open(cx, ino, libc::O_RDWR, false)).unwrap().fh;
    let part = me.call(|cx| fs.write(cx, ino, fh, 7 * BLOCK + 9, b"part", false, false));
    assert_eq!(part, Err(Errno(libc::EIO)), "the rest of the block is not made up");
    assert_eq!(me.call(|cx| fs.lseek(cx, ino, fh, 7 * BLOCK, libc::SEEK_DATA)), Ok(7 * BLOCK));
    let whole = pattern(5, 4096);
    me.call(|cx| fs.write(cx, ino, fh, 7 * BLOCK, &whole, false, false)).unwrap();
    me.call(|cx| {
        fs.release(cx, ino, fh);
        Ok(())
    })
    .unwrap();
    fs.detach();
    fs.close().unwrap();
    expected.get_mut("/e").unwrap().contents[7] = Some(whole);
    assert_eq!(volume.snapshot(), expected);
    let mended = volume.check();
    assert!(mended.clean && mended.lost.is_empty());
}

#[test]
fn lost_ranges_can_be_cut_off_and_removed() {
    for cut in [Some(3 * BLOCK), Some(8 * BLOCK + 5), None] {
        let volume = Volume::new();
        volume.edit(|v| {
            let (offset, ..) = first_data(v, "e");
            v.put(keys::extent(v.at("e"), offset), [1, 9]);
        });
        volume.repaired("lost");
        let ino = volume.snapshot()["/e"].ino;
        let fs = mount(&volume.dev, false);
        let me = InProcess::default();
        match cut {
            Some(size) => {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                me.call(|cx| fs.setattr(cx, ino, None, &set)).unwrap();
            }
            None => me.call(|cx| fs.unlink(cx, ROOT, b"e")).unwrap(),
        }
        fs.detach();
        fs.close().unwrap();
        let report = volume.check();
        assert!(report.clean, "{cut:?}: {:#?}", report.findings);
        let left = cut.map_or(0, |size| size.next_multiple_of(BLOCK));
        assert_eq!(report.holdings.lost_bytes, left, "{cut:?}");
        volume.works("cut");
    }
}

#[test]
fn a_file_without_a_record_keeps_what_it_held() {
    let volume = Volume::new();
    let sound = volume.snapshot();
    volume.edit(|v| {
        v.remove(&keys::inode(v.at("e")));
        v.unname("", "e");
        v.remove(&keys::inode(v.at("d/sub")));
        v.unname("d", "sub");
    });
    volume.repaired("lost records");
    let snapshot = volume.snapshot();
    let (file, dir) = (sound["/e"].ino, sound["/d/sub"].ino);
    let seen = &snapshot[&format!("/lost+found/#{file}")];
    assert_eq!(
        (seen.mode, seen.size),
        (libc::S_IFREG | 0o600, 25 * BLOCK),
        "whole blocks, for root"
    );
    assert_eq!(seen.contents[..24], sound["/e"].contents[..24]);
    assert_eq!(snapshot[&format!("/lost+found/#{dir}")].mode, libc::S_IFDIR | 0o700);
    let deep = &snapshot[&format!("/lost+found/#{dir}/deep/x")];
    assert_eq!(deep.contents, sound["/d/sub/deep/x"].contents);
}

#[test]
fn a_hole_that_may_have_had_contents_reads_as_an_error() {
    let volume = Volume::new();
    let fs = mount(&volume.dev, false);
    let me = InProcess::default();
    let ino = make_file(&fs, ROOT, "sparse", &pattern(6, 5000));
    let fh = me.call(|cx| fs.open(cx, ino, libc::O_RDWR, false)).unwrap().fh;
    for at in [4, 2000, 2010] {
        me.call(|cx| fs.write(cx, ino, fh, at * BLOCK, &pattern(at, 4096), false, false)).unwrap();
    }
    me.call(|cx| {
        fs.release(cx, ino, fh);
        Ok(())
    })
    .unwrap();
    fs.detach();
    fs.close().unwrap();
    let before = volume.snapshot();
    assert!(before["/sparse"].contents.iter().all(Option::is_some));
    volume.edit(|v| v.remove(&keys::extent(ino, 2000 * BLOCK)));
    assert_eq!(volume.codes(), BTreeSet::from([Code::BlockCount, Code::SegmentLive]));
    let report = volume.repaired("an extent of a sparse file is gone");
    assert!(report.repairs.iter().any(|r| r.code == Code::BlockCount && r.lost.is_some()));
    assert_eq!(report.holdings.lost_bytes, (2011 - 4) * BLOCK);
    let fs = mount(&volume.dev, true);
    let fh = me.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).unwrap().fh;
    for at in [0, 1, 2, 3, 4, 5, 1023, 1024, 1999, 2000, 2001, 2010] {
        let mut out = vec![0; 4096];
        let read = me.call(|cx| fs.read(cx, ino, fh, at * BLOCK, &mut out));
        let readable = [0, 1, 4, 2010].contains(&at);
        assert_eq!(read, if readable { Ok(4096) } else { Err(Errno(libc::EIO)) }, "block {at}");
    }
    me.call(|cx| {
        fs.release(cx, ino, fh);
        Ok(())
    })
    .unwrap();
    fs.detach();
    fs.close().unwrap();
}
