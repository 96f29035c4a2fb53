//! A client's session: what it knows and has open, and the ordered stream.
//!
//! Rules, each with a test in `tests/`:
//! * SESSION-1: changes are applied in the order of their numbers, one at a time, each once. A new
//!   connection begins with the answers that are kept; a number that comes again is not applied
//!   again; one that leaves a gap, or whose answer the client has said to have, ends the session.
//! * SESSION-2: an answer is kept until the client says that it has it; it may have no more than
//!   `WINDOW_OPS` changes without answer.
//! * SESSION-3: a session outlives its connections. The newest connection is the one that counts:
//!   what an older one still brings changes nothing and takes no lock, for the newer one brings it
//!   again.
//! * SESSION-4: the file system counts one lookup for each inode that a session knows, however many
//!   answers named it.
//! * SESSION-6: a session that may promise is entered on the volume first, and from then on each
//!   change leaves its number there, promised or not: so a server that takes the place of one that
//!   crashed knows whom to wait for, and what is there already. The session that comes then has the
//!   old number, and its changes go on counting.
//! * SESSION-5: a promise that cannot be kept ends the series of changes that it belongs to:
//!   nothing of that is made behind it.
//!
//! ```text
//! report   replay   stream   durable   inodes   lock_holder
//!                     └────────┴──┬───────┘
//!                               link
//!                                 │
//!                               state
//!                             ┌───┴───┐
//!                           phase   change
//! ```

mod change;
mod durable;
mod inodes;
mod link;
mod lock_holder;
mod phase;
mod replay;
mod report;
mod state;
mod stream;
#[cfg(test)]
mod tests;

pub(super) use change::{Applied, Change, Line, Open, Room, Violation, one_of};
pub(super) use link::wall;
pub(super) use phase::CloseReason;
pub(super) use state::{Greeting, Mounted, Session, Sessions};
