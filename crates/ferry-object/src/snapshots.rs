//! Snapshots: roots that stay, with all that they need.
//!
//! A snapshot is a pin, an entry of each root from its own one on. Only the owner of the volume
//! writes roots, so only it makes and deletes snapshots. Making one costs a flush and a root.
//!
//! No object says when it was born, its name does: log objects are numbered in one sequence, data
//! objects and shards within their epoch. A pin has the first names that were free when its root
//! was made. So the owner knows of an object that dies whether a snapshot may need it. It retains
//! the name until no snapshot may. What older owners retained a sweep finds.

use crate::access::{Origin, Patience};
use crate::codec::Codec;
use crate::device::ObjectDevice;
use crate::error::ObjectError;
use crate::format::{
    FreeNames, HEADER_LEN, ObjectRef, Pin, ROOTS, Root, RootState, SUPER, header, root_name,
};
use crate::pins::{CloneName, NAME_MAX, for_people, no_snapshot};
use crate::retained::Retained;
use crate::state::{Roots, State};
use crate::volume::{load_shard, read_root};
use ferry_device::{BlockDevice, IoDone, Snapshot};
use ferry_env::planted::{Bug, is_planted};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

/// Snapshots that a volume may have: each root names all of them.
pub const SNAPSHOTS_MAX: usize = 1000;
/// For how long an owner asks again whether a clone is there.
const PATIENCE: Duration = Duration::from_secs(30);

/// Refuses what cannot be the name of a snapshot.
pub fn check_snapshot_name(name: &str) -> Result<(), ObjectError> {
    let what = match name {
        "" => "it is empty",
        "." | ".." => "that is a directory in each directory",
        _ if name.len() > NAME_MAX => "it has more than 255 bytes",
        _ if name.contains('/') => "it has a slash",
        _ if name.contains(',') => "it has a comma, which ends a mount option",
        _ if name.contains('@') => "it has an @, behind which a snapshot's name begins",
        _ if name.contains('?') => "it has a ?, which ends the path of a URL",
        _ if name.contains(char::is_control) => "it has a control character",
        _ => return Ok(()),
    };
    Err(ObjectError::SnapshotName(name.into(), what))
}

