//! The errors of the command, each as one line that says what to do; and the exit codes.

use std::io;
use std::path::PathBuf;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    /// A file or directory could not be used.
    #[error("{}: {what}: {source}", path.display())]
    Path {
        /// The path of the file.
        path: PathBuf,
        /// What could not be done.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No FerryFS is mounted there.
    #[error("{}: no FerryFS is mounted here; `findmnt -t fuse.ferry` lists those that are", .0.display())]
    NotMounted(PathBuf),
    /// A process has files open there.
    #[error("{}: busy: a process works in it (`fuser -vm` shows which); --lazy detaches it now, --force ends it at once", .0.display())]
    Busy(PathBuf),
    /// Any other failure; the message is complete.
    #[error("{0}")]
    Failed(String),
    /// The volume could not be checked (fsck, scrub).
    #[error("could not check the volume: {0}")]
    CouldNotCheck(String),
    /// The volume could not be read (debug).
    #[error("could not read the volume: {0}")]
    CouldNotRead(String),
    /// Two states of a volume could not be compared (diff); the message is complete.
    #[error("{0}")]
    CouldNotCompare(String),
    /// The daemon that was started has already printed why it ended.
    #[error("the daemon did not start")]
    Daemon,
}

impl CliError {
    /// `map_err` for an operation on a path.
    pub fn path(path: impl Into<PathBuf>, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Path { path, what, source }
    }

    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::CouldNotCompare(_) => 2,
            Self::CouldNotCheck(_) | Self::CouldNotRead(_) => 8,
            _ => 1,
        }
    }
}
