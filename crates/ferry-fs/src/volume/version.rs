//! The version of the format on the device.

/// The format that this code reads and writes.
pub const FORMAT_VERSION: u32 = 4;
