//! The messages between client and server, and the facts of each operation.

mod info;
mod types;

pub(crate) use info::{
    Behind, Check, Cost, Effect, Info, Makes, Naming, Replay, Stream, Use, opens_for_writing,
};
pub use types::*;
