//! FerryFS in process: a program opens a volume itself, without a mount and without the kernel.
//!
//! ```
//! use ferry::{Options, Volume};
//!
//! # fn main() -> std::io::Result<()> {
//! # let dir = std::env::temp_dir().join(format!("ferry-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir)?;
//! # let path = dir.join("volume");
//! let volume = Volume::make(&path, 256 << 20, &Options::default())?;
//! volume.mkdir("/mail", 0o755)?;
//! let file = volume.create("/mail/1", 0o644)?;
//! file.append(b"hello ")?;
//! file.append(b"world")?;
//! file.sync()?; // durable from here on, with its name
//!
//! let mut word = [0; 5];
//! assert_eq!(file.read_at(&mut word, 6)?, 5);
//! assert_eq!(&word, b"world");
//! volume.rename("/mail/1", "/mail/2")?;
//! assert_eq!(volume.metadata("/mail/2")?.size, 11);
//! drop(file);
//! volume.close()?;
//! # std::fs::remove_dir_all(&dir)
//! # }
//! ```
//!
//! The guarantees are those of a mount with `cache=strict` (`docs/semantics.md`): a read sees all
//! of a write up to 1 MiB or nothing of it, appends of any length never mix, `sync` makes a file
//! durable with its name. A volume is open in one process at a time: opening a mounted volume
//! fails.
//!
//! Paths begin at the volume's root; symbolic links in them are not followed. The program that has
//! the volume open may do everything: owners and permission bits are stored, and not checked.
//!
//! The command `ferry` is in this crate, too: `command` runs it, `volume` is the library, and all
//! other modules serve the command.

mod asked;
mod backup;
mod bdi;
mod cache_size;
mod cert;
mod cli;
mod clients;
mod clone;
#[doc(hidden)]
pub mod command;
mod control;
mod copy;
mod daemon;
mod dashboard;
mod debug;
mod diff;
mod doctor;
mod error;
mod execute;
mod flame;
mod fsck;
mod go_on;
mod held;
mod helper;
mod hold;
mod holder;
mod http;
mod list;
mod listen;
mod location;
mod logging;
mod metrics;
mod mkfs;
mod mount;
mod mounts;
mod named;
mod object;
mod open;
mod options;
mod pages;
mod passphrase;
mod profile;
mod profiled;
mod rekey;
mod remote;
mod replace;
mod replica;
mod resize;
mod rollback;
mod schedule;
mod scrub;
mod serve;
mod served;
mod service;
mod sharing;
mod size;
mod snapfile;
mod snappath;
mod snapshot;
mod socket;
mod space;
mod spaced;
mod starter;
mod stats;
mod sync;
mod table;
mod top;
mod trace;
mod traced;
mod umount;
mod upgrade;
mod uring;
mod utab;
mod volume;
mod waiting;
mod warm;

pub use ferry_fs::Attr as Metadata;
pub use ferry_fs::{At, FlushPolicy, FsOptions as Options};
pub use volume::{File, Volume};
