//! Going back to a snapshot.
//!
//! The owner ends with a root that has the shards of the snapshot's root, and the first number of
//! the log as it is now: no later owner follows the log behind the snapshot, which made the volume
//! what it was until now. Nothing is copied. That one root is the whole change. It is there or not,
//! at whatever request the owner dies.
//!
//! The owner ends, and does not go on with another map: what only the old state needs was found by
//! its own map, and what only the snapshot needed was retained, swept around and not repacked. The
//! next owner reads the root as any other, and its sweep deletes what is needed no more.

use crate::backup::claimed_epoch;
use crate::device::ObjectDevice;
use crate::error::ObjectError;
use crate::format::{Pin, Root};
use crate::pins::no_snapshot;
use crate::snapshots::RootChange;
use crate::volume::{explained, load_shards, read_root};

/// What becomes of the state that a snapshot replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// It becomes a snapshot first.
    Snapshot,
    /// It is lost.
    Discarded,
}

/// A volume is again what a snapshot has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolledBack {
    /// When that snapshot was made, in seconds since the Unix epoch.
    pub made_secs: u64,
    /// The snapshot of what the volume was until then.
    pub before: Option<String>,
    /// The snapshot came from another volume, which may have changed since.
    pub is_copied: bool,
}

/// The name of the snapshot of what was replaced; later ones have a number behind it.
const BEFORE: &str = "before-rollback";

impl ObjectDevice {
    /// Makes the volume again what it was when a snapshot was made, and closes it. All snapshots
    /// stay. An error leaves the volume as it was, unless another owner has it since.
    pub fn roll_back(&self, name: &str, replaced: Replaced) -> Result<RolledBack, ObjectError> {
        if self.is_read_only() {
            return Err(ObjectError::ReadOnly);
        }
        let pins = self.state.lock().roots.pins.clone();
        let pin = pins.iter().find(|pin| pin.name == name);
        let pin = pin.ok_or_else(|| no_snapshot(name, &pins))?;
        let to = self.whole_root(pin);
        let to = to.map_err(|error| explained(&self.access, &self.volume, error))?;
        let shards = to.shards.iter().map(|(_, at)| *at);
        let is_copied = claimed_epoch(&self.access, shards)?.is_none();
        let is_pinned = |name: &str| pins.iter().any(|pin| pin.name == name);
        let before = match replaced {
            Replaced::Discarded => None,
            Replaced::Snapshot => Some(name_before_rollback(is_pinned)),
        };
        before.as_deref().map_or(Ok(()), |before| self.create_snapshot(before))?;
        self.end(RootChange::RollBack { pin, to: &to })?;
        // An owner that slept may have taken the name of a root that later owners deleted.
        self.look()?;
        Ok(RolledBack { made_secs: pin.made_secs, before, is_copied })
    }

    /// The root of a snapshot, if all its shards can be read: otherwise nobody could open the
    /// volume afterwards.
    fn whole_root(&self, pin: &Pin) -> Result<Root, ObjectError> {
        let root = read_root(&self.access, &self.volume, pin.root)?.root;
        load_shards(&self.access, &self.volume, &root.shards)?;
        Ok(root)
    }
}

/// A name, which no snapshot has, for what a rollback replaces.
pub fn name_before_rollback(is_taken: impl Fn(&str) -> bool) -> String {
    let numbered = (2..).map(|n| format!("{BEFORE}-{n}"));
    let mut names = std::iter::once(BEFORE.to_owned()).chain(numbered);
    names.find(|name| !is_taken(name)).expect("there are fewer snapshots than numbers")
}
