//! [`OpenSnapshots`]: which snapshots are open, and who uses them.

use crate::api::Errno;
use crate::local::carried::CarriedTrees;
use crate::snapdir::number::{TREES_MAX, Tree};
use ferry_env::Clock;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

/// Snapshots that are open at a time, at most; fewer where there is little memory. If more are
/// asked for, the one that nobody has used for the longest time is closed first.
pub(crate) const OPEN_MAX: usize = 8;
/// What nobody has used for so long is closed.
const IDLE: Duration = Duration::from_secs(60);
/// How often that is looked for.
const LOOK: Duration = Duration::from_secs(15);

/// Where snapshots come from.
pub(crate) trait Source: Send + Sync + 'static {
    /// An open snapshot.
    type Snapshot: Send + Sync + 'static;
    /// Opens the snapshot of this number. `ENOENT`: it was deleted. Waits.
    fn open(&self, number: u64) -> Result<Self::Snapshot, Errno>;
    /// Nobody uses it any more. Waits.
    fn close(&self, snapshot: Arc<Self::Snapshot>);
    /// This one has a tree now, behind all others. It does not wait.
    fn note_tree(&self, _number: u64) {}
    /// So many are open, or being opened or closed. It does not wait.
    fn note_open(&self, open: usize);
}

/// What is the case with a snapshot that is not simply closed.
enum Stage<S> {
    Opening,
    /// It was used last at this time.
    Open {
        snapshot: Arc<S>,
        users: usize,
        used: Duration,
    },
    /// A read of it failed: what it remembers of that must not outlast the reason. Its last user
    /// closes it.
    Spoiled {
        snapshot: Arc<S>,
        users: usize,
    },
    Closing,
}

struct State<S> {
    /// The numbers of the snapshots, by their trees.
    numbers: Vec<u64>,
    trees: HashMap<u64, Tree>,
    stages: HashMap<Tree, Stage<S>>,
    /// A thread looks for what nobody uses.
    watched: bool,
    /// Nothing is opened any more.
    ended: bool,
}

impl<S> State<S> {
    /// The one that nobody has used for the longest time, and not after `since`.
    fn unused(&self, since: Duration) -> Option<Tree> {
        let used = |(tree, stage): (&Tree, &Stage<S>)| match stage {
            Stage::Open { users: 0, used, .. } => Some((*used, *tree)),
            _ => None,
        };
        let oldest = self.stages.iter().filter_map(used).min();
        oldest.filter(|(used, _)| *used <= since).map(|(_, tree)| tree)
    }
}

/// The snapshots of a mount.
pub(crate) struct OpenSnapshots<S: Source> {
    source: S,
    clock: Arc<dyn Clock>,
    /// Trees begin here.
    first: usize,
    /// Snapshots that are open at a time, at most.
    open_max: usize,
    state: Mutex<State<S::Snapshot>>,
    /// A stage has changed, or a snapshot has one user less.
    changed: Condvar,
    /// Nothing is opened any more.
    ended: Condvar,
}

impl<S: Source> OpenSnapshots<S> {
    /// At most `open_max` are open. `known`: which trees there are, and where they begin.
    pub(crate) fn new(
        source: S,
        clock: Arc<dyn Clock>,
        known: CarriedTrees,
        open_max: usize,
    ) -> Arc<Self> {
        let first = (known.first % TREES_MAX as u64) as usize;
        let numbers: Vec<u64> = known.numbers.into_iter().take(TREES_MAX).collect();
        let trees = numbers.iter().enumerate().map(|(n, it)| (*it, Tree::behind(first, n)));
        let state = State {
            trees: trees.collect(),
            numbers,
            stages: HashMap::new(),
            watched: false,
            ended: false,
        };
        let (changed, ended) = (Condvar::new(), Condvar::new());
        let state = Mutex::new(state);
        Arc::new(Self { source, clock, first, open_max, state, changed, ended })
    }

    /// Which trees there are.
    pub(crate) fn carry(&self) -> CarriedTrees {
        CarriedTrees { first: self.first as u64, numbers: self.state.lock().numbers.clone() }
    }

    /// The tree of the snapshot with this number. `ENFILE`: too many snapshots were looked up.
    pub(crate) fn tree(&self, number: u64) -> Result<Tree, Errno> {
        let mut state = self.state.lock();
        if let Some(tree) = state.trees.get(&number) {
            return Ok(*tree);
        }
        if state.numbers.len() >= TREES_MAX {
            return Err(Errno(libc::ENFILE));
        }
        let tree = Tree::behind(self.first, state.numbers.len());
        state.numbers.push(number);
        state.trees.insert(number, tree);
        self.source.note_tree(number);
        Ok(tree)
    }

    /// Uses the snapshot, which is opened if it is not. Waits, also for others to be closed.
    /// `ESTALE`: it was deleted.
    pub(crate) fn with<T>(
        self: &Arc<Self>,
        tree: Tree,
        work: impl FnOnce(&S::Snapshot) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut user = User { open: self, tree, snapshot: self.enter(tree)?, spoils: false };
        let result = work(&user.snapshot);
        user.spoils = matches!(result, Err(Errno(libc::EIO)));
        result
    }

