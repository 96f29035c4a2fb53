//! What each owner wrote and was told, and what the next one may find.
//!
//! An owner's changes are in the volume from the first one up to some one. All that were flushed
//! with success are among them, unless another machine has taken the volume from one with a local
//! log: then that machine must say so when it opens the volume again. A flush that ends with
//! success after the next owner has begun may only tell of changes that this one found.

use std::collections::{BTreeMap, BTreeSet};

/// Blocks of the device.
pub(super) const BLOCKS: usize = 40;

/// What each block holds: the number of a write, or 0 for zeros.
pub(super) type Image = [u64; BLOCKS];

/// A change: blocks and what each gets.
#[derive(Clone)]
pub(super) struct Change {
    pub start: usize,
    pub values: Vec<u64>,
}

impl Change {
    pub fn apply(&self, image: &mut Image) {
        image[self.start..self.start + self.values.len()].copy_from_slice(&self.values);
    }
}

/// One owner, from its opening on.
struct Owned {
    base: Image,
    changes: Vec<Change>,
    /// So many changes were flushed with success.
    flushed: usize,
    /// The next owner found so many changes at most.
    found_max: Option<usize>,
    /// The machine, if its owner has a local log.
    local: Option<usize>,
    /// That machine has said that its log has what is lost.
    told: bool,
}

/// All owners, by epoch.
#[derive(Default)]
pub(super) struct History {
    owners: BTreeMap<u64, Owned>,
    /// The newest epoch whose opening has ended.
    pub serves: u64,
    /// Machines whose local log has what the volume has lost to another machine.
    lost: BTreeSet<usize>,
    /// Machines that have said so, and have not opened the volume since.
    said: BTreeSet<usize>,
    /// How often that was so.
    pub losses: u64,
}

impl History {
    /// What the local log of a machine had is in the store, or it said that it is not.
    pub fn recovered(&mut self, machine: usize, said: bool) -> Result<(), String> {
        if self.lost.remove(&machine) && !said {
            return Err(format!("machine {machine} says nothing of flushes that are lost"));
        }
        if said {
            self.said.insert(machine);
            let mut newest = self.owners.values_mut().rev();
            if let Some(owned) = newest.find(|owned| owned.local == Some(machine)) {
                owned.told = true;
            }
        }
        Ok(())
    }

    /// The owner, on `machine`, has read the whole volume and found `image`. `local`: it has a
    /// local log.
    pub fn found(
        &mut self,
        epoch: u64,
        image: Image,
        machine: usize,
        local: bool,
    ) -> Result<(), String> {
        let said = self.said.remove(&machine);
        if let Some((before, owned)) = self.owners.range_mut(..epoch).next_back() {
            let elsewhere = owned.local.is_some_and(|other| other != machine);
            if said && !elsewhere && owned.local.is_some() && *before + 1 == epoch {
                return Err(format!(
                    "machine {machine} says that flushes are lost, and nobody took over"
                ));
            }
            let mut expected = owned.base;
            let mut found_max = (expected == image).then_some(0);
            for (n, change) in owned.changes.iter().enumerate() {
                change.apply(&mut expected);
                if expected == image {
                    found_max = Some(n + 1);
                }
            }
            let (total, flushed) = (owned.changes.len(), owned.flushed);
            match found_max {
                None => {
                    let text = format!(
                        "epoch {epoch} finds what epoch {before} never had ({total} changes, {flushed} \
                         flushed): found {image:?}, all changes give {expected:?}"
                    );
                    return Err(text);
                }
                // The other machine had not uploaded it.
                Some(found) if elsewhere || (said && owned.local.is_some()) => {
                    if found < flushed && elsewhere && !owned.told {
                        self.lost.extend(owned.local);
                        self.losses += 1;
                    }
                    owned.found_max = Some(found.min(owned.found_max.unwrap_or(usize::MAX)));
                }
                Some(found) if found < flushed => {
                    return Err(format!(
                        "epoch {epoch} finds {found} changes of epoch {before}, which had flushed \
                         {flushed} of {total}"
                    ));
                }
                found => {
                    let most = owned.found_max.unwrap_or(usize::MAX);
                    owned.found_max = found.map(|found| found.min(most));
                }
            }
        } else if image != [0; BLOCKS] {
            return Err(format!("the first owner finds {image:?}"));
        }
        let owned = Owned {
            base: image,
            changes: Vec::new(),
            flushed: 0,
            found_max: None,
            local: local.then_some(machine),
            told: false,
        };
        self.owners.insert(epoch, owned);
        Ok(())
    }

    /// The owner begins a change.
    pub fn changes(&mut self, epoch: u64, change: Change) {
        self.owners.get_mut(&epoch).expect("it is open").changes.push(change);
    }

    /// A flush of so many changes ended with success.
    pub fn flushed(&mut self, epoch: u64, count: usize) -> Result<(), String> {
        let owned = self.owners.get_mut(&epoch).expect("it is open");
        owned.flushed = owned.flushed.max(count);
        match (owned.found_max, owned.local) {
            // A successor that did not find it was on another machine, or had it found.
            (Some(found), Some(machine)) if found < count => {
                self.lost.insert(machine);
                self.losses += 1;
                Ok(())
            }
            (Some(found), None) if found < count => Err(format!(
                "a flush of {count} changes of epoch {epoch} succeeds, and the next owner found {found}"
            )),
            _ => Ok(()),
        }
    }
}
