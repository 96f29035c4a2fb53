//! Creates at full speed: threads make files without a pause, while readers read files that were
//! made before. The longest latencies count: checkpoints run repeatedly, and should delay neither
//! creates nor readers.

use crate::counters::Counters;
use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample};
use crate::stats::Histogram;
use crate::target::{Dir, Target, TurnTarget};
use crate::threads::{now, threads};
use crate::workload::numbers::Numbers;
use ferry::command::shared::parse_bytes;
use ferry_env::Entropy;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of files in one directory.
const PER_DIR: u32 = 10_000;

const METRICS: [Metric; 10] = [
    Metric { name: "creates_per_s", label: "creates/s", more_is_better: true },
    Metric { name: "p50_us", label: "p50 µs", more_is_better: false },
    Metric { name: "p99_ms", label: "p99 ms", more_is_better: false },
    Metric { name: "p999_ms", label: "p99.9 ms", more_is_better: false },
    Metric { name: "max_ms", label: "max ms", more_is_better: false },
    Metric { name: "read_p99_ms", label: "read p99 ms", more_is_better: false },
    Metric { name: "read_max_ms", label: "read max ms", more_is_better: false },
    Metric { name: "checkpoints", label: "checkpoints", more_is_better: false },
    Metric { name: "waits", label: "waits for log", more_is_better: false },
    Metric { name: "log_rounds", label: "times round the log", more_is_better: false },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Files of a turn, in directories of 10,000
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub files: u32,
    /// Bytes of each file
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "11")]
    pub size: u64,
    /// Threads that make them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Threads that open and read files which were made before
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub readers: u32,
}

/// Runs on all targets in turn.
pub fn bench<'a>(options: &Options, turn_targets: &'a [TurnTarget]) -> Bench<'a> {
    let variants = turn_targets.iter().map(|target| {
        let options = options.clone();
        target.variant(move |target, _| turn(target, &options))
    });
    Bench {
        workload: "create",
        about:
            "Threads make files without a pause; readers open and read some that were made before."
                .into(),
        metrics: METRICS.into(),
        options: vec![
            ("files", options.files.to_string()),
            ("bytes", options.size.to_string()),
            ("threads", options.threads.to_string()),
            ("readers", options.readers.to_string()),
        ],
        cases: vec![Case::new(format!("create {} files", options.files), variants.collect())],
    }
}

fn turn(target: &Target, options: &Options) -> Result<Sample, BenchError> {
    let top = target.root().mkdir("turn")?;
    let contents = vec![0x5a_u8; options.size as usize];
    let old = top.mkdir("old")?;
    for n in 0..if options.readers > 0 { PER_DIR } else { 0 } {
        old.create(&n.to_string())?.write_at(&contents, 0)?;
    }
    let dirs: Vec<Dir> = (0..options.threads)
        .map(|thread| top.mkdir(&thread.to_string()))
        .collect::<io::Result<_>>()?;
    target.sync()?;

    let making = AtomicU32::new(options.threads);
    let each = options.files / options.threads.max(1);
    let make = |dir: &Dir| -> io::Result<Histogram> {
        let (mut times, mut at) = (Histogram::default(), None);
        for n in 0..each {
            if n.is_multiple_of(PER_DIR) {
                at = Some(dir.mkdir(&n.to_string())?);
            }
            let Some(at) = &at else { continue };
            let begun = now();
            at.create(&n.to_string())?.write_at(&contents, 0)?;
            times.add(now() - begun);
        }
        Ok(times)
    };
    let read = |number: u32| -> io::Result<Histogram> {
        let (mut times, numbers) = (Histogram::default(), Numbers::new(number.into()));
        let mut room = vec![0_u8; options.size as usize];
        while making.load(Ordering::Relaxed) > 0 {
            let name = (numbers.next_u64() % u64::from(PER_DIR)).to_string();
            let begun = now();
            old.open(&name)?.read_at(&mut room, 0)?;
            times.add(now() - begun);
        }
        Ok(times)
    };
    let before = Counters::of(target)?;
    let begun = now();
    let times = threads(options.threads + options.readers, |number| {
        let Some(dir) = dirs.get(number as usize) else { return read(number) };
        let times = make(dir);
        making.fetch_sub(1, Ordering::Relaxed);
        times
    })?;
    let took = (now() - begun).as_secs_f64();
    let after = Counters::of(target)?;
    let (mut makes, mut reads) = (Histogram::default(), Histogram::default());
    for (number, times) in times.iter().enumerate() {
        if number < dirs.len() { makes.merge(times) } else { reads.merge(times) }
    }
    drop((dirs, old, top));
    target.root().remove_tree("turn")?;
    target.sync()?;
    let mut sample = Sample::from([
        ("creates_per_s", makes.count() as f64 / took),
        ("p50_us", makes.quantile_ms(0.5) * 1e3),
        ("p99_ms", makes.quantile_ms(0.99)),
        ("p999_ms", makes.quantile_ms(0.999)),
        ("max_ms", makes.quantile_ms(1.0)),
    ]);
    if reads.count() > 0 {
        sample.extend([
            ("read_p99_ms", reads.quantile_ms(0.99)),
            ("read_max_ms", reads.quantile_ms(1.0)),
        ]);
    }
    let counted = [("checkpoints", "/log/checkpoints"), ("waits", "/log/waits")];
    let grown = counted
        .into_iter()
        .filter_map(|(name, counter)| Some((name, after.grown(&before, counter)?)));
    sample.extend(grown);
    if let (Some(written), Some(log)) =
        (after.grown(&before, "/log/written_bytes"), after.get("/log/bytes"))
    {
        sample.insert("log_rounds", written / log);
    }
    Ok(sample)
}
