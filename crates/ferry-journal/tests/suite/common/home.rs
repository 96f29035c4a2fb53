//! A volume with a home store, to be damaged.
use super::{Owner, SEGMENT, Volume, assert_same, device_len, geometry, options, put};
use ferry_device::{AlignedBuf, BlockDevice, HookedDevice};
use ferry_journal::inspect::log_start;
use ferry_journal::*;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::collections::BTreeMap;
use std::sync::Arc;

pub const LOG: u64 = 512 * 1024;
pub const BLOCK: u64 = 4096;
/// Blocks of a segment of 256 KiB that hold pages; a block of checksums follows, then all of it
/// again.
pub const PAGES: u64 = 31;
/// Blocks between two copies: the pages, and their checksums.
pub const APART: u64 = PAGES + 1;

pub type Model = BTreeMap<Vec<u8>, Vec<u8>>;

pub struct Setup {
    pub volume: Volume,
    pub device: Arc<SimDevice>,
    pub bad: Arc<HookedDevice>,
    pub model: Model,
    /// Segments of the home store, as a fresh opening finds them.
    pub home: Vec<u32>,
}

pub fn setup(keys: u32, seed: u64) -> Setup {
    let geo = geometry(LOG, 64);
    let (env, _) = sim_env(seed);
    let device = Arc::new(SimDevice::new(device_len(&geo)));
    device.scribble(0, device_len(&geo), &mut SimRng::new(seed));
    let bad = Arc::new(HookedDevice::new(device.clone()));
    let volume = Volume::on(bad.clone(), geo, env);
    let mut model = Model::new();
    let (journal, _) = volume.open();
    for i in 0..keys {
        let (key, value) =
            (format!("key {i:06}").into_bytes(), vec![i as u8; 100 + i as usize % 50]);
        put(&journal, &key, &value);
        model.insert(key, value);
        if i % 1000 == 999 {
            journal.checkpoint().unwrap();
        }
    }
    journal.close().unwrap();
    drop(journal);
    let (journal, recovered) = volume.open_with(reader()).unwrap();
    assert_same(&journal, &model);
    assert_eq!(journal.stats().home_blocks_healed, 0);
    device.restart_trace();
    Setup { volume, device, bad, model, home: recovered.home_segments }
}

pub fn reader() -> JournalOptions {
    JournalOptions { read_only: true, home_cache_bytes: 0, ..options(false) }
}

impl Setup {
    /// The same on a copy of the device.
    pub fn fork(&self) -> Self {
        let device =
            Arc::new(self.device.crash_image(self.device.trace_len(), &mut SimRng::new(1)));
        let bad = Arc::new(HookedDevice::new(device.clone()));
        let volume =
            Volume { dev: bad.clone(), geo: self.volume.geo, env: self.volume.env.clone() };
        Self { volume, device, bad, model: self.model.clone(), home: self.home.clone() }
    }

    pub fn offset(&self, segment: u32, block: u64) -> u64 {
        self.volume.geo.segments_offset + u64::from(segment) * SEGMENT + block * BLOCK
    }

