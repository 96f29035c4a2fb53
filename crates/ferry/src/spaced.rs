//! The daemon's side of `ferry space`: which directories take the space. FerryFS does not add up
//! space by directory while files change, so a walk through all names does, inside the process that
//! has the volume, when somebody asks for it.
//!
//! * A walk belongs to its asker: it ends when the asker has not looked at it for [`PATIENCE`].
//! * After each batch it rests for [`REST`] times as long, so it takes a quarter of a processor.
//! * Its memory is bounded: of each directory it retains the largest below it ([`WIDEST`]), and
//!   adds up the others; of the way down it has a batch of each directory.
//! * The tree may change meanwhile. What has moved may be counted twice or not at all; what was
//!   removed before it was looked at is counted in `missed`.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use ferry_env::{Clock, Env};
use ferry_fs::{Attr, DirEntry, Errno, Filesystem, InProcess, Ino, LocalFs, ROOT};
use parking_lot::Mutex;
use serde_json::Value;

use crate::socket::object;

/// The question that begins a walk; the depth follows, a colon, and the inode of the directory.
pub const BEGIN: &str = "space:";
/// The question how far a walk is; its number follows. The answer of one that has ended is given
/// once.
pub const LOOK: &str = "space?";
/// The message that a walk is not wanted any more; its number follows.
pub const STOP: &str = "space!";
/// The member of an answer that says why there is no other.
pub const REFUSED: &str = "refused";

/// For so many levels of directories at most each one is in the answer.
pub const DEPTH_MAX: usize = 4;
/// The largest directories in the answer, by its depth: of the first level, of each one of the
/// second, and so on. All names of an answer fit in it, however long they are.
const WIDEST: [&[usize]; DEPTH_MAX] = [&[100], &[64, 50], &[64, 16, 4], &[32, 8, 4, 4]];
/// How long a walk goes on while its asker does not look at it.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most walks at a time.
const WALKS_MAX: usize = 4;
/// Entries of a directory that are looked at before a rest.
const BATCH: usize = 256;
/// How long a walk rests, in multiples of the time that it has worked.
const REST: u32 = 3;
/// The longest pause of a walk that has ended, until it looks whether it was heard.
const PAUSE: Duration = Duration::from_millis(200);
/// The most inodes with several names that are remembered. Those behind are counted by each name.
const LINKED_MAX: usize = 1 << 22;

/// The walks of a volume.
#[derive(Clone)]
pub struct Walks {
    fs: Weak<LocalFs>,
    clock: Arc<dyn Clock>,
    known: Arc<Mutex<Known>>,
}

#[derive(Default)]
struct Known {
    newest: u64,
    walks: Vec<Walk>,
}

struct Walk {
    number: u64,
    /// When it began, and when somebody looked last.
    begun: Duration,
    looked: Duration,
    /// Files and directories that were counted, and those that the volume had when it began.
    counted: u64,
    of: u64,
    stage: Stage,
}

/// What a walk is at. It leaves `Running` once; `Stopped` comes from its asker, the others from
/// itself.
enum Stage {
    Running,
    Stopped,
    Ended(Value),
}

impl Walks {
    pub fn new(fs: Weak<LocalFs>) -> Self {
        Self { fs, clock: Env::real().clock, known: Arc::default() }
    }

    /// The answer to a question of this module. `None`: it is none.
    pub fn answer(&self, question: &str) -> Option<Value> {
        if let Some(asked) = question.strip_prefix(BEGIN) {
            let (depth, dir) = asked.split_once(':')?;
            return Some(self.begin(depth.parse().ok()?, dir.parse().ok()?));
        }
        if let Some(number) = question.strip_prefix(LOOK) {
            return Some(self.look(number.parse().ok()?));
        }
        let number = question.strip_prefix(STOP)?.parse().ok()?;
        self.with(number, |walk| walk.stage = Stage::Stopped);
        Some(object([("stopped", true.into())]))
    }

    fn with<T>(&self, number: u64, then: impl FnOnce(&mut Walk) -> T) -> Option<T> {
        self.known.lock().walks.iter_mut().find(|walk| walk.number == number).map(then)
    }

    fn begin(&self, depth: usize, dir: Ino) -> Value {
        let Some(widest) = depth.checked_sub(1).and_then(|at| WIDEST.get(at)) else {
            return refusal("another version of ferry asks");
        };
        let inodes = self.fs.upgrade().and_then(|fs| {
            let all = InProcess::default().call(|cx| fs.statfs(cx)).ok()?;
            Some(all.files.saturating_sub(all.files_free))
        });
        let Some(of) = inodes else { return refusal("the volume is being closed") };
        let number = {
            let (mut known, now) = (self.known.lock(), self.clock.monotonic());
            if known.walks.len() >= WALKS_MAX {
                return refusal("too many add up the space of this volume at a time");
            }
            known.newest += 1;
            let number = known.newest;
            let (stage, counted) = (Stage::Running, 0);
            known.walks.push(Walk { number, begun: now, looked: now, counted, of, stage });
            number
        };
        let walks = self.clone();
        let walking = move || walks.walk(number, dir, widest);
        if let Err(error) = thread::Builder::new().name("ferry-space".into()).spawn(walking) {
            self.remove(number);
            return refusal(&format!("cannot start a thread: {error}"));
        }
        object([("walk", number.into())])
    }

