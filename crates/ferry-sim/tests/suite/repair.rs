//! A repair that is killed at any moment, and run again, comes to the same as one that was not, and
//! loses nothing else.

use ferry_check::Code;
use ferry_check::{FsckOptions, Report, fsck, repair};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_fs::api::*;
use ferry_fs::keys::{self, Dentry, Extent, InodeRecord, Key};
use ferry_fs::volume::{LOG_MIN, read_superblock};
use ferry_fs::{FsOptions, InProcess, LocalFs, MkfsOptions, mkfs};
use ferry_journal::inspect::home_map;
use ferry_journal::{
    Credits, Journal, JournalClient, JournalError, JournalOptions, Seq, home_unit_bytes,
};
use ferry_sim::crash::Plan;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const VOLUME_BYTES: u64 = 32 << 20;
/// Crash points between flushes tried for each volume.
const SAMPLE: usize = 40;

type Keys = BTreeMap<Vec<u8>, Vec<u8>>;
type Damage = fn(&mut Keys);
/// What a path shows: inode, mode, links, and the file's blocks (`None`: cannot be read).
type Listing = BTreeMap<String, (Ino, u32, u32, Vec<Option<Vec<u8>>>)>;

fn env() -> Env {
    sim_env(1).0
}

fn mount(device: &Arc<dyn BlockDevice>, read_only: bool) -> Arc<LocalFs> {
    let options =
        FsOptions { background: false, read_only, cache_bytes: 8 << 20, ..FsOptions::default() };
    LocalFs::open(device.clone(), options, env()).expect("it can be mounted")
}

fn make_file(fs: &Arc<LocalFs>, dir: Ino, name: &str, data: &[u8]) {
    let me = InProcess::default();
    let made = me.call(|cx| fs.create(cx, dir, name.as_bytes(), 0o644, libc::O_RDWR));
    let (entry, opened) = made.expect("room");
    let ino = entry.attr.expect("made").ino;
    me.call(|cx| fs.write(cx, ino, opened.fh, 0, data, false, false)).expect("room");
    me.call(|cx| {
        fs.release(cx, ino, opened.fh);
        Ok(())
    })
    .expect("released");
    fs.forget(ino, 1);
}

fn make_dir(fs: &Arc<LocalFs>, dir: Ino, name: &str) -> Ino {
    let made = InProcess::default().call(|cx| fs.mkdir(cx, dir, name.as_bytes(), 0o755));
    let ino = made.expect("room").attr.expect("made").ino;
    fs.forget(ino, 1);
    ino
}

/// `/a/b/c`, each with files, among them some with extents; and `/many` with more names than one
/// transaction takes.
fn volume() -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = Arc::new(SimDevice::new(VOLUME_BYTES));
    let options = MkfsOptions { log_size: Some(LOG_MIN), ..MkfsOptions::default() };
    mkfs(&device, &options, &env()).expect("a volume");
    let fs = mount(&device, false);
    let mut dir = ROOT;
    for (i, name) in ["a", "b", "c"].iter().enumerate() {
        dir = make_dir(&fs, dir, name);
        for n in 0..4_u8 {
            let data: Vec<u8> =
                (0..n as usize * 9000).map(|at| (at / 7 + i * 31 + n as usize) as u8).collect();
            make_file(&fs, dir, &format!("f{n}"), &data);
        }
    }
    let many = make_dir(&fs, ROOT, "many");
    for n in 0..1500 {
        make_file(
            &fs,
            many,
            &format!("file with a name of some length {n}"),
            format!("{n}").as_bytes(),
        );
    }
    fs.detach();
    fs.close().expect("closed");
    device
}

/// Hands out segments from the end of the volume, where nothing is yet.
struct Owner(AtomicU32);

impl JournalClient for Owner {
    fn durable_point(&self, _seq: Seq) {}
    fn failed(&self, error: &JournalError) {
        panic!("{error}");
    }
    fn take_home_segment(&self) -> Option<u32> {
        Some(self.0.fetch_sub(1, Ordering::Relaxed))
    }
    fn release_home_segments(&self, _segments: &[u32]) {}
}

fn edit(device: &Arc<dyn BlockDevice>, damage: impl FnOnce(&mut Keys)) {
    let sb = read_superblock(device).expect("a volume");
    let options = JournalOptions { read_only: false, ..JournalOptions::offline(1 << 20) };
    let owner = Arc::new(Owner(AtomicU32::new(sb.segment_count - 1)));
    let (journal, _) =
        Journal::open(device.clone(), sb.geometry(), options, env(), owner).expect("a journal");
    let mut before = Keys::new();
    let scanned = journal.scan(&[], &[0xff; 32], &mut |key, value| {
        before.insert(key.to_vec(), value.to_vec());
        true
    });
    scanned.expect("readable");
    let mut after = before.clone();
    damage(&mut after);
    for key in before.keys().chain(after.keys()).filter(|key| before.get(*key) != after.get(*key)) {
        let value = after.get(key);
        let bytes = (key.len() + value.map_or(0, Vec::len)) as u32;
        let mut txn = journal.begin(Credits { keys: 1, bytes, urgent: true }).expect("room");
        match value {
            Some(value) => txn.put(key, value),
            None => txn.delete(key),
        }
        txn.commit();
    }
    journal.close().expect("closed");
}

