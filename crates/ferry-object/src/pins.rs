//! Pins, as users see them: snapshots.

use crate::error::ObjectError;
use crate::format::Pin;
use ferry_device::Snapshot;

/// The snapshots of these pins.
pub(crate) fn for_people(pins: &[Pin]) -> Vec<Snapshot> {
    let snapshot = |pin: &Pin| Snapshot { name: pin.name.clone(), made_secs: pin.made_secs };
    pins.iter().map(snapshot).collect()
}

/// The error for a name that no snapshot has.
pub(crate) fn no_snapshot(name: &str, pins: &[Pin]) -> ObjectError {
    let names = pins.iter().map(|pin| pin.name.clone()).collect();
    ObjectError::NoSnapshot { name: name.into(), names }
}
