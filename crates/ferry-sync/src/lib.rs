//! Makes many files durable at a time.
//!
//! On FerryFS up to 2,000 open files become durable as one commit, by one ioctl (`docs/bulk-sync.md`). On any other file
//! system, and for directories, many fsyncs are in flight at a time. Which way a file goes is found out once for each
//! mounted file system; a file that FerryFS does not answer for is settled by fsync on its own descriptor.
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
//! Where to start reading: `engine` decides who goes which way, `bulk` is FerryFS's, `lane` everybody else's; `paths` opens and
//! walks; `ffi` is the library for C (`include/ferry_sync.h`).

mod bulk;
mod engine;
mod ffi;
mod lane;
mod paths;
mod pool;
mod ring;
mod sys;

pub use paths::{Paths, paths};
pub use sys::{BULK_FILES_MAX, SYNC_FILES};

use std::io;
use std::os::fd::AsFd;
use std::thread::{Builder, JoinHandle};

/// Fsyncs in flight by default: measured, more gain nothing on the disks tried (`docs/performance.md`).
pub const JOBS: usize = 256;
/// Fsyncs in flight, at most: each has a kernel thread.
pub const JOBS_MAX: usize = 4096;

/// How to sync.
#[derive(Clone, Debug)]
pub struct Options {
    /// As fdatasync(2): times may be left out.
    pub data_only: bool,
    /// Fsyncs in flight at a time, where files are synced one by one.
    pub jobs: usize,
    /// Descriptors held at a time, at most. By default three quarters of what the process may open.
    pub open_files: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { data_only: false, jobs: JOBS, open_files: sys::open_files_limit() / 4 * 3 }
    }
}

/// What became of all files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Durable.
    pub synced: u64,
    /// Not known to be durable.
    pub failed: u64,
}

/// Makes open files durable and waits for it. Each comes with a name of the caller's choice, and is answered under that name, in any
/// order. A file is dropped when it is answered.
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

/// The same for any number of files, in bounded memory: `done` is called with each file's result, on this thread. The iterator opens
/// files as they are asked for; one that it could not open is answered with its error.
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

/// The same without waiting: on one thread of its own for all the files, which calls `done` for each. The thread ends after the last.
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