fn listing(device: &Arc<dyn BlockDevice>) -> Listing {
    let fs = mount(device, true);
    let me = InProcess::default();
    let (mut listing, mut todo) = (Listing::new(), vec![(String::new(), ROOT)]);
    while let Some((path, dir)) = todo.pop() {
        let (mut names, mut at, mut more) = (Vec::new(), 2, true);
        while std::mem::take(&mut more) {
            let listed = me.call(|cx| {
                fs.readdir(cx, dir, 0, at, false, &mut |entry| {
                    names.push((String::from_utf8_lossy(&entry.name).into_owned(), entry.ino));
                    (at, more) = (entry.cookie, true);
                    true
                })
            });
            listed.expect("listed");
        }
        for (name, ino) in names {
            let path = format!("{path}/{name}");
            let (attr, _) = me.call(|cx| fs.getattr(cx, ino, None)).expect("attributes");
            let mut blocks = Vec::new();
            match attr.mode & libc::S_IFMT {
                libc::S_IFDIR => todo.push((path.clone(), ino)),
                libc::S_IFREG => {
                    let fh =
                        me.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).expect("opened").fh;
                    for at in (0..attr.size).step_by(4096) {
                        let mut out = vec![0; 4096];
                        let read = me.call(|cx| fs.read(cx, ino, fh, at, &mut out));
                        blocks.push(read.ok().map(|len| out[..len].to_vec()));
                    }
                    let released = me.call(|cx| {
                        fs.release(cx, ino, fh);
                        Ok(())
                    });
                    released.expect("released");
                }
                _ => {}
            }
            listing.insert(path, (ino, attr.mode, attr.nlink, blocks));
        }
    }
    fs.detach();
    fs.close().expect("closed");
    listing
}

fn repaired(device: &Arc<dyn BlockDevice>) -> Report {
    repair(device, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env())
        .expect("it can be repaired")
}

fn dentry(keys: &Keys, dir: Ino, name: &[u8]) -> (Vec<u8>, Dentry) {
    let mut range = keys.range(keys::dentry_from(dir, 0)..keys::dentry_end(dir));
    let found =
        range.find(|(key, _)| matches!(keys::parse(key), Some(Key::Dentry(_, _, n)) if n == name));
    let (key, value) = found.expect("the name is there");
    (key.clone(), Dentry::decode(value).expect("sound"))
}

fn at(keys: &Keys, path: &str) -> Ino {
    path.split('/').fold(ROOT, |dir, name| dentry(keys, dir, name.as_bytes()).1.ino)
}

fn unname(keys: &mut Keys, dir: Ino, name: &str) {
    let key = dentry(keys, dir, name.as_bytes()).0;
    keys.remove(&key);
}

/// Names and records gone, so that much goes to `/lost+found`.
fn names_lost(keys: &mut Keys) {
    let many = at(keys, "many");
    let of_many: Vec<_> = keys
        .range(keys::dentry_from(many, 0)..keys::dentry_end(many))
        .map(|(key, _)| key.clone())
        .collect();
    of_many.iter().step_by(2).for_each(|key| drop(keys.remove(key)));
    let (a, b) = (at(keys, "a"), at(keys, "a/b"));
    keys.remove(&keys::inode(b));
    unname(keys, a, "b");
    keys.remove(&keys::inode(at_ino(keys, b, "f2")));
}

fn at_ino(keys: &Keys, dir: Ino, name: &str) -> Ino {
    dentry(keys, dir, name.as_bytes()).1.ino
}

/// Counts, counters, a circle.
fn counts_wrong(keys: &mut Keys) {
    let many = at(keys, "many");
    let inodes: Vec<_> = keys
        .range(keys::dentry_from(many, 0)..keys::dentry_end(many))
        .map(|(_, value)| Dentry::decode(value).expect("sound").ino)
        .collect();
    for ino in inodes {
        let value = keys.get_mut(&keys::inode(ino)).expect("there");
        let record = InodeRecord::decode(value).expect("sound");
        *value = InodeRecord { nlink: 9, ..record }.encode();
    }
    let (a, c) = (at(keys, "a"), at(keys, "a/b/c"));
    let (key, entry) = dentry(keys, ROOT, b"a");
    keys.remove(&key);
    let Some(Key::Dentry(_, cookie, name)) = keys::parse(&key) else { panic!("a name") };
    keys.insert(keys::dentry(c, cookie, name), entry.encode().to_vec());
    assert_ne!(a, c);
    keys.remove(&keys::counters());
    keys.retain(|key, _| !matches!(keys::parse(key), Some(Key::Segment(_))));
}

