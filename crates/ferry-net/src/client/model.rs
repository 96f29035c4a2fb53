//! What this client knows of inodes on which it has write leases, and what its own changes make of
//! that: it decides them alone.
//!
//! * MODEL-1: a change is decided as [`ferry_fs::LocalFs`] decides it, with the same attributes,
//!   times and errors; `tests` hold the two against each other. Where what is known does not
//!   suffice, nothing is decided ([`Not`]), and nothing is changed.
//! * MODEL-2: `blocks` and access times are estimates: both change at the server without a change
//!   of the protocol.

use crate::rt::collections::HashMap;
use std::sync::Arc;

use ferry_fs::posix::{self, is_dir};
use ferry_fs::{Attr, Ino, RenameFlags, SYMLINK_MAX, SetAttr, Timestamp};

use super::contents::Contents;
use super::names::{Name, Names, Whole};
use crate::message::{self, Caller, Known, OFFSET_MAX, Op, Outcome};

/// Inodes and names that are held; beyond this those used longest ago are returned.
const HELD_MAX: usize = 1 << 18;
/// Inodes of them. With those that are read-leased fewer than a server gives to a session.
const HELD_INODES_MAX: usize = 100_000;
/// What a file's space is counted in.
const BLOCK: u64 = 4096;
/// The unit of `blocks`.
const SECTOR: u64 = 512;

/// An inode under a write lease.
#[derive(Debug)]
struct Held {
    attr: Attr,
    /// It has no extended attributes, and no ACL.
    plain: bool,
    names: Names,
    /// The symbolic link's target: it was made here.
    target: Option<Box<[u8]>>,
    /// Of a directory that was made here: the one above it.
    parent: Option<Ino>,
    /// When it was used last, and since when it is held, as the model counts.
    used: u64,
    since: u64,
}

/// Why a change is not decided here.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Not {
    /// It fails with this errno, here as there.
    Possible(i32),
    /// Write leases on these are missing.
    Held(Vec<Ino>),
    /// What this name means is not known.
    Named(Ino, Vec<u8>),
    /// Something else is not known.
    Known,
}

/// A change as it was decided.
#[derive(Debug)]
pub(super) struct Made {
    /// What the server would answer. The inode of an entry has stamp 0.
    pub(super) outcome: Outcome,
    /// What it has touched; nothing: there is nothing to be changed.
    pub(super) touched: Vec<Ino>,
    /// A new inode has taken the number.
    pub(super) fresh: bool,
}

impl Made {
    fn done(touched: Vec<Ino>) -> Self {
        Self { outcome: Outcome::Done {}, touched, fresh: false }
    }
}

type Decided = Result<Made, Not>;

fn blocks_of(size: u64) -> u64 {
    size.div_ceil(BLOCK) * (BLOCK / SECTOR)
}

impl Held {
    fn set_attributes(&mut self, set: &SetAttr, at: Timestamp) {
        // A size and a mode are set one after the other, the second without the kernel's own time.
        let ctime = set.ctime.filter(|_| set.size.is_none() || set.mode.is_none());
        posix::set_attributes(&mut self.attr, &SetAttr { ctime, ..*set }, at);
        if let Some(size) = set.size {
            self.attr.size = size;
            self.attr.blocks = self.attr.blocks.min(blocks_of(size));
        }
    }

    /// The directory has so many entries and subdirectories more.
    fn count(&mut self, entries: i64, subdirectories: i64, at: Timestamp) {
        posix::count_entries(&mut self.attr, entries, subdirectories as i32, at);
    }

    /// It loses a name.
    fn drop_name(&mut self, at: Timestamp) {
        posix::drop_link(&mut self.attr, at);
    }

    /// Whether its name may go, when it is replaced by a directory or removed as one.
    fn removable(&self, as_dir: bool) -> Result<(), Not> {
        let allowed = posix::check_removable(self.attr.mode, self.attr.size, as_dir);
        allowed.map_err(|errno| Not::Possible(errno.0))
    }
}

/// A node that is to be made.
struct New<'n> {
    mode: u32,
    rdev: u32,
    target: Option<&'n [u8]>,
}

/// All that is held.
#[derive(Debug, Default)]
pub(super) struct Model {
    inodes: HashMap<Ino, Held>,
    names: usize,
    /// Of files that are held, and of those that are read-leased.
    pub(super) contents: Contents,
    tick: u64,
}

impl Model {
    pub(super) fn len(&self) -> usize {
        self.inodes.len()
    }

    pub(super) fn names(&self) -> usize {
        self.names
    }

