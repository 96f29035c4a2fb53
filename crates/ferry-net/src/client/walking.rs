//! Somebody goes through a tree: what is next is asked for ahead of it.
//!
//! * CLIENT-WALK-1: a thread walks when it has listed [`WALKS_FROM`] directories more, each named
//!   by a listing that it had before. One that lists a single directory, or several that have
//!   nothing to do with each other, costs nothing.
//! * CLIENT-WALK-2: what is asked for is what the walk comes to next: directories in the order of
//!   the listings, each before what stands behind it. Only as much as [`AHEAD_ENTRIES`], each once,
//!   in [`UNDER_WAY_MAX`] requests at a time; and only what such a walk needs ([`Purpose`]).
//! * CLIENT-WALK-3: nobody waits for what is under way: who comes there first asks as if there were
//!   no walk.
//! * CLIENT-WALK-4: this lock comes before that of the cache.

use crate::rt::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use ferry_fs::{Errno, Ino};

use super::RemoteFs;
use super::cache::State;
use super::link::{Pending, Waiter};
use crate::codec::List;
use crate::message::{Found, Listed, Name, Op, Outcome, Place, Purpose, Seen, WALK_DIRS_MAX, Who};

/// Directories behind the first that make a walk.
const WALKS_FROM: u32 = 2;
/// Entries that are known ahead, or were asked for.
const AHEAD_ENTRIES: usize = 1024;
/// Directories that are looked at to find what is next.
const STAGES_MAX: usize = 256;
/// Walks of a thread under way.
const UNDER_WAY_MAX: usize = 2;
/// Threads that are remembered.
const THREADS_MAX: usize = 16;
/// Directories above each other that are remembered, those in each that are still to come, and
/// those that were asked for.
const DEPTH_MAX: usize = 64;
const DIRS_MAX: usize = 4096;
const ASKED_MAX: usize = 8192;
/// So many directories are listed for nothing else before a walk that has removed something is
/// taken for one that only lists.
const IDLE_MAX: u32 = 8;

/// A directory that was listed.
struct Frame {
    dir: Ino,
    /// Directories in it to which the walk has not come, with their names.
    next: VecDeque<(Ino, Vec<u8>)>,
}

/// A thread that may be walking.
#[derive(Default)]
struct Thread {
    /// Each directory with the one above it before it.
    frames: Vec<Frame>,
    /// How often it has listed what a listing before had named.
    hits: u32,
    purpose: Purpose,
    /// Directories listed since it has done what the purpose says.
    idle: u32,
    /// What was asked for, and for what. Each once: what is left out is in use.
    asked: HashMap<Ino, Purpose>,
    under_way: usize,
    used: u64,
}

impl Thread {
    fn is_walking(&self) -> bool {
        self.hits >= WALKS_FROM
    }

    /// It lists a directory.
    fn lists(&mut self, dir: Ino) {
        let known =
            |frame: &Frame| frame.dir == dir || frame.next.iter().any(|(ino, _)| *ino == dir);
        let Some(at) = self.frames.iter().rposition(known) else {
            *self = Self {
                frames: vec![Frame { dir, next: VecDeque::new() }],
                under_way: self.under_way,
                ..Self::default()
            };
            return;
        };
        if self.frames[at].dir == dir {
            // Once more, from its beginning.
            self.frames.truncate(at + 1);
            self.frames[at].next.clear();
            self.asked.clear();
            return;
        }
        self.frames.truncate(at + 1);
        let next = &mut self.frames[at].next;
        if let Some(at) = next.iter().position(|(ino, _)| *ino == dir) {
            next.remove(at);
        }
        self.frames.push(Frame { dir, next: VecDeque::new() });
        if self.frames.len() > DEPTH_MAX {
            self.frames.remove(0);
        }
        self.hits += 1;
        self.idle += 1;
        if self.idle > IDLE_MAX {
            self.purpose = Purpose::default();
        }
    }

    /// The listing says so.
    fn found(&mut self, dir: Ino, dirs: impl Iterator<Item = (Ino, Vec<u8>)>) {
        if let Some(frame) = self.frames.last_mut().filter(|frame| frame.dir == dir) {
            let room = DIRS_MAX.saturating_sub(frame.next.len());
            frame.next.extend(dirs.take(room));
        }
    }

    /// It does something in a directory; whether that says more of the walk than was known.
    fn does(&mut self, dir: Ino, purpose: Purpose) -> bool {
        if purpose < self.purpose || !self.frames.iter().any(|frame| frame.dir == dir) {
            return false;
        }
        self.idle = 0;
        std::mem::replace(&mut self.purpose, purpose) != purpose
    }

