//! Contents of files: reading, writing, truncation, fallocate.

pub(crate) mod ahead;
pub(crate) mod fallocate;
pub(crate) mod read;
pub(crate) mod resize;
pub(crate) mod share;
#[cfg(test)]
mod tests;
pub(crate) mod write;
