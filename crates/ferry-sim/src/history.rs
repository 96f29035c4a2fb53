//! What a run did and when, and which states a crash may leave of it.
//!
//! The contract (`docs/semantics.md`), as this file judges it. There is a number T of operations
//! such that
//! * names, attributes and link counts are exactly those after the first T operations (metadata
//!   survives in order);
//! * T is not below the last change of anything that a completed fsync was asked for, nor above
//!   what was begun;
//! * times of everything but files are exactly those after T operations; a file's are some that it
//!   had since its last completed fsync;
//! * each file holds what it may hold after T operations. Since its last completed fsync (or since
//!   it replaced another file by `rename`, or was made) writes may or may not have reached the
//!   device, each byte by itself, but every byte was at some time at that offset of the file, a
//!   size is one that the file had or whole blocks on the way to it, and a truncation has its place
//!   in the order;
//! * so bytes that were never written are never shown, nor zeros where the program saw data from
//!   the first moment on.

use crate::model::{Change, Contents, Effects, Kind, Model, Tree};
use crate::ops::{COMMIT_INTERVAL_MS, Op};
use ferry_fs::keys::BLOCK;
use ferry_fs::{Ino, Timestamp};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

/// An answer that guarantees something.
#[derive(Clone, Debug)]
struct Answered {
    /// Events of the device's trace when it was given.
    given: usize,
    what: Guarantee,
}

/// What must survive a crash once an fsync is answered.
#[derive(Clone, Debug)]
pub struct Guarantee {
    /// The operation's number.
    op: usize,
    /// So many operations' metadata survive.
    metadata: usize,
    /// Whose contents survive; `None`: all; [`NOBODY`]: none.
    file: Option<Ino>,
}

/// No file has this number.
const NOBODY: Ino = 0;

/// A run of operations from a known state.
#[derive(Default)]
pub struct History {
    start: Contents,
    /// The tree after so many operations.
    trees: Vec<Tree>,
    /// Events of the device's trace when operation n had ended.
    ends: Vec<usize>,
    changes: BTreeMap<Ino, Vec<(usize, Change)>>,
    /// For each inode the number of operations up to its last change.
    last_change: BTreeMap<Ino, usize>,
    /// For each inode the number of operations up to the last change of one of its names.
    last_name: BTreeMap<Ino, usize>,
    answers: Vec<Answered>,
    /// Inode numbers that programs were told, and by which operation.
    seen: BTreeMap<Ino, usize>,
    /// For each inode its times after so many operations, where they changed.
    times: BTreeMap<Ino, Vec<(usize, Times)>>,
    /// After more operations than these nobody knows the times.
    timed_until: usize,
}

/// Times that a program sees, but those of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Of the contents.
    pub modified: Timestamp,
    /// Of the inode.
    pub changed: Timestamp,
}

/// What was found on a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Names and attributes.
    pub tree: Tree,
    /// Contents of each file.
    pub contents: Contents,
    /// Times of each inode.
    pub times: BTreeMap<Ino, Times>,
}

impl History {
    /// Starts from a state that is durable already.
    pub fn new(start: &Model) -> Self {
        Self {
            start: start.all_contents(),
            trees: vec![start.tree()],
            timed_until: usize::MAX,
            ..Self::default()
        }
    }

    /// An inode has these times after the operations so far.
    pub fn timed(&mut self, ino: Ino, times: Times) {
        self.times.entry(ino).or_default().push((self.ends.len(), times));
    }

    /// What the next operation does to times cannot be seen.
    pub fn times_unknown(&mut self) {
        self.timed_until = self.timed_until.min(self.ends.len());
    }

    /// The operation that ends next was told the number of an inode that it made; `false`: another
    /// was, too.
    pub fn saw(&mut self, ino: Ino) -> bool {
        self.seen.insert(ino, self.ends.len()).is_none()
    }

