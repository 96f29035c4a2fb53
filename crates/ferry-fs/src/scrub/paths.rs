//! The names of damaged files. Names lead to inodes and not back, so one pass through all names
//! finds those that are wanted.

use crate::api::{Ino, ROOT};
use crate::keys::{self, Dentry, InodeRecord, Key};
use crate::scrub::report::Damage;
use ferry_journal::Journal;
use std::collections::{BTreeSet, HashMap};

/// A path is followed up through at most so many directories.
const DEPTH_MAX: usize = 4096;

/// A directory and the name in it.
type Name = (Ino, Vec<u8>);

/// Gives each damage of a file a path that leads there, where there is one.
pub(crate) fn resolve(journal: &Journal, damage: &mut [Damage]) {
    let mut wanted: BTreeSet<Ino> =
        damage.iter().filter_map(|d| d.location.ino).filter(|ino| *ino != ROOT).collect();
    let mut names: HashMap<Ino, Name> = HashMap::new();
    // Directories above are found by their parents' numbers, which their records hold.
    let mut above = HashMap::new();
    if !wanted.is_empty() {
        let mut visit = |key: &[u8], value: &ferry_journal::Value| {
            if let Some(Key::Dentry(dir, _, name)) = keys::parse(key)
                && let Ok(dentry) = Dentry::decode(value)
                && wanted.remove(&dentry.ino)
            {
                names.insert(dentry.ino, (dir, name.to_vec()));
            }
            !wanted.is_empty()
        };
        if let Err(error) = journal.scan(&keys::inode(0), &keys::inode_end(u64::MAX), &mut visit) {
            tracing::warn!(%error, "not all names of damaged files can be found");
        }
    }
    for at in damage.iter_mut().map(|damage| &mut damage.location) {
        at.path = at.ino.and_then(|ino| path_of(journal, ino, &names, &mut above));
    }
}

/// A path from the root to `ino`.
fn path_of(
    journal: &Journal,
    ino: Ino,
    names: &HashMap<Ino, Name>,
    above: &mut HashMap<Ino, Option<Name>>,
) -> Option<String> {
    let mut parts = Vec::new();
    let mut at = ino;
    while at != ROOT {
        if parts.len() >= DEPTH_MAX {
            return None;
        }
        let (dir, name) = match names.get(&at) {
            Some(found) => found.clone(),
            None => above.entry(at).or_insert_with(|| name_of_directory(journal, at)).clone()?,
        };
        parts.push(name.escape_ascii().to_string());
        at = dir;
    }
    if parts.is_empty() {
        return Some("/".into());
    }
    Some(parts.iter().rev().map(|part| format!("/{part}")).collect())
}

/// The name of a directory, in the directory above it.
fn name_of_directory(journal: &Journal, ino: Ino) -> Option<Name> {
    let parent = InodeRecord::decode(&journal.get(&keys::inode(ino)).ok()??).ok()?.parent;
    let mut found = None;
    let mut visit = |key: &[u8], value: &ferry_journal::Value| {
        let leads_there = Dentry::decode(value).is_ok_and(|dentry| dentry.ino == ino);
        if let Some(Key::Dentry(dir, _, name)) = keys::parse(key).filter(|_| leads_there) {
            found = Some((dir, name.to_vec()));
        }
        found.is_none()
    };
    journal.scan(&keys::dentry_from(parent, 0), &keys::dentry_end(parent), &mut visit).ok()?;
    found
}
