//! Devices made of several: `linear` puts them one behind the other, `stripe` takes turns, `mirror` keeps a copy on each.
//!
//! Every component begins with a head of its own ([`header`]) that says which set it belongs to and as what; the composite's
//! bytes are behind it. A small text file, the volume's descriptor ([`descriptor`]), lists where the components are.
//! [`CompositeVolume`] ties these together; [`SpanDevice`] and [`MirrorDevice`] know nothing of paths.
//!
//! A flush of a composite goes to those components alone that were written since their last one, to all of these at the same
//! time, and nothing on that way takes a lock that all callers share: the counters of each component say what it needs.

mod component;
mod descriptor;
mod error;
mod gather;
mod header;
mod layout;
mod mirror;
mod span;
mod volume;

pub use component::{ComponentState, ComponentStats};
pub use error::CompositeError;
pub use header::{ComponentHeader, HEAD_LEN, Kind, SIDES_MAX};
pub use layout::STRIPE_CHUNK;
pub use mirror::{MirrorDevice, Observer, Side};
pub use span::SpanDevice;
pub use volume::{CompositeOptions, CompositeVolume};

/// Most components of a set; one bit of a word stands for each.
pub const COMPONENTS_MAX: usize = 32;

/// The numbers of the bits that are set.
fn bits(mask: u64) -> impl Iterator<Item = usize> {
    (0..u64::BITS as usize).filter(move |i| mask & (1 << i) != 0)
}
