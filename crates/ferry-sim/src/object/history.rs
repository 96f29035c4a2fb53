//! What each owner wrote and was told, and what the next one may find.
//!
//! An owner's changes are in the volume from the first one up to some one. All that were flushed
//! with success are among them. A flush that ends with success after the next owner has begun may
//! only tell of changes that this one found.

use std::collections::BTreeMap;

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
}

/// All owners, by epoch.
#[derive(Default)]
pub(super) struct History {
    owners: BTreeMap<u64, Owned>,
    /// The newest epoch whose opening has ended.
    pub serves: u64,
}

impl History {
    /// The owner has read the whole volume and found `image`.
    pub fn found(&mut self, epoch: u64, image: Image) -> Result<(), String> {
        if let Some((before, owned)) = self.owners.range_mut(..epoch).next_back() {
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
        let owned = Owned { base: image, changes: Vec::new(), flushed: 0, found_max: None };
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
        match owned.found_max {
            Some(found) if found < count => Err(format!(
                "a flush of {count} changes of epoch {epoch} succeeds, and the next owner found {found}"
            )),
            _ => Ok(()),
        }
    }
}
