//! Every fault is found, repaired, and costs nothing but what was damaged; whatever is damaged, a
//! repair ends in a clean volume.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod faults;
mod garbage;
mod journal;
mod random;
mod search;
mod unreadable;

use super::Segments;
use crate::fsck::volume::name_hash;
use crate::fsck::{Code, FsckOptions, Report, fsck, repair};
use crate::testing::{make_dir, make_file, mount};
use ferry_device::{AlignedBuf, BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::api::*;
use ferry_fs::keys::{self, *};
use ferry_fs::volume::{MkfsOptions, Superblock, mkfs, read_superblock};
use ferry_fs::{FsOptions, InProcess, LocalFs, SessionStore};
use ferry_journal::{Credits, Journal, JournalError, JournalOptions};
use siphasher::sip::SipHasher13;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a volume shows at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    ino: Ino,
    mode: u32,
    nlink: u32,
    size: u64,
    /// The target of a link; the blocks of a file, those that cannot be read without contents.
    contents: Vec<Option<Vec<u8>>>,
    xattrs: Vec<u8>,
}

type Snapshot = BTreeMap<String, Seen>;

/// A volume in memory that nobody has mounted.
pub(super) struct Volume {
    dev: Arc<dyn BlockDevice>,
    sb: Superblock,
}

/// Its keys, to be damaged.
struct Image {
    keys: BTreeMap<Vec<u8>, Vec<u8>>,
    hasher: SipHasher13,
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (seed * 131 + i * 7 + i / 4096 * 13) as u8).collect()
}

fn env() -> Env {
    Env::real()
}

impl Volume {
    /// `/d` with an attribute, `/d/f` and `/e` with extents, `/d/g` and `/h` (one inode) and
    /// `/d/sub/deep/x` with their contents in the record, `/s -> target`, `/p` with unwritten
    /// space, and `/n0`…
    fn new() -> Self {
        Self::of(32 << 20)
    }

