//! A client's session: what it knows and has open, and the ordered stream.
//!
//! Rules, each with a test in `tests/`:
//! * SESSION-1: the server applies changes in the order of their numbers, one at a time, each once.
//!   A new connection begins with the answers that the client has not confirmed. A number that
//!   comes again is not applied again. A number that leaves a gap, or whose answer the client has
//!   confirmed, ends the session.
//! * SESSION-2: the server keeps an answer until the client confirms it. The client may have no
//!   more than `WINDOW_OPS` changes without answer.
//! * SESSION-3: a session outlives its connections. Only the newest connection counts: what still
//!   arrives on an older one changes nothing and takes no lock, because the client sends it again
//!   on the newer one.
//! * SESSION-4: the file system counts one lookup for each inode that a session knows, however many
//!   answers named it.
//! * SESSION-5: an early-acknowledged change that fails ends its epoch: the server applies nothing
//!   behind it in that epoch.
//! * SESSION-6: before a session may acknowledge early, the server records it on the volume. From
//!   then on each of its changes leaves its number there. So a server that takes the place of one
//!   that crashed knows which sessions to wait for, and which changes are there already. A session
//!   that comes back has its old number, and its changes go on counting.
//!
//! `phase` has the picture of a session's life. The parts, each using those below it:
//!
//! ```text
//! report   replay   stream   durable   inodes   lock_holder   ahead
//!                     └────────┴──┬───────┘
//!                               link
//!                                 │
//!                               state
//!                             ┌───┴───┐
//!                           phase   change
//! ```

mod ahead;
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
