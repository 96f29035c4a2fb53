//! Keys and values of the file system in the journal's view (`docs/format.md` draws them).
//!
//! All integers of a key are big-endian, so that keys sort by number; those of values are
//! little-endian. Everything that belongs to one inode stands together: its record, its attributes,
//! its names (a directory) or its extents (a file). The first byte of every value is the version of
//! its type.

pub(crate) mod extent;
pub(crate) mod key;
pub(crate) mod records;
#[cfg(test)]
mod tests;

pub use extent::*;
pub use key::*;
pub use records::*;