    /// What to ask for: names of directories, with the inodes that they meant.
    fn plan(&mut self, cache: &State, purpose: Purpose) -> (Vec<Place>, Vec<Ino>) {
        let Some(here) = self.frames.last().map(|frame| frame.dir) else {
            return (Vec::new(), Vec::new());
        };
        let place = |parent: Ino, (ino, name): (Ino, Vec<u8>)| (ino, Place { parent, name });
        let inside = |frame: &'_ Frame| {
            frame.next.iter().map(|next| (frame.dir, next.clone())).collect::<Vec<_>>()
        };
        // What is next stands at the end.
        let mut open: Vec<(Ino, Place)> = Vec::new();
        for frame in self.frames.iter().rev() {
            let room = STAGES_MAX.saturating_sub(open.len());
            open.extend(inside(frame).into_iter().take(room).map(|(dir, next)| place(dir, next)));
        }
        open.reverse();
        // Where it is more is wanted than was known when it came.
        if purpose > Purpose::default() && cache.stage(here, purpose).is_none() {
            open.push(place(here, (here, b".".to_vec())));
        }
        let (mut wanted, mut inos, mut entries) = (Vec::new(), Vec::new(), 0);
        for _ in 0..STAGES_MAX {
            let Some((dir, next)) = open.pop() else { break };
            match cache.stage(dir, purpose) {
                Some(stage) => {
                    entries += stage.entries;
                    open.extend(stage.dirs.into_iter().rev().map(|inside| place(dir, inside)));
                }
                None if self.asked.get(&dir).is_none_or(|asked| *asked < purpose) => {
                    wanted.push(next);
                    inos.push(dir);
                }
                None => {}
            }
            if entries >= AHEAD_ENTRIES || wanted.len() == WALK_DIRS_MAX {
                break;
            }
        }
        if self.asked.len() >= ASKED_MAX {
            self.asked.clear();
        }
        self.asked.extend(inos.iter().map(|dir| (*dir, purpose)));
        (wanted, inos)
    }
}

/// Those who may be walking.
#[derive(Default)]
pub(super) struct Walking {
    threads: HashMap<u32, Thread>,
    tick: u64,
}

impl Walking {
    /// A thread, which is remembered from now on.
    fn thread(&mut self, pid: u32) -> &mut Thread {
        self.tick += 1;
        if self.threads.len() >= THREADS_MAX && !self.threads.contains_key(&pid) {
            let oldest =
                self.threads.iter().min_by_key(|(_, thread)| thread.used).map(|(pid, _)| *pid);
            oldest.map(|pid| self.threads.remove(&pid));
        }
        let thread = self.threads.entry(pid).or_default();
        thread.used = self.tick;
        thread
    }
}

/// The directories among names.
fn dirs(names: &[Name]) -> impl Iterator<Item = (Ino, Vec<u8>)> {
    let inside = names.iter().filter(|name| name.kind == libc::S_IFDIR);
    let inside = inside.filter(|name| name.name != b"." && name.name != b"..");
    inside.map(|name| (name.ino, name.name.clone()))
}

impl RemoteFs {
    /// A thread lists a directory: these of its names; `begins`: they are the first.
    pub(super) fn lists(&self, who: Who, dir: Ino, names: &[Name], begins: bool) {
        let walks = {
            let mut walking = self.walking.lock();
            let thread = walking.thread(who.pid);
            if begins {
                thread.lists(dir);
            }
            thread.found(dir, dirs(names));
            thread.is_walking()
        };
        if walks {
            self.walk_ahead(who);
        }
    }

    /// A thread does something in a directory.
    pub(super) fn does(&self, who: Who, dir: Ino, purpose: Purpose) {
        let more = {
            let mut walking = self.walking.lock();
            let thread = walking.threads.get_mut(&who.pid);
            thread.is_some_and(|thread| thread.does(dir, purpose) && thread.is_walking())
        };
        if more {
            self.walk_ahead(who);
        }
    }

    /// Asks for what is next.
    fn walk_ahead(&self, who: Who) {
        let (number, op, purpose, dirs) = {
            let mut walking = self.walking.lock();
            let Some(thread) = walking.threads.get_mut(&who.pid) else { return };
            if thread.under_way >= UNDER_WAY_MAX {
                return;
            }
            let decides = self.asynchronous && !self.link.is_read_only();
            let purpose =
                if decides { thread.purpose } else { thread.purpose.min(Purpose::Look {}) };
            let mut cache = self.cache.lock();
            let (places, dirs) = thread.plan(&cache, purpose);
            if places.is_empty() {
                return;
            }
            thread.under_way += 1;
            (cache.begin_walk(&places), Op::Walk { dirs: List(places), purpose }, purpose, dirs)
        };
        let waiter = Walked { fs: self.this.clone(), number, who, purpose, dirs };
        self.link.request(Pending::new(who, op, Arc::new(waiter)));
    }

    /// A walk is answered, or never will be: these it has not come to.
    fn walked(&self, who: Who, rest: &[Ino]) {
        let mut walking = self.walking.lock();
        if let Some(thread) = walking.threads.get_mut(&who.pid) {
            thread.under_way = thread.under_way.saturating_sub(1);
            thread.asked.retain(|dir, _| !rest.contains(dir));
        }
    }

    /// Keeps what a walk has brought.
    fn keep_ahead(&self, walk: (u64, Purpose), brought: (&[Seen], &[Listed], &[Found])) {
        let (seen, ..) = brought;
        let (kept, back) = self.cache.lock().learn_walk(walk, brought, self.cache.now());
        let (forgotten, surplus) = {
            let mut tables = self.tables.lock();
            let both = seen.iter().zip(kept);
            let forgotten: Vec<_> =
                both.filter_map(|(seen, kept)| tables.learn_ahead(&seen.known, kept)).collect();
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

/// A walk under way.
struct Walked {
    fs: Weak<RemoteFs>,
    number: u64,
    who: Who,
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
                fs.walked(self.who, &rest.collect::<Vec<_>>());
                fs.walk_ahead(self.who);
            }
            _ => self.fail(Errno(libc::EPROTO)),
        }
    }

    fn fail(&self, _errno: Errno) {
        let Some(fs) = self.fs.upgrade() else { return };
        fs.cache.lock().end_walk(self.number);
        fs.walked(self.who, &[]);
    }
}
