//! A process is killed, and the device has all that it had written: the next one takes from its
//! memory what the log lacks.

use crate::common::{Volume, credits, device_len, force, geometry, options};
use ferry_device::{AlignedBuf, BlockDevice, LeftBuffers, SharedBuffers, SharedWords, Words};
use ferry_journal::*;
use ferry_sim::device::{Fault, Op, SimDevice, SimRng, sim_env};
use std::collections::BTreeMap;
use std::sync::Arc;

const LOG: u64 = 512 << 10;

fn memory() -> Arc<SharedWords> {
    Arc::new(SharedWords::new(TAIL_WORDS).unwrap())
}

fn tail(memory: &Arc<SharedWords>) -> Tail {
    Tail::new(memory.clone(), 0)
}

/// Another memory with the same in it. These tests use no more of it.
fn copy(memory: &SharedWords) -> Arc<SharedWords> {
    let other = self::memory();
    drop(SharedBuffers::behind(other.file().unwrap()).unwrap());
    (0..1 << 17).for_each(|at| other.set(at, memory.get(at)));
    other
}

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn contents(journal: &Journal) -> Model {
    let mut found = Model::new();
    let visit = &mut |key: &[u8], value: &Value| {
        found.insert(key.to_vec(), value.to_vec());
        true
    };
    journal.scan(&[], &[255; 9], visit).unwrap();
    found
}

/// A process, on a device that may crash.
struct Life {
    device: Arc<SimDevice>,
    volume: Volume,
    journal: Journal,
    memory: Arc<SharedWords>,
    buffers: Arc<SharedBuffers>,
    /// Contents after each context.
    states: BTreeMap<Seq, Model>,
    /// Where data was written, by contexts.
    data: Vec<(Seq, u64)>,
}

impl Life {
    fn begin(seed: u64) -> Self {
        let geo = geometry(LOG, 256);
        let device = Arc::new(SimDevice::new(device_len(&geo)));
        let volume = Volume::on(device.clone(), geo, sim_env(seed).0);
        let memory = memory();
        let buffers = SharedBuffers::behind(memory.file().unwrap()).unwrap();
        let with = JournalOptions { tail: Some(Arc::new(tail(&memory))), ..options(false) };
        let (journal, _) = volume.open_with(with).unwrap();
        let states = BTreeMap::from([(Seq(0), Model::new())]);
        Self { device, volume, journal, memory, buffers, states, data: Vec::new() }
    }

    /// One that has made so many changes.
    fn lived(seed: u64, changes: u64) -> (Self, SimRng) {
        let (mut life, mut rng) = (Self::begin(seed), SimRng::new(seed));
        life.live(&mut rng, changes);
        (life, rng)
    }

    /// Commits a transaction of some keys, perhaps with data.
    fn change(&mut self, rng: &mut SimRng, number: u64) {
        let mut t = self.journal.begin(credits(4, 2000)).unwrap();
        let mut state = self.states.values().next_back().unwrap().clone();
        for _ in 0..=rng.below(3) {
            let key = vec![b'k', rng.below(40) as u8];
            if rng.chance(1, 4) {
                t.delete(&key);
                state.remove(&key);
            } else {
                let value = vec![number as u8; rng.below(300) as usize];
                t.put(&key, &value);
                state.insert(key, value);
            }
        }
        let with_data = rng.chance(1, 5).then(|| {
            let mut buf = AlignedBuf::shared(&self.buffers, 4096).unwrap();
            buf.fill(number as u8 | 1);
            let crc = crc32c::crc32c(&crc32c::crc32c(&buf).to_le_bytes());
            let offset = self.volume.geo.segments_offset + (100 << 20 >> 2) + number * 4096;
            buf.goes_to(offset);
            t.write_data(DataExtent { offset, buf: Arc::new(buf), crc }, Box::new(|r| r.unwrap()));
            offset
        });
        let seq = t.commit();
        self.data.extend(with_data.map(|offset| (seq, offset)));
        self.states.insert(seq, state);
    }

    /// Changes, and makes some of it durable.
    fn live(&mut self, rng: &mut SimRng, changes: u64) {
        for number in 0..changes {
            self.change(rng, number);
            if rng.chance(1, 8) {
                let newest = *self.states.keys().next_back().unwrap();
                force(&self.journal, newest).unwrap();
            }
        }
    }

    /// The device as the kill leaves it. The process does nothing any more.
    fn killed(self) -> Killed {
        let device = self.device.copy();
        std::mem::forget(self.journal);
        let Self { volume: Volume { geo, env, .. }, memory, states, data, .. } = self;
        Killed { device, geo, env, memory, states, data }
    }
}

struct Killed {
    device: SimDevice,
    geo: Geometry,
    env: ferry_env::Env,
    memory: Arc<SharedWords>,
    states: BTreeMap<Seq, Model>,
    data: Vec<(Seq, u64)>,
}

impl Killed {
    /// Opens the volume on `device`, with what the process has left.
    fn open(
        &self,
        device: &Arc<SimDevice>,
        memory: &Arc<SharedWords>,
    ) -> Result<(Journal, Recovered), JournalError> {
        let (dev, geo, env) = (device.clone() as _, self.geo, self.env.clone());
        let data = LeftBuffers::of(memory.file().unwrap()).unwrap();
        let left = LeftLog { tail: tail(memory), data };
        let with = JournalOptions { left: Some(Arc::new(left)), ..options(false) };
        Volume { dev, geo, env }.open_with(with)
    }

    fn newest(&self) -> &Model {
        self.states.values().next_back().unwrap()
    }
}

