//! Makes many files durable at a time.
//!
//! On FerryFS up to 2,000 open files become durable as one commit, by one ioctl
//! (`docs/bulk-sync.md`). On any other file system, and for directories, many fsyncs are in flight
//! at a time. The library finds out once for each mounted file system whether it is FerryFS. If
//! FerryFS does not report a file as durable, an fsync of its own descriptor decides.
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! let files = ["a", "b"].map(|name| std::fs::File::create(name).map(|file| (name, file)));
//! let files = files.into_iter().collect::<Result<Vec<_>, _>>()?;
//! for (name, result) in ferry_sync::sync_files(files, &ferry_sync::Options::default()) {
//!     if let Err(error) = result {
//!         eprintln!("{name}: {error}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The modules are layers; each uses only those below it:
//!
//! ```text
//! ffi              the library for C (include/ferry_sync.h)
//! engine           decides how each file is synced; bounds the open files
//! bulk   lane      batches on FerryFS;  one fsync a file elsewhere
//!        ring  pool    its backends: io_uring, threads
//! paths  sys       opens files and walks trees;  system calls
//! ```

mod bulk;
mod engine;
mod ffi;
mod lane;
mod paths;
mod pool;
mod ring;
mod sys;

pub use paths::{Paths, paths};
#[doc(hidden)]
pub use sys::release_at_least;
pub use sys::{BULK_FILES_MAX, SYNC_FILES};

use std::io;
use std::os::fd::AsFd;
use std::thread::{Builder, JoinHandle};

/// Fsyncs in flight by default: more gained nothing on the disks measured (`docs/performance.md`).
pub const JOBS: usize = 256;
/// The most fsyncs in flight: each has a kernel thread.
pub const JOBS_MAX: usize = 4096;

/// How files are synced.
#[derive(Clone, Debug)]
pub struct Options {
    /// As fdatasync(2): timestamps need not become durable.
    pub data_only: bool,
    /// Fsyncs in flight at a time, for files that are synced one by one.
    pub jobs: usize,
    /// The most descriptors open at a time. By default three quarters of what the process may open.
    pub open_files: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { data_only: false, jobs: JOBS, open_files: sys::open_files_limit() / 4 * 3 }
    }
}

/// How many files were synced, and how many were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Files that are durable.
    pub synced: u64,
    /// Files that are not known to be durable.
    pub failed: u64,
}

/// Makes open files durable; returns when they are. Each file has a name that the caller chooses,
/// and is answered under that name, in any order. A file is dropped when it is answered.
pub fn sync_files<T, F>(
    files: impl IntoIterator<Item = (T, F)>,
    options: &Options,
) -> Vec<(T, io::Result<()>)>
where
    F: AsFd + Send,
{
    let mut results = Vec::new();
    let files = files.into_iter().map(|(name, file)| (name, Ok(file)));
    sync_each(files, options, |name, result| results.push((name, result)));
    results
}

/// As [`sync_files`], for any number of files in bounded memory: calls `done` with each file's
/// result, on the calling thread. The iterator opens each file when its turn comes; a file that it
/// could not open is answered with that error.
pub fn sync_each<T, F>(
    files: impl IntoIterator<Item = (T, io::Result<F>)>,
    options: &Options,
    done: impl FnMut(T, io::Result<()>),
) -> Summary
where
    F: AsFd + Send,
{
    engine::run(files.into_iter(), options, done)
}

/// As [`sync_each`], without waiting: starts one thread, which calls `done` for each file and ends
/// after the last.
pub fn start<T, F, I>(
    files: I,
    options: Options,
    done: impl FnMut(T, io::Result<()>) + Send + 'static,
) -> io::Result<JoinHandle<Summary>>
where
    F: AsFd + Send,
    I: IntoIterator<Item = (T, io::Result<F>)> + Send + 'static,
{
    Builder::new().name("ferry-sync".into()).spawn(move || sync_each(files, &options, done))
}
