//! What reads a volume that nobody has mounted: a check and repair of all of it ([`fsck`],
//! [`repair`]), what differs between two states of it ([`diff`]), a copy of it on another device
//! ([`copy`]), and a look at single parts ([`inspect`]).
//!
//! Layers, each uses only those below it:
//!
//! ```text
//! fsck::repair    edits that make a checked volume clean
//! copy            a volume as it is on another device
//! fsck            the check: every key and block against all others
//! diff            what differs between two snapshots, or a snapshot and its volume
//! inspect         shows keys, segments and summaries as they are stored
//! reader          reads blocks of the device
//! ```
//!
//! A scrub also runs on a mounted volume, at the request of its users. So it stays in `ferry-fs`
//! ([`ferry_fs::scrub`]).

pub mod copy;
pub mod diff;
pub mod fsck;
pub mod inspect;
mod reader;
#[cfg(test)]
mod testing;

pub use diff::{Difference, diff};
pub use fsck::{Code, FsckOptions, Report, fsck, repair};
