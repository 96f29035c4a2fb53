//! What can go wrong in a benchmark.

use ferry_fs::VolumeError;
use ferry_journal::JournalError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a benchmark came to no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The volume in memory.
    #[error("cannot make a volume in memory: {0}")]
    Volume(#[from] VolumeError),
    /// A request to a device or a file system.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A place that was named on the command line.
    #[error("{}: {what}: {source}", path.display())]
    Path {
        /// The place.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// What was asked for is not possible here.
    #[error("{0}")]
    Option(String),
    /// Whoever started it has ended it.
    #[error("interrupted")]
    Interrupted,
    /// Callers wait and nothing will happen any more.
    #[error("nobody sails any more: {answered} calls were answered at {at:?}")]
    Stuck {
        /// Calls answered until then.
        answered: u64,
        /// Virtual time.
        at: Duration,
    },
}

impl BenchError {
    /// `map_err` for something that was tried at a place.
    pub fn path(path: impl Into<PathBuf>, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Path { path, what, source }
    }
}