    /// Inode numbers that programs had been told when `point` events of the trace had come.
    pub fn seen_by(&self, point: usize) -> impl Iterator<Item = Ino> + '_ {
        let told = move |op: usize| self.ends.get(op).is_some_and(|end| *end <= point);
        self.seen.iter().filter(move |(_, op)| told(**op)).map(|(ino, _)| *ino)
    }

    /// Operations so far.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Nothing was done yet.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// An operation has ended; `trace` counts the device's events then.
    pub fn ended(&mut self, tree: Tree, effects: Effects, trace: usize) {
        let n = self.ends.len();
        for ino in effects.touched {
            self.last_change.insert(ino, n + 1);
        }
        for ino in effects.named {
            self.last_name.insert(ino, n + 1);
        }
        if let Some((ino, change)) = effects.contents {
            self.changes.entry(ino).or_default().push((n, change));
        }
        self.trees.push(tree);
        self.ends.push(trace);
    }

    /// The operation that ended last was a completed fsync of `ino`; `above` are the directories it
    /// hangs from, itself among them.
    pub fn fsync_answered(&mut self, ino: Ino, above: &[Ino]) {
        let guarantee = self.guarantee(ino, above);
        self.answered(guarantee, self.ends[self.ends.len() - 1]);
    }

    /// What must survive once the fsync that ended last is answered; the answer comes later.
    pub fn guarantee(&self, ino: Ino, above: &[Ino]) -> Guarantee {
        let changed = self.last_change.get(&ino).copied().unwrap_or(0);
        let names =
            above.iter().filter_map(|dir| self.last_name.get(dir)).max().copied().unwrap_or(0);
        Guarantee { op: self.ends.len() - 1, metadata: changed.max(names), file: Some(ino) }
    }

    /// What was asked for is answered when the device's trace has so many events.
    pub fn answered(&mut self, what: Guarantee, given: usize) {
        // In the order in which they were asked for: a later answer may be to an earlier question.
        let at = self.answers.partition_point(|answer| answer.what.op <= what.op);
        self.answers.insert(at, Answered { given, what });
    }

    /// The operation that ended last made everything durable.
    pub fn sync_answered(&mut self) {
        self.answer(self.ends.len(), None);
    }

    /// After the operation that ended last, all metadata so far is durable (the commit interval has
    /// passed).
    pub fn commit_interval_passed(&mut self) {
        self.answer(self.ends.len(), Some(NOBODY));
    }

    /// The operation that ended last was `op`, and has succeeded; `synced` is the inode that it
    /// made durable.
    pub(crate) fn op_answered(&mut self, op: &Op, synced: Option<Ino>, model: &Model) {
        match (synced, op) {
            (Some(ino), _) => self.fsync_answered(ino, &model.above(ino)),
            (None, Op::Sync) => self.sync_answered(),
            (None, Op::Tick(ms)) if *ms >= COMMIT_INTERVAL_MS => self.commit_interval_passed(),
            _ => {}
        }
    }

    fn answer(&mut self, metadata: usize, file: Option<Ino>) {
        let op = self.ends.len() - 1;
        self.answered(Guarantee { op, metadata, file }, self.ends[op]);
    }

    /// The numbers T that a crash after `point` events of the trace leaves open.
    pub fn possible(&self, point: usize) -> Range<usize> {
        let given = self.answers.iter().filter(|answer| answer.given <= point);
        let least = given.map(|answer| answer.what.metadata).max().unwrap_or(0);
        // Operations that ended, and the one that was under way.
        let begun = self.ends.iter().take_while(|end| **end <= point).count() + 1;
        least..begun.min(self.ends.len()) + 1
    }

    /// Whether `found` is what a crash after `point` events of the trace may leave; the T that
    /// explains it, or what is wrong.
    pub fn explain(&self, point: usize, found: &Observed) -> Result<usize, String> {
        let possible = self.possible(point);
        let mut why = String::new();
        for t in possible.clone().rev() {
            if self.trees[t] != found.tree {
                continue;
            }
            match self
                .explain_times(point, t, found)
                .and_then(|()| self.explain_contents(point, t, found))
            {
                Ok(()) => return Ok(t),
                Err(reason) => why = format!("with the metadata of {t} operations: {reason}"),
            }
        }
        if why.is_empty() {
            let known = (0..self.trees.len()).rev().find(|t| self.trees[*t] == found.tree);
            why = match known {
                Some(t) => format!("the metadata is that of {t} operations"),
                None => format!(
                    "the metadata was never that; against {} operations: {}",
                    possible.end - 1,
                    difference(&self.trees[possible.end - 1], &found.tree)
                ),
            };
        }
        Err(format!(
            "between {} and {} operations must be there: {why}",
            possible.start,
            possible.end - 1
        ))
    }

    fn explain_times(&self, point: usize, t: usize, found: &Observed) -> Result<(), String> {
        // A history that was told no times compares none.
        if t > self.timed_until || self.times.is_empty() {
            return Ok(());
        }
        for (ino, times) in &found.times {
            let known = self.times.get(ino).map_or(&[][..], |known| known);
            let known = &known[..known.iter().take_while(|(n, _)| *n <= t).count()];
            let is_file = found.tree.get(ino).is_some_and(|node| node.kind == Kind::File);
            let least = if is_file { self.contents_durable_after(*ino, point) } else { usize::MAX };
            let since = known.iter().take_while(|(n, _)| *n <= least).count().saturating_sub(1);
            let may = &known[since..];
            let modified = may.iter().any(|(_, may)| may.modified == times.modified);
            if !(modified && may.iter().any(|(_, may)| may.changed == times.changed)) {
                return Err(format!("inode {ino} has {times:?}, it may have one of {may:?}"));
            }
        }
        Ok(())
    }

    /// Operations up to the last one that made all of a file durable before `point`.
    fn contents_durable_after(&self, ino: Ino, point: usize) -> usize {
        let given = self.answers.iter().filter(|answer| answer.given <= point);
        let given = given.map(|answer| &answer.what);
        given.filter(|p| p.file.is_none_or(|file| file == ino)).map(|p| p.op + 1).max().unwrap_or(0)
    }

    fn explain_contents(&self, point: usize, t: usize, found: &Observed) -> Result<(), String> {
        for (ino, bytes) in &found.contents {
            let possible = Possible::of(self, *ino, point, t);
            possible.explain(bytes).map_err(|reason| format!("inode {ino}: {reason}"))?;
        }
        Ok(())
    }
}

