//! Changes that wait for the server's answer: what they touch is unknown until it comes.

use std::sync::Arc;

use ferry_fs::{Attr, Ino};

use super::{Cache, Sight, State};
use crate::client::model::Name;
use crate::message::{Op, Outcome};

/// A change under way. Dropped without [`Cache::end`], it was not answered and never will be.
pub(in crate::client) struct Touch {
    cache: Arc<Cache>,
    epoch: u64,
    inos: Vec<Ino>,
    /// Those of which there were write leases: they are to be given back behind the change.
    held: Vec<Ino>,
    blind: bool,
    names: Vec<(Ino, Vec<u8>, Becomes)>,
}

impl Touch {
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

impl Drop for Touch {
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
    /// A change is no longer under way.
    pub(super) fn over(&mut self, touch: &mut Touch) {
        if std::mem::take(&mut touch.blind) {
            // Of what it has touched we know no more than that it may be any of them.
            self.blind -= 1;
            self.epoch += 1;
            self.walks.leave_all_out();
            self.nodes.values_mut().for_each(|node| node.attr = None);
            self.model.drop_contents_not_held();
        }
        self.moments += 1;
        let moment = self.moments;
        self.walks.leave_out(&touch.inos);
        for ino in touch.inos.drain(..) {
            let slot = self.slot(ino);
            slot.changing -= 1;
            slot.last = moment;
        }
    }
}

impl Cache {
    /// A change is about to be sent; `file` gives the inode of an open file. `None`: it touches nothing that is kept.
    pub(in crate::client) fn begin(
        self: &Arc<Self>,
        state: &mut State,
        op: &Op,
        file: impl Fn(u64) -> Option<Ino>,
    ) -> Option<Touch> {
        let mut blind = false;
        let (mut inos, mut names) = (Vec::new(), Vec::new());
        let mut child = |state: &State, dir: Ino, name: &[u8]| {
            let found = state.name(dir, name);
            match found {
                Name::Is(ino) => inos.push(ino),
                Name::Absent => {}
                Name::Unknown => blind = true,
            }
            found
        };
        match op {
            Op::Setattr { ino, .. } | Op::Setxattr { ino, .. } | Op::Removexattr { ino, .. } => {
                inos.push(*ino)
            }
            Op::Open { ino, flags, kill_suidgid, .. } if *kill_suidgid || flags & libc::O_TRUNC != 0 => {
                inos.push(*ino);
            }
            Op::Mknod { parent, name, .. }
            | Op::Mkdir { parent, name, .. }
            | Op::Symlink { parent, name, .. } => {
                inos.push(*parent);
                names.push((*parent, name.clone(), Becomes::Made));
            }
            Op::Create { parent, name, .. } => {
                // A name that is there after all may be opened, and cut off.
                child(state, *parent, name);
                inos.push(*parent);
                names.push((*parent, name.clone(), Becomes::Made));
            }
            Op::Link { ino, parent, name } => {
                inos.extend([*ino, *parent]);
                names.push((*parent, name.clone(), Becomes::Made));
            }
            Op::Unlink { parent, name } | Op::Rmdir { parent, name } => {
                child(state, *parent, name);
                inos.push(*parent);
                names.push((*parent, name.clone(), Becomes::Name(Name::Absent)));
            }
            Op::Rename { parent, name, new_parent, new_name, flags } => {
                let old = child(state, *parent, name);
                let new = child(state, *new_parent, new_name);
                inos.extend([*parent, *new_parent]);
                // Two names of one inode both stay.
                let moves =
                    matches!(old, Name::Is(_)) && new != Name::Unknown && old != new && !flags.exchange;
                let (left, taken) = if moves { (Name::Absent, old) } else { (Name::Unknown, Name::Unknown) };
                names.push((*parent, name.clone(), Becomes::Name(left)));
                names.push((*new_parent, new_name.clone(), Becomes::Name(taken)));
            }
            Op::Write { fh, .. } | Op::Fallocate { fh, .. } | Op::Copy { fh_out: fh, .. } => {
                inos.extend(file(*fh))
            }
            _ => return None,
        }
        inos.sort_unstable();
        inos.dedup();
        state.moments += 1;
        state.walks.leave_out(&inos);
        let moment = state.moments;
        for ino in &inos {
            let slot = state.slot(*ino);
            slot.changing += 1;
            (slot.last, slot.begun) = (moment, moment);
            if let Some(node) = state.nodes.get_mut(ino) {
                node.attr = None;
                state.model.contents.drop(*ino);
            }
        }
        names.iter().for_each(|(dir, name, _)| state.unknow(*dir, name));
        if blind {
            state.blind += 1;
            state.epoch += 1;
            state.walks.leave_all_out();
        }
        // What is known under write leases would not hold any more.
        let held = inos.iter().copied().filter(|ino| state.model.drop(*ino)).collect();
        Some(Touch { cache: Arc::clone(self), epoch: state.epoch, inos, held, blind, names })
    }

    /// A change is answered: `after` are attributes that may be kept, `empty`: the directory that was made is.
    pub(in crate::client) fn end(
        &self,
        mut touch: Touch,
        outcome: &Outcome,
        after: &[Attr],
        empty: bool,
    ) -> Vec<Ino> {
        let mut state = self.state.lock();
        let names = std::mem::take(&mut touch.names);
        state.over(&mut touch);
        let begun = Sight { epoch: touch.epoch, ..state.sight() };
        // The ordered stream answers in order: if none of ours is under way, this is how they all have left it.
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
