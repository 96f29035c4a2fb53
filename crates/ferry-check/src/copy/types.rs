//! What a copy tells and returns, and why it fails.

use ferry_fs::volume::VolumeError;
use ferry_journal::JournalError;
use std::io;
use std::ops::ControlFlow;

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copying {
    /// Bytes that were copied, those of an earlier attempt among them.
    pub bytes: u64,
    /// Bytes that are to be copied.
    pub bytes_total: u64,
}

/// What a copy did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Bytes that this attempt copied.
    pub bytes: u64,
    /// Bytes of the copy.
    pub bytes_total: u64,
    /// Blocks that this attempt could not read, and that nothing needs: the copy has zeros there.
    pub zeroed: u64,
}

/// How a volume is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// A copy of any state that has not ended begins anew.
    pub restart: bool,
    /// Bytes that a thread reads and writes at once.
    pub chunk_bytes: u64,
    /// After so many bytes the target is flushed, and the mark says so.
    pub leg_bytes: u64,
    /// Bytes of the device whose checksums are in memory at a time, 8 bytes for each block. Each
    /// window costs a look at all extents of the volume.
    pub window_bytes: u64,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self { restart: false, chunk_bytes: 4 << 20, leg_bytes: 128 << 20, window_bytes: 16 << 30 }
    }
}

/// Told how far a copy is; may end it.
pub type Tell<'t> = &'t mut dyn FnMut(Copying) -> ControlFlow<()>;

/// Why a volume was not copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The source is no volume that can be opened.
    #[error("{0}")]
    Source(VolumeError),
    /// The source is damaged: the copy would be, too.
    #[error("the volume is damaged: {first}")]
    SourceDamaged {
        /// The first finding.
        first: String,
    },
    /// The source's device failed.
    #[error("byte {offset} of the volume cannot be read: {source}")]
    SourceRead {
        /// Where on the device.
        offset: u64,
        /// The device's own error.
        source: io::Error,
    },
    /// The source's device failed where no file has data.
    #[error("byte {offset} of the volume, in its log or metadata, cannot be read: {source}")]
    SourceUnread {
        /// Where on the device.
        offset: u64,
        /// The device's own error.
        source: io::Error,
    },
    /// Data in the source is not what was written.
    #[error("byte {offset} of the volume is damaged: the checksum of its block does not match")]
    SourceData {
        /// Where on the device.
        offset: u64,
    },
    /// The target is too short.
    #[error("it has {has} bytes, and the volume needs {needs}")]
    TooSmall {
        /// Bytes of the target.
        has: u64,
        /// Bytes of the volume.
        needs: u64,
    },
    /// Something is on the target.
    #[error("{0}")]
    NotEmpty(VolumeError),
    /// The target has a copy that has not ended, of another volume or another state of this one.
    #[error("a copy that has not ended is here, of another volume or of what this one was before")]
    OtherState,
    /// The target's device failed.
    #[error("cannot {what}: {source}")]
    Target {
        /// What was tried.
        what: &'static str,
        /// The device's own error.
        source: io::Error,
    },
    /// The target does not have what was written to it.
    #[error("the copy is damaged: {what}")]
    TargetDamaged {
        /// What is wrong.
        what: String,
    },
    /// The caller ended it.
    #[error("stopped")]
    Stopped,
}

/// `map_err` for the target's device.
pub(super) fn target(what: &'static str) -> impl FnOnce(io::Error) -> CopyError {
    move |source| CopyError::Target { what, source }
}

impl From<JournalError> for CopyError {
    fn from(error: JournalError) -> Self {
        Self::Source(error.into())
    }
}
