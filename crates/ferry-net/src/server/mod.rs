//! The server: gives a file system to clients.
//!
//! Each line uses what stands below it, and nothing above. `Core` is what all connections share;
//! from there upwards, a module adds methods to it.
//!
//! ```text
//! lifecycle   starts and stops a server      control  what an administrator sees and does
//! listen      accepts connections, TLS
//! connection  one connection: greeting, messages in, answers out
//! changes     the ordered stream: leases, syncs, the barrier     requests  walks
//! entry       how a client gets into a session     recovery  after a crash of the server before
//! apply/      an operation and the file system: bounds, rights, what may be cached
//! ending      how a session ends      formers  how far it had come
//! sync        makes changes durable, and tells the clients
//! core        what all connections share
//! panics      a panic while an operation is answered      sync_queue  what waits for a sync
//! session/    what remains of a client between its connections
//! leases/  locks  reservations  unstable  barrier  exports  capability  admission  refusals
//! ```

mod admission;
mod apply;
mod barrier;
mod capability;
mod changes;
mod connection;
mod control;
mod core;
mod ending;
mod entry;
mod exports;
mod formers;
mod leases;
mod lifecycle;
mod listen;
mod locks;
mod panics;
mod recovery;
mod refusals;
mod requests;
mod reservations;
mod session;
mod sync;
mod sync_queue;
mod unstable;
mod walks;

pub use control::Control;
#[cfg(test)]
pub(crate) use core::WalkTimes;
#[cfg(test)]
pub(crate) use entry::SESSIONS_OF_CERTIFICATE_MAX;
pub use lifecycle::{Server, ServerOptions};
pub use listen::Bound;
pub use panics::panic_is_answered;
