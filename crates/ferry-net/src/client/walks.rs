//! Threads that go through a tree: where each is, and what it needs next.

use crate::rt::collections::{HashMap, VecDeque};
use ferry_fs::Ino;

use super::cache::State;
use crate::message::{DirName, Purpose, WALK_DIRS_MAX};

/// Directories behind the first that make a walk.
const WALKS_FROM: u32 = 2;
/// Entries that are known ahead, or were asked for.
const AHEAD_ENTRIES: usize = 1024;
/// Directories that are looked at to find what is next.
const STAGES_MAX: usize = 256;
/// Walks of a thread in flight.
pub(super) const UNDER_WAY_MAX: usize = 2;
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
pub(super) struct Thread {
    /// Each directory with the one above it before it.
    frames: Vec<Frame>,
    /// How often it has listed what a listing before had named.
    hits: u32,
    pub(super) purpose: Purpose,
    /// Directories listed since it has done what the purpose says.
    idle: u32,
    /// What was asked for, and for what. Each once: what is left out is in use.
    pub(super) asked: HashMap<Ino, Purpose>,
    pub(super) under_way: usize,
    used: u64,
}

impl Thread {
    pub(super) fn is_walking(&self) -> bool {
        self.hits >= WALKS_FROM
    }

    /// It lists a directory.
    pub(super) fn lists(&mut self, dir: Ino) {
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
    pub(super) fn found(&mut self, dir: Ino, dirs: impl Iterator<Item = (Ino, Vec<u8>)>) {
        if let Some(frame) = self.frames.last_mut().filter(|frame| frame.dir == dir) {
            let room = DIRS_MAX.saturating_sub(frame.next.len());
            frame.next.extend(dirs.take(room));
        }
    }

    /// It does something in a directory; whether that says more of the walk than was known.
    pub(super) fn does(&mut self, dir: Ino, purpose: Purpose) -> bool {
        if purpose < self.purpose || !self.frames.iter().any(|frame| frame.dir == dir) {
            return false;
        }
        self.idle = 0;
        std::mem::replace(&mut self.purpose, purpose) != purpose
    }

    /// What to ask for: names of directories, with the inodes that they meant.
    pub(super) fn plan(&mut self, cache: &State, purpose: Purpose) -> (Vec<DirName>, Vec<Ino>) {
        let Some(here) = self.frames.last().map(|frame| frame.dir) else {
            return (Vec::new(), Vec::new());
        };
        let dir_name = |parent: Ino, (ino, name): (Ino, Vec<u8>)| (ino, DirName { parent, name });
        let inside = |frame: &'_ Frame| {
            frame.next.iter().map(|next| (frame.dir, next.clone())).collect::<Vec<_>>()
        };
        // What is next stands at the end.
        let mut open: Vec<(Ino, DirName)> = Vec::new();
        for frame in self.frames.iter().rev() {
            let room = STAGES_MAX.saturating_sub(open.len());
            open.extend(
                inside(frame).into_iter().take(room).map(|(dir, next)| dir_name(dir, next)),
            );
        }
        open.reverse();
        // Where it is more is wanted than was known when it came.
        if purpose > Purpose::default() && cache.stage(here, purpose).is_none() {
            open.push(dir_name(here, (here, b".".to_vec())));
        }
        let (mut wanted, mut inos, mut entries) = (Vec::new(), Vec::new(), 0);
        for _ in 0..STAGES_MAX {
            let Some((dir, next)) = open.pop() else { break };
            match cache.stage(dir, purpose) {
                Some(stage) => {
                    entries += stage.entries;
                    open.extend(stage.dirs.into_iter().rev().map(|inside| dir_name(dir, inside)));
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

/// All threads that may be walking.
#[derive(Default)]
pub(super) struct Walking {
    pub(super) threads: HashMap<u32, Thread>,
    tick: u64,
}

impl Walking {
    /// A thread, which is remembered from now on.
    pub(super) fn thread(&mut self, pid: u32) -> &mut Thread {
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
