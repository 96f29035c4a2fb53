//! Repacking: what is left of objects that are mostly dead is written to new data objects.
//!
//! A device that is overwritten in small parts leaves objects of which few blocks are in use. The
//! blocks of such objects are read, gathered by the part of the device that they are in, put as
//! data objects, and then the map refers to these. No log object says so: the next root does. Until
//! then, and for the grace after it, the old objects are there. So a crash costs only the new ones,
//! which the next owner sweeps.
//!
//! * REPACK-1: the map refers to the new place of a block only if it still refers to the old one.
//!   What was written meanwhile is newer.
//! * REPACK-2: an object that has blocks of the ring of the file system's log waits until they are
//!   overwritten. They are not moved.
//! * REPACK-3: a data object of a segment with file data dies as a whole, when the file system's
//!   cleaner has emptied the segment. It is not half dead before, so it is not met here.
//! * REPACK-4: an object that a snapshot may need waits until that is deleted: it would stay.

use crate::batch::{Built, Layout, Pending, build};
use crate::device::ObjectDevice;
use crate::error::ObjectError;
use crate::executor::{Answer, Job, Upload};
use crate::format::{
    BLOCK, EntryKind, Front, HEADER_LEN, Kind, Location, ObjectRef, SHARD_BLOCKS, contents_len,
    encode,
};
use crate::runs::{Run, RunMap, Sliced};
use crate::state::{Effects, State};
use crate::victims::Pass;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl ObjectDevice {
    /// Starts a pass if there is something to gain.
    pub(crate) fn repack_if_due(&self, state: &mut State, now: Duration, fx: &mut Effects) {
        if state.repacking || now < state.repack_due {
            return;
        }
        let dead_min = (self.limits.repack_bytes_min / BLOCK) as u64;
        let newest = state.roots.pins.last();
        // An object of a volume that a clone refers to is not its own.
        let stays = |object: ObjectRef| {
            self.volume.info.parent_of(object).is_some()
                || newest.is_some_and(|pin| pin.may_need(object))
        };
        let Some(pass) = state.map.pass(&state.ring, dead_min, stays) else {
            state.repack_due = now + self.limits.root_delay;
            return;
        };
        state.repacking = true;
        let me = self.me();
        let run = move || -> Answer {
            let done: Result<Answer, ObjectError> = match pass {
                Pass::Lengths(objects) => me.find_lengths(&objects),
                Pass::Move(victims) => me.gather(&victims),
            };
            Box::new(move || {
                me.state.lock().repacking = false;
                match done {
                    Ok(install) => install(),
                    Err(error) => {
                        tracing::warn!(%error, "mostly dead objects are left as they are")
                    }
                }
            })
        };
        fx.jobs.push(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
    }

    fn find_lengths(&self, objects: &[ObjectRef]) -> Result<Answer, ObjectError> {
        let mut lengths = Vec::new();
        for object in objects {
            let name = object.name();
            let blocks = match self.access.get(&name, Some(0..HEADER_LEN as u64)) {
                Ok(bytes) => contents_len(&name, &bytes).map(|len| len / BLOCK as u64),
                Err(error) => Err(error),
            };
            match blocks {
                Ok(blocks) => lengths.push((*object, blocks)),
                // It is as if nothing of it were dead.
                Err(ObjectError::NotFound(_) | ObjectError::Damaged { .. }) => {
                    lengths.push((*object, 0));
                }
                Err(error) => return Err(error),
            }
        }
        let me = self.me();
        Ok(Box::new(move || me.with(|state, _| state.map.learn(&lengths))))
    }

    /// Reads what is left of objects, and puts it to new ones.
    fn gather(&self, victims: &BTreeSet<ObjectRef>) -> Result<Answer, ObjectError> {
        let (mut left, mut damaged): (BTreeMap<ObjectRef, Vec<Run<Location>>>, _) =
            (BTreeMap::new(), Vec::new());
        let end = self.state.lock().map.end();
        for shard in 0..end.div_ceil(SHARD_BLOCKS) {
            let state = self.state.lock();
            let runs = state.map.find(shard * SHARD_BLOCKS, SHARD_BLOCKS);
            for run in runs.filter(|run| victims.contains(&run.value.object)) {
                left.entry(run.value.object).or_default().push(run);
            }
        }
        let (mut runs, mut moved) = (RunMap::default(), Vec::new());
        for (object, found) in left {
            if self.failure().is_some() {
                break;
            }
            match self.read_object(object, &found, &mut runs) {
                Ok(()) => moved.extend(found),
                Err(ObjectError::NotFound(_) | ObjectError::Damaged { .. }) => {
                    damaged.push((object, 0));
                }
                Err(error) => return Err(error),
            }
        }
        let Built { data, entries, .. } = build(&runs, Layout { data_run_min: 0, ..self.layout() });
        let objects: Vec<ObjectRef> = data.iter().map(|_| self.next_object()).collect();
        for (object, contents) in objects.iter().zip(data) {
            let header = self.header(Kind::Data, object.number);
            let bytes = Arc::new(encode(&self.access.codec, &header, &[], &contents));
            let upload = Upload { name: object.name(), bytes, exclusive: false };
            self.access.insist(|_| self.put(&upload))?;
        }
        let mut targets = RunMap::default();
        for entry in entries {
            let location = match entry.value {
                EntryKind::Data { number, block } => {
                    Some(Location { object: objects[number as usize], block: block.into() })
                }
                EntryKind::Zeros | EntryKind::Here { .. } => None,
            };
            targets.insert(entry.start, entry.len, Target(location));
        }
        let me = self.me();
        Ok(Box::new(move || me.move_blocks(&moved, &targets, &objects, &damaged)))
    }

    /// Adds these blocks of an object to `runs`.
    fn read_object(
        &self,
        object: ObjectRef,
        found: &[Run<Location>],
        runs: &mut RunMap<Pending>,
    ) -> Result<(), ObjectError> {
        let name = object.name();
        let bytes = self.access.get(&name, None)?;
        let front = Front::decode(&self.access.codec, &name, &bytes)?;
        let front = front.expect_object(object, &self.volume.id)?;
        let mut read = Vec::new();
        for run in found {
            let from = run.value.block * BLOCK as u64;
            let wanted = from..from + run.len * BLOCK as u64;
            let stored = front.stored(&wanted)?;
            let end = bytes.len().min(stored.end as usize);
            let stored = &bytes[end.min(stored.start as usize)..end];
            let mut out = vec![0; run.len as usize * BLOCK];
            front.extract(&wanted, stored, &mut out)?;
            read.push((run, out));
        }
        for (run, out) in read {
            let data = Pending::Data { buffer: Arc::new(out), block: 0 };
            runs.insert(run.start, run.len, data);
        }
        Ok(())
    }

    /// The map refers to the new places of blocks that are where they were (REPACK-1).
    fn move_blocks(
        &self,
        old: &[Run<Location>],
        targets: &RunMap<Target>,
        objects: &[ObjectRef],
        damaged: &[(ObjectRef, u64)],
    ) {
        self.with(|state, fx| {
            if state.failed.is_some() {
                return;
            }
            state.map.learn(damaged);
            let mut blocks = 0;
            for target in old
                .iter()
                .flat_map(|run| targets.find(run.start, run.len).map(move |target| (run, target)))
            {
                let (run, target) = target;
                let from = run.value.after(target.start - run.start);
                blocks += state.map.relocate(target.start, target.len, from, target.value.0);
            }
            state.map.drop_unused(objects);
            self.access.counters.repacked_bytes.fetch_add(blocks * BLOCK as u64, Ordering::Relaxed);
            self.root_if_due(state, fx);
        });
    }
}

/// Where a block is put; `None`: it holds zeros.
#[derive(Clone, Copy)]
struct Target(Option<Location>);

impl Sliced for Target {
    fn after(&self, skip: u64) -> Self {
        Self(self.0.map(|location| location.after(skip)))
    }

    fn continues(&self, len: u64, next: &Self) -> bool {
        match (self.0, next.0) {
            (Some(here), Some(next)) => here.continues(len, &next),
            (here, next) => here.is_none() && next.is_none(),
        }
    }
}
