//! A small volume in memory, and its owner's side of the journal.

pub mod home;

use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_journal::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const SEGMENT: u64 = 256 * 1024;

pub fn geometry(log_len: u64, segments: u32) -> Geometry {
    let home_map_len = 4096 + u64::from(segments * 4).next_multiple_of(4096);
    let home_map_offsets = [4096, 4096 + home_map_len + log_len];
    let segments_offset = (home_map_offsets[1] + home_map_len).next_multiple_of(SEGMENT);
    Geometry {
        volume_id: *b"test volume id 1",
        hash_key: [7; 16],
        log_offset: 4096 + home_map_len,
        log_len,
        home_map_offsets,
        home_map_len,
        segments_offset,
        segment_len: SEGMENT,
        segment_count: segments,
    }
}

pub fn device_len(geo: &Geometry) -> u64 {
    geo.segments_offset + u64::from(geo.segment_count) * geo.segment_len
}

/// Hands out segments and remembers what it was told.
pub struct Owner {
    pub free: Mutex<Vec<u32>>,
    pub durable_point: AtomicU64,
    pub failed: AtomicBool,
    /// How often a segment was asked for.
    pub asked: AtomicU64,
    /// How often it is refused before one is given again.
    pub refuse: AtomicU64,
}

impl Owner {
    pub fn new(geo: &Geometry, taken: &[u32]) -> Arc<Self> {
        let free = (0..geo.segment_count).rev().filter(|s| !taken.contains(s)).collect();
        Arc::new(Self {
            free: Mutex::new(free),
            durable_point: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            refuse: AtomicU64::new(0),
        })
    }
}

impl JournalClient for Owner {
    fn durable_point(&self, seq: Seq) {
        self.durable_point.fetch_max(seq.0, Ordering::SeqCst);
    }
    fn failed(&self, _error: &JournalError) {
        assert!(!self.failed.swap(true, Ordering::SeqCst), "told once");
    }
    fn take_home_segment(&self) -> Option<u32> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let refused =
            self.refuse.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        if refused.is_ok() {
            return None;
        }
        self.free.lock().unwrap().pop()
    }
    fn release_home_segments(&self, segments: &[u32]) {
        let mut free = self.free.lock().unwrap();
        for s in segments {
            assert!(!free.contains(s), "segment {s} given back twice");
            free.push(*s);
        }
    }
}

pub fn options(background: bool) -> JournalOptions {
    JournalOptions {
        commit_interval: Duration::from_secs(1),
        flush: FlushPolicy::default(),
        fast_flush: FAST_FLUSH,
        flush_interval_min: Duration::ZERO,
        log: LogOptions::default(),
        home_cache_bytes: 4 << 20,
        reads_all: false,
        read_only: false,
        background,
        accept_damage: false,
        tail: None,
        left: None,
    }
}

pub struct Volume {
    pub dev: Arc<dyn BlockDevice>,
    pub geo: Geometry,
    pub env: Env,
}

impl Volume {
    pub fn new(log_len: u64) -> Self {
        let geo = geometry(log_len, 256);
        Self::on(Arc::new(MemDevice::new(device_len(&geo))), geo, Env::real())
    }

    pub fn on(dev: Arc<dyn BlockDevice>, geo: Geometry, env: Env) -> Self {
        Journal::format(&dev, &geo, &[0, 1, 2, 3], &env).unwrap();
        Self { dev, geo, env }
    }

    pub fn open(&self) -> (Journal, Recovered) {
        self.open_with(options(false)).unwrap()
    }

    pub fn open_with(&self, options: JournalOptions) -> Result<(Journal, Recovered), JournalError> {
        self.open_owned(options).map(|(j, r, _)| (j, r))
    }

    pub fn open_owned(
        &self,
        options: JournalOptions,
    ) -> Result<(Journal, Recovered, Arc<Owner>), JournalError> {
        let owner = Owner::new(&self.geo, &[]);
        let (journal, recovered) =
            Journal::open(self.dev.clone(), self.geo, options, self.env.clone(), owner.clone())?;
        owner.free.lock().unwrap().retain(|s| !recovered.home_segments.contains(s));
        Ok((journal, recovered, owner))
    }
}

pub fn credits(keys: u32, bytes: u32) -> Credits {
    Credits { keys, bytes, urgent: false }
}

/// Forces and waits.
pub fn force(journal: &Journal, seq: Seq) -> Result<(), JournalError> {
    let (send, receive) = std::sync::mpsc::channel();
    journal.force(seq, Box::new(move |r| send.send(r).unwrap()));
    receive.recv().unwrap()
}

/// Commits one change.
pub fn put(journal: &Journal, key: &[u8], value: &[u8]) -> Seq {
    let mut t = journal.begin(credits(1, (key.len() + value.len()) as u32)).unwrap();
    t.put(key, value);
    t.commit()
}

/// The journal's whole view is what `model` says, by scanning and by getting.
pub fn assert_same(journal: &Journal, model: &std::collections::BTreeMap<Vec<u8>, Vec<u8>>) {
    let mut seen = Vec::new();
    journal
        .scan(b"", &[0xff; 8], &mut |k, v| {
            seen.push((k.to_vec(), v.to_vec()));
            true
        })
        .unwrap();
    assert!(seen.iter().map(|(k, v)| (k, v)).eq(model.iter()), "the view differs from the model");
    for (k, v) in model {
        assert_eq!(journal.get(k).unwrap().as_deref(), Some(&v[..]));
    }
}
