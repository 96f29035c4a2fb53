//! Which states a crash may leave, on sequences small enough to say so by hand.

use super::*;
use crate::ops::{Move, Op, Path, Which};

const FILE: Ino = 10;

/// A run in which operation n ends after 10 (n + 1) events.
struct Run {
    model: Model,
    history: History,
}

impl Run {
    fn new() -> Self {
        let model = Model::empty();
        Self { history: History::new(&model), model }
    }

    fn with(ops: &[Op]) -> Self {
        let mut run = Self::new();
        ops.iter().for_each(|op| run.step(op));
        run
    }

    fn step(&mut self, op: &Op) {
        assert!(self.model.outcome(op).is_ok(), "{op} fails");
        let n = self.history.len();
        let effects = self.model.apply(op, n, FILE + n as u64);
        self.history.ended(self.model.tree(), effects, 10 * (n + 1));
        match op {
            Op::Fsync(which, _) => {
                let ino = self.model.which(which).expect("it is there");
                self.history.fsync_answered(ino, &self.model.above(ino));
            }
            Op::FsyncDir(path) => {
                let ino = self.model.resolve(path).expect("it is there");
                self.history.fsync_answered(ino, &self.model.above(ino));
            }
            Op::Sync => self.history.sync_answered(),
            _ => {}
        }
    }

    /// What is there when so many operations are, every file with contents of its own.
    fn found(&self, t: usize, contents: &[(Ino, &[u8])]) -> Observed {
        let contents =
            contents.iter().map(|(ino, bytes)| (*ino, Arc::new(bytes.to_vec()))).collect();
        Observed { tree: self.history.trees[t].clone(), contents, ..Observed::default() }
    }

    fn allows(&self, point: usize, t: usize, contents: &[(Ino, &[u8])]) -> bool {
        self.history.explain(point, &self.found(t, contents)).is_ok()
    }
}

fn path(names: &[u8]) -> Path {
    Path(names.to_vec())
}

fn file(name: u8) -> Which {
    Which::At(path(&[name]))
}

fn create(name: u8) -> Op {
    Op::Create(path(&[name]))
}

#[test]
fn metadata_survives_in_order_and_not_more_than_was_begun() {
    let run = Run::with(&[create(0), create(1), create(2)]);
    assert_eq!(run.history.possible(0), 0..2);
    assert_eq!(run.history.possible(20), 0..4, "the third may be under way");
    for t in 0..4 {
        let files: Vec<_> = (0..t).map(|n| (FILE + n as u64, &[][..])).collect();
        assert!(run.allows(30, t, &files));
        assert_eq!(run.allows(9, t, &files), t <= 1);
    }
    let mut holes = run.found(3, &[]);
    holes.tree.remove(&(FILE + 1));
    assert!(run.history.explain(30, &holes).is_err(), "the second is missing, the third is there");
}

#[test]
fn an_fsync_needs_its_file_and_all_before_it() {
    let run = Run::with(&[create(0), create(1), Op::Fsync(file(0), false), create(2)]);
    assert_eq!(run.history.possible(29), 0..4, "not acknowledged yet");
    assert_eq!(run.history.possible(30), 1..5, "file 0 must be there; nobody asked for file 1");
    let run = Run::with(&[create(0), create(1), Op::FsyncDir(path(&[]))]);
    assert_eq!(run.history.possible(30), 2..4);
}

#[test]
fn an_fsync_needs_the_directories_above() {
    let moved = Op::Rename(path(&[0]), path(&[1]), Move::Replace);
    let run = Run::with(&[
        Op::Mkdir(path(&[0])),
        Op::Create(path(&[0, 0])),
        moved,
        create(2),
        Op::Fsync(Which::At(path(&[1, 0])), false),
    ]);
    assert_eq!(run.history.possible(50).start, 3, "the directory's new name, too");
}

