//! Tests of the data half, on a device and a journal in memory.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod cache;
mod cleaner;
mod damage;
mod failed_batches;
mod home;
mod in_flight;
mod model;
mod resize;
mod space;
mod threads;
mod trim;

use crate::api::{Errno, Ino};
#[cfg(feature = "compare")]
use crate::compare::locking::Locking;
use crate::error::FsError;
use crate::inode::incore::Inode;
use crate::keys::{self, BLOCK, InodeRecord};
use crate::store::data_store::Busy;
use crate::store::data_store::*;
use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_journal::{
    Credits, Geometry, Journal, JournalClient, JournalError, JournalOptions, Recovered, Seq,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Inodes of a test: those in memory, else from the journal.
pub(crate) struct Inodes {
    journal: Weak<Journal>,
    known: Mutex<BTreeMap<Ino, Arc<Inode>>>,
}

impl InodeSource for Inodes {
    fn trim(&self, _most: usize) -> usize {
        0
    }
    fn inode(&self, ino: Ino) -> Result<Option<Arc<Inode>>, FsError> {
        if let Some(inode) = self.known.lock().get(&ino) {
            return Ok(Some(Arc::clone(inode)));
        }
        let journal = self.journal.upgrade().expect("the test keeps it");
        let Some(value) = journal.get(&keys::inode(ino))? else { return Ok(None) };
        let inode = Arc::new(Inode::new(ino, InodeRecord::decode(&value)?));
        self.known.lock().insert(ino, Arc::clone(&inode));
        Ok(Some(inode))
    }
    fn name_hint(&self, ino: Ino) -> String {
        format!("<file {ino}>")
    }
}

/// A volume for tests.
pub(crate) struct Volume {
    pub dev: Arc<MemDevice>,
    pub journal: Arc<Journal>,
    pub store: Arc<DataStore>,
    pub inodes: Arc<Inodes>,
    pub client: Arc<Client>,
    geometry: Geometry,
    options: DataOptions,
}

/// Passes calls on to the store of the moment: the journal outlives it in these tests.
#[derive(Default)]
pub(crate) struct Client {
    store: Mutex<Option<Arc<DataStore>>>,
    /// Segments as of a checkpoint that needs none of them: it gives them back when it has got so
    /// far.
    pub hoard: Mutex<Vec<u32>>,
}

impl JournalClient for Client {
    fn durable_point(&self, seq: Seq) {
        if let Some(store) = &*self.store.lock() {
            store.durable_point(seq);
        }
    }
    fn failed(&self, error: &JournalError) {
        if let Some(store) = &*self.store.lock() {
            store.failed(error);
        }
    }
    fn take_home_segment(&self) -> Option<u32> {
        let store = self.store.lock().clone()?;
        store.release_home_segments(&std::mem::take(&mut *self.hoard.lock()));
        store.take_home_segment()
    }
    fn release_home_segments(&self, segments: &[u32]) {
        if let Some(store) = &*self.store.lock() {
            store.release_home_segments(segments);
        }
    }
}

impl Volume {
    pub fn new(segments: u32, segment_len: u64, cache_bytes: usize, background: bool) -> Self {
        Self::on(segments, segment_len, cache_bytes, background, |dev| dev)
    }

    /// The same, on what `wrap` makes of the device in memory.
    pub fn on(
        segments: u32,
        segment_len: u64,
        cache_bytes: usize,
        background: bool,
        wrap: impl FnOnce(Arc<MemDevice>) -> Arc<dyn BlockDevice>,
    ) -> Self {
        let log_len = 1 << 20;
        let map_len = (4096 + 4 * u64::from(segments)).next_multiple_of(4096);
        let geometry = Geometry {
            volume_id: [9; 16],
            hash_key: [7; 16],
            log_offset: 4096,
            log_len,
            home_map_offsets: [4096 + log_len, 4096 + log_len + map_len],
            home_map_len: map_len,
            segments_offset: 4096 + log_len + 2 * map_len,
            segment_len,
            segment_count: segments,
        };
        let dev =
            Arc::new(MemDevice::new(geometry.segments_offset + u64::from(segments) * segment_len));
        let block: Arc<dyn BlockDevice> = wrap(dev.clone());
        let env = Env::real();
        Journal::format(&block, &geometry, &[0, 1], &env).unwrap();
        let client = Arc::new(Client::default());
        let options =
            JournalOptions { read_only: false, background, ..JournalOptions::offline(1 << 20) };
        let (journal, recovered) =
            Journal::open(block.clone(), geometry, options, env.clone(), client.clone()).unwrap();
        let journal = Arc::new(journal);
        let options = DataOptions {
            cache_bytes,
            writeback_age: Duration::from_secs(5),
            background,
            read_only: false,
            known: None,
            #[cfg(feature = "compare")]
            locking: Locking::Range,
        };
        let store = DataStore::new(block, geometry, options.clone(), env);
        *client.store.lock() = Some(Arc::clone(&store));
        let inodes =
            Arc::new(Inodes { journal: Arc::downgrade(&journal), known: Mutex::default() });
        store.start(Arc::clone(&journal), &recovered, inodes.clone()).unwrap();
        Self { dev, journal, store, inodes, client, geometry, options }
    }

    /// A new empty file, in the journal.
    pub fn create(&self, ino: Ino) -> Arc<Inode> {
        let rec = InodeRecord { mode: libc::S_IFREG | 0o644, nlink: 1, ..InodeRecord::default() };
        let mut txn = self.journal.begin(Credits { keys: 1, bytes: 200, urgent: false }).unwrap();
        txn.put(&keys::inode(ino), &rec.encode());
        txn.commit();
        self.inodes.inode(ino).unwrap().unwrap()
    }

    pub fn write(&self, inode: &Arc<Inode>, offset: u64, data: &[u8]) {
        let end = self.store.write(inode, At::Offset(offset), data, Touch::Nothing).unwrap();
        assert_eq!(end, offset + data.len() as u64);
    }

    pub fn read(&self, inode: &Arc<Inode>, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0xee; len];
        let got = self.store.read(inode, offset, &mut out).unwrap();
        out.truncate(got);
        out
    }

    /// Drops the file and everything it has.
    pub fn remove(&self, ino: Ino) {
        let inode = self.inodes.inode(ino).unwrap().unwrap();
        let room = Credits { keys: 1, bytes: 16, urgent: true };
        self.store.reclaim(&inode, room, &mut |txn| txn.delete(&keys::inode(ino))).unwrap();
        self.inodes.known.lock().remove(&ino);
    }

    /// Evicts everything that can go.
    pub fn evict(&self) {
        for inode in self.inodes.known.lock().values() {
            let mut pages = inode.file.pages.write();
            pages.evict_all();
        }
    }

    /// The counts are those of the records: live blocks of the segments, blocks of the inodes,
    /// unwritten blocks.
    pub fn check(&self) {
        let mut live: BTreeMap<u32, u32> = BTreeMap::new();
        let mut blocks: BTreeMap<Ino, u64> = BTreeMap::new();
        let (mut seen, mut unwritten) = (std::collections::BTreeSet::new(), 0);
        let mut ends: BTreeMap<Ino, u64> = BTreeMap::new();
        self.journal
            .scan(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| {
                if let Some(keys::Key::Extent(ino, offset)) = keys::parse(key) {
                    let extent = keys::Extent::decode(value).unwrap();
                    assert!(
                        ends.get(&ino).is_none_or(|e| *e <= offset),
                        "extents of {ino} overlap at {offset}"
                    );
                    ends.insert(ino, offset + extent.blocks() * BLOCK);
                    *blocks.entry(ino).or_default() += extent.blocks();
                    match extent {
                        keys::Extent::Data { block, crcs } => {
                            for dev in block..block + crcs.len() as u64 {
                                assert!(
                                    seen.insert(dev),
                                    "device block {dev} belongs to two extents"
                                );
                                *live
                                    .entry(self.store.table.locate(dev).unwrap().0)
                                    .or_default() += 1;
                            }
                        }
                        keys::Extent::Unwritten { blocks } => unwritten += blocks,
                        keys::Extent::Lost { .. } => {}
                    }
                }
                true
            })
            .unwrap();
        self.journal
            .scan(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| {
                if let Some(keys::Key::Inode(ino)) = keys::parse(key) {
                    let rec = InodeRecord::decode(value).unwrap();
                    assert_eq!(
                        rec.blocks,
                        blocks.remove(&ino).unwrap_or(0),
                        "blocks of inode {ino}"
                    );
                }
                true
            })
            .unwrap();
        assert!(blocks.is_empty(), "extents without an inode: {blocks:?}");
        self.journal
            .scan(&keys::segment(0), &keys::segment_end(), &mut |key, value| {
                if let Some(keys::Key::Segment(index)) = keys::parse(key) {
                    let segment = keys::Segment::decode(value).unwrap();
                    assert_eq!(
                        segment.live,
                        live.remove(&index).unwrap_or(0),
                        "live blocks of segment {index}"
                    );
                    assert!(segment.filled >= segment.live);
                }
                true
            })
            .unwrap();
        assert!(live.is_empty(), "extents in segments without a record: {live:?}");
        let reserved = self.journal.get(&keys::unwritten()).unwrap();
        let reserved = reserved.map_or(0, |v| keys::Number::decode(&v).unwrap().0);
        assert_eq!(reserved, unwritten, "unwritten blocks");
        assert_eq!(self.store.table.used().1, unwritten);
        let (free, capacity) = self.store.space.audit();
        let held: u64 = self.inodes.known.lock().values().map(|i| i.file.pages.read().held()).sum();
        let used = (self.store.table.used().0 + unwritten + held) as i64;
        assert_eq!(
            free,
            capacity - used,
            "space is neither lost nor reserved twice ({held} blocks are dirty)"
        );
    }

    /// Like unmounting and mounting, with the journal as it is. `clean`: everything is written back
    /// first.
    pub fn reopen(&mut self, clean: bool) {
        if clean {
            self.store.close().unwrap();
            self.check();
        }
        self.reopen_on(self.dev.clone());
    }

    /// The same on this device, without a clean end.
    pub fn reopen_on(&mut self, dev: Arc<dyn BlockDevice>) {
        self.store = DataStore::new(dev, self.geometry, self.options.clone(), Env::real());
        self.inodes =
            Arc::new(Inodes { journal: Arc::downgrade(&self.journal), known: Mutex::default() });
        let recovered = Recovered { home_segments: vec![0, 1], ..Recovered::default() };
        self.store.start(Arc::clone(&self.journal), &recovered, self.inodes.clone()).unwrap();
    }
}

/// Bytes that tell where they belong.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 24) as u8
        })
        .collect()
}