#[test]
fn all_that_was_committed_is_there_after_a_kill_and_durable() {
    let mut taken = 0;
    for seed in 0..40 {
        let (life, mut rng) = Life::lived(seed, 20 + 8 * seed);
        let killed = life.killed();
        let device = Arc::new(killed.device.copy());
        let (journal, recovered) = killed.open(&device, &killed.memory).unwrap();
        assert_eq!(&contents(&journal), killed.newest(), "{seed}");
        assert_eq!(recovered.last, *killed.states.keys().next_back().unwrap());
        taken += recovered.last.0 - recovered.logged.0;
        // The power fails before anything else is done.
        let crashed = Arc::new(device.crash_image(device.trace_len(), &mut rng));
        let (dev, geo, env) = (crashed as _, killed.geo, killed.env.clone());
        let (journal, _) = Volume { dev, geo, env }.open();
        assert_eq!(&contents(&journal), killed.newest(), "{seed}");
    }
    assert!(taken > 20, "{taken}");
}

#[test]
fn a_process_that_is_killed_while_it_takes_them_leaves_them_to_the_next() {
    let mut struck = 0;
    for seed in 0..20 {
        let (life, _) = Life::lived(seed, 60);
        let killed = life.killed();
        for write in 1..20 {
            let mut device = Arc::new(killed.device.copy());
            device.inject(Fault { op: Op::Write, after: write, errno: 5, sticky: false });
            let memory = copy(&killed.memory);
            let first = killed.open(&device, &memory);
            struck += u64::from(first.is_err());
            device = Arc::new(device.copy());
            let (journal, _) = killed.open(&device, &memory).unwrap();
            assert!(contents(&journal) == *killed.newest(), "{seed} {write}");
        }
    }
    assert!(struck > 20, "{struck}");
}

#[test]
fn data_that_did_not_reach_the_device_is_written_again() {
    let mut written = 0;
    for seed in 0..40 {
        let (life, mut rng) = Life::lived(seed, 50);
        let durable = life.journal.durable();
        let killed = life.killed();
        let device = Arc::new(killed.device.copy());
        let Some((_, offset)) = killed.data.last().filter(|(seq, _)| *seq > durable) else {
            continue;
        };
        let mut was = AlignedBuf::zeroed(4096);
        device.read(*offset, &mut was).unwrap();
        device.write(*offset, &AlignedBuf::zeroed(4096)).unwrap();
        let (journal, _) = killed.open(&device, &killed.memory).unwrap();
        assert_eq!(&contents(&journal), killed.newest(), "{seed}");
        // The power fails before anything else is done.
        let crashed = device.crash_image(device.trace_len(), &mut rng);
        let mut is = AlignedBuf::zeroed(4096);
        crashed.read(*offset, &mut is).unwrap();
        assert_eq!(is[..], was[..], "{seed}");
        written += 1;
    }
    assert!(written > 5, "{written}");
}

#[test]
fn contexts_end_before_the_first_whose_data_is_neither_on_the_device_nor_in_memory() {
    let mut shorter = 0;
    for seed in 0..40 {
        let (life, _) = Life::lived(seed, 50);
        let durable = life.journal.durable();
        let killed = life.killed();
        let device = Arc::new(killed.device.copy());
        let unlogged: Vec<_> = killed.data.iter().filter(|(seq, _)| *seq > durable).collect();
        let Some((seq, offset)) = unlogged.first() else { continue };
        device.write(*offset, &AlignedBuf::zeroed(4096)).unwrap();
        let (journal, recovered) = killed.open(&device, &copy(&killed.memory)).unwrap();
        assert_eq!(recovered.last.0 + 1, seq.0);
        assert_eq!(contents(&journal), killed.states[&recovered.last], "{seed}");
        shorter += 1;
    }
    assert!(shorter > 5, "{shorter}");
}

#[test]
fn a_log_that_somebody_else_has_written_to_behind_several_kills_is_theirs() {
    for is_forgotten in [false, true] {
        let (life, _) = Life::lived(7, 60);
        let killed = life.killed();
        let mut device = Arc::new(killed.device.copy());
        for number in 0..3 {
            let (journal, recovered) = killed.open(&device, &killed.memory).unwrap();
            assert_eq!(recovered.is_ours, number == 0 || !is_forgotten, "{number}");
            if is_forgotten {
                journal.forget_left();
            }
            let mut t = journal.begin(credits(1, 100)).unwrap();
            t.put(b"more", &[number]);
            force(&journal, t.commit()).unwrap();
            device = Arc::new(device.copy());
            std::mem::forget(journal);
        }
        let Killed { geo, env, .. } = &killed;
        let (others, _) = Volume { dev: device.clone() as _, geo: *geo, env: env.clone() }.open();
        std::mem::forget(others);
        device = Arc::new(device.copy());
        let (_, recovered) = killed.open(&device, &killed.memory).unwrap();
        assert!(!recovered.is_ours);
    }
}

#[test]
fn a_log_that_somebody_else_has_written_to_is_theirs_for_each_process_that_goes_on() {
    let (life, _) = Life::lived(7, 60);
    let killed = life.killed();
    let mut device = Arc::new(killed.device.copy());
    let Killed { geo, env, .. } = &killed;
    let (others, _) = Volume { dev: device.clone() as _, geo: *geo, env: env.clone() }.open();
    std::mem::forget(others);
    // The first of them is killed, too.
    for number in 0..2 {
        device = Arc::new(device.copy());
        let (journal, recovered) = killed.open(&device, &killed.memory).unwrap();
        assert!(!recovered.is_ours, "{number}");
        std::mem::forget(journal);
    }
    let (_, recovered) = killed.open(&Arc::new(killed.device.copy()), &killed.memory).unwrap();
    assert!(recovered.is_ours);
}
