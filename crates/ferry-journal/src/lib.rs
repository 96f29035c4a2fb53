//! The journal: a transactional, crash-consistent, ordered key-value view with a group-committed
//! log.
//!
//! A transaction's changes become visible to every reader at [`Transaction::commit`] and durable,
//! in order, as part of a *context* (a sealed set of changes that recovery applies wholly or not at
//! all). The crate knows nothing of inodes or paths.
//!
//! Each layer uses only layers below it:
//!
//! ```text
//! inspect  rebuild  verify    an unmounted volume record by record; a new home store; scrubbing
//! journal  transaction        what the owner calls
//! engine/                     the running journal: group commit, checkpoints, relocation, scans
//! commit/                     the open context, the flush policy, the pipeline's state, statistics
//! view/                       layers of changes above the home store, snapshots, damage
//! home/                       the home store: redb on segments, every block in two copies
//! log/                        the log: format, ring, records, free space, recovery
//! completion  disk            waiting for I/O; the device and its shared flushes
//! types  error  bytes  histogram
//! ```

mod bytes;
mod commit;
mod completion;
mod disk;
mod engine;
mod error;
mod histogram;
mod home;
pub mod inspect;
mod journal;
mod log;
mod rebuild;
mod sync;
mod transaction;
mod types;
mod verify;
mod view;

pub use commit::policy::{Caller, FlushPolicy};
pub use commit::stats::{FlushStats, JournalStats, StageTimes};
pub use engine::core::smallest_log;
pub use engine::options::{FAST_FLUSH, IN_FLIGHT_MAX, JournalOptions, LogOptions};
pub use error::JournalError;
pub use histogram::TimesStats;
pub use home::guard::panic_is_caught;
pub use home::unit_bytes as home_unit_bytes;
pub use journal::Journal;
pub use log::format;
pub use log::space::SpaceStats;
#[cfg(feature = "compare")]
pub use log::space::{BARGES_MAX, NoGrant, Space, Wake};
pub use log::tail::{LeftLog, TAIL_WORDS, Tail};
pub use rebuild::{FoundState, Rebuilt, read_damaged, rebuild_home};
pub use transaction::Transaction;
pub use types::{
    BadRange, Bystander, Completion, Credits, DataExtent, Geometry, JournalClient, LogDamage,
    Recovered, RequestId, Seq, Step, Value,
};
pub use verify::{bad_map_slot, mend_map_slot};
pub use view::salvage::LostKeys;
