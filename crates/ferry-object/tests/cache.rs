//! The cache on disk beside a volume: what it has is believed only if it is of the object that was
//! asked for.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_env::Env;
use ferry_env::planted::{Bug, plant_here};
use ferry_object::{
    CacheOptions, Compression, ObjectDevice, OnDisk, Opening, StoreUrl, VolumeOptions, make_volume,
    open_volume,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

const CACHE: &str = "ferry-cache";
/// Bytes of the header of the cache's file, and of an entry of its index (`docs/format.md`).
const HEADER: usize = 4096;
const ENTRY: usize = 32;
/// So many bytes of an entry tell which part a slot has.
const PART: usize = 20;

struct Volume {
    directory: tempfile::TempDir,
    url: StoreUrl,
    env: Env,
}

impl Volume {
    /// A volume of which two log objects have three blocks each: ones, and twos.
    fn new() -> Self {
        let (directory, env) = (tempfile::tempdir().expect("a directory"), Env::real());
        let url = StoreUrl::Dir(directory.path().join("store"));
        let options = VolumeOptions {
            compression: Compression::Off,
            ..VolumeOptions::new(1 << 20, (0, 1 << 20))
        };
        let device = make_volume(&url, &options, &env).expect("a new volume").device;
        for byte in [1, 2] {
            let mut buf = AlignedBuf::zeroed(3 * BLOCK_SIZE);
            for (n, block) in buf.chunks_exact_mut(BLOCK_SIZE).enumerate() {
                block.fill(byte);
                block[0] = n as u8;
            }
            device.write(offset(byte), &buf).expect("a write");
            device.flush().expect("a flush");
        }
        device.close().expect("it is at rest");
        Self { directory, url, env }
    }

    fn cache(&self) -> CacheOptions {
        let directory = self.directory.path().join("cache");
        CacheOptions { directory, bytes: CacheOptions::BYTES_MIN }
    }

    /// What is read with the cache, and how many of its parts were not right.
    fn read(&self) -> (Vec<u8>, u64) {
        let on_disk = OnDisk { cache: Some(self.cache()), ..OnDisk::default() };
        let device = open_volume(&self.url, Opening::Read, None, &on_disk, &self.env);
        let device: Arc<ObjectDevice> = device.expect("it is free");
        let found = [1, 2].map(|byte| {
            let mut buf = AlignedBuf::zeroed(3 * BLOCK_SIZE);
            device.read(offset(byte), &mut buf).expect("it can be read");
            buf[1]
        });
        let damaged = device.cache_stats().expect("it has a cache").damaged;
        (found.to_vec(), damaged)
    }
}

fn offset(byte: u8) -> u64 {
    u64::from(byte) * 16 * BLOCK_SIZE as u64
}

/// The slots of the two parts that the cache has get each other's names.
fn exchange(cache: &Path) {
    let file = cache.join(CACHE);
    let mut bytes = fs::read(&file).expect("it is there");
    let entry = |slot: usize| HEADER + slot * ENTRY;
    let is_used = |slot: &usize| bytes[entry(*slot) + PART..entry(*slot) + PART + 4] != [0; 4];
    let slots: Vec<usize> = (0..64).filter(is_used).collect();
    let [first, second] = slots[..] else { panic!("the cache has the parts {slots:?}") };
    for n in 0..PART {
        bytes.swap(entry(first) + n, entry(second) + n);
    }
    fs::write(&file, bytes).expect("it can be written");
}

#[test]
fn a_part_of_another_object_is_not_taken() {
    let volume = Volume::new();
    let right = vec![1, 2];
    assert_eq!(volume.read(), (right.clone(), 0));
    assert_eq!(volume.read(), (right.clone(), 0), "from the cache");
    exchange(&volume.cache().directory);
    let (found, damaged) = volume.read();
    assert_eq!(found, right, "from the store");
    assert!(damaged > 0, "nobody has seen that the parts are of other objects");
    assert_eq!(volume.read(), (right.clone(), 0), "the cache has the right parts now");

    exchange(&volume.cache().directory);
    let planted = plant_here(Bug::CachedAnother);
    assert_ne!(volume.read().0, right, "the bug is not found");
    drop(planted);
}

#[test]
fn only_its_user_may_read_a_cache_also_one_that_others_could_read() {
    let volume = Volume::new();
    let path = volume.cache().directory.join(CACHE);
    let mode = || fs::metadata(&path).expect("it is there").permissions().mode() & 0o777;
    let (first, _) = volume.read();
    assert_eq!(mode(), 0o600);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("it is ours");
    assert_eq!(volume.read().0, first);
    assert_eq!(mode(), 0o600);
}
