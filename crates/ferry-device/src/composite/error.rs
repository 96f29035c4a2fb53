//! Why a composite could not be made or opened.

use super::kind::Kind;
use crate::error::DeviceError;
use std::io;
use std::path::PathBuf;

/// Why a composite could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum CompositeError {
    /// A component, or the descriptor itself, could not be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Not a descriptor, or one that makes no sense.
    #[error("{}: {detail}", path.display())]
    Descriptor {
        /// Path of the descriptor.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// What was asked for is not possible.
    #[error("{0}")]
    Option(String),
    /// Something else is stored there.
    #[error("{}: it holds data, which is left alone (`ferry mkfs --force` would overwrite it)", .0.display())]
    Foreign(PathBuf),
    /// Only a mirror has sides.
    #[error("not a mirror: only a mirror's side can be replaced")]
    NoMirror,
    /// The descriptor lists no such side.
    #[error("{}: not a side of this mirror (the volume's file lists them)", .0.display())]
    NoSide(PathBuf),
    /// One side is being rebuilt already.
    #[error("a side is being rebuilt already")]
    Rebuilding,
    /// This volume has it open itself.
    #[error("{}: in use by this very volume", .0.display())]
    OwnPart(PathBuf),
    /// A component of some set, used as if it were a volume.
    #[error("{}: this is one component of a composite volume: use the volume's own file, which lists all of them", .0.display())]
    OneComponent(PathBuf),
    /// A linear or striped volume needs all of its components.
    #[error("a {kind} volume needs all of its components; missing: {}", names.join(", "))]
    Missing {
        /// What kind of set.
        kind: Kind,
        /// The names of those that are missing, each with the reason.
        names: Vec<String>,
    },
    /// No side has all that was written.
    #[error(
        "only stale sides of the mirror are here (newest generation {found}, the mirror went on to {expected}): \
         bring back a side that was in use last"
    )]
    Stale {
        /// Newest generation among the sides that are here.
        found: u64,
        /// Newest generation known of.
        expected: u64,
    },
    /// Sides that each went on without the other.
    #[error(
        "the mirror's sides have been used apart from each other (generation {0}): take the wrong ones off the list"
    )]
    Diverged(u64),
    /// The same component under two names.
    #[error("{first} and {second} are the same component")]
    Twice {
        /// One name of the component.
        first: String,
        /// Its other name.
        second: String,
    },
    /// A call to the device failed.
    #[error("cannot {what} {name}: {source}")]
    Io {
        /// What was attempted, as an infinitive.
        what: &'static str,
        /// On which component or file.
        name: String,
        /// The error of the device or of the host.
        source: io::Error,
    },
}