    fn look(&self, number: u64) -> Value {
        let now = self.clock.monotonic();
        let looked = self.with(number, |walk| {
            walk.looked = now;
            match std::mem::replace(&mut walk.stage, Stage::Stopped) {
                Stage::Running => {
                    walk.stage = Stage::Running;
                    object([("counted", walk.counted.into()), ("of", walk.of.into())])
                }
                Stage::Stopped => refusal("it was stopped"),
                Stage::Ended(answer) => answer,
            }
        });
        looked.unwrap_or_else(|| refusal("it has ended: nobody looked at it"))
    }

    fn remove(&self, number: u64) {
        self.known.lock().walks.retain(|walk| walk.number != number);
    }

    /// Whether somebody wants the walk, or its answer, and how much of the volume it has counted.
    fn is_wanted(&self, number: u64, counted: u64) -> bool {
        let now = self.clock.monotonic();
        let wanted = self.with(number, |walk| {
            walk.counted = counted;
            !matches!(walk.stage, Stage::Stopped) && now.saturating_sub(walk.looked) < PATIENCE
        });
        wanted.unwrap_or(false)
    }

    /// The thread of a walk.
    fn walk(&self, number: u64, dir: Ino, widest: &'static [usize]) {
        let mut count = Count::new(dir, widest);
        let answer = loop {
            let begun = self.clock.monotonic();
            match self.fs.upgrade().map(|fs| count.go_on(&fs)) {
                None => break refusal("the volume is being closed"),
                Some(Err(error)) => break refusal(&format!("cannot list the directory: {error}")),
                Some(Ok(Some(all))) => break self.complete(number, &count, all),
                Some(Ok(None)) => {}
            }
            if !self.is_wanted(number, count.counted) {
                return self.remove(number);
            }
            thread::park_timeout(REST * self.clock.monotonic().saturating_sub(begun));
        };
        let counted = count.counted;
        drop(count);
        self.with(number, |walk| {
            if matches!(walk.stage, Stage::Running) {
                walk.stage = Stage::Ended(answer);
            }
        });
        while self.is_wanted(number, counted) {
            thread::park_timeout(PAUSE);
        }
        self.remove(number);
    }

    fn complete(&self, number: u64, count: &Count, all: Node) -> Value {
        let begun = self.with(number, |walk| walk.begun);
        let time = self.clock.monotonic().saturating_sub(begun.unwrap_or_default());
        object([
            ("counted", count.counted.into()),
            ("missed", count.missed.into()),
            ("time_ns", u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).into()),
            ("wall_secs", self.clock.wall().as_secs().into()),
            ("tree", all.json()),
        ])
    }
}

/// The answer that there is none, and why.
pub fn refusal(why: &str) -> Value {
    object([(REFUSED, why.into())])
}

/// What is below a directory.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// Allocated, as `du` counts it.
    bytes: u64,
    /// Whatever is no directory; one with several names counts once.
    files: u64,
    directories: u64,
}

impl Sums {
    fn add(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.files += other.files;
        self.directories += other.directories;
    }

    fn json(self) -> Value {
        let Self { bytes, files, directories } = self;
        object([
            ("bytes", bytes.into()),
            ("files", files.into()),
            ("directories", directories.into()),
        ])
    }
}

/// A directory of the answer.
struct Node {
    name: Box<[u8]>,
    all: Sums,
    /// What is in the directory itself.
    own: Sums,
    /// The largest directories in it, and the sums of the others.
    largest: Vec<Node>,
    others: Sums,
}

impl Node {
    fn new(name: Box<[u8]>) -> Self {
        let (all, own, others) = (Sums::default(), Sums::default(), Sums::default());
        Self { name, all, own, largest: Vec::new(), others }
    }

    /// Retains the largest directories.
    fn narrow(&mut self, widest: usize) {
        self.largest.sort_by_key(|node| std::cmp::Reverse((node.all.bytes, node.all.files)));
        for node in self.largest.drain(widest.min(self.largest.len())..) {
            self.others.add(node.all);
            self.others.directories += 1;
        }
    }

    fn json(&self) -> Value {
        let mut json = self.all.json();
        json["name"] = text(&self.name).into();
        json["own"] = self.own.json();
        json["others"] = self.others.json();
        json["largest"] = self.largest.iter().map(Self::json).collect();
        json
    }
}

