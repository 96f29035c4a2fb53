//! Many small files, as fs_mark makes them: made by some threads, and made durable in one of four
//! ways.
//!
//! Two of the ways are part of making the files. The other two are a pass over files that were made
//! before, as a storage application does after a checkpoint. A pass is measured by itself.

use crate::counters::Counters;
use crate::error::BenchError;
use crate::run::{Bench, Case, Metric, Sample, Variant};
use crate::target::{Dir, Target};
use crate::threads::{now, threads};
use clap::ValueEnum;
use ferry::command::shared::parse_bytes;
use std::io;
use std::time::Duration;

/// How files become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SyncMode {
    /// not at all
    None,
    /// fsync before each close
    Each,
    /// after all are made: open, fsync and close, one by one
    Pass,
    /// after all are made: open, and sync many at a time, as `ferry sync`
    #[value(name = "async")]
    AsyncPass,
}

impl SyncMode {
    fn name(self) -> String {
        let value = self.to_possible_value().expect("no way is hidden");
        value.get_name().to_owned()
    }

    fn is_pass(self) -> bool {
        matches!(self, Self::Pass | Self::AsyncPass)
    }
}

const METRICS: [Metric; 6] = [
    Metric { name: "files_per_s", label: "files/s", more_is_better: true },
    Metric { name: "cpu_us_per_file", label: "CPU µs/file", more_is_better: false },
    Metric { name: "flushes_per_file", label: "flushes/file", more_is_better: false },
    Metric { name: "commits_per_file", label: "commits/file", more_is_better: false },
    Metric { name: "made_per_s", label: "made/s before", more_is_better: true },
    Metric { name: "dirty_bytes_per_file", label: "dirty B/file before", more_is_better: true },
];

/// The options of the workload.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Files of a turn
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub files: u32,
    /// Bytes of each file
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "4K")]
    pub size: u64,
    /// Threads, each with a directory of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// Ways to sync; several: each,async
    #[arg(long, value_delimiter = ',', value_name = "WAY", default_value = "none,each,pass,async")]
    pub sync: Vec<SyncMode>,
}

/// Runs on all targets in turn.
pub fn bench<'a>(options: &Options, targets: &'a [Target]) -> Bench<'a> {
    let files = options.files;
    let kinds =
        [(false, format!("make {files} files")), (true, format!("sync {files} files made before"))];
    let cases = kinds.into_iter().filter_map(|(pass, name)| {
        let modes: Vec<_> = options.sync.iter().filter(|mode| mode.is_pass() == pass).collect();
        let variants = targets.iter().flat_map(|target| {
            modes.iter().map(move |mode| {
                let (options, mode) = (options.clone(), **mode);
                Variant::new(format!("{} {}", target.name(), mode.name()), move |_| {
                    turn(target, mode, &options)
                })
            })
        });
        let variants: Vec<_> = variants.collect();
        (!variants.is_empty()).then(|| Case::new(name, variants))
    });
    Bench {
        workload: "fsmark",
        about: "Threads make small files, each thread in a directory of its own. none: not synced; each: fsync before close; pass: \
                after all are made, open, fsync and close, one by one; async: after all are made, many at a time, as ferry sync."
            .into(),
        metrics: METRICS.into(),
        options: vec![
            ("files", files.to_string()),
            ("bytes", options.size.to_string()),
            ("threads", options.threads.to_string()),
        ],
        cases: cases.collect(),
    }
}

fn turn(target: &Target, mode: SyncMode, options: &Options) -> Result<Sample, BenchError> {
    let top = target.root().mkdir("turn")?;
    let dirs: Vec<Dir> = (0..options.threads)
        .map(|thread| top.mkdir(&thread.to_string()))
        .collect::<io::Result<_>>()?;
    target.sync()?;
    // Thread t has file t, t + threads and so on.
    let names = |thread: u32| {
        (thread..options.files)
            .step_by(options.threads.max(1) as usize)
            .map(|file| file.to_string())
    };
    let contents = vec![0x5a_u8; options.size as usize];
    let make = |thread: u32| -> io::Result<()> {
        for name in names(thread) {
            let file = dirs[thread as usize].create(&name)?;
            file.write_at(&contents, 0)?;
            if mode == SyncMode::Each {
                file.sync()?;
            }
        }
        Ok(())
    };
    let one_by_one = |thread: u32| -> io::Result<()> {
        names(thread).try_for_each(|name| dirs[thread as usize].open(&name)?.sync())
    };
    let at_once = |thread: u32| -> io::Result<()> {
        target.sync_files(names(thread).map(|name| dirs[thread as usize].open(&name)))
    };

    let mut before = Counters::of(target)?;
    let mut begin = now();
    threads(options.threads, make)?;
    let made_in = now() - begin;
    let mut sample = Sample::new();
    if mode.is_pass() {
        before = Counters::of(target)?;
        sample.insert("made_per_s", rate(options.files, made_in));
        if let Some(dirty) = before.get("/data/dirty_bytes") {
            sample.insert("dirty_bytes_per_file", dirty / f64::from(options.files));
        }
        begin = now();
        match mode {
            SyncMode::AsyncPass => threads(options.threads, at_once)?,
            _ => threads(options.threads, one_by_one)?,
        };
    }
    let took = now() - begin;
    let spent = Counters::of(target)?.since(&before);
    let per_file = |value: f64| value / f64::from(options.files);
    sample.insert("files_per_s", rate(options.files, took));
    sample.insert("cpu_us_per_file", per_file(spent.cpu_s * 1e6));
    let counted = [("flushes_per_file", spent.flushes), ("commits_per_file", spent.commits)];
    sample.extend(counted.into_iter().filter_map(|(name, value)| Some((name, per_file(value?)))));
    drop((dirs, top));
    target.root().remove_tree("turn")?;
    target.sync()?;
    Ok(sample)
}

fn rate(files: u32, time: Duration) -> f64 {
    f64::from(files) / time.as_secs_f64()
}
