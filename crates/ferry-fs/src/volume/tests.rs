//! Making volumes and recognising them.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use crate::api::{Errno, Filesystem, ROOT};
use crate::volume::*;
use crate::{FsOptions, InProcess, LocalFs};
use ferry_check::{Code, FsckOptions, fsck, repair};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice, MemDevice};
use ferry_env::Env;
use std::sync::Arc;

const SIZE: u64 = 32 << 20;

fn device() -> Arc<dyn BlockDevice> {
    Arc::new(MemDevice::new(SIZE))
}

fn made(dev: &Arc<dyn BlockDevice>) -> Superblock {
    mkfs(dev, &MkfsOptions { label: "test".into(), ..MkfsOptions::default() }, &Env::real())
        .unwrap()
}

fn write_at(dev: &Arc<dyn BlockDevice>, offset: u64, change: impl FnOnce(&mut [u8])) {
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    dev.read(offset, &mut block).unwrap();
    change(&mut block);
    dev.write(offset, &block).unwrap();
}

fn reseal(block: &mut [u8]) {
    let crc = crc32c::crc32c(&block[..BLOCK_SIZE - 4]);
    block[BLOCK_SIZE - 4..].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_superblock_describes_its_volume() {
    for size in [SIZE_MIN, SIZE, 1 << 30, 64 << 30] {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(size));
        let sb = mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap();
        assert_eq!(read_superblock(&dev).unwrap(), sb);
        assert_eq!(sb.size, size);
        let end = sb.segments_offset + u64::from(sb.segment_count) * sb.segment_len;
        let room = size - BLOCK_SIZE as u64;
        assert!(
            end <= room && end + sb.segment_len > room,
            "segments reach to the last block of {size}"
        );
    }
}

/// The home store fits into what it is given, however large a segment is.
#[test]
fn a_volume_of_any_size_can_be_made_and_opened() {
    for mib in
        [16, 17, 24, 31, 32, 48, 63, 64, 96, 127, 128, 129, 200, 255, 256, 400, 512, 1000, 1024]
    {
        let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(mib << 20));
        mkfs(&dev, &MkfsOptions::default(), &Env::real())
            .unwrap_or_else(|error| panic!("{mib} MiB: {error}"));
        let options = FsOptions { background: false, ..FsOptions::default() };
        let fs = LocalFs::open(dev, options, Env::real())
            .unwrap_or_else(|error| panic!("{mib} MiB: {error}"));
        fs.close().unwrap();
    }
}

#[test]
fn either_superblock_is_enough() {
    for offset in SUPERBLOCK_OFFSETS {
        let dev = device();
        let sb = made(&dev);
        write_at(&dev, offset, |block| block[700] ^= 1);
        assert_eq!(read_superblock(&dev).unwrap(), sb, "with the copy at {offset} damaged");
        LocalFs::open(dev, FsOptions { background: false, ..FsOptions::default() }, Env::real())
            .unwrap();
    }
    let dev = device();
    let sb = made(&dev);
    sb.offsets().iter().for_each(|offset| write_at(&dev, *offset, |block| block[9] ^= 1));
    assert!(matches!(read_superblock(&dev), Err(VolumeError::Damaged { .. })));
}

/// The log had grown, and the device has lost the write of one copy.
#[test]
fn of_two_superblocks_the_one_with_the_longer_log_wins() {
    for lost in SUPERBLOCK_OFFSETS {
        let dev = device();
        let old = made(&dev);
        let new = old.with_log_behind(3);
        for offset in new.offsets().into_iter().filter(|offset| *offset != lost) {
            dev.write(offset, &new.encode()).unwrap();
        }
        assert_eq!(read_superblock(&dev).unwrap(), new, "{lost}");
        let (found, used) = find_superblock(&dev).unwrap();
        assert!(found == new && used != lost);
        assert_eq!(rewrite_bad_copies(&dev, used).unwrap(), [lost]);
        assert!(read_superblock_copies(&*dev).iter().all(|(_, copy)| copy.as_ref() == Ok(&new)));
    }
    // Another volume's is not asked.
    let dev = device();
    let sb = made(&dev);
    let other = Superblock { volume_id: [1; 16], ..sb.with_log_behind(3) };
    dev.write(SUPERBLOCK_OFFSETS[1], &other.encode()).unwrap();
    assert_eq!(read_superblock(&dev).unwrap(), sb);
}

