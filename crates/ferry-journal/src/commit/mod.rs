//! Group commit: contexts collect changes, a policy says when one is sealed, the pipeline carries
//! it to durability. Nothing here does I/O: `engine` does.

pub mod context;
pub mod pipeline;
pub mod policy;
pub mod stats;
