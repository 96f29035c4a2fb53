//! What reads a volume that nobody has mounted: a check and repair of all of it ([`fsck`],
//! [`repair`]), and a look at single parts ([`inspect`]).
//!
//! Layers, each uses only those below it:
//!
//! ```text
//! fsck::repair    edits that make a checked volume clean
//! fsck            the check: every key and block against all others
//! inspect         shows keys, segments and summaries as they are stored
//! ```
//!
//! A scrub also runs on a mounted volume, at the request of its users. So it stays in `ferry-fs`
//! ([`ferry_fs::scrub`]).

pub mod fsck;
pub mod inspect;

pub use fsck::{Code, FsckOptions, Report, fsck, repair};