#[test]
fn create_does_not_overwrite_an_existing_name() {
    let dev = device();
    made(&dev);
    let options = MkfsOptions::default();
    let refused = mkfs(&dev, &options, &Env::real()).unwrap_err();
    assert!(matches!(&refused, VolumeError::Exists { label } if label == "test"), "{refused}");
    mkfs(&dev, &MkfsOptions { force: true, ..options.clone() }, &Env::real()).unwrap();

    let foreign = device();
    write_at(&foreign, 4096, |block| block[100] = 1);
    assert!(matches!(mkfs(&foreign, &options, &Env::real()), Err(VolumeError::Foreign)));
    assert!(
        matches!(read_superblock(&foreign), Err(VolumeError::Foreign)),
        "many formats begin with zeros"
    );
    for offset in SUPERBLOCK_OFFSETS {
        write_at(&dev, offset, |block| block.fill(0));
    }
    let refused = mkfs(&dev, &options, &Env::real());
    assert!(
        matches!(refused, Err(VolumeError::Exists { .. })),
        "a volume with its last superblock alone"
    );
    write_at(&dev, SIZE - BLOCK_SIZE as u64, |block| block.fill(0));
    let refused = mkfs(&dev, &options, &Env::real());
    assert!(
        matches!(refused, Err(VolumeError::Foreign)),
        "a volume without superblocks is not overwritten"
    );
    let small: Arc<dyn BlockDevice> = Arc::new(MemDevice::new((1 << 20) + 8192));
    assert!(matches!(read_superblock(&small), Err(VolumeError::Empty)));
    let short: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(4096));
    assert!(matches!(read_superblock(&short), Err(VolumeError::TooShort)));
    let foreign = device();
    write_at(&foreign, 0, |block| block[..4].copy_from_slice(b"ELF!"));
    assert!(matches!(read_superblock(&foreign), Err(VolumeError::Foreign)));
    assert!(matches!(read_superblock(&device()), Err(VolumeError::Empty)));
}

/// A volume in whose superblocks a byte has another value.
fn change(at: usize, value: u8) -> Result<Superblock, VolumeError> {
    let dev = device();
    for offset in made(&dev).offsets() {
        write_at(&dev, offset, |block| {
            block[at] = value;
            reseal(block);
        });
    }
    read_superblock(&dev)
}

#[test]
fn a_volume_of_another_format_is_refused_with_the_program_that_reads_it() {
    for (found, program) in [
        (FORMAT_VERSION - 1, "use the older FerryFS that made it"),
        (FORMAT_VERSION + 1, "use a newer FerryFS"),
    ] {
        let refused = change(8, found as u8).expect_err("another version");
        assert!(matches!(refused, VolumeError::Version { found: is } if is == found), "{refused}");
        let said = refused.to_string();
        assert!(said.contains(&format!("has format version {found}")), "{said}");
        assert!(said.contains(program), "{said}");
    }
}

#[test]
fn unknown_incompatible_features_are_refused() {
    assert!(matches!(change(24, 4), Err(VolumeError::Features { bits: 4 })));
    assert_eq!(change(16, 4).unwrap().compatible, 4);
    assert!(matches!(change(72 + 1, 0x20), Err(VolumeError::Damaged { .. })), "another block size");
    assert!(matches!(change(88 + 7, 0xff), Err(VolumeError::Damaged { .. })), "a log far outside");
    assert!(matches!(change(80 + 2, 0), Err(VolumeError::Damaged { .. })), "segments of no bytes");
    assert!(
        matches!(change(80 + 2, 6), Err(VolumeError::Damaged { .. })),
        "segments of no power of two"
    );
    assert!(
        matches!(change(96 + 2, 1), Err(VolumeError::Damaged { .. })),
        "a log that is too small"
    );
    assert!(
        matches!(change(64 + 5, 1), Err(VolumeError::Truncated { .. })),
        "a volume longer than its file"
    );
}

/// A volume with a file of 100,000 bytes.
fn with_a_file(dev: &Arc<dyn BlockDevice>) -> Superblock {
    let sb = made(dev);
    let fs = LocalFs::open(
        dev.clone(),
        FsOptions { background: false, ..FsOptions::default() },
        Env::real(),
    );
    let (fs, me) = (fs.unwrap(), InProcess::default());
    let (entry, opened) = me.call(|cx| fs.create(cx, ROOT, b"file", 0o644, libc::O_RDWR)).unwrap();
    let ino = entry.attr.unwrap().ino;
    me.call(|cx| fs.write(cx, ino, opened.fh, 0, &[7; 100_000], false, false)).unwrap();
    me.call(|cx| {
        fs.release(cx, ino, opened.fh);
        Ok(())
    })
    .unwrap();
    fs.detach();
    fs.close().unwrap();
    sb
}

