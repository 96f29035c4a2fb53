//! What walks bring: inodes and whole directories, before anybody asks for them.
//!
//! What is given back, or changed here, while a walk is under way is not taken from its answer:
//! that may have been read, or leased, before. Each walk keeps which inodes that are, for while
//! somebody removes a tree something is given back and changed all the time.

use crate::rt::collections::{HashMap, HashSet};

use ferry_fs::Ino;

use super::{Moment, State};
use crate::client::model::{Name, Whole};
use crate::message::{Found, Listed, Place, Purpose, Seen};

/// Beyond so many nothing is taken from the answer.
const STALE_MAX: usize = 1 << 16;

/// A walk under way.
#[derive(Default)]
struct UnderWay {
    /// Inodes that were given back since, or that the server changes for us.
    stale: HashSet<Ino>,
    /// Inodes that were changed here since.
    changed: HashSet<Ino>,
    /// What was asked for; whether the directory was leased then.
    places: Vec<(Place, bool)>,
}

/// Walks under way; `None`: nothing is taken from its answer.
#[derive(Default)]
pub(super) struct Walks {
    next: u64,
    under_way: HashMap<u64, Option<UnderWay>>,
    /// Inodes and directories that walks have brought.
    pub(super) brought: u64,
    pub(super) asked: u64,
}

impl Walks {
    /// These are given back, or changed by the server.
    pub(super) fn leave_out(&mut self, inos: &[Ino]) {
        self.add(inos, |walk| &mut walk.stale);
    }

    /// These are changed here.
    pub(super) fn changed(&mut self, inos: &[Ino]) {
        self.add(inos, |walk| &mut walk.changed);
    }

    fn add(&mut self, inos: &[Ino], to: impl Fn(&mut UnderWay) -> &mut HashSet<Ino>) {
        for walk in self.under_way.values_mut() {
            if let Some(under_way) = walk {
                to(under_way).extend(inos);
                if to(under_way).len() > STALE_MAX {
                    *walk = None;
                }
            }
        }
    }

    /// Nobody knows what is.
    pub(super) fn leave_all_out(&mut self) {
        self.under_way.values_mut().for_each(|walk| *walk = None);
    }
}

/// A directory in the way of somebody who walks.
pub(in crate::client) struct Stage {
    /// Its names.
    pub(in crate::client) entries: usize,
    /// Directories in it, with their names.
    pub(in crate::client) dirs: Vec<(Ino, Vec<u8>)>,
}

impl State {
    /// A walk is about to be asked for, by these names; gives its number.
    pub(in crate::client) fn begin_walk(&mut self, places: &[Place]) -> u64 {
        self.walks.next += 1;
        self.walks.asked += 1;
        let leased = |place: &Place| place.name != b"." && self.is_leased(place.parent);
        let places = places.iter().map(|place| (place.clone(), leased(place))).collect();
        let number = self.walks.next;
        self.walks.under_way.insert(number, Some(UnderWay { places, ..UnderWay::default() }));
        number
    }

    /// It will not be answered.
    pub(in crate::client) fn end_walk(&mut self, walk: u64) {
        self.walks.under_way.remove(&walk);
    }

    /// A walk is answered. Gives, for each inode, whether it is kept, and what is to be given back.
    pub(in crate::client) fn learn_walk(
        &mut self,
        (walk, purpose): (u64, Purpose),
        (seen, dirs, found): (&[Seen], &[Listed], &[Found]),
        now: Moment,
    ) -> (Vec<bool>, Vec<Ino>) {
        let under_way = self.walks.under_way.remove(&walk).flatten();
        let under_way = under_way.filter(|_| self.blind == 0 && self.is_valid(now));
        let (mut kept, mut back) = (Vec::new(), Vec::new());
        let fresh: HashSet<Ino> = seen
            .iter()
            .map(|seen| seen.known.attr.ino)
            .filter(|ino| {
                under_way
                    .as_ref()
                    .is_some_and(|walk| !walk.stale.contains(ino) && !walk.changed.contains(ino))
            })
            .filter(|ino| !self.shown.is_withdrawn(*ino))
            .collect();
        for Seen { known, writes, plain } in seen {
            let ino = known.attr.ino;
            let is_fresh = fresh.contains(&ino);
            kept.push(is_fresh);
            if self.model.holds(ino) {
                continue;
            }
            match (is_fresh, *writes) {
                (true, true) => self.hold(known.attr, *plain),
                (true, false) => self.keep_attr(&known.attr),
                (false, true) => back.push(ino),
                (false, false) => {}
            }
        }
        for Listed { ino, names } in dirs.iter().filter(|dir| fresh.contains(&dir.ino)) {
            let whole = Whole::new(&names.0, purpose);
            if self.model.holds(*ino) {
                self.model.learn_whole(*ino, whole);
            } else {
                let node = self.nodes.entry(*ino).or_default();
                self.names = self.names.saturating_add_signed(node.names.learn_whole(whole));
            }
        }
        // The server has found these inodes under these names, in directories that nobody else has
        // changed meanwhile. Names that were changed here since are known.
        if let Some(walk) = under_way {
            for Found { place, ino } in found {
                let Some((Place { parent, name }, true)) = walk.places.get(*place as usize) else {
                    continue;
                };
                let still = !walk.stale.contains(parent)
                    && (self.model.holds(*parent) || !walk.changed.contains(parent));
                if still && fresh.contains(ino) && self.name(*parent, name) == Name::Unknown {
                    self.set_name(*parent, name, Name::Is(*ino));
                }
            }
        }
        self.walks.brought += fresh.len() as u64;
        back.extend(self.surplus());
        back.extend(self.model.surplus());
        (kept, back)
    }

    /// A directory, if all is known of it that somebody with this purpose will ask for.
    pub(in crate::client) fn stage(&self, dir: Ino, purpose: Purpose) -> Option<Stage> {
        if self.blind > 0 {
            return None;
        }
        let held = self.model.names_of(dir);
        if purpose == (Purpose::Remove {}) && held.is_none() {
            return None;
        }
        let names = held.or_else(|| self.nodes.get(&dir).map(|node| &node.names))?;
        if self.model.is_own(dir) {
            // It was made here, and so was what is in it, mostly.
            return Some(Stage { entries: names.len(), dirs: Vec::new() });
        }
        let whole = names.whole().filter(|whole| whole.purpose >= purpose)?;
        let inside = whole.names.iter().filter(|name| name.kind == libc::S_IFDIR);
        let inside = inside.filter(|name| name.name != b"." && name.name != b"..");
        let dirs = inside.map(|name| (name.ino, name.name.clone())).collect();
        Some(Stage { entries: whole.names.len(), dirs })
    }
}
