//! What each snapshot must hold, and whether it must be there.

use super::history::Image;
use std::collections::BTreeMap;

struct Expected {
    image: Image,
    /// Its owner was told that it is durable, in the store.
    certain: bool,
    /// An owner has begun to delete it.
    ends: bool,
}

/// All snapshots of a run, by name.
#[derive(Default)]
pub(super) struct Snapshots {
    all: BTreeMap<String, Expected>,
    reads: u64,
}

impl Snapshots {
    /// An owner begins to make a snapshot of this image. Returns its name.
    pub fn begins(&mut self, image: Image) -> String {
        let name = format!("snapshot-{}", self.all.len());
        self.all.insert(name.clone(), Expected { image, certain: false, ends: false });
        name
    }

    /// The owner was told that the snapshot is there. `certain`: in the store, too.
    pub fn made(&mut self, name: &str, certain: bool) {
        self.get(name).certain = certain;
    }

    /// An owner begins to delete it.
    pub fn ends(&mut self, name: &str) {
        self.get(name).ends = true;
    }

    fn get(&mut self, name: &str) -> &mut Expected {
        self.all.get_mut(name).expect("only names that were begun are there")
    }

    /// What it must hold.
    pub fn image(&self, name: &str) -> Image {
        self.all[name].image
    }

    /// Those that must be there.
    pub fn certain(&self) -> Vec<String> {
        let certain = self.all.iter().filter(|(_, expected)| expected.certain && !expected.ends);
        certain.map(|(name, _)| name.clone()).collect()
    }

    /// It was read, or could not be.
    pub fn read(&mut self, name: &str, found: Result<Vec<u64>, String>) -> Result<(), String> {
        let expected = self.get(name);
        match found {
            Ok(found) if found == expected.image => {
                self.reads += 1;
                Ok(())
            }
            Ok(found) => Err(format!("holds {found:?} and not {:?}", expected.image)),
            Err(error) if expected.certain && !expected.ends => {
                Err(format!("cannot be read: {error}"))
            }
            Err(_) => Ok(()),
        }
    }

    /// How many were read as a whole, and how many were deleted.
    pub fn counts(&self) -> (u64, u64) {
        (self.reads, self.all.values().filter(|expected| expected.ends).count() as u64)
    }
}
