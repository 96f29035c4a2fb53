//! Read-ahead for a program that goes through a tree: the client requests what it needs next.
//!
//! * CLIENT-WALK-1: a thread walks when it has listed `WALKS_FROM` (`walks`) directories more, each
//!   named by a listing that it had before. One that lists a single directory, or several that have
//!   nothing to do with each other, costs nothing.
//! * CLIENT-WALK-2: what is asked for is what the walk comes to next: directories in the order of
//!   the listings, each before what stands behind it. Only as much as `AHEAD_ENTRIES`, each once,
//!   in [`UNDER_WAY_MAX`] requests at a time; and only what such a walk needs ([`Purpose`]).
//! * CLIENT-WALK-3: no program waits for a walk. A program that needs an inode before the walk has
//!   answered requests it as if there were no walk.
//! * CLIENT-WALK-4: this lock comes before that of the cache.

use std::sync::{Arc, Weak};

use ferry_fs::{Errno, Ino};

use super::change::{Pending, Waiter};
use super::remote::RemoteFs;
use super::walks::UNDER_WAY_MAX;
use crate::codec::List;
use crate::message::{Caller, Found, Listed, Name, Op, Outcome, Purpose, Seen};

/// The directories among names.
fn dirs(names: &[Name]) -> impl Iterator<Item = (Ino, Vec<u8>)> {
    let inside = names.iter().filter(|name| name.kind == libc::S_IFDIR);
    let inside = inside.filter(|name| name.name != b"." && name.name != b"..");
    inside.map(|name| (name.ino, name.name.clone()))
}

impl RemoteFs {
    /// A thread lists a directory: these of its names; `begins`: they are the first.
    pub(super) fn lists(&self, caller: Caller, dir: Ino, names: &[Name], begins: bool) {
        let walks = {
            let mut walking = self.walking.lock();
            let thread = walking.thread(caller.pid);
            if begins {
                thread.lists(dir);
            }
            thread.found(dir, dirs(names));
            thread.is_walking()
        };
        if walks {
            self.walk_ahead(caller);
        }
    }

    /// A thread does something in a directory.
    pub(super) fn does(&self, caller: Caller, dir: Ino, purpose: Purpose) {
        let more = {
            let mut walking = self.walking.lock();
            let thread = walking.threads.get_mut(&caller.pid);
            thread.is_some_and(|thread| thread.does(dir, purpose) && thread.is_walking())
        };
        if more {
            self.walk_ahead(caller);
        }
    }

    /// Asks for what is next.
    fn walk_ahead(&self, caller: Caller) {
        let (number, op, purpose, dirs) = {
            let mut walking = self.walking.lock();
            let Some(thread) = walking.threads.get_mut(&caller.pid) else { return };
            if thread.under_way >= UNDER_WAY_MAX {
                return;
            }
            let mut cache = self.cache.lock();
            let decides = cache.asynchronous && !self.link.is_read_only();
            let purpose =
                if decides { thread.purpose } else { thread.purpose.min(Purpose::Look {}) };
            let (names, dirs) = thread.plan(&cache, purpose);
            if names.is_empty() {
                return;
            }
            thread.under_way += 1;
            (cache.begin_walk(&names), Op::Walk { dirs: List(names), purpose }, purpose, dirs)
        };
        let waiter = Walked { fs: self.this.clone(), number, caller, purpose, dirs };
        self.link.request(Pending::new(caller, op, Arc::new(waiter)));
    }

    /// A walk is answered, or never will be: these it has not come to.
    fn walked(&self, caller: Caller, rest: &[Ino]) {
        let mut walking = self.walking.lock();
        if let Some(thread) = walking.threads.get_mut(&caller.pid) {
            thread.under_way = thread.under_way.saturating_sub(1);
            thread.asked.retain(|dir, _| !rest.contains(dir));
        }
    }

    /// Keeps what a walk has brought.
    fn keep_ahead(&self, walk: (u64, Purpose), brought: (&[Seen], &[Listed], &[Found])) {
        let (seen, ..) = brought;
        let (are_fresh, back) = self.cache.lock().learn_walk(walk, brought, self.cache.now());
        let (forgotten, surplus) = {
            let mut tables = self.tables.lock();
            let both = seen.iter().zip(are_fresh);
            let forgotten: Vec<_> = both
                .filter_map(|(seen, are_fresh)| tables.learn_ahead(&seen.known, are_fresh))
                .collect();
            (forgotten, tables.too_far_ahead())
        };
        self.link.give_back(&back);
        forgotten.into_iter().for_each(|one| self.forgotten(one));
        self.forget_ahead(&surplus);
    }

    /// Nobody has asked for these.
    pub(super) fn forget_ahead(&self, inos: &[Ino]) {
        inos.iter().for_each(|ino| self.forget_known(*ino, 1));
    }
}

/// A walk in flight.
struct Walked {
    fs: Weak<RemoteFs>,
    number: u64,
    caller: Caller,
    purpose: Purpose,
    dirs: Vec<Ino>,
}

impl Waiter for Walked {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let Some(fs) = self.fs.upgrade() else { return };
        match outcome {
            Outcome::Walked { inodes, dirs, found, rest } => {
                fs.keep_ahead((self.number, self.purpose), (&inodes.0, &dirs.0, &found.0));
                let rest = rest.0.iter().filter_map(|at| self.dirs.get(*at as usize).copied());
                fs.walked(self.caller, &rest.collect::<Vec<_>>());
                fs.walk_ahead(self.caller);
            }
            _ => self.fail(Errno(libc::EPROTO)),
        }
    }

    fn fail(&self, _errno: Errno) {
        let Some(fs) = self.fs.upgrade() else { return };
        fs.cache.lock().end_walk(self.number);
        fs.walked(self.caller, &[]);
    }
}
