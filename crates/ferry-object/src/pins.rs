//! Pins, as users see them: snapshots.

use crate::error::ObjectError;
use crate::format::{Id, Pin};
use ferry_device::Snapshot;
use std::fmt;

/// Bytes of a snapshot's name, at most.
pub(crate) const NAME_MAX: usize = 255;

/// The snapshots of these pins.
pub(crate) fn for_people(pins: &[Pin]) -> Vec<Snapshot> {
    let snapshot = |pin: &Pin| Snapshot { name: pin.name.clone(), made_secs: pin.made_secs };
    pins.iter().map(snapshot).collect()
}

/// The snapshots that people have made, in ascending order: the numbers of their roots, and their
/// names. The pin of a clone has the root of the snapshot that it was made of.
pub(crate) fn numbered(pins: &[Pin]) -> impl Iterator<Item = (u64, &str)> {
    let made = pins.iter().filter(|pin| CloneName::parse(&pin.name).is_none());
    made.map(|pin| (pin.root, &*pin.name))
}

/// The error for a name that no snapshot has.
pub(crate) fn no_snapshot(name: &str, pins: &[Pin]) -> ObjectError {
    let names = pins.iter().map(|pin| pin.name.clone()).collect();
    ObjectError::NoSnapshot { name: name.into(), names }
}

/// The name of a clone's pin: `SNAPSHOT@ID@CLONE`. The `@` tells it from that of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloneName<'a> {
    /// The snapshot that it began as.
    pub snapshot: &'a str,
    /// The number of the volume.
    pub(crate) id: Id,
    /// How the bucket, or the directory, calls it.
    pub clone: &'a str,
}

impl<'a> CloneName<'a> {
    /// `None`: it is no name of such a pin.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (snapshot, rest) = name.split_once('@')?;
        let (id, clone) = rest.split_once('@')?;
        let id = u128::from_str_radix(id, 16).ok().filter(|_| id.len() == 32)?.to_be_bytes();
        Some(Self { snapshot, id, clone })
    }
}

impl fmt::Display for CloneName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{:032x}@{}", self.snapshot, u128::from_be_bytes(self.id), self.clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_pin_names_the_clone() {
        let text = format!("before@{}@a/b@c", "0f".repeat(16));
        let name = CloneName::parse(&text).expect("it is one");
        assert_eq!((name.snapshot, name.id, name.clone), ("before", [15; 16], "a/b@c"));
        assert_eq!(name.to_string(), text);
        for other in ["before", "before@x", "before@0f@x", "a b@c@d"] {
            assert_eq!(CloneName::parse(other), None, "{other}");
        }
    }
}
