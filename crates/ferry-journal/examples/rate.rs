//! How fast transactions go, in process, over a memory device: rewriting 10,000 keys without forcing, and creating
//! keys for several times round the log, checkpoints included.
//!
//! `cargo run --release -p ferry-journal --example rate [THREADS] [LOG_MIB] [FILE]`; with FILE, over that file, which
//! is overwritten.

use ferry_device::{BlockDevice, Env, FileDevice, MemDevice};
use ferry_journal::{
    Credits, FAST_FLUSH, FlushPolicy, Geometry, Journal, JournalClient, JournalError, JournalOptions,
    LogOptions, Recovered, Seq,
};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const SEGMENT: u64 = 8 << 20;
const SEGMENTS: u32 = 512;
const KEYS: u64 = 10_000;

/// Hands out segments.
struct Owner(AtomicU32);

impl JournalClient for Owner {
    fn stamped(&self, _: Seq) {}
    fn failed(&self, error: &JournalError) {
        eprintln!("failed: {error}");
    }
    fn take_home_segment(&self) -> Option<u32> {
        let next = self.0.fetch_add(1, Ordering::Relaxed);
        (next < SEGMENTS).then_some(next)
    }
    fn release_home_segments(&self, segments: &[u32]) {
        // Only the newest are taken again, which is enough here.
        let last = segments.iter().min().copied().unwrap_or(u32::MAX);
        self.0.fetch_min(last.max(self.0.load(Ordering::Relaxed) - segments.len() as u32), Ordering::Relaxed);
    }
}

fn geometry(log_len: u64) -> Geometry {
    let home_map_len = 4096 + u64::from(SEGMENTS * 4).next_multiple_of(4096);
    Geometry {
        volume_id: [7; 16],
        log_offset: 0,
        log_len,
        home_map_offset: log_len,
        home_map_len,
        segments_offset: log_len + 2 * home_map_len,
        segment_len: SEGMENT,
        segment_count: SEGMENTS,
    }
}

fn device(geo: &Geometry, file: Option<&Path>, env: &Env) -> Result<Arc<dyn BlockDevice>, Box<dyn Error>> {
    let len = geo.segments_offset + u64::from(SEGMENTS) * SEGMENT;
    let dev: Arc<dyn BlockDevice> = match file {
        Some(path) => Arc::new(FileDevice::create(path, len, true, env)?),
        None => Arc::new(MemDevice::new(len)),
    };
    Journal::format(&dev, geo, &[0, 1], env)?;
    Ok(dev)
}

fn open(dev: &Arc<dyn BlockDevice>, geo: Geometry, env: &Env) -> Result<(Journal, Recovered), JournalError> {
    let options = JournalOptions {
        flush: FlushPolicy::default(),
        fast_flush: FAST_FLUSH,
        log: LogOptions::default(),
        commit_interval: Duration::from_secs(1),
        home_cache_bytes: 64 << 20,
        read_only: false,
        background: true,
        accept_damage: false,
    };
    Journal::open(dev.clone(), geo, options, env.clone(), Arc::new(Owner(AtomicU32::new(2))))
}

/// Time to recover a log that is as full as it gets before a checkpoint.
fn measure_recovery(dev: &Arc<dyn BlockDevice>, geo: Geometry, env: &Env) -> Result<(), Box<dyn Error>> {
    Journal::format(dev, &geo, &[0, 1], env)?;
    let (journal, _) = open(dev, geo, env)?;
    let mut n = 0_u64;
    while journal.stats().log_free_bytes > geo.log_len * 3 / 10 {
        let mut t = journal.begin(Credits { keys: 1000, bytes: 160 * 1000, urgent: false })?;
        for _ in 0..1000 {
            n += 1;
            t.put(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes(), &[9; 150]);
        }
        let seq = t.commit();
        journal.force(seq, Box::new(|_| ()));
    }
    journal.force_stamped()?;
    drop(journal);
    let start = env.clock.monotonic();
    let (_, recovered) = open(dev, geo, env)?;
    let took = env.clock.monotonic().saturating_sub(start);
    println!(
        "recovery: {} contexts, {} MiB, {n} keys in {took:.2?}",
        recovered.contexts,
        recovered.bytes >> 20
    );
    Ok(())
}

/// Runs `transactions` on each of `threads` and prints the rate.
fn measure(
    label: &str,
    journal: &Journal,
    threads: u64,
    transactions: u64,
    work: impl Fn(&Journal, u64) -> Result<(), JournalError> + Sync,
) -> Result<(), Box<dyn Error>> {
    let clock = Env::real().clock;
    let start = clock.monotonic();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|t| {
                let work = &work;
                scope.spawn(move || (0..transactions).try_for_each(|n| work(journal, t * transactions + n)))
            })
            .collect();
        workers.into_iter().try_for_each(|w| w.join().expect("a worker panicked"))
    })?;
    let took = clock.monotonic().saturating_sub(start);
    let rate = (threads * transactions) as f64 / took.as_secs_f64();
    println!("{label}: {threads} threads, {rate:.0} transactions/s ({took:.2?})");
    let s = journal.stats();
    println!(
        "    contexts {}, log {} MiB in {} writes, waits {}, checkpoints {} in {:.2?} ({} keys), flushes {}",
        s.contexts,
        s.log_written_bytes >> 20,
        s.log_writes,
        s.space.waits,
        s.checkpoints,
        s.checkpoint_time,
        s.checkpoint_keys,
        s.flushes,
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(1), |a| a.parse())?;
    let log_len = args.next().map_or(Ok(64), |a| a.parse::<u64>())? << 20;
    let credits = |keys, bytes| Credits { keys, bytes, urgent: false };

    let file = args.next();
    let (geo, env) = (geometry(log_len), Env::real());
    let dev = device(&geo, file.as_ref().map(Path::new), &env)?;
    measure_recovery(&dev, geo, &env)?;
    Journal::format(&dev, &geo, &[0, 1], &env)?;
    let (journal, _) = open(&dev, geo, &env)?;
    measure("rewrite 10,000 keys, one key of 100 bytes each", &journal, threads, 1_000_000, |journal, n| {
        let mut t = journal.begin(credits(1, 120))?;
        t.put(&(n * 7919 % KEYS).to_be_bytes(), &[n as u8; 100]);
        t.commit();
        Ok(())
    })?;
    measure("create: 3 keys of 150 bytes, one of them shared", &journal, threads, 500_000, |journal, n| {
        let mut t = journal.begin(credits(3, 600))?;
        t.put(&[b"i".as_slice(), &n.to_be_bytes()].concat(), &[1; 150]);
        t.put(&[b"d".as_slice(), &n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()].concat(), &[2; 40]);
        t.put(b"parent", &n.to_be_bytes());
        t.commit();
        Ok(())
    })?;
    let found = AtomicU32::new(0);
    measure("get", &journal, threads, 500_000, |journal, n| {
        let value = journal.get(&[b"i".as_slice(), &(n * 31).to_be_bytes()].concat())?;
        found.fetch_add(u32::from(value.is_some()), Ordering::Relaxed);
        Ok(())
    })?;
    measure("force: one key each, then wait", &journal, threads, 50_000, |journal, n| {
        let mut t = journal.begin(credits(1, 120))?;
        t.put(&n.to_be_bytes(), &[3; 100]);
        let seq = t.commit();
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        journal.force(seq, Box::new(move |r| drop(send.send(r))));
        receive.recv().unwrap_or(Err(JournalError::Closed))
    })?;
    journal.close()?;
    Ok(())
}
