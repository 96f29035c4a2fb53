//! The synchronisation primitives of code that is model-checked: `tests/space_model.rs` compiles
//! `log/space` against shuttle's versions of the same names.

pub use std::sync::atomic::{AtomicU64, Ordering};
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};