    pub(super) fn holds(&self, ino: Ino) -> bool {
        self.inodes.contains_key(&ino)
    }

    /// Now, as the model counts.
    pub(super) fn tick(&self) -> u64 {
        self.tick
    }

    /// Whether it is held all the time since then.
    pub(super) fn held_since(&self, ino: Ino, tick: u64) -> bool {
        self.inodes.get(&ino).is_some_and(|held| held.since <= tick)
    }

    pub(super) fn attr(&self, ino: Ino) -> Option<Attr> {
        self.inodes.get(&ino).map(|held| held.attr)
    }

    /// It is known to have no extended attributes, and no ACL.
    pub(super) fn is_plain(&self, ino: Ino) -> bool {
        self.inodes.get(&ino).is_some_and(|held| held.plain)
    }

    pub(super) fn name(&self, dir: Ino, name: &[u8]) -> Name {
        self.inodes.get(&dir).map_or(Name::Unknown, |held| held.names.get(name))
    }

    /// A name was looked up.
    pub(super) fn learn_name(&mut self, dir: Ino, name: &[u8], what: Name) {
        if let Some(held) = self.inodes.get_mut(&dir) {
            self.names = self.names.saturating_add_signed(held.names.set(name, what));
        }
    }

    /// The server counts the space.
    pub(super) fn learn_blocks(&mut self, ino: Ino, blocks: u64) {
        if let Some(held) = self.inodes.get_mut(&ino) {
            held.attr.blocks = blocks;
        }
    }

    /// Reads cached contents.
    pub(super) fn read(&mut self, ino: Ino, offset: u64, out: &mut [u8]) -> Option<usize> {
        let len = self.contents.read(ino, offset, out)?;
        self.tick += 1;
        if let Some(held) = self.inodes.get_mut(&ino) {
            held.used = self.tick;
        }
        Some(len)
    }

    /// A symbolic link's target, if it is known.
    pub(super) fn target(&self, ino: Ino) -> Option<Vec<u8>> {
        let held =
            self.inodes.get(&ino).filter(|held| held.attr.mode & libc::S_IFMT == libc::S_IFLNK)?;
        held.target.as_deref().map(<[u8]>::to_vec)
    }

    /// All names of a directory are known.
    pub(super) fn learn_whole(&mut self, dir: Ino, whole: Whole) {
        if let Some(held) = self.inodes.get_mut(&dir) {
            self.names = self.names.saturating_add_signed(held.names.learn_whole(whole));
        }
    }

    /// What is known of a directory's names.
    pub(super) fn names_of(&self, dir: Ino) -> Option<&Names> {
        self.inodes.get(&dir).map(|held| &held.names)
    }

    /// Whether it is a directory that was made here.
    pub(super) fn is_own(&self, dir: Ino) -> bool {
        self.inodes.get(&dir).is_some_and(|held| held.parent.is_some())
    }

    /// The names of a directory with their inodes and types (0: not known), if all are known; a
    /// cookie is a place in the list.
    pub(super) fn list(&self, dir: Ino) -> Option<Arc<[message::Name]>> {
        let held = self.inodes.get(&dir)?;
        if let Some(whole) = held.names.whole() {
            return Some(Arc::clone(&whole.names));
        }
        let (parent, all) = (held.parent?, held.names.all()?);
        let kind = |ino| self.inodes.get(&ino).map_or(0, |held| held.attr.mode & libc::S_IFMT);
        let dots = [(b".".to_vec(), dir, libc::S_IFDIR), (b"..".to_vec(), parent, libc::S_IFDIR)];
        let all = dots.into_iter().chain(all.into_iter().map(|(name, ino)| (name, ino, kind(ino))));
        let numbered = all.zip(1..);
        Some(
            numbered
                .map(|((name, ino, kind), cookie)| message::Name { name, ino, kind, cookie })
                .collect(),
        )
    }

    /// What was read of files that are not held may have changed.
    pub(super) fn drop_contents_not_held(&mut self) {
        let Self { inodes, contents, .. } = self;
        contents.retain(|ino| inodes.contains_key(&ino));
    }

    /// The file was read.
    pub(super) fn was_read(&mut self, ino: Ino, at: Timestamp) {
        if let Some(Held { attr, .. }) = self.inodes.get_mut(&ino)
            && attr.atime <= attr.mtime.max(attr.ctime)
        {
            attr.atime = at;
        }
    }

