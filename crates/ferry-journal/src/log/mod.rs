//! The log on the device.
//!
//! `format` is what lies there, `ring` where, `record` turns changes into bytes and back, `space`
//! counts what is free. `reader` reads records, `recovery` follows them after a crash, `settle`
//! makes durable what recovery found. `tail` is what the log does not have yet, and `take` writes
//! it there.

pub mod format;
pub mod reader;
pub mod record;
pub mod recovery;
pub mod ring;
pub mod settle;
pub mod space;
pub mod tail;
pub mod take;
