//! A scrub: reads everything that a volume holds from the device, past every cache, and holds it
//! against its checksums.
//!
//! It runs on a mounted volume while everything goes on ([`live`]), or on one that nobody has
//! mounted. Keys are scanned piece by piece; the blocks that the extents of a piece name are read
//! in the order of the device (`walk`). What does not match is damage only if the file still has it
//! there: a segment may be cleaned and filled anew while the scrub is on its way. Memory is bounded
//! by the piece, speed by [`ScrubOptions::rate`].

mod decode;
pub(crate) mod live;
mod pace;
mod paths;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod source;
mod walk;

pub use live::{ScrubState, ScrubStatus};
pub use report::{DAMAGE_MAX, Damage, Location, Part, ScrubReport, Verified};
pub use run::scrub;
pub use source::{ScrubOptions, ScrubProgress, Watch};
