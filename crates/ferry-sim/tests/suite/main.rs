//! Volumes on simulated devices: one program, which is built once. A test that plants a bug is in
//! another one, because that is planted in the whole process.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

#[path = "../grow_support/mod.rs"]
mod grow_support;

mod copy;
mod crash;
mod full;
mod fuzz_volume;
mod grow;
mod grow_faults;
mod io_errors;
mod mirror;
mod mirror_damage;
mod repair;
mod resize;
mod resize_composite;