/// A name; if it is not UTF-8, what is not ASCII in it is escaped.
fn text(name: &[u8]) -> String {
    str::from_utf8(name).map_or_else(|_| name.escape_ascii().to_string(), str::to_owned)
}

/// A directory on the way down.
struct Level {
    dir: Ino,
    node: Node,
    /// Where its listing goes on; `None`: it has ended.
    cookie: Option<u64>,
    /// Directories of the last batch that are not visited yet.
    below: Vec<(Ino, Box<[u8]>)>,
}

impl Level {
    fn new(dir: Ino, name: Box<[u8]>) -> Self {
        Self { dir, node: Node::new(name), cookie: Some(0), below: Vec::new() }
    }
}

/// A walk: depth first, so that a directory's sums are complete when it is left.
struct Count {
    levels: Vec<Level>,
    widest: &'static [usize],
    /// Inodes with several names.
    linked: HashSet<Ino>,
    counted: u64,
    missed: u64,
}

impl Count {
    fn new(dir: Ino, widest: &'static [usize]) -> Self {
        let levels = vec![Level::new(dir, Box::default())];
        Self { levels, widest, linked: HashSet::new(), counted: 1, missed: 0 }
    }

    /// Does a part of the work. Returns the sums of all when nothing is left to do; fails if the
    /// first directory cannot be listed.
    fn go_on(&mut self, fs: &LocalFs) -> Result<Option<Node>, Errno> {
        let mut looked = 0;
        while looked < BATCH {
            let depth = self.levels.len();
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            if let Some((dir, name)) = level.below.pop() {
                self.levels.push(Level::new(dir, name));
            } else if let Some(cookie) = level.cookie {
                // A directory costs as much as some entries.
                looked += 8;
                match list(fs, level.dir, cookie) {
                    Ok(entries) => looked += self.add(fs, entries),
                    Err(error) if depth == 1 && cookie == 0 => return Err(error),
                    Err(_) => {
                        self.missed += 1;
                        level.cookie = None;
                    }
                }
            } else if let Some(all) = self.leave() {
                return Ok(Some(all));
            }
        }
        Ok(None)
    }

    /// Adds a batch of the innermost directory; returns how many entries it has.
    fn add(&mut self, fs: &LocalFs, entries: Vec<DirEntry>) -> usize {
        let looked = entries.len();
        let Some(level) = self.levels.last_mut() else { return 0 };
        level.cookie = entries.last().map(|entry| entry.cookie);
        for entry in entries {
            let DirEntry { name, ino, kind, entry, .. } = entry;
            if matches!(&*name, b"." | b"..") {
                continue;
            }
            let known = entry.and_then(|entry| entry.attr);
            if entry.is_some() {
                fs.forget(ino, 1);
            }
            if kind == libc::S_IFDIR {
                self.counted += 1;
                level.node.own.directories += 1;
                level.below.push((ino, name));
                continue;
            }
            let Some(attr) = known.or_else(|| attributes(fs, ino)) else {
                self.missed += 1;
                continue;
            };
            let remembers = attr.nlink > 1 && self.linked.len() < LINKED_MAX;
            if remembers && !self.linked.insert(ino) {
                continue;
            }
            self.counted += 1;
            level.node.own.files += 1;
            level.node.own.bytes = level.node.own.bytes.saturating_add(attr.blocks * 512);
        }
        looked
    }

    /// Leaves the innermost directory. Returns the first one.
    fn leave(&mut self) -> Option<Node> {
        let Level { mut node, .. } = self.levels.pop()?;
        node.all.add(node.own);
        let depth = self.levels.len();
        if let Some(widest) = self.widest.get(depth) {
            node.narrow(*widest);
        }
        let Some(above) = self.levels.last_mut() else { return Some(node) };
        above.node.all.add(node.all);
        if let Some(widest) = self.widest.get(depth - 1) {
            above.node.largest.push(node);
            if above.node.largest.len() >= 2 * widest {
                above.node.narrow(*widest);
            }
        }
        None
    }
}

/// A batch of a directory. Each entry with attributes counts as a lookup.
fn list(fs: &LocalFs, dir: Ino, cookie: u64) -> Result<Vec<DirEntry>, Errno> {
    let mut entries = Vec::new();
    fs.survey(dir, cookie, &mut |entry| {
        let fits = entries.len() < BATCH;
        if fits {
            entries.push(entry.clone());
        }
        fits
    })?;
    Ok(entries)
}

/// The attributes of a file that was being changed when it was listed.
fn attributes(fs: &LocalFs, ino: Ino) -> Option<Attr> {
    InProcess::default().call(|cx| fs.getattr(cx, ino, None)).ok().map(|(attr, _)| attr)
}

/// The question that begins a walk of the whole volume, or of a directory.
pub fn question(depth: usize, dir: Option<Ino>) -> String {
    format!("{BEGIN}{depth}:{}", dir.unwrap_or(ROOT))
}
