//! Many threads at once: each file is one thread's to change and everybody's to read.

use crate::file::tests::*;
use std::sync::atomic::AtomicU32;

/// Bytes that say which version of which block they are.
fn block_of(ino: Ino, block: u64, version: u32) -> Vec<u8> {
    let mut out = pattern(ino << 32 | block, 4096);
    out[..4].copy_from_slice(&version.to_le_bytes());
    out
}

const BLOCKS: u64 = 150;

struct File {
    inode: Arc<Inode>,
    versions: Vec<AtomicU32>,
}

fn write_one(volume: &Volume, file: &File, block: u64) {
    let version = file.versions[block as usize].load(Ordering::Acquire) + 1;
    volume.write(&file.inode, block * BLOCK, &block_of(file.inode.ino, block, version));
    file.versions[block as usize].store(version, Ordering::Release);
}

/// What is read is a whole block, not older than what was there when the read began.
fn read_one(volume: &Volume, file: &File, block: u64) {
    let at_least = file.versions[block as usize].load(Ordering::Acquire);
    let read = volume.read(&file.inode, block * BLOCK, 4096);
    if read.len() < 4096 {
        assert_eq!(at_least, 0);
        return;
    }
    let version = u32::from_le_bytes(read[..4].try_into().unwrap());
    assert!(version >= at_least, "block {block}: version {version}, was {at_least}");
    assert!(
        version == 0 && read == [0; 4096] || read == block_of(file.inode.ino, block, version),
        "torn {block}"
    );
}

fn churn(volume: &Volume, me: u64, steps: u64) {
    for i in 0..steps {
        let ino = 1000 * (me + 1) + i;
        let file = volume.create(ino);
        let len = (i as usize * 997) % 30_000 + 1;
        volume.write(&file, 0, &pattern(ino, len));
        if i % 3 == 0 {
            volume.store.write_back(&file).unwrap();
        }
        if i % 4 == 0 {
            volume.store.set_size(&file, len as u64 / 2, &mut |_| ()).unwrap();
            assert!(volume.read(&file, 0, len) == pattern(ino, len)[..len / 2]);
        }
        drop(file);
        volume.remove(ino);
    }
}

#[test]
fn nothing_is_lost_or_torn_among_writers_readers_cleaner_and_eviction() {
    let volume = Volume::new(64, 256 << 10, 1 << 20, true);
    let files: Vec<_> = (10..14)
        .map(|ino| File {
            inode: volume.create(ino),
            versions: (0..BLOCKS).map(|_| AtomicU32::new(0)).collect(),
        })
        .collect();
    std::thread::scope(|scope| {
        let (volume, files) = (&volume, &files);
        for (me, file) in files.iter().enumerate() {
            scope.spawn(move || {
                let mut x = me as u64 + 1;
                for i in 0..1500_u64 {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    write_one(volume, file, (x >> 33) % BLOCKS);
                    if i % 37 == 0 {
                        volume.store.write_back(&file.inode).unwrap();
                    }
                }
            });
            scope.spawn(move || {
                let mut x = me as u64 + 77;
                for _ in 0..3000 {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    read_one(volume, &files[(x >> 60) as usize % files.len()], (x >> 33) % BLOCKS);
                }
            });
        }
        scope.spawn(move || churn(volume, 1, 150));
        scope.spawn(move || (0..40).for_each(|_| volume.store.clean_once().unwrap()));
        scope.spawn(move || (0..40).for_each(|_| volume.store.write_back_all().map(drop).unwrap()));
    });
    volume.store.close().unwrap();
    volume.evict();
    for file in &files {
        for block in 0..BLOCKS {
            let version = file.versions[block as usize].load(Ordering::Acquire);
            if version > 0 {
                let read = volume.read(&file.inode, block * BLOCK, 4096);
                assert!(
                    read == block_of(file.inode.ino, block, version),
                    "file {}, block {block}",
                    file.inode.ino
                );
            }
        }
    }
    volume.check();
    assert_eq!(volume.store.stats().no_room, 0);
}
