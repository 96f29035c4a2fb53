//! What is lost is named in the log, by the paths that the client knows.

use ferry_fs::{Ino, ROOT};

use super::change::Pending;
use super::tables::Tables;
use crate::message::{Op, Use};

/// So many changes are named of each loss, and the others counted.
const LINES_MAX: usize = 20;
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

    fn text(&self, tables: &Tables) -> String {
        let to = self.to.as_ref().map(|to| format!(" to {}", to.text(tables)));
        format!("{} {}{}", self.what, self.location.text(tables), to.unwrap_or_default())
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

/// Tells what is lost.
pub(super) fn tell(losses: &[Loss], tables: &Tables) {
    for loss in losses.iter().take(LINES_MAX) {
        tracing::error!(change = loss.text(tables), "lost: a program was told that this was done");
    }
    if losses.len() > LINES_MAX {
        tracing::error!(changes = losses.len() - LINES_MAX, "and so many others are lost");
    }
    if !losses.is_empty() {
        tracing::error!(
            "each program that has these files and directories open hears of it once, from fsync or close; so does `ferry sync`"
        );
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
        let text = |op: &Op, ino| Loss::of(op, ino).text(&tables);
        assert_eq!(text(&Op::Mkdir { parent: 5, name: b"n".to_vec(), mode: 0 }, None), "make /d/n");
        let (name, new_name) = (b"f".to_vec(), b"g".to_vec());
        let rename =
            Op::Rename { parent: 5, name, new_parent: ROOT, new_name, flags: Default::default() };
        assert_eq!(text(&rename, None), "rename /d/f to /g");
        let write =
            Op::Write { fh: 1, offset: 0, data: Vec::new(), append: false, kill_suidgid: false };
        assert_eq!(text(&write, Some(6)), "write /d/f");
        assert_eq!(text(&write, Some(8)), "write (inode 7)/g");
        assert_eq!(Loss::some_of(ROOT).text(&tables), "changes /");
    }
}
