//! Workloads for benchmarks, and their measurement.
//!
//! # How a workload is written
//!
//! A workload is a module of `workload` with the options of its command line, a function that makes
//! one turn at a [`Target`], and one that makes a [`Bench`] of them:
//!
//! * [`Target`] is where it runs: [`Target::on`] a directory of any mounted file system, or
//!   [`Target::in_process`] on a volume in memory over a [`ModelDevice`](model::ModelDevice), which
//!   takes the times of a [`DeviceModel`] and no processor time. A turn makes a directory of its
//!   own in [`Target::root`], works in it through [`Dir`] and [`File`] from as many threads as it
//!   likes (each thread is a caller of its own, [`threads`] starts them together), and removes it
//!   with [`Dir::remove_tree`].
//! * A turn returns a [`Sample`]: values by the names of [`Metric`]s, the first of which is
//!   compared. [`Counters`] gives what FerryFS itself counted and the processor time between two
//!   moments. A turn that counts rates leaves its beginning out.
//! * [`Bench`] has [`Case`]s of [`Variant`]s. [`Bench::run`] lets the variants of a case have turns
//!   for some rounds, and gives a [`Report`]: every value, medians, ratios to a reference variant
//!   with intervals, as a table, JSON or HTML.
//!
//! The command `ferry bench` (`src/command/`, a program of its own) reads options, runs the bench
//! with a progress bar and shows the report: a workload adds a function there that calls `show`
//! with its bench.
//!
//! ```no_run
//! use ferry_bench::{Bench, BenchError, Case, Metric, Target, Sample, Variant, VolumeOptions, now};
//!
//! fn turn(target: &Target) -> Result<Sample, BenchError> {
//!     let dir = target.root().mkdir("turn")?;
//!     let begin = now();
//!     for n in 0..1000 {
//!         dir.create(&n.to_string())?.write_at(b"hello", 0)?;
//!     }
//!     let rate = 1000.0 / (now() - begin).as_secs_f64();
//!     target.root().remove_tree("turn")?;
//!     Ok(Sample::from([("files_per_s", rate)]))
//! }
//!
//! # fn main() -> Result<(), BenchError> {
//! let volume = Target::in_process(&VolumeOptions::default())?;
//! let targets = [volume, Target::on("/tmp".as_ref(), None)?];
//! let variant = |target| Variant::new(Target::name(target), move |_round| turn(target));
//! let variants = targets.iter().map(variant).collect();
//! let bench = Bench {
//!     workload: "hello",
//!     about: "Makes 1,000 files.".into(),
//!     metrics: vec![Metric { name: "files_per_s", label: "files/s", more_is_better: true }],
//!     options: vec![],
//!     cases: vec![Case::new("create", variants)],
//! };
//! print!("{}", bench.run(5, |_| ())?.to_table());
//! # Ok(())
//! # }
//! ```

mod counters;
mod error;
mod machine;
pub mod model;
pub mod null;
pub mod relay;
mod report;
mod run;
pub mod stats;
mod target;
mod threads;
#[cfg(feature = "command")]
pub mod workload;

pub use counters::{Counters, Spent};
pub use error::BenchError;
pub use machine::Machine;
pub use model::DeviceModel;
pub use run::{
    Bench, CONFIDENCE, Case, CaseReport, Metric, Progress, ROUNDS, Report, Sample, Variant,
    VariantReport,
};
pub use target::{CpuTime, Dir, File, Target, TurnTarget, VolumeOptions};
pub use threads::{now, threads};