    fn of(bytes: u64) -> Self {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(bytes));
        mkfs(&dev, &MkfsOptions::default(), &env()).unwrap();
        let fs = mount(&dev, false);
        let me = InProcess::default();
        let d = make_dir(&fs, ROOT, "d");
        me.call(|cx| fs.setxattr(cx, d, b"user.a", b"1", XattrFlags::default())).unwrap();
        make_file(&fs, d, "f", &pattern(1, 40_000));
        let g = make_file(&fs, d, "g", b"small");
        let entry = me.call(|cx| fs.link(cx, g, ROOT, b"h")).unwrap();
        fs.forget(entry.attr.unwrap().ino, 1);
        let sub = make_dir(&fs, d, "sub");
        let deep = make_dir(&fs, sub, "deep");
        make_file(&fs, deep, "x", b"deep down");
        make_file(&fs, ROOT, "e", &pattern(2, 100_000));
        let entry = me.call(|cx| fs.symlink(cx, ROOT, b"s", b"target")).unwrap();
        fs.forget(entry.attr.unwrap().ino, 1);
        let p = make_file(&fs, ROOT, "p", &pattern(3, 5000));
        let opened = me.call(|cx| fs.open(cx, p, libc::O_RDWR, false)).unwrap();
        me.call(|cx| fs.fallocate(cx, p, opened.fh, 0, 0, 40_000)).unwrap();
        me.call(|cx| {
            fs.release(cx, p, opened.fh);
            Ok(())
        })
        .unwrap();
        for i in 0..20 {
            make_file(&fs, ROOT, &format!("n{i}"), &pattern(i, 300 * i as usize));
        }
        fs.detach();
        fs.close().unwrap();
        let sb = read_superblock(&dev).unwrap();
        Self { dev, sb }
    }

    fn edit(&self, damage: impl FnOnce(&mut Image)) {
        let client = Arc::new(Segments::default());
        let options = |read_only| JournalOptions { read_only, ..JournalOptions::offline(1 << 20) };
        let open = |read_only| {
            Journal::open(
                self.dev.clone(),
                self.sb.geometry(),
                options(read_only),
                env(),
                client.clone(),
            )
            .unwrap()
        };
        let (journal, recovered) = open(true);
        client.learn(&self.dev, &self.sb, &journal, &recovered.home_segments).unwrap();
        drop(journal);
        let (journal, _) = open(false);
        let mut before = BTreeMap::new();
        journal
            .scan(&[], &[0xff; 64], &mut |key, value| {
                before.insert(key.to_vec(), value.to_vec());
                true
            })
            .unwrap();
        let mut image =
            Image { keys: before.clone(), hasher: SipHasher13::new_with_key(&self.sb.hash_key) };
        damage(&mut image);
        let all: BTreeSet<_> = before.keys().chain(image.keys.keys()).cloned().collect();
        for key in all {
            let value = image.keys.get(&key);
            if value == before.get(&key) {
                continue;
            }
            let bytes = (key.len() + value.map_or(0, Vec::len)) as u32;
            let mut txn = journal.begin(Credits { keys: 1, bytes, urgent: true }).unwrap();
            match value {
                Some(value) => txn.put(&key, value),
                None => txn.delete(&key),
            }
            txn.commit();
        }
        journal.close().unwrap();
    }

    fn check(&self) -> Report {
        fsck(&self.dev, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env())
            .unwrap()
    }

    fn codes(&self) -> BTreeSet<Code> {
        self.check().findings.iter().map(|finding| finding.code).collect()
    }

    fn repair(&self) -> Report {
        repair(&self.dev, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env())
            .unwrap()
    }

    /// Repairs, and makes sure that nothing is left and that there is nothing to do for a second
    /// repair.
    fn repaired(&self, name: &str) -> Report {
        let report = self.repair();
        assert!(report.clean, "{name}: left {:#?}\nafter {:#?}", report.findings, report.repairs);
        assert!(report.repaired > 0, "{name}");
        let again = self.repair();
        assert!(again.clean && again.repaired == 0, "{name}: again {:#?}", again.repairs);
        report
    }

    /// Everything that a mount shows.
    fn snapshot(&self) -> Snapshot {
        let fs = mount(&self.dev, true);
        let (mut snapshot, mut todo) = (Snapshot::new(), vec![(String::new(), ROOT)]);
        while let Some((path, dir)) = todo.pop() {
            for (name, ino) in names(&fs, dir) {
                let seen = see(&fs, dir, &name, ino);
                let path = format!("{path}/{}", name.escape_ascii());
                if seen.mode & libc::S_IFMT == libc::S_IFDIR {
                    todo.push((path.clone(), ino));
                }
                assert!(snapshot.len() < 1000, "a tree without end");
                snapshot.insert(path, seen);
            }
        }
        fs.detach();
        fs.close().unwrap();
        snapshot
    }

    /// The volume can be mounted and used, and is clean afterwards.
    fn works(&self, name: &str) {
        let fs = mount(&self.dev, false);
        let me = InProcess::default();
        let dir = make_dir(&fs, ROOT, "new");
        let file = make_file(&fs, dir, "file", &pattern(9, 50_000));
        let opened = me.call(|cx| fs.open(cx, file, libc::O_RDWR, false)).unwrap();
        let mut out = vec![0; 50_000];
        assert_eq!(me.call(|cx| fs.read(cx, file, opened.fh, 0, &mut out)), Ok(50_000));
        assert!(out == pattern(9, 50_000));
        me.call(|cx| {
            fs.release(cx, file, opened.fh);
            Ok(())
        })
        .unwrap();
        me.call(|cx| fs.unlink(cx, dir, b"file")).unwrap();
        me.call(|cx| fs.rmdir(cx, ROOT, b"new")).unwrap();
        fs.detach();
        fs.close().unwrap();
        let report = self.check();
        assert!(report.clean, "{name}: after use {:#?}", report.findings);
    }

    /// Another one that is the same.
    fn copy(&self) -> Self {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(self.dev.capacity()));
        let mut chunk = AlignedBuf::zeroed(64 << 10);
        let mut at = self.dev.next_data(0);
        while at < self.dev.capacity() {
            self.dev.read(at, &mut chunk).unwrap();
            dev.write(at, &chunk).unwrap();
            at = self.dev.next_data(at + chunk.len() as u64);
        }
        Self { dev, sb: self.sb.clone() }
    }

    /// Zeros over the log.
    fn wipe_log(&self) {
        self.dev.write(self.sb.log_offset, &AlignedBuf::zeroed(self.sb.log_len as usize)).unwrap();
    }

    /// Spoils a block of the device.
    fn spoil(&self, at: u64) {
        let mut block = AlignedBuf::zeroed(4096);
        self.dev.read(at, &mut block).unwrap();
        block.iter_mut().for_each(|byte| *byte ^= 0x5a);
        self.dev.write(at, &block).unwrap();
    }
}

