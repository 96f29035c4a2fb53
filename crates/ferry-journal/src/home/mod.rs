//! The home store: a redb database whose file is made of segments of the volume.
//!
//! It is always consistent as of its own checkpoint: one redb transaction brings the changes, the
//! number of the newest context among them, and where the log continues from there.
//!
//! Each module uses only modules below it:
//!
//! ```text
//! store      the open store            compaction   a smaller store in its place
//! view  batches  salvage  search       reading it, filling a new one, reading past damage
//! database                             how redb is called
//! file/                                the database's file, made of units
//! blocks  blocks::verify  links        blocks in two copies; checksums of pages
//! read_ahead  write_buffer  map  tree  what is in memory; the map of units; redb's trees
//! unit  segments  shape  state         layouts
//! tables  guard
//! ```

mod batches;
mod blocks;
mod compaction;
mod database;
mod file;
pub mod guard;
mod links;
pub mod map;
mod read_ahead;
mod salvage;
mod search;
mod segments;
mod shape;
mod state;
mod store;
mod tables;
#[cfg(test)]
mod tests;
mod tree;
mod unit;
mod view;
mod write_buffer;

pub use batches::Batches;
pub use compaction::Renewal;
pub use file::verify::Suspect;
pub use file::{HomeFile, Opening};
pub use salvage::{Found, Salvage};
pub use search::{Search, Weight};
pub use segments::unit_bytes;
pub use state::HomeState;
pub use store::Home;
pub use tree::{PageSource, Tree};
pub use view::{HomeEntry, HomeView};
