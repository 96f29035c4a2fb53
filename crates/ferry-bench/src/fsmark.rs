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
use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::Duration;

/// How files become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMode {
    /// Not at all.
    None,
    /// Each is synced before it is closed.
    Each,
    /// A pass opens, syncs and closes one after the other (each thread its own).
    Pass,
    /// A pass opens them and syncs all, many at a time.
    AsyncPass,
}

impl SyncMode {
    /// All ways.
    pub const ALL: [Self; 4] = [Self::None, Self::Each, Self::Pass, Self::AsyncPass];

    /// The name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Each => "each",
            Self::Pass => "pass",
            Self::AsyncPass => "async",
        }
    }

    fn is_pass(self) -> bool {
        matches!(self, Self::Pass | Self::AsyncPass)
    }
}

impl fmt::Display for SyncMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SyncMode {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == word);
        found.ok_or_else(|| format!("{word:?} is not a way to sync: use none, each, pass or async"))
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
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of files of one turn.
    pub files: u32,
    /// Bytes of each file.
    pub size: usize,
    /// Threads, each with a directory of its own.
    pub threads: u32,
    /// How they become durable.
    pub modes: Vec<SyncMode>,
    /// How often each variant has its turn.
    pub rounds: u32,
}

/// Runs on all targets in turn.
pub fn bench<'a>(options: &Options, targets: &'a [Target]) -> Bench<'a> {
    let files = options.files;
    let kinds =
        [(false, format!("make {files} files")), (true, format!("sync {files} files made before"))];
    let cases = kinds.into_iter().filter_map(|(pass, name)| {
        let modes: Vec<_> = options.modes.iter().filter(|mode| mode.is_pass() == pass).collect();
        let variants = targets.iter().flat_map(|target| {
            modes.iter().map(move |mode| {
                let (options, mode) = (options.clone(), **mode);
                Variant::new(format!("{} {mode}", target.name()), move |_| {
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
        rounds: options.rounds,
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
    let contents = vec![0x5a_u8; options.size];
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
