//! Which names differ, what becomes of each, and the names of inodes that were changed.
//!
//! A name is a directory's inode number and the name in it. So nothing in a directory differs when
//! only the directory was moved. Names that one side alone has are judged in this order:
//!
//! 1. The same file has the same path on both sides: only a directory above was replaced.
//! 2. The same file has lost a name and got another one: it was moved.
//! 3. Another file of the same kind has the path: it was replaced, as editors do. What counts is
//!    whether contents and attributes differ.
//! 4. All others were removed or made.

use super::Difference;
use super::inodes::{Inodes, Verdict, is_same_file};
use super::rows::{Rows, Values, side_by_side};
use crate::inspect::Inspector;
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::error::FsError;
use ferry_fs::keys::{self, BadRecord, Dentry, InodeRecord, Key};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A path is followed up through at most so many directories.
const DEPTH_MAX: usize = 1 << 16;

/// A name, and the inode that it leads to.
struct Name {
    dir: Ino,
    name: Box<[u8]>,
    ino: Ino,
}

/// A path of one side, and the inode that it leads to.
type Paths = BTreeSet<(Vec<u8>, Ino)>;

/// The names of directories, each with the directory above.
type Directories = HashMap<Ino, (Ino, Box<[u8]>)>;

/// What the keys of the two sides say.
#[derive(Default)]
pub(super) struct Keys {
    /// Inodes of which both sides have keys that are not equal.
    candidates: BTreeSet<Ino>,
    /// Names that one side alone has.
    names: [Vec<Name>; 2],
    /// Directories whose name is the same on both sides, and those of one side.
    directories: Directories,
    directories_of: [Directories; 2],
    /// The directory whose names come next has nothing but its number in common on both sides: all
    /// of its names are other ones.
    other_directory: Option<Ino>,
}

/// What was found so far.
#[derive(Default)]
pub(super) struct Found {
    pub(super) differences: BTreeSet<Difference>,
    /// Paths of the new side that are done with: the inode there may be a changed one, but the old
    /// side had another one there, or none.
    judged: BTreeSet<Vec<u8>>,
}

/// Compares all keys of inodes.
pub(super) fn compare(old: &Inspector, new: &Inspector) -> Result<Keys, FsError> {
    let all = |volume| Rows::new(volume, keys::inode(0), keys::inode_end(u64::MAX));
    let (mut found, mut bad) = (Keys::default(), None);
    side_by_side(all(old), all(new), &mut |key, values| {
        if let Err(error) = found.add(key, values) {
            bad.get_or_insert(error);
        }
    })?;
    bad.map_or(Ok(found), |error| Err(error.into()))
}

impl Keys {
    fn add(&mut self, key: &[u8], values: Values) -> Result<(), BadRecord> {
        let equal = values[0] == values[1];
        // The record of a directory comes before its names.
        match keys::parse(key) {
            Some(Key::Dentry(dir, _, name)) => {
                for (side, value) in values.iter().enumerate() {
                    let Some(value) = value else { continue };
                    let Dentry { ino, kind } = Dentry::decode(value)?;
                    if kind == libc::S_IFDIR {
                        let directories = match equal {
                            true => &mut self.directories,
                            false => &mut self.directories_of[side],
                        };
                        directories.insert(ino, (dir, name.into()));
                    }
                    if !equal || self.other_directory == Some(dir) {
                        self.names[side].push(Name { dir, name: name.into(), ino });
                    }
                }
            }
            Some(Key::Inode(ino)) if !equal => {
                if let [Some(old), Some(new)] = values {
                    let (old, new) = (InodeRecord::decode(&old)?, InodeRecord::decode(&new)?);
                    if may_differ(&old, &new) {
                        self.candidates.insert(ino);
                    }
                    if !is_same_file(&old, &new) {
                        self.other_directory = Some(ino);
                    }
                }
            }
            Some(Key::Xattr(ino, _) | Key::Extent(ino, _)) if !equal => {
                self.candidates.insert(ino);
            }
            _ => {}
        }
        Ok(())
    }

    /// The path of a name on one side.
    fn path(&self, side: usize, dir: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        let (mut parts, mut at) = (vec![name], dir);
        while at != ROOT {
            let above = self.directories_of[side].get(&at).or_else(|| self.directories.get(&at));
            match above {
                Some((dir, name)) if parts.len() < DEPTH_MAX => {
                    parts.push(name);
                    at = *dir;
                }
                _ => return Err(BadRecord { what: "directory" }.into()),
            }
        }
        Ok(parts.iter().rev().flat_map(|part| [&b"/"[..], part]).flatten().copied().collect())
    }

