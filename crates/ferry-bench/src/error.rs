//! The errors of a benchmark.

use ferry_fs::VolumeError;
use ferry_journal::JournalError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a benchmark has no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The journal failed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The volume in memory failed.
    #[error("cannot make a volume in memory: {0}")]
    Volume(#[from] VolumeError),
    /// A request to a device or a file system failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A path of the command line cannot be used.
    #[error("{}: {what}: {source}", path.display())]
    Path {
        /// The path of the target.
        path: PathBuf,
        /// What could not be done.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The options are not possible here.
    #[error("{0}")]
    Option(String),
    /// The user has interrupted it.
    #[error("interrupted")]
    Interrupted,
    /// Callers wait, and no event is left that would wake them.
    #[error(
        "every caller waits and no event is planned: {answered} calls were answered at {at:?}; this is a bug of the simulated bench"
    )]
    Stuck {
        /// The calls answered until then.
        answered: u64,
        /// The virtual time of the standstill.
        at: Duration,
    },
}

impl BenchError {
    /// `map_err` for an operation on a path.
    pub fn path(path: impl Into<PathBuf>, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Path { path, what, source }
    }
}
