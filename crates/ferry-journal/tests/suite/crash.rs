//! Crashes everywhere: random transactions with data against a model, on a device that forgets and
//! tears.
//!
//! Each seed is a volume with several lives. A life is run once and crashed at every flush boundary
//! and at random points in between; each time the journal must come back with a prefix of what was
//! committed, nothing that was acknowledged missing, and the data that its keys map intact. One of
//! the crashes becomes the next life.

use crate::common::{self, Owner, device_len, geometry, options};
use ferry_device::{AlignedBuf, BlockDevice, HookedDevice};
use ferry_env::Env;
use ferry_journal::*;
use ferry_sim::device::{SimClock, SimDevice, SimRng, sim_env};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

const LOG: u64 = 256 * 1024;
const SEGMENTS: u32 = 48;
/// Segments from here on hold data.
const DATA_FROM: u32 = 32;
/// Bytes of a data extent.
const EXTENT: usize = 8192;

/// What one context did, as far as the model knows.
#[derive(Clone, Default)]
struct ContextModel {
    changes: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

/// A volume across its lives.
struct World {
    geo: Geometry,
    /// The device keeps what is dead: the log's old part is discarded.
    keeps_what_is_dead: bool,
    env: Env,
    clock: Arc<SimClock>,
    rng: SimRng,
    /// The state when the present life began.
    start: Model,
    /// Changes of the present life's contexts.
    contexts: BTreeMap<u64, ContextModel>,
    /// Length of the trace when a context was acknowledged.
    acknowledged: Arc<Mutex<Vec<(usize, u64)>>>,
    /// Data slots that no key maps, and from which durable point on each may be used.
    free: Vec<(u64, u64)>,
    mapped: BTreeMap<Vec<u8>, u64>,
}

fn data_slots(geo: &Geometry) -> impl Iterator<Item = u64> {
    let from = geo.segments_offset + u64::from(DATA_FROM) * geo.segment_len;
    (from..device_len(geo)).step_by(EXTENT)
}

fn extent_crc(buf: &[u8]) -> u32 {
    buf.chunks(4096)
        .fold(0, |crc, block| crc32c::crc32c_append(crc, &crc32c::crc32c(block).to_le_bytes()))
}

impl World {
    fn new(seed: u64) -> (Self, Arc<SimDevice>) {
        let geo = geometry(LOG, SEGMENTS);
        let (env, clock) = sim_env(seed);
        let mut rng = SimRng::new(seed ^ 0x5eed);
        let device = Arc::new(SimDevice::new(device_len(&geo)));
        device.scribble(0, device_len(&geo), &mut rng);
        let dev: Arc<dyn BlockDevice> = device.clone();
        Journal::format(&dev, &geo, &[0, 1, 2], &env).unwrap();
        let world = Self {
            geo,
            keeps_what_is_dead: seed % 2 == 1,
            env,
            clock,
            rng,
            start: Model::new(),
            contexts: BTreeMap::new(),
            acknowledged: Arc::default(),
            free: Vec::new(),
            mapped: BTreeMap::new(),
        };
        (world, device)
    }

    fn open(
        &self,
        device: &Arc<SimDevice>,
    ) -> Result<(Journal, Recovered, Arc<Owner>), JournalError> {
        let owner = Owner::new(&self.geo, &[]);
        let mut dev: Arc<dyn BlockDevice> = device.clone();
        if self.keeps_what_is_dead {
            dev = Arc::new(HookedDevice::new(dev).keeping_what_is_dead());
        }
        let (journal, recovered) =
            Journal::open(dev, self.geo, options(false), self.env.clone(), owner.clone())?;
        let mut free = owner.free.lock().unwrap();
        free.retain(|s| *s < DATA_FROM && !recovered.home_segments.contains(s));
        drop(free);
        Ok((journal, recovered, owner))
    }

    /// The state after all contexts up to `seq`.
    fn state_at(&self, seq: u64) -> Model {
        let mut model = self.start.clone();
        for context in self.contexts.range(..=seq).map(|(_, c)| c) {
            for (key, change) in &context.changes {
                match change {
                    Some(value) => drop(model.insert(key.clone(), value.clone())),
                    None => drop(model.remove(key)),
                }
            }
        }
        model
    }