    /// A write lease was granted.
    pub(super) fn enter(&mut self, attr: Attr, plain: bool, names: Names) {
        self.tick += 1;
        self.names += names.len();
        let mut held = Held {
            attr,
            plain,
            names,
            target: None,
            parent: None,
            used: self.tick,
            since: self.tick,
        };
        if is_dir(attr.mode) && attr.size == 0 {
            held.names.set_complete();
        }
        if let Some(old) = self.inodes.insert(attr.ino, held) {
            self.names -= old.names.len();
        }
        self.contents.drop(attr.ino);
    }

    /// It is returned.
    pub(super) fn drop(&mut self, ino: Ino) -> bool {
        let held = self.inodes.remove(&ino);
        let Some(held) = held else { return false };
        self.names -= held.names.len();
        self.contents.drop(ino);
        true
    }

    /// Everything is returned.
    pub(super) fn clear(&mut self) -> Vec<Ino> {
        (self.names, self.contents) = (0, Contents::default());
        self.inodes.drain().map(|(ino, _)| ino).collect()
    }

    /// Those used longest ago, where there are too many.
    pub(super) fn surplus(&mut self) -> Vec<Ino> {
        if self.inodes.len() + self.names <= HELD_MAX && self.inodes.len() <= HELD_INODES_MAX {
            return Vec::new();
        }
        let mut used: Vec<u64> = self.inodes.values().map(|held| held.used).collect();
        let middle = used.len() / 2;
        let (_, middle, _) = used.select_nth_unstable(middle);
        let old: Vec<Ino> = self
            .inodes
            .iter()
            .filter(|(_, held)| held.used < *middle)
            .map(|(ino, _)| *ino)
            .collect();
        old.iter().for_each(|ino| {
            self.drop(*ino);
        });
        old
    }

    /// Decides a change at the time `at`. What is made takes `number`; `file` is the inode of the
    /// open file that it names. An append becomes a write at the end.
    pub(super) fn make(
        &mut self,
        op: &mut Op,
        caller: &Caller,
        at: Timestamp,
        number: Option<Ino>,
        file: Option<Ino>,
    ) -> Decided {
        let made = match op {
            Op::Mknod { parent, name, mode, rdev } => {
                let device = match *mode & libc::S_IFMT {
                    libc::S_IFCHR | libc::S_IFBLK => true,
                    libc::S_IFREG | libc::S_IFIFO | libc::S_IFSOCK => false,
                    _ => return Err(Not::Known),
                };
                let mode = *mode & (libc::S_IFMT | 0o7777);
                let new = New { mode, rdev: if device { *rdev } else { 0 }, target: None };
                self.make_node((*parent, name), &new, caller, at, number)
            }
            Op::Mkdir { parent, name, mode } => {
                let new = New { mode: libc::S_IFDIR | *mode & 0o1777, rdev: 0, target: None };
                self.make_node((*parent, name), &new, caller, at, number)
            }
            Op::Symlink { parent, name, target } => {
                if target.is_empty() || target.len() > SYMLINK_MAX || target.contains(&0) {
                    return Err(Not::Known);
                }
                let new = New { mode: libc::S_IFLNK | 0o777, rdev: 0, target: Some(target) };
                self.make_node((*parent, name), &new, caller, at, number)
            }
            Op::Create { parent, name, mode, flags, .. } => {
                let new = New { mode: libc::S_IFREG | *mode & 0o7777, rdev: 0, target: None };
                match self.make_node((*parent, name), &new, caller, at, number) {
                    // The file that is there is opened.
                    Err(Not::Possible(libc::EEXIST)) if *flags & libc::O_EXCL == 0 => {
                        Err(Not::Known)
                    }
                    made => made,
                }
            }
            Op::Link { ino, parent, name } => self.link(*ino, (*parent, name), at),
            Op::Unlink { parent, name } => self.remove((*parent, name), false, at),
            Op::Rmdir { parent, name } => self.remove((*parent, name), true, at),
            Op::Rename { parent, name, new_parent, new_name, flags } => {
                self.rename((*parent, name), (*new_parent, new_name), *flags, at)
            }
            Op::Setattr { ino, set, .. } => self.setattr(*ino, set, at),
            Op::Open { ino, flags, kill_suidgid, .. } if *flags & libc::O_TRUNC != 0 => {
                let set =
                    SetAttr { size: Some(0), kill_suidgid: *kill_suidgid, ..SetAttr::default() };
                let made = self.setattr(*ino, &set, at)?;
                Ok(Made { outcome: Outcome::Done {}, ..made })
            }
            Op::Write { offset, data, append, kill_suidgid, .. } => {
                let ino = file.ok_or(Not::Known)?;
                self.write(ino, offset, (data.as_slice(), append, *kill_suidgid), at)
            }
            _ => Err(Not::Known),
        }?;
        self.tick += 1;
        for ino in &made.touched {
            if let Some(held) = self.inodes.get_mut(ino) {
                held.used = self.tick;
            }
        }
        Ok(made)
    }

