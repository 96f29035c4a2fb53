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
}
