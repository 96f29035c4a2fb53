//! What travels between client and server.
//!
//! ```text
//!  lanes     two priorities of frames on a connection
//!  protocol  the protocols that this release speaks, and how they differ
//!  frame     messages as frames, whole or cut into chunks
//!  message   the messages; `info`: the facts of each operation
//!  codec     values as bytes
//! ```

pub(crate) mod codec;
pub(crate) mod frame;
pub(crate) mod lanes;
pub(crate) mod message;
pub(crate) mod protocol;