    pub fn block(&self, offset: u64) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(BLOCK as usize);
        self.device.read(offset, &mut buf).unwrap();
        buf
    }

    pub fn write(&self, offset: u64, bytes: &AlignedBuf) {
        self.device.write(offset, bytes).unwrap();
    }

    pub fn garbage(&self, offset: u64) {
        let mut buf = AlignedBuf::zeroed(BLOCK as usize);
        SimRng::new(offset).fill(&mut buf);
        self.write(offset, &buf);
    }

    /// What of the log is in the home store.
    pub fn forget_old_log(&self) {
        let dev: Arc<dyn BlockDevice> = self.device.clone();
        let start = log_start(&dev, &self.volume.geo).unwrap();
        assert!(start.position < self.volume.geo.log_len / BLOCK, "it was not written round");
        let zeros = AlignedBuf::zeroed((start.position * BLOCK) as usize);
        self.device.write(self.volume.geo.log_offset, &zeros).unwrap();
    }

    pub fn unreadable(&self, offset: u64) {
        self.bad.add_unreadable(offset);
    }

    /// Opens and reads everything through a walk, then key by key.
    pub fn check(&self, options: JournalOptions) -> u64 {
        let (journal, _) = self.volume.open_with(options).unwrap();
        assert_same(&journal, &self.model);
        journal.stats().home_blocks_healed
    }

    /// Offsets of pages' first copies whose loss loses keys but not the store: leaves of the keys.
    pub fn leaves(&self) -> Vec<u64> {
        let mut out = Vec::new();
        for &segment in &self.home {
            for block in 0..PAGES {
                let offset = self.offset(segment, block);
                let bytes = self.block(offset);
                let text = b"key 00";
                if bytes[0] == 1 && bytes.windows(text.len()).any(|w| w == text) {
                    out.push(offset);
                }
            }
        }
        out
    }

    /// Damages both copies of a leaf that keys are read from.
    pub fn lose_a_leaf(&self) {
        for leaf in self.leaves() {
            let fork = self.fork();
            fork.garbage(leaf);
            if fork.check(reader()) > 0 {
                [leaf, leaf + APART * BLOCK].into_iter().for_each(|offset| self.garbage(offset));
                return;
            }
        }
        panic!("no leaf is read");
    }

    /// What a scan past damage finds, and the gaps.
    pub fn readable(&self, journal: &Journal) -> (Model, Vec<LostKeys>) {
        let (mut found, mut gaps) = (Model::new(), Vec::new());
        let mut visit = |k: &[u8], v: &Value| {
            if let Some((last, _)) = found.last_key_value() {
                assert!(&last[..] < k, "in order");
            }
            found.insert(k.to_vec(), v.to_vec());
            true
        };
        journal.scan_readable(b"", &[0xff; 8], &mut visit, &mut |gap| gaps.push(gap)).unwrap();
        (found, gaps)
    }

    /// Every key that was not found lies in a gap, and nothing was made up.
    pub fn explained(&self, found: &Model, gaps: &[LostKeys]) {
        for (key, value) in &self.model {
            match found.get(key) {
                Some(there) => assert_eq!(there, value),
                None => assert!(
                    gaps.iter().any(|g| g.after < *key && *key < g.before),
                    "{} is in no gap",
                    String::from_utf8_lossy(key)
                ),
            }
        }
        assert!(found.keys().all(|key| self.model.contains_key(key)));
    }

    /// Writes both copies of a block, and makes its checksums match.
    pub fn forge(&self, offset: u64, bytes: &AlignedBuf) {
        let from = offset - self.volume.geo.segments_offset;
        let (segment, block) = ((from / SEGMENT) as u32, (from % SEGMENT / BLOCK) as usize);
        [offset, offset + APART * BLOCK].into_iter().for_each(|copy| self.write(copy, bytes));
        for copy in 0..2 {
            let sums = self.offset(segment, PAGES + copy * APART);
            let mut buf = self.block(sums);
            buf[block * 4..block * 4 + 4].copy_from_slice(&crc32c::crc32c(bytes).to_le_bytes());
            self.write(sums, &buf);
        }
    }
}

pub fn free_of(setup: &Setup, n: usize) -> Vec<u32> {
    (0..setup.volume.geo.segment_count).rev().filter(|s| !setup.home.contains(s)).take(n).collect()
}

pub fn rebuild(
    setup: &Setup,
    device: &Arc<SimDevice>,
    free: &[u32],
) -> Result<Rebuilt, JournalError> {
    rebuild_home(device.clone(), setup.volume.geo, &setup.volume.env, free, true)
}

pub fn open_on(setup: &Setup, device: &Arc<SimDevice>) -> (Journal, Recovered) {
    let owner = Owner::new(&setup.volume.geo, &[]);
    let opened = Journal::open(
        device.clone(),
        setup.volume.geo,
        JournalOptions { read_only: true, ..options(false) },
        setup.volume.env.clone(),
        owner,
    );
    opened.unwrap()
}

pub fn wipe_log(setup: &Setup) {
    let geo = setup.volume.geo;
    setup.device.write(geo.log_offset, &AlignedBuf::zeroed(geo.log_len as usize)).unwrap();
    // A fork is to have it.
    setup.device.restart_trace();
}

/// First copies of all blocks of pages.
pub fn offsets(setup: &Setup) -> Vec<u64> {
    setup.home.iter().flat_map(|s| (0..PAGES).map(|b| setup.offset(*s, b))).collect()
}

pub fn header_of(setup: &Setup) -> u64 {
    offsets(setup).into_iter().find(|offset| setup.block(*offset).starts_with(b"redb")).unwrap()
}

pub fn lose_both(setup: &Setup, offset: u64) {
    [offset, offset + APART * BLOCK].into_iter().for_each(|offset| setup.garbage(offset));
}

/// Leaves with this in them.
pub fn leaves_with(setup: &Setup, text: &[u8]) -> Vec<u64> {
    let mut offsets = offsets(setup);
    offsets.retain(|offset| {
        let block = setup.block(*offset);
        block[0] == 1 && block.windows(text.len()).any(|bytes| bytes == text)
    });
    offsets
}
