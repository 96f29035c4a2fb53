//! From an operation to the file system and back. Everything that a client says is checked here,
//! before the file system sees it. Each part uses those below it:
//!
//! ```text
//! change   replay   answer
//!    │        │        │
//!   make ─────┘     caching
//!    │                 │
//!  claims   bounds   rights
//!    └────────┴──┬─────┘
//!             applying
//! ```

mod answer;
mod applying;
mod bounds;
mod caching;
mod change;
mod claims;
mod make;
mod replay;
mod rights;

pub(super) use answer::Asked;
pub(super) use applying::{Applying, Respond};
pub(super) use rights::may_search;