fn reads_its_file(dev: &Arc<dyn BlockDevice>) -> bool {
    let options = FsOptions { background: false, read_only: true, ..FsOptions::default() };
    let (fs, me) =
        (LocalFs::open(dev.clone(), options, Env::real()).unwrap(), InProcess::default());
    let ino = me.call(|cx| fs.lookup(cx, ROOT, b"file")).unwrap().attr.unwrap().ino;
    let fh = me.call(|cx| fs.open(cx, ino, libc::O_RDONLY, false)).unwrap().fh;
    let mut out = vec![0; 100_000];
    me.call(|cx| fs.read(cx, ino, fh, 0, &mut out)) == Ok(100_000) && out == [7; 100_000]
}

/// The whole of `dev` on another device, which is `more` bytes longer.
fn grown(dev: &Arc<dyn BlockDevice>, more: u64) -> Arc<dyn BlockDevice> {
    let longer: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(dev.capacity() + more));
    let mut all = AlignedBuf::zeroed(dev.capacity() as usize);
    dev.read(0, &mut all).unwrap();
    longer.write(0, &all).unwrap();
    longer
}

#[test]
fn a_volume_that_has_lost_its_front_is_found_by_its_last_superblock() {
    let whole = device();
    let sb = with_a_file(&whole);
    assert_eq!(sb.offsets().last(), Some(&(SIZE - BLOCK_SIZE as u64)));
    // As it is; as its file was made longer; and with other bytes where the front was.
    for (more, fill) in [(0, 0), (4096, 0), (40 << 20, 0), (0, 0xa5)] {
        let dev = grown(&whole, more);
        let mut front = AlignedBuf::zeroed(SUPERBLOCK_OFFSETS[1] as usize + BLOCK_SIZE);
        front.fill(fill);
        dev.write(0, &front).unwrap();
        let refused = mkfs(&dev, &MkfsOptions::default(), &Env::real()).unwrap_err();
        assert!(
            matches!(refused, VolumeError::Exists { .. } | VolumeError::Foreign),
            "{more}: {refused}"
        );
        assert!(LocalFs::open(dev.clone(), FsOptions::default(), Env::real()).is_err(), "{more}");
        let all = || FsckOptions { verify_data: true, ..FsckOptions::default() };
        let report = fsck(&dev, all(), &Env::real()).unwrap();
        assert_eq!(
            report.findings.iter().map(|f| f.code).collect::<Vec<_>>(),
            [Code::SuperblockCopy]
        );
        let report = repair(&dev, all(), &Env::real()).unwrap();
        assert!(report.clean && report.repaired == 2, "{more}: {:#?}", report.repairs);
        assert_eq!(read_superblock(&dev).unwrap(), sb, "{more}");
        assert!(reads_its_file(&dev), "{more}");
    }
}

/// Both slots of the home map lie in the front of a small volume, and what they say is not made up.
#[test]
fn a_volume_whose_first_two_mib_are_zeros_is_never_called_empty() {
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(1 << 30));
    with_a_file(&dev);
    dev.write(0, &AlignedBuf::zeroed(2 << 20)).unwrap();
    assert!(matches!(read_superblock(&dev), Err(VolumeError::LastCopy { .. })));
    let report =
        repair(&dev, FsckOptions { verify_data: true, ..FsckOptions::default() }, &Env::real());
    let report = report.unwrap();
    assert!(report.clean && report.repaired > 0, "{:#?}", report.findings);
    assert!(reads_its_file(&dev));
    // One that was made before there was a last copy.
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(1 << 30));
    let sb = with_a_file(&dev);
    dev.write(0, &AlignedBuf::zeroed(2 << 20)).unwrap();
    write_at(&dev, sb.size - BLOCK_SIZE as u64, |block| block.fill(0));
    assert!(matches!(mkfs(&dev, &MkfsOptions::default(), &Env::real()), Err(VolumeError::Foreign)));
}

