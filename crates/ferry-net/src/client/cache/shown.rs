//! What the kernel is told that it may keep for a moment: attributes, and the names of directories;
//! and contents of files that are mapped into memory.
//!
//! * KERNEL-CACHE-1: only what is under a lease, no longer than the term lasts, and a second at
//!   most, a name for a tenth of that: while this program stands still, or the machine has just
//!   woken up, nobody can be told to forget. And the kernel may not be able to forget a name: it
//!   locks the directory above to do so, and has it locked as long as a change there is under way,
//!   which may be what the others wait for.
//! * KERNEL-CACHE-2: what is given back is dropped here, then forgotten by the kernel, and then the
//!   server is told. In between nothing of it is kept or shown again: it is being *withdrawn*.
//! * KERNEL-CACHE-3: a reply may not have been taken in when the kernel is told to forget.
//!   Attributes that it had asked for before, it discards then. Those of an inode that it does not
//!   know yet are taken back again a little later. With the name of a directory a process that gets
//!   no time to run may keep an old one for a moment: only if that directory has just been moved or
//!   removed by somebody else.
//! * KERNEL-CACHE-4: contents for a mapping are kept only if there is a lease when they are asked
//!   for. They are dropped behind the word to the server, not before: what programs have stored
//!   there is written on the way, and that may have to wait for the very change that wants the
//!   lease. So a mapping shows what others have written a moment later.

use crate::rt::collections::{HashMap, HashSet};
use std::time::Duration;

use ferry_fs::{Attr, Ino, ROOT, RenameFlags, ToForget};

use super::{Moment, State};

/// The kernel is told nothing for longer,
pub(in crate::client) const SHOWN_MAX: Duration = Duration::from_secs(1);
/// and no name: somebody may have to wait until it is over.
pub(in crate::client) const NAME_SHOWN_MAX: Duration = Duration::from_millis(100);
/// The kernel reckons from the moment at which it takes in an answer, in ticks. What it was shown
/// is over here so much later.
const LATE: Duration = Duration::from_millis(500);
/// The name of a directory that others wanted is not shown again for so long, nor those in it
/// (KERNEL-CACHE-1).
const CALM: Duration = Duration::from_secs(10);
/// So many are remembered before those that are over are taken out.
const SHOWN_MIN: usize = 4096;

/// A directory and a name in it.
pub(in crate::client) type FullName = (Ino, Box<[u8]>);

/// What the kernel may keep, and what is being withdrawn.
#[derive(Default)]
pub(super) struct Shown {
    /// Until when it keeps attributes.
    seen: HashMap<Ino, Duration>,
    /// Of directories: until when it keeps the name, and which: the directory and the name in it.
    names: HashMap<Ino, (Duration, Ino, Box<[u8]>)>,
    thin_at: usize,
    /// Directories that others wanted, and until when their names are not shown.
    wanted: HashMap<Ino, Duration>,
    /// Names that the kernel is about to change; whether one was forgotten here meanwhile.
    moving: Vec<(FullName, FullName, bool)>,
    /// Files of which it keeps contents.
    mapped: HashSet<Ino>,
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

    fn see(&mut self, ino: Ino, valid: Duration, now: Duration, name: Option<(Ino, &[u8])>) {
        if self.seen.len() >= self.thin_at {
            self.seen.retain(|_, until| *until > now);
            self.names.retain(|_, (until, _, _)| *until > now);
            self.thin_at = (self.seen.len() * 2).max(SHOWN_MIN);
        }
        let until = |valid: Duration| now + valid + LATE;
        let seen = self.seen.entry(ino).or_default();
        *seen = until(valid).max(*seen);
        let Some((parent, name)) = name else { return };
        let until = until(valid.min(NAME_SHOWN_MAX));
        match self.names.get_mut(&ino) {
            Some((seen, dir, known)) if *dir == parent && **known == *name => {
                *seen = until.max(*seen)
            }
            _ => drop(self.names.insert(ino, (until, parent, name.into()))),
        }
    }

    /// An inode is dropped; whether somebody else wants it.
    pub(super) fn forget(&mut self, ino: Ino, wanted: bool, now: Duration) {
        let is_shown = ino == ROOT || self.names.contains_key(&ino);
        if wanted && (is_shown || self.wanted.contains_key(&ino)) {
            if self.wanted.len() >= SHOWN_MIN {
                self.wanted.retain(|_, until| *until > now);
            }
            self.wanted.insert(ino, now + CALM);
        }
        if self.mapped.remove(&ino) {
            self.to_forget.contents.push(ino);
        }
        if self.seen.remove(&ino).is_some_and(|until| until > now) {
            self.to_forget.inodes.push(ino);
        }
        if let Some((until, parent, name)) = self.names.remove(&ino)
            && until > now
        {
            self.forget_name((parent, name));
        }
    }

