//! Roots, and the deletion of what none of them needs.
//!
//! A root is the map at some number of the log. It holds only the committed prefix, and it is
//! written only after its shards have answered. What it does not need any more is deleted:
//!
//! * DELETE-1: only what neither of the newest two roots needs, and only after the grace;
//! * DELETE-2: only after a look that no newer claim exists. A new owner writes a root first, so
//!   the old owner, whose next root fails, condemns nothing more;
//! * DELETE-3: roots and log objects in ascending order, a root before the objects that only it
//!   needs. What waited for a snapshot (DELETE-7) comes later;
//! * DELETE-4: never a claim, never a fence. Their names must not become free: an old owner that
//!   slept would create its log object there;
//! * DELETE-7: what a snapshot may need only when that is deleted, and then as DELETE-1 says;
//! * DELETE-9: of a clone, nothing that is of the volumes that it refers to.

use crate::device::{DELETES_PER_LOOK, ObjectDevice, ShardRuns, Then};
use crate::error::ObjectError;
use crate::executor::{Answer, Job, Upload};
use crate::format::{
    Id, Kind, ObjectRef, Root, RootState, SHARDS, encode, encode_shard, root_name, shard_name,
};
use crate::snapshots::{RootChange, refuse};
use crate::state::{Effects, State, Writing};
use crate::volume::encode_root;
use ferry_device::IoDone;
use ferry_env::planted::{Bug, is_planted};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

/// The time between two ticks.
const TICK: Duration = Duration::from_secs(1);

/// What a root is to have, and what it needs no more.
struct Composed {
    shards: BTreeMap<u64, ObjectRef>,
    /// Shards that are written for it.
    changed: Vec<(u64, ObjectRef, ShardRuns)>,
    dead: Vec<String>,
}

impl Composed {
    /// What an older root has. The owner ends with such a root: what only the state before it
    /// needs, the sweep of the next owner finds (DELETE-6).
    fn of(root: &Root) -> Self {
        let shards = root.shards.iter().copied().collect();
        Self { shards, changed: Vec::new(), dead: Vec::new() }
    }
}

impl ObjectDevice {
    /// Makes everything durable and says in the store that the owner has ended: another one may
    /// open the volume at once. The device serves nothing afterwards.
    pub fn close(&self) -> Result<(), ObjectError> {
        if self.is_read_only() { Ok(()) } else { self.end(RootChange::None) }
    }

    /// Makes everything durable and writes the last root of this owner.
    pub(crate) fn end(&self, change: RootChange<'_>) -> Result<(), ObjectError> {
        loop {
            let (ended, end) = mpsc::channel();
            let done: IoDone = Box::new(move |result| drop(ended.send(result)));
            let (mut closing, mut refused) = (false, None);
            self.with(|state, fx| {
                if let Some(error) = &state.failed {
                    return fx.ends.push((done, Err(error.clone().into())));
                }
                let at_rest = state.open.runs.is_empty() && state.sealed.is_empty();
                if !at_rest {
                    return self.flush_state(state, done, fx);
                }
                if state.roots.writing.is_none() {
                    if let Err(error) = refuse(state, &change) {
                        refused = Some(error);
                        return;
                    }
                    closing = true;
                    self.start_changing_root(state, RootState::Closed, change, fx);
                }
                state.roots.waiters.push(done);
            });
            if let Some(error) = refused {
                return Err(error);
            }
            let result = self.wait(&end);
            if result.is_ok() && closing {
                return Ok(());
            }
            if let Some(error) = self.failure() {
                return Err(error);
            }
        }
    }

    /// Starts a root if the log is long.
    pub(crate) fn root_if_due(&self, state: &mut State, fx: &mut Effects) {
        let roots = &mut state.roots;
        if state.map.has_dead() && roots.died.is_none() {
            roots.died = Some(self.env.clock.monotonic());
        }
        let long = roots.log_bytes >= self.limits.root_log_bytes
            || roots.log_objects >= self.limits.root_log_objects;
        if long && roots.writing.is_none() {
            self.start_root(state, fx);
        }
    }

    /// Starts to write a root of what is committed now.
    pub(crate) fn start_root(&self, state: &mut State, fx: &mut Effects) {
        self.start_changing_root(state, RootState::Serving, RootChange::None, fx);
    }

