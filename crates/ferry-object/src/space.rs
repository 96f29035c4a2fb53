//! What snapshots hold of the store.
//!
//! Only the store is asked: the newest root names the snapshots, and their roots and shards name
//! all objects that they need. Nothing is claimed, written or deleted, and the owner is not asked.
//! So it may be measured from everywhere, and holds nobody up.
//!
//! An object counts as a whole, with its bytes in the store. What the newest root needs counts for
//! no snapshot, however little of it is in use; so do the newest two roots. If one snapshot alone
//! needs an object, its deletion frees it, behind the grace.

use crate::access::{Access, sizes};
use crate::device::{Limits, identified};
use crate::error::ObjectError;
use crate::executor::Executor;
use crate::format::{LOGS, ObjectRef, ROOTS, Root, SHARDS, root_name, shard_name};
use crate::keys::Passphrase;
use crate::pins::for_people;
use crate::store::Store;
use crate::volume::{FoundRoot, Volume, load_shard, newest_root, newest_whole_root, read_root};
use ferry_device::Snapshot;
use ferry_env::Env;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// If snapshots are made or deleted meanwhile, it is measured so often.
const TRIES_MAX: u32 = 3;

/// What the snapshots of a volume hold of its store, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotSizes {
    /// What they hold together, and the volume does not need.
    pub held_bytes: u64,
    /// Each snapshot, and what it holds alone: so much its deletion frees. The oldest one first.
    pub alone_bytes: Vec<(Snapshot, u64)>,
}

impl SnapshotSizes {
    /// Measures a volume in a store, which may be in use.
    pub fn measure(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        passphrase: Option<&Passphrase>,
        env: &Env,
    ) -> Result<Self, ObjectError> {
        let (access, volume) = identified(store, executor, passphrase, Limits::default(), env)?;
        Self::read(&access, &volume)
    }

    /// The same of one that was identified.
    pub(crate) fn read(access: &Access, volume: &Volume) -> Result<Self, ObjectError> {
        for _ in 0..TRIES_MAX {
            let newest = newest_whole_root(access, volume)?;
            let measured = Self::of_root(access, volume, &newest);
            let now = newest_root(access, volume)?;
            match measured {
                Ok(sizes) if now.root.pins == newest.root.pins => return Ok(sizes),
                // What an older root needs may be deleted meanwhile.
                Err(ObjectError::NotFound(_)) if now.header.number > newest.header.number => {}
                Err(error) => return Err(error),
                Ok(_) => {}
            }
        }
        Err(ObjectError::SnapshotsChange)
    }

    fn of_root(access: &Access, volume: &Volume, newest: &FoundRoot) -> Result<Self, ObjectError> {
        let pins = &newest.root.pins;
        let mut needs = Needs::default();
        needs.add_root(newest.header.number, &newest.root, User::Volume);
        // The next roots replace it, whatever snapshots there are.
        needs.add(root_name(newest.header.number.saturating_sub(1)), User::Volume);
        for (index, pin) in pins.iter().enumerate() {
            let root = read_root(access, volume, pin.root)?.root;
            needs.add_root(pin.root, &root, User::One(index));
        }
        needs.add_objects(access, volume)?;
        let mut alone = vec![0; pins.len()];
        let mut held_bytes = 0;
        for (name, bytes) in sizes(access, &[ROOTS, SHARDS, ObjectRef::DATA, LOGS])? {
            match needs.users.get(&name) {
                None | Some(User::Volume) => continue,
                Some(User::One(index)) => alone[*index] += bytes,
                Some(User::Several) => {}
            }
            held_bytes += bytes;
        }
        Ok(Self { held_bytes, alone_bytes: for_people(pins).into_iter().zip(alone).collect() })
    }
}

/// What needs an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    /// The volume as it is, and perhaps snapshots.
    Volume,
    /// Only the snapshot with this index.
    One(usize),
    /// Several snapshots.
    Several,
}

/// What the newest root and those of the snapshots need.
#[derive(Default)]
struct Needs {
    /// The names of objects.
    users: BTreeMap<String, User>,
    shards: BTreeSet<(u64, ObjectRef)>,
}

impl Needs {
    fn add(&mut self, name: String, user: User) {
        let known = self.users.entry(name).or_insert(user);
        *known = match (*known, user) {
            (known, user) if known == user => known,
            (User::Volume, _) | (_, User::Volume) => User::Volume,
            _ => User::Several,
        };
    }

    fn add_root(&mut self, number: u64, root: &Root, user: User) {
        self.add(root_name(number), user);
        for (shard, at) in &root.shards {
            self.add(shard_name(*shard, *at), user);
            self.shards.insert((*shard, *at));
        }
    }

    /// Reads all shards, several at a time, for the objects that they need.
    fn add_objects(&mut self, access: &Access, volume: &Volume) -> Result<(), ObjectError> {
        let shards = std::mem::take(&mut self.shards);
        let volume = volume.clone();
        access.ask_each(
            shards,
            move |access, (shard, at)| {
                Ok((shard_name(shard, at), objects_of(access, &volume, shard, at)?))
            },
            |(name, objects)| {
                if let Some(user) = self.users.get(&name).copied() {
                    objects.into_iter().for_each(|object| self.add(object.name(), user));
                }
            },
        )
    }
}

fn objects_of(
    access: &Access,
    volume: &Volume,
    shard: u64,
    at: ObjectRef,
) -> Result<BTreeSet<ObjectRef>, ObjectError> {
    let runs = load_shard(access, volume, shard, at)?;
    Ok(runs.iter().map(|run| run.value.object).collect())
}