    fn held(&mut self, ino: Ino) -> &mut Held {
        self.inodes.get_mut(&ino).expect("it was looked at before")
    }

    fn all_held(&self, inos: &[Ino]) -> Result<(), Not> {
        let missing: Vec<Ino> = inos.iter().copied().filter(|ino| !self.holds(*ino)).collect();
        if missing.is_empty() { Ok(()) } else { Err(Not::Held(missing)) }
    }

    /// What a name means in a directory that is held, and is one.
    fn find(&self, dir: Ino, name: &[u8]) -> Result<Option<Ino>, Not> {
        let held = self.inodes.get(&dir).ok_or_else(|| Not::Held(vec![dir]))?;
        if !is_dir(held.attr.mode) || held.attr.nlink == 0 {
            return Err(Not::Known);
        }
        if posix::check_name(name).is_err() {
            return Err(Not::Known);
        }
        match held.names.get(name) {
            Name::Is(ino) => Ok(Some(ino)),
            Name::Absent => Ok(None),
            Name::Unknown => Err(Not::Named(dir, name.into())),
        }
    }

    fn make_node(
        &mut self,
        (parent, name): (Ino, &[u8]),
        new: &New<'_>,
        caller: &Caller,
        at: Timestamp,
        number: Option<Ino>,
    ) -> Decided {
        if self.find(parent, name)?.is_some() {
            return Err(Not::Possible(libc::EEXIST));
        }
        let ino = number.ok_or(Not::Known)?;
        let dir = self.held(parent);
        // Its default ACL would be inherited.
        if !dir.plain {
            return Err(Not::Known);
        }
        let directory = is_dir(new.mode);
        let above = (dir.attr.mode, dir.attr.gid);
        let (mut mode, gid) = posix::inherit_group(above, (new.mode, caller.gid));
        if new.target.is_none() {
            mode &= !(caller.umask & 0o777);
        }
        dir.count(1, i64::from(directory), at);
        let attr = Attr {
            ino,
            mode,
            nlink: posix::first_links(mode),
            uid: caller.uid,
            gid,
            rdev: new.rdev,
            size: new.target.map_or(0, |target| target.len() as u64),
            blocks: 0,
            atime: at,
            mtime: at,
            ctime: at,
        };
        self.learn_name(parent, name, Name::Is(ino));
        self.enter(attr, true, Names::default());
        let made = self.held(ino);
        match mode & libc::S_IFMT {
            libc::S_IFREG => self.contents.set(ino, Vec::new()),
            libc::S_IFLNK => made.target = new.target.map(Box::from),
            libc::S_IFDIR => made.parent = Some(parent),
            _ => {}
        }
        let outcome = Outcome::Entry { known: Some(Known { attr, stamp: 0, capability: 0 }) };
        Ok(Made { outcome, touched: vec![parent, ino], fresh: true })
    }

    fn link(&mut self, ino: Ino, (parent, name): (Ino, &[u8]), at: Timestamp) -> Decided {
        self.all_held(&[ino, parent])?;
        let found = self.find(parent, name)?;
        let held = self.held(ino);
        if is_dir(held.attr.mode) {
            return Err(Not::Possible(libc::EPERM));
        }
        if found.is_some() {
            return Err(Not::Possible(libc::EEXIST));
        }
        // One without a name may have been made without one.
        if held.attr.nlink == 0 {
            return Err(Not::Known);
        }
        held.attr.nlink += 1;
        held.attr.ctime = at;
        let attr = held.attr;
        self.held(parent).count(1, 0, at);
        self.learn_name(parent, name, Name::Is(ino));
        let outcome = Outcome::Entry { known: Some(Known { attr, stamp: 0, capability: 0 }) };
        Ok(Made { outcome, touched: vec![ino, parent], fresh: false })
    }

    fn remove(&mut self, (parent, name): (Ino, &[u8]), as_dir: bool, at: Timestamp) -> Decided {
        let child = self.find(parent, name)?.ok_or(Not::Possible(libc::ENOENT))?;
        self.all_held(&[child])?;
        let held = self.held(child);
        held.removable(as_dir)?;
        held.drop_name(at);
        self.held(parent).count(-1, -i64::from(as_dir), at);
        self.learn_name(parent, name, Name::Absent);
        Ok(Made::done(vec![parent, child]))
    }

