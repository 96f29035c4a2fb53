//! Contents of files: reading, writing, truncation, fallocate.

pub(crate) mod ahead;
pub(crate) mod fallocate;
pub(crate) mod miss;
pub(crate) mod plan;
pub(crate) mod read;
pub(crate) mod resize;
pub(crate) mod share;
pub(crate) mod start;
pub(crate) mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod write;
