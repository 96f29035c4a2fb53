//! Devices made of several: `linear` puts them one behind the other, `stripe` takes turns, `mirror`
//! keeps a copy on each.
//!
//! Every component begins with a head of its own ([`header`]) that says which set it belongs to and
//! as what; the composite's bytes are behind it. A small text file, the volume's descriptor
//! ([`descriptor`]), lists where the components are. [`CompositeVolume`] ties these together;
//! [`SpanDevice`] and [`MirrorDevice`] know nothing of paths.
//!
//! A flush of a composite goes to those components alone that were written since their last one, to
//! all of these at the same time, and nothing on that way takes a lock that all callers share: the
//! counters of each component say what it needs.

mod component;
mod descriptor;
mod error;
mod gather;
mod header;
mod kind;
mod layout;
mod length;
mod mirror;
mod span;
mod volume;

pub use error::CompositeError;
pub use header::{COMPONENTS_MAX, ComponentHeader, HEAD_LEN, SIDES_MAX, Side};
pub use kind::Kind;
pub use layout::STRIPE_CHUNK;
pub use mirror::{MirrorDevice, Observer};
pub use span::SpanDevice;
pub use volume::{CompositeOptions, CompositeVolume};
