//! What the kernel may cache of an inode now, and what it must forget.

use std::time::Duration;

use ferry_fs::{Attr, Ino, ROOT, RenameFlags, ToForget};

use super::kernel_cached::{ATTR_VALID_MAX, FullName, NAME_VALID_MAX, View};
use super::state::State;
use crate::client::clock_reading::ClockReading;

impl State {
    /// An inode as the kernel is told of it, if it may keep that: its attributes, how long they
    /// last and, if it is a directory that was looked up, its name.
    pub(in crate::client) fn show(
        &mut self,
        ino: Ino,
        name: Option<(Ino, &[u8])>,
        now: ClockReading,
    ) -> Option<View> {
        let left = self
            .valid_from
            .map_or(Duration::ZERO, |from| self.term.saturating_sub(now.since(from)));
        let valid = left.saturating_sub(self.term / 8).min(ATTR_VALID_MAX);
        let attr = self
            .known_attr(ino)
            .filter(|_| !valid.is_zero() && !self.kernel_cached.is_withdrawn(ino))?;
        let calm = |ino: Ino| {
            self.kernel_cached.wanted.get(&ino).is_none_or(|until| *until <= now.monotonic)
        };
        let name =
            name.filter(|(parent, _)| is_dir(&attr) && ino != ROOT && calm(ino) && calm(*parent));
        self.kernel_cached.see(ino, valid, now.monotonic, name);
        let name_valid = if name.is_some() { valid.min(NAME_VALID_MAX) } else { Duration::ZERO };
        Some(View { attr, valid, name_valid })
    }

    /// The kernel asks for contents to keep them; `false`: there is no lease under which it may.
    pub(in crate::client) fn map(&mut self, ino: Ino, now: ClockReading) -> bool {
        let leased =
            self.is_valid(now) && self.is_leased(ino) && !self.kernel_cached.is_withdrawn(ino);
        if leased {
            self.kernel_cached.mapped.insert(ino);
        }
        leased
    }

    /// What the kernel has to forget of what was dropped since this was called last.
    pub(in crate::client) fn take_to_forget(&mut self) -> ToForget {
        std::mem::take(&mut self.kernel_cached.to_forget)
    }

    /// The kernel asks for a rename, and has both directories locked until that is answered: it
    /// cannot forget these names meanwhile.
    pub(in crate::client) fn moves(&mut self, from: FullName, to: FullName) {
        self.kernel_cached.moving.push((from, to, false));
    }

    /// It was done (with these flags), or not. Gives names that the kernel has to look up again.
    pub(in crate::client) fn moved(
        &mut self,
        from: &FullName,
        to: &FullName,
        done: Option<RenameFlags>,
    ) -> Vec<FullName> {
        if let Some(flags) = done {
            self.kernel_cached.rename((from.0, &from.1), (to.0, &to.1), flags.exchange);
        }
        let moving = &mut self.kernel_cached.moving;
        let this = moving.iter().position(|(one, other, _)| (one, other) == (from, to));
        match this.map(|this| moving.swap_remove(this)) {
            Some((from, to, true)) => vec![from, to],
            _ => Vec::new(),
        }
    }

    /// The kernel does not know it any more, and no answer is on its way that names it.
    pub(in crate::client) fn unsee(&mut self, ino: Ino) {
        self.kernel_cached.seen.remove(&ino);
        self.kernel_cached.names.remove(&ino);
        self.kernel_cached.mapped.remove(&ino);
    }

    /// These are dropped, and the server is not told yet.
    pub(in crate::client) fn withdraw(&mut self, inos: &[Ino]) {
        inos.iter().for_each(|ino| *self.kernel_cached.withdrawn.entry(*ino).or_default() += 1);
    }

    /// The server is about to be told.
    pub(in crate::client) fn withdrawn(&mut self, inos: &[Ino]) {
        for ino in inos {
            if let Some(count) = self.kernel_cached.withdrawn.get_mut(ino) {
                *count -= 1;
                if *count == 0 {
                    self.kernel_cached.withdrawn.remove(ino);
                }
            }
        }
    }
}

fn is_dir(attr: &Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFDIR
}