/// What a root changes beside what the log did.
#[derive(Clone, Copy)]
pub(crate) enum RootChange<'a> {
    None,
    /// It makes a snapshot.
    Add(&'a str),
    /// It makes the pin of a clone, which has the root of a snapshot.
    Share {
        name: &'a str,
        of: &'a str,
    },
    /// It deletes one.
    Remove(&'a str),
    /// The volume is again what `to` has, the root of this snapshot.
    RollBack {
        pin: &'a Pin,
        to: &'a Root,
    },
    /// The volume, a backup, is what `of` has, the root of this snapshot in the volume that is
    /// backed up. It becomes a snapshot here, too.
    Receive {
        pin: &'a Pin,
        of: &'a Root,
    },
}

impl Roots {
    /// Root `number` has these pins and does not need `dead`. What no snapshot may need is staged
    /// to be deleted. Returns the root of a snapshot that was deleted.
    pub fn note_dead(
        &mut self,
        number: u64,
        pins: Vec<Pin>,
        dead: Vec<String>,
        now: Duration,
    ) -> Option<u64> {
        let mut before = self.pins.iter().map(|pin| pin.root);
        let unpinned = before.find(|root| pins.iter().all(|pin| pin.root != *root));
        let old = number.checked_sub(2).map(root_name);
        let mut dead: Vec<Retained> =
            dead.into_iter().map(|name| Retained { dead_at: number, name }).collect();
        // Roots go first.
        if let Some(name) = old {
            if self.pins.iter().any(|pin| pin.root + 2 == number) {
                dead.insert(0, Retained { dead_at: number, name });
            } else {
                self.condemned.push_back((now, name));
            }
        }
        self.condemned.extend(self.staged.drain(..).map(|name| (now, name)));
        if unpinned.is_some() {
            let mut retained = std::mem::take(&mut self.retained);
            retained.append(&mut dead);
            retained.sort_by_key(|retained| !retained.name.starts_with(ROOTS));
            dead = retained;
        }
        for retained in dead {
            if retained.is_needed(&pins) {
                self.retained.push(retained);
            } else {
                self.staged.push(retained.name);
            }
        }
        self.pins = pins;
        unpinned
    }
}

/// What the roots of all snapshots need.
#[derive(Default)]
pub(crate) struct Pinned {
    pub roots: BTreeSet<u64>,
    pub shards: BTreeSet<ObjectRef>,
    pub objects: BTreeSet<ObjectRef>,
}

impl ObjectDevice {
    /// Makes a snapshot of all that was written before this was called. It is durable when this
    /// returns. The name may be that of a clone's pin: then it has what the named snapshot has.
    pub fn create_snapshot(&self, name: &str) -> Result<(), ObjectError> {
        self.change_pins(match CloneName::parse(name) {
            Some(_) if name.len() > NAME_MAX => {
                return Err(ObjectError::SnapshotName(name.into(), "it has more than 255 bytes"));
            }
            Some(clone) => RootChange::Share { name, of: clone.snapshot },
            None => {
                check_snapshot_name(name)?;
                RootChange::Add(name)
            }
        })
    }

    /// Deletes a snapshot. What only it needs is deleted after the grace. The pin of a clone is
    /// deleted only if that is not there any more.
    pub fn delete_snapshot(&self, name: &str) -> Result<(), ObjectError> {
        let pinned = self.state.lock().roots.pins.iter().any(|pin| pin.name == name);
        if let (true, Some(clone)) = (pinned, CloneName::parse(name)) {
            self.refuse_if_there(&clone)?;
        }
        self.change_pins(RootChange::Remove(name))
    }

    /// Refuses to delete the pin of a clone that is there, or may still be made (CLONE-3).
    pub(crate) fn refuse_if_there(&self, name: &CloneName<'_>) -> Result<(), ObjectError> {
        let store = match self.access.store.beside(name.clone) {
            // Its directory was there before the pin.
            Err(ObjectError::NoStore(_)) => return Ok(()),
            other => other?,
        };
        let mut access = self.access.at(&Origin { store, codec: Codec::default() });
        access.patience = Patience::Opening(PATIENCE);
        for object in [root_name(0), SUPER.into()] {
            let found = match access.get(&object, Some(0..HEADER_LEN as u64)) {
                Err(ObjectError::NotFound(_)) => continue,
                found => found?,
            };
            // Another one is of a volume that took the clone's place.
            if header(&object, &found)?.volume == name.id {
                return Err(ObjectError::NeededByClone(name.clone.into()));
            }
        }
        Ok(())
    }

    /// The snapshots, in the order in which they were made.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        for_people(&self.state.lock().roots.pins)
    }

    fn change_pins(&self, change: RootChange<'_>) -> Result<(), ObjectError> {
        if self.is_read_only() {
            return Err(ObjectError::ReadOnly);
        }
        if matches!(change, RootChange::Add(_)) && self.flush().is_err() {
            return Err(self.failure().unwrap_or(ObjectError::ReadOnly));
        }
        self.state.lock().roots.pinning += 1;
        let changed = self.change_pins_in_turn(change);
        self.state.lock().roots.pinning -= 1;
        changed
    }

    fn change_pins_in_turn(&self, change: RootChange<'_>) -> Result<(), ObjectError> {
        let mut change = Some(change);
        loop {
            let (ended, end) = mpsc::channel();
            let done: IoDone = Box::new(move |result| drop(ended.send(result)));
            let mut refused = None;
            self.with(|state, fx| {
                // A root is written already: this waits for its end, and looks again.
                let free = state.failed.is_none() && state.roots.writing.is_none();
                if free && is_behind_pin(&state.roots, change.as_ref()) {
                    self.start_root(state, fx);
                } else if free && let Some(change) = change.take() {
                    match refuse(state, &change) {
                        Ok(()) => {
                            self.start_changing_root(state, RootState::Serving, change, fx);
                        }
                        Err(error) => refused = Some(error),
                    }
                }
                match &state.failed {
                    Some(error) => fx.ends.push((done, Err(error.clone().into()))),
                    None if refused.is_some() => {}
                    None => state.roots.waiters.push(done),
                }
            });
            if let Some(error) = refused {
                return Err(error);
            }
            if self.wait(&end).is_err() {
                return Err(self.failure().unwrap_or(ObjectError::ReadOnly));
            }
            if change.is_none() {
                // An owner that slept may have taken the name of a root that later owners deleted.
                return self.look();
            }
        }
    }

    /// The pins of the root that is composed now.
    pub(crate) fn changed_pins(&self, state: &State, change: RootChange<'_>) -> Vec<Pin> {
        let mut pins = state.roots.pins.clone();
        let pin = |name: &str, made_secs| Pin {
            name: name.into(),
            root: state.roots.number + 1,
            free: FreeNames {
                log: state.committed,
                object: ObjectRef {
                    epoch: self.volume.epoch,
                    number: self.next_object.load(Ordering::Relaxed),
                },
            },
            made_secs,
        };
        match change {
            RootChange::None | RootChange::RollBack { .. } => {}
            RootChange::Add(name) => pins.push(pin(name, self.env.clock.wall().as_secs())),
            RootChange::Receive { pin: of, .. } => pins.push(pin(&of.name, of.made_secs)),
            RootChange::Share { name, of } => {
                if let Some(shared) = pins.iter().find(|pin| pin.name == of) {
                    let pin = Pin { name: name.into(), ..shared.clone() };
                    pins.insert(pins.partition_point(|other| other.root <= pin.root), pin);
                }
            }
            RootChange::Remove(name) => pins.retain(|pin| pin.name != name),
        }
        pins
    }

    /// What the roots of these snapshots need, read from the store.
    pub(crate) fn pinned(&self, pins: Vec<Pin>) -> Result<Pinned, ObjectError> {
        let mut found = Pinned::default();
        if is_planted(Bug::SweptPinned) {
            return Ok(found);
        }
        for pin in pins {
            found.roots.insert(pin.root);
            let root = read_root(&self.access, &self.volume, pin.root)?.root;
            for (shard, at) in root.shards {
                if found.shards.insert(at) {
                    let runs = load_shard(&self.access, &self.volume, shard, at)?;
                    found.objects.extend(runs.iter().map(|run| run.value.object));
                }
            }
        }
        Ok(found)
    }
}