    fn paths(&self, side: usize) -> Result<Paths, FsError> {
        let of = |one: &Name| Ok((self.path(side, one.dir, &one.name)?, one.ino));
        self.names[side].iter().map(of).collect()
    }
}

/// Whether records alone tell of something that counts. Times and the number of names do not, and
/// the size of a directory is its number of names.
fn may_differ(old: &InodeRecord, new: &InodeRecord) -> bool {
    let of = |record: &InodeRecord| (record.mode, record.uid, record.gid, record.rdev);
    let is_directory = new.mode & libc::S_IFMT == libc::S_IFDIR;
    of(old) != of(new) || !is_directory && (old.size, &old.inline) != (new.size, &new.inline)
}

/// Judges the names that one side alone has.
pub(super) fn pair(keys: &Keys, inodes: &mut Inodes<'_>) -> Result<Found, FsError> {
    let (mut old, mut new) = (keys.paths(0)?, keys.paths(1)?);
    let mut found = Found::default();
    // The same file at the same path.
    let mut same = Vec::new();
    for one in old.intersection(&new) {
        if inodes.same_file(one.1)? {
            same.push(one.clone());
        }
    }
    for one in same {
        old.remove(&one);
        new.remove(&one);
    }
    // The same file at another path.
    let mut others: BTreeMap<Ino, Vec<Vec<u8>>> = BTreeMap::new();
    for (path, ino) in &new {
        others.entry(*ino).or_default().push(path.clone());
    }
    let mut moved = Vec::new();
    for (from, ino) in &old {
        if others.contains_key(ino) && inodes.same_file(*ino)? {
            let left = others.get_mut(ino).filter(|left| !left.is_empty());
            moved.extend(left.map(|left| (from.clone(), left.remove(0), *ino)));
        }
    }
    for (from, to, ino) in moved {
        old.remove(&(from.clone(), ino));
        new.remove(&(to.clone(), ino));
        found.differences.insert(Difference::Moved { from, to });
    }
    // Another file at the same path.
    let mut rest: BTreeMap<Vec<u8>, Ino> = new.into_iter().collect();
    for (path, ino) in old {
        let theirs = rest.get(&path).copied();
        let verdict = theirs.map(|theirs| inodes.compare(ino, theirs)).transpose()?.flatten();
        match verdict {
            Some(verdict) => {
                rest.remove(&path);
                found.note(verdict, &path);
                found.judged.insert(path);
            }
            None => {
                found.differences.insert(Difference::Removed(path));
            }
        }
    }
    for (path, _) in rest {
        found.judged.insert(path.clone());
        found.differences.insert(Difference::Made(path));
    }
    Ok(found)
}

/// Adds the names of inodes that both sides have and that were changed.
pub(super) fn add_changed(
    new: &Inspector,
    keys: &Keys,
    inodes: &mut Inodes<'_>,
    found: &mut Found,
) -> Result<(), FsError> {
    let mut changed = HashMap::new();
    for ino in &keys.candidates {
        // Where a rollback gave the number to another file, that one has the name now.
        if let Some(verdict) = inodes.compare(*ino, *ino)?
            && verdict != Verdict::Same
        {
            changed.insert(*ino, verdict);
        }
    }
    if let Some(verdict) = changed.remove(&ROOT) {
        found.note(verdict, b"/");
    }
    if changed.is_empty() {
        return Ok(());
    }
    // Names lead to inodes and not back: all of them are looked at.
    let mut rows = Rows::new(new, keys::inode(0), keys::inode_end(u64::MAX));
    while let Some((key, value)) = rows.next()? {
        let Some(Key::Dentry(dir, _, name)) = keys::parse(&key) else { continue };
        if let Some(verdict) = changed.get(&Dentry::decode(&value)?.ino) {
            let path = keys.path(1, dir, name)?;
            if !found.judged.contains(&path) {
                found.note(*verdict, &path);
            }
        }
    }
    Ok(())
}

impl Found {
    fn note(&mut self, verdict: Verdict, path: &[u8]) {
        self.differences.extend(match verdict {
            Verdict::Same => None,
            Verdict::Contents => Some(Difference::Contents(path.into())),
            Verdict::Attributes => Some(Difference::Attributes(path.into())),
        });
    }
}
