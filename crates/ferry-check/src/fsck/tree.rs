//! The directory tree as names and link counts give it: one row for each inode, one edge for each
//! name, both compact (a million files take 50 MB), judged once the whole view has been read.

use super::report::{Code, Finding, Findings};
use ferry_fs::api::{Ino, ROOT};
use ferry_fs::keys::InodeRecord;

/// Index of no row.
const NONE: u32 = u32::MAX;

/// What the check keeps of one inode.
struct Row {
    ino: Ino,
    parent: Ino,
    nlink: u32,
    /// Names that were found for it.
    names: u32,
    /// Directories among the names found in it.
    subdirs: u32,
    /// The first directory found that names it.
    up: u32,
    kind: u8,
    orphan: bool,
    has_names: bool,
    reach: Reach,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Unknown,
    OnThisWalk,
    Root,
    Lost,
}

/// A name: from a directory to an inode.
struct Edge {
    ino: Ino,
    dir: u32,
    kind: u8,
}

/// All inodes and names.
#[derive(Default)]
pub(super) struct Tree {
    rows: Vec<Row>,
    edges: Vec<Edge>,
}

/// The type bits of a mode, as a dentry stores them.
pub(super) fn kind_bits(mode: u32) -> u8 {
    ((mode & libc::S_IFMT) >> 12) as u8
}

/// The type of a directory.
pub(super) const DIRECTORY: u8 = (libc::S_IFDIR >> 12) as u8;

fn kind_name(kind: u8) -> &'static str {
    match u32::from(kind) << 12 {
        libc::S_IFREG => "a regular file",
        libc::S_IFDIR => "a directory",
        libc::S_IFLNK => "a symbolic link",
        libc::S_IFIFO => "a FIFO",
        libc::S_IFSOCK => "a socket",
        libc::S_IFCHR => "a character device",
        libc::S_IFBLK => "a block device",
        _ => "of an unknown type",
    }
}

impl Tree {
    /// Adds an inode; they come in ascending order.
    pub(super) fn inode(&mut self, ino: Ino, record: &InodeRecord) {
        if cfg!(any(test, debug_assertions)) {
            assert!(
                self.rows.last().is_none_or(|last| last.ino < ino),
                "the view is scanned in order"
            );
        }
        self.rows.push(Row {
            ino,
            parent: record.parent,
            nlink: record.nlink,
            names: 0,
            subdirs: 0,
            up: NONE,
            kind: kind_bits(record.mode),
            orphan: false,
            has_names: false,
            reach: Reach::Unknown,
        });
    }

    /// Adds a name in the directory whose inode was added last.
    pub(super) fn name(&mut self, ino: Ino, kind: u32) {
        let index = u32::try_from(self.rows.len().saturating_sub(1));
        if let (Some(dir), Ok(index)) = (self.rows.last_mut(), index) {
            dir.has_names = true;
            self.edges.push(Edge { ino, dir: index, kind: kind_bits(kind) });
        }
    }

    /// Notes that `ino` waits to be reclaimed.
    pub(super) fn orphan(&mut self, ino: Ino, findings: &mut Findings) {
        match self.find(ino) {
            Some(i) => self.rows[i].orphan = true,
            None => findings.add(
                Finding::new(
                    Code::OrphanKey,
                    "an inode without a record is marked to be reclaimed",
                )
                .of(ino),
            ),
        }
    }

    /// Number of inodes added so far.
    pub(super) fn inodes(&self) -> u64 {
        self.rows.len() as u64
    }

    /// The highest inode number, 0 where there is none.
    pub(super) fn last_ino(&self) -> Ino {
        self.rows.last().map_or(0, |row| row.ino)
    }

    fn find(&self, ino: Ino) -> Option<usize> {
        self.rows.binary_search_by_key(&ino, |row| row.ino).ok()
    }

    /// The directory that names `ino`, for paths.
    pub(super) fn directory_of(&self, ino: Ino) -> Option<Ino> {
        let up = self.rows[self.find(ino)?].up;
        self.rows.get(up as usize).map(|row| row.ino)
    }

    /// Judges the whole tree.
    pub(super) fn judge(&mut self, findings: &mut Findings) {
        self.join_names(findings);
        for i in 0..self.rows.len() {
            if self.rows[i].kind == DIRECTORY {
                self.walk_up(i, findings);
            }
        }
        match self.find(ROOT) {
            None => findings.add(Finding::new(Code::NoRoot, "there is no inode 1").of(ROOT)),
            Some(i) if self.rows[i].kind != DIRECTORY => {
                findings.add(Finding::new(Code::NoRoot, "inode 1 is not a directory").of(ROOT));
            }
            Some(_) => {}
        }
        for row in &self.rows {
            judge_row(row, findings);
        }
    }