    fn rename(
        &mut self,
        (parent, name): (Ino, &[u8]),
        (new_parent, new_name): (Ino, &[u8]),
        flags: RenameFlags,
        at: Timestamp,
    ) -> Decided {
        self.all_held(&[parent, new_parent])?;
        let (from, to) = (self.find(parent, name)?, self.find(new_parent, new_name)?);
        // What a whiteout makes at the old name the server numbers.
        if flags.exchange && flags.no_replace || flags.whiteout {
            return Err(Not::Known);
        }
        let source = from.ok_or(Not::Possible(libc::ENOENT))?;
        if flags.exchange && to.is_none() {
            return Err(Not::Possible(libc::ENOENT));
        }
        if flags.no_replace && to.is_some() {
            return Err(Not::Possible(libc::EEXIST));
        }
        let children: Vec<Ino> = [Some(source), to].into_iter().flatten().collect();
        self.all_held(&children)?;
        let dirs: Vec<bool> =
            children.iter().map(|ino| is_dir(self.held(*ino).attr.mode)).collect();
        // Whether a directory would come to lie below itself is not known here.
        if parent != new_parent && (dirs[0] || flags.exchange && dirs[1]) {
            return Err(Not::Known);
        }
        let mut touched = vec![parent, new_parent];
        touched.extend(&children);
        touched.sort_unstable();
        touched.dedup();
        if flags.exchange {
            children.iter().for_each(|ino| self.held(*ino).attr.ctime = at);
            self.held(parent).count(0, 0, at);
            self.held(new_parent).count(0, 0, at);
            self.learn_name(parent, name, Name::Is(children[1]));
            self.learn_name(new_parent, new_name, Name::Is(source));
            return Ok(Made::done(touched));
        }
        if to == Some(source) {
            return Ok(Made::done(Vec::new()));
        }
        if let Some(victim) = to {
            let held = self.held(victim);
            held.removable(dirs[0])?;
            held.drop_name(at);
        }
        self.held(source).attr.ctime = at;
        let moved = i64::from(dirs[0]);
        self.held(parent).count(-1, -moved, at);
        let replaced = to.is_some();
        let victim_dir = i64::from(replaced && dirs[1]);
        self.held(new_parent).count(i64::from(!replaced), moved - victim_dir, at);
        self.learn_name(parent, name, Name::Absent);
        self.learn_name(new_parent, new_name, Name::Is(source));
        Ok(Made::done(touched))
    }

    fn setattr(&mut self, ino: Ino, set: &SetAttr, at: Timestamp) -> Decided {
        self.all_held(&[ino])?;
        let held = self.held(ino);
        let regular = held.attr.mode & libc::S_IFMT == libc::S_IFREG;
        if set.size.is_some_and(|size| !regular || size > OFFSET_MAX) {
            return Err(Not::Known);
        }
        // An ACL changes with the mode; a file may have capabilities to lose.
        if !held.plain && (set.mode.is_some() || set.kill_suidgid) {
            return Err(Not::Known);
        }
        held.set_attributes(set, at);
        let attr = held.attr;
        if let Some(size) = set.size {
            self.contents.edit(ino, size, |contents| contents.resize(size as usize, 0));
        }
        Ok(Made { outcome: Outcome::Attributes { attr }, touched: vec![ino], fresh: false })
    }

    fn write(
        &mut self,
        ino: Ino,
        offset: &mut u64,
        (data, append, kill): (&[u8], &mut bool, bool),
        at: Timestamp,
    ) -> Decided {
        let len = data.len() as u64;
        self.all_held(&[ino])?;
        let held = self.held(ino);
        if kill && !held.plain {
            return Err(Not::Known);
        }
        let start = if *append { held.attr.size } else { *offset };
        let end = start.checked_add(len).filter(|end| *end <= OFFSET_MAX).ok_or(Not::Known)?;
        if len == 0 {
            return Err(Not::Known);
        }
        (*offset, *append) = (start, false);
        let attr = &mut held.attr;
        if kill {
            attr.mode = posix::without_set_ids(attr.mode);
        }
        attr.size = attr.size.max(end);
        let written = (end.div_ceil(BLOCK) - start / BLOCK) * (BLOCK / SECTOR);
        attr.blocks = attr.blocks.max((attr.blocks + written).min(blocks_of(attr.size)));
        (attr.mtime, attr.ctime) = (at, at);
        self.contents.edit(ino, end, |contents| {
            let (start, end) = (start as usize, end as usize);
            contents.resize(contents.len().max(end), 0);
            contents[start..end].copy_from_slice(data);
        });
        Ok(Made { outcome: Outcome::Count { count: len }, touched: vec![ino], fresh: false })
    }
}

#[cfg(test)]
mod tests;
