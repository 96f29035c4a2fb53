//! Names of objects that only snapshots need.

use crate::format::{ObjectRef, Pin, ROOTS, number_of, object_of_shard};
use ferry_env::planted::{Bug, is_planted};

/// A name that no root needs from number `dead_at` on, but a snapshot may.
pub(crate) struct Retained {
    pub dead_at: u64,
    pub name: String,
}

impl Retained {
    /// Whether one of the snapshots may need it.
    pub fn is_needed(&self, pins: &[Pin]) -> bool {
        if is_planted(Bug::ForgottenPin) {
            return false;
        }
        let older = &pins[..pins.partition_point(|pin| pin.root < self.dead_at)];
        if self.name.starts_with(ROOTS) {
            return number_of(&self.name)
                .is_some_and(|root| older.binary_search_by_key(&root, |pin| pin.root).is_ok());
        }
        // A later snapshot may need all that an earlier one may need.
        let object = object_of_shard(&self.name).or_else(|| ObjectRef::of_name(&self.name));
        older.last().zip(object).is_some_and(|(pin, object)| pin.may_need(object))
    }
}