/// Whether the newest root has a pin, and the next one would get one. Another root comes between:
/// a claimant with an old list takes a root for the newest one only if the one before it is there.
fn is_behind_pin(roots: &Roots, change: Option<&RootChange<'_>>) -> bool {
    matches!(change, Some(RootChange::Add(_)))
        && roots.pins.last().is_some_and(|pin| pin.root == roots.number)
}

/// Refuses a change that cannot be.
pub(crate) fn refuse(state: &State, change: &RootChange<'_>) -> Result<(), ObjectError> {
    let pins = &state.roots.pins;
    let has = |name: &str| pins.iter().any(|pin| pin.name == name);
    let may_add = |name: &str| match pins.len() {
        _ if has(name) => Err(ObjectError::SnapshotExists(name.into())),
        count if count >= SNAPSHOTS_MAX => Err(ObjectError::TooManySnapshots(count)),
        _ => Ok(()),
    };
    match change {
        RootChange::Add(name) => may_add(name),
        RootChange::Receive { pin, .. } => may_add(&pin.name),
        RootChange::Share { name, of } => may_add(name).and_then(|()| match has(of) {
            true => Ok(()),
            false => Err(no_snapshot(of, pins)),
        }),
        RootChange::Remove(name) if !has(name) => Err(no_snapshot(name, pins)),
        RootChange::RollBack { pin, .. } if !pins.contains(pin) => {
            Err(no_snapshot(&pin.name, pins))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_are_deleted_before_what_they_need() {
        let mut roots = Roots { staged: vec!["s/of-root-3".into()], ..Roots::default() };
        assert_eq!(
            roots.note_dead(5, Vec::new(), vec!["s/of-root-4".into()], Duration::ZERO),
            None
        );
        let condemned: Vec<&String> = roots.condemned.iter().map(|(_, name)| name).collect();
        assert_eq!(condemned, [&root_name(3), "s/of-root-3"]);
        assert_eq!(roots.staged, ["s/of-root-4"]);
    }
}
