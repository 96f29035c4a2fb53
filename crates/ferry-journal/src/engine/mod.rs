//! The running journal: [`core::Core`] is what its threads share, the other modules are what they
//! do with it.

mod background;
pub mod checkpoint;
pub mod core;
mod group_commit;
mod hold;
pub mod options;
mod relocate;
mod scan;
mod signals;
