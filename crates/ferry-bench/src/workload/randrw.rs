//! Random readers and random writers on one file: alone, and at the same time.

use crate::counters::Counters;
use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample, Variant};
use crate::target::{File, Target};
use crate::threads::{now, threads};
use ferry::command::shared::{parse_bytes, parse_time};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const METRICS: [Metric; 9] = [
    Metric { name: "read_mb_s", label: "read MB/s", more_is_better: true },
    Metric { name: "write_mb_s", label: "write MB/s", more_is_better: true },
    Metric { name: "read_alone_mb_s", label: "read alone", more_is_better: true },
    Metric { name: "write_alone_mb_s", label: "write alone", more_is_better: true },
    Metric { name: "read_share", label: "of that", more_is_better: true },
    Metric { name: "write_share", label: "of that", more_is_better: true },
    Metric { name: "slowest_reader", label: "slowest/mean reader", more_is_better: true },
    Metric { name: "slowest_writer", label: "slowest/mean writer", more_is_better: true },
    Metric { name: "cpu_us_per_op", label: "CPU µs/op", more_is_better: false },
];

/// The length of the writes and reads that prepare the file, in bytes.
const CHUNK: usize = 1 << 20;

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Threads that read
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub readers: u32,
    /// Threads that write
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub writers: u32,
    /// Bytes of a read or write; several: 4k,64k
    #[arg(long, value_parser = parse_bytes, value_delimiter = ',', value_name = "SIZE", default_value = "4k")]
    pub block: Vec<u64>,
    /// Bytes of the file
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "1G")]
    pub size: u64,
    /// How long each part of a turn is counted: readers alone, writers alone, both
    #[arg(long, value_parser = parse_time, value_name = "TIME", default_value = "5s")]
    pub time: Duration,
}

/// Runs on all targets in turn.
pub fn bench<'a>(options: &Options, targets: &'a [Target]) -> Bench<'a> {
    let cases = options.block.iter().map(|&block| {
        let (block, options) = (block as usize, options.clone());
        let variants = targets.iter().map(|target| {
            let options = options.clone();
            Variant::new(target.name(), move |round| turn(target, block, round, &options))
        });
        Case::new(format!("blocks of {block} bytes"), variants.collect())
    });
    Bench {
        workload: "randrw",
        about: "Readers alone, writers alone, and both at once, at random offsets of one file that is in memory. `of that`: the rate \
                beside the others, as a part of the rate alone."
            .into(),
        metrics: METRICS.into(),
        options: vec![
            ("readers", options.readers.to_string()),
            ("writers", options.writers.to_string()),
            ("size", options.size.to_string()),
            ("time", format!("{:?}", options.time)),
        ],
        cases: cases.collect(),
    }
}

/// The bytes a second of each thread.
#[derive(Default)]
struct Rates(Vec<f64>);

impl Rates {
    fn mb_s(&self) -> f64 {
        self.0.iter().sum::<f64>() / 1e6
    }

    fn slowest(&self) -> f64 {
        let mean = self.0.iter().sum::<f64>() / self.0.len() as f64;
        self.0.iter().copied().fold(f64::INFINITY, f64::min) / mean
    }
}

fn turn(
    target: &Target,
    block: usize,
    round: u32,
    options: &Options,
) -> Result<Sample, BenchError> {
    let top = target.root().mkdir("turn")?;
    let file = top.create("file")?;
    fill(&file, options.size)?;
    target.sync()?;
    let run = |readers, writers| part(&file, block, round, (readers, writers), options);
    let (read_alone, _) = run(options.readers, 0)?;
    let (_, write_alone) = run(0, options.writers)?;
    let before = Counters::of(target)?;
    let (reads, writes) = run(options.readers, options.writers)?;
    let spent = Counters::of(target)?.since(&before);
    drop((file, top));
    target.root().remove_tree("turn")?;
    target.sync()?;
    let ops = (reads.mb_s() + writes.mb_s()) * 1e6 / block as f64 * options.time.as_secs_f64();
    Ok(Sample::from([
        ("read_mb_s", reads.mb_s()),
        ("write_mb_s", writes.mb_s()),
        ("read_alone_mb_s", read_alone.mb_s()),
        ("write_alone_mb_s", write_alone.mb_s()),
        ("read_share", reads.mb_s() / read_alone.mb_s()),
        ("write_share", writes.mb_s() / write_alone.mb_s()),
        ("slowest_reader", reads.slowest()),
        ("slowest_writer", writes.slowest()),
        ("cpu_us_per_op", spent.cpu_s * 1e6 / ops),
    ]))
}

/// Writes the file and reads it: if it fits, it is in memory then.
fn fill(file: &File, size: u64) -> io::Result<()> {
    let mut chunk = vec![0x5a; CHUNK];
    for offset in (0..size).step_by(CHUNK) {
        file.write_at(&chunk, offset)?;
    }
    for offset in (0..size).step_by(CHUNK) {
        file.read_at(&mut chunk, offset)?;
    }
    Ok(())
}

/// Runs readers and writers for the time of one part.
fn part(
    file: &File,
    block: usize,
    round: u32,
    (readers, writers): (u32, u32),
    options: &Options,
) -> Result<(Rates, Rates), BenchError> {
    let blocks = (options.size / block as u64).max(1);
    let until = AtomicU64::new(0);
    let work = |me: u32| -> io::Result<f64> {
        let mut random = u64::from(round) << 32 | u64::from(me) << 8 | 1;
        let mut buf = vec![me as u8; block];
        // All stop at the same time, which the first thread to begin sets.
        let end = now() + options.time;
        let end = until
            .compare_exchange(0, nanos(end), Ordering::AcqRel, Ordering::Acquire)
            .map_or_else(Duration::from_nanos, |_| end);
        let begin = now();
        let mut ops = 0_u64;
        let mut at = begin;
        while at < end {
            // The clock is not what is measured.
            for _ in 0..(CHUNK / block).clamp(1, 16) {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let offset = (random >> 33) % blocks * block as u64;
                if me < readers {
                    file.read_at(&mut buf, offset)?;
                } else {
                    file.write_at(&buf, offset)?;
                }
                ops += 1;
            }
            at = now();
        }
        Ok((ops * block as u64) as f64 / (at - begin).as_secs_f64().max(options.time.as_secs_f64()))
    };
    let mut rates = threads(readers + writers, work)?;
    let writes = rates.split_off(readers as usize);
    Ok((Rates(rates), Rates(writes)))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