/// What a file may hold.
struct Possible {
    versions: Vec<Version>,
}

#[derive(Clone)]
struct Version {
    bytes: Arc<Vec<u8>>,
    /// Data was here that was lost: zeros in its place would be a size without its data.
    lost: Vec<Range<usize>>,
}

impl Version {
    fn new(bytes: Arc<Vec<u8>>) -> Self {
        Self { bytes, lost: Vec::new() }
    }

    fn allows(&self, at: usize, byte: u8) -> bool {
        self.bytes.get(at) == Some(&byte) && !self.lost.iter().any(|range| range.contains(&at))
    }

    /// The same after a truncation to `now.len()` when the program saw `before` bytes.
    fn resized(&self, before: usize, now: &[u8]) -> Self {
        let mut bytes = (*self.bytes).clone();
        let mut lost = self.lost.clone();
        if now.len() > before && bytes.len() < before {
            lost.push(bytes.len()..before);
        }
        bytes.resize(if now.len() > before { now.len() } else { bytes.len().min(now.len()) }, 0);
        Self { bytes: Arc::new(bytes), lost }
    }
}

impl Possible {
    fn of(history: &History, ino: Ino, point: usize, t: usize) -> Self {
        let mut now = history.start.get(&ino).cloned().unwrap_or_default();
        let mut versions = vec![Version::new(now.clone())];
        let mut answers = history
            .answers
            .iter()
            .filter(|answer| answer.given <= point)
            .map(|answer| &answer.what)
            .filter(|answer| answer.file.is_none_or(|file| file == ino))
            .peekable();
        let changes = history.changes.get(&ino).map_or(&[][..], |changes| changes);
        for (n, change) in changes.iter().filter(|(n, _)| *n < t) {
            while answers.next_if(|answer| answer.op < *n).is_some() {
                versions = vec![Version::new(now.clone())];
            }
            match change {
                Change::Written(bytes) => {
                    now = bytes.clone();
                    versions.push(Version::new(now.clone()));
                }
                Change::Resized(bytes) => {
                    versions =
                        versions.iter().map(|version| version.resized(now.len(), bytes)).collect();
                    now = bytes.clone();
                    versions.push(Version::new(now.clone()));
                }
                Change::Replaced => versions = vec![Version::new(now.clone())],
            }
        }
        if answers.next().is_some() {
            versions = vec![Version::new(now)];
        }
        Self { versions }
    }

