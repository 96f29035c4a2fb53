//! What the kernel has been told that it may cache: attributes, names of directories, and contents
//! of files that are mapped into memory.
//!
//! * KERNEL-CACHE-1: the kernel caches only what is under a lease, at most until the term ends, and
//!   at most for a second; a name for a tenth of that. The reasons: while this program is stopped,
//!   or the machine has just woken up, nobody can tell the kernel to forget. And the kernel may be
//!   unable to forget a name: for that it locks the parent directory, which stays locked while a
//!   change there is in flight, and other clients may wait for that change.
//! * KERNEL-CACHE-2: a lease is returned in three steps: this cache drops the inode, the kernel
//!   forgets it, the server is told. In between the inode is *withdrawn*: neither cached here nor
//!   reported to the kernel.
//! * KERNEL-CACHE-3: the kernel may be told to forget before it has processed an earlier reply. It
//!   then discards attributes that it requested before. Attributes of an inode that it does not
//!   know yet are invalidated once more a little later. A process that gets no time to run may see
//!   an old directory name for up to a tenth of a second, if another client has just moved or
//!   removed that directory.
//! * KERNEL-CACHE-4: contents of a mapping are cached only if there is a lease when the kernel
//!   requests them. The kernel drops them after the server is told, not before: dirty pages are
//!   written first, and that write may wait for the very change that wants the lease. So a mapping
//!   shows another client's writes a little later.

use crate::rt::collections::{HashMap, HashSet};
use std::time::Duration;

use ferry_fs::{Attr, Ino, ROOT, ToForget};

use crate::client::clock_reading::ClockReading;

/// The longest time for which the kernel may cache attributes.
pub(in crate::client) const ATTR_VALID_MAX: Duration = Duration::from_secs(1);
/// The same for names: other clients may have to wait until it has passed.
pub(in crate::client) const NAME_VALID_MAX: Duration = Duration::from_millis(100);
/// The kernel counts from the time at which it processes an answer, in ticks. So an entry expires
/// here this much later.
const EXPIRY_SLACK: Duration = Duration::from_millis(500);
/// If other clients wanted a directory, its name and the names in it are not reported to the kernel
/// for this time (KERNEL-CACHE-1).
const CALM: Duration = Duration::from_secs(10);
/// Expired entries are removed when there are more than these.
const ENTRIES_MIN: usize = 4096;

/// A directory and a name in it.
pub(in crate::client) type FullName = (Ino, Box<[u8]>);

/// What the kernel may keep, and what is being withdrawn.
#[derive(Default)]
pub(super) struct KernelCached {
    /// Until when it keeps attributes.
    pub(super) seen: HashMap<Ino, Duration>,
    /// Of directories: until when it keeps the name, and which: the directory and the name in it.
    pub(super) names: HashMap<Ino, (Duration, Ino, Box<[u8]>)>,
    pub(super) thin_at: usize,
    /// Directories that other clients wanted, and until when their names are not reported.
    pub(super) wanted: HashMap<Ino, Duration>,
    /// Names that the kernel is about to change; whether one was forgotten here meanwhile.
    pub(super) moving: Vec<(FullName, FullName, bool)>,
    /// Files of which it keeps contents.
    pub(super) mapped: HashSet<Ino>,
    /// How often each is being withdrawn.
    pub(super) withdrawn: HashMap<Ino, u32>,
    /// What the kernel has to forget before the server is told.
    pub(super) to_forget: ToForget,
}

/// What the kernel is told of an inode.
#[derive(Clone, Copy, Debug)]
pub(in crate::client) struct View {
    pub(in crate::client) attr: Attr,
    pub(in crate::client) valid: Duration,
    pub(in crate::client) name_valid: Duration,
}

impl KernelCached {
    pub(super) fn is_withdrawn(&self, ino: Ino) -> bool {
        !self.withdrawn.is_empty() && self.withdrawn.contains_key(&ino)
    }

    pub(super) fn see(
        &mut self,
        ino: Ino,
        valid: Duration,
        now: Duration,
        name: Option<(Ino, &[u8])>,
    ) {
        if self.seen.len() >= self.thin_at {
            self.seen.retain(|_, until| *until > now);
            self.names.retain(|_, (until, _, _)| *until > now);
            self.thin_at = (self.seen.len() * 2).max(ENTRIES_MIN);
        }
        let until = |valid: Duration| now + valid + EXPIRY_SLACK;
        let seen = self.seen.entry(ino).or_default();
        *seen = until(valid).max(*seen);
        let Some((parent, name)) = name else { return };
        let until = until(valid.min(NAME_VALID_MAX));
        match self.names.get_mut(&ino) {
            Some((seen, dir, known)) if *dir == parent && **known == *name => {
                *seen = until.max(*seen)
            }
            _ => drop(self.names.insert(ino, (until, parent, name.into()))),
        }
    }

    /// An inode is dropped; whether somebody else wants it.
    pub(super) fn forget(&mut self, ino: Ino, wanted: bool, now: Duration) {
        let is_kernel_cached = ino == ROOT || self.names.contains_key(&ino);
        if wanted && (is_kernel_cached || self.wanted.contains_key(&ino)) {
            if self.wanted.len() >= ENTRIES_MIN {
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

    pub(super) fn forget_all(&mut self, now: ClockReading) {
        self.to_forget.contents.extend(self.mapped.drain());
        let seen = self.seen.drain().filter(|(_, until)| *until > now.monotonic);
        self.to_forget.inodes.extend(seen.map(|(ino, _)| ino));
        for (_, (until, parent, name)) in std::mem::take(&mut self.names) {
            if until > now.monotonic {
                self.forget_name((parent, name));
            }
        }
    }

    pub(super) fn forget_name(&mut self, name: FullName) {
        match self.moving.iter_mut().find(|(from, to, _)| *from == name || *to == name) {
            Some((_, _, forgotten)) => *forgotten = true,
            None => self.to_forget.names.push(name),
        }
    }

    /// The kernel has renamed something: what it keeps has the other name now.
    pub(super) fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), exchange: bool) {
        rename_all(self.names.values_mut().map(|(_, dir, name)| (dir, name)), from, to, exchange);
    }
}

/// Changes the names of a table as a rename has changed them.
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