#[test]
fn a_volume_without_a_last_copy_works_as_before() {
    let dev = device();
    let sb = with_a_file(&dev);
    let old = Superblock { compatible: 0, ..sb.clone() };
    for offset in SUPERBLOCK_OFFSETS {
        dev.write(offset, &old.encode()).unwrap();
    }
    write_at(&dev, SIZE - BLOCK_SIZE as u64, |block| block.fill(0));
    assert_eq!(read_superblock(&dev).unwrap(), old);
    assert!(reads_its_file(&dev));
    let report = repair(&dev, FsckOptions::default(), &Env::real()).unwrap();
    assert_eq!((report.clean, report.repaired), (true, 0));
    assert_eq!(read_superblock_copies(&*dev).len(), 2);
}

/// A copy of a superblock in what a file holds is no volume's.
#[test]
fn a_superblock_counts_only_where_it_belongs() {
    let dev = device();
    let sb = made(&dev);
    dev.write(0, &AlignedBuf::zeroed(SIZE as usize)).unwrap();
    dev.write(SIZE - 2 * BLOCK_SIZE as u64, &sb.encode()).unwrap();
    assert!(matches!(find_superblock(&dev), Err(VolumeError::Foreign)));
    // One without a volume before it is not made one.
    let dev = device();
    dev.write(SIZE - BLOCK_SIZE as u64, &sb.encode()).unwrap();
    assert!(matches!(find_superblock(&dev), Err(VolumeError::LastCopy { .. })));
    assert!(repair(&dev, FsckOptions::default(), &Env::real()).is_err());
    assert!(matches!(
        mkfs(&dev, &MkfsOptions::default(), &Env::real()),
        Err(VolumeError::Exists { .. })
    ));
    let force = MkfsOptions { force: true, size: SIZE / 2, ..MkfsOptions::default() };
    let smaller = mkfs(&dev, &force, &Env::real()).unwrap();
    SUPERBLOCK_OFFSETS.iter().for_each(|offset| write_at(&dev, *offset, |block| block.fill(0)));
    let (found, _) = find_superblock(&dev).unwrap();
    assert_eq!(found, smaller, "what an earlier volume has left at the end is gone");
}

#[test]
fn impossible_mkfs_options_are_refused() {
    let dev = device();
    let options = MkfsOptions::default();
    for bad in [
        MkfsOptions { size: SIZE * 2, ..options.clone() },
        MkfsOptions { size: SIZE_MIN / 2, ..options.clone() },
        MkfsOptions { log_size: Some(SIZE), ..options.clone() },
        MkfsOptions { log_size: Some(1), ..options.clone() },
        MkfsOptions { segment_size: Some(3 << 20), ..options.clone() },
        MkfsOptions { segment_size: Some(8 << 20), ..options.clone() },
        MkfsOptions { label: "x".repeat(65), ..options.clone() },
    ] {
        let error = mkfs(&dev, &bad, &Env::real()).unwrap_err();
        assert!(matches!(error, VolumeError::Option(_)), "{bad:?}: {error}");
    }
    assert!(matches!(read_superblock(&dev), Err(VolumeError::Empty)), "nothing was written");
    let huge_log = MkfsOptions { log_size: Some(LOG_MAX + SIZE), ..options };
    let error = check_options(8 << 40, &huge_log, &Env::real()).unwrap_err();
    assert!(matches!(error, VolumeError::Option(_)), "{error}");
}

#[test]
fn a_fresh_volume_has_an_empty_root_that_belongs_to_its_maker() {
    let dev = device();
    mkfs(&dev, &MkfsOptions { uid: 7, gid: 8, ..MkfsOptions::default() }, &Env::real()).unwrap();
    let options = FsOptions { background: false, read_only: true, ..FsOptions::default() };
    let fs = LocalFs::open(dev, options, Env::real()).unwrap();
    let me = InProcess::default();
    let (attr, _) = me.call(|cx| fs.getattr(cx, ROOT, None)).unwrap();
    assert_eq!((attr.mode, attr.nlink, attr.uid, attr.gid), (libc::S_IFDIR | 0o755, 2, 7, 8));
    let mut names = Vec::new();
    me.call(|cx| {
        fs.readdir(cx, ROOT, 0, 0, false, &mut |e| {
            names.push(e.name.to_vec());
            true
        })
    })
    .unwrap();
    assert_eq!(names, [b".".to_vec(), b"..".to_vec()]);
    assert_eq!(me.call(|cx| fs.mkdir(cx, ROOT, b"d", 0o755)).unwrap_err(), Errno(libc::EROFS));
}
