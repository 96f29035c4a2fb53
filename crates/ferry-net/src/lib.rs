//! Several machines on one volume: [`Server`] gives a file system to clients, [`RemoteFs`] is that
//! file system at a client.
//!
//! Layers; each uses those below it:
//!
//! ```text
//!  client/   server/    neither uses the other
//!  transport/           addresses, TLS, connections
//!  limits               who may do what; what certificates say
//!  wire/                messages, the facts of operations, frames
//!  lock_range refusal   rules that both sides apply
//!  rt   error           time, threads and locks, which a simulation replaces; errors
//! ```
//!
//! Where to start reading: `docs/protocol.md`, then `wire/message/types.rs` (what travels),
//! `wire/message/info.rs` (the facts of each operation), `server/session/mod.rs` (the rules),
//! `client/mod.rs` and `client/change.rs` (the other side).

mod client;
mod error;
mod limits;
mod lock_range;
mod refusal;
mod rt;
mod server;
#[cfg(test)]
mod tests;
mod transport;
mod wire;

// Short paths for both sides.
pub(crate) use transport::{address, tls};
pub(crate) use wire::{codec, frame, lanes, message, protocol};

pub use address::{Address, Host};
pub use client::{Carried, ClientOptions, Noted, Notes, RemoteFs};
pub use error::NetError;
pub use frame::Stream;
pub use limits::{Export, IdSet, Limits, Terms};
pub use message::VERSION;
pub use server::{Bound, Control, Server, ServerOptions, panic_is_answered};
pub use tls::{ClientTls, ServerTls, TcpConnector, authority, ends_soon, renewal};
pub use transport::{Connecting, Connector};