    /// One transaction of a few changes, perhaps with data.
    fn transact(&mut self, journal: &Journal) -> Seq {
        let n = 1 + self.rng.below(5);
        let mut changes = Vec::new();
        let mut freed = Vec::new();
        let mut t = journal
            .begin(Credits { keys: 8, bytes: 8 * 1500, urgent: self.rng.chance(1, 4) })
            .unwrap();
        for _ in 0..n {
            let key = format!("key {:02}", self.rng.below(40)).into_bytes();
            if self.rng.chance(1, 4) {
                t.delete(&key);
                freed.extend(self.mapped.remove(&key));
                changes.push((key, None));
                continue;
            }
            let value = match self.data_slot(journal).filter(|_| self.rng.chance(1, 3)) {
                Some(slot) => {
                    let value = self.write_data(&mut t, slot);
                    freed.extend(self.mapped.insert(key.clone(), slot));
                    value
                }
                None => {
                    freed.extend(self.mapped.remove(&key));
                    let mut value = vec![b'v'; self.rng.index(1200)];
                    self.rng.fill(&mut value);
                    value.insert(0, b'v');
                    value
                }
            };
            t.put(&key, &value);
            changes.push((key, Some(value)));
        }
        let seq = t.commit();
        self.free.extend(freed.into_iter().map(|slot| (slot, seq.0)));
        self.contexts.entry(seq.0).or_default().changes.extend(changes);
        seq
    }

    /// A data slot whose freeing the durable point covers.
    fn data_slot(&mut self, journal: &Journal) -> Option<u64> {
        let durable_point = journal.durable_point().0;
        let at = self.free.iter().position(|(_, freed)| *freed <= durable_point)?;
        Some(self.free.swap_remove(at).0)
    }

    fn write_data(&mut self, t: &mut Transaction<'_>, slot: u64) -> Vec<u8> {
        let mut buf = AlignedBuf::zeroed(EXTENT);
        self.rng.fill(&mut buf);
        let crc = extent_crc(&buf);
        t.write_data(
            DataExtent { offset: slot, buf: Arc::new(buf), crc },
            Box::new(|r| r.unwrap()),
        );
        let mut value = b"d".to_vec();
        value.extend_from_slice(&slot.to_le_bytes());
        value.extend_from_slice(&crc.to_le_bytes());
        value
    }

    fn force(&mut self, journal: &Journal, device: &Arc<SimDevice>, seq: Seq) {
        let (device, acknowledged) = (device.clone(), self.acknowledged.clone());
        let done = move |result| match result {
            Ok(()) => acknowledged.lock().push((device.trace_len(), seq.0)),
            // The life ended while the context was held for others.
            Err(JournalError::Closed) => {}
            Err(error) => panic!("{error}"),
        };
        journal.force_for(Caller(self.rng.below(4) as u32), seq, Box::new(done));
    }

    /// Works for a while.
    fn live(&mut self, device: &Arc<SimDevice>, steps: u64) {
        let (journal, recovered, _owner) = self.open(device).unwrap();
        self.begin_life(&journal, &recovered);
        let mut last = recovered.last;
        for _ in 0..steps {
            match self.rng.below(20) {
                0..12 => last = self.transact(&journal),
                12..16 => self.force(&journal, device, last),
                16 => {
                    self.clock.advance(Duration::from_millis(self.rng.below(1500)));
                    journal.tick().unwrap();
                }
                17 => self.out_of_order(&journal, device),
                18 => journal.force_durable_point().unwrap(),
                _ => journal.checkpoint().unwrap(),
            }
        }
        match self.rng.below(3) {
            0 => journal.close().unwrap(),
            1 => self.force(&journal, device, last),
            _ => {}
        }
    }

    /// Several contexts under way at once, whose writes complete in any order.
    fn out_of_order(&mut self, journal: &Journal, device: &Arc<SimDevice>) {
        journal.checkpoint().unwrap();
        device.set_hold(true);
        for _ in 0..self.rng.below(30) {
            // With no room left, a transaction would wait for a checkpoint, and that for a flush
            // that is held.
            if journal.stats().log_free_bytes < LOG / 2 {
                break;
            }
            let seq = self.transact(journal);
            match self.rng.below(6) {
                0 => self.force(journal, device, seq),
                1 | 2 => {
                    // Time seals, whatever is under way.
                    self.clock.advance(Duration::from_secs(1));
                    journal.tick().unwrap();
                }
                3 if device.held() > 0 => drop(device.release(self.rng.index(device.held()))),
                _ => {}
            }
        }
        device.release_all(&mut self.rng);
        device.set_hold(false);
    }

    fn begin_life(&mut self, journal: &Journal, recovered: &Recovered) {
        journal.set_flush_policy(FlushPolicy::ALL[self.rng.index(4)], FAST_FLUSH);
        self.start = self.state_at(recovered.last.0);
        self.contexts.clear();
        self.acknowledged.lock().clear();
        self.mapped.clear();
        for (key, value) in &self.start {
            if value[0] == b'd' {
                self.mapped
                    .insert(key.clone(), u64::from_le_bytes(value[1..9].try_into().unwrap()));
            }
        }
        let mapped: Vec<u64> = self.mapped.values().copied().collect();
        self.free = data_slots(&self.geo)
            .filter(|s| !mapped.contains(s))
            .take(60)
            .map(|s| (s, 0))
            .collect();
        assert!(journal.durable_point() >= recovered.last);
    }

