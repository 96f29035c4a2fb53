//! Several machines on one volume: [`Server`] gives a file system to clients, [`RemoteFs`] is that
//! file system at a client.
//!
//! Where to start reading: `docs/protocol.md`, then `message` (what travels), `message/info.rs`
//! (the facts of each operation), `server/session/mod.rs` (the rules), `client/link.rs`.

mod address;
mod client;
mod codec;
mod error;
mod frame;
mod lanes;
mod limits;
mod lock_range;
mod message;
mod refusal;
mod rt;
mod server;
#[cfg(test)]
mod tests;
mod tls;

pub use address::Address;
pub use client::{ClientOptions, Connecting, Connector, RemoteFs};
pub use error::NetError;
pub use frame::Stream;
pub use limits::{Export, IdSet, Limits, Terms};
pub use message::VERSION;
pub use server::{Control, Server, ServerOptions, panic_is_answered};
pub use tls::{ClientTls, ServerTls, TcpConnector, authority};
