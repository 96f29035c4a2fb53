//! What is lost is named in the log, by the paths that the client knows.

use crate::rt::collections::HashMap;

use ferry_fs::{Ino, ROOT};

use super::change::Pending;
use super::tables::Tables;
use crate::message::{Op, Use};

/// So many files and names are named of each loss, and the others counted.
const LINES_MAX: usize = 10_000;
/// Kinds of changes that a line names.
const KINDS_MAX: usize = 8;
/// Directories above one that are named.
const DEPTH_MAX: usize = 64;

/// A change that is lost.
#[derive(Clone, Debug)]
pub(super) struct Loss {
    what: &'static str,
    location: Location,
    to: Option<Location>,
}

#[derive(Clone, Debug)]
enum Location {
    Inode(Ino),
    Name(Ino, Vec<u8>),
}

impl Loss {
    /// A change, of this inode if it names none.
    pub(super) fn of(op: &Op, ino: Option<Ino>) -> Self {
        let info = op.info();
        let mut names = info.names().map(|(dir, name)| Location::Name(dir, name.to_vec()));
        let named = names.next();
        let ino = info.inodes_with(Use::Opened).next().filter(|_| info.uses != Use::Read).or(ino);
        Self {
            what: info.what,
            location: named.unwrap_or(Location::Inode(ino.unwrap_or(0))),
            to: names.next(),
        }
    }

    /// A change, with the inode that it writes to or else the first that it touches.
    pub(super) fn of_change(pending: &Pending) -> Self {
        Self::of(&pending.op, pending.first_file().or(pending.touched.first().copied()))
    }

    /// Changes of this inode, which are not known one by one.
    pub(super) fn some_of(ino: Ino) -> Self {
        Self { what: "changes", location: Location::Inode(ino), to: None }
    }

    /// The file or the name; both, if it gets another one.
    fn path(&self, tables: &Tables) -> String {
        let to = self.to.as_ref().map(|to| format!(" to {}", to.text(tables)));
        format!("{}{}", self.location.text(tables), to.unwrap_or_default())
    }
}

/// What is lost of one file or name.
struct Line {
    path: String,
    /// What the changes were, each kind once.
    kinds: Vec<&'static str>,
    changes: usize,
}

impl Line {
    fn text(&self) -> String {
        format!("{} {}", self.kinds.join(", "), self.path)
    }
}

/// What the log says of a loss.
pub(super) struct Report {
    lines: Vec<Line>,
    /// Changes of files and names that have no line.
    others: usize,
}

impl Report {
    /// Of these changes, in their order, by the paths that the client knows now.
    pub(super) fn of(losses: &[Loss], tables: &Tables) -> Self {
        let mut at: HashMap<String, usize> = HashMap::default();
        let mut report = Self { lines: Vec::new(), others: 0 };
        for loss in losses {
            let path = loss.path(tables);
            let line = match at.get(&path) {
                Some(line) => *line,
                None if report.lines.len() == LINES_MAX => {
                    report.others += 1;
                    continue;
                }
                None => {
                    at.insert(path.clone(), report.lines.len());
                    report.lines.push(Line { path, kinds: Vec::new(), changes: 0 });
                    report.lines.len() - 1
                }
            };
            let line = &mut report.lines[line];
            line.changes += 1;
            if !line.kinds.contains(&loss.what) && line.kinds.len() < KINDS_MAX {
                line.kinds.push(loss.what);
            }
        }
        report
    }

    /// Writes it to the log. No lock should be held: there may be many lines.
    pub(super) fn log(&self) {
        for line in &self.lines {
            let (change, changes) = (line.text(), line.changes);
            tracing::error!(change, changes, "lost: a program was told that this was done");
        }
        if self.others > 0 {
            tracing::error!(changes = self.others, "and so many of other files are lost");
        }
        if !self.lines.is_empty() {
            tracing::error!(
                "each program that has these files and directories open hears of it once, from fsync or close; so does `ferry sync`"
            );
        }
    }
}

impl Location {
    fn text(&self, tables: &Tables) -> String {
        let (mut above, mut path) = match self {
            Self::Inode(ino) => (*ino, String::new()),
            Self::Name(dir, name) => (*dir, format!("/{}", String::from_utf8_lossy(name))),
        };
        for _ in 0..DEPTH_MAX {
            match tables.names.get(&above) {
                _ if above == ROOT => return if path.is_empty() { "/".into() } else { path },
                Some((dir, name)) => {
                    path = format!("/{}{path}", String::from_utf8_lossy(name));
                    above = *dir;
                }
                None => break,
            }
        }
        format!("(inode {above}){path}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_reported_with_the_known_part_of_its_path() {
        let mut tables = Tables::default();
        tables.names.insert(5, (ROOT, b"d".to_vec()));
        tables.names.insert(6, (5, b"f".to_vec()));
        tables.names.insert(8, (7, b"g".to_vec()));
        let text = |op: &Op, ino| Report::of(&[Loss::of(op, ino)], &tables).lines[0].text();
        assert_eq!(text(&Op::Mkdir { parent: 5, name: b"n".to_vec(), mode: 0 }, None), "make /d/n");
        let (name, new_name) = (b"f".to_vec(), b"g".to_vec());
        let rename =
            Op::Rename { parent: 5, name, new_parent: ROOT, new_name, flags: Default::default() };
        assert_eq!(text(&rename, None), "rename /d/f to /g");
        let write =
            Op::Write { fh: 1, offset: 0, data: Vec::new(), append: false, kill_suidgid: false };
        assert_eq!(text(&write, Some(6)), "write /d/f");
        assert_eq!(text(&write, Some(8)), "write (inode 7)/g");
        assert_eq!(Report::of(&[Loss::some_of(ROOT)], &tables).lines[0].text(), "changes /");
    }

    #[test]
    fn each_lost_file_is_named_once_and_beyond_a_bound_they_are_counted() {
        let mut tables = Tables::default();
        let files = LINES_MAX as Ino + 5;
        let name = |i: Ino| format!("f{i}").into_bytes();
        (0..files).for_each(|i| drop(tables.names.insert(100 + i, (ROOT, name(i)))));
        let make = |i| Op::Mknod { parent: ROOT, name: name(i), mode: 0, rdev: 0 };
        let write =
            Op::Write { fh: 1, offset: 0, data: Vec::new(), append: false, kill_suidgid: false };
        let made = (0..files).map(|i| Loss::of(&make(i), None));
        let written = (0..files).flat_map(|i| [i, i]).map(|i| Loss::of(&write, Some(100 + i)));
        let report = Report::of(&made.chain(written).collect::<Vec<_>>(), &tables);
        assert_eq!(report.lines.len(), LINES_MAX);
        for (i, line) in report.lines.iter().enumerate() {
            assert_eq!((line.text(), line.changes), (format!("make, write /f{i}"), 3));
        }
        assert_eq!(report.others, 5 * 3);
    }
}