/// Extents that cannot be read, claim others' blocks, or lie nowhere.
fn extents_wrong(keys: &mut Keys) {
    let first = |keys: &Keys, path: &str| {
        let ino = at(keys, path);
        let mut range = keys.range(keys::extent(ino, 0)..keys::extent_end(ino));
        let (key, value) = range.next().expect("it has extents");
        (key.clone(), Extent::decode(value).expect("sound"))
    };
    let (broken, _) = first(keys, "a/f3");
    keys.insert(broken, vec![1, 9]);
    let (_, theirs) = first(keys, "a/b/f3");
    let (ours, _) = first(keys, "a/b/c/f3");
    keys.insert(ours, theirs.encode());
    let (nowhere, extent) = first(keys, "a/f2");
    if let Extent::Data { crcs, .. } = extent {
        keys.insert(nowhere, Extent::Data { block: 1, crcs }.encode());
    }
}

#[test]
fn a_repair_may_be_killed_anywhere() {
    let damages: [(&str, Damage); 3] =
        [("names", names_lost), ("counts", counts_wrong), ("extents", extents_wrong)];
    for (name, damage) in damages {
        let sound = volume();
        edit(&sound, damage);
        let traced = snapshot(&sound);
        let device: Arc<dyn BlockDevice> = traced.clone();
        let report = repaired(&device);
        assert!(report.clean && report.repaired > 0, "{name}: {:#?}", report.findings);
        let expected = listing(&device);
        let mut rng = SimRng::new(7);
        let mut points = traced.flush_points();
        points.extend((0..SAMPLE).map(|_| rng.index(traced.trace_len() + 1)));
        println!(
            "{name}: {} repairs, {} events, {} crash points",
            report.repaired,
            traced.trace_len(),
            points.len()
        );
        for point in points {
            let image: Arc<dyn BlockDevice> = Arc::new(traced.crash_image(point, &mut rng));
            let report = repaired(&image);
            assert!(report.clean, "{name}, killed at {point}: {:#?}", report.findings);
            assert!(listing(&image) == expected, "{name}, killed at {point}: another result");
            let report =
                fsck(&image, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env());
            assert!(report.expect("it can be checked").clean, "{name}, killed at {point}");
        }
    }
}

/// The same contents on a device whose trace starts here.
fn snapshot(device: &Arc<dyn BlockDevice>) -> Arc<SimDevice> {
    let copy = SimDevice::new(VOLUME_BYTES);
    let mut buf = AlignedBuf::zeroed(1 << 20);
    for at in (0..VOLUME_BYTES).step_by(1 << 20) {
        device.read(at, &mut buf).expect("no faults");
        copy.write(at, &buf).expect("no faults");
    }
    copy.restart_trace();
    Arc::new(copy)
}

/// Blocks that hold something.
fn used(device: &SimDevice) -> Vec<u64> {
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    (0..device.capacity())
        .step_by(BLOCK_SIZE)
        .filter(|at| {
            device.read(*at, &mut buf).expect("no faults");
            buf.iter().any(|b| *b != 0)
        })
        .collect()
}

/// First copies of all blocks of the home store that hold something, each with the offsets of its
/// second copy and of its checksums.
fn home_blocks(device: &Arc<SimDevice>) -> Vec<[u64; 4]> {
    let dyn_device: Arc<dyn BlockDevice> = device.clone();
    let geo = read_superblock(&dyn_device).expect("a volume").geometry();
    let [map, _] = home_map(&dyn_device, &geo);
    let each = home_unit_bytes(geo.segment_len);
    let used = used(device);
    let mut out = Vec::new();
    for segment in map.expect("a whole map").units.into_iter().flatten() {
        let first = geo.segments_offset + u64::from(segment) * geo.segment_len;
        // One block of checksums stands behind each copy.
        let between = each + BLOCK_SIZE as u64;
        let sum = |block: u64, copy: u64| first + each + copy * between + block * 4;
        let blocks = (0..each / BLOCK_SIZE as u64).map(|n| (n, first + n * BLOCK_SIZE as u64));
        let blocks = blocks.filter(|(_, block)| used.contains(block));
        out.extend(blocks.map(|(n, block)| [block, block + between, sum(n, 0), sum(n, 1)]));
    }
    out
}

