//! How two machines reach each other: addresses, TLS, and what makes connections.

use std::future::Future;
use std::io;
use std::pin::Pin;

use crate::frame::Stream;

pub(crate) mod address;
pub(crate) mod tls;

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send + 'a>>;

/// Makes connections.
pub trait Connector: Send + Sync + 'static {
    /// A new connection to the server.
    fn connect(&self) -> Connecting<'_>;

    /// The next connection is to the same server as the last one.
    fn stay(&self) {}

    /// Whether there are several servers, of which the next connection tries another one.
    fn has_others(&self) -> bool {
        false
    }
}
