//! Changes that wait for the server's answer: until it arrives, nothing is cached of what they
//! touch.

use std::sync::Arc;

use ferry_fs::{Attr, Ino};

use super::state::{Cache, State};
use super::version::CacheVersion;
use crate::client::names::Name;
use crate::message::{Naming, Op, Outcome, Use};

/// A change in flight. Dropped without [`Cache::end`], it was not answered and never will be.
pub(in crate::client) struct PendingEffect {
    cache: Arc<Cache>,
    returns: u64,
    inos: Vec<Ino>,
    /// Those of which there were write leases: they are to be returned behind the change.
    held: Vec<Ino>,
    blind: bool,
    names: Vec<(Ino, Vec<u8>, Becomes)>,
}

impl PendingEffect {
    pub(in crate::client) fn inos(&self) -> &[Ino] {
        &self.inos
    }

    pub(in crate::client) fn take_held(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.held)
    }

    /// It touches more than is known.
    pub(in crate::client) fn is_blind(&self) -> bool {
        self.blind
    }
}

impl Drop for PendingEffect {
    fn drop(&mut self) {
        let cache = Arc::clone(&self.cache);
        cache.state.lock().over(self);
    }
}

/// What a name means after the change, if that is made.
#[derive(Clone, Copy)]
enum Becomes {
    /// What the change has made, or linked.
    Made,
    Name(Name),
}

impl State {
    /// A change is no longer in flight.
    pub(super) fn over(&mut self, effect: &mut PendingEffect) {
        if std::mem::take(&mut effect.blind) {
            // Of what it has touched we know no more than that it may be any of them.
            self.blind -= 1;
            self.returns += 1;
            self.walks.leave_all_out();
            self.nodes.values_mut().for_each(|node| node.attr = None);
            self.model.drop_contents_not_held();
        }
        self.events += 1;
        let event = self.events;
        self.walks.leave_out(&effect.inos);
        for ino in effect.inos.drain(..) {
            let slot = self.slot(ino);
            slot.changing -= 1;
            slot.last = event;
        }
    }
}

impl Cache {
    /// A change is about to be sent; `file` gives the inode of an open file. `None`: it touches
    /// nothing that is cached.
    pub(in crate::client) fn begin(
        self: &Arc<Self>,
        state: &mut State,
        op: &Op,
        file: impl Fn(u64) -> Option<Ino>,
    ) -> Option<PendingEffect> {
        let info = op.info();
        let written = || info.inodes_with(Use::Written);
        if written().next().is_none() && info.to.is_none() {
            return None;
        }
        let mut inos: Vec<Ino> = written().chain(info.to.and_then(file)).collect();
        let targets = info.names().filter(|_| info.naming.touches_targets());
        let targets: Vec<Name> = targets.map(|(dir, name)| state.name(dir, name)).collect();
        let blind = targets.contains(&Name::Unknown);
        inos.extend(
            targets
                .iter()
                .filter_map(|target| if let Name::Is(ino) = target { Some(*ino) } else { None }),
        );
        let becomes = match info.naming {
            Naming::Nothing => [None, None],
            // A name that is there after all may be opened, and cut off.
            Naming::Adds | Naming::AddsOrOpens => [Some(Becomes::Made), None],
            Naming::Removes | Naming::RemovesDirectory => [Some(Becomes::Name(Name::Absent)), None],
            Naming::Moves | Naming::MovesLeavingWhiteout | Naming::Exchanges => {
                let (old, new) = (targets[0], targets[1]);
                // Two names of one inode both stay.
                let simple = info.naming == Naming::Moves;
                let moves =
                    matches!(old, Name::Is(_)) && new != Name::Unknown && old != new && simple;
                let (left, taken) =
                    if moves { (Name::Absent, old) } else { (Name::Unknown, Name::Unknown) };
                [Some(Becomes::Name(left)), Some(Becomes::Name(taken))]
            }
        };
        let names = info.names().zip(becomes.into_iter().flatten());
        let names: Vec<_> =
            names.map(|((dir, name), becomes)| (dir, name.to_vec(), becomes)).collect();
        inos.sort_unstable();
        inos.dedup();
        state.events += 1;
        state.walks.leave_out(&inos);
        let event = state.events;
        for ino in &inos {
            let slot = state.slot(*ino);
            slot.changing += 1;
            (slot.last, slot.begun) = (event, event);
            if let Some(node) = state.nodes.get_mut(ino) {
                node.attr = None;
                state.model.contents.drop(*ino);
            }
        }
        names.iter().for_each(|(dir, name, _)| state.unknow(*dir, name));
        if blind {
            state.blind += 1;
            state.returns += 1;
            state.walks.leave_all_out();
        }
        // What is known under write leases would not hold any more.
        let held = inos.iter().copied().filter(|ino| state.model.drop(*ino)).collect();
        Some(PendingEffect {
            cache: Arc::clone(self),
            returns: state.returns,
            inos,
            held,
            blind,
            names,
        })
    }

    /// A change is answered: `after` are attributes that may be cached, `empty`: the directory that
    /// was made is.
    pub(in crate::client) fn end(
        &self,
        mut effect: PendingEffect,
        outcome: &Outcome,
        after: &[Attr],
        empty: bool,
    ) -> Vec<Ino> {
        let mut state = self.state.lock();
        let names = std::mem::take(&mut effect.names);
        state.over(&mut effect);
        let begun = CacheVersion { returns: effect.returns, ..state.version() };
        // The ordered stream answers in order: if none of ours is in flight, this is how they all
        // have left it.
        for attr in after {
            if state.blind == 0 && state.may_keep(begun, attr.ino) {
                state.keep_attr(attr);
            }
        }
        let made = match outcome {
            Outcome::Entry { known: Some(known) } => Some(known.attr.ino),
            _ => None,
        };
        if !matches!(outcome, Outcome::Failed { .. } | Outcome::Busy {} | Outcome::Dropped {}) {
            let leased = |ino: Ino| after.iter().any(|attr| attr.ino == ino);
            for (dir, name, becomes) in &names {
                let what = match becomes {
                    Becomes::Made => made.map_or(Name::Unknown, Name::Is),
                    Becomes::Name(name) => *name,
                };
                if leased(*dir) && state.may_keep(begun, *dir) {
                    state.set_name(*dir, name, what);
                }
            }
            let made = made.filter(|made| empty && leased(*made) && !state.model.holds(*made));
            if let Some(made) = made.filter(|made| state.may_keep(begun, *made)) {
                state.nodes.entry(made).or_default().names.set_complete();
            }
        }
        state.surplus()
    }
}
