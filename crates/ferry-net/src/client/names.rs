//! The names of one directory, as far as a client knows them.

use std::sync::Arc;

use crate::rt::collections::HashMap;
use ferry_fs::Ino;

use crate::message::{self, Purpose};

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Is(Ino),
    Absent,
    Unknown,
}

/// All names of a directory as the server lists them.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    /// With `.` and `..`; a cookie is a place in this list.
    pub(super) names: Arc<[message::Name]>,
    /// What they were asked for for.
    pub(super) purpose: Purpose,
}

impl Whole {
    pub(super) fn new(names: &[message::Name], purpose: Purpose) -> Self {
        let numbered = names.iter().zip(1..);
        Self {
            names: numbered
                .map(|(name, cookie)| message::Name { cookie, ..name.clone() })
                .collect(),
            purpose,
        }
    }
}

/// The names of a directory, as far as they are known.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    known: HashMap<Vec<u8>, Name>,
    /// There are no others.
    complete: bool,
    /// None of them has changed since they came.
    whole: Option<Whole>,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.known.len() + self.whole.as_ref().map_or(0, |whole| whole.names.len())
    }

    pub(super) fn whole(&self) -> Option<&Whole> {
        self.whole.as_ref()
    }

    /// All of them are known; gives how many more are held.
    pub(super) fn learn_whole(&mut self, whole: Whole) -> isize {
        let before = self.len() as isize;
        let names = whole.names.iter().filter(|name| name.name != b"." && name.name != b"..");
        self.known = names.map(|name| (name.name.clone(), Name::Is(name.ino))).collect();
        (self.complete, self.whole) = (true, Some(whole));
        self.len() as isize - before
    }

    pub(super) fn get(&self, name: &[u8]) -> Name {
        let otherwise = if self.complete { Name::Absent } else { Name::Unknown };
        self.known.get(name).copied().unwrap_or(otherwise)
    }

    /// Sets what a name means; gives how many more are held.
    pub(super) fn set(&mut self, name: &[u8], what: Name) -> isize {
        let otherwise = if self.complete { Name::Absent } else { Name::Unknown };
        let before = self.len() as isize;
        if self.whole.is_some() && self.get(name) != what {
            self.whole = None;
        }
        if what == otherwise {
            self.known.remove(name);
        } else {
            self.known.insert(name.into(), what);
        }
        self.len() as isize - before
    }

    /// All of them, if they are known.
    pub(super) fn all(&self) -> Option<Vec<(Vec<u8>, Ino)>> {
        if !self.complete {
            return None;
        }
        let known = self.known.iter().map(|(name, what)| match what {
            Name::Is(ino) => Some((name.clone(), *ino)),
            Name::Absent | Name::Unknown => None,
        });
        known.collect()
    }

    /// The directory is new, or empty.
    pub(super) fn set_complete(&mut self) {
        self.complete = true;
    }
}
