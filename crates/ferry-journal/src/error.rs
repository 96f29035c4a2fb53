//! The one error type of this crate.

use std::sync::Arc;

/// Why the journal could not do it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JournalError {
    /// The device failed.
    #[error("I/O error on {what}: {source}")]
    Io {
        /// Which part of the volume.
        what: &'static str,
        /// The device's own error.
        source: Arc<std::io::Error>,
    },
    /// What is on the device is not what was written.
    #[error("damaged {what} at byte {offset}: {detail}")]
    Damaged {
        /// Which part of the volume.
        what: &'static str,
        /// Where on the device.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// The device cannot read what has to be known.
    #[error("the {what} at byte {offset} is needed, and the device cannot read it: {source}")]
    Unreadable {
        /// Which part of the volume.
        what: &'static str,
        /// Where on the device.
        offset: u64,
        /// The device's own error.
        source: Arc<std::io::Error>,
    },
    /// An earlier failure made the journal read-only.
    #[error("the journal is read-only: {0}")]
    ReadOnly(Arc<str>),
    /// The transaction can never fit the log.
    #[error("a transaction of {asked} bytes exceeds this log's limit of {limit} bytes")]
    TooLarge {
        /// Bytes asked for.
        asked: u64,
        /// The most that one transaction may hold.
        limit: u64,
    },
    /// The home store could not grow.
    #[error("no space left for metadata")]
    NoSpace,
    /// A new home store does not fit the segments given for it.
    #[error("a new home store needs {segments} free segments")]
    HomeNeeds {
        /// So many suffice.
        segments: u32,
    },
    /// The home store failed in a way of its own.
    #[error("home store: {0}")]
    Home(Arc<str>),
    /// The journal was closed.
    #[error("the journal is closed")]
    Closed,
}
