//! A volume in an object store: a block device that is a log of objects.
//!
//! The store holds everything. Each object is written once and never changes. What was written since
//! the last flush is one log object and the data objects that it names; the longest prefix of the log
//! without a gap is what is durable, and nothing else has to be written to commit it. `docs/format.md`
//! describes the objects.
//!
//! The modules form layers. Each uses those below it and none above:
//!
//! ```text
//! device     ObjectDevice; roots: its roots, and what is deleted; state: what it knows
//! volume     making a volume, claiming it, fencing its owner off
//! access     requests that are repeated until they are answered
//! batch      changes in memory, and the objects made of them
//! format     the objects, byte by byte        runs       runs of blocks with a value
//! dir        DirStore                          executor   Executor, ThreadExecutor
//! store      Store                             error      ObjectError
//! ```

mod access;
mod batch;
mod device;
mod dir;
mod error;
mod executor;
mod format;
mod roots;
mod runs;
mod state;
mod store;
mod volume;

pub use device::{Limits, ObjectDevice, ObjectStats};
pub use dir::{DirLock, DirStore};
pub use error::ObjectError;
pub use executor::{Answer, Executor, Job, ThreadExecutor, Upload};
pub use format::Owner;
pub use store::Store;
pub use volume::{Claimant, VolumeOptions, WINDOW_DEFAULT};
