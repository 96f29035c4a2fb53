//! Devices: one program, which is built once. A test that starts other processes is in another one:
//! such a process has copies of all open files, and of their locks, for a moment.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod composite;
mod composite_resize;
mod composite_support;
mod composite_volume;
mod coordinator;
mod devices;
mod mirror;
mod mirror_errors;
mod model;