    /// The same, with a change, or as the last root of this owner.
    pub(crate) fn start_changing_root(
        &self,
        state: &mut State,
        root_state: RootState,
        change: RootChange<'_>,
        fx: &mut Effects,
    ) {
        assert!(state.roots.writing.is_none(), "one root is written at a time");
        let Composed { shards, changed, dead } = match change {
            RootChange::RollBack { to, .. } | RootChange::Receive { of: to, .. } => {
                Composed::of(to)
            }
            _ => self.compose(state),
        };
        let (first, last_id) = match change {
            RootChange::RollBack { to, .. } if is_planted(Bug::RolledBackLog) => {
                (to.first, to.last_id)
            }
            _ => (state.committed, state.committed_id),
        };
        let root = Root {
            first,
            last_id,
            state: root_state,
            shards: shards.iter().map(|(shard, at)| (*shard, *at)).collect(),
            pins: self.changed_pins(state, change),
        };
        let roots = &mut state.roots;
        (roots.log_bytes, roots.log_objects, roots.died) = (0, 0, None);
        self.small.lock().clear();
        roots.writing = Some(Writing { root, shards, left: changed.len(), dead });
        let me = self.me();
        let run = move || -> Answer {
            let uploads: Vec<Upload> =
                changed.iter().map(|(shard, at, runs)| me.shard(*shard, *at, runs)).collect();
            Box::new(move || me.send_shards(uploads))
        };
        fx.jobs.push(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
    }

    /// What the map says now.
    fn compose(&self, state: &mut State) -> Composed {
        let mut shards = state.roots.shards.clone();
        let is_own = |object: &ObjectRef| self.volume.info.parent_of(*object).is_none();
        let dead = state.map.take_dead(state.committed).into_iter().filter(is_own);
        let mut dead: Vec<String> = dead.map(ObjectRef::name).collect();
        let mut changed = Vec::new();
        for (shard, runs) in state.map.take_changed() {
            let old = if runs.is_empty() {
                shards.remove(&shard)
            } else {
                let at = self.next_object();
                changed.push((shard, at, runs));
                shards.insert(shard, at)
            };
            dead.extend(old.filter(is_own).map(|old| shard_name(shard, old)));
        }
        Composed { shards, changed, dead }
    }

    fn shard(&self, shard: u64, at: ObjectRef, runs: &ShardRuns) -> Upload {
        let header = self.header(Kind::Shard, at.number);
        let bytes = Arc::new(encode(&self.access.codec, &header, &encode_shard(runs), &[]));
        Upload { name: shard_name(shard, at), bytes, exclusive: false }
    }

    fn send_shards(&self, uploads: Vec<Upload>) {
        self.with(|state, fx| {
            for upload in uploads {
                let then: Then = Box::new(|me, result| me.shard_answered(result));
                fx.jobs.push(self.upload(upload, then));
            }
            self.send_root_if_ready(state, fx);
        });
    }

    fn shard_answered(&self, result: Result<(), ObjectError>) {
        self.with(|state, fx| {
            if let Err(error) = result {
                return self.end_root(state, Some(&error), fx);
            }
            if let Some(writing) = &mut state.roots.writing {
                writing.left -= 1;
            }
            self.send_root_if_ready(state, fx);
        });
    }

    fn send_root_if_ready(&self, state: &mut State, fx: &mut Effects) {
        let Some(writing) = state.roots.writing.as_ref().filter(|writing| writing.left == 0) else {
            return;
        };
        let number = state.roots.number + 1;
        let (header, bytes) = encode_root(
            &self.access.codec,
            &self.volume,
            number,
            state.roots.id,
            &writing.root,
            &self.env,
        );
        let upload = Upload { name: root_name(number), bytes: Arc::new(bytes), exclusive: true };
        let then: Then = Box::new(move |me, result| me.root_answered(number, header.id, result));
        fx.jobs.push(self.upload(upload, then));
    }

    fn root_answered(&self, number: u64, id: Id, result: Result<(), ObjectError>) {
        self.with(|state, fx| {
            if let Err(error) = result {
                return self.end_root(state, Some(&error), fx);
            }
            let Some(writing) = state.roots.writing.take() else { return };
            let now = self.env.clock.monotonic();
            let roots = &mut state.roots;
            let closed = writing.root.state == RootState::Closed;
            let unpinned = roots.note_dead(number, writing.root.pins, writing.dead, now);
            if unpinned.is_some_and(|root| root < self.inherited.root) {
                // What older owners left for it a sweep finds.
                roots.sweep_due = now + self.limits.grace;
            }
            (roots.number, roots.id, roots.shards) = (number, id, writing.shards);
            // What it needs no more stays until another root has followed.
            if roots.staged.iter().any(|name| !name.starts_with(SHARDS)) {
                roots.died.get_or_insert(now);
            }
            self.end_root(state, None, fx);
            if closed {
                // No root follows this one.
                state.failed = Some(ObjectError::ReadOnly);
            }
            // The next root is of who waits to make or delete a snapshot.
            if state.failed.is_none() && state.roots.pinning == 0 {
                self.root_if_due(state, fx);
            }
        });
    }

    /// No root is being written any more.
    pub(crate) fn end_root(
        &self,
        state: &mut State,
        error: Option<&ObjectError>,
        fx: &mut Effects,
    ) {
        if let Some(error) = error {
            self.fail(state, error, fx);
        }
        state.roots.writing = None;
        let result = || error.map_or(Ok(()), |error| Err(error.clone().into()));
        fx.ends.extend(state.roots.waiters.drain(..).map(|done| (done, result())));
    }

    /// Whether nothing is under way, or waits for its time, that writes or deletes objects. A sweep
    /// that is not due yet does not count.
    pub fn is_at_rest(&self) -> bool {
        let state = self.state.lock();
        let roots = &state.roots;
        let sends = !state.open.runs.is_empty() || !state.sealed.is_empty() || state.repacking;
        let writes = roots.writing.is_some() || roots.died.is_some();
        let deletes = roots.collecting || !roots.condemned.is_empty();
        let sweeps = roots.sweeping || self.env.clock.monotonic() >= roots.sweep_due;
        state.failed.is_some() || !(sends || writes || deletes || sweeps)
    }

    /// Does what time asks for: looks for a newer claim, writes a root if something has died, and
    /// deletes what no root needs and what nothing names.
    pub fn tick(&self) {
        self.ahead.drop_idle(self.env.clock.monotonic());
        if self.is_read_only() || self.failure().is_some() {
            return;
        }
        if let Err(error) = self.look() {
            tracing::warn!(%error, "a look for a newer owner");
            return;
        }
        self.with(|state, fx| {
            let now = self.env.clock.monotonic();
            if state.failed.is_some() {
                return;
            }
            self.seal_if_old(state, now, fx);
            let died = state.roots.died.is_some_and(|died| now >= died + self.limits.root_delay);
            if state.roots.writing.is_none() && died {
                self.start_root(state, fx);
            }
            self.collect(state, now, fx);
            self.sweep_if_due(state, now, fx);
            self.repack_if_due(state, now, fx);
        });
    }

    /// What nobody flushes, as discards of a volume that is at rest, is sent as well.
    fn seal_if_old(&self, state: &mut State, now: Duration, fx: &mut Effects) {
        if state.open.runs.is_empty() || state.unsealed.0 != state.next_seq {
            state.unsealed = (state.next_seq, now);
        } else if now >= state.unsealed.1 + self.limits.root_delay {
            self.seal(state, fx);
        }
    }

    fn collect(&self, state: &mut State, now: Duration, fx: &mut Effects) {
        let roots = &mut state.roots;
        if roots.collecting {
            return;
        }
        let due = |(since, _): &(Duration, String)| *since + self.limits.grace <= now;
        let count = roots.condemned.iter().take_while(|item| due(item)).count();
        let names: Vec<String> =
            roots.condemned.drain(..count.min(DELETES_PER_LOOK)).map(|(_, name)| name).collect();
        if names.is_empty() {
            return;
        }
        roots.collecting = true;
        let me = self.me();
        let run = move || -> Answer {
            let deleted = me.look().and_then(|()| me.delete(&names));
            Box::new(move || {
                if let Err(error) = deleted {
                    tracing::warn!(%error, "objects that no root needs are left in the store");
                }
                me.state.lock().roots.collecting = false;
            })
        };
        fx.jobs.push(Job { upload: None, after: Duration::ZERO, run: Box::new(run) });
    }

    pub(crate) fn delete(&self, names: &[String]) -> Result<(), ObjectError> {
        for name in names {
            self.access.insist(|store| store.delete(name))?;
            self.access.counters.deletes.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// From now on it ticks by itself, as long as somebody has it.
    pub fn tick_by_itself(&self) {
        let me = Arc::downgrade(&self.me());
        let run = move || -> Answer {
            Box::new(move || {
                if let Some(me) = me.upgrade() {
                    me.tick();
                    me.tick_by_itself();
                }
            })
        };
        self.access.executor.start(Job { upload: None, after: TICK, run: Box::new(run) });
    }
}
