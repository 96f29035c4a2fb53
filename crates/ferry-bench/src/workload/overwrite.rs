//! Overwrites at random a file that takes much of a volume, beside another file that fills the
//! volume further. Every overwritten block leaves a dead one, and the cleaner must gather the live
//! ones. Nothing may be lost, no write may fail for lack of space, and no write should wait for
//! long.

use crate::counters::Counters;
use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample};
use crate::stats::Histogram;
use crate::target::{File, Target, TurnTarget};
use crate::threads::{now, threads};
use crate::workload::numbers::Numbers;
use ferry_env::Entropy;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// The length of a write, in bytes.
const BLOCK: usize = 4096;
/// The length of the writes and reads that fill and check files, in bytes.
const CHUNK: usize = 1 << 20;
/// The number of blocks in that length.
const CHUNK_BLOCKS: u64 = (CHUNK / BLOCK) as u64;

const METRICS: [Metric; 6] = [
    Metric { name: "mb_s", label: "MB/s", more_is_better: true },
    Metric { name: "amplification", label: "written/asked", more_is_better: false },
    Metric { name: "p50_us", label: "p50 µs", more_is_better: false },
    Metric { name: "p99_ms", label: "p99 ms", more_is_better: false },
    Metric { name: "max_ms", label: "max ms", more_is_better: false },
    Metric { name: "cleaned", label: "segments cleaned", more_is_better: false },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// How full the volume is, in percent; several: 60,80,90
    #[arg(long, value_delimiter = ',', value_name = "PERCENT", default_value = "60,80,90", value_parser = clap::value_parser!(u32).range(1..=95))]
    pub full: Vec<u32>,
    /// How much of the volume is overwritten, in percent; another file fills up the rest
    #[arg(long, value_name = "PERCENT", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=95))]
    pub file: u32,
    /// How often the size of what is overwritten is written
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub times: u32,
    /// Threads
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,
}

/// Runs on all targets in turn.
pub fn bench<'a>(options: &Options, turn_targets: &'a [TurnTarget]) -> Bench<'a> {
    let cases = options.full.iter().map(|&full| {
        let variants = turn_targets.iter().map(|target| {
            let options = options.clone();
            target.variant(move |target, round| turn(target, full, round, &options))
        });
        Case::new(format!("{full} % full"), variants.collect())
    });
    Bench {
        workload: "overwrite",
        about: "A file is overwritten at random in blocks of 4 KiB, then made durable (both count); another one fills the volume up. \
                Both are read and compared. written/asked: what went to segments for each byte that was written."
            .into(),
        metrics: METRICS.into(),
        options: vec![
            ("file", format!("{} %", options.file)),
            ("times", options.times.to_string()),
            ("threads", options.threads.to_string()),
        ],
        cases: cases.collect(),
    }
}

fn turn(target: &Target, full: u32, round: u32, options: &Options) -> Result<Sample, BenchError> {
    let top = target.root().mkdir("turn")?;
    let (file, other) = (top.create("file")?, top.create("other")?);
    let percent = target.size()? / 100;
    let overwritten = options.file.min(full);
    let chunks = percent * u64::from(overwritten) / CHUNK as u64;
    let other_chunks = percent * u64::from(full - overwritten) / CHUNK as u64;
    let blocks = chunks * CHUNK_BLOCKS;
    let versions: Vec<AtomicU32> = (0..blocks).map(|_| AtomicU32::new(0)).collect();
    fill(&file, 0, chunks)?;
    fill(&other, blocks, other_chunks)?;
    target.sync()?;

    let (each, writers) =
        (blocks * u64::from(options.times) / u64::from(options.threads), options.threads);
    let before = Counters::of(target)?;
    let begun = now();
    let times = threads(writers, |me| -> io::Result<Histogram> {
        let numbers = Numbers::new((u64::from(round) << 32) | u64::from(me + 1));
        let (mut times, mut data) = (Histogram::default(), [0; BLOCK]);
        for _ in 0..each {
            // Each block belongs to one thread.
            let block = numbers.next_u64() % (blocks / u64::from(writers)) * u64::from(writers)
                + u64::from(me);
            let version = versions[block as usize].fetch_add(1, Ordering::Relaxed) + 1;
            contents(block, version, &mut data);
            let begun = now();
            file.write_at(&data, block * BLOCK as u64)?;
            times.add(now() - begun);
        }
        Ok(times)
    })?;
    target.sync()?;
    let took = (now() - begun).as_secs_f64();
    let after = Counters::of(target)?;
    compare(&file, 0, chunks, |block| versions[block as usize].load(Ordering::Relaxed))?;
    compare(&other, blocks, other_chunks, |_| 0)?;
    drop((file, other, top));
    target.root().remove_tree("turn")?;
    target.sync()?;

    let mut all = Histogram::default();
    times.iter().for_each(|times| all.merge(times));
    let bytes = (each * u64::from(writers)) as f64 * BLOCK as f64;
    let mut sample = Sample::from([
        ("mb_s", bytes / took / 1e6),
        ("p50_us", all.quantile_ms(0.5) * 1e3),
        ("p99_ms", all.quantile_ms(0.99)),
        ("max_ms", all.quantile_ms(1.0)),
    ]);
    sample.extend(
        after
            .grown(&before, "/data/written_bytes")
            .map(|written| ("amplification", written / bytes)),
    );
    sample
        .extend(after.grown(&before, "/data/cleaned_segments").map(|cleaned| ("cleaned", cleaned)));
    Ok(sample)
}

/// Writes version 0 of all blocks; their numbers begin at `first`.
fn fill(file: &File, first: u64, chunks: u64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    for number in 0..chunks {
        for (block, out) in (first + number * CHUNK_BLOCKS..).zip(chunk.chunks_mut(BLOCK)) {
            contents(block, 0, out);
        }
        file.write_at(&chunk, number * CHUNK as u64)?;
    }
    Ok(())
}

/// Checks that every block has its newest version.
fn compare(
    file: &File,
    first: u64,
    chunks: u64,
    version: impl Fn(u64) -> u32,
) -> Result<(), BenchError> {
    let (mut chunk, mut expected) = (vec![0; CHUNK], [0; BLOCK]);
    for number in 0..chunks {
        let got = file.read_at(&mut chunk, number * CHUNK as u64)?;
        for (block, read) in (first + number * CHUNK_BLOCKS..).zip(chunk.chunks(BLOCK)) {
            let version = version(block);
            contents(block, version, &mut expected);
            if got < CHUNK || read != expected {
                let text =
                    format!("block {block} is not what was written to it (version {version})");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text).into());
            }
        }
    }
    Ok(())
}

/// The contents of a block in a version.
fn contents(block: u64, version: u32, out: &mut [u8]) {
    let start = (block << 32 | u64::from(version)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for (i, word) in (0_u64..).zip(out.chunks_exact_mut(8)) {
        word.copy_from_slice(&start.rotate_left(i as u32 % 64).wrapping_add(i).to_le_bytes());
    }
}
