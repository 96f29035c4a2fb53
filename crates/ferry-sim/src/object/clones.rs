//! What each clone must hold.

use super::history::Image;
use super::objects::CLONES;
use ferry_object::CloneName;

/// A clone.
pub(super) struct Expected {
    pub image: Image,
    /// Its maker was told that it is there.
    pub certain: bool,
}

/// All clones of a run, by number.
#[derive(Default)]
pub(super) struct Clones {
    pub all: Vec<Expected>,
    pub reads: u64,
}

impl Clones {
    /// Clones that were made, and that were read as a whole.
    pub fn counts(&self) -> (u64, u64) {
        (self.all.iter().filter(|clone| clone.certain).count() as u64, self.reads)
    }
}

/// How a clone is called.
pub(super) fn name(number: usize) -> String {
    format!("{CLONES}{number}")
}

/// Whether this is no snapshot, but the pin of a clone.
pub(super) fn is_pin(name: &str) -> bool {
    CloneName::parse(name).is_some()
}
