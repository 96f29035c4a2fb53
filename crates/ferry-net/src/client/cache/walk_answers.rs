//! What the cache takes from the answers to walks.

use crate::rt::collections::HashSet;
use ferry_fs::Ino;

use super::ahead::UnderWay;
use super::state::State;
use crate::client::clock_reading::ClockReading;
use crate::client::names::{Name, Whole};
use crate::message::{DirName, Found, Listed, Purpose, Seen};

/// A directory that a walk passes.
pub(in crate::client) struct Stage {
    /// Its names.
    pub(in crate::client) entries: usize,
    /// Directories in it, with their names.
    pub(in crate::client) dirs: Vec<(Ino, Vec<u8>)>,
}
impl State {
    /// A walk is about to be asked for, by these names; gives its number.
    pub(in crate::client) fn begin_walk(&mut self, names: &[DirName]) -> u64 {
        self.walks.next += 1;
        self.walks.asked += 1;
        let leased = |name: &DirName| name.name != b"." && self.is_leased(name.parent);
        let names = names.iter().map(|name| (name.clone(), leased(name))).collect();
        let number = self.walks.next;
        self.walks.under_way.insert(number, Some(UnderWay { names, ..UnderWay::default() }));
        number
    }

    /// It will not be answered.
    pub(in crate::client) fn end_walk(&mut self, walk: u64) {
        self.walks.under_way.remove(&walk);
    }

    /// A walk is answered. Gives, for each inode, whether it is cached, and what is to be returned.
    pub(in crate::client) fn learn_walk(
        &mut self,
        (walk, purpose): (u64, Purpose),
        (seen, dirs, found): (&[Seen], &[Listed], &[Found]),
        now: ClockReading,
    ) -> (Vec<bool>, Vec<Ino>) {
        let under_way = self.walks.under_way.remove(&walk).flatten();
        let under_way = under_way.filter(|_| self.blind == 0 && self.is_valid(now));
        let (mut are_fresh, mut back) = (Vec::new(), Vec::new());
        let fresh: HashSet<Ino> = seen
            .iter()
            .map(|seen| seen.known.attr.ino)
            .filter(|ino| {
                under_way
                    .as_ref()
                    .is_some_and(|walk| !walk.stale.contains(ino) && !walk.changed.contains(ino))
            })
            .filter(|ino| !self.kernel_cached.is_withdrawn(*ino))
            .collect();
        for Seen { known, writes, plain } in seen {
            let ino = known.attr.ino;
            let is_fresh = fresh.contains(&ino);
            are_fresh.push(is_fresh);
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
            for Found { index, ino } in found {
                let Some((DirName { parent, name }, true)) = walk.names.get(*index as usize) else {
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
        (are_fresh, back)
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
