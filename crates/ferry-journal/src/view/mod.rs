//! What readers see: layers of changes above the home store.

pub mod layers;
pub mod salvage;
pub mod snapshot;
