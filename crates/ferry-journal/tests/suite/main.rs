//! The journal on devices in memory and simulated ones: one program, which is built once.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

mod ahead;
mod basic;
mod common;
mod crash;
mod damage;
mod durable_point;
mod failure;
mod full_home;
mod home_damage;
mod home_search;
mod renew;
mod tail;
mod threads;
mod unreadable;
mod verify;
mod view;
