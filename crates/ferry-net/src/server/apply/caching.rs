//! What a client may cache of an answer, and which inodes an operation touches.

use ferry_fs::{Attr, Errno, Ino, ROOT};

use super::applying::Applying;
use crate::message::{DirName, LEASED, LEASED_FOUND, Naming, Op, Outcome, Use};

/// What became of a lookup.
pub(super) enum Found {
    /// The answer, and what the client may cache of it.
    Entry(Outcome, u8),
    /// Others have write leases on these.
    Behind(Vec<Ino>),
}

impl Applying<'_> {
    /// The inode that a request reads, besides what a name means that it looks up.
    pub(super) fn reads(&self, op: &Op) -> Option<Ino> {
        let info = op.info();
        let file = || self.session.handle(info.from?).map(|open| open.ino);
        info.inodes_with(Use::Read)
            .next()
            .and_then(|ino| self.session.volume_ino(ino))
            .or_else(file)
    }

    /// Looks a name up. The directory's lease covers which inode the name means, the inode's own
    /// lease covers its attributes.
    pub(super) fn look_up(&self, parent: Ino, name: &[u8]) -> Result<Found, Errno> {
        let dir = if name == b"." { self.ino_of_handle(parent)? } else { self.ino(parent)? };
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
            // Read again under the lease: the attributes may have changed before. If the last name
            // was removed meanwhile, the lease covers nothing.
            && let Ok((now, _)) = self.call(|cx| self.fs().getattr(cx, attr.ino, None))
        {
            *attr = now;
            leased |= LEASED_FOUND;
        }
        // A file that was asked for by its number alone keeps the directory in which it was found
        // before.
        let found_in = if name == b"." { self.session.where_found(dir) } else { dir };
        Ok(Found::Entry(self.entry(found_in, entry), leased))
    }

    /// No client acknowledges extended attributes early, so a request for them need not recall the
    /// lease of an inode that has none. (`ls -l` asks twice for each file, and would wait each time
    /// for one that is being written.)
    pub(super) fn reads_nothing_leased(&self, op: &Op, ino: Ino) -> bool {
        matches!(op, Op::Getxattr { .. } | Op::Listxattr { .. })
            && self.fs().is_plain(ino) == Ok(true)
    }

    /// An inode by its number alone, which a file handle gives (of an NFS server, for example): the
    /// kernel may have forgotten it. A session that may use the whole volume may have it. For any
    /// other session the server could not tell whether a file lies inside, because files do not
    /// know their directories.
    fn ino_of_handle(&self, ino: Ino) -> Result<Ino, Errno> {
        let reaches_all = self.session.bounds.is_none() && self.session.peer.limits.is_none();
        self.ino(ino).or_else(|errno| if reaches_all { Ok(ino) } else { Err(errno) })
    }

    /// The attributes of an inode, if the client may cache them.
    pub(super) fn leased(&self, ino: Ino) -> Option<Attr> {
        self.session.volume_ino(self.session.client_ino(ino))?;
        if !self.core.leases.grant(self.session.number, ino) {
            return None;
        }
        self.attr_now(ino).ok()
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

    /// The names that a change takes away from inodes that are no directories; the new name of a
    /// rename comes last.
    pub(super) fn names_taken(&self, op: &Op) -> Vec<DirName> {
        let info = op.info();
        let taken =
            matches!(info.naming, Naming::Removes | Naming::Moves | Naming::MovesLeavingWhiteout);
        if !taken || self.core.is_alone() {
            return Vec::new();
        }
        let dir_name = |(dir, name): (Ino, &[u8])| {
            Some(DirName { parent: self.session.volume_ino(dir)?, name: name.to_vec() })
        };
        info.names().filter_map(dir_name).collect()
    }

    /// The names were taken from these inodes (their directories are among them). Sessions that
    /// know them are told with their next ping. Not for directories: programs in a directory that
    /// was moved find it by what their kernel knows.
    pub(super) fn names_lost(&self, inos: &[Ino], names: &[DirName]) {
        let is_dir = |DirName { parent, name }: &DirName| {
            self.core
                .named(*parent, name)
                .is_some_and(|attr| attr.mode & libc::S_IFMT == libc::S_IFDIR)
        };
        if names.is_empty() || matches!(names, [_, new] if is_dir(new)) {
            return;
        }
        self.core.others(self.session).for_each(|other| other.names_removed(inos, names));
    }

    /// The inodes that a change reads or writes, in order. If it touches what its names mean, these
    /// inodes are among them.
    pub(in crate::server) fn touched(&self, op: &Op) -> Vec<Ino> {
        let info = op.info();
        let named = |(dir, name): (Ino, &[u8])| {
            Some(self.core.named(self.session.volume_ino(dir)?, name)?.ino)
        };
        let file = |fh: u64| self.session.handle(fh).map(|open| open.ino);
        let inodes = info.inodes_with(Use::Read).filter_map(|ino| self.session.volume_ino(ino));
        let targets = info.names().filter(|_| info.naming.touches_targets()).filter_map(named);
        let mut inos: Vec<Ino> =
            inodes.chain(info.handles().filter_map(file)).chain(targets).collect();
        inos.sort_unstable();
        inos.dedup();
        inos
    }
}
