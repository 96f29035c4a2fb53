//! What a client may keep of what it is told, and what a change makes others give back.

use ferry_fs::{Attr, Errno, Ino, ROOT};

use super::apply::Applying;
use crate::message::{LEASED, LEASED_FOUND, Op, Outcome, Place};

/// What became of a lookup.
pub(super) enum Found {
    /// The answer, and what may be kept of it.
    Entry(Outcome, u8),
    /// Others have write leases on these.
    Behind(Vec<Ino>),
}

impl Applying<'_> {
    /// The inode that a request reads, beside what a name means that is looked up.
    pub(super) fn reads(&self, op: &Op) -> Option<Ino> {
        match op {
            Op::Lookup { parent: ino, .. }
            | Op::Getattr { ino }
            | Op::Readlink { ino }
            | Op::Readdir { ino, .. }
            | Op::Fsyncdir { ino, .. }
            | Op::Getxattr { ino, .. }
            | Op::Listxattr { ino } => self.session.inward(*ino),
            Op::Read { fh, .. } | Op::Fsync { fh, .. } | Op::Lseek { fh, .. } => {
                self.session.handle(*fh).map(|open| open.ino)
            }
            _ => None,
        }
    }

    /// A name, and what may be kept of it: the directory's lease covers which inode it means, the inode's own its attributes.
    pub(super) fn look_up(&self, parent: Ino, name: &[u8]) -> Result<Found, Errno> {
        let dir = self.ino(parent)?;
        let name = if parent == ROOT && name == b".." { b"." } else { name };
        let leases = &self.core.leases;
        let id = self.session.number;
        let of_dir = name != b"." && name != b".." && leases.grant(id, dir);
        let mut entry = self.call(|cx| self.fs().lookup(cx, dir, name))?;
        if let Some(attr) = &entry.attr {
            let behind = |ino: &Ino| !leases.is_readable(id, &[*ino]);
            let behind: Vec<Ino> = [dir, attr.ino].into_iter().filter(behind).collect();
            if !behind.is_empty() {
                self.fs().forget(attr.ino, 1);
                return Ok(Found::Behind(behind));
            }
        }
        let mut leased = if of_dir { LEASED } else { 0 };
        if let Some(attr) = &mut entry.attr
            && leases.grant(id, attr.ino)
            // Once more: what it was before the lease may have changed. Its last name may be gone, then the lease covers nothing.
            && let Ok((now, _)) = self.call(|cx| self.fs().getattr(cx, attr.ino, None))
        {
            *attr = now;
            leased |= LEASED_FOUND;
        }
        Ok(Found::Entry(self.entry(entry), leased))
    }

    /// What the client may keep of an inode that it may use.
    pub(super) fn leased(&self, ino: Ino) -> Option<Attr> {
        self.session.inward(self.session.outward(ino))?;
        if !self.core.leases.grant(self.session.number, ino) {
            return None;
        }
        self.attr_now(ino).ok()
    }

    pub(super) fn attr_now(&self, ino: Ino) -> Result<Attr, Errno> {
        let (attr, _) = self.call(|cx| self.fs().getattr(cx, ino, None))?;
        Ok(self.attr(attr))
    }

    pub(super) fn is_empty(&self, dir: Ino) -> bool {
        let mut empty = true;
        let listed = self.call(|cx| {
            self.fs().readdir(cx, dir, 0, 0, false, &mut |entry| {
                empty = *entry.name == *b"." || *entry.name == *b"..";
                empty
            })
        });
        listed.is_ok() && empty
    }

    /// The names that a change takes away from what they mean, which is no directory; the new one of a rename last.
    pub(super) fn names_taken(&self, op: &Op) -> Vec<Place> {
        let place = |dir: &Ino, name: &Vec<u8>| {
            Some(Place { parent: self.session.inward(*dir)?, name: name.clone() })
        };
        let names = match op {
            Op::Unlink { parent, name } if !self.core.is_alone() => [place(parent, name), None],
            Op::Rename { parent, name, new_parent, new_name, flags }
                if !flags.exchange && !self.core.is_alone() =>
            {
                [place(parent, name), place(new_parent, new_name)]
            }
            _ => [None, None],
        };
        names.into_iter().flatten().collect()
    }

    /// The names were taken from these inodes (and their directories are among them): who knows them is told, with his next ping. Not of
    /// directories: programs at work in one that was moved find it by what their kernel knows.
    pub(super) fn names_lost(&self, inos: &[Ino], names: &[Place]) {
        let is_dir = |Place { parent, name }: &Place| {
            self.core.named(*parent, name).is_some_and(|attr| attr.mode & libc::S_IFMT == libc::S_IFDIR)
        };
        if names.is_empty() || matches!(names, [_, new] if is_dir(new)) {
            return;
        }
        self.core.others(self.session).for_each(|other| other.lose_names(inos, names));
    }

    /// The inodes that a change touches, of unlink, rmdir, rename and create also those that the names mean; in order.
    pub(super) fn touched(&self, op: &Op) -> Vec<Ino> {
        let named = |dir: &Ino, name: &[u8]| Some(self.core.named(self.session.inward(*dir)?, name)?.ino);
        let file = |fh: &u64| self.session.handle(*fh).map(|open| open.ino);
        let inward = |ino: &Ino| self.session.inward(*ino);
        let all = match op {
            Op::Setattr { ino, .. } | Op::Setxattr { ino, .. } | Op::Removexattr { ino, .. } => {
                vec![inward(ino)]
            }
            Op::Open { ino, flags, kill_suidgid, .. } if *kill_suidgid || flags & libc::O_TRUNC != 0 => {
                vec![inward(ino)]
            }
            Op::Mknod { parent, .. }
            | Op::Mkdir { parent, .. }
            | Op::Symlink { parent, .. }
            | Op::Tmpfile { parent, .. } => {
                vec![inward(parent)]
            }
            Op::Link { ino, parent, .. } => vec![inward(ino), inward(parent)],
            Op::Unlink { parent, name } | Op::Rmdir { parent, name } | Op::Create { parent, name, .. } => {
                vec![inward(parent), named(parent, name)]
            }
            Op::Rename { parent, name, new_parent, new_name, .. } => {
                vec![inward(parent), inward(new_parent), named(parent, name), named(new_parent, new_name)]
            }
            Op::Write { fh, .. } | Op::Fallocate { fh, .. } => vec![file(fh)],
            Op::Copy { fh_in, fh_out, .. } => vec![file(fh_in), file(fh_out)],
            _ => Vec::new(),
        };
        let mut inos: Vec<Ino> = all.into_iter().flatten().collect();
        inos.sort_unstable();
        inos.dedup();
        inos
    }
}