    /// Opens a crashed device and holds it against the model. Returns the newest context that is
    /// there.
    fn verify(&self, device: &Arc<SimDevice>, acknowledged: u64, context: &str) -> u64 {
        let (journal, recovered, _owner) =
            self.open(device).unwrap_or_else(|e| panic!("{context}: {e}"));
        let last = recovered.last.0;
        assert!(
            last >= acknowledged,
            "{context}: context {acknowledged} was acknowledged, {last} is the newest"
        );
        let model = self.state_at(last);
        common::assert_same(&journal, &model);
        for value in model.values().filter(|v| v[0] == b'd') {
            let offset = u64::from_le_bytes(value[1..9].try_into().unwrap());
            let mut buf = AlignedBuf::zeroed(EXTENT);
            device.read(offset, &mut buf).unwrap();
            assert_eq!(extent_crc(&buf).to_le_bytes(), value[9..13], "{context}: data of a key");
        }
        last
    }

    fn acknowledged_at(&self, point: usize) -> u64 {
        self.acknowledged
            .lock()
            .iter()
            .filter(|(at, _)| *at <= point)
            .map(|(_, seq)| *seq)
            .max()
            .unwrap_or(0)
    }

    /// Crashes the life at many points; one of the results.
    fn crash_everywhere(&mut self, device: &SimDevice, label: &str) -> Arc<SimDevice> {
        let mut points = device.flush_points();
        let len = device.trace_len() as u64;
        points.extend((0..20).map(|_| self.rng.below(len + 1) as usize));
        points.push(len as usize);
        let chosen = self.rng.index(points.len());
        let mut next = None;
        for (i, &point) in points.iter().enumerate() {
            let image = Arc::new(device.crash_image(point, &mut self.rng));
            let context = format!("{label}, crashed at event {point} of {len}");
            let acknowledged = self.acknowledged_at(point);
            if i == chosen {
                next = Some(Arc::new(image.crash_image(0, &mut self.rng)));
            }
            let last = self.verify(&image, acknowledged, &context);
            // Once more, with a crash within that recovery: it must not change its mind.
            let within = self.rng.below(image.trace_len() as u64 + 1) as usize;
            let again = Arc::new(image.crash_image(within, &mut self.rng));
            let then = self.verify(
                &again,
                last,
                &format!("{context}, then at event {within} of the recovery"),
            );
            assert_eq!(then, last, "{context}: a crash within recovery changes nothing");
        }
        next.expect("one of the points was chosen")
    }
}

fn run(seed: u64, lives: u64, steps: u64) {
    let (mut world, mut device) = World::new(seed);
    for life in 0..lives {
        device.restart_trace();
        world.live(&device, steps);
        device = world.crash_everywhere(&device, &format!("seed {seed}, life {life}"));
    }
}

#[test]
fn every_crash_leaves_a_prefix_with_all_that_was_acknowledged() {
    for seed in 0..12 {
        run(seed, 4, 60);
    }
}

/// The test above can fail: a device whose flushes do nothing must be caught.
#[test]
#[should_panic(expected = "seed")]
fn flushes_that_lie_are_caught() {
    for seed in 0..8 {
        let (mut world, device) = World::new(seed);
        device.restart_trace();
        device.set_flush_lies(true);
        world.live(&device, 60);
        world.crash_everywhere(&device, &format!("seed {seed}"));
    }
}

/// What the runs above go through, in one life: the log wraps, is checkpointed, and carries several
/// records at once.
#[test]
fn a_run_wraps_and_checkpoints_the_log_and_overlaps_records() {
    let (mut world, device) = World::new(3);
    let (journal, recovered, owner) = world.open(&device).unwrap();
    world.begin_life(&journal, &recovered);
    for _ in 0..40 {
        for _ in 0..10 {
            let seq = world.transact(&journal);
            world.force(&journal, &device, seq);
        }
        world.out_of_order(&journal, &device);
    }
    let stats = journal.stats();
    assert!(stats.log_written_bytes > 6 * stats.log_bytes, "{stats:?}");
    assert!(stats.log_in_flight_max > 1, "{stats:?}");
    assert!(stats.checkpoints > 10 && stats.data_bytes > 0, "{stats:?}");
    let newest = journal.durable();
    journal.force_durable_point().unwrap();
    assert_eq!(
        owner.durable_point.load(std::sync::atomic::Ordering::SeqCst),
        newest.0.max(journal.durable().0)
    );
    common::assert_same(&journal, &world.state_at(u64::MAX));
}