    /// Holds each name against the inode it leads to.
    fn join_names(&mut self, findings: &mut Findings) {
        self.edges.sort_unstable_by_key(|edge| (edge.ino, edge.dir));
        let mut i = 0;
        for edge in &self.edges {
            while i < self.rows.len() && self.rows[i].ino < edge.ino {
                i += 1;
            }
            let (dir, dir_kind) = {
                let row = &self.rows[edge.dir as usize];
                (row.ino, row.kind)
            };
            let Some(row) = self.rows.get_mut(i).filter(|row| row.ino == edge.ino) else {
                let what = format!(
                    "a name in this directory leads to inode {}, which does not exist",
                    edge.ino
                );
                findings.add(Finding::new(Code::DanglingName, what).of(dir));
                continue;
            };
            row.names = row.names.saturating_add(1);
            if row.up == NONE && dir_kind == DIRECTORY {
                row.up = edge.dir;
            }
            if row.kind != edge.kind {
                let what = format!(
                    "the name in directory {dir} says {}, the inode is {}",
                    kind_name(edge.kind),
                    kind_name(row.kind)
                );
                findings.add(Finding::new(Code::DentryKind, what).of(row.ino));
            }
            if row.kind == DIRECTORY {
                if row.parent != dir {
                    let what = format!(
                        "directory {dir} names it, but its parent is said to be {}",
                        row.parent
                    );
                    findings.add(Finding::new(Code::Parent, what).of(row.ino));
                }
                let dir_row = &mut self.rows[edge.dir as usize];
                dir_row.subdirs = dir_row.subdirs.saturating_add(1);
            }
        }
    }

    /// Finds out whether a directory hangs from the root, for itself and all that it hangs from.
    fn walk_up(&mut self, start: usize, findings: &mut Findings) {
        let mut walk: Vec<usize> = Vec::new();
        let mut at = start;
        let verdict = loop {
            match self.rows[at].reach {
                Reach::Unknown => {}
                Reach::OnThisWalk => {
                    let first = walk.iter().position(|&i| i == at).unwrap_or(0);
                    let least = walk[first..].iter().map(|&i| self.rows[i].ino).min().unwrap_or(0);
                    let what = format!(
                        "{} directories contain each other in a circle",
                        walk.len() - first
                    );
                    findings.add(Finding::new(Code::Cycle, what).of(least));
                    break Reach::Lost;
                }
                known => break known,
            }
            self.rows[at].reach = Reach::OnThisWalk;
            walk.push(at);
            if self.rows[at].ino == ROOT {
                break Reach::Root;
            }
            let up = self.rows[at].up;
            if up == NONE {
                break Reach::Lost;
            }
            at = up as usize;
        };
        for i in walk {
            self.rows[i].reach = verdict;
        }
    }
}

/// Holds an inode against the names that lead to it. What hangs below a lost directory is not
/// reported again.
fn judge_row(row: &Row, findings: &mut Findings) {
    let directory = row.kind == DIRECTORY;
    let root = row.ino == ROOT;
    let mut add = |code, what: String| findings.add(Finding::new(code, what).of(row.ino));
    if row.orphan && (row.names > 0 || row.nlink > 0 || root) {
        add(
            Code::OrphanKey,
            format!(
                "it is marked to be reclaimed, but has {} names and a link count of {}",
                row.names, row.nlink
            ),
        );
    } else if row.orphan && directory && row.has_names {
        add(Code::OrphanKey, "a directory marked to be reclaimed is not empty".into());
    }
    if row.names == 0 && !root && !row.orphan {
        let below = if directory && row.has_names { ", nor to what it contains" } else { "" };
        add(Code::Unreachable, format!("no name leads to {}{below}", kind_name(row.kind)));
        return;
    }
    if directory && (row.names > 1 || (root && row.names > 0)) {
        add(Code::DirectoryNames, format!("{} names lead to this directory", row.names));
    }
    let right = match (directory, row.orphan) {
        (true, false) => row.subdirs.saturating_add(2),
        (true, true) => 0,
        (false, _) => row.names,
    };
    if row.nlink != right {
        add(Code::LinkCount, format!("the link count is {}, it should be {right}", row.nlink));
    }
    if root && directory && row.parent != ROOT && row.parent != 0 {
        add(Code::Parent, format!("the root's parent is said to be {}", row.parent));
    }
}