fn names(fs: &Arc<LocalFs>, dir: Ino) -> Vec<(Vec<u8>, Ino)> {
    let mut names = Vec::new();
    let (me, mut at) = (InProcess::default(), 2);
    loop {
        let before = names.len();
        me.call(|cx| {
            fs.readdir(cx, dir, 0, at, false, &mut |entry| {
                names.push((entry.name.to_vec(), entry.ino));
                at = entry.cookie;
                true
            })
        })
        .unwrap();
        if names.len() == before {
            return names;
        }
    }
}

fn see(fs: &Arc<LocalFs>, dir: Ino, name: &[u8], ino: Ino) -> Seen {
    let me = InProcess::default();
    let entry = me.call(|cx| fs.lookup(cx, dir, name)).unwrap();
    let name = name.escape_ascii().to_string();
    let attr = entry.attr.unwrap_or_else(|| panic!("{name} is listed and cannot be found"));
    assert_eq!(attr.ino, ino, "{name}");
    let mut contents = Vec::new();
    match attr.mode & libc::S_IFMT {
        libc::S_IFLNK => contents.push(me.call(|cx| fs.readlink(cx, ino)).ok()),
        libc::S_IFREG => {
            let opened = me.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).unwrap();
            for at in (0..attr.size.min(1 << 20)).step_by(4096) {
                let mut out = vec![0; 4096];
                let read = me.call(|cx| fs.read(cx, ino, opened.fh, at, &mut out));
                assert!(matches!(read, Ok(_) | Err(Errno(libc::EIO))), "{name}: {read:?}");
                contents.push(read.ok().map(|len| out[..len].to_vec()));
            }
            me.call(|cx| {
                fs.release(cx, ino, opened.fh);
                Ok(())
            })
            .unwrap();
        }
        _ => {}
    }
    let xattrs = me.call(|cx| fs.listxattr(cx, ino)).unwrap();
    fs.forget(ino, 1);
    Seen { ino, mode: attr.mode, nlink: attr.nlink, size: attr.size, contents, xattrs }
}

impl Image {
    fn put(&mut self, key: Vec<u8>, value: impl AsRef<[u8]>) {
        self.keys.insert(key, value.as_ref().to_vec());
    }
    fn remove(&mut self, key: &[u8]) {
        self.keys.remove(key).unwrap();
    }
    fn hash(&self, name: &[u8]) -> u64 {
        name_hash(&self.hasher, name)
    }
    fn dentry(&self, dir: Ino, name: &str) -> (Vec<u8>, Dentry) {
        let range = self.keys.range(keys::dentry_from(dir, 0)..keys::dentry_end(dir));
        let found = range.into_iter().find(
            |(key, _)| matches!(keys::parse(key), Some(Key::Dentry(_, _, other)) if other == name.as_bytes()),
        );
        let (key, value) = found.unwrap_or_else(|| panic!("no {name}"));
        (key.clone(), Dentry::decode(value).unwrap())
    }
    /// The inode at a path.
    fn at(&self, path: &str) -> Ino {
        path.split('/')
            .filter(|name| !name.is_empty())
            .fold(ROOT, |dir, name| self.dentry(dir, name).1.ino)
    }
    fn name(&mut self, dir: Ino, name: &[u8], ino: Ino, kind: u32) {
        let key = keys::dentry(dir, self.hash(name) << 8, name);
        self.put(key, Dentry { ino, kind }.encode());
    }
    fn unname(&mut self, dir: &str, name: &str) {
        let key = self.dentry(self.at(dir), name).0;
        self.remove(&key);
    }
    fn record(&mut self, path: &str, change: impl FnOnce(&mut InodeRecord)) {
        let key = keys::inode(self.at(path));
        let mut record = InodeRecord::decode(&self.keys[&key]).unwrap();
        change(&mut record);
        self.put(key, record.encode());
    }
    fn extents(&self, path: &str) -> Vec<(u64, Extent)> {
        let ino = self.at(path);
        let range = self.keys.range(keys::extent(ino, 0)..keys::extent_end(ino));
        range
            .map(|(key, value)| match keys::parse(key) {
                Some(Key::Extent(_, offset)) => (offset, Extent::decode(value).unwrap()),
                other => panic!("{other:?}"),
            })
            .collect()
    }
}
