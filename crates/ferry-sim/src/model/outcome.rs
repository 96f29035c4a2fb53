//! What an operation will do, before it is done.

use super::Outcome::{Done, Fails, Skip};
use super::{Kind, Model, Outcome, TMPFILE, xattr_name};
use crate::ops::{FILE_MAX, Move, Op, Path, Which};
use ferry_fs::Ino;

/// Done, or without meaning here.
const fn done_if(meaningful: bool) -> Outcome {
    if meaningful { Done } else { Skip }
}

impl Model {
    /// What `op` will do in this state.
    pub fn outcome(&self, op: &Op) -> Outcome {
        self.judge(op).unwrap_or(Outcome::Skip)
    }

    /// `None`: no meaning here.
    fn judge(&self, op: &Op) -> Option<Outcome> {
        let free = |path: &Path| {
            let (dir, name) = self.parent(path)?;
            Some(if self.nodes[&dir].entries.contains_key(&name) {
                Fails(libc::EEXIST)
            } else {
                Done
            })
        };
        Some(match op {
            Op::Create(path) | Op::Mkdir(path) | Op::Symlink(path, _) | Op::Fifo(path) => {
                free(path)?
            }
            Op::Link(from, to) => {
                let from = self.resolve(from)?;
                match (free(to)?, self.nodes[&from].kind) {
                    (Done, Kind::Dir) => Fails(libc::EPERM),
                    (_, Kind::Dir) => Skip,
                    (outcome, _) => outcome,
                }
            }
            Op::LinkHeld(slot, to) => {
                let from = self.held(*slot)?;
                // A file whose last name was removed does not exist for link(2), unless it never
                // had one.
                if self.nodes[&from].nlink == 0 && !self.nodes[&from].xattrs.contains_key(TMPFILE) {
                    return None;
                }
                free(to)?
            }
            Op::Unlink(path) => {
                let (dir, name) = self.parent(path)?;
                match self.nodes[&dir].entries.get(&name).map(|ino| self.nodes[ino].kind) {
                    None => Fails(libc::ENOENT),
                    Some(Kind::Dir) => Fails(libc::EISDIR),
                    Some(_) => Done,
                }
            }
            Op::Rmdir(path) => {
                let (dir, name) = self.parent(path)?;
                match self.nodes[&dir].entries.get(&name).map(|ino| &self.nodes[ino]) {
                    None => Fails(libc::ENOENT),
                    Some(node) if node.kind != Kind::Dir => Fails(libc::ENOTDIR),
                    Some(node) if !node.entries.is_empty() => Fails(libc::ENOTEMPTY),
                    Some(_) => Done,
                }
            }
            Op::Rename(from, to, how) => self.judge_rename(from, to, *how)?,
            op => self.judge_inode(op)?,
        })
    }

    /// Operations that change no name.
    fn judge_inode(&self, op: &Op) -> Option<Outcome> {
        let kind = |path: &Path| Some(self.nodes[&self.resolve(path)?].kind);
        Some(match op {
            Op::Write(which, offset, len) => self.fits(which, offset + len)?,
            Op::Append(which, len) => {
                self.fits(which, self.contents[&self.which(which)?].len() as u64 + len)?
            }
            Op::Truncate(which, size) => self.fits(which, *size)?,
            Op::Fallocate(which, _, offset, len) => self.fits(which, offset + len)?,
            Op::Read(which, ..) | Op::Fsync(which, _) => {
                self.which(which)?;
                Done
            }
            Op::SetXattr(path, ..) => done_if(matches!(kind(path)?, Kind::File | Kind::Dir)),
            Op::RemoveXattr(path, n) => {
                let node = &self.nodes[&self.resolve(path)?];
                match node.kind {
                    Kind::File | Kind::Dir if node.xattrs.contains_key(&xattr_name(*n)) => Done,
                    Kind::File | Kind::Dir => Fails(libc::ENODATA),
                    _ => Skip,
                }
            }
            Op::Chmod(path, _) => done_if(kind(path)? != Kind::Symlink),
            Op::Hold(path, slot) => {
                done_if(kind(path)? == Kind::File && self.held(*slot).is_none())
            }
            Op::HoldTmp(path, slot) => {
                done_if(kind(path)? == Kind::Dir && self.held(*slot).is_none())
            }
            Op::Release(slot) => {
                self.held(*slot)?;
                Done
            }
            Op::FsyncDir(path) => done_if(kind(path)? == Kind::Dir),
            Op::Sync | Op::Trim | Op::Tick(_) => Done,
            _ => unreachable!("judged by its names"),
        })
    }

    fn fits(&self, which: &Which, end: u64) -> Option<Outcome> {
        self.which(which)?;
        (end <= FILE_MAX).then_some(Outcome::Done)
    }

    fn judge_rename(&self, from: &Path, to: &Path, how: Move) -> Option<Outcome> {
        let (from_dir, from_name) = self.parent(from)?;
        let (to_dir, to_name) = self.parent(to)?;
        let source = self.nodes[&from_dir].entries.get(&from_name).copied();
        let target = self.nodes[&to_dir].entries.get(&to_name).copied();
        let Some(source) = source else { return Some(Fails(libc::ENOENT)) };
        let is_dir = |ino: Ino| self.nodes[&ino].kind == Kind::Dir;
        let below = |dir: Ino, ino: Ino| is_dir(ino) && self.above(dir).contains(&ino);
        if below(to_dir, source) || target.is_some_and(|target| below(from_dir, target)) {
            // Into itself, or over what contains it: which of two errors is right differs by kernel
            // path.
            return Some(Skip);
        }
        Some(match (how, target) {
            (Move::NoReplace, Some(_)) => Fails(libc::EEXIST),
            (Move::Exchange, None) => Fails(libc::ENOENT),
            (Move::Replace, Some(target)) if target != source => {
                match (is_dir(source), is_dir(target)) {
                    (true, false) => Fails(libc::ENOTDIR),
                    (false, true) => Fails(libc::EISDIR),
                    (true, true) if !self.nodes[&target].entries.is_empty() => {
                        Fails(libc::ENOTEMPTY)
                    }
                    _ => Done,
                }
            }
            _ => Done,
        })
    }
}
