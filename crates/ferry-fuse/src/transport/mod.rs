//! How requests arrive and answers leave.

pub(crate) mod buffer;
pub(crate) mod dev;
pub(crate) mod uring;