    fn enter(self: &Arc<Self>, tree: Tree) -> Result<Arc<S::Snapshot>, Errno> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return Err(Errno(libc::EIO));
            }
            let open = state.stages.len();
            match state.stages.get_mut(&tree) {
                Some(Stage::Open { snapshot, users, .. }) => {
                    *users += 1;
                    return Ok(Arc::clone(snapshot));
                }
                Some(_) => self.changed.wait(&mut state),
                None if open < self.open_max => return self.open(tree, &mut state),
                None => match state.unused(Duration::MAX) {
                    Some(unused) => self.close_one(unused, &mut state),
                    None => self.changed.wait(&mut state),
                },
            }
        }
    }

    /// Opens a snapshot for its first user.
    fn open(
        self: &Arc<Self>,
        tree: Tree,
        state: &mut MutexGuard<'_, State<S::Snapshot>>,
    ) -> Result<Arc<S::Snapshot>, Errno> {
        let number = *state.numbers.get(tree.index(self.first)).ok_or(Errno(libc::ESTALE))?;
        self.change(state, |stages| drop(stages.insert(tree, Stage::Opening)));
        let opened = MutexGuard::unlocked(state, || self.source.open(number));
        let opened = opened.map(Arc::new).map_err(|errno| match errno {
            Errno(libc::ENOENT) => Errno(libc::ESTALE),
            other => other,
        });
        let used = self.clock.monotonic();
        self.change(state, |stages| match &opened {
            Ok(snapshot) => {
                let snapshot = Arc::clone(snapshot);
                stages.insert(tree, Stage::Open { snapshot, users: 1, used });
            }
            Err(_) => drop(stages.remove(&tree)),
        });
        if !mem::replace(&mut state.watched, true) {
            let me = Arc::clone(self);
            let watch = Builder::new().name("ferry-snapdir".into()).spawn(move || me.watch());
            if let Err(error) = watch {
                tracing::debug!(%error, "snapshots stay open until there are too many");
                state.watched = false;
            }
        }
        opened
    }

    fn change(
        &self,
        state: &mut State<S::Snapshot>,
        change: impl FnOnce(&mut HashMap<Tree, Stage<S::Snapshot>>),
    ) {
        change(&mut state.stages);
        self.source.note_open(state.stages.len());
        self.changed.notify_all();
    }

    /// Closes a snapshot that nobody uses.
    fn close_one(&self, tree: Tree, state: &mut MutexGuard<'_, State<S::Snapshot>>) {
        let stage = state.stages.insert(tree, Stage::Closing);
        let Some(Stage::Open { snapshot, users: 0, .. } | Stage::Spoiled { snapshot, users: 0 }) =
            stage
        else {
            unreachable!("only what is open, and used by nobody, is closed");
        };
        MutexGuard::unlocked(state, || self.source.close(snapshot));
        self.change(state, |stages| drop(stages.remove(&tree)));
    }

    fn leave(&self, tree: Tree, spoils: bool) {
        let mut state = self.state.lock();
        let now = self.clock.monotonic();
        let Some(stage) = state.stages.get_mut(&tree) else {
            unreachable!("what is used stays open");
        };
        if let (Stage::Open { snapshot, users, .. }, true) = (&mut *stage, spoils) {
            *stage = Stage::Spoiled { snapshot: Arc::clone(snapshot), users: *users };
        }
        match stage {
            Stage::Open { users, used, .. } => {
                (*users, *used) = (*users - 1, now);
                self.changed.notify_all();
            }
            Stage::Spoiled { users, .. } => {
                *users -= 1;
                if *users == 0 {
                    self.close_one(tree, &mut state);
                }
            }
            Stage::Opening | Stage::Closing => unreachable!("what is used is open"),
        }
    }

    /// Closes what nobody uses, until nothing is open.
    fn watch(&self) {
        let mut state = self.state.lock();
        while !state.ended && !state.stages.is_empty() {
            self.ended.wait_for(&mut state, LOOK);
            self.close_idle(&mut state);
        }
        state.watched = false;
        self.changed.notify_all();
    }

    fn close_idle(&self, state: &mut MutexGuard<'_, State<S::Snapshot>>) {
        while let Some(since) = self.clock.monotonic().checked_sub(IDLE)
            && let Some(tree) = state.unused(since)
        {
            self.close_one(tree, state);
        }
    }

    /// From now on nothing is opened, and nobody waits for that.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
        self.ended.notify_all();
    }

    /// Closes all, behind [`OpenSnapshots::end`]. Waits for those that use them.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        while state.watched || !state.stages.is_empty() {
            match state.unused(Duration::MAX) {
                Some(tree) => self.close_one(tree, &mut state),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// A user of a snapshot, until it is dropped.
struct User<'a, S: Source> {
    open: &'a OpenSnapshots<S>,
    tree: Tree,
    snapshot: Arc<S::Snapshot>,
    /// A read of it failed.
    spoils: bool,
}

impl<S: Source> Drop for User<'_, S> {
    fn drop(&mut self) {
        self.open.leave(self.tree, self.spoils);
    }
}

#[cfg(test)]
mod tests;
