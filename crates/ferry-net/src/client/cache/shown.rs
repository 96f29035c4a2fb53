//! What the kernel is told that it may keep for a moment: attributes, and the names of directories.
//!
//! * N1: only what is under a lease, no longer than the term lasts, and a second at most: while this program stands still, or the machine has
//!   just woken up, nobody can be told to forget.
//! * N2: what is given back is dropped here, then forgotten by the kernel, and then the server is told. In between nothing of it is kept or
//!   shown again: it is being *withdrawn*.
//! * N3: a reply may not have been taken in when the kernel is told to forget. Attributes that it had asked for before, it discards then. Those
//!   of an inode that it does not know yet are taken back again a little later. With the name of a directory a process that gets no
//!   time to run may keep an old one for a second: only if that directory has just been moved or removed by somebody else.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use ferry_fs::{Attr, Ino, ROOT, ToForget};

use super::{Moment, State};

/// The kernel is told nothing for longer.
pub(in crate::client) const SHOWN_MAX: Duration = Duration::from_secs(1);
/// So many are remembered before those that are over are taken out.
const SHOWN_MIN: usize = 4096;

#[derive(Debug)]
struct Seen {
    until: Duration,
    /// Of a directory: the directory and the name under which it was found.
    name: Option<(Ino, Box<[u8]>)>,
}

/// What the kernel may keep, and what is being withdrawn.
#[derive(Default)]
pub(super) struct Shown {
    seen: HashMap<Ino, Seen>,
    thin_at: usize,
    /// Files that the kernel reads through its page cache. It compares their times before each read, but not where they are mapped.
    read: HashSet<Ino>,
    /// How often each is being withdrawn.
    withdrawn: HashMap<Ino, u32>,
    /// What the kernel has to forget before the server is told.
    to_forget: ToForget,
}

/// What the kernel is told of an inode.
#[derive(Clone, Copy, Debug)]
pub(in crate::client) struct View {
    pub(in crate::client) attr: Attr,
    pub(in crate::client) valid: Duration,
    pub(in crate::client) name_valid: Duration,
}

impl Shown {
    pub(super) fn is_withdrawn(&self, ino: Ino) -> bool {
        !self.withdrawn.is_empty() && self.withdrawn.contains_key(&ino)
    }

    fn see(&mut self, ino: Ino, until: Duration, now: Duration, name: Option<(Ino, &[u8])>) {
        if self.seen.len() >= self.thin_at {
            self.seen.retain(|_, seen| seen.until > now);
            self.thin_at = (self.seen.len() * 2).max(SHOWN_MIN);
        }
        let seen = self.seen.entry(ino).or_insert(Seen { until, name: None });
        seen.until = seen.until.max(until);
        if let Some((parent, name)) = name
            && seen.name.as_ref().is_none_or(|(dir, known)| *dir != parent || **known != *name)
        {
            // It was moved: the kernel did that itself.
            seen.name = Some((parent, name.into()));
        }
    }

    /// An inode is dropped.
    pub(super) fn forget(&mut self, ino: Ino, now: Duration) {
        if self.read.contains(&ino) {
            self.to_forget.contents.push(ino);
        }
        if let Some(seen) = self.seen.remove(&ino).filter(|seen| seen.until > now) {
            self.to_forget.inodes.push(ino);
            self.to_forget.names.extend(seen.name);
        }
    }

    pub(super) fn forget_all(&mut self, now: Moment) {
        self.to_forget.contents.extend(&self.read);
        for (ino, seen) in self.seen.drain().filter(|(_, seen)| seen.until > now.monotonic) {
            self.to_forget.inodes.push(ino);
            self.to_forget.names.extend(seen.name);
        }
    }
}

impl State {
    /// An inode as the kernel is told of it, if it may keep that: its attributes, how long they last and, if it is a directory that was looked
    /// up, its name.
    pub(in crate::client) fn show(
        &mut self,
        ino: Ino,
        name: Option<(Ino, &[u8])>,
        now: Moment,
    ) -> Option<View> {
        let left = self.valid_from.map_or(Duration::ZERO, |from| self.term.saturating_sub(now.since(from)));
        let valid = left.saturating_sub(self.term / 8).min(SHOWN_MAX);
        let attr = self.known_attr(ino).filter(|_| !valid.is_zero() && !self.shown.is_withdrawn(ino))?;
        let name = name.filter(|_| is_dir(&attr) && ino != ROOT);
        self.shown.see(ino, now.monotonic + valid, now.monotonic, name);
        Some(View { attr, valid, name_valid: if name.is_some() { valid } else { Duration::ZERO } })
    }

    /// What the kernel has to forget of what was dropped since this was called last.
    pub(in crate::client) fn take_to_forget(&mut self) -> ToForget {
        std::mem::take(&mut self.shown.to_forget)
    }

    /// The kernel reads this file through its page cache.
    pub(in crate::client) fn is_read(&mut self, ino: Ino) {
        self.shown.read.insert(ino);
    }

    /// The kernel does not know it any more, and no answer is on its way that names it.
    pub(in crate::client) fn unsee(&mut self, ino: Ino) {
        self.shown.seen.remove(&ino);
        self.shown.read.remove(&ino);
    }

    /// These are dropped, and the server is not told yet.
    pub(in crate::client) fn withdraw(&mut self, inos: &[Ino]) {
        inos.iter().for_each(|ino| *self.shown.withdrawn.entry(*ino).or_default() += 1);
    }

    /// The server is about to be told.
    pub(in crate::client) fn withdrawn(&mut self, inos: &[Ino]) {
        for ino in inos {
            if let Some(count) = self.shown.withdrawn.get_mut(ino) {
                *count -= 1;
                if *count == 0 {
                    self.shown.withdrawn.remove(ino);
                }
            }
        }
    }
}

fn is_dir(attr: &Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFDIR
}
