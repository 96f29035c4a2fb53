//! A volume: what is at fixed places of its device, how it is made and how it is recognised.

mod error;
mod mark;
mod mkfs;
mod resize;
mod superblock;
#[cfg(test)]
mod tests;
mod unfinished;
mod version;

pub use crate::volume::error::VolumeError;
pub use crate::volume::mark::{CopyMark, SourceState};
pub use crate::volume::mkfs::{LOG_MIN, MkfsOptions, SIZE_MIN, check_options, mkfs, segments_of};
pub(crate) use crate::volume::resize::{SEGMENTS_MIN, Unfit};
pub(crate) use crate::volume::superblock::{
    LOG_MAX, settle_copies, write_resized, write_superblock, write_timeline,
};
pub use crate::volume::superblock::{
    SUPERBLOCK_OFFSETS, Superblock, find_superblock, may_be_torn, read_superblock,
    read_superblock_copies, rewrite_bad_copies,
};
pub use crate::volume::unfinished::{end_copy, read_copy_mark, write_copy_mark};
pub use crate::volume::version::FORMAT_VERSION;
