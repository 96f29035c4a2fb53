//! Transactions that nothing waits for: threads rewrite the same keys repeatedly, in the journal
//! alone.
//!
//! A transaction reserves log space for one key, which it picks at random, puts a value and
//! commits, as a file system does to change one inode. Checkpoints and timed commits run meanwhile.

use super::bare::{Owner, geometry};
use crate::error::BenchError;
use crate::model::{DeviceModel, ModelDevice};
use crate::run::{Bench, Case, Metric, Sample, Variant};
use crate::target::own_cpu_time;
use crate::threads::{now, threads};
use crate::workload::numbers::Numbers;
use ferry::command::shared::{parse_bytes, parse_duration, parse_time};
use ferry_device::{BLOCK_SIZE, BlockDevice};
use ferry_env::{Entropy, Env};
use ferry_journal::format::LOG_MIN;
use ferry_journal::{Credits, Journal, JournalError, JournalOptions};
use std::sync::Arc;
use std::time::Duration;

const SEGMENT_LEN: u64 = 8 << 20;
const SEGMENTS: u32 = 128;
/// The first segments of the home store.
const FIRST_SEGMENTS: [u32; 2] = [0, 1];
/// The transactions between two reads of the clock.
const BETWEEN_LOOKS: u32 = 256;

const METRICS: [Metric; 5] = [
    Metric { name: "transactions_per_s", label: "transactions/s", more_is_better: true },
    Metric { name: "cpu_us", label: "CPU µs/txn", more_is_better: false },
    Metric { name: "log_bytes", label: "log bytes/txn", more_is_better: false },
    Metric { name: "commits_per_s", label: "commits/s", more_is_better: false },
    Metric { name: "checkpoints", label: "checkpoints", more_is_better: false },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Threads
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Keys that are rewritten
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub keys: u64,
    /// Bytes of a value
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub bytes: u16,
    /// Size of the log
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "64M")]
    pub log_size: u64,
    /// What was committed is written to the log after this time
    #[arg(long, value_parser = parse_duration, value_name = "TIME", default_value = "1s")]
    pub commit_interval: Duration,
    /// How long a turn is
    #[arg(long, value_parser = parse_time, value_name = "TIME", default_value = "3s")]
    pub time: Duration,
}

/// Runs each turn on a new journal.
pub fn bench(options: &Options, device: &DeviceModel) -> Bench<'static> {
    let (turns, device) = (options.clone(), device.clone());
    Bench {
        workload: "transactions",
        about: "Threads rewrite keys; a transaction puts one of them. Nobody waits for durability."
            .into(),
        metrics: METRICS.into(),
        options: vec![
            ("threads", options.threads.to_string()),
            ("keys", options.keys.to_string()),
            ("bytes of a value", options.bytes.to_string()),
            ("commit interval", format!("{:?}", options.commit_interval)),
            ("turn", format!("{:?}", options.time)),
        ],
        cases: vec![Case::new(
            "rewrite",
            vec![Variant::new("journal", move |_| turn(&turns, &device))],
        )],
    }
}

fn turn(options: &Options, device: &DeviceModel) -> Result<Sample, BenchError> {
    if options.log_size < LOG_MIN {
        return Err(BenchError::Option(format!("a log has at least {} KiB", LOG_MIN >> 10)));
    }
    let log_len = options.log_size.next_multiple_of(BLOCK_SIZE as u64);
    let geometry = geometry(*b"transactions    ", log_len, (SEGMENTS, SEGMENT_LEN));
    let capacity = geometry.segments_offset + u64::from(SEGMENTS) * SEGMENT_LEN;
    let model = ModelDevice::new(device.clone(), capacity)?;
    let as_device: Arc<dyn BlockDevice> = model.clone();
    let env = Env::real();
    Journal::format(&as_device, &geometry, &FIRST_SEGMENTS, &env)?;
    let journal_options = JournalOptions {
        commit_interval: options.commit_interval,
        read_only: false,
        background: true,
        reads_all: false,
        ..JournalOptions::offline(64 << 20)
    };
    let owner = Arc::new(Owner::of(FIRST_SEGMENTS.len() as u32..SEGMENTS));
    let (journal, _) = Journal::open(as_device, geometry, journal_options, env, owner)?;
    model.begin();

    let value = vec![0x5a_u8; options.bytes.into()];
    let credits = Credits { keys: 1, bytes: 8 + u32::from(options.bytes), urgent: false };
    let rewrite = |key: u64| -> Result<(), JournalError> {
        let mut txn = journal.begin(credits)?;
        txn.put(&key.to_be_bytes(), &value);
        txn.commit();
        Ok(())
    };
    (0..options.keys).try_for_each(rewrite)?;
    let (before, cpu, from) = (journal.stats(), own_cpu_time(), now());
    let until = from + options.time;
    let counts = threads(options.threads, |number| -> Result<u64, JournalError> {
        let numbers = Numbers::new(number.into());
        let mut done = 0;
        while now() < until {
            for _ in 0..BETWEEN_LOOKS {
                rewrite(numbers.next_u64() % options.keys)?;
            }
            done += u64::from(BETWEEN_LOOKS);
        }
        Ok(done)
    })?;
    let (took, cpu) = ((now() - from).as_secs_f64(), own_cpu_time().saturating_sub(cpu));
    let after = journal.stats();
    journal.close()?;
    let done = counts.iter().sum::<u64>() as f64;
    Ok(Sample::from([
        ("transactions_per_s", done / took),
        ("cpu_us", cpu.as_secs_f64() * 1e6 / done),
        ("log_bytes", (after.log_written_bytes - before.log_written_bytes) as f64 / done),
        ("commits_per_s", (after.contexts - before.contexts) as f64 / took),
        ("checkpoints", (after.checkpoints - before.checkpoints) as f64),
    ]))
}