fn poke(device: &Arc<SimDevice>, at: u64, bytes: &[u8]) {
    let block = at / BLOCK_SIZE as u64 * BLOCK_SIZE as u64;
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(block, &mut buf).expect("no faults");
    buf[(at - block) as usize..][..bytes.len()].copy_from_slice(bytes);
    device.write(block, &buf).expect("no faults");
}

/// Both copies of each block of the home store in turn, the database's own pages among them: zeros,
/// or another block of it with checksums that are right. What a check does not find, no work on the
/// volume may meet.
#[test]
fn damage_that_a_check_does_not_find_is_harmless() {
    let whole = snapshot(&volume());
    let blocks = home_blocks(&whole);
    let known = listing(&(whole.clone() as Arc<dyn BlockDevice>));
    let (mut found, mut unused) = (0, 0);
    for (n, [first, second, sum, other_sum]) in blocks.iter().copied().enumerate() {
        for forged in [false, true] {
            let image = Arc::new(whole.copy());
            let mut page = AlignedBuf::zeroed(BLOCK_SIZE);
            if forged {
                image.read(blocks[(n * 7 + 3) % blocks.len()][0], &mut page).expect("no faults");
                let crc = crc32c::crc32c(&page).to_le_bytes();
                [sum, other_sum].into_iter().for_each(|at| poke(&image, at, &crc));
            }
            [first, second].into_iter().for_each(|at| poke(&image, at, &page));
            let device: Arc<dyn BlockDevice> = image;
            let report = fsck(&device, FsckOptions::default(), &env()).expect("it can be checked");
            if !report.clean {
                found += 1;
                assert!(
                    report.findings.iter().all(|f| f.code == Code::HomeStore),
                    "{:#?}",
                    report.findings
                );
                if n % 8 != 0 {
                    continue;
                }
                let after = repaired(&device);
                let again = repaired(&device);
                assert_eq!(
                    (again.clean, again.repaired),
                    (after.clean, 0),
                    "{n}: {:#?}",
                    again.repairs
                );
                if !after.clean {
                    continue;
                }
            } else {
                unused += 1;
                assert!(listing(&device) == known, "{n}, {forged}");
            }
            let fs = mount(&device, false);
            for name in 0..60 {
                make_file(&fs, ROOT, &format!("new {name}"), &[7; 3000]);
            }
            fs.sync().expect("durable");
            fs.detach();
            fs.close().expect("closed");
            let report = fsck(&device, FsckOptions::default(), &env()).expect("it can be checked");
            assert!(report.clean, "{n}, {forged}: {:#?}", report.findings);
        }
    }
    println!("{found} found, {unused} in blocks that nobody needs");
    assert!(found > blocks.len());
}

#[test]
fn a_volume_with_arbitrary_blocks_is_repaired_or_left_alone() {
    let (mut clean, mut left, mut refused) = (0, 0, 0);
    for seed in 0..6 {
        let device = Plan::draw(seed).first_life_crashed().expect("the run itself is sound");
        let blocks = used(&device);
        let mut rng = SimRng::new(seed);
        for n in 0..30 {
            let image = device.crash_image(0, &mut rng);
            for _ in 0..1 + rng.below(4) {
                let at = *rng.pick(&blocks);
                let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
                image.read(at, &mut buf).expect("no faults");
                match rng.below(4) {
                    0 => buf.fill(0),
                    1 => rng.fill(&mut buf),
                    2 => image.read(*rng.pick(&blocks), &mut buf).expect("no faults"),
                    _ => buf[rng.index(BLOCK_SIZE)] ^= 1 << rng.below(8),
                }
                image.write(at, &buf).expect("no faults");
            }
            let image: Arc<dyn BlockDevice> = Arc::new(image);
            let all = || FsckOptions { verify_data: true, ..FsckOptions::default() };
            match repair(&image, all(), &env()) {
                Ok(report) if report.clean => {
                    clean += 1;
                    let again = repaired(&image);
                    assert!(
                        again.clean && again.repaired == 0,
                        "{seed}, {n}: again {:#?}",
                        again.repairs
                    );
                    listing(&image);
                    let fs = mount(&image, false);
                    fs.detach();
                    fs.close().expect("closed");
                    assert!(repaired(&image).repaired == 0, "{seed}, {n}: after a mount");
                }
                Ok(report) => {
                    left += 1;
                    let deep = |code| [Code::HomeStore, Code::Log].contains(&code);
                    assert!(
                        report.findings.iter().all(|f| deep(f.code)),
                        "{seed}, {n}: {:#?}",
                        report.findings
                    );
                }
                Err(_) => refused += 1,
            }
        }
    }
    println!("{clean} repaired, {left} left, {refused} refused");
    assert!(clean > left + refused);
}