    fn explain(&self, found: &[u8]) -> Result<(), String> {
        if self.versions.iter().any(|version| version.lost.is_empty() && *version.bytes == found) {
            return Ok(());
        }
        let sizes: Vec<_> = self.versions.iter().map(|version| version.bytes.len()).collect();
        // Much data is written back in chunks of whole blocks, front to back.
        let between =
            sizes.iter().min() < Some(&found.len()) && sizes.iter().max() > Some(&found.len());
        let part = between && found.len().is_multiple_of(BLOCK as usize);
        if !sizes.contains(&found.len()) && !part {
            return Err(format!("it has {} bytes, it may have one of {sizes:?}", found.len()));
        }
        let wrong = |(at, byte): &(usize, &u8)| {
            !self.versions.iter().any(|version| version.allows(*at, **byte))
        };
        match found.iter().enumerate().find(wrong) {
            None => Ok(()),
            Some((at, byte)) => {
                let may: Vec<_> =
                    self.versions.iter().map(|version| version.bytes.get(at)).collect();
                Err(format!("byte {at} of {} is {byte:#x}, it may be one of {may:x?}", found.len()))
            }
        }
    }
}

/// Whether `found` is exactly the state of the model.
pub fn compare(model: &Model, found: &Observed) -> Result<(), String> {
    if model.tree() != found.tree {
        let what = difference(&model.tree(), &found.tree);
        return Err(format!("names or attributes differ:{what}"));
    }
    for (ino, bytes) in model.all_contents() {
        let other = found.contents.get(&ino).map_or(&[][..], |other| other);
        if *bytes != other {
            let at = bytes.iter().zip(other).position(|(a, b)| a != b);
            return Err(format!(
                "inode {ino}: {} bytes expected, {} found, first difference at {at:?}",
                bytes.len(),
                other.len()
            ));
        }
    }
    Ok(())
}

/// How two trees differ, for people.
pub fn difference(expected: &Tree, found: &Tree) -> String {
    let mut out = String::new();
    for ino in expected.keys().chain(found.keys()).collect::<std::collections::BTreeSet<_>>() {
        match (expected.get(ino), found.get(ino)) {
            (Some(e), Some(f)) if e == f => Ok(()),
            (Some(e), Some(f)) => {
                write!(out, "\n  inode {ino}: {} expected, {} found", brief(e), brief(f))
            }
            (Some(e), None) => write!(out, "\n  inode {ino}: {} missing", brief(e)),
            (None, f) => {
                write!(out, "\n  inode {ino}: {} too much", f.map(|f| brief(f)).unwrap_or_default())
            }
        }
        .expect("a string takes any write");
    }
    out
}

fn brief(node: &crate::model::Node) -> String {
    let names: Vec<_> =
        node.entries.iter().map(|(name, ino)| format!("{}={ino}", (name[0] as char))).collect();
    let xattrs: Vec<_> = node
        .xattrs
        .iter()
        .map(|(name, value)| format!("{}:{}", name.escape_ascii(), value.len()))
        .collect();
    format!(
        "{:?} mode {:o} nlink {} target {} {names:?} {xattrs:?}",
        node.kind,
        node.mode,
        node.nlink,
        node.target.len()
    )
}

#[cfg(test)]
mod tests;