    pub(super) fn forget_all(&mut self, now: Moment) {
        self.to_forget.contents.extend(self.mapped.drain());
        let seen = self.seen.drain().filter(|(_, until)| *until > now.monotonic);
        self.to_forget.inodes.extend(seen.map(|(ino, _)| ino));
        for (_, (until, parent, name)) in std::mem::take(&mut self.names) {
            if until > now.monotonic {
                self.forget_name((parent, name));
            }
        }
    }

    fn forget_name(&mut self, name: FullName) {
        match self.moving.iter_mut().find(|(from, to, _)| *from == name || *to == name) {
            Some((_, _, forgotten)) => *forgotten = true,
            None => self.to_forget.names.push(name),
        }
    }

    /// The kernel has renamed something: what it keeps has the other name now.
    fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), exchange: bool) {
        rename_all(self.names.values_mut().map(|(_, dir, name)| (dir, name)), from, to, exchange);
    }
}

/// Among names that are kept, those that a rename has changed.
pub(in crate::client) fn rename_all<'a, N>(
    names: impl Iterator<Item = (&'a mut Ino, &'a mut N)>,
    from: (Ino, &[u8]),
    to: (Ino, &[u8]),
    exchange: bool,
) where
    N: AsRef<[u8]> + for<'b> From<&'b [u8]> + 'a,
{
    for (dir, name) in names {
        let now = if (*dir, name.as_ref()) == from {
            to
        } else if exchange && (*dir, name.as_ref()) == to {
            from
        } else {
            continue;
        };
        (*dir, *name) = (now.0, now.1.into());
    }
}

impl State {
    /// An inode as the kernel is told of it, if it may keep that: its attributes, how long they
    /// last and, if it is a directory that was looked up, its name.
    pub(in crate::client) fn show(
        &mut self,
        ino: Ino,
        name: Option<(Ino, &[u8])>,
        now: Moment,
    ) -> Option<View> {
        let left = self
            .valid_from
            .map_or(Duration::ZERO, |from| self.term.saturating_sub(now.since(from)));
        let valid = left.saturating_sub(self.term / 8).min(SHOWN_MAX);
        let attr =
            self.known_attr(ino).filter(|_| !valid.is_zero() && !self.shown.is_withdrawn(ino))?;
        let calm =
            |ino: Ino| self.shown.wanted.get(&ino).is_none_or(|until| *until <= now.monotonic);
        let name =
            name.filter(|(parent, _)| is_dir(&attr) && ino != ROOT && calm(ino) && calm(*parent));
        self.shown.see(ino, valid, now.monotonic, name);
        let name_valid = if name.is_some() { valid.min(NAME_SHOWN_MAX) } else { Duration::ZERO };
        Some(View { attr, valid, name_valid })
    }

    /// The kernel asks for contents to keep them; `false`: there is no lease under which it may.
    pub(in crate::client) fn map(&mut self, ino: Ino, now: Moment) -> bool {
        let leased = self.is_valid(now) && self.is_leased(ino) && !self.shown.is_withdrawn(ino);
        if leased {
            self.shown.mapped.insert(ino);
        }
        leased
    }

    /// What the kernel has to forget of what was dropped since this was called last.
    pub(in crate::client) fn take_to_forget(&mut self) -> ToForget {
        std::mem::take(&mut self.shown.to_forget)
    }

    /// The kernel asks for a rename, and has both directories locked until that is answered: it
    /// cannot forget these names meanwhile.
    pub(in crate::client) fn moves(&mut self, from: FullName, to: FullName) {
        self.shown.moving.push((from, to, false));
    }

    /// It was done (with these flags), or not. Gives names that the kernel has to look up again.
    pub(in crate::client) fn moved(
        &mut self,
        from: &FullName,
        to: &FullName,
        done: Option<RenameFlags>,
    ) -> Vec<FullName> {
        if let Some(flags) = done {
            self.shown.rename((from.0, &from.1), (to.0, &to.1), flags.exchange);
        }
        let moving = &mut self.shown.moving;
        let this = moving.iter().position(|(one, other, _)| (one, other) == (from, to));
        match this.map(|this| moving.swap_remove(this)) {
            Some((from, to, true)) => vec![from, to],
            _ => Vec::new(),
        }
    }

    /// The kernel does not know it any more, and no answer is on its way that names it.
    pub(in crate::client) fn unsee(&mut self, ino: Ino) {
        self.shown.seen.remove(&ino);
        self.shown.names.remove(&ino);
        self.shown.mapped.remove(&ino);
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
