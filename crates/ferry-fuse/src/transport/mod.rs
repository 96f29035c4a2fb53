//! Transports: they bring the kernel's requests and send the answers.

pub(crate) mod buffer;
pub(crate) mod dev;
pub(crate) mod memory;
mod placement;
mod reads;
pub(crate) mod uring;