#[test]
fn unsynced_bytes_are_old_or_new_but_never_those_of_another_file() {
    let run = Run::with(&[
        create(0),
        Op::Write(file(0), 0, 4),
        Op::Fsync(file(0), false),
        Op::Write(file(0), 2, 4),
    ]);
    let old = crate::model::pattern(1, 4);
    let new = crate::model::pattern(3, 4);
    let both = [&old[..2], &new[..]].concat();
    let mixed = [&old[..3], &new[1..2]].concat();
    assert!(run.allows(40, 4, &[(FILE, &old)]));
    assert!(run.allows(40, 4, &[(FILE, &both)]));
    assert!(run.allows(40, 4, &[(FILE, &mixed)]), "each byte by itself");
    assert!(
        !run.allows(40, 4, &[(FILE, &[&old[..2], &[0, 0]].concat())]),
        "zeros were never there"
    );
    assert!(!run.allows(40, 4, &[(FILE, &both[..5])]), "a size it never had");
    assert!(!run.allows(40, 4, &[(FILE, &[])]), "what was synced");
    assert!(!run.allows(40, 4, &[(FILE, b"abcd")]), "what nobody wrote");
}

#[test]
fn a_size_is_not_durable_before_its_data() {
    let run =
        Run::with(&[create(0), Op::Write(file(0), 0, 3), Op::Truncate(file(0), 5), create(1)]);
    let data = crate::model::pattern(1, 3);
    let other = (FILE + 3, &[][..]);
    assert!(run.allows(40, 4, &[(FILE, &[&data[..], &[0, 0]].concat()), other]));
    assert!(!run.allows(40, 4, &[(FILE, &[0; 5]), other]), "the first three bytes were never zero");
    assert!(
        !run.allows(40, 4, &[(FILE, &[]), other]),
        "the truncation is older than the other file"
    );
    assert!(run.allows(40, 3, &[(FILE, &[])]), "before the truncation");
}

#[test]
fn truncated_bytes_do_not_reappear() {
    let run = Run::with(&[
        create(0),
        Op::Write(file(0), 0, 4),
        Op::Fsync(file(0), false),
        Op::Truncate(file(0), 1),
        Op::Truncate(file(0), 4),
        create(1),
    ]);
    let old = crate::model::pattern(1, 4);
    let new_file = FILE + 5;
    assert!(run.allows(60, 6, &[(FILE, &[old[0], 0, 0, 0]), (new_file, &[])]));
    assert!(
        !run.allows(60, 6, &[(FILE, &old), (new_file, &[])]),
        "it is older than the other file"
    );
    assert!(run.allows(60, 3, &[(FILE, &old)]));
}

#[test]
fn a_replacing_rename_brings_the_contents_along() {
    let run = Run::with(&[
        create(0),
        create(1),
        Op::Write(file(1), 0, 9),
        Op::Rename(path(&[1]), path(&[0]), Move::Replace),
    ]);
    let new = crate::model::pattern(2, 9);
    assert!(run.allows(40, 4, &[(FILE + 1, &new)]));
    assert!(!run.allows(40, 4, &[(FILE + 1, &[])]), "never empty");
    assert!(run.allows(40, 3, &[(FILE, &[]), (FILE + 1, &[])]), "before the rename");
}

#[test]
fn a_sync_makes_everything_durable() {
    let run = Run::with(&[create(0), Op::Write(file(0), 0, 9), create(1), Op::Sync]);
    assert_eq!(run.history.possible(40), 4..5);
    assert!(!run.allows(40, 4, &[(FILE, &[]), (FILE + 2, &[])]));
}

#[test]
fn times_are_those_of_the_operations_that_survived() {
    let dir = ferry_fs::ROOT;
    let times = |n: i128| Times { modified: Timestamp(n), changed: Timestamp(n) };
    let mut run = Run::new();
    run.history.timed(dir, times(0));
    run.step(&create(0));
    run.history.timed(dir, times(1));
    run.history.timed(FILE, times(1));
    run.step(&Op::Write(file(0), 0, 10));
    run.history.timed(FILE, times(2));
    run.step(&Op::Fsync(file(0), false));
    run.step(&Op::Write(file(0), 0, 10));
    run.history.timed(FILE, times(4));
    let bytes = crate::model::pattern(1, 10);
    let allows = |point: usize, of_dir: i128, of_file: i128| {
        let times = BTreeMap::from([(dir, times(of_dir)), (FILE, times(of_file))]);
        run.history.explain(point, &Observed { times, ..run.found(4, &[(FILE, &bytes)]) }).is_ok()
    };
    assert!(allows(20, 1, 1), "a write before the fsync may not have got there");
    assert!(allows(30, 1, 2) && allows(30, 1, 4), "as of the fsync, or later");
    assert!(!allows(30, 1, 1), "the fsync covered the times");
    assert!(!allows(30, 0, 2) && !allows(30, 2, 2), "a directory's are exactly those that it had");
}
