//! [`Inherited`]: what older owners of a volume left that is needed.

use crate::format::{EntryKind, Location, ObjectRef};
use crate::runs::Run;
use crate::volume::{Chain, Shards};
use ferry_env::planted::{Bug, is_planted};
use std::collections::BTreeSet;

/// What an owner found when it opened the volume: all objects of older owners that anybody may
/// need.
pub(crate) struct Inherited {
    /// Log objects, fences and data objects that the takeover root or the log behind it names.
    pub objects: BTreeSet<ObjectRef>,
    /// Shards of the takeover root.
    pub shards: BTreeSet<ObjectRef>,
    /// The number of the takeover root.
    pub root: u64,
    /// The first number in the log that is the owner's own.
    pub next: u64,
}

impl Inherited {
    pub fn new(chain: &Chain, shards: &Shards) -> Self {
        let mapped = shards.iter().flatten().map(|run: &Run<Location>| run.value.object);
        let named = chain.links.iter().flat_map(|link| {
            let data = link.entries.iter().filter_map(|entry| match entry.value {
                EntryKind::Data { number, .. } => {
                    Some(ObjectRef { epoch: link.header.epoch, number })
                }
                EntryKind::Zeros | EntryKind::Here { .. } => None,
            });
            data.chain([ObjectRef::log(link.seq)])
        });
        let named: Vec<ObjectRef> =
            if is_planted(Bug::SweptLog) { Vec::new() } else { named.collect() };
        Self {
            objects: mapped.chain(named).collect(),
            shards: chain.root.root.shards.iter().map(|(_, at)| *at).collect(),
            root: chain.root.header.number,
            next: chain.next,
        }
    }
}
