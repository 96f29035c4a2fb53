//! All inodes in a compact table (about 60 bytes each), with what their names say of them.

pub(super) use crate::fsck::tree::{DIRECTORY, kind_bits};
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::keys::{self, Dentry, InodeRecord, Key};
use ferry_journal::{Journal, JournalError};

/// What the repair keeps of one inode.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    pub(super) ino: Ino,
    pub(super) parent: Ino,
    pub(super) size: u64,
    /// The directory that is to name it, if it is a directory; 0: none.
    pub(super) up: Ino,
    pub(super) nlink: u32,
    /// Names that were found for it.
    pub(super) names: u32,
    /// Directories among the names found in it.
    pub(super) subdirs: u32,
    /// Names found in it.
    pub(super) entries: u32,
    pub(super) kind: u8,
    pub(super) orphan: bool,
    /// Its name in `up` was met.
    pub(super) named: bool,
    /// Where a walk upwards from it ends.
    reach: Reach,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Reach {
    #[default]
    Unknown,
    OnThisWalk,
    /// The root, or a directory without a name.
    Known,
}

/// The table, ascending by number.
pub(super) struct Rows(pub(super) Vec<Row>);

impl Rows {
    /// Reads all records, names and orphan keys; orphan keys without an inode go to `stray`,
    /// extents to `extent`.
    pub(super) fn load(
        journal: &Journal,
        stray: &mut dyn FnMut(Ino),
        extent: &mut dyn FnMut(&[u8]),
    ) -> Result<Self, JournalError> {
        let mut rows = Self(Vec::new());
        // What a name leads to may come after it.
        let mut names: Vec<(Ino, Ino)> = Vec::new();
        journal.scan(&keys::inode(0), &keys::inode_end(u64::MAX), &mut |key, value| {
            match keys::parse(key) {
                Some(Key::Inode(ino)) => {
                    if let Ok(record) = InodeRecord::decode(value) {
                        rows.push(ino, &record);
                    }
                }
                Some(Key::Dentry(dir, ..)) => {
                    names.extend(Dentry::decode(value).ok().map(|dentry| (dir, dentry.ino)));
                }
                Some(Key::Extent(..)) => extent(value),
                _ => {}
            }
            true
        })?;
        for (dir, ino) in names {
            rows.count_name(dir, ino);
        }
        journal.scan(&keys::orphan(0), &keys::orphan_end(), &mut |key, _| {
            if let Some(Key::Orphan(ino)) = keys::parse(key) {
                match rows.get(ino) {
                    Some(row) => row.orphan = true,
                    None => stray(ino),
                }
            }
            true
        })?;
        Ok(rows)
    }

    /// Adds an inode with a number above all others.
    pub(super) fn push(&mut self, ino: Ino, record: &InodeRecord) {
        self.0.push(Row {
            ino,
            parent: record.parent,
            size: record.size,
            nlink: record.nlink,
            kind: kind_bits(record.mode),
            ..Row::default()
        });
    }

    pub(super) fn get(&mut self, ino: Ino) -> Option<&mut Row> {
        let at = self.0.binary_search_by_key(&ino, |row| row.ino).ok()?;
        Some(&mut self.0[at])
    }

    pub(super) fn last_ino(&self) -> Ino {
        self.0.last().map_or(ROOT, |row| row.ino)
    }

    /// Counts a name, and decides which directory is a directory's parent: the one that it says, if
    /// that names it, else the first that does.
    fn count_name(&mut self, dir: Ino, ino: Ino) {
        let Some(row) = self.get(ino) else { return };
        row.names += 1;
        let directory = row.kind == DIRECTORY;
        if directory && row.ino != ROOT && (row.up == 0 || row.parent == dir) {
            row.up = dir;
        }
        if let Some(parent) = self.get(dir) {
            parent.entries += 1;
            parent.subdirs += u32::from(directory);
        }
    }

    /// Cuts each circle of directories at the one with the lowest number, which then has no name.
    /// Calls `cut` for each.
    pub(super) fn cut_circles(&mut self, cut: &mut dyn FnMut(Ino)) {
        for start in 0..self.0.len() {
            let mut walk: Vec<usize> = Vec::new();
            let mut at = start;
            while self.0[at].kind == DIRECTORY {
                match self.0[at].reach {
                    Reach::Known => break,
                    Reach::OnThisWalk => {
                        let from = walk.iter().position(|&i| i == at).unwrap_or(0);
                        let Some(&least) = walk[from..].iter().min() else { break };
                        self.0[least].up = 0;
                        cut(self.0[least].ino);
                        break;
                    }
                    Reach::Unknown => {}
                }
                self.0[at].reach = Reach::OnThisWalk;
                walk.push(at);
                let up = self.0[at].up;
                match self.0.binary_search_by_key(&up, |row| row.ino) {
                    Ok(next) if up != 0 => at = next,
                    _ => break,
                }
            }
            for i in walk {
                self.0[i].reach = Reach::Known;
            }
        }
    }
}
