//! The sweep: deletes objects that no root and no log names.
//!
//! They are left by requests that a crash cut off, by owners that were fenced off, and by owners
//! that ended before they deleted what they had condemned. An owner sweeps when the grace has
//! passed since it opened the volume, and then daily:
//!
//! * DELETE-5: first it lists, then it looks that there is no newer claim, then it deletes. So
//!   nothing in the list is of a newer owner. It looks again before each object if the term since
//!   the last look is over: a newer owner, which a backup is, may need an object that this one does
//!   not, and has waited longer than a term before it looked whether that is there;
//! * DELETE-6: only objects of epochs below its own, and only what neither the takeover root nor
//!   the log behind it named. The log of those epochs has ended, so nothing that they wrote is
//!   named later;
//! * DELETE-8: nothing that the root of a snapshot needs. What a deleted snapshot needed is swept
//!   after the grace.
//!
//! What the takeover root or the log named dies in the map of this owner, which then condemns it.

use crate::device::{DELETES_PER_LOOK, ObjectDevice};
use crate::error::ObjectError;
use crate::executor::{Answer, Job};
use crate::format::{
    HEADER_LEN, Kind, LOGS, ObjectRef, ROOTS, SHARDS, header, number_of, object_of_shard,
};
use crate::inherited::Inherited;
use crate::snapshots::Pinned;
use crate::state::{Effects, State};
use ferry_env::planted::{Bug, is_planted};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl ObjectDevice {
    /// Starts a sweep if it is time.
    pub(crate) fn sweep_if_due(&self, state: &mut State, now: Duration, fx: &mut Effects) {
        let roots = &mut state.roots;
        if roots.sweeping || now < roots.sweep_due {
            return;
        }
        (roots.sweeping, roots.sweep_due) = (true, now + self.limits.sweep);
        // Now, and not when a thread is free: what a snapshot needs that is deleted meanwhile stays
        // for the grace.
        let (me, pins) = (self.me(), roots.pins.clone());
        let run = move || -> Answer {
            let swept = me.pinned(pins).and_then(|needed| me.sweep(&needed));
            Box::new(move || {
                if let Err(error) = swept {
                    tracing::warn!(%error, "objects that nothing needs stay until the next sweep");
                }
                me.state.lock().roots.sweeping = false;
            })
        };
        fx.jobs.push(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
    }

    /// Deletes what no snapshot needs, and nothing else names. `needed`: what the snapshots need.
    pub(crate) fn sweep(&self, needed: &Pinned) -> Result<(), ObjectError> {
        let looks_first = is_planted(Bug::SweptAfterLook);
        if looks_first {
            self.look()?;
        }
        let orphans = self.orphans(needed)?;
        for names in orphans.chunks(DELETES_PER_LOOK) {
            if self.failure().is_some() {
                return Ok(());
            }
            if !looks_first {
                self.look()?;
            }
            for name in names {
                if !looks_first && !self.in_term() {
                    self.look()?;
                }
                self.delete(std::slice::from_ref(name))?;
            }
            self.access.counters.orphans.fetch_add(names.len() as u64, Ordering::Relaxed);
        }
        if !orphans.is_empty() {
            tracing::info!("{} objects that nothing needed were deleted", orphans.len());
        }
        Ok(())
    }

    /// Objects of older owners that nothing names, roots first.
    fn orphans(&self, pinned: &Pinned) -> Result<Vec<String>, ObjectError> {
        let Inherited { objects, shards, root, next } = &self.inherited;
        let list = |prefix: &str| self.access.insist(|store| store.list(prefix));
        let mut orphans = list(ROOTS)?;
        orphans.retain(|name| {
            number_of(name)
                .is_some_and(|number| number + 1 < *root && !pinned.roots.contains(&number))
        });
        let is_orphan = |at: Option<ObjectRef>, needed: [&BTreeSet<ObjectRef>; 2]| {
            at.is_some_and(|at| {
                self.is_older(at.epoch) && !needed.iter().any(|set| set.contains(&at))
            })
        };
        let mut found = list(SHARDS)?;
        found.retain(|name| is_orphan(object_of_shard(name), [shards, &pinned.shards]));
        orphans.append(&mut found);
        found = list(ObjectRef::DATA)?;
        found.retain(|name| is_orphan(ObjectRef::of_name(name), [objects, &pinned.objects]));
        orphans.append(&mut found);
        for name in list(LOGS)? {
            let at = ObjectRef::of_name(&name);
            let own = |at: ObjectRef| at.number >= *next && !is_planted(Bug::SweptAfterLook);
            let is_needed = |at| objects.contains(&at) || pinned.objects.contains(&at);
            if at.is_some_and(|at| !own(at) && !is_needed(at)) && self.is_old_log(&name)? {
                orphans.push(name);
            }
        }
        Ok(orphans)
    }

    fn is_older(&self, epoch: u64) -> bool {
        let own = self.volume.epoch;
        epoch < own || (is_planted(Bug::SweptAfterLook) && epoch != own)
    }

    /// Whether an object is a log object of an older owner: a fence stays (DELETE-4). Only the
    /// object tells.
    fn is_old_log(&self, name: &str) -> Result<bool, ObjectError> {
        let found = match self.access.get(name, Some(0..HEADER_LEN as u64)) {
            Err(ObjectError::NotFound(_)) => return Ok(false),
            found => found?,
        };
        // What nobody can read is left to people.
        Ok(header(name, &found).is_ok_and(|header| {
            header.volume == self.volume.id
                && header.kind == Kind::Log
                && self.is_older(header.epoch)
        }))
    }
}
