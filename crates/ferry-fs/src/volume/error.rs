//! Why a volume cannot be made or opened.

use crate::error::FsError;
use crate::volume::version::FORMAT_VERSION;
use ferry_journal::JournalError;
use std::io;

/// Why a volume could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The device failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The device's own error.
        source: io::Error,
    },
    /// Nothing but zeros where a superblock should be.
    #[error("there is no FerryFS volume here (it is empty): make one with `ferry mkfs`")]
    Empty,
    /// Something else is stored here.
    #[error("this is not a FerryFS volume, or its superblocks are gone: it holds other data")]
    Foreign,
    /// `ferry copy` has not ended here.
    #[error(
        "a copy that has not ended: run `ferry copy` again, which goes on where it was, or remove it"
    )]
    Unfinished,
    /// The superblocks in front are gone, the last one is there.
    #[error(
        "the superblocks in front of the volume {name} are gone, the one at its end is whole: run `ferry fsck --repair`"
    )]
    LastCopy {
        /// Its label, or its id.
        name: String,
    },
    /// Not even the superblocks would fit.
    #[error("this is not a FerryFS volume: it is too short to be one (`ferry mkfs` makes volumes)")]
    TooShort,
    /// A volume is here already.
    #[error(
        "there is a FerryFS volume here already ({label}): `ferry mkfs --force` would overwrite it"
    )]
    Exists {
        /// Its label, or its id.
        label: String,
    },
    /// It is not as it was when its mount was left.
    #[error("others have changed the volume since the mount was left (context {was}, now {is})")]
    Changed {
        /// The newest context then.
        was: u64,
        /// The newest context now.
        is: u64,
    },
    /// Written by a version that stores things differently.
    #[error(
        "this volume has format version {found}, this program reads version {FORMAT_VERSION}: {}",
        advice(*found)
    )]
    Version {
        /// The volume's format version.
        found: u32,
    },
    /// It uses features that this version does not know.
    #[error(
        "this volume uses features that this program does not know (bits {bits:#x}): use a newer program"
    )]
    Features {
        /// The unknown incompatible feature bits.
        bits: u64,
    },
    /// All superblocks are damaged.
    #[error("all superblocks of this volume are damaged: {detail}")]
    Damaged {
        /// What is wrong.
        detail: String,
    },
    /// The device lost its end.
    #[error(
        "the volume is {expected} bytes long, but only {found} are there: it was cut off; bring back the rest, or a backup"
    )]
    Truncated {
        /// Bytes that the superblock says.
        expected: u64,
        /// Bytes of the device.
        found: u64,
    },
    /// What was asked for is not possible.
    #[error("{0}")]
    Option(String),
    /// The log or the home store is damaged where it matters for a mount.
    #[error("{0}: run `ferry fsck --repair`; `ferry mount -o ro` may show what is readable")]
    NeedsRepair(JournalError),
    /// What has to be known for a mount or a repair cannot be read.
    #[error(
        "{0}: try again, the next time the device may read it; else copy the volume to another disk; `ferry mount -o ro` may show what is readable, `ferry fsck --repair --give-up-unreadable` does without what cannot be read"
    )]
    Unreadable(JournalError),
    /// The caller ended it.
    #[error("stopped")]
    Stopped,
    /// The journal could not be made or opened.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The file system on it could not be read.
    #[error(transparent)]
    Fs(#[from] FsError),
}

/// Which program reads a volume of a format that this one does not know.
fn advice(found: u32) -> &'static str {
    if found > FORMAT_VERSION {
        "use a newer FerryFS, as the one that made it"
    } else {
        "use the older FerryFS that made it, and copy the files to a new volume"
    }
}
