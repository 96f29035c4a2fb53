//! A directory's cached entries.
//!
//! A cache is *complete* or absent, so that a name that is not in it does not exist, and creating
//! or missing a name never reaches the home store. It is born complete with its directory, or by a
//! whole listing of a directory of at most [`LOAD_MAX`] entries; the owner of the inodes drops it
//! when all caches together are too large. Names of a directory without a cache are looked up one
//! by one in the journal until that has cost what a listing does: a program that uses more
//! directories than the caches hold pays at most twice what each way alone would have cost.

use crate::api::Ino;
use crate::keys::Dentry;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A directory with more entries than this is not cached, however much memory there is.
pub const LOAD_MAX: u64 = 1 << 16;
/// To look up one name in the journal costs as much as to list so many.
const LISTED_PER_LOOKUP: u64 = 4;

/// An entry as the cache holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirName {
    /// The name.
    pub name: Box<[u8]>,
    /// What it leads to.
    pub target: Dentry,
}

type Entries = BTreeMap<u64, DirName>;

/// A directory's cached entries, by cookie. Changes are made under the directory's exclusive inode
/// lock, filling and reading under the shared one; the lock in here is a leaf.
#[derive(Default)]
pub struct DirData {
    entries: Mutex<Option<Box<Entries>>>,
    used: AtomicBool,
    /// Names looked up in the journal since there was a cache.
    stored_lookups: AtomicU64,
}

/// What the cache knows of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// There is no cache: ask the journal.
    Unknown,
    /// The name does not exist; the cookie is the one to make it with, `None` if every
    /// disambiguator is taken.
    Absent(Option<u64>),
    /// The name's cookie and target.
    Present(u64, Dentry),
}

impl DirData {
    /// Finds `name`, whose hash starts at cookie `base`.
    pub fn find(&self, base: u64, name: &[u8]) -> Cached {
        let guard = self.entries.lock();
        let Some(entries) = guard.as_deref() else { return Cached::Unknown };
        self.used.store(true, Ordering::Relaxed);
        let mut free = base;
        for (cookie, entry) in entries.range(base..base + 256) {
            if &*entry.name == name {
                return Cached::Present(*cookie, entry.target);
            }
            if *cookie == free {
                free += 1;
            }
        }
        Cached::Absent((free < base + 256).then_some(free))
    }

    /// A name is looked up and there is no cache: whether to fill it first, in a directory of
    /// `size` entries, if one of `most` may be. One of many that ask at once is told so.
    pub fn is_worth_loading(&self, size: u64, most: u64) -> bool {
        let lookups = self.stored_lookups.fetch_add(1, Ordering::Relaxed) + 1;
        let worth = size <= most && lookups * LISTED_PER_LOOKUP >= size;
        if worth {
            self.stored_lookups.store(0, Ordering::Relaxed);
        }
        worth
    }

    /// Whether there is a cache.
    pub fn is_complete(&self) -> bool {
        self.entries.lock().is_some()
    }

    /// Takes `entries` as the whole directory, unless there is a cache already. Returns how many
    /// entries that added.
    pub fn fill(&self, entries: BTreeMap<u64, DirName>) -> usize {
        self.used.store(true, Ordering::Relaxed);
        let mut guard = self.entries.lock();
        if guard.is_some() {
            return 0;
        }
        guard.insert(Box::new(entries)).len()
    }

    /// Adds an entry, where there is a cache. Returns whether it did.
    pub fn insert(&self, cookie: u64, name: &[u8], target: Dentry) -> bool {
        let mut guard = self.entries.lock();
        let Some(entries) = guard.as_deref_mut() else { return false };
        entries.insert(cookie, DirName { name: name.into(), target }).is_none()
    }

    /// Removes an entry, where there is a cache. Returns whether it did.
    pub fn remove(&self, cookie: u64) -> bool {
        self.entries.lock().as_deref_mut().is_some_and(|entries| entries.remove(&cookie).is_some())
    }

    /// Appends up to `most` entries behind cookie `after` to `out`; `None` where there is no cache.
    pub fn list(&self, after: u64, most: usize, out: &mut Vec<(u64, DirName)>) -> Option<()> {
        let guard = self.entries.lock();
        let entries = guard.as_deref()?;
        self.used.store(true, Ordering::Relaxed);
        let rest = entries.range((Bound::Excluded(after), Bound::Unbounded));
        out.extend(rest.take(most).map(|(cookie, entry)| (*cookie, entry.clone())));
        Some(())
    }

    /// The names under which these are cached, for messages.
    pub fn names_of(&self, inodes: &BTreeSet<Ino>) -> Vec<(Ino, Box<[u8]>)> {
        let guard = self.entries.lock();
        let entries = guard.iter().flat_map(|entries| entries.values());
        let wanted = entries.filter(|entry| inodes.contains(&entry.target.ino));
        wanted.map(|entry| (entry.target.ino, entry.name.clone())).collect()
    }

    /// Forgets that the cache was used since the last call; says whether it was.
    pub fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// Drops the cache. Returns how many entries it held.
    pub fn clear(&self) -> usize {
        self.entries.lock().take().map_or(0, |entries| entries.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(ino: Ino) -> Dentry {
        Dentry { ino, kind: libc::S_IFREG }
    }

    #[test]
    fn equal_hashes_take_the_next_free_disambiguator() {
        let dir = DirData::default();
        assert_eq!(dir.find(512, b"a"), Cached::Unknown);
        assert!(!dir.insert(512, b"a", to(1)), "an absent cache takes nothing");
        assert_eq!(dir.fill(BTreeMap::new()), 0);
        for i in 0..256_u64 {
            let name = i.to_le_bytes();
            assert_eq!(dir.find(512, &name), Cached::Absent(Some(512 + i)));
            assert!(dir.insert(512 + i, &name, to(i + 2)));
        }
        assert_eq!(dir.find(512, b"one more"), Cached::Absent(None));
        assert_eq!(dir.find(512, &7_u64.to_le_bytes()), Cached::Present(519, to(9)));
        assert!(dir.remove(519) && !dir.remove(519));
        assert_eq!(
            dir.find(512, b"one more"),
            Cached::Absent(Some(519)),
            "a freed one is used again"
        );
        assert_eq!(dir.clear(), 255);
    }

    #[test]
    fn listing_goes_on_behind_the_cookie() {
        let dir = DirData::default();
        let mut out = Vec::new();
        assert!(dir.list(0, 10, &mut out).is_none());
        dir.fill(
            (3..9).map(|c| (c << 8, DirName { name: [c as u8].into(), target: to(c) })).collect(),
        );
        dir.list(4 << 8, 2, &mut out).expect("cached");
        assert_eq!(out.iter().map(|(c, _)| c >> 8).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(dir.names_of(&BTreeSet::from([8])), [(8, [8].into())]);
        assert!(dir.take_used() && !dir.take_used());
    }
}
