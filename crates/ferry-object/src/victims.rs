//! Which objects are mostly dead: what a pass of repacking does next.

use crate::format::{BLOCK, Location, ObjectRef};
use crate::runs::RunMap;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Blocks that one pass moves, but for those of its last object: 16 MiB.
const MOVED_MAX: u64 = (16 << 20) / BLOCK as u64;
/// Objects that one pass reads, at most. So many are repacked however small they are.
const OBJECTS_MAX: usize = 64;
/// Objects whose length is asked for in one pass, at most.
const LENGTHS_MAX: usize = 64;

/// What a pass does.
pub(crate) enum Pass {
    /// Finds out how long these are.
    Lengths(Vec<ObjectRef>),
    /// Moves what is left of these.
    Move(BTreeSet<ObjectRef>),
}

/// Chooses what a pass does. `live` are the objects and the blocks that refer to each, `lengths`
/// the blocks of those that are known, `waits` those that have blocks of the ring.
pub(crate) fn choose<'a>(
    live: impl Iterator<Item = (&'a ObjectRef, &'a u64)> + Clone,
    lengths: &BTreeMap<ObjectRef, u64>,
    waits: &BTreeSet<ObjectRef>,
    dead_min: u64,
) -> Option<Pass> {
    let may_be_half_dead = |(object, live): &(&ObjectRef, &u64)| {
        **live * 2 < OBJECT_BLOCKS_MAX && !waits.contains(object)
    };
    let candidates = live.filter(may_be_half_dead);
    let unknown = candidates.clone().filter(|(object, _)| !lengths.contains_key(object));
    let unknown: Vec<ObjectRef> = unknown.map(|(object, _)| *object).take(LENGTHS_MAX).collect();
    if !unknown.is_empty() {
        return Some(Pass::Lengths(unknown));
    }
    let (mut victims, mut moved, mut dead) = (BTreeSet::new(), 0, 0);
    for (object, live) in candidates {
        let len = lengths.get(object).copied().unwrap_or(0);
        if live * 2 < len {
            victims.insert(*object);
            (moved, dead) = (moved + live, dead + len - live);
        }
        if moved >= MOVED_MAX || victims.len() == OBJECTS_MAX {
            break;
        }
    }
    let worth = victims.len() == OBJECTS_MAX || dead >= dead_min;
    (worth && !victims.is_empty()).then_some(Pass::Move(victims))
}

/// No object has more blocks.
const OBJECT_BLOCKS_MAX: u64 = ((17 << 20) / BLOCK) as u64;

/// Objects that have a block in a range.
pub(crate) fn objects_in(map: &RunMap<Location>, range: &Range<u64>) -> BTreeSet<ObjectRef> {
    map.find(range.start, range.end - range.start).map(|run| run.value.object).collect()
}
